"""Graders in processes: the same grades as in threads, and whatever a grader does costs its own
sample alone.
"""

import asyncio
import functools
import gc
import hashlib
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import pytest
from openai.types.chat.chat_completion import Choice

from ttrl.errors import GraderError, UserError
from ttrl.records import Sample
from ttrl.rollouts.client.choices import choice_of_sample
from ttrl.rollouts.graders import isolated
from ttrl.rollouts.graders import worker_wire as wire
from ttrl.rollouts.graders.grading import MAX_ERROR_LENGTH, Graders
from ttrl.tasks import Grade, Task


def in_thread(grader, choice):
    async def main():
        with Graders(timeout=60.0) as graders:
            task = Task(messages=[{"role": "user", "content": "x"}], grader=grader)
            return await graders.grade(task, choice, "task 't', sample 2")

    return asyncio.run(main())


# The same as in threads


async def later(value):
    await asyncio.sleep(0)
    return value


class AsyncCallable:
    async def __call__(self, choice):
        return await later(0.25)


class Number(float):
    """Of this module, which no other process can import."""


def closure(value):
    def grader(choice):
        return value + len(choice.message.content)

    return grader


@pytest.mark.parametrize(
    "grader",
    [
        lambda choice: 1,
        lambda choice: True,
        lambda choice: (0.1 + 0.2, {"m": 2, "größe": 1e-300}),
        lambda choice: Grade(0.5, {"m": 2.0}),
        lambda choice: Number(0.5),
        lambda choice: later((0.5, {"m": 2})),
        functools.partial(lambda value, choice: value, 3),
        AsyncCallable(),
        AsyncCallable().__call__,
        closure(2.5),
    ],
)
def test_good_graders(bench, grader):
    assert bench.grade(grader) == in_thread(grader, bench.choice())


def raises(kind, *args):
    def my_grader(choice):
        raise kind(*args)

    return my_grader


def async_raises(kind, *args):
    async def my_grader(choice):
        await asyncio.sleep(0)
        raise kind(*args)

    return my_grader


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


@pytest.mark.parametrize("make", [raises, async_raises])
@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (ValueError, ("bad\nnews",)),
        (TimeoutError, ("the judge's",)),
        (asyncio.CancelledError, ()),
        (SystemExit, (2,)),
        (RecursionError, ("deep",)),
        (UnprintableError, ()),
        (SyntaxError, ("odd",)),
        (GraderError, ("their own",)),
        (StopIteration, ()),
        (ValueError, ("x" * 100_000,)),
    ],
)
def test_errors_read_as_in_threads(bench, make, kind, args):
    with pytest.raises(GraderError) as caught:
        in_thread(make(kind, *args), bench.choice())
    text = bench.error(make(kind, *args))
    assert text == str(caught.value)
    assert (
        "in my_grader" in text
        and "grader_worker" not in text
        and len(text) < MAX_ERROR_LENGTH + 1000
    )


def test_keyboard_interrupts_of_a_grader_are_errors_too(bench):
    for make in (raises, async_raises):
        assert "the grader raised KeyboardInterrupt" in bench.error(make(KeyboardInterrupt))


@pytest.mark.parametrize(
    "output",
    [float("nan"), float("inf"), "1.0", None, (1.0,), (1.0, {"m": float("nan")}), [1.0], 1j],
)
def test_what_is_no_finite_number_is_refused(bench, output):
    with pytest.raises(GraderError) as caught:
        in_thread(lambda choice: output, bench.choice())
    assert bench.error(lambda choice: output) == str(caught.value)


def look(choice):
    """Tells by its error everything that can be seen of a choice."""
    seen = [
        repr(choice),
        choice.model_dump(),
        choice.to_json(),
        sorted(choice.model_fields_set),
        choice.model_extra,
    ]
    seen += [
        sorted(choice.message.model_fields_set),
        choice.message.model_extra,
        type(choice),
        type(choice.message),
    ]
    seen += [
        type(choice.logprobs),
        choice.logprobs and type(choice.logprobs.content[0]),
        choice == choice.model_copy(deep=True),
    ]
    raise ValueError(
        hashlib.sha256(repr(seen).encode("utf-8", "surrogatepass")).hexdigest(), str(seen)[:2000]
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"message": {"role": "assistant", "content": None}, "logprobs": None},
        {"message": {"role": "assistant", "content": "ünï\u2028 \x00"}, "finish_reason": "length"},
        {
            "message": {
                "role": "assistant",
                "content": "",
                "reasoning_content": {"a": [1, None]},
                "annotations": None,
            }
        },
        {
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": 1}'},
                    }
                ],
            }
        },
        {"finish_reason": "stopped_early", "stopped_early": True},
    ],
)
def test_a_grader_sees_the_same_choice(bench, changes):
    with pytest.raises(GraderError) as caught:
        in_thread(look, bench.choice(**changes))
    assert bench.error(look, bench.choice(**changes)) == str(caught.value)


def test_logprobs_that_somebody_has_looked_into(bench):
    looked, untouched = bench.choice(), bench.choice()
    assert looked.logprobs.content[0].logprob == -0.5
    errors = [bench.error(look, looked), bench.error(look, untouched)]
    assert errors[0] == errors[1]
    # Sent as they came, without being built here.
    assert type(untouched.__dict__["logprobs"]).__name__ == "_LazyLogprobs"


def test_choices_of_stored_samples(bench):
    sample = Sample(
        task_id="t",
        sample=1,
        messages=[],
        text="x",
        token_ids=[5, 6],
        logprobs=[-0.5, math.nan],
        finish_reason="stop",
    )
    with pytest.raises(GraderError) as caught:
        in_thread(look, choice_of_sample(sample))
    assert bench.error(look, choice_of_sample(sample)) == str(caught.value)


def test_what_a_server_left_out_stays_left_out(bench):
    # By anybody.
    choice = Choice.construct(
        index=0, message={"role": "assistant", "content": "x"}, finish_reason="stop"
    )
    with pytest.raises(GraderError) as caught:
        in_thread(look, choice)
    assert bench.error(look, choice) == str(caught.value)


def test_lone_surrogates_and_large_choices_arrive(bench):
    text = "\ud83d" + "é" * 3_000_000
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def grader(choice):
        return float(
            hashlib.sha256(choice.message.content.encode("utf-8", "surrogatepass")).hexdigest()
            == digest
        )

    assert bench.grade(grader, bench.choice(content=text)).reward == 1.0


# What travels


def test_graders_of_modules_that_only_we_can_import(bench, tmp_path, monkeypatch):
    (tmp_path / "ttrl_test_helpers.py").write_text(
        "FACTOR = 3.0\ndef times(x):\n    return FACTOR * x\n"
    )
    with monkeypatch.context() as path:
        path.syspath_prepend(str(tmp_path))
        helpers = importlib.import_module("ttrl_test_helpers")  # loaded, and on no path from here
    made = types.ModuleType("ttrl_test_made")
    exec("def grader(choice):\n    return 0.125", made.__dict__)
    monkeypatch.setitem(sys.modules, "ttrl_test_made", made)
    assert bench.grade(lambda choice: helpers.times(2)).reward == 6.0
    assert bench.grade(made.grader).reward == 0.125


def test_sys_path_and_folder_are_ours_and_keys_are_not_passed_on(make_bench, tmp_path, monkeypatch):
    (tmp_path / "ttrl_test_on_path.py").write_text("VALUE = 0.5\n")
    (tmp_path / "json.py").write_text(
        "raise SystemExit('the current folder came before the standard library')"
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "ttrl_test_on_path.py").write_text("VALUE = 0.75\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    for name in (
        "OPENAI_API_KEY",
        "AWS_PROFILE",
        "HF_TOKEN",
        "MY_PASSWORD",
        "db_secret",
        "GITHUB_PAT",
        "AZURE_STORAGE_SAS",
        "APP_DATABASE_URL",
        "SSH_AUTH_SOCK",
    ):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("HARMLESS", "yes")
    folder = str(tmp_path)

    def grader(choice):
        import ttrl_test_on_path

        assert os.getcwd() == folder
        assert "hush" not in os.environ.values() and os.environ["HARMLESS"] == "yes"
        with open("/proc/self/environ", "rb") as file:
            assert b"hush" not in file.read()
        return ttrl_test_on_path.VALUE

    made = make_bench(size=1)
    assert made.grade(grader).reward == 0.75


def test_graders_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, math
        from openai.types.chat.chat_completion import Choice
        from ttrl import Task
        from ttrl.rollouts.graders.grading import Graders

        BONUS = 0.5
        class Judge:
            def __call__(self, choice):
                return math.floor(helper(choice)) + BONUS
        def helper(choice):
            return len(choice.message.content)

        async def main():
            choice = Choice.construct(index=0, finish_reason="stop", message={"role": "assistant", "content": "abc"})
            with Graders(isolated=True, size=1) as graders:
                print(await graders.grade(Task(messages=[{"role": "user", "content": "x"}], grader=Judge()), choice, "w"))
        asyncio.run(main())
        """)
    )
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "Grade(reward=3.5, metrics={})\n"
    # Asyncio on a busy machine.
    assert [line for line in done.stderr.splitlines() if not line.startswith("Executing <")] == []


@pytest.mark.skipif(
    os.getuid() == 0 and shutil.which("setpriv") is None,
    reason="needs setpriv: root reads everything",
)
def test_keys_cannot_be_read_from_the_processes_above(tmp_path):
    """They stand in /proc/PID/environ from a process's start, whatever becomes of os.environ. As
    any user, or as a container's root, who has no capabilities over others."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, contextlib, os, pathlib
        from openai.types.chat.chat_completion import Choice
        from ttrl import Task
        from ttrl.rollouts.graders.grading import Graders

        from ttrl.system.process_guard import SCOPES, landlock_version
        lead, scoped = os.getpid(), landlock_version() >= SCOPES
        def grader(choice):
            readable = []
            for path in pathlib.Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if b"sesame" in (path / "environ").read_bytes():
                        readable.append(path.name)
            with contextlib.suppress(OSError):
                open(f"/proc/{lead}/mem", "rb").close()
                readable.append("memory")
            if scoped:
                with contextlib.suppress(OSError):
                    os.kill(lead, 0)
                    readable.append("signals")
            assert not readable, readable
            return 1.0

        async def main():
            choice = Choice.construct(index=0, finish_reason="stop", message={"role": "assistant", "content": "abc"})
            with Graders(isolated=True, size=1) as graders:
                print(await graders.grade(Task(messages=[{"role": "user", "content": "x"}], grader=grader), choice, "w"))
        asyncio.run(main())
        """)
    )
    environment = {**os.environ, "MY_API_KEY": "sesame"}
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    done = subprocess.run(
        [*powerless, sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.stdout == "Grade(reward=1.0, metrics={})\n", done.stderr


def test_what_cannot_be_pickled_says_so(bench):
    lock = threading.Lock()

    def locked(choice):
        with lock:
            return 1.0

    text = bench.error(locked)
    assert re.match(
        r"task 't', sample 2: the grader .*locked cannot be sent to a process "
        r".*'_thread.lock'.*isolated=False$",
        text,
    )


class ExplodesOnArrival:
    def __call__(self, choice):
        return 1.0

    def __reduce__(self):
        return explode, ()


def explode():
    raise ImportError("no such thing here")


def test_what_cannot_be_loaded_says_so_each_time(bench):
    grader = ExplodesOnArrival()
    for _ in range(2):
        assert "could not be loaded in its process: ImportError: no such thing here" in bench.error(
            grader
        )
    assert bench.grade(lambda choice: 1.0).reward == 1.0


def test_many_graders_each_sent_once_while_it_is_known(make_bench):
    # And so more than workers keep, too.
    made, count = make_bench(size=2), isolated._KEPT_PICKLES + 50
    rewards = made.grade_all([closure(k) for k in range(count)] + [closure(k) for k in range(100)])
    assert rewards == [k + 5.0 for k in (*range(count), *range(100))]
    assert len(made.graders._processes._pickles) == isolated._KEPT_PICKLES


def test_a_grader_is_loaded_once_per_process(make_bench, tmp_path):
    log = tmp_path / "loads"

    class Counting:
        def __call__(self, choice):
            return 1.0

        def __setstate__(self, state):
            with open(log, "a") as file:
                file.write("x")

        def __getstate__(self):
            return {"some": "state"}

    made = make_bench(size=1)
    grader = Counting()
    assert [made.grade(grader).reward for _ in range(5)] == [1.0] * 5
    assert log.read_text() == "x"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout": 0}, "grader_timeout is 0; give a positive number of seconds"),
        ({"timeout": float("nan")}, "grader_timeout is nan"),
        ({"timeout": "1"}, "grader_timeout is '1'"),
        (
            {"memory": 100},
            r"grader_memory is 100; give a number of bytes of at least 1 MiB \(1048576\)",
        ),
        ({"memory": 2.5}, "grader_memory is 2.5"),
        ({"size": 0}, "at once is 0; give at least 1"),
        ({"size": True}, "at once is True"),
    ],
)
def test_settings_out_of_range(settings, words):
    for own_process in (False, True):
        with pytest.raises(UserError, match=words):
            Graders(isolated=own_process, **settings)


def test_messages_survive_any_cut():
    first = wire.Reply("a", metrics={"ü": 1.0})
    data = wire.pack(first, b"", b"\0\1") + wire.pack(wire.Reply("b", error="half of it: \ud800"))
    for size in range(1, len(data) + 1):
        buffer, found = bytearray(), []
        for start in range(0, len(data), size):
            buffer += data[start : start + size]
            while (frame := wire.unpack(wire.Reply, buffer)) is not None:
                found.append(frame)
        assert [parts for _, parts in found] == [[b"", b"\0\1"], []]
        assert found[0][0] == first and found[1][0].error == "half of it: ?" and not buffer


@pytest.mark.parametrize(
    "head", [b"{}", b"[]", b"abc", b"null", b'{"parts": [1]}', b'{"parts": 1}', b"[" * 900]
)
def test_what_is_no_message_is_refused(head):
    with pytest.raises(ValueError):
        wire.unpack(wire.Reply, bytearray(len(head).to_bytes(4, "big") + head), limit=1000)


def test_no_message_is_longer_than_its_limit():
    with pytest.raises(ValueError, match="a header of 1001 bytes"):
        wire.unpack(wire.Reply, bytearray((1001).to_bytes(4, "big")), limit=1000)


def test_no_socket_stays_open_when_the_loop_of_its_worker_is_closed():
    task = Task([{"role": "user", "content": "x"}], lambda choice: 1.0)
    graders = Graders(isolated=True, timeout=60.0, size=1)

    async def graded():
        await graders.grade(
            task,
            Choice.model_validate(
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "a"},
                }
            ),
            "here",
        )
        return len(os.listdir("/proc/self/fd"))

    with warnings.catch_warnings(), graders:
        # Asyncio's, of a transport whose loop is closed.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
        gc.disable()
        try:
            first, *later = [asyncio.run(graded()) for _ in range(3)]
        finally:
            gc.enable()
            gc.collect()
    assert later == [first, first]
