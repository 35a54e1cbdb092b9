"""A policy with few sequences: expectations are sums over all of them.

Sequences have at most 3 tokens of a vocabulary of 3. Shapes: S sequences, T their tokens.
"""

import torch

from ttrl.instruments.entropy import by_sequence

VOCAB, END, LONGEST = 3, 2, 3  # a sequence ends with END, or after 3 tokens


def every_sequence(prefix=()):
    if prefix and (prefix[-1] == END or len(prefix) == LONGEST):
        return [prefix]
    return [one for token in range(VOCAB) for one in every_sequence((*prefix, token))]


SEQUENCES = every_sequence()
PREFIXES = sorted({one[:k] for one in SEQUENCES for k in range(len(one))})


def a_policy(seed=0):
    """A free distribution after each prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        len(PREFIXES), VOCAB, generator=generator, dtype=torch.float64, requires_grad=True
    )


def tables(logits, sequences=SEQUENCES):
    """log π and entropy at each place, [S, T], 0 behind the end."""
    logp = torch.log_softmax(logits, dim=1)
    entropy = -(logp.exp() * logp).sum(dim=1)
    rows = [[PREFIXES.index(one[:k]) for k in range(len(one))] for one in sequences]
    samples = torch.tensor([s for s, row in enumerate(rows) for _ in row])
    places = torch.tensor([place for row in rows for place in row])
    tokens = torch.tensor([token for one in sequences for token in one])
    return by_sequence(logp[places, tokens], samples), by_sequence(entropy[places], samples)


def probabilities(logits):
    """Of every sequence [S], without gradient."""
    return tables(logits.detach())[0].sum(dim=1).exp()


def exact_entropy(logits):
    log_pi = tables(logits)[0].sum(dim=1)
    return -(log_pi.exp() * log_pi).sum()
