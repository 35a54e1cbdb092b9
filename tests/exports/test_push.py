"""Pushing to a stand-in for the hub, through the real client."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from support.hub import TOKEN, Hub, Repository

from ttrl.cli import main
from ttrl.errors import ModelFolderError, RunFolderError, UserError
from ttrl.exports.base_model import base_of
from ttrl.exports.checkpoint import choose
from ttrl.exports.push import package, push

NAME = "me/figs"


@pytest.fixture
def hub():
    with Hub(takes_large=False) as started:
        yield started


def client(hub, token=TOKEN):
    return HfApi(endpoint=hub.url, token=token)


def test_the_best_checkpoint_is_chosen(trained_run):
    chosen = choose(trained_run)
    assert (chosen.iteration, chosen.why) == (3, "the best by held-out exact: 0.8")
    assert chosen.run.iterations == [0, 1, 2, 3]
    assert choose(trained_run, 2).iteration == 2
    assert choose(trained_run / "iterations" / "0004" / "checkpoint").iteration == 4


def test_a_removed_checkpoint_is_refused_with_those_there(trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "run")
    shutil.rmtree(run / "iterations" / "0002" / "checkpoint")
    with pytest.raises(RunFolderError, match=r"iteration 2; there are those of 1, 3-4"):
        choose(run, 2)
    with pytest.raises(RunFolderError, match="no checkpoint of iteration 0"):
        choose(run, 0)


def test_a_damaged_config_is_refused_by_name(trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "run")
    (run / "iterations" / "0003" / "checkpoint" / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"0003/checkpoint/config\.json is damaged"):
        package(choose(run), "me/model")


def test_a_run_that_never_got_better_is_refused(trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[0]["validation"] = {"exact": 0.9}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunFolderError, match="--iteration, such as 4"):
        choose(run)


def test_a_pushed_checkpoint_loads_in_transformers(trained_run, tmp_path):
    """The command pushes; another process loads the model by its name, as users would. A second
    push sends no large file again.
    """
    with Hub() as hub:
        pushed_and_loaded(trained_run, hub, tmp_path)


def pushed_and_loaded(trained_run, hub, tmp_path):
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "ttrl.cli", "push", str(trained_run), "--to", NAME]
    pushed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert pushed.stdout.strip() == f"{hub.url}/{NAME}"
    assert TOKEN not in pushed.stdout + pushed.stderr
    assert hub.uploads == 1
    subprocess.run([*command, "--replace"], env=environment, capture_output=True, check=True)
    assert hub.uploads == 1
    program = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
from safetensors.torch import save_file
model = AutoModelForCausalLM.from_pretrained("{NAME}")
tokenizer = AutoTokenizer.from_pretrained("{NAME}")
assert tokenizer.chat_template
save_file(dict(model.state_dict()), "{tmp_path}/loaded.safetensors")
"""
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    wanted = load_file(trained_run / "iterations" / "0003" / "checkpoint" / "model.safetensors")
    loaded = load_file(tmp_path / "loaded.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    repository = hub.repositories[NAME]
    assert repository.private
    assert repository.messages == ["Push a checkpoint: the best by held-out exact: 0.8"] * 2


def test_a_card_says_what_was_trained(trained_run):
    made = package(choose(trained_run), NAME, base_model="org/base")
    _, front, text = made.card.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["base_model"] == "org/base"
    assert about["library_name"] == "transformers"
    assert {"ttrl", "grpo"} <= set(about["tags"])
    assert "license" not in about
    assert "| exact | 0.200 (95%" in text
    assert "| 0.800 (95%" in text
    assert "after iteration 3 (the best by held-out exact: 0.8)" in text
    assert "`fruit`" in text
    assert "| `max_tokens` | `16` |" in text
    assert f'from_pretrained("{NAME}")' in text
    assert "How many figs?" in text
    assert "torch 2.13" in text
    assert "learning_curve.svg" in text
    assert b"<svg xmlns=" in made.files["learning_curve.svg"]
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["model"] == "org/base"
    assert settings["training"] == {"lr": 1e-4}


def test_a_card_has_the_costs_and_the_base_licence(trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["flops"] = {"total": 6e12, "cumulated": 6e12 * row["iteration"]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"model": "smollm2-135m"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    made = package(choose(run), NAME)
    _, front, text = made.card.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    assert "apache-2.0, as HuggingFaceTB/SmolLM2-135M-Instruct." in text
    assert "| FLOPs | 18 T |" in text


def test_nothing_of_this_machine_is_pushed(trained_run):
    made = package(choose(trained_run), NAME, base_model="org/base")
    assert "notes.md" not in made.files
    for name, content in made.files.items():
        read = content if isinstance(content, bytes) else content.read_bytes()
        for private in (
            str(trained_run),
            str(Path.home()),
            "private_run",
            "secret",
            socket.gethostname(),
            "warm_start",
        ):
            assert private.encode() not in read, (name, private)
        if getpass.getuser() != "root":
            assert getpass.getuser().encode() not in read


def test_a_repository_with_other_files_is_refused(trained_run, hub):
    files = {".gitattributes": b"x", "model-00001.safetensors": b"old", "README.md": b"mine"}
    hub.repositories[NAME] = Repository(private=False, files=dict(files))
    made = package(choose(trained_run), NAME)
    with pytest.raises(UserError, match=r"holds 2 files, such as README\.md.*--replace"):
        push(made, api=client(hub))
    assert hub.repositories[NAME].files == files
    push(made, replace=True, api=client(hub))
    assert hub.repositories[NAME].files.keys() == made.files.keys() | {".gitattributes"}


def test_a_public_repository_is_asked_for(trained_run, hub):
    push(package(choose(trained_run), NAME), public=True, api=client(hub))
    assert not hub.repositories[NAME].private


def test_a_refused_token_is_told_without_it(trained_run, hub):
    made = package(choose(trained_run), NAME)
    with pytest.raises(UserError, match="could not be pushed") as caught:
        push(made, api=client(hub, "hf_ofSomebodyElse"))
    assert "hf_ofSomebodyElse" not in str(caught.value)
    assert not hub.repositories


@pytest.mark.parametrize("name", ["figs", "me/figs/more", "me/fi gs", "me/--figs"])
def test_a_bad_name_is_refused(trained_run, name):
    with pytest.raises(UserError, match="--to"):
        package(choose(trained_run), name)


def test_a_dry_run_asks_no_network(trained_run, capsys):
    """The network is out of reach here: a request would fail."""
    assert main(["push", str(trained_run), "--to", NAME, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("---\nlibrary_name: transformers")
    assert "model.safetensors" in shown.err
    assert "(nothing was sent)" in shown.err


@pytest.fixture
def adapter_run(trained_run, tmp_path):
    run = shutil.copytree(trained_run, tmp_path / "run")
    checkpoint = run / "iterations" / "0003" / "checkpoint"
    adapter = checkpoint / "adapter"
    adapter.mkdir()
    save_file(
        {"base_model.model.x.lora_A.weight": torch.ones(2)}, adapter / "adapter_model.safetensors"
    )
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(run / "warm")})
    )
    (adapter / "ttrl_adapter.json").write_text(json.dumps({"lora_base": str(run / "warm")}))
    return run


def test_an_adapter_is_pushed_in_pefts_layout(adapter_run):
    made = package(choose(adapter_run), NAME, base_model="org/base")
    config = json.loads(made.files["adapter_config.json"])
    assert config == {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "org/base"}
    assert "adapter_model.safetensors" in made.files
    assert "tokenizer.json" in made.files
    assert not {"model.safetensors", "config.json", "ttrl_adapter.json"} & made.files.keys()
    assert "library_name: peft" in made.card
    assert "AutoPeftModelForCausalLM" in made.card


def test_an_adapter_needs_the_name_of_its_base(adapter_run):
    with pytest.raises(UserError, match="--base-model, or push whole weights with --merged"):
        package(choose(adapter_run), NAME)
    made = package(choose(adapter_run), NAME, merged=True)
    assert "model.safetensors" in made.files
    assert not any(name.startswith("adapter") for name in made.files)


def test_a_base_is_named_by_what_is_known(tmp_path):
    assert base_of("smollm2-135m").hub == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_of("smollm2-135m").licence == "apache-2.0"
    assert base_of("org/name").hub == "org/name"
    folder = tmp_path / "somewhere" / "model"
    folder.mkdir(parents=True)
    assert (base_of(str(folder)).name, base_of(str(folder)).hub) == ("model", None)
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: org/first\n---\n# A model\n")
    assert (base_of(str(folder)).hub, base_of(str(folder)).licence) == ("org/first", "mit")
    (folder / "README.md").write_text("---\n: {[\n---\n")
    assert base_of(str(folder)).licence is None
