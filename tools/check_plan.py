"""`ttrl plan` against measurement: plans the tiny quickstart with a probe, runs it, and prints both. Takes about three minutes.

    python tools/check_plan.py [--iterations 8] [--run FOLDER] [--tolerance 0.25] [--only-compare]

Each line is planned / measured; memory is the highest resident size seen, over all processes of trainer or server. Exits with 1
if the time of an iteration or the memory of trainer or server is further off than the tolerance. Needs an otherwise idle machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from ttrl.loop.probe import ProcessMemory
from ttrl.report.plan import PlanOutcome, outcomes
from ttrl.system.files import read_jsonl
from ttrl.text import gib

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_letters.py"
JUDGED = ("seconds: an iteration", "trainer's memory, all", "server's memory, all")


def recipe(run: Path, *arguments: str) -> None:
    """The quickstart, in a process of its own."""
    subprocess.run([sys.executable, str(RECIPE), "--run", str(run), *arguments], check=True)


def compare(run: Path, peaks: dict[str, float]) -> list[PlanOutcome]:
    """What a run folder says of its plan, and what was seen of its processes."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    rows = read_jsonl(run / "metrics.jsonl")
    lines = outcomes(plan, rows)
    for kind, peak in peaks.items():
        lines.append(PlanOutcome(f"{kind}'s memory, all", plan["memory"][kind], peak, gib, "estimated"))
        if kind in plan["measured_memory"]:
            lines.append(PlanOutcome(f"{kind}'s memory, probe", plan["measured_memory"][kind], peak, gib, "probe"))
    start = sum(part["seconds"] for part in plan["seconds"]["start"].values())
    return [*lines, PlanOutcome("seconds: start", start, rows[0]["seconds"]["prepare"], lambda value: f"{value:.1f} s", "probe")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--run", type=Path, help="a run folder; by default a temporary one")
    parser.add_argument("--tolerance", type=float, default=0.25)
    parser.add_argument("--only-compare", action="store_true", help="compare an existing run, given with --run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ttrl-check-plan-") as temporary:
        run = arguments.run or Path(temporary, "run")
        peaks: dict[str, float] = {}
        if not arguments.only_compare:
            recipe(run, "--plan")
            with ProcessMemory() as memory:
                recipe(run, "--iterations", str(arguments.iterations))
            peaks = memory.peaks
        lines = compare(run, peaks)
    width = max(len(line.name) for line in lines)
    print(f"{'':{width}} {'planned':>11} {'measured':>11}  planned / measured")
    for line in lines:
        ratio = line.planned / line.real if line.real else float("nan")
        print(f"{line.name:{width}} {line.write(line.planned):>11} {line.write(line.real):>11}  {ratio:6.2f}")
    judged = [line for line in lines if line.name in JUDGED and abs(line.planned / line.real - 1) > arguments.tolerance]
    for line in judged:
        print(f"more than {100 * arguments.tolerance:.0f}% off: {line.name}")
    return 1 if judged else 0


if __name__ == "__main__":
    sys.exit(main())
