"""Rules about what is sampled: groups that teach nothing, completions without end, repetition, length."""

from collections.abc import Callable

from ttrl.monitoring.finding import Finding, History
from ttrl.report.charts import compact
from ttrl.run_folder.reader import percent


def recently(history: History) -> str:
    numbers = [row["iteration"] for row in history.recent]
    return f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]} to {numbers[-1]}"


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
