"""Stores that fail: nothing is raised, everything is counted, one line is said, and nobody waits
for a dead one.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer
from ttrl.system.object_store import Limits, Store

BODY = {"model": "m"}
KEYS = [sample_key(request_digest("x", BODY), k) for k in range(300)]
ANSWER = Answer(b'{"message": {"content": "hi"}}', "id", 1, "m", [1], 1, 0, 1)


def opened(*addresses: str | Path, pause: float = 30.0) -> Cache:
    """A cache that does not wait long."""
    limits = Limits(request=0.4, total=1.0, retries=0, pause=pause)
    return Cache(tuple(Store(address, limits=limits) for address in addresses))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)


class Bucket:
    """A socket that answers every request with one status, or with silence."""

    def __init__(self) -> None:
        self.status: int | Literal["silence"] = "silence"
        self.requests = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"s3://bucket/folder?endpoint=http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            if self.status == "silence":
                await asyncio.sleep(30)
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                ),
                0,
            )
            await reader.readexactly(length)
            writer.write(
                b'HTTP/1.1 %d X\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
                % self.status
            )
            await writer.drain()
        finally:
            writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self.answer(reader, writer))
            tasks.add(task)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

        server = await asyncio.start_server(accept, "127.0.0.1", self.port, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("x")
    cache = opened(tmp_path / "file" / "cache", "memory://" + str(uuid4()))

    async def use() -> None:
        await asyncio.gather(*(cache.put(key, ANSWER, BODY) for key in KEYS))
        assert all([await cache.get(key) == ANSWER for key in KEYS])

    asyncio.run(use())
    assert (cache.stats.hits, cache.stats.writes, cache.stats.misses) == (300, 300, 0)
    assert cache.stats.failed_writes == 600  # the puts, and the back-filling
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / "file" / "cache") in caplog.text and "cannot be written" in caplog.text


FULL = """
import asyncio, resource, sys, logging
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer
import random

cache = Cache.of(sys.argv[1])
keys = [sample_key(request_digest("x", {}), k) for k in range(10)]
asyncio.run(cache.put(keys[0], Answer(b"{}"), {}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
big = Answer(random.Random(0).randbytes(50_000))

async def use():
    await asyncio.gather(*(cache.put(key, big, {}) for key in keys[1:]))
    return [await cache.get(key) for key in keys]

got = asyncio.run(use())
assert got[0] == Answer(b"{}") and got[1:] == [None] * 9, got
assert cache.stats.writes == 1 and cache.stats.failed_writes == 9 and cache.stats.damaged == 0, cache.stats
"""


def test_files_that_cannot_be_written_to_their_end(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the write breaks off in its middle, and
    no half entry is left.
    """
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1
    assert len([path for path in tmp_path.rglob("*.entry") if path.is_file()]) == 1


def test_nobody_answers_at_the_address(caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(
        "s3://bucket/x?endpoint=http://127.0.0.1:9&secret_access_key=topsecret",
        f"memory://{uuid4()}",
    )

    async def use() -> None:
        await asyncio.gather(*(cache.put(key, ANSWER, BODY) for key in KEYS))
        assert await asyncio.gather(*(cache.get(key) for key in KEYS)) == [ANSWER] * 300

    asyncio.run(use())
    assert (cache.stats.hits, cache.stats.writes) == (300, 300)
    assert cache.stats.failed_reads == 300 and cache.stats.failed_writes == 600
    assert "topsecret" not in caplog.text and "Debug source" not in caplog.text
    assert caplog.text.count("cannot be") <= 2  # once for reading, once for writing


def test_a_silent_store_is_left_alone_after_its_first_failures() -> None:
    """300 reads wait for it together, not one after the other."""
    bucket = Bucket()

    async def use() -> Cache:
        async with bucket.serving():
            cache = opened(bucket.address)
            assert await asyncio.gather(*(cache.get(key) for key in KEYS)) == [None] * 300
            return cache

    cache = asyncio.run(use())
    assert (cache.stats.misses, cache.stats.failed_reads) == (300, 300)
    # As many as may be under way at once until the third has failed; the others were not tried.
    assert bucket.requests <= 66


def test_a_store_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket()
    bucket.status = 500

    async def use() -> None:
        async with bucket.serving():
            cache = opened(bucket.address, pause=1.5)
            for _ in range(3):
                await cache.get(KEYS[0])
            assert bucket.requests == 3
            bucket.status = 404
            assert await cache.get(KEYS[0]) is None
            assert (bucket.requests, cache.stats.failed_reads) == (3, 4)  # left alone for now
            await asyncio.sleep(1.6)
            for _ in range(5):
                assert await cache.get(KEYS[0]) is None
            assert (bucket.requests, cache.stats.failed_reads, cache.stats.misses) == (8, 4, 9)

    asyncio.run(use())
    assert len(caplog.records) == 1


@pytest.mark.parametrize("status", [301, 400, 401, 403, 409, 429, 500, 503])
def test_every_refusal_is_counted_and_not_raised(status: int) -> None:
    bucket = Bucket()
    bucket.status = status

    async def use() -> Cache:
        async with bucket.serving():
            cache = opened(bucket.address)
            assert await cache.get(KEYS[0]) is None
            await cache.put(KEYS[0], ANSWER, BODY)
            return cache

    stats = asyncio.run(use()).stats
    assert (stats.failed_reads, stats.failed_writes, stats.writes) == (1, 1, 0)


def test_a_store_without_conditional_writes_is_written_plainly() -> None:
    """501 to the first request, as some S3 look-alikes answer to If-None-Match; 200 to the
    second.
    """

    class OldBucket(Bucket):
        async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.status = 501 if self.requests == 0 else 200
            await super().answer(reader, writer)

    bucket = OldBucket()

    async def use() -> Cache:
        async with bucket.serving():
            cache = opened(bucket.address)
            await cache.put(KEYS[0], ANSWER, BODY)
            return cache

    cache = asyncio.run(use())
    assert (cache.stats.writes, cache.stats.failed_writes, bucket.requests) == (1, 0, 2)


def test_cancellation_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C while a store is silent ends at once, and is no failure of the store."""
    bucket = Bucket()

    async def use() -> Cache:
        async with bucket.serving():
            cache = opened(bucket.address)
            waiting = asyncio.ensure_future(cache.get(KEYS[0]))
            while bucket.requests == 0:
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return cache

    cache = asyncio.run(use())
    assert (cache.stats.failed_reads, cache.stats.misses) == (0, 0) and not caplog.records
