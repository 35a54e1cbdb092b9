"""What the recipe's options do to an update, each against the same update said in another way; and
steps that are not taken.
"""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import random_samples
from support.training_steps import training_flops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.costs.parameters import model_shape
from ttrl.data.packing.masks import dense_mask
from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.errors import (
    ConfigError,
    DivergedError,
    ModelFolderError,
    PackError,
    RunFolderError,
    TrainerMemoryError,
)
from ttrl.system.files import read_jsonl
from ttrl.training import prepass
from ttrl.training.counts import forward_work
from ttrl.training.gradient_parts import GradientParts
from ttrl.training.kernels.logprobs import ReferenceHead, run_head
from ttrl.training.models.architecture import read_config
from ttrl.training.objective.token_rewards import divergence_penalties, implicit_advantages
from ttrl.training.parallel.distributed import Ranks, derived_generator
from ttrl.training.policy.loading import load_policy
from ttrl.training.references import model_digest
from ttrl.training.step import GradientStep
from ttrl.training.stepper import Stepper

pytestmark = pytest.mark.usefixtures("one_thread", "short_canaries")
HERE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def models(model_folder, tmp_path_factory):
    """A model, and a reference of other weights."""
    reference = tmp_path_factory.mktemp("reference")
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(model_folder() / "model.safetensors").items()
    }
    save_file(moved, reference / "model.safetensors", metadata={"format": "pt"})
    (reference / "config.json").write_bytes((model_folder() / "config.json").read_bytes())
    return model_folder(), reference


class Trials:
    """Trains on packs of its own folder."""

    def __init__(self, folder, model, reference):
        self.folder, self.model, self.reference = folder, model, reference
        self.samples = random_samples(8, prompts=(1, 3, 6), completions=5)
        for number, sample in enumerate(self.samples):
            sample.reward = (number * 7 % 11) / 10
        self.count = 0

    def pack(self):
        return packed_tensors_from_tokenized_results(
            self.samples, seq_len=48, pad_id=0, aggregation="sequence"
        )

    def train(self, packed, **settings):
        """One iteration; its folder."""
        self.count += 1
        out = self.folder / f"out{self.count}"
        packed.save(self.folder / "packed.safetensors")
        values = {
            "model": self.model,
            "reference_model": self.reference,
            "packed": self.folder / "packed.safetensors",
        }
        values |= {
            "output_dir": out,
            "device": "cpu",
            "rows_per_microbatch": 1,
            "measure_peak": False,
        }
        # Adam's first step would show hardly more than signs.
        values |= {"optimizer": "sgd", "lr": 0.1, "max_grad_norm": None}
        grpo_recipe.train_iteration(GRPOConfig.parse({**values, **settings}, "test"), HERE)
        return out

    def logprobs(self, model, packed):
        """Log-probabilities of all labels under a model, [rows, positions]."""
        config = GRPOConfig(model=str(model), packed="", output_dir="", device="cpu")
        return prepass.store_reference_logprobs(config, HERE, packed).reference_logprobs


@pytest.fixture
def trials(models, tmp_path):
    return Trials(tmp_path, *models)


def weights(folder):
    return load_file(folder / "checkpoint" / "model.safetensors")


def lines(folder):
    return read_jsonl(folder / "train.jsonl")


def apart(one, other, start):
    """How far two folders' checkpoints are from each other, by how far one of them is from the
    start.
    """
    ours, theirs, before = weights(one), weights(other), load_file(start / "model.safetensors")
    between = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in before)
    return math.sqrt(
        between
        / sum(float((theirs[name] - before[name]).double().square().sum()) for name in before)
    )


# Steps that are not taken


def spoilt(trials):
    """A pack with one sample whose loss is infinite: 1.2 times its advantage is beyond fp32."""
    trials.samples[4].advantage = 3e38
    trials.samples[4].logprobs = [-50.0] * len(trials.samples[4].token_ids)  # a ratio above 1
    packed = trials.pack()
    (number,) = [i for i, s in enumerate(packed.samples) if s.advantage > 1e38]
    return packed, number


def test_a_step_with_an_infinite_loss_is_skipped_named_and_counted(trials, caplog):
    packed, number = spoilt(trials)
    order = torch.randperm(packed.num_rows, generator=derived_generator(0, 1))
    good = [
        rows for rows in order.tensor_split(2) if packed.samples[number].row not in rows.tolist()
    ]
    assert len(good) == 1
    out = trials.train(packed, updates_per_iteration=2)
    skipped = [line for line in lines(out) if "skipped" in line]
    assert len(lines(out)) == 2 and len(skipped) == 1
    task, sample = packed.samples[number].task_id, packed.samples[number].sample
    assert f"row {packed.samples[number].row}, " in skipped[0]["skipped"]
    assert skipped[0]["skipped"].endswith(f"of task {task!r}, sample {sample}")
    assert skipped[0]["skipped"] in caplog.text
    assert skipped[0]["loss"] is None and skipped[0]["grad_norm"] is None
    assert [line["global_step"] for line in lines(out)] == [1, 2]
    alone = trials.train(packed.rows(good[0].tolist()))
    for name, weight in weights(alone).items():
        assert torch.equal(weight, weights(out)[name]), name  # as if the other step had not been


def test_steps_skipped_in_a_row_are_counted_over_iterations(trials):
    packed, _ = spoilt(trials)
    first = trials.train(packed, max_skipped_steps=2)
    start = load_file(trials.model / "model.safetensors")
    assert all(torch.equal(weights(first)[name], start[name]) for name in start)
    second = trials.train(packed, max_skipped_steps=2, state=str(first / "state"))
    with pytest.raises(
        DivergedError, match=r"step 3: .*losses are not finite.*max_skipped_steps \(2\)"
    ):
        trials.train(packed, max_skipped_steps=2, state=str(second / "state"))
    assert not (trials.folder / "out3" / "checkpoint").exists()
    trials.samples[4].advantage = 1.0
    third = trials.train(trials.pack(), max_skipped_steps=2, state=str(second / "state"))
    assert lines(third)[0]["global_step"] == 3
    assert not (third / "state" / "skipped.json").exists()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"in_a_row": null}', '{"in_a_row": Infinity}', '{"in_a_row": 1e400}']
)
def test_a_damaged_count_of_skipped_steps_is_named(content, trials):
    packed, _ = spoilt(trials)
    state = trials.train(packed) / "state"
    (state / "skipped.json").write_text(content)
    with pytest.raises(
        RunFolderError, match=r"skipped\.json is damaged .*delete it to count from 0"
    ):
        trials.train(packed, state=str(state))


def test_a_step_that_is_skipped_in_part_says_so(trials):
    for in_backward in (True, False):
        config = GRPOConfig(
            model=str(trials.model), packed="", output_dir="", device="cpu", max_grad_norm=None
        )
        config.optimizer_in_backward = in_backward
        stepper = Stepper(load_policy(config, HERE), config, HERE)
        stepper.begin()
        why = stepper.take(1.0, "the first is here").skipped
        assert (
            why.startswith("1 loss is not finite; the first is here")
            and ("have been stepped already" in why) == in_backward
        )


@pytest.mark.parametrize("value_head", [False, True])
def test_a_step_with_finite_losses_but_an_infinite_gradient_is_skipped(value_head, trials):
    """The squares of its norm are beyond fp32."""
    trials.samples[4].advantage, trials.samples[4].reward = 1e30, 1e10
    out = trials.train(
        trials.pack(), **({"value_head": True, "value_coefficient": 1e15} if value_head else {})
    )
    (line,) = lines(out)
    wrong = "value_grad_norm" if value_head else "grad_norm"
    assert f"the gradient norm is inf ({wrong})" in line["skipped"] and line[wrong] is None
    assert math.isfinite(line["loss"])
    start = load_file(trials.model / "model.safetensors")
    assert all(torch.equal(weights(out)[name], start[name]) for name in start)
    if value_head:
        assert not load_file(out / "state" / "value_head.safetensors")["down.weight"].any()


def test_no_step_may_be_skipped_where_none_is_allowed(trials):
    with pytest.raises(DivergedError, match="step 1"):
        trials.train(spoilt(trials)[0], max_skipped_steps=0)


def test_running_out_of_memory_says_what_would_help(trials, monkeypatch):
    def accumulate(*_, **__):
        torch.empty(1 << 55)

    monkeypatch.setattr(GradientStep, "accumulate", accumulate)
    with pytest.raises(
        TrainerMemoryError, match="rows of 48 positions, shorter rows would save most"
    ):
        trials.train(trials.pack())


# What train.jsonl says


def test_the_line_of_a_step_adds_up(trials):
    packed = trials.pack()
    settings = {
        "kl_coefficient": 0.3,
        "entropy_coefficient": 0.01,
        "measure_peak": True,
        "rows_per_microbatch": 2,
    }
    (line,) = lines(trials.train(packed, **settings))
    assert line["loss"] == pytest.approx(
        line["policy_loss"] + line["kl_loss"] + line["entropy_loss"]
    )
    assert line["kl_loss"] == pytest.approx(0.3 * line["kl"])
    assert 0 < line["kl_share"] < 1
    assert line["row_tokens"] == packed.num_tokens and line["trained_tokens"] == packed.num_trained
    widths = [
        packed.rows(slice(start, start + 2)).trim().tokens.numel()
        for start in range(0, packed.num_rows, 2)
    ]
    assert line["padding_tokens"] == sum(widths) - packed.num_tokens
    assert line["logical_tokens"] == sum(len(sample.token_ids) - 1 for sample in trials.samples)
    positions = packed.input_pos[packed.group_ids >= 0].tolist()
    shape = model_shape(read_config(trials.model).to_dict())
    assert line["flops"] == training_flops(shape, positions, packed.num_trained).total
    assert line["flops_by_part"]["training"] == line["flops"]
    assert line["flops_per_second"] == pytest.approx(line["flops"] / line["seconds"])
    assert line["tokens_per_second"] == pytest.approx(line["row_tokens"] / line["seconds"])
    assert line["peak_share"] == pytest.approx(line["flops_per_second"] / line["matmul_peak"])
    assert 0 < line["peak_share"] <= 1
    assert line["seconds_by_part"].keys() == {
        "prepass",
        "data",
        "forward",
        "backward",
        "optimizer",
        "checkpoint",
    }
    assert line["memory_peaks"]["host"] > 10**7
    assert line["ratio_min"] < 1 < line["ratio_max"] and 0 < line["ess"] < 1
    drift = line["sampler_trainer"]
    assert (
        drift["tokens"]
        == packed.num_trained
        == sum(one["tokens"] for one in drift["by_version"].values())
    )
    for one in drift["worst"]:  # in the places of the pack
        assert packed.labels[one["row"], one["position"]] != -100
        assert one["sampler"] == pytest.approx(float(packed.logprobs[one["row"], one["position"]]))


@pytest.mark.long(but=["settings0-passes0"])
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, {}),
        pytest.param({"kl_coefficient": 0.3}, {"reference": 1}, marks=pytest.mark.long),
        (
            {"kl_coefficient": 0.3, "kl_estimator": "full", "entropy_coefficient": 0.1},
            {"reference": 1},
        ),
        ({"kl_coefficient": 0.1, "updates_per_iteration": 3}, {"prepass": 1, "reference": 1}),
        (
            {
                "objective": "clip_cov",
                "activation_checkpointing": True,
                "checkpoint_keeps": "products",
            },
            {"prepass": 1},
        ),
        pytest.param(
            {"activation_checkpointing": True, "entropy_coefficient": 0.1},
            {},
            marks=pytest.mark.long,
        ),
        (
            {
                "lora_rank": 2,
                "updates_per_iteration": 2,
                "reference_model": None,
                "kl_coefficient": 0.3,
            },
            {"prepass": 1, "reference": 1},
        ),
    ],
)
def test_flops_by_part_are_those_that_pytorch_counts(settings, passes, trials, monkeypatch):
    """Of the whole recipe, less attention, whose kernel PyTorch counts nothing for, and which is
    counted by its mask here.

    Long for two of seven: only these have a sampled KL, and all of a layer recomputed, by
    themselves. With others they are above.

    Long for what adds a pass: only these count a reference, a prepass or recomputation.
    """
    counted = []
    canary_of = grpo_recipe.canary_of
    monkeypatch.setattr(
        grpo_recipe,
        "canary_of",
        lambda *given: (
            counted.append(counter.get_flop_counts()["Global"].copy()),
            canary_of(*given),
        )[1],
    )
    packed = trials.pack()
    # It knows nothing of the in-place product that makes the gradient of the head's weight.
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        out = trials.train(packed, gradient_noise=False, **settings)
    parts = [line["flops_by_part"] for line in lines(out)]
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    shape = model_shape(read_config(trials.model).to_dict())
    real = packed.group_ids >= 0
    pairs = int((dense_mask(packed.group_ids, packed.parent_ids) & real.unsqueeze(1)).sum())
    times = (
        3
        + 0.5
        + sum(passes.values())
        + ("activation_checkpointing" in settings and "checkpoint_keeps" not in settings)
    )
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs * times
    # Entropies: no product of matrices.
    products = sum(count for name, count in counted[0].items() if name != torch.ops.aten.bmm)
    if any("kl_share" in line for line in lines(out)):
        # What measures it: much here, little of a real model.
        sums = 3 if "entropy_coefficient" in settings else 2
        products -= 2 * sums * shape.width**2 * packed.num_trained
    assert sum(total.values()) - attention == pytest.approx(products, rel=1e-3)
    forward = forward_work(
        packed, read_config(trials.model), GRPOConfig(model="", packed="", output_dir="")
    )
    for name in ("prepass", "reference"):
        assert (total[name] > 0) == (name in passes)
        if "kl_estimator" not in settings and "lora_rank" not in settings:
            assert total[name] == pytest.approx(forward * passes.get(name, 0))


def moved(folder, start):
    """The SGD step that a checkpoint took, as one vector."""
    before, after = load_file(start / "model.safetensors"), weights(folder)
    return torch.cat([(after[name] - before[name]).double().flatten() for name in sorted(before)])


@pytest.mark.long(but=["0.2-settings2"])
@pytest.mark.parametrize(
    ("beta", "settings"),
    [
        (0.02, {}),
        pytest.param(2.0, {}, marks=pytest.mark.long),
        (0.2, {"objective": "gspo"}),
        (2.0, {"objective": "reinforce", "kl_estimator": "k2"}),
        pytest.param(0.02, {"kl_estimator": "full"}, marks=pytest.mark.long),
        (0.2, {"entropy_coefficient": 0.05}),
        pytest.param(
            0.02, {"kl_estimator": "full", "entropy_coefficient": 0.05}, marks=pytest.mark.long
        ),
        (2.0, {"kl_estimator": "full", "entropy_coefficient": 0.05}),
    ],
)
def test_the_share_of_kl_is_that_of_the_gradients(settings, beta, trials):
    """Against the steps of either part alone, over all parameters.

    Long for three of eight: only these have their weight of KL with these parts. Each estimator and
    each part is tried in any case.

    Long for the other weights and estimators: only these weigh KL ten times more or less.
    """
    settings = dict(settings)
    packed = trials.pack()
    packed.logprobs = trials.logprobs(trials.model, packed)
    mean = float(
        (packed.advantages * packed.weights).nansum() / packed.weights[packed.labels != -100].sum()
    )
    packed.advantages = torch.where(
        packed.labels != -100, packed.advantages - mean, packed.advantages
    )
    both = lines(trials.train(packed, kl_coefficient=beta, **settings))[0]
    bonus = (
        {"entropy_coefficient": settings.pop("entropy_coefficient")}
        if "entropy_coefficient" in settings
        else None
    )
    policy = moved(
        trials.train(packed, lr=0.01, **{**settings, "kl_estimator": "k3"}), trials.model
    ).norm()
    packed.advantages = packed.advantages * 0
    kl = moved(trials.train(packed, lr=0.01, kl_coefficient=beta, **settings), trials.model).norm()
    entropy = (
        0.0 if bonus is None else moved(trials.train(packed, lr=0.01, **bonus), trials.model).norm()
    )
    true = float(kl / (kl + policy + entropy))
    assert both["kl_share"] == pytest.approx(true, abs=0.12)
    if settings.get("objective") != "reinforce":
        assert abs(both["policy_loss"]) < 0.01  # by loss values, KL would be nearly everything


@pytest.mark.parametrize("terms", [(), ("entropy",), ("divergence",), ("entropy", "divergence")])
def test_the_parts_of_a_gradient_are_those_of_a_matrix_before_the_head(terms):
    torch.manual_seed(0)
    h, head, labels = torch.randn(20, 8), torch.randn(11, 8), torch.randint(11, (20,))
    h_ref, head_ref = torch.randn(20, 8), torch.randn(11, 8)
    weights = {name: torch.randn(20) for name in ("policy", "kl", *terms)}

    def plainly(states):
        logp, logq = (
            torch.log_softmax(states @ head.T, -1),
            torch.log_softmax(h_ref @ head_ref.T, -1),
        )
        chosen, p = logp[range(20), labels], logp.exp()
        values = {
            "policy": chosen,
            "kl": chosen,
            "entropy": -(p * logp).sum(-1),
            "divergence": (p * (logp - logq)).sum(-1),
        }
        return {name: (weight * values[name]).sum() for name, weight in weights.items()}

    matrix = torch.eye(8, requires_grad=True)
    alone = {
        name: torch.autograd.grad(loss, matrix, retain_graph=True)[0]
        for name, loss in plainly(h @ matrix).items()
    }
    kl = float((alone["kl"] + alone.get("divergence", 0)).norm())
    others = float(alone["policy"].norm()) + (
        float(alone["entropy"].norm()) if "entropy" in terms else 0.0
    )

    parts = GradientParts(terms)
    for part in (slice(0, 12), slice(12, 20)):
        states = h[part].clone().requires_grad_()
        reference = ReferenceHead(h_ref[part], head_ref) if "divergence" in terms else None
        wanted = {f"{name}_grad": True for name in terms}
        out = run_head(
            states,
            labels[part],
            head,
            chunk_size=5,
            reference=reference,
            apart=parts.add_apart,
            **wanted,
        )
        parts.expect((weights["policy"] + weights["kl"])[part], weights["kl"][part])
        values = {
            "policy": out.logprobs_N,
            "kl": out.logprobs_N,
            "entropy": out.entropy_N,
            "divergence": out.divergence_N,
        }
        loss = sum((weights[name][part] * values[name]).sum() for name in weights)
        parts.add(h[part], torch.autograd.grad(loss, states)[0])
    assert parts.share(HERE) == pytest.approx(kl / (kl + others), rel=1e-4)


def test_kl_is_watched_where_it_has_no_weight(trials):
    packed = trials.pack()
    rows = packed.num_rows
    assert 1 < rows < 12
    every = -(-12 // rows)
    watched = [
        lines(trials.train(packed, watch_kl=True, iteration=number))[0]
        for number in range(1, 2 * every + 1)
    ]
    assert ["kl" in line for line in watched] == [
        number in (1, 1 + every) for number in range(1, 2 * every + 1)
    ]
    alone = trials.pack().rows([0])
    (line,) = lines(trials.train(alone, watch_kl=True))
    (weighed,) = lines(trials.train(alone, kl_coefficient=1e-9))
    assert (
        line["kl"] == pytest.approx(weighed["kl"], rel=1e-5)
        and "kl_loss" not in line
        and "kl_share" not in line
    )
    unwatched = trials.train(packed)
    assert all(
        torch.equal(weights(unwatched)[name], weight)
        for name, weight in weights(trials.train(packed, watch_kl=True)).items()
    )
    forward = forward_work(
        packed, read_config(trials.model), GRPOConfig(model="", packed="", output_dir="")
    )
    assert sum(line["flops_by_part"]["reference"] for line in watched) < len(watched) * forward / 5


def test_ratios_of_the_policy_with_itself_are_one(trials):
    packed = trials.pack()
    packed.logprobs = trials.logprobs(trials.model, packed)
    (line,) = lines(trials.train(packed))
    assert line["ratio_min"] == pytest.approx(1, abs=1e-4) and line["ratio_max"] == pytest.approx(
        1, abs=1e-4
    )
    assert line["ess"] == pytest.approx(1, abs=1e-6)


def test_what_dropout_does_is_no_difference_of_sampler_and_trainer(trials):
    lora = {
        "lora_rank": 2,
        "lora_targets": ["w1"],
        "lora_dropout": 0.9,
        "lr": 3.0,
        "reference_model": None,
    }
    first = trials.train(trials.pack(), **lora) / "checkpoint"
    packed = trials.pack()
    packed.logprobs = trials.logprobs(first, packed)  # of the merged model, which samples
    (line,) = lines(trials.train(packed, model=first, lora_base=trials.model, **lora))
    assert line["sampler_trainer"]["max"] < 1e-4 < line["ratio_max"] - 1


def test_the_learning_rate_grows_with_the_rows(trials):
    packed = trials.pack()
    scaled = trials.train(packed, lr=0.1, lr_rows=5)
    plain = trials.train(packed, lr=0.1 * packed.num_rows / 5)
    assert (
        lines(scaled)[0]["lr"]
        == pytest.approx(lines(plain)[0]["lr"])
        == pytest.approx(0.1 * packed.num_rows / 5)
    )
    assert apart(scaled, plain, trials.model) < 1e-4
    assert apart(scaled, trials.train(packed, lr=0.1), trials.model) > 0.1


def test_a_trace_is_written(trials):
    out = trials.train(trials.pack(), profile_steps=1)
    assert "optimizer step 1" in (out / "profile" / "rank-0.json").read_text()


# The reference model


def test_stored_reference_logprobs_do_as_well_as_the_model(trials):
    packed = trials.pack()
    swapped = trials.train(packed, kl_coefficient=0.5)
    assert apart(swapped, trials.train(packed), trials.model) > 0.01
    path, stored = trials.folder / "plain.safetensors", trials.folder / "stored.safetensors"
    packed.save(path)
    arguments = [
        "--reference",
        str(trials.reference),
        "--packed",
        str(path),
        "--output",
        str(stored),
    ]
    assert prepass.main(arguments) == 0
    with_logprobs = PackedTensors.load(stored)
    assert torch.equal(with_logprobs.reference_logprobs.isnan(), packed.labels == -100)
    # The model itself is not needed, and where it is given it must be the same, in whatever folder
    # it lies.
    copied = shutil.copytree(trials.reference, trials.folder / "copied")
    trials.train(with_logprobs, kl_coefficient=0.5, reference_model=str(copied))
    from_pack = trials.train(with_logprobs, kl_coefficient=0.5, reference_model=None)
    assert apart(swapped, from_pack, trials.model) < 1e-4
    assert lines(from_pack)[0]["kl"] == pytest.approx(lines(swapped)[0]["kl"], rel=1e-6)
    assert prepass.main(["--reference", str(trials.folder / "missing"), *arguments[2:]]) == 1


def test_stored_reference_logprobs_must_be_those_that_are_wanted(trials):
    packed = trials.pack()
    with pytest.raises(
        ConfigError,
        match=r"reference_model is missing, and .*packed\.safetensors holds no reference log-prob",
    ):
        trials.train(packed, kl_coefficient=0.5, reference_model=None)
    config = GRPOConfig(model=str(trials.reference), packed="", output_dir="", device="cpu")
    packed = prepass.store_reference_logprobs(config, HERE, packed)
    kl = {"kl_coefficient": 0.5}
    with pytest.raises(
        PackError, match=r"of temperature 1\.0, and temperature is 0\.7; store them again"
    ):
        trials.train(packed, **kl, temperature=0.7)
    with pytest.raises(PackError) as caught:
        trials.train(packed, **kl, reference_model=str(trials.model))
    ours, theirs = (
        f"{model} (weights {model_digest(model)[:12]})"
        for model in (trials.reference, trials.model)
    )
    assert f"are of {ours}, and reference_model is {theirs}; store them again" in str(caught.value)


def test_the_whole_vocabulary_needs_the_model_all_the_same(trials):
    packed = trials.pack()
    packed.reference_logprobs = trials.logprobs(trials.reference, packed)
    with pytest.raises(ModelFolderError, match="nowhere"):
        trials.train(packed, kl_coefficient=0.5, kl_estimator="full", reference_model="nowhere")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
def test_kl_of_a_model_with_itself_is_zero(estimator, trials):
    """Fault 3 of the predecessor: reference log-probabilities were shifted twice, and it was
    2.37.
    """
    (line,) = lines(
        trials.train(
            trials.pack(),
            kl_coefficient=0.5,
            kl_estimator=estimator,
            reference_model=str(trials.model),
        )
    )
    assert line["kl"] == pytest.approx(0, abs=1e-6)


def test_kl_begins_after_some_steps_of_the_run(trials):
    settings = {"kl_coefficient": 0.5, "kl_after_steps": 1}
    two = lines(trials.train(trials.pack(), updates_per_iteration=2, **settings))
    assert "kl_loss" not in two[0] and two[1]["kl_loss"] > 0
    assert (
        two[0]["sampler_trainer"]["tokens"] == two[0]["trained_tokens"] + two[1]["trained_tokens"]
    )
    # Not needed yet, so not looked for.
    (one,) = lines(trials.train(trials.pack(), reference_model="nowhere", **settings))
    assert "kl" not in one


# Advantages of single tokens


def test_kl_in_the_reward_changes_the_advantages_alone(trials):
    packed = trials.pack()
    charged = trials.train(packed, kl_coefficient=0.4, kl_in="reward", kl_estimator="k1", gamma=0.9)
    own, reference = (trials.logprobs(model, packed) for model in (trials.model, trials.reference))
    packed.advantages = packed.advantages + divergence_penalties(
        packed, own, reference, 0.4, "k1", 0.9
    )
    written_out = trials.train(packed)
    assert apart(charged, written_out, trials.model) < 1e-4
    assert lines(charged)[0]["policy_loss"] == pytest.approx(
        lines(written_out)[0]["policy_loss"], rel=1e-4
    )
    assert "kl_loss" not in lines(charged)[0] and lines(charged)[0]["kl"] != 0


def test_a_new_reward_model_leaves_outcomes_alone(trials):
    """It is the reference, so that tokens have no rewards. The next iterations:
    tests/training/test_reward_pass.py.
    """
    packed = trials.pack()
    implicit = trials.train(packed, token_rewards="implicit", implicit_beta=0.1)
    reference = trials.logprobs(trials.reference, packed)
    packed.advantages = implicit_advantages(packed, reference, reference, 0.1)
    assert apart(implicit, trials.train(packed), trials.model) < 1e-4


def test_a_new_value_head_leaves_plain_returns(trials):
    """Its values are 0, so that with gamma and lam 1 each token's advantage is its sample's
    reward.
    """
    packed = trials.pack()
    out = trials.train(packed, value_head=True, value_coefficient=0.7)
    rewards = torch.tensor([*(sample.reward for sample in packed.samples), 0.0])
    packed.advantages = torch.where(
        packed.labels != -100, rewards[packed.sample_ids], torch.zeros(())
    )
    assert apart(out, trials.train(packed), trials.model) < 1e-4
    line = lines(out)[0]
    trained = packed.labels != -100
    squares = rewards[packed.sample_ids][trained].double().square()
    assert line["value_loss"] == pytest.approx(
        0.35 * float((squares * packed.weights[trained]).sum()) / len(packed.samples)
    )
    assert line["value_error"] == pytest.approx(math.sqrt(float(squares.mean())))
    assert line["loss"] == pytest.approx(line["policy_loss"] + line["value_loss"])


def test_the_value_head_goes_on_from_iteration_to_iteration(trials):
    packed = trials.pack()
    first = trials.train(packed, value_head=True)
    again = trials.train(
        packed,
        value_head=True,
        value_lr=0.0,
        state=str(first / "state"),
        model=str(first / "checkpoint"),
    )
    one, two = (load_file(folder / "state" / "value_head.safetensors") for folder in (first, again))
    assert (
        all(torch.equal(one[name], two[name]) for name in one)
        and float(one["down.weight"].abs().max()) > 0
    )
    moments = load_file(again / "state" / "value_optimizer.safetensors")
    assert float(moments["down.weight.step"]) == 2
    assert (
        lines(again)[0]["policy_loss"]
        != lines(trials.train(packed, value_head=True))[0]["policy_loss"]
    )
    path = first / "state" / "value_optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match="the value head's optimizer state cannot be read"):
        trials.train(packed, value_head=True, state=str(first / "state"))


def test_the_value_loss_may_train_the_decoder(trials):
    packed = trials.pack()
    head_alone = trials.train(packed, value_head=True)
    # The last layer of a new head is 0, and lets no gradient through: it shows in the second
    # iteration.
    settings = {
        "value_head": True,
        "state": str(head_alone / "state"),
        "model": str(head_alone / "checkpoint"),
    }
    both = [trials.train(packed, value_grad_in_decoder=also, **settings) for also in (False, True)]
    assert apart(*both, trials.model) > 0.01


# Shapes


def test_a_pack_of_one_row(trials):
    """Fault 13 of the predecessor: one-row packs lost their batch axis on loading."""
    packed = trials.pack().rows([0])
    (line,) = lines(trials.train(packed, updates_per_iteration=3))
    assert line["trained_tokens"] == packed.num_trained


class Shapes(TorchDispatchMode):
    """Remembers the second largest dimension of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                self.largest = max(self.largest, sorted(tensor.shape)[-2])
        return out


def test_nothing_has_the_square_of_a_row_s_length(trials):
    """Fault 14 of the predecessor: a B×S×S mask was built for every batch."""
    trials.samples = random_samples(3, prompts=(20, 30), completions=12, longest=16)
    packed = packed_tensors_from_tokenized_results(trials.samples, seq_len=250, pad_id=0)
    length = packed.trim().seq_len
    with Shapes() as shapes:
        trials.train(packed)
    assert length > 97  # the vocabulary is smaller, and so is every other dimension of the model
    assert 16 < shapes.largest < length


# Tokens that are chosen, and corrections


def test_tokens_are_chosen_over_the_whole_step(trials):
    packed = trials.pack()
    settings = {
        "objective": "clip_cov",
        "covariance_share": 0.1,
        "covariance_bounds": [-1e9, 1e9],
        "clip_low": 1.0,
    }
    lots = [
        trials.train(packed, clip_high=1e9, rows_per_microbatch=rows, **settings)
        for rows in (1, packed.num_rows)
    ]
    for out in lots:
        assert lines(out)[0]["chosen_fraction"] == pytest.approx(
            int(0.1 * packed.num_trained) / packed.num_trained
        )
    assert apart(*lots, trials.model) < 1e-4
    two = lines(
        trials.train(
            packed, clip_high=1e9, updates_per_iteration=2, drift_rows="first_update", **settings
        )
    )
    assert two[0]["sampler_trainer"]["tokens"] == two[0]["trained_tokens"] < packed.num_trained
    for line in two:
        assert line["chosen_fraction"] == pytest.approx(
            int(0.1 * line["trained_tokens"]) / line["trained_tokens"]
        )


def test_off_policy_correction_weighs_the_loss(trials):
    """Where the sampler is the trainer, nothing changes; else the weights are π_trainer/π_sampler
    up to the cap.
    """
    packed = trials.pack()
    own = trials.logprobs(trials.model, packed)
    (line,) = lines(trials.train(packed, off_policy="token", off_policy_cap=1.5))
    trained = packed.labels != -100
    known = ~packed.logprobs[trained].isnan()
    w = torch.where(known, torch.exp(own[trained] - packed.logprobs[trained].nan_to_num()), 1.0)
    assert line["correction"] == pytest.approx(float(w.clamp(max=1.5).mean()), rel=1e-4)
    assert line["capped_fraction"] == pytest.approx(float((w > 1.5).float().mean()))
    assert line["ratio_max"] == line["ratio_min"] == 1.0  # the old policy is the trainer's own
    packed.logprobs = own
    assert (
        apart(trials.train(packed, off_policy="token"), trials.train(packed), trials.model) < 1e-4
    )
