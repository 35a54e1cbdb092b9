"""What a real vLLM makes of texts in parts, of nulls, and of prompts that begin with <s>.

Against the prompts that are trained, and those that are planned for.
Only vLLM itself says which prompt it makes of a request.
"""

import asyncio
import importlib.util
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pyarrow
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ttrl import Task, get_task_results
from ttrl.data.chat.content import reads_parts
from ttrl.data.chat.rendering import server_messages
from ttrl.data.chat.templates import tokenize_chat
from ttrl.plans.expected_lengths import prompt_ids
from ttrl.server.vllm import VLLMServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]

# Written as Llama 4's: a list of parts, or a text.
TEMPLATE = """{{- bos_token -}}
{%- for tool in tools or [] -%}{{- tool | tojson + '<|end|>' -}}{%- endfor -%}
{%- for m in messages -%}
    {{- m.role + ':' -}}
    {%- if m.content is string -%}{{- m.content -}}
    {%- else -%}
        {%- for part in m.content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in m.tool_calls or [] -%}
        {{- call.function.name + call.function.arguments | tojson -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"""


def write_model(folder: Path) -> Path:
    """One token per byte; the tokenizer puts <s> before each text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "<|end|>")])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        special_tokens=[("<s>", begin)],
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=begin,
        eos_token_id=fast.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat_requests") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[VLLMServer]:
    arguments = {"dtype": "float32", "max_model_len": 1024}
    log = model.parent / "server.log"
    with VLLMServer(model, served_model_name="m", log_path=log, **arguments) as running:
        yield running


def prompts(server: VLLMServer, tasks: list[Task], **params: Any) -> list[list[int]]:
    """The ids of each task's prompt, as the server made them."""

    async def main() -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            results = await get_task_results(
                tasks,
                client,
                "m",
                pbar=False,
                params={"max_tokens": 1, **params},
            )
        for result in results:
            assert result.samples[0].error is None, result.samples[0].error
        return [list(result.samples[0].prompt_token_ids or ()) for result in results]

    return asyncio.run(main())


async def once(chat: Any) -> float:
    await chat()
    return 1.0


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"name": name, "description": f"{name}s", "parameters": parameters}


def test_prompts_of_the_server_are_those_that_are_trained(server: VLLMServer, model: Path) -> None:
    """Parts, and rows that went through Arrow."""
    number, text = {"type": "number", "default": 1}, {"type": "string"}
    functions = [function("add", a=number, b=number), function("look", at=text)]
    tools = [{"type": "function", "function": one} for one in functions]
    arguments = [{"a": 1, "b": 2}, {"at": "é"}]
    calls = []
    for tool, given in zip(functions, arguments, strict=True):
        called = {"name": tool["name"], "arguments": given}
        calls.append({"id": tool["name"], "type": "function", "function": called})
    used = [
        {"role": "system", "content": [part("Be short.")]},
        {"role": "user", "content": [part("Add"), part(" and look")]},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "Hm"},
        {"role": "tool", "content": [part("3"), part("!")], "tool_call_id": "add"},
        {"role": "tool", "content": [part("a hall")], "tool_call_id": "look"},
    ]
    asked = [{"role": "user", "content": [part("One"), part("two")]}]
    rows = [{"messages": asked, "tools": None}, {"messages": used, "tools": tools}]
    plain, filled = pyarrow.Table.from_pylist(rows).to_pylist()
    assert plain["messages"][0]["tool_calls"] is None
    filled_call = filled["messages"][2]["tool_calls"][0]["function"]
    assert filled_call["arguments"] == {"a": 1, "b": 2, "at": None}
    filled_tool = filled["tools"][1]["function"]["parameters"]["properties"]
    assert filled_tool == {"a": None, "b": None, "at": text}

    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in (plain, filled):
        params: dict[str, Any] = {}
        if row["tools"] is not None:
            # They stay in the prompt; without a parser of calls, a server refuses to choose.
            params = {"tools": row["tools"], "tool_choice": "none"}
        task = Task(row["messages"], lambda choice: 1.0)
        (found,) = prompts(server, [task], **params)
        assert prompts(server, [Task(row["messages"], rollout=once)], **params) == [found]
        answered = [*row["messages"], {"role": "assistant", "content": "Ok"}]
        chat = tokenize_chat(tokenizer, answered, row["tools"], turns="last")
        assert list(chat.token_ids[: chat.turns[-1].start]) == found
        assert found[0] == tokenizer.bos_token_id and found.count(found[0]) == 1
        if row["tools"] is None:
            assert prompt_ids(task, tokenizer) == found
            assert tokenizer.decode(found) == "<s>user:Onetwo<|end|>assistant:"
    written = tokenizer.decode(found)
    expected = "".join(json.dumps(tool) + "<|end|>" for tool in tools)
    expected += "system:Be short.<|end|>user:Add and look<|end|>"
    expected += 'assistant:add{"a": 1, "b": 2}look{"at": "é"}<|end|>'
    expected += "tool:3\n!<|end|>tool:a hall<|end|>assistant:"
    assert written == "<s>" + expected


@pytest.mark.parametrize("prompt", ["<s>ab", "ab", "<s>", "<s>[INST] a<s>b"])
def test_a_prompt_without_a_chat_has_one_beginning_of_text(
    prompt: str,
    server: VLLMServer,
    model: Path,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    task = Task([{"role": "prompt", "content": prompt}], rollout=once)
    expected = tokenizer.encode(prompt.removeprefix("<s>"))
    assert expected[0] == tokenizer.bos_token_id
    assert prompts(server, [task]) == [expected] == [prompt_ids(task, tokenizer)]


# vLLM's own choice of the form of a content, for all templates at hand, without a server.

VLLM = """
import json, types
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import _detect_content_format
config = types.SimpleNamespace(enable_prompt_embeds=False, multimodal_config=None)
found = []
for source in given["sources"]:
    form = _detect_content_format(source, default="string")
    messages = json.loads(json.dumps(given["messages"]))
    found.append([form == "openai", parse_chat_messages(messages, config, form)[0]])
"""
REFUSAL = {"type": "refusal", "refusal": "a"}
THOUGHT = {"type": "thinking", "thinking": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "system", "content": [part("a"), part("b")]},
    {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}, part("c")]},
    {"role": "user", "content": [REFUSAL, {"type": "text", "text": None}]},
    {"role": "assistant", "content": [THOUGHT, part("b")]},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [part("a"), part("b")]},
    {"role": "tool", "tool_call_id": "1", "content": "a"},
]


def test_templates_are_handed_what_vllm_hands_them(in_vllm: Callable[..., Any]) -> None:
    """Only vLLM itself says which form of content it hands a template."""
    folder = ROOT.parent / "shared" / "data" / "chat_templates"
    made_up = runpy.run_path(str(ROOT / "tests" / "data" / "chat" / "test_content.py"))
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    paths = [*folder.rglob("*.jinja"), *Path(vllm.origin).parent.rglob("*.jinja")]
    sources = [path.read_text(encoding="utf-8") for path in sorted(paths)]
    sources += [*made_up["MADE_UP"].values(), *made_up["TEXTS"].values(), TEMPLATE]
    theirs = in_vllm(VLLM, {"sources": sources, "messages": MESSAGES})
    assert {form for form, _ in theirs} == {True, False}
    for source, (as_parts, messages) in zip(sources, theirs, strict=True):
        assert reads_parts(source) == as_parts, source[:200]
        assert server_messages(MESSAGES, as_parts=as_parts) == messages, source[:200]
