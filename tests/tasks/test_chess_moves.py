"""Chess: moves in every notation, points, mates, and positions from all kinds of files."""

import json

import pytest

from ttrl.errors import TaskError

chess = pytest.importorskip("chess")

from ttrl.tasks.chess_moves import ChessGrader, get_chess_tasks, legal_move_examples, parse_epd  # noqa: E402 - needs chess

FEN = "r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3"
CASTLE = "r1bqk1nr/pppp1ppp/2n5/2b1p3/2B1P3/5N2/PPPP1PPP/RNBQK2R w KQkq - 4 4"
PROMOTE = "8/4P1k1/8/8/8/8/6K1/8 w - - 0 1"
MATE = "6k1/5ppp/8/8/8/8/5PPP/1R1R2K1 w - - 0 1"


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("<answer>f1b5</answer>", 1.0),
        ("<answer>F1B5</answer>", 1.0),
        ("<answer>f1-b5</answer>", 1.0),
        ("<answer>f1‑b5</answer>", 1.0),
        ("<answer>\u200bf1–b5\u2060</answer>", 1.0),
        ("<answer>Bb5</answer>", 1.0),
        ("<answer>Bb5!</answer>", 1.0),
        ("<answer>3. Bb5</answer>", 1.0),
        ("<answer>3.Bb5</answer>", 1.0),
        ("<answer>♗b5</answer>", 1.0),
        ("<answer>**Bb5**</answer>", 1.0),
        ("<answer>\n`f1b5`\n</answer>", 1.0),
        ("\\boxed{Bb5}", 1.0),
        ("Best move: Bb5", 1.0),
        ("The best move is Bb5.", 1.0),
        ("Is the best move is a3? No: the best move is **f1b5**!", 1.0),
        ("\\boxed{Bb5\\#}", 1.0),
        ("The best move: **Bb5**.\nBye", 1.0),
        ("Bb5", 1.0),
        ("f1b5", 1.0),
        ("Ich denke…\nBb5", 1.0),
        ("```\nBb5\n```", 1.0),
        ("<think>Bc4</think><answer>Bb5</answer>", 1.0),
        ("<answer>Bc4</answer> no, <answer>Bb5</answer>", 1.0),
        ("x" * 100_000 + "<answer>Bb5</answer>", 1.0),
        ("<answer>f1c4</answer>", 0.8),
        ("<answer>Bc4</answer>", 0.8),
        ("<answer>a2a3</answer>", 0.1),
        ("<answer>Bb5</answer><answer>a3</answer>", 0.1),
        ("<answer>Bb5 or Bc4</answer>", 0.0),
        ("<answer>Bb5, Bc4</answer>", 0.0),
        ("<answer>Bb5 Bc4</answer>", 0.0),
        ("<answer>e1g1</answer>", 0.0),
        ("<answer>O-O</answer>", 0.0),
        ("<answer>f1b6</answer>", 0.0),
        ("<answer>e7e5</answer>", 0.0),
        ("<answer>Nd2</answer>", 0.0),
        ("<answer>--</answer>", 0.0),
        ("<answer>0000</answer>", 0.0),
        ("<answer>Z0</answer>", 0.0),
        ("<answer>the bishop to b5</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>ｆ１ｂ５</answer>", 0.0),
        ("<think>Bb5", 0.0),
        ("<think>Bb5</think>", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("I play Bb5 here", 0.0),
        ("<answer>" + "Bb5" * 50_000 + "</answer>", 0.0),
        ("<answer>f1b5q</answer>", 0.0),
        ("B: f1b5", 0.0),
    ],
)
def test_grader(reply, content, reward):
    got, metrics = ChessGrader(FEN, ("f1b5",), {"f1b5": 1.0, "f1c4": 0.8}, legal_reward=0.1)(
        reply(content)
    )
    assert (got, metrics) == (reward, {"legal": float(reward > 0), "best": float(reward == 1.0)})


@pytest.mark.parametrize(
    ("fen", "best", "content", "reward"),
    [
        (CASTLE, "e1g1", "O-O", 1.0),
        (CASTLE, "e1g1", "0-0", 1.0),
        (CASTLE, "e1g1", "e1g1", 1.0),
        (CASTLE, "e1g1", "Kg1", 0.0),
        (CASTLE, "e1g1", "O-O-O", 0.0),
        (PROMOTE, "e7e8q", "e8=Q", 1.0),
        (PROMOTE, "e7e8q", "e8Q", 1.0),
        (PROMOTE, "e7e8q", "e7e8q", 1.0),
        (PROMOTE, "e7e8q", "e7e8=Q", 1.0),
        (PROMOTE, "e7e8q", "e8=N+", 0.0),
        (PROMOTE, "e7e8q", "e8", 0.0),
        (MATE, "b1b8", "Rb8#", 1.0),
        (MATE, "b1b8", "Rd8#", 1.0),  # another mate is as good
        (MATE, "b1b8", "Rd7", 0.0),
    ],
)
def test_special_moves(reply, fen, best, content, reward):
    assert ChessGrader(fen, (best,))(reply(content))[0] == reward


@pytest.mark.parametrize(
    ("content", "reward", "candidates"),
    [
        ("M: f1b5 f1c4 E: 0.3 0.2 B: f1b5", 1.0, 1.0),
        (" M: f1b5 f1c4 f1b6 a1a8 E: 0 0 0 0 B: f1b5", 1.0, 0.5),
        ("M: f1b5 f1b5 f1b5 f1b5 B: f1b5", 1.0, 0.25),  # the same one once
        ("B: f1b5", 1.0, 0.0),
        ("B: a2a3 B: f1b5 and more", 1.0, 0.0),
        ("M: f1b5", 0.0, 1.0),
        ("B:", 0.0, 0.0),
        ("<answer>f1b5</answer>", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_style_p(reply, content, reward, candidates):
    got, metrics = ChessGrader(FEN, ("f1b5",), style="P")(reply(content))
    assert (got, metrics["candidates"]) == (reward, candidates)


KNOWN = {"f1b5": 0.3, "f1c4": 0.25, "d2d4": -0.4}


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("M: f1b5 f1c4 d2d4 E: 0.3 0.25 -0.4 B: f1b5", 1.0),
        ("M: d2d4 f1c4 f1b5      E: -0.4 0.25 0.3      B: f1b5", 1.0),  # in any order, and padded
        ("M: f1b5 f1c4 d2d4 E: 0.8 0.25 -0.4 B: f1b5", 0.8 + 0.2 * 2.5 / 3),
        ("M: f1b5 f1c4 d2d4 E: 0.3 x B: f1b5", 0.8 + 0.2 / 3),
        ("M: f1b5 a2a3 E: 0.3 0.0 B: f1b5", 0.5 + 0.1 + 0.2 / 3),
        # No more of them than there are.
        ("M: a2a3 a2a4 b2b3 f1b5 f1c4 d2d4 E: 0 0 0 0.3 0.25 -0.4 B: f1b5", 0.5),
        ("M: f1b5 f1b5 f1b5 E: 0.3 0.3 0.3 B: a2a3", 0.5 * 0.1 + 0.1 + 0.2 / 3),
        ("B: f1b5", 0.5),
        ("M: f1b5 f1c4 d2d4 E: 0.3 0.25 -0.4 B: f1f8", 0.5),
        ("M: f1b5 f1c4 d2d4 E: 1e9 nan inf B: f1b5", 0.8),
        ("", 0.0),
    ],
)
def test_candidates_and_their_evaluations(reply, content, reward):
    grader = ChessGrader(FEN, ("f1b5",), style="P", legal_reward=0.1, candidates=KNOWN)
    assert grader(reply(content))[0] == pytest.approx(reward)
    assert grader(reply(grader.reference()))[0] == 1.0


def test_rows_of_rookworld(tmp_path, reply):
    """One column of text, of two kinds, padded with spaces; only positions are taken."""
    analysis = "M: f1b5 f1c4 d2d4      E: 0.3 0.25 -0.4          B: f1b5"
    rows = [f"P: {FEN}          {analysis}", f"{FEN}+f1b5+e2e4 e7e5+"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in rows))
    (task,) = get_chess_tasks("test", path=path, style="P")
    assert (
        task.messages[0]["content"] == f"P: {FEN} "
        and task.grader.candidates == KNOWN
        and task.grader.best == ("f1b5",)
    )
    assert task.grader(reply(analysis))[0] == 1.0


def test_examples_show_the_rules_and_not_the_best_move(tmp_path, reply):
    path = tmp_path / "positions.jsonl"
    path.write_text(
        "".join(
            json.dumps({"fen": FEN.replace("w", side), "best_move_uci": m}) + "\n"
            for side, m in SIDES
        )
    )
    graders = {
        task.messages[0]["content"]: task.grader
        for task in get_chess_tasks("train", path=path, style="P")
    }
    examples = [
        [message["content"] for message in one["messages"]]
        for one in legal_move_examples(60, path=path, style="P")
    ]
    grades = [graders[asked](reply(answer))[1] for asked, answer in examples]
    assert len({answer for _, answer in examples}) > 20 and all(
        one["legal"] == one["candidates"] == 1.0 for one in grades
    )
    assert 0 < sum(one["best"] for one in grades) < 15


SIDES = (("w", "f1b5"), ("b", "g8f6"))


def test_chance_is_that_of_a_random_move(reply):
    """Against every legal move played."""
    board = chess.Board(MATE)
    grader = ChessGrader(MATE, ("b1b7",))
    right = [grader(reply(move.uci()))[1]["best"] for move in board.legal_moves]
    assert grader.chance() == sum(right) / len(right) == 3 / len(right)  # two mates, too


def test_a_judge(reply):
    asked = []

    def judge(fen, move):
        asked.append((fen, move))
        return 0.5

    grader = ChessGrader(FEN, ("f1b5",), {"f1c4": 0.8}, judge=judge)
    assert [grader(reply(move))[0] for move in ("f1b5", "f1c4", "a2a3", "a2a5")] == [
        1.0,
        0.5,
        0.5,
        0.0,
    ]
    assert asked == [(FEN, "f1c4"), (FEN, "a2a3")]


@pytest.mark.parametrize("style", ["plain", "P"])
def test_long_replies(grade_long_replies, style):
    grade_long_replies(
        ChessGrader(FEN, ("f1b5",), style=style),
        "B: f1b5 ",
        "M: f1b5 ",
        "best move: ",
        "Bb5",
        "1. ",
        "N",
    )


def test_a_board_is_one_question_whatever_its_counters(tmp_path):
    """Or the same board could be for training in one row and for validation in another."""
    boards = [FEN.rsplit(" ", 2)[0] + f" 0 {number}" for number in range(1, 31)]
    path = tmp_path / "positions.jsonl"
    path.write_text(
        "\n".join(json.dumps({"fen": fen, "best_move_uci": "f1b5"}) for fen in boards),
        encoding="utf-8",
    )
    counts = sorted(len(get_chess_tasks(split, path=path)) for split in ("train", "validation"))
    assert counts == [0, 30]


EPD = (
    '1r1b2k1/2r2ppp/p1qp4/3R1NPP/1pn1PQB1/8/PPP3R1/1K6 w - - bm g6; id "x.008"; c8 "100 77"; c9 '
    '"g5g6 g2f2";'
)


def test_files(tmp_path, reply):
    position = parse_epd(EPD, "?")
    assert (position.id, position.best, position.points) == (
        "x.008",
        ("g5g6",),
        {"g5g6": 1.0, "g2f2": 0.77},
    )
    (tmp_path / "a.epd").write_text(EPD + "\n\n")
    row = {
        "id": "x",
        "fen": position.fen,
        "best_move_uci": "g5g6",
        "points_uci": {"g2f2": 77, "g5g6": 100, "e2e4": None},
    }
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    (tmp_path / "c.csv").write_text(
        "PuzzleId,FEN,Moves\nx,rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1,e2e4 "
        "e7e5 g1f3\n"
    )
    for name, best in (("a.epd", "g5g6"), ("b.jsonl", "g5g6"), ("c.csv", "e7e5")):
        for style in ("plain", "P"):
            (task,) = get_chess_tasks("test", path=tmp_path / name, style=style)
            assert task.grader.best == (best,)
            assert task.grader(reply(task.grader.reference()))[0] == 1.0
            assert (f"P: {task.grader.fen} " == task.messages[0]["content"]) == (style == "P")
    assert (
        "Black to move"
        in get_chess_tasks("test", path=tmp_path / "c.csv")[0].messages[0]["content"]
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.epd", "8/8/8 w - - bm a1;", r"x\.epd, line 1: "),
        ("x.epd", EPD.replace("bm g6;", ""), r"line 1: no bm"),
        ("x.epd", EPD.replace("77", "770"), "numbers from 0 to 100"),
        ("x.epd", "", "no positions"),
        (
            "x.jsonl",
            json.dumps({"fen": FEN, "best_move_uci": "e1e8"}),
            r"line 1: best moves \['e1e8'\]: \['e1e8'\] not legal",
        ),
        ("x.jsonl", json.dumps({"fen": FEN, "best_move_uci": []}), "there must be one"),
        ("x.jsonl", json.dumps({"fen": "x", "best_move_uci": "e1e8"}), "fen 'x'"),
        ("x.jsonl", json.dumps({"fen": FEN}), "best_move_uci is None"),
        (
            "x.jsonl",
            json.dumps({"text": f"P: {FEN} M: f1b5 B: f1b5"}),
            "it must be P: position M: moves E: evaluations B: move",
        ),
        (
            "x.jsonl",
            json.dumps({"text": f"P: {FEN} M: f1b5 a2a3 E: 1 B: f1b5"}),
            "each move after M: needs a number",
        ),
        ("x.jsonl", json.dumps({"text": f"P: {FEN} M: e1e8 E: 1 B: f1b5"}), "not legal"),
        ("x.csv", "FEN,Moves\nx,e2e4\n", "row 1: "),
    ],
)
def test_damaged_files(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(TaskError, match=words):
        get_chess_tasks("test", path=tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "dev"}, "chess has"),
        ({"style": "p"}, "style is 'p'"),
        ({"legal_reward": 1.0}, "legal_reward"),
        ({"path": "/no.epd"}, "cannot be read"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(TaskError, match=words):
        get_chess_tasks(**{"path": "x", **changes})


def test_published_positions(shared, reply):
    puzzles = get_chess_tasks("test", path=shared / "chess" / "lichess_puzzles.jsonl")
    same = get_chess_tasks("test", path=shared / "chess" / "lichess_puzzles_original.csv")
    assert len(puzzles) == 1000 and {t.grader.fen: t.grader.best for t in puzzles} == {
        t.grader.fen: t.grader.best for t in same
    }
    suite = get_chess_tasks("test", path=shared / "chess" / "sts_positions.jsonl", style="P")
    assert len(suite) == 450
    for task in puzzles + suite:
        assert task.grader(reply(task.grader.reference()))[0] == 1.0
    rows = [
        json.loads(line)
        for line in (shared / "chess" / "lichess_puzzles.jsonl").read_text().splitlines()
    ]
    names = {row["fen"]: row["best_move_san"] for row in rows}
    for task in puzzles[:200]:
        assert task.grader(reply(names[task.grader.fen]))[0] == 1.0
    train = get_chess_tasks("train", path=shared / "chess" / "sts_positions.jsonl")
    validation = get_chess_tasks("validation", path=shared / "chess" / "sts_positions.jsonl")
    assert len(train) + len(validation) == 450 and not {t.grader.fen for t in train} & {
        t.grader.fen for t in validation
    }
