"""Let torchrun's agents of several machines meet: a store on the leading machine, listening on one
address only.

torchrun's own way (c10d) listens on all interfaces, and each agent unpickles, and so runs, anything
written there. Here agents exchange only numbers: the leading machine is 0, the others are counted
as they come. The store still has no password: anyone with access can end the training, or take part
in it. It belongs in a private network (docs/explanation/security.md).

torchrun finds this by the entry point "ttrl" of the group "torchrun.handlers" (pyproject.toml):
`--rdzv-backend ttrl`, with `--rdzv-conf is_host=true` on the leading machine.
"""

import socket
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_LOOK_SECONDS = 0.1


class Meeting(StaticTCPRendezvous):
    """One start of the trainer, on one machine. Raises RendezvousTimeoutError if not all have come
    within `join_timeout`.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        host, _, port = params.endpoint.rpartition(":")
        self._leads = bool(params.get_as_bool("is_host", False))
        self._address = params.local_addr or host.strip("[]")
        seconds = params.get_as_int("join_timeout", 600)
        assert seconds is not None
        super().__init__(host.strip("[]"), int(port), 0, params.max_nodes, params.run_id, seconds)

    def get_backend(self) -> str:
        return "ttrl"

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            self._store = TCPStore(
                self.master_addr,
                self.master_port,
                None,
                self._leads,
                self.timeout,
                wait_for_workers=False,
                master_listen_fd=self._listening() if self._leads else None,
            )
            store = PrefixStore(self.run_id, self._store)
            if self._leads:
                self.rank = 0
                self._wait(lambda: 1 + store.add("machines", 0))
                store.set("complete", "1")
            else:
                self.rank = store.add("machines", 1)
                store.wait(["complete"], self.timeout)
        except (OSError, RuntimeError, ValueError) as error:  # of the store
            raise RendezvousTimeoutError(
                f"{self.master_addr}:{self.master_port}: {error}"
            ) from error
        if self.rank >= self.world_size:
            raise RendezvousTimeoutError(
                f"{self.master_addr}:{self.master_port}: all {self.world_size} machines have "
                "joined already"
            )
        return RendezvousInfo(
            store,
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def _listening(self) -> int:
        """Return the descriptor of a socket listening only on this machine's address in the
        endpoint's network.
        """
        if ":" in self._address:
            family = socket.AF_INET6
        else:
            family = socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._address, self.master_port))
            listener.listen(1024)
            return listener.detach()

    def _wait(self, machines: Callable[[], int]) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while machines() < self.world_size:
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"only {machines()} of {self.world_size} machines joined in time"
                )
            time.sleep(_LOOK_SECONDS)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory of meetings, for torchrun."""
    return Meeting
