"""Values as text for people, the same everywhere: numbers, sizes, durations, shares; and one name
for each nested value.
"""

import hashlib
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")


def present(values: Iterable[T | None]) -> list[T]:
    """Return the values without those that are None."""
    return [value for value in values if value is not None]


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value is a finite number, NumPy's too, and not a bool, nor a whole number
    beyond any float.
    """
    if type(value) is float:  # nearly all figures: NumPy's test takes ten times as long
        return math.isfinite(value)
    try:
        return (
            isinstance(value, int | float | numbers.Real)
            and not isinstance(value, bool)
            and math.isfinite(value)
        )
    except OverflowError:
        return False


def compact(value: float) -> str:
    """Write a number in few digits: 0.0312, 12.5, 8,300, 3.2e-5."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(value)
    if magnitude == 0:
        return "0"
    if magnitude < 1e-3 or magnitude >= 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if magnitude >= 999.5:  # three digits of it would be 1e+03
        return f"{value:,.0f}"
    return f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """Write a number of things: 1 iteration, 1,024 GPUs."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def si(value: float, space: str = "") -> str:
    """Write a count in three digits, with `space` before its prefix: 999, 12.3k, 4.56M."""
    for factor, prefix in (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if value >= factor * 0.9995:
            return f"{value / factor:.3g}{space}{prefix}"
    return (f"{value:.0f}" if value >= 10 else f"{value:.3g}") + space


def si_spaced(value: float) -> str:
    """Write a count for a unit to follow: "950 ", "12.3 k"."""
    return si(value, " ")


def percent(share: float) -> str:
    """Write a share: 94.5%, 50%."""
    return f"{share * 100:.1f}".removesuffix(".0") + "%"


def gib(size: float) -> str:
    """Write a number of bytes: 12.5 GiB, 300 MiB."""
    if size >= 2**30:
        return f"{size / 2**30:.3g} GiB"
    return f"{size / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Write a time: 3.4 s, 2 min 41 s, 1 h 05 min, 2.1 days."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes = int(seconds + 0.5) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds + 0.5) % 60:02d} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 86400:.3g} days"


def spans(numbers: Iterable[int]) -> str:
    """Write ascending whole numbers: [1, 2, 3, 5] as "1-3, 5"."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def short(value: object, most: int = 200) -> str:
    """Write any value as Python does, cut to `most` characters; never raises."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001
        # A user's __repr__ may raise, and Python refuses to print huge integers.
        text = f"a value of type {type(value).__name__}"
    if len(text) <= most:
        return text
    return text[: most - 3] + "..."


# Characters with an effect on a terminal (escapes, C1 codes, a carriage return, turns of the
# writing direction), and those outside UTF-8.
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Write terminal control characters in words of a model, a server or a file as in code:
    \x1b[2J. Newlines and tabs stay."""
    return _ACTS.sub(
        lambda found: (
            f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else f"\\u{ord(found[0]):04x}"
        ),
        text,
    )


def one_line(value: object, most: int = 400) -> str:
    """Put a text (or any value, as Python writes it), made `harmless`, on one line of at most
    `most` characters.
    """
    text = harmless(" ".join((value if isinstance(value, str) else repr(value)).split()))
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


def flat(values: Mapping[str, Any], separator: str = ".") -> Mapping[str, Any]:
    """Return nested mappings as one: {"train": {"loss": 1}} as {"train.loss": 1}. Empty ones are
    left out.
    """
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {
                f"{name}{separator}{inner}": one for inner, one in flat(value, separator).items()
            }
        else:
            found[name] = value
    return found


def number_of(text: str) -> int:
    """Return 64 bits of a text's hash, as a signed number: equal in all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
