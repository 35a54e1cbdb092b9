"""What the supervised recipe reads, and what it says of data and models that it cannot read."""

import json

import pytest

from ttrl import sft_recipe
from ttrl.configs import SFTConfig
from ttrl.errors import ConfigError, ModelFolderError, TokenizationError
from ttrl.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("sft") / "model", layers=1, width=32, heads=1)


def conversation(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def config(model, tmp_path, lines, **settings):
    (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    values = {"model": str(model), "data": str(tmp_path / "data.jsonl"), "output_dir": str(tmp_path), "steps": 1}
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
        ('{"text": "hello"}', ConfigError, r"line 2.*no conversation"),
        ('{"messages": "hello"}', ConfigError, r"line 2.*no conversation"),
        ("[1]", ConfigError, r"line 2.*no conversation"),
        ('{"messages": [', ConfigError, r"line 2: not JSON"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', TokenizationError, r"line 2: the last message"),
    ],
)
def test_bad_lines_are_named(line, error, match, model, tmp_path):
    lines = [json.dumps(conversation("a?", "A")), line, json.dumps(conversation("a?", "A"))]
    with pytest.raises(error, match=f"(?s){match}"):
        sft_recipe.read_examples(config(model, tmp_path, lines))


def test_a_missing_model_or_file_is_named(model, tmp_path):
    with pytest.raises(ModelFolderError, match=r"no config\.json there"):
        sft_recipe.read_examples(config("runs/nowhere", tmp_path, ["{}"]))  # not looked up on the hub
    with pytest.raises(ConfigError, match="missing or empty"):
        sft_recipe.read_examples(config(model, tmp_path, []))


def test_every_epoch_uses_every_example_once(model, tmp_path):
    lines = [json.dumps(conversation(f"{n}?", str(n))) for n in range(7)]
    settings = config(model, tmp_path, lines, batch_size=3, seed=5)
    examples, _ = sft_recipe.read_examples(settings)
    stream = sft_recipe.batches(examples, settings)
    drawn = [example.task_id for _ in range(7) for example in next(stream)]  # 21 draws: three epochs
    for epoch in range(3):
        assert sorted(drawn[7 * epoch : 7 * epoch + 7]) == sorted(example.task_id for example in examples)
    assert drawn[:7] != drawn[7:14]
    again = sft_recipe.batches(examples, settings)
    assert [example.task_id for _ in range(7) for example in next(again)] == drawn
