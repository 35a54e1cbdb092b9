"""Time training steps of transformers' classes: against rows with one sample each, or against
ttrl's own decoder.

    python tools/bench_classes.py [NAME ...] [--rounds 3]
    python tools/bench_classes.py --decoders [NAME ...] [--rounds 3]

NAMEs are those of tools/check_models.py; models are wider here. Both ways are alternated; medians
of forward and backward passes in CPU seconds on one thread, and their ratio. The gradients of both
are compared first.

The first command stores a prompt once for all completions, or gives each sample a row. The second
computes the same packed rows with both decoders, for the families that both know and for
SmolLM2-135M (NAME smollm2-135m), and also counts the bytes that each keeps for its backward pass.
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
from check_models import MODELS, Model, loaded, policy_rows
from torch import Tensor

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.ready_models import ready_model
from ttrl.records import TokenizedResult
from ttrl.training.policy.policy import Policy

SHAPES = ((1024, 16, 60), (256, 16, 100), (64, 8, 240))
"""Tokens of a prompt, completions, tokens of a completion."""
_SMALL_SHAPES = ((64, 4, 24),)
"""For a real model, whose steps take seconds on one core."""
_WIDER: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "granite_hybrid": {
        "hidden_size": 256,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
    },
}
DENSE = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "phi",
    "phi3",
    "gpt2",
    "nanochat",
)
"""Families that both decoders know."""
_DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_MORE_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_value_heads": 4,
    },
    "granite_hybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_hidden_layers": 4,
    },
}


def widened(name: str) -> Model:
    """Return a row of tools/check_models.py with a wider model."""
    model = MODELS[name]
    dense = _WIDER.get(name, _DENSE if name in DENSE else {})
    sizes = {**model.sizes, **dense, "max_position_embeddings": 4096}
    if name == "gpt2":
        sizes = {**model.sizes, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 4096}
    settings = {**model.settings, **_MORE_LAYERS.get(name, {})}
    if "layer_types" in settings and name in DENSE:
        settings["layer_types"] = settings["layer_types"] * 2
    return model._replace(sizes=sizes, settings=settings)


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
        return [
            policy_rows(
                packed_tensors_from_tokenized_results(
                    results, seq_len=length, pad_id=0, shortest_shared=1
                )
            )
        ]
    length = len(results[0].token_ids)
    return [
        policy_rows(packed_tensors_from_tokenized_results([one], seq_len=length, pad_id=0))
        for one in results
    ]


def decoders(name: str, folder: Path) -> list[Policy]:
    """Return a model as ttrl's own decoder computes it, and as transformers' class does."""
    model = ready_model(name) or check_models.write_model(name, folder)
    assert model is not None
    return [loaded(Path(model), decoder=which) for which in ("torchtune", "transformers")]


def bytes_kept(policy: Policy, rows: Sequence[tuple[Tensor, ...]]) -> int:
    """Return the bytes that the forward pass of the first row keeps, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = policy(*rows[0]).logprobs
    found = sum(seen.values())
    del out
    return found


def compare_decoders(names: Sequence[str], rounds: int) -> None:
    """Print a line for each model and shape."""
    print(
        "model            shape           torchtune   transformers   ratio   kept, MB    ratio   "
        "gradients differ by"
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name in MODELS:
                check_models.MODELS = {**MODELS, name: widened(name)}
            policies = decoders(name, Path(folder) / "model")
        for shape in SHAPES if name in MODELS else _SMALL_SHAPES:
            rows = rows_of(samples(*shape), True)
            gradients = []
            for policy in policies:
                step(policy, rows)
                gradient = policy.decoder.tok_embeddings.weight.grad
                assert gradient is not None
                gradients.append(gradient.double())
            off = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
            kept = [bytes_kept(policy, rows) / 1e6 for policy in policies]
            seconds = [tuple(step(policy, rows) for policy in policies) for _ in range(rounds)]
            ours, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
            words = "x".join(map(str, shape))
            print(
                f"{name:16} {words:14} {ours:8.2f} s {theirs:10.2f} s {theirs / ours:8.2f}   "
                f"{kept[0]:.1f} {kept[1]:.1f} "
                f"{kept[1] / kept[0]:6.2f}   {off:.0e}",
                flush=True,
            )


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
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(_WIDER)}; all unless given"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--decoders",
        action="store_true",
        help="compare transformers' classes with ttrl's own decoder",
    )
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.decoders:
        compare_decoders(arguments.names or [*DENSE, "smollm2-135m"], arguments.rounds)
        return 0
    print("model            shape            one by one    packed   ratio   gradients differ by")
    for name in arguments.names or list(_WIDER):
        check_models.MODELS = {**MODELS, name: widened(name)}
        with tempfile.TemporaryDirectory() as folder:
            policy = loaded(check_models.write_model(name, Path(folder) / "model"))
        for shape in SHAPES:
            results = samples(*shape)
            apart = rows_of(results, False)
            together = rows_of(results, True)
            gradients = []
            for rows in (apart, together):
                step(policy, rows)
                found = [
                    p.grad.flatten().double() for p in policy.parameters() if p.grad is not None
                ]
                gradients.append(torch.cat(found))
            off = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
            seconds = [
                (step(policy, apart), step(policy, together)) for _ in range(arguments.rounds)
            ]
            one, other = (statistics.median(column) for column in zip(*seconds, strict=True))
            words = "x".join(map(str, shape))
            print(
                f"{name:16} {words:16} {one:8.2f} s {other:8.2f} s {one / other:6.1f}   {off:.0e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
