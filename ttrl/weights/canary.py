"""Check a server against the canary: the checkpoint's stored tokens with the trainer's
log-probabilities.

Two requests complement each other:

- a short greedy generation after the canary. It *reads* the prefix cache. The server also gets the
  canary before the reload, so a cache not emptied would still have keys and values of the old
  weights;
- the prompt's own log-probabilities. They skip the prefix cache and so show only the weights, at
  every position.

A change in any weight used by all tokens changes them; an embeddings row unused by the canary does
not, and a tiny change may stay within the tolerance. So a worker's weights are also compared with
the files (`ttrl.weights.verify`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ttrl.errors import ServerError
from ttrl.records import Canary
from ttrl.server.connection import ServerConnection


@dataclass(frozen=True)
class Tolerance:
    """How far |server − trainer| may be, in nats: on average, at the 99th percentile, and at any
    position.
    """

    mean: float
    p99: float
    maximum: float = math.inf


# float32: the same numbers but for the order of additions; 1e-5 is typical, and one step of
# training moves more than 1e-3.
FLOAT32 = Tolerance(maximum=1e-3, mean=1e-3, p99=1e-3)
# Half precision rounds on both sides, by how much depends on the model, and unlikely tokens move
# most; without a measure of it:
HALF = Tolerance(mean=0.15, p99=1.5)
# With one: |bf16 - fp32| of the trainer. Trainer and server round differently, so they are about √2
# times as far apart. For SmolLM2-135M 1.3 to 1.7 times on average (0.050 / 0.035 nats on a text)
# and 1.3 to 2.5 at the 99th percentile, against 21 and 18 times for a layer with its values put to
# zero.
_TIMES_MEAN = 3.0
_TIMES_P99 = 4.0
# Models with hardly any rounding: other kernels may round more.
_LEAST = Tolerance(mean=0.01, p99=0.1)


def tolerance_for(canary: Canary, server_dtype: str | None) -> tuple[str, Tolerance]:
    """Return the precision of the comparison, "float32" or "half", and its limits."""
    if server_dtype == canary.dtype == "float32":
        return "float32", FLOAT32
    # The trainer rounds some values the server does not.
    known = canary.half_precision
    if known is None or canary.dtype == "nf4":
        return "half", HALF
    mean = max(_TIMES_MEAN * known.mean, _LEAST.mean)
    p99 = max(_TIMES_P99 * known.p99, _LEAST.p99)
    return "half", Tolerance(mean, p99)


@dataclass(frozen=True)
class CanaryReport:
    """How close the server came. Differences are |server − trainer| in nats over all compared
    positions.
    """

    max_difference: float
    problem: str | None
    """Place and size of the failure, with both numbers."""
    stale: bool
    """Whether it took keys and values of old weights from its prefix cache."""

    @property
    def passed(self) -> bool:
        """Return whether the server computes with these weights."""
        return self.problem is None


def check_canary(
    server: ServerConnection, canary: Canary, *, cache_is_empty: bool = False
) -> CanaryReport:
    """Compare the server's log-probabilities of the canary with the trainer's; raises only if the
    server does not answer.

    cache_is_empty: its prefix cache was emptied just now, so any tokens still taken from there are
    of old weights. In half precision the numbers may not show it.
    """
    name, tolerance = tolerance_for(canary, server.dtype)
    # The generation first: once the other request has recomputed the prompt, its blocks could hide
    # stale ones in the cache.
    greedy_ids, greedy_logprobs, cached = _greedy_continuation(server, canary)
    prompt_logprobs = _prompt_logprobs(server, canary)

    rows: list[tuple[str, float, float]] = []  # place, server's, trainer's
    for position in range(1, len(canary.token_ids)):
        where = f"prompt position {position} (token {canary.token_ids[position]})"
        rows.append((where, prompt_logprobs[position], canary.logprobs[position] or 0.0))
    problem = None
    for step, (token, expected) in enumerate(zip(greedy_ids, canary.greedy_token_ids, strict=True)):
        if token != expected:
            margin = canary.greedy_margins[step]
            if margin > min(tolerance.maximum, tolerance.p99):
                problem = (
                    f"greedy token {step} after {len(canary.token_ids)} prompt tokens: server "
                    f"{token} (logprob {greedy_logprobs[step]:.6f}), trainer {expected} (logprob "
                    f"{canary.greedy_logprobs[step]:.6f}, {margin:.6f} above its second)"
                )
            # A tie may be broken either way, but the text after another token cannot be compared.
            break
        rows.append(
            (f"greedy token {step} ({token})", greedy_logprobs[step], canary.greedy_logprobs[step])
        )
    stale = cache_is_empty and cached > 0
    if stale and problem is None:
        problem = (
            f"{cached} of the canary's {len(canary.token_ids)} tokens came from the emptied prefix "
            "cache: keys and values of the old weights"
        )
    differences = [
        abs(served - trained) if math.isfinite(served) else math.inf for _, served, trained in rows
    ]
    largest = max(differences)
    p99 = sorted(differences)[math.ceil(0.99 * len(differences)) - 1]
    limits = [
        ("largest", largest, tolerance.maximum),
        ("mean", sum(differences) / len(differences), tolerance.mean),
        ("99th percentile", p99, tolerance.p99),
    ]
    for kind, value, limit in limits:
        if value > limit:
            where, served, trained = rows[differences.index(largest)]
            problem = (
                f"{kind} |logprob difference| of the canary {value:.6g} > {limit:g} ({name}); it "
                f"is largest at {where}: server {served:.6f}, trainer {trained:.6f}"
            )
            break
    return CanaryReport(largest, problem, stale)


def _completion(server: ServerConnection, canary: Canary, **parameters: Any) -> Mapping[str, Any]:
    body = {
        "model": server.model_name,
        "prompt": canary.token_ids,
        "temperature": 0.0,
        **parameters,
    }
    answer: Mapping[str, Any] = server.request("POST", "/v1/completions", body)
    return answer


def leave_in_cache(server: ServerConnection, canary: Canary) -> None:
    """Make the server compute the canary, to fill its prefix cache with keys and values of its
    current weights.
    """
    _completion(server, canary, max_tokens=1)


def _greedy_continuation(
    server: ServerConnection, canary: Canary
) -> tuple[list[int], list[float], int]:
    """Return token ids and log-probabilities of the canary's greedy continuation, and the number of
    the canary's tokens from the prefix cache (0 if the server does not say)."""
    count = len(canary.greedy_token_ids)
    answer = _completion(
        server, canary, max_tokens=count, logprobs=0, ignore_eos=True, return_token_ids=True
    )
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    choice = answer["choices"][0]
    tokens = choice["token_ids"]
    logprobs = choice["logprobs"]["token_logprobs"]
    if len(tokens) != count or len(logprobs) != count:
        raise ServerError(
            f"the canary: asked for {count} tokens after {len(canary.token_ids)}, got "
            f"{len(tokens)} ids and {len(logprobs)} "
            "logprobs; together they must fit into the server's max_model_len"
        )
    return tokens, logprobs, details.get("cached_tokens") or 0


def _prompt_logprobs(server: ServerConnection, canary: Canary) -> list[float]:
    """Return the log-probability of each of the canary's tokens given the tokens before it; NaN for
    the first.
    """
    entries = _completion(server, canary, max_tokens=1, prompt_logprobs=0)["choices"][0][
        "prompt_logprobs"
    ]
    if len(entries) != len(canary.token_ids):
        raise ServerError(
            f"the canary: {len(canary.token_ids)} tokens, but {len(entries)} prompt logprobs"
        )
    logprobs = [math.nan]
    for token, entry in zip(canary.token_ids[1:], entries[1:], strict=True):
        logprobs.append(float(entry[str(token)]["logprob"]))
    return logprobs
