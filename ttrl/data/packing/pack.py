"""Pack token sequences into tensors: rows store every beginning shared by samples once.

The rules of the format, tested by `PackedTensors.check` on every pack:

- Tokens before a sample's first trained one may be shared, as a tree: a system prompt, below it a
  question, below it the given part of a conversation (prefix_tree.py). Generated tokens belong to
  one sample, even if others have the same.
- A shared node is stored without its last token, and every continuation starts with its own copy of
  it (same position, so the same keys and values). The first label of every sample therefore has the
  right context. A beginning of one token leaves no group: its samples are roots. A node with one
  child in its row is merged with it.
- Groups stand depth first: a node's continuations follow it without a gap.
- A sample is stored up to the position predicting its last trained token. This last token is a
  label, never an input: nothing is predicted from it. For the same reason, untrained tokens behind
  it (a template's newline) are left out.
- Labels are in the places of `assistant_mask`: any number of turns of one sample, with the tokens
  between them as context.
- Nothing is added: the end-of-turn token is trained only if the server's ids contain it, as a
  sampled token.

A sample of n tokens, the last one trained, takes n - 1 positions in a row of its own.
"""

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np

from ttrl.configs.data import Share, TooLong
from ttrl.data.packing.flat_samples import FlatSamples, flatten, select
from ttrl.data.packing.packed import PackedTensors, unpack
from ttrl.data.packing.packed_format import IGNORE_LABEL, Aggregation, PackedSample
from ttrl.data.packing.placement import Forest, place
from ttrl.data.packing.prefix_tree import PrefixTree, prefix_tree
from ttrl.data.packing.row_layout import fill, lay_out
from ttrl.errors import PackError
from ttrl.records import TokenizedResult

__all__ = [
    "IGNORE_LABEL",
    "PackedSample",
    "PackedTensors",
    "packed_tensors_from_tokenized_results",
    "unpack",
]

logger = logging.getLogger(__name__)

SHORTEST_SHARED = 8


def packed_tensors_from_tokenized_results(
    results: Sequence[TokenizedResult],
    *,
    seq_len: int,
    pad_id: int,
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    too_long: TooLong = "drop",
    share: Share = "tree",
    shortest_shared: int = SHORTEST_SHARED,
    multiple: int = 1,
    seed: int = 0,
) -> PackedTensors:
    """Pack samples into rows of `seq_len` positions; beginnings shared before the first trained
    token are stored once per row, in any order of samples. The sample table is in the order of
    `results`.

    aggregation decides `weights`: "token" and "constant" 1, "sequence" share / the number of
    trained tokens of the sequence (1 / this number for a sample of one sequence); `constant_length`
    (tokens) is the fixed length of "constant".

    too_long decides about samples longer than a row:
        drop       it is left out, counted in `.dropped["too_long"]`
        error      PackError
        truncate   its end is cut off (and with it its end-of-turn token), counted in
                   `.dropped["truncated"]`; it is dropped only if nothing trained is left
        extend     it gets a row as long as the longest sample, counted in `.dropped["extended"]`;
                   the tensors are then wider than `seq_len`, and all other rows hold at most
                   `seq_len` positions
    Samples without a trained token are counted in `.dropped["no_trained_token"]`.

    share: "tree", or "prompt" (only samples of the same prompt), or "none", for measurements.
    shortest_shared: the fewest positions of a beginning to store once for different prompts; the
    same prompt always is.

    multiple: the number of data-parallel ranks to give equal work. seed: decides between equally
    good placements.

    Raises PackError for samples with inconsistent lists, and if nothing is left to pack.

    >>> samples = [
    ...     TokenizedResult(
    ...         task_id="sums/1", sample=number, token_ids=[*range(20), 20 + number],
    ...         assistant_mask=[False] * 20 + [True], input_pos=range(21), prompt_length=20,
    ...         logprobs=[math.nan] * 20 + [-0.5], reward=number, advantage=number - 0.5,
    ...     )
    ...     for number in range(2)
    ... ]
    >>> packed = packed_tensors_from_tokenized_results(samples, seq_len=32, pad_id=0)
    >>> packed.num_tokens, packed.num_trained  # the shared prompt is stored once
    (21, 2)
    """
    _check_options(
        seq_len, aggregation, constant_length, too_long, share, shortest_shared, multiple
    )
    if not results:
        raise PackError(
            "nothing to pack: no samples were given; check how many groups had a signal"
        )

    with _no_garbage_collection():
        flat = flatten(results)
        kept, dropped = select(results, flat, seq_len, too_long)
        if not len(kept):
            counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
            raise PackError(
                f"nothing to pack: all {len(results)} samples were dropped ({counts}) at seq_len "
                f"{seq_len}; raise seq_len, or lower max_tokens"
            )
        if dropped["too_long"]:
            logger.warning(
                "dropped %d of %d samples, longer than seq_len %d",
                dropped["too_long"],
                len(results),
                seq_len,
            )
        start = flat.start[kept]
        end = flat.end[kept]
        tree = prefix_tree(flat.tokens, start, flat.shared[kept], share, shortest_shared)
        rows = _place(tree, end, seq_len, multiple, seed)
        width = max(seq_len, int(end.max()) - 1)
        segments, places = lay_out(rows, tree, start.tolist(), end.tolist(), width)
        shares = np.array([results[number].share for number in kept.tolist()])
        if aggregation == "sequence":
            weights = shares / flat.num_trained[kept]
        else:
            weights = np.ones(len(kept))
        tensors: dict[str, Any] = {
            **fill(flat, segments, kept, weights, (len(rows), width), pad_id)
        }
        packed = PackedTensors(
            **tensors,
            samples=_sample_table(results, flat, kept, places),
            aggregation=aggregation,
            constant_length=constant_length,
            pad_id=pad_id,
            dropped=dropped,
        )
        packed.check("after packing")
        return packed


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector off: it would walk through every token of all samples, a second for
    25 million, again and again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_options(
    seq_len: int,
    aggregation: str,
    constant_length: int | None,
    too_long: str,
    share: str,
    shortest_shared: int,
    multiple: int,
) -> None:
    for name, value, kinds in (
        ("aggregation", aggregation, Aggregation),
        ("too_long", too_long, TooLong),
        ("share", share, Share),
    ):
        if value not in get_args(kinds):
            raise PackError(f"{name} is {value!r}; choose one of {', '.join(get_args(kinds))}")
    if (aggregation == "constant") != (constant_length is not None) or (
        constant_length is not None and constant_length < 1
    ):
        raise PackError(
            f"aggregation is {aggregation!r} with constant_length {constant_length}; 'constant' "
            "needs a constant_length of at least 1 token, the others take none"
        )
    if seq_len < 1:
        raise PackError(f"seq_len is {seq_len}; a row needs at least 1 position")
    if shortest_shared < 1:
        raise PackError(
            f"shortest_shared is {shortest_shared}; a shared prompt has at least 1 position"
        )
    if multiple < 1:
        raise PackError(f"rows cannot be padded to a multiple of {multiple}; give at least 1")


def _place(
    tree: PrefixTree, end: np.ndarray, seq_len: int, multiple: int, seed: int
) -> list[list[int]]:
    """Place the samples in rows. Those longer than `seq_len` get rows for themselves, as long as
    the longest.
    """
    cut = np.array([0, *tree.cut])  # of node n at n + 1, and of no node at 0
    node_of = np.array(tree.node_of)
    node_size = (cut[1:] - cut[np.array(tree.parent, dtype=np.int64) + 1]).tolist()
    own = end - 1 - cut[node_of + 1]
    long = end - 1 > seq_len

    def placed(which: np.ndarray, length: int) -> list[list[int]]:
        if not len(which):
            return []
        forest = Forest(node_size, tree.parent, node_of[which].tolist(), own[which].tolist())
        return [
            which[np.array(row, dtype=np.int64)].tolist()
            for row in place(forest, length, multiple=multiple, seed=seed)
        ]

    ordinary = placed(np.flatnonzero(~long), seq_len)
    return ordinary + (placed(np.flatnonzero(long), int(end.max()) - 1) if long.any() else [])


def _sample_table(
    results: Sequence[TokenizedResult],
    flat: FlatSamples,
    kept: np.ndarray,
    places: Sequence[tuple[int, list[int]]],
) -> list[PackedSample]:
    table = []
    for number, num_trained, (row, groups) in zip(
        kept.tolist(), flat.num_trained[kept].tolist(), places, strict=True
    ):
        result = results[number]
        table.append(
            PackedSample(
                task_id=result.task_id,
                sample=result.sample,
                row=row,
                reward=float(result.reward),
                advantage=float(result.advantage),
                groups=groups,
                prompt_length=result.prompt_length,
                completion_length=len(result.token_ids) - result.prompt_length,
                num_trained=num_trained,
                finish_reason=result.finish_reason,
                share=result.share,
            )
        )
    return table
