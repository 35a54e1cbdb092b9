"""Advantages by hand and by NumPy, and groups that have nothing to teach."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.data.advantages import drop_groups_without_signal, group_advantages, has_signal
from ttrl.errors import ConfigError
from ttrl.records import Sample, TaskResult


def test_by_hand():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [1.0, -1.0, -1.0, 1.0]
    assert group_advantages([1.0, 0.0, 0.0, 0.0], method="mean") == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages([1.0] + [0.0] * 99, clip=2.0)[0] == 2.0
    assert group_advantages([0.51, 0.49], std_floor=0.05) == pytest.approx([0.2, -0.2])  # std is 0.01
    assert group_advantages([]) == []


def test_equal_rewards_give_zeros_whatever_the_rounding():
    # 0.1 has no exact mean in floating point: its rounding must not be divided by a tiny standard deviation
    assert group_advantages([0.1] * 3) == [0.0] * 3
    assert group_advantages([0.7]) == [0.0]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.sampled_from(["std", "mean"]))
def test_against_numpy(rewards, method):
    got = np.array(group_advantages(rewards, method=method))
    values = np.array(rewards)
    centred = values - values.mean()
    if not has_signal(rewards):
        assert (got == 0).all()
    else:
        np.testing.assert_allclose(got, centred / max(values.std(), 1e-6) if method == "std" else centred, rtol=1e-7, atol=1e-6)


def test_an_unknown_method_is_named():
    with pytest.raises(ConfigError, match="method is 'median'; choose 'std' or 'mean'"):
        group_advantages([1.0, 0.0], method="median")


def group(name: str, rewards: list[float | None]) -> TaskResult:
    samples = [Sample(task_id=name, sample=i, messages=[], reward=reward) for i, reward in enumerate(rewards)]
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
    kept, counts = drop_groups_without_signal(results)
    assert [result.task_id for result in kept] == ["mixed"]
    assert counts == {"all_right": 1, "all_wrong": 1, "other_equal": 2, "too_few": 2}


def test_where_every_reward_is_zero_every_group_is_wrong():
    kept, counts = drop_groups_without_signal([group("a", [0.0, 0.0]), group("b", [0.0] * 4)])
    assert kept == [] and counts == {"all_right": 0, "all_wrong": 2, "other_equal": 0, "too_few": 0}
    assert drop_groups_without_signal([]) == ([], {"all_right": 0, "all_wrong": 0, "other_equal": 0, "too_few": 0})
