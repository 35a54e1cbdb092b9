"""Define the cache's keys and entries: equality of requests, and the stored form of answers.

A key is `v1/ab/<SHA-256 of the request, 64 hex digits>/<sample, five digits>.entry`, so all samples
of a request are together. An entry is

    ttrl-cache 1 <SHA-256 of everything after this line>\\n
    gzip of three lines: what belongs to the answer (JSON), the request (JSON), the choice as the
    server sent it (byte for byte)

and `tail -n +2 FILE | zcat` shows it. The checksum covers the compressed bytes: it detects every
changed or missing byte.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from ttrl.errors import UserError
from ttrl.rollouts.client.wire import Answer, encoded
from ttrl.text import gib
from ttrl.version import __version__

KEY_SCHEMA = 1
ENTRY_SCHEMA = 1
# 64 tokens with logprobs: 8.0 kB → 2.5 kB in 45 µs; level 6 makes 2.3 kB of it in 65 µs.
COMPRESSION_LEVEL = 1
MOST_BYTES = 2**26
"""Of an entry, stored or unpacked: half a million tokens with logprobs. A store shared with other
writers must not fill our memory.
"""

_MAGIC = b"ttrl-cache "
_FIRST_LINE = re.compile(rb"ttrl-cache ([0-9]{1,9}) ([0-9a-f]{64})\n")
_KEY = re.compile(r"v1/([0-9a-f]{2})/(\1[0-9a-f]{62})/([0-9]{5}|[1-9][0-9]{5,})\.entry")

Damage = Literal["foreign", "newer", "damaged", "misplaced"]


class DamagedEntry(Exception):  # noqa: N818 - it never leaves the cache
    """The object under a key is no usable entry.

    kind: "foreign" (not written by ttrl), "newer" (written by a later ttrl), "damaged" (bytes are
        missing or changed), "misplaced" (a whole entry, of another key).
    """

    def __init__(self, kind: Damage, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EntryAbout(msgspec.Struct, omit_defaults=True):
    """The first line inside an entry: everything of the answer except the choice."""

    key: str
    written: datetime
    """Time of the first write, UTC."""
    ttrl: str
    completion_id: str = ""
    created: int = 0
    model: str = ""
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class Entry(NamedTuple):
    """A whole entry, read and verified. `request` is JSON."""

    about: EntryAbout
    request: bytes
    choice: bytes

    def answer(self) -> Answer:
        return Answer(
            self.choice, **{field: getattr(self.about, field) for field in _ANSWER_FIELDS}
        )


_ANSWER_FIELDS = tuple(
    field for field in Answer.__struct_fields__ if field not in ("choice", "prompt_text")
)
assert set(_ANSWER_FIELDS) <= set(EntryAbout.__struct_fields__), (
    "EntryAbout must carry every field of Answer"
)
_about_decoder = msgspec.json.Decoder(EntryAbout)


def _canonical(value: Any, where: str) -> Any:
    """Turn equal JSON into equal Python values: 1.0 is 1, -0.0 is 0, tuples are lists, 7 as a name
    is "7".
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if value - value != 0:
            raise UserError(
                f"{where} is {value}, which JSON cannot represent; leave it out or give a finite "
                "number"
            )
        if value.is_integer():
            return int(value)
        return value
    if isinstance(value, Mapping):
        named: dict[str, object] = {}
        for key, item in value.items():
            name = key if isinstance(key, str) else str(key) if type(key) is int else None
            if name is None or name in named:
                raise UserError(
                    f"{where} has the key {key!r}, not a distinct JSON name; use distinct strings"
                )
            named[name] = _canonical(item, f"{where}.{name}")
        return named
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise UserError(
        f"{where} is a {type(value).__name__}, not JSON; give plain numbers, strings, lists and "
        "dicts"
    )


def request_digest(
    identity: Mapping[str, Any] | Sequence[Any] | str, body: Mapping[str, Any]
) -> str:
    """Return the hexadecimal SHA-256 (64 digits) of the server's identity and the request; the same
    in every process.

    identity: of the answering side: {"weights": digest} for known weights, else base URL,
        organisation and project. Never a key.
    body: the request, without n and pure streaming options. A seed belongs to it.

    Requests with equal JSON have one digest: the order of names does not count, and 1 and 1.0 are
    the same number (true and 1 are not the same value). Raises UserError for values without a JSON
    form.
    """
    asked = {
        "schema": KEY_SCHEMA,
        "identity": _canonical(identity, "identity"),
        "body": _canonical(body, "request"),
    }
    text = json.dumps(
        asked, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    # Lone surrogates must neither crash nor equal the character formed by two of them as escapes.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sample_key(digest: str, sample: int) -> str:
    """Return the path of sample number `sample` (from 0) of a request, relative to the store's
    address.
    """
    assert len(digest) == 64 and sample >= 0, (digest, sample)
    return f"v1/{digest[:2]}/{digest}/{sample:05d}.entry"


def split_key(key: str) -> tuple[str, int] | None:
    """Return (digest, sample) of a key; None for any other name."""
    match = _KEY.fullmatch(key)
    if match:
        return (match[2], int(match[3]))
    return None


def encode_entry(
    key: str, answer: Answer, request: Mapping[str, Any], written: datetime
) -> bytes | None:
    """Return the entry to store under `key`; None if it is too large for `decode_entry`. `written`:
    aware, UTC.
    """
    about = EntryAbout(
        key, written, __version__, **{field: getattr(answer, field) for field in _ANSWER_FIELDS}
    )
    lines = b"\n".join((encoded(about), encoded(_canonical(request, "request")), answer.choice))
    if len(lines) > MOST_BYTES:
        return None
    packed = gzip.compress(lines, COMPRESSION_LEVEL, mtime=0)
    return b"%s%d %s\n%s" % (
        _MAGIC,
        ENTRY_SCHEMA,
        hashlib.sha256(packed).hexdigest().encode(),
        packed,
    )


def decode_entry(key: str, data: bytes) -> Entry:
    """Read the entry under `key`. Raises DamagedEntry for anything but a whole entry of this
    key.
    """
    if not data.startswith(_MAGIC):
        if _MAGIC.startswith(data):
            raise DamagedEntry("damaged", f"only {len(data)} bytes of it are left")
        raise DamagedEntry("foreign", "ttrl did not write it")
    match = _FIRST_LINE.match(data)
    if match is None:
        raise DamagedEntry("damaged", "its first line is damaged")
    packed = data[match.end() :]
    if hashlib.sha256(packed).hexdigest().encode() != match[2]:
        raise DamagedEntry("damaged", "its checksum is wrong: bytes are missing or changed")
    if match[1] != b"%d" % ENTRY_SCHEMA:
        kind: Damage
        if int(match[1]) > ENTRY_SCHEMA:
            kind = "newer"
        else:
            kind = "damaged"
        raise DamagedEntry(
            kind, f"it has schema {int(match[1])}, but this ttrl reads schema {ENTRY_SCHEMA}"
        )
    try:
        first, request, choice = _unpacked(packed).split(b"\n", 2)
        about = _read_about(first)
    # Msgspec's errors are ValueErrors.
    except (ValueError, RecursionError, EOFError, OSError, zlib.error) as error:
        raise DamagedEntry(
            "damaged", f"its checksum is right, but its content cannot be read ({error})"
        ) from error
    if about.key != key:
        raise DamagedEntry("misplaced", f"it is the entry of {about.key}")
    return Entry(about, request, choice)


def _unpacked(packed: bytes) -> bytes:
    """Return the unpacked data, up to MOST_BYTES: a few hundred kilobytes can expand to a gigabyte.
    Raises ValueError.
    """
    unpacker = zlib.decompressobj(wbits=31)  # of gzip, including its checksum
    data = unpacker.decompress(packed, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"unpacked, it is larger than {gib(MOST_BYTES)}")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("its compressed part has the wrong length")
    return data


def _read_about(line: bytes) -> EntryAbout:
    try:
        return _about_decoder.decode(line)
    except msgspec.ValidationError:
        raise
    except ValueError:  # lone surrogates; msgspec does not read them
        return msgspec.convert(json.loads(line), EntryAbout)
