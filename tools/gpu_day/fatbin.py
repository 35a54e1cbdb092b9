"""Remove the code of other GPUs from a CUDA library, so that it compresses to what one GPU needs.

nvcc stores a kernel once for every architecture it was asked for. The copies lie in the ELF section
`.nv_fatbin` as a row of containers, one for each source file:

    container   u32 magic, u16 version, u16 header bytes, u64 bytes of entries; then the entries
    entry       u16 kind (1 PTX, 2 machine code), u16, u32 header bytes, u64 bytes of code, u64,
                u32 architecture (90 for sm_90 and sm_90a) at byte 28; then the code

The driver finds a container by its address and takes the entry that fits best. So containers stay
where they are: the entries to keep move to the front, the container gets shorter, and zeros follow.
The file keeps its size and its layout; the zeros vanish when it is compressed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE_AT = 28
_PTX = 1
_MACHINE_CODE = 2


@dataclass(frozen=True)
class Entry:
    """Name the code of one architecture in a container."""

    kind: int
    architecture: int
    start: int
    """Where its header starts, in the file."""
    code: int
    """Where its code starts."""
    end: int


def section(library: bytes, name: str) -> tuple[int, int]:
    """Return where a section of an ELF file starts and ends; (0, 0) if there is none."""
    if library[:4] != b"\x7fELF":
        return 0, 0
    (table,) = struct.unpack_from("<Q", library, 0x28)
    count, names = struct.unpack_from("<HH", library, 0x3C)
    (texts,) = struct.unpack_from("<Q", library, table + 64 * names + 24)
    for number in range(count):
        at = table + 64 * number
        (text,) = struct.unpack_from("<I", library, at)
        start, size = struct.unpack_from("<QQ", library, at + 24)
        end = library.index(b"\0", texts + text)
        if library[texts + text : end] == name.encode():
            return start, start + size
    return 0, 0


def containers(library: bytes) -> Iterator[tuple[int, int, list[Entry]]]:
    """Yield each container: where it starts, where its entries start, and the entries."""
    at, end = section(library, ".nv_fatbin")
    while at < end:
        magic, _, header, size = _CONTAINER.unpack_from(library, at)
        if magic != _MAGIC:  # alignment between two containers
            at += 8
            continue
        first = at + header
        last = first + size
        entries = []
        place = first
        while place < last:
            kind, _, before, code = _ENTRY.unpack_from(library, place)
            (architecture,) = struct.unpack_from("<I", library, place + _ARCHITECTURE_AT)
            after = place + before + code
            entries.append(Entry(kind, architecture, place, place + before, after))
            place = after
        assert place == last, f"the container at byte {at} ends in the middle of an entry"
        yield at, first, entries
        at = last


def wanted(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return the entries that a GPU uses: its own machine code, else the newest PTX that fits."""
    code = [entry for entry in entries if entry.kind == _MACHINE_CODE]
    own = [entry for entry in code if entry.architecture == architecture]
    if own:
        return own
    sources = [e for e in entries if e.kind == _PTX and e.architecture <= architecture]
    return [max(sources, key=lambda entry: entry.architecture)] if sources else []


def kept(library: bytes, entries: list[Entry], architecture: int) -> bytes:
    """Return what stays of a container's entries.

    Where nothing fits the GPU, the smallest entry stays, with zeros for its code: the driver reads
    its header, and says of the kernels that they are for another GPU.
    """
    own = wanted(entries, architecture)
    if own or not entries:
        return b"".join(library[entry.start : entry.end] for entry in own)
    smallest = min(entries, key=lambda entry: entry.end - entry.start)
    header = library[smallest.start : smallest.code]
    return header.ljust(smallest.end - smallest.start, b"\0")


def strip(library: bytes, architecture: int) -> bytes:
    """Return the library with the code of one GPU architecture, such as 90, and of no other."""
    stripped = bytearray(library)
    for start, first, entries in containers(library):
        stays = kept(library, entries, architecture)
        end = entries[-1].end if entries else first
        stripped[first:end] = stays.ljust(end - first, b"\0")
        struct.pack_into("<Q", stripped, start + 8, len(stays))
    return bytes(stripped)
