"""Steps 10 and 11: the repository's own tests for a GPU, and `ttrl doctor --certify`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from record import read_lines
from steps import Place

TREE = Path(__file__).resolve().parents[2]


def tests(place: Place) -> None:
    """Run tests/gpu, whose outcomes are written one by one: a kill loses none of the names."""
    results = place.logs / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    processes = "2" if place.rehearse else "8"
    command += ["-n", processes, "--basetemp", str(place.folder / "pytest")]
    if place.rehearse:
        place.report.stand_in("all are skipped without CUDA: that they are collected is what is seen")
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
    table = [
        [case["part"], case["case"], case["found"]]
        for case in content["cases"]
        if case["passed"] is False
    ]
    if table:
        place.report.table("failed", ["part", "case", "found"], table)
    passed = [case["passed"] for case in content["cases"]]
    place.report.figure("proven", sum(one is True for one in passed), "cases")
    place.report.check("nothing failed", False not in passed and bool(passed), content["verdict"])
    place.report.check("it came to its end", code == 0, f"exit code {code}")


def run_to_the_end(command: list[str], environment: dict[str, str]) -> int:
    """Run a command; a Ctrl-C to the group reaches it too, and what it then writes is waited for."""
    with subprocess.Popen(command, cwd=TREE, env=environment) as process:
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
