"""What the tests of tasks share: replies, the published data beside the repository, and long hostile replies."""

import random
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

# What makes a careless pattern try again from every place: the same piece over and over, and one that never ends.
PIECES = (
    "0",
    "9,",
    "1 111 ",
    ".",
    "-",
    " ",
    "\n",
    "\t \n",
    "####",
    "#### \n",
    "<answer>",
    "</answer>",
    "<think>",
    "\\boxed{",
    "{}",
    "(",
    "[[1",
    "1,\n",
    "| 1 ",
    "```",
    "**a",
    "'",
    "A or ",
    "answer is ",
    "a,b,c,d\n",
    "1+",
    "1+1=",
    "e2e4 ",
    "\\frac{1",
    "²İ\ud83d\x00",
)


@pytest.fixture
def reply() -> Callable[[str | None], Any]:
    """The choice of a completion with this content."""
    return lambda content: types.SimpleNamespace(message=types.SimpleNamespace(content=content))


@pytest.fixture
def shared() -> Path:
    """The folder of published data; the test is skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data")
    return SHARED


@pytest.fixture
def grade_long_replies(reply: Callable[[str], Any]) -> Callable[..., None]:
    """Grades hostile replies of 25 kB and 100 kB: four times the text may take six times the CPU time, and a second more, which
    is many times what a grader takes here. What takes the square of the length takes sixteen times as much.
    """

    def grade(grader: Callable[[Any], Any], *pieces: str) -> None:
        for texts in (PIECES, pieces):
            short, long = (sum(_seconds(grader, reply, text, size) for text in texts) for size in (25_000, 100_000))
            assert long < 1.0 + 6 * short

    return grade


def _seconds(grader: Callable[[Any], Any], reply: Callable[[str], Any], piece: str, size: int) -> float:
    total = 0.0
    for text in _texts(piece, size):
        started = time.process_time()
        reward = grader(reply(text))
        total += time.process_time() - started
        assert 0.0 <= (reward[0] if isinstance(reward, tuple) else reward) <= 1.0
    return total


def _texts(piece: str, size: int) -> Iterator[str]:
    yield (piece * (size // len(piece) + 1))[:size]


def shuffled(count: int, seed: int) -> list[int]:
    """A permutation of range(count)."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
