"""Arms at equal FLOPs: what SFT is trained on, what is asked when, how it goes on, and the report.

Supervised training is the recipe's own, in this process. RL is a run folder made up here, whose
FLOPs are known; held-out tasks are answered by a server that sorts all words that have no a.
"""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest
import torch
import yaml
from openai import AsyncOpenAI
from support.chat_server import ChatHandler, choice, completion, threaded
from support.facts import mark

from ttrl import TrainConfig, evaluate, plan, sft_recipe
from ttrl.cli import arms
from ttrl.cli.arms import Supervised, run_arms, supervised_first
from ttrl.cli.plan_command import PlanOptions
from ttrl.configs import SFTConfig
from ttrl.errors import ConfigError, RunFolderError, UserError
from ttrl.facts import Sync, TrainFacts
from ttrl.loop import equal_flops
from ttrl.loop import supervised_run as supervised_module
from ttrl.loop.supervised_run import HeldOut, held_out_config, supervised_run
from ttrl.plans.plan import Plan
from ttrl.plans.supervised import Hardware
from ttrl.report.compared_runs import spent
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_run
from ttrl.system.files import read_jsonl
from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples
from ttrl.text import si_spaced
from ttrl.tiny_model import make_tiny_model
from ttrl.training.parallel.distributed import Ranks

try:
    import httpx2 as http
except ImportError:
    import httpx as http

pytestmark = pytest.mark.usefixtures("short_canaries")
QWEN = json.loads(
    (Path(__file__).parents[2] / "ttrl" / "costs" / "architectures.json").read_text()
)["qwen2.5_7b"]
PROBED = PlanOptions(probe=True)
TASKS = get_sort_letters_tasks("train", 64, partial_credit=0)
HELD_OUT = get_sort_letters_tasks("validation", 12, partial_credit=0)
EXAMPLES = sort_letters_examples(16)
# 2e7 count.
EACH = {"prefill": 2e6, "decode": 6e6, "training": 1.2e7, "recomputation": 9e7, "validation": 4e6}


def reply_to(body):
    word = body["messages"][-1]["content"].removeprefix("sort: ")
    return word if "a" in word else "".join(sorted(word))


class _Sorter(ChatHandler):
    def reply(self, body):
        return reply_to(body), "stop"


class _Servers:
    """Stands in for PolicyServer: any policy answers as the sorter does. `done` is the record."""

    done: list

    def __init__(self, config, logs, console, **_):
        self.run = Path(config.run).name
        self.up = False
        assert config.validation_samples == 1 and config.device != "auto"

    def serve(self, checkpoint, handover=None, start_from=None):
        assert (checkpoint / "config.json").exists()
        if not self.up:
            self.done.append(("server", self.run))
        self.up = True
        self.done.append(("ask", self.run, int(checkpoint.parent.name)))
        return Sync(mode="reload", seconds=0.0)

    def rest(self):
        if self.up:
            self.done.append(("rest", self.run))

    def stop(self):
        self.up = False

    def check(self):
        assert self.up

    model_name = "policy"

    def endpoints(self):
        def answer(request):
            if request.method == "GET":
                return http.Response(404)
            body = json.loads(request.content)
            assert body["temperature"] == 0 and body["max_tokens"] == 9
            return http.Response(200, json=completion([choice(0, reply_to(body))]).body)

        client = http.AsyncClient(transport=http.MockTransport(answer))
        return [AsyncOpenAI(base_url="http://fake/v1", api_key="k", http_client=client)]


@pytest.fixture(scope="module")
def address():
    with threaded(_Sorter) as address:
        yield address


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("arms") / "model", layers=1, width=32, heads=1)


@pytest.fixture(scope="module")
def answers(address, tmp_path_factory):
    """What every policy says to the held-out tasks, and how much of it is right."""
    path = tmp_path_factory.mktemp("answers") / "validation.jsonl"
    return path, evaluate(address, {"x": HELD_OUT}, samples_file=path, pbar=False, max_tokens=9)[
        "x"
    ].accuracy.mean


@pytest.fixture
def world(address, answers, monkeypatch):
    """What was trained and asked, in order."""
    done, (said, exact), threads = [], answers, torch.get_num_threads()

    def tune_here(config, path, *, recipe, nproc_per_node, pbar_desc):
        assert nproc_per_node == 1
        done.append(
            (
                "train",
                Path(config["output_dir"]).parent.parent.name,
                config.get("steps"),
                config.get("flops"),
            )
        )
        config = SFTConfig.parse(yaml.safe_load(yaml.safe_dump(config)), "test")
        sft_recipe.train_on_examples(config, Ranks(0, 1, torch.device("cpu")))

    def ask_there(model, tasks, *, dtype=None, max_model_len=None, server_args=None, **settings):
        done.append(("ask", Path(model).name, *tasks))
        return evaluate(address, tasks, **settings)

    def train(config, *, tasks, validation_tasks):
        folder = RunFolder(config.run)
        done.append(("RL", folder.path.name))
        if (folder.path / "metrics.jsonl").exists():
            return types.SimpleNamespace(checkpoint=Path(config.model))
        folder.path.mkdir(parents=True)
        (folder.path / "config.yaml").write_text(yaml.safe_dump(config.resolved(False).to_dict()))
        rows, total = [], 0.0
        for number in range(config.iterations + 1):
            folder.iteration(number).path.mkdir(parents=True)
            shutil.copy(said, folder.iteration(number).path)
            stats = {
                "mean_reward": exact,
                "metrics": {"exact": exact},
                "num_graded": 12,
                "num_failed": 0,
            }
            facts = {"seconds": 1.0, "stats": stats, "sampling": "greedy", "intervals": {}}
            mark(folder.iteration(number), "validate", [said.name], facts)
            parts = EACH if number else {"validation": EACH["validation"]}
            total += sum(parts.values())
            row = {
                "iteration": number,
                "validation": {"exact": exact},
                "validation_reward": exact,
                "seconds": {"total": 1.0},
            }
            rows.append(row | {"flops": parts | {"total": sum(parts.values()), "cumulated": total}})
        (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return types.SimpleNamespace(checkpoint=Path(config.model))

    for name, replacement in (("evaluate", ask_there), ("train", train)):
        monkeypatch.setattr(arms, name, replacement)
    for name, replacement in (("tune", tune_here), ("PolicyServer", _Servers)):
        monkeypatch.setattr(supervised_module, name, replacement)
    _Servers.done = done
    torch.set_num_threads(1)  # two of them wait for each other longer than such a model computes
    yield done
    torch.set_num_threads(threads)


def settings(model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in EXAMPLES))
    return {
        "model": str(model),
        "seed": 0,
        "data": str(data),
        "lr": 1e-3,
        "batch_size": 4,
        "seq_len": 64,
        "device": "cpu",
    }


def asked_of(model, metric="exact"):
    config = TrainConfig(run="", model=str(model), iterations=1, max_tokens=9, device="cpu")
    return HeldOut(HELD_OUT, held_out_config(config.resolved(False), metric))


def given(tmp_path, **others):
    plain = {
        "seeds": 2,
        "sft": ["lr=1e-3"],
        "points": 2,
        "sets": None,
        "sets_n": None,
        "arm": [],
        "set": [],
        "check": False,
        "plan": None,
    }
    fixed = {"run": tmp_path / "run", "seed": 0, "model": ""}
    return types.SimpleNamespace(**fixed | plain | others)


def run(arguments, model):
    config = TrainConfig(
        run=str(arguments.run), model=str(model), iterations=2, tasks_per_iteration=4,
        samples_per_task=16, max_tokens=9, advantages="mean", validation_metric="exact",
        training={"objective": "reinforce", "lr": 1e-6, "rows_per_microbatch": 3},
    )  # fmt: skip
    own = {"batch_size": 2, "seq_len": 64}
    start = Supervised(EXAMPLES, own, marks=[2, 3, 5], stop_at=0.2)
    sets = {"long": get_sort_letters_tasks("validation", 6, max_length=9, partial_credit=0)}
    return run_arms(
        arguments,
        config,
        TASKS,
        HELD_OUT,
        start=start,
        sft=Supervised(EXAMPLES, {**own, "lr": 1e-3 / 4}),
        sets=sets,
    )


def test_sft_takes_as_many_flops_as_rl(world, model, tmp_path):
    said = run(given(tmp_path, arm=[["more", "samples_per_task=32"]]), model)
    folder = RunFolder(tmp_path / "run" / "SFT-1")
    steps = [folder.iteration(number).marker(TrainFacts).steps for number in (1, 2)]
    half = max(step["flops"] for part in steps for step in part) / 2
    first, second = (sum(step["flops"] for step in part) for part in steps)
    # After iterations 1 and 2.
    assert abs(first - 2e7) <= half and abs(first + second - 4e7) <= half < 4e6
    assert [step["global_step"] for part in steps for step in part] == list(
        range(1, len(steps[0]) + len(steps[1]) + 1)
    )
    config = folder.config()
    assert (
        config["training"]["lr"] == 1e-3
        and config["training"]["rows_per_microbatch"] == 3
        and config["seed"] == 1
    )
    assert (folder.path / "iterations/0000/validation.jsonl").read_text() == (
        tmp_path / "run/RL-1/iterations/0000/validation.jsonl"
    ).read_text()
    assert (
        not (folder.path / "iterations/0001/checkpoint").exists() and folder.checkpoint(2).exists()
    )
    assert (
        "no difference seen between RL and SFT" in said
        and "no difference seen between RL and more" in said
    )
    assert "long" in said and str(tmp_path / "run" / "compare.html") in said
    assert (tmp_path / "run" / "compare.html").read_text().count("<svg") == 4
    # Every answer without an a is right from the beginning: the start is not trained, and every arm
    # is as good.
    assert [one for one in world if one[1] == "start"] == [("server", "start"), ("ask", "start", 0)]
    # RL's answers by the start are taken over; one server answers at both points.
    assert [one for one in world if one[1] == "SFT-1" and one[0] != "train"] == [
        *[("server", "SFT-1"), ("ask", "SFT-1", 1), ("rest", "SFT-1"), ("ask", "SFT-1", 2)],
    ]
    before = len(world)
    assert run(given(tmp_path, arm=[["more", "samples_per_task=32"]]), model) == said
    assert [one[0] for one in world[before:]] == ["RL"] * 4  # whose finished runs say so themselves


def test_a_supervised_run_ends_at_a_mark_where_it_is_good_enough(world, model, tmp_path):
    own, asked = settings(model, tmp_path), asked_of(model)
    right = sum("a" not in task.messages[0]["content"] for task in HELD_OUT) / 12
    assert 0.2 < right < 1
    checkpoint = supervised_run(
        tmp_path / "all", own, asked, by="steps", marks=[2, 3], stop_at=right + 0.01
    )
    assert (
        checkpoint == tmp_path / "all/iterations/0002/checkpoint"
        and (checkpoint / "config.json").exists()
    )
    assert [one for one in world if one[0] == "train"] == [
        ("train", "all", 2, None),
        ("train", "all", 1, None),
    ]
    rows = read_jsonl(tmp_path / "all" / "metrics.jsonl")
    assert [row["train"]["global_step"] for row in rows[1:]] == [2, 3] and {
        row["validation"]["exact"] for row in rows
    } == {right}
    assert (
        supervised_run(tmp_path / "none", own, asked, by="steps", marks=[2], stop_at=right) == model
    )
    with pytest.raises(RunFolderError, match="marks"):
        supervised_run(tmp_path / "all", own, asked, by="steps", marks=[2, 4])
    with pytest.raises(UserError, match="no metric 'format'; choose from reward, exact"):
        supervised_run(
            tmp_path / "other",
            own,
            asked_of(model, "format"),
            by="steps",
            marks=[2],
        )


def test_a_killed_run_goes_on_where_it_was(world, model, tmp_path):
    """After a piece was trained but not asked, and in the middle of a piece: to the same
    weights.
    """
    own, asked = settings(model, tmp_path), asked_of(model)
    whole = supervised_run(tmp_path / "whole", own, asked, by="steps", marks=[2, 4])
    supervised_run(tmp_path / "killed", own, asked, by="steps", marks=[2])
    (tmp_path / "killed" / "config.yaml").unlink()
    folder = RunFolder(tmp_path / "killed")
    (folder.path / "metrics.jsonl").write_text(
        (folder.path / "metrics.jsonl").read_text().splitlines()[0] + "\n"
    )
    (folder.iteration(1).path / "done/validate.json").unlink()
    (folder.iteration(2).path).mkdir()
    (folder.iteration(2).path / "train.jsonl").write_text("{}\n")
    world.clear()
    last = supervised_run(tmp_path / "killed", own, asked, by="steps", marks=[2, 4])
    assert [one[0] for one in world] == ["server", "ask", "rest", "train", "ask"]
    assert (last / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_begins_with_the_supervised_training_that_it_needs(world, model, tmp_path, capsys):
    """Unless it is only looked at; with what is wrong said before anything is trained; with one
    answer to each held-out task, whatever the run asks for. The same command finds it there again.
    """
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model=str(model),
        iterations=2,
        max_tokens=9,
        validation_samples=8,
        validation_temperature=0.0,
    )
    right = sum("a" not in task.messages[0]["content"] for task in HELD_OUT) / 12
    start = Supervised(
        EXAMPLES, {"batch_size": 2, "seq_len": 64, "lr": 1e-3}, marks=[2, 3], stop_at=right + 0.01
    )
    for looked in ({"check": True}, {"plan": PROBED}, {"tiny": True}):
        arguments = given(tmp_path, **{"tiny": False, **looked})
        assert supervised_first(arguments, config, TASKS, HELD_OUT, start) is config
    shown = capsys.readouterr()
    assert "start: 1 process in fp32, each with up to" in shown.out
    assert "--tiny leaves out the supervised training" in shown.err
    announced = (
        "before the run: up to 3 supervised steps of 2 conversations, until held-out exact reaches "
    )
    assert announced in shown.out
    # A plan without a probe, as for other GPUs, is a check as well.
    arguments = given(tmp_path, tiny=False, check=True, plan=PlanOptions())
    assert supervised_first(arguments, config, TASKS, HELD_OUT, start) is config
    assert announced in capsys.readouterr().out
    arguments = given(tmp_path, tiny=False, check=True, plan=PlanOptions(json=True))
    assert supervised_first(arguments, config, TASKS, HELD_OUT, start) is config
    shown = capsys.readouterr()
    assert announced in shown.err and shown.out == ""
    for looked in ({"check": True}, {}):
        wrong = dataclasses.replace(start, settings={"batch_size": 0})
        with pytest.raises(ConfigError, match="start: batch_size is 0"):
            supervised_first(given(tmp_path, tiny=False, **looked), config, TASKS, HELD_OUT, wrong)
    for text, said in (
        ("batch_size=0", "start: batch_size is 0"),
        ("flops=1", "--sft: flops is the same"),
    ):
        with pytest.raises(ConfigError, match=said):
            supervised_first(
                given(tmp_path, tiny=False, sft=[text]), config, TASKS, HELD_OUT, start
            )
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        supervised_first(
            given(tmp_path, tiny=False, set=["max_tokens=0"]), config, TASKS, HELD_OUT, start
        )
    assert not world and not (tmp_path / "run").exists()
    arguments = given(tmp_path, tiny=False)
    first = supervised_first(arguments, config, TASKS, HELD_OUT, start)
    assert first == dataclasses.replace(
        config, model=str(tmp_path / "run/start/iterations/0002/checkpoint")
    )
    start_rows = RunFolder(tmp_path / "run/start").metrics()
    assert {row.validation_samples for row in start_rows} == {len(HELD_OUT)}
    trained = len(world)
    assert (
        supervised_first(arguments, config, TASKS, HELD_OUT, start) == first
        and len(world) == trained
    )


@pytest.fixture
def gpus(world, monkeypatch):
    """Two of them, as far as arms are concerned: what was started in how many processes, with which
    settings.
    """
    started = []

    def tune_there(config, path, *, recipe, nproc_per_node, pbar_desc):
        started.append((Path(config["output_dir"]).parent.parent.name, nproc_per_node, config))
        for name in ("checkpoint", "state"):
            (Path(config["output_dir"]) / name).mkdir(parents=True)
        shutil.copytree(
            config["model"], Path(config["output_dir"]) / "checkpoint", dirs_exist_ok=True
        )
        step = {
            "global_step": 1,
            "flops": 4e6,
            "trained_tokens": 1,
            "row_tokens": 1,
            "padding_tokens": 0,
            "logical_tokens": 1,
        }
        step |= {"lr": 1e-3, "seconds": 1.0, "flops_by_part": {"training": 4e6}}
        (Path(config["output_dir"]) / "train.jsonl").write_text(json.dumps(step) + "\n")

    def of(config):
        return Hardware([80e9, 80e9], 1e12)

    here = TrainConfig.resolved
    # So does `train` there.
    monkeypatch.setattr(TrainConfig, "resolved", lambda config, cuda: here(config, True))
    monkeypatch.setattr(supervised_module, "tune", tune_there)
    monkeypatch.setattr(Hardware, "of", of)
    return started


def test_supervised_training_takes_over_the_gpus_and_the_dtype_of_the_run(gpus, model, tmp_path):
    """Before the run and next to it; the same command finds what was chosen."""
    arguments = given(tmp_path, seeds=1, set=["optimizer=adamw_8bit", "weight_decay=0.1"])
    config = TrainConfig(
        run=str(tmp_path / "run"),
        model=str(model),
        iterations=2,
        tasks_per_iteration=4,
        max_tokens=9,
    )
    right = sum("a" not in task.messages[0]["content"] for task in HELD_OUT) / 12
    start = Supervised(
        EXAMPLES,
        {"batch_size": 2, "seq_len": 64, "rows_per_microbatch": 1},
        marks=[2],
        stop_at=right + 0.01,
    )
    sft = Supervised(EXAMPLES, {"batch_size": 2, "seq_len": 64, "rows_per_microbatch": 1})
    for _ in range(2):
        run_arms(arguments, config, TASKS, HELD_OUT, start=start, sft=sft, sets={})
    assert [name for name, _, _ in gpus] == ["start", "SFT-0", "SFT-0"]
    assert {processes for _, processes, _ in gpus} == {2}
    first, second, _ = (settings for _, _, settings in gpus)
    for settings in (first, second):
        assert settings["dtype"] == "bf16" and settings["rows_per_microbatch"] == 64
        assert settings["activation_checkpointing"] is False
    assert (first["optimizer"], second["optimizer"]) == ("adamw", "adamw_8bit")
    assert "weight_decay" not in first and second["weight_decay"] == 0.1
    assert RunFolder(tmp_path / "run" / "SFT-0").config()["nproc_per_node"] == 2


def test_what_does_not_fit_is_told_of_all_arms_before_anything_runs(
    world, gpus, tmp_path, monkeypatch
):
    """RL trains adapters, which fit; the start trains all weights of 7 billion."""
    big = tmp_path / "big"
    big.mkdir()
    (big / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.setattr(Hardware, "of", lambda config: Hardware([80e9], 1e12))
    with pytest.raises(ConfigError) as caught:
        run(given(tmp_path, set=["lora_rank=32"]), big)
    (problem,) = caught.value.problems
    assert (
        problem.startswith("start: does not fit: the trainer needs")
        and "; or 2 such GPUs" in problem
    )
    assert "TTRL_IGNORE_MEMORY=1" in problem
    monkeypatch.setattr(Hardware, "of", lambda config: Hardware([24e9], 1e12))
    with pytest.raises(ConfigError) as caught:
        run(given(tmp_path, arm=[["wide", "lora_rank=8"]]), big)
    said = [problem.split(":")[0] for problem in caught.value.problems]
    assert said == ["RL", "wide", "start", "SFT"]
    assert not world and not gpus and not (tmp_path / "run").exists()


def test_what_does_not_fit_a_start_is_told_before_it_begins(
    world, gpus, model, tmp_path, monkeypatch
):
    config = TrainConfig(run=str(tmp_path / "run"), model=str(model), iterations=2, max_tokens=9)
    start = Supervised(EXAMPLES, {"batch_size": 2, "seq_len": 64}, marks=[2])
    monkeypatch.setattr(Hardware, "of", lambda config: Hardware([0.5e9], 1e12))
    with pytest.raises(ConfigError) as caught:
        supervised_first(given(tmp_path, tiny=False), config, TASKS, HELD_OUT, start)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["RL", "start"]
    monkeypatch.setattr(Hardware, "of", lambda config: Hardware([80e9], 1e12))
    monkeypatch.setattr(
        equal_flops, "supervised_run", lambda run, settings, *more, **others: settings["data"]
    )
    assert supervised_first(
        given(tmp_path, tiny=False), config, TASKS, HELD_OUT, start
    ).model.endswith("examples.jsonl")
    assert not world and not gpus


def test_a_plan_says_what_supervised_training_takes(gpus, model, tmp_path, monkeypatch):
    def planned(arguments, config, *more):
        made = plan(dataclasses.replace(config, device="cpu"), TASKS, HELD_OUT)
        made.save(Path(config.run))
        return "the run's plan"

    monkeypatch.setattr(arms, "run_recipe", planned)
    said = run(given(tmp_path, plan=PROBED, seeds=None, sft=[], model="m"), model)
    parts = said.split("\n\n")
    assert parts[0] == "the run's plan"
    assert parts[2].startswith("Supervised training\n  start: 2 processes in bf16, each with up to")
    assert "\n  SFT: 2 processes in bf16" in parts[2] and not gpus
    sft, search, one, five = parts[1].splitlines()
    made = Plan.load(tmp_path / "run" / "RL-0")
    flops = 2 * (made.flops.sampling + made.flops.training + made.flops.prepass)
    assert sft.startswith(
        f"SFT, of each seed, takes the {si_spaced(flops)}FLOP that RL takes: step"
    )
    assert "among 8.3e-05, 0.00025, 0.00075, once: " in search
    assert f"{si_spaced(3 * flops)}FLOP" in search
    assert one.startswith("1 seed (--seeds 1): about ") and five.startswith("5 seeds (--seeds 5): ")
    without = run(given(tmp_path, plan=PROBED, seeds=5), model).split("\n\n")[1]
    assert len(without.splitlines()) == 2 and "its learning rate" not in without


def test_wrong_arguments_are_told_before_anything_runs(world, model, tmp_path):
    for others, error, said in (
        ({"arm": [["RL", "lr=1"]]}, UserError, "--arm RL: choose another name"),
        ({"arm": [["a/b"]]}, UserError, "--arm a/b: choose another name"),
        (
            {"arm": [["x", "learning_rte=1"]]},
            ConfigError,
            "--arm x: neither a run nor a recipe has a setting 'learning_rte'",
        ),
        ({"set": ["max_tokens=0"]}, ConfigError, "max_tokens is 0"),
        (
            {"set": ["weight_decay=-1"]},
            ConfigError,
            "training: weight_decay is -1.0.*\\n.*SFT: weight_decay is -1.0",
        ),
        ({"seeds": 0}, UserError, "--seeds and --points must be at least 1"),
        ({"sft": ["lrr=1"]}, ConfigError, "SFT: unknown key 'lrr'; did you mean 'lr'"),
        ({"sft": ["lr"]}, ConfigError, "--sft: lr has no value; write --set lr=VALUE"),
        ({"sft": ["steps=9"]}, ConfigError, "--sft: steps is the same for all arms, or follows"),
        ({"arm": [["x", "sft.batch_size=0"]]}, ConfigError, "x: batch_size is 0"),
        (
            {"arm": [["x", "sft.lr=1", "temperature=1"]]},
            UserError,
            "--arm x: an arm is RL or SFT, and these are settings of both",
        ),
        ({"arm": [["x", "overfit=2"]]}, UserError, "overfit leaves no held-out tasks"),
    ):
        with pytest.raises(error, match=said):
            run(given(tmp_path, **others), model)
    assert not world and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("places", "last", "count", "chosen"),
    [
        (range(11), 10, 2, [5, 10]),
        ([0, 3, 6, 9, 10], 10, 2, [6, 10]),
        ([0, 8], 10, 5, [8, 10]),
        ([0], 3, 4, [3]),
        ([], 3, 4, [3]),
    ],
)
def test_sft_is_asked_where_the_run_was_asked(places, last, count, chosen):
    assert equal_flops.spread_places(places, last, count) == chosen


def test_a_best_learning_rate_at_the_edge_of_the_search_is_named():
    assert equal_flops._edge(2e-5, [1e-5, 2e-5, 4e-5]) == equal_flops._edge(1e-5, [1e-5]) == ""
    assert "largest of them; a larger" in equal_flops._edge(4e-5, [1e-5, 2e-5, 4e-5])
    assert "smallest of them; a smaller" in equal_flops._edge(1e-5, [1e-5, 2e-5, 4e-5])


def test_the_learning_rate_of_sft_is_the_best_of_three_by_held_out_loss(
    world, model, tmp_path, capsys
):
    """On as many FLOPs as the arm takes, and for no arm; a further arm takes it, too, and one with
    its own rate does not.
    """
    more = [["other", "sft.batch_size=1"], ["own", "sft.lr=2e-3"]]
    arguments = given(tmp_path, seeds=1, sft=["weight_decay=0.1"], arm=more)
    said = run(arguments, model)
    whole, folders = tmp_path / "run", {}
    measured = 0.0
    for rate in ("8.3e-05", "0.00025", "0.00075"):
        folder = RunFolder(whole / "SFT-lr" / rate)
        (row,) = [row for row in folder.metrics() if row.iteration]
        steps = folder.iteration(1).marker(TrainFacts).taken()
        assert abs(row.flops.cumulated - 4e7) <= max(step.flops for step in steps) / 2
        assert not (folder.iteration(1).path / "checkpoint").exists()
        assert folder.config()["training"]["lr"] == float(rate)
        folders[rate] = steps[-1].held_out_loss, sum(step.flops for step in steps)
        measured += steps[-1].held_out_flops
    best = min(folders, key=lambda rate: folders[rate])
    edge = {"8.3e-05": "the smallest of them", "0.00075": "the largest of them"}
    assert (edge.get(best) or "lowest held-out loss") in capsys.readouterr().out
    names = ("SFT-0", "other-0", "own-0")
    settings = {name: RunFolder(whole / name).config()["training"] for name in names}
    assert [settings[name]["lr"] for name in names] == [float(best), float(best), 2e-3]
    assert [settings[name]["batch_size"] for name in names] == [2, 1, 2]
    assert {one["weight_decay"] for one in settings.values()} == {0.1}
    trained = read_jsonl(whole / "examples.jsonl")
    held_out = read_jsonl(whole / "held_out_examples.jsonl")
    assert trained + held_out == [*map(dict, EXAMPLES)] and len(held_out) == 1
    assert not [one for one in world if one[1] in folders and one[0] != "train"]  # nothing is asked
    page = (whole / "compare.html").read_text()
    (together,) = [line for line in said.splitlines() if "together, for no arm" in line]
    sums = sum(flops for _, flops in folders.values()), measured
    assert together.split("no arm")[1].split() == " ".join(map(si_spaced, sums)).split()
    for text in (said, page):
        assert "its FLOPs count for no arm" in text
        assert "training FLOP" in text and "loss FLOP" in text
        for loss, _ in folders.values():
            assert f"{loss:.4f}" in text
    last = spent(read_run(whole / "SFT-0"))["flops"][-1]
    assert last < 1.2 * 4e7 < sum(flops for _, flops in folders.values())
    before = len(world)
    assert run(arguments, model) == said
    assert [one[0] for one in world[before:]] == ["RL"]
