"""The optimizer's state on disk: both formats, every optimizer, and what is said of folders that do
not fit.
"""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.parallel_worker import accumulate
from support.training_steps import ALONE, distance, group_of_one, settings_of, tensors_of, trained
from transformers import Qwen2Config, Qwen2ForCausalLM

from ttrl.costs.storage import state_bytes_each
from ttrl.errors import RunFolderError, StorageError
from ttrl.system.files import digest
from ttrl.training.batches import updates
from ttrl.training.optimizer.optimizer import clip_and_step, make_optimizer
from ttrl.training.optimizer.state import load_state, rounded_to_8_bits, save_state, state_tensors
from ttrl.training.parallel import sharding
from ttrl.training.policy.loading import load_policy


@pytest.mark.parametrize("state_format", ["whole", "sharded"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_what_is_saved_is_restored_bit_for_bit(
    state_format, in_backward, model_folder, packed, tmp_path
):
    """… and by the optimizer in the backward pass what the plain one wrote, and the other way
    round.
    """
    policy, optimizer = trained(
        model_folder("qwen2-tied"), packed, 2, optimizer_in_backward=in_backward
    )
    save_state(tmp_path / "state", policy, optimizer, 7, ALONE, state_format)
    other_policy, other = trained(
        model_folder("qwen2-tied"), packed, 0, optimizer_in_backward=not in_backward
    )
    assert load_state(tmp_path / "state", other_policy, other) == 7
    expected, found = tensors_of(policy, optimizer), tensors_of(other_policy, other)
    assert expected.keys() == found.keys() and len(expected) == 3 * len(list(policy.parameters()))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert all(float(value) == 2 for name, value in found.items() if name.endswith(".step"))
    save_state(tmp_path / "again", other_policy, other, 7, ALONE, state_format)
    if state_format == "whole":
        assert digest(tmp_path / "again" / "optimizer.safetensors") == digest(
            tmp_path / "state" / "optimizer.safetensors"
        )


OPTIMIZERS = {
    "adamw": ({}, 8),
    "sgd": ({"optimizer": "sgd"}, 0),
    "sgd-momentum": ({"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1}, 4),
    "rmsprop": ({"optimizer": "rmsprop", "weight_decay": 0.1}, 4),
    "rmsprop-momentum": ({"optimizer": "rmsprop", "momentum": 0.9}, 8),
}
"""Settings, and bytes of state for each parameter."""


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("state_format", ["whole", "sharded"])
def test_steps_go_on_as_if_nothing_had_happened(
    optimizer_name, state_format, model_folder, packed, tmp_path
):
    """… and the state on disk is as large as a plan says."""
    settings, each = OPTIMIZERS[optimizer_name]
    assert state_bytes_each(settings_of(model_folder(), **settings)) == each
    whole, _ = trained(model_folder(), packed, 3, **settings)
    policy, optimizer = trained(model_folder(), packed, 1, **settings)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE, state_format)
    stored = sum(path.stat().st_size for path in (tmp_path / "state").glob("*.safetensors"))
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    assert each * numbers <= stored < each * numbers + 200 * (3 * len(list(policy.parameters())))
    resumed, again = trained(model_folder(), packed, 0, state=tmp_path / "state", **settings)
    for name, parameter in resumed.parameters_by_name().items():
        parameter.data.copy_(policy.parameters_by_name()[name])
    (step,) = updates(packed, 1, (0, 1), ALONE)
    config = settings_of(model_folder(), lr=1e-3, **settings)
    for number in (1, 2):
        accumulate(resumed, step, config, ALONE)
        clip_and_step(resumed, again, config, number)
    assert all(
        torch.equal(weight, whole.full_weights()[name])
        for name, weight in resumed.full_weights().items()
    )


def test_a_state_from_before_the_first_step_is_one_of_zeros(model_folder, packed, tmp_path):
    policy, optimizer = trained(model_folder(), packed, 0)
    save_state(tmp_path / "state", policy, optimizer, 0, ALONE)
    stored = load_file(tmp_path / "state" / "optimizer.safetensors")
    assert len(stored) == 3 * len(list(policy.parameters())) and all(
        not tensor.any() for tensor in stored.values()
    )
    said = json.loads((tmp_path / "state" / "state.json").read_text())["files"]
    assert said == {"optimizer.safetensors": digest(tmp_path / "state" / "optimizer.safetensors")}
    fresh, _ = trained(model_folder(), packed, 1)
    resumed, _ = trained(model_folder(), packed, 1, state=tmp_path / "state")
    assert all(
        torch.equal(weight, fresh.full_weights()[name])
        for name, weight in resumed.full_weights().items()
    )


def test_frozen_parameters_have_no_state(model_folder, packed, tmp_path):
    config = settings_of(model_folder(), lr=1e-3)
    policy = load_policy(config, ALONE)
    for name, parameter in policy.parameters_by_name().items():
        parameter.requires_grad_("norm" in name)
    optimizer = make_optimizer(policy, config)
    (step,) = updates(packed, 1, (0, 1), ALONE)
    accumulate(policy, step, config, ALONE)
    clip_and_step(policy, optimizer, config, 0)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE)
    stored = load_file(tmp_path / "state" / "optimizer.safetensors")
    assert {name.rpartition(".")[0] for name in stored} == {
        n for n in policy.parameters_by_name() if "norm" in n
    }
    assert load_state(tmp_path / "state", policy, optimizer) == 1


@pytest.mark.parametrize("state_format", ["whole", "sharded"])
def test_a_state_of_another_model_or_optimizer_is_named(
    state_format, model_folder, packed, tmp_path, files_of_at_most
):
    policy, optimizer = trained(model_folder("qwen2"), packed, 1)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE, state_format)
    others = ({"optimizer": "sgd"}, {"optimizer": "rmsprop"})
    for family, settings in (("qwen2-tied", {}), ("qwen3", {}), *(("qwen2", o) for o in others)):
        with pytest.raises(
            RunFolderError,
            match=r"belongs to another model or optimizer: .* names differ, the first is",
        ):
            trained(model_folder(family), packed, 0, state=tmp_path / "state", **settings)
    with pytest.raises(RunFolderError, match="cannot be read"):
        trained(model_folder("qwen2"), packed, 0, state=tmp_path / "nowhere")


def test_another_shape_is_named(model_folder, packed, tmp_path):
    policy, optimizer = trained(model_folder(), packed, 1)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE)
    path = tmp_path / "state" / "optimizer.safetensors"
    save_file(load_file(path) | {"norm.scale.exp_avg_sq": torch.zeros(33)}, path)
    with pytest.raises(
        RunFolderError, match=r"norm\.scale is \(33,\) there and \(32,\) in the model"
    ):
        load_state(tmp_path / "state", policy, optimizer)


@pytest.mark.parametrize("state_format", ["whole", "sharded"])
def test_damage_is_named(state_format, model_folder, packed, tmp_path):
    policy, optimizer = trained(model_folder(), packed, 1)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE, state_format)
    for path in sorted((tmp_path / "state").iterdir()):
        content = path.read_bytes()
        for broken in (content[: len(content) // 2], b"", None):
            path.write_bytes(broken) if broken is not None else path.unlink()
            with pytest.raises(RunFolderError, match="cannot be read"):
                load_state(tmp_path / "state", policy, optimizer)
        path.write_bytes(content)
    assert load_state(tmp_path / "state", policy, optimizer) == 1
    (tmp_path / "state" / "state.json").write_text(json.dumps([1]))
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_state(tmp_path / "state", policy, optimizer)


@pytest.mark.parametrize("count", ["Infinity", "1e400", "2.5", "true", "null", '"7"'])
def test_a_step_count_that_is_no_integer_is_named(count, model_folder, packed, tmp_path):
    policy, optimizer = trained(model_folder(), packed, 1)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE)
    header = tmp_path / "state" / "state.json"
    header.write_text(header.read_text().replace('"global_step": 1', f'"global_step": {count}'))
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_state(tmp_path / "state", policy, optimizer)


@pytest.mark.parametrize("state_format", ["whole", "sharded"])
def test_a_state_is_replaced_as_a_whole_or_not_at_all(
    state_format, model_folder, packed, tmp_path, files_of_at_most
):
    policy, optimizer = trained(model_folder(), packed, 1)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE, "whole")
    before = digest(tmp_path / "state" / "optimizer.safetensors")

    with files_of_at_most(100), pytest.raises(StorageError, match="could not write"):
        save_state(tmp_path / "state", policy, optimizer, 2, ALONE, state_format)
    assert digest(tmp_path / "state" / "optimizer.safetensors") == before
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    save_state(tmp_path / "state", policy, optimizer, 3, ALONE, state_format)
    assert load_state(tmp_path / "state", policy, optimizer) == 3
    assert (tmp_path / "state" / "optimizer.safetensors").exists() == (state_format == "whole")


def eight_bit_state(folder, here=None, fill=True):
    """A policy and moments in 8 bits that no step made, so that nothing is compiled; sharded by
    FSDP if there is a group.
    """
    config = settings_of(folder, optimizer="adamw_8bit")
    policy = load_policy(config, ALONE)
    if here is not None:
        sharding.apply_fsdp(policy, policy.decoder.layers, config, here)
    optimizer, generator = make_optimizer(policy, config), torch.Generator().manual_seed(0)
    for parameter in policy.parameters_by_name().values() if fill else ():
        state = optimizer.state[parameter]
        for part in ("exp_avg", "exp_avg_sq"):
            state[part] = optimizer._new_buffer(parameter, part == "exp_avg")
            local = sharding.local_part(state[part])
            local.copy_(torch.rand(local.shape, generator=generator))
        state["step"] = torch.tensor(3.0)
    return policy, optimizer


@pytest.mark.long(
    but=[
        "64-False-True-sharded",
        "64-False-True-whole",
        "64-True-False-sharded",
        "64-True-False-whole",
    ]
)
@pytest.mark.parametrize("state_format", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("writes", "reads"),
    [
        (False, True),
        (True, False),
        *(pytest.param(*both, marks=pytest.mark.long) for both in ((False, False), (True, True))),
    ],
)
@pytest.mark.parametrize("width", [64, 256])
def test_eight_bits_stay_eight_bits(state_format, writes, reads, width, packed, tmp_path):
    """On disk and back: codes and scales, by a sharded policy or not, wherever rows are whole
    blocks.

    Long for policies of the same kind: only these are read as they were written. Each kind writes
    for the other, and reads.

    Long for the other pairs: only these combine a size with what another pair has.
    """
    shape = {
        "hidden_size": width,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=97, num_key_value_heads=2, **shape)).save_pretrained(
        tmp_path / "model"
    )
    folder, found = tmp_path / "state", []
    with group_of_one() as here:
        policy, optimizer = eight_bit_state(tmp_path / "model", here if writes else None)
        save_state(folder, policy, optimizer, 3, ALONE, state_format)
        other_policy, other = eight_bit_state(
            tmp_path / "model", here if reads else None, fill=False
        )
        assert load_state(folder, other_policy, other) == 3
        for made in ((policy, optimizer), (other_policy, other)):
            found.append(
                {
                    name: sharding.full_tensor(tensor).clone()
                    for name, tensor in state_tensors(*made)
                }
            )
    one, back = found
    exact = [torch.equal(one[name], back[name]) for name in one]
    assert one.keys() == back.keys() and distance(back, one) < 0.01
    assert all(exact) or (width == 64 and (writes or reads))
    if not writes or width == 256:
        numbers = sum(parameter.numel() for parameter in policy.parameters())
        # In fp32, 8 and more.
        assert sum(path.stat().st_size for path in folder.iterdir()) < 4 * numbers + 100_000
    # AdamW goes on from it.
    plain_policy, plain = trained(tmp_path / "model", packed, 0, state=folder)
    again = dict(state_tensors(plain_policy, plain))
    assert distance(again, one) < 0.01


class Touch:
    """A pickle that makes a file when it is read, in place of what somebody's may do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "name",
    [".metadata", "optimizer.pt", "00000.json", "00000.safetensors", "optimizer.safetensors"],
)
def test_a_state_runs_no_code(name, model_folder, packed, tmp_path):
    """Run folders are copied, mirrored and shared: whoever can write there must not run code
    here.
    """
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "state.json").write_text(
        json.dumps({"schema": 1, "global_step": 1, "format": "sharded"})
    )
    (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    for more in ({}, {"ranks": 1}, {"format": "whole"}):
        header = {"schema": 1, "global_step": 1, "format": "sharded", **more}
        (folder / "state.json").write_text(json.dumps(header))
        expected = (
            "an earlier ttrl wrote this state .*; leave state out" if not more else "cannot be read"
        )
        with pytest.raises(RunFolderError, match=expected):
            trained(model_folder(), packed, 0, state=folder)
    assert not (tmp_path / "ran").exists()


def test_tables_that_do_not_fit_their_files_are_named(model_folder, packed, tmp_path):
    policy, optimizer = trained(model_folder(), packed, 1)
    save_state(tmp_path / "state", policy, optimizer, 1, ALONE, "sharded")
    path = tmp_path / "state" / "00000.json"
    table = json.loads(path.read_text())
    name = "norm.scale.exp_avg"
    for change in ({"start": [1]}, {"dtype": "load"}, {"start": None}, {"start": [-5]}):
        path.write_text(json.dumps(table | {name: table[name] | change}))
        with pytest.raises(RunFolderError, match="cannot be read"):
            load_state(tmp_path / "state", policy, optimizer)
    path.write_text(json.dumps({key: value for key, value in table.items() if key != name}))
    with pytest.raises(RunFolderError, match="another model or optimizer"):
        load_state(tmp_path / "state", policy, optimizer)


@pytest.mark.parametrize("signed", [True, False])
def test_moments_are_rounded_as_codes_of_8_bits_hold_them(signed):
    """In blocks, each by its own largest; small tensors, and those of no whole blocks, are not."""
    generator = torch.Generator().manual_seed(0)
    moment = torch.randn(64, 256, generator=generator)
    if not signed:
        moment = moment.square()
    rounded = rounded_to_8_bits(moment, signed)
    assert rounded.shape == moment.shape
    assert not torch.equal(rounded, moment)
    largest = moment.abs().amax(dim=1, keepdim=True)
    assert bool(((rounded - moment).abs() <= 0.03 * largest).all())
    for small in (moment[:4], moment[:, :250]):
        assert torch.equal(rounded_to_8_bits(small, signed), small)
