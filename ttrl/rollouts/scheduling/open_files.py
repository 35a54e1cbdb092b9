"""Raise the limit on open files: every request in flight is one, and a shell allows 1,024 of
them.
"""

import logging
import math
from collections.abc import Callable

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]  # a module, or none

logger = logging.getLogger(__name__)

RESERVE = 256
"""Files for everything except requests: logs, caches, libraries, children, closing connections."""


class OpenFiles:
    """Limits open connections. Reads the system's limit only when it could matter."""

    def __init__(self, limit: Callable[[int], float] | None = None) -> None:
        """limit: see `open_file_limit`, the default."""
        self._limit = limit or open_file_limit
        self._most = 0.0
        self._is_final = False

    def allows(self, connections: int) -> bool:
        """Return whether so many may be open. Raises the process's soft limit if needed; warns once
        if the hard one is too low.
        """
        if connections <= self._most:
            return True
        if self._is_final:
            return False
        self._most = self._limit(connections + RESERVE) - RESERVE
        if connections <= self._most:
            return True
        self._is_final = True
        self._most = max(self._most, 1.0)
        logger.warning(
            "this process may open %d files, so it sends at most %d requests at once; raise "
            "`ulimit -Hn` for more",
            self._most + RESERVE,
            self._most,
        )
        return connections <= self._most


def open_file_limit(wanted: int) -> float:
    """Return the number of files this process may open, after raising a soft limit below
    `wanted`.
    """
    if resource is None:
        return math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    if soft >= wanted:
        return soft
    # Twice the wanted number, to raise it only a few times; Linux allows no infinity here.
    if hard == resource.RLIM_INFINITY:
        target = 2 * wanted
    else:
        target = min(2 * wanted, hard)
    if target <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError) as error:
        logger.debug("the limit of %d open files cannot be raised to %d: %s", soft, target, error)
        return soft
    logger.debug("the limit of open files was raised from %d to %d", soft, target)
    return target
