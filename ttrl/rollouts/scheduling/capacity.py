"""How much one server takes at a time: by the KV cache where it says how large that is (vLLM's
/metrics), else by trial.

vLLM starts a request as soon as its prompt fits; when the growing completions then fill the cache,
it throws the newest out and computes them again later (a preemption). Sent everything at once it
therefore computes much twice; sent too little it idles. The forecast here is what the requests in
flight will occupy at each later moment, from the survival curve of lengths (`Lengths`) and from the
tokens that each has by now; a request is admitted while the highest point of that curve stays below
the cache's size. The forecast is set right by what the server says of itself: usage now,
preemptions, requests that wait.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from ttrl.rollouts.scheduling.lengths import Array, KnownLengths, Lengths

_LINE = re.compile(
    r"^vllm:(cache_config_info|num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total|"
    r"generation_tokens_total)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """What a vLLM server says of itself, summed over its engines. A sample of a request with n > 1
    counts as a request there.
    """

    capacity: float
    """Tokens that fit into the KV cache."""
    block_size: float
    running: float
    waiting: float
    usage: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: float
    generated: float
    """Completion tokens since it started."""


def read_metrics(text: str) -> Metrics | None:
    """Read Prometheus text as vLLM 0.32 writes it; None where the size of a KV cache is not in
    it.
    """
    sums: dict[str, float] = {}
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
                sums[name] = sums.get(name, 0.0) + value
        except (KeyError, ValueError):  # "None" while it starts, or another program's metric
            continue
    # The tokens are each engine's own, and right also where layers keep different numbers of them;
    # older versions do not have them. The blocks of every line are those of all engines.
    capacity = capacity or blocks * block_size
    if capacity <= 0 or not math.isfinite(capacity):
        return None
    return Metrics(
        capacity=capacity,
        block_size=block_size,
        running=sums.get("num_requests_running", 0.0),
        waiting=sums.get("num_requests_waiting", 0.0),
        usage=sum(usages) / len(usages) if usages else 0.0,
        preemptions=sums.get("num_preemptions_total", 0.0),
        generated=sums.get("generation_tokens_total", 0.0),
    )


FIRST_LIMIT = 512
"""Requests in flight to a server that says nothing of its capacity."""
_MOST_LIMIT = 8192
_FULL = 0.95
"""Of the KV cache, what the forecast may fill."""
_LEAST_FULL = 0.6
_MOST_FULL = 1.5
_MANY_PREEMPTIONS = 0.5
"""Of a round, as a share of the samples that run."""
FORECAST_PAUSE = 0.25
"""Seconds for which a forecast is good, unless told otherwise; in between, what finishes is
replaced one for one.
"""
_LEAST_QUEUE = 16
"""Samples that wait at the server, so that its batch never lacks one: vLLM runs at most
max_num_seqs, and does not say how many that is."""
_FIRST_QUEUE = 256
_BUCKETS = 64
_MOMENTS = 32
_PARTS = 4


class Load:
    """One request in flight, as its server's room counts it."""

    __slots__ = ("began", "chars", "max_tokens", "n")

    def __init__(self, chars: int, n: int, max_tokens: int | None) -> None:
        """chars: of its prompt; how many tokens that is may be known later only."""
        self.chars = chars
        self.n = n
        self.max_tokens = max_tokens
        self.began = 0.0
        """On the server's clock of tokens, see `ServerRoom`."""


class ServerRoom:
    """What is in flight to one server, and whether more may be. Times are seconds of any clock that
    goes forward.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.metrics: Metrics | None = None
        self.loads: set[Load] = set()
        self.samples = 0
        self._max_tokens: int | None = None
        self._chars = 0
        self.limit = float(FIRST_LIMIT)
        """Requests; infinite for a server whose KV cache is known, as long as it refuses nothing.
        """
        self.full = _FULL
        self.forecast_pause = FORECAST_PAUSE
        self._last_refusal = -math.inf
        self._successes = 0
        self._known_good = 0.0
        self._free = 0.0
        """Samples that may still be sent, by the last forecast."""
        self._forecast_at = -math.inf
        # A clock of tokens: how many a completion that runs all the time has got. Its rate is that
        # of the last poll.
        self._tokens = self._rate = 0.0
        self._polled_at = self._generated = 0.0
        self._waiting = 0.0
        self._finished = 0
        self._queue = float(_FIRST_QUEUE)
        self._foreign = 0.0
        """Tokens in the cache beyond those of the forecast: of other users."""
        self._over = 0.0
        """Samples in flight that are over while others of their request are not, as of the last
        poll.
        """
        self._held_back = False
        # Of the round that runs, see `_adapt`.
        self._round_began = self._preempted = 0.0
        self._usages: list[float] = []
        self._was_held_back = self._was_cut = False

    def tokens_in_flight(self, now: float) -> float:
        """Estimate how many completion tokens the requests in flight have got by now; 0 where the
        server says nothing of that.
        """
        if self.metrics is None or not self.samples:
            return 0.0
        clock = self._clock(now)
        tokens = sum(
            load.n * min(max(clock - load.began, 0.0), load.max_tokens or math.inf)
            for load in self.loads
        )
        over = max(self._over, 0.0)  # they ended somewhere between then and now
        return tokens * min(1.0, (self.metrics.running + over / 2) / self.samples)

    def generated(self, now: float) -> float:
        """Estimate how many completion tokens the server has made since its metrics were first
        seen, those of others included.
        """
        if self.metrics is None:
            running = 0.0
        else:
            running = self.metrics.running
        return self._generated + self._rate * running * max(0.0, now - self._polled_at)

    # Admission

    def expected(self, known: KnownLengths | None = None) -> float:
        """Return how many tokens the requests in flight will have when they are done, by what is
        known of lengths (now).
        """
        if not self.loads:
            return 0.0
        return (known or self.lengths.known()).expected(self._chars, self.samples, self._max_tokens)

    def share(self, known: KnownLengths) -> float:
        """Return how full it is, for comparison with other servers."""
        if self.metrics is None:
            return len(self.loads) / self.limit
        return self.expected(known) / self.metrics.capacity

    def admits(self, load: Load, now: float) -> bool:
        """Return whether `load` may be sent. One is always in flight, however large."""
        if not self.loads:
            return True
        if len(self.loads) >= self.limit:
            self._held_back = True
            return False
        if self.metrics is None:
            return True
        if self._free < load.n and now >= self._forecast_at + self.forecast_pause:
            self._forecast(now, load)
        if self._free >= load.n and self._waiting < self._queue:
            return True
        self._held_back = True
        return False

    def refusal(self, load: Load) -> tuple[float, float]:
        """Return what is known of a server that has just not admitted `load`: from how many samples
        on it refuses any request, and until when, where nothing changes before."""
        # Whatever their size.
        if self.metrics is None or len(self.loads) >= self.limit or self._free >= load.n:
            return 1, math.inf
        return load.n, self._forecast_at + self.forecast_pause

    def add(self, load: Load, now: float) -> None:
        """Count `load`, which is sent."""
        load.began = self._clock(now)
        self.loads.add(load)
        self.samples += load.n
        self._max_tokens = load.max_tokens
        self._chars += load.chars
        self._free -= load.n
        self._waiting += load.n

    def remove(self, load: Load) -> None:
        """Forget `load`, which is over, however it ended."""
        self.loads.discard(load)
        self._over *= 1.0 - load.n / self.samples
        self.samples -= load.n
        self._chars -= load.chars
        self._free += load.n
        self._waiting -= load.n
        self._finished += load.n

    # What the server shows

    def succeeded(self) -> None:
        """Notice an answer: after as many as may be in flight, one more may; sooner below what was
        good before.
        """
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
        """Take in what the server says of itself."""
        before = self.metrics
        self.metrics = metrics
        seconds = now - self._polled_at
        moment = self._clock(now)
        self._tokens = moment
        self._polled_at = now
        if before is None:
            if self.limit >= FIRST_LIMIT:
                self.limit = math.inf
        elif metrics.generated >= before.generated and seconds > 0:
            self._generated += metrics.generated - before.generated
            running = (metrics.running + before.running) / 2
            if running >= 1:
                rate = (metrics.generated - before.generated) / running / seconds
                # The interval that is over counts with its own rate, not with the one that it was
                # reckoned with.
                self._tokens += (rate - self._rate) * seconds
                self._rate = rate
            self._adapt(metrics, max(metrics.preemptions - before.preemptions, 0.0))
        self._waiting = metrics.waiting
        self._over = self.samples - metrics.running - metrics.waiting
        if metrics.waiting:
            self._queue = max(_LEAST_QUEUE, metrics.running / 4, self._finished)
        else:  # no sign of a limit on what it runs at once: find out
            self._queue = max(_FIRST_QUEUE, metrics.running)
        self._finished = 0
        self._held_back = False
        self._free = -math.inf
        self._forecast_at = -math.inf

    def _adapt(self, metrics: Metrics, preemptions: float) -> None:
        """Correct how much of the cache the forecast may fill: once per round, the time in which a
        completion is made.

        Within a round nothing can be learned of it: what was admitted grows until its end. Some
        preemptions are a good price for a cache that is full; they also spread completions of equal
        length, which otherwise begin and end together.
        """
        self._preempted += preemptions
        self._usages.append(metrics.usage)
        self._was_held_back |= self._held_back and metrics.waiting == 0
        usage = sum(self._usages) / len(self._usages)
        is_over = self._tokens - self._round_began >= self.lengths.completion(self._max_tokens)
        if self._preempted > _MANY_PREEMPTIONS * max(metrics.running, 1.0):
            if not self._was_cut or is_over:
                self.full = max(_LEAST_FULL, min(self.full, _FULL) * 0.9)
                self._was_cut = True
                self._begin_round()
        elif is_over:
            if self.full < _FULL:
                self.full = min(_FULL, self.full * 1.05)
            elif usage > 0.9:
                self.full = max(_FULL, self.full * 0.95)
            elif self._was_held_back and usage < 0.85:
                self.full = min(_MOST_FULL, self.full * min(0.9 / max(usage, 0.1), 1.05))
            self._was_cut = False
            self._begin_round()

    def _begin_round(self) -> None:
        self._round_began = self._tokens
        self._preempted = 0.0
        self._was_held_back = False
        self._usages.clear()

    # The forecast

    def _clock(self, now: float) -> float:
        return self._tokens + self._rate * max(0.0, now - self._polled_at)

    def _forecast(self, now: float, load: Load) -> None:
        """Set `_free`: how many more samples such as those of `load` keep the highest point of the
        forecast within the cache.
        """
        assert self.metrics is not None
        self._forecast_at = now
        count = len(self.loads)
        clock = self._clock(now)
        metrics = self.metrics
        most = max((other.max_tokens or 0 for other in (load, *self.loads)), default=0) or None
        ages = np.maximum(
            clock - np.fromiter((other.began for other in self.loads), np.float64, count), 0.0
        )
        if most is not None:
            ages = np.minimum(ages, 0.95 * most)
        n = np.fromiter((other.n for other in self.loads), np.float64, count)
        survival = self.lengths.survival(*self._in_flight(ages, n), most)
        # Of n samples one at least is still there, else the request would be over; of the others as
        # many as the server says.
        others = (n - 1.0) * np.exp(survival.log(ages))
        alive = 1.0 + np.minimum(
            n - 1.0, others * max(self.samples - count - self._over, 0.0) / max(others.sum(), 1e-9)
        )
        age, weight, requests = _buckets(ages, alive)
        horizon = float(most or 2 * survival.longest)
        moments = np.concatenate(
            [[0.0], np.geomspace(min(4.0, horizon / 2), horizon, _MOMENTS - 1)]
        )
        later = age[:, None] + moments
        left = np.exp(survival.log(later) - survival.log(age)[:, None])
        new = np.exp(survival.log(moments))
        if most is not None:
            left = left * (later <= most)
            new = new * (moments <= most)
        shared, own = self._prompt_blocks(self._chars / max(count, 1))
        samples = weight[:, None] * left
        tokens = (samples * (later + own) + shared * np.minimum(samples, requests[:, None])).sum(
            axis=0
        )
        self._correct(tokens[0])
        room = self.full * metrics.capacity - tokens - max(self._foreign, 0.0)
        shared, own = self._prompt_blocks(load.chars)
        self._free = float(np.min(room / (new * (moments + own) + shared / load.n)))

    def _prompt_blocks(self, chars: float) -> tuple[float, float]:
        """Return (tokens that the samples of a request share, tokens that each has besides its
        completion).

        Only full blocks are shared; and of each sample's last block half is empty, on the average.
        """
        assert self.metrics is not None
        tokens = self.lengths.prompt(chars)
        block = self.metrics.block_size
        shared = tokens // block * block
        return shared, tokens - shared + block / 2

    def _in_flight(self, ages: Array, n: Array) -> tuple[Array, Array, Array]:
        """Return what requests in flight say of lengths, for `Lengths.survival`.

        Of a request with n > 1 one sample at least goes on. How many of all the others are over is
        known as well: as many as do not run at the server. When they ended is not: anywhere up to
        now.
        """
        assert self.metrics is not None
        others = n - 1.0
        over = min(max(self._over, 0.0), others.sum())
        if not over:
            return ages, np.zeros_like(ages), np.ones_like(ages)
        weight = others * ages
        ended = np.minimum(others, over * weight / max(weight.sum(), 1e-9))
        parts = (np.arange(_PARTS) + 0.5) / _PARTS
        tokens = np.concatenate([ages, np.outer(parts, ages).ravel()])
        zeros = np.zeros(_PARTS * len(ages))
        return (
            tokens,
            np.concatenate([np.zeros_like(ages), np.tile(ended / _PARTS, _PARTS)]),
            np.concatenate([n - ended, zeros]),
        )

    def _correct(self, tokens_now: float) -> None:
        """Compare the forecast for this moment with what the server says; only right after it said
        it.
        """
        assert self.metrics is not None
        metrics = self.metrics
        if self._forecast_at - self._polled_at < 0.1 and metrics.waiting <= 0.1 * metrics.running:
            self._foreign += 0.5 * (metrics.usage * metrics.capacity - tokens_now - self._foreign)


def _buckets(ages: Array, alive: Array) -> tuple[Array, Array, Array]:
    """Return (mean age, samples, requests) of requests of about the same age, for each bucket that
    is not empty.
    """
    number = (ages * ((_BUCKETS - 1) / ages.max(initial=1.0))).astype(int)
    requests = np.bincount(number, minlength=_BUCKETS)
    weight = np.bincount(number, alive, _BUCKETS)
    some = requests > 0
    samples: Array = weight[some].astype(np.float64)
    age: Array = np.bincount(number, alive * ages, _BUCKETS)[some] / samples
    counts: Array = requests[some].astype(np.float64)
    return age, samples, counts
