"""Show packed rows as text for a terminal (`ttrl view --text`): one line per segment, indented in
the shape of the trees.
"""

import textwrap
from collections.abc import Sequence

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.data.pictures.segments import (
    Segment,
    TokenText,
    check_rows,
    figures_of,
    segments_of,
    visible,
)

_HEAD = ["group", "parent", "positions", "trained", "advantage", "tokens"]
_DEEPEST = 8  # indented levels at most


def packed_rows_text(
    packed: PackedTensors,
    rows: Sequence[int],
    token_text: TokenText | None = None,
    title: str = "",
    *,
    width: int = 130,
) -> str:
    """Return a block of lines per row: its figures, then each segment with its share of trained
    positions, advantage and tokens.

    Of long segments the first and the last tokens are shown, and always the label behind the end,
    in brackets. width: the most columns of a line, at least 60. Texts hold no control characters
    (`visible`). Raises PackError for missing rows.
    """
    lines = [visible(title)] if title else []
    for row in check_rows(packed, rows):
        segments = segments_of(packed, row)
        figures = ", ".join(figures_of(packed, row, segments).words())
        lines += [
            "",
            *textwrap.wrap(f"row {row}: {figures}", max(width, 60), subsequent_indent="  "),
        ]
        cells = [_HEAD, *(_cells(packed, row, segment) for segment in segments)]
        widths = [
            max(map(len, column)) for column in zip(*(line[:-1] for line in cells), strict=True)
        ]
        room = max(12, max(width, 60) - sum(widths) - 2 * len(widths))
        for line in cells if segments else ():
            lines.append(
                "  ".join(
                    [line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:]), line[-1]]
                )
            )
        for number, segment in enumerate(segments):
            lines[number - len(segments)] += _tokens(packed, row, segment, token_text, room)
    return "\n".join(lines)


def _cells(packed: PackedTensors, row: int, segment: Segment) -> list[str]:
    own = slice(segment.begin, segment.stop)
    trained = packed.labels[row, own] != IGNORE_LABEL
    share = "–"
    advantage = "–"
    if trained.any():
        values = packed.advantages[row, own][trained]
        low = f"{values.min():+.2f}"
        high = f"{values.max():+.2f}"
        share = f"{100 * trained.float().mean():.0f}%"
        advantage = low if low == high else f"{low}…{high}"
    if segment.parent == segment.group:
        parent = "–"
    else:
        parent = str(segment.parent)
    indent = "  " * min(segment.depth, _DEEPEST)
    return [
        f"{indent}{segment.group}",
        parent,
        f"{segment.begin}-{segment.stop - 1}",
        share,
        advantage,
        "",
    ]


def _tokens(
    packed: PackedTensors, row: int, segment: Segment, token_text: TokenText | None, room: int
) -> str:
    """Return the tokens in `room` columns, the middle left out if necessary, and the label behind
    the end.
    """

    def shown(ids: list[int]) -> str:
        if token_text is None:
            return " ".join(map(str, ids))
        return "".join(visible(token_text(one)) for one in ids)

    if segment.label != IGNORE_LABEL:
        label = f"[{shown([segment.label])}]"
    else:
        label = ""
    ids = packed.tokens[row, segment.begin : segment.stop].tolist()
    text = shown(ids if len(ids) <= room else [*ids[:room], *ids[-room:]])
    room = room - len(label)
    half = max((room - 3) // 2, 3)
    return (
        text if len(text) <= room and len(ids) <= room else f"{text[:half]} … {text[-half:]}"
    ) + label
