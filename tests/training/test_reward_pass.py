"""The implicit reward model of PRIME: its training, its rewards, and what is stored of it."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import random_samples

from ttrl import grpo_recipe
from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.errors import RunFolderError
from ttrl.system.files import read_jsonl
from ttrl.training.models.weights import iter_weights
from ttrl.training.parallel.distributed import Ranks
from ttrl.training.reward_pass import outcome_losses

pytestmark = pytest.mark.usefixtures("short_canaries")
HERE = Ranks(0, 1, torch.device("cpu"))
BETA = 0.4
LORA = {"lora_rank": 2, "lora_targets": ["q_proj", "v_proj", "w1", "w2"]}
STORED = "state/reward_model/optimizer.safetensors"


def some_samples(outcomes=(0.0, 1.0, 0.3)):
    """Groups of different outcomes."""
    return [
        dataclasses.replace(sample, reward=outcomes[place % len(outcomes)])
        for place, sample in enumerate(random_samples(8, prompts=(1, 3, 6), completions=5))
    ]


@pytest.fixture
def train(model_folder, tmp_path):
    """Trains an iteration on samples, and returns its folder; `after`: the one to continue."""
    count = 0

    def train(samples, after=None, **settings):
        nonlocal count
        count += 1
        pack = tmp_path / f"packed{count}.safetensors"
        packed_tensors_from_tokenized_results(
            samples, seq_len=48, pad_id=0, aggregation="sequence"
        ).save(pack)
        values = {
            "model": str(model_folder() if after is None else after / "checkpoint"),
            "state": None if after is None else str(after / "state"),
            "packed": str(pack),
            "output_dir": str(tmp_path / f"out{count}"),
            "device": "cpu",
            "token_rewards": "implicit",
            "implicit_beta": BETA,
            "objective": "reinforce",
            "rows_per_microbatch": 1,
            "measure_peak": False,
            "iteration": count,
        }
        if "lora_rank" in settings:
            values["lora_base"] = str(model_folder())
        else:
            values["reference_model"] = str(model_folder())
        grpo_recipe.train_iteration(GRPOConfig.parse({**values, **settings}, "test"), HERE)
        return tmp_path / f"out{count}"

    return train


class Prime:
    """PRIME in float64, one sample after the other, by transformers and autograd: on each sample's
    own tokens, without rows, masks, swaps or microbatches.
    """

    def __init__(self, load, folder):
        self.policy, self.rewards, self.reference = (load(folder) for _ in range(3))

    @staticmethod
    def logprobs(model, sample):
        ids = torch.tensor(sample.token_ids)
        all_of_them = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
        begin = sample.prompt_length
        return all_of_them[begin - 1 : -1].gather(1, ids[begin:, None])[:, 0]

    def iteration(self, samples, lr, reward_lr):
        ratios = [
            self.logprobs(self.rewards, sample) - self.logprobs(self.reference, sample).detach()
            for sample in samples
        ]
        loss = 0.0
        for ratio, sample in zip(ratios, samples, strict=True):
            right = 1 / (1 + torch.exp(-BETA * ratio.sum()))
            loss -= sample.reward * right.log() + (1 - sample.reward) * (1 - right).log()
        loss = loss / len(samples)
        objective = 0.0
        for place, sample in enumerate(samples):
            own = BETA * ratios[place].detach()
            others = [
                other
                for other, one in enumerate(samples)
                if one.task_id == sample.task_id and other != place
            ]
            usual = sum(float(BETA * ratios[other].detach().mean()) for other in others)
            outcome = sample.reward - sum(samples[o].reward for o in others) / len(others)
            for t, logprob in enumerate(self.logprobs(self.policy, sample)):
                ahead = (own[t:] - usual / len(others)).sum()
                objective -= (ahead + outcome) * logprob / len(own) / len(samples)
        self.descend(self.rewards, loss, reward_lr)
        self.descend(self.policy, objective, lr)
        return float(loss)

    @staticmethod
    def descend(model, loss, lr):
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad


def distance(one, other):
    assert one.keys() == other.keys()
    return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))


def saved(model, folder):
    """A model's weights under the recipe's names."""
    model.save_pretrained(folder)
    return dict(iter_weights(folder))


def weights(path):
    """The reward model's weights."""
    return {
        name.removesuffix(".value"): tensor
        for name, tensor in load_file(path).items()
        if name.endswith(".value")
    }


def test_two_iterations_against_prime_in_float64(train, float64_reference, model_folder, tmp_path):
    """In the second one the reward model has learned, and its rewards of tokens count."""
    settings = {"optimizer": "sgd", "lr": 0.1, "implicit_lr": 0.3, "max_grad_norm": None}
    samples = some_samples()
    prime = Prime(float64_reference, model_folder())
    start = saved(prime.policy, tmp_path / "start")
    out = None
    for number in range(2):
        out = train(samples, out, **settings)
        loss = prime.iteration(samples, settings["lr"], settings["implicit_lr"])
        (line,) = read_jsonl(out / "train.jsonl")
        assert line["reward_model_loss"] == pytest.approx(loss, rel=1e-5)
        if not number:
            assert loss == pytest.approx(math.log(2))
        assert line["flops_by_part"]["reward_model"] > line["flops_by_part"]["training"]
        expected = saved(prime.policy, tmp_path / f"policy{number}")
        found = dict(iter_weights(out / "checkpoint"))
        assert distance(found, expected) < 1e-3 * distance(start, expected)
        expected = saved(prime.rewards, tmp_path / f"rewards{number}")
        assert distance(weights(out / STORED), expected) < 1e-3 * distance(start, expected)


def test_losses_of_samples_without_tokens_and_of_sure_ones():
    """A sum far from 0 is neither infinite nor NaN."""
    logprobs = torch.tensor([-1.0, -2.0, -3e4], requires_grad=True)
    losses, rewards = outcome_losses(
        logprobs,
        torch.tensor([-2.0, -4.0, -1.0]),
        torch.tensor([0, 0, 2]),
        torch.tensor([1.0, 0.0, 1.0]),
        0.5,
    )
    assert rewards.tolist() == [1.5, 0.0, pytest.approx(-14999.5)]
    assert losses.tolist() == pytest.approx([math.log1p(math.exp(-1.5)), math.log(2), 14999.5])
    losses.sum().backward()
    off = 1 / (1 + math.exp(-1.5)) - 1
    assert logprobs.grad.tolist() == pytest.approx([0.5 * off, 0.5 * off, -0.5])


@pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "adapter"])
def test_it_learns_outcomes_and_leaves_the_policy_alone(settings, train, model_folder):
    """With a learning rate of its own; the policy's is 0 here. An adapter learns next to the
    policy's, and neither touches their base.
    """
    samples = some_samples((0.0, 1.0))
    out = None
    for _ in range(8):
        out = train(samples, out, lr=0.0, implicit_lr=0.01, **settings)
    (line,) = read_jsonl(out / "train.jsonl")
    assert line["reward_model_loss"] < 0.5 * math.log(2)
    assert line["reward_model_accuracy"] > 0.85
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model_folder(), out / "checkpoint")
    )
    assert distance(before, after) == 0
    names = weights(out / STORED).keys()
    assert all(name.endswith(("lora_a", "lora_b")) for name in names) == bool(settings)


def test_rewards_beyond_outcomes_count_as_the_nearer_one(train, caplog):
    samples = some_samples((-2.0, 1.5))
    cut = [dataclasses.replace(one, reward=min(1.0, max(0.0, one.reward))) for one in samples]
    settings = {"lr": 0.0, "implicit_lr": 0.01}
    found = weights(train(samples, **settings) / STORED)
    assert "the rewards of 15 of 15 samples count as the nearer of the two" in caplog.text
    assert distance(found, weights(train(cut, **settings) / STORED)) == 0


def test_a_state_without_it_begins_at_the_reference(train):
    """So a run can switch it on; a damaged one is named."""
    samples = some_samples()
    plain = train(samples, token_rewards="none", implicit_beta=0.05)
    later = train(samples, plain)
    assert read_jsonl(later / "train.jsonl")[0]["reward_model_loss"] == pytest.approx(math.log(2))
    path = later / STORED
    tensors = load_file(path)
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, path)
    with pytest.raises(
        RunFolderError, match=r"reward_model: the optimizer state belongs to another"
    ):
        train(samples, later)
