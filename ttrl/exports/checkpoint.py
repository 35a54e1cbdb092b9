"""Choose the checkpoint of a run to hand on."""

from dataclasses import dataclass
from pathlib import Path

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError
from ttrl.run_folder.folder import RunFolder, check_run_folder
from ttrl.run_folder.metrics import validation_metric
from ttrl.run_folder.pruning import best_policies
from ttrl.run_folder.reader import RunData, read_run
from ttrl.text import compact, spans


@dataclass(frozen=True)
class Chosen:
    """A checkpoint of a run."""

    folder: Path
    iteration: int
    """Of its training."""
    why: str
    """"the best by held-out exact: 0.91"."""
    run: RunData
    """Its rows end with the iteration."""
    config: TrainConfig

    @property
    def name(self) -> str:
        """Return a name for files: "letters-0016"."""
        return f"{self.run.folder.name}-{self.iteration:04d}"


def choose(path: Path, iteration: int | None = None) -> Chosen:
    """Return the best checkpoint of the run in `path`; without validation, the newest; or the one
    of an iteration. `path` may also be a checkpoint within a run.

    Raises RunFolderError for a folder without a run, a run without a trained policy, and a
    checkpoint removed by the rules of `keep_checkpoints`.
    """
    path = path.absolute()
    if path.name == "checkpoint" and path.parent.name.isdigit() and iteration is None:
        iteration = int(path.parent.name)
        path = path.parents[2]
    check_run_folder(path)
    folder = RunFolder(path)
    # Problems of this machine, such as a missing package, are none of a finished run.
    config, _ = TrainConfig.examine(folder.config())
    rows = folder.metrics()
    if not rows or not folder.policy_version(rows[-1].iteration):
        raise RunFolderError(f"{path} has no trained policy yet; let the run finish an iteration")
    newest = folder.written_version(rows[-1].iteration)
    if iteration is None:
        best = next(iter(best_policies(folder, rows, config)), None)
        number = newest
        if best is not None:
            number = best
        if number == 0:
            raise RunFolderError(
                f"{path}: no trained policy was better than the starting model in held-out "
                f"{config.validation_metric}; choose one with --iteration, such as {newest}"
            )
        value = next(
            (validation_metric(row, config) for row in rows if row.iteration == number), None
        )
        why = "the newest: the run has no held-out tasks"
        if best is not None and value is not None:
            why = f"the best by held-out {config.validation_metric}: {compact(value)}"
    else:
        number = folder.policy_version(iteration)
        why = "as asked"
    checkpoint = folder.checkpoint(number)
    if number == 0 or not (checkpoint / "config.json").is_file():
        there = sorted(
            int(one.parent.parent.name)
            for one in path.glob("iterations/*/checkpoint/config.json")
            if int(one.parent.parent.name) > 0
        )
        raise RunFolderError(
            f"{path} has no checkpoint of iteration {number}; "
            f"there are those of {spans(there) or 'none'} (keep_checkpoints, keep_best and "
            "keep_every choose them)"
        )
    run = read_run(path, [row for row in rows if row.iteration <= number])
    return Chosen(checkpoint, number, why, run, config)
