"""`ttrl doctor --certify`: test the foundations of training on this machine's hardware, and write
the results for a bug report.

The trials of `ttrl.instruments.certificate` run in a separate process, so a crash of the
hardware's driver is a result. A run of a tiny model follows, with a real server; its weights are
compared one by one after every iteration, and it must learn. With several GPUs a second run shards
the model over two of them. Never run on a GPU yet.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ttrl.cli.doctor import MARKS
from ttrl.errors import TtrlError, UserError
from ttrl.facts import MetricsRow, numbers
from ttrl.loop.environment import describe_environment
from ttrl.report.conversations import template
from ttrl.report.page import css
from ttrl.system.files import write_json, write_text
from ttrl.system.processor import cpu_name

ITERATIONS = 12
STOP_AT = 0.7
"""Of the held-out words; the warm start sorts about half."""
Case = Mapping[str, Any]
"""part, case, passed (None if left out), found, seconds: as `ttrl.instruments.certificate` prints.
"""


def certify(
    out: Path,
    say: Callable[[str], None],
    trials: Callable[[int, Callable[[str], None]], Iterator[Case]] | None = None,
) -> bool:
    """Try everything, report each result at once, and write `out`.json and `out`.html. Returns
    whether nothing failed. Raises UserError if the files cannot be written.

    trials: yields the cases, given the number of GPUs and `say`; default: `numerics` and `runs`.
    """
    if not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(
            f"--out {out}: cannot write to the folder {out.absolute().parent}; create it, or "
            "choose another"
        )
    began = time.monotonic()
    machine = describe_environment()
    cases = list[Case]()
    gpus = machine["gpus"]
    if gpus:
        device = f"{len(gpus)} × {gpus[0]}"
    else:
        device = cpu_name()
    say(f"Certifying {device}: about {15 if gpus else 3} minutes")
    try:
        for case in (trials or _trials)(len(gpus), say):
            cases.append(case)
    finally:  # also after Ctrl-C: the findings so far
        line = verdict(device, cases)
        minutes = round((time.monotonic() - began) / 60, 1)
        content = {"verdict": line, "minutes": minutes, "machine": machine, "cases": cases}
        write_json(out.with_suffix(".json"), content)
        write_text(
            out.with_suffix(".html"),
            template("certificate.html").render(css=css(), mark=_mark, **content),
        )
        say(f"\n{line}\nAttach {out.with_suffix('.html')} and .json to a bug report.")
    return not any(case["passed"] is False for case in cases)


def _trials(gpus: int, say: Callable[[str], None]) -> Iterator[Case]:
    yield from numerics(say)
    yield from runs(gpus, say)


def _case(part: str, case: str, passed: bool | None, found: str, since: float) -> Case:
    return {
        "part": part,
        "case": case,
        "passed": passed,
        "found": found,
        "seconds": round(time.monotonic() - since, 1),
    }


def numerics(
    say: Callable[[str], None], command: str = "ttrl.instruments.certificate"
) -> Iterator[Case]:
    """Yield the results of kernels, optimizers and parking, from a separate process."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", command], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):  # libraries print, too
                    yield _said(json.loads(line), say)
        except BaseException:
            process.kill()
            raise
        finally:
            code = process.wait()
        if code not in (0, 1):
            errors.seek(0)
            if code < 0:
                how = f"ended by {signal.Signals(-code).name}"
            else:
                how = f"ended with exit code {code}"
            last = " / ".join(errors.read().strip().splitlines()[-3:])
            yield _said(
                _case("numerics", "the process of the trials", False, f"{how}: {last}", began),
                say,
            )


def runs(
    gpus: int,
    say: Callable[[str], None],
    run: Callable[[Path, int], Iterator[Case]] | None = None,
) -> Iterator[Case]:
    """Yield the results of a tiny model's run: on one device, and with its trainer on two GPUs.

    run: yields the cases of a run, given its folder and its number of trainer processes.
    """
    run = run or _run
    with tempfile.TemporaryDirectory(prefix="ttrl-certificate-") as folder:
        yield from (_said(case, say) for case in run(Path(folder), 1))
        if gpus > 1:
            yield from (_said(case, say) for case in run(Path(folder), 2))
        else:
            here = f"left out with {gpus or 'no'} GPU{'' if gpus == 1 else 's'}"
            yield _said(_case("run", "a trainer of two GPUs", None, here, time.monotonic()), say)


def _run(folder: Path, processes: int) -> Iterator[Case]:
    from ttrl.cli.recipe_script import supervised_start
    from ttrl.configs.run import TrainConfig
    from ttrl.loop.start import train
    from ttrl.run_folder.folder import RunFolder
    from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples

    began = time.monotonic()
    name = "a tiny model learns" + ("" if processes == 1 else f", its trainer on {processes} GPUs")
    run = folder / f"run-{processes}"
    try:
        start = supervised_start(
            folder / "start",
            sort_letters_examples(160 * 64, seed=0, max_length=5),
            steps=160,
            batch_size=64,
        )
        config = TrainConfig(
            run=str(run),
            model=str(start),
            iterations=ITERATIONS,
            tasks_per_iteration=32,
            samples_per_task=16,
            max_tokens=12,
            seq_len=512,
            training={"lr": 1e-4, "updates_per_iteration": 4, "rows_per_microbatch": 8},
            nproc_per_node=processes,
            validation_metric="exact",
            stop_at=STOP_AT,
        )
        tasks = get_sort_letters_tasks("train", n=4096, seed=0, length_exponent=2)
        train(config, tasks, get_sort_letters_tasks("validation", n=256), quiet=True)
    except TtrlError as error:
        yield _case("run", name, False, f"{type(error).__name__}: {error}", began)
        return
    rows = RunFolder(run).metrics()
    if rows:
        yield from judge(rows, name, began)


def judge(rows: list[MetricsRow], name: str, began: float) -> Iterator[Case]:
    """Yield whether a run's metrics show learning, and every policy's arrival in the server."""
    shares = numbers(row.held_out("exact") for row in rows)
    seconds = [row.seconds for row in rows[1:]]
    phases = {
        name: sum(getattr(one, name) or 0.0 for one in seconds)
        for name in ("sample", "train", "sync")
    }
    of = ", ".join(f"{phase} {value:.0f}" for phase, value in phases.items())
    total = sum(one.total or 0.0 for one in seconds)
    found = f"{len(rows) - 1} iterations, {total:.0f} s ({of})"
    learned = len(shares) > 1 and shares[-1] >= STOP_AT
    yield _case(
        "run",
        name,
        learned,
        f"held out {' → '.join(f'{share:.2f}' for share in shares)}; {found}",
        began,
    )
    syncs = [row.sync for row in rows if row.sync.mode is not None]
    whole = bool(syncs) and all(
        sync.weights_compared and not sync.weights_unchecked for sync in syncs
    )
    ways = ", ".join(sorted({sync.mode or "" for sync in syncs}))
    worst = max((sync.canary_max_difference or 0.0 for sync in syncs), default=float("nan"))
    compared = (
        f"{len(syncs)} policies ({ways}), every weight compared; canary differs by {worst:.1e} "
        "nats at most"
    )
    yield _case(
        "sync", name, whole, compared if whole else f"not every weight was compared: {syncs}", began
    )


def _said(case: Case, say: Callable[[str], None]) -> Case:
    say(f" {_mark(case)} {case['part']:<10} {case['case']:<42} {case['found']}")
    return case


def _mark(case: Case) -> str:
    return {True: MARKS["ok"], False: MARKS["bad"], None: "·"}[case["passed"]]


def verdict(device: str, cases: list[Case]) -> str:
    """Return the proven facts about this hardware in one line."""
    proven, failed, left_out = (
        sum(case["passed"] is state for case in cases) for state in (True, False, None)
    )
    parts = ", ".join(dict.fromkeys(str(case["part"]) for case in cases if case["passed"] is False))
    rest = f"; {left_out} left out" if left_out else ""
    if failed:
        return f"{device}: {failed} of {proven + failed} cases FAILED ({parts}){rest}"
    return f"{device}: all {proven} cases proven{rest}"
