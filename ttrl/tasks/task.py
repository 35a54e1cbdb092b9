"""Define a task: the prompt for the model, and the grader of its answer."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

from ttrl.errors import GraderError, RolloutError, TaskError
from ttrl.messages import Message, Tool, part_that_is_no_text, request_messages
from ttrl.records import LARGEST_REWARD, PROMPT, Sample
from ttrl.text import is_number, short

if TYPE_CHECKING:
    from openai.types.chat import chat_completion

Choice: TypeAlias = "chat_completion.Choice"
"""The grader's argument: OpenAI's `Choice`, without importing it."""
GraderOutput: TypeAlias = "float | tuple[float, Mapping[str, float]] | Grade"
Grader: TypeAlias = "Callable[[Choice], GraderOutput | Awaitable[GraderOutput]]"
GroupGrader: TypeAlias = (
    "Callable[[list[Choice]], Sequence[GraderOutput | GraderError] | "
    "Awaitable[Sequence[GraderOutput | GraderError]]]"
)
_LARGEST_METRIC = 1e100
"""Intervals square metrics."""
Rollout: TypeAlias = "Callable[[Chat], Awaitable[GraderOutput | None]]"


@dataclass(frozen=True)
class Grade:
    """A reward of at most LARGEST_REWARD, and named numbers, reported as means.

    >>> Grade(0.5, {"right": 0.0, "format": 1.0}).metrics["format"]
    1.0
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, output: object, where: str, *, who: str = "grader") -> "Grade":
        """Read the return value of a grader (or a rollout, `who`): a number, (number, metrics) or a
        Grade.

        Numbers are also bools, Decimal, and NumPy's and torch's scalars and arrays without axes.
        Raises GraderError, naming `where`, for anything else, for NaN, infinities and numbers too
        large for training or statistics.
        """
        reward: object
        metrics: object = {}
        if isinstance(output, Grade):
            reward = output.reward
            metrics = output.metrics
        elif isinstance(output, tuple) and len(output) == 2:
            reward, metrics = output
        else:
            reward = output
        number = _number(reward)
        if number is None:
            raise GraderError(
                f"{where}: the {who} returned {short(output, 80)}; a {who} must return a "
                "finite number or (number, metrics)"
            )
        if abs(number) > LARGEST_REWARD:
            raise GraderError(
                f"{where}: the {who} returned the reward {number:g}, beyond ±{LARGEST_REWARD:g}, "
                "too large for a gradient; scale it down, or clip it"
            )
        if not isinstance(metrics, Mapping):
            raise GraderError(
                f"{where}: the {who}'s metrics are {short(metrics, 80)}; they must be a dict of "
                "names to numbers"
            )
        numbers = {}
        for name, value in metrics.items():
            metric = _number(value)
            if not isinstance(name, str) or metric is None or abs(metric) > _LARGEST_METRIC:
                raise GraderError(
                    f"{where}: the {who}'s metric {name!r} is {short(value, 80)}; it must be a "
                    f"finite number, of at most ±{_LARGEST_METRIC:g}"
                )
            numbers[name] = metric
        return cls(number, numbers)


def _number(value: object) -> float | None:
    """Return a finite number as a float, also one of NumPy or torch; None for anything else."""
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "shape", None) == ():
        value = item()
    if isinstance(value, Decimal) and value.is_finite():
        value = float(value)
    if isinstance(value, bool) or is_number(value):
        return float(value)
    return None


@dataclass(frozen=True)
class RolloutLimits:
    """The limits of one rollout. Raises TaskError for impossible ones.

    >>> RolloutLimits(turns=4, tokens=2000, total_seconds=300.0).turns
    4
    """

    turns: int = 64
    """Replies of the model."""
    tokens: int | None = None
    """Tokens for the model to generate in all turns together; None: as many as fit its context."""
    seconds: float = 60.0
    """Seconds of the rollout's own work between two requests (a tool, a game); the model's time
    does not count.
    """
    total_seconds: float | None = None
    """Seconds of the whole rollout, including the model's time and the wait for a busy server;
    None: unlimited.
    """

    def __post_init__(self) -> None:
        for name, value in (("turns", self.turns), ("tokens", self.tokens)):
            if (value is not None or name == "turns") and (type(value) is not int or value < 1):
                raise TaskError(
                    f"rollout limits: {name} is {value!r}; give a whole number of at least 1"
                )
        for name, seconds in (("seconds", self.seconds), ("total_seconds", self.total_seconds)):
            if (seconds is not None or name == "seconds") and (
                not is_number(seconds) or seconds <= 0
            ):
                raise TaskError(
                    f"rollout limits: {name} is {seconds!r}; give a positive number of seconds"
                )


@dataclass
class Task:
    """OpenAI chat messages, and a grader to turn the model's answer into a reward.

    >>> task = Task(
    ...     messages=[{"role": "user", "content": "How many r are in strawberry?"}],
    ...     grader=lambda choice: float(choice.message.content.strip() == "3"),
    ... )

    The grader gets the `Choice` of an OpenAI chat completion and returns a reward, or (reward,
    metrics), now or as an awaitable. Assistant messages among `messages` are context: training
    covers only the model's new reply.

    Null fields of messages are left out, and arguments of tool calls become JSON text
    (`ttrl.messages`). Content may be a list of parts, all of them texts.

    A `rollout` asks the model several times: see `ttrl.tasks.task.Chat`. Raises TaskError for parts
    unfit for sampling.
    """

    messages: list[Message]
    grader: "Grader | None" = None
    """Optional if the rollout returns the reward, or the group_grader gives it."""
    id: str = ""
    """A name for logs and rollout files; by default a digest of the messages, the same in every
    run.
    """
    rollout: "Rollout | None" = None
    """`async def rollout(chat)`: talks to the model, `await chat("…")`, uses tools or makes moves
    between, and returns the reward, (reward, metrics), or None. After None the grader gets the last
    choice; its `messages` are the conversation.
    """
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    """Limits of the rollout."""
    group_grader: "GroupGrader | None" = None
    """Called once, after all samples of the task, with the choices of those without a failure, as
    the grader gets them (without token strings, if the answer came out of a file). Returns as many
    rewards, (reward, metrics), or GraderErrors; a GraderError fails a single sample. Its rewards
    are added to those of the grader or rollout. It runs in this process.
    """
    level: int = 0
    """Difficulty, for a run from easy to hard tasks: see `in_levels`."""

    def __post_init__(self) -> None:
        name = f"task {self.id!r}" if self.id else "task"
        if not isinstance(self.messages, list) or not self.messages:
            raise TaskError(
                f"{name}: messages is {short(self.messages, 80)}; give a non-empty list of "
                "OpenAI chat messages"
            )
        for number, message in enumerate(self.messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise TaskError(
                    f"{name}: message {number} is {short(message, 80)}; a message is a dict with "
                    "'role' and 'content', "
                    'such as {"role": "user", "content": "…"}'
                )
            self._check_content(f"{name}: message {number}", message)
        try:
            self.messages = request_messages(self.messages)
        except (TypeError, ValueError) as error:
            why = f"the arguments of a tool call have no JSON text: {error}"
            raise TaskError(f"{name}: {why}") from error
        if self.rollout is not None and not callable(self.rollout):
            raise TaskError(
                f"{name}: rollout is {short(self.rollout, 80)}; give a coroutine function, async "
                "def rollout(chat)"
            )
        if self.group_grader is not None and not callable(self.group_grader):
            raise TaskError(
                f"{name}: group_grader is {short(self.group_grader, 80)}; give a function of a "
                "list of choices"
            )
        if not callable(self.grader) and (
            self.grader is not None or (self.rollout is None and self.group_grader is None)
        ):
            raise TaskError(
                f"{name}: grader is {short(self.grader, 80)}; give a function from a choice to a "
                "reward"
            )
        if not isinstance(self.limits, RolloutLimits):
            raise TaskError(
                f"{name}: limits is {short(self.limits, 80)}; give RolloutLimits(turns=…, "
                "tokens=…, seconds=…)"
            )
        if type(self.level) is not int:
            raise TaskError(
                f"{name}: level is {short(self.level, 80)}; give a whole number, lower for easier "
                "tasks"
            )
        if not self.id:
            content = json.dumps(self.messages, sort_keys=True, default=str)
            self.id = "task-" + hashlib.sha256(content.encode()).hexdigest()[:12]

    @staticmethod
    def _check_content(where: str, message: Mapping[str, Any]) -> None:
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            role = f"role {message['role']!r}"
            raise TaskError(f"{where} ({role}) has neither content nor tool_calls")
        if message["role"] == PROMPT:
            found = None
        else:
            found = part_that_is_no_text(content)
        if found is not None:
            raise TaskError(f"{where} holds {found}; ttrl trains on text, so leave it out")

    def as_json(self) -> bytes:
        """Return id, messages and any level as JSON. Raises TaskError for content no file can
        hold.
        """
        try:
            content = [self.id, self.messages, *([self.level] if self.level else [])]
            return json.dumps(content, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"task {self.id!r}: its id and messages cannot be written as JSON: {error}"
            ) from error


def task_list(given: Any, name: str) -> list[Task]:
    """Return the tasks of `given`, a list or another iterable of them. Raises TaskError, with
    `name`, for anything else.
    """
    if isinstance(given, Task | str) or not isinstance(given, Iterable):
        raise TaskError(f"{name} is of type {type(given).__name__}; give a list of Task")
    listed = list(given)
    wrong = [type(task).__name__ for task in listed if not isinstance(task, Task)]
    if wrong:
        raise TaskError(
            f"{name}: {len(wrong)} of {len(listed)} are not Tasks, the first is of type "
            f"{wrong[0]}; make them with ttrl.Task(...)"
        )
    return listed


def in_levels(*levels: Sequence[Task]) -> list[Task]:
    """Return all tasks, those of the first list with level 0, of the next with level 1, and so on.

    A run begins with the lowest level only, and opens the others one by one: see
    `TrainConfig.level_up_at`.
    """
    return [replace(task, level=level) for level, tasks in enumerate(levels) for task in tasks]


def question(text: str) -> list[Message]:
    """Return the messages of a single question."""
    return [{"role": "user", "content": text}]


Example: TypeAlias = dict[str, list[Message]]
"""A row for a supervised warm start: {"messages": [user, assistant]}."""


def solved(text: str, answer: str) -> Example:
    """Return an answered question."""
    return {"messages": [*question(text), {"role": "assistant", "content": answer}]}


Ask: TypeAlias = "Callable[..., Awaitable[tuple[Choice, Message]]]"
"""(messages, tools, max_tokens, stop) → the model's choice, and its message to be sent back:
`Play.ask`.
"""


class Chat:
    """A conversation with the sampled model. It begins with the task's messages.

    messages: the conversation so far, the model's replies included. You may change the list; its
        content is sent next. If an earlier message is changed or removed, the reply is trained as
        one to another prompt and costs more tokens. A single message of the role "prompt" is no
        chat: the model continues its content, a text or a list of token ids.
    tools: descriptions of functions for the model to call, as in the OpenAI API; once given, they
        stay. Servers started by ttrl read calls as the model's chat template writes them
        (`ttrl.server.parsers`).
    task_id, sample: the rollout's identity; a random generator seeded with them repeats the same
        game.
    params: the sampling parameters.

    >>> async def rollout(chat: Chat) -> float:
    ...     guess = await chat()
    ...     check = await chat("Are you sure? Answer yes or no.")
    ...     return float("4" in guess.message.content and "yes" in check.message.content)
    >>> question = {"role": "user", "content": "What is 2 + 2?"}
    >>> task = Task([question], rollout=rollout, limits=RolloutLimits(turns=2))
    """

    def __init__(
        self,
        ask: Ask,
        messages: Sequence[Mapping[str, Any]],
        task_id: str,
        sample: int,
        tools: Any = None,
        params: Mapping[str, Any] | None = None,
        count_time: Callable[[bool], None] = lambda counts: None,
    ) -> None:
        self._ask = ask
        self._count_time = count_time
        self._is_asking = False
        self.messages: list[Message] = [dict(message) for message in messages]
        self.tools: list[Tool] | None = tools
        self.task_id = task_id
        self.sample = sample
        self.params = params or {}

    async def __call__(
        self,
        new: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> "Choice":
        """Append `new` to `messages` (a string is a user's message), ask the model, append its
        reply, and return the choice.

        The choice is the same as for graders: `.message.content`, `.message.tool_calls`,
        `.finish_reason`, `.token_ids`; and `.usage`. max_tokens, stop: for this reply, instead of
        the call's own.

        Raises RolloutLimitError at the task's limits or the end of the model's context. Uncaught,
        it ends the rollout, and the grader judges the conversation so far. Raises RequestError if
        the server fails for good. Uncaught, it costs the sample.
        """
        if self._is_asking:
            await asyncio.sleep(0)  # a caller's retry loop must let the reply come
            raise RolloutError(
                "this chat is waiting for a reply; for requests at the same time, use a copy: "
                "chat.copy()"
            )
        added = (
            [{"role": "user", "content": new}]
            if isinstance(new, str)
            else [new]
            if isinstance(new, Mapping)
            else new or []
        )
        self.messages += [dict(message) for message in added]
        if tools is not None:
            self.tools = [dict(tool) for tool in tools]
        self._is_asking = True
        try:
            choice, reply = await self._ask(self.messages, self.tools, max_tokens, stop)
        finally:
            self._is_asking = False
        self.messages.append(reply)
        return choice

    def copy(self, messages: Sequence[Mapping[str, Any]] | None = None) -> "Chat":
        """Return another conversation of the same sample, from here or from `messages` (the other
        player of a game, a helper).
        """
        begun = self.messages if messages is None else messages
        return Chat(
            self._ask, begun, self.task_id, self.sample, self.tools, self.params, self._count_time
        )

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Wait for something other than work, such as a free core, without using up the rollout's
        limit of `seconds`.
        """
        self._count_time(False)
        try:
            yield
        finally:
            self._count_time(True)


@dataclass(frozen=True)
class WithSample:
    """Calls `grader(choice, sample)`. A class, because closures cannot go to another process."""

    grader: Callable[..., Any]
    sample: Sample

    def __call__(self, choice: Any) -> Any:
        """Return the grader's result, possibly an awaitable."""
        return self.grader(choice, self.sample)
