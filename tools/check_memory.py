"""The memory model of `ttrl.costs.memory` against the recipe: peak resident memory at a dozen
settings, measured and estimated.

    python tools/check_memory.py [--moments] [--default-heap] [NAME ...]

Each line is the real recipe (`ttrl.grpo_recipe.train_iteration`) in a fresh process with one
thread, on a random model and made-up groups of 8 samples; with 2 processes (FSDP2 over gloo), it
is the first of them. The measured figure is the highest resident memory, minus what the process
held once everything was imported.

    MB         of the whole recipe, highest of all moments
    ratio      estimated / measured
    moment     the point at which the estimate is highest, not counting pages of mapped files (which
               are in the figures)

Only what the tensors need is measured: glibc is made to map each block of 1 MB or more separately
(MALLOC_MMAP_THRESHOLD_), as it does above 32 MB anyway. `--default-heap` keeps glibc's default; the
figures then include what is lost between freed blocks.

`--moments` adds a line for each point of the recipe: its highest resident memory, and the estimate
with its parts.

    python tools/check_memory.py --gpu [--moments] [--folder DIR] [NAME ...]

The same on a GPU, for models of published shapes, in this process: the most that PyTorch had
allocated, and what is estimated without context and gaps. What the allocator held and what the
driver says of the process come after it; then the seconds of the last optimizer step, its tokens/s,
and its share of what the GPU reaches in the model's largest product. Models are made in `--folder`,
for which /dev/shm is the fastest.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrl.configs import GRPOConfig
from ttrl.costs.memory import Device, MemoryEstimate, Workload, training_memory
from ttrl.errors import TtrlError
from ttrl.system.files import read_jsonl

MEGABYTE = 1e6


@dataclass(frozen=True)
class Case:
    """A line of the table: a model's shape, rows, and settings of the recipe."""

    shape: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    length: int = 2048
    processes: int = 1
    continued: bool = False
    """The second iteration, with an optimizer state."""


SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 16_384,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 8192,
}
CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": True}
CASES: dict[str, Case] = {
    "plain": Case(),
    "small, 4 rows of 512": Case(SMALL, {"rows_per_microbatch": 4}, rows=4, length=512),
    "8 layers, 2 rows one by one": Case({"num_hidden_layers": 8}, rows=2),
    "checkpointing, all": Case({}, CHECKPOINTING),
    "checkpointing every 2nd, SGD": Case(
        {}, CHECKPOINTING | {"checkpoint_every": 2, "optimizer": "sgd"}
    ),
    "checkpointing, keeping products, SGD": Case(
        {}, CHECKPOINTING | {"checkpoint_keeps": "products", "optimizer": "sgd"}
    ),
    "bf16": Case({}, {"dtype": "bf16"}),
    "bf16, checkpointing": Case({}, CHECKPOINTING | {"dtype": "bf16"}),
    "KL k3, swapped reference": Case({}, {"kl_coefficient": 0.1, "kl_estimator": "k3"}),
    "KL full, vocabulary 32k": Case(
        {"vocab_size": 32_768}, {"kl_coefficient": 0.1, "kl_estimator": "full"}
    ),
    "entropy bonus, 1 chunk": Case({}, {"entropy_coefficient": 0.01, "num_output_chunks": 1}),
    "SGD, 32k tied, 16 chunks": Case(
        {"vocab_size": 32_768, "tie_word_embeddings": True},
        {"optimizer": "sgd", "num_output_chunks": 16},
        length=2048,
    ),
    "2 updates, rows one by one": Case(SMALL, {"updates_per_iteration": 2}, rows=4),
    "continued, AdamW": Case({}, {}, continued=True),
    "optimizer in backward": Case({}, {"optimizer_in_backward": True, "max_grad_norm": None}),
    "LoRA": Case({}, {"lora_rank": 16}),
    "LoRA, files in bf16": Case({"dtype": "bfloat16"}, {"lora_rank": 16}),
    "LoRA in bf16, files in bf16": Case({"dtype": "bfloat16"}, {"lora_rank": 16, "dtype": "bf16"}),
    "QLoRA, files in bf16": Case(
        {"dtype": "bfloat16"}, {"lora_rank": 16, "lora_base_dtype": "nf4"}
    ),
    "LoRA, files in bf16, 2 processes": Case(
        {"dtype": "bfloat16"}, {"lora_rank": 16}, rows=2, processes=2
    ),
    "QLoRA, bf16": Case({}, {"lora_rank": 16, "lora_base_dtype": "nf4", "dtype": "bf16"}),
    "Qwen3 (head norms)": Case({"model_type": "qwen3", "head_dim": 128}, {}),
    "2 processes": Case({}, {}, rows=2, processes=2),
    "2 processes, kept gathered": Case({}, {"reshard_after_forward": False}, rows=2, processes=2),
    "2 processes, 2nd iteration": Case({}, {}, rows=4, processes=2, continued=True),
    "Gemma 2 (dense mask)": Case(
        {"model_type": "gemma2", "head_dim": 64, **SMALL}, {}, length=1024
    ),
}

NOT_ALLOCATED = ("context", "NCCL", "allocator's gaps")
ARCHITECTURES = json.loads(
    (Path(__file__).parents[1] / "ttrl" / "costs" / "architectures.json").read_text()
)
FULL: dict[str, Any] = {"dtype": "bf16", "drift_rows": "first_update", "updates_per_iteration": 2}
"""Of all models on a GPU; two steps, the second of which is timed."""
RECOMPUTED = FULL | CHECKPOINTING
LORA = RECOMPUTED | {"lora_rank": 16, "lora_merge": False}
ON_GPU: dict[str, Case] = {
    "0.5B, nothing recomputed": Case(ARCHITECTURES["qwen2.5_0.5b"], FULL, 8, 8192),
    "0.5B, 4 rows of 2048": Case(
        ARCHITECTURES["qwen2.5_0.5b"], RECOMPUTED | {"rows_per_microbatch": 4}, 32, 2048
    ),
    "0.5B, KL full": Case(
        ARCHITECTURES["qwen2.5_0.5b"],
        RECOMPUTED | {"kl_coefficient": 0.1, "kl_estimator": "full"},
        8,
        8192,
    ),
    "1.5B, checkpointing": Case(ARCHITECTURES["qwen2.5_1.5b"], RECOMPUTED, 8, 8192),
    "1.5B, products kept": Case(
        ARCHITECTURES["qwen2.5_1.5b"], RECOMPUTED | {"checkpoint_keeps": "products"}, 8, 8192
    ),
    "1.5B, compiled": Case(
        ARCHITECTURES["qwen2.5_1.5b"],
        RECOMPUTED | {"compile": True, "row_length_multiple": 8192},
        8,
        8192,
    ),
    "1.5B, 8 bits": Case(
        ARCHITECTURES["qwen2.5_1.5b"], RECOMPUTED | {"optimizer": "adamw_8bit"}, 8, 8192
    ),
    "1.5B, activations on the CPU": Case(
        ARCHITECTURES["qwen2.5_1.5b"], RECOMPUTED | {"activation_offloading": True}, 8, 8192
    ),
    "1.5B, optimizer on the CPU": Case(
        ARCHITECTURES["qwen2.5_1.5b"],
        RECOMPUTED | {"optimizer_on_cpu": True, "max_grad_norm": None},
        8,
        8192,
    ),
    "1.5B, everything on the CPU": Case(
        ARCHITECTURES["qwen2.5_1.5b"], RECOMPUTED | {"cpu_offload": True}, 8, 8192
    ),
    "7B, LoRA": Case(ARCHITECTURES["qwen2.5_7b"], LORA, 8, 8192),
    "7B, QLoRA": Case(ARCHITECTURES["qwen2.5_7b"], LORA | {"lora_base_dtype": "nf4"}, 8, 8192),
}


def resident(name: str) -> float:
    """Bytes: VmRSS is now, VmHWM the highest since `forget_peak`. (getrusage would also know a
    parent's peak.)
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line.split()[1] for line in lines if line.startswith(name + ":")))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def make_model(case: Case, folder: Path, device: str = "cpu") -> None:
    """Random weights, in fp32 or as the case says; on a GPU as such models are published, in
    bf16.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SHAPE | case.shape))
    with torch.device(device):
        in_bf16 = device == "cuda" or config.dtype == torch.bfloat16
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if in_bf16 else torch.float32
        )
    made.save_pretrained(folder / "model")


def make_rows(case: Case, folder: Path) -> None:
    from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
    from ttrl.records import TokenizedResult

    draw = random.Random(0)
    results = []
    vocabulary = (SHAPE | case.shape)["vocab_size"]
    for group in range(case.rows):
        prompt = [draw.randrange(vocabulary) for _ in range(case.length // 4)]
        for number in range(8):
            completion = [draw.randrange(vocabulary) for _ in range(3 * case.length // 32)]
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
    packed_tensors_from_tokenized_results(results, seq_len=case.length, pad_id=0).save(
        folder / "packed.safetensors"
    )


class Moments:
    """Notes the highest resident memory at the end of each function that is wrapped, or the most
    that a GPU had allocated.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self.base = 0.0
        self.on_gpu = on_gpu
        self.peaks: dict[str, float] = {}

    def note(self, name: str) -> None:
        if self.on_gpu:
            import torch

            self.peaks[name] = max(self.peaks.get(name, 0.0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            return
        self.peaks[name] = max(self.peaks.get(name, 0.0), resident("VmHWM") - self.base)
        forget_peak()

    def wrap_recipe(self) -> None:
        from ttrl import grpo_recipe
        from ttrl.training.stepper import Stepper

        self.wrap(grpo_recipe, "load_trained", "loading")
        self.wrap(grpo_recipe.TrainLog, "__init__", "loading")
        self.wrap(grpo_recipe.Prepass, "run", "prepass")
        self.wrap(grpo_recipe.GradientStep, "accumulate", "gradient")
        self.wrap(Stepper, "take", "optimizer")
        self.wrap(grpo_recipe, "save_checkpoint", "saving")
        self.wrap(Stepper, "save", "saving")

    def wrap(self, owner: Any, function: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, function)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = inner(*arguments, **options)
            self.note(name)
            return result

        setattr(owner, function, wrapped)


def child(settings: dict[str, Any], result: Path) -> None:
    """The recipe in this process; writes the peaks of its moments."""
    import gc

    import torch

    from ttrl import grpo_recipe
    from ttrl.configs import GRPOConfig
    from ttrl.training.parallel.distributed import ranks

    moments = Moments()
    moments.wrap_recipe()
    config = GRPOConfig.parse(settings, "check")
    with ranks(config) as here:
        torch.ones(64, 64) @ torch.ones(64, 64)
        gc.collect()
        forget_peak()
        moments.base = resident("VmRSS")
        grpo_recipe.train_iteration(config, here)
        if here.is_first:
            result.write_text(json.dumps({"base": moments.base, "moments": moments.peaks}))


def measure(case: Case, folder: Path, default_heap: bool) -> dict[str, Any]:
    """Peaks in bytes, by moment."""
    settings = {
        "model": str(folder / "model"),
        "packed": str(folder / "packed.safetensors"),
        "output_dir": str(folder / "out"),
        "device": "cpu",
        "num_threads": 1,
        "rows_per_microbatch": 1,
        **case.settings,
    }
    if settings.get("kl_coefficient"):
        settings["reference_model"] = settings["model"]
    result = folder / "result.json"
    runs = [settings]
    if case.continued:
        runs.append(
            settings
            | {"state": str(folder / "out" / "state"), "output_dir": str(folder / "second")}
        )
    for run in runs:
        result.unlink(missing_ok=True)
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(case.processes),
        ]
        command = [sys.executable, *(torchrun if case.processes > 1 else [])]
        command += [__file__, "--child", json.dumps(run), "--result", str(result)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | (
            {} if default_heap else {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
        )
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    return json.loads(result.read_text())


def estimate(case: Case, folder: Path, device: Device = "cpu") -> MemoryEstimate:
    """What the model says of the same."""
    from ttrl.data.packing.pack import PackedTensors

    packed = PackedTensors.load(folder / "packed.safetensors")
    settings = {"rows_per_microbatch": 1, **case.settings}
    size = settings["rows_per_microbatch"]
    rows = -(-packed.num_rows // settings.get("updates_per_iteration", 1) // case.processes)
    workload = Workload(
        row_length=int((packed.group_ids >= 0).any(dim=0).sum()),
        trained_share=packed.num_trained / packed.tokens.numel(),
        rows=-(-packed.num_rows // case.processes),
        microbatches=-(-rows // size),
        continued=case.continued,
    )
    config = json.loads((folder / "model" / "config.json").read_text())
    recipe = GRPOConfig(model="", packed="", output_dir="", **settings)
    return training_memory(config, recipe, workload, device=device, ranks=case.processes)


@dataclass(frozen=True)
class Measured:
    """What a case took, in bytes, next to the estimate of it."""

    allocated: float
    """The most that PyTorch had allocated on a GPU; on a CPU, that the process held more than
    before.
    """
    estimated: float
    """Without context and gaps."""
    reserved: float
    driver: float
    row: dict[str, Any]
    """train.jsonl's of the last step."""
    said: MemoryEstimate


def in_this_process(case: Case, own: Path, moments: Moments, device: Device) -> Measured:
    """Run the recipe on a case whose model is in `own`/model; what is written last is left out."""
    import gc

    import torch

    from ttrl import grpo_recipe
    from ttrl.training.parallel.distributed import ranks

    grpo_recipe.write_files = lambda *_: None  # type: ignore[assignment]
    make_rows(case, own)
    given = {
        "model": own / "model",
        "packed": own / "packed.safetensors",
        "output_dir": own / "out",
        "device": device,
    }
    if case.settings.get("kl_coefficient"):
        given["reference_model"] = given["model"]
    settings = (
        {key: str(value) for key, value in given.items()}
        | {"rows_per_microbatch": 1}
        | case.settings
    )
    moments.peaks.clear()
    gc.collect()
    before = reserved = driver = 0.0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        forget_peak()
        moments.base = resident("VmRSS")
    config = GRPOConfig.parse(settings, "check")
    with ranks(config) as here:
        grpo_recipe.train_iteration(config, here)
    if device == "cuda":
        reserved = torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        driver = total - free
    said = estimate(case, own, device)
    estimated = sum(size for part, size in said.parts.items() if part not in NOT_ALLOCATED)
    measured = max(moments.peaks.values()) - before
    row = read_jsonl(own / "out" / "train.jsonl")[-1]
    return Measured(measured, estimated, reserved, driver, row, said)


def on_gpu(chosen: dict[str, Case], folder: Path, with_moments: bool) -> None:
    """Measure one case after the other on this machine's GPU, and print a line for each."""
    import torch

    moments = Moments(on_gpu=True)
    moments.wrap_recipe()
    print(torch.cuda.get_device_name(), torch.__version__)
    columns = "reserved", "driver", "seconds", "tokens/s", "of peak"
    print(
        f"{'setting':30} {'allocated':>9} {'estimate':>9} {'ratio':>6}"
        + "".join(f"{name:>10}" for name in columns)
        + "  (GB)"
    )
    for number, (name, case) in enumerate(chosen.items()):
        model = folder / f"{case.shape['model_type']}-{case.shape['parameters']}"
        try:
            if not model.is_dir():
                make_model(case, model, "cuda")
            own = folder / str(number)
            own.mkdir()
            (own / "model").symlink_to(model / "model")
            found = in_this_process(case, own, moments, "cuda")
        # Of one setting; the others are of use.
        except (RuntimeError, AssertionError, TtrlError) as error:
            print(f"{name:30} {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        measured = found.allocated
        estimated = found.estimated
        row = found.row
        figures = [
            f"{found.reserved / 1e9:10.2f}{found.driver / 1e9:10.2f}"
            f"{row['seconds']:10.2f}{row['tokens_per_second']:10.0f}"
        ]
        figures.append(f"{row['peak_share']:10.2f}  {row['seconds_by_part']}")
        print(
            f"{name:30} {measured / 1e9:9.2f} {estimated / 1e9:9.2f} "
            f"{estimated / measured:6.2f}{''.join(figures)}",
            flush=True,
        )
        if with_moments:
            _print_moments(moments.peaks, found.said)


def run(name: str, case: Case, with_moments: bool, default_heap: bool) -> float:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        make_model(case, folder)
        make_rows(case, folder)
        found = measure(case, folder, default_heap)
        said = estimate(case, folder)
    measured = max(found["moments"].values())
    estimated = said.resident
    ratio = estimated / measured
    print(
        f"{name:36} {measured / MEGABYTE:9.0f} {estimated / MEGABYTE:9.0f} {ratio:6.2f}  "
        f"{said.moment}",
        flush=True,
    )
    if with_moments:
        _print_moments(found["moments"], said)
    return ratio


def _print_moments(found: dict[str, float], said: MemoryEstimate) -> None:
    for moment, peak in found.items():
        if (parts := said.moments.get(moment)) is None:
            continue  # nothing happened in it
        parts = {part: size for part, size in parts.items() if size and part not in NOT_ALLOCATED}
        total = sum(parts.values())
        listed = ", ".join(f"{part} {size / MEGABYTE:.0f}" for part, size in parts.items())
        print(
            f"    {moment:30} {peak / MEGABYTE:9.0f} {total / MEGABYTE:9.0f} {total / peak:6.2f} "
            f" {listed}",
            flush=True,
        )


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
    parser.add_argument("--moments", action="store_true")
    parser.add_argument("--default-heap", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="measure on this machine's GPU")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help="with --gpu: where models are made (20 GB)",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child), args.result)
        return
    cases = ON_GPU if args.gpu else CASES
    chosen = {
        name: case
        for name, case in cases.items()
        if not args.names or any(part in name for part in args.names)
    }
    if args.gpu:
        with tempfile.TemporaryDirectory(dir=args.folder) as root:
            on_gpu(chosen, Path(root), args.moments)
        return
    print(f"{'setting':36} {'measured':>9} {'estimate':>9} {'ratio':>6}  moment   (MB)")
    ratios = [run(name, case, args.moments, args.default_heap) for name, case in chosen.items()]
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    print(f"{len(ratios)} settings, worst ratio {worst:.2f}")


if __name__ == "__main__":
    main()
