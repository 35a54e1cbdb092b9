"""Supervised training on conversations, for warm starts: `tune run [torchrun options] ttrl/sft_recipe --config FILE`.

    data.jsonl ({"messages": [..., the assistant's answer]} a line) + model  →  output_dir/checkpoint, output_dir/train.jsonl

The same rows, policy, head and checkpoints as `ttrl.grpo_recipe`; the loss is the mean -log π over the trained tokens of a step,
which are the last assistant message and its end-of-turn token. The settings: `ttrl.configs.SFTConfig`.

Has run on CPU with one process and with two over gloo; CUDA and NCCL: never run on a GPU yet.
"""

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig
from torchtune.config import parse
from transformers import AutoTokenizer

from ttrl.configs import SFTConfig
from ttrl.data.chat_templates import chat_tokens
from ttrl.data.packing import packed_tensors_from_tokenized_results
from ttrl.errors import ConfigError, ModelFolderError
from ttrl.files import append_jsonl, read_jsonl
from ttrl.records import TokenizedResult
from ttrl.training.batches import check_pack, derived_generator, updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.distributed import Ranks, run_recipe
from ttrl.training.logprobs import IGNORE
from ttrl.training.losses import negative_log_likelihood
from ttrl.training.metrics import Sums
from ttrl.training.models import read_config
from ttrl.training.optim import clip_and_step, learning_rate, make_optimizer
from ttrl.training.policy import load_policy
from ttrl.training.progress import Progress

logger = logging.getLogger("ttrl.sft_recipe")


def train(config: SFTConfig, here: Ranks) -> None:
    """The recipe, a page of steps."""
    examples, pad_id = read_examples(config)
    policy = load_policy(config, here)
    optimizer = make_optimizer(policy, config)
    progress = Progress(config.steps, here)
    log = Path(config.output_dir, "train.jsonl")
    if here.is_first:
        log.unlink(missing_ok=True)

    for step, batch in zip(range(config.steps), batches(examples, config), strict=False):
        began = time.perf_counter()
        packed = packed_tensors_from_tokenized_results(batch, seq_len=config.seq_len, pad_id=pad_id)
        check_pack(packed, policy)
        (update,) = updates(packed, 1, (config.seed, step), here)
        sums = Sums()
        for rows in update.microbatches(config.rows_per_microbatch, here.device):
            logprobs, entropy = policy(*(rows[name] for name in ("tokens", "labels", "group_ids", "parent_ids", "input_pos")))
            loss = negative_log_likelihood(logprobs) * rows["weights"][rows["labels"] != IGNORE]
            update.backward(loss)
            sums.add(loss=loss, entropy=entropy, trained_tokens=float(logprobs.numel()))
        norm = clip_and_step(policy, optimizer, config, step)
        totals = sums.over_ranks(here)
        progress.advance()
        if here.is_first:
            tokens = totals["trained_tokens"]
            row = {"global_step": step + 1, "loss": totals["loss"] / update.normaliser, "entropy": totals["entropy"] / tokens}
            row |= {"lr": learning_rate(config, step), "grad_norm": norm, "trained_tokens": int(tokens)}
            append_jsonl(log, row | {"seconds": time.perf_counter() - began})
    save_checkpoint(Path(config.output_dir, "checkpoint"), policy, config.model, here)


def read_examples(config: SFTConfig) -> tuple[list[TokenizedResult], int]:
    """All conversations that fit into a row as token sequences, and the id to pad with.

    Raises ConfigError where there are none, or a line is no conversation; ModelFolderError where the tokenizer cannot be loaded.
    """
    read_config(config.model)  # says what is wrong with a folder; the tokenizer would ask the hub for it
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        rows = read_jsonl(config.data)
    except OSError as error:
        raise ModelFolderError(f"{config.model}: the tokenizer cannot be loaded: {error}") from error
    except ValueError as error:
        raise ConfigError(config.data, [str(error)]) from error
    if not rows:
        raise ConfigError("sft_recipe config", [f"data is {config.data!r}, which is missing or empty"])
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    examples = []
    for number, row in enumerate(rows, 1):
        messages = row.get("messages") if isinstance(row, dict) else None
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ConfigError(
                f"{config.data}, line {number}", ['no conversation; a line is {"messages": [{"role": …, "content": …}, …]}']
            )
        examples.append(chat_tokens(tokenizer, messages, f"{config.data}, line {number}"))
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
            "sft_recipe config", [f"seq_len is {config.seq_len}, but the shortest conversation has {longest} tokens"]
        )
    return fitting, pad_id


def batches(examples: list[TokenizedResult], config: SFTConfig) -> Iterator[list[TokenizedResult]]:
    """Endless batches; each epoch in an order of its own that depends on (seed, epoch) alone. No example is left out of an epoch:
    a batch may end one epoch and begin the next."""
    pending: list[TokenizedResult] = []
    epoch = 0
    while True:
        while len(pending) < config.batch_size:
            order = torch.randperm(len(examples), generator=derived_generator(config.seed, epoch))
            pending.extend(examples[i] for i in order.tolist())
            epoch += 1
        yield pending[: config.batch_size]
        pending = pending[config.batch_size :]


@parse
def main(raw: DictConfig) -> int:
    """Runs the recipe on one config."""
    return run_recipe(SFTConfig, train, raw)


if __name__ == "__main__":
    sys.exit(main())
