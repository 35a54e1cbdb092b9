"""Numbers and marked answers, read out of replies."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.tasks.answers import after_thinking, last_number, marked


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("18 m^2", 18),
        ("18 cm²", 18),
        ("18\\text{ km}^2", 18),
        ("18^\\circ", 18),
        ("4 and 18", 18),
        (" 18.", 18),
        ("18.00", 18),
        ("018", 18),
        ("$18", 18),
        ("-18", -18),
        ("−18", -18),
        ("-$18", -18),
        ("$-18", -18),
        ("18 dollars", 18),
        ("18%", 18),
        ("18€", 18),
        ("**18**", 18),
        ("`18`", 18),
        ("1,234", 1234),
        ("$1,234.50", Fraction("1234.5")),
        ("1 234", 1234),
        ("12\u202f345", 12345),
        ("1'234", 1234),
        ("1_234_567", 1234567),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("36/2 = 18", 18),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\dfrac{36}{2}", 18),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("18, 19", 19),
        ("18 19", 19),
        ("１８", 18),
        ("١٨", 18),
        ("१८", 18),
        ("１，２３４", 1234),
        ("x = 18", 18),
        ("USD18", 18),
        ("18kg", 18),
        ("(-18)", -18),
        ("18\u200b", 18),
        ("\\$18", 18),
        ("-\\$18", -18),
        ("18!", 18),
        ("18;", 18),
        ("18, ", 18),
        ("18'", 18),
        ("2 + 3 = 5.", 5),
        ("20 - 2 = 18", 18),
        ("2 days - I mean 18", 18),
        ("1 of 2\n- 18", 18),
    ],
)
def test_numbers(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eighteen",
        "十八",
        "1,5",
        "1,23,456",
        "12,34",
        "1.2.3",
        "10^3",
        "2 or 18",
        "2$ oder $18",
        "17-18",
        "17 – $18",
        "17 to 18",
        "20-2",
        "5 - 3",
        "18e^2",
        "10^{3}",
        "10²",
        "2½",
        "2**3",
        "10**2**3",
        "⑱^",
        "1" * 61,
        "3/0",
        "1,234.5.6",
        "1'23",
        "-",
        "$",
        "Ⅷ",
        "#### ",
        "5^2",
    ],
)
def test_what_cannot_be_read_is_no_number(text):
    assert last_number(text) is None


@given(
    st.fractions(max_denominator=1).filter(lambda f: abs(f) < 10**15), st.sampled_from(["{}", "{:,}", "{:_}", "{}.0", "so: ${}"])
)
def test_property_written_numbers_are_read_back(value, form):
    assert last_number(form.format(int(value))) == value


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
    rows = [json.loads(line) for line in (shared / "gsm8k" / "train.jsonl").read_text().splitlines()]
    for row in random.Random(0).sample(rows, 2000):
        plain = row["answer"].split("####")[1].replace(",", "").strip()
        assert last_number(marked(row["answer"])) == Fraction(plain)
