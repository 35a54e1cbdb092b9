"""One iteration of group-relative policy optimisation: `tune run [torchrun options] ttrl/grpo_recipe --config FILE`.

Reads packed rows and a model folder, writes a model folder, the optimizer's state and one line per optimizer step:

    packed.safetensors + model [+ state]  →  output_dir/checkpoint, output_dir/state, output_dir/train.jsonl

The loss of a step is Σ w·ℓ / Z over all its trained tokens, with ℓ the clipped ratio loss (plus kl_coefficient times k3),
weights w from the pack, and Z known before the first forward pass and the same on all ranks; so accumulation, microbatches and
ranks change nothing but rounding. With the same inputs, seed, threads and one process, the result is the same bit for bit. The
settings: `ttrl.configs.GRPOConfig`.

Has run on CPU with one process and with two over gloo; CUDA and NCCL: never run on a GPU yet.
"""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.config import parse

from ttrl.configs import GRPOConfig
from ttrl.data.packing import PackedTensors
from ttrl.files import append_jsonl
from ttrl.training.batches import Update, check_pack, row_logprobs, updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.distributed import Ranks, run_recipe
from ttrl.training.logprobs import IGNORE
from ttrl.training.losses import clipped_ratio_loss, k3_divergence, known_or_current
from ttrl.training.metrics import Sums, sampler_against_trainer
from ttrl.training.optim import clip_and_step, learning_rate, load_state, make_optimizer, save_state
from ttrl.training.policy import Policy, load_policy
from ttrl.training.progress import Progress

logger = logging.getLogger("ttrl.grpo_recipe")


def train(config: GRPOConfig, here: Ranks) -> None:
    """The recipe, a page of steps."""
    started = time.perf_counter()
    packed = PackedTensors.load(config.packed)
    policy = load_policy(config, here)
    check_pack(packed, policy)
    optimizer = make_optimizer(policy, config)
    global_step = load_state(config.state, policy, optimizer) if config.state else 0

    steps = updates(packed, config.updates_per_iteration, (config.seed, config.iteration), here)
    if config.kl_coefficient > 0:
        add_reference_logprobs(policy, steps, config, here)
    drift = sampler_drift(policy, steps, config, here) if len(steps) > 1 else None
    progress = Progress(sum(-(-step.rows.num_rows // config.rows_per_microbatch) for step in steps), here)

    for number, step in enumerate(steps):
        began = time.perf_counter()
        sums, compared = accumulate_gradients(policy, step, config, here, progress)
        grad_norm = clip_and_step(policy, optimizer, config, global_step)
        if number == 0 and drift is None:
            drift = sampler_against_trainer(*compared)
        global_step += 1
        if here.is_first:
            row = {"global_step": global_step, "iteration": config.iteration, "lr": learning_rate(config, global_step - 1)}
            row |= step_metrics(sums, step, config) | {"grad_norm": grad_norm, "seconds": time.perf_counter() - began}
            append_jsonl(Path(config.output_dir, "train.jsonl"), row | ({"sampler_trainer": drift} if number == 0 else {}))

    save_checkpoint(Path(config.output_dir, "checkpoint"), policy, config.model, here)
    save_state(Path(config.output_dir, "state"), policy, optimizer, global_step, here)
    logger.info("%d optimizer steps, %.1f s in all", len(steps), time.perf_counter() - started)


def accumulate_gradients(
    policy: Policy, step: Update, config: GRPOConfig, here: Ranks, progress: Progress
) -> tuple[dict[str, float], tuple[torch.Tensor, torch.Tensor]]:
    """Adds the gradient of the whole step to the parameters. Returns the step's sums over the ranks, and the log-probabilities of
    all its trained tokens under the trainer and the sampler, both [N]."""
    sums, compared = Sums(), []
    for batch in step.microbatches(config.rows_per_microbatch, here.device):
        logprobs, entropy = policy(*(batch[name] for name in ("tokens", "labels", "group_ids", "parent_ids", "input_pos")))
        trained = batch["labels"] != IGNORE
        sampled, advantages, weights = (batch[name][trained] for name in ("logprobs", "advantages", "weights"))
        old = known_or_current(sampled, logprobs)
        policy_loss = clipped_ratio_loss(logprobs, old, advantages, config.clip_low, config.clip_high)
        loss = policy_loss
        if config.kl_coefficient > 0:
            kl = k3_divergence(logprobs, batch["reference_logprobs"][trained])
            loss = loss + config.kl_coefficient * kl
            sums.add(kl=kl * weights)
        step.backward(loss * weights)

        ratio = (logprobs - old).detach().exp()
        sums.add(
            loss=loss * weights,
            policy_loss=policy_loss * weights,
            entropy=entropy,
            clipped_low=((ratio < 1 - config.clip_low) & (advantages < 0)).float(),
            clipped_high=((ratio > 1 + config.clip_high) & (advantages > 0)).float(),
            trained_tokens=trained.sum(),
            row_tokens=(batch["group_ids"] >= 0).sum(),
        )
        compared.append(torch.stack([logprobs.detach().float(), sampled]))
        progress.advance()
    both = torch.cat(compared, dim=1)
    return sums.over_ranks(here), (here.gather(both[0]), here.gather(both[1]))


def step_metrics(sums: dict[str, float], step: Update, config: GRPOConfig) -> dict[str, Any]:
    """Sums over all ranks → what train.jsonl says of the step."""
    tokens = max(sums["trained_tokens"], 1)
    metrics = {name: sums[name] / step.normaliser for name in ("loss", "policy_loss", "kl") if name in sums}
    metrics |= {"entropy": sums["entropy"] / tokens}
    metrics |= {f"clip_fraction_{side}": sums[f"clipped_{side}"] / tokens for side in ("low", "high")}
    return metrics | {
        "trained_tokens": int(sums["trained_tokens"]),
        "row_tokens": int(sums["row_tokens"]),
        "normaliser": step.normaliser,
    }


def add_reference_logprobs(policy: Policy, steps: list[Update], config: GRPOConfig, here: Ranks) -> None:
    """Computes the reference model's log-probabilities by swapping its weights in, and puts them beside the other tensors."""
    assert config.reference_model is not None, "the config's own check asks for it"
    policy.load_folder(config.reference_model)
    for step in steps:
        step.rows.reference_logprobs = row_logprobs(policy, step.rows, config.rows_per_microbatch, here.device)
    policy.load_folder(config.model)


def sampler_drift(policy: Policy, steps: list[Update], config: GRPOConfig, here: Ranks) -> dict[str, float | int]:
    """`sampler_against_trainer` over all tokens in a pass of its own, for iterations in which later steps see changed weights."""
    pairs = []
    for step in steps:
        trained = step.rows.labels != IGNORE
        logprobs = row_logprobs(policy, step.rows, config.rows_per_microbatch, here.device)
        pairs.append(torch.stack([logprobs[trained], step.rows.logprobs[trained]]))
    both = torch.cat(pairs, dim=1)
    return sampler_against_trainer(here.gather(both[0]), here.gather(both[1]))


@parse
def main(raw: DictConfig) -> int:
    """Runs the recipe on one config."""
    return run_recipe(GRPOConfig, train, raw)


if __name__ == "__main__":
    sys.exit(main())
