"""Confidence intervals of evaluations, and paired differences: plain Python, from the published formulas.

A task is drawn from many that might have been asked, and its k samples say how the model does on that task; so tasks, not
samples, are what an evaluation has many of. Samples of one task resemble each other: an interval that took them for independent
would be too narrow by up to √k (Miller 2024, "Adding error bars to evals", arXiv 2411.00640, section 2.2). Therefore:

- one sample a task, right or wrong: Wilson's score interval (1927), which keeps its level near 0 and 1 and for few tasks;
- anything else (k samples, or partial credit): the mean of the tasks' means, and Student's t with tasks − 1 degrees of freedom on
  these means. It is exact for normal means and good for many tasks. A bootstrap over tasks has the same aim, is narrower than it
  should be for few tasks (it lacks t's correction), and gives another answer each time.
- where all tasks have the same mean, t would give an interval of no width. Of all variables within [0, 1] with mean p, the one
  that is 0 or 1 varies most, so there Wilson's interval with one count a task is the careful answer.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_MOST_TERMS = 4000
"""Degrees of freedom up to which Student's t is summed exactly; above, three terms of its expansion are exact to 1e-12."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. None where there is too little to tell: no task, or a single one with partial credit."""

    mean: float | None
    low: float | None
    high: float | None
    method: str
    num_tasks: int

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write as it is."""
        return asdict(self)

    def covers(self, value: float) -> bool:
        """Whether `value` lies inside."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def wilson(right: float, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share: `right` of `count`, both ends within [0, 1]."""
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread * spread / 4) / (1 + spread)
    # The ends at 0 and 1 are exact; rounding would make them -1e-17.
    return (0.0 if right == 0 else max(0.0, middle - half)), (1.0 if right == count else min(1.0, middle + half))


def estimate_mean(by_task: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate:
    """The mean over tasks of the means of their samples, and its interval. by_task: the values of each task's samples; tasks
    without any are left out.

    Values within [0, 1] keep the interval within [0, 1].
    """
    groups = [list(values) for values in by_task if values]
    means = [statistics.fmean(values) for values in groups]
    if not means:
        return Estimate(None, None, None, "no samples", 0)
    count, mean = len(means), statistics.fmean(means)
    shares = all(0.0 <= value <= 1.0 for values in groups for value in values)
    if all(len(values) == 1 and values[0] in (0.0, 1.0) for values in groups):
        low, high = wilson(sum(means), count, confidence)
        return Estimate(mean, low, high, "Wilson", count)
    if count > 1 and (deviation := statistics.stdev(means, xbar=mean)) > 1e-12:
        half = t_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
        low, high = mean - half, mean + half
        if shares:
            low, high = max(0.0, low), min(1.0, high)
        return Estimate(mean, low, high, "Student t over tasks", count)
    if shares:
        low, high = wilson(mean * count, count, confidence)
        return Estimate(mean, low, high, "Wilson, one count a task", count)
    return Estimate(mean, None, None, "one task, or all alike", count)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of `k` samples drawn without replacement from `samples`, of which `right` are right, is right: the
    unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1), as a product that never overflows.

    1 − C(n − c, k) / C(n, k) = 1 − Π_{i = n−c+1}^{n} (1 − k / i). Needs samples >= k >= 1.
    """
    assert 0 <= right <= samples and 1 <= k <= samples
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def t_cdf(t: float, degrees: int) -> float:
    """Student's t distribution for whole degrees of freedom: the finite sums of Abramowitz & Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    if degrees % 2:
        total, term = 0.0, cosine
        for place in range(1, (degrees - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * place / (2 * place + 1)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        total, term = 0.0, 1.0
        for place in range(1, degrees // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * place - 1) / (2 * place)
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def t_quantile(level: float, degrees: int) -> float:
    """The inverse of `t_cdf`, for 0.5 <= level < 1."""
    z = statistics.NormalDist().inv_cdf(level)
    if degrees > _MOST_TERMS:  # Abramowitz & Stegun 26.7.5
        terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
    low, high = 0.0, 2.0
    while t_cdf(high, degrees) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, degrees) < level else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Difference:
    """Two models on the same tasks: second minus first, with its interval and how likely chance alone does as much."""

    mean: float
    low: float
    high: float
    p_value: float
    """Two-sided, of no difference at all: McNemar's exact test for right or wrong, else the paired t test."""
    method: str
    num_tasks: int
    better: int
    """Tasks on which the second does better."""
    worse: int

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write as it is."""
        return asdict(self)


def paired_difference(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], confidence: float = 0.95
) -> Difference | None:
    """The mean difference over tasks (of each task's mean), second minus first; both are in the order of the same tasks.

    Pairing removes what both find hard alike, so it tells smaller differences than two intervals side by side.
    One sample a task, right or wrong, in both: Newcombe's interval for paired shares (1998, method 10) and McNemar's exact test.
    Else: Student's t on the tasks' differences. None where no task has a value in both, or a single one has partial credit.
    """
    pairs = [(list(a), list(b)) for a, b in zip(first, second, strict=True) if a and b]
    if not pairs:
        return None
    differences = [statistics.fmean(b) - statistics.fmean(a) for a, b in pairs]
    better, worse = sum(d > 1e-12 for d in differences), sum(d < -1e-12 for d in differences)
    count, mean = len(pairs), statistics.fmean(differences)
    if all(len(a) == len(b) == 1 and {a[0], b[0]} <= {0.0, 1.0} for a, b in pairs):
        both = sum(a[0] * b[0] for a, b in pairs)
        low, high = _newcombe(round(both), worse, better, count, confidence)
        return Difference(mean, low, high, mcnemar(worse, better), "Newcombe, McNemar", count, better, worse)
    if count == 1:
        return None
    deviation = statistics.stdev(differences)
    if deviation <= 1e-12:
        return Difference(mean, mean, mean, mcnemar(worse, better), "all differences alike, sign test", count, better, worse)
    error = deviation / math.sqrt(count)
    half = t_quantile(0.5 + confidence / 2, count - 1) * error
    p_value = 2 * (1 - t_cdf(abs(mean) / error, count - 1))
    return Difference(mean, mean - half, mean + half, max(0.0, p_value), "paired t over tasks", count, better, worse)


def mcnemar(one_only: int, other_only: int) -> float:
    """McNemar's exact test: of the tasks that one of two gets right, is it as often the one as the other? Two-sided p value."""
    total, fewer = one_only + other_only, min(one_only, other_only)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**total)


def _newcombe(both: int, first_only: int, second_only: int, count: int, confidence: float) -> tuple[float, float]:
    """The interval of (share right of the second) − (share right of the first): Newcombe 1998, "Improved confidence intervals for
    the difference between binomial proportions based on paired data", method 10 (Wilson's intervals, correlated)."""
    neither = count - both - first_only - second_only
    right_1, right_2 = both + first_only, both + second_only
    p_1, p_2 = right_1 / count, right_2 / count
    (low_1, high_1), (low_2, high_2) = (wilson(right, count, confidence) for right in (right_1, right_2))
    margins = right_1 * (count - right_1) * right_2 * (count - right_2)
    correlation = 0.0
    if margins > 0:
        determinant = both * neither - first_only * second_only
        if determinant > count / 2:
            determinant = max(determinant - count / 2, 0)
        elif determinant >= 0:
            determinant = 0
        correlation = determinant / math.sqrt(margins)
    difference = p_2 - p_1
    down = (p_2 - low_2) ** 2 - 2 * correlation * (p_2 - low_2) * (high_1 - p_1) + (high_1 - p_1) ** 2
    up = (high_2 - p_2) ** 2 - 2 * correlation * (high_2 - p_2) * (p_1 - low_1) + (p_1 - low_1) ** 2
    return max(-1.0, difference - math.sqrt(max(0.0, down))), min(1.0, difference + math.sqrt(max(0.0, up)))
