"""Stop completions the model itself finds unlikely: babble is not worth the tokens."""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

from openai.types.chat import ChatCompletionChunk

from ttrl.errors import UserError
from ttrl.rollouts.client.assembly import STOPPED_EARLY, has_text
from ttrl.rollouts.client.choices import UNKNOWN_LOGPROB
from ttrl.text import is_number

logger = logging.getLogger(__name__)


class InferenceEarlyStop:
    """An `on_chunk` ending a completion once the moving mean of its logprobs is below a threshold,
    or NaN.

        await get_task_results(tasks, client, model, on_chunk=InferenceEarlyStop())

    The mean m of a choice starts at 0 and becomes alpha·m + (1 − alpha)·logprob with each token
    (natural logarithms). One object serves any number of streams and choices at once, each with its
    own mean. An ended choice has `stopped_early` True and the finish_reason "stopped_early".

    alpha: between 0 and 1, both excluded; 0.992 looks back over some 125 tokens.
    threshold: below 0. With the defaults, 21 tokens of logprob −20 end a completion, or 173 of −4.

    Tokens without a logprob are skipped; the first causes a warning, and `num_unknown` counts them.
    Raises UserError for values out of range.

    >>> InferenceEarlyStop().ends_at([-20.0] * 30)
    21
    """

    def __init__(self, alpha: float = 0.992, threshold: float = -3.0) -> None:
        if not is_number(alpha) or not 0 < alpha < 1:
            raise UserError(
                f"alpha is {alpha!r}; give a number between 0 and 1, such as 0.992: the weight "
                "of the mean so far"
            )
        if not is_number(threshold) or threshold >= 0:
            raise UserError(
                f"threshold is {threshold!r}; give a finite number below 0, such as -3.0: a mean "
                "logprob"
            )
        self.alpha, self.threshold = float(alpha), float(threshold)
        self.num_unknown = 0
        """Tokens without a logprob (chunks, if a server sends none at all)."""
        self.num_stopped = 0
        """Choices ended."""
        self._streams: dict[int, dict[int, float]] = {}
        """The means of choices, by the id of their completion and deleted with it: openai's
        completions have no hash.
        """

    @property
    def cache_key(self) -> str:
        """Its effect on a completion is a function of this."""
        return f"InferenceEarlyStop(alpha={self.alpha!r}, threshold={self.threshold!r})"

    def __repr__(self) -> str:
        return self.cache_key

    def __call__(self, chunk: Any, completion: Any) -> None:
        """Read one chunk of `completion`. Marks the choices to end, then raises StopIteration."""
        if isinstance(chunk, dict):  # of a stream of plain JSON
            chunk = ChatCompletionChunk.construct(**chunk)
        stopped = False
        for part in chunk.choices or ():
            if part.logprobs is not None:
                logprobs = part.logprobs.content
            else:
                logprobs = None
            if not logprobs:
                if part.delta is not None and has_text(part.delta):
                    self._count_unknown()
                continue
            means = self._means(completion)
            mean = self._mean_after(means.get(part.index, 0.0), logprobs)
            means[part.index] = mean
            if mean < self.threshold or mean != mean:
                self._mark(completion, part.index)
                stopped = True
        if stopped:
            raise StopIteration

    def mean(self, completion: Any, index: int = 0) -> float:
        """Return the moving mean of a choice so far, 0 before its first token."""
        return self._means(completion).get(index, 0.0)

    def ends_at(self, logprobs: Sequence[float]) -> int | None:
        """Return the number of tokens before a completion with these log-probabilities would have
        been ended; None: not at all. For choosing alpha and threshold from an earlier run's
        samples; NaN marks a token without one.
        """
        mean = 0.0
        for count, logprob in enumerate(logprobs, 1):
            if logprob == logprob:
                mean = self.alpha * mean + (1.0 - self.alpha) * logprob
            if mean < self.threshold:
                return count
        return None

    def _mean_after(self, mean: float, entries: Any) -> float:
        alpha = self.alpha
        rest = 1.0 - self.alpha
        threshold = self.threshold
        for entry in entries:
            logprob = entry.logprob
            if logprob is None or UNKNOWN_LOGPROB * 1.01 < logprob <= UNKNOWN_LOGPROB:
                self._count_unknown()
                continue
            mean = alpha * mean + rest * logprob
            # A later token of the same chunk must not lift the mean again.
            if mean < threshold or mean != mean:
                break
        return mean

    def _means(self, completion: Any) -> dict[int, float]:
        key = id(completion)
        if key not in self._streams:
            self._streams[key] = {}
            weakref.finalize(completion, self._streams.pop, key).atexit = False
        return self._streams[key]

    def _mark(self, completion: Any, index: int) -> None:
        self.num_stopped += 1
        for choice in completion.choices:
            if choice.index == index:
                choice.stopped_early = True
                choice.finish_reason = STOPPED_EARLY

    def _count_unknown(self) -> None:
        if not self.num_unknown:
            logger.warning(
                "early stop skips tokens without logprobs from the server (num_unknown counts them)"
            )
        self.num_unknown += 1
