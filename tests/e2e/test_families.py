"""Families with everything that is special about them, trained one step, are served as what was
trained. Gemma 2: windows, soft caps, norms around attention, scaled and tied embeddings. GPT-2:
matrices that files hold transposed and fused, learned positions, a tied head that files do not
hold.

Only vLLM shows that it reads the checkpoints as they are meant.
"""

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    NanoChatConfig,
    NanoChatForCausalLM,
)

from ttrl.server.vllm import VLLMServer
from ttrl.tiny_model import make_tiny_model
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.models.architecture import read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import Policy, fill_parameters
from ttrl.weights.sync import sync_weights
from ttrl.weights.verify import verify_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HERE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


def write_gemma2(folder):
    make_tiny_model(folder)  # for its tokenizer
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=AutoConfig.from_pretrained(folder).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's CPU attention has no kernel for heads of 16
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        sliding_window=100,  # the canary has 257 tokens
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


def write_gpt2(folder):
    make_tiny_model(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "initializer_range": 0.1}
    config = GPT2Config(
        vocab_size=AutoConfig.from_pretrained(folder).vocab_size,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_nanochat(folder):
    make_tiny_model(folder)
    torch.manual_seed(0)
    config = NanoChatConfig(
        vocab_size=AutoConfig.from_pretrained(folder).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=0,
    )
    NanoChatForCausalLM(config).save_pretrained(folder)
    return folder


def train_a_step(policy):
    tokens = torch.randint(
        policy.decoder.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0)
    )
    alone = torch.zeros_like(tokens)
    output = policy(tokens, tokens.roll(-1, dims=1), alone, alone, torch.arange(64).expand(2, 64))
    (-output.logprobs.mean()).backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= (
                0.05 * parameter.grad / parameter.grad.norm() * parameter.norm().clamp(min=1.0)
            )


@pytest.mark.long
@pytest.mark.parametrize("write", [write_gpt2, write_gemma2, write_nanochat])
def test_a_trained_family_is_served(write, tmp_path):
    """Long: only this loads these families' checkpoints into vLLM. Qwen's: tests/e2e/test_sync.py;
    all are compared with transformers in tests/training/test_parity_families.py.
    """
    start = write(tmp_path / "start")
    config = read_config(start)
    decoder = build_decoder(config)
    fill_parameters(dict(decoder.named_parameters()), start)
    policy = Policy(decoder, num_output_chunks=2)
    save_checkpoint(tmp_path / "before", policy, start, HERE)
    train_a_step(policy)
    save_checkpoint(tmp_path / "after", policy, start, HERE)

    log = tmp_path / "server.log"
    with VLLMServer(
        tmp_path / "before",
        served_model_name="policy",
        log_path=log,
        dtype="float32",
        max_model_len=512,
    ) as server:
        assert (
            verify_weights(server, tmp_path / "before", compare=False).canary_max_difference < 1e-4
        )
        report = sync_weights(server, tmp_path / "after")
        assert report.fell_back is None and report.proof.canary_max_difference < 1e-4
