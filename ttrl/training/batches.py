"""Divide packed rows into optimizer steps and this rank's microbatches."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.data.packing.masks import DEFAULT_BLOCK_SIZE, free_to_look
from ttrl.data.packing.pack import PackedSample, PackedTensors
from ttrl.data.packing.packed import normaliser
from ttrl.data.packing.packed_file import TOKENIZER_KEY, tokenizer_digest
from ttrl.data.packing.placement import balance
from ttrl.errors import PackError
from ttrl.text import number_of
from ttrl.training.counts import row_flops
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.policy.policy import Policy

_MICROBATCH = (
    "tokens", "labels", "group_ids", "parent_ids", "input_pos", "sample_ids", "logprobs",
    "advantages", "weights", "reference_logprobs", "experts",
)  # fmt: skip


@dataclass
class Update:
    """One optimizer step: this rank's rows, and the whole step's normaliser, over all ranks."""

    rows: PackedTensors
    normaliser: float
    world_size: int
    numbers: list[int] = field(default_factory=list)
    """Row numbers in the pack; -1 for padding rows, added to give every rank equally many."""
    num_rows: int = 0
    """Rows of the whole step, over all ranks, without padding rows."""
    signals: dict[str, Tensor] = field(default_factory=dict)
    """The recipe's per-label values from before the step, by name, each [R, T]."""
    reference_hidden: list[Tensor] = field(default_factory=list)
    """The reference model's hidden states at the trained positions of each row, [N, D] each; for
    the KL over the vocabulary.
    """

    def only(self, rows: list[int]) -> "Update":
        """Return the step with these of its rows, without signals."""
        numbers = [self.numbers[row] for row in rows]
        return dataclasses.replace(self, rows=self.rows.rows(rows), numbers=numbers, signals={})

    def backward(self, weighted_loss_N: Tensor) -> None:
        """Add the gradient of Σ weighted_loss / Z. FSDP averages gradients over the ranks; the
        factor `world_size` restores the sum.
        """
        (weighted_loss_N.sum() * (self.world_size / self.normaliser)).backward()

    def microbatches(
        self, config: TrainingConfig, device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """Yield parts of at most `rows_per_microbatch` rows, trimmed to their longest row; every
        rank gets the same number. "trained" holds the label positions, int64 [N], rows laid end to
        end: finding them on a GPU would stall it. On a GPU, row lengths are multiples of the
        attention block, to keep the number of allocation sizes small. "sample_keys",
        "sample_rewards" and "sample_shares" are of the samples in `sample_ids`.
        """
        size = config.rows_per_microbatch
        multiple = config.row_length_multiple
        if not free_to_look(device):
            multiple = math.lcm(multiple, DEFAULT_BLOCK_SIZE)
        for start in range(0, self.rows.num_rows, size):
            part = self.rows.rows(slice(start, start + size)).trim(multiple)
            tensors = {
                name: tensor for name, tensor in part.tensors().items() if name in _MICROBATCH
            }
            tensors |= {
                name: signal[start : start + size, : part.seq_len]
                for name, signal in self.signals.items()
            }
            if self.reference_hidden:
                tensors["reference_hidden"] = torch.cat(self.reference_hidden[start : start + size])
            tensors["sample_keys"] = sample_keys(part.samples)
            for name in ("reward", "share"):
                tensors[f"sample_{name}s"] = torch.tensor(
                    [getattr(one, name) for one in part.samples], dtype=torch.float64
                )
            tensors["trained"] = (part.labels.flatten() != IGNORE).nonzero().squeeze(1)
            # A copy from unpinned memory waits for all queued GPU work.
            if device.type == "cuda":
                tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def sample_keys(samples: Sequence[PackedSample]) -> Tensor:
    """Return [S, 2]: a number for each sample's task and one for the sample, equal in all
    processes.
    """
    both = [[number_of(one.task_id), number_of(f"{one.task_id}\0{one.sample}")] for one in samples]
    return torch.tensor(both, dtype=torch.int64).reshape(-1, 2)


def updates(
    packed: PackedTensors,
    count: int,
    seed: tuple[int, int],
    ranks: Ranks,
    model: PretrainedConfig | None = None,
) -> list[Update]:
    """Split all rows into `count` optimizer steps, or one per row if there are fewer rows.

    With more than one step the rows are shuffled first, by `seed` = (seed, iteration) only: a
    step's rows do not depend on the ranks. `balance` deals a step's rows to the ranks by work;
    zero-weight rows fill up to a multiple of the ranks. model: the config for counting a row's
    FLOPs; required for several ranks.
    """
    # Rows of pure padding teach nothing.
    order = torch.nonzero((packed.labels != IGNORE).any(dim=1)).squeeze(1)
    count = min(count, len(order))
    if count > 1:
        order = order[torch.randperm(len(order), generator=derived_generator(*seed))]
    cost: list[float] = []
    if ranks.world_size > 1:
        assert model is not None
        cost = row_flops(packed, model)
    result = []
    for chosen in order.tensor_split(count):
        if ranks.world_size > 1:
            chosen = chosen[balance([cost[row] for row in chosen.tolist()], ranks.world_size)]
        step = packed.rows(chosen.tolist())
        padded = step.pad_rows_to_multiple(ranks.world_size)
        mine = slice(ranks.rank, None, ranks.world_size)
        numbers = chosen.tolist() + [-1] * (padded.num_rows - step.num_rows)
        result.append(
            Update(
                padded.rows(mine), normaliser(step), ranks.world_size, numbers[mine], step.num_rows
            )
        )
    return result


def check_pack(packed: PackedTensors, policy: Policy, model: str | Path | None = None) -> None:
    """Raise PackError if the pack cannot be of this model: token ids beyond its vocabulary,
    positions beyond its context, or a recorded tokenizer other than that of the folder `model`.
    """
    if not packed.num_trained:
        raise PackError(
            f"none of the pack's {packed.num_rows} rows has a trained token; check max_tokens and "
            "seq_len, and pack again"
        )
    vocab_size = policy.decoder.tok_embeddings.num_embeddings
    context = policy.decoder.max_seq_len
    largest = int(torch.maximum(packed.tokens.max(), packed.labels.max()))
    if largest >= vocab_size:
        raise PackError(
            f"the pack holds token id {largest}, but the model has {vocab_size} tokens; use the "
            "model of the pack"
        )
    longest = int(packed.input_pos.max()) + 1
    if longest > context:
        raise PackError(
            f"a packed sample has {longest} positions, but the model's context is {context}; "
            "lower max_tokens, or remove longer examples"
        )
    made_with = packed.metadata.get(TOKENIZER_KEY)
    if model is not None:
        own = tokenizer_digest(model)
    else:
        own = None
    if made_with is not None and own is not None and made_with != own:
        raise PackError(
            f"the pack was made with another tokenizer than that of {model} (digests "
            f"{made_with[:12]} and {own[:12]}), so its token ids differ in meaning; pack again "
            "with this model, or train the pack's model"
        )


def replayed(packed: PackedTensors, policy: Policy, config: GRPOConfig) -> PackedTensors:
    """Return the pack with the sampler's experts if `router_replay` is set, else without. Raises
    PackError if they are required but missing, or do not fit this model."""
    experts = packed.experts
    if not config.router_replay:
        return dataclasses.replace(packed, experts=None)
    if experts is None:
        raise PackError(
            "router_replay: the pack holds no experts; sample with router_replay=True, or switch "
            "it off"
        )
    routing = getattr(policy.decoder, "routing", None)
    layers = len(policy.decoder.layers)
    known = 0 if routing is None else routing.experts
    if experts.shape[2] != layers or int(experts.max()) >= known:
        raise PackError(
            f"the pack holds experts up to number {int(experts.max())} of {experts.shape[2]} "
            f"layers, but the model has {known} experts and {layers} layers; use the model of the "
            "pack"
        )
    return packed


def policy_inputs(batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        batch[name] for name in ("tokens", "labels", "group_ids", "parent_ids", "input_pos")
    )
