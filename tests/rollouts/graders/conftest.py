"""Benches of graders in processes, shared by the tests of a file."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.graders_bench import GradersBench

from ttrl.system import process_guard


@pytest.fixture
def make_bench() -> Iterator[Callable[..., GradersBench]]:
    made: list[GradersBench] = []

    def make(**settings: Any) -> GradersBench:
        made.append(GradersBench(**settings))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[GradersBench]:
    made = GradersBench(timeout=60.0, size=2, memory=512 * 2**20)
    yield made
    keeper = made.keeper
    made.close()
    assert process_guard.process_id(keeper) is None


@pytest.fixture(scope="module")
def hasty() -> Iterator[GradersBench]:
    made = GradersBench(timeout=2.0, size=8)  # good graders must end in time on a busy machine, too
    yield made
    made.close()
