"""The gradient's noise as a run measures it, against batches that are drawn again. `python
tools/check_noise.py CHECKPOINT`

A policy stands still. Many batches of its answers are sampled in a few sets, each batch to other
tasks, and as many again, to the same tasks in each batch of a set; all are graded, packed and
differentiated as a run's first optimizer step is. Then

    noise      the scatter of the gradients in a set, Σ|g - ḡ|²/(batches - 1), against what one
               step's microbatches say of it
    signal     |ḡ|² - noise/batches, over all sets, against the same
    scale      their ratio in batches (S/(B|G|²)); also of the sketch alone, which is of layers
               between the decoder's
    samples    the share of the noise that is left where the tasks stay the same, against the share
               that the sketch gives

and what looking costs, as CPU time of steps with and without it in alternation. The ratios'
intervals are of 95%: single samples weigh so much in a batch that little is settled without them.
"""

import argparse
import asyncio
import dataclasses
import math
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
from ttrl.intervals import t_quantile
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
# Of each quickstart: its tasks, what of its settings a batch depends on, and rows of a microbatch.
RECIPES: dict[str, tuple[Callable[[int], list[Task]], dict[str, Any], int]] = {
    "sort_letters": (
        lambda n: get_sort_letters_tasks("train", n=n, length_exponent=2),
        {"tasks_per_iteration": 32, "samples_per_task": 16, "max_tokens": 12, "seq_len": 512},
        8,
    ),
    "structured_output": (
        lambda n: get_structured_output_tasks("train", n=n),
        {"tasks_per_iteration": 8, "samples_per_task": 8, "max_tokens": 48, "seq_len": 1024},
        4,
    ),
}


def sampled(server: VLLMServer, tasks: Sequence[Task], config: TrainConfig) -> TaskResults:
    async def main() -> TaskResults:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            params = {"temperature": 1.0, "max_tokens": config.max_tokens}
            return await get_task_results(
                tasks, client, "m", n=config.samples_per_task, params=params
            )

    return asyncio.run(main())


class Batches:
    """Packs batches and differentiates each as a run's first optimizer step is."""

    def __init__(
        self, policy: Policy, config: TrainConfig, arguments: argparse.Namespace, folder: Path
    ) -> None:
        self._policy = policy
        self._config = config
        self._arguments = arguments
        self._folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
        self._packed = 0

    def packed(self, groups: list[TaskResult]) -> Path:
        iteration = RunFolder(self._folder).iteration(self._packed)
        iteration.path.mkdir(parents=True)
        self._packed += 1
        pack(iteration, groups, self._config, self._arguments.checkpoint, self._tokenizer)
        return iteration.path / "packed.safetensors"

    def differentiate(self, path: Path, seed: int, looks: bool = True) -> dict[str, Any] | None:
        """Leave the batch's gradient in the parameters; return what a run would log of its
        noise.
        """
        values = {
            "model": str(self._arguments.checkpoint),
            "packed": str(path),
            "output_dir": str(path.parent),
            "device": "cpu",
        }
        rows = self._arguments.rows or RECIPES[self._arguments.recipe][2]
        own = GRPOConfig.parse(
            values | {"rows_per_microbatch": rows, "seed": seed}, "tools/check_noise.py"
        )
        (step,) = updates(PackedTensors.load(path), 1, (0, 0), HERE, self._policy.decoder.config)
        pieces = GradientPieces(self._policy, own, HERE) if looks else None
        self._policy.zero_grad()
        step_of = GradientStep(
            self._policy, own, HERE, Stopwatch(HERE.device), TrainProgress(0, HERE), pieces=pieces
        )
        seen = step_of.accumulate(step, objective_from(own)).pieces
        if pieces is not None:
            pieces.close()
        return None if seen is None else step_noise(seen).to_json()

    def scatter(
        self, batches: Sequence[list[TaskResult]]
    ) -> tuple[list[dict[str, Any]], float, list[torch.Tensor]]:
        """Return what a run would log of each, the scatter of their gradients, and the sum of
        these.
        """
        rows: list[dict[str, Any]] = []
        total = [torch.zeros_like(p) for p in self._policy.parameters()]
        squares = 0.0
        for groups in batches:
            row = self.differentiate(self.packed(groups), self._packed)
            assert row is not None
            rows.append(row)
            for sum_, p in zip(total, self._policy.parameters(), strict=True):
                assert p.grad is not None
                sum_ += p.grad
                squares += float(p.grad.double().square().sum())
        return rows, (squares - _product(total, total) / len(rows)) / (len(rows) - 1), total

    def cost(self, groups: list[TaskResult]) -> float:
        """Return the CPU time of a step that looks over that of one that does not, on one thread;
        the least of several each.
        """
        path = self.packed(groups)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        took: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(60):
            for looks, times in took.items():
                began = time.process_time()
                self.differentiate(path, 0, looks)
                times.append(time.process_time() - began)
        torch.set_num_threads(threads)
        return min(took[True]) / min(took[False])


def _product(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    return sum(float((one.double() * other).sum()) for one, other in zip(some, others, strict=True))


@dataclasses.dataclass
class Set:
    """Batches that were drawn for the same tasks, and as many to other tasks each."""

    rows: list[dict[str, Any]]
    """What a run would log of all of them."""
    noise: float
    """The scatter of those to other tasks."""
    within: float
    """The scatter of those to the same tasks."""
    products: list[float]
    """Of the sum of the gradients to other tasks with those of all sets before, and with itself."""


def compared(
    sets: Sequence[Set], places: Sequence[int], each: int
) -> dict[str, tuple[float, float]]:
    """Return what steps say and what was drawn again, from these of the sets, of `each` batches."""
    chosen = [sets[place] for place in places]
    noise, within = (
        statistics.fmean(getattr(one, name) for one in chosen) for name in ("noise", "within")
    )
    total = sum(sets[max(i, j)].products[min(i, j)] for i in places for j in places)
    signal = total / (each * len(chosen)) ** 2 - noise / (each * len(chosen))
    rows = [row for one in chosen for row in one.rows]
    prompts, samples, sketched = (
        statistics.fmean(row["nested"][name] for row in rows)
        for name in ("prompts", "samples", "signal")
    )
    found = {
        "scale by the sketch alone": ((prompts + samples) / sketched, noise / signal),
        "share of the noise, samples": (samples / (prompts + samples), within / noise),
        "share of the noise, prompts": (prompts / (prompts + samples), 1 - within / noise),
    }
    if all("noise" in row for row in rows):
        own, own_signal = (
            statistics.fmean(row[name] for row in rows) for name in ("noise", "signal")
        )
        whole = {"noise of a batch": (own, noise), "signal |G|²": (own_signal, signal)}
        found = whole | {"scale, in batches": (own / own_signal, noise / signal)} | found
    return found


def report(sets: Sequence[Set], each: int) -> str:
    """Compare what steps say with what was drawn again; intervals by the jackknife: one set at a
    time is left out.
    """
    count = len(sets)
    without = [
        compared(sets, [place for place in range(count) if place != left], each)
        for left in range(count)
    ]
    lines = [f"{'':28} {'measured':>10} {'drawn again':>12} {'ratio':>7}"]
    for name, (measured, drawn) in compared(sets, range(count), each).items():
        ratios = [one[name][0] / one[name][1] for one in without]
        interval = ""
        if min(ratios) > 0 and measured * drawn > 0:
            logs = [math.log(ratio) for ratio in ratios]
            half = t_quantile(0.975, count - 1) * math.sqrt(
                (count - 1) * statistics.pvariance(logs)
            )
            middle = math.log(measured / drawn)
            interval = f"({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"
        lines.append(
            f"{name:28} {measured:>10.4g} {drawn:>12.4g} {measured / drawn:>7.3f} {interval}"
        )
    pieces = sets[0].rows[0]["pieces"]
    return "\n".join(
        [
            *lines,
            f"{count} sets of {each} batches and as many again, {pieces} microbatches in the first",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="of a quickstart, such as runs/sort_letters/iterations/0005/checkpoint",
    )
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="sort_letters")
    parser.add_argument("--advantages", choices=("std", "mean"), default="std")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument(
        "--sets",
        type=int,
        default=8,
        help="of tasks that stay the same, over which as many batches are divided",
    )
    parser.add_argument(
        "--rows", type=int, help="of a microbatch; as many as the quickstart takes if left out"
    )
    arguments = parser.parse_args()
    make, sizes, _ = RECIPES[arguments.recipe]
    with tempfile.TemporaryDirectory(prefix="ttrl-noise-") as name:
        folder = Path(name)
        config = TrainConfig(
            run=str(folder / "run"),
            model=str(arguments.checkpoint),
            iterations=1,
            advantages=arguments.advantages,
            **sizes,
        ).resolved(False)
        size = config.tasks_per_iteration
        repeats = arguments.batches // arguments.sets
        tasks = make(size * repeats * arguments.sets)
        fresh = [dataclasses.replace(task, id=f"{number}") for number, task in enumerate(tasks)]
        first = [tasks[size * place : size * (place + 1)] for place in range(arguments.sets)]
        again = [
            dataclasses.replace(task, id=f"{task.id} again {k}")
            for one in first
            for k in range(repeats)
            for task in one
        ]
        with VLLMServer(
            arguments.checkpoint, served_model_name="m", log_path=folder / "log", dtype="float32"
        ) as server:
            results = [list(sampled(server, some, config)) for some in (fresh, again)]
        cut = [
            [some[place : place + size] for place in range(0, len(some), size)] for some in results
        ]
        values = {
            "model": str(arguments.checkpoint),
            "packed": "",
            "output_dir": "",
            "device": "cpu",
        }
        policy = load_policy(GRPOConfig.parse(values, "tools/check_noise.py"), HERE)
        batches = Batches(policy, config, arguments, folder / "packs")
        sets: list[Set] = []
        sums: list[list[torch.Tensor]] = []
        for place in range(0, repeats * arguments.sets, repeats):
            (rows, noise, total), (others, within, _) = (
                batches.scatter(some[place : place + repeats]) for some in cut
            )
            sums.append(total)
            sets.append(Set(rows + others, noise, within, [_product(total, one) for one in sums]))
        print(report(sets, repeats))
        print(f"Looking costs {batches.cost(cut[0][0]) - 1:.2%} of a step's CPU time.")


if __name__ == "__main__":
    main()
