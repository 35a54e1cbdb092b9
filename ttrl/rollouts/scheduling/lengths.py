"""How long prompts and completions are: observed while sampling, for the admission of requests by a
server's KV capacity.

What has finished so far is shorter than what has not: a mean of finished completions alone is too
low while the long ones run. So the completions that are still running count as "longer than so many
tokens" (the Nelson-Aalen estimate of a survival curve from censored observations). Before anything
has finished, a completion is taken to have half of max_tokens.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CHARS_PER_TOKEN = 3.0
"""Of prompts, before a server has counted one."""
DEFAULT_LENGTH = 1024.0
"""Tokens of a completion that nothing is known of, not even max_tokens."""
_MEAN_WINDOW = 256
_PROMPT_WINDOW = 1e6
"""Characters of prompts after which older ones count for half."""


class Survival:
    """The share of completions that are longer than so many tokens. Beyond what has been seen it
    falls at a constant rate.
    """

    def __init__(self, tokens: Array, ended: Array, going_on: Array, prior: float) -> None:
        """At each of `tokens`, how many completions ended there and how many have come so far and
        go on (shares of one, too).

        prior: tokens to expect of a completion of which nothing is known.
        """
        count = ended.sum()
        self._rate = (count + 1.0) / ((tokens * (ended + going_on)).sum() + prior)
        if count < 1:
            self._at = np.array([0.0, max(prior, tokens.max(initial=0.0))])
            self._log = np.zeros(2)
            return
        order = np.lexsort((-ended, tokens))
        ended = ended[order]
        going_on = going_on[order]
        at_risk = np.cumsum((ended + going_on)[::-1])[::-1]
        log = -np.cumsum(ended / np.maximum(at_risk, 1e-9))
        at = tokens[order]
        few = np.unique(np.linspace(0, len(at) - 1, 512).astype(int))
        self._at, self._log = np.concatenate([[0.0], at[few]]), np.concatenate([[0.0], log[few]])

    @property
    def longest(self) -> float:
        """Tokens up to which anything has been seen."""
        return float(self._at[-1])

    def log(self, tokens: Array) -> Array:
        """Return the logarithm of the share that is longer than `tokens`, elementwise."""
        log: Array = np.interp(tokens, self._at, self._log) - self._rate * np.maximum(
            tokens - self._at[-1], 0.0
        )
        return log


class KnownLengths(NamedTuple):
    """What was known of lengths at some moment."""

    tokens_per_char: float
    """Of prompts."""
    mean: float | None
    """Of completions, in tokens: the exponentially weighted mean of those that finished, the last
    256 or so; None before any.
    """

    def expected(self, chars: float, samples: int, max_tokens: int | None) -> float:
        """Return the tokens of so many characters of prompts and so many completions, once they are
        done.
        """
        if self.mean is None:
            mean = Lengths.prior(max_tokens)
        else:
            mean = min(self.mean, max_tokens or self.mean)
        return chars * self.tokens_per_char + samples * mean


class Lengths:
    """What the finished requests of all servers have shown. One object may serve several calls with
    the same model.
    """

    def __init__(self) -> None:
        self._finished: deque[float] = deque(maxlen=16384)
        self._mean = 0.0
        self._count = 0
        self._prompt_chars = self._prompt_tokens = 0.0

    def observe(
        self,
        prompt_chars: int,
        prompt_tokens: int | None,
        completions: Sequence[int],
        *,
        window: int = 1024,
    ) -> None:
        """Take in one finished request. Only the newest `window` completions are kept, so that
        lengths may change while running."""
        if prompt_tokens and prompt_chars:
            if self._prompt_chars > _PROMPT_WINDOW:
                fade = 0.5
            else:
                fade = 1.0
            self._prompt_chars = self._prompt_chars * fade + prompt_chars
            self._prompt_tokens = self._prompt_tokens * fade + prompt_tokens
        for tokens in completions:
            self._count += 1
            self._mean += (tokens - self._mean) / min(self._count, _MEAN_WINDOW)
            self._finished.append(tokens)
        while len(self._finished) > window:
            self._finished.popleft()

    def known(self) -> KnownLengths:
        """Return what is known now."""
        if self._prompt_tokens:
            per_char = self._prompt_tokens / self._prompt_chars
        else:
            per_char = 1.0 / CHARS_PER_TOKEN
        return KnownLengths(per_char, self._mean if self._count else None)

    def prompt(self, chars: float) -> float:
        """Return the tokens of a prompt of so many characters."""
        return self.known().expected(chars, 0, None)

    def completion(self, max_tokens: int | None) -> float:
        """Return the tokens of a completion."""
        return self.known().expected(0.0, 1, max_tokens)

    @staticmethod
    def prior(max_tokens: int | None) -> float:
        """Return the tokens of a completion before any has finished."""
        if max_tokens:
            return max(1.0, max_tokens / 2)
        return DEFAULT_LENGTH

    def survival(
        self, tokens: Array, ended: Array, going_on: Array, max_tokens: int | None
    ) -> Survival:
        """Return the curve as known now, from all that finished, and from what is known of requests
        in flight (see `Survival`)."""
        finished = np.fromiter(self._finished, np.float64, len(self._finished))
        ones = np.ones(len(finished))
        zeros = np.zeros(len(finished))
        return Survival(
            np.concatenate([finished, tokens]),
            np.concatenate([ones, ended]),
            np.concatenate([zeros, going_on]),
            self.prior(max_tokens),
        )
