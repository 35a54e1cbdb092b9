"""Fixtures of the recipes' parts: models of every family, float64 references, samples to pack."""

import contextlib
import resource

import pytest
import torch
from support.tiny_models import load_policy_in, random_samples
from support.training_steps import packed_rows
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from ttrl.training import resident


@pytest.fixture(autouse=True, scope="session")
def always_one_thread(one_thread):
    """All of them are tiny models."""


@pytest.fixture(scope="session")
def with_vision_tower(tmp_path_factory):
    """A tiny Gemma 3 with a vision tower, and its text part alone."""
    folder = tmp_path_factory.mktemp("gemma3-vision")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = Gemma3TextConfig(
        **shape, vocab_size=97, num_key_value_heads=2, head_dim=16, sliding_window=5
    )
    tokens = {"image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94}
    vision = SiglipVisionConfig(**shape | {"num_hidden_layers": 1}, image_size=28, patch_size=14)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture
def samples():
    """Groups of 3 prompts with 4 completions each."""
    return random_samples(5)


@pytest.fixture
def load_policy():
    """`load_policy_in`, as a fixture."""
    return load_policy_in


@pytest.fixture(scope="session")
def packed():
    """Several rows of several lengths."""
    return packed_rows()


@pytest.fixture
def files_of_at_most():
    """`files_of_at_most(BYTES)`: a block in which the kernel refuses longer files."""

    @contextlib.contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def loads(monkeypatch):
    """The models that were loaded from files."""
    found, original = [], resident.load_policy

    def load(config, ranks):
        found.append(config.model)
        return original(config, ranks)

    monkeypatch.setattr(resident, "load_policy", load)
    return found
