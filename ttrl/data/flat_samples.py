"""All samples of a pack end to end, as a few long arrays: what packing reads from TokenizedResults, checked once.

The lists of a sample are read as little as possible: converting Python lists is the largest part of the time that packing takes.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ttrl.errors import PackError
from ttrl.records import TokenizedResult

TooLong: TypeAlias = Literal["drop", "error", "truncate", "extend"]


@dataclass
class FlatSamples:
    """N tokens of S samples. Offsets count from a sample's first token."""

    tokens: np.ndarray
    """int32 [N]."""
    trained: np.ndarray
    """bool [N]: the assistant mask."""
    logprobs: np.ndarray
    """float32 [N]; NaN up to the first token that was generated or is trained."""
    versions: np.ndarray | None
    """int32 [N]: of the policy that sampled each token, meaningless for the prompt; None where every sample has only one."""
    start: np.ndarray
    """int64 [S]: the place of each sample's first token in the arrays above."""
    shared: np.ndarray
    """int64 [S]: tokens that other samples may share: the prompt, or what precedes the first trained token where that is less."""
    end: np.ndarray
    """int64 [S]: one past the offset of the last trained token; 0 where nothing is trained."""
    num_trained: np.ndarray
    """int64 [S]."""
    version: np.ndarray
    """int32 [S]."""
    advantages: np.ndarray
    """float32 [S]."""


def where(result: TokenizedResult) -> str:
    """How messages call a sample."""
    return f"task {result.task_id!r}, sample {result.sample}"


def flatten(results: Sequence[TokenizedResult]) -> FlatSamples:
    """Joins the lists of all samples. Raises PackError, naming sample and token, where they do not belong together."""
    for result in results:
        _check_lengths(result)
    lengths = np.array([len(result.token_ids) for result in results], dtype=np.int64)
    start = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    tokens = np.empty(total, dtype=np.int32)
    trained = np.empty(total, dtype=np.bool_)
    logprobs = np.full(total, np.nan, dtype=np.float32)
    shared, end, num_trained = [], [], []
    counting = list(range(int(lengths.max())))
    prompt: list[int] = []  # of the sample before, which often is this one's too; comparing is faster than converting
    converted = array("i")
    for result, begin, length in zip(results, start.tolist(), lengths.tolist(), strict=True):
        stop, border = begin + length, begin + result.prompt_length
        try:
            if result.token_ids[: result.prompt_length] != prompt:
                prompt = result.token_ids[: result.prompt_length]
                converted = array("i", prompt)
            tokens[begin:border] = converted
            tokens[border:stop] = array("i", result.token_ids[result.prompt_length :])
        except OverflowError as error:
            raise PackError(f"{where(result)}: a token id that does not fit into 32 bits") from error
        mask = _mask_bytes(result.assistant_mask)
        trained[begin:stop] = np.frombuffer(mask, dtype=np.bool_)
        first = mask.find(1)
        if first == 0:
            raise PackError(f"{where(result)}, token 0: a trained first token, which nothing predicts")
        before = result.prompt_length if first < 0 else min(first, result.prompt_length)
        logprobs[begin + before : stop] = array("f", result.logprobs[before:])
        shared.append(before)
        end.append(mask.rfind(1) + 1)
        num_trained.append(mask.count(1))
        if result.input_pos != counting[:length]:
            wrong = [offset for offset, position in enumerate(result.input_pos) if position != offset]
            if wrong:
                raise PackError(f"{where(result)}, token {wrong[0]}: input_pos that is not 0, 1, 2, …")
        if not math.isfinite(result.advantage):
            raise PackError(f"{where(result)}: an advantage that is not finite")
    _refuse(results, start, tokens < 0, "a negative token id")
    _refuse(results, start, np.isinf(logprobs), "an infinite logprob (NaN marks an unknown one)")
    return FlatSamples(
        tokens=tokens,
        trained=trained,
        logprobs=logprobs,
        versions=_token_versions(results, start, lengths),
        start=start,
        shared=np.array(shared, dtype=np.int64),
        end=np.array(end, dtype=np.int64),
        num_trained=np.array(num_trained, dtype=np.int64),
        version=np.array([result.weights_version for result in results], dtype=np.int32),
        advantages=np.array([result.advantage for result in results], dtype=np.float32),
    )


def _check_lengths(result: TokenizedResult) -> None:
    length = len(result.token_ids)
    if not len(result.assistant_mask) == len(result.input_pos) == len(result.logprobs) == length:
        raise PackError(
            f"{where(result)}: {length} token ids, but {len(result.assistant_mask)} assistant_mask, {len(result.input_pos)} "
            f"input_pos and {len(result.logprobs)} logprobs; all have one entry per token"
        )
    if result.token_versions is not None and len(result.token_versions) != length - result.prompt_length:
        raise PackError(
            f"{where(result)}: {len(result.token_versions)} token_versions for {length - result.prompt_length} completion "
            "tokens; there is one for each, or None where all are of one version"
        )
    if result.token_advantages is not None:
        raise PackError(f"{where(result)}: token_advantages, which packing does not know yet; give one `advantage` per sample")
    if not 1 <= result.prompt_length <= length:
        raise PackError(
            f"{where(result)}: prompt_length {result.prompt_length} of {length} tokens; a sample needs a prompt of at least "
            "one token, as the first generated token is predicted from the prompt's last"
        )


def _mask_bytes(mask: Sequence[bool]) -> bytes:
    """One byte per token, 0 or 1."""
    try:
        found = bytes(mask)  # the fast way for lists of Python's bools
    except (TypeError, ValueError):
        return bytes(map(bool, mask))
    return found if not found.strip(b"\0\1") else bytes(map(bool, found))


def _refuse(results: Sequence[TokenizedResult], start: np.ndarray, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        owner = int(np.searchsorted(start, at, side="right")) - 1
        raise PackError(f"{where(results[owner])}, token {at - start[owner]}: {what}")


def _token_versions(results: Sequence[TokenizedResult], start: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    if all(result.token_versions is None for result in results):
        return None
    versions = np.repeat(np.array([result.weights_version for result in results], dtype=np.int32), lengths)
    for result, begin, length in zip(results, start.tolist(), lengths.tolist(), strict=True):
        if result.token_versions is not None:
            versions[begin + result.prompt_length : begin + length] = result.token_versions
    return versions


def select(
    results: Sequence[TokenizedResult], flat: FlatSamples, seq_len: int, too_long: TooLong
) -> tuple[np.ndarray, dict[str, int]]:
    """Numbers of the samples to pack, and counts of the others by reason, as `PackedTensors.dropped` has them.

    "truncate" shortens the samples that are too long in `flat`: they end at the last trained token that still is a label of a
    row, which leaves nothing of a sample whose prompt alone is longer than that.
    """
    untrained = flat.num_trained == 0
    positions = flat.end - 1  # what a sample takes alone: everything up to the position that predicts its last trained token
    long = positions > seq_len
    if too_long == "error" and long.any():
        first = int(long.argmax())
        raise PackError(
            f"{where(results[first])} takes {positions[first]} positions (prompt {results[first].prompt_length} tokens), but "
            f"seq_len is {seq_len}, and {int(long.sum())} of {len(results)} samples are too long; raise seq_len to at least "
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
    return np.flatnonzero(~untrained & ~long), {"too_long": int(long.sum()), "no_trained_token": int(untrained.sum()), **extra}
