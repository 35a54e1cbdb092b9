"""The run's inference server: started when first needed, always serving the checkpoint that is asked for, and proven to."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from ttrl.errors import ServerError
from ttrl.loop.config import TrainConfig
from ttrl.loop.console import Console
from ttrl.server.vllm import VLLMServer
from ttrl.server.weights import sync_weights, verify_canary

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"


def make_server(config: TrainConfig, model_folder: Path, log_path: Path) -> VLLMServer:
    """The server of a run, not started yet. Raises ConfigError for arguments in `config.server` that ttrl sets itself."""
    return VLLMServer(
        model_folder,
        served_model_name=MODEL_NAME,
        log_path=log_path,
        dtype="bfloat16" if config.dtype == "bf16" else "float32",
        extra_args={name: value for name, value in config.server.items() if name != "max_model_len"},
        max_model_len=config.server.get("max_model_len"),
        seed=config.seed,
    )


class PolicyServer:
    """One vLLM server that follows the run's checkpoints."""

    def __init__(self, config: TrainConfig, logs: Path, console: Console) -> None:
        self._config, self._logs, self._console = config, logs, console
        self._server: VLLMServer | None = None
        self._starting: threading.Thread | None = None
        self._start_error: BaseException | None = None
        self._folder: Path | None = None
        self._proven = False

    def start(self, model_folder: Path) -> None:
        """Begins to start the server in the background: it takes half a minute, in which the caller can do something else."""
        self._folder, self._proven, self._start_error = model_folder, False, None
        self._server = server = make_server(self._config, model_folder, self._logs / "server.log")

        def run() -> None:
            try:
                server.start()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the server
                self._start_error = error

        self._starting = threading.Thread(target=run, name="server start", daemon=True)
        self._starting.start()

    def serve(self, checkpoint: Path) -> dict[str, Any] | None:
        """Makes the server compute with `checkpoint`, whose canary.json it must reproduce.

        Returns what the sync has to say (mode, seconds, the canary's largest difference, why it fell back), None where the
        server had these weights already. Raises ServerStartError, ServerDiedError, WeightSyncError.
        """
        began = time.perf_counter()
        if self._server is None:
            self.start(checkpoint)
        self._wait_for_start()
        server = self._server
        assert server is not None
        if self._folder == checkpoint and self._proven:
            server.check()
            return None
        if self._proven:
            # Until the canary has passed, nobody may take the server for one that has either policy.
            self._proven = False
            report = sync_weights(server, checkpoint, mode=self._config.weight_sync)
            self._folder, self._proven = checkpoint, True
            return {
                "mode": report.mode,
                "seconds": report.seconds,
                "canary_max_difference": report.canary_max_difference,
                "fell_back": report.fell_back,
            }
        # Just started, from these weights or from the folder that they were linked from: held to the canary all the same.
        canary = verify_canary(server, checkpoint)
        self._folder, self._proven = checkpoint, True
        return {
            "mode": "start",
            "seconds": time.perf_counter() - began,
            "canary_max_difference": canary.max_difference,
            "fell_back": None,
        }

    def _wait_for_start(self) -> None:
        if self._starting is not None:
            with self._console.waiting("starting the vLLM server"):
                while self._starting.is_alive():
                    self._starting.join(0.2)
            self._starting = None
        if self._start_error is not None:
            error, self._start_error = self._start_error, None
            self._server = None
            raise error

    @property
    def running(self) -> VLLMServer:
        """The server. Raises ServerError where it does not run."""
        if self._server is None or not self._proven:
            raise ServerError("no server runs; serve() starts one")
        return self._server

    def stop(self) -> None:
        """Ends the server, also one that is just starting. Harmless when there is none."""
        server, self._server, self._proven = self._server, None, False
        starting, self._starting = self._starting, None
        if server is not None and starting is not None:
            # A process that is just being made cannot be ended yet, and would stay; there is one within a moment.
            while starting.is_alive() and not (server._child is not None and server._child.pid):
                starting.join(0.02)
        if server is not None:
            server.stop()
        if starting is not None:
            starting.join(30.0)
