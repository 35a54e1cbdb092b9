"""Small chat templates that show tools and write calls, one for each form that vLLM's parsers
read.
"""

HERMES_CALL = (
    '{{- \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}{{- f.arguments | '
    "tojson }}{{- '}\\n</tool_call>' }}"
)
CALLS = {
    "hermes": HERMES_CALL,
    "qwen3_xml": (
        "{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}"
        "{%- for k, v in f.arguments.items() %}"
        "{{- '<parameter=' + k + '>\\n' + v + '\\n</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</tool_call>' }}"
    ),
    "llama3_json": (
        '{{- \'<|end_header_id|>\\n\\n{"name": "\' + f.name + \'", "parameters": \' }}{{- '
        "f.arguments | tojson }}{{- '}' }}"
    ),
    "mistral": (
        '{{- \'[TOOL_CALLS][{"name": "\' + f.name + \'", "arguments": \' }}{{- f.arguments | '
        "tojson }}{{- '}]' }}"
    ),
    "glm45": (
        "{{- '<tool_call>' + f.name + '\\n' }}"
        "{%- for k, v in f.arguments.items() %}"
        "{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + v + '</arg_value>\\n' }}{%- endfor %}"
        "{{- '</tool_call>' }}"
    ),
    "deepseek_v3": (
        "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name }}"
        "{{- '\\n```json\\n' }}{{- f.arguments | tojson }}"
        "{{- '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    ),
    "deepseek_v31": (
        "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' }}"
        "{{- f.arguments | tojson }}{{- '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    ),
    "kimi_k2": (
        "{{- '<|tool_calls_section_begin|><|tool_call_begin|>functions.' + f.name + ':0' }}"
        "{{- '<|tool_call_argument_begin|>' }}{{- f.arguments | tojson }}"
        "{{- '<|tool_call_end|><|tool_calls_section_end|>' }}"
    ),
    "olmo3": (
        "{{- '<function_calls>\\n' + f.name + '(' }}"
        "{%- for k, v in f.arguments.items() %}{{- k + '=\"' + v + '\"' }}{%- endfor %}"
        "{{- ')\\n</function_calls>' }}"
    ),
}
"""How a call `f` is written, by the parser that reads it."""


def template(call: str) -> str:
    """A chat template of the tiny model's special tokens, with tools."""
    return (
        "{%- for tool in tools or [] %}{{- tool | tojson + '<|end|>' }}{%- endfor %}"
        "{%- for m in messages %}{{- '<|' + m.role + '|>' }}"
        "{%- if m.content %}{{- m.content }}{%- endif %}"
        "{%- for c in m.tool_calls or [] %}{%- set f = c.function %}" + call + "{%- endfor %}"
        "{{- '<|end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )
