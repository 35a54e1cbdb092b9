"""Sample logs: readable, one file per sample whatever its task is called, and never in the way."""

import logging
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.records import Sample
from ttrl.rollouts.sample_logs import SampleLogs, file_name, sample_text


def make(**changes):
    fields = {"task_id": "letters-7", "sample": 2, "messages": [{"role": "user", "content": "How many?"}], "text": "3"}
    return Sample(**{**fields, **changes})


def test_a_whole_file(tmp_path):
    sample = make(
        messages=[
            {"role": "system", "content": "Be exact."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}},
                    {"type": "input_audio", "input_audio": {"data": "B" * 5000}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}],
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
    rule = {name: f"── {name} ".ljust(100, "─") for name in ("system", "user", "assistant", "tool c1", "answer (stop)")}
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
    text = sample_text(make(error="GraderError: it broke\nTraceback …\nValueError: x", finish_reason=None))
    assert "reward         none\n" in text and "finish reason  unknown\n" in text
    assert text.index("── error ─") < text.index("ValueError: x") < text.index("── user ─")
    text = sample_text(make(weights_version=3, token_ids=[1] * 5, token_versions=[2, 2, 3, 3, 3]))
    assert "2 (2 tokens), 3 (3 tokens)" in text


def test_what_no_file_or_terminal_takes(tmp_path):
    path = SampleLogs(tmp_path).write(make(task_id="a\nb", text="\ud83d half, \x1b[31mred, tab\tstays"))
    text = path.read_text(encoding="utf-8")
    assert "? half, \\x1b[31mred, tab\tstays" in text
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
        assert 0 < len(name.encode()) <= 100 and name[0] not in ".-" and "/" not in name and "\0" not in name


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
    assert caplog.text.count("sampling goes on without") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path, monkeypatch, caplog):
    logs = SampleLogs(tmp_path)
    path = logs.write(make(text="first"))

    def write(self, data):
        with open("/dev/full", "wb") as file:
            file.write(data)

    monkeypatch.setattr(type(path), "write_bytes", write)
    logs.write(make(text="second"))
    assert logs.num_failed == 1 and "No space left on device" in caplog.text
    assert "first" in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
