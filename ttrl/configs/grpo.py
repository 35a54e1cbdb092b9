"""The settings of `tune run ttrl/grpo_recipe`."""

from dataclasses import dataclass
from typing import Literal

from ttrl.configs.base import at_least
from ttrl.configs.objective import ObjectiveConfig
from ttrl.configs.recipe import TrainingConfig
from ttrl.configs.resident import ResidentConfig
from ttrl.configs.watch import WatchConfig


@dataclass(kw_only=True)
class GRPOConfig(ObjectiveConfig, WatchConfig, ResidentConfig, TrainingConfig):
    """One iteration of `tune run ttrl/grpo_recipe`."""

    packed: str
    """The packed.safetensors to train on. Reference log-probabilities that it holds are used instead of `reference_model`, which
    may be left out then; where it is given, it must be the model that they are of."""
    state: str | None = None
    """Folder of the optimizer state to continue from; None starts afresh."""
    iteration: int = 1
    """Randomness is derived from (seed, iteration, rank)."""
    updates_per_iteration: int = 1
    """Optimizer steps over the packed rows; each row is used in one of them."""
    lr_rows: int | None = None
    """`lr` is for a step of so many packed rows; a step of R rows is taken with lr·R/lr_rows. None: `lr` as it is."""
    temperature: float = 1.0
    """The sampler's: log-probabilities are computed of the distribution that it drew from."""
    drift_tolerance: float | None = None
    """Nats that sampler and trainer may be apart at a token before it is counted as outside; None: by the dtype
    (`ttrl.training.drift`)."""
    drift_rows: Literal["all", "first_update"] = "all"
    """With several optimizer steps: whether sampler and trainer are compared on all rows, which takes a forward pass of its own,
    or on those of the first step, which takes none. What is trained is the same. An off-policy correction, rewards of tokens and
    dropout need that pass anyway."""
    sampler_model: str | None = None
    """The folder of the policy that sampled the rollouts, where that is another one than `model`. Differences under `model` come
    from training then, so some rows are compared under the sampler's own weights as well, which are swapped in for it."""
    sampler_version: int | None = None
    """The weights version of `sampler_model` in the pack: only its tokens are compared so."""
    sampler_rows: int = 4
    """On how many rows of the first optimizer step: those with the most such tokens, as many on each rank; 0: none."""

    @property
    def start_of_all_rows(self) -> bool:
        """Whether several optimizer steps begin with a pass over the rows of all of them."""
        return self.drift_rows == "all" or self.off_policy != "none" or self.lora_dropout > 0

    @property
    def has_reference(self) -> bool:
        """Whether it is known what the policy is compared with: with adapters, it is their base."""
        return super().has_reference or self.lora_rank is not None

    @property
    def needs_reference(self) -> bool:
        """Whether anything in the objective compares the policy with a reference model."""
        return self.kl_coefficient > 0 or self.token_rewards == "implicit"

    @property
    def needs_estimates(self) -> bool:
        """Whether log-probabilities of the reference model are needed, not only its whole distributions."""
        return (self.kl_coefficient > 0 and self.kl_estimator != "full") or self.token_rewards == "implicit"

    def problems(self) -> list[str]:
        """See Config.problems."""
        found = super().problems()
        found += at_least(1, iteration=self.iteration, updates_per_iteration=self.updates_per_iteration, lr_rows=self.lr_rows)
        found += at_least(0, sampler_rows=self.sampler_rows)
        if (self.sampler_model is None) != (self.sampler_version is None):
            found.append("sampler_model and sampler_version go together: the folder of a policy and its version in the pack")
        if self.temperature <= 0:
            found.append(f"temperature is {self.temperature}; it must be above 0")
        if self.objective == "kl_cov" and self.off_policy != "none" and self.updates_per_iteration == 1:
            found.append(
                f"objective 'kl_cov' with off_policy {self.off_policy!r} and updates_per_iteration 1; its penalty does nothing, "
                "as it holds the policy to that which the one update starts from: take 2 or more updates"
            )
        if self.drift_tolerance is not None and self.drift_tolerance <= 0:
            found.append(f"drift_tolerance is {self.drift_tolerance}; it must be above 0")
        return found
