"""Compute the canary: a checkpoint's expected outputs, stored with it to check a server after every
weight sync.

It has two parts, for two kinds of error. The log-probabilities of a fixed text show wrong or stale
weights. A greedy continuation of the text also shows stale keys and values: requests for prompt
log-probabilities skip a server's prefix cache, a continuation uses it.

Before the first iteration, the trainer computes the starting model's canary, from its own copy
(sharded, or in 4 bits), and measures the distance of bf16 from fp32 on this model: it sets the
server's limits in half precision. The checkpoints trained from it keep its text and this measure.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import distributed

from ttrl.configs import TrainingConfig
from ttrl.errors import ModelFolderError
from ttrl.facts import dumped
from ttrl.records import CANARY_FILE, Canary, HalfPrecision
from ttrl.system.files import write_text
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.sharding import gathered_precision
from ttrl.training.policy.policy import HeadOptions, Policy, PolicyOutput

# Two KV blocks of 128 tokens and one more, to put whole blocks in the prefix cache.
CANARY_LENGTH = 257
GREEDY_LENGTH = 8

logger = logging.getLogger(__name__)


# Typical contents for language models: prose, dialogue, numbers, code, lists, other languages.
_TEXT = """\
The lighthouse keeper counted 214 steps to the top, and she climbed them twice a day for \
thirty-one years. "Does it ever get lonely?" the children asked. "Only in November," she said, \
"when the fog hides the ships but not their horns."

Question: A train leaves at 9:40 and arrives at 11:05. How long does the journey take?
Answer: From 9:40 to 10:40 is one hour, and 25 minutes more makes 1 hour \
and 25 minutes, or 85 minutes.

def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

{"name": "Ada", "age": 36, "city": "London", "languages": ["English", "French"], "active": true}

Der Regen hörte gegen Abend auf. Il pleuvait encore quand le dernier train est parti. \
東京は日本の首都です。

1. Wash the rice until the water runs clear.
2. Add one and a half cups of water for each cup of rice, and a pinch of salt.
3. Bring it to a boil, cover the pot, and let it simmer for 18 minutes.

In 1905 Einstein published four papers: on the photoelectric effect, Brownian motion, special \
relativity, and the equivalence of mass and energy, E = mc^2. Water boils at 100 °C at sea level, \
but at about 71 °C on the summit of Mount Everest, where the air pressure is only a third as high.
"""
# Fewer different tokens of the text: its letters are unknown to the model, or nearly its only
# tokens.
_DISTINCT = 64


def canary_tokens(folder: Path, vocab_size: int, max_length: int) -> list[int]:
    """Return the same tokens for every checkpoint of a model, to catch a server with stale keys and
    values: those of the canary in `folder`, else a text, else (without a tokenizer.json for its
    letters) random ones.
    """
    length = max(2, min(CANARY_LENGTH, max_length - GREEDY_LENGTH))
    stored = _stored(folder)
    known = (_text_tokens(folder) if stored is None else stored.token_ids)[:length]
    if len(known) >= 2 and all(0 <= token < vocab_size for token in known):
        return known
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def _text_tokens(folder: Path) -> list[int]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return []
    try:
        tokens: list[int] = Tokenizer.from_file(str(file)).encode(_TEXT).ids
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for everything
        logger.warning("the canary consists of random tokens: %s cannot be read: %s", file, error)
        return []
    if len(set(tokens[:CANARY_LENGTH])) >= _DISTINCT:
        return tokens
    return []


def _stored(folder: Path) -> Canary | None:
    """Return the canary in a model folder; None if missing or unreadable."""
    try:
        return Canary.load(folder)
    except ModelFolderError:
        return None


@torch.no_grad()
def _distributions(
    policy: Policy, tokens: list[int], first: int, device: torch.device
) -> torch.Tensor:
    """Return log-probabilities [len(tokens) - first, V] of the tokens after each token from number
    `first` on, for one plain sequence."""
    row = torch.tensor([tokens], device=device)
    labels = torch.full_like(row, IGNORE)
    labels[:, first:] = 0
    zeros = torch.zeros_like(row)
    positions = torch.arange(len(tokens), device=device).unsqueeze(0)
    out: PolicyOutput = policy(
        row, labels, zeros, zeros, positions, HeadOptions(distributions=True)
    )
    return out.logprobs.float().cpu()


def compute_canary(policy: Policy, device: torch.device, folder: Path) -> Canary:
    """Return the canary of the policy: natural log-probabilities of each token given those before
    it, and a greedy continuation with its margins (the best token's log-probability less the
    second's). A collective if the policy is sharded.

    folder: the model folder of the weights; its canary's text and measure are kept, its
    continuation is a guess. One pass checks all tokens of the guess: a right guess needs no other
    pass, and each pass corrects at least the first wrong token of a wrong one (Jacobi decoding,
    arXiv 2305.10427).
    """
    decoder = policy.decoder
    vocab_size = decoder.tok_embeddings.num_embeddings
    stored = _stored(folder)
    tokens = canary_tokens(folder, vocab_size, decoder.max_seq_len)
    known = [] if stored is None else stored.greedy_token_ids
    guess = [token for token in known if 0 <= token < vocab_size]
    greedy = [*guess, *[0] * GREEDY_LENGTH][:GREEDY_LENGTH]
    logprobs: list[float] = []
    for _ in range(GREEDY_LENGTH):
        distributions = _distributions(
            policy, tokens + greedy[:-1], len(tokens) - 1 if logprobs else 0, device
        )
        if not logprobs:
            logprobs = _chosen(distributions, tokens).tolist()
        best = distributions[-GREEDY_LENGTH:].topk(2)
        before = greedy
        greedy = _same_everywhere(best.indices[:, 0], device).tolist()
        if greedy[:-1] == before[:-1]:
            break
    greedy_logprobs = best.values[:, 0].tolist()
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    if not all(map(math.isfinite, [*logprobs, *greedy_logprobs])):
        raise ModelFolderError(
            "the model computes NaN or infinite log-probabilities; its weights are broken "
            "(training diverged, or a damaged file)"
        )
    if policy.compute_dtype == torch.bfloat16:
        dtype = "bfloat16"
    else:
        dtype = "float32"
    return Canary(
        schema=1,
        dtype=dtype,
        context=decoder.context,
        token_ids=tokens,
        logprobs=[None, *logprobs],
        greedy_token_ids=greedy,
        greedy_logprobs=greedy_logprobs,
        greedy_margins=margins,
        half_precision=None if stored is None else stored.half_precision,
    )


def _chosen(distributions: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probability of each token but the first, [len(tokens) - 1]."""
    following = torch.tensor(tokens[1:]).unsqueeze(1)
    return distributions[: len(following)].gather(1, following).squeeze(1)


def write_canary(config: TrainingConfig, policy: Policy, here: Ranks) -> None:
    """Write the starting model's canary to `output_dir`/checkpoint, if its folder lacks one. A
    collective."""
    canary = compute_canary(policy, here.device, Path(config.model))
    if _has_fp32(config, here):
        measured = half_precision(policy, canary.token_ids, here.device)
        canary = replace(canary, half_precision=measured)
    # The server has the starting model, without this rounding.
    if config.lora_base_dtype == "nf4":
        canary = replace(canary, dtype="nf4")
    if here.is_first:
        write_text(Path(config.output_dir, "checkpoint", CANARY_FILE), dumped(canary))
    here.barrier()


def _has_fp32(config: TrainingConfig, here: Ranks) -> bool:
    """Return whether the policy can compute in fp32: sharded parameters must not be gathered in
    bf16.
    """
    is_sharded = here.world_size > 1 or config.cpu_offload
    return not is_sharded or gathered_precision(config, here.device).param_dtype is None


def half_precision(policy: Policy, tokens: list[int], device: torch.device) -> HalfPrecision:
    """Measure the distance of bf16 from fp32 on this model over the tokens."""
    kept = policy.compute_dtype
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        policy.compute_dtype = dtype
        found.append(_chosen(_distributions(policy, tokens, 0, device), tokens))
    policy.compute_dtype = kept
    differences = (found[0] - found[1]).abs()
    p99 = differences.quantile(0.99, interpolation="higher")
    return HalfPrecision(float(differences.mean()), float(p99))


def _same_everywhere(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the first rank's tokens, to make equally many passes on all ranks."""
    if not (distributed.is_initialized() and distributed.get_world_size() > 1):
        return tokens
    shared = tokens.to(device).contiguous()
    distributed.broadcast(shared, src=0)
    return shared
