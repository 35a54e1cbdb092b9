"""Intervals against published examples, exact enumeration and brute force."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from ttrl.intervals import (
    Ratio,
    _newcombe,
    estimate_mean,
    mcnemar,
    paired_difference,
    pass_at_k,
    pooled,
    ratio_of_means,
    t_cdf,
    t_quantile,
    wilson,
)


def test_wilson_against_newcombe_1998() -> None:
    """Table I of Newcombe 1998, "Two-sided confidence intervals for the single proportion", method
    3.
    """
    for right, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(29, 29)[1] == 1.0 and wilson(0, 3)[0] == 0.0


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 10), (1.0, 10), (0.5, 200), (0.93, 200), (0.02, 50)]
)
def test_wilsons_interval_solves_its_equation(share: float, count: int) -> None:
    """Its bounds are the shares p at which |share − p| is exactly 1.96 standard errors under p
    itself.
    """
    for bound in wilson(share * count, count):
        assert abs(share - bound) == pytest.approx(
            1.959963985 * math.sqrt(bound * (1 - bound) / count), abs=1e-9
        )


def test_t_against_tables() -> None:
    """Two-sided 95% and 99% points of any table of Student's t."""
    for degrees, at_95, at_99 in (
        (1, 12.7062, 63.6567),
        (2, 4.3027, 9.9248),
        (3, 3.1824, 5.8409),
        (10, 2.2281, 3.1693),
        (120, 1.9799, 2.6174),
    ):
        assert t_quantile(0.975, degrees) == pytest.approx(at_95, abs=6e-5)
        assert t_quantile(0.995, degrees) == pytest.approx(at_99, abs=6e-5)
    assert t_quantile(0.975, 4000) == pytest.approx(t_quantile(0.975, 4001), abs=1e-6)
    assert t_cdf(0.0, 5) == 0.5 and t_cdf(-2.0, 4) == pytest.approx(1 - t_cdf(2.0, 4))


@pytest.mark.parametrize(
    ("samples", "right", "k"), [(6, 2, 3), (5, 0, 2), (5, 5, 5), (7, 4, 1), (8, 3, 6), (4, 1, 4)]
)
def test_pass_at_k_is_the_share_of_subsets(samples: int, right: int, k: int) -> None:
    outcomes = [True] * right + [False] * (samples - right)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, right, k) == pytest.approx(
        sum(map(any, subsets)) / len(subsets), abs=1e-14
    )


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    exact = 1 - Fraction(math.comb(9970, 500), math.comb(10_000, 500))
    assert pass_at_k(10_000, 30, 500) == pytest.approx(float(exact), rel=1e-12)


def test_right_or_wrong_once_a_task_is_wilson() -> None:
    estimate = estimate_mean([[1.0]] * 81 + [[0.0]] * 182)
    assert (estimate.low, estimate.high) == wilson(81, 263) and estimate.method == "Wilson"
    assert estimate.low < 0.3 < estimate.high < 0.4


def test_samples_of_a_task_are_one_cluster() -> None:
    """The same answer k times tells no more than once: the interval must not shrink with k."""
    draw = random.Random(0)
    once = [[float(draw.random() < 0.6)] for _ in range(40)]
    often = [values * 16 for values in once]
    single, clustered = estimate_mean(once), estimate_mean(often)
    assert clustered.mean == single.mean and clustered.method == "Wilson, tasks as clusters"
    assert clustered.high - clustered.low > 0.9 * (single.high - single.low)


@pytest.mark.parametrize(
    "groups", [[[0.5, 0.7], [0.2], [], [0.9]], [[1.0] * 4] * 5 + [[1.0, 0.0, 1.0, 1.0]]]
)
def test_several_samples_or_partial_credit_against_the_definition(
    groups: list[list[float]],
) -> None:
    """At each end, the mean is t standard deviations away, of which the variance at that end is
    told from the tasks' means.
    """
    estimate = estimate_mean(groups)
    means = [sum(values) / len(values) for values in groups if values]
    count, mean = len(means), sum(means) / len(means)
    # One more task is counted, of the largest variance that there is.
    variance = (sum((x - mean) ** 2 for x in means) + mean * (1 - mean)) / count / count
    assert estimate.num_tasks == count and estimate.mean == pytest.approx(mean)
    for end in (estimate.low, estimate.high):
        at_end = variance * end * (1 - end) / (mean * (1 - mean))
        assert abs(mean - end) / math.sqrt(at_end) == pytest.approx(t_quantile(0.975, count - 1))
    assert 0 < estimate.low < mean < estimate.high < 1


def test_samples_never_count_for_more_than_independent_ones() -> None:
    """Six tasks whose means happen to lie closer to each other than those of independent samples
    would.
    """
    estimate = estimate_mean([[1.0, 0.0]] * 5 + [[1.0, 1.0, 0.0]])
    effective, critical = 13, 2.570582
    spread = critical**2 / effective
    assert (estimate.low + estimate.high) / 2 == pytest.approx(
        (19 / 36 + spread / 2) / (1 + spread), abs=1e-6
    )


def test_rewards_beyond_0_and_1_are_students_t() -> None:
    estimate = estimate_mean([[3.0, 5.0], [2.0], [1.0]])
    error = math.sqrt(((4 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (1 - 7 / 3) ** 2) / 2 / 3)
    assert estimate.high - estimate.mean == pytest.approx(4.302653 * error)


def test_an_interval_always_has_a_width() -> None:
    assert estimate_mean([[0.5, 0.5]] * 10).low == pytest.approx(wilson(5, 10)[0])
    assert (
        estimate_mean([[1.0, 1.0]] * 10).high == 1.0 and estimate_mean([[1.0, 1.0]] * 10).low < 0.8
    )
    assert estimate_mean([[3.0]]).low is None and estimate_mean([]).mean is None
    assert estimate_mean([[3.0], [5.0]]).high > 5.0  # rewards beyond [0, 1] are not cut


def test_the_interval_holds_what_it_promises() -> None:
    """Of 200 evaluations of 60 tasks of different difficulty with 4 samples, 95% cover the truth;
    the same ones always.
    """
    draw, covered = random.Random(1), 0
    for _ in range(200):
        chances = [draw.betavariate(0.6, 0.4) for _ in range(60)]
        estimate = estimate_mean([[float(draw.random() < p) for _ in range(4)] for p in chances])
        covered += estimate.low <= 0.6 <= estimate.high
    assert 0.92 <= covered / 200 <= 0.98


def test_newcombe_paired_against_fagerland_2014() -> None:
    """Airway hyper-responsiveness: 1, 1, 7, 12 pairs; there 0.026 to 0.507 (but for the sign), and
    exact McNemar p = 0.0703.
    """
    low, high = _newcombe(1, 1, 7, 21, 0.95)
    assert (round(low, 3), round(high, 3)) == (0.026, 0.507)
    assert mcnemar(1, 7) == pytest.approx(0.0703125)
    pairs = [(1, 1)] + [(1, 0)] + [(0, 1)] * 7 + [(0, 0)] * 12
    difference = paired_difference([[float(a)] for a, _ in pairs], [[float(b)] for _, b in pairs])
    assert (difference.low, difference.high) == (low, high)
    assert (difference.better, difference.worse, difference.num_tasks) == (7, 1, 21)
    assert difference.mean == pytest.approx(6 / 21)


def test_mcnemar_by_counting_every_outcome() -> None:
    for total in range(1, 9):
        outcomes = [sum(bits) for bits in itertools.product((0, 1), repeat=total)]
        for one in range(total + 1):
            as_far = [x for x in outcomes if abs(2 * x - total) >= abs(2 * one - total)]
            assert mcnemar(one, total - one) == pytest.approx(len(as_far) / len(outcomes))


def test_paired_t() -> None:
    """Ten differences; mean 0.13, standard deviation 0.1059, t = 3.88, p = 0.0037 with nine degrees
    of freedom.
    """
    before = [[10.0 * k, 10.0 * k] for k in range(10)]
    gains = [0.1, 0.2, 0.0, 0.3, 0.1, 0.2, -0.05, 0.15, 0.2, 0.1]
    after = [[values[0] + gain] for values, gain in zip(before, gains)]
    difference = paired_difference(before, after)
    assert (
        difference.mean == pytest.approx(0.13)
        and difference.method == "t over tasks, paired t test"
    )
    deviation = math.sqrt(sum((gain - 0.13) ** 2 for gain in gains) / 9)
    assert difference.high - difference.mean == pytest.approx(2.262157 * deviation / math.sqrt(10))
    assert difference.p_value == pytest.approx(
        2 * (1 - t_cdf(0.13 / (deviation / math.sqrt(10)), 9))
    )
    assert 0.003 < difference.p_value < 0.005
    assert paired_difference([[0.5]], [[0.75]]) is None and paired_difference([[]], [[1.0]]) is None


def test_differences_of_shares() -> None:
    """Of equal means the interval has a width; where the tasks go together, it is narrower than of
    tasks that do not.
    """
    alike = paired_difference([[1.0, 1.0]] * 5, [[1.0, 1.0]] * 5)
    assert (alike.mean, alike.p_value, alike.method) == (0.0, 1.0, "Newcombe over tasks, sign test")
    assert (alike.low, alike.high) == pytest.approx((wilson(5, 5)[0] - 1, 1 - wilson(5, 5)[0]))
    first = [[0.1 * k, 0.1 * k] for k in range(10)]
    second = [[0.1 * k + 0.05] for k in range(10)]
    paired, turned = paired_difference(first, second), paired_difference(first, second[::-1])
    assert paired.mean == pytest.approx(0.05) == turned.mean
    one, other = estimate_mean(first), estimate_mean(second)
    # Perfectly correlated: the ends are the differences of the ends. Perfectly opposed: both add
    # up.
    assert paired.low == pytest.approx(0.05 - abs((other.mean - other.low) - (one.high - one.mean)))
    assert (turned.low, turned.high) == pytest.approx(
        (
            0.05 - (other.mean - other.low) - (one.high - one.mean),
            0.05 + (other.high - other.mean) + (one.mean - one.low),
        )
    )


def test_a_ratio_of_means_and_how_often_its_interval_holds_the_truth() -> None:
    draw = random.Random(1)
    held = opened = 0
    for _ in range(2000):
        pairs = [(draw.gauss(6, 2), draw.gauss(1.5, 1.5)) for _ in range(16)]
        found = ratio_of_means(*zip(*pairs, strict=True))
        assert found.low is not None and found.high is not None
        held += found.low <= 4 <= found.high
        opened += math.isinf(found.high)
        if found.value is not None:
            assert found.low <= found.value <= found.high
    assert 0.93 < held / 2000 < 0.97
    assert 0 < opened < 400  # where the denominator may be 0


def test_a_ratio_whose_denominator_is_not_positive_has_no_value() -> None:
    assert ratio_of_means([], []) == Ratio(None, None, None)
    assert ratio_of_means([1.0, 2.0], [1.0, 0.5]) == Ratio(2.0, None, None)
    assert ratio_of_means([1.0, 2.0, 3.0], [-1.0, -2.0, 1.0]) == Ratio(None, 0.0, math.inf)
    exact = ratio_of_means([2.0, 4.0, 6.0, 4.0, 4.0], [1.0, 2.0, 3.0, 2.0, 2.0])
    assert (
        exact.value == pytest.approx(2.0)
        and exact.low == pytest.approx(2.0)
        and exact.high == pytest.approx(2.0)
    )


def test_a_task_that_is_asked_often_is_one_task() -> None:
    assert pooled("abab", [[1], [2, 3], [4], []]) == [[1, 4], [2, 3]]
    assert pooled([], []) == []
    once = estimate_mean([[1.0], [0.0], [1.0]])
    often = estimate_mean(pooled("abc" * 32, [[1.0], [0.0], [1.0]] * 32))
    assert (often.mean, often.num_tasks) == (once.mean, 3)
    assert often.high - often.low >= 0.9 * (once.high - once.low)
