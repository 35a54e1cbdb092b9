"""Packed rows as one HTML page to look through: an overview of each row, and the tokens of the place that one points at.

The page needs nothing else: its one script stands in it, named by its hash in the content security policy, which forbids
everything other, and draws from compact arrays (`row_data`), a few bytes per position. What models wrote reaches the page only as
JSON with every `<` written as an escape, and from there only as text, so no token can become markup. Drawn are canvases for whole
rows, and elements for a few hundred tokens at a time: rows of 100,000 positions stay usable.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

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

MAX_BYTES = 50_000_000
"""Of a page: browsers still open it, phones hardly."""
_BYTES_PER_POSITION = 14  # at the most, about: a number in the vocabulary, a log-probability
_BYTES_PER_CHANGE = 12  # of an advantage or weight from one position to the next
_LOGPROB_UNIT = 1e-4  # nats: what log-probabilities are rounded to on the page

_TEMPLATE = Path(__file__).with_name("page.html")


def packed_rows_html(
    packed: PackedTensors, rows: Sequence[int], token_text: TokenText | None = None, title: str = "Packed rows"
) -> str:
    """The page. `rows`: which ones, in this order. Ids are shown where `token_text` is None.

    Raises PackError for rows that are not there, and for so many that the page would be larger than MAX_BYTES.
    """
    chosen = check_rows(packed, rows)
    tokens = int((packed.group_ids[chosen] >= 0).sum())
    changes = sum(int((values[chosen, 1:] != values[chosen, :-1]).sum()) for values in (packed.advantages, packed.weights))
    size = tokens * _BYTES_PER_POSITION + changes * _BYTES_PER_CHANGE
    if size > MAX_BYTES:
        raise PackError(
            f"{len(chosen)} rows with {tokens:,} tokens would make a page of up to {size / 1e6:.0f} MB, and browsers get slow "
            f"above {MAX_BYTES / 1e6:.0f} MB; choose about {max(1, len(chosen) * MAX_BYTES // size)} rows at a time"
        )
    segments = {row: segments_of(packed, row) for row in chosen}
    figures = {row: figures_of(packed, row, segments[row]) for row in chosen}
    data = page_data(packed, segments, token_text)
    style, markup, script = _template()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_source_hash(script)}'"
    title = escape(visible(title))
    facts = {
        "TITLE": title,
        "POLICY": escape(policy),
        "STYLE": style,
        "SUMMARY": escape(_summary(packed, chosen, figures_of_pack(packed))),
        "SCALE": escape(f"{data['largest']:.3g}"),
        "ROWS": "".join(_row_html(row, figures[row]) for row in figures),
        "DATA": script_json(data),
        "SCRIPT": script,
    }
    # Split once, so that nothing that is put in is looked at again.
    pieces = markup.split("@@")
    return "".join(facts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def script_json(value: Any) -> str:
    """JSON that can stand in a <script> element: ASCII, and nothing in it that an HTML parser reacts to."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(packed: PackedTensors, segments: dict[int, list[Segment]], token_text: TokenText | None) -> dict[str, Any]:
    """What the page's script draws from, as JSON values.

    rows         one per row, see `row_data`
    samples      by number in the sample table: task, sample, reward, advantage, finish reason
    ids, texts   the vocabulary: token ids, and their texts (null where unknown); `tokens` and labels are numbers in it
    positions    seq_len
    largest      of |advantage| over the rows, the end of the scale; 1 where all are 0
    colours      by theme, tree and depth; ups, downs and flats by theme for advantages
    """
    chosen = list(segments)
    owned = [segment for row in chosen for segment in segments[row] if segment.sample >= 0]
    labels = [segment.label for segment in owned if segment.label != IGNORE_LABEL]
    ids = np.unique(np.concatenate([packed.tokens[chosen].numpy().ravel(), np.array(labels, dtype=np.int64)]))
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
        "texts": None if token_text is None else [visible(token_text(number)) for number in ids.tolist()],
        "positions": packed.seq_len,
        "largest": float(packed.advantages[chosen].abs().max()) or 1.0,
        "logprobUnit": _LOGPROB_UNIT,
        "colours": {
            theme: [[colours.group_colour(tree, level, depths, theme) for level in levels] for tree in trees]
            for theme in ("light", "dark")
        },
        "up": colours.UP,
        "down": colours.DOWN,
        "flat": colours.FLAT,
    }


def row_data(packed: PackedTensors, row: int, segments: Sequence[Segment], ids: np.ndarray) -> dict[str, Any]:
    """A row as compact lists; `ids` is the sorted vocabulary of the page.

    segments     [parent, depth, tree, begin, stop, end, sample, position, label], in the order of their groups; label -1 for none
    tokens       one per position that is not padding
    trained      [begin, stop, begin, stop, …]: runs of positions that have a label
    advantages, weights, versions     of those positions in order, as [value, count, value, count, …]
    logprobs, reference     of those positions in order, in units of 1e-4 nats, null where unknown; reference is null without one
    """
    used = segments[-1].stop if segments else 0
    trained = (packed.labels[row, :used] != IGNORE_LABEL).numpy()
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
    reference = packed.reference_logprobs

    def place(label: int) -> int:
        return -1 if label == IGNORE_LABEL else int(np.searchsorted(ids, label))

    return {
        "row": row,
        "segments": [[s.parent, s.depth, s.tree, s.begin, s.stop, s.end, s.sample, s.position, place(s.label)] for s in segments],
        "tokens": np.searchsorted(ids, packed.tokens[row, :used].numpy()).tolist(),
        "trained": edges.tolist(),
        "advantages": _runs(packed.advantages[row, :used].numpy()[trained]),
        "weights": _runs(packed.weights[row, :used].numpy()[trained]),
        "versions": _runs(packed.weights_version[row, :used].numpy()[trained]),
        "logprobs": _rounded(packed.logprobs[row, :used].numpy()[trained]),
        "reference": None if reference is None else _rounded(reference[row, :used].numpy()[trained]),
    }


def _runs(values: np.ndarray) -> list[float | int]:
    """[1, 1, 2] as [1, 2, 2, 1]. Floats with the six digits that people may want to read."""
    pairs = ((value, sum(1 for _ in run)) for value, run in groupby(values.tolist()))
    return [one for value, count in pairs for one in (float(f"{value:.6g}") if isinstance(value, float) else value, count)]


def _rounded(logprobs: np.ndarray) -> list[int | None]:
    return [None if value != value else round(value / _LOGPROB_UNIT) for value in logprobs.tolist()]


def _template() -> tuple[str, str, str]:
    """Style, markup and script of the page."""
    text = _TEMPLATE.read_text(encoding="utf-8")
    style, rest = text.split("<!-- style -->\n")[1].split("<!-- markup -->\n")
    markup, script = rest.split("<!-- script -->\n")
    return style, markup, script.replace("<script>", "").replace("</script>", "")


def _source_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _summary(packed: PackedTensors, chosen: Sequence[int], figures: RowFigures) -> str:
    count = f"{packed.num_rows:,} {'row' if packed.num_rows == 1 else 'rows'} of {packed.seq_len:,} positions"
    shown = "" if len(chosen) == packed.num_rows else f" Shown here: {_ranges(chosen)}."
    dropped = ", ".join(f"{number:,} {reason.replace('_', ' ')}" for reason, number in packed.dropped.items() if number)
    return f"{count}: {', '.join(figures.words()[1:])}.{shown}" + (f" Set aside or changed: {dropped}." if dropped else "")


def _ranges(rows: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "rows 0-2, 5"."""

    def spans() -> Iterator[str]:
        for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            yield str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"

    return ("row " if len(rows) == 1 else "rows ") + ", ".join(spans())


def _row_html(row: int, figures: RowFigures) -> str:
    """A row's place on the page; the script fills it."""
    words = "".join(f"<li>{escape(word)}</li>" for word in figures.words())
    head = f'<h2>Row {row}</h2><ul class="figures">{words}</ul>'
    return f'<section class="row" id="row-{row}">{head}<div class="picture"></div></section>'
