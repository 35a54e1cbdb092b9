"""Find the emptiest server with room for a request, in a time independent of their number.

Servers stand in heaps by how full they are. A server without room for a request of n samples goes
to a separate heap for n. It is asked again for fewer samples, after a change, or by new lengths.
The lengths of prompts and completions, used to compare all servers, are renewed once in four
changes per server. By these lengths, the choice equals that of asking all servers.
"""

import heapq
import math
from collections.abc import Sequence

from ttrl.rollouts.scheduling.capacity import Load
from ttrl.rollouts.scheduling.lengths import Lengths
from ttrl.rollouts.scheduling.server_state import Server

_CHANGES = 4


class Emptiest:
    """The servers of one `Servers`, by how full they are."""

    def __init__(self, servers: Sequence[Server], lengths: Lengths) -> None:
        self._servers = servers
        self._lengths = lengths
        self._place = {server: place for place, server in enumerate(servers)}
        self._stamps = [0] * len(servers)
        """Of each server's last change; entries with older stamps are outdated."""
        self._refused = [math.inf] * len(servers)
        """The fewest samples refused for lack of room: the server's heap; 0: not open, and in no
        heap.
        """
        self._heaps: dict[float, list[tuple[float, int, int]]] = {}
        """(how full, place, stamp) by samples refused."""
        self._changes = 0
        self._renew()

    def changed(self, server: Server) -> None:
        """Record a change of a server: its requests in flight, its metrics, or its reopening."""
        self._put(self._place[server], math.inf)

    def choose(
        self, load: Load, now: float, preferred: Server | None = None, slack: float = 0.0
    ) -> Server | None:
        """Return the emptiest open server with room for `load`, the first of several; or
        `preferred`, if it has room and is fuller by at most `slack`. Return None if none has room.
        """
        while (found := self._top(load.n)) is not None:
            share, place, stamp = found
            server = self._servers[place]
            if not server.is_open(now):
                self._put(place, 0)
            # It refused some: it is fuller than before.
            elif (really := self._share(place)) != share:
                heapq.heapreplace(self._heaps[self._refused[place]], (really, place, stamp))
            elif server.room.admits(load, self._known):
                if preferred is not None and self._may_keep(preferred, load, now, share + slack):
                    return preferred
                return server
            else:
                self._put(place, load.n)
        return None

    def _may_keep(self, server: Server, load: Load, now: float, most: float) -> bool:
        return (
            server.is_open(now)
            and server.room.admits(load, self._known)
            and self._share(self._place[server]) <= most
        )

    def _share(self, place: int) -> float:
        return self._servers[place].room.share(self._known)

    def _top(self, samples: int) -> tuple[float, int, int] | None:
        """Return the least entry of servers without a refusal of so few samples."""
        best = None
        for refused, heap in self._heaps.items():
            if refused <= samples:
                continue
            while heap and heap[0][2] != self._stamps[heap[0][1]]:
                heapq.heappop(heap)
            if heap and (best is None or heap[0] < best):
                best = heap[0]
        return best

    def _put(self, place: int, refused: float) -> None:
        """Put a server into the heap for this number of refused samples, until it changes."""
        self._stamps[place] += 1
        self._refused[place] = refused
        self._changes += 1
        if self._changes > _CHANGES * len(self._servers):
            self._renew()
        elif refused:
            heapq.heappush(
                self._heaps.setdefault(refused, []),
                (self._share(place), place, self._stamps[place]),
            )

    def _renew(self) -> None:
        """Compare all servers by the newest lengths, and ask again those without room."""
        self._changes = 0
        self._known = self._lengths.known()
        self._refused = [math.inf if refused else 0 for refused in self._refused]
        heap = [
            (self._share(place), place, self._stamps[place])
            for place, refused in enumerate(self._refused)
            if refused
        ]
        heapq.heapify(heap)
        self._heaps = {math.inf: heap}
