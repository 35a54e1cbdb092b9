"""Kills a run at random moments, again and again, and compares its outcome with that of an
undisturbed run.

    python tools/crash_test.py [--kills 100] [--iterations 10] [--seed 0] [--save-every N]
        [--keep DIR] [--settings JSON]

A run of a tiny model with recorded rollouts (`tools/crash_test_run.py`: the real loop, run folder
and trainer) is made once undisturbed. Then it is repeated in another folder, killed with `kill -9`
at a random moment, restarted with the same command and killed again, until it is finished; and so
on with further runs, until the requested number of kills is reached. Three ways to die:

    power    all of its processes at once, as in a power loss
    main     only the main process; what it started must not go on, nor get in the way of the next
             one
    child    one of the processes below it (trainer, its guard): the main process may end or go on

With --save-every, the recorded rollouts' server takes the weights out of the trainer's memory
(`weight_sync` "memory"), and only every n-th checkpoint is written: 1 kills runs whose files are
written beside the sampling, 5 also those that have to train again.

Every run that was killed is compared with the undisturbed one: weights, states and rollouts bit for
bit; metrics and training log except for times. What differs is told by name, and everything is kept
for inspection. A process that goes on with an iteration's sampling checks a sample of its own token
by token, so `logprob_tokens` may stand at several. A run must also be consistent in itself: nothing
that a finished phase wrote was touched again; no completion was requested after the phase that it
belongs to was finished; each optimizer step is in the log once. Exit status 1 if anything differs.
"""

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ttrl.system.files import read_jsonl
from ttrl.tiny_model import make_tiny_model

SCRIPT = Path(__file__).with_name("crash_test_run.py")
WAYS = ("power", "main", "child")
PHASES = ("prepare", "rollouts", "pack", "train", "validate")
LONGEST_LIFE = 1800.0  # seconds; a run that hangs is a failure
TIMES = (
    *(
        "finished",
        "time",
        "tokens_per_second",
        "grading_seconds",
        "flops_per_second",
        "utilisation",
        "matmul_peak",
        "peak_share",
        "host",
        "sync",
    ),
    "machine",
)
NOT_COMPARED = (*TIMES, "server", "logprob_tokens")
"""`server` of a metrics row holds nothing but speeds, and is absent where an earlier process
sampled a part.
"""


@dataclass
class Kill:
    """One violent death."""

    run: int
    way: str
    seconds: float
    """After the start of the process."""
    where: str
    """The first phase that was not finished then."""


@dataclass
class Outcome:
    """What all runs came to."""

    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    runs: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """needed: of undisturbed runs; made: of those that were killed."""

    def table(self) -> str:
        lines = [
            f"{'kill':>4} {'run':>4} {'way':>6} {'after s':>8}  first phase that was not finished"
        ]
        lines += [
            f"{n:4} {k.run:4} {k.way:>6} {k.seconds:8.2f}  {k.where}"
            for n, k in enumerate(self.kills, 1)
        ]
        ways = Counter(kill.way for kill in self.kills)
        places = Counter(kill.where.split()[-1] for kill in self.kills)
        made = self.requests["made"]
        needed = self.requests["needed"]
        lines += [
            "",
            f"{len(self.kills)} kills in {self.runs} runs: "
            + ", ".join(f"{ways[way]} {way}" for way in WAYS),
            "in the middle of: "
            + ", ".join(f"{place} {count}" for place, count in places.most_common()),
            f"requests: {made} made, {needed} needed; the other {made - needed} belong to phases "
            "that were cut off",
            f"problems: {len(self.problems)}",
            *(f"  - {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


class Harness:
    """One folder with the model, the recording, the undisturbed run and those that are killed."""

    def __init__(self, root: Path, iterations: int, seed: int, settings: dict[str, Any]) -> None:
        self.root = root
        self.iterations = iterations
        self.settings = settings
        self.chance = random.Random(seed)
        self.outcome = Outcome()
        self.model = make_tiny_model(root / "model", seed=seed, layers=1, width=32, heads=2)
        self.log = open(root / "log.txt", "a")  # noqa: SIM115 - open as long as the harness
        self.iteration_seconds = 0.0

    def command(self, run: Path, *more: str) -> list[str]:
        command = [sys.executable, str(SCRIPT), "--run", str(run), "--model", str(self.model)]
        command += [
            "--recording",
            str(self.root / "recording.jsonl"),
            "--requests",
            str(requests_of(run)),
        ]
        return [
            *command,
            "--iterations",
            str(self.iterations),
            "--settings",
            json.dumps(self.settings),
            *more,
        ]

    def start(self, run: Path, *more: str) -> "subprocess.Popen[bytes]":
        self.log.write(f"--- {run.name} {time.strftime('%X')}\n")
        self.log.flush()
        return subprocess.Popen(
            self.command(run, *more), stdout=self.log, stderr=self.log, start_new_session=True
        )

    def undisturbed(self, twice: bool) -> None:
        """Records the rollouts; then, with `twice`, makes the run once more from the recording: the
        loop itself must be repeatable first."""
        names = ["recorded", "undisturbed"] if twice else ["undisturbed"]
        for name, more in zip(names, [["--record"], []], strict=False):
            began = time.monotonic()
            process = self.start(self.root / name, *more)
            if process.wait(LONGEST_LIFE) != 0:
                raise SystemExit(f"the undisturbed run failed; see {self.root / 'log.txt'}")
            self.iteration_seconds = (time.monotonic() - began) / (self.iterations + 1)
        if twice:
            found = differences(self.root / "recorded", self.root / "undisturbed")
            self.outcome.problems += [f"undisturbed: {problem}" for problem in found]

    def killed_run(self, number: int, kills: int) -> int:
        """Makes a run that is killed up to `kills` times, and holds it against the undisturbed one.
        Returns how often it was.
        """
        run = self.root / f"killed-{number:03d}"
        done = 0
        self.outcome.runs += 1
        written: dict[Path, tuple[int, int]] = {}
        while True:
            process = self.start(run)
            began = time.monotonic()
            way = ""
            while done < kills and way in ("", "child") and not self._wait(process, run):
                chosen = self.chance.choice(WAYS)
                where = first_unfinished(run)
                if kill(process, chosen, self.chance):
                    done = done + 1
                    way = chosen
                    self.outcome.kills.append(Kill(number, way, time.monotonic() - began, where))
            try:
                code = process.wait(LONGEST_LIFE)
            except subprocess.TimeoutExpired:
                kill(process, "power", self.chance)
                self.outcome.problems.append(
                    f"{run.name}: hangs after kill {done}; see {self.root / 'log.txt'}"
                )
                return done
            self._check_untouched(run, written)
            if code == 0:
                break
            # One whose child was killed may end with an error; one that nobody touched may not.
            if code > 0 and way != "child":
                self.outcome.problems.append(
                    f"{run.name}: exit code {code} after kill {done}; see {self.root / 'log.txt'}"
                )
                return done
        self.outcome.problems += [
            f"{run.name}: {p}" for p in differences(self.root / "undisturbed", run)
        ]
        self.outcome.problems += [f"{run.name}: {p}" for p in repeated(run)]
        self.outcome.requests["made"] += len(read_jsonl(requests_of(run)))
        self.outcome.requests["needed"] += len(read_jsonl(requests_of(self.root / "undisturbed")))
        return done

    def _wait(self, process: "subprocess.Popen[bytes]", run: Path) -> bool:
        """Until a random moment of the process's life. True where it ended before.

        Counted from its start, from when it took the run folder, or from when it finished its first
        phase: so that some die before they have done anything, and most while they are at work,
            however slow the machine is.
        """
        owner = run / "owner.json"
        before = len(markers_of(run))
        sign = self.chance.choice(["start"] + ["lock"] * 2 + ["phase"] * 4)

        def seen() -> bool:
            if sign == "phase":
                return len(markers_of(run)) > before
            return sign == "start" or owned_by(owner, process.pid)

        seconds = self.chance.uniform(0.0, 2.0 * self.iteration_seconds)
        while process.poll() is None and not seen():
            time.sleep(0.01)
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
        return process.poll() is not None

    def _check_untouched(self, run: Path, written: dict[Path, tuple[int, int]]) -> None:
        """What a finished phase wrote is there as it was, or was pruned as a whole."""
        for path, identity in written.items():
            if path.exists() and identity_of(path) != identity:
                self.outcome.problems.append(
                    f"{run.name}: {path.relative_to(run)} was written again after its phase was "
                    "finished"
                )
        for marker in markers_of(run):
            files = json.loads(marker.read_text())["files"]
            paths = [marker, *(marker.parent.parent / name for name in files)]
            written.update(
                {path: identity_of(path) for path in paths if path.exists() and path not in written}
            )


def owned_by(owner: Path, pid: int) -> bool:
    try:
        return bool(json.loads(owner.read_text())["pid"] == pid)
    except (OSError, ValueError):
        return False


def requests_of(run: Path) -> Path:
    return run.with_name(f"{run.name}-requests.jsonl")


def markers_of(run: Path) -> list[Path]:
    return list(run.glob("iterations/*/done/[!.]*.json"))


def identity_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def first_unfinished(run: Path) -> str:
    for number in range(10_000):
        done = run / "iterations" / f"{number:04d}" / "done"
        for phase in ("prepare", "validate") if number == 0 else PHASES[1:]:
            if not (done / f"{phase}.json").exists():
                return f"iteration {number:2d} {phase}"
    return "none"


def kill(process: "subprocess.Popen[bytes]", way: str, chance: random.Random) -> bool:
    """False where there was nothing to kill."""
    try:
        main = psutil.Process(process.pid)
        below = main.children(recursive=True)
        if way == "child":
            if not below:
                return False
            chance.choice(below).kill()
            return True
        if way == "power":
            stopped: list[psutil.Process] = []
            while new := [
                one for one in [main, *main.children(recursive=True)] if one not in stopped
            ]:
                for one in new:  # held still first, so that none sees another die
                    one.send_signal(signal.SIGSTOP)
                stopped += new
            for one in stopped:
                one.kill()
        else:
            main.kill()
    except psutil.NoSuchProcess:
        return process.poll() is not None and process.returncode == -signal.SIGKILL
    process.wait()
    return True


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if not is_time(key)}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def is_time(key: str) -> bool:
    return key in NOT_COMPARED or "second" in key or "memory" in key


def first_difference(expected: Any, found: Any, where: str = "") -> str | None:
    """Return where two values differ first, and how; None where they are equal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        pairs = [
            (f"{where}.{key}", expected.get(key, "absent"), found.get(key, "absent"))
            for key in expected | found
        ]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [
            (f"{where}[{n}]", *pair) for n, pair in enumerate(zip(expected, found, strict=True))
        ]
    else:
        return (
            None
            if expected == found
            else f"{where or 'all of it'}: {expected!r:.100} became {found!r:.100}"
        )
    return next((said for name, *pair in pairs if (said := first_difference(*pair, name))), None)


def differences(expected: Path, run: Path) -> Iterator[str]:
    """What is not as in the undisturbed run."""
    for pattern in (
        "iterations/*/checkpoint/*",
        "iterations/*/state/*",
        "iterations/*/packed.safetensors",
    ):
        for names in (
            {str(path.relative_to(root)) for path in root.glob(pattern)} for root in (expected, run)
        ):
            for name in sorted(names):
                digests = [sha256(root / name) for root in (expected, run)]
                if None in digests:
                    yield (
                        f"{name} is there in {'one' if digests[0] != digests[1] else 'no'} run only"
                    )
                elif digests[0] != digests[1]:
                    yield f"{name} has other bytes"
    for number in range(len(list(expected.glob("iterations/*")))):
        for name, key in (("rollouts", None), ("validation", None), ("train", "global_step")):
            path = Path("iterations") / f"{number:04d}" / f"{name}.jsonl"
            rows = [without_times(read_jsonl(root / path, key=key)) for root in (expected, run)]
            if said := first_difference(*rows):
                yield f"{path} has other lines: {said}"
            if name == "train" and len(rows[1]) != len(read_jsonl(run / path)):
                yield f"{path} holds a step twice"
    rows = [
        without_times(read_jsonl(root / "metrics.jsonl", key="iteration"))
        for root in (expected, run)
    ]
    if said := first_difference(*rows):
        yield f"metrics.jsonl differs in more than times: {said}"
    if left := sorted(str(path.relative_to(run)) for path in run.rglob(".partial-*")):
        yield f"left behind: {', '.join(left)}"


def repeated(run: Path) -> Iterator[str]:
    """Completions that were asked for although the phase that they belong to was finished."""
    finished = {}
    for path in markers_of(run):
        marker = json.loads(path.read_text())
        finished[int(path.parent.parent.name), marker["phase"]] = marker["finished"]
    iteration_of = {
        row["messages"][0]["content"]: int(path.parent.name)
        for path in run.glob("iterations/*/rollouts.jsonl")
        for row in read_jsonl(path)
    }
    for request in read_jsonl(requests_of(run)):
        training = request["prompt"] in iteration_of
        phase = (
            (iteration_of[request["prompt"]], "rollouts")
            if training
            else (request["policy"], "validate")
        )
        if phase not in finished:
            yield f"{request['prompt']!r} was asked for, and belongs to no phase"
        elif request["time"] > finished[phase]:
            yield (
                f"{request['prompt']!r} was asked for again after {phase[1]} of iteration "
                f"{phase[0]} was finished"
            )


def sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def crash_test(
    root: Path,
    *,
    kills: int,
    iterations: int,
    seed: int,
    per_run: int = 12,
    twice: bool = True,
    settings: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """All of it, in the folder `root`. per_run: at most so many kills of one run. twice: see
    Harness.undisturbed.
    """
    harness = Harness(root, iterations, seed, settings or {})
    harness.undisturbed(twice)
    number = 0
    while len(harness.outcome.kills) < kills and not (harness.outcome.problems and number):
        number += 1
        before = time.monotonic()
        done = harness.killed_run(number, min(per_run, kills - len(harness.outcome.kills)))
        total = len(harness.outcome.kills)
        problems = len(harness.outcome.problems)
        say(
            f"run {number}: {done} kills, {time.monotonic() - before:.0f} s ({total} of "
            f"{kills}), {problems} problems"
        )
    return harness.outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument(
        "--per-run",
        type=int,
        default=12,
        help="at most this many kills of one run, then it is left to finish",
    )
    parser.add_argument("--seed", type=int, default=0, help="for the model and the moments")
    parser.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="with weight_sync memory; without it, weights go as files",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="work there, and keep everything for inspection"
    )
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="further settings of TrainConfig, as JSON"
    )
    arguments = parser.parse_args()
    if arguments.save_every is not None:
        arguments.settings |= {"weight_sync": "memory", "save_every": arguments.save_every}
    options = {
        name: getattr(arguments, name)
        for name in ("kills", "iterations", "per_run", "seed", "settings")
    }

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="ttrl-crash-test-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcome = crash_test(folder.absolute(), **options, say=say)
    print(outcome.table())
    if outcome.problems:
        print(f"everything is kept in {folder}")
    elif arguments.keep is None:
        shutil.rmtree(folder)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
