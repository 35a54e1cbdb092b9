"""Tokenize a conversation, with borders at the ends of a server's prompts and answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ttrl.data.chat.turns import short
from ttrl.errors import TokenizationError


@dataclass(frozen=True)
class TokensAt:
    """`borders[i]` is the number of tokens before the i-th border."""

    ids: list[int]
    borders: list[int]
    splits: int
    """Borders inside a token; the text before and after is tokenized apart."""


def tokens_at(
    tokenizer: Any,
    text: str,
    borders: Sequence[int],
    ends_of_turn: Sequence[str | None],
    anchor: str,
) -> TokensAt:
    """Return the ids of `text`, with a border between tokens at each of `borders` (characters,
    rising; answers begin at the even ones and end at the odd ones, the last one at the end of
    `text`). `ends_of_turn` has the end-of-turn token of each answer, None if it was cut; `anchor`
    is any special token, as text.

    Each answer's prompt has the same ids as by itself, as sent to a server, unless an earlier
    border was split.

    Raises TokenizationError if the text has no tokens ending at the borders, or an end-of-turn
    token is not one token.
    """
    found = _split_at(tokenizer, text, borders, "") or _split_at(tokenizer, text, borders, anchor)
    if found is None:
        raise TokenizationError(
            "a token of this tokenizer spans the border between prompt and reply in "
            f"{short(text)}, and its two parts would be other tokens; sample with token_ids=True "
            "to train the model's own tokens"
        )
    for (start, end), token in zip(list(pairwise(found.borders))[::2], ends_of_turn, strict=True):
        if end <= start or (
            token is not None and found.ids[end - 1] != tokenizer.convert_tokens_to_ids(token)
        ):
            raise TokenizationError(
                f"the end-of-turn token {token!r} is not a single token of this tokenizer at the "
                "end of a reply"
            )
    return found


def _split_at(tokenizer: Any, text: str, borders: Sequence[int], anchor: str) -> TokensAt | None:
    """Return the tokens with splits at borders; None if splitting adds or loses blanks, as many
    tokenizers put one before any text. With `anchor`, text after a split is tokenized after this
    special token: some tokenizers then add none.
    """
    ids: list[int] = []
    counts: list[int] = []
    begin = splits = 0

    def encode(stop: int) -> tuple[list[int], list[int] | None]:
        ahead = anchor if begin else ""
        found, ends = _encode(tokenizer, ahead + text[begin:stop])
        if not ahead:
            return found, ends
        return found[1:], None if ends is None else [end - len(ahead) for end in ends[1:]]

    run, ends = encode(len(text))
    for number, border in enumerate(borders):
        before, _ = encode(border)
        count = len(before)
        clean = run[:count] == before
        if clean and number % 2 == 0 and count:
            # A special token may take the blanks behind it along: then the prompt's ids are the
            # same, the answer's blanks gone.
            if ends is not None:
                clean = ends[count - 1] <= border - begin
            else:
                found = _blanks_behind(tokenizer, before, run[count:])
                clean = found is not None and found.endswith(_blanks(text[border:]))
        if not clean:
            ids += before
            count = 0
            begin = border
            splits += 1
            run, ends = encode(len(text))
            if _blanks_behind(tokenizer, ids, run) != _blanks(text[border:]):
                return None
        counts.append(len(ids) + count)
    return TokensAt(ids=ids + run, borders=counts, splits=splits)


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[int] | None]:
    """Return ids, and each token's end (characters); None for tokenizers without offsets."""
    if not getattr(tokenizer, "is_fast", False):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]), None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _blanks(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _blanks_behind(tokenizer: Any, before: list[int], behind: list[int]) -> str | None:
    """Return the blanks at the beginning of `behind` as it reads behind `before`; None if the two
    cannot be separated.
    """
    first, both = (
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for ids in (before, before + behind)
    )
    if both.startswith(first):
        return _blanks(both[len(first) :])
    return None
