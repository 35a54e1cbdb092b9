"""Tiny models of every family, float64 references, and samples to pack."""

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ttrl.records import TokenizedResult
from ttrl.training.models import build_decoder, load_into, load_weights, read_config
from ttrl.training.policy import Policy

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=False)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE)),
    "llama-biased": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, attention_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=None, head_dim=16)),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """More threads than idle cores make tiny models hundreds of times slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Makes, once, the folder of a tiny random model of a family."""
    made: dict[str, Path] = {}

    def make(family: str = "qwen2") -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(len(family))
            model = FAMILIES[family]()
            with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


def load_policy_in(folder, dtype=torch.float64, num_output_chunks=3):
    """Our policy, without sharding, in any dtype."""
    config = read_config(folder)
    decoder = build_decoder(config)
    load_into(decoder, load_weights(folder, config.tie_word_embeddings), folder)
    return Policy(decoder, num_output_chunks=num_output_chunks, compute_dtype=dtype).to(dtype)


@pytest.fixture
def float64_reference(monkeypatch):
    """transformers' model in float64 throughout: its norms compute in float32 otherwise, which hides differences below 1e-7."""

    def load(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                eps = module.variance_epsilon

                def forward(x, module=module, eps=eps):
                    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

                monkeypatch.setattr(module, "forward", forward)
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(
            torch.nn.functional, "softmax", lambda x, dim=None, dtype=None, **kw: softmax(x, dim=dim, dtype=x.dtype, **kw)
        )
        return model

    return load


def sample(prompt, completion, *, advantage=1.0, logprobs=None, number=0, task="t", reward=0.0):
    """A TokenizedResult of plain lists."""
    n, m = len(prompt), len(completion)
    return TokenizedResult(
        task_id=task,
        sample=number,
        token_ids=[*prompt, *completion],
        assistant_mask=[False] * n + [True] * m,
        input_pos=list(range(n + m)),
        logprobs=[math.nan] * n + (logprobs or [math.nan] * m),
        prompt_length=n,
        reward=reward,
        advantage=advantage,
        weights_version=0,
    )


def random_samples(seed, prompts=(1, 2, 7), completions=4, longest=9):
    """Groups with prompts of the given lengths, completions of random length, one of them twice."""
    draw = random.Random(seed)
    samples = []
    for group, length in enumerate(prompts):
        prompt = [draw.randrange(VOCAB) for _ in range(length)]
        texts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(completions - 1)]
        for number, completion in enumerate([*texts, texts[0]]):
            logprobs = [-draw.random() * 5 for _ in completion]
            samples.append(
                sample(prompt, completion, advantage=draw.gauss(0, 1), logprobs=logprobs, number=number, task=f"g{group}")
            )
    return samples
