"""NYT Connections: four last lines, strictly and liberally; the forms in which puzzles are
shared.
"""

import csv
import json
import unicodedata

import pytest

from ttrl.errors import TaskError
from ttrl.records import ANSWER_END
from ttrl.tasks.nyt_connections import ConnectionsGrader, get_nyt_connections_tasks, read_puzzles

GROUPS = (
    ("HAIL", "RAIN", "SLEET", "SNOW"),
    ("BUCKS", "HEAT", "JAZZ", "NETS"),
    ("OPTION", "RETURN", "SHIFT", "TAB"),
    ("KAYAK", "LEVEL", "MOM", "RACE CAR"),
)
LINES = [", ".join(group) for group in GROUPS]
RIGHT = "\n".join(LINES)


@pytest.mark.parametrize(
    ("content", "strict", "liberal"),
    [
        (RIGHT, 4, 4),
        (RIGHT.lower(), 4, 4),
        (RIGHT.replace(", ", ","), 4, 4),
        (RIGHT.replace("\n", "\n\n") + "\n\n", 4, 4),
        (RIGHT.replace("\n", "\r\n"), 4, 4),
        ("Here you are, my friend:\n" + RIGHT, 4, 4),
        ("\n".join(reversed(LINES)), 4, 4),
        ("\n".join(", ".join(reversed(group)) for group in GROUPS), 4, 4),
        ("<think>A, B, C, D</think>\n" + RIGHT, 4, 4),
        ("\n".join(["A, B, C, D"] * 4) + "\n" + RIGHT, 4, 4),
        (RIGHT.replace(",", "，"), 4, 4),
        ("思考…\n" + RIGHT, 4, 4),
        (RIGHT.replace("RACE CAR", "RACE  CAR"), 4, 4),
        ("x" * 100_000 + "\n" + RIGHT, 4, 4),
        ("\n".join(f"{i}. {line}" for i, line in enumerate(LINES, 1)), 0, 4),
        ("\n".join(f"{i}) {line}" for i, line in enumerate(LINES, 1)), 0, 4),
        ("\n".join(f"- {line}" for line in LINES), 0, 4),
        ("\n".join(f"* {line}." for line in LINES), 0, 4),
        ("\n".join(f"Group {i}: {line}" for i, line in enumerate(LINES, 1)), 0, 4),
        ("\n".join(f"**{line}**" for line in LINES), 0, 4),
        ("\n".join(f"**{i}. {line}**" for i, line in enumerate(LINES, 1)), 0, 4),
        ("\n".join(", ".join(f'"{word}"' for word in group) for group in GROUPS), 0, 4),
        ("\n".join(", ".join(f"“{word}”" for word in group) for group in GROUPS), 0, 4),
        ("\n".join(f"[{line}]" for line in LINES), 0, 4),
        ("\n".join(f"{line} (a theme, it has commas)" for line in LINES), 0, 4),
        ("\n".join(f"{line} (a (nested, theme))" for line in LINES), 0, 4),
        (f"```\n{RIGHT}\n```", 3, 4),
        (RIGHT + "\nI hope this is right!", 3, 3),
        ("\n".join([LINES[0]] * 4), 1, 1),  # once is once
        ("\n".join([*LINES[:3], LINES[3].replace("MOM", "DAD")]), 3, 3),
        ("\n".join(LINES[:2]), 2, 2),
        (RIGHT.replace("SNOW", "?").replace("NETS", "SNOW").replace("?", "NETS"), 2, 2),
        (RIGHT.replace("SNOW", "TAB"), 3, 3),
        (RIGHT + ", EXTRA", 3, 3),
        (RIGHT.replace("HAIL", "HAIL, HAIL"), 3, 3),
        (RIGHT.replace(", ", " "), 0, 0),
        (RIGHT.replace("\n", "; "), 0, 0),
        (", ".join(word for group in GROUPS for word in group), 0, 0),
        ("<think>" + RIGHT, 0, 0),
        ("<think>" + RIGHT + "</think>", 0, 0),
        (RIGHT + "\n" + "\n".join(["no"] * 4), 0, 0),
        ("", 0, 0),
        (None, 0, 0),
        (",,,\n" * 4, 0, 0),
        ("ＨＡＩＬ, RAIN, SLEET, SNOW", 0, 0),
    ],
)
def test_grader(reply, content, strict, liberal):
    for is_liberal, right in ((False, strict), (True, liberal)):
        reward, metrics = ConnectionsGrader(GROUPS, is_liberal)(reply(content))
        assert metrics.pop(ANSWER_END, 0.0) == ends(content or "", is_liberal)
        also = {} if is_liberal else {"lenient": float(liberal == 4)}
        assert (reward, metrics) == (right / 4, {"exact": float(right == 4)} | also)


def ends(content: str, is_liberal: bool) -> int:
    """Where the last answer ends: before what a liberal reader passes over, and before a thinking
    that never ends.
    """
    if content.startswith("<think>") and "</think>" not in content:
        return 0
    if content.endswith("</think>"):
        return 0
    return len((content.removesuffix("```") if is_liberal else content).rstrip())


TYPOGRAPHY = (("CAFÉ", "‘N’", "CO-OP", "WAIT…"), *GROUPS[1:])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.replace("‘N’", "'N'"),
        lambda text: text.replace("‘N’", "’N’"),
        lambda text: text.replace("-", "\u2011"),
        lambda text: text.replace("-", "–"),
        lambda text: text.replace("…", "..."),
        lambda text: "\n".join("\u200b" + line for line in text.split("\n")),
        lambda text: text.replace(", ", ", \u200b") + "\n\u200b\n",
        lambda text: "\ufeff" + text.replace("CAFÉ", "CA\u00adFÉ").replace(" ", "\u00a0"),
        lambda text: text.replace("É", "E\u0301\ufe0f"),
    ],
)
@pytest.mark.parametrize("liberal", [False, True])
def test_typography_does_not_matter(reply, change, liberal):
    """In the reply as in the data: an accent in two characters, other quotes and hyphens, invisible
    characters.
    """
    text = ConnectionsGrader(TYPOGRAPHY).reference()
    assert ConnectionsGrader(TYPOGRAPHY, liberal)(reply(change(text)))[0] == 1.0
    groups = tuple(tuple(change(word).strip() for word in group) for group in TYPOGRAPHY)
    assert ConnectionsGrader(groups, liberal)(reply(text))[0] == 1.0


def test_accents_do_matter(reply):
    assert (
        ConnectionsGrader(TYPOGRAPHY)(
            reply(ConnectionsGrader(TYPOGRAPHY).reference().replace("É", "E"))
        )[0]
        == 0.75
    )


def test_words_with_odd_characters(reply):
    groups = (("'90S", "10%", "A (B)", "C.D"), *GROUPS[1:])
    groups = (groups[0], ("U.S.", "*STAR", "(ONE)", '"Q"'), *groups[2:])
    for liberal in (False, True):
        grader = ConnectionsGrader(groups, liberal)
        assert grader(reply(grader.reference()))[0] == 1.0


def test_long_replies(grade_long_replies):
    grade_long_replies(
        ConnectionsGrader(GROUPS, True), "1. ", "(" * 50 + "\n", "Group 1: ", "a, b\n"
    )


FORMS = {
    "members": {
        "id": 7,
        "answers": [{"level": 0, "group": "X", "members": list(group)} for group in GROUPS],
    },
    "words": {
        "id": 7,
        "words": ["a"] * 16,
        "answers": [{"answerDescription": "X", "words": list(group)} for group in GROUPS],
    },
    "lists": {"id": 7, "groups": [list(group) for group in GROUPS]},
    "themes": {"id": 7, "groups": {f"theme {i}": list(group) for i, group in enumerate(GROUPS)}},
    "json in csv": {"id": "7", "groups": json.dumps(GROUPS)},
    "lists in csv": {"id": "7", "groups": str([list(group) for group in GROUPS])},
    "by the game's first address": {
        "id": 7,
        "groups": {f"X{i}": {"level": i, "members": list(g)} for i, g in enumerate(GROUPS)},
    },
    "cards": {
        "id": 7,
        "categories": [
            {"title": "X", "cards": [{"content": w, "position": 1} for w in group]}
            for group in GROUPS
        ],
    },
    "values": {
        "id": 7,
        "answers": [{"level": 1, "key": "X", "values": list(group)} for group in GROUPS],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    (puzzle,) = read_puzzles([FORMS[form]], "x")
    assert (puzzle.id, puzzle.groups) == ("7", GROUPS)


def word_rows(count):
    return [
        {
            "Game ID": str(game),
            "Puzzle Date": "2023-06-12",
            "Word": word + "!" * game,
            "Group Name": "X",
            "Group Level": str(i),
        }
        | {"Starting Row": "1"}
        for game in range(1, count + 1)
        for i, group in enumerate(GROUPS)
        for word in group
    ]


def test_a_row_for_each_word(caplog):
    rows = word_rows(3)
    one, two, _ = read_puzzles(rows, "x")  # groups of one name and two levels are two
    assert (
        one.groups[0] == ("HAIL!", "RAIN!", "SLEET!", "SNOW!")
        and two.groups[3][3] == "RACE CAR!!"
        and not caplog.text
    )
    del rows[3]
    rows[20]["Word"] = None  # as pandas reads the word NA
    (three,) = read_puzzles(rows, "x")
    assert (
        three.id == "3"
        and "x: 2 of 3 games are left out because of missing words: ['1', '2']" in caplog.text
    )
    with pytest.raises(TaskError, match="x: words are missing in all of its 1 games"):
        read_puzzles(rows[:15], "x")
    rows[1].pop("Word")
    with pytest.raises(TaskError, match="x, row 2: no field 'Word' or 'word'"):
        read_puzzles(rows, "x")


def group_rows(*levels):
    return [
        {"level": n, "level_id": "🟡", "category": f"X{n}", "words": list(GROUPS[n - 1])}
        for n in levels
    ]


def test_boards(tmp_path, caplog):
    """As players made them: the board is JSON in a column, and not every game is one."""
    board = {
        f"theme {number}": {"level": number, "members": list(group)}
        for number, group in enumerate(GROUPS)
    }
    start = json.dumps([word for group in GROUPS for word in group])
    rows = [
        {
            "id": 7,
            "name": "mine",
            "createdAt": "2024-01-02",
            "board": json.dumps(board),
            "startingBoard": start,
        },
        {
            "id": 8,
            "name": "three",
            "createdAt": "2024-01-03",
            "board": json.dumps({**board, "theme 0": {"level": 0, "members": []}}),
        },
        {
            "id": 9,
            "name": "twice",
            "createdAt": "2024-01-04",
            "board": json.dumps({**board, "theme 0": board["theme 1"]}),
        },
    ]
    (puzzle,) = read_puzzles(rows, "games")
    assert (puzzle.id, puzzle.groups) == ("7", GROUPS)
    assert "games: 2 of 3 games are left out, such as: games, row 2" in caplog.text
    with pytest.raises(TaskError, match=r"games, row 1.*4 groups of 4 words"):
        read_puzzles(rows[1:], "games")
    path = tmp_path / "connections-games.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [task for split in ("train", "validation", "test") for task in split_of(path, split)]
    assert [task.id for task in tasks] == ["nyt-connections/7"]


def split_of(path, split):
    try:
        return get_nyt_connections_tasks(split, path=path)
    except TaskError:  # one puzzle is in one split
        return []


def test_a_row_for_each_group(caplog):
    one, two = read_puzzles(group_rows(1, 2, 3, 4, 1, 2, 3, 4), "x")
    assert (
        one.groups == two.groups == GROUPS
        and (one.id, two.id) == ("from row 1", "from row 5")
        and not caplog.text
    )
    (two,) = read_puzzles(group_rows(2, 3, 4, 1, 2, 3, 4), "x")
    assert two.id == "from row 4" and "1 of 2 games are left out" in caplog.text
    with pytest.raises(TaskError, match="x, row 1: no field 'level'"):
        read_puzzles([{"category": "X", "words": ["a"] * 4}], "x")


@pytest.mark.parametrize("kind", ["parquet", "csv", "json", "jsonl"])
@pytest.mark.parametrize("form", ["members", "cards", "row for each word", "row for each group"])
def test_files(tmp_path, kind, form):
    """Miniatures of what is shared, in every kind of file: each holds the same puzzle, which is in
    one of the splits.
    """
    rows = {"row for each word": word_rows(1), "row for each group": group_rows(1, 2, 3, 4)}.get(
        form
    ) or [FORMS[form]]
    path = tmp_path / f"puzzles.{kind}"
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            # As pandas does.
            writer.writerows(
                {k: str(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows
            )
    else:
        path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    tasks = []
    for split in ("train", "validation", "test"):
        tasks += get_nyt_connections_tasks(split, path=path)
    (task,) = tasks
    assert [[word.strip("!") for word in group] for group in task.grader.groups] == [
        list(group) for group in GROUPS
    ]


def test_commas_in_words(reply):
    (puzzle,) = read_puzzles([{"groups": [["A, B", *GROUPS[0][1:]], *GROUPS[1:]]}], "x")
    assert puzzle.groups[0][0] == "A B"
    grader = ConnectionsGrader(puzzle.groups)
    assert grader(reply(grader.reference()))[0] == 1.0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"a": 1}, "no field 'answers' or 'groups'"),
        ({"groups": 3}, "not iterable"),
        ({"groups": "x"}, "neither JSON nor Python's lists"),
        ({"groups": [["a"] * 4] * 4}, "no word twice"),
        ({"groups": GROUPS[:3]}, "give 4 groups"),
        ({"groups": ["abcd", "efgh", "ijkl", "mnop"]}, "a group is 'abcd'"),
        ({"groups": [[1, 2, 3, 4], *GROUPS[1:]]}, "a group is"),
        ({"groups": [{"theme": "x"}, *GROUPS[1:]]}, "no field 'members'"),
    ],
)
def test_bad_rows(tmp_path, row, words):
    (tmp_path / "x.json").write_text(json.dumps([FORMS["lists"], row]))
    with pytest.raises(TaskError, match=r"x\.json, row 2: .*" + words):
        get_nyt_connections_tasks(path=tmp_path / "x.json")


def test_splits(tmp_path, reply):
    rows = [
        {"id": i, "groups": [[f"{word}{i}" for word in group] for group in GROUPS]}
        for i in range(200)
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    splits = {
        split: get_nyt_connections_tasks(split, path=path)
        for split in ("train", "validation", "test")
    }
    assert (
        sum(map(len, splits.values()))
        == 200
        == len({task.id for tasks in splits.values() for task in tasks})
    )
    assert all(5 < len(splits[split]) < 50 for split in ("validation", "test"))
    for task in splits["train"][:20]:
        words = task.messages[0]["content"].split("\n\n")[1].split(", ")
        assert sorted(words) == sorted(word for group in task.grader.groups for word in group)
        assert task.grader(reply(", ".join(words).replace(", ", ",", 15)))[0] == 0.0
        assert task.grader(reply(task.grader.reference()))[0] == 1.0
    assert [t.id for t in get_nyt_connections_tasks("validation", 3, 9, path=path)] == [
        t.id for t in splits["validation"][:3]
    ]
    with pytest.raises(TaskError, match="split is 'dev'"):
        get_nyt_connections_tasks("dev", path=path)
