"""The pack phase: graded groups → advantages → token sequences → packed tensors."""

import dataclasses
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.data.advantages import advantages_of
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
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
    """Write packed.safetensors and the marker.

    The marker's "groups" and "advantages" count all other changes to the rewards: see
    `ttrl.data.advantages.Advantages`.
    """
    began = clock()
    packed, facts = packed_groups(groups, config, model, tokenizer)
    files = []
    if packed is not None:
        files.append("packed.safetensors")
        packed.save(iteration.path / files[0])
    iteration.mark(facts.replace(seconds=clock() - began), files)


def packed_groups(
    groups: list[TaskResult], config: TrainConfig, model: Path, tokenizer: Any
) -> tuple[PackedTensors | None, PackFacts]:
    """Compute advantages and pack, by the settings of a run. Groups with equal rewards teach
    nothing; they are counted and left out, unless the recipe rewards single tokens
    (`GRPOConfig.rewards_tokens`). Return the packed tensors, None if no group has a signal, and the
    facts about them.
    """
    recipe = config.recipe_config({})
    advantages = advantages_of(
        groups, config.advantage_config(), tokenizer, keep_equal=recipe.rewards_tokens
    )
    facts = PackFacts(
        groups=advantages.groups,
        advantages=advantages.figures,
        rollouts=rollout_figures(groups, stops_early=config.early_stop is not None),
        rows=0,
    )
    if not advantages.kept:
        return None, facts
    tokenize = TaskResultTokenizer(tokenizer)
    pairs = zip(advantages.kept, advantages.values, strict=True)
    sequences = [sequence for group, values in pairs for sequence in tokenize(group, values)]
    if recipe.router_replay and all(sequence.experts is None for sequence in sequences):
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
        model=model,
    )
    facts = facts.replace(
        rows=packed.num_rows,
        row_tokens=packed.num_tokens,
        trained_tokens=packed.num_trained,
        tokenization=dataclasses.asdict(tokenize.counts),
        fill=packed.num_tokens / packed.tokens.numel(),
        dropped=packed.dropped,
    )
    return packed, facts
