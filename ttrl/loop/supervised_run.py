"""Run supervised training in pieces, and ask the held-out tasks after each of them.

    RUN/iterations/0000/    the starting model's answers
    RUN/iterations/0001/    a piece of training, and the answers after it
    ...

A piece is an iteration of a run folder, with the phases train and validate. So the same call
continues after an interruption, and reports and comparisons read it like a run of RL. One server
answers throughout: new weights come into it in place, with the proofs of a run (`ttrl.weights`). It
sleeps while the trainer needs its GPU.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.facts import MetricsRow, TrainFacts, TrainFigures, ValidateFacts, number
from ttrl.launch.tune import SFT_RECIPE, tune
from ttrl.loop.phases import Phases
from ttrl.records import CANARY_FILE
from ttrl.run_folder.folder import IterationFolder, RunFolder
from ttrl.run_folder.metrics import metrics_row
from ttrl.run_folder.reader import held_out_text
from ttrl.server.connection import ServerConnection
from ttrl.server.vllm import VLLMServer
from ttrl.system.console import Console, clock
from ttrl.system.files import append_jsonl, read_jsonl
from ttrl.system.processes import reap_leftovers
from ttrl.tasks.task import Task
from ttrl.text import counted
from ttrl.weights.policy_server import PolicyServer
from ttrl.weights.sync import SyncReport, sync_weights


@dataclass(frozen=True)
class HeldOut:
    """Hold the tasks for each policy."""

    tasks: Sequence[Task]
    """Without any, no server is started."""
    config: TrainConfig
    """How a run samples and judges them, and its servers."""

    @property
    def metric(self) -> str:
        """Return the name of the measure."""
        return self.config.validation_metric


def held_out_config(config: TrainConfig, metric: str) -> TrainConfig:
    """Return a run's config for its held-out tasks in supervised training: servers on this machine
    with whole weights, which come from files and leave the GPUs to the trainer meanwhile.
    """
    if config.device == "cuda":
        weight_sync: Literal["sleep", "reload"] = "sleep"
    else:
        weight_sync = "reload"
    return dataclasses.replace(
        config,
        validation_metric=metric,
        validate_every=1,
        weight_sync=weight_sync,
        placement="colocated" if config.device == "cuda" else "auto",
        servers=max(1, config.servers_here),
        training={},
        off_policy_steps=0,
        adapters="auto",
        joined_servers=[],
        cluster=None,
        sampling_workers=None,
        nnodes=1,
        save_every=1,
        keep_every=None,
        mirror=None,
        early_stop=None,
    )


def supervised_run(
    run: Path,
    settings: Mapping[str, Any],
    asked: HeldOut,
    *,
    by: Literal["steps", "flops"],
    marks: Sequence[float],
    stop_at: float | None = None,
    before: IterationFolder | None = None,
    processes: int = 1,
) -> Path:
    """Train up to each mark, counted from the start, and ask the held-out tasks there and before
    the start; end once their metric reaches `stop_at`. The same call continues after an
    interruption. Returns the folder of the last model.

    settings: of SFTConfig. before: another run's iteration; its answers by the starting model are
    taken over. processes: on this machine, one for each GPU.
    """
    folder = RunFolder(run)
    with folder.locked(), contextlib.ExitStack() as ends:
        reap_leftovers(folder.path)
        folder.clean()
        own = {
            "run": str(run),
            "seed": settings["seed"],
            "model": settings["model"],
            "validation_metric": asked.metric,
        }
        training = {name: value for name, value in settings.items() if name not in own}
        remembered = own | {"by": by, "marks": list(marks), "training": training}
        if processes > 1:
            remembered["nproc_per_node"] = processes
        folder.remember_config(remembered)
        checkpoint = Path(settings["model"])
        phases = _phases(folder, checkpoint, asked)
        ends.callback(phases.server.stop)
        rows = {row.iteration: row for row in folder.metrics()}
        for place, mark in enumerate([0, *marks]):
            if place not in rows:
                if place:
                    left = mark - sum(_spent(row.train, by) for row in rows.values())
                    piece = {**settings, by: round(left) if by == "steps" else left}
                    _train_on(phases, place, piece, processes)
                rows[place] = _finish(phases, place, before, rows.get(place - 1))
            if place:
                checkpoint = folder.checkpoint(place)
            if not asked.tasks:
                continue
            value = _said(run, rows[place], asked.metric)
            if stop_at is not None and value >= stop_at:
                break
    return checkpoint


def _phases(folder: RunFolder, model: Path, asked: HeldOut) -> Phases:
    """Return the phases of a run that validates, and its servers, not started yet."""
    config = dataclasses.replace(asked.config, run=str(folder.path), model=str(model))
    console = Console()
    server = PolicyServer(config, folder.path / "logs", console, sync=_sync)
    return Phases(
        config, folder, model, server=server, console=console, validation_tasks=asked.tasks
    )


def _sync(
    server: ServerConnection,
    checkpoint_folder: Path,
    *,
    mode: Literal["start", "reload", "restart"] = "reload",
    **how: Any,
) -> SyncReport:
    """Bring a checkpoint to a server, as `sync_weights` does.

    No trainer of ours has written the starting model, so nothing proves it: like `evaluate`, trust
    a server that was started with it.
    """
    if (checkpoint_folder / CANARY_FILE).is_file():  # our recipe has written it
        return sync_weights(server, checkpoint_folder, mode=mode, **how)
    began = clock()
    assert isinstance(server, VLLMServer), "only ours answer"
    if mode != "start":
        server.restart(checkpoint_folder)
    server.policy_folder = checkpoint_folder.absolute()
    return SyncReport("start", clock() - began, None)


def _said(run: Path, row: MetricsRow, metric: str) -> float:
    """Print how good a policy is, and return it. Raises UserError without that metric."""
    value = number(row.held_out(metric))
    if value is None:
        known = ", ".join(["reward", *(row.validation or {})])
        raise UserError(f"{run}: the held-out tasks have no metric {metric!r}; choose from {known}")
    steps = counted(row.train.global_step or 0, "supervised step")
    Console().line(f"{run.name}: after {steps}, held-out {metric} {held_out_text(row, metric)}")
    return value


def _spent(train: TrainFigures, by: Literal["steps", "flops"]) -> float:
    if by == "steps":
        return train.steps or 0
    return train.flops or 0.0


def _train_on(phases: Phases, place: int, settings: Mapping[str, Any], processes: int) -> None:
    """Train the next piece, from model and state of the one before."""
    folder = phases.folder
    iteration = folder.iteration(place)
    if iteration.is_done("train"):
        return
    state = folder.state(place - 1)
    config = {**settings, "output_dir": str(iteration.path), "save_state": True}
    if state is not None:
        config |= {"model": str(folder.checkpoint(place - 1)), "state": str(state)}
    phases.server.rest()
    began = clock()
    tune(
        config,
        iteration.path / "sft.yaml",
        recipe=SFT_RECIPE,
        nproc_per_node=processes,
        pbar_desc=f"{folder.path.name}: supervised training, {place}",
    )
    facts = TrainFacts(
        seconds=clock() - began,
        trained=True,
        steps=read_jsonl(iteration.path / "train.jsonl"),
    )
    iteration.mark(facts, ["train.jsonl", "checkpoint", "state"])


def _finish(
    phases: Phases, place: int, before: IterationFolder | None, row_before: MetricsRow | None
) -> MetricsRow:
    """Ask the held-out tasks; write and return the line of metrics.jsonl."""
    folder = phases.folder
    iteration = folder.iteration(place)
    if phases.has_to_validate(place) and not _taken_over(iteration, before):
        if not place and not (iteration.path / "checkpoint").exists():
            phases.link_start()
        phases.validate(place)
    row = metrics_row(iteration)
    total = row.flops.total or 0.0
    earlier = 0.0 if row_before is None else row_before.flops.cumulated or 0.0
    trained = iteration.marker(TrainFacts) or TrainFacts()
    row = row.replace(
        flops=row.flops.replace(total=total, cumulated=total + earlier),
        completion_tokens=sum(step.trained_tokens or 0 for step in trained.taken()),
    )
    append_jsonl(folder.path / "metrics.jsonl", row.to_json())
    folder.prune(place, keep=1, best=None)
    return row


def _taken_over(iteration: IterationFolder, before: IterationFolder | None) -> bool:
    """Take over another run's answers by the same starting model, if it has them."""
    if iteration.number or before is None:
        return False
    known = before.marker(ValidateFacts)
    if known is None:
        return False
    iteration.path.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(before.path / "validation.jsonl", iteration.path / "validation.jsonl")
    facts = ValidateFacts(
        seconds=known.seconds,
        stats=known.stats,
        sampling=known.sampling,
        intervals=known.intervals,
    )
    iteration.mark(facts, ["validation.jsonl"])
    return True
