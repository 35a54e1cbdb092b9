"""What is chosen for a machine's GPUs: it fits, says why, leaves alone what is set; refusals name
what would fit.
"""

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from ttrl import TrainConfig, plan
from ttrl.configs import GRPOConfig
from ttrl.costs.memory import Workload, left_parked, training_memory
from ttrl.costs.server_memory import beyond_budget, left_asleep, server_memory, token_cache_bytes
from ttrl.errors import ConfigError
from ttrl.loop.train import Parts, _chosen
from ttrl.plans.memory_plan import cpu_needs, host_needs, serving_of, shares_memory
from ttrl.plans.open_choices import IGNORE_VARIABLE, choose, refuse
from ttrl.plans.open_settings import CHOSEN, CHOSEN_ON_CPU, FULL_ON_CPU, as_begun, value_of
from ttrl.plans.plan_machine import gpu_named
from ttrl.system.console import Console

ROOT = Path(__file__).parents[2]
MODELS = json.loads((ROOT / "ttrl" / "costs" / "architectures.json").read_text())
GB = 1e9
WAYS = {
    "whole": {},
    "lora": {"training": {"lora_rank": 32}},
    "nf4": {"training": {"lora_rank": 32, "lora_base_dtype": "nf4"}},
    "overlapped": {"off_policy_steps": 1},
    "split": {"placement": "split"},
    "in place": {"weight_sync": "reload"},
    "long rows": {"seq_len": 16_384, "max_tokens": 8192},
}


def config_of(**settings):
    return TrainConfig(run="r", model="m", iterations=1, **settings)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.long] * (way in ("lora", "in place", "split")))
        for way in WAYS
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5_0.5b",
        "llama3.1_8b",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("qwen2.5_3b", "qwen2.5_32b", "llama3.3_70b")
        ),
    ],
)
@pytest.mark.parametrize(
    ("count", "size"),
    [
        (1, 24),
        (3, 80),
        *(pytest.param(*gpus, marks=pytest.mark.long) for gpus in ((2, 24), (1, 80), (8, 80))),
    ],
)
def test_what_is_chosen_is_whole_allowed_and_fits(count, size, name, way):
    """Long for three of five machines: only these try every way with two and eight GPUs. Smallest
    and oddest stay.

    Long for three of five models: only these fill three GPUs, or fit none of these machines; and
    for three of seven ways, of which split and in place are told, not chosen, and nf4 is LoRA with
    one choice more.
    """
    model, memory = MODELS[name], size * GB
    made = choose(model, config_of(**WAYS[way]), [memory] * count)
    if made.problem is not None:
        with pytest.raises(ConfigError):
            refuse(made)
        return
    config = made.config
    assert not config.problems() and choose(model, config, [memory] * count).reasons == {}
    now_and_then = {"server.max_model_len", "server.enable_nccl_comm_suspend"}
    assert all(value_of(config, name) is not None for name in CHOSEN if name not in now_and_then)
    recipe = config.recipe_config({"dtype": "bf16", "device": "cuda"})
    assert not recipe.problems_here("cuda", config.processes, model)
    each = value_of(config, "server.tensor_parallel_size")
    if config.placement == "split":
        assert config.processes_here + config.servers_here * each <= count
        assert config.weight_sync == ("memory" if "training" not in WAYS[way] else "reload")
    assert (
        config.processes_here <= count
        and config.servers_here * each <= count
        and config.servers_here >= 1
    )
    trainer = training_memory(
        model, recipe, Workload(config.seq_len), device="cuda", ranks=config.processes
    ).peak
    assert trainer <= made.trainer and made.trainer + made.kept <= 0.95 * memory
    allowed = value_of(config, "server.gpu_memory_utilization") * memory
    serving = serving_of(model, config, cuda=True, memory=memory)
    context = min(
        config.context or model["max_position_embeddings"], model["max_position_embeddings"]
    )
    needed = sum(server_memory(model, serving).values())
    needed += max(context, config.seq_len) * token_cache_bytes(model, serving)
    assert needed < 1.001 * allowed
    beyond = sum(beyond_budget(serving).values())
    if config.placement == "split":
        assert made.kept == 0 and allowed + beyond <= 0.97 * memory
    elif shares_memory(config, cuda=True):
        assert made.kept >= beyond and made.trainer + allowed + beyond <= 0.97 * memory
    else:
        assert made.kept == sum(left_asleep(model, serving).values())
        waiting = sum(left_parked(recipe, config.processes).values())
        assert allowed + beyond + waiting <= 0.97 * memory
    assert serving.sequences <= serving.step_tokens / 4
    assert serving.suspends == (serving.tensor_parallel > 1 and config.server_sleeps)


def test_the_plan_agrees(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5_7b"]))
    config = dataclasses.replace(config_of(), model=str(tmp_path))
    made = plan(config, gpu="8xH100")
    assert (made.processes, made.machine.gpus) == (8, 8) and not [
        line for line in made.warnings if "fit" in line
    ]
    assert made.memory.peak < 0.9 * made.memory.available and not made.memory.together
    assert made.chosen["weight_sync"].startswith(
        "memory (servers free their memory while the trainer works, and need no files"
    )
    assert "Chosen for these GPUs" in str(made) and made.memory.host_available is None
    host = made.memory.host
    assert host["trainer's weights and moments"] == pytest.approx(12 * made.parameters, rel=0.01)
    assert host["held out to servers"] == 2 * made.parameters and "held out to servers" in str(made)
    small = plan(config, gpu="RTX4090")
    [refusal] = [line for line in small.warnings if line.startswith("does not fit")]
    assert refusal.startswith("does not fit: the trainer needs") and "what would fit" in refusal
    assert "but even so it does not fit" in str(small) and "even so" not in str(made)
    on_cpu = plan(dataclasses.replace(config, device="cpu"))
    assert list(on_cpu.chosen) == [*CHOSEN_ON_CPU]
    assert "Chosen for this machine's memory, but even so it does not fit" in str(on_cpu)


@pytest.mark.parametrize(
    "way", [{}, {"off_policy_steps": 1}, {"training": {"optimizer": "adamw_8bit"}}], ids=str
)
def test_weights_go_through_memory_where_the_machine_has_enough(way):
    """… for what is parked and what is held out; files otherwise, with both figures. Adapters are
    files.
    """
    model, config = MODELS["qwen2.5_7b"], config_of(**way, save_every=5)
    ample, small = (choose(model, config, [80 * GB] * 8, host=host * GB) for host in (2000, 30))
    assert ample.config.weight_sync == "memory" and "need no files" in ample.reasons["weight_sync"]
    turns = "off_policy_steps" not in way
    assert small.config.weight_sync == ("sleep" if turns else "reload")
    assert re.search(
        r"without files, .* GiB of the machine's 27\.9 GiB of memory", small.reasons["weight_sync"]
    )
    assert (
        small.config.save_every == 1
        and not small.config.problems()
        and "save_every" not in ample.reasons
    )
    assert dataclasses.replace(small.config, weight_sync="memory", save_every=5) == ample.config
    adapters = choose(model, config_of(training={"lora_rank": 32}), [80 * GB] * 8, host=2000 * GB)
    assert (
        adapters.config.weight_sync == "sleep"
        and "an adapter's files are small" in adapters.reasons["weight_sync"]
    )


def test_a_trainer_that_works_in_a_host_too_small_for_it_is_refused():
    model, config = MODELS["qwen2.5_7b"], config_of(training={"cpu_offload": True})
    ample, small = (choose(model, config, [80 * GB], host=host * GB) for host in (300, 60))
    assert ample.problem is None
    assert re.search(
        r"cpu_offload needs .* GiB of the machine's own memory, but that is 55\.9 GiB",
        small.problem,
    )
    parked = choose(model, config_of(training={"lora_rank": 32}), [80 * GB], host=30 * GB)
    assert parked.problem is None  # read from files instead


@pytest.mark.parametrize(
    ("model", "settings", "longest"),
    [
        ({"max_position_embeddings": 512}, {}, 512),
        ({"n_positions": 512}, {}, 512),
        ({"text_config": {"max_position_embeddings": 512}}, {}, 512),
        ({"max_position_embeddings": 4096}, {"server": {"max_model_len": 512}}, 512),
        ({"max_position_embeddings": 512}, {"server": {"max_model_len": 2048}}, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": 4.0}}, {}, None),
        (
            {"max_position_embeddings": 512, "rope_parameters": {"full": {"factor": 4.0}}},
            {},
            None,
        ),
        ({"max_position_embeddings": 512}, {"joined_servers": ["http://other:8000/v1"]}, None),
        ({}, {}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("gpus", [[], [80 * GB]], ids=["cpu", "gpu"])
def test_completions_beyond_the_context_are_refused(model, settings, longest, gpus):
    """vLLM answers each such request with HTTP 400, once servers and trainer are up."""
    shape = MODELS["qwen2.5_0.5b"]
    if "text_config" in model:
        model = {"text_config": shape | model["text_config"]}
    else:
        model = shape | model
    for length in (511, 512, 2047, 2048):
        config = config_of(max_tokens=length, seq_len=8192, **settings)
        if longest is None or length < longest:
            refuse(choose(model, config, gpus, host=64 * GB))
            continue
        with pytest.raises(ConfigError, match=rf"max_tokens is {length}, but .* {longest} tokens"):
            refuse(choose(model, config, gpus, host=64 * GB))


def test_it_is_said_where_save_every_has_to_give_way(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5_7b"]))
    config = dataclasses.replace(config_of(save_every=5), model=str(tmp_path))
    parts = Parts(gpus=lambda: [80 * GB] * 8, host=lambda: 30 * GB)
    made = _chosen(config, {}, Console(), parts)
    assert made.resolved(cuda=True).save_every == 1
    line = (
        r"note: save_every is 1, not 5, because servers read the files of each iteration: without "
        r"files, .* machine's 27\.9 GiB"
    )
    assert re.search(line, capsys.readouterr().out)


def test_what_the_host_of_gpus_holds():
    def needs(**training):
        config = dataclasses.replace(
            config_of(training=training, weight_sync="memory", nproc_per_node=2), device="cuda"
        )
        return host_needs(
            MODELS["qwen2.5_7b"], config, config.recipe_config({"dtype": "bf16"})
        ), config

    total = MODELS["qwen2.5_7b"]["parameters"]
    there = "trainer's weights and moments"
    assert (
        needs()[0][there] == pytest.approx(12 * total, rel=0.01)
        and needs()[0]["held out to servers"] == 2 * total
    )
    assert needs(cpu_offload=True)[0][there] == pytest.approx(16 * total, rel=0.01)
    lora, config = needs(lora_rank=8)
    assert "held out to servers" not in lora and lora[there] == pytest.approx(2 * total, rel=0.05)
    counts = 256 * 152_064 * (4 + 1 / 8)  # which a server's sampler has next to the weights
    assert (
        lora["base of adapters, while servers sleep"] == (2 * total + counts) * config.servers_here
    )
    split = host_needs(
        MODELS["qwen2.5_7b"],
        dataclasses.replace(config, placement="split"),
        config.recipe_config({}),
    )
    assert there not in split and split["programs"] == lora["programs"] > 0


def test_gpus_are_named_with_their_number():
    assert (gpu_named("H100").gpus, gpu_named("8xH100").gpus, gpu_named("2 x RTX 4090").gpus) == (
        1,
        8,
        2,
    )
    assert gpu_named("RTX4090").name == gpu_named("3xrtx4090").name


@pytest.mark.parametrize(
    "settings", [{}, {"nproc_per_node": 2, "servers": 2}, {"training": {"lr": 1e-3}}]
)
def test_nothing_is_chosen_on_a_cpu(settings):
    config = config_of(**settings)
    for made in (
        choose({}, config, []),
        choose({}, dataclasses.replace(config, device="cpu"), [80 * GB]),
    ):
        assert made.reasons == {} and made.problem is None
    here = choose({}, config, []).config.resolved(cuda=False)
    assert here.recipe_config({}) == config_of(**settings).recipe_config({}) and here.server == {}
    assert (here.processes, here.servers, here.weight_sync, here.trainer_memory) == (
        settings.get("nproc_per_node", 1),
        settings.get("servers", 1),
        "memory",
        "keep",
    )
    assert "split" in (choose({}, config_of(placement="split"), []).problem or "")


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (64, {}),
        (32, {"rows_per_microbatch": 2}),
        (20, {"rows_per_microbatch": 1}),
        (12, {"rows_per_microbatch": 1, "activation_checkpointing": True}),
    ],
)
def test_a_small_machine_trains_fewer_rows_at_once(size, chosen):
    """The first task of README: rows of 4,096 positions, four at once by default."""
    smollm2 = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    smollm2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    model = MODELS["qwen2.5_0.5b"] | smollm2
    config = config_of(seq_len=4096, max_tokens=64)
    made = choose(model, config, [], host=size * GB)
    assert made.problem is None
    assert {name.partition(".")[2] for name in made.reasons} == set(chosen)
    assert made.config.recipe_settings == {**config.recipe_settings, **chosen}
    given = config_of(seq_len=4096, max_tokens=64, training={"rows_per_microbatch": 4})
    kept = choose(model, given, [], host=size * GB).config.recipe_settings
    assert kept["rows_per_microbatch"] == 4
    assert choose(model, config, [], host=None).reasons == {}


def test_a_run_on_a_small_machine_keeps_its_choice(tiny_model, capsys):
    config = dataclasses.replace(config_of(seq_len=512, max_tokens=64), model=str(tiny_model))
    needed = sum(cpu_needs(json.loads((tiny_model / "config.json").read_text()), config))
    small = Parts(gpus=list, host=lambda: needed / FULL_ON_CPU - 1)
    large = Parts(gpus=list, host=lambda: needed / FULL_ON_CPU + 1)
    chosen = _chosen(config, {}, Console(), small)
    assert chosen.recipe_settings["rows_per_microbatch"] == 2
    assert "of memory (`ttrl plan` says why): rows_per_microbatch 2" in capsys.readouterr().out
    assert _chosen(config, {}, Console(), large) == config
    assert capsys.readouterr().out == ""
    saved = {"model": str(tiny_model), "run": "r", "training": {"rows_per_microbatch": 2}}
    continued = _chosen(config, saved, Console(), large)
    assert continued.recipe_settings["rows_per_microbatch"] == 2
    begun_before = {"model": str(tiny_model), "run": "r", "training": {}}
    assert _chosen(config, begun_before, Console(), small) == config


SET = {
    "placement": "split",
    "nproc_per_node": 1,
    "servers": 1,
    "weight_sync": "restart",
    "training.rows_per_microbatch": 3,
    "training.activation_checkpointing": True,
    "training.activation_offloading": True,
    "training.optimizer": "sgd",
    "server.tensor_parallel_size": 2,
    "server.gpu_memory_utilization": 0.6,
    "server.max_model_len": 5000,
    "server.max_num_seqs": 33,
    "server.max_num_batched_tokens": 3000,
    "server.enable_nccl_comm_suspend": False,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_set_stays(name):
    group, _, key = name.rpartition(".")
    values = {group: {key: SET[name]}} if group else {key: SET[name]}
    made = choose(MODELS["qwen2.5_0.5b"], config_of(**values), [80 * GB] * 4)
    assert (
        made.problem is None
        and name not in made.reasons
        and value_of(made.config, name) == SET[name]
    )
    if group == "server":  # as vLLM writes it on its command line
        dashed = choose(
            MODELS["qwen2.5_0.5b"],
            config_of(server={key.replace("_", "-"): SET[name]}),
            [80 * GB] * 4,
        )
        assert name not in dashed.reasons and key not in dashed.config.server
    given = choose(
        MODELS["qwen2.5_0.5b"], config_of(training=GRPOConfig(rows_per_microbatch=4)), [80 * GB]
    )
    assert "training.rows_per_microbatch" not in given.reasons  # set, although it is the default


def test_both_at_the_same_time_get_gpus_of_their_own_where_there_are_several():
    made = [
        choose(MODELS["qwen2.5_1.5b"], config_of(off_policy_steps=1), [80 * GB] * n).config
        for n in (1, 2, 3, 8)
    ]
    assert [(one.placement, one.nproc_per_node, one.servers) for one in made] == [
        ("colocated", 1, 1),
        ("split", 1, 1),
        ("split", 2, 1),
        ("split", 4, 4),
    ]
    assert {one.weight_sync for one in made} == {"memory"}
    assert [one.resolved(cuda=True).trainer_memory for one in made] == [
        "free",
        "keep",
        "keep",
        "keep",
    ]
    assert 0.3 <= value_of(made[0], "server.gpu_memory_utilization") < 0.5
    large = choose(MODELS["qwen2.5_32b"], config_of(off_policy_steps=1), [80 * GB] * 8).config
    # More than half train, where that does not fit.
    assert (large.nproc_per_node, large.servers) == (6, 1)


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize("name", ["qwen2.5_0.5b", "qwen2.5_7b", "qwen2.5_32b"])
def test_servers_elsewhere_have_their_gpus_for_themselves(name, nnodes):
    made = choose(MODELS[name], config_of(cluster="auto", nnodes=nnodes, servers=2), [80 * GB] * 8)
    assert (
        value_of(made.config, "server.gpu_memory_utilization") >= 0.8
        and made.config.placement == "colocated"
    )
    # Nobody needs the trainer's GPUs meanwhile.
    assert made.config.resolved(cuda=True).trainer_memory == "keep"


@pytest.mark.parametrize(
    ("name", "count", "size", "settings", "taken"),
    [
        ("qwen3_4b", 1, 25.4, {"lora_rank": 32, "lora_base_dtype": "fp32"}, 24.1),
        ("qwen2.5_32b", 8, 85.0, {}, 84.1),
    ],
)
def test_what_a_sleeping_server_keeps_counts_next_to_the_trainer(
    name, count, size, settings, taken
):
    """Both fitted by the trainer's figures, and would have run out of memory."""
    row = {"qwen3_4b": 8192, "qwen2.5_32b": 16_384}[name]
    rounded = {
        "optimizer": "adamw_8bit",
        "activation_checkpointing": True,
        "rows_per_microbatch": 1,
    }
    before = config_of(seq_len=row, training=settings | rounded | {"activation_offloading": False})
    refused = choose(MODELS[name], before, [size * GB] * count, advise=False)
    assert taken * GB <= refused.trainer and refused.trainer + refused.kept > size * GB
    assert re.search(r"a sleeping server keeps .* GiB, .*; 5% must stay free", refused.problem)
    assert "leave out " in choose(MODELS[name], before, [size * GB] * count).problem
    larger = [refused.trainer / 0.94] * count
    assert "weight_sync: restart, to leave nothing" in choose(MODELS[name], before, larger).problem
    made = choose(MODELS[name], config_of(seq_len=row, training=settings), [size * GB] * count)
    assert made.problem is None and value_of(made.config, "training.activation_offloading")
    assert made.kept > 1.2 * GB and made.trainer + made.kept <= 0.95 * size * GB
    assert made.is_tight == (made.trainer + made.kept > 0.9 * size * GB)


@pytest.mark.parametrize(
    "settings",
    [{"placement": "split"}, {"weight_sync": "restart"}, {"cluster": "auto"}],
    ids=["split", "restart", "servers elsewhere"],
)
def test_servers_that_do_not_sleep_on_its_gpus_keep_nothing_of_them(settings):
    made = choose(MODELS["qwen2.5_0.5b"], config_of(**settings), [80 * GB] * 2)
    asleep = choose(MODELS["qwen2.5_0.5b"], config_of(), [80 * GB] * 2)
    assert made.kept == 0 and asleep.kept > 1 * GB
    assert made.problem is None is asleep.problem


def test_a_waiting_trainer_keeps_a_context_and_nccls_buffers_from_servers():
    def served(count, **settings):
        config = config_of(**settings)
        made = choose(MODELS["llama3.1_8b"], config, [24 * GB] * count)
        return value_of(made.config, "server.gpu_memory_utilization") * 24 * GB

    adapters = {"training": {"lora_rank": 32, "lora_base_dtype": "nf4"}}
    alone, four = served(1, **adapters), served(4, **adapters)
    once = served(4, **adapters, trainer="once")
    assert alone - four >= 0.4 * GB  # two contexts, and the trainer's communicator
    assert once == pytest.approx(0.85 * 24 * GB)


def test_servers_on_several_gpus_give_nccls_buffers_back_to_sleep(monkeypatch):
    def chosen(**settings):
        made = choose(MODELS["qwen2.5_32b"], config_of(**settings), [80 * GB] * 8)
        return made, value_of(made.config, "server.enable_nccl_comm_suspend")

    made, value = chosen()
    assert value_of(made.config, "server.tensor_parallel_size") == 2 and value is True
    assert (
        made.reasons["server.enable_nccl_comm_suspend"]
        == "frees NCCL's buffers in sleeping servers"
    )
    against, value = chosen(server={"enable_nccl_comm_suspend": False})
    assert value is False and against.kept - made.kept > 5 * GB
    assert chosen(weight_sync="restart")[1] is None
    monkeypatch.setattr("ttrl.plans.fitting.lacks_argument", lambda name: True)  # an older vLLM
    older, value = chosen()
    assert value is None and older.kept == against.kept


def test_activations_wait_in_the_host_before_moments_are_rounded():
    lora = {"training": {"lora_rank": 32, "lora_base_dtype": "bf16"}}
    model, gpus = MODELS["qwen2.5_7b"], [24 * GB]
    ample, small, unknown = (
        choose(model, config_of(**lora), gpus, host=h) for h in (200 * GB, 30 * GB, None)
    )
    for made in (ample, unknown):
        assert made.problem is None
        assert value_of(made.config, "training.activation_offloading") is True
        assert value_of(made.config, "training.activation_checkpointing") is True
        assert value_of(made.config, "training.optimizer") == "adamw"
    assert value_of(small.config, "training.activation_offloading") is False
    assert value_of(small.config, "training.optimizer") == "adamw_8bit"
    there = host_needs(model, ample.config, ample.config.recipe_config({"dtype": "bf16"}))
    # 4,096 inputs of a layer in fp32, rounded up.
    assert there["trainer's activations"] == 28 * 2**26
    without = config_of(training=lora["training"] | {"activation_checkpointing": False})
    given = choose(model, without, [80 * GB], host=200 * GB)
    assert value_of(given.config, "training.activation_offloading") is False
    given = config_of(training=lora["training"] | {"activation_offloading": False})
    assert value_of(choose(model, given, gpus).config, "training.activation_offloading") is False
    roomy = choose(model, config_of(**lora), [80 * GB])
    assert value_of(roomy.config, "training.activation_offloading") is False


@pytest.mark.parametrize(
    ("name", "size", "settings", "sequences", "tokens"),
    [
        ("qwen2.5_0.5b", 24, {"training": {"lora_rank": 32}}, 512, 4096),  # an iteration's samples
        ("qwen2.5_1.5b", 80, {}, 512, 8192),
        ("qwen2.5_1.5b", 80, {"tasks_per_iteration": 100}, 1024, 8192),  # vLLM's most
        ("qwen2.5_1.5b", 80, {"tasks_per_iteration": 4}, 256, 8192),  # vLLM's fewest
        ("qwen2.5_1.5b", 200, {}, 512, 16_384),
        ("qwen2.5_1.5b", 80, {"server": {"max_num_batched_tokens": 1000}}, 250, 1000),
        ("qwen2.5_1.5b", 80, {"server": {"max_num_seqs": 9000}}, 9000, 9000),  # vLLM wants as many
        ("qwen2.5_1.5b", 80, {"server": {"max-num-seqs": 100}}, 100, 8192),
        ("qwen2.5_1.5b", 80, {"server": {"enable_chunked_prefill": False}}, 512, None),
    ],
)
def test_steps_of_servers_are_as_large_as_an_iteration_needs(
    name, size, settings, sequences, tokens
):
    made = choose(MODELS[name], config_of(**settings), [size * GB])
    assert made.problem is None
    assert value_of(made.config, "server.max_num_seqs") == sequences
    assert value_of(made.config, "server.max_num_batched_tokens") == tokens
    given = {name.replace("-", "_") for name in settings.get("server", {})}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        is_chosen = name not in given and value_of(made.config, f"server.{name}") is not None
        assert (f"server.{name}" in made.reasons) == is_chosen


def test_a_cache_that_holds_fewer_samples_gets_fewer_sequences():
    def sequences(**settings):
        lora = {"training": {"lora_rank": 32, "lora_base_dtype": "bf16"}}
        made = choose(MODELS["qwen2.5_7b"], config_of(**lora, **settings), [24 * GB])
        return value_of(made.config, "server.max_num_seqs"), made

    short, made = sequences(max_tokens=512)
    long, _ = sequences(max_tokens=2048)
    assert 64 <= long < short < 256
    assert "room for no more of 371 tokens" in made.reasons["server.max_num_seqs"]
    serving = serving_of(MODELS["qwen2.5_7b"], made.config, cuda=True, memory=24 * GB)
    room = value_of(made.config, "server.gpu_memory_utilization") * 24 * GB
    room -= sum(server_memory(MODELS["qwen2.5_7b"], serving).values())
    assert (
        short * 371 <= room / token_cache_bytes(MODELS["qwen2.5_7b"], serving) < (short + 16) * 371
    )


def test_what_is_chosen_for_servers_is_said_and_kept(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2.5_32b"]))
    made = plan(dataclasses.replace(config_of(), model=str(tmp_path)), gpu="8xH100")
    for name in ("max_num_seqs", "max_num_batched_tokens", "enable_nccl_comm_suspend"):
        assert f"server.{name}" in made.chosen and f"server.{name}: " in str(made)
    assert "a sleeping server keeps" in " ".join(str(made).split())
    assert made.memory.left_by_server > 1.2 * GB and made.memory.left_by_trainer > 2 * GB
    assert made.memory.peak >= made.memory.trainer + made.memory.left_by_server
    assert made.memory.peak >= made.memory.server + made.memory.left_by_trainer
    assert made.memory.sequences <= 256
    chosen = choose(MODELS["qwen2.5_32b"], config_of(), [80 * GB] * 8).config.resolved(cuda=True)
    saved = yaml.safe_load(yaml.safe_dump(chosen.to_dict()))
    assert saved["server"]["max_num_seqs"] == 256 and saved["server"]["enable_nccl_comm_suspend"]
    assert saved["training"]["activation_offloading"] is False


def test_a_context_for_which_the_cache_has_no_room_becomes_that_of_a_row():
    adapters = {"lora_rank": 32, "lora_base_dtype": "nf4"}
    # Its context is of 131,072 tokens.
    made = choose(MODELS["llama3.1_8b"], config_of(training=adapters), [24 * GB])
    assert value_of(made.config, "server.max_model_len") == 4097
    assert (
        value_of(
            choose(MODELS["llama3.1_8b"], config_of(training=adapters), [80 * GB]).config,
            "server.max_model_len",
        )
        is None
    )


@pytest.mark.parametrize(
    ("name", "count", "size", "settings", "said"),
    [
        ("qwen2.5_7b", 1, 80, {}, "lora_rank: 32"),
        ("qwen2.5_7b", 1, 24, {}, "lora_base_dtype: nf4"),
        ("qwen2.5_32b", 1, 80, {}, "8 such GPUs"),
        ("qwen2.5_14b", 1, 24, {}, "such GPUs with training.lora_rank"),
        (
            "qwen2.5_1.5b",
            1,
            80,
            {"training": {"rows_per_microbatch": 256}},
            "leave out training.rows_per_microbatch",
        ),
        (
            "qwen2.5_0.5b",
            1,
            80,
            {"nproc_per_node": 2},
            "nproc_per_node is 2, but this machine has 1 GPU",
        ),
        ("qwen2.5_0.5b", 1, 80, {"placement": "split"}, "none is left to serve"),
        ("qwen2.5_0.5b", 4, 80, {"placement": "split", "servers": 4}, "servers is 4"),
        (
            "qwen2.5_7b",
            1,
            80,
            {"training": {"lora_rank": 8}, "server": {"gpu_memory_utilization": 0.1}},
            "a server needs",
        ),
        ("qwen2.5_1.5b", 1, 24, {"weight_sync": "reload"}, "a server beside it"),
        (
            *("qwen2.5_0.5b", 1, 24, {"server": {"gpu_memory_utilization": 0.95}}),
            r"gives a server 21\.2 GiB of 22\.4 GiB, and contexts and NCCL take 1\.49 GiB; set "
            r"it to 0\.93",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(name, count, size, settings, said, monkeypatch):
    made = choose(MODELS[name], config_of(**settings), [size * GB] * count)
    with pytest.raises(ConfigError, match=said):
        refuse(made)
    monkeypatch.setenv(IGNORE_VARIABLE, "1")
    if "fit" in str(made.problem).split(";")[0]:
        refuse(made)  # an estimate may be wrong
    else:
        with pytest.raises(ConfigError):  # a GPU that is not there remains so
            refuse(made)


def test_a_run_that_is_continued_keeps_what_was_chosen():
    first = choose(
        MODELS["qwen2.5_0.5b"], config_of(training={"lr": 1e-6}), [80 * GB] * 2
    ).config.resolved(cuda=True)
    saved = yaml.safe_load(yaml.safe_dump(first.to_dict()))
    again = as_begun(config_of(training={"lr": 1e-6}, servers=1), saved)
    assert again.servers == 1 and again.resolved(cuda=True) == dataclasses.replace(first, servers=1)
    assert choose(MODELS["qwen2.5_0.5b"], again, [80 * GB] * 8).config == again
    assert as_begun(config_of(), {}) == config_of()


def test_a_run_chooses_remembers_and_refuses(world, capsys):
    """With GPUs that are not here, on which nothing but the fakes of this world runs."""
    world.gpus = [24 * GB, 80 * GB]
    world.train(device="cuda", iterations=1)
    assert "chosen for 2 GPUs with 22.4 GiB" in capsys.readouterr().out
    before = yaml.safe_load((world.run / "config.yaml").read_text())
    assert (before["placement"], before["nproc_per_node"], before["weight_sync"]) == (
        "colocated",
        2,
        "memory",
    )
    assert (
        before["training"]["rows_per_microbatch"] == 64
        and before["server"]["gpu_memory_utilization"] == 0.83
    )
    assert world.recipes[0]["rows_per_microbatch"] == 64
    world.gpus = [80 * GB] * 4
    world.train(device="cuda", iterations=2)
    assert yaml.safe_load((world.run / "config.yaml").read_text()) == before | {"iterations": 2}
    assert "chosen" not in capsys.readouterr().out
    world.gpus = [1e6]
    events = list(world.events)
    with pytest.raises(
        ConfigError, match=r"nproc_per_node is 2, but this machine has 1 GPU.* start a new run"
    ):
        world.train(device="cuda", iterations=3)
    with pytest.raises(ConfigError, match="does not fit"):
        world.train(run=str(world.folder / "other"), device="cuda")
    assert world.events == events and not (world.folder / "other").exists()


def test_the_tables_of_the_machines_page_are_up_to_date():
    tool = runpy.run_path(str(ROOT / "tools" / "check_plan.py"))
    page = (ROOT / "docs" / "reference" / "what_fits.md").read_text(encoding="utf-8")
    assert page == tool["page_with_tables"](page), (
        "make them again: python tools/check_plan.py --machines"
    )
