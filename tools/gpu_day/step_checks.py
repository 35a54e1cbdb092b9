"""Steps 10 and 11: the repository's own tests for a GPU, and `ttrl doctor --certify`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from record import read_lines
from steps import Place

TREE = Path(__file__).resolve().parents[2]
PATIENCE = 6.0
"""Seconds; fewer than day.py waits between SIGINT and SIGTERM."""


def tests(place: Place) -> None:
    """Run tests/gpu, whose outcomes are written one by one: a kill loses none of the names."""
    results = place.logs / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    processes = "2" if place.rehearse else "8"
    command += ["-n", processes, "--basetemp", str(place.folder / "pytest")]
    if place.rehearse:
        place.report.stand_in("tests are collected and skipped, as they are without CUDA")
    environment = os.environ | {"TTRL_TEST_RESULTS": str(results)}
    code = run_to_the_end(command, environment)
    ended, unfinished = outcomes_of(read_lines(results))
    for outcome in ("passed", "skipped", "failed", "error"):
        count = sum(line["outcome"] == outcome for line in ended.values())
        place.report.figure(outcome, count, "tests")
    devices = sorted({str(line["device"]) for line in ended.values() if line.get("device")})
    place.report.figure("computed on", ", ".join(devices) or "not said")
    wrong = [
        [name, str(line["outcome"]), str(line.get("reason"))[:300]]
        for name, line in ended.items()
        if line["outcome"] in ("failed", "error")
    ]
    wrong += [[name, "unfinished", ""] for name in unfinished]
    if wrong:
        place.report.table("not passed", ["test", "outcome", "reason"], wrong)
    place.report.check("results were written", bool(ended), f"pytest ended with {code}")
    ran = sum(line["outcome"] != "skipped" for line in ended.values())
    place.report.check("tests ran", place.rehearse or ran > 0, f"{ran}, others were skipped")
    place.report.check("tests pass", code == 0 and not wrong, f"{code}; {len(wrong)} not passed")


def outcomes_of(lines: list[dict]) -> tuple[dict[str, dict], list[str]]:
    """Return the line that says how each test ended, and the tests that began and did not end.

    lines: as TTRL_TEST_RESULTS leaves them (tests/support/results_file.py). A fixture that fails
    after its test counts for more than the test.
    """
    worst = ["skipped", "passed", "failed", "error"]
    began: list[str] = []
    ended: dict[str, dict] = {}
    for line in lines:
        name = str(line["test"])
        if line["event"] == "start":
            began.append(name)
            continue
        known = ended.get(name)
        if known is None or worst.index(line["outcome"]) > worst.index(known["outcome"]):
            ended[name] = line
    return ended, [name for name in began if name not in ended]


def certify(place: Place) -> None:
    """Run `ttrl doctor --certify`, and report what it says."""
    out = place.logs / "certificate"
    command = [sys.executable, "-m", "ttrl.cli", "doctor", "--certify", "--out", str(out)]
    code = run_to_the_end(command, dict(os.environ))
    written = out.with_suffix(".json")
    if not written.is_file():
        place.report.check("a certificate was written", False, f"exit code {code}")
        return
    content = json.loads(written.read_text(encoding="utf-8"))
    place.report.figure("verdict", content["verdict"])
    place.report.figure("minutes", content["minutes"])
    wrong = [case for case in content["cases"] if case["passed"] is False]
    table = [[case["part"], case["case"], case["found"]] for case in wrong]
    if table:
        place.report.table("failed", ["part", "case", "found"], table)
    passed = [case["passed"] for case in content["cases"]]
    place.report.figure("proven", sum(one is True for one in passed), "cases")
    place.report.check("nothing failed", False not in passed and bool(passed), content["verdict"])
    place.report.check("it came to its end", code == 0, f"exit code {code}")


def run_to_the_end(command: list[str], environment: dict[str, str]) -> int:
    """Run a command, and return its exit code.

    SIGINT to the group reaches it too. It then has some seconds to write down what it has, which is
    reported like a whole result.
    """
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        with subprocess.Popen(command, cwd=TREE, env=environment) as process:
            while not interrupted.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.5)
            try:
                return process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
