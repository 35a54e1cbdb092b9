"""Several hosts on one machine: network namespaces (ip-netns(8)) that see each other over a bridge,
and share the file system.

And a port that is kept for a process that is still to be started.
"""

import contextlib
import secrets
import socket
import subprocess
from collections.abc import Iterator
from types import TracebackType


class Hosts:
    """Hosts 10.77.0.1, 10.77.0.2, … with a loopback of their own each. Needs root and ip(8).

    with Hosts(["trainer", "server"]) as hosts:
        subprocess.run([*hosts.on("trainer"), "ping", hosts.address("server")])
    """

    def __init__(self, names: list[str]) -> None:
        self.names, self._mark = names, secrets.token_hex(3)

    def address(self, name: str) -> str:
        """Its address in the network."""
        return f"10.77.0.{self.names.index(name) + 1}"

    def on(self, name: str) -> list[str]:
        """What to put in front of a command to run it there."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def pids(self, name: str) -> list[int]:
        """All processes there."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._namespace(name)],
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(pid) for pid in listed.stdout.split()]

    def cut(self, name: str) -> None:
        """Pulls its cable: packets get lost, and nobody is told."""
        self._ip(
            "-n", self._namespace("switch"), "link", "set", f"to-{self.names.index(name)}", "down"
        )

    def mend(self, name: str) -> None:
        """Puts it back."""
        self._ip(
            "-n", self._namespace("switch"), "link", "set", f"to-{self.names.index(name)}", "up"
        )

    def __enter__(self) -> "Hosts":
        try:
            switch = self._namespace("switch")
            self._ip("netns", "add", switch)
            self._ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", switch, "addr", "add", "10.77.0.254/24", "dev", "bridge")
            self._ip("-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(self.names):
                host, port = self._namespace(name), f"to-{number}"
                self._ip("netns", "add", host)
                self._ip(
                    "-n",
                    switch,
                    "link",
                    "add",
                    port,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "cable",
                    "netns",
                    host,
                )
                self._ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                self._ip("-n", host, "addr", "add", f"{self.address(name)}/24", "dev", "cable")
                self._ip("-n", host, "link", "set", "cable", "up")
                self._ip("-n", host, "link", "set", "lo", "up")
                self._ip("-n", host, "route", "add", "default", "via", "10.77.0.254")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes them; what still runs there keeps running, without a network."""
        for name in [*self.names, "switch"]:
            subprocess.run(["ip", "netns", "delete", self._namespace(name)], capture_output=True)

    def _namespace(self, name: str) -> str:
        return f"ttrl-{self._mark}-{name}"

    @staticmethod
    def _ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def possible() -> bool:
    """Whether this user may make them here."""
    try:
        with Hosts(["one"]):
            return True
    except OSError:  # no ip(8), no right to, no kernel support
        return False


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that no other process is given until the end of the block; who asks for
    it by number may listen there, if it sets SO_REUSEADDR, as servers do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
