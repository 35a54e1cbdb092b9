"""Which of vLLM's parsers a server is started with."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tool_templates import CALLS, HERMES_CALL, template

from ttrl.errors import ConfigError
from ttrl.server import parsers as parsers_module
from ttrl.server.parsers import parsers_of
from ttrl.server.vllm import VLLMServer

SHARED = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
NO_PARSER = {"tool-call-parser": None, "enable-auto-tool-choice": None}


def folder_with(
    folder: Path, source: str, model_type: str = "llama", tokens: tuple[str, ...] = ()
) -> Path:
    (folder / "chat_template.jinja").write_text(source)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    added = [{"content": token} for token in tokens]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chosen(model: Path, **given: Any) -> Any:
    return parsers_of(model, given).arguments["tool-call-parser"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared templates are not here")
@pytest.mark.parametrize(
    ("name", "tokens", "parser"),
    [
        ("llama.cpp/Qwen-Qwen2.5-7B-Instruct", (), "hermes"),
        ("llama.cpp/Qwen-Qwen3-0.6B", (), "hermes"),
        ("trl/qwen3_instruct_2507", (), "hermes"),
        ("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", ("<|python_tag|>",), "llama3_json"),
        ("llama.cpp/mistralai-Mistral-Nemo-Instruct-2407", ("[TOOL_CALLS]",), "mistral"),
        ("llama.cpp/google-gemma-2-2b-it", (), None),
        ("llama.cpp/microsoft-Phi-3.5-mini-instruct", (), None),
        ("llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", (), None),
        ("chujiezheng/chatml", (), None),
    ],
)
def test_a_published_template_says_which_parser(
    tmp_path: Path, name: str, tokens: tuple[str, ...], parser: str | None
) -> None:
    source = (SHARED / f"{name}.jinja").read_text()
    parsers = parsers_of(folder_with(tmp_path, source, tokens=tokens))
    assert parsers.arguments["tool-call-parser"] == parser
    if parser is None:
        assert "its chat template shows the model no tools" in parsers.said
        assert parsers.arguments == NO_PARSER
    else:
        assert parsers.said == f"tool calls: vLLM's parser {parser!r}, by the model's chat template"
        assert parsers.arguments["enable-auto-tool-choice"] is True


@pytest.mark.parametrize("parser", CALLS)
def test_each_form_of_a_call_has_its_parser(tmp_path: Path, parser: str) -> None:
    tokens = ("<|python_tag|>", "[TOOL_CALLS]", *parsers_module._DEEPSEEK)
    model = folder_with(tmp_path, template(CALLS[parser]), tokens=tokens)
    assert chosen(model) == parser


def test_a_form_or_a_tokenizer_that_no_parser_takes_has_none(tmp_path: Path) -> None:
    model = folder_with(tmp_path, template("{{- 'CALL ' + f.name }}"))
    said = parsers_of(model).said
    assert "ttrl knows no parser for its chat template's form of calls" in said
    assert said.endswith("requests with tools need tool_call_parser")
    folder_with(tmp_path, template(CALLS["mistral"]))
    assert "the tokenizer lacks [TOOL_CALLS]" in parsers_of(model).said
    folder_with(tmp_path, template(CALLS["mistral"]), tokens=("[TOOL_CALLS]",))
    (tmp_path / "tekken.json").write_text("{}")  # vLLM would constrain what is sampled
    assert "by a grammar" in parsers_of(model).said and chosen(model) is None
    folder_with(tmp_path, "{{ messages[0].content.no.such }}")
    assert "its chat template fails" in parsers_of(model).said
    (tmp_path / "chat_template.jinja").unlink()
    assert "cannot be read here" in parsers_of(model).said and chosen(model) is None


def test_a_parser_that_is_named_or_switched_off_stays(tmp_path: Path) -> None:
    model = folder_with(tmp_path, template(HERMES_CALL))
    assert chosen(model) == chosen(model, tool_call_parser="auto") == "hermes"
    named = parsers_of(model, {"tool_call_parser": "xlam"})
    assert named.arguments == {"tool-call-parser": "xlam", "enable-auto-tool-choice": True}
    assert named.said == "tool calls: vLLM's parser 'xlam', as set"
    off: list[dict[str, Any]] = [{"tool_call_parser": None}, {"tool-call-parser": "none"}]
    off += [{"enable_auto_tool_choice": False}]
    for given in off:
        parsers = parsers_of(model, given)
        assert parsers.arguments == NO_PARSER and "no parser, as set" in parsers.said


def test_the_server_is_started_with_it(tmp_path: Path) -> None:
    model = folder_with(tmp_path, template(HERMES_CALL))

    def command(**given: Any) -> str:
        settings: dict[str, Any] = {"served_model_name": "m", "log_path": tmp_path / "log"}
        return " ".join(VLLMServer(model, **settings, extra_args=given)._command())

    assert "--tool-call-parser hermes" in command() and "--enable-auto-tool-choice" in command()
    assert "--reasoning-parser" not in command()
    assert "tool" not in command(tool_call_parser=None)
    assert "tool" not in command(enable_auto_tool_choice=False)
    assert "--tool-call-parser xlam" in command(tool_call_parser="xlam")
    assert "--enable-auto-tool-choice" in command(tool_call_parser="xlam")
    assert "--reasoning-parser qwen3" in command(reasoning_parser="qwen3")


def test_a_switch_without_a_parser_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    model = folder_with(tmp_path, "{{ messages[0].content }}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    given = {"enable_auto_tool_choice": True}
    server = VLLMServer(model, served_model_name="m", log_path=tmp_path / "log", extra_args=given)
    with pytest.raises(ConfigError, match="shows the model no tools; name one, such as"):
        server.start()
    assert not (tmp_path / "log").exists()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared templates are not here")
@pytest.mark.parametrize(
    ("name", "model_type", "parser"),
    [
        ("llama.cpp/Qwen-Qwen3-0.6B", "qwen3", "qwen3"),
        ("trl/qwen3_instruct_2507", "qwen3", None),
        ("llama.cpp/Qwen-Qwen2.5-7B-Instruct", "qwen2", None),
    ],
)
def test_reasoning_stays_in_the_content_unless_a_parser_is_asked_for(
    tmp_path: Path, name: str, model_type: str, parser: str | None
) -> None:
    """By default graders read what the model wrote, whatever its family."""
    source = (SHARED / f"{name}.jinja").read_text()
    model = folder_with(tmp_path, source, model_type, ("<think>", "</think>"))
    assert "reasoning-parser" not in parsers_of(model).arguments
    asked = parsers_of(model, {"reasoning_parser": "auto"})
    assert asked.arguments["reasoning-parser"] == parser
    if parser is None:
        assert asked.said.endswith("; reasoning: no parser is known for the model")
    else:
        assert asked.said.endswith(f"; reasoning: parser {parser!r}")
    assert parsers_of(model, {"reasoning_parser": "none"}).arguments["reasoning-parser"] is None


def test_a_parser_of_reasoning_is_chosen_by_family_and_template_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    """It needs the tokens that it looks for."""
    source = template(HERMES_CALL) + "{# <think> #}"
    tokens = ("<think>", "</think>")
    said = {}
    for model_type, there in (("qwen3", tokens), ("qwen3", ()), ("gemma2", tokens)):
        model = folder_with(tmp_path, source, model_type, there)
        found = parsers_of(model, {"reasoning_parser": "auto"})
        said[model_type, bool(there)] = found.said
        assert found.arguments["reasoning-parser"] == (
            "qwen3" if (model_type, there) == ("qwen3", tokens) else None
        )
        assert "reasoning-parser" not in parsers_of(model).arguments
    assert said["qwen3", True].endswith("; reasoning: parser 'qwen3'")
    assert said["qwen3", False].endswith("; reasoning: no parser is known for the model")
    assert said["gemma2", True].endswith("; reasoning: no parser is known for the model")
    assert parsers_of(tmp_path, {"reasoning_parser": "none"}).arguments["reasoning-parser"] is None


def test_a_template_may_refuse_a_reply_and_tell_the_form_of_calls_in_the_prompt(
    tmp_path: Path,
) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m.content }}{% endfor %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    )
    assert (
        "knows no parser for its chat template's form"
        in parsers_of(folder_with(tmp_path, source)).said
    )


def test_a_model_with_templates_for_tools_and_without_uses_the_one_for_tools(
    tmp_path: Path,
) -> None:
    model = folder_with(tmp_path, "")
    (model / "chat_template.jinja").unlink()
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": template(HERMES_CALL)},
    ]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert chosen(model) == "hermes"
