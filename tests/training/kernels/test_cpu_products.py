"""Projections through oneDNN against F.linear, their gradients among them, and when they are not
taken.
"""

import json

import pytest
import torch
from support.training_steps import adapter_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from ttrl.training.kernels import cpu_ops, cpu_products
from ttrl.training.policy.lora import AdaptedLinear, without_adapters

pytestmark = pytest.mark.skipif(
    not cpu_products.fast(torch.zeros(1)), reason="PyTorch without oneDNN, or no x86 CPU"
)


def layers(*widths, bias=True):
    torch.manual_seed(0)
    return [nn.Linear(12, width, bias=bias) for width in widths]


def adapted(width, **settings):
    layer = AdaptedLinear(nn.Linear(12, width), adapter_config(**settings))
    layer.requires_grad_(False)
    for part in (layer.lora_a, layer.lora_b):
        nn.init.normal_(part).requires_grad_(True)
    return layer


def gradients(outputs, tensors):
    loss = sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs)
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(2, 7), (5,), (0,)])
def test_equal_to_linear_layers(rows, bias):
    ours = layers(8, 4, 6, bias=bias)
    x = torch.randn(*rows, 12, requires_grad=True)
    tensors = [x, *(p for layer in ours for p in layer.parameters())]
    assert cpu_products.serve(x, *ours)
    own, plain = cpu_products.project(x, *ours), [layer(x) for layer in ours]
    torch.testing.assert_close(own, tuple(plain))
    torch.testing.assert_close(gradients(own, tensors), gradients(plain, tensors))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("rows", [(2, 7), (5,), (0,)])
def test_adapters_in_one_operation_equal_their_formula(rows, frozen):
    """Two adapted layers around a plain one, the first with its heads' halves as pairs, in float64
    with merged matrices.
    """
    ours = [adapted(8), layers(4)[0].requires_grad_(False), adapted(6, lora_rank=1)]
    for layer in ours[::2]:
        layer.weight.requires_grad_(not frozen)
        layer.bias.requires_grad_(not frozen)
    x = torch.randn(*rows, 12, requires_grad=True)
    tensors = [x, *(p for layer in ours for p in layer.parameters() if p.requires_grad)]
    assert cpu_products.serve(x, *ours)
    own = cpu_products.project(x, *ours, pairs=(4,))
    wide = x.double()
    matrices = [layer.weight.double() for layer in ours]
    for number in (0, 2):
        layer = ours[number]
        matrices[number] = (
            matrices[number] + layer.scaling * layer.lora_b.double() @ layer.lora_a.double()
        )
    expected = [
        wide @ matrix.T + layer.bias.double() for matrix, layer in zip(matrices, ours, strict=True)
    ]
    expected[0] = expected[0][..., [0, 2, 1, 3, 4, 6, 5, 7]]
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradients(own, tensors), gradients(expected, tensors), rtol=1e-4, atol=1e-5
    )
    with without_adapters(ours[0]):
        torch.testing.assert_close(
            cpu_products.project(x, ours[0])[0],
            nn.functional.linear(x, ours[0].weight, ours[0].bias),
        )


def test_an_output_that_nothing_uses_and_frozen_weights():
    first, second = layers(8, 4)
    first.weight.requires_grad_(False)
    x = torch.randn(3, 12, requires_grad=True)
    used, _ = cpu_products.project(x, first, second)
    used.sum().backward()
    torch.testing.assert_close(x.grad, first.weight.sum(0).expand(3, 12))
    assert first.weight.grad is None and second.weight.grad is None
    torch.testing.assert_close(first.bias.grad, torch.full((8,), 3.0))


def test_the_input_of_frozen_weights_is_not_kept():
    (layer,) = layers(8)
    x, kept = torch.randn(3, 12, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor
    ):
        cpu_products.project(x, layer)
        assert x.shape in kept
        kept.clear()
        cpu_products.project(x, layer.requires_grad_(False))
        assert kept == [layer.weight.shape]
        kept.clear()
        cpu_products.project(x, with_adapter := adapted(8))
        assert sorted(kept) == sorted([x.shape, with_adapter.weight.shape, (4, 12), (8, 4), (3, 4)])


def test_pairs_are_the_halves_of_each_head_in_another_order():
    rows = torch.arange(12.0)  # two heads of six
    pairs = cpu_products.as_pairs(rows, 6)
    assert pairs.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(cpu_products.as_halves(pairs, 6), rows)
    matrix = torch.randn(12, 5)
    assert torch.equal(cpu_products.as_halves(cpu_products.as_pairs(matrix, 6), 6), matrix)


def test_scores_and_gradients_of_turned_pairs_are_those_of_turned_halves():
    """q·k after RoPE, which is all that attention sees of them."""
    query, key = layers(8, 8)
    x = torch.randn(1, 5, 12, requires_grad=True)
    angles = torch.randn(1, 5, 1, 2)
    turns = torch.complex(1.3 * angles.cos(), 1.3 * angles.sin())
    halves = [torch.cat([part, part], dim=-1) for part in (turns.real, turns.imag)]

    def scores(q, k):
        return torch.einsum("bqhe,bkhe->bhqk", q, k)

    paired = [
        part.unflatten(-1, (2, 4)) for part in cpu_products.project(x, query, key, pairs=(4, 4))
    ]
    plain = [layer(x).unflatten(-1, (2, 4)) for layer in (query, key)]
    own = scores(*(cpu_ops.turn_pairs(part, turns) for part in paired))
    expected = scores(*(cpu_ops.rotate_halves(part, *halves) for part in plain))
    torch.testing.assert_close(own, expected)
    tensors = [x, *query.parameters(), *key.parameters()]
    torch.testing.assert_close(
        gradients([own], tensors), gradients([expected], tensors), rtol=1e-4, atol=1e-5
    )


def test_logits_in_parts(monkeypatch):
    monkeypatch.setattr(cpu_products, "_COLUMNS", 3)
    h, weight, out = torch.randn(4, 12), torch.randn(10, 12), torch.full((4, 10), torch.nan)
    cpu_products.product_into(h, weight, out)
    torch.testing.assert_close(out, h @ weight.T)


def test_checkpointing_computes_the_same():
    (layer,) = layers(8)
    x = torch.randn(3, 12, requires_grad=True)

    def run(x):
        return torch.tanh(cpu_products.project(x, layer)[0])

    torch.testing.assert_close(
        gradients([checkpoint(run, x, use_reentrant=False)], [x, layer.weight]),
        gradients([run(x)], [x, layer.weight]),
    )


def test_what_is_left_to_pytorch():
    (layer,) = layers(8)
    x = torch.randn(3, 12)
    assert cpu_products.serve(x, layer)
    assert not cpu_products.serve(x.double(), layer)
    assert not cpu_products.serve(x, layer.double())
    assert cpu_products.serve(x, adapted(8))
    for other in (adapted(8, lora_kind="dora"), with_dropout := adapted(8, lora_dropout=0.1)):
        assert not cpu_products.serve(x, other)
        with without_adapters(other):
            assert cpu_products.serve(x, other)
    with torch.no_grad():
        assert cpu_products.serve(x, with_dropout)
    layer = layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert not cpu_products.serve(x, layer)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not cpu_products.serve(x, layer)
    handle = layer.register_forward_hook(lambda *_: None)
    assert not cpu_products.serve(x, layer)  # the hook would not be called
    handle.remove()
    assert cpu_products.serve(x, layer)
    layer.weight = nn.Parameter(torch.zeros(12, 8).T)
    assert cpu_products.serve(x, layer)
    layer.weight = nn.Parameter(torch.zeros(8, 24)[:, :12])  # oneDNN is slow with gaps between rows
    assert not cpu_products.serve(x, layer)


@pytest.mark.parametrize("ratio", [0.6, 2.2])
def test_the_library_of_weight_gradients_is_measured_once_and_kept(ratio, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_products, "_onednn_over_mkl", lambda: measured.append(ratio) or ratio)

    def gradient():
        cpu_products.weight_gradients_by_onednn.cache_clear()
        (layer,), x = layers(8), torch.linspace(-1, 1, 36).view(3, 12)
        return gradients(cpu_products.project(x, layer), [layer.weight])[0], gradients(
            (layer(x),), [layer.weight]
        )[0]

    try:
        first, plain = gradient()
        torch.testing.assert_close(first, plain)
        assert cpu_products.weight_gradients_by_onednn(torch.get_num_threads()) is (ratio > 1.3)
        ratio = 1.0  # what another measurement would say
        assert torch.equal(gradient()[0], first) and len(measured) == 1
        (kept,) = json.loads((tmp_path / "ttrl" / "products.json").read_text()).values()
        assert kept == measured[0]
    finally:
        cpu_products.weight_gradients_by_onednn.cache_clear()


def test_the_measurement_compares_two_libraries():
    assert 0.01 < cpu_products._onednn_over_mkl() < 100
