"""The run folder: an iteration is a folder, and a phase is done when its marker is there.

That one rule gives resume, inspection and replay. A marker (done/PHASE.json) is written last and durably; it holds the digests
of the phase's files and what the phase has to say (seconds, counts), so that metrics can be put together from markers alone,
after a crash too.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ttrl.errors import RunFolderError
from ttrl.files import digest, read_jsonl, remove_leftovers, write_json, write_text

# On resume; everything else would make another run of it. (seq_len and share decide where samples lie, not what they weigh, and a
# row that turns out to be too short for them must not be the end of a run.)
_MAY_CHANGE = {"run", "iterations", "stop_at", "keep_checkpoints", "seq_len", "too_long", "share"}


class IterationFolder:
    """iterations/0007 and its markers."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number

    def marker(self, phase: str) -> dict[str, Any] | None:
        """What a finished phase left behind, or None where it is not done. Raises RunFolderError for a damaged marker."""
        content = self._marker(phase)
        return None if content is None else content["facts"]

    def verify(self, phase: str) -> None:
        """Raises RunFolderError where a file of a finished phase is gone, or not what that phase wrote."""
        for name, expected in self.files(phase).items():
            path = self.path / name
            if not path.is_file() or digest(path) != expected:
                what = "was changed after it was written" if path.exists() else "is gone"
                raise RunFolderError(f"{path} {what}; put it back, or remove {self._path(phase)} to run that phase again")

    def files(self, phase: str) -> dict[str, str]:
        """SHA-256 by name of what a finished phase wrote; empty where it is not done. Raises RunFolderError."""
        content = self._marker(phase)
        return {} if content is None else content["files"]

    def _path(self, phase: str) -> Path:
        return self.path / "done" / f"{phase}.json"

    def _marker(self, phase: str) -> dict[str, Any] | None:
        path = self._path(phase)
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content["facts"], dict) or not isinstance(content["files"], dict):
                raise ValueError("facts and files must be objects")
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{path} is damaged ({type(error).__name__}: {error}); remove it to run the phase again"
            ) from error
        return content

    def mark(self, phase: str, files: Sequence[str], facts: dict[str, Any]) -> dict[str, Any]:
        """Says durably that a phase is done. `files` are names of files and folders of this iteration that it wrote."""
        digests = {}
        for name in files:
            top = self.path / name
            for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
                if path.is_file():
                    digests[str(path.relative_to(self.path))] = digest(path)
        write_json(self._path(phase), {"phase": phase, "finished": time.time(), "facts": facts, "files": digests})
        return facts


class RunFolder:
    """A run on disk. Use `locked` while anything is written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def iteration(self, number: int) -> IterationFolder:
        """The folder of an iteration; 0 is the model before training."""
        return IterationFolder(self.path / "iterations" / f"{number:04d}", number)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run for this process. Raises RunFolderError naming the owner where another process works on it."""
        path = self.path / "lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+")  # noqa: SIM115 - closed below
        except OSError as error:
            raise RunFolderError(f"{self.path} cannot be a run folder: {error.strerror}; choose another one") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when we die, however we die
            except BlockingIOError:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise RunFolderError(f"{self.path} is in use by another process (pid {owner}); wait for it, or stop it") from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def remember_config(self, config: dict[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """Writes config.yaml, or compares with the one that is there. Raises RunFolderError with the differences.

        defaults: of settings that may be younger than the run folder; what its config.yaml does not name was that then.
        """
        path = self.path / "config.yaml"
        config = yaml.safe_load(yaml.safe_dump(config))  # compared as it will be read: tuples are lists there
        if path.exists():
            try:
                before = yaml.safe_load(path.read_text(encoding="utf-8"))
            except (ValueError, yaml.YAMLError):
                before = None
            if not isinstance(before, dict):
                raise RunFolderError(f"{path} is damaged; put it back, or choose another run folder")
            before = yaml.safe_load(yaml.safe_dump(dict(defaults or {}))) | before
            changed = [
                f"  {key}: {before.get(key)!r} before, {config.get(key)!r} now"
                for key in sorted(before.keys() | config.keys())
                if before.get(key) != config.get(key) and key not in _MAY_CHANGE
            ]
            if changed:
                raise RunFolderError(
                    f"{self.path} was started with another config:\n"
                    + "\n".join(changed)
                    + "\nChoose another run folder, or remove this one"
                )
        write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def remember_tasks(self, tasks: dict[str, dict[str, Any]]) -> None:
        """Writes tasks.json (for each list of tasks its count and digest), or compares with the one that is there: the order of
        training and every held-out number mean something for these tasks alone. Raises RunFolderError."""
        path = self.path / "tasks.json"
        if path.exists():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise RunFolderError(f"{path} is damaged ({error}); remove it if the tasks are the same as before") from error
            changed = [name for name in tasks if before.get(name) != tasks[name]]
            if changed:
                counts = ", ".join(f"{n}: {before.get(n, {}).get('count')} before, {tasks[n]['count']} now" for n in changed)
                raise RunFolderError(
                    f"{self.path} was started with other tasks ({counts}; ids and messages are compared). Choose another run "
                    f"folder, or remove {path} to go on with the new ones: numbers before and after cannot be compared then"
                )
        write_json(path, tasks)

    def clean(self) -> None:
        """Removes what a killed process left half written."""
        remove_leftovers(self.path)

    def policy_version(self, number: int) -> int:
        """The iteration whose checkpoint is the policy after iteration `number`: itself, or an earlier one where nothing was
        trained."""
        while number > 0 and not (self.iteration(number).marker("train") or {}).get("trained"):
            number -= 1
        return number

    def checkpoint(self, number: int) -> Path:
        """The model folder of the policy after iteration `number`."""
        return self.iteration(self.policy_version(number)).path / "checkpoint"

    def state(self, number: int) -> Path | None:
        """The optimizer state after iteration `number`; None before the first update."""
        version = self.policy_version(number)
        return self.iteration(version).path / "state" if version else None

    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl, one row per iteration, ascending. Raises RunFolderError for a damaged one."""
        try:
            rows = read_jsonl(self.path / "metrics.jsonl", key="iteration")
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{error}; remove metrics.jsonl: starting the run again writes it anew from the markers"
            ) from error
        return sorted(rows, key=lambda row: row["iteration"])

    def prune(self, newest: int, keep: int, best: int | None) -> list[int]:
        """Removes checkpoints and states of iterations before the `keep` newest trained ones; markers stay, and so does the best
        checkpoint. Returns the numbers of the iterations that lost something."""
        trained = [n for n in range(newest, -1, -1) if n == 0 or (self.iteration(n).marker("train") or {}).get("trained")]
        removed = []
        for number in trained[keep:]:
            folder = self.iteration(number).path
            unwanted = [folder / "state"] + ([folder / "checkpoint"] if number != best else [])
            for path in unwanted:
                if path.exists():
                    shutil.rmtree(path)
                    removed.append(number)
        return sorted(set(removed))
