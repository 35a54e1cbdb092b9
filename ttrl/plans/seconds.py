"""Plan the seconds of each phase: rough figures, replaced by measurements if there are any.

Rough figures come from the plan's FLOPs and the usual share of the machine's matrix product speed
in such programs. They are within a factor of two or three for models large enough to keep a machine
busy; for tiny ones fixed costs dominate. Phases have the names of the columns "seconds" of
metrics.jsonl.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ttrl.configs import GRPOConfig
from ttrl.configs.run import TrainConfig
from ttrl.plans.iteration_work import PlannedFlops, Work
from ttrl.plans.measured import Seconds
from ttrl.plans.memory_plan import PARKED, SLEEPING, PlannedMemory, argument, parks
from ttrl.plans.plan_machine import Machine
from ttrl.text import si_spaced

# On CPU: measured with models of 1 and 30 million parameters on two cores. On CUDA: on an H100 0.24
# to 0.39 in training; sampling is assumed, from others' published figures.
_TRAINING_SHARE = {False: 0.4, True: 0.35}
_SAMPLING_SHARE = {False: 0.25, True: 0.35}
_BANDWIDTH_SHARE = 0.6
_SECONDS_OF_TOKEN = 1 / 7000  # of the server's own work for a sampled token, on CPU
_SECONDS_OF_STEP = {False: 0.004, True: 0.008}  # of one step of the server, for any batch
_SECONDS_OF_UPDATE = 0.01
_OFFLOADING_SPEED = 0.9  # of a trainer with activations in the host's memory; on an H100
_DISK = 1e9  # bytes/s of checkpoints, gathered, written and synced
# Bytes/s of a process copying and hashing weights; CUDA's host: four threads, assumed.
_HELD_OUT = {False: 1e9, True: 4e9}
# Bytes/s of weights that a server loads, compares and proves with the canary. CPU: 4 to 6 s at 0.5
# GB, from memory during file writes, and from files. CUDA: assumed.
_SYNCED = {False: 1.2e8, True: 4e9}
# Bytes/s between a GPU and its host's memory; assumed, with all GPUs at the same time.
_PARKED = 1e10
# Without the weights. On CPU a trainer that stays up starts together with the server; on CUDA,
# assumed, with compiled graphs.
_START = {False: {"server": 25.0, "trainer": 1.0}, True: {"server": 60.0, "trainer": 15.0}}
_TRAINER_START = 7.0  # of one that does not stay up, in each iteration
_PACK_OF_SAMPLE = 1e-4
_FIXED = {"sync": 0.1, "pack": 0.02, "other": 0.1}


@dataclass(frozen=True)
class PlannedSeconds:
    """Hold the seconds of a run."""

    start: Mapping[str, Seconds]
    """Once: "server", and "trainer", as far as the first iteration waits for it."""
    phases: Mapping[str, Seconds]
    """By phase of an iteration; for a validation not in each, its share."""
    iteration: float
    """All phases together. Less than their sum if they overlap: validation and the next rollouts
    share the server.
    """
    run: float
    """Start, the validation of the starting model, and all iterations."""


def assumed(machine: Machine, with_server: bool) -> str:
    """Return the speeds assumed by rough figures."""
    speeds = [f"{_TRAINING_SHARE[machine.cuda]:.0%} of the speed of matrix products in training"]
    speeds += [f"{_SAMPLING_SHARE[machine.cuda]:.0%} of it in sampling"] * with_server
    speeds += [
        f"{_BANDWIDTH_SHARE:.0%} of {si_spaced(machine.bandwidth)}B/s of memory",
        f"files at {si_spaced(_DISK)}B/s",
    ]
    if with_server:
        speeds += [f"weights into servers at {si_spaced(_SYNCED[machine.cuda])}B/s"]
        speeds += [f"parking at {si_spaced(_PARKED)}B/s for each GPU"] * machine.cuda
    return ", ".join(speeds)


def seconds_of(
    config: TrainConfig, rough: Mapping[str, float], measured: Mapping[str, Seconds]
) -> PlannedSeconds:
    """Plan the seconds of a run. rough: of `rough_seconds`. measured: by phase, and "server start",
    "trainer start".
    """
    found = {name: measured.get(name, Seconds(value, "rough")) for name, value in rough.items()}
    phases = {name: part for name, part in found.items() if not name.endswith(" start")}
    others = {
        name: value
        for name, value in measured.items()
        if not name.endswith(" start") and name != "iteration"
    }
    phases |= {name: value for name, value in others.items() if name not in phases}
    start = {
        name: found[f"{name} start"]
        for name in ("server", "trainer")
        if name == "server" or config.trainer != "once"
    }
    iteration = sum(phase.seconds for phase in phases.values())
    if "iteration" in measured:
        iteration = measured["iteration"].seconds
    elif config.off_policy_steps:
        # At the same time, on devices of their own.
        iteration -= min(phases["train"].seconds, phases["sample"].seconds)
    first = phases["validate"].seconds * config.validate_every
    total = sum(part.seconds for part in start.values()) + first + config.iterations * iteration
    return PlannedSeconds(start, phases, iteration, total)


def rough_seconds(
    config: TrainConfig,
    recipe: GRPOConfig,
    machine: Machine,
    work: Work,
    flops: PlannedFlops,
    memory: PlannedMemory,
    disk_bytes: float,
    adapter_numbers: int = 0,
) -> dict[str, float]:
    """Estimate the seconds of each phase, and of "server start" and "trainer start". disk_bytes: of
    an iteration's checkpoint and state. adapter_numbers: of a token, see `ttrl.costs.flops`."""
    speed = machine.matmul * config.processes * _TRAINING_SHARE[machine.cuda]
    if recipe.activation_checkpointing and recipe.checkpoint_every == 1:
        again = 4 / 3
    else:
        again = 1.0
    if recipe.activation_offloading:
        again /= _OFFLOADING_SPEED
    saved = disk_bytes / _DISK
    train = (
        flops.training * again + flops.prepass
    ) / speed + work.optimizer_steps * _SECONDS_OF_UPDATE
    passed = adapter_numbers * work.row_tokens * again * (2 if recipe.dtype == "bf16" else 4)
    train += (
        passed / (machine.bandwidth * _BANDWIDTH_SHARE) / (config.processes if machine.cuda else 1)
    )
    # Of the trainer, and once more of a server.
    through_memory = memory.held_out / _HELD_OUT[machine.cuda]
    is_beside = memory.held_out > 0 and not config.cache  # files are written while servers sample
    train += through_memory / (config.processes if machine.cuda else 1) + (
        0.0 if is_beside else saved
    )
    train += _TRAINER_START if config.trainer == "once" else 0.0
    if parks(config, recipe, cuda=machine.cuda):
        # There and back.
        train += 2 * memory.host.get(PARKED, 0.0) / config.processes_here / _PARKED
    # Several on one CPU divide its cores; on GPUs, each has its own.
    servers = max(
        1, config.servers_in_all - (0 if machine.cuda else max(0, config.servers_here - 1))
    )
    sample = _sampling(
        machine, memory, flops.sampling, work.completion_tokens, work.samples, work, servers
    )
    validate = _sampling(
        machine,
        memory,
        flops.validation,
        work.validation_tokens,
        work.validation_samples,
        work,
        servers,
    )
    # A checkpoint has a third of all bytes.
    sync = _FIXED["sync"] + (memory.held_out or disk_bytes / 3) / _SYNCED[machine.cuda]
    on_gpu = memory.server_parts.get("weights", 0.0)
    if machine.cuda:
        weights = on_gpu * int(argument(config, "tensor_parallel_size", 1))
    else:
        weights = 0.0
    sync += 2 * on_gpu / _PARKED if memory.host.get(SLEEPING) else 0.0
    # The first start reads them from files; later starts find them in the machine's memory.
    start = {name: seconds + weights / _DISK for name, seconds in _START[machine.cuda].items()}
    start["server"] -= (
        weights / _DISK - weights / _SYNCED[True] if config.trainer != "once" else 0.0
    )
    if config.weight_sync == "restart":
        sync += _START[machine.cuda]["server"] + weights / _SYNCED[True]
    pack = _FIXED["pack"] + work.samples * _PACK_OF_SAMPLE
    other = _FIXED["other"] + (
        max(0.0, saved - sample - validate) / config.save_every if is_beside else 0.0
    )
    validate /= config.validate_every
    phases = {
        "sample": sample,
        "pack": pack,
        "train": train,
        "sync": sync,
        "validate": validate,
        "other": other,
    }
    return phases | {f"{name} start": seconds for name, seconds in start.items()}


def _sampling(
    machine: Machine,
    memory: PlannedMemory,
    flops: float,
    tokens: float,
    samples: int,
    work: Work,
    servers: int,
) -> float:
    """Return the larger of two times: for all tokens, and for the longest completion, with all
    weights read at each step.
    """
    if not samples:
        return 0.0
    sequences = max(1, min(memory.sequences, -(-samples // servers)))
    weights = memory.server_parts.get("weights", 0.0)
    length = work.prompt_mean + work.completion_mean / 2
    if machine.cuda and memory.cache_tokens:
        cache_of_token = memory.server_parts.get("cache", 0.0) / memory.cache_tokens
    else:
        cache_of_token = 0.0
    fixed = _SECONDS_OF_STEP[machine.cuda] + weights / (machine.bandwidth * _BANDWIDTH_SHARE)
    full_step = fixed + sequences * length * cache_of_token / (machine.bandwidth * _BANDWIDTH_SHARE)
    all_tokens = tokens / sequences * full_step + flops / (
        machine.matmul * _SAMPLING_SHARE[machine.cuda]
    )
    if not machine.cuda:
        all_tokens += tokens * _SECONDS_OF_TOKEN
    return max(all_tokens / servers, work.completion_max * fixed)
