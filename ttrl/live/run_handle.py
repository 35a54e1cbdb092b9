"""Provide the public `Run`: a run folder, to look at while the run goes on and afterwards."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ttrl.live.notebook import LiveView, notebook_html
from ttrl.monitoring.followed_runs import FollowedRun, is_run
from ttrl.report.phrases import summary
from ttrl.run_folder.reader import RunData, read_run
from ttrl.system.frames import data_frame

if TYPE_CHECKING:
    from ttrl.system.frames import DataFrame


class Run:
    """A run folder, to look at while the run goes on and afterwards; it need not exist yet.

    In a notebook, the run's curves follow it while it trains:

        run = Run("runs/sums")
        with run.live():
            train(config, tasks, validation_tasks, quiet=True)

    >>> run = Run("runs/sums")
    >>> run
    <Run runs/sums: not begun>
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        if not is_run(self.folder):
            return f"<Run {self.folder}: not begun>"
        return f"<Run {self.folder}: {summary(self.data())}>"

    def _repr_html_(self) -> str:
        """Return its state, curves, findings and newest sample for a notebook."""
        return notebook_html(self._followed(), time.time())

    def data(self) -> RunData:
        """Read the whole run. Raises RunFolderError for a folder without a run."""
        return read_run(self.folder)

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with a row for each iteration and the columns of metrics.jsonl, such
        as "train.loss". Raises UserError without pandas, RunFolderError.
        """
        rows = [row.to_json() for row in self.data().rows]
        return data_frame(rows, columns=("iteration",))

    def live(self, seconds: float = 2.0) -> LiveView:
        """Show the run in this cell of a notebook, and keep it current.

        A thread follows the run folder, so the run may go on in this cell, in a thread or in
        another process. It ends with the run, with `stop()`, or with a `with` block around it.

        seconds: between two looks. Raises UserError outside a notebook.
        """
        return LiveView(self._followed(), seconds)

    def _followed(self) -> FollowedRun:
        return FollowedRun(self.folder.name or "run", self.folder)
