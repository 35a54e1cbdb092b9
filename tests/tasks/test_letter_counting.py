"""Letter counting: grades of odd replies, balanced counts, and validation words that no training
task knows.
"""

import re
import types
from collections import Counter

import pytest

from ttrl.errors import TaskError
from ttrl.tasks.letter_counting import (
    LetterCountingGrader,
    get_letter_counting_tasks,
    letter_counting_examples,
    spelled_count,
)


def reply(content):
    return types.SimpleNamespace(message=types.SimpleNamespace(content=content))


def question(messages):
    return re.fullmatch(r"How many ([a-z]) are in ([a-z]+)\?", messages[0]["content"]).groups()


@pytest.mark.parametrize(
    ("content", "right"),
    [
        ("3", True),
        (" 3\n", True),
        ("3.", True),
        ("3.0", True),
        ("03", True),
        ("**3**", True),
        ("There are 3 r's in strawberry.", True),
        ("s-t-r (1) a-w-b-e-r (2) r (3) y: 3", True),
        ("1 + 2 = 3!", True),
        ("<answer>3</answer>", True),
        ("<think>perhaps 2</think>3", True),
        ("<think>perhaps 3", False),
        ("<think>3</think>", False),
        ("THREE", False),
        ("three", False),
        ("2", False),
        ("-3", False),
        ("3.5", False),
        ("33", False),
        ("3, or maybe 4", False),
        ("", False),
        (None, False),
        ("\n\n", False),
        ("³", False),  # str.isdigit says yes
        ("３", True),  # full-width
        ("٣", True),  # Arabic-Indic
        ("1/3", False),
        ("6/2", True),
        (".3", False),
        ("3½", False),
        ("1.2.3", False),
        ("3.00000000000000001", False),  # a float could not tell
        ("2 or 3", False),
        ("3 to 4", False),
        ("1, 2, 3", True),
        ("r1, r2, r3", True),
        ("2-3", False),
        ("2–3", False),
        ("Found: 2\n- 3", True),
        ("str1awber2r3y: 3", True),
        ("10-7=3", True),
        ("- 3", True),
        ("3³", False),
        ("3\n\nThey are the letters 3, 8 and 9.", False),
        ("Ⅲ", False),
        ("r r r", False),
        ("9" * 100_000, False),
        ("3 " + "x" * 1_000_000, True),
        ("." * 100_000 + "3", False),
        ("1." * 100_000 + "3", False),
        ("-" * 100_000 + " 3", True),
        ("1 " * 100_000 + "3", True),
        ("0" * 299 + "3", False),
    ],
)
def test_grader(content, right):
    assert LetterCountingGrader(3)(reply(content)) == (float(right), {"exact": float(right)})


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("3", 1.0),
        ("2", 0.2),
        ("4", 0.2),
        ("0", 0.1),
        ("1.5", 0.16),
        ("none", 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_partial_credit(content, reward):
    assert LetterCountingGrader(3, partial_credit=0.4)(reply(content))[0] == pytest.approx(reward)


def test_tasks_ask_every_count_equally_often():
    tasks = get_letter_counting_tasks("train", 2000, seed=1)
    counts = Counter()
    for task in tasks:
        letter, word = question(task.messages)
        count = len(re.findall(letter, word))
        counts[count] += 1
        assert task.grader(reply(str(count))) == (1.0, {"exact": 1.0})
        assert task.grader(reply(str(count + 1)))[0] == 0.0
        assert 3 <= len(word) <= 12
    assert set(counts) == {0, 1, 2, 3}
    # 500 each, six standard deviations of 19.
    assert all(380 < count < 620 for count in counts.values())
    assert [t.id for t in tasks] == [t.id for t in get_letter_counting_tasks("train", 2000, seed=1)]
    assert [t.id for t in tasks] != [t.id for t in get_letter_counting_tasks("train", 2000, seed=2)]


def test_validation_words_are_never_trained():
    validation = get_letter_counting_tasks("validation", 300)
    assert len({task.id for task in validation}) == 300
    assert [t.id for t in get_letter_counting_tasks("validation", 300, seed=5)] == [
        t.id for t in validation
    ]
    assert [t.id for t in get_letter_counting_tasks("validation", 20)] == [
        t.id for t in validation[:20]
    ]
    held_out = {question(task.messages)[1] for task in validation}
    for lengths in ({}, {"min_length": 5, "max_length": 14}):
        for seed in range(5):
            seen = [
                question(t.messages)[1]
                for t in get_letter_counting_tasks("train", 2000, seed, **lengths)
            ]
            seen += [
                question(e["messages"])[1] for e in letter_counting_examples(2000, seed, **lengths)
            ]
            assert len(set(seen)) > 1000
            assert not held_out & set(seen)


def test_examples():
    examples = letter_counting_examples(300, seed=1)
    for example in examples:
        letter, word = question(example["messages"])
        assert example["messages"][1] == {"role": "assistant", "content": str(word.count(letter))}
    assert (
        examples == letter_counting_examples(300, seed=1) != letter_counting_examples(300, seed=2)
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (("test",), {}, "split is 'test'"),
        (("train", 0), {}, "n is 0"),
        (("validation", -1), {}, "n is -1"),
        (("train", 1), {"partial_credit": 2}, "partial_credit is 2"),
        (
            ("validation", 10_000),
            {"min_length": 3, "max_length": 3},
            "10000 validation questions, but there are words for",
        ),
    ],
)
def test_refusals(args, kwargs, words):
    with pytest.raises(TaskError, match=words):
        get_letter_counting_tasks(*args, **kwargs)


def test_partial_credit_reaches_the_graders():
    [task] = get_letter_counting_tasks("train", 1, partial_credit=0.5)
    letter, word = question(task.messages)
    assert task.grader(reply(str(word.count(letter) + 1)))[0] == 0.25


@pytest.mark.parametrize(
    ("word", "letter", "aloud"),
    [
        ("strawberry", "r", "str1awber2r3y: 3"),
        ("plum", "x", "plum: 0"),
        ("eel", "e", "e1e2l: 2"),
        ("oak", "k", "oak1: 1"),
    ],
)
def test_counting_aloud(word, letter, aloud):
    assert spelled_count(word, letter) == aloud


def test_spelled_examples():
    spelled = letter_counting_examples(300, seed=1, spelled=True)
    plain = letter_counting_examples(300, seed=1)
    assert [e["messages"][0] for e in spelled] == [e["messages"][0] for e in plain]
    for example in spelled:
        letter, word = question(example["messages"])
        content = example["messages"][1]["content"]
        assert re.sub(r"[0-9]", "", content) == f"{word}: "
        assert LetterCountingGrader(word.count(letter))(reply(content))[0] == 1.0


def test_count_weights():
    examples = letter_counting_examples(4000, count_weights=(4, 3, 1, 0))
    counts = Counter(example["messages"][1]["content"] for example in examples)
    assert set(counts) == {"0", "1", "2"}
    for count, expected in (("0", 2000), ("1", 1500), ("2", 500)):
        # Six standard deviations of at most 32.
        assert counts[count] == pytest.approx(expected, abs=190)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 1, -1, 1), (0, 1, 1, 1)])
def test_impossible_count_weights(weights):
    with pytest.raises(TaskError, match=r"count_weights is .*give 4 numbers"):
        letter_counting_examples(10, count_weights=weights)


def test_length_exponent_weighs_words_within_a_count():
    def lengths(exponent):
        found = {0: Counter(), 1: Counter(), 2: Counter(), 3: Counter()}
        for task in get_letter_counting_tasks(
            "train", 8000, seed=1, min_length=4, max_length=8, length_exponent=exponent
        ):
            letter, word = question(task.messages)
            found[word.count(letter)][len(word)] += 1
        return found

    even, weighted = lengths(0.0), lengths(2.0)
    for count in range(4):
        # Six standard deviations of 39.
        assert sum(weighted[count].values()) == pytest.approx(2000, abs=250)
    # Enough of each length to compare: eight letters are drawn four times as often as four.
    for count in (0, 1):
        odds = (weighted[count][8] / weighted[count][4]) / (even[count][8] / even[count][4])
        assert 2.8 < odds < 5.7  # 4; the logarithm has a standard deviation of about 0.1


def test_references_earn_all(reply):
    for task in get_letter_counting_tasks("train", 5):
        reward, metrics = task.grader(reply(task.grader.reference()))
        assert (reward, metrics["exact"]) == (1.0, 1.0)
