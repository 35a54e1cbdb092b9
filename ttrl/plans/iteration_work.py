"""Count an iteration's contents: samples, tokens, packed rows, optimizer steps, and its exact
floating-point operations.

Rows come out of the packer itself, given the prompts and completions of random tokens; FLOPs come
out of the rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ttrl.configs import GRPOConfig
from ttrl.configs.run import TrainConfig
from ttrl.costs.flops import decode_flops, forward_flops, pass_flops, prefill_flops, sampling_flops
from ttrl.costs.parameters import DecoderParameters
from ttrl.data.packing.pack import (
    IGNORE_LABEL,
    PackedTensors,
    packed_tensors_from_tokenized_results,
)
from ttrl.facts import ratio
from ttrl.plans.expected_lengths import IterationLengths, made_up_samples


@dataclass(frozen=True)
class Work:
    """Hold the expected counts of one iteration."""

    tasks: int
    samples: int
    prompt_mean: float
    prompt_max: int
    completion_mean: float
    completion_max: int
    prompt_tokens: float
    """Each task's prompt once."""
    completion_tokens: float
    """Sampled in an iteration."""
    signal_share: float
    """Share of the groups used in training."""
    rows: int
    filled_rows: int
    """Without rows added only to give each trainer process equally many."""
    seq_len: int
    row_length: int
    """Positions of the longest row, without padding behind it."""
    row_tokens: float
    """Positions with a token; a prompt counts once in a row."""
    logical_tokens: float
    """Positions of rows without shared prompts."""
    trained_tokens: float
    computed_tokens: float
    """Positions computed by the trainer: rows are as long as the longest of their microbatch."""
    too_long: int
    """Samples too long for a row."""
    optimizer_steps: int
    microbatches: int
    """Per trainer process, over all optimizer steps."""
    longest_sample: int
    validation_samples: int
    validation_tokens: float

    @property
    def fill(self) -> float:
        """Return the share of the rows' positions with a token."""
        return ratio(self.row_tokens, self.rows * self.seq_len) or 0.0


@dataclass(frozen=True)
class PlannedFlops:
    """Hold the operations of an iteration, over all processes."""

    sampling: float
    training: float
    """Forward and backward."""
    prepass: float
    """Passes before the first step: the policy's own log-probabilities and the reference model's,
    without gradient, and the reward model's training.
    """
    validation: float


def pack(config: TrainConfig, lengths: IterationLengths, vocabulary: int) -> PackedTensors:
    """Pack the planned groups; an iteration has `lengths.scale` times as many rows."""
    return packed_tensors_from_tokenized_results(
        made_up_samples(lengths, vocabulary, config.seed),
        seq_len=config.seq_len,
        pad_id=0,
        aggregation=config.resolved_aggregation,
        constant_length=config.constant_length,
        too_long="drop" if config.too_long == "error" else config.too_long,
        share=config.share,
        multiple=config.processes,
        seed=config.seed,
    )


def work_of(
    config: TrainConfig,
    recipe: GRPOConfig,
    lengths: IterationLengths,
    packed: PackedTensors,
    validation_tasks: int,
) -> Work:
    """Count the contents of an iteration."""
    prompts = [len(group.prompt) for group in lengths.groups]
    scale = lengths.scale
    completions = [length for group in lengths.groups for length in group.completions]
    completion_mean = float(np.mean(completions))
    tasks = round(len(prompts) * scale)
    samples = round(len(completions) * scale)
    used = packed.group_ids.numpy() >= 0
    row_lengths = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in used]
    ranks = max(1, config.processes // recipe.tensor_parallel)
    rows = math.ceil(packed.num_rows * scale)
    filled = math.ceil(int((packed.labels != IGNORE_LABEL).any(dim=1).sum()) * scale)
    steps = min(recipe.updates_per_iteration, max(1, filled))
    rows_of_step = math.ceil(filled / steps / ranks)
    sampled = samples * completion_mean
    return Work(
        tasks=tasks,
        samples=samples,
        prompt_mean=float(np.mean(prompts)),
        prompt_max=max(prompts),
        completion_mean=completion_mean,
        completion_max=max(completions),
        prompt_tokens=sum(prompts) * scale,
        completion_tokens=sampled
        if config.tokens_per_iteration is None
        else min(sampled, config.tokens_per_iteration),
        signal_share=lengths.signal_share,
        rows=rows,
        filled_rows=filled,
        seq_len=packed.seq_len,
        row_length=max(row_lengths, default=0),
        row_tokens=packed.num_tokens * scale,
        logical_tokens=float(sum(s.prompt_length + s.completion_length - 1 for s in packed.samples))
        * scale,
        trained_tokens=packed.num_trained * scale,
        computed_tokens=_computed(row_lengths, recipe.rows_per_microbatch) * scale,
        too_long=round(packed.dropped.get("too_long", 0) * scale),
        optimizer_steps=steps if rows else 0,
        microbatches=steps * math.ceil(rows_of_step / recipe.rows_per_microbatch) if rows else 0,
        longest_sample=max(len(group.prompt) + max(group.completions) for group in lengths.groups),
        validation_samples=validation_tasks * config.validation_samples,
        validation_tokens=validation_tasks * config.validation_samples * completion_mean,
    )


def _computed(row_lengths: Sequence[int], rows_per_microbatch: int) -> int:
    """Count the positions of all microbatches."""
    longest_first = sorted(row_lengths, reverse=True)
    parts = [
        longest_first[k : k + rows_per_microbatch]
        for k in range(0, len(longest_first), rows_per_microbatch)
    ]
    return sum(len(part) * part[0] for part in parts)


def flops_of(
    decoder: DecoderParameters,
    recipe: GRPOConfig,
    lengths: IterationLengths,
    packed: PackedTensors,
    work: Work,
    block: int | None,
) -> PlannedFlops:
    """Count the operations of an iteration. block: tokens per block of the server's prefix cache,
    the unit of sharing a prompt among its samples; None: the whole prompt is computed once.
    """
    shape = decoder.shape
    prompt_mean = round(work.prompt_mean)
    reads: list[tuple[int, int, int]] = []
    for group in lengths.groups:
        prompt = len(group.prompt)
        if block is None:
            known = prompt
        else:
            known = (prompt - 1) // block * block
        reads += [(prompt, known if k else 0, n) for k, n in enumerate(group.completions)]
    share_sampled = work.completion_tokens / max(1.0, work.samples * work.completion_mean)
    # Keys seen by each position, itself included.
    positions = packed.input_pos.numpy()[packed.group_ids.numpy() >= 0] + 1
    pairs = {
        window: int((positions if window is None else np.minimum(positions, window)).sum())
        for window in shape.layers_by_window
    }
    training = pass_flops(decoder, recipe, len(positions), pairs, packed.num_trained).total
    forward = forward_flops(shape, len(positions), pairs, packed.num_trained).total
    several = recipe.updates_per_iteration > 1 and recipe.start_of_all_rows
    learns_rewards = recipe.token_rewards == "implicit"
    own = several or (recipe.rewards_tokens and not learns_rewards) or recipe.lora_dropout > 0
    passes = own + (recipe.kl_coefficient > 0 or recipe.needs_estimates)
    held_out = work.validation_samples * (
        decode_flops(shape, prompt_mean, round(work.completion_mean)).total
        + prefill_flops(shape, prompt_mean).total
    )
    return PlannedFlops(
        sampling=float(sum(sampling_flops(shape, reads))) * lengths.scale * share_sampled,
        training=float(training) * lengths.scale,
        prepass=float(forward * passes + training * learns_rewards) * lengths.scale,
        validation=float(held_out),
    )
