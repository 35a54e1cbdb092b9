"""Write the terminal lines of each iteration."""

from collections.abc import Sequence

from ttrl.configs.run import TrainConfig
from ttrl.facts import CurriculumFigures, MetricsRow, PhaseSeconds, Pick, number, ratio
from ttrl.monitoring.finding import Finding
from ttrl.monitoring.summary import validated
from ttrl.run_folder.metrics import TOO_LONG_WORDS, validation_metric
from ttrl.run_folder.reader import held_out_text
from ttrl.text import compact, duration, percent

INDENT = len("iteration   1  ")
"""Column of the first word after an iteration's number."""


def iteration_lines(
    rows: Sequence[MetricsRow],
    config: TrainConfig,
    found: Sequence[Finding] = (),
    said: Sequence[Finding] = (),
) -> list[str]:
    """Return results and cost of the last iteration of `rows`, the time left, the course of
    training, and each finding in `found` not yet `said`."""
    row = rows[-1]
    left = seconds_left(rows, config.iterations)
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


def seconds_left(rows: Sequence[MetricsRow], iterations: int) -> float | None:
    """Estimate the time of the iterations after the last of `rows`, up to number `iterations`, from
    the mean of the last five; None with nothing left or known."""
    left = iterations - rows[-1].iteration
    # Iteration 0 sampled during validation, without training, and took no time of its own. The next
    # one will.
    known = [_longest(row.seconds) for row in rows if row.iteration][-5:]
    return left * sum(known) / len(known) if left > 0 and known else None


def iteration_line(row: MetricsRow, config: TrainConfig) -> str:
    """Return the line of an iteration: its results and its cost."""
    parts = []
    reward = number(row.reward)
    if reward is not None:
        counts = {
            name: f" (in {count} samples)" for name, count in (row.partial_metrics or {}).items()
        }
        metrics = "".join(
            f", {name} {value:.3f}{counts.get(name, '')}"
            for name, value in (row.metrics or {}).items()
        )
        parts.append(f"reward {reward:.3f}{metrics}")
    if number(row.validation_reward) is not None:
        name = config.validation_metric
        overfits = config.overfit is not None
        if validation_metric(row, config) is None:
            known = ", ".join(["reward", *(row.validation or {})])
            missing = validated(f"metric {name!r}", overfits=overfits)
            parts.append(f"no {missing} (known: {known})")
        else:
            parts.append(f"{validated(name, overfits=overfits)} {held_out_text(row, name)}")
    if row.iteration and not row.trained:
        parts.append("no group had a signal: nothing trained")
    elif row.iteration:
        groups = row.groups
        kinds = {
            "all right": groups.all_right,
            "all wrong": groups.all_wrong,
            "equal": groups.other_equal,
        }
        of_one_kind = [f"{count} {name}" for name, count in kinds.items() if count]
        parts.append(
            f"signal {groups.kept}/{groups.total}"
            + (f" ({', '.join(of_one_kind)})" if of_one_kind else "")
        )
    if row.curriculum.total is not None:
        parts += _curriculum(row.curriculum, config)
    if row.failed:
        graders = row.rollouts.grader_failures
        parts.append(
            f"{row.failed} samples failed" + (f", {graders} in graders" if graders else "")
        )
    dropped = row.pack.dropped or {}
    parts += [
        f"{dropped[name]} {text}" for name, text in TOO_LONG_WORDS.items() if dropped.get(name)
    ]
    if row.completion_tokens:
        speed = number(row.tokens_per_second)
        parts.append(
            f"{row.completion_tokens} tokens" + ("" if speed is None else f", {speed:.0f}/s")
        )
    total = row.seconds.total or 0.0
    phases = [
        f"{phase} {value:.1f}" for phase, value in row.seconds.by_phase().items() if value >= 0.05
    ]
    dead = dead_share(row)
    if total >= 0.05 and dead is not None:
        phases.append(f"dead {percent(dead)}")
    # Overlapping phases take longer together than the whole iteration.
    parts.append(f"{total:.1f} s ({', '.join(phases)})")
    if row.iteration:
        name = f"iteration {row.iteration:3d}"
    else:
        name = "before       "
    return f"{name}  " + "  ".join(parts)


def _curriculum(curriculum: CurriculumFigures, config: TrainConfig) -> list[str]:
    counts = {
        "solved": curriculum.solved,
        "hopeless": curriculum.hopeless,
        "unseen": curriculum.unseen,
    }
    left = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    parts = [f"of {curriculum.total} tasks " + (left or "all have a signal")]
    if curriculum.level is not None:
        score = number(curriculum.level_score)
        if score is None:
            reached = ""
        else:
            reached = f" ({config.validation_metric} {score:.3f})"
        parts.append(f"level {curriculum.level}{reached}")
    return parts


def dead_share(row: MetricsRow) -> float | None:
    """Return the share of an iteration with neither sampling nor training; None if not measured.

    Work hidden behind the validation before it is not in the iteration's own time, and counts too.
    """
    if row.dead_seconds is None:
        return None
    return ratio(max(0.0, row.dead_seconds), _longest(row.seconds))


def _longest(seconds: PhaseSeconds) -> float:
    return max([seconds.total or 0.0, *seconds.by_phase().values()])


def training_details(row: MetricsRow) -> str:
    """Return the known figures of training: "entropy 0.12  grad 5.6  clipped 1.1% …"; "" if none is
    known.
    """
    parts = []
    for pick, name, as_share in _DETAILS:
        value = number(pick(row))
        if value is not None:
            parts.append(f"{name} {percent(value) if as_share else compact(value)}")
    low = row.train.clip_fraction_low
    high = row.train.clip_fraction_high
    if low is not None or high is not None:
        parts.append(f"clipped {percent((low or 0.0) + (high or 0.0))}")
    return "  ".join(parts)


_DETAILS: tuple[tuple[Pick, str, bool], ...] = (
    (lambda row: row.train.entropy, "entropy", False),
    (lambda row: row.train.grad_norm, "gradient", False),
    (lambda row: row.train.kl, "KL", False),
    (lambda row: row.rollouts.truncated, "cut off", True),
    (lambda row: row.rollouts.stopped_early, "stopped early", True),
    (lambda row: row.rollouts.repeated, "repeated", True),
    (lambda row: row.rollouts.length_correlation, "reward~length", False),
    (lambda row: row.compared.p999, "|Δ logprob| p99.9", False),
    (lambda row: row.compared.own.p999, "under the sampler's weights", False),
)
