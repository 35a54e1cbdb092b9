"""A task: what to ask the model, and how to judge what it answers."""

import hashlib
import json
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ttrl.errors import GraderError, TaskError

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

GraderOutput: TypeAlias = "float | tuple[float, Mapping[str, float]] | Grade"
Grader: TypeAlias = "Callable[[Choice], GraderOutput | Awaitable[GraderOutput]]"


@dataclass(frozen=True)
class Grade:
    """A finite reward, and named numbers to be averaged and shown beside it."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, output: object, where: str) -> "Grade":
        """Reads what a grader returned: a number, (number, metrics) or a Grade.

        Raises GraderError, naming `where`, for anything else, and for NaN and infinities.
        """
        metrics: object = {}
        if isinstance(output, Grade):
            reward, metrics = output.reward, output.metrics
        elif isinstance(output, tuple) and len(output) == 2:
            reward, metrics = output
        else:
            reward = output
        if not _is_finite_number(reward):
            raise GraderError(
                f"{where}: the grader returned {_short(output)}; a grader returns a finite number or (number, metrics)"
            )
        if not isinstance(metrics, Mapping):
            raise GraderError(f"{where}: the grader's metrics are {_short(metrics)}; they must be a dict of names to numbers")
        for name, value in metrics.items():
            if not isinstance(name, str) or not _is_finite_number(value):
                raise GraderError(f"{where}: the grader's metric {name!r} is {_short(value)}; it must be a finite number")
        return cls(float(reward), {name: float(value) for name, value in metrics.items()})  # type: ignore[arg-type]


def _is_finite_number(value: object) -> bool:
    """bools, ints, floats and NumPy scalars count; NaN, infinities and strings do not."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass
class Task:
    """OpenAI chat messages, and a grader that turns the model's answer into a reward.

        Task(
            messages=[{"role": "user", "content": "How many r are in strawberry?"}],
            grader=lambda choice: float(choice.message.content.strip() == "3"),
        )

    The grader is given the `Choice` of an OpenAI chat completion and returns a reward, or (reward, metrics), now or as an
    awaitable. Raises TaskError when made of something that cannot be sampled.
    """

    messages: list[dict[str, Any]]
    grader: Grader
    id: str = ""
    """A name for logs and rollout files; by default a digest of the messages, the same in every run."""

    def __post_init__(self) -> None:
        name = f"task {self.id!r}" if self.id else "task"
        if not isinstance(self.messages, list) or not self.messages:
            raise TaskError(f"{name}: messages is {_short(self.messages)}; give a non-empty list of OpenAI chat messages")
        for number, message in enumerate(self.messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise TaskError(
                    f"{name}: message {number} is {_short(message)}; a message is a dict with 'role' and 'content', "
                    'such as {"role": "user", "content": "…"}'
                )
            if message.get("content") is None and not message.get("tool_calls"):
                raise TaskError(f"{name}: message {number} (role {message['role']!r}) has neither content nor tool_calls")
        if not callable(self.grader):
            raise TaskError(f"{name}: grader is {_short(self.grader)}; give a function of the choice that returns a reward")
        if not self.id:
            content = json.dumps(self.messages, sort_keys=True, default=str)
            self.id = "task-" + hashlib.sha256(content.encode()).hexdigest()[:12]
