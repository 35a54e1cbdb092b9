"""Store packed tensors as one safetensors file, with the sample table as JSON in its header.

The header holds a single key: safetensors keeps its metadata in an unordered map, and the order of
several keys would change from write to write. Equal packs would then differ in their bytes and
digests.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ttrl.data.packing.packed_format import OPTIONAL, TENSOR_DTYPES, PackedSample
from ttrl.errors import PackError
from ttrl.system.files import again, atomic_file, digest

TOKENIZER_KEY = "tokenizer"
"""Key in PackedTensors.metadata."""


def tokenizer_digest(folder: str | os.PathLike[str]) -> str | None:
    """Return the SHA-256 of the model folder's tokenizer.json (checkpoints copy it byte by byte);
    None without one.
    """
    path = Path(folder, "tokenizer.json")
    if path.is_file():
        return digest(path)
    return None


HEADER_KEY = "ttrl_packed"
SCHEMA = 1
HEADER_FIELDS = ("aggregation", "constant_length", "pad_id", "dropped", "metadata")


def save_packed(
    tensors: Mapping[str, Tensor],
    samples: Sequence[PackedSample],
    header: Mapping[str, Any],
    path: str | os.PathLike[str],
) -> None:
    """Write the file atomically; `header` holds HEADER_FIELDS. Raises StorageError when it cannot
    be written.
    """
    values = {"schema": SCHEMA, "samples": [vars(sample) for sample in samples], **header}
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, allow_nan=False)
    data = safetensors.torch.save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {HEADER_KEY: text}
    )
    with atomic_file(path, len(data)) as temporary:
        # By Python: safetensors' own writer hides a full disk behind an error of its own.
        temporary.write_bytes(data)


def load_packed(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Tensor], list[PackedSample], dict[str, Any]]:
    """Read the tensors, sample table and HEADER_FIELDS of a file, without checking them against
    each other.

    The tensors are the file itself, mapped into memory: pages are read on access, and changes to a
    tensor stay in this process.

    Raises PackError if it is missing, damaged or of another origin.
    """
    path = Path(path)
    if not path.is_file():
        raise PackError(
            f"{path} does not exist; the pack phase writes the packed tensors of an iteration"
        )
    try:
        with again(lambda: safetensors.safe_open(path, framework="pt")) as file:
            metadata = file.metadata() or {}
            # A safetensors file is not a mapping.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise PackError(
            f"{path} cannot be read as safetensors ({error}): it is damaged or incomplete, pack "
            "again"
        ) from error
    if HEADER_KEY not in metadata:
        raise PackError(
            f"{path} is a safetensors file, but not of packed tensors (no {HEADER_KEY!r} in its "
            "header)"
        )
    missing = TENSOR_DTYPES.keys() - tensors.keys() - OPTIONAL
    unknown = tensors.keys() - TENSOR_DTYPES.keys()
    if missing or unknown:
        raise PackError(
            f"{path}: missing tensors: {sorted(missing)}; unknown tensors: {sorted(unknown)}; "
            "pack again"
        )
    try:
        header = json.loads(metadata[HEADER_KEY])
        if header["schema"] != SCHEMA:
            raise PackError(
                f"{path} has format {header['schema']}, and this version reads format {SCHEMA}; "
                "pack again"
            )
        samples = [PackedSample(**row) for row in header["samples"]]
        return tensors, samples, {name: header[name] for name in HEADER_FIELDS}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise PackError(
            f"{path}: its header is damaged ({type(error).__name__}: {error}); pack again"
        ) from error


def read_tensor(path: str | os.PathLike[str], name: str) -> Tensor:
    """Read one tensor of a safetensors file, mapped into memory. Raises PackError if file or tensor
    are missing.
    """
    try:
        with again(lambda: safetensors.safe_open(path, framework="pt")) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (safetensors.SafetensorError, OSError) as error:
        raise PackError(f"{os.fspath(path)} has no readable tensor {name!r} ({error})") from error
