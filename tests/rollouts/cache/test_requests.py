"""The same call twice with a cache, counted at the server: nothing is asked for twice, nothing
comes from another policy.
"""

import asyncio

import pytest
from support import bad_server

from ttrl.rollouts.task_results import get_task_results
from ttrl.tasks import Task


def tasks(count=5):
    return [
        Task(
            [{"role": "user", "content": f"task {i}"}],
            lambda choice: float(len(choice.message.content)),
        )
        for i in range(count)
    ]


def content(results):
    return [
        (
            s.task_id,
            s.sample,
            s.text,
            s.token_ids,
            s.prompt_token_ids,
            s.logprobs,
            s.finish_reason,
            s.reward,
        )
        for s in results.samples
    ]


def in_turn(*calls, faults="", **settings):
    """Calls against one server, each (tasks, arguments): [(results, requests, choices delivered)]
    of each.
    """

    async def main():
        outcomes = []
        async with bad_server.serving(
            faults, retry_after=0.1, refused_for=0.05, **settings
        ) as server:
            for its_tasks, arguments in calls:
                requests, completions = server.requests, server.completions
                results = await get_task_results(
                    its_tasks, server.url, "m", pbar=False, **arguments
                )
                outcomes.append(
                    (results, server.requests - requests, server.completions - completions)
                )
        return outcomes

    return asyncio.run(main())


@pytest.fixture(params=["folder", "memory", "list"])
def cache(request, tmp_path):
    """Not seeded: only a cache can return the same answers again."""
    from ttrl.rollouts.cache.completions import Cache

    return {
        "folder": tmp_path / "c",
        "memory": Cache.of("memory://"),
        "list": [tmp_path / "a", tmp_path / "b"],
    }[request.param]


def test_the_same_call_twice(cache):
    same = {"n": 4, "cache": cache, "weights_digest": "w"}
    (
        (first, asked, made),
        (second, asked_again, _),
        (more, asked_more, made_more),
        (other, _, made_for_other),
        (fewer, none, _),
    ) = in_turn(
        (tasks(), same),
        (tasks(), same),
        (tasks(), {**same, "n": 7}),
        (tasks(), {**same, "weights_digest": "other weights"}),
        (tasks(), {**same, "n": 2}),
    )
    assert (asked, made) == (5, 20)
    assert asked_again == none == 0
    assert content(second) == content(first)
    assert (first.stats.num_cached, second.stats.num_cached, fewer.stats.num_cached) == (0, 20, 10)
    assert (
        second.stats.new_completion_tokens
        == 0
        < second.stats.completion_tokens
        == first.stats.completion_tokens
    )
    for result in first:
        assert len({s.text for s in result.samples}) == 4
    assert (asked_more, made_more) == (5, 15)  # the three new ones of each task, together
    for old, new in zip(first, more, strict=True):
        assert [s.text for s in new.samples[:4]] == [s.text for s in old.samples]
        assert [s.cached for s in new.samples] == [True] * 4 + [False] * 3
        assert len({s.text for s in new.samples}) == 7
    assert made_for_other == 20
    assert not {s.text for s in other.samples} & {s.text for s in first.samples}
    assert [[s.text for s in r.samples] for r in fewer] == [
        [s.text for s in r.samples[:2]] for r in first
    ]


def test_whatever_changes_the_answer_shares_nothing_and_what_does_not_shares_all(tmp_path):
    same = {
        "n": 2,
        "cache": tmp_path / "c",
        "weights_digest": "w",
        "params": {"temperature": 0.7, "max_tokens": 30},
    }
    changed = [
        {"params": {"temperature": 0.8, "max_tokens": 30}},
        {"params": {"temperature": 0.7, "max_tokens": 31}},
        {"params": {"temperature": 0.7, "max_tokens": 30, "top_p": 0.9}},
        {"params": {"temperature": 0.7, "max_tokens": 30, "top_k": 9}},
        {"params": {"temperature": 0.7, "max_tokens": 30, "seed": 1}},
        {"params": {"temperature": 0.7, "max_tokens": 30, "stop": ["\n"]}},
        {"weights_digest": "v"},
    ]
    unchanged = [
        {"params": {"max_tokens": 30, "temperature": 0.7}},
        {"params": {"max_tokens": 30, "temperature": 0.7, "top_p": None}},
        {"samples_per_request": 1},
        {"on_chunk": lambda chunk, completion: None},
        {"max_retries": 0, "concurrency": 1, "grader_timeout": 5.0, "weights_version": 3},
    ]
    calls = [(tasks(2), {**same, **change}) for change in [{}, *changed, *unchanged]]
    first, *rest = in_turn(*calls)
    assert [made for _, _, made in rest[: len(changed)]] == [4] * len(changed)
    assert [requests for _, requests, _ in rest[len(changed) :]] == [0] * len(unchanged)
    for results, _, _ in rest[len(changed) :]:
        assert content(results) == content(first[0])


def test_equal_tasks_of_one_call_do_not_share_samples(tmp_path):
    same = {"n": 2, "cache": tmp_path / "c", "weights_digest": "w"}
    twins = [*tasks(1), *tasks(1), *tasks(1)]
    (first, _, made), (again, requests, _) = in_turn((twins, same), (twins, same))
    assert (made, requests) == (6, 0)
    assert len({s.text for s in first.samples}) == 6
    assert content(again) == content(first)


def test_what_failed_is_asked_for_again_and_only_that(tmp_path):
    same = {
        "n": 3,
        "cache": tmp_path / "c",
        "weights_digest": "w",
        "params": {"seed": 5},
        "max_retries": 0,
        "max_downtime": 2.0,
    }
    faults = {0: "http_500", 1: "abort", 2: "http_404"}
    (first, _, _), (second, requests, made) = in_turn(
        (tasks(20), same),
        (tasks(20), same),
        faults=lambda ask: faults.get(ask.key[0] % 6) if ask.attempt == 1 and ask.n == 3 else None,
    )
    failed = first.stats.num_failed
    assert 0 < failed < 60
    assert second.stats.num_failed == 0
    assert (second.stats.num_cached, made) == (60 - failed, failed)
    assert requests <= failed


def test_a_store_that_cannot_be_written_costs_no_sample(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    same = {"n": 2, "cache": [tmp_path / "file" / "c", tmp_path / "good"], "weights_digest": "w"}
    (first, _, _), (second, requests, _) = in_turn((tasks(), same), (tasks(), same))
    assert first.stats.num_graded == second.stats.num_graded == 10
    assert requests == 0
