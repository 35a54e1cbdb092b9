"""Pictures: that they show what is in the tensors, and say what they leave out."""

import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from ttrl.data.packing import PackedTensors, packed_tensors_from_tokenized_results
from ttrl.data.plot import packed_row_svg, plot_packed_tensors
from ttrl.errors import PackError
from ttrl.records import TokenizedResult

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def packed() -> PackedTensors:
    """Row 0: prompt 1 2 (3) with completions 4 5 and 6; prompt and completion 7 8 9 in one group. Then padding."""

    def sample(task: str, number: int, prompt: list[int], completion: list[int], advantage: float) -> TokenizedResult:
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

    results = [sample("a", 0, [1, 2, 3], [4, 5], 1.0), sample("a", 1, [1, 2, 3], [6], -2.0), sample("b<", 0, [7, 8], [9], 0.0)]
    return packed_tensors_from_tokenized_results(results, seq_len=12, pad_id=0)


def hovers(svg: str) -> list[str]:
    return [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def test_every_position_of_a_row_is_drawn_with_what_is_known_of_it(packed):
    svg = packed_row_svg(packed, 0)
    titles = hovers(svg)
    cells = [title for title in titles if "never read" not in title]
    assert [re.search(r"id (\d+)", title)[1] for title in cells] == ["1", "2", "3", "4", "3", "7", "8"]
    assert [re.search(r"id (\d+)", title)[1] for title in titles if "never read" in title] == ["5", "6", "9"]
    assert cells[0].split("\n")[1:] == [
        "group 0, a root",
        "position 0",
        "shared by the completions that continue it",
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
    assert "3 samples, 4 trained tokens, 7 of 12 positions used (58%)" in svg


def test_any_text_is_safe_inside_of_html(packed):
    strings = ["<script>", "&amp;", '"', "\x00\n\t\x07", "]]>", "é", "日本"] + [""] * 5
    svg = packed_row_svg(packed, 0, strings)
    ElementTree.fromstring(svg)  # well-formed
    assert "<script" not in svg and "&lt;script&gt;" in svg
    assert any("␀↵⇥␇" in title for title in hovers(svg))


def test_a_long_row_says_what_is_not_drawn(packed):
    svg = packed_row_svg(packed, 0, max_positions=3)
    assert len([title for title in hovers(svg) if "never read" not in title]) == 3
    assert "… and 4 more positions" in svg
    ElementTree.fromstring(packed_row_svg(packed.pad_rows_to_multiple(2), 1))  # a row of padding alone


def test_what_cannot_be_drawn_is_named(packed):
    with pytest.raises(PackError, match="row 1 of 1 rows; give one from 0 to 0"):
        packed_row_svg(packed, 1)
    with pytest.raises(PackError, match="2 token strings for a row of 12 positions"):
        packed_row_svg(packed, 0, ["a", "b"])


def test_the_figure_shows_the_advantages_where_they_are(packed, tmp_path, tokenizer):
    pytest.importorskip("matplotlib")
    figure = plot_packed_tensors(packed.pad_rows_to_multiple(3), tmp_path / "rows.png", tokenizer=tokenizer)
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert "3 rows of 12 positions, 19.4% filled: 3 samples, 4 trained tokens" in figure.get_suptitle()
    groups, trained, advantages = (image.get_array() for image in figure.axes[0].images)
    values = advantages[0].filled(math.nan).tolist()
    assert values[2:5] == [1.0, 1.0, -2.0] and values[6] == 0.0
    assert all(math.isnan(value) for value in (*values[:2], values[5], *values[7:]))
    colours = [tuple(colour) for colour in groups[0]]
    assert len(set(colours)) == 5  # the prompt, its two completions, the other sample, padding
    assert len({tuple(colour) for colour in trained[0]}) == 3
    with pytest.raises(PackError, match=r"rows \[4\] of 1 rows"):
        plot_packed_tensors(packed, rows=[4])


def test_a_row_is_drawn_without_loading_matplotlib():
    code = "import sys, ttrl.data.plot, ttrl.data.packing, ttrl.data.masks; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
