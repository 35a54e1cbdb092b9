"""A trainer on several machines: what its torchrun is told on each, and how a machine joins a run that another one leads.

The machine that runs `train()` leads: it puts the trainer's first config and meeting point into a folder of the run, one for each
start of the trainer; all others run `ttrl join RUN`, find both there, and start the same torchrun. Nothing but the shared run
folder and torch.distributed's own connections is needed, and a trainer that is started again is joined again: the folder of the
start before is gone then, and whoever still works for it stops.
"""

import contextlib
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from ttrl.configs.run import TrainConfig
from ttrl.errors import RunFolderError, StorageError, TrainerError, TtrlError, UserError
from ttrl.launch.tune import TrainerProcess, tune_command
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.lock import OWNER_FILE
from ttrl.run_folder.metrics import has_reached
from ttrl.system.files import write_json

logger = logging.getLogger(__name__)

MEETING_FILE = "nodes.json"
"""In the folder of one start of the trainer, next to its start.yaml: what the other nodes' torchrun must be told."""
PROGRESS_FILE = "progress"
"""Next to it: how far the trainer's first rank is, on whatever machine that runs."""
ARRIVED = "arrived-"
"""Next to it, one such file from each node that starts its part: so that the leading one can say who is missing."""
_ENDED = "the leading node has ended this trainer"
_CONNECT_SECONDS = 3.0


def write_meeting(folder: Path, config: TrainConfig, nproc_per_node: int) -> None:
    """Say in `folder`, whose name is that of the meeting, how to join. To be written last: then all else is there."""
    meeting = {
        "nnodes": config.nnodes,
        "nproc_per_node": nproc_per_node,
        "endpoint": config.endpoint(),
        "join_timeout": config.join_timeout,
        "folder": str(folder.absolute()),
    }
    write_json(folder / MEETING_FILE, meeting)


def arrived(folder: Path) -> int:
    """Return how many nodes have started their part since `write_meeting`, the leading one not counted."""
    return sum(1 for _ in folder.glob(ARRIVED + "*"))


def torchrun_arguments(nnodes: int, endpoint: str, meeting: str, *, leads: bool, join_timeout: int) -> list[str]:
    """Return torchrun's arguments on this node.

    leads: whether the meeting point is on this node. meeting: a name for this start only, so that a process of an earlier one
    cannot be taken for one of this. join_timeout: seconds until torchrun ends where not all nodes have come.
    """
    arguments = ["--nnodes", str(nnodes), "--rdzv-backend", "ttrl", "--rdzv-endpoint", endpoint, "--rdzv-id", meeting]
    arguments += ["--rdzv-conf", f"is_host={str(leads).lower()},join_timeout={join_timeout}"]
    # Where the leading node listens (`ttrl.training.parallel.meeting`).
    return [*arguments, "--local-addr", local_address(endpoint)]


def network_environment(endpoint: str) -> dict[str, str]:
    """Return which network interface gloo and NCCL use: the one through which the meeting point is reached, unless the user has
    named one. By themselves they take that of the machine's name, which often is the loopback."""
    interface = interface_of(local_address(endpoint))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if interface is None else {name: interface for name in names if name not in os.environ}


def local_address(endpoint: str) -> str:
    """Return this machine's address on the way to HOST:PORT. Raises UserError where there is no way to it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(*_host_and_port(endpoint), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: asks for the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"the meeting point {endpoint} cannot be reached from this machine ({error}); name an address in a network that all "
            "nodes share"
        ) from error


def is_loopback(endpoint: str) -> bool:
    """Return whether HOST:PORT is an address that no other machine can reach: a machine's own name often is."""
    return ipaddress.ip_address(local_address(endpoint).split("%")[0]).is_loopback


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, port = endpoint.rsplit(":", 1)
    return host.strip("[]"), int(port)


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address; None where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == address for one in addresses):
            return name
    return None


def join(
    run: str | os.PathLike[str],
    *,
    patience: float = 600.0,
    say: Callable[[str], None] = logger.info,
    look_seconds: float = 0.2,
    grace_seconds: float = 15.0,
) -> int:
    """Train with the run in folder `run`, which another node leads, whenever its trainer is up; return how often it was.

    look_seconds: between looks for a trainer; ten times as many between those into what the run has done so far. grace_seconds:
    between the end of a meeting and that of what still works for it here: processes that are not stuck end by themselves.

    Ends when the run that it took part in is finished, or after `patience` seconds in which there was no trainer to join. A
    trainer that fails, or cannot be reached yet, is not an error here: the leading node says what it was, and may start it again.
    Raises RunFolderError where there is no folder, UserError for what this node cannot take part in.
    """
    folder = Path(run).absolute()
    if not folder.parent.is_dir():
        raise RunFolderError(
            f"{folder.parent} is not on this machine; the run folder must lie on a file system that all nodes share"
        )
    seen: set[str] = set()
    unreachable: set[str] = set()
    waiting_since = look_again = time.monotonic()
    there = f"waiting for the trainer of {folder}" if folder.exists() else f"{folder} does not exist yet; waiting for a run there"
    say(f"{there}, for {patience:g} s at most (--patience)")
    while True:
        if time.monotonic() >= look_again:
            look_again = time.monotonic() + 10 * look_seconds
            if seen and _is_finished(folder):
                say(f"{folder} is finished; joined {len(seen)} in all")
                return len(seen)
        found = _meeting(folder, seen)
        if found is not None and (why := _silence(str(found[1]["endpoint"]))) is not None:
            # Not there yet, gone for good, or cut off. torchrun would try for a minute, once.
            if found[0].name not in unreachable:
                say(f"the trainer at {found[1]['endpoint']} does not answer yet ({why}); trying on")
            unreachable.add(found[0].name)
            found = None
        if found is None:
            if time.monotonic() - waiting_since > patience:
                say(f"no trainer of {folder} to join for {patience:g} s; joined {len(seen)} in all")
                return len(seen)
            time.sleep(look_seconds)
            continue
        path, meeting = found
        seen.add(path.name)
        _take_part(folder, path, meeting, say, look_seconds, grace_seconds)
        waiting_since = time.monotonic()


def _meeting(folder: Path, seen: set[str]) -> tuple[Path, dict[str, Any]] | None:
    """Return a start of the trainer that this node has not taken part in."""
    with contextlib.suppress(OSError, ValueError):  # being written or removed just now
        for path in sorted((folder / "trainer").iterdir()):
            if path.name not in seen and (path / MEETING_FILE).is_file():
                return path, json.loads((path / MEETING_FILE).read_text(encoding="utf-8"))
    return None


def _silence(endpoint: str) -> str | None:
    """Return why nobody can be reached at HOST:PORT just now; None where somebody listens."""
    try:
        socket.create_connection(_host_and_port(endpoint), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    return None


def _is_finished(folder: Path) -> bool:
    """Return whether nobody has the run, and nothing of it is left to do."""
    if (folder / OWNER_FILE).exists():
        return False
    run = RunFolder(folder)
    try:
        config, rows = TrainConfig.parse(run.config(), "config.yaml"), run.metrics()
    except (OSError, TtrlError):  # none yet, or being written just now
        return False
    return bool(rows) and (rows[-1]["iteration"] >= config.iterations or has_reached(rows[-1], config))


def _check_place(path: Path, meeting: dict[str, Any]) -> None:
    """Raise UserError where this node does not see what its processes will be told to read, or has too few GPUs for them."""
    there = Path(meeting["folder"])
    if not there.is_dir():
        raise UserError(
            f"the leading node has the run at {there.parents[1]}, which is not on this machine (here: {path.parents[1]}); all "
            "nodes must see it at the same path: mount it there, or make a symbolic link"
        )
    start = yaml.safe_load((path / "start.yaml").read_text(encoding="utf-8"))
    for name in ("model", "reference_model", "lora_base"):
        if (model := start.get(name)) and not Path(model, "config.json").is_file():
            raise UserError(
                f"{name} {model} cannot be read on this machine; the model must lie on the file system that all nodes share (one "
                "from the hub: start the run with HF_HOME there)"
            )
    if start.get("device") == "cuda":
        import torch

        if (gpus := torch.cuda.device_count()) < (wanted := int(meeting["nproc_per_node"])):
            raise UserError(f"nproc_per_node is {wanted}, but this machine has {gpus} GPUs; every node needs as many")


def _take_part(
    folder: Path, path: Path, meeting: dict[str, Any], say: Callable[[str], None], look_seconds: float, grace_seconds: float
) -> None:
    endpoint = str(meeting["endpoint"])
    try:
        _check_place(path, meeting)
        (path / f"{ARRIVED}{socket.gethostname()}-{os.getpid()}").touch()
    except (FileNotFoundError, UserError):
        if not (path / MEETING_FILE).exists():
            return  # it has ended just now
        raise
    nnodes, join_timeout = int(meeting["nnodes"]), int(meeting["join_timeout"])
    command = tune_command(
        path / "start.yaml",
        nproc_per_node=int(meeting["nproc_per_node"]),
        torchrun_args=torchrun_arguments(nnodes, endpoint, path.name, leads=False, join_timeout=join_timeout),
    )
    log = folder / "logs" / f"trainer.{socket.gethostname()}.{os.getpid()}.log"
    say(f"joining the trainer at {endpoint}; log: {log}")
    # torchrun may make any machine's process the first rank, which says how far it is: to the bar of the leading one.
    with TrainerProcess(command, log, path / PROGRESS_FILE, network_environment(endpoint)) as process:
        try:
            ended = _wait(process, path, look_seconds, grace_seconds)
        except (TrainerError, StorageError) as error:
            if (path / MEETING_FILE).exists():
                say(f"this node's part of the trainer failed; waiting for the next one: {error}")
            else:  # torchrun calls it a failure when it is left by the leading one
                say(_ENDED)
        else:
            say("the trainer ended" if ended else f"{_ENDED}; its part here is stopped")


def _wait(process: TrainerProcess, path: Path, look_seconds: float, grace_seconds: float) -> bool:
    """Wait until this node's part has ended; return False where it has not some time after the meeting was over: then it waits
    for processes that are gone or, having come too late, for others at a meeting that nobody else will come to."""
    gone_since = None
    while not process.ended():
        if (path / MEETING_FILE).exists():
            gone_since = None
        elif gone_since is None:
            gone_since = time.monotonic()
        elif time.monotonic() - gone_since > grace_seconds:
            return False
        time.sleep(look_seconds)
    return True
