"""Keys: what makes two requests the same. Entries: exact both ways, and nothing served that was
changed by a single byte.
"""

import asyncio
import gzip
import hashlib
import json
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrl.errors import UserError
from ttrl.rollouts.cache import maintenance as tools
from ttrl.rollouts.cache.completions import Cache
from ttrl.rollouts.cache.entries import (
    MOST_BYTES,
    DamagedEntry,
    decode_entry,
    encode_entry,
    request_digest,
    sample_key,
    split_key,
)
from ttrl.rollouts.client.wire import Answer

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "héllo 😀"}],
    "temperature": 0.7,
    "seed": 5,
}
KEY = sample_key(request_digest({"weights": "abc"}, BODY), 3)

any_text = st.text(st.characters(codec=None, categories=None), max_size=8)  # lone surrogates too
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(any_text, json_values, max_size=4)
small = st.integers(0, 2**62)
answers = st.builds(
    Answer,
    choice=st.binary(max_size=300),
    completion_id=any_text,
    created=small,
    model=any_text,
    prompt_token_ids=st.none() | st.lists(st.integers(0, 300_000), max_size=20),
    prompt_tokens=st.none() | small,
    cached_tokens=st.none() | small,
    completion_tokens=st.none() | small,
)


def same_json(a: Any, b: Any) -> bool:
    """Equality of JSON values: numbers by value, true is not 1, names in any order."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_json(x, y) for x, y in zip(a, b))
    return bool(a == b)


@given(bodies, bodies)
def test_requests_have_one_key_exactly_when_they_are_equal(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    assert (request_digest("x", a) == request_digest("x", b)) == same_json(a, b)


@given(bodies)
def test_order_of_names_does_not_count(body: dict[str, Any]) -> None:
    assert request_digest("x", body) == request_digest("x", dict(reversed(body.items())))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (0.0, -0.0, True),
        (1e300, int(1e300), True),
        (2**53, 2**53 + 1, False),
        (1, True, False),
        (0, None, False),
        (1, "1", False),
        ((1, 2), [1, 2], True),
        ({7: -100}, {"7": -100}, True),
        # Two lone surrogates are not the character that their escapes would make.
        ("\ud83d\ude00", "😀", False),
        ("é", "e\u0301", False),
        ([], {}, False),
        ([[1], 2], [1, [2]], False),
    ],
)
def test_what_is_equal(one: Any, other: Any, same: bool) -> None:
    assert (request_digest("x", {"value": one}) == request_digest("x", {"value": other})) is same


def test_identity_is_part_of_the_key() -> None:
    """A request to other weights, or to another server, is another request; body and identity
    cannot be confused.
    """
    digests = {
        request_digest(identity, body)
        for identity, body in [
            ({"weights": "a"}, {}),
            ({"weights": "b"}, {}),
            ({"base_url": "a", "organization": "", "project": ""}, {}),
            ([{"base_url": "a"}, {"base_url": "b"}], {}),
            ("a", {}),
            ("a", {"seed": 1}),
            ("a", {"seed": 2}),
            ("a", {"identity": "a"}),
        ]
    }
    assert len(digests) == 8


def test_key_is_the_same_in_every_process() -> None:
    """Pinned: a change here makes every stored answer a miss, so it needs a new KEY_SCHEMA."""
    expected = "v1/f2/f2fd07b4039a60bf"
    code = (
        "from ttrl.rollouts.cache.entries import "
        f"*\nprint(sample_key(request_digest({{'weights': 'abc'}}, {BODY!r}), 3))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == KEY
    assert KEY.startswith(expected)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), b"x", object(), {1, 2}, {(1, 2): 3}, {1: "a", "1": "b"}]
)
def test_what_is_no_json_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(UserError, match=r"request\.stop\[0\]"):
        request_digest("x", {"stop": [value]})


@pytest.mark.parametrize("sample", [0, 7, 99_999, 100_000, 1_234_567])
def test_keys_split_into_what_they_were_made_of(sample: int) -> None:
    digest = request_digest("x", BODY)
    key = sample_key(digest, sample)
    assert key.startswith(f"v1/{digest[:2]}/{digest}/") and split_key(key) == (digest, sample)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "v1/x",
            KEY + "x",
            "x" + KEY,
            KEY + "#1",
            KEY + "\n",
            KEY.upper(),
            KEY.replace("v1", "v2"),
        ),
        *(
            KEY.replace("00003", "3"),
            KEY.replace("00003", "000003"),
            "v1/00/" + KEY.split("/", 2)[2],
        ),
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert split_key(name) is None


@given(answers, bodies)
def test_entries_give_back_exactly_what_was_put(answer: Answer, body: dict[str, Any]) -> None:
    key = sample_key(request_digest("x", body), 0)
    entry = decode_entry(key, encode_entry(key, answer, body, NOW))
    assert entry.answer() == answer
    assert (entry.about.key, entry.about.written) == (key, NOW)
    json.loads(entry.request)


def entry_bytes() -> bytes:
    choice = {
        "message": {"content": "hi"},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": {"content": [{"logprob": -1}]},
    }
    return encode_entry(
        KEY, Answer(msgspec.json.encode(choice), "id", 1, "m", [5, 6], 2, 0, 2), BODY, NOW
    )


def test_every_truncation_is_noticed() -> None:
    data = entry_bytes()
    for length in range(len(data)):
        with pytest.raises(DamagedEntry) as caught:
            decode_entry(KEY, data[:length])
        assert caught.value.kind == "damaged"


def test_every_changed_byte_is_noticed() -> None:
    data = entry_bytes()
    for place in range(len(data)):
        for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            with pytest.raises(DamagedEntry):
                decode_entry(KEY, data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])


def test_added_bytes_are_noticed() -> None:
    for data in (entry_bytes() + b"\0", entry_bytes() * 2, b"\n" + entry_bytes()):
        with pytest.raises(DamagedEntry):
            decode_entry(KEY, data)


@settings(max_examples=80)
@given(st.binary(max_size=400))
def test_foreign_bytes_are_noticed(data: bytes) -> None:
    for foreign in (data, b"ttrl-cache 1 " + data, b'{"answer": 1}'):
        with pytest.raises(DamagedEntry):
            decode_entry(KEY, foreign)


def test_kinds_of_damage() -> None:
    data = entry_bytes()

    def kind(key: str, what: bytes) -> str:
        with pytest.raises(DamagedEntry) as caught:
            decode_entry(key, what)
        return caught.value.kind

    assert kind(KEY, b"") == "damaged"
    assert kind(KEY, b'{"choices": []}') == "foreign"
    assert kind(KEY, data[:-1]) == "damaged"
    assert kind(KEY, data.replace(b"ttrl-cache 1 ", b"ttrl-cache 2 ")) == "newer"
    assert kind(KEY, data.replace(b"ttrl-cache 1 ", b"ttrl-cache 0 ")) == "damaged"
    assert kind(KEY.replace("00003", "00004"), data) == "misplaced"


def bomb(size: int) -> bytes:
    """An entry with the right checksum and key, whose choice is `size` zeros."""
    first, request, _ = gzip.decompress(entry_bytes().split(b"\n", 1)[1]).split(b"\n", 2)
    packed = gzip.compress(b"\n".join((first, request, bytes(size))), 6)
    return b"ttrl-cache 1 %s\n%s" % (hashlib.sha256(packed).hexdigest().encode(), packed)


def test_a_small_entry_does_not_become_a_large_one() -> None:
    """200 MB are packed into 0.2 MB; a store that others can write to has as many of them as they
    like.
    """
    assert len(decode_entry(KEY, bomb(10**6)).choice) == 10**6
    data = bomb(2 * 10**8)
    assert len(data) < 10**6
    tracemalloc.start()
    try:
        with pytest.raises(DamagedEntry, match="unpacked, it is larger than 64 MiB"):
            decode_entry(KEY, data)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_BYTES
    finally:
        tracemalloc.stop()


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    answer = Answer(b"x" * MOST_BYTES, "id", 1, "m", [1], 1, 0, 1)
    assert encode_entry(KEY, answer, BODY, NOW) is None
    cache = Cache.of(tmp_path)
    assert cache is not None
    asyncio.run(cache.put(KEY, answer, BODY))
    assert not list(tmp_path.iterdir()) and cache.stats.failed_writes == 1


def test_a_large_object_is_a_miss_that_is_not_read_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / KEY
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse one; read into memory, it would end this test
    cache, answer = Cache.of(tmp_path), Answer(b'{"message": {}}', "id", 1, "m", [1], 1, 0, 1)
    assert cache is not None

    async def use() -> Answer | None:
        assert await cache.get(KEY) is None
        await cache.put(KEY, answer, BODY)
        return await cache.get(KEY)

    assert tools.stats(tmp_path).unreadable == {"damaged": 1}
    assert asyncio.run(use()) == answer
    assert (cache.stats.damaged, cache.stats.writes, cache.stats.failed_reads) == (1, 1, 0)
