"""Offer weights to servers on this machine in shared memory: the trainer's half of their transfer
(`ttrl.weights.source`).

The memory is laid out as a safetensors file of whole tensors. Each rank writes its parts to their
places, and a server's worker reads the parts it needs: a model sharded differently over trainer and
server is gathered nowhere. A part is written in pieces small enough for the processor's cache,
through page-locked memory if it comes from a GPU; each piece is hashed there before it is written.

Shared and separate GPUs use the same path, instead of CUDA's memory handles: a parked trainer
leaves its GPU to the server, no GPU has to reach another, and the memory serves again after a
server's death. For 7B in bf16 it takes 15 GB of the host's memory; parked weights and moments take
91 GB. Over a bus of 25 GB/s, it takes 0.6 s there and 0.6 s back, less than hashing for the proof,
through the CPU's memory anyway: 2.4 s with 8 threads at 0.8 GB/s, and an eighth of all that if 8
GPUs train.

It is a memfd: the kernel frees it with the last process holding it, however it ends. Others open it
as /proc/PID/fd/N, as the same user in the same container. Tested sharded over gloo and written from
the CPU, and from one GPU.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ttrl.errors import StorageError
from ttrl.records import WeightPart
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import part_to_write

_MOST_THREADS = 8
_PIECE = 2**22
_ALIGNED = 64
_FILE_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Held(NamedTuple):
    """A tensor for the servers: its name, and its parts, laid end to end along `dim`; each may be
    sharded.
    """

    name: str
    blocks: tuple[Tensor, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.blocks[0].shape)
        sizes[self.dim] = sum(block.shape[self.dim] for block in self.blocks)
        return tuple(sizes)


class WeightMemory:
    """The memory of one trainer; one per rank. It stays from one iteration to the next."""

    def __init__(self, here: Ranks) -> None:
        self.here = here
        self._layout: bytes | None = None
        self.path = ""
        self._descriptor: int | None = None
        self._data: Tensor | None = None

    @torch.no_grad()
    def write(self, tensors: Sequence[Held], dtype: torch.dtype) -> list[WeightPart]:
        """Write the tensors in `dtype`, over those of the iteration before. A collective: each rank
        writes its parts.

        Returns the parts of all ranks, on every rank. Raises StorageError without enough memory.
        """
        begins = self._open(tensors, dtype)
        assert self._data is not None
        if self.here.device.type == "cuda":
            # The threads' streams know nothing of the steps before.
            torch.cuda.synchronize(self.here.device)
        places: list[tuple[int, list[int], list[int]]] = []
        digests: list[Future[bytes]] = []
        with ThreadPoolExecutor(min(_MOST_THREADS, torch.get_num_threads())) as copying:
            for number, (held, begin) in enumerate(zip(tensors, begins, strict=True)):
                size = dtype.itemsize * torch.Size(held.shape).numel()
                whole = self._data[begin : begin + size].view(dtype).view(held.shape)
                place = 0
                for block in held.blocks:
                    found = part_to_write(block, self.here)
                    if found is not None:
                        part, starts = found
                        starts[held.dim] += place
                        places.append((number, starts, list(part.shape)))
                        digests.append(
                            copying.submit(_copy, part, _narrowed(whole, starts, part.shape))
                        )
                    place += block.shape[held.dim]
        return self._parts_of_all(tensors, places, digests)

    def _parts_of_all(
        self,
        tensors: Sequence[Held],
        places: list[tuple[int, list[int], list[int]]],
        digests: list[Future[bytes]],
    ) -> list[WeightPart]:
        """Return all ranks' written parts, each with its tensor's name, offset, length, and
        SHA-256; all of it is there then."""
        most = max(len(held.shape) for held in tensors)
        own = torch.zeros(len(places), 1 + 2 * most + 4, dtype=torch.int64)
        for line, (number, starts, lengths), digest in zip(own, places, digests, strict=True):
            line[0] = number
            line[1 : 1 + len(starts)] = torch.tensor(starts)
            line[1 + most : 1 + most + len(lengths)] = torch.tensor(lengths)
            line[1 + 2 * most :] = torch.frombuffer(bytearray(digest.result()), dtype=torch.int64)
        parts = []
        for line in torch.cat(self.here.rows_of_each(own)):
            held = tensors[int(line[0])]
            starts, lengths = (
                line[first : first + len(held.shape)].tolist() for first in (1, 1 + most)
            )
            parts.append((held.name, starts, lengths, line[1 + 2 * most :].numpy().tobytes().hex()))
        return parts

    def close(self) -> None:
        """Release the memory; reading servers keep it until they finish."""
        self._layout = self._data = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, tensors: Sequence[Held], dtype: torch.dtype) -> list[int]:
        """Make the memory, or keep it if its layout is the same; return each tensor's offset."""
        header: dict[str, Mapping[str, object]] = {}
        begins = []
        end = 0
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
        path = ""
        problem = ""
        if self.here.is_first:
            self._descriptor = os.memfd_create("ttrl-weights", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            try:
                if size > self.here.memory()[1]:  # the kernel would end some process for it
                    raise OSError(0, "not enough memory is free")
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as error:
                problem = f"no {size / 2**30:.1f} GiB of memory for them: {error.strerror}"
        self.path = self.here.texts_of_each(path)[0]
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = f"another process cannot open the first rank's memory: {error}"
        problems = [one for one in self.here.texts_of_each(problem) if one]
        if problems:
            self.close()
            raise StorageError(f"weights cannot be shared in memory: {problems[0]}")
        assert self._descriptor is not None  # else there was a problem
        memory = mmap.mmap(self._descriptor, size)
        if self.here.is_first:
            memory[: len(layout)] = layout
        self._data = torch.frombuffer(memory, dtype=torch.uint8)


def _narrowed(whole: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def _copy(part: Tensor, target: Tensor, piece_bytes: int = _PIECE) -> bytes:
    """Copy a part to its place, some rows at a time; return the SHA-256 of its bytes."""
    digest = hashlib.sha256()
    on_gpu = part.device.type == "cuda"
    rows = max(1, piece_bytes // max(1, target[:1].nbytes))
    room = torch.empty(
        (min(rows, len(part)), *part.shape[1:]), dtype=target.dtype, pin_memory=on_gpu
    )
    stream = None
    if on_gpu:
        stream = torch.cuda.Stream(part.device)
    with torch.cuda.stream(stream):  # None: nothing changes
        for source, place in zip(part.split(rows), target.split(rows), strict=True):
            piece = room[: len(source)]
            piece.copy_(source, non_blocking=True)  # a GPU converts before it copies
            if stream is not None:
                stream.synchronize()
            digest.update(piece.view(-1).view(torch.uint8).numpy().data)
            place.copy_(piece)
    return digest.digest()
