"""Measure an iteration's inputs before its first optimizer step, in passes without gradient.

- the sampler's log-probabilities again, under its own weights, for some rows of a pack sampled by
  an older policy;
- the policy's log-probabilities at the start, if later steps see changed weights or advantages are
  made from them;
- the reference model's log-probabilities, by swapping its weights in, unless the pack holds them
  already; its hidden states and its head, for KL over the whole vocabulary;
- values of the value head;
- the reward model's log-probabilities, by swapping it in, and training it: the one pass with a
  gradient;
- and before a step, the tokens for Clip-Cov and KL-Cov.

The results go to `Update.signals` or to the rows, and from there into microbatches. `python -m
ttrl.training.prepass --reference MODEL --packed FILE --output FILE` stores the reference's
log-probabilities with a pack.

Shapes: R rows of a step on this rank, P rows of the whole pack, T positions, N trained positions, D
width, V vocabulary.
"""

import argparse
import dataclasses
import logging
import sys
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.data.packing.pack import PackedTensors
from ttrl.facts import SamplerTrainer
from ttrl.training.batches import Update, check_pack, policy_inputs, updates
from ttrl.training.counts import forward_work
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.objective.covariance import token_keys
from ttrl.training.objective.objective import StepObjective
from ttrl.training.objective.token_rewards import (
    divergence_penalties,
    implicit_advantages,
    token_divergences,
    value_advantages,
)
from ttrl.training.optimizer.implicit_reward import RewardModel
from ttrl.training.parallel.distributed import Ranks, run_on_ranks
from ttrl.training.policy.adapters import as_policy_of, as_reference
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions, Policy
from ttrl.training.policy.value_head import ValueHead
from ttrl.training.references import reference_facts
from ttrl.training.reward_pass import RewardPass, train_on_outcomes
from ttrl.training.sampler_drift import compare_tokens

logger = logging.getLogger("ttrl.training")

_WATCHED = 12
"""With `watch_kl`, KL is measured on one row in this many: a third of a gradient's cost, so 3% of a
step.
"""


class Prepass:
    """The passes of one iteration. `steps`: this rank's parts of its optimizer steps; `first_step`:
    the step before them.
    """

    def __init__(
        self,
        policy: Policy,
        packed: PackedTensors,
        steps: list[Update],
        objective: StepObjective,
        config: GRPOConfig,
        here: Ranks,
        first_step: int,
        value_head: ValueHead | None = None,
        rewards: RewardModel | None = None,
    ) -> None:
        self._policy = policy
        self._packed = packed
        self._steps = steps
        self._config = config
        self._here = here
        self._objectives = [objective.at(first_step + number) for number in range(len(steps))]
        self._value_head = value_head
        self._rewards = rewards
        self.reward_passes: list[RewardPass] = []
        """The reward model's training, of each step; empty without one."""
        self.reference_head: tuple[Tensor, Tensor | None] | None = None
        """The reference model's output projection [V, D] and its bias, for KL over the whole
        vocabulary.
        """
        self.drift: SamplerTrainer | None = None
        """`compare_tokens` over the whole iteration, if a pass was made for it."""
        self.own_weights: SamplerTrainer | None = None
        """The same for some rows' tokens sampled by `config.sampler_version`, under its own
        weights, if given.
        """
        self._spent: defaultdict[str, float] = defaultdict(float)

    def take_spent(self) -> dict[str, float]:
        """Return the FLOPs of this rank's passes since the last call, by
        `ttrl.training.counts.PARTS`.
        """
        spent = self._spent
        self._spent = defaultdict(float)
        return dict(spent)

    def run(self) -> None:
        """Make all passes but the choice of tokens. A collective."""
        if self._config.sampler_model is not None and self._config.sampler_rows:
            self.own_weights = self._compared_under(self._config.sampler_model)
        rewards = any(objective.needs_token_rewards for objective in self._objectives)
        own = rewards and self._rewards is None
        if own or (len(self._steps) > 1 and self._config.start_of_all_rows):
            for step in self._steps:
                step.signals |= self._signals(step, self._value_head)
            self.drift = self._compared([step.signals["start_logprobs"] for step in self._steps])
        # With dropout, the pass with a gradient computes another model than the sampler's.
        elif self._config.lora_dropout:
            self.drift = self._compared(
                [self._signals(step)["start_logprobs"] for step in self._steps]
            )
        self._add_reference()
        if self._rewards is not None:
            self._train_rewards(self._rewards)
        if rewards:
            self._add_token_rewards()

    def _compared(self, start_logprobs: list[Tensor]) -> SamplerTrainer:
        """Compare sampler and trainer on all steps. start_logprobs: [R, T] of each step. A
        collective.
        """
        trained = [step.rows.labels != IGNORE for step in self._steps]
        mine = torch.cat(
            [values[chosen] for values, chosen in zip(start_logprobs, trained, strict=True)]
        )
        sampled = torch.cat(
            [step.rows.logprobs[chosen] for step, chosen in zip(self._steps, trained, strict=True)]
        )
        shape = self._packed.labels.shape
        return compare_tokens(self._steps, mine, sampled, shape, self._config, self._here)

    def _compared_under(self, folder: str) -> SamplerTrainer:
        """Compare the tokens of the policy in `folder`, in rows of the first step, under its own
        weights. A collective.
        """
        config = self._config
        here = self._here
        step = self._steps[0]
        trained = step.rows.labels != IGNORE
        judged = trained & (step.rows.weights_version == config.sampler_version)
        # The same on all ranks.
        count = min(-(-config.sampler_rows // here.world_size), step.rows.num_rows)
        chosen = sorted(judged.sum(dim=1).topk(count).indices.tolist())
        part = step.only(chosen)
        with as_policy_of(self._policy, config, folder):
            logprobs = self._signals(part)["start_logprobs"]
        # Tokens of others count as unknown.
        sampled = torch.where(judged, step.rows.logprobs, torch.nan)[chosen]
        figures = compare_tokens(
            [part],
            logprobs[trained[chosen]],
            sampled[trained[chosen]],
            self._packed.labels.shape,
            config,
            here,
            write=False,
        )
        rows = int(here.sum(judged[chosen].any(dim=1).sum().to(here.device)))
        return figures.replace(
            version=config.sampler_version, rows=rows, by_version=None, unknown=None
        )

    def choose(self, number: int) -> None:
        """Choose the objective's tokens for step `number`, if it chooses any. A collective."""
        step = self._steps[number]
        objective = self._objectives[number]
        if not objective.needs_prepass:
            return
        if number == 0 and "start_logprobs" in step.signals:
            logprobs = step.signals["start_logprobs"]
        else:
            logprobs = self._signals(step)["start_logprobs"]
        if objective.needs_start_logprobs:
            old = step.signals.get("start_logprobs", logprobs)
        else:
            old = step.rows.logprobs
        trained = step.rows.labels != IGNORE
        own_keys = token_keys(step.rows)[trained]
        own = (logprobs[trained], old[trained], step.rows.advantages[trained], own_keys)
        logprobs_N, old_N, advantages_N, keys_N = (self._here.gather(values) for values in own)
        chosen_N = objective.choose(
            logprobs_N, old_N, advantages_N, keys_N, self._config.seed + objective.global_step
        )
        step.signals["chosen"] = torch.zeros_like(trained)
        step.signals["chosen"][trained] = torch.isin(own_keys, keys_N[chosen_N])

    def _signals(
        self, step: Update, head: ValueHead | None = None, part: str = "prepass"
    ) -> dict[str, Tensor]:
        self._count(step, part)
        replays = part != "reference"  # another model chooses its own experts
        return row_signals(
            self._policy, step, self._config, self._here.device, head, replays=replays
        )

    def _count(self, step: Update, part: str, head: bool = True) -> None:
        """Count a pass over the step's rows; the reference is the base without adapters."""
        settings = self._config
        if part == "reference":
            settings = dataclasses.replace(settings, lora_rank=None)
        model = self._policy.decoder.config
        self._spent[part] += forward_work(step.rows, model, settings, head=head)

    def _add_reference(self) -> None:
        estimates = any(objective.needs_reference for objective in self._objectives)
        estimates = estimates and self._packed.reference_logprobs is None
        whole = any(objective.needs_divergence_grad for objective in self._objectives)
        if not (estimates or whole):
            return self._watch_reference()
        with as_reference(self._policy, self._config):
            for step in self._steps:
                if estimates:
                    signals = self._signals(step, part="reference")
                    step.rows.reference_logprobs = signals["start_logprobs"]
                if whole:
                    self._count(step, "reference", head=False)
                    step.reference_hidden = row_hidden(
                        self._policy, step, self._config, self._here.device
                    )
            if whole:
                self.reference_head = self._policy.whole_head()

    def _watch_reference(self) -> None:
        """Measure the reference's log-probabilities of some rows, for the first step's KL; a
        collective.
        """
        config = self._config
        here = self._here
        rows = sum(one.num_rows for one in self._steps)
        known = self._packed.reference_logprobs is not None
        if not (config.watch_kl and rows) or known or (config.iteration - 1) % -(-_WATCHED // rows):
            return
        step = self._steps[0]
        # The same on all ranks.
        count = min(-(-rows // (_WATCHED * here.world_size)), step.rows.num_rows)
        chosen = torch.linspace(0, step.rows.num_rows - 1, count).long().tolist()
        part = step.only(chosen)
        with as_reference(self._policy, config):
            measured = self._signals(part, part="reference")["start_logprobs"]
        step.rows.reference_logprobs = torch.full(step.rows.labels.shape, torch.nan)
        step.rows.reference_logprobs[chosen] = measured

    def _train_rewards(self, model: RewardModel) -> None:
        """Train the reward model on each step's outcomes, and keep its log-probabilities."""
        config = self._config
        odd = sum(not 0 <= sample.reward <= 1 for sample in self._packed.samples)
        if odd and self._here.is_first:
            logger.warning(
                "the reward model learns outcomes between 0 and 1: the rewards of %d of %d samples "
                "count as the nearer of the two",
                odd,
                len(self._packed.samples),
            )
        with model.swapped_in():
            for step in self._steps:
                scale = step.num_rows / config.lr_rows if config.lr_rows else 1.0
                done = train_on_outcomes(self._policy, model, step, config, self._here, scale)
                step.signals["reward_logprobs"] = done.logprobs
                self.reward_passes.append(done)
                self._spent["reward_model"] += done.flops

    def _add_token_rewards(self) -> None:
        """Compute new advantages over the whole pack, on every rank alike, and give each step its
        own.
        """
        config = self._config
        packed = self._packed
        reference = packed.reference_logprobs
        if reference is None and any(objective.needs_reference for objective in self._objectives):
            reference = self._over_pack(lambda step: step.rows.reference_logprobs)
        if config.token_rewards == "implicit":
            assert reference is not None
            logprobs = self._over_pack(lambda step: step.signals["reward_logprobs"])
            self._deal_out(
                implicit_advantages(packed, logprobs, reference, config.implicit_beta, config.gamma)
            )
            return
        logprobs = self._over_pack(lambda step: step.signals["start_logprobs"])
        for beta in sorted({objective.kl_in_reward for objective in self._objectives}):
            concerned = [
                s
                for s, objective in zip(self._steps, self._objectives, strict=True)
                if objective.kl_in_reward == beta
            ]
            if config.value_head:
                values = self._over_pack(lambda step: step.signals["old_values"])
                extra = None
                if beta:
                    assert reference is not None
                    extra = token_divergences(
                        packed, logprobs, reference, beta, config.kl_estimator
                    )
                advantages, returns = value_advantages(
                    packed, values, config.gamma, config.lam, extra
                )
                self._deal_out(advantages, concerned)
                for step in concerned:
                    step.signals["returns"] = _of_rows(returns, step.numbers)
            elif beta:
                assert reference is not None
                charges = divergence_penalties(
                    packed, logprobs, reference, beta, config.kl_estimator, config.gamma
                )
                self._deal_out(packed.advantages + charges, concerned)

    def _deal_out(self, advantages_PT: Tensor, steps: list[Update] | None = None) -> None:
        for step in self._steps if steps is None else steps:
            step.rows.advantages = _of_rows(advantages_PT, step.numbers)

    def _over_pack(self, of: Callable[[Update], Tensor | None]) -> Tensor:
        mine = [(step.numbers, values) for step in self._steps if (values := of(step)) is not None]
        return _whole(mine, self._packed, self._here)


def _whole(mine: list[tuple[list[int], Tensor]], packed: PackedTensors, here: Ranks) -> Tensor:
    """Return [P, T] of the whole pack from all ranks' (row numbers, [R, T]); NaN for rows without
    labels.
    """
    whole = torch.full(packed.labels.shape, torch.nan)
    numbers = here.gather(
        torch.tensor([number for numbers, _ in mine for number in numbers], dtype=torch.int64)
    )
    rows = here.gather(torch.cat([whole[:0], *(values.float().cpu() for _, values in mine)]))
    whole[numbers[numbers >= 0]] = rows[numbers >= 0]
    return whole


def _of_rows(whole_PT: Tensor, numbers: list[int]) -> Tensor:
    """Return the rows with these numbers [R, T]; zeros for -1."""
    padded = torch.cat([whole_PT, whole_PT.new_zeros(1, whole_PT.shape[1])])
    return padded[numbers]


@torch.no_grad()
def row_signals(
    policy: Policy,
    step: Update,
    config: TrainingConfig,
    device: torch.device,
    value_head: ValueHead | None = None,
    *,
    replays: bool = True,
) -> dict[str, Tensor]:
    """Return "start_logprobs" [R, T] of all labels under the current policy, NaN elsewhere; with a
    value head also "old_values" [R, T] at the label-predicting positions, 0 elsewhere. A collective
    if the policy is sharded. replays: with the sampler's experts, if the rows hold them.
    """
    labelled = step.rows.labels != IGNORE
    result: dict[str, Tensor] = {}
    logprobs = []
    values = []
    for batch in step.microbatches(config, device):
        options = HeadOptions(value_head=value_head, trained=batch["trained"])
        out = policy(*policy_inputs(batch), options, batch.get("experts") if replays else None)
        logprobs.append(out.logprobs.cpu())
        values += [out.values.float().cpu()] if out.values is not None else []
    found = torch.cat(logprobs)
    result["start_logprobs"] = torch.full(labelled.shape, torch.nan, dtype=found.dtype)
    result["start_logprobs"][labelled] = found  # both in row-major order
    if value_head is not None:
        result["old_values"] = torch.zeros(labelled.shape)
        result["old_values"][labelled] = torch.cat(values)
    return result


@torch.no_grad()
def row_hidden(
    policy: Policy, step: Update, config: TrainingConfig, device: torch.device
) -> list[Tensor]:
    """Return the hidden states at the trained positions of each row, [N, D] each, on the CPU. A
    collective if sharded.
    """
    parts = [
        policy(
            *policy_inputs(batch), HeadOptions(hidden=True, trained=batch["trained"])
        ).hidden.cpu()
        for batch in step.microbatches(config, device)
    ]
    return list(torch.cat(parts).split((step.rows.labels != IGNORE).sum(dim=1).tolist()))


def store_reference_logprobs(
    config: GRPOConfig, here: Ranks, packed: PackedTensors
) -> PackedTensors:
    """Return the pack with reference log-probabilities from `config.model`, and their source. A
    collective.
    """
    policy = load_policy(config, here)
    check_pack(packed, policy)
    (step,) = updates(packed, 1, (config.seed, 0), here, policy.decoder.config)
    mine = (
        step.numbers,
        row_signals(policy, step, config, here.device, replays=False)["start_logprobs"],
    )
    metadata = packed.metadata | reference_facts(config)
    return dataclasses.replace(
        packed, reference_logprobs=_whole([mine], packed, here), metadata=metadata
    )


def main(argv: list[str] | None = None) -> int:
    """Store a reference model's log-probabilities with a pack, to train without a second model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--reference", required=True, help="model folder")
    parser.add_argument("--packed", required=True)
    parser.add_argument("--output", required=True, help="may be the same file")
    parser.add_argument("--temperature", type=float, default=1.0, help="the sampler's")
    parser.add_argument(
        "--context", type=int, help="the server's max_model_len, where it is not the model's own"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rows-per-microbatch", type=int, default=4)
    arguments = parser.parse_args(argv)
    config = GRPOConfig(
        model=arguments.reference,
        packed=arguments.packed,
        output_dir="",
        dtype=arguments.dtype,
        rows_per_microbatch=arguments.rows_per_microbatch,
        temperature=arguments.temperature,
        context=arguments.context,
    )

    def store(config: GRPOConfig, here: Ranks) -> None:
        packed = store_reference_logprobs(config, here, PackedTensors.load(arguments.packed))
        if here.is_first:
            packed.save(arguments.output)
        here.barrier()

    return run_on_ranks(lambda: config.check("arguments"), store, logger)


if __name__ == "__main__":
    sys.exit(main())
