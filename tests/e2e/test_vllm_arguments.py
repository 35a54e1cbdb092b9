"""What ttrl says of vLLM's arguments without loading it, against the parser of the vLLM that is
installed.

Only that one knows what it takes.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ttrl.configs import vllm_arguments

pytestmark = pytest.mark.e2e
VLLM = importlib.util.find_spec("vllm")
REAL = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
def takes(action, text):
    try:
        value = parser._get_value(action, text)
    except Exception:
        return False
    return action.nargs != 0 and (action.choices is None or value in action.choices)
found = {name[2:]: [action.nargs == 0, takes(action, "many"), takes(action, "1"), list(action.choices or ())]
    for action in parser._actions for name in action.option_strings if name.startswith("--")}
"""


@pytest.fixture(scope="module")
def real(in_vllm: Callable[..., Any]) -> dict[str, Any]:
    if VLLM is None:
        pytest.skip("vLLM is not installed")
    found = in_vllm(REAL)
    return {name.replace("-", "_"): facts for name, facts in found.items()}


def test_the_options_are_those_of_its_parser(real: dict[str, Any]) -> None:
    assert VLLM is not None and VLLM.origin is not None
    options = vllm_arguments._fields(Path(VLLM.origin).parent).keys()
    negated = {name for name in real if name.startswith("no_") and name.removeprefix("no_") in real}
    assert real.keys() - negated - options == {"help"} and not options - real.keys()


def test_whatever_is_refused_would_not_be_parsed(real: dict[str, Any]) -> None:
    """A type that is read wrongly from the source would refuse what vLLM takes."""
    judged = 0
    for name, (is_flag, takes_many, takes_one, choices) in real.items():
        if name == "help":
            continue
        if vllm_arguments.argument_problems({name: "many"}):
            judged += 1
            assert not takes_many, name
        values = [True, False] if is_flag else [*choices, *([1] if takes_one else [])]
        for value in values:
            problems = vllm_arguments.argument_problems({name: value})
            # Bounds come after parsing.
            assert not problems or re.search("a number (above|below|at)", problems[0]), problems
    assert judged > 100
