"""Prompts that are computed once for all their samples: the samples and their logprobs are those of
vLLM's own way.

Only vLLM's own attention shows that nothing else changes.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SHORT = [f"sort {word}" for word in ("cab", "zebra", "kayak", "quartz")]
# More than a block of 128 tokens.
LONG = [f"{number} " + "sort these letters please " * 7 for number in range(3)]


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


def ask(server, **arguments):
    [found] = server.request(
        "POST", "/collective_rpc", {"method": "shared_tokens", "kwargs": arguments}
    )["results"]
    return found


def sample(server, n=8):
    """[(token ids, logprobs)] of n seeded samples of every prompt, all asked for at the same time,
    and of their prompts.
    """

    def one(prompt):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": prompt}],
            "n": n,
            "max_tokens": 6,
            "temperature": 1.0,
        }
        body |= {
            "seed": 5,
            "logprobs": True,
            "return_token_ids": True,
            "ignore_eos": True,
            "prompt_logprobs": 0,
        }
        answer = server.request("POST", "/v1/chat/completions", body)
        prompts = [
            value["logprob"]
            for entry in answer["prompt_logprobs"]
            for value in (entry or {}).values()
        ]
        choices = [
            (c["token_ids"], [t["logprob"] for t in c["logprobs"]["content"]])
            for c in answer["choices"]
        ]
        return [*choices, (answer["prompt_token_ids"], prompts)]

    server.request("POST", "/reset_prefix_cache")
    with ThreadPoolExecutor(8) as pool:
        return [choice for choices in pool.map(one, SHORT + LONG) for choice in choices]


def assert_same(found, expected):
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, logprobs), (_, own) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(own, abs=2e-5)


def test_samples_and_logprobs_are_those_of_vllms_own_way(server):
    before = ask(server, share=False)  # another test may have had it switched on
    own = sample(server)
    assert ask(server) == before and not before["active"]
    assert len({tuple(ids) for ids, _ in own}) > 20
    start = before["saved"] or 0
    assert ask(server, share=True) == {"saved": start, "active": True}
    for _ in range(3):
        assert_same(sample(server), own)
    # Of a prompt of 11 tokens and 8 samples, 77 tokens need not be computed; not all arrive in one
    # step.
    assert ask(server)["active"] and ask(server)["saved"] - start > 300

    log = server.log_path.read_text(errors="replace")
    # Its end goes into mirrors.
    assert "prompts of several samples are computed once" in log and server.api_key not in log

    # New weights in place leave it as it is.
    folder = str(server.model_folder)
    server.request(
        "POST", "/collective_rpc", {"method": "ttrl_load_weights", "kwargs": {"folder": folder}}
    )
    assert_same(sample(server), own)
    saved = ask(server)["saved"]
    assert_same(sample(server), own)
    assert (
        ask(server) == {"saved": ask(server)["saved"], "active": True}
        and ask(server)["saved"] > saved
    )

    # A wrong sharing is found at the first step, or at a later one that is a power of two, which
    # vLLM's own result is taken from.
    for good_steps in (0, 7):
        assert ask(server, damage=good_steps)["active"]
        assert_same(sample(server), own)
        assert not ask(server)["active"]
    saved = ask(server)["saved"]
    assert_same(sample(server), own)
    assert ask(server)["saved"] == saved

    # An error in the middle of a later step: all of it is computed again.
    assert ask(server, fail=True)["active"]
    assert_same(sample(server), own)
    assert ask(server) == {"saved": saved, "active": False}
