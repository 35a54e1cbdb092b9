"""Servers of the Model Context Protocol (pip install 'ttrl[mcp]'): their tools in a rollout.

Each rollout has connections, and processes, of its own, so that what one sample does to a server is
not seen by another. They are closed with it; a server that was started ends with all its processes,
also if ttrl is killed. It is given none of our environment but what the SDK takes for safe (PATH,
HOME, …): keys that it needs are named.

What a tool says is told to the model, its errors as well. A server that cannot be started, dies, or
breaks the protocol fails the sample. How long it may take is the rollout's limit of `seconds`.
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
from ttrl.agents.tools import Tools, cut
from ttrl.errors import RolloutError, TaskError, TtrlError, describe
from ttrl.system.processes import ChildProcess
from ttrl.tasks.task import Chat
from ttrl.text import short

LONGEST_MESSAGE = 4 * 2**20
"""Bytes of a message of a server that was started. Over HTTP the SDK has limits of its own."""
_PAGES = 100
# JSON-RPC's invalid params (an unknown tool, too) and unknown method.
_CALLERS_FAULT = (-32602, -32601)
# What OpenAI's API and chat templates do not take in a function's name.
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class McpServer:
    """Says where a server is, and which of its tools the model may call. Raises TaskError.

    where: its address (Streamable HTTP), "http://127.0.0.1:8000/mcp", or the command that starts
        it, ["python", "server.py"].
    env: further variables of the command's environment. headers: of requests to the address.
    only: names of tools to offer; None: all. prefix: put before their names, where two servers name
        one alike.
    most_characters: of what a tool says, more is cut off.
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
    """Lets the model call the servers' tools until it calls none; the task's grader is asked then.

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
    """Connect to servers for a rollout, all that it needs at once; yield their tools.

    Those that are commands take turns with the programs of other rollouts (four for each core).
    Raises RolloutError.
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
    """Talks to one server, from an asyncio task of its own: the SDK's scopes of cancellation do not
    meet those of the rollout, and closing goes on where a rollout that is cancelled cannot wait for
    it.
    """

    def __init__(self, server: McpServer, place: str) -> None:
        self.server = server
        self.place = f"{place}: MCP server {server.name}"
        self._leave = asyncio.Event()
        self._child: ChildProcess | None = None
        self._log = ""
        """What a server that was started had written when it ended."""

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
            # Seen; the rollout was told of what matters by a call that failed.
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
        """Start a server; yield what it says and what it is told, as the SDK's transports do, which
        lets processes outlive us.
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
                # Beyond the limit.
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
                    return error  # the SDK passes it over, as it does with its own transports

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
            try:  # nothing is awaited between the start and here
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
        """Add the server's tools to those of the rollout. Raises RolloutError; TaskError for names
        that do not fit.
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
                described = {
                    "name": name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                tools.add(self._function(tool.name), {"type": "function", "function": described})

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
    """Return what a tool said as a text for the model: of pictures and files their kind alone."""
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
