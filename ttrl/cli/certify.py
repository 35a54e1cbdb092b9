"""`ttrl doctor --certify`: prove on this machine's hardware what training rests on, and write it down for a bug report.

What `ttrl.instruments.certificate` tries runs in a process of its own, so that a crash of the hardware's driver is a result. A
run of a tiny model follows, with a real server, whose weights are compared one by one after every iteration: it must learn. With
several GPUs a second run shards the model over two of them. Never run on a GPU yet.
"""

import html
import itertools
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ttrl.cli.doctor import MARKS, has_gpu, installed_versions, read_tested_versions
from ttrl.errors import TtrlError
from ttrl.system.files import write_text
from ttrl.system.native_code import cpu_name

ITERATIONS = 12
STOP_AT = 0.7
"""Of the held-out words; the warm start sorts about half."""
_GPUS = (
    "import json, torch; n = torch.cuda.device_count(); gib = 2**30\n"
    "print(json.dumps([[p.name, round(p.total_memory / gib, 1), f'{p.major}.{p.minor}']"
    " for p in map(torch.cuda.get_device_properties, range(n))]))"
)

Case = Mapping[str, Any]
"""part, case, passed (None where it was left out), found, seconds: as `ttrl.instruments.certificate` prints."""


def certify(out: Path, say: Callable[[str], None]) -> bool:
    """Try everything, say each result as it comes, and write `out`.json and `out`.html. Returns whether nothing failed."""
    began, machine, cases = time.time(), describe_machine(), list[Case]()
    say(f"Certifying {machine['device']}: about {'15' if has_gpu() else '3'} minutes")
    try:
        for case in itertools.chain(numerics(say), runs(len(machine["gpus"]), say)):
            cases.append(case)
    finally:  # also after Ctrl-C: what was found until then
        line = verdict(machine, cases)
        content = {"verdict": line, "minutes": round((time.time() - began) / 60, 1), "machine": machine, "cases": cases}
        write_text(out.with_suffix(".json"), json.dumps(content, indent=1))
        write_text(out.with_suffix(".html"), page(content))
        say(f"\n{line}\n{out.with_suffix('.html')} and .json can be attached to a bug report")
    return not any(case["passed"] is False for case in cases)


def describe_machine() -> dict[str, Any]:
    """Return what a reader of a bug report asks first."""
    done = subprocess.run([sys.executable, "-c", _GPUS], capture_output=True, text=True)
    gpus = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else []
    installed = installed_versions()
    tested = [name.lower().replace("_", "-") for name in read_tested_versions()]
    return {
        "device": f"{len(gpus)} × {gpus[0][0]}" if gpus else cpu_name(),
        "gpus": [{"name": name, "gib": gib, "compute capability": capability} for name, gib, capability in gpus],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: installed[name] for name in [*tested, "vllm", "triton", "ttrl"] if name in installed},
    }


def _case(part: str, case: str, passed: bool | None, found: str, since: float) -> dict[str, Any]:
    return {"part": part, "case": case, "passed": passed, "found": found, "seconds": round(time.monotonic() - since, 1)}


def numerics(say: Callable[[str], None], command: str = "ttrl.instruments.certificate") -> Iterator[Case]:
    """Yield what the kernels, the optimizers and parking come to, from a process of its own."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-u", "-m", command], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):  # libraries print, too
                    yield _said(json.loads(line), say)
        finally:
            process.kill()
            code = process.wait()
        if code not in (0, 1):
            errors.seek(0)
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            last = " / ".join(errors.read().strip().splitlines()[-3:])
            yield _said(_case("numerics", "the process that tries them", False, f"{how}: {last}", began), say)


def runs(gpus: int, say: Callable[[str], None]) -> Iterator[Case]:
    """Yield what a run of a tiny model comes to: on one device, and with its trainer on two GPUs."""
    with tempfile.TemporaryDirectory(prefix="ttrl-certificate-") as folder:
        yield from (_said(case, say) for case in _run(Path(folder), 1))
        if gpus > 1:
            yield from (_said(case, say) for case in _run(Path(folder), 2))
        else:
            here = f"left out with {gpus or 'no'} GPU{'' if gpus == 1 else 's'}"
            yield _said(_case("run", "a trainer of two GPUs", None, here, time.monotonic()), say)


def _run(folder: Path, processes: int) -> Iterator[Case]:
    from ttrl.cli.recipe_script import supervised_start
    from ttrl.configs.run import TrainConfig
    from ttrl.loop.start import train
    from ttrl.run_folder.folder import RunFolder
    from ttrl.tasks.sort_letters import get_sort_letters_tasks, sort_letters_examples

    began, name = time.monotonic(), "a tiny model learns" + ("" if processes == 1 else f", its trainer on {processes} GPUs")
    run = folder / f"run-{processes}"
    try:
        start = supervised_start(
            folder / "start", sort_letters_examples(160 * 64, seed=0, max_length=5), steps=160, batch_size=64
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
    if rows := RunFolder(run).metrics():
        yield from judge(rows, name, began)


def judge(rows: list[dict[str, Any]], name: str, began: float) -> Iterator[Case]:
    """Yield whether a run's metrics show that it learned, and that every policy arrived in the server."""
    shares = [row["validation"]["exact"] for row in rows if "exact" in row.get("validation", {})]
    seconds = [row["seconds"]["total"] for row in rows[1:]]
    of = ", ".join(
        f"{phase} {sum(row['seconds'].get(phase, 0.0) for row in rows[1:]):.0f}" for phase in ("sample", "train", "sync")
    )
    found = f"{len(rows) - 1} iterations, {sum(seconds):.0f} s ({of})"
    learned = len(shares) > 1 and shares[-1] >= STOP_AT
    yield _case("run", name, learned, f"held out {' → '.join(f'{share:.2f}' for share in shares)}; {found}", began)
    syncs = [row["sync"] for row in rows if row.get("sync")]
    whole = bool(syncs) and all(sync["weights_compared"] and not sync["weights_unchecked"] for sync in syncs)
    ways = ", ".join(sorted({sync["mode"] for sync in syncs}))
    worst = max((sync["canary_max_difference"] or 0.0 for sync in syncs), default=float("nan"))
    compared = f"{len(syncs)} policies ({ways}), every weight compared; canary differs by {worst:.1e} nats at most"
    yield _case("sync", name, whole, compared if whole else f"not every weight was compared: {syncs}", began)


def _said(case: Case, say: Callable[[str], None]) -> Case:
    say(f" {_mark(case)} {case['part']:<10} {case['case']:<42} {case['found']}")
    return case


def _mark(case: Case) -> str:
    return {True: MARKS["ok"], False: MARKS["bad"], None: "·"}[case["passed"]]


def verdict(machine: Mapping[str, Any], cases: list[Case]) -> str:
    """Return one line: what is proven on this hardware."""
    proven, failed, left_out = (sum(case["passed"] is state for case in cases) for state in (True, False, None))
    parts = ", ".join(dict.fromkeys(str(case["part"]) for case in cases if case["passed"] is False))
    rest = f"; {left_out} left out" if left_out else ""
    if failed:
        return f"{machine['device']}: {failed} of {proven + failed} cases FAILED ({parts}){rest}"
    return f"{machine['device']}: all {proven} cases proven{rest}"


def page(content: Mapping[str, Any]) -> str:
    """Return the certificate as one HTML file that loads nothing."""

    def row(cells: list[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    machine = content["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    gpus = "; ".join(", ".join(f"{name} {value}" for name, value in gpu.items()) for gpu in machine["gpus"]) or "none"
    about = [["GPUs", gpus], ["System", f"{machine['system']}, Python {machine['python']}"], ["Packages", packages]]
    cases = [[_mark(case), case["part"], case["case"], case["found"], f"{case['seconds']:.1f}"] for case in content["cases"]]
    style = (
        "body{font:15px system-ui;margin:2em auto;max-width:75em;padding:0 1em}td,th{padding:.2em .8em .2em 0;text-align:left;"
    )
    style += "vertical-align:top}:root{color-scheme:light dark}"
    return "\n".join(
        [
            "<!doctype html><html lang='en'><meta charset='utf-8'><title>ttrl certificate</title>",
            f"<style>{style}</style><h1>{html.escape(content['verdict'])}</h1>",
            f"<p>{content['minutes']} minutes</p><table>{''.join(map(row, about))}</table><h2>Cases</h2><table>",
            row(["", "part", "case", "found", "seconds"], "th"),
            *map(row, cases),
            "</table></html>\n",
        ]
    )
