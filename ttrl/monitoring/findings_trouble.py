"""Rules about what went wrong on the way: failures, skipped steps, samples that were left out, restarted servers."""

from collections.abc import Callable, Sequence

from ttrl.monitoring.finding import Finding, History
from ttrl.report.charts import compact
from ttrl.run_folder.metrics import TOO_LONG_WORDS
from ttrl.run_folder.reader import number


def named(iterations: Sequence[int]) -> str:
    """ "iterations 3, 4 and 9"; long lists are counted."""
    texts = [str(one) for one in iterations]
    if len(texts) > 6:
        return f"{len(texts)} iterations, {', '.join(texts[:3])} and so on"
    one_or_more = "iteration " if len(texts) == 1 else "iterations "
    return one_or_more + (texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1])


def nothing_trained(h: History) -> Finding | None:
    numbers = tuple(row["iteration"] for row in h.iterations if row.get("trained") is False)
    if not numbers:
        return None
    recent = any(row["iteration"] in numbers for row in h.recent)
    return Finding(
        "nothing_trained",
        "warn" if recent else "note",
        f"Nothing was trained in {named(numbers)}: no group of samples had different rewards.",
        "More samples per task, tasks of another difficulty, a finer reward, or dynamic_sampling.",
        "wrong",
        numbers,
    )


def failures(h: History) -> Finding | None:
    failed, sampled = sum(h.values("failed", h.rows)), sum(h.values("samples", h.rows))
    if not failed:
        return None
    graders = sum(h.values("rollouts.grader_failures"))
    of = f" of {compact(sampled)}" if sampled >= failed else ""
    whose = f", {graders:g} of them in their graders" if graders else ""
    # One in a thousand is the odd answer that a grader did not expect; more than one in a hundred is a grader or server to mend.
    severity = "warn" if sampled and failed / sampled > 0.01 else "note"
    return Finding(
        "failures",
        severity,
        f"{failed:g}{of} samples failed and did not count{whose}.",
        "rollouts.jsonl says why for each; `ttrl replay` grades them again with a mended grader.",
        "failed",
    )


def skipped_steps(h: History) -> Finding | None:
    numbers = tuple(row["iteration"] for row in h.iterations if (number(row, "train.skipped") or 0) > 0)
    if not numbers:
        return None
    count = sum(number(row, "train.skipped") or 0 for row in h.iterations)
    return Finding(
        "skipped_steps",
        "warn",
        f"{count:g} optimizer steps were skipped in {named(numbers)}: their loss or gradient was not finite.",
        "train.jsonl names the tokens. Lower lr, clip advantages, or train in fp32.",
        iterations=numbers,
    )


def too_long(h: History) -> Finding | None:
    parts = []
    for name, text in TOO_LONG_WORDS.items():
        if count := sum(h.values(f"pack.dropped.{name}", h.rows)):
            parts.append(f"{count:g} ({text}{', left out' if name == 'too_long' else ''})")
    if not parts:
        return None
    return Finding(
        "too_long",
        "note",
        f"Samples were longer than a row of seq_len: {', '.join(parts)}.",
        "Raise seq_len, lower max_tokens, or choose what becomes of them with too_long.",
        "longest",
    )


def fell_back(h: History) -> Finding | None:
    numbers = tuple(row["iteration"] for row in h.rows if isinstance(row.get("sync"), dict) and row["sync"].get("fell_back"))
    if not numbers:
        return None
    return Finding(
        "fell_back",
        "note",
        f"The server did not reproduce the trainer's numbers after weights were loaded in place in {named(numbers)}; it was "
        "restarted, and then it did.",
        "If it happens each time, weight_sync='restart' saves the attempt; the log says why.",
        iterations=numbers,
    )


def extra_tasks(h: History) -> Finding | None:
    limit = h.config.get("max_extra_tasks") or 2 * (h.config.get("tasks_per_iteration") or 0)
    extra = h.values("extra_tasks", h.recent)
    if not limit or not extra or sum(count >= limit for count in extra) <= len(extra) / 2:
        return None
    return Finding(
        "extra_tasks",
        "note",
        f"Dynamic sampling used up its {limit} extra tasks in most of the last {len(extra)} iterations.",
        "Most groups have no signal: tasks of another difficulty, or a higher max_extra_tasks.",
    )


def dropped_groups(h: History) -> Finding | None:
    dropped, kept = sum(h.values("dropped_groups", h.recent)), sum(h.values("groups.total", h.recent))
    if not dropped or dropped / (dropped + kept) <= 0.1:
        return None
    return Finding(
        "dropped_groups",
        "note",
        f"{dropped:g} unfinished groups became too old (max_staleness) and were dropped, of {dropped + kept:g}.",
        "Their tokens were sampled for nothing: a larger tokens_per_iteration or max_staleness, or a lower max_tokens.",
    )


TROUBLE: tuple[Callable[[History], Finding | None], ...] = (
    nothing_trained, failures, skipped_steps, too_long, fell_back, extra_tasks, dropped_groups,
)  # fmt: skip
