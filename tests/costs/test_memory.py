"""The memory model against what is really there: parameters, saved tensors, adapters, files; and
its own rules.
"""

import dataclasses
import json
from pathlib import Path

import check_cuda_memory
import check_parity
import pytest
import torch
import transformers

from ttrl.configs import GRPOConfig
from ttrl.costs import memory
from ttrl.costs.activations import Computation, own_layer_bytes
from ttrl.costs.memory import HEAD_CHUNK, Workload, head_chunk
from ttrl.costs.parameters import adapter_parameters, decoder_parameters
from ttrl.costs.storage import iteration_bytes
from ttrl.errors import ModelFolderError
from ttrl.training.kernels import logprobs
from ttrl.training.models.decoder import build_decoder
from ttrl.training.models.weights import stored_as
from ttrl.training.policy.lora import apply_lora, is_adapter
from ttrl.training.policy.policy import Policy

ROOT = Path(__file__).parents[2]

ARCHITECTURES = json.loads((ROOT / "ttrl" / "costs" / "architectures.json").read_text())
QWEN = ARCHITECTURES["qwen2.5_7b"]
ONCE = Workload(4096, microbatches=1)
SMALL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "vocab_size": 500,
}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}


def recipe(**settings):
    return GRPOConfig(model="m", packed="p", output_dir="o", **settings)


def training_memory(config, settings, *arguments, **options):
    return memory.training_memory(config, recipe(**settings), *arguments, **options)


def config_of(family, **settings):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    return transformers.AutoConfig.for_model(family, **(sizes | settings))


# Parameters


@pytest.mark.parametrize("name", check_parity.VARIANTS)
def test_parameters_are_counted_exactly(name):
    with torch.device("meta"):
        model = check_parity.VARIANTS[name]()
        decoder = build_decoder(model.config)
    counted = decoder_parameters(json.loads(model.config.to_json_string()))
    assert (
        counted.total
        == sum(p.numel() for p in model.parameters())
        == sum(p.numel() for p in decoder.parameters())
    )
    sizes = dict(decoder.named_parameters())
    assert counted.stored == sum(
        sizes[part].numel() for entry in stored_as(sizes, model.config) for part in entry.parameters
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_models_have_the_published_number_of_parameters(name):
    assert decoder_parameters(ARCHITECTURES[name]).total == ARCHITECTURES[name]["parameters"]


def test_a_config_that_lacks_a_number_is_refused():
    with pytest.raises(ModelFolderError, match="hidden_size is None"):
        training_memory({"num_hidden_layers": 2}, {}, ONCE)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_rank": 3},
        {"lora_rank": 2, "lora_kind": "dora", "lora_targets": ["q_proj", "w2", "output"]},
    ],
    ids=["every matrix", "DoRA, with the head"],
)
def test_adapters_are_counted_exactly(settings):
    config = config_of("qwen2", tie_word_embeddings=False)
    with torch.device("meta"):
        decoder = build_decoder(config)
        apply_lora(
            decoder,
            GRPOConfig.parse({"model": "m", "packed": "p", "output_dir": "o", **settings}, "test"),
        )
    built = sum(p.numel() for name, p in decoder.named_parameters() if is_adapter(name))
    assert adapter_parameters(decoder_parameters(config.to_dict()), recipe(**settings)) == built


# Activations


def saved_per_token(config, bf16, length, **adapters):
    """Bytes that autograd really keeps of the second layer, of tensors that have a row for each
    token.
    """
    torch.manual_seed(0)
    decoder = build_decoder(config)
    if adapters:
        apply_lora(
            decoder,
            GRPOConfig.parse({"model": "m", "packed": "p", "output_dir": "o", **adapters}, "test"),
        )
    policy = Policy(
        decoder, num_output_chunks=1, compute_dtype=torch.bfloat16 if bf16 else torch.float32
    )
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    layer, found = policy.decoder.layers[1], {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and length in tensor.shape:
            found[storage.data_ptr()] = storage  # held, so that no address comes again
        return tensor

    inner = layer.forward

    def forward(*inputs, **options):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return inner(*inputs, **options)

    layer.forward = forward
    tokens, positions = torch.zeros(1, length, dtype=torch.int64), torch.arange(length).unsqueeze(0)
    policy(tokens, tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), positions)
    return sum(storage.nbytes() for storage in found.values()) / length


FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi": {},
    "gpt2": {"num_key_value_heads": 8},
    "nanochat": {},
    "mistral": {"sliding_window": 100},
}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_keeps_is_what_autograd_saves(family, bf16):
    length = 141  # no other size in the model
    config = config_of(family, **FAMILIES[family])
    values = config.to_dict()
    dense = length if family in ("gemma2", "mistral") else None
    counted = own_layer_bytes(decoder_parameters(values), Computation(bf16), dense).kept
    beside = 0
    if family in ("gemma2", "mistral"):
        # The mask, which all layers share.
        beside = length * (2 if bf16 else 4) if family == "mistral" else 0
    # Cosines and sines (shared as well) and the norms' reciprocal roots are not in the count.
    cosines = 2 * 8 * 4 * (2 if family == "gemma3_text" else 1)
    real = saved_per_token(config, bf16, length) - beside
    assert counted <= real <= counted + cosines + 4 * (8 * 2 + 8)


@pytest.mark.parametrize(
    ("kind", "dropout", "bf16"), [("lora", 0.0, False), ("lora", 0.5, True), ("dora", 0.5, False)]
)
def test_what_adapters_keep_is_what_autograd_saves(kind, dropout, bf16):
    config = config_of("qwen2", tie_word_embeddings=False)
    settings = {"lora_rank": 3, "lora_kind": kind, "lora_dropout": dropout}
    chosen = recipe(**settings, dtype="bf16" if bf16 else "fp32")
    decoder = decoder_parameters(config.to_dict())
    training = memory._Training(decoder, chosen, Workload(141), cuda=False, ranks=1)
    frozen, trained = (
        own_layer_bytes(decoder, Computation(bf16, frozen=yes)).kept for yes in (True, False)
    )
    more = saved_per_token(config, bf16, 141, **settings) - saved_per_token(config, bf16, 141)
    assert training._adapter_bytes() + frozen - trained == pytest.approx(more)


# Settings


def test_without_a_count_chunks_are_the_heads_own():
    assert {"cpu": logprobs._CHUNK["cpu"], "cuda": logprobs._CHUNK_ELSEWHERE} == HEAD_CHUNK
    for device, count in (("cpu", 8192 // 128), ("cuda", 8192 // 1024)):
        plain, counted = (
            peak(given, Workload(2048), device=device)
            for given in ({}, {"num_output_chunks": count})
        )
        assert plain == counted < peak({"num_output_chunks": 4}, Workload(2048), device=device)
    assert (
        head_chunk(recipe(), 100, "cpu") == 100
        and head_chunk(recipe(num_output_chunks=3), 100, "cpu") == 34
    )


def peak(settings=None, workload=ONCE, **options):
    return training_memory(QWEN, settings or {}, workload, **options).peak


@pytest.mark.parametrize(
    "less",
    [
        {"dtype": "bf16"},
        {"activation_checkpointing": True},
        {"rows_per_microbatch": 1},
        {"num_output_chunks": 64},
        {"optimizer": "sgd"},
        {"optimizer": "adamw_8bit"},
        {"lora_rank": 8},
        {"tensor_parallel": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_saves_memory_saves_memory(less, device):
    common = {"rows_per_microbatch": 2, "num_output_chunks": 1}
    assert peak(common | less, device=device) < peak(common, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_that_are_used_at_once_are_not_held(device):
    short = Workload(16, microbatches=1)
    plain, at_once = (
        peak({"optimizer_in_backward": yes}, short, device=device) for yes in (False, True)
    )
    assert plain - at_once > 2 * QWEN["parameters"]


def test_what_cuda_alone_can_save():
    for less in (
        {"cpu_offload": True},
        {"activation_offloading": True},
        {"optimizer_on_cpu": True},
    ):
        assert peak(less, device="cuda") < peak({}, device="cuda")


def test_checkpointing_less_saves_less():
    full, half, products, none = (
        peak({"activation_checkpointing": True, **more} if more is not None else {})
        for more in ({}, {"checkpoint_every": 2}, {"checkpoint_keeps": "products"}, None)
    )
    assert full < half < none and full < products < none


def test_sharing_parameters():
    one, four = (
        training_memory(QWEN, {"optimizer": "adamw"}, ONCE, ranks=ranks) for ranks in (1, 4)
    )
    for part in ("parameters", "optimizer state", "gradients"):
        assert four.moments["optimizer"][part] == one.moments["optimizer"][part] / 4
    kept = {"reshard_after_forward": False}
    assert peak(kept, ranks=4) > peak({}, ranks=4)


def test_whole_tensors_are_gathered_by_the_process_that_writes():
    """A checkpoint's file, or the optimizer's state where it is written whole, and one tensor; one
    process has them already.
    """
    one, two, eight = (
        training_memory(SMALL, {}, ONCE, ranks=ranks).moments["saving"] for ranks in (1, 2, 8)
    )
    total, matrix = decoder_parameters(SMALL).total, decoder_parameters(SMALL).vocabulary_matrix
    assert "whole tensors" not in one
    assert two["whole tensors"] == eight["whole tensors"] == 8 * total + 4 * matrix
    stateless = training_memory(SMALL, {"optimizer": "sgd"}, ONCE, ranks=2).moments["saving"]
    assert stateless["whole tensors"] == 4 * total + 4 * matrix
    rounded = training_memory(SMALL, {"checkpoint_dtype": "bf16"}, ONCE).moments["saving"]
    assert rounded["whole tensors"] == 2 * total
    # A state of 61 GB: each process writes its own part.
    large = training_memory(QWEN, {}, ONCE, ranks=2).moments["saving"]
    assert large["whole tensors"] == pytest.approx(
        5e9 + 4 * decoder_parameters(QWEN).vocabulary_matrix
    )


def test_held_memory_by_hand():
    parts = training_memory(QWEN, {}, ONCE).moments["optimizer"]
    total = QWEN["parameters"]
    assert (parts["parameters"], parts["gradients"], parts["optimizer state"]) == (
        4 * total,
        4 * total,
        8 * total,
    )
    eight = training_memory(QWEN, {"optimizer": "adamw_8bit"}, ONCE).moments["optimizer"]
    assert eight["optimizer state"] == pytest.approx(2 * total * (1 + 4 / 256))
    learned = {"token_rewards": "implicit", "reference_model": "r"}
    parts = training_memory(QWEN, learned, ONCE).moments["optimizer"]
    assert parts["reward model"] == 12 * total and parts["gradients"] == 4 * total
    adapters = adapter_parameters(decoder_parameters(QWEN), recipe(lora_rank=8))
    parts = training_memory(QWEN, {"token_rewards": "implicit", "lora_rank": 8}, ONCE)
    assert parts.moments["optimizer"]["reward model"] == 12 * adapters
    four_bits = {"lora_rank": 8, "lora_base_dtype": "nf4"}
    base = training_memory(QWEN, four_bits, ONCE).moments["optimizer"]["parameters"]
    decoder = decoder_parameters(QWEN)
    matrices = decoder.shape.layers * decoder.shape.layer_weights
    in_fp32 = decoder.vocabulary_matrix + adapter_parameters(decoder, recipe(**four_bits))
    # The files are in bf16.
    whole = 4 * in_fp32 + 2 * (total - matrices - decoder.vocabulary_matrix)
    assert whole + 0.5 * matrices < base < whole + 0.53 * matrices


def test_four_bits_are_shared_and_gathered_as_they_are():
    settings = {"lora_rank": 8, "lora_base_dtype": "nf4", "dtype": "bf16"}
    decoder = decoder_parameters(QWEN)
    one, four = (
        training_memory(QWEN, settings, ONCE, device="cuda", ranks=ranks).moments["gradient"]
        for ranks in (1, 4)
    )
    assert four["parameters"] == one["parameters"] / 4 and "gathered parameters" not in one
    rest = decoder.outside_layers + 2 * (decoder.layer - decoder.shape.layer_weights)
    whole = 2 * rest + 2 * decoder.shape.layer_weights / 2  # in bf16 and in 4 bits
    assert whole < four["gathered parameters"] < 1.05 * whole
    shared = training_memory(QWEN, settings | {"tensor_parallel": 4}, ONCE, device="cuda").moments[
        "gradient"
    ]
    assert "gathered parameters" not in shared and shared["parameters"] == pytest.approx(
        one["parameters"] / 4, rel=0.02
    )


def test_tensor_parallelism_leaves_one_of_an_adapters_matrices_whole():
    settings = {"lora_rank": 8, "lora_targets": ["q_proj", "w2"], "tensor_parallel": 4}
    parts = training_memory(QWEN, settings, ONCE, ranks=2).moments["optimizer"]
    q = 8 * 3584 + 8 * 3584 / 4  # A whole
    w2 = 8 * 18944 / 4 + 8 * 3584  # B whole
    assert parts["gradients"] == pytest.approx(4 * 28 * (q + w2) / 2)
    assert parts["optimizer state"] == pytest.approx(8 * 28 * (q + w2) / 2)


def test_what_is_not_in_four_bits_is_copied_in_bf16():
    decoder = decoder_parameters(QWEN)
    settings = {
        "lora_rank": 8,
        "lora_base_dtype": "nf4",
        "lora_targets": ["q_proj", "v_proj"],
        "dtype": "bf16",
    }
    files_in_fp32 = QWEN | {"torch_dtype": "float32"}
    copies = training_memory(files_in_fp32, settings, ONCE).moments["gradient"]["bf16 copies"]
    assert "bf16 copies" not in training_memory(QWEN, settings, ONCE).moments["gradient"]
    q_and_v = 3584 * (3584 + 512)
    assert copies == 2 * 28 * (decoder.layer - q_and_v)


def test_the_peak_is_that_of_the_worst_moment():
    estimate = training_memory(QWEN, {"num_output_chunks": 64}, Workload(16, microbatches=1))
    mapped = {name: parts.get("mapped files", 0.0) for name, parts in estimate.moments.items()}
    needed = {name: sum(parts.values()) - mapped[name] for name, parts in estimate.moments.items()}
    assert estimate.peak == pytest.approx(max(needed.values())) and needed[estimate.moment] == max(
        needed.values()
    )
    # A state that is read from a mapped file is in memory twice, but half of that can go.
    assert (
        estimate.resident
        == sum(estimate.moments["loading"].values())
        > 20 * QWEN["parameters"]
        > estimate.peak
    )


def test_a_second_microbatch_and_a_loaded_state_are_held_beside_the_activations():
    first = Workload(4096, microbatches=1, continued=False)
    later = dataclasses.replace(first, microbatches=2)
    continued = dataclasses.replace(first, continued=True)
    gradients = training_memory(QWEN, {}, later).moments["gradient"]
    assert gradients["gradients"] == 4 * QWEN["parameters"] and "optimizer state" not in gradients
    assert "optimizer state" in training_memory(QWEN, {}, continued).moments["gradient"]
    assert (
        "optimizer state"
        in training_memory(QWEN, {"updates_per_iteration": 2}, first).moments["gradient"]
    )


def test_the_whole_divergence_holds_the_reference_head():
    estimator = {"kl_coefficient": 0.1, "kl_estimator": "k3"}
    sampled = training_memory(QWEN, estimator, ONCE)
    assert sampled.moments["prepass"]["own weights"] == 4 * QWEN["parameters"]
    assert (
        "mapped files" in sampled.moments["prepass"]
        and "reference" not in sampled.moments["gradient"]
    )
    whole = training_memory(QWEN, estimator | {"kl_estimator": "full"}, ONCE)
    assert whole.moments["gradient"]["reference"] > 4 * decoder_parameters(QWEN).vocabulary_matrix
    assert "prepass" not in training_memory(QWEN, {}, ONCE).moments


@pytest.mark.parametrize(("kind", "copies"), [("lora", 2), ("dora", 4)])
def test_a_head_with_an_adapter_is_merged_in_each_pass(kind, copies):
    """Where the backward pass begins: its gradient, and that scaled; for DoRA the unscaled matrix
    and one more gradient.
    """
    settings = {
        "lora_rank": 4,
        "lora_kind": kind,
        "activation_checkpointing": True,
        "num_output_chunks": 64,
    }
    layers = decoder_parameters(QWEN).matrix_shapes
    without, beside = (
        sum(
            training_memory(QWEN, settings | {"lora_targets": names}, Workload(16))
            .moments["gradient"]
            .values()
        )
        for names in ([*layers], [*layers, "output"])
    )
    assert beside - without > copies * 0.9 * 4 * decoder_parameters(QWEN).vocabulary_matrix


def test_windows_shorter_than_the_samples_go_through_a_dense_mask():
    settings, plain = (
        {"rows_per_microbatch": 1},
        config_of("mistral", sliding_window=None).to_dict(),
    )
    window = config_of("mistral", sliding_window=100).to_dict()

    def kept(config, device="cpu", longest=None):
        return training_memory(
            config, settings, Workload(4096, longest_sample=longest), device=device
        ).parts["activations"]

    assert kept(window) >= kept(plain) + 4096**2 * 4
    assert kept(window, longest=90) == kept(plain)
    assert kept(window, device="cuda") == kept(plain, device="cuda")


@pytest.mark.long(but=["full-8"])
@pytest.mark.parametrize(
    ("kind", "gpus"),
    [
        ("full", 8),
        pytest.param("full, nothing recomputed", 1, marks=pytest.mark.long),
        ("LoRA", 1),
        pytest.param("LoRA, base in fp32", 1, marks=pytest.mark.long),
        ("QLoRA", 2),
        pytest.param("full", 1, marks=pytest.mark.long),
        pytest.param("QLoRA", 1, marks=pytest.mark.long),
        pytest.param("LoRA", 2, marks=pytest.mark.long),
    ],
)
def test_on_cuda_fake_tensors_take_what_is_estimated(kind, gpus):
    """Two layers of a 7B model; tools/check_cuda_memory.py counts whole ones.

    Long for five pairs: only these have the same kind on one GPU and on several, or keep
    activations or the base in fp32. Full training, LoRA and QLoRA are tried once in any case.

    Long for adapters: only these count the base that they leave alone.
    """
    model, config = (
        QWEN | {"num_hidden_layers": 2, "layer_types": None},
        check_cuda_memory.config_of(kind, 2),
    )
    counted = check_cuda_memory.counted(model, config, 2048, gpus)
    assert check_cuda_memory.estimated(model, config, 2048, gpus) == pytest.approx(counted, rel=0.1)


# Disk


def test_what_an_iteration_leaves_on_disk():
    total = QWEN["parameters"]
    assert iteration_bytes(QWEN, recipe()) == {"checkpoint": 4 * total, "state": 8 * total}
    assert iteration_bytes(QWEN, recipe(optimizer="sgd", checkpoint_dtype="bf16")) == {
        "checkpoint": 2 * total,
        "state": 0,
    }
    learned = recipe(token_rewards="implicit", reference_model="r")
    assert iteration_bytes(QWEN, learned)["state"] == 20 * total
    adapter = adapter_parameters(decoder_parameters(QWEN), recipe(lora_rank=4))
    alone = iteration_bytes(QWEN, recipe(lora_rank=4, lora_merge=False))
    assert alone == {"checkpoint": 4 * adapter, "state": 8 * adapter}
    assert iteration_bytes(QWEN, recipe(lora_rank=4))["checkpoint"] == 4 * (total + adapter)
