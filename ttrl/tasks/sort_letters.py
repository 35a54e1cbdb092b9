"""Sorting letters: `sort: dcba` → `abcd`. The smallest task with a slope: every letter in its place
earns something.

Held out are whole sets of letters, by a hash of the sorted letters: no training word, with any
seed, has the same answer as a validation word, and none the same letters in the same order.
"""

import random
from dataclasses import dataclass
from typing import Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import after_thinking, reply_text
from ttrl.tasks.datasets import check_count, check_exponent, check_name, check_share, check_span
from ttrl.tasks.task import Choice, Example, Task, question, solved
from ttrl.tasks.words import in_validation, pick

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 64


def sort_letters(word: str) -> str:
    return "".join(sorted(word))


@dataclass(frozen=True)
class SortLettersGrader:
    """1.0 for exactly the sorted letters (spaces around them and thinking before them are
    forgiven), else partial_credit · share of right places.

    The share is of the longer of answer and expected answer: neither a short nor a long answer
    pays.
    """

    expected: str
    partial_credit: float = 0.5

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1})."""
        answer = after_thinking(reply_text(choice)).strip()
        if answer == self.expected:
            return 1.0, {"exact": 1.0}
        # The shorter one ends it.
        right = sum(given == wanted for given, wanted in zip(answer, self.expected))
        return self.partial_credit * right / max(len(answer), len(self.expected)), {"exact": 0.0}

    def reference(self) -> str:
        return self.expected


def get_sort_letters_tasks(
    split: Literal["train", "validation"] = "train",
    n: int = 32,
    seed: int = 0,
    *,
    min_length: int = 3,
    max_length: int = 8,
    length_exponent: float = 0.0,
    distinct: bool = True,
    partial_credit: float = 0.5,
) -> list[Task]:
    """Return `n` tasks of random lower-case letters; `distinct`: no letter twice in a word, much
    easier to learn.

    train: lengths from min_length to max_length, with probabilities in proportion to length **
        length_exponent; the seed decides.
    validation: max_length letters each, the same for every seed, no two alike; a larger `n` begins
        with the same ones.
    partial_credit: of the reward, for a share of right places; 0 rewards only exact answers.

    Raises TaskError for an unknown split, impossible lengths, or more validation tasks than there
    are.
    """
    check_name("split", split, ("train", "validation"), "sort_letters")
    check_share("partial_credit", partial_credit)
    check_exponent("length_exponent", length_exponent)
    _check(n, min_length, max_length, distinct)
    if split == "train":
        rng = random.Random(f"sort letters, train, {seed}")
        words = _train_words(rng, n, min_length, max_length, length_exponent, distinct)
    else:
        words = _validation_words(n, max_length, distinct)
    return [
        Task(
            question(f"sort: {word}"),
            SortLettersGrader(sort_letters(word), partial_credit),
            id=f"sort-letters/{word}",
        )
        for word in words
    ]


def sort_letters_examples(
    n: int, seed: int = 0, *, min_length: int = 3, max_length: int = 8, distinct: bool = True
) -> list[Example]:
    """Return `n` solved training words for a supervised warm start, {"messages": [user,
    assistant]}; no validation words.
    """
    _check(n, min_length, max_length, distinct)
    words = _train_words(
        random.Random(f"sort letters, examples, {seed}"), n, min_length, max_length, 0.0, distinct
    )
    return [solved(f"sort: {word}", sort_letters(word)) for word in words]


def _check(n: int, min_length: int, max_length: int, distinct: bool) -> None:
    check_count(n)
    check_span("length", min_length, max_length, 1, len(LETTERS) if distinct else LONGEST)


def _is_held_out(word: str) -> bool:
    return in_validation("sort letters " + sort_letters(word))


def _random_word(rng: random.Random, length: int, distinct: bool) -> str:
    letters = list(LETTERS)
    chosen = []
    for _ in range(length):
        chosen.append(pick(rng, letters))
        if distinct:
            letters.remove(chosen[-1])
    return "".join(chosen)


def _train_words(
    rng: random.Random,
    n: int,
    min_length: int,
    max_length: int,
    length_exponent: float,
    distinct: bool,
) -> list[str]:
    lengths = range(min_length, max_length + 1)
    weights = [length**length_exponent for length in lengths]
    words: list[str] = []
    while len(words) < n:
        word = _random_word(rng, rng.choices(lengths, weights)[0], distinct)
        if not _is_held_out(word):
            words.append(word)
    return words


def _validation_words(n: int, length: int, distinct: bool) -> list[str]:
    rng = random.Random(f"sort letters, validation, {length}")
    words: dict[str, None] = {}
    # One word in ten is held out, so only words of a few letters run out.
    for _ in range(100 * n + 1000):
        word = _random_word(rng, length, distinct)
        if _is_held_out(word):
            words[word] = None
            if len(words) == n:
                return list(words)
    raise TaskError(
        f"{n} validation tasks of {length} letters: found {len(words)}; ask for fewer or for "
        "longer words"
    )
