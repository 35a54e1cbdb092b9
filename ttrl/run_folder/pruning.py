"""Which checkpoints and optimizer states a run keeps: the newest n, the best k, every n-th. Markers
always stay.

Never removed: the newest policy, whatever the rules say, and what it takes to train the last two
iterations again (so `keep_checkpoints` is at least 3). Policies that are being trained, sampled or
synced are newer than those, so no server and no trainer reads what is removed. Each folder
disappears in one step (`ttrl.system.files.remove_folder`), and a pruning that was cut off is made
up for by the next one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ttrl.configs.run import TrainConfig
from ttrl.facts import MetricsRow
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.metrics import validation_metric


@dataclass(frozen=True)
class Kept:
    """Iterations whose checkpoint, and whose state, stays."""

    checkpoints: frozenset[int]
    states: frozenset[int]


def kept_of(
    folder: RunFolder, rows: Iterable[MetricsRow], config: TrainConfig, newest: int
) -> Kept:
    """Return what the rules of `config` keep after iteration `newest`, with the best told by `rows`
    of metrics.jsonl; of later policies, everything is kept."""
    written = folder.written_until(newest)
    last = written[: config.keep_checkpoints]
    if config.keep_every is None:
        every = []
    else:
        every = [number for number in written if number and number % config.keep_every == 0]
    return Kept(frozenset([*last, *best_policies(folder, rows, config), *every]), frozenset(last))


def best_policies(folder: RunFolder, rows: Iterable[MetricsRow], config: TrainConfig) -> list[int]:
    """Return the `keep_best` policies with the best validation metric among those that were
    written, best first; of equals the newest."""
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
    """Remove what the rules do not keep; return what they do. Raises StorageError."""
    kept = kept_of(folder, rows, config, newest)
    folder.remove(newest, kept.checkpoints, kept.states)
    return kept


def most_kept(config: TrainConfig, iteration: int) -> tuple[int, int]:
    """Return the most checkpoints and states while iteration `iteration` is trained; iteration 0's
    are links, not counted.
    """
    before = (iteration - 1) // config.save_every
    if config.keep_every is None:
        every = 0
    else:
        every = (iteration - 1) // config.keep_every
    return min(before, config.keep_checkpoints + config.keep_best + every) + 1, min(
        before, config.keep_checkpoints
    ) + 1
