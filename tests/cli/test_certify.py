"""`ttrl doctor --certify`: what is said, written, and judged; the run itself is in e2e."""

import json
import subprocess
import sys

import pytest
from support.facts import rows_of

from ttrl.cli import certify, make_parser
from ttrl.cli.machine_commands import run_doctor
from ttrl.errors import UserError


def case(part="attention", passed=True, found="fine"):
    return {"part": part, "case": "a case", "passed": passed, "found": found, "seconds": 1.0}


def row(number, exact, **sync):
    there = {
        "mode": "reload",
        "weights_compared": 9,
        "weights_unchecked": 0,
        "canary_max_difference": 1e-5,
    }
    seconds = {"total": 2.0, "sample": 1.0, "train": 0.5, "sync": 0.25}
    return {
        "iteration": number,
        "seconds": seconds,
        "validation": {"exact": exact},
        "sync": there | sync,
    }


def trials_of(*cases):
    """What would be tried, with these cases."""
    return lambda gpus, say: (certify._said(one, say) for one in cases)


def test_the_certificate_is_written_as_json_and_html(tmp_path):
    trials = trials_of(
        case(),
        case("head", False, "error <b>0.5</b>"),
        case("parking", None, "left out without a GPU"),
    )
    said = []
    assert not certify.certify(tmp_path / "mine", said.append, trials)
    content = json.loads((tmp_path / "mine.json").read_text())
    assert (
        content["verdict"].endswith(": 1 of 2 cases FAILED (head); 1 left out")
        and len(content["cases"]) == 3
    )
    assert "torch" in content["machine"]["packages"] and content["machine"]["gpus"] == []
    page = (tmp_path / "mine.html").read_text()
    assert (
        "error &lt;b&gt;0.5&lt;/b&gt;" in page
        and "<b>" not in page
        and "src=" not in page
        and "href=" not in page
    )
    assert any("✗ head" in line for line in said) and content["verdict"] in said[-1]


def test_where_it_cannot_be_written_is_said_before_anything_is_tried(tmp_path):
    said = []
    with pytest.raises(
        UserError,
        match=r"--out .*nowhere/x: cannot write to the folder .*nowhere; create it",
    ):
        certify.certify(tmp_path / "nowhere" / "x", said.append, trials_of(case()))
    assert not said


def test_what_was_found_before_an_interrupt_is_written(tmp_path):
    def interrupted(gpus, say):
        yield case()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify.certify(tmp_path / "mine", lambda line: None, interrupted)
    assert json.loads((tmp_path / "mine.json").read_text())["cases"] == [case()]


def test_a_crash_of_the_process_that_tries_is_a_failed_case(tmp_path, monkeypatch):
    (tmp_path / "crashing.py").write_text(
        "import json, os, signal, sys\nprint('a library says')\n"
        f"print(json.dumps({case()!r}), flush=True)\nprint('CUDA error', file=sys.stderr, "
        "flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, crash = certify.numerics(lambda line: None, command="crashing")
    assert (
        first == case()
        and crash["passed"] is False
        and crash["found"] == "ended by SIGSEGV: CUDA error"
    )


def judge(rows, name, began):
    return certify.judge(rows_of(rows), name, began)


def test_a_run_that_learns_and_one_that_does_not():
    learned, synced = judge([row(0, 0.5), row(1, 0.6), row(2, 0.75)], "run", 0.0)
    assert (
        learned["passed"]
        and "held out 0.50 → 0.60 → 0.75; 2 iterations, 4 s (sample 2, train 1, sync 0)"
        in learned["found"]
    )
    assert (
        synced["passed"]
        and "3 policies (reload), every weight compared; canary differs by 1.0e-05"
        in synced["found"]
    )
    assert [one["passed"] for one in judge([row(0, 0.5), row(1, 0.6)], "run", 0.0)] == [
        False,
        True,
    ]
    assert [
        one["passed"] for one in judge([row(0, 0.5), row(1, 0.7, weights_unchecked=1)], "run", 0.0)
    ] == [True, False]
    assert [
        one["passed"] for one in judge([{"iteration": 0, "seconds": {"total": 1.0}}], "run", 0.0)
    ] == [False, False]


def found_on(gpus):
    def run(folder, processes):
        yield case(found=f"{processes} processes")

    return [one["found"] for one in certify.runs(gpus, lambda line: None, run)]


def test_several_gpus_get_a_run_of_their_own():
    assert found_on(8) == ["1 processes", "2 processes"]
    assert found_on(1) == ["1 processes", "left out with 1 GPU"]
    assert found_on(0)[1] == "left out with no GPUs"


def test_doctor_says_where_it_failed(tmp_path):
    def code(*options):
        return run_doctor(
            make_parser().parse_args(["doctor", *options]),
            examine=lambda folder: [],
            certify=lambda out, say: out == tmp_path / "x",
        )

    assert code("--certify", "--out", str(tmp_path / "x")) == 0
    assert code("--certify", "--out", str(tmp_path / "y")) == 1
    assert code() == 0


def test_doctor_alone_imports_nothing_that_may_be_missing():
    code = """
import sys
from ttrl.cli import make_parser
from ttrl.cli.machine_commands import run_doctor
assert run_doctor(make_parser().parse_args(["doctor"]), examine=lambda folder: []) == 0
print({"torch", "psutil", "jinja2", "transformers", "numpy", "openai"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
