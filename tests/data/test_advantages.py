"""Advantages by hand and against direct transcriptions of their formulas, and groups that have
nothing to teach.
"""

import logging
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ttrl.configs.data import AdvantageConfig
from ttrl.data.advantages import advantages_of, batch_advantages, group_advantages, has_signal
from ttrl.errors import ConfigError, UserError
from ttrl.records import Sample, TaskResult

METHODS = ["std", "mean", "leave_one_out"]
# Quarters differ by 0 or by much: shifts and permutations do not change which rewards are equal.
rewards_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=12)
floats = st.lists(st.floats(-100, 100), min_size=2, max_size=20)


def by_definition(rewards, method, floor=1e-6):
    """The formulas, written down in NumPy's float64."""
    r = np.array(rewards, dtype=np.float64)
    if method == "leave_one_out":
        found = (
            np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])
            if len(r) > 1
            else np.zeros(1)
        )
    else:
        found = r - r.mean()
        if method == "std":
            found = found / max(math.sqrt(((r - r.mean()) ** 2).mean()), floor)
    return found


def test_by_hand():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([1.0, 0.0, 0.0, 0.0], method="mean") == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages([1.0, 0.0, 0.0, 0.5], method="leave_one_out") == pytest.approx(
        [5 / 6, -0.5, -0.5, 1 / 6]
    )
    # Std is 0.01.
    assert group_advantages([0.51, 0.49], std_floor=0.05) == pytest.approx([0.2, -0.2])
    assert group_advantages([]) == []
    # centred: ±0.5 twice and ±1 twice, so the variance over all six is (2·0.25 + 2·1 + 0)/6 with a
    # group of equal rewards
    groups = batch_advantages([[1.0, 0.0], [2.0, 0.0], [3.0, 3.0]])
    scale = math.sqrt(2.5 / 6)
    assert groups == [
        pytest.approx([0.5 / scale, -0.5 / scale]),
        pytest.approx([1 / scale, -1 / scale]),
        [0.0, 0.0],
    ]
    assert batch_advantages([]) == [] and batch_advantages([[]]) == [[]]


@pytest.mark.parametrize("method", METHODS)
def test_equal_rewards_give_zeros_whatever_the_rounding(method):
    # 0.1 has no exact mean in floating point: its rounding must not be divided by a tiny standard
    # deviation
    assert group_advantages([0.1] * 3, method) == [0.0] * 3
    assert group_advantages([0.7], method) == [0.0]
    assert batch_advantages([[0.1] * 3, [0.7]]) == [[0.0] * 3, [0.0]]


@given(floats, st.sampled_from(METHODS), st.sampled_from([1e-6, 0.05, 3.0]))
def test_against_the_formulas(rewards, method, floor):
    got = np.array(group_advantages(rewards, method, floor))
    if not has_signal(rewards):
        assert (got == 0).all()
    else:
        np.testing.assert_allclose(got, by_definition(rewards, method, floor), rtol=1e-7, atol=1e-6)


@given(st.lists(rewards_lists, min_size=1, max_size=5), st.sampled_from([1e-6, 0.05]))
def test_batch_against_the_formula(groups, floor):
    centred = [np.array(rewards) - np.mean(rewards) for rewards in groups]
    # NumPy's takes the mean over the batch off as well: it is 0.
    scale = max(np.concatenate(centred).std(), floor)
    for got, expected in zip(batch_advantages(groups, floor), centred, strict=True):
        np.testing.assert_allclose(got, expected / scale, rtol=1e-9, atol=1e-9)


@given(
    rewards_lists, st.integers(-20, 20), st.sampled_from(METHODS), st.randoms(use_true_random=False)
)
def test_properties(rewards, shift, method, random):
    got = group_advantages(rewards, method)
    assert math.fsum(got) == pytest.approx(0.0, abs=1e-9)
    assert group_advantages([reward + shift for reward in rewards], method) == pytest.approx(
        got, abs=1e-9
    )
    order = list(range(len(rewards)))
    random.shuffle(order)
    assert group_advantages([rewards[i] for i in order], method) == pytest.approx(
        [got[i] for i in order], abs=1e-9
    )
    for i, j in zip(range(len(rewards)), range(1, len(rewards)), strict=False):
        assert (rewards[i] < rewards[j]) == (got[i] < got[j] - 1e-9)


@given(rewards_lists)
def test_leave_one_out_is_the_mean_scaled(rewards):
    assume(len(rewards) > 1)
    n = len(rewards)
    expected = [n / (n - 1) * value for value in group_advantages(rewards, "mean")]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(rewards_lists, min_size=1, max_size=5),
    st.lists(st.integers(-20, 20), min_size=5, max_size=5),
)
def test_batch_properties(groups, shifts):
    got = batch_advantages(groups)
    assert [math.fsum(values) for values in got] == pytest.approx([0.0] * len(groups), abs=1e-9)
    moved = [
        [reward + shift for reward in rewards]
        for rewards, shift in zip(groups, shifts, strict=False)
    ]
    for before, after in zip(got, batch_advantages(moved), strict=True):
        assert after == pytest.approx(before, abs=1e-9)
    flat = [value for values in got for value in values]
    if any(map(has_signal, groups)):
        assert np.std(flat) == pytest.approx(1.0)
    assert batch_advantages(groups[::-1]) == [
        pytest.approx(values, abs=1e-9) for values in got[::-1]
    ]


@given(rewards_lists)
def test_a_batch_of_one_group_is_the_group(rewards):
    assert batch_advantages([rewards])[0] == pytest.approx(
        group_advantages(rewards, "std"), abs=1e-12
    )


def test_what_is_refused():
    with pytest.raises(
        ConfigError, match=r"method is 'median'; choose 'std', 'mean' or 'leave_one_out'$"
    ):
        group_advantages([1.0, 0.0], method="median")
    with pytest.raises(ConfigError, match="'batch' needs all groups at once"):
        group_advantages([1.0, 0.0], method="batch")
    for wrong in (math.nan, math.inf):
        with pytest.raises(UserError, match=rf"reward 1 of a group is {wrong}"):
            group_advantages([1.0, wrong])
        with pytest.raises(UserError, match="reward 0 of a group"):
            batch_advantages([[1.0], [wrong, 2.0]])
    with pytest.raises(ConfigError) as caught:
        AdvantageConfig(kind="x", std_floor=0.0, clip=-1.0, reward_power=0.0, surprise_bonus=2.0)
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="surprise_until is 'end' without a surprise_bonus"):
        AdvantageConfig(surprise_until="end")


def group(name, rewards, logprobs=None):
    samples = [
        Sample(
            task_id=name, sample=i, messages=[], reward=reward, logprobs=logprobs and logprobs[i]
        )
        for i, reward in enumerate(rewards)
    ]
    return TaskResult(task_id=name, messages=[], samples=samples)


def test_groups_without_signal_are_counted_by_reason():
    results = [
        group("mixed", [0.0, 1.0, None]),
        group("right", [1.0, 1.0]),
        group("wrong", [0.0, 0.0, 0.0]),
        group("half", [0.5, 0.5]),
        group("one", [1.0, None]),
        group("none", [None, None]),
        group("nearly", [0.5, 0.5 + 1e-12]),
    ]
    counts = {"all_right": 1, "all_wrong": 1, "other_equal": 2, "too_few": 2}
    for kind in (*METHODS, "batch"):
        made = advantages_of(results, AdvantageConfig(kind=kind))
        assert made.kept == results[:1]
        assert made.values == [
            pytest.approx([-1.0, 1.0] if kind in ("std", "leave_one_out", "batch") else [-0.5, 0.5])
        ]
        assert made.groups.to_json() == counts | {
            "total": 7,
            "kept": 1,
            "no_signal": 6,
            "no_signal_share": 6 / 7,
            "low_std": 0,
        }


def test_where_every_reward_is_zero_every_group_is_wrong():
    made = advantages_of([group("a", [0.0, 0.0]), group("b", [0.0] * 4)], AdvantageConfig())
    assert made.kept == [] and made.groups.all_wrong == made.groups.no_signal == 2
    made = advantages_of([], AdvantageConfig(kind="batch", surprise_bonus=0.5))
    assert (made.kept, made.values, made.groups.no_signal_share) == ([], [], 0.0)


def test_a_reward_for_form_alone_makes_no_group_right():
    """Found with GSM8K and a small model: all had the form, none the number, and groups were called
    right.
    """
    results = [
        group("form", [0.1, 0.1]),
        group("nothing", [0.0, 0.0]),
        group("right", [1.0, 1.0]),
        group("mixed", [0.1, 0.0]),
    ]
    for result in results:
        for sample in result.samples:
            sample.metrics = {"exact": float(sample.reward == 1.0)}
    counts = advantages_of(results[:2] + results[3:], AdvantageConfig()).groups
    assert (counts.all_right, counts.all_wrong, counts.other_equal, counts.kept) == (
        0,
        2,
        0,
        1,
    )
    assert advantages_of(results, AdvantageConfig()).groups.all_right == 1


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["reply/exact"], "all_wrong"),
        (["exact", "reply/exact"], "all_right"),
        (["reply/exact", "form/exact"], "all_right"),
        (["reply/inexact"], "all_right"),
    ],
)
def test_the_exact_part_of_a_combined_grader_says_what_is_wrong(names, reason):
    """Found with a judge: it gave 0.4 to every reply, no reply was right, and all groups were
    called right. Several parts with the metric do not decide; the rewards do.
    """
    results = [group("a", [0.4, 0.4]), group("b", [0.0, 0.4])]
    for result in results:
        for sample in result.samples:
            sample.metrics = {name: float(name == "exact") for name in names}
    groups = advantages_of(results, AdvantageConfig()).groups
    assert groups.to_json()[reason] == 1 and groups.kept == 1


def test_the_chess_log_formula(caplog):
    """A = clip((r - mean)/max(std, 0.05), ±2), with a warning on low std."""
    lists = [[1.0] + [0.0] * 9, [0.5, 0.52], [0.0, 1.0]]
    config = AdvantageConfig(std_floor=0.05, clip=2.0)
    with caplog.at_level(logging.WARNING, "ttrl.data.advantages"):
        made = advantages_of([group(str(n), rewards) for n, rewards in enumerate(lists)], config)
    expected = [
        np.clip((np.array(r) - np.mean(r)) / max(np.std(r), 0.05), -2, 2).tolist() for r in lists
    ]
    assert made.values == [pytest.approx(values) for values in expected]
    assert (made.groups.low_std, made.figures.clipped) == (1, 1)
    assert made.figures.mean_abs == pytest.approx(np.abs(np.concatenate(expected)).mean())
    assert made.figures.lowest == pytest.approx(np.concatenate(expected).min())
    assert made.figures.highest == pytest.approx(np.concatenate(expected).max())
    assert (
        "in 1 of 3 groups with a signal, the rewards' standard deviation is below the floor of 0.05"
    ) in caplog.text


def test_a_batch_with_a_low_deviation_counts_all_of_its_groups(caplog):
    lists = [[0.5, 0.52], [0.0, 0.02], [0.0, 0.0]]
    made = advantages_of(
        [group(str(n), r) for n, r in enumerate(lists)],
        AdvantageConfig(kind="batch", std_floor=0.05),
    )
    assert made.values == [pytest.approx([-0.2, 0.2])] * 2
    assert made.groups.low_std == 2
    assert "2 of 2" in caplog.text
    # Groups without signal are left out of the deviation: 0.02 twice, and no zeros
    made = advantages_of(
        [group(str(n), r) for n, r in enumerate(lists)], AdvantageConfig(kind="batch")
    )
    assert made.values == [pytest.approx([-1.0, 1.0])] * 2


def test_mean_and_leave_one_out_know_no_floor(caplog):
    for kind in ("mean", "leave_one_out"):
        made = advantages_of([group("a", [0.5, 0.52])], AdvantageConfig(kind=kind, std_floor=0.05))
        assert made.groups.low_std == 0
        assert made.values == [pytest.approx(by_definition([0.5, 0.52], kind).tolist())]
    assert not caplog.text


def test_rewards_are_shaped_first():
    results = [
        group("mixed", [0.5, 1.0, None], [[-1.0], [-2.0, math.nan, -4.0], [-9.0]]),
        group("right", [1.0, 1.0], [[-1.0], [-3.0]]),
        group("alike", [1.0, 1.0], [[-1.0, -3.0], [-2.0]]),
        group("wrong", [0.0, 0.0], [[-1.0], None]),
    ]
    made = advantages_of(
        results, AdvantageConfig(kind="mean", reward_power=2.0, surprise_bonus=0.25)
    )
    # 0.25·(0.75 + 0.25·1) = 0.25 and 0.75 + 0.25·3 = 1.5; then 1 and 0.75 + 0.25·3 = 1.5
    assert [result.task_id for result in made.kept] == ["mixed", "right"]
    assert made.values == [[-0.625, 0.625], [-0.25, 0.25]]
    assert {
        name: getattr(made.groups, name)
        for name in ("all_right", "all_wrong", "other_equal", "too_few")
    } == {
        "all_right": 1,
        "all_wrong": 1,
        "other_equal": 0,
        "too_few": 0,
    }
    assert made.figures.shaped_reward == pytest.approx((0.25 + 1.5 + 1.0 + 1.5 + 1.25 + 1.25) / 8)
    assert made.figures.surprise == pytest.approx((1 + 3 + 1 + 3 + 2 + 2 + 1) / 7)
    assert made.figures.surprise_unknown == 1
    assert not advantages_of(results, AdvantageConfig()).figures.to_json().keys() & {
        "shaped_reward",
        "surprise",
        "surprise_unknown",
    }
    assert [sample.reward for sample in results[0].samples] == [0.5, 1.0, None]


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(UserError, match="task 'b', sample 1: its reward is nan"):
        advantages_of([group("a", [0.0, 1.0]), group("b", [0.0, math.nan])], AdvantageConfig())
