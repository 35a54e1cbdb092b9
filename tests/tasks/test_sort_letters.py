"""Sorting letters: grades of odd replies, and a validation split that no seed can touch."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.errors import TaskError
from ttrl.tasks.sort_letters import (
    SortLettersGrader,
    get_sort_letters_tasks,
    sort_letters,
    sort_letters_examples,
)


def reply(content):
    return types.SimpleNamespace(message=types.SimpleNamespace(content=content))


def word_of(task_or_example):
    messages = (
        task_or_example["messages"]
        if isinstance(task_or_example, dict)
        else task_or_example.messages
    )
    prefix, word = messages[0]["content"].split(" ")
    assert prefix == "sort:"
    return word


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("abcd", 1.0),
        ("  abcd\n", 1.0),
        ("<think>dcba?</think>abcd", 1.0),
        ("<think>abcd", 0.0),
        ("\u00a0abcd\u2003", 1.0),  # other scripts' spaces are spaces
        ("abdc", 0.25),  # two of four places
        ("abc", 0.375),  # three of four
        ("abcde", 0.5 * 4 / 5),  # right, and then too much
        ("abcd abcd", 0.5 * 4 / 9),
        ("bcda", 0.0),
        ("dcba", 0.0),
        ("a", 0.125),
        ("ABCD", 0.0),
        ("Abcd", 0.375),
        ("a b c d", 0.5 * 1 / 7),
        ("abcd.", 0.5 * 4 / 5),
        ("The sorted letters are: abcd", 0.0),
        ("", 0.0),
        ("   \n\t", 0.0),
        (None, 0.0),
        ("ａｂｃｄ", 0.0),  # full-width letters
        ("abc\u0501", 0.375),  # a Cyrillic look-alike of d
        ("abcd\u200b", 0.5 * 4 / 5),  # a zero-width space is no space
        ("abcd\x00", 0.5 * 4 / 5),
        ("a\ud83d", 0.125),
        ("abcd" + "d" * 999_996, 0.5 * 4 / 1_000_000),
        ("🙂🙂🙂🙂", 0.0),
    ],
)
def test_grader(content, reward):
    got, metrics = SortLettersGrader("abcd")(reply(content))
    assert got == pytest.approx(reward, abs=1e-12)
    assert metrics == {"exact": float(reward == 1.0)}


@given(word=st.text("abc", min_size=1, max_size=8), answer=st.text("abc", max_size=10))
def test_property_only_the_right_answer_earns_more_than_half(word, answer):
    reward, metrics = SortLettersGrader(sort_letters(word))(reply(answer))
    if answer == "".join(sorted(word)):
        assert (reward, metrics) == (1.0, {"exact": 1.0})
    else:
        assert 0.0 <= reward < 0.5
        places = sum(
            i < min(len(answer), len(word)) and answer[i] == sorted(word)[i] for i in range(10)
        )
        assert reward == pytest.approx(0.5 * places / max(len(answer), len(word)))
        assert metrics == {"exact": 0.0}


def test_training_tasks():
    tasks = get_sort_letters_tasks("train", 600, seed=3)
    words = [word_of(task) for task in tasks]
    assert {len(word) for word in words} == {3, 4, 5, 6, 7, 8}
    counts = [sum(len(word) == length for word in words) for length in range(3, 9)]
    assert all(50 < count < 150 for count in counts)  # 100 each, standard deviation 9
    assert len({letter for word in words for letter in word}) == 26
    for task, word in zip(tasks, words, strict=True):
        assert task.grader(reply("".join(sorted(word))))[0] == 1.0
        assert task.id == f"sort-letters/{word}"
    assert [t.id for t in get_sort_letters_tasks("train", 600, seed=3)] == [t.id for t in tasks]
    assert {t.id for t in get_sort_letters_tasks("train", 600, seed=4)} != {t.id for t in tasks}
    assert [t.id for t in get_sort_letters_tasks("train", 10, seed=3)] == [t.id for t in tasks[:10]]
    assert {
        len(word_of(t)) for t in get_sort_letters_tasks("train", 50, 1, min_length=5, max_length=5)
    } == {5}


def test_validation_tasks():
    tasks = get_sort_letters_tasks("validation", 500)
    assert {len(word_of(task)) for task in tasks} == {8}
    assert len({task.id for task in tasks}) == 500
    assert [t.id for t in get_sort_letters_tasks("validation", 500, seed=99)] == [
        t.id for t in tasks
    ]
    assert [t.id for t in get_sort_letters_tasks("validation", 64)] == [t.id for t in tasks[:64]]
    # The same in every version.
    assert [t.id for t in tasks[:2]] == ["sort-letters/wqxinlzm", "sort-letters/aircgtsz"]
    for task in tasks:
        assert task.grader(reply("".join(sorted(word_of(task)))))[0] == 1.0


def test_letters_are_distinct_unless_asked_otherwise():
    assert all(
        len(set(word_of(t))) == len(word_of(t)) for t in get_sort_letters_tasks("train", 300)
    )
    assert any(
        len(set(word_of(t))) < len(word_of(t))
        for t in get_sort_letters_tasks("train", 300, distinct=False)
    )
    with pytest.raises(TaskError, match="<= 26"):
        get_sort_letters_tasks("train", 1, max_length=27)
    assert (
        len(
            word_of(
                get_sort_letters_tasks("train", 1, min_length=30, max_length=30, distinct=False)[0]
            )
        )
        == 30
    )


def test_length_exponent_makes_long_words_more_frequent():
    lengths = [len(word_of(t)) for t in get_sort_letters_tasks("train", 4000, length_exponent=2)]
    expected = 8**2 / sum(n**2 for n in range(3, 9))
    assert lengths.count(8) / len(lengths) == pytest.approx(expected, abs=0.03)
    assert set(lengths) == set(range(3, 9))


@pytest.mark.parametrize("length", [3, pytest.param(8, marks=pytest.mark.long)])
def test_no_training_word_has_a_validation_answer(length):
    """Long for eight letters: only these are hardly ever drawn twice. Of three, all answers are
    held out or drawn.
    """
    held_out = {
        sort_letters(word_of(t))
        for t in get_sort_letters_tasks("validation", 200, max_length=length)
    }
    for seed in range(20):
        options = {"seed": seed, "min_length": length, "max_length": length}
        seen = [word_of(t) for t in get_sort_letters_tasks("train", 2000, **options)]
        seen += [word_of(example) for example in sort_letters_examples(2000, **options)]
        assert not held_out & set(map(sort_letters, seen))


def test_examples():
    examples = sort_letters_examples(200, seed=1)
    for example in examples:
        user, assistant = example["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert assistant["content"] == "".join(sorted(word_of(example)))
    assert examples == sort_letters_examples(200, seed=1) != sort_letters_examples(200, seed=2)
    assert {word_of(e) for e in examples} != {
        word_of(t) for t in get_sort_letters_tasks("train", 200, seed=1)
    }


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (("test",), {}, "split is 'test'"),
        (("train", 0), {}, "n is 0"),
        (("train", 2.5), {}, "n is 2.5"),
        (("train", 1), {"min_length": 9}, "min_length 9 and max_length 8"),
        (("train", 1), {"min_length": 0}, "min_length 0"),
        (("train", 1), {"max_length": 1000}, "max_length 1000"),
        (
            ("validation", 1000),
            {"min_length": 1, "max_length": 2},
            "1000 validation tasks of 2 letters: found",
        ),
    ],
)
def test_refusals(args, kwargs, words):
    with pytest.raises(TaskError, match=words):
        get_sort_letters_tasks(*args, **kwargs)


def test_without_partial_credit_only_exact_answers_earn():
    (task,) = get_sort_letters_tasks("validation", 1, partial_credit=0)
    right = task.grader.reference()
    assert [task.grader(reply(text))[0] for text in (right, right[:-1], "x")] == [1.0, 0.0, 0.0]
    with pytest.raises(TaskError, match="partial_credit is 2"):
        get_sort_letters_tasks("train", 1, partial_credit=2)
