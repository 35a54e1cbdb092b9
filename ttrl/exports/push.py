"""Push a run's checkpoint to the hub, with a model card."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ttrl.errors import ModelFolderError, UserError, describe
from ttrl.exports.base_model import base_of
from ttrl.exports.card import CURVE, write_card
from ttrl.exports.checkpoint import Chosen
from ttrl.records import ADAPTER_FOLDER, CANARY_FILE
from ttrl.server.model_folder import merge_adapter, weight_files
from ttrl.system.files import model_files, read_object
from ttrl.text import gib

_OF_THE_HUB = frozenset({".gitattributes"})
"""Files of a new, empty repository."""
_OF_A_MODEL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_OF_ITS_AUTHOR = ("LICENSE", "NOTICE", "SOURCE")
_TOKENIZER = re.compile(r"tokenizer|chat_template|vocab|merges|special_tokens|added_tokens")
_PATHS_IN_CONFIG = ("_name_or_path", "_model_name_or_path", "name_or_path")
_PEFT_BASE = "base_model_name_or_path"


@dataclass(frozen=True)
class Package:
    """The files for a repository, by their names there: a file of this machine, or its bytes."""

    repository: str
    files: dict[str, Path | bytes]
    why: str
    """Why this checkpoint."""

    @property
    def card(self) -> str:
        """Return the model card."""
        card = self.files["README.md"]
        assert isinstance(card, bytes)
        return card.decode()

    def sizes(self) -> dict[str, int]:
        """Return each file's bytes."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }

    def listing(self) -> str:
        """Return a line for each file, with its size."""
        sizes = self.sizes()
        lines = [f"{_size(size):>12}  {name}" for name, size in sizes.items()]
        return "\n".join([*lines, f"{_size(sum(sizes.values())):>12}  in all"])


def _size(count: int) -> str:
    return gib(count) if count >= 2**20 else f"{count:,} B"


def package(
    chosen: Chosen, repository: str, *, base_model: str | None = None, merged: bool = False
) -> Package:
    """Return the files of a checkpoint for a repository ("user/name"). An adapter stays an adapter,
    in peft's layout, unless `merged`. Asks no network.

    base_model: the starting model's name on the hub, if the run does not know it.

    Raises UserError for a bad name, or an adapter without the name of its base; ModelFolderError.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--to {repository}: {error}") from error
    if "/" not in repository:
        raise UserError(f"--to {repository}: give USER/NAME, a repository of yours on the hub")
    base = base_of(chosen.config.model, base_model)
    folder = chosen.folder
    adapter = (folder / ADAPTER_FOLDER).is_dir() and not merged
    if adapter and base.hub is None:
        raise UserError(
            f"the checkpoint is an adapter to {base.name}, but its name on the hub is unknown: "
            "give it with --base-model, or push whole weights with --merged"
        )
    if adapter:
        parts = [
            folder / ADAPTER_FOLDER / name
            for name in ("adapter_config.json", "adapter_model.safetensors")
        ]
    else:
        merge_adapter(folder)
        parts = [*weight_files(folder), *folder.glob("*.safetensors.index.json")]
    parts += [path for path in model_files(folder) if _is_public(path, adapter=adapter)]
    files: dict[str, Path | bytes] = {}
    for path in sorted(parts):
        root = folder
        if path.parent.name == ADAPTER_FOLDER:
            root = path.parent
        files[path.relative_to(root).as_posix()] = path
    files |= _without_paths(files, base.hub)
    text, curve = write_card(chosen, base, repository, adapter=adapter)
    front: dict[str, Path | bytes] = {"README.md": text.encode()}
    if curve is not None:
        front[CURVE] = curve.encode()
    return Package(repository, front | files, chosen.why)


def _is_public(path: Path, *, adapter: bool) -> bool:
    """Tell whether a file of a checkpoint belongs to the model: other files are someone's own."""
    if path.name.startswith(_OF_ITS_AUTHOR):
        return True
    if adapter:
        return _TOKENIZER.match(path.name) is not None
    return path.name.endswith(_OF_A_MODEL) and path.name != CANARY_FILE


def _without_paths(files: dict[str, Path | bytes], hub: str | None) -> dict[str, bytes]:
    """Return the configs among `files` without this machine's paths."""
    changed = {}
    for name in ("config.json", "adapter_config.json"):
        path = files.get(name)
        if not isinstance(path, Path):
            continue
        try:
            content = dict(read_object(path))
        except ValueError as error:
            raise ModelFolderError(
                f"{path} is damaged ({error}); copy it again, or push another --iteration"
            ) from error
        for key in _PATHS_IN_CONFIG:
            content.pop(key, None)
        if _PEFT_BASE in content:
            content[_PEFT_BASE] = hub
        changed[name] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return changed


def push(
    made: Package, *, public: bool = False, replace: bool = False, api: HfApi | None = None
) -> str:
    """Push a package in one commit and return its address. A new repository is private unless
    `public`. replace: also into a repository with other files; those not in the package are
    removed.

    api: of the hub; by default with the hub's own settings: HF_TOKEN or `hf auth login`,
        HF_ENDPOINT.

    Uploaded parts are not sent again by a later try. Raises UserError.
    """
    api = api or HfApi(library_name="ttrl")
    try:
        there = _files_there(api, made.repository)
        others = set(there or ()) - _OF_THE_HUB
        if others and not replace:
            raise UserError(
                f"{made.repository} exists and holds {len(others)} files, such as "
                f"{sorted(others)[0]}; push to another name, or replace them all with --replace"
            )
        if there is None:
            api.create_repo(made.repository, private=not public)
        added = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in made.files.items()
        ]
        gone = [CommitOperationDelete(name) for name in sorted(others - made.files.keys())]
        commit = api.create_commit(
            made.repository, [*added, *gone], commit_message=f"Push a checkpoint: {made.why}"
        )
    except LocalTokenNotFoundError as error:
        raise UserError("the hub needs a token: run `hf auth login`, or set HF_TOKEN") from error
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        if isinstance(error, (UserError, ModelFolderError)):
            raise
        raise UserError(
            f"{made.repository} could not be pushed: {describe(error)}. The same command tries "
            "again, and sends no uploaded file twice"
        ) from error
    return str(commit.repo_url)


def _files_there(api: HfApi, repository: str) -> Sequence[str] | None:
    """Return the names of a repository's files; None if there is no such repository."""
    try:
        return api.list_repo_files(repository)
    except RepositoryNotFoundError:
        return None
