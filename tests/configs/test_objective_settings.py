"""Settings of the objective that make no sense, by themselves or together, are told before anything
starts.
"""

import pytest

from ttrl.configs import GRPOConfig
from ttrl.configs.objective_settings import ObjectiveConfig
from ttrl.configs.run import TrainConfig
from ttrl.errors import ConfigError

REFERENCE = {"reference_model": "r"}
RIGHT = [
    {},
    {"objective": "ppo", "dual_clip": 3.0, "clip_low": 1.0, "clip_high": 0.28},
    {"objective": "clip_cov", "covariance_bounds": [0.5, 2]},
    {"objective": "kl_cov", "covariance_share": 1.0},
    {"kl_coefficient": 0.1, "kl_estimator": "full", "kl_after_steps": 5, **REFERENCE},
    {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1", "gamma": 0.0, **REFERENCE},
    {"token_rewards": "implicit", "kl_coefficient": 0.1, **REFERENCE},
    {"kl_coefficient": 0.1},  # the pack may hold the reference's log-probabilities
    {"token_rewards": "implicit", "implicit_lr": 0.0, **REFERENCE},
    {"entropy_coefficient": 0.01, "entropy_schedule": "linear", "entropy_until_step": 100},
    {
        "entropy_coefficient": 0.01,
        "entropy_schedule": "linear",
        "entropy_from_step": 99,
        "entropy_until_step": 100,
    },
    {
        "objective": "reinforce",
        "off_policy": "mask",
        "off_policy_cap": 5.0,
        "off_policy_floor": 0.5,
    },
    {
        "value_head": True,
        "value_clip": 0.2,
        "value_lr": 1e-4,
        "value_grad_in_decoder": True,
        "lam": 0.95,
    },
]
WRONG = [
    (
        {"objective": "grpo"},
        "objective is 'grpo'; ttrl.objectives has no 'grpo'; choose one of ppo, ",
    ),
    ({"clip_low": 1.5}, "clip_low is 1.5; it must be in [0, 1]"),
    ({"clip_high": -0.1}, "clip_high is -0.1; it must be at least 0"),
    ({"dual_clip": 1.0}, "dual_clip is 1.0; it must be above 1"),
    ({"objective": "clip_cov", "covariance_share": 0.0}, "covariance_share is 0.0"),
    (
        {"objective": "clip_cov", "covariance_bounds": [2.0, 1.0]},
        "covariance_bounds is [2.0, 1.0]; give the lower and the higher one",
    ),
    ({"objective": "clip_cov", "covariance_bounds": [1.0]}, "covariance_bounds is [1.0]"),
    ({"objective": "kl_cov", "kl_cov_coefficient": 0.0}, "kl_cov_coefficient is 0.0"),
    (
        {"kl_coefficient": 0.1, "kl_estimator": "full"},
        "kl_coefficient is above 0 and kl_estimator is 'full', but reference_model",
    ),
    ({"kl_coefficient": -0.1}, "kl_coefficient is -0.1"),
    ({"kl_after_steps": 5}, "kl_after_steps is 5 but kl_coefficient is 0"),
    (
        {"kl_in": "reward", "kl_estimator": "full", "kl_coefficient": 1.0, **REFERENCE},
        "kl_estimator is 'full' with kl_in 'reward'",
    ),
    (
        {"token_rewards": "implicit", "kl_coefficient": 0.1, "kl_in": "reward", **REFERENCE},
        "token_rewards is 'implicit' with kl_in 'reward'",
    ),
    (
        {"token_rewards": "implicit", "value_head": True, **REFERENCE},
        "token_rewards is 'implicit' with value_head",
    ),
    ({"token_rewards": "implicit", "implicit_beta": 0.0, **REFERENCE}, "implicit_beta is 0.0"),
    ({"token_rewards": "implicit", "implicit_lr": -1.0, **REFERENCE}, "implicit_lr is -1.0"),
    (
        {"token_rewards": "implicit"},
        "token_rewards is 'implicit', but reference_model is missing; name the model from which",
    ),
    ({"entropy_coefficient": -1.0}, "entropy_coefficient is -1.0"),
    (
        {"entropy_coefficient": 0.1, "entropy_schedule": "linear"},
        "entropy_schedule is 'linear' without entropy_until_step",
    ),
    (
        {"entropy_coefficient": 0.1, "entropy_until_step": 5},
        "entropy_until_step is 5 with entropy_schedule 'constant'",
    ),
    (
        {"entropy_schedule": "linear", "entropy_until_step": 5},
        "entropy_schedule is 'linear' but entropy_coefficient is 0",
    ),
    (
        {
            "entropy_coefficient": 0.1,
            "entropy_schedule": "linear",
            "entropy_from_step": 5,
            "entropy_until_step": 5,
        },
        "entropy_from_step is 5 and entropy_until_step 5; entropy_from_step must be",
    ),
    (
        {"entropy_coefficient": 0.1, "entropy_from_step": 5},
        "entropy_from_step is 5, but has no effect with entropy_schedule",
    ),
    (
        {"off_policy": "token", "off_policy_cap": 0.5},
        "off_policy_cap is 0.5; it must be at least 1",
    ),
    (
        {"off_policy": "mask", "off_policy_floor": 1.5},
        "off_policy_floor is 1.5; it must be in [0, 1]",
    ),
    ({"value_head": True, "gamma": 1.1}, "gamma is 1.1; it must be in [0, 1]"),
    ({"value_head": True, "lam": -0.1}, "lam is -0.1; it must be in [0, 1]"),
    ({"value_head": True, "value_coefficient": 0.0}, "value_coefficient is 0.0"),
    ({"value_head": True, "value_clip": 0.0}, "value_clip is 0.0; it must be above 0"),
]


def test_defaults_of_gspo_are_its_papers():
    """arXiv 2507.18071, section 5.1: clipping ranges of 3e-4 and 4e-4, and a mean over responses
    (equation 5).
    """
    bounds = {
        name: ObjectiveConfig(objective=name).policy_settings()
        for name in ("gspo", "cispo", "reinforce")
    }
    assert bounds == {
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
        "cispo": {"clip_low": 0.2, "clip_high": 0.2},
        "reinforce": {},
    }
    own = ObjectiveConfig(objective="gspo", clip_high=0.1).policy_settings()
    assert own == {"clip_low": 3e-4, "clip_high": 0.1}
    run = {"run": "r", "model": "m", "iterations": 1}
    assert (
        TrainConfig(**run, training={"objective": "gspo"}).resolved(cuda=False).aggregation
        == "sequence"
    )
    assert (
        TrainConfig(**run, training={"objective": "gspo"}, aggregation="token").resolved_aggregation
        == "token"
    )
    assert TrainConfig(**run).resolved(cuda=False).aggregation == "token"


NOTHING = [  # a setting, what it would do nothing with, and what it is for
    ({"clip_high": 0.28}, {"objective": "tanh"}, {"objective": "gspo"}),
    ({"clip_low": 1.0}, {"objective": "kl_cov"}, {"objective": "cispo"}),
    ({"dual_clip": 3.0}, {"objective": "reinforce"}, {"objective": "ppo"}),
    ({"covariance_share": 0.1}, {}, {"objective": "kl_cov"}),
    ({"covariance_bounds": [0.5, 2.0]}, {"objective": "kl_cov"}, {"objective": "clip_cov"}),
    ({"kl_cov_coefficient": 0.5}, {"objective": "clip_cov"}, {"objective": "kl_cov"}),
    ({"kl_in": "reward"}, {}, {"kl_coefficient": 0.1, **REFERENCE}),
    ({"off_policy_cap": 5.0}, {}, {"off_policy": "sequence"}),
    ({"off_policy_floor": 0.2}, {"off_policy": "token"}, {"off_policy": "mask"}),
    ({"implicit_beta": 0.1}, REFERENCE, {"token_rewards": "implicit", **REFERENCE}),
    ({"implicit_lr": 0.1}, REFERENCE, {"token_rewards": "implicit", **REFERENCE}),
    (
        {"gamma": 0.9},
        {"kl_coefficient": 0.1, **REFERENCE},
        {"kl_coefficient": 0.1, "kl_in": "reward", **REFERENCE},
    ),
    ({"gamma": 0.9}, {}, {"value_head": True}),
    ({"lam": 0.95}, {}, {"value_head": True}),
    ({"value_coefficient": 1.0}, {}, {"value_head": True}),
    ({"value_clip": 0.2}, {}, {"value_head": True}),
    ({"value_lr": 1e-3}, {}, {"value_head": True}),
    ({"value_grad_in_decoder": True}, {}, {"value_head": True}),
]


@pytest.mark.parametrize("values", RIGHT)
def test_right(values):
    config = ObjectiveConfig.parse(values, "here")
    assert ObjectiveConfig.parse(config.to_dict(), "again") == config


@pytest.mark.parametrize(("values", "problem"), WRONG)
def test_wrong(values, problem):
    with pytest.raises(ConfigError) as caught:
        ObjectiveConfig.parse(values, "here")
    (found,) = caught.value.problems
    assert found.startswith(problem)


@pytest.mark.parametrize(("setting", "without", "use"), NOTHING)
def test_a_setting_that_does_nothing_is_told(setting, without, use):
    ObjectiveConfig.parse(setting | use, "here")
    (name,) = setting
    with pytest.raises(ConfigError) as caught:
        ObjectiveConfig.parse(setting | without, "here")
    (found,) = caught.value.problems
    assert found.startswith(f"{name} is ") and "but has no effect with" in found


def test_a_penalty_that_can_do_nothing():
    values = {
        "model": "m",
        "packed": "p",
        "output_dir": "o",
        "objective": "kl_cov",
        "off_policy": "token",
    }
    with pytest.raises(
        ConfigError, match="'kl_cov' with off_policy 'token' and updates_per_iteration 1"
    ):
        GRPOConfig.parse(values, "test")
    GRPOConfig.parse(values | {"updates_per_iteration": 2}, "test")
    # The sampler may be older: the recipe warns.
    GRPOConfig.parse(values | {"off_policy": "none"}, "test")
