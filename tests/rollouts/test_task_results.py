"""Good and bad servers: every sample is graded once, or counted with its reason; results are in the
order of the tasks.
"""

import asyncio
import json
import logging
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttrl.errors import GraderError, ServerError, TaskError, UserError
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.results import TaskResults, TaskUsage
from ttrl.rollouts.task_results import get_task_results
from ttrl.tasks import Task


def task(text, grader=lambda choice: 1.0, **kwargs):
    return Task(messages=[{"role": "user", "content": text}], grader=grader, **kwargs)


def test_samples_carry_what_the_server_said(kit):
    def grader(choice):
        return len(choice.message.content), {"index": choice.index}

    tasks = [task("ab", grader, id="first"), task("c", grader, id="second")]
    results, server = kit.run(
        kit.echo,
        tasks,
        n=3,
        params={"temperature": 0.5, "max_tokens": 9, "top_k": 4},
        weights_version=5,
    )
    assert [r.task_id for r in results] == ["first", "second"]
    assert len(results.samples) == 6
    for result, text in zip(results, ("ab", "c"), strict=True):
        for k, sample in enumerate(result.samples):
            answer = f"{text}#{k}"
            assert (sample.sample, sample.text, sample.finish_reason, sample.error) == (
                k,
                answer,
                "stop",
                None,
            )
            # The end-of-turn token is there, with its logprob.
            assert sample.token_ids == [*map(ord, answer), 0]
            assert sample.logprobs == kit.expected_logprobs(answer)
            assert sample.prompt_token_ids == kit.prompt_ids
            assert sample.messages == [{"role": "user", "content": text}]
            assert (sample.reward, sample.metrics, sample.weights_version) == (
                len(answer),
                {"index": k},
                5,
            )
    request = server.requests[0]
    assert len(server.requests) == 2  # one per task, whatever n
    assert {
        key: request[key]
        for key in (
            "model",
            "n",
            "logprobs",
            "return_token_ids",
            "temperature",
            "max_tokens",
            "top_k",
        )
    } == {
        "model": "m",
        "n": 3,
        "logprobs": True,
        "return_token_ids": True,
        "temperature": 0.5,
        "max_tokens": 9,
        "top_k": 4,
    }
    assert not request["stream"]


def test_statistics(kit):
    def grader(choice):
        if choice.message.content == "bb#1":
            raise KeyError("missing")
        return choice.index, {"m": choice.index * 10}

    stats = kit.run(kit.echo, [task("a", grader), task("bb", grader)], n=2)[0].stats
    assert (stats.num_tasks, stats.num_samples, stats.num_graded, stats.num_failed) == (2, 4, 3, 1)
    assert stats.mean_reward == pytest.approx(1 / 3)  # rewards 0, 1, 0
    assert stats.metrics == {"m": pytest.approx(10 / 3)}
    assert stats.prompt_tokens == 6  # each prompt once
    # "a#0" and an end token; "bb#0" and an end token.
    assert stats.completion_tokens == 2 * 4 + 2 * 5
    assert stats.mean_completion_tokens == 4.5
    assert stats.finish_reasons == {"stop": 4}
    assert stats.exceptions == {"GraderError: the grader raised KeyError: 'missing'": 1}
    assert stats.seconds > 0
    assert stats.tokens_per_second == pytest.approx(18 / stats.seconds)
    json.dumps(stats.to_json(), allow_nan=False)


@pytest.mark.parametrize("content", [{1, 2}, float("nan")])
def test_content_that_is_no_text_is_refused_when_the_task_is_made(content):
    with pytest.raises(
        TaskError, match=f"task 't': message 0 holds content of type {type(content).__name__}"
    ):
        task(content, id="t")


def test_a_metric_that_only_some_samples_have_says_so(kit):
    def grader(choice):
        return 1.0, {"always": 1.0} | (
            {"sometimes": 0.5} if choice.message.content.startswith("a#") else {}
        )

    stats = kit.run(kit.echo, [task("a", grader), task("bb", grader)], n=2)[0].stats
    assert stats.metrics == {"always": 1.0, "sometimes": 0.5}
    assert stats.partial_metrics == {"sometimes": 2}
    assert "always 1.000, sometimes 0.500 (2 of 4 samples)" in stats.summary()


def test_the_time_of_graders_is_added_up_also_of_those_that_fail(kit):
    def slow(choice):
        time.sleep(0.05)
        return 1 / choice.index  # fails for the first

    stats = kit.run(kit.echo, [task("a", slow), task("b", slow)], n=3)[0].stats
    assert stats.num_failed == 2 and stats.grading_seconds >= 6 * 0.05


def test_order_is_that_of_the_tasks_and_not_of_the_answers(kit):
    delays = {str(i): random.Random(i).random() * 0.05 for i in range(40)}
    finished = []

    async def slow(body, attempt):
        await asyncio.sleep(delays[body["messages"][0]["content"]])
        return kit.echo(body)

    tasks = [task(str(i)) for i in range(40)]
    done = []
    results, _ = kit.run(
        slow,
        tasks,
        n=2,
        transform=lambda r: finished.append(r.task_id) or r.task_id,
        on_task_done=done.append,
    )
    assert [r.samples[0].text for r in results] == [f"{i}#0" for i in range(40)]
    assert results.transformed == [t.id for t in tasks]
    assert sorted(finished) == sorted(r.task_id for r in done) == sorted(t.id for t in tasks)
    assert finished != [t.id for t in tasks]  # they were transformed as they finished


FAULTS = [
    "good",
    "500",
    "reset",
    "400",
    "lengths",
    "no logprobs",
    "shuffled",
    "too few",
    "empty",
    "html",
    "grader",
    "nan",
]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=8),
    n=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_property_every_sample_is_graded_or_has_its_reason(kit, faults, n, seed):
    calls = []

    def behaviour(body, attempt):
        _, fault = body["messages"][0]["content"].split(" ", 1)
        reply = kit.echo(body)
        choices = reply.body["choices"]
        if fault == "500" and attempt == 1:
            return kit.error(500)
        if fault == "reset" and attempt == 1:
            return kit.Reply(reset=True)
        if fault == "400":
            return kit.error(400)
        if fault == "html" and attempt == 1:
            return kit.Reply(b"<html>", headers={"content-type": "text/html"})
        if fault == "lengths":
            choices[-1]["token_ids"].append(5)
        elif fault == "no logprobs":
            choices[0]["logprobs"] = None
        elif fault == "shuffled":
            random.Random(seed).shuffle(choices)
        elif fault == "too few" and attempt == 1:
            choices.pop()
        elif fault == "empty":
            choices[0]["message"]["content"] = None
        return reply

    def grader(choice):
        calls.append(choice.message.content)
        text = choice.message.content
        if "grader" in text and text.endswith("#0"):
            raise ValueError("no")
        if "nan" in text:
            return float("nan")
        return 0.5

    tasks = [task(f"{i} {fault}", grader) for i, fault in enumerate(faults)]
    results, server = kit.run(behaviour, tasks, n=n)
    assert [r.task_id for r in results] == [t.id for t in tasks]
    graded = {
        "400": 0, "nan": 0, "lengths": n - 1, "no logprobs": n - 1, "grader": n - 1,
    }  # fmt: skip
    for result, fault in zip(results, faults, strict=True):
        assert [s.sample for s in result.samples] == list(range(n))
        assert all((s.reward is None) == (s.error is not None) for s in result.samples)
        assert len(result.graded) == graded.get(fault, n), fault
        if fault == "shuffled":
            assert [s.text for s in result.samples] == [
                f"{result.messages[0]['content']}#{k}" for k in range(n)
            ]
    gradable = {"400": 0, "lengths": n - 1, "no logprobs": n - 1}
    # Each once, and what is broken never.
    assert len(calls) == sum(gradable.get(fault, n) for fault in faults)
    # The one that is asked for again is "#0" once more.
    calls = [text for text in calls if text and "too few" not in text]
    assert len(set(calls)) == len(calls)
    stats = results.stats
    assert stats.num_graded + stats.num_failed == stats.num_samples == n * len(faults)
    assert sum(stats.exceptions.values()) == stats.num_failed
    assert len(server.requests) == len(faults) + sum(
        fault in ("500", "reset", "html") or (fault == "too few") for fault in faults
    )


def test_graders_that_never_end_cost_their_samples_alone(kit):
    def grader(choice):
        return asyncio.sleep(3600) if choice.message.content.startswith("hang") else 0.5

    results, _ = kit.run(
        kit.echo,
        [task(text, grader) for text in ("hang 1", "good", "hang 2")],
        n=3,
        grader_timeout=2.0,
    )
    assert [len(result.graded) for result in results] == [0, 3, 0]
    assert list(results.stats.exceptions.values()) == [6]
    assert all(
        "took longer than 2 s" in sample.error
        for sample in (*results[0].samples, *results[2].samples)
    )


def test_length_mismatch_names_the_numbers_and_the_way_out(kit):
    def behaviour(body, attempt):
        reply = kit.echo(body)
        broken = reply.body["choices"][3]
        broken["token_ids"], broken["logprobs"]["content"] = (
            [1] * 41,
            broken["logprobs"]["content"][:1] * 40,
        )
        return reply

    results, _ = kit.run(behaviour, [task("x", id="gsm8k/17")], n=4)
    sample = results.samples[3]
    assert sample.error == (
        "TokenizationError: task 'gsm8k/17', sample 3: the server returned 41 token ids but 40 "
        "logprobs; "
        "request return_token_ids and logprobs together"
    )
    assert (sample.text, sample.reward, sample.logprobs) == ("x#3", None, None)
    assert [s.reward for s in results.samples[:3]] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b["choices"][0].pop("token_ids"), "returned no token_ids; use a vLLM server"),
        (lambda b: b.pop("prompt_token_ids"), "returned no prompt_token_ids"),
        (lambda b: b["choices"][0].update(logprobs=None), "returned 4 token ids but no logprobs"),
        (
            lambda b: b["choices"][0]["logprobs"].update(content=None),
            "returned 4 token ids but 0 logprobs",
        ),
        (lambda b: b["choices"][0].update(token_ids=["a"]), "returned no token_ids"),
        (lambda b: b["choices"][0].update(finish_reason="abort"), "finish_reason 'abort'"),
        (lambda b: b["choices"][0].update(finish_reason="error"), "finish_reason 'error'"),
        (lambda b: b["choices"][0].update(message=None), "a choice without a message"),
        (lambda b: b.update(choices=[]), "returned 0 choices, 1 was asked for"),
        (lambda b: b.update(choices=None), "has no choices"),
        (lambda b: b.pop("choices"), "has no choices"),
        (lambda b: b.update(choices=[None]), "returned 0 choices, 1 was asked for"),
    ],
)
def test_broken_answers_are_failed_samples(kit, change, words):
    def behaviour(body, attempt):
        reply = kit.echo(body)
        if body["messages"][0]["content"] == "x":
            change(reply.body)
        return reply

    results, server = kit.run(behaviour, [task("x"), task("y")])
    assert words in results[0].samples[0].error
    assert results[0].samples[0].reward is None
    assert results[1].rewards == [1.0]
    retried = words in (
        "finish_reason 'abort'",
        "finish_reason 'error'",
        "has no choices",
        "returned 0 choices, 1 was asked for",
    )  # an answer that cannot be read may come out better the next time
    assert len(server.requests) == (6 if retried else 2)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"<html>hello</html>", {"content-type": "text/html"}),
        (b'{"choices": [', {}),
        (b"[1, 2]", {}),
        (b"", {}),
        (b"null", {}),
    ],
)
def test_answers_that_are_no_chat_completion(kit, body, headers):
    def behaviour(request, attempt):
        return kit.Reply(body, headers=headers)

    results, _ = kit.run(behaviour, [task("x")], n=2)
    assert all(s.error.startswith("RequestError: http://127.0.0.1:") for s in results.samples), (
        results.samples[0].error
    )


def test_choices_out_of_order_or_wrongly_numbered(kit):
    def shuffled(body, attempt):
        reply = kit.echo(body)
        reply.body["choices"].reverse()
        return reply

    def all_zero(body, attempt):
        reply = kit.echo(body)
        for c in reply.body["choices"]:
            c["index"] = 0
        return reply

    def one_missing(body, attempt):
        reply = kit.echo(body)
        if body["n"] == 3:
            del reply.body["choices"][1]
        return reply

    def one_at_a_time(body, attempt):
        reply = kit.echo(body)
        del reply.body["choices"][1:]
        return reply

    def one_and_no_more(body, attempt):
        reply = kit.echo(body)
        del reply.body["choices"][1 if attempt == 1 else 0 :]
        return reply

    for behaviour in (shuffled, all_zero):
        assert [s.text for s in kit.run(behaviour, [task("x")], n=3)[0].samples] == [
            "x#0",
            "x#1",
            "x#2",
        ]
    results, server = kit.run(one_missing, [task("x")], n=3)
    # The missing one was asked for again.
    assert [s.text for s in results.samples] == ["x#0", "x#0", "x#2"]
    assert [request["n"] for request in server.requests] == [3, 1]
    results, server = kit.run(one_at_a_time, [task("x")], n=3)  # a server that knows no n
    assert [s.reward for s in results.samples] == [1.0] * 3
    assert [request["n"] for request in server.requests] == [3, 2, 1]
    results, server = kit.run(one_and_no_more, [task("x")], n=3)
    assert [s.reward for s in results.samples] == [1.0, None, None]
    assert all("returned 0 choices, 2 were asked for" in s.error for s in results.samples[1:])


def test_unknown_logprobs_become_nan_and_rows_stay_json(kit, tmp_path):
    from ttrl.records import Sample
    from ttrl.rollouts.task_results import TaskResults
    from ttrl.system.files import read_jsonl, write_jsonl

    def behaviour(body, attempt):
        reply = kit.echo(body)
        content = reply.body["choices"][0]["logprobs"]["content"]
        content[0]["logprob"], content[1]["logprob"], content[2]["logprob"] = -9999.0, 0.0, None
        reply.body["choices"][1]["message"]["content"] = "lone \ud83d surrogate"
        return reply

    results, _ = kit.run(behaviour, [task("x"), task("x"), task("y")], n=2)
    assert [
        kit.same(a, b)
        for a, b in zip(
            results.samples[0].logprobs, [float("nan"), 0.0, float("nan"), -0.5], strict=True
        )
    ]
    assert results.samples[0].reward == 1.0
    write_jsonl(tmp_path / "rollouts.jsonl", results.to_jsonl_rows())
    back = TaskResults.from_samples(
        Sample.from_json(row) for row in read_jsonl(tmp_path / "rollouts.jsonl")
    )
    assert back.to_jsonl_rows() == results.to_jsonl_rows()
    # Also the same task twice in a row.
    assert [r.task_id for r in back] == [r.task_id for r in results]
    assert [len(r.samples) for r in back] == [2, 2, 2]
    live, read = results.stats.to_json(), back.stats.to_json()
    for stats in (live, read):
        stats.pop("seconds"), stats.pop("tokens_per_second"), stats.pop("grading_seconds")
    assert live == read


def test_empty_content_can_be_graded(kit):
    def behaviour(body, attempt):
        return kit.completion([kit.choice(0, ""), kit.choice(1, None)])

    results, _ = kit.run(
        behaviour, [task("x", lambda choice: float(choice.message.content.strip() == ""))], n=2
    )
    assert results[0].rewards == [1.0, 1.0]
    assert results.samples[1].text == ""


@pytest.mark.parametrize("streamed", [False, True])
def test_content_in_parts_is_its_text(kit, streamed):
    """As LiteLLM passes answers on, and Mistral's server writes them."""

    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    def behaviour(body, attempt):
        if not streamed:
            thought = {"type": "thinking", "thinking": parts("Hm.")}
            message = {"role": "assistant", "content": [thought, *parts("Hel", "lo")]}
            return kit.completion(
                [kit.choice(0, "Hello", message=message | {"reasoning": parts("I ", "say")})]
            )
        events = [{"delta": {"role": "assistant", "content": [], "reasoning": parts("I say")}}]
        events += [{"delta": {"content": parts("H", "el")}}, {"delta": {"content": "lo"}}]
        events += [{"delta": {"content": parts("")}, "finish_reason": "stop"}]
        lines = [json.dumps({"id": "c", "choices": [{"index": 0, **event}]}) for event in events]
        data = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return kit.Reply(data.encode(), headers={"content-type": "text/event-stream"})

    def grader(choice):
        return float((choice.message.content, choice.message.reasoning) == ("Hello", "I say"))

    seen = []
    watch = {
        "on_chunk": lambda chunk, completion: seen.append(completion.choices[0].message.content)
    }
    params = {"logprobs": False}
    options = {"token_ids": False, "params": params, **(watch if streamed else {})}
    results, _ = kit.run(behaviour, [task("x", grader)], n=1, **options)
    assert (results.samples[0].text, results.samples[0].error) == ("Hello", None)
    assert results[0].rewards == [1.0]
    assert seen == (["", "Hel", "Hello", "Hello"] if streamed else [])


def test_other_providers_without_ids(kit):
    def behaviour(body, attempt):
        assert "return_token_ids" not in body
        reply = kit.echo(body)
        del reply.body["prompt_token_ids"]
        for c in reply.body["choices"]:
            del c["token_ids"]
        reply.body["choices"][1]["logprobs"] = None
        return reply

    results, _ = kit.run(behaviour, [task("x")], n=2, token_ids=False)
    assert results[0].rewards == [1.0, 1.0]
    assert results.samples[0].logprobs == kit.expected_logprobs("x#0")
    assert (results.samples[0].token_ids, results.samples[1].logprobs) == (None, None)
    assert results.stats.completion_tokens == 8  # as the server counted


def test_logprobs_can_be_left_out(kit):
    def behaviour(body, attempt):
        assert body["logprobs"] is False
        reply = kit.echo(body)
        reply.body["choices"][0]["logprobs"] = None
        return reply

    sample = kit.run(behaviour, [task("x")], params={"logprobs": False})[0].samples[0]
    assert (sample.reward, sample.logprobs, sample.token_ids) == (1.0, None, [*map(ord, "x#0"), 0])


def test_transforms_and_callbacks_that_fail_are_kept_and_counted(kit, caplog):
    def transform(result):
        if result.messages[0]["content"] != "b":
            raise LookupError("not there")
        return "fine"

    async def async_transform(result):
        await asyncio.sleep(0)
        return transform(result)

    def on_task_done(result):
        raise OSError("callback")

    for function in (transform, async_transform):
        caplog.clear()
        results, _ = kit.run(
            kit.echo,
            [task("a"), task("b"), task("c")],
            transform=function,
            on_task_done=on_task_done,
        )
        assert isinstance(results.transformed[0], LookupError)
        assert results.transformed[1] == "fine"
        assert results.stats.num_graded == 3
        assert results.stats.exceptions == {
            "on_task_done: OSError: callback": 3,
            "transform: LookupError: not there": 2,
        }
        with_traceback = [record for record in caplog.records if record.exc_info]
        assert len(with_traceback) == 2  # each reason once
    assert kit.run(kit.echo, [task("a")])[0].transformed is None


def test_concurrency_is_bounded_by_number_and_by_semaphore(kit):
    everybody = asyncio.Barrier(12)

    async def behaviour(body, attempt):
        await asyncio.sleep(0.01)
        return kit.echo(body)

    async def all_together(body, attempt):
        await everybody.wait()
        return kit.echo(body)

    tasks = [task(str(i)) for i in range(12)]
    for concurrency in (3, asyncio.Semaphore(3)):
        results, server = kit.run(behaviour, tasks, concurrency=concurrency)
        assert results.stats.num_graded == 12
        assert server.most_in_flight == 3
    assert kit.run(all_together, tasks)[1].most_in_flight == 12


def test_raise_if_all_failed(kit):
    def down(body, attempt):
        return kit.error(404, "The model `m` does not exist.")

    results, _ = kit.run(down, [task("a"), task("b")], n=2)
    with pytest.raises(
        ServerError,
        match=r"all 4 samples of 2 tasks failed, 4 .*HTTP 404: The model `m` does not exist",
    ):
        results.raise_if_all_failed()

    def broken(choice):
        raise ZeroDivisionError("mine")

    results, _ = kit.run(kit.echo, [task("a", broken), task("b", broken)])
    with pytest.raises(
        GraderError, match=r"(?s)all 2 samples .*ZeroDivisionError: mine.*in broken"
    ):
        results.raise_if_all_failed()
    kit.run(kit.echo, [task("a", broken), task("b")])[0].raise_if_all_failed()  # one is enough


@pytest.mark.parametrize(
    ("tasks", "kwargs", "kind", "words"),
    [
        ([], {}, TaskError, "tasks is empty"),
        (["x"], {}, TaskError, r"tasks\[0\] is a str"),
        (task("x"), {}, TaskError, "tasks is a Task"),
        (None, {}, TaskError, "tasks is a NoneType"),
        ([task("\ud83d")], {}, TaskError, "JSON"),
        ([task("x")], {"n": 0}, UserError, "n is 0"),
        ([task("x")], {"n": True}, UserError, "n is True"),
        (
            [task("x")],
            {"samples_per_request": 0},
            UserError,
            "samples_per_request is 0; give a number of at least 1",
        ),
        ([task("x")], {"n": 1.5}, UserError, "n is 1.5"),
        ([task("x")], {"params": [1]}, UserError, "params is"),
        ([task("x")], {"params": {"temprature": 1}}, UserError, "did you mean 'temperature'"),
        ([task("x")], {"params": {"n": 3}}, UserError, "get_task_results"),
        ([task("x")], {"params": {"stream": True}}, UserError, "set on_chunk to stream"),
        ([task("x")], {"params": {"temperature": -1}}, UserError, "temperature"),
        ([task("x")], {"params": {"temperature": float("nan")}}, UserError, "temperature"),
        ([task("x")], {"params": {"top_p": 1.5}}, UserError, "top_p"),
        ([task("x")], {"params": {"max_tokens": 0}}, UserError, "max_tokens"),
        ([task("x")], {"params": {"extra_body": 3}}, UserError, "extra_body"),
        ([task("x")], {"concurrency": 0}, UserError, "concurrency is 0"),
        ([task("x")], {"grader_timeout": 0}, UserError, "grader_timeout is 0"),
        ([task("x")], {"grader_timeout": float("nan")}, UserError, "grader_timeout"),
        ([task("x")], {"max_retries": -1}, UserError, "max_retries is -1"),
        ([task("x")], {"transform": 3}, UserError, "transform is 3"),
    ],
)
def test_bad_arguments_are_refused_before_any_request(kit, tasks, kwargs, kind, words):
    async def main():
        async with kit.serving(kit.echo) as server, server.client() as client:
            with pytest.raises(kind, match=words):
                await get_task_results(tasks, client, "m", **kwargs)
            assert server.requests == []

    asyncio.run(main())


def test_no_client_is_refused():
    with pytest.raises(UserError, match="client is an empty list; give at least one AsyncOpenAI"):
        asyncio.run(get_task_results([task("x")], [], "m"))


def test_a_sync_client_is_refused():
    import openai

    with pytest.raises(UserError, match="AsyncOpenAI"):
        asyncio.run(
            get_task_results(
                [task("x")], openai.OpenAI(api_key="k", base_url="http://127.0.0.1:9/v1"), "m"
            )
        )


def test_one_summary_line_and_one_for_failures(kit, caplog):
    caplog.set_level(logging.INFO, "ttrl")

    def grader(choice):
        return 1.0 if choice.index else "one"

    kit.run(kit.echo, [task("a", grader), task("b", grader)], n=2, pbar_desc="iteration 3")
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("ttrl")]
    assert [level for level, _ in lines] == ["INFO", "WARNING"]
    assert lines[0][1].startswith("iteration 3: 4 samples of 2 tasks")
    assert "mean reward 1.000" in lines[0][1] and "2 failed" in lines[0][1]
    assert "2 × GraderError: the grader returned 'one'" in lines[1][1]


def test_slices_and_lengths(kit):
    results, _ = kit.run(kit.echo, [task("a"), task("b"), task("c")])
    assert len(results) == 3
    assert [r.messages[0]["content"] for r in results[1:]] == ["b", "c"]
    assert results[-1].samples[0].text == "c#0"
    assert "3 samples of 3 tasks" in repr(results)


def test_the_prompt_is_counted_where_the_completions_come_from_the_cache(kit):
    def ask():
        results, server = kit.run(
            kit.echo,
            [task("p"), task("q")],
            n=2,
            cache="memory://prompt-counted",
            weights_digest="w",
        )
        return results.stats, len(server.requests)

    (first, _), (second, requests) = ask(), ask()
    assert (requests, second.num_cached, second.new_prompt_tokens) == (0, 4, 0)
    assert first.prompt_tokens == second.prompt_tokens == 2 * len(kit.prompt_ids)


def test_the_mean_length_leaves_out_what_failed_before_its_end():
    def sample(number, **changes):
        return Sample(task_id="t", sample=number, messages=[], **changes)

    done = sample(0, token_ids=[1] * 10, finish_reason="stop", reward=1.0)
    failed = sample(1, token_ids=[1] * 100, error="RequestError: a continuation that failed")
    cut = sample(2, token_ids=[1] * 1000, finish_reason="unfinished")
    result = TaskResult(task_id="t", messages=[], samples=[done, failed, cut])
    stats = TaskResults([result], usage=[TaskUsage(completion=1110)]).stats
    assert (stats.mean_completion_tokens, stats.completion_tokens) == (10.0, 1110)
    assert (stats.num_graded, stats.num_failed, stats.num_unfinished) == (1, 1, 1)


def test_unfinished_groups_are_checked_against_the_tasks_before_any_request(kit):
    def begun(of):
        sample = Sample(task_id=of.id, sample=0, messages=of.messages, finish_reason="unfinished")
        return TaskResult(task_id=of.id, messages=of.messages, samples=[sample])

    asked = []

    def behaviour(body, attempt):
        asked.append(body)
        return kit.echo(body)

    tasks = [task(f"{k}", id=f"{k}") for k in range(200)]
    groups = [begun(one) for one in tasks]
    with pytest.raises(UserError, match="unfinished holds 200 groups, but there are 199 tasks"):
        kit.run(behaviour, tasks[:-1], unfinished=groups)
    with pytest.raises(UserError, match=r"unfinished\[150\] is of task '0'"):
        kit.run(behaviour, tasks, unfinished=[*groups[:150], groups[0], *groups[151:]])
    assert not asked


def test_a_timeout_around_the_call_is_a_timeout_and_the_finished_tasks_are_there(kit):
    async def behaviour(body, attempt):
        if body["messages"][0]["content"] == "slow":
            await asyncio.sleep(60)
        return kit.echo(body)

    async def main():
        done = asyncio.Event()
        async with kit.serving(behaviour) as server, server.client() as client:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(3600) as limit:

                    def soon(result):
                        if not done.is_set():
                            done.set()
                            limit.reschedule(asyncio.get_running_loop().time() + 0.2)

                    await get_task_results(
                        [task("slow"), task("quick")], client, "m", pbar=False, on_task_done=soon
                    )
        assert [r.samples[0].text for r in caught.value.__cause__.results] == ["quick#0"]

    asyncio.run(main())


def test_groups_to_continue_have_the_n_of_the_call(kit):
    first = kit.run(kit.echo, [task("x")], n=2)[0]
    with pytest.raises(UserError, match="has 2 samples, but n is 4"):
        kit.run(kit.echo, [task("x")], n=4, params={"max_tokens": 4}, unfinished=list(first))
