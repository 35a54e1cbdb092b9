"""Why a run may not learn: what stands out in its metrics, in words, with the numbers and what to try.

    findings(rows, config) → [Finding, …], the gravest first; none for a healthy run

Everything is judged over the last RECENT iterations, against the first ones or against a limit whose reason stands beside it in
the rules. A limit is where something is nearly always wrong, not where it might be: a list that cries wolf is not read. Pure
functions of metrics.jsonl's rows: the same at the terminal, in the report, and later from a run folder alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttrl.monitoring.finding import Finding, History, recently
from ttrl.monitoring.findings_policy import POLICY
from ttrl.run_folder.metrics import TOO_LONG_WORDS
from ttrl.run_folder.reader import number
from ttrl.text import compact, percent

# What the groups have to teach


def too_hard(h: History) -> Finding | None:
    # Below half, the other groups still carry an iteration; above it most of the sampling is spent on nothing.
    share = h.share("groups.all_wrong", "groups.total")
    if share is None or share <= 0.5:
        return None
    return Finding(
        "too_hard",
        "warn",
        f"In {percent(share)} of the groups every sample was wrong ({recently(h)}).",
        "The task may be too hard for this model: easier tasks, a warm start, more samples per task, a reward for partial "
        "success, or dynamic_sampling give it something to learn from. If answers look right, look at the grader.",
        "wrong",
    )


def too_easy(h: History) -> Finding | None:
    # A run that ends well has half to three quarters of its groups all right; above four fifths too little is left.
    share = h.share("groups.all_right", "groups.total")
    if share is None or share <= 0.8:
        return None
    return Finding(
        "too_easy",
        "note",
        f"In {percent(share)} of the groups every sample was right ({recently(h)}).",
        "There is little left to learn from these tasks: harder ones, or dynamic_sampling, or an end by stop_at.",
        "right",
    )


def equal_rewards(h: History) -> Finding | None:
    share = h.share("groups.other_equal", "groups.total")
    if share is None or share <= 0.5:
        return None
    return Finding(
        "equal_rewards",
        "warn",
        f"In {percent(share)} of the groups all samples got one and the same reward, neither best nor worst.",
        "Does the grader see what differs between answers? A finer reward, or a higher temperature, makes them differ.",
        "repeated",
    )


def low_std(h: History) -> Finding | None:
    share = h.share("groups.low_std", "groups.kept")
    if share is None or share <= 0.2:
        return None
    return Finding(
        "low_std",
        "note",
        f"In {percent(share)} of the groups that were trained, rewards differ by less than advantage_std_floor.",
        "Their advantages are smaller than others'. Is the floor meant to be that high, or do rewards differ by noise alone?",
    )


# What is sampled


def truncated(h: History) -> Finding | None:
    # A few per cent are common with long reasoning; above a fifth, advantages mostly say "be shorter".
    share = h.now("rollouts.truncated")
    if share is None or share <= 0.2:
        return None
    return Finding(
        "truncated",
        "warn",
        f"{percent(share)} of the completions were cut off at max_tokens ({recently(h)}).",
        "They are graded without their end. Raise max_tokens, ask for shorter answers, or see whether the model still ends its "
        "turns.",
        "truncated",
    )


def empty(h: History) -> Finding | None:
    share = h.now("rollouts.empty")
    if share is None or share <= 0.05:
        return None
    return Finding(
        "empty",
        "warn",
        f"{percent(share)} of the completions are empty ({recently(h)}).",
        "A stop string that matches at once, or a model that learned to say nothing: does silence get a reward?",
        "empty",
    )


def one_answer(h: History) -> Finding | None:
    # Of four letters to choose from, the commonest is right in a third of the tasks; half of everything is too much.
    share, tasks = h.now("rollouts.commonest"), h.now("rollouts.commonest_tasks")
    if share is None or tasks is None or share <= 0.5 or tasks <= 0.5 or (h.now("groups.total") or 0) < 4:
        return None
    return Finding(
        "one_answer",
        "warn",
        f"One and the same completion makes up {percent(share)} of all samples, in {percent(tasks)} of the tasks.",
        "The policy ignores the task. Does the grader reward that answer? Lower lr, add kl_coefficient, or start again from an "
        "earlier checkpoint.",
        "repeated",
    )


def stuck(h: History) -> Finding | None:
    # Equal samples are what a solved task looks like; equal samples that could be better are what no gradient will change.
    share = h.now("rollouts.stuck_groups")
    if share is None or share <= 0.25:
        return None
    return Finding(
        "stuck",
        "warn",
        f"In {percent(share)} of the groups all samples are the same completion, and not the best ({recently(h)}).",
        "The policy no longer tries anything else there: a higher temperature, an entropy_coefficient, a lower lr, or an earlier "
        "checkpoint.",
        "repeated",
    )


def length_rewarded(h: History) -> Finding | None:
    correlation, now, start = (
        h.now("rollouts.length_correlation"),
        h.now("rollouts.mean_length"),
        h.at_start("rollouts.mean_length"),
    )
    if correlation is None or now is None or not start or abs(correlation) <= 0.4:
        return None
    # Only where lengths follow: a correlation alone is often that long answers are those that lost their way.
    change = now / start - 1
    if abs(change) <= 0.3 or (change > 0) != (correlation > 0):
        return None
    how = "longer" if correlation > 0 else "shorter"
    return Finding(
        "length_rewarded",
        "note",
        f"Within groups, {how} answers get more reward (correlation {correlation:.2f}), and answers have become {how}: from "
        f"{compact(start)} to {compact(now)} tokens.",
        "If length is not what you want to teach, let the grader not depend on it, and look at what the answers say.",
        "longest",
    )


SAMPLING: tuple[Callable[[History], Finding | None], ...] = (
    too_hard, too_easy, equal_rewards, truncated, empty, one_answer, stuck, length_rewarded, low_std,
)  # fmt: skip


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


_ORDER = ("stop", "warn", "note")


def findings(rows: Sequence[dict[str, Any]], config: Mapping[str, Any] | None = None) -> list[Finding]:
    """What stands out in a run.

    rows: of metrics.jsonl, by iteration; whatever is missing or null in them is left out. config: config.yaml's content, for what
    only it can say (limits that the person set).
    """
    history = History([row for row in rows if isinstance(row.get("iteration"), int)], dict(config or {}))
    found = [finding for rule in (*POLICY, *TROUBLE, *SAMPLING) if (finding := rule(history)) is not None]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
