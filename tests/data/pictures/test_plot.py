"""Pictures: that they show what is in the tensors, and say what they leave out."""

import html
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from ttrl.data.packing.pack import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.data.pictures.plot import plot_packed_tensors
from ttrl.data.pictures.rows_page import packed_row_html
from ttrl.errors import PackError
from ttrl.records import TokenizedResult


@pytest.fixture
def packed() -> PackedTensors:
    """Row 0: prompt 1 2 (3) with completions 4 5 and 6; prompt and completion 7 8 9 in one group.
    Then padding.
    """

    def sample(
        task: str, number: int, prompt: list[int], completion: list[int], advantage: float
    ) -> TokenizedResult:
        length = len(prompt) + len(completion)
        return TokenizedResult(
            task_id=task,
            sample=number,
            token_ids=prompt + completion,
            assistant_mask=[False] * len(prompt) + [True] * len(completion),
            input_pos=list(range(length)),
            logprobs=[math.nan] * len(prompt) + [-0.25] * len(completion),
            prompt_length=len(prompt),
            reward=1.0,
            advantage=advantage,
        )

    results = [
        sample("a", 0, [1, 2, 3], [4, 5], 1.0),
        sample("a", 1, [1, 2, 3], [6], -2.0),
        sample("b<", 0, [7, 8], [9], 0.0),
    ]
    return packed_tensors_from_tokenized_results(results, seq_len=12, pad_id=0)


def hovers(row: str) -> list[str]:
    ElementTree.fromstring(row)  # well-formed
    return [html.unescape(title) for title in re.findall(r'<span[^>]* title="([^"]*)"', row)]


def test_every_position_of_a_row_is_drawn_with_what_is_known_of_it(packed):
    row = packed_row_html(packed, 0)
    titles = hovers(row)
    cells = [title for title in titles if "never read" not in title]
    assert [re.search(r"id (\d+)", title)[1] for title in cells] == [
        "1",
        "2",
        "3",
        "4",
        "3",
        "7",
        "8",
    ]
    assert [re.search(r"id (\d+)", title)[1] for title in titles if "never read" in title] == [
        "5",
        "6",
        "9",
    ]
    assert cells[0].split("\n") == [
        "token '1', id 1",
        "group 0, a root",
        "position 0",
        "shared by the completions below it",
        "nothing is trained here",
    ]
    assert cells[4].split("\n") == [
        "token '3', id 3",
        "group 2, continues group 0",
        "position 2",
        "task a, sample 1",
        "predicts '6', id 6",
        "advantage -2.000, logprob -0.250",
    ]
    assert "task b<, sample 0" in cells[6]
    assert (
        "12 positions, 7 tokens, 4 trained (57.1%), 5 padding (41.7%), 3 samples in 2 trees" in row
    )
    assert "2 shared tokens saved (22.2%)" in row  # 1 2 for the second completion


def test_any_text_is_safe_inside_of_html(packed):
    strings = {
        1: "<script>",
        2: "&amp;",
        3: '"',
        4: "\x00\n\t\x07",
        5: "]]>",
        6: "é",
        7: "日本\u202e",
    }
    packed.samples[0].task_id = "<b>\x1b"
    row = packed_row_html(packed, 0, lambda token: strings.get(token, ""))
    assert "<script" not in row and "&lt;script&gt;" in row and "&lt;b&gt;␛" in row
    assert any("␀↵⇥␇" in title for title in hovers(row)) and any(
        "日本⟨202e⟩" in title for title in hovers(row)
    )
    # A label that is no input has its text too.
    assert any("]]>" in title and "never read" in title for title in hovers(row))


def test_a_long_row_says_what_is_not_drawn(packed):
    row = packed_row_html(packed, 0, max_positions=3)
    assert len([title for title in hovers(row) if "never read" not in title]) == 3
    assert "… and 4 more positions" in row
    # A row of padding alone.
    ElementTree.fromstring(packed_row_html(packed.pad_rows_to_multiple(2), 1))


def test_what_cannot_be_drawn_is_named(packed):
    with pytest.raises(PackError, match="row 1 of 1 row; give rows from 0 to 0"):
        packed_row_html(packed, 1)
    with pytest.raises(PackError, match="no row of 1 row"):
        plot_packed_tensors(packed, rows=[])


def test_the_figure_shows_the_advantages_where_they_are(packed, tmp_path, tokenizer):
    pytest.importorskip("matplotlib")
    figure = plot_packed_tensors(
        packed.pad_rows_to_multiple(3), tmp_path / "rows.png", tokenizer=tokenizer
    )
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "3 rows of 12 positions, 19.4% filled: 3 samples, 4 trained tokens" in figure.get_suptitle()
    )
    bars = boxes(figure.axes[0])
    advantages = [
        (left, right, low, high) for left, right, low, high in bars if low > 1.4 and high < 4.2
    ]
    zero, size = 2.8, 1.3
    assert advantages == [
        (2, 4, zero, pytest.approx(zero + size / 2)),  # 1.0 of at most 2.0
        (4, 5, pytest.approx(zero - size), zero),
        (6, 7, pytest.approx(zero - 0.06), pytest.approx(zero + 0.06)),  # trained, advantage 0
    ]
    masked = [(left, right) for left, right, low, high in bars if (low, high) == (4.4, 5.2)]
    # All tokens, and before them the trained ones.
    assert sorted(masked) == [(0, 7), (2, 5), (6, 7)]
    assert [one.get_text() for one in figure.axes[0].texts] == [
        '"',
        "#",
        r"\$",
        "%",
        r"\$",
        "(",
        ")",
    ]
    assert figure.axes[2].get_title(loc="left") == "row 2: padding alone"
    with pytest.raises(PackError, match=r"row 4 of 1 row"):
        plot_packed_tensors(packed, rows=[4])


def boxes(axis) -> list[tuple[float, float, float, float]]:
    """Left, right, bottom and top of all rectangles of an axis, in its units."""
    found = []
    for collection in axis.collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.get_extents().get_points().round(6).tolist()
            found.append((left, right, low, high))
    return found


def test_a_row_is_drawn_without_loading_matplotlib():
    code = (
        "import sys, ttrl.data.pictures.plot, ttrl.data.pictures.rows_page; sys.exit('matplotlib' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
