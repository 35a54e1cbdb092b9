"""What an iteration's rollouts say: counts on small groups that can be checked by eye, and a
correlation against numpy.
"""

import random

import pytest

from ttrl.loop.rollout_facts import rollout_figures, sampled_reads
from ttrl.records import Sample, TaskResult, Turn


def group(task, *samples):
    """Samples as (text, reward, finish_reason, error); ids are the letters' code points."""
    made = []
    for number, (text, reward, *more) in enumerate(samples):
        finish, error = (*more, "stop", None)[:2] if more else ("stop", None)
        ids = [ord(letter) for letter in text]
        ended = {"finish_reason": finish, "error": error, "reward": reward}
        made.append(
            Sample(task_id=task, sample=number, messages=[], text=text, token_ids=ids, **ended)
        )
    return TaskResult(task_id=task, messages=[], samples=made)


def test_counts_and_shares():
    groups = [
        group("solved", ("ab", 1.0), ("ab", 1.0), ("ab", 1.0), ("ab", 1.0)),
        group("stuck", ("x", 0.0), ("x", 0.0), ("x", 0.0), ("x", 0.0)),
        group(
            "open",
            ("ab", 1.0),
            ("abcdef", 0.0, "length"),
            ("", 0.0),
            ("abc", None, "stop", "GraderError: no number"),
        ),
    ]
    facts = rollout_figures(groups).to_json()
    assert (
        facts["truncated"] == 1 / 12 and facts["empty"] == 1 / 12 and facts["grader_failures"] == 1
    )
    assert (
        facts["stopped_early"] is None
        and rollout_figures(groups, stops_early=True).to_json()["stopped_early"] == 0
    )
    assert facts["truncated_reward"] == 0 and facts["ended_reward"] == 5 / 10
    assert facts["repeated"] == 6 / 11  # 11 graded samples, 5 different ones within their groups
    assert facts["repeated_groups"] == 2 / 3 and facts["stuck_groups"] == 1 / 3
    assert facts["commonest"] == 5 / 11 and facts["commonest_tasks"] == 2 / 3  # "ab"
    assert facts["max_length"] == 6 and facts["mean_length"] == pytest.approx(
        (4 * 2 + 4 + 2 + 6 + 0 + 3) / 12
    )


def test_the_correlation_is_that_of_what_is_left_without_the_groups_means():
    numpy = pytest.importorskip("numpy")
    noise = random.Random(4)
    groups, rewards, lengths = [], [], []
    for task in range(6):
        members = [(noise.random() + task, noise.randrange(1, 30) + 50 * task) for _ in range(5)]
        groups.append(group(str(task), *(("a" * length, reward) for reward, length in members)))
        means = numpy.mean(members, axis=0)
        rewards += [reward - means[0] for reward, _ in members]
        lengths += [length - means[1] for _, length in members]
    expected = numpy.corrcoef(rewards, lengths)[0, 1]
    assert rollout_figures(groups).to_json()["length_correlation"] == pytest.approx(expected)


def test_without_anything_to_compare_there_is_no_number():
    for groups in (
        [],
        [group("a", ("x", 1.0))],
        [group("a", ("x", None, None, "ServerError: gone"))],
    ):
        facts = rollout_figures(groups).to_json()
        assert (
            facts["repeated"] is None
            and facts["stuck_groups"] is None
            and facts["length_correlation"] is None
        )
    assert (
        rollout_figures([]).to_json()["truncated"] is None
        and rollout_figures([]).to_json()["ended_reward"] is None
        and rollout_figures([]).to_json()["max_length"] is None
    )


def test_texts_stand_in_where_a_server_gives_no_ids():
    samples = [
        Sample(task_id="t", sample=n, messages=[], text=text, reward=0.0, finish_reason="stop")
        for n, text in enumerate("aab")
    ]
    facts = rollout_figures([TaskResult(task_id="t", messages=[], samples=samples)]).to_json()
    assert facts["repeated"] == 1 / 3 and facts["mean_length"] == 1


def asked(*samples, task="t", **fields):
    """A group of samples as (prompt tokens, cached of these, completion tokens)."""
    made = [
        Sample(
            task_id=task,
            sample=k,
            messages=[],
            prompt_token_ids=[1] * prompt,
            prefix_cached=known,
            token_ids=[2] * new,
            **fields,
        )
        for k, (prompt, known, new) in enumerate(samples)
    ]
    return TaskResult(task_id=task, messages=[], samples=made)


def test_a_prompt_is_read_once_and_by_the_others_as_far_as_the_cache_does_not_know_it():
    group = asked((40, 32, 3), (40, 32, 5), (40, 32, 0), (40, 32, 7))
    assert sampled_reads([group]) == [(40, 0, 3), (40, 32, 5), (40, 32, 7)]
    assert sampled_reads([group], shared=True) == [(40, 0, 3), (40, 40, 5), (40, 40, 7)]
    one_by_one = asked((40, 0, 3), (40, 32, 5))
    assert sampled_reads([one_by_one], shared=True) == [(40, 0, 3), (40, 32, 5)]
    assert sampled_reads(
        [asked((9, 4, 2)), asked((9, None, 2)), asked((9, 4, 2), cached=True)]
    ) == [(9, 4, 2), (9, 0, 2)]


def test_a_continued_sample_reads_what_it_had():
    before, after = (
        asked((10, None, 4), (10, None, 0), (10, None, 6)),
        asked((10, 8, 9), (10, 0, 5), (10, None, 6)),
    )
    assert sampled_reads([after], [before]) == [(14, 8, 5), (10, 0, 5)]


def test_each_turn_reads_its_whole_prompt():
    turns = [
        Turn(messages=[], prompt_token_ids=[1] * 6, num_tokens=3),
        Turn(messages=[], prompt_token_ids=[1] * 4, num_tokens=2, continues=0, prefix_cached=8),
        Turn(messages=[], prompt_token_ids=[1] * 5, num_tokens=2, cached=True),
    ]
    group = asked((6, None, 7))
    group.samples[0].turns = turns
    assert sampled_reads([group]) == [(6, 0, 3), (13, 8, 2)]
