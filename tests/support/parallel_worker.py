"""Runs jobs of training in any number of processes: `python parallel_worker.py JOBS.json`. Not a
test; tests read what it writes.

A job: {"name", "processes", "model", "packed", "output_dir", "settings": {…TrainingConfig},
"steps", …}. The parent imports everything once and never computes, so its children can be forked
from it and begin at once. Each job's first process writes OUTPUT_DIR/result.pt; a job that fails,
says so in OUTPUT_DIR/error.txt.
"""

import functools
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.data.packing.pack import PackedTensors
from ttrl.training.batches import policy_inputs, updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.optimizer.optimizer import begin_step, clip_and_step, make_optimizer
from ttrl.training.optimizer.state import load_state, save_state, state_tensors
from ttrl.training.parallel.distributed import STORE_VARIABLE, Ranks, ranks
from ttrl.training.parallel.gradients import settle
from ttrl.training.parallel.sharding import copy_whole, full_tensor
from ttrl.training.policy import policy as weights
from ttrl.training.policy.adapters import as_policy_of
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import Policy
from ttrl.training.resident import Trained, park, unpark
from ttrl.training.stepper import Stepper

AT_ONCE = 2
"""Jobs: processes that work together spend more than half of their time waiting for each other."""


def logprobs_of(policy: Policy, batch: dict[str, Tensor]) -> Tensor:
    return policy(*policy_inputs(batch)).logprobs


def accumulate(policy: Policy, step, config: TrainingConfig, here: Ranks) -> None:
    """The gradient of Σ -A·w·log π / Z."""
    for batch in step.microbatches(config, here.device):
        trained = batch["labels"] != IGNORE
        step.backward(
            -logprobs_of(policy, batch) * batch["advantages"][trained] * batch["weights"][trained]
        )


@torch.no_grad()
def all_logprobs(policy: Policy, step, config: TrainingConfig, here: Ranks) -> Tensor:
    """Of all ranks' trained tokens, sorted: the order of rows differs between world sizes."""
    mine = torch.cat(
        [logprobs_of(policy, batch).float() for batch in step.microbatches(config, here.device)]
    )
    return here.gather(mine).sort().values


def gradients(policy: Policy) -> dict[str, Tensor]:
    settle(policy.parameters())
    return {
        name: full_tensor(p.grad).clone()
        for name, p in policy.parameters_by_name().items()
        if p.grad is not None
    }


def anonymous_memory() -> int:
    """Bytes of this process that are no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


def load_and_look(config: TrainingConfig, here: Ranks) -> tuple[Policy, int]:
    """The policy, and the most that loading it took beyond what was there, seen at each tensor."""
    before, seen = anonymous_memory(), [0]

    def copy(target: Tensor, whole: Tensor) -> None:
        copy_whole(target, whole)
        seen.append(anonymous_memory() - before)

    weights.copy_whole = copy
    return load_policy(config, here), max(seen)


def moved(
    move: Callable[[Trained], None],
    policy: Policy,
    optimizer: Any,
    config: TrainingConfig,
    here: Ranks,
) -> None:
    """Park policy and optimizer, or take them back, as if they were on a GPU."""
    stepper = Stepper.__new__(Stepper)
    stepper.optimizer, stepper._config, stepper._here = optimizer, config, here
    move(Trained(policy, stepper, None))


def run_job(job: dict, config: TrainingConfig, here: Ranks) -> dict:
    policy, loading = load_and_look(config, here)
    if not job.get("steps", 1):
        return {"loading": loading, "whole": sum(4 * p.numel() for p in policy.parameters())}
    optimizer = make_optimizer(policy, config)
    result: dict = {
        "ranks": (here.rank, here.world_size, here.tensor_rank, here.tensor_ranks),
        "norms": [],
    }
    first = load_state(job["state"], policy, optimizer) if job.get("state") else 0
    (step,) = updates(PackedTensors.load(job["packed"]), 1, (0, 1), here, policy.decoder.config)
    if job.get("reference"):
        before = {name: weight.clone() for name, weight in policy.full_weights().items()}
        with as_policy_of(
            policy,
            GRPOConfig(model=config.model, packed=job["packed"], output_dir=""),
            job["reference"],
        ):
            result["reference_logprobs"] = all_logprobs(policy, step, config, here)
        after = policy.full_weights()
        result["swapped_back"] = all(torch.equal(before[name], after[name]) for name in before)
    result["logprobs"] = all_logprobs(policy, step, config, here)
    for number in range(first, first + job.get("steps", 1)):
        if number > first and job.get("parks"):
            for move in (park, functools.partial(unpark, device=here.device)):
                moved(move, policy, optimizer, config, here)
        begin_step(optimizer, config, number)
        accumulate(policy, step, config, here)
        if number == first:
            result["gradients"] = gradients(policy)
        result["norms"].append(clip_and_step(policy, optimizer, config, number))
    if job.get("parks"):  # what is written then is written from there
        moved(park, policy, optimizer, config, here)
    result["parts"] = sum(
        p.numel() if not hasattr(p, "to_local") else p.to_local().numel()
        for p in policy.parameters()
    )
    # Out of what is parked.
    result["weights"] = {name: weight.clone() for name, weight in policy.full_weights().items()}
    result["state"] = {
        name: full_tensor(tensor) for name, tensor in state_tensors(policy, optimizer)
    }
    save_state(
        Path(config.output_dir, "state"),
        policy,
        optimizer,
        first + job.get("steps", 1),
        here,
        config.state_format,
    )
    if job.get("checkpoint"):
        save_checkpoint(
            Path(config.output_dir, "checkpoint"), policy, config.model, here, config=config
        )
    return result


def child(job: dict, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["processes"]))
    os.environ[STORE_VARIABLE] = meeting  # others could take a port before its use
    folder = Path(job["output_dir"])
    try:
        settings = {
            "model": job["model"],
            "output_dir": job["output_dir"],
            "device": "cpu",
            "num_threads": 1,
        }
        config = TrainingConfig.parse({**settings, **job.get("settings", {})}, "test")
        with ranks(config) as here:
            result = run_job(job, config, here)
            if here.is_first:
                torch.save(result, folder / "result.pt")
    except Exception:  # noqa: BLE001  # reported, whatever it is
        with open(folder / "error.txt", "a") as file:
            file.write(f"rank {rank}\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def needs(job: dict, other: dict) -> bool:
    """Whether a job starts from what another one makes."""
    return any(
        (job.get(name) or "").startswith(other["output_dir"] + "/") for name in ("model", "state")
    )


def finish(worker: str, root: Path, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Run jobs in the process of a worker, this file or another; fail with what went wrong."""
    (root / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, worker, str(root / "jobs.json")],
        capture_output=True,
        text=True,
        timeout=880,
    )
    errors = [
        f"{job['name']}: {error.read_text()[-3000:]}"
        for job in jobs
        if (error := Path(job["output_dir"], "error.txt")).exists()
    ]
    assert done.returncode == 0 and not errors, "\n".join([done.stderr[-3000:], *errors])


def finished(root: Path, jobs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run jobs; return what the first process of each left, and its folder, by the job's name."""
    finish(__file__, root, jobs)
    return {
        job["name"]: torch.load(Path(job["output_dir"], "result.pt"))
        | {"folder": Path(job["output_dir"])}
        for job in jobs
    }


def main() -> None:
    gc.collect()
    gc.freeze()  # or each child's collections look at all that was imported, and copy its pages
    context = multiprocessing.get_context("fork")
    waiting: list[dict] = json.loads(Path(sys.argv[1]).read_text())
    running: list[tuple[dict, list[Any], tempfile.TemporaryDirectory, float]] = []
    while waiting or running:
        begun = [job for job, *_ in running]
        ready = [
            job
            for n, job in enumerate(waiting)
            if not any(needs(job, one) for one in begun + waiting[:n])
        ]
        for job in ready[: AT_ONCE - len(running)]:
            waiting.remove(job)
            Path(job["output_dir"]).mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory()
            meeting = str(Path(folder.name, "meeting"))
            children = [
                context.Process(target=child, args=(job, rank, meeting))
                for rank in range(job["processes"])
            ]
            running.append((job, children, folder, time.monotonic()))
            for one in children:
                one.start()
        connection.wait([one.sentinel for _, children, *_ in running for one in children])
        for entry in list(running):
            job, children, folder, began = entry
            children[:] = [one for one in children if one.is_alive()]
            if not children:
                running.remove(entry)
                folder.cleanup()
                sys.stdout.write(f"{time.monotonic() - began:6.1f} s  {job['name']}\n")


if __name__ == "__main__":
    main()
