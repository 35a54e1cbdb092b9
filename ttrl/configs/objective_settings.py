"""Define the recipe's objective: its part of GRPOConfig. The formulas:
`ttrl.training.objective.losses`."""

from collections.abc import Iterable
from typing import Any, Literal

from ttrl.configs.base import Config, settings
from ttrl.errors import UserError
from ttrl.registries import OBJECTIVES

_CLIPPING = {"clip_low": 0.2, "clip_high": 0.2}
"""The meaning of null if the objective's entry has no default."""
_POLICY_SETTINGS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "covariance_share",
    "covariance_bounds",
    "kl_cov_coefficient",
)
"""Settings with an effect only if the objective's entry names them."""


@settings
class ObjectiveConfig(Config):
    """The loss of a trained token, and what is added to it. The weights of tokens are stored with
    the packed tensors (`ttrl.data.packing.packed`); how rewards become advantages is decided before
    that (`ttrl.data.advantages`).
    """

    objective: str = "ppo"
    """The policy loss. ppo: clipped ratio; reinforce: -A·log π; tanh: -A·tanh(log ratio); gspo:
    clipped ratio of whole samples; cispo: clipped ratio as a constant weight; clip_cov, kl_cov:
    ratio with the tokens of highest covariance left out or held. Other packages add more
    (docs/how-to/register.md).
    """
    clip_low: float | None = None
    """The probability ratio is clipped below at 1 - clip_low …"""
    clip_high: float | None = None
    """… and above at 1 + clip_high. For "ppo", "clip_cov", "cispo" and "gspo". None: 0.2; with
    "gspo", its paper's 3e-4 and 4e-4: its ratio is a mean over the sample, and stays close to 1.
    """
    dual_clip: float | None = None
    """For "ppo": the loss of a negative advantage is at most this times |advantage|; above 1, 3 in
    its paper. None: no bound.
    """
    covariance_share: float = 2e-4
    """For "clip_cov" and "kl_cov": the share of a step's trained tokens to choose (at least one
    token).
    """
    covariance_bounds: tuple[float, float] = (1.0, 5.0)
    """For "clip_cov": tokens are chosen at random among those with a covariance between these."""
    kl_cov_coefficient: float = 1.0
    """For "kl_cov": weight of the penalty on the chosen tokens."""

    kl_coefficient: float = 0.0
    """Weight of KL(policy ‖ reference); 0: none, and no reference model is needed."""
    reference_model: str | None = None
    """Folder of the frozen reference; needed if kl_coefficient is above 0, unless the pack holds
    its log-probabilities. kl_estimator "full" and token_rewards "implicit" need it all the same.
    Not with adapters: their base is the reference.
    """
    kl_estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """How KL is estimated; values and gradients are in `ttrl.training.objective.divergences`. full:
    over the whole vocabulary.
    """
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss, with its gradient. reward: subtracted from each token's
    reward, as a number, and spread over the tokens before it by `gamma`.
    """
    kl_after_steps: int = 0
    """The coefficient is 0 for this many first optimizer steps of the run."""
    watch_kl: bool = False
    """Measure KL to the reference even if the coefficient is 0, on a twelfth of an iteration's rows
    (of few rows, one in every so many iterations). This takes about 3% of a step, plus the loading
    of the reference's weights (adapters are switched off).
    """

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: this times the entropy of a token's distribution, in nats, is
    subtracted from its loss.
    """
    entropy_schedule: Literal["constant", "linear"] = "constant"
    """linear: the coefficient falls to 0 at `entropy_until_step`, and stays there."""
    entropy_from_step: int = 0
    """The run's optimizer step at the start of the linear fall."""
    entropy_until_step: int | None = None
    """Optimizer step of the run, for the linear schedule."""

    off_policy: Literal["none", "token", "sequence", "mask"] = "none"
    """How losses are corrected for the difference between the sampler's and the trainer's
    probabilities, with w = π_trainer/π_sampler at the start of the iteration. none: no correction;
    the sampler's log-probabilities are the old ones of every ratio. token, sequence: times min(w,
    cap) of the token, or of the whole sample. mask: times w if floor <= w <= cap, else 0.
    """
    off_policy_cap: float = 2.0
    """The cap of `off_policy`; at least 1."""
    off_policy_floor: float = 0.5
    """The floor of off_policy "mask"; in [0, 1]."""

    token_rewards: Literal["none", "implicit"] = "none"
    """implicit: advantages of single tokens from implicit_beta·(log π_φ - log π_reference) as
    process rewards, with a reward model φ that learns the samples' outcomes while the run goes on
    (PRIME). φ begins as the reference. With `lora_rank` it is another adapter, else another whole
    model, with an optimizer state of its own.
    """
    implicit_beta: float = 0.05
    """Factor of the implicit rewards; see `token_rewards`."""
    implicit_lr: float | None = None
    """Learning rate of the reward model; None: the policy's."""

    value_head: bool = False
    """Train a value head on the hidden states; advantages come from it (GAE) and from the graders'
    rewards.
    """
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    value_clip: float | None = None
    """The largest change of a value in an iteration: beyond it, no gradient moves the value
    further. None: no clipping.
    """
    value_lr: float | None = None
    """Learning rate of the value head; None: the policy's."""
    value_grad_in_decoder: bool = False
    """Let the value loss train the decoder as well, not only the head."""
    gamma: float = 1.0
    """Discount, from token to token, of token rewards: KL in the reward, implicit rewards, the
    value head's returns. With 0, each token answers only for itself.
    """
    lam: float = 1.0
    """λ of generalised advantage estimation."""

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model."""
        return self.reference_model is not None

    @property
    def rewards_tokens(self) -> bool:
        """Whether the recipe gives single tokens rewards or values, so that samples of a group with
        equal rewards differ too.
        """
        return (
            self.value_head
            or self.token_rewards == "implicit"
            or (self.kl_coefficient > 0 and self.kl_in == "reward")
        )

    def policy_settings(self) -> dict[str, Any]:
        """Return the settings of the policy loss, with the objective's defaults for null."""
        entry = OBJECTIVES[self.objective]
        defaults = _CLIPPING | dict(entry.defaults)
        given = {name: getattr(self, name) for name in entry.settings}
        return {
            name: defaults.get(name) if value is None else value for name, value in given.items()
        }

    def problems(self) -> list[str]:
        """Return the mistakes in the values, one line each."""
        found = (
            super().problems()
            + self._policy_problems()
            + self._kl_problems()
            + self._other_problems()
        )
        return found + self._without_effect()

    def _policy_problems(self) -> list[str]:
        found = (
            self.at_least(0, "clip_high")
            + self.within("[0, 1]", "clip_low")
            + self.above_zero("kl_cov_coefficient")
        )
        if self.dual_clip is not None and not self.dual_clip > 1:
            found.append(f"dual_clip is {self.dual_clip}; it must be above 1, or null for no bound")
        if not 0 < self.covariance_share <= 1:
            found.append(
                f"covariance_share is {self.covariance_share}; it must be above 0 and at most 1"
            )
        if (
            len(self.covariance_bounds) != 2
            or not self.covariance_bounds[0] < self.covariance_bounds[1]
        ):
            found.append(
                f"covariance_bounds is {list(self.covariance_bounds)}; give the lower and the "
                "higher one"
            )
        return found + self._objective_problems()

    def _objective_problems(self) -> list[str]:
        try:
            entry = OBJECTIVES[self.objective]
        except UserError as error:
            return [f"objective is {self.objective!r}; {error}"]
        unknown = {*entry.settings, *entry.defaults} - {*_POLICY_SETTINGS, "aggregation"}
        found = [
            f"objective {self.objective!r}: its entry names the setting {name!r}; it may name "
            f"{', '.join(_POLICY_SETTINGS)}, and a default of aggregation"
            for name in sorted(unknown)
        ]
        ignored = [name for name in _POLICY_SETTINGS if name not in entry.settings]
        return found + self._idle(ignored, f"with objective {self.objective!r}")

    def _kl_problems(self) -> list[str]:
        found = self.at_least(0, "kl_coefficient", "kl_after_steps") + self.above_zero(
            "implicit_beta"
        )
        if self.kl_coefficient > 0 and self.kl_estimator == "full" and not self.has_reference:
            found.append(
                "kl_coefficient is above 0 and kl_estimator is 'full', but reference_model is "
                "missing; set it"
            )
        if self.watch_kl and not self.has_reference:
            found.append("watch_kl is on, but reference_model is missing; set it")
        if self.kl_after_steps > 0 and self.kl_coefficient == 0:
            found.append(
                f"kl_after_steps is {self.kl_after_steps} but kl_coefficient is 0: there is no KL; "
                "set kl_coefficient, or leave kl_after_steps out"
            )
        if self.kl_in == "reward" and self.kl_estimator == "full":
            found.append(
                "kl_estimator is 'full' with kl_in 'reward', but rewards belong to sampled "
                "tokens: choose 'k1', 'k2' or 'k3'"
            )
        if self.token_rewards == "implicit":
            if not self.has_reference:
                found.append(
                    "token_rewards is 'implicit', but reference_model is missing; name the model "
                    "from which the reward model begins"
                )
            if self.kl_coefficient > 0 and self.kl_in == "reward":
                found.append(
                    "token_rewards is 'implicit' with kl_in 'reward': one rewards log π - log "
                    "π_reference, the other charges for it. Choose one, or kl_in 'loss'"
                )
            if self.value_head:
                found.append(
                    "token_rewards is 'implicit' with value_head: both compute advantages of "
                    "single tokens; choose one"
                )
        return found

    def _other_problems(self) -> list[str]:
        found = self.at_least(0, "entropy_coefficient", "implicit_lr", "value_lr") + self.at_least(
            1, "entropy_until_step"
        )
        found += self.within("[0, 1]", "gamma", "lam") + self.above_zero("value_coefficient")
        if self.entropy_schedule == "linear" and self.entropy_until_step is None:
            found.append(
                "entropy_schedule is 'linear' without entropy_until_step; set it to the step at "
                "which the bonus reaches 0"
            )
        if self.entropy_schedule == "constant" and self.entropy_until_step is not None:
            found.append(
                f"entropy_until_step is {self.entropy_until_step} with entropy_schedule "
                "'constant'; choose 'linear'"
            )
        if (
            self.entropy_until_step is not None
            and not 0 <= self.entropy_from_step < self.entropy_until_step
        ):
            found.append(
                f"entropy_from_step is {self.entropy_from_step} and entropy_until_step "
                f"{self.entropy_until_step}; entropy_from_step must be from 0 to less than "
                "entropy_until_step"
            )
        if self.entropy_schedule == "linear" and self.entropy_coefficient == 0:
            found.append(
                "entropy_schedule is 'linear' but entropy_coefficient is 0: there is no bonus; "
                "set entropy_coefficient, or leave the schedule out"
            )
        if self.off_policy != "none":
            found += self.at_least(1, "off_policy_cap")
        if self.off_policy == "mask":
            found += self.within("[0, 1]", "off_policy_floor")
        if self.value_clip is not None and not self.value_clip > 0:
            found.append(
                f"value_clip is {self.value_clip}; it must be above 0, or null for no clipping"
            )
        return found

    def _without_effect(self) -> list[str]:
        """Return a problem for each changed setting without effect: its user expects something
        else.
        """
        looked_at = {
            ("kl_in",): (self.kl_coefficient > 0, "with kl_coefficient 0"),
            ("entropy_from_step",): (
                self.entropy_schedule == "linear",
                "with entropy_schedule 'constant'",
            ),
            ("off_policy_cap",): (self.off_policy != "none", "with off_policy 'none'"),
            ("off_policy_floor",): (
                self.off_policy == "mask",
                f"with off_policy {self.off_policy!r}",
            ),
            ("implicit_beta", "implicit_lr"): (
                self.token_rewards == "implicit",
                "with token_rewards 'none'",
            ),
            ("gamma",): (
                self.rewards_tokens,
                "without kl_in 'reward', token_rewards or value_head, the sources of token rewards",
            ),
            ("value_coefficient", "value_clip", "value_lr", "value_grad_in_decoder", "lam"): (
                self.value_head,
                "without value_head",
            ),
        }
        return [
            problem
            for names, (used, where) in looked_at.items()
            if not used
            for problem in self._idle(names, where)
        ]

    def _idle(self, names: Iterable[str], where: str) -> list[str]:
        """Return a problem for each of these settings if it was changed, as it does nothing."""
        return [
            f"{name} is {getattr(self, name)!r}, but has no effect {where}; leave it out"
            for name in names
            if getattr(self, name) != getattr(ObjectiveConfig, name)
        ]
