"""The requests log: whole lines whoever writes them, no credentials, and no error that reaches a
rollout.
"""

import json
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support import os_calls

from ttrl.rollouts.requests_log import RequestsLog
from ttrl.system.files import read_jsonl

LINE: dict[str, Any] = {
    "base_url": "http://h:1/v1",
    "model": "m",
    "digest": "ab" * 32,
    "samples": range(4),
    "hit": False,
}


def test_a_line_says_what_was_asked_and_what_it_cost(tmp_path: Path) -> None:
    log = RequestsLog(tmp_path / "logs" / "requests.jsonl")
    log.append(
        **LINE, prompt_tokens=10, cached_prompt_tokens=4, completion_tokens=64, seconds=1.23456
    )
    log.append(**{**LINE, "hit": True, "samples": [7]}, error=TimeoutError("too slow"))
    first, second = read_jsonl(log.path)
    assert abs((datetime.fromisoformat(first.pop("time")) - datetime.now(UTC)).total_seconds()) < 60
    assert first == {
        "base_url": "http://h:1/v1",
        "model": "m",
        "digest": "ab" * 32,
        "samples": [0, 1, 2, 3],
        "hit": False,
        "prompt_tokens": 10,
        "cached_prompt_tokens": 4,
        "completion_tokens": 64,
        "seconds": 1.2346,
        "error": None,
    }
    assert (second["hit"], second["samples"], second["error"]) == (
        True,
        [7],
        "TimeoutError: too slow",
    )


def test_a_log_that_is_opened_while_another_one_writes_waits(tmp_path: Path) -> None:
    """It would take half a line for one that a killed process has left, and cut it off."""
    first, second = RequestsLog(tmp_path / "log"), RequestsLog(tmp_path / "log")
    first.append(**LINE)
    other = threading.Thread(target=lambda: second.append(**LINE))
    waits = []

    def meanwhile(path: str, *_: object) -> None:
        if str(path) == str(first.path) and not waits:
            other.start()
            other.join(0.1)
            waits.append(other.is_alive())

    with os_calls.before("open", meanwhile):
        first.append(**LINE)
    other.join()
    assert waits == [True] and len(read_jsonl(first.path)) == 3


def test_threads_and_processes_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    code = (
        "import sys\nfrom ttrl.rollouts.requests_log import RequestsLog\nlog = "
        "RequestsLog(sys.argv[1])\n"
        "for i in range(200): log.append(base_url='u', model=sys.argv[2] * 300, digest='d', "
        "samples=[i], hit=False)"
    )
    RequestsLog(path).append(**LINE)
    others = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "ab"]
    log = RequestsLog(path)
    threads = [
        threading.Thread(
            target=lambda: [log.append(**{**LINE, "model": "c" * 300}) for _ in range(50)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in others] == [0, 0]
    rows = read_jsonl(path)
    assert len(rows) == 1 + 2 * 200 + 4 * 50
    assert {row["model"] for row in rows[1:]} == {letter * 300 for letter in "abc"}
    assert [row["samples"][0] for row in rows if row["model"][0] == "a"] == list(range(200))


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    RequestsLog(path).append(**LINE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    log = RequestsLog(path)
    log.append(**LINE)
    log.append(**LINE)
    assert len(read_jsonl(path)) == 3


def test_credentials_and_odd_text(tmp_path: Path) -> None:
    log = RequestsLog(tmp_path / "requests.jsonl")
    for _ in range(2):  # the first line and the others are written in different ways
        log.append(
            **{
                **LINE,
                "base_url": "https://me:topsecret@host/v1?api-key=topsecret",
                "model": "\ud800é",
            },
            error="401 at https://host/v1?token=topsecret\nsecond line " + "x" * 10_000,
        )
    text = log.path.read_text()
    assert "topsecret" not in text
    row = json.loads(text.splitlines()[1])
    assert (
        row["base_url"] == "https://***@host/v1?api-key=***"
        and row["model"] == "?é"
        and len(row["error"]) == 2000
    )


def test_a_log_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = RequestsLog(tmp_path / "file" / "requests.jsonl")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.append(**LINE)
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text


FULL = """
import resource, sys
from ttrl.system.files import read_jsonl
from ttrl.rollouts.requests_log import RequestsLog

log = RequestsLog(sys.argv[1])
line = dict(base_url="u", model="m" * 100, digest="d", hit=False)
log.append(samples=[0], **line)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for i in range(1, 10):
    log.append(samples=[i], **line)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
for i in range(10, 13):
    log.append(samples=[i], **line)
samples = [row["samples"][0] for row in read_jsonl(sys.argv[1])]
assert samples[:2] == [0, 1] and samples[-3:] == [10, 11, 12] and len(samples) < 13, samples
"""


def test_a_full_disk_costs_lines_and_not_the_log(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: it takes a part of a line."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "r.jsonl")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1
