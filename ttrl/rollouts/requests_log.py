"""Log one JSON line per request to a server: its content, server, cost and outcome. Describe its
span.
"""

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ttrl.messages import JsonObject
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.choices import writable
from ttrl.system.files import append_jsonl
from ttrl.system.object_store import redact
from ttrl.system.tracing import Span

log = logging.getLogger(__name__)

MAX_ERROR_LENGTH = 2000


class RequestsLog:
    """Appends to one file; safe for several threads and tasks. Lines are written whole, so several
    processes may share it.

    A failed write costs only its line: the first is reported, and nothing is raised into a rollout.
    """

    # One for all: validation and rollouts write to one file, through separate logs.
    _lock = threading.Lock()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._whole = False  # whether the file is known to end with a newline
        self._reported = False

    def __repr__(self) -> str:
        return f"RequestsLog({str(self.path)!r})"

    def append(
        self,
        *,
        base_url: str,
        model: str,
        digest: str,
        samples: Sequence[int],
        hit: bool,
        prompt_tokens: int | None = None,
        cached_prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        seconds: float = 0.0,
        error: BaseException | str | None = None,
    ) -> None:
        """Append a line.

        base_url: the server's; credentials in it are removed. digest: the request's
            (`request_digest`), as in the cache.
        samples: the numbers of the requested samples. hit: whether the cache served them, without a
            request.
        tokens: counted by the server for all samples together; None if it did not say. seconds:
            from start to end.
        """
        if isinstance(error, BaseException):
            error = f"{type(error).__name__}: {error}"
        row = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "base_url": writable(redact(base_url)),
            "model": writable(model),
            "digest": digest,
            "samples": list(samples),
            "hit": hit,
            "prompt_tokens": prompt_tokens,
            "cached_prompt_tokens": cached_prompt_tokens,
            "completion_tokens": completion_tokens,
            "seconds": round(seconds, 4),
            "error": None if error is None else writable(redact(error))[:MAX_ERROR_LENGTH],
        }
        try:
            with self._lock:
                self._write(row)
        except OSError as failure:
            if not self._reported:
                self._reported = True
                log.warning(
                    "requests log %s cannot be written: %s. The run continues without it.",
                    self.path,
                    failure,
                )

    def _write(self, row: JsonObject) -> None:
        # A killed process may have left half a line; it must not end up in the middle of the file.
        if not self._whole:
            append_jsonl(self.path, row)
            self._whole = True
            return
        # In one write, without looking at the file: `append_jsonl` could mistake another process's
        # unfinished line for half a line.
        line = (json.dumps(row, allow_nan=False) + "\n").encode("ascii")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._whole = os.write(descriptor, line) == len(line)  # a full disk takes a part of it
        finally:
            os.close(descriptor)


def describe_request(
    traced: Span, request: ChatRequest, n: int, base_url: str, facts: Mapping[str, Any]
) -> None:
    """Set what a span tells of a request for `n` samples, by the GenAI semantic conventions.

    facts: the tokens, as for `RequestsLog.append`.
    """
    if not traced.records:
        return
    server = urlsplit(base_url)
    parameters = request.parameters
    traced.set(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",  # the protocol, whoever answers
            "gen_ai.request.model": request.model,
            "gen_ai.request.choice.count": n,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": parameters.get("temperature"),
            "gen_ai.request.top_p": parameters.get("top_p"),
            "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
            "gen_ai.usage.cache_read.input_tokens": facts.get("cached_prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.get("completion_tokens"),
            "server.address": server.hostname,
            "server.port": server.port,
        }
    )
