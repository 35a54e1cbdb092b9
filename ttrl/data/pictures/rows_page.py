"""Show packed rows as HTML: as a page to look through (`ttrl view`), and one row as a piece of a
report.

The page needs nothing else: its one script is inline, named by its hash in the content security
policy; the policy forbids everything else. It draws from compact arrays (`row_data`), a few bytes
per position: canvases for whole rows, and elements for a few hundred tokens at a time, to keep rows
of 100,000 positions usable. Model text reaches the page only as JSON with every `<` escaped, and
from there only as text; in a report's row the template escapes it. No token can become markup.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.data.pictures import colours
from ttrl.data.pictures.segments import (
    RowFigures,
    Segment,
    TokenText,
    check_rows,
    figures_of,
    figures_of_pack,
    segments_of,
    visible,
)
from ttrl.errors import PackError
from ttrl.messages import JsonObject
from ttrl.text import counted, spans

MAX_BYTES = 50_000_000
"""The largest page: browsers still open it, phones hardly."""
_BYTES_PER_POSITION = 14  # about the most: a number in the vocabulary, a log-probability
_BYTES_PER_CHANGE = 12  # for a change of advantage or weight from the position before
_LOGPROB_UNIT = 1e-4  # nats, the rounding of log-probabilities on the page

_HERE = Path(__file__).parent
_TEMPLATES = Environment(
    loader=FileSystemLoader(_HERE),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def packed_rows_html(
    packed: PackedTensors,
    rows: Sequence[int],
    token_text: TokenText | None = None,
    title: str = "Packed rows",
    most_bytes: int = MAX_BYTES,
) -> str:
    """Return the page of these rows, in this order; ids are shown if `token_text` is None. Raises
    PackError for missing rows, and for a page larger than `most_bytes`.
    """
    chosen = check_rows(packed, rows)
    tokens = int((packed.group_ids[chosen] >= 0).sum())
    changes = sum(
        int((values[chosen, 1:] != values[chosen, :-1]).sum())
        for values in (packed.advantages, packed.weights)
    )
    size = tokens * _BYTES_PER_POSITION + changes * _BYTES_PER_CHANGE
    if size > most_bytes:
        raise PackError(
            f"{len(chosen)} rows with {tokens:,} tokens make a page of up to {size / 1e6:.0f} MB, "
            f"and browsers get slow above {most_bytes / 1e6:.0f} MB; choose about "
            f"{max(1, len(chosen) * most_bytes // size)} rows at a time"
        )
    segments = {row: segments_of(packed, row) for row in chosen}
    data = page_data(packed, segments, token_text)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _TEMPLATES.get_template("page.html").render(
        title=visible(title),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        summary=_summary(packed, chosen, figures_of_pack(packed)),
        scale=f"{data['largest']:.3g}",
        rows={row: figures_of(packed, row, segments[row]).words() for row in chosen},
        data=Markup(script_json(data)),
        script=Markup(script),
    )


def packed_row_html(
    packed: PackedTensors, row: int, token_text: TokenText | None = None, max_positions: int = 2048
) -> str:
    """Return one row as a `<div>` without a script, for other pages: every token, with the
    trainer's values on hover.

    Ids are shown if `token_text` is None. Only the first `max_positions` positions are drawn, at
    about 0.3 kB each; a line gives the number left. Padding is counted in the title.

    Raises PackError for a missing row.
    """
    check_rows(packed, [row])
    segments = segments_of(packed, row)
    used = segments[-1].stop if segments else 0
    depths = max((segment.depth + 1 for segment in segments), default=1)
    facts = _RowFacts(packed, row, token_text)
    blocks = []
    for segment in segments:
        if segment.begin < max_positions:
            stop = min(segment.stop, max_positions)
            trained = segment.label != IGNORE_LABEL and stop == segment.stop
            blocks.append(
                {
                    "colour": colours.group_colour(segment.tree, segment.depth, depths),
                    "indent": 14 * min(segment.depth, 12),
                    "head": f"{_parentage(segment)}: {facts.owner(segment)}",
                    "tokens": [
                        facts.cell(segment, position) for position in range(segment.begin, stop)
                    ],
                    "last": facts.last(segment) if trained else None,
                }
            )
    words = ", ".join(figures_of(packed, row, segments).words()).replace(" of the tokens", "")
    return _TEMPLATES.get_template("row.html").render(
        title=f"Row {row}: {words}",
        blocks=blocks,
        left=max(0, used - max_positions),
        ids=token_text is None,
    )


def _parentage(segment: Segment) -> str:
    return f"group {segment.group}, " + (
        "a root" if segment.parent == segment.group else f"continues group {segment.parent}"
    )


class _RowFacts:
    """Facts to show for each position of a row."""

    def __init__(self, packed: PackedTensors, row: int, token_text: TokenText | None) -> None:
        columns = (
            packed.tokens,
            packed.labels,
            packed.input_pos,
            packed.advantages,
            packed.logprobs,
        )
        self.tokens, self.labels, self.positions, self.advantages, self.logprobs = (
            column[row].tolist() for column in columns
        )
        self._samples = packed.samples
        self._token_text = token_text
        self._largest = max(map(abs, self.advantages), default=0.0) or 1.0

    def text(self, token: int) -> str:
        """Return a token for people: its id if its text is unknown, else the text with everything
        made visible.
        """
        if self._token_text is None:
            return str(token)
        return visible(self._token_text(token)) or "∅"

    def owner(self, segment: Segment) -> str:
        if segment.sample < 0:
            return "shared by the completions below it"
        sample = self._samples[segment.sample]
        return f"task {visible(sample.task_id)}, sample {sample.sample}"

    def cell(self, segment: Segment, position: int) -> dict[str, str]:
        """Return a token's text, its hover text, and the colour of its label's advantage."""
        token = self.tokens[position]
        label = self.labels[position]
        advantage = self.advantages[position]
        lines = [
            f"token {self.text(token)!r}, id {token}",
            _parentage(segment),
            f"position {self.positions[position]}",
            self.owner(segment),
        ]
        if label == IGNORE_LABEL:
            lines.append("nothing is trained here")
            bar = "transparent"
        else:
            lines.append(f"predicts {self.text(label)!r}, id {label}")
            lines.append(f"advantage {advantage:+.3f}, logprob {self.logprobs[position]:.3f}")
            bar = colours.advantage_colour(advantage, self._largest)
        return {"text": self.text(token), "hover": "\n".join(lines), "bar": bar}

    def last(self, segment: Segment) -> dict[str, str]:
        """Return the same for a sample's last token, only a label."""
        text = self.text(segment.label)
        return {
            "text": text,
            "hover": (
                f"token {text!r}, id {segment.label}\nthe sample's last: predicted, never read"
            ),
        }


def script_json(value: Any) -> str:
    """Return JSON safe inside a <script> element: ASCII, without characters special to an HTML
    parser.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(
    packed: PackedTensors, segments: dict[int, list[Segment]], token_text: TokenText | None
) -> JsonObject:
    """Return the data of the page's script, as JSON values.

    rows         one per row, see `row_data`
    samples      by number in the sample table: task, sample, reward, advantage, finish reason
    ids, texts   the vocabulary: token ids, and their texts (null if unknown); `tokens` and
                 labels are numbers in it
    positions    seq_len
    largest      of |advantage| over the rows, the end of the scale; 1 if all are 0
    colours      by theme, tree and depth; ups, downs and flats by theme for advantages
    """
    chosen = list(segments)
    owned = [segment for row in chosen for segment in segments[row] if segment.sample >= 0]
    labels = [segment.label for segment in owned if segment.label != IGNORE_LABEL]
    ids = np.unique(
        np.concatenate([packed.tokens[chosen].numpy().ravel(), np.array(labels, dtype=np.int64)])
    )
    depths = max((segment.depth + 1 for row in chosen for segment in segments[row]), default=1)
    trees = range(len(colours.HUES))
    levels = range(depths)
    samples = {}
    for segment in owned:
        sample = packed.samples[segment.sample]
        samples[str(segment.sample)] = [
            visible(sample.task_id),
            sample.sample,
            sample.reward,
            sample.advantage,
            None if sample.finish_reason is None else visible(sample.finish_reason),
        ]
    return {
        "rows": [row_data(packed, row, segments[row], ids) for row in chosen],
        "samples": samples,
        "ids": ids.tolist(),
        "texts": None
        if token_text is None
        else [visible(token_text(number)) for number in ids.tolist()],
        "positions": packed.seq_len,
        "largest": float(packed.advantages[chosen].abs().max()) or 1.0,
        "logprobUnit": _LOGPROB_UNIT,
        "colours": {
            theme: [
                [colours.group_colour(tree, level, depths, theme) for level in levels]
                for tree in trees
            ]
            for theme in ("light", "dark")
        },
        "up": colours.UP,
        "down": colours.DOWN,
        "flat": colours.FLAT,
    }


def row_data(
    packed: PackedTensors, row: int, segments: Sequence[Segment], ids: np.ndarray
) -> JsonObject:
    """Return a row as compact lists; `ids` is the sorted vocabulary of the page.

    segments     [parent, depth, tree, begin, stop, end, sample, position, label], in the order of
                 their groups; label -1 for none
    tokens       one per position outside padding
    trained      [begin, stop, begin, stop, …]: runs of positions with a label
    advantages, weights, versions     of those positions in order, as [value, count, value, count,
                                      …]
    logprobs, reference     of those positions in order, in units of 1e-4 nats, null if unknown;
                            reference is null without one
    """
    used = segments[-1].stop if segments else 0
    trained = (packed.labels[row, :used] != IGNORE_LABEL).numpy()
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
    reference = packed.reference_logprobs

    def place(label: int) -> int:
        if label == IGNORE_LABEL:
            return -1
        return int(np.searchsorted(ids, label))

    return {
        "row": row,
        "segments": [
            [
                s.parent,
                s.depth,
                s.tree,
                s.begin,
                s.stop,
                s.end,
                s.sample,
                s.position,
                place(s.label),
            ]
            for s in segments
        ],
        "tokens": np.searchsorted(ids, packed.tokens[row, :used].numpy()).tolist(),
        "trained": edges.tolist(),
        "advantages": _runs(packed.advantages[row, :used].numpy()[trained]),
        "weights": _runs(packed.weights[row, :used].numpy()[trained]),
        "versions": _runs(packed.weights_version[row, :used].numpy()[trained]),
        "logprobs": _rounded(packed.logprobs[row, :used].numpy()[trained]),
        "reference": None
        if reference is None
        else _rounded(reference[row, :used].numpy()[trained]),
    }


def _runs(values: np.ndarray) -> list[float | int]:
    """Return [1, 1, 2] as [1, 2, 2, 1], floats with six digits for people."""
    pairs = ((value, sum(1 for _ in run)) for value, run in groupby(values.tolist()))
    return [
        one
        for value, count in pairs
        for one in (float(f"{value:.6g}") if isinstance(value, float) else value, count)
    ]


def _rounded(logprobs: np.ndarray) -> list[int | None]:
    return [None if value != value else round(value / _LOGPROB_UNIT) for value in logprobs.tolist()]


def _summary(packed: PackedTensors, chosen: Sequence[int], figures: RowFigures) -> str:
    count = f"{counted(packed.num_rows, 'row')} of {packed.seq_len:,} positions"
    if len(chosen) == packed.num_rows:
        shown = ""
    else:
        shown = f" Shown here: {'row' if len(chosen) == 1 else 'rows'} {spans(chosen)}."
    dropped = ", ".join(
        f"{number:,} {reason.replace('_', ' ')}"
        for reason, number in packed.dropped.items()
        if number
    )
    return f"{count}: {', '.join(figures.words()[1:])}.{shown}" + (
        f" Set aside or changed: {dropped}." if dropped else ""
    )
