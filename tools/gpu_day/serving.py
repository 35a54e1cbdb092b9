"""Servers of the steps: how they are started, what memory they take, which processes they have."""

from pathlib import Path
from typing import Any

import psutil
import torch
from measure import gpu_memory_used
from steps import Place
from support.training_steps import move_adapters

from ttrl.configs import TrainingConfig
from ttrl.server.vllm import VLLMServer
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy

NAME = "policy"
SEQUENCES = 512
CONTEXT = 2048
LORA_RANK = 32
OF_THE_GPU = 0.8
"""Leaves room for the trainer's weights, which some steps hold at the same time."""


def make_server(
    place: Place,
    model: Path,
    name: str,
    *,
    adapters: bool = False,
    **more: Any,
) -> VLLMServer:
    """Return a server for a model, not started yet; its log is kept."""
    extra: dict[str, Any] = {"max_num_seqs": SEQUENCES} | more
    if adapters:
        extra["max_lora_rank"] = LORA_RANK
    if place.rehearse:
        extra |= {"max_num_seqs": 32, "kv_cache_memory_bytes": 2**28}
    else:
        extra |= {"gpu_memory_utilization": OF_THE_GPU, "enable_sleep_mode": True}
    return VLLMServer(
        model,
        served_model_name=NAME,
        log_path=place.logs / f"server-{name}.log",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        extra_args=extra,
        serves_adapters=adapters,
    )


def first_rank(place: Place) -> Ranks:
    """Return the trainer's only process, on the step's device."""
    return Ranks(0, 1, torch.device("cpu") if place.rehearse else torch.device("cuda", 0))


def make_adapter(place: Place, model: Path, folder: Path) -> Path:
    """Write a checkpoint with an adapter that changes something, and return its folder."""
    config = TrainingConfig(
        model=str(model),
        output_dir="",
        dtype="bf16",
        device=place.device,
        lora_rank=LORA_RANK,
        lora_merge=False,
    )
    here = first_rank(place)
    policy = move_adapters(load_policy(config, here))
    save_checkpoint(folder, policy, model, here, config=config)
    del policy
    if not place.rehearse:
        torch.cuda.empty_cache()
    return folder


def processes(server: VLLMServer) -> list[psutil.Process]:
    """Return the processes of a server that was started here."""
    own = psutil.Process().children(recursive=True)
    port = str(server.port)
    first = [process for process in own if port in process.cmdline()]
    below = [child for process in first for child in process.children(recursive=True)]
    return list({process.pid: process for process in [*first, *below]}.values())


def memory_of(server: VLLMServer) -> float:
    """Return bytes in use: of the GPU, of all processes together; without one, of the server's."""
    used = gpu_memory_used()
    if used is not None:
        return used
    return float(sum(process.memory_info().rss for process in processes(server)))


def cpu_seconds(server: VLLMServer) -> dict[str, float]:
    """Return the CPU seconds of the API server and of the engine so far."""
    found = {"API server": 0.0, "engine": 0.0}
    for process in processes(server):
        times = process.cpu_times()
        words = " ".join([process.name(), *process.cmdline()])
        who = "engine" if "EngineCore" in words or "Worker" in words else "API server"
        found[who] += times.user + times.system
    return found
