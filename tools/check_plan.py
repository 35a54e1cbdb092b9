"""`ttrl plan` against measurement: plans the tiny quickstart with a probe, runs it, and prints
both. Takes about three minutes.

    python tools/check_plan.py [--iterations 8] [--run FOLDER] [--tolerance 0.25] [--only-compare]
    # Prints the tables of docs/reference/what_fits.md and writes them there; a test compares both:
    python tools/check_plan.py --machines

Each line is planned / measured; memory is the highest resident size seen, over all processes of
trainer or server. Exits with 1 if the time of an iteration or the memory of trainer or server is
further off than the tolerance. Needs an otherwise idle machine.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from ttrl.configs.run import TrainConfig
from ttrl.loop.plan_probe import ProcessMemory
from ttrl.plans.open_choices import choose
from ttrl.plans.open_settings import Choices, value_of
from ttrl.plans.plan import Plan
from ttrl.report.plan_table import PlanOutcome, outcomes
from ttrl.run_folder.folder import RunFolder
from ttrl.text import gib

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_letters.py"
MACHINES_PAGE = Path(__file__).parents[1] / "docs" / "reference" / "what_fits.md"
MACHINES = ((1, 24), (2, 24), (1, 80), (2, 80), (4, 80), (8, 80))
MODELS = {
    **{f"{size}B": f"qwen2.5_{size.lower()}b" for size in ("0.5", "1.5", "3", "7", "14", "32")},
    "70B": "llama3.3_70b",
}
WHOLE: dict[str, Any] = {"lr": 1e-6}
LORA: dict[str, Any] = {"lr": 1e-5, "lora_rank": 32}
QLORA = LORA | {"lora_base_dtype": "nf4"}
JUDGED = ("seconds: an iteration", "trainer's memory, all", "server's memory, all")


def recipe(run: Path, *arguments: str) -> None:
    """The quickstart, in a process of its own."""
    subprocess.run([sys.executable, str(RECIPE), "--run", str(run), *arguments], check=True)


def compare(run: Path, peaks: dict[str, float]) -> list[PlanOutcome]:
    """What a run folder says of its plan, and what was seen of its processes."""
    plan = Plan.load(run)
    rows = RunFolder(run).metrics()
    lines = outcomes(plan, rows)
    for kind, peak in peaks.items():
        lines.append(
            PlanOutcome(f"{kind}'s memory, all", getattr(plan.memory, kind), peak, gib, "estimated")
        )
        if kind in plan.measured_memory:
            probed = plan.measured_memory[kind]
            lines.append(PlanOutcome(f"{kind}'s memory, probe", probed, peak, gib, "probe"))
    start = sum(part.seconds for part in plan.seconds.start.values())
    return [
        *lines,
        PlanOutcome(
            "seconds: start",
            start,
            rows[0].seconds.prepare or 0.0,
            lambda value: f"{value:.1f} s",
            "probe",
        ),
    ]


def choices_for(
    name: str, count: int, gigabytes: int, training: dict[str, Any], **settings: Any
) -> Choices:
    """What is chosen for a model of ttrl/costs/architectures.json."""
    model = json.loads(
        (Path(__file__).parents[1] / "ttrl" / "costs" / "architectures.json").read_text(
            encoding="utf-8"
        )
    )[name]
    config = TrainConfig(run="", model="", iterations=1, training=training, **settings)
    return choose(model, config, [1e9 * gigabytes] * count, advise=False)


def cell(made: Choices, prefix: str = "") -> str:
    """A cell: what was chosen, or that it is refused; the trainer's peak, and what servers keep."""
    if made.problem is not None:
        return "refused"
    rows = value_of(made.config, "training.rows_per_microbatch")
    parts = [prefix] if prefix else []
    if made.config.placement == "split":
        parts.append(f"{made.config.processes_here} train")
    parts.append(f"{rows} row{'s' * (rows != 1)}")
    parts += ["recomputed"] * value_of(made.config, "training.activation_checkpointing")
    parts += ["offloaded"] * value_of(made.config, "training.activation_offloading")
    parts += ["8-bit"] * (value_of(made.config, "training.optimizer") == "adamw_8bit")
    parallel = value_of(made.config, "server.tensor_parallel_size")
    parts += [f"TP {parallel}"] * (parallel > 1) + ["short context"] * (
        value_of(made.config, "server.max_model_len") is not None
    )
    peak = f"{made.trainer / 1e9:.0f}"
    if made.kept:
        peak += f" + {made.kept / 1e9:.1f}"
    return f"{', '.join(parts)} ({peak}{', tight' * made.is_tight})"


def tables() -> str:
    """Return the tables of docs/reference/what_fits.md, in Markdown."""
    kinds: list[tuple[str, dict[str, Any], tuple[tuple[str, dict[str, Any]], ...]]] = [
        ("All weights trained", {}, (("", WHOLE),)),
        (
            "Adapters of rank 32 on a base in bf16, as these models are published; in 4 bits "
            "(nf4) where only that fits well",
            {},
            (("", LORA), ("nf4", QLORA)),
        ),
        (
            "Both at the same time (`off_policy_steps: 1`, so `placement: split`); adapters "
            "where all weights do not fit",
            {"off_policy_steps": 1},
            (("", WHOLE), ("LoRA", LORA), ("LoRA nf4", QLORA)),
        ),
    ]
    lines = []
    for title, settings, ways in kinds:
        machines = [one for one in MACHINES if not settings or one[0] > 1]
        lines += [
            textwrap.fill(f"{title}:", 100, break_on_hyphens=False),
            "",
            "| | " + " | ".join(f"{n} × {size} GB" for n, size in machines) + " |",
        ]
        lines += ["|---" * (len(machines) + 1) + "|"]
        for name, model in MODELS.items():
            cells = []
            for n, size in machines:
                found = [
                    (prefix, choices_for(model, n, size, training, **settings))
                    for prefix, training in ways
                ]
                fits = [one for one in found if one[1].problem is None]
                prefix, made = next(
                    (one for one in fits if not one[1].is_tight), fits[0] if fits else found[0]
                )
                cells.append(cell(made, prefix))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def page_with_tables(page: str) -> str:
    """Return docs/reference/what_fits.md with new tables."""
    return re.sub(
        r"(<!-- tables -->\n).*(<!-- end -->)",
        lambda found: found[1] + tables() + found[2],
        page,
        flags=re.DOTALL,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--run", type=Path, help="a run folder; by default a temporary one")
    parser.add_argument("--tolerance", type=float, default=0.25)
    parser.add_argument(
        "--only-compare", action="store_true", help="compare an existing run, given with --run"
    )
    parser.add_argument(
        "--machines",
        action="store_true",
        help="print the tables of docs/reference/what_fits.md, write them there, and end",
    )
    arguments = parser.parse_args()
    if arguments.machines:
        page = MACHINES_PAGE.read_text(encoding="utf-8")
        MACHINES_PAGE.write_text(page_with_tables(page), encoding="utf-8")
        print(tables())
        return 0
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
        print(
            f"{line.name:{width}} {line.write(line.planned):>11} {line.write(line.real):>11}  "
            f"{ratio:6.2f}"
        )
    judged = [
        line
        for line in lines
        if line.name in JUDGED and abs(line.planned / line.real - 1) > arguments.tolerance
    ]
    for line in judged:
        print(f"more than {100 * arguments.tolerance:.0f}% off: {line.name}")
    return 1 if judged else 0


if __name__ == "__main__":
    sys.exit(main())
