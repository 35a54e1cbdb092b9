"""Execute a notebook's cells in one process, as a kernel does: inside a running event loop.

    python tests/support/run_notebook.py NOTEBOOK.ipynb OUTPUTS.json [CODE]

CODE runs after the cell tagged "parameters". OUTPUTS.json gets the outputs of each cell: displays,
updates and values, each as {"cell": N, "data": {MIME: TEXT}, "update": BOOL}.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


def run_notebook(path: Path, parameters: str = "") -> list[dict[str, Any]]:
    """Execute a notebook; return its outputs. Raises the exception of a cell."""
    options = Config()
    options.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=options)
    shell.kernel = "a notebook's"
    found: list[dict[str, Any]] = []

    async def run_all() -> None:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for number, cell in enumerate(cells):
            if cell["cell_type"] != "code":
                continue
            source = "".join(cell["source"])
            if "parameters" in cell["metadata"].get("tags", []):
                source += f"\n{parameters}\n"
            shown = CapturingDisplayPublisher(shell=shell)
            shell.display_pub = shown
            done = await shell.run_cell_async(
                source, store_history=False, transformed_cell=shell.transform_cell(source)
            )
            done.raise_error()
            for one in shown.outputs:
                found.append({"cell": number, "data": one["data"], "update": one["update"]})
            if done.result is not None:
                data, _ = shell.display_formatter.format(done.result)
                found.append({"cell": number, "data": data, "update": False})

    asyncio.run(run_all())
    return found


if __name__ == "__main__":
    outputs = run_notebook(Path(sys.argv[1]), *sys.argv[3:])
    Path(sys.argv[2]).write_text(json.dumps(outputs, default=str), encoding="utf-8")
