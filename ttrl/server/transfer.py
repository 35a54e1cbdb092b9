"""Weights from a trainer's memory into a running server, by vLLM's own weight transfer; no file in
between.

    trainer   every rank writes what it holds into one memory, and hashes it
              (ttrl.training.parallel.weight_memory)
    loop      tells the server where that is, by vLLM's endpoints (here)
    worker    maps it, and loads the parts that it computes with (ttrl.vllm_worker.memory)

For servers on the trainer's machine, in the same container and of the same user. Those of a cluster
take weights in the same way out of their own machine's memory, where there are many of them
(`ttrl.cluster.broadcast`); others are given files.

vLLM's own engines gather every tensor on one rank and prove nothing, and its /weight_checker hashes
what its kernels made of the weights, which no trainer can know. So the proof is the one after any
sync (`ttrl.server.weights`): each worker compares what it holds with the memory, element by
element, and together the workers hash what lies there, for the loop to compare with what the
trainer's ranks hashed before they wrote it. Then the canary.
"""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.errors import ServerError
from ttrl.records import CANARY_FILE
from ttrl.server.connection import ServerConnection

_LOOK_SECONDS = 0.1

BACKEND = "ttrl"
"""The engine's name in `--weight-transfer-config` (`ttrl.vllm_worker.memory`)."""


@dataclass(frozen=True)
class Handover:
    """Weights that a trainer holds out, for as long as it lives and until it writes the next ones
    there.
    """

    memory: str
    """The path under which processes of this machine can map it."""
    parts: list[tuple[str, list[int], list[int], str]]
    """Name of a tensor, where a part of it begins, how long that is in each dimension, and its
    SHA-256; together they are all of the weights."""
    canary: dict[str, Any]
    """What is computed with them, as canary.json will say it."""
    is_written: bool = True
    """Whether the trainer writes them as files, too."""

    def wait_for_files(self, checkpoint: Path) -> None:
        """Wait until the trainer has written the weights as files. Raises ServerError where it does
        not, or ended before that.
        """
        if not self.is_written:
            raise ServerError(
                f"the weights of {checkpoint} are in the trainer's memory alone (save_every), "
                "and can't be read"
            )
        while not (checkpoint / CANARY_FILE).is_file():  # the folder appears as a whole
            if not os.path.exists(self.memory) and not (checkpoint / CANARY_FILE).is_file():
                raise ServerError(f"the trainer ended before it had written {checkpoint}")
            time.sleep(_LOOK_SECONDS)

    @property
    def places(self) -> list[tuple[str, list[int], list[int]]]:
        """Return the parts without their digests, which nobody is told who is to compute them."""
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

    def problems(self, read: dict[str, str]) -> list[str]:
        """Return what is wrong with the digests of what the workers read, by the name and number of
        the part.
        """
        wrong = [
            name
            for number, (name, *_, sha) in enumerate(self.parts)
            if read.get(f"{name} {number}") != sha
        ]
        if not wrong:
            return []
        names = list(dict.fromkeys(wrong))
        return [
            f"{len(names)} tensors in memory are not those that the trainer wrote, such as "
            f"{names[0]}"
        ]


def map_memory(server: ServerConnection, memory: str | Path, timeout: float) -> None:
    """Make the workers map the memory at a path. Raises ServerError where one cannot, and nothing
    has changed then.
    """
    server.request(
        "POST",
        "/init_weight_transfer_engine",
        {"init_info": {"memory": str(memory)}},
        timeout=timeout,
    )


def load_from_memory(server: ServerConnection, timeout: float) -> None:
    """Load what was mapped in place; does not empty the prefix cache. Raises ServerError if vLLM
    refuses.
    """
    try:
        server.request("POST", "/start_weight_update", timeout=timeout)
        server.request("POST", "/update_weights", {"update_info": {}}, timeout=timeout)
        server.request("POST", "/finish_weight_update", timeout=timeout)
    except ServerError:
        with suppress(ServerError):  # vLLM refuses it in the middle of an update
            server.request("POST", "/shutdown_weight_transfer_engine", timeout=timeout)
        raise
    # Lets the mapping go.
    server.request("POST", "/shutdown_weight_transfer_engine", timeout=timeout)
    server.request("POST", "/collective_rpc", {"method": "ttrl_share_prompts"}, timeout=timeout)
