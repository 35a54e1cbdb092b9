"""nanochat's own checkpoints, against its formulas written down once more, and against tiktoken."""

import json
import os
import pickle

import check_models
import pytest
import tiktoken
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ttrl.cli.commands import main
from ttrl.data.chat.templates import tokenize_chat
from ttrl.errors import UserError
from ttrl.nanochat.convert import convert, read_tokenizer

SPECIAL = (
    *(
        "<|bos|>",
        "<|user_start|>",
        "<|user_end|>",
        "<|assistant_start|>",
        "<|assistant_end|>",
        "<|python_start|>",
    ),
    *("<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
MERGED = ["th", "he", "the", " t", " the", "in", "ing", "er", "12", "  ", "é"]
LAYERS, HEADS, WIDTH, CONTEXT = 5, 2, 64, 1024
SETTINGS = {
    "sequence_len": CONTEXT,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_kv_head": HEADS,
    "n_embd": WIDTH,
    "window_pattern": "SSL",
}


def encoding(merged=tuple(MERGED)):
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in merged:
        ranks.setdefault(text.encode(), len(ranks))
    special = {token: len(ranks) + number for number, token in enumerate(SPECIAL)}
    return tiktoken.Encoding(
        name="rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def random_weights(vocabulary, padded, seed=0):
    """Return what nanochat saves, under its names; tables are padded to a multiple of 64."""
    draw = torch.Generator().manual_seed(seed)

    def some(*shape, scale=0.2):
        return torch.randn(*shape, generator=draw) * scale

    found = {
        "transformer.wte.weight": some(padded, WIDTH).bfloat16(),
        "lm_head.weight": some(padded, WIDTH),
        "resid_lambdas": 1 + some(LAYERS),
        "x0_lambdas": some(LAYERS),
        "smear_gate.weight": some(1, 24),
        "smear_lambda": torch.tensor([0.7]),
        "backout_lambda": torch.tensor([0.3]),
    }
    for number in range(LAYERS):
        for name in ("c_q", "c_k", "c_v", "c_proj"):
            found[f"transformer.h.{number}.attn.{name}.weight"] = some(WIDTH, WIDTH)
        found[f"transformer.h.{number}.mlp.c_fc.weight"] = some(4 * WIDTH, WIDTH)
        found[f"transformer.h.{number}.mlp.c_proj.weight"] = some(WIDTH, 4 * WIDTH)
        if number % 2 == (LAYERS - 1) % 2:
            found[f"transformer.h.{number}.attn.ve_gate.weight"] = some(HEADS, 12)
            found[f"value_embeds.{number}.weight"] = some(padded, WIDTH).bfloat16()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    base = tmp_path_factory.mktemp("nanochat")
    made = encoding()
    (base / "tokenizer").mkdir()
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(made))
    folder = base / "chatsft_checkpoints" / "d5"
    folder.mkdir(parents=True)
    padded = -(-made.n_vocab // 64) * 64
    for step in (100, 200):
        torch.save(random_weights(made.n_vocab, padded, seed=step), folder / f"model_{step:06d}.pt")
        meta = {"step": step, "model_config": {**SETTINGS, "vocab_size": made.n_vocab}}
        (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    return convert(checkpoint, tmp_path_factory.mktemp("out") / "model")


def formulas(weights, ids, vocabulary):
    """Compute logits [T, V] of one text in float64, position by position where that is plainest."""
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    dim, length = WIDTH // HEADS, len(ids)
    angles = torch.arange(length).double()[:, None] / 100_000 ** (
        torch.arange(0, dim, 2).double() / dim
    )

    def turned(x):  # [T, H, E]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos + b * sin, -a * sin + b * cos], -1)

    plain = norm(weights["transformer.wte.weight"][ids])
    x = plain.clone()
    for t in range(1, length):
        gate = weights["smear_lambda"] * torch.sigmoid(weights["smear_gate.weight"] @ plain[t, :24])
        x[t] = plain[t] + gate * plain[t - 1]
    start, halfway = x, None
    for number in range(LAYERS):
        one = f"transformer.h.{number}."
        x = weights["resid_lambdas"][number] * x + weights["x0_lambdas"][number] * start
        h = norm(x)
        q, k, v = (
            (h @ weights[f"{one}attn.{name}.weight"].T).view(length, HEADS, dim)
            for name in ("c_q", "c_k", "c_v")
        )
        if f"value_embeds.{number}.weight" in weights:
            gate = 3 * torch.sigmoid(h[:, :12] @ weights[f"{one}attn.ve_gate.weight"].T)
            v = v + gate[..., None] * weights[f"value_embeds.{number}.weight"][ids].view(
                length, HEADS, dim
            )
        q, k = 1.2 * norm(turned(q)), 1.2 * norm(turned(k))
        before = 256 if "SSL"[number % 3] == "S" and number < LAYERS - 1 else length
        out = torch.zeros(length, HEADS, dim, dtype=torch.float64)
        for t in range(length):
            seen = slice(max(0, t - before), t + 1)
            scores = torch.einsum("he,she->hs", q[t], k[seen]) / dim**0.5
            out[t] = torch.einsum("hs,she->he", scores.softmax(-1), v[seen])
        x = x + out.reshape(length, WIDTH) @ weights[f"{one}attn.c_proj.weight"].T
        x = (
            x
            + F.relu(norm(x) @ weights[f"{one}mlp.c_fc.weight"].T).square()
            @ weights[f"{one}mlp.c_proj.weight"].T
        )
        if number == LAYERS // 2:
            halfway = x
    x = norm(x - weights["backout_lambda"] * halfway)
    logits = (x @ weights["lm_head.weight"].T)[:, :vocabulary]
    return 15 * torch.tanh(logits / 15)


@pytest.mark.parametrize("length", [1, 2, 300])
def test_the_converted_model_computes_nanochats_formulas(length, checkpoint, converted, one_thread):
    """300 tokens are more than the short window; the last step is taken."""
    model = AutoModelForCausalLM.from_pretrained(converted, attn_implementation="eager").double()
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(1))
    found = model(ids[None]).logits[0]
    wanted = formulas(torch.load(checkpoint / "model_000200.pt"), ids, vocabulary)
    assert found.shape == (length, encoding().n_vocab)
    assert float((found - wanted).detach().abs().max()) < 1e-5  # rotations in float32


def test_packed_rows_and_checkpoints_of_the_converted_model(converted, tmp_path, one_thread):
    assert check_models.check_packed(converted) <= check_models.LIMIT
    assert check_models.check_files(converted, tmp_path / "checkpoint") > 40


@given(st.text())
@example("the  thing's 1234\n\n\ttheé <|bos|> \u2028 🙂 THE'LL")
def test_the_tokenizer_is_tiktokens(text):
    global _tokenizers
    ours, theirs = _tokenizers
    ids = ours(text, add_special_tokens=False)["input_ids"]
    plain = [token for token in SPECIAL if token in text]
    assert ids == theirs.encode(text, allowed_special=set(plain), disallowed_special=())
    assert ours.decode(ids).encode() == theirs.decode_bytes(ids).decode("utf-8", "replace").encode()


@pytest.fixture(scope="module", autouse=True)
def _both(tmp_path_factory):
    global _tokenizers
    made = encoding()
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.pkl"
    file.write_bytes(pickle.dumps(made))
    _tokenizers = (read_tokenizer(file), made)


def test_conversations_are_what_nanochat_renders(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    made = encoding()
    special = made.encode_single_token
    messages = [
        {"role": "system", "content": "the"},
        {"role": "user", "content": "thing"},
        {"role": "assistant", "content": "er 12"},
        {"role": "user", "content": "in"},
    ]
    plain = made.encode_ordinary
    wanted = [
        special("<|bos|>"),
        special("<|user_start|>"),
        *plain("the\n\nthing"),
        special("<|user_end|>"),
    ]
    wanted += [special("<|assistant_start|>"), *plain("er 12"), special("<|assistant_end|>")]
    wanted += [
        special("<|user_start|>"),
        *plain("in"),
        special("<|user_end|>"),
        special("<|assistant_start|>"),
    ]
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        == wanted
    )
    assert tokenizer.eos_token == "<|assistant_end|>"
    chat = tokenize_chat(tokenizer, [*messages, {"role": "assistant", "content": "he"}])
    assert chat.token_ids[: len(wanted)] == wanted
    assert [chat.token_ids[turn.start : turn.end] for turn in chat.turns] == [
        [*plain("er 12"), special("<|assistant_end|>")],
        [*plain("he"), special("<|assistant_end|>")],
    ]


class _Attack:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("where", ["tokenizer", "weights"])
def test_nothing_of_a_file_is_run(where, checkpoint, tmp_path):
    harm = tmp_path / "harm"
    payload = tmp_path / "payload"
    if where == "tokenizer":
        payload.write_bytes(pickle.dumps(_Attack(harm)))
        with pytest.raises(UserError, match=r"a tokenizer that would build posix\.system"):
            convert(checkpoint, tmp_path / "out", payload)
    else:
        folder = tmp_path / "d5"
        folder.mkdir()
        torch.save({"lm_head.weight": _Attack(harm)}, folder / "model_000001.pt")
        (folder / "meta_000001.json").write_text((checkpoint / "meta_000200.json").read_text())
        with pytest.raises(UserError, match="cannot be read as a file of weights"):
            convert(folder, tmp_path / "out", checkpoint.parents[1] / "tokenizer")
    assert not harm.exists() and not (tmp_path / "out").exists()


def changed(checkpoint, tmp_path, weights=None, config=None):
    folder = tmp_path / "changed"
    folder.mkdir()
    kept = torch.load(checkpoint / "model_000200.pt")
    torch.save(
        {name: tensor for name, tensor in (kept | (weights or {})).items() if tensor is not None},
        folder / "model_000003.pt",
    )
    meta = json.loads((checkpoint / "meta_000200.json").read_text())
    meta["model_config"] |= config or {}
    (folder / "meta_000003.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (
            {"smear_lambda": None},
            {},
            r"1 tensors .* are missing, the first model\.layers\.0\.amount; checkpoints of 2025",
        ),
        ({"own": torch.ones(1)}, {}, "has no tensor own"),
        (
            {"smear_gate.weight": torch.ones(1, 12)},
            {},
            r"model\.layers\.0\.gate\.weight has the shape \(1, 12\)",
        ),
        ({}, {"n_kv_head": 1}, "n_kv_head is 1 and n_head 2"),
        ({}, {"window_pattern": "SX"}, "window_pattern is 'SX'"),
        ({}, {"n_embd": "wide"}, "n_embd is 'wide'; nanochat's are whole numbers from 1"),
        ({}, {"n_embd": 0}, "n_embd is 0; nanochat's are whole numbers from 1"),
        ({}, {"n_embd": 66}, "n_embd is 66 and n_head 2; each head needs an even number"),
        ({}, {"n_layer": float("inf")}, "n_layer is inf; nanochat's are whole numbers"),
        ({}, {"n_layer": 1_000_000}, "has 5 layers, but n_layer of its config is 1000000"),
        ({}, {"sequence_len": -1}, "sequence_len is -1"),
        ({"resid_lambdas": torch.tensor(1.0)}, {}, "no dict of arrays of numbers"),
        ({"lm_head.weight": torch.zeros(3, 3).to_sparse()}, {}, "no dict of arrays of numbers"),
        ({"resid_lambdas": torch.ones(7)}, {}, "2 tensors are not part of the model"),
        ({"value_embeds.0.weight": None}, {}, "not part of the model in its config, the first"),
        ({"value_embeds.x.weight": torch.zeros(3, 3)}, {}, "no tensor value_embeds.x.weight"),
        ({}, {"vocab_size": 300}, "give the model's own tokenizer"),
    ],
)
def test_what_is_no_checkpoint_of_2026_is_refused_by_name(
    weights, config, message, checkpoint, tmp_path
):
    folder = changed(checkpoint, tmp_path, weights, config)
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out", checkpoint.parents[1] / "tokenizer")
    assert not (tmp_path / "out").exists()


def test_what_lacks_a_file_of_a_checkpoint_is_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"holds no model_NNNNNN\.pt; give a folder"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"weights\.pt is not a checkpoint of nanochat"):
        convert(tmp_path / "weights.pt", tmp_path / "out")
    (tmp_path / "model_000001.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"meta_000001\.json is missing"):
        convert(tmp_path, tmp_path / "out")


def test_the_command(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["models", "convert", "nanochat", str(checkpoint)]) == 0
    assert capsys.readouterr().out.strip().endswith("models/nanochat-d5")
    assert (tmp_path / "models" / "nanochat-d5" / "model.safetensors").is_file()
    assert main(["models", "convert", "nanochat", str(checkpoint)]) != 0
    assert "exists and is not empty" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/below"):
        assert main(["models", "convert", "nanochat", str(checkpoint), "--out", out]) != 0
        assert "cannot be made a folder" in capsys.readouterr().err
    assert main(["models", "convert", "nanochat", str(tmp_path / "nowhere")]) != 0
    assert "their names are model_NNNNNN.pt" in capsys.readouterr().err
