"""The generated words: enough of them, the same for ever, and none twice."""

import hashlib
import random
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.errors import UserError
from ttrl.tasks.words import (
    LONGEST,
    SHORTEST,
    as_typed,
    comparable,
    get_words,
    in_validation,
    pick,
)


def test_thousands_of_words_of_every_length():
    words = get_words()
    assert len(words) == len(set(words)) > 11_000
    assert all(re.fullmatch("[a-z]+", word) for word in words)
    assert all(re.search("[aeiou]", word) for word in words)
    for length in range(SHORTEST, LONGEST + 1):
        assert len(get_words(length, length)) > 900
        assert {len(word) for word in get_words(length, length)} == {length}
    assert get_words(4, 6) == [word for word in words if 4 <= len(word) <= 6]


def test_they_never_change():
    """Validation results of different versions of ttrl and of Python are compared: a new digest is
    a new benchmark.
    """
    digest = hashlib.sha256("\n".join(get_words()).encode()).hexdigest()
    assert digest == "602ecaeef32eac949e05f2a3429952437e804497919d68f3bc1e4d201787b5db"


def test_letters_repeat_as_they_do_in_english():
    """Counting is only a task where counts differ: some words have a letter three times."""
    most = [max(map(word.count, word)) for word in get_words(3, 12)]
    assert sum(m >= 3 for m in most) > 500
    assert sum(m == 2 for m in most) > 3000


@pytest.mark.parametrize(("low", "high"), [(2, 5), (3, 15), (6, 5)])
def test_lengths_without_words(low, high):
    with pytest.raises(UserError, match=f"words of {low} to {high} letters"):
        get_words(low, high)


def test_the_callers_list_is_its_own():
    get_words().clear()
    assert get_words()


def test_pick_is_uniform():
    rng = random.Random(0)
    counts = [0] * 5
    for _ in range(5000):
        counts[pick(rng, range(5))] += 1
    assert all(850 < count < 1150 for count in counts)  # six standard deviations of 28 are 170


def test_split_share():
    share = sum(in_validation(str(i)) for i in range(20_000)) / 20_000
    assert 0.087 < share < 0.113  # 0.1, six standard deviations
    share = sum(in_validation(str(i), one_in=2) for i in range(20_000)) / 20_000
    assert 0.478 < share < 0.522


@given(st.text())
def test_property_of_typed_text(text):
    """Typing it once more changes nothing, nor does taking its accents apart; its lines stay."""
    typed = as_typed(text)
    assert as_typed(typed) == typed
    for form in ("NFC", "NFD"):
        assert as_typed(unicodedata.normalize(form, text)) == typed
    assert typed.count("\n") == text.count("\n")


def test_words_that_are_compared():
    assert comparable(" ‘Rock‑N‑Roll’\u200b\u00a0 CAFE\u0301…") == "'rock-n-roll' café..."
    assert comparable("résumé") != comparable("resume")
