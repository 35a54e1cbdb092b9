"""`ttrl compare RUN RUN …`: where runs are compared, which of them are one arm, and what it says of their difference."""

import json
import random

import pytest
import yaml

from ttrl import cli
from ttrl.errors import UserError
from ttrl.intervals import difference_over_seeds, paired_difference
from ttrl.report.comparison import compare_runs

TASKS = 40


def make_run(folder, *, seed=0, skill=0.5, gain=0.05, iterations=4, flops=1e12, **settings):
    """A run whose held-out tasks are right where a number of their own lies below its skill, which grows with the iterations."""
    noise = random.Random(seed)
    rows = []
    for number in range(iterations + 1):
        level = skill + gain * number + 0.02 * noise.gauss(0, 1)
        lines = []
        for task in range(TASKS):
            right = float(random.Random(task).random() < level)
            messages = [{"role": "user", "content": f"task {task}"}]
            lines.append({"task_id": f"v{task}", "sample": 0, "messages": messages, "reward": right, "metrics": {"exact": right}})
        path = folder / "iterations" / f"{number:04d}" / "validation.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        exact = sum(line["reward"] for line in lines) / TASKS
        row = {"iteration": number, "validation": {"exact": exact}, "validation_reward": exact, "validation_samples": TASKS}
        row |= {"seconds": {"total": 10.0}, "flops": {"total": flops, "cumulated": flops * (number + 1)}}
        rows.append(row | ({"reward": level, "completion_tokens": 1000} if number else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"run": str(folder), "seed": seed, "validation_metric": "exact", "model": f"{folder}/warm_start/checkpoint"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"training": {"lr": 1e-4}, **settings}))
    return folder


def test_arms_are_compared_where_the_shortest_ended(tmp_path):
    base = make_run(tmp_path / "base", iterations=6)
    better = make_run(tmp_path / "better", skill=0.7, training={"lr": 2e-4}, tasks_per_iteration=8, flops=2e12)
    found = compare_runs([base, better])
    assert found.reached == 4 and [point.iteration for arm in found.arms for point in arm.points] == [4, 4]
    assert found.num_tasks == TASKS and found.metric == "exact"
    one, two = found.arms
    assert one.difference is None and two.difference.mean == pytest.approx(two.mean - one.mean) and two.difference.mean > 0.1
    assert two.difference.low > 0 and one.interval[0] < one.mean < one.interval[1]
    assert dict(found.settings()) == {"training.lr": ["0.0001", "0.0002"], "tasks_per_iteration": ["not set", "8"]}
    assert "other seeds" in found.table()
    by_flops = compare_runs([base, better], by="flops")  # 7e12 and 10e12 in all
    assert by_flops.reached == 7e12 and [arm.points[0].iteration for arm in by_flops.arms] == [6, 2]
    assert [compare_runs([base, better], by=by).reached for by in ("tokens", "seconds")] == [4000, 50]


def test_runs_that_differ_by_their_seed_are_one_arm(tmp_path):
    first = [make_run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    second = [make_run(tmp_path / f"b{seed}", seed=seed, skill=0.75, objective="gspo") for seed in range(3)]
    found = compare_runs([*first, *second])
    assert [len(arm.points) for arm in found.arms] == [3, 3] and [name for name, _ in found.settings()] == ["objective"]
    assert found.arms[0].name == "a0, a1, a2" and found.arms[1].difference.method == "t over tasks and seeds"
    assert not found.notes
    alone = compare_runs(first)
    assert len(alone.arms) == 1 and "nothing but their seeds" in alone.table()


def test_what_cannot_be_compared_is_said(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="one run alone"):
        compare_runs([run])
    other = make_run(tmp_path / "other")
    (other / "metrics.jsonl").write_text((other / "metrics.jsonl").read_text().replace("exact", "near"))
    with pytest.raises(UserError, match="no held-out metric in common"):
        compare_runs([run, other])
    old = make_run(tmp_path / "old")
    rows = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    (old / "metrics.jsonl").write_text("".join(json.dumps({**row, "flops": None}) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"old: no flops recorded; compare by another of"):
        compare_runs([run, old], by="flops")
    strange = make_run(tmp_path / "strange")
    for path in strange.rglob("validation.jsonl"):
        path.write_text(path.read_text().replace("task ", "exercise "))
    with pytest.raises(UserError, match="share no held-out task"):
        compare_runs([run, strange])


def test_the_command_prints_a_table_and_writes_a_page(tmp_path, capsys):
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two<b>", training={"lr": 3e-4})]
    page = tmp_path / "page.html"
    assert cli.main(["compare", *map(str, runs), "--by", "flops", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "5 TFLOP" in out and "training.lr" in out and str(page) in out
    html = page.read_text()
    assert html.count("<svg") == 4 and "two&lt;b&gt;" in html and "two<b>" not in html
    assert cli.main(["compare", str(runs[0]), "--html", str(page)]) == 2
    assert cli.main(["compare", "a.json", "b.json", "c.json"]) == 2


@pytest.mark.parametrize(("tasks", "seeds"), [(30, 2), (100, 3), (20, 5)])
def test_intervals_over_tasks_and_seeds_hold_the_truth(tasks, seeds):
    """Simulated: tasks of different gains, seeds of different luck, answers right or wrong by chance."""
    noise, held, drawn = random.Random(7), 0, 300
    for _ in range(drawn):
        chances = [min(0.9, max(0.1, noise.gauss(0.5, 0.2))) for _ in range(tasks)]
        gains = [noise.gauss(0.05, 0.05) for _ in range(tasks)]
        sides = []
        for more in (0, 1):
            luck = [noise.gauss(0, 0.05) for _ in range(seeds)]
            sides.append([[[float(noise.random() < p + more * g + l)] for p, g in zip(chances, gains)] for l in luck])  # noqa: E741
        found = difference_over_seeds(*sides)
        held += found.low <= 0.05 <= found.high
    assert held / drawn > 0.93


def test_one_seed_is_compared_over_tasks_alone():
    noise = random.Random(1)
    first, second = ([[float(noise.random() < p)] for _ in range(30)] for p in (0.4, 0.7))
    assert difference_over_seeds([first], [second]) == paired_difference(first, second)
    two = difference_over_seeds([first, first], [second])
    assert two.method == paired_difference([one * 2 for one in first], second).method
    same = difference_over_seeds([first, first], [first, first])
    assert same.mean == 0 == same.low == same.high and same.p_value == 1
