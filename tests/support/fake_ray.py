"""A Ray of one process: what is stored is there at once, and an actor answers at once or never."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray

SILENCE = object()
"""A reference whose value never comes."""


class Silent:
    """An actor of whom nothing comes back."""

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: SILENCE)


def actor(**methods: Callable[..., Any]) -> Any:
    """An actor with these methods. An error that one returns is raised by `get`."""
    ready = {"__ray_ready__": lambda: None}
    return SimpleNamespace(
        **{name: SimpleNamespace(remote=call) for name, call in (ready | methods).items()}
    )


class FakeRay:
    """Stands in for the module `ray`: see `ttrl.cluster.ray_connection.Cluster`."""

    def __init__(self, *starts: Any) -> None:
        self.starts = list(starts)
        """What comes of each start of an actor: the actor, or an error."""
        self.named: Any = None
        """The actor of any name."""
        self.killed: list[Any] = []
        self.waited: list[float | None] = []
        """The time limits of what never came."""
        self.is_full = False
        self.resources = {"object_store_memory": 1e9, "CPU": 1.0}
        self.machines = [
            {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": self.resources}
        ]

    def init(self, **_: Any) -> None:
        raise AssertionError("it is connected")

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, *_: Any) -> Any:
        started = self.starts.pop(0)
        if isinstance(started, Exception):
            raise started
        return started

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.named is None:
            raise ValueError(f"there is no actor {name!r}")
        return self.named

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def put(self, value: Any) -> Any:
        if self.is_full:
            raise OSError(28, "the store is full")
        return value

    def get(self, reference: Any, *, timeout: float | None = None) -> Any:
        if reference is SILENCE:
            self.waited.append(timeout)
            raise ray.exceptions.GetTimeoutError("Get timed out")
        if isinstance(reference, Exception):
            raise reference
        return reference

    def wait(
        self, references: list[Any], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        ready = [one for one in references if one is not SILENCE]
        if len(ready) < num_returns:
            self.waited.append(timeout)
        return ready, [one for one in references if one is SILENCE]

    def nodes(self) -> list[dict[str, Any]]:
        return self.machines
