"""Read the memory limit of this process: the machine's, or its container's."""

import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), group: Path = _GROUP
) -> tuple[float, float]:
    """Return total and free memory in bytes. Reclaimable file pages count as free."""
    values: dict[str, float] = {}
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            values[name] = float(rest.split()[0]) * 1024
    except OSError:  # not Linux
        total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return total, total
    total = values["MemTotal"]
    free = values["MemAvailable"]
    limit = number_in(group / "memory.max")
    used = number_in(group / "memory.current")
    if limit is not None and limit < total:
        total = limit
        free = min(free, total - (used or 0.0) + _pages_of_files(group / "memory.stat"))
    return total, free


def _pages_of_files(stat: Path) -> float:
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError):
        return 0.0
    return sum(float(words[1]) for words in lines if words[0] in ("active_file", "inactive_file"))


def number_in(path: str | Path) -> float | None:
    """Read the first number of a control-group file; None for "max" and for no file."""
    try:
        word = Path(path).read_text(encoding="ascii").split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return None
    if word.isdigit():
        return float(word)
    return None
