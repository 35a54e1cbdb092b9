"""Check a model folder for completeness, before a server or a trainer starts and buries the error
in a long log.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ttrl.costs.parameters import has_tied_head
from ttrl.data.chat.template_sandbox import compile_problem
from ttrl.errors import ModelFolderError, describe
from ttrl.records import ADAPTER_FOLDER, ADAPTER_SETTINGS, CANARY_FILE
from ttrl.system.console import note
from ttrl.system.files import digest, read_object
from ttrl.system.weight_files import check_tied_head, stored_tensors

_HUB_SECONDS = 3.0
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
_COMPUTED_WITH = (".safetensors", ".bin", ".json", ".model", ".jinja", ".txt", ".py")
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_model_folder(path: str | os.PathLike[str], *, chat_template: bool = True) -> Path | None:
    """Check `path` for config, weights, tokenizer and, unless told otherwise, a chat template.

    Returns the folder, or None for a name such as "org/name" without a local folder, left to the
    hub. An adapter without merged weights (see `merge_adapter`) has the weights of its base. With
    tied embeddings, an output head in the files must equal them.
    Raises ModelFolderError with all missing parts and the remedy.
    """
    folder = Path(path)
    if not folder.exists():
        if isinstance(path, str) and _HUB_NAME.fullmatch(path) and not path.startswith("."):
            return None
        raise ModelFolderError(
            f"model folder {folder} does not exist; give a Hugging Face model folder, a name of "
            "`ttrl models`, or a hub name"
        )
    if not folder.is_dir():
        raise ModelFolderError(
            f"model folder {folder} is a file; give its folder, with config.json and the weights"
        )
    source = folder
    weights = _weight_problems(folder)
    base = base_of_adapter(folder)
    if weights and base is not None:
        source = base
        weights = [
            f"its weights are an adapter to {base}: {problem}" for problem in _weight_problems(base)
        ]
    problems = [*_config_problems(folder), *weights, *_tokenizer_problems(folder, chat_template)]
    if problems:
        raise ModelFolderError(
            f"model folder {folder} is incomplete:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    if has_tied_head(_read_json(folder / "config.json")):
        check_tied_head(weight_files(source))
    return folder


def check_model(model: str, *, chat_template: bool = True) -> None:
    """Check the availability of a model: a complete folder, or a name on the hub.

    Raises ModelFolderError, also for a folder without a chat template unless told otherwise.
    """
    if check_model_folder(model, chat_template=chat_template) is None:
        _check_hub(model)


def _check_hub(model: str) -> None:
    """Raise ModelFolderError if the hub refuses, or cannot be reached; a timeout proves nothing."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            HfApi().model_info(model, timeout=_HUB_SECONDS)
    except Exception as error:
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        if "Timeout" not in type(error).__name__ and (status is None or status < 500):
            why = f"the hub refuses it: {describe(error)}"
            if "Connect" in type(error).__name__:
                why = "the hub cannot be reached (no network?)"
            raise ModelFolderError(
                f"model {model!r} is neither a folder here nor in the hub's cache, and {why}; give "
                "a model folder, or a name of `ttrl models`"
            ) from error


def base_of_adapter(folder: Path) -> Path | None:
    """Return the base of the adapter in a checkpoint of ours; None without an adapter."""
    base = (_read_json(folder / ADAPTER_FOLDER / ADAPTER_SETTINGS) or {}).get("lora_base")
    if base is None:
        return None
    return Path(base)


def merge_adapter(
    folder: Path,
    base: Path | None = None,
    run: "Callable[..., subprocess.CompletedProcess[str]]" = subprocess.run,
) -> None:
    """Write the merged weights into a checkpoint with only an adapter, for readers of whole
    weights; harmless elsewhere. Runs with adapters on their servers store only adapters. Uses a
    process of its own: merging loads torch.

    base: the adapter's base, if moved. run: runs the process. Raises ModelFolderError if the base
        is gone, or the disk full.
    """
    if base_of_adapter(folder) is None or not _weight_problems(folder):
        return
    note(f"{folder} holds only an adapter; merging it into its base")
    command = [
        sys.executable,
        "-m",
        "ttrl.training.merge",
        str(folder),
        *([] if base is None else ["--base", str(base)]),
    ]
    done = run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ModelFolderError(
            f"{folder}: the adapter could not be merged into its base: "
            f"{done.stderr.strip()[-2000:]}"
        )


def local_folder(model: str, *, chat_template: bool = True) -> Path:
    """Return a model's folder with whole weights; download it if `model` is a name on the hub.

    Raises ModelFolderError, also for a model without a chat template unless told otherwise.
    """
    folder = check_model_folder(model, chat_template=chat_template)
    if folder is None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        files = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        offline = hub_is_out_of_reach()
        try:
            downloaded = snapshot_download(model, allow_patterns=files, local_files_only=offline)
        except (HFValidationError, OSError) as error:
            if offline:
                why = f"{NO_HUB}; give a model folder"
            else:
                why = str(error)
            raise ModelFolderError(f"{model} cannot be downloaded from the hub: {why}") from error
        folder = check_model_folder(downloaded, chat_template=chat_template)
        assert folder is not None, "it was just downloaded"
    merge_adapter(folder)
    return folder.absolute()


def small_file(model: str | os.PathLike[str], name: str) -> Path | None:
    """Return a file of a model, other than weights, from its folder or the hub; None if
    unavailable.
    """
    if Path(model).exists() or not _HUB_NAME.fullmatch(str(model)):
        path = Path(model, name)
        if path.is_file():
            return path
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    offline = hub_is_out_of_reach()
    try:
        return Path(
            hf_hub_download(str(model), name, local_files_only=offline, etag_timeout=_HUB_SECONDS)
        )
    except (HFValidationError, OSError):
        return None


NO_HUB = "the hub's name cannot be resolved (no network?), and the model is not in the cache"


def hub_is_out_of_reach() -> bool:
    """Return whether the hub's name cannot be resolved here: asking the hub would then only cost
    half a minute of attempts. Behind a proxy, the proxy resolves it."""
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(
            urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname, 443
        )
    except OSError:
        return True
    return False


def weights_digest(path: str | os.PathLike[str]) -> str:
    """Return a name for all a model folder computes: SHA-256 over its files' names and contents.

    Included: weights, config, tokenizer and chat template; for an unmerged adapter, itself and its
    base. Excluded: canary, logs, documents and merged adapters. A name on the hub stands for
    itself: hub revisions are not looked up. Reads every weight file once (about a second per GB).
    Raises ModelFolderError.
    """
    folder = check_model_folder(path, chat_template=False)
    if folder is None:
        return f"hub:{os.fspath(path)}"
    total = hashlib.sha256()
    alone = None
    if _weight_problems(folder):
        alone = base_of_adapter(folder)
    if alone is not None:
        total.update(weights_digest(alone).encode())
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if (inside.parts[0] == ADAPTER_FOLDER and alone is None) or file.name == CANARY_FILE:
            continue
        if file.is_file() and file.suffix in _COMPUTED_WITH:
            total.update(f"{inside.as_posix()}\0{digest(file)}\n".encode())
    return total.hexdigest()


def chat_templates_of(model: str | os.PathLike[str]) -> Mapping[str, str]:
    """Return the chat templates of a model's files by name, as transformers chooses them: the only
    one is "default", others "tool_use" and the like. Return {} without one.

    Raises ModelFolderError for a file without text, and for templates that are neither a text nor a
    list of named texts.
    """
    templates = {}
    file = small_file(model, TEMPLATE_FILE)
    if file is not None:
        templates["default"] = _template_text(file)
    for named in sorted(Path(model, NAMED_TEMPLATES).glob("*.jinja")):
        templates[named.stem] = _template_text(named)
    if templates:
        return templates
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = json_file(model, name).get("chat_template")
        if found:
            return _templates_in(found, Path(model, name))
    return {}


def _template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ModelFolderError(
            f"{file} cannot be read: {why}; copy it again, or set chat_template to another file"
        ) from error


def _templates_in(found: Any, file: Path) -> Mapping[str, str]:
    """Return the templates in a JSON file's field."""
    if isinstance(found, str):
        return {"default": found}
    with contextlib.suppress(KeyError, TypeError):
        named = {row["name"]: row["template"] for row in found}
        if all(isinstance(text, str) for text in (*named, *named.values())):
            return named
    raise ModelFolderError(
        f"{file}: chat_template is {json.dumps(found)[:80]}; it must be a text, or a list of "
        '{"name": …, "template": …}'
    )


def json_file(model: str | os.PathLike[str], name: str) -> Mapping[str, Any]:
    """Return a JSON file of a model; {} if it is missing or holds something else."""
    file = small_file(model, name)
    with contextlib.suppress(OSError, ValueError):
        if file is not None:
            return read_object(file)
    return {}


def _read_json(path: Path) -> Any:
    """Return the file's content, or None if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _config_problems(folder: Path) -> list[str]:
    if not (folder / "config.json").is_file():
        return ["config.json is missing; copy it from the model of these weights"]
    config = _read_json(folder / "config.json")
    if not isinstance(config, dict):
        return ["config.json is not valid JSON; copy it again from the model of these weights"]
    if not config.get("model_type"):
        return ['config.json has no "model_type"; transformers and vLLM need it']
    return []


def _weight_problems(folder: Path) -> list[str]:
    for name in _INDEX_FILES:
        named = _named_in(folder / name)
        if named is not None:
            missing = sorted(shard for shard in named if not (folder / shard).is_file())
            if missing:
                return [
                    f"{len(missing)} weight files listed in {name} are missing: "
                    f"{', '.join(missing[:5])}"
                ]
            return []
        if (folder / name).is_file():
            return [f"{name} cannot be read; copy the model again"]
    if any(
        file.stat().st_size
        for pattern in ("*.safetensors", "pytorch_model*.bin")
        for file in folder.glob(pattern)
    ):
        return []
    return [
        "no weights: neither *.safetensors nor pytorch_model*.bin; save the model with "
        "save_pretrained(folder)"
    ]


def _named_in(index_file: Path) -> set[str] | None:
    """Return the weight files listed in an index; None without a readable one."""
    index = _read_json(index_file)
    if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
        return set(index["weight_map"].values())
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return a model's safetensors files: those in its index, or all."""
    named = _named_in(folder / _INDEX_FILES[0])
    return sorted(
        file for file in folder.glob("*.safetensors") if named is None or file.name in named
    )


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype of most numbers in a model's weight files, under config.json's name for it;
    None without readable files. A config.json can claim another one."""
    counts: Counter[str] = Counter()
    for path in weight_files(folder):
        try:
            for tensor in stored_tensors(path):
                counts[tensor.dtype] += math.prod(tensor.shape)
        except (OSError, ModelFolderError):
            return None
    return _STORED_DTYPES.get(max(counts, key=counts.__getitem__, default=""))


def _tokenizer_problems(folder: Path, chat_template: bool) -> list[str]:
    problems = []
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        problems.append(
            "no tokenizer files (tokenizer.json or the like); save it with "
            "tokenizer.save_pretrained(folder)"
        )
    config = folder / "tokenizer_config.json"
    if config.is_file() and not isinstance(_read_json(config), dict):
        problems.append(f"{config.name} is not a JSON object; copy it again from the model")
    if chat_template:
        problems += _template_problems(folder)
    return problems


def _template_problems(folder: Path) -> list[str]:
    """Say why no conversation can be written: no chat template, or one without messages."""
    try:
        found = chat_templates_of(folder)
    except ModelFolderError as error:
        return [str(error)]
    if not found:
        return [
            "no chat template: neither chat_template.jinja nor chat_template in "
            "tokenizer_config.json; tasks are chat messages, so use an instruct model, or set "
            "chat_template to a file with a template"
        ]
    way_out = "put it right, or set chat_template to a file with a template"
    if "default" not in found:
        names = ", ".join(sorted(found))
        return [f'no chat template is named "default" (there are: {names}); {way_out}']
    problems = []
    for name in sorted({"default", "tool_use"} & found.keys()):  # servers choose between these
        problem = compile_problem(found[name])
        if problem is not None:
            problems.append(f"{_place(folder, name)}: {problem}; {way_out}")
    return problems


def _place(folder: Path, name: str) -> str:
    if name == "default":
        file = TEMPLATE_FILE
    else:
        file = f"{NAMED_TEMPLATES}/{name}.jinja"
    if (folder / file).is_file():
        return file
    return f"the chat template {name!r} in tokenizer_config.json"
