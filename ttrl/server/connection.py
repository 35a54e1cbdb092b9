"""Talk to a vLLM server, local or joined: one base URL, one key, and its presumed weights.

`ttrl.server.vllm.VLLMServer` starts one here. A `JoinedServer` was started elsewhere (`ttrl serve`
on another host, a machine of a Ray cluster).
"""

import hmac
import http.client
import json
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from ttrl.errors import ServerDiedError, ServerError, WeightSyncError
from ttrl.records import ADAPTER_FOLDER, Endpoint
from ttrl.server.auth import FENCE_HEADER, FENCE_PATH, PROOF_PATH, derived
from ttrl.server.chat_template import template_digest
from ttrl.server.model_folder import weights_digest
from ttrl.text import gib

ADAPTER_NAME = "policy-adapter"
"""Served name of an adapter next to its base."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: another server could prove knowledge of the key in this one's name."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


class ServerConnection:
    """Connect to one vLLM server behind `ttrl.server.auth.RequireKey`: its state, and requests to
    it.

    served_model_name: the name of its model.
    dtype: its compute dtype: "float32", "bfloat16", "float16" or "auto".
    """

    worker_extension = True
    """Whether its workers have the methods of `ttrl.vllm_worker.WeightSync`."""
    most_bytes = 2**28
    """Of an answer; none of those requested here has a hundredth of that."""
    serves_adapters = False
    """Whether it keeps a base and receives adapters instead of merged weights."""

    @property
    def takes_memory(self) -> bool:
        """Whether it can map a trainer's memory (`ttrl.weights.source`)."""
        return False

    def __init__(self, *, served_model_name: str, dtype: str, api_key: str) -> None:
        self.served_model_name = served_model_name
        self.dtype = dtype
        self.api_key = api_key
        self.policy_folder: str | os.PathLike[str] | None = None
        """The checkpoint of its policy; None: the model it was started with."""
        self.version: str | None = None
        """The version of the last `open_to`."""
        # No proxy: the address is this machine's own, or one in the user's own network.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    @property
    def root_url(self) -> str:
        """http://HOST:PORT."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent; else `check` comes first."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ServerDiedError if it is gone."""
        raise NotImplementedError

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients: http://HOST:PORT/v1."""
        return f"{self.root_url}/v1"

    @property
    def model_name(self) -> str:
        """The model name in requests for the policy: the served model or its adapter."""
        if self.has_adapter:
            return ADAPTER_NAME
        return self.served_model_name

    @property
    def has_adapter(self) -> bool:
        """Whether the policy is an adapter next to the starting model."""
        if self.policy_folder is None:
            return False
        checkpoint = Path(self.policy_folder)
        return self.reads(checkpoint) != checkpoint

    def reads(self, checkpoint: Path) -> Path:
        """Return the part it reads of a checkpoint on a shared file system: all, or the adapter."""
        adapter = checkpoint / ADAPTER_FOLDER
        if self.serves_adapters and adapter.is_dir():
            return adapter
        return checkpoint

    def bring(self, checkpoint: Path) -> AbstractContextManager[Sequence[Path]]:
        """Return where it can read a checkpoint's weights, or its adapter, within the context; the
        fastest place first. Raises ServerError.
        """
        return nullcontext([self.reads(checkpoint)])

    def endpoint(self, version: str | None = None) -> Endpoint:
        """Return this server's endpoint for `get_task_results`. Requests are for the weights of
        `version`, by default the last `open_to`'s: the server refuses them if it has others.
        """
        version = self.version if version is None else version
        return Endpoint(
            self.base_url, self.api_key, {} if version is None else {FENCE_HEADER: version}
        )

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 300.0,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Send one request with the key to `path` ("/v1/models"); return the JSON answer, or the
        text if it is not JSON.

        Raises ServerDiedError if the server is gone, ServerError for any status but 200.
        """
        if not self.is_ready:
            self.check()
        try:
            status, text = self._http(method, path, body, timeout, headers=headers)
        except OSError as error:
            self.check()
            raise ServerError(
                f"{method} {path}: the server at {self.base_url} did not answer: {error}"
            ) from error
        if status != 200:
            self.check()
            raise ServerError(f"{method} {path}: the server answered {status}: {text[:2000]}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def close_to_all(self) -> None:
        """Refuse requests with named weights from now on. Call it before changing weights. Raises
        ServerError.
        """
        self.version = None
        self.request("DELETE", FENCE_PATH)

    def open_to(self, version: str) -> None:
        """Answer requests for weights of this name from now on. Call it after the proof of a sync.
        Raises ServerError.
        """
        self.request("POST", FENCE_PATH, headers={FENCE_HEADER: version})
        self.version = version

    def open_version(self) -> str | None:
        """Return the name of the weights it answers for; None: closed, as after any start. Raises
        ServerError.
        """
        version: str | None = self.request("GET", FENCE_PATH, timeout=10.0)["weights"]
        return version

    def check_chat_template(self, model: Path) -> None:
        """Raise WeightSyncError if the server's chat template differs from the one of `model`.

        An older server does not report its template.
        """
        digest = self.request("GET", FENCE_PATH, timeout=10.0).get("chat_template")
        if digest not in (None, template_digest(model)):
            raise WeightSyncError(
                f"the server at {self.base_url} and the run's model have different chat templates; "
                "start it with `ttrl serve` and that model, or with the run's chat_template as "
                "--chat-template FILE"
            )

    def weights_digest(self) -> str:
        """Return a name for this server's current weights and dtype, for the cache of
        `get_task_results`."""
        if self.policy_folder is None:
            raise ServerError(f"the weights of {self.base_url} are unknown; sync it first")
        return f"{weights_digest(self.policy_folder)}/{self.dtype}"

    def _http(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = 10.0,
        *,
        with_key: bool = True,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", **(headers or {})}
        if with_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if body is None:
            data = None
        else:
            data = json.dumps(body).encode()
        deadline = time.monotonic() + timeout
        url = f"{self.root_url}{path}"
        request = urllib.request.Request(  # noqa: S310
            url, data=data, headers=headers, method=method
        )
        try:
            with self._opener.open(request, timeout=timeout) as answer:
                found = bytearray()
                while part := answer.read1(2**20):  # the socket's timeout applies to each part
                    found += part
                    if len(found) > self.most_bytes:
                        raise ConnectionError(f"it sent more than {gib(self.most_bytes)}")
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"its answer was not complete after {timeout:g} s")
                if answer.length:  # a truncated answer ends like a whole one
                    raise ConnectionError(f"its answer ended {answer.length} bytes too early")
                return answer.status, found.decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(2**20).decode(errors="replace")
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else error from None
        # It died during an answer, or does not speak HTTP.
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error


Bring: TypeAlias = Callable[[ServerConnection, Path], AbstractContextManager[Sequence[Path]]]
"""`ServerConnection.bring`, as a function of the server."""


class JoinedServer(ServerConnection):
    """Join a server started elsewhere; its key comes from a file or the environment, never from a
    config.

    root_url: "http://10.0.0.7:8000", as `ttrl serve` prints it. api_key: the server must prove
    knowledge of it before any other request; it receives only a key derived for this server.
    serves_adapters: it keeps its base and receives adapters. bring: transfers checkpoints to its
    machine; None: both share a file system. find: returns its current address, and raises
    ServerDiedError without one; None: it stays at `root_url`.
    """

    def __init__(
        self,
        root_url: str,
        *,
        served_model_name: str,
        dtype: str,
        api_key: str,
        serves_adapters: bool = False,
        bring: Bring | None = None,
        find: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(served_model_name=served_model_name, dtype=dtype, api_key="")
        self._root_url = root_url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self.serves_adapters = serves_adapters
        self._bring = bring
        self._find = find

    @property
    def root_url(self) -> str:
        return self._root_url

    @property
    def is_ready(self) -> bool:
        return bool(self.api_key)

    def check(self) -> None:
        """Raise ServerDiedError if it does not answer, its engine is dead, or it does not know the
        key; it may come back later.
        """
        if self._find is not None and (url := self._find()) != self._root_url:
            self._root_url = url
            self.api_key = ""  # it must prove its knowledge of the key again
        problem: str | None = None
        try:
            status, _ = self._http("GET", "/health", with_key=False)
            if status >= 500:
                problem = f"its engine is dead (/health answers {status})"
            else:
                problem = self._prove()
        except TimeoutError:
            problem = "it does not answer within 10 s"
        except OSError as error:
            problem = f"it cannot be reached ({error})"
        if problem is not None:
            raise ServerDiedError(
                f"the server at {self.base_url}: {problem}; its log is on its own host"
            )

    def bring(self, checkpoint: Path) -> AbstractContextManager[Sequence[Path]]:
        if self._bring is None:
            return super().bring(checkpoint)
        return self._bring(self, checkpoint)

    def close_to_all(self) -> None:
        if self.serves_adapters and self.open_version() is None:
            # It may have restarted since, and lost its adapter.
            self.policy_folder = None
        super().close_to_all()

    def _prove(self) -> str | None:
        """Ask for a proof of the key, for a fresh random number; return the problem, or None."""
        number = secrets.token_hex(16)
        _, text = self._http("GET", f"{PROOF_PATH}?{number}", with_key=False)
        try:
            answer = json.loads(text)
            name = str(answer["name"])
            proof = str(answer["proof"])
        except (ValueError, KeyError, TypeError):
            name = proof = ""
        if not hmac.compare_digest(
            proof.encode(), derived(self._key, "proof", number, name).encode()
        ):
            return (
                "it does not prove its key: it has another one, or another version's `ttrl serve` "
                "started it"
            )
        self.api_key = derived(self._key, "key", name)
        return None
