"""Use data sets, reward functions, tools and environments written for TRL's GRPOTrainer (Hugging
Face, Apache-2.0; read: 1.16).

`trl_tasks` takes the arguments of the same names and makes tasks of them; TRL itself is not needed.
Differences:

- a string prompt is a user message, and the model's reply the completion: ttrl always uses a chat
  template;
- functions get one completion at a time: `prompts` and `completions` have one element. To compare
  the completions of a batch, use a `group_grader`;
- an environment with its own tasks (no `train_dataset`) needs `n`, as there is no `max_steps`;
- there is no `trainer_state`, and a reward function cannot be a model's name (serve it: see
  docs/how-to/trl.md);
- if all functions return None, the sample has no reward and fails, instead of being trained with
  an advantage of 0.
"""

import asyncio
import hashlib
import inspect
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ttrl.agents.tools import Tools
from ttrl.errors import GraderError, TaskError
from ttrl.messages import Message, messages_without_nulls, with_text_added
from ttrl.tasks.answers import reply_text
from ttrl.tasks.datasets import load_rows
from ttrl.tasks.task import Chat, Choice, GraderOutput, RolloutLimits, Task, question
from ttrl.text import is_number, short

RewardFunction: TypeAlias = Callable[..., Any]
"""`f(prompts, completions, **columns)`: a list with a number, or None, for each completion, or an
awaitable of one.
"""
EnvironmentFactory: TypeAlias = Callable[[], Any]
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def trl_tasks(
    train_dataset: Any,
    reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
    *,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
    split: str = "train",
    config: str | None = None,
    n: int | None = None,
    limits: RolloutLimits | None = None,
) -> list[Task]:
    """Return a task for each row of a data set for TRL's GRPOTrainer.

    train_dataset: rows, such as a `datasets.Dataset` or a list of dicts, or their place: a file
        (parquet, jsonl, json, csv), a folder, or a name on the hub, with `split` and `config`.
        Column `prompt`: a string, or chat messages. None, with `n`: the environment makes the
        tasks, in `reset`.
    reward_funcs: plain or coroutine functions. The reward is the sum of their values, times
        `reward_weights`; None leaves one out. Each is a metric, like its `log_metric` values.
    tools: functions for the model to call, with type hints and docstrings.
    environment_factory: makes an environment for each rollout. Its `reset(**row)` may return a text
        for the end of the prompt; its other public methods are tools; its `get_reward()`, if any,
        is added to the rewards. Of several by name, the row's `environment` picks one.
    n: only the first n rows.

    Raises TaskError for invalid rows, functions and environments.
    """
    if callable(reward_funcs) or isinstance(reward_funcs, str):
        functions = [reward_funcs]
    else:
        functions = list(reward_funcs)
    if reward_weights is None:
        weights = [1.0] * len(functions)
    else:
        weights = list(reward_weights)
    if len(weights) != len(functions):
        raise TaskError(
            f"{len(weights)} reward_weights for {len(functions)} reward_funcs; give one for each"
        )
    for function in functions:
        _check(function)
    factories = _factories(environment_factory)
    if factories is None and not functions:
        raise TaskError(
            "no reward_funcs; give at least one function of (prompts, completions, **columns)"
        )
    if isinstance(train_dataset, str | os.PathLike):
        given = load_rows(train_dataset, dict, splits=(split,), config=config)
    else:
        given = train_dataset
    if given is None:
        if n is None or factories is None or None not in factories:
            raise TaskError(
                "no train_dataset; give one, or give n and an environment_factory with a reset "
                "that makes the tasks"
            )
        given = itertools.repeat({}, n)
    Tools(tools)
    tasks = []
    times = Counter[str]()
    for number, row in enumerate(given):
        if number == n:
            break
        if not isinstance(row, Mapping):
            raise TaskError(f"row {number} is {short(row, 80)}; a row is a dict with a prompt")
        columns = {str(name): value for name, value in row.items()}
        prompt = columns.get("prompt", "" if factories is not None else None)
        if not isinstance(prompt, str | list) or (prompt == [] and factories is None):
            columns_there = ", ".join(columns) or "none"
            wanted = (
                "a string, or a list of chat messages, in the column 'prompt' (the columns are "
                f"{columns_there})"
            )
            raise TaskError(f"row {number}: its prompt is {short(prompt, 80)}; give {wanted}")
        text = json.dumps(columns, sort_keys=True, default=str)
        if isinstance(prompt, list):
            prompt = messages_without_nulls(prompt)
            columns["prompt"] = prompt
            messages = prompt
        else:
            messages = question(prompt)
        rewards = TrlGrader(tuple(functions), tuple(map(float, weights)), prompt, columns)
        rollout: Any = None
        if factories is not None:
            if None not in factories:
                name = columns.get("environment")
            else:
                name = None
            if name not in factories:
                raise TaskError(
                    f"row {number}: its environment is {name!r}; choose one of "
                    f"{', '.join(map(repr, factories))}"
                )
            row = {
                column: value
                for column, value in columns.items()
                if column != "environment" or None in factories
            }
            rollout = EnvironmentRollout(factories[name], tuple(tools), rewards, row)
        elif tools:
            rollout = ToolRollout(tuple(tools))
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
        times[digest] += 1
        if times[digest] > 1:
            mark = f"-{times[digest]}"
        else:
            mark = ""
        grader = None if factories is not None else rewards
        tasks.append(
            Task(
                messages,
                grader,
                id=f"trl/{digest}{mark}",
                rollout=rollout,
                limits=limits or RolloutLimits(),
            )
        )
    if not tasks:
        raise TaskError("the data set has no rows")
    return tasks


@dataclass(frozen=True)
class TrlGrader:
    """Sum the functions' values for one completion, times their weights; each value is a metric.

    Plain functions run at once, in the grader's thread; coroutines run concurrently on the event
    loop.
    """

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    prompt: str | list[Any]
    columns: Mapping[str, Any] = field(repr=False)

    def __call__(
        self, choice: Choice, environment: Any = None
    ) -> "GraderOutput | Awaitable[GraderOutput]":
        """Return (reward, metrics), or an awaitable of it. Raises GraderError if no function
        applies.
        """
        metrics: dict[str, float] = {}
        outputs = [
            function(**self._arguments(function, choice, environment, metrics))
            for function in self.functions
        ]
        names = [_name(function) for function in self.functions]
        if hasattr(environment, "get_reward"):
            outputs.append(environment.get_reward())
            names.append(type(environment).__name__)
        if any(map(inspect.isawaitable, outputs)):
            return self._awaited(outputs, names, metrics)
        return self._sum(outputs, names, metrics)

    async def _awaited(
        self, outputs: list[Any], names: list[str], metrics: dict[str, float]
    ) -> "GraderOutput":
        found = iter(await asyncio.gather(*filter(inspect.isawaitable, outputs)))
        known = [next(found) if inspect.isawaitable(output) else output for output in outputs]
        return self._sum(known, names, metrics)

    def _sum(
        self, outputs: list[Any], names: list[str], metrics: dict[str, float]
    ) -> "GraderOutput":
        total = 0.0
        known = False
        weights = (*self.weights, 1.0)  # the last one is the environment's
        for place, (output, weight, name) in enumerate(zip(outputs, weights, names)):
            if place < len(self.functions):
                if (
                    not isinstance(output, Iterable)
                    or isinstance(output, str | Mapping)
                    or len(given := list(output)) != 1
                ):
                    raise GraderError(
                        f"{name} returned {short(output, 80)} for one completion; it must return a "
                        "list of one reward"
                    )
                output = given[0]
            if output is None or (is_number(output) and math.isnan(output)):
                continue
            known = True
            total += weight * float(output)
            metrics[name if name not in metrics else f"{name}_{place}"] = float(output)
        if not known:
            raise GraderError(f"none of {', '.join(names)} applies to this row: all returned None")
        return total, metrics

    def _arguments(
        self, function: RewardFunction, choice: Choice, environment: Any, metrics: dict[str, float]
    ) -> Mapping[str, Any]:
        completion: Any = reply_text(choice)
        if isinstance(self.prompt, list) or environment is not None:
            said = getattr(choice, "messages", None)
            if isinstance(self.prompt, list):
                begun = max(1, len(self.prompt))
            else:
                begun = 1
            if said:
                completion = _as_trl(said[begun:])
            else:
                completion = [{"role": "assistant", "content": completion}]
        ids = list(getattr(choice, "token_ids", None) or ())
        given: Message = {
            name: [value] for name, value in self.columns.items() if name not in _NOT_COLUMNS
        }
        given |= {"prompts": [self.prompt], "completions": [completion], "completion_ids": [ids]}
        given |= {"log_extra": lambda column, values: None, "log_metric": metrics.__setitem__}
        if environment is not None:
            given["environments"] = [environment]
        parameters = inspect.signature(function).parameters
        if "completions_ids" in parameters:  # the name in TRL's documentation
            given["completions_ids"] = [ids]
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return given
        return {name: value for name, value in given.items() if name in parameters}


@dataclass(frozen=True)
class ToolRollout:
    """Let the model call functions until it calls none; then ask the task's grader."""

    tools: tuple[Callable[..., Any], ...]

    async def __call__(self, chat: Chat) -> None:
        await Tools(self.tools).talk(chat)


@dataclass(frozen=True)
class EnvironmentRollout:
    """Let the model call an environment's methods until it calls none; then apply the reward
    functions.
    """

    factory: EnvironmentFactory
    tools: tuple[Callable[..., Any], ...]
    rewards: TrlGrader
    row: Mapping[str, Any] = field(repr=False)
    """Arguments of `reset`."""

    async def __call__(self, chat: Chat) -> "GraderOutput":
        environment = self.factory()
        told = environment.reset(**self.row)
        if told is not None:
            if not isinstance(told, str):
                raise TaskError(
                    f"{type(environment).__name__}.reset returned {short(told, 80)}; it must "
                    "return a text or None"
                )
            chat.messages[-1] = with_text_added(chat.messages[-1], told)
        tools = Tools([*self.tools, *_methods(environment)])
        choice = await tools.talk(chat)
        # Graders of rollouts get the messages here, too.
        choice.messages = chat.messages  # type: ignore[attr-defined]
        output = self.rewards(choice, environment)
        if inspect.isawaitable(output):
            output = await output
        reward, metrics = output  # type: ignore[misc]
        return reward, {**metrics, "tool_calls": tools.calls, "tool_failures": tools.failures}


def _factories(
    given: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None,
) -> dict[Any, EnvironmentFactory] | None:
    """Return the factories by name, None for the only one, each tried once. Raises TaskError."""
    if given is None:
        return None
    factories: dict[Any, EnvironmentFactory]
    if isinstance(given, Mapping):
        factories = dict(given)
    else:
        factories = {None: given}
    for name, factory in factories.items():
        try:
            environment = factory()
        except Exception as error:
            raise TaskError(
                f"environment {name or factory!r} cannot be made: {type(error).__name__}: {error}"
            ) from error
        if not callable(getattr(environment, "reset", None)):
            raise TaskError(
                f"environment {type(environment).__name__} has no method reset; it needs one to "
                "begin a rollout"
            )
        Tools(_methods(environment))
    return factories


def _methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the environment's methods offered to the model."""
    named = [
        name
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if not name.startswith("_")
    ]
    return [getattr(environment, name) for name in named if name not in ("reset", "get_reward")]


def _check(function: Any) -> None:
    """Raise TaskError for unusable reward functions."""
    if isinstance(function, str) or not callable(function) or hasattr(function, "forward"):
        raise TaskError(
            f"reward function {short(function, 80)} is a model; wrap it in a function of (prompts, "
            "completions, **columns)"
        )
    parameter = inspect.signature(function).parameters.get("trainer_state")
    if parameter is not None and parameter.default is parameter.empty:
        raise TaskError(
            f"reward function {_name(function)} needs TRL's trainer_state, and ttrl has none; give "
            "the argument a default"
        )


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _as_trl(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages in TRL's format, with parsed arguments and the names of answering tools."""
    names = dict[str, str]()
    told = []
    for message in messages:
        one = dict(message)
        if one.get("tool_calls"):
            one["tool_calls"] = [
                {**call, "function": _read(call["function"])} for call in one["tool_calls"]
            ]
            names |= {call["id"]: call["function"]["name"] for call in one["tool_calls"]}
        elif one.get("role") == "tool" and one.get("tool_call_id") in names:
            one["name"] = names[one["tool_call_id"]]
        told.append(one)
    return told


def _read(function: Mapping[str, Any]) -> Message:
    """Return a called function with its arguments as a dict, unless they are no JSON object."""
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError):
        arguments = None
    return {
        **function,
        "arguments": arguments if isinstance(arguments, dict) else function["arguments"],
    }
