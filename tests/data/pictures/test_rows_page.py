"""The page of packed rows and its text form: is everything on it, once and right, and can no token
do harm?
"""

import base64
import hashlib
import html
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ttrl.data.packing.pack import (
    IGNORE_LABEL,
    PackedTensors,
    packed_tensors_from_tokenized_results,
    unpack,
)
from ttrl.data.pictures.rows_page import packed_rows_html
from ttrl.data.pictures.rows_text import packed_rows_text
from ttrl.data.pictures.segments import figures_of, figures_of_pack, segments_of, visible
from ttrl.errors import PackError
from ttrl.records import TokenizedResult

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "\"'&amp;",
    "\x00\x1b[2J\r",
    "\u202e\u200b",
    "\ud800",
    "\u2028",
    "{{",
    "{{ data }}{% raw %}",
]


def result(
    task: str, number: int, prompt: list[int], completion: list[int], advantage: float = 0.0
) -> TokenizedResult:
    length = len(prompt) + len(completion)
    return TokenizedResult(
        task_id=task,
        sample=number,
        token_ids=prompt + completion,
        assistant_mask=[False] * len(prompt) + [True] * len(completion),
        input_pos=list(range(length)),
        logprobs=[math.nan] * len(prompt) + [-0.125 * (1 + i) for i in range(len(completion))],
        prompt_length=len(prompt),
        reward=0.5,
        advantage=advantage,
        weights_version=4,
        finish_reason="stop",
    )


@pytest.fixture
def tree() -> PackedTensors:
    """A tree of three levels (10 tokens for all, 10 more for three, a prompt for two of those), and
    a row of padding.
    """
    system, question = list(range(100, 110)), list(range(110, 120))
    results = [
        result("a", 0, system + question + [30, 31], [1, 2, 3], 1.5),
        result("a", 1, system + question + [30, 31], [4], -3.0),
        result("b", 0, system + question + list(range(40, 50)), [5, 6], 0.0),
        result("c", 0, system + list(range(60, 70)), [7, 8, 9], 0.25),
    ]
    return packed_tensors_from_tokenized_results(
        results, seq_len=128, pad_id=0
    ).pad_rows_to_multiple(2)


def data_of(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def spread(runs: list[Any]) -> list[Any]:
    return [value for value, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def labels_of(row: dict[str, Any], data: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By position: what the page says of its label, read as its script reads it."""
    stops = {stop: label for _, _, _, _, stop, _, _, _, label in row["segments"]}
    places = [
        at
        for begin, stop in zip(row["trained"][::2], row["trained"][1::2], strict=True)
        for at in range(begin, stop)
    ]
    values = zip(
        spread(row["advantages"]),
        spread(row["weights"]),
        spread(row["versions"]),
        row["logprobs"],
        strict=True,
    )
    found = {}
    for at, (advantage, weight, version, logprob) in zip(places, values, strict=True):
        label = stops[at + 1] if at + 1 in stops else row["tokens"][at + 1]
        assert at not in found
        found[at] = {
            "label": data["ids"][label],
            "advantage": advantage,
            "weight": weight,
            "version": version,
            "logprob": None if logprob is None else logprob * data["logprobUnit"],
        }
    return found


def assert_page_equals(page: str, packed: PackedTensors, rows: list[int]) -> None:
    data = data_of(page)
    assert [row["row"] for row in data["rows"]] == rows
    for values, row in zip(data["rows"], rows, strict=True):
        used = len(values["tokens"])
        assert [data["ids"][one] for one in values["tokens"]] == packed.tokens[row, :used].tolist()
        assert (packed.group_ids[row, used:] == -1).all()
        groups = [
            group for group, one in enumerate(values["segments"]) for _ in range(one[3], one[4])
        ]
        parents = [one[0] for one in values["segments"] for _ in range(one[3], one[4])]
        samples = [one[6] for one in values["segments"] for _ in range(one[3], one[4])]
        positions = [one[7] + at for one in values["segments"] for at in range(one[4] - one[3])]
        assert (
            groups == packed.group_ids[row, :used].tolist()
            and parents == packed.parent_ids[row, :used].tolist()
        )
        assert (
            samples == packed.sample_ids[row, :used].tolist()
            and positions == packed.input_pos[row, :used].tolist()
        )
        assert {str(one) for one in samples if one >= 0} <= data["samples"].keys()
        found = labels_of(values, data)
        trained = (packed.labels[row] != IGNORE_LABEL).nonzero().flatten().tolist()
        assert list(found) == trained
        for at in trained:
            one = found[at]
            assert (
                one["label"] == packed.labels[row, at]
                and one["version"] == packed.weights_version[row, at]
            )
            assert one["advantage"] == pytest.approx(packed.advantages[row, at].item(), rel=1e-5)
            assert one["weight"] == pytest.approx(packed.weights[row, at].item(), rel=1e-5)
            logprob = packed.logprobs[row, at].item()
            assert (
                one["logprob"] is None
                if math.isnan(logprob)
                else abs(one["logprob"] - logprob) <= 0.51e-4
            )


def test_every_position_and_every_label_is_on_the_page_once(tree: PackedTensors) -> None:
    page = packed_rows_html(tree, [1, 0])
    assert_page_equals(page, tree, [1, 0])
    data = data_of(page)
    assert data["texts"] is None and data["largest"] == 3.0
    assert [one[1] for one in data["rows"][1]["segments"]] == [0, 1, 2, 3, 3, 2, 1]  # depths
    assert data["samples"]["1"] == ["a", 1, 0.5, -3.0, "stop"]
    assert "2 rows of 128 positions" in page and "padding alone" in page
    assert len(data["colours"]["light"][0]) == 4


def test_figures_of_a_row_and_of_the_pack(tree: PackedTensors) -> None:
    figures = figures_of(tree, 0, segments_of(tree, 0))
    alone = sum(len(one.token_ids) - 1 for one in unpack(tree))
    assert (figures.samples, figures.trees, figures.trained) == (4, 1, 9)
    assert figures.saved == alone - figures.tokens > 30
    whole = figures_of_pack(tree)
    assert (whole.tokens, whole.saved, whole.positions, whole.trees) == (
        figures.tokens,
        figures.saved,
        256,
        1,
    )
    ends = [(one.begin, one.stop, one.end) for one in segments_of(tree, 0)]
    assert ends[0][2] == figures.tokens and ends[1][2] == ends[-1][0] and ends[2][2] == ends[4][1]


def test_random_packs_are_on_the_page_as_they_are() -> None:
    chance = random.Random(0)
    for _ in range(20):
        prompts = [[chance.randrange(3) for _ in range(chance.randrange(1, 30))] for _ in range(4)]
        results = [
            result(
                f"t{task}",
                number,
                prompt,
                [chance.randrange(9) for _ in range(chance.randrange(1, 9))],
                chance.gauss(0, 1),
            )
            for task, prompt in enumerate(prompts)
            for number in range(chance.randrange(1, 5))
        ]
        packed = packed_tensors_from_tokenized_results(
            results, seq_len=48, pad_id=0, aggregation="sequence", shortest_shared=1
        )
        assert_page_equals(
            packed_rows_html(packed, range(packed.num_rows)), packed, list(range(packed.num_rows))
        )
        figures = [
            figures_of(packed, row, segments_of(packed, row)) for row in range(packed.num_rows)
        ]
        whole = figures_of_pack(packed)
        for name in ("tokens", "trained", "samples", "trees", "saved", "padding"):
            assert getattr(whole, name) == sum(getattr(one, name) for one in figures)


def test_reference_and_unknown_logprobs(tree: PackedTensors) -> None:
    assert data_of(packed_rows_html(tree, [0]))["rows"][0]["reference"] is None
    tree.logprobs[tree.labels == 2] = math.nan
    tree.reference_logprobs = tree.logprobs - 0.5
    values = data_of(packed_rows_html(tree, [0]))["rows"][0]
    assert None in values["logprobs"] and -1250 in values["logprobs"]
    assert [r for r in values["reference"] if r is not None] == [
        v - 5000 for v in values["logprobs"] if v is not None
    ]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup_or_control(tree: PackedTensors, text: str) -> None:
    for sample in tree.samples:
        sample.task_id, sample.finish_reason = text, text
    plain = packed_rows_html(tree, [0], str, "title")
    page = packed_rows_html(tree, [0], lambda token: text, text)
    page.encode("utf-8")
    assert re.findall(r"</?[a-z]+", page, re.IGNORECASE) == re.findall(
        r"</?[a-z]+", plain, re.IGNORECASE
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029\u200b\u202e]", page)
    data = data_of(page)
    assert set(data["texts"]) == {visible(text)} and data["samples"]["0"][0] == visible(text)
    assert html.unescape(re.search(r"<h1>(.*)</h1>", page)[1]) == visible(text)
    shown = packed_rows_text(tree, [0], lambda token: text, text)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u2028\u2029\u200b\u202e\ud800]", shown)


def test_the_page_loads_nothing_and_allows_its_own_script_alone(tree: PackedTensors) -> None:
    page = packed_rows_html(tree, [0])
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    policy = html.unescape(
        re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not re.search(
        r"https?:|//cdn|@import|url\(|innerHTML|outerHTML|insertAdjacent|eval\(|\ssrc=|\shref=",
        page,
    )
    assert not re.search(r"{{ (title|data|script|style)", page)


def test_a_page_is_small_and_says_when_it_would_not_be() -> None:
    results = [result(f"t{n}", 0, [1, 2], [n % 7 for n in range(4000)], 1.0) for n in range(4)]
    packed = packed_tensors_from_tokenized_results(results, seq_len=8192, pad_id=0)
    page = packed_rows_html(packed, range(packed.num_rows))
    assert len(page) < 16_000 * 11 + 60_000
    assert page.count("<") < 300  # no element for any token
    with pytest.raises(
        PackError,
        match=r"2 rows with 16,\d+ tokens make a page of up to 0 MB.*choose about 1 rows",
    ):
        packed_rows_html(packed, [0, 1], most_bytes=150_000)
    with pytest.raises(PackError, match="row 2, 7 of 2 rows; give rows from 0 to 1"):
        packed_rows_html(packed, [2, 0, 7])


def test_the_text_form_has_a_line_for_each_segment(tree: PackedTensors) -> None:
    text = packed_rows_text(tree, [0, 1], lambda token: f"<{token}>", "here", width=110)
    lines = text.split("\n")
    assert lines[0] == "here" and "row 1: 128 positions, padding alone" in text
    assert max(map(len, lines)) <= 110
    body = [line for line in lines if re.match(r" *[0-9] ", line)]
    assert [len(line) - len(line.lstrip()) for line in body] == [0, 2, 4, 6, 6, 4, 2]  # depths
    assert [line.split()[0] for line in body] == list("0123456")
    assert body[4].split()[1:] == ["2", "24-24", "100%", "-3.00", "<31>[<4>]"]
    assert body[0].split()[1:4] == ["–", "0-8", "–"]
    ids = packed_rows_text(tree, [0], width=60)
    assert "31[4]" in ids and " … " in ids and max(map(len, ids.split("\n"))) <= 85


def test_what_cannot_be_seen_is_made_visible() -> None:
    assert visible("plain té\u6587 😀") == "plain té\u6587 😀"
    assert visible("a\n\t\x00\x7f\u00a0\u202e\ud800") == "a↵⇥␀␡\u00a0⟨202e⟩⟨d800⟩"


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.long(but=["0:24-expected1"])
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (
            "0:0",
            [
                "“<100>” (id 100)",
                "row 0, position 0 · position 0 in the sample",
                "group 0, a root",
                "shared by 4 samples",
            ],
        ),
        (
            "0:24",
            [
                "“<31>” (id 31)",
                "row 0, position 24 · position 21 in the sample",
                "group 4, path 0 › 1 › 2 › 4",
                "task a, sample 1 · reward 0.5 · ended by stop",
                "predicts “<4>” (id 4), the sample’s last",
                "advantage −3.000 · logprob −0.125 (p = 0.882)",
                "weight 1 · policy 4",
            ],
        ),
        ("1:5", ["padding", "row 1, positions 0 to 127"]),
    ],
)
def test_a_browser_shows_what_is_known_of_a_token(
    tree, tmp_path: Path, place: str, expected: list[str]
) -> None:
    """Long for the other tokens: only these lie in a prompt and in a second row."""
    path = tmp_path / "page.html"
    path.write_text(packed_rows_html(tree, [0, 1], lambda token: f"<{token}>"), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
    ]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}#{place}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    dom = done.stdout
    if done.returncode or 'id="info"' not in dom:  # some are walled off from /tmp
        pytest.skip(f"{BROWSER} cannot open a file here (exit code {done.returncode})")
    info = html.unescape(
        re.sub(
            r"<b>(.*?)</b>",
            r"\1\n",
            re.search(r'<div id="info"[^>]*>(.*?)</div>', dom, re.DOTALL)[1],
        )
    )
    assert info.split("\n")[: len(expected)] == expected
    # The last labels, dashed.
    assert len(re.findall(r"<span[^>]*data-at", dom)) == tree.num_tokens + len(tree.samples)
