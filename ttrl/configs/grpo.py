"""The settings of `tune run ttrl/grpo_recipe`."""

from dataclasses import dataclass

from ttrl.configs.base import at_least
from ttrl.configs.training import TrainingConfig


@dataclass(kw_only=True)
class GRPOConfig(TrainingConfig):
    """One iteration of `tune run ttrl/grpo_recipe`."""

    packed: str
    """The packed.safetensors to train on."""
    state: str | None = None
    """Folder of the optimizer state to continue from; None starts afresh."""
    iteration: int = 1
    """Randomness is derived from (seed, iteration, rank)."""
    updates_per_iteration: int = 1
    """Optimizer steps over the packed rows; each row is used in one of them."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low …"""
    clip_high: float = 0.2
    """… and above at 1 + clip_high."""
    temperature: float = 1.0
    """The sampler's: log-probabilities are computed of the distribution that it drew from."""
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference) in the loss."""
    reference_model: str | None = None
    """Folder of the frozen reference; needed where kl_coefficient is above 0."""

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        found += at_least(1, iteration=self.iteration, updates_per_iteration=self.updates_per_iteration)
        found += at_least(0, clip_high=self.clip_high, kl_coefficient=self.kl_coefficient)
        if self.temperature <= 0:
            found.append(f"temperature is {self.temperature}; it must be above 0")
        if not 0 <= self.clip_low <= 1:
            found.append(f"clip_low is {self.clip_low}; it must be in [0, 1]")
        if self.kl_coefficient > 0 and self.reference_model is None:
            found.append("kl_coefficient is above 0 but reference_model is missing")
        return found
