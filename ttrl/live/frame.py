"""Lay out the essentials of a run, or a table of runs, as a frame for a terminal.

A model wrote the samples, and anybody may have written the files. So every text passes through
`words`, which takes the power out of control characters, and none is read as rich's markup.
"""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import chop_cells
from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ttrl.live.essentials import Curve, Essentials, RunLine
from ttrl.live.text_plot import plain, plot, sparkline
from ttrl.monitoring.finding import MARKS, Severity
from ttrl.monitoring.followed_runs import UnderWay
from ttrl.text import counted, duration, harmless, present

_STATES = {"running": "bold green", "finished": "bold blue", "damaged": "bold red"}
_STYLES: dict[Severity, str] = {"stop": "bold red", "warn": "yellow", "note": "dim"}
_JUSTIFY: dict[str, JustifyMethod] = dict.fromkeys(
    ("iteration", "left", "held out", "reward", "!"), "right"
)
"""Columns of numbers."""
_CURVE = {False: 10, True: 24}
"""Columns of a run's curve in the table, by whether the terminal is wide."""
_COLOURS = ("cyan", "yellow")
"""Of the large curves."""
_LABEL = 7
"""Columns of the numbers at an axis."""
_NAME = 17
_VALUE = 9
_WIDE = 110
"""Columns for three small curves side by side."""
_TWO = 76
"""Columns for two large curves side by side."""
_LOWEST = 4
_HIGHEST = 14
"""Lines of a large curve, at least and at most."""
_TALL = 30
"""Lines of a terminal with room to spare."""
_MOST_FINDINGS = 4
_MOST_TEXT = 4_000
"""Characters of a sample."""


class Size(NamedTuple):
    """A terminal's size, and its abilities."""

    width: int
    height: int
    unicode: bool = True

    @property
    def overflow(self) -> OverflowMethod:
        """Return rich's way to cut a line; its ellipsis is no ASCII."""
        if self.unicode:
            return "ellipsis"
        return "crop"

    @property
    def is_tall(self) -> bool:
        """Tell whether there is room for advice, more findings and blank lines."""
        return self.height > _TALL


def words(text: str, style: str, size: Size) -> Text:
    """Return a text to show, without effect on the terminal."""
    shown = harmless(text).expandtabs(4)
    if not size.unicode:
        shown = plain(shown).encode("ascii", "replace").decode()
    return Text(shown, style, no_wrap=True, overflow=size.overflow)


def _line(*parts: Text) -> Text:
    """Return parts as one line, each with its own style."""
    line = Text(no_wrap=True, overflow="crop")
    for part in parts:
        line.append_text(part)
    return line


def run_frame(one: Essentials, size: Size, now: float) -> RenderableType:
    """Return the frame of a run. now: as `time.time`."""
    parts: list[RenderableType] = [*_head(one, size, now)]
    if one.problem:
        problem = "\n".join(textwrap.wrap(harmless(one.problem), size.width))
        return Group(*parts, words(problem, "red", size))
    if not one.main:
        parts.append(words(one.summary or "waiting for the run's first files", "dim", size))
    gap: list[RenderableType] = []
    if size.is_tall:
        gap.append(Text())
    small = [*gap, *_small_curves(one.others, size)]
    found = _findings(one, size)
    lines = size.height - len(parts) - len(small) - len(found) - len(gap)
    stacked = 1
    if not _side_by_side(one, size):
        stacked = len(one.main)
    rows = (lines - lines // 3) // stacked - 2
    parts += [*gap, *_large_curves(one, size, min(_HIGHEST, max(_LOWEST, rows)))]
    parts += small
    if found:
        parts += [*gap, *found]
    used = sum(map(_lines, [*parts, *gap]))
    sample = _sample(one, size, size.height - 1 - used)
    if sample:
        parts += [*gap, *sample]
    return Group(*parts)


def runs_frame(
    runs: Sequence[RunLine], size: Size, now: float, chosen: int | None = None
) -> RenderableType:
    """Return a table of runs, a line each. chosen: the place of the marked one."""
    if not runs:
        return words("no run folder here yet; it appears by itself", "dim", size)
    is_wide = size.width >= _WIDE
    heads = ["run", "state", "iteration", "left", "held out", "reward", "", "!"]
    if is_wide:
        heads.insert(1, "model")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(
            head,
            no_wrap=True,
            overflow=size.overflow,
            justify=_JUSTIFY.get(head, "left"),
        )
    room = max(1, size.height - 3)
    first = max(0, (chosen or 0) - room + 1)
    for place, one in enumerate(runs[first : first + room], first):
        cells = _cells(one, size, now, is_wide)
        if chosen is not None:
            mark = {chosen: "› "}.get(place, "  ")
            cells[0] = words(mark + one.name, {chosen: "bold"}.get(place, ""), size)
        table.add_row(*cells)
    parts: list[RenderableType] = [table]
    if len(runs) > room:
        last = min(first + room, len(runs))
        parts.append(words(f"{first + 1} to {last} of {len(runs)} runs", "dim", size))
    return Group(*parts)


def _cells(one: RunLine, size: Size, now: float, is_wide: bool) -> list[Text]:
    state = one.state.word
    if state == "running" and one.state.under_way:
        state = one.state.under_way[-1].doing
    left = one.state.left_at(now)
    time_left = ""
    if left is not None:
        time_left = duration(left)
    cells = [
        (one.name, ""),
        (state, _STATES.get(one.state.word, "")),
        (_progress(one.done, one.total), ""),
        (time_left, ""),
        (one.held_out, ""),
        (one.reward, ""),
        (sparkline(one.values, _CURVE[is_wide]), "cyan"),
        (str(one.serious or ""), "yellow"),
    ]
    if is_wide:
        cells.insert(1, (one.model, "dim"))
    return [words(text, style, size) for text, style in cells]


def _head(one: Essentials, size: Size, now: float) -> list[Text]:
    """Return the lines on the run's state, its phases and the time left."""
    first = [
        words(one.name, "bold", size),
        words("  " + one.state.word, _STATES.get(one.state.word, ""), size),
    ]
    progress = _progress(one.done, one.total)
    if progress:
        first.append(words(f"  iteration {progress}", "", size))
    if one.done is not None and one.total:
        first.append(_bar(one.done / one.total, 16, size))
    left = one.state.left_at(now)
    if left is not None:
        first.append(words(f"  about {duration(left)} left", "", size))
    second = present([one.model or None])
    if one.seconds:
        until = {"finished": "in all"}.get(one.state.word, "so far")
        second.append(f"{duration(one.seconds)} {until}")
    lines = [_line(*first)]
    if second:
        lines.append(words(" · ".join(second), "dim", size))
    lines += [_phase(phase, size, now) for phase in one.state.under_way]
    for line in lines:
        line.truncate(size.width, overflow=size.overflow)
    return lines


def _phase(phase: UnderWay, size: Size, now: float) -> Text:
    """Return a line on a phase under way: its progress and the time left."""
    parts = [words(f"{phase.iteration}: {phase.doing}", "green", size)]
    share = phase.share(now)
    if share is not None:
        parts.append(_bar(share, 16, size))
    facts = []
    if phase.of:
        facts.append(f"{phase.count} of {counted(phase.of, 'task')}")
    facts.append(duration(max(0.0, now - phase.since)))
    left = phase.left(now)
    if left:
        facts.append(f"about {duration(left)} left")
    elif left == 0:
        facts.append(f"usually {duration(phase.usual or 0.0)}")
    parts.append(words("  " + ", ".join(facts), "", size))
    return _line(*parts)


def _bar(share: float, cells: int, size: Size) -> Text:
    full = round(min(1.0, max(0.0, share)) * cells)
    rest = cells - full
    return _line(words("  " + "━" * full, "green", size), words("─" * rest, "dim", size))


def _progress(done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    if total is None:
        return str(done)
    return f"{done} of {total}"


def _side_by_side(one: Essentials, size: Size) -> bool:
    return size.width >= _TWO or len(one.main) < 2


def _large_curves(one: Essentials, size: Size, height: int) -> list[RenderableType]:
    if not one.main:
        return []
    if not _side_by_side(one, size):
        plots: list[RenderableType] = []
        for place, curve in enumerate(one.main):
            plots += _large_curve(one, curve, size.width, height, place, size)
        return plots
    grid = Table.grid(expand=False, padding=(0, 2, 0, 0))
    width = size.width // len(one.main) - 2
    columns = [
        _large_curve(one, curve, width, height, place, size) for place, curve in enumerate(one.main)
    ]
    for line in zip(*columns, strict=True):
        grid.add_row(*line)
    return [grid]


def _large_curve(
    one: Essentials, curve: Curve, width: int, height: int, place: int, size: Size
) -> list[Text]:
    """Return the lines of a plot: its title, the curve between two labels, the iterations."""
    bottom, top = _range(curve)
    colour = _COLOURS[place % len(_COLOURS)]
    lines = [words(f"{curve.name} {curve.newest}", f"bold {colour}", size)]
    room = max(10, width - _LABEL - 2)
    drawn = plot(curve.values, room, height, (bottom, top), curve.low, curve.high)
    for number, cells in enumerate(drawn):
        label = {0: curve.written(top), height - 1: curve.written(bottom)}.get(number, "")
        edge = "│"
        if label:
            edge = "┤"
        styles = {"line": colour, "band": f"dim {colour}"}
        parts = [words(text, styles.get(kind, ""), size) for text, kind in cells]
        lines.append(_line(words(f"{label:>{_LABEL}}{edge}", "dim", size), *parts))
    first = str(one.iterations[0])
    last = ""
    if len(one.iterations) > 1:
        last = str(one.iterations[-1])
    between = room - len(first) - len(last)
    note = ""
    if curve.newest_interval:
        note = f"95%: {curve.newest_interval}"
    if len(note) > between:
        note = ""
    axis = f"{'':>{_LABEL}}└{first}{note:^{max(1, between)}}{last}"
    return [*lines, words(axis, "dim", size)]


def _range(curve: Curve) -> tuple[float, float]:
    """Return the values at bottom and top of a plot: those of a share or a reward, if it moved."""
    known = present([*curve.values, *curve.low, *curve.high])
    bottom = min(known)
    top = max(known)
    if bottom >= 0 and top <= 1 and top - bottom > 0.2:
        return (0.0, 1.0)
    if top == bottom:
        return (bottom - 0.5, top + 0.5)
    return (bottom, top)


def _small_curves(curves: Sequence[Curve], size: Size) -> list[RenderableType]:
    """Return lines of figures, two or three side by side: name, curve, newest value."""
    columns = 1 + (size.width >= _TWO) + (size.width >= _WIDE)
    cell = size.width // columns - 1
    room = max(4, cell - _NAME - _VALUE - 2)
    lines: list[RenderableType] = []
    for start in range(0, len(curves), columns):
        parts = []
        for curve in curves[start : start + columns]:
            drawn = sparkline(curve.values, room)
            parts.append(words(f"{curve.name:<{_NAME}} ", "dim", size))
            parts.append(words(f"{drawn:<{room}}", "cyan", size))
            parts.append(words(f"{curve.newest:>{_VALUE}}  ", "", size))
        line = _line(*parts)
        line.rstrip()
        lines.append(line)
    return lines


def _findings(one: Essentials, size: Size) -> list[RenderableType]:
    """Return the most serious findings: their titles, and their advice in a tall terminal."""
    lines: list[RenderableType] = []
    most = 2
    if size.is_tall:
        most = _MOST_FINDINGS
    for finding in one.findings[:most]:
        text = finding.title
        if size.is_tall:
            text = finding.line()
        wrapped = textwrap.wrap(harmless(text), size.width - 4)
        if len(wrapped) > 2:
            wrapped = [wrapped[0], wrapped[1][: size.width - 6] + " …"]
        marks = [MARKS[finding.severity], "  "]
        for begin, part in zip(marks, wrapped, strict=False):
            lines.append(words(f"{begin} {part}", _STYLES[finding.severity], size))
    more = len(one.findings) - most
    if more > 0:
        lines.append(words(f"   and {counted(more, 'finding')} more: ttrl report", "dim", size))
    return lines


def _sample(one: Essentials, size: Size, lines: int) -> list[RenderableType]:
    """Return the newest sample, cut to `lines`."""
    if one.sample is None or lines < 3:
        return []
    title = words(", ".join(one.sample.facts).replace("\n", " "), "dim", size)
    title.truncate(size.width - 6, overflow=size.overflow)
    line = words("─", "dim", size).plain
    rule = Rule(title, align="left", style="dim", characters=line)
    shown: list[RenderableType] = [rule]
    asked = " ".join(one.sample.asked[:_MOST_TEXT].split())
    if asked:
        shown.append(words(f"› {asked}", "dim", size))
    answer = one.sample.answer[:_MOST_TEXT]
    wrapped = [
        part
        for line in harmless(answer).splitlines()
        for part in _folded(line.expandtabs(4), size.width) or [""]
    ]
    room = lines - len(shown)
    if len(wrapped) > room:
        wrapped = [*wrapped[: room - 1], "…"]
    return shown + [words(part, "", size) for part in wrapped]


def _folded(line: str, width: int) -> list[str]:
    """Break a line by the columns of its characters: some take two, some none."""
    parts = textwrap.wrap(line, width, drop_whitespace=False)
    return [piece for part in parts for piece in chop_cells(part, width)]


def _lines(part: RenderableType) -> int:
    """Count the lines of a part made here."""
    if isinstance(part, Table):
        return part.row_count
    return 1
