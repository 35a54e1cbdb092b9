"""Steps 7 and 9: where the time of a training step goes, and what `cpu_offload` costs."""

import json
import re
from pathlib import Path

from steps import Place
from trainer_case import CASE_COLUMNS, run_case, tell_case

KINDS = [
    ("matrix products", r"gemm|cutlass|nvjet|matmul|_mm_|aten::(add)?mm|aten::linear|onednn"),
    ("attention", r"flex|_tem_|attention|fmha|flash"),
    ("head", r"measure_kernel|gradient_kernel|softmax|nll"),
    ("optimizer", r"adam|multi_tensor|foreach|lerp|addcdiv"),
    ("copies", r"memcpy|memset|direct_copy|FillFunctor|aten::(_to_)?copy|aten::(to|fill_)\b"),
    ("norms and sums", r"reduce|norm|rsqrt|mean|sum|_red_|_per_"),
    ("element by element", r"elementwise|triton_poi|_poi_|silu|mul|add|cat|index|gather|scatter"),
]
"""Names of kernels, by kind; the first that fits."""
Kinds = dict[str, tuple[float, int]]
"""Seconds and number of kernels, by kind."""


def profile(place: Place) -> None:
    """Profile one optimizer step, eager and compiled, and report seconds by kind of kernel."""
    rows = []
    if place.rehearse:
        place.report.stand_in("operators on the CPU for kernels")
    for title, name in [("eager", "1.5B, checkpointing"), ("compiled", "1.5B, compiled")]:
        more = {}
        if place.rehearse:
            more = {"compile": title == "compiled", "row_length_multiple": 256}
        measured, _ = run_case(place, name, **more)
        rows.append(tell_case(place, title, measured))
        place.report.table("a step of 1.5B", CASE_COLUMNS, rows)
        # Another time with the profiler, which slows a step down.
        _, out = run_case(place, name, profile_steps=1, **more)
        kinds, longest = by_kind(out / "profile" / "rank-0.json", on_gpu=not place.rehearse)
        total = sum(seconds for seconds, _ in kinds.values())
        table = [[kind, spent, spent / total, count] for kind, (spent, count) in kinds.items()]
        columns = ["kind", "seconds", "share", "kernels"]
        place.report.table(f"kernels of a step, {title}", columns, table)
        place.report.table(f"longest kernels, {title}", ["kernel", "seconds"], longest)
        place.report.check(f"kernels were seen, {title}", total > 0, f"{total:.3g} s")


def by_kind(trace: Path, *, on_gpu: bool) -> tuple[Kinds, list[list[float | str]]]:
    """Return seconds and number of kernels by kind, and the longest by name, of a profiler's trace.

    Without a GPU, operators count in place of kernels, each with all that it calls.
    """
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kinds: Kinds = {}
    names: dict[str, float] = {}
    for event in events:
        if event.get("cat") not in wanted:
            continue
        seconds = event["dur"] / 1e6
        kind = kind_of(event["name"])
        before, count = kinds.get(kind, (0.0, 0))
        kinds[kind] = (before + seconds, count + 1)
        short = event["name"][:90]
        names[short] = names.get(short, 0.0) + seconds
    ordered = dict(sorted(kinds.items(), key=lambda item: -item[1][0]))
    longest = sorted(names.items(), key=lambda item: -item[1])[:12]
    return ordered, [[name, seconds] for name, seconds in longest]


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    for kind, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "others"


def offload(place: Place) -> None:
    """Train with parameters, gradients and moments in the CPU's memory."""
    more = {}
    if place.rehearse:
        place.report.stand_in("a step without cpu_offload, which needs CUDA")
    measured, _ = run_case(place, "1.5B, everything on the CPU", **more)
    row = tell_case(place, "cpu_offload", measured)
    place.report.table("a step of 1.5B", CASE_COLUMNS, [row])
    parts = measured.row["seconds_by_part"]
    place.report.table("seconds by part", list(parts), [list(parts.values())])
    ratio = measured.estimated / measured.allocated
    found = f"{measured.allocated / 1e9:.2f} GB, planned {measured.estimated / 1e9:.2f}"
    place.report.check("memory as planned", place.rehearse or 0.9 < ratio < 1.1, found)
