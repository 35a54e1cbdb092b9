"""Whatever a grader in a process of its own does, it costs its own sample alone, and nothing is
left behind.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ttrl.errors import GraderError
from ttrl.rollouts.graders import worker_processes as processes
from ttrl.rollouts.graders import worker_wire as wire
from ttrl.system import process_guard

WHERE = "task 't', sample 2"


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# Harm


def forks_and_waits(choice):
    for own_session in (False, True):
        if os.fork() == 0:
            if own_session:
                os.setsid()
            time.sleep(3600)
    time.sleep(3600)


async def never(choice):
    await asyncio.Event().wait()


def spins(choice):
    while True:
        pass


def backtracks(choice):
    re.match(r"(a+)+$", "a" * 64 + "b")


def stubborn(choice):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True:
        with contextlib.suppress(BaseException):
            while True:
                pass


def test_graders_that_never_end_cost_their_samples(hasty):
    bad = [
        spins,
        backtracks,
        lambda choice: time.sleep(3600),
        never,
        lambda choice: never(choice),
        forks_and_waits,
        stubborn,
    ]
    texts = hasty.grade_all([*bad, *[lambda choice: 1.0] * 8])
    expected = f"{WHERE}: the grader took longer than 2 s; make it faster or raise grader_timeout"
    assert texts[: len(bad)] == [expected] * len(bad)
    assert texts[len(bad) :] == [1.0] * 8
    # Nothing is left of them but the workers that wait and their guards: no children, none busy.
    until(lambda: len(process_guard.descendants(hasty.keeper)) <= 2 * 8)


def segfaults(choice):
    ctypes.string_at(0)


def writes_garbage(choice):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\0\0\0\2{}garbage")
    return 1.0


def answers_itself(choice):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, wire.pack(wire.Reply("", reward=5.0, metrics={})))
    return 1.0


def claims_much(choice):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff\xff\xff\xff" * 100)
    return 1.0


def allocates(choice):
    return float(len(bytearray(2**30)))


def allocates_by_and_by(choice):
    hoard = []
    while True:
        hoard.append(bytearray(2**24))


@pytest.mark.parametrize(
    ("grader", "words"),
    [
        (lambda choice: os._exit(3), "ended its process with exit code 3"),
        (lambda choice: os._exit(0), "ended its process with exit code 0"),
        (segfaults, "was ended by SIGSEGV"),
        (lambda choice: os.abort(), "was ended by SIGABRT"),
        (
            lambda choice: os.kill(os.getpid(), signal.SIGKILL),
            "was ended by SIGKILL; the machine may have run out of memory",
        ),
        (lambda choice: os.kill(0, signal.SIGTERM) or time.sleep(60), "was ended by SIGTERM"),
        (lambda choice: os.kill(os.getpid(), signal.SIGXCPU) or time.sleep(60), "s of CPU time"),
        (writes_garbage, "wrote into the channel"),
        (claims_much, "wrote into the channel"),
        (lambda choice: os.closerange(3, 64) or 1.0, "ended its process with exit code"),
        (
            lambda choice: os.closerange(3, 64) or time.sleep(60),
            "closed the channel between its process and ttrl",
        ),
        (allocates, "exceeded its limit of 512 MiB of memory"),
        (allocates_by_and_by, "exceeded its limit of 512 MiB of memory"),
        (lambda choice: (1.0, {f"m{i}": 1.0 for i in range(100_000)}), "MB; the limit is 1.0 MB"),
    ],
)
def test_harm_stays_with_its_sample(bench, grader, words):
    text = bench.error(grader)
    assert text.startswith(f"{WHERE}: the grader")
    assert words in text
    assert bench.grade(lambda choice: 1.0).reward == 1.0


def test_answers_that_nobody_asked_for_are_taken_for_none(bench):
    assert bench.grade_all([answers_itself, lambda choice: 2.0] * 5) == [1.0, 2.0] * 5


def test_what_a_grader_prints_and_reads_goes_nowhere(bench, capfd):
    def chatty(choice):
        for _ in range(200):
            sys.stdout.write("x" * 100_000)
            sys.stderr.write("y" * 100_000)
        os.system("echo from a shell; echo and its errors >&2")
        return float(sys.stdin.read() == "")

    assert bench.grade(chatty).reward == 1.0
    assert capfd.readouterr() == ("", "")


def test_a_child_that_comes_back_as_if_it_were_the_worker(bench):
    def forks(choice):
        return float(os.fork() >= 0)

    assert [bench.grade(forks).reward for _ in range(3)] == [1.0] * 3


def test_an_alarm_does_not_meet_the_next_grader(bench):
    def sets_alarm(choice):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return 1.0

    def waits(choice):
        time.sleep(0.4)
        return 2.0

    assert bench.grade_all([sets_alarm] * 2 + [waits] * 2) == [1.0, 1.0, 2.0, 2.0]


def test_modules_do_not_count_as_memory_of_a_grade(make_bench):
    ballast = b"x" * (64 * 2**20)

    def grader(choice):
        return float(len(ballast) + len(bytearray(8 * 2**20)))

    made = make_bench(size=1, memory=32 * 2**20)
    assert made.grade(grader).reward == 72 * 2**20
    assert "exceeded its limit of 32 MiB of memory" in made.error(
        lambda choice: float(len(bytearray(64 * 2**20)))
    )


def test_each_choice_is_graded_once_whatever_happens(bench, tmp_path):
    """Some graders end their process after they have made their mark; processes are killed between
    grades too.
    """

    def grader_of(number):
        def grader(choice):
            with open(tmp_path / f"{number}", "a") as file:
                file.write("x")
            if number % 5 == 0:
                os._exit(1)
            return number

        return grader

    outcomes = []
    for start in range(0, 60, 20):
        outcomes += bench.grade_all([grader_of(number) for number in range(start, start + 20)])
        idle = process_guard.descendants(bench.keeper)
        for pid, _ in idle:
            with contextlib.suppress(ProcessLookupError):  # one that ended by itself
                os.kill(pid, signal.SIGKILL)
        # It may still take an order with it.
        while any(process_guard.process_id(one[0]) == one for one in idle):
            time.sleep(0.001)
    assert [outcome if isinstance(outcome, float) else None for outcome in outcomes] == [
        None if number % 5 == 0 else float(number) for number in range(60)
    ]
    assert [(tmp_path / f"{number}").read_text() for number in range(60)] == ["x"] * 60


def test_a_worker_that_dies_before_it_takes_its_order_costs_nothing(bench):
    """Stopped, so that the order stays unread; then killed."""
    assert bench.grade(lambda choice: 1.0).reward == 1.0
    idle = [pid for pid, _ in process_guard.descendants(bench.keeper)]
    for pid in idle:
        os.kill(pid, signal.SIGSTOP)

    async def main():
        grading = asyncio.ensure_future(bench.grading(lambda choice: 4.0))
        await asyncio.sleep(0.1)
        for pid in idle:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return await grading

    assert bench.runner.run(main()).reward == 4.0


def kill_keeper(bench):
    """Kill a bench's keeper; return all the processes that end with it."""
    dying = [(bench.keeper, None), *process_guard.descendants(bench.keeper)]
    os.kill(bench.keeper, signal.SIGKILL)
    return [pid for pid, _ in dying]


def test_the_keeper_is_started_again(make_bench, tmp_path):
    made = make_bench(size=2)
    assert made.grade(lambda choice: 1.0).reward == 1.0
    dying = kill_keeper(made)
    # What still lives may take a grade with it.
    until(lambda: not any(map(process_guard.process_id, dying)))
    assert made.grade_all([lambda choice: 2.0] * 3) == [2.0] * 3

    def hangs(choice):
        (tmp_path / "started").touch()
        time.sleep(3600)

    async def while_it_runs():
        grading = asyncio.ensure_future(made.grading(hangs))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        dying = kill_keeper(made)
        with pytest.raises(GraderError, match=r"were killed from outside|was ended by SIGKILL"):
            await grading
        return dying

    dying = made.runner.run(while_it_runs())
    until(lambda: not any(map(process_guard.process_id, dying)))
    assert made.grade(lambda choice: 3.0).reward == 3.0


def test_a_keeper_that_cannot_start_says_why(make_bench, monkeypatch):
    monkeypatch.setattr(processes, "_PROGRAM", "raise ImportError('no such module here')")
    made = make_bench(size=1)
    text = made.error(lambda choice: 1.0)
    assert "ended 3 times in a row" in text and "ImportError: no such module here" in text


def test_cancellation_ends_the_grader(bench, tmp_path):
    started = tmp_path / "pid"

    def hangs(choice):
        started.write_text(str(os.getpid()))
        time.sleep(3600)

    async def main():
        grading = asyncio.ensure_future(bench.grading(hangs))
        while not started.exists() or not started.read_text():
            await asyncio.sleep(0.01)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading

    bench.runner.run(main())
    until(lambda: process_guard.process_id(int(started.read_text())) is None)


def test_orphans_end_with_their_worker_whatever_session_they_made(bench, tmp_path):
    def leaves_an_orphan(choice):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                (tmp_path / "pid.new").write_text(str(os.getpid()))
                (tmp_path / "pid.new").rename(tmp_path / "pid")
                time.sleep(3600)
            os._exit(0)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os._exit(1)

    assert "exit code 1" in bench.error(leaves_an_orphan)
    assert process_guard.process_id(int((tmp_path / "pid").read_text())) is None


@pytest.mark.skipif(
    process_guard.landlock_version() < process_guard.SCOPES, reason="needs Linux 6.12"
)
def test_graders_signal_neither_the_keeper_nor_each_other(bench):
    above = [bench.keeper, *(pid for pid, _ in process_guard.descendants(bench.keeper))]

    def signals(choice):
        reached = []
        for pid in above:
            if pid != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(pid, 0)
                    reached.append(pid)
        return float(len(reached))

    assert bench.grade_all([signals] * 4) == [0.0] * 4


def test_leaving_waits_for_nobody_and_leaves_nobody(make_bench, tmp_path):
    made = make_bench(size=1)

    def hangs(choice):
        if os.fork() == 0:
            os.setsid()
        (tmp_path / str(os.getpid())).touch()
        time.sleep(3600)

    async def main():
        grading = asyncio.ensure_future(made.grading(hangs))
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.01)
        made.graders.__exit__(None, None, None)
        with pytest.raises(GraderError, match="were killed from outside"):
            await grading

    made.runner.run(main())
    assert [path for path in tmp_path.iterdir() if process_guard.process_id(int(path.name))] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_nothing_is_left_when_ttrl_is_killed(tmp_path):
    """Graders of every kind are under way: asleep, spinning in C with the lock held, with children
    in sessions of their own.
    """
    script = textwrap.dedent(f"""
        import asyncio, os, re, time
        from openai.types.chat.chat_completion import Choice
        from ttrl import Task
        from ttrl.rollouts.graders.grading import Graders

        def mark():
            with open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w"): pass
        def sleeps(choice):
            mark(); time.sleep(3600)
        def backtracks(choice):
            mark(); re.match(r"(a+)+$", "a" * 64 + "b")
        def forks(choice):
            for own_session in (False, True):
                if os.fork() == 0:
                    if own_session:
                        os.setsid()
                        if os.fork(): os._exit(0)
                    mark(); time.sleep(3600)
            mark(); time.sleep(3600)

        async def main():
            choice = Choice.construct(index=0, finish_reason="stop", message={{"role": "assistant", "content": "abc"}})
            with Graders(isolated=True, size=3, timeout=1000) as graders:
                tasks = [Task(messages=[{{"role": "user", "content": "x"}}], grader=g) for g in (sleeps, backtracks, forks)]
                await asyncio.gather(*[graders.grade(task, choice, "w") for task in tasks])
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 5, seconds=60)
        pids = [int(path.name) for path in tmp_path.iterdir()]
        everybody = [*process_guard.descendants(process.pid)]
        assert {pid for pid, _ in everybody} > set(pids)
    finally:
        process.kill()
        process.wait()
    until(
        lambda: (
            not [pid for pid, start in everybody if process_guard.process_id(pid) == (pid, start)]
        )
    )


def test_a_second_loop_starts_anew(make_bench):
    made = make_bench(size=1)
    assert asyncio.run(made.grading(lambda choice: 1.0)).reward == 1.0
    assert asyncio.run(made.grading(lambda choice: 2.0)).reward == 2.0
    assert made.grade(lambda choice: 3.0).reward == 3.0
