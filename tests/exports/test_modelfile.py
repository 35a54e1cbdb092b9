"""Modelfiles, and the templates observed from chat templates."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest

from ttrl.cli import main
from ttrl.data.chat.rendering import ChatTemplate
from ttrl.exports.modelfile import modelfile, turns_of
from ttrl.tiny_model import CHAT_TEMPLATE

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
NUMBERED = "{% for message in messages %}{{ loop.index }}: {{ message['content'] }}\n{% endfor %}"
NO_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}{{ message['content'] }}{% endfor %}"
)


def template(source):
    return ChatTemplate(
        SimpleNamespace(
            chat_template=source,
            special_tokens_map={"bos_token": "<s>"},
            get_chat_template=lambda *_, **__: source,
        )
    )


@pytest.mark.parametrize("source", [CHATML, CHAT_TEMPLATE, LLAMA3], ids=["chatml", "ours", "llama"])
def test_the_observed_template_writes_as_the_original(source):
    original = template(source)
    turns = turns_of(original)
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user", "assistant", "user"]):
        messages = [
            {"role": role, "content": f"text {number} of {role}"}
            for number, role in enumerate(roles)
        ]
        assert turns.write(messages) == original.render(messages, answer_next=True)


def test_a_default_system_message_is_kept():
    assert turns_of(template(CHATML)).without_system == "<|im_start|>system\nYou help.<|im_end|>\n"
    go = turns_of(template(CHATML)).go()
    assert go.startswith("{{ if not .System }}<|im_start|>system\nYou help.<|im_end|>\n{{ end }}")
    assert go.endswith("{{ end }}{{ end }}<|im_start|>assistant\n")


@pytest.mark.parametrize("source", [NUMBERED, NO_SYSTEM], ids=["numbered", "no-system"])
def test_a_template_with_more_to_it_is_left_to_ollama(source):
    assert turns_of(template(source)) is None


def test_a_model_file_names_everything(trained_run):
    checkpoint = trained_run / "iterations" / "0003" / "checkpoint"
    text = modelfile(checkpoint, "figs.gguf", stops=["<|end|>", 'a"b'], temperature=0.7)
    lines = text.splitlines()
    assert lines[0] == "FROM ./figs.gguf"
    assert lines[1].startswith('TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}')
    assert 'PARAMETER stop "<|end|>"' in lines
    assert 'PARAMETER stop "a\\"b"' in lines
    assert lines[-1] == "PARAMETER temperature 0.7"


def test_a_run_is_exported(trained_run, tmp_path, capsys):
    """The best checkpoint, in its own dtype; the file is whole, and names no place."""
    assert main(["export", str(trained_run), "--to", "gguf", "--output", str(tmp_path)]) == 0
    path, described = map(Path, capsys.readouterr().out.split())
    assert path.name == "private_run-0003-f32.gguf"
    assert described.read_text().startswith(f"FROM ./{path.name}\n")
    fields = gguf.GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "qwen2"
    assert str(trained_run).encode() not in path.read_bytes()


def test_an_output_that_is_a_file_is_refused(trained_run, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    command = ["export", str(trained_run), "--to", "gguf", "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert "is a file" in capsys.readouterr().err


def test_an_adapter_without_its_base_is_refused(trained_run, tmp_path, capsys):
    run = shutil.copytree(trained_run, tmp_path / "run")
    checkpoint = run / "iterations" / "0003" / "checkpoint"
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "adapter").mkdir()
    (checkpoint / "adapter" / "ttrl_adapter.json").write_text('{"lora_base": "/gone"}')
    assert main(["export", str(run), "--to", "gguf", "--output", str(tmp_path / "out")]) == 2
    assert "could not be merged into its base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
