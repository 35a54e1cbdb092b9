"""From token sequences to packed tensors: rows of prompt groups in which a prompt is stored once for all its completions.

The rules of the format, all of which `PackedTensors.check` tests on every pack:

- A prompt is stored without its last token, and every completion starts with its own copy of that token (same position, so the
  same keys and values). The first label of every completion therefore has the right context. A prompt of one token leaves no
  group: its completions are roots. A prompt with one completion in its row is merged with it.
- A sample is stored up to the position that predicts its last trained token. That last token is a label, never an input, as
  nothing is predicted from it; untrained tokens behind it (a template's newline) are left out for the same reason.
- Nothing is added: the end-of-turn token is trained where the server's ids contain it, that is, where it was sampled.

A sample of n tokens whose last token is trained takes n - 1 positions, alone in its row.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from ttrl.data.packed import PackedTensors
from ttrl.data.packed_format import IGNORE_LABEL, Aggregation, PackedSample
from ttrl.data.placement import place_groups
from ttrl.errors import PackError
from ttrl.records import TokenizedResult

__all__ = ["IGNORE_LABEL", "PackedSample", "PackedTensors", "packed_tensors_from_tokenized_results"]

logger = logging.getLogger(__name__)


def packed_tensors_from_tokenized_results(
    results: Sequence[TokenizedResult],
    *,
    seq_len: int,
    pad_id: int,
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    too_long: Literal["drop", "error"] = "drop",
) -> PackedTensors:
    """Packs samples into rows of `seq_len` positions; results with the same prompt ids share it, whatever their order.

    aggregation decides `weights`: "token" and "constant" 1, "sequence" 1 / the number of trained tokens of the sample;
    `constant_length` (tokens) is the fixed length of "constant". too_long says what becomes of a sample that does not fit into a
    row even alone: "drop" counts it in `.dropped["too_long"]`, "error" raises. Samples without a trained token are counted in
    `.dropped["no_trained_token"]`. The sample table is in the order of `results`.

    Raises PackError for samples whose lists do not belong together, and when nothing is left to pack.
    """
    if aggregation not in get_args(Aggregation):
        raise PackError(f"aggregation is {aggregation!r}; choose one of {', '.join(get_args(Aggregation))}")
    if (aggregation == "constant") != (constant_length is not None) or (constant_length is not None and constant_length < 1):
        raise PackError(
            f"aggregation {aggregation!r} with constant_length {constant_length}; 'constant' needs a constant_length of at least "
            "1 token, the others take none"
        )
    if too_long not in ("drop", "error"):
        raise PackError(f"too_long is {too_long!r}; choose 'drop' or 'error'")
    if seq_len < 1:
        raise PackError(f"seq_len is {seq_len}; a row needs at least 1 position")
    if not results:
        raise PackError("there is nothing to pack: no samples were given; check how many groups had a signal")

    flat = _flatten(results)
    kept, dropped = _select(results, flat, seq_len, too_long)
    if not kept:
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
        raise PackError(
            f"there is nothing to pack: all {len(results)} samples were dropped ({counts}) at seq_len {seq_len}; "
            "raise seq_len, or lower the sampler's max_tokens"
        )
    if dropped["too_long"]:
        logger.warning("dropped %d of %d samples, longer than seq_len %d", dropped["too_long"], len(results), seq_len)
    segments, samples = _lay_out(results, flat, kept, seq_len)
    packed = _fill(flat, segments, samples, seq_len, pad_id, aggregation, constant_length, dropped)
    packed.check("after packing")
    return packed


@dataclass
class _Flat:
    """All samples end to end (N tokens), and where each begins (one entry per sample)."""

    tokens: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    start: np.ndarray
    shared: np.ndarray
    """Tokens that may be shared: the prompt, or what precedes the first trained token where that is less."""
    end: np.ndarray
    """One past the last trained token, counted from `start`; 0 where nothing is trained."""
    num_trained: np.ndarray
    versions: np.ndarray
    """Of the policy that sampled each token; meaningless for the prompt."""
    advantages: np.ndarray


def _where(result: TokenizedResult) -> str:
    return f"task {result.task_id!r}, sample {result.sample}"


def _flatten(results: Sequence[TokenizedResult]) -> _Flat:
    """Joins the lists of all samples and checks that they belong together."""
    lengths = np.array([len(result.token_ids) for result in results], dtype=np.int64)
    for result, length in zip(results, lengths, strict=True):
        if not len(result.assistant_mask) == len(result.input_pos) == len(result.logprobs) == length:
            raise PackError(
                f"{_where(result)}: {length} token ids, but {len(result.assistant_mask)} assistant_mask, {len(result.input_pos)} "
                f"input_pos and {len(result.logprobs)} logprobs; all have one entry per token"
            )
        if result.token_versions is not None and len(result.token_versions) != length - result.prompt_length:
            raise PackError(
                f"{_where(result)}: {len(result.token_versions)} token_versions for {length - result.prompt_length} completion "
                "tokens; there is one for each, or None where all are of one version"
            )
        if not 1 <= result.prompt_length <= length:
            raise PackError(
                f"{_where(result)}: prompt_length {result.prompt_length} of {length} tokens; a sample needs a prompt of at least "
                "one token, as the first generated token is predicted from the prompt's last"
            )

    def join(name: str, dtype: type) -> np.ndarray:
        return np.fromiter(itertools.chain.from_iterable(getattr(r, name) for r in results), dtype, count=int(lengths.sum()))

    tokens, trained = join("token_ids", np.int64), join("assistant_mask", np.bool_)
    positions, logprobs = join("input_pos", np.int64), join("logprobs", np.float32)
    start = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(results)), lengths)
    offset = np.arange(len(tokens)) - start[owner]
    advantages = np.array([result.advantage for result in results], dtype=np.float32)
    for wrong, what in (
        (tokens < 0, "a negative token id"),
        (positions != offset, "input_pos that is not 0, 1, 2, …"),
        (trained & (offset == 0), "a trained first token, which nothing predicts"),
        (np.isinf(logprobs), "an infinite logprob (NaN marks an unknown one)"),
        (~np.isfinite(advantages)[owner], "an advantage that is not finite"),
    ):
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise PackError(f"{_where(results[owner[place]])}, token {offset[place]}: {what}")

    # One past the last, and the number of the first trained token of each sample, by reductions over the trained offsets alone.
    end = np.zeros(len(results), dtype=np.int64)
    np.maximum.at(end, owner[trained], offset[trained] + 1)
    shared = np.array([result.prompt_length for result in results], dtype=np.int64)
    np.minimum.at(shared, owner[trained], offset[trained])
    num_trained = np.bincount(owner[trained], minlength=len(results))
    versions = np.repeat(np.array([result.weights_version for result in results], dtype=np.int32), lengths)
    for result, begin, length in zip(results, start, lengths, strict=True):
        if result.token_versions is not None:
            versions[begin + result.prompt_length : begin + length] = result.token_versions
    return _Flat(tokens, trained, logprobs, start, shared, end, num_trained, versions, advantages)


def _select(results: Sequence[TokenizedResult], flat: _Flat, seq_len: int, too_long: str) -> tuple[list[int], dict[str, int]]:
    """Indices of the samples to pack, and how many were dropped for which reason."""
    positions = flat.end - 1  # what a sample takes alone: everything up to the position that predicts its last trained token
    untrained = flat.num_trained == 0
    long = ~untrained & (positions > seq_len)
    if too_long == "error" and long.any():
        first = int(np.flatnonzero(long)[0])
        raise PackError(
            f"{_where(results[first])} takes {positions[first]} positions (prompt {results[first].prompt_length} tokens), but "
            f"seq_len is {seq_len}, and {int(long.sum())} of {len(results)} samples are too long; raise seq_len to at least "
            f"{int(positions.max())}, or drop them with too_long='drop'"
        )
    dropped = {"too_long": int(long.sum()), "no_trained_token": int(untrained.sum())}
    return np.flatnonzero(~untrained & ~long).tolist(), dropped


@dataclass
class _Segments:
    """Runs of positions, in the order in which they are stored; one list entry per segment."""

    row: list[int]
    column: list[int]
    source: list[int]
    """The first token, counted in `_Flat`."""
    length: list[int]
    position: list[int]
    group: list[int]
    parent: list[int]
    sample: list[int]
    """Row of the sample table, -1 for shared prompts."""


def _lay_out(
    results: Sequence[TokenizedResult], flat: _Flat, kept: list[int], seq_len: int
) -> tuple[_Segments, list[PackedSample]]:
    """Decides which tokens stand where. `kept[i]` becomes row i of the sample table."""
    start, shared, end = flat.start.tolist(), flat.shared.tolist(), flat.end.tolist()
    groups: dict[bytes, list[int]] = {}
    for number, index in enumerate(kept):
        prompt = flat.tokens[start[index] : start[index] + shared[index]].tobytes()
        groups.setdefault(prompt, []).append(number)
    members = list(groups.values())
    rows = place_groups(
        [shared[kept[numbers[0]]] - 1 for numbers in members],
        [[end[kept[number]] - shared[kept[number]] for number in numbers] for numbers in members],
        seq_len,
    )

    segments = _Segments([], [], [], [], [], [], [], [])
    placed: dict[int, PackedSample] = {}
    for row, parts in enumerate(rows):
        column, next_group = 0, 0

        def add(source: int, length: int, position: int, parent: int, sample: int, row: int = row) -> int:
            nonlocal column, next_group
            group, next_group = next_group, next_group + 1
            values = (row, column, source, length, position, group, group if parent < 0 else parent, sample)
            for field, value in zip(vars(segments).values(), values, strict=True):
                field.append(value)
            column += length
            return group

        for part in parts:
            numbers = [members[part.group][member] for member in part.members]
            first = kept[numbers[0]]
            prefix = shared[first] - 1
            root = -1
            if prefix and len(numbers) > 1:
                root = add(start[first], prefix, 0, -1, -1)
            for number in numbers:
                index = kept[number]
                begin = prefix if root >= 0 else 0
                leaf = add(start[index] + begin, end[index] - 1 - begin, begin, root, number)
                result = results[index]
                placed[number] = PackedSample(
                    task_id=result.task_id,
                    sample=result.sample,
                    row=row,
                    reward=float(result.reward),
                    advantage=float(result.advantage),
                    groups=[leaf] if root < 0 else [root, leaf],
                    prompt_length=result.prompt_length,
                    completion_length=len(result.token_ids) - result.prompt_length,
                    num_trained=int(flat.num_trained[index]),
                    finish_reason=result.finish_reason,
                )
        assert column <= seq_len
    return segments, [placed[number] for number in range(len(kept))]


def _fill(
    flat: _Flat,
    segments: _Segments,
    samples: list[PackedSample],
    seq_len: int,
    pad_id: int,
    aggregation: Aggregation,
    constant_length: int | None,
    dropped: dict[str, int],
) -> PackedTensors:
    """Writes all segments at once: token k of a segment goes from `source + k` to `column + k`, everything else follows."""
    length = np.array(segments.length)
    owner = np.repeat(np.arange(len(length)), length)
    within = np.arange(int(length.sum())) - (np.cumsum(length) - length)[owner]
    source = np.array(segments.source)[owner] + within
    shape = (max(segments.row) + 1, seq_len)
    target = (np.array(segments.row)[owner], np.array(segments.column)[owner] + within)

    def tensor(fill: float, dtype: type, values: np.ndarray, at: np.ndarray | slice = slice(None)) -> torch.Tensor:
        array = np.full(shape, fill, dtype=dtype)
        array[target[0][at], target[1][at]] = values
        return torch.from_numpy(array)

    sample = np.array(segments.sample)[owner]
    label_source = source + 1  # never past the end: a sample's last trained token is not stored as an input
    trained = (sample >= 0) & flat.trained[label_source]
    predicted = label_source[trained]
    origin = np.searchsorted(flat.start, predicted, side="right") - 1
    weights = 1.0 / flat.num_trained[origin] if aggregation == "sequence" else np.ones(len(origin))
    return PackedTensors(
        tokens=tensor(pad_id, np.int64, flat.tokens[source]),
        labels=tensor(IGNORE_LABEL, np.int64, flat.tokens[predicted], trained),
        group_ids=tensor(-1, np.int64, np.array(segments.group)[owner]),
        parent_ids=tensor(-1, np.int64, np.array(segments.parent)[owner]),
        input_pos=tensor(0, np.int64, np.array(segments.position)[owner] + within),
        sample_ids=tensor(-1, np.int64, sample),
        assistant_mask=tensor(False, np.bool_, np.ones(len(origin), dtype=bool), trained),
        logprobs=tensor(np.nan, np.float32, flat.logprobs[predicted], trained),
        advantages=tensor(0.0, np.float32, flat.advantages[origin], trained),
        weights=tensor(0.0, np.float32, weights, trained),
        weights_version=tensor(-1, np.int32, flat.versions[predicted], trained),
        samples=samples,
        aggregation=aggregation,
        constant_length=constant_length,
        pad_id=pad_id,
        dropped=dropped,
    )
