"""What a replay says at the terminal: a table of the iterations, and the tasks whose rewards changed the most."""

import unicodedata
from collections.abc import Mapping, Sequence

from ttrl.replays.changes import Changes, TaskChange

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
_NARROWEST = 60


def changes_text(
    iterations: Sequence[Changes],
    total: Changes,
    tasks: Sequence[TaskChange],
    num_changed_tasks: int,
    failures: Mapping[str, int],
    width: int,
) -> str:
    """The whole of it, lines of at most `width` columns (of 80 and more)."""
    parts = [_table(iterations, total), *_sentences(total, failures, width)]
    if tasks:
        shown = "" if len(tasks) == num_changed_tasks else f", {len(tasks)} of {num_changed_tasks}"
        parts.append(f"Tasks whose rewards changed the most{shown}:")
        parts += [_task(task, width) for task in tasks]
    return "\n".join(part for part in parts if part)


def _table(iterations: Sequence[Changes], total: Changes) -> str:
    rows = [_row(one) for one in iterations] + ([_row(total)] if len(iterations) != 1 else [])
    widths = [max(width, *(len(row[i]) for row in rows)) for i, (_, _, width) in enumerate(_HEAD)]
    lines = [_joined([name for _, name, _ in _HEAD], widths), *(_joined(row, widths) for row in rows)]
    return "\n".join([_titles(widths), *lines])


def _titles(widths: Sequence[int]) -> str:
    """The line above the names: each title begins where its first column does, or ends with it where it fits."""
    line, start = "", 0
    for (title, name, _), width in zip(_HEAD, widths, strict=True):
        if title:
            first = start + width - len(name)
            line = line.ljust(min(first, start + width - len(title)) if len(title) <= width else first) + title
        start += width + 2
    return line


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _row(one: Changes) -> list[str]:
    return [
        "all" if one.iteration is None else str(one.iteration),
        str(one.rollouts),
        _number(one.mean_before),
        _number(one.mean_after),
        _percent(one.changed_share),
        f"{one.signal_before}/{one.groups}",
        f"{one.signal_after}/{one.groups}",
        _percent(one.flipped_share),
        _number(one.advantage_correlation),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    size = abs(value)  # six columns, with a minus, whatever the scale of the rewards
    return (
        f"{value:.3f}"
        if size < 9.9995
        else f"{value:.2f}"
        if size < 99.995
        else f"{value:.1f}"
        if size < 999.95
        else f"{value:.4g}"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}%"


def _sentences(total: Changes, failures: Mapping[str, int], width: int) -> list[str]:
    """What the table has no room for."""
    said = []
    if total.groups:
        said.append(
            f"Groups with signal: {total.signal_before} of {total.groups} before, {total.signal_after} after; "
            f"{total.signal_appeared} gained it, {total.signal_disappeared} lost it."
        )
    if total.pairs_ordered or total.pairs_untied:
        said.append(
            f"Pairs within groups: of {total.pairs_ordered} that the old rewards put in order, {total.pairs_kept} kept it, "
            f"{total.pairs_flipped} flipped, {total.pairs_tied} are equal now; {total.pairs_untied} that were equal differ now."
        )
    names = sorted(total.metrics_before.keys() | total.metrics_after.keys())
    if names:
        shown = [f"{n} {_number(total.metrics_before.get(n))} → {_number(total.metrics_after.get(n))}" for n in names[:8]]
        said.append(f"Metrics: {', '.join(shown)}{', …' if len(names) > 8 else ''}.")
    counted = [
        (total.newly_failed, "had a reward and have none now: the grader failed"),
        (total.newly_graded, "have a reward now, where the old grader had failed"),
        (total.still_failed, "failed before and have no reward now either"),
        (total.unfinished, "are unfinished (token budget) and have no grade"),
        (total.left_out, "have no task and were left out"),
    ]
    said += [f"{count} rollouts {what}." for count, what in counted if count]
    said += [f"  {count} × {one_line(reason, width - 16)}" for reason, count in list(failures.items())[:3]]
    return [line for sentence in said for line in _wrapped(sentence, width)]


def _task(task: TaskChange, width: int) -> str:
    of = f"{task.changed} of {task.rollouts} changed" if task.rollouts > 1 else "1 rollout"
    numbers = f"{_number(task.mean_before)} → {_number(task.mean_after)}, {of}"
    room = max(10, width - len(numbers) - 6)
    name = one_line(task.task_id, room)
    lines = [f"  {name}{' ' * max(2, width - 2 - _columns(name) - len(numbers))}{numbers}"]
    if task.question:
        lines.append(f"    asked     {one_line(task.question, width - 14)}")
    where = f"    answered  {_number(task.before)} → {_number(task.after)}, iteration {task.iteration}, sample {task.sample}: "
    answer = one_line(task.answer, max(20, width - len(where) - 2))
    lines.append(f"{where}{answer or '(nothing)'}")
    return "\n".join(lines)


def one_line(text: str, width: int) -> str:
    """`text` on one line of at most `width` columns, without anything that a terminal would obey."""
    words = " ".join(text[: 20 * width].split())
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    if _columns(clean) <= width and len(text) <= 20 * width:
        return clean
    clean = clean[: 2 * width]  # more than enough, even with combining characters here and there
    while clean and _columns(clean) > width - 1:
        clean = clean[:-1]
    return clean + "…"


def _columns(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _wrapped(sentence: str, width: int) -> list[str]:
    width = max(width, _NARROWEST)
    lines = [""]
    for word in sentence.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("  " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] or word == "" else word
    return lines
