"""Draw curves with characters: sparklines, and plots of braille dots with a shaded interval."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ttrl.report.charts import neighbour_means
from ttrl.text import present

_BLOCKS = "▁▂▃▄▅▆▇█"
_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its 4 × 2 dots."""
_BAND = "░"
_FULL = 0xFF
_PLAIN = str.maketrans(
    {
        **dict(zip(_BLOCKS, "__..--==", strict=True)),
        **{chr(_BLANK + bits): "*" for bits in range(1, _FULL + 1)},
        _BAND: ":",
        "│": "|",
        "┤": "+",
        "└": "+",
        "─": "-",
        "━": "=",
        "╸": "=",
        "·": "-",
        "…": ".",
        "→": ">",
        "Δ": "d",
        "›": ">",
    }
)

Kind = Literal["", "line", "band"]


class Cells(NamedTuple):
    """Characters of one kind, side by side."""

    text: str
    kind: Kind


def plain(text: str) -> str:
    """Return the text with ASCII for our drawing characters, for terminals without UTF-8."""
    return text.translate(_PLAIN)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw a curve in one line of at most `width` characters; unknown values are blank.

    >>> from ttrl.live.text_plot import sparkline
    >>> sparkline([0.0, None, 0.5, 1.0], 8)
    '▁ ▅█'
    """
    shown = _thinned(values, width)
    known = present(shown)
    if not known:
        return ""
    low = min(known)
    span = max(known) - low

    def block(value: float | None) -> str:
        if value is None:
            return " "
        if span == 0:
            return _BLOCKS[3]
        return _BLOCKS[min(7, int((value - low) / span * 8))]

    return "".join(map(block, shown))


def plot(
    values: Sequence[float | None],
    width: int,
    height: int,
    y_range: tuple[float, float],
    low: Sequence[float | None] = (),
    high: Sequence[float | None] = (),
) -> list[list[Cells]]:
    """Draw a curve in `height` lines of `width` characters, from the top.

    low, high: an interval of each value, shaded. y_range: the values at bottom and top.
    """
    dots = [[0] * width for _ in range(height)]
    bottom = y_range[0]
    span = (y_range[1] - bottom) or 1.0

    def row(value: float, rows: int) -> int:
        share = min(1.0, max(0.0, (value - bottom) / span))
        return rows - 1 - round(share * (rows - 1))

    before: int | None = None
    for column, value in enumerate(_stretched(values, width * 2)):
        if value is None:
            before = None
            continue
        here = row(value, height * 4)
        start = here
        if before is not None:
            start = before
        for y in range(min(start, here), max(start, here) + 1):
            dots[y // 4][column // 2] |= _DOTS[y % 4][column % 2]
        before = here
    lows = _stretched(low, width) or [None] * width
    highs = _stretched(high, width) or [None] * width
    lines = []
    for y in range(height):
        cells = []
        for x in range(width):
            below = lows[x]
            above = highs[x]
            shaded = (
                below is not None
                and above is not None
                and row(above, height) <= y <= row(below, height)
            )
            cells.append(_cell(dots[y][x], shaded))
        # Neighbours of one kind are joined.
        runs = itertools.groupby(cells, key=lambda cell: cell.kind)
        lines.append([Cells("".join(cell.text for cell in run), kind) for kind, run in runs])
    return lines


def _cell(bits: int, shaded: bool) -> Cells:
    if bits:
        return Cells(chr(_BLANK + bits), "line")
    if shaded:
        return Cells(_BAND, "band")
    return Cells(" ", "")


def _thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most `most` values: means over neighbours; None without a known one."""
    return neighbour_means(values, max(1, math.ceil(len(values) / max(most, 1))))


def _stretched(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return `width` values: straight lines between known ones, nothing before and after."""
    if not values:
        return []
    shown = _thinned(values, width)
    known = [(place, one) for place, one in enumerate(shown) if one is not None]
    if not known:
        return [None] * width
    steps = max(len(shown) - 1, 1)
    stretched: list[float | None] = []
    later = 0
    for column in range(width):
        place = column * steps / max(width - 1, 1)
        while later < len(known) and known[later][0] < place - 1e-9:
            later += 1
        if later == len(known):
            stretched.append(None)
            continue
        x, y = known[later]
        if later == 0:
            stretched.append(y if x <= place + 0.5 * steps / width else None)
            continue
        x_before, y_before = known[later - 1]
        share = min(1.0, (place - x_before) / (x - x_before))
        stretched.append(y_before + (y - y_before) * share)
    return stretched
