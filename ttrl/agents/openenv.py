"""Play environments of OpenEnv servers (Meta, BSD; read: openenv-core 0.3.0) as rollouts. Its
package is needed only on the server.

A rollout is a session over its own WebSocket: `reset` with the task's seed, then a `step` for each
action until the environment is done. The reward is the sum over all steps. If actions are tool
calls, the model gets the tools. Otherwise its reply becomes an action by the server's schema: the
only field's value, or a JSON object.

The model is told of actions the schema refuses. An environment's failure fails the sample. A server
without a free session (they have one, by default) is asked again until one is free.
"""

import asyncio
import contextlib
import functools
import json
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ttrl.agents.gym import Game, NoAction, seeds, show, tagged_or_last_line
from ttrl.agents.tools import Tools, cut, tool_of
from ttrl.errors import RolloutError, RolloutLimitError, TaskError, TtrlError, describe
from ttrl.messages import JsonObject
from ttrl.system.processes import ChildProcess, without_secrets
from ttrl.tasks.datasets import check_count
from ttrl.tasks.task import Chat, RolloutLimits, Task, question
from ttrl.text import is_number, short

LONGEST_MESSAGE = 16 * 2**20
"""Bytes of a server's message."""
MOST_CHARACTERS = 20_000
"""Limit of an observation in the prompt."""
_PATIENCE = 120.0
"""Seconds for a server to start."""
_ASK_AGAIN = 0.5
"""Seconds until a server without a free session is asked again."""


def get_openenv_tasks(
    server: str | Sequence[str],
    split: str = "train",
    n: int = 32,
    seed: int = 0,
    *,
    prompt: str | None = None,
    action: Callable[[str], Any] | None = None,
    observe: Callable[[Any], str] | None = None,
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    limits: RolloutLimits | None = None,
) -> list[Task]:
    """Return `n` tasks of an environment, each with its own seed.

    server: its address, "http://127.0.0.1:8000"; or its command with {port} for the port,
        ["python", "-m", "uvicorn", "server.app:app", "--port", "{port}"]. A command is started once
        and ends with this process.
    split: "train" draws tasks by `seed`; any other split is the same for every seed.
    prompt: the rules and the format of an action; default: the server's description and its schema
        of actions.
    action: makes an action (a dict) of a reply; the model is told of a ValueError.
    observe: makes a text of an observation.
    options: for `reset`.
    headers: of requests, for a server with a key.
    limits: at a limit, a game keeps its rewards so far.

    The reward is the sum over steps; metrics: `steps`, `invalid` (replies or calls without a valid
    action), `ended`. Raises TaskError for an unreachable address or another kind of server.
    """
    check_count(n)
    if isinstance(server, str):
        address = server.rstrip("/")
    else:
        address = _started(tuple(server))
    if not address.startswith(("http://", "https://")):
        raise TaskError(
            f"OpenEnv server {short(server, 80)}: give its address, http://…, or the command to "
            "start it"
        )
    own = dict(headers or {})
    described = _get(address, "/metadata", own)
    schema = _get(address, "/schema", own).get("action")
    if not isinstance(schema, dict):
        raise TaskError(
            f"OpenEnv server {address}: /schema lists no actions; check that it is an OpenEnv "
            "server"
        )
    name = str(described.get("name") or "environment")
    if prompt is None:
        prompt = "\n\n".join(
            filter(
                None,
                [str(described.get("description") or name), _how(schema) if action is None else ""],
            )
        )
    with_tools = action is None and _is_tools(schema)
    act = action or functools.partial(read_action, schema=schema)
    return [
        Task(
            question(prompt),
            id=f"openenv/{name}/{one}",
            rollout=OpenEnvRollout(
                address, own, Game(name, one, act, observe or observation_text, options), with_tools
            ),
            limits=limits or RolloutLimits(),
        )
        for one in seeds(split, n, seed)
    ]


def observation_text(observation: Any) -> str:
    """Return the text of an observation: its only text, or all fields as JSON."""
    if isinstance(observation, Mapping):
        known = {name: value for name, value in observation.items() if value is not None}
        if len(known) == 1:
            observation = next(iter(known.values()))
        else:
            observation = known
    return cut(
        observation
        if isinstance(observation, str)
        else json.dumps(observation, ensure_ascii=False),
        MOST_CHARACTERS,
    )


def read_action(text: str, schema: Mapping[str, Any]) -> JsonObject:
    """Return the action in a reply's last `<answer>` tags, or its last line. Raises ValueError."""
    given = tagged_or_last_line(text)
    fields = _fields(schema)
    if len(fields) == 1:
        ((name, kind),) = fields.items()
        return {name: given if kind.get("type") == "string" else json.loads(given)}
    action = json.loads(given)
    if not isinstance(action, dict):
        raise ValueError(f"it must be a JSON object with {', '.join(fields)}")
    return action


@dataclass(frozen=True)
class OpenEnvRollout:
    """Play one game in its own session."""

    address: str
    headers: Mapping[str, str] = field(repr=False)
    game: Game
    with_tools: bool

    async def __call__(self, chat: Chat) -> tuple[float, dict[str, float]]:
        options = {"seed": self.game.seed, **(self.game.options or {})}
        where = f"task {chat.task_id!r}, sample {chat.sample}: OpenEnv server {self.address}"
        async with aiohttp.ClientSession(headers=dict(self.headers)) as http:
            while True:
                try:
                    connection = await http.ws_connect(
                        f"{self.address}/ws", max_msg_size=LONGEST_MESSAGE
                    )
                except aiohttp.ClientError as error:
                    raise RolloutError(f"{where} cannot be reached: {describe(error)}") from None
                async with connection:
                    session = _Session(where, connection)
                    with contextlib.suppress(_Busy):
                        session.begun = await session.ask("reset", options)
                        return await (
                            self._call_tools(chat, session)
                            if self.with_tools
                            else self.game.play(chat, session)
                        )
                with chat.idle():
                    await asyncio.sleep(_ASK_AGAIN)

    async def _call_tools(self, chat: Chat, session: "_Session") -> tuple[float, dict[str, float]]:
        show(chat, self.game.observe(session.begun["observation"]))
        total = 0.0
        ended = False
        tools = Tools(())

        async def step(name: str, /, **arguments: Any) -> str:
            nonlocal total, ended
            if ended:
                raise ValueError("the environment is done")
            observation, reward, ended, _, _ = await session.step(
                {"type": "call_tool", "tool_name": name, "arguments": arguments}
            )
            total += reward
            failure = observation.get("error")
            if failure:
                if failure.get("error_type") in ("transport_error", "timeout"):
                    raise session.failed(f"failed in its tool {name}: {failure.get('message')}")
                raise ValueError(failure.get("message"))
            result = observation.get("result")
            # FastMCP wraps the result.
            return self.game.observe(
                result["data"] if isinstance(result, dict) and "data" in result else result
            )

        for tool in (await session.step({"type": "list_tools"}))[0].get("tools", []):
            name = tool["name"]
            parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
            described = tool_of(name, tool.get("description", ""), parameters)
            tools.add(functools.partial(step, name), described)
        if not tools.functions:
            raise session.failed("has no tools")
        try:
            choice = await chat(tools=tools.descriptions)
            while not ended and (told := await tools.answer(choice)) and not ended:
                choice = await chat(told)
        except RolloutLimitError:
            if not tools.calls:
                raise
        return total, {
            "steps": tools.calls - tools.failures,
            "invalid": tools.failures,
            "ended": float(ended),
        }


@dataclass
class _Session:
    """Connect one rollout, with Gymnasium's methods."""

    _where: str
    _socket: aiohttp.ClientWebSocketResponse
    begun: Mapping[str, Any] = field(default_factory=dict)

    async def reset(self, **_: Any) -> tuple[Any, JsonObject]:
        return self.begun["observation"], {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, JsonObject]:
        data = await self.ask("step", action)
        reward = data.get("reward")
        if reward is not None and not isinstance(reward, bool) and not is_number(reward):
            raise self.failed(f"returned the reward {short(reward, 40)}")
        return data["observation"], float(reward or 0.0), bool(data.get("done")), False, {}

    async def ask(self, kind: str, data: Any) -> Mapping[str, Any]:
        """Return the server's answer. Raises NoAction, _Busy, RolloutError."""
        # A server without a free session reports it and disconnects.
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self.failed(
                f"ended the session ({message.type.name.lower()} {self._socket.close_code or ''})"
            )
        try:
            answer = json.loads(message.data)
            found = dict(answer["data"])
            is_error = answer["type"] == "error"
            if not is_error and not isinstance(found["observation"], dict):
                raise TypeError("returned an observation that is not an object")
        except (ValueError, KeyError, TypeError) as error:
            raise self.failed(
                f"answered {short(message.data, 120)}, not in OpenEnv's format: {describe(error)}"
            ) from None
        if is_error and found.get("code") == "CAPACITY_REACHED":
            raise _Busy
        if is_error and found.get("code") == "VALIDATION_ERROR":
            raise NoAction(
                "; ".join(
                    f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg')}"
                    for one in found.get("errors", [])
                )
            )
        if is_error:
            raise self.failed(f"failed: {found.get('message')} ({found.get('code')})")
        return found

    def failed(self, what: str) -> RolloutError:
        return RolloutError(f"{self._where} {what}")


class _Busy(Exception):  # noqa: N818 - it is waited for
    """Report a server without a free session."""


# Facts about a server before the first game


def _fields(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return an action's required fields, or all fields if none is required."""
    known = {
        name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"
    }
    return {
        name: kind for name, kind in known.items() if name in schema.get("required", ())
    } or known


def _is_tools(schema: Mapping[str, Any]) -> bool:
    return not _fields(schema) or "tool_name" in _fields(schema)


def _how(schema: Mapping[str, Any]) -> str:
    if _is_tools(schema):
        return ""
    fields = _fields(schema)
    if len(fields) == 1:
        ((name, kind),) = fields.items()
        what = f"{name} ({kind.get('description') or kind.get('type', 'JSON')})"
    else:
        what = (
            "an action, as a JSON object of the schema "
            f"{json.dumps({'properties': fields}, ensure_ascii=False)}"
        )
    return f"End each reply with {what}, in <answer> </answer> tags."


def _get(address: str, path: str, headers: Mapping[str, str]) -> Mapping[str, Any]:
    # The caller has checked for http or https.
    request = urllib.request.Request(address + path, headers=dict(headers))  # noqa: S310
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=30) as answer:
            found = json.loads(answer.read(LONGEST_MESSAGE))
    except (OSError, ValueError) as error:
        raise TaskError(
            f"OpenEnv server {address}{path} cannot be read: {describe(error)}"
        ) from None
    if not isinstance(found, dict):
        raise TaskError(
            f"OpenEnv server {address}{path} answered {short(found, 80)}; check that it is an "
            "OpenEnv server"
        )
    return found


_running: list[tuple[ChildProcess, tempfile.TemporaryDirectory[str]]] = []


@functools.lru_cache(16)
def _started(command: tuple[str, ...]) -> str:
    """Start a server once; return its address. It ends with this process. Raises TaskError."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    if not any("{port}" in part for part in command):
        raise TaskError(
            f"OpenEnv server {' '.join(command)!r}: write {{port}} in place of its port"
        )
    folder = tempfile.TemporaryDirectory(prefix="ttrl-openenv-")
    child = ChildProcess(
        [part.replace("{port}", str(port)) for part in command],
        Path(folder.name, "server.log"),
        without_secrets(),
    )
    _running.append((child, folder))
    try:
        child.start()
    except TtrlError as error:
        raise TaskError(f"OpenEnv server: {error}") from None
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(TaskError):
            _get(address, "/health", {})
            return address
        time.sleep(0.1)
    child.stop()
    raise TaskError(f"OpenEnv server {' '.join(command)!r} did not start:\n{child.log_tail(10)}")
