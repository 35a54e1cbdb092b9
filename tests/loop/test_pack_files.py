"""`ttrl pack`: byte for byte what a run packs, what it says, and what it refuses."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.world import World
from transformers import AutoTokenizer

import ttrl
from ttrl import AdvantageConfig, PackedTensors, TaskResults, TaskResultTokenizer, cli
from ttrl.data.packing.packed_file import tokenizer_digest
from ttrl.errors import ServerError, UserError
from ttrl.loop.pack_files import pack_files, read_rollouts
from ttrl.records import Sample
from ttrl.system.files import read_jsonl

SETTINGS = {"advantages": "leave_one_out", "aggregation": "sequence", "seq_len": 96}


@pytest.fixture
def rollouts(world: World) -> Path:
    """Of a run's first iteration: a group without a signal among four."""
    world.answer = lambda prompt, k, version: "yes" if k < 1 or prompt == "task 1" else "no"
    world.train(iterations=1, tasks_per_iteration=4, validation=[], **SETTINGS)
    return world.run / "iterations" / "0001" / "rollouts.jsonl"


def packed_by_the_command(world: World, rollouts: Path, *options: str) -> Path:
    out = world.folder / "packed.safetensors"
    command = ["pack", str(rollouts), "--model", str(world.model), "--out", str(out), *options]
    assert cli.main(command) == 0
    return out


def test_it_packs_as_the_run_does(world: World, rollouts: Path, capsys) -> None:
    """With the settings of the run folder, or the same ones by hand."""
    expected = rollouts.with_name("packed.safetensors").read_bytes()
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    for options in (["--config", str(world.run)], ["--set", *settings]):
        out = packed_by_the_command(world, rollouts, *options)
        assert out.read_bytes() == expected
        said = capsys.readouterr().out
        packed = PackedTensors.load(out)
        assert f"{packed.num_rows} rows, {packed.num_tokens} tokens" in said
        assert f"{packed.num_trained} of them trained" in said
        assert "4 in all, 1 without a signal (1 all right)" in said
        alone = sum(
            sample.prompt_length + sample.completion_length - 1 for sample in packed.samples
        )
        assert f"{alone - packed.num_tokens} tokens saved" in said
        assert "makes the same ids for the prompts of all 4 compared tasks" in said
        assert tokenizer_digest(world.model)[:12] in said
        assert f"packed={out}" in said
    assert packed_by_the_command(world, rollouts).read_bytes() != expected


def test_public_names_pack_the_same(world: World, rollouts: Path) -> None:
    """Results of `get_task_results` need these few lines."""
    results = TaskResults.from_samples(map(Sample.from_json, read_jsonl(rollouts)))
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    advantages = ttrl.advantages_of(results, AdvantageConfig(kind="leave_one_out"))
    tokenize = TaskResultTokenizer(tokenizer)
    packed = ttrl.packed_tensors_from_tokenized_results(
        [
            sequence
            for group, values in zip(advantages.kept, advantages.values, strict=True)
            for sequence in tokenize(group, values)
        ],
        seq_len=96,
        pad_id=tokenizer.pad_token_id or 0,
        aggregation="sequence",
        model=world.model,
    )
    packed.save(world.folder / "by_hand.safetensors")
    expected = rollouts.with_name("packed.safetensors").read_bytes()
    assert (world.folder / "by_hand.safetensors").read_bytes() == expected


def test_several_files_are_one_batch(world: World, rollouts: Path) -> None:
    """Two groups of the same task in two files stay two groups."""
    copy = world.folder / "more.jsonl"
    shutil.copy(rollouts, copy)
    assert len(read_rollouts(rollouts)) == len(read_rollouts(copy)) == 4
    made = pack_files([rollouts, copy], world.config(), world.folder / "both.safetensors")
    assert made.facts.groups.kept == 6 and made.samples == 24


def another_tokenizer(model: Path, folder: Path) -> Path:
    """The model with the ids of its letters shuffled, and another template."""
    shutil.copytree(model, folder)
    table = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = table["model"]["vocab"]
    letters = [token for token in vocabulary if len(token) == 1 and token.isalpha()]
    ids = [vocabulary[letter] for letter in letters]
    vocabulary.update(zip(letters, ids[1:] + ids[:1], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    return folder


def test_rollouts_of_another_model_are_refused(world: World, rollouts: Path) -> None:
    other = another_tokenizer(world.model, world.folder / "other")
    out = world.folder / "packed.safetensors"
    with pytest.raises(UserError, match=r"ids of 12 of 12 replies mean another text .* none of"):
        pack_files([rollouts], world.config(model=str(other)), out)
    assert not out.exists()


def test_another_template_is_told_and_trains(world: World, rollouts: Path) -> None:
    """The server's ids are trained; its template may have had arguments that nobody recorded."""
    template = world.folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}!{% endfor %}")
    config = world.config(chat_template=str(template), **SETTINGS)
    made = pack_files([rollouts], config, world.folder / "packed.safetensors")
    assert any("other ids for the prompts of 4 of 4" in line for line in made.lines())
    assert made.out.read_bytes() == rollouts.with_name("packed.safetensors").read_bytes()


def test_bad_files_are_refused_before_the_model_is_touched(world: World) -> None:
    good = Sample(task_id="t", sample=0, messages=[{"role": "user", "content": "x"}]).to_json()
    cases = {
        "": r"no samples; sample first",
        '{"task_id": "t"': r"rollouts.jsonl, line 1: not JSON",
        json.dumps(good) + '\n{"text": "x"}': r"sample 2: this is no sample \(TypeError",
        "[1]": r"sample 1: this is no sample \(AttributeError",
    }
    file = world.folder / "rollouts.jsonl"
    config = world.config(model="/not/there")
    out = world.folder / "packed.safetensors"
    for content, said in cases.items():
        file.write_text(content)
        with pytest.raises(UserError, match=said):
            pack_files([file], config, out)
    for files, place, said in (
        ([world.folder / "none.jsonl"], out, "none.jsonl is no file"),
        ([file], world.folder / "none" / "packed", "none is no folder; create it"),
        ([file], file, "one of the rollouts"),
    ):
        with pytest.raises(UserError, match=said):
            pack_files(files, config, place)


def test_rollouts_without_a_signal_are_told_by_their_reasons(world: World) -> None:
    world.answer = lambda prompt, k, version: "yes" if prompt == "task 0" else "no"
    world.train(iterations=1, validation=[])
    rollouts = world.run / "iterations" / "0001" / "rollouts.jsonl"
    with pytest.raises(UserError, match=r"2 without a signal \(1 all right, 1 all wrong\)"):
        pack_files([rollouts], world.config(), world.folder / "packed.safetensors")


def recorded_temperature(rollouts: Path, value: float) -> None:
    """Make it the temperature of the run that wrote them."""
    file = rollouts.parents[2] / "config.yaml"
    values = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**values, "temperature": value}))


def test_a_run_states_the_temperature_of_its_rollouts(world: World, rollouts: Path, capsys) -> None:
    recorded_temperature(rollouts, 0.7)
    packed_by_the_command(world, rollouts)
    assert "temperature=0.7" in capsys.readouterr().out


def test_a_pack_has_one_temperature(world: World, rollouts: Path) -> None:
    """Each file with its samples is named, as is the settings' own value."""
    other = world.folder / "other" / "iterations" / "0001" / "rollouts.jsonl"
    shutil.copytree(world.run, other.parents[2])
    recorded_temperature(other, 0.7)
    copy = world.folder / "more.jsonl"
    shutil.copy(rollouts, copy)
    out = world.folder / "packed.safetensors"
    made = pack_files([rollouts, copy], world.config(), out)
    assumed = f"at which temperature 16 samples in {copy} were sampled; 1 is assumed"
    assert assumed in "\n".join(made.lines())
    stated = pack_files([copy], world.config(temperature=0.5), out)
    assert stated.temperature == 0.5 and not stated.assumed
    several = f"1 for 16 samples in {rollouts}; 0.7 for 16 samples in {other}"
    with pytest.raises(UserError, match=several):
        pack_files([rollouts, other], world.config(), out)
    with pytest.raises(UserError, match=f"0.7 for 16 samples in {other}; 1 for --set or --config"):
        pack_files([other], world.config(temperature=1.0), out)


def test_a_base_model_s_prompts_are_not_compared(world: World, rollouts: Path) -> None:
    """Nor has its pack a digest where the model has no tokenizer.json."""
    base = world.folder / "base"
    shutil.copytree(world.model, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    config = world.config(model=str(base), **SETTINGS)
    made = pack_files([rollouts], config, world.folder / "packed.safetensors")
    assert made.prompts.compared == 0
    said = "\n".join(made.lines())
    assert "template  not compared: no chat template, or no prompts with token ids" in said
    assert "no digest" in "\n".join(dataclasses.replace(made, digest=None).lines())
    counts = {**(made.facts.tokenization or {}), "mismatches": 2, "turns": 1200}
    facts = made.facts.replace(tokenization=counts)
    assert (
        "warning   the ids of 2 of 1,200 replies decode to another text than the server's"
        in "\n".join(dataclasses.replace(made, facts=facts).lines())
    )


def test_a_template_that_refuses_a_prompt_is_told_with_its_task(
    world: World, rollouts: Path
) -> None:
    """The server's template has taken it."""
    template = world.folder / "template.jinja"
    template.write_text(
        "{% for message in messages %}{{ raise_exception('never') }}{{ message.content }}"
        "{% endfor %}"
    )
    config = world.config(chat_template=str(template), **SETTINGS)
    made = pack_files([rollouts], config, world.folder / "packed.safetensors")
    assert (made.prompts.compared, made.prompts.differing) == (4, 4)
    assert made.prompts.first == read_rollouts(rollouts)[0].task_id


def test_a_hundred_prompts_are_compared_of_those_with_ids(world: World, rollouts: Path) -> None:
    rows = read_jsonl(rollouts)
    first = rows[0]["task_id"]
    without = [row | {"opening": "y"} if row["task_id"] == first else row for row in rows]
    many = world.folder / "many.jsonl"
    copies = [row | {"task_id": f"{row['task_id']}/{n}"} for n in range(40) for row in rows]
    many.write_text("".join(json.dumps(row) + "\n" for row in [*without, *copies]))
    made = pack_files([many], world.config(**SETTINGS), world.folder / "packed.safetensors")
    assert (made.prompts.compared, made.prompts.differing) == (100, 0)


def test_experts_that_no_server_returned_cannot_be_replayed(world: World, rollouts: Path) -> None:
    config = world.config(training={"router_replay": True}, **SETTINGS)
    with pytest.raises(ServerError, match=r"no experts for any of 12 samples; start vLLM with"):
        pack_files([rollouts], config, world.folder / "packed.safetensors")
