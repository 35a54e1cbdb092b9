"""Train the value head: a small replicated module next to a possibly sharded policy.

Every rank holds the whole head and sums the ranks' gradients explicitly. Its weights and Adam's
moments are stored in the folder of the optimizer's state: value_head.safetensors and
value_optimizer.safetensors.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.errors import RunFolderError
from ttrl.training.optimizer.optimizer import learning_rate, tensors_with_parameters
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.policy.value_head import ValueHead, load_value_head, save_value_head

_OPTIMIZER_FILE = "value_optimizer.safetensors"
_STATE = ("exp_avg", "exp_avg_sq", "step")


class ValueTraining:
    """A value head with its AdamW. `dim` is the width of the hidden states. Starts afresh if the
    config's state has none.
    """

    def __init__(self, config: GRPOConfig, dim: int, here: Ranks) -> None:
        self._config = config
        self._here = here
        with torch.random.fork_rng(devices=[]):
            # The same on all ranks.
            torch.manual_seed(derived_generator(config.seed, "value head").initial_seed())
            self.head = ValueHead(dim, grad_in_decoder=config.value_grad_in_decoder)
        found = config.state is not None and load_value_head(self.head, config.state)
        self.head.to(here.device)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=0.0,
        )
        if found:
            assert config.state is not None
            self._load_optimizer(Path(config.state, _OPTIMIZER_FILE))

    def gradient_norm(self) -> float:
        """Sum the ranks' gradients, clip them on their own to `max_grad_norm`, and return the norm
        before. A collective.
        """
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
            else:
                gradient = torch.zeros_like(parameter)
            # Each was multiplied by their number.
            parameter.grad = self._here.sum(gradient) / self._here.world_size
        limit = self._config.max_grad_norm
        return float(
            torch.nn.utils.clip_grad_norm_(
                self.head.parameters(), math.inf if limit is None else limit
            )
        )

    def step(self, global_step: int, lr_scale: float) -> None:
        """Take one optimizer step, at `value_lr` in place of `lr`."""
        config = self._config
        rate = learning_rate(
            config if config.value_lr is None else dataclasses.replace(config, lr=config.value_lr),
            global_step,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate * lr_scale
        self._optimizer.step()
        self.forget()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's tensors on the parameters' device."""
        yield from tensors_with_parameters(self._optimizer)

    def forget(self) -> None:
        self._optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Write both files; for one rank."""
        save_value_head(self.head.state_dict(), folder)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.head.named_parameters():
            state = self._optimizer.state.get(parameter, {})
            tensors |= {
                f"{name}.{part}": state[part].detach().cpu().reshape(-1)
                for part in _STATE
                if part in state
            }
        save_file(tensors, folder / _OPTIMIZER_FILE)

    def _load_optimizer(self, file: Path) -> None:
        try:
            tensors = load_file(file)
            for name, parameter in self.head.named_parameters():
                if f"{name}.step" in tensors:
                    shapes = {
                        "exp_avg": parameter.shape,
                        "exp_avg_sq": parameter.shape,
                        "step": torch.Size(()),
                    }
                    state = {
                        part: tensors[f"{name}.{part}"].reshape(shape)
                        for part, shape in shapes.items()
                    }
                    self._optimizer.state[parameter] = {
                        part: value if part == "step" else value.to(parameter.device)
                        for part, value in state.items()
                    }
        except (SafetensorError, OSError, KeyError, RuntimeError) as error:
            raise RunFolderError(
                f"{file}: the value head's optimizer state cannot be read: {error}"
            ) from error
