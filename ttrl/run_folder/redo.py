"""Throw away the last iterations of a run to redo them: after a DriftError, once its cause is gone.
Only on request, by number, and only from an iteration with detected drift.

Every iteration from that one on goes, with rollouts, checkpoint, markers and its lines in
metrics.jsonl. The mirror's files go first, or they would be fetched again. Killed in between, the
run still ends with the same error, or has less left to throw away.
"""

import logging
import os
import re

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError, UserError
from ttrl.run_folder.folder import DRIFT_FILE, REDO_VARIABLE, RunFolder
from ttrl.run_folder.metrics import PHASES, forget_rows
from ttrl.system.mirror_store import MirrorStore

logger = logging.getLogger(__name__)


def redo_asked(given: int | None) -> int | None:
    """Return the first iteration to redo, from the caller or the environment. Raises UserError."""
    word = os.environ.get(REDO_VARIABLE, "").strip()
    if given is None and word:
        if not word.isdecimal():
            raise UserError(
                f"{REDO_VARIABLE} is {word!r}; give the number of an iteration, such as the one in "
                "the DriftError"
            )
        given = int(word)
    if given is not None and (type(given) is not int or given < 1):
        raise UserError(f"redo is {given!r}; give a whole number of at least 1")
    return given


def throw_away(
    folder: RunFolder, config: TrainConfig, first: int, store: MirrorStore | None = None
) -> None:
    """Remove the iterations from `first` on, here and in the mirror. Without a drift.json in
    `first` (already thrown away, or a wrong number), change nothing and log a warning. Raises
    RunFolderError if the iteration's starting point is missing; OSError if the store cannot be
    changed.
    """
    iteration = folder.iteration(first)
    if not (iteration.path / DRIFT_FILE).is_file():
        logger.warning(
            "%s has no %s, so redo=%d removes nothing", iteration.path, DRIFT_FILE, first
        )
        return
    start, sampler = (
        folder.written_version(number) for number in (first - 1, config.policy_of_rollouts(first))
    )
    needed = [folder.checkpoint(start), folder.checkpoint(sampler), folder.state(start)]
    missing = [path for path in needed if path is not None and not path.is_dir()]
    if missing:
        raise RunFolderError(
            f"iteration {first} cannot run again: {missing[0]}, its starting point, no longer "
            "exists; choose another run folder"
        )
    if store is not None:
        keys = [key for key in store.patiently(store.keys) if _iteration_of(key) >= first]
        # The last one first: a later marker is never there without those before. A file without a
        # marker does not exist for any reader.
        markers = sorted((key for key in keys if "/done/" in key), key=_order_of, reverse=True)
        store.patiently(lambda: store.remove(markers))
        store.patiently(lambda: store.remove(sorted(set(keys) - set(markers))))
    forget_rows(folder.path, first)
    removed = folder.throw_away(first)
    logger.warning(
        "%s: removed iterations %s, to run them again",
        folder.path,
        ", ".join(map(str, sorted(removed))),
    )


def _order_of(key: str) -> tuple[int, int]:
    phase = key.rpartition("/")[2].removesuffix(".json")
    return _iteration_of(key), PHASES.index(phase) if phase in PHASES else len(PHASES)


def _iteration_of(key: str) -> int:
    """Return the iteration of a key; 0 for none."""
    found = re.match("iterations/([0-9]+)/", key)
    if found is None:
        return 0
    return int(found[1])
