"""Take from a run's mirror the files needed for the next iterations, before continuing on a
machine.

No two markers are alike (they hold times), so they distinguish two copies of a run: of the markers
here and there, one set must be the beginning of the other. If the mirror is ahead, this is taken:

    all markers, and the files directly in the run folder
    checkpoint and state of the newest policy, and of the one before if present
    everything else of the last two iterations, and of those since that policy

Everything else stays in the mirror. The newest policy's checkpoint may be incomplete (pruned here
before its upload, or the run ended in between). The run then continues from the newest complete
one.
"""

import contextlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ttrl.errors import RunFolderError
from ttrl.facts import TrainFacts, parse
from ttrl.run_folder.folder import Marker, RunFolder
from ttrl.system.files import atomic_folder, digest, make_folders, write_text
from ttrl.system.mirror_store import MirrorStore

logger = logging.getLogger(__name__)

_LAST_ITERATIONS = 2
_READERS = 16
"""Markers are small, and many after a long run."""
_POLICY_FOLDERS = ("checkpoint/", "state/")
_NOT_TAKEN = {"owner.json", "metrics.jsonl"}
_TAKEN_SUFFIXES = {".yaml", ".json", ".jsonl", ".html"}  # excludes any foreign files


@dataclass(frozen=True)
class MirroredMarker:
    """The marker of a finished phase, in the mirror."""

    iteration: int
    phase: str
    key: str
    text: str
    content: Marker

    @property
    def folder(self) -> str:
        return f"iterations/{self.iteration:04d}"

    @property
    def files(self) -> dict[str, str]:
        return {f"{self.folder}/{name}": sha for name, sha in self.content.files.items()}

    @property
    def makes_policy(self) -> bool:
        if self.phase != "train":
            return self.phase in ("prepare", "save")
        facts = self.content.facts_of(TrainFacts)
        return bool(facts.trained) and facts.saved is not False


def take_from(store: MirrorStore, folder: RunFolder) -> None:
    """Bring the run folder, held by this process, up to the mirror's state, if further ahead.
    Raises RunFolderError if they are copies of different runs, or if the mirror holds no starting
    point; OSError, StorageError.
    """
    sizes = store.patiently(store.keys)
    here = {
        _key(path, folder): path.read_text(encoding="utf-8")
        for path in folder.path.glob("iterations/*/done/[!.]*.json")
    }
    keys = {key for key in sizes if key.startswith("iterations/") and "/done/" in key}
    ahead = bool(keys - here.keys())
    # With nothing to take, the newest of both is enough: after a difference, everything differs.
    read = keys if ahead else sorted(keys, key=lambda key: _finished(key, here[key]))[-1:]
    with ThreadPoolExecutor(_READERS) as pool:
        there = dict(zip(read, pool.map(lambda key: _read_marker(store, key), read), strict=True))
    _check_same_run(store, folder, here, there, keys)
    if not ahead:
        return
    markers, dropped = _usable(store, list(there.values()), sizes)
    missing = [marker for marker in markers if marker.key not in here]
    logger.warning("%s: taking %d finished phases from %s", folder.path, len(missing), store.shown)
    if dropped:  # before all else: a copy must always be the beginning of later ones
        logger.warning(
            "%s: the last %d phases there are incomplete, and run again",
            store.shown,
            len(dropped),
        )
        store.remove([marker.key for marker in dropped])
    for key, sha in _wanted(markers, sizes).items():
        _fetch(store, folder.path / key, key, sizes[key], sha)
    for key in sizes:
        if "/" not in key and key not in _NOT_TAKEN and Path(key).suffix in _TAKEN_SUFFIXES:
            _fetch(store, folder.path / key, key, sizes[key], None)
    _take_metrics(store, folder, markers)
    for marker in sorted(missing, key=lambda one: one.content.finished):
        folder.lease.create(folder.path / marker.key, marker.text)


def fetch_folder(store: MirrorStore, folder: RunFolder, number: int, name: str) -> None:
    """Take one more folder of an iteration as a whole. Raises OSError if it is incomplete,
    RunFolderError.
    """
    iteration = folder.iteration(number)
    files = {
        k: sha
        for phase in ("prepare", "train")
        for k, sha in iteration.files(phase).items()
        if k.startswith(f"{name}/")
    }
    sizes = store.patiently(store.keys)
    keys = {file: _key(iteration.path / file, folder) for file in files}
    missing = [key for key in keys.values() if key not in sizes]
    if missing or not files:
        raise OSError(
            f"{store.shown} has no {missing[0] if missing else _key(iteration.path / name, folder)}"
        )
    with atomic_folder(
        iteration.path / name, sum(sizes[key] for key in keys.values())
    ) as temporary:
        for file, sha in files.items():
            _fetch(
                store, temporary / file.removeprefix(f"{name}/"), keys[file], sizes[keys[file]], sha
            )


def _key(path: Path, folder: RunFolder) -> str:
    return path.relative_to(folder.path).as_posix()


def _finished(key: str, text: str) -> float:
    try:
        return parse(Marker, text).finished
    except ValueError as error:
        raise RunFolderError(
            f"the marker {key} is damaged; remove it to run that phase again"
        ) from error


def _read_marker(store: MirrorStore, key: str) -> MirroredMarker:
    data = store.patiently(lambda: store.read(key))
    try:
        text = (data or b"").decode()
        content = parse(Marker, text)
        _, number, _, file = key.split("/")
        return MirroredMarker(int(number), file.removesuffix(".json"), key, text, content)
    except ValueError as error:
        raise RunFolderError(
            f"{store.shown}: the marker {key} is damaged; remove it to run that phase again"
        ) from error


def _check_same_run(
    store: MirrorStore,
    folder: RunFolder,
    here: dict[str, str],
    there: dict[str, MirroredMarker],
    keys: set[str],
) -> None:
    """Raise RunFolderError if neither copy is the beginning of the other. keys: all markers there;
    `there`: those read.
    """
    different = sorted(key for key in here.keys() & there.keys() if here[key] != there[key].text)
    only_here = here.keys() - keys
    only_there = keys - here.keys()
    if different or (only_here and only_there):
        first = min(different or [*only_here, *only_there])
        raise RunFolderError(
            f"{folder.path} and its mirror {store.shown} differ; the first difference: {first}. To "
            "continue from the mirror, move the folder away; to continue from the folder, give "
            "another `mirror`"
        )


def _usable(
    store: MirrorStore, markers: list[MirroredMarker], sizes: dict[str, int]
) -> tuple[list[MirroredMarker], list[MirroredMarker]]:
    """Return the markers up to the newest complete policy, and those after it."""
    policies = sorted(
        (marker for marker in markers if marker.makes_policy), key=lambda one: -one.iteration
    )
    whole = next((marker for marker in policies if all(key in sizes for key in marker.files)), None)
    if whole is None:
        raise RunFolderError(
            f"{store.shown} has markers of a run, but no complete policy to continue from; give "
            "another `mirror`, or empty it"
        )
    lost = min(
        (marker.iteration for marker in policies if marker.iteration > whole.iteration),
        default=None,
    )
    if lost is None:
        return markers, []
    # Keep the phases before the lost training: their samples come from policies up to `whole`.
    kept = [
        m
        for m in markers
        if m.iteration < lost or (m.iteration == lost and m.phase in ("rollouts", "pack"))
    ]
    return kept, [marker for marker in markers if marker not in kept]


def _wanted(markers: list[MirroredMarker], sizes: dict[str, int]) -> dict[str, str]:
    """Return the digests of the files to take, by key."""
    last = max(marker.iteration for marker in markers)
    policies = sorted(
        (marker for marker in markers if marker.makes_policy), key=lambda one: -one.iteration
    )
    wanted: dict[str, str] = {}
    for marker in policies[:2]:
        if all(key in sizes for key in marker.files):
            wanted |= marker.files
    first = min(last - _LAST_ITERATIONS, policies[0].iteration)
    for marker in markers:
        if marker.iteration > first:
            for key, sha in marker.files.items():
                if key in sizes and not key.removeprefix(f"{marker.folder}/").startswith(
                    _POLICY_FOLDERS
                ):
                    wanted[key] = sha
    return wanted


def _take_metrics(store: MirrorStore, folder: RunFolder, markers: list[MirroredMarker]) -> None:
    """Take the lines of iterations with an available policy; rebuild the rest from markers."""
    data = store.patiently(lambda: store.read("metrics.jsonl"))
    newest = max(marker.iteration for marker in markers if marker.phase in ("prepare", "train"))
    kept = []
    for line in (data or b"").split(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["iteration"] <= newest:
                kept.append(line.decode())
    if kept:
        write_text(folder.path / "metrics.jsonl", "\n".join(kept) + "\n")


def _fetch(store: MirrorStore, target: Path, key: str, size: int, sha: str | None) -> None:
    """Take one file, unless it is here already. Raises RunFolderError if it differs from its
    marker.
    """
    if sha is not None and target.is_file() and digest(target) == sha:
        return
    make_folders(target.parent)
    store.patiently(lambda: store.fetch(key, size, target))
    if sha is not None and digest(target) != sha:
        target.unlink()
        raise RunFolderError(
            f"{store.shown}: {key} has changed since its phase; remove it there to continue from "
            "an older policy"
        )
