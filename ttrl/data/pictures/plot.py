"""Draw packed tensors with matplotlib, loaded on the first call."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrl.data.packing.packed import PackedTensors
from ttrl.data.packing.packed_format import IGNORE_LABEL
from ttrl.data.pictures.colours import advantage_colour, group_colour, mix
from ttrl.data.pictures.segments import (
    Segment,
    TokenText,
    check_rows,
    figures_of,
    figures_of_pack,
    segments_of,
    visible,
)
from ttrl.text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PADDING = "#d9dadc"
_TRAINED = "#1c1e21"
_UNTRAINED = "#e9e9e5"
_INK = "#5d636a"
# Rows of a picture by default; the most columns with tokens written into it.
_MAX_ROWS = 12
_MAX_TEXT = 96
# Lanes of a row, in units of about 0.13 inches, from the bottom: position, advantage, trained, tree
# (one unit or so per depth).
_POSITION = (0.0, 1.2)
_ADVANTAGE = (1.5, 4.1)
_MASK = (4.4, 5.2)
_TREE = 5.5
_UNIT = 0.13  # inches


def plot_packed_tensors(
    packed: PackedTensors,
    path: str | os.PathLike[str] | None = None,
    rows: Sequence[int] | None = None,
    tokenizer: Any = None,
    *,
    title: str = "",
) -> "Figure":
    """Draw a figure with four lanes per row, to scale along the positions: trees of groups, trained
    positions, advantages, and the position of each token in its sample. It is saved to `path` if
    given (as PNG unless its name says otherwise).

    A hue is a tree; its root is dark, and deeper groups stand lower and are lighter. A faint bar
    behind a group spans its continuations. Advantages are blue above and red-brown below a common
    zero, on one scale for all rows. Without `rows`, the first 12 are drawn. With a `tokenizer` (or
    a function from a token id to its text), and rows of at most 96 positions, tokens are written
    into their places.

    Raises PackError for missing rows, and ImportError without matplotlib.

    >>> sample = TokenizedResult(
    ...     task_id="sums/1", sample=0, token_ids=[5, 6, 7], assistant_mask=[False, False, True],
    ...     input_pos=[0, 1, 2], logprobs=[math.nan, math.nan, -0.5], prompt_length=2,
    ...     reward=1.0, advantage=0.5,
    ... )
    >>> packed = packed_tensors_from_tokenized_results([sample], seq_len=8, pad_id=0)
    >>> figure = plot_packed_tensors(packed, "rows.png")
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    chosen = check_rows(packed, range(min(packed.num_rows, _MAX_ROWS)) if rows is None else rows)
    segments = [segments_of(packed, row) for row in chosen]
    depths = max((segment.depth + 1 for one in segments for segment in one), default=1)
    largest = float(packed.advantages[chosen].abs().max()) or 1.0
    if packed.seq_len <= _MAX_TEXT:
        token_text = _token_text(tokenizer)
    else:
        token_text = None
    if token_text:
        level = 4.0
    else:
        level = max(0.45, min(1.6, 7 / depths))
    top = _TREE + level * depths
    height = len(chosen) * (top * _UNIT + 0.36) + 1.5
    figure = Figure(figsize=(13, height), layout=ConstrainedLayoutEngine(hspace=0.02, h_pad=0.05))
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    for axis, row, one in zip(axes, chosen, segments, strict=True):
        _draw_row(axis, packed, row, one, depths, largest, level)
        if token_text:
            _write_tokens(axis, packed, row, one, level, top, token_text)
        axis.set(ylim=(0, top), xlim=(0, packed.seq_len))
        lanes = {
            "position": _POSITION,
            "advantage": _ADVANTAGE,
            "trained": _MASK,
            "tree": (_TREE, top),
        }
        axis.set_yticks(
            [(low + high) / 2 for low, high in lanes.values()], list(lanes), fontsize=7, color=_INK
        )
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.set_title(
            f"row {row}: {', '.join(figures_of(packed, row, one).words()[1:])}",
            fontsize=8,
            loc="left",
            pad=3,
        )
    axes[-1].set_xlabel("position in the row", fontsize=8)
    axes[-1].tick_params(axis="x", length=3, labelsize=8)
    scale = LinearSegmentedColormap.from_list(
        "", [advantage_colour(v, 1, "light") for v in (-1, 0, 1)]
    )
    mappable = ScalarMappable(Normalize(-largest, largest), scale)
    figure.colorbar(
        mappable,
        ax=list(axes),
        label="advantage of the next token",
        pad=0.01,
        fraction=0.015,
        aspect=min(30, 8 * height),
    )
    _legend(figure, depths)
    whole = figures_of_pack(packed)
    if len(chosen) == packed.num_rows:
        shown = ""
    else:
        shown = f" ({len(chosen)} of them shown)"
    rows_word = "row" if packed.num_rows == 1 else "rows"
    figure.suptitle(
        (f"{visible(title)} · " if title else "").replace("$", r"\$")
        + f"{packed.num_rows} {rows_word} of {packed.seq_len:,} positions{shown}, "
        f"{percent(whole.tokens / whole.positions)} filled: {whole.samples:,} samples, "
        f"{whole.trained:,} trained tokens, "
        f"{whole.saved:,} saved by sharing",
        fontsize=11,
    )
    if path is not None:
        name = os.fspath(path)
        figure.savefig(name, dpi=130, format=None if os.path.splitext(name)[1] else "png")
    return figure


def _token_text(tokenizer: Any) -> TokenText | None:
    if tokenizer is None:
        return None
    if callable(getattr(tokenizer, "decode", None)):
        return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
    return lambda token: str(tokenizer(token))


def _draw_row(
    axis: "Axes",
    packed: PackedTensors,
    row: int,
    segments: Sequence[Segment],
    depths: int,
    largest: float,
    level: float,
) -> None:
    """Draw all lanes of a row. Position t spans t to t + 1."""
    from matplotlib.collections import PolyCollection

    used = segments[-1].stop if segments else 0
    top = _TREE + level * depths
    longest = max(
        (segment.position + segment.stop - segment.begin for segment in segments), default=1
    )
    for segment in segments:
        colour = group_colour(segment.tree, segment.depth, depths)
        bottom = top - (segment.depth + 1) * level
        spans = [(segment.begin, segment.stop, colour)]
        if segment.end > segment.stop:
            spans.append((segment.stop, segment.end, mix("#ffffff", colour, 0.18)))
        for begin, stop, face in spans:
            axis.broken_barh(
                [(begin, stop - begin)],
                (bottom, level),
                facecolor=face,
                edgecolor="white",
                linewidth=0.6 if len(segments) < 200 else 0.15,
            )
        low = segment.position
        high = segment.position + segment.stop - segment.begin
        heights = [(_POSITION[1] - _POSITION[0]) * value / longest for value in (low, high)]
        axis.fill_between([segment.begin, segment.stop], heights, color="#a6aab0", linewidth=0)
    axis.broken_barh(
        [(0, used)], (_MASK[0], _MASK[1] - _MASK[0]), facecolor=_UNTRAINED, linewidth=0
    )
    zero = sum(_ADVANTAGE) / 2
    half = (_ADVANTAGE[1] - _ADVANTAGE[0]) / 2
    axis.plot([0, used], [zero, zero], color="#c9ccd1", linewidth=0.6)
    trained = (packed.labels[row] != IGNORE_LABEL).numpy()
    values = np.where(trained, packed.advantages[row].numpy(), np.nan)
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    masked = [(begin, stop - begin) for begin, stop in edges.tolist()]
    axis.broken_barh(masked, (_MASK[0], _MASK[1] - _MASK[0]), facecolor=_TRAINED, linewidth=0)
    bars, colours = [], []  # one collection for all: advantages may differ from token to token
    for begin, stop, value in _runs(values):
        lower, upper = (
            sorted((zero, zero + value / largest * half)) if value else (zero - 0.06, zero + 0.06)
        )
        bars.append([(begin, lower), (begin, upper), (stop, upper), (stop, lower)])
        colours.append(advantage_colour(value, largest))
    axis.add_collection(PolyCollection(bars, facecolors=colours, linewidths=0))
    if used < packed.seq_len:
        axis.broken_barh(
            [(used, packed.seq_len - used)],
            (_TREE, top - _TREE),
            facecolor="#f4f4f2",
            hatch="////",
            edgecolor=_PADDING,
            linewidth=0,
        )


def _runs(values: np.ndarray) -> list[tuple[int, int, float]]:
    """Return begin, stop and value of the runs of equal numbers; NaN is left out."""
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    change = (filled[1:] != filled[:-1]) | (known[1:] != known[:-1])
    begins = [0, *(np.flatnonzero(change) + 1).tolist()]
    return [
        (b, s, float(values[b]))
        for b, s in zip(begins, [*begins[1:], len(values)], strict=True)
        if known[b]
    ]


def _legend(figure: "Figure", depths: int) -> None:
    from matplotlib.patches import Patch

    root, leaf = (group_colour(0, depth, max(depths, 2)) for depth in (0, depths - 1 or 1))
    handles = [
        Patch(facecolor=root, label="root of a tree (one hue per tree)"),
        Patch(facecolor=leaf, label="deepest group"),
        Patch(facecolor=mix("#ffffff", root, 0.18), label="visible to all groups below"),
        Patch(facecolor=_TRAINED, label="the next token is trained"),
        Patch(facecolor="#f4f4f2", hatch="////", edgecolor=_PADDING, label="padding"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)


def _write_tokens(
    axis: "Axes",
    packed: PackedTensors,
    row: int,
    segments: Sequence[Segment],
    level: float,
    top: float,
    token_text: TokenText,
) -> None:
    for segment in segments:
        for column in range(segment.begin, segment.stop):
            text = visible(token_text(int(packed.tokens[row, column])))
            text = (text if len(text) <= 8 else text[:7] + "…").replace("$", r"\$")
            height = top - (segment.depth + 0.5) * level
            axis.text(
                column + 0.5,
                height,
                text,
                ha="center",
                va="center",
                fontsize=6.5,
                rotation=90,
                clip_on=True,
            )
