"""Choose a config's open GPU settings: trainer GPUs, server GPUs, and a fit for both.

One pure function of the model's config.json, the GPUs' memory and the config serves `train`, `plan`
and `ttrl plan` alike. Settings in the config stay. On a CPU, only trainer and servers too large
for the machine's memory change the defaults. Rows are assumed full. Adapters are advised, never
chosen: they change the result of training.

The figures are those of `ttrl.costs`. A trainer's were compared with an H100. Trainer and server
together have worked in turn on one GPU, and were measured on none.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.costs.parameters import decoder_parameters
from ttrl.errors import ConfigError
from ttrl.families.values import model_settings
from ttrl.plans.fitting import Fit, Placed
from ttrl.plans.memory_plan import cpu_needs
from ttrl.plans.open_settings import (
    CHOSEN,
    FULL_ON_CPU,
    Choices,
    recipe_of,
    value_of,
    with_values,
)
from ttrl.text import counted, gib

IGNORE_VARIABLE = "TTRL_IGNORE_MEMORY"
"""Set to 1: start a run despite a predicted lack of memory."""
_ADVISED_RANK = 32
_MOST_ADVICE = 4


def choose(
    model: Mapping[str, Any],
    config: TrainConfig,
    gpus: Sequence[float],
    *,
    host: float | None = None,
    advise: bool = True,
) -> Choices:
    """Choose the open settings of `config`.

    model: values of config.json. gpus: bytes of each GPU of this machine; none: a CPU. host: bytes
    of the machine's own memory, if known. advise: look for fitting changes if this does not fit.

    Raises ConfigError, ModelFolderError.
    """
    too_long = _beyond_context(model, config)
    if too_long is not None:
        return Choices(config, problem=too_long)
    if not gpus or config.device == "cpu":
        if config.placement != "split":
            return _on_cpu(model, config, host)
        why = (
            "but this runs on the CPU, with no GPUs to divide among trainer and servers; leave it "
            "out"
        )
        return Choices(config, problem=f"placement is 'split', {why}")
    tried = []
    for placed in _placements(model, config, len(gpus)):
        found = Fit(model, config, placed, min(gpus), len(gpus), host).choices()
        if found.problem is None and not found.is_tight:
            return found
        tried.append(found)
    best = next((one for one in tried if one.problem is None), tried[0])
    if best.problem is None or not advise:
        return best
    ways = _ways_out(model, config, gpus, host)
    if not ways:
        return best
    advice = "; or ".join(ways)
    return dataclasses.replace(best, problem=f"{best.problem}; what would fit: {advice}")


def _beyond_context(model: Mapping[str, Any], config: TrainConfig) -> str | None:
    """Describe completions that leave no room for a prompt: vLLM refuses each such request."""
    context, whose = known_context(model, config)
    if context is None or config.max_tokens < context:
        return None
    return (
        f"max_tokens is {config.max_tokens}, but prompt and completion may have {context} tokens "
        f"together ({whose}): vLLM would refuse every request; set max_tokens below it"
    )


def known_context(model: Mapping[str, Any], config: TrainConfig) -> tuple[int | None, str]:
    """Return the servers' longest sequence, and the name of its source. None for a scaled RoPE,
    whose context only vLLM knows, and for servers started by hand.
    """
    settings = model_settings(model)
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    by_layer = [one for one in rope.values() if isinstance(one, Mapping)]
    is_scaled = any("factor" in one for one in (rope, *by_layer))
    context = config.context
    whose = "server: max_model_len"
    if context is None and not (is_scaled or config.joined_servers):
        context = settings.get("max_position_embeddings")
        whose = "the model's max_position_embeddings"
    if not isinstance(context, int):
        context = None
    return context, whose


def _on_cpu(model: Mapping[str, Any], config: TrainConfig, memory: float | None) -> Choices:
    """Choose smaller microbatches, then activation checkpointing, if the defaults do not fit in the
    machine's memory. memory: its bytes, if known.
    """
    if memory is None:
        return Choices(config)
    made = config
    reasons: dict[str, str] = {}
    rows = config.recipe_config({}).rows_per_microbatch
    tried: list[tuple[str, Any]] = []
    while rows > 1:
        rows //= 2
        tried.append(("training.rows_per_microbatch", rows))
    tried.append(("training.activation_checkpointing", True))
    for name, value in tried:
        trainer, server = cpu_needs(model, made)
        if trainer + server <= FULL_ON_CPU * memory:
            break
        if value_of(config, name) is None:
            made = with_values(made, {name: value})
            needed = f"the default needs {gib(trainer + server)} of {gib(memory)}"
            reasons.setdefault(name, f"{needed}, with full rows")
    return Choices(made, reasons, memory=memory)


def refuse(choices: Choices) -> None:
    """Raise ConfigError for an impossible run, unless the user insists on trying."""
    problems = refused(choices)
    if problems:
        raise ConfigError("TrainConfig", problems)


def refused(choices: Choices) -> list[str]:
    """Return the errors of `refuse`, one line each."""
    if choices.problem is None:
        return []
    if not choices.trainer:  # it is not about memory
        return [choices.problem]
    if os.environ.get(IGNORE_VARIABLE, "") not in ("", "0"):
        return []
    unconfirmed = "no GPU has confirmed these estimates"
    if choices.config.device == "cpu":
        unconfirmed = "this is an estimate"
    return [f"{choices.problem} ({IGNORE_VARIABLE}=1 tries anyway: {unconfirmed})"]


def _placements(model: Mapping[str, Any], config: TrainConfig, count: int) -> Iterator[Placed]:
    """Yield the ways to divide `count` GPUs, the preferred one first; at least one."""
    recipe = recipe_of(config)
    usable = [
        number
        for number in range(1, count + 1)
        if not recipe.problems_here("cuda", number * config.nnodes, model)
    ]
    given = config.nproc_per_node
    placement = config.placement
    why = ""
    if placement == "auto":
        placement = "colocated"
        why = "they take turns"
        at_once = config.off_policy_steps == 1 and config.servers_here > 0
        if at_once and count > 1 and (given is None or given < count):
            placement = "split"
            why = "trainer and servers work at the same time (off_policy_steps 1)"
        if count == 1:
            why = "there is one GPU"
    if placement == "colocated" and config.servers_here > 0 and not config.off_policy_steps:
        sync = "sleep"
        meanwhile = "servers free their memory while the trainer works"
    else:
        sync = "reload"
        meanwhile = "servers stay up while the trainer works"
    values = {"placement": placement, "weight_sync": "memory"}
    reasons = {"placement": why, "weight_sync": f"{meanwhile}, and need no files"}
    needs_files = config.files_because
    if needs_files is not None:
        values["weight_sync"] = sync
        reasons["weight_sync"] = f"{meanwhile}; {needs_files}"
    if given is not None:
        trainers = [given]
    elif placement == "colocated":
        trainers = usable[-1:] or [1]
    else:  # about half of them, rather more than fewer
        fewer = [number for number in usable if number < count]
        trainers = sorted(fewer, key=lambda number: (abs(number - count / 2), -number)) or [1]
    reasons["nproc_per_node"] = f"one per training GPU; {counted(count, 'GPU')} in all"
    for number in trainers:
        if placement == "colocated":
            serving = count
        else:
            serving = count - number
        yield Placed(values | {"nproc_per_node": number}, serving, reasons, (sync, meanwhile))


def _ways_out(
    model: Mapping[str, Any],
    config: TrainConfig,
    gpus: Sequence[float],
    host: float | None,
) -> list[str]:
    """Return changes to make an unfitting config fit, the nearest first."""

    def fits(other: TrainConfig, count: int = len(gpus)) -> bool:
        made = choose(model, other, [min(gpus)] * count, host=host, advise=False)
        return made.problem is None

    changed = [(text, other) for text, other in _changes(model, config) if not other.problems()]
    found = [text for text, other in changed if fits(other)]
    adapters = [pair for pair in changed if "lora_rank" in pair[0] and pair[0] not in found]
    for text, other in [("", config), *adapters]:
        more = [count for count in (2, 4, 8, 16) if count > len(gpus)]
        enough = next((count for count in more if fits(other, count)), None)
        if enough is not None:
            found.append(f"{enough} such GPUs" + (f" with {text}" if text else ""))
    return found[:_MOST_ADVICE]


def _changes(model: Mapping[str, Any], config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield memory-saving changes, in words and as configs, the nearest first."""
    given = [name for name in CHOSEN if value_of(config, name) is not None]
    if given:
        yield f"leave out {', '.join(given)}", _without(config, given)
    if config.seq_len // 2 > config.max_tokens:
        half = config.seq_len // 2
        yield f"seq_len: {half}", dataclasses.replace(config, seq_len=half)
    if config.placement != "split" and not config.off_policy_steps:
        stopped = "weight_sync: restart, to leave nothing of the servers on the GPUs"
        yield stopped, dataclasses.replace(config, weight_sync="restart")
    yield "training.cpu_offload: true (slow)", with_values(config, {"training.cpu_offload": True})
    backward = {"training.optimizer_in_backward": True, "training.max_grad_norm": None}
    in_backward = "training.optimizer_in_backward: true and max_grad_norm: null"
    yield f"{in_backward}, with one microbatch a step", with_values(config, backward)
    rank = f"training.lora_rank: {_ADVISED_RANK}"
    adapters = with_values(config, {"training.lora_rank": _ADVISED_RANK})
    if config.recipe_settings.get("lora_rank") is None:
        yield rank, adapters
    rounded = ["nf4"]
    if decoder_parameters(model).stored_dtype == "fp32":  # else the base is held in 16 bits anyway
        rounded.insert(0, "bf16")
    for dtype in rounded:
        base = with_values(adapters, {"training.lora_base_dtype": dtype})
        yield f"{rank} and lora_base_dtype: {dtype}", base


def _without(config: TrainConfig, names: Sequence[str]) -> TrainConfig:
    """Return a config with some of CHOSEN left open."""
    defaults = TrainConfig.defaults()
    changes: dict[str, Any] = {name: defaults[name] for name in names if "." not in name}
    for group in ("training", "server"):
        changes[group] = {
            key: value
            for key, value in getattr(config, group).items()
            if f"{group}.{key.replace('-', '_')}" not in names
        }
    return dataclasses.replace(config, **changes)
