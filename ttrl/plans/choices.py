"""Choose what a config leaves open of how a run uses its GPUs: which train and which serve, and settings with which both fit.

One pure function of the model's config.json, the GPUs' memory and the config, for `train`, `plan` and `ttrl plan` alike. What the
config sets stays as it is; on CPUs nothing is chosen. Rows are taken to be full, and adapters are advised, never chosen: they
change what is trained. The figures are those of `ttrl.costs`; a trainer's were held to an H100, those of trainer and server
together to no GPU yet, though both have worked in turn on one.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrl.configs import GRPOConfig
from ttrl.configs.recipe import model_settings
from ttrl.configs.run import TrainConfig
from ttrl.costs.memory import Workload, training_memory
from ttrl.costs.parameters import model_shape
from ttrl.errors import ConfigError
from ttrl.plans.memory import argument, given_memory, host_needs, server_needs, shares_memory
from ttrl.text import counted, gib

IGNORE_VARIABLE = "TTRL_IGNORE_MEMORY"
"""Set to 1: a run starts although it does not fit by the figures."""
CHOSEN = (
    *("placement", "nproc_per_node", "servers", "weight_sync"),
    *("training.rows_per_microbatch", "training.activation_checkpointing", "training.optimizer"),
    *("server.tensor_parallel_size", "server.gpu_memory_utilization", "server.max_model_len"),
)
"""The settings that are chosen where they are left out."""
_FULL = 0.9  # of a GPU that trainer and server may fill by estimates that are good to about 10%
_IN_TURN = 0.85  # of a GPU for a server that takes turns with a trainer
_BESIDE = 0.35  # of a GPU for one that stays while the trainer works, if the trainer can do with the rest
_LEFT_BEHIND = 2e9  # by one that gave its memory to the other: a CUDA context, NCCL's buffers, CUDA graphs; assumed
_SERVER_REST = 2e9  # of a server besides weights, cache and the widest activations: context, CUDA graphs, logits; assumed
_SAMPLES = 4  # of the length of a row that a server's cache has room for at least
_MOST_POSITIONS = 32_768  # of a microbatch: more is hardly faster
_IN_HOST = ("cpu_offload", "optimizer_on_cpu")
_ADVISED_RANK = 32
_MOST_ADVICE = 4


@dataclass(frozen=True)
class Choices:
    """A config without gaps, why it was chosen, and what it needs."""

    config: TrainConfig
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By setting that was chosen, such as "training.rows_per_microbatch"."""
    trainer: float = 0.0
    """Peak of one GPU in bytes, while it trains full rows."""
    server: float = 0.0
    """Bytes of one GPU with which a server can work; it takes as much as `gpu_memory_utilization` says."""
    memory: float = 0.0
    """Bytes of one GPU."""
    problem: str | None = None
    """Why it cannot run, and what would."""

    @property
    def is_tight(self) -> bool:
        """Whether more of a GPU is planned for than an estimate that is good to 10% should."""
        return self.trainer > _FULL * self.memory

    def summary(self) -> str:
        """Return what was chosen, in a line; "" where nothing was."""
        chosen = {name: value_of(self.config, name) for name in CHOSEN if name in self.reasons}
        return ", ".join(f"{name.rpartition('.')[2]} {str(value).lower()}" for name, value in chosen.items())


def value_of(config: TrainConfig, name: str) -> Any:
    """Return a setting by its name in CHOSEN; None where it is left open."""
    group, _, key = name.rpartition(".")
    if group == "server":
        return argument(config, key, None)
    if group:
        return config.recipe_settings.get(key)
    value = getattr(config, key)
    return None if value == "auto" else value


def _with(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    changes: dict[str, Any] = {}
    for name, value in values.items():
        group, _, key = name.rpartition(".")
        if group:
            changes[group] = {**changes.get(group, getattr(config, group)), key: value}
        else:
            changes[key] = value
    return dataclasses.replace(config, **changes)


def as_begun(config: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig:
    """Return the config of a run that is continued: what it leaves open is as in the run's config.yaml."""
    before = TrainConfig.examine({name: value for name, value in saved.items() if name in vars(config)})[0]
    missing = {name: value_of(before, name) for name in CHOSEN if value_of(config, name) is None}
    return _with(config, {name: value for name, value in missing.items() if value is not None})


def choose(
    model: Mapping[str, Any], config: TrainConfig, gpus: Sequence[float], *, host: float | None = None, advise: bool = True
) -> Choices:
    """Choose what `config` leaves open.

    model: values of config.json. gpus: bytes of each GPU of this machine; none: a CPU. host: bytes of the machine's own memory,
    if they are known. advise: look for what would fit where this does not. Raises ConfigError, ModelFolderError.
    """
    if not gpus or config.device == "cpu":
        why = "placement is 'split', which divides GPUs among trainer and servers, and this runs on the CPU; leave it out"
        return Choices(config, problem=why if config.placement == "split" else None)
    best = None
    for placed in _placements(model, config, len(gpus)):
        found = _fitted(model, config, placed, min(gpus), len(gpus), host)
        if found.problem is None and not found.is_tight:
            return found
        best = found if best is None or (best.problem is not None and found.problem is None) else best
    assert best is not None
    if best.problem is None or not advise:
        return best
    ways = _ways_out(model, config, gpus, host)
    return dataclasses.replace(best, problem=best.problem + ("; what would fit: " + "; or ".join(ways) if ways else ""))


def refuse(choices: Choices) -> None:
    """Raise ConfigError for what cannot run, unless the user has said that it shall be tried."""
    if choices.problem is not None and not (choices.trainer and os.environ.get(IGNORE_VARIABLE, "") not in ("", "0")):
        way = f" ({IGNORE_VARIABLE}=1 tries it all the same: no GPU has confirmed these estimates)" if choices.trainer else ""
        raise ConfigError("TrainConfig", [choices.problem + way])


def _recipe(config: TrainConfig) -> GRPOConfig:
    return config.recipe_config({"dtype": "bf16" if config.dtype == "auto" else config.dtype})


# Which GPUs


@dataclass(frozen=True)
class _Placed:
    """Processes and what they share, before anything is known of memory."""

    values: Mapping[str, Any]
    serving: int
    """GPUs for servers."""
    reasons: Mapping[str, str]
    from_files: tuple[str, str]
    """What `weight_sync` is where weights do not go through memory, and why."""


def _placements(model: Mapping[str, Any], config: TrainConfig, count: int) -> Iterator[_Placed]:
    """Yield the ways to give out `count` GPUs, the one to be preferred first; at least one."""
    recipe = _recipe(config)
    usable = [n for n in range(1, count + 1) if not recipe.problems_here("cuda", n * config.nnodes, model)] or [1]
    given = config.nproc_per_node
    placement, why = config.placement, ""
    if placement == "auto":
        split = config.off_policy_steps == 1 and count > 1 and config.servers_here > 0
        placement = "split" if split and (given is None or given < count) else "colocated"
        why = "trainer and servers work at the same time (off_policy_steps 1)" if placement == "split" else "they take turns"
        why = "there is one GPU" if count == 1 else why
    in_turn = placement == "colocated" and config.servers_here > 0 and not config.off_policy_steps
    meanwhile = "servers free their memory while the trainer works" if in_turn else "servers stay up while the trainer works"
    from_files = ("sleep" if in_turn else "reload", meanwhile)
    values = {"placement": placement, "weight_sync": "memory"}
    reasons = {"placement": why, "weight_sync": f"{meanwhile}, and need no files"}
    if (needs_files := config.files_because) is not None:
        values["weight_sync"], reasons["weight_sync"] = from_files[0], f"{meanwhile}; {needs_files}"
    if placement == "colocated":
        trainers = [usable[-1] if given is None else given]
    elif given is None:  # about half of them, rather more than fewer
        trainers = sorted((n for n in usable if n < count), key=lambda n: (abs(n - count / 2), -n)) or [1]
    else:
        trainers = [given]
    for n in trainers:
        serving = count if placement == "colocated" else count - n
        on_each = f"one on each GPU that trains; {counted(count, 'GPU')} in all"
        yield _Placed(values | {"nproc_per_node": n}, serving, reasons | {"nproc_per_node": on_each}, from_files)


# What fits


def _fitted(
    model: Mapping[str, Any], config: TrainConfig, placed: _Placed, memory: float, count: int, host: float | None
) -> Choices:
    """Choose the other settings for GPUs that are given out."""
    values: dict[str, Any] = {name: value for name, value in placed.values.items() if value_of(config, name) is None}
    reasons = {name: placed.reasons[name] for name in values}

    def add(name: str, value: Any, why: str) -> None:
        if value_of(config, name) is None:
            values[name], reasons[name] = value, why

    open_config, config = config, _with(config, values)
    together, fixed = shares_memory(config, cuda=True), given_memory(config, memory)

    def share(left: float, most: float) -> float:
        """Return the bytes in steps of a twentieth of a GPU, of which `left` are nobody else's."""
        return memory * max(0.05, min(most, int(20 * (0.97 * memory - left) / memory) / 20))

    alone = share(_LEFT_BEHIND, _FULL if config.placement == "split" else _IN_TURN) if fixed is None else fixed
    parallel, length, needed = _server(model, config, placed.serving, alone / 2 if together and fixed is None else alone)
    if not config.servers_here:
        needed = 0.0
    stages = int(argument(config, "pipeline_parallel_size", 1))
    servers = config.servers if config.servers is not None else max(1, placed.serving // (parallel * stages))
    if servers:
        add("server.tensor_parallel_size", parallel, f"{gib(needed)} of each GPU for weights and {_SAMPLES} samples at least")
        add("servers", servers, f"{counted(placed.serving, 'GPU')} for servers, {parallel * stages} for each")
    if length is not None:
        add("server.max_model_len", length, "the length of a row: the cache has no room for the model's whole context")
    beside = (needed if fixed is None else fixed) if together and servers else 0.0
    wanted = max(beside, _BESIDE * memory) if beside and fixed is None else beside
    training, peak = _training(model, config, _FULL * memory - wanted)
    for name, value in training.items():
        add(f"training.{name}", value, f"{gib(peak)} of {gib(memory)} at the trainer's peak")
    served = share(peak, _FULL) if together and fixed is None else alone
    if servers:
        why = "what the trainer leaves" if together else "nobody else needs it meanwhile"
        add("server.gpu_memory_utilization", round(served / memory, 2), f"{gib(served)} of {gib(memory)}: {why}")
    made = _with(open_config, values)

    def held_in_host() -> float:
        return sum(host_needs(model, made, _recipe(made)).values())

    if host is not None and (held := held_in_host()) > host and values.get("weight_sync") == "memory":
        sync, meanwhile = placed.from_files
        room = f"without files, {gib(held)} of the machine's {gib(host)} of memory would be needed"
        values["weight_sync"], reasons["weight_sync"] = sync, f"{meanwhile}; {room}"
        if config.save_every > 1:
            why = f"not {config.save_every}, as servers read the files of each iteration: {room}"
            values["save_every"], reasons["save_every"] = 1, why
        made = _with(open_config, values)
    problem = _problem(made, placed.serving, count, parallel * stages)
    if problem is not None:
        return Choices(made, reasons, memory=memory, problem=problem)
    if peak + beside > memory:
        who = f"the trainer needs {gib(peak)} of each GPU" + (f", and a server beside it {gib(beside)}" if beside else "")
        problem = f"does not fit: {who}, which has {gib(memory)}"
    elif servers and needed > served:
        what = f"{gib(needed)} of each GPU for weights and cache (tensor_parallel_size {parallel})"
        problem = f"does not fit: a server needs {what}, and can have {gib(served)} of {gib(memory)}"
    elif host is not None and (there := [x for x in _IN_HOST if made.recipe_settings.get(x)]) and (held := held_in_host()) > host:
        # The trainer works there; what only waits there can be read from files instead.
        problem = f"does not fit: {there[0]} needs {gib(held)} of the machine's own memory, which has {gib(host)}"
    return Choices(made, reasons, peak, needed if servers else 0.0, memory, problem)


def _problem(config: TrainConfig, serving: int, count: int, each: int) -> str | None:
    """Say which GPUs are not there."""
    there = f"{count} GPU{'s' * (count != 1)}"
    if config.processes_here > count:
        return f"nproc_per_node is {config.processes_here}, but this machine has {there}; each process needs one of its own"
    if config.placement == "split" and config.processes_here >= count and config.servers_here:
        return f"placement is 'split' with nproc_per_node {config.processes_here}, but of {there} none is left to serve"
    if config.servers_here * each > serving:
        return f"servers is {config.servers_here}, with {each} GPUs each, but of {there} {serving} can serve; ask for fewer"
    return None


def _server(model: Mapping[str, Any], config: TrainConfig, gpus: int, room: float) -> tuple[int, int | None, float]:
    """Return over how many GPUs a server's layers are spread, the context where the model's own is too long, and the bytes that
    each GPU needs. gpus: those that serve. room: bytes of each."""
    given = argument(config, "tensor_parallel_size", None)
    most = gpus // max(1, config.servers or 1)
    heads = model_shape(model).heads
    sizes = [int(given)] if given is not None else [n for n in (1, 2, 4, 8, 16) if n <= most and heads % n == 0] or [1]
    context = int(model_settings(model).get("max_position_embeddings") or config.seq_len)
    found = []
    for parallel in sizes:
        parts, each = server_needs(model, _with(config, {"server.tensor_parallel_size": parallel}), cuda=True)
        fixed = sum(parts.values()) + _SERVER_REST
        samples = _SAMPLES * min(context, config.seq_len) * each
        whole, short = (max(samples, length * each) for length in (config.context or context, config.context or config.seq_len))
        if fixed + whole <= room:
            return parallel, None, fixed + whole
        found.append((parallel, None if config.context else min(context, config.seq_len + 1), fixed + short))
        if fixed + short <= room:
            return found[-1]
    return min(found, key=lambda one: one[2])


def _training(model: Mapping[str, Any], config: TrainConfig, room: float) -> tuple[dict[str, Any], float]:
    """Return the trainer's settings that cost least time and fit into `room`, or else those that need least, and their peak."""
    given = config.recipe_settings
    base = _recipe(config)
    ranks = max(1, config.processes // base.tensor_parallel)
    workload = Workload(row_length=config.seq_len, rows=16)
    rows = [n for n in (64, 32, 16, 8, 4, 2) if n * config.seq_len <= _MOST_POSITIONS] + [1]
    eight_bits = [] if base.optimizer_on_cpu or base.cpu_offload else ["adamw_8bit"]
    ladder: dict[str, list[Any]] = {
        "optimizer": ["adamw", *eight_bits],
        "activation_checkpointing": [False, True],
        "rows_per_microbatch": rows,
    }
    open_values = [[given[name]] if name in given else values for name, values in ladder.items()]
    best: tuple[dict[str, Any], float] | None = None
    for values in itertools.product(*open_values):
        settings = dict(zip(ladder, values, strict=True))
        peak = training_memory(model, dataclasses.replace(base, **settings), workload, device="cuda", ranks=ranks).peak
        if peak <= room:
            return settings, peak
        if best is None or peak < best[1]:
            best = settings, peak
    assert best is not None
    return best


def _ways_out(model: Mapping[str, Any], config: TrainConfig, gpus: Sequence[float], host: float | None) -> list[str]:
    """Return changes of a config that does not fit with which it would, the nearest first."""
    lora = {"training.lora_rank": _ADVISED_RANK}
    backward = {"training.optimizer_in_backward": True, "training.max_grad_norm": None}
    given = [name for name in CHOSEN if value_of(config, name) is not None]
    freed = dataclasses.replace(
        config,
        **{name: TrainConfig.defaults()[name] for name in given if "." not in name},
        training={name: value for name, value in config.recipe_settings.items() if f"training.{name}" not in given},
        server={k: v for k, v in config.server.items() if f"server.{k.replace('-', '_')}" not in given},
    )
    changed: list[tuple[str, TrainConfig]] = [(f"leave out {', '.join(given)}", freed)] if given else []
    if config.seq_len // 2 > config.max_tokens:
        changed.append((f"seq_len: {config.seq_len // 2}", _with(config, {"seq_len": config.seq_len // 2})))
    ways: dict[str, Mapping[str, Any]] = {
        "training.cpu_offload: true (slow)": {"training.cpu_offload": True},
        "training.optimizer_in_backward: true and max_grad_norm: null, with one microbatch a step": backward,
    }
    if config.recipe_settings.get("lora_rank") is None:
        ways[f"training.lora_rank: {_ADVISED_RANK}"] = lora
    for dtype in ("bf16", "nf4"):
        ways[f"training.lora_rank: {_ADVISED_RANK} and lora_base_dtype: {dtype}"] = lora | {"training.lora_base_dtype": dtype}
    changed += [(text, _with(config, values)) for text, values in ways.items()]
    changed = [(text, other) for text, other in changed if not other.problems()]
    found = []
    for text, other in changed:
        if choose(model, other, gpus, host=host, advise=False).problem is None:
            found.append(text)
    for text, other in [("", config), *(entry for entry in changed if "lora_rank" in entry[0] and entry[0] not in found)]:
        for count in (2, 4, 8, 16):
            if len(gpus) < count and choose(model, other, [min(gpus)] * count, host=host, advise=False).problem is None:
                found.append(f"{count} such GPUs" + (f" with {text}" if text else ""))
                break
    return found[:_MOST_ADVICE]
