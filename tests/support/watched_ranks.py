"""Trainer processes over gloo that say what they exchange and allocate: `python watched_ranks.py
JOBS.json`. Not a test.

A job: {"name", "processes", "kind", "output_dir", …}; its kind is a function below. Each process
writes its findings to OUTPUT_DIR/RANK.json, or its traceback to OUTPUT_DIR/error.txt. The parent
imports everything and computes nothing, so that it can fork its children.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.configs.recipe import STORE_VARIABLE
from ttrl.records import Canary
from ttrl.training import resident
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.optimizer.optimizer import make_optimizer
from ttrl.training.optimizer.state import load_state, save_state
from ttrl.training.parallel.distributed import Ranks, ranks
from ttrl.training.parallel.sharding import local_part
from ttrl.training.policy.loading import load_policy


class Watch(TorchDispatchMode):
    """Records collectives with their groups, and the most bytes that new tensors had at the same
    time.
    """

    def __init__(self, here: Ranks) -> None:
        super().__init__()
        self.collectives: list[tuple[str, str]] = []
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._names = {
            "default": distributed.group.WORLD,
            "data": here.data_group,
            "tensor": here.tensor_group,
        }
        self._names["host"] = getattr(here, "host_group", None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if FakeTensor in types:  # which DTensor tries operations with
            return func(*args, **(kwargs or {}))
        if any(kind is not Tensor and kind is not torch.nn.Parameter for kind in types):
            # Sharded or quantised: what they do with the tensors they are made of comes by here,
            # too.
            return NotImplemented
        given = tree_leaves((args, kwargs))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collectives.append((func.overloadpacket.__name__, self._group(given)))
        for tensor in (x for x in given if isinstance(x, Tensor)):
            self._seen.add(tensor.untyped_storage())
        made = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(made) if isinstance(x, Tensor)):
            if not is_traceable_wrapper_subclass(tensor) and not tensor.is_meta:
                self._count(tensor)
        return made

    def _group(self, given: list[Any]) -> str:
        names = {group.group_name: name for name, group in self._names.items() if group is not None}
        for one in given:
            if isinstance(one, str) and one in names:
                return names[one]
            if isinstance(one, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):
                    return names[distributed.ProcessGroup.unbox(one).group_name]
        return "unknown"

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.live -= size


def save(job: dict[str, Any], here: Ranks) -> dict[str, Any]:
    """Load a checkpoint and its state, and write both again."""
    config = _config(TrainingConfig, job, output_dir="")
    policy = load_policy(config, here)
    optimizer = make_optimizer(policy, config)
    step = load_state(job["state"], policy, optimizer)
    output = Path(job["output_dir"])
    parts = [local_part(parameter.detach()).nbytes for parameter in policy.parameters()]
    with Watch(here) as watch:
        save_checkpoint(
            output / "checkpoint",
            policy,
            config.model,
            here,
            config=config,
            canary=Canary(1, "float32", [0, 1], [None, -1.0], [1], [-1.0], [0.0]),
            max_shard_bytes=20_000,
        )
        save_state(output / "state", policy, optimizer, step, here, config.state_format)
    return {"peak": watch.peak, "largest_part": max(parts), "collectives": watch.collectives}


def turns(job: dict[str, Any], here: Ranks) -> dict[str, Any]:
    """Follow requests, as if the device were no CPU, and watch what is done while servers may have
    it: from when they are told of new weights until what was parked comes back."""
    phases: list[list[tuple[str, str]]] = []
    stack = contextlib.ExitStack()

    class Watched(resident.Residence):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, parks=True)

        def hand_over(self, *given: Any) -> bool:
            done = super().hand_over(*given)
            watch = stack.enter_context(Watch(here))
            phases.append(watch.collectives)
            return done

        def _unpark(self, trained: resident.Trained) -> None:
            stack.close()
            super()._unpark(trained)

    start = _config(GRPOConfig, job, packed="", output_dir="")
    with stack:
        resident._serve(grpo_recipe.train_iteration, start, here, Watched)
    return {"phases": phases}


def late(job: dict[str, Any], here: Ranks) -> dict[str, Any]:
    """Meet after one of them has been away, or has died."""
    here.barrier()
    if here.rank == job["who"]:
        if job["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(job["seconds"])
    began = time.monotonic()
    try:
        here.barrier()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": None, "seconds": time.monotonic() - began}


KINDS: dict[str, Callable[[dict[str, Any], Ranks], dict[str, Any]]] = {
    "save": save,
    "turns": turns,
    "late": late,
}


def _config(kind: Any, job: dict[str, Any], **more: Any) -> Any:
    settings = {
        "model": job["model"],
        "device": "cpu",
        "num_threads": 1,
        **more,
        **job.get("settings", {}),
    }
    return kind.parse(settings, "test")


@contextlib.contextmanager
def default_timeout(seconds: float | None) -> Iterator[None]:
    """PyTorch's own time limit of a group, which is half an hour, made short."""
    if seconds is None:
        yield
        return
    from datetime import timedelta

    limit = timedelta(seconds=seconds)
    with mock.patch.object(distributed.distributed_c10d, "default_pg_timeout", limit):
        yield


def child(job: dict[str, Any], rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["processes"]))
    os.environ.update({STORE_VARIABLE: meeting, "LOCAL_WORLD_SIZE": str(job["processes"])})
    folder = Path(job["output_dir"])
    try:
        config = _config(GRPOConfig, job, packed="", output_dir="")
        with default_timeout(job.get("default_timeout")), ranks(config) as here:
            found = KINDS[job["kind"]](job, here)
            (folder / f"{rank}.json").write_text(json.dumps(found))
    except Exception:  # noqa: BLE001  # reported, whatever it is
        with open(folder / "error.txt", "a") as file:
            file.write(f"rank {rank}\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def main() -> None:
    gc.collect()
    gc.freeze()  # or each child's collections look at all that was imported, and copy its pages
    context = multiprocessing.get_context("fork")
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        Path(job["output_dir"]).mkdir(parents=True, exist_ok=True)
        meeting = f"{sys.argv[1]}.{number}"
        children = [
            context.Process(target=child, args=(job, rank, meeting))
            for rank in range(job["processes"])
        ]
        for one in children:
            one.start()
        for one in children:
            one.join()


if __name__ == "__main__":
    main()
