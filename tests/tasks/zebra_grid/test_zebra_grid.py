"""Zebra-grid: grades of odd tables, ZebraLogic's format, and puzzles of our own against all grids
there are.
"""

import json
import re
from itertools import permutations, product

import pytest

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.words import in_validation
from ttrl.tasks.zebra_grid import ZebraGridGrader, get_zebra_grid_tasks, load_puzzles, make_puzzle
from ttrl.tasks.zebra_grid.generator import make_draft
from ttrl.tasks.zebra_grid.grading import read_tables

HEADER = ["House", "Name", "Pet"]
ROWS = [["1", "Dora", "grey goat"], ["2", "Emil", "cat"], ["3", "Anton", "dog"]]
RIGHT = (
    "| House | Name | Pet |\n|---|---|---|\n| 1 | Dora | grey goat |\n| 2 | Emil | cat |\n| 3 | "
    "Anton | dog |"
)
WRONG = RIGHT.replace("Dora", "Flora")
TALLER = RIGHT + "\n| 4 | Greta | pony |"


@pytest.mark.parametrize(
    ("content", "right"),
    [
        (RIGHT, 6),
        (RIGHT.replace(" ", "").replace("greygoat", "grey goat"), 6),
        (RIGHT.replace("|", "  |  "), 6),
        ("\n".join(line.strip("|") for line in RIGHT.splitlines()), 6),
        (RIGHT.upper(), 6),
        (RIGHT.replace("\n", "\r\n"), 6),
        (RIGHT.replace("|---|---|---|", "|:---|:---:|---:|"), 6),
        (RIGHT.replace("|---|---|---|\n", ""), 6),
        (RIGHT.replace("Dora", "**Dora**").replace("cat", "`cat`").replace("dog", "*dog*."), 6),
        (RIGHT.replace("grey goat", " grey \t goat "), 6),
        (
            RIGHT.replace("| 1 |", "| House 1 |")
            .replace("| 2 |", "| House 2 |")
            .replace("| 3 |", "| House 3 |"),
            6,
        ),
        (RIGHT.replace("| 1 |", "| １ |"), 6),  # a digit of full width
        (RIGHT.replace("| 1 |", "| first |"), 6),  # told by its place
        (f"```markdown\n{RIGHT}\n```", 6),
        ("\n".join("> " + line for line in RIGHT.splitlines()), 6),
        (f"Let me think | or not.\n\n{RIGHT}\n\nThat is all | really.", 6),
        (f"{WRONG}\n\nOn second thoughts:\n\n{RIGHT}", 6),
        (f"{RIGHT}\n\nOn second thoughts:\n\n{WRONG}", 5),
        (f"{WRONG}\n{RIGHT}", 6),  # nothing between them but a heading
        (f"{RIGHT}\n\n{TALLER}", 6),  # another height
        # Words beside the table make one row more of it.
        (f"<think>{RIGHT}</think>\nI give up.", 0),
        (f"<think>\n{RIGHT}\n</think>\nI give up.", 0),  # thinking is no answer
        (WRONG, 5),
        (RIGHT.replace("Emil", "").replace("dog", "?"), 4),
        (RIGHT.replace("| 2 | Emil | cat |", "| 2 | Emil |"), 5),
        (RIGHT.replace("| 2 | Emil | cat |", "| 2 | Emil | cat | pony |"), 6),
        (RIGHT.replace("Emil | cat", "cat | Emil"), 4),
        # Columns and rows in another order, with their headings and numbers:
        (
            "| Pet | House | Name |\n|---|---|---|\n| cat | 2 | Emil |\n| dog | 3 | Anton |\n| "
            "grey goat | 1 | Dora |",
            6,
        ),
        ("| Name | Pet |\n|---|---|\n| Dora | grey goat |\n| Emil | cat |\n| Anton | dog |", 6),
        (
            "| A | B | C |\n|---|---|---|\n| 1 | Dora | grey goat |\n| 2 | Emil | cat |\n| 3 | "
            "Anton | dog |",
            6,
        ),
        (
            "| House | Name | Pet |\n|---|---|---|\n| 2 | Dora | grey goat |\n| 1 | Emil | cat "
            "|\n| 3 | Anton | dog |",
            2,
        ),
        # The form, not filled in.
        ("| House | Name | Pet |\n|---|---|---|\n| 1 | | |\n| 2 | | |\n| 3 | | |", 0),
        ("| House | Name | Pet |\n|---|---|---|", 0),
        (TALLER, 0),
        (RIGHT.rsplit("\n", 1)[0], 0),
        (RIGHT.replace("\n", "\n\n"), 0),
        (RIGHT.replace("|", "¦"), 0),
        (RIGHT.replace("|", ","), 0),
        (json.dumps({"header": HEADER, "rows": ROWS}), 0),
        ("1: Dora, grey goat; 2: Emil, cat; 3: Anton, dog", 0),
        (
            "| 家 | 名前 | ペット |\n|---|---|---|\n| 1 | ドラ | 山羊 |\n| 2 | エミル | 猫 |\n| 3 | アントン | 犬 |",
            0,
        ),
        ("| | | |\n| | | |\n| | | |\n| | | |", 0),
        ("|", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_grades(content, right, reply):
    reward, metrics = ZebraGridGrader(HEADER, ROWS)(reply(content))
    assert reward == pytest.approx(right / 6)
    assert metrics["solved"] == (right == 6)


def test_typography_of_a_cell_does_not_matter(reply):
    grader = ZebraGridGrader(["House", "Name"], [["1", "Zoë O’Hara"], ["2", "Jean‑Luc"]])
    table = "| House | Name |\n|---|---|\n| 1 | Zoe\u0308 O'Hara |\n| \u200b2 | Jean-Luc\u200b |"
    assert grader(reply(table))[0] == 1.0
    assert grader(reply(table.replace("\u0308", "")))[0] == 0.5


def test_long_replies_take_linear_time(grade_long_replies):
    pieces = ("|", "| ", "|-", "|-|\n", "| a | b |\n", RIGHT + "\n", "|---|\n|\n", "| 1 |\n\n")
    grade_long_replies(ZebraGridGrader(HEADER, ROWS), *pieces)


def test_tables_are_told_from_text():
    tables = read_tables("no table\n\n| a | B |\n|---|---|\n| 1 | **2** |\n\na|b")
    assert tables == [([["a", "b"], ["1", "2"]], 43), ([["a", "b"]], 48)]


@pytest.mark.parametrize("before", ["", "<think>|1|2|\n</think>", "First:\r\n\r\n"])
@pytest.mark.parametrize("after", ["", "  \n", "\n\nThat is all.", " \n\n| House | Name |\n"])
def test_where_the_last_answer_ends(before, after, reply):
    text = before + RIGHT + after
    assert ZebraGridGrader(HEADER, ROWS)(reply(text))[1][ANSWER_END] == len(before + RIGHT)
    assert ANSWER_END not in ZebraGridGrader(HEADER, ROWS)(reply("none"))[1]


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (["House"], ROWS, "a solution of 1 columns and 3 rows"),
        (HEADER, [], "and 0 rows"),
        (HEADER, [["1", "Dora"]], "row 1 of the solution has 2 cells, the header 3"),
        (HEADER, [["1", "Dora", " "]], "row 1 of the solution has nothing in 'Pet'"),
        (["House", "Pet", "pet"], ROWS, "two columns of the same name"),
    ],
)
def test_solutions_that_cannot_be_graded(header, rows, message):
    with pytest.raises(TaskError, match=message):
        ZebraGridGrader(header, rows)


def table_of(header, rows):
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def test_zebralogics_format(tmp_path, reply):
    """Fields as in the published set, in jsonl and with the solution as text, as in csv."""
    row = {
        "id": "lgp-test-3x2-0",
        "size": "3*2",
        "puzzle": "There are 3 houses.",
        "solution": {"header": HEADER, "rows": ROWS},
    }
    path = tmp_path / "zebra.jsonl"
    rows = [{**row, "puzzle": f"There are 3 houses. {number}"} for number in range(30)]
    rows.append({**row, "solution": json.dumps(row["solution"])})
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    train, held_out = (
        get_zebra_grid_tasks(split, None, path=path) for split in ("train", "validation")
    )
    assert len(train) + len(held_out) == 31 and not {task.id for task in train} & {
        task.id for task in held_out
    }
    for task in train:
        assert task.messages[0]["content"].startswith("There are 3 houses.")
        assert task.messages[0]["content"].endswith(
            "| House | Name | Pet |\n|---|---|---|\n| 1 | | |\n| 2 | | |\n| 3 | | |"
        )
        assert task.grader(reply(table_of(HEADER, ROWS)))[0] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"puzzle": None}, "puzzle is None"),
        ({"solution": None}, "solution is 'None'; it must be an object with header and rows"),
        ({"solution": "{"}, "it must be an object with header and rows"),
        ({"solution": {"header": HEADER, "rows": [["1", 2, 3]]}}, "must be lists of texts"),
        (
            {"solution": {"header": HEADER, "rows": [["___", "___", "___"]]}},
            "its solution is hidden",
        ),
        ({"solution": {"header": HEADER, "rows": [["1", "Dora"]]}}, "2 cells, the header 3"),
    ],
)
def test_rows_that_are_no_puzzles_are_named(tmp_path, change, message):
    path = tmp_path / "zebra.jsonl"
    path.write_text(
        json.dumps({"puzzle": "p", "solution": {"header": HEADER, "rows": ROWS}, **change}),
        encoding="utf-8",
    )
    with pytest.raises(TaskError) as caught:
        load_puzzles(path)
    assert f"{path}, line 1: " in str(caught.value) and message in str(caught.value)


def test_wrong_arguments(tmp_path):
    with pytest.raises(TaskError, match="'test'; zebra_grid has 'train', 'validation'"):
        get_zebra_grid_tasks("test")
    with pytest.raises(TaskError, match="n is 0; ask for at least one puzzle"):
        get_zebra_grid_tasks(n=0)
    with pytest.raises(TaskError, match="has its own"):
        get_zebra_grid_tasks(path=tmp_path, houses=3)
    with pytest.raises(TaskError, match="attributes is 7; give a whole number from 2 to 6"):
        make_puzzle(0, 3, 7)


@pytest.mark.parametrize(
    ("houses", "attributes", "count"), [(2, 2, 8), (3, 2, 8), (3, 3, 6), (4, 2, 4), (2, 6, 3)]
)
def test_one_grid_and_no_clue_too_many(houses, attributes, count):
    """Every grid there is, against what each clue allows."""
    for seed in range(count):
        draft = make_draft(seed, houses, attributes)
        possible, without = [], [0] * len(draft.clues)
        for columns in product(permutations(range(houses)), repeat=attributes):
            false = []
            for number, clue in enumerate(draft.clues):
                one = columns[clue.one.attribute][clue.one.number]
                other = columns[clue.other.attribute][clue.other.number] if clue.other else 0
                if not clue.allows(one, other):
                    false.append(number)
                    if len(false) == 2:
                        break
            if not false:
                possible.append(columns)
            elif len(false) == 1:
                without[false[0]] += 1
        truth = tuple(
            tuple(draft.houses[value] for value in sorted(draft.houses) if value.attribute == a)
            for a in range(attributes)
        )
        assert possible == [truth]
        assert all(without)


def test_puzzles_are_made_again_by_the_same_seed_and_split(reply):
    one, again, other, held_out, same = (
        get_zebra_grid_tasks(split, 2, seed, houses=4, attributes=3)
        for split, seed in (
            ("train", 1),
            ("train", 1),
            ("train", 2),
            ("validation", 1),
            ("validation", 2),
        )
    )
    ids = [[task.id for task in tasks] for tasks in (one, again, other, held_out, same)]
    assert ids[0] == ids[1] and ids[3] == ids[4]
    assert len({*ids[0], *ids[2], *ids[3]}) == 6
    row = make_puzzle("train 1 0", 4, 3)
    assert row["size"] == "4*3" and row["puzzle"] in one[0].messages[0]["content"]
    table = table_of(**row["solution"])
    assert one[0].grader(reply(table)) == (
        1.0,
        {"solved": 1.0, "table": 1.0, ANSWER_END: len(table)},
    )


def test_no_setting_is_made_for_both_splits():
    """By a hash of the attributes' values in their order: the same for whatever seeds."""
    for split in ("train", "validation"):
        for task in get_zebra_grid_tasks(split, 20, 7, houses=2, attributes=2):
            values = re.findall(r"`([^`]+)`", task.messages[0]["content"])
            assert in_validation("zebra-grid " + " ".join(values)) == (split == "validation")


def test_the_reference_is_the_table_of_the_solution(reply):
    grader = ZebraGridGrader(HEADER, ROWS)
    assert read_tables(grader.reference())
    reward, metrics = grader(reply(grader.reference()))
    assert (reward, metrics["solved"]) == (1.0, 1.0)
