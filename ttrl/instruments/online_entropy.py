"""Predict, during training, what an optimizer step does to the entropy of whole answers.

    δH₁ = η⟨∇H, v⟩                                                                              (1)

Both factors come from the step's own answers. Measured on the same ones, (1) would count the effect
of each answer's own part of v on itself, and overstate the fall of the entropy. So a quarter A of
the step's tasks, drawn at random, measures ∇H, and the other tasks make v:

    g₋ = (Z·g - Z_A·g_A) / (Z - Z_A),

with the step's gradient g, normalisers Z, and the gradient g_A of the tasks in A alone, from one
more pass over their rows. v is the optimizer's vector (`ttrl.instruments.update_rules`) for g₋,
clipped, from the state before the step. No answer is in both factors, so (1) is an unbiased
estimate of the effect of an update by three quarters of the tasks: a U-statistic of two blocks.
`naive` is (1) with v from all answers; the difference is the bias of measuring a step by itself.

In an iteration's later steps, answers of its first policy stand for those of the present one.

The step is not touched: its gradient is set aside and put back, and random numbers are drawn from
generators of their own. The cost is two more passes over the rows with tasks in A, forward and
backward, and room for three gradients.
"""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import nn

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import IGNORE_LABEL
from ttrl.facts import StepEntropy
from ttrl.instruments.entropy_batch import EntropyBatch, by_task, part_of
from ttrl.instruments.linear_response import Vector, inner
from ttrl.instruments.update_rules import rule_of, steps_taken
from ttrl.training.batches import Update as Step
from ttrl.training.objective.objective import StepObjective
from ttrl.training.optimizer.optimizer import learning_rate
from ttrl.training.optimizer.state import state_tensors
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.policy.lora import adapted
from ttrl.training.prepass import Prepass
from ttrl.training.resident import Trained
from ttrl.training.step import GradientStep
from ttrl.training.timing import Stopwatch

SHARE = 0.25
"""Of the step's tasks, for ∇H."""


class OnlineEntropy:
    """Measures δH₁ of every `entropy_every`-th optimizer step, in one process."""

    def __init__(self, config: GRPOConfig, trained: Trained, prepass: Prepass, here: Ranks) -> None:
        self._config = config
        self._trained = trained
        self._here = here
        policy = trained.policy
        values = trained.values
        self._head = None if values is None else values.head
        self._gradient = GradientStep(
            policy,
            config,
            here,
            Stopwatch(here.device),
            None,
            self._head,
            prepass.reference_head,
        )
        everything = policy.parameters_by_name()
        self._names = {name: p for name, p in everything.items() if p.requires_grad}

    def is_due(self, global_step: int) -> bool:
        """Tell whether to measure the step after `global_step` others."""
        every = self._config.entropy_every
        return every is not None and global_step % every == 0

    def measure(self, step: Step, objective: StepObjective, lr_scale: float) -> StepEntropy:
        """Measure the step with the gradient now in the parameters, not yet clipped. lr_scale: as
        for the step. Without `first` for a single task."""
        generator = derived_generator(self._config.seed, "entropy", objective.global_step)
        apart = tasks_apart(step, generator)
        if not apart:
            return StepEntropy(seconds=0.0)
        return self.measure_on(apart, step, objective, lr_scale)

    def measure_on(
        self, apart: list[int], step: Step, objective: StepObjective, lr_scale: float
    ) -> StepEntropy:
        """Measure the step on these samples, all of some tasks, by their numbers in its rows'
        table; other arguments as for `measure`."""
        began = time.perf_counter()
        rate = learning_rate(self._config, objective.global_step) * lr_scale
        whole = {name: p.grad for name, p in self._names.items() if p.grad is not None}
        with self._set_aside():
            times = dict.fromkeys(apart, 1)
            with _as_sampled(self._trained):
                batch = EntropyBatch(
                    self._trained.policy, step.rows, times, self._config, self._here
                )
                start = {name: p.detach() for name, p in self._names.items()}
                slope = batch.gradient(start)
            part = part_of(step, apart)
            self._gradient.accumulate(part, objective)
            others = self._without(whole, step.normaliser, part.normaliser)
        first = rate * self._along(slope, others)
        naive = rate * self._along(slope, whole)
        entropy = batch.entropies[1]
        return StepEntropy(
            first=first,
            naive=naive,
            entropy=entropy.value,
            error=entropy.error,
            tasks=len({step.rows.samples[number].task_id for number in apart}),
            answers=int(batch.times.sum()),
            dtype=self._config.dtype,
            device=self._here.device.type,
            seconds=time.perf_counter() - began,
        )

    def _without(self, whole: Vector, of_step: float, of_part: float) -> Vector:
        """Return the gradient of the step without the part now in the parameters."""
        found = {}
        for name, gradient in whole.items():
            own = self._names[name].grad
            rest = gradient * of_step
            if own is not None:
                rest = rest - own * of_part
            found[name] = rest / (of_step - of_part)
        return found

    @torch.no_grad()
    def _along(self, slope: Vector, gradient: Vector) -> float:
        """Return ⟨slope, v⟩ for the update of a gradient, clipped, parameter by parameter."""
        limit = self._config.max_grad_norm
        factor = 1.0
        if limit is not None:
            norm = inner(gradient, gradient) ** 0.5
            factor = min(1.0, limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        optimizer = self._trained.stepper.optimizer
        moments = dict(state_tensors(self._trained.policy, optimizer))
        rule = rule_of(self._config, steps_taken(moments, 0))
        total = 0.0
        for name, value in gradient.items():
            # In fp32, with float64 sums: exact to about six digits, in half of float64's time.
            parameter = self._names[name].detach()
            found = rule.stepped(name, parameter, factor * value, moments, torch.float32)
            vector = found.current + found.earlier + found.decay
            total += float((slope[name].float() * vector).sum(dtype=torch.float64))
        return total

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Keep the gradients of policy and value head out of the passes inside the block."""
        parameters: list[nn.Parameter] = list(self._names.values())
        if self._head is not None:
            parameters += list(self._head.parameters())
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        devices = [self._here.device] if self._here.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient


@contextlib.contextmanager
def _as_sampled(trained: Trained) -> Iterator[None]:
    """Compute derivatives of the sampling policy inside the block: DoRA's lengths of rows count."""
    layers = list(adapted(trained.policy).values())
    before = [layer.constant_lengths for layer in layers]
    for layer in layers:
        layer.constant_lengths = False
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.constant_lengths = was


def tasks_apart(step: Step, generator: torch.Generator) -> list[int]:
    """Return the samples of a quarter of the step's tasks, drawn at random, by their numbers in its
    rows' table; none if there is a single task.
    """
    trained = torch.unique(step.rows.sample_ids[step.rows.labels != IGNORE_LABEL]).tolist()
    groups = by_task(step.rows.samples, trained)
    if len(groups) < 2:
        return []
    count = max(1, round(SHARE * len(groups)))
    drawn = torch.randperm(len(groups), generator=generator)[:count].tolist()
    return sorted(number for place in drawn for number in groups[place])
