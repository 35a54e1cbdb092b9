"""Numbers, sizes, durations and values as text for people, and nothing else: the same everywhere."""

import math


def is_number(value: object) -> bool:
    """True for finite numbers that are not bools."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compact(value: float) -> str:
    """A number for people: 0.0312, 12.5, 8,300, 3.2e-05."""
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


def duration(seconds: float) -> str:
    """3.4 s, 2 min 41 s, 1 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes = int(seconds + 0.5) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds + 0.5) % 60:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(value: float) -> str:
    """0.945 → 94.5%."""
    return f"{value * 100:.1f}".removesuffix(".0") + "%"


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def si_spaced(value: float) -> str:
    """Four digits at most: "950", "12.3 k", "1.5 G"; with a space, so that a unit may follow."""
    for factor, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.0f} " if value >= 10 else f"{value:.3g} "


def rough_duration(seconds: float) -> str:
    """For people: "42 s", "3 min", "5.2 h", "2.1 days"."""
    for factor, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def si(number: float) -> str:
    """999 → '999', 12_345 → '12.3k', 4_560_000 → '4.56M'."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor * 0.9995:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.0f}"


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
