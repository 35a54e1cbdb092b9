"""The phases of an iteration. Each looks for its marker first, does its work, and leaves the marker last.

prepare     (iteration 0) the starting model, linked, and its canary    checkpoint/
rollouts    samples, graded; with a token budget, those to continue      rollouts.jsonl, unfinished.jsonl
pack        advantages and packed tensors                                packed.safetensors
train       the recipe, in a process of its own                          checkpoint/ state/ train.jsonl
validate    held-out tasks under the new policy                          validation.jsonl
"""

import contextlib
import dataclasses
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ttrl.data.advantages import advantages_of
from ttrl.data.packing import packed_tensors_from_tokenized_results
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.data.tokenizer_digest import TOKENIZER_KEY, tokenizer_digest
from ttrl.files import append_jsonl, atomic_folder, read_jsonl, write_jsonl
from ttrl.loop.carried import (
    UNFINISHED_FILE,
    budget_facts,
    carried_groups,
    is_open,
    kept_groups,
    oldest_version,
    place_of,
    ready_to_continue,
    task_key,
    usage_of,
)
from ttrl.loop.config import TrainConfig
from ttrl.loop.console import Console, clock
from ttrl.loop.coroutines import run_async
from ttrl.loop.dynamic_sampling import further_tasks
from ttrl.loop.metrics_row import PHASES, metrics_row
from ttrl.loop.policy_server import MODEL_NAME, PolicyServer
from ttrl.loop.run_folder import RunFolder
from ttrl.loop.tune import tune, wait_for_process
from ttrl.records import Sample, TaskResult
from ttrl.rollouts.task_results import TaskResults, get_task_results
from ttrl.server.weights import CANARY_FILE
from ttrl.tasks.task import Task


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
        return any(self.folder.iteration(number).marker(phase) is not None for phase in PHASES)

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
            computed = {"fp32": "float32", "bf16": "bfloat16"}[self.config.dtype], self.config.context
            if _canary_made_in(canary) == computed:
                (temporary / CANARY_FILE).write_bytes(canary.read_bytes())  # our own recipe made this model
            else:
                command = [sys.executable, "-m", "ttrl.training.canary", "--model", str(self.model)]
                command += ["--output", str(temporary / CANARY_FILE)]
                command += ["--dtype", self.config.dtype, "--device", self.config.device]
                command += [] if self.config.context is None else ["--context", str(self.config.context)]
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
        self,
        tasks: Sequence[Task],
        n: int,
        temperature: float,
        version: int,
        what: str,
        partial: Path | None = None,
        budget: int | None = None,
        carried: Sequence[TaskResult] = (),
        known: TaskResults | None = None,
    ) -> TaskResults:
        """Samples from the running server. With `partial`, finished groups are kept there, and those that lie there are not
        sampled again. With `budget`, so many new tokens are sampled (and as many again while no group is finished); `carried` are
        the groups to continue, those of the first tasks. `known`: what a call for the first of these tasks returned. Raises
        ServerDiedError where the server is gone, ServerError, GraderError or RolloutError where every sample failed."""
        done = dict(enumerate(known or ()))
        kept = {} if partial is None else kept_groups(partial, tasks, n, version, carried)
        kept = {position: group for position, group in kept.items() if position not in done}
        done |= kept
        waiting = dict(enumerate(carried))
        missing = [position for position in range(len(tasks)) if position not in done]
        positions: dict[str, list[int]] = {}
        for position in missing:
            positions.setdefault(task_key(tasks[position].id, tasks[position].messages), []).append(position)

        def keep(result: TaskResult) -> None:
            # A group without any grade is sampled again, so that a grader that failed can be put right.
            if partial is not None and result.graded and not is_open(result):
                position = place_of(result, positions, carried)
                append_jsonl(partial, {"position": position, "samples": [sample.to_json() for sample in result.samples]})

        async def sample(token_budget: int | None) -> TaskResults:
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
                    cache=self.config.cache or None,
                    weights_digest=self.server.running.weights_digest() if self.config.cache else None,
                    token_budget=token_budget,
                    unfinished=[waiting[position] for position in missing if position in waiting],
                )

        began = clock()
        spent = sum(usage.new_completion for usage in usage_of(done, carried))
        left = None if budget is None else max(1, budget - spent)
        while missing:
            fresh = run_async(sample(left))
            if any(s.finish_reason is None for s in fresh.samples):
                self.server.running.check()  # says why, where the server is gone
            done.update(zip(missing, fresh, strict=True))
            if not all(map(is_open, done.values())):
                break
            waiting, missing, left = dict(done), sorted(done), budget
        # Tokens that an earlier process sampled took their time there: no speed can be told from ours.
        seconds = clock() - began if not kept else None
        if known is not None:
            before = known.stats.seconds
            seconds = None if seconds is None or before is None else before + seconds
        groups = [done[position] for position in range(len(tasks))]
        results = TaskResults(groups, seconds=seconds, usage=usage_of(dict(enumerate(groups)), carried))
        results.raise_if_all_failed()
        return results

    def _tasks_from(self, first: int, count: int) -> list[Task]:
        """Some of the stream of all tasks, which has each epoch in an order of its own."""
        total = len(self.tasks)
        orders: dict[int, list[int]] = {}
        chosen = []
        for place in range(first, first + count):
            epoch, position = divmod(place, total)
            if epoch not in orders:
                orders[epoch] = list(range(total))
                random.Random(f"{self.config.seed}/{epoch}").shuffle(orders[epoch])
            chosen.append(self.tasks[orders[epoch][position]])
        return chosen

    def _taken_before(self, number: int) -> int:
        """How many tasks of the stream earlier iterations took: equal parts, where their markers do not tell otherwise."""
        marker = self.folder.iteration(number - 1).marker("rollouts") or {}
        return marker.get("tasks_taken", (number - 1) * self.config.tasks_per_iteration)

    def _tasks_of(self, number: int) -> list[Task]:
        """The tasks with which an iteration without a token budget begins."""
        return self._tasks_from(self._taken_before(number), self.config.tasks_per_iteration)

    def rollouts(self, number: int) -> None:
        """Samples the iteration's tasks from the newest policy and grades them."""
        iteration = self.folder.iteration(number)
        if iteration.marker("rollouts") is not None:
            return
        version = self.folder.policy_version(number - 1)
        budget, carried, more = self.config.tokens_per_iteration, [], {}
        tasks = self._tasks_of(number)
        if budget is not None:
            carried, tasks, more = self._continued(number, version)
        began = clock()
        sync = self.server.serve(self.folder.checkpoint(number - 1))
        sync_seconds = clock() - began
        partial = iteration.path / "rollouts.partial.jsonl"
        n, temperature, what = self.config.samples_per_task, self.config.temperature, f"{number}: sampling"
        results = self._sample(tasks, n, temperature, version, what, partial, budget, carried)
        if self.config.dynamic_sampling is not None:
            first, taken = len(tasks), more.get("tasks_taken", self._taken_before(number) + len(tasks))
            while count := further_tasks(
                results, self.config, len(tasks) - first, results.stats.new_completion_tokens, self.tokenizer
            ):
                tasks, taken = tasks + self._tasks_from(taken, count), taken + count
                results = self._sample(tasks, n, temperature, version, f"{what} more", partial, budget, carried, results)
            more |= {"tasks_taken": taken, "extra_tasks": len(tasks) - first}
        files = ["rollouts.jsonl"]
        finished = TaskResults([group for group in results if not is_open(group)])
        stats = (results if budget is None else finished).stats.to_json()
        write_jsonl(iteration.path / "rollouts.jsonl", finished.to_jsonl_rows())
        if budget is not None:
            write_jsonl(iteration.path / UNFINISHED_FILE, TaskResults(filter(is_open, results)).to_jsonl_rows())
            files.append(UNFINISHED_FILE)
            all_stats = results.stats
            stats |= {"seconds": all_stats.seconds, "tokens_per_second": all_stats.tokens_per_second}
            more |= budget_facts(results, carried, version)
        facts = {"seconds": clock() - began - sync_seconds, "sync_seconds": sync_seconds, "sync": sync, "stats": stats}
        iteration.mark("rollouts", files, facts | more)
        partial.unlink(missing_ok=True)

    def _continued(self, number: int, version: int) -> tuple[list[TaskResult], list[Task], dict[str, Any]]:
        """With a token budget: the groups to continue, all tasks of the iteration (theirs first), and facts for the marker.

        New tasks follow in the stream on those that were taken so far; the markers say how many that are.
        """
        previous = self.folder.iteration(number - 1)
        taken = self._taken_before(number)
        known = {task_key(task.id, task.messages): task for task in self.tasks}
        groups, limit = carried_groups(previous), self.config.max_staleness
        carried = [
            ready_to_continue(group, version)
            for group in groups
            if task_key(group.task_id, group.messages) in known  # the person may have allowed other tasks since
            and (limit is None or version - oldest_version(group, version) <= limit)
        ]
        new = self._tasks_from(taken, max(0, self.config.tasks_per_iteration - len(carried)))
        tasks = [known[task_key(group.task_id, group.messages)] for group in carried] + new
        return carried, tasks, {"tasks_taken": taken + len(new), "dropped_groups": len(groups) - len(carried)}

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
        )
        write_jsonl(iteration.path / "validation.jsonl", results.to_jsonl_rows())
        facts = {"seconds": clock() - began - sync_seconds, "sync_seconds": sync_seconds, "sync": sync}
        iteration.mark("validate", ["validation.jsonl"], facts | {"stats": results.stats.to_json()})

    # Training

    def pack(self, number: int) -> None:
        """Advantages, tokens, packed tensors. Groups whose rewards are all equal teach nothing; they are counted and left out,
        unless the recipe rewards single tokens (`GRPOConfig.rewards_tokens`).

        So is what else happened to the rewards, in the marker's "groups" and "advantages": see `ttrl.data.advantages.Advantages`.
        """
        iteration = self.folder.iteration(number)
        if iteration.marker("pack") is not None:
            return
        began = clock()
        iteration.verify("rollouts")
        samples = [Sample.from_json(row) for row in read_jsonl(iteration.path / "rollouts.jsonl")]
        tokenizer = self.tokenizer()
        keep_equal = self.config.recipe_config({}).rewards_tokens
        advantages = advantages_of(
            list(TaskResults.from_samples(samples)), self.config.advantage_config(), tokenizer, keep_equal=keep_equal
        )
        facts: dict[str, Any] = {"groups": advantages.groups, "advantages": advantages.facts}
        if not advantages.kept:
            iteration.mark("pack", [], {"seconds": clock() - began, **facts, "rows": 0})
            return
        tokenize = TaskResultTokenizer(tokenizer)
        tokenized = [
            sequence
            for result, values in zip(advantages.kept, advantages.values, strict=True)
            for sequence in tokenize(result, values)
        ]
        packed = packed_tensors_from_tokenized_results(
            tokenized,
            seq_len=self.config.seq_len,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
            aggregation=self.config.aggregation,
            constant_length=self.config.constant_length,
            too_long=self.config.too_long,
            share=self.config.share,
            multiple=self.config.nproc_per_node,
            seed=self.config.seed,
        )
        if (made_with := tokenizer_digest(self.model)) is not None:
            packed.metadata[TOKENIZER_KEY] = made_with
        packed.save(iteration.path / "packed.safetensors")
        facts |= {"rows": packed.num_rows, "row_tokens": packed.num_tokens, "trained_tokens": packed.num_trained}
        facts |= {"tokenization": dataclasses.asdict(tokenize.counts)}
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
        state, settings = self.folder.state(number - 1), config.recipe_config({})
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
            "context": config.context,
            "reference_model": str(self.model) if settings.needs_reference else None,
            "lora_base": str(self.model) if settings.lora_rank is not None else None,
        }
        return config.recipe_config(values).to_dict()

    def metrics_row(self, number: int) -> dict[str, Any]:
        """The line of metrics.jsonl, put together from the markers alone."""
        return metrics_row(self.folder.iteration(number))


def _canary_made_in(path: Path) -> tuple[str, int | None] | None:
    """Dtype and context of a canary that lies in the starting model's folder; None where there is none."""
    try:
        content = json.loads(path.read_text())
        return content["dtype"], content.get("context")
    except (OSError, ValueError, KeyError, TypeError):
        return None
