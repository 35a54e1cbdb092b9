"""Stockfish, or another UCI engine, as the judge of chess moves without known points. Optional.

Debian and Ubuntu have it: `apt install stockfish`. It runs as a child of the grading process, and
ends with it (its input ends). A file keeps its judgements: a repeated move costs nothing, in this
run and the next.
"""

import atexit
import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ttrl.errors import GraderError, TaskError

try:
    import chess
    import chess.engine
except ImportError as error:
    raise TaskError(
        f"a judge of chess moves needs the package chess: pip install 'ttrl[tasks]' ({error})"
    ) from None

_DEBIAN = "/usr/games/stockfish"  # not on root's path

_TABLE = (
    "CREATE TABLE IF NOT EXISTS points (engine TEXT, fen TEXT, move TEXT, points REAL, PRIMARY "
    "KEY (engine, fen, move))"
)
_engines: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Stockfish:
    """Points of a legal move: 1 − (expected score of the position − expected score after the move),
    both for the side to move, from the engine's evaluations by lichess's model (0 lost, 1 won). So
    a move throwing a won game away earns 0, the best one 1, and in a lost position all are nearly
    as good.

    path: the engine; by default the installed one. nodes: of each of the two searches; one thread,
    a new game for each, so the points are the same in every run of the same engine. cache: a file
    (SQLite) for the points; None: they are not kept.

    One search at a time for each process. Raises TaskError when there is no engine.
    """

    longest_seconds: ClassVar[float] = 20.0
    """Of one analysis, for any number of nodes."""
    late_seconds: ClassVar[float] = 10.0
    """After that, before an engine without an answer is ended."""
    path: str = "stockfish"
    nodes: int = 20_000
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if type(self.nodes) is not int or self.nodes < 1:
            raise TaskError(f"nodes is {self.nodes!r}; give a whole number of at least 1")
        self._program()

    def __call__(self, fen: str, move: str) -> float:
        """Return the points of a move. Raises GraderError when the engine fails twice in a row."""
        program = os.path.realpath(self._program())
        status = os.stat(program)  # another version in its place is another engine
        key = (f"{program} {status.st_size} {status.st_mtime_ns} {self.nodes}", fen, move)
        with self._kept() as kept:
            row = kept.execute(
                "SELECT points FROM points WHERE engine = ? AND fen = ? AND move = ?", key
            ).fetchone()
        if row is not None:
            return float(row[0])
        points = self._judge(chess.Board(fen), chess.Move.from_uci(move))
        with self._kept() as kept:
            kept.execute("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?)", (*key, points))
        return points

    def _program(self) -> str:
        found = shutil.which(self.path) or (
            _DEBIAN if self.path == "stockfish" and os.access(_DEBIAN, os.X_OK) else None
        )
        if found is None:
            raise TaskError(
                f"no engine {self.path!r}: install it (Debian, Ubuntu: apt install stockfish), "
                "or give its path"
            )
        return found

    @contextlib.contextmanager
    def _kept(self) -> Iterator[sqlite3.Connection]:
        path = self.cache or ":memory:"  # without a file, nothing outlives the block
        try:
            with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection, connection:
                connection.execute(_TABLE)
                yield connection
        except sqlite3.Error as error:
            raise GraderError(f"the judge's cache {os.fspath(path)}: {error}") from error

    def _judge(self, board: "chess.Board", move: "chess.Move") -> float:
        program = self._program()
        with _lock:
            for attempt in range(2):
                try:
                    engine = _engine(program)
                    best, given = (self._expected(engine, board, moves) for moves in (None, [move]))
                    return min(1.0, max(0.0, 1.0 - (best - given)))
                except (chess.engine.EngineError, TimeoutError, OSError) as error:
                    broken = _engines.pop((os.getpid(), program), None)
                    if broken is not None:
                        # It may only have been too slow: its search must not overlap the next one.
                        broken.close()
                    if attempt:
                        raise GraderError(
                            f"the engine {program} failed twice: {type(error).__name__}: {error}"
                        ) from error
        raise AssertionError("unreachable")

    def _expected(
        self, engine: Any, board: "chess.Board", moves: "list[chess.Move] | None"
    ) -> float:
        """Return the expected score of the side to move, of all moves or of these."""
        limit = chess.engine.Limit(nodes=self.nodes, time=self.longest_seconds)
        engine.timeout = self.late_seconds
        info = engine.analyse(
            board, limit, root_moves=moves, game=object(), info=chess.engine.INFO_SCORE
        )
        if "score" not in info:
            raise chess.engine.EngineError("it returned no score")
        return float(info["score"].relative.wdl(model="lichess", ply=board.ply()).expectation())


def _engine(program: str) -> Any:
    """Return the engine of this process. A fork of a process with one starts its own."""
    key = (os.getpid(), program)
    if key not in _engines:
        engine = chess.engine.SimpleEngine.popen_uci(program)
        options = {
            name: value for name, value in (("Threads", 1), ("Hash", 16)) if name in engine.options
        }
        engine.configure(options)
        _engines[key] = engine
        atexit.register(_quit, key)
    return _engines[key]


def _quit(key: tuple[int, str]) -> None:
    engine = _engines.pop(key, None)
    if engine is not None and key[0] == os.getpid():
        with contextlib.suppress(chess.engine.EngineError, TimeoutError):
            engine.quit()
