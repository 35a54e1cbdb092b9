"""One of a run's servers: how it is brought to a policy, and what happens when it is gone."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ttrl.errors import ServerDiedError, ServerError, ServerStartError, UserError, WeightSyncError
from ttrl.server.canary import CanaryReport
from ttrl.server.connection import JoinedServer, ServerConnection
from ttrl.server.transfer import Handover
from ttrl.server.vllm import VLLMServer
from ttrl.server.weights import SyncReport, WeightComparison, sleep, sync_weights, verify_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerTools:
    """What makes a run's servers, brings weights to them, proves that, and how many seconds lie
    between two looks at them.
    """

    own: type[VLLMServer] = VLLMServer
    joined: Callable[..., JoinedServer] = JoinedServer
    sync: Callable[..., SyncReport] = sync_weights
    verify: Callable[..., tuple[CanaryReport, WeightComparison]] = verify_weights
    sleep: Callable[[ServerConnection], None] = sleep
    look_seconds: float = 1.0
    look_at_others_seconds: float = 5.0
    elsewhere: "Callable[[Path, Path], Sequence[JoinedServer]] | None" = None
    """Given the model and the folder of logs: starts further ones on other machines
    (`ttrl.cluster`).
    """


class ServerMember:
    """A server, and which policy it was proven to have. Its methods are called with `lock` held.

    compare: whether its weights are compared with the files after each sync.
    """

    def __init__(
        self,
        server: ServerConnection,
        *,
        mode: Literal["reload", "restart", "sleep"],
        compare: bool,
        tools: ServerTools,
    ) -> None:
        self.server = server
        self._mode = mode
        self._compare = compare
        self._tools = tools
        self.lock = threading.RLock()
        self.proven: Path | None = None
        """The checkpoint that it was proven to compute with; None: nobody may use it."""
        self.version: str | None = None
        """What that is called in requests."""
        self.problem: ServerError | None = None
        """Why it is not proven."""
        self.is_fenced = isinstance(server, VLLMServer)
        """Whether it is known to refuse requests for other weights than it has; what somebody else
        started may be any server.
        """
        self._started_anew_for: str | None = None
        """The version of requests for which it was started anew after it died: once is enough."""
        self._fresh = self._asleep = self._start_failed = False
        self._starting: threading.Thread | None = None

    @property
    def ours(self) -> VLLMServer | None:
        """Return the server where it is started and stopped here; None where somebody else does
        that.
        """
        if isinstance(self.server, VLLMServer):
            return self.server
        return None

    # Life

    def start(self, base: Path) -> None:
        """Begin to start it with the model in `base`, in the background. Nothing for servers that
        somebody else starts.
        """
        server = self.ours
        if server is None or self._starting is not None:
            return
        server.model_folder = base
        self.proven = None
        self.problem = None
        self._fresh = True
        self._asleep = False

        def run() -> None:
            try:
                server.start()
            except BaseException as error:  # noqa: BLE001 - told to the thread that waits for the server
                if isinstance(error, ServerError):
                    self.problem = error
                else:
                    self.problem = ServerStartError(f"{type(error).__name__}: {error}")
                self.problem.__cause__ = error

        self._starting = threading.Thread(target=run, name="server start", daemon=True)
        self._starting.start()

    def wait_for_start(self) -> None:
        """Wait until it has started; what went wrong is its `problem`."""
        while self._starting is not None and self._starting.is_alive():
            self._starting.join(0.2)  # short waits, so that Ctrl-C is heard
        if self._starting is not None and self.problem is not None:
            self._fresh = False
            self._start_failed = True
        self._starting = None

    @property
    def is_up(self) -> bool:
        """Return whether there is something to sync: it was started, or is somebody else's."""
        return self.ours is None or self._fresh or self.ours.is_started

    def stop(self) -> None:
        """End it, also in the middle of its start. Servers of others go on; nobody uses them from
        here.
        """
        self.proven = None
        self._fresh = False
        self._asleep = False
        self._start_failed = False
        server = self.ours
        starting = self._starting
        if server is None:
            return
        server.stop()
        while starting is not None and starting.is_alive():
            starting.join(0.1)
            server.stop()  # its process may just have been made
        self._starting = None

    def rest(self) -> None:
        """Give the memory of its device to the trainer, as far as its mode says so."""
        server = self.ours
        if server is None or self._mode == "reload" or not self.is_up or self._asleep:
            return
        if self._mode == "restart":
            self.stop()
            return
        self.proven = None
        try:
            self.wait_for_start()
            self._tools.sleep(server)
            self._asleep = True
            self._fresh = False
        except ServerError as error:
            logger.warning("%s does not sleep, it is stopped instead: %s", server.base_url, error)
            self.stop()

    # Weights

    def bring(
        self, checkpoint: Path, version: str, base: Path, handover: Handover | None = None
    ) -> dict[str, Any] | None:
        """Make it compute with `checkpoint`, or the same weights out of memory, prove that, and
        open it to requests for `version`. Return what the sync has to say, None where it had these
        weights. One that died is started anew, once, from `base` where it serves adapters or the
        checkpoint is not written, and from the checkpoint elsewhere. Raises ServerError; it is not
        proven then.
        """
        began = time.monotonic()
        try:
            if self.proven == checkpoint and not self._asleep and self._is_open_to(version):
                return None
            self.proven = None
            facts = self._bring(checkpoint, version, base, handover) | {
                "seconds": time.monotonic() - began
            }
            self.server.open_to(version)
        except ServerError as error:
            self.problem = error
            self._fresh = False
            raise
        self.proven = checkpoint
        self.version = version
        self.problem = None
        return facts

    def _is_open_to(self, version: str) -> bool:
        try:
            self.server.check()
            return self.server.open_version() == version
        except ServerDiedError as error:
            if self.ours is None:
                raise
            logger.warning("%s", error)  # `_bring` starts it anew
            return False

    def _bring(
        self, checkpoint: Path, version: str, base: Path, handover: Handover | None
    ) -> dict[str, Any]:
        server = self.server
        has_files = handover is None or handover.is_written
        if handover is not None and (
            self.ours is None
            or (has_files and (not self.is_up or self._fresh or self.ours.has_ended))
        ):
            handover.wait_for_files(checkpoint)
        if not self.is_up and not self._start_failed:
            self.start(base)
            self.wait_for_start()
        if self._start_failed:  # said once; the next time it is tried again
            self._start_failed = False
            assert self.problem is not None
            cause = self.problem.__cause__
            raise cause if isinstance(cause, UserError) else self.problem
        fresh = self._fresh
        asleep = self._asleep
        self._fresh = False
        self._asleep = False
        try:
            server.check()
            if not self.is_fenced:
                server.open_version()  # a server without our middleware does not know this path
                self.is_fenced = True
            if self.ours is None:
                server.check_chat_template(checkpoint if has_files else base)
            may_have_it = fresh and has_files and not server.serves_adapters
            if may_have_it and (facts := self._started_with(checkpoint)) is not None:
                return facts
            restarts = self._mode == "restart" and self.ours is not None and not fresh
            mode: Literal["reload", "restart"]
            if restarts:
                mode = "restart"
            else:
                mode = "reload"
            how: dict[str, Any] = {"mode": mode, "compare": self._compare, "asleep": asleep}
            if handover is not None and self.ours is not None:
                how["handover"] = handover
            return _facts(self._tools.sync(server, checkpoint, **how))
        except ServerDiedError as error:
            if self.ours is None or self._started_anew_for == version:
                raise
            self._started_anew_for = version
            if handover is not None and has_files:
                handover.wait_for_files(checkpoint)
            return self._start_anew(checkpoint, error, None if has_files else (base, handover))

    def _started_with(self, checkpoint: Path) -> dict[str, Any] | None:
        """Return what the proof says where it was started with these weights, under whatever path;
        None where it was not.
        """
        assert self.ours is not None
        started = Path(self.ours.model_folder)
        if not all(
            _is_same(file, started / file.name) for file in checkpoint.glob("*.safetensors")
        ):
            # In half precision, the canary alone would not tell one step of training from none.
            return None
        try:
            canary, comparison = self._tools.verify(self.server, checkpoint, compare=self._compare)
        except WeightSyncError as error:
            logger.warning(
                "%s did not load the weights as it should at its start: %s",
                self.server.base_url,
                error,
            )
            return None
        self.server.policy_folder = checkpoint
        report = SyncReport("reload", 0.0, canary.max_difference, None, comparison)
        return _facts(report) | {"mode": "start"}

    def _start_anew(
        self, checkpoint: Path, died: ServerDiedError, source: tuple[Path, Handover | None] | None
    ) -> dict[str, Any]:
        """Start it anew with the checkpoint; with `source`, with another one, and bring it what is
        held out then.
        """
        logger.warning("a server is gone and is started anew: %s", died)
        reason = str(died).splitlines()[0]
        try:
            if source is not None:
                assert self.ours is not None
                self.ours.restart(source[0])
                report = self._tools.sync(
                    self.server,
                    checkpoint,
                    mode="reload",
                    compare=self._compare,
                    handover=source[1],
                )
            else:
                report = self._tools.sync(
                    self.server, checkpoint, mode="restart", compare=self._compare
                )
        except ServerDiedError as error:
            raise WeightSyncError(
                f"the server died again after it was started anew: {error}"
            ) from died
        return _facts(report) | {"fell_back": reason}

    def serve_merged(self) -> None:
        """Stop it; from its next start on it is given merged weights, and no adapters."""
        self.stop()
        self.server.serves_adapters = False
        self.problem = None

    # While nobody asks for another policy

    def look_after(
        self, checkpoint: Path, version: str, base: Path, handover: Handover | None = None
    ) -> None:
        """Bring it back to the policy where it was lost. Called again and again while it should
        serve.
        """
        server = self.ours
        if server is None:
            try:
                self.server.check()
                has = self.server.open_version()
            # Perhaps only slow for a while: whatever it is computing, let it go on.
            except ServerError as error:
                return self._lose(str(error))
            if has == version:
                # It was only out of reach: a start or a sync would have closed it.
                if self.proven is None:
                    self.proven = checkpoint
                    self.version = version
                    self.problem = None
                    logger.warning("%s is back", self.server.base_url)
                return
            self._lose("it was started anew, or somebody else gave it other weights")
        else:
            if self.proven is not None and not server.has_ended:
                return
            self._lose(f"its process ended; its log is {server.log_path}")
            if self._started_anew_for == version:
                return
        try:
            self.bring(checkpoint, version, base, handover)
        except ServerError as error:
            self._started_anew_for = version
            (logger.debug if server is None else logger.warning)(
                "%s is still out: %s", self.server.base_url, error
            )
        else:
            logger.warning("%s is back, with the weights in %s", self.server.base_url, checkpoint)

    def _lose(self, why: str) -> None:
        if self.proven is not None:
            self.proven, self.problem = None, ServerDiedError(why)
            logger.warning("%s is left out: %s", self.server.base_url, why)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _facts(report: SyncReport) -> dict[str, Any]:
    """Return the report as it stands in the markers and in metrics.jsonl."""
    return {
        "mode": report.mode,
        "seconds": report.seconds,
        "canary_max_difference": report.canary_max_difference,
        "fell_back": report.fell_back,
        **({} if report.files_because is None else {"files_because": report.files_because}),
        "weights_compared": report.comparison.compared,
        "weights_unchecked": report.comparison.unchecked,
    }
