"""GGUF files: read back tensor by tensor, and run by a real llama.cpp.

TTRL_TEST_LLAMA_PYTHON names a Python with xllamacpp.
"""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import check_parity
import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ttrl.errors import ModelFolderError
from ttrl.exports.gguf import DTYPES, write_gguf
from ttrl.exports.gguf_tokenizer import vocabulary
from ttrl.ready_models import ready_model
from ttrl.tiny_model import make_tiny_model

LLAMA = os.environ.get("TTRL_TEST_LLAMA_PYTHON")
needs_llama = pytest.mark.skipif(LLAMA is None, reason="needs TTRL_TEST_LLAMA_PYTHON")
WORKER = Path(__file__).parents[1] / "support" / "llama_worker.py"
FAMILIES = {
    "llama": "llama",
    "llama3-rope": "llama",
    "mistral": "llama",
    "ministral": "llama",
    "phi3": "llama",
    "qwen2": "qwen2",
    "qwen2-tied": "qwen2",
    "qwen2-yarn": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2-scaled": "gemma2",
    "gemma3": "gemma3",
    "gemma3-capped": "gemma3",
    "gpt2": "gpt2",
}
"""By the name of a model of check_parity: llama.cpp's architecture."""
SCALED = {
    name: {"query_pre_attn_scalar": 16} for name in ("gemma2-scaled", "gemma3", "gemma3-capped")
}
"""Scores scaled by the dimension of a head, as of all but the largest real models."""
QUESTIONS = [
    f"Write this as JSON: {name} bought {count} {fruit} on Monday."
    for count, (name, fruit) in enumerate(
        [(name, fruit) for name in ("Ada", "Bob", "Eve", "Liu") for fruit in
         ("figs", "pears", "plums", "limes", "kiwis")], 7
    )
]  # fmt: skip


def with_tokenizer(folder, tokenizer=None):
    """Give a model of check_parity, of 97 embeddings, a tokenizer of 97 characters."""
    if tokenizer is None:
        letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
        vocab = {letter: number for number, letter in enumerate(letters)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(folder)
    return folder


def model_of(name, folder):
    check_parity.make_folder(name.removesuffix("-scaled"), folder)
    if name in SCALED:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | SCALED[name]))
    return with_tokenizer(folder)


def asked(path, requests):
    """Return a real llama.cpp's answers."""
    done = subprocess.run(
        [LLAMA, str(WORKER), str(path)],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests), done.stderr[-3000:]
    return answers


def greedy(prompt, tokens, **more):
    return [
        "/completion",
        {
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
            **more,
        },
    ]


def read_back(path):
    """Return the tensors of a GGUF file as float32, by llama.cpp's names."""
    with contextlib.redirect_stderr(io.StringIO()):
        reader = gguf.GGUFReader(path)
    return {
        one.name: gguf.dequantize(one.data, one.tensor_type).reshape(one.shape[::-1])
        for one in reader.tensors
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_is_the_checkpoints(tmp_path, name):
    """Every stored matrix is in the file once, by its numbers: sorted, since rows may move."""
    folder = model_of(name, tmp_path / "model")
    write_gguf(folder, tmp_path / "out.gguf", dtype="f32", name="a model")
    found = read_back(tmp_path / "out.gguf")
    wanted = load_file(folder / "model.safetensors")
    if "Gemma" in json.loads((folder / "config.json").read_text())["architectures"][0]:
        wanted = {name: tensor + 1 if "norm" in name else tensor for name, tensor in wanted.items()}

    def sums(tensors):
        return sorted(float(numpy.sort(numpy.asarray(one).ravel()).sum()) for one in tensors)

    fused = {"phi3": 3, "gpt2": 0}.get(name, 0)
    stored = [
        tensor for key, tensor in wanted.items() if key != "lm_head.weight" or not_tied(folder)
    ]
    assert sum(tensor.numel() for tensor in stored) == sum(
        one.size for key, one in found.items() if key != "rope_freqs.weight"
    )
    if not fused:
        assert sums(stored) == pytest.approx(
            sums(one for key, one in found.items() if key != "rope_freqs.weight"), abs=1e-3
        )


def not_tied(folder):
    return not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def test_metadata_is_the_configs(tmp_path):
    folder = model_of("qwen2-yarn", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    write_gguf(folder, tmp_path / "out.gguf", dtype="bf16", name="a model")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    found = {name: field.contents() for name, field in fields.items()}
    assert found["general.architecture"] == "qwen2"
    assert found["general.name"] == "a model"
    assert found["qwen2.block_count"] == config["num_hidden_layers"]
    assert found["qwen2.embedding_length"] == config["hidden_size"]
    assert found["qwen2.feed_forward_length"] == config["intermediate_size"]
    assert found["qwen2.attention.head_count"] == config["num_attention_heads"]
    assert found["qwen2.attention.head_count_kv"] == config["num_key_value_heads"]
    assert found["qwen2.rope.scaling.factor"] == config["rope_parameters"]["factor"]
    assert found["qwen2.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
    assert len(found["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert found["tokenizer.ggml.tokens"][found["tokenizer.ggml.eos_token_id"]] == "<|end|>"
    assert found["tokenizer.chat_template"] == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_rounds_matrices_and_no_vectors(tmp_path, dtype):
    folder = model_of("llama", tmp_path / "model")
    exact, rounded = tmp_path / "exact.gguf", tmp_path / "rounded.gguf"
    write_gguf(folder, exact, dtype="f32", name="a")
    write_gguf(folder, rounded, dtype=dtype, name="a")
    before, after = read_back(exact), read_back(rounded)
    assert before.keys() == after.keys()
    allowed = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254}[dtype]
    for name, values in before.items():
        limit = 0.0 if values.ndim == 1 else allowed * 1.01 * numpy.abs(values).max()
        assert numpy.abs(values - after[name]).max() <= limit, name
    assert math.isclose(
        rounded.stat().st_size / exact.stat().st_size,
        {"f32": 1.0, "f16": 0.53, "bf16": 0.53, "q8_0": 0.33}[dtype],
        rel_tol=0.1,
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("phi", "no 'phi' models"),
        ("nanochat", "no 'nanochat' models"),
        ("llama-dynamic", "'dynamic'"),
        ("phi3-partial-tied", "a partial RoPE"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2-untied", "an output head of its own"),
        ("gemma2-uncapped", "without a soft cap"),
        ("llama-biased", "'gelu'"),
    ],
)
def test_what_llama_cpp_computes_in_another_way_is_refused(tmp_path, name, why):
    folder = model_of(name, tmp_path / "model")
    with pytest.raises(ModelFolderError, match=why):
        write_gguf(folder, tmp_path / "out.gguf", dtype="f32", name="a")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["mistral-window", "ministral", "qwen2-window", "phi3"])
def test_a_context_ends_where_llama_cpp_would_look_too_far_back(tmp_path, name):
    folder = model_of(name, tmp_path / "model")
    write_gguf(folder, tmp_path / "out.gguf", dtype="f32", name="a")
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    (context,) = (one.contents() for key, one in fields.items() if key.endswith("context_length"))
    assert context == json.loads((folder / "config.json").read_text())["sliding_window"]


def split_by(*steps):
    return pre_tokenizers.Sequence(list(steps))


def isolated(pattern):
    from tokenizers import Regex

    return pre_tokenizers.Split(Regex(pattern), "isolated")


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
RAW_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "gpt-2": (BYTES, False),
    "smollm": (split_by(pre_tokenizers.Digits(individual_digits=True), BYTES), False),
    "qwen2": (split_by(isolated(QWEN), RAW_BYTES), False),
    "llama-bpe": (split_by(isolated(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)), RAW_BYTES), True),
}


def merging(pre, ignore_merges=False):
    """A byte-level BPE with merges of letters, digits and spaces, and 500 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "0123456789Ġe" for b in "0123456789Ġtn"]
    pairs += [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("'", "s"),
        ("'", "S"),
        ("Ċ", "Ċ"),
        ("12", "34"),
    ]
    words = list(dict.fromkeys([*alphabet, *(a + b for a, b in pairs)]))
    model = models.BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=list(dict.fromkeys(pairs)),
        ignore_merges=ignore_merges,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TEXTS = [
    "Then the 1234567 others, on 2024-01-31: it's THE'S end.",
    "a\n\n\n  b \t c\r\n12 34\u00a0é naïve 日本語 🙂 <|end|> x",
    "   leading and trailing   ",
    "don't I'LL we've\n123,456.789e10",
]


@pytest.mark.parametrize("name", SPLITS)
def test_the_way_of_splitting_is_named(tmp_path, name):
    pre, ignores = SPLITS[name]
    with_tokenizer(tmp_path, merging(pre, ignores))
    assert vocabulary(tmp_path, 600).split == name


def test_an_unknown_way_of_splitting_is_refused(tmp_path):
    with_tokenizer(tmp_path, merging(split_by(isolated(r"\d+"), RAW_BYTES)))
    with pytest.raises(ModelFolderError, match="no name, known to ttrl, for splitting"):
        vocabulary(tmp_path, 600)
    with_tokenizer(tmp_path, merging(BYTES, ignore_merges=True))
    with pytest.raises(ModelFolderError, match="whole words first"):
        vocabulary(tmp_path, 600)


def test_damaged_folders_are_refused_before_anything_is_written(tmp_path):
    good = make_tiny_model(tmp_path / "good", layers=1, width=32, heads=2)
    damage = [
        ("tokenizer_config.json", "{", "the tokenizer of .* cannot be loaded"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("generation_config.json", "[]", "generation_config.json is damaged"),
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", {"hidden_size": 64}, "tok_embeddings.weight has the shape"),
        ("config.json", {"vocab_size": 10**9}, "tok_embeddings.weight has the shape"),
        ("config.json", {"head_dim": 64}, "q_proj.weight has the shape"),
        ("config.json", {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    ]
    for number, (name, content, message) in enumerate(damage):
        folder = shutil.copytree(good, tmp_path / str(number))
        if isinstance(content, dict):
            content = json.dumps(json.loads((folder / name).read_text()) | content)
        (folder / name).write_text(content)
        with pytest.raises(ModelFolderError, match=message):
            write_gguf(folder, folder / "out.gguf", dtype="f32", name="x")
        assert not (folder / "out.gguf").exists()


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    with_tokenizer(tmp_path, merging(BYTES))
    with pytest.raises(ModelFolderError, match="embeddings"):
        vocabulary(tmp_path, 300)


def sentence_pieces():
    """A BPE in SentencePiece's way: spaces are letters, unknown characters bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdefghinorst", "th", "▁t", "▁th", "the", "▁the", "in", "er", "▁a", "on", "▁an"]
    merges = [("▁", "t"), ("t", "h"), ("e", "r"), ("i", "n"), ("▁", "a"), ("▁t", "h"), ("o", "n")]
    merges += [("▁th", "e"), ("th", "e"), ("▁", "the"), ("▁a", "n")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_sentence_pieces_are_scored_by_their_merges(tmp_path):
    with_tokenizer(tmp_path, sentence_pieces())
    words = vocabulary(tmp_path, 320)
    scores = dict(zip(words.tokens, words.scores, strict=True))
    assert (words.model, words.merges, words.space_first) == ("llama", None, False)
    assert scores["▁t"] > scores["th"] > scores["er"] > scores["▁th"]
    assert words.kinds[words.tokens.index("<0x41>")] == gguf.TokenType.BYTE


# With a real llama.cpp


@needs_llama
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_the_family(tmp_path, name):
    """llama.cpp's log-probabilities along a text equal transformers'."""
    folder = model_of(name, tmp_path / "model")
    write_gguf(folder, tmp_path / "out.gguf", dtype="f32", name="a")
    ids = [(7 * place * place + 3 * place + 5) % 90 for place in range(12)]
    if name in ("ministral", "phi3"):
        ids = ids[:2]  # longer texts leave the window, as the file's context says
    probabilities = {"n_probs": 97, "logit_bias": []}
    (answer,) = asked(tmp_path / "out.gguf", [greedy(ids, 1, **probabilities)])
    model = check_parity.reference_model(folder, torch.float32)
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    found = {
        one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]
    }
    assert len(found) >= 90
    worst = max(abs(float(wanted[number]) - value) for number, value in found.items())
    # llama.cpp looks GELU up in a table of 16 bits.
    assert worst < (0.03 if name.startswith(("gemma", "gpt2")) else 1e-3)


@needs_llama
@pytest.mark.parametrize("name", [*SPLITS, "llama"])
def test_llama_cpp_splits_texts_the_same_way(tmp_path, name):
    tokenizer = sentence_pieces() if name == "llama" else merging(*SPLITS[name])
    folder = check_parity.make_folder("llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(600)
    model.save_pretrained(folder)
    with_tokenizer(folder, tokenizer)
    write_gguf(folder, tmp_path / "out.gguf", dtype="f16", name="a")
    known = AutoTokenizer.from_pretrained(folder)
    found = asked(
        tmp_path / "out.gguf",
        [["/tokenize", {"content": text, "add_special": False}] for text in TEXTS],
    )
    wanted = [known.encode(text, add_special_tokens=False) for text in TEXTS]
    assert [one["tokens"] for one in found] == wanted


@needs_llama
@pytest.mark.long
def test_a_real_model_answers_token_for_token(tmp_path):
    """Long: SmolLM2-135M answers 20 prompts greedily in llama.cpp as in transformers, and llama.cpp
    applies the chat template the same way. Shorter: the tests of each family above.
    """
    folder = ready_model("smollm2-135m")
    write_gguf(folder, tmp_path / "out.gguf", dtype="f32", name="SmolLM2")
    known = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [
        known.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    ids = [known.encode(prompt, add_special_tokens=False) for prompt in prompts]
    answers = asked(
        tmp_path / "out.gguf",
        [
            *(["/apply-template", {"messages": chat}] for chat in chats),
            *(["/tokenize", {"content": p, "add_special": False}] for p in prompts),
            *(greedy(prompt, 24) for prompt in ids),
        ],
    )
    assert [one["prompt"] for one in answers[:20]] == prompts
    assert [one["tokens"] for one in answers[20:40]] == ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(ids, answers[40:], strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert out[0, len(prompt) :].tolist() == answer["tokens"]
