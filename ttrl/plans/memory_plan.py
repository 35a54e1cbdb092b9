"""Plan the memory of trainer and server, and the number of concurrent sequences in the server."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrl.configs import GRPOConfig
from ttrl.configs.machines import auto_dtype
from ttrl.configs.run import TrainConfig
from ttrl.costs.memory import (
    IMPORTS,
    Device,
    MemoryEstimate,
    Parts,
    Workload,
    left_parked,
    offloaded_bytes,
    savings,
    training_memory,
)
from ttrl.costs.server_memory import (
    Serving,
    beyond_budget,
    left_asleep,
    sampler_bytes,
    server_memory,
    token_cache_bytes,
)
from ttrl.errors import UserError
from ttrl.plans.iteration_work import Work
from ttrl.plans.plan_machine import Machine
from ttrl.server.cpu import cpu_batch, cpu_cache_bytes

PARKED = "trainer's weights and moments"
SLEEPING = "base of adapters, while servers sleep"
"""Parts of `host_needs`."""
_OFFLOADED = "trainer's activations"
_GIB = 2**30
# Of the trainer's tensors, lost between them in glibc's heap: 0.1 to 0.35 measured.
_HEAP_GAPS = 0.2
_SERVER_IMPORTS = 1.35e9  # resident memory of vLLM's processes without model and cache, on CPU
_GPU_PROGRAM = 3e9  # of the host's memory, for a process computing on a GPU; assumed
_GPU_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
_VLLM_BATCHES = ((160 * _GIB, 1024, 16_384), (70 * _GIB, 1024, 8192), (0, 256, 2048))
"""vLLM's defaults: least bytes of a GPU, sequences per step, tokens per step."""
_CPU_SEQUENCES, _CPU_STEP_TOKENS = 128, 2048  # the same on CPU
_SUFFIXES = {
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


@dataclass(frozen=True)
class PlannedMemory:
    """Hold bytes for each trainer process and server; on CUDA, for each GPU."""

    trainer: float
    """Peak."""
    trainer_parts: Mapping[str, float]
    """Bytes by part at the peak."""
    trainer_moment: str
    server: float
    """With all of its cache."""
    server_parts: Mapping[str, float]
    cache_tokens: int
    """Tokens of room in the server's KV cache."""
    sequences: int
    """Sequences of the mean length in a server at the same time."""
    beside: tuple[int, int]
    """Numbers of trainer processes and servers sharing the memory: on CUDA, those on one GPU."""
    together: bool
    """Whether both exist at the same time, on the same device or in the same memory."""
    available: float
    """Memory of the device, or of the machine."""
    savings: Mapping[str, float] = field(default_factory=dict)
    """Bytes saved of the trainer's peak by other settings."""
    held_out: float = 0.0
    """Bytes of weights that servers read from the machine's memory, if the trainer's processes
    write them together.
    """
    host: Mapping[str, float] = field(default_factory=dict)
    """On CUDA, a run's bytes in the memory of the GPUs' host, by part."""
    host_available: float | None = None
    """Memory of the host, if it is this machine."""
    left_by_server: float = 0.0
    """Bytes of a GPU kept by a sleeping server while the trainer works."""
    left_by_trainer: float = 0.0
    """Bytes of a GPU kept by a waiting trainer while the server works."""

    @property
    def peak(self) -> float:
        """Return the highest sum over all processes sharing the memory."""
        trainers = self.trainer * self.beside[0]
        servers = self.server * self.beside[1]
        if self.together:
            return trainers + servers
        return max(trainers + self.left_by_server, servers + self.left_by_trainer)


def memory_of(
    model: Mapping[str, Any],
    config: TrainConfig,
    recipe: GRPOConfig,
    work: Work,
    most: Work,
    machine: Machine,
    with_server: bool = True,
) -> PlannedMemory:
    """Plan the memory of trainer and server. model: values of config.json. most: an iteration with
    completions of the greatest length; the trainer needs room for it. On CUDA both are assumed to
    share each GPU.
    """
    ranks = max(1, config.processes // recipe.tensor_parallel)
    workload = Workload(
        row_length=max(1, most.row_length),
        trained_share=most.trained_tokens / most.computed_tokens if most.computed_tokens else 1.0,
        rows=-(-most.rows // ranks) or 1,
        microbatches=-(-most.microbatches // max(1, most.optimizer_steps)),
        longest_sample=most.longest_sample,
    )
    # A microbatch holds no more rows than this process's part of an optimizer step.
    rows_of_step = -(-most.rows // max(1, most.optimizer_steps) // ranks) or 1
    recipe = dataclasses.replace(
        recipe, rows_per_microbatch=max(1, min(recipe.rows_per_microbatch, rows_of_step))
    )
    device: Device = "cuda" if machine.cuda else "cpu"
    estimate = training_memory(model, recipe, workload, device=device, ranks=ranks)
    if with_server:
        held_out = _held_out(model, config, machine.cuda)
    else:
        held_out = 0.0
    if machine.cuda:  # held out in the memory of the GPUs' host
        parts = _without_files(estimate)
    else:
        parts = _on_cpu(estimate, held_out / config.processes_here)
    serving = serving_of(model, config, cuda=machine.cuda, memory=machine.memory)
    gpu = machine.memory if machine.cuda else None
    tokens, server_parts = _server(model, config, serving, gpu) if with_server else (0, {})
    together = with_server and shares_memory(config, cuda=machine.cuda)
    takes_turns = with_server and machine.cuda and not together
    length = max(1.0, work.prompt_mean + work.completion_mean)
    return PlannedMemory(
        trainer=sum(parts.values()),
        trainer_parts=parts,
        trainer_moment=estimate.moment,
        server=sum(server_parts.values()),
        server_parts=server_parts,
        cache_tokens=tokens,
        sequences=min(int(tokens / length), serving.sequences, max(1, work.samples)),
        beside=(1, min(1, config.servers_here))
        if machine.cuda
        else (config.processes_here, config.servers_here),
        together=together,
        available=machine.memory,
        savings=savings(model, recipe, workload, device=device, ranks=ranks),
        held_out=held_out,
        host=host_needs(model, config, recipe) if with_server and machine.cuda else {},
        host_available=machine.host,
        left_by_server=sum(server_leaves(model, config, serving).values()) if takes_turns else 0.0,
        left_by_trainer=sum(trainer_leaves(config, recipe).values()) if takes_turns else 0.0,
    )


def cpu_needs(model: Mapping[str, Any], config: TrainConfig) -> tuple[float, float]:
    """Return the bytes of all trainers with full rows, and of all servers, on a CPU."""
    recipe = config.recipe_config({"dtype": "fp32" if config.dtype == "auto" else config.dtype})
    ranks = max(1, config.processes // recipe.tensor_parallel)
    workload = Workload(row_length=config.seq_len, rows=4 * recipe.rows_per_microbatch)
    estimate = training_memory(model, recipe, workload, device="cpu", ranks=ranks)
    held_out = _held_out(model, config, False) if config.servers_here else 0.0
    trainer = sum(_on_cpu(estimate, held_out / config.processes_here).values())
    _, server = _server(model, config, serving_of(model, config, cuda=False), None)
    return trainer * config.processes_here, sum(server.values()) * config.servers_here


def _without_files(estimate: MemoryEstimate) -> dict[str, float]:
    """Return a trainer's bytes at its peak, by part, without files that the system may drop."""
    return {name: size for name, size in estimate.parts.items() if name != "mapped files"}


def _on_cpu(estimate: MemoryEstimate, held_out: float) -> dict[str, float]:
    """Return a trainer's bytes in the memory of its machine, by part."""
    parts = _without_files(estimate)
    parts["heap's gaps"] = _HEAP_GAPS * sum(parts.values())
    parts["program"] = IMPORTS
    if held_out:
        parts["held out to servers"] = held_out
    return parts


def host_needs(
    model: Mapping[str, Any], config: TrainConfig, recipe: GRPOConfig
) -> dict[str, float]:
    """Return a run's bytes in the memory of its GPUs' host, by part: the trainer's parked or
    permanent parts, and the weights read by servers.
    """
    ranks = max(1, config.processes // recipe.tensor_parallel)
    on_gpu = dataclasses.replace(recipe, cpu_offload=False, optimizer_on_cpu=False)
    held = training_memory(model, on_gpu, Workload(1), device="cuda", ranks=ranks).moments[
        "optimizer"
    ]
    weights = held["parameters"] + held.get("reward model", 0.0)
    moments = held.get("optimizer state", 0.0)
    if recipe.cpu_offload:
        there = weights + moments + held.get("gradients", 0.0)
    elif parks(config, recipe, cuda=True):
        there = weights + moments
    else:
        swaps = recipe.needs_reference and recipe.lora_rank is None
        there = moments * recipe.optimizer_on_cpu + held["parameters"] * swaps
    serving = config.servers_here * int(argument(config, "tensor_parallel_size", 1))
    parts = {
        PARKED: there * config.processes_here,
        "held out to servers": _held_out(model, config, True),
    }
    # Each server's own: see `ttrl.weights.sync.sleep`.
    if config.server_sleeps and config.gives_adapters:
        counts = sampler_bytes(model, serving_of(model, config, cuda=True))
        parts[SLEEPING] = (_weights(model, config, True) + counts) * config.servers_here
    offloaded = offloaded_bytes(model, recipe, Workload(config.seq_len), ranks=ranks)
    parts[_OFFLOADED] = offloaded * config.processes_here
    parts["programs"] = _GPU_PROGRAM * (config.processes_here + serving)
    return {name: size for name, size in parts.items() if size}


def parks(config: TrainConfig, recipe: GRPOConfig, *, cuda: bool) -> bool:
    """Return whether the trainer leaves its GPUs while servers sample."""
    stays_up = cuda and config.trainer == "resident" and not recipe.cpu_offload
    return stays_up and config.resolved_trainer_memory("cuda") == "free"


def server_leaves(model: Mapping[str, Any], config: TrainConfig, serving: Serving) -> Parts:
    """Return the bytes of a GPU kept by a server while the trainer works, by part.

    Only a sleeping server keeps any: a stopped one is gone, and `placement` "split" shares no GPU.
    """
    shares = config.placement != "split" and config.servers_here > 0
    if shares and config.server_sleeps:
        return left_asleep(model, serving)
    return {}


def trainer_leaves(config: TrainConfig, recipe: GRPOConfig) -> Parts:
    """Return the bytes of a GPU kept by a resident trainer while its servers work, by part."""
    shares = config.placement != "split" and config.servers_here > 0
    if not shares or config.trainer != "resident":
        return {}
    return left_parked(recipe, max(1, config.processes // recipe.tensor_parallel))


def _held_out(model: Mapping[str, Any], config: TrainConfig, cuda: bool) -> float:
    if config.hands_over:
        return _weights(model, config, cuda)
    return 0.0


def _weights(model: Mapping[str, Any], config: TrainConfig, cuda: bool) -> float:
    return server_memory(model, Serving(dtype=_dtype(config, cuda)))["weights"]


def _dtype(config: TrainConfig, cuda: bool) -> str:
    if config.dtype == "auto":
        return auto_dtype(cuda)
    return config.dtype


def shares_memory(config: TrainConfig, *, cuda: bool) -> bool:
    """Return whether trainer and server are in the same memory at the same time: the machine's, or
    a GPU's on CUDA.
    """
    if cuda and (config.placement == "split" or not config.servers_here):
        return False
    # Each gives way while the other works; on a CPU, sleep frees nothing.
    server_goes = config.server_stops and (config.weight_sync == "restart" or cuda)
    trainer_stays = (
        cuda and config.trainer == "resident" and config.resolved_trainer_memory("cuda") == "keep"
    )
    return not server_goes or trainer_stays


def argument(config: TrainConfig, name: str, default: Any) -> Any:
    """Return one of vLLM's arguments under its name in the config."""
    value = config.server.get(name, config.server.get(name.replace("_", "-")))
    if value is None:
        return default
    return value


def _number(config: TrainConfig, name: str, default: float) -> float:
    """Return a numeric argument of vLLM, with or without a suffix: 4k is 4000, 4K is 4096. Raises
    UserError.
    """
    value = argument(config, name, default)
    digits, factor = (
        (value[:-1], _SUFFIXES[value[-1]]) if str(value)[-1:] in _SUFFIXES else (value, 1)
    )
    try:
        number = float(digits) * factor
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"server: {name} is {value!r}; it must be a number above 0")
    return number


def vllm_batch(memory: float) -> tuple[int, int]:
    """Return vLLM's own max_num_seqs and max_num_batched_tokens for a GPU of `memory` bytes.

    An A100 gains no speed from more tokens in a step, so vLLM takes its smallest values for any
    memory.
    """
    return next((seqs, tokens) for least, seqs, tokens in _VLLM_BATCHES if memory >= least)


def serving_of(
    model: Mapping[str, Any], config: TrainConfig, *, cuda: bool, memory: float = 0.0
) -> Serving:
    """Return the server settings of a config. memory: bytes of a GPU. Raises UserError."""
    if cuda:
        sequences, step_tokens = vllm_batch(memory)
    else:
        on_cpu = cpu_batch(model, config.server)
        sequences = on_cpu.get("max-num-seqs", _CPU_SEQUENCES)
        step_tokens = on_cpu.get("max-num-batched-tokens", _CPU_STEP_TOKENS)
    return Serving(
        dtype=_dtype(config, cuda),
        tensor_parallel=max(1, int(_number(config, "tensor_parallel_size", 1))),
        stages=max(1, int(_number(config, "pipeline_parallel_size", 1))),
        step_tokens=int(_number(config, "max_num_batched_tokens", step_tokens)),
        sequences=int(_number(config, "max_num_seqs", sequences)),
        adapters=config.gives_adapters,
        eager=argument(config, "enforce_eager", False) is True,
        suspends=argument(config, "enable_nccl_comm_suspend", False) is True,
    )


def given_memory(config: TrainConfig, memory: float) -> float | None:
    """Return the bytes of a GPU given to a server by the config; None if left open."""
    share = argument(config, "gpu_memory_utilization", None)
    if share is None:
        return None
    return memory * _number(config, "gpu_memory_utilization", share)


def _server(
    model: Mapping[str, Any], config: TrainConfig, serving: Serving, gpu: float | None
) -> tuple[int, dict[str, float]]:
    """Return the tokens of room in its KV cache, and its contents by part. gpu: bytes of its GPU;
    None on a CPU.
    """
    parts = server_memory(model, serving, cuda=gpu is not None)
    if gpu is not None:
        allowed = given_memory(config, gpu)
        room = (gpu * _GPU_SHARE if allowed is None else allowed) - sum(parts.values())
        parts |= beyond_budget(serving)
    else:
        parts["program"] = _SERVER_IMPORTS
        room = cpu_cache_bytes()
    if argument(config, "kv_cache_memory_bytes", None) is not None:
        room = _number(config, "kv_cache_memory_bytes", room)
    room = max(0.0, room)
    # It takes all of its cache at the start, and writes to it.
    tokens = int(room / token_cache_bytes(model, serving))
    return tokens, {name: size for name, size in parts.items() if size} | {"cache": room}
