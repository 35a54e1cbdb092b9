"""Loggers that a config can name: one that keeps what it is given, and one that is none."""

from typing import ClassVar


class Recorder:
    """A logger that keeps what it is given; `seen` is shared by all of them."""

    seen: ClassVar[list[tuple[int, dict[str, float]]]] = []
    failing: ClassVar[set[int]] = set()
    closed = 0

    def __init__(self, tag: str = "") -> None:
        self.tag = tag

    def log_dict(self, payload, step):
        if step in self.failing:
            raise OSError("the network is gone")
        self.seen.append((step, dict(payload)))

    def close(self):
        type(self).closed += 1


class NoLogger:
    pass
