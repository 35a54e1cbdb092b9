"""A run to replay, and a folder with modules of a test's own."""

import sys
import textwrap

import pytest
from support.replayed_run import Run

from ttrl.loop import phases


@pytest.fixture
def run(world, monkeypatch):
    # `replay` itself takes no parts.
    monkeypatch.setattr(phases, "Trainer", lambda *_: world.trainer_class())
    return Run(world)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with modules of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    return write
