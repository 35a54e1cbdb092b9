"""Partial rollouts on a real server: cut several times, the same tokens, text, finish reasons and
logprobs as without.

The model is tiny and random over single bytes, so that borders lie within characters, and special
tokens come in the middle. Only vLLM shows that what goes on after a cut is what it would have said.
"""

import asyncio
import copy
import random

import openai
import pytest

from ttrl import Task, get_task_results
from ttrl.rollouts.early_stop import InferenceEarlyStop
from ttrl.rollouts.partial import TokenBudget
from ttrl.rollouts.results import TaskResults

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(byte_server, byte_model):
    """With the weights that it started with."""
    if byte_server.policy_folder != byte_model or not byte_server.is_started:
        byte_server.restart(byte_model)
    return byte_server


def tasks(count=6, seed=0):
    rng = random.Random(seed)
    texts = [
        "".join(rng.choice("abc déß漢字 xyz") for _ in range(rng.randrange(3, 12)))
        for _ in range(count)
    ]
    return [
        Task(
            [{"role": "user", "content": text}],
            lambda choice: float(len(choice.message.content or "")),
        )
        for text in texts
    ]


def sample(server, given, params, **options):
    async def run():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await get_task_results(
                given, client, "policy", params=params, pbar=False, **options
            )

    return asyncio.run(run())


def in_parts(server, given, params, budget, **options):
    """Calls until nothing is unfinished: the samples in the order of `given`, and the number of
    calls.
    """
    left, calls, done = list(given), 0, {}
    unfinished = []
    while left:
        results = sample(
            server,
            left,
            params,
            token_budget=budget,
            unfinished=unfinished,
            weights_version=calls,
            **options,
        )
        calls += 1
        unfinished = [copy.deepcopy(result) for result in results.unfinished]
        waiting = []
        for task, result in zip(left, results, strict=True):
            if any(sample.finish_reason == "unfinished" for sample in result.samples):
                waiting.append(task)
            else:
                done[id(task)] = result
        left = waiting
        assert calls < 200
    return TaskResults([done[id(task)] for task in given]), calls


def assert_same(got, expected):
    assert len(got.samples) == len(expected.samples)
    for a, b in zip(got.samples, expected.samples, strict=True):
        assert a.error is None and b.error is None, (a.error, b.error)
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.prompt_token_ids == b.prompt_token_ids and a.reward == b.reward
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < 1e-3


# Where a client is slow, everything may have come before a budget for all of it cuts anything.
TRIES = 5
GREEDY = {"temperature": 0, "max_tokens": 40}
CASES = {
    "length": GREEDY,
    "end of turn": {"temperature": 0, "max_tokens": 150, "logit_bias": {"256": 0.2}},
    "special tokens inside": GREEDY | {"ignore_eos": True, "logit_bias": {"256": 0.5, "258": 0.5}},
    "specials shown": GREEDY
    | {"ignore_eos": True, "skip_special_tokens": False, "logit_bias": {"256": 0.5, "258": 0.5}},
    "repetition penalty": GREEDY | {"repetition_penalty": 1.3},
    "min_tokens": GREEDY | {"min_tokens": 25, "logit_bias": {"256": 0.3}},
    "stop token": GREEDY | {"stop_token_ids": [70, 71, 72, 200, 201, 202]},
}


# Each parameter that has to know what was said before the cut, each reason to end, and both
# budgets.
SHORT = {
    "per sample": ("special tokens inside", "repetition penalty", "min_tokens"),
    "in all": ("end of turn", "stop token"),
}
BUDGETS = {"per sample": TokenBudget(per_sample=7), "in all": 75}
CUT = [
    pytest.param(
        case,
        BUDGETS[name],
        id=f"{name}-{case}",
        marks=[] if case in SHORT[name] else pytest.mark.long,
    )
    for name in BUDGETS
    for case in CASES
]


@pytest.mark.parametrize(("case", "budget"), CUT)
def test_cut_several_times_it_is_what_it_would_have_been(server, case, budget):
    """Only a real server shows that it goes on as if it had not been cut.

    Long for the other pairs: only these show special tokens in the text, and each parameter under
    the other budget.
    """
    given = tasks()
    expected = sample(server, given, CASES[case])
    longest = max(len(s.token_ids) for s in expected.samples)
    assert longest > 7
    for _ in range(TRIES):
        got, calls = in_parts(server, given, CASES[case], budget)
        assert_same(got, expected)
        for s in got.samples:
            if s.token_versions:
                assert len(s.token_versions) == len(s.token_ids) and s.token_versions == sorted(
                    s.token_versions
                )
        was_cut = any(s.token_versions and len(set(s.token_versions)) >= 2 for s in got.samples)
        if isinstance(budget, TokenBudget):
            assert was_cut and calls >= -(-longest // 7)
        if was_cut:
            return
    raise AssertionError("no completion was cut")


@pytest.mark.parametrize(
    ("budget", "include"),
    [
        pytest.param(TokenBudget(per_sample=3), True, id="per sample-True"),
        pytest.param(60, False, id="in all-False"),
        pytest.param(
            TokenBudget(per_sample=3), False, id="per sample-False", marks=pytest.mark.long
        ),
        pytest.param(60, True, id="in all-True", marks=pytest.mark.long),
    ],
)
def test_stop_strings(server, include, budget):
    """Strings from the middle of what the model says, of several characters: most cuts go through
    them.

    Long for two pairs: only these try each budget with the other way of ending the text.
    """
    rng = random.Random(3)
    reasons = set()
    for number, task in enumerate(tasks(3)):
        (plain,) = sample(server, [task], GREEDY).samples
        at = rng.randrange(2, max(3, len(plain.text) - 4))
        stops = [
            plain.text[at : at + rng.randrange(2, 6)],
            "never said",
            plain.text[at + 1 : at + 4],
        ]
        params = GREEDY | {
            "stop": [s for s in stops if s][: 1 + number % 3],
            "include_stop_str_in_output": include,
        }
        expected = sample(server, [task], params)
        got, _ = in_parts(server, [task], params, budget)
        assert_same(got, expected)
        reasons |= {s.finish_reason for s in expected.samples}
    assert "stop" in reasons


@pytest.mark.long
@pytest.mark.parametrize("budget", [TokenBudget(per_sample=7), 75], ids=["per sample", "in all"])
def test_an_early_stop_counts_over_the_cuts(server, budget):
    """It ends each sample at the token at which it ends it uncut.

    Long: the property test in tests/rollouts/test_partial.py cuts streams; only this one stops a
    real server. On a busy machine vLLM sends several tokens at once, so a sample ends later.
    """
    given = tasks()
    plain = [one.logprobs for one in sample(server, given, GREEDY).samples]
    ends = {
        threshold: [InferenceEarlyStop(0.9, threshold).ends_at(one) for one in plain]
        for threshold in (-1.0, -1.5, -2.0, -2.5, -3.0, -3.5, -4.0, -4.5)
    }
    later = {
        threshold: sum(end is not None and end > 7 for end in found)
        for threshold, found in ends.items()
    }
    threshold = max(later, key=lambda one: later[one])
    assert later[threshold] > 0
    expected = sample(server, given, GREEDY, on_chunk=InferenceEarlyStop(0.9, threshold))
    lengths = [None if end is None else min(end, 40) for end in ends[threshold]]
    stopped = [
        len(one.token_ids) if one.finish_reason == "stopped_early" else None
        for one in expected.samples
    ]
    assert stopped == lengths
    got, _ = in_parts(server, given, GREEDY, budget, on_chunk=InferenceEarlyStop(0.9, threshold))
    assert_same(got, expected)


def test_groups_with_seeds_are_continued_whole(server):
    """Sampling: other cuts give other tokens, but the logprobs are the model's, and every sample
    ends.
    """
    params = {"temperature": 1.0, "max_tokens": 24, "seed": 5}
    given = tasks(2)
    for _ in range(TRIES):
        got, calls = in_parts(server, given, params, 40, n=4)
        if calls > 2:
            break
    assert calls > 2
    for group in got:
        assert len({tuple(s.token_ids) for s in group.samples}) == len(group.samples) == 4
    assert all(s.reward is not None for s in got.samples)
    again, _ = in_parts(server, given, params, TokenBudget(per_sample=8), n=4)
    once_more, _ = in_parts(server, given, params, TokenBudget(per_sample=8), n=4)
    # The same cuts, the same tokens; but batches round differently, so a draw just between two
    # tokens may fall otherwise: rarely.
    assert (
        sum(
            a.token_ids != b.token_ids
            for a, b in zip(again.samples, once_more.samples, strict=True)
        )
        <= 1
    )

    async def scored(s):
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            body = {
                "model": "policy",
                "prompt": [*s.prompt_token_ids, *s.token_ids],
                "max_tokens": 1,
            }
            return await client.completions.create(**body, extra_body={"prompt_logprobs": 0})

    for s in got.samples[::5]:
        rows = asyncio.run(scored(s)).choices[0].prompt_logprobs[len(s.prompt_token_ids) :]
        whole = [row[str(token)]["logprob"] for row, token in zip(rows, s.token_ids, strict=True)]
        assert max(abs(a - b) for a, b in zip(whole, s.logprobs, strict=True)) < 1e-3
