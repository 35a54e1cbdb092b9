"""How much room a conversation leaves in the model's context, once a server has refused it for its length."""

from collections.abc import Mapping, Sequence
from typing import Any

from ttrl.errors import RequestError
from ttrl.rollouts.client.chat_completions import ChatRequest
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import loads

# Words in which servers refuse a request that is too long: those of OpenAI, vLLM and llama.cpp.
_TOO_LONG = (
    "context length",
    "context_length",
    "context window",
    "max_model_len",
    "maximum model length",
    "maximum input length",
    "context size",
)
# What of a request its prompt depends on.
_OF_THE_PROMPT = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


async def room_left(
    error: RequestError, transport: Transport, request: ChatRequest, messages: Sequence[Mapping[str, Any]]
) -> int | None:
    """Tokens that the model could still generate; None where the error says something else. 0 where the server does not tell.

    A request is refused as a whole where prompt and `max_tokens` together are more than the context, so there may be room for a
    shorter answer. vLLM's /tokenize tells.
    """
    if error.status not in (400, 413, 422) or not any(words in str(error) for words in _TOO_LONG):
        return None
    body = {name: request.parameters[name] for name in _OF_THE_PROMPT if name in request.parameters}
    try:
        answer = loads(await transport.post("/tokenize", {**body, "model": request.model, "messages": messages}, root=True))
    except RequestError:
        return 0
    count, most = (answer.get(name) if isinstance(answer, dict) else None for name in ("count", "max_model_len"))
    return max(0, most - count) if type(count) is int and type(most) is int else 0
