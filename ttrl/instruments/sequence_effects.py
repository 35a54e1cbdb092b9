"""Measure what each answer of an update does: to the entropy, and to the log-probability of every
other answer (`ttrl.instruments.fisher` has the formulas).

Each answer's own part of the update is its force f_j = -∇loss_j, through the recipe's own loss with
clipping, KL and any objective: Σ_j f_j is the whole gradient. One backward pass gives the force,
and one the gradient of the answer's entropy. All products with whole vectors are exact; only the
matrix of pairs is projected, if whole gradients do not fit. The preconditioner of an update here
holds the factor of clipping, too: its current part is P·Σ_j f_j.

Shapes: N answers of the entropy batch, M of the update, r sums of a projection.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttrl.data.packing.pack import IGNORE_LABEL
from ttrl.instruments.entropy_batch import EntropyBatch, by_task, counted_off
from ttrl.instruments.fisher import (
    MOST_WHOLE,
    Projection,
    Split,
    cosines,
    dot,
    fit_of,
    products,
    projection_error,
    projection_of,
    row_of,
    score_form,
    score_split,
)
from ttrl.instruments.linear_response import Vector
from ttrl.instruments.update_rules import Update
from ttrl.training.batches import Update as Step


@dataclass(frozen=True)
class Effects:
    """Hold the effects of the update's answers on the entropy, per unit of η."""

    split: Split
    """On the answers of the update itself."""
    on_entropy: list[float]
    """On the entropy batch, of each answer of the update [M]: their sum is the part of this step's
    gradient in ⟨∇H, v⟩."""
    same_prompt: float
    """The part of these on answers to the same prompt, if the entropy batch has such answers."""
    tasks: list[str]
    """Of each answer of the update [M]: all rows are in this order, by prompt."""

    def to_json(self) -> dict[str, Any]:
        """Return the parts of study.json."""
        whole = math.fsum(self.on_entropy)
        return {
            "one_batch": self.split.to_json(),
            "current": {
                "same_prompt": self.same_prompt,
                "other_prompts": whole - self.same_prompt,
                "by_answer": self.on_entropy,
                "tasks": self.tasks,
            },
        }


@dataclass
class _Rows:
    """Rows of gradients for the kernel, of one preconditioner."""

    preconditioner: Vector | None
    projection: Projection | None
    entropy: list[Tensor] = field(default_factory=list)
    update: list[Tensor] = field(default_factory=list)
    forces: list[Tensor] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the update's answers, as …"""
    weights: list[float] = field(default_factory=list)
    """… their importance weights."""

    def row(self, vector: Mapping[str, Tensor]) -> Tensor:
        return row_of(vector, self.projection, self.preconditioner)


@dataclass(frozen=True)
class Pairs:
    """Hold the kernel of one preconditioner by pairs of answers."""

    cosines: Tensor
    """Of the gradients of log π, of N answers of the entropy batch and M of the update
    [N + M, N + M]."""
    effects: Tensor
    """K·A [N, M]: of each force on each log-probability, per unit of η."""
    error: float | None
    """`projection_error` of `effects`; None without a projection."""
    score_split: Split
    """The effect on the update's own answers by formula (2), per unit of η."""


@dataclass(frozen=True)
class Kernel:
    """Hold the kernel of one preconditioner."""

    moves: Tensor
    """K·A [N], summed over the forces: of all of them on each log-probability, per unit of η,
    exact."""
    score_form: float
    """The effect of the forces on the entropy batch by formula (2), per unit of η, exact."""
    pairs: Pairs | None


@dataclass(frozen=True)
class Kernels:
    """Hold the kernels and the moves of N answers of the entropy batch."""

    kinds: dict[str, Kernel]
    sums: int | None
    """r; None: whole gradients."""
    moves: dict[str, Tensor]
    """δ log π/η [N] by each part of the vector, exact."""


@dataclass
class Answers:
    """Take gradients of single answers, at the parameters of the step's start.

    own: the update's answers as an entropy batch. batch: the entropy batch. force: the gradient of
    an answer's part of the objective, -∇loss_j, by its place in `own`, in new tensors each time
    (they are scaled in place). parameters: those with a gradient.
    """

    own: EntropyBatch
    batch: EntropyBatch
    force: Callable[[int], Vector]
    parameters: Mapping[str, Tensor]
    seed: int = 0
    most_whole: int = MOST_WHOLE
    """The most bytes of gradients to hold without a projection."""

    def effects(
        self, slope: Vector, update: Update, rows: Mapping[str, _Rows] | None = None
    ) -> Effects:
        """Split this step's effect. slope: ∇H of the entropy batch."""
        on_entropy = []
        tasks = []
        own = []
        naive = []
        prompts = []
        same_prompt = []
        measured = {
            self.batch.samples[places[0]].task_id: places for places in by_task(self.batch.samples)
        }
        for places in counted_off(by_task(self.own.samples), "gradients of the update's prompts"):
            force_sum: Vector = {}
            slope_sum: Vector = {}
            for place in places:
                whole = self.force(place)
                force = {name: whole[name] for name in self.parameters}
                part, logprob = self.own.sequence(place)
                scalars = [part, logprob] if rows else [part]
                (entropy, *gradient) = self._gradients(scalars)
                for one in (rows or {}).values():
                    one.forces.append(one.row(force))
                    one.update.append(one.row(gradient[0]))
                    one.logprobs.append(float(logprob.detach()))
                    one.weights.append(_weight(self.own, place, one.logprobs[-1]))
                for name, tensor in force.items():
                    tensor *= update.preconditioner[name]
                on_entropy.append(dot(slope, force))
                tasks.append(self.own.samples[place].task_id)
                own.append(dot(entropy, force))
                naive.append(dot(entropy, update.current))
                _add(force_sum, force)
                _add(slope_sum, entropy)
            prompts.append(dot(slope_sum, force_sum))
            for place in measured.get(self.own.samples[places[0]].task_id, []):
                (entropy,) = self._gradients([self.batch.sequence(place)[0]])
                same_prompt.append(dot(entropy, force_sum))
        split = Split(
            own=math.fsum(own),
            same_prompt=math.fsum(prompts) - math.fsum(own),
            other_prompts=math.fsum(naive) - math.fsum(prompts),
            prompts=len(prompts),
        )
        return Effects(split, on_entropy, math.fsum(same_prompt), tasks)

    def kernels(
        self,
        slope: Vector,
        update: Update,
        count: int,
        kinds: Mapping[str, Vector | None],
        pairs: bool = True,
    ) -> tuple[Effects, Kernels]:
        """Do the same, and make the kernels of the first `count` answers of the entropy batch.
        kinds: preconditioners by name; None: none. pairs: also of all pairs, at a backward pass for
        each answer of the update, and a row of each gradient.
        """
        count = min(count, len(self.batch.samples))
        rows: dict[str, _Rows] = {}
        projection = None
        if pairs:
            held = len(kinds) * (count + 2 * len(self.own.samples))
            projection = projection_of(self.parameters, held, self.seed, self.most_whole)
            rows = {name: _Rows(one, projection) for name, one in kinds.items()}
        effects = self.effects(slope, update, rows)
        parts = update.parts()
        moves: dict[str, list[float]] = {name: [] for name in parts}
        exact: dict[str, list[float]] = {name: [] for name in kinds}
        logprobs = []
        weights = []
        for place in counted_off(range(count), "gradients of the entropy batch's answers"):
            _, logprob = self.batch.sequence(place)
            logprobs.append(float(logprob.detach()))
            weights.append(_weight(self.batch, place, logprobs[-1]))
            (own,) = self._gradients([logprob])
            for name, part in parts.items():
                moves[name].append(dot(own, part))
            for name, preconditioner in kinds.items():
                if preconditioner is None:
                    exact[name].append(_along_gradient(own, update))
                else:
                    exact[name].append(moves["current"][-1])
            for one in rows.values():
                one.entropy.append(one.row(own))
        found = {}
        for name in kinds:
            along = _doubles(exact[name])
            found[name] = Kernel(
                moves=along,
                score_form=score_form(_doubles(logprobs), along, _doubles(weights)),
                pairs=_pairs(rows[name], along, effects.tasks) if pairs else None,
            )
        kernels = Kernels(
            kinds=found,
            sums=None if projection is None else projection.size,
            moves={name: _doubles(one) for name, one in moves.items()},
        )
        return effects, kernels

    def _gradients(self, scalars: list[Tensor]) -> list[Vector]:
        """Return the gradients of scalars of one graph."""
        found = []
        for number, scalar in enumerate(scalars, 1):
            gradients = torch.autograd.grad(
                scalar,
                list(self.parameters.values()),
                retain_graph=number < len(scalars),
                allow_unused=True,
            )
            pairs = zip(self.parameters.items(), gradients, strict=True)
            found.append(
                {name: torch.zeros_like(p) if own is None else own for (name, p), own in pairs}
            )
        return found


def _add(total: Vector, vector: Mapping[str, Tensor]) -> None:
    """Add a vector in place; an empty total takes the vector itself."""
    for name, value in vector.items():
        if name in total:
            total[name] += value
        else:
            total[name] = value


@torch.no_grad()
def _along_gradient(vector: Vector, update: Update) -> float:
    """Return the product with the step's gradient, clipped as in the step: forces are not."""
    products = []
    for name, scale in update.preconditioner.items():
        gradient = torch.where(scale == 0, 0.0, update.current[name] / scale)
        products.append(float((vector[name] * gradient).sum(dtype=torch.float64)))
    return math.fsum(products)


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _weight(batch: EntropyBatch, place: int, logprob: float) -> float:
    """Return the importance weight of an answer."""
    return math.exp(logprob - float(batch.start_logprobs[place]))


def _stacked(*lists: list[Tensor]) -> Tensor:
    """Stack the rows of all lists, and empty these: gradients are not held twice."""
    stacked = torch.stack([row for one in lists for row in one])
    for one in lists:
        one.clear()
    return stacked


def _pairs(rows: _Rows, exact: Tensor, tasks: Sequence[str]) -> Pairs:
    """exact: K·A of the entropy batch [N]. tasks: of the update's answers, in order."""
    both = _stacked(rows.entropy, rows.update)
    forces = _stacked(rows.forces)
    entropy = both[: len(exact)]
    update = both[len(exact) :]
    error = None
    if rows.projection is not None:
        error = projection_error(entropy, forces.sum(dim=0), exact)
    return Pairs(
        cosines=cosines(both, both).cpu(),
        effects=products(entropy, forces).cpu(),
        error=error,
        score_split=score_split(
            _doubles(rows.logprobs),
            products(update, forces).cpu(),
            tasks,
            _doubles(rows.weights),
        ),
    )


def token_parts(
    step: Step,
    chosen: Mapping[str, Tensor],
    force: Callable[[Step], Vector],
    slope: Vector,
    update: Update,
) -> list[dict[str, object]]:
    """Return what tokens give to this step's part of ⟨∇H, v⟩: what it loses without their
    advantages. The first entry is that of all tokens.

    chosen: tokens by name, bool [T] over the step's labels. force: the gradient of a step's
    objective, -∇loss, in new tensors. slope: ∇H.
    """
    rows = step.rows
    trained = rows.labels != IGNORE_LABEL
    whole = dot(slope, update.current)
    parts: list[dict[str, object]] = [
        {"name": "all tokens", "tokens": int(trained.sum()), "slope": whole}
    ]
    for name, ours in chosen.items():
        if not ours.any():
            parts.append({"name": name, "tokens": 0, "slope": 0.0})
            continue
        advantages = rows.advantages.clone()
        advantages[trained] = advantages[trained].masked_fill(ours, 0.0)
        others = dataclasses.replace(step, rows=dataclasses.replace(rows, advantages=advantages))
        rest = force(others)
        for parameter, scale in update.preconditioner.items():
            rest[parameter] *= scale
        parts.append({"name": name, "tokens": int(ours.sum()), "slope": whole - dot(slope, rest)})
    return parts


def kernel_facts(kernels: Kernels, effects: Effects, changes: Tensor, eta: float) -> dict[str, Any]:
    """Return the kernel's part of study.json, and its "matrices". changes: of the entropy batch's
    log-probabilities by the step, of which the first N are the kernel's."""
    moved = {name: eta * one for name, one in kernels.moves.items()}
    predicted = torch.stack(list(moved.values())).sum(dim=0)
    measured = changes[: len(predicted)].double().cpu()
    count = len(predicted)
    same = torch.tensor([[one == other for other in effects.tasks] for one in effects.tasks])
    others = ~torch.eye(len(same), dtype=torch.bool)
    kinds: dict[str, dict[str, object]] = {}
    matrices: dict[str, Tensor] = {"predicted": predicted, "measured": measured}
    for name, kernel in kernels.kinds.items():
        kinds[name] = {
            "fit": vars(fit_of((eta * kernel.moves).tolist(), measured.tolist())),
            "score_form": kernel.score_form,
        }
        if kernel.pairs is None:
            continue
        update = kernel.pairs.cosines[count:, count:]
        kinds[name] |= {
            "projection_error": kernel.pairs.error,
            "same_prompt_cosine": _mean(update[same & others]),
            "other_prompts_cosine": _mean(update[~same]),
            "entropy_cosine": _mean(kernel.pairs.cosines[:count, count:]),
            "score_split": kernel.pairs.score_split.to_json(),
        }
        matrices[f"{name}.cosines"] = kernel.pairs.cosines.float()
        matrices[f"{name}.effects"] = kernel.pairs.effects.float()
    return {
        "kernel": {
            "answers": count,
            "update_answers": len(effects.tasks),
            "sums": kernels.sums,
            "kinds": kinds,
            "fit": vars(fit_of(predicted.tolist(), measured.tolist())),
            "predicted": predicted.tolist(),
            "measured": measured.tolist(),
            "parts": {name: one.tolist() for name, one in moved.items()},
        },
        "matrices": matrices,
    }


def _mean(values: Tensor) -> float | None:
    if len(values.flatten()):
        return float(values.mean())
    return None
