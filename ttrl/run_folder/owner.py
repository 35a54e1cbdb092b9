"""The owner of a run: the content of owner.json, and its words in messages.

The name of a machine proves nothing: a restarted pod shares it with its predecessor, which may
still live.
"""

import contextlib
import getpass
import itertools
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ttrl.system.process_guard import boot_id, process_id
from ttrl.text import harmless

_HIDDEN = "…"
_OPTION = re.compile(r"-[A-Za-z]|--[a-z][a-z0-9_-]{1,40}")
_SHOWN_OPTIONS = {
    "ttrl",
    "--run",
    "--model",
    "--preset",
    "--seed",
    "--iterations",
    "--overfit",
    "--weight-sync",
    "--nproc-per-node",
}
"""The recipes' names for their harmless options (`ttrl.cli.recipe_script`)."""
_PLAIN = re.compile(r"[A-Za-z0-9_./+-]{1,120}")
"""No address: it may hold a key in its path, and a query."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of an owner.json. Without a pid: an owner that has left."""

    host: str = "unknown"
    boot: str = ""
    pid_namespace: str = ""
    pid: int = 0
    process_start: int | None = None
    user: str = "unknown"
    started: str = "unknown"
    command: str = "unknown"
    token: str = ""
    """A random name of the process."""
    epoch: int = 0
    """In a mirror."""
    folder: str = ""
    """The token of the run folder, in a mirror."""
    beat: int = 0
    """Changes in a mirror while the owner lives."""
    released: bool = False
    """Whether the owner of a mirror has left."""

    def __str__(self) -> str:
        """Describe the owner for messages."""
        if not self.pid:
            return "which has ended since"
        return harmless(
            f"pid {self.pid} on {self.host}, user {self.user}, since {self.started}: {self.command}"
        )

    def same_boot(self) -> bool:
        """Tell whether the owner started after this machine's last start."""
        return self.boot != "" and self.boot == boot_id()

    def lives(self) -> bool | None:
        """Tell whether the owner lives; None if its pid means nothing here."""
        if not self.same_boot() or self.pid_namespace != _pid_namespace():
            return None
        return process_id(self.pid) == (self.pid, self.process_start)


def describe_process() -> Owner:
    """Return this process as an owner."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    own = process_id(os.getpid())
    return Owner(
        host=socket.gethostname(),
        boot=boot_id(),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        process_start=None if own is None else own[1],
        user=user,
        started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        command=" ".join(shown_words(sys.argv or [""]))[:300],
        token=secrets.token_hex(8),
    )


def parse_owner(data: bytes | str | None) -> Owner | None:
    """Return the content of an owner.json; None for a missing or damaged file."""
    try:
        return msgspec.json.decode(data or "null", type=Owner | None)
    except msgspec.ValidationError:
        return Owner(pid=-1)  # of another ttrl: its heartbeat tells whether it lives
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def shown_words(words: Sequence[str]) -> list[str]:
    """Return a command line for a file readable by others: any possible secret becomes `…`.

    Any word can be one: scripts have options of their own, and a key looks like any other value. So
    show only names of options, and values of ttrl's own recipe options if they read like a path, a
    name or a number.
    """
    program = Path(words[0])
    shown = [program.name]
    option = ""
    if program.parts[-3:] == ("ttrl", "cli", "__main__.py") or program.name == "ttrl":
        shown = ["ttrl"]
        option = "ttrl"  # its value is the subcommand
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            shown.append(_value(option, word))
            option = ""
        elif _OPTION.fullmatch(name):
            option = name
            shown.append(name + equals + (_value(name, value) if equals else ""))
        else:
            option = ""
            shown.append(word[:2] + _HIDDEN)  # -kSECRET
    return [word for word, _ in itertools.groupby(shown)]


def _value(option: str, value: str) -> str:
    if option in _SHOWN_OPTIONS and _PLAIN.fullmatch(value):
        return value
    return _HIDDEN


def _pid_namespace() -> str:
    """Return the name of the namespace of our pids; "" if unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
