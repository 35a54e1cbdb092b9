"""What the tests of tasks share: replies, the published data beside the repository, and long
hostile replies.
"""

import contextlib
import random
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_SECONDS = 20.0
SHARED = Path(__file__).parents[2].parent / "shared" / "data"

# What makes a careless pattern try again from every place: the same piece over and over, and one
# that never ends.
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
    """Grades hostile replies of 100 kB, each within MOST_SECONDS of CPU time.

    That is no measurement but a limit, hundreds of times what a grader takes: one that takes the
    square of the length needs 10¹⁰ steps, minutes, and is interrupted (`re` looks for signals while
    it matches).
    """

    def grade(grader: Callable[[Any], Any], *pieces: str) -> None:
        for text in (text for piece in (*PIECES, *pieces) for text in _texts(piece, 100_000)):
            with _cpu_limit(MOST_SECONDS, f"a reply of {text[:20]!r} again and again"):
                reward = grader(reply(text))
            assert 0.0 <= (reward[0] if isinstance(reward, tuple) else reward) <= 1.0

    return grade


@contextlib.contextmanager
def _cpu_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises AssertionError in the block when it has used so much CPU time of this process."""

    def stop(*_: object) -> None:
        raise AssertionError(f"{what} takes more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _texts(piece: str, size: int) -> Iterator[str]:
    yield (piece * (size // len(piece) + 1))[:size]


def shuffled(count: int, seed: int) -> list[int]:
    """A permutation of range(count)."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
