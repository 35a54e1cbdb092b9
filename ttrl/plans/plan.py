"""Hold a plan, and print its table for terminals of 80 columns."""

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrl.facts import parse
from ttrl.plans.iteration_work import PlannedFlops, Work
from ttrl.plans.measured import PLAN_FILE
from ttrl.plans.memory_plan import PlannedMemory
from ttrl.plans.plan_machine import Machine
from ttrl.plans.seconds import PlannedSeconds, assumed
from ttrl.system.files import write_json
from ttrl.text import counted, duration, gib, si_spaced

_WIDTH = 80
_LABEL = 18
_SOURCES = {
    "assumed": "assumed",
    "tasks": "of the tasks",
    "probe": "measured in a probe",
    "run": "measured in this run",
    "other": "measured in the run, with another model",
    "rough": "rough",
}


@dataclass(frozen=True)
class Plan:
    """Hold the expected cost of a run. `str()` is a table for terminals, `to_dict` plain values."""

    model: str
    parameters: int
    trained_parameters: int
    machine: Machine
    processes: int
    iterations: int
    validate_every: int
    prompts_from: str
    completions_from: str
    signal_from: str
    work: Work
    flops: PlannedFlops
    memory: PlannedMemory
    disk: Mapping[str, float]
    """Bytes: "checkpoint" and "state" of an iteration, "most" held by the run at the same time,
    "free" now (if the plan is for this machine).
    """
    seconds: PlannedSeconds
    price_per_hour: float | None
    measured_memory: Mapping[str, float]
    """Peaks of a probe: "trainer", "server"; empty without."""
    with_server: bool
    """False for a recipe's config: it says nothing of sampling."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Chosen settings: the value for these GPUs, and the reason."""
    warnings: list[str] = field(default_factory=list)
    active_parameters: int | None = None
    """Active parameters per token in a mixture of experts."""
    attending: str | None = None
    """Number of attention layers, in words, unless all attend."""

    @property
    def validations(self) -> int:
        """Return the number of validations: for the first, the last and every `validate_every`-th
        policy.
        """
        return 1 + -(-self.iterations // self.validate_every)

    @property
    def price(self) -> float | None:
        """Return the price of the whole run."""
        if self.price_per_hour is None:
            return None
        return self.seconds.run / 3600 * self.price_per_hour

    def time_line(self, *, may_end_early: bool = False) -> str:
        """Return the time of the whole run in a line."""
        seconds = self.seconds
        rough = ""
        if self.is_rough:
            rough = "; rough, may be wrong by a factor of 3"
            if self.completions_from == "assumed":
                rough += f" (completions of {self.work.completion_mean:,.0f} tokens are assumed)"
        count = ("up to " if may_end_early else "") + counted(self.iterations, "iteration")
        return (
            f"plan: {count} of about {duration(seconds.iteration)}, {duration(seconds.run)} with "
            f"the start{rough}"
        )

    def work_line(self) -> str:
        """Return what one iteration consists of, in a line."""
        work = self.work
        rows = counted(work.rows, "row") + f" of {work.seq_len:,}"
        steps = counted(work.optimizer_steps, "optimizer step")
        flops = self.flops.training + self.flops.prepass + self.flops.sampling
        return (
            f"an iteration: {work.tasks} tasks, {work.samples:,} samples, about "
            f"{si_spaced(work.completion_tokens)}tokens, {rows}, {steps}, "
            f"{si_spaced(flops)}FLOP"
        )

    @property
    def does_not_fit(self) -> str | None:
        """Return the warning about too little memory; None if it fits."""
        return next(
            (warning for warning in self.warnings if warning.startswith("does not fit")), None
        )

    @property
    def is_rough(self) -> bool:
        """Return whether any phase's seconds are unmeasured."""
        return any(phase.source == "rough" for phase in self.seconds.phases.values())

    def to_dict(self) -> Mapping[str, Any]:
        """Return plain values, as in plan.json."""
        values = dataclasses.asdict(self)
        values["work"]["fill"] = self.work.fill
        values["memory"]["peak"] = self.memory.peak
        return {"schema": 1} | values | {"price": self.price}

    def save(self, folder: Path) -> Path:
        """Write plan.json into a run folder, for its report to compare with; return its path.
        Raises StorageError.
        """
        path = folder / PLAN_FILE
        write_json(path, self.to_dict())
        return path

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        """Read plan.json from a run folder. Raises OSError, ValueError."""
        return parse(cls, (folder / PLAN_FILE).read_bytes())

    def __str__(self) -> str:
        return plan_text(self)


def plan_text(plan: Plan) -> str:
    """Write everything a person wants to know before a run."""
    seconds = plan.seconds
    machine = plan.machine
    lines = [f"\nPlan: {plan.model}"]
    size = f"{si_spaced(plan.parameters)} parameters"
    if plan.active_parameters:
        size += f", {si_spaced(plan.active_parameters)} of them active for a token"
    if plan.trained_parameters != plan.parameters:
        size += f", {si_spaced(plan.trained_parameters)} of them trained"
    if plan.attending:
        size += f"; {plan.attending}"
    lines += _row("model", size)
    hardware = f"{machine.name}, {gib(machine.memory)}"
    if machine.gpus > 1:
        hardware += f", {machine.gpus} of them"
    if plan.processes > 1:
        hardware += f", {plan.processes} trainer processes"
    speed = f"matrix products at {si_spaced(machine.matmul)}FLOP/s ({machine.source})"
    lines += _row("machine", f"{hardware}, {speed}")
    if plan.chosen:
        place = "these GPUs" if machine.cuda else "this machine's memory"
        still = ", but even so it does not fit" if plan.does_not_fit else ""
        lines.append(f"\nChosen for {place}{still}")
        for name, text in plan.chosen.items():
            lines += textwrap.wrap(
                f"{name}: {text}", _WIDTH, initial_indent="  ", subsequent_indent=" " * (2 + _LABEL)
            )
    lines.append("\nOne iteration")
    lines += _iteration(plan)
    lines.append("\nMemory")
    lines += _memory(plan)
    lines.append("\nTime")
    lines += _time(plan)
    if plan.with_server:
        lines += _row(
            counted(plan.iterations, "iteration"), f"{duration(seconds.run)} with the start"
        )
        if plan.price is not None:
            lines += _row("price", f"{plan.price:,.2f} at {plan.price_per_hour:,.2f} an hour")
    if plan.is_rough:
        rough = "Rough figures may be wrong by a factor of 3"
        if not machine.cuda:
            rough += "; --probe measures"
        lines += textwrap.wrap(
            f"{rough}. Assumed: {assumed(machine, plan.with_server)}.",
            _WIDTH,
        )
    if plan.warnings:
        lines.append("\nWorth knowing")
        for warning in plan.warnings:
            lines += textwrap.wrap("! " + warning, _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _iteration(plan: Plan) -> list[str]:
    work = plan.work
    flops = plan.flops
    per_task = round(work.samples / max(1, work.tasks))
    samples = f"{work.samples:,} = {work.tasks} tasks × {per_task}"
    if not plan.with_server:
        samples += " (assumed: a recipe's config does not set it)"
    lines = _row("samples", samples)
    lines += _row(
        "tokens sampled",
        f"{si_spaced(work.completion_tokens)} (mean {work.completion_mean:,.0f}, longest "
        f"{work.completion_max:,}; "
        f"{_SOURCES[plan.completions_from]})",
    )
    lines += _row(
        "prompt tokens",
        f"{si_spaced(work.prompt_tokens)} (mean {work.prompt_mean:,.0f}, longest "
        f"{work.prompt_max:,}; "
        f"{_SOURCES[plan.prompts_from]})",
    )
    lines += _row(
        "trained on", f"{100 * work.signal_share:.0f}% of the groups ({_SOURCES[plan.signal_from]})"
    )
    if work.rows:
        rows = (
            f"{work.rows:,} of {work.seq_len:,} positions, {100 * work.fill:.0f}% full: "
            f"{si_spaced(work.row_tokens)} tokens"
        )
        if work.logical_tokens > work.row_tokens:
            rows += f"; without shared prompts {si_spaced(work.logical_tokens)}"
        lines += _row("packed rows", rows)
    lines += _row(
        "optimizer steps",
        f"{work.optimizer_steps} in {work.microbatches} "
        f"microbatch{'es' * (work.microbatches != 1)}",
    )
    if work.validation_samples:
        lines += _row("held out", _held_out(plan))
    elif plan.with_server and plan.prompts_from != "assumed":
        lines += _row("held out", "no tasks: no policy is measured on tasks it was not trained on")
    parts = [f"training {si_spaced(flops.training)}FLOP"]
    if flops.prepass:
        parts.append(f"passes before it {si_spaced(flops.prepass)}FLOP")
    if plan.with_server:
        parts.append(f"sampling {si_spaced(flops.sampling)}FLOP")
    if work.validation_samples:
        parts.append(f"a validation {si_spaced(flops.validation)}FLOP")
    return lines + _row("arithmetic", ", ".join(parts))


def _held_out(plan: Plan) -> str:
    """Describe the share of validation in the run's samples."""
    work = plan.work
    every = "each iteration"
    if plan.validate_every > 1:
        every = f"every {plan.validate_every} iterations"
    held_out = plan.validations * work.validation_samples
    sampled = held_out + plan.iterations * work.samples
    return (
        f"{work.validation_samples:,} samples after {every}, {plan.validations} times with the "
        f"start: {held_out:,} of the run's {sampled:,} samples"
    )


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    largest = sorted(memory.trainer_parts.items(), key=lambda part: -part[1])
    parts = ", ".join(
        f"{name} {gib(size)}" for name, size in largest if size > 0.02 * memory.trainer
    )
    seen = {name: f", measured {gib(size)}" for name, size in plan.measured_memory.items()}
    each = " for each process" if plan.processes > 1 else ""
    lines = _row(
        "trainer",
        f"{gib(memory.trainer)}{each}{seen.get('trainer', '')} (at its peak, "
        f"{memory.trainer_moment}: {parts})",
    )
    if plan.with_server:
        parts = ", ".join(
            f"{name} {gib(size)}"
            for name, size in memory.server_parts.items()
            if size > 0.02 * memory.server
        )
        lines += _row("server", f"{gib(memory.server)}{seen.get('server', '')} ({parts})")
        lines += _row(
            "cache",
            f"room for {si_spaced(memory.cache_tokens)} tokens; {memory.sequences:,} samples at "
            "the same time",
        )
        if memory.together:
            both = "both at the same time"
        else:
            both = "one after the other"
        if memory.left_by_server:
            both += f", a sleeping server keeps {gib(memory.left_by_server)}"
        if memory.left_by_trainer:
            both += f", a waiting trainer {gib(memory.left_by_trainer)}"
        lines += _row("in all", f"{gib(memory.peak)} ({both}) of {gib(memory.available)}")
    else:
        lines += _row("in all", f"{gib(memory.peak)} of {gib(memory.available)}")
    if memory.host:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.host.items())
        host = gib(sum(memory.host.values()))
        if memory.host_available is not None:
            host += f" of {gib(memory.host_available)}"
        lines += _row("host", f"{host} of the machine's own memory ({parts})")
    disk = plan.disk
    each = f"checkpoint {gib(disk['checkpoint'])}, state {gib(disk['state'])} an iteration"
    if plan.with_server:
        most = f"up to {gib(disk['most'])}"
        if "free" in disk:
            most += f" of {gib(disk['free'])} free"
        each = f"{most}; {each}"
    return lines + _row("disk", each)


def _time(plan: Plan) -> list[str]:
    seconds = plan.seconds
    lines = []
    if plan.with_server:
        for name, part in seconds.start.items():
            what = f"{name} start"
            lines.append(
                f"  {what:{_LABEL}}{_clock(part.seconds, 1)}   once ({_SOURCES[part.source]})"
            )
        for name, phase in seconds.phases.items():
            if name == "validate" and not plan.work.validation_samples:
                continue
            note = ""
            if name == "other" and phase.seconds > 1 and plan.memory.held_out:
                note = "; for files still being written"
            if name == "validate" and plan.validate_every > 1:
                note = f"; a share of the time of every {plan.validate_every} iterations"
            source = _SOURCES[phase.source] + note
            lines.append(f"  {name:{_LABEL}}{_clock(phase.seconds)}   {source}")
        whole = f"  {'an iteration':{_LABEL}}{_clock(seconds.iteration)}"
        if sum(phase.seconds for phase in seconds.phases.values()) > seconds.iteration * 1.001:
            whole += "   some of them at the same time"
        return [*lines, whole]
    return [
        f"  {'train':{_LABEL}}{_clock(seconds.phases['train'].seconds)}   "
        f"{_SOURCES[seconds.phases['train'].source]}"
    ]


def _clock(seconds: float, digits: int = 2) -> str:
    """Return seconds for a column; hours and days once seconds become hard to read."""
    return f"{f'{seconds:.{digits}f} s' if seconds < 3600 else duration(seconds):>11}"


def _row(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"  {name:{_LABEL}}", subsequent_indent=" " * (2 + _LABEL)
    )
