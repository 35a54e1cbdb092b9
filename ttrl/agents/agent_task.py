"""Make tasks of external agents: a coroutine function or a program, pointed at ttrl's endpoint."""

import asyncio
import inspect
import json
import os
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ttrl.agents.listener import Listener
from ttrl.agents.request_parameters import MODEL
from ttrl.agents.session import Session
from ttrl.errors import RolloutError, TaskError
from ttrl.records import Endpoint
from ttrl.rollouts.client.transport import transport_for
from ttrl.system.processes import ChildProcess, without_secrets
from ttrl.tasks.task import Chat, Grade, Grader, GraderOutput, RolloutLimits, Task, question
from ttrl.text import short

TASK_VARIABLE = "TTRL_AGENT_TASK"
_PAUSE = 0.05
"""Seconds between polls of a program."""

AgentFunction: TypeAlias = "Callable[[Session], Awaitable[GraderOutput | None]]"
Agent: TypeAlias = "AgentFunction | Sequence[str]"


def agent_task(
    agent: "Agent",
    grader: "Grader | None" = None,
    *,
    messages: str | Sequence[Mapping[str, Any]],
    id: str = "",
    limits: RolloutLimits | None = None,
    ignore: Iterable[str] = (),
    beside: "Mapping[str, str | Endpoint] | None" = None,
    at_once: int | None = None,
) -> Task:
    """Return a task for an agent of an OpenAI-compatible endpoint; its requests are the rollout.

    agent: `async def agent(session)`, returning the reward, (reward, metrics) or None; or a
        command. A command finds the endpoint in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL,
        and {"id", "sample", "messages"} in the file named by TTRL_AGENT_TASK. It is stopped with
        all its processes at the end of its sample.
    grader: asked if the agent returned no reward and none was posted to `session.reward_url`. It
        gets the last choice; `choice.messages` is the conversation so far. Without a grader, a
        command posts its reward to "reward_url" with "reward_key" of the file.
    messages: the agent's instructions, `session.messages`; a string is a user message. Messages
        or `id` distinguish tasks.
    limits: limits of the rollout; `seconds` limits the agent's time between requests to the model.
    ignore: request parameters to drop instead of refusing, such as "temperature".
    beside: other models at the same endpoint, by name: server addresses (with OPENAI_API_KEY as
        key) or `ttrl.records.Endpoint`. Their requests are forwarded unchanged and not trained.
    at_once: concurrent commands, counted over all tasks with the same number; None: four per core.
        Waiting for a turn does not count towards `limits.seconds`.

    Raises TaskError for an agent of any other type.

    >>> async def agent(session):
    ...     from openai import AsyncOpenAI
    ...     client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    ...     await client.chat.completions.create(model=session.model, messages=session.messages)
    >>> def right(choice):
    ...     return float("5" in choice.message.content)
    >>> task = agent_task(agent, right, messages="What is 2 + 3?", id="sums/5")
    >>> server = "http://127.0.0.1:8000/v1"
    >>> results = asyncio.run(get_task_results([task], server, "m", n=2, pbar=False))
    >>> results[0].rewards
    [1.0, 1.0]
    """
    is_command = (
        isinstance(agent, Sequence)
        and not isinstance(agent, str)
        and agent
        and all(isinstance(x, str) for x in agent)
    )
    if not callable(agent) and not is_command:
        raise TaskError(
            f"agent is {short(agent, 80)}; give async def agent(session), or a command such as "
            "['python', 'agent.py']"
        )
    if isinstance(ignore, str):
        raise TaskError(f"ignore is {ignore!r}; give a list of names, [{ignore!r}]")
    if isinstance(messages, str):
        given = question(messages)
    else:
        given = [dict(message) for message in messages]
    if at_once is not None and (type(at_once) is not int or at_once < 1):
        raise TaskError(f"at_once is {at_once!r}; give at least 1 program, or None")
    others = dict(beside or {})
    for name, server in others.items():
        transport_for(server)  # raises if it is no server
        if name == MODEL:
            raise TaskError(
                f"beside names a model {MODEL!r}, but that is the policy's own name; choose another"
            )
    rollout = _AgentRollout(
        agent if callable(agent) else tuple(agent),
        frozenset(ignore),
        others,
        grader is None,
        at_once,
    )
    return Task(given, grader, id=id, rollout=rollout, limits=limits or RolloutLimits())


@dataclass(frozen=True)
class _AgentRollout:
    """Run the agent once, in its own session."""

    agent: "Agent"
    ignore: frozenset[str]
    beside: "Mapping[str, str | Endpoint]"
    posts_reward: bool
    at_once: int | None
    only_evaluates: str = ""
    """Why its tasks cannot be trained on; empty if they can."""

    async def __call__(self, chat: Chat) -> "GraderOutput | None":
        if callable(self.agent):
            return await self._play(chat)
        turn = turns(self.at_once)
        with chat.idle():
            await turn.acquire()
        try:
            return await self._play(chat)
        finally:
            turn.release()

    async def _play(self, chat: Chat) -> "GraderOutput | None":
        place = f"task {chat.task_id!r}, sample {chat.sample}"
        async with Listener() as listener:
            session = Session(chat, self.ignore, self.beside)
            listener.add(session)
            try:
                output = await self._run(session, place)
            # The agent's code may raise anything; only a posted reward swallows an error.
            except Exception:
                if (
                    session.failure is None
                    and session.limit is not None
                    and session.reward is not None
                ):
                    return session.reward  # rewarded before reaching its limit
                cause = session.failure or session.limit
                if cause is not None:
                    raise cause from None  # the client's own error says less
                raise
        if session.failure is not None:
            raise session.failure
        if not session.num_replies and session.limit is None:
            raise RolloutError(
                f"{place}: the agent ended without asking the model; point its client at "
                "session.base_url"
            )
        posted: Grade | None = session.reward
        if output is None:
            return posted
        return output

    async def _run(self, session: Session, place: str) -> "GraderOutput | None":
        if not callable(self.agent):
            await _run_command(self.agent, session, place, self.posts_reward)
            return None
        coroutine = self.agent(session)
        if not inspect.isawaitable(coroutine):
            raise RolloutError(
                f"{place}: the agent is not a coroutine function; write it as async def "
                "agent(session)"
            )
        output: GraderOutput | None = await coroutine
        return output


_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]]" = (
    weakref.WeakKeyDictionary()
)


def turns(at_once: int | None = None) -> asyncio.Semaphore:
    """Return the semaphore for `at_once` concurrent programs."""
    count = at_once or 4 * (os.cpu_count() or 1)
    return _of_loops.setdefault(asyncio.get_running_loop(), {}).setdefault(
        count, asyncio.Semaphore(count)
    )


async def _run_command(
    command: Sequence[str], session: Session, place: str, posts_reward: bool
) -> None:
    """Run a program to its end. Raises RolloutError if it fails."""
    with tempfile.TemporaryDirectory(prefix="ttrl-agent-") as folder:
        task = Path(folder, "task.json")
        given = {"id": session.task_id, "sample": session.sample, "messages": session.messages}
        if posts_reward:
            given |= {"reward_url": session.reward_url, "reward_key": session.reward_key}
        task.write_text(json.dumps(given))
        child = ChildProcess(
            command,
            Path(folder, "agent.log"),
            {**without_secrets(), **session.environment, TASK_VARIABLE: str(task)},
        )
        starting = asyncio.create_task(asyncio.to_thread(child.start))
        try:
            await asyncio.shield(starting)
            while (status := child.poll()) is None:
                await asyncio.sleep(_PAUSE)
            if status:
                raise RolloutError(
                    f"{place}: the agent {command[0]!r} ended with status "
                    f"{status}:\n{child.log_tail(10)}"
                )
        finally:
            await asyncio.shield(end(child, starting))


async def end(child: ChildProcess, starting: "asyncio.Task[ChildProcess]") -> None:
    """Stop a program, even during its start."""
    await asyncio.wait([starting])
    await asyncio.to_thread(child.stop, 2.0)
