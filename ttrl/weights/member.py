"""Bring one of a run's servers to each policy, and back to it after a loss."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ttrl.errors import ServerDiedError, ServerError, ServerStartError, UserError, WeightSyncError
from ttrl.facts import Sync
from ttrl.records import Handover
from ttrl.server.connection import ServerConnection
from ttrl.server.vllm import VLLMServer
from ttrl.weights.sync import SyncReport, sleep

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Policy:
    """The weights asked of the servers."""

    checkpoint: Path
    version: str
    """Its name in requests."""
    base: Path
    """The model to start a server with: the checkpoint, the base of its adapter, or another
    checkpoint if this one is not written.
    """
    handover: Handover | None = None
    """The same weights in the trainer's memory."""

    @property
    def has_files(self) -> bool:
        """Return whether its files are there, or will be."""
        return self.handover is None or self.handover.is_written

    def wait_for_files(self) -> None:
        """Wait until its files are there. Raises ServerError if they never will be."""
        if self.handover is not None:
            self.handover.wait_for_files(self.checkpoint)


class Member:
    """A server, and its proven policy. Its methods are called with `lock` held.

    mode: its way to new weights, and to `rest`. compare: whether its weights are compared with
    their source after each sync. sync: `sync_weights`.
    """

    def __init__(
        self,
        server: ServerConnection,
        *,
        mode: Literal["reload", "restart", "sleep"],
        compare: bool,
        sync: Callable[..., SyncReport],
    ) -> None:
        self.server = server
        self._mode = mode
        self._compare = compare
        self._sync = sync
        self.lock = threading.RLock()
        self.proven: str | None = None
        """The version of its proven policy; None: it must not be used."""
        self.problem: ServerError | None = None
        """Why it is not proven."""
        self.is_fenced = isinstance(server, VLLMServer)
        """Whether it is known to refuse requests for other weights than it has. A server of others
        may be any server.
        """
        self._restarted_for: str | None = None
        """The version of its last start after a death: one per version is enough."""
        self._fresh = False
        """Whether it was started, and given no policy since."""
        self._asleep = False
        self._starting: Future[Any] | None = None

    @property
    def ours(self) -> VLLMServer | None:
        """Return the server if it is started and stopped here; None for a server of others."""
        if isinstance(self.server, VLLMServer):
            return self.server
        return None

    # Life

    def start(self, base: Path) -> None:
        """Begin to start it with the model in `base`, in the background, if it does not run. Does
        nothing for a server of others.
        """
        server = self.ours
        if server is None or self._fresh or server.is_started:
            return
        server.model_folder = base
        self.proven = None
        self.problem = None
        self._fresh = True
        self._asleep = False
        self._starting = in_thread(server.start, "server start")

    def wait_for_start(self) -> None:
        """Wait until it has started, or failed to."""
        starting = self._starting
        if starting is not None:
            wait([starting])

    def _finish_start(self) -> None:
        """Wait until it has started. Raises the error of the start, once."""
        starting = self._starting
        self._starting = None
        error = None if starting is None else starting.exception()
        if error is None:
            return
        self._fresh = False
        if isinstance(error, (ServerError, UserError)):
            raise error
        raise ServerStartError(f"{type(error).__name__}: {error}") from error

    def stop(self) -> None:
        """End it, also in the middle of its start. Servers of others go on, unused from here."""
        self.proven = None
        self._fresh = False
        self._asleep = False
        server = self.ours
        if server is None:
            return
        starting = self._starting
        server.stop()
        while starting is not None and not starting.done():
            wait([starting], timeout=0.1)
            server.stop()  # its process may just have been made
        self._starting = None

    def rest(self) -> None:
        """Give the memory of its device to the trainer, if its mode says so."""
        server = self.ours
        if server is None or self._mode == "reload" or self._asleep:
            return
        if not self._fresh and not server.is_started:
            return
        if self._mode == "restart":
            self.stop()
            return
        self.proven = None
        try:
            self._finish_start()
            sleep(server)
            self._asleep = True
            self._fresh = False
        except (ServerError, UserError) as error:
            logger.warning("%s does not sleep; stopping it instead: %s", server.base_url, error)
            self.stop()

    def serve_merged(self) -> None:
        """Stop it; from its next start on it is given merged weights, and no adapters."""
        self.stop()
        self.server.serves_adapters = False
        self.problem = None

    # Weights

    def bring(self, policy: Policy) -> Sync | None:
        """Make it compute with a policy, prove it, and open it to requests for the policy. Return
        the facts of the sync, None if it had these weights. After a death it is started again,
        once. Raises ServerError; it is not proven then.
        """
        began = time.monotonic()
        try:
            if self.proven == policy.version and not self._asleep and self._is_open_to(policy):
                return None
            self.proven = None
            facts = self._sync_or_restart(policy).facts()
            self.server.open_to(policy.version)
        except ServerError as error:
            self.problem = error
            raise
        finally:
            self._fresh = False
            self._asleep = False
        self.proven = policy.version
        self.problem = None
        return facts.replace(seconds=time.monotonic() - began)

    def _is_open_to(self, policy: Policy) -> bool:
        try:
            self.server.check()
            return self.server.open_version() == policy.version
        except ServerDiedError as error:
            if self.ours is None:
                raise
            logger.warning("%s", error)  # it is started again
            return False

    def _sync_or_restart(self, policy: Policy) -> SyncReport:
        server = self.server
        if self.ours is None:
            policy.wait_for_files()
            policy = replace(policy, handover=None)
        elif self._starting is None and not self.ours.is_started:
            if policy.has_files:
                policy.wait_for_files()
            self.start(policy.base)
        self._finish_start()
        mode: Literal["start", "reload", "restart"] = "reload"
        if self._fresh and policy.has_files:
            mode = "start"
        elif self._mode == "restart" and self.ours is not None and not self._fresh:
            mode = "restart"
        try:
            server.check()
            if not self.is_fenced:
                server.open_version()  # a server without our middleware does not know this path
                self.is_fenced = True
            if self.ours is None:
                server.check_chat_template(policy.checkpoint)
            return self._sync_by(mode, policy, asleep=self._asleep)
        except ServerDiedError as died:
            if self.ours is None or self._restarted_for == policy.version:
                raise
            self._restarted_for = policy.version
            return self._restart(self.ours, policy, died)

    def _restart(self, server: VLLMServer, policy: Policy, died: ServerDiedError) -> SyncReport:
        """Start it again with the checkpoint; or with the base, if only memory has the weights."""
        logger.warning("a server died and restarts: %s", died)
        try:
            if policy.has_files:
                report = self._sync_by("restart", policy)
            else:
                server.restart(policy.base)
                report = self._sync_by("reload", policy)
        except ServerDiedError as error:
            raise WeightSyncError(f"the server died again after a restart: {error}") from died
        return replace(report, fell_back=str(died).splitlines()[0])

    def _sync_by(
        self, mode: Literal["start", "reload", "restart"], policy: Policy, *, asleep: bool = False
    ) -> SyncReport:
        return self._sync(
            self.server,
            policy.checkpoint,
            mode=mode,
            compare=self._compare,
            asleep=asleep,
            handover=policy.handover,
        )

    # Between two policies

    def look_after(self, policy: Policy) -> None:
        """Bring it back to the policy if it was lost. Called every few seconds while it should
        serve.
        """
        server = self.ours
        if server is None:
            try:
                self.server.check()
                has = self.server.open_version()
            # Perhaps it is only slow for a while: its requests go on.
            except ServerError as error:
                return self._lose(str(error))
            if has == policy.version:
                # It was only out of reach: a start or a sync would have closed it.
                if self.proven is None:
                    self.proven = has
                    self.problem = None
                    logger.warning("%s is back", self.server.base_url)
                return
            self._lose("it restarted, or another process gave it other weights")
        else:
            if self.proven is not None and not server.has_ended:
                return
            self._lose(f"its process ended; its log is {server.log_path}")
            if self._restarted_for == policy.version:
                return
        try:
            self.bring(policy)
        except ServerError as error:
            self._restarted_for = policy.version
            level = logging.DEBUG if server is None else logging.WARNING
            logger.log(level, "%s is still out: %s", self.server.base_url, error)
        else:
            logger.warning(
                "%s is back, with the weights in %s", self.server.base_url, policy.checkpoint
            )

    def _lose(self, why: str) -> None:
        if self.proven is not None:
            self.proven = None
            self.problem = ServerDiedError(why)
            logger.warning("%s is left out: %s", self.server.base_url, why)


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin some work in a daemon thread: unlike a pool's, it delays neither Ctrl-C nor the end of
    the program.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
