"""Decide the number of requests in flight to one server.

vLLM starts a request once its prompt fits. Growing completions then fill the KV cache, and it
preempts the newest requests and computes them again later. A server with too few requests idles. So
a server gets as many samples as fit by their mean length, times a factor. The factor falls while
the server preempts, and rises while its cache has space. A server without a KV cache in its
/metrics gets a number of requests found by trial, as TCP does.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from ttrl.rollouts.scheduling.lengths import KnownLengths, Lengths

_LINE = re.compile(
    r"^vllm:(cache_config_info|num_requests_running|num_requests_waiting|kv_cache_usage_perc|"
    r"num_preemptions_total|generation_tokens_total)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """A vLLM server's metrics, summed over its engines. A sample of a request with n > 1 counts
    there as a request.
    """

    capacity: float
    """Capacity of the KV cache in tokens."""
    block_size: float
    running: float
    waiting: float
    usage: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: float
    generated: float
    """Completion tokens since it started."""


def read_metrics(text: str) -> Metrics | None:
    """Read Prometheus text of vLLM 0.32; return None without the size of a KV cache."""
    sums: defaultdict[str, float] = defaultdict(float)
    capacity = block_size = blocks = 0.0
    usages: list[float] = []
    for name, labels, number in _LINE.findall(text):
        try:
            value = float(number)
            if name == "cache_config_info":
                config = dict(_LABEL.findall(labels))
                block_size = float(config["block_size"])
                blocks = max(blocks, float(config["num_gpu_blocks"]))
                capacity += float(config["kv_cache_size_tokens"])
            elif name == "kv_cache_usage_perc":
                usages.append(value)
            else:
                sums[name] += value
        except (KeyError, ValueError):  # "None" while it starts, or another program's metric
            continue
    # The tokens are per engine, and correct even if layers keep different numbers of them; older
    # versions lack them. The blocks of every line are those of all engines.
    capacity = capacity or blocks * block_size
    if capacity <= 0 or not math.isfinite(capacity):
        return None
    return Metrics(
        capacity=capacity,
        block_size=block_size,
        running=sums["num_requests_running"],
        waiting=sums["num_requests_waiting"],
        usage=sum(usages) / len(usages) if usages else 0.0,
        preemptions=sums["num_preemptions_total"],
        generated=sums["generation_tokens_total"],
    )


FIRST_LIMIT = 512
"""Requests in flight to a server without a known capacity."""
_MOST_LIMIT = 8192
_LEAST_FACTOR = 0.05
"""So low because other clients may fill most of the cache."""
_MOST_FACTOR = 4.0
_CUT = 0.9
"""The factor's change after a poll with many preemptions."""
_RAISE = 1.1
"""The factor's largest change after a round with space in the cache."""
_MANY_PREEMPTIONS = 0.05
"""Preemptions between two polls, as a share of the running samples."""
_SPACE = 0.9
"""The cache has space below this share."""
_LEAST_QUEUE = 16
"""Samples waiting at the server to keep its batch full: vLLM runs at most max_num_seqs at a time
and does not report this limit.
"""
_FIRST_QUEUE = 256


@dataclass(eq=False, slots=True)
class Load:
    """One request in flight, as its server's room counts it."""

    chars: int
    """Characters of its prompt."""
    n: int
    """Samples."""
    max_tokens: int | None
    began: float = 0.0
    """On the server's clock of tokens, see `ServerRoom`."""


class ServerRoom:
    """Count the requests in flight to one server, and decide whether it takes another.

    Times are seconds of any monotonic clock.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.metrics: Metrics | None = None
        self.loads: set[Load] = set()
        self.samples = 0
        self._max_tokens: int | None = None
        self._chars = 0
        self.limit = float(FIRST_LIMIT)
        """Requests; infinite for a server with a known KV cache, as long as it refuses nothing."""
        self.factor = 1.0
        """Expected tokens of all samples in flight, as a share of the KV cache."""
        self._changed_at = 0.0
        """The factor's last change, on the clock of tokens."""
        self._last_refusal = -math.inf
        self._successes = 0
        self._known_good = 0.0
        # A clock of tokens: the length of a permanently running completion. Its rate is the last
        # poll's.
        self._tokens = 0.0
        self._rate = 0.0
        self._polled_at = 0.0
        self._generated = 0.0
        self._waiting = 0.0
        self._finished = 0
        self._queue = float(_FIRST_QUEUE)
        self._over = 0.0
        """Samples in flight at the last poll and already done, with others of their request
        unfinished.
        """
        self._held_back = False

    def tokens_in_flight(self, now: float) -> float:
        """Estimate the completion tokens of the requests in flight; 0 without metrics."""
        if self.metrics is None or not self.samples:
            return 0.0
        clock = self._clock(now)
        tokens = sum(
            load.n * min(max(clock - load.began, 0.0), load.max_tokens or math.inf)
            for load in self.loads
        )
        over = max(self._over, 0.0)  # they ended between then and now
        return tokens * min(1.0, (self.metrics.running + over / 2) / self.samples)

    def generated(self, now: float) -> float:
        """Estimate the server's completion tokens since its first metrics, including other
        clients'.
        """
        if self.metrics is None:
            running = 0.0
        else:
            running = self.metrics.running
        return self._generated + self._rate * running * max(0.0, now - self._polled_at)

    # Admission

    def expected(self, known: KnownLengths) -> float:
        """Return the tokens in the cache at the end of the requests in flight.

        Samples finished before others of their request need no cache.
        """
        samples = self.samples - max(self._over, 0.0)
        return self._tokens_of(known, self._chars, samples, self._max_tokens)

    def _tokens_of(
        self, known: KnownLengths, chars: float, samples: float, max_tokens: int | None
    ) -> float:
        """Return the tokens of prompts and whole completions, with their unused parts of blocks.

        Half of a sample's last block is empty, and half of a block of its prompt is its own.
        """
        if self.metrics is None:
            block = 0.0
        else:
            block = self.metrics.block_size
        return known.expected(chars, samples, max_tokens) + samples * block

    def share(self, known: KnownLengths) -> float:
        """Return how full it is, for comparison with other servers."""
        if self.metrics is None:
            return len(self.loads) / self.limit
        return self.expected(known) / self.metrics.capacity

    def admits(self, load: Load, known: KnownLengths) -> bool:
        """Return whether `load` may be sent. One is always in flight, however large."""
        if not self.loads:
            return True
        if self._takes(load, known):
            return True
        self._held_back = True
        return False

    def _takes(self, load: Load, known: KnownLengths) -> bool:
        if len(self.loads) >= self.limit:
            return False
        if self.metrics is None:
            return True
        if self._waiting >= self._queue:
            return False
        more = self._tokens_of(known, load.chars, load.n, load.max_tokens)
        return self.expected(known) + more <= self.factor * self.metrics.capacity

    def add(self, load: Load, now: float) -> None:
        """Count `load` as sent."""
        load.began = self._clock(now)
        self.loads.add(load)
        self.samples += load.n
        self._max_tokens = load.max_tokens
        self._chars += load.chars
        self._waiting += load.n

    def remove(self, load: Load) -> None:
        """Remove the finished `load`, after success or failure."""
        self.loads.discard(load)
        self._over *= 1.0 - load.n / self.samples
        self.samples -= load.n
        self._chars -= load.chars
        self._waiting -= load.n
        self._finished += load.n

    # The server's metrics

    def succeeded(self) -> None:
        """Raise the limit by one after as many answers; faster below the last good limit."""
        if self.limit < self._known_good:
            self.limit += 1
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            if self._held_back:
                self.limit = min(self.limit + 1, _MOST_LIMIT)
                self._held_back = False

    def refused(self, now: float) -> None:
        """Halve the requests in flight after a 429 or a timeout, at most once in a second."""
        if now - self._last_refusal >= 1.0:
            self._last_refusal = now
            self._successes = 0
            in_flight = len(self.loads) + 1
            self._known_good = min(self.limit, max(in_flight, FIRST_LIMIT)) / 2
            self.limit = float(max(1, min(self.limit, in_flight) // 2))

    def update(self, metrics: Metrics, now: float) -> None:
        """Take the server's metrics into account."""
        before = self.metrics
        self.metrics = metrics
        seconds = now - self._polled_at
        self._tokens = self._clock(now)
        self._polled_at = now
        if before is None:
            if self.limit >= FIRST_LIMIT:
                self.limit = math.inf
        elif metrics.generated >= before.generated and seconds > 0:
            self._generated += metrics.generated - before.generated
            running = (metrics.running + before.running) / 2
            if running >= 1:
                rate = (metrics.generated - before.generated) / running / seconds
                # The past interval counts with its own rate, not with the one assumed for it.
                self._tokens += (rate - self._rate) * seconds
                self._rate = rate
            self._adapt(metrics, metrics.preemptions - before.preemptions)
        self._waiting = metrics.waiting
        self._over = self.samples - metrics.running - metrics.waiting
        if metrics.waiting:
            self._queue = max(_LEAST_QUEUE, metrics.running / 4, self._finished)
        else:  # no sign of a limit on the running samples: find out
            self._queue = max(_FIRST_QUEUE, metrics.running)
        self._finished = 0
        self._held_back = False

    def _adapt(self, metrics: Metrics, preemptions: float) -> None:
        """Cut the factor while the server preempts, raise it while its cache has space.

        A cut takes effect when enough requests have ended, a raise when the new ones have grown.
        Until then, no other follows.
        """
        known = self.lengths.known()
        mean = known.expected(0.0, 1, self._max_tokens)
        has_grown = self._tokens - self._changed_at >= mean
        if preemptions > _MANY_PREEMPTIONS * metrics.running:
            if self.expected(known) <= self.factor * metrics.capacity:
                self.factor = max(_LEAST_FACTOR, self.factor * _CUT)
                self._changed_at = self._tokens
        elif has_grown and self._held_back and not metrics.waiting and metrics.usage < _SPACE:
            raised = self.factor * min(_RAISE, _SPACE / max(metrics.usage, 0.1))
            self.factor = min(_MOST_FACTOR, raised)
            self._changed_at = self._tokens

    def _clock(self, now: float) -> float:
        return self._tokens + self._rate * max(0.0, now - self._polled_at)
