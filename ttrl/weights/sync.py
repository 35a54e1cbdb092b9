"""Bring new weights into a running server, and prove them.

    source     a checkpoint's files, or memory held out by the trainer (`ttrl.weights.source`)
    how        in place (tens of milliseconds for a small model), also into a sleeping server; an
               adapter next to its base (for servers with `serves_adapters`); a restart
    proof      digests and canary (`ttrl.weights.verify`)

No way is trusted. If a source fails, the next one is tried, and after the last one a restart. A
mismatch after a restart raises WeightSyncError.

During a sync the server refuses requests for named weights (`ttrl.server.auth`). The caller opens
it again (`ServerConnection.open_to`).
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttrl.errors import ServerDiedError, ServerError, WeightSyncError
from ttrl.facts import Sync
from ttrl.records import Canary, Handover
from ttrl.server.connection import ADAPTER_NAME, ServerConnection
from ttrl.server.vllm import VLLMServer
from ttrl.weights.canary import leave_in_cache
from ttrl.weights.source import Files, Source
from ttrl.weights.verify import LOAD_SECONDS, Proof, prove, verify_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """One confirmed weight sync."""

    mode: Literal["start", "memory", "reload", "adapter", "restart"]
    """The way of the weights, after all fallbacks."""
    seconds: float
    """Time for everything, proof and fallback included."""
    proof: Proof | None
    """None for a model without anything to compare it with."""
    fell_back: str | None = None
    """Why a reload was followed by a restart, or None."""
    files_because: str | None = None
    """Why weights in memory were read from files, or None."""

    def facts(self) -> Sync:
        """Return the report as it stands in the markers and in metrics.jsonl."""
        proof = self.proof
        if proof is None:
            return Sync(mode=self.mode, seconds=self.seconds)
        return Sync(
            mode=self.mode,
            seconds=self.seconds,
            canary_max_difference=proof.canary_max_difference,
            fell_back=self.fell_back,
            files_because=self.files_because,
            weights_compared=proof.compared,
            weights_unchecked=proof.unchecked,
        )


def sync_weights(
    server: ServerConnection,
    checkpoint_folder: str | os.PathLike[str],
    *,
    mode: Literal["start", "reload", "restart"] = "reload",
    compare: bool = True,
    asleep: bool = False,
    handover: Handover | None = None,
) -> SyncReport:
    """Make `server` compute with the policy in `checkpoint_folder`, and prove it. Afterwards the
    server is still closed to requests for named weights.

    mode: "start" for a server just started, perhaps with these weights: they are only verified
        then.
    compare: False checks the canary only.
    asleep: the server sleeps (`sleep`) and is woken: first its weights and, once they are loaded,
        its KV cache.
    handover: the same weights in the trainer's memory. The server takes them from there if it can.
        Else, and if that fails, it reads the folder, as soon as the trainer has written it.

    No request should be running. Raises ModelFolderError for a folder without a readable
    canary.json, WeightSyncError if the server does not compute with these weights even after a
    restart (or cannot be restarted from here), and the errors of `VLLMServer.start`.
    """
    began = time.monotonic()
    folder = Path(checkpoint_folder).absolute()
    if handover is not None and (mode != "reload" or not server.takes_memory):
        handover.wait_for_files(folder)
    if mode == "start" and _was_started_with(server, folder):
        try:
            proof = verify_weights(server, folder, compare=compare)
        except WeightSyncError as error:
            logger.warning("%s did not load its weights correctly: %s", server.base_url, error)
        else:
            server.policy_folder = folder
            return SyncReport("start", time.monotonic() - began, proof)
    problems: list[str] = []
    if mode != "restart":
        with server.bring(folder) as places:
            for source in _sources(server, folder, handover, places):
                proof = _load_in_place(server, folder, source, compare=compare, asleep=asleep)
                if proof.problem is None:
                    return SyncReport(
                        _way(server, source),
                        time.monotonic() - began,
                        proof,
                        files_because=problems[0] if problems else None,
                    )
                problems.append(proof.problem)
                logger.warning(
                    "%s did not take weights from %s: %s",
                    server.base_url,
                    source.place,
                    proof.problem,
                )
        if not isinstance(server, VLLMServer):
            raise WeightSyncError(
                f"the server at {server.base_url} does not compute with the weights in {folder}: "
                f"{problems[-1]}; this process cannot restart it: start it again on its host (ttrl "
                "serve), with the same model and dtype"
            )
    assert isinstance(server, VLLMServer), "only our own servers can restart"
    after = "a restart"
    if problems:
        after = f"a restart (the earlier reload failed: {problems[-1]})"
    _restart(server, folder)
    proof = verify_weights(server, folder, after=after, compare=compare)
    return SyncReport(
        "restart",
        time.monotonic() - began,
        proof,
        fell_back=problems[-1] if problems else None,
        files_because=problems[0] if len(problems) > 1 else None,
    )


def _was_started_with(server: ServerConnection, folder: Path) -> bool:
    """Tell whether a server was started with a checkpoint's own files, under any path. In half
    precision, the canary cannot tell one step of training from none.
    """
    if not isinstance(server, VLLMServer) or server.serves_adapters:
        return False
    started = Path(server.model_folder)
    return all(_is_same(file, started / file.name) for file in folder.glob("*.safetensors"))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _sources(
    server: ServerConnection, folder: Path, handover: Handover | None, places: Sequence[Path]
) -> Iterator[Source]:
    """Yield the sources of weights for a server, the fastest one first. Wait for files before they
    are yielded.
    """
    if handover is not None:
        if server.takes_memory:
            yield handover
        handover.wait_for_files(folder)
    canary = Canary.load(folder)
    for place in places:
        yield Files(place, canary)


def _way(server: ServerConnection, source: Source) -> Literal["memory", "adapter", "reload"]:
    if isinstance(source, Handover):
        return "memory"
    if server.has_adapter:
        return "adapter"
    return "reload"


def _load_in_place(
    server: ServerConnection, folder: Path, source: Source, *, compare: bool, asleep: bool
) -> Proof:
    """Load a checkpoint's weights from a source; return the proof."""
    try:
        server.close_to_all()
        if asleep:
            server.request("POST", "/wake_up?tags=weights", timeout=LOAD_SECONDS)
        else:
            # Keys and values of the old weights go into the prefix cache. The check finds them
            # there if they stay.
            leave_in_cache(server, source.canary)
        server.policy_folder = folder
        load_weights(server, source)
        if isinstance(server, VLLMServer) and not server.serves_adapters and source.is_written:
            server.model_folder = folder  # for a later restart
        if asleep:
            server.request("POST", "/wake_up?tags=kv_cache", timeout=LOAD_SECONDS)
        reset_prefix_cache(server)
        return prove(server, source, compare=compare)
    except ServerDiedError:
        raise
    except ServerError as error:
        return Proof(problem=f"{type(error).__name__}: {error}")


def _restart(server: VLLMServer, folder: Path) -> None:
    if not server.serves_adapters:
        server.restart(folder)
        return
    server.restart()
    server.policy_folder = folder
    if server.has_adapter:
        load_weights(server, Files(server.reads(folder), Canary.load(folder)))


def load_weights(server: ServerConnection, source: Source) -> None:
    """Load the weights of a source in place, or the adapter there; does not empty the prefix cache.
    Raises ServerError if vLLM refuses.
    """
    if server.has_adapter:
        assert isinstance(source, Files), "vLLM loads adapters from a folder"
        adapter = {"lora_name": ADAPTER_NAME, "lora_path": str(source.folder)}
        # Not `load_inplace`: vLLM 0.32 then reads the files again at every step.
        if any(one["id"] == ADAPTER_NAME for one in server.request("GET", "/v1/models")["data"]):
            server.request("POST", "/v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        server.request("POST", "/v1/load_lora_adapter", adapter, timeout=LOAD_SECONDS)
        return
    if server.serves_adapters:
        return  # it has had its base since its start
    body: dict[str, object] = {"method": "ttrl_load_weights", "kwargs": source.place}
    if not server.worker_extension:
        body = {"method": "reload_weights", "kwargs": {"weights_path": source.place["folder"]}}
    server.request("POST", "/collective_rpc", body, timeout=LOAD_SECONDS)


def reset_prefix_cache(server: ServerConnection, drain_seconds: float = 30.0) -> None:
    """Empty the prefix cache. vLLM refuses while requests run; raises ServerError if it still does
    after `drain_seconds`.
    """
    deadline = time.monotonic() + drain_seconds
    while True:
        answer = server.request("POST", "/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is True:
            return
        if time.monotonic() > deadline:
            raise ServerError(
                f"POST /reset_prefix_cache: still {answer} after {drain_seconds:g} s; check for "
                "running requests"
            )
        time.sleep(0.1)


def sleep(server: ServerConnection) -> None:
    """Free the memory of weights and KV cache. With level 2 of vLLM's sleep nothing is left, so
    `sync_weights(..., asleep=True)` wakes it. No sync loads the base under adapters again: it waits
    in the machine's memory (level 1). Level 2 has run on an H100, level 1 on no GPU; on a
    CPU, vLLM frees nothing. Raises ServerError.
    """
    server.close_to_all()
    reset_prefix_cache(server)
    server.request(
        "POST", f"/sleep?level={1 if server.serves_adapters else 2}", timeout=LOAD_SECONDS
    )
