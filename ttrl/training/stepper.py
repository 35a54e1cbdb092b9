"""Take optimizer steps, or skip them: the optimizers of policy and value head, the run's step
count, and their state on disk, with the reward model's.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torchao.optim import CPUOffloadOptimizer

from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.errors import RunFolderError
from ttrl.facts import parse
from ttrl.system.files import write_json
from ttrl.training.faults import Skipped, somewhere
from ttrl.training.optimizer.implicit_reward import RewardModel
from ttrl.training.optimizer.optimizer import (
    OptimizerInBackward,
    begin_step,
    clip_and_step,
    learning_rate,
    make_optimizer,
    tensors_with_parameters,
)
from ttrl.training.optimizer.state import load_state, save_state
from ttrl.training.optimizer.value_training import ValueTraining
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import Policy

_SKIPPED_FILE = "skipped.json"


class Taken(NamedTuple):
    """A step as taken or skipped: figures of train.jsonl."""

    lr: float
    grad_norm: float | None
    value_grad_norm: float | None
    skipped: str | None


class Stepper:
    """Takes optimizer steps, continuing from the folder `state`, if any. Raises RunFolderError if
    it cannot be read or does not fit.
    """

    def __init__(
        self,
        policy: Policy,
        config: GRPOConfig | SFTConfig,
        here: Ranks,
        state: str | None = None,
        values: ValueTraining | None = None,
        rewards: RewardModel | None = None,
    ) -> None:
        self._policy = policy
        self._config = config
        self._here = here
        self.optimizer = make_optimizer(policy, config)
        if state:
            self.global_step = load_state(state, policy, self.optimizer)
        else:
            self.global_step = 0
        """Optimizer steps of the run so far, taken or skipped."""
        self._values = values
        self._rewards = rewards
        self._skipped = Skipped(config.max_skipped_steps, _skipped_before(state))

    @property
    def lives_on_cpu(self) -> bool:
        """Whether parameters and state are in the CPU's memory anyway."""
        return self._config.cpu_offload or self._here.device.type == "cpu"

    def tensors(self) -> Iterator[Tensor]:
        """Yield the optimizers' tensors on the parameters' device."""
        optimizers: list[torch.optim.Optimizer]
        if isinstance(self.optimizer, OptimizerInBackward):
            optimizers = list(self.optimizer.by_parameter.values())
        # Its device tensors belong to small parameters only.
        elif isinstance(self.optimizer, CPUOffloadOptimizer):
            if self.optimizer.d_opt is None:
                optimizers = []
            else:
                optimizers = [self.optimizer.d_opt]
        else:
            optimizers = [self.optimizer]
        for optimizer in optimizers:
            yield from tensors_with_parameters(optimizer)

    def load(self, folder: Path) -> None:
        """Load the optimizer's state as it was written: 8-bit moments of several processes may be
        rounded once more.
        """
        self.global_step = load_state(folder, self._policy, self.optimizer)
        if self._rewards is not None:
            self._rewards.load(folder)

    def begin(self, lr_scale: float = 1.0) -> None:
        """Set the step's learning rate. Call it before the step's first backward pass: some
        optimizers work there.
        """
        begin_step(self.optimizer, self._config, self.global_step, lr_scale)

    def take(self, not_finite: float, first_bad: str | None, lr_scale: float = 1.0) -> Taken:
        """Take the step if all losses and the gradient are finite; else discard the gradient (with
        `optimizer_in_backward`, the rest of it, as the reason says). Either way the run's step
        count goes up, and with it the schedules. A collective.

        not_finite: the number of non-finite losses, over all ranks. first_bad: the position of this
            rank's first, in words.

        Raises DivergedError after too many skipped steps in a row, or for non-finite weights.
        """
        lr = learning_rate(self._config, self.global_step) * lr_scale
        why = None
        if not_finite:
            if not_finite == 1:
                count = "1 loss is"
            else:
                count = f"{not_finite:.0f} losses are"
            why = f"{count} not finite; {somewhere(first_bad, self._here)}"
            norms = {"grad_norm": math.nan}
            self._forget()
        else:
            norms = self._step(lr_scale)
            infinite = [
                f"{norm} ({name})" for name, norm in norms.items() if not math.isfinite(norm)
            ]
            if infinite:
                why = "the gradient norm is " + " and ".join(infinite)
        if why is not None and isinstance(self.optimizer, OptimizerInBackward):
            why += (
                "; with optimizer_in_backward, parameters with finite gradients have been stepped "
                "already"
            )
        self.global_step += 1
        if why is None:
            self._skipped.taken()
        else:
            self._skipped.skip(self.global_step, why, self._policy, self._here)
        return Taken(lr, norms.get("grad_norm"), norms.get("value_grad_norm"), why)

    def save(self, folder: Path) -> None:
        """Write the state of policy, value head, skipped steps and reward model. A collective."""

        def beside(temporary: Path) -> None:
            if self._values is not None:
                self._values.save(temporary)
            if self._skipped.in_a_row:
                write_json(temporary / _SKIPPED_FILE, {"in_a_row": self._skipped.in_a_row})

        config = self._config
        save_state(
            folder,
            self._policy,
            self.optimizer,
            self.global_step,
            self._here,
            config.state_format,
            beside,
        )
        if self._rewards is not None:
            self._rewards.save(folder)

    def _step(self, lr_scale: float) -> dict[str, float]:
        norms: dict[str, float] = {}
        if self._values is not None:
            norms["value_grad_norm"] = self._values.gradient_norm()
        if not all(map(math.isfinite, norms.values())):
            self._forget()
            return norms
        norms["grad_norm"] = clip_and_step(
            self._policy, self.optimizer, self._config, self.global_step, lr_scale=lr_scale
        )
        if self._values is not None:
            if math.isfinite(norms["grad_norm"]):
                self._values.step(self.global_step, lr_scale)
            else:
                self._values.forget()
        return norms

    def _forget(self) -> None:
        if isinstance(self.optimizer, OptimizerInBackward):
            # Parameters with a finite gradient have been stepped already.
            self.optimizer.finish_step()
        else:
            self.optimizer.zero_grad()
        if self._values is not None:
            self._values.forget()


def _skipped_before(state: str | None) -> int:
    """Return the number of steps skipped in a row at the end of the last iteration. Raises
    RunFolderError.
    """
    path = Path(state, _SKIPPED_FILE) if state else None
    if path is None or not path.is_file():
        return 0
    try:
        return parse(dict[str, int], path.read_bytes())["in_a_row"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(
            f"{path} is damaged ({type(error).__name__}: {error}); it counts the skipped steps "
            "in a row: delete it to count "
            "from 0, or train the iteration before again"
        ) from error
