"""Words: compare them for graders, and make thousands of English-looking ones from syllables.

The generated words are the same in every version of Python: they draw only from `random()`, with
its guaranteed sequence.
"""

import functools
import hashlib
import random
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from ttrl.errors import UserError
from ttrl.tasks.numerals import by_replacement

T = TypeVar("T")

SHORTEST = 3
LONGEST = 14
WORDS_PER_LENGTH = 1000
"""The number of words of each length; there are fewer of three letters."""

# Repeats are weights. Codas are few and soft, for readable and polite words. A table is easier to
# read than forty string literals.
_ONSETS = """b b d d f f g h j k l l m m n p p r r s s t t t v w y z
    bl br ch cl cr dr fl fr gl gr pl pr sm sn sp st str th tr""".split()  # noqa: SIM905
_NUCLEI = "a a a e e e e i i i o o o u u ai ea ee ie oa oo ou".split()  # noqa: SIM905
_CODAS = "l l m n n n r r r s sh nd ng nt ll rm rt rry sk st th mp".split()  # noqa: SIM905


# Soft hyphens, joiners, marks of the writing direction, variation selectors.
_INVISIBLE = (
    "\u00ad\u034f\u061c\u180e\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e"
    "\u2060\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069\ufe0e\ufe0f\ufeff"
)
_TYPED = by_replacement(
    {
        "": _INVISIBLE,
        "-": "‐‑‒–—―−﹘﹣－",
        "'": "‘’‚‛′ʹʻʼ´＇",
        '"': "“”„‟″〝〞＂",
        "...": "…",
    }
)


def as_typed(text: str) -> str:
    """Write a text as a keyboard would: accents composed (NFC), ASCII quotes and hyphens, no
    invisible characters.

    Models and data files differ in all of these for the same word. Lines and spaces stay.
    """
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", text).translate(_TYPED)


def comparable(text: str) -> str:
    """Write a word in the common form of its spellings: `as_typed`, one case, single spaces."""
    return " ".join(as_typed(text).casefold().split())


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """Draw an item uniformly, the same in every version of Python (`random.choice` is not promised
    to be).
    """
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """Return the items in a random order, the same in every version of Python."""
    left = list(items)
    result = []
    while left:
        result.append(left.pop(int(rng.random() * len(left))))
    return result


def in_validation(text: str, one_in: int = 10) -> bool:
    """Return True for one text in `one_in`, by a hash of only the text: no seed can blur this
    split.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % one_in == 0


def get_words(min_length: int = SHORTEST, max_length: int = LONGEST) -> list[str]:
    """Return all words of min_length to max_length letters, in a fixed order: about 1000 of each
    length from 3 to 14.

    Lower case a–z, no word twice. Raises UserError if there are none.
    """
    if not SHORTEST <= min_length <= max_length <= LONGEST:
        raise UserError(
            f"words of {min_length} to {max_length} letters: there are words of {SHORTEST} to "
            f"{LONGEST} letters; "
            "min_length comes first"
        )
    return [word for word in _all_words() if min_length <= len(word) <= max_length]


@functools.cache
def _all_words() -> tuple[str, ...]:
    rng = random.Random("ttrl words 1")
    words: dict[str, None] = {}
    left = dict.fromkeys(range(SHORTEST, LONGEST + 1), WORDS_PER_LENGTH)
    for _ in range(200_000):  # far more than are needed; short words run out before
        word = _word(rng)
        if left.get(len(word), 0) > 0 and word not in words:
            words[word] = None
            left[len(word)] -= 1
            if not any(left.values()):
                break
    return tuple(words)


def _word(rng: random.Random) -> str:
    """Draw one to five syllables; a coda mostly after the last one, rarely before."""
    syllables = 1 + int(rng.random() * 5)
    if rng.random() < 0.15:
        parts = []
    else:
        parts = [pick(rng, _ONSETS)]
    for number in range(syllables):
        parts.append(pick(rng, _NUCLEI))
        if number < syllables - 1:
            if rng.random() < 0.2:
                parts.append(pick(rng, ("l", "m", "n", "r", "s")))
            parts.append(pick(rng, _ONSETS))
    if rng.random() < 0.75:
        parts.append(pick(rng, _CODAS))
    return "".join(parts)
