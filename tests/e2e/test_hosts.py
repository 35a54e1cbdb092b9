"""A run over three hosts: trainers on one, vLLM servers on two; a server is cut off for a while, a
trainer process killed.

Long: only this has real servers on hosts of a network, and cuts one off. Joined servers on fake
parts: tests/weights/test_policy_server.py; whole weights in place: test_sync.py; a rank that dies:
test_resident.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import network_hosts

from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not network_hosts.possible(), reason="needs root, ip(8) and network namespaces"
    ),
]
ITERATIONS = 4
SCRIPT = textwrap.dedent(
    """
    import sys
    import time
    from pathlib import Path
    from ttrl import Task, TrainConfig, train

    run, model, *servers = sys.argv[1:]
    metrics = Path(run, "metrics.jsonl")

    def grade(choice):
        rows = metrics.read_text().count(chr(10)) if metrics.exists() else 0
        for at, gate in ((2, "cut"), (4, "killed")):  # it cannot go on before the test has done that
            while rows >= at and not Path(run).with_name(gate).exists():
                time.sleep(0.02)
        return sum(ord(letter) % 2 for letter in choice.message.content or "") / 8

    train(
        TrainConfig(
            run=run, model=model, iterations=ITERATIONS, tasks_per_iteration=4, samples_per_task=4, max_tokens=8, seq_len=256,
            num_threads=1, nproc_per_node=2, servers=0, joined_servers=servers,
        ),
        [Task([{"role": "user", "content": f"say {n}"}], grade, id=f"say/{n}") for n in range(16)],
    )
    """
).replace("ITERATIONS", str(ITERATIONS))


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    with open(log, "ab") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_for(
    condition: Callable[[], bool], *watched: tuple[subprocess.Popen, Path], what: str
) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        for child, log in watched:
            assert child.poll() is None, (
                f"{what}: {child.args} ended with {child.returncode}\n{log.read_text()[-6000:]}"
            )
        assert time.monotonic() < deadline, f"{what}\n" + "\n".join(
            log.read_text()[-4000:] for _, log in watched
        )
        time.sleep(0.1)


def test_a_run_over_three_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = make_tiny_model(tmp_path / "model", layers=1, width=64, heads=2, context=128)
    (tmp_path / "run.py").write_text(SCRIPT)
    run, key_file = tmp_path / "run", tmp_path / "server.key"
    ttrl = [sys.executable, "-m", "ttrl.cli"]
    with (
        network_hosts.Hosts(["lead", "server-a", "server-b"]) as hosts,
        contextlib.ExitStack() as stack,
    ):

        def start(host: str, command: list[str]) -> tuple[subprocess.Popen, Path]:
            log = tmp_path / f"{host}.log"
            return stack.enter_context(process([*hosts.on(host), *command], log)), log

        arguments = [
            "--port",
            "8000",
            "--key-file",
            str(key_file),
            "--dtype",
            "float32",
            "--max-model-len",
            "128",
        ]
        servers = {}
        for name in ("server-a", "server-b"):
            log = tmp_path / f"vllm-{name}.log"
            servers[name] = start(
                name,
                [
                    *ttrl,
                    "serve",
                    str(model),
                    "--host",
                    hosts.address(name),
                    "--log",
                    str(log),
                    *arguments,
                ],
            )
            wait_for(key_file.is_file, servers[name], what="the first makes the key for both")
        for name, (child, log) in servers.items():
            wait_for(
                lambda log=log: "serving at" in log.read_text(), (child, log), what=f"{name} starts"
            )
        urls = [f"http://{hosts.address(name)}:8000" for name in servers]
        monkeypatch.setenv("TTRL_SERVER_KEY", key_file.read_text())
        lead = start(
            "lead", [sys.executable, str(tmp_path / "run.py"), str(run), str(model), *urls]
        )

        def rows() -> list[dict]:
            path = run / "metrics.jsonl"
            return read_jsonl(path, key="iteration") if path.exists() else []

        def finished(number: int) -> Callable[[], bool]:
            return lambda: any(row["iteration"] >= number for row in rows())

        everyone = (lead, *servers.values())
        wait_for(finished(1), *everyone, what="iteration 1")
        hosts.cut("server-b")
        (tmp_path / "cut").touch()
        wait_for(finished(3), *everyone, what="a weight sync and an iteration with one server")
        hosts.mend("server-b")
        victim = next(
            one
            for one in psutil.Process(lead[0].pid).children(recursive=True)
            if "ttrl.grpo_recipe" in " ".join(one.cmdline()) and not one.children()
        )
        victim.kill()
        (tmp_path / "killed").touch()
        wait_for(lambda: lead[0].poll() is not None, *servers.values(), what="the end")
        assert lead[0].returncode == 0, lead[1].read_text()[-8000:]
        assert [row["iteration"] for row in rows()] == list(range(ITERATIONS + 1))
        # Both servers computed: each has answered requests for the key, and none without it.
        for name in servers:
            assert "/v1/chat/completions" in (tmp_path / f"vllm-{name}.log").read_text(
                errors="replace"
            )
        refused = subprocess.run(
            [*hosts.on("lead"), sys.executable, "-c", REQUEST, f"{urls[0]}/collective_rpc"],
            capture_output=True,
            text=True,
        )
        assert refused.stdout.strip() == "401", refused


REQUEST = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="POST", data=b"{}"), timeout=20)
    print("let in")
except urllib.error.HTTPError as error:
    print(error.code)
"""
