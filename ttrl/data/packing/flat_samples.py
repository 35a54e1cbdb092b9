"""Join all samples of a pack end to end in a few long arrays, checked once, as packing's input from
TokenizedResults.

Python lists are read as little as possible: their conversion takes most of packing's time. Samples
with arrays (array.array or numpy) are copied, at almost no cost.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ttrl.configs.data import TooLong
from ttrl.errors import PackError
from ttrl.records import TokenizedResult

_KINDS = {
    "token_ids": "whole numbers of at most 32 bits",
    "logprobs": "numbers, NaN where unknown",
    "token_advantages": "numbers",
    "token_versions": "whole numbers of at most 32 bits",
}


@dataclass
class FlatSamples:
    """N tokens of S samples. Offsets count from a sample's first token."""

    tokens: np.ndarray
    """int32 [N]."""
    trained: np.ndarray
    """bool [N]: the assistant mask."""
    logprobs: np.ndarray
    """float32 [N]; NaN up to the first generated or trained token."""
    versions: np.ndarray | None
    """int32 [N]: the policy version behind each token, meaningless for the prompt; None if every
    sample has only one.
    """
    start: np.ndarray
    """int64 [S]: the place of each sample's first token in the arrays above."""
    shared: np.ndarray
    """int64 [S]: tokens open to sharing: the prompt, or only those before the first trained token
    if fewer.
    """
    first: np.ndarray
    """int64 [S]: the offset of the first trained token; the sample's length if nothing
    is trained.
    """
    end: np.ndarray
    """int64 [S]: one past the offset of the last trained token; 0 if nothing is trained."""
    num_trained: np.ndarray
    """int64 [S]."""
    version: np.ndarray
    """int32 [S]."""
    advantages: np.ndarray
    """float32 [S]."""
    token_advantages: np.ndarray | None
    """float32 [N], 0 at untrained positions; None if no sample has any of its own."""
    experts: np.ndarray | None = None
    """int16 [N, layers, experts per token], -1 for unknown; None if no sample has any."""


def flatten(results: Sequence[TokenizedResult]) -> FlatSamples:
    """Join the lists of all samples. Raises PackError, naming sample and token, if they do not
    belong together.
    """
    for result in results:
        _check_lengths(result)
    lengths = np.array([len(result.token_ids) for result in results], dtype=np.int64)
    start = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    tokens = np.empty(total, dtype=np.int32)
    trained = np.empty(total, dtype=np.bool_)
    logprobs = np.empty(total, dtype=np.float32)
    spans: list[tuple[int, int, int, int]] = []
    counting = list(range(int(lengths.max())))
    # Often the next sample's too; comparing is faster than converting.
    last_prompt: list[int] = []
    last_border = 0
    for result, begin, length in zip(results, start.tolist(), lengths.tolist(), strict=True):
        border = begin + result.prompt_length
        ids = result.token_ids
        if isinstance(ids, list):
            prompt = ids[: result.prompt_length]
            if prompt == last_prompt:
                tokens[begin:border] = tokens[last_border - len(prompt) : last_border]
            else:
                _convert(prompt, tokens, begin, result, "token_ids")
                last_prompt = prompt
                last_border = border
            _convert(ids[result.prompt_length :], tokens, border, result, "token_ids")
        else:
            _convert(ids, tokens, begin, result, "token_ids")
        stop = begin + length
        first, end, num_trained = _write_mask(
            trained[begin:stop], result.assistant_mask, result.prompt_length
        )
        if first == 0:
            raise PackError(
                f"{result.where}, token 0: a trained first token; no earlier token predicts it"
            )
        before = min(first, result.prompt_length)
        logprobs[begin : begin + before] = np.nan
        _convert(result.logprobs[before:], logprobs, begin + before, result, "logprobs")
        spans.append((before, first, end, num_trained))
        _check_positions(result, counting)
        if not math.isfinite(result.advantage):
            raise PackError(f"{result.where}: its advantage is not finite")
    if tokens.min() < 0:
        _refuse(results, start, tokens < 0, "a negative token id")
    _refuse(results, start, np.isinf(logprobs), "an infinite logprob (NaN marks an unknown one)")
    shared, first_trained, ends, counts = np.array(spans, dtype=np.int64).T
    version = np.array([result.weights_version for result in results], dtype=np.int32)
    advantages = np.array([result.advantage for result in results], dtype=np.float32)
    token_advantages = _of_completions(results, start, lengths, "token_advantages", advantages)
    if token_advantages is not None:
        token_advantages[~trained] = 0.0  # other tokens need none
        _refuse(results, start, ~np.isfinite(token_advantages), "a non-finite token_advantage")
    return FlatSamples(
        tokens=tokens,
        trained=trained,
        logprobs=logprobs,
        versions=_of_completions(results, start, lengths, "token_versions", version),
        start=start,
        shared=shared,
        first=first_trained,
        end=ends.copy(),
        num_trained=counts.copy(),
        version=version,
        advantages=advantages,
        token_advantages=token_advantages,
        experts=_experts(results, start.tolist(), total),
    )


def _experts(
    results: Sequence[TokenizedResult], start: Sequence[int], total: int
) -> np.ndarray | None:
    """Join the experts of all samples. Raises PackError for arrays of other shapes."""
    shapes = {result.experts.shape[1:] for result in results if result.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        found = (
            "samples with experts of different shapes [layers, experts per token]: "
            f"{sorted(shapes)}"
        )
        raise PackError(f"{found}; pack samples of one model")
    joined = np.full((total, *shapes.pop()), -1, np.int16)
    for result, begin in zip(results, start, strict=True):
        if result.experts is None:
            continue
        if len(result.experts) != len(result.token_ids):
            raise PackError(
                f"{result.where}: {len(result.token_ids)} token ids, but experts of "
                f"{len(result.experts)} tokens"
            )
        joined[begin : begin + len(result.experts)] = result.experts
    return joined


def _check_lengths(result: TokenizedResult) -> None:
    length = len(result.token_ids)
    if not len(result.assistant_mask) == len(result.input_pos) == len(result.logprobs) == length:
        raise PackError(
            f"{result.where}: {length} token ids, but {len(result.assistant_mask)} "
            f"assistant_mask, {len(result.input_pos)} "
            f"input_pos and {len(result.logprobs)} logprobs; all have one entry per token"
        )
    completion = length - result.prompt_length
    for name, values, same in (
        ("token_versions", result.token_versions, "are of one version"),
        ("token_advantages", result.token_advantages, "have the sample's `advantage`"),
    ):
        if values is not None and len(values) != completion:
            raise PackError(
                f"{result.where}: {len(values)} {name} for {completion} completion tokens; give "
                f"one each, or None if all {same}"
            )
    if not 1 <= result.prompt_length <= length:
        raise PackError(
            f"{result.where}: prompt_length {result.prompt_length} of {length} tokens; a sample "
            "needs a prompt of at least one token, because the last one predicts the first "
            "generated token"
        )


def _convert(
    values: Sequence[float], into: np.ndarray, at: int, result: TokenizedResult, name: str
) -> None:
    """Write numbers into an int32 or float32 array; too large floats become infinite. Raises
    PackError.
    """
    try:
        if isinstance(values, list):
            try:  # twice as fast as numpy
                struct.pack_into(
                    f"{len(values)}{into.dtype.char}", into.data, at * into.itemsize, *values
                )
                return
            except OverflowError:
                pass
        found = np.asarray(values)
        if not len(found):
            return
        if into.dtype.kind == "i":
            if found.dtype.kind not in "iu":
                raise TypeError(f"an array of {found.dtype}")
            if found.min() < -(2**31) or found.max() >= 2**31:
                raise OverflowError("a number of more than 32 bits")
        with np.errstate(over="ignore"):
            into[at : at + len(found)] = found
    except (struct.error, OverflowError, TypeError, ValueError) as error:
        raise PackError(f"{result.where}: {name} must be {_KINDS[name]} ({error})") from error


def _write_mask(into: np.ndarray, mask: Sequence[bool], prompt_length: int) -> tuple[int, int, int]:
    """Write an assistant mask; return the first trained offset, the offset after the last (length,
    0 for none), and their number.
    """
    length = len(mask)
    if isinstance(mask, list):
        # A single fully trained turn is recognised by identity with False and True only.
        given = mask[:prompt_length]
        generated = mask[prompt_length:]
        if (
            generated
            and given.count(False) == prompt_length
            and generated.count(True) == len(generated)
        ):
            into[:prompt_length] = False
            into[prompt_length:] = True
            return prompt_length, length, len(generated)
        into[:] = list(map(bool, mask))
    else:
        into[:] = np.asarray(mask).astype(np.bool_, copy=False)
    count = int(np.count_nonzero(into))
    if not count:
        return length, 0, 0
    return int(into.argmax()), length if into[-1] else into.tobytes().rfind(1) + 1, count


def _check_positions(result: TokenizedResult, counting: list[int]) -> None:
    """Raise PackError unless input_pos is 0, 1, 2, …"""
    positions = result.input_pos
    length = len(result.input_pos)
    if isinstance(positions, range):
        right = positions == range(length)
    elif isinstance(positions, list):
        right = positions == counting[:length]
    else:
        right = np.array_equal(positions, np.arange(length))
    if not right:
        wrong = next(offset for offset, position in enumerate(positions) if position != offset)
        raise PackError(f"{result.where}, token {wrong}: input_pos must be 0, 1, 2, …")


def _refuse(
    results: Sequence[TokenizedResult], start: np.ndarray, wrong: np.ndarray, what: str
) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        owner = int(np.searchsorted(start, at, side="right")) - 1
        raise PackError(f"{results[owner].where}, token {at - start[owner]}: {what}")


def _of_completions(
    results: Sequence[TokenizedResult],
    start: np.ndarray,
    lengths: np.ndarray,
    name: str,
    of_sample: np.ndarray,
) -> np.ndarray | None:
    """Join the lists `name` of the completions; None if no sample has one. Other places hold
    `of_sample`.
    """
    lists: list[Any] = [getattr(result, name) for result in results]
    if all(values is None for values in lists):
        return None
    joined = np.repeat(of_sample, lengths)
    for result, values, begin in zip(results, lists, start.tolist(), strict=True):
        if values is not None:
            _convert(values, joined, begin + result.prompt_length, result, name)
    return joined


def select(
    results: Sequence[TokenizedResult], flat: FlatSamples, seq_len: int, too_long: TooLong
) -> tuple[np.ndarray, dict[str, int]]:
    """Return the numbers of the samples to pack, and counts of the others by reason, as in
    `PackedTensors.dropped`.

    "truncate" shortens too long samples in `flat`: they end at the last trained token still able to
    be a row's label. Nothing is left of a sample with a longer prompt.
    """
    untrained = flat.num_trained == 0
    # A sample's own size: everything up to the position predicting its last trained token.
    positions = flat.end - 1
    long = positions > seq_len
    if too_long == "error" and long.any():
        first = int(long.argmax())
        raise PackError(
            f"{results[first].where} takes {positions[first]} positions (prompt "
            f"{results[first].prompt_length} tokens), but seq_len is {seq_len}; {int(long.sum())} "
            f"of {len(results)} samples are too long. Raise seq_len to at least "
            f"{int(positions.max())}, or choose too_long='drop', 'truncate' or 'extend'"
        )
    extra = {}
    if too_long == "truncate":
        for number in np.flatnonzero(long).tolist():
            begin = int(flat.start[number])
            left = np.flatnonzero(flat.trained[begin : begin + seq_len + 1])
            flat.end[number] = left[-1] + 1 if len(left) else 0
            flat.num_trained[number] = len(left)
        extra["truncated"] = int((long & (flat.num_trained > 0)).sum())
        long &= flat.num_trained == 0
    elif too_long == "extend":
        extra["extended"] = int(long.sum())
        long[:] = False
    return np.flatnonzero(~untrained & ~long), {
        "too_long": int(long.sum()),
        "no_trained_token": int(untrained.sum()),
        **extra,
    }
