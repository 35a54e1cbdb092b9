"""Each thing that a model folder can lack, and what the message says."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from ttrl.errors import ModelFolderError
from ttrl.server import model_folder
from ttrl.server.cpu import cpu_arguments, cpu_batch
from ttrl.server.model_folder import check_model_folder, weights_digest


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"x")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_a_complete_folder(model):
    assert check_model_folder(model) == model == check_model_folder(str(model))


@pytest.fixture
def adapter(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "adapter_alone")
    (folder / "model.safetensors").unlink()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"a")
    (folder / "adapter" / "ttrl_adapter.json").write_text(json.dumps({"lora_base": str(model)}))
    return folder


def test_an_adapter_alone_is_as_complete_as_its_base(model, adapter):
    assert check_model_folder(adapter) == adapter
    (model / "model.safetensors").unlink()
    with pytest.raises(
        ModelFolderError, match=f"its weights are an adapter to {model}: no weights"
    ):
        check_model_folder(adapter)


def test_an_adapter_alone_is_what_it_and_its_base_are(model, adapter):
    seen = {weights_digest(model), weights_digest(adapter)}
    (adapter / "adapter" / "adapter_model.safetensors").write_bytes(b"b")
    seen.add(weights_digest(adapter))
    (model / "model.safetensors").write_bytes(b"y")
    seen.add(weights_digest(adapter))
    assert len(seen) == 4


def test_template_in_the_tokenizer_config(model):
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert check_model_folder(model) == model


@pytest.mark.parametrize(
    "template, message",
    [
        (b"", r"chat_template\.jinja: it is empty"),
        (b" \n", r"chat_template\.jinja: it is empty"),
        (b"Hello", r"chat_template\.jinja: it never reads `messages`"),
        (b"{% for m in messages %}", r"chat_template\.jinja: line 1 is not valid Jinja"),
        (b"{{ messages }}\xff", r"chat_template\.jinja cannot be read: it is not UTF-8 text"),
        (
            b"{% for m in messages %}" * 30 + b"{% endfor %}" * 30,
            r"chat_template\.jinja: it cannot be compiled",
        ),
    ],
)
def test_a_damaged_chat_template_is_refused(model, template, message):
    (model / "chat_template.jinja").write_bytes(template)
    with pytest.raises(ModelFolderError, match=f"{message}.* set chat_template to"):
        check_model_folder(model)
    assert check_model_folder(model, chat_template=False) == model


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"chat_template": 5}', r"tokenizer_config\.json: chat_template is 5; it must be a text"),
        ('{"chat_template": [{"name": "a"}]}', r"config\.json: chat_template is \[\{"),
        ('{"chat_template": [{"name": "a", "template": 1}]}', r"config\.json: chat_template is \["),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', 'named "default".*are: rag'),
        ('{"chat_template": " "}', r"'default' in tokenizer_config\.json: it is empty"),
        ('{"chat_template": ""}', "no chat template: neither"),
        (
            '{"chat_template": [{"name": "default", "template": "{{ messages }}"},'
            '{"name": "tool_use", "template": "{{ messages"}]}',
            r"'tool_use' in tokenizer_config\.json: line 1 is not valid Jinja",
        ),
        ("{", r"tokenizer_config\.json is not a JSON object"),
        ("[]", r"tokenizer_config\.json is not a JSON object"),
    ],
)
def test_a_damaged_tokenizer_config_is_refused(model, content, message):
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=message):
        check_model_folder(model)


@pytest.mark.parametrize(
    "missing, message",
    [
        ("config.json", r"config\.json is missing"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer files"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_what_is_missing_is_named(model, missing, message):
    (model / missing).unlink()
    with pytest.raises(ModelFolderError, match=message):
        check_model_folder(model)
    if missing == "chat_template.jinja":
        assert check_model_folder(model, chat_template=False) == model


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFolderError) as error:
        check_model_folder(tmp_path / "empty")
    assert str(error.value).count("\n  - ") == 4


def test_missing_shards_and_damaged_files(model):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelFolderError, match=r"1 weight files listed in .* are missing: model-2\.safetensors"
    ):
        check_model_folder(model)
    (model / "model-2.safetensors").write_bytes(b"x")
    assert check_model_folder(model) == model
    (model / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not valid JSON"):
        check_model_folder(model)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},  # tied by default
        {"model_type": "gpt2"},
    ],
)
def test_a_head_that_is_not_the_tied_embeddings_is_refused(config, model, adapter):
    (model / "config.json").write_text(json.dumps(config))
    embeddings = torch.ones(3, 2)
    tensors = {"model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.clone()}
    save_file(tensors, model / "model.safetensors")
    shutil.copy(model / "config.json", adapter)
    assert check_model_folder(model) == model and check_model_folder(adapter) == adapter
    save_file({**tensors, "lm_head.weight": embeddings + 1}, model / "model.safetensors")
    said = r"lm_head\.weight in model\.safetensors differs from model\.embed_tokens\.weight in"
    for folder in (model, adapter):
        with pytest.raises(ModelFolderError, match=said):
            check_model_folder(folder)
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    if "text_config" not in config:
        assert check_model_folder(model) == model


def test_names_of_the_hub_and_folders_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_model_folder("org/name-1.5B") is None
    for path in ["name", "a/b/c", "./org/name", str(tmp_path / "no"), tmp_path / "org" / "name"]:
        with pytest.raises(ModelFolderError, match="does not exist"):
            check_model_folder(path)
    (tmp_path / "org" / "name").mkdir(parents=True)  # what exists locally is meant
    with pytest.raises(ModelFolderError, match="incomplete"):
        check_model_folder("org/name")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelFolderError, match="is a file"):
        check_model_folder(tmp_path / "file")


def test_the_digest_changes_with_everything_that_is_computed_with(model, tmp_path):
    folder = model
    first = weights_digest(folder)
    (folder / "canary.json").write_text("{}")
    (folder / "README.md").write_text("hello")
    (folder / "adapter").mkdir()  # merged already
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    assert weights_digest(folder) == first
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert weights_digest(copy) == first  # wherever it lies
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(
            data[:-1] + bytes([data[-1] ^ 1]) if name.endswith("safetensors") else data + b" "
        )
        assert weights_digest(copy) != first, name
        (copy / name).write_bytes(data)
    assert weights_digest(copy) == first
    assert weights_digest("org/name") == "hub:org/name"


def test_small_models_take_larger_steps_on_a_cpu(tmp_path):
    large = {"max-num-seqs": 512, "max-num-batched-tokens": 8192}
    assert (
        cpu_batch({"vocab_size": 262, "hidden_size": 128})
        == large
        == cpu_batch({"vocab_size": 32768, "hidden_size": 1024})
    )
    # VLLM refuses 512 sequences of 256 tokens.
    for name in ("max_num_seqs", "max-num-batched-tokens", "enable_chunked_prefill"):
        assert cpu_batch({"vocab_size": 262, "hidden_size": 128}, {"seed": 1, name: None}) == {}
    for other in (
        {"vocab_size": 32769, "hidden_size": 64},
        {"vocab_size": 262, "hidden_size": 1025},
        {"text_config": {}},
        {},
    ):
        assert cpu_batch(other) == {}
    (tmp_path / "config.json").write_text('{"vocab_size": 262, "hidden_size": 128}')
    assert cpu_batch(tmp_path) == large and cpu_batch("org/name") == {}
    (tmp_path / "config.json").write_text("[")
    assert cpu_batch(tmp_path) == {}


@pytest.mark.parametrize("field", ["mamba_n_heads", "linear_num_value_heads", "conv_L_cache"])
def test_no_prefix_cache_for_recurrent_layers_on_a_cpu(field):
    """vLLM 0.32 cannot keep their states there: its engine ends with an IndexError."""
    text = {"vocab_size": 262, "hidden_size": 128, field: 4}
    assert cpu_arguments(text)["enable-prefix-caching"] is False
    assert cpu_arguments({"text_config": text})["enable-prefix-caching"] is False
    assert "enable-prefix-caching" not in cpu_arguments(
        {"vocab_size": 262, "hidden_size": 128, field: None}
    )


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ConnectionError("no route"), r"the hub cannot be reached \(no network\?\)"),
        (ValueError("no such name"), "the hub refuses it: ValueError: no such name"),
        (type("ReadTimeout", (Exception,), {})("slow"), ""),
    ],
)
def test_a_model_on_the_hub_is_asked_for_and_a_slow_answer_is_none(error, refused, monkeypatch):
    def model_info(self, model, timeout):
        assert (model, timeout) == ("org/name", model_folder._HUB_SECONDS)
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    if not refused:
        model_folder.check_model("org/name")
        return
    with pytest.raises(
        ModelFolderError,
        match=rf"'org/name' is neither a folder here nor in the hub's cache, and {refused}",
    ):
        model_folder.check_model("org/name")


def test_no_prefix_cache_where_experts_are_returned_on_a_cpu():
    """A cached prompt's experts would be lost."""
    given = ["enable-return-routed-experts", "seed"]
    assert (
        cpu_arguments({"vocab_size": 262, "hidden_size": 128}, given)["enable-prefix-caching"]
        is False
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{"hidden_size": 8}', 'config.json has no "model_type"'),
        ("config.json", "[]", "config.json is not valid JSON"),
        ("model.safetensors.index.json", "{", "index.json cannot be read; copy the model again"),
    ],
)
def test_damaged_files_are_named(model, name, text, said):
    (model / name).write_text(text)
    with pytest.raises(ModelFolderError) as caught:
        check_model_folder(model)
    assert said in str(caught.value)


def test_the_weights_are_those_of_the_index(model):
    """Files that it does not name are another model's, or left from one."""
    save_file({"a": torch.ones(2, dtype=torch.float16)}, model / "model-1.safetensors")
    save_file({"b": torch.ones(9)}, model / "old.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_folder.weight_files(model) == [model / "model-1.safetensors"]
    assert model_folder.stored_dtype(model) == "float16"


def test_whether_the_hub_can_be_reached_is_its_name_s_to_say(monkeypatch):
    """A proxy resolves names itself."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not model_folder.hub_is_out_of_reach()
    monkeypatch.setenv("HF_ENDPOINT", "http://no.such.host.invalid")
    assert model_folder.hub_is_out_of_reach()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert not model_folder.hub_is_out_of_reach()
