"""Graders of every kind, good and bad: each costs its own sample at the most."""

import asyncio
import contextvars
import functools
import signal
import threading
import time

import pytest

from ttrl.errors import GraderError
from ttrl.rollouts.graders.grading import MAX_ERROR_LENGTH, Threads
from ttrl.tasks import Grade, Task


def run(grader, timeout=5.0, choice="the choice"):
    async def main():
        with Threads(4, timeout) as threads:
            return await threads.grade(grader, choice, "task 't', sample 2")

    return asyncio.run(main())


async def later(value):
    await asyncio.sleep(0)
    return value


class AsyncCallable:
    async def __call__(self, choice):
        return await later(0.25)


@pytest.mark.parametrize(
    ("grader", "reward", "metrics"),
    [
        (lambda choice: 1, 1.0, {}),
        (lambda choice: True, 1.0, {}),
        (lambda choice: (0.5, {"m": 2}), 0.5, {"m": 2.0}),
        (lambda choice: Grade(0.5, {"m": 2.0}), 0.5, {"m": 2.0}),
        (lambda choice: later((0.5, {"m": 2})), 0.5, {"m": 2.0}),
        (functools.partial(lambda value, choice: value, 3), 3.0, {}),
        (AsyncCallable(), 0.25, {}),
        (AsyncCallable().__call__, 0.25, {}),
    ],
)
def test_good_graders(grader, reward, metrics):
    assert run(grader) == Grade(reward, metrics)


def test_sync_graders_run_in_threads_and_async_ones_on_the_loop():
    async def on_loop(choice):
        return float(threading.current_thread() is threading.main_thread())

    assert run(on_loop).reward == 1.0
    assert run(lambda choice: threading.current_thread() is threading.main_thread()).reward == 0.0


def test_a_sync_grader_does_not_block_the_loop():
    """Two graders that wait for each other, and for the loop, can only end if all three run at
    once.
    """
    barrier = threading.Barrier(2, timeout=20)
    loop_ran = threading.Event()

    def waits(choice):
        barrier.wait()
        return float(loop_ran.wait(20))

    async def main():
        with Threads(2, timeout=30) as threads:
            grades = [asyncio.ensure_future(threads.grade(waits, "c", "w")) for _ in range(2)]
            await asyncio.sleep(0.01)
            loop_ran.set()
            return [(await g).reward for g in grades]

    assert asyncio.run(main()) == [1.0, 1.0]


def test_context_variables_reach_a_sync_grader():
    variable = contextvars.ContextVar("variable", default=0.0)
    variable.set(0.75)
    assert run(lambda choice: variable.get()).reward == 0.75


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
    ("kind", "args", "words"),
    [
        (ValueError, ("bad\nnews",), "ValueError: bad"),
        (AssertionError, (), "AssertionError"),
        (TimeoutError, ("the judge's",), "TimeoutError: the judge's"),
        (asyncio.CancelledError, (), "CancelledError"),
        (SystemExit, (2,), "SystemExit: 2"),
        (RecursionError, ("deep",), "RecursionError: deep"),
        (UnprintableError, (), "UnprintableError: <exception str() failed>"),
        (SyntaxError, ("odd",), "SyntaxError: odd"),
        (GraderError, ("their own",), "GraderError: their own"),
        (StopIteration, (), "StopIteration"),
    ],
)
def test_what_a_grader_raises_is_kept_with_place_and_traceback(make, kind, args, words):
    with pytest.raises(GraderError) as caught:
        run(make(kind, *args))
    first, *traceback = str(caught.value).split("\n")
    assert first.startswith("task 't', sample 2: the grader raised ")
    assert words in first
    assert "in my_grader" in "\n".join(traceback)
    assert "ttrl/rollouts/graders/grading.py" not in "\n".join(traceback)  # their code, not ours


@pytest.mark.parametrize(
    "output",
    [float("nan"), float("inf"), "1.0", None, (1.0,), (1.0, {"m": float("nan")}), [1.0], 1j],
)
def test_what_is_no_finite_number_is_refused(output):
    for grader in (lambda choice: output, lambda choice: later(output)):
        with pytest.raises(GraderError, match=r"^task 't', sample 2: the grader"):
            run(grader)


def by_alarm(choice):
    """Limits its own time as math-verify does."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return 0.75


def by_alarm_explained(choice):
    try:
        return by_alarm(choice)
    except ValueError as error:
        raise ValueError("the library does not support a threaded environment") from error


def its_own_cause(choice):
    error = ValueError("odd")
    raise error from error


def test_graders_built_on_signals_are_told_of_isolated():
    for grader in (by_alarm, by_alarm_explained):
        with pytest.raises(GraderError) as caught:
            run(grader)
        first = str(caught.value).split("\n")[0]
        assert "ValueError" in first and first.endswith(
            "with isolated=True, they run in main threads of their own processes"
        )
    with pytest.raises(GraderError) as caught:
        run(its_own_cause)
    assert "isolated" not in str(caught.value)


def test_graders_built_on_signals_work_in_processes_of_their_own(kit):
    def behaviour(body, attempt):
        return kit.completion([kit.choice(0, "x")])

    tasks = [
        Task([{"role": "user", "content": "x"}], grader)
        for grader in (by_alarm, by_alarm_explained)
    ]
    threads, _ = kit.run(behaviour, tasks[:1])
    assert "with isolated=True" in threads.samples[0].error
    isolated, _ = kit.run(behaviour, tasks, isolated=True)
    assert isolated.samples[0].error is None and [one.reward for one in isolated.samples] == [
        0.75,
        0.75,
    ]


def test_graders_with_the_wrong_number_of_arguments():
    with pytest.raises(GraderError, match=r"TypeError: .*positional argument"):
        run(lambda: 1.0)


def test_long_tracebacks_are_cut_in_the_middle():
    with pytest.raises(GraderError) as caught:
        run(raises(ValueError, "x" * 100_000))
    text = str(caught.value)
    assert len(text) < MAX_ERROR_LENGTH + 1000
    assert "[…]" in text


def test_time_limit():
    release = threading.Event()

    async def never(choice):
        await asyncio.Event().wait()

    try:
        for grader in (lambda choice: release.wait(), never, lambda choice: never(choice)):
            with pytest.raises(
                GraderError,
                match=r"^task 't', sample 2: the grader took longer than 0.1 s; .*grader_timeout",
            ):
                run(grader, timeout=0.1)
    finally:
        release.set()


def test_hanging_graders_do_not_use_up_the_threads():
    release = threading.Event()

    async def main():
        with Threads(2, timeout=1.0) as threads:

            async def reward(grader):
                try:
                    return (await threads.grade(grader, "c", "w")).reward
                except GraderError:
                    return None

            hanging = [reward(lambda choice: release.wait()) for _ in range(6)]
            good = [reward(lambda choice: 1.0) for _ in range(6)]
            return await asyncio.gather(*hanging, *good)

    try:
        assert asyncio.run(main()) == [None] * 6 + [1.0] * 6
    finally:
        release.set()


def test_waiting_for_a_thread_is_not_held_against_a_grader():
    def takes_a_moment(choice):
        time.sleep(0.3)
        return 1.0

    async def main():
        with Threads(1, timeout=2.0) as threads:
            grades = [threads.grade(takes_a_moment, "c", "w") for _ in range(8)]
            return [g.reward for g in await asyncio.gather(*grades)]

    assert asyncio.run(main()) == [1.0] * 8  # the last one waits for longer than it may take


def test_threads_end_with_the_call(kit):
    def ours():
        return {thread for thread in threading.enumerate() if thread.name == "ttrl-grader"}

    before = ours()
    tasks = [
        Task(messages=[{"role": "user", "content": str(i)}], grader=lambda choice: 1.0)
        for i in range(20)
    ]
    results, _ = kit.run(kit.echo, tasks, n=4)
    assert results.stats.num_graded == 80
    for thread in ours() - before:
        thread.join(20)
        assert not thread.is_alive()


def test_a_grader_cannot_change_what_was_sampled(kit):
    def vandal(choice):
        choice.message.content = "changed"
        choice.token_ids.clear()
        choice.logprobs.content.clear()
        return 1.0

    results, _ = kit.run(
        kit.echo, [Task(messages=[{"role": "user", "content": "x"}], grader=vandal)]
    )
    sample = results.samples[0]
    assert (sample.text, sample.token_ids, len(sample.logprobs)) == (
        "x#0",
        [*map(ord, "x#0"), 0],
        4,
    )
