"""The canary: what a checkpoint must compute, stored with it, so that a server can be held to it after every weight sync.

It has two parts, because a server can be wrong in two ways. The log-probabilities of a fixed sequence of random tokens show wrong
or stale weights. A greedy continuation of that sequence shows stale keys and values too: requests for prompt log-probabilities
skip a server's prefix cache, a continuation uses it.

`python -m ttrl.training.canary --model FOLDER --output FILE` computes the canary of any model folder.
"""

import argparse
import logging
import math
import sys
from typing import Any

import torch

from ttrl.configs import TrainingConfig
from ttrl.errors import ModelFolderError, TtrlError
from ttrl.files import write_json
from ttrl.training.distributed import ranks
from ttrl.training.loading import load_policy
from ttrl.training.logprobs import IGNORE
from ttrl.training.policy import HeadOptions, Policy

CANARY_FILE = "canary.json"
CANARY_LENGTH = 257  # two KV blocks of 128 tokens and one more, so that whole blocks lie in the prefix cache
GREEDY_LENGTH = 8

logger = logging.getLogger(__name__)


def canary_tokens(vocab_size: int, max_length: int) -> list[int]:
    """The same random tokens for every checkpoint of a model: a server that kept an older one's keys and values is found out."""
    length = max(2, min(CANARY_LENGTH, max_length - GREEDY_LENGTH))
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def _distributions(policy: Policy, tokens: list[int], first: int, device: torch.device) -> torch.Tensor:
    """Log-probabilities [len(tokens) - first, V] of what follows each token from number `first` on, for one plain sequence."""
    row = torch.tensor([tokens], device=device)
    labels = torch.full_like(row, IGNORE)
    labels[:, first:] = 0
    zeros = torch.zeros_like(row)
    positions = torch.arange(len(tokens), device=device).unsqueeze(0)
    return policy(row, labels, zeros, zeros, positions, HeadOptions(distributions=True)).logprobs.float().cpu()


def compute_canary(policy: Policy, device: torch.device) -> dict[str, Any]:
    """The content of canary.json: natural log-probabilities of each token given those before it, and a greedy continuation with
    its margins (the best token's log-probability less the second's). A collective when the policy is sharded."""
    decoder = policy.decoder
    tokens = canary_tokens(decoder.tok_embeddings.num_embeddings, decoder.max_seq_len)
    logprobs = _distributions(policy, tokens, 0, device)[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).tolist()
    greedy: list[int] = []
    greedy_logprobs, margins = [], []
    for _ in range(GREEDY_LENGTH):
        best = _distributions(policy, tokens + greedy, len(tokens) + len(greedy) - 1, device)[0].topk(2)
        greedy.append(int(best.indices[0]))
        greedy_logprobs.append(float(best.values[0]))
        margins.append(float(best.values[0] - best.values[1]))
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


def main() -> int:
    """Computes the canary of a model folder, on one device."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
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
    try:
        with ranks(config) as here:
            write_json(arguments.output, compute_canary(load_policy(config, here), here.device))
    except TtrlError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
