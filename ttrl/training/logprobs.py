"""From hidden states to log-probabilities without ever holding the logits of a whole row. Needs torch alone.

Shapes: B rows, T tokens, N trained positions, D width, V vocabulary.

Only trained positions go through the output projection, in chunks whose logits are computed again in the backward pass
(torch.utils.checkpoint), so that the peak is one chunk's logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # the label of positions where nothing is trained, as everywhere in PyTorch


def _chunk_logprobs(
    h_ND: Tensor, labels_N: Tensor, output: Callable[[Tensor], Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    logits_NV = output(h_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature  # float64 stays for the tests
    all_logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():  # only reported
        entropy_N = -(all_logprobs_NV.exp() * all_logprobs_NV).sum(-1)
    return all_logprobs_NV.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1), entropy_N


def chunked_logprobs(
    h_ND: Tensor, labels_N: Tensor, output: Callable[[Tensor], Tensor], num_chunks: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and entropies of the distributions they come from, both [N], in nats, fp32 or wider; of
    softmax(logits / temperature), which is what a sampler draws from. Entropies have no gradient.

    `output` projects [n, D] to logits [n, V]. N = 0 works, and keeps the graph: ranks without a trained token still take part in
    every collective of the backward pass.
    """
    chunks = max(1, min(num_chunks, h_ND.shape[0]))
    logprobs, entropies = [], []
    for h, labels in zip(h_ND.chunk(chunks), labels_N.chunk(chunks), strict=True):
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_chunk_logprobs, h, labels, output, temperature, use_reentrant=False)
        else:
            logprob, entropy = _chunk_logprobs(h, labels, output, temperature)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)
