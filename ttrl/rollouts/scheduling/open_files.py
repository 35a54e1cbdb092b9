"""Every request in flight is an open file, and a shell allows 1,024 of them: raised here as far as
the system lets us.
"""

import logging
import math

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]  # a module, or none

logger = logging.getLogger(__name__)

RESERVE = 256
"""Files for everything that is no request: logs, caches, libraries, children, connections that
close.
"""


class OpenFiles:
    """How many connections may be open at once. The limit is looked at when it could matter, not
    before.
    """

    def __init__(self) -> None:
        self._most = 0.0
        self._is_final = False

    def allows(self, connections: int) -> bool:
        """Return whether so many may be open. Lifts the process's soft limit if need be; warns once
        where the hard one is too low."""
        if connections <= self._most:
            return True
        if self._is_final:
            return False
        self._most = open_file_limit(connections + RESERVE) - RESERVE
        if connections <= self._most:
            return True
        self._is_final = True
        self._most = max(self._most, 1.0)
        logger.warning(
            "this process may have %d files open, so at most %d requests are in flight at once; "
            "more with a higher `ulimit -Hn`",
            self._most + RESERVE,
            self._most,
        )
        return connections <= self._most


def open_file_limit(wanted: int) -> float:
    """Return how many files this process may have open, after raising the soft limit if `wanted` is
    more.
    """
    if resource is None:
        return math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    if soft >= wanted:
        return soft
    # Twice what is wanted now, so that it is raised a few times only; Linux allows no infinity
    # here.
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
