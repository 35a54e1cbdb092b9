"""What the recipe sees of its own gradients, against the gradients themselves."""

import os

import pytest
import torch
from support.network_hosts import held_port
from support.tiny_models import random_samples
from support.training_steps import ALONE
from torch import multiprocessing

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.instruments.gradient_noise import Alike, step_noise, within_of_two
from ttrl.system.files import read_jsonl
from ttrl.training.batches import updates
from ttrl.training.objective.objective import objective_from
from ttrl.training.parallel.distributed import ranks
from ttrl.training.policy.loading import load_policy
from ttrl.training.policy.policy import HeadOptions
from ttrl.training.step import GradientStep
from ttrl.training.step_noise import GradientPieces, _alike, _within
from ttrl.training.timing import Stopwatch
from ttrl.training.train_log import TrainProgress

PROMPTS = (3, 5, 8, 9, 4)


def pack():
    return packed_tensors_from_tokenized_results(
        random_samples(3, prompts=PROMPTS), seq_len=40, pad_id=0
    )


def config_of(folder, **settings):
    values = {
        "model": str(folder),
        "packed": "p",
        "output_dir": "",
        "device": "cpu",
        "rows_per_microbatch": 1,
    }
    return GRPOConfig.parse({**values, "objective": "reinforce", **settings}, "test")


def seen_by(config, here=ALONE, projections=None):
    """What is seen of one step, and the policy with its gradient."""
    policy = load_policy(config, here)
    (step,) = updates(pack(), 1, (0, 1), here, policy.decoder.config)
    pieces = GradientPieces(policy, config, here, projections)
    gradient = GradientStep(
        policy, config, here, Stopwatch(here.device), TrainProgress(0, here), pieces=pieces
    )
    result = gradient.accumulate(step, objective_from(config))
    pieces.close()
    return result.pieces, policy, step


@pytest.mark.long(but=["{}"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_rank": 2}, {"activation_checkpointing": True}, {"objective": "gspo"}],
    ids=str,
)
def test_the_pieces_are_the_gradients_of_the_microbatches(model_folder, settings):
    """Long for the other settings: only these take pieces of adapters, recomputed layers and
    sequences.
    """
    config = config_of(model_folder(), **settings)
    seen, policy, step = seen_by(config)
    trained = [p for p in policy.parameters() if p.requires_grad]
    whole = [p.grad.clone() for p in trained]
    assert sum(seen["whole"]) == pytest.approx(
        sum(float(g.square().sum()) for g in whole), rel=1e-4
    )
    assert len(seen["squares"]) == step.rows.num_rows > 2
    for row, squares in enumerate(seen["squares"]):
        policy.zero_grad()
        (alone,) = updates(pack().rows([step.numbers[row]]), 1, (0, 1), ALONE)
        alone.normaliser = step.normaliser
        GradientStep(
            policy, config, ALONE, Stopwatch(ALONE.device), TrainProgress(0, ALONE)
        ).accumulate(alone, objective_from(config))
        expected = sum(float(p.grad.square().sum()) for p in trained if p.grad is not None)
        assert sum(squares) == pytest.approx(expected, rel=1e-4)
        labels = int((alone.rows.labels != -100).sum())
        assert seen["shares"][row] == pytest.approx(labels / step.normaliser)
    assert not any(p._backward_hooks for p in trained)  # none is left behind


def test_the_sketch_divides_the_gradients_of_linear_layers_between_the_decoders_by_samples(
    model_folder,
):
    """With projections that change nothing, it is the analysis of variance of the samples' whole
    gradients.
    """
    width = 32
    config = config_of(model_folder())
    policy = load_policy(config, ALONE)
    assert policy.decoder.tok_embeddings.embedding_dim == width
    assert len(policy.decoder.layers) == 2  # the first one and the middle's are all of them
    same = torch.eye(width).expand(2, -1, -1)
    seen, _, _ = seen_by(config, projections=(same, same))

    samples, x = random_samples(3, prompts=PROMPTS), []
    for one in samples:  # each alone: Σ δ hᵀ over its labels, h normed
        (step,) = updates(
            packed_tensors_from_tokenized_results([one], seq_len=40, pad_id=0), 1, (0, 1), ALONE
        )
        (batch,) = step.microbatches(config, ALONE.device)
        held: dict[int, torch.Tensor] = {}
        inputs = (
            batch[name] for name in ("tokens", "labels", "group_ids", "parent_ids", "input_pos")
        )
        out = policy(
            *inputs,
            HeadOptions(
                watch_layers=lambda n, h, held=held: (h.retain_grad(), held.update({n: h}))
            ),
        )
        (-out.logprobs * one.advantage).sum().backward()
        at = batch["trained"]
        outer = []
        for h in held.values():
            normed = torch.nn.functional.rms_norm(
                h.detach().flatten(0, 1)[at].double(), (width,), eps=1e-6
            )
            outer.append(
                h.grad.flatten(0, 1)[at].double().T @ normed / len(pack_labels()) * len(samples)
            )
        x.append(torch.stack(outer).flatten())
    x = torch.stack(x)
    tasks = [one.task_id for one in samples]
    means = torch.stack([x[[t == one for t in tasks]].mean(0) for one in tasks])
    assert seen["counts"] == [4] * len(PROMPTS)
    assert seen["within"] == pytest.approx(float((x - means).square().sum()), rel=1e-4)
    assert seen["between"] == pytest.approx(float((means - x.mean(0)).square().sum()), rel=1e-4)
    assert seen["mean"] == pytest.approx(float(x.mean(0).square().sum()), rel=1e-3)


@pytest.mark.parametrize("alike", [False, True], ids=["", "right answers alike"])
@pytest.mark.parametrize("values", [2, 3])
@pytest.mark.parametrize("divided", [False, True])
def test_what_samples_add_to_the_noise_is_what_groups_that_are_drawn_again_differ_by(
    divided, values, alike
):
    """Rewards are 0 or 1, or also a half; the score of an answer leans to its prompt's direction,
    by its reward, and is noise else; right answers may be one text."""
    torch.manual_seed(0)
    prompts, size, width = 4000, 16, 8
    chance = torch.distributions.Beta(0.5, 2.0).sample((prompts, 1)).double()
    lean = torch.randn(prompts, 1, width, dtype=torch.float64) * 3

    def drawn():
        rewards = (torch.rand(prompts, size) < chance).double()
        rewards *= 1 - 0.5 * (torch.rand(prompts, size) < 0.5) * (values == 3)
        expected = chance * (0.75 if values == 3 else 1.0)
        noise = (
            torch.randn(prompts, size, width, dtype=torch.float64)
            * (1 - alike * rewards)[..., None]
        )
        scores = lean * (rewards - expected)[..., None] + noise
        advantages = rewards - rewards.mean(1, keepdim=True)
        deviation = rewards.std(1, correction=0, keepdim=True)
        return advantages / deviation.clamp(min=1e-6) if divided else advantages, scores

    (advantages, scores), (others, other_scores) = drawn(), drawn()
    x, y = advantages[..., None] * scores, others[..., None] * other_scores
    truth = float((x.mean(1) - y.mean(1)).square().sum()) / 2
    has_signal = advantages.square().sum(1) > 0.01
    x, kept = x[has_signal], advantages[has_signal]
    task = torch.arange(len(x)).repeat_interleave(size)
    given = x.flatten(0, 1), x.mean(1), task, kept.flatten()
    alike, within = _alike(*given), _within(*given)
    assert (alike is not None) == (values == 2)
    if alike is not None:
        assert alike["unit"] == divided
        within = within_of_two(
            [(Alike(*row[:3]), Alike(*row[3:6]), row[6]) for row in alike["tasks"]], divided
        )
    within /= size * (size - 1)
    plain = float((x - x.mean(1, keepdim=True)).square().sum()) / size / (size - 1)
    if values == 2:
        assert within / truth == pytest.approx(1.0, abs=0.1)
    elif divided:
        assert within / truth == pytest.approx(1.0, abs=0.2)
    if divided:
        assert plain / truth > 1.2
    else:
        assert values == 2 or within == pytest.approx(plain)


def test_a_sample_with_most_of_a_groups_variance_is_not_left_out_of_it():
    """Without it the rest would be divided by next to nothing."""
    torch.manual_seed(0)
    advantages = torch.tensor([0.0] * 14 + [0.01, 1.0], dtype=torch.float64)
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    x = advantages[:, None] * torch.randn(16, 8, dtype=torch.float64)
    task, mean = torch.zeros(16, dtype=torch.int64), x.mean(0, keepdim=True)
    assert _within(x, mean, task, advantages) < 4 * float((x - mean).square().sum())


def pack_labels():
    packed = pack()
    return packed.labels[packed.labels != -100]


def test_the_recipe_says_it_in_train_jsonl(model_folder, tmp_path, short_canaries):
    pack().save(tmp_path / "p.safetensors")
    written = {}
    for name, settings in (
        ("on", {}),
        ("off", {"gradient_noise": False}),
        ("one", {"rows_per_microbatch": 100}),
    ):
        config = config_of(
            model_folder(),
            packed=str(tmp_path / "p.safetensors"),
            output_dir=str(tmp_path / name),
            **settings,
        )
        grpo_recipe.train_iteration(config, ALONE)
        written[name] = read_jsonl(tmp_path / name / "train.jsonl")[0]
        written[name]["bytes"] = (tmp_path / name / "checkpoint" / "model.safetensors").read_bytes()
    noise = written["on"]["gradient_noise"]
    assert noise["prompts"] == 5 and noise["samples"] == 20 and noise["pieces"] > 2
    assert noise["noise"] + noise["signal"] == pytest.approx(
        written["on"]["grad_norm"] ** 2, rel=1e-4
    )
    assert set(noise["layers"]) >= {"embeddings", "head"} and noise["nested"]["samples"] > 0
    assert (
        written["one"]["gradient_noise"]["pieces"] == 1
        and "noise" not in written["one"]["gradient_noise"]
    )
    assert "gradient_noise" not in written["off"]
    assert written["on"]["bytes"] == written["off"]["bytes"]  # looking changes nothing


def one_rank(rank, port, folder, output):
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = config_of(folder)
    with ranks(config) as here:
        seen, _, _ = seen_by(config, here)
        torch.save(seen, f"{output}/{rank}.pt")


@pytest.mark.e2e
@pytest.mark.long
def test_two_processes_see_what_one_does(model_folder, tmp_path):
    """The rows of either are pieces, and padding rows have no share.

    Long: only this gathers the noise of several processes. One process: above; several, without
    noise: tests/e2e/test_parallel.py.
    """
    alone, _, _ = seen_by(config_of(model_folder()))
    with held_port() as port:
        multiprocessing.spawn(one_rank, (port, str(model_folder()), str(tmp_path)), nprocs=2)
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name in ("squares", "whole", "shares", "counts", "within", "between", "mean", "split"):
        assert both[0][name] == both[1][name], name
    assert both[0]["layers"] == alone["layers"]
    assert both[0]["whole"] == pytest.approx(alone["whole"], rel=1e-4)
    mine = sorted(sum(squares) for squares in both[0]["squares"] if sum(squares))
    assert mine == pytest.approx(sorted(sum(squares) for squares in alone["squares"]), rel=1e-4)
    assert sorted(share for share in both[0]["shares"] if share) == pytest.approx(
        sorted(alone["shares"])
    )
    for name in ("counts", "within", "between", "mean", "split"):
        assert both[0][name] == pytest.approx(alone[name], rel=1e-4), name
    assert step_noise(both[0] | {"seconds": 0.0}).noise == pytest.approx(
        step_noise(alone | {"seconds": 0.0}).noise, rel=1e-3
    )
