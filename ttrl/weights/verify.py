"""Prove the weights of a server after every sync, in two ways. Neither replaces the other:

- the server's workers compare every element in their memory with the source, and hash the bytes of
  the source (`ttrl.vllm_worker`). The digests must be those recorded by the trainer. This finds a
  weight changed on its way, or left behind;
- the server must reproduce the trainer's log-probabilities for the canary (`ttrl.weights.canary`).
  This finds any other difference, the prefix cache included.

The limits: only the canary verifies quantised layers, adapters and experts. Packed copies of large
models on CPUs are probed (`ttrl.vllm_worker.served_weights.EXACT_FLOPS`): this finds a changed
weight if it is off by more than rounding, in fp32 about a hundredth of a typical weight, in bf16
about a fifth. In a prefix cache, only the canary's own keys and values are checked.

A server just started may have every weight of the trainer, bit for bit, and other
log-probabilities. That is a warning, then and after later reloads: it is rounding beyond the
canary's limits, or a difference in all sampled tokens, too (`ttrl.monitoring.drift`).
"""

import logging
import math
import os
from dataclasses import dataclass, replace

from ttrl.errors import WeightSyncError
from ttrl.facts import WeightsComparison, read_facts
from ttrl.server.connection import ServerConnection
from ttrl.server.vllm import VLLMServer
from ttrl.weights.canary import CanaryReport, check_canary
from ttrl.weights.source import Files, Source

logger = logging.getLogger(__name__)

LOAD_SECONDS = 1800.0
"""For reading a large model from a slow disk."""


@dataclass(frozen=True)
class Proof:
    """A server's weights, as far as they are known."""

    problem: str | None = None
    """Why they are not those of the source, or None."""
    canary_max_difference: float = math.inf
    compared: int = 0
    """Elements compared with the source, over all workers; 0 if the server cannot compare them."""
    unchecked: int = 0
    """Elements of parameters without comparison, verified by the canary."""
    exact: bool = True
    """Whether packed copies were compared bit for bit; else they were probed."""
    is_whole: bool = False
    """Whether the workers hold all weights as the trainer has them, bit for bit."""


def prove(
    server: ServerConnection, source: Source, *, compare: bool = True, just_started: bool = False
) -> Proof:
    """Verify a running server's weights against a source: its workers hold them (not without
    `compare`), and it reproduces the canary. Its prefix cache is empty. Raises ServerError.
    """
    proof = compare_weights(server, source) if compare else Proof()
    if proof.problem is not None:
        return proof
    report = check_canary(server, source.canary, cache_is_empty=not just_started)
    problem = report.problem
    if problem is not None and _is_excused(server, report, proof, just_started):
        logger.warning(
            "%s has the trainer's weights, bit for bit, but computes different log-probabilities: "
            "%s; the differences over all sampled tokens will show whether it is more than "
            "rounding",
            server.base_url,
            problem,
        )
        problem = None
    return replace(proof, problem=problem, canary_max_difference=report.max_difference)


def _is_excused(
    server: ServerConnection, report: CanaryReport, proof: Proof, just_started: bool
) -> bool:
    """Tell whether a canary's problem is only a warning, as the weights are known to be right.
    After a reload the server may compute with others all the same (captured graphs, copies). So a
    server of ours is restarted first.
    """
    if report.stale or not proof.is_whole or not math.isfinite(report.max_difference):
        return False
    if not isinstance(server, VLLMServer):
        return True
    server.is_apart |= just_started
    return server.is_apart


def verify_weights(
    server: ServerConnection,
    checkpoint_folder: str | os.PathLike[str],
    *,
    after: str = "its start",
    compare: bool = True,
) -> Proof:
    """Return the proof of the weights of `checkpoint_folder` in a server just started. `after`
    names its start in the error.

    Raises WeightSyncError, with both numbers and the position, if they differ; ModelFolderError for
    an unreadable canary.
    """
    proof = prove(server, Files.of(checkpoint_folder), compare=compare, just_started=True)
    if proof.problem is not None:
        raise WeightSyncError(
            f"after {after}, the server does not compute with the weights in {checkpoint_folder}: "
            f"{proof.problem}. Use the same dtype, config.json and weights for trainer and server; "
            "if a file has changed since, make it again (remove the iteration's marker), or copy "
            "it again"
        )
    return proof


def compare_weights(server: ServerConnection, source: Source) -> Proof:
    """Make every worker of `server` compare its weights with a source, and compare the digests of
    the source with the trainer's. Skip servers of adapters: their base does not change, and the
    canary verifies the adapter. Raises ServerError.
    """
    if not server.worker_extension or server.serves_adapters:
        return Proof()
    body = {"method": "ttrl_compare_weights", "kwargs": {**source.place, "parts": source.spans}}
    answer = server.request("POST", "/collective_rpc", body, timeout=LOAD_SECONDS)
    workers = [read_facts(WeightsComparison, worker) for worker in answer["results"]]
    failed = [worker.failed for worker in workers if worker.failed]
    if failed:
        logger.warning(
            "%s cannot compare its weights; only the canary checks them: %s",
            server.base_url,
            failed[0],
        )
        return Proof()
    problems = [
        f"the server's weights differ: {problem}"
        for worker in workers
        for problem in worker.problems
    ]
    problems += source.problems([worker.tensors for worker in workers])
    compared = sum(worker.compared for worker in workers)
    unchecked = sum(worker.unchecked for worker in workers)
    exact = all(worker.exact for worker in workers)
    # Without the trainer's own record, the files may not be what the trainer computed with.
    is_whole = bool(compared) and source.has_digests and not unchecked and exact and not problems
    return Proof(
        problem="; ".join(dict.fromkeys(problems)) or None,
        compared=compared,
        unchecked=unchecked,
        exact=exact,
        is_whole=is_whole,
    )
