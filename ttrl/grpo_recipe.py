"""One iteration of group-relative policy optimisation: `tune run [torchrun options]
ttrl/grpo_recipe --config FILE`.

Reads packed rows and a model folder, writes a model folder, the optimizer's state and one line per
optimizer step:

    packed.safetensors + model [+ state]  →  output_dir/checkpoint, output_dir/state,
    output_dir/train.jsonl

The loss of a step is Σ w·ℓ / Z over all its trained tokens, with ℓ the objective's loss of a token
(`ttrl.training.objective.objective`), weights w from the pack, and Z known before the first forward
pass and the same on all ranks; so accumulation, microbatches and ranks only change the rounding.
With the same inputs, seed, threads and one process, the result is the same bit for bit. The
settings: `ttrl.configs.GRPOConfig`. With `follow` the process stays up and trains one iteration
after the other, with the same result (`ttrl.training.resident`). Without a pack, nothing is
trained: the model in output_dir/checkpoint gets its canary.

Has run on CPU with one process and with two over gloo, and on one GPU (tests/gpu: the same updates
to 1e-5; `cpu_offload` ran, and was not compared); on several: never.
"""

import logging
import sys
import time
from pathlib import Path

from omegaconf import DictConfig
from torchtune.config import parse

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors
from ttrl.instruments.gradient_noise import step_noise
from ttrl.instruments.online_entropy import OnlineEntropy
from ttrl.records import Canary
from ttrl.training.batches import check_pack, replayed, updates
from ttrl.training.checkpoints import canary_of, save_checkpoint
from ttrl.training.faults import memory_advice
from ttrl.training.objective.objective import objective_from
from ttrl.training.parallel.distributed import Ranks, recipe_main, run_recipe
from ttrl.training.prepass import Prepass
from ttrl.training.references import check_reference
from ttrl.training.resident import Residence, Trained, follow_requests, load_trained
from ttrl.training.sampler_drift import compare_tokens, warn_of_drift
from ttrl.training.step import GradientStep, step_metrics
from ttrl.training.step_noise import GradientPieces
from ttrl.training.timing import Profiler, Stopwatch
from ttrl.training.train_log import TrainLog, TrainProgress
from ttrl.training.trainer_canary import CANARY_LENGTH, write_canary

logger = logging.getLogger("ttrl.grpo_recipe")


def train_iteration(config: GRPOConfig, here: Ranks, residence: Residence | None = None) -> None:
    """Train one iteration. `residence`: this process's state from the iteration before, and for the
    next one.
    """
    if not config.packed:
        return (make_canary if config.kept is None else write_kept)(config, here, residence)
    started = time.perf_counter()
    packed = PackedTensors.load(config.packed)
    check_reference(packed, config)
    with memory_advice(config, packed.seq_len):
        if residence is None:
            trained = load_trained(config, here)
        else:
            trained = residence.enter(config)
        check_pack(packed, trained.policy, config.model)
        packed = replayed(packed, trained.policy, config)
        watch = Stopwatch(here.device)
        log = TrainLog(config, trained.policy, here, watch)
        # Its objects on the device are gone with it.
        steps = take_steps(config, trained, packed, here, watch, log)

        with watch.part("checkpoint", on_cpu=True):
            canary = canary_of(trained.policy, config.model, here, config.checkpoint_dtype)
            # Servers may fetch it during the write; the rest is written in any case.
            is_out = residence is not None and residence.hand_over(
                config, trained, canary, log.compared
            )
            is_written = config.save or not is_out
            if is_written:
                write_files(config, trained, here, canary)
        log.close()
        if residence is not None:
            residence.leave(config, trained, is_written)
    logger.info("%d optimizer steps, %.1f s in all", steps, time.perf_counter() - started)


def take_steps(
    config: GRPOConfig,
    trained: Trained,
    packed: PackedTensors,
    here: Ranks,
    watch: Stopwatch,
    log: TrainLog,
) -> int:
    """Take the optimizer steps of an iteration, a line in the log for each; return how many. A
    collective.
    """
    policy, stepper, values, rewards = trained
    value_head = None if values is None else values.head
    steps = updates(
        packed,
        config.updates_per_iteration,
        (config.seed, config.iteration),
        here,
        policy.decoder.config,
    )
    objective = objective_from(config)
    progress = TrainProgress(
        sum(-(-step.rows.num_rows // config.rows_per_microbatch) for step in steps), here
    )
    profiler = Profiler(config.output_dir, config.profile_steps, here)

    first_step = stepper.global_step
    prepass = Prepass(
        policy, packed, steps, objective, config, here, first_step, value_head, rewards
    )
    with watch.part("prepass"):
        prepass.run()
    drift = prepass.drift
    if config.sees_gradients:
        pieces = GradientPieces(policy, config, here)
    else:
        pieces = None
    gradient = GradientStep(
        policy, config, here, watch, progress, value_head, prepass.reference_head, pieces
    )
    online = None
    if config.entropy_every is not None:
        online = OnlineEntropy(config, trained, prepass, here)
    for number, step in enumerate(steps):
        response = None
        with profiler.step(f"optimizer step {stepper.global_step + 1}"):
            with watch.part("prepass"):
                prepass.choose(number)
            if config.lr_rows:
                scale = step.num_rows / config.lr_rows
            else:
                scale = 1.0
            stepper.begin(scale)
            now = objective.at(stepper.global_step)
            result = gradient.accumulate(
                step, now, compare=drift is None, before=prepass.take_spent()
            )
            if drift is None:
                assert result.compared is not None
                drift = compare_tokens([step], *result.compared, packed.labels.shape, config, here)
            if online is not None and online.is_due(stepper.global_step):
                with watch.part("entropy"):
                    response = online.measure(step, now, scale)
            with watch.part("optimizer"):
                taken = stepper.take(result.sums["not_finite"], result.first_bad, scale)
        row = step_metrics(result, step, taken).replace(
            global_step=stepper.global_step, iteration=config.iteration
        )
        if prepass.reward_passes:
            learned = prepass.reward_passes[number]
            row = row.replace(
                reward_model_loss=learned.loss,
                reward_model_accuracy=learned.accuracy,
                reward_model_grad_norm=learned.grad_norm,
            )
        if result.pieces is not None:
            row = row.replace(gradient_noise=step_noise(result.pieces))
        if response is not None:
            row = row.replace(entropy_response=response)
        if config.kl_coefficient or config.watch_kl:
            row = row.replace(kl_coefficient=now.kl_coefficient)
        if number == 0:
            assert drift is not None
            drift = drift.replace(own_weights=prepass.own_weights)
            warn_of_drift(drift, config, here)
            row = row.replace(sampler_trainer=drift)
        log.line(row, result.sums["flops"])
    profiler.close()
    if pieces is not None:
        pieces.close()
    return len(steps)


def write_files(config: GRPOConfig, trained: Trained, here: Ranks, canary: Canary) -> None:
    """Write checkpoint and state. A collective."""
    folder = Path(config.output_dir, "checkpoint")
    dtype = config.checkpoint_dtype
    save_checkpoint(
        folder,
        trained.policy,
        config.model,
        here,
        checkpoint_dtype=dtype,
        config=config,
        canary=canary,
    )
    trained.stepper.save(Path(config.output_dir, "state"))


def write_kept(config: GRPOConfig, here: Ranks, residence: Residence | None) -> None:
    """Write an earlier iteration's weights and state from memory, their only copy."""
    assert residence is not None
    trained = residence.enter(config, computes=False)
    assert residence.canary is not None  # servers were told of it
    write_files(config, trained, here, residence.canary)
    residence.leave(config, trained)


def make_canary(config: GRPOConfig, here: Ranks, residence: Residence | None) -> None:
    """Make the canary of the starting model; it stays loaded in a `residence`."""
    with memory_advice(config, CANARY_LENGTH):
        if residence is None:
            trained = load_trained(config, here)
        else:
            trained = residence.enter(config)
        write_canary(config, trained.policy, here)
        if residence is not None:
            residence.keep(config, trained)


def run(raw: DictConfig) -> int:
    """Run the recipe on one config, or on each new config of a folder."""
    if raw.get("follow") is None:
        return run_recipe(GRPOConfig, train_iteration, raw)
    return follow_requests(train_iteration, raw)


main = recipe_main(parse(run))

if __name__ == "__main__":
    sys.exit(main())
