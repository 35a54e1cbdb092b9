"""Which tokenizer token ids belong to: packed tensors carry its digest, so that they are not trained into another model."""

from pathlib import Path

from ttrl.system.files import digest

TOKENIZER_KEY = "tokenizer"
"""Of PackedTensors.metadata."""


def tokenizer_digest(folder: str | Path) -> str | None:
    """SHA-256 of the model folder's tokenizer.json, which checkpoints copy byte by byte; None where it has none."""
    path = Path(folder, "tokenizer.json")
    return digest(path) if path.is_file() else None
