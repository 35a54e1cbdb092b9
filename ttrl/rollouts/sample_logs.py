"""Write one readable text file per sample: its prompt, answer and result. For people; no program
reads it back.

A streaming answer can be followed in its file (`tail -F`), about a second behind.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrl.records import Sample
from ttrl.rollouts.client.assembly import LiveChoice, LiveCompletion
from ttrl.system import files
from ttrl.text import harmless

logger = logging.getLogger(__name__)

_LONGEST_NAME = 80  # bytes of a task's id within a file name; file systems take 255 for the whole
_RULE = "─" * 100
_LONGEST = 200  # characters of an address, or of a part
LIVE_SECONDS = 1.0
"""Between two updates from a streaming answer: each costs the event loop a small write."""


class SampleLogs:
    """Writes `FOLDER/TASK-ID_SAMPLE.txt` for every sample, atomically, replacing an older file.

    A failed log costs no sample: the first failure is a warning, `num_failed` counts them.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.num_failed = 0
        self.live: dict[Path, LiveAnswers] = {}
        """The request shown live in a file: the newest of its sample."""

    def write(self, sample: Sample, *, number: int | None = None) -> Path:
        """Write one sample and return its file (missing if writing failed).

        number: in the file's name; by default the sample's own. Equal tasks of one call number
            their samples consecutively.
        """
        path = self.path_of(sample, number)
        self.live.pop(path, None)
        with self.failures_counted(path):  # an fsync would hold up the event loop
            files.write_text(path, harmless(sample_text(sample)), durable=False)
        return path

    def path_of(self, sample: Sample, number: int | None = None) -> Path:
        return (
            self.folder
            / f"{file_name(sample.task_id)}_{sample.sample if number is None else number:03d}.txt"
        )

    @contextlib.contextmanager
    def failures_counted(self, path: Path) -> Iterator[None]:
        """Count errors of the operating system inside the block, and warn of the first."""
        try:
            yield
        except OSError as error:
            if not self.num_failed:
                logger.warning(
                    "sample logs: could not write %s: %s; sampling continues without them",
                    path,
                    error.__cause__ or error,
                )
            self.num_failed += 1


class LiveAnswers:
    """An `on_chunk` writing the answers of one request to their samples' files as they arrive.

    messages: the prompt. numbers: of the samples, in the files' names. clock: returns seconds that
    never go back.
    """

    def __init__(
        self,
        logs: SampleLogs,
        samples: Sequence[Sample],
        numbers: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._now = clock
        self._messages = messages
        self._samples = [
            (sample, logs.path_of(sample, number))
            for sample, number in zip(samples, numbers, strict=True)
        ]
        self._completion: LiveCompletion | None = None
        self._shown: dict[int, int] = {}
        """Characters of each choice in its file."""
        self._due = 0.0

    def __call__(self, chunk: Any, completion: LiveCompletion) -> None:
        """Write all text since the last update."""
        now = self._now()
        if completion is not self._completion:  # the first one, or the request is made again
            self._completion = completion
            self._shown = {}
        elif now < self._due:
            return
        self._due = now + LIVE_SECONDS
        for choice in completion.choices[: len(self._samples)]:
            self._show(choice)

    def _show(self, choice: LiveChoice) -> None:
        if choice.index >= len(self._samples):
            return
        (sample, path), shown, logs = (
            self._samples[choice.index],
            self._shown.get(choice.index),
            self._logs,
        )
        thought = choice.message.reasoning or choice.message.reasoning_content
        text = "\n\n".join(part for part in (thought, choice.message.content) if part)
        if shown is None:
            logs.live[path] = self
            head = (
                f"task    {' '.join(sample.task_id.split())}\nsample  {sample.sample}\nbeing "
                "sampled"
            )
            new = "\n\n".join(
                [head, *_messages(self._messages), f"{_title('answer so far')}\n{text}"]
            )
        # The sample may have a later request by now, or have ended.
        elif logs.live.get(path) is self:
            new = text[shown:]
        else:
            return
        self._shown[choice.index] = len(text)
        with logs.failures_counted(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if shown is None else "a", encoding="utf-8") as file:
                file.write(harmless(new))


def file_name(task_id: str) -> str:
    """Return a name valid on any file system. Changed ids get a digest, so no two share a name."""
    clean = re.sub(r"[^A-Za-z0-9.-]+", "_", task_id).strip("._-")[:_LONGEST_NAME]
    # Lower case, because some file systems do not distinguish a from A; the digest does.
    if clean and clean == task_id and clean == clean.lower():
        return clean
    digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    if clean:
        return f"{clean}-{digest}"
    return f"task-{digest}"


def sample_text(sample: Sample) -> str:
    """Return the whole file."""
    parts = [_head(sample)]
    if sample.error:
        parts.append(f"{_title('error')}\n{sample.error}")
    if sample.turns is not None:
        return "\n\n".join(part.rstrip("\n") for part in parts + _turns(sample)) + "\n"
    parts += _messages(sample.messages)
    if sample.finish_reason:
        end = f" ({sample.finish_reason})"
    else:
        end = ""
    parts.append(f"{_title('answer' + end)}\n{sample.text}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _turns(sample: Sample) -> list[str]:
    """Return a conversation of several turns: each turn's new messages and reply."""
    parts = []
    begun = not sample.turns or sample.turns[0].follows is not None
    messages = list(sample.messages) if begun else []
    for number, turn in enumerate(sample.turns or ()):
        if number and turn.follows != number - 1:
            parts.append(
                _title(
                    f"turn {number}: another conversation"
                    if turn.follows is None
                    else f"turn {number}: continues elsewhere"
                )
            )
        messages += turn.messages
        parts += _messages(messages)
        about = [turn.finish_reason or "no finish reason", f"{turn.num_tokens} tokens"]
        about += (
            ["a new sequence"]
            if number and turn.continues is None and turn.prompt_token_ids is not None
            else []
        )
        for name in ("reasoning", "reasoning_content"):
            thought = turn.reply.get(name)
            if isinstance(thought, str):
                parts.append(f"{_title(f'turn {number}: {name}')}\n{thought}")
        title = _title(f"turn {number}: answer ({', '.join(about)})")
        parts.append(f"{title}\n{_message(turn.reply)}")
        messages = []
    return parts + _messages(messages)


def _head(sample: Sample) -> str:
    rows: list[tuple[str, str]] = [("task", sample.task_id), ("sample", str(sample.sample))]
    rows.append(("reward", "none" if sample.reward is None else f"{sample.reward:g}"))
    rows += [(f"  {name}", f"{value:g}") for name, value in sample.metrics.items()]
    rows.append(("finish reason", sample.finish_reason or "unknown"))
    if sample.weights_version >= 0:
        rows.append(("weights version", _versions(sample)))
    if sample.prompt_token_ids is not None:
        rows.append(("prompt tokens", str(len(sample.prompt_token_ids))))
    tokens = sample.logprobs if sample.token_ids is None else sample.token_ids
    if tokens is not None:
        rows.append(("completion tokens", str(len(tokens))))
    known = [logprob for logprob in sample.logprobs or () if not math.isnan(logprob)]
    if known:
        unknown = len(sample.logprobs or ()) - len(known)
        rows.append(
            (
                "mean logprob",
                f"{sum(known) / len(known):.4f}" + (f" ({unknown} unknown)" if unknown else ""),
            )
        )
    if sample.cached:
        rows.append(("from the cache", "yes"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {' '.join(value.split())}" for name, value in rows)


def _versions(sample: Sample) -> str:
    """Return "3", or "2 (120 tokens), 3 (45 tokens)" for a continued sample."""
    if not sample.token_versions:
        return str(sample.weights_version)
    return ", ".join(
        f"{version} ({count} tokens)" for version, count in Counter(sample.token_versions).items()
    )


def _title(text: str) -> str:
    return f"{'── ' + text + ' ':─<{len(_RULE)}}"


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{_title(_role(message))}\n{_message(message)}" for message in messages]


def _role(message: Mapping[str, Any]) -> str:
    name = message.get("name") or message.get("tool_call_id")
    if name:
        return f"{message.get('role', '?')} {name}"
    return str(message.get("role", "?"))


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        blocks = [content]
    else:
        blocks = [_part(part) for part in content or ()]
    blocks += [_tool_call(call) for call in message.get("tool_calls") or ()]
    return "\n".join(block for block in blocks if block) or "(empty)"


def _part(part: Any) -> str:
    """Return one part of a list message: text unchanged, all others by kind and address."""
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text")
    if isinstance(text, str):
        return text
    kind = str(part.get("type", "part"))
    inner = part.get(kind)
    if isinstance(inner, Mapping):
        url = inner.get("url")
    else:
        url = inner
    if isinstance(url, str):
        return f"[{kind}: {_shortened(url)}]"
    return f"[{_shortened(json.dumps(part, ensure_ascii=False, default=str))}]"


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:60]}… ({len(text)} characters)"


def _tool_call(call: Any) -> str:
    if isinstance(call, Mapping):
        function = call.get("function")
    else:
        function = None
    if not isinstance(function, Mapping):
        return f"[tool call {json.dumps(call, ensure_ascii=False, default=str)}]"
    return (
        f"[tool call {call.get('id', '')}] {function.get('name')}({function.get('arguments', '')})"
    )
