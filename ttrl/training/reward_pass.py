"""Train the implicit reward model on the outcomes of an optimizer step's samples, and take its
log-probabilities (PRIME, arXiv 2502.01456).

The loss is the cross entropy of outcomes o under σ(R), with R = β·Σ_t (log π_φ - log π_ref) over
the tokens of a sample, and its mean over the step's samples, on all ranks. An outcome is the
grader's reward, cut to [0, 1]. One pass serves both: the log-probabilities are those before the
update, so that no outcome is in the rewards of its own tokens. (The paper's "single forward"; it
found no difference for the policy.)

The sequences of a multi-sequence sample are told apart: R is of one sequence, and its loss counts
for its `share`.

Shapes: R rows of a step on this rank, T positions, N trained positions and S samples of a
microbatch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ttrl.configs import GRPOConfig
from ttrl.training.batches import Update, policy_inputs
from ttrl.training.counts import work_counts
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.optimizer.implicit_reward import RewardModel
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import HeadOptions, Policy
from ttrl.training.step_metrics import Sums


@dataclass(frozen=True)
class RewardPass:
    """The results of one step's pass."""

    logprobs: Tensor
    """[R, T], before the update; NaN where there is no label."""
    loss: float
    """Nats per sample, before the update, over all ranks."""
    accuracy: float
    """Share of the samples whose outcome it tells, before the update, over all ranks."""
    grad_norm: float
    """Before clipping."""
    flops: float
    """Of this rank."""


def outcome_losses(
    logprobs_N: Tensor,
    reference_N: Tensor,
    samples_N: Tensor,
    outcomes_S: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return -o·log σ(R) - (1 - o)·log(1 - σ(R)) of each sample [S], with its gradient, and R [S].

    samples: the number of each token's sample. A sample without a token has R = 0.
    """
    ratios_N = logprobs_N.double() - reference_N.double()
    sums_S = torch.zeros_like(outcomes_S, dtype=torch.float64).index_add(0, samples_N, ratios_N)
    rewards_S = beta * sums_S
    losses_S = F.binary_cross_entropy_with_logits(rewards_S, outcomes_S.double(), reduction="none")
    return losses_S, rewards_S.detach()


def train_on_outcomes(
    policy: Policy,
    model: RewardModel,
    step: Update,
    config: GRPOConfig,
    here: Ranks,
    lr_scale: float,
) -> RewardPass:
    """Take one step of the reward model. The rows hold the reference's log-probabilities. Call it
    inside of `model.swapped_in`. A collective.
    """
    shares = math.fsum(sample.share for sample in step.rows.samples)
    total = float(here.sum(torch.tensor(shares, dtype=torch.float64, device=here.device)))
    sums = Sums()
    found = []
    for batch in step.microbatches(config, here.device):
        trained = batch["trained"]
        # Another model chooses its own experts.
        out = policy(*policy_inputs(batch), HeadOptions(trained=trained))
        reference_N = batch["reference_logprobs"].flatten()[trained]
        samples_N = batch["sample_ids"].flatten()[trained]
        outcomes_S = batch["sample_rewards"].clamp(0.0, 1.0)
        shares_S = batch["sample_shares"]
        losses_S, rewards_S = outcome_losses(
            out.logprobs, reference_N, samples_N, outcomes_S, config.implicit_beta
        )
        losses_S = losses_S * shares_S
        (losses_S.sum() * (here.world_size / total)).backward()
        right_S = (rewards_S > 0) == (outcomes_S > 0.5)
        sums.add(loss=losses_S, right=right_S * shares_S)
        found.append(out.logprobs.detach().cpu())
    norm = model.step(lr_scale)
    labelled = step.rows.labels != IGNORE
    values = torch.cat(found)
    logprobs = torch.full(labelled.shape, torch.nan, dtype=values.dtype)
    logprobs[labelled] = values
    whole = sums.over_ranks(here)
    # The loss of whole samples has the head recompute its logits.
    work = work_counts(step.rows, policy.decoder.config, config, head_again=1)
    flops = work["flops"] + work["recomputation"]
    return RewardPass(logprobs, whole["loss"] / total, whole["right"] / total, norm, flops)
