"""On how many machines the trainer runs. A part of a run's config."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ttrl.configs import Config

_SLURM_PORTS = range(20_000, 30_000)


@dataclass(kw_only=True)
class NodesConfig(Config):
    """A part of TrainConfig. As with `nproc_per_node`, the update is the same for any number, up to rounding."""

    nnodes: int = 1
    """Machines that train together, this one included; the others run `ttrl join RUN` on the same run folder, which lies on a
    file system that all share."""
    rdzv_endpoint: str | None = None
    """HOST:PORT, with more than one node: where they meet. The host is this machine's address in a network that all nodes share
    and nobody else: torch.distributed asks for no key and encrypts nothing. None: within a SLURM job, this node's name there and
    a port made from the job's number."""

    join_timeout: int = 600
    """Seconds that the trainer waits for all nodes when it starts; then the run ends, and the same command continues it."""

    @property
    def processes(self) -> int:
        """Trainer processes on all nodes."""
        return self.nproc_per_node * self.nnodes  # type: ignore[attr-defined]

    def endpoint(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """`rdzv_endpoint`, or what SLURM's variables say in its place; None where neither is known."""
        if self.rdzv_endpoint is not None:
            return self.rdzv_endpoint
        host, job = environment.get("SLURMD_NODENAME"), environment.get("SLURM_JOB_ID", "")
        if not host or not job.isdigit():
            return None
        return f"{host}:{_SLURM_PORTS[int(job) % len(_SLURM_PORTS)]}"

    def node_problems(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """What is wrong with these settings, a line each."""
        found = []
        if self.nnodes < 1:
            found.append(f"nnodes is {self.nnodes}; it must be at least 1")
        if self.join_timeout < 1:
            found.append(f"join_timeout is {self.join_timeout}; it must be at least 1")
        if self.nnodes <= 1:
            if self.rdzv_endpoint is not None:
                found.append(f"rdzv_endpoint is {self.rdzv_endpoint!r}, but nnodes is {self.nnodes}: nobody would be met there")
            return found
        endpoint = self.endpoint(environment)
        if endpoint is None:
            # torchrun without it quietly trains on each node alone
            found.append(
                f"nnodes is {self.nnodes}, but where they meet is not known; set rdzv_endpoint to this machine's address in your "
                'private network and a free port, such as "10.0.0.7:29400" (in a SLURM job it is found by itself)'
            )
        elif (match := re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):([0-9]{1,5})", endpoint)) is None:
            found.append(f"rdzv_endpoint is {endpoint!r}; it must be HOST:PORT, such as 10.0.0.7:29400")
        elif not 0 < int(match[2]) < 65536:
            found.append(f"rdzv_endpoint is {endpoint!r}; a port is a number from 1 to 65535")
        if getattr(self, "trainer", "resident") != "resident":
            found.append(f"nnodes is {self.nnodes}, which needs trainer: resident; the other nodes follow it")
        slurm_nodes = environment.get("SLURM_JOB_NUM_NODES", "")
        if slurm_nodes.isdigit() and int(slurm_nodes) < self.nnodes:
            found.append(f"nnodes is {self.nnodes}, but this SLURM job has {slurm_nodes}; ask for more with sbatch --nodes")
        return found
