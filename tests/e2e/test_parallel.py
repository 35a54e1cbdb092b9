"""One update by one process, by two and by four: FSDP, tensor parallelism, both; and state handed
from one world to another.

All jobs run first (tests/training/parallel_worker.py, over gloo); the tests look at what they left.
Only several processes show that none of them counts twice.
"""

import json
import math
from pathlib import Path

import check_parity
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import parallel_worker
from support.tiny_models import random_samples
from transformers import Qwen2Config, Qwen2ForCausalLM

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


SETTINGS = {
    "lr": 1e-3,
    "lr_schedule": "linear",
    "total_steps": 10,
    "max_grad_norm": 0.05,
    "weight_decay": 0.1,
}
TP = {"tensor_parallel": 2}
WORLDS = {"fsdp": (2, {}), "tp": (2, TP), "both": (4, TP)}
FAMILIES = ("qwen2-tied", "qwen3")
# Soft caps and norms after blocks; norms, linears and a head with biases.
OTHERS = {"gemma2-untied": "tp", "phi": "both", "llama-biased": "tp"}
RESUMED = [("fsdp", "one"), ("both", "one"), ("both", "fsdp"), ("tp", "fsdp"), ("one1", "both")]
UNCLIPPED = {"max_grad_norm": None, "rows_per_microbatch": 100}
# Each kind of sharing once: by rows of data, by layers, by both; whole and sharded state.
SHORT = {
    "qwen2-tied/fsdp",
    "qwen2-tied/both",
    "qwen3/both",
    "gemma2-untied/tp",
    "large/tp",
    "resumed/fsdp-one",
    "resumed/both-fsdp",
}


def short_or_long(values, names):
    """Parameters of a test, those long whose job is not in SHORT."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if name in SHORT else pytest.mark.long,
        )
        for value, name in zip(values, names, strict=True)
    ]


def jobs(root: Path) -> list[dict]:
    """What is to be run. "one" goes two steps in one process, all others one step."""
    found = []

    def add(name, family, processes, settings, **more):
        job = {
            "name": name,
            "processes": processes,
            "model": str(root / family),
            "packed": str(root / "packed.safetensors"),
        }
        found.append(
            {**job, "output_dir": str(root / name), "settings": {**SETTINGS, **settings}, **more}
        )

    tied, qwen3 = FAMILIES
    add("qwen2-tied/one", tied, 1, {}, steps=2, reference=str(root / "reference"))
    add("qwen2-tied/one1", tied, 1, {"state_format": "sharded"}, checkpoint=True)
    add(
        "qwen2-tied/fsdp",
        tied,
        2,
        {"reshard_after_forward": False},
        checkpoint=True,
        reference=str(root / "reference"),
    )
    add("qwen2-tied/tp", tied, 2, TP, checkpoint=True, reference=str(root / "reference"))
    add(
        "qwen2-tied/both",
        tied,
        4,
        {**TP, "state_format": "sharded"},
        checkpoint=True,
        reference=str(root / "reference"),
    )
    for source, target in RESUMED:
        processes, settings = WORLDS.get(target, (1, {}))
        folder = root / "qwen2-tied" / source
        add(f"resumed/{source}-{target}", tied, processes, settings, state=str(folder / "state"))
        found[-1]["model"] = str(folder / "checkpoint")
    add("qwen3/one", qwen3, 1, UNCLIPPED, steps=2)
    add(
        "qwen3/fsdp", qwen3, 2, {**UNCLIPPED, "activation_checkpointing": True}, steps=2, parks=True
    )
    in_backward = {**UNCLIPPED, **TP, "optimizer_in_backward": True}
    add("qwen3/tp", qwen3, 2, in_backward, steps=2)
    add(
        "qwen3/both",
        qwen3,
        4,
        {**in_backward, "activation_checkpointing": True},
        steps=2,
        parks=True,
    )
    for family, world in OTHERS.items():
        add(f"{family}/one", family, 1, {})
        add(f"{family}/{world}", family, *WORLDS[world])
    for name, settings in (("fsdp", {}), ("tp", TP)):
        add(f"large/{name}", "large", 2, settings, steps=0)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """name → what its first process left."""
    root = tmp_path_factory.mktemp("parallel")
    for family in (*FAMILIES, *OTHERS):
        check_parity.make_folder(family, root / family)
    check_parity.make_folder("qwen2-tied", root / "reference")
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=4096, num_key_value_heads=4, **shape)).save_pretrained(
        root / "large"
    )
    weights = load_file(root / "reference" / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    moved = {
        name: weight + 0.05 * torch.randn(weight.shape, generator=noise)
        for name, weight in weights.items()
    }
    save_file(moved, root / "reference" / "model.safetensors", metadata={"format": "pt"})
    samples = random_samples(3, prompts=(3, 5, 8, 9, 4))
    packed_tensors_from_tokenized_results(samples, seq_len=40, pad_id=0).save(
        root / "packed.safetensors"
    )
    todo = jobs(root)
    if request.config.getoption("short"):
        alone = {name.partition("/")[0] + "/one" for name in SHORT} | {"qwen2-tied/one1"}
        todo = [job for job in todo if job["name"] in SHORT | alone]
    return parallel_worker.finished(root, todo)


def distance(one, other):
    """‖one - other‖ / ‖other‖ over all tensors of a name."""
    assert one.keys() == other.keys()
    square = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return math.sqrt(square / sum(float(value.double().square().sum()) for value in other.values()))


CASES = [(family, world) for family in FAMILIES for world in WORLDS] + [*OTHERS.items()]


@pytest.mark.parametrize(("family", "world"), short_or_long(CASES, map("/".join, CASES)))
def test_the_update_does_not_depend_on_the_world(family, world, results):
    """Long for most pairs: only these share biases among processes, and each family in each way."""
    alone, many = results[f"{family}/one"], results[f"{family}/{world}"]
    processes, settings = WORLDS[world]
    shared = settings.get("tensor_parallel", 1)
    assert many["ranks"] == (0, processes // shared, 0, shared)
    assert distance({"": many["logprobs"]}, {"": alone["logprobs"]}) < 1e-5
    if many["gradients"]:  # none is left where the optimizer works in the backward pass
        assert distance(many["gradients"], alone["gradients"]) < 1e-5
    assert many["norms"] == pytest.approx(alone["norms"][: len(many["norms"])], rel=1e-5)
    whole = sum(weight.numel() for weight in many["weights"].values())
    assert many["parts"] < 1.1 * whole / processes + 500  # norms are on all that share a layer


@pytest.mark.parametrize("world", short_or_long(["fsdp", "tp"], ["large/fsdp", "large/tp"]))
def test_no_process_ever_holds_the_whole_model(world, results):
    """Anonymous memory, which mapped files are not part of, at each tensor while loading: its own
    half and some slack.

    Long for FSDP: only that cuts each tensor by its rows.
    """
    found = results[f"large/{world}"]
    assert found["whole"] > 130e6
    assert found["loading"] < found["whole"] / 2 + 30e6


@pytest.mark.parametrize("world", short_or_long(WORLDS, [f"qwen3/{world}" for world in WORLDS]))
def test_two_steps_leave_the_same_weights_and_state(world, results):
    """… also where the processes park in between.

    Long for two worlds: only these share in one way alone, with activation checkpointing or with
    steps in the backward pass. The third one has all of it.
    """
    alone, many = results["qwen3/one"], results[f"qwen3/{world}"]
    assert len(many["norms"]) == 2
    check_state(many["state"], alone["state"])
    assert distance(many["weights"], alone["weights"]) < 1e-5


TIED = short_or_long(WORLDS, [f"qwen2-tied/{world}" for world in WORLDS])


def check_state(state, expected):
    assert state.keys() == expected.keys()
    for moment in ("exp_avg", "exp_avg_sq"):
        one, other = (
            {name: t for name, t in s.items() if name.endswith("." + moment)}
            for s in (state, expected)
        )
        assert distance(one, other) < 1e-5
    assert all(
        float(state[name]) == 2 == float(expected[name])
        for name in expected
        if name.endswith(".step")
    )


@pytest.mark.parametrize(
    ("source", "target"), short_or_long(RESUMED, [f"resumed/{s}-{t}" for s, t in RESUMED])
)
def test_state_goes_from_one_world_to_another(source, target, results):
    """One step in one world and one in the other are two steps in one process: state whole or
    sharded, weights through a checkpoint.

    Long for three pairs: only these go between one process and four, and begin with tensor
    parallelism alone.
    """
    alone, resumed = results["qwen2-tied/one"], results[f"resumed/{source}-{target}"]
    # The weights went through an Adam step: signs.
    assert resumed["norms"] == pytest.approx(alone["norms"][1:], rel=2e-3)
    check_state(resumed["state"], alone["state"]) if source == "one1" else None
    assert distance(resumed["weights"], alone["weights"]) < 1e-4
    sharded = {"both", "one1"}
    files = {path.name for path in (results[f"qwen2-tied/{source}"]["folder"] / "state").iterdir()}
    assert ("optimizer.safetensors" in files) == (source not in sharded)
    header = json.loads(
        (results[f"qwen2-tied/{source}"]["folder"] / "state" / "state.json").read_text()
    )
    assert header["global_step"] == 1 and ("00000.json" in files) == (source in sharded)
    assert sum(name.endswith(".safetensors") for name in files) == header.get("ranks", 1)


@pytest.mark.parametrize("world", TIED)
def test_the_reference_is_swapped_in_and_out(world, results):
    """Long for tensor parallelism alone, as in the next one: only that has all of the data in each
    process.
    """
    alone, many = results["qwen2-tied/one"], results[f"qwen2-tied/{world}"]
    assert many["swapped_back"] and alone["swapped_back"]
    assert distance({"": many["reference_logprobs"]}, {"": alone["reference_logprobs"]}) < 1e-5
    assert distance({"": alone["reference_logprobs"]}, {"": alone["logprobs"]}) > 1e-2


@pytest.mark.parametrize("world", TIED)
def test_checkpoints_hold_the_same_weights(world, results):
    """Long for tensor parallelism alone, as in the one before: only that has all of the data in
    each process.
    """
    one, other = (
        load_file(results[f"qwen2-tied/{w}"]["folder"] / "checkpoint" / "model.safetensors")
        for w in (world, "one1")
    )
    assert distance(one, other) < 1e-4
    assert torch.equal(one["lm_head.weight"], one["model.embed_tokens.weight"])
    canaries = [
        json.loads(
            (results[f"qwen2-tied/{w}"]["folder"] / "checkpoint" / "canary.json").read_text()
        )
        for w in (world, "one1")
    ]
    assert canaries[0]["token_ids"] == canaries[1]["token_ids"]
    assert canaries[0]["logprobs"][1:] == pytest.approx(canaries[1]["logprobs"][1:], abs=0.05)
