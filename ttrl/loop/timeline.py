"""Record sampling and training times; all other time is dead, however phases overlap."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from ttrl.facts import Step
from ttrl.system.console import clock


class Timeline:
    """Record this process's spans of work, in seconds of `clock`. Threads may add concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, float, float]] = []
        self._open: dict[object, tuple[str, float]] = {}
        self._sampled: list[tuple[float, float, float]] = []

    @contextlib.contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record the block as work of this kind: "sample" or "train"."""
        key = object()
        began = clock()
        with self._lock:
            self._open[key] = kind, began
        try:
            yield
        finally:
            with self._lock:
                del self._open[key]
                self._spans.append((kind, began, clock()))

    def add_training(self, began: float, ended: float, steps: Sequence[Step]) -> None:
        """Record a train phase from its train.jsonl; only steps count as training, not reading or
        writing checkpoints. The rest is assumed to lie before and after the steps in equal parts;
        this matters only for overlapping phases.
        """
        parts = [step.seconds_by_part or {"step": step.seconds or 0.0} for step in steps]
        worked = sum(
            seconds for part in parts for name, seconds in part.items() if name != "checkpoint"
        )
        margin = max(0.0, ended - began - worked) / 2
        with self._lock:
            self._spans.append(("train", began + margin, ended - margin))

    def served(self, began: float, ended: float, flops: float) -> float:
        """Record the servers' FLOPs for a phase; return their rate over its time, including
        concurrent earlier phases."""
        with self._lock:
            self._sampled.append((began, ended, flops))
            spans = list(self._sampled)
        shares = [
            (max(0.0, min(end, ended) - max(start, began)) / max(end - start, 1e-9), done)
            for start, end, done in spans
        ]
        return sum(share * done for share, done in shares) / max(ended - began, 1e-9)

    def busy(
        self, began: float, ended: float, kinds: tuple[str, ...] = ("sample", "train")
    ) -> float:
        """Return the seconds between two moments with work of any of these kinds; open work counts
        up to now.
        """
        total = 0.0
        reached = began
        spans = [(start, end) for kind, start, end in self._until_now() if kind in kinds]
        for start, end in sorted(spans):
            start = max(start, reached)
            end = min(end, ended)
            if end > start:
                total = total + end - start
                reached = end
        return total

    def at(self, moment: float) -> set[str]:
        """Return the kinds of work in progress at a moment."""
        return {kind for kind, start, end in self._until_now() if start <= moment <= end}

    def _until_now(self) -> list[tuple[str, float, float]]:
        """Return all spans; open work ends now."""
        with self._lock:
            return self._spans + [(kind, start, clock()) for kind, start in self._open.values()]

    def forget_before(self, moment: float) -> None:
        """Drop spans ended by then."""
        with self._lock:
            self._spans = [span for span in self._spans if span[2] > moment]
            self._sampled = [span for span in self._sampled if span[1] > moment]
