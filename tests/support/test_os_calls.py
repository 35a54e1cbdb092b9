"""Calls of the operating system that are refused, or that something comes before."""

import errno
import os
import threading
from pathlib import Path

import pytest
from support import os_calls


def test_a_refused_call_is_not_made(tmp_path: Path) -> None:
    with os_calls.refused("os.mkdir", errno.ENOSPC, tmp_path / "a"):
        with pytest.raises(OSError, match="No space left on device"):
            os.mkdir(tmp_path / "a")
        os.mkdir(tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"]
    os.mkdir(tmp_path / "a")


def test_calls_are_refused_as_often_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("there")
    with os_calls.refused("open", errno.EIO, tmp_path, times=2):
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                (tmp_path / "a").read_text()
        assert (tmp_path / "a").read_text() == "there"


def test_a_call_that_nobody_tried_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="no open about nothing was tried"),
        os_calls.refused("open", errno.EIO, "nothing"),
    ):
        pass


def test_something_happens_just_before_a_call_in_any_thread(tmp_path: Path) -> None:
    seen: list[str] = []

    def react(path: object, *_: object) -> None:
        if str(path).startswith(str(tmp_path)):
            Path(str(path)).write_text("just made")  # is announced to nobody
            seen.append(threading.current_thread().name)

    def read() -> None:
        assert (tmp_path / "a").read_text() == "just made"

    with os_calls.before("open", react):
        read()
        thread = threading.Thread(target=read, name="other")
        thread.start()
        thread.join()
    with pytest.raises(FileNotFoundError):
        (tmp_path / "b").read_text()
    assert seen == ["MainThread", "other"]
