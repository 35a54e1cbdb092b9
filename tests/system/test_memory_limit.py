"""How much memory a process may take, from what Linux says of machine and container."""

from pathlib import Path

import pytest

from ttrl.system.memory_limit import memory_bytes

KB = 1024


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       64000 kB\nMemFree:         1000 kB\nMemAvailable:   48000 kB\n"
    )
    return path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (64000 * KB, 48000 * KB)),
        ({"memory.max": "max", "memory.current": "1000"}, (64000 * KB, 48000 * KB)),
        (
            {"memory.max": str(10000 * KB), "memory.current": str(7000 * KB)},
            (10000 * KB, 3000 * KB),
        ),
        # Pages of files, such as mapped models, go where memory is needed; those of programs do
        # not.
        (
            {
                "memory.max": str(10000 * KB),
                "memory.current": str(9000 * KB),
                "memory.stat": f"anon {2000 * KB}\nactive_file {1500 * KB}\ninactive_file "
                f"{4000 * KB}\nshmem 5",
            },
            (10000 * KB, 6500 * KB),
        ),
        # Others fill the machine.
        ({"memory.max": str(60000 * KB), "memory.current": str(KB)}, (60000 * KB, 48000 * KB)),
    ],
    ids=str,
)
def test_the_container_counts_where_it_is_smaller(files, expected, meminfo, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert memory_bytes(meminfo, tmp_path) == expected


def test_without_proc_it_is_the_machines(tmp_path):
    total, free = memory_bytes(tmp_path / "none", tmp_path)
    assert total == free > 2**28
