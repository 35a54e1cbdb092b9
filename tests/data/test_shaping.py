"""Powers of rewards and the surprise bonus, against their formulas; and where the last answer ends
in tokens.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.configs.data import AdvantageConfig
from ttrl.data.shaping import answer_end, reward_power, shaped_rewards, surprise, with_surprise
from ttrl.errors import UserError
from ttrl.records import Sample, TaskResult

numbers = st.floats(-10, 10)
powers = st.sampled_from([0.5, 1.0, 2.0, 3.0, 6.0])


def test_powers_by_hand():
    assert [reward_power(r, 2.0) for r in (0.5, -0.5, 0.0, 1.0, -1.0, 3.0)] == [
        0.25,
        -0.25,
        0.0,
        1.0,
        -1.0,
        9.0,
    ]
    assert reward_power(0.25, 0.5) == 0.5
    with pytest.raises(
        UserError, match=r"reward 1e\+200 to the power 2.0 is larger than any float"
    ):
        reward_power(1e200, 2.0)


@given(numbers, numbers, powers)
def test_powers_keep_sign_and_order(a, b, power):
    first, second = reward_power(a, power), reward_power(b, power)
    assert reward_power(-a, power) == -first
    assert abs(first) == pytest.approx(abs(a) ** power)
    assert first <= second if a <= b else first >= second
    assert (first > 0) <= (a > 0) and (first < 0) <= (a < 0)  # tiny ones become 0


def test_surprise_by_hand():
    assert surprise([-1.0, -3.0]) == 2.0
    assert surprise([-1.0, math.nan, -3.0]) == 2.0
    assert surprise([-1.0, math.nan, -3.0], until=2) == 1.0
    assert surprise([-1.0, -3.0], until=9) == 2.0
    for nothing in ([], [math.nan]):
        assert surprise(nothing) is None
    assert surprise([-1.0], until=0) is None
    assert with_surprise(1.0, 2.0, 0.25) == 1.25
    assert with_surprise(1.0, None, 0.25) == 0.75
    assert with_surprise(0.0, 50.0, 0.5) == 0.0
    assert with_surprise(-1.0, 2.0, 0.5) == -1.5


@given(
    st.lists(st.floats(-20, 0) | st.just(math.nan), max_size=12),
    numbers,
    st.floats(0, 1),
    st.none() | st.integers(0, 12),
)
def test_surprise_against_the_formula(logprobs, acc, b, until):
    known = [p for p in (logprobs if until is None else logprobs[:until]) if p == p]
    s = sum(-p for p in known) / len(known) if known else 0.0
    assert surprise(logprobs, until) == (pytest.approx(s) if known else None)
    assert with_surprise(acc, surprise(logprobs, until), b) == pytest.approx(
        (1 - b) * acc + b * acc * s, abs=1e-12
    )


class Tokenizer:
    """Tokens of up to three characters; 0 is special, and 1 and 2 are the two halves of one
    character.
    """

    words = ("", "", "", "The", " an", "swe", "r: ", "42", ". ", "Hm", "4")

    def decode(self, ids, skip_special_tokens=False):
        assert skip_special_tokens
        text, ids = "", list(ids)
        while ids:
            if ids[:2] == [1, 2]:
                text, ids = text + "é", ids[2:]
            elif ids[0] in (1, 2):
                text, ids = text + "\N{REPLACEMENT CHARACTER}", ids[1:]
            else:
                text, ids = text + self.words[ids[0]], ids[1:]
        return text


def sample(text, ids, **changes):
    return Sample(
        **(
            {
                "task_id": "t",
                "sample": 0,
                "messages": [],
                "text": text,
                "token_ids": ids,
                "reward": 1.0,
            }
            | changes
        )
    )


@pytest.mark.parametrize(
    ("text", "ids", "characters", "expected"),
    [
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], 14, 5),  # up to "42"
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], 13, 5),  # inside of it
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], 12, 4),
        # All of the text, without the end of turn.
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], 16, 6),
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], 99, 6),
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], 0, 0),
        ("The answer: 42. ", [3, 4, 5, 6, 7, 8, 0], -3, 0),
        ("éé42", [1, 2, 1, 2, 7], 4, 5),
        ("The", [3, 4, 5], 3, 1),  # a stop string was cut off
        # Reasoning was taken out: the content is the last of it.
        ("42. ", [9, 7, 8, 7, 8, 0], 2, 4),
        ("42.", [9, 8, 7, 8, 0], 2, 3),  # and stripped
        ("other", [3, 4, 5], 2, None),
    ],
)
def test_where_the_last_answer_ends(text, ids, characters, expected):
    found = answer_end(sample(text, ids, metrics={"end": float(characters)}), "end", Tokenizer())
    assert found == expected


def test_all_tokens_where_nobody_says():
    assert answer_end(sample("The", [3], metrics={"end": 1.0}), None, None) is None
    assert answer_end(sample("The", [3]), "end", Tokenizer()) is None
    assert answer_end(sample("The", None, metrics={"end": 1.0}), "end", Tokenizer()) is None


def test_shaped_rewards_of_a_group():
    samples = [
        sample(
            "The answer: 42. ",
            [3, 4, 5, 6, 7, 8, 0],
            logprobs=[-1.0] * 5 + [-90.0] * 2,
            metrics={"end": 14.0},
            reward=0.5,
        ),
        sample("4", [10, 0], logprobs=[-1.0, -3.0]),
        sample("failed", [10], logprobs=[-7.0], reward=None),
        sample("4", [10], logprobs=None, reward=-0.5),
    ]
    group = TaskResult(task_id="t", messages=[], samples=samples)
    config = AdvantageConfig(reward_power=2.0, surprise_bonus=0.5, surprise_until="end")
    rewards, surprises = shaped_rewards(group, config, Tokenizer())
    assert surprises == [1.0, 2.0, None]
    assert rewards == [0.25, 1.5, -0.125]
    assert shaped_rewards(group, AdvantageConfig()) == ([0.5, 1.0, -0.5], [])
    with pytest.raises(UserError, match=r"'end'.*give a tokenizer"):
        shaped_rewards(group, config)


@pytest.mark.parametrize("reward", [1e300, -1e13, float("inf"), float("nan")])
def test_rewards_that_no_gradient_can_hold_are_refused(reward):
    group = TaskResult(task_id="t", messages=[], samples=[sample("4", [10], reward=reward)])
    with pytest.raises(
        UserError, match=r"task 't', sample 0: its reward is .*the limit is ±1e\+12"
    ):
        shaped_rewards(group, AdvantageConfig())
