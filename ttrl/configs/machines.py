"""Which servers sample, how new weights reach them, and on how many machines the trainer runs: a part of a run's config."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ttrl.configs import Config
from ttrl.errors import ConfigError

SERVER_KEY_VARIABLE = "TTRL_SERVER_KEY"
"""The key of joined servers, where no file names it."""


@dataclass(kw_only=True)
class ServersConfig(Config):
    """A part of TrainConfig. No setting here changes what is trained, so all of them may change when a run is continued."""

    servers: int = 1
    """How many vLLM servers ttrl starts on this machine. Several divide its GPUs among them (as many for each as its
    `tensor_parallel_size` × `pipeline_parallel_size`), or its cores. 0: those that are joined alone."""
    joined_servers: list[str] = field(default_factory=list)
    """Servers that somebody else has started with `ttrl serve`, on other hosts: ["http://10.0.0.7:8000"]. Their key is never
    written here: see `joined_key_file`."""
    joined_key_file: str | None = None
    """A file with the key of the joined servers, or with lines "URL KEY"; None: the environment variable TTRL_SERVER_KEY."""
    joined_run: str | None = None
    """Where the joined servers' hosts find this run folder, on a file system that both share; None: at the same path."""
    adapters: Literal["auto", "merged"] = "auto"
    """With `training["lora_rank"]`: "auto", servers keep the starting model and are given each iteration's adapter, where vLLM
    can (not with DoRA, 4 bits, adapters on the head, or joined servers); "merged", they are given merged weights."""
    weight_check: Literal["all", "canary"] = "all"
    """What a server is held to after each sync: "all", each of its weights is compared with the checkpoint's files, and the
    canary; "canary", that alone (for very large models, whose files take long to read a second time)."""

    def server_problems(self) -> list[str]:
        """What is wrong with these settings, a line each."""
        found = []
        if self.servers < 0:
            found.append(f"servers is {self.servers}; it must be at least 0")
        if self.servers + len(self.joined_servers) < 1:
            found.append("servers is 0 and joined_servers is empty; nobody would sample")
        for url in self.joined_servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or not _has_good_port(url):
                found.append(f"joined_servers: {url!r} is no address such as 'http://10.0.0.7:8000'")
            elif parts.username or parts.password or parts.query or parts.fragment:
                found.append(f"joined_servers: the address of {parts.hostname} has more than host and port; keys go into a file")
        if len({_plain(url) for url in self.joined_servers}) < len(self.joined_servers):
            found.append("joined_servers names a server twice")
        if self.joined_servers and not found:
            try:
                self.joined_keys()
            except ConfigError as error:
                found += error.problems
        return found

    def joined_keys(self) -> dict[str, str]:
        """The key of each joined server. Raises ConfigError where one is not known."""
        keys, common = {}, os.environ.get(SERVER_KEY_VARIABLE, "").strip()  # as files and secrets end in a line end
        where = f"the environment variable {SERVER_KEY_VARIABLE}"
        if self.joined_key_file is not None:
            where = self.joined_key_file
            try:
                words = [line.split() for line in Path(self.joined_key_file).read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError("TrainConfig", [f"joined_key_file: {self.joined_key_file} cannot be read ({error})"]) from None
            common = next((line[0] for line in words if len(line) == 1), common)
            keys = {_plain(line[0]): line[1] for line in words if len(line) == 2}
        found = {url: keys.get(_plain(url), common) for url in self.joined_servers}
        if missing := [url for url, key in found.items() if not key]:
            raise ConfigError("TrainConfig", [f"joined_servers: there is no key for {', '.join(missing)} in {where}"])
        if wrong := [url for url, key in found.items() if not (key.isascii() and key.isprintable()) or " " in key]:
            # Said here: whatever refuses such a header would repeat the key.
            raise ConfigError("TrainConfig", [f"joined_servers: the key for {', '.join(wrong)} in {where} is no ASCII word"])
        return found


def _has_good_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _plain(url: str) -> str:
    return re.sub(r"/(v1/?)?$", "", url.strip())


def shares_of_devices(servers: int, each: int, devices: list[str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each server: `each` devices in their order. Raises ConfigError where there are too few."""
    if servers * each > len(devices):
        raise ConfigError(
            "TrainConfig",
            [
                f"servers is {servers}, with {each} GPUs each (tensor_parallel_size × pipeline_parallel_size), but there are "
                f"{len(devices)} GPUs; ask for fewer, or set CUDA_VISIBLE_DEVICES"
            ],
        )
    return [",".join(devices[number * each : (number + 1) * each]) for number in range(servers)]


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
