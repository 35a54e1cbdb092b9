"""Combine rewards: weighted sums of graders, conditions, and length penalties. Each part is a
metric.

grader = weighted(right=(0.8, Right("42")), style=(0.2, Judge(model=…, rubric=…)))
grader = gated(Right("42"), has_answer, otherwise=0.0)
grader = weighted(right=(1.0, Right("42")), length=(0.1, length_penalty(512, 1024)))
"""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import CellType
from typing import Any

from ttrl.errors import TaskError
from ttrl.tasks.task import Choice, Grade, Grader, GraderOutput
from ttrl.text import is_number


@dataclass(frozen=True)
class Weighted:
    """The grader returned by `weighted`."""

    parts: tuple[tuple[str, float, Grader], ...]

    @property
    def graders(self) -> list[Grader]:
        """Return the graders of all parts, for `declared`."""
        return [grader for _, _, grader in self.parts]

    def __call__(self, choice: Choice) -> "GraderOutput | Awaitable[GraderOutput]":
        """Return the sum of the parts; an awaitable of it, if one of them is."""
        outputs = [grader(choice) for grader in self.graders]
        return _then(outputs, self._sum)

    def _sum(self, outputs: list[Any]) -> Grade:
        grades = [
            Grade.of(output, name) for (name, _, _), output in zip(self.parts, outputs, strict=True)
        ]
        metrics: dict[str, float] = {}
        for (name, _, _), grade in zip(self.parts, grades, strict=True):
            metrics |= {f"{name}/{key}": value for key, value in grade.metrics.items()}
            metrics[name] = grade.reward
        return Grade(
            sum(
                weight * grade.reward
                for (_, weight, _), grade in zip(self.parts, grades, strict=True)
            ),
            metrics,
        )


@dataclass(frozen=True)
class Gated:
    """The grader returned by `gated`."""

    grader: Grader
    gate: Grader
    least: float
    otherwise: float

    @property
    def graders(self) -> list[Grader]:
        """Return grader and gate, for `declared`."""
        return [self.grader, self.gate]

    def __call__(self, choice: Choice) -> "GraderOutput | Awaitable[GraderOutput]":
        """Return the grader's output if the gate is open, else `otherwise`, without asking the
        grader.
        """
        gate = self.gate(choice)
        if inspect.isawaitable(gate):
            return self._later(gate, choice)
        grade = Grade.of(gate, "gate")
        if grade.reward < self.least:
            return self._closed(grade)
        return _then([self.grader(choice)], lambda outputs: self._open(grade, outputs[0]))

    async def _later(self, gate: Awaitable[Any], choice: Choice) -> Grade:
        grade = Grade.of(await gate, "gate")
        if grade.reward < self.least:
            return self._closed(grade)
        output = self.grader(choice)
        return self._open(grade, await output if inspect.isawaitable(output) else output)

    def _closed(self, gate: Grade) -> Grade:
        return Grade(self.otherwise, {**gate.metrics, "gate": 0.0})

    def _open(self, gate: Grade, output: Any) -> Grade:
        grade = Grade.of(output, "grader")
        return Grade(grade.reward, {**gate.metrics, **grade.metrics, "gate": 1.0})


@dataclass(frozen=True)
class LengthPenalty:
    """The grader returned by `length_penalty`."""

    free: int
    most: int

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (0 to -1, metrics). Raises TaskError if the server gave no token ids."""
        ids = getattr(choice, "token_ids", None)
        if ids is None:
            raise TaskError(
                "length_penalty counts tokens, but the server returned no token ids; set "
                "token_ids=True"
            )
        over = min(1.0, max(0.0, (len(ids) - self.free) / (self.most - self.free)))
        return 0.0 - over, {"tokens": float(len(ids))}


def only_evaluates(*graders: Any) -> str:
    """Return the reason why one of the graders (or rollouts), or one called by it, is only for
    evaluation; "" if none is.
    """
    return str(declared("only_evaluates", *graders) or "")


def declared(name: str, *graders: Any, depth: int = 4) -> Any:
    """Return the attribute of this name of one of the graders, or of one called by it: through
    partials, methods, decorators and closures, not through names of its module. None if it is
    nowhere set.
    """
    for grader in graders:
        value = getattr(grader, name, None)
        if isinstance(grader, Weighted | Gated):
            value = declared(name, *grader.graders)
        if value:
            return value
        cells = [
            cell.cell_contents
            for cell in getattr(grader, "__closure__", None) or ()
            if cell != CellType()
        ]
        if isinstance(grader, functools.partial):
            cells += [grader.func, *grader.args, *grader.keywords.values()]
        cells += [getattr(grader, link, None) for link in ("__wrapped__", "__self__")]
        if depth:
            value = declared(name, *filter(callable, cells), depth=depth - 1)
        if value:
            return value
    return None


def weighted(**parts: tuple[float, Grader]) -> Weighted:
    """Return a grader for the sum of others: `name=(weight, grader)`. Each reward is the metric
    NAME, its metrics NAME/….

    All parts are asked, coroutines at the same time; if one fails, the sample does. Raises
    TaskError.
    """
    if not parts:
        raise TaskError("weighted() has no parts; give some, such as right=(0.8, grader)")
    for name, part in parts.items():
        if (
            not isinstance(part, tuple)
            or len(part) != 2
            or not is_number(part[0])
            or not callable(part[1])
        ):
            raise TaskError(
                f"weighted: {name} is {part!r}; give (weight, grader), such as {name}=(0.8, grader)"
            )
    return Weighted(
        tuple((name, float(weight), grader) for name, (weight, grader) in parts.items())
    )


def gated(grader: Grader, gate: Grader, *, least: float = 1.0, otherwise: float = 0.0) -> Gated:
    """Return a grader asked only if the gate, another grader, gives `least` or more; else the
    reward is `otherwise`.

    So an expensive judge reads only well-formed replies. Metrics: `gate`, 0 or 1, and those of
    both. Raises TaskError.
    """
    if not callable(grader) or not callable(gate):
        raise TaskError("gated: give two graders; the second one decides whether to ask the first")
    if not is_number(least) or not is_number(otherwise):
        raise TaskError(
            f"gated: least is {least!r} and otherwise is {otherwise!r}; give finite numbers"
        )
    return Gated(grader, gate, float(least), float(otherwise))


def length_penalty(free: int, most: int) -> LengthPenalty:
    """Return a grader of only a reply's length: 0 up to `free` tokens, then falling in proportion,
    to -1 from `most` on.

    (The soft overlong punishment of DAPO, arXiv:2503.14476, equation 13; `free` is its L_max −
    L_cache.) Raises TaskError.
    """
    if type(free) is not int or type(most) is not int or not 0 <= free < most:
        raise TaskError(
            f"length_penalty: free is {free!r} and most is {most!r}; give whole numbers, 0 <= "
            "free < most"
        )
    return LengthPenalty(free, most)


def _then(outputs: list[Any], finish: Callable[[list[Any]], Grade]) -> "Grade | Awaitable[Grade]":
    """Return the result of `finish` on the outputs, after awaiting the awaitable ones."""
    if not any(map(inspect.isawaitable, outputs)):
        return finish(outputs)

    async def later() -> Grade:
        waiting = [place for place, output in enumerate(outputs) if inspect.isawaitable(output)]
        for place, output in zip(
            waiting, await asyncio.gather(*(outputs[place] for place in waiting)), strict=True
        ):
            outputs[place] = output
        return finish(outputs)

    return later()
