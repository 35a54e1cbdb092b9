"""How tokens are weighed against each other: the loss of an optimizer step is Σ w·ℓ / Z.

token      w = 1                          Z = trained tokens                   every token counts the same
sequence   w = 1 / its sample's length    Z = samples with a trained token     every sample counts the same
constant   w = 1                          Z = samples × a fixed length         Dr. GRPO: no length in the weights at all

A sample of several sequences (turns that do not continue each other, `TokenizedResult.share`) counts as one sample: each of its
sequences counts for its share of the sample's generated tokens, in w and in Z.

w is stored with the packed tensors. Z belongs to the rows of one optimizer step, over all ranks and microbatches, and is known
before the forward pass.
"""

import math

import torch

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL


def num_trained_samples(packed: PackedTensors) -> float:
    """Count the samples with at least one label in these rows; of a sample that is several sequences, the share that is here."""
    trained = torch.unique(packed.sample_ids[packed.labels != IGNORE_LABEL]).tolist()
    return math.fsum(packed.samples[number].share for number in trained)


def normaliser(packed: PackedTensors) -> float:
    """Return Z of these rows. Rows are disjoint, so the Z of several ranks or microbatches add up to the Z of the step.

    0.0 where nothing is trained (rows of padding alone).
    """
    if packed.aggregation == "token":
        return float(packed.num_trained)
    if packed.aggregation == "sequence":
        return num_trained_samples(packed)
    assert packed.aggregation == "constant" and packed.constant_length is not None
    return num_trained_samples(packed) * packed.constant_length
