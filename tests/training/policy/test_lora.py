"""Adapters against their formulas in float64, and everything that must stay as it is around
them.
"""

import contextlib
import weakref
from collections import Counter

import pytest
import torch
from support.parallel_worker import accumulate, gradients
from support.training_steps import (
    ALONE,
    adapter_config,
    adapter_gradients,
    distance,
    group_of_one,
    logprobs,
    move_adapters,
    settings_of,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ttrl.configs import GRPOConfig
from ttrl.errors import ConfigError
from ttrl.training.batches import updates
from ttrl.training.parallel import sharding
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import gathered_precision
from ttrl.training.policy.adapters import as_reference
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import (
    AdaptedLinear,
    _check_parts,
    _part_in_four_bits,
    adapted,
    is_adapter,
    merge,
    plain,
    without_adapters,
)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_layers_follow_the_formula(kind, bias, dtype, atol):
    """W + (α/r)·B A, and DoRA's rows m·V/‖V‖ with ‖V‖ constant, written out in float64; outputs and
    all gradients.
    """
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(7, 5, bias=bias), adapter_config(lora_kind=kind)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.requires_grad_(True)
    x, upstream = (
        torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 2, 5, dtype=torch.float64),
    )

    changed = layer.weight + (6.0 / 4) * torch.einsum("or,ri->oi", layer.lora_b, layer.lora_a)
    if kind == "dora":
        changed = changed * (layer.magnitude / changed.detach().square().sum(1).sqrt())[:, None]
    expected = torch.einsum("bti,oi->bto", x, changed) + (layer.bias if bias else 0.0)
    wanted = [
        x,
        layer.lora_a,
        layer.lora_b,
        *([layer.magnitude] if kind == "dora" else []),
        *([layer.bias] if bias else []),
    ]
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), wanted)

    layer.to(dtype)
    out = layer(x.to(dtype))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    found = torch.autograd.grad((out * upstream).sum(), wanted)
    for one, other in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=atol)
    torch.testing.assert_close(layer.merged(layer.weight).double(), changed, rtol=0, atol=atol)
    with without_adapters(layer):
        base = nn.functional.linear(
            x, layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
        torch.testing.assert_close(layer(x.to(dtype)).double(), base, rtol=0, atol=atol)
    torch.testing.assert_close(layer(x.to(dtype)).double(), expected, rtol=0, atol=atol)


def test_rows_of_zeros_have_no_direction():
    """As in layers that were put between others, whose output is to be zero at first."""
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(7, 5), adapter_config(lora_kind="dora"))
    nn.init.normal_(layer.lora_a)
    nn.init.zeros_(layer.lora_b)
    with torch.no_grad():
        layer.weight[2] = 0.0
        layer.magnitude.copy_(layer.weight.norm(dim=1))
    x = torch.randn(3, 7)
    out = layer(x)
    torch.testing.assert_close(out, nn.functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer.merged(layer.weight), layer.weight)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (layer.lora_a, layer.lora_b, layer.magnitude))


@pytest.mark.parametrize("four_bits", [False, True], ids=["fp32", "nf4"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_under_bf16_a_layer_gives_bf16(kind, bias, four_bits):
    """As a linear layer does, bias or not: what follows it takes one dtype."""
    layer = AdaptedLinear(nn.Linear(64, 8, bias=bias), adapter_config(lora_kind=kind))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    if four_bits:
        layer.quantise(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 64)).dtype == torch.bfloat16


def test_under_bf16_small_changes_of_magnitudes_count():
    """In bf16 a scale of 1.003 would be 1."""
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(64, 64, bias=False), adapter_config(lora_kind="dora"))
    nn.init.normal_(layer.lora_a)
    nn.init.zeros_(layer.lora_b)
    with torch.no_grad():
        layer.magnitude.copy_(1.003 * layer.weight.norm(dim=1))
        x = torch.randn(256, 64)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x).float()
        plain_out = nn.functional.linear(x, layer.weight)
        assert float((out * plain_out).sum() / plain_out.square().sum()) == pytest.approx(
            1.003, abs=0.001
        )


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_head_with_an_adapter(kind, model_folder, packed):
    """Its gradient, which comes through the chunks of the head, against that of logits in
    float64.
    """
    policy = load_policy(
        adapter_config(model_folder(), lora_targets=["output"], lora_kind=kind), ALONE
    )
    move_adapters(policy).double().compute_dtype = torch.float64
    (head,) = adapted(policy).values()
    wanted = [p for p in policy.parameters() if p.requires_grad]
    ours = torch.autograd.grad(logprobs(policy).sum(), wanted)
    row = torch.randint(90, (1, 12), generator=torch.Generator().manual_seed(0))
    zeros, kept = torch.zeros_like(row), []
    handle = policy.decoder.norm.register_forward_hook(
        lambda _module, _inputs, out: kept.append(out)
    )
    policy(row, row, zeros, zeros, torch.arange(12)[None])
    handle.remove()
    explicit = torch.log_softmax(head(kept[0]), -1).gather(2, row[..., None]).sum()
    for one, other in zip(ours, torch.autograd.grad(explicit, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_only_adapters_are_trained(model_folder, packed):
    policy = load_policy(
        adapter_config(model_folder("qwen3"), lora_targets=["q_proj", "w2"]), ALONE
    )
    names = {name for name, p in policy.parameters_by_name().items() if p.requires_grad}
    layers = ("layers.0.attn.q_proj", "layers.0.mlp.w2", "layers.1.attn.q_proj", "layers.1.mlp.w2")
    assert names == {f"{layer}.{part}" for layer in layers for part in ("lora_a", "lora_b")}
    base = load_policy(
        adapter_config(model_folder("qwen3"), lora_rank=None, lora_alpha=16.0), ALONE
    )
    assert torch.equal(logprobs(policy), logprobs(base)), "a new adapter changes nothing"
    move_adapters(policy)
    assert not torch.allclose(logprobs(policy), logprobs(base), atol=1e-3)
    with as_reference(policy, GRPOConfig(model="", output_dir="", packed="", lora_rank=4)):
        assert torch.equal(logprobs(policy), logprobs(base)), (
            "and without adapters it is the base, to the last bit"
        )
    assert not torch.allclose(logprobs(policy), logprobs(base), atol=1e-3)


def test_a_new_dora_changes_nothing_but_rounding(model_folder):
    policy = load_policy(adapter_config(model_folder(), lora_kind="dora"), ALONE)
    with without_adapters(policy):
        base = logprobs(policy)
    torch.testing.assert_close(logprobs(policy), base, rtol=0, atol=2e-6)


@pytest.mark.long(but=["dora"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_switches_leave_the_gradient_alone(kind, model_folder, packed):
    """Long for LoRA: it only leaves DoRA's norm out."""
    folder = model_folder("qwen2-tied")
    plain_gradients = adapter_gradients(folder, packed, lora_kind=kind)
    assert all("lora" in name or "magnitude" in name for name in plain_gradients)
    for settings, tolerance in (
        ({"activation_checkpointing": True}, 0.0),
        ({"activation_checkpointing": True, "checkpoint_keeps": "products"}, 0.0),
        ({"rows_per_microbatch": 1}, 3e-6),
        ({"dtype": "bf16"}, 0.15),  # 0.05 here, as without adapters
    ):
        far = distance(
            adapter_gradients(folder, packed, lora_kind=kind, **settings), plain_gradients
        )
        assert far <= tolerance, (settings, far)


@pytest.mark.long(but=["dora-True"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_sharding_over_one_process_changes_nothing(kind, shared, model_folder, packed):
    """The code of FSDP and of tensor parallelism on a mesh of one; more processes, and 4 bits:
    tests/e2e/test_lora.py.

    Long for the other kinds: only these leave a part of that one out.
    """
    from ttrl.training.parallel import sharding

    targets = ["q_proj", "w2", "output"]
    config = adapter_config(
        model_folder(), lora_kind=kind, lora_targets=targets, activation_checkpointing=True
    )
    alone = load_policy(config, ALONE)
    with group_of_one() as here:

        def over_one(policy, config, here, between):
            if shared:
                sharding.apply_tensor_parallel(policy.decoder, here.mesh["tensor"])
            between()
            sharding.apply_fsdp(policy, policy.decoder.layers, config, here)

        policy = load_policy(config, here, spread=over_one)
        for name, whole in policy.full_weights().items():
            assert torch.equal(whole, alone.parameters_by_name()[name]), name
        for one in (policy, alone):
            for layer in adapted(one).values():
                nn.init.constant_(layer.lora_b, 0.1)
        (step,) = updates(packed, 1, (0, 1), here, policy.decoder.config)
        accumulate(policy, step, config, here)
        accumulate(alone, step, config, ALONE)
        # Up to 2.04e-6, as the processor multiplies.
        assert distance(gradients(policy), gradients(alone)) < 3e-6


def test_dropout_acts_in_passes_with_a_gradient_alone(model_folder, packed):
    folder = model_folder()
    policy = move_adapters(load_policy(adapter_config(folder, lora_dropout=0.5), ALONE))
    with torch.no_grad():
        first = logprobs(policy)
        assert torch.equal(first, logprobs(policy))
    assert not torch.allclose(first, logprobs(policy), atol=1e-3)
    plain_gradients = adapter_gradients(folder, packed, lora_dropout=0.5, seed=3)
    recomputed = adapter_gradients(
        folder, packed, lora_dropout=0.5, seed=3, activation_checkpointing=True
    )
    assert distance(recomputed, plain_gradients) == 0.0, (
        "layers are recomputed with the same dropout"
    )
    assert (
        distance(adapter_gradients(folder, packed, lora_dropout=0.5, seed=4), plain_gradients)
        > 1e-3
    )


def test_dropout_is_repeatable(model_folder, packed):
    """Each process begins an iteration with random numbers of its own, which depend on the seed
    alone.
    """
    found = []
    for seed, rank in ((1, 0), (1, 0), (2, 0), (1, 1)):
        torch.rand(len(found) + 1)
        config = adapter_config(model_folder(), lora_dropout=0.5, seed=seed)
        load_policy(config, ALONE if rank == 0 else Ranks(1, 1, torch.device("cpu")))
        found.append(torch.rand(1).item())
    assert found[0] == found[1] and Counter(found).most_common()[0][1] == 2


@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_a_base_in_four_bits(family, model_folder, packed):
    """It computes with the rounded numbers, as a base in fp32 that holds these does, and costs an
    eighth.
    """
    folder = model_folder(family)
    policy = move_adapters(load_policy(adapter_config(folder, lora_base_dtype="nf4"), ALONE))
    rounded = move_adapters(load_policy(adapter_config(folder), ALONE))
    layers = adapted(policy)
    assert len(layers) == (14 if family == "qwen2" else 12)
    with torch.no_grad():
        for name, layer in adapted(rounded).items():
            before = layer.weight.clone()
            layer.weight.copy_(plain(layers[name].weight))
            assert 0.01 < float((layer.weight - before).norm() / before.norm()) < 0.2
    for name, layer in layers.items():
        inner, _ = layer.weight.__tensor_flatten__()
        size = sum(getattr(layer.weight, part).nbytes for part in inner if part != "nf4")
        assert size < layer.weight.numel() * 4 / 7, name
    torch.testing.assert_close(logprobs(policy), logprobs(rounded), rtol=0, atol=1e-5)
    (step,) = updates(packed, 1, (0, 1), ALONE)
    config = adapter_config(folder)
    for one in (policy, rounded):
        accumulate(one, step, config, ALONE)
    assert distance(gradients(policy), gradients(rounded)) < 1e-5
    lower = adapter_gradients(
        folder, packed, lora_base_dtype="nf4", dtype="bf16", activation_checkpointing=True
    )
    assert distance(lower, gradients(policy)) < 0.15


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_base_in_bf16_is_half_as_large_and_computes_what_autocast_does(
    kind, model_folder, packed
):
    """Autocast rounds matrices for products anyway; embeddings and norms, which are rounded too,
    change little.
    """
    folder, settings = model_folder(), {"dtype": "bf16", "lora_kind": kind, "seed": 1}
    policy = load_policy(adapter_config(folder, lora_base_dtype="bf16", **settings), ALONE)
    for name, parameter in policy.parameters_by_name().items():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    one = adapter_gradients(folder, packed, lora_base_dtype="bf16", **settings)
    other = adapter_gradients(folder, packed, **settings)
    exact = adapter_gradients(folder, packed, **settings | {"dtype": "fp32"})
    assert all(gradient.dtype == torch.float32 for gradient in one.values())
    assert distance(one, exact) < 1.5 * distance(other, exact) < 0.15
    assert GRPOConfig.parse(
        {"model": "m", "packed": "p", "output_dir": "o", "lora_rank": 1, "lora_base_dtype": "bf16"},
        "test",
    )
    [problem] = adapter_config(lora_base_dtype="bf16").problems_here("cpu", 1, {})
    assert "lora_base_dtype is 'bf16' but dtype is 'fp32'" in problem


@pytest.mark.parametrize("sharded", [False, True])
def test_the_stream_between_layers_is_fp32(sharded, model_folder, packed):
    """… whether parameters are gathered in bf16 or not."""
    settings, seen = settings_of(model_folder(), dtype="bf16"), []
    as_on_cuda = gathered_precision(settings, torch.device("cuda"))
    with group_of_one() if sharded else contextlib.nullcontext(ALONE) as here:
        policy = load_policy(settings, ALONE)
        if sharded:
            sharding.apply_fsdp(policy, policy.decoder.layers, settings, here, as_on_cuda)
        for layer in policy.decoder.layers:
            layer.register_forward_hook(
                lambda _, inputs, out: seen.extend([inputs[0].dtype, out.dtype])
            )
            layer.mlp.w1.register_forward_hook(
                lambda module, inputs, out: seen.append((module.weight.dtype, out.dtype))
            )
        (step,) = updates(packed, 1, (0, 1), ALONE)
        accumulate(policy, step, settings, ALONE)
    weights = torch.bfloat16 if sharded else torch.float32
    assert {one for one in seen if isinstance(one, torch.dtype)} == {torch.float32}
    assert {one for one in seen if isinstance(one, tuple)} == {(weights, torch.bfloat16)}


def test_autocast_keeps_no_copies_of_recomputed_layers(model_folder, packed):
    """Its cache would keep them until the pass ends."""
    live, most = weakref.WeakSet(), []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if (
                func is torch.ops.aten._to_copy.default
                and out.dtype is torch.bfloat16
                and out.shape == w1.shape
            ):
                live.add(out)
                most.append(len(live))
            return out

    config = settings_of(model_folder(), dtype="bf16", activation_checkpointing=True)
    policy = load_policy(config, ALONE)
    w1 = policy.decoder.layers[0].mlp.w1.weight
    (step,) = updates(packed, 1, (0, 1), ALONE)
    with Copies():
        accumulate(policy, step, config, ALONE)
    assert most and max(most) <= 2  # of one layer: w1 and w3


def test_magnitudes_are_never_gathered_in_bf16():
    cuda = torch.device("cuda")
    assert gathered_precision(adapter_config(dtype="bf16"), cuda).param_dtype is torch.bfloat16
    assert (
        gathered_precision(adapter_config(dtype="bf16", lora_kind="dora"), cuda).param_dtype is None
    )
    assert gathered_precision(adapter_config(dtype="bf16"), torch.device("cpu")).param_dtype is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lora_rank": 0}, "lora_rank is 0; it must be at least 1"),
        ({"lora_alpha": 0.0}, "lora_alpha is 0.0; it must be above 0"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; it must be in [0, 1)"),
        (
            {"lora_dropout": 0.1, "lora_targets": ["q_proj", "output"]},
            "lora_dropout with an adapter on 'output'",
        ),
        ({"lora_targets": []}, "lora_targets is empty"),
        ({"lora_targets": ["w1", "w1"]}, "names a matrix twice"),
        ({"lora_targets": ["lm_head"]}, "it must be a list with each item one of 'q_proj'"),
        (
            {"lora_base_dtype": "nf4", "compile": True},
            "lora_base_dtype 'nf4' does not work with compile",
        ),
        (
            {"lora_base_dtype": "nf4", "lora_targets": ["output"]},
            "lora_base_dtype 'nf4' with an adapter on 'output'",
        ),
        ({"lora_rank": None}, "lora_alpha is 6.0 without lora_rank"),
        (
            {"lora_rank": None, "lora_alpha": 16.0, "lora_merge": False},
            "lora_merge is False without lora_rank",
        ),
    ],
    ids=str,
)
def test_wrong_settings(settings, problem):
    with pytest.raises(ConfigError) as caught:
        adapter_config(**settings)
    assert problem in str(caught.value) and len(caught.value.problems) == 1


def test_what_a_model_or_machine_does_not_allow(model_folder):
    with pytest.raises(ConfigError, match="names 'output', but the model's head is its embedding"):
        load_policy(
            adapter_config(model_folder("qwen2-tied"), lora_targets=["q_proj", "output"]), ALONE
        )
    with pytest.raises(ConfigError, match="lora_targets is w3, but the model has none of them"):
        load_policy(adapter_config(model_folder("phi"), lora_targets=["w3"]), ALONE)
    for settings, processes, fits in (
        ({}, 4, True),
        ({"tensor_parallel": 2}, 2, True),
        ({"tensor_parallel": 2}, 4, False),
    ):
        problems = adapter_config(lora_base_dtype="nf4", **settings).problems_here(
            "cpu", processes, {}
        )
        assert bool(problems) != fits and (fits or "set tensor_parallel to 1 or 4" in problems[0])
        assert not adapter_config(**settings).problems_here("cpu", processes, {})


@pytest.mark.parametrize("shape", [(6, 128), (12, 32), (256, 384)])
def test_a_part_in_four_bits_has_the_numbers_of_the_whole(shape):
    layer = AdaptedLinear(nn.Linear(shape[1], shape[0]), adapter_config())
    nn.init.normal_(layer.weight)
    layer.quantise(layer.weight)
    whole, (height, width) = layer.weight, shape
    places = [
        (slice(0, height // 2), slice(0, width)),
        (slice(height // 2, height), slice(0, width)),
    ]
    if width >= 128:
        places += [
            (slice(0, height), slice(0, 64)),
            (slice(0, height), slice(64, width)),
            (slice(2, 4), slice(64, 128)),
        ]
    for rows, columns in places:
        part = _part_in_four_bits(whole, rows, columns)
        assert torch.equal(part.get_original_weight(), whole.get_original_weight()[rows, columns])
        assert (
            part.quantized_data.numel() == part.numel() // 2
            and part.quantized_scalers.numel() == part.numel() // 64
        )
        assert (
            part.quantization_factor.numel() * part.scaler_block_size
            == part.quantized_scalers.numel()
        )


def test_processes_share_four_bits_in_whole_blocks_or_not_at_all():
    _check_parts("w1", (6, 128), 3, by_rows=True)
    _check_parts("w1", (6, 32), 3, by_rows=True)
    _check_parts("w2", (7, 384), 3, by_rows=False)
    for shape, by_rows, wanted in (
        (
            (6, 128),
            True,
            r"w1 \[6, 128\] by its rows, but their number is not a multiple of 4; use fewer",
        ),
        ((6, 32), True, "rows, but their number is not a multiple of 8"),
        ((8, 128), False, "columns, but their number is not a multiple of 256"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            _check_parts("w1", shape, 4, by_rows=by_rows)


def test_four_bits_need_whole_blocks():
    from ttrl.training.policy.lora import apply_lora

    decoder = nn.Sequential()
    decoder.add_module("w1", nn.Linear(9, 7))
    with pytest.raises(ConfigError, match="with blocks of 64 numbers, but w1 has 63"):
        apply_lora(decoder, adapter_config(lora_base_dtype="nf4"))


def test_reference_swaps_weights_where_there_are_no_adapters(model_folder):
    config = GRPOConfig(
        model=str(model_folder()), output_dir="", packed="", reference_model=str(model_folder())
    )
    policy = load_policy(config, ALONE)
    with torch.no_grad():
        policy.decoder.norm.scale.mul_(2.0)
    before = logprobs(policy)
    with as_reference(policy, config):
        assert not torch.allclose(logprobs(policy), before, atol=1e-3)
    assert torch.isfinite(logprobs(policy)).all()


def test_a_merged_matrix_is_the_formula_s_and_that_of_a_switched_off_adapter_its_base():
    generator = torch.Generator().manual_seed(0)
    weight, lora_a, lora_b = (
        torch.randn(*shape, generator=generator) for shape in ((5, 4), (2, 4), (5, 2))
    )
    magnitude = torch.rand(5, generator=generator, requires_grad=True)
    lora_b.requires_grad_()
    changed = weight + 0.5 * lora_b @ lora_a
    expected = changed * (magnitude / changed.norm(dim=1)).unsqueeze(1)
    gradients = []
    for constant in (True, False):
        merged = merge(weight, lora_a, lora_b, magnitude, 0.5, constant_lengths=constant)
        torch.testing.assert_close(merged, expected)
        gradients.append(torch.autograd.grad(merged.square().sum(), lora_b)[0])
    exact = torch.autograd.grad(expected.square().sum(), lora_b)[0]
    torch.testing.assert_close(gradients[1], exact, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(gradients[0], exact, atol=1e-3)
