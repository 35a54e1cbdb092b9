"""Where a trainer's processes meet: nobody else gets in, and what strangers send is not run. Real
torchruns.
"""

import base64
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.network_hosts import held_port
from support.pretended_tune import PretendedTune
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousParameters, RendezvousTimeoutError

from ttrl.launch.nodes import torchrun_arguments
from ttrl.launch.tune import meeting_here, tune
from ttrl.training.parallel.meeting import Meeting

# What `tune run` makes of its arguments, for any script.
TUNE = """
import sys
from torch.distributed.run import get_args_parser, run
options = sys.argv[2 : sys.argv.index({recipe!r})]
arguments = get_args_parser().parse_args([*options, {script!r}, sys.argv[-1]])
arguments.standalone = not arguments.rdzv_endpoint
run(arguments)
"""

# Each of the processes says where it and torchrun listen while they are at work.
SCRIPT = """
import json, os, pathlib, sys
import psutil, torch, yaml
from ttrl.configs import TrainingConfig
from ttrl.training.parallel.distributed import ranks

def listeners(pid):
    found = psutil.Process(pid).net_connections("tcp")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]

output = pathlib.Path(yaml.safe_load(open(sys.argv[-1]))["output_dir"])
config = TrainingConfig.parse({"model": "m", "output_dir": str(output), "device": "cpu", "num_threads": 1}, "test")
with ranks(config) as here:
    assert here.sum(torch.ones(1)).item() == 2
    found = {"torchrun": listeners(os.getppid()), "own": listeners(os.getpid())}
    (output / f"{here.rank}.json").write_text(json.dumps(found))
    here.barrier()
left = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in left), left
(output / "checkpoint").mkdir(exist_ok=True)
(output / "checkpoint" / "config.json").write_text("{}")
"""
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("user_names_one", [False, pytest.param(True, marks=pytest.mark.long)])
def test_on_one_machine_nobody_listens_for_strangers(user_names_one, tmp_path, monkeypatch):
    """gloo's connections between the processes are on the loopback; torchrun and the store do not
    listen at all. But who names a meeting point has it.

    Long: only this starts torchrun and looks at what its processes listen to. The arguments:
    tests/launch/test_tune.py; who writes into a store: below; processes that meet so:
    tests/e2e/test_resident.py.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    PretendedTune(monkeypatch, tmp_path).runs(
        TUNE.format(recipe="ttrl/grpo_recipe", script=str(script))
    )
    arguments = ["--standalone"] if user_names_one else []
    tune(
        {"output_dir": str(tmp_path)},
        tmp_path / "grpo.yaml",
        nproc_per_node=2,
        torchrun_args=arguments,
        pbar=False,
    )
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert bool(found[0]["torchrun"]) == user_names_one
    if not user_names_one:
        assert {address for one in found for address in one["own"]} <= LOOPBACK


class Touch:
    """A pickle that makes a file when it is read, in place of what somebody's may do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def port():
    with held_port() as port:
        yield port


def test_what_a_stranger_writes_into_the_store_is_not_run(tmp_path, port):
    """The leading machine waits for the others; somebody comes who is none of them."""
    options = torchrun_arguments(2, f"127.0.0.1:{port}", "a1b2", leads=True, join_timeout=60)
    log = tmp_path / "log"
    with open(log, "w") as file:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, "none.py"],
            stdout=file,
            stderr=file,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert torchrun.poll() is None and time.monotonic() < deadline, log.read_text()
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            time.sleep(0.1)
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path("/proc/net", name).read_text().splitlines()[1:]
        ]
        listening = {
            line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")
        }
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        bad = base64.b64encode(pickle.dumps(Touch(tmp_path / "ran"))).decode()
        for key in ("torch.rendezvous.a1b2", "a1b2/machines", "a1b2/complete"):
            store.set(key, bad)
        deadline = time.monotonic() + 5  # torchrun's own way looks every second
        while (
            torchrun.poll() is None
            and time.monotonic() < deadline
            and not (tmp_path / "ran").exists()
        ):
            time.sleep(0.1)
        assert not (tmp_path / "ran").exists()
        assert listening == {f"0100007F:{port:04X}"}  # all interfaces are 00000000
    finally:
        torchrun.send_signal(signal.SIGKILL)
        torchrun.wait()


def meeting(port, leads, nodes=3, timeout=30):
    more = {"is_host": str(leads).lower(), "join_timeout": str(timeout)}
    return Meeting(
        RendezvousParameters("ttrl", f"127.0.0.1:{port}", "a1b2", nodes, nodes, "127.0.0.1", **more)
    )


def test_each_machine_has_a_number_of_its_own(port):
    ranks, addresses = [], set()

    def join(leads):
        found = meetings[leads].next_rendezvous()
        ranks.append((leads, found.rank, found.world_size))
        addresses.add(
            (found.bootstrap_store_info.master_addr, found.bootstrap_store_info.master_port)
        )

    meetings = [meeting(port, leads) for leads in (False, True)]
    another = meeting(port, False)
    threads = [threading.Thread(target=join, args=(leads,)) for leads in (False, True)]
    threads.append(
        threading.Thread(
            target=lambda: ranks.append(
                (False, (one := another.next_rendezvous()).rank, one.world_size)
            )
        )
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(rank for _, rank, _ in ranks) == [0, 1, 2] and addresses == {("127.0.0.1", port)}
    assert [leads for leads, rank, _ in ranks if rank == 0] == [True] and {
        world for *_, world in ranks
    } == {3}
    with pytest.raises(RendezvousTimeoutError, match="all 3 machines have joined already"):
        meeting(port, False).next_rendezvous()


def test_a_machine_that_does_not_come_is_named_as_torchrun_does(port):
    """`ttrl.launch.trainer` looks for the error's name."""
    with pytest.raises(RendezvousTimeoutError, match="only 1 of 2 machines joined in time"):
        meeting(port, True, nodes=2, timeout=1).next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match=re.escape("127.0.0.1:")):
        meeting(port, False, nodes=2, timeout=1).next_rendezvous()


def test_the_private_folder_is_ours_alone(tmp_path, monkeypatch):
    """… and is gone when the trainer is."""
    tune_ = PretendedTune(monkeypatch, tmp_path)
    save = (
        "folder = pathlib.Path(config['output_dir'], 'checkpoint'); folder.mkdir(); (folder / "
        "'config.json').write_text('{}')"
    )
    tune_.runs(
        "import os, pathlib, sys, yaml\nconfig = yaml.safe_load(open(sys.argv[-1]))\n"
        "place = pathlib.Path(os.environ['TTRL_STORE_FILE']).parent\n"
        f"pathlib.Path(config['output_dir'], 'mode').write_text(f'{{place.stat().st_mode & "
        f"0o777:o}} {{place}}')\n{save}"
    )
    tune({"output_dir": str(tmp_path)}, tmp_path / "grpo.yaml", nproc_per_node=2, pbar=False)
    mode, place = (tmp_path / "mode").read_text().split()
    assert mode == "700" and not os.path.exists(place)
    assert f"--rdzv-endpoint {place}/torchrun" in " ".join(tune_.starts[0])


def test_gloo_and_nccl_are_told_to_stay_on_the_loopback(tmp_path, monkeypatch):
    """… unless the user names an interface. By themselves they take that of the machine's name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    _, variables = meeting_here(tmp_path, 2)
    assert variables["GLOO_SOCKET_IFNAME"] == "lo" and "NCCL_SOCKET_IFNAME" not in variables
