"""Bring new weights into a running server, and prove that it computes with them.

Three ways: "reload" (in place, tens of milliseconds for a small model), an adapter next to the base
that stays (for servers with `serves_adapters`), and "restart". None is trusted. After every sync

- the server's workers compare every element that they hold with the checkpoint's files, and the
  bytes that they read with what the trainer recorded when it wrote them (`ttrl.vllm_worker`): this
  finds a weight that changed on its way, or stayed behind;
- the server must reproduce the trainer's log-probabilities for the canary (`ttrl.server.canary`):
  this finds any other difference, the prefix cache included.

What neither proves: quantised layers, adapters and experts are verified by the canary alone; packed
copies of large models on CPUs are probed (`ttrl.vllm_worker.weights.EXACT_FLOPS`), which finds a
changed weight if it is off by more than rounding: in fp32 about a hundredth of a typical weight, in
bf16 about a fifth; and keys and values of the old policy in a prefix cache are found where the
canary's are.

A mismatch after a reload falls back to a restart; one after a restart raises WeightSyncError. But
where a server that was just started has every weight that the trainer recorded, bit for bit, other
log-probabilities than the trainer's are a warning, then and after later reloads: that is rounding
which the canary's limits did not foresee, or a difference that shows in all sampled tokens, too
(`ttrl.monitoring.drift`).

While weights are changed, the server refuses requests that name weights (`ttrl.server.auth`); the
caller opens it again (`ServerConnection.open_to`).
"""

import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ttrl.errors import ConfigError, ServerDiedError, ServerError, WeightSyncError
from ttrl.server.canary import Canary, CanaryReport, check_canary, leave_in_cache
from ttrl.server.connection import ADAPTER_NAME, ServerConnection
from ttrl.server.transfer import Handover, load_from_memory, map_memory
from ttrl.server.vllm import VLLMServer

logger = logging.getLogger(__name__)

# How long the prefix cache may refuse to be emptied because requests still run.
_DRAIN_SECONDS = 30.0
_LOAD_SECONDS = 1800.0  # a large model from a slow disk

Mode = Literal["memory", "reload", "restart", "adapter"]


@dataclass(frozen=True)
class WeightComparison:
    """How the weights that the workers hold compare with the checkpoint's files."""

    compared: int = 0
    """Elements that were compared with the files, over all workers; 0 if the server cannot compare.
    """
    unchecked: int = 0
    """Elements of parameters that are verified by the canary alone."""
    exact: bool = True
    """Whether packed copies were compared bit for bit; else they were probed."""
    problem: str | None = None
    is_proof: bool = False
    """Whether the workers hold all weights as the trainer has them, bit for bit."""


@dataclass(frozen=True)
class SyncReport:
    """One weight sync that was confirmed."""

    mode: Mode
    """The way that worked in the end."""
    seconds: float
    """Time for everything, proof and fallback included."""
    canary_max_difference: float
    fell_back: str | None
    """Why a reload was followed by a restart, or None."""
    comparison: WeightComparison = WeightComparison()
    files_because: str | None = None
    """Why weights that were held out in memory were read from files, or None."""


def sync_weights(
    server: ServerConnection,
    checkpoint_folder: str | os.PathLike[str],
    *,
    mode: Literal["reload", "restart"] = "reload",
    compare: bool = True,
    asleep: bool = False,
    handover: Handover | None = None,
) -> SyncReport:
    """Make `server` compute with the policy in `checkpoint_folder`, and prove it. Afterwards the
    server is still closed to requests that name weights.

    compare: False checks the canary alone.
    asleep: the server sleeps (`sleep`) and is woken: the weights first, the KV cache after they
        were loaded.
    handover: the same weights in the trainer's memory, from where they are taken if the server can;
        else, and where that fails, they are read from the folder, as soon as the trainer has
        written it.

    No request should be running. Raises ModelFolderError for a folder without a readable
    canary.json, WeightSyncError if the server does not compute with these weights even after a
    restart (or cannot be restarted from here), and what `VLLMServer.start` raises.
    """
    if mode not in ("reload", "restart"):
        raise ConfigError("sync_weights", [f"mode is {mode!r}; it is 'reload' or 'restart'"])
    start = time.monotonic()
    folder = Path(checkpoint_folder).absolute()
    if handover is not None and not (mode == "reload" and server.takes_memory):
        handover.wait_for_files(folder)
        handover = None
    if handover is None:
        canary = Canary.load(folder)
    else:
        canary = Canary.of(handover.canary)
    no_memory = fell_back = None
    if mode == "reload":
        if handover is not None:
            report, comparison, no_memory = _reload(
                server, folder, canary, source=handover, compare=compare, asleep=asleep
            )
            if no_memory is None:
                return SyncReport(
                    "memory", time.monotonic() - start, report.max_difference, None, comparison
                )
            logger.warning(
                "weights are read from files, as they were not taken from memory: %s", no_memory
            )
            handover.wait_for_files(folder)
            canary = Canary.load(folder)
        report, comparison, fell_back = _reload(
            server, folder, canary, source=folder, compare=compare, asleep=asleep
        )
        if fell_back is None:
            way: Mode
            if server.has_adapter:
                way = "adapter"
            else:
                way = "reload"
            seconds = time.monotonic() - start
            return SyncReport(way, seconds, report.max_difference, None, comparison, no_memory)
        if not isinstance(server, VLLMServer):
            raise WeightSyncError(
                f"the server at {server.base_url} does not compute with the weights in {folder}: "
                f"{fell_back}; it cannot be "
                "restarted from here: start it again on its host (ttrl serve), with the same "
                "model and dtype"
            )
        logger.warning("weights were not loaded in place, restarting the server: %s", fell_back)
    _restart(server, folder)
    if fell_back:
        after = f"a restart (the reload before it failed: {fell_back})"
    else:
        after = "a restart"
    report, comparison = verify_weights(server, folder, after=after, compare=compare)
    seconds = time.monotonic() - start
    return SyncReport("restart", seconds, report.max_difference, fell_back, comparison, no_memory)


def verify_weights(
    server: ServerConnection,
    checkpoint_folder: str | os.PathLike[str],
    *,
    after: str = "its start",
    compare: bool = True,
) -> tuple[CanaryReport, WeightComparison]:
    """Verify that a running server has the weights of `checkpoint_folder`: what its workers hold
    (not without `compare`), and the canary. `after` says in the error what it was checked after.

    Raises WeightSyncError, with both numbers and the position, if they differ; ModelFolderError for
    an unreadable canary.
    """
    folder = Path(checkpoint_folder).absolute()
    canary = Canary.load(folder)
    if compare:
        comparison = compare_weights(server, folder, canary)
    else:
        comparison = WeightComparison()
    if comparison.problem is not None:
        raise WeightSyncError(
            f"after {after}, the server does not hold the weights in {checkpoint_folder}: "
            f"{comparison.problem}; a file that "
            "changed since the trainer wrote it must be made again (remove the iteration's "
            "marker), or copied again"
        )
    report = check_canary(server, canary)
    problem = _problem(server, report, comparison, just_started=True)
    if problem:
        raise WeightSyncError(
            f"after {after}, the server does not compute with the weights in "
            f"{checkpoint_folder}: {problem}; "
            "dtype, config.json and weights of trainer and server must agree"
        )
    return report, comparison


def _problem(
    server: ServerConnection,
    report: CanaryReport,
    comparison: WeightComparison,
    just_started: bool = False,
) -> str | None:
    """Return what the canary found wrong; a warning is enough where the weights are known to be
    right. After a reload the server may compute with others all the same (captured graphs, copies),
    so one that can be restarted has to be.
    """
    if (
        report.passed
        or report.stale
        or not comparison.is_proof
        or not math.isfinite(report.max_difference)
    ):
        return report.problem
    if isinstance(server, VLLMServer):
        server.is_apart |= just_started
        if not server.is_apart:
            return report.problem
    logger.warning(
        "%s has the trainer's weights, bit for bit, and computes something else with them: %s; "
        "the differences of all sampled "
        "tokens will show whether that is more than rounding",
        server.base_url,
        report.problem,
    )
    return None


def _reload(
    server: ServerConnection,
    folder: Path,
    canary: Canary,
    *,
    source: Path | Handover,
    compare: bool,
    asleep: bool,
) -> tuple[CanaryReport, WeightComparison, str | None]:
    """Load weights in place; returns the canary's report, what was compared, and None or why a
    restart is needed.
    """
    report = CanaryReport(False, math.inf, None)
    comparison = WeightComparison()
    try:
        if isinstance(source, Handover):
            map_memory(server, source.memory, _LOAD_SECONDS)  # before anything is changed
        server.close_to_all()
        if asleep:
            server.request("POST", "/wake_up?tags=weights", timeout=_LOAD_SECONDS)
        else:
            # Puts keys and values of the old weights into the prefix cache, where the check finds
            # them if they stay.
            leave_in_cache(server, canary)
        server.policy_folder = folder
        if isinstance(source, Handover):
            load_from_memory(server, _LOAD_SECONDS)
            if isinstance(server, VLLMServer) and source.is_written:
                server.model_folder = folder
        else:
            load_weights(server, source)
        if asleep:
            server.request("POST", "/wake_up?tags=kv_cache", timeout=_LOAD_SECONDS)
        reset_prefix_cache(server)
        if compare or server.serves_adapters:
            comparison = compare_weights(server, source, canary)
        if comparison.problem is None:
            report = check_canary(server, canary, cache_is_empty=True)
    except ServerDiedError:
        raise
    except ServerError as error:
        return report, comparison, f"{type(error).__name__}: {error}"
    finally:
        server.leave()
    return report, comparison, comparison.problem or _problem(server, report, comparison)


def _restart(server: ServerConnection, folder: Path) -> None:
    assert isinstance(server, VLLMServer), "only ours are restarted"
    if server.serves_adapters:
        server.restart()
        server.policy_folder = folder
        if server.has_adapter:
            load_weights(server, folder)
    else:
        server.restart(folder)


def load_weights(server: ServerConnection, folder: Path) -> None:
    """Load the weights of `folder` in place, or the adapter there; does not empty the prefix cache.
    Raises ServerError if vLLM refuses."""
    if server.has_adapter:
        adapter = {"lora_name": ADAPTER_NAME, "lora_path": str(server.adapter(folder))}
        # Not `load_inplace`: vLLM 0.32 then reads the files again for every step that it computes.
        if any(one["id"] == ADAPTER_NAME for one in server.request("GET", "/v1/models")["data"]):
            server.request("POST", "/v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        server.request("POST", "/v1/load_lora_adapter", adapter, timeout=_LOAD_SECONDS)
    elif server.serves_adapters:
        return  # it has had its base since its start
    elif not _load_from_near(server, folder):
        if server.worker_extension:
            method = "ttrl_load_weights"
        else:
            method = "reload_weights"
        if server.worker_extension:
            name = "folder"
        else:
            name = "weights_path"
        body = {"method": method, "kwargs": {name: str(folder)}}
        server.request("POST", "/collective_rpc", body, timeout=_LOAD_SECONDS)
        if isinstance(server, VLLMServer):
            server.model_folder = folder  # what a later restart loads


def _load_from_near(server: ServerConnection, folder: Path) -> bool:
    """Load weights that were brought to the server's machine; return False where it is to read the
    files.
    """
    near = server.nearer(folder)
    if near == folder:
        return False
    try:
        map_memory(server, near, _LOAD_SECONDS)
        load_from_memory(server, _LOAD_SECONDS)
    except ServerDiedError:
        raise
    except ServerError as error:
        logger.warning("%s reads %s itself: %s", server.base_url, folder, error)
        server.leave()
        return False
    return True


def compare_weights(
    server: ServerConnection, source: str | os.PathLike[str] | Handover, canary: Canary
) -> WeightComparison:
    """Make every worker of `server` compare what it holds with the files of a folder, and those
    with what the trainer recorded in the canary; or with the trainer's memory, and that with its
    digests. A server with adapters is asked for its base alone, where somebody else chose that: it
    does not change, and adapters are verified by the canary. Raises ServerError.
    """
    if not server.worker_extension or server.serves_adapters:
        return WeightComparison(problem=server.base_problem())
    where: dict[str, Any]
    if isinstance(source, Handover):
        where = {"memory": source.memory, "parts": source.places}
    else:
        folder = Path(source)
        near = server.nearer(folder)
        if near == folder:
            where = {"folder": str(folder)}
        else:
            where = {"memory": str(near)}
    body = {"method": "ttrl_compare_weights", "kwargs": where}
    workers: list[dict[str, Any]] = server.request(
        "POST", "/collective_rpc", body, timeout=_LOAD_SECONDS
    )["results"]
    failed = [worker["failed"] for worker in workers if worker["failed"]]
    if failed:
        logger.warning(
            "%s cannot compare its weights, so the canary alone speaks for them: %s",
            server.base_url,
            failed[0],
        )
        return WeightComparison()
    problems = [
        f"what the server holds differs: {problem}"
        for worker in workers
        for problem in worker["problems"]
    ]
    if isinstance(source, Handover):
        problems += source.problems(
            {name: sha for worker in workers for name, sha in worker["tensors"].items()}
        )
    else:
        for worker in workers:
            problems += _other_bytes(worker["tensors"], canary.weights)
    compared, unchecked = (
        sum(worker[name] for worker in workers) for name in ("compared", "unchecked")
    )
    exact = all(worker["exact"] for worker in workers)
    problem = "; ".join(dict.fromkeys(problems)) or None
    # Without the trainer's own record, which a starting model lacks, the files may not be what the
    # trainer computed with.
    of_trainer = isinstance(source, Handover) or bool(canary.weights)
    is_proof = bool(compared) and of_trainer and not unchecked and exact and problem is None
    return WeightComparison(compared, unchecked, exact, problem, is_proof)


def _other_bytes(read: dict[str, str], written: dict[str, str]) -> list[str]:
    """Return what a worker read that is not what the trainer wrote."""
    if not written:
        return []
    different = [name for name, value in read.items() if name in written and written[name] != value]
    unknown = [name for name in read if name not in written]
    found = []
    if different:
        found.append(
            f"{len(different)} tensors in the files are not those that the trainer wrote, such "
            f"as {different[0]}; they were "
            "damaged or replaced"
        )
    if unknown:
        found.append(
            f"{len(unknown)} tensors in the files are none of the trainer's, such as {unknown[0]}"
        )
    if not read:
        found.append("no tensor was read")
    return found


def reset_prefix_cache(server: ServerConnection) -> None:
    """Empty the prefix cache, which vLLM refuses while requests run; raises ServerError if it still
    does after 30 s.
    """
    deadline = time.monotonic() + _DRAIN_SECONDS
    while True:
        answer = server.request("POST", "/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is True:
            return
        if time.monotonic() > deadline:
            raise ServerError(
                f"POST /reset_prefix_cache: still {answer} after {_DRAIN_SECONDS:g} s; are "
                "requests running?"
            )
        time.sleep(0.1)


def sleep(server: ServerConnection) -> None:
    """Free the memory of weights and KV cache. With level 2 of vLLM's sleep nothing is left, so
    `sync_weights(..., asleep=True)` wakes it; the base under adapters, which no sync loads again,
    waits in the machine's memory (level 1). Level 2 has run on an H100, level 1 on no GPU; on a
    CPU, vLLM frees nothing. Raises ServerError.
    """
    server.close_to_all()
    reset_prefix_cache(server)
    server.request(
        "POST", f"/sleep?level={1 if server.serves_adapters else 2}", timeout=_LOAD_SECONDS
    )
