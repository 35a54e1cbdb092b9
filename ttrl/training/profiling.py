"""A trace of the first optimizer steps, for chrome://tracing and https://ui.perfetto.dev."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from ttrl.training.parallel.distributed import Ranks


class Profiler:
    """Traces the first `steps` optimizer steps; each rank writes output_dir/profile/rank-N.json after the last of them."""

    def __init__(self, output_dir: str | Path, steps: int, ranks: Ranks) -> None:
        self._left = steps
        self._path = Path(output_dir, "profile", f"rank-{ranks.rank}.json")
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True) if steps else None
        if self._profile is not None:
            self._profile.start()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One optimizer step, marked with `name` in the trace."""
        if self._profile is None:
            yield
            return
        with record_function(name):
            yield
        self._left -= 1
        if not self._left:
            self.close()

    def close(self) -> None:
        """Writes the file, also where fewer steps were taken than asked for."""
        if self._profile is not None:
            self._profile.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
