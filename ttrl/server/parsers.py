"""Choose vLLM's parser of tool calls for a model, by the form of calls in its chat template.

vLLM refuses requests with tools unless it is started with `--enable-auto-tool-choice` and
`--tool-call-parser NAME`. Each parser reads one form of calls. The chat template is the evidence:
the text of a rendered tool call determines the parser. A form outside the table has no parser.
Sources, for vLLM 0.32: its pages docs/features/tool_calling.md and
docs/features/reasoning_outputs.md, and the code in vllm/tool_parsers, for the tokens required of
tokenizers.

A parser of reasoning is chosen only on request (`reasoning_parser` is "auto"). It removes the
thinking from a reply's content. This would change the graders' input, and agents dropping the
thinking would have their earlier turns rendered without it.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ttrl.data.chat.rendering import ChatTemplate
from ttrl.errors import ModelFolderError, TokenizationError
from ttrl.messages import Message
from ttrl.server.chat_template import is_with_mistral_tokenizer
from ttrl.server.model_folder import chat_templates_of, json_file, small_file

AUTO = "auto"
"""As the name of a parser: the one matching the model."""
_OFF = (None, "", "none")
_NAME = "ttrl_look"
_ARGUMENT = "ttrl_at"
_VALUE = "ttrl_hall"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {_ARGUMENT: {"type": "string", "description": "Where."}},
            "required": [_ARGUMENT],
        },
    },
}
_CALL_ID = "123456789"  # Mistral's templates refuse ids of other lengths
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": _NAME, "arguments": json.dumps({_ARGUMENT: _VALUE})},
}


@dataclass(frozen=True)
class _Form:
    """Describe a form of tool calls, and its parser."""

    parser: str
    pattern: str
    """Matches a conversation with a tool and its call, rendered by the template."""
    tokens: tuple[str, ...] = ()
    """Tokens required of the tokenizer: without them vLLM ends at its start."""


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
_FORMS = (
    # Qwen 2.5 and 3, QwQ, Hermes 2 Pro and 3, and others with their form
    _Form("hermes", rf'<tool_call>\s*\{{"name": "{_NAME}", "arguments": \{{'),
    # Qwen3-Coder, Qwen 3.5
    _Form("qwen3_xml", rf"<tool_call>\s*<function={_NAME}>"),
    # Llama 3.1 to 3.3
    _Form(
        "llama3_json",
        rf'<\|end_header_id\|>\s*\{{"name": "{_NAME}", "parameters": \{{',
        ("<|python_tag|>",),
    ),
    _Form(
        "mistral",
        rf'\[TOOL_CALLS\]\s*(\[\{{"name": "{_NAME}"|{_NAME}\[ARGS\])',
        ("[TOOL_CALLS]",),
    ),
    # Phi-4-mini with the template in vLLM's examples; its own shows no tools
    _Form("phi4_mini_json", r'functools\[\{"name": \[function name\], "arguments": '),
    # Granite 3: its template shows the form in words only
    _Form(
        "granite",
        r"respond only with <\|tool_call\|> followed by a JSON list",
        ("<|tool_call|>",),
    ),
    # GLM 4.5 to 4.7. vLLM constrains their calls to the tools' names, also without `strict`.
    _Form("glm45", rf"<tool_call>{_NAME}\s*<arg_key>"),
    _Form(
        "deepseek_v3",
        rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}",
        _DEEPSEEK,
    ),
    _Form("deepseek_v31", rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", _DEEPSEEK),
    _Form("kimi_k2", rf"<\|tool_call_begin\|>functions\.{_NAME}:\d"),
    _Form("olmo3", rf"<function_calls>\s*{_NAME}\({_ARGUMENT}="),
    _Form("openai", rf"to=functions\.{_NAME}<\|channel\|>commentary"),  # gpt-oss
)


@dataclass(frozen=True)
class _Thinking:
    """Describe a family that thinks before it answers, and the parser to remove the thinking."""

    parser: str
    model_types: str
    """A pattern."""
    pattern: str
    """Matches the source of the chat template."""
    tokens: tuple[str, ...] = ("<think>", "</think>")


_THINKING = (
    _Thinking("qwen3", r"qwen3.*", "<think>"),  # except Qwen3-Instruct-2507, which does not think
    _Thinking("glm45", r"glm4.*", "<think>"),
    # QwQ, DeepSeek R1's distillations: the prompt opens the thinking, and the parser relies on it
    _Thinking("deepseek_r1", r"qwen2|llama", r"add_generation_prompt.*<think>"),
    _Thinking("openai_gptoss", r"gpt_oss", r"<\|channel\|>", ()),
)


@dataclass(frozen=True)
class Parsers:
    """Hold the parsers of a server."""

    arguments: Mapping[str, Any]
    """vLLM's, by name."""
    said: str
    """The choice and its reason, in a line."""
    problem: str | None = None
    """Reason for vLLM to refuse these arguments."""


def parsers_of(model: str | os.PathLike[str], given: Mapping[str, Any] | None = None) -> Parsers:
    """Return the parsers for a model folder or a name on the hub.

    given: the user's arguments of vLLM. A named parser is taken; None or "none" stands for no
    parser. Raises nothing for an unreadable model: it has no parser.
    """
    named = {name.replace("_", "-"): value for name, value in (given or {}).items()}
    tools = named.get("tool-call-parser", AUTO)
    switch = named.get("enable-auto-tool-choice")
    reasoning = named.get("reasoning-parser")
    if AUTO in (tools, reasoning):
        evidence = _Evidence.of(model)
    else:
        evidence = _Evidence()
    parser = None
    problem = None
    if switch is False or tools in _OFF:
        said = "tool calls: no parser, as set"
    elif tools != AUTO:
        parser = tools
        said = f"tool calls: vLLM's parser {tools!r}, as set"
    elif evidence.parser is not None:
        parser = evidence.parser
        said = f"tool calls: vLLM's parser {parser!r}, by the model's chat template"
    else:
        said = f"tool calls: no parser, because {evidence.why}"
        said += "; requests with tools need tool_call_parser"
    # None drops an argument.
    arguments: dict[str, object] = {
        "tool-call-parser": parser,
        "enable-auto-tool-choice": None if parser is None else True,
    }
    if switch is True and parser is None:
        problem = "enable_auto_tool_choice is true, but there is no tool_call_parser"
        if tools == AUTO:
            problem += f" for this model: {evidence.why}"
        problem += "; name one, such as 'hermes'"
    if reasoning == AUTO:
        arguments["reasoning-parser"] = evidence.thinking
        thinking = f"parser {evidence.thinking!r}"
        if evidence.thinking is None:
            thinking = "no parser is known for the model"
        said += f"; reasoning: {thinking}"
    elif reasoning == "none":
        arguments["reasoning-parser"] = None
    return Parsers(arguments, said, problem)


@dataclass(frozen=True)
class _Evidence:
    """Collect the evidence for parsers in a model's files."""

    parser: str | None = None
    why: str = ""
    """Reason for no parser of calls."""
    thinking: str | None = None

    @classmethod
    def of(cls, model: str | os.PathLike[str]) -> "_Evidence":
        templates = chat_templates_of(model)
        if not templates:
            return cls(why="its chat template cannot be read here")
        thinking = _thinking(model, "\n".join(templates.values()))
        try:
            written = _written(_tokenizer_of(model, templates))
        except (ModelFolderError, TokenizationError) as error:
            return cls(why=f"its chat template fails: {error}", thinking=thinking)
        if written is None:
            return cls(why="its chat template shows the model no tools", thinking=thinking)
        form = next((form for form in _FORMS if re.search(form.pattern, written)), None)
        if form is None:
            why = "ttrl knows no parser for its chat template's form of calls"
            return cls(why=why, thinking=thinking)
        lacking = _lacking(model, form.tokens)
        if lacking:
            names = ", ".join(lacking)
            why = f"the tokenizer lacks {names}, needed by the parser {form.parser!r}"
            return cls(why=why, thinking=thinking)
        if form.parser == "mistral" and is_with_mistral_tokenizer(model):
            why = "with Mistral's own tokenizer, vLLM would sample calls by a grammar"
            return cls(why=why, thinking=thinking)
        return cls(form.parser, thinking=thinking)


def _tokenizer_of(model: str | os.PathLike[str], templates: Mapping[str, str]) -> SimpleNamespace:
    """Return the tokenizer fields a chat template needs, read without loading transformers."""
    special = {}
    for name, value in json_file(model, "tokenizer_config.json").items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            special[name] = value
    template: object = templates
    if templates.keys() == {"default"}:
        template = templates["default"]
    return SimpleNamespace(
        chat_template=template, name_or_path=os.fspath(model), special_tokens_map=special
    )


def _written(tokenizer: SimpleNamespace) -> str | None:
    """Return a conversation with a tool and a call of it; None if it does not show the tool.

    For a template without calls: the prompt, perhaps with instructions for writing them. Raises
    ModelFolderError, TokenizationError.
    """
    template = ChatTemplate(tokenizer, [_TOOL])
    messages: list[Message] = [{"role": "user", "content": "Where is it?"}]
    prompt = template.render(template.prepared(messages), answer_next=True)
    if _ARGUMENT not in prompt:
        return None
    messages.append({"role": "assistant", "content": "", "tool_calls": [_CALL]})
    messages.append({"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": "Here."})
    try:
        return prompt + template.render(template.prepared(messages), answer_next=False)
    except TokenizationError:
        return prompt


def _thinking(model: str | os.PathLike[str], source: str) -> str | None:
    model_type = str(json_file(model, "config.json").get("model_type", ""))
    for family in _THINKING:
        is_family = re.fullmatch(family.model_types, model_type) is not None
        if is_family and re.search(family.pattern, source, re.DOTALL):
            if _lacking(model, family.tokens):
                return None
            return family.parser
    return None


def _lacking(model: str | os.PathLike[str], tokens: Sequence[str]) -> list[str]:
    """Return the tokens missing from the tokenizer's files."""
    if not tokens:
        return []
    files = [small_file(model, name) for name in ("tokenizer.json", "tokenizer_config.json")]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file is not None)
    missing = []
    for token in tokens:
        spellings = (json.dumps(token), json.dumps(token, ensure_ascii=False))
        if not any(spelling in text for spelling in spellings):
            missing.append(token)
    return missing
