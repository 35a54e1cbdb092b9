"""Compute one optimizer step's gradient by microbatch, through head, objective and value head.

    Σ w·(ℓ + c_v·ℓ_value) / Z      over all trained tokens of the step, on all ranks

If the objective allows it (`StepObjective.per_token`), the head takes the gradient of a chunk's
logits at once, in the forward pass; else the backward pass recomputes the chunks. The metrics come
from the same numbers, without gradient.

Shapes: N trained positions of a microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttrl.configs import GRPOConfig
from ttrl.facts import Step, ratio
from ttrl.training.batches import Update, policy_inputs
from ttrl.training.counts import PARTS, token_counts, work_counts
from ttrl.training.faults import Finite
from ttrl.training.gradient_parts import GradientParts
from ttrl.training.kernels.logprobs import ReferenceHead
from ttrl.training.models.expert_routing import LayerRouting, routing_metrics
from ttrl.training.objective.divergences import ESTIMATORS
from ttrl.training.objective.objective import StepObjective
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import HeadOptions, Policy, PolicyOutput
from ttrl.training.policy.value_head import ValueHead, value_loss
from ttrl.training.step_metrics import Range, Sums, effective_sample_size
from ttrl.training.step_noise import GradientPieces
from ttrl.training.stepper import Taken
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainProgress

TOKENS = ("trained_tokens", "row_tokens", "padding_tokens", "logical_tokens")
# Facts reported as Σ w·fact / Z, as the loss is.
_WEIGHTED = ("loss", "policy_loss", "kl_loss", "entropy_loss", "value_loss", "kl")
# … as means over trained tokens, with their names in train.jsonl.
_SHARES = {
    "clipped_low": "clip_fraction_low",
    "clipped_high": "clip_fraction_high",
    "dual_clipped": "dual_clip_fraction",
    "chosen": "chosen_fraction",
    "correction": "correction",
    "capped": "capped_fraction",
}


@dataclass
class StepResult:
    """A step's results once its gradient is there; the same on all ranks but for `compared`
    and `first_bad`.
    """

    sums: dict[str, float]
    """Over all tokens and ranks."""
    ratio: tuple[float, float]
    """The smallest and largest π/π_old."""
    compared: tuple[Tensor, Tensor] | None
    """Log-probabilities of this rank's trained tokens under the trainer and the sampler, [N] each;
    if they were asked for.
    """
    first_bad: str | None
    """The position of this rank's first non-finite loss."""
    pieces: Mapping[str, Any] | None = None
    """The results of `GradientPieces`, if enabled."""
    kl_share: float | None = None
    """See `ttrl.training.gradient_parts`; None without KL in the loss, or if a value head trains
    the decoder.
    """
    routing: list[LayerRouting] = field(default_factory=list)
    """Of each layer with experts."""


class GradientStep:
    """Computes gradients. `reference_head`: the reference's output projection [V, D] and bias, for
    KL over the vocabulary.
    """

    def __init__(
        self,
        policy: Policy,
        config: GRPOConfig,
        here: Ranks,
        watch: Stopwatch,
        progress: TrainProgress | None,
        value_head: ValueHead | None = None,
        reference_head: tuple[Tensor, Tensor | None] | None = None,
        pieces: GradientPieces | None = None,
    ) -> None:
        self._policy = policy
        self._config = config
        self._here = here
        self._watch = watch
        self._progress = progress
        self._value_head = value_head
        self._pieces = pieces
        self._reference_head = [
            None if part is None else part.to(here.device) for part in reference_head or ()
        ]

    def accumulate(
        self,
        step: Update,
        objective: StepObjective,
        *,
        compare: bool = False,
        before: Mapping[str, float] | None = None,
    ) -> StepResult:
        """Add the gradient of the whole step to the parameters. With `compare`, the result holds
        all log-probabilities. before: FLOPs already spent for this step, by PARTS."""
        sums = Sums()
        ratio = Range()
        finite = Finite()
        compared: list[Tensor] = []
        if self._pieces is not None:
            self._pieces.begin(
                objective.global_step, -(-step.rows.num_rows // self._config.rows_per_microbatch)
            )
        size = self._config.rows_per_microbatch
        batches = step.microbatches(self._config, self._here.device)
        routing = getattr(self._policy.decoder, "routing", None)
        if routing is not None:
            routing.forget()
        parts = None
        if objective.kl_in_loss > 0 and not (
            self._config.value_head and self._config.value_grad_in_decoder
        ):
            parts = GradientParts(objective.distribution_terms)
        while True:
            with self._watch.part("data"):
                batch = next(batches, None)
            if batch is None:
                break
            tokens = _Tokens(batch, objective)
            with self._watch.part("forward"):
                options = self._head_options(batch, tokens, objective, parts)
                out = self._policy(*policy_inputs(batch), options, batch.get("experts"))
                total, facts = self._losses(out, tokens, objective)
                if parts is not None:
                    parts.expect(*tokens.slopes(out))
            if self._pieces is not None:
                self._pieces.piece()
            with self._watch.part("backward"):
                step.backward(total)
            self._report(sums, batch, tokens, out, facts)
            finite.look(facts["loss"])
            ratio.add(facts["ratio"])
            if compare:
                compared.append(torch.stack([out.logprobs.detach().float(), tokens.sampled]))
            if self._progress is not None:
                self._progress.advance()
        again = int(not objective.per_token)
        reference = objective.needs_divergence_grad
        again += len(objective.distribution_terms) if parts is not None else 0
        model = self._policy.decoder.config
        sums.add(not_finite=finite.count())
        sums.add(
            **work_counts(step.rows, model, self._config, head_again=again, reference=reference)
        )
        sums.add(**dict.fromkeys(PARTS, 0.0) | dict(before or {}))
        both = None
        if compare:
            mine, sampled = torch.cat(compared, dim=1)
            both = (mine, sampled)
        return StepResult(
            sums.over_ranks(self._here),
            ratio.over_ranks(self._here),
            both,
            finite.described(step.rows, step.numbers, size),
            None if self._pieces is None else self._pieces.finish(),
            None if parts is None else parts.share(self._here),
            [] if routing is None else routing.take(self._here.sum),
        )

    def _head_options(
        self,
        batch: dict[str, Tensor],
        tokens: "_Tokens",
        objective: StepObjective,
        parts: GradientParts | None,
    ) -> HeadOptions:
        reference = None
        if objective.needs_divergence_grad:
            weight, bias = self._reference_head
            assert weight is not None, "the prepass keeps it where the objective needs it"
            reference = ReferenceHead(batch["reference_hidden"], weight, bias)
        watch_layers = None
        if self._pieces is not None:
            of_tokens = tokens.samples, tokens.weights, tokens.advantages
            watch_layers = self._pieces.watch_layers(
                batch["sample_keys"], *of_tokens, tokens.trained
            )
        return HeadOptions(
            trained=tokens.trained,
            token_loss=tokens.weighted_loss if objective.per_token else None,
            entropy_grad=objective.needs_entropy_grad,
            divergence_grad=objective.needs_divergence_grad,
            apart=None if parts is None else parts.add_apart,
            reference=reference,
            value_head=self._value_head,
            watch=None if parts is None else parts.watch_hidden,
            watch_layers=watch_layers,
        )

    def _losses(
        self, out: PolicyOutput, tokens: "_Tokens", objective: StepObjective
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted loss of the microbatch, to be differentiated, and facts about each
        token [N], without gradient.
        """
        if objective.per_token:
            with torch.no_grad():
                loss_N, facts = tokens.loss(out.logprobs)
            assert out.loss is not None, "the head was given the loss"
            total = out.loss
        else:
            loss_N, facts = tokens.loss(
                out.logprobs, extras={"entropy": out.entropy, "divergence": out.divergence}
            )
            total = (loss_N * tokens.weights).sum()
        facts = facts | {"loss": loss_N.detach()}
        if out.values is not None:
            assert tokens.returns is not None
            config = self._config
            values_N = (
                value_loss(out.values, tokens.returns, tokens.old_values, config.value_clip)
                * config.value_coefficient
            )
            total = total + (values_N * tokens.weights).sum()
            facts |= {"loss": facts["loss"] + values_N.detach(), "value_loss": values_N.detach()}
        return total, facts

    @torch.no_grad()
    def _report(
        self,
        sums: Sums,
        batch: dict[str, Tensor],
        tokens: "_Tokens",
        out: PolicyOutput,
        facts: dict[str, Tensor],
    ) -> None:
        # In the reward, or not yet in the loss.
        if "kl" not in facts and tokens.reference is not None:
            kind = self._config.kl_estimator
            facts["kl"] = ESTIMATORS["k3" if kind == "full" else kind](
                out.logprobs.detach(), tokens.reference
            )
            if self._config.watch_kl:  # of some rows only
                sums.add(kl_weights=tokens.weights * ~torch.isnan(tokens.reference))
        sums.add(entropy=out.entropy)
        sums.add(**{name: facts[name] * tokens.weights for name in _WEIGHTED if name in facts})
        sums.add(**{name: facts[name] for name in _SHARES if name in facts})
        ratio = facts["ratio"].double()
        sums.add(ratio=ratio, ratio_squared=ratio.square())
        sums.add(**token_counts(batch))
        if out.values is not None and tokens.returns is not None:
            sums.add(value_error=(out.values - tokens.returns).double().square())


class _Tokens:
    """A microbatch's trained tokens, [N] each, and their loss under an objective."""

    def __init__(self, batch: dict[str, Tensor], objective: StepObjective) -> None:
        self.trained = trained = batch["trained"]

        def of(name: str) -> Tensor | None:
            if name in batch:
                return batch[name].flatten()[trained]
            return None

        self._objective = objective
        self.sampled, self.weights, self.advantages, self.samples = (
            batch[name].flatten()[trained]
            for name in ("logprobs", "weights", "advantages", "sample_ids")
        )
        self.reference = of("reference_logprobs")
        self.returns, self.old_values = of("returns"), of("old_values")
        self._extras = {
            "start_logprobs": of("start_logprobs"),
            "chosen": of("chosen"),
            "reference_logprobs": self.reference,
        }

    def loss(
        self,
        logprobs_n: Tensor,
        at: slice = slice(None),
        extras: dict[str, Tensor | None] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective's loss of the tokens in `at`, and facts about them."""
        known = {
            name: None if value is None else value[at] for name, value in self._extras.items()
        } | (extras or {})
        return self._objective.loss(
            logprobs_n, self.sampled[at], self.advantages[at], self.samples[at], known
        )

    def slopes(self, out: PolicyOutput) -> tuple[Tensor, Tensor]:
        """Return the derivatives of the weighted loss, and of its KL part, by the
        log-probabilities, [N] each; without the terms of whole distributions."""
        fixed = {
            "entropy": out.entropy.detach(),
            "divergence": None if out.divergence is None else out.divergence.detach(),
        }
        with torch.enable_grad():
            at_N = out.logprobs.detach().requires_grad_()
            losses = (
                self.loss(at_N, extras=fixed)[0],
                self._objective.divergence_loss(at_N, self._extras | fixed),
            )
            found = [
                torch.autograd.grad((loss_N * self.weights).sum(), at_N)[0]
                for loss_N in losses
                if loss_N.requires_grad
            ]
        return found[0], found[1] if len(found) > 1 else torch.zeros_like(found[0])

    def weighted_loss(self, logprobs_n: Tensor, at: slice) -> Tensor:
        """Return w·ℓ of the tokens in `at`; the head differentiates it chunk by chunk."""
        return self.loss(logprobs_n, at)[0] * self.weights[at]


def step_metrics(result: StepResult, step: Update, taken: Taken) -> Step:
    """Return a step's line for train.jsonl, from sums over all ranks."""
    sums = result.sums
    tokens = max(sums["trained_tokens"], 1)
    means: dict[str, float | None] = {
        name: sums[name] / step.normaliser for name in _WEIGHTED if name in sums
    }
    means |= {figure: sums[name] / tokens for name, figure in _SHARES.items() if name in sums}
    if "kl_weights" in sums:
        means["kl"] = ratio(sums["kl"], sums["kl_weights"])
    if "value_error" in sums:
        means["value_error"] = (sums["value_error"] / tokens) ** 0.5
    line = Step(
        entropy=sums["entropy"] / tokens,
        kl_share=result.kl_share,
        ratio_min=result.ratio[0],
        ratio_max=result.ratio[1],
        ess=effective_sample_size(sums["ratio"], sums["ratio_squared"], sums["trained_tokens"]),
        routing=routing_metrics(result.routing) if result.routing else None,
        flops_by_part={name: sums["flops" if name == "training" else name] for name in PARTS},
        normaliser=step.normaliser,
    )
    counts = {name: int(sums[name]) for name in TOKENS}
    return line.replace(**means, **counts, **taken._asdict())
