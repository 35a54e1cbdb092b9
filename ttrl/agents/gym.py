"""Play text environments with Gymnasium's interface (`reset`, `step`) as rollouts. Gymnasium itself
is not needed.

An observation is a user message, a reply is an action, and the reward is the sum over all steps.
All samples of a task start from the same state and seed, so rewards within a group are comparable.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ttrl.errors import RolloutError, RolloutLimitError, TaskError
from ttrl.messages import with_text_added
from ttrl.tasks.answers import after_thinking, find_tagged, last_line, latest, reply_text
from ttrl.tasks.task import Chat, RolloutLimits, Task, question
from ttrl.text import is_number, short

MakeEnvironment: TypeAlias = Callable[[], Any]


def tagged_or_last_line(text: str) -> str:
    """Return the action in a reply's last `<answer>` tags, or its last line, after any thinking."""
    text = after_thinking(text)
    part = latest(text, find_tagged(text))
    if part is None:
        part = last_line(text)
    return part.strip()


def gym_tasks(
    make: MakeEnvironment,
    prompt: str,
    n: int,
    *,
    name: str,
    first_seed: int = 0,
    action: Callable[[str], Any] = tagged_or_last_line,
    observe: Callable[[Any], str] = str,
    options: Mapping[str, Any] | None = None,
    limits: RolloutLimits | None = None,
) -> list[Task]:
    """Return `n` tasks of an environment, with the seeds first_seed, first_seed + 1, …

    make: makes one environment, `lambda: gymnasium.make("…")`. Each sample has its own and closes
        it at the end.
    prompt: the rules and the format of an action; the first observation follows.
    name: of the environment; tasks are called NAME/SEED.
    action: makes an action of a reply. The model is told of a ValueError and may try again; that
        counts as a turn.
    observe: makes a text of an observation.
    options: for `reset`.
    limits: at a limit, a game keeps its rewards so far.

    The reward is the sum over steps; metrics: `steps`, `invalid` (replies without a valid action),
    `ended` (the game was over). Raises TaskError for anything but an environment.
    """
    if type(n) is not int or n < 1 or not name or not prompt:
        raise TaskError(
            f"gym_tasks: n is {n!r}, name {name!r}, prompt {short(prompt, 40)}; give a number "
            "above 0, a name and a prompt"
        )
    try:
        environment = make()
    except Exception as error:
        raise TaskError(
            f"environment {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    missing = [one for one in ("reset", "step") if not callable(getattr(environment, one, None))]
    if missing:
        raise TaskError(
            f"environment {name} ({type(environment).__name__}) has no {' and no '.join(missing)}"
        )
    _close(environment)
    return [
        Task(
            question(prompt),
            id=f"{name}/{seed}",
            rollout=GymRollout(make, Game(name, seed, action, observe, options)),
            limits=limits or RolloutLimits(),
        )
        for seed in range(first_seed, first_seed + n)
    ]


class NoAction(ValueError):  # noqa: N818 - what a model wrote is no error of ours
    """Report an invalid action: raise it in `step` to tell the model why."""


@dataclass(frozen=True)
class Game:
    """Play an environment with Gymnasium's methods, plain or as coroutine functions."""

    name: str
    seed: int
    action: Callable[[str], Any]
    observe: Callable[[Any], str]
    options: Mapping[str, Any] | None = None

    async def play(self, chat: Chat, environment: Any) -> tuple[float, dict[str, float]]:
        """Return the sum of the rewards, and metrics."""
        found = await _called(environment.reset, seed=self.seed, options=self.options)
        observation, _ = self._parts("reset", found, ("observation", "info"))
        show(chat, self.observe(observation))
        total = 0.0
        steps = 0
        invalid = 0
        ended = False
        told = None
        while not ended:
            try:
                choice = await chat(told)
            except RolloutLimitError:
                if not steps and not invalid:
                    raise
                break
            try:
                action = self.action(reply_text(choice))
            except ValueError as error:
                invalid = invalid + 1
                told = f"That is no action: {error}"
                continue
            try:
                found = await _called(environment.step, action)
            except NoAction as error:
                invalid = invalid + 1
                told = f"That is no action: {error}"
                continue
            observation, reward, terminated, truncated, _ = self._parts(
                "step", found, ("observation", "reward", "terminated", "truncated", "info")
            )
            if not is_number(reward):
                raise RolloutError(
                    f"environment {self.name}: step returned the reward {reward!r}; it must return "
                    "a finite number"
                )
            steps = steps + 1
            total = total + float(reward)
            told = self.observe(observation)
            ended = bool(terminated) or bool(truncated)
        return total, {"steps": steps, "invalid": invalid, "ended": float(ended)}

    def _parts(self, method: str, found: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
        if not isinstance(found, tuple) or len(found) != len(names):
            raise RolloutError(
                f"environment {self.name}: {method} returned {short(found, 80)}; Gymnasium's "
                f"returns ({', '.join(names)})"
            )
        return found


@dataclass(frozen=True)
class GymRollout:
    """Play one game in its own environment, with its calls in threads, one at a time."""

    make: MakeEnvironment
    game: Game

    async def __call__(self, chat: Chat) -> tuple[float, dict[str, float]]:
        environment = await asyncio.to_thread(self.make)
        try:
            return await self.game.play(chat, environment)
        finally:
            await asyncio.shield(asyncio.to_thread(_close, environment))


def show(chat: Chat, text: str) -> None:
    """Add the first observation to the task's last message."""
    chat.messages[-1] = with_text_added(chat.messages[-1], f"\n\n{text}")


def seeds(split: str, n: int, seed: int) -> range:
    """Return `n` seeds of games: "train" draws them by `seed`, other splits are fixed."""
    first = first_seed(f"{split} {seed if split == 'train' else ''}")
    return range(first, first + n)


def first_seed(drawn_by: str) -> int:
    """Return a seed of 30 bits, drawn by the digest of a text."""
    return int.from_bytes(hashlib.sha256(drawn_by.encode()).digest()[:4], "big") >> 2


async def _called(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **options)
    return await asyncio.to_thread(method, *arguments, **options)


def _close(environment: Any) -> None:
    if callable(getattr(environment, "close", None)):
        environment.close()
