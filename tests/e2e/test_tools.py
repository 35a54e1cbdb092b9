"""Tool agents on a real server, without naming a parser; and vLLM's parsers on what templates
write.

Only vLLM's own parsers say which calls they read.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tool_templates import CALLS, HERMES_CALL, template
from transformers import AutoTokenizer

from ttrl import Task, TrainConfig, train
from ttrl.data.chat.rendering import ChatTemplate
from ttrl.evaluation.evaluate import evaluate
from ttrl.server import parsers
from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Double a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
    },
}
CALL = r'<tool_call>\{"name": "double", "arguments": \{"number": [1-9]\}\}</tool_call>'


async def agent(chat: Any) -> tuple[float, dict[str, float]]:
    """Answer one call of the tool, if there is one, and ask again."""
    choice = await chat(tools=[TOOL], max_tokens=80)
    calls = choice.message.tool_calls or []
    for call in calls:
        number = json.loads(call.function.arguments)["number"]
        chat.messages.append({"role": "tool", "tool_call_id": call.id, "content": str(2 * number)})
    text = choice.message.content or ""
    return float(len(text) % 2), {"calls": float(len(calls)), "says": float(bool(text))}


def tasks(count: int) -> list[Task]:
    asked = [[{"role": "user", "content": f"Double {number}."}] for number in range(count)]
    return [Task(messages, rollout=agent) for messages in asked]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "model"
    return make_tiny_model(folder, layers=2, width=64, heads=2, context=1024)


def assert_prompts_are_ours(rows: list[dict[str, Any]], tokenizer: Any) -> None:
    """The server's first prompts are those that are trained: with the tools."""
    assert rows
    for row in rows:
        ours = ChatTemplate(tokenizer, [TOOL])
        text = ours.render(ours.prepared(row["messages"][:1]), answer_next=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert row["turns"][0]["prompt_token_ids"] == ids


def test_an_agent_with_tools_is_evaluated_without_naming_a_parser(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's own template shows no tools; one that does is enough. A grammar writes the calls.

    Only this has vLLM read calls with the parser that ttrl chose.
    """
    caplog.set_level(logging.INFO)
    result = evaluate(
        str(model),
        {"double": tasks(3)},
        chat_template=template(HERMES_CALL),
        params={"structured_outputs": {"regex": CALL}},
        max_model_len=1024,
        samples_file=tmp_path / "samples.jsonl",
        cache=tmp_path / "cache",
    )
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template(HERMES_CALL)
    assert_prompts_are_ours(read_jsonl(tmp_path / "samples.jsonl"), tokenizer)
    found = result.to_json()["sets"]["double"]
    assert (found["num_samples"], found["num_failed"]) == (3, 0)
    assert found["metrics"]["calls"]["mean"] == 1.0 and found["metrics"]["says"]["mean"] == 0.0
    assert "tool calls: vLLM's parser 'hermes', by the model's chat template" in caplog.text


@pytest.mark.long
def test_an_agent_with_tools_is_trained_with_the_template_that_the_server_has(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long: only this has a real trainer write the template that a run was given. Above, the server
    has it; test_agents.py trains an agent with tools; a run's template on fake parts:
    tests/loop/test_train.py.
    """
    file = tmp_path / "tools.jinja"
    file.write_text(template(HERMES_CALL))
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model=str(model),
        chat_template=str(file),
        iterations=1,
        tasks_per_iteration=2,
        samples_per_task=4,
        max_tokens=8,
        seq_len=1024,
        device="cpu",
        server={"max_model_len": 1024},
    )
    result = train(config, tasks(2))
    said = capsys.readouterr().out
    assert "tool calls: vLLM's parser 'hermes', by the model's chat template" in said
    rows = read_jsonl(tmp_path / "run/iterations/0001/rollouts.jsonl")
    assert len(rows) == 8 and [row["error"] for row in rows] == [None] * 8
    tokenizer: Any = AutoTokenizer.from_pretrained(result.checkpoint)
    assert tokenizer.chat_template == file.read_text()
    assert_prompts_are_ours(rows, tokenizer)


# vLLM's parsers, without a server.

VLLM = """
import json
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
found = {}
for name, case in given["cases"].items():
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    tokenizer.add_tokens(case["tokens"], special_tokens=True)
    messages = [{"role": "user", "content": "a"}]
    asked = {"model": "m", "messages": messages}
    kind = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
    found[name] = []
    for text, tools in [[case["text"], given["tools"]], *((plain, None) for plain in given["plain"])]:
        request = ChatCompletionRequest(**asked, **({"tools": tools} if tools else {}))
        parser = kind(tokenizer, request.tools)
        parser.adjust_request(request)
        constrained = request.structured_outputs is not None
        ids = tokenizer.encode(text, add_special_tokens=False)
        _, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        calls = [[call.name, json.loads(call.arguments)] for call in calls or []]
        found[name].append([content, calls, constrained])
"""
PLAIN = [
    " Two\n\nlines. ",
    "<think>\nA thought.\n</think>\n\n<answer>12</answer>",
    'A list: [1, 2], an object: {"a": 1}.',
    "",
]


def test_vllms_parsers_read_what_templates_write_and_leave_other_replies_as_they_are(
    model: Path, in_vllm: Callable[..., Any]
) -> None:
    """A parser that is chosen by default changes no reply to a request without tools."""
    cases = {}
    forms = {form.parser: form for form in parsers._FORMS}
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    arguments = {"ttrl_at": "ttrl_hall"}
    function = {"name": "ttrl_look", "arguments": arguments}
    call = {"id": "123456789", "type": "function", "function": function}
    for name, form in CALLS.items():
        tokenizer.chat_template = "{%- set f = messages[0].tool_calls[0].function %}" + form
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        reply = text.removeprefix("<|end_header_id|>\n\n")  # of the prompt
        cases[name] = {"text": reply, "tokens": list(forms[name].tokens)}
    for name, start in (("granite", "<|tool_call|>"), ("phi4_mini_json", "functools")):
        text = start + json.dumps([function])
        cases[name] = {"text": text, "tokens": list(forms[name].tokens)}
    assert cases.keys() == forms.keys() - {"openai"}  # Harmony reads token ids of gpt-oss alone
    given = {"model": str(model), "cases": cases, "tools": [parsers._TOOL], "plain": PLAIN}
    found = in_vllm(VLLM, given)
    for name, (with_tools, *without) in found.items():
        assert with_tools[1] == [["ttrl_look", arguments]], (name, cases[name]["text"], with_tools)
        assert with_tools[2] == (name == "glm45"), f"{name} constrains what is sampled"
        for plain, (content, calls, constrained) in zip(PLAIN, without, strict=True):
            assert ((content or ""), calls, constrained) == (plain, [], False), name
