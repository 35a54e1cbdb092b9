"""Study one optimizer step of a run: what AdamW did, and how the entropy of whole answers answers to it.

The folder of an iteration holds what its training started from: grpo.yaml names model, state and pack. From these,

    step      AdamW's vector by hand against the true step of the optimizer, and against the checkpoint
    entropy   of the answers, by both estimates
    response  H(θ + ηv) over a sweep of η, by importance weights on the same answers, against δH₁ = η⟨∇H, v⟩ and the second order
    parts     ⟨∇H, v⟩ from this step's gradient, from earlier ones through the momentum, and from weight decay

The update must not be made of the answers on which its effect is measured, or the effect is overstated. So half of the answers of
each prompt, drawn at random, make the update of `response`, and the other half the entropy batch: prompts drawn uniformly with
replacement, one answer for each. `step` is about the whole batch, and `half_cosine` compares the two vectors. Only prompts with a
signal are in the pack, so the entropy is that of their answers.

vᵀ∇²H v is the difference of two gradients at θ ± εv: the kernels of head and attention have no second derivative of their own.
For one process; adapters alone where the run trains adapters. Never run on a GPU.
"""

import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import IGNORE_LABEL, PackedTensors
from ttrl.errors import ConfigError, RunFolderError
from ttrl.instruments.entropy import (
    Mean,
    by_sequence,
    effective_size,
    entropy_estimates,
    importance_entropy,
    mean_over,
    others_mean,
)
from ttrl.instruments.linear_response import (
    AdamW,
    Response,
    Update,
    Vector,
    adamw_update,
    agreement,
    inner,
    linear_regime,
    moved,
)
from ttrl.system.files import write_json
from ttrl.training.batches import check_pack, policy_inputs, sample_keys, updates
from ttrl.training.objective.objective import objective_from
from ttrl.training.optimizer.optimizer import OptimizerInBackward, learning_rate
from ttrl.training.optimizer.state import state_tensors
from ttrl.training.parallel.distributed import Ranks, derived_generator, ranks
from ttrl.training.parallel.gradients import clip_gradients
from ttrl.training.policy.policy import HeadOptions, Policy
from ttrl.training.prepass import Prepass
from ttrl.training.resident import Trained, load_trained
from ttrl.training.step import GradientStep
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainProgress

FACTORS = (-4.0, -1.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Of the learning rate: the sweep."""


def study(
    checkpoint: str | Path,
    *,
    sequences: int = 256,
    factors: Sequence[float] = FACTORS,
    dtype: Literal["fp32", "fp64"] = "fp32",
    seed: int = 0,
) -> dict[str, Any]:
    """Study the first optimizer step of the iteration that made `checkpoint`. sequences: of the entropy batch. dtype: of all but
    the optimizer's own step; in fp32, small steps are lost in rounding. Returns what study.json holds. Raises RunFolderError
    where something that the iteration started from is gone, ConfigError for an optimizer that is not plain AdamW."""
    with tempfile.TemporaryDirectory(prefix="ttrl-study-") as scratch:
        config = _config_of(Path(checkpoint), scratch)
        with ranks(config) as here:
            return _Study(config, here, seed).run(Path(checkpoint), sequences, factors, dtype)


def _config_of(checkpoint: Path, scratch: str) -> GRPOConfig:
    path = checkpoint.parent / "grpo.yaml"
    if not path.is_file():
        raise RunFolderError(
            f"{path} is not there; give the checkpoint of an iteration that was trained, such as "
            "runs/NAME/iterations/0007/checkpoint"
        )
    values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    config = GRPOConfig.parse(values, str(path))
    for name in ("model", "packed", "state"):
        if (value := getattr(config, name)) is not None and not Path(value).exists():
            raise RunFolderError(
                f"{name} of {path} is gone: {value}; a run keeps the states of its last two iterations, and the checkpoints that "
                "keep_checkpoints says: study one of those, from the folder that the run was started in"
            )
    if config.optimizer != "adamw" or config.optimizer_in_backward or config.optimizer_on_cpu or config.tensor_parallel > 1:
        raise ConfigError(str(path), ["only plain AdamW in one process can be studied (optimizer, tensor_parallel)"])
    return dataclasses.replace(config, output_dir=scratch, sampler_model=None, sampler_version=None, follow=None)


class _Study:
    """The policy before the step, its optimizer's state, and the pack."""

    def __init__(self, config: GRPOConfig, here: Ranks, seed: int) -> None:
        self.config, self.here, self.seed = config, here, seed
        self.packed = PackedTensors.load(config.packed)
        self.trained: Trained = load_trained(config, here)
        self.policy = self.trained.policy
        check_pack(self.packed, self.policy, config.model)
        self.names = {name: p for name, p in self.policy.parameters_by_name().items() if p.requires_grad}
        self.moments = {name: tensor.clone() for name, tensor in state_tensors(self.policy, self._optimizer)}
        self.start = {name: p.detach().clone() for name, p in self.names.items()}
        self.eta, self.scale = 0.0, 1.0

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.trained.stepper.optimizer
        assert not isinstance(optimizer, OptimizerInBackward)
        return optimizer

    def run(self, checkpoint: Path, sequences: int, factors: Sequence[float], dtype: str) -> dict[str, Any]:
        whole = self._update(self.packed)
        found: dict[str, Any] = {"checkpoint": str(checkpoint), "global_step": self.trained.stepper.global_step + 1}
        found |= {"lr": self.eta, "dtype": dtype, "step": self._step(whole.whole(), checkpoint)}
        entropy_half, update_half = halves(self.packed, derived_generator(self.seed, "study"))
        half = self._update(only(self.packed, update_half))
        found["half_cosine"] = agreement(half.whole(), whole.whole()).cosine
        if dtype == "fp64":
            self.policy.double()
            self.policy.compute_dtype = torch.float64
            self.start = {name: tensor.double() for name, tensor in self.start.items()}
        times = draw(self.packed, entropy_half, sequences, derived_generator(self.seed, "draw"))
        batch = EntropyBatch(self.policy, self.packed, times, self.config, self.here)
        return found | self._response(batch, half, factors)

    def _update(self, packed: PackedTensors) -> Update:
        """Return AdamW's vector of the first step on `packed`, as the recipe takes it; parameters keep the clipped gradient."""
        config, here, (policy, stepper, values) = self.config, self.here, self.trained
        self.policy.zero_grad()
        steps = updates(packed, config.updates_per_iteration, (config.seed, config.iteration), here, policy.decoder.config)
        head = None if values is None else values.head
        objective = objective_from(config)
        prepass = Prepass(policy, packed, steps, objective, config, here, stepper.global_step, head)
        prepass.run()
        prepass.choose(0)
        watch, progress = Stopwatch(here.device), TrainProgress(0, here)
        gradient = GradientStep(policy, config, here, watch, progress, head, prepass.reference_head)
        gradient.accumulate(steps[0], objective.at(stepper.global_step))
        clip_gradients(policy.parameters(), config.max_grad_norm)
        if not self.eta:
            self.scale = steps[0].num_rows / config.lr_rows if config.lr_rows else 1.0
            self.eta = learning_rate(config, stepper.global_step) * self.scale
        gradients = {name: p.grad.clone() for name, p in self.names.items() if p.grad is not None}
        taken = max(int(value) for name, value in self.moments.items() if name.endswith(".step"))
        settings = AdamW(config.beta1, config.beta2, config.eps, config.weight_decay, taken + 1)
        return adamw_update(self.start, gradients, self.moments, settings)

    @torch.no_grad()
    def _step(self, vector: Vector, checkpoint: Path) -> dict[str, Any]:
        """Take the optimizer's own step with the gradient that is there, compare, and take it back."""
        self.trained.stepper.begin(self.scale)
        self._optimizer.step()
        true = {name: (p.double() - self.start[name].double()) / self.eta for name, p in self.names.items() if name in vector}
        facts: dict[str, Any] = vars(agreement(vector, true)) | {"norm": inner(true, true) ** 0.5}
        if self.config.updates_per_iteration == 1 and self.config.lora_rank is None:
            after = {name: p.detach().clone() for name, p in self.names.items()}
            self.policy.load_folder(checkpoint)
            apart = {name: (p.double() - after[name].double()) / self.eta for name, p in self.names.items() if name in vector}
            facts["checkpoint_distance"] = (inner(apart, apart) / inner(true, true)) ** 0.5
        for name, p in self.names.items():
            p.copy_(self.start[name])
        return facts

    def _response(self, batch: "EntropyBatch", update: Update, factors: Sequence[float]) -> dict[str, Any]:
        vector, eta = update.whole(), self.eta
        gradient = batch.gradient(self.start)
        slope = inner(gradient, vector)
        small = eta * (0.01 if self.policy.compute_dtype == torch.float64 else 1.0)  # less would be lost in rounding
        ends = [inner(batch.gradient(moved(self.start, vector, side)), vector) for side in (small, -small)]
        curvature = (ends[0] - ends[1]) / (2 * small)
        here, sweep = batch.values(self.start)[0], []
        for factor in factors:
            at = eta * factor
            values, log_w = batch.values(moved(self.start, vector, at))
            change = batch.mean(values - here)
            orders = at * slope, at * at / 2 * curvature
            sweep.append(Response(at, change.value, change.error, *orders, effective_size(log_w.repeat_interleave(batch.times))))
        plain, better = batch.entropies
        return {
            "sequences": int(batch.times.sum()),
            "entropy": {"plain": vars(plain), "rao_blackwell": vars(better)},
            "slope": slope,
            "parts": {name: inner(gradient, part) for name, part in update.parts().items()},
            "curvature": curvature,
            "sweep": [vars(one) for one in sweep],
            "linear_regime": linear_regime(sweep),
        }


def halves(packed: PackedTensors, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Deal the samples of each task to two halves at random, by their numbers in the table; the second gets the odd one."""
    tasks: dict[str, list[int]] = {}
    for number, one in enumerate(packed.samples):
        tasks.setdefault(one.task_id, []).append(number)
    first: list[int] = []
    second: list[int] = []
    for numbers in tasks.values():
        mixed = [numbers[place] for place in torch.randperm(len(numbers), generator=generator).tolist()]
        first += mixed[: len(mixed) // 2]
        second += mixed[len(mixed) // 2 :]
    return first, second


def draw(packed: PackedTensors, among: Sequence[int], count: int, generator: torch.Generator) -> Counter[int]:
    """Draw `count` samples: tasks uniformly with replacement, one of the samples in `among` of each. Returns how often each was
    drawn."""
    tasks: dict[str, list[int]] = {}
    for number in among:
        tasks.setdefault(packed.samples[number].task_id, []).append(number)
    if not tasks:
        raise RunFolderError("no task of the pack has two samples, one for the update and one to measure its effect on")
    groups = list(tasks.values())
    times: Counter[int] = Counter()
    for place in torch.randint(len(groups), (count,), generator=generator).tolist():
        group = groups[place]
        times[group[int(torch.randint(len(group), (), generator=generator))]] += 1
    return times


def only(packed: PackedTensors, samples: Sequence[int]) -> PackedTensors:
    """Return the pack with the labels of these samples alone, by their numbers in the table."""
    others = ~torch.isin(packed.sample_ids, torch.tensor(list(samples), dtype=torch.int64))
    changed = {"labels": IGNORE_LABEL, "weights": 0.0, "advantages": 0.0}
    return dataclasses.replace(packed, **{name: getattr(packed, name).masked_fill(others, v) for name, v in changed.items()})


class EntropyBatch:
    """Drawn answers, on which the entropy is measured under any parameters. `times`: by number in the pack's table."""

    def __init__(self, policy: Policy, packed: PackedTensors, times: Mapping[int, int], config: GRPOConfig, here: Ranks) -> None:
        self._policy, self._device = policy, here.device
        full = {id(p): name for name, p in policy.named_parameters()}
        self._full_names = {name: full[id(p)] for name, p in policy.parameters_by_name().items()}
        chosen = only(packed, list(times))
        (step,) = updates(chosen, 1, (0, 0), here, policy.decoder.config)
        self._batches = list(step.microbatches(config, here.device))
        drawn = sample_keys([packed.samples[number] for number in times])
        counted = dict(zip(map(tuple, drawn.tolist()), times.values(), strict=True))
        keys = torch.cat([_owners(batch) for batch in self._batches])
        self.times = torch.tensor([counted[tuple(key)] for key in keys.tolist()], device=here.device)
        self._tasks = keys[:, 0]
        with torch.no_grad():
            seen = list(self._tables(None))
        self._start = [logprobs for logprobs, _ in seen]
        rows = [row for _, entropies in seen for row in entropies]
        baseline = others_mean(pad_sequence(rows, batch_first=True), self.times)
        parts = baseline.split([len(logprobs) for logprobs in self._start])
        self._baselines = [part[:, : start.shape[1]] for part, start in zip(parts, self._start, strict=True)]
        estimates = [entropy_estimates(*pair) for pair in seen]
        self.entropies = tuple(self.mean(torch.cat([one[which] for one in estimates])) for which in (0, 1))

    def mean(self, values_S: Tensor) -> Mean:
        """Return the mean over draws, with its error over prompts."""
        return mean_over(values_S.repeat_interleave(self.times), self._tasks.repeat_interleave(self.times))

    @torch.no_grad()
    def values(self, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return J [S] and log w [S] under other parameters; the mean of J is an unbiased estimate of their entropy."""
        parts = [
            importance_entropy(*tables, start, baseline)
            for tables, start, baseline in zip(self._tables(parameters), self._start, self._baselines, strict=True)
        ]
        return torch.cat([values for values, _ in parts]), torch.cat([log_w for _, log_w in parts])

    def gradient(self, parameters: Mapping[str, Tensor]) -> Vector:
        """Return an unbiased estimate of ∇H at `parameters`."""
        leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
        total, done = int(self.times.sum()), 0
        for tables, start, baseline in zip(self._tables(leaves, grad=True), self._start, self._baselines, strict=True):
            values, _ = importance_entropy(*tables, start, baseline)
            ((values * self.times[done : done + len(values)]).sum() / total).backward()
            done += len(values)
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}

    def _tables(self, parameters: Mapping[str, Tensor] | None, grad: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-probabilities and entropies [S, T] of each microbatch."""
        named = {self._full_names[name]: value for name, value in (parameters or {}).items()}
        for batch in self._batches:
            options = HeadOptions(trained=batch["trained"], entropy_grad=grad)
            out = functional_call(self._policy, named, (*policy_inputs(batch), options))
            samples = batch["sample_ids"].flatten()[batch["trained"]]
            yield by_sequence(out.logprobs, samples)[0], by_sequence(out.entropy, samples)[0]


def _owners(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the keys of the samples that have labels, in the order of `by_sequence`."""
    return batch["sample_keys"][torch.unique(batch["sample_ids"].flatten()[batch["trained"]])]


def study_text(found: Mapping[str, Any]) -> str:
    """Say what was found, for a terminal."""
    step, entropy, parts, regime = found["step"], found["entropy"], found["parts"], found["linear_regime"]
    lines = [
        f"Step {found['global_step']}, lr {found['lr']:.3g}: AdamW's vector by hand against the true step: cosine "
        f"{step['cosine']:.7f}, norm {step['norm_ratio']:.6f} of its {step['norm']:.4g}",
        f"Entropy of an answer: {entropy['rao_blackwell']['value']:.4f} ± {entropy['rao_blackwell']['error']:.4f} nats "
        f"(plain: {entropy['plain']['value']:.4f} ± {entropy['plain']['error']:.4f}), {found['sequences']} answers",
        f"⟨∇H, v⟩ = {found['slope']:.4g}: " + ", ".join(f"{name} {value:.4g}" for name, value in parts.items()),
        f"vᵀ∇²H v = {found['curvature']:.4g}",
        "",
        f"{'η / lr':>8} {'measured δH':>24} {'first order':>12} {'with second':>12} {'ESS':>6}",
    ]
    for one in sorted(found["sweep"], key=lambda one: one["eta"]):
        measured = f"{one['measured']:.4g} ± {one['error']:.2g}"
        both = one["first"] + one["second"]
        ess = one["effective_size"]
        lines.append(f"{one['eta'] / found['lr']:>8.3g} {measured:>24} {one['first']:>12.4g} {both:>12.4g} {ess:>6.2f}")
    within = "nowhere in this sweep"
    if regime:
        within = f"from {regime[0] / found['lr']:.3g} to {regime[1] / found['lr']:.3g} learning rates"
    return "\n".join([*lines, "", f"The first order is within 10% of what was measured {within}."])


def write_study(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write study.json and study.png into a folder. Raises StorageError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, picture = folder / "study.json", folder / "study.png"
    write_json(path, json.loads(json.dumps(found)))
    draw_response(found, picture)
    return [path, picture]


def draw_response(found: Mapping[str, Any], path: Path) -> None:
    """Draw what was measured and what the orders predict, over η in learning rates."""
    from matplotlib.figure import Figure

    sweep = sorted(found["sweep"], key=lambda one: one["eta"])
    x = [one["eta"] / found["lr"] for one in sweep]
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.errorbar(x, [one["measured"] for one in sweep], [one["error"] for one in sweep], fmt="o", label="measured")
    above.plot(x, [one["first"] for one in sweep], label="first order")
    above.plot(x, [one["first"] + one["second"] for one in sweep], "--", label="with second order")
    above.set(ylabel="change of entropy, nats", title=f"step {found['global_step']}: H(θ + ηv) − H(θ)")
    below.plot(x, [one["effective_size"] for one in sweep], "o-")
    below.set(xlabel="η in learning rates", ylabel="effective\nsample size", ylim=(0, 1.05))
    for axes in (above, below):
        axes.set_xscale("symlog", linthresh=0.25)
    if regime := found["linear_regime"]:
        above.axvspan(regime[0] / found["lr"], regime[1] / found["lr"], alpha=0.1, label="first order within 10%")
    above.legend()
    figure.savefig(path, dpi=150)
