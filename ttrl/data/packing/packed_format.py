"""Define the packed tensors' names, dtypes and padding values, and a line of the sample table."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

IGNORE_LABEL = -100
"""The label of untrained positions (the default ignore index of torch's cross-entropy)."""

Aggregation: TypeAlias = Literal["token", "sequence", "constant"]

TENSOR_DTYPES: dict[str, torch.dtype] = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "group_ids": torch.int64,
    "parent_ids": torch.int64,
    "input_pos": torch.int64,
    "sample_ids": torch.int64,
    "assistant_mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "weights": torch.float32,
    "weights_version": torch.int32,
    "reference_logprobs": torch.float32,
    "experts": torch.int16,
}
OPTIONAL = frozenset({"reference_logprobs", "experts"})
"""Optional tensors."""


@dataclass(kw_only=True)
class PackedSample:
    """One line of the sample table."""

    task_id: str
    sample: int
    """Its number within the task."""
    row: int
    reward: float
    advantage: float
    groups: list[int]
    """The path of its tokens' groups, from the root to its own."""
    prompt_length: int
    """Tokens before the first generated one; `groups` and the tensors show how many of their
    positions are shared.
    """
    completion_length: int
    """Tokens of its completion, as sampled."""
    num_trained: int
    """Its labels."""
    finish_reason: str | None = None
    share: float = 1.0
    """As in TokenizedResult: below 1 for one of a sample's several sequences, each with a line of
    its own.
    """


def padding_value(name: str, pad_id: int) -> float | int | bool:
    """Return the padding value of the tensor `name`."""
    if name in ("logprobs", "reference_logprobs"):
        return float("nan")
    values = {"tokens": pad_id, "labels": IGNORE_LABEL, "assistant_mask": False}
    return values.get(name, 0 if name in ("input_pos", "advantages", "weights") else -1)
