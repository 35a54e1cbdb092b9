"""State the dtype and device of each quantity of a study, and prove float64 where it is asked for.

A study in float64 is proven twice before it begins, and refused if a proof fails:

    the device    on a GPU, a small model's log-probabilities, entropies and gradients equal those
                  of the CPU (`float64_error`): no kernel on the way rounds to fp32, or to TF32
    the model     its log-probabilities answer to a change of its parameters by 1e-10 of their
                  length, and twice as much to twice the change (`model_error`): fp32 does not see
                  such a change, so no part of the model's own code computes in it
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call

from ttrl.configs import TrainingConfig
from ttrl.errors import ConfigError
from ttrl.facts import Facts
from ttrl.instruments.certificate import inputs_of, ragged_rows
from ttrl.tiny_model import make_tiny_model
from ttrl.training.batches import Update, policy_inputs
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions, Policy

Dtype = Literal["bf16", "fp32", "fp64"]
TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DEVICE_LIMIT = 1e-10
"""Largest difference of the small case on two devices, relative to its largest number. Float64
leaves 1e-13, fp32 1e-6."""
MODEL_LIMIT = 0.01
"""Largest deviation of the answers to a change and to twice the change, as a share. Float64 leaves
1e-4, fp32 about 1."""
_SMALL = 1e-10


class Computed(Facts, omit_defaults=False):
    """State how a quantity was computed. Sums over parameters and answers are in fp64."""

    dtype: Dtype
    device: Literal["cpu", "cuda"]


class Precision(Facts):
    """State it of each quantity in study.json, by its name there; None if it is absent."""

    device_name: str
    step: Computed
    """The vector by hand is in fp64, from a gradient of this dtype."""
    entropy: Computed
    slope: Computed
    parts: Computed
    curvature: Computed
    sweep: Computed
    covariance: Computed
    mismatch: Computed
    """The trainer's log-probabilities; `rounding` compares them with the study's."""
    current: Computed
    one_batch: Computed
    ages: Computed
    kernel: Computed | None = None
    checkpoint_distance: Computed | None = None


def precision_of(
    dtype: Dtype, run_dtype: Dtype, device: torch.device, *, kernel: bool, distance: bool
) -> Precision:
    """Return the precision of a study in `dtype` of a run in `run_dtype`."""
    where: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    own = Computed(dtype, where)
    as_run = Computed(run_dtype, where)
    return Precision(
        device_name=device_name(device),
        step=own,
        entropy=own,
        slope=own,
        parts=own,
        curvature=own,
        sweep=own,
        covariance=own,
        current=own,
        one_batch=own,
        ages=own,
        mismatch=as_run,
        kernel=own if kernel else None,
        checkpoint_distance=as_run if distance else None,
    )


def precision_text(found: Precision) -> str:
    """Describe the precision of each quantity, for a terminal."""
    device = {"cpu": "the CPU", "cuda": found.device_name}
    groups: dict[str, list[str]] = {}
    for name in found.__struct_fields__[1:]:
        one = getattr(found, name)
        if one is not None:
            how = f"{one.dtype} on {device[one.device]}"
            groups.setdefault(how, []).append(name.replace("_", " "))
    told = "; ".join(f"{how}: {', '.join(names)}" for how, names in groups.items())
    return f"By quantity: {told}. Sums over parameters and answers are in fp64."


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "the CPU"


def prove_device(device: torch.device, spoil: Callable[[Policy], None] = lambda _: None) -> None:
    """Raise ConfigError if float64 on the device is not that of the CPU. spoil: changes the policy
    on the device, to test the proof.
    """
    error = float64_error(device, spoil)
    if not error <= DEVICE_LIMIT:
        raise ConfigError(
            "arguments",
            [
                f"--dtype fp64: on {device_name(device)} a small model's numbers differ from the "
                f"CPU's by {error:.1e} of their size, at most {DEVICE_LIMIT:g} in float64; some "
                "kernel there rounds: --device cpu computes in float64, --dtype fp32 does not "
                "ask for it"
            ],
        )


def float64_error(device: torch.device, spoil: Callable[[Policy], None]) -> float:
    """Return the largest difference between the device and the CPU in a small case, relative to
    the largest number of its tensor.
    """
    with tempfile.TemporaryDirectory(prefix="ttrl-study-") as folder:
        model = make_tiny_model(Path(folder, "model"))
        expected = _small_case(model, torch.device("cpu"), lambda _: None)
        found = _small_case(model, device, spoil)
    errors = []
    for name, tensor in expected.items():
        largest = float(tensor.abs().max())
        if largest:
            errors.append(float((found[name] - tensor).abs().max()) / largest)
    return max(errors)


def _small_case(
    model: Path, device: torch.device, spoil: Callable[[Policy], None]
) -> dict[str, Tensor]:
    values = {"model": str(model), "output_dir": "", "device": device.type}
    config = TrainingConfig.parse(values, "float64")
    policy = load_policy(config, Ranks(rank=0, world_size=1, device=device))
    policy.widen(torch.float64)
    spoil(policy)
    rows = ragged_rows(96, policy.decoder.tok_embeddings.num_embeddings)
    out = policy(*inputs_of(rows, device), HeadOptions(entropy_grad=True))
    (out.logprobs.mean() + out.entropy.mean()).backward()
    found = {"log-probabilities": out.logprobs, "entropies": out.entropy}
    found |= {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def prove_model(
    policy: Policy, step: Update, config: TrainingConfig, parameters: Mapping[str, Tensor]
) -> None:
    """Raise ConfigError if a policy does not compute in float64, on the first row of a step.
    parameters: the trained ones, by name.
    """
    error = model_error(policy, step, config, parameters)
    if not error <= MODEL_LIMIT:
        raise ConfigError(
            "arguments",
            [
                "--dtype fp64: this model's log-probabilities do not follow a change of its "
                f"parameters by {_SMALL:g} of their length (deviation {error:.0%}, at most "
                f"{MODEL_LIMIT:.0%}), so its own code computes in a narrower dtype somewhere: "
                "study it in fp32"
            ],
        )


@torch.no_grad()
def model_error(
    policy: Policy, step: Update, config: TrainingConfig, parameters: Mapping[str, Tensor]
) -> float:
    """Return ‖Δ(2ε) - 2Δ(ε)‖ / ‖Δ(2ε)‖, with Δ the change of log-probabilities by a random change
    of the parameters."""
    first = next(iter(parameters.values()))
    of_one_row = dataclasses.replace(config, rows_per_microbatch=1)
    batch = next(step.microbatches(of_one_row, first.device))
    inputs = (
        *policy_inputs(batch),
        HeadOptions(trained=batch["trained"]),
        batch.get("experts"),
    )
    full = {id(p): name for name, p in policy.named_parameters()}
    held = policy.parameters_by_name()
    generator = torch.Generator().manual_seed(0)
    directions = {}
    for name, value in parameters.items():
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        # Adapters begin at 0.
        directions[name] = drawn * (value.square().mean().sqrt() or 1.0)

    def logprobs(size: float) -> Tensor:
        there = {
            full[id(held[name])]: value + size * directions[name]
            for name, value in parameters.items()
        }
        found: Tensor = functional_call(policy, there, inputs).logprobs
        return found

    start = logprobs(0.0)
    once = logprobs(_SMALL) - start
    twice = logprobs(2 * _SMALL) - start
    length = float(torch.linalg.vector_norm(twice))
    if not length:
        return math.nan
    return float(torch.linalg.vector_norm(twice - 2 * once)) / length
