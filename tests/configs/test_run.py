"""TrainConfig: what it refuses before anything starts, and what it writes into a recipe's
config.
"""

import dataclasses
import os

import numpy as np
import pytest
import yaml

from ttrl import TrainConfig
from ttrl.configs import GRPOConfig
from ttrl.configs.machines import gpus_of_a_server
from ttrl.errors import ConfigError


def config(**changes):
    return TrainConfig(**({"run": "r", "model": "m", "iterations": 1} | changes))


def problems(**changes):
    with pytest.raises(ConfigError) as caught:
        config(**changes).check("TrainConfig")
    return caught.value.problems


def test_defaults_are_right():
    assert config().check("TrainConfig") == config()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"iterations": 0}, "iterations is 0; it must be at least 1"),
        ({"iterations": True}, "iterations is True; it must be a whole number"),
        ({"samples_per_task": 1}, "set it to 2 or more"),
        ({"temperature": 0}, "greedy samples of a task are equal"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"aggregation": "constant"}, "the others take none"),
        ({"constant_length": 10}, "the others take none"),
        ({"keep_checkpoints": 2}, "keep_checkpoints is 2; it must be at least 3"),
        (
            {"weight_sync": "inplace"},
            "weight_sync is 'inplace'; it must be one of 'auto', 'reload', 'restart'",
        ),
        (
            {"seq_len": 500, "max_tokens": 501},
            "seq_len is 500, below max_tokens 501: raise it, or set too_long to 'truncate'",
        ),
        ({"sampling": {"n": 4}}, "sampling: 'n' has a setting of its own"),
        ({"training": {"packed": "x"}}, "training: 'packed' is set by the loop"),
        (
            {"training": {"learning_rate": 1e-4}},
            "training: unknown key 'learning_rate'; did you mean 'lr'?",
        ),
        (
            {"training": {"max_tokens": 9}},
            "training: 'max_tokens' is a setting of the run, not of its recipe",
        ),
        (
            {"training": {"zzz": 9}},
            "training: unknown key 'zzz'; `ttrl config` lists all",
        ),
        ({"lr": 1e-4}, "unknown key 'lr'; write training={'lr': …}"),
        ({"learning_rate": 1e-4}, "unknown key 'learning_rate'; write training={'lr': …}"),
        ({"num_generations": 8}, "unknown key 'num_generations'; did you mean 'samples_per_task'?"),
        ({"max_model_len": 8}, "unknown key 'max_model_len'; write server={'max_model_len': …}"),
        ({"training": {"lrr": 1e-4}}, "training: unknown key 'lrr'; did you mean 'lr'?"),
        ({"training": {"lr": "fast"}}, "training: lr is 'fast'; it must be a number"),
        (
            {"training": {"lr_schedule": "linear"}},
            "training: lr_schedule 'linear' needs total_steps",
        ),
        ({"training": {"lr_rows": 0}}, "training: lr_rows is 0; it must be at least 1"),
        (
            {"training": {"max_skipped_steps": -1}},
            "training: max_skipped_steps is -1; it must be at least 0",
        ),
        ({"training": "lr=1"}, "training is 'lr=1', an unreadable file"),
        ({"training": {"lr": np.float64(1e-4)}}, "training holds"),
        ({"server": {"max_model_len": np.int64(5)}}, "server holds"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        (
            {"cluster": "auto", "weight_sync": "memory"},
            "weight_sync is 'memory', but the servers of a cluster read files",
        ),
        (
            {"advantages": "median"},
            "advantages is 'median'; it must be one of 'std', 'mean', 'leave_one_out', 'batch'",
        ),
        ({"advantage_std_floor": 0}, "advantage_std_floor is 0.0; it must be above 0"),
        (
            {"advantage_clip": 0.0},
            "advantage_clip is 0.0; it must be above 0, or null for no clipping",
        ),
        ({"reward_power": -1}, "reward_power is -1.0; it must be above 0"),
        ({"surprise_bonus": 1.5}, "surprise_bonus is 1.5; it must be in [0, 1]"),
        ({"surprise_until": "end"}, "surprise_until is 'end' without a surprise_bonus"),
        (
            {"too_long": "cut"},
            "too_long is 'cut'; it must be one of 'drop', 'error', 'truncate', 'extend'",
        ),
        ({"share": "all"}, "share is 'all'; it must be one of 'tree', 'prompt', 'none'"),
        ({"dynamic_sampling": 0}, "dynamic_sampling is 0; it must be at least 1"),
        ({"max_extra_tasks": 4}, "max_extra_tasks is set without dynamic_sampling"),
        ({"dynamic_sampling": 97}, "dynamic_sampling is 97, but an iteration has at most 96 tasks"),
        ({"dynamic_sampling": 38, "max_extra_tasks": 5}, "at most 37 tasks; raise max_extra_tasks"),
    ],
)
def test_what_is_refused(changes, text):
    [problem] = problems(**changes)
    assert text in problem


def test_all_problems_at_once():
    found = problems(
        iterations="ten",
        seq_len=0,
        training={"lrr": 1, "clip_low": 2},
        sampling={"model": "x"},
        device="tpu",
    )
    for text in (
        "iterations is 'ten'",
        "seq_len is 0",
        "did you mean 'lr'?",
        "clip_low is 2",
        "sampling: 'model'",
        "device is 'tpu'",
    ):
        assert any(text in problem for problem in found), text
    assert len(found) == 6


def test_defaults_are_those_of_a_config_that_gives_nothing_else():
    defaults = TrainConfig.defaults()
    assert config().to_dict() == {"run": "r", "model": "m", "iterations": 1} | defaults
    assert not {"run", "model", "iterations"} & defaults.keys() and defaults["too_long"] == "drop"


def test_kl_needs_no_reference_from_the_person():
    assert config(training={"kl_coefficient": 0.1}).check("TrainConfig").training == {
        "kl_coefficient": 0.1
    }


@pytest.mark.parametrize(
    ("training", "needed"),
    [
        ({}, False),
        ({"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, True),
        ({"token_rewards": "implicit"}, True),
        ({"kl_coefficient": 0.1, "kl_estimator": "full", "kl_after_steps": 100}, True),
        (
            {
                "objective": "gspo",
                "value_head": True,
                "off_policy": "token",
                "lr_rows": 8,
                "profile_steps": 1,
            },
            False,
        ),
        (
            {
                "objective": "clip_cov",
                "covariance_bounds": [0.5, 4],
                "max_skipped_steps": 0,
                "measure_peak": False,
            },
            False,
        ),
    ],
)
def test_the_recipe_s_options_pass_through(training, needed):
    """… and the loop gives it the reference model where the objective needs one."""
    made = config(training=training).check("TrainConfig").recipe_config({})
    assert {name: getattr(made, name) for name in training} == training | (
        {"covariance_bounds": (0.5, 4.0)} if "covariance_bounds" in training else {}
    )
    assert made.needs_reference == needed
    assert (
        GRPOConfig.parse(
            yaml.safe_load(yaml.safe_dump(made.to_dict())), "as written for the recipe"
        )
        == made
    )


ADVANTAGES = {
    "advantages": "mean",
    "advantage_std_floor": 0.1,
    "advantage_clip": 2.0,
    "reward_power": 2.0,
    "surprise_bonus": 0.1,
}


@pytest.mark.parametrize("training", [{"value_head": True}, {"token_rewards": "implicit"}])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_settings_of_advantages_that_the_recipe_makes_itself(name, training):
    change = {name: ADVANTAGES[name]}
    assert config(**change).problems() == config(training=training).problems() == []
    [problem] = problems(training=training, **change)
    assert (
        problem.startswith(f"{name} is ")
        and "the recipe computes advantages of graders' rewards" in problem
    )


def test_recipe_config_is_training_and_what_the_loop_sets():
    values = {
        "model": "/a",
        "packed": "/b",
        "output_dir": "/c",
        "state": None,
        "iteration": 7,
        "device": "cpu",
    }
    made = config(seed=3, training={"lr": "1e-4", "clip_high": 0.28}).recipe_config(values)
    assert (made.lr, made.clip_high, made.seed, made.iteration) == (1e-4, 0.28, 3, 7)
    assert (made.model, made.packed, made.output_dir, made.state) == ("/a", "/b", "/c", None)


@pytest.mark.parametrize(
    ("cuda", "device", "dtype"), [(False, "cpu", "fp32"), (True, "cuda", "bf16")]
)
def test_resolved_says_what_the_machine_decides(cuda, device, dtype):
    made = config(nproc_per_node=2).resolved(cuda=cuda)
    assert (made.device, made.dtype) == (device, dtype)
    assert made.num_threads == max(1, (os.cpu_count() or 1) // 2)
    assert made.resolved(cuda=not cuda) == made  # nothing is left open


def test_gpus_are_shared_unless_they_are_split():
    shared = [
        config(device="cuda", **more).shares_gpu
        for more in ({}, {"placement": "split"}, {"servers": 0})
    ]
    assert shared == [True, False, False] and not config(device="cpu").shares_gpu


def test_resolved_keeps_what_was_chosen():
    made = config(device="cpu", dtype="bf16", num_threads=3).resolved(cuda=True)
    assert (made.device, made.dtype, made.num_threads) == ("cpu", "bf16", 3)


def test_greedy_samples_may_be_several_as_in_older_runs():
    assert (
        config(validation_samples=4, validation_temperature=0).problems()
        == config(validation_samples=4).problems()
        == []
    )


def test_resolved_does_not_depend_on_the_cores_beyond_one():
    assert config(nproc_per_node=10_000).resolved(cuda=False).num_threads == 1


def test_servers_are_counted_wherever_they_are():
    """A share of the work is divided by their number, so it is never 0."""
    joined = {"joined_servers": ["http://10.0.0.7:8000"]}
    assert [
        config(**one).servers_in_all
        for one in ({}, {"servers": 2}, {"servers": 0, **joined}, joined)
    ] == [1, 2, 1, 2]
    assert [
        config(cluster="auto", **one).servers_in_all
        for one in ({}, {"servers": 8}, {"servers": 8, **joined})
    ] == [1, 8, 9]


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ({}, 1),
        ({"tensor-parallel-size": 4}, 4),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, 6),
        ({"dtype": "half"}, 1),
    ],
)
def test_the_gpus_of_a_server(arguments, gpus):
    assert gpus_of_a_server(arguments) == gpus


# Written by a version whose settings lay in seven classes, in another order; every setting is
# there.
OLD_CONFIG = """
{drift: "warn", drift_limits: {"mean": 0.1, "ess": null}, loggers: ["stdout"], trainer: "resident", trainer_memory: "keep",
trainer_restarts: 1, keep_best: 1, keep_every: 10, mirror: "s3://bucket/runs/old", servers: 1, joined_servers: [],
joined_key_file: null, joined_run: null, adapters: "auto", weight_check: "all", off_policy_steps: 1, nnodes: 1, rdzv_endpoint:
null, join_timeout: 600, run: "runs/old", model: "models/m", iterations: 3, tasks_per_iteration: 32,
samples_per_task: 16, max_tokens: 1024, tokens_per_iteration: null, max_staleness: null, temperature: 1.0, sampling: {},
cache: [], validation_samples: 1, validation_temperature: null, validation_metric: "reward", stop_at: null, advantages: "std",
advantage_std_floor: 0.05, advantage_clip: null, reward_power: 1.0, surprise_bonus: 0.0, surprise_until: null,
dynamic_sampling: null, max_extra_tasks: null, aggregation: "token", constant_length: null, seq_len: 4096, too_long: "drop",
share: "tree", training: {"lr": 0.0001, "lora_rank": 8, "max_skipped_steps": 1, "measure_peak": false}, nproc_per_node: 1,
num_threads: 2, device: "cpu", dtype: "fp32", weight_sync: "reload", server: {}, keep_checkpoints: 3, seed: 0}
"""


def test_config_yaml_of_an_older_version_means_the_same():
    values = yaml.safe_load(OLD_CONFIG)
    read, plain = TrainConfig.parse(values, "config.yaml").to_dict(), TrainConfig.defaults()
    assert read == {name: plain.get(name) for name in read} | {
        name: values[name] for name in values if name not in TrainConfig.gone
    }
    with pytest.raises(
        ConfigError, match=r"rdzv_endpoint is gone: several machines train on a Ray cluster"
    ):
        TrainConfig.parse(values | {"rdzv_endpoint": "10.0.0.7:29400"}, "config.yaml")
    assert TrainConfig(**values) == TrainConfig.parse(values, "config.yaml")


@pytest.mark.parametrize(
    ("settings", "sleeps", "stops"),
    [
        ({"weight_sync": "memory", "device": "cuda"}, True, True),
        ({"weight_sync": "memory", "device": "cuda", "placement": "split"}, False, False),
        ({"weight_sync": "memory", "device": "cuda", "off_policy_steps": 1}, False, False),
        ({"weight_sync": "memory", "device": "cpu"}, False, False),
        ({"weight_sync": "sleep", "device": "cpu"}, True, True),
        ({"weight_sync": "restart", "device": "cuda"}, False, True),
        ({"weight_sync": "reload", "device": "cuda"}, False, False),
    ],
    ids=str,
)
def test_servers_give_way_to_a_trainer_that_works_while_they_do_not(settings, sleeps, stops):
    config = TrainConfig(run="r", model="m", iterations=1, **settings)
    assert (config.server_sleeps, config.server_stops) == (sleeps, stops)


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({}, "memory"),
        ({"trainer": "once"}, "reload"),
        ({"training": {"lora_rank": 4}}, "reload"),
        ({"cache": ["somewhere"]}, "reload"),
        ({"joined_servers": ["http://10.0.0.7:8000"]}, "reload"),
        ({"weight_sync": "reload"}, "reload"),
    ],
)
def test_weights_go_through_memory_on_a_cpu_where_nobody_needs_files(settings, way, monkeypatch):
    monkeypatch.setenv("TTRL_SERVER_KEY", "k")
    config = TrainConfig(run="r", model="m", iterations=1, **settings)
    resolved = config.resolved(cuda=False)
    assert resolved.weight_sync == way and resolved.hands_over == (way == "memory")
    assert (resolved.files_because is None) == (way == "memory" or "weight_sync" in settings)
    # There the choice is `ttrl.plans.open_choices`'.
    assert config.resolved(cuda=True).weight_sync == "reload"
    some_take_it = {"cache", "joined_servers"} & settings.keys()
    asked = dataclasses.replace(config, weight_sync="memory").resolved(cuda=False)
    assert asked.hands_over == (not settings or bool(some_take_it) or "weight_sync" in settings)
    assert (
        TrainConfig(run="r", model="m", iterations=1, save_every=5).resolved(cuda=True).save_every
        == 1
    )
