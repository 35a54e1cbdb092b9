"""Compare two evaluations of the same tasks, task by task: `ttrl compare a.json b.json`."""

import dataclasses
import os
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from ttrl.errors import UserError
from ttrl.evaluation.eval_results import StoredResult, StoredSet, TaskScores, aligned, read_result
from ttrl.intervals import Difference, difference_over_seeds, pooled
from ttrl.messages import JsonObject
from ttrl.system.frames import data_frame
from ttrl.system.html_table import html_table
from ttrl.text import flat, percent

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame

Key = tuple[str, str, int]


@dataclass(frozen=True)
class SetComparison:
    """One set of tasks in both evaluations."""

    name: str
    score: str
    first: float | None
    """Mean over the shared tasks."""
    second: float | None
    difference: Difference | None
    num_shared: int
    """Tasks in both, with equal messages."""
    num_others: int
    """Tasks in only one, or with other messages."""
    num_ungraded: int
    """Shared tasks with all samples of one evaluation failed."""

    def row(self) -> list[str]:
        """Return a row of the table: name, tasks, score, both means, difference, interval, p, tasks
        with better and worse.
        """
        row = [self.name, str(self.num_shared), self.score]
        row += ["" if value is None else f"{value:.3f}" for value in (self.first, self.second)]
        d = self.difference
        if d is None:
            return [*row, "", "", "", ""]
        # Smaller values of t's distribution are rounding errors.
        if d.p_value >= 1e-12:
            p_value = f"{d.p_value:.2g}"
        else:
            p_value = "<1e-12"
        return [
            *row,
            f"{d.mean:+.3f}",
            f"{d.low:+.3f} to {d.high:+.3f}",
            p_value,
            f"{d.better}/{d.worse}",
        ]


def heads(first: str, second: str, confidence: float) -> list[str]:
    """Return the heading of `SetComparison.row`, with names for the two sides."""
    interval = f"{percent(confidence)} interval"
    return ["tasks", "n", "score", first, second, "difference", interval, "p", "better/worse"]


@dataclass(frozen=True)
class Comparison:
    """Two evaluations, compared on all shared sets."""

    models: tuple[str, str]
    confidence: float
    sets: list[SetComparison]
    left_out: list[str]
    """Sets in only one of them."""
    settings_that_differ: list[str]
    incomplete: list[str]
    """"first", "second": evaluations stopped before their last set."""

    def to_json(self) -> JsonObject:
        return dataclasses.asdict(self)

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each set: name, score, both means, the fields of the
        difference as difference.NAME, and numbers of tasks. Raises UserError without pandas.
        """
        return data_frame(map(dataclasses.asdict, self.sets), columns=("name", "score"))

    def table(self) -> str:
        """Return a terminal table: a line for each set, between the caveats and the tasks left
        out.
        """
        lines = [f"first:  {self.models[0]}", f"second: {self.models[1]}"]
        return "\n".join([*lines, *self._limits(), *aligned(self._rows()), *self._left_out()])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        caption = f"first: {self.models[0]}, second: {self.models[1]}"
        notes = [*self._limits(), *self._left_out()]
        return html_table(self._rows(), caption=caption, notes=notes)

    def _rows(self) -> list[list[str]]:
        """Return the table, its heading first."""
        return [heads("first", "second", self.confidence), *(one.row() for one in self.sets)]

    def _left_out(self) -> list[str]:
        """Return notes on the tasks left out of the comparison."""
        left_out = "tasks exist in one evaluation only, or are worded differently, and are left out"
        ungraded = (
            "tasks are left out: they have no grade in one evaluation, so the difference does not "
            "cover them"
        )
        lines = [f"{one.name}: {one.num_others} {left_out}" for one in self.sets if one.num_others]
        lines += [
            f"{one.name}: {one.num_ungraded} {ungraded}" for one in self.sets if one.num_ungraded
        ]
        if self.left_out:
            lines.append(f"in one evaluation only: {', '.join(self.left_out)}")
        return lines

    def _limits(self) -> list[str]:
        """Return the caveats for the figures."""
        lines = [f"the evaluation of the {which} is not complete" for which in self.incomplete]
        if self.settings_that_differ:
            lines.append(f"other settings: {', '.join(self.settings_that_differ)}")
        if len(self.sets) > 1:
            lines.append(
                f"{len(self.sets)} sets were compared: by chance, one in twenty differs at p < 0.05"
            )
        return lines


def compare(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, confidence: float = 0.95
) -> Comparison:
    """Compare the JSON of two evaluations on their shared tasks, second minus first.

    Raises UserError for files other than evaluations, without a shared set, or with different
    score names for a set.

    >>> def right(choice):
    ...     return float("5" in choice.message.content)
    >>> tasks = {"sums": [Task([{"role": "user", "content": "What is 2 + 3?"}], right)]}
    >>> for temperature, file in ((0.0, "cold.json"), (1.0, "warm.json")):
    ...     settings = {"temperature": temperature, "output": file, "pbar": False}
    ...     found = evaluate("http://127.0.0.1:8000/v1", tasks, **settings)
    >>> [sums] = compare("cold.json", "warm.json").sets
    >>> sums.first, sums.second
    (1.0, 1.0)
    """
    if not 0.5 <= confidence <= 0.9999:
        raise UserError(
            f"confidence is {confidence!r}; give a number from 0.5 to 0.9999, such as 0.95"
        )
    contents = [read_result(path) for path in (first, second)]
    one, other = (content.sets for content in contents)
    found = {name: _partner(name, one, other) for name in one}
    partners = {name: partner for name, partner in found.items() if partner is not None}
    if not partners:
        has = [", ".join(sets) or "no set" for sets in (one, other)]
        raise UserError(
            f"no set in common: {first} has {has[0]}, {second} has {has[1]}; compare evaluations "
            "of the same tasks"
        )
    for name, partner in partners.items():
        scores = one[name].score, other[partner].score
        if scores[0] != scores[1]:
            raise UserError(
                f"{name} is scored by {scores[0]!r} in {first}, but by {scores[1]!r} in {second}; "
                "evaluate both with the same score"
            )
    settings = [flat(content.settings) for content in contents]
    keys = (settings[0].keys() | settings[1].keys()) - _OURS
    return Comparison(
        models=(_asked(contents[0]), _asked(contents[1])),
        confidence=confidence,
        sets=[
            _compared(name, [one[name]], [other[partner]], confidence)
            for name, partner in partners.items()
        ],
        left_out=sorted(
            [*(one.keys() - partners.keys()), *(other.keys() - set(partners.values()))]
        ),
        settings_that_differ=sorted(
            key for key in keys if settings[0].get(key) != settings[1].get(key)
        ),
        incomplete=[
            which for which, content in zip(("first", "second"), contents) if not content.complete
        ],
    )


_OURS = frozenset(
    {"model", "name", "cache", "concurrency", "prices", "weights_digest", "tasks", "pass_at"}
)
"""Settings without effect on answers, or reported elsewhere."""


def _asked(content: StoredResult) -> str:
    """Return the model's name, for an address with its served model."""
    name = content.settings.get("name")
    if name and content.model.startswith(("http://", "https://")):
        return f"{name} at {content.model}"
    return content.model


def _partner(name: str, one: Collection[str], other: Collection[str]) -> str | None:
    """Return the other's set of the same name, else its only one of the same family with data
    elsewhere: gsm8k=here, gsm8k=there. Only equal tasks of two sets are ever paired.
    """
    if name in other:
        return name

    def family(text: str) -> str:
        return PurePath(text.partition("=")[0]).name

    mine = [key for key in one if key not in other and family(key) == family(name)]
    theirs = [key for key in other if key not in one and family(key) == family(name)]
    if len(mine) == len(theirs) == 1:
        return theirs[0]
    return None


def compare_seeds(
    first: Sequence[str | os.PathLike[str]],
    second: Sequence[str | os.PathLike[str]],
    *,
    confidence: float = 0.95,
) -> list[SetComparison]:
    """Compare the JSON of evaluations of two training methods, with several seeds each, on the sets
    shared by all: second minus first, with intervals for other tasks and other seeds. Raises
    UserError for files other than evaluations.
    """
    sides = [[read_result(path).sets for path in side] for side in (first, second)]
    names = [name for name in sides[0][0] if all(name in sets for side in sides for sets in side)]
    return [
        _compared(
            name, [one[name] for one in sides[0]], [one[name] for one in sides[1]], confidence
        )
        for name in names
    ]


def _compared(
    name: str,
    one: Sequence[StoredSet],
    other: Sequence[StoredSet],
    confidence: float,
) -> SetComparison:
    """Compare a set in the evaluations of one or several seeds."""
    firsts, seconds = ([_by_key(result.tasks) for result in side] for side in (one, other))
    runs = [*firsts, *seconds]
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    first, second = ([_pooled(run, shared) for run in side] for side in (firsts, seconds))
    tasks = range(len(first[0]))
    graded = [task for task in tasks if all(run[task] for run in (*first, *second))]
    means = []
    if graded:
        for side in (first, second):
            means.append(statistics.fmean(statistics.fmean(run[k]) for run in side for k in graded))
    return SetComparison(
        name=name,
        score=one[0].score,
        first=means[0] if means else None,
        second=means[1] if means else None,
        difference=difference_over_seeds(first, second, confidence),
        num_shared=len(graded),
        num_others=len(set().union(*runs)) - len(shared),
        num_ungraded=len(tasks) - len(graded),
    )


def _pooled(run: Mapping[Key, list[float]], keys: Sequence[Key]) -> list[list[float]]:
    """Return the scores of each task, pooled with its repeats."""
    return pooled([key[:2] for key in keys], [run[key] for key in keys])


def _by_key(rows: Sequence[TaskScores]) -> dict[Key, list[float]]:
    """Return scores by id, digest of the messages, and number of equal tasks before."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[Key, list[float]] = {}
    for row in rows:
        found[(*row.key, seen[row.key])] = row.known
        seen[row.key] += 1
    return found
