"""Which rows are trained together: packed rows → optimizer steps → this rank's microbatches."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ttrl.data.aggregation import normaliser
from ttrl.data.packing import PackedTensors
from ttrl.errors import PackError
from ttrl.training.distributed import Ranks
from ttrl.training.logprobs import IGNORE
from ttrl.training.policy import Policy


@dataclass
class Update:
    """One optimizer step: this rank's rows of it, and the normaliser of the whole step, over all ranks."""

    rows: PackedTensors
    normaliser: float
    world_size: int

    def backward(self, weighted_loss_N: Tensor) -> None:
        """Adds the gradient of Σ weighted_loss / Z to the parameters. FSDP takes the mean of the gradients over the ranks; the
        factor makes it the sum, so that gradients, and what clipping does to them, don't depend on the number of ranks."""
        (weighted_loss_N.sum() * (self.world_size / self.normaliser)).backward()

    def microbatches(self, size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Parts of at most `size` rows, trimmed to their longest row; every rank gets the same number of them."""
        for start in range(0, self.rows.num_rows, size):
            part = self.rows.rows(slice(start, start + size)).trim()
            names = ["tokens", "labels", "group_ids", "parent_ids", "input_pos", "logprobs", "advantages", "weights"]
            if part.reference_logprobs is not None:
                names.append("reference_logprobs")
            yield {name: getattr(part, name).to(device) for name in names}


def derived_generator(*parts: int) -> torch.Generator:
    """A random generator that depends on all of the numbers, (seed, iteration, …), and on nothing else in the process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def updates(packed: PackedTensors, count: int, seed: tuple[int, int], ranks: Ranks) -> list[Update]:
    """Splits the rows into `count` optimizer steps, or one per row where there are fewer rows; no row is left out.

    With more than one step the rows are shuffled first, by `seed` = (seed, iteration) and nothing else. Rows are brought to a
    multiple of the ranks with zero-weight rows, which every rank then deals out alike.
    """
    order = torch.nonzero((packed.labels != IGNORE).any(dim=1)).squeeze(1)  # rows of padding alone teach nothing
    count = min(count, len(order))
    if count > 1:
        order = order[torch.randperm(len(order), generator=derived_generator(*seed))]
    result = []
    for chosen in order.tensor_split(count):
        step = packed.rows(chosen)
        mine = step.pad_rows_to_multiple(ranks.world_size)
        result.append(Update(mine.rows(slice(ranks.rank, None, ranks.world_size)), normaliser(step), ranks.world_size))
    return result


def check_pack(packed: PackedTensors, policy: Policy) -> None:
    """Raises PackError where the pack cannot be of this model: token ids beyond its vocabulary, positions beyond its context."""
    if not packed.num_trained:
        raise PackError(f"none of the pack's {packed.num_rows} rows has a label, so there is nothing to train on")
    vocab_size, context = policy.decoder.tok_embeddings.num_embeddings, policy.decoder.max_seq_len
    largest = int(torch.maximum(packed.tokens.max(), packed.labels.max()))
    if largest >= vocab_size:
        raise PackError(
            f"the pack holds token id {largest}, but the model has {vocab_size} tokens; was it made with another model?"
        )
    longest = int(packed.input_pos.max()) + 1
    if longest > context:
        raise PackError(f"a packed sample has {longest} positions, but the model's context is {context}; lower max_tokens")


@torch.no_grad()
def row_logprobs(policy: Policy, rows: PackedTensors, size: int, device: torch.device) -> Tensor:
    """Log-probabilities [R, T] of all labels under the policy as it is; NaN elsewhere. A collective when it is sharded."""
    result = torch.full(rows.labels.shape, torch.nan)
    for start in range(0, rows.num_rows, size):
        part = rows.rows(slice(start, start + size)).trim()
        inputs = (part.tokens, part.labels, part.group_ids, part.parent_ids, part.input_pos)
        logprobs, _ = policy(*(tensor.to(device) for tensor in inputs))
        result[start : start + size, : part.seq_len][part.labels != IGNORE] = logprobs.float().cpu()
    return result
