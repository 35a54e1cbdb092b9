"""Study one optimizer step of a run: the optimizer's vector, and its effect on the entropy of whole
answers.

The folder of an iteration holds the start of its training: grpo.yaml names model, state and pack.
The study reports

    step      the optimizer's vector by hand against its true step, and against the checkpoint
    entropy   of the answers, by both estimates
    response  H(θ + ηv) over a sweep of η, by importance weights on the same answers, against
              δH₁ = η⟨∇H, v⟩ and the second order
    parts     ⟨∇H, v⟩ from this step's gradient, from earlier ones through the momentum, and from
              weight decay
    tokens    those with the largest effect on the entropy, the part of those with a high covariance
              in the step's, and the reasons for differences of sampler and trainer
              (`ttrl.instruments.tokens`)
    effects   of each answer of the update on the entropy (`ttrl.instruments.sequence_effects`)
    kernel    the Fisher kernel between answers, on request (`ttrl.instruments.fisher`)

The entropy batch is a held-out one (`ttrl.instruments.held_out`): prompts drawn uniformly with
replacement, one answer each. Then the whole step is studied.

Without held-out tasks, both batches come from the pack. An update made from the measured answers
would overstate its effect. So a random half of each prompt's answers makes the update of
`response`. The other half makes the entropy batch, with the answers of the iteration's later steps.
`step` is about the whole batch, and `half_cosine` compares the two vectors. The pack holds only
prompts with a signal, so the entropy is that of their answers.

If an iteration takes several steps, those before the studied one are taken again, as in the recipe;
answers are weighted by the policy of their sampling, the iteration's first.

vᵀ∇²H v is the difference of two gradients at θ ± εv: the kernels of head and attention have no
second derivative of their own.

A run may have trained in bf16, and its rounding hides small effects. So the study has a dtype of
its own, fp32 or fp64, for all of the above. Three things stay in the run's dtype: the steps before
the studied one, the distance to the run's checkpoint, and `mismatch`, a measure of the run's own
precision.

For one process, after runs of any number (`ttrl.instruments.study_config`); only adapters if the
run trains adapters. Never run on a GPU.
"""

import contextlib
import dataclasses
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import IGNORE_LABEL, PackedTensors
from ttrl.errors import ConfigError, UnmovedStepError
from ttrl.instruments.entropy_batch import (
    EntropyBatch,
    alone,
    counted_off,
    draw,
    halves,
    part_of,
)
from ttrl.instruments.held_out import HeldOut, StoredAnswers
from ttrl.instruments.linear_response import (
    Response,
    Vector,
    agreement,
    inner,
    linear_regime,
    moved,
)
from ttrl.instruments.momentum import Age, ages
from ttrl.instruments.precision import TORCH_DTYPES, precision_of, prove_device, prove_model
from ttrl.instruments.precision_sweep import batches_by_dtype, precision_sweep
from ttrl.instruments.sequence_effects import Answers, kernel_facts, token_parts
from ttrl.instruments.study_config import StudyDevice, study_config
from ttrl.instruments.tokens import (
    covariance_outliers,
    mismatch,
    tokens_of_high_covariance,
)
from ttrl.instruments.update_rules import Update, moment_rounding, rule_of, steps_taken
from ttrl.text import counted
from ttrl.training.batches import Update as Step
from ttrl.training.batches import check_pack, policy_inputs, replayed, updates
from ttrl.training.objective.objective import objective_from
from ttrl.training.optimizer.implicit_reward import RewardModel
from ttrl.training.optimizer.optimizer import (
    OptimizerInBackward,
    learning_rate,
    make_optimizer,
)
from ttrl.training.optimizer.state import state_tensors
from ttrl.training.parallel.distributed import Ranks, derived_generator, ranks
from ttrl.training.parallel.gradients import clip_gradients
from ttrl.training.policy.adapters import as_policy_of
from ttrl.training.policy.lora import adapted
from ttrl.training.policy.policy import HeadOptions
from ttrl.training.policy.value_head import ValueHead
from ttrl.training.prepass import Prepass
from ttrl.training.resident import Trained, load_trained
from ttrl.training.step import GradientStep, StepResult
from ttrl.training.timing import Stopwatch

logger = logging.getLogger(__name__)

StudyDtype = Literal["fp32", "fp64"]

FACTORS = (-4.0, -1.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""The sweep, in multiples of the learning rate."""


def study(
    checkpoint: str | Path,
    *,
    sequences: int = 256,
    factors: Sequence[float] = FACTORS,
    dtype: StudyDtype = "fp32",
    device: StudyDevice | None = None,
    seed: int = 0,
    kernel: int = 0,
    pairs: bool = True,
    update: int = 1,
    held_out: HeldOut | None = None,
    precision: bool = False,
) -> dict[str, Any]:
    """Study an optimizer step of the iteration that made `checkpoint`: number `update`, from 1.

    sequences: of the entropy batch, if it is drawn from the pack. dtype: in fp32, small steps are
    lost in rounding. device: None takes the run's. kernel: answers of the entropy batch in the
    Fisher kernel; pairs: also of all pairs with the update's. held_out: the entropy batch's own
    tasks; None: the pack's. precision: repeat the sweep in bf16, fp32 and fp64, for a study in
    fp64.

    Returns the content of study.json, and with `kernel` "matrices", tensors by name. Raises
    RunFolderError if a file from the iteration's start is gone, ConfigError for a missing device
    for float64 without a proof and for an update beyond the last, UnmovedStepError for a step
    without movement.
    """
    with tempfile.TemporaryDirectory(prefix="ttrl-study-") as scratch:
        config = study_config(Path(checkpoint), scratch, device, update - 1)
        if dtype == "fp64" and config.device == "cuda":
            prove_device(torch.device("cuda"))
        answers = None if held_out is None else held_out.stored(config.iteration)
        while True:
            # Servers sample while no policy is in memory here.
            if held_out is not None and answers is None:
                answers = held_out.draw(config)
            logger.info("loading the policy before iteration %d", config.iteration)
            with ranks(config) as here:
                found = _Study(config, here, seed, dtype, update - 1, answers)
                if found.answers_fit:
                    return found.run(
                        Path(checkpoint), sequences, held_out, factors, kernel, pairs, precision
                    )
            answers = None
            del found


class _Study:
    """Hold the policy before the step, its optimizer's state, and the pack. number: of the step in
    its iteration, from 0. answers: of the held-out set, if there is one.
    """

    def __init__(
        self,
        config: GRPOConfig,
        here: Ranks,
        seed: int,
        dtype: StudyDtype,
        number: int,
        answers: StoredAnswers | None = None,
    ) -> None:
        self.answers = answers
        self.answers_fit = True
        self.config = config
        self.here = here
        self.seed = seed
        self.dtype_name = dtype
        self.dtype = TORCH_DTYPES[dtype]
        self.packed = PackedTensors.load(config.packed)
        self.trained: Trained = load_trained(self._loaded_as(number), here)
        self.policy = self.trained.policy
        check_pack(self.packed, self.policy, config.model)
        self.packed = replayed(self.packed, self.policy, config)
        everything = self.policy.parameters_by_name()
        self.names = {name: p for name, p in everything.items() if p.requires_grad}
        self.origin = self._copies()
        """The iteration's start: the sampling policy."""
        seed_of = (config.seed, config.iteration)
        model = self.policy.decoder.config
        if answers is not None and not answers.fit(self.policy, config, here):
            self.answers_fit = False
            return
        self.steps = updates(self.packed, config.updates_per_iteration, seed_of, here, model)
        if number >= len(self.steps):
            steps = counted(len(self.steps), "step")
            raise ConfigError(
                "arguments", [f"--update is {number + 1}, and the iteration has {steps}"]
            )
        self.number = number
        self.step = self.steps[number]
        self.objective = objective_from(config)
        values = self.trained.values
        self.head = None if values is None else values.head
        self.first_step = self.trained.stepper.global_step
        self.rule = rule_of(config, self.first_step)
        self._pass_before(self.head, self.trained.rewards)
        self.momenta: list[Vector] = []
        """Between the iteration's earlier steps."""
        for earlier in range(number):
            logger.info("repeating the steps before it: %d of %d", earlier + 1, number)
            if earlier:
                self.momenta.append(self._momentum())
            self.prepass.choose(earlier)
            self._take(self.steps[earlier])
        self.start = self._copies() if number else self.origin
        """The step's start."""
        self.prepass.choose(number)
        self.moments = {
            name: tensor.clone() for name, tensor in state_tensors(self.policy, self._optimizer)
        }
        if number and config.optimizer == "adamw_8bit":
            self._leave_8_bits()
        taken = steps_taken(self.moments, self.trained.stepper.global_step)
        self.rule = rule_of(config, taken)
        self.scale = self._scale(self.step)
        self.eta = learning_rate(config, self.trained.stepper.global_step) * self.scale
        if not self.eta:
            raise self._unmoved("its learning rate is 0 (lr, lr_schedule, warmup_steps)")

    def _loaded_as(self, number: int) -> GRPOConfig:
        """Return the config to load by. Without earlier steps to repeat, moments of 8 bits are read
        out of their codes, as their own step does.
        """
        if self.config.optimizer == "adamw_8bit" and not number:
            return dataclasses.replace(self.config, optimizer="adamw")
        return self.config

    def _leave_8_bits(self) -> None:
        """Continue with AdamW, from the same moments: its step is that of 8 bits, but for the
        rounding of the new moments.
        """
        config = dataclasses.replace(self.config, optimizer="adamw")
        optimizer = make_optimizer(self.policy, config)
        assert isinstance(optimizer, torch.optim.Optimizer)
        for name, p in self.names.items():
            optimizer_state = {
                part: self.moments[f"{name}.{part}"].clone() for part in ("exp_avg", "exp_avg_sq")
            }
            count = self.moments[f"{name}.step"].reshape(()).to(p.device, copy=True)
            optimizer.state[p] = optimizer_state | {"step": count}
        self.trained.stepper.optimizer = optimizer

    def _unmoved(self, why: str) -> UnmovedStepError:
        which = f"update {self.number + 1} of iteration {self.config.iteration}"
        return UnmovedStepError(f"{which} moved nothing: {why}; study another", len(self.steps))

    @property
    def _as_trained(self) -> bool:
        """Whether the policy, as loaded, computes in the study's dtype."""
        held_in = {p.dtype for p in self.policy.parameters()}
        return self.policy.compute_dtype == self.dtype and held_in == {self.dtype}

    def _pass_before(
        self, head: ValueHead | None = None, rewards: RewardModel | None = None
    ) -> None:
        """Make the passes before the iteration's first step, with the current policy. Without a
        head or reward model, values and log-probabilities stay as last measured.
        """
        config = self.config
        inputs = (self.policy, self.packed, self.steps, self.objective, config, self.here)
        self.prepass = Prepass(*inputs, self.first_step, head, rewards)
        self.prepass.run()

    def _widen(self) -> None:
        """Compute in the study's dtype from here on, from the iteration's start."""
        self.policy.widen(self.dtype)
        if self.head is not None:
            self.head.to(self.dtype)
        for state in self._optimizer.state.values():
            for name in state.keys() & set(self.rule.moments):  # there is none at first
                state[name] = state[name].to(self.dtype)
        self.origin = {name: tensor.to(self.dtype) for name, tensor in self.origin.items()}
        self.start = {name: tensor.to(self.dtype) for name, tensor in self.start.items()}
        self._put(self.origin)
        self._pass_before()  # earlier steps have moved the head, and the reward model
        self._put(self.start)
        self.prepass.choose(self.number)

    def _copies(self) -> Vector:
        return {name: p.detach().clone() for name, p in self.names.items()}

    def _scale(self, step: Step) -> float:
        if self.config.lr_rows:
            return step.num_rows / self.config.lr_rows
        return 1.0

    def _accumulate(self, step: Step) -> StepResult:
        config = self.config
        here = self.here
        watch = Stopwatch(here.device)
        gradient = GradientStep(
            self.policy, config, here, watch, None, self.head, self.prepass.reference_head
        )
        return gradient.accumulate(step, self.objective.at(self.trained.stepper.global_step))

    def _take(self, step: Step) -> None:
        """Take a step as the recipe does."""
        stepper = self.trained.stepper
        scale = self._scale(step)
        stepper.begin(scale)
        result = self._accumulate(step)
        stepper.take(result.sums["not_finite"], result.first_bad, scale)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.trained.stepper.optimizer
        assert not isinstance(optimizer, OptimizerInBackward)
        return optimizer

    def run(
        self,
        checkpoint: Path,
        sequences: int,
        held_out: HeldOut | None,
        factors: Sequence[float],
        kernel: int,
        pairs: bool,
        precision: bool,
    ) -> dict[str, Any]:
        """Measure everything; arguments as for `study`."""
        logger.info(
            "studying optimizer step %d, number %d of %d in its iteration, made of %d answers",
            self.trained.stepper.global_step + 1,
            self.number + 1,
            len(self.steps),
            len(self.step.rows.samples),
        )
        found: dict[str, Any] = {
            "checkpoint": str(checkpoint),
            "global_step": self.trained.stepper.global_step + 1,
            "update": self.number + 1,
            "updates": len(self.steps),
            "lr": self.eta,
            "device": self.here.device.type,
            "dtype": self.dtype_name,
            "run_dtype": self.config.dtype,
        }
        as_run = self._logprobs()
        own = self._own_logprobs()
        gradients = None
        distance = None
        is_last = self.number + 1 == len(self.steps)
        if is_last and self.config.lora_rank is None and checkpoint.is_dir():
            gradients = self._gradients(self.step)
            distance = self._distance(checkpoint)
        exact = None
        if not self._as_trained:
            self._widen()
            exact = self._logprobs()
            gradients = None
        if self.dtype == torch.float64:
            prove_model(self.policy, self.step, self.config, self.start)
        found["precision"] = precision_of(
            self.dtype_name,
            self.config.dtype,
            self.here.device,
            kernel=bool(kernel),
            distance=distance is not None,
        ).to_json()

        logger.info("comparing the optimizer's vector with its step")
        update = self._update(self.step, gradients)
        whole = update.whole()
        del gradients
        found["step"] = self._step(whole)
        if distance is not None:
            found["step"]["checkpoint_distance"] = distance
        rows = self.step.rows
        studied = self.step
        if self.answers is None:
            entropy_half, update_half = halves(rows, derived_generator(self.seed, "study"))
            studied = part_of(self.step, update_half)
            update = self._update(studied)
            found["half_cosine"] = agreement(update.whole(), whole).cosine
        del whole  # of the model's size
        logprobs = as_run if exact is None else exact
        decode = decoder_of(self.config.model)
        found["covariance"] = covariance_outliers(rows, logprobs, decode)
        sampled = rows.logprobs[rows.labels != IGNORE_LABEL]
        found["mismatch"] = mismatch(sampled, as_run, own_N=own, exact_N=exact)
        for layer in adapted(self.policy).values():
            layer.dropout = 0.0  # the rest is about the sampling policy …
            layer.constant_lengths = False  # … and its derivatives
        self._put(self.origin)
        logger.info("measuring the entropy and its gradient")
        if self.answers is None:
            batch = self._drawn(entropy_half, sequences)
            found["entropy_batch"] = {"tasks": None}
        else:
            assert held_out is not None
            batch = self._held_out(self.answers, held_out)
            found["entropy_batch"] = self.answers.facts.to_json()
        once = dict.fromkeys(range(len(studied.rows.samples)), 1)
        made_of = EntropyBatch(self.policy, studied.rows, once, self.config, self.here)
        self._put(self.start)
        weights = batch.logprobs(self.start) - batch.start_logprobs
        found["entropy_batch"]["effective_size"] = batch.effective_size(weights)
        slope = batch.gradient(self.start)
        found |= self._response(batch, update, slope, factors)
        if precision:
            batches = batches_by_dtype(self.config, self.here, self.origin, batch)
            sweep = precision_sweep(batches, self.start, update.whole(), found, self.eta)
            found["precision_sweep"] = sweep.to_json()
        logger.info("splitting the effect: by earlier steps, tokens and answers")
        found["ages"] = [vars(one) for one in self._ages(slope, update)]
        chosen = tokens_of_high_covariance(
            studied.rows,
            self._logprobs(studied),
            self.config,
            self.config.seed + self.trained.stepper.global_step,
        )
        found["covariance"]["parts"] = token_parts(studied, chosen, self._force, slope, update)
        answers = Answers(
            own=made_of,
            batch=batch,
            force=lambda place: self._force(alone(studied, made_of.numbers[place])),
            parameters={name: self.names[name] for name in update.current},
            seed=self.seed,
        )
        if not kernel:
            return found | answers.effects(slope, update).to_json()
        kinds: dict[str, Vector | None] = {"sgd": None, self.rule.name: update.preconditioner}
        effects, kernels = answers.kernels(slope, update, kernel, kinds, pairs)
        end = moved(self.start, update.whole(), self.eta)
        changes = batch.logprobs(end) - batch.logprobs(self.start)
        return found | effects.to_json() | kernel_facts(kernels, effects, changes, self.eta)

    def _drawn(self, entropy_half: Sequence[int], sequences: int) -> EntropyBatch:
        """Return answers drawn from the half and from the iteration's later steps."""
        later = [one for step in self.steps[self.number + 1 :] for one in step.rows.samples]
        measured = [*later, *(self.step.rows.samples[place] for place in entropy_half)]
        unseen = {(one.task_id, one.sample) for one in measured}
        among = [
            place
            for place, one in enumerate(self.packed.samples)
            if (one.task_id, one.sample) in unseen
        ]
        times = draw(self.packed, among, sequences, derived_generator(self.seed, "draw"))
        return EntropyBatch(self.policy, self.packed, times, self.config, self.here)

    def _held_out(self, answers: StoredAnswers, held_out: HeldOut) -> EntropyBatch:
        """Return the batch of sampled answers. The first time, store their log-probabilities; they
        are used as stored, so the next study finds the same.
        """
        if not answers.facts.recorded:
            batch = answers.batch(self.policy, self.config, self.here)
            self.answers = answers = held_out.settle(answers, batch.label_logprobs())
        return answers.batch(self.policy, self.config, self.here)

    def _force(self, step: Step) -> Vector:
        """Return the gradient of a step's objective, downhill and not clipped."""
        self.policy.zero_grad()
        self._accumulate(step)
        found = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.neg_()
            for name, p in self.names.items()
        }
        self.policy.zero_grad()
        return found

    def _momentum(self) -> Vector:
        """Return a copy of the optimizer's momentum."""
        ends = f".{self.rule.momentum}"
        return {
            name.removesuffix(ends): tensor.clone()
            for name, tensor in state_tensors(self.policy, self._optimizer)
            if name.endswith(ends)
        }

    def _ages(self, slope: Vector, update: Update) -> list[Age]:
        """Split the earlier steps' part of ⟨∇H, v⟩ by their age; none for a first step, and for an
        optimizer without momentum.
        """
        taken = self.rule.step - 1
        if not taken or not self.rule.memory:
            return []
        now = {name: self.moments[f"{name}.{self.rule.momentum}"] for name in update.earlier}
        weights = {}
        for name, momentum in now.items():
            ratio = torch.where(momentum == 0, 0.0, update.earlier[name] / momentum)
            weights[name] = ratio * slope[name]
        momenta = [now, *reversed(self.momenta)]
        part = str(self.rule.momentum)
        return ages(weights, momenta, part, self.config.state, taken, self.rule.memory)

    @torch.no_grad()
    def _put(self, parameters: Vector) -> None:
        for name, p in self.names.items():
            p.copy_(parameters[name])

    def _update(self, step: Step, gradients: Vector | None = None) -> Update:
        """Return the optimizer's vector, as the recipe takes it, its preconditioner with the factor
        of clipping; parameters keep the clipped gradient. Give `gradients` if they are known and
        still there.
        """
        if gradients is None:
            gradients = self._gradients(step)
        update = self.rule.update(self.start, gradients, self.moments, self.dtype)
        for tensor in update.preconditioner.values():
            tensor *= self.clipped
        return update

    def _gradients(self, step: Step) -> Vector:
        """Return copies of the clipped gradient; it stays with the parameters."""
        self.policy.zero_grad()
        self._accumulate(step)
        limit = self.config.max_grad_norm
        norm = clip_gradients(self.policy.parameters(), limit)
        # As `torch.nn.utils.clip_grad_norm_` has it.
        self.clipped = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        return {name: p.grad.clone() for name, p in self.names.items() if p.grad is not None}

    @contextlib.contextmanager
    def _stepped(self) -> Iterator[None]:
        """Take the optimizer's own step with the present gradient, and take it back."""
        had_state = any(self._optimizer.state.values())
        self.trained.stepper.begin(self.scale)
        self._optimizer.step()
        yield
        self._put(self.start)
        if not had_state:
            self._optimizer.state.clear()
            return
        for name, p in self.names.items():
            for part, tensor in self._optimizer.state[p].items():
                tensor.copy_(self.moments[f"{name}.{part}"].reshape(tensor.shape))

    def _moved_by(self, before: Vector) -> Vector:
        """Return (the present parameters - `before`) / η."""
        moved_by = {}
        for name, p in self.names.items():
            difference = p.detach().double() - before[name].double()
            moved_by[name] = (difference / self.eta).to(self.dtype)
        return moved_by

    def _true_step(self) -> Vector:
        found = self._moved_by(self.start)
        if not any(bool(moved.any()) for moved in found.values()):
            raise self._unmoved("its gradient and the optimizer's moments are 0")
        return found

    @torch.no_grad()
    def _step(self, vector: Vector) -> Mapping[str, Any]:
        """Compare the vector with the optimizer's own step."""
        with self._stepped():
            true = self._true_step()
        found = vars(agreement(vector, true)) | {"norm": inner(true, true) ** 0.5}
        if self.config.optimizer == "adamw_8bit":
            gradient = {name: p.grad for name, p in self.names.items() if p.grad is not None}
            found["moment_rounding"] = moment_rounding(
                self.rule, self.start, gradient, self.moments
            )
        return found

    def _distance(self, checkpoint: Path) -> float:
        """Return the distance from the checkpoint to the end of the step with the present gradient,
        over the step's length.
        """
        with torch.no_grad(), self._stepped():
            true = self._true_step()
            after = self._copies()
            self.policy.load_folder(checkpoint)
            apart = self._moved_by(after)
        return math.sqrt(inner(apart, apart) / inner(true, true))

    @torch.no_grad()
    def _logprobs(self, step: Step | None = None) -> Tensor:
        """Return the policy's log-probabilities of the step's labels [N], in its own dtype of
        computation. None: of the whole studied step.
        """
        batches = (step or self.step).microbatches(self.config, self.here.device)
        return torch.cat(
            [
                self.policy(
                    *policy_inputs(one), HeadOptions(trained=one["trained"]), one.get("experts")
                ).logprobs
                for one in batches
            ]
        ).cpu()

    def _own_logprobs(self) -> Tensor | None:
        """Return the same under the sampler's weights, if these are others and still there."""
        folder = self.config.sampler_model
        if folder is None or not Path(folder).exists():
            return None
        with as_policy_of(self.policy, self.config, folder):
            found = self._logprobs()
        self._put(self.start)  # the restored weights may be the iteration's start
        return found

    def _response(
        self, batch: EntropyBatch, update: Update, gradient: Vector, factors: Sequence[float]
    ) -> Mapping[str, Any]:
        vector = update.whole()
        eta = self.eta
        slope = inner(vector, gradient)
        # Less would be lost in rounding.
        small = eta * (0.01 if self.policy.compute_dtype == torch.float64 else 1.0)
        ends = [
            inner(vector, batch.gradient(self.start | moved(self.start, vector, side)))
            for side in (small, -small)
        ]
        curvature = (ends[0] - ends[1]) / (2 * small)
        here = batch.values(self.start)[0]
        sweep = []
        logger.info("measuring the entropy after %s", counted(len(factors), "step"))
        for factor in counted_off(factors, "steps of the sweep"):
            at = eta * factor
            values, log_w = batch.values(self.start | moved(self.start, vector, at))
            change = batch.mean(values - here)
            orders = at * slope, at * at / 2 * curvature
            sweep.append(
                Response(
                    at,
                    change.value,
                    change.error,
                    *orders,
                    batch.effective_size(log_w),
                )
            )
        # Here: weighed, of the second kind.
        plain, better = batch.entropies if not self.number else [batch.mean(here)] * 2
        return {
            "sequences": int(batch.times.sum()),
            "entropy": {
                "plain": vars(plain),
                "rao_blackwell": vars(better),
                "by_position": batch.by_position,
            },
            "slope": slope,
            "parts": {name: inner(part, gradient) for name, part in update.parts().items()},
            "curvature": curvature,
            "sweep": [vars(one) for one in sweep],
            "linear_regime": linear_regime(sweep),
        }


def decoder_of(model: str) -> Callable[[list[int]], str]:
    """Return the function from token ids to text: the model's tokenizer, or without one, the
    numbers.
    """
    path = Path(model, "tokenizer.json")
    if not path.is_file():
        return lambda ids: " ".join(map(str, ids))
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
