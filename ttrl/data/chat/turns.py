"""Find the model's text in a rendered conversation, for any chat template, by rendering.

Trained text must be the model's own continuation at its place. So for each assistant message:

    prompt     the messages before it, rendered as a server renders them to be answered
    answered   the messages up to it, rendered

`answered` must begin with `prompt`; the rest is the answer, up to its end-of-turn token: the last
special token behind the answer's own text, present with or without a following message. Later text
(a newline, an end-of-text token) was not sampled. The answer must hold the message's texts
unchanged but for blanks at their ends (`ttrl.data.chat.probe`). And the trained rendering must
begin with `answered`: if a template rewrites an earlier turn, because it strips its thinking or
moves the system prompt, the turn is not trained there, and its reason says so; it can be trained in
a rendering of its own (`ttrl.data.chat.templates.tokenize_chat_turns`).

Some templates write another prompt once it is answered: without the system prompt, with other
blanks, without the empty thinking of `enable_thinking=False`. A plain text then follows the sent
prompt, if both lead up to it in the same way.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ttrl.data.chat.probe import Probe, ending_probe, make_probe
from ttrl.data.chat.rendering import REASONING_KEYS, ChatTemplate, unsayable
from ttrl.errors import TemplateRefusalError
from ttrl.messages import Message, text_of, texts_of

# Skipped thinking at the end of prompts: <think>\n\n</think>, <|channel>thought\n<channel|>.
_EMPTY_BLOCKS = re.compile(r"(?:<\W{0,2}(\w+)\W{0,2}>\s*\w*\s*<\W{0,2}\1\W{0,2}>\s*)+\Z")


@dataclass(frozen=True)
class ChatAnswer:
    """An assistant message in its own context: the server's prompt, and the model's text."""

    message: int
    """Its place in the conversation, from 0."""
    start: int = 0
    """Characters of the prompt."""
    text: str = ""
    """The prompt and the answer, up to the end of the end-of-turn token."""
    end_of_turn: str = ""
    written: bool = True
    """Whether the template ever writes `text`: not if it writes another prompt or end after the
    answer.
    """
    reason: str | None = None
    """Why it cannot be found; None if it can."""

    def reason_within(self, whole: str) -> str | None:
        """Say why it cannot be trained in `whole`, a rendering of the conversation or of more of
        it; None if it can.
        """
        if self.reason is not None or whole.startswith(self.text):
            return self.reason
        if not whole.startswith(self.text[: self.start]):
            return (
                "the template renders the text before it differently once the conversation "
                "continues"
            )
        later = whole[self.start :][: len(self.text) - self.start]
        return (
            f"the template renders it differently once the conversation continues: {short(later)}, "
            f"not {short(self.text)}"
        )


def short(text: str) -> str:
    """Return the end of a text, for messages."""
    return repr(text if len(text) <= 60 else "…" + text[-60:])


class TurnFinder:
    """Finds the answers of one conversation. `messages` are `template.prepared(given)`.

    `stop_tokens` are the model's stop tokens, if known (`eos_token_id` of generation_config.json,
    as text); an end-of-turn token must then be one of them.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        given: Sequence[Message],
        stop_tokens: Collection[str] | None = None,
    ) -> None:
        self.template = template
        self.messages = messages
        self._given = given
        self._stops = stop_tokens
        written = json.dumps(messages, default=str, ensure_ascii=False) + template.source
        self._unused = next(word for n in range(10**6) if (word := f"kJ{n}w") not in written)
        self._special = _any_of(special_strings(template.tokenizer))
        if stop_tokens is None:
            self._ends = self._special
        else:
            self._ends = _any_of(stop_tokens)

    def answers(self) -> list[ChatAnswer]:
        return [
            self._answer(i)
            for i, message in enumerate(self.messages)
            if message.get("role") == "assistant"
        ]

    def end_of_turn(self, place: int) -> str | None:
        """Return the token ending a plain answer at this place in the conversation; None if there
        is none.
        """
        before = self.messages[:place]
        probe = self._plain()
        probed = self.template.render([*before, probe.message], answer_next=False)
        prompt = self.template.render(before, answer_next=True)
        is_open = prompt == self.template.render(before, answer_next=False)
        behind = probe.after_last_mark(probed)
        if behind is None:
            end = None
        else:
            end = self._ending(place, probe, probed[behind:], 0, is_open)
        if end is None:
            return None
        return end[1]

    def _answer(self, place: int) -> ChatAnswer:
        try:
            return self._found(place)
        except TemplateRefusalError as error:
            return ChatAnswer(place, reason=str(error))

    def _found(self, place: int) -> ChatAnswer:
        def no(reason: str) -> ChatAnswer:
            return ChatAnswer(place, reason=reason)

        template = self.template
        before = self.messages[:place]
        message = self.messages[place]
        if not before:
            return no("no message comes before it, so there was no prompt")
        lack = unsayable(self._given[place])
        if lack is not None:
            return no(lack)
        prompt = template.render(before, answer_next=True)
        answered = template.render([*before, message], answer_next=False)
        is_open = prompt == template.render(before, answer_next=False)
        if is_open and (header := self._header(before, prompt)).strip():
            return no(
                f"the template ignores add_generation_prompt and puts {header!r} before each "
                "reply, but a server would not send it; add it at the template's end, under {% "
                "if add_generation_prompt %}"
            )
        probe = make_probe(message, self._unused)
        found = self._special.search(
            json.dumps(probe.message.get("tool_calls"), default=str, ensure_ascii=False)
        )
        if found:
            return no(f"the names in its tool calls hold the special token {found[0]!r}")
        probed = template.render([*before, probe.message], answer_next=False)
        begin: int | None = len(prompt)
        if not answered.startswith(prompt) or not probed.startswith(prompt):
            begin = self._plain_text_begins(message, probe, probed, prompt)
        if begin is None:
            same = _common(prompt, answered)
            return no(
                f"the template renders the prompt as {short(prompt)} before a reply, but the "
                f"answered conversation continues with {answered[same : same + 40]!r} after "
                f"{short(answered[:same])}"
            )
        part = probe.missing(probed[begin:]) or self._unmarked_call_missing(
            before, message, answered
        )
        if part is not None:
            return no(f"the template leaves out its {part}: {short(answered[begin:])}")
        if not probe.restores(probed, answered):
            return no(f"the template changes its text to {short(answered[begin:])}")
        ending = ending_probe(probe, self._unused)
        if ending is not probe:
            probe = ending
            probed = template.render([*before, ending.message], answer_next=False)
        behind = probed[probe.after_last_mark(probed) or begin :]
        behind = answered[max(begin, len(answered) - _common(behind[::-1], answered[::-1])) :]
        end = self._ending(place, probe, behind, begin, is_open)
        if end is None:
            wanted = "special token of the tokenizer"
            if self._stops is not None:
                wanted = f"token of {sorted(self._stops)}"
            return no(
                f"the template puts {behind!r} after the reply, with no {wanted} in it; without an "
                "end-of-turn token, the model would never learn to stop. Set stop_tokens to the "
                "model's own"
            )
        closing, token = end
        text = prompt + answered[begin : len(answered) - len(behind)] + closing
        inside = text[len(prompt) : len(text) - len(token)]
        early = next((stop for stop in self._stops or [token] if stop in inside), None)
        if early is not None:
            return no(
                f"it also contains the end-of-turn token {early!r}, at which a server would have "
                "stopped"
            )
        return ChatAnswer(
            place,
            start=len(prompt),
            text=text,
            end_of_turn=token,
            written=answered.startswith(text),
        )

    def _plain(self) -> Probe:
        return make_probe(self.template.message("assistant", "text"), self._unused)

    def _header(self, before: list[Message], prompt: str) -> str:
        """Return the text between the prompt and a plain answer."""
        probe = self._plain()
        try:
            probed = self.template.render([*before, probe.message], answer_next=False)
        except TemplateRefusalError:
            return ""
        return probed[len(prompt) : max(len(prompt), probe.first_mark(probed))]

    def _unmarked_call_missing(
        self, before: list[Message], message: Message, answered: str
    ) -> str | None:
        """Return "tool call" if the template writes the same without one of them; they need not
        have a text to mark.
        """
        calls = message.get("tool_calls") or []
        for left_out in range(len(calls)):
            fewer = message | {"tool_calls": [*calls[:left_out], *calls[left_out + 1 :]]}
            if not fewer["tool_calls"]:
                del fewer["tool_calls"]
            try:
                if self.template.render([*before, fewer], answer_next=False) == answered:
                    return "tool call"
            except TemplateRefusalError:
                continue
        return None

    def _plain_text_begins(
        self, message: Message, probe: Probe, probed: str, prompt: str
    ) -> int | None:
        """Return the start of the text in an answer with a changed prompt; None if it cannot follow
        the prompt.
        """
        texts = texts_of(message["content"])
        says_more = any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))
        if len(texts) != 1 or says_more:
            return None
        (text,) = texts
        begin = probed.find(text_of(probe.message["content"]).strip())
        if begin < 0:
            return None
        blanks = text[: len(text) - len(text.lstrip())]
        if probed[:begin].endswith(blanks):
            begin -= len(blanks)
        sent = _EMPTY_BLOCKS.sub("", prompt.rstrip()).rstrip()
        shown = probed[:begin].rstrip()
        same = _common(sent[::-1], shown[::-1])
        leads = sent[len(sent) - same :]
        whole_line = sent.split("\n")[-1].strip() == shown.split("\n")[-1].strip() != ""
        if whole_line or self._special.search(leads):
            return begin
        return None

    def _ending(
        self, place: int, probe: Probe, behind: str, begin: int, is_open: bool
    ) -> tuple[str, str] | None:
        """Return the text from the end of the answer's own to the end of its end-of-turn token, and
        this token.

        `behind` is the text after the answer's last mark at the end of a conversation.
        """
        specials = list(self._ends.finditer(behind))
        if self._stops is not None:
            if specials:
                return behind[: specials[0].end()], specials[0][0]
            for continued in self._behind_when_continued(place, probe, begin):
                stop = self._ends.search(continued)
                if (
                    stop
                    and continued.startswith(behind)
                    and not continued[len(behind) : stop.start()].strip()
                ):
                    return continued[: stop.end()], stop[0]
            return None
        if not specials or (is_open and len(specials) == 1 and behind[specials[0].end() :].strip()):
            return None  # in the second case the only special token opens the next answer
        chosen = specials[0]
        if len(specials) > 1 and not is_open:
            # If add_generation_prompt is ignored, the next answer may be opened in any case: there
            # the first is this one's.
            followed = self._behind_when_continued(place, probe, begin)
            staying = min((_common(behind, more) for more in followed), default=len(behind))
            chosen = next(
                (special for special in reversed(specials) if special.end() <= staying), chosen
            )
        return behind[: chosen.end()], chosen[0]

    def _behind_when_continued(self, place: int, probe: Probe, begin: int) -> list[str]:
        """Return the text after the last mark when a message follows the answer; empty if the
        template refuses any.
        """
        calls = probe.message.get("tool_calls") or []
        tool = {
            "role": "tool",
            "content": "next",
            "tool_call_id": calls[-1].get("id") if calls else None,
        }
        followers = [
            *(m for m in self.messages[place + 1 : place + 2] if m.get("role") != "assistant"),
            *([tool] if calls else []),
            self.template.message("user", "next"),
        ]
        for follower in followers:
            try:
                continued = self.template.render(
                    [*self.messages[:place], probe.message, follower], answer_next=False
                )
            except TemplateRefusalError:
                continue
            at = probe.after_last_mark(continued)
            if at is not None or not probe.texts:
                return [continued[begin if at is None else at :]]
        return []


def special_strings(tokenizer: Any) -> set[str]:
    """Return the special tokens of a tokenizer, as text."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {token for token in tokenizer.all_special_tokens if token} | {
        token.content for token in added if token.special
    }


def _any_of(strings: Collection[str]) -> re.Pattern[str]:
    return re.compile(
        "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True)) or r"(?!)"
    )


def _common(first: str, second: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
