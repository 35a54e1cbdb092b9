"""Tiny models of every family, float64 references, and samples to pack."""

import importlib.util
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

from ttrl.records import TokenizedResult
from ttrl.training.models import build_decoder, load_into, load_weights, read_config
from ttrl.training.policy.policy import Policy

_spec = importlib.util.spec_from_file_location("check_parity", Path(__file__).parents[2] / "tools" / "check_parity.py")
check_parity = sys.modules.setdefault("check_parity", importlib.util.module_from_spec(_spec))
if not hasattr(check_parity, "VARIANTS"):  # dataclasses look their module up while it is loaded
    _spec.loader.exec_module(check_parity)
VOCAB = check_parity.VOCAB


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
            check_parity.make_folder(family, folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def with_vision_tower(tmp_path_factory):
    """A tiny Gemma 3 with a vision tower, and its text part alone."""
    folder = tmp_path_factory.mktemp("gemma3-vision")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = Gemma3TextConfig(**shape, vocab_size=97, num_key_value_heads=2, head_dim=16, sliding_window=5)
    tokens = {"image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94}
    vision = SiglipVisionConfig(**shape | {"num_hidden_layers": 1}, image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def native_layout(folder, target):
    """The same model with the names that its modules have, which transformers 4.52 and later wrote too."""
    shutil.copytree(folder, target)
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        renamed["model." + name.replace("language_model.model.", "language_model.")] = tensor
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_policy_in(folder, dtype=torch.float64, num_output_chunks=3):
    """Our policy, without sharding, in any dtype."""
    config = read_config(folder)
    decoder = build_decoder(config)
    load_into(decoder, load_weights(folder, config), folder)
    return Policy(decoder, num_output_chunks=num_output_chunks, compute_dtype=dtype).to(dtype)


@pytest.fixture
def float64_reference():
    """transformers' model in float64 throughout."""
    with check_parity.softmax_keeps_dtype():
        yield lambda folder: check_parity.reference_model(folder, torch.float64)


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


@pytest.fixture
def samples():
    """Groups of 3 prompts with 4 completions each."""
    return random_samples(5)


@pytest.fixture
def load_policy():
    """`load_policy_in`, as a fixture."""
    return load_policy_in
