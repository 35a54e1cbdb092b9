"""Offer the tools of Model Context Protocol servers in a rollout (pip install 'ttrl[mcp]').

Each rollout has its own connections and processes, isolated from other samples. They close with it.
A started server ends with all its processes, even if ttrl is killed. Its environment holds only the
SDK's safe variables (PATH, HOME, …); name any keys it needs.

The model sees a tool's output, errors included. A server that cannot be started, dies or breaks the
protocol fails the sample. A tool's time limit is the rollout's `seconds`.
"""

import asyncio
import contextlib
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrl.agents.agent_task import end, turns
from ttrl.agents.tools import Tools, cut, tool_of
from ttrl.errors import RolloutError, TaskError, TtrlError, describe
from ttrl.system.processes import ChildProcess
from ttrl.tasks.task import Chat
from ttrl.text import short

LONGEST_MESSAGE = 4 * 2**20
"""Bytes of a message from a started server. Over HTTP the SDK has its own limits."""
_PAGES = 100
# JSON-RPC codes for invalid params (unknown tools, too) and an unknown method.
_CALLERS_FAULT = (-32602, -32601)
# Characters refused in function names by OpenAI's API and chat templates.
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class McpServer:
    """Describe a server and the tools offered to the model. Raises TaskError.

    where: its address (Streamable HTTP), "http://127.0.0.1:8000/mcp", or its command, ["python",
        "server.py"].
    env: further variables of the command's environment.
    headers: of requests to the address.
    only: names of tools to offer; None: all.
    prefix: prepended to their names, for servers with equal names.
    most_characters: limit of a tool's output; the rest is cut off.
    """

    where: str | Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    only: Sequence[str] | None = None
    prefix: str = ""
    most_characters: int = 20_000

    def __post_init__(self) -> None:
        is_address = isinstance(self.where, str) and self.where.startswith(("http://", "https://"))
        if not is_address and (
            isinstance(self.where, str)
            or not self.where
            or not all(isinstance(part, str) for part in self.where)
        ):
            raise TaskError(
                f"MCP server {short(self.where, 80)}: give its address, http://…, or a command "
                "such as ['python', 'server.py']"
            )
        if isinstance(self.only, str):
            raise TaskError(
                f"MCP server {self.name}: only is {self.only!r}; give a list of names, "
                f"[{self.only!r}]"
            )

    @property
    def name(self) -> str:
        if isinstance(self.where, str):
            return self.where.split("?")[0].rpartition("@")[2]
        return " ".join(self.where)


class McpRollout:
    """Let the model call the servers' tools until it calls none; then ask the task's grader.

        Task(messages, grader, rollout=McpRollout(McpServer(["python", "server.py"])))

    Raises TaskError without the package `mcp`.
    """

    def __init__(self, *servers: McpServer) -> None:
        _sdk()
        self.servers = servers

    async def __call__(self, chat: Chat) -> None:
        async with mcp_tools(chat, *self.servers) as tools:
            await tools.talk(chat)


@contextlib.asynccontextmanager
async def mcp_tools(chat: Chat, *servers: McpServer) -> AsyncIterator[Tools]:
    """Connect a rollout to all its servers at once; yield their tools.

    Commands take turns with the programs of other rollouts (four per core). Raises RolloutError.
    """
    place = f"task {chat.task_id!r}, sample {chat.sample}"
    async with contextlib.AsyncExitStack() as stack:
        if not all(isinstance(server.where, str) for server in servers):
            turn = turns()
            with chat.idle():
                await turn.acquire()
            stack.callback(turn.release)
        tools = Tools(())
        connections = [
            await stack.enter_async_context(_Connection(server, place)) for server in servers
        ]
        for connection in connections:
            await connection.add_to(tools)
        yield tools


class _Connection:
    """Talk to one server from a separate asyncio task. This keeps the SDK's cancel scopes apart
    from the rollout's, and lets closing finish if the rollout is cancelled.
    """

    def __init__(self, server: McpServer, place: str) -> None:
        self.server = server
        self.place = f"{place}: MCP server {server.name}"
        self._leave = asyncio.Event()
        self._child: ChildProcess | None = None
        self._log = ""
        """Output of a started server at its end."""

    async def __aenter__(self) -> "_Connection":
        self._entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._stay())
        try:
            await asyncio.wait([self._entered, self._task], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not self._entered.done():
            raise self._failed(
                "cannot be reached", self._task.exception() or RuntimeError("it ended")
            )
        self._client = self._entered.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            # Retrieve the exception; a failed call already reported it to the rollout.
            self._task.exception()

    async def _stay(self) -> None:
        sdk = _sdk()
        where = self.server.where
        async with contextlib.AsyncExitStack() as stack:
            if isinstance(where, str):
                import httpx2
                from mcp.client.streamable_http import streamable_http_client

                client = httpx2.AsyncClient(
                    headers=dict(self.server.headers), timeout=httpx2.Timeout(30.0, read=None)
                )
                http = await stack.enter_async_context(client)
                transport: Any = streamable_http_client(where, http_client=http)
            else:
                transport = self._started(where)
            self._entered.set_result(
                await stack.enter_async_context(sdk.Client(transport, cache=None))
            )
            await self._leave.wait()

    @contextlib.asynccontextmanager
    async def _started(self, command: Sequence[str]) -> AsyncIterator[tuple[Any, Any]]:
        """Start a server; yield its output and input streams, like the SDK's. Those of the SDK
        let processes outlive ttrl.
        """
        import anyio
        from mcp.client.stdio import get_default_environment
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory(prefix="ttrl-mcp-") as folder:
            (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
            reader = asyncio.StreamReader(LONGEST_MESSAGE)
            readable, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_child, "rb")
            )
            writable, protocol = await loop.connect_write_pipe(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()),
                os.fdopen(to_child, "wb"),
            )
            writer = asyncio.StreamWriter(writable, protocol, None, loop)
            put, said = anyio.create_memory_object_stream[Any](0)
            told, taken = anyio.create_memory_object_stream[Any](0)

            async def read() -> None:
                # ValueError: a line over the limit.
                with contextlib.suppress(
                    anyio.BrokenResourceError, anyio.ClosedResourceError, ValueError
                ):
                    async with put:
                        while line := await reader.readline():
                            await put.send(parsed(line))

            def parsed(line: bytes) -> Any:
                try:
                    return SessionMessage(
                        jsonrpc_message_adapter.validate_json(line, by_name=False)
                    )
                except ValueError as error:
                    return error  # the SDK skips it, as with its own transports

            async def write() -> None:
                with contextlib.suppress(OSError):
                    async for message in taken:
                        writer.write(
                            message.message.model_dump_json(
                                by_alias=True, exclude_unset=True
                            ).encode()
                            + b"\n"
                        )
                        await writer.drain()

            def started(_: object) -> None:
                os.close(stdin)
                os.close(stdout)

            environment = {**get_default_environment(), **self.server.env}
            self._child = child = ChildProcess(
                command, Path(folder, "server.log"), environment, pipes=(stdin, stdout)
            )
            starting = asyncio.create_task(asyncio.to_thread(child.start))
            starting.add_done_callback(started)
            tasks = [asyncio.create_task(read()), asyncio.create_task(write())]
            try:  # no await between the start and here
                await asyncio.shield(starting)
                yield said, told
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for stream in (put, said, told, taken):
                    stream.close()
                writable.close()
                readable.close()
                self._log = child.log_tail(10)
                await asyncio.shield(end(child, starting))

    async def add_to(self, tools: Tools) -> None:
        """Add the server's tools to those of the rollout. Raises RolloutError; TaskError for
        invalid names.
        """
        server = self.server
        found = list[Any]()
        cursor = None
        for _ in range(_PAGES):
            try:
                page = await self._client.list_tools(cursor=cursor)
            except Exception as error:  # noqa: BLE001 - of the SDK and the network, any kind
                raise self._failed("does not list its tools", error) from None
            found = [*found, *page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        missing = [name for name in server.only or () if name not in [tool.name for tool in found]]
        if missing:
            there = ", ".join(tool.name for tool in found)
            raise TaskError(f"{self.place} has no tool {', '.join(missing)}; it has {there}")
        for tool in found:
            if server.only is None or tool.name in server.only:
                name = server.prefix + _NO_NAME.sub("_", tool.name)
                described = tool_of(name, tool.description or "", tool.input_schema)
                tools.add(self._function(tool.name), described)

    def _function(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            from mcp import MCPError

            try:
                result = await self._client.call_tool(name, arguments)
            except MCPError as error:
                if error.code in _CALLERS_FAULT:
                    raise ValueError(str(error)) from None
                raise self._failed(f"failed in its tool {name}", error) from None
            except Exception as error:  # noqa: BLE001 - of the SDK and the network, any kind
                raise self._failed(f"failed in its tool {name}", error) from None
            text = tool_text(result, self.server.most_characters)
            if result.is_error:
                raise ValueError(text)
            return text

        return call

    def _failed(self, what: str, error: BaseException) -> RolloutError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TtrlError):
            said = str(error)
        else:
            said = describe(error)
        if self._child is None or self._task.done():
            log = self._log
        else:
            log = self._child.log_tail(10)
        return RolloutError(f"{self.place} {what}: {said}" + (f"\n{log}" if log else ""))


def tool_text(result: Any, most: int) -> str:
    """Return a tool's output as text for the model; pictures and files only by kind."""
    parts = []
    for block in result.content:
        inner = getattr(block, "resource", block)
        text = getattr(inner, "text", None)
        kind = getattr(inner, "mime_type", None)
        parts.append(
            text
            if isinstance(text, str)
            else f"[{block.type} {getattr(inner, 'uri', None) or kind or ''}]"
        )
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return cut("\n".join(parts), most)


def _sdk() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise TaskError(
            f"MCP servers need the package mcp: pip install 'ttrl[mcp]' ({error})"
        ) from None
    return mcp
