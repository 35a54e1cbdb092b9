"""The head's kernels for GPUs, run by Triton's interpreter: against float64, alone and as a part of
the head.

Run by tests/training/kernels/test_fused_head.py in a process that has TRITON_INTERPRET=1 before
anything imports Triton. That they compile for GPUs is for tools/check_kernels.py to see; that a GPU
computes the same, for the certificate.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from ttrl.training.kernels import fused_head, head_blocks
from ttrl.training.kernels.head_blocks import HeadChunk, VocabShards
from ttrl.training.kernels.logprobs import run_head


@pytest.fixture
def kernels():
    """Those of the module, with blocks that a vocabulary of a hundred does not fill evenly."""
    return SimpleNamespace(
        measure=functools.partial(fused_head.measure, block=32),
        gradient=functools.partial(fused_head.gradient, block=32),
    )


@pytest.fixture
def interpreted(kernels, monkeypatch):
    """Have the head take them on the CPU too; returns how often it did."""
    taken = []

    def fused(raw):
        taken.append(raw.dtype)
        return kernels

    monkeypatch.setattr(head_blocks, "fused_kernels", fused)
    return taken


def exact(raw, labels, temperature, soft_cap):
    """Log-normalisers, entropies and the labels' z, in float64."""
    z = raw.double() if soft_cap is None else soft_cap * torch.tanh(raw.double() / soft_cap)
    z = z / temperature
    logp = torch.log_softmax(z, -1)
    return z, logp, -(logp.exp() * logp).sum(-1), logp.gather(1, labels[:, None]).squeeze(1)


HOW = [(1.0, None), (0.6, None), (1.3, 5.0)]


@pytest.mark.parametrize(("temperature", "soft_cap"), HOW)
@pytest.mark.parametrize("scale", [1.0, 30.0, 0.0])
def test_what_is_measured(temperature, soft_cap, scale, kernels):
    """Also where one token has all of the probability, or all have the same."""
    generator = torch.Generator().manual_seed(0)
    raw = scale * torch.randn(5, 101, generator=generator)
    raw[0, 100] += 40.0
    labels = torch.tensor([100, 0, 31, 32, 64])
    z, _, entropy, _ = exact(raw, labels, temperature, soft_cap)
    found = kernels.measure(raw, labels, temperature, soft_cap)
    torch.testing.assert_close(found[0].double(), z.logsumexp(-1), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found[1].double(), entropy, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(
        found[2].double(), z.gather(1, labels[:, None]).squeeze(1), rtol=2e-6, atol=2e-6
    )
    elsewhere = kernels.measure(raw, labels - 101, temperature, soft_cap)  # another rank's labels
    assert not elsewhere[2].any() and torch.equal(elsewhere[0], found[0])
    assert [len(x) for x in kernels.measure(raw[:0], labels[:0], temperature, soft_cap)] == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(("temperature", "soft_cap"), HOW)
@pytest.mark.parametrize("of_entropy", [False, True])
def test_the_gradient(temperature, soft_cap, of_entropy, kernels):
    """… against autograd in float64, into a buffer of its own in bf16 and in place."""
    generator = torch.Generator().manual_seed(1)
    raw = 3 * torch.randn(4, 70, generator=generator)
    labels, upstream = torch.tensor([69, 0, 31, 32]), torch.randn(2, 4, generator=generator)
    leaf = raw.double().requires_grad_()
    z, _, entropy, logprobs = exact(leaf, labels, temperature, soft_cap)
    total = (upstream[0] * logprobs).sum() + (upstream[1] * entropy).sum() * of_entropy
    (expected,) = torch.autograd.grad(total, leaf)
    known = z.logsumexp(-1).float().detach(), entropy.float().detach()
    lower = torch.empty_like(raw, dtype=torch.bfloat16)
    given = labels, known, (upstream[0], upstream[1] if of_entropy else None), temperature, soft_cap
    kernels.gradient(raw, lower, *given)
    kernels.gradient(raw, raw, *given)
    torch.testing.assert_close(raw.double(), expected, rtol=1e-5, atol=1e-6)
    # The interpreter cuts off, where GPUs round.
    torch.testing.assert_close(lower.float(), raw, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("with_loss", [False, True])
def test_the_head_with_kernels(with_loss, interpreted):
    """Both forms of it, against logits in float64: outputs, and the gradients of hidden states,
    weight and bias.
    """
    generator = torch.Generator().manual_seed(2)
    h, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((9, 16), (75, 16), (75,))
    )
    labels, upstream = (
        torch.randint(75, (9,), generator=generator),
        torch.randn(2, 9, generator=generator),
    )
    wide = [x.double().requires_grad_() for x in (h, weight, bias)]
    _, _, entropy, logprobs = exact(wide[0] @ wide[1].T + wide[2], labels, 0.7, 8.0)
    own = [x.clone().requires_grad_() for x in (h, weight, bias)]
    settings = {"bias_V": own[2], "chunk_size": 4, "temperature": 0.7, "soft_cap": 8.0}
    if with_loss:
        loss = (upstream[0] * logprobs.square()).sum()
        out = run_head(
            *own[:1],
            labels,
            own[1],
            **settings,
            token_loss=lambda logp, part: upstream[0][part] * logp.square(),
        )
        ours = out.loss
    else:
        loss = (upstream[0] * logprobs).sum() + (upstream[1] * entropy).sum()
        out = run_head(*own[:1], labels, own[1], **settings, entropy_grad=True)
        ours = (upstream[0] * out.logprobs_N).sum() + (upstream[1] * out.entropy_N).sum()
    torch.testing.assert_close(out.logprobs_N.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.entropy_N.double(), entropy, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(loss, wide)
    for one, other in zip(torch.autograd.grad(ours, own), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert interpreted


def test_products_in_bf16_leave_logits_in_fp32(interpreted, monkeypatch):
    """… and are nearer to float64 than logits that were rounded; products need the gradient in
    bf16.
    """
    generator = torch.Generator().manual_seed(3)
    h, weight = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((6, 64), (90, 64))
    )
    labels, product = torch.randint(90, (6,), generator=generator), torch.mm

    def mm(a, b, out_dtype=None, out=None):  # which CPUs do not have
        return (
            product(a, b, out=out)
            if out_dtype is None
            else product(a.to(out_dtype), b.to(out_dtype), out=out)
        )

    monkeypatch.setattr(torch, "mm", mm)
    own = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = run_head(own[0], labels, own[1], chunk_size=4)
    assert found.logprobs_N.dtype == torch.float32 and torch.float32 in interpreted
    _, _, _, logprobs = exact(h.double() @ weight.double().T, labels, 1.0, None)
    far = float((found.logprobs_N.double() - logprobs).abs().max())
    rounded = exact((h.double() @ weight.double().T).bfloat16(), labels, 1.0, None)[3]
    assert far < 1e-4 < float((rounded - logprobs).abs().max())
    found.logprobs_N.sum().backward()
    wide = [x.double().requires_grad_() for x in (h, weight)]
    torch.log_softmax(wide[0] @ wide[1].T, -1).gather(1, labels[:, None]).sum().backward()
    for one, other in zip(own, wide, strict=True):
        assert float((one.grad - other.grad).norm() / other.grad.norm()) < 0.01


def test_parts_of_a_vocabulary_are_put_together(kernels, monkeypatch):
    """Their entropies weigh by their probability, and each has its own uncertainty on top. Two
    ranks, one after the other.
    """
    raw = 3 * torch.randn(4, 60, generator=torch.Generator().manual_seed(4))
    labels = torch.tensor([0, 24, 25, 59])
    _, _, entropy, logprobs = exact(raw, labels, 0.8, None)
    parts = [(raw[:, :25], 0), (raw[:, 25:], 25)]
    alone = [kernels.measure(part.contiguous(), labels - first, 0.8, None) for part, first in parts]
    normaliser = torch.logsumexp(torch.stack([one[0] for one in alone]), 0)
    shares = [one[0] - normaliser for one in alone]
    entropies = sum(
        share.exp() * (one[1] - share) for share, one in zip(shares, alone, strict=True)
    )
    labels_z = sum(one[2] for one in alone)

    class Both(VocabShards):
        """The sums over both, by what the other is known to have."""

        def sum(self, x):
            return {0: labels_z, 1: entropies}[int(torch.equal(x, mine_entropy))].clone().float()

        def logsumexp(self, x):
            return normaliser

    for (part, first), one, share in zip(parts, alone, shares, strict=True):
        mine_entropy = share.exp() * (one[1] - share)
        chunk = HeadChunk(SimpleWeights(Both(object(), first, 60)), labels, part.contiguous())
        known = chunk._measured(kernels)
        torch.testing.assert_close(known.logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(known.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


class SimpleWeights:
    temperature, soft_cap = 0.8, None

    def __init__(self, shards):
        self.shards = shards
