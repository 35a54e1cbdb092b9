"""Letter counting: "How many r are in strawberry?" → 3. Easy to say, easy to grade, hard for a
model reading tokens.

Every count from 0 to 3 is asked equally often: most letters of most words occur once, and a model
would learn to say 1. Words are generated (see words.py) and held out by a hash of the word: no word
of the validation split is ever in a training task.
"""

import bisect
import functools
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ttrl.errors import TaskError
from ttrl.tasks.answers import after_thinking, reply_text
from ttrl.tasks.datasets import check_count, check_exponent, check_name, check_share, check_span
from ttrl.tasks.numerals import last_number
from ttrl.tasks.task import Choice, Example, Task, question, solved
from ttrl.tasks.words import LONGEST, SHORTEST, get_words, in_validation

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST = 3
"""The largest count asked for."""
_BULLET = re.compile(r"\A\s*- ")
"""A list marker at the start of a reply. A count has no sign."""


@dataclass(frozen=True)
class LetterCountingGrader:
    """1.0 if the last number of the reply, after any thinking, is the count, else `partial_credit`
    / (1 + distance), and 0 without an unambiguous number: "2 or 3", "1.2.3" and "3½" are
    ambiguous.
    """

    expected: int
    partial_credit: float = 0.0

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"exact": 0 or 1})."""
        text = after_thinking(reply_text(choice))
        answer = last_number(_BULLET.sub("", text))
        if answer == self.expected:
            return 1.0, {"exact": 1.0}
        if answer is None:
            reward = 0.0
        else:
            reward = self.partial_credit / float(1 + abs(answer - self.expected))
        return reward, {"exact": 0.0}

    def reference(self) -> str:
        return str(self.expected)


def get_letter_counting_tasks(
    split: Literal["train", "validation"] = "train",
    n: int = 32,
    seed: int = 0,
    *,
    min_length: int = 3,
    max_length: int = 12,
    length_exponent: float = 0.0,
    partial_credit: float = 0.0,
) -> list[Task]:
    """Return `n` questions about words of min_length to max_length letters, the counts 0 to 3
    equally often.

    train: within a count, with probabilities in proportion to (letters of the word) **
        length_exponent; the seed decides.
    validation: the same for every seed, no two alike, so the counts are balanced only as far as
        there are enough of each; a larger `n` begins with the same ones.
    partial_credit: the reward of a wrong number is at most half of it; 0 <= partial_credit <= 1.

    Raises TaskError for an unknown split, impossible lengths, or more validation tasks than there
    are.
    """
    check_name("split", split, ("train", "validation"), "letter_counting")
    check_share("partial_credit", partial_credit)
    check_span("length", min_length, max_length, SHORTEST, LONGEST)
    check_exponent("length_exponent", length_exponent)
    if split == "train":
        questions = _draw(
            random.Random(f"letter counting, train, {seed}"),
            n,
            False,
            min_length,
            max_length,
            length_exponent=length_exponent,
        )
    else:
        questions = _validation_questions(n, min_length, max_length)
    return [
        Task(
            question(_asked(*one)),
            LetterCountingGrader(str.count(*one), partial_credit),
            f"letter-counting/{'/'.join(one)}",
        )
        for one in questions
    ]


def spelled_count(word: str, letter: str) -> str:
    """Return the count aloud while spelling: ("strawberry", "r") → "str1awber2r3y: 3"."""
    counter = itertools.count(1)
    return (
        "".join(f"{x}{next(counter)}" if x == letter else x for x in word)
        + f": {word.count(letter)}"
    )


def letter_counting_examples(
    n: int,
    seed: int = 0,
    *,
    min_length: int = 3,
    max_length: int = 12,
    spelled: bool = False,
    count_weights: Sequence[float] = (1.0,) * (MOST + 1),
) -> list[Example]:
    """Return `n` answered training questions for a supervised warm start, {"messages": [user,
    assistant]}; no validation words.

    The answer is only the number, or with `spelled` the text of `spelled_count`, much easier to
    learn: aloud, a model copies letters and remembers one number. `count_weights`: the relative
    frequencies of counts 0, 1, 2, 3.
    """
    questions = _draw(
        random.Random(f"letter counting, examples, {seed}"),
        n,
        False,
        min_length,
        max_length,
        count_weights=count_weights,
    )
    answer = spelled_count if spelled else str.count
    return [solved(_asked(*one), str(answer(*one))) for one in questions]


def _asked(word: str, letter: str) -> str:
    return f"How many {letter} are in {word}?"


@functools.cache
def _pool(held_out: bool, min_length: int, max_length: int) -> list[list[tuple[str, str]]]:
    """Return, for each count, all (word, letter) of a split; letters missing from a word have count
    0.
    """
    pool: list[list[tuple[str, str]]] = [[] for _ in range(MOST + 1)]
    for word in get_words(min_length, max_length):
        if in_validation("letter counting " + word) == held_out:
            for letter in LETTERS:
                count = word.count(letter)
                if count <= MOST:
                    pool[count].append((word, letter))
    return [pairs for pairs in pool if pairs]


@functools.cache
def _cumulative_weights(
    held_out: bool, min_length: int, max_length: int, length_exponent: float
) -> list[list[float]]:
    """Return, for each count of the pool, the running sum of its questions' weights."""
    return [
        list(itertools.accumulate(float(len(word)) ** length_exponent for word, _ in pairs))
        for pairs in _pool(held_out, min_length, max_length)
    ]


def _draw(
    rng: random.Random,
    n: int,
    held_out: bool,
    min_length: int,
    max_length: int,
    *,
    length_exponent: float = 0.0,
    count_weights: Sequence[float] = (1.0,) * (MOST + 1),
) -> list[tuple[str, str]]:
    check_count(n)
    if len(count_weights) != MOST + 1 or min(count_weights) < 0 or count_weights[0] <= 0:
        raise TaskError(
            f"count_weights is {count_weights!r}; give {MOST + 1} numbers, none below 0 and the "
            "first above it"
        )
    pool = _pool(held_out, min_length, max_length)
    weights = _cumulative_weights(held_out, min_length, max_length, length_exponent)
    counts = list(itertools.accumulate(count_weights[: len(pool)]))
    questions = []
    for _ in range(n):
        count = _pick_weighted(rng, counts)
        questions.append(pool[count][_pick_weighted(rng, weights[count])])
    return questions


def _pick_weighted(rng: random.Random, cumulative: Sequence[float]) -> int:
    """Return an index, with probabilities in proportion to the steps of `cumulative`."""
    place = bisect.bisect_right(cumulative, rng.random() * cumulative[-1])
    # A product rounded up to the sum itself would be past the end.
    return min(place, len(cumulative) - 1)


def _validation_questions(n: int, min_length: int, max_length: int) -> list[tuple[str, str]]:
    rng = random.Random(f"letter counting, validation, {min_length}, {max_length}")
    # Enough to leave n distinct ones.
    questions = dict.fromkeys(_draw(rng, n * 20 if n > 0 else n, True, min_length, max_length))
    if len(questions) < n:
        raise TaskError(
            f"{n} validation questions, but there are words for only {len(questions)}; ask for "
            "fewer, or for longer words"
        )
    return list(questions)[:n]
