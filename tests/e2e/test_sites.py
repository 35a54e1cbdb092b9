"""A server at another site, which shares no file system with the run, and is given its adapters
through the mirror.

Long: only this has vLLM fetch an adapter by the mirror. Fetching, with what is refused, and the
run's side, on a fake vLLM: tests/server/test_sites.py; adapters of a run on this machine:
test_lora.py.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ttrl import Task, TrainConfig, train
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_server_at_another_site(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It sees nothing of the run but its mirror. Killed, it is started again, and fetches the
    newest adapter.
    """
    base = make_tiny_model(tmp_path / "base", layers=2, width=64, heads=2)
    run, there = tmp_path / "run", tmp_path / "there"
    shutil.copytree(base, there / "model")
    hide = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none "$0" && exec "$@"',
        str(run),
    ]
    run.mkdir()
    if subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare(1) and the right to hide a folder from a process")
    serve = [
        sys.executable,
        "-m",
        "ttrl.cli",
        "serve",
        str(there / "model"),
        "--adapters",
        bucket,
        "--dtype",
        "float32",
    ]
    serve += ["--key-file", str(there / "key"), "--log", str(there / "log")]
    with open(there / "said", "wb") as said:
        process = subprocess.Popen([*hide, *serve], stdout=said, stderr=subprocess.STDOUT)
    try:
        while not (
            found := re.search(
                r'joined_servers=\["(.+?)"\], adapters="mirror"', (there / "said").read_text()
            )
        ):
            assert process.poll() is None, (there / "said").read_text()
            time.sleep(0.1)
        monkeypatch.setenv("TTRL_SERVER_KEY", (there / "key").read_text())
        killed, one_at_a_time = threading.Event(), threading.Lock()

        def kill() -> None:
            with one_at_a_time:
                if not killed.is_set():
                    for child in psutil.Process(process.pid).children(recursive=True):
                        if "ttrl.vllm_worker.api_server" in child.cmdline():
                            child.kill()
                            killed.set()
                            return

        def grader(choice):
            if (run / "iterations/0001/done/train.json").exists():
                kill()
                while (
                    f"is back, with the weights in {run}/iterations/0001/checkpoint"
                    not in caplog.text
                ):
                    time.sleep(0.1)
            return sum(ord(character) % 2 for character in choice.message.content or "") / 8

        tasks = [
            Task([{"role": "user", "content": f"vowels {n}"}], grader, id=f"vowels/{n}")
            for n in range(8)
        ]
        sizes = {
            "tasks_per_iteration": 4,
            "samples_per_task": 4,
            "max_tokens": 8,
            "seq_len": 128,
            "num_threads": 1,
        }
        joined = {
            "servers": 0,
            "joined_servers": [found[1]],
            "adapters": "mirror",
            "mirror": bucket,
        }
        training = {"lora_rank": 4, "lr": 1e-2, "rows_per_microbatch": 1}
        train(
            TrainConfig(
                run=str(run), model=str(base), iterations=2, training=training, **sizes, **joined
            ),
            tasks,
            quiet=True,
        )
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert killed.is_set()
    facts = json.loads((run / "iterations/0002/done/rollouts.json").read_text())["facts"]
    sync = facts["sync"]
    assert sync["fell_back"] is None and sync["canary_max_difference"] < 1e-4
    assert sync["mode"] == "adapter" and facts["stats"]["num_graded"] == 16, facts
    assert not (run / "iterations/0001/checkpoint/model.safetensors").exists()  # nobody needed it
