"""Checkpoints: transformers reads what we write, and it is what was there, to the last bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save
from support.tiny_models import load_policy_in, native_layout
from transformers import AutoModelForCausalLM

from ttrl.errors import ModelFolderError
from ttrl.system.files import digest, model_files
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.models.architecture import read_config
from ttrl.training.models.weights import iter_weights, write_tensors
from ttrl.training.parallel.distributed import Ranks

HERE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


def everything(folder):
    """All tensors of a folder, from one file or several."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.long(but=["qwen2-1000000000", "phi3-20000", "gpt2-1000000000"])
@pytest.mark.parametrize(
    ("family", "max_shard_bytes"),
    [
        *(("qwen2", 10**9), ("qwen2-tied", 20_000), ("gemma3", 20_000), ("phi3", 20_000)),
        *(("phi", 10**9), ("gemma2", 10**9), ("gpt2", 10**9)),
    ],
)
def test_there_and_back(family, max_shard_bytes, model_folder, tmp_path):
    """transformers → ours → transformers.

    Long for the other families: each only has other names for the same matrices.
    """
    start = tmp_path / "start"
    shutil.copytree(model_folder(family), start)
    (start / "tokenizer.json").write_text("{}")
    (start / "pytorch_model.bin").write_bytes(b"not to be copied")
    save_checkpoint(
        tmp_path / "checkpoint",
        load_policy_in(start, torch.float32),
        start,
        HERE,
        max_shard_bytes=max_shard_bytes,
    )

    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert {
        "tokenizer.json",
        "config.json",
        "canary.json",
    } <= names and "pytorch_model.bin" not in names
    assert ("model.safetensors" in names) == (max_shard_bytes == 10**9)
    if max_shard_bytes != 10**9:
        index = json.loads((tmp_path / "checkpoint" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {
            name for name in names if name.endswith(".safetensors")
        }
        assert index["metadata"]["total_size"] == sum(
            t.nbytes for t in everything(tmp_path / "checkpoint").values()
        )
        assert len(set(index["weight_map"].values())) > 2

    said = json.loads((tmp_path / "checkpoint" / "canary.json").read_text())["files"]
    assert said == {
        path.name: digest(path) for path in (tmp_path / "checkpoint").glob("*.safetensors")
    }

    before = AutoModelForCausalLM.from_pretrained(start)
    after, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", output_loading_info=True
    )
    assert not any(report.values())
    assert after.dtype == torch.float32
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, after.get_parameter(name)), name
    assert ("lm_head.weight" in everything(tmp_path / "checkpoint")) == (
        family not in ("gemma2", "gpt2")
    )
    if family == "gpt2":
        assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == (
            start / "model.safetensors"
        ).read_bytes()

    again = dict(iter_weights(tmp_path / "checkpoint"))
    assert all(
        torch.equal(tensor, again[name]) for name, tensor in dict(iter_weights(start)).items()
    )


def test_a_tensor_file_is_what_safetensors_writes(tmp_path):
    """Byte for byte, names and shapes of all kinds included; and its digest is that of the file."""
    base = torch.randn(6, 5)
    one_type = {
        "b.weight": base,
        "a": base.T.contiguous(),
        "größe": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "é": base[2:4],
    }
    for metadata in (None, {"format": "pt"}):
        written = write_tensors(tmp_path / "file", one_type, metadata)
        # It refuses shared memory.
        theirs = save({name: tensor.clone() for name, tensor in one_type.items()}, metadata)
        assert (tmp_path / "file").read_bytes() == theirs and written == digest(tmp_path / "file")
    types = (
        torch.bfloat16,
        torch.uint8,
        torch.float64,
        torch.bool,
        torch.int64,
        torch.float16,
        torch.int8,
        torch.int32,
    )
    mixed = {f"{number}": torch.arange(1, 4).to(dtype) for number, dtype in enumerate(types)} | {
        "tied": base,
        "again": base.T,
    }
    write_tensors(tmp_path / "file", mixed)
    read = load_file(tmp_path / "file")
    assert read.keys() == mixed.keys()
    assert all(
        torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        for name, tensor in mixed.items()
    )


def test_bf16_checkpoints(model_folder, tmp_path):
    start = model_folder("phi3")
    save_checkpoint(
        tmp_path / "out", load_policy_in(start, torch.float32), start, HERE, checkpoint_dtype="bf16"
    )
    written = everything(tmp_path / "out")
    assert all(
        torch.equal(written[name], tensor.bfloat16()) for name, tensor in everything(start).items()
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "canary.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("native", [False, True])
def test_a_vision_tower_is_kept_as_it_was(native, with_vision_tower, tmp_path):
    start = native_layout(with_vision_tower, tmp_path / "start") if native else with_vision_tower
    policy = load_policy_in(start, torch.float32)
    with torch.no_grad():
        policy.parameters_by_name()["norm.scale"].fill_(0.25)
    save_checkpoint(tmp_path / "out", policy, start, HERE)
    before, after = everything(start), everything(tmp_path / "out")
    norm = "model.language_model.norm.weight" if native else "language_model.model.norm.weight"
    head = "lm_head.weight" if native else "language_model.lm_head.weight"
    assert after.keys() == before.keys() | {head}
    assert (after.pop(norm) == 0.25).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if name != head)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "gemma3" and config["dtype"] == "float32"
    assert read_config(tmp_path / "out").model_type == "gemma3_text"


@pytest.mark.parametrize(
    "link",
    [
        "notes.txt",
        "extra.gguf",
        "additional_chat_templates",
        "additional_chat_templates/tool.jinja",
    ],
)
def test_nothing_is_published_that_a_model_folder_only_links_to(
    link, model_folder, load_policy, tmp_path
):
    """Archives and git bring such links; what they lead to would be in the checkpoint, and on the
    hub.
    """
    secrets = tmp_path / "home" / ".ssh"
    secrets.mkdir(parents=True)
    (secrets / "id.jinja").write_text("sesame")
    (secrets / "config.json").write_text('{"auths": "sesame"}')  # as Docker's: no model's
    model = shutil.copytree(model_folder("qwen3"), tmp_path / "model")
    (model / link).parent.mkdir(exist_ok=True)
    (model / link).symlink_to(secrets if link.endswith("templates") else secrets / "id.jinja")
    with pytest.raises(ModelFolderError, match=f"{link} is a link to .*, not a file of a model"):
        save_checkpoint(tmp_path / "out", load_policy(model), model, HERE)
    assert not (tmp_path / "out").exists()


def test_links_within_models_are_followed(model_folder, tmp_path):
    """As the hub's cache and the first checkpoint of a run have them; weights may lie anywhere."""
    model, cache = model_folder("qwen3"), tmp_path / "models--me--tiny"
    snapshot, elsewhere = cache / "snapshots" / "0a1b", tmp_path / "disk"
    for folder in (snapshot, cache / "blobs", elsewhere):
        folder.mkdir(parents=True)
    for path in model.iterdir():
        place = elsewhere if path.suffix == ".safetensors" else cache / "blobs"
        shutil.copy(path, place / f"{path.name}-blob")
        (snapshot / path.name).symlink_to(place / f"{path.name}-blob")
    (snapshot / "README.md").symlink_to("config.json")
    first = tmp_path / "first"
    first.mkdir()
    for path in snapshot.iterdir():
        (first / path.name).symlink_to(path)
    for folder in (snapshot, first):
        assert {path.name for path in model_files(folder)} == {
            path.name for path in model_files(model)
        } | {"README.md"}
