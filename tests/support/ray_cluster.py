"""Raylets on this machine, as machines of a Ray cluster with a token of its own; they can be killed one by one."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
                "RAY_health_check_period_ms": "500",
                "RAY_health_check_failure_threshold": "8",
            }
            | environment
        )
        self.process: subprocess.Popen[str] | None = None

    def ask(self, what: str) -> Any:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
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
            nodes[arguments[0]] = cluster.add_node(num_cpus=int(arguments[1]))
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
