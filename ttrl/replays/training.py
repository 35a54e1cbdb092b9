"""Training again on regraded rollouts: the ordinary pack and train phases, in a folder that is laid out like a run.

The rollouts are the original run's, so from the second iteration on they come from other policies than the one that is trained
(off-policy). Ratios are right all the same: they are taken to the sampler's own log-probabilities, which the rollouts hold.
`from_checkpoints` starts each iteration from the original run's checkpoint instead, so that all of them stay on-policy.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError
from ttrl.launch.policy_server import PolicyServer
from ttrl.loop.environment import describe_environment
from ttrl.loop.phases import Phases
from ttrl.loop.train import local_model
from ttrl.report.page import write_report
from ttrl.run_folder.folder import RunFolder
from ttrl.system.console import Console
from ttrl.system.files import digest, write_json, write_jsonl
from ttrl.text import percent


class ReplayFolder(RunFolder):
    """A run folder whose first policies are another run's."""

    def __init__(self, path: Path, original: RunFolder, start: Path, first: int, *, from_checkpoints: bool) -> None:
        """start: the model that the original run started from. first: the first iteration that is trained."""
        super().__init__(path)
        self.original, self.start, self.first, self.from_checkpoints = original, start, first, from_checkpoints

    def _original_policy(self, number: int) -> int | None:
        """Return the policy of the original run that iteration `number` + 1 starts from; None where it starts from our own."""
        if self.from_checkpoints:
            return number
        return None if self.policy_version(number) else self.first - 1

    def checkpoint(self, number: int) -> Path:
        """Return what iteration `number` + 1 starts from: our own newest policy, or the original run's."""
        if (policy := self._original_policy(number)) is None:
            return super().checkpoint(number)
        # The folder of iteration 0 is links, which are removed in time like any checkpoint.
        return self.original.checkpoint(policy) if self.original.policy_version(policy) else self.start

    def state(self, number: int) -> Path | None:
        """Return the optimizer state that belongs to `checkpoint(number)`."""
        policy = self._original_policy(number)
        return super().state(number) if policy is None else self.original.state(policy)

    def sampler(self, sampled_by: int, number: int) -> int | None:
        """Return None: the rollouts are of the original's policies, and nothing here is judged by them."""
        return None


class ReplayTraining:
    """Trains the iterations of a replay, in order; what is done already, by its markers, is not done again."""

    def __init__(self, path: Path, original: RunFolder, numbers: Sequence[int], *, from_checkpoints: bool) -> None:
        """Raises RunFolderError where the original run no longer has what training starts from, ConfigError, ModelFolderError."""
        self.numbers, self.original = list(numbers), original
        self.config = TrainConfig.parse(original.config(), str(original.path / "config.yaml"))
        start = _starting_model(original, self.config)
        self.folder = ReplayFolder(path, original, start, self.numbers[0], from_checkpoints=from_checkpoints)
        needed = [number - 1 for number in self.numbers][: None if from_checkpoints else 1]
        if missing := [number for number in needed if not self._can_start_from(number)]:
            there = [number + 1 for number in range(max(needed) + 1) if self._can_start_from(number)]
            raise RunFolderError(
                f"{original.path} no longer has the checkpoint and optimizer state of iteration "
                f"{', '.join(map(str, missing[:8]))}{', …' if missing[8:] else ''}, from which the next one is trained (a run "
                f"keeps its newest keep_checkpoints); training can start at iteration {', '.join(map(str, there))}: choose with "
                "--iterations"
            )

    def _can_start_from(self, number: int) -> bool:
        """Return whether the original run still has checkpoint and state of its policy after iteration `number`."""
        state = self.original.state(number)
        return state is None or (state.is_dir() and (self.original.checkpoint(number) / "config.json").is_file())

    def merged(self, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what replay.json says of this training, with that of `before`, which this one repeats or continues.

        Raises RunFolderError where the folder holds a training of another kind, which this one cannot continue.
        """
        start = "checkpoints" if self.folder.from_checkpoints else "chain"
        old, new = list(before["iterations"]) if before else [], self.numbers
        shared = min(len(old), len(new))
        if before and (before["start"] != start or (start == "chain" and old[:shared] != new[:shared])):
            how = {"checkpoints": "each iteration from the run's own checkpoint", "chain": "each iteration from the one before"}
            raise RunFolderError(
                f"{self.folder.path} holds another training: {how[before['start']]}, iterations {', '.join(map(str, old))}; "
                "give another --output"
            )
        return {"start": start, "iterations": sorted({*old, *new})}

    def train(self, console: Console) -> Path | None:
        """Pack and train every iteration; return the newest checkpoint, None where nothing was trained."""
        folder = self.folder
        config = dataclasses.replace(self.config, run=str(folder.path))
        folder.remember_config(config.to_dict(), config.defaults())
        write_json(folder.path / "environment.json", describe_environment())
        server = PolicyServer(config, folder.path / "logs", console)  # never started
        phases = Phases(config, folder, folder.start, server=server, console=console)
        newest, rows = None, []
        try:
            for number in self.numbers:
                phases.pack(number)
                phases.train(number)
                rows.append(phases.metrics_row(number))
                write_jsonl(folder.path / "metrics.jsonl", rows)
                console.line(self._line(rows[-1]))
                if rows[-1]["trained"]:
                    newest = folder.iteration(number).path / "checkpoint"
                if not folder.from_checkpoints:
                    folder.prune(number, config.keep_checkpoints, None)
        finally:
            phases.trainer.stop()
        if newest is None:
            return None
        write_report(folder.path)
        return newest if newest.exists() else None

    def _line(self, row: Mapping[str, Any]) -> str:
        number = row["iteration"]
        if not row["trained"]:
            return f"iteration {number:3d}  no group had a signal: nothing trained"
        parts = [f"iteration {number:3d}  reward {row['reward']:.3f}  signal {row['groups']['kept']}/{row['groups']['total']}"]
        ess = (row.get("sampler_trainer") or {}).get("ess")
        if ess is not None:
            parts.append(f"effective sample size {percent(ess)}")
        parts.append(f"{row['seconds']['train']:.1f} s")
        mine, theirs = (folder.iteration(number).weights("train") for folder in (self.folder, self.original))
        if mine and mine == theirs:
            parts.append("the same checkpoint as the run's, bit for bit")
        return "  ".join(parts)


def _starting_model(original: RunFolder, config: TrainConfig) -> Path:
    """Return the model that a run started from. Raises ModelFolderError, and RunFolderError where it is not what it was."""
    linked = original.iteration(0).path / "checkpoint"
    folder = linked if (linked / "config.json").is_file() else local_model(config.model)
    for name, expected in original.iteration(0).weights("prepare").items():
        path = folder / Path(name).relative_to("checkpoint")
        if not path.is_file() or digest(path) != expected:
            raise RunFolderError(f"{path} is not the model that {original.path} started from: its weights differ; put them back")
    return folder
