"""Our decoders against transformers, family by family, on tiny random models. `python
tools/check_parity.py [NAME ...]`

For each model, the same samples go through transformers one by one, and through ours twice: one by
one, and packed into rows with shared beginnings. Windows are shorter than the samples, so that
positions, not places in the row, must decide what a token attends to. Printed, for fp32 (both
sides) and float64 (both sides):

    logits     largest |difference| of any logit, samples one by one; and the largest |logit|, for
               comparison
    gradient   largest ‖difference‖/‖gradient‖ of a parameter, of a loss with a random weight for
               each log-probability; one by one, and packed
"""

import argparse
import contextlib
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.kernels.attention import attention_plan
from ttrl.training.models.architecture import read_config
from ttrl.training.models.decoder import build_decoder
from ttrl.training.models.weights import to_hugging_face_names
from ttrl.training.policy.policy import Policy, fill_parameters

VOCAB = 97
_WIDTHS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3_ROPE = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN_ROPE = {**_SCALED, "rope_type": "yarn", "beta_fast": 16.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * n for n in range(3)],
    "long_factor": [2.0 + n for n in range(3)],
}
_GEMMA = {"head_dim": 16, "pad_token_id": 0}


def _model(family: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of transformers' class for `family`, with random weights."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{family}Config")(**{**_WIDTHS, **settings})
        return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)

    return make


def _gpt2(**settings: Any) -> Callable[[], nn.Module]:
    """A GPT-2, whose config has names of its own."""
    sizes = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "initializer_range": 0.3,
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **ends, **settings)
    )


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "llama": _model("Llama"),
    "llama3-rope": _model("Llama", rope_parameters=_LLAMA3_ROPE),
    "llama-biased": _model("Llama", attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama-linear": _model(
        "Llama",
        hidden_act="relu",
        rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    ),
    "llama-dynamic": _model(
        "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    ),
    "mistral": _model("Mistral", sliding_window=None, head_dim=16),
    "mistral-window": _model("Mistral", sliding_window=5, tie_word_embeddings=True),
    "ministral": _model(
        "Ministral",
        sliding_window=3,
        layer_types=["full_attention", "sliding_attention"],
        head_dim=8,
    ),
    "qwen2": _model("Qwen2"),
    "qwen2-tied": _model("Qwen2", tie_word_embeddings=True),
    "qwen2-yarn": _model("Qwen2", rope_parameters=_YARN_ROPE),
    "qwen2-window": _model("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": _model("Qwen3", head_dim=16),
    "qwen3-window": _model(
        "Qwen3",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=1,
        attention_bias=True,
    ),
    "gemma": _model("Gemma", **_GEMMA),
    "gemma2": _model(
        "Gemma2", **_GEMMA, sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=5.0
    ),
    "gemma2-untied": _model(
        "Gemma2", **_GEMMA, sliding_window=3, tie_word_embeddings=False, final_logit_softcapping=4.0
    ),
    "gemma2-uncapped": _model(
        "Gemma2", **_GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": _model(
        "Gemma3Text",
        **_GEMMA,
        sliding_window=5,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
    "gemma3-capped": _model("Gemma3Text", **_GEMMA, sliding_window=2, final_logit_softcapping=9.0),
    "phi3": _model("Phi3", sliding_window=6, pad_token_id=0),
    "phi3-partial-tied": _model(
        "Phi3",
        pad_token_id=0,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.75,
        },
    ),
    "phi3-longrope": _model(
        "Phi3",
        pad_token_id=0,
        original_max_position_embeddings=4,
        rope_parameters={**_LONG_ROPE, "partial_rotary_factor": 0.75},
    ),
    "phi3-longrope-short": _model(
        "Phi3",
        pad_token_id=0,
        original_max_position_embeddings=64,
        max_position_embeddings=64,
        rope_parameters={**_LONG_ROPE, "partial_rotary_factor": 0.75, "factor": 4.0},
    ),
    "phi": _model("Phi", num_key_value_heads=4),
    "phi-qk-norm": _model("Phi", qk_layernorm=True, hidden_act="gelu_fast"),
    "gpt2": _gpt2(),
    "gpt2-untied": _gpt2(n_inner=48, activation_function="relu", tie_word_embeddings=False),
    "nanochat": _model("NanoChat", pad_token_id=0),
    "nanochat-biased": _model(
        "NanoChat",
        pad_token_id=0,
        attention_bias=True,
        tie_word_embeddings=True,
        final_logit_softcapping=None,
    ),
}


def make_folder(name: str, folder: Path) -> Path:
    """Saves the tiny model of that name, with norms and biases that are neither ones nor zeros,
    which would hide mistakes.
    """
    torch.manual_seed(len(name))
    model = VARIANTS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def softmax_keeps_dtype() -> Iterator[None]:
    """transformers' attention computes its softmax in float32 whatever it is given, which hides
    differences below 1e-7.
    """
    softmax = nn.functional.softmax

    def keeping(
        x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **others: Any
    ) -> Tensor:
        return softmax(
            x, dim=dim, dtype=torch.promote_types(x.dtype, dtype) if dtype else None, **others
        )

    nn.functional.softmax = keeping  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.softmax = softmax  # type: ignore[assignment]


def reference_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """transformers' model. In float64, norms are made to compute in float64 too, and so are the
    scales of embeddings.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    # Else a pad token in a text, such as <|im_end|>, has no gradient.
    model.get_input_embeddings().padding_idx = None
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            plus = 1.0 if "Gemma" in type(module).__name__ else 0.0

            def forward(
                x: Tensor, module: Any = module, eps: float = eps, plus: float = plus
            ) -> Tensor:
                return (getattr(module, "weight", 1.0) + plus) * (
                    x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
                )

            module.forward = forward
        if dtype == torch.float64 and hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=dtype)
    return model


def samples(seed: int = 0) -> list[TokenizedResult]:
    """Two groups of four samples, two of which are equal; each of 7 to 22 tokens, with a prompt of
    5 or 9.

    Token 0 does not occur: where it is the pad token, transformers keeps its embedding from being
    trained.
    """
    draw = random.Random(seed)
    results = []
    for group, length in enumerate((5, 9)):
        prompt = [draw.randrange(1, VOCAB) for _ in range(length)]
        completions = [
            [draw.randrange(1, VOCAB) for _ in range(draw.randint(2, 13))] for _ in range(3)
        ]
        for number, completion in enumerate([*completions, completions[0]]):
            n = len(prompt)
            m = len(completion)
            results.append(
                TokenizedResult(
                    task_id=f"g{group}",
                    sample=number,
                    token_ids=[*prompt, *completion],
                    assistant_mask=[False] * n + [True] * m,
                    input_pos=list(range(n + m)),
                    logprobs=[0.0] * (n + m),
                    prompt_length=n,
                    reward=0.0,
                    advantage=1.0,
                    weights_version=0,
                )
            )
    return results


@dataclass(frozen=True)
class Computed:
    """What a model computes of samples: logits [T, V] of each, log-probabilities of its completion,
    and a gradient of those.
    """

    logits: list[Tensor]
    logprobs: list[Tensor]
    gradient: dict[str, Tensor]


def _computed(
    logits: list[Tensor], logprobs: list[Tensor], gradient: dict[str, Tensor]
) -> Computed:
    """Without what the gradient was computed from, which a real model has gigabytes of."""
    return Computed(
        [part.detach() for part in logits], [part.detach() for part in logprobs], gradient
    )


def _chosen(logits_TV: Tensor, result: TokenizedResult) -> Tensor:
    """Log-probabilities of the completion's tokens, in float32 at least."""
    n = result.prompt_length
    rows = torch.log_softmax(
        logits_TV[n - 1 : -1], -1, dtype=torch.promote_types(logits_TV.dtype, torch.float32)
    )
    return rows.gather(1, torch.tensor(result.token_ids[n:])[:, None])[:, 0]


def _gradient(logprobs: list[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The gradient of a sum with random weights, the same on each call."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part)
        for part in logprobs
    ]
    model.zero_grad()
    sum((part * weight).sum() for part, weight in zip(logprobs, weights, strict=True)).backward()  # type: ignore[union-attr]
    return {
        name: parameter.grad.to("cpu", copy=True) for name, parameter in model.named_parameters()
    }


def largest_distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest ‖one - other‖ / ‖other‖ of a parameter."""
    assert other.keys() <= one.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def transformers_computes(
    folder: Path, dtype: torch.dtype, results: list[TokenizedResult]
) -> Computed:
    """One by one."""
    with softmax_keeps_dtype():
        reference = reference_model(folder, dtype)
        logits = [reference(torch.tensor([one.token_ids])).logits[0] for one in results]
        logprobs = [_chosen(part, one) for part, one in zip(logits, results, strict=True)]
        return _computed(logits, logprobs, _gradient(logprobs, reference))


def ours_computes(
    folder: Path,
    dtype: torch.dtype,
    results: list[TokenizedResult],
    seq_len: int,
    device: str = "cpu",
) -> tuple[Computed, Computed]:
    """One by one, and packed into rows of that length, which has no logits. In bfloat16 as in
    training: parameters of float32.
    """
    config = read_config(folder)
    decoder = build_decoder(config)
    fill_parameters(dict(decoder.named_parameters()), folder)
    lower = dtype == torch.bfloat16
    policy = Policy(decoder if lower else decoder.to(dtype), compute_dtype=dtype).to(device)

    logits = []
    for one in results:
        tokens = torch.tensor([one.token_ids], device=device)
        positions = torch.tensor([one.input_pos], device=device)
        alone = torch.zeros_like(tokens)
        with torch.autocast(device, dtype) if lower else contextlib.nullcontext():
            plan = attention_plan(alone, alone, positions, dtype)
            logits.append(decoder.logits(decoder.hidden_states(tokens, positions, plan))[0].cpu())
    logprobs = [_chosen(part, one) for part, one in zip(logits, results, strict=True)]
    gradient = to_hugging_face_names(_gradient(logprobs, decoder), config)
    one_by_one = _computed(logits, logprobs, gradient)

    packed = packed_tensors_from_tokenized_results(
        results, seq_len=seq_len, pad_id=0, shortest_shared=1
    )
    inputs = packed.tokens, packed.labels, packed.group_ids, packed.parent_ids, packed.input_pos
    found = policy(*(tensor.to(device) for tensor in inputs)).logprobs.cpu()
    owners = packed.sample_ids[packed.labels >= 0]
    by_name = {(one.task_id, one.sample): n for n, one in enumerate(results)}
    logprobs = [torch.empty(0)] * len(results)
    for number, one in enumerate(packed.samples):
        logprobs[by_name[one.task_id, one.sample]] = found[owners == number]
    return one_by_one, _computed(
        [], logprobs, to_hugging_face_names(_gradient(logprobs, decoder), config)
    )


@dataclass(frozen=True)
class Parity:
    """Differences between ours and transformers'."""

    largest_logit: float
    logits: float
    logprobs_packed: float
    gradient_unpacked: float
    gradient_packed: float


def parity(
    folder: Path,
    dtype: torch.dtype,
    results: list[TokenizedResult] | None = None,
    seq_len: int = 48,
    device: str = "cpu",
) -> Parity:
    """Both sides in `dtype`, over `samples`, or others; ours on `device`."""
    results = results or samples()
    theirs = transformers_computes(folder, dtype, results)
    ours, packed = ours_computes(folder, dtype, results, seq_len, device)
    return Parity(
        largest_logit=max(float(part.abs().max()) for part in theirs.logits),
        logits=max(
            float((a - b).abs().max()) for a, b in zip(ours.logits, theirs.logits, strict=True)
        ),
        logprobs_packed=max(
            float((a - b).abs().max())
            for a, b in zip(packed.logprobs, theirs.logprobs, strict=True)
        ),
        gradient_unpacked=largest_distance(ours.gradient, theirs.gradient),
        gradient_packed=largest_distance(packed.gradient, theirs.gradient),
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"models: {', '.join(VARIANTS)}; all unless given"
    )
    names = parser.parse_args().names or list(VARIANTS)
    if unknown := sorted(set(names) - set(VARIANTS)):
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(
        "                        |logit|    logits            gradient, unpacked    gradient, "
        "packed"
    )
    print(
        "model                   largest    fp32     float64  fp32     float64      fp32     "
        "float64"
    )
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(name, Path(folder))
            single, double = (
                parity(Path(folder), dtype) for dtype in (torch.float32, torch.float64)
            )
        print(
            f"{name:22} {double.largest_logit:8.2f}    {single.logits:.1e}  {double.logits:.1e}  "
            f"{single.gradient_unpacked:.1e}  "
            f"{double.gradient_unpacked:.1e}      {single.gradient_packed:.1e}  "
            f"{double.gradient_packed:.1e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
