"""`plan`: an iteration against one that was really packed; memory, disk, seconds, warnings; the
report and the command.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.facts import rows_of
from transformers import CONFIG_MAPPING, AutoTokenizer

from ttrl import Task, TrainConfig, train
from ttrl.cli import main
from ttrl.cli.settings import read_planned
from ttrl.data.packing.pack import PackedTensors
from ttrl.errors import ConfigError, ModelFolderError, UserError
from ttrl.loop import run_plan
from ttrl.plans import expected_lengths as lengths
from ttrl.plans import plan_machine as plan_machine
from ttrl.plans.disk import _others_at_most
from ttrl.plans.expected_lengths import Assumptions, assumed_lengths, lognormal
from ttrl.plans.measured import measured_in_run
from ttrl.plans.plan import Plan
from ttrl.plans.plan_machine import Machine
from ttrl.plans.planner import make_plan, read_model_config, write_plan
from ttrl.plans.warnings import warnings_of
from ttrl.report.plan_table import outcomes, plan_table
from ttrl.run_folder.folder import RunFolder
from ttrl.text import gib, si_spaced
from ttrl.training.counts import work_counts
from ttrl.training.timing import matmul_peak

ROOT = Path(__file__).parents[2]
QWEN = json.loads((ROOT / "ttrl" / "costs" / "architectures.json").read_text())["qwen2.5_7b"]
HERE = Machine("a machine", False, 16e9, 50e9, 20e9, "measured")


def plan(config, tasks=(), validation_tasks=(), *, gpu=None, machine=None, **options):
    """What `ttrl.plan` returns, without measuring this machine: its speed decides about seconds
    alone, which no test looks at.
    """
    if gpu is None:
        machine = machine or HERE
    return make_plan(config, tasks, validation_tasks, gpu=gpu, machine=machine, **options)


@pytest.fixture
def big(tmp_path):
    """A 7B model's config, without its weights."""
    path = tmp_path / "qwen" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(QWEN))
    return str(path.parent)


def config_of(model, **changes):
    values = {
        "run": "",
        "model": str(model),
        "iterations": 10,
        "device": "cpu",
        "seq_len": 4096,
        "num_threads": 1,
    }
    values |= {"tasks_per_iteration": 8, "samples_per_task": 4}
    return TrainConfig(**(values | changes))


# What a model is


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 512,
}
SMALL |= {"num_key_value_heads": 1, "max_position_embeddings": 4096}


def planned(tmp_path, **config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | config))
    return make_plan(config_of(path, seq_len=512, max_tokens=200))


def test_a_mixture_says_how_much_of_it_is_active(tmp_path):
    made = planned(
        tmp_path,
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    assert made.parameters - made.active_parameters == 4 * 6 * 3 * 64 * 32
    wanted = (
        f"{si_spaced(made.parameters)} parameters, {si_spaced(made.active_parameters)} of them "
        "active for a token"
    )
    assert wanted in " ".join(str(made).split())
    assert made.attending is None
    assert not any(
        "not known" in warning or "experts stay frozen" in warning for warning in made.warnings
    )
    adapted = make_plan(
        config_of(tmp_path / "config.json", seq_len=512, max_tokens=200, training={"lora_rank": 4})
    )
    assert any("experts stay frozen" in warning for warning in adapted.warnings)


def test_a_hybrid_says_which_layers_attend(tmp_path):
    made = planned(tmp_path, model_type="qwen3_5_text", full_attention_interval=4)
    assert made.active_parameters is None
    assert made.attending == "1 of its 4 layers attend, 3 keep a state"
    assert made.attending in " ".join(str(made).split())


def test_a_model_that_is_counted_as_dense_for_want_of_better_is_named(tmp_path):
    made = planned(tmp_path, model_type="olmo")
    assert any(
        "the planner does not know the model type 'olmo'" in warning for warning in made.warnings
    )


# What an iteration consists of


def test_a_run_is_planned_as_it_came_out(world):
    """Lengths and the share of groups with a signal are the run's; rows, tokens, FLOPs then
    follow.
    """
    world.answer = lambda prompt, k, version: "yes" if k == 0 else "no" * (k + 1)
    world.train(iterations=1)
    folder = world.run / "iterations" / "0001"
    packed = PackedTensors.load(folder / "packed.safetensors")
    row = world.rows()[1]
    made = plan(world.config(iterations=1), run=world.run)
    work = made.work
    assert (work.tasks, work.samples) == (2, 8)
    assert work.completion_tokens == pytest.approx(row["completion_tokens"])
    assert work.prompt_tokens == row["prompt_tokens"]
    assert (work.rows, work.row_tokens, work.trained_tokens) == (
        packed.num_rows,
        packed.num_tokens,
        packed.num_trained,
    )
    assert work.fill == row["pack"]["fill"]
    assert work.validation_samples == 2
    assert made.signal_from == made.completions_from == "run"
    from transformers import AutoConfig

    counted = work_counts(
        packed, AutoConfig.from_pretrained(world.model), world.config().recipe_config({})
    )
    assert made.flops.training == pytest.approx(counted["flops"])
    assert made.flops.sampling == pytest.approx(row["flops"]["prefill"] + row["flops"]["decode"])
    assert work.logical_tokens == counted["logical_tokens"]


def test_prompts_are_counted_in_the_models_own_tokens(world):
    made = plan(
        world.config(),
        world.tasks(6),
        world.tasks(3, "held-out"),
        assumptions=Assumptions(completion_tokens=4),
    )
    assert made.prompts_from == "tasks"
    assert made.work.prompt_mean == len(
        world.tokenizer.encode("<|user|>task 0<|end|><|assistant|>")
    )
    assert (made.work.tasks, made.work.samples, made.work.validation_samples) == (2, 8, 3)


def test_a_plan_without_held_out_tasks_says_so(world):
    said = "no tasks: no policy is measured"
    assert said in str(plan(world.config(), world.tasks(6)))
    assert said not in str(plan(world.config(), world.tasks(6), world.tasks(3, "held-out")))
    assert said not in str(plan(world.config(seq_len=1024)))  # no tasks are known at all


def test_parts_are_counted_as_the_text_that_a_server_makes_of_them(world):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (task,) = world.tasks(1)
    listed = dataclasses.replace(task, messages=[{"role": "user", "content": parts, "name": None}])
    expected = world.tokenizer.encode("<|user|>a\nb<|end|><|assistant|>")
    assert lengths.prompt_ids(listed, world.tokenizer) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [0, 1, 2, 9]),
        ("<s>ab", [0, 1, 2]),
        ("<s>", [0]),
        ([1, 2], [1, 2]),
    ],
)
def test_a_prompt_without_a_chat_has_one_beginning_of_text(prompt, expected):
    class Letters:
        def encode(self, text, add_special_tokens=True):
            ids = [{"<s>": 0, "a": 1, "b": 2}[one] for one in re.findall("<s>|.", text)]
            return [0, *ids, 9] if add_special_tokens else ids

    task = Task([{"role": "prompt", "content": prompt}], rollout=print)
    assert lengths.prompt_ids(task, Letters()) == expected


def test_a_template_that_refuses_a_task_is_named(world, tmp_path):
    model = shutil.copytree(world.config().model, tmp_path / "refusing")
    (model / "chat_template.jinja").write_text("{{ raise_exception('no such question') }}")
    said = "task 'task/0': the model's chat template cannot render its messages .*no such question"
    with pytest.raises(UserError, match=said):
        plan(world.config(tasks_per_iteration=1, model=str(model)), world.tasks(1))


def test_prompts_are_counted_with_the_runs_own_chat_template(world):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}XX"
    longer = template.replace("XX", "X" * 32)
    short, long = (
        plan(world.config(tasks_per_iteration=1, chat_template=text), world.tasks(1))
        for text in (template, longer)
    )
    assert long.work.prompt_mean == short.work.prompt_mean + 30


def test_assumed_lengths(big):
    assumptions = Assumptions(prompt_tokens=100, completion_tokens=50, signal_share=0.5)
    whole, half = (
        plan(config_of(big, tasks_per_iteration=64), assumptions=a)
        for a in (Assumptions(100, 50), assumptions)
    )
    assert whole.work.prompt_mean == pytest.approx(
        100, rel=0.1
    ) and whole.work.completion_mean == pytest.approx(50, rel=0.1)
    assert half.work.completion_tokens == whole.work.completion_tokens
    assert half.work.row_tokens == pytest.approx(whole.work.row_tokens / 2, rel=0.1)
    assert whole.completions_from == "assumed" and half.work.signal_share == 0.5


def test_memory_is_planned_for_completions_as_long_as_they_may_be(big):
    short, long = (
        plan(config_of(big, tasks_per_iteration=64), assumptions=Assumptions(100, n))
        for n in (2, 1024)
    )
    assert short.work.rows < long.work.rows
    assert short.memory.trainer_parts == pytest.approx(long.memory.trainer_parts, rel=0.01)
    assert short.memory.sequences >= long.memory.sequences


def test_large_iterations_are_planned_from_a_part(big):
    """A hundred million samples would neither fit into memory nor be planned in a minute."""
    few, part = (plan(config_of(big, tasks_per_iteration=count)) for count in (256, 256 * 10**5))
    assert part.work.samples == 10**5 * few.work.samples == 10**5 * 1024
    assert part.work.row_tokens == pytest.approx(10**5 * few.work.row_tokens, rel=0.15)
    assert part.flops.training == pytest.approx(10**5 * few.flops.training, rel=0.2)


def test_no_assumption_is_below_one():
    endless = float("inf")
    for wrong in (
        {"prompt_tokens": 0},
        {"prompt_tokens": endless},
        {"completion_tokens": -1},
        {"signal_share": 0},
        {"signal_share": 2},
    ):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Assumptions(**wrong)


def test_lognormal_lengths_have_the_mean():
    lengths = lognormal(np.random.default_rng(0), 300.0, 0.6, 20_000)
    assert np.mean(lengths) == pytest.approx(300, rel=0.02) and min(lengths) >= 1
    assert np.std(np.log(lengths)) == pytest.approx(0.6, rel=0.03)


def test_steps_and_microbatches(big):
    made = plan(
        config_of(
            big,
            training={"updates_per_iteration": 4, "rows_per_microbatch": 2},
            seq_len=1024,
            max_tokens=512,
        )
    )
    rows_of_step = -(-made.work.rows // 4)
    assert made.work.optimizer_steps == 4 and made.work.microbatches == 4 * -(-rows_of_step // 2)
    assert made.flops.prepass > 0 and plan(config_of(big)).flops.prepass == 0
    kl = plan(config_of(big, training={"kl_coefficient": 0.1}, seq_len=1024, max_tokens=512))
    assert kl.flops.prepass == pytest.approx(made.flops.prepass)


def test_adapters_train_less(big):
    whole, adapters = plan(config_of(big)), plan(config_of(big, training={"lora_rank": 8}))
    assert (
        adapters.trained_parameters < whole.trained_parameters / 100
        and adapters.parameters == whole.parameters
    )
    assert adapters.flops.training < 0.75 * whole.flops.training
    assert (
        adapters.memory.trainer < whole.memory.trainer
        and adapters.disk["state"] < whole.disk["state"] / 100
    )


def test_what_adapters_cost_a_cpu_besides(big, monkeypatch):
    """A server there computes a prompt once for all its samples, but not with adapters: then it
    knows whole blocks of 128 alone. And memory takes the time of the adapters' own products."""
    whole, adapters = plan(config_of(big)), plan(config_of(big, training={"lora_rank": 8}))
    prompts = [
        len(group.prompt)
        for group in assumed_lengths(config_of(big), Assumptions(), QWEN["vocab_size"]).groups
    ]
    assert sum(prompts) == whole.work.prompt_tokens and min(prompts) < 257 < max(prompts)
    ends = [
        (3584, 3584),
        (3584, 512),
        (3584, 512),
        (3584, 3584),
        (3584, 18944),
        (3584, 18944),
        (18944, 3584),
    ]
    keys = [key for n in prompts for key in range(129 if n < 257 else 257, n + 1)]
    # By three of four samples.
    again = 3 * 28 * sum(2 * sum(a * b for a, b in ends) + 4 * 3584 * key for key in keys)
    assert adapters.flops.sampling - whole.flops.sampling == pytest.approx(again)
    merged = plan(config_of(big, training={"lora_rank": 8}, adapters="merged"))
    assert merged.flops.sampling == whole.flops.sampling
    at_once = dataclasses.replace(HERE, bandwidth=float("inf"))
    made = plan(config_of(big, training={"lora_rank": 8}), machine=at_once)
    in_no_time = made.seconds.phases["train"].seconds
    expected = (
        adapters.work.row_tokens * 4 * 28 * sum(6 * a + 10 * b for a, b in ends) / (0.6 * 20e9)
    )
    assert adapters.seconds.phases["train"].seconds - in_no_time == pytest.approx(expected)


# Memory, disk, seconds, money


def test_both_on_one_machine(big):
    reload, restart = (
        plan(config_of(big, weight_sync=sync)).memory for sync in ("reload", "restart")
    )
    assert reload.peak == reload.trainer + reload.server and restart.peak == max(
        restart.trainer, restart.server
    )
    asleep = plan(config_of(big, weight_sync="sleep")).memory  # on a CPU that frees nothing
    assert asleep.peak == reload.peak

    def together(**settings):
        return plan(config_of(big, device="cuda", **settings), gpu="H100").memory.together

    assert (
        not together(weight_sync="sleep")
        and not together(weight_sync="restart")
        and together(weight_sync="reload")
    )
    assert together(weight_sync="sleep", trainer_memory="keep") and not together(
        weight_sync="sleep", trainer="once"
    )
    # The server samples while the trainer works.
    assert together(weight_sync="restart", off_policy_steps=1)
    two = plan(config_of(big, nproc_per_node=2, servers=3)).memory  # all of them in the same memory
    assert two.trainer < reload.trainer and two.peak == pytest.approx(
        2 * two.trainer + 3 * two.server
    )


def test_weights_through_memory(big):
    """One more copy of them in the machine's memory; files are written beside the sampling, every
    n-th time.
    """
    files, memory = (plan(config_of(big, weight_sync=sync)) for sync in ("reload", "memory"))
    copy = memory.parameters * 4.0
    assert (
        memory.memory.held_out == memory.memory.trainer_parts["held out to servers"] == copy
        and not files.memory.held_out
    )
    assert memory.memory.trainer == pytest.approx(files.memory.trainer + copy)
    saved = (files.disk["checkpoint"] + files.disk["state"]) / 1e9
    before, after = files.seconds.phases, memory.seconds.phases
    assert before["train"].seconds - after["train"].seconds == pytest.approx(saved - copy / 1e9)
    on_gpu = {"weight_sync": "memory", "device": "cuda", "tasks_per_iteration": 1}
    asked = [plan(config_of(big, save_every=every, **on_gpu), gpu="H100") for every in (1, 5)]
    waits = [one.seconds.phases["other"].seconds - 0.1 for one in asked]
    assert (
        waits[0] > 10
        and waits[1] == pytest.approx(waits[0] / 5)
        and asked[1].disk["most"] <= asked[0].disk["most"]
    )
    assert warned(
        f"takes {waits[0] + 0.1:.0f} s longer than the next iteration's sampling. save_every: 5 "
        f"reduces this to {(waits[0] + 0.1) / 5:.0f} s",
        asked[0],
    )
    assert not warned("files delay", files)
    assert (
        plan(config_of(big, weight_sync="memory", training={"lora_rank": 8})).memory.held_out == 0
    )


def test_the_servers_cache(big, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    memory = plan(config_of(big)).memory
    token = 2 * 28 * 4 * 128 * 4  # keys and values, layers, heads, dimension, bytes
    assert memory.cache_tokens == 7 * 2**30 // token
    gpu = plan(
        config_of(big, device="cuda", server={"gpu_memory_utilization": 0.5}), gpu="H100"
    ).memory
    assert gpu.server == pytest.approx(40e9 + 0.8e9)  # vLLM's budget, and a context
    assert gpu.server_parts["weights"] == 2 * QWEN["parameters"]
    few = plan(config_of(big, device="cuda", server={"max_num_seqs": 3}), gpu="h100").memory
    assert few.sequences == 3


def test_checkpoints_on_disk_are_those_that_pruning_keeps(big):
    few, many = (plan(config_of(big, keep_checkpoints=keep)).disk for keep in (3, 5))
    assert few["checkpoint"] == 4 * QWEN["parameters"] and few["state"] == 8 * QWEN["parameters"]
    assert many["most"] - few["most"] == 2 * (few["checkpoint"] + few["state"])


def test_time_and_money(big):
    made = plan(config_of(big), price_per_hour=3.0)
    seconds = made.seconds
    assert seconds.iteration == pytest.approx(
        sum(phase.seconds for phase in seconds.phases.values())
    )
    starts = sum(part.seconds for part in seconds.start.values())
    assert seconds.run == pytest.approx(
        starts + seconds.phases["validate"].seconds + 10 * seconds.iteration
    )
    assert (
        made.price == pytest.approx(seconds.run / 3600 * 3.0) and plan(config_of(big)).price is None
    )


def test_validation_is_counted_as_often_as_it_is_made(big):
    """Eight samples of 200 problems are six times what an iteration trains on."""
    asked = [Task([{"role": "user", "content": str(n)}], float) for n in range(200)]
    sizes = {
        "iterations": 64,
        "tasks_per_iteration": 32,
        "samples_per_task": 8,
        "validation_samples": 8,
    }
    always, seldom = (
        plan(config_of(big, validate_every=n, **sizes), validation_tasks=asked) for n in (1, 8)
    )
    said, more = (" ".join(str(made).split()) for made in (seldom, always))
    assert (
        "1,600 samples after every 8 iterations, 9 times with the start: 14,400 of the run's "
        "30,784 samples"
    ) in said
    assert (
        "1,600 samples after each iteration, 65 times with the start: 104,000 of the run's "
        "120,384 samples"
    ) in more
    assert f"a validation {si_spaced(seldom.flops.validation)}FLOP" in said
    assert "a share of the time of every 8 iterations" in said and "a share of" not in more
    assert warned(
        "1,600 in a validation, and 256 in an iteration, with validate_every 1; with "
        "validate_every: 25, they",
        always,
    )
    assert not warned("more held-out samples", seldom)
    written = 64 * 40 * seldom.work.validation_tokens
    assert always.disk["logs"] - seldom.disk["logs"] == pytest.approx(written * 7 / 8)
    logs = [_others_at_most(config_of(big, validate_every=n, **sizes), 200) for n in (1, 8)]
    assert logs[0] - logs[1] == pytest.approx(1600 * 1024 * 40 * 7 / 8)


def test_what_goes_between_gpus_and_their_host_takes_time(big):
    # The same rows in both plans: a trainer that keeps its memory might choose fewer.
    training = {"lora_rank": 8, "rows_per_microbatch": 1, "activation_checkpointing": True}
    adapters = config_of(big, device="cuda", weight_sync="sleep", training=training)
    parks, stays = (
        plan(dataclasses.replace(adapters, trainer_memory=where), gpu="H100")
        for where in ("free", "keep")
    )
    moved = 2 * parks.memory.host["trainer's weights and moments"] / 1e10
    assert moved > 3 and parks.seconds.phases["train"].seconds - stays.seconds.phases[
        "train"
    ].seconds == pytest.approx(moved)
    # The base waits there as well.
    assert parks.seconds.phases["sync"].seconds > 2 * 2 * QWEN["parameters"] / 1e10
    # It is read from files.
    assert parks.seconds.start["trainer"].seconds > 2 * QWEN["parameters"] / 1e9
    said = " ".join(str(parks).split())
    assert (
        "Assumed: 35% of the speed of matrix products in training, 35% of it in sampling, 60% of "
        "3.35 TB/s of memory"
    ) in said
    assert (
        "files at 1 GB/s, weights into servers at 4 GB/s, parking at 10 GB/s for each GPU." in said
    )


def seconds_row(number, **seconds):
    return {"iteration": number, "seconds": {**seconds, "total": sum(seconds.values()) + 0.5}}


def test_what_a_run_measured_is_taken():
    rows = rows_of(
        [
            seconds_row(0, prepare=20.0, validate=1.0),
            seconds_row(1, sample=2.0, train=9.0, validate=1.0),
            seconds_row(2, sample=2.0, train=3.0, validate=1.0),
            seconds_row(3, sample=4.0, train=5.0, validate=1.0),
            seconds_row(4, sample=0.0, train=4.0, validate=1.0),
        ]
    )
    measured = {name: value.seconds for name, value in measured_in_run(rows).items()}
    assert measured == {
        "sample": 3.0,
        "train": 4.0,
        "validate": 1.0,
        "other": 0.5,
        "iteration": 8.5,
        "server start": 20.0,
        "trainer start": 5.0,
    }
    assert measured_in_run(rows[:1]) == {}
    assert measured_in_run(rows[:2])["train"].seconds == 9.0


def test_iterations_in_which_nothing_was_trained_say_nothing_of_training():
    rows = [seconds_row(n, sample=2.0, train=0.0) | {"trained": False} for n in (1, 2, 3, 4)]
    assert measured_in_run(rows_of(rows)).keys() == {"sample", "other"}
    rows[2] = seconds_row(3, sample=4.0, train=5.0) | {"trained": True}
    measured = {name: value.seconds for name, value in measured_in_run(rows_of(rows)).items()}
    assert measured == {"sample": 4.0, "train": 5.0, "other": 0.5, "iteration": 9.5}


def test_measured_seconds_count_for_the_same_model_device_and_settings_alone(world, big, capsys):
    world.train(iterations=3)
    capsys.readouterr()

    def planned(*arguments):
        assert main(["plan", str(world.run), "--json", *arguments]) == 0
        made = json.loads(capsys.readouterr().out)
        return {phase["source"] for phase in made["seconds"]["phases"].values()}, made

    assert "run" in planned()[0] and "run" in planned("--set", "lr=1e-3", "iterations=9")[0]
    for name, arguments in {
        "model": ["--set", f"model={big}"],
        "training.lora_rank": ["--set", "lora_rank=8"],
        "gpu": ["--gpu", "H100"],
        "dtype": ["--set", "dtype=bf16"],
    }.items():
        sources, made = planned(*arguments)
        assert sources == {"rough"} and any(
            "the plan ignores the run's measured seconds" in line and name in line
            for line in made["warnings"]
        )
    assert planned("--set", f"model={big}")[1]["completions_from"] == "other"
    config = read_planned(world.run, elsewhere=True).config
    assert (config.device, config.dtype, config.num_threads, config.trainer_memory) == (
        "auto",
        "auto",
        None,
        "auto",
    )
    assert (
        read_planned(world.run, ["trainer_memory=free"], elsewhere=True).config.trainer_memory
        == "free"
    )


def test_a_recipes_config_is_planned_as_its_first_line_promises(big):
    asked = read_planned(ROOT / "recipe_configs" / "qwen2.5_7b.yaml", [f"model={big}"])
    made = plan(asked.config, gpu="H100", recipe_only=True)
    assert (made.work.seq_len, made.processes) == (16_384, 4) and not warned("does not fit", made)
    assert f"in all            {made.memory.peak / 2**30:.3g} GiB of 74.5 GiB" in str(made)
    config = read_planned(
        ROOT / "recipe_configs" / "llama3.3_70b.yaml", [f"model={big}", "seq_len=4096"]
    ).config
    assert (config.nnodes, config.nproc_per_node, config.seq_len) == (
        2,
        8,
        4096,
    ) and not config.problems()


def test_without_a_network_the_hub_is_not_asked_again_and_again(no_hub):
    with pytest.raises(ModelFolderError, match="could not be fetched from the hub") as caught:
        read_model_config("nobody-of-this-name/some-model")
    assert "outgoing traffic has been disabled" in str(caught.value.__cause__)


def test_phases_that_overlap_take_less_than_their_sum():
    rows = [
        {"iteration": n, "seconds": {"sample": 2.0, "validate": 2.0, "total": 3.0}}
        for n in range(4)
    ]
    measured = {name: value.seconds for name, value in measured_in_run(rows_of(rows)).items()}
    assert measured["iteration"] == 3.0 and measured["other"] == 0.0


# Warnings


def warned(text, made):
    return any(text in warning for warning in made.warnings)


def test_what_does_not_fit_is_said_with_the_way_out(big):
    made = plan(config_of(big))
    assert warned("does not fit: trainer", made) and warned(
        "lora_rank: 16 (adapters alone are trained) saves", made
    )
    assert warned("weight_sync: restart", made)
    assert (
        all(warned(f"{name} saves", made) for name in made.memory.savings)
        and len(made.memory.savings) > 4
    )
    kept = plan(config_of(big, device="cuda", weight_sync="reload"), gpu="RTX4090")
    # The server keeps its share while the trainer works.
    assert warned("gpu_memory_utilization", kept)
    turns = plan(config_of(big, device="cuda", weight_sync="sleep"), gpu="RTX4090")
    assert warned("does not fit: the trainer needs", turns) and not warned(
        "gpu_memory_utilization", turns
    )
    assert warned(
        "cannot even hold the weights; choose a smaller model", made
    ) and "1 GPU for servers, 1 for each" in str(turns)
    adapters = {"lora_rank": 8, "lora_base_dtype": "nf4"}
    small = plan(config_of(big, device="cuda", weight_sync="sleep", training=adapters), gpu="B200")
    assert not warned("does not fit", small)


def test_what_one_leaves_on_a_gpu_for_the_other_counts(big):
    config = config_of(big, device="cuda", weight_sync="sleep", training={"lora_rank": 8})
    made = plan(config, gpu="H200")
    memory, recipe = made.memory, config.recipe_config({})
    rest = memory.available - memory.left_by_server
    assert memory.left_by_server > 1e9 and memory.left_by_trainer == 0.8e9
    once = plan(dataclasses.replace(config, trainer="once"), gpu="H200").memory
    stops = plan(dataclasses.replace(config, weight_sync="restart"), gpu="H200").memory
    assert (once.left_by_trainer, stops.left_by_server) == (0, 0)

    def said(**changes):
        other = dataclasses.replace(memory, **changes)
        given = (made.machine, made.disk, made.seconds, None)
        return " ".join(warnings_of(QWEN, config, recipe, made.work, other, *given))

    assert "does not fit: the trainer (" not in said(trainer=0.9 * rest)
    assert "nearly full" in said(trainer=0.95 * rest)
    assert "and a sleeping server need more than" in said(trainer=rest + 1e6)
    assert "and a waiting trainer need more than" in said(server=memory.available - 1e6)
    assert memory.peak >= memory.trainer + memory.left_by_server


def test_activations_that_wait_in_the_host_take_time(big):
    adapters = {"lora_rank": 8, "activation_checkpointing": True}
    there, here = (
        plan(
            config_of(big, device="cuda", training=adapters | {"activation_offloading": yes}),
            gpu="H200",
        )
        for yes in (True, False)
    )
    slower = there.flops.training * 4 / 3 * (1 / 0.9 - 1) / (0.35 * 989e12)
    seconds = [one.seconds.phases["train"].seconds for one in (there, here)]
    assert seconds[0] - seconds[1] > 0.99 * slower > 0
    assert (
        there.memory.host["trainer's activations"] > 0
        and "trainer's activations" not in here.memory.host
    )


def test_a_host_that_is_too_small_for_what_its_gpus_leave_there(big):
    made = plan(config_of(big, device="cuda", weight_sync="memory"), gpu="B200")
    needed = sum(made.memory.host.values())
    for host, is_warned in ((needed - 1, True), (needed + 1, False)):
        machine = dataclasses.replace(made.machine, host=host)
        config = config_of(big, device="cuda", weight_sync="memory")
        again = plan(config, gpu="B200", machine=machine)
        assert (
            warned("does not fit into the machine's own memory", again)
            == is_warned
            == bool(again.does_not_fit)
        )
        assert f"of {gib(host)} of the machine's own memory" in str(again)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("seq_len is 1024", {"seq_len": 1024, "max_tokens": 1024}),
        ("but the server's context is", {"server": {"max_model_len": 512}, "max_tokens": 500}),
        (
            "% full; another seq_len",
            {
                "tasks_per_iteration": 4,
                "samples_per_task": 2,
                "seq_len": 16_384,
                "nproc_per_node": 2,
            },
        ),
        (
            "processes will be idle",
            {"tasks_per_iteration": 4, "samples_per_task": 2, "nproc_per_node": 64},
        ),
        (
            "so ttrl makes",
            {
                "tasks_per_iteration": 2,
                "samples_per_task": 2,
                "training": {"updates_per_iteration": 50},
            },
        ),
    ],
)
def test_warnings(text, changes, big):
    assert warned(text, plan(config_of(big, **changes)))
    assert not warned(text, plan(config_of(big)))


def test_too_few_tasks(world):
    config = world.config(iterations=100)
    assert warned("few tasks: each of the 6 is used 33 times", plan(config, world.tasks(6)))
    assert warned("too few tasks", plan(world.config(tasks_per_iteration=7), world.tasks(6)))
    assert not warned("few tasks", plan(world.config(), world.tasks(6)))


def test_a_cache_without_room(big):
    made = plan(
        config_of(big, max_tokens=20_000, seq_len=32_768, server={"kv_cache_memory_bytes": 2**30})
    )
    assert warned("fewer than one sample", made)


def test_a_disk_without_room(big):
    """No disk has room for a million checkpoints of 15 GB."""
    all_of_them = {"iterations": 10**6, "keep_checkpoints": 10**6}
    assert warned("the disk is too small", plan(config_of(big, **all_of_them)))
    # It is not this machine's.
    there = config_of(big, device="cuda", **all_of_them)
    assert not warned("the disk", plan(there, gpu="h100"))


# Files and command


def test_a_run_leaves_its_plan_and_its_report_compares(world):
    world.writes_reports = True
    world.train(iterations=2)
    rows = RunFolder(world.run).metrics()
    lines = {line.name: line for line in outcomes(Plan.load(world.run), rows)}
    assert lines["samples of an iteration"].real == lines["samples of an iteration"].planned == 8
    assert lines["samples of an iteration"].is_near and lines["prompt tokens"].is_near
    assert lines["seconds: an iteration"].source == "rough"
    table = plan_table(world.run, rows)
    assert (
        "prompt tokens" in [cells[0] for cells in table]
        and "Plan and outcome" in (world.run / "report.html").read_text()
    )
    (world.run / "plan.json").write_text('{"work": 3}')
    assert plan_table(world.run, rows) == []


def test_a_plan_that_is_there_is_left_and_one_that_cannot_be_made_ends_nothing(
    world, tmp_path, caplog
):
    config, tasks = world.config(), world.tasks(3)
    (tmp_path / "plan.json").write_text("mine")
    write_plan(config, tmp_path, world.model, tasks, [], world.tokenizer)
    assert (tmp_path / "plan.json").read_text() == "mine"
    (tmp_path / "plan.json").unlink()
    (tmp_path / "empty").mkdir()
    write_plan(config, tmp_path, tmp_path / "empty", tasks, [], world.tokenizer)
    assert not (tmp_path / "plan.json").exists() and "no plan of this run" in caplog.text


def test_the_table_fits_a_terminal(big):
    text = str(plan(config_of(big), price_per_hour=2.0))
    # But for a path.
    assert max(len(line) for line in text.splitlines() if not line.startswith("Plan: ")) <= 80
    for word in (
        "7.62 G parameters",
        "samples",
        "packed rows",
        "FLOP",
        "trainer",
        "cache",
        "disk",
        "an iteration",
        "price",
        "!",
    ):
        assert word in text


def test_times_that_nobody_counts_in_seconds_are_hours_and_days(big):
    assert re.search(
        r"^  train +([\d.]+ days|\d+ h \d\d min)   rough$", str(plan(config_of(big))), re.MULTILINE
    )
    one = plan(config_of(big, tasks_per_iteration=1, iterations=1))
    assert " 1 in 1 microbatch\n" in str(one) and "\n  1 iteration  " in str(one)


def test_the_command_on_a_recipes_config(big, capsys):
    path = ROOT / "recipe_configs" / "qwen2.5_7b_lora.yaml"
    arguments = [
        "plan",
        str(path),
        "--set",
        f"model={big}",
        "seq_len=8192",
        "tasks_per_iteration=2",
    ]
    arguments += ["--gpu", "H200", "--completion-tokens", "500"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "H200" in text and "sampl" in text and "server" not in text.split("Worth knowing")[0]
    assert main([*arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (
        values["work"]["seq_len"] == 8192
        and values["parameters"] == QWEN["parameters"]
        and not values["with_server"]
    )


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "recipe_configs").glob("*.yaml"))
)
def test_every_recipe_config_can_be_read(name, big):
    asked = read_planned(ROOT / "recipe_configs" / name, [f"model={big}"])
    assert asked.recipe_only and asked.run is None and asked.config.model == big


def test_the_command_on_a_run(world, capsys):
    world.train(iterations=1)
    assert main(["plan", str(world.run), "--set", "iterations=50", "lr=1e-3"]) == 0
    assert "50 iterations" in capsys.readouterr().out
    asked = read_planned(world.run, ["lr=1e-3"])
    assert (
        asked.run == world.run
        and not asked.recipe_only
        and asked.config.recipe_config({}).lr == 1e-3
    )
    # As config.yaml has it.
    assert read_planned(world.run, ["training.lr=1e-3"]).config == asked.config


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("a: [", [], "cannot be read as a config"),
        ("[1]", [], "write a mapping of settings"),
        ("a: 1", [], "has no setting of a run or of a recipe"),
        ("lr: 1e-4", [], "names no model"),
        ("lr: 1e-4", ["modell=x"], "neither a run nor a recipe has a setting 'modell'"),
        ("lr: 1e-4", ["model"], "write --set model=VALUE"),
        ("lr: -1", ["model=x"], "lr is -1"),
    ],
)
def test_what_is_no_config_is_refused(text, settings, message, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises((UserError, ConfigError), match=message):
        read_planned(path, settings)


def test_what_cannot_be_planned_is_said(big, tmp_path):
    with pytest.raises(UserError, match="gpu 'H900' is unknown; choose one of"):
        plan(config_of(big), gpu="H900")
    with pytest.raises(ModelFolderError, match=r"no model folder, no config.json"):
        read_model_config(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="leave out gpu"):
        run_plan.plan(config_of(big), gpu="h100", probe=True)
    with pytest.raises(UserError, match="price_per_hour is nan"):
        plan(config_of(big), price_per_hour=float("nan"))
    for argument, value in (
        ("tensor_parallel_size", 0),
        ("max_num_seqs", "many"),
        ("kv_cache_memory_bytes", -1),
    ):
        with pytest.raises(UserError, match=f"server: {argument} is {value!r}"):
            plan(config_of(big, server={argument: value}))
    for name, value in (
        ("num_attention_heads", 0),
        ("num_key_value_heads", "two"),
        ("vocab_size", -1),
    ):
        (tmp_path / "config.json").write_text(json.dumps(QWEN | {name: value}))
        with pytest.raises(
            ModelFolderError, match=rf"{name} is {value!r}|{name}'.* value {value!r}"
        ):
            plan(config_of(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="holds a list"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "problem"), [("jamba", "Mamba 1"), ("llama4", "attention within chunks")]
)
def test_a_model_that_is_not_trained_is_refused_by_its_config_alone(kind, problem, tmp_path):
    """By the plan, and by the run before anything is downloaded or started."""
    folder = tmp_path / "model"
    CONFIG_MAPPING[kind]().save_pretrained(folder)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("x")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = config_of(folder, run=str(tmp_path / "run"), tasks_per_iteration=1)
    with pytest.raises(ModelFolderError, match=problem):
        make_plan(config)
    with pytest.raises(ModelFolderError, match="ttrl does not support this model"):
        train(config, [Task([{"role": "user", "content": "x"}], len)])
    assert not (tmp_path / "run").exists()


def test_this_machine_is_measured(big, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of(big).resolved(cuda=False)
    machine = plan_machine.this_machine(config, (64, 64))
    assert not machine.cuda and machine.matmul > 0 and machine.memory > 0
    made = make_plan(config).machine
    assert made.source == "measured" and made.matmul > 0
    assert dataclasses.replace(made, matmul=0.0) == dataclasses.replace(machine, matmul=0.0)


def test_the_best_speed_that_was_ever_measured_counts(big, tmp_path, monkeypatch):
    """A trainer's too, which measures more libraries: both keep it under the same name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    matmul_peak.cache_clear()
    matmul_peak((2048, 32, 8), torch.float32, torch.device("cpu"))
    file = tmp_path / "ttrl" / "peaks.json"
    (name,) = json.loads(file.read_text())
    file.write_text(json.dumps({name: 1e17}))
    config = config_of(big, num_threads=torch.get_num_threads()).resolved(cuda=False)
    plan_machine.matmul_speed.cache_clear()
    assert plan_machine.this_machine(config, (32, 8)).matmul == 1e17
    plan_machine.matmul_speed.cache_clear()
    matmul_peak.cache_clear()


def test_the_time_is_said_with_what_it_rests_on(big, world):
    made = plan(config_of(big))
    assert re.fullmatch(
        r"plan: 10 iterations of about .*; rough, may be wrong by a factor of 3 \(completions of "
        r"3\d\d tokens are assumed\)",
        made.time_line(),
    )
    assert re.fullmatch(
        r"an iteration: \d+ tasks, [\d,]+ samples, about [\d.]+ [kM]?tokens, \d+ rows? of [\d,]+, "
        r"\d+ optimizer steps?, [\d.]+ [TP]FLOP",
        made.work_line(),
    ), made.work_line()
    assert made.time_line(may_end_early=True).startswith("plan: up to 10 iterations of about ")
    assert (
        made.does_not_fit is not None and plan(world.config(), world.tasks(3)).does_not_fit is None
    )
    world.train(iterations=3)
    assert "assumed" not in plan(world.config(), run=world.run).time_line()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "took more than 0.2 s"),
        ("{{ 'x' * 10**9 }}", "builds more than"),
    ],
)
def test_a_chat_template_that_takes_all_time_or_memory_is_stopped(
    template, why, monkeypatch, tiny_model
):
    """Templates come with the model, from strangers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = template
    monkeypatch.setattr("ttrl.data.chat.rendering.RENDER_SECONDS", 0.2)
    task = Task(id="a", messages=[{"role": "user", "content": "x"}], grader=lambda _: 1.0)
    with pytest.raises(
        UserError, match=f"task 'a': the model's chat template cannot render its messages .*{why}"
    ):
        lengths.prompt_ids(task, tokenizer)
