"""Spelling: write a word letter by letter. A model reading tokens has to know their letters.

Words are generated (`ttrl.tasks.words`) or come from your own list; those of the validation split
are held out by a hash.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import after_thinking, find_tagged, last_line, latest, reply_text
from ttrl.tasks.datasets import (
    Source,
    check_count,
    check_name,
    check_share,
    check_span,
    local_path,
    read_text,
)
from ttrl.tasks.task import Choice, Task, question
from ttrl.tasks.words import as_typed, get_words, in_validation, pick

LONGEST = 64
_ASKED = "Spell {}, letter by letter, with hyphens between."
_SEPARATORS = "-,.;:/|_*`\"'!+→[](){}"


@dataclass(frozen=True)
class SpellingGrader:
    """1.0 if the reply's answer is the word's letters, one by one, else partial_credit · share of
    letters in their places.

    The answer is in the last `<answer>` tags, or else in the last non-empty line, after any
    thinking: single letters with spaces, hyphens, commas or points between, in either case. The
    word in one piece is not an answer. The share is of the longer of answer and word, and partial
    credit is at most half of a right answer's reward.
    """

    word: str
    partial_credit: float = 0.0

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1})."""
        letters = read_letters(reply_text(choice))
        if letters == list(self.word):
            return 1.0, {"exact": 1.0}
        right = sum(a == b for a, b in zip(letters, self.word))
        return self.partial_credit * right / max(len(letters), len(self.word)) / 2, {"exact": 0.0}

    def reference(self) -> str:
        return "-".join(self.word)


def read_letters(text: str) -> list[str]:
    """Return the letters of a reply's answer, in lower case; none if it has pieces longer than a
    letter.

    Words before a colon in the same line are left out: "plum: p-l-u-m".
    """
    text = after_thinking(text)
    part = latest(text, find_tagged(text))
    text = (last_line(text) if part is None else part).rpartition(":")[2]
    if len(text) > 8 * LONGEST:
        return []
    text = as_typed(text).lower()
    for separator in _SEPARATORS:
        text = text.replace(separator, " ")
    pieces = text.split()
    if all(len(piece) == 1 and piece.isalpha() for piece in pieces):
        return pieces
    return []


def get_spelling_tasks(
    split: Literal["train", "validation"] = "train",
    n: int = 32,
    seed: int = 0,
    *,
    path: Source | None = None,
    min_length: int = 3,
    max_length: int = 12,
    partial_credit: float = 0.0,
) -> list[Task]:
    """Return tasks to spell `n` words of min_length to max_length letters.

    train: the seed decides, words may come twice. validation: the same for every seed, no two
        alike.
    path: a file of words, one a line; entries with other characters are left out. Without it,
        generated words.
    """
    check_name("split", split, ("train", "validation"), "spelling")
    check_share("partial_credit", partial_credit)
    words = _pick(split, n, seed, path, min_length, max_length)
    return [
        Task(
            question(_ASKED.format(word)),
            SpellingGrader(word, partial_credit),
            id=f"spelling/{word}",
        )
        for word in words
    ]


def _pick(
    split: str, n: int, seed: int, path: Source | None, min_length: int, max_length: int
) -> list[str]:
    check_count(n)
    check_span("length", min_length, max_length, 1, LONGEST)
    if path is None:
        words = get_words(min_length, max_length)
    else:
        words = _read_words(local_path(path), min_length, max_length)
    words = [word for word in words if in_validation("spelling " + word) == (split == "validation")]
    if not words or (split == "validation" and len(words) < n):
        raise TaskError(
            f"{n} {split} tasks of spelling, but there are only {len(words)} words of {min_length} "
            f"to {max_length} letters; ask for fewer"
        )
    rng = random.Random(f"spelling {split} {'' if split == 'validation' else seed}")
    if split == "train":
        return [pick(rng, words) for _ in range(n)]
    order = sorted((rng.random(), word) for word in words)
    return [word for _, word in order[:n]]


def _read_words(path: Path, min_length: int, max_length: int) -> list[str]:
    """Read the words of a file, in lower case, each once. Raises TaskError."""
    words = dict.fromkeys(map(str.strip, as_typed(read_text(path)).lower().split("\n")))
    return [word for word in words if min_length <= len(word) <= max_length and word.isalpha()]
