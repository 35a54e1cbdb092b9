"""A grader of two arguments as one of one argument. In a file of its own: graders' processes import it, and nothing heavy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttrl.records import Sample


@dataclass(frozen=True)
class WithSample:
    """Calls `grader(choice, sample)`. A class and no closure, so that it can travel to another process."""

    grader: Callable[..., Any]
    sample: Sample

    def __call__(self, choice: Any) -> Any:
        """What the grader returns, which may be an awaitable."""
        return self.grader(choice, self.sample)
