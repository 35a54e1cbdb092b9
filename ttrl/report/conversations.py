"""Build the report's conversation pages, to page through.

They show the same held-out tasks before and after, training samples and the samples of findings.
Training samples have their tokens coloured by advantage and by the difference between sampler and
trainer. parts.html renders the values built here: pages of messages and answers.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ttrl.messages import text_of
from ttrl.monitoring.finding import Finding
from ttrl.monitoring.findings import findings
from ttrl.monitoring.followed_runs import stamp_of
from ttrl.records import Sample
from ttrl.report.samples import (
    TRAINER_FILE,
    Shown,
    TokenSpan,
    TokenTable,
    before_and_after,
    examples,
    some_samples,
)
from ttrl.run_folder.reader import RunData
from ttrl.text import compact, present

HELD_OUT = 6
TRAINING = 8
"""Pages: of held-out tasks, and of training samples of each shown iteration (the first, the middle
and the last).
"""
MOST_TEXT = 60_000
"""Characters of the messages of one sample; a conversation of a hundred turns with tools would put
megabytes on each page.
"""
_MEANS = {"stop": "continuing is useless", "warn": "learning suffers", "note": "worth knowing"}
_ENDINGS = {"length": "cut off at the length limit", "stop": "ended by itself"}


@functools.cache
def template(name: str, folder: Path | None = None) -> Template:
    """Return a template of this folder, or of `folder` first; it escapes all inserted values but
    Markup.
    """
    return Environment(
        loader=FileSystemLoader(present([folder, Path(__file__).parent])),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


class Message(NamedTuple):
    """One chat message."""

    role: str
    text: str
    css: str
    """The CSS class of its text."""


def shown_messages(messages: Iterable[tuple[Any, str]]) -> Shown[Message]:
    """Return messages of OpenAI's API, each with the class of its text, up to MOST_TEXT."""
    known = [(message, css) for message, css in messages if isinstance(message, dict)]
    shown: list[Message] = []
    length = 0
    for message, css in known:
        if length >= MOST_TEXT:
            break
        content = message.get("content")
        text = text_of(content)
        shown_as_json = content or message.get("tool_calls")
        if not text and shown_as_json:
            text = json.dumps(shown_as_json, ensure_ascii=False)
        shown.append(Message(message.get("role", "?"), text, css))
        length += len(text)
    return Shown(shown, len(known) - len(shown))


@dataclass(frozen=True)
class ShownAnswer:
    """The model's answer."""

    label: str
    sample: Sample
    tokens: Shown[TokenSpan] | None = None
    """The answer as coloured tokens, shown instead of its text."""

    @property
    def turns(self) -> Shown[Message]:
        """Return the messages up to the last reply, without the task's own."""
        said: list[tuple[Any, str]] = []
        for turn in self.sample.turns or []:
            said += [*((message, "prompt") for message in turn.messages), (turn.reply, "answer")]
        return shown_messages(said[:-1])

    @property
    def facts(self) -> list[str]:
        sample = self.sample
        facts = [
            f"{name} {compact(value)}"
            for name, value in sample.metrics.items()
            if isinstance(value, int | float)
        ]
        if sample.finish_reason:
            facts.append(_ENDINGS.get(sample.finish_reason, sample.finish_reason))
        if sample.token_ids is not None:
            facts.append(f"{len(sample.token_ids)} tokens")
        if sample.turns:
            facts.append(f"{len(sample.turns)} turns")
        return facts

    @property
    def reward(self) -> str:
        if isinstance(self.sample.reward, int | float):
            return compact(self.sample.reward)
        return ""


@dataclass(frozen=True)
class Page:
    """One page of a pager: a prompt with one answer, or with two next to each other."""

    title: str
    answers: list[ShownAnswer]

    @property
    def prompt(self) -> Shown[Message]:
        return shown_messages((message, "prompt") for message in self.answers[0].sample.messages)

    @functools.cached_property
    def html(self) -> Markup:
        """Return the page, rendered once: pages of earlier iterations are shown repeatedly."""
        macros: Any = template("parts.html").module
        return Markup(macros.conversation(self))


def held_out_pages(run: RunData) -> list[Page]:
    """Return the same held-out tasks before and after; empty before the second validation."""
    checked = run.numbers_with("validation.jsonl")
    if len(checked) < 2:
        return []
    first = checked[0]
    last = checked[-1]
    if first == 0:
        start = "starting model"
    else:
        start = f"iteration {first}"
    end = f"iteration {last}"
    files = [run.iteration_folder(number) / "validation.jsonl" for number in (first, last)]
    return [
        Page(before.task_id, [ShownAnswer(start, before), ShownAnswer(end, after)])
        for before, after in before_and_after(files[0], files[1], HELD_OUT)
    ]


def training_pages(run: RunData) -> list[Page]:
    """Return samples of the last iteration, one between, and the first, at even distances from
    their files.
    """
    sampled = run.numbers_with("rollouts.jsonl")
    if not sampled:
        return []
    # The middle one (a power of two) stays the same for long, and so do its pages.
    middle = 1 << max(len(sampled).bit_length() - 2, 0)
    chosen = sorted({sampled[0], sampled[min(middle, len(sampled) - 1)], sampled[-1]}, reverse=True)
    return [page for number in chosen for page in _pages_of(run, number)]


_PAGES: dict[Path, tuple[Any, list[Page]]] = {}


def _pages_of(run: RunData, number: int) -> list[Page]:
    """Return an iteration's pages, rebuilt only if its files change."""
    folder = run.iteration_folder(number)
    stamp = tuple(
        stamp_of(folder / name) for name in ("rollouts.jsonl", "packed.safetensors", TRAINER_FILE)
    )
    known = _PAGES.get(folder)
    if known is not None and known[0] == stamp:
        return known[1]
    pages = sample_pages(run, number, some_samples(folder / "rollouts.jsonl", TRAINING, stamp[0]))
    if len(_PAGES) > 12:
        _PAGES.clear()
    _PAGES[folder] = stamp, pages
    return pages


def sample_pages(run: RunData, number: int, samples: Sequence[Sample]) -> list[Page]:
    """Return a page for each sample of iteration `number`."""
    table = TokenTable(run, number)
    return [
        Page(
            f"iteration {number} · {one.task_id} · sample {one.sample}",
            [ShownAnswer("assistant", one, table.spans(one))],
        )
        for one in samples
    ]


def shown_findings(run: RunData) -> list[tuple[Finding, str, list[Page]]]:
    """Return the findings, the most serious first, each with its severity's meaning and pages of
    samples.
    """
    return [
        (one, _MEANS[one.severity], _example_pages(run, one))
        for one in findings(run.rows, run.config)
    ]


def _example_pages(run: RunData, finding: Finding) -> list[Page]:
    """Return sample pages of the newest iteration with samples of the finding."""
    if finding.examples is None:
        return []
    for number in run.numbers_with("rollouts.jsonl")[:-6:-1]:
        path = run.iteration_folder(number) / "rollouts.jsonl"
        samples = examples(path, finding.examples, stamp_of(path))
        if samples:
            return sample_pages(run, number, samples)
    return []
