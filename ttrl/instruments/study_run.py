"""Study every iteration of a run with its start still present: each step's predicted effect on the
entropy, and the measured one.

In each iteration every optimizer step is studied: made of half of its answers, and measured on the
others. To study all of them, a run keeps all its states (`keep_checkpoints`). Never run on a GPU.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from ttrl.errors import RunFolderError, UnmovedStepError, UserError
from ttrl.facts import MetricsRow, read_facts
from ttrl.instruments.study import StudyDtype, study
from ttrl.instruments.study_report import CHANGES, change_text, how_computed
from ttrl.system.files import read_jsonl, write_json
from ttrl.text import counted

_HOW = ("device", "dtype", "run_dtype", "precision")
LINEAR = 0.5
"""A step is in the linear regime if the second order is at most this share of the first, by their
predictions.
"""


def study_run(
    run: str | Path,
    *,
    sequences: int = 256,
    dtype: StudyDtype = "fp32",
    device: Literal["cpu", "cuda"] | None = None,
    seed: int = 0,
    seen: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Study the steps of a run, oldest first; arguments as for `study`. seen: gets each new row.

    Returns "steps", a row of each ("iteration", "global_step", "lr", "entropy", "measured",
    "error", "first", "second", "is_linear"), "gone", the iterations with a missing start,
    "unmoved", those with a step without movement, and the result of `signs`. Raises RunFolderError
    or UnmovedStepError if no step can be studied.
    """
    how: dict[str, Any] = {"sequences": sequences, "dtype": dtype, "device": device, "seed": seed}
    steps: list[dict[str, Any]] = []
    gone: list[int] = []
    unmoved: list[int] = []
    computed: dict[str, Any] = {}
    why: UserError = RunFolderError(f"{run} has no iteration that was trained")
    for number, checkpoint in _iterations(Path(run)):
        update = 1
        updates = 1
        while update <= updates:
            try:
                found = study(checkpoint, factors=(1.0,), update=update, **how)
            except RunFolderError as error:
                gone.append(number)
                why = error
                break
            except UnmovedStepError as error:
                unmoved.append(number)
                why = error
                update += 1
                updates = error.updates
                continue
            update = update + 1
            updates = found["updates"]
            computed = {name: found[name] for name in _HOW}
            (here,) = found["sweep"]
            row = {"iteration": number, "global_step": found["global_step"], "lr": found["lr"]}
            row |= {
                "entropy": found["entropy"]["rao_blackwell"],
                "is_linear": abs(here["second"]) <= LINEAR * abs(here["first"]),
            }
            steps.append(
                row | {name: here[name] for name in ("measured", "error", "first", "second")}
            )
            seen(steps[-1])
    if not steps:
        raise why
    found_out = {"steps": steps, "gone": gone, "unmoved": list(dict.fromkeys(unmoved))}
    return {"run": str(run), **computed, **found_out, **signs(steps)}


def _iterations(run: Path) -> Iterator[tuple[int, Path]]:
    for path in sorted((run / "iterations").glob("*/grpo.yaml")):
        number = int(path.parent.name)
        if number:  # in iteration 0 a trainer only looks at the model
            yield number, path.parent / "checkpoint"


def signs(steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the steps with a measured change of the first order's sign: of all, and of those in the
    linear regime.
    """
    right = [one["measured"] * one["first"] > 0 for one in steps]
    linear = [is_right for is_right, one in zip(right, steps, strict=True) if one["is_linear"]]
    return {"right": sum(right), "linear": len(linear), "linear_right": sum(linear)}


HEADING = (
    "How each optimizer step changed the entropy of whole answers: how far the policy is from "
    "always answering the same. A change below 0 makes answers more alike. Measured on answers "
    "that "
    "the step was not made of, and predicted from the gradient (first order) and its curvature "
    "(with second)."
)
"""The heading of the rows."""


def row_text(row: Mapping[str, Any] | None) -> str:
    """Write a row for a terminal; None: the heads of its columns."""
    if row is None:
        return (
            f"{'iteration':>9} {'step':>5} {'entropy, nats':>18} {'measured δH':>22} "
            f"{'first order':>12} {'with second':>12}"
        )
    entropy, measured = (f"{value:.4g} ± {error:.2g}" for value, error in _pairs(row))
    both = row["first"] + row["second"]
    return (
        f"{row['iteration']:>9} {row['global_step']:>5} {entropy:>18} {measured:>22} "
        f"{row['first']:>12.4g} {both:>12.4g}"
    )


def _pairs(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    return [(row["entropy"]["value"], row["entropy"]["error"]), (row["measured"], row["error"])]


def last_words(found: Mapping[str, Any]) -> str:
    """Describe the computation, and how often the first order had the right sign."""
    text = _course(found["steps"]) + "\n" + how_computed(found) + "\n"
    text += f"The first order has the sign of what was measured in {found['right']} of "
    text += f"{len(found['steps'])} steps; in {found['linear_right']} of the {found['linear']} "
    text += "whose second order is at most half of the first."
    if found["gone"]:
        which = ", ".join(map(str, found["gone"]))
        text += (
            f"\nNot there any more: what iterations {which} started from (keep_checkpoints says "
            "how many a run keeps)."
        )
    if found["unmoved"]:
        which = ", ".join(map(str, found["unmoved"]))
        text += f"\nLeft out: steps of iterations {which} that moved nothing."
    return text


def _course(steps: Sequence[Mapping[str, Any]]) -> str:
    """Summarise the steps."""
    changes = [change_text(one["measured"], one["error"]) for one in steps]
    counts = [f"{kind} in {changes.count(kind)}" for kind in CHANGES if kind in changes]
    (first, _), (last, _) = _pairs(steps[0])[0], _pairs(steps[-1])[0]
    number = counted(len(steps), "step")
    return (
        f"The entropy of an answer went from {first:.4g} nats before the first of {number} to "
        f"{last:.4g} before the last: it {', '.join(counts)}."
    )


def write_steps(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write study.json and the pictures into a folder. Raises StorageError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "study.json"
    picture = folder / "steps.png"
    write_json(path, dict(found))
    draw_steps(found, picture)
    metrics = Path(found["run"], "metrics.jsonl")
    if metrics.is_file():
        rows = [read_facts(MetricsRow, row) for row in read_jsonl(metrics)]
        noise = [row for row in rows if row.gradient_noise.scale is not None]
    else:
        noise = []
    return [path, picture, *([draw_noise(noise, folder / "noise.png")] if noise else [])]


def draw_noise(rows: Sequence[MetricsRow], path: Path) -> Path:
    """Draw the gradient noise scale with its interval, and the samples' share of the noise. rows:
    of metrics.jsonl. Returns the path.
    """
    x = [row.iteration for row in rows]
    noise = [row.gradient_noise for row in rows]
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    scales = [_plotted(one.scale) for one in noise]
    lows = [_plotted(one.scale if one.low is None else one.low) for one in noise]
    highs = [_plotted(one.high) for one in noise]
    above.plot(x, scales, label="noise scale")
    above.fill_between(x, lows, highs, alpha=0.2, label="95% interval")
    above.plot(x, [_plotted(one.prompts) for one in noise], "--", label="prompts of a step")
    above.set(yscale="log", ylabel="prompts", title="the batch at which noise equals signal")
    above.legend()
    below.plot(x, [_plotted(one.from_samples) for one in noise])
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set(xlabel="iteration", ylabel="share of the noise\nfrom samples", ylim=(0, 1))
    figure.savefig(path, dpi=150)
    return path


def _plotted(value: float | None) -> float:
    """Return matplotlib's value: NaN for a missing one."""
    if value is None:
        return math.nan
    return value


def draw_steps(found: Mapping[str, Any], path: Path) -> None:
    """Draw predicted against measured changes, and the entropy, over optimizer steps."""
    steps = found["steps"]
    x = [one["global_step"] for one in steps]
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.axhline(0, color="grey", linewidth=0.6)
    above.errorbar(
        x,
        [one["measured"] for one in steps],
        [one["error"] for one in steps],
        fmt="o",
        label="measured",
    )
    above.plot(x, [one["first"] for one in steps], "_", markersize=12, label="first order")
    above.plot(x, [one["first"] + one["second"] for one in steps], "x", label="with second order")
    seen = [one["measured"] + side * one["error"] for one in steps for side in (-1, 1)] + [
        one["first"] for one in steps
    ]
    # A second order far off would leave none for the rest.
    room = 0.1 * (max(seen) - min(seen)) or 1.0
    above.set(
        ylim=(min(0.0, *seen) - room, max(0.0, *seen) + room),
        ylabel="change of entropy\nby the step, nats",
        title="what each step does to the entropy\n(made of half of its answers, measured on "
        "others)",
    )
    above.legend()
    entropies = [(one["entropy"]["value"], one["entropy"]["error"]) for one in steps]
    below.errorbar(
        x, [value for value, _ in entropies], [error for _, error in entropies], fmt="o-"
    )
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set(xlabel="optimizer step", ylabel="entropy of an\nanswer, nats", ylim=(0, None))
    figure.savefig(path, dpi=150)
