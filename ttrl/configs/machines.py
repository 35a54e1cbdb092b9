"""Addresses and keys: of servers that others have started, of the meeting point of several machines, and of a machine's GPUs."""

import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from ttrl.errors import ConfigError
from ttrl.system.files import read_private

SERVER_KEY_VARIABLE = "TTRL_SERVER_KEY"
"""Holds the key of joined servers that no file names."""
_SLURM_PORTS = range(20_000, 30_000)


def server_address_problems(urls: Sequence[str]) -> list[str]:
    """Return what is wrong with the addresses of joined servers, one line each."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(url):
            found.append(f"joined_servers: {url!r} is not an address such as 'http://10.0.0.7:8000'")
        elif parts.username or parts.password or parts.query or parts.fragment:
            found.append(f"joined_servers: the address of {parts.hostname} has more than host and port; keys go into a file")
    if len({_without_path(url) for url in urls}) < len(urls):
        found.append("joined_servers names a server twice")
    return found


def joined_problems(urls: Sequence[str], key_file: str | None) -> list[str]:
    """Return what is wrong with joined servers, addresses and keys, one line each."""
    found = server_address_problems(urls)
    if urls and not found:
        try:
            server_keys(urls, key_file)
        except ConfigError as error:
            found += error.problems
    return found


def server_keys(urls: Sequence[str], key_file: str | None) -> dict[str, str]:
    """Return the key of each joined server, from `key_file` or the environment. Raises ConfigError where one is not known."""
    keys, common = {}, os.environ.get(SERVER_KEY_VARIABLE, "").strip()  # files and secrets often end with a newline
    where = f"the environment variable {SERVER_KEY_VARIABLE}"
    if key_file is not None:
        where = key_file
        try:
            words = [line.split() for line in read_private(key_file).splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("TrainConfig", [f"joined_key_file: {key_file} cannot be used ({error})"]) from None
        common = next((line[0] for line in words if len(line) == 1), common)
        keys = {_without_path(line[0]): line[1] for line in words if len(line) == 2}
    found = {url: keys.get(_without_path(url), common) for url in urls}
    if missing := [url for url, key in found.items() if not key]:
        raise ConfigError("TrainConfig", [f"joined_servers: there is no key for {', '.join(missing)} in {where}"])
    if wrong := [url for url, key in found.items() if not (key.isascii() and key.isprintable()) or " " in key]:
        # Refused here, because the HTTP client's own error would repeat the key.
        raise ConfigError("TrainConfig", [f"joined_servers: the key for {', '.join(wrong)} in {where} is not one ASCII word"])
    return found


def _has_valid_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _without_path(url: str) -> str:
    return re.sub(r"/(v1/?)?$", "", url.strip())


def slurm_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return HOST:PORT of this node within a SLURM job, with a port derived from the job's number; None outside of one."""
    host, job = environment.get("SLURMD_NODENAME"), environment.get("SLURM_JOB_ID", "")
    if not host or not job.isdigit():
        return None
    return f"{host}:{_SLURM_PORTS[int(job) % len(_SLURM_PORTS)]}"


def meeting_problems(nnodes: int, endpoint: str | None, environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with how several machines meet, one line each."""
    found = []
    if endpoint is None:
        # Without it, torchrun would quietly train on each node alone.
        found.append(
            f"nnodes is {nnodes}, but where they meet is not known; set rdzv_endpoint to this machine's address in your private "
            'network and a free port, such as "10.0.0.7:29400" (in a SLURM job it is found by itself)'
        )
    elif problem := endpoint_problem(endpoint):
        found.append(problem)
    slurm_nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    if slurm_nodes.isdigit() and int(slurm_nodes) < nnodes:
        found.append(f"nnodes is {nnodes}, but this SLURM job has {slurm_nodes}; ask for more with sbatch --nodes")
    return found


def endpoint_problem(endpoint: str) -> str | None:
    """Return what is wrong with a meeting point HOST:PORT, or None."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):([0-9]{1,5})", endpoint)
    if match is None:
        return f"rdzv_endpoint is {endpoint!r}; it must be HOST:PORT, such as 10.0.0.7:29400"
    if not 0 < int(match[2]) < 65536:
        return f"rdzv_endpoint is {endpoint!r}; a port is a number from 1 to 65535"
    return None


def divided_devices(devices: list[str], trainers: int) -> tuple[list[str], list[str]]:
    """Return which of a machine's GPUs train and which serve, where no GPU does both. Raises ConfigError where none is left."""
    if trainers >= len(devices):
        raise ConfigError(
            "TrainConfig",
            [
                f"placement is 'split' with nproc_per_node {trainers}, but there are {len(devices)} GPUs, and none is left to "
                "serve; ask for fewer processes, or set CUDA_VISIBLE_DEVICES"
            ],
        )
    return devices[:trainers], devices[trainers:]


def shares_of_devices(servers: int, each: int, devices: list[str]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each server: `each` devices, in their order. Raises ConfigError where there are too few."""
    if servers * each > len(devices):
        raise ConfigError(
            "TrainConfig",
            [
                f"servers is {servers}, with {each} GPUs each (tensor_parallel_size × pipeline_parallel_size), but there are "
                f"{len(devices)} GPUs; ask for fewer, or set CUDA_VISIBLE_DEVICES"
            ],
        )
    return [",".join(devices[number * each : (number + 1) * each]) for number in range(servers)]
