"""`ttrl view`: finds packs, writes pages and pictures, and says what is wrong in a line."""

import json
import math
import re
from pathlib import Path

import pytest

from ttrl.cli import main
from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import TokenizedResult
from ttrl.report.view import open_pack
from ttrl.run_folder.token_text import folder_token_text


def save_pack(path: Path, tasks: int = 2, seq_len: int = 16) -> None:
    """Rows with one task each: prompt H e y, answers `a` and `b !`."""
    results = [
        TokenizedResult(
            task_id=f"t{task}",
            sample=number,
            token_ids=[39, 68, 88, *answer],
            assistant_mask=[False] * 3 + [True] * len(answer),
            input_pos=list(range(3 + len(answer))),
            logprobs=[math.nan] * 3 + [-0.5] * len(answer),
            prompt_length=3,
            reward=1.0,
            advantage=(1.0, -1.0)[number],
        )
        for task in range(tasks)
        for number, answer in enumerate(([64] * 7, [65, 0] * 3))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    packed_tensors_from_tokenized_results(results, seq_len=seq_len, pad_id=0, share="prompt").save(
        path
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Iterations 0 to 3; packs in 1 and 3; a tokenizer in the checkpoint of 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "runs" / "mine"
    for number in range(4):
        (folder / "iterations" / f"{number:04d}" / "done").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 0}) + "\n", encoding="utf-8")
    for number in (1, 3):
        save_pack(folder / "iterations" / f"{number:04d}" / "packed.safetensors", tasks=number + 9)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "iterations" / "0000" / "checkpoint").mkdir()
    tokenizer.save(str(folder / "iterations" / "0000" / "checkpoint" / "tokenizer.json"))
    return folder


def data_of(path: Path) -> dict:
    page = path.read_text(encoding="utf-8")
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    )


def test_the_newest_pack_becomes_a_page_beside_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run)]) == 0
    out, err = capsys.readouterr()
    path = run / "iterations" / "0003" / "packed.html"
    assert out == f"{path}\n" and path.is_file()
    assert re.fullmatch(r"\(0\.0\d MB, rows 0-7 of \d+\)\n", err)
    data = data_of(path)
    assert [row["row"] for row in data["rows"]] == list(range(8))
    assert dict(zip(data["ids"], data["texts"], strict=True))[39] == "H"
    assert not list(path.parent.glob(".partial-*"))


@pytest.mark.parametrize("option", ["--pack", "--iteration"])
def test_iteration_rows_and_output_are_chosen(run: Path, tmp_path: Path, option: str) -> None:
    path = tmp_path / "elsewhere" / "page.html"
    assert main(["view", str(run), option, "1", "--rows", "4-5, 0,4", "--output", str(path)]) == 0
    assert [row["row"] for row in data_of(path)["rows"]] == [4, 5, 0]
    assert "mine, iteration 1" in path.read_text(encoding="utf-8")
    assert not (run / "iterations" / "0001" / "packed.html").exists()


def test_text_is_printed_and_nothing_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run), "--pack", "1", "--text", "--rows", "0"]) == 0
    out = capsys.readouterr().out
    assert "mine, iteration 1" in out and "yaaaaaa[a]" in out and "\x1b" not in out
    assert not list(run.rglob("*.html"))


def test_a_picture_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.png"
    assert main(["view", str(run), "--rows", "0-1", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out == f"{path}\n"
    assert not list(run.rglob("*.html"))


def test_a_pack_may_be_given_by_itself(run: Path, tmp_path: Path) -> None:
    inside = run / "iterations" / "0001" / "packed.safetensors"
    assert open_pack(inside).token_text(39) == "H"  # the run's
    alone = tmp_path / "alone.safetensors"
    save_pack(alone)
    assert open_pack(alone).token_text is None
    assert (
        open_pack(alone, tokenizer=run / "iterations" / "0000" / "checkpoint").token_text(68) == "e"
    )
    assert main(["view", str(alone)]) == 0
    assert data_of(tmp_path / "alone.html")["texts"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], r"nowhere is not a run folder: it does not exist"),
        (["RUN", "--pack", "7"], r"mine has no iteration 7; iterations: 0-3; packs: 1, 3"),
        (
            ["RUN", "--pack", "2"],
            r"mine: iteration 2 has no packed.safetensors \(not packed yet, .*\); packs: 1, 3",
        ),
        (
            ["RUN", "--pack", "0"],
            r"iteration 0 has no packed.safetensors \(it is the model before training\); packs: "
            r"1, 3",
        ),
        (
            ["RUN", "--pack", "1", "--rows", "8-99"],
            r"--rows 8-99: no row 8-99; this pack has rows 0 to 9",
        ),
        (
            ["RUN", "--rows", "one"],
            r"--rows 'one': 'one' is neither a row nor a range; give one such as 3, 0-7 or 0-3,8",
        ),
        (["RUN", "--rows", "3-1"], r"--rows 3-1: no row 3-1;"),
        (["RUN", "--tokenizer", "RUN"], r"tokenizer.json: no tokenizer can be read from it"),
        (
            ["RUN/iterations/0001/packed.safetensors", "--pack", "1"],
            r"is a single pack; to choose iteration 1, give the run folder",
        ),
        (["RUN/other.safetensors"], r"other.safetensors does not exist"),
        (
            ["DAMAGED"],
            r"packed.safetensors cannot be read as safetensors .* damaged or incomplete, pack "
            r"again",
        ),
        (["EMPTY"], r"empty: no iteration has a packed.safetensors"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    run: Path,
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = tmp_path / "damaged" / "iterations" / "0001" / "packed.safetensors"
    if arguments == ["DAMAGED"]:
        save_pack(damaged)
        damaged.write_bytes(damaged.read_bytes()[:300])
    (tmp_path / "empty" / "iterations").mkdir(parents=True)
    names = {"RUN": run, "DAMAGED": tmp_path / "damaged", "EMPTY": tmp_path / "empty"}
    given = [
        re.sub(r"^(RUN|DAMAGED|EMPTY)", lambda match: str(names[match[1]]), one)
        for one in arguments
    ]
    assert main(["view", *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ttrl: error: ") and err.count("\n") == 1
    assert re.search(expected, err), err


def test_tokens_that_are_no_text_of_their_own(run: Path) -> None:
    text = folder_token_text(run / "iterations" / "0000" / "checkpoint")
    assert text(0) == "!" and text(220) == " " and text(198) == "\n"
    # Bytes of longer characters.
    assert {text(number) for number in range(94, 188)} >= {"⟨C3⟩", "⟨A1⟩"}
    assert text(999) == "⟨no token 999⟩"
