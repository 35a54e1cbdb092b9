"""What real processes do: which modules they load, how they take Ctrl-C, that a hanging grader does
not keep them alive.
"""

import json
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

TESTS = str(pathlib.Path(__file__).parents[1])

# A server in the process's own loop.
PREAMBLE = f"""
import asyncio, sys, threading, time
sys.path.append({TESTS!r})
from support.chat_server import Kit as kit
from ttrl import Task, get_task_results
"""


def loaded(statements: str) -> set[str]:
    code = f"import sys, json\n{statements}\nprint(json.dumps(sorted(sys.modules)))"
    return set(
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
    )


@pytest.mark.parametrize(
    ("statements", "forbidden"),
    [
        ("import ttrl", {"torch", "transformers", "vllm", "openai", "numpy", "tqdm"}),
        pytest.param(
            "import ttrl.tasks.sort_letters, ttrl.tasks.letter_counting, ttrl.tasks.words",
            {"torch", "transformers", "vllm", "openai"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "from ttrl import Task, get_task_results, TaskResults, Sample",
            {"torch", "transformers", "vllm", "torchtune"},
            marks=pytest.mark.long,
        ),
        (
            "from ttrl import get_task_results\nfrom ttrl.tasks.sort_letters import "
            "get_sort_letters_tasks\n"
            "from ttrl.tasks.letter_counting import get_letter_counting_tasks\n"
            "get_sort_letters_tasks(n=2), get_letter_counting_tasks(n=2)",
            {"torch", "transformers", "vllm", "torchtune"},
        ),
    ],
)
def test_a_process_that_only_samples_loads_no_torch(statements, forbidden):
    """Long for two of four: only these say which import it is. What a process does with all of them
    stays.
    """
    assert not loaded(statements) & forbidden


def script(body: str) -> list[str]:
    return [sys.executable, "-X", "dev", "-W", "error", "-c", PREAMBLE + textwrap.dedent(body)]


def test_ctrl_c_while_requests_graders_and_transforms_run():
    """Everything is under way; then SIGINT. Nothing is left pending, nothing warns, and the process
    ends.
    """
    body = """
        async def behaviour(body, attempt):
            text = body["messages"][0]["content"]
            if text.startswith("request"):
                await asyncio.Event().wait()
            if text.startswith("retry"):
                return kit.error(500)
            return kit.echo(body)

        started = threading.Barrier(4)   # sync grader, async grader, transform, and the one that says so
        def sync_grader(choice):
            started.wait(); time.sleep(3600)
        async def async_grader(choice):
            await asyncio.to_thread(started.wait); await asyncio.Event().wait()
        def transform(result):
            if result.messages[0]["content"].startswith("transform"):
                started.wait(); time.sleep(3600)
        def say_so():
            started.wait(); print("all running", flush=True)

        def task(text, grader=lambda choice: 1.0):
            return Task(messages=[{"role": "user", "content": text}], grader=grader)

        async def main():
            tasks = [task(f"request {i}") for i in range(5)] + [task("retry")]
            tasks += [task("sync", sync_grader), task("async", async_grader), task("transform")]
            async with kit.serving(behaviour) as server, server.client() as client:
                threading.Thread(target=say_so, daemon=True).start()
                try:
                    await get_task_results(tasks, client, "m", transform=transform, max_retries=1000)
                finally:
                    await asyncio.sleep(0)
                    names = {t.get_coro().__qualname__ for t in asyncio.all_tasks()}
                    print("left", sorted(n for n in names if "_Rollouts" in n or "chat_completion" in n), flush=True)

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    process = subprocess.Popen(
        script(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "all running\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out == "left []\ninterrupted\n"
    slow_callback = "Executing <"  # what asyncio's debug mode says on a busy machine
    assert [line for line in err.splitlines() if not line.startswith(slow_callback)] == []
    assert process.returncode == 0


def test_a_hanging_sync_grader_does_not_keep_the_process_alive():
    body = """
        def hangs(choice):
            time.sleep(3600)
        async def main():
            async with kit.serving(kit.echo) as server, server.client() as client:
                results = await get_task_results(
                    [Task(messages=[{"role": "user", "content": "x"}], grader=hangs)], client, "m", n=3, grader_timeout=0.2)
                print(results.stats.exceptions)
        asyncio.run(main())
    """
    done = subprocess.run(script(body), capture_output=True, text=True, timeout=60)
    assert (
        "'GraderError: the grader took longer than 0.2 s; make it faster or raise "
        "grader_timeout': 3"
    ) in done.stdout
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
