"""Build a token's loss from a config: the policy loss, its off-policy correction, KL and entropy,
with their schedules.

    objective = objective_from(config).at(global_step)
    loss_N, facts = objective.loss(logprobs_N, sampled_N, advantages_N, samples_N, extras)

and the loss of an optimizer step is Σ w·loss / Z (`ttrl.data.packing.packed`). `extras` holds the
inputs requested by the objective:

"start_logprobs"      [N] or None   needs_start_logprobs    the trainer's at the start of the
                                                            iteration; None if the iteration has
                                                            one optimizer step: they are the current
                                                            ones
"chosen"              [N] bool      needs_prepass           see `choose`
"reference_logprobs"  [N]           needs_reference         NaN for unknown; not needed for
                                                            "divergence"
"divergence"          [N]           needs_divergence_grad   KL over the whole vocabulary, from the
                                                            head, with its gradient
"entropy"             [N]           needs_entropy_grad      from the head, with its gradient

N: trained positions.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.errors import UserError, describe, raised_in
from ttrl.registries import OBJECTIVES
from ttrl.training.objective.divergences import ESTIMATORS
from ttrl.training.objective.losses import known_or_current, probability_ratio
from ttrl.training.objective.off_policy import importance_weights

logger = logging.getLogger("ttrl.training")

_LOSS_INPUTS = ("logprobs_N", "old_logprobs_N", "advantages_N", "samples_N")
_CHOICE_INPUTS = ("logprobs_N", "old_logprobs_N", "advantages_N", "keys_N", "seed")


@dataclass(frozen=True)
class EntryFunction:
    """A function of an objective's entry, called with the inputs its parameters name."""

    function: functools.partial[Any]
    """The function with its settings bound."""
    names: frozenset[str]
    """The names of its inputs."""

    def __call__(self, **inputs: Any) -> Any:
        return self.function(**{name: inputs[name] for name in self.names})

    @classmethod
    def load(
        cls, objective: str, target: str, inputs: Collection[str], settings: Mapping[str, Any]
    ) -> "EntryFunction":
        """Load a function of an objective's entry, and bind its settings. Raises UserError if it
        cannot be loaded, or takes something else.
        """
        function = OBJECTIVES.load(objective, target)
        parameters = inspect.signature(function).parameters
        unknown = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and name not in {*inputs, *settings}
        ]
        if unknown:
            raise UserError(
                f"{OBJECTIVES.described(objective)}: {target} takes {', '.join(unknown)}; it may "
                f"take only {', '.join(inputs)}, and the settings of its entry: "
                f"{', '.join(settings) or 'none'}"
            )
        bound = {name: value for name, value in settings.items() if name in parameters}
        names = frozenset(inputs).intersection(parameters)
        return cls(functools.partial(function, **bound), names)


@dataclass(frozen=True)
class StepObjective:
    """A config's objective at one optimizer step of the run."""

    config: ObjectiveConfig
    policy_loss: EntryFunction
    choice: EntryFunction | None
    global_step: int = 0

    def at(self, global_step: int) -> "StepObjective":
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
        """True if the gradient of a token's loss depends only on this token's log-probability (and
        on values known before the forward pass): the head can then take it in the forward pass,
        chunk by chunk.
        """
        return not (
            "samples_N" in self.policy_loss.names
            or self.config.off_policy == "sequence"
            or self.needs_entropy_grad
            or self.needs_divergence_grad
        )

    @property
    def needs_prepass(self) -> bool:
        return self.choice is not None

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
        """Name the loss terms of whole distributions: "entropy", "divergence"."""
        needed = {"entropy": self.needs_entropy_grad, "divergence": self.needs_divergence_grad}
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def choose(
        self, logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, keys_N: Tensor, seed: int
    ) -> Tensor:
        """Return the policy loss's chosen tokens, bool [N], on the CPU.

        All inputs are of the whole optimizer step, over all ranks. old: the denominators of the
        ratios: the sampler's log-probabilities (NaN for unknown), or with an off-policy correction
        `start_logprobs`. keys: `ttrl.training.objective.covariance.token_keys` at the labels; a
        rank finds its own tokens with torch.isin(its keys, keys_N[chosen_N]). seed: of Clip-Cov's
        draw.
        """
        assert self.choice is not None, f"{self.config.objective!r} chooses no tokens"
        chosen_N: Tensor = self.choice(
            logprobs_N=logprobs_N,
            old_logprobs_N=old_N,
            advantages_N=advantages_N,
            keys_N=keys_N,
            seed=seed,
        )
        return chosen_N

    def loss(
        self,
        logprobs_N: Tensor,
        sampled_N: Tensor,
        advantages_N: Tensor,
        samples_N: Tensor,
        extras: Mapping[str, Tensor | None],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token [N], and facts about each [N], without gradient.

        logprobs: current, with gradient. sampled: the sampler's; NaN for unknown: such a token
        counts as sampled by the current policy. samples: the sample of each token, int64. extras:
        see the module's docstring.

        Facts: "policy_loss" (corrected), "ratio" (π/π_old), "clipped_low", "clipped_high" (1 if the
        ratio's clipping takes effect); if they apply "dual_clipped", "chosen", "correction" (the
        weight), "capped" (1 if it was capped or masked), "kl" (the estimate, in nats), "kl_loss"
        (its part of the loss), "entropy_loss".
        """
        config = self.config
        old_N = known_or_current(sampled_N, logprobs_N)
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
        inputs = {
            "logprobs_N": logprobs_N,
            "old_logprobs_N": old_N,
            "advantages_N": advantages_N,
            "samples_N": samples_N,
        }
        if self.needs_prepass:
            chosen_N = extras["chosen"]
            assert chosen_N is not None
            inputs["chosen_N"] = chosen_N
            facts["chosen"] = chosen_N
        loss_N, of_loss = self.policy_loss(**inputs)
        if correction_N is not None:
            loss_N = loss_N * correction_N
        ratio_N = probability_ratio(logprobs_N.detach(), old_N)
        none_N = torch.zeros_like(ratio_N)
        facts |= {"clipped_low": none_N, "clipped_high": none_N} | of_loss
        facts |= {"policy_loss": loss_N, "ratio": ratio_N}
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

    def _divergence(self, logprobs_N: Tensor, extras: Mapping[str, Tensor | None]) -> Tensor:
        if self.config.kl_estimator == "full":
            divergence_N = extras["divergence"]
            assert divergence_N is not None, "kl_estimator 'full' needs the head's divergence"
            return divergence_N
        reference_N = extras["reference_logprobs"]
        assert reference_N is not None, "an estimate of KL needs the reference's log-probabilities"
        return ESTIMATORS[self.config.kl_estimator](logprobs_N, reference_N)


def objective_from(config: ObjectiveConfig) -> StepObjective:
    """Return a config's objective (GRPOConfig has these fields) at the run's first optimizer step.
    Raises UserError if its policy loss cannot be loaded or called.
    """
    entry = OBJECTIVES[config.objective]
    settings = config.policy_settings()
    inputs = [*_LOSS_INPUTS]
    taken: set[str] = set()
    choice = None
    if entry.choose is not None:
        inputs.append("chosen_N")
        choice = EntryFunction.load(config.objective, entry.choose, _CHOICE_INPUTS, settings)
        taken.update(choice.function.keywords)
    policy_loss = EntryFunction.load(config.objective, entry.loss, inputs, settings)
    taken.update(policy_loss.function.keywords)
    if ignored := sorted(settings.keys() - taken):
        raise UserError(
            f"{OBJECTIVES.described(config.objective)}: {entry.loss} does not take "
            f"{', '.join(ignored)}; remove them from its entry, or add "
            "the arguments"
        )
    where = f"{OBJECTIVES.described(config.objective)}: {entry.loss}"
    for tokens in _TRIED_TOKENS:
        _check_result(where, policy_loss, tokens)
    # Refused if certain.
    if entry.from_second_update and getattr(config, "updates_per_iteration", 2) == 1:
        logger.warning(
            "objective %r with updates_per_iteration 1: unless the sampler's weights are older "
            "than the trainer's, it sees only the rounding between the two; use 2 or more "
            "updates, or another objective",
            config.objective,
        )
    return StepObjective(config, policy_loss, choice)


_TRIED_TOKENS = (2, 5)
"""Two lengths: a loss may be right for one by chance."""


@torch.enable_grad()
def _check_result(where: str, policy_loss: EntryFunction, tokens: int) -> None:
    """Try a policy loss on a few tokens. Raises UserError unless it returns the loss of each,
    finite and with a gradient, and facts.
    """
    places_N = torch.arange(tokens)
    try:
        result = policy_loss(
            logprobs_N=(-1.0 - places_N).requires_grad_(),
            old_logprobs_N=torch.full((tokens,), -1.5),
            advantages_N=1.0 - 2.0 * (places_N % 2),
            samples_N=places_N // 2,
            chosen_N=places_N % 2 == 0,
        )
    except Exception as error:
        raise UserError(
            f"{where} fails on {tokens} tokens: {describe(error)}{raised_in(error)}"
        ) from error
    match result:
        case (Tensor() as loss_N, dict()) if loss_N.shape == (tokens,) and loss_N.requires_grad:
            if loss_N.isfinite().all():
                return
    raise UserError(
        f"{where} returns {result} for {tokens} tokens; it must return the loss of each token, a "
        "finite tensor [N] with a gradient, and a dict of facts"
    )
