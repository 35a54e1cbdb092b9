"""Time training steps of transformers' classes: prompts stored once for all completions, against rows with one sample each.

    python tools/bench_classes.py [NAME ...] [--rounds 3]

NAMEs are those of tools/check_models.py; models are wider here. Both ways are alternated; medians of forward and backward passes
in CPU seconds on one thread, and their ratio. The gradients of both are compared first.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import check_models
import torch
import transformers
from check_models import MODELS, loaded, policy_rows
from torch import Tensor

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.policy.policy import Policy

SHAPES = ((1024, 16, 60), (256, 16, 100), (64, 8, 240))
"""Tokens of a prompt, completions, tokens of a completion."""
_WIDER: dict[str, dict[str, Any]] = {
    "qwen3_5": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "granite_hybrid": {"hidden_size": 256, "shared_intermediate_size": 512, "mamba_n_heads": 8, "mamba_d_head": 64},
}
_MORE_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_value_heads": 4},
    "granite_hybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4},
}


def samples(prompt: int, completions: int, length: int) -> list[TokenizedResult]:
    """Return a group of samples with random tokens."""
    draw = torch.Generator().manual_seed(0)
    begin = torch.randint(1, 250, (prompt,), generator=draw).tolist()
    found = []
    for number in range(completions):
        tokens = [*begin, *torch.randint(1, 250, (length,), generator=draw).tolist()]
        found.append(
            TokenizedResult(
                task_id="one",
                sample=number,
                token_ids=tokens,
                assistant_mask=[False] * prompt + [True] * length,
                input_pos=list(range(len(tokens))),
                logprobs=[0.0] * len(tokens),
                prompt_length=prompt,
                reward=0.0,
                advantage=1.0,
                weights_version=0,
            )
        )
    return found


def rows_of(results: Sequence[TokenizedResult], together: bool) -> list[tuple[Tensor, ...]]:
    """Return what a policy is given: one row for the group, or rows with a sample each."""
    if together:
        prompt = results[0].prompt_length
        length = prompt + sum(len(one.token_ids) - prompt for one in results)
        return [policy_rows(packed_tensors_from_tokenized_results(results, seq_len=length, pad_id=0, shortest_shared=1))]
    length = len(results[0].token_ids)
    return [policy_rows(packed_tensors_from_tokenized_results([one], seq_len=length, pad_id=0)) for one in results]


def step(policy: Policy, rows: Sequence[tuple[Tensor, ...]]) -> float:
    """Run a forward and a backward pass; returns CPU seconds."""
    began = time.process_time()
    policy.zero_grad()
    for one in rows:
        policy(*one).logprobs.sum().backward()
    return time.process_time() - began


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(_WIDER)}; all unless given")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    print("model            shape            one by one    packed   ratio   gradients differ by")
    for name in arguments.names or list(_WIDER):
        model = MODELS[name]
        wider = model._replace(
            sizes={**model.sizes, **_WIDER.get(name, {}), "max_position_embeddings": 4096},
            settings={**model.settings, **_MORE_LAYERS.get(name, {})},
        )
        check_models.MODELS = {**MODELS, name: wider}
        with tempfile.TemporaryDirectory() as folder:
            policy = loaded(check_models.write_model(name, Path(folder) / "model"))
        for shape in SHAPES:
            results = samples(*shape)
            apart, together = rows_of(results, False), rows_of(results, True)
            gradients = []
            for rows in (apart, together):
                step(policy, rows)
                found = [p.grad.flatten().double() for p in policy.parameters() if p.grad is not None]
                gradients.append(torch.cat(found))
            off = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
            seconds = [(step(policy, apart), step(policy, together)) for _ in range(arguments.rounds)]
            one, other = (statistics.median(column) for column in zip(*seconds, strict=True))
            words = "x".join(map(str, shape))
            print(f"{name:16} {words:16} {one:8.2f} s {other:8.2f} s {one / other:6.1f}   {off:.0e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
