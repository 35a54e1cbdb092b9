"""Describe GPUs by their data sheets, found by the driver's name or a user's.

A name must contain all of a sheet's words, as whole words: "L40S" is no L4, "GH200" no H200. Among
several matching sheets, the one with the most words counts: "A100-SXM4-40GB" is an A100 of 40 GB.
The memory in a name may belong to another chip (a GH200's "480GB" is its CPU's), so a plan for this
machine takes the memory from its devices.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

from ttrl.errors import UserError


@dataclass(frozen=True)
class Sheet:
    """Hold the figures of a maker's data sheet."""

    name: str
    words: frozenset[str]
    flops: float
    """Dense bf16 FLOP/s, summed in fp32. See plans/seconds.py for the share reached."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes/s of that memory."""


def _words(name: str) -> list[str]:
    """Return the words of a name: "RTX4090" is one of two, "40 GB" and "40G" are "40gb"."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    text = re.sub(r"rtx|geforce|nvidia|tesla", " ", text)
    text = re.sub(r"\b(\d+) ?gi?b?\b", r"\1gb", text)
    text = re.sub(r"\b([a-z]{2,})(\d{4})", r"\1 \2", text)  # pro6000
    text = re.sub(r"\b(\d{4})([a-z]+)", r"\1 \2", text)  # 3090ti, 6000ada
    return text.split()


def _sheet(name: str, teraflops: float, gigabytes: float, speed: float, words: str = "") -> Sheet:
    """Make a sheet. speed: of the memory, in GB/s. words: those in every name of the GPU
    (default: all of `name`)."""
    figures = (teraflops * 1e12, gigabytes * 1e9, speed * 1e9)
    return Sheet(name, frozenset(_words(words or name)), *figures)


SHEETS = (
    # Ampere
    _sheet("A100-80GB", 312, 80, 2039, "A100"),
    _sheet("A100-80GB-PCIe", 312, 80, 1935),
    _sheet("A100-40GB", 312, 40, 1555),
    _sheet("A800", 312, 80, 2039),
    _sheet("A30", 165, 24, 933),
    _sheet("A10", 125, 24, 600),
    _sheet("A10G", 70, 24, 600),
    _sheet("RTX3090", 71, 24, 936),
    _sheet("RTX3090Ti", 80, 24, 1008),
    _sheet("A5000", 111, 24, 768),
    _sheet("A40", 150, 48, 696),
    _sheet("A6000", 155, 48, 768),
    # Ada
    _sheet("L4", 121, 24, 300),
    _sheet("L40S", 362, 48, 864),
    _sheet("L40", 181, 48, 864),
    _sheet("RTX6000-Ada", 364, 48, 960),
    _sheet("RTX5000-Ada", 261, 32, 576),
    _sheet("RTX4090", 165, 24, 1008),
    _sheet("RTX4080", 97.5, 16, 717),
    _sheet("RTX4080-SUPER", 104.4, 16, 736),
    # Hopper
    _sheet("H100", 989, 80, 3350),
    _sheet("H100-PCIe", 756, 80, 2000),
    _sheet("H100-NVL", 835, 94, 3938),
    _sheet("H800", 989, 80, 3350),
    _sheet("H20", 148, 96, 4000),
    _sheet("GH200", 989, 96, 4000),
    _sheet("GH200-144GB", 989, 144, 4900),
    _sheet("H200", 989, 141, 4800),
    _sheet("H200-NVL", 835, 141, 4800),
    # Blackwell
    _sheet("B200", 2250, 192, 8000),
    _sheet("GB200", 2500, 192, 8000),
    _sheet("B300", 2250, 288, 8000),
    _sheet("GB300", 2500, 288, 8000),
    _sheet("RTX5090", 209, 32, 1792),
    _sheet("RTX5080", 112.6, 16, 960),
    _sheet("RTX-PRO-6000", 500, 96, 1792),
)
_USUAL = ("RTX4090", "RTX5090", "L40S", "H100", "RTX-PRO-6000")
"""GPU meant by "24GB", "32GB", …, among several with this memory."""
_NO_BF16 = {"t4", "v100", "p100", "p40", "p4", "2080", "titan"}
_OTHER_CHIPS = {"laptop", "mobile", "amd", "radeon", "instinct", "intel", "arc"}
"""Words of other chips under similar names: an "RTX 4090 Laptop GPU" is no RTX 4090."""
_QUARTERS = {"A30", "RTX-PRO-6000"}  # divide into four in MIG mode, all others into seven


def sheet_of(name: str) -> Sheet | None:
    """Return the sheet for a GPU's driver name; None for a GPU without one.

    An instance in MIG mode ("NVIDIA H100 80GB HBM3 MIG 3g.40gb") has its share of the whole.
    """
    whole, _, instance = name.lower().partition(" mig ")
    words = set(_words(whole))
    matching = [sheet for sheet in SHEETS if sheet.words <= words]
    if not matching or words & _OTHER_CHIPS:
        return None
    sheet = max(matching, key=lambda one: len(one.words))
    share = re.match(r"(\d+)g\.(\d+)gb", instance)
    if share is None:
        return sheet
    parts = 4 if sheet.name in _QUARTERS else 7
    memory = float(share[2]) * 1e9
    return dataclasses.replace(
        sheet,
        name=f"{sheet.name} MIG {share[0]}",
        flops=sheet.flops * int(share[1]) / parts,
        memory=memory,
        bandwidth=sheet.bandwidth * min(1.0, memory / sheet.memory),
    )


def sheets_named(text: str) -> tuple[int, Sheet]:
    """Return number and sheet of a user's GPUs: "4090", "8xH100", "2 x 24GB".

    Raises UserError for an unknown name.
    """
    parts = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?(.+?)\s*", text.strip().lower())
    count = int(parts[1] or 1) if parts is not None else 1
    name = parts[2] if parts is not None else ""
    size = re.fullmatch(r"(\d+)\s*gi?b?", name)
    if size is not None:
        return count, _of_size(int(size[1]))
    sheet = sheet_of(name)
    if sheet is not None:
        return count, sheet
    if _NO_BF16 & set(_words(name)):
        newer = "choose compute capability 8.0 or later, such as A10, A100 or RTX3090"
        raise UserError(f"gpu {text!r} computes no bf16, and plans are for bf16; {newer}")
    known = ", ".join(one.name for one in SHEETS)
    raise UserError(f"gpu {text!r} is unknown; choose one of {known}, or a size such as 1x24GB")


def _of_size(gigabytes: int) -> Sheet:
    """Return a sheet for any GPU of a size: the nearest one's speed, with the requested memory."""
    if not gigabytes:
        raise UserError("a GPU of 0 GB holds nothing; give its memory, such as 1x24GB")
    memory = gigabytes * 1e9
    usual_first = sorted(SHEETS, key=lambda one: one.name not in _USUAL)
    nearest = min(usual_first, key=lambda one: abs(math.log(one.memory / memory)))
    return dataclasses.replace(nearest, name=f"{gigabytes}GB (as {nearest.name})", memory=memory)
