"""The cache over a real S3 server (moto's), through the same addresses and variables that a person
would use.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from ttrl import cli
from ttrl.rollouts.cache import maintenance as tools
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer
from ttrl.system.object_store import Store

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
DIGEST = request_digest({"weights": "w"}, BODY)
KEYS = [sample_key(DIGEST, k) for k in range(40)]


def answer(number: int) -> Answer:
    return Answer(
        b'{"message": {"content": "%d"}}' % number, f"id-{number}", 1, "m", [1, 2, 3], 3, 1, 5
    )


def opened(*addresses: str | Path) -> Cache:
    cache = Cache.of(addresses)
    assert cache is not None
    return cache


async def fill(cache: Cache) -> None:
    await asyncio.gather(*(cache.put(key, answer(k), BODY) for k, key in enumerate(KEYS)))


async def read(cache: Cache) -> list[Answer | None]:
    return await asyncio.gather(*(cache.get(key) for key in KEYS))


EXPECTED = [answer(k) for k in range(len(KEYS))]


def test_there_and_back(bucket: str) -> None:
    cache = opened(bucket)
    assert asyncio.run(read(cache)) == [None] * 40
    asyncio.run(fill(cache))
    assert asyncio.run(read(opened(bucket))) == EXPECTED
    assert (
        cache.stats.writes,
        cache.stats.misses,
        cache.stats.failed_reads,
        cache.stats.failed_writes,
    ) == (40, 40, 0, 0)


def test_endpoint_and_credentials_in_the_address(
    bucket: str, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    cache = opened(
        f"{bucket}?endpoint={s3_server}&access_key_id=AKIATEST&secret_access_key=topsecret&region=us-east-1"
    )
    asyncio.run(fill(cache))
    assert asyncio.run(read(cache)) == EXPECTED
    assert "topsecret" not in cache.describe() and "AKIATEST" not in cache.describe()


def test_a_folder_is_filled_from_the_bucket(bucket: str, tmp_path: Path) -> None:
    asyncio.run(fill(opened(bucket)))
    both = opened(tmp_path, bucket)
    assert asyncio.run(read(both)) == EXPECTED
    assert (both.stats.hits, both.stats.back_filled) == (40, 40)
    assert asyncio.run(read(opened(tmp_path))) == EXPECTED


def test_the_first_writer_wins_and_damage_is_overwritten(bucket: str) -> None:
    key = KEYS[0]
    asyncio.run(opened(bucket).put(key, answer(1), BODY))
    asyncio.run(opened(bucket).put(key, answer(2), BODY))
    cache = opened(bucket)
    assert asyncio.run(cache.get(key)) == answer(1)
    data = asyncio.run(Store(bucket).read(key))
    assert data is not None
    asyncio.run(Store(bucket).overwrite(key, data[: len(data) // 2]))
    assert asyncio.run(cache.get(key)) is None
    asyncio.run(cache.put(key, answer(3), BODY))
    assert asyncio.run(cache.get(key)) == answer(3)
    assert (cache.stats.damaged, cache.stats.writes) == (1, 1)


WRITER = """
import asyncio, sys
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer

cache, number, digest = Cache.of(sys.argv[1]), int(sys.argv[2]), request_digest("x", {})

async def one(k):
    await cache.put(sample_key(digest, k), Answer(b'{"writer": %d}' % number, created=number), {})
    return (await cache.get(sample_key(digest, k))).created

async def main():
    return await asyncio.gather(*(one(k) for k in range(30)))

seen = asyncio.run(main())
assert cache.stats.failed_reads == cache.stats.failed_writes == cache.stats.damaged == 0, cache.stats
print(cache.stats.writes, *seen)
"""


def test_processes_write_the_same_keys(bucket: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, bucket, str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(asyncio.run(names(bucket))) == 30
    # S3 decides who wins; moto's check and write are not one step, so two may believe that they
    # won, but all whole.
    assert all(set(output[1:]) <= {"0", "1", "2"} for output in outputs)
    assert sum(int(output[0]) for output in outputs) >= 30


async def names(address: str) -> list[str]:
    import obstore

    store = Store(address).open()
    assert store is not None
    return [item["path"] for page in obstore.list(store) for item in page]


def test_a_missing_bucket_and_wrong_credentials_cost_nothing(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened("s3://no-such-bucket-here/x", bucket)
    asyncio.run(fill(cache))
    assert asyncio.run(read(cache)) == EXPECTED
    assert cache.stats.writes == 40 and cache.stats.failed_writes == 80
    assert "topsecret" not in caplog.text and "no-such-bucket-here" in caplog.text


def test_the_tools(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(fill(opened(bucket)))
    asyncio.run(Store(bucket).overwrite(KEYS[3], b"ttrl-cache 1 half"))
    asyncio.run(Store(bucket).overwrite("v1/notes.txt", b"mine"))
    totals = tools.stats(bucket)
    assert (totals.entries, totals.requests, totals.unreadable["damaged"], totals.others) == (
        39,
        1,
        1,
        1,
    )
    assert tools.export(bucket, tmp_path / "all.jsonl") == 39
    assert cli.main(["cache", "prune", bucket, "--damaged"]) == 0
    assert cli.main(["cache", "prune", bucket, "--older-than", "1h"]) == 0
    assert cli.main(["cache", "prune", bucket, "--all"]) == 0
    removed = [
        line.split("removed ")[1].split()[0] for line in capsys.readouterr().out.splitlines()
    ]
    assert removed == ["1", "0", "39"]
    assert asyncio.run(names(bucket)) == ["v1/notes.txt"]
    assert cli.main(["cache", "stats", bucket]) == 2
