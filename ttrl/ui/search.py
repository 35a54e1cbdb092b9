"""Search samples by reward, metric, text, finish reason, and disagreement between runs.

A line of rollouts.jsonl may hold 50 kB of token ids. The search decodes only the fields it tests,
and stops after some time or bytes; it says how far it came.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from ttrl.errors import UserError
from ttrl.facts import number
from ttrl.messages import text_of
from ttrl.records import Sample
from ttrl.report.samples import parsed
from ttrl.run_folder.reader import RunData

FILES: dict[str, str] = {"training": "rollouts.jsonl", "held out": "validation.jsonl"}
MOST_FOUND = 100
_MOST_SECONDS = 2.0
_START = 400
"""Characters of an answer in a list."""
_CONDITION = re.compile(r"\s*([^<>=!\s]+)\s*(<=|>=|!=|=|<|>)\s*(-?[0-9.eE+-]+)\s*")
_TESTS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: abs(a - b) <= 1e-9 * max(1.0, abs(b)),
    "!=": lambda a, b: abs(a - b) > 1e-9 * max(1.0, abs(b)),
}
Kind = Literal["training", "held out"]


class Line(msgspec.Struct):
    """The searched fields of a sample."""

    task_id: str
    sample: int = 0
    text: str = ""
    reward: float | None = None
    metrics: dict[str, float | None] = {}
    finish_reason: str | None = None
    error: str | None = None
    messages: list[msgspec.Raw] = []
    turns: list[msgspec.Raw] | None = None


@dataclass(frozen=True)
class Query:
    """The conditions of a search; empty ones hold for every sample."""

    kind: Kind = "training"
    first: int = 0
    """Iterations, both included."""
    last: int = 0
    conditions: str = ""
    """Of reward and metrics: "reward<0.5 exact=1"."""
    text: str = ""
    """In the answer or the messages; upper and lower case are the same."""
    finish: str = ""
    """A finish reason, or "failed"."""

    def tests(self) -> list[Callable[[Line], bool]]:
        """Return the conditions. Raises UserError for an unreadable one."""
        asked = re.split(r"[,;]|\s(?=\s*[^\W\d])", self.conditions)
        tests = [_condition(one) for one in asked if one.strip()]
        if self.finish == "failed":
            tests.append(lambda line: line.error is not None)
        elif self.finish:
            tests.append(lambda line: line.finish_reason == self.finish)
        if self.text:
            wanted = self.text.casefold()
            tests.append(lambda line: any(wanted in one.casefold() for one in _texts(line)))
        return tests


@dataclass(frozen=True)
class Place:
    """A sample's place in a run: its address in the pages."""

    kind: Kind
    iteration: int
    line: int

    def __str__(self) -> str:
        prefix = "v" if self.kind == "held out" else ""
        return f"{prefix}{self.iteration}-{self.line}"

    def path(self, run: RunData) -> Path:
        """Return the sample's file."""
        return run.iteration_folder(self.iteration) / FILES[self.kind]


@dataclass(frozen=True)
class Found:
    """A found sample."""

    place: Place
    line: Line
    gap: float | None = None
    """Mean reward of its task less the other run's; None without another run."""

    @property
    def start(self) -> str:
        """Return the first words of the answer."""
        return " ".join(self.line.text[:_START].split())


@dataclass
class Search:
    """Results, and the searched part."""

    found: list[Found] = field(default_factory=list)
    searched: int = 0
    """Samples looked at."""
    matching: int = 0
    stopped_at: int | None = None
    """The iteration of an early stop; None after a whole search."""
    reasons: set[str] = field(default_factory=set)
    """Finish reasons seen."""


def place_named(name: str) -> Place | None:
    """Read a sample's address, such as "7-12" or "v7-12"; None for another text."""
    match = re.fullmatch(r"(v?)([0-9]{1,6})-([0-9]{1,9})", name)
    if match is None:
        return None
    kind: Kind = "held out" if match[1] else "training"
    return Place(kind, int(match[2]), int(match[3]))


def sample_at(run: RunData, place: Place) -> Sample | None:
    """Return a sample; None if there is none."""
    for number_, data in enumerate(_raw_lines(place.path(run))):
        if number_ == place.line:
            return parsed(data)
    return None


def search(run: RunData, query: Query, other: RunData | None = None) -> Search:
    """Return the samples of a query, newest iterations first. other: search only the tasks with
    another mean reward in that run's iteration of the same number, the widest gaps first.

    Raises UserError for an unreadable condition.
    """
    tests = query.tests()
    result = Search()
    until = time.monotonic() + _MOST_SECONDS
    for iteration in range(query.last, query.first - 1, -1):
        if time.monotonic() > until:
            result.stopped_at = iteration
            break
        lines = list(_lines(run, query.kind, iteration))
        gaps = None if other is None else _gaps(lines, _lines(other, query.kind, iteration))
        for place, line in lines:
            result.searched += 1
            result.reasons.add(line.finish_reason or "")
            if gaps is not None and not gaps.get(line.task_id):
                continue
            if all(test(line) for test in tests):
                result.matching += 1
                gap = None if gaps is None else gaps[line.task_id]
                result.found.append(Found(place, line, gap))
        # With another run, the widest gaps may lie in any iteration.
        if other is None and len(result.found) >= MOST_FOUND:
            if iteration > query.first:
                result.stopped_at = iteration - 1
            break
    if other is not None:
        result.found.sort(key=lambda one: -abs(one.gap or 0.0))
    result.found = result.found[:MOST_FOUND]
    return result


def task_lines(run: RunData, place: Place, task_id: str) -> list[Found]:
    """Return the samples of a task in an iteration."""
    lines = _lines(run, place.kind, place.iteration)
    return [Found(there, line) for there, line in lines if line.task_id == task_id]


def _gaps(
    lines: Iterable[tuple[Place, Line]], others: Iterable[tuple[Place, Line]]
) -> Mapping[str, float]:
    """Return the differences of mean rewards, by task; only tasks of both runs."""
    mine = _mean_rewards(lines)
    theirs = _mean_rewards(others)
    return {task: mine[task] - theirs[task] for task in mine.keys() & theirs.keys()}


def _mean_rewards(lines: Iterable[tuple[Place, Line]]) -> Mapping[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for _, line in lines:
        if line.reward is not None:
            rewards[line.task_id].append(line.reward)
    return {task: sum(values) / len(values) for task, values in rewards.items()}


def _lines(run: RunData, kind: Kind, iteration: int) -> Iterator[tuple[Place, Line]]:
    path = run.iteration_folder(iteration) / FILES[kind]
    decoder = msgspec.json.Decoder(Line)
    for place, data in enumerate(_raw_lines(path)):
        try:
            yield Place(kind, iteration, place), decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def _raw_lines(path: Path) -> Iterator[bytes]:
    """Return the lines of a file, one at a time; none if unreadable."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError:
        return


def _condition(text: str) -> Callable[[Line], bool]:
    match = _CONDITION.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        limit = float(match[3])
    except ValueError:
        raise UserError(
            f"{text.strip()!r} is no condition; write a metric, a comparison and a number, such "
            "as reward<0.5 or exact=1"
        ) from None
    name = match[1]
    test = _TESTS[match[2]]

    def holds(line: Line) -> bool:
        value = number(line.reward if name == "reward" else line.metrics.get(name))
        return value is not None and test(value, limit)

    return holds


def _texts(line: Line) -> Iterator[str]:
    yield line.text
    if line.error:
        yield line.error
    messages = list(map(msgspec.json.decode, line.messages))
    for turn in line.turns or ():
        fields = msgspec.json.decode(turn)
        messages += [*(fields.get("messages") or []), fields.get("reply") or {}]
    for message in messages:
        if isinstance(message, dict):
            yield text_of(message.get("content"))
