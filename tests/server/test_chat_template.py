"""A model with another chat template than its own."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tool_templates import HERMES_CALL, template
from transformers import AutoTokenizer

from ttrl.errors import ModelFolderError, UserError, WeightSyncError
from ttrl.server import auth
from ttrl.server.chat_template import (
    is_with_mistral_tokenizer,
    read_chat_template,
    template_digest,
    templated,
    with_chat_template,
)
from ttrl.server.connection import JoinedServer
from ttrl.server.model_folder import chat_templates_of, weights_digest
from ttrl.server.sites import base_digests

PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}|{% endfor %}"


def test_a_setting_is_a_file_or_the_text(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN)
    assert read_chat_template(PLAIN) == read_chat_template(str(file)) == PLAIN


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothere.jinja", "chat_template nothere.jinja: the file cannot be read: No such file"),
        ("{% for m in messages %}{{ m }}", "line 1 is not valid Jinja"),
        ("{{ messages | no_such_filter }}", "line 1 is not valid Jinja: No filter named"),
        ("Hello {{ name }}", "it never reads `messages`"),
        ("{{ messages }}" + " " * 70_000, "it has 70,014 characters; the limit is 65,536"),
    ],
)
def test_what_is_no_template_is_refused(given: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_chat_template(given)


def test_a_file_with_errors_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text("{% if messages %}")
    with pytest.raises(UserError, match=r"chat_template .*bad\.jinja: line 1 is not valid Jinja"):
        read_chat_template(str(file))
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="it is not text"):
        read_chat_template(str(file))
    with pytest.raises(UserError, match="Is a directory"):
        read_chat_template(str(tmp_path))


def test_whatever_reads_the_folder_finds_the_template(tiny_model: Path, tmp_path: Path) -> None:
    model = with_chat_template(tiny_model, PLAIN, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False)
    assert text == f"{tokenizer.bos_token or ''}a|"
    assert weights_digest(model) != weights_digest(tiny_model)
    assert base_digests(model).keys() == base_digests(tiny_model).keys() | {"chat_template.jinja"}
    assert base_digests(model) != base_digests(tiny_model)
    assert template_digest(model) != template_digest(tiny_model)
    assert with_chat_template(tiny_model, None, tmp_path / "other") == tiny_model


def test_named_templates_of_the_model_do_not_win(tiny_model: Path, tmp_path: Path) -> None:
    """transformers prefers a template called tool_use where there are tools."""
    source = with_chat_template(tiny_model, PLAIN, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text(template(HERMES_CALL))
    model = with_chat_template(source, "{{ messages }}", tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    assert tokenizer.chat_template == "{{ messages }}"


def test_the_folder_is_made_again_where_the_template_or_the_model_changed(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    made = with_chat_template(tiny_model, PLAIN, folder)
    inode = made.stat().st_ino
    assert with_chat_template(tiny_model, PLAIN, folder).stat().st_ino == inode
    with_chat_template(tiny_model, PLAIN + "{# changed #}", folder)
    assert (folder / "chat_template.jinja").read_text() == PLAIN + "{# changed #}"
    (folder / "config.json").unlink()
    assert (with_chat_template(tiny_model, PLAIN, folder) / "config.json").is_file()


def test_a_base_model_needs_none_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    base = with_chat_template(tiny_model, PLAIN, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    (base / "tokenizer_config.json").unlink()
    (base / "tokenizer_config.json").write_text("{}")
    with templated(str(base), PLAIN) as folder:
        assert (Path(folder) / "chat_template.jinja").read_text() == PLAIN
    assert not Path(folder).exists()
    with pytest.raises(ModelFolderError, match="does not exist"), templated("not/here/at", PLAIN):
        pass


def test_a_tokenizer_that_takes_no_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="only Mistral's own tokenizer"):
        with_chat_template(tmp_path, PLAIN, tmp_path / "model")


def test_a_joined_server_with_another_template_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server's middleware says is compared with the run's model."""
    model = with_chat_template(tiny_model, PLAIN, tmp_path / "model")

    def fence() -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", b"Bearer key-of-the-test")]
        scope = {"type": "http", "path": auth.FENCE_PATH, "method": "GET", "headers": headers}
        monkeypatch.setenv(auth.KEY_VARIABLE, "key-of-the-test")
        monkeypatch.setenv(auth.FENCE_VARIABLE, str(tmp_path / "fence"))
        asyncio.run(auth.RequireKey(None)(scope, None, send))  # type: ignore[arg-type]
        return sent[-1]["body"]

    class Answered(JoinedServer):
        def request(self, *_: Any, **__: Any) -> Any:
            return json.loads(fence())

    server = Answered("http://h:1", served_model_name="m", dtype="float32", api_key="k")
    monkeypatch.delenv(auth.TEMPLATE_VARIABLE, raising=False)
    server.check_chat_template(model)  # an older server does not say
    monkeypatch.setenv(auth.TEMPLATE_VARIABLE, template_digest(model))
    server.check_chat_template(model)
    monkeypatch.setenv(auth.TEMPLATE_VARIABLE, template_digest(tiny_model))
    with pytest.raises(
        WeightSyncError, match="and the run's model have different chat templates; start it"
    ):
        server.check_chat_template(model)


def test_a_model_may_have_several_templates(tmp_path: Path) -> None:
    """The default one is compared with a server's, in either way of storing them."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    named = {"default": PLAIN, "tool_use": PLAIN + "{{ tools }}"}
    rows = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": rows}))
    assert chat_templates_of(tmp_path) == named
    digest = template_digest(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert template_digest(tmp_path) == digest
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    assert chat_templates_of(tmp_path) == named
    assert template_digest(tmp_path) == digest


def test_another_template_takes_mistral_s_own_tokenizer_out(
    tiny_model: Path, tmp_path: Path
) -> None:
    """vLLM would prefer it, and it takes no template."""
    model = tmp_path / "both"
    shutil.copytree(tiny_model, model)
    (model / "tekken.json").write_text("{}")
    assert is_with_mistral_tokenizer(model)
    made = with_chat_template(model, PLAIN, tmp_path / "made")
    assert not is_with_mistral_tokenizer(made)
    assert (made / "tokenizer.json").is_file()


def test_a_damaged_copy_of_a_model_is_made_again(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with_chat_template(tiny_model, PLAIN, folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with_chat_template(tiny_model, PLAIN, folder)
    assert (folder / "chat_template.jinja").read_text() == PLAIN


def test_a_model_on_a_hub_that_cannot_be_reached_has_no_known_template(no_hub: None) -> None:
    assert not is_with_mistral_tokenizer("org/name")
    assert chat_templates_of("org/name") == {}
