"""Format a replay's results for the terminal: a table of iterations, and the most changed tasks."""

import textwrap
from collections.abc import Sequence

from tqdm.utils import disp_len, disp_trim

from ttrl.replays.changes import Changes, ReplayComparison, TaskChange

TASKS_SHOWN = 5
_HEAD = (
    # above, name, least width
    ("", "iteration", 9),
    ("", "rollouts", 8),
    ("mean reward", "before", 6),
    ("", "after", 6),
    ("", "changed", 7),
    ("with signal", "before", 6),
    ("", "after", 6),
    ("order", "flipped", 7),
    ("advantage", "corr.", 9),
)


def changes_text(compared: ReplayComparison, width: int) -> str:
    """Return the whole text, in lines of at most `width` columns (80 or more)."""
    iterations = compared.iterations
    tasks = compared.tasks
    parts = _table([*iterations, compared.total] if len(iterations) != 1 else iterations)
    for sentence in _sentences(compared, width):
        parts += textwrap.wrap(
            sentence, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    if tasks:
        if len(tasks) <= TASKS_SHOWN:
            shown = ""
        else:
            shown = f", {TASKS_SHOWN} of {len(tasks)}"
        parts.append(f"Tasks with the largest changes of reward{shown}:")
        parts += [line for task in tasks[:TASKS_SHOWN] for line in _task(task, width)]
    return "\n".join(parts)


def _table(changes: Sequence[Changes]) -> list[str]:
    rows = [[name for _, name, _ in _HEAD], *map(_row, changes)]
    widths = [
        max(least, *(len(row[column]) for row in rows))
        for column, (_, _, least) in enumerate(_HEAD)
    ]
    above = ""
    start = 0
    for (title, name, _), width in zip(_HEAD, widths, strict=True):
        if title:  # begins with the name below it, or ends with it if it fits
            first = start + width - len(name)
            above = (
                above.ljust(
                    min(first, start + width - len(title)) if len(title) <= width else first
                )
                + title
            )
        start += width + 2
    return [
        above,
        *(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ),
    ]


def _row(one: Changes) -> list[str]:
    shares = [
        "-" if share is None else f"{share:.1%}" for share in (one.changed_share, one.flipped_share)
    ]
    return [
        "all" if one.iteration is None else str(one.iteration),
        str(one.rollouts),
        _number(one.mean_before),
        _number(one.mean_after),
        shares[0],
        f"{one.signal_before}/{one.groups}",
        f"{one.signal_after}/{one.groups}",
        shares[1],
        _number(one.advantage_correlation),
    ]


def _number(value: float | None) -> str:
    """Return a reward in six columns, including its sign, at any scale."""
    if value is None:
        return "-"
    decimals = next(
        (n for n, limit in ((3, 9.9995), (2, 99.995), (1, 999.95)) if abs(value) < limit), None
    )
    if decimals is None:
        return f"{value:.4g}"
    return f"{value:.{decimals}f}"


def _sentences(compared: ReplayComparison, width: int) -> list[str]:
    """Return sentences for the facts outside the table."""
    total = compared.total
    said = []
    if total.groups:
        said.append(
            f"Groups with signal: {total.signal_before} of {total.groups} before, "
            f"{total.signal_after} after; "
            f"{total.signal_appeared} gained it, {total.signal_disappeared} lost it."
        )
    if total.pairs_ordered or total.pairs_untied:
        said.append(
            f"Pairs within groups: of {total.pairs_ordered} in order by the old rewards, "
            f"{total.pairs_kept} kept it, {total.pairs_flipped} flipped, {total.pairs_tied} became "
            f"equal; {total.pairs_untied} equal pairs became different."
        )
    names = sorted(total.metrics_before.keys() | total.metrics_after.keys())
    if names:
        shown = [
            f"{n} {_number(total.metrics_before.get(n))} → {_number(total.metrics_after.get(n))}"
            for n in names[:8]
        ]
        said.append(f"Metrics: {', '.join(shown)}{', …' if len(names) > 8 else ''}.")
    counted = [
        (total.newly_failed, "had a reward and have none now: the grader failed"),
        (total.newly_graded, "have a reward now, after a failure of the old grader"),
        (total.still_failed, "failed before, and have no reward now either"),
        (total.unfinished, "are unfinished (token budget) and have no grade"),
        (total.left_out, "have no task and were left out"),
        (
            compared.tool_calls,
            "ended in tool calls; the run did not store these, so their text was graded",
        ),
    ]
    said += [f"{count} rollouts {what}." for count, what in counted if count]
    return said + [
        f"  {count} × {one_line(reason, width - 16)}"
        for reason, count in compared.failures.most_common(3)
    ]


def _task(task: TaskChange, width: int) -> list[str]:
    if task.rollouts > 1:
        of = f"{task.changed} of {task.rollouts} changed"
    else:
        of = "1 rollout"
    numbers = f"{_number(task.mean_before)} → {_number(task.mean_after)}, {of}"
    name = one_line(task.task_id, max(10, width - len(numbers) - 6))
    lines = [f"  {name}{' ' * max(2, width - 2 - disp_len(name) - len(numbers))}{numbers}"]
    if task.question:
        lines.append(f"    asked     {one_line(task.question, width - 14)}")
    where = (
        f"    answered  {_number(task.before)} → {_number(task.after)}, iteration "
        f"{task.iteration}, sample {task.sample}: "
    )
    answer = one_line(task.answer, max(20, width - len(where) - 2))
    return [*lines, f"{where}{answer or '(nothing)'}"]


def one_line(text: str, width: int) -> str:
    """Return `text` on one line of at most `width` columns, without control characters."""
    words = " ".join(text[: 20 * width].split())
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    if disp_len(clean) <= width and len(text) <= 20 * width:
        return clean
    return f"{disp_trim(clean[: 2 * width], width - 1)}…"
