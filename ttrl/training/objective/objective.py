"""From a config to the loss of a token: the policy loss, its off-policy correction, KL and entropy,
with their schedules.

    objective = objective_from(config).at(global_step)
    loss_N, facts = objective.loss(logprobs_N, sampled_N, advantages_N, samples_N, extras)

and the loss of an optimizer step is Σ w·loss / Z (`ttrl.data.packing.packed`). `extras` holds what
the objective says it needs:

"start_logprobs"      [N] or None   needs_start_logprobs    the trainer's at the start of the
                                                            iteration; None where the iteration has
                                                            one optimizer step, so that they are the
                                                            current ones
"chosen"              [N] bool      needs_prepass           see `choose`
"reference_logprobs"  [N]           needs_reference         NaN where unknown; not needed for
                                                            "divergence"
"divergence"          [N]           needs_divergence_grad   KL over the whole vocabulary, from the
                                                            head, with its gradient
"entropy"             [N]           needs_entropy_grad      from the head, with its gradient

N: trained positions.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ttrl.configs.objective import ObjectiveConfig
from ttrl.training.objective import losses
from ttrl.training.objective.covariance import choose_by_covariance
from ttrl.training.objective.divergences import ESTIMATORS
from ttrl.training.objective.off_policy import importance_weights

logger = logging.getLogger("ttrl.training")


@dataclass(frozen=True)
class Objective:
    """What a config asks for at one optimizer step of the run."""

    config: ObjectiveConfig
    global_step: int = 0

    def at(self, global_step: int) -> "Objective":
        """Return the same objective at another optimizer step, counted from 0 over the whole
        run.
        """
        return dataclasses.replace(self, global_step=global_step)

    @property
    def kl_coefficient(self) -> float:
        """The coefficient at this step: 0 for the first `kl_after_steps` steps of the run."""
        if self.global_step >= self.config.kl_after_steps:
            return self.config.kl_coefficient
        return 0.0

    @property
    def kl_in_loss(self) -> float:
        if self.config.kl_in == "loss":
            return self.kl_coefficient
        return 0.0

    @property
    def kl_in_reward(self) -> float:
        """The coefficient of KL in the reward at this step; see
        `ttrl.training.objective.token_rewards`.
        """
        if self.config.kl_in == "reward":
            return self.kl_coefficient
        return 0.0

    @property
    def entropy_coefficient(self) -> float:
        if self.config.entropy_schedule == "constant":
            return self.config.entropy_coefficient
        begins = self.config.entropy_from_step
        ends = self.config.entropy_until_step
        assert ends is not None, "the config's own check asks for it"
        return self.config.entropy_coefficient * min(
            1.0, max(0.0, (ends - self.global_step) / (ends - begins))
        )

    @property
    def per_token(self) -> bool:
        """True where the gradient of a token's loss follows from nothing but this token's
        log-probability (and what is known before the forward pass), so that the head can take it in
        the forward pass, chunk by chunk.
        """
        whole_samples = self.config.objective == "gspo" or self.config.off_policy == "sequence"
        return not (whole_samples or self.needs_entropy_grad or self.needs_divergence_grad)

    @property
    def needs_prepass(self) -> bool:
        return self.config.objective in ("clip_cov", "kl_cov")

    @property
    def needs_start_logprobs(self) -> bool:
        return self.config.off_policy != "none"

    @property
    def needs_token_rewards(self) -> bool:
        """True if advantages are recomputed before training
        (`ttrl.training.objective.token_rewards`).
        """
        return (
            self.kl_in_reward > 0 or self.config.token_rewards != "none" or self.config.value_head
        )

    @property
    def needs_reference(self) -> bool:
        estimate = self.kl_in_loss > 0 and self.config.kl_estimator != "full"
        return estimate or self.kl_in_reward > 0 or self.config.token_rewards == "implicit"

    @property
    def needs_divergence_grad(self) -> bool:
        return self.kl_in_loss > 0 and self.config.kl_estimator == "full"

    @property
    def needs_entropy_grad(self) -> bool:
        return self.entropy_coefficient > 0

    @property
    def distribution_terms(self) -> tuple[str, ...]:
        """Say what of the loss depends on whole distributions: "entropy", "divergence"."""
        needed = {"entropy": self.needs_entropy_grad, "divergence": self.needs_divergence_grad}
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def choose(
        self, logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, keys_N: Tensor, seed: int
    ) -> Tensor:
        """Return the tokens that Clip-Cov or KL-Cov act on, bool [N], on the CPU.

        All inputs are of the whole optimizer step, over all ranks. old: what ratios are taken to:
        the sampler's log-probabilities (NaN where unknown), or with an off-policy correction
        `start_logprobs`. keys: `ttrl.training.objective.covariance.token_keys` at the labels; a
        rank finds its own tokens with torch.isin(its keys, keys_N[chosen_N]). seed: of Clip-Cov's
        draw.
        """
        if self.config.objective == "kl_cov":
            return choose_by_covariance(
                logprobs_N, advantages_N, keys_N, self.config.covariance_share
            )
        assert self.config.objective == "clip_cov", (
            f"objective {self.config.objective!r} chooses no tokens"
        )
        low_N, high_N = self._clipped_by_ratio(
            logprobs_N, losses.known_or_current(old_N, logprobs_N), advantages_N
        )
        bounds = (self.config.covariance_bounds[0], self.config.covariance_bounds[1])
        inputs = (logprobs_N, advantages_N, keys_N, self.config.covariance_share)
        return choose_by_covariance(*inputs, bounds=bounds, allowed_N=~(low_N | high_N), seed=seed)

    def loss(
        self,
        logprobs_N: Tensor,
        sampled_N: Tensor,
        advantages_N: Tensor,
        samples_N: Tensor,
        extras: Mapping[str, Tensor | None],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token [N], and facts about each [N], without gradient.

        logprobs: current, with gradient. sampled: the sampler's, NaN where unknown: such a token
        counts as sampled by the current policy. samples: which sample each token belongs to, int64.
        extras: see the head of this module.

        Facts: "policy_loss" (corrected), "ratio" (π/π_old), "clipped_low", "clipped_high" (1 where
        the clipping of the ratio takes effect); where they apply "dual_clipped", "chosen",
        "correction" (the weight), "capped" (1 where it was capped or masked), "kl" (the estimate,
        in nats), "kl_loss" (its part of the loss), "entropy_loss".
        """
        config = self.config
        old_N = losses.known_or_current(sampled_N, logprobs_N)
        facts: dict[str, Tensor] = {}
        correction_N = None
        if config.off_policy != "none":
            start_N = extras["start_logprobs"]
            if start_N is None:
                start_N = logprobs_N.detach()
            correction_N, capped_N = importance_weights(
                *(config.off_policy, start_N, sampled_N, samples_N),
                cap=config.off_policy_cap,
                floor=config.off_policy_floor,
            )
            facts |= {"correction": correction_N, "capped": capped_N}
            old_N = start_N.to(logprobs_N.dtype)
        chosen_N = extras.get("chosen")
        loss_N = self._policy_loss(logprobs_N, old_N, advantages_N, samples_N, chosen_N)
        if correction_N is not None:
            loss_N = loss_N * correction_N
        facts |= {"policy_loss": loss_N} | self._ratio_facts(
            logprobs_N, old_N, advantages_N, samples_N
        )
        if self.needs_prepass:
            assert chosen_N is not None
            facts["chosen"] = chosen_N
        if self.kl_in_loss > 0:
            kl_N = self._divergence(logprobs_N, extras)
            loss_N = loss_N + self.kl_in_loss * kl_N
            facts |= {"kl": kl_N, "kl_loss": self.kl_in_loss * kl_N}
        if self.needs_entropy_grad:
            entropy_N = extras["entropy"]
            assert entropy_N is not None, "the entropy bonus needs the head's entropy"
            bonus_N = self.entropy_coefficient * entropy_N
            loss_N = loss_N - bonus_N
            facts["entropy_loss"] = -bonus_N
        return loss_N, {name: fact.detach().to(loss_N.dtype) for name, fact in facts.items()}

    def divergence_loss(self, logprobs_N: Tensor, extras: Mapping[str, Tensor | None]) -> Tensor:
        """Return KL's part of each token's loss [N], for `kl_in` "loss"; arguments as for
        `loss`.
        """
        return self.kl_in_loss * self._divergence(logprobs_N, extras)

    def _policy_loss(
        self,
        logprobs_N: Tensor,
        old_N: Tensor,
        advantages_N: Tensor,
        samples_N: Tensor,
        chosen_N: Tensor | None,
    ) -> Tensor:
        config = self.config
        clip = config.clip_bounds
        if config.objective == "reinforce":
            return losses.reinforce_loss(logprobs_N, advantages_N)
        if config.objective == "tanh":
            return losses.tanh_loss(logprobs_N, old_N, advantages_N)
        if config.objective == "gspo":
            return losses.gspo_loss(logprobs_N, old_N, advantages_N, samples_N, *clip)
        if config.objective == "cispo":
            return losses.cispo_loss(logprobs_N, old_N, advantages_N, *clip)
        if config.objective == "ppo":
            return losses.clipped_ratio_loss(
                logprobs_N, old_N, advantages_N, *clip, config.dual_clip
            )
        assert chosen_N is not None, (
            f"{config.objective} needs the tokens that were chosen over the whole step"
        )
        if config.objective == "clip_cov":
            return losses.clip_cov_loss(logprobs_N, old_N, advantages_N, chosen_N, *clip)
        return losses.kl_cov_loss(
            logprobs_N, old_N, advantages_N, chosen_N, config.kl_cov_coefficient
        )

    def _divergence(self, logprobs_N: Tensor, extras: Mapping[str, Tensor | None]) -> Tensor:
        if self.config.kl_estimator == "full":
            divergence_N = extras["divergence"]
            assert divergence_N is not None, "kl_estimator 'full' needs the head's divergence"
            return divergence_N
        reference_N = extras["reference_logprobs"]
        assert reference_N is not None, "an estimate of KL needs the reference's log-probabilities"
        return ESTIMATORS[self.config.kl_estimator](logprobs_N, reference_N)

    @torch.no_grad()
    def _ratio_facts(
        self, logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, samples_N: Tensor
    ) -> dict[str, Tensor]:
        config = self.config
        ratio_N = losses.probability_ratio(logprobs_N, old_N)
        low_N = torch.zeros_like(ratio_N)
        high_N = torch.zeros_like(ratio_N)
        facts = {"ratio": ratio_N}
        if config.objective in ("ppo", "clip_cov"):
            low_N, high_N = self._clipped_by_ratio(logprobs_N, old_N, advantages_N)
        elif config.objective == "gspo":
            low_N, high_N = self._beyond(
                losses.gspo_ratio(logprobs_N, old_N, samples_N), advantages_N
            )
        elif config.objective == "cispo":  # the weight is clipped, whatever the advantage's sign
            low, high = config.clip_bounds
            low_N = ratio_N < 1 - low
            high_N = ratio_N > 1 + high
        if config.dual_clip is not None:
            facts["dual_clipped"] = (ratio_N > config.dual_clip) & (advantages_N < 0)
        return facts | {"clipped_low": low_N, "clipped_high": high_N}

    def _clipped_by_ratio(
        self, logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._beyond(losses.probability_ratio(logprobs_N, old_N), advantages_N)

    def _beyond(self, ratio_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return where PPO's clipping removes the gradient: below with a negative advantage, above
        with a positive one.
        """
        low, high = self.config.clip_bounds
        return (ratio_N < 1 - low) & (advantages_N < 0), (ratio_N > 1 + high) & (advantages_N > 0)


def objective_from(config: ObjectiveConfig) -> Objective:
    """Return the objective that a config (GRPOConfig has these fields) asks for, at the run's first
    optimizer step.
    """
    # Refused where it is certain.
    if config.objective == "kl_cov" and getattr(config, "updates_per_iteration", 2) == 1:
        logger.warning(
            "objective 'kl_cov' with updates_per_iteration 1: unless the sampler's weights are "
            "older than the trainer's, its "
            "penalty sees nothing but the rounding between the two; take 2 or more updates, or "
            "objective 'clip_cov'"
        )
    return Objective(config)
