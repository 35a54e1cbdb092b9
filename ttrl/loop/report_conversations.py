"""The report's conversations: the same held-out tasks before and after, training samples of the first and last iteration."""

import json
from collections.abc import Iterable
from typing import Any

from ttrl.loop.charts import compact
from ttrl.loop.report_data import RunData, before_and_after, examples, read_samples
from ttrl.loop.report_html import folded, section, text_html
from ttrl.records import Sample


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or message.get("tool_calls") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _messages(messages: Iterable[Any], kind: str = "prompt") -> str:
    return "".join(
        f'<div class="role">{text_html(message.get("role", "?"))}</div>{folded(_content(message), kind)}'
        for message in messages
        if isinstance(message, dict)
    )


def _turns(sample: Sample) -> str:
    """What was said up to the last reply, without the task's messages."""
    turns = sample.turns or []
    return "".join(
        _messages(turn.messages) + (_messages([turn.reply], "answer") if number < len(turns) - 1 else "")
        for number, turn in enumerate(turns)
    )


def _answer(sample: Sample, label: str) -> str:
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
    body = folded(sample.text, "answer") if sample.text else '<div class="answer empty">(empty answer)</div>'
    if sample.error:
        body += f'<div class="error">{folded(sample.error, "trace")}</div>'
    return f'{_turns(sample)}<div class="role">{label}</div>{body}<p class="facts">{" · ".join(facts)}</p>'


def conversations(run: RunData) -> str:
    body = ""
    checked = run.numbers_with("validation.jsonl")
    if len(checked) > 1:
        first, last = checked[0], checked[-1]
        samples = (read_samples(run.iteration_folder(one) / "validation.jsonl") for one in (first, last))
        start = "starting model" if first == 0 else f"iteration {first}"
        cards = [
            f'<article>{_messages(before.messages)}<div class="pair"><div>{_answer(before, start)}</div>'
            f"<div>{_answer(after, f'iteration {last}')}</div></div></article>"
            for before, after in before_and_after(*samples)
        ]
        if cards:
            body += "<h3>The same held-out tasks, before and after</h3>" + f'<div class="cards">{"".join(cards)}</div>'
    sampled = run.numbers_with("rollouts.jsonl")
    for name, iteration in (
        (("first", sampled[0]), ("last", sampled[-1])) if len(sampled) > 1 else [("only", one) for one in sampled]
    ):
        chosen = examples(read_samples(run.iteration_folder(iteration) / "rollouts.jsonl"))
        if chosen:
            cards = [
                f'<article><p class="task">{text_html(one.task_id)}</p>{_messages(one.messages)}'
                f"{_answer(one, 'assistant')}</article>"
                for one in chosen
            ]
            body += f'<h3>Training samples of the {name} iteration ({iteration})</h3><div class="cards">{"".join(cards)}</div>'
    return section("Conversations", body, "Taken at even distances from the files, not chosen by how good they are.")
