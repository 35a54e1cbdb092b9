"""`ttrl cache stats|export|prune`, as a person uses them: on folders, with damaged entries and with
files of other people.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ttrl import cli
from ttrl.errors import UserError
from ttrl.rollouts.cache import maintenance as tools
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer


def body(number: int) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"question {number} é"}],
        "temperature": 0.5,
    }


def key(number: int, sample: int) -> str:
    return sample_key(request_digest("x", body(number)), sample)


def fill(folder: Path, requests: int = 3, samples: int = 4) -> Path:
    """`requests` requests of `samples` samples of 2 tokens each."""
    cache = Cache.of(folder)
    assert cache is not None

    async def put() -> None:
        for number in range(requests):
            for sample in range(samples):
                choice = {
                    "message": {"role": "assistant", "content": f"answer {number}.{sample} \ud800"},
                    "finish_reason": "stop",
                    "token_ids": [number, sample],
                    "logprobs": {
                        "content": [
                            {"token": "a", "logprob": -0.5},
                            {"token": "b", "logprob": -0.25},
                        ]
                    },
                }
                answer = Answer(
                    json.dumps(choice).encode(), "id", 1, f"model-{number % 2}", [1, 2, 3], 3, 0, 2
                )
                await cache.put(key(number, sample), answer, body(number))

    asyncio.run(put())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 entries, of which one is damaged, one foreign, one misplaced and one of a later ttrl; and
    3 files of other people.
    """
    folder = fill(tmp_path / "cache")
    data = (folder / key(0, 0)).read_bytes()
    (folder / key(0, 1)).write_bytes(data[:-5])
    (folder / key(0, 2)).write_bytes(b"hello")
    (folder / key(0, 3)).write_bytes(data)
    (folder / key(1, 0)).write_bytes(data.replace(b"ttrl-cache 1", b"ttrl-cache 2"))
    for other in ("notes.txt", "v1/README", key(0, 0) + ".bak"):
        (folder / other).write_text("mine")
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run(*arguments: object) -> int:
    return cli.main(["cache", *map(str, arguments)])


def test_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    totals = tools.stats(folder)
    assert (totals.entries, totals.requests, totals.tokens, totals.others) == (8, 3, 16, 2)
    assert totals.unreadable == {"damaged": 1, "foreign": 1, "misplaced": 1, "newer": 1}
    assert totals.models == {"model-0": 5, "model-1": 3}
    assert (
        totals.oldest is not None and totals.newest is not None and totals.oldest <= totals.newest
    )
    assert totals.bytes == sum(
        (folder / name).stat().st_size for name in files(folder) if name.endswith(".entry")
    )

    assert run("stats", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index(line.split("  ", 1)[1].strip()) for line in lines}) == 1  # aligned
    assert any(line.split() == ["entries", "8"] for line in lines)


def test_export(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", folder, tmp_path / "out" / "all.jsonl") == 0
    assert "8 samples" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "all.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    row = next(row for row in rows if row["digest"] in key(2, 0) and row["sample"] == 1)
    assert row["request"] == body(2)
    assert (row["text"], row["token_ids"], row["logprobs"]) == (
        "answer 2.1 \ud800",
        [2, 1],
        [-0.5, -0.25],
    )
    assert (
        row["model"],
        row["finish_reason"],
        row["prompt_token_ids"],
        row["completion_tokens"],
    ) == (
        "model-0",
        "stop",
        [1, 2, 3],
        2,
    )


def test_export_of_choices_of_any_shape(tmp_path: Path) -> None:
    """Without logprobs, without a message, and what is no JSON at all."""
    cache = Cache.of(tmp_path / "cache")
    assert cache is not None
    for sample, choice in enumerate(
        [b'{"message": {"content": "x"}, "logprobs": null}', b'{"message": null}', b"[1]", b"\xff{"]
    ):
        asyncio.run(cache.put(key(0, sample), Answer(choice), body(0)))
    assert tools.export(tmp_path / "cache", tmp_path / "out.jsonl") == 4
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(texts, key=str) == [None, None, None, "x"]


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        tools.export(tmp_path / "empty", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "old" and files(tmp_path) == {"out.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        (["--damaged"], [(0, 1), (0, 2), (0, 3)]),
        (["--older-than", "30d"], [(2, 0), (2, 1)]),
        (["--older-than", "100w"], []),
        (["--all"], [(number, sample) for number in range(3) for sample in range(4)]),
    ],
)
def test_prune_removes_what_was_asked_and_nothing_else(
    folder: Path,
    arguments: list[str],
    gone: list[tuple[int, int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for sample in (0, 1):
        os.utime(folder / key(2, sample), (time.time() - 31 * 86400,) * 2)
    before = files(folder)
    assert run("prune", folder, *arguments, "--dry-run") == 0
    assert files(folder) == before
    dry = capsys.readouterr().out
    assert run("prune", folder, *arguments) == 0
    wet = capsys.readouterr().out
    assert before - files(folder) == {key(*which) for which in gone}
    noun = f"{len(gone)} entr"
    assert (
        f"would remove {noun}" in dry
        and f"removed {noun}" in wet
        and f"{12 - len(gone)} kept" in wet
    )
    assert {"notes.txt", "v1/README", key(0, 0) + ".bak"} <= files(folder)


def test_prune_of_many_entries_leaves_no_empty_folders(tmp_path: Path) -> None:
    """More than are listed at once, removed while they are being listed."""
    fill(tmp_path / "cache", requests=700, samples=2)
    assert tools.stats(tmp_path / "cache").requests == 700
    pruned = tools.prune(tmp_path / "cache")
    assert (pruned.entries, pruned.kept) == (1400, 0)
    assert files(tmp_path / "cache") == set() and list((tmp_path / "cache" / "v1").rglob("*")) == []


@pytest.mark.parametrize(
    "work",
    [tools.stats, tools.prune, lambda address: tools.export(address, "/nowhere/x.jsonl")],
    ids=["stats", "prune", "export"],
)
def test_empty_and_missing_stores(work: Callable[[Any], object], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    with pytest.raises(UserError, match="no cache: the folder"):
        work(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
    if "lambda" not in str(work):
        with pytest.raises(UserError, match="holds no cache entry"):
            work(tmp_path / "notes")
        with pytest.raises(UserError, match="exists only in the process"):
            work("memory://nobody-fills-this")
        with pytest.raises(UserError, match="a cache cannot be at"):
            work("ftp://host/x")


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", "/no/such/folder"],
        [
            "stats",
            "s3://bucket/x?endpoint=http://127.0.0.1:9&access_key_id=a&secret_access_key=topsecret",
        ],
        ["prune", "/no/such/folder", "--all"],
        ["prune", "/no/such/folder", "--older-than", "soon"],
        ["prune", "/no/such/folder", "--older-than=-3d"],
        ["export", "", "x.jsonl"],
    ],
)
def test_mistakes_are_a_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("ttrl: error:") and "Traceback" not in error and "topsecret" not in error
    )


@pytest.mark.parametrize(
    "arguments", [["prune", "x"], ["prune", "x", "--all", "--damaged"], ["stats"], []]
)
def test_prune_wants_to_know_what(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


def test_tools_work_where_a_loop_is_running(folder: Path) -> None:
    async def notebook() -> int:
        return tools.stats(folder).entries

    assert asyncio.run(notebook()) == 8


def test_prune_checks_what_it_is_given(folder: Path) -> None:
    with pytest.raises(UserError):
        tools.prune(folder, older_than=timedelta(days=1), damaged_only=True)
    with pytest.raises(UserError):
        tools.prune(folder, older_than=timedelta(days=-1))
