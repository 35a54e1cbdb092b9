"""Plan a run: contents of an iteration, memory, disk, seconds, and warnings.

Counted exactly, for prompts and completions of the given or assumed lengths: samples, tokens,
packed rows, optimizer steps, FLOPs. Estimated: memory (`ttrl.costs.memory`, within some 10% on
CPU), disk, seconds. Seconds are rough unless measured, in a probe (`ttrl.loop.run_plan`) or in the
run itself.
"""

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.configs.machines import gpus_of_a_server
from ttrl.configs.run import TrainConfig
from ttrl.costs.flops import adapter_numbers
from ttrl.costs.parameters import (
    DecoderParameters,
    decoder_parameters,
    is_known,
    trained_parameters,
)
from ttrl.costs.storage import PACKED_POSITION_BYTES, iteration_bytes
from ttrl.errors import ModelFolderError, UserError
from ttrl.facts import MetricsRow, parse
from ttrl.families.values import has_experts, model_settings
from ttrl.plans.disk import SAMPLED_TOKEN_BYTES, needs_after
from ttrl.plans.expected_lengths import (
    Assumptions,
    IterationLengths,
    assumed_lengths,
    at_their_longest,
    run_lengths,
    task_lengths,
)
from ttrl.plans.iteration_work import Work, flops_of, pack, work_of
from ttrl.plans.measured import PLAN_FILE, Seconds, measured_in_run, signal_share
from ttrl.plans.memory_plan import argument, memory_of
from ttrl.plans.open_choices import choose
from ttrl.plans.open_settings import Choices, value_of
from ttrl.plans.plan import Plan
from ttrl.plans.plan_machine import Machine, gpu_named, gpus_here, host_here, this_machine
from ttrl.plans.seconds import rough_seconds, seconds_of
from ttrl.plans.warnings import warnings_of
from ttrl.ready_models import READY_MODELS, model_named
from ttrl.run_folder.config_changes import changes
from ttrl.run_folder.folder import RunFolder, TaskList
from ttrl.server.chat_template import read_chat_template
from ttrl.server.model_folder import NO_HUB, hub_is_out_of_reach, stored_dtype
from ttrl.system.console import note
from ttrl.system.files import free_bytes, read_object
from ttrl.tasks.task import Task

logger = logging.getLogger(__name__)

_NO_SECONDS = {
    "run",
    "iterations",
    "stop_at",
    "seed",
    "keep_checkpoints",
    "keep_best",
    "keep_every",
    "mirror",
    "loggers",
    "drift",
    "sample_files",
    "requests_log",
    "drift_limits",
    "validation_metric",
    "validation_temperature",
    "training.lr",
    "training.kl_coefficient",
    "trainer_restarts",
    "join_timeout",
    "start_timeout",
    "sampling_workers",
}
"""Settings with little effect on an iteration's cost."""


@dataclass(frozen=True)
class Probed:
    """Hold the findings of a probe."""

    lengths: IterationLengths
    seconds: Mapping[str, Seconds]
    """By phase of an iteration, and "server start" and "trainer start"."""
    memory: Mapping[str, float]
    """Peaks in bytes: "trainer", "server"."""
    warnings: Sequence[str] = ()


def make_plan(
    config: TrainConfig,
    tasks: Sequence[Task] = (),
    validation_tasks: Sequence[Task] = (),
    *,
    assumptions: Assumptions | None = None,
    gpu: str | None = None,
    machine: Machine | None = None,
    price_per_hour: float | None = None,
    recipe_only: bool = False,
    run: Path | None = None,
    probed: Probed | None = None,
    tokenizer: Any = None,
) -> Plan:
    """Plan a run of `config`, without running anything but a matrix product.

    probed: the findings of a probe. tokenizer: the model's, to count prompts with; None: load it if
    there are tasks. gpu: a name or size as for `ttrl.plans.gpu_sheets.sheets_named`. machine: the
    hardware, if known; else of `gpu`, or of this machine. The other arguments are those of
    `ttrl.plan`.

    Raises ConfigError, ModelFolderError, UserError.
    """
    config = config.check("TrainConfig")
    if price_per_hour is not None and not 0 <= price_per_hour < float("inf"):
        raise UserError(f"price_per_hour is {price_per_hour}; it must be a number, 0 or more")
    named = config.model
    config = dataclasses.replace(config, model=model_named(named))
    check_trainable(config.model, experts=config.recipe_config({}).router_replay)
    model = read_model_config(config.model)
    decoder = decoder_parameters(model)
    assumptions = assumptions or Assumptions()
    if gpu is not None and machine is None:
        machine = gpu_named(gpu)
    choices = Choices(config)
    if not recipe_only:  # `tune run` chooses nothing
        host: float | None
        if machine is None:
            gpus, host = gpus_here(), host_here()
        else:
            gpus, host = _gpus(machine, config), machine.host
        choices = choose(model, config, gpus, host=host)
    config = choices.config.resolved(cuda=machine.cuda if machine is not None else _cuda())
    recipe = config.recipe_config({"dtype": config.dtype})
    if machine is None:
        machine = this_machine(config, _largest_matrix(decoder))
    rows = RunFolder(run).metrics() if run is not None else []
    if probed is not None:
        lengths = probed.lengths
        measured = probed.seconds
    else:
        lengths = _lengths(config, assumptions, decoder, tasks, run, rows, tokenizer)
        measured = measured_in_run(rows)
    others = []
    if measured and probed is None:
        others = _differences(config, run, gpu)
    if others:
        measured = {}
        if "model" in others:
            sources = {
                name: getattr(lengths, name).replace("run", "other")
                for name in ("prompts_from", "completions_from")
            }
            lengths = dataclasses.replace(lengths, **sources)
    counts = _task_counts(run)
    held_out = len(validation_tasks) or counts.get("validation_tasks", 0)
    packed = pack(config, lengths, decoder.shape.vocabulary)
    work = work_of(config, recipe, lengths, packed, 0 if recipe_only else held_out)
    block = int(argument(config, "block_size", 16 if machine.cuda else 128))  # vLLM's defaults
    flops = flops_of(
        decoder, recipe, lengths, packed, work, None if config.shares_prompts else block
    )
    longest = at_their_longest(config, lengths)
    most = work_of(config, recipe, longest, pack(config, longest, decoder.shape.vocabulary), 0)
    memory = memory_of(model, config, recipe, work, most, machine, with_server=not recipe_only)
    each = iteration_bytes(model, recipe)
    disk = _disk(config, each, work, here=gpu is None and not recipe_only)
    passed = adapter_numbers(decoder, recipe)
    rough = rough_seconds(config, recipe, machine, work, flops, memory, sum(each.values()), passed)
    seconds = seconds_of(config, rough, measured)
    warned = warnings_of(
        model,
        config,
        recipe,
        work,
        memory,
        machine,
        disk,
        seconds,
        len(tasks) or counts.get("tasks"),
    )
    # It also names a way out, so it replaces the warning.
    if (choices.problem or "").startswith("does not fit: the trainer needs"):
        warned = [
            warning for warning in warned if not warning.startswith("does not fit: the trainer (")
        ]
    notes: list[str] = []
    if probed is not None:
        notes += probed.warnings
    if choices.problem is not None:
        notes.append(choices.problem)
    if others:
        notes.append(
            "the plan ignores the run's measured seconds, because it differs in "
            f"{', '.join(others[:6])}"
        )
    notes += warned
    if not is_known(model):
        notes.append(_not_known(model))
    return Plan(
        model=named,
        parameters=decoder.total,
        trained_parameters=trained_parameters(decoder, recipe),
        machine=machine,
        processes=config.processes,
        iterations=config.iterations,
        validate_every=config.validate_every,
        prompts_from=lengths.prompts_from,
        completions_from=lengths.completions_from,
        signal_from=lengths.signal_from,
        work=work,
        flops=flops,
        memory=memory,
        disk=disk,
        seconds=seconds,
        price_per_hour=price_per_hour,
        measured_memory={} if probed is None else probed.memory,
        with_server=not recipe_only,
        chosen={
            name: f"{str(value_of(config, name)).lower()} ({why})"
            for name, why in choices.reasons.items()
        },
        warnings=notes,
        active_parameters=decoder.active if decoder.active < decoder.total else None,
        attending=_attending(decoder),
    )


def measure_machine(config: TrainConfig, folder: Path, model: Path) -> None:
    """Measure this machine for a run folder without a plan, before anything runs. Next to a
    starting server, its products take several times as long. `make_plan` then uses the measurement.
    """
    if (folder / PLAN_FILE).exists():
        return
    with contextlib.suppress(UserError):  # `write_plan` reports the error
        this_machine(config, _largest_matrix(decoder_parameters(read_model_config(str(model)))))


def write_plan(
    config: TrainConfig,
    folder: Path,
    model: Path,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task],
    tokenizer: Any,
) -> Plan | None:
    """Write a plan into a run folder without one, for the report to compare with, and return it. A
    failed plan does not end the run; the failure is logged.
    """
    if (folder / PLAN_FILE).exists():
        return None
    try:
        made = make_plan(
            dataclasses.replace(config, model=str(model)),
            tasks,
            validation_tasks,
            tokenizer=tokenizer,
        )
        made.save(folder)
        return made
    except Exception as error:  # noqa: BLE001
        # A tokenizer may raise anything, and memory may run out.
        logger.warning("no plan of this run: %s: %s", type(error).__name__, error)
        return None


def check_trainable(model: str, *, experts: bool = False) -> None:
    """Run the trainer's check of a model's architecture; it reads only config.json.

    model: a folder, the path of a config.json, or a name on the hub. experts: whether it must have
    experts. Raises ModelFolderError with everything ttrl does not compute.
    """
    from ttrl.training.models.architecture import read_config  # loads transformers

    try:
        file = config_file(model)
    except ModelFolderError:
        if published_config(model) is not None:
            return  # the tests build its decoder
        raise
    config = read_config(file.parent if file.name == "config.json" else file)
    if experts and not has_experts(config.to_dict()):
        raise ModelFolderError(
            f"{file}: the model has no experts, so router_replay has no effect; leave it out"
        )


def read_model_config(model: str) -> Mapping[str, Any]:
    """Read config.json of a model folder, its own path, or a name on the hub.

    Its dtype is the weights' own, if they are present. If the hub does not give the file, models
    known to ttrl have their published figures.

    Raises ModelFolderError.
    """
    try:
        path = config_file(model)
    except ModelFolderError:
        known = published_config(model)
        if known is None:
            raise
        _say_published(model)
        return known
    try:
        values = read_object(path)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    dtype = stored_dtype(path.parent)
    if dtype is None:
        return values
    return {**values, "dtype": dtype}


def config_file(model: str) -> Path:
    """Return the path of a model's config.json, fetched from the hub if `model` is a name. Raises
    ModelFolderError.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path
    if model.count("/") != 1 or model.startswith((".", "/")):
        raise ModelFolderError(
            f"{model}: no model folder, no config.json, and not a name of `ttrl models` or on the "
            "hub"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    offline = False
    try:
        offline = hub_is_out_of_reach()
        return Path(hf_hub_download(model, "config.json", local_files_only=offline))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        why = NO_HUB if offline else error
        raise ModelFolderError(
            f"{model} is not a model folder, and its config.json could not be fetched from the "
            f"hub: {why}. Give a model folder; for a plan, its config.json is enough. Without the "
            f"hub, `ttrl plan` knows {', '.join([*READY_MODELS, *_published()])}"
        ) from error


def context_of(model: str) -> int | None:
    """Return the longest sequence of a model in tokens; None if config.json does not tell. Raises
    ModelFolderError.
    """
    config = model_settings(read_model_config(model_named(model)))
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int):
        return longest
    return None


def published_config(model: str) -> Mapping[str, Any] | None:
    """Return the config of a model known without the hub; None for any other name."""
    return _published().get(model)


@functools.cache
def _published() -> dict[str, Mapping[str, Any]]:
    """Read the configs of published models, by their names on the hub."""
    text = importlib.resources.files("ttrl.costs").joinpath("architectures.json").read_text("utf-8")
    return {name: config for config in json.loads(text).values() for name in config["hub"]}


@functools.cache
def _say_published(model: str) -> None:
    """Warn once about planning without the hub's config.json."""
    missing = "config.json could not be fetched from the hub"
    note(f"{model}: {missing}; planning with its published figures")


def iteration_folders(run: Path) -> list[Path]:
    """Return the iteration folders of a run, ascending."""
    return sorted((run / "iterations").glob("[0-9]*"))


def _not_known(model: Mapping[str, Any]) -> str:
    """Warn about a model counted as a family it may not belong to."""
    kind = model_settings(model).get("model_type")
    return (
        f"the planner does not know the model type {kind!r}: it counts parameters, FLOPs and "
        "memory of a plain dense decoder of the same width, without experts or recurrences. "
        "Measure with --probe, or compare with the sizes of its files"
    )


def _attending(decoder: DecoderParameters) -> str | None:
    """Return the number of attention layers in words, unless all attend."""
    kinds = decoder.shape.kinds
    attending = sum(1 for one in kinds if one.pair)
    if attending == len(kinds):
        return None
    recurrent = sum(1 for one in kinds if one.state)
    return f"{attending} of its {len(kinds)} layers attend, {recurrent} keep a state"


def _largest_matrix(decoder: DecoderParameters) -> tuple[int, int]:
    return max(decoder.matrix_shapes.values(), key=lambda ends: ends[0] * ends[1])


def _differences(config: TrainConfig, run: Path | None, gpu: str | None) -> list[str]:
    """Return the differences between a plan and the measured run, among settings with effect on
    seconds.
    """
    before = {} if run is None else RunFolder(run).config()
    if not before:
        return []
    model = model_named(str(before.get("model")))
    settings = {**TrainConfig.defaults(), **before, "model": model}
    changed = changes(settings, config.to_dict())
    return (["gpu"] if gpu is not None else []) + [
        name for name in changed if name not in _NO_SECONDS
    ]


def _gpus(machine: Machine, config: TrainConfig) -> list[float]:
    """Return the bytes of each GPU: of the named ones, or else as many as the config asks for."""
    if not machine.cuda:
        return []
    each = gpus_of_a_server(config.server)
    serving = config.servers_here * each
    training = config.processes_here
    if config.placement == "split":
        asked = serving + training
    else:
        asked = max(serving, training)
    return [machine.memory] * (machine.gpus if machine.gpus > 1 else asked)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _lengths(
    config: TrainConfig,
    assumptions: Assumptions,
    decoder: DecoderParameters,
    tasks: Sequence[Task],
    run: Path | None,
    rows: Sequence[MetricsRow],
    tokenizer: Any,
) -> IterationLengths:
    if run is not None:
        share = signal_share(rows)
        found = run_lengths(iteration_folders(run), share or None)
        if found is not None:
            return found
    if tasks:
        if tokenizer is None:
            tokenizer = _tokenizer_of(config)
        if tokenizer is not None:
            return task_lengths(config, assumptions, tasks, tokenizer)
    return assumed_lengths(config, assumptions, decoder.shape.vocabulary)


def _tokenizer_of(config: TrainConfig) -> Any:
    """Load the tokenizer to count prompts; None if only the model's config is available."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model, local_files_only=hub_is_out_of_reach()
        )
    except (OSError, ValueError):
        assumed = "prompt lengths are assumed, not counted in the tasks"
        note(f"{config.model} has no tokenizer here; {assumed}")
        return None
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


def _task_counts(run: Path | None) -> dict[str, int]:
    """Return the counts in tasks.json of a run folder."""
    if run is None or not (run / "tasks.json").is_file():
        return {}
    try:
        lists = parse(dict[str, TaskList], (run / "tasks.json").read_bytes())
    except ValueError:
        return {}
    return {name: one.count for name, one in lists.items()}


def _disk(
    config: TrainConfig, each: Mapping[str, float], work: Work, here: bool
) -> dict[str, float]:
    """Return Plan.disk: the files kept by the pruning rules, and the rollouts and rows of all
    iterations.
    """
    validated = work.validation_tokens / config.validate_every
    sampled = (work.completion_tokens + validated) * SAMPLED_TOKEN_BYTES
    others = sampled + work.rows * work.seq_len * PACKED_POSITION_BYTES
    free = free_bytes(config.run or ".") if here else None
    needs = needs_after(config, 0, [0, 0], (each["checkpoint"], each["state"]), others, free)
    disk = {**each, "logs": config.iterations * others, "most": needs.whole}
    if free is None:
        return disk
    return disk | {"free": float(free)}
