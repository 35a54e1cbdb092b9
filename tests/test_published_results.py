"""The tools behind docs/results.md: the comparison with TRL is fair and counts right, and the pages
are what the data say.
"""

import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import compare_trl
import pytest
import results
from compare_trl import Arm, Sizes, Step, Usage
from support.compared_runs import make_run

from ttrl import TrainConfig

ROOT = Path(__file__).parents[1]
SIZES = [Sizes(), Sizes(steps=3, tasks=4, samples=16, lr=1e-5, processes=1, microbatch=8)]


# The comparison with TRL


@pytest.mark.parametrize("sizes", SIZES)
def test_both_have_the_same_settings(sizes: Sizes) -> None:
    ours = compare_trl.ttrl_settings(sizes, 3)
    theirs = compare_trl.trl_settings(sizes, 3)
    found = compare_trl.shared_settings(ours, theirs, sizes)
    assert [one for one in found if one.ttrl != one.trl] == []
    assert len(found) > 20
    compare_trl.check_equal(sizes, 3)


def test_a_step_that_is_no_multiple_of_the_passes_is_refused() -> None:
    """64 samples are not 3 processes × 4 samples × a number of passes: TRL would take fewer."""
    with pytest.raises(SystemExit, match="prompts of a step: 8 and 7"):
        compare_trl.check_equal(Sizes(processes=3), 0)


@pytest.mark.parametrize("sizes", SIZES)
def test_ttrl_accepts_its_settings(sizes: Sizes, tmp_path: Path) -> None:
    settings = compare_trl.ttrl_settings(sizes, 0)
    assert TrainConfig(run=str(tmp_path), model="tiny", **settings).problems() == []


def test_every_setting_of_ttrl_is_compared_or_plain() -> None:
    """A setting that only one of them has could make them differ."""
    ours = compare_trl.ttrl_settings(Sizes(), 0)
    names = {*ours, *ours["training"]} - {"training"}
    source = ast.parse((ROOT / "tools/compare_trl.py").read_text(encoding="utf-8"))
    [shared] = [
        one
        for one in source.body
        if isinstance(one, ast.FunctionDef) and one.name == "shared_settings"
    ]
    read = {one.value for one in ast.walk(shared) if isinstance(one, ast.Constant)}
    assert names - read == {"seq_len", "objective"}


def test_trl_gets_the_prompts_in_the_order_of_ttrl(tmp_path: Path) -> None:
    sizes = Sizes(steps=2, tasks=4)
    tasks = compare_trl.train_tasks(sizes, 1, tmp_path / "run")
    order = compare_trl.trl_order(tmp_path, sizes, 1, "model")
    assert [row["prompt"] for row in order["rows"]] == [[*task.messages] for task in tasks]
    assert order["settings"]["shuffle_dataset"] is False
    assert len({task.id for task in tasks}) == 8
    again = compare_trl.train_tasks(Sizes(steps=1, tasks=4), 1, tmp_path / "run")
    assert [one.id for one in again] == [one.id for one in tasks[:4]]
    other = compare_trl.train_tasks(sizes, 2, tmp_path / "run")
    assert [one.id for one in other] != [one.id for one in tasks]
    for task in tasks:
        message = SimpleNamespace(content=task.grader.reference())
        assert task.grader(SimpleNamespace(message=message))[0] == 1.0


def test_steps_of_trl() -> None:
    logged = {"reward": 0.25, "exact": 0.125, "completions/mean_length": 30.5}
    seconds = {"generate": 40.0, "generate and grade": 41.0, "total": 100.0}
    [step] = compare_trl.trl_steps({"logged": [logged], "seconds": [seconds]}, samples=64)
    assert step == Step(0.25, 0.125, generate=40.0, train=59.0, total=100.0, tokens=1952.0)


def test_steps_of_ttrl(tmp_path: Path) -> None:
    seconds = {"sample": 20.0, "train": 30.0, "sync": 1.0, "total": 52.0}
    row = {"iteration": 1, "reward": 0.5, "metrics": {"exact": 0.4}, "completion_tokens": 2000}
    lines = [{"iteration": 0, "seconds": {"total": 9.0}}, row | {"seconds": seconds}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert compare_trl.ttrl_steps(tmp_path) == [Step(0.5, 0.4, 20.0, 30.0, 52.0, 2000.0)]


def arm(name: str, total: float, tokens: float) -> Arm:
    steps = [
        Step(0.1, 0.0, 99.0, 99.0, 999.0, 1.0),
        Step(0.2, 0.1, total / 4, total / 2, total, tokens),
        Step(0.3, 0.1, total / 4, total / 2, total, tokens),
    ]
    return Arm(name, 0, steps, Usage(10 * total, 20 * total, 2_000_000_000), Path(), [1, 2])


def test_ratios_are_those_of_trl_over_ttrl_without_the_first_step() -> None:
    ours, theirs = arm("ttrl", 20.0, 1000.0), arm("TRL", 80.0, 1000.0)
    rows = compare_trl.table([ours], [theirs])
    assert "| seconds of a step | 20 | 80 | 4.00 |" in rows
    assert "| seconds to generate | 5 | 20 | 4.00 |" in rows
    assert "| generated tokens per second | 200 | 50 | 0.25 |" in rows
    assert "| peak memory, GB | 2 | 2 | 1.00 |" in rows
    assert compare_trl.rewards([ours, theirs])[2:] == [
        "| 1 | 0.10 | 0.10 |",
        "| 2 | 0.20 | 0.20 |",
        "| 3 | 0.30 | 0.30 |",
    ]


def test_the_share_of_exact_answers_is_read_from_an_evaluation(tmp_path: Path) -> None:
    tasks = [
        {"id": f"t{number}", "digest": "d", "scores": [float(number < 3)]} for number in range(4)
    ]
    found = {"format": 1, "sets": {"json": {"score": "exact", "tasks": tasks}}}
    (tmp_path / "held_out.json").write_text(json.dumps(found))
    assert compare_trl.accuracy(tmp_path / "held_out.json") == "0.750 (0.301 to 0.954)"


def test_an_arm_is_measured_with_its_children(tmp_path: Path) -> None:
    work = "x = bytearray(60_000_000); sum(i * i for i in range(20_000_000))"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    usage = compare_trl.watched([sys.executable, "-c", child], tmp_path / "log.txt", {}, every=0.05)
    assert usage.peak_bytes > 60_000_000
    assert usage.cpu_seconds > 0
    assert usage.seconds > 0


def test_a_failed_arm_ends_the_comparison_with_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; print('out of memory'); sys.exit(3)"
    with pytest.raises(SystemExit, match=r"(?s)exit status 3.*out of memory"):
        compare_trl.watched([sys.executable, "-c", code], tmp_path / "log.txt", {})


def test_the_versions_of_both_environments_are_the_tested_ones() -> None:
    tested = (ROOT / "ttrl" / "tested_versions.txt").read_text(encoding="utf-8").splitlines()
    for name in compare_trl.SAME_VERSIONS:
        assert compare_trl.pinned(name) in [line.partition("+")[0] for line in tested]


# The page of results


def test_a_result_is_taken_from_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", iterations=3)
    environment = {"git_commit": "abc", "cores": 2, "memory_gb": 16.0, "gpus": []}
    (run / "environment.json").write_text(json.dumps(environment))
    found = results.taken({"run": run})
    assert found["metric"] == "exact"
    assert found["commit"] == "abc"
    assert found["machine"] == "2 cores, 16.0 GB, no GPU"
    [curve] = found["curves"]
    assert [point[0] for point in curve["held_out"]] == [0, 1, 2, 3]
    assert [point[0] for point in curve["rewards"]] == [1, 2, 3]
    assert curve["minutes"] == 0.7


def test_evaluations_stand_in_for_held_out_tasks_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 5, "reward": 0.5}\n')
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, right in zip(files, (1, 3), strict=True):
        scores = [float(number < right) for number in range(4)]
        rows = [{"id": f"t{n}", "digest": "d", "scores": [one]} for n, one in enumerate(scores)]
        sets = {"json": {"score": "exact", "tasks": rows}}
        file.write_text(json.dumps({"format": 1, "sets": sets}))
    found = results.taken({"run": tmp_path}, "exact", files)
    assert found["tasks"] == 4
    points = found["curves"][0]["held_out"]
    assert [point[:2] for point in points] == [[0, 0.25], [5, 0.75]]


def test_a_figure_is_rounded_once(tmp_path: Path) -> None:
    """219 of 256 are 0.85547: rounded to 0.8555 first, they would be shown as 0.856."""
    run = make_run(tmp_path / "run", iterations=1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["validation"] = {"exact": 219 / 256}
    rows[-1]["validation_intervals"] = {"exact": [205.5 / 256, 0.9]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"title": "One", "command": "python recipes/one.py", "note": "As it was."}
    table = results.tables({"one": told | results.taken({"run": run})})
    assert "| 0.855 (0.803 to 0.900) |" in table


def test_a_run_without_held_out_figures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "reward": 0.5}\n')
    with pytest.raises(SystemExit, match="no held-out figure reward"):
        results.taken({"run": tmp_path})


def test_labels_of_runs() -> None:
    assert results.runs_of(["runs/a"]) == {"run": Path("runs/a")}
    assert results.runs_of(["RL-0=x/RL-0", "SFT-0=y"]) == {
        "RL-0": Path("x/RL-0"),
        "SFT-0": Path("y"),
    }


def test_seeds_share_a_colour_and_a_name(tmp_path: Path) -> None:
    runs = {
        name: make_run(tmp_path / name, seed=seed)
        for name, seed in (("RL-0", 0), ("RL-1", 1), ("SFT-0", 2))
    }
    told = {"title": "RL or SFT", "command": "python recipes/rl_vs_sft.py", "note": "As it was."}
    made = {"rl_vs_sft": told | results.taken(runs)}
    drawn = results.pictures(made)["rl_vs_sft.svg"]
    ElementTree.fromstring(drawn)
    assert drawn.count('class="name"') == 2
    assert drawn.count("<polyline") == 3
    table = results.tables(made)
    assert "| [RL or SFT: RL](#rl-or-sft) | exact, 40 |" in table
    assert "(seeds)" in table


def test_a_picture_needs_no_point_of_every_curve_at_every_place() -> None:
    one = results.Curve("one", [results.Point(0, 0.1, 0.0, 0.2), results.Point(4, 0.9, 0.8, 1.0)])
    other = results.Curve("other", [results.Point(1, 0.5)], 2)
    drawn = results.picture("two", [one, other])
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert drawn.count("<circle") == 3


def test_the_pages_are_what_the_data_say() -> None:
    """Otherwise: python tools/results.py."""
    folder = results.DOCS / results.FOLDER
    data = json.loads((folder / results.DATA).read_text(encoding="utf-8"))
    for tiny, name in results.PAGES.items():
        page = (results.DOCS / name).read_text(encoding="utf-8")
        assert results.page_with(page, data, tiny=tiny) == page
    for name, text in results.pictures(data).items():
        assert (folder / name).read_text(encoding="utf-8") == text, name
        assert len(text) < 40_000
    assert {one.name for one in folder.glob("*.svg")} - {"compare_trl.svg"} == {
        f"{name}.svg" for name in data
    }


def test_every_result_has_a_command_a_commit_and_a_note() -> None:
    data = json.loads((results.DOCS / results.FOLDER / results.DATA).read_text(encoding="utf-8"))
    for name, result in data.items():
        assert result["command"].startswith(("python recipes/", "ttrl ", "python tools/")), name
        assert len(result["commit"].partition("+")[0]) == 40, name
        assert result["note"], name
        assert result["tasks"] > 0, name
