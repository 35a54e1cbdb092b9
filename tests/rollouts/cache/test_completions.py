"""The cache over memory and folders: order of stores, back-filling, damage, races, event loops,
addresses.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.errors import UserError
from ttrl.rollouts.cache.completions import Cache, CacheStats, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer
from ttrl.system.object_store import Store, redact

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
DIGEST = request_digest({"weights": "w"}, BODY)
KEY = sample_key(DIGEST, 0)


def answer(number: int = 0) -> Answer:
    return Answer(
        b'{"message": {"content": "%d"}}' % number, f"id-{number}", 17, "m", [1, 2, 3], 3, 1, 5
    )


def opened(address: Any) -> Cache:
    cache = Cache.of(address)
    assert cache is not None
    return cache


@pytest.fixture(params=["memory", "folder", "file URL", "two layers"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    memory = f"memory://{uuid4()}"
    folder = tmp_path / "some cache"
    return {
        "memory": memory,
        "folder": folder,
        "file URL": folder.as_uri(),
        "two layers": [memory, str(folder)],
    }[request.param]


def test_what_is_put_is_got_also_by_another_cache_and_in_another_loop(address: Any) -> None:
    cache = opened(address)
    keys = [sample_key(DIGEST, k) for k in range(200)]

    async def fill() -> None:
        assert await cache.get(KEY) is None
        await asyncio.gather(*(cache.put(key, answer(k), BODY) for k, key in enumerate(keys)))

    async def read(which: Cache) -> list[Answer | None]:
        return await asyncio.gather(*(which.get(key) for key in keys))

    asyncio.run(fill())
    expected = [answer(k) for k in range(200)]
    assert asyncio.run(read(cache)) == expected
    assert asyncio.run(read(opened(address))) == expected
    assert cache.stats == CacheStats(hits=200, misses=1, writes=200 * len(cache.stores))


texts = st.text(max_size=20)
counts = st.none() | st.integers(0, 2**40)


@settings(max_examples=30)
@given(
    st.binary(max_size=2000),
    texts,
    st.none() | st.lists(st.integers(0, 200_000), max_size=50),
    counts,
    texts,
)
def test_any_answer_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    choice: bytes,
    name: str,
    ids: list[int] | None,
    count: int | None,
    prompt: str,
) -> None:
    put = Answer(choice, name, 1, name, ids, count, count, count)
    body = {"messages": [{"content": prompt}]}
    for cache in (opened(f"memory://{uuid4()}"), opened(tmp_path_factory.mktemp("cache"))):

        async def there_and_back(cache: Cache = cache) -> Answer | None:
            await cache.put(KEY, put, body)
            return await cache.get(KEY)

        assert asyncio.run(there_and_back()) == put


def test_later_stores_fill_earlier_ones(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    asyncio.run(opened(far).put(KEY, answer(), BODY))
    both = opened([near, far])
    assert asyncio.run(both.get(KEY)) == answer()
    assert (both.stats.hits, both.stats.misses, both.stats.back_filled) == (1, 0, 1)
    assert (near / KEY).read_bytes() == (far / KEY).read_bytes()
    assert asyncio.run(opened(near).get(KEY)) == answer()
    assert asyncio.run(both.get(KEY)) == answer()
    assert both.stats.back_filled == 1


def test_a_damaged_copy_is_mended_from_a_later_store(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    both = opened([near, far])
    asyncio.run(both.put(KEY, answer(), BODY))
    (near / KEY).write_bytes(b"ttrl-cache 1 half")
    assert asyncio.run(both.get(KEY)) == answer()
    assert (both.stats.hits, both.stats.damaged, both.stats.back_filled) == (1, 1, 1)
    assert (near / KEY).read_bytes() == (far / KEY).read_bytes()


def test_the_first_writer_wins(address: Any) -> None:
    one, two = opened(address), opened(address)
    asyncio.run(one.put(KEY, answer(1), BODY))
    asyncio.run(two.put(KEY, answer(2), BODY))
    assert asyncio.run(two.get(KEY)) == answer(1)
    assert (two.stats.writes, two.stats.failed_writes) == (0, 0)


def copied_from_another_key(data: bytes, folder: Path) -> bytes:
    other = sample_key(DIGEST, 9)
    asyncio.run(opened(folder).put(other, answer(9), BODY))
    return (folder / other).read_bytes()


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("empty", lambda data, folder: b""),
        ("half", lambda data, folder: data[: len(data) // 2]),
        ("one bit", lambda data, folder: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]),
        ("foreign", lambda data, folder: b'{"choices": []}'),
        ("other key", copied_from_another_key),
    ],
)
def test_damage_is_a_miss_is_said_once_and_is_overwritten(
    kind: str,
    damage: Callable[[bytes, Path], bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = opened(tmp_path)
    asyncio.run(cache.put(KEY, answer(1), BODY))
    (tmp_path / KEY).write_bytes(damage((tmp_path / KEY).read_bytes(), tmp_path))
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(cache.get(KEY)) is None
        assert asyncio.run(cache.get(KEY)) is None
    assert (cache.stats.damaged, cache.stats.misses, cache.stats.hits) == (2, 2, 0)
    assert len(caplog.records) == 1 and KEY in caplog.text
    asyncio.run(cache.put(KEY, answer(2), BODY))
    assert asyncio.run(cache.get(KEY)) == answer(2)


def test_an_entry_of_a_later_ttrl_is_a_miss_and_stays(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    asyncio.run(cache.put(KEY, answer(1), BODY))
    newer = (tmp_path / KEY).read_bytes().replace(b"ttrl-cache 1 ", b"ttrl-cache 2 ")
    (tmp_path / KEY).write_bytes(newer)
    assert asyncio.run(cache.get(KEY)) is None
    asyncio.run(cache.put(KEY, answer(2), BODY))
    assert (tmp_path / KEY).read_bytes() == newer


WRITER = """
import asyncio, sys
from ttrl.rollouts.cache.completions import Cache, request_digest, sample_key
from ttrl.rollouts.client.wire import Answer

address, number = sys.argv[1], int(sys.argv[2])
body = {"model": "m"}
digest = request_digest("x", body)

async def main():
    cache = Cache.of(address)
    async def one(k):
        mine = Answer(b'{"writer": %d, "sample": %d}' % (number, k) + b" " * 3000, "id", number, "m", [k] * 50)
        await cache.put(sample_key(digest, k), mine, body)
        got = await cache.get(sample_key(digest, k))
        assert got is not None and got.choice.startswith(b'{"writer": %d, "sample": %d}' % (got.created, k)), got
        assert got.prompt_token_ids == [k] * 50
        return got.created
    seen = await asyncio.gather(*(one(k) for k in range(100)))
    assert cache.stats.damaged == cache.stats.failed_reads == cache.stats.failed_writes == 0, cache.stats
    print(cache.stats.writes, *seen)

asyncio.run(main())
"""


def test_processes_write_the_same_keys(tmp_path: Path) -> None:
    """Whoever wins, all see the same answer from then on, and nobody half of one."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sum(int(output[0]) for output in outputs) == 100  # every key was written by exactly one
    assert len({tuple(output[1:]) for output in outputs}) == 1
    assert [
        path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".entry"
    ] == []


def test_memory_stores_are_shared_by_name_within_the_process() -> None:
    name = uuid4()
    asyncio.run(opened(f"memory://{name}").put(KEY, answer(), BODY))
    assert asyncio.run(opened(f"memory:///{name}/").get(KEY)) == answer()
    assert asyncio.run(opened(f"memory://{name}-2").get(KEY)) is None


def test_a_folder_is_made_by_the_first_write_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(tmp_path / "a" / "b")
    assert asyncio.run(cache.get(KEY)) is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir("/")  # the folder was named before
    asyncio.run(cache.put(KEY, answer(), BODY))
    assert (tmp_path / "a" / "b" / KEY).is_file()


def test_relative_paths_and_home_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for address in ("here", Path("there"), "~/mine"):
        asyncio.run(opened(address).put(KEY, answer(), BODY))
    assert all((tmp_path / folder / KEY).is_file() for folder in ("here", "there", "home/mine"))


def test_none_and_caches_pass_through() -> None:
    assert Cache.of(None) is None
    cache = opened("memory://")
    assert Cache.of(cache) is cache


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "ftp://host/folder",
            "use a folder's path, file:///folder, memory://, s3://bucket/folder",
        ),
        ("s3:bucket", "cannot be at"),
        ("memory:", "cannot be at"),
        ("s3://[", "cannot be at"),
        ("s3://", "a cache cannot be at 's3://'"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_NAME"),
        ("file://host/folder", "three slashes"),
        ("s3://bucket/x?no_such_option=topsecret", "no_such_option"),
        ("s3://name:topsecret@bucket/x", "AWS_ACCESS_KEY_ID"),
        ("", "empty"),
        ("  ", "empty"),
        ([], "empty list"),
        ([[]], "holds a list"),
        (["memory://", 3], "holds a int"),
        (7, "is a int"),
        (b"folder", "is a bytes"),
        ({"a": 1}, "is a dict"),
        (__file__, "a file; give a folder"),
    ],
)
def test_wrong_addresses(wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "AWS_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(UserError) as caught:
        Cache.of(wrong)
    assert message in str(caught.value)
    assert "topsecret" not in str(caught.value) and "Debug source" not in str(caught.value)


def test_credentials_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(
        "s3://bucket/x?access_key_id=AKIAXX&secret_access_key=topsecret&endpoint=http://127.0.0.1:1&region=eu-1"
    )
    assert (
        cache.describe()
        == "s3://bucket/x?access_key_id=***&secret_access_key=***&endpoint=http://127.0.0.1:1&region=eu-1"
    )
    assert "topsecret" not in repr(cache) + repr(cache.stores) + str(vars(cache))
    text = (
        "GET https://me:pw@host/a?sig=abc&region=x#f failed (https://host/b?token=t) for s3://k:s@b"
    )
    assert redact(text) == (
        "GET https://***@host/a?sig=***&region=x#f failed (https://host/b?token=***) for s3://***@b"
    )


def test_known_cloud_addresses_open_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    addresses: Sequence[str] = (
        "s3://bucket/x",
        "gs://bucket/x",
        "az://container/x",
        "abfss://container@account.dfs.core.windows.net/x",
    )
    for address in addresses:
        assert Store(address).shown == address
