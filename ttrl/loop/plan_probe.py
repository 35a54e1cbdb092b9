"""Probe a plan: run the loop with a config's server, trainer and tasks for a few iterations.

The probe's folder is temporary. It takes fewer tasks if a whole iteration would take long. Its
lengths, its share of groups with a signal and its seconds go into the plan, scaled to whole
iterations by the number of tasks. So the plan has the loop's real phases, including their overlap.
"""

import dataclasses
import itertools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ttrl.configs.base import Settings
from ttrl.configs.run import TrainConfig
from ttrl.errors import UserError
from ttrl.facts import MetricsRow, ratio
from ttrl.loop.train import THIS_MACHINE, Parts, train_checked
from ttrl.plans.expected_lengths import Assumptions, completion_mean, run_lengths
from ttrl.plans.measured import Seconds, measured_in_run, signal_share
from ttrl.plans.plan import Plan
from ttrl.plans.planner import Probed, iteration_folders
from ttrl.run_folder.folder import RunFolder
from ttrl.tasks.task import Task

_SECONDS = 90.0
"""Approximate time of sampling and training in a probe, after its server has started."""
_ITERATIONS = 4  # of a probe; the first and the last do not count
_FEWEST_TASKS = 4
_LOOK_SECONDS = 0.1  # between looks at the memory of processes
_MADE_UP_TASKS = 64


def probe(
    made: Plan,
    config: TrainConfig,
    assumptions: Assumptions,
    tasks: list[Task],
    validation_tasks: list[Task],
    *,
    most_seconds: float = _SECONDS,
    iterations: int = _ITERATIONS,
    parts: Parts = THIS_MACHINE,
) -> Probed:
    """Run a probe. made: the rough plan, to size the probe. most_seconds: the time of sampling and
    training. Raises UserError, and any error of a run.
    """
    made_up: Settings = {}
    if not tasks:
        tasks, made_up = _made_up_tasks(config, assumptions, made)
    # The plan's iteration has a share of a validation; each of the probe's has a whole one.
    others = made.seconds.phases["validate"].seconds * (config.validate_every - 1)
    affordable = most_seconds / iterations / max(made.seconds.iteration + others, 1e-3)
    count = min(
        config.tasks_per_iteration,
        max(_FEWEST_TASKS, round(affordable * config.tasks_per_iteration)),
    )
    share = count / config.tasks_per_iteration
    held_out = validation_tasks[: max(1, round(share * len(validation_tasks)))]
    with tempfile.TemporaryDirectory(prefix="ttrl-probe-") as folder, ProcessMemory() as memory:
        probed = dataclasses.replace(
            config,
            run=str(Path(folder, "run")),
            iterations=iterations,
            stop_at=None,
            cache=[],
            validate_every=1,
            tasks_per_iteration=count,
            tokens_per_iteration=None,
            max_staleness=None,
            dynamic_sampling=None,
            max_extra_tasks=None,
            loggers=[],
            mirror=None,
            **made_up,
        )
        train_checked(probed, tasks, held_out, quiet=True, parts=parts)
        rows = RunFolder(probed.run).metrics()
        signal = signal_share(rows)
        found = run_lengths(
            iteration_folders(Path(folder, "run")), assumptions.signal_share or signal or None
        )
    if found is None:
        raise UserError(
            "the probe sampled nothing to plan from; check the tasks with `ttrl tasks try`"
        )
    lengths = dataclasses.replace(
        found,
        scale=found.scale / share,
        prompts_from=made.prompts_from,
        completions_from="assumed" if made_up else "probe",
        signal_from="assumed" if assumptions.signal_share or not signal else "probe",
    )
    notes = []
    if signal == 0:
        notes = [
            f"nothing would be trained: in none of the {len(found.groups)} groups of the probe did "
            "rewards differ; check replies and grades with `ttrl tasks try`"
        ]
    held_out_scale = len(validation_tasks) / max(1, len(held_out)) / config.validate_every
    seconds = _scaled(measured_in_run(rows, "probe"), rows, 1 / share, held_out_scale)
    return Probed(lengths, seconds, dict(memory.peaks), notes)


def _scaled(
    seconds: Mapping[str, Seconds],
    rows: Sequence[MetricsRow],
    scale: float,
    held_out_scale: float,
) -> dict[str, Seconds]:
    """Scale seconds to whole iterations. Syncs, starts and saving do not grow with the number of
    tasks.
    """
    scaled = dict(seconds)
    before = _sum(seconds)
    for name, factor in (("sample", scale), ("pack", scale), ("validate", held_out_scale)):
        if name in scaled:
            scaled[name] = Seconds(scaled[name].seconds * factor, "probe")
    if "train" in scaled and scale > 1:
        saving = _saving(rows)
        scaled["train"] = Seconds(
            saving + max(0.0, scaled["train"].seconds - saving) * scale, "probe"
        )
    if "iteration" in scaled and before:
        scaled["iteration"] = Seconds(scaled["iteration"].seconds * _sum(scaled) / before, "probe")
    return scaled


def _sum(seconds: Mapping[str, Seconds]) -> float:
    """Add up the phases, as if none overlapped."""
    return sum(
        value.seconds
        for name, value in seconds.items()
        if not name.endswith(" start") and name != "iteration"
    )


def _saving(rows: Sequence[MetricsRow]) -> float:
    """Return the part of an iteration's training seconds independent of its number of tasks."""
    parts = [row.train.seconds_by_part for row in rows if row.train.seconds_by_part]
    saving = sum(part.get("checkpoint", 0.0) for part in parts)
    return ratio(saving, len(parts)) or 0.0


def _made_up_tasks(
    config: TrainConfig, assumptions: Assumptions, made: Plan
) -> tuple[list[Task], Settings]:
    """Make tasks with prompts of about the planned length and different rewards within each group;
    and settings to make every completion as long as the assumed mean."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model)
    draw = np.random.default_rng(config.seed)
    length = max(1, round(made.work.prompt_mean))
    words = [
        tokenizer.decode(draw.integers(0, len(tokenizer), length)) for _ in range(_MADE_UP_TASKS)
    ]
    tasks = [
        Task(
            [{"role": "user", "content": words[number % _MADE_UP_TASKS]}],
            _alternating(),
            id=f"probe/{number}",
        )
        for number in range(config.tasks_per_iteration)
    ]
    length = max(1, min(config.max_tokens, round(completion_mean(config, assumptions))))
    return tasks, {"max_tokens": length, "sampling": {"extra_body": {"ignore_eos": True}}}


def _alternating() -> Callable[[Any], float]:
    """Return a grader for one task, with alternating rewards for any samples."""
    count = itertools.count()
    return lambda choice: float(next(count) % 2)


class ProcessMemory:
    """Record the peak resident memory of child processes, in a thread: the highest sum each for
    "trainer" and "server".
    """

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process memory", daemon=True)

    def __enter__(self) -> "ProcessMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            sums: dict[str, float] = {}
            for process in psutil.Process().children(recursive=True):
                try:
                    kind = _kind([process.name(), *process.cmdline()])
                    if kind is not None:
                        sums[kind] = sums.get(kind, 0.0) + process.memory_info().rss
                except psutil.Error:  # it has just ended
                    continue
            for kind, size in sums.items():
                self.peaks[kind] = max(self.peaks.get(kind, 0.0), size)


def _kind(command: Sequence[str]) -> str | None:
    text = " ".join(command)
    if "process_guard" in text:
        return None
    if "vllm" in text or "VLLM" in text:
        return "server"
    if "grpo_recipe" in text or "torchtune" in text:
        return "trainer"
    return None
