"""Does an update depend on how it is computed? One of 64 samples, computed in every way, against
float64 on plain sequences.

    python tools/check_invariance.py [--only WORD] [--skip WORD] [--objective NAME] [--device cuda]

Processes × rows in a microbatch (fewer than all accumulate) × orders of packing × {checkpointing,
compilation, both}; then other switches by themselves, including tensor parallelism and bf16.
Printed for each: ‖g - g₆₄‖/‖g₆₄‖ over all parameters, and the same for the change made by one SGD
step. g₆₄ is computed by transformers in float64, one plain sequence at a time, from the formulas of
the objective written out here. The line for bf16 also shows the error of transformers under
autocast. Exit status 1 if an fp32 variant differs by 1e-5 or more. On a GPU, one process alone.
"""

import argparse
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check_parity
import torch
from torch import Tensor, distributed
from transformers.utils.logging import disable_progress_bar

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.training.batches import updates
from ttrl.training.models.architecture import read_config
from ttrl.training.models.weights import to_hugging_face_names
from ttrl.training.objective.objective import objective_from
from ttrl.training.parallel.distributed import Ranks, grid
from ttrl.training.parallel.sharding import full_tensor
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import Policy
from ttrl.training.prepass import Prepass
from ttrl.training.step import GradientStep
from ttrl.training.stepper import Stepper
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainProgress

TOLERANCE = 1e-5
LR = 1.0
SEQ_LEN = 96
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo-k3": {"kl_coefficient": 0.2, "clip_low": 0.1, "clip_high": 0.3},
    "gspo-entropy-kl": {
        "objective": "gspo",
        "clip_low": 0.01,
        "clip_high": 0.02,
        "kl_coefficient": 0.2,
        "kl_estimator": "full",
        "entropy_coefficient": 0.05,
    },
}


@dataclass(frozen=True)
class Way:
    """One way of computing the same update."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: int = 0
    """0: samples are packed in order; else the seed of another order."""
    processes: int = 1

    @property
    def exact(self) -> bool:
        """Whether TOLERANCE applies."""
        return self.settings.get("dtype") != "bf16"


LAYERS: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing": {"activation_checkpointing": True},
    "compile": {"compile": True, "row_length_multiple": SEQ_LEN},
    "compile, checkpointing": {
        "compile": True,
        "row_length_multiple": SEQ_LEN,
        "activation_checkpointing": True,
    },
}
"""How layers are computed. Compiled ones see rows of one length: each other one would be compiled
anew.
"""


def ways(device: str = "cpu") -> Iterator[Way]:
    """All of them on a device: every number of processes with every microbatch, order and
    computation of the layers, and single switches. On a GPU, one process."""
    for processes in (1, 2) if device == "cpu" else (1,):
        for layers, settings in LAYERS.items():
            # 100: all at once, nothing is accumulated.
            for rows, order in itertools.product((1, 2, 8, 100), (0, 1, 2)):
                name = ", ".join(
                    [
                        f"{rows if rows < 100 else 'all'} rows, order {order}",
                        *filter(None, [layers]),
                    ]
                )
                yield Way(name, {"rows_per_microbatch": rows, **settings}, order, processes)
        switches: dict[str, dict[str, Any]] = {
            "1 chunk": {"num_output_chunks": 1},
            "7 chunks": {"num_output_chunks": 7},
            "rows of multiples of 64": {"row_length_multiple": 64},
            "checkpointing every other layer": {
                "activation_checkpointing": True,
                "checkpoint_every": 2,
            },
            "checkpointing, products kept": {
                "activation_checkpointing": True,
                "checkpoint_keeps": "products",
            },
            "bf16": {"dtype": "bf16"},
        }
        if device == "cuda":
            switches["activations in the CPU's memory"] = {"activation_offloading": True}
            switches["activations there, checkpointing"] = {
                "activation_offloading": True,
                "activation_checkpointing": True,
            }
        if processes > 1:
            switches["parameters stay gathered"] = {"reshard_after_forward": False}
            switches["tensor parallel"] = {"tensor_parallel": 2}  # which excludes compilation
            switches["tensor parallel, checkpointing"] = {
                "tensor_parallel": 2,
                "activation_checkpointing": True,
            }
        for name, settings in switches.items():
            yield Way(name, settings, 0, processes)


@dataclass
class Inputs:
    """The update's inputs, and what it must come to."""

    folder: Path
    objective: str
    samples: list[TokenizedResult]
    gradient: dict[str, Tensor]
    """float64, under Hugging Face names."""

    @property
    def model(self) -> Path:
        """The policy's folder; the reference's lies beside it."""
        return self.folder / "model"

    def config(self, settings: Mapping[str, Any]) -> GRPOConfig:
        """The recipe's config for one way."""
        values = {
            "model": self.model,
            "packed": "",
            "output_dir": self.folder,
            "reference_model": self.folder / "reference",
        }
        values |= {
            "device": "cpu",
            "optimizer": "sgd",
            "lr": LR,
            "max_grad_norm": None,
            "measure_peak": False,
        }
        return GRPOConfig.parse({**values, **OBJECTIVES[self.objective], **settings}, "way")

    def packed(self, order: int) -> PackedTensors:
        """The samples in rows, each sample counting the same."""
        samples = list(self.samples)
        if order:
            random.Random(order).shuffle(samples)
        return packed_tensors_from_tokenized_results(
            samples, seq_len=SEQ_LEN, pad_id=0, aggregation="sequence", seed=order
        )


def make_inputs(
    folder: Path, objective: str, family: str = "qwen2", groups: int = 8, group_size: int = 8
) -> Inputs:
    """Two models, samples that are near the policy, some of their log-probabilities unknown, and
    the gradient in float64.
    """
    for name, seed in (("model", 0), ("reference", 1)):
        if not (folder / name).is_dir():
            (folder / name).mkdir(parents=True)
            check_parity.make_folder(family, folder / name)
            if seed:
                _disturb(folder / name)
    draw = random.Random(0)
    samples = []
    for group in range(groups):
        prompt = [draw.randrange(1, check_parity.VOCAB) for _ in range(draw.randint(1, 20))]
        for number in range(group_size):
            completion = [draw.randrange(1, check_parity.VOCAB) for _ in range(draw.randint(1, 16))]
            samples.append(_sample(f"g{group}", number, prompt, completion, draw.gauss(0, 1)))
    with check_parity.softmax_keeps_dtype():
        policy = check_parity.reference_model(folder / "model", torch.float64)
        frozen = check_parity.reference_model(folder / "reference", torch.float64)
        for sample in samples:
            with torch.no_grad():
                chosen = _distributions(policy, sample)[1].tolist()
            near = [
                math.nan if draw.random() < 0.1 else min(0.0, logp + draw.gauss(0, 0.3))
                for logp in chosen
            ]
            sample.logprobs[sample.prompt_length :] = torch.tensor(
                near, dtype=torch.float32
            ).tolist()
        config = GRPOConfig(
            model="", packed="", output_dir="", reference_model="", **OBJECTIVES[objective]
        )
        (sum(_loss(config, policy, frozen, sample) for sample in samples) / len(samples)).backward()  # type: ignore[union-attr]
    gradient = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return Inputs(folder, objective, samples, gradient)


def _disturb(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    moved = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})


def _sample(
    task: str, number: int, prompt: list[int], completion: list[int], advantage: float
) -> TokenizedResult:
    total = len(prompt) + len(completion)
    return TokenizedResult(
        task_id=task,
        sample=number,
        token_ids=prompt + completion,
        assistant_mask=[False] * len(prompt) + [True] * len(completion),
        input_pos=list(range(total)),
        logprobs=[math.nan] * total,
        prompt_length=len(prompt),
        reward=0.0,
        advantage=advantage,
        weights_version=0,
    )


def _distributions(model: torch.nn.Module, sample: TokenizedResult) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all tokens [n, V], and of the chosen ones [n], where the completion's n
    tokens are predicted.
    """
    ids = torch.tensor([sample.token_ids])
    logits = model(ids).logits[0, sample.prompt_length - 1 : -1]
    logprobs = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return logprobs, logprobs.gather(1, ids[0, sample.prompt_length :, None])[:, 0]


def _loss(
    config: GRPOConfig, policy: torch.nn.Module, frozen: torch.nn.Module, sample: TokenizedResult
) -> Tensor:
    """The mean loss of a sample's tokens, written out."""
    whole, new = _distributions(policy, sample)
    with torch.no_grad():
        whole_ref, ref = _distributions(frozen, sample)
    sampled = torch.tensor(sample.logprobs[sample.prompt_length :], dtype=torch.float64)
    old = torch.where(sampled.isnan(), new.detach(), sampled)
    advantage = float(torch.tensor(sample.advantage, dtype=torch.float32))
    settings = config.policy_settings()
    low = 1 - settings["clip_low"]
    high = 1 + settings["clip_high"]
    ratio = torch.exp((new - old).mean()) if config.objective == "gspo" else torch.exp(new - old)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).expand(len(new))
    if config.kl_coefficient:
        k3 = torch.exp(ref - new) - 1 - (ref - new)
        full = (whole.exp() * (whole - whole_ref)).sum(-1)
        loss = loss + config.kl_coefficient * (full if config.kl_estimator == "full" else k3)
    return (loss + config.entropy_coefficient * (whole.exp() * whole).sum(-1)).mean()


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over all parameters."""
    square = sum(float((ours[name].double() - theirs[name]).square().sum()) for name in theirs)
    return math.sqrt(square / sum(float(tensor.square().sum()) for tensor in theirs.values()))


def errors_of(
    way: Way,
    inputs: Inputs,
    here: Ranks,
    load: Callable[[GRPOConfig, Ranks], Policy] = load_policy,
) -> tuple[float, float]:
    """Of the gradient, and of the change by one SGD step, both relative. A collective.

    load: loads the policy.
    """
    config = inputs.config({"device": here.device.type, **way.settings})
    packed = inputs.packed(way.order)
    policy = load(config, here)
    stepper = Stepper(policy, config, here)
    steps = updates(packed, 1, (0, 1), here, policy.decoder.config)
    objective = objective_from(config)
    prepass = Prepass(policy, packed, steps, objective, config, here, 0)
    prepass.run()
    before = {name: weight.clone() for name, weight in policy.full_weights().items()}
    gradient = GradientStep(
        policy,
        config,
        here,
        Stopwatch(here.device),
        TrainProgress(0, here),
        None,
        prepass.reference_head,
    )
    result = gradient.accumulate(steps[0], objective)
    found = {
        name: full_tensor(p.grad).cpu()
        for name, p in policy.parameters_by_name().items()
        if p.grad is not None
    }
    stepper.take(result.sums["not_finite"], result.first_bad)
    hf_config = read_config(inputs.model)
    after = policy.full_weights()
    moved = {name: after[name].double() - before[name].double() for name in after}
    wanted = {name: -LR * tensor for name, tensor in inputs.gradient.items()}
    return (
        distance(to_hugging_face_names(found, hf_config), inputs.gradient),
        distance(to_hugging_face_names(moved, hf_config), wanted),
    )


def error_of_transformers_in_bf16(inputs: Inputs) -> float:
    """Of the gradient that transformers finds under autocast: what bf16 costs by itself."""
    policy, frozen = (
        check_parity.reference_model(inputs.folder / name, torch.float32)
        for name in ("model", "reference")
    )
    config = inputs.config({})
    with torch.autocast("cpu", torch.bfloat16):
        loss = sum(_loss(config, policy, frozen, sample) for sample in inputs.samples) / len(
            inputs.samples
        )
    loss.backward()  # type: ignore[union-attr]
    return distance(
        {name: p.grad for name, p in policy.named_parameters() if p.grad is not None},
        inputs.gradient,
    )


def in_process(
    rank: int, processes: int, meeting: str, chosen: list[Way], inputs: Inputs, found: Any
) -> None:
    """One of several processes; the first puts the errors of each way into `found`."""
    torch.set_num_threads(1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes
    )
    for number, way in enumerate(chosen):
        errors = errors_of(
            way, inputs, grid(torch.device("cpu"), way.settings.get("tensor_parallel", 1))
        )
        if rank == 0:
            found[number] = errors
    distributed.destroy_process_group()


def errors_in_processes(
    chosen: list[Way], inputs: Inputs, processes: int
) -> list[tuple[float, float]]:
    """`errors_of` each way, in so many processes over gloo."""
    context = torch.multiprocessing.get_context("forkserver")  # what this imports is imported once
    context.set_forkserver_preload([Path(__file__).stem])
    with tempfile.TemporaryDirectory() as folder, context.Manager() as manager:
        found = manager.dict()
        arguments = (processes, str(Path(folder, "meeting")), chosen, inputs, found)
        torch.multiprocessing.start_processes(
            in_process, arguments, nprocs=processes, start_method="forkserver"
        )
        return [found[number] for number in range(len(chosen))]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only variants whose names contain this word")
    parser.add_argument("--skip", help="only variants whose names do not contain this word")
    parser.add_argument("--objective", choices=list(OBJECTIVES), help="all unless given")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    # Else layers are quietly no longer compiled.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    disable_progress_bar()
    named = (way for way in ways(device.type) if arguments.only in way.name)
    chosen = [way for way in named if not (arguments.skip and arguments.skip in way.name)]
    worst = 0.0
    print(
        "objective        processes  way                                     gradient  SGD step  "
        " seconds"
    )
    with tempfile.TemporaryDirectory() as folder:
        for objective in [arguments.objective] if arguments.objective else OBJECTIVES:
            inputs = make_inputs(Path(folder), objective)
            for way in [way for way in chosen if way.processes == 1]:
                began = time.perf_counter()
                worst = max(
                    worst,
                    _print(objective, way, errors_of(way, inputs, Ranks(0, 1, device)), began),
                )
            if not all(way.exact for way in chosen):
                error = error_of_transformers_in_bf16(inputs)
                print(f"{objective:16} {1:9}  {'transformers in bf16':39} {error:8.1e}", flush=True)
            several = [way for way in chosen if way.processes == 2]
            began = time.perf_counter()
            for way, errors in zip(
                several, errors_in_processes(several, inputs, 2) if several else [], strict=True
            ):
                worst = max(worst, _print(objective, way, errors, began))
    print(f"the largest in fp32: {worst:.1e}")
    return int(not worst < TOLERANCE)


def _print(objective: str, way: Way, errors: tuple[float, float], began: float) -> float:
    seconds = "" if way.processes > 1 else f"{time.perf_counter() - began:8.1f}"
    print(
        f"{objective:16} {way.processes:9}  {way.name:39} {errors[0]:8.1e}  {errors[1]:8.1e}  "
        f"{seconds}",
        flush=True,
    )
    return max(errors) if way.exact else 0.0


if __name__ == "__main__":
    sys.exit(main())
