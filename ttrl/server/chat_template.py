"""Read a model folder's chat template, and make a model folder with another one.

The setting `chat_template` replaces the template by a folder of links to the model's files, plus
the new template. All readers of the folder then agree: server, tokenization, checkpoints, the
digests of caches and of joined servers.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ttrl.data.chat.template_sandbox import compile_problem
from ttrl.errors import ModelFolderError, UserError
from ttrl.server.model_folder import (
    NAMED_TEMPLATES,
    TEMPLATE_FILE,
    chat_templates_of,
    local_folder,
    small_file,
)
from ttrl.system.files import atomic_folder

_JINJA = ("{{", "{%")
_OTHER_TEMPLATES = (TEMPLATE_FILE, "chat_template.json", NAMED_TEMPLATES)
"""Other template files transformers would read."""
_MISTRAL = ("tekken.json", "tokenizer.model.v*")
"""Files of Mistral's own tokenizer; with it vLLM writes prompts without any template."""


def read_chat_template(given: str) -> str:
    """Return the template in a setting, or in its file.

    Raises UserError for an unreadable file, and for anything but a template of messages.
    """
    text = given
    place = "chat_template"
    if not any(mark in given for mark in _JINJA):
        place = f"chat_template {given}"
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            way_out = "give a file, or the text of a template (with {{ or {%)"
            raise UserError(f"{place}: the file cannot be read: {why}; {way_out}") from error
    problem = compile_problem(text)
    if problem is not None:
        raise UserError(f"{place}: {problem}")
    return text


def is_with_mistral_tokenizer(model: str | os.PathLike[str]) -> bool:
    """Tell whether a model has the files of Mistral's own tokenizer, vLLM's first choice."""
    folder = Path(model)
    if folder.is_dir():
        return any(any(folder.glob(pattern)) for pattern in _MISTRAL)
    return small_file(model, "tekken.json") is not None


def template_digest(model: str | os.PathLike[str]) -> str:
    """Return SHA-256 of a model's default template, for a run to compare with a joined server's."""
    default = chat_templates_of(model).get("default", "")
    return hashlib.sha256(default.encode()).hexdigest()


def with_chat_template(model: Path, template: str | None, folder: Path) -> Path:
    """Return `folder`: links to the files of `model`, and the template; `model` without one.

    Reuses an identical folder of an earlier call. Raises ModelFolderError.
    """
    if template is None:
        return model
    links = _links(model)
    if folder.is_dir():
        if _is_made_of(folder, links, template):
            return folder
        shutil.rmtree(folder)
    with atomic_folder(folder) as temporary:
        for name, target in links.items():
            (temporary / name).symlink_to(target)
        (temporary / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return folder


@contextlib.contextmanager
def templated(model: str, given: str | None) -> Iterator[str]:
    """Yield the model's folder with another chat template for a while; `model` itself without one.

    given: a template, or its file. Raises UserError, and ModelFolderError for a failed download.
    """
    if given is None:
        yield model
        return
    template = read_chat_template(given)
    with tempfile.TemporaryDirectory(prefix="ttrl-model-") as temporary:
        source = local_folder(model, chat_template=False)
        yield str(with_chat_template(source, template, Path(temporary, "model")))


def _links(model: Path) -> dict[str, Path]:
    skipped = set(_OTHER_TEMPLATES)
    if is_with_mistral_tokenizer(model):
        if not (model / "tokenizer.json").is_file():
            raise ModelFolderError(
                f"{model} has only Mistral's own tokenizer, without a chat template; leave "
                "chat_template out, or add a tokenizer.json"
            )
        skipped |= {path.name for pattern in _MISTRAL for path in model.glob(pattern)}
    return {path.name: path.resolve() for path in model.iterdir() if path.name not in skipped}


def _is_made_of(folder: Path, links: Mapping[str, Path], template: str) -> bool:
    try:
        has = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    found = {path.name: path.resolve() for path in folder.iterdir() if path.is_symlink()}
    return has == template and found == links
