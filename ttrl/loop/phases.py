"""Run the phases of an iteration. Each looks for its marker, does its work, and leaves the marker
last.

prepare     (iteration 0) the starting model, linked, and its canary: checkpoint/
rollouts    graded samples, and unfinished ones with a token budget: rollouts.jsonl,
            unfinished.jsonl
pack        advantages and packed tensors: packed.safetensors
train       the recipe, in its own process: checkpoint/ state/ train.jsonl
validate    held-out tasks under the new policy: validation.jsonl

Their order and concurrency: `ttrl.loop.iterations`.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ttrl.configs.base import Settings
from ttrl.configs.machines import gpus_of_a_server
from ttrl.configs.run import TrainConfig
from ttrl.costs.flops import sampling_flops
from ttrl.costs.parameters import ModelShape, model_shape
from ttrl.errors import ModelFolderError, ServerError, TrainerDiedError
from ttrl.facts import (
    PackFacts,
    PrepareFacts,
    RolloutsFacts,
    SampledFlops,
    SaveFacts,
    Sync,
    TrainFacts,
    ValidateFacts,
)
from ttrl.intervals import Estimate, estimate_mean, pooled
from ttrl.launch.trainer import Trainer
from ttrl.loop.carried import (
    UNFINISHED_FILE,
    groups_of,
    is_open,
    left_unfinished,
    num_tokens,
    staleness,
)
from ttrl.loop.pack_phase import pack
from ttrl.loop.rollout_facts import sampled_reads
from ttrl.loop.sampling_phase import Sampler, Workers
from ttrl.loop.task_stream import TaskStream, further_tasks
from ttrl.loop.timeline import Timeline
from ttrl.plans.planner import write_plan
from ttrl.records import CANARY_FILE, Canary, TaskResult
from ttrl.rollouts.client.wire import EXPERTS
from ttrl.rollouts.early_stop import InferenceEarlyStop
from ttrl.rollouts.results import TaskResults
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.metrics import PHASES
from ttrl.system.console import Console, clock
from ttrl.system.files import (
    atomic_folder,
    model_files,
    read_jsonl,
    read_object,
    remove_folder,
    remove_leftovers,
    write_jsonl,
)
from ttrl.tasks.task import Task
from ttrl.weights.bits import WEIGHTS_FILE, check_bits
from ttrl.weights.policy_server import PolicyServer

logger = logging.getLogger(__name__)

_POLICY = ("checkpoint", "state")
BroughtIn: TypeAlias = tuple[float, Sync | None]
"""Seconds spent to bring a policy to the servers, and the transfer; (0, None) if another phase did
it."""
_AGAIN = "trainer/again"
"""Output folder of a retrained iteration; its results are known already."""


class Phases:
    """Run each phase of one run."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        model: Path,
        *,
        server: PolicyServer,
        console: Console,
        tasks: Sequence[Task] = (),
        validation_tasks: Sequence[Task] = (),
        trainer: Trainer | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        self.tasks, self.validation_tasks = list(tasks), list(validation_tasks)
        self.server = server
        self.console = console
        self.trainer = trainer or Trainer(config, folder, console)
        self._deaths = 0
        """Trainer deaths since it last finished an iteration."""
        self._unsaved: tuple[int, float, float] | None = None
        """The iteration with files still being written, and the begin and end of its training."""
        self.stream = TaskStream(config, folder, self.tasks)
        self.timeline = Timeline()
        self._sampler = Sampler(config, server, console, self.timeline, workers)
        self._tokenizer: Any = None
        self._loading = threading.Lock()
        self._synced: tuple[int, dict[str, BroughtIn]] | None = None
        """The iteration of the served policy, and the transfer for each phase's marker."""
        self._sampled: dict[int, list[TaskResult]] = {}
        """By iteration, groups sampled by this process and not packed yet."""

    def anything_done(self, number: int) -> bool:
        """Return whether an earlier process finished a phase of this iteration."""
        return any(self.folder.iteration(number).is_done(phase) for phase in PHASES)

    # Iteration 0

    def prepare(self) -> None:
        """Link the starting model as iteration 0's checkpoint. The trainer makes its canary while
        the server starts; on a shared GPU, the server starts after the trainer is done and has
        parked.
        """
        iteration = self.folder.iteration(0)
        if iteration.is_done("prepare"):
            return
        began = clock()
        if not self.config.shares_gpu:
            self.server.start(self.model)
        first = "validation" if self.validation_tasks else "sampling"
        self.console.line(
            f"starting vLLM and the trainer; with a small model, {first} begins in about half "
            "a minute "
            f"(logs: {self.folder.path / 'logs'})"
        )
        if not self.link_start():
            self._ask_trainer(1, {"packed": "", "output_dir": str(iteration.path)})
            self._deaths = 0
        plan = write_plan(
            self.config,
            self.folder.path,
            self.model,
            self.tasks,
            self.validation_tasks,
            self.tokenizer(),
        )
        if plan is not None:
            self.console.line(plan.work_line())
            self.console.line(plan.time_line(may_end_early=self.config.stop_at is not None))
            if plan.does_not_fit is not None:
                self.console.line(f"note: {plan.does_not_fit}")
        sync = self.server.serve(iteration.path / "checkpoint")
        iteration.mark(PrepareFacts(seconds=clock() - began, sync=sync), ["checkpoint"])

    def link_start(self) -> bool:
        """Link the starting model's files as iteration 0's checkpoint. Return whether it has a
        canary: our own recipe may have made this model.
        """
        place = self.folder.iteration(0).path / "checkpoint"
        model_files(self.model)  # raises if its links lead elsewhere
        with atomic_folder(place) as temporary:
            for path in sorted(self.model.iterdir()):
                if path.is_file() and path.name != CANARY_FILE:
                    inside = path.is_relative_to(self.folder.path)
                    if inside:
                        target = Path(os.path.relpath(path, place))
                    else:
                        target = path.resolve()
                    (temporary / path.name).symlink_to(target)
            canary = self.model / CANARY_FILE
            computed = (
                {"fp32": "float32", "bf16": "bfloat16"}[self.config.dtype],
                self.config.context,
            )
            is_known = _canary_made_in(self.model) == computed
            if is_known:
                (temporary / CANARY_FILE).write_bytes(canary.read_bytes())
        return is_known

    def tokenizer(self) -> Any:
        """Return the starting model's tokenizer, loaded once."""
        with self._loading:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self.model)
            return self._tokenizer

    # Sampling

    def sync(self, number: int, recorded_by: str) -> None:
        """Bring the policy after iteration `number` to the server, for several phases; the marker
        of `recorded_by`, one of them, records the cost."""
        began = clock()
        self._synced = None
        version = self.folder.policy_version(number)
        if version in self.folder.held and self.trainer.handover(version) is None:
            self.finish_saving()  # the trainer died since
        sync = self._sync(version)
        self._synced = number, {recorded_by: (clock() - began, sync)}

    def _sync(self, version: int) -> Sync | None:
        """Bring a policy to the server: from the trainer's memory, or from files if no server can
        take it from there. A new trainer first rebuilds a policy without files.
        """
        checkpoint = self.folder.checkpoint(version)
        if self._has_files(version):
            return self.server.serve(checkpoint, self.trainer.handover(version))
        if self.trainer.handover(version) is None:
            self._ask_trainer(version + 1, None)
        start_from = self.folder.checkpoint(self.folder.written_version(version))
        try:
            return self.server.serve(checkpoint, self.trainer.handover(version), start_from)
        except ServerError as error:
            logger.warning(
                "the policy of iteration %d is written for the servers, because they did not take "
                "it: %s",
                version,
                error,
            )
            self.write(version)
            return self.server.serve(checkpoint)

    def _has_files(self, version: int) -> bool:
        """Return whether a policy's checkpoint exists or is being written."""
        is_held_out = version in self.folder.held and self.trainer.handover(version) is not None
        return (is_held_out and self.trainer.holding != version) or self.folder.written_version(
            version
        ) == version

    def _serve(self, number: int, phase: str) -> BroughtIn:
        """Bring the policy to the server; return the transfer for the phase's marker."""
        if self._synced is None or self._synced[0] != number:
            self.sync(number, phase)
        assert self._synced is not None
        return self._synced[1].pop(phase, (0.0, None))

    def rollouts(self, number: int) -> None:
        """Sample the iteration's tasks from the policy due, and grade them."""
        iteration = self.folder.iteration(number)
        if iteration.is_done("rollouts"):
            return
        sampled_by = self.config.policy_of_rollouts(number)
        version = self.folder.policy_version(sampled_by)
        budget = self.config.tokens_per_iteration
        carried: list[TaskResult] = []
        dropped = None
        extra = None
        tasks = self.stream.tasks_of(number)
        taken = self.stream.taken_before(number) + len(tasks)
        if budget is not None:
            carried, tasks, taken, dropped = self.stream.continued(number, version)
        sync_seconds, sync = self._serve(sampled_by, "rollouts")
        began = clock()
        partial = iteration.path / "rollouts.partial.jsonl"
        request = self._sampler.request(
            f"{number}: sampling",
            n=self.config.samples_per_task,
            temperature=self.config.temperature,
            version=version,
        )
        early_stop = self.config.early_stop
        router_replay = self.config.recipe_config({}).router_replay
        request = dataclasses.replace(
            request,
            params={**(request.params or {}), **({EXPERTS: 0} if router_replay else {})},
            on_chunk=None if early_stop is None else InferenceEarlyStop(**early_stop),
            log_dir=iteration.path / "samples" if self.config.sample_files else None,
        )
        results = self._sampler.sample(
            tasks, request, partial=partial, budget=budget, carried=carried
        )
        if self.config.dynamic_sampling is not None:
            first = len(tasks)
            request = dataclasses.replace(request, pbar_desc=f"{number}: sampling more")
            while count := further_tasks(
                results,
                self.config,
                len(tasks) - first,
                results.stats.new_completion_tokens,
                self.tokenizer,
            ):
                tasks = tasks + self.stream.more(number, taken, count, tasks)
                taken = taken + count
                results = self._sampler.sample(
                    tasks, request, partial=partial, budget=budget, carried=carried, known=results
                )
            extra = len(tasks) - first
        files = ["rollouts.jsonl"]
        finished = TaskResults([group for group in results if not is_open(group)])
        stats = results.stats
        facts = RolloutsFacts(tasks_taken=taken, extra_tasks=extra, dropped_groups=dropped)
        write_jsonl(iteration.path / "rollouts.jsonl", finished.to_jsonl_lines())
        if budget is not None:
            write_jsonl(
                iteration.path / UNFINISHED_FILE,
                TaskResults(filter(is_open, results)).to_jsonl_rows(),
            )
            files.append(UNFINISHED_FILE)
            new = sum(map(num_tokens, results)) - sum(map(num_tokens, carried))
            facts = facts.replace(
                new_completion_tokens=new,
                staleness=staleness(finished, version),
                unfinished=left_unfinished(results),
            )
            stats = finished.stats.replace(
                seconds=stats.seconds,
                tokens_per_second=stats.tokens_per_second,
                grading_seconds=stats.grading_seconds,
            )
        flops = self._flops(results, began, carried)
        curriculum = self.stream.measured(number, list(finished))
        facts = facts.replace(
            seconds=clock() - began,
            sync_seconds=sync_seconds,
            sync=sync,
            stats=stats,
            flops=flops,
            curriculum=curriculum,
        )
        iteration.mark(facts, files)
        self._sampled[number] = list(finished)
        partial.unlink(missing_ok=True)

    def has_to_validate(self, number: int) -> bool:
        """Return whether `validate` has anything to do."""
        is_due = number % self.config.validate_every == 0 or number == self.config.iterations
        return (
            is_due
            and bool(self.validation_tasks)
            and not self.folder.iteration(number).is_done("validate")
        )

    def ask_server(self) -> Callable[[str], Any] | None:
        """Return a function to GET a path of the server as JSON; None without a running server."""
        try:
            self.server.check()
        except ServerError:
            return None
        return lambda path: self.server.request("GET", path)

    def validate(self, number: int) -> None:
        """Sample the held-out tasks from the policy after this iteration."""
        iteration = self.folder.iteration(number)
        if not self.has_to_validate(number):
            return
        sync_seconds, sync = self._serve(number, "validate")
        began = clock()
        n = self.config.validation_samples
        temperature = self.config.resolved_validation_temperature
        request = self._sampler.request(
            f"{number}: validating",
            n=n,
            temperature=temperature,
            version=self.folder.policy_version(number),
        )
        results = self._sampler.sample(self.validation_tasks, request)
        write_jsonl(iteration.path / "validation.jsonl", results.to_jsonl_lines())
        stats = results.stats
        estimates = _estimates(results, self.config.validation_metric, n)
        passed = {
            name: one.mean
            for name, one in estimates.items()
            if "pass@" in name and one.mean is not None
        }
        spans = {
            name: (one.low, one.high)
            for name, one in estimates.items()
            if one.low is not None and one.high is not None
        }
        facts = ValidateFacts(
            seconds=clock() - began,
            sync_seconds=sync_seconds,
            sync=sync,
            stats=stats.replace(metrics=stats.metrics | passed),
            flops=self._flops(results, began),
            sampling=_sampled_how(temperature, len(results), n),
            intervals=spans,
        )
        iteration.mark(facts, ["validation.jsonl"])

    def _flops(
        self, results: TaskResults, began: float, carried: Sequence[TaskResult] = ()
    ) -> SampledFlops:
        """Return the servers' FLOPs for a phase just sampled; the rate includes their concurrent
        work for other phases.
        """
        config = self.config
        reads = sampled_reads(list(results), carried, shared=config.shares_prompts)
        prefill, decode = sampling_flops(self._shape, reads)
        flops = SampledFlops(prefill=float(prefill), decode=float(decode))
        if results.stats.seconds is None:
            return flops
        per_second = self.timeline.served(began, clock(), flops.prefill + flops.decode)
        if config.device == "cuda":
            gpus = config.servers_in_all * gpus_of_a_server(config.server)
        else:
            gpus = 1
        return flops.replace(per_second=per_second / gpus)

    @functools.cached_property
    def _shape(self) -> ModelShape:
        return model_shape(read_object(self.model / "config.json"))

    # Training

    def pack(self, number: int) -> None:
        """Turn groups into advantages, token sequences and packed tensors: see
        `ttrl.loop.pack_phase`.
        """
        iteration = self.folder.iteration(number)
        sampled = self._sampled.pop(number, None)
        if iteration.is_done("pack"):
            return
        pack(
            iteration,
            groups_of(iteration) if sampled is None else sampled,
            self.config,
            self.model,
            self.tokenizer(),
        )

    def start_trainer(self, number: int) -> None:
        """Start a resident trainer and load the policy for training iteration `number`, in the
        background.
        """
        config = self.recipe_config(number)
        if not Path(config["model"], "config.json").is_file():  # iteration 0 has not been prepared
            config = {**config, "model": str(self.model)}
        self.trainer.start(config)

    def train_policy(self, number: int) -> None:
        """Run the recipe on the packed rows, from the newest checkpoint and state. Raises
        TrainerError, StorageError.
        """
        iteration = self.folder.iteration(number)
        if iteration.is_done("train"):
            return
        began = clock()
        packed = iteration.marker(PackFacts)
        assert packed is not None
        if not packed.rows:
            iteration.mark(TrainFacts(seconds=clock() - began, trained=False))
            return
        iteration.verify("pack")
        self._rest_server()
        self._ask_trainer(number, {})
        self._unsaved = number, began, clock()
        # The cache depends on the files' content.
        if self.trainer.handover(number) is None or self.config.cache:
            self.finish_saving()
        else:
            self.folder.held.add(number)

    def _rest_server(self) -> None:
        """Free the server's memory for the trainer, if configured (`server_stops`)."""
        if self.config.server_stops:
            self._synced = None
            self.server.rest()

    def finish_saving(self, wait_for_others: Callable[[], None] = lambda: None) -> None:
        """Wait until the last training is on disk, or in the trainer's memory for good; mark it as
        done. A killed trainer retrains it, to the same bits; on GPUs shared with the server, only
        after `wait_for_others`, the server's users.
        """
        if self._unsaved is None:
            return
        number, began, trained = self._unsaved
        iteration = self.folder.iteration(number)
        while True:
            try:
                if self.trainer.wait_until_saved():
                    break
            except TrainerDiedError as error:
                self._count_death(error)
            if self.config.server_stops:
                wait_for_others()
            self._ask_trainer(number, {})
        steps = read_jsonl(iteration.path / "train.jsonl", key="global_step")
        facts = TrainFacts(seconds=trained - began, trained=True, steps=steps)
        self.timeline.add_training(began, trained, facts.taken())
        files = ["train.jsonl", "trainer_logprobs.safetensors", WEIGHTS_FILE]
        if self.trainer.holding == number:
            facts = facts.replace(saved=False)
        else:
            files = [*_POLICY, *files]
            if self.trainer.handover(number) is not None:
                facts = facts.replace(save_seconds=clock() - trained)
        iteration.mark(facts, files, _known_digests(iteration.path))
        self.folder.held.discard(number)
        self._unsaved = None
        self._deaths = 0

    def write(self, number: int) -> None:
        """Write the policy after iteration `number`, and its state, unless written already
        (`save_every`).
        """
        version = self.folder.policy_version(number)
        if self._has_files(version):
            return
        began = clock()
        iteration = self.folder.iteration(version)
        self._ask_trainer(version + 1, {"packed": "", "output_dir": str(iteration.path)})
        if version not in self.folder.held:  # its training is marked as done
            facts = SaveFacts(seconds=clock() - began)
            iteration.mark(facts, _POLICY, _known_digests(iteration.path))

    def _ask_trainer(self, number: int, changes: Settings | None) -> None:
        """Run the trainer on an iteration's recipe config with `changes`; None: only hold the
        starting policy. A killed trainer is restarted and retrains every policy without files.
        Raises TrainerError, StorageError.
        """
        if self.config.shares_gpu:
            self._rest_server()
        while True:
            try:
                for lost in self._lost(number - 1):
                    self._train_again(lost)
                if changes is not None:
                    config = {**self.recipe_config(number), **changes}
                    self._ask_once(number if config["packed"] else number - 1, config)
                break
            except TrainerDiedError as error:
                self._count_death(error)

    def _lost(self, number: int) -> list[int]:
        """Return the iterations to retrain before the trainer has, or finds, the policy after
        `number`.
        """
        if number <= 0 or self._has_files(version := self.folder.policy_version(number)):
            return []
        first = 1 + self.folder.written_version(version)
        lost = [n for n in range(first, version + 1) if self.folder.policy_version(n) == n]
        if self.trainer.holding in lost:
            return lost[lost.index(self.trainer.holding) + 1 :]
        return lost

    def _train_again(self, number: int) -> None:
        """Retrain an iteration without saved weights and state, from the same inputs to the same
        bits. Leave its other files untouched."""
        self.console.line(
            f"note: training iteration {number} again: its weights were not written (save_every)"
        )
        folder = self.folder.path / _AGAIN
        iteration = self.folder.iteration(number)
        changes = {"output_dir": str(folder), "save": False}
        self._ask_once(number, {**self.recipe_config(number), **changes})
        if self.trainer.holding != number:  # it could not keep them in memory, and wrote them
            for name in _POLICY:
                remove_folder(iteration.path / name)
                os.replace(folder / name, iteration.path / name)
            iteration.mark(SaveFacts(), _POLICY, _known_digests(iteration.path))

    def _ask_once(self, number: int, recipe_config: Settings) -> None:
        folder = Path(recipe_config["output_dir"])
        if recipe_config["packed"]:
            (folder / "train.jsonl").unlink(missing_ok=True)
        for name in _POLICY:  # half a checkpoint is as large as a whole one, and useless
            with contextlib.suppress(OSError):
                remove_leftovers(folder, name)
        self.trainer.make_checkpoint(number, recipe_config)
        handover = self.trainer.handover(number) if recipe_config["packed"] else None
        if handover is not None:
            check_bits(
                self.folder.iteration(number),
                handover.digests,
                recipe_config,
                self.config.processes,
            )

    def check_trainer(self) -> None:
        """Notice the death of an idle resident trainer; the next iteration starts another one.
        Raises TrainerError if a restart would not fix the failure.
        """
        try:
            self.trainer.check()
        except TrainerDiedError as error:
            self._count_death(error)

    def _count_death(self, error: TrainerDiedError) -> None:
        """Count a death; a waiting trainer's counts for the iteration it waited for. Raises the
        error for one death too many."""
        self._deaths += 1
        if self._deaths > self.config.trainer_restarts:
            raise error
        logger.warning("%s", error)
        self.console.line(
            f"note: {str(error).splitlines()[0][:200]}; starting it again (see logs/)"
        )

    def recipe_config(self, number: int) -> Settings:
        """Return the recipe's config for an iteration."""
        config = self.config
        iteration = self.folder.iteration(number)
        version = self.folder.policy_version(number - 1)
        written = self.folder.written_version(number - 1)
        start = number - 1 if written == version else written
        state = self.folder.state(start)
        settings = config.recipe_config({})
        sampler = self.folder.sampler(config.policy_of_rollouts(number), number)
        values = {
            "model": str(self.folder.checkpoint(start)),
            "packed": str(iteration.path / "packed.safetensors"),
            "state": str(state) if state else None,
            "output_dir": str(iteration.path),
            "sampler_model": None if sampler is None else str(self.folder.checkpoint(sampler)),
            "sampler_version": sampler,
            "iteration": number,
            "device": config.device,
            "dtype": config.dtype,
            "num_threads": config.num_threads,
            "temperature": config.temperature,
            "context": config.context,
            "reference_model": str(self.model) if settings.needs_reference else None,
            "lora_base": str(self.model) if settings.lora_rank is not None else None,
            "hand_over": config.hands_over,
            "save": number >= config.iterations
            or number // config.save_every > written // config.save_every,
            "kept": None if written == version else version,
            "free_memory": config.trainer == "resident"
            and config.resolved_trainer_memory(config.device) == "free",
        }
        return config.recipe_config(values).to_dict()


def _sampled_how(temperature: float, tasks: int, n: int) -> str:
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{how}, {tasks} task{'s' * (tasks != 1)}" + (f" × {n}" if n > 1 else "")


def _estimates(results: TaskResults, judged_by: str, n: int) -> dict[str, Estimate]:
    """Estimate the reward, each metric and, for n > 1 samples of a task, "pass@n": `judged_by` is 1
    for at least one of them. Tasks with a failed sample are left out of "pass@n"."""
    tasks: list[tuple[str, str]] = []
    scores: list[list[dict[str, float]]] = []
    for group in results:
        tasks.append((group.task_id, json.dumps(group.messages, sort_keys=True, default=str)))
        known = [one for one in group.samples if one.reward is not None]
        scores.append([{**one.scores, "reward": one.reward or 0.0} for one in known])
    names = {name for graded in scores for score in graded for name in score}
    found = {}
    for name in names:
        values = [[score[name] for score in graded if name in score] for graded in scores]
        found[name] = estimate_mean(pooled(tasks, values))
    if n > 1:
        passed: list[list[float]] = []
        for graded in scores:
            judged = [score[judged_by] for score in graded if judged_by in score]
            passed.append([float(max(judged) >= 1.0 - 1e-9)] if len(judged) == n else [])
        found[f"pass@{n}"] = estimate_mean(pooled(tasks, passed))
    return found


def _known_digests(iteration: Path) -> dict[str, str]:
    """Return the trainer's digests of its newly written large files
    (`ttrl.training.models.weights.write_tensors`).
    """
    known: dict[str, str] = {}
    for name in (f"checkpoint/{CANARY_FILE}", "state/state.json"):
        file = iteration / name
        if file.is_file():
            known |= {
                f"{file.parent.name}/{of}": sha
                for of, sha in read_object(file).get("files", {}).items()
            }
    return known


def _canary_made_in(model: Path) -> tuple[str, int | None] | None:
    """Return dtype and context of a canary in the starting model's folder; None without one, or for
    a half-precision canary without its measured cost."""
    try:
        canary = Canary.load(model)
    except ModelFolderError:
        return None
    if canary.dtype == "float32" or canary.half_precision is not None:
        return canary.dtype, canary.context
    return None
