"""What a task's rollout talks to the model with.

    async def guess(chat):
        secret = random.randint(1, 100)
        for turn in range(7):
            choice = await chat("Your guess?" if turn == 0 else hint)
            ...

Every reply is kept with the server's own token ids and log-probabilities and is trained with the reward of the whole
(`ttrl.rollouts.play`, `ttrl.data.tokenization`); what it is told in between is not.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ttrl.errors import RolloutError

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice


class Asked(Protocol):
    """What answers a chat: a `Play`."""

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
    ) -> "tuple[Choice, dict[str, Any]]":
        """The model's choice, and its message as it is sent back."""
        ...


class Chat:
    """A conversation with the model that is sampled from. It begins with the task's messages.

    messages: the conversation so far, the model's replies included; a list of yours to change: what is in it is sent next. Where
        what was said before is changed or left out, the reply is trained as one to another prompt, which costs more tokens.
    tools: descriptions of functions that the model may call, as in the OpenAI API (the server must know how to read calls, such
        as vLLM with --enable-auto-tool-choice --tool-call-parser); once given, they stay.
    task_id, sample: which rollout this is; a random generator made of them gives the same game each time.
    """

    def __init__(self, asked: Asked, messages: Sequence[Mapping[str, Any]], task_id: str, sample: int, tools: Any = None) -> None:
        self._asked = asked
        self._is_asking = False
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.tools: list[dict[str, Any]] | None = tools
        self.task_id, self.sample = task_id, sample

    async def __call__(
        self,
        new: str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> "Choice":
        """Appends `new` to `messages` (a string is a user's message), asks the model, appends its reply, and returns the choice.

        The choice is as graders get it: `.message.content`, `.message.tool_calls`, `.finish_reason`, `.token_ids`.
        max_tokens, stop: for this reply, instead of the call's own.

        Raises RolloutLimitError where the task's limits or the model's context are reached: a rollout that does not catch it ends
        there, and the grader is asked about what there is. Raises RequestError where the server fails for good, which costs the
        sample unless it is caught.
        """
        if self._is_asking:
            await asyncio.sleep(0)  # whoever asks until it succeeds must let the reply come
            raise RolloutError("this chat is waiting for a reply; ask at the same time in a copy, chat.copy()")
        added = [{"role": "user", "content": new}] if isinstance(new, str) else [new] if isinstance(new, Mapping) else new or []
        self.messages += [dict(message) for message in added]
        self.tools = self.tools if tools is None else [dict(tool) for tool in tools]
        self._is_asking = True
        try:
            choice, reply = await self._asked.ask(self.messages, self.tools, max_tokens, stop)
        finally:
            self._is_asking = False
        self.messages.append(reply)
        return choice

    def copy(self, messages: Sequence[Mapping[str, Any]] | None = None) -> "Chat":
        """Another conversation of the same sample: from here on, or from `messages` (the other player of a game, a helper)."""
        return Chat(self._asked, self.messages if messages is None else messages, self.task_id, self.sample, self.tools)
