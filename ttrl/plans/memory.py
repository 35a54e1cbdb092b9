"""Plan the memory of trainer and server, and how many sequences the server computes at the same time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.configs import GRPOConfig
from ttrl.configs.run import TrainConfig
from ttrl.costs.memory import IMPORTS, Device, Workload, savings, training_memory
from ttrl.costs.storage import server_memory
from ttrl.errors import UserError
from ttrl.plans.counts import Work
from ttrl.plans.machine import Machine
from ttrl.server.cpu import cpu_batch, cpu_cache_bytes

PARKED, SLEEPING = "trainer's weights and moments", "base of adapters, while servers sleep"
"""Parts of `host_needs`."""
_GIB = 2**30
_HEAP_GAPS = 0.2  # of the trainer's tensors, lost between them in glibc's heap: 0.1 to 0.35 measured
_SERVER_IMPORTS = 1.35e9  # resident memory of vLLM's processes without model and cache, on CPU
_GPU_PROGRAM = 3e9  # of the host's memory, for a process that computes on a GPU; assumed
_GPU_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
_GPU_SEQUENCES = {True: 1024, False: 256}  # vLLM's default of max_num_seqs: with 70 GB and more, with less
_CPU_SEQUENCES = 128  # the same on CPU
_GPU_STEP_TOKENS, _CPU_STEP_TOKENS = 8192, 2048  # vLLM's default of max_num_batched_tokens
_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes for each trainer process and server; on CUDA, for each GPU."""

    trainer: float
    """Peak."""
    trainer_parts: Mapping[str, float]
    """Bytes by part at the peak."""
    trainer_moment: str
    server: float
    """With all of its cache."""
    server_parts: Mapping[str, float]
    cache_tokens: int
    """Tokens for which the server's KV cache has room."""
    sequences: int
    """Sequences of the mean length that are in a server at the same time."""
    beside: tuple[int, int]
    """How many trainer processes and servers share the memory: on CUDA, those on one GPU."""
    together: bool
    """Whether both are there at the same time, on the same device or in the same memory."""
    available: float
    """Memory of the device, or of the machine."""
    savings: Mapping[str, float] = field(default_factory=dict)
    """Bytes that other settings would save of the trainer's peak."""
    held_out: float = 0.0
    """Bytes of weights that servers take out of the machine's memory, where the trainer's processes write them together."""
    host: Mapping[str, float] = field(default_factory=dict)
    """On CUDA, what a run holds in the memory of the GPUs' host, by part."""
    host_available: float | None = None
    """Memory of that host, where it is this machine."""

    @property
    def peak(self) -> float:
        """Return the highest sum of all that share the memory."""
        trainers, servers = self.trainer * self.beside[0], self.server * self.beside[1]
        return trainers + servers if self.together else max(trainers, servers)


def memory_of(
    model: Mapping[str, Any],
    config: TrainConfig,
    recipe: GRPOConfig,
    work: Work,
    most: Work,
    machine: Machine,
    with_server: bool = True,
) -> PlannedMemory:
    """Plan the memory of trainer and server. model: values of config.json. most: an iteration whose completions are all as long
    as they may be; the trainer has to have room for that. On CUDA both are assumed to share each GPU."""
    ranks = max(1, config.processes // recipe.tensor_parallel)
    workload = Workload(
        row_length=max(1, most.row_length),
        trained_share=most.trained_tokens / most.computed_tokens if most.computed_tokens else 1.0,
        rows=-(-most.rows // ranks) or 1,
        microbatches=-(-most.microbatches // max(1, most.optimizer_steps)),
        longest_sample=most.longest_sample,
    )
    # A microbatch holds no more rows than an optimizer step has for this process.
    rows_of_step = -(-most.rows // max(1, most.optimizer_steps) // ranks) or 1
    recipe = dataclasses.replace(recipe, rows_per_microbatch=max(1, min(recipe.rows_per_microbatch, rows_of_step)))
    device: Device = "cuda" if machine.cuda else "cpu"
    estimate = training_memory(model, recipe, workload, device=device, ranks=ranks)
    parts = dict(estimate.parts)
    parts.pop("mapped files", None)
    if not machine.cuda:
        parts["heap's gaps"] = _HEAP_GAPS * sum(parts.values())
        parts["program"] = IMPORTS
    held_out = _held_out(model, config, machine.cuda) if with_server else 0.0
    if held_out and not machine.cuda:  # else in the memory of the GPUs' host
        parts["held out to servers"] = held_out / config.processes_here
    tokens, server_parts = _server(model, config, machine) if with_server else (0, {})
    length = max(1.0, work.prompt_mean + work.completion_mean)
    return PlannedMemory(
        trainer=sum(parts.values()),
        trainer_parts=parts,
        trainer_moment=estimate.moment,
        server=sum(server_parts.values()),
        server_parts=server_parts,
        cache_tokens=tokens,
        sequences=min(int(tokens / length), _most_sequences(model, config, machine), max(1, work.samples)),
        beside=(1, min(1, config.servers_here)) if machine.cuda else (config.processes_here, config.servers_here),
        together=with_server and shares_memory(config, cuda=machine.cuda),
        available=machine.memory,
        savings=savings(model, recipe, workload, device=device, ranks=ranks),
        held_out=held_out,
        host=host_needs(model, config, recipe) if with_server and machine.cuda else {},
        host_available=machine.host,
    )


def host_needs(model: Mapping[str, Any], config: TrainConfig, recipe: GRPOConfig) -> dict[str, float]:
    """Return the bytes that a run holds in the memory of its GPUs' host, by part: what the trainer parks there, or has there for
    good, and the weights that servers take out of it."""
    ranks = max(1, config.processes // recipe.tensor_parallel)
    on_gpu = dataclasses.replace(recipe, cpu_offload=False, optimizer_on_cpu=False)
    held = training_memory(model, on_gpu, Workload(1), device="cuda", ranks=ranks).moments["optimizer"]
    weights, moments = held["parameters"], held.get("optimizer state", 0.0)
    if recipe.cpu_offload:
        there = weights + moments + held.get("gradients", 0.0)
    elif parks(config, recipe, cuda=True):
        there = weights + moments
    else:
        swaps = recipe.needs_reference and recipe.lora_rank is None
        there = moments * recipe.optimizer_on_cpu + weights * swaps
    serving = config.servers_here * int(argument(config, "tensor_parallel_size", 1))
    parts = {
        PARKED: there * config.processes_here,
        "held out to servers": _held_out(model, config, True),
    }
    if config.server_sleeps and config.gives_adapters:  # each server's own: see `ttrl.server.weights.sleep`
        parts[SLEEPING] = _weights(model, config, True) * config.servers_here
    parts["programs"] = _GPU_PROGRAM * (config.processes_here + serving)
    return {name: size for name, size in parts.items() if size}


def parks(config: TrainConfig, recipe: GRPOConfig, *, cuda: bool) -> bool:
    """Return whether the trainer leaves its GPUs while servers sample."""
    stays_up = cuda and config.trainer == "resident" and not recipe.cpu_offload
    return stays_up and config.resolved_trainer_memory("cuda") == "free"


def _held_out(model: Mapping[str, Any], config: TrainConfig, cuda: bool) -> float:
    return _weights(model, config, cuda) if config.hands_over else 0.0


def _weights(model: Mapping[str, Any], config: TrainConfig, cuda: bool) -> float:
    return server_memory(model, 0, dtype=_dtype(config, cuda))["weights"]


def _dtype(config: TrainConfig, cuda: bool) -> str:
    return config.dtype if config.dtype in ("fp32", "bf16") else "bf16" if cuda else "fp32"


def shares_memory(config: TrainConfig, *, cuda: bool) -> bool:
    """Return whether trainer and server are in the same memory at the same time: the machine's, or on CUDA that of a GPU."""
    if cuda and (config.placement == "split" or not config.servers_here):
        return False
    # Each gives way while the other works; on a CPU, sleep frees nothing.
    server_goes = config.server_stops and (config.weight_sync == "restart" or cuda)
    trainer_stays = cuda and config.trainer == "resident" and config.resolved_trainer_memory("cuda") == "keep"
    return not server_goes or trainer_stays


def argument(config: TrainConfig, name: str, default: Any) -> Any:
    """Return one of vLLM's arguments, as the config names it."""
    value = config.server.get(name, config.server.get(name.replace("_", "-")))
    return default if value is None else value


def _number(config: TrainConfig, name: str, default: float) -> float:
    """Return an argument that vLLM takes as a number, or as one with a suffix: 4k is 4000, 4K is 4096. Raises UserError."""
    value = argument(config, name, default)
    digits, factor = (value[:-1], _SUFFIXES[value[-1]]) if str(value)[-1:] in _SUFFIXES else (value, 1)
    try:
        number = float(digits) * factor
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"server: {name} is {value!r}; it must be a number above 0")
    return number


def _most_sequences(model: Mapping[str, Any], config: TrainConfig, machine: Machine) -> int:
    on_cpu = cpu_batch(model, config.server).get("max-num-seqs", _CPU_SEQUENCES)
    default = _GPU_SEQUENCES[machine.memory >= 70 * _GIB] if machine.cuda else on_cpu
    return int(_number(config, "max_num_seqs", default))


def server_needs(model: Mapping[str, Any], config: TrainConfig, *, cuda: bool) -> tuple[dict[str, float], float]:
    """Return what one of a server's processes holds besides its cache, by part, and the bytes of a token in that."""
    parallel = max(1, int(_number(config, "tensor_parallel_size", 1)))
    on_cpu = cpu_batch(model, config.server).get("max-num-batched-tokens", _CPU_STEP_TOKENS)
    step_tokens = int(_number(config, "max_num_batched_tokens", _GPU_STEP_TOKENS if cuda else on_cpu))
    dtype = _dtype(config, cuda)
    parts = server_memory(model, 0, dtype=dtype, tensor_parallel=parallel, step_tokens=step_tokens)
    return parts, server_memory(model, 1, dtype=dtype, tensor_parallel=parallel)["cache"]


def given_memory(config: TrainConfig, memory: float) -> float | None:
    """Return the bytes of a GPU that the config gives to a server; None where it leaves that open."""
    share = argument(config, "gpu_memory_utilization", None)
    return None if share is None else memory * _number(config, "gpu_memory_utilization", share)


def _server(model: Mapping[str, Any], config: TrainConfig, machine: Machine) -> tuple[int, dict[str, float]]:
    """Return how many tokens its KV cache has room for, and what it holds, by part."""
    parts, each = server_needs(model, config, cuda=machine.cuda)
    if machine.cuda:
        allowed = given_memory(config, machine.memory)
        room = (machine.memory * _GPU_SHARE if allowed is None else allowed) - parts["weights"] - parts["activations"]
    else:
        parts["program"] = _SERVER_IMPORTS
        room = cpu_cache_bytes()
    if argument(config, "kv_cache_memory_bytes", None) is not None:
        room = _number(config, "kv_cache_memory_bytes", room)
    room = max(0.0, room)
    return int(room / each), {**parts, "cache": room}  # it takes all of it at its start, and writes to it
