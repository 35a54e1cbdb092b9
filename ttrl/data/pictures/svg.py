"""One packed row as an SVG that a report can hold: every token in its cell, with all that the trainer knows of it on hover.

A hue is a tree of groups, the lighter the deeper; what is stored once for several samples is hatched. Under each cell stands the
advantage of the token that is predicted there: a bar up or down, and nothing where nothing is trained. A sample's last token is
never an input, so it stands behind the sample in a dashed cell without a position of its own. No script, no outer files; text
outside of cells takes the page's colour.
"""

from dataclasses import dataclass
from html import escape

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.data.pictures import colours
from ttrl.data.pictures.segments import TokenText, check_rows, figures_of, segments_of, visible

_UP, _DOWN, _LINE = "#3478d4", "#d2591e", "#8a8f96"  # visible on light and dark pages
_WIDTH, _CELL, _BAR, _GAP, _TOP = 960, 20, 8, 8, 64  # pixels: the picture, a cell, half of the bars, between lines, the legend
_CHARACTER, _LONGEST = 6.4, 14  # width of a character of 10.5 pixels in a monospace font; characters of a token that are shown


def packed_row_svg(packed: PackedTensors, row: int, token_text: TokenText | None = None, max_positions: int = 2048) -> str:
    """The picture of a row as `<svg>…</svg>`, to be put into HTML as it is.

    Ids are shown where `token_text` is None. Only the first `max_positions` positions are drawn, as each costs about 0.4 kB; a
    line says so. Padding is counted in the title.

    Raises PackError for a row that is not there.
    """
    check_rows(packed, [row])
    used = int((packed.group_ids[row] >= 0).sum())
    drawn = min(used, max_positions)
    facts = _RowFacts(packed, row, token_text)
    cells, lines = facts.layout(drawn)
    height = _TOP + lines * (_CELL + 2 * _BAR + _GAP) + (20 if drawn < used else 0)

    figures = figures_of(packed, row, facts.segments)
    title = escape(f"Row {row}: {', '.join(figures.words()).replace(' of the tokens', '')}")
    hatch = f"ttrl-hatch-{row}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{title}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
        f'<text x="0" y="14">{title}</text>',
        _legend(hatch),
        '<g font-family="ui-monospace, monospace" font-size="10.5" text-anchor="middle">',
        *(facts.draw(cell, hatch) for cell in cells),
        "</g>",
    ]
    if drawn < used:
        parts.append(f'<text x="0" y="{height - 4}">… and {used - drawn} more positions</text>')
    parts.append("</svg>")
    return "".join(parts)


@dataclass
class _Cell:
    """A place in the picture. `last` marks the one behind the end of a sample, for the token that is predicted but never read."""

    position: int
    last: bool
    x: float
    y: int
    width: float


def _legend(hatch: str) -> str:
    """The hatching, and what the colours mean."""
    root, middle, leaf = (colours.group_colour(0, depth, 3) for depth in range(3))
    pattern = (
        f'<defs><pattern id="{hatch}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="1.6" height="5" fill="#000" fill-opacity=".11"/></pattern></defs>'
    )
    return (
        f'{pattern}<rect x="0" y="23" width="22" height="13" fill="{root}"/>'
        f'<rect x="0" y="23" width="22" height="13" fill="url(#{hatch})"/>'
        '<text x="28" y="34">stored once for several samples</text>'
        + "".join(
            f'<rect x="{238 + 11 * i}" y="23" width="11" height="13" fill="{c}"/>' for i, c in enumerate((root, middle, leaf))
        )
        + '<text x="277" y="34">one hue per tree, the lighter the deeper</text>'
        f'<rect x="540" y="23.5" width="22" height="12" fill="none" stroke="{_LINE}" stroke-dasharray="3 2"/>'
        '<text x="568" y="34">a sample\'s last token: predicted, never read</text>'
        f'<rect x="0" y="42" width="10" height="7" fill="{_UP}"/><rect x="12" y="49" width="10" height="7" fill="{_DOWN}"/>'
        '<text x="28" y="53">advantage of the token that is predicted here, above and below zero; '
        "no bar where nothing is trained</text>"
    )


class _RowFacts:
    """A row's arrays as lists, and what is drawn for one position."""

    def __init__(self, packed: PackedTensors, row: int, token_text: TokenText | None) -> None:
        self.segments = segments_of(packed, row)
        used = self.segments[-1].stop if self.segments else 0
        self.tokens = packed.tokens[row, :used].tolist()
        self.labels = packed.labels[row, :used].tolist()
        self.groups = packed.group_ids[row, :used].tolist()
        self.samples = packed.sample_ids[row, :used].tolist()
        self.positions = packed.input_pos[row, :used].tolist()
        self.advantages = packed.advantages[row, :used].tolist()
        self.logprobs = packed.logprobs[row, :used].tolist()
        self.table = packed.samples
        self._text = token_text
        self._largest = max(map(abs, self.advantages), default=0.0) or 1.0
        depths = max((segment.depth + 1 for segment in self.segments), default=1)
        self._colour = [colours.group_colour(segment.tree, segment.depth, depths) for segment in self.segments]

    def text(self, token: int) -> str:
        """A token for people: its id where its text is unknown; spaces and control characters made visible."""
        return str(token) if self._text is None else visible(self._text(token)).replace(" ", "·")

    def _hover(self, position: int) -> str:
        group, label, sample = self.groups[position], self.labels[position], self.samples[position]
        parent = self.segments[group].parent
        lines = [
            f"token {self.text(self.tokens[position])!r}, id {self.tokens[position]}",
            f"group {group}, " + ("a root" if parent == group else f"continues group {parent}"),
            f"position {self.positions[position]}",
        ]
        if sample >= 0:
            lines.append(f"task {self.table[sample].task_id}, sample {self.table[sample].sample}")
        else:
            lines.append("shared by the completions that continue it")
        if label == IGNORE_LABEL:
            lines.append("nothing is trained here")
        else:
            lines.append(f"predicts {self.text(label)!r}, id {label}")
            lines.append(f"advantage {self.advantages[position]:+.3f}, logprob {self.logprobs[position]:.3f}")
        return escape("\n".join(lines), quote=False)

    def layout(self, drawn: int) -> tuple[list[_Cell], int]:
        """Places of the first `drawn` positions, line by line like text, and the number of lines."""
        cells: list[_Cell] = []
        x, line = 0.0, 0
        for position in range(drawn):
            ends = position + 1 == len(self.groups) or self.groups[position + 1] != self.groups[position]
            for last in (False, True) if ends and self.labels[position] != IGNORE_LABEL else (False,):
                text = self.text(self.labels[position] if last else self.tokens[position])
                width = max(14.0, _CHARACTER * min(len(text), _LONGEST) + 6)
                if x + width > _WIDTH:
                    x, line = 0.0, line + 1
                cells.append(_Cell(position, last, x, _TOP + line * (_CELL + 2 * _BAR + _GAP), width))
                x += width
        return cells, line + 1 if cells else 0

    def draw(self, cell: _Cell, hatch: str) -> str:
        """A cell with its bar."""
        position, x, y, width = cell.position, cell.x, cell.y, cell.width
        group = self.groups[position]
        shared = self.samples[position] < 0
        text = self.text(self.labels[position] if cell.last else self.tokens[position])
        short = escape(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")
        label = f'x="{x + width / 2:.1f}" y="{y + 14}"'
        if cell.last:
            box = f'x="{x + 1:.1f}" y="{y + 0.5}" width="{width - 2:.1f}" height="{_CELL - 1}"'
            hover = escape(f"token {text!r}, id {self.labels[position]}\nthe sample's last: predicted, never read", quote=False)
            return (
                f'<g><title>{hover}</title><rect {box} fill="transparent" stroke="{_LINE}" stroke-dasharray="3 2"/>'
                f"<text {label}>{short}</text></g>"
            )
        box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_CELL}"'
        colour = self._colour[group]
        parts = [f'<g><title>{self._hover(position)}</title><rect {box} fill="{colour}"/>']
        if shared:
            parts.append(f'<rect {box} fill="url(#{hatch})"/>')
        if position == 0 or self.groups[position - 1] != group:
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="1.5" height="{_CELL + 2 * _BAR}" fill="{_LINE}"/>')
        parts.append(f'<text {label} fill="#1c1e21">{short}</text>')
        if self.labels[position] != IGNORE_LABEL:
            value = self.advantages[position] / self._largest
            size = max(1.0, abs(value) * _BAR)
            zero = y + _CELL + _BAR
            top, bar = (zero - size, _UP) if value > 0 else (zero, _DOWN) if value < 0 else (zero - 0.5, _LINE)
            parts.append(f'<rect x="{x + 2:.1f}" y="{top:.1f}" width="{width - 3:.1f}" height="{size:.1f}" fill="{bar}"/>')
        parts.append("</g>")
        return "".join(parts)
