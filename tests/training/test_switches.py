"""Switches that save memory or time, in one process: the gradients stay the same, and each does
what it is there for.
"""

import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.parallel_worker import accumulate
from support.training_steps import ALONE, distance, gradients_with, group_of_one, settings_of
from torch.utils._python_dispatch import TorchDispatchMode

from ttrl.errors import ConfigError, ModelFolderError
from ttrl.training.batches import updates
from ttrl.training.models.weights import iter_weights
from ttrl.training.optimizer.optimizer import (
    begin_step,
    clip_and_step,
    learning_rate,
    make_optimizer,
)
from ttrl.training.parallel.distributed import ranks
from ttrl.training.policy.activation_memory import PRODUCTS
from ttrl.training.policy.loading import load_policy


@pytest.mark.long(but=["{'activation_checkpointing': True, 'checkpoint_every': 2}-0.0-qwen2-tied"])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3"])
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"activation_checkpointing": True}, 0.0),
        ({"activation_checkpointing": True, "checkpoint_every": 2}, 0.0),
        ({"activation_checkpointing": True, "checkpoint_keeps": "products"}, 0.0),
        ({"rows_per_microbatch": 1}, 2e-6),
        ({"row_length_multiple": 16}, 2e-6),
        ({"row_length_multiple": 1000}, 2e-6),
    ],
    ids=str,
)
def test_exact_switches_leave_the_gradient_alone(family, settings, tolerance, model_folder, packed):
    """Long for the other switches: each only changes one of them."""
    plain = gradients_with(model_folder(family), packed)
    assert distance(gradients_with(model_folder(family), packed, **settings), plain) <= tolerance


def test_the_dropout_of_adapters_is_recomputed_alike(model_folder, packed):
    adapters = {"lora_rank": 4, "lora_dropout": 0.5}
    plain = gradients_with(model_folder(), packed, **adapters)
    assert (
        distance(
            gradients_with(model_folder(), packed, activation_checkpointing=True, **adapters), plain
        )
        == 0
    )
    # There is some.
    assert distance(gradients_with(model_folder(), packed, seed=1, **adapters), plain) > 0.1


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def work_with(folder, packed, **settings):
    """How often each layer ran, and each operation, in the forward and backward pass of one
    step.
    """
    config = settings_of(folder, **settings)
    policy = load_policy(config, ALONE)
    (step,) = updates(packed, 1, (0, 1), ALONE)
    ran = Counter()
    for number, layer in enumerate(policy.decoder.layers):
        for name, module in layer.named_modules():
            if name.endswith("attn"):
                module.register_forward_hook(lambda *_, number=number: ran.update([number]))
    with _Counting() as counting:
        accumulate(policy, step, config, ALONE)
    return ran, counting.calls


def test_checkpointing_recomputes_what_it_should(model_folder, packed):
    plain, plain_calls = work_with(model_folder(), packed)
    full, full_calls = work_with(model_folder(), packed, activation_checkpointing=True)
    half, _ = work_with(model_folder(), packed, activation_checkpointing=True, checkpoint_every=2)
    assert (plain, full, half) == (
        Counter({0: 1, 1: 1}),
        Counter({0: 2, 1: 2}),
        Counter({0: 2, 1: 1}),
    )
    _, kept_calls = work_with(
        model_folder(), packed, activation_checkpointing=True, checkpoint_keeps="products"
    )
    silu = torch.ops.aten.silu.default
    assert kept_calls[silu] == full_calls[silu] == 2 * plain_calls[silu] > 0
    products = [
        sum(calls[op] for op in PRODUCTS) for calls in (plain_calls, kept_calls, full_calls)
    ]
    assert products[0] == products[1] < products[2]


def test_compilation_sees_into_layers(model_folder, packed, monkeypatch):
    """Without a backend that compiles C++ (tests/e2e/test_compiled.py): all that the compiler
    leaves out is attention on CPUs.
    """
    plain = gradients_with(model_folder("qwen3"), packed, row_length_multiple=40)
    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compile_with(module, backend="eager")
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = gradients_with(model_folder("qwen3"), packed, row_length_multiple=40, compile=True)
    breaks = torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    assert len(breaks) == 1 and "split_attend" in next(iter(breaks))
    assert distance(compiled, plain) < 1e-5


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3", "llama-biased"])
def test_sharding_over_one_process_changes_nothing(family, model_folder, packed):
    """The code of tensor parallelism and FSDP on a mesh of one; more processes:
    tests/e2e/test_parallel.py.
    """
    from ttrl.training.parallel import sharding

    plain = gradients_with(model_folder(family), packed)
    with group_of_one() as here:

        def both(policy, config, here, between):
            sharding.apply_tensor_parallel(policy.decoder, here.mesh["tensor"])
            between()
            sharding.apply_fsdp(policy, policy.decoder.layers, config, here)

        sharded = gradients_with(
            model_folder(family), packed, here, both, activation_checkpointing=True
        )
        assert distance(sharded, plain) < 2e-6


def stepped(folder, packed, steps=2, **settings):
    """Weights and norms after some optimizer steps."""
    config = settings_of(folder, lr=1e-3, weight_decay=0.1, **settings)
    policy = load_policy(config, ALONE)
    optimizer = make_optimizer(policy, config)
    (step,) = updates(packed, 1, (0, 1), ALONE)
    norms = []
    for number in range(steps):
        begin_step(optimizer, config, number)
        accumulate(policy, step, config, ALONE)
        if settings.get("optimizer_in_backward"):
            assert all(parameter.grad is None for parameter in policy.parameters())
        norms.append(clip_and_step(policy, optimizer, config, number))
    return policy.full_weights(), norms


def test_the_optimizer_in_the_backward_pass_takes_the_same_steps(model_folder, packed):
    schedule = {"lr_schedule": "linear", "total_steps": 5, "warmup_steps": 1}
    after, norms = stepped(model_folder("qwen2-tied"), packed, **schedule)
    in_backward, same_norms = stepped(
        model_folder("qwen2-tied"), packed, optimizer_in_backward=True, **schedule
    )
    assert same_norms == pytest.approx(norms, rel=1e-6)
    assert all(torch.equal(after[name], in_backward[name]) for name in after)


def test_the_optimizer_in_the_backward_pass_refuses_a_second_microbatch(model_folder, packed):
    with pytest.raises(
        ConfigError, match="more than one microbatch a step; raise rows_per_microbatch"
    ):
        stepped(model_folder(), packed, optimizer_in_backward=True, rows_per_microbatch=1)


def test_sgd_is_the_gradient_clipped_to_the_norm(model_folder, packed):
    before = load_policy(settings_of(model_folder()), ALONE).full_weights()
    gradient = gradients_with(model_folder(), packed)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradient.values()))
    config = settings_of(model_folder(), optimizer="sgd", lr=0.5, max_grad_norm=norm / 4)
    policy = load_policy(config, ALONE)
    optimizer = make_optimizer(policy, config)
    (step,) = updates(packed, 1, (0, 1), ALONE)
    accumulate(policy, step, config, ALONE)
    assert clip_and_step(policy, optimizer, config, 0, lr_scale=0.1) == pytest.approx(
        norm, rel=1e-6
    )
    for name, weight in policy.full_weights().items():
        torch.testing.assert_close(
            weight, before[name] - 0.05 * gradient[name] / 4, rtol=1e-5, atol=1e-7
        )


def test_a_step_whose_norm_is_not_finite_is_not_taken(model_folder, packed):
    config = settings_of(model_folder(), lr=0.5)
    policy = load_policy(config, ALONE)
    optimizer = make_optimizer(policy, config)
    before = {name: weight.clone() for name, weight in policy.full_weights().items()}
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    assert clip_and_step(policy, optimizer, config, 0) == math.inf
    assert all(torch.equal(before[name], weight) for name, weight in policy.full_weights().items())
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates(schedule):
    total = None if schedule == "constant" else 12
    config = settings_of("m", lr=2.0, warmup_steps=4, total_steps=total, lr_schedule=schedule)
    expected = []
    for step in range(15):
        done = min(1.0, max(0.0, (step - 4) / 8))
        shape = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        }[schedule]
        expected.append(2.0 * min(1.0, (step + 1) / 4) * shape)
    assert [learning_rate(config, step) for step in range(15)] == pytest.approx(expected, abs=1e-12)
    assert expected[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


# Loading


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "llama3-rope"])
def test_the_policy_has_the_folders_weights_bit_for_bit(family, model_folder):
    policy = load_policy(settings_of(model_folder(family)), ALONE)
    stored = dict(iter_weights(model_folder(family)))
    loaded = policy.full_weights()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    assert not any(tensor.is_meta for tensor in [*policy.parameters(), *policy.buffers()])
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing \['layers\.1\.mlp\.w3\.weight'\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"other shapes \['norm\.scale \(31,\) instead of \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32)}),
            r"unexpected \['layers\.2\.sa_norm\.scale'\]",
        ),
    ],
    ids=["missing", "shape", "surplus"],
)
def test_weights_that_do_not_fit_are_named(change, text, model_folder, tmp_path):
    tensors = load_file(model_folder() / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    with pytest.raises(ModelFolderError, match=text):
        load_policy(settings_of(tmp_path), ALONE)


# What excludes each other


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (
            {"optimizer_in_backward": True, "max_grad_norm": 1.0},
            ["optimizer_in_backward steps each parameter before"],
        ),
        (
            {"optimizer_on_cpu": True, "device": "cuda", "max_grad_norm": 1.0},
            ["clipping would have no effect"],
        ),
        (
            {
                "optimizer_on_cpu": True,
                "optimizer_in_backward": True,
                "cpu_offload": True,
                "optimizer": "sgd",
            },
            [
                "exclude each other",
                "already has the optimizer",
                "needs optimizer 'adamw', not 'sgd'",
                "cpu_offload needs a CUDA",
                "optimizer_on_cpu needs a CUDA",
            ],
        ),
        ({"activation_offloading": True}, ["activation_offloading needs a CUDA device"]),
        (
            {"checkpoint_every": 2},
            ["checkpoint_every is 2, but has no effect without activation_checkpointing"],
        ),
        ({"checkpoint_keeps": "products"}, ["checkpoint_keeps is 'products', but has no effect"]),
        (
            {"checkpoint_keeps": "products", "activation_checkpointing": True, "compile": True},
            ["checkpoint_keeps cannot see into compiled layers"],
        ),
        (
            {"compile": True, "tensor_parallel": 2},
            ["compile with tensor_parallel: PyTorch's compiler loses"],
        ),
        (
            {
                "tensor_parallel": 0,
                "row_length_multiple": 0,
                "checkpoint_every": 0,
                "activation_checkpointing": True,
            },
            ["row_length_multiple is 0", "checkpoint_every is 0", "tensor_parallel is 0"],
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_switches_that_exclude_each_other_are_all_named(settings, texts):
    with pytest.raises(ConfigError) as caught:
        settings_of("m", **settings)
    assert len(caught.value.problems) == len(texts)
    for text in texts:
        assert any(text in problem for problem in caught.value.problems), text


@pytest.mark.parametrize(
    ("processes", "parts", "texts"),
    [
        (3, 2, ["tensor_parallel is 2, but the number of processes is 3, not a multiple; start 6"]),
        (
            8,
            8,
            ["the model's num_attention_heads is 4, not a multiple", "num_key_value_heads is 2"],
        ),
        (4, 4, ["the model's num_key_value_heads is 2, not a multiple"]),
        (
            1,
            5,
            [
                "number of processes is 1, not a multiple; start 5",
                "num_attention_heads is 4",
                "num_key_value_heads is 2",
                "intermediate_size is 48",
            ],
        ),
    ],
)
def test_tensor_parallelism_that_cannot_be_is_refused_before_anything_is_joined(
    processes, parts, texts, model_folder, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with (
        pytest.raises(ConfigError) as caught,
        ranks(settings_of(model_folder(), tensor_parallel=parts)),
    ):
        pass
    assert len(caught.value.problems) == len(texts)
    for text in texts:
        assert any(text in problem for problem in caught.value.problems), text


def test_what_needs_cuda_is_refused_where_auto_finds_none(model_folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = {"device": "auto", "activation_offloading": True, "cpu_offload": True}
    with pytest.raises(ConfigError) as caught, ranks(settings_of(model_folder(), **settings)):
        pass
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "activation_offloading",
        "cpu_offload",
    ]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(
            ConfigError,
            match="optimizer_on_cpu works in one process, but there are 2; use cpu_offload",
        ),
        ranks(settings_of(model_folder(), device="cuda", optimizer_on_cpu=True)),
    ):
        pass
