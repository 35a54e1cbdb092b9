"""Check a server against the canary: tokens that the trainer stored in the checkpoint with its own
log-probabilities.

Two requests, since each sees what the other cannot:

- a short greedy generation that continues the canary, which *reads* the prefix cache. The canary is
  sent to the server before the reload as well, so that keys and values of the old weights would be
  found there if the cache were not emptied;
- the prompt's own log-probabilities, which skip the prefix cache and so show the weights alone, at
  every position.

A change in any weight that all tokens pass through changes them; a row of the embeddings that no
token of the canary uses does not, and a tiny change may stay within the tolerance. So what a worker
holds is also compared with the files (`ttrl.weights.verify`).
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrl.errors import ModelFolderError, ServerError
from ttrl.records import CANARY_FILE
from ttrl.server.connection import ServerConnection


@dataclass(frozen=True)
class Tolerance:
    """How far |server − trainer| may be, in nats: at any position, on average, and at the 99th
    percentile.
    """

    maximum: float
    mean: float
    p99: float


# float32: the same numbers but for the order of additions; 1e-5 is typical, and one step of
# training moves more than 1e-3.
FLOAT32 = Tolerance(maximum=1e-3, mean=1e-3, p99=1e-3)
# Half precision rounds on both sides, by how much depends on the model, and unlikely tokens move
# most; without a measure of it:
HALF = Tolerance(maximum=math.inf, mean=0.15, p99=1.5)
# With one: |bf16 - fp32| of the trainer. Trainer and server round differently, so they are about √2
# times as far apart. For SmolLM2-135M 1.3 to 1.7 times on average (0.050 / 0.035 nats on a text)
# and 1.3 to 2.5 at the 99th percentile, where a layer's values put to zero give 21 and 18 times.
_TIMES_MEAN = 3.0
_TIMES_P99 = 4.0
# Models that hardly round: other kernels may round more.
_LEAST = Tolerance(maximum=math.inf, mean=0.01, p99=0.1)


@dataclass(frozen=True)
class Canary:
    """What the trainer computed. logprobs[t] is that of token t given the tokens before it; the
    first is None.
    """

    dtype: str
    token_ids: list[int]
    logprobs: list[float | None]
    greedy_token_ids: list[int]
    greedy_logprobs: list[float]
    greedy_margins: list[float]
    """Log-probability of the most likely token minus that of the second, at each greedy step."""
    half_precision: Tolerance | None = None
    """What half precision costs on this model: |bf16 - fp32| of the trainer, at the start of the
    run.
    """
    weights: dict[str, str] = field(default_factory=dict)
    """Name of a tensor in the checkpoint → SHA-256 of its bytes, as the trainer wrote it; empty if
    none were recorded.
    """

    @classmethod
    def load(cls, checkpoint_folder: str | os.PathLike[str]) -> "Canary":
        """Read canary.json. Raises ModelFolderError if it is missing or damaged."""
        path = Path(checkpoint_folder, CANARY_FILE)
        way_out = (
            "without it nobody can tell whether a server computes with these weights; train the "
            "checkpoint again"
        )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelFolderError(f"{path} does not exist; {way_out}") from None
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{path} cannot be read ({error}); {way_out}") from error
        try:
            return cls._checked(content)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFolderError(
                f"{path} is damaged ({type(error).__name__}: {error}); {way_out}"
            ) from error

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Canary":
        """Return what a trainer said of weights that are no files yet. Raises ModelFolderError."""
        try:
            return cls._checked(content)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFolderError(
                f"the trainer's canary is damaged ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _checked(cls, content: dict[str, Any]) -> "Canary":
        if content["schema"] != 1:
            raise ValueError(f"schema {content['schema']!r}, this version reads 1")
        canary = cls(
            dtype=str(content["dtype"]),
            token_ids=[int(token) for token in content["token_ids"]],
            logprobs=[None if value is None else float(value) for value in content["logprobs"]],
            greedy_token_ids=[int(token) for token in content["greedy_token_ids"]],
            greedy_logprobs=[float(value) for value in content["greedy_logprobs"]],
            greedy_margins=[float(value) for value in content["greedy_margins"]],
            half_precision=_measured(content.get("half_precision")),
            weights={
                str(name): str(value) for name, value in dict(content.get("weights") or {}).items()
            },
        )
        if len(canary.token_ids) < 2 or len(canary.token_ids) != len(canary.logprobs):
            raise ValueError(
                f"{len(canary.token_ids)} token ids and {len(canary.logprobs)} logprobs; at "
                "least 2, and as many of each"
            )
        lengths = {
            len(canary.greedy_token_ids),
            len(canary.greedy_logprobs),
            len(canary.greedy_margins),
        }
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"greedy lists of lengths {sorted(lengths)}; they must have one length, at least 1"
            )
        numbers = [*canary.logprobs[1:], *canary.greedy_logprobs, *canary.greedy_margins]
        if not all(value is not None and math.isfinite(value) for value in numbers):
            raise ValueError("a log-probability that is not a finite number")
        return canary


def _measured(content: dict[str, Any] | None) -> Tolerance | None:
    if content is None:
        return None
    mean = float(content["mean"])
    p99 = float(content["p99"])
    if not (0 <= mean < math.inf and 0 <= p99 < math.inf):
        raise ValueError(
            f"half_precision: mean {mean} and p99 {p99} nats; both must be finite and not negative"
        )
    return Tolerance(maximum=math.inf, mean=mean, p99=p99)


def tolerance_for(canary: Canary, server_dtype: str | None) -> tuple[str, Tolerance]:
    """Return the precision in which the two are compared, "float32" or "half", and its limits."""
    if server_dtype == canary.dtype == "float32":
        return "float32", FLOAT32
    # The trainer rounds what the server does not.
    known = canary.half_precision
    if known is None or canary.dtype == "nf4":
        return "half", HALF
    mean = max(_TIMES_MEAN * known.mean, _LEAST.mean)
    p99 = max(_TIMES_P99 * known.p99, _LEAST.p99)
    return "half", Tolerance(maximum=math.inf, mean=mean, p99=p99)


@dataclass(frozen=True)
class CanaryReport:
    """How close the server came. Differences are |server − trainer| in nats over all compared
    positions.
    """

    passed: bool
    max_difference: float
    problem: str | None
    """Where and by how much it failed, with both numbers."""
    stale: bool = False
    """Whether it took keys and values of old weights from its prefix cache."""


def check_canary(
    server: ServerConnection, canary: Canary, *, cache_is_empty: bool = False
) -> CanaryReport:
    """Compare the server's log-probabilities of the canary with the trainer's; raises only if the
    server does not answer.

    cache_is_empty: its prefix cache was emptied just now, so tokens that it still takes from there
    are of old weights. In half precision the numbers alone may not show that.
    """
    name, tolerance = tolerance_for(canary, server.dtype)
    # The generation first: once the other request has recomputed the prompt, its blocks could hide
    # stale ones in the cache.
    greedy_ids, greedy_logprobs, cached = _greedy_continuation(server, canary)
    prompt_logprobs = _prompt_logprobs(server, canary)

    rows: list[tuple[str, float, float]] = []  # where, server's, trainer's
    for position in range(1, len(canary.token_ids)):
        where = f"prompt position {position} (token {canary.token_ids[position]})"
        rows.append((where, prompt_logprobs[position], canary.logprobs[position] or 0.0))
    token_problem = None
    for step, (token, expected) in enumerate(zip(greedy_ids, canary.greedy_token_ids, strict=True)):
        if token != expected:
            margin = canary.greedy_margins[step]
            if margin > min(tolerance.maximum, tolerance.p99):
                token_problem = (
                    f"greedy token {step} after {len(canary.token_ids)} prompt tokens: server "
                    f"{token} (logprob "
                    f"{greedy_logprobs[step]:.6f}), trainer {expected} (logprob "
                    f"{canary.greedy_logprobs[step]:.6f}, {margin:.6f} "
                    "above its second)"
                )
            # A tie may be broken either way, but what follows another token cannot be compared.
            break
        rows.append(
            (f"greedy token {step} ({token})", greedy_logprobs[step], canary.greedy_logprobs[step])
        )
    stale = cache_is_empty and cached > 0
    if stale:
        token_problem = token_problem or (
            f"{cached} of the canary's {len(canary.token_ids)} tokens came from the prefix "
            "cache, which was emptied: keys and "
            "values of the old weights"
        )
    return _compare(rows, tolerance, name, token_problem, stale)


def _compare(
    rows: Sequence[tuple[str, float, float]],
    tolerance: Tolerance,
    name: str,
    token_problem: str | None,
    stale: bool,
) -> CanaryReport:
    differences = [
        abs(server - trainer) if math.isfinite(server) else math.inf for _, server, trainer in rows
    ]
    mean = sum(differences) / len(differences)
    largest = max(differences)
    p99 = sorted(differences)[min(len(differences) - 1, math.ceil(0.99 * len(differences)) - 1)]
    limits = [
        ("largest", largest, tolerance.maximum),
        ("mean", mean, tolerance.mean),
        ("99th percentile", p99, tolerance.p99),
    ]
    exceeded = next(((kind, value, limit) for kind, value, limit in limits if value > limit), None)
    problem = token_problem
    if exceeded is not None:
        worst = differences.index(largest)
        where, server, trainer = rows[worst]
        problem = (
            f"{exceeded[0]} |logprob difference| of the canary {exceeded[1]:.6g} > "
            f"{exceeded[2]:g} ({name}); it is largest at "
            f"{where}: server {server:.6f}, trainer {trainer:.6f}"
        )
    return CanaryReport(problem is None, largest, problem, stale)


def _completion(server: ServerConnection, canary: Canary, **parameters: Any) -> dict[str, Any]:
    body = {
        "model": server.model_name,
        "prompt": canary.token_ids,
        "temperature": 0.0,
        **parameters,
    }
    answer: dict[str, Any] = server.request("POST", "/v1/completions", body)
    return answer


def leave_in_cache(server: ServerConnection, canary: Canary) -> None:
    """Make the server compute the canary, so that its prefix cache has the keys and values of the
    weights that it has now.
    """
    _completion(server, canary, max_tokens=1)


def _greedy_continuation(
    server: ServerConnection, canary: Canary
) -> tuple[list[int], list[float], int]:
    """Return token ids and log-probabilities of the greedy continuation of the canary, and how many
    of the canary's tokens came from the prefix cache (0 where the server does not say)."""
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
