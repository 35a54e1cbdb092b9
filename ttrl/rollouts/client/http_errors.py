"""Turn failed requests into RequestErrors: refusals in the server's own words, timeouts, broken
connections.
"""

import datetime
import email.utils
import math
import re
from collections.abc import AsyncIterable, Mapping

from ttrl.errors import RequestError
from ttrl.rollouts.client.wire import loads, object_of
from ttrl.text import gib, one_line

_NO_PARSER = re.compile(r"tool[ _]choice.* requires .*--tool-call-parser to be set")
_NAME_A_PARSER = (
    "this server has no parser for the model's tool calls, and a request with tools needs one; "
    "the server's log has ttrl's reason. If the model's chat template shows no tools, set "
    "chat_template to one with tools (docs/how-to/chat_templates.md). Otherwise name a parser, "
    'such as hermes: server={"tool_call_parser": "hermes"} in a run, server_args '
    "(--server-args) elsewhere, --vllm tool_call_parser=hermes for `ttrl serve`"
)


def root_of(base_url: str) -> str:
    """Return the address above /v1."""
    return base_url.removesuffix("/v1")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a server asks to wait, given as a number or a date."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) / unit
        except ValueError:
            try:
                date = email.utils.parsedate_to_datetime(value)
            except ValueError:
                continue
            if date.tzinfo is None:
                date = date.replace(tzinfo=datetime.UTC)
            seconds = max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
        if 0.0 <= seconds < math.inf:
            return seconds
    return None


def status_error(
    place: str,
    status: int,
    body: bytes,
    headers: Mapping[str, str],
    secret: str = "",
    *,
    address: bool = False,
) -> RequestError:
    """Return a refusal in the server's own words; for an `address` with a hint at its likely
    mistake.
    """
    parsed = loads(body)
    error = object_of(parsed).get("error", parsed)
    words = object_of(error).get("message") or object_of(error).get("detail")
    text = one_line(words or error or body.decode(errors="replace") or "no words")
    if _NO_PARSER.search(text):
        text = f"{_NAME_A_PARSER} (vLLM: {text})"
    if len(secret) >= 8:
        text = text.replace(secret, "…")  # some servers repeat the refused key
    if address and status == 401 and "OPENAI_API_KEY" not in text:
        text += " (an address's key comes from OPENAI_API_KEY)"
    if address and status == 404 and not place.rstrip("/").endswith("/v1") and "/v1" not in text:
        text += " (most addresses end in /v1)"
    return RequestError(
        f"{place}: HTTP {status}: {text}", "status", status=status, retry_after=retry_after(headers)
    )


def timeout_error(place: str, seconds: float | None) -> RequestError:
    if seconds is not None:
        shown = f"{seconds:g} s"
    else:
        shown = "unknown length"
    return RequestError(f"{place}: no answer within the client's timeout of {shown}", "timeout")


def connection_error(place: str, error: BaseException | str) -> RequestError:
    if isinstance(error, str):
        why = error
    else:
        why = f"{type(error).__name__}: {error}"
    return RequestError(
        f"{place}: no connection: {one_line(why)}; check that the server is running", "connection"
    )


def too_large(place: str, most: int) -> RequestError:
    """Return the error of an answer larger than any expected one."""
    return RequestError(
        f"{place}: the server's answer is larger than {gib(most)}, the limit for this request",
        "malformed",
    )


async def collected(parts: AsyncIterable[bytes], most: int, place: str) -> bytes:
    """Join the parts of a body. Raises RequestError for more than `most` bytes: a server may send
    without end.
    """
    found = []
    size = 0
    async for part in parts:
        size = size + len(part)
        if size > most:
            raise too_large(place, most)
        found.append(part)
    return b"".join(found)
