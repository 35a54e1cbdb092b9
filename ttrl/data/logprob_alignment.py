"""Give each token id the log-probability of the same bytes.

Servers write a token in one of three ways:

    as its bytes            as the API asks
    as U+FFFD               for each part of a character shared by several tokens. Those tokens
                            are lost, but the text shows the place of the next ones
    as in the vocabulary    `æĺ¯` in the byte alphabet of GPT-2, `▁is`: these are ids
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ttrl.errors import TokenizationError

_INCOMPLETE = "\ufffd"
"""The decoding of incomplete characters."""
_LOST = _INCOMPLETE.encode()
_MOST_LOST = 3
"""Bytes behind one U+FFFD, at the most: a whole character has up to four."""
_MOST_RANGES = 64
"""Tokens with more possible places in a text are not aligned any further."""
_ASCII = re.compile(rb"[\x00-\x7f]")


@dataclass(frozen=True)
class _Span:
    """Tokens forming whole characters together, and their bytes."""

    count: int
    text: bytes


class _Range(NamedTuple):
    """Consecutive places of a text, both ends included."""

    first: int
    last: int


def align(
    tokenizer: Any,
    before: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tokens: Sequence[str],
) -> tuple[list[float], int]:
    """Align a server's log-probabilities, given with token strings, with ids of our own.

    before: the last ids of the prompt, because tokens read differently at the start of a text.
    tokens: the bytes of each log-probability's token, as Latin-1 text.

    Returns a value for each id, and the number of ids without one. An id and a log-probability with
    the same bytes at the same place belong together, as long as all bytes before them agree. Parts
    of a character get none.
    """
    said = [token.encode("latin-1") for token in tokens[: len(logprobs)]]
    ours = _spans(tokenizer, before, token_ids)
    found = _by_bytes(ours, [_Span(1, text) for text in said], logprobs)
    if None in found:
        ids = _vocabulary_ids(tokenizer, said)
    else:
        ids = None
    if ids is not None:
        same = _by_bytes(ours, _spans(tokenizer, before, ids), logprobs)
        for number, (own, their) in enumerate(zip(token_ids, ids, strict=False)):
            if own != their:
                break
            same[number] = logprobs[number]
        found = min(found, same, key=lambda values: values.count(None))
    values = [math.nan if value is None else value for value in found]
    return values, found.count(None)


def _by_bytes(
    ours: Sequence[_Span],
    theirs: Sequence[_Span],
    logprobs: Sequence[float],
) -> list[float | None]:
    """Return a log-probability for each of our tokens; None for one without."""
    text = b"".join(span.text for span in ours)
    known: dict[tuple[int, int], float] = {}
    number = 0
    for span, begin in zip(theirs, _places(text, [span.text for span in theirs]), strict=True):
        if begin is not None and span.count == 1:
            known[begin, begin + len(span.text)] = logprobs[number]
        number += span.count
    found: list[float | None] = []
    begin = 0
    for span in ours:
        end = begin + len(span.text)
        found += [known.get((begin, end)) if span.count == 1 else None] * span.count
        begin = end
    return found


def _vocabulary_ids(tokenizer: Any, said: Sequence[bytes]) -> list[int] | None:
    """Return the ids of tokens written as in the vocabulary; None if one of them is not."""
    ids = []
    for text in said:
        string = text.decode("utf-8", "replace")
        token = tokenizer.convert_tokens_to_ids(string)
        if token is None or tokenizer.convert_ids_to_tokens(token) != string:
            return None
        ids.append(token)
    return ids


def _places(text: bytes, parts: Sequence[bytes]) -> list[int | None]:
    """Return the beginnings of consecutive parts in `text`.

    A part gets None if it is empty, holds lost bytes or fits several places, and so do all parts
    behind the first mismatch.
    """
    begins = [[_Range(0, 0)]]
    for part in parts:
        following = _ends(text, begins[-1], part)
        if not following or len(following) > _MOST_RANGES:
            break
        begins.append(following)
    placed = len(begins) - 1
    both_end = placed == len(parts) and any(one.last == len(text) for one in begins[-1])
    if both_end:
        begins[-1] = [_Range(len(text), len(text))]
    for number in range(placed - 1, -1, -1):
        begins[number] = _leading_to(begins[number + 1], begins[number], parts[number])
    found: list[int | None] = [None] * len(parts)
    for number, part in enumerate(parts[:placed]):
        ranges = begins[number]
        is_certain = len(ranges) == 1 and ranges[0].first == ranges[0].last
        if is_certain and part and _LOST not in part:
            found[number] = ranges[0].first
    return found


def _ends(text: bytes, begins: list[_Range], part: bytes) -> list[_Range]:
    """Return the ends of a part, given the ranges of its beginnings."""
    ranges = begins
    for number, piece in enumerate(part.split(_LOST)):
        if number:
            ranges = _joined(lost for one in ranges for lost in _ends_of_lost(text, one))
        if piece:
            ends = [at + len(piece) for one in ranges for at in _occurrences(text, piece, one)]
            ranges = _joined(_Range(end, end) for end in ends)
    return ranges


def _ends_of_lost(text: bytes, begin: _Range) -> list[_Range]:
    """Return the ends of one U+FFFD: behind one to three bytes, none of them ASCII."""
    ascii_byte = _ASCII.search(text, begin.first)
    stop = len(text)
    if ascii_byte is not None:
        stop = ascii_byte.start()
    last = min(begin.last + _MOST_LOST, stop)
    if last <= begin.first:
        return []
    return [_Range(begin.first + 1, last)]


def _occurrences(text: bytes, piece: bytes, begin: _Range) -> list[int]:
    """Return the places of a piece, given the range of its beginning."""
    found = []
    stop = begin.last + len(piece)
    at = text.find(piece, begin.first, stop)
    while at >= 0:
        found.append(at)
        at = text.find(piece, at + 1, stop)
    return found


def _leading_to(ends: list[_Range], begins: list[_Range], part: bytes) -> list[_Range]:
    """Return the places among `begins` with a way to one of the `ends`."""
    lost = part.count(_LOST)
    least = len(part) - lost * (len(_LOST) - 1)
    most = least + lost * (_MOST_LOST - 1)
    kept = []
    for begin in begins:
        for end in ends:
            first = max(begin.first, end.first - most)
            last = min(begin.last, end.last - least)
            if first <= last:
                kept.append(_Range(first, last))
    return _joined(kept)


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    """Return the same places, in order, as ranges with gaps between them."""
    joined: list[_Range] = []
    for one in sorted(ranges):
        if joined and one.first <= joined[-1].last + 1:
            joined[-1] = _Range(joined[-1].first, max(joined[-1].last, one.last))
        else:
            joined.append(one)
    return joined


def _spans(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> list[_Span]:
    """Return ids and their bytes. Ids sharing a character are grouped; parts never completing one
    are a group of their own."""
    spans: list[_Span] = []
    ids = [*before[-1:], *token_ids]
    begin = first = len(before[-1:])

    def text(ids: list[int]) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    # Decodes the id before the span too, to keep a blank at its beginning.
    known = text(ids[:begin])
    broken = ""
    for end in range(begin + 1, len(ids) + 1):
        whole = text(ids[first - 1 if first else 0 : end])
        if whole.endswith(_INCOMPLETE) and end < len(ids):
            broken = whole
            continue
        if first < end - 1 and whole.startswith(broken):
            spans.append(_Span(end - 1 - first, broken[len(known) :].encode()))
            first = end - 1
            known = broken
        spans.append(_Span(end - first, whole[len(known) :].encode()))
        first = end
        known = text(ids[end - 1 : end])
    return spans


def check_strings(
    where: str,
    tokenizer: Any,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tokens: Sequence[str],
) -> tuple[list[float], int]:
    """Return a server's log-probabilities, NaN for each token id not matching the server's token
    string, and the number of mismatches.

    Blanks at the ends are not compared, nor tokens without a whole character: servers write them in
    different ways. A token may be written as in the vocabulary (`æĺ¯`).

    Raises TokenizationError if most mismatch: ids and log-probabilities are then out of step.
    """
    if len(tokens) != len(token_ids):
        raise TokenizationError(
            f"{where}: {len(token_ids)} token ids, but {len(tokens)} token strings of logprobs"
        )
    checked = list(logprobs)
    wrong = []
    compared = 0
    for number, (token, string) in enumerate(zip(token_ids, tokens, strict=True)):
        ours = tokenizer.decode([token], skip_special_tokens=False)
        theirs = string.encode("latin-1").decode("utf-8", "replace")
        if theirs.startswith("token_id:"):  # vLLM's return_tokens_as_token_ids
            ours = f"token_id:{token}"
        if _INCOMPLETE in ours or _INCOMPLETE in theirs or not theirs.strip():
            continue
        compared += 1
        if ours.strip() != theirs.strip() and theirs != tokenizer.convert_ids_to_tokens(token):
            wrong.append((number, token, ours, theirs))
            checked[number] = math.nan
    if 2 * len(wrong) > compared:
        number, token, ours, theirs = wrong[0]
        raise TokenizationError(
            f"{where}: {len(wrong)} of {compared} tokens differ from those of their logprobs: "
            f"token {number} has id {token}, which is {ours!r}, but its logprob is for {theirs!r}. "
            "The server's ids and logprobs are out of step, or the tokenizer belongs to another "
            "model"
        )
    return checked, len(wrong)
