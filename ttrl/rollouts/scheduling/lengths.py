"""Measure prompts and completions while sampling, for the admission of requests by a server's KV
cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

CHARS_PER_TOKEN = 3.0
"""Of prompts, before a server has counted one."""
DEFAULT_LENGTH = 1024.0
"""Tokens of a completion without max_tokens, before any has finished."""
_MEAN_WINDOW = 256
_PROMPT_WINDOW = 1e6
"""Characters of prompts before older ones count for half."""


class KnownLengths(NamedTuple):
    """The lengths known at some moment."""

    tokens_per_char: float
    """Of prompts."""
    mean: float | None
    """Tokens of a completion: the exponentially weighted mean of the last 256 or so; None before
    any has finished.
    """

    def expected(self, chars: float, samples: float, max_tokens: int | None) -> float:
        """Return the tokens of `chars` characters of prompts and of `samples` whole completions.

        Before any has finished, a completion is expected to have half of `max_tokens`.
        """
        mean = self.mean
        if mean is None and max_tokens:
            mean = max(1.0, max_tokens / 2)
        elif mean is None:
            mean = DEFAULT_LENGTH
        elif max_tokens:
            mean = min(mean, max_tokens)
        return chars * self.tokens_per_char + samples * mean


class Lengths:
    """The lengths of the finished requests of all servers. One object may serve several calls with
    the same model.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0
        self._prompt_chars = 0.0
        self._prompt_tokens = 0.0

    def observe(
        self, prompt_chars: int, prompt_tokens: int | None, completions: Sequence[int]
    ) -> None:
        """Count one finished request."""
        if prompt_tokens and prompt_chars:
            if self._prompt_chars > _PROMPT_WINDOW:
                self._prompt_chars *= 0.5
                self._prompt_tokens *= 0.5
            self._prompt_chars += prompt_chars
            self._prompt_tokens += prompt_tokens
        for tokens in completions:
            self._count += 1
            self._mean += (tokens - self._mean) / min(self._count, _MEAN_WINDOW)

    def known(self) -> KnownLengths:
        """Return the lengths known now."""
        if self._prompt_tokens:
            per_char = self._prompt_tokens / self._prompt_chars
        else:
            per_char = 1.0 / CHARS_PER_TOKEN
        return KnownLengths(per_char, self._mean if self._count else None)
