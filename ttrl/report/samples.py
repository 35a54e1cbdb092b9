"""Read samples of rollout and validation files for the report, and only the shown ones.

A line of rollouts.jsonl may be 50 kB of token ids and log-probabilities: parsing all of them took
longer than the whole report. So the file is split into lines, the bytes tell the lines of a
finding, and only shown lines are parsed. Results are kept until the file changes: a report after
each iteration reads only new files.
"""

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from ttrl.errors import TtrlError
from ttrl.facts import number
from ttrl.monitoring.finding import Examples
from ttrl.monitoring.followed_runs import Stamp, stamp_of
from ttrl.records import Sample
from ttrl.run_folder.reader import RunData
from ttrl.run_folder.token_text import run_token_text
from ttrl.text import present

T = TypeVar("T")

MAX_TOKENS = 300
"""Tokens shown of one sample: a page with twenty samples then stays below two megabytes."""
TRAINER_FILE = "trainer_logprobs.safetensors"
_FULL_COLOUR = 2.0
"""The advantage with full colour: within a group the standard deviation is 1, so colours mean the
same everywhere.
"""


_texts: dict[Path, Callable[[int], str]] = {}


def token_text_of(run: RunData, number: int) -> Callable[[int], str] | None:
    """Return `run_token_text`, read once per process; None without a readable tokenizer.

    All checkpoints of a run share a tokenizer, and reading a large one takes longer than the
    report.
    """
    if run.folder not in _texts:
        try:
            text = run_token_text(run, number)
        except (TtrlError, OSError):  # OSError: a model's name is not always a file name
            return None
        if text is None:
            return None
        if len(_texts) > 8:
            _texts.clear()
        _texts[run.folder] = text
    return _texts[run.folder]


class TokenSpan(NamedTuple):
    """One token to show."""

    css: str
    title: str
    text: str


@dataclass(frozen=True)
class Shown(Generic[T]):
    """The first tokens or messages, and the number of those left out."""

    first: list[T]
    more: int


@dataclass(frozen=True)
class TokenFacts:
    """One generated token. Unknown is None."""

    token_id: int
    sampler: float | None = None
    trainer: float | None = None
    advantage: float | None = None
    version: int | None = None

    def span(self, place: int, text: Callable[[int], str]) -> TokenSpan:
        """Shade the token by advantage (blue up, orange down) and underline it by the distance of
        sampler and trainer (classes d1 to d3: above 0.001, 0.01, 0.1 nats). Its title gives all
        numbers.
        """
        parts = [f"#{place} id {self.token_id}"]
        css = []
        if self.advantage is not None:
            parts.append(f"advantage {self.advantage:.3g}")
            step = min(4, math.ceil(4 * abs(self.advantage) / _FULL_COLOUR))
            if step:
                css.append(f"{'u' if self.advantage > 0 else 'n'}{step}")
        if self.sampler is not None:
            parts.append(f"sampler {self.sampler:.4f}")
        if self.trainer is not None:
            parts.append(f"trainer {self.trainer:.4f}")
        if self.trainer is not None and self.sampler is not None:
            gap = self.trainer - self.sampler
            parts.append(f"difference {gap:+.1e}")
            level = sum(abs(gap) > limit for limit in (1e-3, 1e-2, 1e-1))
            if level:
                css.append(f"d{level}")
        if self.version is not None and self.version >= 0:
            parts.append(f"policy {self.version}")
        return TokenSpan(" ".join(css), ", ".join(parts), text(self.token_id))


class TokenTable:
    """The generated tokens of one iteration's samples, with the facts of the pack and the
    trainer.
    """

    def __init__(self, run: RunData, number: int) -> None:
        from ttrl.data.packing.packed_file import load_packed, read_tensor  # PyTorch takes seconds

        self._samples: dict[tuple[str, int], list[int]] = {}
        self._text = token_text_of(run, number)
        self._trainer = None
        folder = run.iteration_folder(number)
        try:
            self._tensors, self._table, _ = load_packed(folder / "packed.safetensors")
        except (TtrlError, OSError):
            return
        for place, sample in enumerate(self._table):
            self._samples.setdefault((sample.task_id, sample.sample), []).append(place)
        with contextlib.suppress(TtrlError, OSError):
            trainer = read_tensor(folder / TRAINER_FILE, "logprobs")
            if trainer.shape == self._tensors["labels"].shape:
                self._trainer = trainer

    def spans(self, sample: Sample) -> Shown[TokenSpan] | None:
        """Return the answer as coloured tokens; None if text says as much: no tokenizer, no ids,
        several turns.
        """
        if self._text is None or sample.turns or not sample.token_ids:
            return None
        tokens = self._facts(sample)
        if tokens is None or all(
            token.sampler is None and token.advantage is None for token in tokens
        ):
            return None
        shown = [token.span(place, self._text) for place, token in enumerate(tokens[:MAX_TOKENS])]
        return Shown(shown, len(tokens) - len(shown))

    def _facts(self, sample: Sample) -> list[TokenFacts] | None:
        """Return all generated tokens; None without ids. Untrained ones have only an id and the
        sampler's logprob.
        """
        ids = sample.token_ids
        if ids is None or (sample.logprobs is not None and len(sample.logprobs) != len(ids)):
            return None
        known: Sequence[float | None] = sample.logprobs or [None] * len(ids)
        trained = self._trained(sample)
        # The pack holds the same tokens in the same order; a truncated pack holds the first of
        # them.
        if [one.token_id for one in trained] != ids[: len(trained)]:
            trained = []
        rest = zip(ids[len(trained) :], known[len(trained) :], strict=True)
        return trained + [TokenFacts(token, number(value)) for token, value in rest]

    def _trained(self, sample: Sample) -> list[TokenFacts]:
        from ttrl.data.packing.packed_format import IGNORE_LABEL

        found: list[TokenFacts] = []
        for sample_number in self._samples.get((sample.task_id, sample.sample), []):
            row = self._table[sample_number].row
            labels = self._tensors["labels"][row]
            places = (
                ((self._tensors["sample_ids"][row] == sample_number) & (labels != IGNORE_LABEL))
                .nonzero()
                .flatten()
            )
            names = ("labels", "logprobs", "advantages", "weights_version")
            columns = [self._tensors[name][row][places].tolist() for name in names]
            if self._trainer is not None:
                trainer = self._trainer[row][places].tolist()
            else:
                trainer = [math.nan] * len(places)
            found += [
                TokenFacts(token, number(sampler), number(own), advantage, version)
                for (token, sampler, advantage, version), own in zip(
                    zip(*columns, strict=True), trainer, strict=True
                )
            ]
        return found


_MOST_BYTES = 256_000_000  # of a searched file
_REWARD = re.compile(rb'"reward": (-?[0-9.eE+-]+|null)')


def spread(count: int, most: int) -> list[int]:
    """Choose `most` of `count` places at even distances, starting with the first: by place, never
    by good looks.
    """
    if count > most:
        return [index * count // most for index in range(most)]
    return list(range(count))


def sample_lines(path: Path) -> Sequence[bytes]:
    """Return the first _MOST_BYTES of the file as lines; empty if unreadable."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError:
        return []
    return data.splitlines()


def parsed(line: bytes) -> Sample | None:
    """Parse a line; None if it is no sample."""
    try:
        return Sample.from_json(json.loads(line))
    except (ValueError, TypeError, AttributeError):
        return None


@functools.lru_cache(maxsize=16)
def some_samples(path: Path, most: int, stamp: Stamp) -> list[Sample]:
    """Return at most `most` samples of the file, at even distances. stamp: the file's
    `stamp_of`.
    """
    lines = sample_lines(path)
    return present(parsed(lines[index]) for index in spread(len(lines), most))


def before_and_after(before: Path, after: Path, most: int) -> list[tuple[Sample, Sample]]:
    """Return samples of the same tasks and numbers from two validation files."""
    lines = sample_lines(after)
    pairs = []
    for sample in some_samples(before, most, stamp_of(before)):
        name = json.dumps(sample.task_id, ensure_ascii=False)
        marks = (
            b'"task_id": ' + name.encode("utf-8", "surrogatepass"),
            b'"task_id": ' + json.dumps(sample.task_id).encode(),
        )
        found = (parsed(line) for line in lines if any(mark in line[:2000] for mark in marks))
        wanted = (sample.task_id, sample.sample)
        later = next((one for one in present(found) if (one.task_id, one.sample) == wanted), None)
        if later is not None:
            pairs.append((sample, later))
    return pairs


@functools.lru_cache(maxsize=64)
def examples(path: Path, kind: Examples, stamp: Stamp, most: int = 2) -> list[Sample]:
    """Return samples of the file for a finding. stamp: the file's `stamp_of`."""
    lines = sample_lines(path)
    rewards = [_reward(line) for line in lines]
    graded = present(rewards)
    low = min(graded, default=0.0)
    high = max(graded, default=0.0)
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
    else:  # "repeated": the commonest completion, by its text
        texts: dict[bytes, list[int]] = {}
        for i, line in enumerate(lines):
            match = re.search(rb'"text": "(?:[^"\\]|\\.)*"', line)
            texts.setdefault(match[0] if match else b"", []).append(i)
        chosen = max(texts.values(), key=len, default=[])
    return present(parsed(lines[chosen[index]]) for index in spread(len(chosen), most))


def _reward(line: bytes) -> float | None:
    match = _REWARD.search(line)
    try:
        if match:
            return float(match[1])
        return None
    except ValueError:  # null
        return None
