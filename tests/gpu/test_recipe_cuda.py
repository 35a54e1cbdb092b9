"""Whole iterations of the recipes on a GPU: against transformers in float64, against the same on
the CPU, and against themselves, by way of files and of memory."""

import dataclasses
import functools
import hashlib
import json

import check_invariance
import check_parity
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.tiny_models import save_packs

from ttrl import grpo_recipe, sft_recipe
from ttrl.configs import GRPOConfig, SFTConfig
from ttrl.errors import TrainerMemoryError
from ttrl.instruments.certificate import certify
from ttrl.instruments.study import study
from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model
from ttrl.training.parallel.distributed import Ranks, ranks
from ttrl.training.resident import Residence

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = Ranks(0, 1, torch.device("cuda", 0))
ITERATIONS = 2


# The gradient


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """An update of that objective, and its gradient in float64."""

    @functools.cache
    def make(objective):
        return check_invariance.make_inputs(tmp_path_factory.mktemp("inputs"), objective)

    return make


WAYS = [
    way
    for way in check_invariance.ways("cuda")
    if way.order == 0 and way.name[:2] not in ("1 ", "8 ")
]


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        *(("ppo-k3", way) for way in WAYS),
        *(
            ("gspo-entropy-kl", way)
            for way in WAYS
            if way.name in ("2 rows, order 0", "bf16", "activations in the CPU's memory")
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_gradient_is_that_of_transformers_in_float64(objective, way, inputs, record_property):
    gradient, step = check_invariance.errors_of(way, inputs(objective), HERE)
    record_property("errors", f"{gradient:.1e} {step:.1e}")
    limit = check_invariance.TOLERANCE
    if not way.exact:
        limit = 2 * check_invariance.error_of_transformers_in_bf16(inputs(objective))
    assert gradient < limit and step < limit


FAMILIES = (
    "llama3-rope",
    "mistral-window",
    "qwen2-tied",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "phi",
    "gpt2",
    "nanochat",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_what_transformers_does(family, tmp_path, record_property):
    found = check_parity.parity(
        check_parity.make_folder(family, tmp_path), torch.float32, device="cuda"
    )
    record_property("parity", str(found))
    assert found.logits < 1e-5 * max(1.0, found.largest_logit)
    # Of the smallest parameter, on both sides in fp32.
    assert found.gradient_unpacked < 1e-3 and found.gradient_packed < 1e-3


# Iterations


@pytest.fixture
def chain(model_folder, tmp_path):
    """Trains iterations, each from the one before: `chain("NAME", residence, **settings)` returns
    their folders.
    """
    save_packs(tmp_path, ITERATIONS, 4)

    def train(name, residence=None, first=None, family="qwen2", **settings):
        folders, start = [], {"model": str(first or model_folder(family))}
        for number in range(ITERATIONS):
            output = tmp_path / name / str(number)
            values = {
                "packed": str(tmp_path / f"packed{number}.safetensors"),
                "output_dir": str(output),
                "iteration": number + 1,
            }
            values |= {
                "device": "cuda",
                "lr": 0.01,
                "eps": 1e-3,
                "updates_per_iteration": 2,
                "rows_per_microbatch": 1,
            }
            values |= (
                {"reference_model": str(model_folder(family))}
                if settings.get("kl_coefficient")
                else {}
            )
            values |= {"lora_base": str(model_folder(family))} if "lora_rank" in settings else {}
            values |= {"measure_peak": False} | start | settings
            config = GRPOConfig.parse(values, "test")
            if residence is None:
                with ranks(config) as here:
                    grpo_recipe.train_iteration(config, here)
            else:
                grpo_recipe.train_iteration(config, residence._here, residence)
            (output / "grpo.yaml").write_text(yaml.safe_dump(values))
            folders.append(output)
            start = {"model": str(output / "checkpoint"), "state": str(output / "state")}
        return folders

    return train


def moved(folders, start):
    """What training changed, end to end."""
    before, after = (
        load_file(folder / "model.safetensors") for folder in (start, folders[-1] / "checkpoint")
    )
    return torch.cat([(after[name].double() - before[name].double()).flatten() for name in before])


def content(folder):
    own = str(folder.parent).encode()
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    wanted = [name for name in names if name.parts[0] in ("checkpoint", "state")]
    return {name: (folder / name).read_bytes().replace(own, b"") for name in wanted}


SAME = {  # name: (settings of both, the GPU's alone)
    "AdamW": ({}, {}),
    "SGD": ({"optimizer": "sgd"}, {}),
    "SGD with momentum": ({"optimizer": "sgd", "momentum": 0.9}, {}),
    "RMSprop": ({"optimizer": "rmsprop", "momentum": 0.9}, {}),
    "8 bits": ({"optimizer": "adamw_8bit"}, {}),
    "optimizer on the CPU": ({"max_grad_norm": None}, {"optimizer_on_cpu": True}),
    "optimizer in the backward pass": (
        {"max_grad_norm": None, "updates_per_iteration": 1, "rows_per_microbatch": 100},
        {},
    ),
    "everything on the CPU": ({}, {"cpu_offload": True}),
    "everything on the CPU, checkpointing": (
        {"activation_checkpointing": True},
        {"cpu_offload": True},
    ),
    "KL k3": ({"kl_coefficient": 0.1, "kl_estimator": "k3"}, {}),
    "KL full": ({"kl_coefficient": 0.1, "kl_estimator": "full"}, {}),
    "entropy": ({"entropy_coefficient": 0.01}, {}),
    "value head": ({"value_head": True}, {}),
    "LoRA": ({"lora_rank": 4}, {}),
    "DoRA": ({"lora_rank": 4, "lora_kind": "dora"}, {}),
    "LoRA, activations on the CPU": ({"lora_rank": 4}, {"activation_offloading": True}),
    "QLoRA": ({"lora_rank": 4, "lora_base_dtype": "nf4"}, {}),
    "compiled": ({}, {"compile": True, "row_length_multiple": 24}),
}


@pytest.mark.parametrize("name", list(SAME))
def test_iterations_are_those_of_the_cpu(name, chain, model_folder, record_property):
    settings, on_gpu = SAME[name]
    if name == "optimizer in the backward pass":
        on_gpu = {"optimizer_in_backward": True}
    cpu = moved(chain("cpu", device="cpu", **settings), model_folder())
    gpu = moved(chain("gpu", **settings, **on_gpu), model_folder())
    far = float((gpu - cpu).norm() / cpu.norm())
    record_property("distance", f"{far:.1e}")
    # Rounding to 8 bits is a step: a bit of difference becomes one.
    assert far < (0.05 if name == "8 bits" else 1e-3)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"dtype": "bf16"}], ids=str)
def test_the_same_iteration_gives_the_same_bits(settings, chain):
    one, two = chain("one", **settings), chain("two", **settings)
    assert [content(folder) for folder in one] == [content(folder) for folder in two]


KEPT = [
    {},
    {"optimizer": "adamw_8bit"},
    {"lora_rank": 4},
    {"dtype": "bf16", "activation_checkpointing": True},
]


@pytest.mark.parametrize("free_memory", [False, True])
@pytest.mark.parametrize(
    "settings", [*KEPT, {"lora_rank": 4, "lora_base_dtype": "nf4"}, {"value_head": True}], ids=str
)
def test_what_stays_in_memory_is_what_files_hold(settings, free_memory, chain, tmp_path):
    by_files = chain("files", **settings)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    residence = Residence(HERE)
    kept = chain("kept", residence, free_memory=free_memory, **settings)
    assert [content(folder) for folder in by_files] == [content(folder) for folder in kept]
    held = torch.cuda.memory_allocated() - before
    assert (held < 50_000) == free_memory, f"{held} bytes"
    trained, _, _ = residence._kept
    pinned = [state for state in trained.policy.parameters() if state.device.type == "cpu"]
    assert bool(pinned) == free_memory


def test_weights_are_held_out_from_the_gpu(chain):
    told = []
    residence = Residence(HERE, told.append)
    for dtype in ("fp32", "bf16"):
        folders = chain(dtype, residence, hand_over=True, free_memory=True, checkpoint_dtype=dtype)
        stored, held = (
            load_file(folders[-1] / "checkpoint" / "model.safetensors"),
            load_file(told[-1].memory),
        )
        assert held.keys() == stored.keys() and all(
            torch.equal(held[name], stored[name]) for name in held
        )
        for name, starts, lengths, digest in told[-1].parts:
            part = held[name][
                tuple(
                    slice(start, start + length)
                    for start, length in zip(starts, lengths, strict=True)
                )
            ]
            assert (
                hashlib.sha256(part.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                == digest
            )
    assert len(told) == 2 * ITERATIONS


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-3), ("fp64", 1e-5)])
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4, "lora_base_dtype": "bf16"}], ids=str)
def test_a_study_is_that_of_the_cpu(settings, dtype, tolerance, chain):
    folder = chain("run", dtype="bf16", updates_per_iteration=1, **settings)[-1]
    how = {"sequences": 16, "factors": [1.0], "dtype": dtype}
    gpu, cpu = (study(folder / "checkpoint", device=device, **how) for device in ("cuda", "cpu"))
    assert (gpu["device"], cpu["device"]) == ("cuda", "cpu")
    for name in ("slope", "half_cosine"):
        assert gpu[name] == pytest.approx(cpu[name], rel=tolerance)
    entropies = (found["entropy"]["rao_blackwell"]["value"] for found in (gpu, cpu))
    assert next(entropies) == pytest.approx(next(entropies), rel=tolerance)


def test_what_a_step_says_of_itself(chain, record_property):
    """Seconds of its parts by events on the stream, memory, and the share of the machine's peak."""
    folders = chain("out", measure_peak=True, profile_steps=1, dtype="bf16")
    row = read_jsonl(folders[0] / "train.jsonl")[0]
    record_property("row", json.dumps(row))
    seconds = row["seconds_by_part"]
    assert (
        seconds["forward"] > 0
        and seconds["backward"] > 0
        and sum(seconds.values()) <= 1.05 * row["seconds"] + 0.1
    )
    assert row["memory_peaks"]["cuda"] > 0 and 0 < row["peak_share"] < 1
    events = json.loads((folders[0] / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_memory_that_runs_out_says_what_would_save_some(chain, record_property):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(TrainerMemoryError, match="the GPU's memory ran out") as caught:
            chain("out")
        record_property("said", str(caught.value))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_supervised_steps_are_those_of_the_cpu(tmp_path):
    start = make_tiny_model(tmp_path / "model", layers=2, width=32, heads=2)
    lines = [
        [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b" * (20 - n)}]
        for n in range(1, 9)
    ]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"messages": line}) + "\n" for line in lines)
    )
    found = []
    for device in ("cpu", "cuda"):
        values = {
            "model": str(start),
            "data": str(tmp_path / "data.jsonl"),
            "output_dir": str(tmp_path / device),
            "steps": 3,
        }
        config = SFTConfig.parse(
            {**values, "device": device, "lr": 0.01, "eps": 1e-3, "seq_len": 128}, "test"
        )
        with ranks(config) as here:
            sft_recipe.train_on_examples(config, here)
        found.append(moved([tmp_path / device], start))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-3


# The machine


def test_the_certificate_of_this_gpu():
    cases = list(certify(HERE.device))
    assert [case for case in cases if case.passed is False] == [] and any(
        case.passed for case in cases
    )


def test_the_plan_knows_the_gpu(record_property):
    from ttrl.plans.gpu_sheets import SHEETS
    from ttrl.plans.plan_machine import gpus_here, this_machine
    from ttrl.training.timing import matmul_peak

    machine = this_machine(
        dataclasses.replace(_train_config(), device="cuda", dtype="bf16"), (4096, 4096)
    )
    assert machine.cuda and machine.gpus == len(gpus_here()) and machine.memory == min(gpus_here())
    measured = matmul_peak((8192, 4096, 4096), torch.bfloat16, HERE.device)
    record_property("machine", f"{machine}, {measured / 1e12:.0f} TFLOP/s measured")
    if machine.source == "data sheet":
        assert 0 < measured < 1.1 * machine.matmul  # others may be using it, too
        assert any(abs(machine.memory / sheet.memory - 1) < 0.15 for sheet in SHEETS)


def _train_config():
    from ttrl.configs.run import TrainConfig

    return TrainConfig(model="m", run="r", iterations=1)


def test_what_the_gpu_was_used_for_is_seen(monkeypatch, record_property):
    import time

    from ttrl.loop import machine_use
    from ttrl.loop.timeline import Timeline
    from ttrl.system.console import clock

    monkeypatch.setattr(machine_use, "SECONDS", 0.2)
    use = machine_use.MachineUse()
    x = torch.randn(4096, 4096, device="cuda")
    use.begin()
    ends = time.monotonic() + 3
    while time.monotonic() < ends:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()
    use.end()
    found = use.take(Timeline(), clock())["other"]
    record_property("seen", str(found))
    assert (
        found["gpus"][0]["busy"] > 0.3
        and found["gpus"][0]["watts"] > 30
        and found["gpus"][0]["memory"] > 6e7
    )
