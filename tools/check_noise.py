"""The gradient's noise as a run measures it, against batches that are drawn again. `python tools/check_noise.py CHECKPOINT`

A policy stands still. Many batches of its answers are sampled, each to other tasks, and as many in a few sets, to the same tasks
in each batch of a set; all are graded, packed and differentiated as a run's first optimizer step is. Then

    noise      the scatter of the gradients, Σ|g - ḡ|²/(batches - 1), against what one step's microbatches say of it
    signal     |ḡ|² - noise/batches, against the same
    scale      their ratio in batches (S/(B|G|²)); also of the sketch alone, which is of layers between the decoder's
    samples    the share of the noise that is left where the tasks stay the same, against the share that the sketch gives

and how long looking took, as a share of the step. Every figure is a mean over all batches.
"""

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoTokenizer

from ttrl import Task, TaskResults, TrainConfig, get_task_results
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors
from ttrl.instruments.gradient_noise import step_noise
from ttrl.loop.pack import pack
from ttrl.records import TaskResult
from ttrl.run_folder.folder import RunFolder
from ttrl.server.vllm import VLLMServer
from ttrl.tasks.sort_letters import get_sort_letters_tasks
from ttrl.tasks.structured_output import get_structured_output_tasks
from ttrl.training.batches import updates
from ttrl.training.gradient_noise import GradientPieces
from ttrl.training.objective.objective import objective_from
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import Policy
from ttrl.training.step import GradientStep
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainProgress

HERE = Ranks(0, 1, torch.device("cpu"))
# Of each quickstart: its tasks, and what of its settings a batch depends on.
RECIPES: dict[str, tuple[Callable[[int], list[Task]], dict[str, Any]]] = {
    "sort_letters": (
        lambda n: get_sort_letters_tasks("train", n=n, length_exponent=2),
        {"tasks_per_iteration": 32, "samples_per_task": 16, "max_tokens": 12, "seq_len": 512},
    ),
    "structured_output": (
        lambda n: get_structured_output_tasks("train", n=n),
        {"tasks_per_iteration": 8, "samples_per_task": 8, "max_tokens": 48, "seq_len": 1024},
    ),
}


def sampled(server: VLLMServer, tasks: Sequence[Task], config: TrainConfig) -> TaskResults:
    async def main() -> TaskResults:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            params = {"temperature": 1.0, "max_tokens": config.max_tokens}
            return await get_task_results(tasks, client, "m", n=config.samples_per_task, params=params)

    return asyncio.run(main())


def gradients(
    policy: Policy, batches: Iterable[list[TaskResult]], config: TrainConfig, arguments: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], float, float]:
    """Differentiate each batch; return what a run would log of it, the scatter of the gradients, and |mean|²."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    rows: list[dict[str, Any]] = []
    total = [torch.zeros_like(p) for p in policy.parameters()]
    squares = 0.0
    for number, groups in enumerate(batches):
        iteration = RunFolder(folder).iteration(number)
        iteration.path.mkdir(parents=True)
        pack(iteration, groups, config, arguments.checkpoint, tokenizer)
        path = iteration.path / "packed.safetensors"
        values = {"model": str(arguments.checkpoint), "packed": str(path), "output_dir": str(folder), "device": "cpu"}
        own = GRPOConfig.parse(values | {"rows_per_microbatch": arguments.rows, "seed": number}, "tools/check_noise.py")
        (step,) = updates(PackedTensors.load(path), 1, (0, 0), HERE, policy.decoder.config)
        pieces = GradientPieces(policy, own, HERE)
        policy.zero_grad()
        began = time.perf_counter()
        step_of = GradientStep(policy, own, HERE, Stopwatch(HERE.device), TrainProgress(0, HERE), pieces=pieces)
        seen = step_of.accumulate(step, objective_from(own)).pieces
        seconds = time.perf_counter() - began
        pieces.close()
        assert seen is not None
        rows.append(step_noise(seen) | {"step_seconds": seconds})
        for sum_, p in zip(total, policy.parameters(), strict=True):
            assert p.grad is not None
            sum_ += p.grad
            squares += float(p.grad.double().square().sum())
    mean = sum(float((sum_.double() / len(rows)).square().sum()) for sum_ in total)
    return rows, (squares - len(rows) * mean) / (len(rows) - 1), mean


def report(rows: list[dict[str, Any]], noise: float, mean: float, within: float) -> str:
    """Compare what the steps say with what was drawn again."""
    signal = mean - noise / len(rows)
    nested = {name: statistics.fmean(row["nested"][name] for row in rows) for name in ("prompts", "samples", "signal")}
    sketched = nested["prompts"] + nested["samples"]
    looking = sum(row["seconds"] for row in rows) / sum(row["step_seconds"] for row in rows)
    lines = [f"{'':28} {'measured':>12} {'drawn again':>12} {'ratio':>7}"]

    def line(name: str, measured: float, true: float) -> None:
        lines.append(f"{name:28} {measured:>12.4g} {true:>12.4g} {measured / true:>7.3f}")

    if all("noise" in row for row in rows):
        own, own_signal = (statistics.fmean(row[name] for row in rows) for name in ("noise", "signal"))
        line("noise of a batch", own, noise)
        line("signal |G|²", own_signal, signal)
        line("scale, in batches", own / own_signal, noise / signal)
    line("scale by the sketch alone", sketched / nested["signal"], noise / signal)
    line("share of the noise, samples", nested["samples"] / sketched, within / noise)
    line("share of the noise, prompts", nested["prompts"] / sketched, 1 - within / noise)
    lines.append(f"{len(rows)} batches, {rows[0]['pieces']} microbatches in the first; looking took {looking:.2%} of the step")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="of a quickstart, such as runs/sort_letters/iterations/0005/checkpoint")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="sort_letters")
    parser.add_argument("--advantages", choices=("std", "mean"), default="std")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--sets", type=int, default=8, help="of tasks that stay the same, over which as many batches are divided")
    parser.add_argument("--rows", type=int, default=1, help="of a microbatch")
    arguments = parser.parse_args()
    make, sizes = RECIPES[arguments.recipe]
    with tempfile.TemporaryDirectory(prefix="ttrl-noise-") as name:
        folder = Path(name)
        config = TrainConfig(
            run=str(folder / "run"), model=str(arguments.checkpoint), iterations=1, advantages=arguments.advantages, **sizes
        ).resolved(False)
        size, repeats = config.tasks_per_iteration, arguments.batches // arguments.sets
        tasks = make(size * arguments.batches)
        fresh = [dataclasses.replace(task, id=f"{number}") for number, task in enumerate(tasks)]
        first = [tasks[size * place : size * (place + 1)] for place in range(arguments.sets)]
        again = [dataclasses.replace(task, id=f"{task.id} again {k}") for one in first for k in range(repeats) for task in one]
        with VLLMServer(arguments.checkpoint, served_model_name="m", log_path=folder / "log", dtype="float32") as server:
            results = [list(sampled(server, some, config)) for some in (fresh, again)]
        cut = [[some[place : place + size] for place in range(0, len(some), size)] for some in results]
        values = {"model": str(arguments.checkpoint), "packed": "", "output_dir": "", "device": "cpu"}
        policy = load_policy(GRPOConfig.parse(values, "tools/check_noise.py"), HERE)
        rows, noise, mean = gradients(policy, cut[0], config, arguments, folder / "fresh")
        scatter = [
            gradients(policy, cut[1][place * repeats : (place + 1) * repeats], config, arguments, folder / f"again{place}")[1]
            for place in range(arguments.sets)
        ]
    print(report(rows, noise, mean, statistics.fmean(scatter)))


if __name__ == "__main__":
    main()
