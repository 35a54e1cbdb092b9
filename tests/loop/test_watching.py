"""A run that is watched: loggers, lines and drift, through the real loop on fake parts."""

import json
import shutil

import pytest

from ttrl.errors import ConfigError, DriftError
from ttrl.system.tracing import spans_to

APART = {"tokens": 50, "not_finite": 0, "mean": 0.3, "p999": 2.0, "ess": 0.5}


def drifted(version):
    return {"sampler_trainer": APART | {"by_version": {str(version): APART}, "worst": []}}


def test_each_iteration_is_logged_once_also_when_the_run_is_continued(world, capfd):
    world.train(iterations=2, loggers=["stdout"])
    world.train(iterations=3, loggers=["stdout"])
    logged = [
        line.split(":")[0]
        for line in capfd.readouterr().out.splitlines()
        if "seconds/total=" in line
    ]
    assert logged == ["iteration 0", "iteration 1", "iteration 2", "iteration 3"]


def test_a_logger_that_cannot_be_made_is_said_before_anything_starts(world):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        world.train(loggers=["tensorbord"])
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        world.train(loggers=["no_such_module.Logger"])
    assert not world.events


def test_drift_ends_the_run_before_the_next_rollouts_and_every_time_it_is_continued(world):
    world.writes_reports = True
    world.step_facts = {2: drifted(1)}
    for _ in range(2):
        with pytest.raises(
            DriftError, match=r"(?s)iteration 2: .*0\.3 \(limit 0\.0002\).*drift=\"warn\""
        ):
            world.train(iterations=3)
    assert world.count()["train 2"] == 1 and world.count()["train 3"] == 0
    # 1 is validated beside the training of 2.
    assert {row["iteration"] for row in world.rows()} <= {0, 1}
    assert "Sampler and trainer disagree" in (world.run / "report.html").read_text()
    # The way out that the message names: the cause is gone, the iteration is made again.
    world.step_facts = {}
    shutil.rmtree(world.run / "iterations" / "0002")
    world.train(iterations=3)
    assert [row["iteration"] for row in world.rows()] == [0, 1, 2, 3] and world.count()[
        "train 2"
    ] == 2


def test_a_run_may_go_on_with_a_warning(world, capfd):
    world.step_facts = {2: drifted(1)}
    with pytest.raises(DriftError):
        world.train(iterations=3)
    world.train(iterations=3, drift="warn")
    said = capfd.readouterr().out
    assert (
        "iteration 2: the log-probabilities of sampler and trainer differ" in said
        and "ruled out" in said
    )
    assert "  ! In iteration 2, the log-probabilities of sampler and trainer differ" in said
    report = json.loads((world.run / "iterations" / "0002" / "drift.json").read_text())
    assert report["version"] == 1 and len(world.rows()) == 4


def test_tokens_of_older_policies_may_differ(world):
    world.step_facts = {2: drifted(0)}
    world.train(iterations=2)
    assert len(world.rows()) == 3


def test_what_stands_out_is_said_once(world, capfd):
    world.step_facts = {number: {"clip_fraction_high": 0.6} for number in (1, 2, 3)}
    world.train(iterations=3)
    said = capfd.readouterr().out
    assert said.count("of the tokens were clipped") == 1


def test_the_line_names_the_groups_that_teach_nothing(world, capfd):
    world.answer = lambda prompt, k, version: (
        "yes" if prompt.endswith("1") else "no" if k else "yes"
    )
    world.train(iterations=1, tasks=world.tasks(2))
    lines = capfd.readouterr().out.splitlines()
    line = next(line for line in lines if line.startswith("iteration   1"))
    assert "signal 1/2 (1 all right)" in line
    details = lines[lines.index(line) + 1]
    assert (
        "entropy 1" in details
        and "gradient 1" in details
        and "cut off 0%" in details
        and "repeated" in details
    )


def test_iterations_and_phases_are_spans(world):
    """Each iteration is a trace, with its phases, and their requests and grades."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    with spans_to(SimpleSpanProcessor(kept)):
        world.train(iterations=2)
    spans = kept.get_finished_spans()
    by_id = {one.context.span_id: one for one in spans}
    roots = [one for one in spans if one.parent is None]
    assert [one.name for one in roots] == ["iteration 0", "iteration 1", "iteration 2"]
    phases = [one for one in spans if "rl.phase" in one.attributes]
    assert {(one.attributes["rl.iteration"], one.name) for one in phases} == {
        (0, "prepare"), (0, "sync"), (0, "validate"),
        (1, "rollouts"), (1, "pack"), (1, "train"), (1, "sync"), (1, "validate"),
        (2, "rollouts"), (2, "pack"), (2, "train"), (2, "sync"), (2, "validate"),
    }  # fmt: skip
    for one in phases:
        assert by_id[one.parent.span_id].name == f"iteration {one.attributes['rl.iteration']}"
    within = {
        (one.name.split()[0], by_id[one.parent.span_id].name)
        for one in spans
        if one not in roots and one not in phases
    }
    assert within == {
        (what, phase) for what in ("chat", "grade") for phase in ("rollouts", "validate")
    }
    assert all(one.attributes["rl.run"] == world.run.name for one in [*roots, *phases])


def test_an_iteration_that_fails_ends_its_span(world):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    world.step_facts = {2: drifted(1)}
    with spans_to(SimpleSpanProcessor(kept)), pytest.raises(DriftError):
        world.train(iterations=3)
    ended = {one.name: one.attributes.get("error.type") for one in kept.get_finished_spans()}
    assert ended["iteration 2"] == "DriftError" and ended["iteration 0"] is None
