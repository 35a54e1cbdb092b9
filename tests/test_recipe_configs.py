"""The YAML files in recipe_configs/: every key, the hardware in the first line, the models that
they are for, and torchtune's own check."""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torchtune._cli.validate import Validate

from ttrl.configs import GRPOConfig
from ttrl.configs.run import TrainConfig
from ttrl.costs.memory import IMPORTS, Workload, training_memory
from ttrl.costs.parameters import adapter_parameters, decoder_parameters
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.families.table import OWN_DECODERS
from ttrl.records import TokenizedResult
from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model
from ttrl.training.models.architecture import read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.policy.lora import apply_lora, is_adapter

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "recipe_configs").glob("*.yaml"))
PLANNED = {"llama3_8b", "qwen2.5_72b", *(f"r1_distill_qwen_{size}b" for size in (7, 14, 32))}
"""Models of the report's experiments: recipes train them, with the settings of their presets."""
ARCHITECTURES = json.loads((ROOT / "ttrl" / "costs" / "architectures.json").read_text())
GPUS = re.compile(
    r"# (?P<count>\d+) x (?P<gigabytes>\d+) GB GPU(?: in (?P<machines>\d+) machines)?; rows of "
    r"up to (?P<row>\d+) pos"
)
CPU = re.compile(
    r"# 1 CPU core, (?P<gigabytes>\d+) GB of memory; rows of up to (?P<row>\d+) positions\."
)
named = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def settings_of(file):
    return yaml.safe_load(file.read_text())


def parsed(file):
    places = {"model": "model", "packed": "packed.safetensors", "output_dir": "out"}
    return GRPOConfig.parse({**settings_of(file), **places}, file.name)


def test_every_model_of_ttrls_own_decoder_has_one():
    """The others are there to be planned; none of their classes has run on a GPU."""
    own = {name for name, model in ARCHITECTURES.items() if model["model_type"] in OWN_DECODERS}
    assert {re.sub("_q?lora$", "", file.stem) for file in FILES} == own - PLANNED | {"tiny_cpu"}
    assert any("_lora" in file.stem for file in FILES) and any(
        "_qlora" in file.stem for file in FILES
    )


@named
def test_its_keys_are_known_and_its_command_names_it(file):
    config, text = parsed(file), file.read_text()
    assert f"--config recipe_configs/{file.name}" in text and text.startswith("# ")
    # Given on the command line.
    assert not {"model", "packed", "output_dir"} & settings_of(file).keys()
    assert (config.lora_rank is not None) == ("lora" in file.stem)
    assert (config.lora_base_dtype == "nf4") == ("qlora" in file.stem)


@named
def test_it_enters_a_run(file):
    """By its path; device, dtype and threads become those of the run."""
    config, settings = (
        TrainConfig(run="r", model="m", iterations=1, training=str(file)),
        settings_of(file),
    )
    assert (
        config.problems() == []
        and TrainConfig.parse(config.to_dict(), "again").to_dict() == config.to_dict()
    )
    assert (config.device, config.dtype) == (settings.pop("device"), settings.pop("dtype"))
    assert config.num_threads == settings.pop("num_threads", None)
    recipe, alone = config.recipe_config({}), parsed(file)
    assert config.training == settings and all(
        getattr(recipe, name) == getattr(alone, name) for name in settings
    )
    assert (
        TrainConfig(
            run="r", model="m", iterations=1, training=str(file), device="cpu", dtype="fp32"
        ).device
        == "cpu"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "an unreadable file: No such file"),
        ("lr: [", "not YAML"),
        ("just words", "a file without settings"),
    ],
)
def test_a_file_without_settings_is_named_with_everything_else(tmp_path, content, said):
    if content is not None:
        (tmp_path / "file.yaml").write_text(content)
    found = TrainConfig(
        run="r", model="m", iterations=0, training=str(tmp_path / "file.yaml")
    ).problems()
    assert len(found) == 2 and "iterations is 0" in found[0]
    assert found[1].startswith(f"training is '{tmp_path / 'file.yaml'}', {said}")


@named
def test_it_fits_into_the_memory_that_it_names(file, tmp_path):
    found = (CPU if file.stem == "tiny_cpu" else GPUS).match(file.read_text())
    assert found is not None, "the first line says the hardware"
    room, row = 1e9 * int(found["gigabytes"]), int(found["row"])
    if file.stem == "tiny_cpu":
        shape = json.loads(
            (make_tiny_model(tmp_path / "m", context=row) / "config.json").read_text()
        )
        assert IMPORTS + training_memory(shape, parsed(file), Workload(row)).peak < 0.9 * room
        return
    count, machines, architecture = (
        int(found["count"]),
        int(found["machines"] or 1),
        re.sub("_q?lora$", "", file.stem),
    )
    estimate = training_memory(
        ARCHITECTURES[architecture],
        parsed(file),
        Workload(row, rows=16),
        device="cuda",
        ranks=count,
    )
    assert estimate.peak < 0.9 * room, estimate.parts
    problems = parsed(file).problems_here("cuda", count, ARCHITECTURES[architecture])
    assert not problems
    started = re.findall(r"--(nnodes|nproc_per_node) (\d+)", file.read_text())
    assert dict(started) == ({"nnodes": str(machines)} if machines > 1 else {}) | (
        {"nproc_per_node": str(count // machines)} if count > 1 else {}
    )


@pytest.mark.long(but=["llama3.1_8b", "qwen2.5_0.5b"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_its_model_can_be_built(name, tmp_path):
    """Long for the other sizes: only these build what differs in numbers alone."""
    for file in (file for file in FILES if re.sub("_q?lora$", "", file.stem) == name):
        config, architecture = parsed(file), ARCHITECTURES[name]
        if config.lora_rank is not None:
            # Adapters are the same in all layers.
            architecture = architecture | {"num_hidden_layers": 3}
        (tmp_path / "config.json").write_text(json.dumps(architecture))
        with torch.device("meta"):
            decoder = build_decoder(read_config(tmp_path))
            if config.lora_rank is not None:
                apply_lora(decoder, config)
        sizes = {name: parameter.numel() for name, parameter in decoder.named_parameters()}
        adapters = sum(size for name, size in sizes.items() if is_adapter(name))
        counted = decoder_parameters(architecture)
        assert adapters == adapter_parameters(counted, parsed(file))
        assert sum(sizes.values()) - adapters == counted.total


def test_tune_validate_passes(capsys):
    command = Validate(argparse.ArgumentParser().add_subparsers())
    for file in FILES:
        command._validate_cmd(argparse.Namespace(config=file))
    assert capsys.readouterr().out.count("well-formed") == len(FILES)


@pytest.mark.e2e
def test_the_command_of_the_tiny_one_trains(tmp_path):
    """With overrides on the command line, as the first lines of the file say.

    Only this starts torchtune's own command in `make test`.
    """
    make_tiny_model(tmp_path / "model")
    ids = list(range(40))
    results = [
        TokenizedResult(
            task_id="t",
            sample=number,
            token_ids=ids,
            assistant_mask=[False] * 30 + [True] * 10,
            input_pos=list(range(40)),
            logprobs=[math.nan] * 30 + [-5.0] * 10,
            prompt_length=30,
            reward=0.0,
            advantage=advantage,
        )
        for number, advantage in enumerate((1.0, -0.5))
    ]
    packed_tensors_from_tokenized_results(results, seq_len=128, pad_id=0).save(
        tmp_path / "packed.safetensors"
    )
    tune = [str(Path(sys.executable).with_name("tune")), "run", "ttrl/grpo_recipe"]
    places = [
        f"model={tmp_path / 'model'}",
        f"packed={tmp_path / 'packed.safetensors'}",
        f"output_dir={tmp_path / 'out'}",
    ]
    command = [*tune, "--config", "recipe_configs/tiny_cpu.yaml", *places, "lr=3e-5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (line,) = read_jsonl(tmp_path / "out" / "train.jsonl")
    assert line["lr"] == 3e-5 and (tmp_path / "out" / "checkpoint" / "model.safetensors").exists()
