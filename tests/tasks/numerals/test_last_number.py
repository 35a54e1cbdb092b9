"""The last number of a text: read exactly or not at all, in every notation, and never its last
digits alone.
"""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.tasks.numerals import last_number


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
    ("text", "number"),
    [
        ("- 18", -18),
        ("-(18)", -18),
        ("-\\left(18\\right)", -18),
        ("-\\frac{36}{2}", -18),
        ("-$ 18", -18),
        ("- €18", -18),
        ("-US$18", -18),
        ("$-18$", -18),
        ("-$18$", -18),
        ("\\(-18\\)", -18),
        ("-{18}", -18),
        ("-\\text{18}", -18),
        ("-**18**", -18),
        ("**-18**", -18),
        ("–18", -18),
        ("‒18", -18),
        ("\\-18", -18),
        ("minus 18", -18),
        ("negative $18", -18),
        ("is minus 18", -18),
        ("x = - 18", -18),
        ("result: - 18", -18),
        ("a loss, so -18", -18),
        ("| -18 |", -18),
        ("-(-18)", 18),
        ("+18", 18),
        ("COVID-19", 19),
        ("--- 18", 18),
        ("The answer—18", 18),
        ("-> 18", 18),
        ("<<9+9=18>>18", 18),
        ("<b>18</b>", 18),
        ("so:\n> 18", 18),
    ],
)
def test_signs(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("11 5/6", "71/6"),
        ("3 1/2 hours", "7/2"),
        ("2\\frac{2}{3}", "8/3"),
        ("2 \\tfrac23", "8/3"),
        ("2~\\frac{2}{3}", "8/3"),
        ("{2}\\frac{2}{3}", "8/3"),
        ("-1 1/2", "-3/2"),
        ("-(1 1/2)", "-3/2"),
        ("- 1 1/2", "-3/2"),
        ("2 and 1/2", "5/2"),
        ("1,234 5/6", "7409/6"),
        ("1 234 5/6", "7409/6"),
        ("2½", "5/2"),
        ("½", "1/2"),
        ("1 0/5", "1"),
        ("2 100/300", "7/3"),
        ("$3 and $1/3", "1/3"),
    ],
)
def test_mixed_numbers(text, number):
    assert last_number(text) == Fraction(number)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("\\frac12", "1/2"),
        ("\\frac1{72}", "1/72"),
        ("\\frac{1}2", "1/2"),
        ("\\frac 1 2", "1/2"),
        ("\\frac{1}{-2}", "-1/2"),
        ("\\frac{-1}{2}", "-1/2"),
        ("-\\frac{-1}{-2}", "-1/2"),
        ("\\cfrac{3}{4}", "3/4"),
        ("\\tfrac{3}{4}", "3/4"),
        ("\\frac{ \\text{3} }{ 1,000 }", "3/1000"),
        ("\\frac{\\frac{1}{2}}{3}", "1/6"),
        ("{3 \\over 4}", "3/4"),
        ("3 \\div 4", "3/4"),
        ("3 ÷ 4", "3/4"),
        ("3/-4", "-3/4"),
        ("(3)/(4)", "3/4"),
        ("-(3/4)", "-3/4"),
        ("1.5/2", "3/4"),
        ("1/2-hour", "1/2"),
        ("3 \\times 10^{-2}", "3/100"),
        ("-3 \\cdot 10^{2}", "-300"),
        ("3×10⁻²", "3/100"),
        ("1.5 x 10^3", "1500"),
        ("2*10^6", "2000000"),
    ],
)
def test_fractions_and_scientific_notation(text, number):
    assert last_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eighteen",
        "十八",
        "1,5",
        "0,111",
        "AZYUK2A",
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


@pytest.mark.parametrize(
    "text",
    [
        "4 10/3",
        "2\\frac{10}{3}",
        "2\\frac{-1}{3}",
        "3 and 10/3",
        "2 100/30",
        "1 200 300/400",
        "1-1/2",
        "1 - 1/2",
        "1 1/2 - 2",
        "\\frac123",
        "\\frac{1}{0}",
        "\\frac{\\sqrt{3}}{2}",
        "\\frac{\\pi}{3}",
        "\\frac{x}{3}",
        "\\frac{a+b}{3}",
        "\\frac{2 \\cdot 3}{4}",
        "\\sqrt{2}",
        "\\sqrt[3]{8}",
        "\\sqrt 2",
        "2\\sqrt{3}",
        "√16",
        "sqrt(2)",
        "\\log_2 8",
        "ln 2",
        "\\binom{5}{2}",
        "f(18)",
        "3\\pi",
        "3π",
        "π/3",
        "18 \\; \\pi",
        "3x",
        "2xy",
        "3 x",
        "x/4",
        "x-5",
        "18 - x",
        "3 + 4i",
        "4i",
        "2e",
        "2\\mathrm{e}",
        "x_2",
        "a_{18}",
        "10^{-3}",
        "x^2",
        "10**10**10",
        "1e400",
        "1e-400",
        "0x12",
        "2 + 3",
        "4 * 5",
        "4 x 5",
        "4 \\times 5",
        "2(9)",
        "2 (9)",
        "5 kg - 3 kg",
        "5kg-3kg",
        "5 eggs + 3 eggs",
        "5 eggs * 3",
        "5%-3%",
        "3:2",
        "3 : 2",
        "10:30",
        "1/2/2024",
        "2024-01-05",
        "(2, 3)",
        "[2, 3)",
        "\\{1, 2\\}",
        "(-\\infty, 3)",
        "\\pm 18",
        "18 ± 2",
        "x > 18",
        "< 18",
        "\\neq 18",
        "\\lfloor 3.5 \\rfloor",
        "0.\\overline{3}",
        "|-18|",
        "18^{th}",
        "--18",
        "is - 18",
        "the whole minus 18",
    ],
)
def test_an_expression_is_no_number_and_its_last_digits_are_not_one(text):
    assert last_number(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "18 m/s^2",
        "18/day",
        "18 km/h",
        "18/h",
        "18\\text{ km}",
        "18\\,\\mathrm{kg}",
        "18 \\text{m}^2",
        "18\\%",
        "18°C",
        "18個",
        "答案是18。",
        "18 dollar(s)",
        "18-year-old",
        "Step 3: 18",
        "1) 18",
        "(1) 18",
        "18 \\tag{1}",
        "\\begin{aligned} x &= 18 \\\\ \\end{aligned}",
        "(about 18)",
        "5 - a lot, no: 18",
        "\\boxed{18}",
        "\\approx 18",
    ],
)
def test_units_labels_and_layout_change_nothing(text):
    assert last_number(text) == 18


def plain(value: int, form: str) -> str:
    """Write a whole number of at least 0; with separators where there are enough digits."""
    if form == "{,}":
        return f"{value:,}".replace(",", "{,}")
    if form in (" ", "'", "\u202f"):
        return f"{value:,}".replace(",", form)
    return format(value, form)


@st.composite
def written(draw: st.DrawFn) -> tuple[Fraction, str]:
    """A rational number of at least 0, and one way to write it."""
    top, bottom = draw(st.integers(0, 10**6)), draw(st.integers(1, 1000))
    value = Fraction(top, bottom)
    a, b = value.numerator, value.denominator
    forms = [f"{a}/{b}", f"{a} / {b}", f"({a})/({b})", f"{{{a} \\over {b}}}", f"{a} \\div {b}"]
    forms += [f"\\{name}{{{a}}}{{{b}}}" for name in ("frac", "dfrac", "tfrac", "cfrac")]
    if a < 10:
        forms += [f"\\frac{a}{{{b}}}", f"\\frac {a} {{{b}}}"]
    if a < 10 and b < 10:
        forms.append(f"\\frac{a}{b}")
    whole, rest = divmod(a, b)
    if b == 1:
        marks = ("", ",", "_", "{,}", " ", "'", "\u202f")
        forms = [plain(a, mark) for mark in marks] + [
            f"{a}.0",
            f"{a}e0",
            f"0{a}",
            f"{a} \\times 10^{{0}}",
        ]
    elif whole:
        count = draw(st.sampled_from([plain(whole, mark) for mark in ("", ",", "{,}")]))
        joints = (f"{count} {rest}/{b}", f"{count} and {rest}/{b}")
        forms += [*joints, f"{count}\\frac{{{rest}}}{{{b}}}", f"{count} \\tfrac{{{rest}}}{{{b}}}"]
    places = next((k for k in range(7) if 10**k % b == 0), None)
    if places:
        digits = str(a * 10**places // b).zfill(places + 1)
        forms += [digits[:-places] + "." + digits[-places:], f"{digits}e-{places}"]
        forms += [f"{digits} \\times 10^{{-{places}}}", f"{digits} · 10^-{places}"]
    return value, draw(st.sampled_from(forms))


NEGATIVE = (
    "-{}",
    "−{}",
    "–{}",
    "- {}",
    "-$ {}",
    "-\\$ {}",
    "-({})",
    "-\\left({}\\right)",
    "-{{{}}}",
    "minus {}",
    "-**{}**",
)
POSITIVE = ("{}", "+{}", "${}", "({})", "**{}**", "{{{}}}")
AROUND = (
    "{}",
    " {} ",
    "{}.",
    "x = {}",
    "It is: {}",
    "${}$",
    "\\({}\\)",
    "\\boxed{{{}}}",
    "{} hours",
    "{}\\text{{ kg}}",
    "2 = {}",
)


@settings(max_examples=600)
@given(written(), st.sampled_from(NEGATIVE + POSITIVE), st.sampled_from(AROUND))
def test_property_every_notation_is_read_exactly(number, sign, around):
    value, text = number
    if sign in NEGATIVE:
        value = -value
    assert last_number(around.format(sign.format(text))) == value


SPOILED = (
    "{}\\pi", "{} \\pi", "\\sqrt{{{}}}", "2\\sqrt{{{}}}", "\\frac{{\\sqrt{{{}}}}}{{2}}",
    "\\frac{{\\pi}}{{{}}}", "{}x", "{} + x", "x - {}", "{}^{{2}}", "{}^2", "2^{{{}}}", "2 + {}",
    "2 * {}", "2 \\times {}", "2 \\cdot {}", "2:{}", "(2, {})", "\\{{2, {}\\}}", "2 or {}",
    "\\pm {}", "\\log_2 {}", "f({})", "{}(x+1)", "\\neq {}", "x < {}", "3 kg - {}",
    "\\overline{{{}}}", "\\binom{{5}}{{{}}}",
)  # fmt: skip


@settings(max_examples=600)
@given(written(), st.sampled_from(SPOILED), st.sampled_from(AROUND))
def test_property_what_a_number_is_part_of_is_no_number(number, form, around):
    assert last_number(around.format(form.format(number[1]))) is None


@given(st.text("0123456789,.'_-/^e $#½²{}()[]<>\\fracsqrtpi\n*x:=%|~—", max_size=40))
def test_property_nothing_raises(text):
    number = last_number(text)
    assert number is None or (isinstance(number, Fraction) and re.search("[0-9½²]", text))


@pytest.mark.parametrize(
    "piece", ["(", "\\frac{", "-", "2 + ", "\\sqrt{", "1/", "{", "\\frac1", "9^", "x_"]
)
def test_deep_and_long_ones_are_not_read(piece):
    assert last_number(piece * 20 + "18") is None or piece in ("(", "{")
    assert last_number(piece * 100_000 + "18") is None
    assert last_number("\\frac{" + "x + " * 500 + "1}{2}") is None
