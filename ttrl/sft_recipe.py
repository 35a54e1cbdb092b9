"""Supervised training on conversations, for warm starts: `tune run [torchrun options]
ttrl/sft_recipe --config FILE`.

    data.jsonl ({"messages": [...], "tools": [...]} a line) + model [+ state]
        →  output_dir/checkpoint, [output_dir/state,] output_dir/train.jsonl

The same rows, policy, head and checkpoints as `ttrl.grpo_recipe`; the loss is the mean -log π over
the trained tokens of a step: the assistant's turns, end-of-turn tokens included. If a chat template
rewrites earlier turns once the conversation continues, those are trained in sequences of their own
(`tokenize_chat_turns` in ttrl.data.chat.templates). It ends after a number of steps, or a number of
FLOPs. With its state saved, a run in pieces is the same as a whole one, bit for bit. The settings:
`ttrl.configs.SFTConfig`.

Has run on CPU with one process and with two over gloo, and on one GPU; on several: never.
"""

import bisect
import dataclasses
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune.config import parse
from transformers import AutoTokenizer

from ttrl.configs import SFTConfig
from ttrl.data.chat.templates import tokenize_chat_turns
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.errors import ConfigError, ModelFolderError, TokenizationError
from ttrl.facts import Step
from ttrl.records import TokenizedResult
from ttrl.system.files import read_jsonl
from ttrl.training.batches import Update, check_pack, policy_inputs, updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.counts import forward_work, token_counts, work_counts
from ttrl.training.faults import Finite, memory_advice
from ttrl.training.models.architecture import read_config
from ttrl.training.models.weights import check_head
from ttrl.training.parallel.distributed import Ranks, derived_generator, recipe_main, run_recipe
from ttrl.training.policy.adapters import base_folder
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions, Policy
from ttrl.training.prepass import row_signals
from ttrl.training.step import TOKENS
from ttrl.training.step_metrics import Sums
from ttrl.training.stepper import Stepper
from ttrl.training.timing import Profiler, Stopwatch
from ttrl.training.train_log import TrainLog, TrainProgress

logger = logging.getLogger("ttrl.sft_recipe")


def train_on_examples(config: SFTConfig, here: Ranks) -> None:
    examples, pad_id = read_examples(config)
    held_out = None
    if config.held_out is not None:
        held_out, _ = read_examples(config, config.held_out)
    with memory_advice(config, config.seq_len):
        policy = load_policy(config, here)
        stepper = Stepper(policy, config, here, config.state)
        watch = Stopwatch(here.device)
        profiler = Profiler(config.output_dir, config.profile_steps, here)
        log = TrainLog(config, policy, here, watch)
        progress = None

        for packed, total in packs(
            examples, pad_id, config, policy, watch, done=stepper.global_step
        ):
            progress = progress or TrainProgress(total, here)
            with profiler.step(f"optimizer step {stepper.global_step + 1}"):
                with watch.part("data"):
                    (update,) = updates(
                        packed, 1, (config.seed, stepper.global_step), here, policy.decoder.config
                    )
                stepper.begin()
                sums, first_bad = accumulate_gradients(policy, update, config, here, watch)
                with watch.part("optimizer"):
                    taken = stepper.take(sums["not_finite"], first_bad)
            progress.advance()
            line = Step(
                global_step=stepper.global_step,
                loss=sums["loss"] / update.normaliser,
                entropy=sums["entropy"] / sums["trained_tokens"],
                flops_by_part={"training": sums["flops"], "recomputation": sums["recomputation"]},
            )
            counts = {name: int(sums[name]) for name in TOKENS}
            log.line(line.replace(**counts, **taken._asdict()), sums["flops"])
        profiler.close()
        with watch.part("checkpoint"):
            folder = Path(config.output_dir, "checkpoint")
            dtype = config.checkpoint_dtype
            save_checkpoint(
                folder, policy, config.model, here, checkpoint_dtype=dtype, config=config
            )
            if config.save_state:
                stepper.save(Path(config.output_dir, "state"))
        results: dict[str, float] = {}
        if held_out is not None:
            with watch.part("held_out"):
                results = measure_held_out(held_out, pad_id, config, policy, here)
        log.close(**results)


def packs(
    examples: list[TokenizedResult],
    pad_id: int,
    config: SFTConfig,
    policy: Policy,
    watch: Stopwatch,
    done: int = 0,
) -> Iterator[tuple[PackedTensors, int]]:
    """Yield the rows of each step after the first `done`, until `steps` or `flops` are used up, and
    how many there will be (with `flops`, about). With `flops`, the last step takes only a part of
    its conversations if that comes nearer. Raises ConfigError if `flops` is not enough for a part.
    """

    def pack(batch: list[TokenizedResult]) -> PackedTensors:
        return packed_tensors_from_tokenized_results(batch, seq_len=config.seq_len, pad_id=pad_id)

    def cost_of(packed: PackedTensors) -> float:
        return work_counts(packed, policy.decoder.config, config)["flops"]

    def cost_of_first(batch: list[TokenizedResult], count: int) -> float:
        return cost_of(pack(batch[:count]))

    spent = 0.0
    for number, batch in enumerate(itertools.islice(batches(examples, config), done, None)):
        if number == config.steps:
            return
        with watch.part("data"):
            packed = pack(batch)
            check_pack(packed, policy)
            cost = cost_of(packed)
        steps = config.steps or max(1, round((config.flops or 0.0) / cost))
        if config.flops is not None and spent + cost > config.flops:
            with watch.part("data"):
                left = config.flops - spent
                count = nearest_part(len(batch), left, functools.partial(cost_of_first, batch))
            if count:
                yield pack(batch[:count]), steps
            elif not number:
                what = "too little for a quarter of a step"
                takes = f"{config.batch_size} conversations take {cost:.3g}"
                raise ConfigError(
                    "sft_recipe config",
                    [
                        f"flops is {config.flops:.3g}, {what}: {takes}; lower batch_size, or allow "
                        "more"
                    ],
                )
            return
        yield packed, steps
        spent += cost


def nearest_part(size: int, left: float, cost_of: Callable[[int], float]) -> int:
    """Return how many conversations of a batch come nearest to `left`: none, or a quarter and more,
    as fewer would make a noisy step. cost_of: the cost of the first so many; it rises.
    """
    least = math.ceil(size / 4)
    above = bisect.bisect_left(range(size + 1), left, lo=least, key=cost_of)
    parts = [0, *{max(least, above - 1), min(size, above)}]
    distances = {count: abs((cost_of(count) if count else 0.0) - left) for count in parts}
    return min(distances, key=lambda count: distances[count])


def accumulate_gradients(
    policy: Policy, update: Update, config: SFTConfig, here: Ranks, watch: Stopwatch
) -> tuple[dict[str, float], str | None]:
    """Add the step's gradient to the parameters. Returns sums over the ranks, and the place of this
    rank's first loss that is not finite.
    """
    sums = Sums()
    finite = Finite()
    for rows in update.microbatches(config, here.device):
        loss_of = functools.partial(weighted_loss, rows["weights"].flatten()[rows["trained"]])
        with watch.part("forward"):
            out = policy(
                *policy_inputs(rows), HeadOptions(token_loss=loss_of, trained=rows["trained"])
            )
        with watch.part("backward"):
            update.backward(out.loss)
        losses = loss_of(out.logprobs, slice(None))
        finite.look(losses)
        sums.add(loss=losses, entropy=out.entropy, **token_counts(rows))
    sums.add(not_finite=finite.count(), **work_counts(update.rows, policy.decoder.config, config))
    return sums.over_ranks(here), finite.described(
        update.rows, update.numbers, config.rows_per_microbatch
    )


def measure_held_out(
    examples: list[TokenizedResult], pad_id: int, config: SFTConfig, policy: Policy, here: Ranks
) -> dict[str, float]:
    """Return the mean -log π of the trained tokens of conversations, and the FLOPs for it. A
    collective.
    """
    packed = packed_tensors_from_tokenized_results(examples, seq_len=config.seq_len, pad_id=pad_id)
    check_pack(packed, policy)
    (step,) = updates(packed, 1, (config.seed, 0), here, policy.decoder.config)
    logprobs = row_signals(policy, step, config, here.device)["start_logprobs"]
    sums = Sums()
    # Zero weights mark the rows that fill up the ranks.
    sums.add(loss=torch.where(step.rows.weights > 0, -logprobs * step.rows.weights, 0.0).sum())
    return {
        "held_out_loss": sums.over_ranks(here)["loss"] / step.normaliser,
        "held_out_flops": forward_work(packed, policy.decoder.config, config),
    }


def weighted_loss(weights_N: Tensor, logprobs_n: Tensor, at: slice) -> Tensor:
    """Return w·(-log π) of the tokens in `at`."""
    return -logprobs_n * weights_N[at]


def read_examples(config: SFTConfig, data: str | None = None) -> tuple[list[TokenizedResult], int]:
    """Return all conversations short enough for a row as token sequences, and the id to pad with.
    data: their file; None: the config's.
    Raises ConfigError if there are none, or a line is not a conversation; ModelFolderError if the
    tokenizer cannot be loaded.
    """
    data = data or config.data
    # Names the faults of a folder; the tokenizer would ask the hub for it.
    hf_config = read_config(config.model, config.decoder)
    if hf_config.tie_word_embeddings:
        check_head(base_folder(config))
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        rows = read_jsonl(data, appended=False)
    except OSError as error:
        raise ModelFolderError(
            f"{config.model}: the tokenizer cannot be loaded: {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(data, [str(error)]) from error
    if not rows:
        raise ConfigError("sft_recipe config", [f"the file {data!r} is missing or empty"])
    if tokenizer.pad_token_id is not None:
        pad_id = tokenizer.pad_token_id
    else:
        pad_id = tokenizer.eos_token_id or 0
    examples = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, dict):
            messages = row.get("messages")
        else:
            messages = None
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise ConfigError(
                f"{data}, line {number}",
                ['not a conversation; a line is {"messages": [{"role": …, "content": …}, …]}'],
            )
        examples += conversation(tokenizer, messages, row.get("tools"), f"{data}, line {number}")
    fitting = [example for example in examples if len(example.token_ids) <= config.seq_len]
    if len(fitting) < len(examples):
        logger.warning(
            "%d of %d conversations are longer than seq_len %d and left out",
            len(examples) - len(fitting),
            len(examples),
            config.seq_len,
        )
    if not fitting:
        longest = min(len(example.token_ids) for example in examples)
        raise ConfigError(
            "sft_recipe config",
            [f"seq_len is {config.seq_len}, but the shortest conversation has {longest} tokens"],
        )
    return fitting, pad_id


def conversation(
    tokenizer: Any, messages: list[Any], tools: list[Any] | None, place: str
) -> list[TokenizedResult]:
    """Return token sequences to train all the assistant's turns, each once. Turns with inexact
    tokens are logged. Raises TokenizationError, with the place, if none can be trained, or the last
    message is not the assistant's.
    """
    if not messages or messages[-1].get("role") != "assistant":
        raise TokenizationError(
            f"{place}: the last message must be the assistant's; it is {messages[-1:]!r:.120}"
        )
    try:
        found = tokenize_chat_turns(tokenizer, messages, tools)
    except TokenizationError as error:
        raise TokenizationError(f"{place}: {error}") from error
    trained = {turn.message for chat in found for turn in chat.turns if turn.reason is None}
    for turn in found[0].untrained:
        if turn.message not in trained:
            logger.warning("%s, message %d is not trained: %s", place, turn.message, turn.reason)
    return [
        dataclasses.replace(chat.result(place), sample=number) for number, chat in enumerate(found)
    ]


def batches(examples: list[TokenizedResult], config: SFTConfig) -> Iterator[list[TokenizedResult]]:
    """Yield batches without end: epoch after epoch, each in an order by (seed, epoch) only."""
    pending: list[TokenizedResult] = []
    epoch = 0
    while True:
        while len(pending) < config.batch_size:
            order = torch.randperm(len(examples), generator=derived_generator(config.seed, epoch))
            pending.extend(examples[i] for i in order.tolist())
            epoch += 1
        yield pending[: config.batch_size]
        pending = pending[config.batch_size :]


def run(raw: DictConfig) -> int:
    return run_recipe(SFTConfig, train_on_examples, raw)


main = recipe_main(parse(run))

if __name__ == "__main__":
    sys.exit(main())
