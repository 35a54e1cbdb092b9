"""What each switch of the recipes costs and saves: seconds, peak memory and gradient of one
optimizer step, against a plain one.

    python tools/bench_switches.py [--width 384] [--layers 4] [--rows 4] [--seq-len 1024]
        [--vocab 4096] [--device cpu] [NAME ...]

A random Qwen2-shaped model trains on made-up groups of 8 samples. Each line is a process of its own
(two for the parallel ones), with one thread; the first of its two steps warms up and compiles, the
second is measured.

    CPU s      of the first process, which other work on the machine disturbs little (--device cuda:
               wall-clock seconds)
    step MB    the peak memory during the step, minus what was held before it (including gradients,
               which are made in the step)
    held MB    parameters and optimizer state of one process
    ‖Δg‖/‖g‖   the difference of the gradient to the plain one's, over all parameters; not to be
               seen where the optimizer works in the backward pass, where the weights after the step
               are compared instead; those of adapters to LoRA's own

"plain" is AdamW, fused, and a head that takes the gradient of its logits in the forward pass, as
for losses of single tokens; if the loss needs more (entropy, KL over the vocabulary, whole
samples), the head is recomputed in the backward pass.

--device cuda adds the switches that need it: activation offloading, CPU offload, the optimizer on
the CPU. Never run on a GPU.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from ttrl.configs import TrainingConfig
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.batches import policy_inputs, updates
from ttrl.training.kernels.logprobs import IGNORE
from ttrl.training.optimizer.optimizer import begin_step, clip_and_step, make_optimizer
from ttrl.training.optimizer.state import state_tensors
from ttrl.training.parallel.distributed import Ranks, ranks
from ttrl.training.parallel.gradients import settle
from ttrl.training.parallel.sharding import full_tensor, local_part
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions

CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": True}
LORA: dict[str, Any] = {"lora_rank": 8}
# Ways of this tool, no settings of the recipes.
RECOMPUTED = "(recomputed)"
NOT_FUSED = "(not fused)"
SWITCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "plain again": (1, {}),
    "head recomputed in backward": (1, {RECOMPUTED: True}),
    "num_output_chunks 1": (1, {"num_output_chunks": 1}),
    "… recomputed in backward": (1, {"num_output_chunks": 1, RECOMPUTED: True}),
    "AdamW not fused": (1, {NOT_FUSED: True}),
    "dtype bf16": (1, {"dtype": "bf16"}),
    "rows_per_microbatch 1": (1, {"rows_per_microbatch": 1}),
    "activation_checkpointing": (1, CHECKPOINTING),
    "… of every 2nd layer": (1, {**CHECKPOINTING, "checkpoint_every": 2}),
    "… keeping products": (1, {**CHECKPOINTING, "checkpoint_keeps": "products"}),
    "compile": (1, {"compile": True, "row_length_multiple": 128}),
    "compile, checkpointing": (1, {"compile": True, "row_length_multiple": 128, **CHECKPOINTING}),
    "row_length_multiple 128": (1, {"row_length_multiple": 128}),
    "optimizer_in_backward": (1, {"optimizer_in_backward": True}),
    "optimizer adamw_8bit": (1, {"optimizer": "adamw_8bit"}),
    "optimizer sgd": (1, {"optimizer": "sgd"}),
    "LoRA": (1, LORA),
    "LoRA, checkpointing": (1, {**LORA, **CHECKPOINTING}),
    "DoRA": (1, {**LORA, "lora_kind": "dora"}),
    "QLoRA": (1, {**LORA, "lora_base_dtype": "nf4"}),
    "FSDP, 2 processes": (2, {}),
    "… reshard_after_forward off": (2, {"reshard_after_forward": False}),
    "… optimizer_in_backward": (2, {"optimizer_in_backward": True}),
    "… checkpointing": (2, CHECKPOINTING),
    "… compile": (2, {"compile": True, "row_length_multiple": 128}),
    "… LoRA": (2, LORA),
    "tensor_parallel 2": (2, {"tensor_parallel": 2}),
    "… and checkpointing": (2, {"tensor_parallel": 2, **CHECKPOINTING}),
}
ON_CUDA: dict[str, tuple[int, dict[str, Any]]] = {
    "activation_offloading": (1, {"activation_offloading": True}),
    "cpu_offload": (1, {"cpu_offload": True}),
    "optimizer_on_cpu": (1, {"optimizer_on_cpu": True}),
}


def make_inputs(args: argparse.Namespace, folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    shape = {
        "hidden_size": args.width,
        "intermediate_size": 3 * args.width,
        "num_hidden_layers": args.layers,
    }
    heads = {
        "num_attention_heads": args.width // 64,
        "num_key_value_heads": max(2, args.width // 192),
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=args.vocab, **shape, **heads)).save_pretrained(
        folder / "model"
    )
    draw = random.Random(0)
    results = []
    for group in range(args.rows):
        prompt = [draw.randrange(args.vocab) for _ in range(args.seq_len // 4)]
        for number in range(8):
            completion = [
                draw.randrange(args.vocab)
                for _ in range(draw.randint(args.seq_len // 16, 3 * args.seq_len // 32))
            ]
            n = len(prompt)
            m = len(completion)
            results.append(
                TokenizedResult(
                    task_id=str(group),
                    sample=number,
                    token_ids=prompt + completion,
                    assistant_mask=[False] * n + [True] * m,
                    input_pos=list(range(n + m)),
                    logprobs=[math.nan] * n + [-1.0] * m,
                    prompt_length=n,
                    reward=0.0,
                    advantage=draw.gauss(0, 1),
                )
            )
    packed_tensors_from_tokenized_results(results, seq_len=args.seq_len, pad_id=0).save(
        folder / "packed.safetensors"
    )


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set so far


def memory(device: torch.device, peak: bool) -> float:
    """Bytes held now, or the most since `forget_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(
        next(line.split()[1] for line in lines if line.startswith("VmHWM:" if peak else "VmRSS:"))
    )


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of this process's part."""
    local = local_part(tensor)
    if type(local) in (torch.Tensor, torch.nn.Parameter):
        return local.nbytes
    return sum(size_of(getattr(local, name)) for name in local.__tensor_flatten__()[0])  # in 4 bits


def measure(
    config: TrainingConfig, ways: Container[str], here: Ranks, packed: PackedTensors
) -> dict[str, Any]:
    policy = load_policy(config, here)
    optimizer = make_optimizer(policy, config)
    if NOT_FUSED in ways:
        for group in optimizer.param_groups:
            group["fused"] = False
    (step,) = updates(packed, 1, (0, 1), here, policy.decoder.config)
    found: dict[str, Any] = {}
    clock = time.perf_counter if here.device.type == "cuda" else time.process_time
    for number in range(2):
        here.barrier()
        forget_peak()
        before = memory(here.device, False)
        began = clock()
        begin_step(optimizer, config, number)
        for batch in step.microbatches(config, here.device):
            trained = batch["labels"] != IGNORE
            factors = -batch["advantages"][trained] * batch["weights"][trained]
            if RECOMPUTED in ways:
                step.backward(policy(*policy_inputs(batch)).logprobs * factors)
            else:
                head = HeadOptions(
                    token_loss=lambda logprobs, at, factors=factors: logprobs * factors[at]
                )
                step.backward(policy(*policy_inputs(batch), head).loss)
        spent = clock() - began
        if number == 0:
            settle(policy.parameters())
            named = policy.parameters_by_name()
            found["gradient"] = {
                name: full_tensor(p.grad).cpu().clone()
                for name, p in named.items()
                if p.grad is not None
            }
        began = clock()
        clip_and_step(policy, optimizer, config, number)
        if here.device.type == "cuda":
            torch.cuda.synchronize()
        found["first" if number == 0 else "seconds"] = spent + clock() - began
        found["peak"] = memory(here.device, True) - before
        if number == 0:
            found["weights"] = {
                name: weight.clone() for name, weight in policy.full_weights().items()
            }
    tensors = [*policy.parameters(), *(tensor for _, tensor in state_tensors(policy, optimizer))]
    found["held"] = sum(map(size_of, tensors))
    # What is saved is fp32; held are bytes, and a scale for every 256 of them.
    if config.optimizer == "adamw_8bit":
        found["held"] = sum(p.numel() * (4 + 2 * (1 + 4 / 256)) for p in policy.parameters())
    return found


def child(
    settings: dict[str, Any], folder: Path, rank: int, processes: int, port: int, result: Path
) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ways = {name for name in (RECOMPUTED, NOT_FUSED) if settings.pop(name, False)}
    config = TrainingConfig.parse(settings, "benchmark")
    with ranks(config) as here:
        found = measure(config, ways, here, PackedTensors.load(folder / "packed.safetensors"))
        if here.is_first:
            torch.save(found, result)


def run(settings: dict[str, Any], processes: int, folder: Path) -> dict[str, Any] | None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = folder / "result.pt"
    result.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork" if settings["device"] == "cpu" else "spawn")
    children = [
        context.Process(target=child, args=(settings, folder, rank, processes, port, result))
        for rank in range(processes)
    ]
    for one in children:
        one.start()
    for one in children:
        one.join()
    return torch.load(result, weights_only=True) if result.exists() else None


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    square = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return math.sqrt(square / sum(float(value.double().square().sum()) for value in other.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="lines of the table, or parts of their names; all unless given",
    )
    for name, default in (
        ("width", 384),
        ("layers", 4),
        ("rows", 4),
        ("seq-len", 1024),
        ("vocab", 4096),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    chosen = SWITCHES | (ON_CUDA if args.device == "cuda" else {})
    if args.names:
        chosen = {
            k: v for k, v in chosen.items() if k == "plain" or any(part in k for part in args.names)
        }
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(KeyboardInterrupt):
        folder = Path(root)
        make_inputs(args, folder)
        packed = PackedTensors.load(folder / "packed.safetensors")
        print(
            f"{args.layers} layers x {args.width}, vocabulary {args.vocab}; {packed.num_rows} "
            f"rows of {packed.seq_len}, "
            f"{packed.num_tokens / packed.tokens.numel():.0%} full, {packed.num_trained} trained "
            "tokens"
        )
        heads = (
            ("first s", 8),
            ("CPU s", 7),
            ("ratio", 6),
            ("step MB", 8),
            ("ratio", 6),
            ("held MB", 8),
            ("‖Δg‖/‖g‖", 10),
        )
        print(f"{'switch':30} " + " ".join(f"{head:>{width}}" for head, width in heads), flush=True)
        common = {
            "model": str(folder / "model"),
            "output_dir": str(folder),
            "device": args.device,
            "num_threads": 1,
        }
        common |= {"rows_per_microbatch": 10**6, "max_grad_norm": None, "lr": 1e-4}
        plain: dict[str, Any] = {}
        adapters: dict[str, Any] = {}
        for name, (processes, settings) in chosen.items():
            found = run({**common, **settings}, processes, folder)
            if found is None:
                print(f"{name:30} failed")
                continue
            plain = plain or found
            if "lora_rank" in settings:
                adapters = adapters or found
            like = adapters if "lora_rank" in settings else plain
            what = "gradient" if found["gradient"] else "weights"
            comparable = found[what].keys() == like[what].keys()  # DoRA has parameters of its own
            difference = (
                f"{distance(found[what], like[what]):10.1e}" if comparable else f"{'–':>10}"
            )
            print(
                f"{name:30} {found['first']:8.2f} {found['seconds']:7.2f} "
                f"{found['seconds'] / plain['seconds']:6.2f} "
                f"{found['peak'] / 1e6:8.0f} {found['peak'] / plain['peak']:6.2f} "
                f"{found['held'] / 1e6:8.1f} "
                f"{difference}",
                flush=True,
            )


if __name__ == "__main__":
    main()
