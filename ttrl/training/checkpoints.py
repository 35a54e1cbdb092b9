"""Checkpoints in Hugging Face layout, which transformers and vLLM load as they are.

Everything but the weights is copied from the folder that training started from (config, tokenizer, chat template); weights are
fp32 safetensors in shards, and canary.json says what they must compute (`ttrl.training.canary`).
"""

import json
import shutil
from pathlib import Path

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from ttrl.files import atomic_folder, write_json
from ttrl.training.canary import CANARY_FILE, compute_canary
from ttrl.training.distributed import Ranks
from ttrl.training.models import to_hugging_face_names
from ttrl.training.policy import Policy

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".index.json")
MAX_SHARD_SIZE = "5GB"


def copy_model_files(source: Path, target: Path) -> None:
    """Copies the files of a model folder that are no weights: configs, tokenizer, chat template, licence."""
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and not path.name.endswith(_WEIGHT_SUFFIXES)
            and path.name != CANARY_FILE
            and not path.name.startswith(".")
        ):
            shutil.copyfile(path, target / path.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name
    config["dtype"] = "float32"
    write_json(target / "config.json", config)


def save_checkpoint(folder: str | Path, policy: Policy, start_folder: str | Path, ranks: Ranks) -> None:
    """Writes the policy as a model folder, atomically. A collective: all ranks must call it; rank 0 writes."""
    canary = compute_canary(policy, ranks.device)
    tied = "output.weight" not in policy.parameters_by_name()
    weights = to_hugging_face_names(policy.full_weights(), tied)
    if ranks.is_first:
        with atomic_folder(folder) as temporary:
            copy_model_files(Path(start_folder), temporary)
            split = split_torch_state_dict_into_shards(weights, max_shard_size=MAX_SHARD_SIZE)
            for file, names in split.filename_to_tensors.items():
                save_file({name: weights[name].contiguous() for name in names}, temporary / file, metadata={"format": "pt"})
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                write_json(temporary / "model.safetensors.index.json", index)
            write_json(temporary / CANARY_FILE, canary)
    ranks.barrier()
