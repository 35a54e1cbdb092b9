"""Short templates, each with one difficulty, and tokenizers for them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

LOOP = "{%- for m in messages -%}"
END = "{%- endfor -%}"
PROMPT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
SAY = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"

TEMPLATES = {
    "plain": LOOP + SAY + END + PROMPT,
    "trims": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system "
        "here') }}{% endif %}"
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
        "raise_exception('they alternate') }}"
        "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' "
        "}}{% endfor %}" + PROMPT
    ),
    # strips the thinking of earlier turns, writes an empty one into the last, and into the prompt
    # where it is to be skipped
    "thinks": (
        LOOP + "{%- if m.role == 'assistant' -%}{%- set content = m.content -%}{%- set thought = "
        "m.reasoning_content or '' -%}"
        "{%- if '</think>' in content -%}{%- set thought = "
        "content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
        "{{ '<|im_start|>assistant\n' }}{%- if loop.last -%}{{ '<think>\n' + thought + "
        "'\n</think>\n\n' }}{%- endif -%}"
        "{{ content + '<|im_end|>\n' }}{%- else -%}"
        + SAY
        + "{%- endif -%}"
        + END
        + PROMPT
        + "{%- if add_generation_prompt and "
        "enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' "
        "}}{%- endif -%}"
    ),
    # opens the thinking in the prompt, but never shows any
    "opens": LOOP
    + SAY
    + END
    + PROMPT
    + "{%- if add_generation_prompt -%}{{ '<think>\n' }}{%- endif -%}",
    # puts empty thinking into the prompt, but never shows any
    "skips": LOOP
    + SAY
    + END
    + PROMPT
    + "{%- if add_generation_prompt -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}",
    # no header before answers; the system prompt belongs to the last question; tool calls open with
    # a special token
    "instructs": (
        "{{ bos_token }}{%- set ns = namespace(system='') -%}"
        + LOOP
        + "{%- if m.role == 'system' -%}"
        "{%- set ns.system = m.content + '\n\n' -%}{%- elif m.role == 'user' -%}"
        "{{ '[INST]' + (ns.system if loop.last else '') + m.content + '[/INST]' }}{%- elif "
        "m.tool_calls -%}"
        "{{ '[TOOL_CALLS]' + m.tool_calls[0].function | tojson + eos_token }}{%- elif m.role == "
        "'tool' -%}"
        "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{%- else -%}{{ m.content + "
        "eos_token }}{%- endif -%}" + END
    ),
    "ends of text": LOOP
    + SAY
    + END
    + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token "
    "}}{% endif %}",
    "always asks": LOOP + SAY + END + "{{ '<|im_start|>assistant\n' }}",
    "never asks": LOOP + SAY + END,
    "two ends": (
        LOOP + "{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' -%}{{ '<|say|>' + "
        "m.content + '<|said|>' }}"
        "{%- else -%}{{ m.content }}{%- endif -%}{{ '<|im_end|>' }}" + END + PROMPT
    ),
    # a blank before and behind the answer, which the model wrote; a new beginning for each question
    "blanks": LOOP
    + "{%- if m.role == 'user' -%}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{%- else "
    "-%}"
    "{{ ' ' + m.content + ' ' + eos_token }}{%- endif -%}" + END,
    # whole messages come from macros, one of which calls itself
    "macros": (
        "{%- macro listed(value) -%}{%- if value is mapping -%}{%- for k, v in value.items() -%}"
        "{{ '(' + k + ' ' + listed(v) + ')' }}{%- endfor -%}{%- else -%}{{ value }}{%- endif "
        "-%}{%- endmacro -%}"
        "{%- macro said(m, is_last) -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}{%- for "
        "call in m.tool_calls or [] -%}"
        "{{ '<|call|>' + call.function.name + listed(call.function.arguments) }}{%- endfor -%}"
        "{{ '<|im_end|>' if not is_last else '<|final|>' }}{%- endmacro -%}"
        + LOOP
        + "{{ said(m, loop.last and m.role == 'assistant') }}"
        + END
        + PROMPT
    ),
    "dated": "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + LOOP + SAY + END + PROMPT,
    "open ends": LOOP
    + "{{ '<|' + m.role + '|>' + m.content }}"
    + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "parts": LOOP
    + "{{ '<|im_start|>' + m.role + '\n' }}{%- for part in m.content if part.type == 'text' "
    "-%}{{ part.text }}"
    "{%- endfor -%}{{ '<|im_end|>\n' }}" + END + PROMPT,
    "text arguments": LOOP
    + "{{ '<|im_start|>' + m.role + '\n' + m.content }}{%- for call in m.tool_calls or [] -%}"
    "{{ '<|call|>' + call.function.arguments }}{%- endfor -%}{{ '<|im_end|>\n' }}" + END + PROMPT,
    "tagged": LOOP
    + "{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' -%}{% generation %}{{ "
    "m.content + '<|im_end|>' }}"
    "{% endgeneration %}{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}{{ '\n' }}"
    + END
    + PROMPT,
    "tagged too far": LOOP
    + "{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' -%}{%- generation -%}"
    "{{ m.content + '<|im_end|>\n' }}{%- endgeneration -%}{%- else -%}{{ m.content + "
    "'<|im_end|>\n' }}{%- endif -%}" + END + PROMPT,
    # blanks at the template's own ends, and a dangling one
    "spaced": "\n  {% for m in messages %}\n"
    + SAY
    + "\n  {% endfor %}\n"
    + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}   ",
}

SPECIAL = [
    "<s>",
    "</s>",
    "<|pad|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
SPECIAL += [
    f"<|{name}|>"
    for name in ("im_start", "im_end", "say", "said", "call", "final", "user", "assistant", "tool")
]


@pytest.fixture(scope="session")
def templates():
    return TEMPLATES


@pytest.fixture(scope="session")
def tokenizer_of():
    """tokenizer_of(template, merges=()): one token per byte and per merge ("ab" for a + b), and the
    special tokens above.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template, merges=(), **flags):
        vocabulary = {
            letter: number
            for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
        }
        spelt = [merge.replace(" ", "Ġ").replace("\n", "Ċ") for merge in merges]
        vocabulary |= {merge: len(vocabulary) + number for number, merge in enumerate(spelt)}
        made = Tokenizer(
            models.BPE(vocab=vocabulary, merges=[(merge[0], merge[1]) for merge in spelt])
        )
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(token, special=True, **flags) for token in SPECIAL])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>"
        )
        tokenizer.chat_template = (
            TEMPLATES.get(template, template) if isinstance(template, str) else template
        )
        return tokenizer

    return make


@pytest.fixture(scope="session")
def trained():
    """trained(tokenizer, chat): the text of each trained turn, by its message."""

    def texts(tokenizer, chat):
        assert len(chat.token_ids) == len(chat.assistant_mask)
        inside = [False] * len(chat.token_ids)
        for turn in chat.turns:
            if turn.reason is None:
                inside[turn.start : turn.end] = [True] * (turn.end - turn.start)
        assert inside == chat.assistant_mask and inside[-1]
        return {
            t.message: tokenizer.decode(chat.token_ids[t.start : t.end])
            for t in chat.turns
            if t.reason is None
        }

    return texts


@pytest.fixture(scope="session")
def table():
    """tools/check_chat_templates.py as a module."""
    import check_chat_templates

    return check_chat_templates


@pytest.fixture(scope="session")
def shared_templates():
    folder = ROOT.parent / "shared" / "data" / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder
