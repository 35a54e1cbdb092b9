"""One iteration of group-relative policy optimisation: `tune run [torchrun options] ttrl/grpo_recipe --config FILE`.

Reads packed rows and a model folder, writes a model folder, the optimizer's state and one line per optimizer step:

    packed.safetensors + model [+ state]  →  output_dir/checkpoint, output_dir/state, output_dir/train.jsonl

The loss of a step is Σ w·ℓ / Z over all its trained tokens, with ℓ the objective's loss of a token (`ttrl.training.objectives`),
weights w from the pack, and Z known before the first forward pass and the same on all ranks; so accumulation, microbatches and
ranks change nothing but rounding. With the same inputs, seed, threads and one process, the result is the same bit for bit. The
settings: `ttrl.configs.GRPOConfig`.

Has run on CPU with one process and with two over gloo; CUDA and NCCL: never run on a GPU yet.
"""

import logging
import sys
import time
from pathlib import Path

from omegaconf import DictConfig
from torchtune.config import parse

from ttrl.configs import GRPOConfig
from ttrl.data.packing import PackedTensors
from ttrl.training.batches import check_pack, updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.distributed import Ranks, run_recipe
from ttrl.training.faults import memory_advice
from ttrl.training.loading import load_policy
from ttrl.training.metrics import sampler_against_trainer
from ttrl.training.objectives import objective_from
from ttrl.training.prepass import Prepass
from ttrl.training.profiling import Profiler
from ttrl.training.progress import Progress
from ttrl.training.references import check_reference
from ttrl.training.step import GradientStep, step_metrics
from ttrl.training.stopwatch import Stopwatch
from ttrl.training.taking import Stepper
from ttrl.training.train_log import TrainLog
from ttrl.training.value_training import ValueTraining

logger = logging.getLogger("ttrl.grpo_recipe")


def train(config: GRPOConfig, here: Ranks) -> None:
    """The recipe, a page of steps."""
    started = time.perf_counter()
    packed = PackedTensors.load(config.packed)
    check_reference(packed, config)
    with memory_advice(config, packed.seq_len):
        policy = load_policy(config, here)
        check_pack(packed, policy, config.model)
        values = ValueTraining(config, policy.decoder.tok_embeddings.embedding_dim, here) if config.value_head else None
        value_head = None if values is None else values.head
        stepper = Stepper(policy, config, here, config.state, values)

        watch = Stopwatch(here.device)
        steps = updates(packed, config.updates_per_iteration, (config.seed, config.iteration), here)
        objective = objective_from(config)
        progress = Progress(sum(-(-step.rows.num_rows // config.rows_per_microbatch) for step in steps), here)
        profiler, log = Profiler(config.output_dir, config.profile_steps, here), TrainLog(config, policy, here, watch)

        prepass = Prepass(policy, packed, steps, objective, config, here, stepper.global_step, value_head)
        with watch.part("prepass"):
            prepass.run()
        drift = prepass.drift
        gradient = GradientStep(policy, config, here, watch, progress, value_head, prepass.reference_head)
        for number, step in enumerate(steps):
            with profiler.step(f"optimizer step {stepper.global_step + 1}"):
                with watch.part("prepass"):
                    prepass.choose(number)
                scale = step.num_rows / config.lr_rows if config.lr_rows else 1.0
                stepper.begin(scale)
                result = gradient.accumulate(step, objective.at(stepper.global_step), compare=drift is None)
                drift = drift or sampler_against_trainer(*result.compared)
                with watch.part("optimizer"):
                    taken = stepper.take(result.sums["not_finite"], result.first_bad, scale)
            row = {"global_step": stepper.global_step, "iteration": config.iteration} | step_metrics(result, step) | taken
            log.line(row | ({"sampler_trainer": drift} if number == 0 else {}), result.sums["flops"])
        profiler.close()

        with watch.part("checkpoint"):
            folder, dtype = Path(config.output_dir, "checkpoint"), config.checkpoint_dtype
            save_checkpoint(folder, policy, config.model, here, checkpoint_dtype=dtype, config=config)
            stepper.save(Path(config.output_dir, "state"))
        log.close()
    logger.info("%d optimizer steps, %.1f s in all", len(steps), time.perf_counter() - started)


@parse
def main(raw: DictConfig) -> int:
    """Runs the recipe on one config."""
    return run_recipe(GRPOConfig, train, raw)


if __name__ == "__main__":
    sys.exit(main())
