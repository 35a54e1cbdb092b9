"""ARC-AGI: grids in all ways of writing them, partial credit, augmentation that keeps a rule a
rule.
"""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.arc_agi import (
    ARCGrader,
    ARCPuzzle,
    Pair,
    augmented,
    get_arc_agi_tasks,
    parse_row,
    read_grids,
    write_grid,
)

RIGHT = ((1, 2, 3), (4, 5, 6))


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("1 2 3\n4 5 6", 1.0),
        ("The rule is: 3 becomes 4.\n\n1 2 3\n4 5 6\n", 1.0),
        ("123\n456", 1.0),
        ("1,2,3\n4,5,6", 1.0),
        ("1, 2, 3\n4, 5, 6,", 1.0),
        ("| 1 | 2 | 3 |\n| 4 | 5 | 6 |", 1.0),
        ("|1|2|3|\n|4|5|6|", 1.0),
        ("[[1, 2, 3], [4, 5, 6]]", 1.0),
        ("[[1,2,3],[4,5,6]]", 1.0),
        ("Output: [[1, 2, 3], [4, 5, 6]].", 1.0),
        ("[[1, 2, 3],\n [4, 5, 6]]", 1.0),
        ("[\n [1, 2, 3],\n [4, 5, 6]\n]", 1.0),
        ("[1 2 3]\n[4 5 6]", 1.0),
        ("```\n1 2 3\n4 5 6\n```", 1.0),
        ("```python\n1 2 3\n4 5 6\n```\nDone.", 1.0),
        ("<answer>1 2 3\n4 5 6</answer>", 1.0),
        ("<answer>[[1, 2, 3], [4, 5, 6]]</answer>", 1.0),
        ("1\t2\t3\r\n4\t5\t6\r\n", 1.0),
        ("  1  2  3\n  4  5  6", 1.0),
        ("１ ２ ３\n４ ５ ６", 1.0),
        ("١ ٢ ٣\n٤ ٥ ٦", 1.0),
        ("Das Ergebnis lautet\n1 2 3\n4 5 6\nwie verlangt.", 1.0),
        ("<think>9 9 9\n9 9 9</think>\n1 2 3\n4 5 6", 1.0),
        ("9 9 9\n9 9 9\n\n1 2 3\n4 5 6", 1.0),  # the last counts
        ("1 2 3\n4 5 6\n\nI am sure.", 1.0),
        ("1\n" * 20_000 + "\n1 2 3\n4 5 6", 1.0),
        ("1 2 3\n4 5 6\n\n9 9 9\n9 9 9", 0.0),
        ("1 2 3\n4 5 7", 0.5 * 5 / 6),
        ("0 0 0\n0 0 0", 0.0),
        ("1 2 3", 0.0),
        ("| 1 | 2 | 3 |\n|---|---|---|\n| 4 | 5 | 6 |", 1.0),
        ("|1|2|3|\n|:-:|:--|--:|\n|4|5|6|\n\nDone.", 1.0),
        ("| | | |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |", 1.0),
        ("| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |", 1.0),
        ("| 0 | 1 | 2 |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |", 1.0),  # numbers of columns
        ("| 1 | 2 | 3 |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |", 1.0),
        ("| 7 | 1 | 2 |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |", 0.0),  # a grid of three rows
        ("0 1 2\n1 2 3\n4 5 6", 0.0),
        ("+---+---+---+\n| 1 | 2 | 3 |\n+---+---+---+\n| 4 | 5 | 6 |\n+---+---+---+", 1.0),
        ("| 1 | 2 | 3 |\n|---|---|---|\n| 4 | 5 | 0 |", 0.5 * 5 / 6),
        ("1 2 3\n---\n4 5 6", 0.0),
        ("1 2 3\n\n4 5 6", 1.0),
        ("My answer:\n\n1 2 3\n\n\n4 5 6\n\nI am sure.", 1.0),
        ("```\n1 2 3\n\n4 5 6\n```", 1.0),
        ("\u200b1 2 3\n\u200b\n4 5 6\ufeff", 1.0),
        ("First row:\n1 2 3\n\nSecond row:\n4 5 6", 0.0),  # two grids of one row
        ("1 2 3\n\n1 2 3\n\n4 5 6", 0.0),  # three rows, or something before the answer
        ("1 2 3\n\n4 5 6\n\n7 8 9", 0.0),
        ("```\n1 2 3\n```\n```\n4 5 6\n```", 0.0),
        ("<answer>1 2 3</answer>\n<answer>4 5 6</answer>", 0.0),
        ("1 2 3\n4 5 6\n7 8 9", 0.0),
        ("1 2\n3 4\n5 6", 0.0),  # the same cells in another shape
        ("1 4\n2 5\n3 6", 0.0),
        ("1 2 3\n4 5 66", 0.0),
        ("1 2 3\n4 5 -6", 0.0),
        ("1 2 3\n4 5 x", 0.0),
        ("1. 2. 3.\n4. 5. 6.", 0.0),
        ("one two three\nfour five six", 0.0),
        ("<think>1 2 3\n4 5 6", 0.0),
        ("<think>1 2 3\n4 5 6</think>", 0.0),
        ("123456", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("1 2 3\n4 5 6\n" * 1000, 0.0),  # one grid of 2000 rows
        ("²\n³", 0.0),
        ("[[" * 1000 + "1, 2, 3], [4, 5, 6]]", 1.0),
    ],
)
def test_grader(reply, content, reward):
    got, metrics = ARCGrader((RIGHT,), partial_credit=0.5)(reply(content))
    assert got == pytest.approx(reward)
    assert metrics["exact"] == float(reward == 1.0)
    strict, _ = ARCGrader((RIGHT,))(reply(content))
    assert strict == float(reward == 1.0)


@pytest.mark.parametrize("before", ["", "<think>9 9</think>\n", "١ ²:\r\n"])
@pytest.mark.parametrize(
    "answer", ["1 2 3\n4 5 6", "[[1, 2, 3],\n [4, 5, 6]]", "| 1 | 2 | 3 |\n| 4 | 5 | 6 |"]
)
@pytest.mark.parametrize("after", ["", " \n\n", "\n```\nThat is the 2nd try."])
def test_where_the_last_grid_ends(reply, before, answer, after):
    reward, metrics = ARCGrader((RIGHT,))(reply(before + answer + after))
    assert (reward, metrics[ANSWER_END]) == (1.0, len(before + answer))
    assert ANSWER_END not in ARCGrader((RIGHT,))(reply("none"))[1]


@pytest.mark.parametrize(
    ("content", "reward", "exact", "shape"),
    [
        ("1 2\n\n3 4\n5 6", 1.0, 1, 1),
        ("Test 1:\n1 2\nTest 2:\n3 4\n5 6", 1.0, 1, 1),
        ("[[1, 2]]\n[[3, 4], [5, 6]]", 1.0, 1, 1),
        ("[[1, 2]] [[3, 4], [5, 6]]", 1.0, 1, 1),
        ("9 9\n\n1 2\n\n3 4\n5 6", 1.0, 1, 1),
        ("1 2\n\n3 4\n5 0", 0.5 + 0.5 * 0.4 * 3 / 4, 0, 1),
        ("3 4\n5 6\n\n1 2", 0.0, 0, 0),  # in the wrong order
        ("1 2", 0.5, 0, 0.5),
        ("3 4\n5 6", 0.0, 0, 0),
        ("1 2\n\n3 4", 0.5, 0, 0.5),
        ("1 2\n\n\n3 4\n\n5 6", 1.0, 1, 1),
        ("1 2\n\n| 3 | 4 |\n|---|---|\n| 5 | 6 |", 1.0, 1, 1),
        ("9 9\n\n9 9\n\n1 2\n\n3 4\n\n5 6", 0.0, 0, 0.5),  # too much for two answers
        ("So:\n1 2\n3 4\n5 6\n\nThen:\n1 2\n\n3 4\n\n5 6", 1.0, 1, 1),
        ("1 2 0\n\n3 4\n\n5 6", 0.5, 0, 0.5),
        ("", 0.0, 0, 0),
    ],
)
def test_several_test_inputs(reply, content, reward, exact, shape):
    got, metrics = ARCGrader((((1, 2),), ((3, 4), (5, 6))), partial_credit=0.4)(reply(content))
    assert got == pytest.approx(reward)
    assert (metrics["exact"], metrics["shape"]) == (exact, shape)


grids = st.integers(1, 6).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(0, 9), min_size=width, max_size=width).map(tuple),
        min_size=1,
        max_size=6,
    ).map(tuple)
)


@given(st.lists(grids, min_size=1, max_size=3), st.sampled_from(["text", "json", "lines"]))
def test_property_grids_are_read_back(given_grids, form):
    if form == "text":
        text = "\n\n".join(map(write_grid, given_grids))
    else:
        lists = [[list(row) for row in grid] for grid in given_grids]
        text = "\n".join(json.dumps(grid, indent=None if form == "json" else 1) for grid in lists)
    # One cell a line is a grid of other shape; all that matters is that reading ends.
    if form == "lines":
        read_grids(text)
    else:
        assert read_grids(text) == given_grids


def test_long_replies(grade_long_replies):
    grade_long_replies(ARCGrader((RIGHT, RIGHT), 0.5), "[[1, 2], [3, 4]]", "1 2 3\n", "]]", "[")


def test_augmentation():
    puzzle = ARCPuzzle(
        "x", (Pair(((1, 2), (3, 4), (5, 6)), ((7, 8, 9),)),), (Pair(((1, 2),), ((0,),)),)
    )
    seen = set()
    for seed in range(200):
        changed = augmented(puzzle, random.Random(seed), ("rotations", "reflections"))
        seen.add(changed.train[0].input)
        heights = {len(changed.train[0].input), len(changed.train[0].output[0])}
        assert heights in ({3}, {2, 1})
    assert len(seen) == 8 and puzzle.train[0].input in seen
    for seed in range(50):
        changed = augmented(puzzle, random.Random(seed), ("colours",))
        pairs = puzzle.train + puzzle.test
        there = {
            (a, b)
            for p, q in zip(pairs, changed.train + changed.test)
            for g, h in ((p.input, q.input), (p.output, q.output))
            for row, other in zip(g, h)
            for a, b in zip(row, other)
        }
        # One colour for each.
        assert len(there) == len({a for a, _ in there}) == len({b for _, b in there}) == 10
    assert augmented(puzzle, random.Random(0), ()) == puzzle


@pytest.fixture
def folder(tmp_path):
    def row(i):
        return {
            "train": [{"input": [[i % 10]], "output": [[i // 10]]}] * 2,
            "test": [{"input": [[1, i % 10]], "output": [[2, i % 10]]}],
        }

    for name, numbers in (("training", range(60)), ("evaluation", range(60, 70))):
        lines = [json.dumps({"id": f"p{i}", **row(i)}) for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_splits(folder, reply):
    train, validation, test = (
        get_arc_agi_tasks(split, path=folder) for split in ("train", "validation", "test")
    )
    assert len(train) + len(validation) == 60 and validation and len(test) == 10
    assert not {t.id for t in train} & {t.id for t in validation}
    for task in [*train, *validation, *test]:
        assert task.grader(reply(task.grader.reference()))[0] == 1.0
        assert "Test input:\n1 " in task.messages[0]["content"]
    turned = get_arc_agi_tasks("train", path=folder, augment=("rotations", "colours"))
    assert [t.id for t in turned] == [t.id for t in train] and turned[0].messages != train[
        0
    ].messages
    assert [t.messages for t in turned] == [
        t.messages
        for t in get_arc_agi_tasks("train", path=folder, augment=("rotations", "colours"))
    ]
    assert [t.messages for t in get_arc_agi_tasks("test", path=folder, augment=("colours",))] == [
        t.messages for t in test
    ]
    assert len(get_arc_agi_tasks("test", path=folder, max_cells=8)) == 10
    with pytest.raises(
        TaskError, match="1 tasks of arc_agi, split test, but there are only 0 rows"
    ):
        get_arc_agi_tasks("test", 1, path=folder, max_cells=7)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"train": [], "test": []}, "0 train pairs and 0 test pairs"),
        ({"test": []}, "no field 'train'"),
        (
            {"train": [{"input": [[1]], "output": [[1]]}], "test": [{"input": [[1]]}]},
            r"test\[0\] lacks input or output",
        ),
        (
            {"train": [{"input": [[1], [1, 2]], "output": [[1]]}], "test": []},
            r"train\[0\]\.input has 2 rows of \[1, 2\] cells",
        ),
        (
            {"train": [{"input": [[10]], "output": [[1]]}], "test": []},
            r"train\[0\]\.input has cells that are not whole numbers",
        ),
        ({"train": [{"input": [[True]], "output": [[1]]}], "test": []}, "not whole numbers"),
        ({"train": [{"input": [1], "output": [[1]]}], "test": []}, "is not a list of rows"),
        ({"train": [{"input": [[0] * 31], "output": [[1]]}], "test": []}, "up to 30"),
    ],
)
def test_bad_rows(tmp_path, row, words):
    (tmp_path / "x.json").write_text(json.dumps([row]))
    with pytest.raises(TaskError, match=r"x\.json, row 1: .*" + words):
        get_arc_agi_tasks("test", path=tmp_path / "x.json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "evaluation"}, "arc_agi has 'train'"),
        ({"partial_credit": 2}, "partial_credit is 2"),
        ({"augment": ["mirror"]}, "'mirror'"),
        ({"augment": "colours"}, "augment is 'colours'; give a list"),
    ],
)
def test_refusals(folder, changes, words):
    with pytest.raises(TaskError, match=words):
        get_arc_agi_tasks(**{"path": folder, **changes})


def test_published_puzzles(shared, reply):
    for name in ("training", "evaluation"):
        lines = (shared / "arc_agi" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == 400
        for line in lines:
            row = json.loads(line)
            puzzle = parse_row(row)
            grader = ARCGrader(tuple(pair.output for pair in puzzle.test))
            answers = [pair["output"] for pair in row["test"]]
            assert (
                grader(
                    reply(
                        json.dumps(answers[0])
                        if len(answers) == 1
                        else "\n".join(map(json.dumps, answers))
                    )
                )[0]
                == 1.0
            )
            assert grader(reply(grader.reference()))[0] == 1.0


def test_a_puzzle_with_several_tests_asks_for_all_of_them(tmp_path, reply):
    """Without a name it is called by its grids."""
    pairs = [{"input": [[number]], "output": [[number + 1]]} for number in range(4)]
    row = {"train": pairs[:2], "test": pairs[2:]}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    (task,) = get_arc_agi_tasks("test", path=tmp_path)
    question = task.messages[-1]["content"]
    assert "Test input 1:\n2\n\nTest input 2:\n3" in question
    assert "their output grids, in this order, with an empty line between" in question
    assert task.grader(reply("3\n\n4"))[0] == 1.0
    name = parse_row(row).id
    assert re.fullmatch("[0-9a-f]{8}", name)
    assert parse_row(row).id == name != parse_row({**row, "test": pairs[:1]}).id
