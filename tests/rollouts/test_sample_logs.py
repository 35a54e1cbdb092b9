"""Sample logs: readable, one file per sample whatever its task is called, and never in the way."""

import errno
import itertools
import json
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import os_calls

from ttrl.records import Sample
from ttrl.rollouts.client.assembly import LiveCompletion
from ttrl.rollouts.client.wire import decoded_chunk
from ttrl.rollouts.sample_logs import LiveAnswers, SampleLogs, file_name, sample_text
from ttrl.tasks.task import Task


def make(**changes):
    fields = {
        "task_id": "letters-7",
        "sample": 2,
        "messages": [{"role": "user", "content": "How many?"}],
        "text": "3",
    }
    return Sample(**{**fields, **changes})


def test_a_whole_file(tmp_path):
    sample = make(
        messages=[
            {"role": "system", "content": "Be exact."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64," + "A" * 5000},
                    },
                    {"type": "input_audio", "input_audio": {"data": "B" * 5000}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "look", "arguments": '{"x": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
        ],
        text="A cat.\n\nYes.",
        prompt_token_ids=[1] * 40,
        token_ids=[1, 2, 3],
        logprobs=[-0.5, -1.5, math.nan],
        finish_reason="stop",
        reward=0.5,
        metrics={"exact": 1.0, "length": 12.25},
        weights_version=3,
        cached=True,
    )
    path = SampleLogs(tmp_path / "logs").write(sample)
    assert path == tmp_path / "logs" / "letters-7_002.txt"
    rule = {
        name: f"── {name} ".ljust(100, "─")
        for name in ("system", "user", "assistant", "tool c1", "answer (stop)")
    }
    assert path.read_text(encoding="utf-8") == (
        "task               letters-7\n"
        "sample             2\n"
        "reward             0.5\n"
        "  exact            1\n"
        "  length           12.25\n"
        "finish reason      stop\n"
        "weights version    3\n"
        "prompt tokens      40\n"
        "completion tokens  3\n"
        "mean logprob       -1.0000 (1 unknown)\n"
        "from the cache     yes\n"
        f"\n{rule['system']}\nBe exact.\n"
        f"\n{rule['user']}\nWhat is this?\n"
        f"[image_url: data:image/png;base64,{'A' * 38}… (5022 characters)]\n"
        f'[{{"type": "input_audio", "input_audio": {{"data": "BBBBBBBBBBB… (5052 characters)]\n'
        f'\n{rule["assistant"]}\n[tool call c1] look({{"x": 1}})\n'
        f"\n{rule['tool c1']}\na cat\n"
        f"\n{rule['answer (stop)']}\nA cat.\n\nYes.\n"
    )


def test_failed_and_continued_samples():
    text = sample_text(
        make(error="GraderError: it broke\nTraceback …\nValueError: x", finish_reason=None)
    )
    assert "reward         none\n" in text and "finish reason  unknown\n" in text
    assert text.index("── error ─") < text.index("ValueError: x") < text.index("── user ─")
    text = sample_text(make(weights_version=3, token_ids=[1] * 5, token_versions=[2, 2, 3, 3, 3]))
    assert "2 (2 tokens), 3 (3 tokens)" in text


def test_what_no_file_or_terminal_takes(tmp_path):
    path = SampleLogs(tmp_path).write(
        make(task_id="a\nb", text="\ud83d half, \x1b[31mred, tab\tstays")
    )
    text = path.read_text(encoding="utf-8")
    assert "\\ud83d half, \\x1b[31mred, tab\tstays" in text
    assert text.startswith("task           a b\n")


ODD = [
    "a/b",
    "a_b",
    "a b",
    "A",
    "a",
    "ä",
    "..",
    ".",
    "",
    "/etc/passwd",
    "x" * 300,
    "x" * 301,
    "con\0",
    "é" * 300,
    "a.",
    "\ud83d",
    "-a",
]


def test_odd_ids_get_files_of_their_own(tmp_path):
    logs = SampleLogs(tmp_path)
    paths = [logs.write(make(task_id=task_id)) for task_id in ODD]
    assert logs.num_failed == 0
    assert len({str(path).lower() for path in paths}) == len(ODD)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    assert all(path.parent == tmp_path for path in paths)


@given(st.lists(st.text(max_size=40), unique=True, max_size=20))
def test_names_are_safe_and_different(ids):
    names = [file_name(task_id) for task_id in ids]
    assert len({name.lower() for name in names}) == len(ids)
    for name in names:
        assert (
            0 < len(name.encode()) <= 100
            and name[0] not in ".-"
            and "/" not in name
            and "\0" not in name
        )


def test_ordinary_ids_are_kept():
    for task_id in ("task-0123456789ab", "letters-7", "gsm8k_train_12", "v1.2"):
        assert file_name(task_id) == task_id


def test_the_newest_replaces_and_nothing_half_written_stays(tmp_path):
    logs = SampleLogs(tmp_path)
    logs.write(make(text="old"))
    path = logs.write(make(text="new"))
    assert "new" in path.read_text() and "old" not in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    logs = SampleLogs(tmp_path / "file" / "logs")
    with caplog.at_level(logging.WARNING):
        logs.write(make())
        logs.write(make())
    assert logs.num_failed == 2
    assert caplog.text.count("sampling continues without") == 1


def test_a_full_disk(tmp_path, caplog):
    logs = SampleLogs(tmp_path)
    path = logs.write(make(text="first"))
    with os_calls.refused("os.rename", errno.ENOSPC, path):
        logs.write(make(text="second"))
    assert logs.num_failed == 1 and "No space left on device" in caplog.text
    assert "first" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def says(index, **delta):
    return decoded_chunk(
        json.dumps({"id": "1", "choices": [{"index": index, "delta": delta}]}).encode(), "server"
    )


def often():
    """A clock on which each chunk comes seconds after the one before."""
    return itertools.count(step=10.0).__next__


def test_answers_are_in_their_files_while_they_come(tmp_path):
    """Two samples of one request, one of them thinking first; then the request is made again, and a
    late chunk comes.
    """
    logs, samples = SampleLogs(tmp_path / "logs"), [make(sample=k) for k in range(2)]
    asked = [{"role": "user", "content": "How many?"}]
    watch = LiveAnswers(logs, samples, [2, 3], asked, often())
    paths = [logs.path_of(sample, 2 + number) for number, sample in enumerate(samples)]
    completion = LiveCompletion(2, watch)
    completion.take(says(0, role="assistant"))
    head = (
        f"task    letters-7\nsample  0\nbeing sampled\n\n{'── user ':─<100}\nHow "
        f"many?\n\n{'── answer so far ':─<100}\n"
    )
    assert paths[0].read_text() == head and not paths[1].exists()
    for chunk in (
        says(0, content="Thr"),
        says(1, reasoning="Let me"),
        says(0, content="ee\x1b"),
        says(1, reasoning=" see"),
    ):
        completion.take(chunk)
    completion.take(says(1, content="4"))
    assert paths[0].read_text() == head + "Three\\x1b"
    assert paths[1].read_text() == head.replace("sample  0", "sample  1") + "Let me see\n\n4"
    again = LiveCompletion(2, watch)  # after a broken connection
    again.take(says(0, content="Two"))
    assert paths[0].read_text() == head + "Two"
    logs.write(samples[0], number=2)
    again.take(says(0, content=" or so"))
    assert "being sampled" not in paths[0].read_text() and "or so" not in paths[0].read_text()


def test_the_newest_request_of_a_sample_has_its_file(tmp_path):
    """A rollout may ask twice at the same time."""
    logs = SampleLogs(tmp_path)
    first, second = (
        LiveCompletion(1, LiveAnswers(logs, [make()], [0], [], often())) for _ in range(2)
    )
    for completion, text in (
        (first, "one "),
        (second, "two "),
        (first, "more"),
        (second, "and more"),
    ):
        completion.take(says(0, content=text))
    assert logs.path_of(make(), 0).read_text().endswith("\ntwo and more")


def test_files_are_written_about_once_a_second(tmp_path):
    clock = iter([0.0, 0.4, 0.9, 1.1])
    logs = SampleLogs(tmp_path)
    completion, seen = (
        LiveCompletion(1, LiveAnswers(logs, [make()], [0], [], clock.__next__)),
        [],
    )
    for letter in "abcd":
        completion.take(says(0, content=letter))
        seen.append(logs.path_of(make(), 0).read_text().rpartition("\n")[2])
    assert seen == ["a", "a", "a", "abcd"]


def test_live_answers_that_cannot_be_written_cost_no_sample(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    completion = LiveCompletion(
        1, LiveAnswers(SampleLogs(tmp_path / "file" / "logs"), [make()], [0], [])
    )
    with caplog.at_level(logging.WARNING):
        completion.take(says(0, content="a"))
    assert (
        completion.choices[0].message.content == "a"
        and caplog.text.count("sampling continues without") == 1
    )


@pytest.mark.parametrize("rollout", [None, lambda chat: chat()], ids=["samples", "rollout"])
def test_a_folder_for_samples_has_answers_streamed(kit, tmp_path, rollout):
    """Seen by a listener: the file of what is being sampled is there with the first chunk, and
    whole in the end.
    """
    seen = []

    def look(chunk, completion):
        seen.extend(path.read_text() for path in (tmp_path / "logs").iterdir())

    def behaviour(body, attempt):
        assert body["stream"]
        parts = [
            {**kit.choice(0, ""), "delta": {"content": text}, "finish_reason": None}
            for text in ("x", "y")
        ]
        for part, text in zip(parts, "xy", strict=True):
            part |= {
                "token_ids": [ord(text)],
                "logprobs": {"content": [{"token": text, "logprob": -0.5}]},
            }
        parts[1]["finish_reason"] = "stop"
        chunks = [
            {"id": "1", "model": "m", "choices": [part], "prompt_token_ids": kit.prompt_ids}
            for part in parts
        ]
        data = "".join(f"data: {json.dumps(one)}\n\n" for one in [*chunks]) + "data: [DONE]\n\n"
        return kit.Reply(data.encode(), headers={"content-type": "text/event-stream"})

    async def play(chat):
        return float((await rollout(chat)).message.content == "xy")

    grade = {"grader": lambda choice: 1.0} if rollout is None else {"rollout": play}
    task = Task([{"role": "user", "content": "q"}], id="t", **grade)
    results, server = kit.run(behaviour, [task], log_dir=tmp_path / "logs", on_chunk=look)
    assert (
        len(seen) == 2 and all("being sampled" in text for text in seen) and seen[0].endswith("\nx")
    )
    assert "being sampled" not in (tmp_path / "logs" / "t_000.txt").read_text()
    assert results[0].samples[0].reward == 1.0
    quiet, server = kit.run(behaviour, [task], log_dir=tmp_path / "more")
    assert server.requests[0]["stream_interval"] > 1 and quiet[0].samples[0].token_ids == [
        ord("x"),
        ord("y"),
    ]
    assert (tmp_path / "more" / "t_000.txt").read_text().startswith("task               t\n")


def test_messages_that_are_not_by_the_book_are_shown_as_they_are():
    messages = [
        {
            "role": "user",
            "content": ["plain", {"type": "image_url", "image_url": "http://a/b.png"}],
        },
        {"role": "assistant", "content": None, "tool_calls": ["look", {"id": "c", "x": 1}]},
    ]
    text = sample_text(make(messages=messages))
    assert "plain\n[image_url: http://a/b.png]" in text
    assert '[tool call "look"]' in text
    assert '[tool call {"id": "c", "x": 1}]' in text
