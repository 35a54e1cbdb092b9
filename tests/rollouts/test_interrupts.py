"""Ctrl-C as a terminal sends it, to the process and all of its children, while everything is under
way.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from support import bad_server

SCRIPT = """
import asyncio, json, sys, zlib
from ttrl import Task, get_task_results

url, folder, how = sys.argv[1:]

def grader(choice):
    return zlib.crc32(choice.message.content.encode()) / 2**32

def ignore(chunk, completion):
    pass

done = []

def on_task_done(result):
    done.append(result)
    if len(done) == 10:
        print("ten", flush=True)

async def main():
    tasks = [Task([{"role": "user", "content": f"task {i}"}], grader, id=f"task {i}") for i in range(5000)]  # far from done
    try:
        await get_task_results(
            tasks, url, "m", n=2, params={"seed": 3}, concurrency=16, cache=folder, weights_digest="w", on_task_done=on_task_done,
            isolated="isolated" in how, on_chunk=ignore if "stream" in how else None, log_dir=folder + "-logs",
            requests_log=folder + "-requests.jsonl",
        )
    except asyncio.CancelledError as cancelled:
        stats = cancelled.results.stats
        print(json.dumps({"kept": len(cancelled.results), "done": len(done), "graded": stats.num_graded}), flush=True)
        raise

if "caught" in how:
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted", flush=True)
elif __name__ == "__main__":
    asyncio.run(main())
"""
NOISE = (
    "Task was destroyed",
    "Unclosed",
    "never retrieved",
    "ResourceWarning",
    "RuntimeWarning",
    "was never awaited",
    "Exception ",
)


@pytest.mark.long(but=["plain"])
@pytest.mark.parametrize("how", ["caught stream isolated", "plain"])
def test_ctrl_c_in_the_middle(tmp_path, how):
    """Long for a stream that is caught and isolated graders: only that shows that their process
    ends as well.
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    with bad_server.process(
        "--latency", "0.05", "--token-delay", "0.001", "--faults", "all=0.1", "--retry-after", "0.2"
    ) as server:
        command = [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "error::ResourceWarning",
            "-W",
            "error::RuntimeWarning",
        ]
        process = subprocess.Popen(
            [*command, tmp_path / "script.py", server.url, tmp_path / "cache", how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout.readline() == "ten\n", process.communicate()[1]
            children = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        deadline = time.monotonic() + 60
        while server.stats()["in_flight"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.stats()["in_flight"] == 0
    assert not [
        child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]
    kept, *rest = out.splitlines()
    kept = json.loads(kept)
    assert kept["done"] == kept["kept"] >= 10
    assert kept["graded"] >= kept["kept"]
    assert [word for word in NOISE if word in err] == [], err
    if "caught" in how:
        assert rest == ["interrupted"]
        slow_callback = "Executing <"  # what asyncio's debug mode says on a busy machine
        # The server is taken out where all of its faults come at once.
        usual = (slow_callback, server.url)
        assert [
            line
            for line in err.splitlines()
            if not line.startswith(usual) and "sampling" not in line
        ] == []
        assert process.returncode == 0
    else:
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode in (130, -signal.SIGINT)
    entries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(entries) >= kept["graded"]
