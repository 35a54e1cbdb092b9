"""Give torchrun its arguments on each of a trainer's machines (`ttrl.cluster.trainers`)."""

import os
import socket

import psutil

from ttrl.errors import UserError

PROGRESS_FILE = "progress"
"""File in the folder of one trainer start: the first rank's progress, on any machine."""


def torchrun_arguments(
    nnodes: int, endpoint: str, meeting: str, *, leads: bool, join_timeout: int
) -> list[str]:
    """Return torchrun's arguments on this node.

    leads: the meeting point is on this node. meeting: a name unique to this start, against
    processes of an earlier one. join_timeout: seconds until torchrun ends for lack of nodes.
    """
    return [
        "--nnodes",
        str(nnodes),
        "--rdzv-backend",
        "ttrl",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        meeting,
        "--rdzv-conf",
        f"is_host={str(leads).lower()},join_timeout={join_timeout}",
        # The leading node's listening address (`ttrl.training.parallel.meeting`).
        "--local-addr",
        local_address(endpoint),
    ]


def network_environment(endpoint: str) -> dict[str, str]:
    """Return the variables for gloo's and NCCL's network interface: the one on the route to the
    meeting point, unless the user has named one. By default they take the interface of the
    machine's name, often the loopback.
    """
    interface = interface_of(local_address(endpoint))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if interface is None:
        return {}
    return {name: interface for name in names if name not in os.environ}


def local_address(endpoint: str) -> str:
    """Return this machine's address on the route to HOST:PORT. Raises UserError without a route."""
    host, port = endpoint.rsplit(":", 1)
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # on a datagram socket: looks up the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"the meeting point {endpoint} cannot be reached from this machine ({error}); give an "
            "address in a network of all nodes"
        ) from error


def interface_of(address: str) -> str | None:
    """Return the network interface of an address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None
