"""Explain why a run may not learn: report conspicuous metrics in words, with numbers and advice.

    findings(rows, config) → [Finding, …], the most serious first; none for a healthy run

To add a rule, write a function here under `@rule(severity, advice, examples)`, with the reason for
its limit. Add a line to SICK in tests/monitoring/test_findings.py and one to the table of
docs/how-to/watch.md. Nothing else knows the rules by name.

Rules judge the last RECENT iterations against the first ones or against a limit. Limits mark values
nearly always wrong: people ignore a list of false alarms. Rules are pure functions of
metrics.jsonl's rows. They say the same at the terminal, in the report, and later from just a run
folder.
"""

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.facts import Difference, MetricsRow, held_out, metric, points
from ttrl.monitoring.drift import exceeded, judged_figures, limits
from ttrl.monitoring.finding import RECENT, Examples, Finding, History, Severity, Trend, trend
from ttrl.monitoring.summary import validated
from ttrl.registries import OBJECTIVES
from ttrl.run_folder.metrics import TOO_LONG_WORDS
from ttrl.text import compact, percent, present

Judge = Callable[[History], str | tuple[Severity, str] | None]
"""Returns the finding's title, or None. A pair also sets a severity other than the rule's."""


@dataclass(frozen=True)
class Rule:
    """A function to judge the history, with the text of its finding."""

    key: str
    severity: Severity
    advice: str
    examples: Examples | None
    judge: Judge

    def finding(self, history: History) -> Finding | None:
        found = self.judge(history)
        if found is None:
            return None
        severity, title = (self.severity, found) if isinstance(found, str) else found
        return Finding(self.key, severity, title, self.advice, self.examples)


RULES: list[Rule] = []
"""In the order of this file, also the order of findings within one severity."""


def rule(
    severity: Severity, advice: str, examples: Examples | None = None
) -> Callable[[Judge], Judge]:
    """Register a function as a rule; its name becomes the key. advice: the remedy to try. examples:
    the kind of samples to show.
    """

    def register(judge: Judge) -> Judge:
        RULES.append(Rule(judge.__name__, severity, advice, examples, judge))
        return judge

    return register


def findings(rows: Sequence[MetricsRow], config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings of a run. rows: of metrics.jsonl; missing or null figures are skipped.
    config: config.yaml's content, for limits set by the person."""
    history = History(list(rows), dict(config or {}))
    found = present(one.finding(history) for one in RULES)
    return sorted(found, key=lambda finding: ("stop", "warn", "note").index(finding.severity))


# Whether sampler and trainer are the same model, and the weights move


@rule(
    "warn",
    "The sampled and the trained policy differ slightly. If the run has drift limits, drift.json "
    "in the iteration's folder lists tokens and causes.",
)
def drift(h: History) -> str | None:
    # The newest iteration with tokens of training's starting policy beyond the limits.
    held_to = limits(h.config.get("dtype"), h.config.get("device"), h.config.get("drift_limits"))
    training = h.config.get("training")
    for row in reversed(h.recent):
        compared = row.compared
        # Rows of older ttrl releases know no policy versions. With stale tokens among them, they
        # say nothing about drift.
        figures: Difference | None = compared if row.staleness.mean is None else None
        if compared.by_version is not None:
            # An iteration without training has no policy of its own.
            before = (
                one.iteration
                for one in h.iterations
                if one.iteration < row.iteration and one.trained is not False
            )
            judged = judged_figures(
                compared, max(before, default=0), training if isinstance(training, dict) else {}
            )
            figures = None if judged is None else judged.figures
        beyond = [] if figures is None else exceeded(figures, held_to)
        if beyond:
            return (
                f"In iteration {row.iteration}, the log-probabilities of sampler and trainer "
                f"differ ({'; '.join(beyond)})."
            )
    return None


@rule(
    "stop",
    "Check for a learning rate of 0, skipped steps, frozen weights, or a checkpoint_dtype too "
    "coarse for such small steps.",
)
def weights_unchanged(h: History) -> str | None:
    numbers = [row.iteration for row in h.recent if row.train.unchanged]
    if not numbers:
        return None
    return (
        "Training did not change the weights: they are bit for bit the same (iteration "
        f"{numbers[-1]})."
    )


@rule("stop", "Check lr and the end of its schedule: see training in config.yaml.")
def learning_rate_zero(h: History) -> str | None:
    rates = h.values(lambda row: row.train.lr, h.recent)[-2:]
    if len(rates) < min(2, len(h.recent)) or not rates or max(rates) > 0:
        return None
    return "The learning rate is 0."


@rule(
    "stop",
    "No gradient reaches the weights. Check for advantages or weights of zero, and for frozen "
    "parameters.",
)
def no_gradient(h: History) -> str | None:
    norms = h.values(lambda row: row.train.grad_norm, h.recent)
    if norms and max(norms) < 1e-9:
        return f"The gradient is zero in {h.recently}."
    return None


# Results


def _training_rewards(h: History) -> list[tuple[int, float]]:
    return points(h.iterations, metric("reward"))


def _at_the_top(values: Sequence[float]) -> bool:
    return all(0 <= y <= 1 for y in values) and statistics.fmean(values[-RECENT:]) >= 0.9


def _succeeds(h: History) -> bool:
    """Tell whether little is left to gain, or the judged metric rose beyond chance in the last ten
    validations. The test uses ranks (Mann-Kendall), as a slowing rise is no straight line.
    """
    points = h.held_out()[1]
    values = [y for _, y in (points if len(points) >= 4 else _training_rewards(h))[-2 * RECENT :]]
    n = len(values)
    rises = sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
    return bool(values) and (
        _at_the_top(values) or rises > 2 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    )


def _judged_trend(h: History) -> tuple[Trend, str] | None:
    """Fit a line through the judged metric and word it; None if it is short or little is left to
    gain."""
    name, points = h.held_out()
    label = f"The {validated(name, overfits=h.overfits)}"
    if len(points) < 8:
        label = "The training reward"
        points = _training_rewards(h)
    line = trend(points)
    if line is None or line.count < 8:  # with fewer, only a steep rise shows through the noise
        return None
    if _at_the_top([y for _, y in points]):
        return None
    said = f"({line.slope:+.2g} ± {1.96 * line.error:.1g} per iteration, over {line.count})"
    return line, f"{label} {'falls' if line.t < -3 else 'does not rise beyond its noise'} {said}."


@rule(
    "warn",
    "Lower lr, use fewer updates_per_iteration or a kl_coefficient, or go back to the best "
    "checkpoint. Check the difference between sampler and trainer.",
    "wrong",
)
def reward_falls(h: History) -> str | None:
    # Neighbouring iterations share tasks and weights, so the error is too small: only a clear fall
    # counts.
    judged = _judged_trend(h)
    if judged is not None and judged[0].t < -3:
        return judged[1]
    return None


@rule(
    "warn",
    "Check the other findings. If there are none, use more samples or tasks per iteration against "
    "the noise, a higher lr (if gradients and clipped tokens leave room), or more iterations.",
    "wrong",
)
def reward_flat(h: History) -> str | None:
    # At |t| below 2 the slope cannot be told from zero (95%).
    judged = _judged_trend(h)
    if judged is not None and -3 <= judged[0].t < 2:
        return judged[1]
    return None


@rule(
    "warn",
    "The run memorizes its tasks, or exploits a weakness of the grader. Go back to the best "
    "checkpoint, check the rewarded replies, and use more tasks or fewer epochs.",
    "right",
)
def overfits(h: History) -> str | None:
    if h.overfits:  # there is nothing to unlearn outside of its tasks
        return None
    name, asked = h.held_out()
    training = trend(_training_rewards(h))
    if training is None or training.t < 3:
        return None
    line = trend(asked)
    if line is not None and line.count >= 8 and line.t <= -3:
        return f"The training reward rises while the held-out {name} falls."
    ranges = present((row.validation_intervals or {}).get(name) for row in h.rows)
    fall = _fall_from_best(asked, ranges)
    if fall is not None:
        return f"The training reward rises, but the held-out {name} fell {fall}."
    return None


def _fall_from_best(
    asked: Sequence[tuple[int, float]], ranges: Sequence[tuple[float, float]]
) -> str | None:
    """Word a clear fall of a held-out metric from its best RECENT validations to its last; None
    without one. asked: (iteration, value). ranges: 95% intervals of the values.
    """
    if len(asked) < 2 * RECENT or not ranges:
        return None
    spans = [asked[end - RECENT : end] for end in range(RECENT, len(asked) + 1)]
    means = [statistics.fmean(value for _, value in span) for span in spans]
    best = max(range(len(means)), key=means.__getitem__)
    # The best of many means is partly luck. On a plateau, chance almost never makes a difference of
    # three quarters of an interval.
    if means[-1] >= means[best] - 0.75 * max(high - low for low, high in ranges):
        return None
    told = [
        f"{compact(means[place])} (iterations {spans[place][0][0]} to {spans[place][-1][0]})"
        for place in (best, -1)
    ]
    return f"from {' to '.join(told)}"


_FAULT = re.compile(
    r"wrong|error|fail|invalid|illegal|trunc|cut|repeat|empty|refus|miss|penal|stop|bad"
    r"|judge_dollars|judge_cached"
)
"""Names of metrics with their best value at zero, and a judge's costs."""


@rule(
    "warn",
    "The reward pays for something else. Read the samples with the highest rewards; let the "
    "grader pay more for that metric, or give partial credit.",
    "right",
)
def solves_nothing(h: History) -> str | None:
    # Partial credit should rise at first; five points and three standard errors are a clear rise.
    for whose, pick, known in (
        (
            validated("reward", overfits=h.overfits),
            held_out,
            [row.validation for row in h.rows],
        ),
        ("training reward", metric, [row.metrics for row in h.rows]),
    ):
        rewards = h.points(pick("reward"))
        line = trend(rewards)
        if line is None or line.count < RECENT or line.t < 3:
            continue
        names = sorted({name for one in known for name in one or {}})
        flat = [
            name
            for name in names
            if not _FAULT.search(name) and _stays_near_zero(h.points(pick(name)))
        ]
        if flat:
            before = compact(rewards[0][1])
            now = compact(rewards[-1][1])
            metrics = ", ".join(f"{name} ({compact(h.now(pick(name)) or 0.0)})" for name in flat)
            return (
                f"The {whose} rises from {before} to {now}, but these metrics stay near 0: "
                f"{metrics}."
            )
    return None


def _stays_near_zero(points: Sequence[tuple[int, float]]) -> bool:
    """Tell whether a share stayed below a twentieth and does not rise beyond its noise."""
    line = trend(points)
    return line is not None and line.t < 2 and all(0 <= value < 0.05 for _, value in points)


# How the policy moves


@rule(
    "warn",
    "Use fewer updates between sampling and training: a smaller max_staleness, fewer off-policy "
    "steps, or a lower lr.",
)
def off_policy(h: History) -> str | None:
    share = h.now(lambda row: row.compared.ess)
    # With drift, older policies do not explain the distance.
    if share is None or share >= 0.5 or drift(h) is not None:
        return None
    return (
        f"The effective sample size is {percent(share)}: the sampled policy is far from the "
        "trained one."
    )


@rule(
    "warn",
    "The policy stopped exploring. Try a lower lr, clip_high above clip_low, an "
    "entropy_coefficient, or clip_cov or kl_cov.",
    "repeated",
)
def entropy_fell(h: History) -> str | None:
    now = h.now(lambda row: row.train.entropy)
    start = h.at_start(lambda row: row.train.entropy)
    right = h.share(lambda row: row.groups.all_right, lambda row: row.groups.total) or 0.0
    # A policy is rightly sure of solved tasks, and one still learning is on its way there. Only
    # uncertainty lost earlier counts.
    if (
        now is None
        or start is None
        or right > 0.5
        or now > max(0.2 * start, 0.0)
        or start < 0.02
        or _succeeds(h)
    ):
        return None
    return (
        f"Entropy fell from {compact(start)} to {compact(now)} nats per token while most groups "
        "are not solved."
    )


@rule(
    "warn",
    "The policy is turning into noise. Lower lr or entropy_coefficient, and read its replies.",
    "longest",
)
def entropy_rose(h: History) -> str | None:
    now = h.now(lambda row: row.train.entropy)
    start = h.at_start(lambda row: row.train.entropy)
    # Twice as undecided and half a nat more: each token comes from e^0.5 = 1.6 times as many.
    if now is None or start is None or now <= 2 * start or now - start <= 0.5:
        return None
    return f"Entropy rose from {compact(start)} to {compact(now)} nats per token."


@rule(
    "warn",
    "The policy moves too far within an iteration. Lower lr, or use fewer updates_per_iteration.",
)
def clipped(h: History) -> str | None:
    low = h.now(lambda row: row.train.clip_fraction_low) or 0.0
    high = h.now(lambda row: row.train.clip_fraction_high) or 0.0
    # PPO implementations report 0.05 to 0.2. Beyond 0.3 the later updates of an iteration are
    # mostly discarded.
    if low + high <= 0.3:
        return None
    return (
        f"{percent(low + high)} of the tokens were clipped ({percent(high)} from above, "
        f"{percent(low)} from below)."
    )


@rule("warn", "Lower lr or max_grad_norm, or check for single samples with extreme advantages.")
def gradient_grew(h: History) -> str | None:
    norms = h.values(lambda row: row.train.grad_norm)
    if len(norms) < 2 * RECENT:
        return None
    first, last = (statistics.median(part) for part in (norms[:RECENT], norms[-RECENT:]))
    # Norms grow by small factors as fewer groups remain. Ten times is a runaway policy.
    if not first or last <= 10 * first:
        return None
    return (
        f"The gradient norm grew from {compact(first)} to {compact(last)} (medians of five "
        "iterations)."
    )


@rule(
    "warn",
    "The policy left its reference. Use a lower lr or a higher kl_coefficient; if it should "
    "leave, set a new reference.",
    "longest",
)
def kl_blew_up(h: History) -> str | None:
    now = h.now(lambda row: row.train.kl)
    start = h.at_start(lambda row: row.train.kl)
    # Per token: at 0.5 nats a sentence of 20 tokens is e^10 times as likely as under the reference.
    if now is None or not (
        now > 0.5 or (start is not None and now > 0.05 and now > 20 * max(start, 1e-6))
    ):
        return None
    if start is not None:
        before = f" from {compact(start)}"
    else:
        before = ""
    return f"KL to the reference model went up{before} to {compact(now)} nats per token."


@rule("warn", "The reward hardly counts. Lower kl_coefficient.")
def kl_rules(h: History) -> str | None:
    share = h.now(lambda row: row.train.kl_share)
    if share is not None and share > 0.9:
        return f"KL makes up {percent(share)} of the gradient, by the norms of its parts."
    return None


# Failures


def _named(iterations: Sequence[int]) -> str:
    """Return "iterations 3, 4 and 9"; long lists are counted."""
    texts = [str(one) for one in iterations]
    if len(texts) > 6:
        return f"{len(texts)} iterations, {', '.join(texts[:3])} and so on"
    if len(texts) == 1:
        return f"iteration {texts[0]}"
    return f"iterations {', '.join(texts[:-1])} and {texts[-1]}"


@rule(
    "warn",
    "Use more samples per task, tasks of another difficulty, a finer reward, a curriculum, or "
    "dynamic_sampling.",
    "wrong",
)
def nothing_trained(h: History) -> tuple[Severity, str] | None:
    numbers = [row.iteration for row in h.iterations if row.trained is False]
    if not numbers:
        return None
    recent = any(row.iteration in numbers for row in h.recent)
    title = f"Nothing was trained in {_named(numbers)}: within each group, all rewards were equal."
    return "warn" if recent else "note", title


@rule(
    "warn",
    "rollouts.jsonl has the reason for each. After mending the grader, `ttrl replay` grades them "
    "again.",
    "failed",
)
def failures(h: History) -> tuple[Severity, str] | None:
    failed = sum(h.values(lambda row: row.failed, h.rows))
    sampled = sum(h.values(lambda row: row.samples, h.rows))
    if not failed:
        return None
    graders = sum(h.values(lambda row: row.rollouts.grader_failures))
    if sampled >= failed:
        of = f" of {compact(sampled)}"
    else:
        of = ""
    if graders:
        whose = f", {graders:g} of them in the grader"
    else:
        whose = ""
    # One in a thousand is the odd answer unforeseen by the grader. More than one in a hundred is a
    # grader or server to fix.
    many = sampled and failed / sampled > 0.01
    return "warn" if many else "note", f"{failed:g}{of} samples failed and did not count{whose}."


@rule("warn", "train.jsonl lists the tokens. Lower lr, clip advantages, or train in fp32.")
def skipped_steps(h: History) -> str | None:
    skipped = {row.iteration: row.train.skipped for row in h.iterations if row.train.skipped}
    if not skipped:
        return None
    steps = f"{sum(skipped.values()):g} optimizer steps were skipped in {_named(list(skipped))}"
    objective = str((h.config.get("training") or {}).get("objective") or "ppo")
    if OBJECTIVES.is_own(objective):
        cause = ""
    else:
        cause = f" Look first at the loss of the objective {objective!r}."
    return f"{steps}: their loss or gradient was not finite.{cause}"


@rule(
    "note",
    "Raise seq_len, lower max_tokens, or set too_long.",
    "longest",
)
def too_long(h: History) -> str | None:
    dropped = [row.pack.dropped or {} for row in h.rows]
    counts = {name: sum(one.get(name, 0) for one in dropped) for name in TOO_LONG_WORDS}
    parts = [
        f"{count:g} ({TOO_LONG_WORDS[name]}{', left out' if name == 'too_long' else ''})"
        for name, count in counts.items()
        if count
    ]
    if parts:
        return f"Samples were longer than a row (seq_len): {', '.join(parts)}."
    return None


@rule("note", "If it happens each time, set weight_sync='reload' to save the attempt.")
def read_files(h: History) -> str | None:
    why = {
        row.iteration: row.sync.files_because
        for row in h.rows
        if row.sync.files_because is not None
    }
    if not why:
        return None
    return (
        f"The server read the weights from files instead of memory in {_named(list(why))}: "
        f"{list(why.values())[-1]}."
    )


@rule(
    "note",
    "If it happens each time, set weight_sync='restart' to save the attempt; the log has the "
    "reason.",
)
def fell_back(h: History) -> str | None:
    numbers = [row.iteration for row in h.rows if row.sync.fell_back]
    if not numbers:
        return None
    return (
        "After loading weights in place, the server did not reproduce the trainer's "
        f"log-probabilities in {_named(numbers)}; after a restart, it did."
    )


@rule(
    "note",
    "Most groups have no signal. Use tasks of another difficulty, or a higher max_extra_tasks.",
)
def extra_tasks(h: History) -> str | None:
    limit = h.config.get("max_extra_tasks") or 2 * (h.config.get("tasks_per_iteration") or 0)
    extra = h.values(lambda row: row.extra_tasks, h.recent)
    if not limit or not extra or sum(count >= limit for count in extra) <= len(extra) / 2:
        return None
    return (
        f"Dynamic sampling used up its {limit} extra tasks in most of the last {len(extra)} "
        "iterations."
    )


@rule(
    "note",
    "Their tokens were wasted. Use a larger tokens_per_iteration or max_staleness, or a lower "
    "max_tokens.",
)
def dropped_groups(h: History) -> str | None:
    dropped = sum(h.values(lambda row: row.dropped_groups, h.recent))
    kept = sum(h.values(lambda row: row.groups.total, h.recent))
    if not dropped or dropped / (dropped + kept) <= 0.1:
        return None
    return (
        f"{dropped:g} of {dropped + kept:g} unfinished groups became too old (max_staleness) and "
        "were dropped."
    )


# Signal of the groups, and the samples


@rule(
    "warn",
    "The task may be too hard for this model. Give it something to learn from: easier tasks "
    "(recipes/letter_counting.py takes any --model), a warm start, more samples per task, a "
    "reward for partial success, or dynamic_sampling. If replies look right, check the grader.",
    "wrong",
)
def too_hard(h: History) -> str | None:
    # Below half, the other groups still give a signal; above it most sampling is wasted.
    share = h.share(lambda row: row.groups.all_wrong, lambda row: row.groups.total) or 0.0
    if share <= 0.5:
        return None
    # The grader's own view of wrong answers: right under a more lenient one, or their form.
    names = {name for row in h.recent for name in row.metrics or {}}
    partly = {}
    for name in sorted(names - {"lenient"}):
        value = h.now(metric(name)) or 0.0
        if 0 < value <= 1:
            partly[name] = value
    said = f"In {percent(share)} of the groups, every sample was wrong ({h.recently})."
    lenient = h.now(metric("lenient"))
    if lenient is not None:
        said += f" A lenient grader would accept {percent(lenient)} of all samples."
    metrics = ", ".join(f"{name} {compact(value)}" for name, value in partly.items())
    return said + (f" The grader's metrics: {metrics}." if metrics else "")


@rule(
    "note",
    "These tasks teach little more. Use harder ones, a curriculum or dynamic_sampling, or end the "
    "run with stop_at.",
    "right",
)
def too_easy(h: History) -> str | None:
    # A run ends well with half to three quarters of its groups all right. Above four fifths too
    # little signal is left.
    share = h.share(lambda row: row.groups.all_right, lambda row: row.groups.total) or 0.0
    if share > 0.8:
        return f"In {percent(share)} of the groups, every sample was right ({h.recently})."
    return None


@rule(
    "warn",
    "Check whether the grader sees the differences between replies. A finer reward or a higher "
    "temperature gives different rewards.",
    "repeated",
)
def equal_rewards(h: History) -> str | None:
    share = h.share(lambda row: row.groups.other_equal, lambda row: row.groups.total)
    if share is None or share <= 0.5:
        return None
    return (
        f"In {percent(share)} of the groups, all samples got the same reward, neither best nor "
        "worst."
    )


@rule(
    "warn",
    "They are graded without their end. Raise max_tokens, ask for shorter replies, or check "
    "whether the model still ends its turns.",
    "truncated",
)
def truncated(h: History) -> str | None:
    # A few per cent are common with long reasoning. Above a fifth, advantages mostly say "be
    # shorter".
    share = h.now(lambda row: row.rollouts.truncated) or 0.0
    if share <= 0.2:
        return None
    cut = h.now(lambda row: row.rollouts.truncated_reward)
    ended = h.now(lambda row: row.rollouts.ended_reward)
    rewards = ""
    if cut is not None and ended is not None:
        rewards = f" Their mean reward is {compact(cut)}; the others' is {compact(ended)}."
    return (
        f"{percent(share)} of the completions were cut off at max_tokens ({h.recently}).{rewards}"
    )


@rule(
    "warn",
    "Check for a stop string at the start of replies. Otherwise the model learned to say nothing: "
    "check the reward of an empty reply.",
    "empty",
)
def empty(h: History) -> str | None:
    share = h.now(lambda row: row.rollouts.empty)
    if share is not None and share > 0.05:
        return f"{percent(share)} of the completions are empty ({h.recently})."
    return None


@rule(
    "warn",
    "The policy ignores the task. Check whether the grader rewards that reply. Lower lr, add "
    "kl_coefficient, or start again from an earlier checkpoint.",
    "repeated",
)
def one_answer(h: History) -> str | None:
    # With four letters to choose from, the commonest is right in a third of the tasks; half of all
    # samples is too much.
    # With a token budget, an iteration may finish a single task.
    rows = [row for row in h.recent if (row.groups.total or 0) >= 4]
    shares = h.values(lambda row: row.rollouts.commonest, rows)
    parts = h.values(lambda row: row.rollouts.commonest_tasks, rows)
    if not shares or not parts:
        return None
    share = statistics.fmean(shares)
    tasks = statistics.fmean(parts)
    if share <= 0.5 or tasks <= 0.5:
        return None
    return (
        f"One completion makes up {percent(share)} of all samples, in {percent(tasks)} of the "
        "tasks."
    )


@rule(
    "warn",
    "The policy explores no other reply there. Use a higher temperature, an entropy_coefficient, "
    "a lower lr, or an earlier checkpoint.",
    "repeated",
)
def stuck(h: History) -> str | None:
    # Equal samples are normal for a solved task. If better ones exist, no gradient will lead there.
    share = h.now(lambda row: row.rollouts.stuck_groups)
    if share is None or share <= 0.25:
        return None
    return (
        f"In {percent(share)} of the groups, all samples are the same completion, and not the best "
        f"one ({h.recently})."
    )


@rule(
    "note",
    "If you do not want to teach length, make the grader independent of it, and read the replies.",
    "longest",
)
def length_rewarded(h: History) -> str | None:
    correlation = h.now(lambda row: row.rollouts.length_correlation)
    now = h.now(lambda row: row.rollouts.mean_length)
    start = h.at_start(lambda row: row.rollouts.mean_length)
    if correlation is None or now is None or not start or abs(correlation) <= 0.4:
        return None
    # Only if lengths follow: long answers often score low simply because they lost their way.
    change = now / start - 1
    if abs(change) <= 0.3 or (change > 0) != (correlation > 0):
        return None
    how = "longer" if correlation > 0 else "shorter"
    return (
        f"Within groups, {how} replies get more reward (correlation {correlation:.2f}), and "
        f"replies have become {how}: from {compact(start)} to {compact(now)} tokens."
    )


@rule(
    "note",
    "Their advantages are smaller than others'. Check whether the floor is meant to be that high, "
    "or whether the rewards differ by noise only.",
)
def low_std(h: History) -> str | None:
    share = h.share(lambda row: row.groups.low_std, lambda row: row.groups.kept)
    if share is None or share <= 0.2:
        return None
    return (
        f"In {percent(share)} of the trained groups, rewards differ by less than "
        "advantage_std_floor."
    )
