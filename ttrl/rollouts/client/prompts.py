"""Sample replies to prompts given as text or token ids (POST /completions), in the form of a
chat's.

No chat template is used. A text gets the tokenizer's special first tokens (`<bos>`) exactly once,
whether it includes them or not.
"""

from ttrl.records import raw_prompt
from ttrl.rollouts.client.attempts import ChatAttempt, without_second_beginning
from ttrl.rollouts.client.opening import prefilled
from ttrl.rollouts.client.text_stream import ask, chat_answer
from ttrl.rollouts.client.transport import Transport
from ttrl.rollouts.client.wire import Answer

# They make the prompt of a chat, or read its reply.
# fmt: off
_OF_CHATS = frozenset([
    "tools", "tool_choice", "parallel_tool_calls", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "include_reasoning", "logprobs",
    "top_logprobs", "max_completion_tokens",
])
# fmt: on


async def sample_after_prompt(attempt: ChatAttempt, transport: Transport) -> list[Answer | None]:
    """Return the answer to an attempt with a single prompt message; nothing is streamed. Raises
    RequestError.
    """
    request = attempt.request
    prompt = raw_prompt(attempt.messages)
    body: dict[str, object] = {
        name: value for name, value in request.parameters.items() if name not in _OF_CHATS
    }
    body |= {"model": request.model, "prompt": prompt, "return_token_ids": True}
    if isinstance(prompt, str):
        body |= await without_second_beginning(prompt, transport, request)
    if request.max_tokens is not None:  # else the API's 16
        body["max_tokens"] = request.max_tokens
    if request.wants_logprobs:
        body["logprobs"] = 0
    if request.seed is not None:
        body["seed"] = request.seed + attempt.seed_offset
    piece = await ask(
        transport, body, on_tokens=attempt.add, cut=None, stall_timeout=request.stall_timeout
    )
    ids = piece.prompt_token_ids or (prompt if isinstance(prompt, list) else None)
    opening = prefilled(prompt) if isinstance(prompt, str) else ""
    return [chat_answer(piece, ids, opening, request.wants_logprobs)]
