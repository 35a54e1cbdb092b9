"""The progress bar of sampling: samples done, mean reward, tokens, tokens per second, failures. Silent where nobody watches."""

import sys
import time
from typing import Any

from tqdm.auto import tqdm

from ttrl.records import Sample


def somebody_watches() -> bool:
    """True in a terminal and in a notebook; a bar in a log file would be thousands of lines."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


class Progress:
    """Counts samples as they are graded. A context manager, so that the bar is closed on Ctrl-C too."""

    def __init__(self, total: int, description: str, *, enabled: bool) -> None:
        self._bar: Any = tqdm(
            total=total,
            desc=description,
            unit="sample",
            disable=not (enabled and somebody_watches()),
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
        )
        self._start = time.monotonic()
        self._reward_sum, self._graded, self._failed, self._tokens = 0.0, 0, 0, 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add_tokens(self, tokens: int) -> None:
        """Tokens that the server has sampled, graded or not."""
        self._tokens += tokens

    def add_sample(self, sample: Sample) -> None:
        """One sample is finished: graded or failed."""
        if sample.reward is None:
            self._failed += 1
        else:
            self._graded += 1
            self._reward_sum += sample.reward
        if self._bar.disable:
            return
        self._bar.set_postfix_str(self.text(), refresh=False)
        self._bar.update(1)

    def text(self) -> str:
        """What stands behind the bar."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        parts = [f"reward {self._reward_sum / self._graded:.3f}"] if self._graded else []
        parts += [f"{si(self._tokens)} tokens", f"{si(self._tokens / seconds)} tokens/s"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts)


def si(number: float) -> str:
    """999 → '999', 12_345 → '12.3k', 4_560_000 → '4.56M'."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor * 0.9995:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.0f}"
