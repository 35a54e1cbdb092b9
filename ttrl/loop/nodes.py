"""A trainer on several machines: what its torchrun is told on each, and how a machine joins a run that another one leads.

The machine that runs `train()` leads: it puts the trainer's first config and meeting point into a folder of the run, one for each
start of the trainer; all others run `ttrl join RUN`, find both there, and start the same torchrun. Nothing but the shared run
folder and torch.distributed's own connections is needed, and a trainer that is started again is joined again.
"""

import contextlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ttrl.errors import RunFolderError, StorageError, TrainerError, UserError
from ttrl.files import write_json
from ttrl.loop.config_nodes import NodesConfig
from ttrl.loop.tune import TrainerProcess, recipe_arguments, tune_command

logger = logging.getLogger(__name__)

MEETING_FILE = "nodes.json"
"""In the folder of one start of the trainer, beside its start.yaml: what the other nodes' torchrun must be told."""
_LOOK_SECONDS = 0.2


def write_meeting(folder: Path, config: NodesConfig, nproc_per_node: int) -> None:
    """Says in `folder`, whose name is that of the meeting, how to join. To be written last: then all else is there."""
    meeting = {"nnodes": config.nnodes, "nproc_per_node": nproc_per_node, "endpoint": config.endpoint()}
    write_json(folder / MEETING_FILE, meeting)


def torchrun_arguments(nnodes: int, endpoint: str, meeting: str, *, leads: bool) -> list[str]:
    """For torchrun on this node.

    leads: whether the meeting point is on this node. meeting: a name for this start alone, so that a process of an earlier one
    cannot be taken for one of this.
    """
    arguments = ["--nnodes", str(nnodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", meeting]
    # torchrun looks whether the endpoint's host is this one's name or an address of that name; it may be neither.
    arguments += ["--rdzv-conf", f"is_host={str(leads).lower()}"]
    # torchrun would tell the others this machine's name, which need not be known to them.
    return [*arguments, "--local-addr", local_address(endpoint)]


def network_environment(endpoint: str) -> dict[str, str]:
    """Which network interface gloo and NCCL use: the one through which the meeting point is reached, unless the user has named
    one. By themselves they take that of the machine's name, which often is the loopback."""
    interface = interface_of(local_address(endpoint))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if interface is None else {name: interface for name in names if name not in os.environ}


def local_address(endpoint: str) -> str:
    """This machine's address on the way to HOST:PORT. Raises UserError where there is no way to it."""
    host, port = endpoint.rsplit(":", 1)
    host = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: asks for the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"the meeting point {endpoint} cannot be reached from this machine ({error}); name an address in a "
                        "network that all nodes share") from error  # fmt: skip


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def join(run: str | os.PathLike[str], *, patience: float = 600.0, say: Callable[[str], None] = logger.info) -> int:
    """Trains with the run in folder `run`, which another node leads, whenever its trainer is up; returns how often it was.

    Ends after `patience` seconds in which there was no trainer to join. A trainer that fails is no error here: the leading node
    says what it was, and may start it again. Raises RunFolderError where there is no folder, UserError where the meeting point
    cannot be reached.
    """
    folder = Path(run).absolute()
    if not folder.parent.is_dir():
        raise RunFolderError(
            f"{folder.parent} is not on this machine; the run folder must lie on a file system that all nodes share"
        )
    seen: set[str] = set()
    waiting_since = time.monotonic()
    say(f"waiting for the trainer of {folder}")
    while True:
        found = _meeting(folder, seen)
        if found is None:
            if time.monotonic() - waiting_since > patience:
                say(f"no trainer of {folder} to join for {patience:g} s; joined {len(seen)} in all")
                return len(seen)
            time.sleep(_LOOK_SECONDS)
            continue
        path, meeting = found
        seen.add(path.name)
        _take_part(folder, path, meeting, say)
        waiting_since = time.monotonic()


def _meeting(folder: Path, seen: set[str]) -> tuple[Path, dict[str, Any]] | None:
    """A start of the trainer that this node has not taken part in."""
    with contextlib.suppress(OSError, ValueError):  # being written or removed just now
        for path in sorted((folder / "trainer").iterdir()):
            if path.name not in seen and (path / MEETING_FILE).is_file():
                return path, json.loads((path / MEETING_FILE).read_text(encoding="utf-8"))
    return None


def _take_part(folder: Path, path: Path, meeting: dict[str, Any], say: Callable[[str], None]) -> None:
    endpoint = str(meeting["endpoint"])
    arguments = recipe_arguments(
        path / "start.yaml",
        nproc_per_node=int(meeting["nproc_per_node"]),
        torchrun_args=torchrun_arguments(int(meeting["nnodes"]), endpoint, path.name, leads=False),
    )
    log = folder / "logs" / f"trainer.{socket.gethostname()}.{os.getpid()}.log"
    say(f"joining the trainer at {endpoint}; log: {log}")
    with tempfile.TemporaryDirectory(prefix="ttrl-") as temporary:
        process = TrainerProcess(tune_command(arguments), log, Path(temporary, "progress"), network_environment(endpoint))
        with process:
            try:
                process.show(process.ended, pbar=False, pbar_desc="")
            except (TrainerError, StorageError) as error:
                say(f"this node's part of the trainer failed; waiting for the next one: {error}")
            else:
                say("the trainer ended")
