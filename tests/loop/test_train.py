"""Whole runs on fake parts (see conftest.py): what a run leaves behind, and what it refuses before
anything starts.
"""

import dataclasses
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ttrl import Task, TrainConfig, train
from ttrl.errors import (
    ConfigError,
    ModelFolderError,
    RunFolderError,
    TaskError,
    UserError,
)
from ttrl.facts import FLOPS_PARTS, MetricsRow, PhaseSeconds
from ttrl.loop.phases import Phases
from ttrl.monitoring.progress_line import dead_share, iteration_line, seconds_left
from ttrl.plans.plan_machine import Machine
from ttrl.report.phrases import summary
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.reader import read_run
from ttrl.system.files import digest, read_jsonl


def test_a_run_goes_through_its_phases_in_order(world):
    world.writes_reports = True
    result = world.train()
    assert world.events == [
        *["start", "canary", "serve 0"],
        *["train 1", "serve 1", "train 2", "serve 2", "train 3", "serve 3"],
        "stop",
    ]
    # Each policy's held-out tasks and rollouts share the server; nothing of another policy is asked
    # for meanwhile.
    assert [version for version, _ in world.requests] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    for version in range(4):
        asked = [
            prompt.split()[0] for sampled_by, prompt in world.requests if sampled_by == version
        ]
        assert sorted(asked) == ["held-out"] * 2 + ["task"] * (2 if version < 3 else 0)
    trained = {prompt for _, prompt in world.requests if prompt.startswith("task")}
    assert len(trained) == 6  # an epoch is every task once

    assert result.metrics == world.rows()
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3]
    assert result.checkpoint == result.best_checkpoint == world.run / "iterations/0003/checkpoint"
    assert result.report == world.run / "report.html"
    assert result.report.stat().st_size > 1000
    for name in ("config.yaml", "environment.json", "tasks.json", "lock"):
        assert (world.run / name).is_file()


def test_metrics_rows_say_what_happened(world):
    world.train(validation_samples=4)
    before, *rows = world.rows()
    assert "reward" not in before
    assert before["validation_reward"] == 0.25
    assert before["validation"] == {"right": 0.25, "pass@4": 1.0}
    assert before["validation_samples"] == 8
    for number, row in enumerate(rows, 1):
        # Sampled by the version before.
        assert row["reward"] == row["metrics"]["right"] == number / 4
        assert (
            row["validation_reward"] == row["validation"]["right"] == (0.5, 0.75, 0.25)[number - 1]
        )
        assert row["samples"] == 8
        assert row["failed"] == 0
        assert row["finish_reasons"] == {"stop": 8}
        assert row["trained"] is True
        assert row["groups"]["total"] == 2
        assert {"sample", "pack", "train", "validate", "sync", "total"} <= row["seconds"].keys()
        assert row["tokens_per_second"] > 0 and row["grading_seconds"] > 0
        assert row["train"]["global_step"] == number
        assert row["sync"]["mode"] == "reload"
        assert 0 <= row["dead_seconds"] <= row["seconds"]["total"]
        assert row["server"]["flops_per_second"] > 0
    total = 0.0
    for row in world.rows():
        spent = row["flops"]
        assert spent["total"] == sum(spent[name] for name in FLOPS_PARTS if name in spent)
        total += spent["total"]
        assert spent["cumulated"] == total and spent["validation"] > 0
        assert ("prefill" in spent) == ("decode" in spent) == (row["iteration"] > 0)
    # A token per letter, and the end of turn.
    assert rows[0]["completion_tokens"] == 2 * len("yes") + 6 * len("no") + 8


def test_completions_that_the_model_finds_unlikely_are_ended_in_training_alone(world):
    world.logprob = lambda k, place: -9.0 if k == 3 and place else -1.0
    before, row = world.train(
        iterations=1, early_stop={"alpha": 0.5, "threshold": -4.0}, sample_files=True
    ).metrics
    assert row["finish_reasons"] == {"stop": 6, "stopped_early": 2}
    assert row["rollouts"]["stopped_early"] == 0.25 and row["rollouts"]["truncated"] == 0
    assert row["trained"] and row["samples"] == 8 and row["failed"] == 0
    assert before["validation_samples"] == row["validation_samples"] == 2
    samples = read_jsonl(world.run / "iterations/0001/rollouts.jsonl")
    assert [
        len(one["token_ids"]) for one in samples if one["finish_reason"] == "stopped_early"
    ] == [2, 2]
    files = sorted((world.run / "iterations/0001/samples").iterdir())
    assert len(files) == 8 and sum("stopped_early" in path.read_text() for path in files) == 2


def test_requests_are_logged_where_the_run_says_so(world):
    world.train(iterations=1, requests_log=True)
    assert len(read_jsonl(world.run / "logs/requests.jsonl")) == len(world.requests) == 6
    assert not (world.run / "iterations/0001/samples").exists()


@pytest.mark.parametrize(
    ("early_stop", "problem"),
    [
        ({"alpha": 2.0}, "early_stop: alpha is 2.0"),
        ({"beta": 1.0}, "early_stop: unknown key 'beta'"),
    ],
)
def test_an_early_stop_that_cannot_be_is_refused(world, early_stop, problem):
    refused(world, ConfigError, problem, early_stop=early_stop)


def test_each_iteration_starts_from_the_one_before(world):
    world.train()
    folder = world.run / "iterations"
    assert [config["model"] for config in world.recipes] == [
        str(folder / f"{n:04d}/checkpoint") for n in (0, 1, 2)
    ]
    assert [config["state"] for config in world.recipes] == [
        None,
        str(folder / "0001/state"),
        str(folder / "0002/state"),
    ]
    assert [config["iteration"] for config in world.recipes] == [1, 2, 3]


def test_markers_hold_the_digests_of_their_files(world):
    world.train(iterations=1)
    folder = world.run / "iterations/0001"
    for phase, name in (
        ("rollouts", "rollouts.jsonl"),
        ("pack", "packed.safetensors"),
        ("train", "state/state.txt"),
    ):
        files = json.loads((folder / f"done/{phase}.json").read_text())["files"]
        assert files[name] == digest(folder / name)
    assert not (folder / "rollouts.partial.jsonl").exists()


def test_without_validation_tasks(world, capsys):
    result = world.train(validation=[], iterations=2)
    said = capsys.readouterr().out
    assert "no held-out tasks: the policy was only measured on its training tasks" in said
    assert "sampling begins" in said and "validation begins" not in said
    assert result.best_checkpoint == result.checkpoint == world.run / "iterations/0002/checkpoint"
    assert not list(world.run.rglob("validation.jsonl"))
    assert all("validation_reward" not in row for row in world.rows())
    assert all(prompt.startswith("task") for _, prompt in world.requests)


def test_stop_at_ends_the_run_early_and_stays_ended(world):
    world.answer = lambda prompt, k, version: "yes" if k < 2 else "no"
    world.train(
        stop_at=1.0,
        iterations=5,
        tasks=world.tasks(2, "held-out"),
        validation=world.tasks(2, "held-out"),
    )
    # Sample 0 is right: reached before any training.
    assert [row["iteration"] for row in world.rows()] == [0]
    world.events.clear()
    world.train(
        stop_at=1.0,
        iterations=5,
        tasks=world.tasks(2, "held-out"),
        validation=world.tasks(2, "held-out"),
    )
    assert world.events == ["stop"]


def test_stop_at_waits_for_its_metric(world):
    world.answer = lambda prompt, k, version: (
        "yes" if k < (2 if prompt.startswith("task") else version) else "no"
    )
    result = world.train(
        stop_at=0.75, iterations=9, validation_samples=4, validation_metric="right"
    )
    assert [row["validation"]["right"] for row in world.rows()] == [0, 0.25, 0.5, 0.75]
    assert result.checkpoint == world.run / "iterations/0003/checkpoint"
    world.train(stop_at=1.0, iterations=9, validation_samples=4, validation_metric="right")
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3, 4]


def test_every_third_policy_is_validated_besides_the_first_and_the_last(world):
    world.train(iterations=5, validate_every=3, validation_samples=4)
    validated = [row["iteration"] for row in world.rows() if "validation_reward" in row]
    assert validated == [0, 3, 5] and [row["iteration"] for row in world.rows()] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    assert [(world.run / f"iterations/{n:04d}/validation.jsonl").is_file() for n in range(6)] == [
        n in validated for n in range(6)
    ]
    # What was left out stays out.
    result = world.train(iterations=7, validate_every=2, validation_samples=4)
    assert [row["iteration"] for row in world.rows() if "validation_reward" in row] == [
        0,
        3,
        5,
        6,
        7,
    ]
    assert result.best_checkpoint == world.run / "iterations/0005/checkpoint"


def test_an_unknown_validation_metric_is_named_in_the_line(world, capsys):
    world.train(validation_metric="rigth", iterations=1)
    assert "no held-out metric 'rigth' (known: reward, right)" in capsys.readouterr().out


def test_the_best_checkpoint_outlives_pruning_and_the_rest_does_not(world):
    best = 2
    world.answer = lambda prompt, k, version: (
        "yes" if k < (2 if prompt.startswith("task") else 4 * (version == best)) else "no"
    )
    result = world.train(iterations=7, validation_samples=4)
    assert result.best_checkpoint == world.run / "iterations/0002/checkpoint"
    there = [n for n in range(8) if (world.run / f"iterations/{n:04d}/checkpoint").exists()]
    assert there == [2, 5, 6, 7]
    assert [n for n in range(8) if (world.run / f"iterations/{n:04d}/state").exists()] == [5, 6, 7]
    assert (world.model / "config.json").is_file()  # iteration 0 is links: what they point at stays
    assert (world.model / "model.safetensors").is_file()


def test_nothing_goes_to_standard_error_outside_of_terminals(world, capfd):
    world.train(iterations=1)
    captured = capfd.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert (
        lines[0].startswith("weight_sync: memory (") and len(lines) == 12 and "entropy" in lines[7]
    )
    assert lines[1].startswith(
        "tool calls: no parser, because its chat template shows the model no tools"
    )
    assert lines[8].startswith("held-out reward: start ") and re.fullmatch(
        r"advantages .* to .*; .* reward/s; graders .* s an iteration, .*", lines[9]
    )
    folder = world.run / "iterations" / "0001" / "checkpoint"
    assert lines[10:] == [f"report:     {world.run / 'report.html'}", f"checkpoint: {folder}"]
    assert lines[2].startswith("starting vLLM and the trainer")
    planned = (
        r"plan: 1 iteration of about .* s, .* with the start; rough, may be wrong by a factor of "
        r"3 "
    )
    assert re.fullmatch(planned + r"\(completions of [1-8] tokens are assumed\)", lines[4])
    assert lines[3].startswith("an iteration: ")
    # Nothing is known of an iteration yet.
    assert lines[5].startswith("before") and " left" not in lines[5]
    assert lines[6].startswith(
        "iteration   1  reward 0.250, right 0.250  held-out reward 1.000 (95%: 0.342 to 1.000; "
        "greedy, 2 tasks)  "
    )


@pytest.mark.long(but=["1-1.0-1.0-temperature 1, 2 tasks"])
@pytest.mark.parametrize(
    ("samples", "temperature", "drawn_at", "said"),
    [
        (1, None, 0.0, "greedy, 2 tasks"),
        (4, None, 0.7, "temperature 0.7, 2 tasks × 4"),
        (1, 1.0, 1.0, "temperature 1, 2 tasks"),
    ],
)
def test_held_out_samples_are_greedy_unless_there_are_several(
    world, samples, temperature, drawn_at, said
):
    """And there, pass@k of the metric that the run is judged by stands beside the means.

    Long for the other counts: only these are greedy or several.
    """
    world.writes_reports = True
    asked, answer = (
        {"validation_samples": samples, "validation_temperature": temperature},
        world.answer,
    )
    world.answer = lambda prompt, k, version: (
        "no" if prompt == "held-out 1" else answer(prompt, k, version)
    )
    result = world.train(iterations=1, temperature=0.7, **asked)
    assert world.temperatures == {"task": {0.7}, "held-out": {drawn_at}}
    assert {row["validation_sampling"] for row in world.rows()} == {said}
    held_out, intervals = world.rows()[1]["validation"], world.rows()[1]["validation_intervals"]
    assert held_out["right"] == (0.25 if samples == 4 else 0.5) and held_out.get("pass@4") == (
        0.5 if samples == 4 else None
    )
    assert all(
        0 <= intervals[name][0] <= share <= intervals[name][1] <= 1
        for name, share in held_out.items()
    )
    assert f"; {said})" in summary(read_run(result.run)) and said in result.report.read_text()


def test_the_plan_is_of_a_machine_on_which_nothing_runs_and_says_what_does_not_fit(
    world, capfd, monkeypatch
):
    """Beside a server that starts, this machine's products seemed three times as slow as they
    are.
    """
    small = Machine("a small one", False, 1e9, 50e9, 20e9, "measured")
    monkeypatch.setattr(
        "ttrl.plans.planner.this_machine", lambda config, product: world.note("measured") or small
    )
    world.train(iterations=2, stop_at=2.0)
    assert world.events[:3] == ["measured", "start", "canary"]
    lines = capfd.readouterr().out.splitlines()
    (planned,) = (
        number
        for number, line in enumerate(lines)
        if line.startswith("plan: up to 2 iterations of about ")
    )
    assert (
        lines[planned + 1].startswith("note: does not fit: trainer (")
        and "weight_sync: restart stops" in lines[planned + 1]
    )
    assert [
        line.split("  ")[-1].startswith("at most about ")
        for line in lines
        if line.startswith("iteration")
    ] == [True, False]
    (world.run / "metrics.jsonl").unlink()
    world.events.clear()
    world.train(iterations=2, stop_at=2.0)
    assert "measured" not in world.events  # it has its plan


def test_each_iteration_says_how_long_the_rest_will_take(world, capfd):
    world.train(iterations=3)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [bool(re.search(r"  about [\d.]+ s left$", line)) for line in lines] == [
        True,
        True,
        False,
    ]
    rows = [
        MetricsRow(iteration=number, seconds=PhaseSeconds(total=float(number)))
        for number in range(9)
    ]
    assert seconds_left(rows, 10) == 2 * (4 + 5 + 6 + 7 + 8) / 5
    # Sampled beside a long validation, nothing trained.
    beside = [MetricsRow(iteration=1, seconds=PhaseSeconds(sample=60.0, total=0.01))]
    assert seconds_left(beside, 3) == 2 * 60.0
    assert seconds_left(rows, 8) is None
    assert seconds_left(rows[:1], 2) is None


def test_work_hidden_behind_the_validation_before_is_not_called_dead():
    seconds = PhaseSeconds(sample=20.0, train=30.0, total=0.5)
    hidden = MetricsRow(iteration=1, seconds=seconds, dead_seconds=0.3)
    assert dead_share(hidden) == pytest.approx(0.01)
    assert "dead 1%" in iteration_line(hidden, TrainConfig(model="m", run="r", iterations=1))
    seconds = PhaseSeconds(sample=20.0, train=30.0, total=60.0)
    assert dead_share(hidden.replace(seconds=seconds, dead_seconds=15.0)) == 0.25
    assert dead_share(MetricsRow(iteration=1, seconds=seconds)) is None


def test_the_line_of_a_run_that_overfits_names_the_training_tasks():
    row = MetricsRow(iteration=1, validation_reward=0.5, validation={"exact": 0.25})
    config = TrainConfig(model="m", run="r", iterations=1, overfit=2, validation_metric="exact")
    assert "  exact on the training tasks 0.250  " in iteration_line(row, config)
    config = dataclasses.replace(config, overfit=None)
    assert "  held-out exact 0.250  " in iteration_line(row, config)
    config = dataclasses.replace(config, overfit=2, validation_metric="right")
    line = iteration_line(row, config)
    assert "  no metric 'right' on the training tasks (known: reward, exact)  " in line


def test_prompts_beyond_the_context_are_counted_before_a_server_starts(world, capsys):
    """Exactly: a long text, here an id, may have few tokens."""
    (long,) = world.tasks(1, "x" * 200)
    short = Task([{"role": "user", "content": "task 1"}], long.grader, id="y" * 200)
    server = {"max_model_len": 150}
    settings = {"tasks_per_iteration": 1, "iterations": 1, "seq_len": 512, "server": server}
    with pytest.raises(ConfigError, match=r"tasks: 1 of 1 prompts leave no room .* of 150 tokens"):
        world.train([long], **settings)
    assert not world.events
    world.train([long, short], [short], **settings)
    said = capsys.readouterr().out
    assert re.search(r"note: tasks: 1 of 2 prompts leave no room .* with 2\d\d tokens", said)
    assert "validation_tasks:" not in said


def test_quiet_says_nothing(world, capfd):
    world.train(world.tasks(4), world.tasks(1, "held-out"), iterations=1, quiet=True)
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""


# What is wrong before anything starts


def refused(world, kind, match, *args, **kwargs):
    with pytest.raises(kind, match=match) as caught:
        world.train(*args, **kwargs)
    assert world.events == []
    assert not world.run.exists()  # not even the folder
    return caught.value


def test_every_problem_of_a_config_at_once(world):
    error = refused(
        world,
        ConfigError,
        "6 problems",
        iterations=0,
        samples_per_task=1,
        training={"lrr": 1e-4, "kl_coefficient": "much"},
        sampling={"temperature": 1.0},
        stop_at="high",
    )
    for text in (
        "iterations is 0",
        "samples_per_task is 1",
        "did you mean 'lr'?",
        "training: kl_coefficient is 'much'",
        "stop_at",
    ):
        assert text in str(error)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sampling": {"stopp": "x"}}, r"sampling: params\['stopp'\] .*did you mean 'stop'"),
        ({"sampling": {"extra_body": 5}}, "extra_body"),
        ({"server": {"port": 80}}, "server: extra_args: port is set by ttrl"),
        ({"server": {"model": Path("x")}}, "server holds"),
        ({"training": {"seed": 3}}, "training: 'seed' is set by the loop"),
        ({"tasks_per_iteration": 7}, "tasks_per_iteration is 7, but there are only 6 tasks"),
        ({"dtype": "fp16"}, "one of 'auto', 'fp32', 'bf16'"),
    ],
)
def test_bad_settings(world, changes, match):
    refused(world, ConfigError, match, **changes)


def test_no_tasks(world):
    refused(world, ConfigError, "there are no tasks to train on", tasks=[])


def test_stop_at_without_validation_tasks(world):
    refused(world, ConfigError, "stop_at needs validation tasks", validation=[], stop_at=0.9)


def test_things_that_are_no_tasks(world):
    task = world.tasks(1)[0]
    refused(
        world,
        TaskError,
        "tasks: 2 of 3 are not Tasks, the first is of type dict",
        tasks=[task, {"messages": []}, "x"],
    )
    refused(world, TaskError, "validation_tasks: 1 of 1", validation=[None])
    refused(world, TaskError, "tasks is of type Task; give a list", tasks=task)
    refused(world, TaskError, "tasks is of type method; give a list", tasks=world.tasks)
    unwritable = Task(
        [{"role": "user", "content": "x", "when": {1, 2}}], lambda choice: 1.0, id="odd"
    )
    refused(
        world,
        TaskError,
        "task 'odd': its id and messages cannot be written as JSON",
        tasks=[unwritable],
        tasks_per_iteration=1,
    )


def test_tasks_may_come_from_a_generator(world):
    world.train(
        tasks=(task for task in world.tasks(6)),
        validation=(task for task in world.tasks(1, "held-out")),
        iterations=1,
    )
    assert len(world.rows()) == 2


def test_model_folders_that_will_not_do(world, tmp_path):
    refused(world, ModelFolderError, "nowhere does not exist", model=str(tmp_path / "nowhere"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in world.model.iterdir():
        if path.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (bare / path.name).symlink_to(path)
    refused(world, ModelFolderError, "no chat template", model=str(bare))


def test_a_run_folder_that_is_a_file(world):
    world.run.write_text("I am a file")
    with pytest.raises(RunFolderError, match="cannot be a run folder"):
        world.train()
    assert world.events == []


def test_a_run_folder_of_a_living_process_is_refused_with_its_pid(world):
    code = (
        "import sys, time\nfrom ttrl.run_folder.folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).locked():\n    print('locked', flush=True)\n    "
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(world.run)], stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout.readline() == "locked\n"
            with pytest.raises(
                RunFolderError, match=rf"in use by another process \(pid {owner.pid} on "
            ):
                world.train()
        finally:
            owner.kill()
    assert world.events == []
    world.train(iterations=1)  # killed with -9: free at once
    assert len(world.rows()) == 2


def test_the_tasks_of_the_iterations_are_the_stream_of_shuffled_epochs(world):
    tasks = world.tasks(7)
    config = world.config(tasks_per_iteration=3, seed=5)
    made = Phases(config, RunFolder(world.run), world.model, tasks=tasks, server=None, console=None)
    stream = [task.id for number in range(1, 15) for task in made.stream.tasks_of(number)]
    epochs = [stream[k : k + 7] for k in range(0, 42, 7)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert stream == [task.id for number in range(1, 15) for task in made.stream.tasks_of(number)]


def test_logging_is_silent_at_warning_level_in_a_healthy_run(world, caplog):
    with caplog.at_level(logging.WARNING):
        world.train(iterations=1)
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("ttrl")
    ] == []


TEMPLATE = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{# ours #}"


def test_a_run_with_a_chat_template_starts_from_a_model_that_has_it(world, tmp_path, capsys):
    """The model's files stay as they are; the text, not the file, is what the run remembers."""
    file = tmp_path / "ours.jinja"
    file.write_text(TEMPLATE)
    bare = tmp_path / "bare"  # without a template of its own
    shutil.copytree(world.model, bare)
    (bare / "chat_template.jinja").unlink()
    result = world.train(iterations=1, model=str(bare), chat_template=str(file))
    start = world.run / "iterations/0000/checkpoint"
    assert (start / "chat_template.jinja").read_text() == TEMPLATE
    assert not (bare / "chat_template.jinja").exists()
    assert RunFolder(world.run).config()["chat_template"] == TEMPLATE
    assert result.checkpoint.is_dir()
    assert (
        "tool calls: no parser, because its chat template shows the model no tools"
        in capsys.readouterr().out
    )
    file.write_text(TEMPLATE + "{# changed #}")
    with pytest.raises(
        RunFolderError, match=r"was started with another config:\n *- chat_template"
    ):
        world.train(iterations=1, model=str(bare), chat_template=str(file))


def test_a_run_without_ray_for_its_cluster_says_what_to_install(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ttrl.cluster.lead", raising=False)
    monkeypatch.delattr("ttrl.cluster.lead", raising=False)
    config = world.config(cluster="auto", weight_sync="reload")
    with pytest.raises(UserError, match=r"cluster is 'auto', but Ray cannot be loaded .*pip inst"):
        train(config, world.tasks(4), quiet=True)
    assert not world.run.exists()


def test_a_step_back_to_adapters_of_an_earlier_ttrl_is_noted(world, tmp_path, capfd):
    """They held their base in fp32; the model's files are in bf16."""
    model = tmp_path / "bf16"
    shutil.copytree(world.model, model)
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = {"model": str(model), "training": {"lora_rank": 4}}
    world.train(iterations=1, **settings)
    adapter = world.run / "iterations" / "0001" / "checkpoint" / "adapter"
    adapter.mkdir(exist_ok=True)
    (adapter / "ttrl_adapter.json").write_text(json.dumps({"lora_base_dtype": "fp32"}))
    capfd.readouterr()
    world.train(iterations=2, **settings)
    said = " ".join(capfd.readouterr().out.split())
    assert "note: earlier, this run held the base of its adapters in fp32; from now on" in said
    assert "as in its files, in bfloat16" in said
