"""The phases of an iteration. Each looks for its marker first, does its work, and leaves the marker last.

prepare     (iteration 0) the starting model, linked, and its canary    checkpoint/
rollouts    samples, graded                                              rollouts.jsonl
pack        advantages and packed tensors                                packed.safetensors
train       the recipe, in a process of its own                          checkpoint/ state/ train.jsonl
validate    held-out tasks under the new policy                          validation.jsonl
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ttrl.data.advantages import drop_groups_without_signal, group_advantages
from ttrl.data.packing import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.files import append_jsonl, atomic_folder, read_jsonl, write_jsonl
from ttrl.loop.config import TrainConfig
from ttrl.loop.console import Console, clock
from ttrl.loop.policy_server import MODEL_NAME, PolicyServer
from ttrl.loop.run_folder import RunFolder
from ttrl.loop.tune import tune, wait_for_process
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.server.weights import CANARY_FILE
from ttrl.tasks.task import Task

T = TypeVar("T")
_ORDER = ("prepare", "rollouts", "pack", "train", "validate")
_COLUMNS = {"rollouts": "sample", "prepare": "prepare", "pack": "pack", "train": "train", "validate": "validate"}


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also where a loop runs already (a notebook): then in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="rollouts")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


class Phases:
    """What one run does in each phase."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        model: Path,
        tasks: list[Task],
        validation_tasks: list[Task],
        server: PolicyServer,
        console: Console,
    ) -> None:
        self.config, self.folder, self.model = config, folder, model
        self.tasks, self.validation_tasks = tasks, validation_tasks
        self.server, self.console = server, console
        self._tokenizer: Any = None

    def anything_done(self, number: int) -> bool:
        """True where an earlier process finished a phase of this iteration."""
        return any(self.folder.iteration(number).marker(phase) is not None for phase in _ORDER)

    def train_iteration(self, number: int) -> None:
        """The phases of an iteration but its validation."""
        self.rollouts(number)
        self.pack(number)
        self.train(number)

    # Iteration 0

    def prepare(self) -> None:
        """Links the starting model as iteration 0's checkpoint and computes its canary, while the server starts."""
        iteration = self.folder.iteration(0)
        if iteration.marker("prepare") is not None:
            return
        began = clock()
        self.server.start(self.model)
        with atomic_folder(iteration.path / "checkpoint") as temporary:
            for path in sorted(self.model.iterdir()):
                if path.is_file() and path.name != CANARY_FILE:
                    inside = path.is_relative_to(self.folder.path)
                    target = Path(os.path.relpath(path, iteration.path / "checkpoint")) if inside else path.resolve()
                    (temporary / path.name).symlink_to(target)
            canary = self.model / CANARY_FILE
            if _canary_dtype(canary) == {"fp32": "float32", "bf16": "bfloat16"}[self.config.dtype]:
                (temporary / CANARY_FILE).write_bytes(canary.read_bytes())  # our own recipe made this model
            else:
                command = [sys.executable, "-m", "ttrl.training.canary", "--model", str(self.model)]
                command += [
                    "--output",
                    str(temporary / CANARY_FILE),
                    "--dtype",
                    self.config.dtype,
                    "--device",
                    self.config.device,
                ]
                wait_for_process(
                    command, self.folder.path / "logs" / "canary.log", progress=temporary, pbar=False, pbar_desc="canary"
                )
        self.tokenizer()
        self.server.serve(iteration.path / "checkpoint")
        iteration.mark("prepare", ["checkpoint"], {"seconds": clock() - began})

    def tokenizer(self) -> Any:
        """The starting model's tokenizer, loaded once."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        return self._tokenizer

    # Sampling

    def _sample(
        self, tasks: Sequence[Task], n: int, temperature: float, version: int, what: str, partial: Path | None
    ) -> TaskResults:
        """Samples from the running server. With `partial`, finished tasks are kept there, and those that lie there are not
        sampled again. Raises ServerDiedError where the server is gone, ServerError or GraderError where every sample failed."""
        kept = {} if partial is None else _kept_samples(partial, tasks, n, version)
        missing = [position for position in range(len(tasks)) if position not in kept]
        positions: dict[str, list[int]] = {}  # the same task may be there several times: any of its places will do
        for position in missing:
            positions.setdefault(_task_key(tasks[position].id, tasks[position].messages), []).append(position)

        def keep(result: TaskResult) -> None:
            position = positions[_task_key(result.task_id, result.messages)].pop(0)
            # A group without any grade is sampled again, so that a grader that failed can be put right.
            if partial is not None and result.graded:
                append_jsonl(partial, {"position": position, "samples": [sample.to_json() for sample in result.samples]})

        async def sample() -> TaskResults:
            async with self.server.running.client() as client:
                return await get_task_results(
                    [tasks[position] for position in missing],
                    client,
                    MODEL_NAME,
                    n=n,
                    params={**self.config.sampling, "temperature": temperature, "max_tokens": self.config.max_tokens},
                    weights_version=version,
                    on_task_done=keep,
                    pbar=not self.console.quiet,
                    pbar_desc=what,
                )

        began = clock()
        fresh = run_async(sample()) if missing else TaskResults([])
        # Tokens that an earlier process sampled took their time there: no speed can be told from ours.
        seconds = clock() - began if not kept else None
        if any(s.finish_reason is None for s in fresh.samples):
            self.server.running.check()  # says why, where the server is gone
        by_position = dict(zip(missing, fresh, strict=True))
        for position, samples in kept.items():
            by_position[position] = TaskResult(task_id=tasks[position].id, messages=tasks[position].messages, samples=samples)
        results = TaskResults([by_position[position] for position in range(len(tasks))], seconds=seconds)
        results.raise_if_all_failed()
        return results

    def _tasks_of(self, number: int) -> list[Task]:
        """The tasks of an iteration: the stream of all tasks, each epoch in an order of its own, cut into equal parts."""
        size, total = self.config.tasks_per_iteration, len(self.tasks)
        orders: dict[int, list[int]] = {}
        chosen = []
        for place in range((number - 1) * size, number * size):
            epoch, position = divmod(place, total)
            if epoch not in orders:
                orders[epoch] = list(range(total))
                random.Random(f"{self.config.seed}/{epoch}").shuffle(orders[epoch])
            chosen.append(self.tasks[orders[epoch][position]])
        return chosen

    def rollouts(self, number: int) -> None:
        """Samples the iteration's tasks from the newest policy and grades them."""
        iteration = self.folder.iteration(number)
        if iteration.marker("rollouts") is not None:
            return
        began = clock()
        sync = self.server.serve(self.folder.checkpoint(number - 1))
        sync_seconds = clock() - began
        partial = iteration.path / "rollouts.partial.jsonl"
        results = self._sample(
            self._tasks_of(number),
            self.config.samples_per_task,
            self.config.temperature,
            self.folder.policy_version(number - 1),
            f"{number}: sampling",
            partial,
        )
        write_jsonl(iteration.path / "rollouts.jsonl", results.to_jsonl_rows())
        stats = results.stats.to_json()
        facts = {"seconds": clock() - began - sync_seconds, "sync_seconds": sync_seconds, "sync": sync, "stats": stats}
        iteration.mark("rollouts", ["rollouts.jsonl"], facts)
        partial.unlink(missing_ok=True)

    def validate(self, number: int) -> None:
        """Samples the held-out tasks from the policy after this iteration."""
        iteration = self.folder.iteration(number)
        if iteration.marker("validate") is not None or not self.validation_tasks:
            return
        began = clock()
        sync = self.server.serve(self.folder.checkpoint(number))
        sync_seconds = clock() - began
        temperature = self.config.validation_temperature
        results = self._sample(
            self.validation_tasks,
            self.config.validation_samples,
            self.config.temperature if temperature is None else temperature,
            self.folder.policy_version(number),
            f"{number}: validating",
            None,
        )
        write_jsonl(iteration.path / "validation.jsonl", results.to_jsonl_rows())
        facts = {"seconds": clock() - began - sync_seconds, "sync_seconds": sync_seconds, "sync": sync}
        iteration.mark("validate", ["validation.jsonl"], facts | {"stats": results.stats.to_json()})

    # Training

    def pack(self, number: int) -> None:
        """Advantages, tokens, packed tensors. Groups whose rewards are all equal teach nothing; they are counted and left out."""
        iteration = self.folder.iteration(number)
        if iteration.marker("pack") is not None:
            return
        began = clock()
        iteration.verify("rollouts")
        samples = [Sample.from_json(row) for row in read_jsonl(iteration.path / "rollouts.jsonl")]
        results = list(TaskResults.from_samples(samples))
        kept, counts = drop_groups_without_signal(results)
        groups = {"total": len(results), "kept": len(kept), **counts}
        if not kept:
            iteration.mark("pack", [], {"seconds": clock() - began, "groups": groups, "rows": 0})
            return
        tokenizer = self.tokenizer()
        tokenize = TaskResultTokenizer(tokenizer)
        tokenized = [
            sequence
            for result in kept
            for sequence in tokenize(result, group_advantages(result.rewards, method=self.config.advantages))
        ]
        packed = packed_tensors_from_tokenized_results(
            tokenized,
            seq_len=self.config.seq_len,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
            aggregation=self.config.aggregation,
            constant_length=self.config.constant_length,
        )
        packed.save(iteration.path / "packed.safetensors")
        facts = {"groups": groups, "rows": packed.num_rows, "row_tokens": packed.num_tokens, "trained_tokens": packed.num_trained}
        facts |= {"fill": packed.num_tokens / packed.tokens.numel(), "dropped": packed.dropped}
        iteration.mark("pack", ["packed.safetensors"], {"seconds": clock() - began, **facts})

    def train(self, number: int) -> None:
        """Runs the recipe on the packed rows, from the newest checkpoint and state."""
        iteration = self.folder.iteration(number)
        if iteration.marker("train") is not None:
            return
        began = clock()
        pack = iteration.marker("pack")
        assert pack is not None
        if not pack["rows"]:
            iteration.mark("train", [], {"seconds": clock() - began, "trained": False})
            return
        iteration.verify("pack")
        if self.config.weight_sync == "restart":
            self.server.stop()  # its memory is the trainer's now
        with contextlib.suppress(FileNotFoundError):
            (iteration.path / "train.jsonl").unlink()
        tune(
            self.recipe_config(number),
            iteration.path / "grpo.yaml",
            nproc_per_node=self.config.nproc_per_node,
            pbar=not self.console.quiet,
            pbar_desc=f"{number}: training",
        )
        steps = read_jsonl(iteration.path / "train.jsonl", key="global_step")
        facts = {"seconds": clock() - began, "trained": True, "steps": steps}
        iteration.mark("train", ["checkpoint", "state", "train.jsonl"], facts)

    def recipe_config(self, number: int) -> dict[str, Any]:
        """What the recipe is given in an iteration."""
        config, iteration = self.config, self.folder.iteration(number)
        state = self.folder.state(number - 1)
        values = {
            "model": str(self.folder.checkpoint(number - 1)),
            "packed": str(iteration.path / "packed.safetensors"),
            "state": str(state) if state else None,
            "output_dir": str(iteration.path),
            "iteration": number,
            "device": config.device,
            "dtype": config.dtype,
            "num_threads": config.num_threads,
            "temperature": config.temperature,
            "reference_model": str(self.model) if config.training.get("kl_coefficient") else None,
        }
        return config.recipe_config(values).to_dict()

    # Metrics

    def metrics_row(self, number: int) -> dict[str, Any]:
        """The line of metrics.jsonl, put together from the markers alone."""
        markers = {phase: self.folder.iteration(number).marker(phase) for phase in _ORDER}
        done = {phase: marker for phase, marker in markers.items() if marker is not None}
        seconds = {_COLUMNS[phase]: marker["seconds"] for phase, marker in done.items()}
        seconds["sync"] = sum(marker.get("sync_seconds", 0.0) for marker in done.values())
        row: dict[str, Any] = {"iteration": number, "seconds": seconds | {"total": sum(seconds.values())}}
        if "rollouts" in done:
            stats = done["rollouts"]["stats"]
            row |= {"reward": stats["mean_reward"], "metrics": stats["metrics"]}
            row |= {"samples": stats["num_samples"], "failed": stats["num_failed"], "finish_reasons": stats["finish_reasons"]}
            row |= {name: stats[name] for name in ("prompt_tokens", "completion_tokens", "tokens_per_second")}
        if "pack" in done:
            row |= {"groups": done["pack"]["groups"]}
            row |= {"pack": {k: v for k, v in done["pack"].items() if k not in ("groups", "seconds")}}
        if "train" in done:
            row |= {"trained": done["train"]["trained"]} | _training_summary(done["train"].get("steps", []))
        if "validate" in done:
            stats = done["validate"]["stats"]
            row |= {"validation_reward": stats["mean_reward"], "validation": stats["metrics"]}
            row |= {"validation_samples": stats["num_graded"], "validation_failed": stats["num_failed"]}
        syncs = [marker["sync"] for marker in done.values() if marker.get("sync")]
        return row | ({"sync": syncs[-1]} if syncs else {})


def _task_key(task_id: str, messages: list[dict[str, Any]]) -> str:
    return json.dumps([task_id, messages], sort_keys=True)


def _kept_samples(partial: Path, tasks: Sequence[Task], n: int, version: int) -> dict[int, list[Sample]]:
    """The groups that an earlier process finished, by their place in `tasks`; without those of other tasks or another policy."""
    kept = {}
    for row in read_jsonl(partial, key="position"):
        position, samples = row["position"], [Sample.from_json(sample) for sample in row["samples"]]
        if position < len(tasks) and len(samples) == n:
            expected = (_task_key(tasks[position].id, tasks[position].messages), version)
            if all((_task_key(s.task_id, s.messages), s.weights_version) == expected for s in samples):
                kept[position] = samples
    return kept


def _training_summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the optimizer steps of an iteration, and the comparison of sampler and trainer."""
    if not steps:
        return {}
    names = ("loss", "policy_loss", "kl", "entropy", "grad_norm", "clip_fraction_low", "clip_fraction_high")
    train = {name: sum(step[name] for step in steps) / len(steps) for name in names if name in steps[0]}
    train |= {"lr": steps[-1]["lr"], "steps": len(steps), "global_step": steps[-1]["global_step"]}
    return {"train": train, "sampler_trainer": steps[0].get("sampler_trainer")}


def _canary_dtype(path: Path) -> str | None:
    """What a canary that lies in the starting model's folder was computed in; None where there is none."""
    try:
        return json.loads(path.read_text())["dtype"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
