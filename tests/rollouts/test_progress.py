"""The bar: shown where somebody watches, silent elsewhere, with true figures."""

import io
import os
import pty
import subprocess
import sys
import termios
import textwrap

import pytest

from ttrl.records import Sample
from ttrl.rollouts import progress
from ttrl.rollouts.progress import Progress, si


def sample(reward):
    return Sample(task_id="t", sample=0, messages=[], reward=reward, error=None if reward is not None else "E")


def test_text(monkeypatch):
    clock = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    bar = Progress(4, "d", enabled=False)
    assert bar.text() == "0 tokens, 0 tokens/s"
    bar.add_tokens(1500)
    bar.add_tokens(500)
    for reward in (1.0, 0.5, None):
        bar.add_sample(sample(reward))
    assert bar.text() == "reward 0.750, 2k tokens, 200 tokens/s, 1 failed"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_999, "1M"), (4_560_000, "4.56M"), (2e9, "2G")],
)
def test_si(number, text):
    assert si(number) == text


def test_nothing_is_written_to_a_file(kit, monkeypatch):
    from ttrl.tasks import Task

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(2, "d", enabled=True) as bar:
        bar.add_sample(sample(1.0))
    assert sys.stderr.getvalue() == ""
    kit.run(kit.echo, [Task(messages=[{"role": "user", "content": "x"}], grader=lambda choice: 1.0)])
    assert sys.stderr.getvalue() == ""


def test_a_terminal_sees_it_and_pbar_false_hides_it():
    script = textwrap.dedent("""
        from ttrl.records import Sample
        from ttrl.rollouts.progress import Progress
        for enabled in (True, False):
            with Progress(2, f"sampling {enabled}", enabled=enabled) as bar:
                bar.add_tokens(10)
                for _ in range(2):
                    bar.add_sample(Sample(task_id="t", sample=0, messages=[], reward=0.5))
    """)
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 120))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=follower, stdout=subprocess.DEVNULL)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 4096):
            shown += chunk
    except OSError:  # what a pseudo terminal says when the other side is gone
        pass
    os.close(leader)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "sampling True 2/2" in text
    assert "reward 0.500, 10 tokens" in text
    assert "sampling False" not in text
