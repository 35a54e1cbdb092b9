"""The ranks of a trainer that hands weights over: `python handing_over.py MODEL TENSOR_PARALLEL
INPUT...`. Not a test.

Of every model folder that it reads a line with, from an input of its own, a rank loads what belongs
to it and holds it out in memory; the first rank prints what servers are told. `HandingOver` starts
all ranks, forked from one process, as imports take longer than all they do, and asks them.
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
        pipes = [os.pipe() for _ in range(processes)]
        inputs = [read for read, _ in pipes]
        self._asks = [open(write, "w", buffering=1) for _, write in pipes]  # noqa: SIM115 - closed at the end
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(model), str(tensor_parallel), *map(str, inputs)],
            env=os.environ | meet,
            stdout=subprocess.PIPE,
            pass_fds=inputs,
            text=True,
        )
        for read in inputs:
            os.close(read)

    def hold_out(self, model: Path) -> dict[str, Any]:
        for ask in self._asks:
            ask.write(f"{model}\n")
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def __enter__(self) -> "HandingOver":
        return self

    def __exit__(self, *_: object) -> None:
        self._port.close()
        for ask in self._asks:
            ask.close()
        assert self.process.wait(timeout=120) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    first, tensor_parallel, *inputs = sys.argv[1:]
    rank = next((rank for rank in range(1, len(inputs)) if os.fork() == 0), 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    settings: dict[str, Any] = {
        "dtype": "fp32",
        "device": "cpu",
        "num_threads": 1,
        "tensor_parallel": int(tensor_parallel),
    }
    with (
        open(int(inputs[rank])) as given,
        ranks(TrainingConfig(model=first, output_dir="", **settings)) as here,
    ):
        memory = WeightMemory(here)
        for line in given:
            config = TrainingConfig(model=line.strip(), output_dir="", **settings)
            parts = hand_over(memory, load_policy(config, here), config.model, "fp32")
            if here.is_first:
                sys.stdout.write(json.dumps({"memory": memory.path, "parts": parts}) + "\n")
                sys.stdout.flush()
        here.barrier()  # the memory is gone with the first of them
    if rank == 0:
        sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in inputs[1:]))


if __name__ == "__main__":
    main()
