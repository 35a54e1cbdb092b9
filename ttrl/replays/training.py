"""Train again on regraded rollouts: the ordinary pack and train phases, in a folder laid out like a
run's.

The rollouts are the original run's, so from the second iteration on they come from other policies
(off-policy). Ratios are still right: they use the sampler's own log-probabilities from the
rollouts. `from_checkpoints` instead starts each iteration from the original run's checkpoint, to
keep all of them on-policy.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError
from ttrl.facts import MetricsRow
from ttrl.loop.environment import describe_environment
from ttrl.loop.phases import Phases
from ttrl.loop.train import local_model
from ttrl.messages import JsonObject
from ttrl.report.page import write_report
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.metrics import metrics_row
from ttrl.server.chat_template import with_chat_template
from ttrl.system.console import Console
from ttrl.system.files import digest, write_json, write_jsonl
from ttrl.text import percent
from ttrl.weights.policy_server import PolicyServer

_FROM_CHECKPOINTS = (
    "Training again, each iteration from the run's own checkpoint of its sampling policy."
)
_CHAIN = "Training again on the new grades, each iteration from the one before."
_OFF_POLICY = (
    "After iteration {}, the rollouts are off-policy: the run's policy sampled them, not ours.\n"
    "Ratios use the sampler's log-probabilities; the effective sample size shows how they differ."
)
_HOW = {
    "checkpoints": "each iteration from the run's own checkpoint",
    "chain": "each iteration from the one before",
}


class ReplayTraining(RunFolder):
    """Train a replay's iterations in order, in its folder: a run folder with another run's first
    policies. Iterations done already, by their markers, are not repeated."""

    def __init__(
        self, path: Path, original: RunFolder, numbers: Sequence[int], *, from_checkpoints: bool
    ) -> None:
        """Raises RunFolderError if the original run has lost the training's starting point,
        ConfigError, ModelFolderError.
        """
        super().__init__(path)
        self._original, self._numbers, self._from_checkpoints = (
            original,
            list(numbers),
            from_checkpoints,
        )
        # Nothing is logged here, so the run's loggers need not be installed on this machine.
        values = {**original.config(), "loggers": []}
        self._config = TrainConfig.parse(values, str(original.path / "config.yaml"))
        self._start, self._template = _starting_model(original, self._config)
        needed = [number - 1 for number in numbers][: None if from_checkpoints else 1]
        missing = [number for number in needed if not _can_start_from(original, number)]
        if missing:
            there = [
                number + 1 for number in range(max(needed) + 1) if _can_start_from(original, number)
            ]
            raise RunFolderError(
                f"{original.path} no longer has the checkpoint and optimizer state of iteration "
                f"{', '.join(map(str, missing[:8]))}{', …' if missing[8:] else ''}, from which the "
                "next iteration trains (a run keeps its newest keep_checkpoints). Training can "
                f"start at iteration {', '.join(map(str, there))}: choose with --iterations"
            )

    def _original_policy(self, number: int) -> int | None:
        """Return the original run's policy to start iteration `number` + 1 from; None to start from
        our own.
        """
        if self._from_checkpoints:
            return number
        if self.policy_version(number):
            return None
        return self._numbers[0] - 1

    def checkpoint(self, number: int) -> Path:
        """Return the starting checkpoint of iteration `number` + 1: our own newest policy, or the
        original run's.
        """
        policy = self._original_policy(number)
        if policy is None:
            return super().checkpoint(number)
        # The folder of iteration 0 holds links; pruning removes them like any checkpoint.
        if self._original.policy_version(policy):
            return self._original.checkpoint(policy)
        return self._start

    def state(self, number: int) -> Path | None:
        """Return the optimizer state of `checkpoint(number)`."""
        policy = self._original_policy(number)
        if policy is None:
            return super().state(number)
        return self._original.state(policy)

    def sampler(self, sampled_by: int, number: int) -> int | None:
        """Return None: the rollouts come from the original's policies, and nothing here is judged
        by them.
        """
        return None

    def merged(self, before: Mapping[str, Any] | None) -> JsonObject:
        """Return the training entry for replay.json, merged with the entry `before`: this training
        repeats or continues it.

        Raises RunFolderError for a different kind of training in the folder, since this one cannot
        continue it.
        """
        if self._from_checkpoints:
            start = "checkpoints"
        else:
            start = "chain"
        old = before["iterations"] if before else []
        differs = start == "chain" and any(
            one != other for one, other in zip(old, self._numbers, strict=False)
        )
        if before and (before["start"] != start or differs):
            raise RunFolderError(
                f"{self.path} holds another training: {_HOW[before['start']]}, iterations "
                f"{', '.join(map(str, old))}; give "
                "another --output"
            )
        return {"start": start, "iterations": sorted({*old, *self._numbers})}

    def train_again(self, console: Console) -> Path | None:
        """Pack and train every iteration; return the newest checkpoint, None if nothing was
        trained.
        """
        console.line(_FROM_CHECKPOINTS if self._from_checkpoints else _CHAIN)
        if self._numbers[1:] and not self._from_checkpoints:
            console.line(_OFF_POLICY.format(self._numbers[0]))
        # Nothing is sampled.
        config = dataclasses.replace(
            self._config, run=str(self.path), weight_sync="reload", save_every=1
        )
        self.remember_config(config.to_dict(), config.defaults())
        write_json(self.path / "environment.json", describe_environment())
        self._start = with_chat_template(
            self._start, self._template, self.path.absolute() / "model"
        )
        server = PolicyServer(config, self.path / "logs", console)  # never started
        phases = Phases(config, self, self._start, server=server, console=console)
        newest = None
        rows = []
        try:
            for number in self._numbers:
                phases.pack(number)
                phases.train_policy(number)
                rows.append(metrics_row(self.iteration(number)))
                write_jsonl(self.path / "metrics.jsonl", [row.to_json() for row in rows])
                console.line(self._line(rows[-1]))
                if rows[-1].trained:
                    newest = self.iteration(number).path / "checkpoint"
                if not self._from_checkpoints:
                    self.prune(number, config.keep_checkpoints, None)
        finally:
            phases.trainer.stop()
        if newest is None:
            return None
        write_report(self.path)
        if newest.exists():
            return newest
        return None

    def _line(self, row: MetricsRow) -> str:
        number = row.iteration
        if not row.trained:
            return f"iteration {number:3d}  no group had a signal: nothing trained"
        parts = [
            f"iteration {number:3d}  reward {row.reward:.3f}  signal "
            f"{row.groups.kept}/{row.groups.total}"
        ]
        ess = row.compared.ess
        parts += [] if ess is None else [f"effective sample size {percent(ess)}"]
        parts.append(f"{row.seconds.train or 0.0:.1f} s")
        mine, theirs = (
            folder.iteration(number).weights("train") for folder in (self, self._original)
        )
        if mine and mine.items() <= theirs.items():  # older runs merged every adapter
            parts.append("the same checkpoint as the run's, bit for bit")
        return "  ".join(parts)


def _can_start_from(original: RunFolder, number: int) -> bool:
    """Return whether a run still has checkpoint and state after iteration `number`."""
    state = original.state(number)
    return state is None or (
        state.is_dir() and (original.checkpoint(number) / "config.json").is_file()
    )


def _starting_model(original: RunFolder, config: TrainConfig) -> tuple[Path, str | None]:
    """Return a run's starting model, and the chat template it still lacks. Raises ModelFolderError,
    and RunFolderError for a changed model.
    """
    folder = original.iteration(0).path / "checkpoint"
    template = None
    if not (folder / "config.json").is_file():
        template = config.chat_template
        folder = local_model(config.model, chat_template=template is None)
    for name, expected in original.iteration(0).weights("prepare").items():
        path = folder / Path(name).relative_to("checkpoint")
        if not path.is_file() or digest(path) != expected:
            raise RunFolderError(
                f"{path} is not the starting model of {original.path}: its weights differ; restore "
                "them"
            )
    return folder, template
