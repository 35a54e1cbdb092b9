"""Draw small charts as SVG text, for pages to work offline, in light and dark, and on a phone.

No plotting library draws text in the page's colours, and a report must not take seconds. All charts
share one size for a grid layout. The page defines the colour classes: f1 to f6 fill, s1 to s6
stroke. Values may be None or not finite: such points are left out, never drawn as zero.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from ttrl.text import compact, is_number, present, si, si_spaced

WIDTH = 540
HEIGHT = 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40  # margins around the plotting area
COLOURS = 6
MAX_BARS = 90
MAX_POINTS = 200
"""Points of a line: longer lines are drawn as means over neighbours, with a note on the axis. The
page of a long run stays small and quick.
"""


@dataclass(frozen=True)
class Series:
    """One line, or one layer of a stack. `low` and `high` draw a band around a line."""

    name: str
    values: Sequence[float | None]
    color: int = 1
    """1 to 6: the classes f1 and s1 to f6 and s6."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dashed: bool = False


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers to cover low..high: the first at most low, the last at
    least high.
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        (factor * power for factor in (1, 2, 2.5, 5) if factor * power >= rough * 0.999), 10 * power
    )
    start = math.floor(low / step + 1e-9)
    end = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(start, end + 1)]


def whole_ticks(low: float, high: float, most: int = 8) -> list[int]:
    """Return at most `most` whole numbers within low..high at even, round distances."""
    step = next(
        factor * 10**power
        for power in range(12)
        for factor in (1, 2, 5)
        if math.floor(high / (factor * 10**power)) - math.ceil(low / (factor * 10**power)) < most
    )
    return list(range(math.ceil(low / step) * step, math.floor(high) + 1, step))


class _Axes:
    """Maps data to the picture. x: a linear axis over iterations; y: linear, or logarithmic to base
    ten.
    """

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], *, log: bool, percent: bool
    ) -> None:
        self.log = log
        self.percent = percent
        self.x_low, self.x_high = x if x[0] < x[1] else (x[0] - 0.5, x[1] + 0.5)
        if log:
            low = math.floor(math.log10(y[0]))
            high = math.ceil(math.log10(y[1]))
            high = max(high, low + 1)
            step = max(1, math.ceil((high - low) / 5))
            self.ticks = [10.0**exponent for exponent in range(low, high + 1, step)]
            self.y_low, self.y_high = float(low), float(high)
        else:
            self.ticks = nice_ticks(*y)
            self.y_low, self.y_high = self.ticks[0], self.ticks[-1]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        if self.log:
            height = math.log10(max(value, 1e-300))
        else:
            height = value
        share = (height - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)

    def label(self, value: float) -> str:
        if self.percent:
            return f"{compact(value * 100)}%"
        return compact(value)

    def draw(self, together: int = 1, axis: str = "iteration") -> str:
        """Draw grid lines with labels, and iteration numbers (or `axis`) below. together: the
        number of iterations averaged in each point."""
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 4.5:.1f}" '
                f'text-anchor="end">{self.label(tick)}</text>'
            )
        counted = axis == "iteration"
        ticks = (
            whole_ticks(self.x_low, self.x_high) if counted else nice_ticks(self.x_low, self.x_high)
        )
        for tick in ticks:
            label = str(tick) if counted else si(tick)
            if self.x_low <= tick <= self.x_high:
                parts.append(
                    f'<text x="{self.x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" '
                    f'text-anchor="middle">{label}</text>'
                )
        middle = (LEFT + WIDTH - RIGHT) / 2
        if together == 1:
            name = axis
        else:
            name = f"{axis} (points: means of {together})"
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle" class="axis">{name}</text>'
        )
        return "".join(parts)


def _points(
    x: Sequence[float], values: Sequence[float | None], *, log: bool
) -> list[tuple[float, float]]:
    return [
        (position, value)
        for position, value in zip(x, values, strict=True)
        if value is not None and math.isfinite(value) and (value > 0 or not log)
    ]


def _svg(name: str, body: str) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">{body}</svg>'
    )


def line_chart(
    name: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    percent: bool = False,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    axis: str = "iteration",
) -> Markup | None:
    """Draw lines over iterations (or `axis`), with the bands of each series. None when no series
    has a number.

    name: the text for screen readers. x: iteration numbers, one per value; they span the axis, also
        across missing values.
    percent: label 0.5 as 50%. y_range: the least range of the axis. from_zero: a linear axis starts
        at zero, or below when something is negative.
    """
    together = max(1, math.ceil(len(x) / MAX_POINTS))
    if together > 1:
        x = present(neighbour_means(x, together))
        series = [_thinned(one, together) for one in series]
    drawn = [(one, _points(x, one.values, log=log)) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        return None
    heights = [height for _, points in drawn for _, height in points]
    bounds = [
        bound
        for one, _ in drawn
        for band in (one.low, one.high)
        if band
        for _, bound in _points(x, band, log=log)
    ]
    low = min(heights + bounds)
    high = max(heights + bounds)
    if y_range is not None:
        low = min(low, y_range[0])
        high = max(high, y_range[1])
    if from_zero and not log:
        low = min(low, 0.0)
        high = max(high, 0.0)
    axes = _Axes((min(x), max(x)), (low, high), log=log, percent=percent)
    parts = [axes.draw(together, axis)]
    for one, _ in drawn:
        if one.low is not None and one.high is not None:
            lows = _points(x, one.low, log=log)
            highs = _points(x, one.high, log=log)
            corners = [f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in [*highs, *reversed(lows)]]
            parts.append(f'<polygon class="band f{one.color}" points="{" ".join(corners)}"/>')
    for one, points in drawn:
        path = " ".join(f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in points)
        dashed = " dashed" if one.dashed else ""
        parts.append(f'<polyline class="line s{one.color}{dashed}" points="{path}"/>')
        radius = 3.2 if len(points) <= 40 else 1.6
        for a, b in points if together == 1 else points[-1:]:  # of means, only the line's end
            if axis == "iteration":
                place = f"iteration {a:.0f}"
            else:
                place = f"{si_spaced(a)}{axis}"
            tip = f"{one.name}, {place}: {axes.label(b)}"
            parts.append(
                f'<circle class="f{one.color}" cx="{axes.x(a):.1f}" cy="{axes.y(b):.1f}" '
                f'r="{radius}">'
            )
            parts.append(f"<title>{escape(tip)}</title></circle>")
    return _svg(name, "".join(parts))


def neighbour_means(values: Sequence[float | None], together: int) -> list[float | None]:
    """Return means over `together` neighbours; None without a known value."""
    means = []
    for start in range(0, len(values), together):
        known = [value for value in values[start : start + together] if is_number(value)]
        means.append(sum(known) / len(known) if known else None)
    return means


def _thinned(one: Series, together: int) -> Series:
    low, high = (
        None if band is None else neighbour_means(band, together) for band in (one.low, one.high)
    )
    return dataclasses.replace(
        one, values=neighbour_means(one.values, together), low=low, high=high
    )


def sparkline(values: Sequence[float | None], width: int = 160, height: int = 28) -> Markup:
    """Draw a curve without axes, for tables, with a dot at its end. Empty without known values."""
    shown = neighbour_means(values, max(1, math.ceil(len(values) / 80)))
    known = [(place, value) for place, value in enumerate(shown) if is_number(value)]
    if not known:
        return Markup()
    low = min(value for _, value in known)
    high = max(value for _, value in known)
    across = (width - 6) / max(len(shown) - 1, 1)
    up = (height - 6) / ((high - low) or 1.0)
    middle = high == low
    points = [
        (3 + place * across, height / 2 if middle else height - 3 - (value - low) * up)
        for place, value in known
    ]
    path = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    return Markup(
        f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'aria-hidden="true">'
        f'<polyline class="line s1" points="{path}"/><circle class="f1" cx="{x:.0f}" '
        f'cy="{y:.1f}" r="2.4"/></svg>'
    )


def _binned(
    x: Sequence[float], series: Sequence[Series]
) -> tuple[int, list[tuple[float, float, list[float]]]]:
    """Return iterations per bar and at most MAX_BARS bars: (first, last iteration, mean of each
    series). Unknown values are 0.
    """
    size = max(1, math.ceil(len(x) / MAX_BARS))
    bars = []
    for start in range(0, len(x), size):
        chosen = range(start, min(start + size, len(x)))
        means = [
            sum(one.values[i] or 0.0 for i in chosen if is_number(one.values[i])) / len(chosen)
            for one in series
        ]
        bars.append((x[chosen[0]], x[chosen[-1]], means))
    return size, bars


def stacked_bars(
    name: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    unit: str = "",
    percent: bool = False,
) -> tuple[Markup, int] | None:
    """Draw one bar per iteration, its layers from the bottom in the order of `series`; long runs
    are averaged over neighbours.

    Returns (SVG, iterations per bar), or None when nothing is above zero.
    """
    size, bars = _binned(x, series)
    highest = max((sum(means) for _, _, means in bars), default=0.0)
    if highest <= 0:
        return None
    if len(bars) > 1:
        step = (bars[-1][0] - bars[0][0]) / (len(bars) - 1)
    else:
        step = 1.0
    top = 1.0 if percent and highest <= 1 else highest
    axes = _Axes(
        (bars[0][0] - step / 2, bars[-1][0] + step / 2), (0.0, top), log=False, percent=percent
    )
    width = min((axes.x(step) - axes.x(0)) * 0.78, 46.0)
    parts = [axes.draw()]
    for first, last, means in bars:
        base = 0.0
        if first == last:
            which = f"iteration {first:g}"
        else:
            which = f"iterations {first:g} to {last:g}"
        for one, mean in zip(series, means, strict=True):
            if mean <= 0:
                continue
            y = axes.y(base + mean)
            bottom = axes.y(base)
            if percent:
                amount = f"{compact(mean * 100)}%"
            else:
                amount = f"{compact(mean)}{unit}"
            parts.append(
                f'<rect class="f{one.color}" x="{axes.x(first) - width / 2:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="{max(bottom - y, 0.3):.1f}">'
                f"<title>{escape(f'{which}, {one.name}: {amount}')}</title></rect>"
            )
            base += mean
    return _svg(name, "".join(parts)), size
