"""`ttrl proxy`: serve sessions in front of a server; store their rollouts like those of a run.

    POST /sessions              {"id": "task/1", "messages": […]}, both optional → base_url,
                                api_key, reward_url, reward_key
    POST /sessions/ID/reward    {"reward": 1.0, "metrics": {}}: ends the session

A session idle for too long is a failed sample; open sessions are dropped at the proxy's end. Each
session is in RUN/sessions.jsonl before its reward is answered. At its end (or its next start, after
a kill), the proxy collects new sessions into an iteration of RUN. `ttrl replay` grades and trains
on it like any other.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from aiohttp import web

from ttrl.agents.listener import Listener
from ttrl.agents.request_parameters import read_json
from ttrl.agents.session import Session
from ttrl.errors import TaskError, TtrlError, UserError
from ttrl.facts import RolloutsFacts
from ttrl.records import Endpoint, Sample
from ttrl.rollouts.group import Group
from ttrl.rollouts.group_samples import sample_group
from ttrl.rollouts.request import SamplingRequest
from ttrl.rollouts.results import TaskResults
from ttrl.rollouts.sampling import Job, Sampling
from ttrl.run_folder.folder import RunFolder
from ttrl.system.files import append_jsonl, read_jsonl, write_text
from ttrl.tasks.task import Chat, Grade, RolloutLimits, Task
from ttrl.text import short

SESSIONS_FILE = "sessions.jsonl"
_UNNAMED = "session"
_NO_MESSAGES = [{"role": "user", "content": "(the session's first request)"}]


@dataclass
class Proxy:
    """Serve sessions at one address. Raises UserError for invalid settings before the first
    request.
    """

    request: SamplingRequest
    run: Path
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """Key to open sessions."""
    host: str = "127.0.0.1"
    port: int = 0
    limits: RolloutLimits = field(default_factory=lambda: RolloutLimits(seconds=600.0))
    ignore: frozenset[str] = frozenset()
    beside: Mapping[str, str | Endpoint] = field(default_factory=dict)
    names: Sequence[str] = ()
    """Further names of the model in requests, next to "policy"."""

    def __post_init__(self) -> None:
        self._sampling = Sampling(self.request)
        self._open: set[asyncio.Task[None]] = set()
        self._count = 0

    async def serve(self, say: Callable[[str], None]) -> None:
        """Serve until cancelled; then make an iteration of the new sessions. Raises RunFolderError
        if the folder is in use.
        """
        folder = RunFolder(self.run)
        with folder.locked():
            collect(folder)
            try:
                routes = [("POST", "/sessions", self._begin, self.key)]
                async with (
                    self._sampling.running(),
                    Listener(self.host, self.port, routes) as self._listener,
                ):
                    say(f"open sessions at {self._listener.root}/sessions")
                    try:
                        await asyncio.Event().wait()
                    finally:
                        for task in self._open:
                            task.cancel()
                        await asyncio.gather(*self._open, return_exceptions=True)
            finally:
                number = collect(folder)
                if number is not None:
                    say(f"iteration {number} of {self.run} holds the sessions")

    async def _begin(self, request: web.Request) -> web.Response:
        """Open a session."""
        body = await read_json(request)
        begun: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        messages = body.get("messages")
        name = body.get("id", _UNNAMED)
        if not isinstance(name, str) or (messages is not None and not isinstance(messages, list)):
            raise UserError(
                f"a session needs a text as id and a list of messages; got {short(name, 60)}, "
                f"{short(messages, 60)}"
            )

        async def rollout(chat: Chat) -> Grade | None:
            session = Session(chat, self.ignore, self.beside, self.names)
            session.written = asyncio.get_running_loop().create_future()
            self._listener.add(session)
            begun.set_result(session)
            try:
                await session.rewarded.wait()
            finally:
                await self._listener.remove(session)
            return session.reward

        try:
            task = Task(
                messages or list(_NO_MESSAGES), rollout=rollout, id=name, limits=self.limits
            )
        except TaskError as error:
            raise UserError(str(error)) from None
        self._count += 1
        running = asyncio.create_task(
            self._run(Job(self._count, task, self._count), begun, messages is None)
        )
        self._open.add(running)
        running.add_done_callback(self._open.discard)
        session = await begun
        told = {
            name: getattr(session, name)
            for name in ("id", "base_url", "api_key", "model", "reward_url", "reward_key")
        }
        return web.json_response(told)

    async def _run(self, job: Job, begun: "asyncio.Future[Session]", unknown: bool) -> None:
        group = Group(self._sampling, job)
        await sample_group(group)
        for sample in group.result.samples:
            if unknown and sample.turns:  # its first request gave the messages
                first = sample.turns[0]
                sample.messages = first.messages
                first.messages = []
                first.follows = -1
            written = begun.result().written
            assert written is not None
            try:
                await asyncio.to_thread(append_jsonl, self.run / SESSIONS_FILE, sample.to_json())
            except TtrlError as error:  # a full disk: the poster of the reward is told
                written.set_exception(error)
                written.exception()  # retrieved, in case no caller awaits it
            else:
                written.set_result(None)


def collect(folder: RunFolder) -> int | None:
    """Make an iteration of uncollected sessions; return its number, or None without any."""
    known = 0
    number = 1
    while (marker := folder.iteration(number).marker(RolloutsFacts)) is not None:
        known = marker.sessions or 0
        number = number + 1
    rows = read_jsonl(folder.path / SESSIONS_FILE)
    if len(rows) == known:
        return None
    groups: dict[str, list[Sample]] = {}
    for row in rows[known:]:
        sample = Sample.from_json(row)
        same = groups.setdefault(json.dumps([sample.task_id, sample.messages]), [])
        same.append(replace(sample, sample=len(same)))
    results = TaskResults.from_samples(sample for group in groups.values() for sample in group)
    iteration = folder.iteration(number)
    lines = [
        json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        for row in results.to_jsonl_rows()
    ]
    write_text(iteration.path / "rollouts.jsonl", "".join(lines))
    iteration.mark(RolloutsFacts(sessions=len(rows)), ["rollouts.jsonl"])
    return number
