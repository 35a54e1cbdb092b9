"""Find the answer in a reply. For graders; every function takes linear time.

The model is paid for anything a grader takes for right, so one rule holds for all replies: the last
answer counts, thinking aloud does not, and uncertain readings are no answer.
"""

import re

from ttrl.tasks.numerals import has_digit
from ttrl.tasks.task import Choice

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORMED = re.compile(r"\s*<think>.*</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_BOXED = re.compile(r"\\boxed\s*\{")


def reply_text(choice: Choice) -> str:
    """Return the whole of the model's turn: its beginning in the prompt, any thinking removed by
    the server, and the content.
    """
    return opening_of(choice) + (choice.message.content or "")


def opening_of(choice: Choice) -> str:
    """Return the part of the model's turn before the content, "" without one
    (`ttrl.rollouts.client.opening`).
    """
    opening = getattr(choice, "opening", None)
    if isinstance(opening, str):
        return opening
    return ""


def place_in_content(choice: Choice, rest: str, place: int) -> float:
    """Convert a place in `rest`, the end of the reply, to a place in its content, for
    `ANSWER_END`.
    """
    return float(len(choice.message.content or "") - len(rest) + place)


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`; "" for unfinished thinking; everything without
    thinking.
    """
    end = text.rfind("</think>")
    start = text.rfind("<think>")
    if start > end:
        return ""
    if end < 0:
        return text
    return text[end + len("</think>") :]


def tagged_answer(text: str, opening: str = "") -> str | None:
    """Return the answer of a reply of the form `<think>…</think>`, then `<answer>…</answer>`, once
    each, and nothing else.

    opening: the beginning of the text, written by the prompt or removed by a server's parser (see
    `opening_of`). Its tags count like the model's own. If thinking ends in it, the rest may have
    all tags again.
    """
    answer = _between_tags(text)
    if answer is None and "</think>" in opening:
        return _between_tags(text.removeprefix(opening))
    return answer


def _between_tags(text: str) -> str | None:
    # Before the search: with each tag only once, it takes linear time.
    if any(text.count(tag) != 1 for tag in _TAGS):
        return None
    found = _FORMED.fullmatch(text)
    if found is None:
        return None
    return found[1]


def find_tagged(text: str) -> tuple[int, int] | None:
    """Return (start, end) of the content of the last `<answer>` tags, open ones too (a stop string
    cuts the closing tag off).
    """
    lower = ascii_lower(text)
    start = lower.rfind("<answer>")
    if start < 0:
        return None
    start += len("<answer>")
    end = lower.find("</answer>", start)
    return start, len(text) if end < 0 else end


def find_after(text: str, mark: str, *, skip: str = "", most: int = 0) -> tuple[int, int] | None:
    """Find the rest of the line after the last `mark`, in either case, less up to `most` characters
    of `skip` at its start.
    """
    start = ascii_lower(text).rfind(mark)
    if start < 0:
        return None
    start += len(mark)
    rest = text[start : start + most]
    start += len(rest) - len(rest.lstrip(skip)) if skip else 0
    return start, _line_end(text, start)


def latest(text: str, *places: tuple[int, int] | None) -> str | None:
    """Return the text at the last-beginning place; None without a place."""
    start, end = max((place for place in places if place is not None), default=(0, -1))
    if end >= 0:
        return text[start:end]
    return None


def last_line(text: str) -> str:
    """Return the last line, ignoring empty ones and the end of a code block."""
    text = text.rstrip(" \t\r\n`")
    return text[text.rfind("\n") + 1 :]


def find_boxed(text: str) -> tuple[int, int] | None:
    r"""Return (start, end) of the content of the last `\boxed{…}` (LaTeX) with balanced braces.
    Return None without one.
    """
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start, start + match.start()
    return None


def marked(text: str) -> str | None:
    r"""Return the reply's marked answer, by `<answer>` tags, `\boxed{}` or `####`, whichever begins
    last, or None.

    After `####` it is the rest of the line, or the next non-empty line if the rest holds no digit.
    """
    text = text.replace("＃", "#")
    after = find_after(text, "####")
    if after is not None and not has_digit(text[after[0] : after[1]]):
        rest = text[after[1] :]
        after = after[0], _line_end(text, after[1] + len(rest) - len(rest.lstrip()))
    return latest(text, find_tagged(text), find_boxed(text), after)


def ascii_lower(text: str) -> str:
    """Lower only the letters a to z: `str.lower` can change the length of a text ("İ")."""
    if text.isascii():
        return text.lower()
    return "".join(c.lower() if c.isascii() else c for c in text)


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    if end < 0:
        return len(text)
    return end
