"""Structured output: the replies that are the object that was asked for, and all that only seem to
be.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion import Choice
from support.chat_server import choice as served_choice

from ttrl.errors import TaskError
from ttrl.tasks.structured_output import (
    LONGEST,
    StructuredOutputGrader,
    get_structured_output_tasks,
    read_object,
)

RECORD = {"name": "Ada", "age": 36, "city": "Paris"}
RIGHT = json.dumps(RECORD)


def reply(text):
    return Choice.model_validate(served_choice(0, text))


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        (RIGHT, 1.0, 1.0),
        ("\n  " + json.dumps(RECORD, indent=2) + "\n", 1.0, 1.0),
        ('{"city": "Paris", "name": "Ada", "age": 36}', 1.0, 1.0),
        (f"<think>{{}}</think>{RIGHT}", 1.0, 1.0),
        (f"```json\n{RIGHT}\n```", 0.45, 1.0),
        (f"Here you are: {RIGHT} Anything else?", 0.45, 1.0),
        ('{"name": "ada", "age": "36", "city": " Paris "}', 0.55, 1.0),
        ('{"name": "Ada", "age": 36}', 0.1 + 0.45 * 2 / 3, 0.1 + 0.45 * 2 / 3),
        (
            '{"name": "Ada", "age": 36, "city": "Paris", "job": null}',
            0.1 + 0.45 * 3 / 4,
            0.1 + 0.45 * 3 / 4,
        ),
        ('{"name": "Ada", "age": 36, "city": null}', 0.1 + 0.45 * 2 / 3, 0.1 + 0.45 * 2 / 3),
        ('{"name": "Ada", "age": 36.0, "city": "Paris"}', 0.1 + 0.45 * 2 / 3, 0.1 + 0.45 * 2 / 3),
        ('{"name": "Ada\u200b", "age": 36, "city": "Paris"}', 0.55, 1.0),
        ('{"Name": "Ada", "Age": 36, "City": "Paris"}', 0.1, 0.1),
        ("{}", 0.1, 0.1),
        ('{"name": "Ada", "name": "Ada", "age": 36, "city": "Paris"}', 0.0, 0.0),
        ('{"name": "Ada", "age": NaN, "city": "Paris"}', 0.0, 0.0),
        (f"[{RIGHT}]", 0.45, 1.0),
        (RIGHT + RIGHT, 0.0, 0.0),
        (RIGHT[:-1], 0.0, 0.0),
        (f"<think>{RIGHT}", 0.0, 0.0),
        (RIGHT + " " * LONGEST + ".", 0.45, 1.0),
        ('Of course: {"name": "Ada", "age": 36}', 0.45 * 2 / 3, 0.1 + 0.45 * 2 / 3),
        (RIGHT[:-1] + " " * LONGEST + "}", 0.0, 0.0),
        ("[" * 1900, 0.0, 0.0),
        ('{"a":' * 390 + "1" + "}" * 390, 0.0, 0.0),
        ('{"age": ' + "9" * 1900 + "}", 0.1, 0.1),
        ("Ada is 36 and lives in Paris.", 0.0, 0.0),
        ("", 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_rewards(text, strict, lenient):
    for expected, options in ((strict, {}), (lenient, {"lenient": True})):
        reward, metrics = StructuredOutputGrader(RECORD, **options)(reply(text))
        assert reward == pytest.approx(expected)
        also = {} if options else {"lenient": float(lenient == 1)}
        assert (
            metrics
            == {
                "exact": float(expected == 1),
                "valid": float(expected not in (0, 0.45, 0.45 * 2 / 3)),
            }
            | also
        )


def test_true_is_not_one():
    for lenient in (False, True):
        assert (
            StructuredOutputGrader({"nights": 1}, lenient=lenient)(reply('{"nights": true}'))[1][
                "exact"
            ]
            == 0
        )


@given(st.dictionaries(st.text(), st.text() | st.integers(-(2**60), 2**60), max_size=5))
def test_every_object_is_read_as_it_was_written(record):
    assert (
        read_object(json.dumps(record))
        == read_object(f"so: {json.dumps(record)}.", anywhere=True)
        == record
    )


@given(st.text(alphabet='{}[]":,0123456789.eE-truefalsn \\u'))
def test_nothing_raises(text):
    for lenient in (False, True):
        assert 0 <= StructuredOutputGrader(RECORD, lenient=lenient)(reply(text))[0] <= 1


def test_tasks_say_all_facts_and_the_splits_share_no_name():
    train = get_structured_output_tasks("train", 2000, seed=1)
    held_out = get_structured_output_tasks("validation", 300)
    for task in (*train, *held_out):
        text = task.messages[0]["content"]
        assert all(
            str(value) in text and f'"{key}"' in text for key, value in task.grader.expected.items()
        )
        assert task.grader(reply(task.grader.reference())) == (
            1.0,
            {"exact": 1.0, "valid": 1.0, "lenient": 1.0},
        )
    people = [
        {str(next(iter(task.grader.expected.values()))) for task in tasks}
        for tasks in (train, held_out)
    ]
    assert all(name.istitle() for name in people[0] | people[1]) and not people[0] & people[1]
    assert len({task.id for task in held_out}) == 300
    assert [t.id for t in get_structured_output_tasks("validation", 20, seed=5)] == [
        t.id for t in held_out[:20]
    ]
    assert [t.id for t in get_structured_output_tasks("train", 20, seed=1)] == [
        t.id for t in train[:20]
    ]
    assert [t.id for t in get_structured_output_tasks("train", 20, seed=2)] != [
        t.id for t in train[:20]
    ]


@pytest.mark.parametrize(
    "arguments",
    [{"split": "test"}, {"n": 0}, {"valid_reward": 1.0}, {"split": "validation", "n": 10**6}],
)
def test_impossible_settings(arguments):
    with pytest.raises(TaskError):
        get_structured_output_tasks(**arguments)
