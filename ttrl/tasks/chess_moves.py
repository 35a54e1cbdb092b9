"""Chess: find the best move of a position. Needs the package chess (python-chess), of the `tasks`
extra.

Positions come from your own files: lichess puzzles, test suites in EPD, or rows with the best moves
and any known points of others.
"""

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ttrl.errors import TaskError
from ttrl.tasks.answers import (
    after_thinking,
    ascii_lower,
    find_after,
    find_boxed,
    find_tagged,
    last_line,
    latest,
    reply_text,
)
from ttrl.tasks.datasets import (
    Row,
    RowError,
    Rows,
    Source,
    check_name,
    check_share,
    load_rows,
    local_path,
    read_text,
    select,
    text_field,
)
from ttrl.tasks.task import Choice, Example, Task, question, solved
from ttrl.tasks.words import as_typed
from ttrl.text import present, short

try:
    import chess
except ImportError as error:
    raise TaskError(
        f"chess tasks need the package chess: pip install 'ttrl[tasks]' ({error})"
    ) from None

Style = Literal["plain", "P"]

_PLAIN = (
    "Position (FEN): {fen}\n{side} to move. Find the best move. You may think first. End your "
    "reply with the move in "
    "coordinates, such as e2e4 or e7e8q, in <answer> </answer> tags."
)
_ROOKWORLD = re.compile(r"P:\s*(\S+(?: \S+)+)\s+M:\s*(\S.*?)\s+E:\s*(\S.*?)\s+B:\s*(\S+)\s*")
_FIGURES = str.maketrans("♔♕♖♗♘♚♛♜♝♞", "KQRBNKQRBN") | dict.fromkeys(map(ord, "♙♟"), "")
_LONGEST = 200
"""Limit on the characters read of an answer."""


class Judge(Protocol):
    """A judge of legal moves: returns from 0 (loses everything) to 1 (as good as the best)."""

    def __call__(self, fen: str, move: str) -> float: ...


@dataclass(frozen=True)
class Position:
    """best: moves in coordinates (UCI); points: of known moves, from 0 to 1; candidates: moves and
    their evaluations in pawns, expected of a reply in style "P"."""

    id: str
    fen: str
    best: tuple[str, ...]
    points: Mapping[str, float] = field(default_factory=dict)
    candidates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ChessGrader:
    r"""1 for a best move or a mate; else the move's known points, or the judge's; at least
    legal_reward if it is legal. 0 for anything else.

    style "plain": the move is in the last `<answer>` tags or `\boxed{}`, or after the last "best
    move:"; else it is the last line. style "P": it follows the last `B:`. Coordinates (e2e4, e2-e4)
    and algebraic notation (Nf3, O-O) are read.

    With `candidates`, in RookWorld-LM's format: half of the reward is for the move; 0.3 for the
    share of candidates named, of as many as there are; 0.2 for evaluations, each a pawn off earning
    nothing.
    """

    fen: str
    best: tuple[str, ...]
    points: Mapping[str, float] = field(default_factory=dict)
    style: Style = "plain"
    legal_reward: float = 0.0
    judge: Judge | None = None
    candidates: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, choice: Choice) -> tuple[float, dict[str, float]]:
        """Return (reward, {"legal", "best": 0 or 1}); in style "P" also "candidates", the legal
        share of the moves after `M:`, and with known candidates "named" and "evaluated"."""
        board = chess.Board(self.fen)
        text = after_thinking(reply_text(choice))
        metrics = {"legal": 0.0, "best": 0.0} | (
            self._analysis(board, text) if self.style == "P" else {}
        )
        reward = 0.0
        move = read_move(board, _answer(text, self.style))
        if move is not None:
            metrics["legal"], metrics["best"] = 1.0, float(self._is_best(board, move))
            if metrics["best"]:
                reward = 1.0
            else:
                reward = max(self.legal_reward, self._points(move.uci()))
        if "named" in metrics:
            reward = 0.5 * reward + 0.3 * metrics["named"] + 0.2 * metrics["evaluated"]
        return reward, metrics

    def chance(self) -> float:
        """Return the chance of a random legal move being a best one."""
        board = chess.Board(self.fen)
        moves = list(board.legal_moves)
        return sum(self._is_best(board, move) for move in moves) / len(moves)

    def reference(self) -> str:
        if self.style == "plain":
            return f"<answer>{self.best[0]}</answer>"
        analysis = self.candidates or {self.best[0]: 0.0}
        return (
            f"M: {' '.join(analysis)} E: {' '.join(f'{value:g}' for value in analysis.values())} "
            f"B: {self.best[0]}"
        )

    def _is_best(self, board: "chess.Board", move: "chess.Move") -> bool:
        board.push(move)
        mates = board.is_checkmate()
        board.pop()
        return mates or move.uci() in self.best

    def _points(self, move: str) -> float:
        if self.judge is None:
            return self.points.get(move, 0.0)
        return self.judge(self.fen, move)

    def _analysis(self, board: "chess.Board", text: str) -> dict[str, float]:
        moves = _after(text, "M:", "E:", "B:", "\n")
        values = _after(text, "E:", "B:", "\n")
        distinct = list(dict.fromkeys(moves))
        legal = {move.uci() for move in board.legal_moves}
        found = {
            "candidates": sum(move in legal for move in distinct) / len(moves) if moves else 0.0
        }
        if self.candidates:
            named = [move for move in distinct[: len(self.candidates)] if move in self.candidates]
            off = [
                abs(
                    _number(dict(zip(moves, values, strict=False)).get(move))
                    - self.candidates[move]
                )
                for move in named
            ]
            found["named"] = len(named) / len(self.candidates)
            found["evaluated"] = sum(max(0.0, 1.0 - one) for one in off) / len(self.candidates)
        return found


def read_move(board: "chess.Board", text: str) -> "chess.Move | None":
    """Return a text's legal move, in coordinates or algebraic notation; None for anything else."""
    text = as_typed(text.translate(_FIGURES)).replace("\\", "").strip(" \t\r\n*_`\"'.,;:()[]$!?")
    if len(text) > _LONGEST:
        return None
    parts = [part for part in text.split() if not part.rstrip(".").isdigit()]  # 1. e4
    if len(parts) != 1:
        return None
    if not parts[0].startswith("0-0"):
        name = parts[0].lstrip("0123456789.")
    else:
        name = parts[0]
    name = name.rstrip("!?+#")
    coordinates = ascii_lower(name.replace("-", "").replace("x", "").replace("=", ""))
    for candidate in board.legal_moves:
        if candidate.uci() == coordinates and not name.startswith(("O", "0")):
            return candidate
    try:
        move = board.parse_san(name)
    except ValueError:
        return None
    return move or None  # "--" is chess's notation for no move at all


def _answer(text: str, style: Style) -> str:
    if style == "P":
        return next(iter(_after(text, "B:")), "")
    marked = (find_after(text, mark) for mark in ("best move:", "best move is"))
    part = latest(text, find_tagged(text), find_boxed(text), *marked)
    if part is None:
        return last_line(text)
    return part


def _after(text: str, mark: str, *ends: str) -> list[str]:
    """Return the words between the last mark and the first of its ends; none without the mark."""
    start = text.rfind(mark)
    if start >= 0:
        rest = text[start + len(mark) : start + len(mark) + _LONGEST]
    else:
        rest = ""
    for end in ends:
        rest = rest.partition(end)[0]
    return rest.split()


def _number(text: str | None) -> float:
    """Return a text's number, else infinity."""
    if text is not None and re.fullmatch(r"[+-]?\d{1,4}(\.\d{1,4})?", text, re.ASCII):
        return float(text)
    return math.inf


def get_chess_tasks(
    split: Literal["train", "validation", "test"] = "train",
    n: int | None = None,
    seed: int = 0,
    *,
    path: Source,
    style: Style = "plain",
    legal_reward: float = 0.0,
    judge: Judge | None = None,
) -> list[Task]:
    """Return `n` positions (None: all of the split), none twice; in train, the seed decides
    selection and order.

    Of a single file, test is all positions; train and validation are parts of them, one in ten for
    validation, by a hash of the position. path: an `.epd` file with `bm` (and points in `c8` and
    `c9`, as in the Strategic Test Suite); or rows (see `ttrl.tasks.datasets`) with "fen",
    "best_move_uci" (a move or a list) and maybe "points_uci" ({move: 0 to 100}); or lichess's
    puzzle table with "FEN" and "Moves", beginning with the opponent's move. style: "plain", a
    question in words; "P", `P: `, the position and a space, to be continued by `M:` candidates,
    `E:` their values, `B:` the best move, the format of small models trained only on chess
    (RookWorld-LM). Rows with all of that as "text" are read too, and others of the same column
    skipped (its data has two kinds).
    judge: see `ChessGrader`. Raises TaskError.
    """
    check_name("split", split, ("train", "validation", "test"), "chess")
    check_name("style", style, ("plain", "P"), "chess")
    check_share("legal_reward", legal_reward, below_one=True)
    if judge is not None and not callable(judge):
        raise TaskError(f"judge is {short(judge, 80)}; give a function of a FEN and a move")
    source = local_path(path)
    if source.suffix == ".epd":
        positions = read_epd(source)
    else:
        rows = load_rows(path, parse_row, splits=("test",) if split == "test" else ("train",))
        rows = rows.where(lambda row: row is not None)
        positions = Rows(present(rows), rows.places)
    chosen = select(
        positions,
        _key,
        split,
        n,
        seed,
        "chess",
        held_out=split != "test",
        question=lambda position: position.fen,
        answer=lambda position: position.best,
    )
    return [
        Task(
            question(write_prompt(position.fen, style)),
            ChessGrader(
                position.fen,
                position.best,
                position.points,
                style,
                legal_reward,
                judge,
                position.candidates,
            ),
            id=f"chess/{position.id}",
        )
        for position in chosen
    ]


def _key(position: Position) -> str:
    """Return the position without move counters: the same board is the same question."""
    return " ".join(position.fen.split()[:4])


def write_prompt(fen: str, style: Style) -> str:
    if style == "P":
        return f"P: {fen} "
    return _PLAIN.format(fen=fen, side="White" if fen.split()[1] == "w" else "Black")


def read_epd(path: Path) -> Rows[Position]:
    """Read every position of a test suite. Raises TaskError, naming the line."""
    positions = []
    places = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                positions.append(parse_epd(line, f"{path.stem}-{number}"))
            except (RowError, ValueError) as error:
                raise TaskError(f"{path}, line {number}: {error}") from None
            places.append(f"{path}, line {number}")
    if not positions:
        raise TaskError(f"{path}: no positions")
    return Rows(positions, places)


def parse_epd(line: str, name: str) -> Position:
    """Read one line of EPD. Raises ValueError."""
    board, operations = chess.Board.from_epd(line)
    best = operations.get("bm")
    if not isinstance(best, list) or not best:
        raise RowError("no bm (best move); add one")
    points: dict[str, float] = {}
    if "c8" in operations and "c9" in operations:
        values = str(operations["c8"]).split()
        moves = str(operations["c9"]).split()
        points = _points(dict(zip(moves, map(int, values), strict=True)))
    return _position(
        str(operations.get("id", name)), board.fen(), [move.uci() for move in best], points
    )


def legal_move_examples(
    n: int, seed: int = 0, *, path: Source, style: Style = "plain", positions: int | None = None
) -> list[Example]:
    """Return `n` examples for supervised training, {"messages": [user, assistant]}: the first
    `positions` of training (None: all) in turn, each answered with a random legal move. They show
    the format and the rules, not good moves.
    """
    graders = [
        task.grader
        for task in get_chess_tasks("train", positions, seed, path=path, style=style)[:n]
    ]
    fens = [grader.fen for grader in graders if isinstance(grader, ChessGrader)]
    legal = {fen: sorted(move.uci() for move in chess.Board(fen).legal_moves) for fen in fens}
    draw = random.Random(seed)
    drawn = [(fen, draw.choice(legal[fen])) for fen in itertools.islice(itertools.cycle(fens), n)]
    return [
        solved(write_prompt(fen, style), ChessGrader(fen, (move,), style=style).reference())
        for fen, move in drawn
    ]


def parse_row(row: Row) -> Position | None:
    """Read a row as `get_chess_tasks` describes it. Raises RowError."""
    if "text" in row:
        return _rookworld(text_field(row, "text"))
    if "Moves" in row:
        moves = text_field(row, "Moves").split()
        try:
            board = chess.Board(text_field(row, "FEN"))
            board.push_uci(moves[0])
        except ValueError as error:
            raise RowError(str(error)) from None
        return _position(str(row.get("PuzzleId", board.fen())), board.fen(), moves[1:2], {})
    best: Any = row.get("best_move_uci")
    best = [best] if isinstance(best, str) else best
    points = row.get("points_uci") or {}
    if not isinstance(best, list) or not isinstance(points, dict):
        raise RowError(
            f"best_move_uci is {best!r:.80} and points_uci {points!r:.80}; a move or a list of "
            "moves, and an object"
        )
    fen = text_field(row, "fen")
    return _position(str(row.get("id", fen)), fen, best, _points(points))


def _rookworld(text: str) -> Position | None:
    if not text.lstrip().startswith("P:"):
        return None
    found = _ROOKWORLD.fullmatch(text.strip())
    if found is None:
        raise RowError(
            f"text is {text!r:.160}; it must be P: position M: moves E: evaluations B: move"
        )
    fen, moves, values, best = found.groups()
    candidates = dict(zip(moves.split(), map(_number, values.split()), strict=False))
    if len(moves.split()) != len(values.split()) or math.inf in candidates.values():
        raise RowError(f"text is {text!r:.160}; each move after M: needs a number after E:")
    return _position(fen, fen, [best], {}, candidates)


def _points(points: Mapping[str, Any]) -> dict[str, float]:
    """Convert points out of 100 to shares, without the moves that lack points (a table may have a
    column for every move).
    """
    known = {move: value for move, value in points.items() if value is not None}
    if not all(isinstance(value, int | float) and 0 <= value <= 100 for value in known.values()):
        raise RowError(f"points {known!r:.120}; they must be numbers from 0 to 100")
    return {move: value / 100 for move, value in known.items()}


def _position(
    name: str,
    fen: str,
    best: list[str],
    points: dict[str, float],
    candidates: dict[str, float] | None = None,
) -> Position:
    """Return the position after checking every move for legality. Raises RowError."""
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise RowError(f"fen {fen!r:.120}: {error}") from None
    candidates = candidates or {}
    legal = {move.uci() for move in board.legal_moves}
    if not best or (wrong := [move for move in [*best, *points, *candidates] if move not in legal]):
        raise RowError(
            f"best moves {best!r:.80}: "
            f"{f'{wrong[:3]} not legal there' if best else 'there must be one'}; fen {fen!r:.120}"
        )
    return Position(name, fen, tuple(best), points, candidates)
