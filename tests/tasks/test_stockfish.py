"""A judge over UCI: its points, its cache, its failures; with an engine of our own, and with
Stockfish where it is installed.
"""

import os
import pickle
import re
import sys
import time

import pytest

from ttrl.errors import GraderError, TaskError

chess = pytest.importorskip("chess")

from ttrl.tasks import stockfish  # noqa: E402 - needs chess
from ttrl.tasks.chess_moves import ChessGrader  # noqa: E402
from ttrl.tasks.stockfish import Stockfish  # noqa: E402

FEN = chess.STARTING_FEN

ENGINE = """#!{python} -IS
import os, sys, time
log = open({log!r}, "a")
for line in sys.stdin:
    words = line.split()
    if words[0] == "uci":
        log.write(f"pid {{os.getpid()}}\\n")
        log.flush()
        print("option name Threads type spin default 1 min 1 max 4")
        print("uciok")
    elif words[0] == "isready":
        print("readyok")
    elif words[0] == "go":
        log.write(line)
        log.flush()
        move = words[-1] if "searchmoves" in words else "e2e4"
        if {dies!r} in line:
            sys.exit(1)
        if {hangs!r} in line:
            time.sleep(600)
        print(f"info depth 1 score {{ {scores!r}.get(move, 'cp 50') }} pv {{move}}")
        print("bestmove", move)
    elif words[0] == "quit":
        break
    sys.stdout.flush()
"""


@pytest.fixture
def engine(tmp_path):
    def make(scores, dies="never", hangs="never"):
        path = tmp_path / "engine"
        path.write_text(
            ENGINE.format(
                python=sys.executable,
                log=str(tmp_path / "log"),
                scores=scores,
                dies=dies,
                hangs=hangs,
            )
        )
        path.chmod(0o755)
        return str(path)

    yield make
    for key in list(stockfish._engines):
        stockfish._quit(key)


def test_points_and_cache(engine, tmp_path, reply):
    path = engine({"e2e4": "cp 50", "d2d4": "cp 40", "f2f3": "cp -200", "g2g4": "mate -2"})
    judge = Stockfish(path, nodes=10, cache=tmp_path / "cache.sqlite")
    points = {move: judge(FEN, move) for move in ("e2e4", "d2d4", "f2f3", "g2g4")}
    assert points["e2e4"] == 1.0 > points["d2d4"] > 0.97 > points["f2f3"] > points["g2g4"]
    # Lichess's model, for the best move; the mate is worth nothing.
    winning = 1 / (1 + 2.718281828459045 ** (-0.00368208 * 50))
    assert points["g2g4"] == pytest.approx(1 - winning, abs=0.002)
    asked = (tmp_path / "log").read_text().count("go nodes 10")
    assert asked == 8
    assert {
        move: Stockfish(path, 10, tmp_path / "cache.sqlite")(FEN, move) for move in points
    } == points
    assert (tmp_path / "log").read_text().count("go") == asked
    grader = pickle.loads(pickle.dumps(ChessGrader(FEN, ("e2e4",), judge=judge)))
    assert [grader(reply(move))[0] for move in ("e2e4", "f2f3", "e2e5")] == [
        1.0,
        points["f2f3"],
        0.0,
    ]
    Stockfish(path, 11, tmp_path / "cache.sqlite")(FEN, "e2e4")  # other nodes: asked again
    assert (tmp_path / "log").read_text().count("go") == asked + 2


def test_an_engine_that_dies(engine):
    judge = Stockfish(engine({}, dies="searchmoves"), nodes=10)
    with pytest.raises(GraderError, match="failed twice: EngineTerminatedError"):
        judge(FEN, "e2e4")


def test_an_engine_that_is_too_slow_is_ended(engine, tmp_path):
    """Or it would search on beside the next one."""

    class Hasty(Stockfish):
        longest_seconds = late_seconds = 0.1

    with pytest.raises(GraderError, match="failed twice: TimeoutError"):
        Hasty(engine({}, hangs="go"), nodes=10)(FEN, "e2e4")
    pids = re.findall(r"pid (\d+)", (tmp_path / "log").read_text())
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(pids) == 2


def test_refusals(tmp_path, engine):
    with pytest.raises(TaskError, match="no engine '/no/such/engine': install it"):
        Stockfish("/no/such/engine")
    path = engine({})
    with pytest.raises(TaskError, match="nodes is 0"):
        Stockfish(path, nodes=0)
    (tmp_path / "cache").write_text("no database, but long enough to be looked at" * 100)
    with pytest.raises(GraderError, match=r"the judge's cache .*: file is not a database"):
        Stockfish(path, cache=tmp_path / "cache")(FEN, "e2e4")


def test_the_real_one():
    try:
        judge = Stockfish(nodes=5000)
    except TaskError:
        pytest.skip("Stockfish is not installed")
    mate = "6k1/5ppp/8/8/8/8/5PPP/1R1R2K1 w - - 0 1"
    assert judge(mate, "b1b8") == 1.0
    assert (
        judge("4k3/8/8/3q4/8/8/8/3QK3 w - - 0 1", "d1d5")
        > 0.9
        > judge("4k3/8/8/3q4/8/8/8/3QK3 w - - 0 1", "d1h5")
    )
