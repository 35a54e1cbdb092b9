"""A run's servers on a cluster: an actor for each, which owns a vLLM server, keeps it alive, and is
started elsewhere with it.

To the run they are servers that somebody else started (`ttrl.server.connection.JoinedServer`),
whose address may change: fence, canary and comparison of weights are the same. One that comes back
at another address serves from the next sampling phase on.
"""

import contextlib
import logging
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import ray

from ttrl.cluster.broadcast import Broadcast, Sent, Staged
from ttrl.cluster.connection import Words, as_words, begin_actor, from_words, has_gpus, last_line
from ttrl.configs.machines import gpus_of_a_server
from ttrl.configs.run import TrainConfig
from ttrl.errors import ServerDiedError
from ttrl.launch.policy_server import MODEL_NAME, make_server
from ttrl.server.connection import JoinedServer
from ttrl.server.serve import keep_serving
from ttrl.server.vllm import seconds_to_start

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
_BY_FILES = 4
"""With up to so many servers, reading one file system takes no longer than two further copies would
(docs/explanation/scale.md).
"""
_STAGE_SECONDS = 60.0
_SLOWEST = 2e7
"""Bytes a second of weights that are waited for: a network of 1 GbE has five times as many."""
_PAUSE_SECONDS = 30.0
"""After which a server that did not start is tried again: its GPU may not be free yet, or its disk
slow.
"""


class Replica:
    """One vLLM server, at an address of its machine."""

    def __init__(self, config: TrainConfig, model: Path, log: Path, key: str) -> None:
        self._server = make_server(config, model, log, adapters=config.gives_adapters)
        self._server.host = ray.util.get_node_ip_address()
        self._server.api_key = key
        self._url: str | None = None
        self._problem: Words | None = None
        self._staged = Staged()
        with contextlib.suppress(OSError):
            self._staged.drop()  # what was left here by those before
        threading.Thread(target=self._serve, name="server", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                self._server.start()
                self._url = self._server.root_url
                self._problem = None
                keep_serving(self._server)
            except Exception as error:
                logger.exception("the server is started again in %.0f s", _PAUSE_SECONDS)
                self._url, self._problem = None, as_words(error)
            self._server.stop()
            time.sleep(_PAUSE_SECONDS)

    def state(self) -> tuple[str | None, Words | None]:
        """Return (address, what went wrong); neither while it starts."""
        return self._url, self._problem

    def stage(self, sent: Sent, seconds: float) -> Path:
        """Bring a checkpoint's weights to this machine; return the folder. Raises OSError,
        RayError.
        """
        return self._staged.put(sent, seconds)

    def drop(self, name: str) -> None:
        """Give back the memory that they took."""
        self._staged.drop(name)


class ReplicaServer(JoinedServer):
    """The lead's side of a replica."""

    def __init__(
        self,
        number: int,
        actor: Any,
        key: str,
        dtype: str,
        start_timeout: float,
        broadcast: Broadcast | None = None,
        adapters: bool = False,
    ) -> None:
        super().__init__(
            f"replica-{number}", served_model_name=MODEL_NAME, dtype=dtype, api_key=key
        )
        self._actor = actor
        self._patience = start_timeout
        self._broadcast = broadcast
        self.serves_adapters = adapters
        self._near: tuple[Path, Path] | None = None  # a checkpoint, and where its workers read it
        self._sent: Sent | None = None
        self._tried = ""  # the name of what was brought last
        self._asked: Any = None  # what it has not answered yet

    def check(self) -> None:
        """Raise ServerDiedError where it is gone, or being started again. The first time, wait
        until it has started.
        """
        deadline = time.monotonic() + self._patience
        self._patience = 0.0
        while (url := self._find()) is None:
            if time.monotonic() >= deadline:
                raise ServerDiedError(
                    f"{self.root_url} is being started on some machine of the cluster, and does "
                    "not serve yet"
                )
            time.sleep(0.2)
        if url != self._root_url:
            self._root_url, self.api_key = url, ""  # it has to prove anew that it knows the key
        super().check()

    def nearer(self, checkpoint: Path) -> Path:
        """Bring a checkpoint to the replica's machine, once for each sync; return the folder there,
        or the checkpoint itself.
        """
        if self._near is None or self._near[0] != checkpoint:
            self.leave()
            try:
                self._near = checkpoint, self._bring(checkpoint)
            except (OSError, ray.exceptions.RayError) as error:
                logger.warning(
                    "%s reads %s itself: %s", self.base_url, checkpoint, last_line(error)
                )
                self._near = checkpoint, checkpoint
        return self._near[1]

    def _bring(self, checkpoint: Path) -> Path:
        if self._broadcast is None or (sent := self._broadcast.send(checkpoint)) is None:
            return checkpoint
        # The sync before failed, and what it read may still be on its way out.
        if sent.name == self._tried:
            self._broadcast.has_read(sent.name)
            return checkpoint
        self._tried = sent.name
        self._sent, seconds = sent, _STAGE_SECONDS + sent.size / _SLOWEST
        found: Path = ray.get(self._actor.stage.remote(sent, seconds), timeout=2 * seconds)
        return found

    def leave(self) -> None:
        """Give back the memory of weights that were brought."""
        self._near = None
        sent = self._sent
        self._sent = None
        if sent is not None:
            self._actor.drop.remote(sent.name)
            assert self._broadcast is not None
            self._broadcast.has_read(sent.name)

    def _find(self) -> str | None:
        # One whose machine is cut off delays the run once.
        if self._asked is None:
            seconds = _ANSWER_SECONDS
        else:
            seconds = 0.0
        asked = self._asked = self._asked or self._actor.state.remote()
        try:
            if not ray.wait([asked], timeout=seconds)[0]:
                return None
            self._asked = None
            url, words = ray.get(asked)
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayError as error:
            raise ServerDiedError(f"{self.root_url}: its actor is gone: {error}") from error
        if words is not None:
            raise ServerDiedError(f"{self.root_url}: {from_words(words)}")
        if url is not None:
            return str(url)
        return None


def start_replicas(config: TrainConfig, model: Path, logs: Path) -> list[ReplicaServer]:
    """Begin to start `config.replicas` servers of a model, or of the base of adapters, spread over
    the cluster; they end with the process that did."""
    key = secrets.token_urlsafe(32)
    if has_gpus(config):
        takes = {"num_cpus": 1, "num_gpus": gpus_of_a_server(config.server)}
    else:
        takes = {"num_cpus": 1}
    patience = config.start_timeout or seconds_to_start(model)
    own_engine = any(name.replace("_", "-") == "weight-transfer-config" for name in config.server)
    if config.replicas > _BY_FILES and not own_engine:
        broadcast = Broadcast()
    else:
        broadcast = None
    found = []
    for number in range(config.replicas):
        options = {
            "max_concurrency": 4,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
            **takes,
        }
        actor = begin_actor(Replica, options, config, model, logs / f"server_{number}.log", key)
        if config.dtype == "bf16":
            dtype = "bfloat16"
        else:
            dtype = "float32"
        found.append(
            ReplicaServer(number, actor, key, dtype, patience, broadcast, config.gives_adapters)
        )
    return found
