"""The steps of a day with a GPU, in order of how much they tell, and the program that runs one.

    python tools/gpu_day/steps.py MODULE:FUNCTION --folder FOLDER --logs FOLDER [--rehearse]

`day.py` starts it, in a process group of its own. A step is a function of a `Place`; it reports as
it goes (`record`), and an exception ends it as failed.
"""

import argparse
import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from record import Report


@dataclass(frozen=True)
class Step:
    """Describe one step."""

    number: int
    name: str
    title: str
    run: str
    """module:function"""
    needs: float
    """Seconds it takes at the least on an H100: with less time left, it is not started."""
    limit: float
    """Seconds after which it is ended."""
    bundle: str = "site"
    """What must have arrived for it (`parts`)."""


STEPS = [
    Step(1, "machine", "Driver, cores, copies", "step_machine:machine", 10, 60),
    Step(2, "servers", "vLLM starts, sleeps and takes weights", "step_servers:servers", 100, 280),
    Step(3, "decoding", "Decoding", "step_decoding:decoding", 70, 240),
    Step(4, "run", "A run of 1.5B in gsm8k's shapes", "step_runs:whole_run", 70, 240),
    Step(5, "lora", "A run of 7B with adapters", "step_runs:lora_run", 70, 280),
    Step(6, "curve", "SmolLM2 learns", "step_runs:curve", 60, 200, "smollm2"),
    Step(7, "profile", "A step by kinds of kernels", "step_kernels:profile", 40, 160),
    Step(8, "attention", "Attention", "step_attention:attention", 30, 160),
    Step(9, "offload", "Everything in the CPU's memory", "step_kernels:offload", 35, 120),
    Step(10, "tests", "tests/gpu", "step_checks:tests", 60, 400),
    Step(11, "certify", "ttrl doctor --certify", "step_checks:certify", 60, 400),
]


@dataclass(frozen=True)
class Place:
    """Say where a step works, and how it reports."""

    report: Report
    folder: Path
    """For models and runs: large, and gone with the machine."""
    rehearse: bool
    """Whether to take the CPU and a tiny model in place of the GPU and the real shapes."""

    @property
    def device(self) -> str:
        """Return the device to compute on."""
        return "cpu" if self.rehearse else "cuda"

    @property
    def models(self) -> Path:
        """Return where models are made, for all steps: in memory where there is room for 7B."""
        shared = Path("/dev/shm")
        if self.rehearse or not shared.is_dir() or shutil.disk_usage(shared).free < 25e9:
            return self.folder.parent / "models"
        return shared / "gpu_day_models"

    @property
    def logs(self) -> Path:
        """Return the folder of what is kept."""
        return self.report.folder


def step_named(name: str) -> Step:
    """Return a step by its name or number."""
    for step in STEPS:
        if name in (step.name, str(step.number)):
            return step
    known = ", ".join(f"{step.number} {step.name}" for step in STEPS)
    raise SystemExit(f"there is no step {name!r}; there are {known}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", metavar="MODULE:FUNCTION")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    module, _, function = arguments.run.partition(":")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    place = Place(Report(arguments.logs), arguments.folder, arguments.rehearse)
    if arguments.rehearse:
        place.report.stand_in("the CPU for the GPU, a tiny model for the real shapes")
    getattr(importlib.import_module(module), function)(place)


if __name__ == "__main__":
    sys.exit(main())
