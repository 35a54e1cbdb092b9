"""The line: shown where somebody watches, silent elsewhere, with true figures."""

import asyncio
import itertools
import math
import os
import pty
import re
import subprocess
import sys
import termios
import textwrap
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm.utils import disp_len

from ttrl.errors import UserError
from ttrl.records import Sample
from ttrl.rollouts import progress
from ttrl.rollouts.progress import Prices, Progress
from ttrl.text import si


def sample(reward, **changes):
    fields = {
        "task_id": "t",
        "sample": 0,
        "messages": [],
        "reward": reward,
        "error": None if reward is not None else "E",
    }
    return Sample(**{**fields, **changes})


class Clock:
    """One that goes on when it is told to."""

    time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    return Clock()


def test_the_line_and_its_summary(clock):
    bar = Progress(8, "d", None, Prices(1.0, 10.0), clock)
    assert bar.line(200) == "d 0/8 |                  | 0:00<?  0 tok/s  $0.00  0 tokens"
    bar.add_tokens(1500, prompt=1000)
    bar.add_tokens(700)
    bar.add_tokens(-200)  # lost with their stream
    bar.add_sample(
        sample(
            1.0, metrics={"exact": 1.0, "a very long name of a metric": 5000.0}, token_ids=[1] * 10
        )
    )
    bar.add_sample(sample(0.5, metrics={"exact": 0.0}, logprobs=[-1.0] * 20), cached=True)
    bar.add_sample(sample(None))
    bar.add_sample(sample(None, error=None, finish_reason="unfinished", token_ids=[1] * 1000))
    clock.time += 10
    assert bar.line(200) == (
        "d 4/8 |█████████         | 0:10<0:13  reward 0.750  1 failed  200 tok/s  $0.021  exact "
        "0.500  a very long nam… 5k  "
        "2k tokens  15 tok/sample  1 unfinished  1 cached"
    )
    assert bar.summary() == (
        "d: 4 of 8 samples in 10.0 s, reward 0.750, exact 0.500, a very long nam… 5k, 1 failed, "
        "1 unfinished, 1 cached, "
        "2k new tokens (200 tok/s), 15 tok/sample, $0.021"
    )


def test_it_moves_while_answers_that_come_whole_are_made():
    lines, asked = [], []
    screen = types.SimpleNamespace(width=lambda: 200, show=lines.append, finish=lines.append)

    def in_flight(finished):
        asked.append(finished)
        return 0.0 if finished == 1000 else 100.0 * len(asked)

    async def main():
        # At each look at the clock the line is due.
        with Progress(8, "d", screen, clock=itertools.count().__next__) as bar:
            stop = bar.keep_moving(in_flight, pause=0.01)
            while not any("  300 tokens" in line for line in lines):
                await asyncio.sleep(0.01)
            bar.add_tokens(1000)
            while "  1k tokens" not in lines[-1]:
                await asyncio.sleep(0.01)
            stop()
            seen = len(asked)
            await asyncio.sleep(0.05)
            assert len(asked) == seen

    asyncio.run(asyncio.wait_for(main(), 30))
    assert asked[0] == 0 and asked[-1] == 1000
    assert "1k new tokens" in lines[-1]
    assert Progress(8, "d", None).keep_moving(in_flight)() is None  # nobody looks: nothing is asked


def test_what_matters_most_stays_in_narrow_terminals(clock):
    bar = Progress(10, "iteration 3: sampling", None, clock=clock)
    bar.add_sample(sample(0.25, metrics={"exact": 1.0}))
    bar.add_sample(sample(None))
    assert bar.line(60) == "iteration 3: sampling 2/10 0:00<0:00  reward 0.250  1 failed"
    assert bar.line(50) == "iteration 3: sampling 2/10 0:00<0:00  reward 0.250"
    assert bar.line(24) == "iteration 3: sampling 2/"


@given(
    width=st.integers(1, 250),
    description=st.text(st.characters(exclude_categories=["C", "M"]), max_size=60),
    total=st.none() | st.integers(0, 10**7),
    names=st.lists(st.text(max_size=40), max_size=12),
    reward=st.floats(-1e9, 1e9),
)
def test_a_line_is_never_wider_than_its_terminal(width, description, total, names, reward):
    bar = Progress(total, description, None, Prices(1, 1))
    bar.add_tokens(123456, 7)
    bar.add_sample(sample(reward, metrics=dict.fromkeys(names, reward)))
    assert disp_len(bar.line(width)) <= width
    assert "\n" not in bar.line(width) + bar.summary()


def test_no_total(clock):
    bar = Progress(None, "d", None, clock=clock)
    bar.add_sample(sample(1.0))
    clock.time += 3700
    assert bar.line(200) == "d 1 1:01:40  reward 1.000  0 tok/s  0 tokens"
    assert bar.summary() == "d: 1 samples in 1:01:40, reward 1.000, 0 new tokens (0 tok/s)"


class Screen:
    def __init__(self):
        self.lines, self.last = [], None

    def width(self):
        return 100

    def show(self, line):
        self.lines.append(line)

    def finish(self, line):
        self.last = line


def test_at_most_ten_lines_a_second_and_a_rate_that_moves(clock):
    screen = Screen()
    with Progress(10_000, "d", screen, clock=clock) as bar:
        for _ in range(10_000):  # 10 s at 1,000 tokens/s, then 20 s at 100
            clock.time += 0.001
            bar.add_tokens(1)
        assert 90 <= len(screen.lines) <= 101
        assert "1k tok/s" in screen.lines[-1]
        for _ in range(200):
            clock.time += 0.1
            bar.add_tokens(10)
        assert "100 tok/s" in screen.lines[-1]
        assert len(bar._marks) < 200
    assert screen.last == "d: 0 of 10000 samples in 30.0 s, 12k new tokens (400 tok/s)"


def test_an_interrupted_call_says_so():
    screen = Screen()
    with pytest.raises(KeyboardInterrupt), Progress(2, "d", screen) as bar:
        bar.add_sample(sample(1.0))
        raise KeyboardInterrupt
    assert screen.last.startswith("stopped: d: 1 of 2 samples")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (4_560_000, "4.56M"),
        (2e9, "2G"),
    ],
)
def test_si(number, text):
    assert si(number) == text


def test_prices():
    assert (
        Prices.of((0.5, 2))
        == Prices(0.5, 2.0)
        == Prices.of([0.5, 2.0])
        == Prices.of(Prices(0.5, 2.0))
    )
    assert Prices(0.5, 2.0).spend(prompt=3_000_000, completion=1_000_000) == 3.5


@pytest.mark.parametrize(
    "value",
    [
        None,
        1.0,
        (1.0,),
        (1, 2, 3),
        (-1, 0),
        (math.nan, 0),
        (0, math.inf),
        ("1", 2),
        "12",
        {1, 2},
        (True, 1),
    ],
)
def test_prices_that_are_none(value):
    with pytest.raises(UserError, match=r"prices is .*; give \(input, output\)"):
        Prices.of(value)


def test_nothing_is_written_to_a_file(kit, capsys):
    from ttrl.tasks import Task

    with Progress(2, "d", progress.screen()) as bar:
        bar.add_sample(sample(1.0))
    assert capsys.readouterr().err == ""
    kit.run(
        kit.echo, [Task(messages=[{"role": "user", "content": "x"}], grader=lambda choice: 1.0)]
    )
    assert capsys.readouterr().err == ""


def test_a_notebook_has_one_output_that_changes(monkeypatch, capsys, clock):
    """As IPython's kernel does it: display() with a display_id returns a handle."""
    outputs = []

    class Handle:
        def __init__(self, data):
            self.number = len(outputs)
            outputs.append([data])

        def update(self, data, *, raw):
            assert raw
            outputs[self.number].append(data)

    def display(data, *, raw, display_id):
        assert raw and display_id
        return Handle(data)

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(
        get_ipython=lambda: shell, display=types.SimpleNamespace(display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with Progress(2, "d", progress.screen(), clock=clock) as bar:
        for _ in range(2):
            clock.time += 1.0
            bar.add_sample(sample(0.5))
    ((first, *_, last),) = outputs
    assert first["text/plain"].startswith("d 0/2")
    assert last["text/plain"].startswith("d: 2 samples in")
    assert len(outputs[0]) >= 3
    assert capsys.readouterr().err == ""
    shell.kernel = None  # IPython in a terminal is a terminal
    assert progress.screen() is None


def shown_in_a_terminal(script, columns):
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, columns))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=follower, stdout=subprocess.DEVNULL
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 4096):
            shown += chunk
    except OSError:  # what a pseudo terminal says when the other side is gone
        pass
    os.close(leader)
    assert process.wait(60) == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [120, 0])
def test_a_terminal_sees_it_and_pbar_false_hides_it(columns):
    text = shown_in_a_terminal(
        """
        from ttrl.records import Sample
        from ttrl.rollouts import progress
        progress.REDRAW_SECONDS = 0.0
        for enabled in (True, False):
            with progress.Progress(2, f"sampling {enabled}", progress.screen() if enabled else None) as bar:
                bar.add_tokens(10)
                for _ in range(2):
                    bar.add_sample(Sample(task_id="t", sample=0, messages=[], reward=0.5))
        """,
        columns,
    )
    assert "sampling True 2/2" in text
    assert "reward 0.500" in text
    assert text.rstrip().splitlines()[-1].endswith("tok/s)")
    assert re.search(
        r"\rsampling True: 2 samples in \d+\.\d s, reward 0\.500, 10 new tokens \(", text
    )
    assert "sampling False" not in text
