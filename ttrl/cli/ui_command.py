"""`ttrl ui`: follow runs in a browser."""

import argparse
from pathlib import Path

from ttrl.errors import UserError
from ttrl.system.console import say

_ADDRESS = "open this address; it carries the key, and the pages only read. Ctrl-C ends them:"


def add_ui(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve pages about runs, kept current: curves, phases, findings, conversations, "
        "packed rows, and comparisons. Only this machine can open them, with the printed key."
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="RUN",
        help="run folders, and folders of runs (default: runs)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="the port on 127.0.0.1 (default: a free one)",
    )
    parser.set_defaults(run_command=run_ui)


def run_ui(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port is {arguments.port}; it must be from 1 to 65535, or 0 for any")
    try:
        from ttrl.ui.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(
            f"ttrl ui needs Starlette and uvicorn ({error}); they come with vLLM, or with "
            "pip install starlette uvicorn"
        ) from error

    def announce(address: str) -> None:
        say(f"{_ADDRESS}\n{address}")

    serve(arguments.runs or [Path("runs")], arguments.port, announce)
    return 0
