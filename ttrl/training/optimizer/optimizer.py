"""The optimizer, and its learning rate as a function of the global step. Its state on disk:
`ttrl.training.optimizer.state`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ttrl.configs import TrainingConfig
from ttrl.errors import ConfigError
from ttrl.training.parallel.gradients import SquaredNorm, clip_gradients, settle
from ttrl.training.policy.policy import Policy


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of step `step` (from 0): linear warm-up, then constant, or falling
    to 0 at `total_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    assert config.total_steps is not None
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (
        (1 - done) if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    )


ParameterGroup: TypeAlias = dict[str, Any]
"""Parameters and their settings, as optimizers of PyTorch hold them."""


class OptimizerInBackward:
    """One optimizer per parameter, stepped and freed as each gradient arrives in the backward pass;
    for one backward pass a step. A non-finite gradient spoils its parameter: the norm is known too
    late.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        make: Callable[[list[ParameterGroup]], torch.optim.Optimizer],
    ) -> None:
        self.by_parameter: dict[nn.Parameter, torch.optim.Optimizer] = {}
        self._stepped: set[Tensor] = set()
        self._squares = SquaredNorm()
        for group in groups:
            for parameter in group["params"]:
                self.by_parameter[parameter] = make([{**group, "params": [parameter]}])
                parameter.register_post_accumulate_grad_hook(self._step)

    @property
    def param_groups(self) -> list[ParameterGroup]:
        return [
            group for optimizer in self.by_parameter.values() for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def _step(self, parameter: Tensor) -> None:
        if parameter in self._stepped:
            raise ConfigError(
                "config",
                [
                    "optimizer_in_backward with more than one microbatch a step; raise "
                    "rows_per_microbatch, or switch it off"
                ],
            )
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._stepped.add(parameter)
        settle([parameter])
        self._squares.add(parameter.grad)
        self.by_parameter[parameter].step()
        parameter.grad = None

    def finish_step(self) -> float:
        """Return the global norm of the step's gradients; a collective if they are sharded."""
        norm = float(self._squares.norm())
        self._squares = SquaredNorm()
        self._stepped.clear()
        return norm


Optimizer = torch.optim.Optimizer | OptimizerInBackward


def _maker(config: TrainingConfig) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    if config.optimizer == "sgd":
        # The fused one knows no sharded parameters.
        return functools.partial(torch.optim.SGD, lr=config.lr, momentum=config.momentum)
    if config.optimizer == "rmsprop":
        return functools.partial(
            torch.optim.RMSprop,
            lr=config.lr,
            alpha=config.beta2,
            eps=config.eps,
            momentum=config.momentum,
        )
    kind: Callable[..., torch.optim.Optimizer]
    if config.optimizer == "adamw_8bit":
        from torchao.optim import AdamW8bit

        kind = AdamW8bit
    elif config.optimizer_on_cpu:
        from torchao.optim import CPUOffloadOptimizer

        kind = functools.partial(CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW)
    else:
        kind = functools.partial(torch.optim.AdamW, fused=True)
    return functools.partial(kind, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def make_optimizer(policy: Policy, config: TrainingConfig) -> Optimizer:
    """Make AdamW (arXiv 1711.05101), or the config's optimizer, for a policy in its final place;
    weight decay on matrices only, not on norms and biases."""
    parameters = [
        parameter for parameter in policy.parameters_by_name().values() if parameter.requires_grad
    ]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    make = _maker(config)
    if config.optimizer_in_backward:
        return OptimizerInBackward(groups, make)
    return make(groups)


def tensors_with_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield an optimizer's state tensors on the device of its parameters. Only fused optimizers
    count steps there; others do on the CPU."""
    counts_there = bool(optimizer.defaults.get("fused"))
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and (value.ndim or counts_there):
                yield value


def begin_step(
    optimizer: Optimizer, config: TrainingConfig, global_step: int, lr_scale: float = 1.0
) -> None:
    rate = learning_rate(config, global_step) * lr_scale
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            # torchao's optimizers are compiled: a new number would be a new program, and raises.
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_and_step(
    policy: Policy,
    optimizer: Optimizer,
    config: TrainingConfig,
    global_step: int,
    *,
    lr_scale: float = 1.0,
) -> float:
    """Clip, step at the learning rate of `global_step` times `lr_scale`, and zero the gradients.
    Returns the global gradient norm before clipping; if it is not finite, the step was not taken
    (except by an optimizer working in the backward pass).
    """
    if isinstance(optimizer, OptimizerInBackward):
        return optimizer.finish_step()
    norm = clip_gradients(policy.parameters(), config.max_grad_norm)
    if math.isfinite(norm):
        begin_step(optimizer, config, global_step, lr_scale)
        optimizer.step()
    optimizer.zero_grad()
    return norm
