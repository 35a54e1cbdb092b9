"""Samples of rollout and validation files for the report, without reading what is not shown.

A line of rollouts.jsonl may be 50 kB of token ids and log-probabilities: parsing all of them took longer than the whole report.
Lines are found by their ends; which of them show a finding is told from the bytes; only those that are shown are parsed. What was
read is kept as long as the file stays what it is, so that a report that is written after each iteration reads new files alone.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ttrl.monitoring.finding import Kind
from ttrl.records import Sample

_MOST_BYTES = 256_000_000  # of a file that is looked at
_REWARD = re.compile(rb'"reward": (-?[0-9.eE+-]+|null)')


def spread(count: int, most: int) -> list[int]:
    """`most` places among `count` at even distances, the first one included: chosen by place, never by how good they look."""
    return [index * count // most for index in range(min(count, most))] if count > most else list(range(count))


def sample_lines(path: Path) -> Sequence[bytes]:
    """The lines of the file, as far as _MOST_BYTES go; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError:
        return []
    return data.splitlines()


def stamp_of(path: Path) -> tuple[int, int]:
    """Another one when the file is another one."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def parsed(line: bytes) -> Sample | None:
    """None for what is no sample."""
    try:
        return Sample.from_json(json.loads(line))
    except (ValueError, TypeError, AttributeError):
        return None


def some_samples(path: Path, most: int) -> list[Sample]:
    """At most `most` samples of the file, at even distances."""
    return _some_samples(path, most, stamp_of(path))


@functools.lru_cache(maxsize=16)
def _some_samples(path: Path, most: int, stamp: tuple[int, int]) -> list[Sample]:
    lines = sample_lines(path)
    return [sample for index in spread(len(lines), most) if (sample := parsed(lines[index])) is not None]


def before_and_after(before: Path, after: Path, most: int) -> list[tuple[Sample, Sample]]:
    """Samples of the same tasks from two validation files."""
    lines = sample_lines(after)
    pairs = []
    for sample in some_samples(before, most):
        mark = b'"task_id": ' + json.dumps(sample.task_id, ensure_ascii=False).encode("utf-8", "surrogatepass")
        escaped = b'"task_id": ' + json.dumps(sample.task_id).encode()
        line = next((line for line in lines if mark in line[:2000] or escaped in line[:2000]), None)
        if line is not None and (later := parsed(line)) is not None and later.task_id == sample.task_id:
            pairs.append((sample, later))
    return pairs


def examples(path: Path, kind: Kind, most: int = 2) -> list[Sample]:
    """Samples of the file that show a finding."""
    return _examples(path, kind, most, stamp_of(path))


@functools.lru_cache(maxsize=64)
def _examples(path: Path, kind: Kind, most: int, stamp: tuple[int, int]) -> list[Sample]:
    lines = sample_lines(path)
    rewards = [_reward(line) for line in lines]
    known = [reward for reward in rewards if reward is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    tests: dict[str, Callable[[int], bool]] = {
        "wrong": lambda i: rewards[i] == low,
        "right": lambda i: rewards[i] == high,
        "failed": lambda i: rewards[i] is None,
        "truncated": lambda i: b'"finish_reason": "length"' in lines[i],
        "empty": lambda i: b'"text": ""' in lines[i],
    }
    if kind in tests:
        chosen = [i for i in range(len(lines)) if tests[kind](i)]
    elif kind == "longest":
        chosen = sorted(range(len(lines)), key=lambda i: -len(lines[i]))[:most]
    else:  # "repeated": the commonest completion, told by its text
        texts: dict[bytes, list[int]] = {}
        for i, line in enumerate(lines):
            match = re.search(rb'"text": "(?:[^"\\]|\\.)*"', line)
            texts.setdefault(match[0] if match else b"", []).append(i)
        chosen = max(texts.values(), key=len, default=[])
    found = [sample for index in spread(len(chosen), most) if (sample := parsed(lines[chosen[index]])) is not None]
    return found


def _reward(line: bytes) -> float | None:
    match = _REWARD.search(line)
    try:
        return float(match[1]) if match else None
    except ValueError:  # null
        return None
