"""`ttrl compare RUN RUN …`: where runs are compared, which of them are one arm, and what it says of
their difference.
"""

import json
import random

import pytest
from support.compared_runs import TASKS, make_run

from ttrl import cli
from ttrl.errors import UserError
from ttrl.intervals import difference_over_seeds, paired_difference
from ttrl.report.compared_runs import compare_runs, spent
from ttrl.run_folder.reader import read_run


def test_arms_are_compared_where_the_shortest_ended(tmp_path):
    base = make_run(tmp_path / "base", iterations=6)
    better = make_run(
        tmp_path / "better", skill=0.7, training={"lr": 2e-4}, tasks_per_iteration=8, flops=2e12
    )
    found = compare_runs([base, better])
    assert found.reached == 4 and [
        point.iteration for arm in found.arms for point in arm.points
    ] == [4, 4]
    assert found.num_tasks == TASKS and found.metric == "exact"
    one, two = found.arms
    assert (
        one.difference is None
        and two.difference.mean == pytest.approx(two.mean - one.mean)
        and two.difference.mean > 0.1
    )
    assert two.difference.low > 0 and one.interval[0] < one.mean < one.interval[1]
    assert dict(found.settings()) == {
        "training.lr": ["0.0001", "0.0002"],
        "tasks_per_iteration": ["not set", "8"],
    }
    assert "tell two runs apart, not their settings" in found.table()
    by_flops = compare_runs([base, better], by="flops")  # 7e12 and 10e12 in all
    assert by_flops.reached == 7e12 and [arm.points[0].iteration for arm in by_flops.arms] == [6, 2]
    assert [compare_runs([base, better], by=by).reached for by in ("tokens", "seconds")] == [
        4000,
        50,
    ]


def test_runs_that_differ_by_their_seed_are_one_arm(tmp_path):
    first = [make_run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    second = [
        make_run(tmp_path / f"b{seed}", seed=seed, skill=0.75, objective="gspo")
        for seed in range(3)
    ]
    found = compare_runs([*first, *second])
    assert [len(arm.points) for arm in found.arms] == [3, 3] and [
        name for name, _ in found.settings()
    ] == ["objective"]
    assert (
        found.arms[0].name == "a0, a1, a2"
        and found.arms[1].difference.method == "t over tasks and seeds"
    )
    assert not found.notes
    alone = compare_runs(first)
    assert len(alone.arms) == 1 and "differ only in their seeds" in alone.table()


def test_what_cannot_be_compared_is_said(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="only one run"):
        compare_runs([run])
    other = make_run(tmp_path / "other")
    (other / "metrics.jsonl").write_text(
        (other / "metrics.jsonl").read_text().replace("exact", "near")
    )
    with pytest.raises(UserError, match="share no held-out metric"):
        compare_runs([run, other])
    old = make_run(tmp_path / "old")
    rows = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    (old / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "flops": None}) + "\n" for row in rows)
    )
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
    """Simulated: tasks of different gains, seeds of different luck, answers right or wrong by
    chance.
    """
    noise, held, drawn = random.Random(7), 0, 300
    for _ in range(drawn):
        chances = [min(0.9, max(0.1, noise.gauss(0.5, 0.2))) for _ in range(tasks)]
        gains = [noise.gauss(0.05, 0.05) for _ in range(tasks)]
        sides = []
        for more in (0, 1):
            luck = [noise.gauss(0, 0.05) for _ in range(seeds)]
            sides.append(
                [
                    [[float(noise.random() < p + more * g + lucky)] for p, g in zip(chances, gains)]
                    for lucky in luck
                ]
            )
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


def test_named_arms_are_compared_seed_by_seed(tmp_path):
    """Each at its validation nearest to the seed's cheapest end, above or below; seeds that took
    different FLOPs do not hold each other back.
    """
    folders, arms = [], []
    for seed, flops in ((0, 1e12), (1, 1.3e12)):
        folders += [make_run(tmp_path / f"a{seed}", seed=seed, flops=flops, training={"lr": 1e-4})]
        folders += [
            make_run(
                tmp_path / f"b{seed}",
                seed=seed,
                flops=1.006 * flops,
                skill=0.7,
                training={"lr": 1e-3, "data": "x"},
            )
        ]
        arms += ["one", "two"]
    found = compare_runs(folders, by="flops", arms=arms)
    assert [arm.name for arm in found.arms] == ["one", "two"]
    assert [point.iteration for arm in found.arms for point in arm.points] == [4, 4, 4, 4]
    assert found.reached == 5e12 and found.apart == pytest.approx(0.006 / 1.006)
    assert dict(found.settings()) == {"training.lr": ["0.0001", "0.001"]}
    assert "seed by seed at about 5 TFLOP to 6.5 TFLOP, the" in found.table()
    assert "0.60% apart" in found.table()
    # 5 TFLOP are as far from 4 as from 6: of two equally near, the earlier.
    costs = ((1.1e12, 4), (1.4e12, 3), (0.95e12, 4), (2e12, 1))
    for place, (flops, nearest) in enumerate(costs):
        other = make_run(tmp_path / f"c{place}", seed=0, flops=flops, skill=0.7)
        found = compare_runs([folders[0], other], by="flops", arms=["one", "two"])
        assert [arm.points[0].iteration for arm in found.arms] == [4, nearest]
        ends = [5e12, flops * (nearest + 1)]
        assert found.apart == pytest.approx(1 - min(ends) / max(ends))


def test_what_held_out_samples_take_is_no_cost_of_training(tmp_path):
    run = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["flops"] |= {"validation": 3e11, "recomputation": 1e11 * bool(row["iteration"])}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = spent(read_run(run))["flops"]
    assert found == pytest.approx([0.7e12, 1.3e12, 1.9e12, 2.5e12, 3.1e12])


def test_one_seed_and_few_tasks_are_said_first(tmp_path):
    """Runs of one seed are told apart, their settings are not called better."""
    base = make_run(tmp_path / "base", skill=0.2, gain=0, tasks=12)
    other = make_run(tmp_path / "other", skill=0.9, gain=0, tasks=12, objective="gspo")
    found = compare_runs([base, other])
    (said,) = found.verdicts()
    assert said.startswith(
        "with one seed, other scored higher than base on these tasks: held-out exact +"
    )
    text = found.table()
    assert "is better" not in text
    warned = [
        text.index("tell two runs apart, not their settings"),
        text.index("only 12 held-out tasks: each is 0.083"),
    ]
    assert max(warned) < text.index(said) < text.index("95% interval")
    page = found.write_html(tmp_path / "page.html").read_text()
    assert page.index("only 12 held-out tasks") < page.index(said) < page.index("<table")


def test_a_difference_that_only_its_interval_sees_is_none():
    """Of 8 tasks, 5 better and none worse: the interval leaves 0 out, and chance does so in one of
    16.
    """
    d = paired_difference([[0.0]] * 5 + [[1.0]] * 3, [[1.0]] * 8)
    assert d.low > 0 and d.p_value == pytest.approx(2 / 2**5)
    assert d.verdict(0.95) == "no difference"
    assert d.verdict(0.9) == "better"


@pytest.mark.parametrize(
    ("skill", "verdict"),
    [
        (0.8, "new is better than old: held-out exact +"),
        (0.5, "no difference seen between old and new"),
        (0.2, "old is better"),
    ],
)
def test_the_verdict_is_one_of_three(skill, verdict, tmp_path):
    folders = [make_run(tmp_path / f"old{seed}", seed=seed, gain=0) for seed in range(4)]
    folders += [
        make_run(tmp_path / f"new{seed}", seed=seed + 9, gain=0, skill=skill, objective="gspo")
        for seed in range(4)
    ]
    found = compare_runs(folders, arms=["old"] * 4 + ["new"] * 4)
    (said,) = found.verdicts()
    assert said.startswith(verdict) and "p = " in said and "95%: " in said and said in found.table()
    d = found.arms[1].difference
    assert (d.low <= 0 <= d.high) == ("no difference" in said) == ("is ruled out" in said)
    assert said in found.write_html(tmp_path / "page.html").read_text()
