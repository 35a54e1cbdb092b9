"""Start one vLLM server: a process of its own with a random key on every path, on 127.0.0.1 unless
told otherwise.

It never outlives us: vLLM's API server (`python -m ttrl.vllm_worker.api_server`) runs below a guard
(`ttrl.system.processes`). Nothing here imports vLLM or torch. Training needs some values other than
vLLM's defaults; they are set here, and `extra_args` may override them:

- `--generation-config vllm`: the default takes temperature and top-k from the model's folder;
- `--logprobs-mode processed_logprobs`: the default ignores temperature and top-p, so it is not
  the sampling distribution;
- `--tool-call-parser`: the parser for the model's form of calls (`ttrl.server.parsers`);
- `--enable-prompt-tokens-details`: usage reports prompt tokens from the prefix cache, for counting
  FLOPs;
- on CPU (`ttrl.server.cpu`): steps of up to 512 sequences for small models, a heap that keeps its
  pages, `--enforce-eager`, and the worker inside the engine's process: healthy in 15 s instead of
  37 to 70 s, at the same speed. One unbound OpenMP thread for each core; it sleeps while it waits.
"""

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrl.configs.base import without_secrets
from ttrl.errors import ConfigError, ServerDiedError, ServerStartError
from ttrl.server.auth import FENCE_VARIABLE, KEY_VARIABLE, NAME_VARIABLE, TEMPLATE_VARIABLE
from ttrl.server.chat_template import template_digest
from ttrl.server.connection import ADAPTER_NAME, ServerConnection
from ttrl.server.cpu import (
    CPU_CACHE_VARIABLE,
    HEAP_VARIABLES,
    cpu_arguments,
    cpu_cache_bytes,
    is_cpu_build,
    thread_variables,
)
from ttrl.server.model_folder import check_model_folder, merge_adapter
from ttrl.server.parsers import Parsers, parsers_of
from ttrl.server.sites import ADAPTERS_VARIABLE
from ttrl.system.files import compile_cache
from ttrl.system.object_store import redact
from ttrl.system.processes import LOOPBACK, ChildProcess

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
WORKER_EXTENSION = "ttrl.vllm_worker.WeightSync"
"""Another one in `extra_args` must be derived from it, or None: then only the canary verifies
weights.
"""
_OWN_ARGUMENTS = frozenset(
    {
        "model",
        "model-tag",
        "host",
        "port",
        "uds",
        "api-key",
        "served-model-name",
        "dtype",
        "max-model-len",
        "seed",
    }
)
_SECRETS = {"hf-token": "export HF_TOKEN", "ssl-keyfile-password": "take a key file without one"}
OTHER_MACHINES = (
    "nnodes",
    "data-parallel-address",
    "data-parallel-hybrid-lb",
    "distributed-executor-backend",
)
_PARALLEL_ARGUMENTS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "distributed-executor-backend",
)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""vLLM's names for the dtypes of ttrl's other settings."""
# Half a second suffices, but vLLM waits without limit for clients with running requests.
_STOP_SECONDS = 5.0
# "… ERROR … ValueError: why".
_ERROR_LINE = re.compile(r"^(?!.* (?:WARNING|INFO) ).*\b\w*(?:Error|Exception): \S")


def own_argument_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Return a problem for each argument of vLLM set by ttrl, or with a secret.

    Other users could read a secret in the list of processes; vLLM writes its arguments to its log.
    """
    given = {name.replace("_", "-"): value for name, value in arguments.items()}
    own = sorted(_OWN_ARGUMENTS & given.keys())
    found = [f"{name} is set by ttrl; there is an argument for it" for name in own]
    if "chat-template" in given:
        found.append(
            "chat-template: use the setting chat_template, because tokenization needs it, too"
        )
    shown = "would be on a command line, readable by all users of the machine"
    for name, value in given.items():
        way_out = _SECRETS.get(name) or _way_out(value)
        if way_out is not None:
            found.append(f"{name} {shown}; {way_out}")
    return found


def _way_out(value: Any) -> str | None:
    """Return the remedy for secrets in a value, such as a connector's password, or None."""
    with contextlib.suppress(TypeError, ValueError):
        value = json.loads(value)
    if isinstance(value, Mapping) and without_secrets(value) != dict(value):
        return "put its secrets into the environment or a file"
    text = str(value)
    if "://" in text and redact(text) != text:
        return "remove the credentials from its address"
    return None


def seconds_to_start(model_folder: str | os.PathLike[str]) -> float:
    """Return the seconds allowed until a server is healthy: five minutes, plus a second per 100 MB
    of weights, as on a slow network disk; half an hour for a model to be downloaded first.
    """
    weights = sum(path.stat().st_size for path in Path(model_folder).glob("*.safetensors"))
    if Path(model_folder).is_dir():
        return 300.0 + weights // 1e8
    return 1800.0


class VLLMServer(ServerConnection):
    """Run a vLLM server for one model; started by `start()` or as a context manager, stopped by
    handle.

        with VLLMServer("models/m", served_model_name="policy",
        log_path="runs/NAME/logs/server.log", dtype="float32") as server:
            results = await get_task_results(tasks, server.endpoint(), "policy", ...)

    model_folder: a Hugging Face model folder, or a hub name such as "org/name".
    other_names: further names for clients; answers and metrics say `served_model_name`.
    dtype: "fp32", "bf16", "fp16" (or vLLM's names of them) or "auto" (vLLM's choice: half
        precision, for float32 weights too).
    extra_args: any other argument of vLLM, as {"gpu_memory_utilization": 0.8, "enforce_eager":
        False}: True becomes `--name`, False `--no-name`, a list several values, a dict JSON; None
        drops a default of ours.
    start_timeout: seconds until it must be healthy; None: `seconds_to_start`.
    port: None takes a free one. A restart keeps port and key, so clients stay valid.
    env: environment variables to add to ours.
    host: the address to listen on; other hosts reach it only if the user names another one than
        127.0.0.1.
    api_key: None makes a random one.
    serves_adapters: it keeps `model_folder` as the base and receives adapters
        (`ttrl.weights.sync`).
    adapters_from: the address of a store to fetch adapters from (`ttrl.server.sites`); None: it is
        given their folders.
    cpu: whether vLLM is built for CPUs; None: as the installed one.
    """

    _held: socket.socket | None = None
    """The socket reserving its port."""

    def __init__(
        self,
        model_folder: str | os.PathLike[str],
        *,
        served_model_name: str,
        other_names: Sequence[str] = (),
        log_path: str | os.PathLike[str],
        dtype: str = "auto",
        max_model_len: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
        seed: int = 0,
        start_timeout: float | None = None,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        host: str = HOST,
        api_key: str | None = None,
        serves_adapters: bool = False,
        adapters_from: str | None = None,
        cpu: bool | None = None,
    ) -> None:
        dtype = _DTYPES.get(dtype, dtype)
        super().__init__(
            served_model_name=served_model_name,
            dtype=dtype,
            api_key=api_key or secrets.token_urlsafe(32),
        )
        self.model_folder = model_folder
        taken = (served_model_name, ADAPTER_NAME)
        self.other_names = [name for name in other_names if name not in taken]
        self.log_path = Path(log_path)
        self.host = host
        self.serves_adapters = serves_adapters or adapters_from is not None
        self.adapters_from = adapters_from
        self._cpu = is_cpu_build() if cpu is None else cpu
        self.max_model_len = max_model_len
        self.extra_args = {
            name.replace("_", "-"): value for name, value in (extra_args or {}).items()
        }
        self.seed = seed
        self.start_timeout = start_timeout
        self.port = port
        self.env = dict(env or {})
        self.start_seconds = float("nan")
        """Duration of the last start."""
        self.is_apart = False
        """Whether it exceeded the canary's limits right after a start with the right weights."""
        self._port_is_given = port is not None
        self._child: ChildProcess | None = None
        self._ours = threading.Lock()  # a ChildProcess is for one thread at a time
        self._stopped = False
        # A private folder for files shared by its processes.
        self._private: Path | None = None
        self.worker_extension = (
            self.extra_args.get("worker-extension-cls", WORKER_EXTENSION) is not None
        )
        refused = own_argument_problems(self.extra_args)
        if refused:
            raise ConfigError("server", [f"extra_args: {problem}" for problem in refused])

    # Life

    def start(self) -> "VLLMServer":
        """Start the server and wait until it is healthy and asks for its key.

        Raises ModelFolderError for a folder not fit to serve, ServerStartError for a port in use, a
        death during the start, or a timeout; leaves nothing running then.
        """
        if self._child is not None:
            raise RuntimeError("this server has been started already; stop() it first")
        folder = check_model_folder(self.model_folder)
        if folder is not None:
            merge_adapter(folder)
        if self.parsers.problem is not None:
            raise ConfigError("server", [self.parsers.problem])
        self.policy_folder = self.model_folder
        self.version = None
        self._stopped = False
        start = time.monotonic()
        self.port = self._hold_port()
        child = ChildProcess(self._command(), self.log_path, env=self._environment())
        try:
            # stop() in another thread runs before the process exists, or once it can be ended.
            with self._ours:
                self._raise_if_stopped()
                self._child = child
                child.start()
            self._wait_until_healthy(child, start)
        except BaseException:
            self._end()
            raise
        self.start_seconds = time.monotonic() - start
        logger.info(
            "vLLM serves %s at %s after %.1f s",
            self.model_folder,
            self.base_url,
            self.start_seconds,
        )
        return self

    def stop(self) -> None:
        """End the server and all its descendants; return when all are gone. Harmless if it is not
        running.

        A `start()` in another thread then raises ServerStartError.
        """
        self._stopped = True
        self._end()

    def _end(self) -> None:
        with self._ours:
            child = self._child
            self._child = None
            self.version = None
            if child is not None:
                child.stop(timeout=_STOP_SECONDS)
            held = self._held
            self._held = None
            if held is not None:
                held.close()
            private = self._private
            self._private = None
            if private is not None:
                shutil.rmtree(private, ignore_errors=True)

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise ServerStartError("the server was stopped during its start")

    def restart(self, model_folder: str | os.PathLike[str] | None = None) -> None:
        """Restart the server, with another model folder if one is given. Port and key stay the
        same.
        """
        held, self._held = self._held, None  # keeps the port reserved meanwhile
        self.stop()
        self._held = held
        if model_folder is not None:
            self.model_folder = model_folder
        self.start()

    def check(self) -> None:
        """Raise ServerDiedError, with the last log lines, if the process or its engine is gone."""
        child = self._child
        if child is None:
            raise ServerDiedError("the server is not running: it was never started, or was stopped")
        problem = None
        try:
            status, _ = self._http("GET", "/health", with_key=False)
            if status >= 500:
                problem = f"the vLLM server's engine is dead (/health answers {status})"
        except ConnectionError:
            problem = "the vLLM server no longer listens"
            with contextlib.suppress(TimeoutError), self._ours:
                child.wait(timeout=3.0)  # it is about to end: its exit code tells more
        except OSError:  # slow, perhaps busy: not proof of death
            logger.debug("the vLLM server did not answer /health within 10 s")
        with self._ours:
            returncode = child.poll()
        if returncode is not None:
            problem = f"the vLLM server {_ending(returncode)}"
        if problem is not None:
            raise ServerDiedError(f"{problem}; {self._last_lines(child)}")

    def __enter__(self) -> "VLLMServer":
        if self._child is not None:
            return self
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped since; it may have ended by itself."""
        return self._child is not None

    @property
    def has_ended(self) -> bool:
        """Whether it was started and its process is gone. Takes no time; `check` also notices a
        dead engine.
        """
        with self._ours:
            return self._child is not None and self._child.poll() is not None

    # Talking to it

    @property
    def takes_memory(self) -> bool:
        return self.worker_extension and not self.serves_adapters

    @property
    def root_url(self) -> str:
        return f"http://{_bracketed(self.host)}:{self.port}"

    @property
    def is_ready(self) -> bool:
        return self.is_started

    # How it is started

    @functools.cached_property
    def parsers(self) -> Parsers:
        """The parsers of tool calls and reasoning, from the starting model; checkpoints keep its
        chat template.
        """
        return parsers_of(self.model_folder, self.extra_args)

    def _command(self) -> list[str]:
        arguments: dict[str, Any] = {
            "model": os.fspath(self.model_folder),
            "served-model-name": [self.served_model_name, *self.other_names],
            "host": self.host,
            "port": self.port,
            "dtype": self.dtype,
            "seed": self.seed,
            "generation-config": "vllm",
            "logprobs-mode": "processed_logprobs",
            "disable-uvicorn-access-log": True,
            "enable-prompt-tokens-details": True,
            "worker-extension-cls": WORKER_EXTENSION,
        }
        if self.max_model_len is not None:
            arguments["max-model-len"] = self.max_model_len
        if self._cpu:
            arguments["enforce-eager"] = True
            arguments.update(cpu_arguments(self.model_folder, self.extra_args))
        if self.serves_adapters:
            arguments |= {"enable-lora": True, "max-loras": 1}
        arguments.update(self.extra_args)
        arguments.update(self.parsers.arguments)
        middleware = arguments.pop("middleware", None) or []
        if isinstance(middleware, str):
            middleware = [middleware]
        else:
            middleware = list(middleware)
        if self.adapters_from is not None:
            middleware.append("ttrl.server.sites.FetchAdapters")
        command = [sys.executable, "-m", "ttrl.vllm_worker.api_server"]
        for name, value in arguments.items():
            command += _flag(name, value)
        # Added last, so outermost: no other middleware sees a request without the key.
        for name in [*middleware, "ttrl.server.auth.RequireKey"]:
            command += ["--middleware", name]
        return command

    def _environment(self) -> dict[str, str]:
        defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        given = {**os.environ, **self.env}
        if self._cpu:
            defaults |= HEAP_VARIABLES
            # The variable would override it.
            if self.extra_args.get("kv-cache-memory-bytes") is None:
                defaults[CPU_CACHE_VARIABLE] = f"{cpu_cache_bytes() / 2**30:g}"
            own_binding = given.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
            if not own_binding and all(
                self.extra_args.get(name) in (None, 1) for name in _PARALLEL_ARGUMENTS
            ):
                defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | thread_variables()
        if self.serves_adapters:
            defaults["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not any(self.extra_args.get(name) for name in OTHER_MACHINES):
            defaults |= LOOPBACK
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="ttrl-server-"))
        defaults |= compile_cache(self._private)
        if len(os.fsencode(self._private)) < 60:  # sockets' names have at most 107 bytes
            defaults["VLLM_RPC_BASE_PATH"] = str(self._private)  # vLLM leaves its sockets behind
        fence = self._private / "weights"
        fence.unlink(missing_ok=True)  # not synced yet
        own = {
            "VLLM_SERVER_DEV_MODE": "1",
            KEY_VARIABLE: self.api_key,
            FENCE_VARIABLE: str(fence),
            TEMPLATE_VARIABLE: template_digest(self.model_folder),
            NAME_VARIABLE: f"{socket.gethostname()} {self.host}:{self.port}",
        }
        if self.adapters_from is not None:
            own[ADAPTERS_VARIABLE] = json.dumps(
                [self.adapters_from, str(self._private / "adapters"), os.fspath(self.model_folder)]
            )
        return {**defaults, **given, **own}

    def _hold_port(self) -> int:
        """Return the given port, the previous one, or a free one. Raises ServerStartError if the
        given one is in use.

        The port stays bound here until `stop()`, shareable only by processes of this user
        (`ttrl.vllm_worker.api_server`). No other user can listen there before vLLM does, or after
        its death, and receive the key.
        """
        if self._held is not None and self.port is not None:
            return self.port
        if ":" in self.host:
            family = socket.AF_INET6
        else:
            family = socket.AF_INET
        for port in [self.port or 0] if self._port_is_given or not self.port else [self.port, 0]:
            held = socket.socket(family)
            try:
                if port:
                    # This probe shares with no process, not even with another server of this user.
                    with socket.socket(family) as probe:
                        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                        probe.bind((self.host, port))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind((self.host, port))
                self._held = held
                return int(held.getsockname()[1])
            except OSError as error:
                held.close()
                why = error
        if self._port_is_given:
            way_out = "use another port, or none for a free one"
        else:
            way_out = "check that it is an address of this machine"
        raise ServerStartError(
            f"cannot serve at {self.host}:{self.port or 'any port'}: {why.strerror}; {way_out}"
        ) from why

    def _wait_until_healthy(self, child: ChildProcess, began: float) -> None:
        state = "it never answered"
        if self.start_timeout is None:
            timeout = seconds_to_start(self.model_folder)
        else:
            timeout = self.start_timeout
        while True:
            with self._ours:
                self._raise_if_stopped()
                returncode = child.poll()
            if returncode is not None:
                raise ServerStartError(
                    f"the vLLM server {_ending(returncode)} during its start; "
                    f"{self._last_lines(child)}"
                )
            state = self._state() or state
            if state == "ready":
                return
            if time.monotonic() > began + timeout:
                raise ServerStartError(
                    f"the vLLM server was not healthy after {timeout:g} s ({state}); raise "
                    "start_timeout if the disk is slow or vLLM compiles much; "
                    f"{self._last_lines(child)}"
                )
            time.sleep(0.1)

    def _state(self) -> str | None:
        """Return the problem with its answers, "ready" without one, None without answers. Only this
        user's processes can answer and receive the key: see `_hold_port`."""
        try:
            if self._http("GET", "/health", with_key=False)[0] != 200:
                return "/health does not answer 200"
            if self._http("GET", "/v1/models")[0] != 200:
                return "it does not accept its key"
            if self._http("GET", "/version", with_key=False)[0] != 401:
                return "it answers without a key"
        except OSError:
            return None
        return "ready"

    def _last_lines(self, child: ChildProcess) -> str:
        """Return the last lines of the log for error messages, plus the "root cause above" they
        often point to."""
        everything = child.log_tail(2000).splitlines()
        last = everything[-30:]
        cause = next((line for line in everything if _ERROR_LINE.search(line)), None)
        if cause is not None and cause not in last:
            first = f"first error in its log:\n  {cause}\n"
        else:
            first = ""
        if last:
            text = "\n".join("  " + line for line in last)
        else:
            text = "  (nothing)"
        return f"{first}the last lines of its log {self.log_path}:\n{text}"


def _bracketed(host: str) -> str:
    """Return the address as it appears in URLs; a wildcard address becomes the loopback one."""
    host = {"0.0.0.0": HOST, "::": "::1"}.get(host, host)
    if ":" in host:
        return f"[{host}]"
    return host


def _flag(name: str, value: Any) -> list[str]:
    """Turn a name and a value, such as max_num_seqs and 8, into arguments, as described in
    VLLMServer.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(dict(value))]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def _ending(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by signal {-returncode}"
    return f"ended with exit code {returncode}"
