"""An MCP server for tests: `python mcp_server.py [--port N]`, over stdin and stdout, or Streamable
HTTP.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

server = MCPServer("notes")
notes: list[str] = []


@server.tool(name="notes.add")
def add(text: str) -> str:
    """Write a note down."""
    notes.append(text)
    return f"{len(notes)} in all"


@server.tool()
def product(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("out of ink")


@server.tool()
def long(length: int) -> str:
    """Say much."""
    return "x" * length


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """Show a picture."""
    return [
        TextContent(type="text", text="Here:"),
        ImageContent(type="image", data="AAAA", mime_type="image/png"),
    ]


@server.tool()
def variables() -> list[str]:
    """Tell the names of the environment's variables."""
    return sorted(os.environ)


@server.tool()
def die() -> str:
    """End the server."""
    os.write(2, b"the ink caught fire\n")
    os._exit(3)


@server.tool()
def hang(marks: str) -> str:
    """Start a program in a session of its own, note its pid, and never answer."""
    program = subprocess.Popen(
        ["sleep", "600"],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    Path(marks).write_text(f"{os.getpid()} {program.pid}")
    time.sleep(600)
    return ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--port"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        os.write(1, b"hello, this is no JSON\n")  # as many servers do by mistake
        server.run("stdio")
