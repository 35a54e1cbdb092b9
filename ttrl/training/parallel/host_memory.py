"""Hold tensors in the CPU's memory for a while: a trainer's parked tensors while servers use its
GPU, and its own weights during passes with another model's.

A process's tensors lie in one block of memory, page-locked if there is a GPU: the bus then copies
at full speed, and in parallel with other work. Locking pages takes long: the block stays, and is
reused. Locked pages cannot be swapped out: the machine's free memory is checked first. If it has
too little, all ranks get a StorageError, and the caller does without.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ttrl.errors import StorageError
from ttrl.training.parallel.distributed import Ranks

logger = logging.getLogger(__name__)

_ALIGNED = 64
_SPARE = 2 * 2**30
"""Bytes left free for the machine."""


class HostMemory:
    """One rank's block of memory. Its contents are valid until the next `hold`."""

    def __init__(self, here: Ranks) -> None:
        self._here = here
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unlock: Callable[[], object] = lambda: None

    @torch.no_grad()
    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of plain tensors. A collective. Raises StorageError, on all ranks, if a
        machine has too little memory left."""
        begins = []
        size = 0
        for tensor in tensors:
            begins.append(size)
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        self._make(size)
        copies = []
        for tensor, begin in zip(tensors, begins, strict=True):
            copy = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor, non_blocking=True))
        if self._here.device.type == "cuda":
            torch.cuda.synchronize()
        return copies

    def let_go(self) -> None:
        """Give the memory back, unless it is page-locked and will serve again."""
        if self._here.device.type != "cuda":
            self._memory = torch.empty(0, dtype=torch.uint8)

    def _make(self, size: int) -> None:
        """Have so many bytes."""
        wanted = size > len(self._memory)
        if wanted:
            self._unlock()
            self._memory = torch.empty(0, dtype=torch.uint8)
        self._here.barrier()  # others on this machine have let theirs go
        problem = ""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        missing = size * processes - (self._here.memory()[1] - _SPARE)
        if wanted and missing > 0:
            problem = (
                f"{size * processes / 2**30:.1f} GiB of the CPU's memory are needed for "
                f"{processes} "
            )
            problem += (
                f"process{'es' * (processes != 1)} on this machine, but {missing / 2**30:.1f} GiB "
                "of them are not free"
            )
        found = [one for one in self._here.texts_of_each(problem) if one]
        if found:
            raise StorageError(found[0])
        if wanted:
            self._memory = torch.empty(size, dtype=torch.uint8)
            if self._here.device.type == "cuda":
                self._lock_pages()

    def _lock_pages(self) -> None:
        """Lock the memory's pages during its lifetime. Not by PyTorch's allocator: it rounds up to
        powers of two.
        """
        address = self._memory.data_ptr()
        size = self._memory.nbytes
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error:
            logger.warning(
                "%.1f GiB of memory could not be page-locked (CUDA error %d); copies take longer",
                size / 2**30,
                error,
            )
            return
        self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)


def places(tensor: Tensor) -> Iterator[tuple[Any, str]]:
    """Yield the places of a tensor's plain parts, as (object, name of its attribute): its own data,
    or the parts of a sharded or quantised one. Other tensors can be put there, while the tensor
    itself, with its hooks, stays.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor, "data"
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # not a mesh of processes
            yield from places(part) if is_traceable_wrapper_subclass(part) else [(tensor, name)]
