"""The comparison of old and new rewards against plain definitions, and its text."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl import Sample, TaskResult
from ttrl.data.advantages import group_advantages
from ttrl.replays.changes import ReplayComparison, RewardComparison
from ttrl.replays.changes_text import changes_text, one_line

rewards = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0]))
groups = st.lists(
    st.lists(st.tuples(rewards, rewards), min_size=1, max_size=6), min_size=1, max_size=5
)


def group(number, values):
    messages = [{"role": "user", "content": f"question {number}"}]
    samples = [
        Sample(
            task_id=f"task/{number}",
            sample=k,
            messages=messages,
            reward=value,
            error=None if value is not None else "failed",
        )
        for k, value in enumerate(values)
    ]
    return TaskResult(task_id=f"task/{number}", messages=messages, samples=samples)


@settings(max_examples=80, deadline=None)
@given(groups, st.sampled_from(["std", "mean"]))
def test_counts_are_what_they_say(drawn, method):
    comparison, pairs, advantages = RewardComparison(None, method), [], ([], [])
    for number, values in enumerate(drawn):
        before, after = (group(number, [value[side] for value in values]) for side in (0, 1))
        comparison.add(before, after)
        both = [(old, new) for old, new in values if old is not None and new is not None]
        pairs += [
            (np.sign(a[0] - b[0]), np.sign(a[1] - b[1])) for a, b in itertools.combinations(both, 2)
        ]
        known = []
        for side, result in enumerate((before, after)):
            given_ = iter(group_advantages(result.rewards, method))
            known.append([next(given_) if value[side] is not None else None for value in values])
        for old, new in zip(*known, strict=True):
            if old is not None and new is not None:
                advantages[0].append(old)
                advantages[1].append(new)
    c = comparison.changes
    flat = [value for values in drawn for value in values]
    assert c.rollouts == len(flat) == c.compared + c.newly_failed + c.newly_graded + c.still_failed
    assert c.compared == sum(old is not None and new is not None for old, new in flat)
    assert c.changed == sum(old is not None and new is not None and old != new for old, new in flat)
    for side, mean in enumerate((c.mean_before, c.mean_after)):
        graded = [value[side] for value in flat if value[side] is not None]
        assert mean == (pytest.approx(np.mean(graded)) if graded else None)
    assert (
        c.pairs_ordered
        == sum(old != 0 for old, _ in pairs)
        == c.pairs_kept + c.pairs_flipped + c.pairs_tied
    )
    assert c.pairs_flipped == sum(old * new < 0 for old, new in pairs)
    assert c.pairs_kept == sum(old * new > 0 for old, new in pairs)
    assert c.pairs_untied == sum(old == 0 and new != 0 for old, new in pairs)
    assert c.signal_after - c.signal_before == c.signal_appeared - c.signal_disappeared
    if len(advantages[0]) > 1 and np.std(advantages[0]) > 1e-6 and np.std(advantages[1]) > 1e-6:
        assert c.advantage_correlation == pytest.approx(np.corrcoef(*advantages)[0, 1], abs=1e-6)


def test_the_text_fits_the_terminal():
    compared, pairs = ReplayComparison("std"), []
    for number in range(7):
        before, after = (
            group(number, [0.0, -123.25, 1.0, None]),
            group(number, [1.0, 0.5, None, 0.0]),
        )
        for sample in before.samples:
            sample.task_id, sample.text = (
                f"a-rather-long-name-of-a-task/{number}" * 3,
                "an answer of many words " * 20,
            )
        after.samples[2].error = "why " * 90
        pairs.append((before, after))
    compared.add(12, pairs)
    assert list(compared.failures.values()) == [7]
    for width in (80, 100):
        text = changes_text(compared, width)
        assert max(map(len, text.splitlines())) <= width
        assert "Tasks with the largest changes of reward, 5 of 7:" in text


def test_one_line():
    assert one_line("a\n b\t\x1b[1mc", 20) == "a b \N{REPLACEMENT CHARACTER}[1mc"
    assert one_line("word " * 10, 11) == "word word …"
    assert one_line("長い長い長い", 5) == "長い…"
    assert one_line("", 5) == ""
