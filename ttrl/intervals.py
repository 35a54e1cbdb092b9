"""Compute confidence intervals of held-out results, and paired differences: plain Python, from the
published formulas.

A task is drawn from many possible ones, and its k samples estimate the model's result on that task;
so an evaluation's sample size is its tasks, not its samples. Samples of one task are correlated: an
interval for independent samples would be too narrow by up to √k (Miller 2024, "Adding error bars to
evals", arXiv 2411.00640, section 2.2). Therefore:

- one sample a task, right or wrong: Wilson's score interval (1927). It keeps its level near 0 and 1
  and for few tasks;
- k samples, or partial credit, within [0, 1]: the variance of the mean comes from the tasks' means
  (any correlation within a task is allowed), with one more task of the largest possible variance:
  few tasks do not prove all alike. It equals the variance of n_eff = p (1 − p) / variance
  independent answers. Wilson's interval of p and n_eff, with t's quantile for tasks − 1 degrees of
  freedom instead of the normal one, is the "modified Wilson" interval of surveys (SAS, SURVEYFREQ;
  Korn & Graubard 1998, "Confidence intervals for proportions with small expected number of positive
  counts estimated from survey data", adjust the exact interval so; the additional task is ours).
  Student's t on the tasks' means is symmetric: near 0 and 1, and for few tasks, it is too short on
  the far side. Simulated (4 to 100 tasks, 4 and 16 samples, tasks' chances from beta distributions
  with means of 0.5 to 0.99 and correlations of 0.05 to 0.9), it covered the truth in 0.94 of the
  cases on average and in 0.80 at worst, the interval here in 0.97 and 0.85; in the middle it is as
  wide. The worst cases have rare tasks with certain failure: a draw without them cannot show it.
- equal means of all tasks: the variance seems to be 0. Of all variables within [0, 1] with mean p,
  one of only 0 and 1 varies most, so Wilson's interval with one count a task is the careful answer.
- rewards beyond [0, 1]: Student's t on the tasks' means. A bootstrap over tasks has the same aim,
  is too narrow for few tasks (it lacks t's correction), and gives another answer each time.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
_MOST_TERMS = 4000
"""Up to these degrees of freedom, Student's t is summed exactly; above, three terms of its
expansion are exact to 1e-12.
"""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. None if there is too little data: no task, or a single one with
    partial credit.
    """

    mean: float | None
    low: float | None
    high: float | None
    method: str
    num_tasks: int


def wilson(right: float, count: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a share: `right` of `count`, both ends within [0, 1]."""
    return _score_interval(
        right / count, count, statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    )


def _score_interval(share: float, count: float, critical: float) -> tuple[float, float]:
    """Return the shares at most `critical` standard deviations away from `share` of `count`
    independent answers.
    """
    spread = critical * critical / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread * spread / 4) / (1 + spread)
    # The ends at 0 and 1 are exact; rounding would make them -1e-17.
    return (0.0 if share == 0 else max(0.0, middle - half)), (
        1.0 if share == 1 else min(1.0, middle + half)
    )


def _interval_of_shares(
    groups: Sequence[Sequence[float]], confidence: float
) -> tuple[float, float, str]:
    """Return (low, high, method) for the mean over tasks of the means of values within [0, 1];
    every group has some.
    """
    means = [statistics.fmean(values) for values in groups]
    count = len(means)
    mean = min(1.0, statistics.fmean(means))
    if all(len(values) == 1 and values[0] in (0.0, 1.0) for values in groups):
        return *wilson(sum(means), count, confidence), "Wilson"
    between = statistics.variance(means) if count > 1 else 0.0
    if between <= 1e-24:
        return *wilson(mean * count, count, confidence), "Wilson, one count a task"
    # Of one task; plus one more of the largest variance.
    variance = ((count - 1) * between + mean * (1 - mean)) / count
    effective = count * mean * (1 - mean) / variance
    # Independent ones vary most evenly.
    if all(value in (0.0, 1.0) for values in groups for value in values):
        effective = min(effective, sum(map(len, groups)))
    return *_score_interval(
        mean, effective, t_quantile(0.5 + confidence / 2, count - 1)
    ), "Wilson, tasks as clusters"


def pooled(tasks: Iterable[Hashable], values: Iterable[Sequence[T]]) -> list[list[T]]:
    """Join the values of equal tasks, in the order of first appearance.

    A task asked twice is no new task: counted as two, it makes an interval too narrow.
    """
    found: dict[Hashable, list[T]] = {}
    for task, own in zip(tasks, values, strict=True):
        found.setdefault(task, []).extend(own)
    return list(found.values())


def estimate_mean(by_task: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate:
    """Return the mean over tasks of the means of their samples, with its interval. by_task: the
    values of each task's samples; tasks without any are left out.

    Values within [0, 1] keep the interval within [0, 1].
    """
    groups = [list(values) for values in by_task if values]
    means = [statistics.fmean(values) for values in groups]
    if not means:
        return Estimate(None, None, None, "no samples", 0)
    count = len(means)
    mean = statistics.fmean(means)
    if _are_shares(groups):
        return Estimate(mean, *_interval_of_shares(groups, confidence), count)
    if count > 1 and (deviation := statistics.stdev(means, xbar=mean)) > 1e-12:
        half = t_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
        return Estimate(mean, mean - half, mean + half, "Student t over tasks", count)
    return Estimate(mean, None, None, "one task, or all alike", count)


def _are_shares(groups: Sequence[Sequence[float]]) -> bool:
    return all(0.0 <= value <= 1.0 for values in groups for value in values)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the chance of a right one among `k` draws without
    replacement from `samples`, `right` of them right (Chen et al. 2021, arXiv 2107.03374, equation
    1), as a product without overflow.

    1 − C(n − c, k) / C(n, k) = 1 − Π_{i = n−c+1}^{n} (1 − k / i). Needs samples >= k >= 1.
    """
    assert 0 <= right <= samples and 1 <= k <= samples
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def t_cdf(t: float, degrees: int) -> float:
    """Return Student's t distribution for whole degrees of freedom: finite sums of Abramowitz &
    Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    if degrees % 2:
        total = 0.0
        term = cosine
        for place in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * place / (2 * place + 1)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        total = 0.0
        term = 1.0
        for place in range(1, degrees // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * place - 1) / (2 * place)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def t_quantile(level: float, degrees: int) -> float:
    """Return the inverse of `t_cdf`, for 0.5 <= level < 1."""
    z = statistics.NormalDist().inv_cdf(level)
    if degrees > _MOST_TERMS:  # Abramowitz & Stegun 26.7.5
        terms = (
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        )
        return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, 1))
    low = 0.0
    high = 2.0
    while t_cdf(high, degrees) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < level else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Difference:
    """Two models on the same tasks: second minus first, with its interval and the probability of as
    much by chance.
    """

    mean: float
    low: float
    high: float
    p_value: float
    """Two-sided, of no difference at all: McNemar's exact test for right or wrong, else the paired
    t test.
    """
    method: str
    num_tasks: int
    better: int
    """Tasks with a better result of the second."""
    worse: int

    def verdict(self, confidence: float) -> Literal["better", "worse", "no difference"]:
        """Return the verdict of interval and test on the second, if they agree.

        "no difference": none was seen, there may be one. With few tasks, the interval may exclude 0
        although chance does as much more often than 1 - confidence.
        """
        if self.low <= 0 <= self.high or self.p_value > 1 - confidence:
            return "no difference"
        if self.low > 0:
            return "better"
        return "worse"


def paired_difference(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], confidence: float = 0.95
) -> Difference | None:
    """Return the mean difference over tasks (of each task's mean), second minus first; both in the
    order of the same tasks.

    Pairing removes common difficulty, so it detects smaller differences than two intervals side by
    side. One sample a task, right or wrong, in both: Newcombe's interval for paired shares (1998,
    method 10) and McNemar's exact test. Else, within [0, 1]: Newcombe's way to pair two intervals
    (MOVER, Zou & Donner 2008), with each model's interval of `estimate_mean` and the correlation of
    the tasks' means, and the paired t test. Student's t on the differences is not valid there: if
    few tasks differ it sees little or no variance (simulated for 5 to 100 tasks, means of 0.5 to
    0.97, it covered the truth in 0.88 of the cases and in 0.18 at worst, this one in 0.96 and
    0.81). Interval and p value come from different methods: they may disagree in close cases.
    Beyond [0, 1]: Student's t. None if no task has a value in both, or a single one has partial
    credit.
    """
    pairs = [(list(a), list(b)) for a, b in zip(first, second, strict=True) if a and b]
    if not pairs:
        return None
    differences = [statistics.fmean(b) - statistics.fmean(a) for a, b in pairs]
    better = sum(d > 1e-12 for d in differences)
    worse = sum(d < -1e-12 for d in differences)
    count = len(pairs)
    mean = statistics.fmean(differences)
    if all(len(a) == len(b) == 1 and {a[0], b[0]} <= {0.0, 1.0} for a, b in pairs):
        both = sum(a[0] * b[0] for a, b in pairs)
        low, high = _newcombe(round(both), worse, better, count, confidence)
        return Difference(
            mean, low, high, mcnemar(worse, better), "Newcombe, McNemar", count, better, worse
        )
    if count == 1:
        return None
    deviation = statistics.stdev(differences)
    error = deviation / math.sqrt(count)
    alike = deviation <= 1e-12
    if alike:
        test = "sign test"
        p_value = mcnemar(worse, better)
    else:
        test = "paired t test"
        p_value = max(0.0, 2 * (1 - t_cdf(abs(mean) / error, count - 1)))
    firsts, seconds = zip(*pairs)
    if _are_shares(firsts) and _are_shares(seconds):
        means = [[statistics.fmean(values) for values in side] for side in (firsts, seconds)]
        varies = all(statistics.stdev(side) > 1e-12 for side in means)
        low, high = _paired_interval(
            statistics.fmean(means[0]),
            statistics.fmean(means[1]),
            _interval_of_shares(firsts, confidence)[:2],
            _interval_of_shares(seconds, confidence)[:2],
            statistics.correlation(*means) if varies else 0.0,
        )
        method = f"Newcombe over tasks, {test}"
    else:
        half = 0.0
        if not alike:
            half = t_quantile(0.5 + confidence / 2, count - 1) * error
        low = mean - half
        high = mean + half
        method = f"t over tasks, {test}"
    return Difference(mean, low, high, p_value, method, count, better, worse)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two means with its interval; None if undetermined."""

    value: float | None
    """None if the denominator's mean is not above 0."""
    low: float | None
    high: float | None
    """Infinite if the denominator may be 0."""


def ratio_of_means(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> Ratio:
    """Return mean(numerators)/mean(denominators), paired, and Fieller's interval (1954): all ρ with
    the mean of numerator - ρ·denominator within t standard errors of 0. Unlike a symmetric one, it
    shows a denominator's possible 0. Meant for non-negative ratios; the interval is cut to them.
    """
    count = len(numerators)
    if not count:
        return Ratio(None, None, None)
    top = statistics.fmean(numerators)
    bottom = statistics.fmean(denominators)
    value = top / bottom if bottom > 0 else None
    if count < 3:
        return Ratio(value, None, None)
    square = t_quantile(0.5 + confidence / 2, count - 1) ** 2 / count
    # (top - ρ·bottom)² <= square·(v_tt - 2ρ·v_tb + ρ²·v_bb): a quadratic in ρ.
    a = bottom * bottom - square * statistics.variance(denominators)
    b = top * bottom - square * statistics.covariance(numerators, denominators)
    c = top * top - square * statistics.variance(numerators)
    root = math.sqrt(max(0.0, b * b - a * c))
    if bottom <= 0 or b * b < a * c or b + root <= 0:
        return Ratio(value, 0.0, math.inf)
    # With a <= 0, it is open above.
    return Ratio(value, max(0.0, c / (b + root)), (b + root) / a if a > 0 else math.inf)


def difference_over_seeds(
    first: Sequence[Sequence[Sequence[float]]],
    second: Sequence[Sequence[Sequence[float]]],
    confidence: float = 0.95,
) -> Difference | None:
    """Return the mean difference, second minus first, of two ways to train, for other tasks and
    other seeds. Both: the values of each seed's tasks' samples, of the same tasks in the same
    order; a task without a value in any seed is left out.

    With one seed on a side, `paired_difference` over the tasks' means: nothing is known of other
    seeds. Else the variances add up: of the tasks' differences (over all seeds), and of each side's
    seeds (over all tasks), as if the draws of tasks and seeds were independent; the variance of
    single tasks with single seeds, mostly from sampling, is counted in both, so the interval is
    rather too wide. Student's t with Satterthwaite's degrees of freedom (1946, "An approximate
    distribution of estimates of variance components"), rounded down.
    """
    tasks = [k for k in range(len(first[0])) if all(run[k] for run in (*first, *second))]
    sides = [
        [[statistics.fmean(run[k]) for k in tasks] for run in side] for side in (first, second)
    ]
    by_task = [[statistics.fmean(values) for values in zip(*side, strict=True)] for side in sides]
    if min(len(first), len(second)) < 2 or len(tasks) < 2:
        one, other = (
            [[value for run in side for value in run[k]] for k in tasks] for side in (first, second)
        )
        return paired_difference(one, other, confidence)
    differences = [b - a for a, b in zip(*by_task, strict=True)]
    parts = [(statistics.variance(differences) / len(tasks), len(tasks) - 1)]
    parts += [
        (statistics.variance([statistics.fmean(run) for run in side]) / len(side), len(side) - 1)
        for side in sides
    ]
    mean = statistics.fmean(differences)
    variance = sum(part for part, _ in parts)
    better = sum(d > 0 for d in differences)
    worse = sum(d < 0 for d in differences)
    if variance <= 1e-24:
        half = 0.0
        p_value = mcnemar(worse, better)
        method = "all alike, sign test"
    else:
        degrees = max(1, int(variance**2 / sum(part**2 / free for part, free in parts)))
        error = math.sqrt(variance)
        half = t_quantile(0.5 + confidence / 2, degrees) * error
        p_value = max(0.0, 2 * (1 - t_cdf(abs(mean) / error, degrees)))
        method = "t over tasks and seeds"
    return Difference(mean, mean - half, mean + half, p_value, method, len(tasks), better, worse)


def mcnemar(one_only: int, other_only: int) -> float:
    """Return the two-sided p value of McNemar's exact test: whether each of two is equally often
    the only one to get a task right."""
    total = one_only + other_only
    fewer = min(one_only, other_only)
    return min(1.0, sum(math.comb(total, k) for k in range(fewer + 1)) / (1 << max(total - 1, 0)))


def _newcombe(
    both: int, first_only: int, second_only: int, count: int, confidence: float
) -> tuple[float, float]:
    """Return the interval of (share right of the second) − (share right of the first): Newcombe
    1998, "Improved confidence intervals for the difference between binomial proportions based on
    paired data", method 10 (Wilson's intervals, correlated)."""
    neither = count - both - first_only - second_only
    right_1 = both + first_only
    right_2 = both + second_only
    margins = right_1 * (count - right_1) * right_2 * (count - right_2)
    correlation = 0.0
    if margins > 0:
        determinant = both * neither - first_only * second_only
        corrected = determinant if determinant < 0 else max(determinant - count / 2, 0.0)
        correlation = corrected / math.sqrt(margins)
    return _paired_interval(
        right_1 / count,
        right_2 / count,
        wilson(right_1, count, confidence),
        wilson(right_2, count, confidence),
        correlation,
    )


def _paired_interval(
    mean_1: float,
    mean_2: float,
    interval_1: tuple[float, float],
    interval_2: tuple[float, float],
    correlation: float,
) -> tuple[float, float]:
    """Return the interval of mean_2 − mean_1, from the interval of each and the correlation of the
    two.
    """
    (low_1, high_1), (low_2, high_2) = interval_1, interval_2
    difference = mean_2 - mean_1
    down = (
        (mean_2 - low_2) ** 2
        - 2 * correlation * (mean_2 - low_2) * (high_1 - mean_1)
        + (high_1 - mean_1) ** 2
    )
    up = (
        (high_2 - mean_2) ** 2
        - 2 * correlation * (high_2 - mean_2) * (mean_1 - low_1)
        + (mean_1 - low_1) ** 2
    )
    return max(-1.0, difference - math.sqrt(max(0.0, down))), min(
        1.0, difference + math.sqrt(max(0.0, up))
    )
