"""The lines that each iteration leaves at the terminal."""

from collections.abc import Sequence
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.monitoring.finding import Finding
from ttrl.run_folder.metrics import TOO_LONG_WORDS, validation_metric
from ttrl.run_folder.reader import held_out_text, number
from ttrl.text import compact, duration, percent

INDENT = len("iteration   1  ")
"""Where the words of an iteration's line begin."""


def iteration_lines(
    rows: Sequence[dict[str, Any]],
    config: TrainConfig,
    found: Sequence[Finding] = (),
    said: Sequence[Finding] = (),
) -> list[str]:
    """Return what the last iteration of `rows` learned and cost, how long the rest will take, how
    training went, and what stands out (`found`) that was not `said` before."""
    row = rows[-1]
    left = seconds_left(rows, config)
    if config.stop_at is None:
        about = "about"
    else:
        about = "at most about"
    lines = [
        iteration_line(row, config) + ("" if left is None else f"  {about} {duration(left)} left")
    ]
    details = training_details(row)
    if details:
        lines.append(" " * INDENT + details)
    known = {finding.key for finding in said}
    return lines + [f"  ! {finding.line()}" for finding in found if finding.key not in known]


def seconds_left(rows: Sequence[dict[str, Any]], config: TrainConfig) -> float | None:
    """Estimate how long the iterations after the last of `rows` will take, by the mean of the last
    five; None where nothing is left or known."""
    left = config.iterations - rows[-1]["iteration"]
    # What was sampled beside the validation before, and trained nothing, has taken no time of its
    # own: the next one will.
    known = [max(row["seconds"].values()) for row in rows if row["iteration"]][-5:]
    return left * sum(known) / len(known) if left > 0 and known else None


def iteration_line(row: dict[str, Any], config: TrainConfig) -> str:
    """Return the line of an iteration: what it learned, and what it cost."""
    parts = []
    if row.get("reward") is not None:
        partial = row.get("partial_metrics", {})
        counts = {name: f" (in {count} samples)" for name, count in partial.items()}
        metrics = "".join(
            f", {name} {value:.3f}{counts.get(name, '')}" for name, value in row["metrics"].items()
        )
        parts.append(f"reward {row['reward']:.3f}{metrics}")
    if row.get("validation_reward") is not None:
        name = config.validation_metric
        known = ", ".join(["reward", *row.get("validation", {})])
        is_known = validation_metric(row, config) is not None
        missing = f"no held-out metric {name!r} (there are: {known})"
        parts.append(f"held-out {name} {held_out_text(row, name)}" if is_known else missing)
    if row["iteration"] and not row["trained"]:
        parts.append("no group had a signal: nothing trained")
    elif row["iteration"]:
        groups = row["groups"]
        of_one_kind = [f"{groups[key]} {name}" for key, name in _KINDS.items() if groups.get(key)]
        parts.append(
            f"signal {groups['kept']}/{groups['total']}"
            + (f" ({', '.join(of_one_kind)})" if of_one_kind else "")
        )
    curriculum = row.get("curriculum")
    if curriculum:
        left = [
            f"{curriculum[name]} {name}"
            for name in ("solved", "hopeless", "unseen")
            if curriculum[name]
        ]
        parts.append(f"of {curriculum['total']} tasks " + (", ".join(left) or "all have a signal"))
        if "level" in curriculum:
            score = curriculum["level_score"]
            if score is None:
                reached = ""
            else:
                reached = f" ({config.validation_metric} {score:.3f})"
            parts.append(f"level {curriculum['level']}{reached}")
    if row.get("failed"):
        graders = (row.get("rollouts") or {}).get("grader_failures")
        parts.append(
            f"{row['failed']} samples failed" + (f", {graders} in their graders" if graders else "")
        )
    dropped = row.get("pack", {}).get("dropped", {})
    parts += [
        f"{dropped[name]} {text}" for name, text in TOO_LONG_WORDS.items() if dropped.get(name)
    ]
    if row.get("completion_tokens"):
        if row["tokens_per_second"] is not None:
            speed = f", {row['tokens_per_second']:.0f}/s"
        else:
            speed = ""
        parts.append(f"{row['completion_tokens']} tokens{speed}")
    total = row["seconds"]["total"]
    phases = [
        f"{phase} {value:.1f}"
        for phase, value in row["seconds"].items()
        if phase != "total" and value >= 0.05
    ]
    if total >= 0.05 and "dead_seconds" in row:
        phases.append(f"dead {percent(row['dead_seconds'] / total)}")
    # Phases that overlap take longer together than the whole iteration.
    parts.append(f"{total:.1f} s ({', '.join(phases)})")
    if row["iteration"]:
        name = f"iteration {row['iteration']:3d}"
    else:
        name = "before       "
    return f"{name}  " + "  ".join(parts)


def training_details(row: dict[str, Any]) -> str:
    """Return how the training went, as far as it is known: "entropy 0.12  grad 5.6  clipped 1.1%
    …"; "" where nothing is.
    """
    parts = []
    for path, name, as_share in _DETAILS:
        value = number(row, path)
        if value is not None:
            parts.append(f"{name} {percent(value) if as_share else compact(value)}")
    low = number(row, "train.clip_fraction_low")
    high = number(row, "train.clip_fraction_high")
    if low is not None or high is not None:
        parts.append(f"clipped {percent((low or 0.0) + (high or 0.0))}")
    return "  ".join(parts)


_KINDS = {"all_right": "all right", "all_wrong": "all wrong", "other_equal": "equal"}
_DETAILS = (
    ("train.entropy", "entropy", False),
    ("train.grad_norm", "gradient", False),
    ("train.kl", "KL", False),
    ("rollouts.truncated", "cut off", True),
    ("rollouts.stopped_early", "stopped early", True),
    ("rollouts.repeated", "repeated", True),
    ("rollouts.length_correlation", "reward~length", False),
    ("sampler_trainer.p999", "|Δ logprob| p99.9", False),
    ("sampler_trainer.own_weights.p999", "under the sampler's weights", False),
)
