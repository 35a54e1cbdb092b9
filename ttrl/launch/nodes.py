"""A trainer on several machines (`ttrl.cluster.trainers`): what its torchrun is told on each."""

import os
import socket

import psutil

from ttrl.errors import UserError

PROGRESS_FILE = "progress"
"""In the folder of one start of the trainer: how far its first rank is, on whatever machine that
runs.
"""


def torchrun_arguments(
    nnodes: int, endpoint: str, meeting: str, *, leads: bool, join_timeout: int
) -> list[str]:
    """Return torchrun's arguments on this node.

    leads: whether the meeting point is on this node. meeting: a name for this start only, so that a
    process of an earlier one cannot be taken for one of this. join_timeout: seconds until torchrun
    ends where not all nodes have come.
    """
    arguments = [
        "--nnodes",
        str(nnodes),
        "--rdzv-backend",
        "ttrl",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        meeting,
    ]
    arguments += ["--rdzv-conf", f"is_host={str(leads).lower()},join_timeout={join_timeout}"]
    # Where the leading node listens (`ttrl.training.parallel.meeting`).
    return [*arguments, "--local-addr", local_address(endpoint)]


def network_environment(endpoint: str) -> dict[str, str]:
    """Return which network interface gloo and NCCL use: the one through which the meeting point is
    reached, unless the user has named one. By themselves they take that of the machine's name,
    which often is the loopback.
    """
    interface = interface_of(local_address(endpoint))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if interface is None:
        return {}
    return {name: interface for name in names if name not in os.environ}


def local_address(endpoint: str) -> str:
    """Return this machine's address on the way to HOST:PORT. Raises UserError where there is no way
    to it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            *_host_and_port(endpoint), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: asks for the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"the meeting point {endpoint} cannot be reached from this machine ({error}); name "
            "an address in a network that all "
            "nodes share"
        ) from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, port = endpoint.rsplit(":", 1)
    return host.strip("[]"), int(port)


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address; None where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None
