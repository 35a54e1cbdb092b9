"""Check what ttrl trains: a tiny random version of each architecture, through transformers' own
class.

    python tools/check_models.py [NAME ...] [--served] [--loop] [--results FILE]

For each model:

    packed      a prompt stored once for its completions gives the log-probabilities and the
                gradient of the same samples one by one, computed by the class alone; in float64
    adapters    the same with LoRA on every matrix that has it, and merged into the checkpoint
    files       a checkpoint has the names, shapes and bits of the folder that it was loaded from
    served      vLLM on this CPU loads a checkpoint after a step in place of the one before it;
                every weight is compared, and its log-probabilities are the trainer's (with
                --served)
    loop        an iteration of `ttrl.train`: samples, grades, trains, loads, validates (with
                --loop)

A cell holds what was measured, or the reason in words why not.
"""

import argparse
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed import PackedTensors
from ttrl.errors import UserError
from ttrl.nanochat import modeling
from ttrl.records import TokenizedResult
from ttrl.tiny_model import make_tiny_model
from ttrl.training.checkpoints import save_checkpoint, write_merged
from ttrl.training.kernels.doubles import KeepDoubles
from ttrl.training.models.layouts import Names, names_of
from ttrl.training.models.weights import iter_stored
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import is_adapter
from ttrl.training.policy.policy import Policy

HERE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
FAILURES = (
    UserError,
    AssertionError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OSError,
    ImportError,
)
LIMIT = 1e-10
"""Of differences in float64."""
SERVED_LIMIT = 1e-3
"""Of log-probabilities of a server in fp32, in nats."""
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_HEADS: dict[str, Any] = {"head_dim": 32}  # vLLM's CPU attention has no kernel for narrower ones
_SLIDING: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS: dict[str, Any] = {
    **{
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
    },
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
_DELTA_RULE: dict[str, Any] = {
    **{
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
    },
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
_LATENT: dict[str, Any] = {
    **{
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "num_key_value_heads": 2,
}


class Model(NamedTuple):
    """A row of the table."""

    title: str
    config: str
    """The class of its config in transformers."""
    settings: Mapping[str, Any] = {}
    sizes: Mapping[str, Any] = _SIZES


MODELS = {
    "llama": Model("Llama 3", "LlamaConfig"),
    "llama4": Model(
        "Llama 4", "Llama4TextConfig", {**_LOCAL_EXPERTS, **_HEADS, "num_experts_per_tok": 1}
    ),
    "qwen2": Model("Qwen 2, 2.5", "Qwen2Config"),
    "qwen2_moe": Model(
        "Qwen 2 MoE", "Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "qwen3": Model("Qwen 3", "Qwen3Config", _HEADS),
    "qwen3_moe": Model("Qwen 3 MoE", "Qwen3MoeConfig", {**_EXPERTS, **_HEADS}),
    "qwen3_next": Model(
        "Qwen 3 Next",
        "Qwen3NextConfig",
        {**_EXPERTS, **_DELTA_RULE, **_HEADS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": Model("Qwen 3.5, 3.6", "Qwen3_5TextConfig", {**_DELTA_RULE, **_HEADS}),
    "qwen3_5_moe": Model(
        "Qwen 3.5, 3.6 MoE",
        "Qwen3_5MoeTextConfig",
        {**_EXPERTS, **_DELTA_RULE, **_HEADS, "shared_expert_intermediate_size": 32},
    ),
    "gemma": Model("Gemma 1", "GemmaConfig", _HEADS),
    "gemma2": Model("Gemma 2", "Gemma2Config", {**_HEADS, "sliding_window": 5}),
    "gemma3": Model("Gemma 3", "Gemma3TextConfig", {**_HEADS, **_SLIDING}),
    "gemma3n": Model(
        "Gemma 3n",
        "Gemma3nTextConfig",
        {
            **{
                **_HEADS,
                **_SLIDING,
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 16,
                "laurel_rank": 8,
            },
            **{"activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [128, 128]},
        },
    ),
    "gemma4": Model(
        "Gemma 4",
        "Gemma4TextConfig",
        {**_HEADS, **_SLIDING, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0},
    ),
    "mistral": Model("Mistral", "MistralConfig", {**_HEADS, "sliding_window": 5}),
    "ministral3": Model("Ministral 3", "Ministral3Config", _HEADS),
    "mixtral": Model("Mixtral", "MixtralConfig", _LOCAL_EXPERTS),
    "phi": Model("Phi 1, 2", "PhiConfig", {"num_key_value_heads": 2}),
    "phi3": Model("Phi 3, 4", "Phi3Config"),
    "phimoe": Model("Phi 3.5 MoE", "PhimoeConfig", _LOCAL_EXPERTS),
    "gpt_oss": Model(
        "gpt-oss",
        "GptOssConfig",
        {**_LOCAL_EXPERTS, **_SLIDING, "head_dim": 64, "intermediate_size": 64},
    ),
    "glm4": Model("GLM 4", "Glm4Config", _HEADS),
    "glm4_moe": Model("GLM 4 MoE", "Glm4MoeConfig", {**_ROUTED_EXPERTS, **_HEADS}),
    "deepseek_v2": Model(
        "DeepSeek V2", "DeepseekV2Config", {**_ROUTED_EXPERTS, **_LATENT, "topk_method": "greedy"}
    ),
    "deepseek_v3": Model(
        "DeepSeek V3", "DeepseekV3Config", {**_ROUTED_EXPERTS, **_LATENT, "topk_method": "noaux_tc"}
    ),
    "granite": Model(
        "Granite 3", "GraniteConfig", {"logits_scaling": 3.0, "residual_multiplier": 0.5}
    ),
    "granite_moe": Model("Granite 3 MoE", "GraniteMoeConfig", _LOCAL_EXPERTS),
    "granite_hybrid": Model(
        "Granite 4 hybrid",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
        },
    ),
    "granite_hybrid_moe": Model(
        "Granite 4 hybrid MoE",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            **_LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 128,
        },
    ),
    "lfm2": Model(
        "LFM2",
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"],
            "block_ff_dim": 128,
            "block_dim": 64,
            "conv_dim": 64,
        },
    ),
    "lfm2_moe": Model(
        "LFM2 MoE",
        "Lfm2MoeConfig",
        {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "olmo2": Model("OLMo 2", "Olmo2Config"),
    "olmo3": Model("OLMo 3", "Olmo3Config", {"sliding_window": 5}),
    "olmoe": Model("OLMoE", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo_hybrid": Model("OLMo hybrid", "OlmoHybridConfig", _DELTA_RULE),
    "smollm3": Model("SmolLM3", "SmolLM3Config"),
    "falcon_h1": Model("Falcon-H1", "FalconH1Config", {**_MAMBA, "mamba_d_ssm": 128}),
    "nemotron_h": Model(
        "Nemotron-H",
        "NemotronHConfig",
        {
            **{
                "layers_block_type": ["mamba", "attention", "mlp"],
                "num_hidden_layers": 3,
                "mamba_num_heads": 4,
                **_HEADS,
            },
            **{"mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1},
        },
    ),
    "bamba": Model("Bamba", "BambaConfig", {**_MAMBA, "attn_layer_indices": [1]}),
    "jamba": Model(
        "Jamba", "JambaConfig", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    ),
    "seed_oss": Model("Seed-OSS", "SeedOssConfig", _HEADS),
    "ernie4_5": Model("ERNIE 4.5", "Ernie4_5Config", _HEADS),
    "ernie4_5_moe": Model(
        "ERNIE 4.5 MoE",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    "hunyuan": Model("Hunyuan", "HunYuanDenseV1Config", _HEADS),
    "hunyuan_moe": Model(
        "Hunyuan MoE", "HunYuanMoEV1Config", {**_HEADS, "num_experts": 4, "moe_topk": 2}
    ),
    "minimax_m2": Model(
        "MiniMax M2", "MiniMaxM2Config", {**_LOCAL_EXPERTS, **_HEADS, "rotary_dim": 16}
    ),
    "kimi_linear": Model(
        "Kimi Linear",
        "KimiLinearConfig",
        {
            **{
                **_LATENT,
                **_LOCAL_EXPERTS,
                "layer_types": ["linear_attention", "full_attention"],
                "topk_group": 1,
            },
            **{
                "moe_intermediate_size": 32,
                "n_group": 1,
                "linear_head_dim": 32,
                "linear_num_heads": 2,
            },
        },
    ),
    "cohere2": Model("Cohere 2", "Cohere2Config", {**_SLIDING, "logit_scale": 0.3}),
    "exaone4": Model("EXAONE 4", "Exaone4Config", _SLIDING),
    "stablelm": Model("StableLM", "StableLmConfig"),
    "arcee": Model("Arcee AFM", "ArceeConfig", _HEADS),
    "helium": Model("Helium", "HeliumConfig", _HEADS),
    "nanochat": Model("nanochat (transformers')", "NanoChatConfig"),
    "nanochat_2026": Model(
        "nanochat of 2026",
        "NanochatConfig",
        {"attention_windows": [2, 5, None], "value_layers": [2]},
        sizes={
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 512,
        }
        | {"initializer_range": 0.1},
    ),
    "gpt2": Model(
        "GPT-2",
        "GPT2Config",
        sizes={
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 512,
            "initializer_range": 0.1,
        },
    ),
}


def config_class(model: Model) -> type[transformers.PretrainedConfig]:
    """Return the class of a row's config, of transformers or ours."""
    found: type[transformers.PretrainedConfig] = getattr(
        transformers, model.config, None
    ) or getattr(modeling, model.config)
    return found


def write_model(name: str, folder: Path) -> Path:
    """Write a tiny model of a row with random weights, a tokenizer and a chat template."""
    model = MODELS[name]
    make_tiny_model(folder)
    tiny = transformers.AutoConfig.from_pretrained(folder)
    tokens = {
        "vocab_size": tiny.vocab_size,
        "pad_token_id": tiny.pad_token_id,
        "eos_token_id": tiny.eos_token_id,
    }
    settings = {**model.sizes, **tokens, "bos_token_id": None, **model.settings}
    if name.startswith(("gemma3n", "gemma4")):
        settings["vocab_size_per_layer_input"] = tiny.vocab_size
    config = config_class(model)(**settings)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            # Norms and biases that are neither ones nor zeros, which would hide mistakes.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(folder)
    return folder


def samples(vocabulary: int, seed: int = 0) -> list[TokenizedResult]:
    """Return two groups of three samples: prompts of 5 and 9 tokens, completions of 2 to 70."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(1, vocabulary - 5, (count,), generator=draw).tolist()
        return found

    results = []
    for group, (length, completions) in enumerate(((5, (2, 13, 7)), (9, (70, 3, 24)))):
        prompt = tokens(length)
        for number, count in enumerate(completions):
            results.append(
                TokenizedResult(
                    task_id=f"g{group}",
                    sample=number,
                    token_ids=[*prompt, *tokens(count)],
                    assistant_mask=[False] * length + [True] * count,
                    input_pos=list(range(length + count)),
                    logprobs=[0.0] * (length + count),
                    prompt_length=length,
                    reward=0.0,
                    advantage=1.0,
                    weights_version=0,
                )
            )
    return results


class Computed(NamedTuple):
    """Log-probabilities of each sample's completion, and a gradient of them by the decoder's
    names.
    """

    logprobs: list[Tensor]
    gradient: dict[str, Tensor]


def _computed(logprobs: list[Tensor], model: nn.Module, rename: Callable[[str], str]) -> Computed:
    draw = torch.Generator().manual_seed(0)
    weighted = [
        (part * torch.randn(part.shape, generator=draw, dtype=part.dtype)).sum()
        for part in logprobs
    ]
    model.zero_grad()
    torch.stack(weighted).sum().backward()
    gradient = {rename(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Computed([part.detach() for part in logprobs], gradient)


def one_by_one(
    folder: Path,
    results: list[TokenizedResult],
    before: Callable[[nn.Module, TokenizedResult], None] = lambda model, sample: None,
) -> tuple[Computed, Names]:
    """Compute samples with transformers alone, unpacked, in float64. before: is called before each
    sample.
    """
    how: dict[str, Any] = {
        "dtype": torch.float64,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval().double()
    model.get_input_embeddings().padding_idx = None
    found = []
    with KeepDoubles():
        for one in results:
            before(model, one)
            logits = model(torch.tensor([one.token_ids]), use_cache=False).logits[0]
            chosen = torch.log_softmax(logits[one.prompt_length - 1 : -1], -1)
            found.append(
                chosen.gather(1, torch.tensor(one.token_ids[one.prompt_length :])[:, None])[:, 0]
            )
        names = names_of(model)
        return _computed(found, model, names.ours), names


def _pack(results: list[TokenizedResult], seq_len: int) -> PackedTensors:
    return packed_tensors_from_tokenized_results(
        results, seq_len=seq_len, pad_id=0, shortest_shared=1
    )


def policy_rows(pack: PackedTensors) -> tuple[Tensor, ...]:
    """Return what a policy is given of a pack."""
    return pack.tokens, pack.labels, pack.group_ids, pack.parent_ids, pack.input_pos


def packed_rows(results: list[TokenizedResult], seq_len: int = 128) -> tuple[Tensor, ...]:
    """Return samples as a policy is given them."""
    return policy_rows(_pack(results, seq_len))


def packed(policy: Policy, results: list[TokenizedResult], seq_len: int = 128) -> Computed:
    """Compute samples with a policy, packed into rows."""
    pack = _pack(results, seq_len)
    out = policy(*policy_rows(pack), experts_BTLK=pack.experts).logprobs
    owners = pack.sample_ids[pack.labels >= 0]
    place = {(one.task_id, one.sample): number for number, one in enumerate(results)}
    found = [torch.empty(0)] * len(results)
    for number, one in enumerate(pack.samples):
        found[place[one.task_id, one.sample]] = out[owners == number]
    return _computed(found, policy.decoder, lambda name: name)


def difference(ours: Computed, theirs: Computed) -> float:
    """Return the largest difference of log-probabilities, and of a parameter's gradient relative to
    its length.
    """
    logprobs = max(
        float((a - b).abs().max()) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)
    )
    largest = max(float(gradient.norm()) for gradient in theirs.gradient.values())
    gradients = [
        float((ours.gradient[name] - gradient).norm()) / max(float(gradient.norm()), 1e-4 * largest)
        for name, gradient in theirs.gradient.items()
    ]
    return max(logprobs, *gradients)


def training_config(folder: Path, **settings: Any) -> GRPOConfig:
    """Return a recipe's config for transformers' own class."""
    given = {
        "model": str(folder),
        "data": "-",
        "output_dir": "-",
        "device": "cpu",
        "dtype": "fp32",
        "decoder": "transformers",
    }
    return GRPOConfig(**{**given, **settings})


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
    """Load a folder's policy. Raises ModelFolderError."""
    policy = load_policy(training_config(folder, **settings), HERE)
    if dtype is torch.float64:
        policy.widen(dtype)
    return policy


def check_packed(folder: Path) -> float:
    """Return the largest difference between packed rows and samples one by one, in float64."""
    policy = loaded(folder, torch.float64)
    results = samples(policy.decoder.config.vocab_size)
    theirs, _ = one_by_one(folder, results)
    return difference(packed(policy, results), theirs)


def check_files(folder: Path, out: Path) -> int:
    """Return how many tensors a checkpoint has; raises AssertionError where they are not those of
    the folder.
    """
    save_checkpoint(out, loaded(folder), folder, HERE)
    before = {name: tensor for _, name, tensor in iter_stored(folder)}
    after = {name: tensor for _, name, tensor in iter_stored(out)}
    assert before.keys() == after.keys(), f"other names: {sorted(before.keys() ^ after.keys())[:3]}"
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), f"{name} differs"
    return len(after)


def check_adapters(folder: Path, out: Path) -> float:
    """Return the largest difference between a policy with adapters, and the merged folder through
    transformers alone.
    """
    policy = loaded(folder, lora_rank=4, lora_alpha=8.0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    write_merged(out, policy, folder, "fp32")
    results = samples(policy.decoder.config.vocab_size)
    theirs, _ = one_by_one(out, results)
    policy.widen(torch.float64)
    ours = packed(policy, results)
    assert any(is_adapter(name) for name in ours.gradient), "no adapter has a gradient"
    return max(
        float((a - b).abs().max()) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)
    )


def check_served(folder: Path, out: Path) -> str:
    """Serve a checkpoint, load the next one in place of it, and compare every weight and the
    canary.
    """
    from ttrl.server.vllm import VLLMServer
    from ttrl.weights.sync import sync_weights
    from ttrl.weights.verify import verify_weights

    policy = loaded(folder)
    save_checkpoint(out / "before", policy, folder, HERE)
    results = samples(policy.decoder.config.vocab_size)
    packed(policy, results)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None and float(parameter.grad.norm()):
                parameter -= (
                    0.02 * parameter.grad / parameter.grad.norm() * parameter.norm().clamp(min=1.0)
                )
    save_checkpoint(out / "after", policy, folder, HERE)
    log = out / "server.log"
    with VLLMServer(
        out / "before", served_model_name="policy", log_path=log, dtype="float32", max_model_len=512
    ) as server:
        verify_weights(server, out / "before", compare=True)
        report = sync_weights(server, out / "after")
        proof = verify_weights(server, out / "after", compare=True)
    unchecked = ""
    if proof.unchecked:
        unchecked = f", {proof.unchecked:,} numbers by the canary alone"
    restarts = "; restarts" if report.fell_back else ""
    difference = report.proof.canary_max_difference
    if difference > SERVED_LIMIT:
        return f"no: with the same weights it differs by {difference:.0e}"
    return f"{difference:.0e}{unchecked}{restarts}"


def grade_by_letters(choice: Any) -> float:
    """Give a random model's answers rewards that differ."""
    return sum(map(ord, choice.message.content)) % 7 / 6


async def answer_raw(chat: Any) -> float:
    """Answer a prompt that is text already."""
    return grade_by_letters(await chat())


def check_loop(folder: Path, out: Path) -> str:
    """Run two iterations; return the largest |Δ log-probability| between sampler and trainer.

    The second iteration samples with the weights that the first has trained.
    """
    from ttrl import Task, TrainConfig, train

    words = ("add", "sort", "name", "count", "spell", "write")
    tasks = [Task([{"role": "user", "content": word}], grade_by_letters) for word in words]
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if settings["model_type"] == "gpt_oss":  # vLLM renders its chats with harmony's vocabulary
        tasks = [Task([{"role": "prompt", "content": word}], rollout=answer_raw) for word in words]
    config = TrainConfig(
        run=str(out / "run"),
        model=str(folder),
        iterations=2,
        tasks_per_iteration=4,
        samples_per_task=4,
        max_tokens=8,
        seq_len=256,
        device="cpu",
        dtype="fp32",
        training={"decoder": "transformers", "lr": 1e-3},
    )
    train(config, tasks[:4], tasks[4:], quiet=True)
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row.get("trained")]
    assert len(trained) == 2, f"{len(trained)} of 2 iterations were trained"
    return f"{max(row['sampler_trainer']['max'] for row in trained):.0e}"


class Row(NamedTuple):
    """What was found of a model: words for each column."""

    name: str
    packed: str
    adapters: str
    files: str
    served: str
    loop: str


def check(name: str, served: bool, loop: bool) -> Row:
    """Run all checks of a model."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        try:
            folder = write_model(name, place / "model")
        except FAILURES as error:  # a transformers without it
            return Row(name, _reason(error), "", "", "", "")
        cells = {
            "packed": lambda: _within(check_packed(folder)),
            "adapters": lambda: _within(check_adapters(folder, place / "merged"), 1e-4),
            "files": lambda: f"{check_files(folder, place / 'checkpoint')} tensors",
            "served": (lambda: check_served(folder, place)) if served else (lambda: ""),
            "loop": (lambda: check_loop(folder, place)) if loop else (lambda: ""),
        }
        return Row(name, **{column: _cell(one) for column, one in cells.items()})


def _within(found: float, limit: float = LIMIT) -> str:
    assert found <= limit, f"differs by {found:.1e}"
    return f"{found:.0e}"


def _cell(one: Callable[[], str]) -> str:
    try:
        return one()
    except FAILURES as error:  # the table says it
        return _reason(error)


def _reason(error: Exception) -> str:
    words = str(error).replace("\n", " ").replace("|", "/")
    if "does not support this model: " in words:
        words = words.partition("does not support this model: ")[2]
    if logged := re.search(r"ERROR [^\]]*\] (.*)", words):
        words = f"vLLM: {logged[1]}"
    kind = "" if isinstance(error, UserError | AssertionError) else f"{type(error).__name__}: "
    return f"no: {kind}{words[:160]}"


def table(rows: list[Row]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| Model | Class | Packed = unpacked | LoRA, merged | Checkpoint | Served by vLLM on CPU "
        "| Loop |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        model = MODELS[row.name]
        cells = (model.title, f"`{model.config.removesuffix('Config')}`", *row[1:])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows; all unless given")
    parser.add_argument(
        "--served", action="store_true", help="start a vLLM server for each, 20 CPU seconds"
    )
    parser.add_argument(
        "--loop", action="store_true", help="run two iterations with each, a minute on 2 cores"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="keep results there, and print the table of all that it has",
    )
    arguments = parser.parse_args()
    names = arguments.names or list(MODELS)
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = {}
    for name in names:
        rows[name] = check(name, arguments.served, arguments.loop)
        print(*rows[name], sep=" | ", flush=True)
        if arguments.results is not None:
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[name]._asdict()) + "\n")
    if arguments.results is not None:
        lines = arguments.results.read_text(encoding="utf-8").splitlines()
        rows = {one["name"]: Row(**one) for one in map(json.loads, lines)}
    print(table([rows[name] for name in MODELS if name in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
