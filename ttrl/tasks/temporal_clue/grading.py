"""Grade temporal-clue: read the lettered answer lines of a reply.

An answer line is a letter, a full stop (or `)` or `:`) and a value: `A. Miss Violet`. The grader
forgives upper and lower case, `<answer>` tags, bold, italics, code and quotation marks, list marks
before the letter, white space, punctuation after the value, variants in typing a word
(`ttrl.tasks.words.comparable`) and a time (`1:00 am` is `01:00 AM`). For each letter the last such
line after any thinking counts, right or wrong.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.answers import after_thinking, place_in_content, reply_text
from ttrl.tasks.task import Choice
from ttrl.tasks.words import as_typed, comparable
from ttrl.text import is_number, short

_MARKS = " \t*_`~\"'«»"
_BEFORE = _MARKS + "#>-+•·([|"
_AFTER = _MARKS + ".,;:!?|\\)]"
_LONGEST_VALUE = 200  # characters of a possible answer line; no name is near it
# Anchored at both ends of a short text, without neighbours matching the same: linear time.
_TIME = re.compile(r"([0-9]{1,2})[:.]([0-9]{2}) ?([ap])\.?m\.?")


def read_answers(reply: str) -> dict[str, str]:
    """Return the normalised values of answer lines by their letters (A to Z): {"A": "miss violet",
    "D": "11:30 pm"}.
    """
    return {letter: value for letter, value, _ in _answer_lines(reply)}


def _answer_lines(reply: str) -> Iterator[tuple[str, str, int]]:
    """Yield (letter, normalised value, end of the line in the reply) of each answer line."""
    end = 0
    for tag in ("<answer>", "</answer>"):
        reply = reply.replace(tag, "\n".ljust(len(tag)))
    for whole in reply.splitlines(keepends=True):
        end += len(whole)
        line = whole.strip()
        if not line or len(line) > _LONGEST_VALUE:
            continue
        text = as_typed(unicodedata.normalize("NFKC", line)).lstrip(_BEFORE)
        letter = text[:1].upper()
        if not ("A" <= letter <= "Z"):
            continue
        rest = text[1:].lstrip(_MARKS)
        if not rest or rest[0] not in ".):":
            continue
        value = normalise(rest[1:].lstrip(_MARKS + ".):"))
        if value:
            yield letter, value, end - len(whole) + len(whole.rstrip())


def normalise(value: str) -> str:
    """Return the common form of equal answers: "**01:00 A.M.**" and "1:00 am" → "1:00 am"."""
    text = comparable(unicodedata.normalize("NFKC", value)).lstrip(_BEFORE).rstrip(_AFTER)
    match = _TIME.fullmatch(text)
    if match:
        return f"{int(match[1])}:{match[2]} {match[3]}m"
    return text


@dataclass(frozen=True)
class TemporalClueGrader:
    """reward = accuracy ** power, with accuracy = right answers / questions."""

    solution: Mapping[str, str]
    """Letters and their right values, as in the prompt: {"A": "Miss Violet", ...}."""
    power: float = 1.0

    def __post_init__(self) -> None:
        if not self.solution:
            raise TaskError("temporal-clue: the solution is empty; give a value for each letter")
        for letter, value in self.solution.items():
            if (
                len(letter) != 1
                or not "A" <= letter <= "Z"
                or not normalise(value)
                or len(value) > _LONGEST_VALUE // 2
            ):
                raise TaskError(
                    f"temporal-clue: the solution has {letter!r}: {value!r}; letters are A to Z, "
                    "values short texts"
                )
        if not is_number(self.power) or self.power <= 0.0:
            raise TaskError(
                f"temporal-clue: power is {short(self.power, 80)}; give a number above 0"
            )

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"accuracy": ..., "solved": 0 or 1, "answered": share of the letters with
        an answer line}), and the end of the last answer (`ttrl.records.ANSWER_END`)."""
        given = after_thinking(reply_text(choice))
        lines = [line for line in _answer_lines(given) if line[0] in self.solution]
        answers = {letter: value for letter, value, _ in lines}
        right = sum(
            answers.get(letter) == normalise(value) for letter, value in self.solution.items()
        )
        accuracy = right / len(self.solution)
        answered = sum(letter in answers for letter in self.solution) / len(self.solution)
        metrics = {"accuracy": accuracy, "solved": float(accuracy == 1.0), "answered": answered}
        if lines:
            metrics[ANSWER_END] = place_in_content(choice, given, lines[-1][2])
        return accuracy**self.power, metrics

    def reference(self) -> str:
        return "\n".join(f"{letter}. {value}" for letter, value in self.solution.items())
