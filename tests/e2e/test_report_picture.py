"""The report as a browser shows it; skipped where there is no Chromium.

Only a browser lays a page out.
"""

import json
import os
import shutil
import struct
from pathlib import Path

import picture_report
import pytest
from support.compared_runs import make_run

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.records import Sample, TokenizedResult
from ttrl.report.compared_runs import compare_runs
from ttrl.report.page import write_report

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
TOOL = Path(__file__).parents[2] / "tools" / "picture_report.py"


@pytest.fixture(scope="module")
def tool():
    if not os.environ.get("CHROMIUM") and not any(map(shutil.which, picture_report.NAMES)):
        pytest.skip("no Chromium")
    return picture_report


@pytest.fixture(scope="module")
def browser(tool):
    with tool.Browser(tool.find_chromium()) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A run with a finding, long names, and an answer without a single space."""
    folder = tmp_path_factory.mktemp("runs") / ("a_run_with_a_long_name_" * 4)
    for iteration in range(3):
        there = folder / "iterations" / f"{iteration:04d}"
        there.mkdir(parents=True)
        rows = [
            Sample(
                task_id="task/" + "x" * 80,
                sample=number,
                messages=[{"role": "user", "content": "Which one? " * 30}],
                text="w" * 600 if number else "short",
                reward=float(number),
                finish_reason="stop",
            ).to_json()
            for number in range(3)
        ]
        for name in ("rollouts.jsonl", "validation.jsonl"):
            (there / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {
            "iteration": iteration,
            "reward": 0.5,
            "validation_reward": 0.5,
            "groups": {"total": 4, "all_wrong": 4},
            "seconds": {"sample": 1.0, "total": 2.0},
            "rollouts": {"truncated": 0.4},
        }
        for iteration in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return write_report(folder)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A run with a report and a packed row, and the metric of the quickstart."""
    folder = tmp_path_factory.mktemp("quickstart")
    rows = [
        {
            "iteration": number,
            "reward": share,
            "validation_reward": share,
            "validation": {"exact": share},
            "seconds": {"total": 100.0},
            "completion_tokens": 3000,
            "flops": {"cumulated": 4.5e12},
        }
        for number, share in enumerate([0.0625, 0.59375])
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("model: tiny\nvalidation_metric: exact\n")
    samples = [
        TokenizedResult(
            task_id="letters/1",
            sample=number,
            token_ids=[1, 2, 3, 4, 5, number],
            assistant_mask=[False] * 4 + [True] * 2,
            input_pos=list(range(6)),
            logprobs=[float("nan")] * 4 + [-0.5] * 2,
            prompt_length=4,
            reward=float(number),
            advantage=number - 0.5,
        )
        for number in range(2)
    ]
    packed = packed_tensors_from_tokenized_results(samples, seq_len=32, pad_id=0)
    question = [{"role": "user", "content": "Which letter?"}]
    for number, answer in enumerate(["I do not know.", "A"]):
        iteration = folder / "iterations" / f"{number:04d}"
        iteration.mkdir(parents=True)
        sample = Sample(
            task_id="letters/1",
            sample=0,
            messages=question,
            text=answer,
            reward=float(number),
            finish_reason="stop",
        )
        (iteration / "validation.jsonl").write_text(json.dumps(sample.to_json()) + "\n")
    packed.save(iteration / "packed.safetensors")
    write_report(folder)
    return folder


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_it_fits_a_desktop_and_a_phone(browser, page):
    desktop = browser.picture(page, 1440, 900, whole=False, dark=False)
    assert size_of(desktop) == (1440, 900) and browser.overflow() == 0
    phone = browser.picture(page, 390, 844, whole=True, dark=True)
    width, height = size_of(phone)
    assert width == 780 and height > 2 * 844  # two pixels to one on a phone
    assert browser.overflow() == 0, "it scrolls sideways"
    # It follows the reader's setting.
    assert browser.picture(page, 390, 844, whole=True, dark=False) != phone


@pytest.mark.parametrize("width", [1280, 390])
def test_a_comparison_is_not_cut_off(browser, tmp_path, width):
    """Of three arms with long names: neither the page nor a table in it scrolls sideways."""
    settings = ({"objective": "gspo"}, {"objective": "ppo"}, {"objective": "reinforce"})
    runs = [
        make_run(tmp_path / f"an_arm_with_a_long_name_{n}", **one) for n, one in enumerate(settings)
    ]
    page = compare_runs(runs).write_html(tmp_path / "compare.html")
    hidden = (
        "Math.max(...[...document.querySelectorAll('.wide')].map(e => e.scrollWidth - "
        "e.clientWidth))"
    )
    browser.picture(page, width, 844, whole=True, dark=False)
    assert browser.overflow() == 0
    assert browser.call("Runtime.evaluate", expression=hidden)["result"]["value"] == 0


def test_pages_turn_without_any_script_of_the_page(browser, page):
    shown = (
        "[...document.querySelectorAll('.pager')].map(p => [...p.querySelectorAll(':scope > "
        "article')]"
    )
    shown += (
        ".filter(a => a.checkVisibility()).map(a => "
        "a.querySelector('.count').textContent).join()).join(' | ')"
    )
    browser.picture(page, 1440, 900, whole=False, dark=False)

    def value(expression):
        return browser.call("Runtime.evaluate", expression=expression)["result"]["value"]

    before = value(shown)
    assert "1 of " in before and "," not in before  # of each pager, one page
    value("document.querySelector('label[for=t1]').click(), ''")
    # The last pager turned.
    assert value(shown) == before[::-1].replace("1 of "[::-1], "2 of "[::-1], 1)[::-1]


def test_the_pictures_of_the_readme_show_the_report_and_a_packed_row(tool, quickstart, tmp_path):
    written = tool.write_readme_pictures(quickstart, tmp_path)
    assert [path.name for path in written] == [
        "report.png",
        "before_and_after.png",
        "packed_row.png",
    ]
    report, answers, row = (size_of(path.read_bytes()) for path in written)
    assert report[0] == row[0] > answers[0] > 900  # the answers are a part of the page
    assert answers[1] < report[1]
    assert all(path.stat().st_size <= tool.README_BYTES for path in written)


def test_a_missing_element_is_named(browser, page):
    missing = pytest.raises(RuntimeError, match="no element 'nav'")
    with missing:
        browser.picture(page, 1440, 900, element="nav")


@pytest.mark.parametrize("width", [620, 1000, 1440])
def test_no_figure_leaves_its_tile(browser, quickstart, width):
    tiles = "[...document.querySelectorAll('.tiles dd')]"
    wide = f"{tiles}.filter(figure => figure.scrollWidth > figure.clientWidth).length"
    browser.picture(quickstart / "report.html", width, 900)
    assert browser.call("Runtime.evaluate", expression=wide)["result"]["value"] == 0
