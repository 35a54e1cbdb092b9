"""Code blocks: which code of a reply is run, against CommonMark's rules and what models write
instead.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.tasks.humaneval.code_blocks import read_code
from ttrl.tasks.humaneval.sandbox import SandboxOutcome
from ttrl.tasks.humaneval.tasks import HumanEvalGrader, HumanEvalProblem

PROMPT = 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """Sum."""\n'
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
PROBLEM = HumanEvalProblem("x/1", PROMPT, "add", TEST, "    return a + b\n")
FUNCTION = "def add(a, b):\n    return a + b"
LINES = FUNCTION.split("\n")
DOCSTRING = '''def add(a, b):
  """Add two numbers.

{}```
{}add(1, 2)
{}```
  """
  return a + b'''


def run_here(source, limits):
    """Run a program without a sandbox: these are ours."""
    try:
        exec(source, {"__name__": "__main__"})
    except Exception as error:  # noqa: BLE001 - of any program
        return SandboxOutcome(False, type(error).__name__)
    return SandboxOutcome(True)


def indented(text, by):
    return "\n".join(by + line for line in text.split("\n"))


@pytest.mark.parametrize(
    "content",
    [
        f"{FUNCTION}\n```",
        f"{FUNCTION}\n```\n\nIt adds two numbers.",
        f"{FUNCTION}\n```\n\nIt adds:\n\n```python\nprint(add(1, 2))\n```",
        f"Here is the function:\n\n{FUNCTION}\n```",
        f"{FUNCTION}```",
        "    return a + b\n```",
        "    return a + b\n```\nIt adds two numbers.",
        "    return a + b```",
        f"~~~python\n{FUNCTION}\n~~~",
        f"~~~\n{FUNCTION}\n~~~~~",
        f"````python\n{FUNCTION}\n````",
        f"`````\n{FUNCTION}\n``````\nIt adds.",
        f"````markdown\nSo:\n```python\n{FUNCTION}\n```\n````",
        f"```{{.python}}\n{FUNCTION}\n```",
        f"``` {{.python .numberLines startFrom=1}}\n{FUNCTION}\n```",
        f'```python title="add.py"\n{FUNCTION}\n```',
        f"```python title=add.py\n{FUNCTION}\n```",
        f"```python:add.py\n{FUNCTION}\n```",
        f"```c++-like python\n{FUNCTION}\n```",
        f"  ```python\n{indented(FUNCTION, '  ')}\n  ```",
        f"1. The function:\n\n    ```python\n{indented(FUNCTION, '    ')}\n    ```\n2. Done.",
        f"- ```python\n{indented(FUNCTION, '  ')}\n  ```",
        f"1. ```python\n{FUNCTION}\n```",  # a list whose code is not indented
        f"\t```python\n{indented(FUNCTION, chr(9))}\n\t```",
        f"   ```python\n{FUNCTION}\n```",
        f"```python\n{FUNCTION}\n   ```\nIt adds.",
        f"```python\n{DOCSTRING.format('  ', '  ', '  ')}\n```",
        f"```python\n{DOCSTRING.format('', '', '')}\n```",
        f"```python\n{DOCSTRING.format('    ', '    ', '    ')}\n```\nIt adds.",
        f"```\n{DOCSTRING.format('  ', '  ', '  ').replace('```', '~~~')}\n```",
        f"```python\n{DOCSTRING.format('  ', '  ', '  ').replace('```', '```python', 1)}\n```",
        f"```python\n{DOCSTRING.format('  ', '  ', '  ')}",
        f"{DOCSTRING.format('  ', '  ', '  ')}\n```",
        f'```python\nx = \'"""\'  # not """ a string\n{FUNCTION}\n```\n\'\'\'\n```\n',
        f"```python\n{FUNCTION}\nprint('```')\n```\nIt adds.",
        f"```python\n{FUNCTION}\n```\n```text\nadd(1, 2) = 3\n```",
        f"```python\ndef other():\n    return 0\n\n```python\n{FUNCTION}\n```",  # never closed
        f"```python\n{FUNCTION}```\nIt adds.",
        f"Voilà : ```python\n{FUNCTION}\n```",
        f"```{LINES[0]}\n{LINES[1]}\n```",
        "```def add(a, b): return a + b```",
        f"```python\r\n{FUNCTION}\r\n```\r\n",
        f"```python\nfrom __future__ import annotations\n\n{FUNCTION}\n```",
        "```python\n'''Adds.'''\nfrom __future__ import (\n    annotations,\n    "
        f"division,\n)\n{FUNCTION}\n```",
        f"```python\nfrom __future__ import annotations, \\\n    division\n{FUNCTION}\n```",
        f"from __future__ import annotations\n\n{FUNCTION}",
    ],
)
def test_replies_that_are_right(reply, content):
    assert HumanEvalGrader(PROBLEM, run=run_here)(reply(content))[0] == 1.0


@pytest.mark.parametrize(
    "content",
    [
        f"```python\n{FUNCTION}\n```\n\nNo, better:\n\n~~~python\ndef add(a, b): return 0\n~~~",
        f"<think>\n~~~\n{FUNCTION}\n~~~\n</think>\n```python\n    return 0\n```",
        f"{FUNCTION}\n```\n\nNo:\n```python\ndef add(a, b):\n    return 0\n```",
        f"```python\nexample = '''\n{FUNCTION}\n'''\n```",
    ],
)
def test_replies_that_are_wrong(reply, content):
    assert HumanEvalGrader(PROBLEM, run=run_here)(reply(content))[0] == 0.0


def test_future_imports_of_both_parts_go_first(reply):
    sources = []
    grader = HumanEvalGrader(
        PROBLEM, run=lambda source, limits: sources.append(source) or run_here(source, limits)
    )
    assert grader(reply(f"from __future__ import annotations\n{FUNCTION}"))[0] == 1.0
    assert sources[0].startswith("from __future__ import annotations\nfrom typing import List")
    assert sources[0].count("__future__") == 1


@given(
    mark=st.sampled_from(["```", "````", "~~~", "~~~~~"]),
    indent=st.sampled_from(["", " ", "   "]),
    info=st.sampled_from(["", "python", " py", "{.python}", "python title=x"]),
    lines=st.lists(st.sampled_from(["def add(a, b):", "    return a", "", "  x", "``", "~~", "#"])),
    closed=st.booleans(),
    after=st.sampled_from(["", "Some words.", "\n- a list"]),
)
def test_property_blocks_are_those_of_commonmark(mark, indent, info, lines, closed, after):
    """Any one block, and the words around it, as a parser of Markdown reads it."""
    markdown_it = pytest.importorskip("markdown_it")
    ending = [indent + mark, after] if closed else []
    text = "\n".join(
        ["Words.", "", indent + mark + info, *(indent + line for line in lines), *ending]
    )
    (fence,) = [token for token in markdown_it.MarkdownIt().parse(text) if token.type == "fence"]
    expected = fence.content
    if expected.strip():
        assert read_code(text, "add").rstrip("\n") == expected.rstrip("\n")


@given(st.text("`~ \n\t'\"#python{.}def add(:-1>", max_size=200))
def test_property_every_reply_is_read(text):
    """Whatever stands in a reply, the code is lines of it, and a fence around it changes
    nothing.
    """
    code = read_code(text, "add")
    assert set("".join(code.split())) <= set("".join(text.split()))


def test_long_replies(grade_long_replies):
    pieces = [
        "```python\n'''\n",
        "```\n",
        "~~~markdown\n",
        "   ```x\n'''\n```\n",
        "'\"",
        '"\\',
        "```a```",
    ]
    pieces += ["```python\n\"\"\" '''\n", "````markdown\n```python\n", "1. ```python\n", "\t"]
    pieces += ["from __future__ import ("]
    grader = HumanEvalGrader(PROBLEM, run=lambda source, limits: run_here("", limits))
    grade_long_replies(grader, *pieces)
