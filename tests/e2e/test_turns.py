"""Several trainer processes that take turns with servers: what they do while those have the
devices, what a save takes, how long one waits for another. All over gloo; a GPU would show the
same, since processes ask for the same exchanges there.

All jobs run first (tests/support/watched_ranks.py); the tests look at what they left.
Only this sees what real processes exchange, and when.
"""

import json
from pathlib import Path

import check_parity
import pytest
import torch
import yaml
from support import watched_ranks
from support.parallel_worker import finish
from support.tiny_models import save_packs
from support.training_steps import adapter_config, move_adapters, packed_rows, trained
from transformers import Qwen2Config, Qwen2ForCausalLM

from ttrl.records import Canary
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.optimizer.state import save_state
from ttrl.training.parallel.distributed import Ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

HERE = Ranks(0, 1, torch.device("cpu"))
TP = {"tensor_parallel": 2}
WORLDS = {"fsdp": (2, {}), "tp": (2, TP), "both": (4, TP), "uneven": (3, {})}
LORA = {"lora_rank": 4, "lora_alpha": 6.0}
# What is saved: the family of the model, and the settings.
SAVED = {
    "whole": ("qwen2-tied", {}),
    "8-bit": ("wide", {"optimizer": "adamw_8bit"}),
    "fused": ("phi3", LORA | {"lora_kind": "dora"}),
    "transposed": ("gpt2", LORA),
    "nf4": ("wide", LORA | {"lora_base_dtype": "nf4"}),
}
# Rows and columns; the others are pairs of layouts and of what is saved.
SHORT = [("whole", "fsdp"), ("nf4", "tp")]
PAIRS = [
    ("fused", "both"),
    ("transposed", "uneven"),
    ("whole", "tp"),
    ("whole", "both"),
    ("whole", "uneven"),
    ("8-bit", "fsdp"),
    ("fused", "fsdp"),
    ("fused", "tp"),
]
CASES = [*SHORT, *(pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS)]
HANDED_OVER = {"fsdp": (2, {}), "tp": (2, TP)}
TURNS = ["fsdp", pytest.param("tp", marks=pytest.mark.long)]


def _saved_alone(root: Path, name: str) -> None:
    """Leave root/NAME/checkpoint and root/NAME/state, as one process writes them after a step."""
    family, settings = SAVED[name]
    folder = root / name
    policy, optimizer = trained(root / family, packed_rows(), **settings)
    if settings.get("lora_rank"):
        move_adapters(policy)
    config = adapter_config(root / family, **{"lora_rank": None, "lora_alpha": 16.0, **settings})
    save_checkpoint(
        folder / "checkpoint",
        policy,
        root / family,
        HERE,
        config=config,
        canary=Canary(1, "float32", [0, 1], [None, -1.0], [1], [-1.0], [0.0]),
        max_shard_bytes=20_000,
    )
    save_state(folder / "state", policy, optimizer, 1, HERE)


def _requests(root: Path, name: str, settings: dict) -> dict:
    """Write what a resident trainer is asked for: to train and write, to train and keep, to write
    that, to train from there.
    """
    folder = root / name / "requests"
    folder.mkdir(parents=True)
    start = {
        "model": str(root / "qwen2-tied"),
        "device": "cpu",
        "num_threads": 1,
        "measure_peak": False,
    }
    start |= {
        "hand_over": True,
        "free_memory": True,
        "rows_per_microbatch": 1,
        "follow": str(folder),
        **settings,
    }
    first, second, third = (str(root / name / str(number)) for number in (1, 2, 3))
    written = {"model": f"{first}/checkpoint", "state": f"{first}/state"}
    asked = [
        {"packed": str(root / "packed0.safetensors"), "output_dir": first},
        {
            "packed": str(root / "packed1.safetensors"),
            "output_dir": second,
            "iteration": 2,
            "save": False,
            **written,
        },
        {"packed": "", "output_dir": second, "iteration": 2, "kept": 2, **written},
        {"packed": str(root / "packed2.safetensors"), "output_dir": third, "iteration": 3},
    ]
    asked[3] |= {"model": f"{second}/checkpoint", "state": f"{second}/state"}
    for number, request in enumerate(asked, 1):
        (folder / f"request-{number:06}.yaml").write_text(yaml.safe_dump(start | request))
    (folder / "stop").touch()
    return {"model": start["model"], "settings": start}


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _save_models(root: Path) -> None:
    for family in ("qwen2-tied", "phi3", "gpt2"):
        check_parity.make_folder(family, root / family)
    wide = Qwen2ForCausalLM(Qwen2Config(vocab_size=96, num_key_value_heads=2, **WIDE))
    wide.save_pretrained(root / "wide")


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """name → what each process found, and the folder that its job wrote into."""
    saved, handed_over = [*SHORT, *PAIRS], [*HANDED_OVER]
    if request.config.getoption("short"):
        saved, handed_over = SHORT, ["fsdp"]
    root = tmp_path_factory.mktemp("turns")
    _save_models(root)
    save_packs(root, 3, 3)
    jobs = []

    def add(name, kind, processes, **more):
        about = {"name": name, "kind": kind, "processes": processes}
        jobs.append(about | {"output_dir": str(root / name)} | more)

    for name in sorted({name for name, _ in saved}):
        _saved_alone(root, name)
    for name, world in saved:
        processes, settings = WORLDS[world]
        given = {"model": str(root / name / "checkpoint"), "state": str(root / name / "state")}
        add(f"{name}/{world}", "save", processes, settings=SAVED[name][1] | settings, **given)
    for world in handed_over:
        processes, settings = HANDED_OVER[world]
        add(f"turns/{world}", "turns", processes, **_requests(root, f"turns/{world}", settings))
    late = {"model": str(root / "qwen2-tied"), "who": 0, "dies": False}
    add("late", "late", 2, **late, seconds=4.0, default_timeout=1.0)
    add("too late", "late", 2, **late, seconds=8.0, settings={"collective_timeout": 2})
    add("dead", "late", 3, **late | {"who": 1, "dies": True}, seconds=0.0)
    finish(watched_ranks.__file__, root, jobs)
    ranks = {job["name"]: sorted(Path(job["output_dir"]).glob("[0-9].json")) for job in jobs}
    return {
        name: [json.loads(path.read_text()) for path in paths] for name, paths in ranks.items()
    } | {"root": root}


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(("name", "world"), CASES)
def test_processes_save_what_one_does_to_the_last_byte(name, world, found):
    """Long for eight pairs: only these combine a layout with what another pair saves."""
    alone, many = (
        files(found["root"] / name / "checkpoint"),
        files(found["root"] / name / world / "checkpoint"),
    )
    assert alone.keys() == many.keys() and len(alone) > 3
    assert [file for file in alone if alone[file] != many[file]] == []


@pytest.mark.parametrize(("name", "world"), CASES)
def test_a_save_takes_no_more_of_other_processes_than_their_own_parts(name, world, found):
    """They send them one by one, and receive nothing.

    Long for eight pairs, as above.
    """
    first, *others = found[f"{name}/{world}"]
    assert len(others) == WORLDS[world][0] - 1
    times = 6.0 if name == "nf4" else 1.1  # which torchao turns into numbers by way of indices
    for other in others:
        assert other["peak"] <= times * other["largest_part"]
        assert {what for what, _ in other["collectives"]} == {"gather_", "allreduce_"}
        assert {group for _, group in other["collectives"]} == {"host"}
    assert first["peak"] > other["peak"]


@pytest.mark.parametrize("world", TURNS)
def test_nothing_runs_on_devices_that_servers_have(world, found):
    """Neither while it is written what was trained, nor while processes wait for each other and for
    the next request.

    Long for tensor parallelism: only that has a group of processes that share layers.
    """
    for process in found[f"turns/{world}"]:
        written, kept, last = process["phases"]
        assert {group for phase in (written, kept, last) for _, group in phase} == {"host"}
        assert (
            [what for what, _ in kept].count("gather_")
            == [what for what, _ in written].count("gather_")
            > 10
        )
    root = found["root"] / "turns" / world
    assert all(
        (root / str(number) / "checkpoint" / "config.json").is_file() for number in (1, 2, 3)
    )


def test_one_waits_longer_than_pytorch_would(found):
    """Whose own limit, made a second here, is half an hour: less than it can take to write a large
    checkpoint.
    """
    waited, slept = found["late"][1], found["late"][0]
    assert waited["error"] is slept["error"] is None and waited["seconds"] > 2.0


def test_one_that_does_not_come_is_not_waited_for_for_ever(found):
    """`collective_timeout`."""
    assert found["too late"][1]["error"] is not None and 1.0 < found["too late"][1]["seconds"] < 6.0


def test_one_that_died_is_noticed_at_once(found):
    survivors = found["dead"]
    assert len(survivors) == 2
    assert all(one["error"] is not None and one["seconds"] < 20.0 for one in survivors)
