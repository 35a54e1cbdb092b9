"""Check addresses and keys of servers started by others, and divide a machine's GPUs."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from ttrl.errors import ConfigError

SERVER_KEY_VARIABLE = "TTRL_SERVER_KEY"
"""Holds the key of joined servers."""


def joined_problems(urls: Sequence[str]) -> list[str]:
    """Return the mistakes in joined servers, addresses and key, one line each."""
    found = []
    for url in urls:
        parts = _server_parts(url)
        if parts is None:
            found.append(
                f"joined_servers: {url!r} is not an address such as 'http://10.0.0.7:8000'"
            )
        elif parts.username or parts.password or parts.query or parts.fragment:
            found.append(
                f"joined_servers: the address of {parts.hostname} has more than host and port; put "
                "keys into TTRL_SERVER_KEY"
            )
    # Without their paths.
    if len({re.sub(r"/(v1/?)?$", "", url.strip()) for url in urls}) < len(urls):
        found.append("joined_servers names a server twice")
    if not found:
        try:
            server_keys(urls)
        except ConfigError as error:
            found += error.problems
    return found


def server_keys(urls: Sequence[str]) -> dict[str, str]:
    """Return the key of each joined server, from the environment. Raises ConfigError if it is
    unknown.
    """
    if not urls:
        return {}
    # Files and secrets often end with a newline.
    key = os.environ.get(SERVER_KEY_VARIABLE, "").strip()
    if not key:
        raise ConfigError(
            "TrainConfig",
            [
                f"joined_servers: no key for {', '.join(urls)}; export "
                f"{SERVER_KEY_VARIABLE}=$(cat FILE)"
            ],
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        # Refused here, because the HTTP client's own error would repeat the key.
        raise ConfigError(
            "TrainConfig",
            [f"joined_servers: the key in {SERVER_KEY_VARIABLE} is not a single ASCII word"],
        )
    return dict.fromkeys(urls, key)


def _server_parts(url: str) -> SplitResult | None:
    """Return the parts of a server's address; None if it is none."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of brackets and ports
        return None
    return parts if is_server else None


def gpus_of_a_server(arguments: Mapping[str, Any]) -> int:
    """Return a server's number of GPUs, by vLLM's arguments, with dashes or underscores."""
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    return math.prod(
        int(given.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline", "data")
    )


def divided_devices(devices: list[str], trainers: int) -> tuple[list[str], list[str]]:
    """Return a machine's GPUs for training and for serving, if no GPU does both. Raises ConfigError
    if none is left.
    """
    if trainers >= len(devices):
        raise ConfigError(
            "TrainConfig",
            [
                f"placement is 'split' with nproc_per_node {trainers}, but of {len(devices)} GPUs "
                "none is left to serve; use fewer processes, or set CUDA_VISIBLE_DEVICES"
            ],
        )
    return devices[:trainers], devices[trainers:]


def shares_of_devices(servers: int, each: int, devices: list[str]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each server: `each` devices, in their order. Raises
    ConfigError if there are too few.
    """
    if servers * each > len(devices):
        raise ConfigError(
            "TrainConfig",
            [
                f"servers is {servers}, with {each} GPUs each (the product of vLLM's parallel "
                f"sizes), but there are {len(devices)} GPUs; use fewer servers, or set "
                "CUDA_VISIBLE_DEVICES"
            ],
        )
    return [",".join(devices[number * each : (number + 1) * each]) for number in range(servers)]


def auto_dtype(cuda: bool) -> Literal["bf16", "fp32"]:
    """Return the meaning of dtype "auto" for all trainers and servers of a run: fp32 on CPU, with
    its coarse half precision, bf16 on CUDA."""
    if cuda:
        return "bf16"
    return "fp32"
