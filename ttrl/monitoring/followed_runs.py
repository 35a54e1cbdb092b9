"""Find runs and follow them: their metrics, their owners, and the phases under way.

Everything is read from the run folders, by file size and time: an unchanged run costs one look at
each of a few files, and a longer metrics.jsonl costs its new lines.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrl.errors import RunFolderError, TtrlError, UserError
from ttrl.facts import MetricsRow
from ttrl.monitoring.finding import Finding
from ttrl.monitoring.findings import findings
from ttrl.monitoring.progress_line import seconds_left
from ttrl.run_folder.growing import GrowingFile
from ttrl.run_folder.lease import FolderLease
from ttrl.run_folder.metrics import PHASES
from ttrl.run_folder.reader import RunData, read_run, rows_in

_DEEPEST = 3
"""Levels of folders searched for runs: runs/SWEEP/RUN and one more."""
_MOST_RUNS = 2_000
_RESCAN_SECONDS = 5.0
_RECENT = 5
"""Iterations for the usual time of a phase."""
PARTIAL_FILE = "rollouts.partial.jsonl"
"""The finished tasks of an iteration being sampled, a line each."""
SAMPLING = "sampling"
_WORDS = {
    "prepare": "preparing",
    "rollouts": SAMPLING,
    "pack": "packing",
    "train": "training",
    "validate": "validating",
}
Stamp = tuple[int, ...]


@dataclass(frozen=True)
class UnderWay:
    """The state of an unfinished iteration."""

    iteration: int
    doing: str
    """The phase under way: "training"."""
    done: tuple[str, ...]
    """Finished phases."""
    since: float
    """The start of the phase, as `time.time`."""
    usual: float | None
    """Seconds of the phase in the last iterations; None if unknown."""
    count: int = 0
    """Tasks finished so far, while sampling; 0 unless counted."""
    of: int | None = None
    """Tasks to sample; None in other phases, and unless counted."""

    def left(self, now: float) -> float | None:
        """Estimate the seconds to the end of the phase; None if unknown."""
        passed = max(0.0, now - self.since)
        if self.of and self.count:
            return passed / self.count * (self.of - self.count)
        if self.usual is None:
            return None
        return max(0.0, self.usual - passed)

    def share(self, now: float) -> float | None:
        """Return the finished share of the phase; None if unknown."""
        if self.of:
            return self.count / self.of
        if not self.usual:
            return None
        return min(1.0, max(0.0, now - self.since) / self.usual)


@dataclass(frozen=True)
class State:
    """A run now."""

    word: str
    """running, finished, ended before its last iteration, or unknown on another machine."""
    under_way: tuple[UnderWay, ...] = ()
    left: float | None = None
    """Seconds to the end, from the end of the newest iteration; None if unknown."""
    at: float = 0.0
    """The end of the newest iteration, as `time.time`."""

    def left_at(self, now: float) -> float | None:
        """Return the seconds left at a time; None if unknown."""
        if self.left is None:
            return None
        return max(0.0, self.left - max(0.0, now - self.at))


class FollowedRun:
    """A run folder, read again only as far as it has changed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._lock = threading.Lock()
        self._stamp: Stamp = ()
        self._metrics = GrowingFile(folder / "metrics.jsonl")
        self._sampled = GrowingFile(folder)
        """The finished tasks of the iteration being sampled."""
        self._rows: dict[int, MetricsRow] = {}
        self._data: RunData | None = None
        self.is_read = False
        """Whether only changes are left to read: the first reading takes longest."""
        self._found: list[Finding] | None = None
        self._lease = FolderLease(folder)

    def data(self) -> RunData:
        """Return the run's content. Raises RunFolderError for damaged metrics."""
        with self._lock:
            return self._current()

    def findings(self) -> list[Finding]:
        """Return the findings about the run."""
        with self._lock:
            self.is_read = True
            run = self._current()
            if self._found is None:
                self._found = findings(run.rows, run.config)
            return self._found

    def stamp(self) -> Stamp:
        """Return numbers of the folder's files, to detect changes."""
        names = ("metrics.jsonl", "config.yaml", "config_history.jsonl", "plan.json", "drift.json")
        return tuple(one for name in names for one in stamp_of(self.folder / name))

    def state(self, *, counted: bool = False) -> State:
        """Tell whether the run goes on, and its phases under way.

        counted: with the number of tasks finished while sampling.
        """
        run = self.data()
        total = run.config.get("iterations")
        newest = run.rows[-1].iteration if run.rows else -1
        owner = self._lease.read()
        lives = owner.lives() if owner is not None and owner.pid else False
        if lives is False:
            is_complete = isinstance(total, int) and newest >= total
            return State("finished" if is_complete else "ended")
        at = stamp_of(self.folder / "metrics.jsonl")[2] / 1e9
        if run.rows and isinstance(total, int):
            left = seconds_left(run.rows, total)
        else:
            left = None
        word = "running" if lives else "unknown"
        under_way = tuple(_under_way(run, newest + 1))
        if counted:
            under_way = tuple(map(self._progress, under_way))
        return State(word, under_way, left, at)

    def newest_task(self) -> bytes:
        """Return the line of the task finished last in the iteration being sampled; b"" without
        one. It is as new as the last counted `state`.
        """
        return self._sampled.newest

    def _current(self) -> RunData:
        stamp = self.stamp()
        if self._data is None or stamp != self._stamp:
            self._read_rows()
            self._data = read_run(self.folder, list(self._rows.values()))
            self._found = None
            self._stamp = stamp
        return self._data

    def _read_rows(self) -> None:
        """Read the new lines of metrics.jsonl; all of them if it is another file."""
        known = self._metrics.count
        try:
            lines = self._metrics.new_lines()
        except FileNotFoundError:
            self._rows = {}
            return
        first = self._metrics.count - len(lines)
        if first < known:  # another file
            self._rows = {}
        try:
            # A line after the last: what rows_in forgives there is damage in a whole line.
            rows = list(rows_in([*lines, b""], self._metrics.path, first + 1))
        except RunFolderError:
            self._metrics.forget()  # the file may be repaired in place
            self._rows = {}
            raise
        self._rows |= {row.iteration: row for row in rows}

    def _progress(self, one: UnderWay) -> UnderWay:
        """Add the number of finished tasks, while an iteration is sampled."""
        of = self.data().config.get("tasks_per_iteration")
        if one.doing != SAMPLING or not isinstance(of, int):
            return one
        path = self.data().iteration_folder(one.iteration) / PARTIAL_FILE
        with self._lock:
            if self._sampled.path != path:
                self._sampled = GrowingFile(path)
            with contextlib.suppress(OSError):
                self._sampled.new_lines()
            return dataclasses.replace(one, count=min(self._sampled.count, of), of=of)


class Runs:
    """The runs in some folders, by name; new ones appear by themselves."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """roots: run folders, and folders with runs. Raises UserError for a missing one."""
        missing = [str(root) for root in roots if not root.is_dir()]
        if missing:
            raise UserError(
                f"{', '.join(missing)}: no such folder; give run folders, or a folder of runs"
            )
        self._roots = [root.absolute() for root in roots]
        self._lock = threading.Lock()
        self._known: dict[Path, FollowedRun] = {}
        self._by_name: dict[str, FollowedRun] = {}
        self._due = 0.0

    def all(self) -> list[FollowedRun]:
        """Return the runs, the newest metrics first."""
        self._scan()
        runs = self._by_name.values()
        return sorted(runs, key=lambda run: (-_changed(run.folder), run.name))

    def named(self, name: str) -> FollowedRun | None:
        """Return a run by its name; None if there is no such run."""
        self._scan()
        return self._by_name.get(name)

    def _scan(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._due:
                return
            by_name: dict[str, FollowedRun] = {}
            for root in self._roots:
                for folder in _runs_below(root, _DEEPEST):
                    if len(by_name) >= _MOST_RUNS:
                        break
                    run = self._known.get(folder)
                    if run is None:
                        run = FollowedRun(_free_name(root, folder, by_name), folder)
                        self._known[folder] = run
                    by_name.setdefault(run.name, run)
            self._by_name = by_name
            self._due = time.monotonic() + _RESCAN_SECONDS


def _runs_below(folder: Path, levels: int) -> Iterator[Path]:
    """Find run folders, without following links."""
    if is_run(folder):
        yield folder
        return
    if not levels:
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        inside = sorted(
            entry.name
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        )
        for name in inside:
            yield from _runs_below(folder / name, levels - 1)


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds a run that has begun."""
    return (folder / "metrics.jsonl").is_file() or (folder / "iterations").is_dir()


def _free_name(root: Path, folder: Path, taken: dict[str, FollowedRun]) -> str:
    """Name a run for addresses, by its path below the root."""
    if folder == root:
        wanted = folder.name or "run"
    else:
        wanted = "~".join(folder.relative_to(root).parts)
    name = wanted
    number = 2
    while name in taken:
        name = f"{wanted}~{number}"
        number += 1
    return name


def _under_way(run: RunData, first: int) -> Iterator[UnderWay]:
    """Describe the begun iterations from `first` on: several if phases overlap."""
    number = first
    while True:
        folder = run.iteration_folder(number)
        try:
            begun = folder.stat().st_mtime
        except OSError:
            return
        ends = {name: stamp_of(folder / "done" / f"{name}.json")[2] / 1e9 for name in PHASES}
        done = tuple(name for name in PHASES if ends[name])
        newest = PHASES.index(done[-1]) if done else 0
        if number == 0:  # the starting model is only measured
            phase = "validate" if "prepare" in done else "prepare"
        elif done and newest + 1 < len(PHASES):
            phase = PHASES[newest + 1]
        elif done:
            phase = PHASES[-1]
        else:
            phase = "rollouts"
        since = max([*ends.values(), 0.0]) or begun
        yield UnderWay(number, _WORDS[phase], done, since, _usual(run, phase))
        number += 1


def _usual(run: RunData, phase: str) -> float | None:
    name = {"rollouts": "sample"}.get(phase, phase)
    known = [row.seconds.by_phase().get(name) for row in run.trained[-_RECENT:]]
    seconds = [one for one in known if one]
    if seconds:
        return sum(seconds) / len(seconds)
    return None


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return inode, size and time of change, to detect changes of the file; zeros without it."""
    try:
        there = path.stat()
    except OSError:
        return (0, 0, 0)
    return (there.st_ino, there.st_size, there.st_mtime_ns)


def _changed(folder: Path) -> int:
    return stamp_of(folder / "metrics.jsonl")[2] or stamp_of(folder)[2]


def readable(run: FollowedRun) -> RunData | TtrlError:
    """Read a run and its findings; return its content, or the reason it cannot be read: one damaged
    run must not hide the others.
    """
    try:
        run.findings()
        return run.data()
    except TtrlError as error:
        return error


def read_some(runs: Sequence[FollowedRun], seconds: float = 1.0) -> None:
    """Read runs for the first time, for so many seconds: a page or a frame need not wait for all of
    them.
    """
    until = time.monotonic() + seconds
    for run in runs:
        if not run.is_read and time.monotonic() < until:
            readable(run)
