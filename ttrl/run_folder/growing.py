"""Read a file of lines that another process appends to: each line once."""

import os
from pathlib import Path


class GrowingFile:
    """The lines of a file, counted as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        """Whole lines read."""
        self.newest = b""
        """The last of them."""
        self._inode = 0
        self._offset = 0
        """The end of the last whole line."""

    def forget(self) -> None:
        """Begin again at the first line."""
        self.count = 0
        self.newest = b""
        self._inode = 0
        self._offset = 0

    def new_lines(self) -> list[bytes]:
        """Return the whole lines since the last call, without their ends.

        All of them, with `count` at zero before, if the file is another one now. Raises OSError for
        a file that cannot be read; FileNotFoundError also forgets the lines.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self.forget()
            raise
        with file:
            there = os.fstat(file.fileno())
            if there.st_ino != self._inode or there.st_size < self._offset:
                self.forget()
                self._inode = there.st_ino
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[:-1]
        self.count += len(lines)
        self.newest = (lines or [self.newest])[-1]
        return lines
