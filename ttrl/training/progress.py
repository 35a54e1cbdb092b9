"""Tells the process that started a recipe how far it is: "done total" in a small file, whose path it put into the environment."""

import contextlib
import os
import time
from pathlib import Path

from ttrl.training.parallel.distributed import Ranks

PROGRESS_VARIABLE = "TTRL_PROGRESS_FILE"


class Progress:
    """Counts microbatches. Rank 0 writes, at most ten times a second; nothing is written when nobody asked."""

    def __init__(self, total: int, ranks: Ranks) -> None:
        path = os.environ.get(PROGRESS_VARIABLE)
        self._path = Path(path) if path and ranks.is_first else None
        self._done, self._total, self._written = 0, total, 0.0
        self._write()

    def advance(self) -> None:
        """One more microbatch is done."""
        self._done += 1
        if self._done == self._total or time.monotonic() - self._written > 0.1:
            self._write()

    def _write(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):  # the folder may be on another machine: no reason to stop
                self._path.write_text(f"{self._done} {self._total}\n")
            self._written = time.monotonic()
