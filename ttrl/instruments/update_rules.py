"""Compute an optimizer's step by hand: its update vector, the parts of it, and its preconditioner.

Every optimizer takes θ ← θ + η·v, and v is the sum of three parts:

    current   from this step's gradient g: -a·P·g
    earlier   from the gradients of earlier steps, through the momentum
    decay     from weight decay

P is diagonal, and a is a number:

    AdamW     P = 1/(√(s/(1 - β₂ᵗ)) + ε),  s ← β₂s + (1 - β₂)g²
              v = -P·m/(1 - β₁ᵗ) - λθ,     m ← β₁m + (1 - β₁)g      a = (1 - β₁)/(1 - β₁ᵗ)
    RMSprop   P = 1/(√s + ε),              s ← β₂s + (1 - β₂)h²     h = g + λθ
              v = -b,                      b ← μb + P·h             a = 1
    SGD       v = -b,                      b ← μb + h               a = 1, P = 1

With 8 bits, AdamW reads its moments out of their codes, steps in fp32, and rounds the new moments
into codes: the same v, from rounded moments.

SGD's and RMSprop's momentum b holds the weight decay of earlier steps as well; it counts as
`earlier`. v is linear in the momentum for a given P, so a split of the momentum by age
(`ttrl.instruments.momentum`) splits `earlier`.
"""

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ttrl.configs import TrainingConfig
from ttrl.instruments.linear_response import Vector
from ttrl.training.optimizer.state import rounded_to_8_bits

Moments = Mapping[str, Tensor]
"""An optimizer's state, "NAME.exp_avg" and the like, as `state_tensors` yields it."""


@dataclass(frozen=True)
class Update:
    """Hold an optimizer's vector v, as the sum of its parts."""

    current: Vector
    """From this step's gradient."""
    earlier: Vector
    """From the earlier momentum."""
    decay: Vector
    """From weight decay."""
    preconditioner: Vector
    """a·P: this step's gradient g gives -a·P·g."""

    def whole(self) -> Vector:
        """Return v."""
        return {
            name: self.current[name] + self.earlier[name] + self.decay[name]
            for name in self.current
        }

    def parts(self) -> dict[str, Vector]:
        return {"current": self.current, "earlier": self.earlier, "decay": self.decay}


class TensorStep(NamedTuple):
    """Hold the parts of v for one parameter, and its moments after the step, by name."""

    scale: Tensor
    """a·P."""
    current: Tensor
    earlier: Tensor
    decay: Tensor
    after: dict[str, Tensor]


@dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """Describe the step of one optimizer. `step` counts from 1, this step included."""

    name: ClassVar[str]
    moments: ClassVar[tuple[str, ...]] = ()
    """Names of its moments in the state."""
    momentum: ClassVar[str | None] = None
    """The name of the one with earlier gradients."""

    weight_decay: float
    """λ, of matrices only."""
    step: int
    memory: float
    """The factor of the momentum from step to step, β₁ or μ."""

    @abc.abstractmethod
    def of_tensor(
        self, parameter: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], decay: float
    ) -> TensorStep:
        """Compute one parameter's part; all tensors have one dtype. moments: before the step, by
        name (`moments`)."""

    @torch.no_grad()
    def stepped(
        self,
        name: str,
        parameter: Tensor,
        gradient: Tensor,
        moments: Moments,
        dtype: torch.dtype = torch.float64,
    ) -> TensorStep:
        """Compute the step of the parameter `name`, in `dtype`. Moments absent from `moments` are
        0."""
        absent = torch.zeros_like(parameter)
        own = {part: moments.get(f"{name}.{part}", absent).to(dtype) for part in self.moments}
        if parameter.ndim >= 2:
            rate = self.weight_decay
        else:
            rate = 0.0
        return self.of_tensor(parameter.to(dtype), gradient.to(dtype), own, rate)

    def update(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        moments: Moments,
        dtype: torch.dtype = torch.float64,
    ) -> Update:
        """Compute v in float64, for a result of `dtype`; it takes four times the model's size.
        gradients: as the optimizer sees them, clipped. moments: before the step."""
        update = Update({}, {}, {}, {})
        for name, gradient in gradients.items():
            found = self.stepped(name, parameters[name], gradient, moments)
            update.current[name] = found.current.to(dtype)
            update.earlier[name] = found.earlier.to(dtype)
            update.decay[name] = found.decay.to(dtype)
            update.preconditioner[name] = found.scale.to(dtype)
        return update


@dataclass(frozen=True)
class AdamW(UpdateRule):
    """AdamW (arXiv 1711.05101), with moments of any precision."""

    name = "adamw"
    moments = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"

    beta2: float
    eps: float

    def of_tensor(
        self, parameter: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], decay: float
    ) -> TensorStep:
        mean = moments["exp_avg"]
        square = self.beta2 * moments["exp_avg_sq"] + (1 - self.beta2) * gradient.square()
        divisor = (square / (1 - self.beta2**self.step)).sqrt() + self.eps
        beta1 = self.memory
        scale = (1 - beta1) / (1 - beta1**self.step) / divisor
        earlier = -beta1 / (1 - beta1**self.step) * mean / divisor
        after = {
            "exp_avg": beta1 * mean + (1 - beta1) * gradient,
            "exp_avg_sq": square,
        }
        return TensorStep(scale, -scale * gradient, earlier, -decay * parameter, after)


@dataclass(frozen=True)
class RMSprop(UpdateRule):
    """RMSprop as in PyTorch: no correction of the first steps' averages, and weight decay as a part
    of the gradient."""

    name = "rmsprop"
    moments = ("square_avg", "momentum_buffer")
    momentum = "momentum_buffer"

    beta2: float
    eps: float

    def of_tensor(
        self, parameter: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], decay: float
    ) -> TensorStep:
        both = gradient + decay * parameter
        square = self.beta2 * moments["square_avg"] + (1 - self.beta2) * both.square()
        divisor = square.sqrt() + self.eps
        kept = self.memory * moments["momentum_buffer"]
        after = {"square_avg": square, "momentum_buffer": kept + both / divisor}
        decayed = -decay * parameter / divisor
        return TensorStep(1 / divisor, -gradient / divisor, -kept, decayed, after)


@dataclass(frozen=True)
class SGD(UpdateRule):
    """Gradient descent, with or without momentum."""

    name = "sgd"
    moments = ("momentum_buffer",)
    momentum = "momentum_buffer"

    def of_tensor(
        self, parameter: Tensor, gradient: Tensor, moments: Mapping[str, Tensor], decay: float
    ) -> TensorStep:
        kept = self.memory * moments["momentum_buffer"]
        after = {"momentum_buffer": kept + gradient + decay * parameter}
        scale = torch.ones_like(gradient)
        return TensorStep(scale, -gradient, -kept, -decay * parameter, after)


def moment_rounding(
    rule: UpdateRule,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    moments: Moments,
) -> dict[str, float]:
    """Return the rounding of a step's new moments to 8 bits, by moment: ‖Q(m) - m‖ / ‖m‖. Arguments
    as for `UpdateRule.update`.
    """
    errors = dict.fromkeys(rule.moments, 0.0)
    wholes = dict.fromkeys(rule.moments, 0.0)
    for name, gradient in gradients.items():
        after = rule.stepped(name, parameters[name], gradient, moments).after
        for part, exact in after.items():
            rounded = rounded_to_8_bits(exact, signed=part == rule.momentum)
            errors[part] += float((rounded.double() - exact).square().sum())
            wholes[part] += float(exact.square().sum())
    return {
        part: math.sqrt(errors[part] / whole) if whole else 0.0 for part, whole in wholes.items()
    }


def steps_taken(moments: Moments, otherwise: int) -> int:
    """Return the steps counted by an optimizer's state; `otherwise` without a count."""
    counts = [int(count) for name, count in moments.items() if name.endswith(".step")]
    return max(counts, default=otherwise)


def rule_of(config: TrainingConfig, taken: int) -> UpdateRule:
    """Return the rule of a config's optimizer, after `taken` steps."""
    always = config.weight_decay, taken + 1
    if config.optimizer == "sgd":
        return SGD(*always, config.momentum)
    if config.optimizer == "rmsprop":
        return RMSprop(*always, config.momentum, config.beta2, config.eps)
    assert config.optimizer in ("adamw", "adamw_8bit")
    return AdamW(*always, config.beta1, config.beta2, config.eps)
