"""Packed rows as text for a terminal: one line per segment, indented in the shape of the trees."""

from collections.abc import Iterator, Sequence

import numpy as np

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.data.pictures import colours
from ttrl.data.pictures.segments import Segment, TokenText, check_rows, figures_of, segments_of, visible

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEAD = ("group", "parent", "positions", "trained", "advantage")


def packed_rows_text(
    packed: PackedTensors,
    rows: Sequence[int],
    token_text: TokenText | None = None,
    title: str = "",
    *,
    colour: bool = False,
    width: int = 130,
) -> str:
    """One block of lines per row: its figures, then group, parent, positions, share of trained positions, advantage, and the
    first and last tokens of each segment, with the label behind its end.

    colour: blocks in the colours of the trees as escape sequences for 24-bit terminals; letters (A: the first tree) otherwise.
    width: columns that a line may take; at least 60 are used. Token texts hold no control characters (`visible`).

    Raises PackError for rows that are not there.
    """
    width = max(width, 60)
    lines = [visible(title)] if title else []
    chosen = check_rows(packed, rows)
    segments = {row: segments_of(packed, row) for row in chosen}
    depths = max((segment.depth + 1 for row in chosen for segment in segments[row]), default=1)
    for row in segments:
        figures = figures_of(packed, row, segments[row])
        lines += ["", *_wrapped(f"row {row}: ", figures.words(), width)]
        if not segments[row]:
            continue
        cells = [_cells(packed, row, segment) for segment in segments[row]]
        widths = [max(map(len, column)) for column in zip(_HEAD, *cells)]
        mark = 2 + 2 * min(depths - 1, 8)
        lines.append(" " * (mark + 1) + _joined(_HEAD, widths) + "  tokens")
        for segment, values in zip(segments[row], cells, strict=True):
            left = "  " * min(segment.depth, 8) + _mark(segment, depths, colour)
            left += " " * (mark + 1 - 2 * min(segment.depth, 8) - 2) + _joined(values, widths) + "  "
            room = width - (mark + 1 + sum(widths) + 2 * (len(widths) - 1) + 2)
            lines.append(left + _tokens(packed, row, segment, token_text, max(room, 12)))
    return "\n".join(lines)


def _wrapped(lead: str, words: Sequence[str], width: int) -> Iterator[str]:
    line = lead + words[0]
    for word in words[1:]:
        if len(line) + 2 + len(word) > width:
            yield line + ","
            line = "  " + word
        else:
            line += ", " + word
    yield line


def _joined(values: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(value.rjust(width) for value, width in zip(values, widths, strict=True))


def _mark(segment: Segment, depths: int, colour: bool) -> str:
    """Two columns: a block in the colour of the segment, or a letter for its tree, small where samples do not share it."""
    if not colour:
        letter = _LETTERS[segment.tree % len(_LETTERS)]
        return (letter if segment.sample < 0 else letter.lower()) + " "
    found = colours.group_colour(segment.tree, segment.depth, depths)
    red, green, blue = (int(found[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[38;2;{red};{green};{blue}m██\x1b[0m"


def _cells(packed: PackedTensors, row: int, segment: Segment) -> list[str]:
    own = slice(segment.begin, segment.stop)
    trained = (packed.labels[row, own] != IGNORE_LABEL).numpy()
    share, advantage = "–", "–"
    if trained.any():
        values = packed.advantages[row, own].numpy()[trained]
        low, high = float(np.min(values)), float(np.max(values))
        share = f"{100 * trained.mean():.0f}%"
        advantage = f"{low:+.2f}" if low == high else f"{low:+.2f}…{high:+.2f}"
    parent = "–" if segment.parent == segment.group else str(segment.parent)
    return [str(segment.group), parent, f"{segment.begin}-{segment.stop - 1}", share, advantage]


def _tokens(packed: PackedTensors, row: int, segment: Segment, token_text: TokenText | None, room: int) -> str:
    """The first and the last tokens in `room` columns, then the label behind the end, in brackets."""

    def shown(token: int) -> str:
        return str(token) if token_text is None else visible(token_text(token))

    between = " " if token_text is None else ""
    label = f"[{shown(segment.label)}]" if segment.label != IGNORE_LABEL else ""
    ids = packed.tokens[row, segment.begin : segment.stop].tolist()
    if len(ids) <= room:  # else they cannot fit
        text = between.join(map(shown, ids))
        if len(text) + len(label) <= room:
            return text + label
    half = max((room - len(label) - 3) // 2, 3)
    first = _fitting(map(shown, ids), half, between)
    last = _fitting((shown(token)[::-1] for token in reversed(ids)), half, between)[::-1]
    return f"{first} … {last}{label}"


def _fitting(texts: Iterator[str], room: int, between: str) -> str:
    """As many as fit into `room` characters, whole; the first one cut off where it alone is longer."""
    line = next(texts)[:room]
    for text in texts:
        if len(line) + len(between) + len(text) > room:
            break
        line += between + text
    return line
