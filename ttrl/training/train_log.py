"""train.jsonl: a line for each optimizer step."""

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.configs.recipe import PROGRESS_VARIABLE
from ttrl.system.files import append_jsonl
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import Policy
from ttrl.training.timing import Stopwatch, largest_product, matmul_peak, memory_peaks


class TrainProgress:
    """Counts microbatches; rank 0 writes the count to the file in PROGRESS_VARIABLE, at most ten
    times a second.
    """

    def __init__(self, total: int, ranks: Ranks) -> None:
        path = os.environ.get(PROGRESS_VARIABLE)
        self._path = Path(path) if path and ranks.is_first else None
        self._done = 0
        self._total = total
        self._written = 0.0
        self._write()

    def advance(self) -> None:
        self._done += 1
        if self._done == self._total or time.monotonic() - self._written > 0.1:
            self._write()

    def _write(self) -> None:
        if self._path is not None:
            # The folder may be on another machine: no reason to stop.
            with contextlib.suppress(OSError):
                self._path.write_text(f"{self._done} {self._total}\n")
            self._written = time.monotonic()


class TrainLog:
    """Writes a new file, on the first rank. A line waits for the next one, or for `close`, to be
    completed.
    """

    def __init__(
        self, config: GRPOConfig | SFTConfig, policy: Policy, here: Ranks, watch: Stopwatch
    ) -> None:
        self._path = Path(config.output_dir, "train.jsonl")
        self._here = here
        self._watch = watch
        self._held: dict[str, Any] | None = None
        self.compared: dict[str, Any] | None = None
        """The first step's comparison of sampler and trainer."""
        self._peak: float | None = None
        if here.is_first:
            self._path.unlink(missing_ok=True)
        if config.measure_peak and here.is_first:
            self._peak = matmul_peak(
                largest_product(policy.decoder, here.device), policy.compute_dtype, here.device
            )
        self._began = time.perf_counter()

    def line(self, row: dict[str, Any], flops: float) -> None:
        """Add one step: its results, and the FLOPs of all ranks. Its time counts from the previous
        line.
        """
        now = time.perf_counter()
        wall = now - self._began
        self._began = now
        parts = self._watch.take()
        if "sampler_trainer" in row:
            self.compared = _without_nan(row["sampler_trainer"])
        if not self._here.is_first:
            return
        self._write(durable=False)
        speed = {
            "seconds": wall,
            "tokens_per_second": row["row_tokens"] / wall,
            "flops": flops,
            "flops_per_second": flops / wall,
        }
        if self._peak is not None:
            own = flops / wall / self._here.processes
            # Measured next to a busy server, without a better known peak.
            self._peak = max(self._peak, own)
            speed |= {"matmul_peak": self._peak, "peak_share": own / self._peak}
        self._held = (
            row
            | speed
            | {"seconds_by_part": parts, "memory_peaks": memory_peaks(self._here.device)}
        )

    def close(self, **results: float) -> None:
        """Add measurements since the last step, and `results`, to its line, and write it."""
        if self._held is not None:
            self._held |= results
            self._held["seconds_by_part"] |= self._watch.take()
            self._write()

    def _write(self, durable: bool = True) -> None:
        if self._held is not None:
            # The last line makes all of them so.
            append_jsonl(self._path, _without_nan(self._held), durable=durable)
            self._held = None


def _without_nan(value: Any) -> Any:
    """Replace non-finite numbers by None, in nested values too: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
