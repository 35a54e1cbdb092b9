"""A whole study of a tiny model's second step, in float64 against the truth, and its command."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.facts import rows_of
from support.studied_run import changed, samples_of, train, two_iterations
from support.tiny_models import random_samples
from support.training_steps import ALONE
from transformers import AutoTokenizer

from ttrl.cli import main
from ttrl.data.packing import masks
from ttrl.data.packing.pack import PackedTensors
from ttrl.errors import ConfigError, UnmovedStepError
from ttrl.instruments import precision
from ttrl.instruments import study as module
from ttrl.instruments.entropy_batch import (
    EntropyBatch,
    counted_off,
    draw,
    halves,
    only,
    part_of,
)
from ttrl.instruments.fisher import fit_of
from ttrl.instruments.linear_response import inner, moved
from ttrl.instruments.precision_sweep import (
    DtypeSweep,
    PrecisionSweep,
    SweepPoint,
    dtype_sweep,
    sweep_text,
)
from ttrl.instruments.study import study
from ttrl.instruments.study_pictures import (
    age_text,
    draw_noise,
    draw_precision,
    draw_tokens,
    fit_text,
    save_figures,
)
from ttrl.instruments.study_report import headline, known, study_text
from ttrl.system.files import write_json
from ttrl.tiny_model import make_tiny_model
from ttrl.training import batches
from ttrl.training.kernels import attention, logprobs
from ttrl.training.models.weights import to_hugging_face_names
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.lora import is_adapter, plain


@pytest.fixture(scope="module")
def run_in_bf16(model_folder, tmp_path_factory):
    return two_iterations(tmp_path_factory.mktemp("bf16"), model_folder(), dtype="bf16")


def entropy_by_transformers(model, times, number):
    """The mean over drawn answers of Σ_k H_k, without any code of ours. times: by place in
    `samples_of`.
    """
    total = 0.0
    with torch.no_grad():
        for place, count in times.items():
            one = samples_of(number)[place]
            ids = torch.tensor([one.token_ids])
            logits = model(ids).logits[0, one.prompt_length - 1 : -1]
            logp = torch.log_softmax(logits, dim=-1)
            total -= count * float((logp.exp() * logp).sum())
    return total / times.total()


@pytest.fixture
def drawn(monkeypatch):
    """The answers that studies drew: how often, by place in `samples_of`."""
    every, own = [], module.draw

    def draw_and_remember(packed, *rest):
        times = own(packed, *rest)
        places = {(f"g{place // 6}", place % 6): place for place in range(24)}
        found = {
            places[packed.samples[n].task_id, packed.samples[n].sample]: c for n, c in times.items()
        }
        every.append(Counter(found))
        return times

    monkeypatch.setattr(module, "draw", draw_and_remember)
    return every


def test_the_vector_by_hand_is_the_true_step_and_the_checkpoint(run):
    found = study(run, sequences=16, factors=[1.0])
    assert found["global_step"] == 2 and found["lr"] == 1e-3
    assert found["step"]["cosine"] > 0.9999 and found["step"]["norm_ratio"] == pytest.approx(
        1, abs=1e-4
    )
    assert found["step"]["checkpoint_distance"] < 1e-5
    assert 0.2 < found["half_cosine"] < 1
    assert found["slope"] == pytest.approx(sum(found["parts"].values()), rel=1e-4)
    assert all(found["parts"].values())


def test_the_response_follows_its_first_and_second_order(run):
    """In float64, the error of the first order falls as η², and of both together as η³."""
    found = study(run, sequences=24, factors=[0.0, 0.02, 0.04, 0.08], dtype="fp64")
    still, *sweep = found["sweep"]
    assert still["measured"] == pytest.approx(0, abs=1e-12) and still[
        "effective_size"
    ] == pytest.approx(1)
    first = [abs(one["measured"] - one["first"]) for one in sweep]
    both = [abs(one["measured"] - one["first"] - one["second"]) for one in sweep]
    for smaller, larger in itertools.pairwise(first):
        assert larger / smaller == pytest.approx(4, rel=0.3)
    assert all(b < 0.2 * a for a, b in zip(first, both, strict=True))
    assert [one["effective_size"] for one in sweep] == sorted(
        (one["effective_size"] for one in sweep), reverse=True
    )
    assert all(one["error"] > 0 for one in sweep)
    entropy = found["entropy"]
    assert sum(entropy["by_position"]) == pytest.approx(
        entropy["rao_blackwell"]["value"], rel=1e-12
    )
    assert len(entropy["by_position"]) > 1 and min(entropy["by_position"]) > 0
    json.dumps(found, allow_nan=False)


@pytest.fixture(scope="module")
def two_steps(run, tmp_path_factory):
    """A run whose iteration takes two optimizer steps, from where the other run ended; its
    objective looks at the start.
    """
    folder = tmp_path_factory.mktemp("two") / "iterations"
    return train(folder, 3, run, run.parent / "state", updates_per_iteration=2)


def test_the_second_step_of_an_iteration_is_studied_where_the_first_has_led(two_steps):
    first = study(two_steps, sequences=16, factors=[1.0])
    assert (first["update"], first["updates"], first["global_step"]) == (
        1,
        2,
        3,
    ) and "checkpoint_distance" not in first["step"]
    found = study(two_steps, sequences=24, factors=[0.0, 0.02, 0.04, 0.08], dtype="fp64", update=2)
    assert (found["update"], found["updates"], found["global_step"]) == (2, 2, 4)
    # The first step was taken again as the recipe took it, or the second would not lead to the
    # checkpoint.
    assert found["step"]["cosine"] > 0.9999 and found["step"]["checkpoint_distance"] < 1e-5
    still, *sweep = found["sweep"]
    # Another policy sampled.
    assert still["measured"] == pytest.approx(0, abs=1e-12) and still["effective_size"] < 1
    errors = [abs(one["measured"] - one["first"]) for one in sweep]
    for smaller, larger in itertools.pairwise(errors):
        assert larger / smaller == pytest.approx(4, rel=0.3)


def test_the_age_of_steps_within_an_iteration_is_told(run, tmp_path):
    """The third step of an iteration: its momentum holds two earlier steps of the same iteration,
    whose states lie in no file.
    """
    checkpoint = train(tmp_path, 3, run, run.parent / "state", updates_per_iteration=3)
    found = study(checkpoint, sequences=16, factors=[1.0], dtype="fp64", update=3)
    assert (found["update"], found["updates"], found["global_step"]) == (3, 3, 5)
    assert [(one["newest"], one["oldest"]) for one in found["ages"]][:2] == [(1, 1), (2, 2)]
    parts = sum(one["value"] for one in found["ages"])
    assert parts == pytest.approx(found["parts"]["earlier"], rel=1e-9)


def test_adapters_alone_are_studied_where_they_alone_are_trained(model_folder, tmp_path):
    """The second step of an iteration, so that both of an adapter's matrices have a gradient."""
    settings = {
        "lr": 1e-2,
        "lora_rank": 4,
        "lora_base": str(model_folder()),
        "updates_per_iteration": 2,
    }
    checkpoint = train(tmp_path, 2, model_folder(), **settings)
    found = study(checkpoint, sequences=24, factors=[0.02, 0.04], dtype="fp64", update=2)
    assert found["step"]["cosine"] > 0.9999 and found["step"]["norm_ratio"] == pytest.approx(
        1, abs=1e-4
    )
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


@pytest.mark.long(but=["fp64-1e-09"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 2e-6), ("fp64", 1e-9)])
def test_the_entropy_of_a_run_in_bf16_is_that_of_transformers(
    run_in_bf16, drawn, float64_reference, dtype, tolerance
):
    """bf16 is off by 1.5e-3 here.

    Long for fp32: only that shows what its rounding costs.
    """
    found = study(run_in_bf16, sequences=64, factors=[1.0], dtype=dtype)
    start = run_in_bf16.parent.parent / "0001" / "checkpoint"
    expected = entropy_by_transformers(float64_reference(start), drawn[0], number=2)
    assert found["entropy"]["rao_blackwell"]["value"] == pytest.approx(expected, rel=tolerance)
    assert (found["dtype"], found["run_dtype"], found["device"]) == (dtype, "bf16", "cpu")


@pytest.mark.long(but=["fp64"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_study_computes_in_its_own_dtype_whatever_the_runs_was(run_in_bf16, tmp_path, dtype):
    """Files are the same, so everything is but what is about the run: its mismatch, its distance to
    the checkpoint.

    Long for fp32: only that shows that a run in fp64 is narrowed.
    """
    how = {"sequences": 16, "factors": [1.0], "dtype": dtype, "kernel": 5}
    found = study(run_in_bf16, **how)
    other = study(changed(run_in_bf16, tmp_path, dtype="fp32"), **how)
    assert (
        found["step"].pop("checkpoint_distance") < 1e-5 < other["step"].pop("checkpoint_distance")
    )
    rounding, own = found.pop("mismatch")["rounding"], other.pop("mismatch")
    assert 1e-4 < rounding["rms"] < 0.1 and ("rounding" in own) == (dtype == "fp64")
    assert (found.pop("run_dtype"), other.pop("run_dtype")) == ("bf16", "fp32")
    stated = [one.pop("precision") for one in (found, other)]
    assert [one["mismatch"]["dtype"] for one in stated] == ["bf16", "fp32"]
    assert [one["sweep"] for one in stated] == [{"dtype": dtype, "device": "cpu"}] * 2
    del found["checkpoint"], other["checkpoint"], found["matrices"], other["matrices"]
    assert found == other


def test_a_later_step_in_bf16_starts_where_the_run_was(run_in_bf16, tmp_path):
    """Its objective looks at the start of the iteration: log-probabilities there are those of the
    study's dtype, too.
    """
    state = run_in_bf16.parent / "state"
    checkpoint = train(tmp_path, 3, run_in_bf16, state, updates_per_iteration=2, dtype="bf16")
    found = study(checkpoint, sequences=24, factors=[0.02, 0.04], dtype="fp64", update=2)
    assert found["step"]["cosine"] > 0.9999 and found["step"]["checkpoint_distance"] < 1e-5
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


@pytest.mark.long(but=["nf4"])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_base_of_few_bits_is_studied_as_it_is(
    model_folder, tmp_path, drawn, float64_reference, base
):
    """Its numbers stay those of the run, and what is computed with them is not rounded.

    Long for bf16: only that is a base of 16 bits.
    """
    settings = {
        "lr": 1e-2,
        "lora_rank": 4,
        "lora_base": str(model_folder()),
        "lora_base_dtype": base,
        "dtype": "bf16",
    }
    checkpoint = train(tmp_path, 2, model_folder(), **settings)
    found = study(checkpoint, sequences=32, factors=[0.02, 0.04], dtype="fp64")
    policy = load_policy(module.study_config(checkpoint, str(tmp_path), None), ALONE)
    parameters = policy.parameters_by_name()
    held = {name: plain(p).float() for name, p in parameters.items() if not is_adapter(name)}
    held = to_hugging_face_names(held, policy.decoder.config)
    folder = shutil.copytree(model_folder(), tmp_path / "held")
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    # Adapters begin at 0, so the base is the policy.
    expected = entropy_by_transformers(float64_reference(folder), drawn[0], number=2)
    assert found["entropy"]["rao_blackwell"]["value"] == pytest.approx(expected, rel=1e-9)
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


def test_layers_that_are_computed_again_are_so_with_the_parameters_that_were_asked_for(
    run, tmp_path
):
    again = changed(run, tmp_path, activation_checkpointing=True)
    how = {"sequences": 16, "factors": [1.0], "dtype": "fp64", "kernel": 4}
    found, kept = (study(one, **how) for one in (again, run))
    for name in ("slope", "curvature"):
        assert found[name] == pytest.approx(kept[name], rel=1e-12)
    assert found["kernel"]["predicted"] == pytest.approx(kept["kernel"]["predicted"], rel=1e-9)
    assert found["one_batch"] == pytest.approx(kept["one_batch"], rel=1e-9)


OBJECTIVES = {
    "KL": {"kl_coefficient": 0.1, "kl_estimator": "k3"},
    "KL over the vocabulary": {
        "kl_coefficient": 0.1,
        "kl_estimator": "full",
        "entropy_coefficient": 0.01,
    },
    "value head": {"value_head": True, "value_grad_in_decoder": True},
    "implicit rewards": {"token_rewards": "implicit"},
    "chosen tokens": {"objective": "clip_cov"},
}


@pytest.mark.long(but=["chosen tokens-2", "value head-2"])
@pytest.mark.parametrize(("name", "update"), [*((name, 2) for name in OBJECTIVES), ("KL", 1)])
def test_what_precedes_a_step_is_measured_in_float64_as_well(name, update, model_folder, tmp_path):
    """Of every kind of objective: the vector is that of the step, and the first order its effect.

    Long for the other objectives: only these have their own prepass.
    """
    settings = OBJECTIVES[name]
    if "kl_coefficient" in settings or "token_rewards" in settings:
        settings = {**settings, "reference_model": str(model_folder("qwen2"))}
    checkpoint = train(
        tmp_path, 1, model_folder(), dtype="bf16", updates_per_iteration=2, **settings
    )
    found = study(checkpoint, sequences=24, factors=[0.02, 0.04], dtype="fp64", update=update)
    assert found["step"]["cosine"] == pytest.approx(1, abs=1e-9)
    assert found["step"]["norm_ratio"] == pytest.approx(1, abs=1e-9)
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


def test_the_derivative_of_dora_is_exact(model_folder, tmp_path):
    """In training the lengths of rows count as constants (arXiv 2402.09353, section 4.3)."""
    settings = {"lr": 1e-2, "lora_rank": 4, "lora_kind": "dora", "lora_base": str(model_folder())}
    checkpoint = train(tmp_path, 2, model_folder(), updates_per_iteration=2, **settings)
    found = study(checkpoint, sequences=24, factors=[0.02, 0.04], dtype="fp64", update=2)
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


def test_a_step_that_moved_nothing_is_named(model_folder, tmp_path):
    samples = [dataclasses.replace(one, advantage=0.0) for one in random_samples(1, (3, 5), 2)]
    checkpoint = train(tmp_path, 1, model_folder(), samples=samples)
    with pytest.raises(UnmovedStepError, match="update 1 of iteration 1 moved nothing"):
        study(checkpoint, sequences=16, factors=[1.0])


def test_a_step_of_learning_rate_0_is_named(model_folder, tmp_path, capsys):
    """As the first one of a warm-up is; a study of the run leaves it out."""
    model = model_folder()
    folder = tmp_path / "run"
    first = train(folder / "iterations", 1, model, lr=0.0)
    with pytest.raises(
        UnmovedStepError, match="update 1 of iteration 1 moved nothing: its learning rate is 0"
    ):
        study(first, sequences=16, factors=[1.0])
    train(folder / "iterations", 2, first, first.parent / "state")
    assert main(["study", str(folder), "--sequences", "16"]) == 0
    found = json.loads((folder / "study" / "study.json").read_text())
    assert (found["unmoved"], [one["iteration"] for one in found["steps"]]) == ([1], [2])
    assert "Left out: steps of iterations 1, which moved nothing." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (
            -0.04,
            "it fell: -0.04 ± 0.01 (-2%), measured on other answers. Answers become more alike",
        ),
        (
            0.04,
            "it rose: +0.04 ± 0.01 (+2%), measured on other answers. Answers become more varied",
        ),
        (0.019, "it did not change beyond the noise: +0.019 ± 0.01"),
    ],
)
def test_the_first_lines_say_what_was_measured(measured, said):
    own = {"eta": 1e-3, "measured": measured, "error": 0.01, "first": -0.05}
    entropy = {"rao_blackwell": {"value": 2.0, "error": 0.1}}
    found = {"global_step": 7, "lr": 1e-3, "entropy": entropy, "sweep": [own, own | {"eta": 4e-3}]}
    text = headline(found | {"linear_regime": (1e-3, 4e-3)})
    assert text.startswith("The effect of optimizer step 7 on the entropy of whole answers")
    assert said in text
    assert text.endswith(
        "The gradient predicts -0.05, and is right within 10% up to 4 learning rates."
    )
    assert "off by more than 10%" in headline(found | {"linear_regime": (1e-4, 5e-4)})


def test_the_policy_that_sampled_leaves_nothing_behind(model_folder, tmp_path):
    """The adapter that is put back after it is not that from which the iteration's second step
    starts.
    """
    settings = {
        "lr": 1e-2,
        "lora_rank": 4,
        "lora_base": str(model_folder()),
        "updates_per_iteration": 2,
    }
    first = train(tmp_path, 1, model_folder(), **settings)
    second = train(tmp_path, 2, first, first.parent / "state", **settings)
    third = train(tmp_path, 3, second, second.parent / "state", **settings)
    (tmp_path / "other").mkdir()
    lagging = changed(third, tmp_path / "other", sampler_model=str(first), sampler_version=1)
    found, alone = (
        study(one, sequences=16, factors=[1.0], kernel=4, update=2) for one in (lagging, third)
    )
    assert "lag" in found.pop("mismatch") and "lag" not in alone.pop("mismatch")
    del found["checkpoint"], alone["checkpoint"], found["matrices"], alone["matrices"]
    assert found == alone


def test_dropout_is_no_part_of_the_entropy(model_folder, tmp_path):
    settings = {
        "lr": 1e-2,
        "lora_rank": 4,
        "lora_base": str(model_folder()),
        "updates_per_iteration": 2,
    }
    checkpoint = train(tmp_path, 2, model_folder(), lora_dropout=0.5, **settings)
    found = study(checkpoint, sequences=24, factors=[0.02, 0.04], dtype="fp64", update=2)
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)


def test_float64_on_a_gpu_is_exact(run_in_bf16, monkeypatch):
    """Where values cannot be looked at, as on a GPU, FlexAttention computes; it has no float64, so
    that this must not ask it.
    """
    how = {"sequences": 16, "factors": [0.5], "dtype": "fp64"}
    expected = study(run_in_bf16, **how)

    def in_bf16(q, *rest):
        assert q.dtype is torch.bfloat16  # and the CPU has no FlexAttention with a gradient
        return attention.dense_attend(q, *rest)

    monkeypatch.setattr(attention, "flex_attend", in_bf16)
    for place in (attention, batches, logprobs, masks):
        monkeypatch.setattr(place, "free_to_look", lambda device: False)
    found = study(run_in_bf16, **how)
    for name in ("slope", "curvature", "half_cosine"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9)
    assert found["sweep"][0] == pytest.approx(expected["sweep"][0], rel=1e-6)


def test_a_run_of_a_gpu_is_studied_on_the_cpu(run, tmp_path, capsys, caplog):
    gpu = {
        "device": "cuda",
        "cpu_offload": True,
        "compile": True,
        "activation_offloading": True,
        "num_threads": 64,
    }
    made_there = changed(run, tmp_path, **gpu)
    arguments = [
        "study",
        str(made_there),
        "--sequences",
        "16",
        "--factors",
        "1",
        "--output",
        str(tmp_path / "study"),
    ]
    assert main(arguments) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert main([*arguments, "--device", "cuda"]) == 2
    assert "PyTorch sees no GPU" in capsys.readouterr().err
    caplog.set_level("WARNING", logger="ttrl.instruments")  # the command lowers it
    caplog.handler.setLevel("INFO")
    assert main([*arguments, "--device", "cpu"]) == 0
    stages = ("loading the policy before iteration 2", "studying optimizer step", "the optimizer's")
    stages += ("measuring the entropy and its", "entropy after 1 step", "splitting the effect")
    places = [caplog.text.index(stage) for stage in stages]
    assert places == sorted(places)
    said = " ".join(capsys.readouterr().out.split())
    assert "Computed in fp32 on the CPU; the run trained in fp32. By quantity: fp32 on" in said
    found = json.loads((tmp_path / "study" / "study.json").read_text())
    assert found["device"] == "cpu"
    own = study(run, sequences=16, factors=[1.0])
    assert found["slope"] == pytest.approx(own["slope"], rel=1e-5)


def test_a_long_loop_says_how_far_it_is(caplog):
    seconds = iter([0.0, 1.0, 11.0, 11.0, 15.0, 30.0, 30.0])
    with caplog.at_level("INFO", logger="ttrl.instruments"):
        assert list(counted_off("abcd", "letters", lambda: next(seconds))) == list("abcd")
    assert caplog.messages == ["letters: 1 of 4 done", "letters: 3 of 4 done"]


def test_auto_is_the_device_that_is_there(run, tmp_path):
    """A run of a GPU says "auto" as often as "cuda", with settings that no CPU has."""
    gpu = {"device": "auto", "activation_offloading": True, "optimizer_on_cpu": True}
    found = study(changed(run, tmp_path, max_grad_norm=None, **gpu), sequences=8, factors=[1.0])
    assert found["precision"]["sweep"] == {"dtype": "fp32", "device": "cpu"}


def test_a_copied_run_is_studied_where_it_is(run, tmp_path):
    """Its config has the paths of the machine that trained it."""
    there = tmp_path / "run" / "iterations"
    for number in ("0001", "0002"):
        shutil.copytree(run.parent.parent / number, there / number)
    path = there / "0002" / "grpo.yaml"
    old = yaml.safe_load(path.read_text())
    for name in ("model", "state", "packed"):
        parts = old[name].rpartition("/000")
        old[name] = f"/gone/runs/x/iterations/000{parts[2]}"
    path.write_text(yaml.safe_dump(old))
    found = study(there / "0002" / "checkpoint", sequences=8, factors=[1.0])
    own = study(run, sequences=8, factors=[1.0])
    assert found["slope"] == own["slope"]


OPTIMIZERS = {
    "SGD": {"optimizer": "sgd", "lr": 0.1},
    "SGD with momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
    "RMSprop": {"optimizer": "rmsprop", "lr": 1e-3},
    "RMSprop with momentum": {"optimizer": "rmsprop", "lr": 1e-3, "momentum": 0.9},
    "in the backward pass": {"optimizer_in_backward": True, "max_grad_norm": None},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_studied(name, model_folder, tmp_path):
    """The vector leads to the checkpoint, and its first order is its effect."""
    settings = {"rows_per_microbatch": 100, **OPTIMIZERS[name]}
    checkpoint = two_iterations(tmp_path, model_folder(), **settings)
    found = study(checkpoint, sequences=24, factors=[0.02, 0.04], dtype="fp64", kernel=3)
    assert found["step"]["cosine"] == pytest.approx(1, abs=1e-9)
    assert found["step"]["norm_ratio"] == pytest.approx(1, abs=1e-9)
    assert found["step"]["checkpoint_distance"] < 1e-4
    assert found["slope"] == pytest.approx(sum(found["parts"].values()), rel=1e-9)
    has_memory = bool(settings.get("momentum")) or "optimizer" not in settings
    assert bool(found["parts"]["earlier"]) == has_memory
    errors = [abs(one["measured"] - one["first"]) for one in found["sweep"]]
    assert errors[1] / errors[0] == pytest.approx(4, rel=0.3)
    kinds = {"sgd"} | ({"rmsprop"} if "rms" in str(settings) else set())
    assert kinds <= found["kernel"]["kinds"].keys()


def test_moments_of_8_bits_are_studied_out_of_their_codes(model_folder, tmp_path):
    """No step of 8 bits is taken, so no compiler is needed: their state is read as AdamW's, and the
    rounding of the new moments is told."""
    checkpoint = two_iterations(tmp_path, model_folder())
    (tmp_path / "eight").mkdir()
    eight = changed(checkpoint, tmp_path / "eight", optimizer="adamw_8bit")
    found, plain = (study(one, sequences=8, factors=[1.0]) for one in (eight, checkpoint))
    rounding = found["step"].pop("moment_rounding")
    assert rounding.keys() == {"exp_avg", "exp_avg_sq"}
    assert all(0 <= share < 0.05 for share in rounding.values())
    assert found["step"] == plain["step"] and found["sweep"] == plain["sweep"]


def test_a_model_that_rounds_is_refused_float64(run, tmp_path):
    """One layer's output passes through fp32, as the norms of some of transformers' classes do."""
    config = module.study_config(run, str(tmp_path), None)
    studied = module._Study(config, ALONE, 0, "fp64", 0)
    studied._widen()
    given = (studied.policy, studied.step, config, studied.start)
    assert precision.model_error(*given) < 1e-3
    precision.prove_model(*given)
    layer = studied.policy.decoder.layers[0]
    hook = layer.register_forward_hook(lambda _m, _i, out: out.float().double())
    with pytest.raises(ConfigError, match="its own code computes in a narrower dtype"):
        precision.prove_model(*given)
    hook.remove()
    precision.prove_model(*given)


def test_a_device_that_rounds_is_refused_float64():
    """The CPU stands for the device, with a fault in one layer."""

    def round_a_layer(policy):
        layer = policy.decoder.layers[1]
        layer.register_forward_hook(lambda _module, _inputs, out: out.float().double())

    cpu = torch.device("cpu")
    assert precision.float64_error(cpu, lambda policy: None) < 1e-12
    precision.prove_device(cpu)
    with pytest.raises(ConfigError, match="some kernel there rounds"):
        precision.prove_device(cpu, round_a_layer)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((2.0, 4.0), "from 2 (below: rounding) to 4 learning rates (above: second order)"),
        (
            (1.0, 8.0),
            "from 1 (the least in this sweep) to 8 learning rates (the most in this sweep)",
        ),
    ],
)
def test_an_end_at_the_edge_of_the_sweep_is_only_a_bound(ends, text):
    points = [SweepPoint(eta=eta, measured=eta, off=0.0) for eta in (1.0, 2.0, 4.0, 8.0)]
    low, high = ends
    sweep = DtypeSweep(
        dtype="fp32", device="cpu", points=points, precision_ends=low, linearity_ends=high
    )
    assert text in sweep_text(PrecisionSweep(slope=1.0, lr=1.0, sweeps=[sweep]))


def test_a_lone_point_below_the_noise_is_no_precision():
    """bf16 may hit a small change by chance, as in a study of SmolLM2."""
    exact = {eta: eta - 0.4 * eta**2 for eta in (0.001, 0.01, 0.1, 0.25, 1.0)}
    measured = {
        "fp64": exact,
        "fp32": exact | {0.001: 0.0013},
        "bf16": {eta: value + 0.05 for eta, value in exact.items()} | {0.001: 0.001},
    }
    found = {name: dtype_sweep(name, "cpu", one, exact, 1.0) for name, one in measured.items()}
    ends = {name: (one.precision_ends, one.linearity_ends) for name, one in found.items()}
    assert ends == {"fp64": (0.001, 0.25), "fp32": (0.01, 0.25), "bf16": (None, None)}
    text = sweep_text(PrecisionSweep(slope=1.0, lr=1.0, sweeps=list(found.values())))
    assert "bf16 on the CPU: nowhere in this sweep" in text
    assert "fp32 on the CPU: from 0.01 (below: rounding) to 0.25" in text


def test_precision_ends_later_in_wider_dtypes(run, tmp_path, capsys):
    """bf16, fp32 and fp64 measure the same first order in between, and end where they must."""
    factors = "1e-5,1e-4,1e-3,1e-2,0.1,1,10,30"
    arguments = ["--precision", "--sequences", "24", "--factors", factors]
    assert main(["study", str(run), *arguments, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "study.json").read_text())["precision_sweep"]
    assert [one["dtype"] for one in found["sweeps"]] == ["bf16", "fp32", "fp64"]
    bf16, fp32, fp64 = ({p["eta"]: p["off"] for p in one["points"]} for one in found["sweeps"])
    assert len(fp64) == 8 and fp64.keys() == fp32.keys() == bf16.keys()
    smallest, *_, largest = sorted(fp64)
    assert fp64[smallest] < 1e-3 and fp32[smallest] > 0.1 < bf16[smallest]
    assert fp64[largest] > 0.1 and fp32[largest] == pytest.approx(fp64[largest], rel=0.01)
    low, high = found["sweeps"][2]["precision_ends"], found["sweeps"][2]["linearity_ends"]
    assert low == smallest and low < high < largest
    ends = [one["precision_ends"] or math.inf for one in found["sweeps"]]
    assert ends[0] >= ends[1] > ends[2]
    assert (tmp_path / "precision.png").read_bytes().startswith(b"\x89PNG")
    assert "fp64 on the CPU: from" in capsys.readouterr().out
    assert main(["study", str(run), "--precision", "--dtype", "fp32"]) == 2
    assert "--precision compares with float64" in capsys.readouterr().err


def test_the_reference_of_a_part_is_that_of_its_own_tokens(run, model_folder, tmp_path):
    """With KL over the vocabulary, a step holds the reference's hidden states at its labels: a half
    has those of its own.
    """
    config = module.study_config(run, str(tmp_path), None)
    reference = {
        "reference_model": str(model_folder()),
        "kl_coefficient": 0.1,
        "kl_estimator": "full",
        "rows_per_microbatch": 1,
    }
    study_of = module._Study(dataclasses.replace(config, **reference), ALONE, 0, "fp32", 0)
    samples, _ = halves(study_of.step.rows, torch.Generator().manual_seed(0))
    part, whole = part_of(study_of.step, samples), study_of.step
    wanted = torch.isin(whole.rows.sample_ids, torch.tensor(samples))
    kept = iter(part.reference_hidden)
    for row, (states, had) in enumerate(
        zip(whole.reference_hidden, whole.rows.labels != -100, strict=True)
    ):
        own = wanted[row][had]
        if own.any():  # rows without any of them are gone
            assert torch.equal(next(kept), states[own])
    assert next(kept, None) is None
    assert 0 < sum(map(len, part.reference_hidden)) < sum(map(len, whole.reference_hidden))
    study_of._update(part)


def test_without_matplotlib_the_command_says_so(run, monkeypatch, capsys):
    for name in ("study_run", "study_report", "study_pictures"):
        monkeypatch.delitem(sys.modules, f"ttrl.instruments.{name}", raising=False)
        monkeypatch.delattr(f"ttrl.instruments.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["study", str(run)]) == 2
    assert "draws pictures with matplotlib" in capsys.readouterr().err


def test_every_step_of_every_iteration(two_steps, capsys):
    assert main(["study", str(two_steps.parents[2]), "--sequences", "16"]) == 0
    found = json.loads((two_steps.parents[2] / "study" / "study.json").read_text())
    assert [(one["iteration"], one["global_step"]) for one in found["steps"]] == [(3, 3), (3, 4)]


def test_the_noise_of_a_run_is_drawn(tmp_path):
    noise = {"scale": 30.0, "low": 20.0, "prompts": 32.0, "from_samples": 0.3}
    rows = [
        {"iteration": n, "gradient_noise": noise | ({"high": 60.0} if n else {})} for n in range(3)
    ]
    figures = {"noise.png": draw_noise(rows_of(rows))}
    [path] = save_figures(figures, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_tokens_are_drawn_whatever_a_model_wrote(tmp_path):
    token = {"before": "$x^{ \\frac", "text": "\x1b\u4e2d$", "covariance": -0.5}
    found = {"covariance": {"mean": 0.1, "tokens": [token]}, "mismatch": {}, "run_dtype": "fp32"}
    [path] = save_figures({"tokens.png": draw_tokens(found)}, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_is_written_over_the_curves_of_the_precision():
    """The ranges of the dtypes have lines and axes of their own."""
    exact = {eta: eta - 0.4 * eta**2 for eta in (0.001, 0.01, 0.1, 0.25, 1.0)}
    measured = {"bf16": dict.fromkeys(exact, 0.5), "fp32": exact | {0.001: 0.0013}, "fp64": exact}
    sweeps = [dtype_sweep(name, "cpu", one, exact, 1.0) for name, one in measured.items()]
    figure = draw_precision(PrecisionSweep(slope=1.0, lr=0.1, sweeps=sweeps))
    above, below = figure.axes
    assert not above.texts
    assert [one.get_label() for one in above.lines[:3]] == ["bf16", "fp32", "fp64"]
    assert len(above.lines) == 4  # the tolerance
    ranges = [one for one in below.lines if len(one.get_xdata()) == 2]
    assert ranges[0].get_xdata() == pytest.approx([0.1, 2.5])
    assert ranges[1].get_xdata() == pytest.approx([0.01, 2.5])
    assert [one.get_ydata().tolist() for one in ranges] == [[1, 1], [2, 2]]
    assert [one.get_text() for one in below.get_yticklabels()] == ["bf16", "fp32", "fp64"]


def test_tokens_give_their_part_of_the_steps_effect(run, monkeypatch):
    """All tokens of one answer give what its own pass gives; all tokens, the whole."""

    def by_answer(rows, logprobs, config, seed):
        owners = rows.sample_ids[rows.labels != -100]
        seen = {str(number): owners == number for number in owners.unique().tolist()}
        return {**seen, "all": torch.ones(len(logprobs), dtype=torch.bool)}

    monkeypatch.setattr(module, "tokens_of_high_covariance", by_answer)
    found = study(run, sequences=16, factors=[1.0], dtype="fp64")
    whole, *answers, everything = found["covariance"]["parts"]
    assert everything["slope"] == pytest.approx(whole["slope"], rel=1e-12)
    assert everything["tokens"] == whole["tokens"] == sum(one["tokens"] for one in answers)
    assert whole["slope"] == pytest.approx(sum(found["current"]["by_answer"]), rel=1e-10)
    given = sorted(one["slope"] for one in answers)
    assert given == pytest.approx(sorted(found["current"]["by_answer"]), rel=1e-9)


def test_the_gradient_is_the_slope_of_the_values_in_any_direction(run, tmp_path):
    config = dataclasses.replace(module.study_config(run, str(tmp_path), None), state=None)
    policy = load_policy(config, ALONE).double()
    policy.compute_dtype = torch.float64
    packed = PackedTensors.load(config.packed)
    first, _ = halves(packed, torch.Generator().manual_seed(0))
    times = draw(packed, first, 20, torch.Generator().manual_seed(1))
    batch = EntropyBatch(policy, packed, times, config, ALONE)
    start = {name: p.detach().clone() for name, p in policy.parameters_by_name().items()}
    generator = torch.Generator().manual_seed(2)
    v = {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in start.items()
    }
    sides = [batch.mean(batch.values(moved(start, v, side))[0]).value for side in (1e-6, -1e-6)]
    assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(inner(batch.gradient(start), v), rel=1e-6)
    # Under other parameters the call computes what a policy with these parameters would.
    other = moved(start, v, 1e-3)
    called = next(iter(batch._tables(other)))
    for name, p in policy.parameters_by_name().items():
        p.data.copy_(other[name])
    torch.testing.assert_close(next(iter(batch._tables(None)))[0], called[0])
    assert int(batch.times.sum()) == 20 and len(batch.times) == len(times)


def test_halves_and_draws(run):
    packed = PackedTensors.load(run.parent / "packed.safetensors")
    first, second = halves(packed, torch.Generator().manual_seed(0))
    assert not set(first) & set(second) and len(first) + len(second) == len(packed.samples)
    for half in (first, second):
        kept = only(packed, half)
        owners = kept.sample_ids[kept.labels != -100]
        assert set(owners.tolist()) == set(half)
        assert not kept.weights[kept.labels == -100].any()
    times = draw(packed, first, 4000, torch.Generator().manual_seed(1))
    tasks = [packed.samples[number].task_id for number in times.elements()]
    assert all(abs(tasks.count(task) - 1000) < 120 for task in set(tasks)) and set(times) == set(
        first
    )


def test_the_command(run, tmp_path, capsys):
    arguments = [
        "study",
        str(run),
        "--sequences",
        "8",
        "--factors",
        "1,-1",
        "--kernel",
        "5",
        "--output",
        str(tmp_path / "study"),
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith("The effect of optimizer step 2 on the entropy of whole answers")
    assert "true step: cosine" in said and "Entropy of an answer" in said and "ESS" in said
    found = json.loads((tmp_path / "study" / "study.json").read_text())
    assert len(found["sweep"]) == 2 and math.isfinite(found["curvature"])
    assert (
        "Cov(log π, A)" in said
        and "Trainer in fp32 − sampler, rest" in said
        and "Fisher kernel of 5 answers of the entropy batch and 12 of the update" in said
        and "δ log π of these, measured against η Σ g·v: sign right in" in said
        and "The U-statistic of these is" in said
        and "highest 20% (" in said
    )
    names = ("kernel", "position", "tokens", "split", "logprobs")
    assert all((tmp_path / "study" / f"{name}.png").is_file() for name in names)
    matrices = load_file(tmp_path / "study" / "kernel.safetensors")
    assert matrices["adamw.effects"].shape == (5, 12)
    cosines = matrices["adamw.cosines"]
    assert torch.allclose(cosines.diagonal(), torch.ones(17)) and cosines.shape == (17, 17)
    assert found["kernel"]["kinds"].keys() == {"sgd", "adamw"} and "matrices" not in found
    assert re.search(r"Half of it is in the first \d+ of \d+ tokens", said)
    assert (tmp_path / "study" / "study.png").read_bytes().startswith(b"\x89PNG")


def test_every_step_of_a_run(run, tmp_path, capsys):
    """What there is; an iteration whose start is gone is named; each row is that of its own
    study.
    """
    folder = tmp_path / "run"
    for number in (1, 2):
        (folder / "iterations" / f"{number:04d}").mkdir(parents=True)
        values = yaml.safe_load((run.parent.parent / f"{number:04d}" / "grpo.yaml").read_text())
        (folder / "iterations" / f"{number:04d}" / "grpo.yaml").write_text(yaml.safe_dump(values))
        (folder / "iterations" / f"{number:04d}" / "checkpoint").symlink_to(
            run.parent.parent / f"{number:04d}" / "checkpoint"
        )
    for number in (0, 3):
        (folder / "iterations" / f"{number:04d}").mkdir()
    gone = yaml.safe_load((run.parent / "grpo.yaml").read_text()) | {
        "state": str(tmp_path / "pruned")
    }
    (folder / "iterations" / "0003" / "grpo.yaml").write_text(yaml.safe_dump(gone))
    (folder / "iterations" / "0000" / "grpo.yaml").write_text(
        yaml.safe_dump(gone | {"packed": "", "state": None})
    )
    asked = ["--sequences", "24", "--dtype", "fp64", "--kernel", "5"]
    assert main(["study", str(folder), *asked]) == 0
    said = capsys.readouterr().out
    found = json.loads((folder / "study" / "study.json").read_text())
    assert (
        [one["iteration"] for one in found["steps"]] == [1, 2]
        and found["gone"] == [3]
        and "starting checkpoints of iterations 3" in said
    )
    own = study(run, sequences=24, factors=[1.0], dtype="fp64", kernel=5)
    assert (
        found["steps"][1]["measured"] == own["sweep"][0]["measured"]
        and found["steps"][1]["global_step"] == 2
    )
    for name in ("sgd", "adamw"):
        # The same, without the gradients of the update's answers.
        alone, whole = found["steps"][1]["kinds"][name], own["kernel"]["kinds"][name]
        assert alone == {key: whole[key] for key in ("fit", "score_form")}
        assert re.search(
            rf"K·A, from each step's own gradient, has the right sign for .*\d+% with {name}", said
        )
    linear = [one for one in found["steps"] if abs(one["second"]) <= abs(one["first"]) / 2]
    assert [one["is_linear"] for one in found["steps"]] == [one in linear for one in found["steps"]]
    assert found["right"] == sum(one["measured"] * one["first"] > 0 for one in found["steps"])
    assert found["linear"] == len(linear) and found["linear_right"] == sum(
        one["measured"] * one["first"] > 0 for one in linear
    )
    assert f"in {found['right']} of 2 steps" in said
    assert said.startswith("The change of the entropy of whole answers by each optimizer step")
    assert "before the first of 2 steps to" in said
    assert (folder / "study" / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert main(["study", str(folder), "--factors", "1"]) == 2
    assert "is a run" in capsys.readouterr().err
    (folder / "iterations" / "0001" / "grpo.yaml").unlink()
    (folder / "iterations" / "0002" / "grpo.yaml").unlink()
    assert main(["study", str(folder)]) == 2
    assert "pruned" in capsys.readouterr().err


def test_a_later_step_of_an_iteration_by_the_command(model_folder, tmp_path, capsys):
    checkpoint = two_iterations(tmp_path, model_folder(), updates_per_iteration=2)
    asked = ["--entropy-tasks", "pack", "--sequences", "16", "--factors", "1"]
    for update in (1, 2):
        assert main(["study", str(checkpoint), *asked, "--update", str(update)]) == 0
        found = json.loads((checkpoint.parent / "study" / "study.json").read_text())
        assert (found["update"], found["updates"]) == (update, 2)
        assert found["global_step"] == 2 + update
    assert main(["study", str(checkpoint), *asked, "--update", "3"]) == 2
    assert "--update is 3, and the iteration has 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--factors", "a"], ["--sequences", "1"], ["--update", "0"]], ids=str
)
def test_wrong_arguments_are_named(run, arguments, capsys):
    assert main(["study", str(run), *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_what_is_gone_is_named(run, tmp_path, capsys):
    assert main(["study", str(tmp_path / "checkpoint")]) == 2
    assert "grpo.yaml" in capsys.readouterr().err
    values = yaml.safe_load((run.parent / "grpo.yaml").read_text())
    (tmp_path / "grpo.yaml").write_text(
        yaml.safe_dump(values | {"state": str(tmp_path / "pruned")})
    )
    assert main(["study", str(tmp_path / "checkpoint")]) == 2
    assert "state" in capsys.readouterr().err
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values | {"kept": 1}))
    assert main(["study", str(tmp_path / "checkpoint")]) == 2
    assert "in the trainer's memory, those of iteration 1" in capsys.readouterr().err


def test_the_fit_of_a_single_change_has_no_variance_to_explain():
    assert fit_text(vars(fit_of([0.5], [1.0]))) == "sign right in 100%, slope 2"


def test_what_one_group_cannot_tell_is_null(tmp_path):
    """Errors of a mean over groups need two groups; a newcomer's first study had one with a
    signal.
    """
    found = {"dH": {"measured": -0.5, "error": math.nan}, "groups": [1, math.inf], "dtype": "fp32"}
    path = tmp_path / "study.json"
    write_json(path, known(found))
    assert json.loads(path.read_text()) == {
        "dH": {"measured": -0.5, "error": None},
        "groups": [1, None],
        "dtype": "fp32",
    }


def test_the_text_says_what_was_sampled_projected_and_rounded(run):
    """Of a study that did so; the figures are put into one that did not."""
    found = study(run, sequences=8, factors=[1.0], kernel=4)
    plain = study_text(found)
    assert "answers of the pack" in plain
    assert ", exact" in plain
    assert "By quantity" in plain
    kinds = {
        name: {**kind, "projection_error": 0.25} for name, kind in found["kernel"]["kinds"].items()
    }
    batch = {**found["entropy_batch"], "tasks": "its tasks", "iteration": 3, "mismatch": 0.012}
    changed = {
        **{name: value for name, value in found.items() if name != "precision"},
        "kernel": {**found["kernel"], "sums": 65536, "kinds": kinds},
        "entropy_batch": batch,
        "step": {**found["step"], "moment_rounding": {"exp_avg": 0.0123}},
        "lr": found["lr"] * 3,
    }
    text = study_text(changed)
    for part in (
        "projected to 65,536 numbers",
        "projection error 0.25 of its bound",
        "answers to its tasks, sampled before iteration 3",
        "mean |trainer − server| 0.012 nats per token",
        "rounds its moments to 8 bits: exp_avg 1.23% of their size",
        "The sweep has no step of the run's own learning rate (--factors 1).",
    ):
        assert part in " ".join(text.split())
    assert "By quantity" not in text


def test_ages_are_told_in_steps():
    ages = [{"newest": 1, "oldest": 1}, {"newest": 2, "oldest": 3}, {"newest": 4, "oldest": None}]
    assert [age_text(age) for age in ages] == ["1", "2 to 3", "4 and more"]


def test_a_model_s_tokens_are_written_by_its_tokenizer(model_folder, tmp_path):
    """Without one, by their numbers."""
    model = make_tiny_model(tmp_path / "model", layers=1, width=16, heads=1)
    ids = AutoTokenizer.from_pretrained(model).encode("hi")
    assert module.decoder_of(str(model))(ids) == "hi"
    assert module.decoder_of(str(model_folder()))([5, 17]) == "5 17"
