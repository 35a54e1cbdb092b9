"""Raylets on this machine, as machines of a Ray cluster with a token of its own; they can be killed
one by one.

Either all with the machine's own network, or each on a host of its own (`support.network_hosts`),
whose cable can be pulled.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.network_hosts import Hosts


class RayCluster:
    """Raylets on this machine, with a token of their own; nothing of it is left behind."""

    def __init__(self, short: str, environment: dict[str, str]) -> None:
        self.address = ""
        self.environment = (
            os.environ
            | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_memory_monitor_refresh_ms": "0",
                "RAY_TMPDIR": short,  # sockets' names have at most 107 bytes
                # With 15, Ray's, actors take minutes to start beside other tests.
                "RAY_worker_niceness": "0",
                "RAY_worker_register_timeout_seconds": "300",
                "RAY_health_check_period_ms": "500",
                "RAY_health_check_failure_threshold": "8",
            }
            | environment
        )
        self.process: subprocess.Popen[str] | None = None

    def ask(self, what: str) -> Any:
        assert (
            self.process is not None
            and self.process.stdin is not None
            and self.process.stdout is not None
        )
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("=> "):
            assert line, "the cluster's process ended"
        return json.loads(line[3:])


CLUSTER = textwrap.dedent(
    """
    import json, sys
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = {}
    for line in sys.stdin:
        what, *arguments = line.split()
        if what == "add":
            nodes[arguments[0]] = cluster.add_node(num_cpus=int(arguments[1]), num_gpus=4)  # which nobody looks for
        elif what == "kill":
            cluster.remove_node(nodes.pop(arguments[0]), allow_graceful=False)
        ids = {name: node.node_id for name, node in nodes.items()}
        print("=>", json.dumps({"address": cluster.address, "nodes": ids}), flush=True)
        if what == "end":
            cluster.shutdown()
            break
    """
)


@contextlib.contextmanager
def cluster_of(folder: Path, nodes: dict[str, int], **environment: str) -> Iterator[RayCluster]:
    short = tempfile.mkdtemp(prefix="ray-")
    cluster = RayCluster(short, environment)
    with open(folder / "cluster.log", "w") as log:
        cluster.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env=cluster.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    try:
        for name, cpus in nodes.items():
            cluster.address = cluster.ask(f"add {name} {cpus}")["address"]
        yield cluster
    finally:
        with contextlib.suppress(OSError, AssertionError):
            cluster.ask("end")
        cluster.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            cluster.process.wait(30)
        cluster.process.kill()
        shutil.rmtree(short, ignore_errors=True)


class RayHosts(RayCluster):
    """Hosts with a raylet each, of one CPU; the first one is the head."""

    def __init__(self, short: str, hosts: Hosts, log: Path) -> None:
        super().__init__(short, {})
        self.hosts, self._log = hosts, log
        self.address = f"{hosts.address(hosts.names[0])}:6379"

    def add(self, name: str) -> None:
        """Switch a host on."""
        own = self.hosts.address(name)
        head = name == self.hosts.names[0]
        where = (
            ["--head", "--port=6379", "--include-dashboard=false"]
            if head
            else [f"--address={self.address}"]
        )
        common = [
            f"--node-ip-address={own}",
            "--num-cpus=1",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        command = [
            *self.hosts.on(name),
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *where,
            *common,
        ]
        with open(self._log, "a") as log:
            done = subprocess.run(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        assert done.returncode == 0, self._log.read_text()[-4000:]

    def kill(self, name: str) -> None:
        """Switch a host off: all of its processes end at once."""
        for pid in self.hosts.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def ray_hosts(folder: Path, names: list[str], later: list[str]) -> Iterator[RayHosts]:
    """Yield a cluster of hosts; those of `later` are there, and switched off. Needs root and
    ip(8).
    """
    short = tempfile.mkdtemp(prefix="ray-")
    with Hosts([*names, *later]) as hosts:
        cluster = RayHosts(short, hosts, folder / "cluster.log")
        try:
            for name in names:
                cluster.add(name)
            yield cluster
        finally:
            for name in hosts.names:
                cluster.kill(name)
            shutil.rmtree(short, ignore_errors=True)
