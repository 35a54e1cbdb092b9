"""The canary: what a checkpoint must compute, stored with it, so that a server can be checked after every weight sync.

It has two parts, because a server can be wrong in two ways. The log-probabilities of a fixed sequence of random tokens show wrong
or stale weights. A greedy continuation of that sequence shows stale keys and values too: requests for prompt log-probabilities
skip a server's prefix cache, a continuation uses it.

`python -m ttrl.training.canary --model FOLDER --output FILE` computes the canary of any model folder.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ttrl.configs import TrainingConfig
from ttrl.errors import ModelFolderError
from ttrl.system.files import write_json
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.parallel.distributed import Ranks, run_on_ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions, Policy, PolicyOutput

CANARY_FILE = "canary.json"
CANARY_LENGTH = 257  # two KV blocks of 128 tokens and one more, so that whole blocks are in the prefix cache
GREEDY_LENGTH = 8

logger = logging.getLogger(__name__)


def canary_tokens(vocab_size: int, max_length: int) -> list[int]:
    """Return the same random tokens for every checkpoint of a model, so that a server that kept the keys and values of an older
    one is caught."""
    length = max(2, min(CANARY_LENGTH, max_length - GREEDY_LENGTH))
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def _distributions(policy: Policy, tokens: list[int], first: int, device: torch.device) -> torch.Tensor:
    """Return log-probabilities [len(tokens) - first, V] of what follows each token from number `first` on, for one plain
    sequence."""
    row = torch.tensor([tokens], device=device)
    labels = torch.full_like(row, IGNORE)
    labels[:, first:] = 0
    zeros = torch.zeros_like(row)
    positions = torch.arange(len(tokens), device=device).unsqueeze(0)
    out: PolicyOutput = policy(row, labels, zeros, zeros, positions, HeadOptions(distributions=True))
    return out.logprobs.float().cpu()


def compute_canary(policy: Policy, device: torch.device, guess: Sequence[int] = ()) -> dict[str, Any]:
    """Return the content of canary.json: natural log-probabilities of each token given those before it, and a greedy continuation
    with its margins (the best token's log-probability less the second's). A collective if the policy is sharded.

    guess: the continuation, such as that of the weights before. One pass shows all tokens that follow, so a right guess makes it
    the only one; a wrong one is corrected from pass to pass, at least by its first wrong token (Jacobi decoding, arXiv
    2305.10427).
    """
    decoder = policy.decoder
    tokens = canary_tokens(decoder.tok_embeddings.num_embeddings, decoder.max_seq_len)
    greedy = [*guess, *[0] * GREEDY_LENGTH][:GREEDY_LENGTH]
    logprobs: list[float] = []
    for _ in range(GREEDY_LENGTH):
        distributions = _distributions(policy, tokens + greedy[:-1], len(tokens) - 1 if logprobs else 0, device)
        if not logprobs:
            following = torch.tensor(tokens[1:]).unsqueeze(1)
            logprobs = distributions[: len(following)].gather(1, following).squeeze(1).tolist()
        best = distributions[-GREEDY_LENGTH:].topk(2)
        before, greedy = greedy, _same_everywhere(best.indices[:, 0]).tolist()
        if greedy[:-1] == before[:-1]:
            break
    greedy_logprobs, margins = best.values[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()
    if not all(map(math.isfinite, [*logprobs, *greedy_logprobs])):
        raise ModelFolderError(
            "the model computes NaN or infinite log-probabilities; its weights are broken (training diverged, or a damaged file)"
        )
    dtype = "bfloat16" if policy.compute_dtype == torch.bfloat16 else "float32"
    return {
        "schema": 1,
        "dtype": dtype,
        "context": decoder.context,
        "token_ids": tokens,
        "logprobs": [None, *logprobs],
        "greedy_token_ids": greedy,
        "greedy_logprobs": greedy_logprobs,
        "greedy_margins": margins,
    }


def _same_everywhere(tokens: torch.Tensor) -> torch.Tensor:
    """Return the first rank's tokens, so that all ranks make equally many passes."""
    if not (distributed.is_initialized() and distributed.get_world_size() > 1):
        return tokens
    shared = [tokens.tolist()]
    distributed.broadcast_object_list(shared)
    return torch.tensor(shared[0])


def known_continuation(folder: Path, vocab_size: int) -> list[int]:
    """Return the greedy continuation in a model folder's canary, as a guess for the next one; empty if there is none."""
    try:
        stored = json.loads(Path(folder, CANARY_FILE).read_text(encoding="utf-8"))["greedy_token_ids"]
        return [token for token in map(int, stored) if 0 <= token < vocab_size]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def main() -> int:
    """Compute the canary of a model folder, on one device."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--context", type=int, help="the server's max_model_len, where it is not the model's own")
    arguments = parser.parse_args()
    config = TrainingConfig(
        model=arguments.model,
        output_dir="",
        dtype=arguments.dtype,
        device=arguments.device,
        num_threads=arguments.num_threads,
        context=arguments.context,
    ).check("canary")

    def write(config: TrainingConfig, here: Ranks) -> None:
        write_json(arguments.output, compute_canary(load_policy(config, here), here.device))

    return run_on_ranks(lambda: config, write, logger)


if __name__ == "__main__":
    sys.exit(main())
