"""A block that never ends is ended, in any thread; one that ends is left alone."""

import subprocess
import sys
import threading
import time

import pytest

from ttrl.system import time_limit as module
from ttrl.system.time_limit import time_limit


@pytest.fixture(autouse=True, scope="module")
def looks_often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOOK_SECONDS", 0.01)
        time.sleep(0.6)  # a watcher from before still sleeps as long as it did
        yield


def spin(catches):
    with time_limit(0.05):
        while True:
            try:
                while True:
                    sum(range(100))
            except Exception:  # as a stubborn program may
                if not catches:
                    raise
                catches.pop()


@pytest.mark.parametrize("catches", [0, 1])
def test_a_loop_is_ended(catches):
    found = []

    def attempt():
        try:
            spin([None] * catches)
        except TimeoutError as error:
            found.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    attempt()  # in two threads at once
    thread.join(60)
    assert found == ["it took more than 0.05 s"] * 2 and not module._blocks


def test_what_ends_in_time_is_left_alone():
    for _ in range(1000):
        with time_limit(60.0):
            pass
    with pytest.raises(KeyError, match="own"), time_limit(60.0):
        raise KeyError("own")
    with time_limit(0.01):
        pass
    until = time.monotonic() + 0.2
    while time.monotonic() < until:  # nothing comes after the end
        pass
    assert not module._blocks


def test_nothing_comes_after_a_block_that_ended_too_late():
    for _ in range(20):
        late = None
        try:
            with time_limit(0.02):
                time.sleep(0.02)  # at about the time of the look
        except TimeoutError as error:
            late = error
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            pass
        assert late is None or "0.02" in str(late)


def test_code_that_is_traced_goes_on_afterwards():
    """Taking back an exception that was never raised made CPython 3.11 loop for ever under a
    debugger or coverage.
    """
    script = """
import sys, time
from ttrl.system import time_limit as module
module.LOOK_SECONDS = 0.01
sys.settrace(lambda frame, event, argument: None)
for _ in range(20):
    with module.time_limit(60.0):
        pass
try:
    with module.time_limit(0.05):
        while True:
            time.sleep(0.001)
except TimeoutError:
    print("ended", (lambda: "and went on")())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "ended and went on", done.stderr
