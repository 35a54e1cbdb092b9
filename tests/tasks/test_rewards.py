"""Composed rewards: by hand-computed sums, with graders that wait, fail, and are not to be
asked.
"""

import asyncio
import inspect
import pickle
import types
from typing import Any

import pytest

from ttrl.errors import GraderError, TaskError
from ttrl.tasks.rewards import gated, length_penalty, weighted
from ttrl.tasks.task import Grade


def graded(grader: Any, text: str = "x", **fields: Any) -> tuple[float, dict[str, float]]:
    output = grader(types.SimpleNamespace(message=types.SimpleNamespace(content=text), **fields))

    async def wait() -> Any:
        return await output

    grade = Grade.of(asyncio.run(wait()) if inspect.isawaitable(output) else output, "here")
    return grade.reward, grade.metrics


def right(choice: Any) -> tuple[float, dict[str, float]]:
    return float(choice.message.content == "x"), {"exact": 1.0}


async def style(choice: Any) -> tuple[float, dict[str, float]]:
    await asyncio.sleep(0)
    return 0.5, {"words": 3.0}


def broken(choice: Any) -> float:
    raise ValueError("not to be asked")


def test_a_weighted_sum() -> None:
    both = weighted(right=(0.8, right), style=(0.2, style))
    assert graded(both) == (
        pytest.approx(0.9),
        {"right": 1.0, "right/exact": 1.0, "style": 0.5, "style/words": 3.0},
    )
    assert graded(both, "y")[0] == pytest.approx(0.1)
    only = weighted(right=(2.0, right))
    assert not inspect.isawaitable(
        only(types.SimpleNamespace(message=types.SimpleNamespace(content="x")))
    )
    assert graded(pickle.loads(pickle.dumps(only))) == (2.0, {"right": 1.0, "right/exact": 1.0})
    with pytest.raises(ValueError, match="not to be asked"):
        graded(weighted(right=(1.0, right), broken=(0.0, broken)))
    with pytest.raises(GraderError, match="bad: the grader returned None"):
        graded(weighted(bad=(1.0, lambda choice: None)))


def test_those_that_wait_wait_together() -> None:
    here = []

    async def meet(choice: Any) -> float:
        here.append(1)
        while len(here) < 2:
            await asyncio.sleep(0)
        return 1.0

    assert graded(weighted(a=(1.0, meet), b=(1.0, meet)))[0] == 2.0


@pytest.mark.parametrize("gate", [right, lambda choice: asyncio.sleep(0, right(choice))])
@pytest.mark.parametrize("grader", [style, lambda choice: (0.5, {"words": 3.0})])
def test_a_gate(gate: Any, grader: Any) -> None:
    assert graded(gated(grader, gate)) == (0.5, {"exact": 1.0, "words": 3.0, "gate": 1.0})
    assert graded(gated(broken, gate, otherwise=-1.0), "y") == (-1.0, {"exact": 1.0, "gate": 0.0})
    assert graded(gated(grader, gate, least=0.0), "y")[0] == 0.5


def test_what_length_is_worth() -> None:
    grader = length_penalty(4, 8)
    expected = {0: 0.0, 4: 0.0, 5: -0.25, 6: -0.5, 8: -1.0, 100: -1.0}
    assert {tokens: graded(grader, token_ids=[1] * tokens)[0] for tokens in expected} == expected
    assert graded(weighted(right=(1.0, right), length=(0.1, grader)), token_ids=[1] * 6)[
        0
    ] == pytest.approx(0.95)
    with pytest.raises(TaskError, match="no token ids"):
        graded(grader)


@pytest.mark.parametrize(
    "make",
    [
        lambda: weighted(),
        lambda: weighted(a=right),
        lambda: weighted(a=(right, 0.5)),
        lambda: weighted(a=(float("nan"), right)),
        lambda: gated(right, 1.0),
        lambda: gated(right, right, least=float("inf")),
        lambda: length_penalty(8, 8),
        lambda: length_penalty(-1, 8),
        lambda: length_penalty(0.5, 8),
    ],
)
def test_what_is_refused(make: Any) -> None:
    with pytest.raises(TaskError):
        make()
