"""Numbers and marked answers, read out of replies."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.tasks.answers import after_thinking, marked
from ttrl.tasks.numerals import last_number


@given(st.text("0123456789,.'_-/^e $#½²{}()\\\n", max_size=30))
def test_property_nothing_raises(text):
    assert last_number(text) is None or isinstance(last_number(text), Fraction)
    marked(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("#### 18", " 18"),
        ("a\n####18 dollars\nmore 5", "18 dollars"),
        ("####\n\n18\n19", "\n\n18"),
        ("#### Answer\n18", " Answer\n18"),
        ("\\boxed{18}", "18"),
        ("\\boxed{\\frac{1}{2}} x", "\\frac{1}{2}"),
        ("\\boxed{18", None),
        ("\\boxed {18}", "18"),
        ("<answer>18</answer>", "18"),
        ("<ANSWER>18</Answer>", "18"),
        ("<answer>18", "18"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("#### 1\n<answer>2</answer>", "2"),
        ("<answer>1</answer>\n#### 2", " 2"),
        ("<answer>\\boxed{3}</answer>", "3"),
        ("18", None),
        ("", None),
    ],
)
def test_marked(text, part):
    assert marked(text) == part


def test_thinking():
    assert after_thinking("<think>#### 1</think>#### 2") == "#### 2"
    assert after_thinking("1</think>2") == "2"  # the template of some models opens the tag itself
    assert after_thinking("<think>#### 1") == ""
    assert after_thinking("<think>1</think>2<think>3") == ""
    assert after_thinking("3") == "3"


def test_tags_stay_in_place_where_lower_case_is_longer():
    assert marked("İİİ<ANSWER>x</ANSWER>") == "x"


def test_all_gsm8k_answers_are_read(shared):
    """Against a second way to read them: everything that is no digit, point or sign taken out."""
    rows = [
        json.loads(line) for line in (shared / "gsm8k" / "train.jsonl").read_text().splitlines()
    ]
    for row in random.Random(0).sample(rows, 2000):
        plain = row["answer"].split("####")[1].replace(",", "").strip()
        assert last_number(marked(row["answer"])) == Fraction(plain)
