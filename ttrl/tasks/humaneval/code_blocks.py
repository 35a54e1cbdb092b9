"""Read code out of a reply: fenced blocks by the rules of CommonMark 0.31 (section 4.5), and by the
actual habits of models.

A block begins at a fence of three or more backticks or tildes and ends at a fence of the same
characters, at least as long and with nothing behind it, or at the end of the reply. A longer fence
may hold shorter ones. The block's lines lose the indentation of its fence. Beyond CommonMark:

- a fence inside a docstring, at any place, ends nothing;
- a fence with an info string ("```python") begins another block, even if the last one was not
  closed, unless it is shorter;
- a block may begin behind other words of a line, its code may begin on the line of the fence, and
  a fence behind code ends the block.

A parser of Markdown such as markdown-it-py knows none of these three. Every reply takes linear
time.
"""

import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ttrl.tasks.answers import after_thinking

# Spaces, a list marker and other words may stand before a fence.
_FENCE = re.compile(r"(?P<before>[^`~\n]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)")
_CONTAINER = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?")
_WORD = re.compile(r"[\w.+#{}-]*")
_LANGUAGE = re.compile(r"\W*(\w*)")
_CODE = re.compile(r"@\w|\w[\w.]*(?:\(| = )")
_IMPORT = re.compile(r"(?:from\s+\S+\s+)?import\s")
_QUOTES = re.compile(r"#.*|'''|\"\"\"|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_PYTHON = frozenset({"", "py", "python", "python3", "python2", "py3"})
_MARKDOWN = frozenset({"markdown", "md"})
_TRIPLE = ("'''", '"""')
_DEEPEST_END = 3
"""Extra indentation in spaces allowed for a closing fence over its opening one (CommonMark)."""
_LONGEST_LINE = 2000
"""Limit on the characters of a line searched for strings."""


@dataclass(frozen=True)
class _Fence:
    """A fence in a line. `before`: the line's text before it, without a list marker."""

    before: str
    indent: int
    mark: str
    info: str

    @property
    def language(self) -> str:
        match = _LANGUAGE.match(self.info)
        if match:
            return match[1].lower()
        return ""

    @property
    def first_line(self) -> str:
        """The code on the line of the fence; "" if an info string stands there."""
        if is_code(self.info):
            return self.info
        return ""

    def is_ended_by(self, other: "_Fence") -> bool:
        """Tell whether another fence, on its own line or behind code, ends this one's block."""
        if not other.mark.startswith(self.mark) or other.info:
            return False
        if other.before:
            return "#" not in other.before
        return other.indent <= _DEEPEST_END + self.indent

    def is_followed_by(self, other: "_Fence") -> bool:
        """Tell whether another fence begins the next block before the end of this one's."""
        if not other.mark.startswith(self.mark) or other.before or not other.info:
            return False
        return self.language not in _MARKDOWN and other.indent <= _DEEPEST_END + self.indent


def read_code(text: str, entry_point: str) -> str:
    """Return the program in a reply, after any thinking.

    It is the last block with the function's definition; else code without an opening fence before
    its closing one, if it defines the function or the reply begins with an indented line (the rest
    of a function); else the last non-empty block, else the whole reply.
    """
    text = after_thinking(text)
    lines = text.split("\n")
    blocks = list(_blocks(lines))
    for block in reversed(blocks):
        if defines(block, entry_point):
            return block
    begun = _begun_without_fence(lines)
    if defines(begun, entry_point) or (begun and text.lstrip("\r\n").startswith((" ", "\t"))):
        return begun
    return next((block for block in reversed(blocks) if block.strip()), text)


def defines(code: str, entry_point: str) -> bool:
    """Tell whether code defines a function of this name at its outermost level."""
    return re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", code, re.MULTILINE) is not None


def is_code(text: str) -> bool:
    """Tell whether a line begins like Python, unlike a sentence or an info string."""
    first = text.split(maxsplit=1)[:1]
    if not first:
        return False
    if first[0] in ("from", "import"):
        return _IMPORT.match(text) is not None
    return keyword.iskeyword(first[0]) or _CODE.match(text) is not None


def _fence_in(line: str) -> _Fence | None:
    """Return the fence of a line; None for a line without one, and for code between backticks."""
    match = _FENCE.match(line)
    if match is None:
        return None
    mark = match["fence"]
    info = match["info"].strip()
    if mark[0] == "`" and "`" in info:
        return None
    container = _CONTAINER.match(match["before"])
    assert container is not None
    before = match["before"][container.end() :]
    if before and not _WORD.fullmatch(info):
        return None
    return _Fence(before, container.end(), mark, info)


def _blocks(lines: Sequence[str], *, in_markdown: bool = False) -> Iterator[str]:
    """Yield the text of each block; for a block of Markdown, the blocks inside it."""
    at = 0
    while at < len(lines):
        fence = _fence_in(lines[at])
        at += 1
        if fence is None:
            yield from _in_one_line(lines[at - 1])
            continue
        content, at = _content(lines, at, fence)
        if fence.language in _MARKDOWN and not in_markdown:
            yield from _blocks(content, in_markdown=True)
        elif fence.first_line:
            yield "\n".join([fence.first_line, *content])
        else:
            yield "\n".join(content)


def _in_one_line(line: str) -> list[str]:
    """Return the code between fences within a line."""
    return [piece for piece in line.split("```")[1::2] if is_code(piece)]


def _content(lines: Sequence[str], start: int, fence: _Fence) -> tuple[list[str], int]:
    """Return the lines of a block from `start` on, and the next line to read."""
    strings = _Strings(lines, fence)
    at = start
    while at < len(lines):
        other = _fence_in(lines[at])
        if other is not None and fence.is_ended_by(other):
            if other.before:
                last = lines[at][: lines[at].index(other.mark)]
            else:
                last = ""
            return _without_indent([*lines[start:at], last], fence), at + 1
        if other is not None and fence.is_followed_by(other):
            return _without_indent([*lines[start:at], ""], fence), at
        at = strings.line_after(at)
    return _without_indent(lines[start:], fence), at


def _without_indent(lines: Sequence[str], fence: _Fence) -> list[str]:
    """Take off the fence's indentation, or the first line's if it has less."""
    first = next((line for line in lines if line.strip()), "")
    most = min(fence.indent, len(first) - len(first.lstrip(" \t")))
    without = []
    for line in lines:
        indent = len(line) - len(line.lstrip(" \t"))
        without.append(line[min(most, indent) :])
    return without


class _Strings:
    """Finds the triple-quoted strings of a block of Python; no fence counts in them."""

    def __init__(self, lines: Sequence[str], fence: _Fence) -> None:
        self._lines = lines
        self._fence = fence

    def line_after(self, at: int) -> int:
        """Return the line after `at`, or after the string beginning there."""
        if self._fence.language not in _PYTHON:
            return at + 1
        start = 0
        while True:
            quotes = self._opened(self._lines[at], start)
            if quotes is None:
                return at + 1
            end = self._line_with(quotes, at + 1)
            if end is None:
                return at + 1
            at = end
            start = self._lines[end].index(quotes) + len(quotes)

    def _opened(self, line: str, start: int) -> str | None:
        """Return the quotes of a string begun by a line, from `start` on, but not ended by it."""
        if len(line) > _LONGEST_LINE:
            return None
        match = _QUOTES.search(line, start)
        while match is not None:
            start = match.end()
            if match[0] in _TRIPLE:
                end = line.find(match[0], start)
                if end < 0:
                    return match[0]
                start = end + len(match[0])
            match = _QUOTES.search(line, start)
        return None

    def _line_with(self, quotes: str, start: int) -> int | None:
        """Return the line ending a string; None if none does before the next block begins."""
        for number in range(start, len(self._lines)):
            if quotes in self._lines[number]:
                return number
            other = _fence_in(self._lines[number])
            if other is not None and other.info and other.indent <= self._fence.indent:
                return None
        return None


def _begun_without_fence(lines: Sequence[str]) -> str:
    """Return code ended but not begun by a fence; "" if a fence or nothing is first."""
    for number, line in enumerate(lines):
        fence = _fence_in(line)
        if fence is not None and not fence.before:
            return ""
        if line.startswith((" ", "\t")) or is_code(line):
            if any("```" in one for one in lines):
                mark = "```"
            else:
                mark = "~~~"
            content, _ = _content(lines, number, _Fence("", 0, mark, ""))
            return "\n".join(content)
    return ""
