"""Train in a loop: sample → grade → pack → train → sync → validate, in a self-explanatory folder.

Every phase ends with a marker in the run folder (`ttrl.run_folder.folder`). So after any end, the
same call continues at the first phase without a marker. The phases: `ttrl.loop.phases`; their
order: `ttrl.loop.iterations`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, DriftError, ModelFolderError
from ttrl.launch.trainer import Trainer
from ttrl.live.notebook import LiveView
from ttrl.live.run_handle import Run
from ttrl.loop.checks import checked
from ttrl.loop.iterations import Iterations
from ttrl.loop.phases import Phases
from ttrl.monitoring.loggers import make_loggers
from ttrl.monitoring.summary import overfits, summary_lines
from ttrl.plans.disk import check_disk
from ttrl.plans.expected_lengths import prompts_beyond
from ttrl.plans.open_choices import choose, known_context, refuse
from ttrl.plans.open_settings import CHOSEN_ON_CPU, as_begun
from ttrl.plans.plan_machine import gpus_here, host_here
from ttrl.plans.planner import check_trainable, read_model_config
from ttrl.ready_models import is_ready, model_named
from ttrl.records import ADAPTER_FOLDER, ADAPTER_SETTINGS
from ttrl.report.page import leave_report
from ttrl.run_folder.config_changes import allowed_names
from ttrl.run_folder.folder import RunFolder, TaskList
from ttrl.run_folder.lease import TAKE_OVER_VARIABLE
from ttrl.run_folder.mirror import mirrored, with_local_run
from ttrl.run_folder.pruning import best_policies, prune
from ttrl.run_folder.reader import read_mapping
from ttrl.run_folder.redo import redo_asked
from ttrl.server.chat_template import with_chat_template
from ttrl.server.connection import JoinedServer
from ttrl.server.model_folder import check_model_folder, local_folder, merge_adapter, stored_dtype
from ttrl.server.parsers import parsers_of
from ttrl.server.sites import bring_adapter
from ttrl.system.console import Console
from ttrl.system.frames import data_frame
from ttrl.system.processes import reap_leftovers
from ttrl.tasks.task import Task
from ttrl.text import gib
from ttrl.weights.policy_server import PolicyServer, joined_servers

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame


@dataclass(frozen=True)
class Parts:
    """Name the parts under a run's loop: processes, phases, the report, and this machine."""

    server: Callable[..., PolicyServer] = PolicyServer
    trainer: Callable[[TrainConfig, RunFolder, Console], Trainer] = Trainer
    """Makes the trainer of this machine; a cluster has its own."""
    phases: Callable[..., Phases] = Phases
    report: Callable[..., Path] = leave_report
    gpus: Callable[[], list[float]] = gpus_here
    host: Callable[[], float] = host_here


THIS_MACHINE = Parts()


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    run: Path
    checkpoint: Path
    """The newest policy, in Hugging Face layout."""
    best_checkpoint: Path
    """The policy with the best validation metric; without validation, the newest one."""
    metrics: list[Mapping[str, Any]]
    """One row per iteration, including the model before training (0), as in metrics.jsonl."""
    report: Path

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each iteration and the columns of metrics.jsonl, such
        as "train.loss". Raises UserError without pandas."""
        return data_frame(self.metrics, columns=("iteration",))

    def _repr_html_(self) -> str:
        """Return the run's curves, findings and newest sample for a notebook."""
        return Run(self.run)._repr_html_()

    def live(self) -> LiveView:
        """Show the run in a notebook, as `Run.live` does."""
        return Run(self.run).live()


def train_checked(
    config: TrainConfig,
    tasks: Sequence[Task],
    validation_tasks: Sequence[Task] = (),
    *,
    quiet: bool = False,
    allow_changes: Sequence[str] = (),
    take_over: bool = False,
    redo: int | None = None,
    parts: Parts = THIS_MACHINE,
) -> RunResult:
    """Train: see `ttrl.loop.start.train`; it has checked the model and announced the run."""
    config, tasks, validation_tasks = checked(config, tasks, validation_tasks, model=False)
    config, asked, cuda = with_local_run(config), config, torch.cuda.is_available()
    described = {
        name: TaskList(
            len(given), hashlib.sha256(b"".join(task.as_json() for task in given)).hexdigest()
        )
        for name, given in (("tasks", tasks), ("validation_tasks", validation_tasks))
    }
    if not is_ready(config.model):
        check_model_folder(config.model, chat_template=config.chat_template is None)
        check_trainable(config.model, experts=config.recipe_config({}).router_replay)
    folder = RunFolder(config.run)
    console = Console(quiet=quiet)
    is_here = config.mirror is None  # a mirror may first have to bring the run's earlier choices
    if is_here:
        config = _chosen(config, folder.config() if folder.begun() else {}, console, parts)
    model = local_model(config.model, chat_template=config.chat_template is None)
    take_over = take_over or os.environ.get(TAKE_OVER_VARIABLE, "") not in ("", "0")
    redo = redo_asked(redo)
    with (
        folder.locked(take_over=take_over),
        mirrored(config, folder, take_over=take_over, redo=redo) as mirror,
    ):
        reap_leftovers(folder.path)
        folder.clean()
        folder.forget_refused_start()
        if not is_here:
            config = _chosen(config, folder.config(), console, parts)
        config = config.resolved(cuda)
        if asked.weight_sync == "auto" and config.device == "cpu":
            why = (
                config.files_because
                or "the servers are on the trainer's machine; files are written while they sample"
            )
            console.line(f"weight_sync: {config.weight_sync} ({why})")
        if (
            asked.validation_temperature is None
            and folder.config().get("validation_temperature", ...) is None
        ):
            config = dataclasses.replace(config, validation_temperature=config.temperature)
            console.line(
                f"note: held-out samples use temperature {config.temperature:g}, as at the start "
                "of this run"
            )
        held_otherwise = _base_note(config, folder, model)
        if held_otherwise is not None:
            console.line(f"note: {held_otherwise}")
        for note in folder.remember_config(
            config.to_dict(), config.defaults(), allowed_names(allow_changes)
        ):
            console.line(f"note: {note}")
        folder.remember_tasks(described)
        model = with_chat_template(model, config.chat_template, folder.path.absolute() / "model")
        console.line(parsers_of(model, config.server).said)
        for note in _check_prompts(config, model, tasks, validation_tasks):
            console.line(f"note: {note}")
        warning = check_disk(config, model, folder, len(validation_tasks))
        if warning is not None:
            console.line(f"note: {warning}")
        loggers = make_loggers(config.loggers, folder.path, console, config.to_dict())
        with contextlib.ExitStack() as ends:  # runs all of them, even if one raises
            ends.callback(loggers.close)
            others = joined_servers(config)
            if config.adapters == "mirror":
                assert mirror is not None, "the config's own check asks for it"
                others = joined_servers(
                    config, functools.partial(bring_adapter, publish=mirror.publish, base=model)
                )
            replicas, of_phases = _on_cluster(config, folder, console, model)
            if not of_phases:
                of_phases = {"trainer": parts.trainer(config, folder, console)}
            server = parts.server(
                config,
                folder.path / "logs",
                console,
                others=lambda base: [*others, *replicas(base)],
            )
            ends.callback(server.stop)
            given = {"tasks": tasks, "validation_tasks": validation_tasks, **of_phases}
            phases = parts.phases(config, folder, model, server=server, console=console, **given)
            ends.callback(phases.trainer.stop)
            try:
                Iterations(phases, loggers, parts.report).run()
            except DriftError:
                parts.report(folder.path)  # it shows the tokens and causes
                raise
        rows = folder.metrics()
        newest = folder.written_version(rows[-1].iteration)
        prune(folder, rows, config, newest)  # if the last pruning was cut off
        if validation_tasks:
            best = next(iter(best_policies(folder, rows, config)), newest)
        else:
            best = newest
        if mirror is not None:
            mirror.bring_checkpoint(best)
        for policy in sorted({newest, best}):
            try:
                merge_adapter(folder.checkpoint(policy), model)
            # The run is done all the same, and a later load tries again.
            except ModelFolderError as error:
                console.line(f"note: {error}")
        result = RunResult(
            run=folder.path,
            checkpoint=folder.checkpoint(newest),
            best_checkpoint=folder.checkpoint(best),
            metrics=folder.metrics_json(),
            report=parts.report(folder.path),
        )
        for line in summary_lines(rows, config.to_dict(), overfits=overfits(described)):
            console.line(line)
        if not validation_tasks:
            console.line("no held-out tasks: the policy was only measured on its training tasks")
        console.line(f"report:     {result.report}\ncheckpoint: {result.checkpoint}")
        if best != newest:
            console.line(f"the best:   {result.best_checkpoint}")
        return result


def _check_prompts(
    config: TrainConfig, model: Path, tasks: Sequence[Task], validation_tasks: Sequence[Task]
) -> list[str]:
    """Return notes on prompts too long for the servers. Raises ConfigError if all are."""
    context, whose = known_context(read_model_config(str(model)), config)
    if context is None:
        return []
    notes = []
    refused = []
    for name, given in (("tasks", tasks), ("validation_tasks", validation_tasks)):
        beyond = prompts_beyond(given, context, model)
        if beyond:
            longest, count = beyond[0]
            said = (
                f"{name}: {len(beyond):,} of {len(given):,} prompts leave no room for an answer in "
                f"the servers' context of {context:,} tokens ({whose}), such as {longest.id!r} "
                f"with {count:,} tokens"
            )
            notes.append(f"{said}; their samples fail")
            if len(beyond) == len(given):
                refused.append(f"{said}; raise server: max_model_len, or give shorter prompts")
    if refused:
        raise ConfigError("TrainConfig", refused)
    return notes


def _base_note(config: TrainConfig, folder: RunFolder, model: Path) -> str | None:
    """Return a note for a run with adapters begun by an earlier ttrl: its base was held in fp32 by
    default.
    """
    newest = folder.written_version(max(0, folder.first_unfinished() - 1))
    before = read_mapping(folder.checkpoint(newest) / ADAPTER_FOLDER / ADAPTER_SETTINGS)
    now = config.recipe_config({}).lora_base_dtype
    dtype = stored_dtype(model)
    if (before.get("lora_base_dtype"), now) != ("fp32", "auto") or dtype == "float32":
        return None
    return (
        "earlier, this run held the base of its adapters in fp32; from now on, it holds the base "
        f"as in its files, in {dtype} (lora_base_dtype 'auto'): the same numbers, bit for bit, in "
        "half the memory"
    )


def _on_cluster(
    config: TrainConfig, folder: RunFolder, console: Console, model: Path
) -> tuple[Callable[[Path], Sequence[JoinedServer]], dict[str, Any]]:
    """Return a function to start servers on a cluster, given their model, and the arguments for
    `Phases` to start trainer and sampling workers there; no servers or arguments without one.
    """
    if config.cluster is None:
        return lambda base: [], {}
    from ttrl.cluster.replicas import start_replicas
    from ttrl.cluster.trainers import ClusterTrainer
    from ttrl.cluster.workers import start_workers

    replicas = functools.partial(start_replicas, config, logs=folder.path / "logs")
    trainer = Trainer(config, folder, console, ClusterTrainer if config.nnodes > 1 else None)
    return replicas, {"trainer": trainer, "workers": start_workers(config, model)}


def _chosen(
    config: TrainConfig, saved: Mapping[str, Any], console: Console, parts: Parts = THIS_MACHINE
) -> TrainConfig:
    """Return the config with its open settings chosen for this machine's GPUs or, without any, for
    its memory; or as begun (`saved`). Raises ConfigError for settings too large to fit."""
    gpus = parts.gpus() if config.device != "cpu" else []
    if saved and not gpus and config.placement != "split":
        return as_begun(config, saved, CHOSEN_ON_CPU)
    config = as_begun(config, saved)
    shape = read_model_config(model_named(config.model))
    choices = choose(shape, config, gpus, host=parts.host(), advise=not saved)
    if saved and choices.problem is not None:
        kept = (
            "; this run keeps its earlier choices: for other GPUs or longer rows, start a new run"
        )
        choices = dataclasses.replace(choices, problem=choices.problem + kept)
    refuse(choices)
    if saved:
        return config
    if gpus:
        place = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} with {gib(choices.memory)}"
    else:
        place = f"this machine's {gib(choices.memory)} of memory"
    if gpus or choices.reasons:
        summary = choices.summary() or "nothing, all is set"
        console.line(f"chosen for {place} (`ttrl plan` says why): {summary}")
    if "save_every" in choices.reasons:
        console.line(f"note: save_every is 1, {choices.reasons['save_every']}")
    if choices.is_tight:
        needs = f"the trainer needs about {gib(choices.trainer)} (within about 10%)"
        if choices.kept:
            needs += f", and servers keep {gib(choices.kept)}"
        console.line(f"note: nearly full: {needs}")
    return choices.config


def local_model(model: str, *, chat_template: bool = True) -> Path:
    """Return the model's folder; get a model named in READY_MODELS or on the hub. Raises
    ModelFolderError, also for a missing chat template unless told otherwise."""
    return local_folder(model_named(model), chat_template=chat_template)


__all__ = ["THIS_MACHINE", "Parts", "RunResult", "TrainConfig", "train_checked"]
