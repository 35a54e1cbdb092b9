"""Adapters on disk: peft computes with them what we do, and training goes on from them as if it had
never stopped.
"""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.parallel_worker import accumulate
from support.tiny_models import load_policy_in, random_samples
from support.training_steps import ALONE, adapter_config, logprobs, move_adapters
from transformers import AutoModelForCausalLM

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import ConfigError, ModelFolderError
from ttrl.facts import parse
from ttrl.records import Canary
from ttrl.server.model_folder import merge_adapter
from ttrl.system.files import read_jsonl
from ttrl.training.batches import updates
from ttrl.training.checkpoints import save_checkpoint
from ttrl.training.merge import main, merge
from ttrl.training.optimizer.optimizer import clip_and_step, make_optimizer
from ttrl.training.optimizer.state import load_state, save_state, state_tensors
from ttrl.training.policy.adapters import base_folder
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import adapted, plain

pytestmark = pytest.mark.usefixtures("short_canaries")


def saved(folder, out, policy=None, **settings):
    """A checkpoint with adapters that were moved, and the policy that it was made of."""
    config = adapter_config(folder, **settings)
    policy = policy or move_adapters(load_policy(config, ALONE))
    save_checkpoint(out, policy, folder, ALONE, config=config)
    return policy, config


def everything(policy):
    return {name: plain(parameter) for name, parameter in policy.parameters_by_name().items()}


CASES = [
    ("qwen2", {}),
    ("qwen2", {"lora_kind": "dora", "lora_targets": ["output", "v_proj", "w2"]}),
    ("gemma2", {"lora_base_dtype": "nf4"}),
    ("qwen2", {"lora_base_dtype": "bf16", "dtype": "bf16", "lora_kind": "dora"}),
    ("phi3", {}),
    ("phi3", {"lora_kind": "dora"}),
    ("phi3", {"lora_targets": ["q_proj", "v_proj", "w3"]}),
    ("phi", {"lora_kind": "dora"}),
    ("gpt2", {"lora_targets": ["q_proj", "v_proj", "output_proj", "w1"]}),
]


@pytest.mark.long(
    but=[
        "qwen2-{'lora_kind': 'dora', 'lora_targets': ['output', 'v_proj', 'w2']}",
        "phi3-{'lora_kind': 'dora'}",
    ]
)
@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_there_and_back(family, settings, model_folder, tmp_path):
    """The merged folder computes what base and adapter do, and the adapter is read again to the
    last bit.

    Long for the other pairs: only these combine a family with a kind that another pair has.
    """
    policy, _ = saved(model_folder(family), tmp_path / "out", **settings)
    again = load_policy(adapter_config(tmp_path / "out", **settings), ALONE)
    before, after = everything(policy), everything(again)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    if settings.get("lora_base_dtype") == "bf16":
        policy.float().compute_dtype = torch.float32  # what was rounded stays so
    merged = load_policy_in(tmp_path / "out", torch.float32)
    base = load_policy_in(model_folder(family), torch.float32)
    assert (logprobs(merged) - logprobs(policy)).abs().max() < 2e-5
    assert (logprobs(base) - logprobs(policy)).abs().max() > 1e-2


@pytest.mark.long(but=["20000-phi3-{}", "5000000000-gemma2-{'lora_base_dtype': 'nf4'}"])
@pytest.mark.parametrize(
    ("family", "settings"), [*CASES, ("phi3", {"checkpoint_dtype": "bf16"})], ids=str
)
@pytest.mark.parametrize("shard", [5 * 10**9, 20_000])
def test_merging_later_gives_the_same_files(family, settings, shard, model_folder, tmp_path):
    """An adapter alone is merged when somebody needs the weights: the same bytes as if it had been
    written with them.

    Long for the other pairs: only these combine a family with a kind that another pair has.
    """
    settings, dtype = (
        {k: v for k, v in settings.items() if k != "checkpoint_dtype"},
        settings.get("checkpoint_dtype", "fp32"),
    )
    policy = move_adapters(load_policy(adapter_config(model_folder(family), **settings), ALONE))
    for name in ("at once", "later"):
        config = adapter_config(model_folder(family), lora_merge=name == "at once", **settings)
        how = {"checkpoint_dtype": dtype, "max_shard_bytes": shard, "config": config}
        save_checkpoint(tmp_path / name, policy, model_folder(family), ALONE, **how)
    assert not list((tmp_path / "later").glob("*.safetensors"))
    merge(tmp_path / "later", max_shard_bytes=shard)
    one, other = (
        {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (tmp_path / "at once", tmp_path / "later")
    )
    canary, unmerged = (parse(Canary, files.pop("canary.json")) for files in (one, other))
    assert dataclasses.replace(canary, weights={}, files={}) == unmerged
    assert one == other


def test_merging_in_a_process_of_its_own(model_folder, tmp_path, capsys):
    """Its command, run here: a process takes ten seconds to start. A run that starts one:
    tests/e2e/test_lora.py.
    """

    def here(command, **_):
        assert command[:3] == [sys.executable, "-m", "ttrl.training.merge"]
        code = main(command[3:])
        return subprocess.CompletedProcess(command, code, stderr=capsys.readouterr().err)

    base = shutil.copytree(model_folder(), tmp_path / "base")
    policy, _ = saved(base, tmp_path / "out", lora_merge=False)
    base = base.rename(tmp_path / "moved")
    with pytest.raises(ModelFolderError, match="but that does not exist; give its new place"):
        merge_adapter(tmp_path / "out", run=here)
    merge_adapter(tmp_path / "out", base, run=here)
    assert (
        logprobs(load_policy_in(tmp_path / "out", torch.float32)) - logprobs(policy)
    ).abs().max() < 2e-5
    shutil.rmtree(base)
    merge_adapter(tmp_path / "out")  # nothing is left to do


def test_transformers_reads_the_merged_model(model_folder, tmp_path):
    policy, _ = saved(model_folder("phi3"), tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    row = torch.randint(90, (1, 12), generator=torch.Generator().manual_seed(0))
    theirs = torch.log_softmax(model(row).logits[0], -1).gather(1, row[0, :, None])[:, 0]
    torch.testing.assert_close(logprobs(policy), theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "settings"), [case for case in CASES if "lora_base_dtype" not in case[1]], ids=str
)
def test_peft_computes_the_same(family, settings, model_folder, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    # It raises where torchao is older.
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    policy, _ = saved(model_folder(family), tmp_path / "out", **settings)
    model = AutoModelForCausalLM.from_pretrained(model_folder(family))
    model = peft.PeftModel.from_pretrained(model, tmp_path / "out" / "adapter")
    loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    ours = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert loaded.keys() == ours.keys() and all(
        torch.equal(loaded[name], ours[name]) for name in ours
    )
    row = torch.randint(90, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = torch.log_softmax(model(row).logits[0], -1).gather(1, row[0, :, None])[:, 0]
        torch.testing.assert_close(logprobs(policy), theirs, rtol=0, atol=2e-5)


def test_names_and_config_are_those_of_peft(model_folder, tmp_path):
    saved(model_folder("phi3"), tmp_path / "out", lora_targets=["q_proj", "v_proj", "w2"])
    tensors = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    prefix = "base_model.model.model.layers.1"
    assert {name for name in tensors if name.startswith(prefix)} == {
        f"{prefix}.{module}.lora_{part}.weight"
        for module in ("self_attn.qkv_proj", "mlp.down_proj")
        for part in "AB"
    }
    assert config["target_modules"] == ["down_proj", "qkv_proj"] and (
        config["r"],
        config["lora_alpha"],
    ) == (4, 6)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"qkv_proj": 8}, {"qkv_proj": 12})
    assert config["base_model_name_or_path"] == str(model_folder("phi3")) and not config["use_dora"]


def test_beside_a_vision_tower(with_vision_tower, tmp_path):
    """Names as the modules have them, and a pattern for the targets that leaves the tower alone."""
    import re

    saved(with_vision_tower, tmp_path / "out", lora_targets=["q_proj"])
    names = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names
    pattern = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())[
        "target_modules"
    ]
    assert re.fullmatch(pattern, "model.language_model.layers.0.self_attn.q_proj")
    assert not re.fullmatch(
        pattern, "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    )
    load_policy(adapter_config(tmp_path / "out", lora_targets=["q_proj"]), ALONE)


@pytest.mark.long(but=["{'lora_kind': 'dora', 'lora_targets': ['q_proj', 'output']}"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lora_merge": False},
        {"lora_kind": "dora", "lora_targets": ["q_proj", "output"]},
        {"lora_base_dtype": "nf4"},
    ],
    ids=str,
)
def test_stopping_in_between_changes_nothing(settings, model_folder, tmp_path):
    """Two steps, against one step, checkpoint and state, and one step more from them: the same to
    the last bit.

    Long for the other kinds: only these continue from 4 bits, or unmerged.
    """
    samples = random_samples(3, prompts=(3, 5), completions=3)
    packed = packed_tensors_from_tokenized_results(samples, seq_len=40, pad_id=0)
    (step,) = updates(packed, 1, (0, 1), ALONE)
    config = adapter_config(model_folder(), lr=1e-2, weight_decay=0.1, **settings)

    def go(policy, optimizer, number):
        accumulate(policy, step, config, ALONE)
        clip_and_step(policy, optimizer, config, number)

    policy = load_policy(config, ALONE)
    optimizer = make_optimizer(policy, config)
    go(policy, optimizer, 0)
    save_checkpoint(tmp_path / "out", policy, config.model, ALONE, config=config)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE)
    go(policy, optimizer, 1)

    config = adapter_config(tmp_path / "out", lr=1e-2, weight_decay=0.1, **settings)
    other = load_policy(config, ALONE)
    other_optimizer = make_optimizer(other, config)
    assert load_state(tmp_path / "state", other, other_optimizer) == 1
    go(other, other_optimizer, 1)
    for one, same in (
        (everything(policy), everything(other)),
        (state_of(policy, optimizer), state_of(other, other_optimizer)),
    ):
        assert one.keys() == same.keys() and all(torch.equal(one[name], same[name]) for name in one)
    start = everything(load_policy(config, ALONE))
    assert {
        name for name, tensor in everything(policy).items() if not torch.equal(tensor, start[name])
    } == {
        name for name, parameter in policy.parameters_by_name().items() if parameter.requires_grad
    }
    assert (tmp_path / "out" / "model.safetensors").exists() == config.lora_merge


def state_of(policy, optimizer):
    return dict(state_tensors(policy, optimizer))


@pytest.fixture
def pack(tmp_path):
    samples = random_samples(8, prompts=(1, 3, 6), completions=4)
    packed_tensors_from_tokenized_results(samples, seq_len=48, pad_id=0).save(
        tmp_path / "packed.safetensors"
    )
    return tmp_path / "packed.safetensors"


def run_recipe(pack, name, **settings):
    values = {
        "packed": str(pack),
        "output_dir": str(pack.parent / name),
        "device": "cpu",
        "lr": 1e-2,
        "measure_peak": False,
    }
    grpo_recipe.train_iteration(GRPOConfig.parse({**values, **settings}, "test"), ALONE)
    return pack.parent / name, read_jsonl(pack.parent / name / "train.jsonl")


def size_of(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def test_iterations_of_the_recipe(model_folder, pack):
    """The second one goes on from base and adapter; the reference is the base, without a second
    model.
    """
    model = model_folder("qwen3")
    settings = {"lora_rank": 2, "kl_coefficient": 0.3, "rows_per_microbatch": 1}
    linked = pack.parent / "linked"  # as the loop makes iteration 0's checkpoint
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    one, (first,) = run_recipe(pack, "one", model=str(linked), lora_base=str(model), **settings)
    assert first["kl"] == pytest.approx(0.0, abs=1e-12), "a new adapter is its reference"
    shutil.rmtree(linked)
    known = {
        "reference_model": str(model),
        "lora_base": str(model),
        "state": str(one / "state"),
        "iteration": 2,
    }
    two, (second,) = run_recipe(pack, "two", model=str(one / "checkpoint"), **known, **settings)
    assert second["kl"] > 1e-6 and second["global_step"] == 2

    base = load_policy_in(model, torch.float32)
    policy = load_policy(adapter_config(two / "checkpoint", lora_rank=2, lora_alpha=16.0), ALONE)
    own, frozen = policy.parameters_by_name(), base.parameters_by_name()
    assert all(torch.equal(own[name], frozen[name]) for name in frozen)
    before = load_file(one / "checkpoint" / "adapter" / "adapter_model.safetensors")
    after = load_file(two / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in before)

    full, _ = run_recipe(pack, "full", model=str(model))
    state = load_file(two / "state" / "optimizer.safetensors")
    assert {name.rpartition(".")[0] for name in state} == {
        name for name in own if own[name].requires_grad
    }
    assert size_of(two / "state") < 0.5 * size_of(full / "state")
    assert size_of(two / "checkpoint" / "adapter") < 0.5 * size_of(full / "checkpoint")


def test_full_kl_against_the_base(model_folder, pack):
    """Over the whole vocabulary, with an adapter on the head, which the reference must not have."""
    settings = {
        "lora_rank": 2,
        "lora_targets": ["output", "q_proj"],
        "kl_coefficient": 0.3,
        "kl_estimator": "full",
    }
    one, (first,) = run_recipe(pack, "one", model=str(model_folder()), **settings)
    _, (second,) = run_recipe(pack, "two", model=str(one / "checkpoint"), **settings)
    assert first["kl_loss"] == pytest.approx(0.0, abs=1e-7) and second["kl_loss"] > 1e-6
    assert math.isfinite(second["grad_norm"])


def test_a_full_training_may_follow(model_folder, pack):
    one, _ = run_recipe(pack, "one", model=str(model_folder()), lora_rank=2)
    two, _ = run_recipe(pack, "two", model=str(one / "checkpoint"))
    assert not (two / "checkpoint" / "adapter").exists()


class TestFolders:
    """What is wrong with a folder is said before anything is computed."""

    @pytest.fixture
    def checkpoint(self, model_folder, tmp_path):
        saved(model_folder(), tmp_path / "out", lora_targets=["q_proj"])
        return tmp_path / "out"

    def test_another_kind_of_adapter(self, checkpoint):
        with pytest.raises(
            ConfigError,
            match=r"lora_rank is 8, but 4 there; lora_alpha is 9.0, but 6.0 there; lora_targets",
        ):
            base_folder(adapter_config(checkpoint, lora_rank=8, lora_alpha=9.0))

    def test_a_base_that_is_gone(self, checkpoint):
        path = checkpoint / "adapter" / "ttrl_adapter.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_base": "/nowhere"}))
        with pytest.raises(
            ModelFolderError,
            match="an adapter to /nowhere, but that does not exist; give its new place with lora_base",
        ):
            base_folder(adapter_config(checkpoint, lora_targets=["q_proj"]))

    def test_a_base_that_moved(self, checkpoint, model_folder, tmp_path):
        shutil.copytree(model_folder(), tmp_path / "moved")
        config = adapter_config(
            checkpoint, lora_targets=["q_proj"], lora_base=str(tmp_path / "moved")
        )
        assert base_folder(config) == str(tmp_path / "moved")
        assert len(adapted(load_policy(config, ALONE))) == 2

    @pytest.mark.parametrize("other", ["qwen3", None])
    def test_a_base_that_is_another_model(self, other, model_folder):
        base = "/nowhere" if other is None else str(model_folder(other))
        with pytest.raises(
            ModelFolderError, match="has no adapter/, and its weights differ from lora_base"
        ):
            base_folder(adapter_config(model_folder(), lora_base=base))

    def test_a_reference_that_is_another_model(self, model_folder):
        values = {
            "model": str(model_folder()),
            "output_dir": "",
            "packed": "",
            "lora_rank": 2,
            "kl_coefficient": 0.1,
        }
        assert base_folder(
            GRPOConfig.parse({**values, "reference_model": str(model_folder())}, "test")
        ) == str(model_folder())
        with pytest.raises(ConfigError, match="with adapters the base is the reference"):
            base_folder(
                GRPOConfig.parse({**values, "reference_model": str(model_folder("qwen3"))}, "test")
            )

    def test_damaged_files(self, checkpoint):
        config = adapter_config(checkpoint, lora_targets=["q_proj"])
        weights = checkpoint / "adapter" / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ModelFolderError, match=r"adapter_model\.safetensors cannot be read"):
            load_policy(config, ALONE)
        weights.write_bytes(whole)
        tensors = load_file(weights)
        name = next(iter(tensors))
        save_file({n: t for n, t in tensors.items() if n != name}, weights)
        with pytest.raises(ModelFolderError, match="missing"):
            load_policy(config, ALONE)
        (checkpoint / "adapter" / "ttrl_adapter.json").write_text("[")
        with pytest.raises(ModelFolderError, match=r"ttrl_adapter\.json cannot be read"):
            load_policy(config, ALONE)

    def test_an_adapter_that_mixes_what_is_apart(self, model_folder, tmp_path):
        saved(model_folder("phi3"), tmp_path / "out", lora_targets=["q_proj", "k_proj"])
        path = tmp_path / "out" / "adapter" / "adapter_model.safetensors"
        tensors = load_file(path)
        save_file({name: tensor + 1.0 for name, tensor in tensors.items()}, path)
        with pytest.raises(
            ModelFolderError, match=r"qkv_proj\.lora_B\.weight mixes matrices that ttrl separates"
        ):
            load_policy(adapter_config(tmp_path / "out", lora_targets=["q_proj", "k_proj"]), ALONE)

    def test_dora_of_a_part_of_a_matrix(self, model_folder, tmp_path):
        with pytest.raises(
            ConfigError, match="lora_targets has no k_proj, but the model stores it in one matrix"
        ):
            saved(
                model_folder("phi3"),
                tmp_path / "out",
                lora_targets=["q_proj", "v_proj"],
                lora_kind="dora",
            )
