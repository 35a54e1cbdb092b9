"""Show an iteration's packed rows as a page, a picture, or text: `ttrl view`."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttrl.errors import RunFolderError, UserError
from ttrl.run_folder.reader import read_run
from ttrl.run_folder.token_text import folder_token_text, run_token_text
from ttrl.system.files import write_text
from ttrl.text import spans

if TYPE_CHECKING:
    from ttrl.data.packing.pack import PackedTensors

FILE_NAME = "packed.safetensors"
FIRST_ROWS = 8
"""Number of rows shown by default."""


@dataclass(frozen=True)
class PackView:
    """Rows of a pack to look at."""

    path: Path
    title: str
    packed: "PackedTensors"
    rows: list[int]
    token_text: Callable[[int], str] | None

    def html(self) -> str:
        """Return the page. Raises PackError for too many rows for browsers to open."""
        from ttrl.data.pictures.rows_page import packed_rows_html

        return packed_rows_html(self.packed, self.rows, self.token_text, self.title)

    def write_html(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page atomically, by default as packed.html next to the pack; return its path.

        Raises PackError for too many rows for browsers to open, StorageError when it cannot be
        written.
        """
        if path is None:
            path = self.path.with_suffix(".html")
        else:
            path = Path(path)
        write_text(path, self.html())
        return path

    def write_png(self, path: str | os.PathLike[str]) -> Path:
        """Write a picture of all the rows. Raises UserError without matplotlib, StorageError."""
        from ttrl.data.pictures.plot import plot_packed_tensors
        from ttrl.system.files import atomic_file

        try:
            with atomic_file(path) as temporary:
                plot_packed_tensors(
                    self.packed, temporary, self.rows, self.token_text, title=self.title
                )
        except ImportError as error:
            raise UserError(
                f"{path}: pictures need matplotlib ({error}); pip install matplotlib, or leave "
                "out --png"
            ) from error
        return Path(path)

    def text(self, width: int) -> str:
        from ttrl.data.pictures.rows_text import packed_rows_text

        return packed_rows_text(self.packed, self.rows, self.token_text, self.title, width=width)


def open_pack(
    run: str | os.PathLike[str],
    iteration: int | None = None,
    rows: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> PackView:
    """Find a pack and read it.

    run: a run folder, or a .safetensors file. iteration: by default the newest with a pack. rows:
        "0-7", "3", "0-3,8"; by default the first FIRST_ROWS. tokenizer: a folder with
        tokenizer.json; by default the run's own.

    Raises RunFolderError for a missing run, iteration or pack, PackError for an unreadable pack,
    UserError for rows out of range.
    """
    from ttrl.data.packing.pack import PackedTensors  # it loads PyTorch

    run = Path(run)
    if run.suffix == ".safetensors" or run.is_file():
        if iteration is not None:
            raise UserError(
                f"{run} is a single pack; to choose iteration {iteration}, give the run folder"
            )
        path = run
        title = run.name
        folder = run.absolute().parent
        # The pack lies in a run: use the run's tokenizer.
        if folder.parent.name == "iterations" and folder.name.isdecimal():
            run = folder.parent.parent
            iteration = int(folder.name)
    else:
        path, iteration = _find(run, iteration)
        title = f"{run.absolute().name}, iteration {iteration}"
    packed = PackedTensors.load(path)
    if rows is None:
        chosen = list(range(min(FIRST_ROWS, packed.num_rows)))
    else:
        chosen = _numbers(rows, packed.num_rows)
    token_text: Callable[[int], str] | None = None
    if tokenizer is not None:
        token_text = folder_token_text(Path(tokenizer))
    elif iteration is not None:
        token_text = run_token_text(read_run(run), iteration)
    return PackView(path, title, packed, chosen, token_text)


def _find(run: Path, iteration: int | None) -> tuple[Path, int]:
    """Find the pack of an iteration; return it with its number."""
    data = read_run(run)  # for its message about folders without a run
    there = sorted(
        int(path.name)
        for path in (run / "iterations").glob("[0-9]*")
        if path.name.isdecimal() and path.is_dir()
    )
    packs = [number for number in there if (data.iteration_folder(number) / FILE_NAME).is_file()]
    if packs:
        has = f"packs: {spans(packs)}"
    else:
        has = "no iteration has a pack so far"
    if iteration is None:
        if not packs:
            raise RunFolderError(f"{run}: no iteration has a {FILE_NAME}; the pack phase writes it")
        iteration = packs[-1]
    elif iteration not in there:
        raise RunFolderError(
            f"{run} has no iteration {iteration}; iterations: {spans(there) or 'none'}; {has}"
        )
    elif iteration not in packs:
        if iteration == 0:
            why = "it is the model before training"
        else:
            why = "not packed yet, or no group had a signal"
        raise RunFolderError(f"{run}: iteration {iteration} has no {FILE_NAME} ({why}); {has}")
    return data.iteration_folder(iteration) / FILE_NAME, iteration


def _numbers(text: str, count: int) -> list[int]:
    """Read "0-3,8" as [0, 1, 2, 3, 8], each once, of `count` rows."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", part)
        if match is None:
            raise UserError(
                f"--rows {text!r}: {part.strip()!r} is neither a row nor a range; give one such as "
                "3, 0-7 or 0-3,8"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first or last >= count:
            if count > 1:
                rows = f"rows 0 to {count - 1}"
            else:
                rows = "row 0 alone"
            raise UserError(f"--rows {text}: no row {part.strip()}; this pack has {rows}")
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))
