"""What stays in memory between iterations: the same files, byte for byte, as when each iteration
loads those of the last one.
"""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import random_samples, save_packs

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import PackError, RunFolderError
from ttrl.records import Canary
from ttrl.system.files import read_jsonl
from ttrl.training import resident
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.policy.policy import Policy
from ttrl.training.resident import Residence

pytestmark = pytest.mark.usefixtures("short_canaries")
HERE = Ranks(0, 1, torch.device("cpu"))
ITERATIONS = 3


def chain_in(folder, model_folder):
    """Train iterations in `folder`, each from the one before: `chain("NAME", residence,
    **settings)` returns their folders.
    """
    save_packs(folder, ITERATIONS, 3)
    reference = folder / "reference"
    reference.mkdir()
    tensors = load_file(model_folder() / "model.safetensors")
    save_file(
        {name: tensor * 1.02 for name, tensor in tensors.items()},
        reference / "model.safetensors",
        {"format": "pt"},
    )
    (reference / "config.json").write_bytes((model_folder() / "config.json").read_bytes())

    def iteration(name, number, residence, model=None, state=None, here=HERE, **settings):
        output = folder / name / str(number)
        files = {
            "model": str(model or model_folder()),
            "packed": str(folder / f"packed{number % ITERATIONS}.safetensors"),
        }
        files |= {"output_dir": str(output), "state": state and str(state), "iteration": number + 1}
        grpo_recipe.train_iteration(config(**files | settings), here, residence)
        return output

    def config(**settings):
        values = {
            "device": "cpu",
            "lr": 0.01,
            "updates_per_iteration": 2,
            "rows_per_microbatch": 1,
            "num_threads": 1,
        }
        compares = settings.get("kl_coefficient") or settings.get("token_rewards")
        if compares and "lora_rank" not in settings:
            values["reference_model"] = str(reference)
        if "lora_rank" in settings:
            values["lora_base"] = str(model_folder())
        return GRPOConfig.parse(values | {"measure_peak": False} | settings, "test")

    def train(name, residence=None, per_iteration=lambda number: {}, first=None, **settings):
        folders, start = [], {"model": first}
        for number in range(ITERATIONS):
            folders.append(
                iteration(name, number, residence, **start, **settings, **per_iteration(number))
            )
            start = {"model": folders[-1] / "checkpoint", "state": folders[-1] / "state"}
        return folders

    train.iteration, train.config = iteration, config
    return train


@pytest.fixture
def chain(model_folder, tmp_path):
    return chain_in(tmp_path, model_folder)


@pytest.fixture(scope="module")
def from_files(model_folder, tmp_path_factory):
    """The folders of iterations each of which read the files of the one before; trained once for
    the same settings.
    """
    made = {}

    def train(**settings):
        key = repr(settings)
        if key not in made:
            made[key] = chain_in(tmp_path_factory.mktemp("once"), model_folder)("once", **settings)
        return made[key]

    return train


def content(folder):
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    assert {Path("checkpoint/canary.json"), Path("state/state.json")} <= files.keys()
    own = str(folder.parent).encode()  # adapters name their base, below the test's folder
    wanted = {
        name: path for name, path in files.items() if name.parts[0] in ("checkpoint", "state")
    }
    # torch.distributed.checkpoint names each of its files anew in its index.
    return {
        name: path.read_bytes().replace(own, b"")
        for name, path in wanted.items()
        if name.name != ".metadata"
    }


def measured(folder):
    """What does not depend on the clock."""
    rows = read_jsonl(folder / "train.jsonl")
    return [
        {name: row[name] for name in ("global_step", "loss", "grad_norm", "lr", "entropy", "ess")}
        for row in rows
    ]


def check_same(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert measured(one) == measured(other)
        mine, theirs = content(one), content(other)
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if mine[name] != theirs[name]] == []


LORA = {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj", "w1", "w2"]}


@pytest.mark.long(
    but=[
        "{'checkpoint_dtype': 'bf16', 'kl_coefficient': 0.3, 'kl_estimator': 'full'}",
        "{'token_rewards': 'implicit', 'state_format': 'sharded', 'checkpoint_dtype': 'bf16'}",
    ]
)
@pytest.mark.parametrize(
    "settings",
    [
        {
            "lr_schedule": "linear",
            "warmup_steps": 3,
            "total_steps": 10,
            "weight_decay": 0.1,
            "max_grad_norm": 0.05,
        },
        {"checkpoint_dtype": "bf16", "kl_coefficient": 0.3, "kl_estimator": "full"},
        {"dtype": "bf16", "activation_checkpointing": True, "state_format": "sharded"},
        pytest.param(
            {"optimizer_in_backward": True, "max_grad_norm": None, "rows_per_microbatch": 100},
            marks=pytest.mark.long,
        ),
        pytest.param({"value_head": True, "value_grad_in_decoder": True}, marks=pytest.mark.long),
        {**LORA, "lora_kind": "dora", "checkpoint_dtype": "bf16"},
        {**LORA, "lora_dropout": 0.3, "lora_merge": False},
        pytest.param(
            {**LORA, "lora_base_dtype": "nf4", "kl_coefficient": 0.1}, marks=pytest.mark.long
        ),
        {"token_rewards": "implicit", "state_format": "sharded", "checkpoint_dtype": "bf16"},
    ],
    ids=str,
)
def test_the_same_files_as_from_files(settings, chain, loads):
    """Long for three of nine settings: only these leave them where they are between iterations.

    They are parked with such settings below.

    Long for the other settings: only these carry adapters, schedules or a sharded state from one
    iteration to the next.
    """
    once = chain("once", **settings)
    assert len(loads) == ITERATIONS
    # Something was learned.
    assert len({content(folder)[Path("checkpoint/canary.json")] for folder in once}) == ITERATIONS
    loads.clear()
    check_same(chain("resident", Residence(HERE), **settings), once)
    assert len(loads) == 1  # and nothing was read that was in memory


class Parking(Residence):
    """A residence as if the device were no CPU."""

    def __init__(self, here, *given):
        super().__init__(here, *given, parks=True)
        self.parked = []
        """Where things are between iterations: (bytes, whether everything lies there)."""
        self.taken_back = 0

    def _park(self, trained):
        super()._park(trained)
        memory = trained.policy.host_memory._memory
        ends = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        held = [getattr(owner, name) for owner, name in resident._places(trained)]
        self.parked.append(
            (
                sum(one.nbytes for one in held),
                all(ends[0] <= one.data_ptr() < ends[1] for one in held),
            )
        )

    def _unpark(self, trained):
        self.taken_back += 1
        super()._unpark(trained)


def with_free(gibibytes):
    """This process on a machine with so much free memory."""
    return dataclasses.replace(HERE, memory=lambda: (8 * 2**30, gibibytes * 2**30))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"value_head": True, "value_grad_in_decoder": True}, marks=pytest.mark.long),
        {
            "dtype": "bf16",
            "optimizer_in_backward": True,
            "max_grad_norm": None,
            "rows_per_microbatch": 100,
        },
        pytest.param({"optimizer": "adamw_8bit", "kl_coefficient": 0.3}, marks=pytest.mark.long),
        {**LORA, "lora_base_dtype": "nf4", "kl_coefficient": 0.1, "token_rewards": "implicit"},
    ],
    ids=str,
)
def test_what_is_parked_comes_back_to_the_last_bit(settings, chain, from_files, loads):
    """Long for two of four: only these park a value head that trains its decoder, and 8-bit moments
    with a reference.

    Both are parked, and written, below.
    """
    once = from_files(**settings)
    loads.clear()
    residence = Parking(HERE)
    check_same(chain("resident", residence, free_memory=True, **settings), once)
    parked = residence.parked
    assert len(loads) == 1 and len(parked) == ITERATIONS
    assert all(inside for _, inside in parked) and parked[0] == parked[-1]
    memory = residence._kept[0].policy.host_memory._memory
    assert parked[0][0] <= memory.nbytes < parked[0][0] + 64 * 1000


def test_what_cannot_be_parked_is_read_from_files(chain, from_files, loads, monkeypatch, caplog):
    once = from_files()
    loads.clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    here = with_free(1)
    residence = Parking(here)
    check_same(chain("resident", residence, here=here, free_memory=True), once)
    assert len(loads) == ITERATIONS and residence._kept is None and not residence.parked
    numbers = (
        r"0\.0 GiB of the CPU's memory are needed for 4 processes on this machine, but 1\.0 GiB "
        r"of them are not free"
    )
    assert re.search("read the trainer's weights and state from files.*" + numbers, caplog.text)


@pytest.mark.long(but=["False"])
@pytest.mark.parametrize("enough", [True, False])
def test_the_reference_is_read_and_the_policy_itself_is_not(enough, chain, from_files, monkeypatch):
    """… unless the CPU's memory is too small for its weights meanwhile.

    Long for a parked policy: only that is read from memory.
    """
    settings, read = {"kl_coefficient": 0.3}, []
    once = from_files(**settings)
    original = Policy.load_folder
    monkeypatch.setattr(
        Policy,
        "load_folder",
        lambda policy, folder: (read.append(Path(folder)), original(policy, folder))[1],
    )
    here = HERE if enough else with_free(0)
    residence = Residence(here)
    folders = chain("resident", residence, here=here, **settings)
    check_same(folders, once)
    assert [path.name for path in read].count("reference") == ITERATIONS
    assert len(read) == (ITERATIONS if enough else 2 * ITERATIONS)
    assert residence._kept[0].policy.host_memory._memory.nbytes == 0, "on a CPU it is given back"


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "float32"),
        (
            {
                "dtype": "bf16",
                "free_memory": True,
                "optimizer_in_backward": True,
                "max_grad_norm": None,
            },
            "bfloat16",
        ),
        pytest.param({**LORA, "lora_dropout": 0.3}, "float32", marks=pytest.mark.long),
        ({**LORA, "lora_base_dtype": "nf4"}, "nf4"),
        pytest.param(
            {**LORA, "dtype": "bf16", "lora_base_dtype": "bf16"}, "bfloat16", marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_the_canary_of_the_starting_model_is_made_before_it_is_trained(
    settings, dtype, chain, loads, model_folder, tmp_path
):
    """Long for two of five settings: only these have dropout, and adapters to a base in bf16."""
    checkpoint = tmp_path / "0" / "checkpoint"

    def made(residence):
        shutil.copytree(model_folder(), checkpoint, copy_function=os.symlink)
        config = chain.config(
            model=str(checkpoint), packed="", output_dir=str(checkpoint.parent), **settings
        )
        grpo_recipe.train_iteration(config, HERE, residence)
        return json.loads((checkpoint / "canary.json").read_text())

    canary = made(None)
    assert canary["dtype"] == dtype and canary["half_precision"] is not None
    assert not (model_folder() / "canary.json").exists()
    once, residence = chain("once", first=checkpoint, **settings), Residence(HERE)
    shutil.rmtree(checkpoint)
    residence.prepare(
        chain.config(
            model=str(model_folder()), packed="", output_dir="", follow="folder", **settings
        )
    )
    loads.clear()
    assert made(residence) == canary
    check_same(chain("resident", residence, first=checkpoint, **settings), once)
    assert loads == []  # the folder only links to what was loaded


def test_what_is_prepared_is_used(chain, from_files, loads, model_folder):
    once = from_files()
    residence = Residence(HERE)
    start = {"model": str(model_folder()), "packed": "", "output_dir": "", "follow": "folder"}
    residence.prepare(chain.config(**start))
    loads.clear()
    check_same(chain("resident", residence), once)
    assert loads == []
    residence.prepare(chain.config(**start | {"model": "nowhere"}))  # whoever asks for it is told
    check_same(chain("again", residence), once)
    assert len(loads) == 2


def test_files_that_were_touched_are_read_again(chain, loads):
    """Another's weights, put where ours lie: the same name, and even the same size and time."""
    once = [chain.iteration("once", 0, None)]
    path = once[0] / "checkpoint" / "model.safetensors"
    before, times = path.read_bytes(), path.stat()
    residence = Residence(HERE)
    chain.iteration("once", 0, residence)
    loads.clear()
    tensors = load_file(path)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, path, {"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(path.read_bytes()) == len(before) and path.read_bytes() != before
    start = {"model": once[0] / "checkpoint", "state": once[0] / "state"}
    resident = chain.iteration("resident", 1, residence, **start)
    assert loads == [str(once[0] / "checkpoint")]
    check_same([resident], [chain.iteration("fresh", 1, None, **start)])


def test_a_state_that_was_replaced_is_read_again(chain):
    one, residence = chain.iteration("one", 0, None), Residence(HERE)
    other = chain.iteration("other", 0, None, lr=0.003)
    chain.iteration("one", 0, residence)
    for path in (one / "state").iterdir():
        path.unlink()
        path.write_bytes((other / "state" / path.name).read_bytes())
    start = {"model": one / "checkpoint", "state": one / "state"}
    check_same(
        [chain.iteration("resident", 1, residence, **start)],
        [chain.iteration("fresh", 1, None, **start)],
    )


def test_iterations_that_are_trained_again_or_left_out(chain, from_files, loads):
    once, residence = from_files(), Residence(HERE)
    loads.clear()
    starts = [{}] + [{"model": folder / "checkpoint", "state": folder / "state"} for folder in once]
    for number in (1, 1, 0, 2):
        check_same(
            [chain.iteration("resident", number, residence, **starts[number])], [once[number]]
        )
    assert len(loads) == 4  # the residence did not write these files
    loads.clear()
    own = {"model": chain.iteration("resident", 0, residence) / "checkpoint", "state": None}
    # The weights of one iteration with no optimizer state at all.
    fresh = chain.iteration("fresh", 1, None, **own)
    check_same([chain.iteration("resident", 1, residence, **own)], [fresh])
    assert len(loads) == 3


def test_other_settings_are_another_training(chain, loads):
    per_iteration = lambda number: {"lr": 0.01 / (number + 1), "clip_low": 0.1 * (number + 1)}  # noqa: E731
    once = chain("once", None, per_iteration)
    loads.clear()
    check_same(chain("resident", Residence(HERE), per_iteration), once)
    assert len(loads) == ITERATIONS


def test_after_an_error_nothing_is_kept(chain, from_files, loads, tmp_path):
    once, residence = from_files(), Residence(HERE)
    first = chain.iteration("resident", 0, residence)
    start = {"model": first / "checkpoint", "state": first / "state"}
    with pytest.raises(PackError):
        # Before anything is touched.
        chain.iteration("resident", 1, residence, packed=str(tmp_path / "none"), **start)
    samples = random_samples(0, prompts=(2,))
    samples[0].token_ids[-1] += 1000
    packed_tensors_from_tokenized_results(samples, seq_len=24, pad_id=0).save(
        tmp_path / "wrong.safetensors"
    )
    with pytest.raises(PackError, match="holds token id"):
        chain.iteration(
            "resident", 1, residence, packed=str(tmp_path / "wrong.safetensors"), **start
        )
    loads.clear()
    check_same([chain.iteration("resident", 1, residence, **start)], [once[1]])
    assert loads == [str(first / "checkpoint")]
    (first / "state" / "optimizer.safetensors").write_bytes(b"damaged")
    with pytest.raises(RunFolderError, match="cannot be read"):
        chain.iteration("resident", 1, residence, **start)


def test_what_was_trained_is_held_out_in_memory_before_it_is_written(
    chain, from_files, monkeypatch, tmp_path
):
    def look(handover):
        weights = {name: tensor.clone() for name, tensor in load_file(handover.memory).items()}
        held.append((handover, weights))
        assert not (tmp_path / "resident" / str(len(held) - 1) / "checkpoint").exists()

    held = []
    once, residence = from_files(), Residence(HERE, look)
    resident = chain("resident", residence, hand_over=True)
    check_same(resident, once)
    assert len(held) == ITERATIONS and len({handover.memory for handover, _ in held}) == 1
    for (handover, weights), folder in zip(held, resident, strict=True):
        canary = Canary.load(folder / "checkpoint")
        assert handover.canary == dataclasses.replace(canary, weights={}, files={})
        digests = {name: sha for name, _, _, sha in handover.parts}
        assert digests == {name: sha for name, sha in canary.weights.items() if name in digests}
        stored = load_file(folder / "checkpoint" / "model.safetensors")
        assert all(torch.equal(tensor, stored[name]) for name, tensor in weights.items())

    here = with_free(0)
    chain.iteration(
        "again",
        1,
        Residence(here, held.append),
        here=here,
        model=resident[0] / "checkpoint",
        state=resident[0] / "state",
        hand_over=True,
    )
    assert len(held) == ITERATIONS  # servers read files then


@pytest.mark.parametrize(
    "settings",
    [
        {"value_head": True},
        pytest.param({"checkpoint_dtype": "bf16"}, marks=pytest.mark.long),
        {"optimizer": "adamw_8bit", "kl_coefficient": 0.1},
    ],
    ids=str,
)
def test_servers_are_told_when_everything_has_left_the_device(
    settings, chain, from_files, loads, tmp_path
):
    """They may share it. Checkpoint and state are written from where all of it is parked, to the
    same bits.

    Long for a checkpoint in bf16: only this writes one out of what is parked. Where it is not:
    above.
    """
    once, told = from_files(**settings), []

    def look(facts):
        told.append(len(residence.parked))
        assert not (tmp_path / "resident" / str(len(told) - 1) / "checkpoint").exists()

    residence = Parking(HERE, look)
    loads.clear()
    check_same(chain("resident", residence, hand_over=True, free_memory=True, **settings), once)
    assert (
        told == [1, 2, 3]
        and len(residence.parked) == ITERATIONS
        and all(inside for _, inside in residence.parked)
        and len(loads) == 1
    )


def test_what_is_parked_is_written_later_without_the_device(chain, from_files):
    once = from_files()
    residence, settings = Parking(HERE), {"hand_over": True, "free_memory": True}
    chain.iteration("kept", 0, residence, save=False, **settings)
    second = chain.iteration("kept", 1, residence, save=False, kept=1, **settings)
    assert residence.taken_back == 1 and len(residence.parked) == 2
    policy = residence._kept[0].policy
    nothing_computed = policy.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass"))
    chain.iteration("kept", 1, residence, kept=2, packed="", **settings)
    nothing_computed.remove()
    assert residence.taken_back == 1 and len(residence.parked) == 2
    check_same([second], [once[1]])
    start = {"model": second / "checkpoint", "state": second / "state"}
    check_same([chain.iteration("kept", 2, residence, **start, **settings)], [once[2]])
    assert residence.taken_back == 2 and len(residence.parked) == 3


def test_servers_that_share_the_device_read_files_where_nothing_can_be_parked(
    chain, from_files, monkeypatch, caplog
):
    told, once = [], from_files()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    here = with_free(1)
    residence = Parking(here, told.append)
    check_same(chain("resident", residence, here=here, hand_over=True, free_memory=True), once)
    assert (
        not told
        and not residence.parked
        and residence._kept is None
        and residence._memory._descriptor is None
    )
    assert "servers must read files" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in ({"optimizer": "adamw_8bit"}, {"kl_coefficient": 0.1})
        ),
    ],
)
def test_what_is_not_written_goes_on_from_memory_and_can_be_written_later(
    chain, from_files, settings
):
    """To the same bits as if it had been; also in another process, which trains again from the last
    that was.

    Long for two of three: only these keep 8-bit moments, and a reference, unwritten. Written they
    are above.
    """
    once, residence = from_files(**settings), Residence(HERE)
    first = chain.iteration("kept", 0, residence, hand_over=True, save=False, **settings)
    assert not (first / "checkpoint").exists() and read_jsonl(first / "train.jsonl")
    second = chain.iteration("kept", 1, residence, hand_over=True, save=False, kept=1, **settings)
    assert not (second / "checkpoint").exists()
    chain.iteration("kept", 1, residence, hand_over=True, kept=2, packed="", **settings)
    check_same([second], [once[1]])
    start = {"model": second / "checkpoint", "state": second / "state"}
    check_same(
        [chain.iteration("kept", 2, residence, **start, hand_over=True, **settings)], [once[2]]
    )
    another = Residence(HERE)
    with pytest.raises(RunFolderError, match="the result of iteration 1 is neither"):
        chain.iteration("another", 1, another, hand_over=True, kept=1, **settings)
    chain.iteration("another", 0, another, hand_over=True, save=False, **settings)
    check_same(
        [chain.iteration("another", 1, another, hand_over=True, kept=1, **settings)], [once[1]]
    )


def test_what_servers_cannot_have_from_memory_is_written(chain):
    here = with_free(0)
    check_same(
        [chain.iteration("kept", 0, Residence(here), here=here, hand_over=True, save=False)],
        [chain.iteration("once", 0, None)],
    )
