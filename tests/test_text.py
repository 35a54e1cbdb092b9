"""Values as text: every form that is promised, at its borders."""

import math

import numpy
import pytest

from ttrl import text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"), (59.96, "1 min 00 s"), (161, "2 min 41 s"), (3599.6, "1 h 00 min"),
        (3900, "1 h 05 min"), (172_790, "47 h 59 min"), (172_800, "2 days"), (181_440, "2.1 days"),
    ],
)  # fmt: skip
def test_durations(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (2.5, "2.5"),
        (999, "999"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_999, "1M"),
        (4_560_000, "4.56M"),
        (2e12, "2T"),
    ],
)
def test_counts(number: float, expected: str) -> None:
    assert text.si(number) == expected


def test_shares_and_sizes() -> None:
    assert [text.percent(share) for share in (0, 0.5, 0.945, 1)] == ["0%", "50%", "94.5%", "100%"]
    assert text.gib(3 * 2**20) == "3 MiB" and text.gib(2**34) == "16 GiB"
    assert text.si_spaced(950) == "950 " and text.si_spaced(1.5e9) == "1.5 G"
    assert text.compact(math.nan) == "nan"


def test_any_value_can_be_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise OSError

    assert (
        text.short("a" * 300) == "'" + "a" * 196 + "..."
        and text.short(Broken()) == "a value of type Broken"
    )
    assert text.short([1, 2], 5) == "[1..."


def test_nested_values_get_one_name_each() -> None:
    assert text.flat({"a": 1, "b": {"c": None, "d": {"e": [2]}}, "f": {}}) == {
        "a": 1,
        "b.c": None,
        "b.d.e": [2],
    }
    assert text.flat({"b": {"c": 1}}, "/") == {"b/c": 1}


def test_numbers_are_written_as_spans() -> None:
    assert text.spans([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7" and text.spans([]) == ""


@pytest.mark.parametrize("value", [0, -1.5, numpy.float32(0.5), numpy.float64(2), numpy.int64(3)])
def test_numbers(value: object) -> None:
    assert text.is_number(value)


@pytest.mark.parametrize(
    "value", [True, numpy.True_, math.nan, math.inf, numpy.float32("nan"), 10**400, "1", None, 1j]
)
def test_what_is_not_a_number(value: object) -> None:
    assert not text.is_number(value)


def test_no_text_acts_on_a_terminal() -> None:
    """Control characters of both kinds, turns of the writing direction, and halves of surrogate
    pairs.
    """
    acts = [
        chr(code)
        for code in (
            *range(32),
            *range(127, 160),
            *range(0x202A, 0x202F),
            *range(0x2066, 0x206A),
            0xD800,
            0xDFFF,
        )
    ]
    acts = [character for character in acts if character not in "\n\t"]
    for character in acts:
        shown = text.harmless(f"a{character}b")
        assert shown.isprintable() and shown.encode().decode("unicode_escape") == f"a{character}b"
        assert text.one_line(f"a{character}b").isprintable()
    assert text.harmless("fine: é 語 😀\n\ttoo") == "fine: é 語 😀\n\ttoo"
