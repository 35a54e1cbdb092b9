"""The headers of safetensors files, and a check of tied embeddings, without PyTorch.

With `tie_word_embeddings` in config.json, a model computes its output with the embeddings. Its
files may hold the head again, as most of our checkpoints do. If that head differs, readers differ
too: vLLM ignores it, transformers unties the two.
"""

import json
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.errors import ModelFolderError

EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_HEAD = "lm_head.weight"
CHUNK_BYTES = 1 << 24
_MOST_HEADER = 100_000_000
"""Bytes, the limit of safetensors."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, by its header."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its bytes in the file."""
    stop: int

    @property
    def size(self) -> int:
        """Return its size in bytes."""
        return self.stop - self.start


def stored_tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file. Raises ModelFolderError for a damaged header, and
    OSError."""
    with open(file, "rb") as opened:
        start = opened.read(8)
        try:
            (length,) = struct.unpack("<Q", start)
            header: Any = json.loads(opened.read(min(length, _MOST_HEADER)))
            begin = len(start) + length
            return [
                StoredTensor(
                    file=file,
                    name=name,
                    dtype=entry["dtype"],
                    shape=tuple(entry["shape"]),
                    start=begin + entry["data_offsets"][0],
                    stop=begin + entry["data_offsets"][1],
                )
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unreadable(file, f"{type(error).__name__}: {error}") from error


def _unreadable(file: Path, why: str) -> ModelFolderError:
    return ModelFolderError(f"{file} cannot be read ({why}); copy or download it again")


def check_tied_head(files: Iterable[Path], chunk_bytes: int = CHUNK_BYTES) -> None:
    """Check that an output head in the files of a model with tied embeddings equals these.
    chunk_bytes: compared at once.

    Raises ModelFolderError with both names if they differ, or for a damaged file; OSError.
    """
    tensors = [tensor for file in files for tensor in stored_tensors(file)]
    heads = [tensor for tensor in tensors if tensor.name.endswith(_HEAD)]
    embeddings = [tensor for tensor in tensors if tensor.name.endswith(EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return
    (head,) = heads
    (embedding,) = embeddings
    for tensor in (head, embedding):
        size = tensor.file.stat().st_size
        if size < tensor.stop:
            raise _unreadable(tensor.file, f"it ends after {size:,} of {tensor.stop:,} bytes")
    difference = _difference(head, embedding, chunk_bytes)
    if difference is not None:
        raise ModelFolderError(
            f"{head.file.parent}: config.json ties the output head to the embeddings "
            f"(tie_word_embeddings), but {head.name} in {head.file.name} differs from "
            f"{embedding.name} in {embedding.file.name}: {difference}. To use this head, set "
            f'"tie_word_embeddings": false in config.json; otherwise, remove {head.name} from the '
            "file"
        )


def _difference(head: StoredTensor, embedding: StoredTensor, chunk_bytes: int) -> str | None:
    """Describe the first difference between two tensors; None if all values are equal."""
    if head.shape != embedding.shape:
        return f"its shape is {list(head.shape)}, not {list(embedding.shape)}"
    dtypes = {head.dtype, embedding.dtype}
    if len(dtypes) == 2 and dtypes != {"BF16", "F32"}:
        return f"it is {head.dtype}, not {embedding.dtype}"
    narrow, wide = sorted((head, embedding), key=lambda tensor: tensor.size)
    ratio = len(dtypes)  # F32 takes twice the bytes of BF16
    with open(wide.file, "rb") as one, open(narrow.file, "rb") as other:
        first = mmap.mmap(one.fileno(), 0, access=mmap.ACCESS_READ)
        second = mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_READ)
        with first, second:
            for begin in range(0, wide.size, chunk_bytes):
                end = min(begin + chunk_bytes, wide.size)
                ours = first[wide.start + begin : wide.start + end]
                theirs = second[narrow.start + begin // ratio : narrow.start + end // ratio]
                if ratio == 2:
                    theirs = _widened(theirs)
                if ours != theirs:
                    return "their values differ"
    return None


def _widened(bf16: bytes) -> bytes:
    """Return the same values as F32: a BF16 is the upper half of one (little-endian)."""
    wide = bytearray(2 * len(bf16))
    wide[2::4] = bf16[0::2]
    wide[3::4] = bf16[1::2]
    return bytes(wide)
