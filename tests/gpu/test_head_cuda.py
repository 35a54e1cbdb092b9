"""The output head on a GPU, with its kernels, against logits in float64 on the same GPU, at the
vocabularies of real models.
"""

import pytest
import torch

from ttrl.training.kernels import head_blocks
from ttrl.training.kernels.logprobs import ReferenceHead, run_head

HOW = [(1.0, None), (0.7, 8.0)]


def exact(h, weight, labels, temperature, soft_cap):
    """Log-probabilities of all tokens, entropies, and the labels' log-probabilities."""
    z = h @ weight.T
    z = (z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)) / temperature
    logp = torch.log_softmax(z, -1)
    return logp, -(logp.exp() * logp).sum(-1), logp.gather(1, labels[:, None]).squeeze(1)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(151_936, torch.bfloat16), (50_257, torch.float32)]
)
@pytest.mark.parametrize(("temperature", "soft_cap"), HOW)
@pytest.mark.parametrize("form", ["loss", "recompute", "entropy", "divergence"])
def test_outputs_and_gradients(form, temperature, soft_cap, dtype, vocabulary):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    n, width = 37, 64
    h, weight, other = (
        random(n, width),
        random(vocabulary, width) * 0.3,
        random(vocabulary, width) * 0.3,
    )
    labels = torch.randint(vocabulary, (n,), generator=generator, device="cuda")
    upstream = torch.randn(3, n, generator=generator, device="cuda")
    wide = [h.double().requires_grad_(), weight.double().requires_grad_()]
    logp, entropy, logprobs = exact(*wide, labels, temperature, soft_cap)
    logq = exact(h.double(), other.double(), labels, temperature, soft_cap)[0]
    divergence = (logp.exp() * (logp - logq)).sum(-1)
    own = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    how = {"chunk_size": 16, "temperature": temperature, "soft_cap": soft_cap}
    if form == "loss":
        out = run_head(
            own[0],
            labels,
            own[1],
            **how,
            token_loss=lambda logp, part: upstream[0][part] * logp.square(),
        )
        loss, ours = (upstream[0] * logprobs.square()).sum(), out.loss
    elif form == "recompute":
        out = run_head(own[0], labels, own[1], **how)
        loss, ours = (upstream[0] * logprobs).sum(), (upstream[0] * out.logprobs_N).sum()
    elif form == "entropy":
        out = run_head(own[0], labels, own[1], **how, entropy_grad=True)
        loss = (upstream[0] * logprobs + upstream[1] * entropy).sum()
        ours = (upstream[0] * out.logprobs_N + upstream[1] * out.entropy_N).sum()
    else:
        reference = ReferenceHead(h, other)
        out = run_head(own[0], labels, own[1], **how, reference=reference, divergence_grad=True)
        loss = (upstream[0] * logprobs + upstream[2] * divergence).sum()
        ours = (upstream[0] * out.logprobs_N + upstream[2] * out.divergence_N).sum()
        torch.testing.assert_close(
            out.divergence_N.double(),
            divergence,
            rtol=0.02 if dtype is torch.bfloat16 else 1e-4,
            atol=1e-3,
        )
    # Logits are kept in fp32, but not those beside a reference, in bf16: 2⁻⁹ of a logit of some
    # ten.
    near = 0.05 if dtype is torch.bfloat16 and form == "divergence" else 2e-4
    torch.testing.assert_close(out.logprobs_N.double(), logprobs, rtol=1e-5, atol=near)
    torch.testing.assert_close(out.entropy_N.double(), entropy, rtol=1e-4, atol=near)
    expected = torch.autograd.grad(loss, wide)
    for one, right in zip(torch.autograd.grad(ours, own), expected, strict=True):
        assert float((one.double() - right).norm() / right.norm()) < (
            0.02 if dtype is torch.bfloat16 else 1e-4
        )


def test_kernels_are_there():
    assert head_blocks.fused_kernels(torch.empty(1, 1, device="cuda")) is not None
