"""Throws away the last iterations of a run so that they are done again: what a run that ended with
DriftError needs, once the cause is gone. Only where it is asked for, by number, and only from an
iteration on whose drift was found.

What goes: every iteration from that one on, with rollouts, checkpoint and markers, and their lines
in metrics.jsonl; in the mirror first, so that nothing is taken from there again. Killed in between,
the run is one that ended with the same error, or one that has less left to throw away.
"""

import logging
import os

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError, UserError
from ttrl.run_folder.folder import DRIFT_FILE, REDO_VARIABLE, RunFolder
from ttrl.run_folder.metrics import PHASES, forget_rows
from ttrl.system.mirror_store import MirrorStore

logger = logging.getLogger(__name__)


def redo_asked(given: int | None) -> int | None:
    """Return the iteration from which on a run is to be done again, by the caller or the
    environment. Raises UserError.
    """
    word = os.environ.get(REDO_VARIABLE, "").strip()
    if given is None and word:
        if not word.isdecimal():
            raise UserError(
                f"{REDO_VARIABLE} is {word!r}; it must be the number of an iteration, as "
                "DriftError names it"
            )
        given = int(word)
    if given is not None and (type(given) is not int or given < 1):
        raise UserError(
            f"redo is {given!r}; the first iteration that can be done again is 1, and it must be "
            "a whole number"
        )
    return given


def throw_away(
    folder: RunFolder, config: TrainConfig, first: int, store: MirrorStore | None = None
) -> None:
    """Remove the iterations from `first` on, here and in the mirror. Where `first` has no
    drift.json, because it was thrown away before or the number is wrong, nothing is touched and a
    warning says so. Raises RunFolderError where what the iteration starts from is no longer there;
    OSError where the store cannot be changed.
    """
    iteration = folder.iteration(first)
    if not (iteration.path / DRIFT_FILE).is_file():
        logger.warning(
            "%s has no %s, so nothing is thrown away for redo=%d", iteration.path, DRIFT_FILE, first
        )
        return
    start, sampler = (
        folder.written_version(number) for number in (first - 1, config.policy_of_rollouts(first))
    )
    needed = [folder.checkpoint(start), folder.checkpoint(sampler), folder.state(start)]
    missing = [path for path in needed if path is not None and not path.is_dir()]
    if missing:
        raise RunFolderError(
            f"iteration {first} cannot be done again: {missing[0]} is no longer there, from "
            "which it starts; choose another run "
            "folder"
        )
    if store is not None:
        keys = [key for key in store.patiently(store.keys) if _iteration_of(key) >= first]
        # The last one first: a later marker is never there without those before. What has no marker
        # is not there for anyone.
        markers = sorted((key for key in keys if "/done/" in key), key=_order_of, reverse=True)
        store.patiently(lambda: store.remove(markers))
        store.patiently(lambda: store.remove(sorted(set(keys) - set(markers))))
    forget_rows(folder.path, first)
    removed = folder.throw_away(first)
    logger.warning(
        "%s: iterations %s were thrown away, to be done again",
        folder.path,
        ", ".join(map(str, sorted(removed))),
    )


def _order_of(key: str) -> tuple[int, int]:
    phase = key.rpartition("/")[2].removesuffix(".json")
    return _iteration_of(key), PHASES.index(phase) if phase in PHASES else len(PHASES)


def _iteration_of(key: str) -> int:
    """Return the iteration that a key belongs to; 0 for none."""
    parts = key.split("/")
    if len(parts) > 2 and parts[0] == "iterations" and parts[1].isdigit():
        return int(parts[1])
    return 0
