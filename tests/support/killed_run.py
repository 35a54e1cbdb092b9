"""Wait for a moment of a run in a process of its own, and kill it there."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil


def wait_for(condition, process: subprocess.Popen, log: Path, timeout: float = 600.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline, "the moment never came: " + log.read_text()[-3000:]
        time.sleep(0.0005)


def kill_all(process: subprocess.Popen) -> None:
    """kill -9 of the run and of all that it started, at once."""
    everything = [
        process.pid,
        *(p.pid for p in psutil.Process(process.pid).children(recursive=True)),
    ]
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
