"""Training again on regraded rollouts: the ordinary pack and train phases, in a folder that is laid out like a run.

The rollouts are the original run's, so from the second iteration on they come from other policies than the one that is trained
(off-policy). Ratios are right all the same: they are taken to the sampler's own log-probabilities, which the rollouts hold.
`from_checkpoints` starts each iteration from the original run's checkpoint instead, so that all of them stay on-policy.
"""

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


class ReplayFolder(RunFolder):
    """A run folder whose first policies are another run's."""

    def __init__(self, path: Path, original: RunFolder, start: Path, first: int, *, from_checkpoints: bool) -> None:
        """start: the model that the original run started from. first: the first iteration that is trained."""
        super().__init__(path)
        self.original, self.start, self.first, self.from_checkpoints = original, start, first, from_checkpoints

    def checkpoint(self, number: int) -> Path:
        """What iteration `number` + 1 starts from: our own newest policy, or the original run's."""
        if not self.from_checkpoints and self.policy_version(number):
            return super().checkpoint(number)
        number = number if self.from_checkpoints else self.first - 1
        # The folder of iteration 0 is links, which are removed in time like any checkpoint.
        return self.original.checkpoint(number) if self.original.policy_version(number) else self.start

    def sampler(self, sampled_by: int, number: int) -> int | None:
        """None: the rollouts are of the original's policies, and nothing here is judged by them."""
        return None

    def can_start_from(self, number: int) -> bool:
        """True where the original run still has checkpoint and state of its policy after iteration `number`."""
        state = self.original.state(number)
        return state is None or (state.is_dir() and (self.original.checkpoint(number) / "config.json").is_file())

    def state(self, number: int) -> Path | None:
        """The optimizer's state that belongs to `checkpoint(number)`."""
        if not self.from_checkpoints and self.policy_version(number):
            return super().state(number)
        return self.original.state(number if self.from_checkpoints else self.first - 1)


class ReplayTraining:
    """Trains the iterations of a replay, in order; what is done already, by its markers, is not done again."""

    def __init__(
        self, path: Path, original: RunFolder, config: TrainConfig, numbers: Sequence[int], *, from_checkpoints: bool
    ) -> None:
        """Raises RunFolderError where the original run no longer has what training starts from, ModelFolderError."""
        self.numbers, self.config = list(numbers), config
        start = _starting_model(original, config)
        self.folder = ReplayFolder(path, original, start, self.numbers[0], from_checkpoints=from_checkpoints)
        self._check_inputs()

    def merged(self, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """What decides which training this is, for replay.json: that of `before`, which this one repeats or continues.

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

    def _check_inputs(self) -> None:
        needed = [number - 1 for number in self.numbers]
        if not self.folder.from_checkpoints:
            needed = needed[:1]
        missing = [number for number in needed if not self.folder.can_start_from(number)]
        if missing:
            there = [number + 1 for number in range(max(needed) + 1) if self.folder.can_start_from(number)]
            raise RunFolderError(
                f"{self.folder.original.path} no longer has the checkpoint and optimizer state of iteration "
                f"{', '.join(map(str, missing[:8]))}{', …' if missing[8:] else ''}, from which the next one is trained (a run "
                f"keeps its newest keep_checkpoints); training can start at iteration {', '.join(map(str, there))}: choose with "
                "--iterations"
            )

    def train(self, console: Console) -> Path | None:
        """Packs and trains; returns the newest checkpoint, None where nothing was trained."""
        folder, config = self.folder, self.config
        values = config.to_dict() | {"run": str(folder.path)}
        folder.remember_config(values, config.defaults())
        write_json(folder.path / "environment.json", describe_environment())
        phases = Phases(
            TrainConfig.parse(values, "config"),
            folder,
            folder.start,
            [],
            [],
            PolicyServer(config, folder.path / "logs", console),  # never started
            console,
        )
        newest = None
        try:
            for position, number in enumerate(self.numbers):
                phases.pack(number)
                phases.train(number)
                rows = [phases.metrics_row(one) for one in self.numbers[: position + 1]]
                write_jsonl(folder.path / "metrics.jsonl", rows)
                console.line(self._line(rows[-1]))
                if rows[-1]["trained"]:
                    newest = folder.iteration(number).path / "checkpoint"
                if not folder.from_checkpoints:
                    folder.prune(number, config.keep_checkpoints, None)
        finally:
            phases.trainer.stop()
        if newest is not None:
            write_report(folder.path)
        return newest if newest is not None and newest.exists() else None

    def _line(self, row: Mapping[str, Any]) -> str:
        number = row["iteration"]
        if not row["trained"]:
            return f"iteration {number:3d}  no group had a signal: nothing trained"
        parts = [f"iteration {number:3d}  reward {row['reward']:.3f}  signal {row['groups']['kept']}/{row['groups']['total']}"]
        ess = (row.get("sampler_trainer") or {}).get("ess")
        if ess is not None:
            parts.append(f"effective sample size {ess * 100:.1f}%")
        parts.append(f"{row['seconds']['train']:.1f} s")
        if self._same_as_original(number):
            parts.append("the same checkpoint as the run's, bit for bit")
        return "  ".join(parts)

    def _same_as_original(self, number: int) -> bool:
        """By the digests in both markers."""
        mine, theirs = (
            {name: sha for name, sha in folder.iteration(number).files("train").items() if name.endswith(".safetensors")}
            for folder in (self.folder, self.folder.original)
        )
        return bool(mine) and mine == theirs


def _starting_model(original: RunFolder, config: TrainConfig) -> Path:
    """The model that a run started from. Raises ModelFolderError, and RunFolderError where it is not what it was."""
    linked = original.iteration(0).path / "checkpoint"
    folder = linked if (linked / "config.json").is_file() else local_model(config.model)
    for name, expected in original.iteration(0).files("prepare").items():
        path = folder / Path(name).relative_to("checkpoint")
        if name.endswith(".safetensors") and (not path.is_file() or digest(path) != expected):
            raise RunFolderError(f"{path} is not the model that {original.path} started from: its weights differ; put them back")
    return folder
