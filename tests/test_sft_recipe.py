"""What the supervised recipe reads, and what it says of data and models that it cannot read."""

import itertools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ttrl import sft_recipe
from ttrl.configs import SFTConfig
from ttrl.errors import ConfigError, DivergedError, ModelFolderError, TokenizationError
from ttrl.system.files import read_jsonl
from ttrl.tiny_model import CHAT_TEMPLATE, make_tiny_model
from ttrl.training.parallel.distributed import Ranks

pytestmark = pytest.mark.usefixtures("short_canaries")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("sft") / "model", layers=1, width=32, heads=1)


def conversation(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def config(model, tmp_path, lines, **settings):
    (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    values = {
        "model": str(model),
        "data": str(tmp_path / "data.jsonl"),
        "output_dir": str(tmp_path),
        "steps": 1,
    }
    return SFTConfig.parse({**values, **settings}, "test")


def test_examples_that_do_not_fit_are_left_out_and_counted(model, tmp_path, caplog):
    lines = [json.dumps(conversation("a?", "A")), json.dumps(conversation("b?", "B" * 100))]
    examples, pad_id = sft_recipe.read_examples(config(model, tmp_path, lines, seq_len=20))
    assert len(examples) == 1 and pad_id == 256
    assert "1 of 2 conversations are longer than seq_len 20" in caplog.text
    with pytest.raises(ConfigError, match="the shortest conversation has"):
        sft_recipe.read_examples(config(model, tmp_path, lines, seq_len=3))


@pytest.mark.parametrize(
    ("line", "error", "match"),
    [
        ('{"text": "hello"}', ConfigError, r"line 2.*not a conversation"),
        ('{"messages": "hello"}', ConfigError, r"line 2.*not a conversation"),
        ("[1]", ConfigError, r"line 2.*not a conversation"),
        ('{"messages": [', ConfigError, r"line 2: not JSON"),
        (
            '{"messages": [{"role": "user", "content": "hi"}]}',
            TokenizationError,
            r"line 2: the last message",
        ),
    ],
)
def test_bad_lines_are_named(line, error, match, model, tmp_path):
    lines = [json.dumps(conversation("a?", "A")), line, json.dumps(conversation("a?", "A"))]
    with pytest.raises(error, match=f"(?s){match}"):
        sft_recipe.read_examples(config(model, tmp_path, lines))


def test_a_damaged_last_line_is_named_with_and_without_a_newline(model, tmp_path):
    """A data file that was cut off is no log whose last line may be torn: what it lost is
    missed.
    """
    whole = json.dumps(conversation("a?", "A"))
    settings = config(model, tmp_path, [whole])
    for end in ("", "\n"):
        (tmp_path / "data.jsonl").write_text(f"{whole}\n{whole[:-9]}{end}")
        with pytest.raises(ConfigError, match=r"(?s)data\.jsonl.*line 2: not JSON"):
            sft_recipe.read_examples(settings)
    (tmp_path / "data.jsonl").write_text(f"{whole}\n{whole}")
    assert len(sft_recipe.read_examples(settings)[0]) == 2


def test_a_missing_model_or_file_is_named(model, tmp_path):
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        # Not looked up on the hub.
        sft_recipe.read_examples(config("runs/nowhere", tmp_path, ["{}"]))
    with pytest.raises(ConfigError, match="missing or empty"):
        sft_recipe.read_examples(config(model, tmp_path, []))


def test_parts_and_nulls_are_read_as_texts_and_missing_fields(model, tmp_path):
    """As rows look that multimodal tools wrote, or that went through parquet."""

    def part(text):
        return [{"type": "text", "text": text, "image_url": None}]

    listed = {"messages": [], "tools": None}
    for message in TWO_TURNS:
        listed["messages"].append({**message, "content": part(message["content"]), "name": None})
    lines = [json.dumps({"messages": TWO_TURNS}), json.dumps(listed)]
    (one, other), _ = sft_recipe.read_examples(config(model, tmp_path, lines))
    assert one.token_ids == other.token_ids and one.assistant_mask == other.assistant_mask
    listed["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": "x"}})
    said = "line 1: message 0 holds a part of type 'image_url'"
    with pytest.raises(TokenizationError, match=said):
        sft_recipe.read_examples(config(model, tmp_path, [json.dumps(listed)]))


def test_a_head_that_is_not_the_tied_embeddings_is_refused_before_the_data_is_read(tmp_path):
    folder = make_tiny_model(tmp_path / "model", layers=1, width=32, heads=1, tied=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embeddings.clone()}, file, metadata={"format": "pt"})
    rows = train(folder, tmp_path)
    assert len(rows) == 2
    save_file({**tensors, "lm_head.weight": -embeddings}, file, metadata={"format": "pt"})
    said = r"lm_head\.weight in model\.safetensors differs from model\.embed_tokens\.weight in"
    with pytest.raises(ModelFolderError, match=said):
        sft_recipe.read_examples(config(folder, tmp_path, ["no JSON"]))


def test_every_epoch_uses_every_example_once(model, tmp_path):
    lines = [json.dumps(conversation(f"{n}?", str(n))) for n in range(7)]
    settings = config(model, tmp_path, lines, batch_size=3, seed=5)
    examples, _ = sft_recipe.read_examples(settings)
    stream = sft_recipe.batches(examples, settings)
    # 21 draws: three epochs.
    drawn = [example.task_id for _ in range(7) for example in next(stream)]
    for epoch in range(3):
        assert sorted(drawn[7 * epoch : 7 * epoch + 7]) == sorted(
            example.task_id for example in examples
        )
    assert drawn[:7] != drawn[7:14]
    again = sft_recipe.batches(examples, settings)
    assert [example.task_id for _ in range(7) for example in next(again)] == drawn


TWO_TURNS = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "content": "B"},
]


def trained_text(model, example):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.decode(
        [i for i, mine in zip(example.token_ids, example.assistant_mask, strict=True) if mine]
    )


def with_template(model, tmp_path, template):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    return tmp_path / "model"


def test_all_turns_of_the_assistant_are_trained(model, tmp_path):
    (example,), _ = sft_recipe.read_examples(
        config(model, tmp_path, [json.dumps({"messages": TWO_TURNS})])
    )
    assert trained_text(model, example) == "A<|end|>B<|end|>"


def test_turns_that_the_template_rewrites_have_sequences_of_their_own(model, tmp_path):
    """This one writes everything but the last message in small letters."""
    said = "(message['content'] if loop.last else message['content'] | lower)"
    rewriting = with_template(model, tmp_path, CHAT_TEMPLATE.replace("message['content']", said))
    examples, _ = sft_recipe.read_examples(
        config(rewriting, tmp_path, [json.dumps({"messages": TWO_TURNS})])
    )
    assert [trained_text(rewriting, example) for example in examples] == ["B<|end|>", "A<|end|>"]
    assert [(example.task_id[-6:], example.sample) for example in examples] == [
        ("line 1", 0),
        ("line 1", 1),
    ]


def test_tools_reach_the_template(model, tmp_path):
    template = with_template(
        model,
        tmp_path,
        "{%- if tools -%}{{- tools[0]['function']['name'] -}}{%- endif -%}" + CHAT_TEMPLATE,
    )
    tools = [
        {
            "type": "function",
            "function": {"name": "dig", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    lines = [
        json.dumps({"messages": TWO_TURNS, "tools": tools}),
        json.dumps({"messages": TWO_TURNS}),
    ]
    (one, other), _ = sft_recipe.read_examples(config(template, tmp_path, lines))
    assert len(one.token_ids) == len(other.token_ids) + len("dig")
    assert trained_text(template, one) == trained_text(template, other) == "A<|end|>B<|end|>"


def train(model, tmp_path, **settings):
    lines = [json.dumps(conversation(f"{n}?", str(n) * (n + 1))) for n in range(6)]
    sft_recipe.train_on_examples(
        config(model, tmp_path, lines, steps=2, batch_size=4, seq_len=40, device="cpu", **settings),
        Ranks(0, 1, torch.device("cpu")),
    )
    return read_jsonl(tmp_path / "train.jsonl")


def test_the_lines_of_a_run(model, tmp_path):
    rows = train(model, tmp_path, profile_steps=1)
    assert [row["global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert (
            row["flops"] > 0
            and row["logical_tokens"] >= row["row_tokens"] - 4
            and row["seconds"] > 0
        )
        assert {"data", "forward", "backward", "optimizer"} <= row["seconds_by_part"].keys()
        assert row["peak_share"] > 0 and row["memory_peaks"]["host"] > 0
    assert "checkpoint" in rows[1]["seconds_by_part"]
    assert (tmp_path / "profile" / "rank-0.json").is_file()


def test_losses_that_are_not_finite_stop_the_run(model, tmp_path):
    """Of a model whose weights are finite, and whose logits are not."""
    model = shutil.copytree(model, tmp_path / "overflowing")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 3e38
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        DivergedError, match=r"step 2: .*losses are not finite; the first is in microbatch 0"
    ):
        train(model, tmp_path, max_skipped_steps=1)
    assert not (tmp_path / "checkpoint").exists()


def trained(model, tmp_path, name, **settings):
    """The lines and weights of a run on six conversations of different lengths, in batches of
    four.
    """
    (tmp_path / name).mkdir()
    lines = [json.dumps(conversation(f"{n}?", str(n) * (3 * n + 1))) for n in range(6)]
    values = {"batch_size": 4, "seq_len": 40, "device": "cpu", "lr": 1e-2, **settings}
    sft_recipe.train_on_examples(
        config(model, tmp_path / name, lines, **values), Ranks(0, 1, torch.device("cpu"))
    )
    return read_jsonl(tmp_path / name / "train.jsonl"), load_file(
        tmp_path / name / "checkpoint" / "model.safetensors"
    )


@pytest.mark.long(but=["0.45"])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.999])
def test_flops_end_a_run_at_the_nearest_conversation(share, model, tmp_path):
    """The last of the steps may be a part. Long for the other shares, which end at other counts."""
    each = [row["flops"] for row in trained(model, tmp_path, "each", batch_size=1, steps=28)[0]]
    assert len(set(each)) > 1
    ends = list(itertools.accumulate(each, initial=0.0))
    budget = share * ends[-1]
    nearest = min(range(len(ends)), key=lambda count: abs(ends[count] - budget))
    rows, _ = trained(model, tmp_path, "budget", steps=None, flops=budget)
    starts = range(0, nearest, 4)
    assert [row["flops"] for row in rows] == [
        pytest.approx(sum(each[start : min(start + 4, nearest)])) for start in starts
    ]
    assert all(row["flops_by_part"]["training"] == row["flops"] for row in rows)


@pytest.mark.parametrize(
    ("left", "count"), [(9, 0), (11, 2), (26, 3), (44, 4), (74, 7), (76, 8), (200, 8)]
)
def test_the_last_step_is_a_quarter_or_more(left, count):
    assert sft_recipe.nearest_part(8, left, lambda conversations: 10.0 * conversations) == count


def test_a_run_in_pieces_is_the_same_as_a_whole_one(model, tmp_path):
    """Optimizer, order of the conversations, schedule: all go on."""
    common = {"lr_schedule": "linear", "total_steps": 5, "seed": 3}
    rows, weights = trained(model, tmp_path, "whole", steps=5, **common)
    first, half = trained(model, tmp_path, "first", steps=2, save_state=True, **common)
    state = {"state": str(tmp_path / "first" / "state")}
    second, pieces = trained(
        tmp_path / "first" / "checkpoint", tmp_path, "second", steps=3, **state, **common
    )
    assert [row["global_step"] for row in first + second] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in first + second] == [row["loss"] for row in rows]
    assert all(torch.equal(weights[name], pieces[name]) for name in weights)
    assert not all(torch.equal(weights[name], half[name]) for name in weights)
    assert not (tmp_path / "second" / "state").exists()


def test_an_end_must_be_given_and_be_within_reach(model, tmp_path):
    lines = [json.dumps(conversation("a?", "A"))]
    for settings in ({"steps": None}, {"flops": 1e9}):
        with pytest.raises(ConfigError, match="and both set the end; give one"):
            config(model, tmp_path, lines, **settings)
    with pytest.raises(
        ConfigError,
        match=r"too little for a quarter of a step: 64 conversations take .*lower batch_size",
    ):
        sft_recipe.train_on_examples(
            config(model, tmp_path, lines, steps=None, flops=1.0), Ranks(0, 1, torch.device("cpu"))
        )


def test_the_loss_of_held_out_conversations_is_that_of_transformers(model, tmp_path):
    """Of the trained weights, over the assistant's tokens; training itself takes no notice."""
    others = [conversation(f"{n}+1?", str(n + 1)) for n in range(5)]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(one) + "\n" for one in others))
    plain = train(model, tmp_path)
    rows = train(model, tmp_path, held_out=str(tmp_path / "others.jsonl"), rows_per_microbatch=2)
    added = {"held_out_loss", "held_out_flops"}
    for before, after in zip(plain, rows, strict=True):
        assert before.keys() == after.keys() - added
        for name in ("loss", "grad_norm", "entropy", "flops_by_part", "trained_tokens"):
            assert after[name] == pytest.approx(before[name], rel=1e-5), name
    assert not added & rows[0].keys()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").double()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    losses = []
    for one in others:
        ids = tokenizer.apply_chat_template(one["messages"], return_dict=False)
        asked = tokenizer.apply_chat_template(
            one["messages"][:1], add_generation_prompt=True, return_dict=False
        )
        labels = torch.tensor([[-100] * len(asked) + ids[len(asked) :]])
        with torch.no_grad():
            loss = trained(torch.tensor([ids]), labels=labels).loss
        losses.append((float(loss), len(ids) - len(asked)))
    mean = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    assert rows[-1]["held_out_loss"] == pytest.approx(mean, rel=1e-5)
    assert 0 < rows[-1]["held_out_flops"] < rows[-1]["flops"]
    with pytest.raises(ConfigError, match=r"none\.jsonl' is missing or empty"):
        train(model, tmp_path, held_out=str(tmp_path / "none.jsonl"))
