"""Hold weights out to servers on this machine, in memory that every process here can map: the trainer's half of their transfer
(`ttrl.server.transfer`).

The memory is laid out as a safetensors file of whole tensors. Each rank writes the parts that it holds to where they belong, and
a server's worker reads the parts that it needs, so a model that is sharded one way over the trainer and another way over the
server is gathered nowhere. What is written is hashed before it is copied.

It is a memfd, which the kernel frees with the last process that holds it, however that ends; others open it as /proc/PID/fd/N,
which takes the same user, and the same container. Sharded over gloo and written from the CPU: tested; from CUDA: never run.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ttrl.errors import StorageError
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import local_part

_HASHING_THREADS = 4
_ALIGNED = 64
_FILE_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Held(NamedTuple):
    """A tensor for the servers: its name, and what its rows are made of, one after the other; each may be sharded."""

    name: str
    blocks: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(block.shape[0] for block in self.blocks), *self.blocks[0].shape[1:]


class WeightMemory:
    """The memory of one trainer; one per rank. It stays from one iteration to the next."""

    def __init__(self, here: Ranks) -> None:
        self._here = here
        self._layout: bytes | None = None
        self._path = ""
        self._descriptor: int | None = None
        self._data: Tensor | None = None

    @torch.no_grad()
    def write(self, tensors: Sequence[Held], dtype: torch.dtype) -> dict[str, Any]:
        """Write the tensors in `dtype`, over those of the iteration before. A collective: each rank writes what it holds.

        Returns what servers are told (`ttrl.server.transfer.Handover`), on every rank. Raises StorageError where there is no
        memory for it.
        """
        begins = self._open(tensors, dtype)
        assert self._data is not None
        digests: list[tuple[str, list[int], list[int], Future[str]]] = []
        with ThreadPoolExecutor(_HASHING_THREADS) as hashing:
            for held, begin in zip(tensors, begins, strict=True):
                size = dtype.itemsize * torch.Size(held.shape).numel()
                whole = self._data[begin : begin + size].view(dtype).view(held.shape)
                row = 0
                for block in held.blocks:
                    found = _own_part(block, self._here)
                    if found is not None:
                        part, starts = found
                        source = part.to(dtype).contiguous().cpu()
                        starts[0] += row
                        if len(digests) >= 2 * _HASHING_THREADS:  # what was copied from a GPU takes room until it is hashed
                            digests[-2 * _HASHING_THREADS][3].result()
                        digest = hashing.submit(_digest, source)
                        digests.append((held.name, starts, list(source.shape), digest))
                        _narrowed(whole, starts, source.shape).copy_(source)
                    row += block.shape[0]
            own = [[name, starts, lengths, digest.result()] for name, starts, lengths, digest in digests]
        parts = self._from_each(own)  # everything is written when it returns
        return {"memory": self._path, "parts": [part for rank in parts for part in rank]}

    def close(self) -> None:
        """Let the memory go; servers that are reading it keep it as long as they do."""
        self._layout = self._data = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, tensors: Sequence[Held], dtype: torch.dtype) -> list[int]:
        """Make the memory, or keep it where its layout is the same; return where each tensor begins."""
        header: dict[str, Any] = {}
        begins, end = [], 0
        for held in tensors:
            begins.append(end)
            length = dtype.itemsize * torch.Size(held.shape).numel()
            described = {"dtype": _FILE_DTYPES[dtype], "shape": list(held.shape)}
            header[held.name] = described | {"data_offsets": [end, end + length]}
            end += length
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNED)
        layout = len(text).to_bytes(8, "little") + text
        if layout != self._layout:
            self.close()
            self._make(layout, len(layout) + end)
            self._layout = layout
        return [len(layout) + begin for begin in begins]

    def _make(self, layout: bytes, size: int) -> None:
        path, problem = "", ""
        if self._here.is_first:
            self._descriptor = os.memfd_create("ttrl-weights", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            try:
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as error:
                problem = f"no {size / 2**30:.1f} GiB of memory for them: {error.strerror}"
        [self._path] = self._from_each(path)[:1]
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = f"the first rank's memory cannot be opened by another: {error}"
        if problems := [one for one in self._from_each(problem) if one]:
            self.close()
            raise StorageError(f"weights cannot be held out in memory: {problems[0]}")
        assert self._descriptor is not None  # else there was a problem
        memory = mmap.mmap(self._descriptor, size)
        if self._here.is_first:
            memory[: len(layout)] = layout
        self._data = torch.frombuffer(memory, dtype=torch.uint8)

    def _from_each(self, mine: Any) -> list[Any]:
        """Return what each rank has, the first one's first."""
        if self._here.processes == 1:
            return [mine]
        found: list[Any] = [None] * self._here.processes
        distributed.all_gather_object(found, mine)
        return found


def _own_part(tensor: Tensor, here: Ranks) -> tuple[Tensor, list[int]] | None:
    """Return this process's part of a tensor and where it begins in the whole; None where it is empty, or another rank's to
    write: of what several hold alike, the first writes it."""
    if not isinstance(tensor, DTensor):
        return (tensor.detach(), [0] * tensor.dim()) if here.is_first else None
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    copies = [where for where, how in zip(coordinates, tensor.placements, strict=True) if how.is_replicate()]
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = local_part(tensor.detach())
    return None if any(copies) or not part.numel() else (part, list(offsets))


def _narrowed(whole: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
