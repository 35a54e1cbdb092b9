"""What is said is there when it is said, piped or not."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from ttrl.system.console import Console

# Without the flush of a normal end.
WAITS = "; import os, select, sys; select.select([sys.stdin], [], [], 30); os._exit(0)"


@pytest.mark.parametrize(
    ("code", "first"),
    [
        ("from ttrl.cli import main; main(['models'])", "smollm2-135m"),
        (
            "from ttrl.cli.recipe_script import script_arguments as s; s(None, run='r', "
            "iterations=1); print('tasks are made')",
            "tasks",
        ),
        ("from ttrl.system.console import Console; Console().line('iteration 1')", "iteration 1"),
    ],
)
def test_a_line_goes_through_a_pipe_when_it_is_written(code, first):
    """The reader has it while the writer still works."""
    pipe, environment = (
        subprocess.PIPE,
        {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    command = [sys.executable, "-c", code + WAITS]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        assert process.stdout.readline().startswith(first)
        assert process.poll() is None
        process.stdin.close()


def test_a_line_writes_no_escapes(capsys):
    Console().line("\x1b]0;title\x07it is \x1b[31mred")
    assert (
        "\x1b" not in (said := capsys.readouterr().out) and "\x07" not in said and "it is" in said
    )


def test_a_long_line_fits_the_terminal(capsys):
    text = "iteration   1  " + "  ".join(f"metric_{n} {n / 7:.3f}" for n in range(20))
    Console().line(text, indent=15)
    assert capsys.readouterr().out == text + "\n"  # in a pipe a line stays a line
    code = f"from ttrl.system.console import Console\nConsole().line({text!r}, indent=15)"
    leader, follower = pty.openpty()
    with open(leader, encoding="utf-8") as shown, open(follower, "w") as terminal:
        environment = {**os.environ, "COLUMNS": "80"}
        subprocess.run([sys.executable, "-c", code], stdout=terminal, env=environment)
        lines = os.read(shown.fileno(), 2**16).decode().splitlines()
    assert len(lines) > 4
    assert all(len(line) <= 80 for line in lines)
    assert all(line.startswith(" " * 15) for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


@pytest.mark.parametrize("interrupt", [signal.SIG_IGN, signal.default_int_handler])
def test_sigterm_ends_the_block_also_in_the_background_once(interrupt, monkeypatch, capsys):
    """A shell that starts a script in the background has it ignore SIGINT."""
    before, ended = signal.signal(signal.SIGINT, interrupt), []
    try:
        with pytest.raises(SystemExit) as caught, Console().interruptible("this way on"):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # which would end pytest
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # while things are ended
                ended.append(True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.code == 143 and ended and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert capsys.readouterr().err == "\ninterrupted; this way on\n"


MISTAKES = {
    "train": "ttrl.train(ttrl.TrainConfig(run='r', model='models/nothere', iterations=1), TASKS)",
    "config": "ttrl.TrainConfig(run='r', model='m', iterations=1, learning_rate=1)",
    "evaluate": "ttrl.evaluate('models/nothere', 'countdown')",
    "replay": "ttrl.replay('runs/nothere', grader=float)",
}


@pytest.mark.long(but=["config"])
@pytest.mark.parametrize(
    "mistake",
    [
        "config",
        "replay",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("train", "evaluate")),
    ],
)
def test_a_mistake_in_a_script_ends_in_its_message_alone(mistake, tmp_path):
    """Long for two functions, whose processes load most: only these show that they, too, raise no
    other error on the way out.

    What they refuse: tests/loop/test_checks.py and tests/evaluation.

    Long for the other commands: each only shows that its own entry catches the error.
    """

    def run(**environment):
        tasks = "TASKS = [ttrl.Task([{'role': 'user', 'content': 'x'}], float)] * 40"
        command = [sys.executable, "-c", f"import ttrl; {tasks}; {MISTAKES[mistake]}"]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | environment,
            check=False,
        )

    ended = run()
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) <= 3
    if mistake == "config":  # whose process loads least
        assert "Traceback" in run(TTRL_TRACEBACK="1").stderr


def test_a_fault_that_is_no_mistake_keeps_its_traceback_after_one_that_was():
    code = """
import ttrl
try:
    ttrl.TrainConfig(run='r', model='m', iterations=1, learning_rate=1)
except ValueError:
    pass
raise ValueError("the user's own")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "Traceback" in ended.stderr


def test_a_hook_of_somebody_else_stays():
    code = """
import sys, ttrl
sys.excepthook = lambda *_: print("theirs")
ttrl.TrainConfig(run='r', model='m', iterations=1, learning_rate=1)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "theirs\n"
