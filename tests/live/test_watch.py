"""`ttrl watch`: its frames, at any size, of old and growing runs; and a real terminal."""

import io
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tarfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.many_runs import make_run, make_runs, sample, write_samples

from ttrl.cli import main
from ttrl.errors import UserError
from ttrl.live.essentials import Essentials, SampleText, essentials
from ttrl.live.frame import Size, run_frame, words
from ttrl.live.watch import Watch, watch
from ttrl.monitoring.finding import Finding
from ttrl.monitoring.followed_runs import FollowedRun, State, UnderWay
from ttrl.run_folder.folder import RunFolder

ARCHIVES = sorted((Path(__file__).parents[1] / "surface/old_runs").glob("*.tar.xz"))
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x00\u202e[bold]red[/bold]:smile:"
SIZES = (Size(40, 10), Size(80, 24), Size(120, 50), Size(200, 60))


def text_of(frame, size: Size) -> str:
    """Return what a terminal of that size gets, without styles."""
    console = Console(file=io.StringIO(), width=size.width, color_system=None)
    console.print(frame)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(folder: Path, size: Size = SIZES[1], now: float | None = None) -> str:
    watched = Watch([folder], clock=lambda: time.time() if now is None else now)
    return text_of(watched.frame(size), size)


def check_size(text: str, size: Size) -> None:
    lines = text.split("\n")
    assert max(map(len, lines)) <= size.width
    assert len(lines) - 1 <= max(size.height, 24), text  # a smaller terminal cuts it


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def test_old_runs_are_shown(archive: Path, size: Size, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    text = shown(tmp_path / "run", size)
    check_size(text, size)
    assert "finished  iteration 2 of 2" in text
    for word in ("held-out reward 0", "reward 0.07", "entropy", "cut off"):
        assert word in text


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_run_fits_into_any_terminal(size: Size, tmp_path: Path) -> None:
    text = shown(make_run(tmp_path / "run", iterations=40), size)
    check_size(text, size)
    assert "run  finished  iteration 40 of 40" in text
    assert "held-out exact match" in text
    for name in ("loss", "KL", "entropy", "tokens/s", "dead time"):
        assert name in text
    assert ("The sum is" in text) == (size.height > 10)


def test_a_growing_run_is_followed(tmp_path: Path) -> None:
    """Through its phases, with their progress and the time left."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "iterations").mkdir()
    assert "No iteration is finished yet" in shown(folder)
    shutil.rmtree(folder)
    make_run(folder, iterations=3, planned=5)
    config = folder / "config.yaml"
    config.write_text(config.read_text() + "tasks_per_iteration: 4\n")
    run = FollowedRun("run", folder)
    with RunFolder(folder).locked():
        there = folder / "iterations" / "0004"
        (there / "done").mkdir(parents=True)
        partial = there / "rollouts.partial.jsonl"
        group = [json.loads(line) for line in (folder / "iterations/0003/rollouts.jsonl").open()]
        group[-1]["text"] = "the newest answer"
        partial.write_text(json.dumps({"position": 0, "samples": group}) + "\n")
        now = time.time() + 3
        (under_way,) = essentials(run).state.under_way
        assert (under_way.count, under_way.of) == (1, 4)
        assert under_way.left(under_way.since + 2) == pytest.approx(6)
        text = shown(folder, now=now)
        assert "running  iteration 3 of 5" in text and "4: sampling" in text
        assert "1 of 4 tasks" in text and "the newest answer" in text
        with partial.open("a") as file:
            file.write(json.dumps({"position": 2, "samples": group}) + "\n" + '{"position": 3, ')
        assert essentials(run).state.under_way[0].count == 2
        write_samples(folder, 4)
        partial.unlink()
        for name in ("rollouts", "pack"):
            (there / "done" / f"{name}.json").write_text("{}")
        text = shown(folder, now=time.time())
        assert "4: training" in text and "about 5.0 s left" in text
        assert "the newest answer" not in text
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "reward": 0.125}\n')
    assert "iteration 4 of 5" in shown(folder) and "reward 0.125" in shown(folder)


@pytest.mark.parametrize("name", ["run", "a_long_name_" * 10], ids=["short", "long"])
def test_a_damaged_run_is_shown_with_its_problem(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / name, iterations=2)
    path = folder / "metrics.jsonl"
    path.write_text("{damaged\n" + path.read_text())
    # Lines are wrapped, at other places with another path.
    words_shown = " ".join(shown(folder).split())
    assert "damaged" in words_shown and "line 1: not JSON" in words_shown


def test_several_runs_make_a_table_and_keys_open_one(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", runs=12, iterations=5)
    size = Size(80, 10)
    watched = Watch([tmp_path / "runs"])
    text = text_of(watched.frame(size), size)
    check_size(text, size)
    assert "held out" in text and "1 to 7 of 12 runs" in text
    for _ in range(40):
        assert watched.press("down")
    assert "of 12 runs" in text_of(watched.frame(size, is_live=True), size)
    (chosen,) = re.findall("^› (.*?) ", text_of(watched.frame(size, is_live=True), size), re.M)
    watched.press("open")
    assert text_of(watched.frame(size), size).startswith(chosen)
    watched.press("back")
    for _ in range(40):
        watched.press("up")
    watched.press("open")
    assert not text_of(watched.frame(size), size).startswith(chosen)
    watched.press("")
    assert not watched.press("quit")


def acting(text: str) -> set[str]:
    """Return the characters with an effect on a terminal, other than newlines."""
    return set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_untrusted_text_cannot_act_on_the_terminal(size: Size, tmp_path: Path) -> None:
    """Names, tasks, answers, metrics, errors, settings and findings: all may come from elsewhere."""
    folder = make_run(tmp_path / ("run" + EVIL.replace("/", "").replace("\x00", "")), iterations=4)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for row in rows:
        row["validation"] = {EVIL: 0.5}
        row["validation_intervals"] = {EVIL: [0.4, 0.6]}
        row["metrics"] = {EVIL: 0.5}
        row["partial_metrics"] = {EVIL: 3}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"iterations": 4, "model": f"m{EVIL}", "validation_metric": EVIL}
    (folder / "config.yaml").write_text(json.dumps(config))
    one = {**sample("task", 0, __import__("random").Random(0)), "text": EVIL * 3, "task_id": EVIL}
    one |= {"metrics": {EVIL: 1.0}, "messages": [{"role": "user", "content": EVIL}], "error": EVIL}
    path = folder / "iterations" / "0004" / "rollouts.jsonl"
    path.write_text(json.dumps(one) + "\n")
    text = shown(folder, size)
    assert "\\x1b]0;owned" in text
    assert acting(text) == set()
    found = [Finding(EVIL, "warn", EVIL, EVIL)]
    under_way = (UnderWay(1, EVIL, (), 0.0, 3.0, 1, 3),)
    every = Essentials(
        EVIL,
        State(EVIL, under_way, 5.0, 0.0),
        model=EVIL,
        summary=EVIL,
        findings=found,
        sample=SampleText(EVIL, EVIL, [EVIL]),
    )
    for one in (every, Essentials(EVIL, State("damaged"), EVIL)):
        assert acting(text_of(run_frame(one, size, 10.0), size)) == set()
    text = shown(folder.parent, size)
    assert acting(text) == set()


@given(text=st.text(st.characters(codec=None), max_size=80))
def test_words_never_act(text: str) -> None:
    assert acting(words(text, "", Size(80, 24)).plain) == set()
    assert words(text, "", Size(80, 24, unicode=False)).plain.isascii()


def test_wide_letters_stay_within_the_terminal(tmp_path: Path) -> None:
    """A Chinese letter takes two columns, a combining accent none."""
    folder = make_run(tmp_path / "run", iterations=2)
    path = folder / "iterations" / "0002" / "rollouts.jsonl"
    one = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**one, "text": "数" * 150 + "e\u0301" * 90}) + "\n")
    lines = [line for line in shown(folder, Size(80, 40)).splitlines() if "数" in line]
    assert [len(line.rstrip()) for line in lines][:3] == [40, 40, 40]


def test_outside_a_terminal_one_frame_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", iterations=3)
    assert main(["watch", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert text.count("finished") == 1 and "\x1b" not in text
    with pytest.raises(UserError, match="no such folder"):
        watch([tmp_path / "missing"])
    assert main(["watch", "s3://bucket/run"]) == 2
    assert "reads folders" in capsys.readouterr().err


def test_a_terminal_without_utf8_gets_ascii(tmp_path: Path) -> None:
    make_run(tmp_path / "run", iterations=3)
    command = [sys.executable, "-m", "ttrl.cli", "watch", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"entropy" in done.stdout and done.stdout.decode("ascii").count("*") > 5


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal of 80 columns and 24 lines: our end, and the program's."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(ours: int, mark: bytes, seen: bytes = b"") -> bytes:
    end = time.monotonic() + 60
    while mark not in seen:
        assert time.monotonic() < end, seen
        if select.select([ours], [], [], 0.2)[0]:
            seen += os.read(ours, 65536)
    return seen


@pytest.mark.parametrize("key", [b"q", b"\x03", b""], ids=["q", "Ctrl-C", "SIGTERM"])
def test_a_real_terminal_is_followed_and_left_as_it_was(
    terminal: tuple[int, int], key: bytes, tmp_path: Path
) -> None:
    ours, theirs = terminal
    folder = make_run(tmp_path / "run", iterations=3, planned=9)
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "ttrl.cli", "watch", str(folder)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )
    seen = read_until(ours, b"q quit")
    assert b"\x1b[?1049h" in seen and b"iteration 3 of 9" in seen
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "reward": 0.125}\n')
    seen = read_until(ours, b"iteration 4 of 9")
    if key:
        os.write(ours, key)
    else:
        process.terminate()
    seen = read_until(ours, b"\x1b[?1049l")
    if key:  # the last frame stays
        read_until(ours, b"iteration 4 of 9", seen.rpartition(b"\x1b[?1049l")[2])
    assert process.wait(30) == (0 if key else 143)
    assert termios.tcgetattr(theirs) == before
