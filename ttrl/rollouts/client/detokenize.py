"""Get the exact text of token ids from a vLLM server's own tokenizer over HTTP.

Two answers of vLLM are not exact text by themselves:

- POST /detokenize decodes whole lists and includes special tokens; a completion's text omits them.
  No endpoint lists the special ids. But a completion limited to one such token
  (`allowed_token_ids`) has an empty text.
- A completion's text is made token by token: bytes of an incomplete character are held back, and so
  is the end of a stream if it might become a stop string. A completion *beginning* in the middle of
  a character begins, in vLLM 0.32, with the whole prompt's text.

The other direction matters for prompts sent as text: vLLM puts the tokenizer's special tokens
before them (`<bos>`), even if the text begins with the same tokens. `brings_beginning` finds such
texts.
"""

import asyncio
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.errors import RequestError, TokenizationError
from ttrl.records import tokens_before
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import loads
from ttrl.text import one_line

logger = logging.getLogger(__name__)

INCOMPLETE = "\ufffd"
"""The decoded form of incomplete characters: vLLM holds a text back while it ends with this."""

PROMPTS = 64
"""Prompts with remembered text, per server."""


class ServerTokenizer:
    """One server's tokenizer with a cache of answers. `of` gives the same one for the same
    transport.
    """

    def __init__(self, transport: Transport, model: str) -> None:
        # The transport is the key of `_tokenizers`: a strong reference to it would keep it there
        # forever.
        self._transport = weakref.ref(transport)
        self._model = model
        self._special: dict[int, bool] = {}
        self._strings: dict[int, str] = {}
        self._prompts: dict[tuple[int, ...], str] = {}
        self._context: int | None = None
        self._asked_context = False
        self._beginning: str | None = None
        self._asking_beginning = asyncio.Lock()

    @classmethod
    def of(cls, transport: Transport, model: str) -> "ServerTokenizer":
        """Return the tokenizer of the server behind a transport."""
        known = _tokenizers.get(transport)
        if known is None or known._model != model:
            known = _tokenizers[transport] = cls(transport, model)
        return known

    def _server(self) -> Transport:
        transport = self._transport()
        assert transport is not None, "a ServerTokenizer outlived its transport"
        return transport

    async def context(self) -> int | None:
        """Return the longest sequence, prompt and completion, in tokens; None if the server does
        not say. Raises RequestError.
        """
        if not self._asked_context:
            answer = _decoded(await self._server().get("/models"))
            for model in answer.get("data") or ():
                if (
                    isinstance(model, dict)
                    and model.get("id") == self._model
                    and isinstance(model.get("max_model_len"), int)
                ):
                    self._context = model["max_model_len"]
            self._asked_context = True
        return self._context

    async def brings_beginning(self, prompt: str) -> bool:
        """Return whether a text begins with the special tokens this server puts before texts;
        `add_special_tokens` would double them. Raises RequestError.
        """
        async with self._asking_beginning:
            if self._beginning is None:
                self._beginning = await self._added_before_texts()
        return self._beginning != "" and prompt.startswith(self._beginning)

    async def _added_before_texts(self) -> str:
        server = self._server()
        answers = []
        try:
            for add in (True, False):
                body = {"model": self._model, "prompt": "a", "add_special_tokens": add}
                answers.append(_decoded(await server.post("/tokenize", body, root=True)))
        except RequestError as error:
            if error.worth_retry:
                raise
            logger.warning(
                "%s does not report its tokens before prompts; prompts with a first token such as "
                "<bos> may get it twice: %s",
                server.base_url,
                error,
            )
            return ""
        marked, plain = (answer.get("tokens") or [] for answer in answers)
        return await self.raw(tokens_before(marked, plain))

    async def raw(self, ids: Sequence[int]) -> str:
        """Decode all ids together, special tokens written out. Raises RequestError."""
        if not ids:
            return ""
        server = self._server()
        body = {"model": self._model, "tokens": list(ids)}
        text = _decoded(await server.post("/detokenize", body, root=True)).get("prompt")
        if not isinstance(text, str):
            raise RequestError(f"{server.base_url}: /detokenize returned no text", "malformed")
        return text

    async def is_special(self, token: int) -> bool:
        """Return whether a completion's text omits this token. Raises RequestError."""
        if token not in self._special:
            body = {
                "model": self._model,
                "prompt": [token],
                "max_tokens": 1,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            # A stop token is part of the text only on request.
            body |= {
                "allowed_token_ids": [token],
                "return_token_ids": True,
                "include_stop_str_in_output": True,
            }
            answer = _decoded(await self._server().post("/completions", body))
            choice = answer["choices"][0]
            if choice.get("token_ids") != [token]:
                raise RequestError(
                    f"{self._server().base_url}: asked for token {token}, but it sent another",
                    "malformed",
                )
            self._special[token] = choice["text"] == "" and await self._string(token) != ""
        return self._special[token]

    async def _prompt_text(self, prompt: Sequence[int]) -> str:
        """Return `raw`, remembered: all samples of a group have the same prompt."""
        key = tuple(prompt)
        if key not in self._prompts:
            text = await self.raw(prompt)
            while len(self._prompts) >= PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = text
        return self._prompts[key]

    async def _string(self, token: int) -> str:
        if token not in self._strings:
            self._strings[token] = await self.raw([token])
        return self._strings[token]

    async def text(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        begins: str,
        *,
        skip_special: bool,
        place: str,
    ) -> str:
        """Return the text of `ids` after `prompt`, including an unfinished character at the end
        (then it ends with INCOMPLETE).

        begins: the known text, exactly; the ids must agree with it.
        skip_special: the request's skip_special_tokens.

        Raises TokenizationError if they disagree, RequestError if the server cannot be asked.
        """
        base = await self._prompt_text(prompt)
        while True:
            if skip_special:
                kept = [i for i in ids if not self._special.get(i, False)]
            else:
                kept = list(ids)
            whole = await self.raw([*prompt, *kept])
            text = whole[len(base) :]
            agrees = whole.startswith(base) and text.startswith(begins)
            if not skip_special:
                break
            # A remaining special token shows behind the known text, or at the first difference.
            candidates = [i for i in dict.fromkeys(kept) if i not in self._special]
            strings = {
                i: await self._string(i)
                for i in (candidates if not agrees else _tail(candidates, ids, text, begins))
            }
            seen = [
                i
                for i, string in strings.items()
                if string and INCOMPLETE not in string and _shows(string, text, begins)
            ]
            for i in seen:
                await self.is_special(i)
            # No other sample has found one meanwhile.
            if not any(self._special.get(i, False) for i in kept):
                break
        if not agrees:
            raise TokenizationError(
                f"{place}: the text of its first {len(ids)} tokens ends with {begins[-60:]!r}, but "
                f"the server decodes them to …{text[-60:]!r}; a completion cannot be continued if "
                "its text does not match its ids (check for a reasoning parser)"
            )
        return text

    async def shown(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        begins: str,
        *,
        skip_special: bool,
        place: str,
    ) -> str:
        """Return the server's text for `ids`: `text`, without the unfinished character at its
        end.
        """
        count = len(ids)
        while True:
            text = await self.text(
                prompt, ids[:count], begins, skip_special=skip_special, place=place
            )
            if not text.endswith(INCOMPLETE):
                return text
            count -= 1


_tokenizers: "weakref.WeakKeyDictionary[Transport, ServerTokenizer]" = weakref.WeakKeyDictionary()


def _tail(candidates: list[int], ids: Sequence[int], text: str, begins: str) -> list[int]:
    """Return the possible origins of the text behind the known part: a character has at most 4
    bytes.
    """
    behind = len(text) - len(begins)
    if not behind:
        return []
    last = set(ids[-4 * (behind + 1) :])
    return [i for i in candidates if i in last]


def _shows(string: str, text: str, begins: str) -> bool:
    """Return whether `string` in `text` overlaps or follows the first difference from the known
    text.

    A special token within a character leaves the bytes before it unfinished: there they stand
    before the token.
    """
    parts = next(
        (k for k, (a, b) in enumerate(zip(text, begins, strict=False)) if a != b),
        min(len(text), len(begins)),
    )
    unfinished = len(text[parts:]) - len(text[parts:].lstrip(INCOMPLETE))
    if text.startswith(begins):
        until = len(text)
    else:
        until = parts + unfinished + len(string)
    return string in text[max(0, parts - len(string) + 1) : until]


def _decoded(body: bytes) -> Mapping[str, Any]:
    answer = loads(body)
    if not isinstance(answer, dict):
        raise RequestError(
            f"the server's answer cannot be read: {one_line(body.decode(errors='replace'))}",
            "malformed",
        )
    return answer
