"""What is said is there when it is said, piped or not."""

import os
import subprocess
import sys

import pytest

WAITS = "; import os, select, sys; select.select([sys.stdin], [], [], 30); os._exit(0)"  # without the flush of a normal end


@pytest.mark.parametrize(
    ("code", "first"),
    [
        ("from ttrl.cli import main; main(['models'])", "smollm2-135m"),
        (
            "from ttrl.cli.recipe_script import script_arguments as s; s(None, run='r', iterations=1); print('tasks are made')",
            "tasks",
        ),
        ("from ttrl.system.console import Console; Console().line('iteration 1')", "iteration 1"),
    ],
)
def test_a_line_goes_through_a_pipe_when_it_is_written(code, first):
    """The reader has it while the writer still works."""
    pipe, environment = subprocess.PIPE, {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code + WAITS]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout.readline().startswith(first)
        assert process.poll() is None
        process.stdin.close()
