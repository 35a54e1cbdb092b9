"""Choose the checkpoints and optimizer states to keep: the newest n, the best k, every n-th.
Markers always stay.

Two things are never removed: the newest policy, whatever the rules, and the files needed to retrain
the last two iterations (so `keep_checkpoints` is at least 3). Policies in training, sampling or
sync are newer than those, so no server and no trainer reads a removed one. Each folder disappears
in one step (`ttrl.system.files.remove_folder`). The next pruning completes an interrupted one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ttrl.configs.run import TrainConfig
from ttrl.facts import MetricsRow
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.metrics import validation_metric


@dataclass(frozen=True)
class Kept:
    """Iterations with a kept checkpoint, and with a kept state."""

    checkpoints: frozenset[int]
    states: frozenset[int]


def kept_of(
    folder: RunFolder, rows: Iterable[MetricsRow], config: TrainConfig, newest: int
) -> Kept:
    """Return the iterations to keep after `newest` by the rules of `config`, with the best from
    `rows` of metrics.jsonl; everything of later policies is kept.
    """
    written = folder.written_until(newest)
    last = written[: config.keep_checkpoints]
    if config.keep_every is None:
        every = []
    else:
        every = [number for number in written if number and number % config.keep_every == 0]
    return Kept(frozenset([*last, *best_policies(folder, rows, config), *every]), frozenset(last))


def best_policies(folder: RunFolder, rows: Iterable[MetricsRow], config: TrainConfig) -> list[int]:
    """Return the `keep_best` written policies with the best validation metric, best first; the
    newest among equals.
    """
    scored = [
        (value, row.iteration)
        for row in rows
        if (value := validation_metric(row, config)) is not None
    ]
    written = folder.written_until(max((number for _, number in scored), default=0))
    best: list[int] = []
    for _, number in sorted(scored, reverse=True):
        version = next(one for one in written if one <= number)
        if version not in best and (
            config.save_every == 1 or folder.policy_version(number) == version
        ):
            best.append(version)
        if len(best) == config.keep_best:
            break
    return best


def prune(folder: RunFolder, rows: Iterable[MetricsRow], config: TrainConfig, newest: int) -> Kept:
    """Remove everything outside the rules; return the kept ones. Raises StorageError."""
    kept = kept_of(folder, rows, config, newest)
    folder.remove(newest, kept.checkpoints, kept.states)
    return kept


def most_kept(config: TrainConfig, iteration: int) -> tuple[int, int]:
    """Return the most checkpoints and states during the training of `iteration`; iteration 0's are
    links, not counted.
    """
    before = (iteration - 1) // config.save_every
    if config.keep_every is None:
        every = 0
    else:
        every = (iteration - 1) // config.keep_every
    return min(before, config.keep_checkpoints + config.keep_best + every) + 1, min(
        before, config.keep_checkpoints
    ) + 1
