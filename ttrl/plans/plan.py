"""A plan as a table for terminals of 80 columns."""

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrl.plans.making import Plan

_WIDTH = 80
_LABEL = 18
_SOURCES = {
    "assumed": "assumed",
    "tasks": "of the tasks",
    "probe": "measured in a probe",
    "run": "measured in this run",
    "rough": "rough",
}


def plan_text(plan: "Plan") -> str:
    """Everything that a person wants to know before a run."""
    work, seconds = plan.work, plan.seconds
    lines = [_title(f"Plan: {plan.model}")]
    trained = "" if plan.trained_parameters == plan.parameters else f", {si(plan.trained_parameters)} of them trained"
    lines += _row("model", f"{si(plan.parameters)} parameters{trained}")
    processes = f", {plan.processes} trainer processes" if plan.processes > 1 else ""
    speed = f"matrix products at {si(plan.machine.matmul)}FLOP/s ({plan.machine.source})"
    lines += _row("machine", f"{plan.machine.name}, {gib(plan.machine.memory)}{processes}, {speed}")
    lines.append(_title("One iteration"))
    lines += _iteration(plan)
    lines.append(_title("Memory"))
    lines += _memory(plan)
    lines.append(_title("Time"))
    lines += _time(plan)
    how = "of that rough" if any(phase.source == "rough" for phase in seconds.phases.values()) else ""
    if plan.with_server:
        lines += _row(f"{plan.iterations} iterations", f"{duration(seconds.run)} with the start")
        if plan.price is not None:
            lines += _row("price", f"{plan.price:,.2f} at {plan.price_per_hour:,.2f} an hour")
    if how:
        shown = "Rough figures may be wrong by a factor of 3; --probe measures."
        lines += textwrap.wrap(shown, _WIDTH)
    if work and plan.warnings:
        lines.append(_title("Worth knowing"))
        for warning in plan.warnings:
            lines += textwrap.wrap("! " + warning, _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _iteration(plan: "Plan") -> list[str]:
    work, flops = plan.work, plan.flops
    per_task = round(work.samples / max(1, work.tasks))
    lines = _row("samples", f"{work.samples:,} = {work.tasks} tasks × {per_task}")
    lines += _row(
        "tokens sampled",
        f"{si(work.completion_tokens)} (mean {work.completion_mean:,.0f}, longest {work.completion_max:,}; "
        f"{_SOURCES[plan.completions_from]})",
    )
    prompts = (
        f"{si(work.prompt_tokens)} (mean {work.prompt_mean:,.0f}, longest {work.prompt_max:,}; {_SOURCES[plan.prompts_from]})"
    )
    lines += _row("prompt tokens", prompts)
    lines += _row("trained on", f"{100 * work.signal_share:.0f}% of the groups ({_SOURCES[plan.signal_from]})")
    if work.rows:
        saved = f"; without shared prompts {si(work.logical_tokens)}" if work.logical_tokens > work.row_tokens else ""
        lines += _row(
            "packed rows",
            f"{work.rows:,} of {work.seq_len:,} positions, {100 * work.fill:.0f}% full: {si(work.row_tokens)} tokens{saved}",
        )
    lines += _row("optimizer steps", f"{work.optimizer_steps} in {work.microbatches} microbatches")
    if work.validation_samples:
        lines += _row("held out", f"{work.validation_samples:,} samples")
    parts = [f"training {si(flops.training)}FLOP"]
    parts += [f"passes before it {si(flops.prepass)}FLOP"] if flops.prepass else []
    parts += [f"sampling {si(flops.sampling)}FLOP"] if plan.with_server else []
    return lines + _row("arithmetic", ", ".join(parts))


def _memory(plan: "Plan") -> list[str]:
    memory = plan.memory
    largest = sorted(memory.trainer_parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {gib(size)}" for name, size in largest if size > 0.02 * memory.trainer)
    measured = plan.measured_memory
    seen = f", measured {gib(measured['trainer'])}" if "trainer" in measured else ""
    each = " for each process" if plan.processes > 1 else ""
    lines = _row("trainer", f"{gib(memory.trainer)}{each}{seen} (when at most, at {memory.trainer_moment}: {parts})")
    if plan.with_server:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.server_parts.items() if size > 0.02 * memory.server)
        seen = f", measured {gib(measured['server'])}" if "server" in measured else ""
        lines += _row("server", f"{gib(memory.server)}{seen} ({parts})")
        lines += _row("cache", f"room for {si(memory.cache_tokens)} tokens; {memory.sequences:,} samples at the same time")
        both = "both at the same time" if memory.together else "one after the other"
        lines += _row("in all", f"{gib(memory.peak)} ({both}) of {gib(memory.available)}")
    else:
        lines += _row("in all", f"of {gib(memory.available)}")
    disk = plan.disk
    each = f"checkpoint {gib(disk['checkpoint'])}, state {gib(disk['state'])} an iteration"
    if plan.with_server:
        free = f" of {gib(disk['free'])} that are free" if "free" in disk else ""
        each = f"up to {gib(disk['most'])}{free}; {each}"
    return lines + _row("disk", each)


def _time(plan: "Plan") -> list[str]:
    seconds = plan.seconds
    lines = []
    if plan.with_server:
        for name, part in seconds.start.items():
            what = f"{name} start"
            lines.append(f"  {what:{_LABEL}}{part.seconds:9.1f} s   once ({_SOURCES[part.source]})")
        for name, phase in seconds.phases.items():
            lines.append(f"  {name:{_LABEL}}{phase.seconds:9.2f} s   {_SOURCES[phase.source]}")
        together = sum(phase.seconds for phase in seconds.phases.values()) > seconds.iteration * 1.001
        how = "   some of them at the same time" if together else ""
        return [*lines, f"  {'an iteration':{_LABEL}}{seconds.iteration:9.2f} s{how}"]
    return [f"  {'train':{_LABEL}}{seconds.phases['train'].seconds:9.2f} s   {_SOURCES[seconds.phases['train'].source]}"]


def _title(text: str) -> str:
    return f"\n{text}"


def _row(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:{_LABEL}}", subsequent_indent=" " * (2 + _LABEL))


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def si(value: float) -> str:
    """Four digits at most: "950", "12.3 k", "1.5 G"; with a space, so that a unit may follow."""
    for factor, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.0f} " if value >= 10 else f"{value:.3g} "


def duration(seconds: float) -> str:
    """For people: "42 s", "3 min", "5.2 h", "2.1 days"."""
    for factor, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"
