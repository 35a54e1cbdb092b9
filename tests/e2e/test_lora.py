"""Adapters over several processes, compiled, in a run, and in vLLM beside the base that they belong
to.

Only several processes show that adapters are shared out rightly.
"""

from dataclasses import dataclass, field
from pathlib import Path

import check_parity
import pytest
import torch
from safetensors.torch import load_file
from support import parallel_worker
from support.tiny_models import files_in_16_bits
from support.training_steps import (
    ALONE,
    adapter_config,
    adapter_gradients,
    check_adapters,
    distance,
    move_adapters,
    packed_rows,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from ttrl import Task, TrainConfig, train
from ttrl.records import Canary
from ttrl.server.vllm import VLLMServer
from ttrl.tiny_model import make_tiny_model
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import is_adapter
from ttrl.weights.canary import check_canary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

SETTINGS = {"lora_rank": 4, "lr": 1e-2, "max_grad_norm": 0.05, "weight_decay": 0.1}
KINDS = {
    "lora": {},
    "dora": {
        "lora_kind": "dora",
        "activation_checkpointing": True,
        "lora_targets": ["q_proj", "w2", "output"],
    },
}
NF4 = {"lora_base_dtype": "nf4"}
# Adapters that were trained a little, so that both of their matrices have gradients: family and
# settings.
STARTS = {
    **{kind: ("qwen2", settings) for kind, settings in KINDS.items()},
    "biases": ("phi", {"lora_kind": "dora"}),
    "nf4": ("wide", NF4),
    "nf4-dora": ("wide", NF4 | {"lora_kind": "dora", "activation_checkpointing": True}),
    # Files in bf16, which the base keeps; some of its matrices have no adapter.
    "16-bit": ("qwen2-tied-16", {"lora_targets": ["q_proj", "w2"]}),
    "16-bit-dora": (
        "phi-16",
        {"lora_kind": "dora", "activation_checkpointing": True, "lora_targets": ["q_proj", "w1"]},
    ),
}
TP = {"tensor_parallel": 2}
IN_BACKWARD = {
    **TP,
    "max_grad_norm": None,
    "optimizer_in_backward": True,
    "rows_per_microbatch": 100,
}
WORLDS = {"tp": (2, TP), "both": (4, TP), "in-backward": (2, IN_BACKWARD), "fsdp": (2, {})}
SHARED = [(start, world) for start in KINDS for world in ("tp", "in-backward")] + [
    ("dora", "both"),
    ("biases", "tp"),
]
SHARED += [(start, world) for start in ("nf4", "nf4-dora", "16-bit") for world in ("tp", "fsdp")]
SHARED += [("16-bit", "both"), ("16-bit-dora", "tp")]
# DoRA with tensor parallelism and FSDP, and a base in 4 bits; a run trains LoRA.
SHORT = [("dora", "both"), ("nf4", "tp")]
SHORT_KINDS = ["dora"]
SOME_KINDS = [
    pytest.param(kind, marks=[] if kind in SHORT_KINDS else pytest.mark.long) for kind in KINDS
]


@dataclass
class Jobs:
    """Jobs of the worker, in the order in which they depend on each other."""

    root: Path
    todo: list[dict] = field(default_factory=list)

    def add(self, name, processes, model, settings, **more):
        self.todo.append(
            {
                "name": name,
                "processes": processes,
                "model": str(self.root / model),
                "packed": str(self.root / "packed.safetensors"),
                "output_dir": str(self.root / name),
                "settings": {**SETTINGS, **settings},
                "checkpoint": True,
                **more,
            }
        )

    def add_kind(self, kind):
        """In one process and in two, and handed over in between."""
        settings, there = KINDS[kind], f"{kind}-2/checkpoint"
        state = str(self.root / f"{kind}-2" / "state")
        self.add(f"{kind}-1", 1, "qwen2", settings, steps=3)
        self.add(f"{kind}-2", 2, "qwen2", settings, steps=2)
        self.add(f"{kind}-3", 1, there, settings, steps=1, state=state)
        self.add(f"{kind}-stays", 2, there, settings | TP | {"lr": 0.0})

    def add_shared(self, shared):
        """Starts, each gone on with alone and in its worlds."""
        for start in sorted({start for start, _ in shared}):
            family, settings = STARTS[start]
            self.add(start, 1, family, settings, steps=2)
            self.add(f"{start}/alone", 1, f"{start}/checkpoint", settings, steps=2)
        for start, world in shared:
            processes, more = WORLDS[world]
            settings = STARTS[start][1] | more
            there = f"{start}/checkpoint"
            self.add(f"{start}/{world}", processes, there, settings, steps=2, parks=True)
        for kind in sorted({start for start, world in shared if world == "in-backward"}):
            settings = STARTS[kind][1] | {"max_grad_norm": None}
            self.add(f"{kind}/alone-unclipped", 1, f"{kind}/checkpoint", settings, steps=2)


WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """name → what its first process left, for both kinds in one process and in two, and handed over
    in between.
    """
    shared, kinds = SHARED, list(KINDS)
    if request.config.getoption("short"):
        shared, kinds = SHORT, SHORT_KINDS
    root = tmp_path_factory.mktemp("parallel")
    for family in ("qwen2", "phi", "qwen2-tied"):
        check_parity.make_folder(family, root / family)
    for family in ("phi", "qwen2-tied"):
        files_in_16_bits(root / family, root / f"{family}-16")
    wide = Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=2, **WIDE))
    wide.save_pretrained(root / "wide")
    packed_rows().save(root / "packed.safetensors")
    jobs = Jobs(root)
    for kind in kinds:
        jobs.add_kind(kind)
    jobs.add_shared(shared)
    return parallel_worker.finished(root, jobs.todo)


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_two_processes_do_what_one_does(kind, results):
    """Long for LoRA: only that hands over adapters of all matrices. DoRA's have one part more."""
    one, two, handed_over = (results[f"{kind}-{number}"] for number in (1, 2, 3))
    assert two["ranks"][:2] == (0, 2) and len(two["norms"]) == 2
    assert distance(two["gradients"], one["gradients"]) < 1e-5
    assert [*two["norms"], *handed_over["norms"]] == pytest.approx(one["norms"], rel=1e-4)
    trained = {name for name in one["weights"] if is_adapter(name)}
    assert {name.rpartition(".")[0] for name in handed_over["state"]} == trained
    for name, weight in one["weights"].items():
        close = dict(rtol=0, atol=2e-5) if name in trained else dict(rtol=0, atol=0)
        torch.testing.assert_close(handed_over["weights"][name], weight, **close)
    sizes = [
        path.stat().st_size
        for path in (two["folder"] / "checkpoint" / "adapter").glob("*.safetensors")
    ]
    assert len(sizes) == 1 and sizes[0] > 4 * sum(one["weights"][name].numel() for name in trained)


@pytest.mark.parametrize(
    ("start", "world"),
    [
        *SHORT,
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in SHARED if pair not in SHORT),
    ],
)
def test_processes_that_share_layers_do_what_one_does(start, world, results):
    """Tensor parallelism, with FSDP too, and a base in 4 bits that is shared in either way; parked
    between two steps.

    Long for most pairs: only these share plain LoRA, biases, a base of 16 bits and 4 bits under
    FSDP, and step in the backward pass. What they have in common is tried with the other two.
    """
    alone, many = (
        results[f"{start}/alone{'-unclipped' if world == 'in-backward' else ''}"],
        results[f"{start}/{world}"],
    )
    assert distance({"": many["logprobs"]}, {"": alone["logprobs"]}) < 1e-5
    gradients = many["gradients"]
    assert (
        not gradients
        if world == "in-backward"
        else all(float(value.norm()) > 1e-4 for value in gradients.values())
    )
    assert not gradients or distance(gradients, alone["gradients"]) < 1e-5
    assert many["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    trained = {name for name in alone["weights"] if is_adapter(name)}
    assert many["weights"].keys() == alone["weights"].keys()
    frozen = {name: weight for name, weight in alone["weights"].items() if name not in trained}
    assert all(torch.equal(many["weights"][name], weight) for name, weight in frozen.items())
    assert {many["weights"][name].dtype for name in frozen} == {
        weight.dtype for weight in frozen.values()
    }
    assert (torch.bfloat16 in {weight.dtype for weight in frozen.values()}) == start.startswith(
        "16-bit"
    )
    assert (
        distance(*({name: result["weights"][name] for name in trained} for result in (many, alone)))
        < 2e-5
    )
    for moment in ("exp_avg", "exp_avg_sq"):
        one, other = (
            {n: t for n, t in r["state"].items() if n.endswith("." + moment)} for r in (many, alone)
        )
        assert distance(one, other) < 1e-4
    whole = sum(weight.numel() for weight in many["weights"].values())
    assert many["parts"] < 0.6 * whole if WORLDS[world][0] == 2 else many["parts"] < 0.35 * whole
    one, other = (
        load_file(result["folder"] / "checkpoint" / "model.safetensors") for result in (many, alone)
    )
    assert distance(one, other) < 1e-5


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_adapters_are_the_same_files_from_processes_that_share_layers(kind, results):
    """One whose learning rate is zero leaves what it started from, to the last byte.

    Long for LoRA: only that has adapters of all matrices; a layout more of them is in
    test_turns.py.
    """
    before, after = (
        results[f"{kind}-{name}"]["folder"] / "checkpoint" / "adapter" for name in ("2", "stays")
    )
    assert sorted(path.name for path in before.iterdir()) == sorted(
        path.name for path in after.iterdir()
    )
    for path in before.iterdir():
        assert path.read_bytes() == (after / path.name).read_bytes(), path.name
    models = [load_file(folder.parent / "model.safetensors") for folder in (before, after)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.long
def test_compiled(model_folder):
    """Long, as C++ is compiled: only this compiles layers with adapters. Layers without:
    test_compiled.py.
    """
    packed = packed_rows()
    plain = adapter_gradients(
        model_folder(), packed, lora_kind="dora", lora_targets=["q_proj", "w2"]
    )
    compiled = adapter_gradients(
        model_folder(),
        packed,
        lora_kind="dora",
        lora_targets=["q_proj", "w2"],
        compile=True,
        row_length_multiple=64,
    )
    assert distance(compiled, plain) < 1e-5


@pytest.mark.long
def test_vllm_serves_the_base_with_the_adapter(tmp_path):
    """Which computes what the trainer said; the base alone does not.

    Long: only this asks both of one server. In the next test the server is given adapters, and held
    to the canary.
    """
    base = make_tiny_model(tmp_path / "base", layers=2, width=64, heads=2)
    config = adapter_config(base, lora_rank=8)
    policy = move_adapters(load_policy(config, ALONE))
    save_checkpoint(tmp_path / "out", policy, base, ALONE, config=config)
    canary = Canary.load(tmp_path / "out")
    modules = ["tuned=" + str(tmp_path / "out" / "adapter")]
    arguments = {"enable_lora": True, "max_lora_rank": 8, "lora_modules": modules}
    settings = {
        "served_model_name": "base",
        "log_path": tmp_path / "server.log",
        "dtype": "float32",
        "extra_args": arguments,
    }
    with VLLMServer(base, **settings) as server:
        assert not check_canary(server, canary).passed
        server.served_model_name = "tuned"
        report = check_canary(server, canary)
        assert report.passed and report.max_difference < 1e-4


@pytest.mark.long
def test_a_run(tmp_path):
    """Each iteration goes on from the starting model and the last adapter; the server, which keeps
    that model and is given the adapter, is held to the canary.

    Long: only this trains an adapter on tasks that are no agents. test_agents.py holds an agent's
    to the same.
    """
    base = make_tiny_model(tmp_path / "base", layers=2, width=64, heads=2)

    def grader(choice):
        return sum(ord(character) % 2 for character in choice.message.content or "") / 8

    tasks = [
        Task([{"role": "user", "content": f"vowels {n}"}], grader, id=f"vowels/{n}")
        for n in range(8)
    ]
    training = {"lora_rank": 4, "lr": 1e-2, "kl_coefficient": 0.1, "rows_per_microbatch": 1}
    sizes = {"tasks_per_iteration": 4, "samples_per_task": 4, "max_tokens": 8, "seq_len": 128}
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model=str(base),
        iterations=2,
        training=training,
        num_threads=1,
        **sizes,
    )
    train(config, tasks, quiet=True)
    check_adapters(tmp_path / "run", base)
