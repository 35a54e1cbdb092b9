"""Grade mathematical answers, and find them in replies."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from ttrl.tasks.answers import (
    after_thinking,
    find_after,
    find_tagged,
    opening_of,
    reply_text,
    tagged_answer,
)
from ttrl.tasks.math.equality import load, same_answer
from ttrl.tasks.math.latex import read_answer
from ttrl.tasks.numerals import last_number
from ttrl.tasks.task import Choice
from ttrl.text import present

Style = Literal["boxed", "r1", "answer"]

INSTRUCTIONS: dict[str, str] = {
    "boxed": "Solve the problem step by step. Put the final answer into \\boxed{}.",
    "r1": """First think about the problem, then give the answer. Write the reasoning in <think> \
</think> tags and the final answer in <answer> </answer> tags: <think> reasoning here </think> \
<answer> answer here </answer>""",
    "answer": """Solve the problem step by step. The last line of your reply is of the form \
Answer: $ANSWER, where $ANSWER is the answer to the problem.""",
}

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Between boxes of one answer: "\boxed{1} and \boxed{2}".
_JOINT = re.compile(r"(?:[\s$.,;&{}]|\\[()\[\] ]|\\q?quad|\\text|and|or)*")
_LONGEST_JOINT = 60
_MOST_BOXES = 20
_SKIPPED = " \t*_`#>"
_FORMULA = re.compile(r"(?<!\\)\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z]|\s*$)")
_LOOKED_AT = 4000
"""Limit on the characters of a line behind a mark, and of the end of a reply without one."""


@dataclass(frozen=True)
class MathGrader:
    r"""1.0 if the reply's answer equals the expected one, else 0.

    With `format_reward` w, the reward is (1 − w)·right + w·format.

    The last marked answer after any thinking counts. The marks are `\boxed{}`, `<answer>` tags,
    `Answer:` and `####`.

    expected: LaTeX with or without `$`, or plain text. For equal answers see
        `ttrl.tasks.math.equality`.
    style: the form rewarded by `format`; see `follows_format`.
    flexible: reads a reply without a mark, too: the text after "answer is", else its last formula
        or number.
    seconds: for one comparison. A slower answer is wrong.

    It runs in a process of its own in every run: a signal ends its comparisons, and SymPy may use
    gigabytes.
    """

    expected: str
    style: Style = "boxed"
    format_reward: float = 0.0
    flexible: bool = False
    seconds: float = 5.0
    isolated: ClassVar[bool] = True

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, metrics).

        Metrics, 0 or 1: exact, format, timeout (comparing took too long), and unless `flexible`,
        lenient: the flexible verdict.
        """
        text = reply_text(choice)
        marked = read_reply(text)
        if marked is None:
            lenient = read_reply(text, flexible=True)
        else:
            lenient = marked
        verdict = self._compare(lenient)
        exact = float(verdict is True and (self.flexible or marked is not None))
        formed = float(follows_format(text, self.style, opening_of(choice)))
        metrics = {"exact": exact, "format": formed, "timeout": float(verdict is None)}
        if not self.flexible:
            metrics["lenient"] = float(verdict is True)
        return (1.0 - self.format_reward) * exact + self.format_reward * formed, metrics

    def _compare(self, answer: str | None) -> bool | None:
        if answer is None:
            return False
        return same_answer(self.expected, answer, self.seconds)

    def prepare(self) -> None:
        """Import math-verify and SymPy. A grader's process calls this once."""
        load()

    def reference(self) -> str:
        return write_answer("I know it.", self.expected, self.style)


def read_reply(text: str, *, flexible: bool = False) -> str | None:
    """Return the marked answer of a reply. For `flexible` see MathGrader."""
    text = after_thinking(text)
    marked = (_tagged(text), _boxed(text), _line(text, "answer:"), _line(text, "####"))
    found = present(marked)
    if found:
        return max(found)[1]
    if flexible:
        return _unmarked(text[-_LOOKED_AT:])
    return None


def _tagged(text: str) -> tuple[int, str] | None:
    place = find_tagged(text)
    if place is None:
        return None
    return (place[0], text[place[0] : place[1]])


def _boxed(text: str) -> tuple[int, str] | None:
    r"""Return (place, content) of the last `\boxed{}`. Boxes joined by "and" are one answer."""
    boxes = _boxes(text)
    if not boxes:
        return None
    joined = [boxes[-1]]
    for start, end in reversed(boxes[-_MOST_BOXES:-1]):
        opened = text.rfind("\\", 0, joined[0][0])
        between = text[end + 1 : opened]
        if not 0 <= opened - end <= _LONGEST_JOINT or not _JOINT.fullmatch(between):
            break
        joined.insert(0, (start, end))
    return joined[-1][0], ", ".join(text[start:end] for start, end in joined)


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the content of each closed box outside any other."""
    starts = {match.end() for match in _BOX.finditer(text)}
    found: list[tuple[int, int]] = []
    depth = 0
    start = -1
    for match in re.finditer(r"[{}]", text):
        if start < 0 and match.end() in starts:
            start = match.end()
            depth = 1
        elif start >= 0:
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                found.append((start, match.start()))
                start = -1
    return found


def _line(text: str, mark: str) -> tuple[int, str] | None:
    """Return (place, answer) behind the last mark, in its line or the next non-empty one."""
    place = find_after(text, mark, skip=_SKIPPED + ":", most=20)
    if place is None:
        return None
    start, end = place
    line = text[start:end]
    if not line.strip(_SKIPPED):
        rest = text[end:].lstrip()
        if "\n" in rest:
            line = rest[: rest.find("\n")]
        else:
            line = rest
    return start, _stated(line[:_LOOKED_AT].strip(_SKIPPED))


def _stated(line: str) -> str:
    """Return the answer of a line such as "The largest $n$ is 34. I hope it is correct."."""
    end = _SENTENCE_END.search(line)
    if end is None:
        sentence = line
    else:
        sentence = line[: end.start()]
    place = find_after(sentence, "answer is", skip=_SKIPPED + ":", most=20)
    if place is not None:
        sentence = sentence[place[0] : place[1]]
    if read_answer(sentence) is not None:
        return sentence
    return _last_part(sentence) or sentence


def _unmarked(text: str) -> str | None:
    """Return the text after the last "answer is", else the last formula or number."""
    line = _line(text, "answer is")
    if line is None:
        return _last_part(text)
    return line[1]


def _last_part(text: str) -> str | None:
    """Return the last formula of a text, or its last number if it comes later."""
    formulas = list(_FORMULA.finditer(text))
    if formulas and not re.search("[0-9]", text[formulas[-1].end() :]):
        return next(group for group in formulas[-1].groups() if group is not None)
    number = last_number(text)
    if number is None:
        return None
    return f"{number.numerator}/{number.denominator}"


def follows_format(text: str, style: Style, opening: str = "") -> bool:
    r"""Return whether a reply has the form of its style, with a readable answer in it.

    boxed: exactly one `\boxed{}`. answer: the last line begins with `Answer:`, and no other line
    has the mark. r1: see `ttrl.tasks.answers.tagged_answer`, also for `opening`.
    """
    answer = None
    if style == "r1":
        answer = tagged_answer(text, opening)
    elif style == "boxed":
        if text.count("\\boxed{") == 1:
            answer = read_reply(text)
    else:
        last = text.rstrip().rpartition("\n")[2].strip(_SKIPPED)
        if last.lower().startswith("answer:") and text.lower().count("answer:") == 1:
            answer = last[len("answer:") :]
    return answer is not None and bool(answer.strip()) and read_answer(answer) is not None


def write_answer(solution: str, answer: str, style: Style) -> str:
    """Return a reply of a style."""
    if style == "r1":
        return f"<think>{solution}</think>\n<answer>{answer}</answer>"
    return f"{solution}\n" + (f"\\boxed{{{answer}}}" if style == "boxed" else f"Answer: {answer}")
