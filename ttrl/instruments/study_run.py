"""Study every iteration of a run with its start still present: each step's predicted effect on the
entropy, and the measured one.

In each iteration every optimizer step is studied, and measured on answers that it was not made of:
to held-out tasks, or the other half of its own. To study all of them, a run keeps all its states
(`keep_checkpoints`). Never run on a GPU.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ttrl.errors import RunFolderError, UnmovedStepError, UserError
from ttrl.facts import MetricsRow, read_facts
from ttrl.instruments.fisher import fit_of
from ttrl.instruments.held_out import HeldOut
from ttrl.instruments.study import StudyDtype, study
from ttrl.instruments.study_pictures import (
    draw_logprobs,
    draw_noise,
    draw_split,
    draw_steps,
    fit_text,
    save_figures,
)
from ttrl.instruments.study_report import CHANGES, change_text, how_computed, known, split_row
from ttrl.system.files import read_jsonl, write_json
from ttrl.text import counted

logger = logging.getLogger(__name__)

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
    kernel: int = 0,
    held_out: HeldOut | None = None,
    output: Path | None = None,
    seen: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Study the steps of a run, oldest first; arguments as for `study`. seen: gets each new row.
    output: a folder; study.json there holds the steps so far, also if the study is stopped.

    Returns "steps", a row of each ("iteration", "global_step", "lr", "entropy", "measured",
    "error", "first", "second", "is_linear", the sources of the first order as in `split_row`, the
    "entropy_batch", and with `kernel` the "predicted" and "changed" log-probabilities and the
    "kinds": K·A without a preconditioner and with the optimizer's), "gone", the iterations with a
    missing start, "unmoved", those with a step without movement, the result of
    `signs`, and the fits of all steps' predictions, "fit" and "logprob_fit". Raises RunFolderError
    or UnmovedStepError if no step can be studied.
    """
    how: dict[str, Any] = {
        "sequences": sequences,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "kernel": kernel,
        "held_out": held_out,
        "pairs": False,
    }
    steps: list[dict[str, Any]] = []
    gone: list[int] = []
    unmoved: list[int] = []
    computed: dict[str, object] = {}
    why: UserError = RunFolderError(
        f"{run} has no trained iteration; start the run again, and study it after the first "
        "training step"
    )

    def so_far() -> dict[str, Any]:
        left_out = {"gone": gone, "unmoved": list(dict.fromkeys(unmoved))}
        return {"run": str(run), **computed, **left_out, **summary(steps)}

    iterations = _iterations(Path(run))
    for place, (number, checkpoint) in enumerate(iterations, 1):
        update = 1
        updates = 1
        while update <= updates:
            logger.info("iteration %d (%d of %d), step %d", number, place, len(iterations), update)
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
            update += 1
            updates = found["updates"]
            computed = {name: found[name] for name in _HOW}
            (here,) = found["sweep"]
            row = {
                "iteration": number,
                "global_step": found["global_step"],
                "lr": found["lr"],
                "entropy": found["entropy"]["rao_blackwell"],
                "is_linear": abs(here["second"]) <= LINEAR * abs(here["first"]),
                "second": here["second"],
                "entropy_batch": found["entropy_batch"],
                **split_row(found),
            }
            if kernel:
                row["predicted"] = found["kernel"]["predicted"]
                row["changed"] = found["kernel"]["measured"]
                row["kinds"] = found["kernel"]["kinds"]
            steps.append(row)
            seen(row)
            if output is not None:
                output.mkdir(parents=True, exist_ok=True)
                write_json(output / FILE_NAME, known(so_far()))
    if not steps:
        raise why
    return so_far()


FILE_NAME = "study.json"


def summary(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the steps, the fits of their predictions, and the counts of right signs."""
    pairs = [(one["first"], one["measured"]) for one in steps]
    found: dict[str, Any] = {"steps": list(steps)}
    found["fit"] = vars(fit_of(*zip(*pairs, strict=True)))
    if "predicted" in steps[0]:
        found["logprob_fit"] = vars(fit_of(_joined(steps, "predicted"), _joined(steps, "changed")))
    return found | signs(steps)


def _joined(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for one in steps for value in one[name]]


def _iterations(run: Path) -> list[tuple[int, Path]]:
    paths = sorted((run / "iterations").glob("*/grpo.yaml"))
    numbered = [(int(path.parent.name), path.parent / "checkpoint") for path in paths]
    # In iteration 0 a trainer only looks at the model.
    return [one for one in numbered if one[0]]


def signs(steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count the steps with a measured change of the first order's sign: of all, and of those in the
    linear regime.
    """
    right = [one["measured"] * one["first"] > 0 for one in steps]
    linear = [is_right for is_right, one in zip(right, steps, strict=True) if one["is_linear"]]
    return {"right": sum(right), "linear": len(linear), "linear_right": sum(linear)}


HEADING = (
    "The change of the entropy of whole answers by each optimizer step. At an entropy of 0, the "
    "policy always gives the same answer; a change below 0 makes answers more alike. Measured on "
    "answers outside of the step, and predicted from the gradient (first order) and its curvature "
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
    entropy = f"{row['entropy']['value']:.4g} ± {row['entropy']['error']:.2g}"
    measured = f"{row['measured']:.4g} ± {row['error']:.2g}"
    both = row["first"] + row["second"]
    return (
        f"{row['iteration']:>9} {row['global_step']:>5} {entropy:>18} {measured:>22} "
        f"{row['first']:>12.4g} {both:>12.4g}"
    )


def last_words(found: Mapping[str, Any]) -> str:
    """Describe the computation, and how often the first order had the right sign."""
    text = _course(found["steps"]) + "\n" + how_computed(found) + "\n"
    text += f"The first order has the measured sign in {found['right']} of "
    text += f"{len(found['steps'])} steps; in {found['linear_right']} of the {found['linear']} "
    text += "with a second order of at most half the first.\n"
    text += f"Measured against predicted δH: {fit_text(found['fit'])}."
    if "logprob_fit" in found:
        count = found["logprob_fit"]["count"]
        text += f"\nδ log π of {count} answers after their steps: {fit_text(found['logprob_fit'])}."
        text += "\nK·A, from each step's own gradient, has the right sign for "
        text += f"{_kinds_text(found['steps'])} (sgd: without a preconditioner)."
    batches = [one["entropy_batch"] for one in found["steps"]]
    if batches[0]["tasks"] is not None:
        sampled = sorted({one["iteration"] for one in batches})
        least = min(one["effective_size"] for one in batches)
        text += f"\nThe entropy batch ({batches[0]['tasks']}) was sampled before iterations "
        text += f"{', '.join(map(str, sampled))}; elsewhere its answers are weighted, and at least "
        text += f"{least:.0%} of them are effective."
    if found["gone"]:
        which = ", ".join(map(str, found["gone"]))
        text += (
            f"\nGone: the starting checkpoints of iterations {which} (keep_checkpoints sets how "
            "many a run keeps)."
        )
    if found["unmoved"]:
        which = ", ".join(map(str, found["unmoved"]))
        text += f"\nLeft out: steps of iterations {which}, which moved nothing."
    return text


def _kinds_text(steps: Sequence[Mapping[str, Any]]) -> str:
    """Say how often each preconditioner predicts the sign, over all steps."""
    parts = []
    for name in steps[0]["kinds"]:
        sign = statistics.fmean(one["kinds"][name]["fit"]["sign"] for one in steps)
        parts.append(f"{sign:.0%} with {name}")
    return ", ".join(parts)


def _course(steps: Sequence[Mapping[str, Any]]) -> str:
    """Summarise the steps."""
    changes = [change_text(one["measured"], one["error"]) for one in steps]
    counts = [f"{kind} in {changes.count(kind)}" for kind in CHANGES if kind in changes]
    first, last = (steps[place]["entropy"]["value"] for place in (0, -1))
    number = counted(len(steps), "step")
    return (
        f"The entropy of an answer went from {first:.4g} nats before the first of {number} to "
        f"{last:.4g} before the last: it {', '.join(counts)}."
    )


def write_steps(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write study.json and the pictures into a folder. Raises StorageError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    write_json(path, known(found))
    steps = found["steps"]
    figures = {"steps.png": draw_steps(found), "split.png": draw_split(steps)}
    if "logprob_fit" in found:
        values = _joined(steps, "predicted"), _joined(steps, "changed")
        figures["logprobs.png"] = draw_logprobs(*values, found["logprob_fit"])
    metrics = Path(found["run"], "metrics.jsonl")
    if metrics.is_file():
        rows = [read_facts(MetricsRow, row) for row in read_jsonl(metrics)]
        noise = [row for row in rows if row.gradient_noise.scale is not None]
        if noise:
            figures["noise.png"] = draw_noise(noise)
    return [path, *save_figures(figures, folder)]
