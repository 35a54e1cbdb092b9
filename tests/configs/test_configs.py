"""Configs: all problems at once, strict types, and hints for what was probably meant."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ttrl.configs import Config, GRPOConfig, SFTConfig
from ttrl.errors import ConfigError


@dataclass(kw_only=True)
class Example(Config):
    name: str
    count: int
    rate: float = 0.5
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    share: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        return self.at_least(1, "count", "limit")


@dataclass(kw_only=True)
class WithPath(Config):
    place: os.PathLike[str]


def problems(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Example.parse(values, "here")
    assert str(caught.value).startswith("here: ")
    return caught.value.problems


def test_values_that_are_right():
    parsed = Example.parse(
        {"name": "x", "count": 3, "rate": 1, "limit": None, "words": ("a", "b")}, "here"
    )
    assert parsed == Example(name="x", count=3, rate=1.0, words=["a", "b"])
    assert type(parsed.rate) is float
    assert Example.parse(parsed.to_dict(), "again") == parsed


@pytest.mark.parametrize(
    ("given", "value"),
    [("1e-4", 1e-4), ("1.5", 1.5), (2, 2.0), (True, None), ("fast", None), ("nan", None)],
)
def test_floats_take_what_yaml_reads_as_text(given, value):
    if value is None:
        assert problems(name="x", count=1, rate=given) == [
            f"rate is {given!r}; it must be a number"
        ]
    else:
        assert (
            Example.parse({"name": "x", "count": 1, "rate": given, "share": given}, "here").rate
            == value
        )


@pytest.mark.parametrize("given", [math.nan, math.inf, -math.inf, "inf", None, [1.0]])
def test_floats_are_finite_numbers(given):
    assert problems(name="x", count=1, rate=given) == [f"rate is {given!r}; it must be a number"]


@pytest.mark.parametrize("given", [True, "3", 3.0, 2.5, None, "1e3"])
def test_whole_numbers_are_nothing_else(given):
    assert problems(name="x", count=given) == [f"count is {given!r}; it must be a whole number"]


@pytest.mark.parametrize("given", [1, 0, "true", None])
def test_flags_are_nothing_else(given):
    assert problems(name="x", count=1, flag=given) == [
        f"flag is {given!r}; it must be true or false"
    ]


@pytest.mark.parametrize("given", ["FAST", "", True, None, ["fast"], {}])
def test_literals(given):
    assert problems(name="x", count=1, mode=given) == [
        f"mode is {given!r}; it must be one of 'fast', 'slow'"
    ]


@pytest.mark.parametrize("given", ["3", True, 1.5])
def test_unions(given):
    assert problems(name="x", count=1, limit=given) == [
        f"limit is {given!r}; it must be a whole number or null"
    ]


def test_texts_and_paths():
    assert Example.parse({"name": Path("a/b"), "count": 1}, "here").name == "a/b"
    assert problems(name=5, count=1) == ["name is 5; it must be a string"]


@pytest.mark.parametrize("given", [5, ["a"], {1: 2}, None])
def test_mappings(given):
    assert problems(name="x", count=1, extra=given) == [
        f"extra is {given!r}; it must be a mapping with names as keys"
    ]


def test_lists():
    assert problems(name="x", count=1, words="abc") == [
        "words is 'abc'; it must be a list with each item a string"
    ]
    assert problems(name="x", count=1, words=[1]) == [
        "words is [1]; it must be a list with each item a string"
    ]


def test_a_near_miss_is_named_and_otherwise_all_keys():
    near, far = problems(name="x", count=1, cuont=2, zzz=3)
    assert near == "unknown key 'cuont'; did you mean 'count'?"
    assert (
        far == "unknown key 'zzz'; known keys: name, count, rate, flag, mode, limit, share, extra, "
        "words"
    )


def test_every_problem_at_once_even_where_a_required_value_is_wrong_or_missing():
    assert problems(cuont=1, count="many", rate="x", limit=0) == [
        "unknown key 'cuont'; did you mean 'count'?",
        "name is missing; it must be a string",
        "count is 'many'; it must be a whole number",
        "rate is 'x'; it must be a number",
        "limit is 0; it must be at least 1",
    ]


def test_the_message_counts_its_problems():
    with pytest.raises(ConfigError, match=r"(?s)here: 1 problem\n  - name is missing"):
        Example.parse({"count": 1}, "here")
    with pytest.raises(ConfigError, match="here: 2 problems"):
        Example.parse({}, "here")


def test_a_config_made_in_python_is_checked_alike():
    assert Example(name="x", count=1, rate="1e-2").check("here").rate == 0.01
    with pytest.raises(ConfigError, match="count is True"):
        Example(name="x", count=True).check("here")


def test_defaults_are_not_shared():
    first, second = Example(name="a", count=1), Example(name="b", count=1)
    first.extra["x"] = 1
    assert second.extra == {}
    given = {"y": 1}
    assert Example.parse({"name": "x", "count": 1, "extra": given}, "here").extra is not given


# The recipes' own


def grpo(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.parse({"model": "m", "output_dir": "o", "packed": "p", **values}, "recipe")
    return caught.value.problems


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lr": -1}, "lr is -1.0"),
        ({"beta1": 1.0}, "beta1 is 1.0; it must be in [0, 1)"),
        ({"eps": 0}, "eps is 0.0; it must be above 0"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0.0; it must be above 0, or null"),
        ({"lr_schedule": "cosine"}, "lr_schedule 'cosine' needs total_steps"),
        ({"total_steps": 10}, "total_steps is 10, but has no effect with lr_schedule 'constant'"),
        (
            {"lr_schedule": "linear", "warmup_steps": 10, "total_steps": 10},
            "warmup_steps (10) must be below total_steps (10)",
        ),
        ({"clip_low": 1.5}, "clip_low is 1.5; it must be in [0, 1]"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        (
            {"kl_coefficient": 0.1, "kl_estimator": "full"},
            "kl_coefficient is above 0 and kl_estimator is 'full', but reference_model is missing",
        ),
        ({"rows_per_microbatch": 0}, "rows_per_microbatch is 0"),
        ({"updates_per_iteration": 0}, "updates_per_iteration is 0"),
        ({"iteration": 0}, "iteration is 0"),
    ],
)
def test_values_that_the_grpo_recipe_refuses(values, text):
    [problem] = grpo(**values)
    assert text in problem


def test_the_sft_recipe_counts_its_own():
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*data is missing.*lr is -1.*steps is 0"):
        SFTConfig.parse({"model": "m", "output_dir": "o", "steps": 0, "lr": -1}, "recipe")


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer_in_backward": True, "max_grad_norm": None},
        {"optimizer_on_cpu": True, "max_grad_norm": None, "device": "cuda"},
        {"lora_rank": 4, "lora_dropout": 0.1},
    ],
)
def test_what_excludes_a_reward_model_is_named(wrong: dict[str, Any]) -> None:
    values = {"model": "m", "packed": "p", "output_dir": "o", "reference_model": "r", **wrong}
    assert GRPOConfig.parse(values, "here").problems() == []
    (name,) = wrong.keys() & {"optimizer_in_backward", "optimizer_on_cpu", "lora_dropout"}
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.parse({**values, "token_rewards": "implicit"}, "here")
    (problem,) = caught.value.problems
    assert problem.startswith(f"token_rewards 'implicit' with {name} {wrong[name]}, which ")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"momentum": 0.9}, "momentum is 0.9, which does nothing with optimizer 'adamw'"),
        ({"watch_kl": True}, "watch_kl is on, but reference_model is missing; set it"),
    ],
)
def test_settings_that_need_another_one(values: dict[str, Any], text: str) -> None:
    [problem] = grpo(**values)
    assert text in problem


def test_a_mixture_s_setting_is_refused_for_a_plain_model() -> None:
    values = {"model": "m", "packed": "p", "output_dir": "o", "router_replay": True}
    config = GRPOConfig.parse(values, "here")
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    found = config.problems_here("cpu", 1, shape)
    assert any("router_replay is for mixtures of experts" in problem for problem in found)
    assert not config.problems_here("cpu", 1, {**shape, "num_experts": 8})


def test_a_path_stays_a_path() -> None:
    config = WithPath.parse({"place": Path("a")}, "here")
    assert config.place == Path("a")
    with pytest.raises(ConfigError, match="place is 3; it must be a path"):
        WithPath.parse({"place": 3}, "here")
