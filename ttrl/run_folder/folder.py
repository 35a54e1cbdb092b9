"""Keep a run on disk: one folder per iteration, one marker per finished phase.

Resume, inspection and replay follow from this rule. A marker (done/PHASE.json) is written last and
durably. It holds the digests of the phase's files and its facts (seconds, counts). Metrics can be
rebuilt from the markers, even after a crash.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ttrl.configs.base import Settings
from ttrl.errors import RunFolderError
from ttrl.facts import Facts, MetricsRow, PhaseFacts, TrainFacts, parse, read_facts
from ttrl.run_folder.config_changes import HISTORY_FILE, changes, check_changes, remember_changes
from ttrl.run_folder.lease import FolderLease
from ttrl.system.files import (
    TEMPORARY_PREFIX,
    again,
    digest,
    json_text,
    read_jsonl,
    remove_folder,
    remove_leftovers,
    write_json,
    write_jsonl,
    write_text,
)

P = TypeVar("P", bound=PhaseFacts)
DRIFT_FILE = "drift.json"
REDO_VARIABLE = "TTRL_REDO"
"""See `ttrl.run_folder.redo`."""


def check_run_folder(path: Path) -> None:
    """Raise RunFolderError if `path` is not a run folder, naming the run folders next to it."""
    if (path / "metrics.jsonl").is_file() or (path / "iterations").is_dir():
        return
    there = sorted(
        {
            found.parent.name
            for name in ("metrics.jsonl", "iterations")
            for found in path.parent.glob(f"*/{name}")
        }
    )
    if there:
        others = f"; there are: {', '.join(there)}"
    else:
        others = ""
    if path.exists():
        what = "has neither metrics.jsonl nor iterations/"
    else:
        what = "does not exist"
    raise RunFolderError(
        f"{path} is not a run folder: it {what}; give the folder of a run, such as "
        f"runs/NAME{others}"
    )


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file, as `yaml.safe_load` does. With libyaml's parser, if
    present, a config takes a tenth of the time. Raises OSError, UnicodeDecodeError, yaml.YAMLError.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text(encoding="utf-8"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _as_read(value: Any) -> Any:
    """Return plain values as read back from a YAML file: tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _as_read(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_read(entry) for entry in value]
    return value


class Marker(Facts, kw_only=True):
    """The content of a marker."""

    phase: str = ""
    finished: float = 0.0
    """As `time.time`."""
    epoch: int | None = None
    """The epoch of the process behind this marker: see `ttrl.run_folder.lease`."""
    facts: Mapping[str, Any]
    files: dict[str, str]
    """SHA-256 of the phase's files, by name."""

    def facts_of(self, kind: type[P]) -> P:
        """Return the facts of the phase."""
        return read_facts(kind, self.facts)


class TaskList(Facts):
    """The entry of one task list in tasks.json."""

    count: int
    digest: str
    """Of ids and messages."""


class IterationFolder:
    """iterations/0007 and its markers."""

    def __init__(
        self,
        path: Path,
        number: int,
        lease: FolderLease | None = None,
        marked: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.number, self._lease, self._marked = (
            path,
            number,
            lease or FolderLease(path.parent.parent),
            marked,
        )

    def marker(self, kind: type[P]) -> P | None:
        """Return the facts of a finished phase, else None. Raises RunFolderError for a damaged
        marker.
        """
        marker = self._marker(kind.phase)
        return None if marker is None else marker.facts_of(kind)

    def is_done(self, phase: str) -> bool:
        """Tell whether a phase is finished. Raises RunFolderError for a damaged marker."""
        return self._marker(phase) is not None

    def finished(self, phase: str) -> float | None:
        """Return the end of a finished phase, as `time.time`, else None. Raises RunFolderError for
        a damaged marker.
        """
        marker = self._marker(phase)
        return None if marker is None else marker.finished

    @property
    def trained(self) -> bool:
        """Whether training made a policy."""
        marker = self.marker(TrainFacts)
        return marker is not None and bool(marker.trained)

    def verify(self, phase: str) -> None:
        """Raise RunFolderError if a file of a finished phase is missing or changed."""
        for name, expected in self.files(phase).items():
            path = self.path / name
            if not path.is_file() or digest(path) != expected:
                if path.exists():
                    what = "was changed after it was written"
                else:
                    what = "is gone"
                raise RunFolderError(
                    f"{path} {what}; restore it, or remove {self._path(phase)} to run that phase "
                    "again"
                )

    def files(self, phase: str) -> dict[str, str]:
        """Return the SHA-256 of a finished phase's files, by name; empty for an unfinished one.
        Raises RunFolderError.
        """
        marker = self._marker(phase)
        if marker is None:
            return {}
        # For a policy written some time after its training.
        later = self.files("save") if phase == "train" else {}
        return marker.files | later

    def weights(self, phase: str) -> dict[str, str]:
        """Return the weight files among `files`."""
        files = self.files(phase).items()
        return {
            name: sha
            for name, sha in files
            if name.startswith("checkpoint/") and name.endswith(".safetensors")
        }

    def _path(self, phase: str) -> Path:
        return self.path / "done" / f"{phase}.json"

    def _marker(self, phase: str) -> Marker | None:
        path = self._path(phase)
        try:
            return parse(Marker, again(path.read_bytes))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise RunFolderError(
                f"{path} is damaged ({error}); remove it to run the phase again"
            ) from error

    def mark(
        self,
        facts: PhaseFacts,
        files: Sequence[str] = (),
        known: Mapping[str, str] | None = None,
    ) -> None:
        """Mark a phase as done, durably and once: a marker is never replaced.

        files: names of the phase's files and folders in this iteration. known: digests by name,
        computed during writing; saves reading these files again. Raises RunFolderError after a
        takeover or for an existing marker; StorageError.
        """
        known = known or {}
        tops = [self.path / name for name in files]
        paths = [
            path
            for top in tops
            for path in (sorted(top.rglob("*")) if top.is_dir() else [top])
            if path.is_file()
        ]
        names = [str(path.relative_to(self.path)) for path in paths]
        # For sharded states and adapters: nothing else runs meanwhile.
        with ThreadPoolExecutor(4) as threads:
            digests = dict(
                zip(
                    names,
                    threads.map(lambda name: known.get(name) or digest(self.path / name), names),
                    strict=True,
                )
            )
        marker = Marker(
            phase=facts.phase,
            finished=time.time(),
            epoch=self._lease.epoch or None,
            facts=facts.to_json(),
            files=digests,
        )
        self._lease.create(self._path(facts.phase), json_text(marker.to_json()))
        self._marked()

    def unmark(self, phase: str) -> None:
        """Remove a marker to allow its phase to run again. Raises RunFolderError as `mark`."""
        self._lease.check()
        self._path(phase).unlink(missing_ok=True)


class RunFolder:
    """A run on disk. Use `locked` for any writing."""

    def __init__(self, path: str | os.PathLike[str], lease: FolderLease | None = None) -> None:
        """lease: of `path`, if it differs from the default one."""
        self.path = Path(path).absolute()
        self.lease = lease or FolderLease(self.path)
        self._written: dict[int, bool] = {}
        """By finished iteration: was a policy made and written? Only final answers, since threads
        ask while another one marks.
        """
        self.held: set[int] = set()
        """Iterations with a policy held by a trainer of this process, its files still being
        written.
        """
        self.on_mark: Callable[[], None] = lambda: None
        """Called after each marker, in the thread of its writer."""

    def iteration(self, number: int) -> IterationFolder:
        """Return the folder of an iteration; 0 is the model before training."""
        return IterationFolder(
            self.path / "iterations" / f"{number:04d}", number, self.lease, lambda: self.on_mark()
        )

    def locked(self, *, take_over: bool = False) -> AbstractContextManager[None]:
        """Hold the run for this process, see `ttrl.run_folder.lease`. Raises RunFolderError naming
        the owner if another process works on it. take_over: also from a silent owner on another
        machine.
        """
        return self.lease.held(take_over=take_over)

    def config(self) -> Settings:
        """Return config.yaml as plain values; empty if there is none. Raises RunFolderError for a
        damaged one.
        """
        path = self.path / "config.yaml"
        try:
            values = read_yaml(path)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (ValueError, yaml.YAMLError):
            values = None
        if not isinstance(values, dict):
            raise RunFolderError(f"{path} is damaged; restore it, or choose another run folder")
        return values

    def begun(self) -> bool:
        """Tell whether anything was sampled. Until then nothing depends on an earlier start's
        settings and tasks.
        """
        return any(
            any(self.path.glob(f"iterations/*/{what}")) for what in ("done/*.json", "*.jsonl")
        )

    def forget_refused_start(self) -> None:
        """Remove the settings and tasks of starts without samples, such as a refused one."""
        if not self.begun():
            for name in ("config.yaml", HISTORY_FILE, "tasks.json"):
                (self.path / name).unlink(missing_ok=True)

    def remember_config(
        self,
        config: Settings,
        defaults: Settings | None = None,
        allow: Sequence[str] = (),
    ) -> list[str]:
        """Write config.yaml, or compare with the existing one; return notes on changes. Also append
        the changes to config_history.jsonl. Raises RunFolderError with the differences if one is
        not allowed.

        defaults: values of settings newer than the run folder, for names missing from its
        config.yaml. allow: names of settings free to differ, see `ttrl.run_folder.config_changes`.
        """
        path = self.path / "config.yaml"
        config = _as_read(config)  # compare it in the form read back later
        notes = []
        before = self.config()
        if before:
            if (
                before.get("validation_temperature", ...) is None
                and config.get("validation_temperature") is not None
            ):
                # The meaning of an unset one before greedy became the default.
                before = {**before, "validation_temperature": before.get("temperature")}
            changed = changes({**_as_read(defaults or {}), **before}, config)
            notes = check_changes(changed, allow, self.path)
            remember_changes(self.path, changed, self.first_unfinished())
        write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        return notes

    def first_unfinished(self) -> int:
        """Return the first iteration missing from metrics.jsonl."""
        return max((row.iteration for row in self.metrics()), default=-1) + 1

    def remember_tasks(self, tasks: dict[str, TaskList]) -> None:
        """Write tasks.json, or compare with the existing one. The order of training and every
        held-out number are meaningful only for these tasks. Raises RunFolderError.
        """
        path = self.path / "tasks.json"
        if path.exists():
            try:
                before = parse(dict[str, TaskList], path.read_bytes())
            except ValueError as error:
                raise RunFolderError(
                    f"{path} is damaged ({error}); remove it if the tasks are unchanged"
                ) from error
            changed = [name for name in tasks if before.get(name) != tasks[name]]
            if changed:
                counts = ", ".join(
                    f"{n}: {before[n].count if n in before else None} before, {tasks[n].count} now"
                    for n in changed
                )
                raise RunFolderError(
                    f"{self.path} was started with other tasks ({counts}; ids and messages are "
                    f"compared). Choose another run folder, or remove {path} to continue with the "
                    "new tasks: figures before and after are then not comparable"
                )
        write_json(path, {name: one.to_json() for name, one in tasks.items()})

    def clean(self) -> None:
        """Remove a killed process's half-written or useless files. Not in replays: others may work
        on them.
        """
        for place in self.path.iterdir():
            if place.name.startswith(TEMPORARY_PREFIX) or (
                place.is_dir() and place.name != "replays"
            ):
                remove_leftovers(place)
        for partial in self.path.glob("iterations/*/rollouts.partial.jsonl"):
            # Killed between the marker and its removal.
            if (partial.parent / "done" / "rollouts.json").exists():
                partial.unlink()

    def policy_version(self, number: int) -> int:
        """Return the iteration of the policy after iteration `number`: an earlier one if nothing
        was trained.
        """
        while number > 0 and number not in self.held and not self.iteration(number).trained:
            number -= 1
        return number

    def checkpoint(self, number: int) -> Path:
        """Return the model folder of the policy after iteration `number`."""
        return self.iteration(self.policy_version(number)).path / "checkpoint"

    def sampler(self, sampled_by: int, number: int) -> int | None:
        """Return the weights version of iteration `number`'s sampler, if still on disk and older
        than training's starting policy.
        """
        version = self.policy_version(sampled_by)
        if (
            version == self.policy_version(number - 1)
            or not (self.checkpoint(version) / "config.json").is_file()
        ):
            return None
        return version

    def state(self, number: int) -> Path | None:
        """Return the optimizer state after iteration `number`; None before the first update."""
        version = self.policy_version(number)
        if version:
            return self.iteration(version).path / "state"
        return None

    def metrics(self) -> list[MetricsRow]:
        """Return the rows of metrics.jsonl, one per iteration, ascending. Raises RunFolderError for
        a damaged file.
        """
        return [read_facts(MetricsRow, row) for row in self.metrics_json()]

    def metrics_json(self) -> list[Mapping[str, Any]]:
        """Return the same rows as plain values, including names unknown to this version. Raises
        RunFolderError.
        """
        try:
            rows = read_jsonl(self.path / "metrics.jsonl", key="iteration")
            return sorted(rows, key=lambda row: int(row["iteration"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise RunFolderError(
                f"{error}; remove metrics.jsonl: the next start rebuilds it from the markers"
            ) from error

    def written_until(self, newest: int) -> list[int]:
        """Return the iterations up to `newest` with a written policy, newest first, and 0."""
        for number in range(1, newest + 1):
            if number in self._written:
                continue
            iteration = self.iteration(number)
            marker = iteration.marker(TrainFacts)
            if marker is None:
                continue
            written = marker.saved is not False or iteration.is_done("save")
            if written or not marker.trained:  # otherwise writing may still follow
                self._written[number] = bool(marker.trained)
        return [
            number for number in range(newest, -1, -1) if number == 0 or self._written.get(number)
        ]

    def written_version(self, number: int) -> int:
        """Return the newest iteration up to `number` with written policy and state. This is the one
        of `policy_version`, or with `save_every` an earlier one, the start of retraining.
        """
        return self.written_until(number)[0]

    def remove(
        self, newest: int, checkpoints: Collection[int], states: Collection[int]
    ) -> list[int]:
        """Remove checkpoints and states of iterations up to `newest`, except for the given
        iterations. Markers and the newest policy always stay. Return the numbers of the changed
        iterations. Raises StorageError.
        """
        removed = []
        for number in self.written_until(newest)[1:]:
            folder = self.iteration(number).path
            for name, kept in (("state", states), ("checkpoint", checkpoints)):
                if number not in kept and (folder / name).exists():
                    remove_folder(folder / name)
                    removed.append(number)
        return sorted(set(removed))

    def throw_away(self, first: int) -> list[int]:
        """Remove the iterations from `first` on, and their lines in metrics.jsonl; return their
        numbers. Raises StorageError.
        """
        rows = self.metrics_json()
        kept = [row for row in rows if row["iteration"] < first]
        if len(kept) < len(rows):
            write_jsonl(self.path / "metrics.jsonl", kept)
        paths = [
            path
            for path in (self.path / "iterations").glob("[0-9]*")
            if path.name.isdigit() and int(path.name) >= first
        ]
        for path in sorted(paths, key=lambda path: -int(path.name)):
            remove_folder(path)
        self._written = {}
        return [int(path.name) for path in paths]

    def prune(self, newest: int, keep: int, best: int | None) -> list[int]:
        """Keep the checkpoints and states of the `keep` newest policies, and the best checkpoint.
        As `remove`.
        """
        last = self.written_until(newest)[:keep]
        return self.remove(newest, last if best is None else [*last, best], last)
