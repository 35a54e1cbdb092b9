"""train.jsonl: a line for each optimizer step."""

import contextlib
import os
import time
from pathlib import Path

from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.configs.recipe import PROGRESS_VARIABLE
from ttrl.facts import SamplerTrainer, Step, dumped
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
        self._held: Step | None = None
        self.compared: SamplerTrainer | None = None
        """The first step's comparison of sampler and trainer."""
        self._peak: float | None = None
        if here.is_first:
            self._path.unlink(missing_ok=True)
        if config.measure_peak and here.is_first:
            self._peak = matmul_peak(
                largest_product(policy.decoder, here.device), policy.compute_dtype, here.device
            )
        self._began = time.perf_counter()

    def line(self, step: Step, flops: float) -> None:
        """Add one step: its results, and the FLOPs of all ranks. Its time counts from the previous
        line.
        """
        now = time.perf_counter()
        wall = now - self._began
        self._began = now
        parts = self._watch.take()
        self.compared = self.compared or step.sampler_trainer
        if not self._here.is_first:
            return
        self._write(durable=False)
        share = None
        if self._peak is not None:
            own = flops / wall / self._here.processes
            # Measured next to a busy server, without a better known peak.
            self._peak = max(self._peak, own)
            share = own / self._peak
        self._held = step.replace(
            seconds=wall,
            tokens_per_second=(step.row_tokens or 0) / wall,
            flops=flops,
            flops_per_second=flops / wall,
            matmul_peak=self._peak,
            peak_share=share,
            seconds_by_part=parts,
            memory_peaks=memory_peaks(self._here.device),
        )

    def close(self, **results: float) -> None:
        """Add measurements since the last step, and `results`, to its line, and write it."""
        if self._held is not None:
            parts = (self._held.seconds_by_part or {}) | self._watch.take()
            self._held = self._held.replace(seconds_by_part=parts, **results)
            self._write()

    def _write(self, durable: bool = True) -> None:
        if self._held is not None:
            # The last line makes all of them so.
            append_jsonl(self._path, dumped(self._held).encode(), durable=durable)
            self._held = None
