"""Pictures of packed tensors, to look at a pack before training on it.

`plot_packed_tensors` draws many rows at once with matplotlib (loaded when it is called, and not needed otherwise);
`packed_row_svg` draws one row token by token, with nothing but text.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrl.data.packed import PackedTensors
from ttrl.data.packed_format import IGNORE_LABEL
from ttrl.data.row_svg import packed_row_svg
from ttrl.errors import PackError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["packed_row_svg", "plot_packed_tensors"]

_PALETTE = ["#2563b8", "#d9730d", "#2f8f6b", "#b8385e", "#7a5bc4", "#8a7a1e"]
_PADDING, _TRAINED, _UNTRAINED = "#d9dadc", "#1c1e21", "#f1f1ef"
_MAX_ROWS, _MAX_TEXT = 12, 96  # rows of a picture when none are named; columns up to which tokens are written into it


def plot_packed_tensors(
    packed: PackedTensors,
    path: str | os.PathLike[str] | None = None,
    rows: Sequence[int] | None = None,
    tokenizer: Any = None,
) -> "Figure":
    """A figure with three lanes per row: groups, trained positions, advantages. Saved to `path` if that is given.

    In the lane of groups a colour is a prompt with its completions: the shared prompt dark, its completions in two light tints by
    turns, padding grey. Without `rows`, the first 12 are drawn. With a `tokenizer`, and rows of at most 96 positions, tokens are
    written into their places.

    Raises PackError for rows that are not there, and ImportError where matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    chosen = list(range(min(packed.num_rows, _MAX_ROWS))) if rows is None else [int(row) for row in rows]
    if not chosen or not all(0 <= row < packed.num_rows for row in chosen):
        raise PackError(f"rows {chosen} of {packed.num_rows} rows; give some from 0 to {packed.num_rows - 1}")
    largest = float(packed.advantages[chosen].abs().max()) or 1.0
    figure = Figure(figsize=(13, 1.5 + 0.72 * len(chosen)), layout="constrained")
    figure.get_layout_engine().set(hspace=0.06)
    axes = figure.subplots(len(chosen), 1, sharex=True, squeeze=False)[:, 0]
    with_text = tokenizer is not None and packed.seq_len <= _MAX_TEXT  # instead of the hatching, which would hide it
    scale = None
    for axis, row in zip(axes, chosen, strict=True):
        groups, trained = _group_colours(packed, row), _trained_colours(packed, row)
        values = np.where((packed.labels[row] != IGNORE_LABEL).numpy(), packed.advantages[row].numpy(), np.nan)
        # Each lane is an image of one line: [1, T, 3] or [1, T], from top to bottom.
        common = {"aspect": "auto", "interpolation": "nearest"}
        right = packed.seq_len - 0.5
        axis.imshow(groups[None], extent=(-0.5, right, 2, 4), **common)
        axis.imshow(trained[None], extent=(-0.5, right, 1.2, 1.9), **common)
        scale = axis.imshow(values[None], extent=(-0.5, right, 0, 1.1), cmap="RdBu", vmin=-largest, vmax=largest, **common)
        axis.set(ylim=(0, 4), xlim=(-0.5, right), yticks=[3, 1.55, 0.55])
        axis.set_yticklabels([f"row {row}", "trained", "advantage"], fontsize=7.5)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        _mark_groups(axis, packed, row, hatched=not with_text)
        if with_text:
            _write_tokens(axis, packed, row, tokenizer)
    axes[-1].set_xlabel("position in the row")
    axes[-1].tick_params(axis="x", length=3)
    figure.colorbar(scale, ax=list(axes), label="advantage of the next token", pad=0.01, fraction=0.02)
    dark, light, other = (_tint(_PALETTE[0], share) for share in (0.0, 0.55, 0.72))
    figure.legend(
        handles=[
            Patch(facecolor=dark, hatch="" if with_text else "////", edgecolor="white", label="prompt, stored once"),
            Patch(facecolor=light, label="its completions,"),
            Patch(facecolor=other, label="in turn (one colour per prompt)"),
            Patch(facecolor=_TRAINED, label="the next token is trained"),
            Patch(facecolor=_PADDING, label="padding"),
        ],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
    )
    shown = "" if len(chosen) == packed.num_rows else f" ({len(chosen)} of them shown)"
    fill = packed.num_tokens / packed.tokens.numel()
    figure.suptitle(
        f"{packed.num_rows} rows of {packed.seq_len} positions{shown}, {100 * fill:.1f}% filled: "
        f"{len(packed.samples)} samples, {packed.num_trained} trained tokens",
        fontsize=11,
    )
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _tint(colour: str, share: float) -> tuple[float, float, float]:
    """A colour mixed with white."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (channel + (1 - channel) * share for channel in channels)
    return red, green, blue


def _group_colours(packed: PackedTensors, row: int) -> np.ndarray:
    """[T, 3]."""
    groups, samples = packed.group_ids[row].tolist(), packed.sample_ids[row].tolist()
    parent_of = dict(zip(groups, packed.parent_ids[row].tolist()))
    colours: dict[int, tuple[float, float, float]] = {-1: _tint(_PADDING, 0.0)}
    hue_of: dict[int, int] = {}
    for group, sample in dict(zip(groups, samples)).items():  # in the order of the row: parents first
        if group < 0:
            continue
        parent = parent_of[group]
        hue_of[group] = hue_of[parent] if parent != group else len({hue_of[g] for g in hue_of})
        share = 0.0 if sample < 0 else (0.55, 0.72)[group % 2]
        colours[group] = _tint(_PALETTE[hue_of[group] % len(_PALETTE)], share)
    return np.array([colours[group] for group in groups])


def _trained_colours(packed: PackedTensors, row: int) -> np.ndarray:
    """[T, 3]."""
    dark, light, padding = (_tint(colour, 0.0) for colour in (_TRAINED, _UNTRAINED, _PADDING))
    trained, real = (packed.labels[row] != IGNORE_LABEL).tolist(), (packed.group_ids[row] >= 0).tolist()
    return np.array([dark if t else light if r else padding for t, r in zip(trained, real)])


def _mark_groups(axis: Any, packed: PackedTensors, row: int, hatched: bool) -> None:
    """Draws a line before each group, and hatches shared prompts."""
    from matplotlib.patches import Rectangle

    groups, samples = packed.group_ids[row], packed.sample_ids[row]
    for group in groups[groups >= 0].unique().tolist():
        columns = (groups == group).nonzero().flatten()
        first, last = int(columns[0]), int(columns[-1])
        if hatched and samples[first] < 0:
            place = (first - 0.5, 2), last - first + 1, 2
            axis.add_patch(Rectangle(*place, fill=False, hatch="////", edgecolor="white", linewidth=0))
        axis.plot([first - 0.5, first - 0.5], [2, 4], color="white", linewidth=0.8)


def _write_tokens(axis: Any, packed: PackedTensors, row: int, tokenizer: Any) -> None:
    for column, token in enumerate(packed.tokens[row].tolist()):
        if packed.group_ids[row, column] >= 0:
            text = tokenizer.decode([token], skip_special_tokens=False).replace("\n", "↵")
            text = (text if len(text) <= 8 else text[:7] + "…").replace("$", r"\$")
            colour = "white" if packed.sample_ids[row, column] < 0 else "black"
            axis.text(column, 3, text, ha="center", va="center", fontsize=6.5, rotation=90, color=colour, clip_on=True)
