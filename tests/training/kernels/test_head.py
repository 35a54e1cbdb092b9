"""The output head against plain log_softmax and autograd in float64, in both of its forms."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.training.kernels import head_blocks
from ttrl.training.kernels.logprobs import HeadOutput, ReferenceHead, run_head

N, D, V = 7, 5, 11


def inputs(dtype=torch.float64, n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    labels = torch.randint(V, (n,), generator=generator)
    reference = ReferenceHead(normal(n, D), normal(V, D), normal(V))
    return (
        normal(n, D).requires_grad_(),
        labels,
        normal(V, D).requires_grad_(),
        normal(V).requires_grad_(),
        reference,
    )


def plain(h, labels, weight, bias, reference, temperature, soft_cap):
    """The definitions, with whole logits."""

    def logprobs(h, weight, bias):
        logits = h @ weight.T + (0 if bias is None else bias)
        logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
        return torch.log_softmax(logits / temperature, dim=-1)

    logp = logprobs(h, weight, bias)
    logq = logprobs(reference.h_ref_ND, reference.weight_ref_VD, reference.bias_ref_V)
    p = logp.exp()
    return HeadOutput(
        logp.gather(1, labels[:, None])[:, 0], -(p * logp).sum(-1), (p * (logp - logq)).sum(-1)
    )


def token_loss(coefficients):
    """Not linear, and another function for each token."""
    return lambda logprobs, part: coefficients[part] * torch.exp(-0.3 * logprobs)


def assert_close(ours, expected, tolerance=1e-12):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


settings_of_heads = {
    "temperature": st.sampled_from([1.0, 0.7]),
    "soft_cap": st.sampled_from([None, 2.0]),
    "with_bias": st.booleans(),
    "chunk_size": st.integers(1, N + 1),
}


@settings(deadline=None, max_examples=40)
@given(**settings_of_heads)
def test_recompute_form_equals_autograd(temperature, soft_cap, with_bias, chunk_size):
    h, labels, weight, bias, reference = inputs()
    parameters = (h, weight, bias) if with_bias else (h, weight)
    bias = bias if with_bias else None
    out = run_head(
        h, labels, weight, chunk_size=chunk_size, temperature=temperature, soft_cap=soft_cap, bias_V=bias, reference=reference,
        entropy_grad=True, divergence_grad=True,
    )  # fmt: skip
    expected = plain(h, labels, weight, bias, reference, temperature, soft_cap)
    results = []
    for head in (out, expected):
        numbers = (head.logprobs_N, head.entropy_N, head.divergence_N)
        loss = sum((i * torch.arange(1.0, N + 1) * x.sin()).sum() for i, x in enumerate(numbers, 1))
        results.append((*numbers, *torch.autograd.grad(loss, parameters)))
    assert out.loss is None
    assert_close(*results)


@settings(deadline=None, max_examples=40)
@given(**settings_of_heads, with_reference=st.booleans())
def test_gradient_in_the_forward_pass_equals_autograd(
    temperature, soft_cap, with_bias, chunk_size, with_reference
):
    h, labels, weight, bias, reference = inputs()
    coefficients = torch.linspace(-1, 2, N, dtype=torch.float64)
    parameters = (h, weight, bias) if with_bias else (h, weight)
    bias = bias if with_bias else None
    out = run_head(
        h, labels, weight, chunk_size=chunk_size, temperature=temperature, soft_cap=soft_cap, bias_V=bias,
        reference=reference if with_reference else None, token_loss=token_loss(coefficients),
    )  # fmt: skip
    expected = plain(h, labels, weight, bias, reference, temperature, soft_cap)
    loss = token_loss(coefficients)(expected.logprobs_N, slice(0, N)).sum()
    assert not (out.logprobs_N.requires_grad or out.entropy_N.requires_grad)
    ours = (
        out.loss,
        out.logprobs_N,
        out.entropy_N,
        *torch.autograd.grad(out.loss * 0.4, parameters),
    )
    assert_close(
        ours,
        (
            loss,
            expected.logprobs_N,
            expected.entropy_N,
            *torch.autograd.grad(loss * 0.4, parameters),
        ),
    )
    if with_reference:
        torch.testing.assert_close(out.divergence_N, expected.divergence_N)
    else:
        assert out.divergence_N is None


class Ranks:
    """Collectives between threads, each a rank, in place of torch.distributed's."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=30)
        self.given = [None] * count
        self.here = threading.local()

    def get_world_size(self, group):
        return len(self.given)

    def get_rank(self, group):
        return self.here.rank

    def all_gather(self, out, tensor, group):
        self.given[self.here.rank] = tensor
        self.barrier.wait()
        for place, one in zip(out, self.given, strict=True):
            place.copy_(one)
        self.barrier.wait()

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        every = [torch.empty_like(tensor) for _ in self.given]
        self.all_gather(every, tensor, group)
        stacked = torch.stack(every)
        is_sum = op == torch.distributed.ReduceOp.SUM
        tensor.copy_(stacked.sum(0) if is_sum else stacked.amax(0))

    def run(self, function):
        """Call the function as each rank, with its number."""

        def as_rank(rank):
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(len(self.given)) as threads:
            return list(threads.map(as_rank, range(len(self.given))))


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("parts", [(4, 7), (1, 9, 1)], ids=str)
def test_a_sharded_vocabulary_is_the_whole_one(parts, soft_cap, monkeypatch):
    """In both forms: all outputs, the gradient of the hidden states on each rank, and each rank's
    own rows of the weight's.
    """
    ranks = Ranks(len(parts))
    monkeypatch.setattr(head_blocks, "dist", ranks)
    h, labels, weight, bias, reference = inputs()
    coefficients = torch.linspace(-1, 2, N, dtype=torch.float64)

    def outputs(head, leaves, form):
        numbers = (head.logprobs_N, head.entropy_N, head.divergence_N)
        loss = head.loss
        if form == "recompute":
            loss = sum((i * x.sin()).sum() for i, x in enumerate(numbers, 1))
        elif loss is None:
            loss = token_loss(coefficients)(head.logprobs_N, slice(0, N)).sum()
        return (*numbers, *torch.autograd.grad(loss, leaves))

    def as_rank(rank, form):
        rows = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
        leaves = [one.detach().clone().requires_grad_() for one in (h, weight[rows], bias[rows])]
        part = ReferenceHead(
            reference.h_ref_ND, reference.weight_ref_VD[rows], reference.bias_ref_V[rows]
        )
        how = {"entropy_grad": True, "divergence_grad": True}
        if form == "loss":
            how = {"token_loss": token_loss(coefficients)}
        head = run_head(
            *(leaves[0], labels, leaves[1]), bias_V=leaves[2], chunk_size=3, soft_cap=soft_cap,
            temperature=0.7, reference=part, vocab_group="group", **how,
        )  # fmt: skip
        return outputs(head, leaves, form)

    for form in ("recompute", "loss"):
        whole = plain(h, labels, weight, bias, reference, 0.7, soft_cap)
        *same, of_weight, of_bias = outputs(whole, (h, weight, bias), form)
        by_rank = ranks.run(lambda rank, form=form: as_rank(rank, form))
        for *ours, _, _ in by_rank:
            assert_close(ours, same)
        assert_close([torch.cat([one[-2] for one in by_rank])], [of_weight])
        assert_close([torch.cat([one[-1] for one in by_rank])], [of_bias])


def test_gradients_equal_finite_differences():
    h, labels, weight, bias, reference = inputs(n=3)

    def everything(h, weight, bias):
        head = run_head(
            h, labels, weight, bias_V=bias, chunk_size=2, soft_cap=3.0, temperature=0.9, reference=reference,
            entropy_grad=True, divergence_grad=True,
        )  # fmt: skip
        return head.logprobs_N, head.entropy_N, head.divergence_N

    assert torch.autograd.gradcheck(everything, (h, weight, bias))


def test_only_what_is_asked_for_has_a_gradient():
    h, labels, weight, _, reference = inputs()
    head = run_head(h, labels, weight, reference=reference)
    assert (
        head.logprobs_N.requires_grad
        and not head.entropy_N.requires_grad
        and not head.divergence_N.requires_grad
    )
    head = run_head(h, labels, weight, reference=reference, entropy_grad=True)
    assert head.entropy_N.requires_grad and not head.divergence_N.requires_grad
    # Without the log-probabilities in the loss.
    (grad,) = torch.autograd.grad(head.entropy_N.sum(), h)
    expected = plain(h, labels, weight, None, reference, 1.0, None)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.entropy_N.sum(), h)[0])


def test_frozen_weights_and_no_grad():
    h, labels, weight, _, _ = inputs()
    coefficients = torch.ones(N, dtype=torch.float64)
    (full,) = torch.autograd.grad(
        run_head(h, labels, weight, token_loss=token_loss(coefficients)).loss, h
    )
    frozen = run_head(h, labels, weight.detach(), token_loss=token_loss(coefficients))
    torch.testing.assert_close(torch.autograd.grad(frozen.loss, h)[0], full)
    with torch.no_grad():
        head = run_head(h, labels, weight, token_loss=token_loss(coefficients))
    assert not head.loss.requires_grad
    torch.testing.assert_close(head.loss, frozen.loss.detach())


def test_a_gradient_taken_twice_is_refused():
    h, labels, weight, _, _ = inputs()
    loss = run_head(
        h, labels, weight, token_loss=token_loss(torch.ones(N, dtype=torch.float64))
    ).loss
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="can be taken once"):
        loss.backward()


@pytest.mark.parametrize("fused", [True, False])
def test_no_trained_position_keeps_the_graph(fused):
    h, labels, weight, bias, reference = inputs(n=0)
    head = run_head(
        h,
        labels,
        weight,
        bias_V=bias,
        reference=reference,
        num_chunks=4,
        token_loss=(lambda x, _: x) if fused else None,
    )
    (head.loss if fused else head.logprobs_N.sum()).backward()
    assert head.logprobs_N.shape == head.entropy_N.shape == head.divergence_N.shape == (0,)
    assert not weight.grad.any() and not bias.grad.any() and h.grad.shape == (0, D)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_is_near_float64(fused, autocast):
    """Under autocast from fp32 parameters, and with bf16 parameters; more columns than are added up
    at once.
    """
    generator = torch.Generator().manual_seed(1)
    h, weight = (torch.randn(n, 32, generator=generator) / 4 for n in (40, 9000))
    labels = torch.randint(9000, (40,), generator=generator)
    # The same numbers in both.
    h, weight = (x.bfloat16().double().requires_grad_() for x in (h, weight))
    exact = torch.log_softmax(h @ weight.T, -1)
    logprobs = exact.gather(1, labels[:, None])[:, 0]
    expected = torch.autograd.grad(logprobs.sum(), (h, weight))

    lower = [
        x.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_()
        for x in (h, weight)
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        head = run_head(
            lower[0],
            labels,
            lower[1],
            chunk_size=16,
            token_loss=(lambda x, _: x) if fused else None,
        )
    assert head.logprobs_N.dtype == head.entropy_N.dtype == torch.float32
    grads = torch.autograd.grad(head.loss if fused else head.logprobs_N.sum(), lower)
    torch.testing.assert_close(head.logprobs_N.double(), logprobs, rtol=0, atol=0.02)
    entropy = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(head.entropy_N.double(), entropy, rtol=0, atol=0.02)
    for ours, theirs, x in zip(grads, expected, lower, strict=True):
        assert ours.dtype == x.dtype
        assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_gradients_of_nearly_certain_tokens(fused):
    """Their label's gradient is 1 - p, of which little is left where p is rounded to bf16 first."""
    weight, labels = torch.eye(16, dtype=torch.bfloat16), torch.arange(64) % 16
    noise = torch.rand(64, 16, generator=torch.Generator().manual_seed(1))
    h = (8 * weight[labels] + noise).bfloat16().requires_grad_()
    exact = h.detach().double().requires_grad_()
    torch.log_softmax(exact, -1)[torch.arange(64), labels].sum().backward()
    out = run_head(
        h, labels, weight, token_loss=(lambda logprobs, part: logprobs) if fused else None
    )
    (out.loss if fused else out.logprobs_N.sum()).backward()
    assert (h.grad.double() - exact.grad).norm() < 0.01 * exact.grad.norm()


def test_large_logits_stay_finite():
    h = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    head = run_head(h, torch.tensor([1]), weight, entropy_grad=True)
    torch.testing.assert_close(head.logprobs_N, torch.tensor([-600.0]))
    torch.testing.assert_close(head.entropy_N, torch.tensor([0.0]))
    (head.logprobs_N.sum() + head.entropy_N.sum()).backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-300.0], [300.0], [0.0]]))


def test_misuse_is_refused():
    h, labels, weight, _, _ = inputs()
    for wrong, message in [
        ({"num_chunks": 2, "chunk_size": 2}, "not both"),
        ({"entropy_grad": True, "token_loss": token_loss(torch.ones(N))}, "recompute form"),
        ({"divergence_grad": True}, "needs a reference"),
    ]:
        with pytest.raises(AssertionError, match=message):
            run_head(h, labels, weight, **wrong)


MINE = (slice(0, 7), slice(7, V))  # parts of different size


def sharded(group, rank, seed=0):
    """What one rank computes from its part of the vocabulary: numbers and gradients in both
    forms.
    """
    h, labels, weight, bias, reference = inputs(seed=seed)
    weight, bias = (x.detach()[MINE[rank]].clone().requires_grad_() for x in (weight, bias))
    part = ReferenceHead(
        reference.h_ref_ND, reference.weight_ref_VD[MINE[rank]], reference.bias_ref_V[MINE[rank]]
    )
    common = {
        "bias_V": bias,
        "reference": part,
        "chunk_size": 3,
        "soft_cap": 2.0,
        "temperature": 0.7,
        "vocab_group": group,
    }
    head = run_head(h, labels, weight, entropy_grad=True, divergence_grad=True, **common)
    loss = (head.logprobs_N * 2 + head.entropy_N * 3 + head.divergence_N * 5).sum()
    results = [
        head.logprobs_N,
        head.entropy_N,
        head.divergence_N,
        *torch.autograd.grad(loss, (h, weight, bias)),
    ]
    head = run_head(h, labels, weight, token_loss=lambda logprobs, _: logprobs.sin(), **common)
    return [
        x.detach()
        for x in [
            *results,
            head.loss,
            head.divergence_N,
            *torch.autograd.grad(head.loss, (h, weight, bias)),
        ]
    ]


def assert_same_as_whole(ranks):
    h, labels, weight, bias, reference = inputs()
    expected = plain(h, labels, weight, bias, reference, 0.7, 2.0)
    loss = (expected.logprobs_N * 2 + expected.entropy_N * 3 + expected.divergence_N * 5).sum()
    sines = expected.logprobs_N.sin().sum()
    whole = [expected.logprobs_N, expected.entropy_N, expected.divergence_N]
    whole += torch.autograd.grad(loss, (h, weight, bias), retain_graph=True)
    whole += [sines, expected.divergence_N, *torch.autograd.grad(sines, (h, weight, bias))]
    gradients_of_parts = {4, 5, 9, 10}
    for results, mine in zip(ranks, MINE, strict=True):
        for number, (ours, theirs) in enumerate(zip(results, whole, strict=True)):
            torch.testing.assert_close(
                ours, (theirs[mine] if number in gradients_of_parts else theirs).detach()
            )


RANKS = """
import os, sys, torch
folder = sys.argv[1]
sys.path.append(sys.argv[2])
import test_head
torch.set_num_threads(1)
rank = int(os.fork() == 0)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.save(test_head.sharded(torch.distributed.group.WORLD, rank), f"{folder}/{rank}.pt")
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.e2e
def test_a_sharded_vocabulary_over_gloo(tmp_path):
    """Only processes meet in a real group."""
    subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path), str(Path(__file__).parent)],
        check=True,
        timeout=250,
    )
    assert_same_as_whole([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])
