"""Hold the implicit reward model of PRIME (arXiv 2502.01456): other values for the policy's trained
weights, with an optimizer of their own.

Its reward of a token is β·(log π_φ - log π_ref), with φ these values. The policy's own module
computes log π_φ while they are swapped in, so that FSDP, tensor parallelism, adapters and frozen
weights serve both. With `lora_rank`, φ is an adapter to the same frozen base, and the base is the
reference; else it is a whole model. At the start φ is the reference, and all rewards are 0.

Weights and moments are stored in the folder of the optimizer's state, in reward_model/, with no
rounding: a run that continues computes the same bits.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.training.optimizer.optimizer import (
    OptimizerInBackward,
    clip_and_step,
    make_optimizer,
    tensors_with_parameters,
)
from ttrl.training.optimizer.state import load_state, save_state
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import local_part
from ttrl.training.policy.adapters import begin_adapters
from ttrl.training.policy.policy import Policy

FOLDER = "reward_model"


class RewardModel:
    """The reward model of a policy in its final place; continues from the config's state, if that
    has one. Its methods are collectives. Raises RunFolderError and ModelFolderError.
    """

    def __init__(self, policy: Policy, config: GRPOConfig, here: Ranks) -> None:
        self._policy = policy
        self._config = config
        if config.implicit_lr is not None:
            self._config = dataclasses.replace(config, lr=config.implicit_lr)
        self._here = here
        optimizer = make_optimizer(policy, config)
        assert not isinstance(optimizer, OptimizerInBackward), "the config's own check refuses it"
        self._optimizer = optimizer
        self._step = 0
        self._aside = [part.clone() for part in self._parts()]
        """The values that the policy does not hold now."""
        stored = None if config.state is None else Path(config.state, FOLDER)
        with self.swapped_in():
            if stored is not None and stored.is_dir():
                self._load(stored)
            elif config.lora_rank is not None:
                begin_adapters(policy, config.seed, FOLDER)
            else:
                assert config.reference_model is not None, "the config's own check asks for it"
                policy.load_folder(config.reference_model)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make the policy compute the reward model inside the block, and gradients be its own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def step(self, lr_scale: float) -> float:
        """Clip the gradients, take a step, and zero them; return the norm before clipping. A step
        with a norm that is not finite is not taken. For the inside of `swapped_in`.
        """
        norm = clip_and_step(
            self._policy, self._optimizer, self._config, self._step, lr_scale=lr_scale
        )
        self._step += 1
        return norm

    def tensors(self) -> Iterator[Tensor]:
        """Yield weights and optimizer's tensors on the parameters' device."""
        yield from self._aside
        yield from tensors_with_parameters(self._optimizer)

    def save(self, state: Path) -> None:
        """Write weights and moments into the folder of the optimizer's state."""
        with self.swapped_in():
            save_state(
                state / FOLDER,
                self._policy,
                self._optimizer,
                self._step,
                self._here,
                self._config.state_format,
                weights=True,
            )

    def load(self, state: Path) -> None:
        """Load what `save` wrote: 8-bit moments of several processes may be rounded once more."""
        with self.swapped_in():
            self._load(state / FOLDER)

    def _load(self, folder: Path) -> None:
        self._step = load_state(folder, self._policy, self._optimizer, weights=True)

    @torch.no_grad()
    def _swap(self) -> None:
        for part, aside in zip(self._parts(), self._aside, strict=True):
            other = part.clone()
            part.copy_(aside)
            aside.copy_(other)

    def _parts(self) -> list[Tensor]:
        """Return this process's parts of the trained parameters."""
        return [
            local_part(parameter.detach())
            for parameter in self._policy.parameters_by_name().values()
            if parameter.requires_grad
        ]
