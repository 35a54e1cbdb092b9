"""Tiny models of every family, float64 references, and samples to pack."""

import dataclasses
import json
import math
import random
import shutil

import check_parity
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.models.architecture import read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.policy.policy import Policy, fill_parameters

VOCAB = check_parity.VOCAB


def native_layout(folder, target):
    """The same model with the names that its modules have, which transformers 4.52 and later wrote
    too.
    """
    shutil.copytree(folder, target)
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        renamed["model." + name.replace("language_model.model.", "language_model.")] = tensor
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def files_in_16_bits(folder, target, dtype=torch.bfloat16):
    """The same model, rounded, in a folder whose files are in 16 bits, as most are published."""
    shutil.copytree(folder, target)
    narrow = {
        name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(narrow, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {
        "dtype": str(dtype).removeprefix("torch.")
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def load_policy_in(folder, dtype=torch.float64, num_output_chunks=3):
    """Our policy, without sharding, in any dtype."""
    config = read_config(folder)
    decoder = build_decoder(config)
    fill_parameters(dict(decoder.named_parameters()), folder)
    return Policy(decoder, num_output_chunks=num_output_chunks, compute_dtype=dtype).to(dtype)


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
        texts = [
            [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))]
            for _ in range(completions - 1)
        ]
        for number, completion in enumerate([*texts, texts[0]]):
            logprobs = [-draw.random() * 5 for _ in completion]
            samples.append(
                sample(
                    prompt,
                    completion,
                    advantage=draw.gauss(0, 1),
                    logprobs=logprobs,
                    number=number,
                    task=f"g{group}",
                )
            )
    return samples


def save_packs(folder, count, completions):
    """packed0.safetensors and so on, each of several short rows: of an iteration each."""
    for number in range(count):
        samples = random_samples(number, prompts=(1, 7), completions=completions)
        samples = [
            dataclasses.replace(sample, reward=float(place % 2))
            for place, sample in enumerate(samples)
        ]
        packed = packed_tensors_from_tokenized_results(samples, seq_len=24, pad_id=0)
        assert packed.num_rows >= 2
        packed.save(folder / f"packed{number}.safetensors")


BYTES_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_model(folder, seed, tied=False):
    """A random Qwen2 over single bytes, which vLLM can serve: borders of tokens lie within
    characters.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = BYTES_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's CPU attention has no kernel for heads of 16
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder
