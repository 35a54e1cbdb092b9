"""One rank of a trainer that hands weights over: `python handing_over.py TENSOR_PARALLEL`. Not a test.

Of every model folder that it reads a line with, it loads what belongs to this rank and holds it out in memory; the first rank
prints what servers are told. `HandingOver` starts all ranks and asks them.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ttrl.configs import TrainingConfig
from ttrl.training.checkpoints import hand_over
from ttrl.training.parallel.distributed import ranks
from ttrl.training.parallel.weight_memory import WeightMemory
from ttrl.training.policy.loading import load_policy


class HandingOver:
    """A trainer of several processes over gloo; a context manager."""

    def __init__(self, model: Path, processes: int, tensor_parallel: int = 1) -> None:
        from support.network_hosts import held_port

        self._port = contextlib.ExitStack()
        port = self._port.enter_context(held_port())
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        command = [sys.executable, __file__, str(model), str(tensor_parallel)]
        self.ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]

    def hold_out(self, model: Path) -> dict[str, Any]:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(f"{model}\n")
            process.stdin.flush()
        assert self.ranks[0].stdout is not None
        said: dict[str, Any] = json.loads(self.ranks[0].stdout.readline())
        return said

    def __enter__(self) -> "HandingOver":
        return self

    def __exit__(self, *_: object) -> None:
        self._port.close()
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.ranks:
            process.wait(timeout=120)
            assert process.stdout is not None
            process.stdout.close()
        assert [process.returncode for process in self.ranks] == [0] * len(self.ranks)


def main() -> None:
    first, tensor_parallel = sys.argv[1:]
    settings: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "num_threads": 1, "tensor_parallel": int(tensor_parallel)}
    with ranks(TrainingConfig(model=first, output_dir="", **settings)) as here:
        memory = WeightMemory(here)
        for line in sys.stdin:
            config = TrainingConfig(model=line.strip(), output_dir="", **settings)
            said = hand_over(memory, load_policy(config, here), config.model, "fp32")
            if here.is_first:
                sys.stdout.write(json.dumps(said) + "\n")
                sys.stdout.flush()
        here.barrier()  # the memory is gone with the first of them


if __name__ == "__main__":
    main()
