"""Rows from files, folders and the hub: all kinds read alike, and mistakes named by file and row."""

import csv
import json
import os
import re
import sys
import types

import pytest

from ttrl.errors import TaskError
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
    assert load_rows(path, parse) == load_rows(str(path), parse) == load_rows(tmp_path, parse, splits=("test", "train")) == PARSED


def test_other_shapes_of_json(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({f"id{i}": {k: v for k, v in row.items()} for i, row in enumerate(ROWS)}))
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
        ("x.jsonl", '{"question": "a", "choices": [], "answer": 1}\n\n{"question": "a"', r"x\.jsonl, line 3: not JSON"),
        ("x.jsonl", '{"question": "a"}\n', r"x\.jsonl, line 1: no field 'choices'; it has \['question'\]"),
        ("x.jsonl", '{"question": "  "}', r"line 1: question is '  '; it must be a text that is not empty"),
        ("x.jsonl", '{"question": 3}', "line 1: question is 3"),
        ("x.jsonl", '{"question": "a", "choices": 3}', "line 1: choices is 3; it must be a list"),
        ("x.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("x.jsonl", "[1, 2]", r"line 1: \[1, 2\]; a row is an object"),
        ("x.jsonl", "", r"x\.jsonl: no rows"),
        ("x.json", "[]", r"x\.json: no rows"),
        ("x.json", '{"a": 1}', r"x\.json: it holds \{'a': 1\}"),
        ("x.json", "{", r"x\.json: not JSON"),
        ("x.csv", "question,choices,answer\na,[],1\nb,[\n", "row 2: it has not as many columns"),
        ("x.csv", "question,choices,answer\na,x,1\n", "row 1: choices is 'x'; .* written as JSON"),
        ("x.csv", "question,answer\n" + "a" * 200_000 + ",1\n", "cannot be read"),
        ("x.parquet", "no parquet", r"x\.parquet: cannot be read"),
        ("x.txt", "a", "files ending in .jsonl"),
    ],
)
def test_damaged_files(tmp_path, name, content, words):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TaskError, match=words):
        load_rows(tmp_path / name, parse)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_other_encodings(tmp_path, suffix):
    (tmp_path / f"x.{suffix}").write_bytes('"é"'.encode("latin-1"))
    with pytest.raises(TaskError, match=rf"x\.{suffix}: cannot be read: .*utf-8"):
        load_rows(tmp_path / f"x.{suffix}", parse)


@pytest.mark.parametrize("source", ["nothing.jsonl", "./nothing", "/nothing/at/all", "a/b/c", "", "a b"])
def test_no_such_source(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"no such file or folder, and no id|no file \*\.json"):
        load_rows(source, parse)


def test_no_such_split_in_a_folder(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(TaskError, match=r"no file dev\.jsonl or val\.jsonl .*there are \['train\.jsonl'\]"):
        load_rows(tmp_path, parse, splits=("dev", "val"))


@pytest.fixture
def hub(monkeypatch):
    def load_dataset(name, config, split):
        if name == "a/broken":
            raise ConnectionError("no route\nmany lines")
        assert (name, config, split) == ("a/b", "main", "train")
        return ROWS

    fake = types.SimpleNamespace(load_dataset=load_dataset, get_dataset_split_names=lambda name, config: ["train", "test"])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    proxies = [name for name in os.environ if name.lower().endswith("_proxy")]
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", *proxies):
        monkeypatch.delenv(name, raising=False)
    asked = []

    def look_up(*address):
        asked.append(address)
        if address[0] == "hub.local":
            raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    return asked


def test_no_way_to_the_hub(hub, monkeypatch):
    """Its own client would try again and again for half a minute; a cache (offline) or a proxy does without the address."""
    load_rows("a/b", parse, splits=("train",), config="main")
    assert hub == [("huggingface.co", 443)]
    with pytest.raises(TaskError, match=r"a/b \(main\): no way to the Hugging Face hub: hub\.local: Name .* HF_HUB_OFFLINE=1"):
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.local/mirror")
        load_rows("a/b", parse, splits=("train",), config="main")
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert load_rows("a/b", parse, splits=("train",), config="main") == PARSED
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert load_rows("a/b", parse, splits=("train",), config="main") == PARSED


def test_the_hub(hub):
    assert load_rows("a/b", parse, splits=("validation", "train"), config="main") == PARSED
    with pytest.raises(TaskError, match=re.escape("a/b (main): no split 'dev'; there are ['train', 'test']")):
        load_rows("a/b", parse, splits=("dev",), config="main")
    with pytest.raises(TaskError, match=r"a/broken: cannot be loaded .* ConnectionError: no route\. Without a network"):
        load_rows("a/broken", parse, splits=("train",))

    def refuse(row):
        raise RowError("no good")

    with pytest.raises(TaskError, match=re.escape("a/b (main), train, row 1: no good")):
        load_rows("a/b", refuse, splits=("train",), config="main")


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"need the package datasets: pip install 'ttrl\[tasks\]'"):
        load_rows("a/b", parse, splits=("train",))


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
