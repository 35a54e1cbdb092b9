"""How a frozen base is held: as its files are, with the results of one in fp32 to the last bit; and
runs that began otherwise.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import files_in_16_bits
from support.training_steps import ALONE, adapter_config, adapter_gradients, logprobs, move_adapters
from transformers import AutoModelForCausalLM

from ttrl.errors import ConfigError
from ttrl.server.model_folder import stored_dtype
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.merge import merge
from ttrl.training.policy.adapters import base_folder
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import adapted, is_adapter
from ttrl.training.trainer_canary import compute_canary, half_precision

pytestmark = pytest.mark.usefixtures("short_canaries")

# The other matrices have no adapter, and are frozen all the same.
SOME = ["q_proj", "k_proj", "v_proj", "w2"]
CASES = [
    ("qwen2", torch.bfloat16, {}),
    ("qwen2-tied", torch.float16, {"lora_targets": SOME}),
    (
        "qwen2",
        torch.bfloat16,
        {"dtype": "bf16", "lora_kind": "dora", "lora_targets": ["output", *SOME]},
    ),
    ("qwen3", torch.float16, {"dtype": "bf16"}),
    ("gemma2", torch.bfloat16, {"lora_kind": "dora", "activation_checkpointing": True}),
    ("phi3", torch.bfloat16, {"lora_targets": SOME}),
    ("phi", torch.bfloat16, {"lora_kind": "dora", "lora_targets": SOME}),
    (
        "phi",
        torch.bfloat16,
        {"dtype": "bf16", "activation_checkpointing": True, "checkpoint_keeps": "products"},
    ),
    ("gpt2", torch.float16, {"lora_targets": ["q_proj", "w1"]}),
    ("nanochat", torch.bfloat16, {"lora_base_dtype": "nf4"}),
]


@pytest.fixture
def narrow(model_folder, tmp_path):
    """A folder of a family whose files are in 16 bits."""

    def make(family="qwen2", dtype=torch.bfloat16):
        return files_in_16_bits(model_folder(family), tmp_path / family, dtype)

    return make


def base_of(policy):
    return {
        name: parameter
        for name, parameter in policy.parameters_by_name().items()
        if not is_adapter(name)
    }


def bytes_of(policy):
    return sum(parameter.nbytes for parameter in base_of(policy).values())


def both(folder, **settings):
    """The policy with its base as it is held by default, and in fp32."""
    configs = (
        adapter_config(folder, **settings),
        adapter_config(folder, **settings | {"lora_base_dtype": "fp32"}),
    )
    return [move_adapters(load_policy(config, ALONE)) for config in configs]


@pytest.mark.long(
    but=[
        "phi3-torch.bfloat16-{'lora_targets': ['q_proj', 'k_proj', 'v_proj', 'w2']}",
        "qwen2-torch.bfloat16-{'dtype': 'bf16', 'lora_kind': 'dora', 'lora_targets': ['output', 'q_proj', 'k_proj', 'v_proj', 'w2']}",
    ]
)
@pytest.mark.parametrize(("family", "dtype", "settings"), CASES[:-1], ids=str)
def test_it_is_held_as_its_files_are_and_nothing_else_changes(
    family, dtype, settings, narrow, packed
):
    """Log-probabilities, and the gradient of a step, are those of a base in fp32, to the last
    bit.

    Long for the other families: each only has other names for the same matrices.
    """
    folder = narrow(family, dtype)
    policy, wide = both(folder, **settings)
    head = (
        "output.weight"
        if family in ("qwen2", "phi3", "phi", "gemma2-untied")
        else "tok_embeddings.weight"
    )
    in_fp32 = {
        name for name, parameter in base_of(policy).items() if parameter.dtype == torch.float32
    }
    assert in_fp32 == ({head} if settings.get("dtype", "fp32") == "fp32" else set())
    assert {
        parameter.dtype for name, parameter in base_of(policy).items() if name not in in_fp32
    } == {dtype}
    assert all(
        p.dtype == torch.float32
        for name, p in policy.parameters_by_name().items()
        if is_adapter(name)
    )
    assert bytes_of(policy) < (0.75 if in_fp32 else 0.51) * bytes_of(wide)
    for seed in range(3):
        assert torch.equal(logprobs(policy, seed), logprobs(wide, seed))
    found = [
        adapter_gradients(folder, packed, **settings | how)
        for how in ({}, {"lora_base_dtype": "fp32"})
    ]
    assert all(
        torch.equal(found[0][name], found[1][name]) and found[0][name].any() for name in found[0]
    )


def test_what_is_not_in_four_bits_is_held_as_its_files_are(narrow, packed):
    folder = narrow("nanochat")
    policy = move_adapters(
        load_policy(adapter_config(folder, lora_base_dtype="nf4", dtype="bf16"), ALONE)
    )
    in_four_bits = {f"{name}.weight" for name in adapted(policy)}
    rest = {
        name: parameter for name, parameter in base_of(policy).items() if name not in in_four_bits
    }
    assert rest and {parameter.dtype for parameter in rest.values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2-tied", "phi", "gpt2"])
def test_whole_distributions_are_those_of_a_base_in_fp32(family, narrow):
    """Which the canary and the study ask for; they go through the head as it is, with its bias if
    it has one.
    """
    folder = narrow(family)
    policy, wide = both(folder, lora_targets=["q_proj", "w2"])
    found, expected = (compute_canary(one, ALONE.device, folder) for one in (policy, wide))
    assert found == expected


@pytest.mark.parametrize("family", ["qwen2-tied", "gemma2", "gpt2"])
def test_log_probabilities_are_those_of_transformers_in_fp32(family, narrow):
    folder = narrow(family)
    policy = load_policy(adapter_config(folder, lora_targets=["q_proj", "w2"]), ALONE)
    assert torch.bfloat16 in {parameter.dtype for parameter in policy.parameters()}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    row = torch.randint(90, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = torch.log_softmax(model(row).logits[0], -1).gather(1, row[0, :, None])[:, 0]
    torch.testing.assert_close(logprobs(policy), theirs, rtol=0, atol=2e-5)


def test_no_wide_copy_of_a_matrix_waits_for_the_backward_pass(narrow):
    """It would take back, and more, what the narrow one saves."""
    folder = narrow("qwen2")
    policy = move_adapters(load_policy(adapter_config(folder, lora_targets=SOME), ALONE))
    matrices = {
        tuple(p.shape)
        for name, p in base_of(policy).items()
        if p.ndim == 2 and name.startswith("layers")
    }
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        logprobs(policy).sum().backward()
    wide = [tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.float32]
    assert len(kept) > 20 and not [
        shape for shape in wide if shape in matrices or shape[::-1] in matrices
    ]


def test_each_tensor_goes_by_its_own_file(narrow):
    """Norms in fp32 among matrices in bf16, and one that is wider than training computes."""
    folder = narrow("qwen3")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    wide = {name: torch.float32 for name in tensors if "norm" in name} | {
        "model.layers.0.mlp.up_proj.weight": torch.float64
    }
    noise = torch.Generator().manual_seed(0)
    for name, dtype in wide.items():
        tensors[name] = torch.randn(tensors[name].shape, generator=noise, dtype=dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    policy, in_fp32 = both(folder)
    own = base_of(policy)
    assert (
        own["layers.0.mlp.w3.weight"].dtype == torch.float32
        and own["layers.1.mlp.w3.weight"].dtype == torch.bfloat16
    )
    assert {own[name].dtype for name in own if "norm" in name} == {torch.float32}
    assert torch.equal(logprobs(policy), logprobs(in_fp32))


def test_files_in_fp32_stay_in_fp32(model_folder):
    policy = load_policy(adapter_config(model_folder(), dtype="bf16"), ALONE)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    rounded = load_policy(
        adapter_config(model_folder(), dtype="bf16", lora_base_dtype="bf16"), ALONE
    )
    assert {parameter.dtype for parameter in base_of(rounded).values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("checkpoint_dtype", ["fp32", "bf16"])
def test_merging_rounds_the_sum_once(checkpoint_dtype, kind, narrow, tmp_path):
    """W is widened, the adapter is added in fp32, and the sum is rounded to the checkpoint's dtype;
    by whoever merges.
    """
    folder = narrow("qwen2")
    config = adapter_config(folder, lora_kind=kind, lora_targets=SOME)
    policy = move_adapters(load_policy(config, ALONE))
    save_checkpoint(
        tmp_path / "out", policy, folder, ALONE, config=config, checkpoint_dtype=checkpoint_dtype
    )
    config.lora_merge = False
    save_checkpoint(
        tmp_path / "alone", policy, folder, ALONE, config=config, checkpoint_dtype=checkpoint_dtype
    )
    merge(tmp_path / "alone")
    written, later = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "alone"))
    assert written.keys() == later.keys() and all(
        torch.equal(written[name], later[name]) for name in written
    )

    stored = load_file(folder / "model.safetensors")
    layer = adapted(policy)["layers.1.attn.q_proj"]
    name = "model.layers.1.self_attn.q_proj.weight"
    changed = stored[name].float() + layer.scaling * (layer.lora_b @ layer.lora_a).detach()
    if kind == "dora":
        changed = changed * (layer.magnitude.detach() / changed.norm(dim=1))[:, None]
    dtype = torch.float32 if checkpoint_dtype == "fp32" else torch.bfloat16
    torch.testing.assert_close(
        written[name], changed.to(dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=0
    )
    assert torch.equal(
        written["model.layers.1.mlp.up_proj.weight"],
        stored["model.layers.1.mlp.up_proj.weight"].to(dtype),
    )


def test_what_bf16_costs_is_measured_for_a_base_in_bf16(narrow):
    """As for one in fp32: the limits for servers in half precision follow from it."""
    policy, wide = both(narrow("qwen2-tied"), dtype="bf16")
    found, expected = (
        half_precision(one, list(range(1, 40)), ALONE.device) for one in (policy, wide)
    )
    assert found == expected and found.mean > 0


class TestGoingOn:
    """From the adapter of a run that held its base in another way."""

    @staticmethod
    def begun(folder, out, before, **settings):
        """A checkpoint of an adapter whose base was held as `before` says."""
        config = adapter_config(folder, **settings)
        policy = move_adapters(load_policy(config, ALONE))
        save_checkpoint(out, policy, folder, ALONE, config=config)
        path = out / "adapter" / "ttrl_adapter.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_base_dtype": before}))
        return policy

    @pytest.mark.parametrize(
        ("before", "now"), [("fp32", "auto"), ("auto", "fp32"), ("bf16", "auto"), ("fp32", "bf16")]
    )
    def test_with_the_same_numbers_it_goes_on(self, before, now, narrow, tmp_path):
        policy = self.begun(narrow(), tmp_path / "out", before, dtype="bf16")
        again = load_policy(
            adapter_config(tmp_path / "out", lora_base_dtype=now, dtype="bf16"), ALONE
        )
        assert torch.equal(logprobs(again), logprobs(policy))
        held = torch.float32 if now == "fp32" else torch.bfloat16
        assert {parameter.dtype for parameter in base_of(again).values()} == {held}

    @pytest.mark.parametrize(
        ("before", "now"), [("bf16", "auto"), ("fp32", "bf16"), ("nf4", "auto"), ("fp32", "nf4")]
    )
    def test_with_other_numbers_it_is_refused(self, before, now, model_folder, tmp_path):
        self.begun(model_folder(), tmp_path / "out", before, dtype="bf16")
        said = f"lora_base_dtype is '{now}', but '{before}' there"
        with pytest.raises(ConfigError, match=re.escape(said)) as refusal:
            base_folder(adapter_config(tmp_path / "out", lora_base_dtype=now, dtype="bf16"))
        assert ("this would round" in str(refusal.value)) == ("nf4" not in (before, now))


def test_what_the_files_hold_is_told_without_loading_them(narrow, model_folder, tmp_path):
    folder = narrow()
    assert stored_dtype(folder) == "bfloat16" and stored_dtype(model_folder()) == "float32"
    assert stored_dtype(tmp_path / "nowhere") is None
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert stored_dtype(folder) is None
