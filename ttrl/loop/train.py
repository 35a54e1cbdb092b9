"""The loop: sample → grade → pack → train → sync → validate, iteration after iteration, in a folder that explains itself.

Every phase ends with a marker in the run folder (`ttrl.loop.run_folder`), so the same call continues at the first phase without
one, whatever ended the process before. The phases themselves: `ttrl.loop.phases`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ttrl.errors import ConfigError, TaskError, UserError
from ttrl.files import append_jsonl, write_json
from ttrl.loop.config import TrainConfig
from ttrl.loop.console import Console, clock, seconds_by_phase
from ttrl.loop.environment import describe_environment
from ttrl.loop.metrics_row import TOO_LONG_WORDS
from ttrl.loop.phases import Phases
from ttrl.loop.policy_server import PolicyServer, make_server
from ttrl.loop.report import write_report
from ttrl.loop.run_folder import RunFolder
from ttrl.processes import reap_leftovers
from ttrl.rollouts.chat_completions import request_kwargs
from ttrl.server.model_folder import check_model_folder
from ttrl.tasks.task import Task


@dataclass(frozen=True)
class RunResult:
    """What a run came to."""

    run: Path
    checkpoint: Path
    """The newest policy, in Hugging Face layout."""
    best_checkpoint: Path
    """The policy with the best validation metric; the newest one where there was no validation."""
    metrics: list[dict[str, Any]]
    """One row per iteration, the model before training (0) included, as in metrics.jsonl."""
    report: Path


def train(config: TrainConfig, tasks: Sequence[Task], validation_tasks: Sequence[Task] = (), *, quiet: bool = False) -> RunResult:
    """Trains `config.model` on `tasks` by reinforcement learning; the same call on the same run folder continues it.

    Raises ConfigError and TaskError for what is wrong with the arguments, before anything expensive starts; ModelFolderError,
    RunFolderError, ServerError, TrainerError and StorageError later. Whatever was finished stays, and nothing is left running.
    """
    task_lists = {"tasks": _listed("tasks", tasks), "validation_tasks": _listed("validation_tasks", validation_tasks)}
    config = _checked(config, **task_lists).resolved(cuda=torch.cuda.is_available())
    described = {name: {"count": len(given), "digest": _tasks_digest(name, given)} for name, given in task_lists.items()}
    folder, console = RunFolder(config.run), Console(quiet=quiet)
    model = local_model(config.model)
    with folder.locked():
        reap_leftovers(folder.path)
        folder.clean()
        folder.remember_config(config.to_dict(), config.defaults())
        folder.remember_tasks(described)
        server = PolicyServer(config, folder.path / "logs", console)
        try:
            _iterate(Phases(config, folder, model, *task_lists.values(), server, console), console)
        finally:
            server.stop()
        rows = folder.metrics()
        best = _best(rows, config) if task_lists["validation_tasks"] else None
        newest = folder.policy_version(rows[-1]["iteration"])
        return RunResult(
            run=folder.path,
            checkpoint=folder.checkpoint(newest),
            best_checkpoint=folder.checkpoint(newest if best is None else best),
            metrics=rows,
            report=write_report(folder.path),
        )


def _listed(name: str, given: Iterable[Task]) -> list[Task]:
    if isinstance(given, Task | str) or not isinstance(given, Iterable):
        raise TaskError(f"{name} is a {type(given).__name__}; give a list of Task")
    listed = list(given)
    wrong = [type(task).__name__ for task in listed if not isinstance(task, Task)]
    if wrong:
        raise TaskError(
            f"{name}: {len(wrong)} of {len(listed)} are no Task, the first is a {wrong[0]}; make them with ttrl.Task(...)"
        )
    return listed


def _tasks_digest(name: str, tasks: list[Task]) -> str:
    """Of ids and messages in their order. Raises TaskError for what no file could hold."""
    hashed = hashlib.sha256()
    for task in tasks:
        try:
            hashed.update(json.dumps([task.id, task.messages], sort_keys=True, ensure_ascii=False, allow_nan=False).encode())
        except (TypeError, ValueError) as error:
            raise TaskError(f"{name}: task {task.id!r}: its id and messages cannot be written as JSON: {error}") from error
    return hashed.hexdigest()


def _checked(config: TrainConfig, tasks: list[Task], validation_tasks: list[Task]) -> TrainConfig:
    """Everything that can be known to be wrong before anything starts, at once."""
    problems: list[str] = []
    try:
        config = config.check("TrainConfig")
    except ConfigError as error:
        problems += error.problems
    else:
        try:
            request_kwargs(config.sampling)
        except UserError as error:
            problems.append(f"sampling: {error}")
        try:
            make_server(config, Path(config.model), Path(config.run))
        except ConfigError as error:
            problems += [f"server: {problem}" for problem in error.problems]
    if not tasks:
        problems.append("there are no tasks to train on")
    elif not problems and len(tasks) < config.tasks_per_iteration:
        problems.append(f"tasks_per_iteration is {config.tasks_per_iteration}, but there are only {len(tasks)} tasks")
    if not problems and config.tokens_per_iteration is not None and (several := [task.id for task in tasks if task.rollout]):
        problems.append(
            f"tokens_per_iteration is {config.tokens_per_iteration}, but {len(several)} of {len(tasks)} tasks have a rollout "
            f"(such as {several[0]!r}); a conversation cannot be cut off by a budget and continued later: leave "
            "tokens_per_iteration out, and limit rollouts with Task(limits=RolloutLimits(tokens=…))"
        )
    if not problems and config.stop_at is not None and not validation_tasks:
        problems.append("stop_at needs validation tasks")
    if problems:
        raise ConfigError("TrainConfig", problems)
    return config


def local_model(model: str) -> Path:
    """The model's folder; downloads it from the hub where `model` is a name there. Raises ModelFolderError."""
    folder = check_model_folder(model)
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
        check_model_folder(folder)
    return folder.absolute()


def _iterate(phases: Phases, console: Console) -> None:
    config, folder = phases.config, phases.folder
    rows = {row["iteration"]: row for row in folder.metrics()}
    finished_before, worked = max(rows, default=None), False
    for number in range(config.iterations + 1):
        if number not in rows:
            if not worked:
                worked = True
                write_json(folder.path / "environment.json", describe_environment())
                if finished_before is not None:
                    console.line(f"continuing {folder.path} after iteration {finished_before}")
            began, resumed = clock(), phases.anything_done(number)
            phases.prepare() if number == 0 else phases.train_iteration(number)
            phases.validate(number)
            row = phases.metrics_row(number)
            if not resumed:
                row["seconds"]["total"] = clock() - began
            append_jsonl(folder.path / "metrics.jsonl", row)
            rows[number] = row
            console.line(_line(row, config))
            write_report(folder.path)
            _prune(phases, rows)
        if _reached(rows[number], config):
            console.line(f"{config.validation_metric} reached {config.stop_at} in validation; done after iteration {number}")
            break
    if not worked:
        console.line(f"{folder.path} is finished; more iterations, or another stop_at, would continue it")


def _prune(phases: Phases, rows: dict[int, dict[str, Any]]) -> None:
    config = phases.config
    newest = max(rows)
    best = _best(list(rows.values()), config) if phases.validation_tasks else None
    phases.folder.prune(newest, config.keep_checkpoints, None if best is None else phases.folder.policy_version(best))


def validation_metric(row: dict[str, Any], config: TrainConfig) -> float | None:
    """The number by which a run is judged, of one metrics row."""
    if config.validation_metric == "reward":
        return row.get("validation_reward")
    return (row.get("validation") or {}).get(config.validation_metric)


def _best(rows: list[dict[str, Any]], config: TrainConfig) -> int | None:
    scored = [(value, row["iteration"]) for row in rows if (value := validation_metric(row, config)) is not None]
    return max(scored)[1] if scored else None  # the newest of equals


def _reached(row: dict[str, Any], config: TrainConfig) -> bool:
    value = validation_metric(row, config)
    return config.stop_at is not None and value is not None and value >= config.stop_at


def _line(row: dict[str, Any], config: TrainConfig) -> str:
    """The line of an iteration: what it learned, and what it cost."""
    parts = []
    if row.get("reward") is not None:
        metrics = "".join(f", {name} {value:.3f}" for name, value in row["metrics"].items())
        parts.append(f"reward {row['reward']:.3f}{metrics}")
    if row.get("validation_reward") is not None:
        held_out = validation_metric(row, config)
        known = ", ".join(["reward", *row.get("validation", {})])
        missing = f"no held-out metric {config.validation_metric!r} (there are: {known})"
        parts.append(f"held-out {config.validation_metric} {held_out:.3f}" if held_out is not None else missing)
    if row["iteration"] and not row["trained"]:
        parts.append("no group had a signal: nothing trained")
    elif row["iteration"]:
        parts.append(f"signal {row['groups']['kept']}/{row['groups']['total']}")
    if row.get("failed"):
        parts.append(f"{row['failed']} samples failed")
    dropped = row.get("pack", {}).get("dropped", {})
    parts += [f"{dropped[name]} {text}" for name, text in TOO_LONG_WORDS.items() if dropped.get(name)]
    if row.get("completion_tokens"):
        speed = f", {row['tokens_per_second']:.0f}/s" if row["tokens_per_second"] is not None else ""
        parts.append(f"{row['completion_tokens']} tokens{speed}")
    parts.append(f"{row['seconds']['total']:.1f} s ({seconds_by_phase(row['seconds'])})")
    name = f"iteration {row['iteration']:3d}" if row["iteration"] else "before       "
    return f"{name}  " + "  ".join(parts)


__all__ = ["RunResult", "TrainConfig", "train"]
