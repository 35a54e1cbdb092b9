"""Show a run's tokens as text for people, using any of the run's tokenizers still on disk."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttrl.errors import ModelFolderError
from ttrl.run_folder.reader import RunData, model_name

FILE_NAME = "tokenizer.json"


def run_token_text(run: RunData, iteration: int) -> Callable[[int], str] | None:
    """Return a function from token ids to text, by a tokenizer.json of a checkpoint (the
    iteration's own first, but all are the same) or of the configured model; None without one.
    """
    folders = [run.iteration_folder(iteration) / "checkpoint"]
    folders += sorted((run.folder / "iterations").glob("*/checkpoint"), reverse=True)
    model = model_name(run)
    if model:
        folders += [Path(model), run.folder / model]
    there = next((folder for folder in folders if (folder / FILE_NAME).is_file()), None)
    if there is None:
        return None
    return folder_token_text(there)


def folder_token_text(folder: Path) -> Callable[[int], str]:
    """Return the same for one model folder, or for a tokenizer.json. Raises ModelFolderError if it
    cannot be read.
    """
    from tokenizers import Tokenizer

    path = folder / FILE_NAME if folder.is_dir() else folder
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for everything
        raise ModelFolderError(
            f"{path}: no tokenizer can be read from it ({error}); give a folder with a "
            "tokenizer.json"
        ) from None
    return functools.cache(functools.partial(_text, tokenizer))


def _text(tokenizer: Any, token: int) -> str:
    piece = tokenizer.id_to_token(token)
    if piece is None:
        return f"⟨no token {token}⟩"
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    if "\ufffd" in text and "\ufffd" not in piece:  # part of a character: its bytes
        letters = _byte_letters()
        if all(letter in letters for letter in piece):
            data = bytes(letters[letter] for letter in piece)
            return "".join(
                f"⟨{ord(c) - 0xDC00:02X}⟩" if 0xDC80 <= ord(c) < 0xDD00 else c
                for c in data.decode("utf-8", "surrogateescape")
            )
    # Decoders drop the space before the first word of a text.
    if piece.startswith("▁") and not text.startswith(" "):
        return " " + text
    return text


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the bytes by their letters in byte-level tokenizers, in GPT-2's order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
