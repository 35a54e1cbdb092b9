"""Run a run's servers on a cluster: one actor per vLLM server. The actor owns the server, keeps it
alive, and restarts elsewhere with it.

To the run they are joined servers (`ttrl.server.connection.JoinedServer`), except for changing
addresses and the transfer of weights to their machines (`Link`). A server back at another address
serves from the next sampling phase on.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from ttrl.cluster.broadcast import Broadcast, Sent, Staged
from ttrl.cluster.ray_connection import (
    RAY,
    Cluster,
    Words,
    as_words,
    begin_actor,
    from_words,
    has_gpus,
    last_line,
)
from ttrl.configs.machines import gpus_of_a_server
from ttrl.configs.run import TrainConfig
from ttrl.errors import ServerDiedError
from ttrl.server.connection import JoinedServer, ServerConnection
from ttrl.server.serve import keep_serving
from ttrl.server.vllm import VLLMServer, seconds_to_start
from ttrl.weights.policy_server import MODEL_NAME, make_server, served_dtype

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_BY_FILES = 4
"""Up to this many servers, reading one file system is as fast as two further copies
(docs/explanation/scale.md).
"""
_STAGE_SECONDS = 60.0
_SLOWEST = 2e7
"""Slowest accepted transfer of weights, bytes/s; 1 GbE has five times as many."""
_PAUSE_SECONDS = 30.0
"""Pause before retrying a failed server start: its GPU may be busy, or its disk slow."""


class Replica:
    """Run one vLLM server at an address of its machine."""

    def __init__(
        self,
        config: TrainConfig,
        model: Path,
        log: Path,
        key: str,
        *,
        make: Callable[..., VLLMServer] = make_server,
        serve: Callable[[VLLMServer], None] = keep_serving,
        pause: float = _PAUSE_SECONDS,
    ) -> None:
        """make, serve: the server, and what keeps it alive. pause: seconds before it is started
        again.
        """
        self._keep_serving, self._pause = serve, pause
        self._server = make(config, model, log, adapters=config.gives_adapters)
        self._server.host = ray.util.get_node_ip_address()
        self._server.api_key = key
        self._url: str | None = None
        self._problem: Words | None = None
        self._staged = Staged()
        with contextlib.suppress(OSError):
            self._staged.drop()  # leftovers of earlier replicas
        threading.Thread(target=self._serve, name="server", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self._server.start()
                self._url = self._server.root_url
                self._problem = None
                self._keep_serving(self._server)
            except Exception as error:
                logger.exception("the server restarts in %.0f s", self._pause)
                self._url, self._problem = None, as_words(error)
            self._server.stop()
            time.sleep(self._pause)

    def state(self) -> tuple[str | None, Words | None]:
        """Return (address, error); neither while it starts."""
        return self._url, self._problem

    def stage(self, sent: Sent, seconds: float) -> Path:
        """Transfer a checkpoint's weights to this machine; return the folder. Raises OSError,
        RayError.
        """
        return self._staged.put(sent, seconds)

    def drop(self, name: str) -> None:
        """Free the memory of these weights."""
        self._staged.drop(name)


class Link:
    """Find a replica's server and transfer weights to its machine: the lead's side."""

    def __init__(
        self,
        number: int,
        actor: Any,
        start_timeout: float,
        broadcast: Broadcast | None = None,
        cluster: Cluster = RAY,
    ) -> None:
        self._cluster = cluster
        self.name = f"replica-{number}"
        self._actor = actor
        self._patience = start_timeout
        self._broadcast = broadcast
        self._tried = ""  # name of the last transferred weights
        self._asked: Any = None  # pending request

    def find(self) -> str:
        """Return the server's address. The first call waits for its start. Raises ServerDiedError
        for a server lost or restarting.
        """
        deadline = time.monotonic() + self._patience
        self._patience = 0.0
        while (url := self._ask()) is None:
            if time.monotonic() >= deadline:
                raise ServerDiedError(
                    f"{self.name} is starting on a machine of the cluster, and does not serve yet"
                )
            time.sleep(0.2)
        return url

    def _ask(self) -> str | None:
        # A replica on a disconnected machine delays the run only once.
        seconds = _ANSWER_SECONDS if self._asked is None else 0.0
        asked = self._asked = self._asked or self._actor.state.remote()
        try:
            if not self._cluster.wait([asked], timeout=seconds)[0]:
                return None
            self._asked = None
            url, words = self._cluster.get(asked)
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayError as error:
            raise ServerDiedError(f"{self.name}: its actor is gone: {error}") from error
        if words is not None:
            raise ServerDiedError(f"{self.name}: {from_words(words)}")
        return None if url is None else str(url)

    @contextlib.contextmanager
    def bring(self, server: ServerConnection, checkpoint: Path) -> Iterator[list[Path]]:
        """Transfer a checkpoint's weights to the replica's machine, and free their memory at the
        end; yield this folder and the checkpoint itself.
        """
        places = [server.reads(checkpoint)]
        sent: Sent | None = None
        try:
            try:
                if self._broadcast is not None:
                    sent = self._broadcast.send(checkpoint)
                # After a failed sync, the same weights may still be on their way out.
                if sent is not None and sent.name != self._tried:
                    self._tried = sent.name
                    seconds = _STAGE_SECONDS + sent.size / _SLOWEST
                    staged = self._actor.stage.remote(sent, seconds)
                    places.insert(0, self._cluster.get(staged, timeout=2 * seconds))
            except (OSError, ray.exceptions.RayError) as error:
                logger.warning(
                    "%s reads %s itself: %s", server.base_url, checkpoint, last_line(error)
                )
            yield places
        finally:
            if sent is not None:
                assert self._broadcast is not None
                self._actor.drop.remote(sent.name)
                self._broadcast.has_read(sent.name)


def start_replicas(config: TrainConfig, model: Path, logs: Path) -> list[JoinedServer]:
    """Begin to start `config.replicas` servers of a model, or of the base of adapters, spread over
    the cluster. They end with this process."""
    key = secrets.token_urlsafe(32)
    options: dict[str, object] = {
        "max_concurrency": 4,
        "max_restarts": -1,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
        "num_cpus": 1,
    }
    if has_gpus(config):
        options["num_gpus"] = gpus_of_a_server(config.server)
    patience = config.start_timeout or seconds_to_start(model)
    broadcast = None
    if config.replicas > _BY_FILES and not config.gives_adapters:
        broadcast = Broadcast()
    found = []
    for number in range(config.replicas):
        actor = begin_actor(Replica, options, config, model, logs / f"server_{number}.log", key)
        link = Link(number, actor, patience, broadcast)
        found.append(
            JoinedServer(
                link.name,
                served_model_name=MODEL_NAME,
                dtype=served_dtype(config),
                api_key=key,
                serves_adapters=config.gives_adapters,
                bring=link.bring,
                find=link.find,
            )
        )
    return found
