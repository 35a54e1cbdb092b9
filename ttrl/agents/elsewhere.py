"""List and play tasks of packages in another Python, since their pins conflict with ttrl's.

The worker (`ttrl.agents.agent_worker`) is run by path and imports the package, not ttrl. `{"do":
"list", …}` writes a JSON line for each task; `{"do": "play", …}` plays one, as the program of an
`agent_task`.
"""

import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ttrl.agents.agent_task import TASK_VARIABLE
from ttrl.agents.agent_worker import Order
from ttrl.errors import TaskError, UserError
from ttrl.system.processes import ChildProcess, without_secrets
from ttrl.text import harmless

LIST_SECONDS = 600.0
"""Limit of a listing."""
_LAST_ERROR = re.compile(r"^(?=[\w.]+(?:Error|Exception|Exit)\b)", re.MULTILINE)


def worker_program(package: str, python: str | None) -> list[str]:
    """Return the worker's command: by the given Python, or the one in the environment variable
    TTRL_PACKAGE_PYTHON, or this one.

    -P keeps the worker's folder off the path: some of its files are named like libraries.
    """
    return [
        python or os.environ.get(variable(package)) or sys.executable,
        "-P",
        str(Path(__file__).with_name("agent_worker.py")),
    ]


def playing(program: Sequence[str], order: Order, idx: Any, key: str = "") -> list[str]:
    """Return the command to play one task."""
    play = replace(order, do="play", idx=idx, key=key, task_variable=TASK_VARIABLE)
    return [*program, json.dumps(asdict(play))]


def variable(package: str) -> str:
    """Return the name of the environment variable for a package's Python."""
    return f"TTRL_{package.upper()}_PYTHON"


def list_rows(
    program: Sequence[str], order: Order, name: str, seconds: float = LIST_SECONDS
) -> list[Mapping[str, Any]]:
    """Return the worker's listing, cached for this process. Raises TaskError, also after these
    seconds.
    """
    text = _listed(tuple(program), json.dumps(asdict(order)), name, seconds)
    # Packages may print to stdout as well.
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"idx": ')]


@functools.lru_cache(8)
def _listed(program: tuple[str, ...], order: str, name: str, seconds: float) -> str:
    with tempfile.TemporaryDirectory(prefix="ttrl-list-") as folder:
        rows = Path(folder, "rows")
        log = Path(folder, "log")
        with open(os.devnull, "rb") as nothing, open(rows, "wb") as listed:
            pipes = (nothing.fileno(), listed.fileno())
            try:
                with ChildProcess([*program, order], log, without_secrets(), pipes=pipes) as child:
                    status = child.wait(seconds)
            except TimeoutError:
                raise TaskError(
                    f"{name}: listing its tasks took more than {seconds:g} s; check whether the "
                    "package waits for something, such as a download"
                ) from None
            except (UserError, OSError) as error:
                raise TaskError(f"{name}: {error}") from None
        if not status:
            return rows.read_text(encoding="utf-8")
        errors = log.read_text(encoding="utf-8", errors="replace")
    said = " ".join(_LAST_ERROR.split(errors)[-1].split())[:600]
    package = name.partition(":")[0]
    if said.startswith("ModuleNotFoundError") and f"'{package}" in said:
        said += f"; set {variable(package)} to a Python with it"
    raise TaskError(f"{name} cannot be loaded: {harmless(said)}")
