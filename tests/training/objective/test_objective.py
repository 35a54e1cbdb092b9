"""Objectives made from configs: the parts and their sum, the schedules, and what each says it
needs.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from ttrl.configs.objective import ObjectiveConfig
from ttrl.training.objective import losses
from ttrl.training.objective.divergences import k1_divergence, k2_divergence
from ttrl.training.objective.objective import objective_from


def make(**values):
    config = ObjectiveConfig(**values)
    assert config.problems() == []
    return objective_from(config)


@dataclass
class Batch:
    new: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor
    samples: torch.Tensor

    def loss(self, objective, **extras):
        return objective.loss(self.new, self.sampled, self.advantages, self.samples, extras)


def batch(dtype=torch.float64):
    new = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7], dtype=dtype, requires_grad=True)
    sampled = torch.tensor([-1.5, -1.9, math.nan, -1.0, 0.0], dtype=dtype)
    return Batch(
        new,
        sampled,
        torch.tensor([1.0, -1.0, 2.0, -0.5, 0.3], dtype=dtype),
        torch.tensor([4, 4, 9, 9, 9]),
    )


def gradient(loss, new):
    return torch.autograd.grad(loss.sum(), new, retain_graph=True)[0]


CHOSEN = torch.tensor([True, False, False, True, False])
KNOWN = [-1.5, -1.9, -0.5, -1.0, 0.0]  # an unknown one is the current one


def test_the_default_is_ppo_with_nothing_added():
    """Bit for bit what the recipe computed before there were objectives."""
    given = batch(torch.float32)
    ratio = torch.exp((given.new - torch.tensor(KNOWN)).clamp(-20, 20))
    expected = -torch.minimum(ratio * given.advantages, ratio.clamp(0.8, 1.2) * given.advantages)
    loss, facts = given.loss(make())
    assert torch.equal(loss, expected) and torch.equal(facts["policy_loss"], expected)
    assert torch.equal(gradient(loss, given.new), gradient(expected, given.new))
    assert set(facts) == {"policy_loss", "ratio", "clipped_low", "clipped_high"}
    assert facts["clipped_low"].tolist() == [0, 0, 0, 1, 0] and facts["clipped_high"].tolist() == [
        1,
        0,
        0,
        0,
        0,
    ]
    assert make().per_token
    assert not any(getattr(make(), name) for name in dir(make()) if name.startswith("needs_"))


@pytest.mark.parametrize(
    "name", ["reinforce", "tanh", "gspo", "cispo", "clip_cov", "kl_cov", "dual clip"]
)
def test_each_objective_is_its_loss(name):
    given = batch()
    known = torch.tensor(KNOWN, dtype=torch.float64)
    new, advantages = given.new, given.advantages
    values = {"objective": name} if name != "dual clip" else {"dual_clip": 1.1}
    if name in ("gspo", "cispo", "clip_cov", "dual clip"):
        values |= {"clip_low": 0.1, "clip_high": 0.15}
    objective = make(**values, **({"kl_cov_coefficient": 0.4} if name == "kl_cov" else {}))
    expected = {
        "reinforce": losses.reinforce_loss(new, advantages),
        "tanh": losses.tanh_loss(new, known, advantages),
        "gspo": losses.gspo_loss(new, known, advantages, given.samples, 0.1, 0.15),
        "cispo": losses.cispo_loss(new, known, advantages, 0.1, 0.15),
        "clip_cov": losses.clip_cov_loss(new, known, advantages, CHOSEN, 0.1, 0.15),
        "kl_cov": losses.kl_cov_loss(new, known, advantages, CHOSEN, 0.4),
        "dual clip": losses.clipped_ratio_loss(new, known, advantages, 0.1, 0.15, 1.1),
    }[name][0]
    loss, facts = given.loss(objective, chosen=CHOSEN)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradient(loss, new), gradient(expected, new), rtol=0, atol=0)
    assert not any(fact.requires_grad for fact in facts.values()) and all(
        fact.shape == (5,) for fact in facts.values()
    )
    assert objective.per_token == (name != "gspo")
    assert objective.needs_prepass == (name in ("clip_cov", "kl_cov")) == ("chosen" in facts)


def test_clip_fractions():
    """ratios: 1.65, 0.90, 1, 0.61, 0.50; advantages: +, -, +, -, +"""

    def clipped(**values):
        _, facts = batch().loss(make(**values), chosen=CHOSEN)
        return facts["clipped_low"].tolist(), facts["clipped_high"].tolist()

    nothing = [0.0] * 5
    assert (
        clipped(objective="reinforce")
        == clipped(objective="tanh")
        == clipped(objective="kl_cov")
        == (nothing, nothing)
    )
    assert clipped(objective="clip_cov") == clipped() == ([0, 0, 0, 1, 0], [1, 0, 0, 0, 0])
    assert clipped(objective="cispo") == ([0, 0, 0, 1, 1], [1, 0, 0, 0, 0])  # whatever the sign
    # whole samples: e^0.2 and e^-0.4
    assert clipped(objective="gspo") == ([0, 0, 0, 1, 0], [1, 0, 0, 0, 0])
    assert clipped(objective="gspo", clip_low=0.5, clip_high=0.3) == (nothing, nothing)
    _, facts = batch().loss(make(dual_clip=1.01, clip_low=0.5))
    assert facts["dual_clipped"].sum() == 0  # the only ratio above it has a positive advantage


@pytest.mark.parametrize("kind", ["token", "sequence", "mask"])
def test_off_policy_correction(kind):
    """π/π_start in the ratio, min(π_start/π_sampler, cap) before it; tokens of unknown logprob
    weigh 1.
    """
    given = batch()
    start = torch.tensor([-1.2, -2.5, -0.4, -1.6, -0.6], dtype=torch.float64)
    each = [math.exp(d) for d in (0.3, -0.6, 0.0, -0.6, -0.6)]
    weights = {
        "token": [min(w, 1.2) for w in each],
        "sequence": [math.exp(-0.3)] * 2 + [math.exp(-1.2)] * 3,
        "mask": [0.0, each[1], 1.0, each[3], each[4]],
    }[kind]
    objective = make(off_policy=kind, off_policy_cap=1.2)
    loss, facts = given.loss(objective, start_logprobs=start)
    expected, _ = losses.clipped_ratio_loss(given.new, start, given.advantages, 0.2, 0.2)
    expected = expected * torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        gradient(loss, given.new), gradient(expected, given.new), rtol=1e-12, atol=0
    )
    assert facts["correction"].tolist() == pytest.approx(weights)
    assert facts["capped"].tolist() == [0.0 if kind == "sequence" else 1.0, 0, 0, 0, 0]
    assert objective.needs_start_logprobs and objective.per_token == (kind != "sequence")


def test_the_first_step_of_an_iteration_starts_from_where_it_is():
    given = batch()
    objective = make(off_policy="token")
    missing, _ = given.loss(objective, start_logprobs=None)
    stated, _ = given.loss(objective, start_logprobs=given.new.detach())
    torch.testing.assert_close(missing, stated, rtol=0, atol=0)
    torch.testing.assert_close(
        gradient(missing, given.new), gradient(stated, given.new), rtol=0, atol=0
    )
    with pytest.raises(KeyError):
        given.loss(objective)  # forgotten is not the same as none


def test_kl_in_the_loss_and_its_schedule():
    reference = torch.tensor([-1.0, -1.0, math.nan, -2.0, -0.1], dtype=torch.float64)
    objective = make(kl_coefficient=0.3, reference_model="r", kl_estimator="k2", kl_after_steps=10)
    given = batch()
    plain, _ = given.loss(make())
    for step, beta in ((0, 0.0), (9, 0.0), (10, 0.3), (500, 0.3)):
        here = objective.at(step)
        assert here.kl_coefficient == here.kl_in_loss == beta and here.kl_in_reward == 0
        assert here.needs_reference == (beta > 0) and here.per_token
        loss, facts = given.loss(here, reference_logprobs=reference)
        expected = plain + beta * k2_divergence(given.new, reference)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert ("kl" in facts) == (beta > 0)
    assert facts["kl"].tolist() == pytest.approx(k2_divergence(given.new, reference).tolist())
    assert facts["kl_loss"].tolist() == pytest.approx(
        (0.3 * k2_divergence(given.new, reference)).tolist()
    )
    loss, _ = given.loss(
        make(kl_coefficient=0.3, reference_model="r", kl_estimator="k1"),
        reference_logprobs=reference,
    )
    torch.testing.assert_close(
        loss, plain + 0.3 * k1_divergence(given.new, reference), rtol=1e-12, atol=0
    )


def test_full_kl_and_entropy_come_from_the_head_with_their_gradients():
    given = batch()
    plain, _ = given.loss(make())
    objective = make(
        kl_coefficient=0.5, reference_model="r", kl_estimator="full", entropy_coefficient=0.01
    )
    divergence, entropy = given.new.square(), given.new * -3  # of any form
    loss, facts = given.loss(objective, divergence=divergence, entropy=entropy)
    torch.testing.assert_close(loss, plain + 0.5 * divergence - 0.01 * entropy)
    torch.testing.assert_close(
        gradient(loss, given.new), gradient(plain, given.new) + given.new.detach() + 0.03
    )
    assert facts["entropy_loss"].tolist() == pytest.approx((-0.01 * entropy).tolist())
    assert objective.needs_divergence_grad and objective.needs_entropy_grad
    assert not objective.per_token and not objective.needs_reference


def test_entropy_schedule():
    constant = make(entropy_coefficient=0.2)
    assert [constant.at(step).entropy_coefficient for step in (0, 5, 10**6)] == [0.2, 0.2, 0.2]
    linear = make(entropy_coefficient=0.2, entropy_schedule="linear", entropy_until_step=10)
    assert [linear.at(step).entropy_coefficient for step in (0, 5, 10, 11)] == pytest.approx(
        [0.2, 0.1, 0.0, 0.0]
    )
    assert not linear.per_token and linear.at(10).per_token  # the cheaper head again
    late = make(
        entropy_coefficient=0.2,
        entropy_schedule="linear",
        entropy_from_step=6,
        entropy_until_step=10,
    )
    assert [late.at(step).entropy_coefficient for step in (0, 6, 8, 10, 11)] == pytest.approx(
        [0.2, 0.2, 0.1, 0.0, 0.0]
    )
    assert "entropy_loss" not in batch().loss(linear.at(10))[1]


def test_what_is_in_the_reward_is_not_in_the_loss():
    given = batch()
    plain, _ = given.loss(make())
    for values in (
        {"kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
        {"token_rewards": "implicit"},
    ):
        objective = make(**values, reference_model="r")
        assert (
            objective.needs_token_rewards
            and objective.needs_reference
            and objective.kl_in_loss == 0
            and objective.per_token
        )
        torch.testing.assert_close(given.loss(objective)[0], plain, rtol=0, atol=0)
    assert make(value_head=True).needs_token_rewards and not make(value_head=True).needs_reference
    late = make(kl_coefficient=0.5, kl_in="reward", reference_model="r", kl_after_steps=3)
    assert not late.needs_token_rewards and late.at(3).kl_in_reward == 0.5


def test_tokens_are_chosen_by_covariance():
    given = batch()
    new, keys = given.new.detach(), torch.arange(5)
    rest = (new, given.sampled, given.advantages, keys)
    values = ((new - new.mean()) * (given.advantages - given.advantages.mean())).tolist()
    # -0.0896, 1.1804, 1.0496, 0.3024, -0.0264 in this order
    (best,) = (
        make(objective="kl_cov", covariance_share=0.2)
        .choose(*rest, seed=0)
        .nonzero()
        .flatten()
        .tolist()
    )
    assert best == max(range(5), key=values.__getitem__) == 1
    chosen = make(objective="clip_cov", covariance_share=1.0, covariance_bounds=(0.1, 1.1)).choose(
        *rest, seed=0
    )
    # 1 is above the bounds, 3 is silenced by PPO's clipping already.
    assert chosen.tolist() == [False, False, True, False, False]


def test_no_trained_token_at_all():
    hidden = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    objective = make(
        off_policy="sequence",
        objective="gspo",
        kl_coefficient=1.0,
        reference_model="r",
        entropy_coefficient=1.0,
    )
    extras = {"start_logprobs": None, "reference_logprobs": empty, "entropy": empty}
    loss, facts = objective.loss(
        hidden * 1, empty, empty, torch.zeros(0, dtype=torch.int64), extras
    )
    loss.sum().backward()
    assert hidden.grad.shape == (0,) and all(fact.shape == (0,) for fact in facts.values())
