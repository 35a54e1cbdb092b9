"""A copy of the run folder in an object store, made while the run goes on, phase by phase.

What a finished phase wrote is uploaded first, its marker last: whatever has a marker there is there as a whole. Checkpoints and
states that the rules of pruning no longer keep are removed there too, once everything newer is safe. It happens in the
background, with new tries after growing pauses; a store that is slow, full or gone never stops a run: it is said once, and the
run waits for it at its end, for a while, and says how far the copy is behind then.

A machine that has nothing of the run takes from the store what is needed to go on (`ttrl.run_folder.mirror_resume`). owner.json
in the store keeps two machines from going on at the same time, as the run folder's own does on one (`ttrl.run_folder.lock`).
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError, RunFolderError, StorageError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.lock import describe_process, in_words, judge_owner
from ttrl.run_folder.mirror_resume import fetch_folder, take_from
from ttrl.run_folder.mirror_store import MirrorStore, patiently, pause_before
from ttrl.run_folder.pruning import kept_of
from ttrl.run_folder.redo import throw_away
from ttrl.system.object_store import redact

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
LAST_WAIT_SECONDS = 600.0
"""How long a run that is finished waits for its mirror, at most."""
OWNER_KEY = "owner.json"
_OF_PHASES = {"rollouts.jsonl", "unfinished.jsonl", "packed.safetensors", "train.jsonl", "validation.jsonl"}
_OF_PHASES |= {"trainer_logprobs.safetensors"}
_NOT_MIRRORED = {"lock", OWNER_KEY, "rollouts.partial.jsonl"} | _OF_PHASES
_PRUNED = ("checkpoint", "state")
MIRRORED_SUFFIXES = {".yaml", ".json", ".jsonl", ".html", ".log"}
"""Of files that no marker names."""
LOG_BYTES = 2**20
"""What of a log in logs/ is copied: its end."""


class Mirror:
    """Follows one run folder, which this process holds. Use `following`."""

    def __init__(self, store: MirrorStore, folder: RunFolder, config: TrainConfig) -> None:
        self._store, self._folder, self._config = store, folder, config
        self._owner: dict[str, Any] = describe_process()
        self._lost = False
        self._remote: set[str] = set()
        """Keys that are known to be there."""
        self._uploaded: dict[str, Any] = {}
        """What of each file was uploaded by this process: the digest that its marker gives, or size and time of change."""
        self._wake, self._ended, self._released = threading.Event(), threading.Event(), threading.Event()
        self._problem: str | None = None
        self._behind: set[str] = set()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Uploads in the background until the block ends, and then what is left; after an error, for one try. What goes wrong is
        said and never raised, but for one thing: once another machine has taken over, no further phase can be finished here."""
        before = self._folder.on_mark
        self._folder.on_mark = self._marked
        threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._follow, "mirror"), (self._beat, "mirror owner"))
        ]
        for thread in threads:
            thread.start()
        finished = False
        try:
            self._wake.set()
            yield
            finished = True
        finally:
            self._folder.on_mark = before
            self._ended.set()
            self._wake.set()
            follows, beats = threads
            try:
                follows.join()
                self._last_passes(LAST_WAIT_SECONDS if finished else 0.0)
            finally:  # others see it alive until then
                self._released.set()
                beats.join()
                self.release()

    def status(self) -> str | None:
        """What is wrong, in words; None where the copy is complete."""
        if not self._behind and self._problem is None:
            return None
        behind = f"{len(self._behind)} finished phases are not there yet" if self._behind else "everything is there"
        return f"the mirror {self._store.shown} is behind: {behind}" + (f" ({self._problem})" if self._problem else "")

    def bring_checkpoint(self, number: int) -> None:
        """Takes the checkpoint of iteration `number` from the mirror where it is not here: one that another machine made. A
        mirror that does not answer is a warning."""
        if self._folder.iteration(number).path.joinpath("checkpoint").exists():
            return
        try:
            fetch_folder(self._store, self._folder, number, "checkpoint")
        except (OSError, RunFolderError) as error:
            logger.warning("the best checkpoint, of iteration %d, is not in %s: %s", number, self._folder.path, error)

    def _marked(self) -> None:
        self._wake.set()
        if self._lost:
            raise RunFolderError(f"{self._folder.path}: {self._problem}; this one stops here")

    # One machine at a time

    def take(self, *, take_over: bool = False) -> None:
        """Says in the store that this process goes on with the run. Raises RunFolderError where another does, OSError."""
        owner = self._read_owner()
        if owner is not None and owner.get("token") != self._owner["token"]:
            judge_owner(owner, self._store.shown, lambda: self._moves(owner), locks=False, take_over=take_over)
        patiently(lambda: self._write_owner(0))

    def _moves(self, owner: dict[str, Any]) -> bool:
        deadline = time.monotonic() + 3.2 * BEAT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 4)
            now = self._read_owner()
            if now is None:
                return False  # it has just ended
            if now != owner:
                return True
        return False

    def _read_owner(self) -> dict[str, Any] | None:
        """None where nobody goes on with the run."""
        owner = _as_owner(patiently(lambda: self._store.read(OWNER_KEY)))
        return None if owner is None or owner.get("released") else owner

    def _write_owner(self, beat: int, **more: Any) -> None:
        self._store.write(OWNER_KEY, json.dumps(self._owner | {"beat": beat} | more).encode())

    def _beat(self) -> None:
        beat = 0
        while not self._released.wait(BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(OSError):
                self._check_owner()
                if self._lost:
                    return
                self._write_owner(beat)

    def _check_owner(self) -> None:
        owner = _as_owner(self._store.read(OWNER_KEY))
        if owner is not None and owner.get("token") != self._owner["token"]:
            other = in_words(owner)
            self._problem, self._lost = f"another process has taken over in the mirror {self._store.shown} ({other})", True
            logger.error("%s; nothing more is uploaded", self._problem)

    def release(self) -> None:
        """Says in the store that this process no longer goes on with the run. Its name stays there: a machine that slept all the
        while learns from it that another one has gone on. Never raises."""
        if not self._lost:
            with contextlib.suppress(OSError):
                self._check_owner()
                if not self._lost:
                    self._write_owner(0, released=True)

    # Uploading

    def _follow(self) -> None:
        failures = 0
        while not self._ended.is_set():
            if failures:
                self._ended.wait(pause_before(failures))  # whatever is finished meanwhile
            else:
                self._wake.wait()
            if self._ended.is_set():
                return
            self._wake.clear()
            failures = 0 if self._try_pass() else failures + 1

    def _last_passes(self, patience: float) -> None:
        deadline, failures = time.monotonic() + patience, 0
        while not self._lost and not self._try_pass():
            failures += 1
            pause = pause_before(failures)
            if time.monotonic() + pause > deadline:
                break
            time.sleep(pause)
        if (status := self.status()) is not None:
            logger.warning("%s; the run folder %s has everything", status, self._folder.path)

    def _try_pass(self) -> bool:
        """False where something failed."""
        if self._lost:
            return True
        try:
            self._pass()
        except (OSError, ValueError, KeyError, TypeError, RunFolderError) as error:  # a damaged marker is one of these
            if self._problem is None:
                logger.warning("the mirror is behind: %s; the run goes on, and so do new tries", error)
            self._problem = str(error)
            return False
        if self._problem is not None and not self._lost:
            logger.warning("the mirror %s is up to date again", self._store.shown)
            self._problem = None
        return True

    def _pass(self) -> None:
        """Makes the copy what the run folder is now. Raises OSError."""
        self._check_owner()
        if self._lost:
            return
        if not self._remote:
            self._remote = set(self._store.keys())
        # Before the markers are looked at: what metrics.jsonl says of an iteration is then backed by the markers that follow.
        others = {path: path.read_bytes() for path in self._unmarked_files(self._folder.path)}
        rows = self._folder.metrics()
        newest = rows[-1]["iteration"] if rows else -1
        kept = kept_of(self._folder, rows, self._config, newest) if rows else None
        pending = self._pending()
        self._behind = {key for key, _ in pending}
        for key, marker in pending:
            self._upload_phase(marker)
            self._behind.discard(key)
        for path, data in others.items():
            self._upload(self._key(path), data, hashlib.sha256(data).hexdigest())
        self._upload_logs()
        if kept is not None:
            unwanted = [key for key in self._remote if self._is_pruned(key, newest, kept.checkpoints, kept.states)]
            if unwanted:
                self._store.remove(unwanted)
                self._remote.difference_update(unwanted)

    def _pending(self) -> list[tuple[str, Path]]:
        """Markers that are not there yet, in the order in which their phases were finished."""
        found = []
        for path in self._folder.path.glob("iterations/*/done/[!.]*.json"):
            key = self._key(path)
            if key not in self._remote:
                found.append((json.loads(path.read_text(encoding="utf-8"))["finished"], key, path))
        return [(key, path) for _, key, path in sorted(found)]

    def _upload_phase(self, marker: Path) -> None:
        iteration = marker.parent.parent
        for name, sha in json.loads(marker.read_text(encoding="utf-8"))["files"].items():
            # One that is gone was pruned in this moment: it is not wanted there either.
            with contextlib.suppress(FileNotFoundError):
                self._upload(self._key(iteration / name), iteration / name, sha)
        for path in self._unmarked_files(iteration):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                self._upload(self._key(path), path, (status.st_size, status.st_mtime_ns))
        self._upload(self._key(marker), marker, "marker")

    def _upload_logs(self) -> None:
        """The ends of the logs of servers and trainer, as they are now, below this machine's name: of one that vanishes they are
        all that is left. Nothing goes on from them, so they need no marker."""
        for path in sorted(self._folder.path.glob("logs/*.log")):
            try:
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                    file.seek(max(0, status.st_size - LOG_BYTES))
                    end = file.read(LOG_BYTES)
            except OSError:
                continue
            self._upload(f"logs/{self._owner['host']}/{path.name}", end, (status.st_size, status.st_mtime_ns))

    def _upload(self, key: str, content: Path | bytes, identity: object) -> None:
        if self._uploaded.get(key) != identity:
            self._store.write(key, content)
            self._uploaded[key] = identity
            self._remote.add(key)

    @staticmethod
    def _unmarked_files(folder: Path) -> list[Path]:
        """Files right in `folder` that no phase's marker will name: configs, metrics, the trainer's log; nothing else that lies
        there, such as keys."""
        return sorted(
            path
            for path in folder.iterdir()
            if path.is_file() and path.name not in _NOT_MIRRORED and path.suffix in MIRRORED_SUFFIXES and path.name[0] != "."
        )

    @staticmethod
    def _is_pruned(key: str, newest: int, checkpoints: frozenset[int], states: frozenset[int]) -> bool:
        parts = key.split("/")
        if len(parts) < 4 or parts[0] != "iterations" or not parts[1].isdigit() or parts[2] not in _PRUNED:
            return False
        number = int(parts[1])
        return number <= newest and number not in (checkpoints if parts[2] == "checkpoint" else states)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._folder.path).as_posix()


def _as_owner(data: bytes | None) -> dict[str, Any] | None:
    try:
        owner = None if data is None else json.loads(data)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) else None


def with_local_run(config: TrainConfig) -> TrainConfig:
    """Where `run` is an address: the run works in runs/NAME of the current folder, and the address is its mirror. Raises
    ConfigError, also for a mirror whose address carries credentials."""
    if "://" in config.run:
        if config.mirror is not None:
            raise ConfigError("TrainConfig", ["run is an address, so mirror must not be given as well; give one of them"])
        name = config.run.partition("?")[0].rstrip("/").rpartition("/")[2]
        config = dataclasses.replace(config, run=str(Path("runs", name)), mirror=config.run)
    if config.mirror is not None and redact(config.mirror) != config.mirror:
        # It would stand in config.yaml, and in the mirror.
        problem = f"mirror {redact(config.mirror)!r} carries credentials; give them in the environment alone, see docs/cache.md"
        raise ConfigError("TrainConfig", [problem])
    return config


@contextlib.contextmanager
def mirrored(
    config: TrainConfig, folder: RunFolder, *, take_over: bool = False, redo: int | None = None
) -> Iterator[Mirror | None]:
    """The mirror of a run whose folder this process holds: takes from it what is missing here, then follows the folder until the
    end of the block. None where the run has none. redo: the iteration from which on both are to be thrown away before that
    (`ttrl.run_folder.redo`).

    Raises UserError for an address that cannot be one, RunFolderError where the mirror is of another run or somebody else goes on
    with this one, StorageError where it cannot be read at the start: what is in it can then not be told.
    """
    if config.mirror is None:
        if redo is not None:
            throw_away(folder, config, redo)
        yield None
        return
    store = MirrorStore(config.mirror)
    mirror = Mirror(store, folder, config)
    try:
        mirror.take(take_over=take_over)
        try:
            if redo is not None:
                throw_away(folder, config, redo, store)
            take_from(store, folder)
        except BaseException:
            mirror.release()
            raise
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            error.errno or 0,
            f"{error}; put it right (credentials come from the environment), or go on without: leave `mirror` out",
        ) from error
    with mirror.following():
        yield mirror
