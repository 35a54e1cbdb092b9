"""The report's conversations, to page through: the same held-out tasks before and after, training samples with their tokens
coloured by advantage and by the difference of sampler and trainer.

Paging needs no script: each page hangs on a radio button, so that a click on its dot or on "next" shows it, and so do arrow keys.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ttrl.records import Sample
from ttrl.report.markup import folded, section, text_html
from ttrl.report.samples import TRAINER_FILE, TokenTable, before_and_after, coloured, some_samples, stamp_of, token_text_of
from ttrl.run_folder.reader import RunData
from ttrl.text import compact

HELD_OUT, TRAINING = 6, 8
"""Pages: of held-out tasks, and of training samples of each iteration that is shown (the first, the middle and the last)."""
MOST_TEXT = 60_000
"""Characters of the messages of one sample; a conversation of a hundred turns with tools would be megabytes on each page."""


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or message.get("tool_calls") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def messages_html(messages: Iterable[Any], kind: str = "prompt") -> str:
    """Chat messages, each with its role; what is beyond MOST_TEXT is counted."""
    return _shown([(message, kind) for message in messages])


def _shown(messages: Sequence[tuple[Any, str]]) -> str:
    """messages: with the class of each."""
    parts, length = [], 0
    known = [(message, kind) for message, kind in messages if isinstance(message, dict)]
    for number, (message, kind) in enumerate(known):
        if length >= MOST_TEXT:
            parts.append(f"<p class=facts>… {len(known) - number:,} more messages in the run folder</p>")
            break
        content = _content(message)
        length += len(content)
        parts.append(f'<div class="role">{text_html(message.get("role", "?"))}</div>{folded(content, kind)}')
    return "".join(parts)


def _turns(sample: Sample) -> str:
    """What was said up to the last reply, without the task's messages."""
    turns = sample.turns or []
    messages = []
    for number, turn in enumerate(turns):
        messages += [(message, "prompt") for message in turn.messages]
        messages += [(turn.reply, "answer")] if number < len(turns) - 1 else []
    return _shown(messages)


def answer_html(sample: Sample, label: str, tokens: str = "") -> str:
    """What the model answered, with facts about it. tokens: the answer as coloured tokens, instead of its text."""
    facts = []
    if isinstance(sample.reward, int | float):
        facts.append(f"<b>reward {compact(sample.reward)}</b>")
    facts += [f"{text_html(name)} {compact(value)}" for name, value in sample.metrics.items() if isinstance(value, int | float)]
    if sample.finish_reason:
        ended = {"length": "cut off at the length limit", "stop": "ended by itself"}.get(
            sample.finish_reason, sample.finish_reason
        )
        facts.append(text_html(ended))
    if sample.token_ids is not None:
        facts.append(f"{len(sample.token_ids)} tokens")
    if sample.turns:
        facts.append(f"{len(sample.turns)} turns")
    body = tokens or (folded(sample.text, "answer") if sample.text else '<div class="answer empty">(empty answer)</div>')
    if sample.error:
        body += f'<div class="error">{folded(sample.error, "trace")}</div>'
    return f'{_turns(sample)}<div class="role">{label}</div>{body}<p class="facts">{" · ".join(facts)}</p>'


def pager(name: str, pages: Sequence[tuple[str, str]]) -> str:
    """Pages to go through, one at a time. name: of the group of buttons, one per pager. pages: (title, HTML) each."""
    if len(pages) < 2:
        return "".join(f'<div class="pager"><article><p class="task">{title}</p>{body}</article></div>' for title, body in pages)
    parts = []
    for number, (title, body) in enumerate(pages):
        before, after = (number - 1) % len(pages), (number + 1) % len(pages)
        checked = " checked" if number == 0 else ""
        parts.append(
            f'<input type="radio" name="{name}" id="{name}{number}" aria-label="page {number + 1}"{checked}>'
            f'<article><div class="pages"><label for="{name}{before}">‹ back</label><span class="task">{title}</span>'
            f'<span class="count">{number + 1} of {len(pages)}</span><label for="{name}{after}">next ›</label></div>'
            f"{body}</article>"
        )
    return f'<div class="pager">{"".join(parts)}</div>'


def conversations(run: RunData) -> str:
    """The section; empty where there are no samples."""
    body = _held_out(run)
    sampled = run.numbers_with("rollouts.jsonl")
    # The one between first and last stays the same for long (a power of two), and so do its pages.
    middle = 1 << max(len(sampled).bit_length() - 2, 0)
    chosen = sorted({sampled[0], sampled[min(middle, len(sampled) - 1)], sampled[-1]}, reverse=True) if sampled else []
    pages = [page for number in chosen for page in _training_pages(run, number)]
    if pages:
        body += (
            "<h3>Training samples</h3><p class=lead>"
            '<span class="key tokens"><span class="u3">above</span> and <span class="n3">below</span></span> the others of their '
            'group: the advantage of each token. Underlined where sampler and trainer are apart: <span class="tokens">'
            '<span class="d1">0.001</span>, <span class="d2">0.01</span>, <span class="d3">0.1</span></span> nats. Point at a '
            "token for its numbers.</p>" + pager("t", pages)
        )
    return section("Conversations", body, "Taken at even distances from the files, not chosen by how good they are.")


def _held_out(run: RunData) -> str:
    checked = run.numbers_with("validation.jsonl")
    if len(checked) < 2:
        return ""
    first, last = checked[0], checked[-1]
    start = "starting model" if first == 0 else f"iteration {first}"
    paths = (run.iteration_folder(number) / "validation.jsonl" for number in (first, last))
    pages = [
        (
            text_html(before.task_id),
            f'{messages_html(before.messages)}<div class="pair"><div>{answer_html(before, start)}</div>'
            f"<div>{answer_html(after, f'iteration {last}')}</div></div>",
        )
        for before, after in before_and_after(*paths, HELD_OUT)
    ]
    return "<h3>The same held-out tasks, before and after</h3>" + pager("v", pages) if pages else ""


def _training_pages(run: RunData, number: int) -> list[tuple[str, str]]:
    """Made once for an iteration whose files stay what they are."""
    folder = run.iteration_folder(number)
    stamp = tuple(stamp_of(folder / name) for name in ("rollouts.jsonl", "packed.safetensors", TRAINER_FILE))
    if (known := _PAGES.get(folder)) is not None and known[0] == stamp:
        return known[1]
    samples, table, text = some_samples(folder / "rollouts.jsonl", TRAINING), TokenTable(folder), token_text_of(run, number)
    pages = [
        (
            f"iteration {number} · {text_html(sample.task_id)} · sample {sample.sample}",
            messages_html(sample.messages) + answer_html(sample, "assistant", token_html(sample, table, text)),
        )
        for sample in samples
    ]
    if len(_PAGES) > 12:
        _PAGES.clear()
    _PAGES[folder] = stamp, pages
    return pages


_PAGES: dict[Path, tuple[Any, list[tuple[str, str]]]] = {}


def token_html(sample: Sample, table: TokenTable, text: Callable[[int], str] | None) -> str:
    """The answer as coloured tokens; "" where text says as much: without tokenizer, without ids, with several turns."""
    if text is None or sample.turns or not sample.token_ids or (tokens := table.of(sample)) is None:
        return ""
    if all(token.sampler is None and token.advantage is None for token in tokens):
        return ""
    # Advantages of a group have a standard deviation of 1: beyond 2 the colour is full, so that colours mean the same everywhere.
    return coloured(tokens, text, largest=2.0)
