"""Listing the tasks of a package that lives in a Python of its own."""

import json
import sys

import pytest

from ttrl.agents.agent_worker import Order
from ttrl.agents.elsewhere import list_rows
from ttrl.errors import TaskError

ORDER = Order(package="verifiers", id="x", options={"split": "train"}, turns=4, tokens=None)


def test_rows_are_told_from_what_else_is_printed(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sesame")
    code = (
        "import json, os, sys\n"
        "print('loading …')\n"
        "print('warning', file=sys.stderr)\n"
        "print(json.dumps({'idx': 0, 'key': os.environ.get('MY_API_KEY'), 'order': sys.argv[1]}))\n"
    )
    rows = list_rows([sys.executable, "-c", code], ORDER, "verifiers:gsm8k")
    (row,) = rows
    assert (row["idx"], row["key"]) == (0, None) and Order(**json.loads(row["order"])) == ORDER


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import verifiers_that_are_not_there",
            "ModuleNotFoundError: No module named 'verifiers_that_are_not_there'; set "
            "TTRL_VERIFIERS_PYTHON to a Python with it",
        ),
        ("raise ValueError('no such taskset')", "cannot be loaded: ValueError: no such taskset"),
        ("import os; os.kill(os.getpid(), 9)", "cannot be loaded: "),
    ],
)
def test_a_listing_that_fails_says_why(code, words):
    with pytest.raises(TaskError) as caught:
        list_rows([sys.executable, "-c", code], ORDER, "verifiers:x")
    assert words in str(caught.value)


def test_a_listing_that_hangs_or_cannot_start():
    with pytest.raises(TaskError, match=r"verifiers:x: listing its tasks took more than 0.5 s"):
        list_rows([sys.executable, "-c", "import time; time.sleep(600)"], ORDER, "verifiers:x", 0.5)
    with pytest.raises(
        TaskError, match=r"verifiers:x: cannot start '/no/such/python'.*No such file"
    ):
        list_rows(["/no/such/python"], ORDER, "verifiers:x")
