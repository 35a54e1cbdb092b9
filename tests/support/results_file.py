"""Write the outcome of each test to a file as soon as it is known, so that a pytest that is killed
loses no name.

    TTRL_TEST_RESULTS=results.jsonl python -m pytest tests/gpu

A line when a test begins, {"test", "event": "start", "time"}, and one when it ends, {"test",
"event": "end", "outcome", "when", "seconds", "device", "reason", "properties", "time"}. A test
without an end is the one that was running. `outcome` is "passed", "failed", "skipped", or "error"
(in a fixture or an import); where a fixture fails after the test, a second line says so.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLE = "TTRL_TEST_RESULTS"


class ResultsFile:
    """A pytest plugin. With xdist the workers name their device, and the controller writes."""

    def __init__(self, path: str, writes: bool = True) -> None:
        self._path = path
        self._writes = writes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        report.device = _device()
        return report

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, event="start")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write_end(
                report, seconds=round(report.duration, 3), device=getattr(report, "device", None)
            )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write_end(report)

    def _write_end(self, report: Any, **fields: Any) -> None:
        when = getattr(report, "when", "collect")
        outcome = report.outcome
        # "???": xdist's, for a worker that died.
        if outcome == "failed" and when not in ("call", "???"):
            outcome = "error"
        properties = dict(getattr(report, "user_properties", ()))
        self._write(
            test=report.nodeid,
            event="end",
            outcome=outcome,
            when=when,
            reason=_reason(report),
            properties=properties,
            **fields,
        )

    def _write(self, **row: Any) -> None:
        if self._writes:
            # Closed at once: nothing waits in a buffer.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "time": round(time.time(), 3)}, default=str) + "\n")


def _device() -> str:
    """Return what this process has computed on: it must not begin to use a GPU for that."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "cpu"
    return str(torch.cuda.get_device_name())


def _reason(report: Any) -> str | None:
    """Return the line that says why a test failed or was skipped."""
    told = report.longrepr
    if told is None:
        return None
    if isinstance(told, tuple):  # (file, line, why it was skipped)
        return str(told[2])
    crash = getattr(told, "reprcrash", None)
    lines = str(told if crash is None else crash.message).strip().splitlines()
    if crash is not None:
        return lines[0] if lines else ""
    return lines[-1] if lines else ""
