"""Merge a checkpoint's adapter into its base: `python -m ttrl.training.merge CHECKPOINT`.

If servers take adapters, a run writes only these, a thousandth of the model. Other readers merge a
checkpoint at its first use (`ttrl.server.model_folder.merge_adapter`): a server of `ttrl eval`,
`ttrl chat` or `ttrl serve`, servers without adapter support, a training without adapters; and a run
at its end, for the newest and the best policy.

The base's files are memory-mapped: a process holds one shard at a time. On the CPU the result
equals the recipe's with `lora_merge`, bit for bit.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ttrl.configs import TrainingConfig
from ttrl.errors import TtrlError
from ttrl.records import ADAPTER_FOLDER
from ttrl.system.files import atomic_folder, fsync_folder, read_object
from ttrl.training.checkpoints import MAX_SHARD_BYTES, CheckpointDtype, write_merged
from ttrl.training.policy.adapters import AdapterSettings, base_folder, map_policy

INDEX = "model.safetensors.index.json"


def merge(folder: Path, base: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write merged weights into `folder`, in the dtype of its config.json. base: the adapter's
    base, if it has moved. Raises ModelFolderError, StorageError."""
    stored = AdapterSettings.read(folder / ADAPTER_FOLDER)
    settings = dataclasses.asdict(stored) | {"lora_base": base}
    config = TrainingConfig(model=str(folder), output_dir="", **settings)
    bf16 = read_object(folder / "config.json").get("dtype") == "bfloat16"
    base = base_folder(config)
    policy = map_policy(config, base)
    with atomic_folder(folder / "merged") as made:
        dtype: CheckpointDtype = "bf16" if bf16 else "fp32"
        write_merged(made, policy, Path(base), dtype, max_shard_bytes)
    # The index comes first: it names all files, and the folder counts as incomplete until the last
    # one is there.
    for path in sorted((folder / "merged").iterdir(), key=lambda path: path.name != INDEX):
        os.replace(path, folder / path.name)
    (folder / "merged").rmdir()
    fsync_folder(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Merge a checkpoint's adapter into its base, in place."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--base", help="the folder of the adapter's base, if it has moved")
    arguments = parser.parse_args(argv)
    try:
        merge(arguments.checkpoint, arguments.base)
    except (TtrlError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
