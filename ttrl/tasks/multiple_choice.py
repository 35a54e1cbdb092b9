"""Multiple choice: MMLU (Hendrycks et al. 2021, arXiv 2009.03300) and ARC-Easy and ARC-Challenge
(Clark et al. 2018, arXiv 1803.05457). The answer is a letter.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import (
    after_thinking,
    ascii_lower,
    find_after,
    find_boxed,
    find_tagged,
    latest,
    reply_text,
)
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Rows,
    Source,
    check_choice,
    check_name,
    is_file,
    list_field,
    load_rows,
    select,
    text_field,
)
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import as_typed, comparable

LETTERS = "ABCDEFGHIJ"
Style = Literal["letter", "reasoning", "r1"]

INSTRUCTIONS: dict[str, str] = {
    "letter": "Answer with the letter of the right option alone.",
    "reasoning": (
        "Think step by step. End your reply with the line Answer: X, where X is the letter of "
        "the right option."
    ),
    "r1": "Write your reasoning in <think> </think> tags, then the letter of the right option in "
    "<answer> </answer> tags.",
}

_MARKS = ("answer is", "answer:", "answer is:", "answer =")
_AROUND_MARKS = " \t\r\n*_`~#>"
_LONGEST = 400
"""Limit on the characters read of an answer."""
_FULL_WIDTH = (
    {0xFF21 + i: 65 + i for i in range(26)}
    | {0xFF41 + i: 97 + i for i in range(26)}
    | str.maketrans("（）：．。", "():..")
)
_OPENING = " \t\r\n*_`~\"'“‘([{<$:=-–—>#\\"
# Another option after the letter: "B or C", "B, or maybe C", "B (or C)", "B, C", "B/C", "B C"; with
# nothing after it also "B-C", "(B)(C)", "B: C": these could begin an option's text. Of "(A) text"
# only the letter counts.
_ANOTHER = re.compile(
    r"[\s)(\].*`\"']{0,4}(?:[,;]?\s{0,3}(?i:or|and|oder|und|ou|et)\b"
    r"(?:\s(?:maybe|perhaps|possibly|also|even)\b)?|[,;/&+|])"
    r"[\s(\[*`\"']{0,4}([A-J])(?![A-Za-z'’])"
    r"|[\s()\[\].:~=\\–—-]{1,4}([A-J])(?:[\s()\[\].:~=\\–—-]{1,4}[A-J])*[\s).\]]{0,4}$"
)
# The same after an option's text: "B. London or C. Rome"; the other option's text must follow.
_ANOTHER_LATER = re.compile(
    r"(?:\b(?i:or|and|oder|und|ou|et)|[,;/&|])\s{0,3}[(\[*]{0,2}([A-J])[.):\]]"
)


@dataclass(frozen=True)
class MultipleChoiceQuestion:
    """One row; `answer` is the index of the right option."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class MultipleChoiceGrader:
    r"""1.0 if the letter of the reply's answer is the right one, else 0.

    The answer is the last marked one, after any thinking: in `<answer>` tags, in `\boxed{}`, after
    "answer is" or "Answer:". Without a mark, it is the first line if it begins with a separate
    letter ("B", "(B)", "B. Paris"), else the last line if it does; options only repeated, line by
    line, do not count. An option's whole text counts as its letter. Two letters are no answer.
    """

    answer: int
    choices: tuple[str, ...]

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"answered": 1 if a letter could be read})."""
        given = read_choice(reply_text(choice), self.choices)
        return float(given == self.answer), {"answered": float(given is not None)}

    def reference(self) -> str:
        return f"Answer: {LETTERS[self.answer]}"


def read_choice(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the option chosen by a reply; None for no option, or several."""
    text = as_typed(after_thinking(text)).translate(_FULL_WIDTH)
    part = _marked(text)
    if part is not None:
        return _option(part, choices)
    text = _without_list(text.strip(), choices).strip()
    first = text.partition("\n")[0]
    last = text[text.rfind("\n") + 1 :]
    found = _option(first, choices)
    if first == last:
        return found
    if found is None:
        return _option(last, choices)
    if len(_plain(last)) == 1 and _option(last, choices) not in (None, found):
        return None
    return found


def _without_list(text: str, choices: Sequence[str]) -> str:
    """Return the text without its copy of the question's options, if it repeats two or more in
    adjacent lines.
    """
    lines = text.split("\n")
    repeated = [
        next(
            (
                place
                for place, option in enumerate(choices)
                if _is_listed(line, LETTERS[place], option)
            ),
            None,
        )
        for line in lines
    ]
    around = [None, *repeated, None]
    kept = []
    for number, line in enumerate(lines):
        place = repeated[number]
        neighbours = (around[number], around[number + 2])
        if place is None or all(other in (None, place) for other in neighbours):
            kept.append(line)
    return "\n".join(kept)


def _is_listed(line: str, letter: str, option: str) -> bool:
    """Return whether a line is "B. Paris" for the option Paris of the letter B."""
    if len(line) <= _LONGEST:
        line = line.strip(" \t\r*_([-")
    else:
        line = ""
    return (
        line[:1].upper() == letter
        and line[1:2] in (".", ")", ":")
        and _plain(line[2:]) == _plain(option)
    )


def _marked(text: str) -> str | None:
    text = text[: _end_of_answers(text)]
    # The letter may stand on the next line.
    marked = (find_after(text, mark, skip=_OPENING, most=_LONGEST) for mark in _MARKS)
    return latest(text, find_tagged(text), find_boxed(text), *marked)


def _end_of_answers(text: str) -> int:
    """Return the end of a text without the marks at its end: marks without an answer behind them
    come from a reply cut off there."""
    lower = ascii_lower(text)
    end = before = len(text)
    while True:
        while end and text[end - 1] in _AROUND_MARKS:
            end -= 1
        mark = next((mark for mark in _MARKS if lower.endswith(mark, 0, end)), None)
        if mark is None:
            return before
        end -= len(mark)
        before = end


def _option(text: str, choices: Sequence[str]) -> int | None:
    """Return the option meant by "B", "(b)", "**B. Paris**", "option B", "\\text{B}" or "Paris"."""
    text = text[:_LONGEST].strip()
    same = [place for place, option in enumerate(choices) if _plain(option) == _plain(text)]
    if same and _plain(text) not in map(str.lower, LETTERS):
        if len(same) == 1:
            return same[0]
        return None
    bracketed = text.lstrip("*_`\"' ").startswith(("(", "["))
    text = text.lstrip(_OPENING)
    for word in ("text{", "textbf{", "mathrm{", "option", "choice", "letter"):
        if ascii_lower(text[: len(word)]) == word:
            text = text[len(word) :].lstrip(_OPENING)
    letter = text[:1]
    rest = text[1:]
    if (
        letter.upper() not in LETTERS[: len(choices)]
        or not letter
        or (rest[:1].isalnum() or (rest[:1] in ("'", "’", "_") and rest[1:2].isalnum()))
    ):
        return None
    # "" is in every text: the letter may be the last character.
    ended = rest.strip("*_`\"' $\r\n")[:1] in ").:]},-–—<;/"
    if letter.islower() and not (bracketed or ended):
        return None  # "a magnet": a word
    place = LETTERS.index(letter.upper())
    if not ended and letter in "AI" and _plain(choices[place])[:20] != _plain(rest)[:20]:
        return None  # "A magnet", "I think"
    other = _ANOTHER.match(rest)
    if other is not None:
        second = other[1] or other[2]
    else:
        second = letter.upper()
    if second != letter.upper() and second in LETTERS[: len(choices)]:
        return None
    if any(_is_another(match, rest, choices, place) for match in _ANOTHER_LATER.finditer(rest)):
        return None
    return place


def _is_another(match: "re.Match[str]", rest: str, choices: Sequence[str], place: int) -> bool:
    """Return whether a letter after an answer is another option with its text."""
    other = LETTERS.index(match[1])
    if other == place or other >= len(choices):
        return False
    option = _plain(choices[other])[:40]
    return bool(option) and _plain(rest[match.end() : match.end() + 60]).startswith(option)


def _plain(text: str) -> str:
    return comparable(text).strip(" .*_`\"'")


def get_mmlu_tasks(
    split: Literal["train", "validation", "test"] = "test",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "cais/mmlu",
    style: Style = "letter",
    subjects: Sequence[str] = (),
) -> list[Task]:
    """Return `n` questions of MMLU (None: all of the split). subjects: only these, as the rows name
    them ("abstract_algebra").

    test and validation are MMLU's own; train its auxiliary_train. Of a single file, test is all
    rows, and train and validation are parts of them. The rest as `get_arc_tasks`.
    """
    files = {
        "train": ("auxiliary_train", "train"),
        "validation": ("validation", "val"),
        "test": ("test",),
    }
    return _tasks("mmlu", split, n, seed, path, "all", files, style, subjects)


def get_arc_tasks(
    split: Literal["train", "validation", "test"] = "test",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source = "allenai/ai2_arc",
    challenge: bool = True,
    style: Style = "letter",
) -> list[Task]:
    """Return `n` questions of ARC-Challenge, or of ARC-Easy unless `challenge` (None: all of the
    split), each once.

    In train the seed decides selection and order; the other splits are the same for every seed.
    path: a folder with a file for each split, an id on the Hugging Face hub, or a single file: then
    test is all of its rows, and
        train and validation are parts of them (one in ten is for validation, by a hash of the
        question). Rows have "question", "choices" (a list of texts, or {"text": [...], "label":
        [...]}), and "answer" (its place from 0, or its letter) or "answerKey".
    style: "letter" (only the letter), "reasoning" (its last line is "Answer: X"), "r1" (think and
        answer tags).
    """
    files = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}
    return _tasks(
        "arc", split, n, seed, path, "ARC-Challenge" if challenge else "ARC-Easy", files, style, ()
    )


def _tasks(
    what: str,
    split: str,
    n: int | None,
    seed: int,
    path: Source,
    config: str,
    files: dict[str, tuple[str, ...]],
    style: str,
    subjects: Sequence[str],
) -> list[Task]:
    check_name("split", split, files, what)
    check_name("style", style, INSTRUCTIONS, what)
    check_choice("subjects", subjects)
    rows = load_rows(
        path, lambda row: (row.get("subject"), parse_row(row)), splits=files[split], config=config
    )
    there = {subject for subject, _ in rows}
    missing = [subject for subject in subjects if subject not in there]
    if missing:
        raise TaskError(
            f"{what}: no questions of {', '.join(map(str, missing))}; there are "
            f"{', '.join(sorted(map(str, there)))}"
        )
    asked = rows.where(lambda row: not subjects or row[0] in subjects)
    chosen = select(
        Rows([one for _, one in asked], asked.places),
        _key,
        split,
        n,
        seed,
        what,
        held_out=is_file(path) and split != "test",
        answer=lambda one: LETTERS[one.answer],
    )
    return [
        Task(
            question(write_prompt(one, style)),
            MultipleChoiceGrader(one.answer, one.choices),
            id=f"{what}/{one.id}" if one.id else "",
        )
        for one in chosen
    ]


def _key(question: MultipleChoiceQuestion) -> str:
    return "\n".join((question.question, *question.choices))


def write_prompt(question: MultipleChoiceQuestion, style: str) -> str:
    options = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, question.choices))
    return f"{question.question}\n\n{options}\n\n{INSTRUCTIONS[style]}"


def parse_row(row: Row) -> MultipleChoiceQuestion:
    """Read a row as `get_arc_tasks` describes it. Raises RowError."""
    choices: Any = row.get("choices")
    labels: list[str] = []
    if isinstance(choices, dict):
        labels = [str(label) for label in choices.get("label", [])]
        choices = choices.get("text")
    else:
        choices = list_field(row, "choices")
    if (
        not isinstance(choices, list)
        or not 2 <= len(choices) <= len(LETTERS)
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise RowError(
            f"choices is {choices!r:.120}; it must be a list of 2 to {len(LETTERS)} texts"
        )
    given = row.get("answer", row.get("answerKey"))
    labels = labels or list(LETTERS[: len(choices)])
    if len(labels) != len(choices):
        raise RowError(f"{len(choices)} choices with {len(labels)} labels")
    place = given if type(given) is int else labels.index(given) if given in labels else None
    if place is None and isinstance(given, str) and re.fullmatch("[0-9]", given, re.ASCII):
        place = int(given)
    if place is None or not 0 <= place < len(choices):
        raise RowError(
            f"answer is {given!r}; it must be the place of one of {len(choices)} choices, from "
            f"0, or one of {', '.join(labels)}"
        )
    return MultipleChoiceQuestion(
        str(row.get("id", "")), text_field(row, "question").strip(), tuple(choices), place
    )
