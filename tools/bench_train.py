"""What shared prompts are worth in training: whole steps of the real policy, against padded rows
and against a dense mask.

    python tools/bench_train.py [--model small large] [--workload 1024x16x60 ...] [--ways ...]
        [--rounds 3]
            [--slow-rounds 2] [--threads 1]
    python tools/bench_train.py --device cuda        # the shapes of Qwen2.5 1.5B and 7B

A workload is prompt × samples × completion in tokens; rows are full, with as many prompts as fit. A
step is forward, backward and a fused AdamW step over one row of each. The variants:

    padded      one completion per row, plain causal attention, logits at every position: what a
                trainer without sharing does
    dense       shared prompts, a dense mask, untrimmed rows, logits at every position with their
                entropy, all at once
    ours        what the recipe runs: attention by device (split and merge on the CPU, FlexAttention
                on CUDA), trimmed rows, head at trained positions with the gradient in the forward
                pass
    ours bf16   the same under autocast; on CUDA all variants run in bf16

Variants and the model's largest matrix products alternate. The fastest and the median seconds over
all rounds are printed; with one thread on a CPU they are the process's CPU seconds, which other
processes disturb less. Ratios are between the fastest. The floor is the exact FLOPs of the shared
prompts (ttrl/costs/flops.py) at the fastest such product in the same dtype. Useful tokens are the
trained ones. The first round of "ours" is warm-up and does not count; the padded and dense
variants, which take far longer, run only in the last `--slow-rounds` rounds. The small model takes
about three minutes, the large one about ten.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing
from transformers import Qwen2Config

from ttrl.costs.flops import forward_flops
from ttrl.costs.parameters import model_shape
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.kernels import attention
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.models.decoder import build_decoder
from ttrl.training.policy.policy import HeadOptions, Policy

MODELS = {  # layers, width, heads, key/value heads, feed-forward width, vocabulary
    "small": (4, 256, 4, 4, 688, 512),
    "large": (8, 512, 8, 8, 1376, 8192),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936),
    "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152064),
}
ON_DEVICE = {  # models, workloads, positions of a row
    "cpu": (["small", "large"], ["1024x16x60", "256x16x100", "64x8x240"], 4096),
    "cuda": (
        ["qwen2.5-1.5b", "qwen2.5-7b"],
        ["1024x16x512", "16384x8x64", "16384x8x1024", "8192x8x4096"],
        16384,
    ),
}


def make_policy(name: str, device: str) -> Policy:
    """Random weights."""
    layers, width, heads, kv_heads, feed_forward, vocabulary = MODELS[name]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
    )
    torch.manual_seed(0)
    with torch.device(device):
        decoder = build_decoder(config)
    if device == "cuda":
        decoder = decoder.to(torch.bfloat16)
        set_activation_checkpointing(decoder, auto_wrap_policy={TransformerSelfAttentionLayer})
    return Policy(decoder, num_output_chunks=8, compute_dtype=torch.float32)


def make_rows(workload: str, seq_len: int, vocabulary: int) -> tuple[PackedTensors, PackedTensors]:
    """The same samples as one full row with shared prompts, and as padded rows of one sample
    each.
    """
    prompt, samples, completion = map(int, workload.split("x"))
    generator = torch.Generator().manual_seed(0)
    groups = max(1, seq_len // (prompt - 1 + samples * completion))
    results = []
    for group in range(groups):
        start = torch.randint(vocabulary, (prompt,), generator=generator).tolist()
        for number in range(samples):
            end = torch.randint(vocabulary, (completion,), generator=generator).tolist()
            results.append(
                TokenizedResult(
                    task_id=str(group),
                    sample=number,
                    token_ids=start + end,
                    assistant_mask=[False] * prompt + [True] * completion,
                    input_pos=list(range(prompt + completion)),
                    logprobs=[-1.0] * (prompt + completion),
                    prompt_length=prompt,
                    reward=0.0,
                    advantage=float(number % 2 or -1),
                    weights_version=0,
                )
            )
    shared = packed_tensors_from_tokenized_results(
        results, seq_len=max(seq_len, prompt - 1 + samples * completion), pad_id=0
    )
    assert shared.num_rows == 1, "one full row was asked for"
    alone = packed_tensors_from_tokenized_results(
        results, seq_len=prompt + completion - 1, pad_id=0
    )
    assert alone.num_rows == len(results)
    return shared, alone


def inputs_of(rows: PackedTensors, device: str) -> list[Tensor]:
    names = ("tokens", "labels", "group_ids", "parent_ids", "input_pos")
    return [getattr(rows, name).to(device) for name in names]


@contextlib.contextmanager
def other_attention(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Puts `attend(q, k, v, plan, scale)` in the place of the real one, below the layers."""

    def patched(
        q: Tensor, k: Tensor, v: Tensor, plan: attention.AttentionPlan, **how: float | None
    ) -> Tensor:
        return attend(q, k, v, plan, how.get("scale") or q.shape[-1] ** -0.5)

    with contextlib.ExitStack() as stack:
        for module in _modules_with_attend():
            stack.enter_context(mock.patch.dict(module, attend=patched))
        yield


def _modules_with_attend() -> list[dict[str, object]]:
    import sys

    return [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.startswith("ttrl.") and hasattr(module, "attend")
    ]


def causal(q: Tensor, k: Tensor, v: Tensor, plan: attention.AttentionPlan, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def dense(q: Tensor, k: Tensor, v: Tensor, plan: attention.AttentionPlan, scale: float) -> Tensor:
    return attention.dense_attend(q, k, v, plan, scale, None, None)


def whole_logits_loss(policy: Policy, inputs: list[Tensor], with_entropy: bool) -> Tensor:
    """Logits at every position, at once."""
    tokens, labels, group_ids, parent_ids, input_pos = inputs
    plan = attention.attention_plan(group_ids, parent_ids, input_pos, torch.float32)
    logits = policy.decoder.output(policy.decoder.hidden_states(tokens, input_pos, plan)).float()
    logprobs = torch.log_softmax(logits, dim=-1)
    if with_entropy:
        torch.distributions.Categorical(logits=logits.detach()).entropy()
    chosen = logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * (labels != IGNORE)).sum()


def loss_of(
    way: str, policy: Policy, shared: PackedTensors, alone: PackedTensors, device: str
) -> Callable[[], None]:
    """Forward and backward."""
    policy.compute_dtype = (
        torch.bfloat16 if way.endswith("bf16") or device == "cuda" else torch.float32
    )
    if way == "padded":
        inputs = inputs_of(alone, device)
        replaced = causal
        entropy = False
        parts = (
            [[x[i : i + 1] for x in inputs] for i in range(len(inputs[0]))]
            if device == "cuda"
            else [inputs]
        )
    elif way == "dense":
        parts = [inputs_of(shared, device)]
        replaced = dense
        entropy = True
    else:
        ours = inputs_of(shared.trim(), device)
        return lambda: policy(
            *ours, HeadOptions(token_loss=lambda logprobs, _: -logprobs)
        ).loss.backward()

    def run() -> None:
        with (
            other_attention(replaced),
            torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
        ):
            for part in parts:
                whole_logits_loss(policy, part, entropy).backward()

    return run


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str) -> float:
    clock = (
        time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    )
    wait(device)
    start = clock()
    run()
    wait(device)
    return clock() - start


def peak_product(tokens: int, name: str, dtype: torch.dtype, device: str) -> Callable[[], float]:
    """Return what measures the FLOP/s of the model's largest products, forward and of both
    gradients; the fastest of them.
    """
    _, width, _, _, feed_forward, _ = MODELS[name]
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    w = torch.randn(feed_forward, width, device=device, dtype=dtype)
    y = torch.randn(tokens, feed_forward, device=device, dtype=dtype)
    flops = 2 * tokens * width * feed_forward
    ways = (lambda: x @ w.T, lambda: y @ w, lambda: y.T @ x)
    return lambda: max(flops / timed(way, device) for way in ways)


@dataclass
class Measured:
    """Of one way."""

    seconds: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def fastest(self) -> float:
        return min(self.seconds)


def bench(
    name: str, workload: str, ways: list[str], arguments: argparse.Namespace, seq_len: int
) -> None:
    device = arguments.device
    rounds = arguments.rounds
    policy = make_policy(name, device)
    shared, alone = make_rows(workload, seq_len, MODELS[name][-1])
    positions = shared.input_pos[shared.group_ids >= 0].tolist()
    shape = model_shape(policy.decoder.config.to_dict())
    pairs = {
        window: sum(min(place + 1, window or place + 1) for place in positions)
        for window in shape.layers_by_window
    }
    flops = (forward_flops(shape, len(positions), pairs, shared.num_trained) * 3).total
    tokens = min(len(positions), 16384)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    dtypes = {
        way: torch.bfloat16 if way.endswith("bf16") or device == "cuda" else torch.float32
        for way in ways
    }
    products = {dtype: peak_product(tokens, name, dtype, device) for dtype in set(dtypes.values())}
    peaks = dict.fromkeys(products, 0.0)
    found = {way: Measured() for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            slow = way in ("padded", "dense")
            if slow and number <= rounds - arguments.slow_rounds:
                continue
            run = loss_of(way, policy, shared, alone, device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()

            def step(run: Callable[[], None] = run) -> None:
                run()
                optimizer.step()
                optimizer.zero_grad()

            seconds = timed(step, device)
            for dtype, measure in products.items():
                peaks[dtype] = max(peaks[dtype], measure())
            if slow or number or rounds == 0:
                found[way].seconds.append(seconds)
            if device == "cuda":
                found[way].memory = max(found[way].memory, torch.cuda.max_memory_allocated())
    _print(
        f"{name}, {workload}: {len(positions)} tokens in a row",
        shared.num_trained,
        flops,
        dtypes,
        peaks,
        found,
    )


def _print(
    title: str,
    trained: int,
    flops: int,
    dtypes: dict[str, torch.dtype],
    peaks: dict[torch.dtype, float],
    found: dict[str, Measured],
) -> None:
    print(f"\n{title}, {trained} trained, {flops / 1e9:.1f} GFLOP")
    print(
        "  "
        + ", ".join(f"{str(dtype)[6:]} {peak / 1e9:.0f} GFLOP/s" for dtype, peak in peaks.items())
    )
    memory = any(result.memory for result in found.values())
    columns = [
        "useful tokens/s",
        "padded/way",
        "dense/way",
        "floor",
        *(["peak GB"] if memory else []),
    ]
    print(
        f"  {'way':10} {'fastest':>8} {'median':>8}"
        + "".join(f"  {column:>10}" for column in columns)
    )
    for way, result in found.items():
        if not result.seconds:
            continue
        values = [f"{trained / result.fastest:.0f}".rjust(15)]
        for other in ("padded", "dense"):
            known = other in found and found[other].seconds
            values.append(f"{found[other].fastest / result.fastest:.2f}x" if known else "-")
        values.append(f"{100 * flops / peaks[dtypes[way]] / result.fastest:.1f}%")
        values += [f"{result.memory / 1e9:.1f}"] if memory else []
        seconds = f"  {way:10} {result.fastest:8.3f} {statistics.median(result.seconds):8.3f}"
        print(seconds + "".join(f"  {value:>10}" for value in values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=list(ON_DEVICE), default="cpu")
    parser.add_argument("--model", nargs="*", choices=list(MODELS))
    parser.add_argument(
        "--workload", nargs="*", help="prompt × samples × completion, as 256x16x100"
    )
    parser.add_argument("--ways", nargs="*", default=["padded", "dense", "ours", "ours bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slow-rounds", type=int, default=2, help="rounds of the padded and dense variants"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    models, workloads, seq_len = ON_DEVICE[arguments.device]
    torch.set_num_threads(arguments.threads)
    ways = [way for way in arguments.ways if arguments.device == "cpu" or way != "ours bf16"]
    print(
        f"torch {torch.__version__}, {arguments.device}, {arguments.threads} thread(s), "
        f"{arguments.rounds} rounds"
    )
    for name in arguments.model or models:
        for workload in arguments.workload or workloads:
            bench(name, workload, ways, arguments, seq_len)


if __name__ == "__main__":
    main()
