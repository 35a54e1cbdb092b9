"""Chat templates as the model families of docs/reference/models.md document them,
written here from their
rules: with two questions and thinking, each turn is trained once, after the prompt that a server
    would have sent.

Each template renders the family's own form of turns, thinking, tools and system prompts. Source of
the rules: the families' model cards and vLLM's page on tool calling.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from ttrl.data.chat.templates import tokenize_chat, tokenize_chat_turns
from ttrl.errors import TokenizationError

LAST_QUESTION = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
"""Most templates keep the thinking behind the last question alone: a tool's result does not end a
thought.
"""
THOUGHT = "{%- set thought = m.reasoning_content or '' -%}"


def chatml(answer, prompt, system="<|im_start|>system\n' + m.content + '<|im_end|>\n"):
    return (
        LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'system' -%}{{ '"
        + system
        + "' }}"
        "{%- elif m.role == 'tool' -%}{{ '<|im_start|>user\n<tool_response>\n' + m.content + "
        "'\n</tool_response><|im_end|>\n' }}"
        "{%- elif m.role == 'user' -%}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{%- "
        "else -%}"
        + THOUGHT
        + answer
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
        + prompt
        + "{%- endif -%}"
    )


CALL_XML = (
    "{%- for call in m.tool_calls or [] -%}{{ '\n<tool_call>\n<function=' + call.function.name + "
    "'>\n' }}"
    "{%- for name, value in call.function.arguments.items() -%}"
    "{{ '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}{%- endfor -%}{{ "
    "'</function>\n</tool_call>' }}"
    "{%- endfor -%}"
)
CALL_JSON = (
    '{%- for call in m.tool_calls or [] -%}{{ \'\n<tool_call>\n{"name": "\' + call.function.name '
    '+ \'", "arguments": \' + '
    "call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor -%}"
)
EMPTY = "<think>\n\n</think>\n\n"


class Family(NamedTuple):
    template: str
    first: str
    """What is trained of a first answer that thought."""
    second: str
    """And of the second."""
    off: Mapping[str, bool] = MappingProxyType({})
    """What switches thinking off; nothing where the family does not think."""
    plain: str = ""
    """What is trained of an answer then."""
    system: bool = True
    call: str = ""
    """What is trained of a call, where the family has tools."""
    thought: str = "reasoning_content"


FAMILIES = {
    # Thinking is opened in the prompt and closed by the model; earlier thoughts are dropped.
    "Qwen 3.5": Family(
        chatml(
            "{{ '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last -%}"
            "{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif -%}"
            "{{ m.content }}" + CALL_XML + "{{ '<|im_end|>\n' }}",
            "{{ '<|im_start|>assistant\n<think>\n' }}"
            "{%- if enable_thinking is defined and not enable_thinking -%}{{ '\n</think>\n\n' "
            "}}{%- endif -%}",
        ),
        "Hm.\n</think>\n\nFirst.<|im_end|>",
        "Ah.\n</think>\n\nSecond.<|im_end|>",
        {"enable_thinking": False},
        "First.<|im_end|>",
        call="\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    # The model opens its thoughts itself.
    "Qwen 3": Family(
        chatml(
            "{{ '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last and (loop.last or "
            "thought) -%}"
            "{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif -%}{{ m.content }}"
            + CALL_JSON
            + "{{ '<|im_end|>\n' }}",
            "{{ '<|im_start|>assistant\n' }}"
            "{%- if enable_thinking is defined and not enable_thinking -%}{{ '"
            + EMPTY
            + "' }}{%- endif -%}",
        ),
        "<think>\nHm.\n</think>\n\nFirst.<|im_end|>",
        "<think>\nAh.\n</think>\n\nSecond.<|im_end|>",
        {"enable_thinking": False},
        "First.<|im_end|>",
        call='\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
    ),
    # Channels. A thought is a message of its own; the last answer ends with another token than
    # earlier ones.
    "gpt-oss": Family(
        LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- if m.tool_calls -%}"
        "{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + "
        "'<|channel|>commentary json<|message|>' }}"
        "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}{%- else -%}"
        "{%- if m.thinking and loop.index0 > ns.last -%}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- "
        "endif -%}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{%- endif -%}"
        "{%- elif m.role == 'tool' -%}{{ '<|start|>functions.add "
        "to=assistant<|channel|>commentary<|message|>' + m.content + "
        "'<|end|>' }}{%- else -%}{{ '<|start|>' + ('developer' if m.role == 'system' else "
        "m.role) + '<|message|>' + m.content + "
        "'<|end|>' }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ "
        "'<|start|>assistant' }}{%- endif -%}",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>First.<|return|>",
        "<|channel|>analysis<|message|>Ah.<|end|><|start|>assistant<|channel|>final<|message|>Second.<|return|>",
        call=' to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        thought="thinking",
    ),
    # No system role: it stands before the first question. No thinking, and the text is trimmed.
    "Gemma 3": Family(
        "{{ bos_token }}{%- set ns = namespace(system='') -%}{%- for m in messages -%}{%- if "
        "m.role == 'system' -%}"
        "{%- set ns.system = m.content + '\n\n' -%}{%- else -%}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) "
        "+ '\n' + ns.system + m.content | trim + '<end_of_turn>\n' }}{%- set ns.system = '' "
        "-%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}",
        "First.<end_of_turn>",
        "Second.<end_of_turn>",
    ),
    # Thoughts are a channel, which only the answer behind the last question keeps.
    "Gemma 4": Family(
        "{{ bos_token }}"
        + LAST_QUESTION
        + "{%- for m in messages -%}{{ '<|turn>' + ('model' if m.role == 'assistant' else "
        "m.role) + '\n' }}"
        "{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}"
        "{{ '<|channel>thought\n' + m.reasoning_content + '<channel|>' }}{%- endif -%}{{ "
        "m.content | trim + '<turn|>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}",
        "<|channel>thought\nHm.<channel|>First.<turn|>",
        "<|channel>thought\nAh.<channel|>Second.<turn|>",
    ),
    # No token ends a turn but the next role's: the stop tokens have to be named.
    "GLM 4.5": Family(
        "[gMASK]<sop>"
        + LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|user|>\n' + m.content }}"
        "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}{%- elif "
        "m.role == 'system' -%}"
        "{{ '<|system|>\n' + m.content }}{%- elif m.role == 'tool' -%}{{ '<|observation|>\n' + "
        "m.content }}{%- else -%}"
        "{{ '<|assistant|>' }}{%- if loop.index0 > ns.last and m.reasoning_content -%}"
        "{{ '\n<think>' + m.reasoning_content + '</think>' }}{%- else -%}{{ '\n<think></think>' "
        "}}{%- endif -%}"
        "{{ ('\n' + m.content) if m.content else '' }}{%- for call in m.tool_calls or [] -%}"
        "{{ '\n<tool_call>' + call.function.name + '\n' }}{%- for name, value in "
        "call.function.arguments.items() -%}"
        "{{ '<arg_key>' + name + '</arg_key>\n<arg_value>' + value | string + '</arg_value>\n' "
        "}}{%- endfor -%}"
        "{{ '</tool_call>' }}{%- endfor -%}{%- endif -%}{%- endfor -%}{%- if "
        "add_generation_prompt -%}"
        "{{ '<|assistant|>\n<think></think>' if enable_thinking is defined and not "
        "enable_thinking else '<|assistant|>' }}"
        "{%- endif -%}",
        "\n<think>Hm.</think>\nFirst.<|user|>",
        "\n<think>Ah.</think>\nSecond.<|user|>",
        {"enable_thinking": False},
        "\nFirst.<|user|>",
        call="\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
    ),
    # Roles in pairs of tokens; no newline anywhere.
    "Granite 4": Family(
        "{%- for m in messages -%}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + "
        "m.content }}"
        + CALL_JSON
        + "{{ '<|end_of_text|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}"
        "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif -%}",
        "First.<|end_of_text|>",
        "Second.<|end_of_text|>",
        call='\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|end_of_text|>',
    ),
    # ChatML behind a beginning of text, which a tokenizer would double.
    "LFM2": Family(
        "{{ bos_token }}{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + "
        "'<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}",
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ),
    # The prompt opens the thought. Earlier answers stand behind a closed one.
    "DeepSeek V3.1": Family(
        "{{ bos_token }}"
        + LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'system' -%}{{ m.content }}"
        "{%- elif m.role == 'user' -%}{{ '<｜User｜>' + m.content }}{%- else -%}"
        "{{ '<｜Assistant｜>' }}{%- if m.reasoning_content and loop.index0 > ns.last -%}{{ "
        "'<think>' + m.reasoning_content }}"
        "{%- endif -%}{{ '</think>' + m.content + '<｜end▁of▁sentence｜>' }}{%- endif -%}{%- "
        "endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' + ('<think>' if thinking else "
        "'</think>') }}{%- endif -%}",
        "Hm.</think>First.<｜end▁of▁sentence｜>",
        "Ah.</think>Second.<｜end▁of▁sentence｜>",
        {"thinking": False},
        "First.<｜end▁of▁sentence｜>",
    ),
    # The prompt opens the thought; all thoughts are kept.
    "OLMo 3": Family(
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.reasoning_content "
        "-%}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif -%}{{ m.content + "
        "'<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>' }}{%- endif -%}",
        "Hm.</think>First.<|im_end|>",
        "Ah.</think>Second.<|im_end|>",
    ),
    # A note in the system prompt switches thinking; there is always a system prompt.
    "SmolLM3": Family(
        "{{ '<|im_start|>system\n' + ('/think' if enable_thinking is not defined or "
        "enable_thinking else '/no_think') + '\n' }}"
        "{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- endif -%}{{ "
        "'<|im_end|>\n' }}"
        "{%- for m in messages if m.role != 'system' -%}{%- if m.role == 'assistant' -%}{{ "
        "'<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is not defined or enable_thinking -%}"
        "{{ ('<think>\n' + m.reasoning_content + '\n</think>\n') if m.reasoning_content else '' "
        "}}{%- else -%}{{ '" + EMPTY + "' }}{%- endif -%}{{ m.content + '<|im_end|>\n' }}"
        "{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif "
        "-%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
        "{{ '' if enable_thinking is not defined or enable_thinking else '"
        + EMPTY
        + "' }}{%- endif -%}",
        "<think>\nHm.\n</think>\nFirst.<|im_end|>",
        "<think>\nAh.\n</think>\nSecond.<|im_end|>",
        {"enable_thinking": False},
        "First.<|im_end|>",
    ),
    # Names of roles between tokens.
    "Kimi": Family(
        "{%- for m in messages -%}"
        "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{%- "
        "endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif "
        "-%}",
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ),
    "Ministral 3": Family(
        "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
        "{%- elif m.role == 'user' -%}{{ '[INST]' + m.content + '[/INST]' }}{%- elif m.role == "
        "'tool' -%}"
        "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{%- else -%}{{ m.content }}{%- "
        "for call in m.tool_calls or [] -%}"
        "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson "
        "}}{%- endfor -%}{{ eos_token }}"
        "{%- endif -%}{%- endfor -%}",
        "First.</s>",
        "Second.</s>",
        call='[TOOL_CALLS]add[ARGS]{"x": 1}</s>',
    ),
    # Reasoning stands in the answer, between tokens of its own, and is dropped from earlier turns.
    "MiniMax M2": Family(
        "{{ ']~!b[' }}"
        + LAST_QUESTION
        + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ ']~b]ai\n' }}"
        "{%- if m.reasoning_content and loop.index0 > ns.last -%}{{ '<think>\n' + "
        "m.reasoning_content + '\n</think>\n\n' }}"
        "{%- endif -%}{{ m.content + '[e~[\n' }}{%- else -%}{{ ']~b]' + m.role + '\n' + "
        "m.content + '[e~[\n' }}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ ']~b]ai\n<think>\n' }}{%- endif -%}",
        "Hm.\n</think>\n\nFirst.[e~[",
        "Ah.\n</think>\n\nSecond.[e~[",
    ),
    "nanochat": Family(
        "{{ bos_token }}{%- set ns = namespace(system='') -%}{%- for m in messages -%}{%- if "
        "m.role == 'system' -%}"
        "{%- set ns.system = m.content + '\n\n' -%}{%- elif m.role == 'assistant' -%}"
        "{{ '<|assistant_start|>' + m.content + '<|assistant_end|>' }}{%- else -%}"
        "{{ '<|user_start|>' + ns.system + m.content + '<|user_end|>' }}{%- set ns.system = '' "
        "-%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant_start|>' }}{%- endif -%}",
        "First.<|assistant_end|>",
        "Second.<|assistant_end|>",
    ),
}
STOPS = {"GLM 4.5": ["<|user|>", "<|observation|>"]}
SPECIAL = (
    *(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|return|>",
        "<|call|>",
        "<start_of_turn>",
        "<end_of_turn>",
    ),
    *(
        "<|turn>",
        "<turn|>",
        "<|channel>",
        "<channel|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|observation|>",
    ),
    *(
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|end_of_text|>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    ),
    *(
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "]~!b[",
        "]~b]",
        "[e~[",
        "[ARGS]",
    ),
    *(
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "<|assistant_start|>",
        "<|assistant_end|>",
        "<|user_start|>",
        "<|user_end|>",
    ),
)


@pytest.fixture(params=FAMILIES)
def family(request, tokenizer_of):
    found = FAMILIES[request.param]
    tokenizer = tokenizer_of(found.template)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(SPECIAL)}, replace_extra_special_tokens=False
    )
    return found, tokenizer, {"stop_tokens": STOPS.get(request.param)}


def conversation(thought=None):
    first, second = (
        {"role": "assistant", "content": "First."},
        {"role": "assistant", "content": "Second."},
    )
    if thought is not None:
        first[thought], second[thought] = "Hm.", "Ah."
    return [{"role": "user", "content": "One?"}, first, {"role": "user", "content": "Two?"}, second]


def trained_once(tokenizer, messages, found, settings):
    """Return what is trained of each message, and check that it follows the prompt that a server
    sends for it.
    """
    texts = {}
    for chat in found:
        for turn in chat.turns:
            if turn.reason is not None:
                continue
            assert turn.message not in texts, "trained twice"
            asked = messages[: turn.message]
            prompt = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_dict=False, **settings
            )
            assert chat.token_ids[: turn.start] == prompt
            texts[turn.message] = tokenizer.decode(chat.token_ids[turn.start : turn.end])
    return texts


def test_each_turn_is_trained_once_after_the_prompt_that_it_was_sampled_for(family):
    one, tokenizer, how = family
    messages = conversation(one.thought if "Hm." in one.first else None)
    settings = {"thinking": True} if "thinking" in one.off else {}
    found = tokenize_chat_turns(tokenizer, messages, **how, **settings)
    assert trained_once(tokenizer, messages, found, settings) == {1: one.first, 3: one.second}
    assert all(chat.token_ids.count(tokenizer.bos_token_id) <= 1 for chat in found)


def test_thinking_that_is_off_is_not_trained(family):
    one, tokenizer, how = family
    if not one.off:
        pytest.skip("this family has no switch")
    messages = conversation()[:2]
    chat = tokenize_chat(tokenizer, messages, **how, **one.off)
    assert trained_once(tokenizer, messages, [chat], one.off) == {1: one.plain}


def test_a_system_prompt_is_never_trained(family):
    one, tokenizer, how = family
    plain = [{"role": "system", "content": "Be short."}, *conversation()[:2]]
    settings = one.off
    try:
        chat = tokenize_chat(tokenizer, plain, **how, **settings)
    # The prompt opens a thought that an answer without one never closes.
    except TokenizationError as error:
        assert "<think>" in one.template and not one.off, error
        return
    text = "".join(tokenizer.decode(chat.token_ids[turn.start : turn.end]) for turn in chat.turns)
    assert "Be short." not in text and "First." in text
    assert "Be short." in tokenizer.decode(chat.token_ids)


def test_calls_are_trained_and_their_results_are_not(family):
    one, tokenizer, how = family
    if not one.call:
        pytest.skip("this template has no tools")
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": '{"x": 1}'}}
    asked = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    messages = [*asked, {"role": "tool", "tool_call_id": "c1", "content": "7"}]
    if how["stop_tokens"]:  # what ends a call is the next role, so there has to be one
        asked = [*messages, {"role": "assistant", "content": "Seven."}]
    found = tokenize_chat_turns(tokenizer, asked, **how, **one.off)
    texts = [
        tokenizer.decode(chat.token_ids[t.start : t.end])
        for chat in found
        for t in chat.turns
        if t.reason is None
    ]
    assert any(text.endswith(one.call) for text in texts), texts
    assert not any("7" in text for text in texts)
