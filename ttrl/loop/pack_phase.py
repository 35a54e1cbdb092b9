"""The pack phase: graded groups → advantages → token sequences → packed tensors."""

import dataclasses
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.advantages import advantages_of
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.packing.packed_file import TOKENIZER_KEY, tokenizer_digest
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.errors import ServerError
from ttrl.facts import PackFacts
from ttrl.loop.rollout_facts import rollout_figures
from ttrl.records import TaskResult
from ttrl.run_folder.folder import IterationFolder
from ttrl.system.console import clock


def pack(
    iteration: IterationFolder,
    groups: list[TaskResult],
    config: TrainConfig,
    model: Path,
    tokenizer: Any,
) -> None:
    """Write packed.safetensors and the marker. Groups with equal rewards teach nothing; they are
    counted and left out, unless the recipe rewards single tokens (`GRPOConfig.rewards_tokens`).

    The marker's "groups" and "advantages" count all other changes to the rewards: see
    `ttrl.data.advantages.Advantages`.
    """
    began = clock()
    keep_equal = config.recipe_config({}).rewards_tokens
    advantages = advantages_of(groups, config.advantage_config(), tokenizer, keep_equal=keep_equal)
    facts = PackFacts(
        groups=advantages.groups,
        advantages=advantages.figures,
        rollouts=rollout_figures(groups, stops_early=config.early_stop is not None),
        rows=0,
    )
    if not advantages.kept:
        iteration.mark(facts.replace(seconds=clock() - began))
        return
    tokenize = TaskResultTokenizer(tokenizer)
    pairs = zip(advantages.kept, advantages.values, strict=True)
    sequences = [sequence for group, values in pairs for sequence in tokenize(group, values)]
    if config.recipe_config({}).router_replay and all(
        sequence.experts is None for sequence in sequences
    ):
        raise ServerError(
            f"router_replay: the server returned no experts for any of {len(sequences)} samples; "
            "start vLLM with --enable-return-routed-experts, or set router_replay=False"
        )
    packed = packed_tensors_from_tokenized_results(
        sequences,
        seq_len=config.seq_len,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        aggregation=config.resolved_aggregation,
        constant_length=config.constant_length,
        too_long=config.too_long,
        share=config.share,
        multiple=config.processes,
        seed=config.seed,
    )
    made_with = tokenizer_digest(model)
    if made_with is not None:
        packed.metadata[TOKENIZER_KEY] = made_with
    packed.save(iteration.path / "packed.safetensors")
    facts = facts.replace(
        rows=packed.num_rows,
        row_tokens=packed.num_tokens,
        trained_tokens=packed.num_trained,
        tokenization=dataclasses.asdict(tokenize.counts),
        fill=packed.num_tokens / packed.tokens.numel(),
        dropped=packed.dropped,
        seconds=clock() - began,
    )
    iteration.mark(facts, ["packed.safetensors"])
