"""Rows from files, folders and the hub: all kinds read alike, and mistakes named by file and
row.
"""

import csv
import json
import os
import re
import subprocess
import sys
import types

import pytest
from support import os_calls
from support.packages import without

from ttrl.errors import TaskError
from ttrl.registries import FAMILIES
from ttrl.tasks.chess_moves import get_chess_tasks
from ttrl.tasks.datasets import RowError, list_field, load_rows, select, text_field

ROWS = [{"question": f"Ünits of {i}?", "choices": ["a", "b, c"], "answer": i} for i in range(3)]


def parse(row):
    return text_field(row, "question"), list_field(row, "choices"), int(row["answer"])


PARSED = [(row["question"], row["choices"], row["answer"]) for row in ROWS]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8-sig")
    elif path.suffix == ".csv":
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({**row, "choices": json.dumps(row["choices"])} for row in rows)
    else:
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_all_kinds_of_files(tmp_path, suffix):
    path = write(tmp_path / f"train.{suffix}", ROWS)
    assert (
        load_rows(path, parse)
        == load_rows(str(path), parse)
        == load_rows(tmp_path, parse, splits=("test", "train"))
        == PARSED
    )


def test_other_shapes_of_json(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps({f"id{i}": {k: v for k, v in row.items()} for i, row in enumerate(ROWS)})
    )
    assert load_rows(tmp_path / "a.json", parse) == PARSED
    assert load_rows(tmp_path / "a.json", lambda row: row["id"]) == ["id0", "id1", "id2"]
    folder = tmp_path / "training"
    folder.mkdir()
    for i, row in enumerate(ROWS):
        (folder / f"t{i}.json").write_text(json.dumps(row))
    assert load_rows(folder, parse) == load_rows(tmp_path, parse, splits=("training",)) == PARSED
    assert load_rows(folder, lambda row: row["id"]) == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "x.jsonl",
            '{"question": "a", "choices": [], "answer": 1}\n\n{"question": "a"',
            r"x\.jsonl, line 3: not JSON",
        ),
        (
            "x.jsonl",
            '{"question": "a"}\n',
            r"x\.jsonl, line 1: no field 'choices'; it has \['question'\]",
        ),
        (
            "x.jsonl",
            '{"question": "  "}',
            r"line 1: question is '  '; it must be a non-empty text",
        ),
        ("x.jsonl", '{"question": 3}', "line 1: question is 3"),
        ("x.jsonl", '{"question": "a", "choices": 3}', "line 1: choices is 3; it must be a list"),
        ("x.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("x.jsonl", "[1, 2]", r"line 1: \[1, 2\]; a row is an object"),
        ("x.jsonl", "", r"x\.jsonl: no rows"),
        ("x.json", "[]", r"x\.json: no rows"),
        ("x.json", '{"a": 1}', r"x\.json holds \{'a': 1\}"),
        ("x.json", "{", r"x\.json: not JSON"),
        ("x.csv", "question,choices,answer\na,[],1\nb,[\n", "row 2: its number of columns"),
        ("x.csv", "question,choices,answer\na,x,1\n", "row 1: choices is 'x'; .* write it as JSON"),
        (
            "x.csv",
            'question,choices,answer\na,[],1\nb,[],"2\nc,[],3\n',
            "cannot be read: unexpected end",
        ),
        ("x.parquet", "no parquet", r"x\.parquet: cannot be read"),
        ("x.txt", "a", "unknown file ending; use .jsonl"),
    ],
)
def test_damaged_files(tmp_path, name, content, words):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TaskError, match=words):
        load_rows(tmp_path / name, parse)


def test_long_fields_of_csv(tmp_path):
    rows = [{**ROWS[0], "question": "q" * size} for size in (200_000, 1, 2_000_000)]
    path = write(tmp_path / "x.csv", rows)
    assert [len(question) for question, _, _ in load_rows(path, parse)] == [200_000, 1, 2_000_000]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_other_encodings(tmp_path, suffix):
    (tmp_path / f"x.{suffix}").write_bytes('"é"'.encode("latin-1"))
    with pytest.raises(TaskError, match=rf"x\.{suffix}: cannot be read: .*utf-8"):
        load_rows(tmp_path / f"x.{suffix}", parse)


@pytest.mark.parametrize(
    "source", ["nothing.jsonl", "./nothing", "/nothing/at/all", "a/b/c", "", "a b"]
)
def test_no_such_source(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"is neither a file|no file \*\.json"):
        load_rows(source, parse)


def test_no_such_split_in_a_folder(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(
        TaskError, match=r"no file dev\.jsonl or val\.jsonl .*there are \['train\.jsonl'\]"
    ):
        load_rows(tmp_path, parse, splits=("dev", "val"))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("inner", ["", "data", "main"])
def test_parts_of_a_split(tmp_path, suffix, inner):
    """As copies of a data set on the hub have them, in the folder itself or in one of its own."""
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    for number, row in enumerate(ROWS):
        write(folder / f"train-{number:05}-of-00003.{suffix}", [row])
    write(folder / f"test-00000-of-00001-0123456789abcdef.{suffix}", ROWS[:1])
    found = load_rows(tmp_path, parse, splits=("train",), config="main")
    assert found == PARSED
    assert found.places[2].startswith(f"{folder}/train-00002-of-00003.{suffix}, ")
    assert load_rows(tmp_path, parse, splits=("test",), config="main") == PARSED[:1]
    with pytest.raises(TaskError, match=r"no file dev\.jsonl"):
        load_rows(tmp_path, parse, splits=("dev",), config="main")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["train-00000-of-00003", "train-00002-of-00003"],
            "train has the parts 0, 2; its names say 0-2",
        ),
        (
            ["train-00000-of-00001", "train-00001-of-00001"],
            "train has the parts 0-1; its names say 0",
        ),
        (["train-00000-of-00001", "train-00000-of-00002"], "it has parts of several sets"),
        (
            ["train-00000-of-00001-aa", "train-00000-of-00001-bb"],
            "it has parts of several sets",
        ),
    ],
)
def test_parts_that_make_no_whole(tmp_path, names, words):
    for name in names:
        write(tmp_path / f"{name}.jsonl", ROWS)
    with pytest.raises(TaskError, match=words):
        load_rows(tmp_path, parse, splits=("train",))


@pytest.fixture
def hub(monkeypatch):
    def load_dataset(name, config, split):
        if name == "a/broken":
            raise ConnectionError("no route\nmany lines")
        assert (name, config, split) == ("a/b", "main", "train")
        return ROWS

    fake = types.SimpleNamespace(
        load_dataset=load_dataset, get_dataset_split_names=lambda name, config: ["train", "test"]
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    proxies = [name for name in os.environ if name.lower().endswith("_proxy")]
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", *proxies):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://localhost/mirror")
    asked = []

    def look_up(name, port, *_):
        asked.append((name, port))
        if name != "localhost":
            raise OSError("Name or service not known")

    with os_calls.before("socket.getaddrinfo", look_up):
        yield asked


def test_no_way_to_the_hub(hub, monkeypatch):
    """Its own client would try again and again for half a minute; a cache (offline) or a proxy does
    without the address.
    """
    load_rows("a/b", parse, splits=("train",), config="main")
    assert hub == [("localhost", 443)]
    monkeypatch.delenv("HF_ENDPOINT")
    with pytest.raises(
        TaskError,
        match=r"a/b \(main\): the Hugging Face hub cannot be reached: huggingface\.co: Name .* "
        "HF_HUB_OFFLINE=1",
    ):
        load_rows("a/b", parse, splits=("train",), config="main")
    assert hub[1:] == [("huggingface.co", 443)]
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert load_rows("a/b", parse, splits=("train",), config="main") == PARSED
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert load_rows("a/b", parse, splits=("train",), config="main") == PARSED


def test_the_hub(hub):
    assert load_rows("a/b", parse, splits=("validation", "train"), config="main") == PARSED
    with pytest.raises(
        TaskError, match=re.escape("a/b (main): no split 'dev'; there are ['train', 'test']")
    ):
        load_rows("a/b", parse, splits=("dev",), config="main")
    with pytest.raises(
        TaskError,
        match=r"a/broken: cannot be loaded .* ConnectionError: no route\. Without a network",
    ):
        load_rows("a/broken", parse, splits=("train",))

    def refuse(row):
        raise RowError("no good")

    with pytest.raises(TaskError, match=re.escape("a/b (main), train, row 1: no good")):
        load_rows("a/b", refuse, splits=("train",), config="main")


def test_places_stay_with_their_rows(tmp_path):
    rows = load_rows(write(tmp_path / "x.jsonl", ROWS), parse).where(lambda row: row[2] != 1)
    assert (rows, rows.places) == (
        PARSED[::2],
        [f"{tmp_path}/x.jsonl, line 1", f"{tmp_path}/x.jsonl, line 3"],
    )


def test_a_question_is_asked_once_and_other_answers_are_named(tmp_path, caplog):
    """In verl#3065 a training file held each question a hundred times, some with several
    answers.
    """
    rows = [{**ROWS[0], "answer": answer} for answer in (7, 7, 8)] + [
        ROWS[1],
        {**ROWS[1], "choices": []},
    ]
    found = load_rows(write(tmp_path / "x.jsonl", rows), parse)

    def chosen(rows, **options):
        return select(rows, lambda row: row[0], "test", None, 0, "sums", held_out=False, **options)

    assert sorted(chosen(found, answer=lambda row: row[2])) == sorted([found[0], found[3]])
    assert caplog.messages == [
        "sums: 3 rows left out, repeating an earlier question; 1 of them with another answer; the "
        f"first answer counts: {tmp_path}/x.jsonl, line 3: 8 against {tmp_path}/x.jsonl, line 1: 7"
    ]
    caplog.clear()
    assert len(chosen(found[:2])) == 1  # a list without places
    assert caplog.messages == ["sums: 1 row left out, repeating an earlier question"]
    caplog.clear()
    many = [("q", number) for number in range(9)]
    assert chosen(many) == [("q", 0)]
    assert caplog.text.endswith("row 6: ('q', 5) against row 1: ('q', 0); and 3 more\n")
    caplog.clear()
    assert len(chosen(many, question=lambda row: row)) == 9 and not caplog.messages


CONNECTIONS = [
    ["a", "b", "c", "d"],
    ["e", "f", "g", "h"],
    ["i", "j", "k", "l"],
    ["m", "n", "o", "p"],
]
SWAPPED = [["e", "b", "c", "d"], ["a", "f", "g", "h"], *CONNECTIONS[2:]]
PAIR = {"input": [[1]], "output": [[2]]}
OTHER = {"input": [[1]], "output": [[3]]}
TABLE = {"header": ["House", "Name"], "rows": [["1", "Ada"], ["2", "Ben"]]}
OTHER_TABLE = {"header": ["House", "Name"], "rows": [["1", "Ben"], ["2", "Ada"]]}
HUMANEVAL = {"prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    pass"}
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


@pytest.mark.parametrize(
    ("function", "row", "other"),
    [
        ("gsm8k:get_gsm8k_tasks", {"question": "1 + 1?", "answer": "#### 2"}, {"answer": "#### 3"}),
        (
            "multiple_choice:get_mmlu_tasks",
            {"question": "Q?", "choices": ["a", "b"], "answer": 0},
            {"answer": 1},
        ),
        (
            "multiple_choice:get_arc_tasks",
            {"question": "Q?", "choices": ["a", "b"], "answer": 0},
            {"answer": 1},
        ),
        ("arc_agi:get_arc_agi_tasks", {"train": [PAIR], "test": [PAIR]}, {"test": [OTHER]}),
        (
            "nyt_connections:get_nyt_connections_tasks",
            {"answers": CONNECTIONS},
            {"answers": SWAPPED},
        ),
        (
            "chess_moves:get_chess_tasks",
            {"fen": START, "best_move_uci": "e2e4"},
            {"best_move_uci": "d2d4"},
        ),
        (
            "humaneval:get_humaneval_tasks",
            {**HUMANEVAL, "test": "def check(f): 1"},
            {"test": "def check(f): 0"},
        ),
        (
            "temporal_clue:get_temporal_clue_tasks",
            {"prompt": "?", "solution": {"A": "x"}},
            {"solution": {"A": "y"}},
        ),
        (
            "zebra_grid:get_zebra_grid_tasks",
            {"puzzle": "?", "solution": TABLE},
            {"solution": OTHER_TABLE},
        ),
    ],
)
def test_families_ask_a_question_once(tmp_path, caplog, monkeypatch, function, row, other):
    """Also under other names, and with the words of a puzzle in another order."""
    module, _, name = function.partition(":")
    family = pytest.importorskip(f"ttrl.tasks.{module}")
    if module == "humaneval":
        monkeypatch.setattr("ttrl.tasks.humaneval.tasks.why_not", lambda: None)
    rows = [
        {**row, **change, "id": str(i), "task_id": f"t/{i}"}
        for i, change in enumerate([{}, {}, other])
    ]
    path = write(tmp_path / "x.jsonl", rows)
    splits = ["test"] if module in ("multiple_choice", "humaneval") else ["train", "validation"]
    splits = ["train", "validation", "test"] if module == "nyt_connections" else splits
    tasks = [task for split in splits for task in getattr(family, name)(split, None, path=path)]
    assert len(tasks) == 1
    assert (
        "2 rows left out, repeating an earlier question; 1 of them with another answer"
        in caplog.text
    )
    for place in ("line 1", "line 3") if module != "nyt_connections" else ("game 0", "game 2"):
        assert f"{path}, {place}: " in caplog.text


def test_no_package(tmp_path):
    code = "from ttrl.tasks.datasets import load_rows\nload_rows('a/b', str, splits=('train',))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=without(tmp_path, "datasets"),
        capture_output=True,
        text=True,
    )
    assert "TaskError: a/b: data sets of the Hugging Face hub need the package datasets: pip " in (
        done.stderr
    )


def test_select():
    rows = [str(i) for i in range(1000)]

    def chosen(split, n=None, seed=0, held_out=True):
        return select(rows, str, split, n, seed, "numbers", held_out=held_out)

    train, validation = chosen("train"), chosen("validation")
    assert sorted(train + validation) == sorted(rows)
    assert 43 < len(validation) < 157  # 100, six standard deviations of 9.5; and the same for ever
    assert chosen("train", 5) == train[:5] != chosen("train", 5, seed=1)
    assert chosen("validation", 5, seed=3) == validation[:5]
    assert sorted(chosen("test", held_out=False)) == sorted(rows)
    assert train[:3] == ["751", "867", "469"]  # the same in every version
    rows += rows[:500]
    assert chosen("train") == train and chosen("validation") == validation


NO_NUMBERS = ("", "3", None, [], [1], {}, object(), float("nan"), float("inf"), 10**400)
NO_WHOLE = (*NO_NUMBERS[:-1], 1.5, -1, True)
NO_LISTS = (5, 1.5, "Algebra", b"x", [None], [[1]], object(), len)


@pytest.mark.parametrize(
    ("family", "option", "values"),
    [
        ("gsm8k", "format_reward", NO_NUMBERS),
        ("arc_agi", "augment", NO_LISTS),
        ("arc_agi", "max_cells", [value for value in NO_WHOLE if value is not None]),
        ("arc_agi", "partial_credit", NO_NUMBERS),
        ("countdown", "largest", (*NO_WHOLE, 10**400)),
        ("countdown", "largest_target", NO_WHOLE),
        ("countdown", "max_numbers", NO_WHOLE),
        ("countdown", "min_numbers", NO_WHOLE),
        ("countdown", "n", (*NO_WHOLE, 10**9)),
        ("gsm8k", "few_shot", NO_WHOLE),
        ("humaneval", "limits", (5, "x", {})),
        ("letter_counting", "length_exponent", (*NO_NUMBERS, 10**9)),
        ("letter_counting", "max_length", NO_WHOLE),
        ("letter_counting", "min_length", NO_WHOLE),
        ("math", "levels", NO_LISTS),
        ("math", "subjects", NO_LISTS),
        ("mmlu", "subjects", NO_LISTS),
        ("sort_letters", "length_exponent", (*NO_NUMBERS, 10**9)),
        ("sort_letters", "max_length", NO_WHOLE),
        ("spelling", "min_length", NO_WHOLE),
        ("spelling", "path", (5, 1.5, [], b"x", "a\0b", object())),
        ("temporal_clue", "path", (5, 1.5, [], b"x", object())),
        ("temporal_clue", "power", (*NO_NUMBERS, 0, -1)),
        ("temporal_clue", "size", (5, "x", {}, object())),
        ("zebra_grid", "houses", [value for value in NO_WHOLE if value is not None]),
        ("zebra_grid", "path", (5, 1.5, [], b"x", object())),
    ],
)
def test_nonsense_for_an_option_is_named(family, option, values, tmp_path):
    make = FAMILIES.load(family, FAMILIES[family].tasks)
    data = {} if FAMILIES[family].data is None else {"path": tmp_path / "not_here.jsonl"}
    for value in values:
        with pytest.raises(TaskError, match=rf"\b{option}|cannot be read"):
            make(**{"n": 1, **data, option: value})


def test_a_judge_of_chess_is_a_function(tmp_path):
    with pytest.raises(TaskError, match="judge is 5; give a function"):
        get_chess_tasks("test", path=tmp_path / "not_here.jsonl", judge=5)
