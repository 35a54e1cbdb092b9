"""Files that are there whole or not at all: real kills, a real full disk, real torn lines."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import os_calls

from ttrl.errors import StorageError
from ttrl.system import files
from ttrl.system.processes import RECORD_SUFFIX, reap_leftovers


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_file_replaces_the_old_content_at_the_end_of_the_block(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.txt"
    files.write_text(target, "old")
    with files.atomic_file(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert names(target.parent) == ["a.txt"]
    assert target.stat().st_mode & 0o777 == 0o644


def test_an_exception_in_the_block_leaves_the_old_file_and_no_leftover(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    files.write_text(target, "old")
    with pytest.raises(KeyError), files.atomic_file(target) as temporary:
        temporary.write_text("half")
        raise KeyError("stop")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_atomic_folder_replaces_a_folder_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    for content in ("one", "two"):
        with files.atomic_folder(target) as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub" / content).write_text(content)
    assert names(tmp_path) == ["checkpoint"]
    assert names(target / "sub") == ["two"]  # nothing of the first one is mixed in


def test_an_exception_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with files.atomic_folder(target) as temporary:
        (temporary / "a").write_text("old")
    with pytest.raises(RuntimeError), files.atomic_folder(target) as temporary:
        (temporary / "a").write_text("new")
        raise RuntimeError("stop")
    assert (target / "a").read_text() == "old"
    assert names(tmp_path) == ["checkpoint"]


def test_a_killed_writer_leaves_the_old_file_and_its_leftover_can_be_removed(
    tmp_path: Path,
) -> None:
    target = tmp_path / "a.txt"
    files.write_text(target, "old")
    script = textwrap.dedent(
        f"""
        import os, signal
        from ttrl.system.files import atomic_file
        with atomic_file({str(target)!r}) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert target.read_text() == "old"
    (leftover,) = files.remove_leftovers(tmp_path)
    assert leftover.name.startswith(files.TEMPORARY_PREFIX)
    assert names(tmp_path) == ["a.txt"]


def test_remove_leftovers_takes_folders_too_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "iterations" / (files.TEMPORARY_PREFIX + "x-checkpoint") / "deep").mkdir(
        parents=True
    )
    (tmp_path / "iterations" / "0001").mkdir()
    removed = files.remove_leftovers(tmp_path)
    assert len(removed) == 1
    assert names(tmp_path / "iterations") == ["0001"]


def test_leftovers_of_a_name_are_not_what_others_write_beside_it(tmp_path: Path) -> None:
    ours, old, theirs = (
        files.TEMPORARY_PREFIX + rest
        for rest in ("x-checkpoint", "y-old-checkpoint", "x-validation.jsonl")
    )
    for place in (ours, old, "done"):
        (tmp_path / place).mkdir()
    for place in (theirs, f"done/{theirs}"):
        (tmp_path / place).touch()
    assert {path.name for path in files.remove_leftovers(tmp_path, "checkpoint")} == {ours, old}
    assert names(tmp_path) == sorted([theirs, "done"]) and names(tmp_path / "done") == [theirs]


def test_who_looks_through_a_folder_passes_over_what_vanishes_meanwhile(tmp_path: Path) -> None:
    """Others rename and remove what is theirs: a killed run's last processes, the pruning of
    checkpoints.
    """
    (tmp_path / "gone").mkdir()
    (tmp_path / "kept" / (files.TEMPORARY_PREFIX + "x")).mkdir(parents=True)
    (tmp_path / "kept" / ("a.log" + RECORD_SUFFIX)).write_text("{}")

    def vanish(path: object, *_: object) -> None:
        path = Path(str(path))
        if path.name == "gone" and path.exists():
            path.rmdir()

    with os_calls.before("os.scandir", vanish):
        left = files.remove_leftovers(tmp_path)
        assert [path.name for path in left] == [files.TEMPORARY_PREFIX + "x"]
        (tmp_path / "gone").mkdir()
        assert reap_leftovers(tmp_path) == []
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("code", "word"), [(errno.ENOSPC, "make room"), (errno.EACCES, "Permission denied")]
)
def test_what_the_system_refuses_becomes_a_storage_error_with_the_way_out(
    tmp_path: Path, code: int, word: str
) -> None:
    target = tmp_path / "a.txt"
    files.write_text(target, "old")
    with (
        os_calls.refused("os.rename", code, target),
        pytest.raises(StorageError, match=word) as caught,
    ):
        files.write_text(target, "new")
    assert caught.value.errno == code
    assert str(target) in str(caught.value)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


FULL_DISK = """
import sys
from pathlib import Path
import numpy
from safetensors.numpy import save_file
from ttrl.errors import StorageError
from ttrl.system.files import append_jsonl, atomic_folder, read_jsonl, write_text
root = Path(sys.argv[1])
write_text(root / "kept", "old")
append_jsonl(root / "log.jsonl", {"n": 1})
for write in (
    lambda: write_text(root / "kept", "x" * 300_000),
    lambda: append_jsonl(root / "log.jsonl", {"n": "x" * 300_000}),
):
    try:
        write()
    except StorageError as error:
        assert "make room" in str(error) and "free there" in str(error), error
    else:
        sys.exit("a full disk was not noticed")
try:
    with atomic_folder(root / "checkpoint") as temporary:
        (temporary / "weights").write_bytes(b"x" * 300_000)
except StorageError:
    pass
else:
    sys.exit("a full disk was not noticed")
try:
    with atomic_folder(root / "checkpoint") as temporary:
        save_file({"weight": numpy.zeros(100_000)}, temporary / "model.safetensors")
except StorageError as error:
    assert "make room" in str(error), error
else:
    sys.exit("a full disk was not noticed by safetensors")
assert (root / "kept").read_text() == "old"
assert read_jsonl(root / "log.jsonl") == [{"n": 1}]
append_jsonl(root / "log.jsonl", {"n": 2})
assert read_jsonl(root / "log.jsonl") == [{"n": 1}, {"n": 2}]
assert sorted(path.name for path in root.iterdir()) == ["kept", "log.jsonl"], list(root.iterdir())
print("survived")
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare for a private small file system")
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = (
        f'mount -t tmpfs -o size=128k tmpfs "{disk}" || exit 77; exec "{sys.executable}" '
        f'"{script}" "{disk}"'
    )
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no private file system here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "survived"


def test_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    files.write_json(target, {"a": 1.5, "ä": [None]})
    assert json.loads(target.read_text()) == {"a": 1.5, "ä": [None]}
    with pytest.raises(ValueError):
        files.write_json(target, {"a": float("nan")})
    assert json.loads(target.read_text())["a"] == 1.5


def test_every_torn_last_line_is_dropped_and_the_next_append_repairs_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    whole = b'{"n": 1}\n{"n": 2, "text": "\xc3\xa4"}\n'
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole)):
        path.write_bytes(whole[:cut])
        known = [{"n": 1}, {"n": 2, "text": "ä"}] if cut == len(whole) - 1 else [{"n": 1}]
        # A whole object that only lacks its newline may be read.
        assert files.read_jsonl(path) == known, cut
        files.append_jsonl(path, {"n": 3})
        assert files.read_jsonl(path)[-1] == {"n": 3}
        assert files.read_jsonl(path)[0] == {"n": 1}


def test_a_damaged_last_line_is_an_error_where_nothing_appends(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"n": 1}\n{"n": ')
    assert files.read_jsonl(path) == [{"n": 1}]
    with pytest.raises(ValueError, match="line 2"):
        files.read_jsonl(path, appended=False)
    path.write_text('{"n": 1}\n{"n": 2}')
    assert files.read_jsonl(path, appended=False) == [{"n": 1}, {"n": 2}]


def test_damage_before_the_end_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"n": 1}\n{"n": \n{"n": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        files.read_jsonl(path)


def test_a_repeated_key_replaces_the_earlier_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    files.write_jsonl(path, [{"n": 1, "v": "a"}, {"n": 2, "v": "b"}])
    files.append_jsonl(path, {"n": 1, "v": "c"})
    assert files.read_jsonl(path, key="n") == [{"n": 1, "v": "c"}, {"n": 2, "v": "b"}]
    assert files.read_jsonl(tmp_path / "none.jsonl") == []


def test_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")  # the standard's own example
    assert (
        files.digest(tmp_path / "a")
        == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_a_line_that_lost_only_its_newline_stays(tmp_path):
    """What `read_jsonl` returned before an append must still be there after it."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert files.read_jsonl(path) == [{"step": 1}, {"step": 2}]
    files.append_jsonl(path, {"step": 3})
    assert files.read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_compiled_code_is_not_loaded_from_where_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own place is /tmp/torchinductor_USER, which anybody can have made first."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.compile_cache(tmp_path / "private") == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "ttrl" / "inductor")
    }
    (tmp_path / "ttrl").chmod(0o777)
    assert files.compile_cache(tmp_path / "private") == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "private" / "inductor")
    }
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/own/choice")
    assert files.compile_cache(tmp_path) == {}
