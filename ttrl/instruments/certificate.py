"""Prove the foundations of training on this machine's hardware, for `ttrl doctor --certify`.

Command: `python -m ttrl.instruments.certificate`.

Every part is compared with another way to the same numbers: attention and head with float64, whole
steps in each setting with the plain step in fp32 on the CPU, parked weights and the servers'
weights bit for bit. Each finished case is printed as one line of JSON; a case with an exception has
failed, and the others continue. Cases beyond the machine's hardware are left out, with a note.
Never run to its end on a GPU yet.

Shapes: B rows, T tokens, H query heads, K key/value heads, E dimension of a head, N positions, D
width, V vocabulary.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ttrl.configs import GRPOConfig, TrainingConfig
from ttrl.data.packing.masks import dense_mask
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.instruments.linear_response import inner
from ttrl.records import TokenizedResult
from ttrl.tiny_model import make_tiny_model
from ttrl.training.batches import policy_inputs
from ttrl.training.kernels.attention import attend, attention_plan, dense_attend
from ttrl.training.kernels.logprobs import HeadOutput, run_head
from ttrl.training.optimizer.optimizer import clip_and_step, make_optimizer
from ttrl.training.optimizer.state import state_tensors
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.parallel.weight_memory import Held, WeightMemory
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions, Policy
from ttrl.training.resident import Trained, park, unpark
from ttrl.training.stepper import Stepper

HEADS = 4
KV_HEADS = 2
HEAD_DIMS = (64, 80, 96, 128, 256)
WORSE_THAN_PLAIN = 4.0
"""Largest accepted error, as a multiple of the error of PyTorch's own way in the same dtype,
against float64.
"""
# Errors this small count as none, regardless of the other way's.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
LARGEST = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Errors above this share of the largest value are wrong, regardless of PyTorch's own."""
SGD_LIMITS = {"fp32": 1e-4, "bf16": 0.05}
"""‖Δ - Δ₀‖ / ‖Δ₀‖ of a step W ← W - g, the gradient itself."""
ADAMW_LIMITS = {"adamw": 1e-3, "adamw_8bit": 0.1}
"""The same after two steps of AdamW."""


@dataclass(frozen=True)
class Case:
    """Hold one trial. passed: None if left out, for the reason in `found`."""

    part: str
    case: str
    passed: bool | None
    found: str
    seconds: float = 0.0


Trial = tuple[str, str, Callable[[], tuple[bool | None, str]]]
"""(part, case, function returning (passed, found))."""


def certify(device: torch.device) -> Iterator[Case]:
    """Try everything, one case after the other."""
    with tempfile.TemporaryDirectory(prefix="ttrl-certificate-") as folder:
        model = make_tiny_model(Path(folder, "model"))
        parts = (_attention(device), _heads(device), _steps(device, model), _parking(device, model))
        yield from tried(itertools.chain(*parts))


def tried(trials: Iterable[Trial]) -> Iterator[Case]:
    """Try one case after the other; an exception fails its case."""
    for part, case, trial in trials:
        began = time.perf_counter()
        try:
            passed, found = trial()
        except Exception as error:  # noqa: BLE001
            # The certificate shows failed cases.
            passed = False
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        yield Case(part, case, passed, found, round(time.perf_counter() - began, 3))


def ragged_rows(seq_len: int, vocabulary: int, seed: int = 0) -> PackedTensors:
    """Return rows of `seq_len` with groups of uneven prompts and completions, some prompts of one
    token.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    results = []
    for group in range(6):
        prompt = torch.randint(
            vocabulary, (number(1, seq_len // 4) if group else 1,), generator=generator
        ).tolist()
        for sample in range(4):
            completion = torch.randint(
                vocabulary, (number(1, seq_len // 5),), generator=generator
            ).tolist()
            tokens = prompt + completion
            results.append(
                TokenizedResult(
                    task_id=str(group),
                    sample=sample,
                    token_ids=tokens,
                    assistant_mask=[False] * len(prompt) + [True] * len(completion),
                    input_pos=list(range(len(tokens))),
                    logprobs=[-1.0] * len(tokens),
                    prompt_length=len(prompt),
                    reward=0.0,
                    advantage=1.0 - 2.0 * (sample % 2),
                    weights_version=0,
                )
            )
    return packed_tensors_from_tokenized_results(results, seq_len=seq_len, pad_id=0)


def inputs_of(rows: PackedTensors, device: torch.device) -> tuple[Tensor, ...]:
    """Return the arguments of a policy for whole rows."""
    return policy_inputs({name: one.to(device) for name, one in rows.tensors().items()})


def _judge(ours: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> tuple[bool, str]:
    """Compare the largest errors, relative to the largest exact value of each tensor."""
    worst = 0.0
    found = 0.0
    fine = True
    for mine, other, truth in zip(ours, plain, exact, strict=True):
        scale = truth.abs().max().clamp(min=1e-30)
        error, usual = (float((x.double() - truth).abs().max() / scale) for x in (mine, other))
        if not torch.isfinite(mine).all():
            return False, "not finite"
        found = max(found, error)
        fine = fine and error <= LARGEST[mine.dtype]
        worst = max(worst, error / max(usual, _ROUNDING[mine.dtype] / WORSE_THAN_PLAIN))
    return fine and worst <= WORSE_THAN_PLAIN, f"error {found:.1e}, {worst:.2f} of PyTorch's own"


def _attention(device: torch.device) -> Iterator[Trial]:
    """Test attention over packed rows and its gradients, in ragged lengths, against float64;
    compare its speed with PyTorch's under a mask.
    """
    on_cpu = device.type == "cpu"
    for dtype in (torch.float32, torch.bfloat16):
        for E in HEAD_DIMS:
            for T in (320, 704) if on_cpu else (1000, 4096):
                yield (
                    "attention",
                    f"{str(dtype)[6:]}, heads of {E}, rows of {T}",
                    partial(_try_attention, device, dtype, E, T),
                )
    for window, soft_cap in ((100, None), (None, 20.0)):
        if window:
            what = f"window {window}"
        else:
            what = f"soft cap {soft_cap:g}"
        yield (
            "attention",
            what,
            partial(_try_attention, device, torch.float32, 64, 320, window, soft_cap),
        )


def _try_attention(
    device: torch.device,
    dtype: torch.dtype,
    E: int,
    T: int,
    window: int | None = None,
    soft_cap: float | None = None,
    attend: Callable[..., Tensor] = attend,
) -> tuple[bool, str]:
    rows = ragged_rows(T, 100)
    generator = torch.Generator().manual_seed(E)
    B = rows.num_rows
    given = [
        torch.randn(B, heads, T, E, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    *qkv, weight = (x.to(dtype).to(device) for x in given)  # rounded first: all ways get the same
    group_ids, parent_ids, input_pos = (
        x.to(device) for x in (rows.group_ids, rows.parent_ids, rows.input_pos)
    )
    real = (group_ids >= 0)[:, None, :, None]

    def run(way: Callable[..., Tensor], of: torch.dtype) -> tuple[list[Tensor], float]:
        inputs = [x.to(of, copy=True).requires_grad_() for x in qkv]
        plan = attention_plan(group_ids, parent_ids, input_pos, of)
        _wait(device)
        began = time.perf_counter()
        out = way(*inputs, plan).where(real, 0.0)  # values at padding are of no use
        out.backward(weight.to(of))
        _wait(device)
        gradients = [x.grad for x in inputs]
        assert all(gradient is not None for gradient in gradients)
        return [out.detach(), *(g for g in gradients if g is not None)], time.perf_counter() - began

    ours = partial(attend, soft_cap=soft_cap, window=window)
    plain = partial(dense_attend, scale=E**-0.5, soft_cap=soft_cap, window=window)
    exact, _ = run(plain, torch.float64)
    passed, found = _judge(run(ours, dtype)[0], run(plain, dtype)[0], exact)
    seconds = [min(run(way, dtype)[1] for _ in range(3)) for way in (ours, plain)]
    pairs = int(dense_mask(group_ids, parent_ids).sum())
    # Forward and 2.5 times that backward.
    speeds = [3.5 * 4 * pairs * E * HEADS / each / 1e12 for each in seconds]
    return passed, f"{found}; {speeds[0]:.3g} TFLOP/s, PyTorch's with a mask {speeds[1]:.3g}"


def _heads(device: torch.device) -> Iterator[Trial]:
    """Test log-probabilities, entropies and the gradients of a loss, against float64 with whole
    logits.
    """
    for dtype in (torch.float32, torch.bfloat16):
        yield "head", f"hidden states in {str(dtype)[6:]}", partial(_try_head, device, dtype)


def _try_head(
    device: torch.device, dtype: torch.dtype, run_head: Callable[..., HeadOutput] = run_head
) -> tuple[bool, str]:
    N, D, V = (300, 64, 4001) if device.type == "cpu" else (3000, 1024, 50_001)
    generator = torch.Generator().manual_seed(0)
    h_ND = torch.randn(N, D, generator=generator).to(dtype).to(device)
    weight_VD = (torch.randn(V, D, generator=generator) * D**-0.5).to(dtype).to(device)
    labels_N = torch.randint(V, (N,), generator=generator).to(device)
    coefficients_N = torch.randn(N, generator=generator).to(device)

    def whole(of: torch.dtype) -> list[Tensor]:
        h, weight = (x.to(of, copy=True).requires_grad_() for x in (h_ND, weight_VD))
        logp = torch.log_softmax((h @ weight.T).to(torch.promote_types(of, torch.float32)), -1)
        chosen = logp.gather(1, labels_N[:, None])[:, 0]
        (coefficients_N.to(chosen.dtype) * chosen).sum().backward()
        assert h.grad is not None and weight.grad is not None
        return [chosen.detach(), -(logp.exp() * logp).sum(-1).detach(), h.grad, weight.grad]

    h = h_ND.clone().requires_grad_()
    weight = weight_VD.clone().requires_grad_()
    out = run_head(
        h, labels_N, weight, token_loss=lambda logprobs, part: coefficients_N[part] * logprobs
    )
    assert out.loss is not None
    out.loss.backward()
    assert h.grad is not None and weight.grad is not None
    return _judge(
        [out.logprobs_N, out.entropy_N, h.grad, weight.grad], whole(dtype), whole(torch.float64)
    )


def _backward(policy: Policy, device: torch.device, seed: int) -> None:
    rows = ragged_rows(384, policy.decoder.tok_embeddings.num_embeddings, seed)
    count = int((rows.labels >= 0).sum())
    options = HeadOptions(token_loss=lambda logprobs, _: -logprobs / count)
    loss = policy(*inputs_of(rows, device), options).loss
    assert loss is not None
    loss.backward()


Backward = Callable[[Policy, torch.device, int], None]
"""Adds a gradient, given policy, device and seed."""


def _steps(device: torch.device, model: Path, backward: Backward = _backward) -> Iterator[Trial]:
    """Test a small model's optimizer steps in each setting, against plain fp32 steps on the CPU."""
    truth: dict[str, dict[str, Tensor]] = {}

    def try_steps(optimizer: str, settings: dict[str, object]) -> tuple[bool, str]:
        if optimizer == "sgd":
            kind = "sgd"
            limit = SGD_LIMITS[str(settings.get("dtype", "fp32"))]
        else:
            kind = "adamw"
            limit = ADAMW_LIMITS[optimizer]
        if kind not in truth:
            truth[kind] = _stepped(model, torch.device("cpu"), kind, {}, backward)
        found = _stepped(model, device, optimizer, settings, backward)
        assert found.keys() == truth[kind].keys()
        off = {name: found[name] - wanted for name, wanted in truth[kind].items()}
        error = (inner(off, off) / inner(truth[kind], truth[kind])) ** 0.5
        return error <= limit, f"‖Δ - Δ₀‖ / ‖Δ₀‖ = {error:.1e}, at most {limit:g}"

    on_gpu = device.type == "cuda"
    cases: list[tuple[str, str, dict[str, object], bool]] = [
        ("fp32", "sgd", {}, True),
        ("bf16", "sgd", {"dtype": "bf16"}, True),
        ("checkpointing", "sgd", {"activation_checkpointing": True}, True),
        (
            "checkpointing, products kept",
            "sgd",
            {"activation_checkpointing": True, "checkpoint_keeps": "products"},
            True,
        ),
        ("compile", "sgd", {"compile": True, "row_length_multiple": 128}, on_gpu),
        (
            "compile, checkpointing, bf16",
            "sgd",
            {"compile": True, "activation_checkpointing": True, "dtype": "bf16"},
            on_gpu,
        ),
        ("parameters in the CPU's memory", "sgd", {"cpu_offload": True}, on_gpu),
        (
            "activations in the CPU's memory",
            "sgd",
            {"activation_offloading": True, "activation_checkpointing": True},
            on_gpu,
        ),
        ("AdamW", "adamw", {}, True),
        ("AdamW in backward", "adamw", {"optimizer_in_backward": True}, True),
        ("AdamW, 8 bits", "adamw_8bit", {}, on_gpu),
        ("AdamW on the CPU", "adamw", {"optimizer_on_cpu": True}, on_gpu),
    ]
    for case, optimizer, settings, here in cases:
        part = "gradients" if optimizer == "sgd" else "optimizer"
        yield part, case, partial(try_steps, optimizer, settings) if here else _left_out


def _left_out() -> tuple[None, str]:
    return None, "left out without a GPU"


def _stepped(
    model: Path,
    device: torch.device,
    optimizer: str,
    settings: dict[str, object],
    backward: Backward,
) -> dict[str, Tensor]:
    """Return each weight's change on the CPU after one step of SGD, or two of AdamW."""
    # A large eps: signs of nearly zero gradients are noise, and would be the step.
    values = {
        "optimizer": optimizer,
        "lr": 1.0 if optimizer == "sgd" else 1e-3,
        "eps": 1e-2,
        "max_grad_norm": None,
    } | settings
    config = TrainingConfig.parse(
        {"model": str(model), "output_dir": "", "device": device.type, **values}, "certificate"
    )
    policy = load_policy(config, Ranks(rank=0, world_size=1, device=device))
    before = {name: p.detach().cpu().clone() for name, p in policy.parameters_by_name().items()}
    stepper = make_optimizer(policy, config)
    for step in range(1 if optimizer == "sgd" else 2):
        backward(policy, device, step)
        clip_and_step(policy, stepper, config, step)
    return {
        name: p.detach().cpu() - before[name] for name, p in policy.parameters_by_name().items()
    }


def _parking(device: torch.device, model: Path) -> Iterator[Trial]:
    """Test the moves to the CPU's memory while servers sample, and back, and the servers' reads
    from it.
    """
    yield "parking", "parameters and moments, there and back", partial(_try_parking, device, model)
    yield "parking", "weights held out to servers", partial(_try_holding_out, device)


def _try_parking(device: torch.device, model: Path) -> tuple[bool | None, str]:
    if device.type == "cpu":
        return _left_out()
    here = Ranks(rank=0, world_size=1, device=device)
    config = GRPOConfig.parse(
        {"model": str(model), "packed": "", "output_dir": "", "device": device.type}, "certificate"
    )
    policy = load_policy(config, here)
    trained = Trained(policy, Stepper(policy, config, here), None)
    left = 0
    trained.stepper.begin()
    _backward(policy, device, seed=0)
    trained.stepper.take(0.0, None)
    held = torch.cuda.memory_allocated(device)
    before = _held(trained)
    seconds = []
    for parks in (True, False, True, False):  # the second time, pages are locked already
        began = time.perf_counter()
        if parks:
            park(trained)
            left = torch.cuda.memory_allocated(device)
        else:
            unpark(trained, device)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    after = _held(trained)
    same = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    sizes = (
        f"{left / 2**20:.1f} of {held / 2**20:.1f} MiB stay on the GPU, {seconds[0]:.2f} s there "
        "at first and later "
    )
    sizes += f"{seconds[2]:.2f}, {seconds[3]:.2f} s back"
    return (
        same and left < 0.1 * held,
        f"{'bit for bit' if same else 'other values came back'}; {sizes}",
    )


def _try_holding_out(
    device: torch.device, make: Callable[[Ranks], WeightMemory] = WeightMemory
) -> tuple[bool | None, str]:
    tensors = {
        "matrix": torch.randn(2**13, 2**13, device=device),
        "vector": torch.randn(999, device=device),
    }
    memory = make(Ranks(rank=0, world_size=1, device=device))
    seconds = []
    for _ in range(2):  # the second time, the memory is there
        _wait(device)
        began = time.perf_counter()
        parts = memory.write(
            [Held(name, (tensor,)) for name, tensor in tensors.items()], torch.bfloat16
        )
        seconds.append(time.perf_counter() - began)
    read = load_file(memory.path)
    wanted = {name: tensor.bfloat16().cpu() for name, tensor in tensors.items()}
    digests = {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in wanted.items()
    }
    same = all(torch.equal(read[name], tensor) for name, tensor in wanted.items())
    same &= digests == {name: digest for name, _, _, digest in parts}
    memory.close()
    size = sum(tensor.nbytes for tensor in wanted.values()) / 2**20
    return same, (
        f"{'bit for bit' if same else 'other values'}, {size:.0f} MiB in {seconds[0]:.2f} s and "
        f"then {seconds[1]:.2f} s"
    )


def _held(trained: Trained) -> dict[str, Tensor]:
    state = state_tensors(trained.policy, trained.stepper.optimizer)
    return {
        name: tensor.detach().cpu()
        for name, tensor in (*trained.policy.parameters_by_name().items(), *state)
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Try everything on this machine's device; exit status 1 where a case failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    failed = False
    for case in certify(torch.device(parser.parse_args().device)):
        sys.stdout.write(json.dumps(asdict(case)) + "\n")
        sys.stdout.flush()
        failed |= case.passed is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
