"""Environments with Gymnasium's interface (`reset`, `step`) that speak text: games, as rollouts.
Gymnasium itself is not needed.

What the environment shows is a user's message, what the model answers is an action, and the rewards
of all steps are added up. Every sample of a task begins in the same state, by the same seed, since
a group's rewards are compared with each other.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ttrl.errors import RolloutError, RolloutLimitError, TaskError
from ttrl.messages import with_text_added
from ttrl.tasks.answers import after_thinking, find_tagged, last_line, reply_text
from ttrl.tasks.task import Chat, RolloutLimits, Task, question
from ttrl.text import is_number, short

MakeEnvironment: TypeAlias = Callable[[], Any]


def tagged_or_last_line(text: str) -> str:
    """Return what a reply gives as its action: what stands in its last `<answer>` tags, or its last
    line, after any thinking.
    """
    text = after_thinking(text)
    place = find_tagged(text)
    return (text[place[0] : place[1]] if place is not None else last_line(text)).strip()


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
    """Return `n` tasks of an environment, which begin as the seeds first_seed, first_seed + 1, …
    say.

    make: makes one, `lambda: gymnasium.make("…")`; each sample has its own, which is closed at its
        end.
    prompt: the rules, and how to give an action; the first observation follows.
    name: of the environment; tasks are called NAME/SEED.
    action: makes an action of a reply. A ValueError of it is told to the model, which may try
        again; that is a turn, too.
    observe: makes a text of an observation. options: for `reset`.
    limits: a game that reaches them has the rewards that it got so far.

    The reward is the sum of the steps'; metrics: `steps`, `invalid` (replies that were no action),
    `ended` (the game was over). Raises TaskError for what is no environment.
    """
    if type(n) is not int or n < 1 or not name or not prompt:
        raise TaskError(
            f"gym_tasks: n is {n!r}, name {name!r}, prompt {short(prompt, 40)}; give a number "
            "above 0, a name, a prompt"
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
    """Says why an environment does not take an action: raised by its `step`, it is told to the
    model.
    """


@dataclass(frozen=True)
class Game:
    """Plays an environment whose methods are Gymnasium's, or coroutine functions that give the
    same.
    """

    name: str
    seed: int
    action: Callable[[str], Any]
    observe: Callable[[Any], str]
    options: Mapping[str, Any] | None = None

    async def play(self, chat: Chat, environment: Any) -> tuple[float, dict[str, float]]:
        """Return the rewards' sum, and metrics."""
        observation, _ = self._parts(
            await _called(environment.reset, seed=self.seed, options=self.options), 2
        )
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
            observation, reward, terminated, truncated, _ = self._parts(found, 5)
            if not is_number(reward):
                raise RolloutError(
                    f"environment {self.name}: step gave the reward {reward!r}; it gives a "
                    "finite number"
                )
            steps = steps + 1
            total = total + float(reward)
            told = self.observe(observation)
            ended = bool(terminated) or bool(truncated)
        return total, {"steps": steps, "invalid": invalid, "ended": float(ended)}

    def _parts(self, found: Any, count: int) -> tuple[Any, ...]:
        if not isinstance(found, tuple) or len(found) != count:
            if count == 2:
                names = "(observation, info)"
            else:
                names = "(observation, reward, terminated, truncated, info)"
            method = "reset" if count == 2 else "step"
            raise RolloutError(
                f"environment {self.name}: {method} gave {short(found, 80)}; Gymnasium's gives "
                f"{names}"
            )
        return found


@dataclass(frozen=True)
class GymRollout:
    """Plays one game in an environment of its own. Its calls run in threads, one after the
    other.
    """

    make: MakeEnvironment
    game: Game

    async def __call__(self, chat: Chat) -> tuple[float, dict[str, float]]:
        environment = await asyncio.to_thread(self.make)
        try:
            return await self.game.play(chat, environment)
        finally:
            await asyncio.shield(asyncio.to_thread(_close, environment))


def show(chat: Chat, text: str) -> None:
    """Add what an environment shows at first to the task's last message."""
    chat.messages[-1] = with_text_added(chat.messages[-1], f"\n\n{text}")


def seeds(split: str, n: int, seed: int) -> range:
    """Return `n` seeds of games: those of "train" are decided by `seed`, those of other splits are
    always the same.
    """
    digest = hashlib.sha256(f"{split} {seed if split == 'train' else ''}".encode()).digest()
    first = int.from_bytes(digest[:4], "big") >> 2
    return range(first, first + n)


async def _called(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **options)
    return await asyncio.to_thread(method, *arguments, **options)


def _close(environment: Any) -> None:
    if callable(getattr(environment, "close", None)):
        environment.close()
