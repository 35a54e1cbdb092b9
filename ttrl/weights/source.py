"""Name the sources of new weights: a checkpoint's files, or memory held out by the trainer.

    trainer   every rank writes its part of the weights into one memory, and hashes it
              (`ttrl.training.parallel.weight_memory`)
    loop      tells servers the path of the memory, and keeps its digests (`Handover`)
    worker    maps the memory, and loads its share (`ttrl.vllm_worker.served_weights`)

Servers of this run on the trainer's machine, in the same container, take weights from memory.
Others are given files. A cluster of many servers brings the files to each machine's memory
(`ttrl.cluster.broadcast`).

Why not vLLM's own weight transfer? Its engines gather every tensor on one rank and prove nothing.
Its /weight_checker hashes the kernels' form of the weights, unknown to a trainer. Here the proof is
the same for both sources (`ttrl.weights.verify`): a worker compares its weights with the source,
element by element, and hashes the source; the loop compares these digests with the trainer's.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from ttrl.records import Canary, Handover

Digests: TypeAlias = Mapping[str, str]
"""By name of a tensor or of a part: SHA-256 of the bytes read by a worker."""


@dataclass(frozen=True)
class Files:
    """The weights in a folder, and the trainer's record of them."""

    folder: Path
    """The weights' place for the server: the checkpoint itself, or a copy near the server."""
    canary: Canary
    """The trainer's results with them."""
    is_written: ClassVar[bool] = True
    spans: ClassVar[None] = None
    """Parts of tensors with digests of their own; None: each tensor has one."""

    @classmethod
    def of(cls, checkpoint: str | os.PathLike[str]) -> "Files":
        """Return the files of a checkpoint. Raises ModelFolderError for an unreadable canary."""
        folder = Path(checkpoint).absolute()
        return cls(folder, Canary.load(folder))

    @property
    def place(self) -> dict[str, str]:
        """Return the place of the weights, as the methods of vLLM's workers take it."""
        return {"folder": str(self.folder)}

    @property
    def has_digests(self) -> bool:
        """Return whether the trainer recorded digests; a starting model has none."""
        return bool(self.canary.weights)

    def problems(self, read: Sequence[Digests]) -> list[str]:
        """Return the problems with the bytes read by each of the workers."""
        written = self.canary.weights
        if not written:
            return []
        found = []
        for worker in read:
            unknown = [name for name in worker if name not in written]
            different = [name for name, sha in worker.items() if written.get(name, sha) != sha]
            if different:
                found.append(
                    f"{len(different)} tensors in the files differ from the trainer's, such as "
                    f"{different[0]}; they were damaged or replaced"
                )
            if unknown:
                found.append(
                    f"{len(unknown)} tensors in the files are unknown to the trainer, such as "
                    f"{unknown[0]}"
                )
            if not worker:
                found.append("no tensor was read")
        return found


Source: TypeAlias = Files | Handover
