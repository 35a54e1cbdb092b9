"""Describe the problems of a plan, and the way out."""

from collections.abc import Mapping
from typing import Any

from ttrl.configs import GRPOConfig
from ttrl.configs.run import TrainConfig
from ttrl.families.values import has_experts, model_settings
from ttrl.plans.iteration_work import Work
from ttrl.plans.memory_plan import PlannedMemory
from ttrl.plans.plan_machine import Machine
from ttrl.plans.seconds import PlannedSeconds
from ttrl.text import gib

_BADLY_FILLED = 0.7
_NEARLY_FULL = 0.9


def warnings_of(
    model: Mapping[str, Any],
    config: TrainConfig,
    recipe: GRPOConfig,
    work: Work,
    memory: PlannedMemory,
    machine: Machine,
    disk: Mapping[str, float],
    seconds: PlannedSeconds,
    tasks: int | None,
) -> list[str]:
    """Return the problems of a plan, a line each."""
    found = [
        *_cache(config, work, memory),
        *_memory(memory, config, machine),
        *_lengths(model, config, work),
        *_disk(disk),
    ]
    found += _files(config, memory, disk, seconds) + _held_out(config, work)
    if recipe.lora_rank is not None and has_experts(model):
        found.append(
            "experts stay frozen: adapters change attention and the layers of every token "
            "(lora_targets)"
        )
    if tasks is not None and tasks < config.tasks_per_iteration:
        found.append(
            f"too few tasks: an iteration needs {config.tasks_per_iteration}, but there are "
            f"{tasks}; lower tasks_per_iteration"
        )
    elif tasks is not None and config.tasks_per_iteration * config.iterations > 20 * tasks:
        times = config.tasks_per_iteration * config.iterations / tasks
        found.append(
            f"few tasks: each of the {tasks} is used {times:.0f} times in {config.iterations} "
            "iterations"
        )
    return found + _idle(config, recipe, work)


def _memory(memory: PlannedMemory, config: TrainConfig, machine: Machine) -> list[str]:
    found = []
    if machine.cuda:
        where = "of the GPU"
    else:
        where = "of this machine"
    if memory.peak > memory.available:
        trainer = memory.trainer + memory.left_by_server
        server = memory.server + memory.left_by_trainer
        who = f"the trainer ({gib(memory.trainer)}) needs"
        if memory.together:
            who = f"trainer ({gib(memory.trainer)}) and server ({gib(memory.server)}) together need"
        elif server > trainer:
            who = f"the server ({gib(memory.server)}) needs"
            if memory.left_by_trainer:
                who = f"the server ({gib(memory.server)}) and a waiting trainer need"
        elif memory.left_by_server:
            who = f"the trainer ({gib(memory.trainer)}) and a sleeping server need"
        ways = [f"{name} saves {gib(saved)}" for name, saved in memory.savings.items()]
        if (
            machine.cuda
            and memory.server_parts
            and (memory.together or memory.server > memory.available)
        ):
            ways.insert(0, 'server: {"gpu_memory_utilization": ...} gives the server less')
        if memory.together and config.off_policy_steps:
            ways.append(
                "off_policy_steps: 0 with weight_sync: restart stops the server during training"
            )
        elif memory.together and config.weight_sync != "restart":
            ways.append("weight_sync: restart stops the server during training")
        if memory.together and machine.cuda and config.resolved_trainer_memory("cuda") == "keep":
            ways.append(
                "trainer_memory: free lends the trainer's memory to the server during sampling"
            )
        found.append(
            f"does not fit: {who} more than the {gib(memory.available)} {where}; " + "; ".join(ways)
        )
    # A lone server takes its configured share of a GPU; this is no estimate.
    else:
        taken = memory.trainer * memory.beside[0] + memory.left_by_server
        if memory.together:
            taken = memory.peak
        if taken > _NEARLY_FULL * memory.available:
            room = f"{gib(taken)} of the {gib(memory.available)} {where}"
            found.append(f"nearly full: {room}; the estimate is good to about 10%")
    if memory.host_available is not None and sum(memory.host.values()) > memory.host_available:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.host.items())
        found.append(
            f"does not fit into the machine's own memory: {gib(sum(memory.host.values()))} of "
            f"{gib(memory.host_available)} are needed ({parts}), and each iteration reads the rest "
            "from files; adapters (lora_rank) and optimizer: adamw_8bit need less, placement: "
            "split parks nothing"
        )
    if memory.server_parts and memory.server_parts.get("weights", 0.0) > memory.available:
        if machine.cuda:
            way = "use more GPUs (server: tensor_parallel_size)"
        else:
            way = "choose a smaller model, or dtype: bf16"
        found.append(f"the server cannot even hold the weights; {way}")
    return found


def _lengths(model: Mapping[str, Any], config: TrainConfig, work: Work) -> list[str]:
    found = []
    longest = work.prompt_max + config.max_tokens
    if longest - 1 > config.seq_len:
        word = {
            "drop": "are left out",
            "truncate": "are cut off",
            "extend": "get longer rows",
            "error": "end the run",
        }
        found.append(
            f"seq_len is {config.seq_len}, but the longest prompt ({work.prompt_max}) and "
            f"max_tokens ({config.max_tokens}) are "
            f"{longest} tokens together: samples that are too long {word[config.too_long]}; "
            f"about {work.too_long} of {work.samples} in an iteration"
        )
    context = config.context or model_settings(model).get("max_position_embeddings")
    if isinstance(context, int) and longest > context:
        found.append(
            f"the longest prompt and max_tokens are {longest} tokens together, but the server's "
            f"context is {context}: it refuses such requests; lower max_tokens"
        )
    if work.rows > 1 and work.fill < _BADLY_FILLED:
        found.append(
            f"rows are only {100 * work.fill:.0f}% full; another seq_len fits the groups better (a "
            "group of the mean size takes "
            f"{work.prompt_mean + work.samples / max(1, work.tasks) * work.completion_mean:,.0f} "
            "positions)"
        )
    return found


def _cache(config: TrainConfig, work: Work, memory: PlannedMemory) -> list[str]:
    longest = work.prompt_max + config.max_tokens
    if not memory.server_parts:
        return []
    if memory.cache_tokens < longest:
        return [
            f"the server's cache has room for {memory.cache_tokens:,} tokens, fewer than one "
            f"sample of {longest:,}: it will not start, or refuse requests. Give it more memory "
            "(server: gpu_memory_utilization, on CPU VLLM_CPU_KVCACHE_SPACE)"
        ]
    if memory.sequences < 4 <= work.samples:
        return [
            f"only {memory.sequences} samples at a time fit into the server's cache, so sampling "
            "will be slow"
        ]
    return []


def _disk(disk: Mapping[str, float]) -> list[str]:
    if "free" not in disk or disk["most"] <= disk["free"]:
        return []
    return [
        f"the disk is too small: the run needs up to {gib(disk['most'])}, but only "
        f"{gib(disk['free'])} are free. checkpoint_dtype: bf16 halves checkpoints; adapters "
        "(lora_rank) make states small"
    ]


def _files(
    config: TrainConfig, memory: PlannedMemory, disk: Mapping[str, float], seconds: PlannedSeconds
) -> list[str]:
    waiting = seconds.phases["other"]
    if (
        not memory.held_out
        or waiting.source != "rough"
        or waiting.seconds < 0.1 * seconds.iteration
    ):
        return []
    fewer = 5 * config.save_every
    return [
        f"files delay every iteration: writing {gib(disk['checkpoint'] + disk['state'])} takes "
        f"{waiting.seconds:.0f} s longer than the next iteration's sampling. save_every: {fewer} "
        f"reduces this to {waiting.seconds / 5:.0f} s; a killed run then trains up to {fewer - 1} "
        "iterations again, without sampling again"
    ]


def _held_out(config: TrainConfig, work: Work) -> list[str]:
    held_out = work.validation_samples
    if held_out <= config.validate_every * work.samples:
        return []
    often = -(-4 * held_out // work.samples)
    sizes = f"{held_out:,} in a validation, and {work.samples:,} in an iteration"
    return [
        f"more held-out samples than others: {sizes}, with validate_every {config.validate_every}; "
        f"with validate_every: {often}, they are a quarter"
    ]


def _idle(config: TrainConfig, recipe: GRPOConfig, work: Work) -> list[str]:
    found = []
    ranks = max(1, config.processes // recipe.tensor_parallel)
    rows_of_step = work.filled_rows / max(1, work.optimizer_steps)
    if work.rows and rows_of_step < ranks:
        found.append(
            f"some processes will be idle: an optimizer step has {rows_of_step:.1f} rows for "
            f"{ranks} processes; use a smaller seq_len, fewer updates_per_iteration, or fewer "
            "processes"
        )
    if 0 < work.filled_rows < recipe.updates_per_iteration:
        found.append(
            f"updates_per_iteration is {recipe.updates_per_iteration}, but an iteration has only "
            f"{work.filled_rows} rows, so ttrl makes {work.filled_rows} updates"
        )
    return found
