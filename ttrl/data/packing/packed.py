"""Hold the packed tensors and their sample table; take, pad and trim rows.

Everything is aligned at the *predicting* position: `labels[b, t]`, `logprobs[b, t]`, `advantages[b,
t]` all describe the token after position t in its sample. Nothing downstream shifts a tensor. The
layout of samples: pack.py.

Shapes: B rows, T positions of a row (seq_len).
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttrl.data.packing.packed_check import check_packed
from ttrl.data.packing.packed_file import HEADER_FIELDS, load_packed, save_packed
from ttrl.data.packing.packed_format import (
    IGNORE_LABEL,
    TENSOR_DTYPES,
    Aggregation,
    PackedSample,
    padding_value,
)
from ttrl.errors import PackError
from ttrl.records import TokenizedResult


@dataclass(kw_only=True)
class PackedTensors:
    """Rows of packed samples: [B, T] tensors and the table of their samples.

    >>> sample = TokenizedResult(
    ...     task_id="sums/1", sample=0, token_ids=[5, 6, 7], assistant_mask=[False, False, True],
    ...     input_pos=[0, 1, 2], logprobs=[math.nan, math.nan, -0.5], prompt_length=2,
    ...     reward=1.0, advantage=0.5,
    ... )
    >>> packed = packed_tensors_from_tokenized_results([sample], seq_len=8, pad_id=0)
    >>> packed.save("packed.safetensors")
    >>> PackedTensors.load("packed.safetensors").labels.tolist()
    [[-100, 7, -100, -100, -100, -100, -100, -100]]
    """

    tokens: Tensor
    """int64 input ids; `pad_id` in padding."""
    labels: Tensor
    """int64: the token to predict from this position, -100 if none is trained."""
    group_ids: Tensor
    """int64: 0, 1, 2… within the row, depth first (a group's continuations follow it); -1 in
    padding.
    """
    parent_ids: Tensor
    """int64: the parent of this token's group; its own id for a root; -1 in padding."""
    input_pos: Tensor
    """int64: position in the unpacked sequence; 0 in padding."""
    sample_ids: Tensor
    """int64: this token's row of `samples`; -1 for shared tokens and padding."""
    assistant_mask: Tensor
    """bool: True if `labels` is a generated token."""
    logprobs: Tensor
    """float32: the sampler's log-probability of `labels`, nats; NaN for unknown."""
    advantages: Tensor
    """float32: the label's advantage; 0 if none is trained."""
    weights: Tensor
    """float32: the label's weight in the loss; 0 if none is trained."""
    weights_version: Tensor
    """int32: the policy version behind `labels`; -1 for none."""
    reference_logprobs: Tensor | None = None
    """float32: log-probability of `labels` under the reference model; NaN for unknown. None if not
    computed.
    """
    experts: Tensor | None = None
    """int16 [B, T, L, K]: the sampler's experts of each token in each layer; -1 for unknown. None
    without `router_replay`.
    """
    samples: list[PackedSample]
    aggregation: Aggregation = "token"
    constant_length: int | None = None
    """Tokens per sample in the normaliser of aggregation "constant"."""
    pad_id: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Counts of samples left out, by reason: "too_long", "no_trained_token"; and of too long
    samples kept on request: "truncated", "extended"."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Other facts to store with the file."""

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_len(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        """Count the positions outside padding."""
        return int((self.group_ids >= 0).sum())

    @property
    def num_trained(self) -> int:
        """Count the labels."""
        return int((self.labels != IGNORE_LABEL).sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, without missing ones."""
        named = {name: getattr(self, name) for name in TENSOR_DTYPES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def rows(self, which: slice | Sequence[int]) -> "PackedTensors":
        """Take some rows (a slice, or row numbers in any order, none twice) as packed tensors of
        their own, always [rows, T].

        `samples` is cut to those rows, and `sample_ids` and `PackedSample.row` are renumbered to
        match.
        """
        if isinstance(which, slice):
            chosen = list(range(self.num_rows)[which])
        else:
            chosen = [int(row) for row in which]
        if len(set(chosen)) != len(chosen) or not all(0 <= row < self.num_rows for row in chosen):
            raise PackError(
                f"rows {chosen} of {self.num_rows} rows; give each row once, from 0 to "
                f"{self.num_rows - 1}"
            )
        new_row = {row: number for number, row in enumerate(chosen)}
        index = torch.tensor(chosen, dtype=torch.int64)
        tensors = {name: tensor[index] for name, tensor in self.tensors().items()}
        present = tensors["sample_ids"].unique()  # in order
        present = present[present >= 0]
        kept = [self.samples[number] for number in present.tolist()]
        samples = [dataclasses.replace(sample, row=new_row[sample.row]) for sample in kept]
        # The last entry is for sample id -1.
        new_sample = torch.full((len(self.samples) + 1,), -1, dtype=torch.int64)
        new_sample[present] = torch.arange(len(present))
        tensors["sample_ids"] = new_sample[tensors["sample_ids"]]
        return self._with(tensors, samples)

    def pad_rows_to_multiple(self, multiple: int) -> "PackedTensors":
        """Add zero-weight padding rows up to a multiple of a number: every rank gets as many."""
        if multiple < 1:
            raise PackError(
                f"cannot pad {self.num_rows} rows to a multiple of {multiple}; give at least 1"
            )
        missing = -self.num_rows % multiple
        if not missing:
            return self
        tensors = {
            name: torch.cat(
                [
                    tensor,
                    tensor.new_full((missing, *tensor.shape[1:]), padding_value(name, self.pad_id)),
                ]
            )
            for name, tensor in self.tensors().items()
        }
        return self._with(tensors, self.samples)

    def trim(self, multiple: int = 1) -> "PackedTensors":
        """Cut the columns after the longest used row, rounded up to a multiple as far as there are
        columns; keep at least one.
        """
        used = (self.group_ids >= 0).any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        length = min(-(-length // multiple) * multiple, self.seq_len)
        if length == self.seq_len:
            return self
        return self._with(
            {name: tensor[:, :length].contiguous() for name, tensor in self.tensors().items()},
            self.samples,
        )

    def _with(self, tensors: dict[str, Tensor], samples: list[PackedSample]) -> "PackedTensors":
        changes: dict[str, Any] = {**tensors, "samples": samples}
        return dataclasses.replace(self, **changes)

    def check(self, where: str = "packed tensors") -> None:
        """Raise PackError, naming `where`, the tensor and the place, unless every rule of the
        format holds.
        """
        check_packed(
            self.tensors(), self.samples, self.aggregation, self.constant_length, self.pad_id, where
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically; the same tensors always give the same bytes.
        Raises StorageError.
        """
        header = {name: getattr(self, name) for name in HEADER_FIELDS}
        save_packed(self.tensors(), self.samples, header, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, checked: bool = True) -> "PackedTensors":
        """Read a file of `save`, mapped into memory, and check it (if `checked`). Raises PackError
        if it is missing, damaged, foreign or breaks the format.
        """
        tensors, samples, header = load_packed(path)
        columns: dict[str, Any] = {**tensors, **header}
        packed = cls(samples=samples, **columns)
        if checked:
            packed.check(os.fspath(path))
        return packed


def normaliser(packed: PackedTensors) -> float:
    """Return Z of these rows: the loss of an optimizer step is Σ w·ℓ / Z.

    token      w = 1                          Z = trained tokens
                                              (every token counts the same)
    sequence   w = 1 / its sample's length    Z = samples with a trained token
                                              (every sample counts the same)
    constant   w = 1                          Z = samples × a fixed length
                                              (Dr. GRPO: no length in the weights)

    A sample of several sequences (`TokenizedResult.share`) counts as one: each of its sequences
    counts for its share of the sample's generated tokens, in w and in Z. w is stored with the rows.
    Z belongs to the rows of one optimizer step and is known before the forward pass: rows are
    disjoint, so the Z of several ranks or microbatches add up. 0.0 if nothing is trained.
    """
    if packed.aggregation == "token":
        return float(packed.num_trained)
    trained = torch.unique(packed.sample_ids[packed.labels != IGNORE_LABEL]).tolist()
    samples = math.fsum(packed.samples[number].share for number in trained)
    if packed.constant_length is None:
        return samples
    return samples * packed.constant_length


def unpack(packed: PackedTensors) -> list[TokenizedResult]:
    """Return the samples as they were before packing, in the order of the sample table, each up to
    its last trained token: later tokens are not stored.

    Values exist only for trained tokens; others get `logprobs` NaN, `token_versions` -1 (None if
    one version sampled them all), `token_advantages` NaN (None if all are the sample's).
    `advantage` is the one in the table; `tokens` is None. `packed` must hold to the format
    (`check`).
    """
    runs = _runs(packed)
    tokens, labels, logprobs, versions, advantages = (
        t.numpy()
        for t in (
            packed.tokens,
            packed.labels,
            packed.logprobs,
            packed.weights_version,
            packed.advantages,
        )
    )
    results = []
    for sample in packed.samples:
        row = sample.row
        ids: list[int] = []
        for group in sample.groups:
            begin, stop = runs[row, group]
            ids += tokens[row, begin:stop].tolist()
        begin, stop = runs[row, sample.groups[-1]]
        own = slice(begin, stop)
        experts = None
        if packed.experts is not None:
            spans = [
                packed.experts[row, first:last].numpy()
                for first, last in (runs[row, group] for group in sample.groups)
            ]
            experts = np.concatenate([*spans, np.full_like(spans[0][:1], -1)])
        # Tokens without a label position in the sample itself.
        before = len(ids) - (stop - begin) + 1
        ids.append(int(labels[row, stop - 1]))
        trained = labels[row, own] != IGNORE_LABEL
        sampled_by = versions[row, own]
        seen = set(sampled_by[trained].tolist())
        each = None
        if len(seen) > 1:
            each = ([-1] * before + sampled_by.tolist())[sample.prompt_length :]
        per_token = None
        if (advantages[row, own][trained] != np.float32(sample.advantage)).any():
            known = np.where(trained, advantages[row, own], np.float32(math.nan)).tolist()
            per_token = ([math.nan] * before + known)[sample.prompt_length :]
        results.append(
            TokenizedResult(
                task_id=sample.task_id,
                sample=sample.sample,
                token_ids=ids,
                assistant_mask=[False] * before + trained.tolist(),
                input_pos=list(range(len(ids))),
                logprobs=[math.nan] * before + logprobs[row, own].tolist(),
                prompt_length=sample.prompt_length,
                reward=sample.reward,
                advantage=sample.advantage,
                token_advantages=per_token,
                weights_version=max(seen),
                token_versions=each,
                finish_reason=sample.finish_reason,
                share=sample.share,
                experts=experts,
            )
        )
    return results


def _runs(packed: PackedTensors) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the first position, and one past the last, of each group by (row, group)."""
    groups = packed.group_ids
    starts = torch.ones_like(groups, dtype=torch.bool)
    starts[:, 1:] = groups[:, 1:] != groups[:, :-1]
    flat = starts.flatten().nonzero().flatten()
    stops = torch.cat([flat[1:], torch.tensor([groups.numel()])])
    found = groups.flatten()[flat].tolist()
    length = packed.seq_len
    return {
        (begin // length, group): (begin % length, begin % length + stop - begin)
        for begin, stop, group in zip(flat.tolist(), stops.tolist(), found, strict=True)
        if group >= 0
    }
