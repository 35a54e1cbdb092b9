"""The recipes as `tune run` runs them: what comes out, and that nothing but rounding depends on how
it was computed.

Only this runs the recipes in processes of their own.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.tiny_models import random_samples, sample
from transformers import AutoModelForCausalLM

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.system.files import digest, read_jsonl
from ttrl.tiny_model import make_tiny_model
from ttrl.training.parallel.distributed import derived_generator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny model and two packs of several rows."""
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(folder / "model", layers=2, width=64)
    for name, seed in (("a", 3), ("b", 4)):
        samples = [
            dataclasses.replace(one, reward=place % 3 / 2)
            for place, one in enumerate(random_samples(seed, prompts=(3, 5, 8, 9, 4)))
        ]
        packed_tensors_from_tokenized_results(samples, seq_len=40, pad_id=0).save(
            folder / f"{name}.safetensors"
        )
    return folder


@pytest.fixture(scope="module")
def run(recipe_worker):
    """Runs a recipe on a config of its own; returns what it printed. `by_tune`: through `tune run`,
    and torchrun; else forked.
    """

    def run(
        folder: Path,
        inputs: Path,
        *,
        processes=1,
        recipe="ttrl/grpo_recipe",
        expect=0,
        by_tune: bool = False,
        **settings,
    ) -> str:
        folder.mkdir(exist_ok=True)
        config = {
            "model": str(inputs / "model"),
            "output_dir": str(folder),
            "num_threads": 1,
            "lr": 1e-3,
            "max_grad_norm": 0.05,
        }
        if recipe == "ttrl/grpo_recipe":
            config["packed"] = str(inputs / "a.safetensors")
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, **settings}))
        arguments = [recipe, "--config", str(folder / "config.yaml")]
        if by_tune:
            torchrun = ["--nproc_per_node", str(processes)] if processes > 1 else []
            command = [sys.executable, "-m", "torchtune._cli.tune", "run", *torchrun, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            code, said = done.returncode, done.stdout + done.stderr
        else:
            code = recipe_worker(arguments, folder / "output.log", processes)
            said = (folder / "output.log").read_text()
        assert code == expect, said
        return said

    return run


@pytest.fixture(scope="module")
def baseline(run, inputs, tmp_path_factory):
    """One update on all rows of pack a, in one process and one microbatch."""
    folder = tmp_path_factory.mktemp("baseline")
    run(folder, inputs, rows_per_microbatch=100)
    return folder


def weights(folder):
    return load_file(folder / "checkpoint" / "model.safetensors")


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_checkpoint_computes_the_same_in_transformers(baseline, inputs):
    """The canary was computed by the recipe's own model; transformers must find the same numbers in
    the checkpoint.
    """
    model = AutoModelForCausalLM.from_pretrained(baseline / "checkpoint")
    canary = json.loads((baseline / "checkpoint" / "canary.json").read_text())
    tokens = torch.tensor([canary["token_ids"]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0], -1)
        expected = logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        greedy = model.generate(
            tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, tokens.shape[1] :]
    torch.testing.assert_close(torch.tensor(canary["logprobs"][1:]), expected, rtol=0, atol=2e-5)
    assert greedy.tolist() == canary["greedy_token_ids"]
    # It did learn.
    assert (
        largest_difference(weights(baseline), load_file(inputs / "model" / "model.safetensors"))
        > 1e-4
    )
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (baseline / "checkpoint" / name).read_bytes() == (
            inputs / "model" / name
        ).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_tune_run_of_its_own_gives_the_same_bits(processes, run, inputs, tmp_path):
    """… and names mistakes as one that is forked.

    Long: only this holds `tune run` against the recipes that are forked here. `tune run` trains in
    tests/test_recipe_configs.py; torchrun starts a trainer in test_resident.py.
    """
    said = run(tmp_path / "tune", inputs, expect=1, by_tune=True, learning_rate=1)
    assert (
        "ConfigError" in said and "unknown key 'learning_rate'" in said and "Traceback" not in said
    )
    for name, by_tune in (("tune", True), ("forked", False)):
        run(tmp_path / name, inputs, by_tune=by_tune, processes=processes, rows_per_microbatch=1)
    for name in (
        "checkpoint/model.safetensors",
        "state/optimizer.safetensors",
        "checkpoint/canary.json",
    ):
        assert digest(tmp_path / "tune" / name) == digest(tmp_path / "forked" / name), name


@pytest.mark.parametrize(("processes", "rows"), [(1, 1), (1, 2), (2, 1), (2, 100)])
def test_accumulation_and_ranks_change_nothing_but_rounding(
    run, processes, rows, baseline, inputs, tmp_path
):
    """Faults 7 and 8 of the predecessor: the clipped update depended on the number of GPUs, and
    left-over rows were lost. The gradient is clipped here, so a wrong scale would show in the
    moments.
    """
    run(tmp_path, inputs, processes=processes, rows_per_microbatch=rows)
    expected, found = (read_jsonl(folder / "train.jsonl")[-1] for folder in (baseline, tmp_path))
    for name in ("loss", "entropy", "grad_norm", "trained_tokens", "row_tokens", "normaliser"):
        assert found[name] == pytest.approx(expected[name], rel=2e-5), name
    assert expected["grad_norm"] > 0.05
    # Adam's first step is the sign of the gradient where the gradient is not tiny; compare the
    # moments, which are the gradient.
    one, other = (
        load_file(folder / "state" / "optimizer.safetensors") for folder in (baseline, tmp_path)
    )
    scale = max(float(value.abs().max()) for name, value in one.items() if name.endswith("exp_avg"))
    assert (
        largest_difference(
            *({k: v for k, v in s.items() if k.endswith("exp_avg")} for s in (one, other))
        )
        < 1e-5 * scale
    )
    assert largest_difference(weights(baseline), weights(tmp_path)) < 2e-4


@pytest.mark.parametrize(
    "settings",
    [
        {
            "objective": "clip_cov",
            "covariance_share": 0.2,
            "covariance_bounds": [-100.0, 100.0],
            "entropy_coefficient": 0.01,
        },
        {
            "value_head": True,
            "kl_coefficient": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "off_policy": "token",
        },
        {"objective": "gspo", "kl_coefficient": 0.1, "kl_estimator": "full"},
        {"token_rewards": "implicit", "implicit_lr": 1e-2},
        {"token_rewards": "implicit", "tensor_parallel": 2, "gradient_noise": False},
    ],
    ids=["chosen tokens", "token rewards", "whole vocabulary", "reward model", "divided layers"],
)
def test_what_is_made_over_the_whole_step_does_not_depend_on_the_ranks(
    run, settings, inputs, baseline, tmp_path
):
    settings = {
        **settings,
        "model": str(baseline / "checkpoint"),
        "reference_model": str(inputs / "model"),
    }
    undivided = settings | {"tensor_parallel": 1}
    run(tmp_path / "one", inputs, processes=1, rows_per_microbatch=1, **undivided)
    run(tmp_path / "two", inputs, processes=2, rows_per_microbatch=2, **settings)
    expected, found = (read_jsonl(tmp_path / name / "train.jsonl")[-1] for name in ("one", "two"))
    assert found.keys() == expected.keys()
    compared = {
        "loss",
        "policy_loss",
        "entropy",
        "grad_norm",
        "flops",
        "logical_tokens",
        "ess",
        "kl",
        "chosen_fraction",
        "reward_model_loss",
        "reward_model_grad_norm",
    }
    for name in compared & expected.keys():
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    one, two = (
        load_file(tmp_path / name / "state" / "optimizer.safetensors") for name in ("one", "two")
    )
    scale = max(float(value.abs().max()) for name, value in one.items() if name.endswith("exp_avg"))
    assert (
        largest_difference(
            *({k: v for k, v in s.items() if k.endswith("exp_avg")} for s in (one, two))
        )
        < 1e-4 * scale
    )
    if settings.get("token_rewards"):
        models = [
            load_file(tmp_path / name / "state" / "reward_model" / "optimizer.safetensors")
            for name in ("one", "two")
        ]
        moments = [{k: v for k, v in one.items() if k.endswith("exp_avg")} for one in models]
        largest = max(float(value.abs().max()) for value in moments[0].values())
        assert largest_difference(*moments) < 1e-4 * largest
    if settings.get("value_head"):
        heads = [
            load_file(tmp_path / name / "state" / "value_optimizer.safetensors")
            for name in ("one", "two")
        ]
        assert largest_difference(*heads) < 1e-4 * max(
            float(value.abs().max()) for value in heads[0].values()
        )


def test_optimizer_state_goes_on_from_iteration_to_iteration(run, inputs, tmp_path):
    """Fault 6 of the predecessor. Two updates in one run equal two runs of one update that hand on
    their state, bit for bit.
    """
    packed = packed_tensors_from_tokenized_results(
        random_samples(3, prompts=(3, 5)), seq_len=30, pad_id=0
    )
    assert packed.num_rows >= 2
    two = packed.rows([0, 1])
    two.save(tmp_path / "both.safetensors")
    # The recipe's order for seed 7, iteration 1.
    order = torch.randperm(2, generator=derived_generator(7, 1)).tolist()
    for number, row in enumerate(order, 1):
        two.rows([row]).save(tmp_path / f"{number}.safetensors")
    common = {"seed": 7, "lr_schedule": "linear", "total_steps": 10, "warmup_steps": 1}
    run(
        tmp_path / "both",
        inputs,
        packed=str(tmp_path / "both.safetensors"),
        updates_per_iteration=2,
        **common,
    )
    run(tmp_path / "one", inputs, packed=str(tmp_path / "1.safetensors"), **common)
    continued = {
        "state": str(tmp_path / "one" / "state"),
        "model": str(tmp_path / "one" / "checkpoint"),
    }
    run(
        tmp_path / "two",
        inputs,
        packed=str(tmp_path / "2.safetensors"),
        iteration=2,
        **continued,
        **common,
    )
    assert largest_difference(weights(tmp_path / "both"), weights(tmp_path / "two")) == 0
    rows = [read_jsonl(tmp_path / name / "train.jsonl") for name in ("both", "one", "two")]
    assert [row["lr"] for row in rows[0]] == [row["lr"] for part in rows[1:] for row in part]
    assert [row["global_step"] for row in rows[2]] == [2]
    run(
        tmp_path / "forgot",
        inputs,
        packed=str(tmp_path / "2.safetensors"),
        model=continued["model"],
        **common,
    )
    assert largest_difference(weights(tmp_path / "both"), weights(tmp_path / "forgot")) > 1e-5


def test_kl_to_the_reference(run, inputs, baseline, tmp_path):
    run(
        tmp_path,
        inputs,
        model=str(baseline / "checkpoint"),
        kl_coefficient=0.1,
        reference_model=str(inputs / "model"),
    )
    row = read_jsonl(tmp_path / "train.jsonl")[-1]
    assert row["kl"] > 1e-5
    assert row["loss"] == pytest.approx(row["policy_loss"] + 0.1 * row["kl"], rel=1e-6)


def test_supervised_warm_start_learns(run, inputs, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{c}?"},
                {"role": "assistant", "content": c.upper()},
            ]
        }
        for c in "abcdefgh"
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data": str(tmp_path / "data.jsonl"),
        "steps": 40,
        "batch_size": 8,
        "seq_len": 64,
        "lr": 3e-3,
        "max_grad_norm": 1.0,
    }
    run(tmp_path / "out", inputs, recipe="ttrl/sft_recipe", **settings)
    losses = [row["loss"] for row in read_jsonl(tmp_path / "out" / "train.jsonl")]
    assert losses[-1] < 0.5 < 3 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint")


def test_mistakes_are_named(run, inputs, tmp_path):
    """Each with what, where and the way out, without a traceback, and with an exit code that is not
    0.
    """
    settings = {"learning_rate": 1, "lr": "fast", "clip_low": 7}
    said = run(tmp_path / "config", inputs, expect=1, **settings)
    assert "ConfigError" in said and "Traceback" not in said
    assert (
        "unknown key 'learning_rate'" in said
        and "lr is 'fast'" in said
        and "clip_low is 7" in said.replace("7.0", "7")
    )
    said = run(tmp_path / "model", inputs, expect=1, model=str(tmp_path / "nowhere"))
    assert "ModelFolderError" in said and "nowhere" in said and "Traceback" not in said
    small = tmp_path / "small_vocabulary"
    packed = packed_tensors_from_tokenized_results([sample([1, 2], [5000])], seq_len=8, pad_id=0)
    packed.save(tmp_path / "other.safetensors")
    said = run(small, inputs, expect=1, packed=str(tmp_path / "other.safetensors"))
    assert "PackError" in said and "5000" in said and "Traceback" not in said
    (tmp_path / "torn.safetensors").write_bytes((inputs / "a.safetensors").read_bytes()[:500])
    said = run(tmp_path / "torn", inputs, expect=1, packed=str(tmp_path / "torn.safetensors"))
    assert "PackError" in said and "torn.safetensors" in said and "Traceback" not in said


def test_a_missing_weight_is_named(run, inputs, tmp_path):
    broken = tmp_path / "model"
    make_tiny_model(broken, layers=2, width=64)
    tensors = load_file(broken / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    said = run(tmp_path / "out", inputs, expect=1, model=str(broken))
    assert "ModelFolderError" in said and "layers.1.mlp.w3.weight" in said
