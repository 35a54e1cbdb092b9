"""Count the work of a step: positions and floating-point operations."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ttrl.configs import TrainingConfig
from ttrl.costs.flops import forward_flops, forward_only_flops, pass_flops, recomputed_flops
from ttrl.costs.parameters import DecoderParameters, decoder_parameters
from ttrl.data.packing.pack import PackedTensors
from ttrl.training.kernels.logprobs import IGNORE


def token_counts(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Count a microbatch's trained positions, positions with a token, and padding."""
    used = (batch["group_ids"] >= 0).sum()
    trained = (batch["labels"] != IGNORE).sum()
    return {
        "trained_tokens": trained,
        "row_tokens": used,
        "padding_tokens": batch["tokens"].numel() - used,
    }


PARTS = ("training", "recomputation", "prepass", "reference", "reward_model")
"""Parts of a step's FLOPs in train.jsonl: forward and backward pass; recomputation in the backward
pass; passes without gradient, of the policy and of the reference model; all of the reward model's
training."""


def work_counts(
    rows: PackedTensors,
    config: PretrainedConfig,
    training: TrainingConfig,
    *,
    head_again: int = 0,
    reference: bool = False,
) -> dict[str, float]:
    """Return "flops" of a forward and a backward pass, FLOPs of the PARTS "recomputation" and
    "reference", and "logical_tokens": positions in rows without shared prefixes. head_again: the
    backward pass's extra products of the head. reference: whether both passes also compute the
    reference's.
    """
    decoder = decoder_parameters(config.to_dict())
    tokens, pairs = _tokens_and_pairs(rows, decoder)
    owned = rows.sample_ids >= 0
    lengths = torch.zeros(len(rows.samples), dtype=torch.int64)
    lengths.scatter_reduce_(0, rows.sample_ids[owned], rows.input_pos[owned] + 1, "amax")
    flops = pass_flops(decoder, training, tokens, pairs, rows.num_trained)
    again = recomputed_flops(
        decoder, training, tokens, pairs, rows.num_trained, head_again=head_again
    )
    logits = 2 * decoder.vocabulary_matrix * rows.num_trained
    return {
        "flops": float(flops.total),
        "recomputation": float(again.total),
        "reference": float(2 * logits * reference),
        "logical_tokens": float(lengths.sum()),
    }


def forward_work(
    rows: PackedTensors, config: PretrainedConfig, training: TrainingConfig, *, head: bool = True
) -> float:
    """Return the FLOPs of a pass without gradient over the rows; without `head`, only to the hidden
    states.
    """
    decoder = decoder_parameters(config.to_dict())
    tokens, pairs = _tokens_and_pairs(rows, decoder)
    return float(
        forward_only_flops(decoder, training, tokens, pairs, rows.num_trained * head).total
    )


def _tokens_and_pairs(
    rows: PackedTensors, decoder: DecoderParameters
) -> tuple[int, dict[int | None, int]]:
    """Return the number of positions with a token, and the pairs of query and key for each
    window."""
    positions = rows.input_pos[rows.group_ids >= 0] + 1  # how many keys each sees, itself included
    return len(positions), {
        window: int((positions if window is None else positions.clamp(max=window)).sum())
        for window in decoder.shape.layers_by_window
    }


def row_flops(rows: PackedTensors, config: PretrainedConfig) -> list[float]:
    """Return the FLOPs of a forward pass over each row: layers, attention within each layer's
    window, and the head.
    """
    shape = decoder_parameters(config.to_dict()).shape
    used = rows.group_ids >= 0
    keys = torch.where(used, rows.input_pos + 1, 0)  # keys seen by each position, itself included
    pairs = {
        window: (keys if window is None else keys.clamp(max=window)).sum(dim=1).tolist()
        for window in shape.layers_by_window
    }
    counts = zip(used.sum(dim=1).tolist(), (rows.labels != IGNORE).sum(dim=1).tolist(), strict=True)
    return [
        float(
            forward_flops(
                shape, tokens, {window: pairs[window][row] for window in pairs}, trained
            ).total
        )
        for row, (tokens, trained) in enumerate(counts)
    ]
