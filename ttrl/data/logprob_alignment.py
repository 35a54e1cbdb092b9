"""Which of a server's log-probabilities belongs to which token id: the one of exactly the same bytes, in the same place."""

import math
from collections.abc import Sequence
from typing import Any

from ttrl.errors import TokenizationError

_INCOMPLETE = "\ufffd"
"""What bytes decode to that are not a whole character."""


def align(
    tokenizer: Any, before: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float], tokens: Sequence[str]
) -> tuple[list[float], int]:
    """Align the log-probabilities of a server that gave token strings with ids that we made; return one for each id, and how many
    ids have none.

    before: the last ids of the prompt, as tokens read differently at the beginning of a text. tokens: the bytes of each
    log-probability's token, as Latin-1 text.

    Both texts are cut into their tokens. Where an id and a log-probability have the same bytes at the same place, and all bytes
    before them agree, they belong together. Bytes that are not a whole character are not attributed.
    """
    parts = [token.encode("latin-1") for token in tokens[: len(logprobs)]]
    theirs, place = {}, 0
    for part, logprob in zip(parts, logprobs, strict=False):
        if part:
            theirs[place, place + len(part)] = logprob
        place += len(part)
    spans = _spans(tokenizer, before, token_ids)
    ours, said = b"".join(text for _, text in spans), b"".join(parts)
    same = next((i for i, (a, b) in enumerate(zip(ours, said, strict=False)) if a != b), min(len(ours), len(said)))
    found: list[float] = []
    unaligned = place = 0
    for count, text in spans:
        end = place + len(text)
        known = theirs.get((place, end)) if count == 1 and end <= same else None
        unaligned += count if known is None else 0
        found += [math.nan if known is None else known] * count
        place = end
    return found, unaligned


def _spans(tokenizer: Any, before: Sequence[int], token_ids: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return (number of ids, their bytes) one after another; ids that are not whole characters by themselves are grouped."""
    spans: list[tuple[int, bytes]] = []
    ids = [*before[-1:], *token_ids]
    begin = first = len(before[-1:])

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    known = text(ids[:begin])  # of the id before the span, so that a blank at its beginning is not left out
    for end in range(begin + 1, len(ids) + 1):
        whole = text(ids[first - 1 if first else 0 : end])
        if whole.endswith(_INCOMPLETE) and end < len(ids):
            continue
        spans.append((end - first, whole[len(known) :].encode()))
        first, known = end, text(ids[end - 1 : end])
    return spans


def check_strings(
    where: str, tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[float], tokens: Sequence[str]
) -> tuple[list[float], int]:
    """Return the log-probabilities of a server that gave ids and token strings, NaN where the two are different tokens, and how
    many are.

    Blanks at the ends are not compared, nor tokens that are not a whole character, which servers write in different ways.

    Raises TokenizationError where most are not: then ids and log-probabilities are out of step.
    """
    if len(tokens) != len(token_ids):
        raise TokenizationError(f"{where}: {len(token_ids)} token ids, but {len(tokens)} token strings of logprobs")
    checked, wrong, compared = list(logprobs), [], 0
    for number, (token, string) in enumerate(zip(token_ids, tokens, strict=True)):
        ours = tokenizer.decode([token], skip_special_tokens=False)
        theirs = string.encode("latin-1").decode("utf-8", "replace")
        if theirs.startswith("token_id:"):  # vLLM's return_tokens_as_token_ids
            ours = f"token_id:{token}"
        if _INCOMPLETE in ours or _INCOMPLETE in theirs or not theirs.strip():
            continue
        compared += 1
        if ours.strip() != theirs.strip():
            wrong.append((number, token, ours, theirs))
            checked[number] = math.nan
    if 2 * len(wrong) > compared:
        number, token, ours, theirs = wrong[0]
        raise TokenizationError(
            f"{where}: {len(wrong)} of {compared} tokens differ from those of their logprobs: token {number} has id {token}, "
            f"which is {ours!r}, but its logprob is for {theirs!r}; the server's ids and logprobs are out of step, "
            "or the tokenizer is another model's"
        )
    return checked, len(wrong)
