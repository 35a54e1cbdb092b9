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

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ttrl.errors import ServerError
from ttrl.records import CANARY_FILE
from ttrl.weights.canary import Canary

_LOOK_SECONDS = 0.1

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
    def place(self) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Handover:
    """Weights held out by a trainer in memory, as long as it lives and until it writes the next
    ones there.
    """

    memory: str
    """The path for mapping it in processes of this machine."""
    parts: list[tuple[str, list[int], list[int], str]]
    """Parts of all of the weights: name of the tensor, begin and length in each dimension,
    SHA-256."""
    canary: Canary
    """The trainer's results with them, as in canary.json."""
    is_written: bool = True
    """Whether the trainer writes them as files, too."""
    has_digests: ClassVar[bool] = True

    def wait_for_files(self, checkpoint: Path) -> None:
        """Wait until the trainer has written the weights as files. Raises ServerError if it does
        not write them, or ended before.
        """
        if not self.is_written:
            raise ServerError(
                f"the weights of {checkpoint} are only in the trainer's memory (save_every), and "
                "cannot be read"
            )
        while not (checkpoint / CANARY_FILE).is_file():  # the folder appears as a whole
            if not os.path.exists(self.memory) and not (checkpoint / CANARY_FILE).is_file():
                raise ServerError(f"the trainer ended before it wrote {checkpoint}")
            time.sleep(_LOOK_SECONDS)

    @property
    def place(self) -> dict[str, Any]:
        """Return the place of the weights, as the methods of vLLM's workers take it."""
        return {"memory": self.memory}

    @property
    def spans(self) -> list[tuple[str, list[int], list[int]]]:
        """Return the parts without their digests; a worker has to compute those."""
        return [(name, starts, lengths) for name, starts, lengths, _ in self.parts]

    @property
    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor, of all its parts: the same for the same numbers, divided
        in the same way.
        """
        parts: dict[str, list[str]] = {}
        for name, starts, lengths, sha in self.parts:
            parts.setdefault(name, []).append(f"{starts} {lengths} {sha}")
        return {
            name: hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()
            for name, found in parts.items()
        }

    def problems(self, read: Sequence[Digests]) -> list[str]:
        """Return the problems with the bytes read by the workers; together they read all."""
        known = {label: sha for worker in read for label, sha in worker.items()}
        wrong = [
            name
            for number, (name, *_, sha) in enumerate(self.parts)
            if known.get(f"{name} {number}") != sha
        ]
        if not wrong:
            return []
        return [
            f"{len(dict.fromkeys(wrong))} tensors in memory differ from the trainer's, such as "
            f"{wrong[0]}"
        ]


Source: TypeAlias = Files | Handover
