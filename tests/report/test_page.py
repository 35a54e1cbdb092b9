"""The report: is it true, is it whole with whatever is missing, and is it safe with what a model
may write.
"""

import base64
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.torch import save_file
from support.facts import rows_of

from ttrl.data.packing.pack import packed_tensors_from_tokenized_results
from ttrl.data.pictures.rows_page import packed_row_html
from ttrl.data.tokenization import TaskResultTokenizer
from ttrl.errors import RunFolderError, StorageError
from ttrl.records import Sample, TaskResult, TokenizedResult
from ttrl.report import charts
from ttrl.report.conversations import shown_messages, template
from ttrl.report.page import leave_report, write_report
from ttrl.report.samples import before_and_after
from ttrl.run_folder import reader
from ttrl.system.files import write_jsonl

VOID = {"meta", "br", "hr", "img", "input", "link", "!doctype"}


class Page(HTMLParser):
    """Collects text and tags, and fails on tags that do not close."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def sample(task: str, number: int = 0, **values: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": "abc",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "reward": 1.0,
        "metrics": {"exact": 1.0},
    }
    messages = [{"role": "user", "content": f"Sort {task}."}]
    return Sample(task_id=task, sample=number, messages=messages, **(fields | values)).to_json()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def metrics_row(iteration: int, exact: float, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "iteration": iteration,
        "validation": {"exact": exact},
        "validation_reward": exact + (1 - exact) / 2,
        "validation_samples": 200,
        "seconds": {"validate": 1.0, "total": 1.0},
    }
    if iteration:
        row |= {
            "reward": exact * 0.9,
            "metrics": {"exact": exact},
            "groups": {"total": 32, "kept": 20, "all_right": 10, "all_wrong": 2, "other_equal": 0},
            "samples": 512,
            "failed": 0,
            "prompt_tokens": 900,
            "completion_tokens": 4608,
            "tokens_per_second": 2400.0,
            "seconds": {
                "sample": 2.0,
                "pack": 0.1,
                "train": 1.5,
                "sync": 0.2,
                "validate": 1.0,
                "total": 5.0,
            },
            "train": {
                "loss": -0.01,
                "kl": 0.002,
                "entropy": 0.3,
                "grad_norm": 0.5,
                "clip_fraction_high": 0.01,
                "lr": 1e-4,
                "steps": 4,
                "peak_share": 0.4,
            },
            "rollouts": {"truncated": 0.01, "repeated": 0.5, "length_correlation": 0.1},
            "dead_seconds": 0.5,
            "sampler_trainer": {"mean": 2e-7, "p999": 3e-6, "ess": 0.9999},
            "sync": {"mode": "reload", "canary_max_difference": 1e-6, "fell_back": False},
            "trained": True,
        }
    return row | values


def make_run(folder: Path, exacts: list[float]) -> Path:
    """A run folder with one row per value, the starting model first, and its conversations."""
    write_lines(
        folder / "metrics.jsonl",
        [metrics_row(iteration, exact) for iteration, exact in enumerate(exacts)],
    )
    for iteration in range(len(exacts)):
        iteration_folder = folder / "iterations" / f"{iteration:04d}"
        write_lines(
            iteration_folder / "validation.jsonl",
            [sample(f"v{task}", text=f"held{iteration}-{task}") for task in range(6)],
        )
        if iteration:
            rows = [
                sample(f"t{task}", number, text=f"train{iteration}-{task}-{number}")
                for task in range(6)
                for number in range(4)
            ]
            write_lines(iteration_folder / "rollouts.jsonl", rows)
    (folder / "config.yaml").write_text("model: models/tiny\nseed: 3\n", encoding="utf-8")
    (folder / "environment.json").write_text('{"torch": "2.13.0+cpu"}', encoding="utf-8")
    return folder


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_report_says_what_happened(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "my_run", [0.5, 0.7, 0.9, 0.94])
    assert write_report(folder) == folder / "report.html"
    text = page_of(folder).text
    assert "my_run" in text and "models/tiny" in text
    assert (
        "Held-out exact match rose from 50% to 94% (95% interval 89.8% to 96.5%) in 3 "
        "iterations, 16.0 s in all."
    ) in text
    assert "50% → 94%" in text
    for heading in (
        "Learning",
        "Seconds per phase",
        "Tokens per second",
        "Sampler against trainer",
        "Effective sample size",
    ):
        assert heading in text
    assert "means above 2e-4 or 99.9th percentiles above 0.005 mean other weights" in text
    for heading in (
        "Entropy",
        "KL to the reference model",
        "Gradient norm",
        "Groups without signal",
        "Clipped tokens",
    ):
        assert heading in text
    assert "What stands out" not in text and "disagree" not in text  # nothing was wrong


def test_the_noise_of_the_gradient_and_what_it_advises(tmp_path: Path) -> None:
    noise = {
        "scale": 40.0,
        "low": 20.0,
        "prompts": 9.0,
        "from_samples": 0.8,
        "best_prompts": 4,
        "best_samples": 31,
        "gain": 1.62,
    }
    rows = [
        metrics_row(n, 0.5, gradient_noise=noise | ({"high": 90.0} if n > 2 else {}))
        for n in range(1, 5)
    ]
    folder = make_run(tmp_path / "run", [0.5, 0.7])
    write_lines(folder / "metrics.jsonl", rows)
    text = page_of(folder).text
    assert "Gradient noise scale" in text and "Noise from samples" in text and "sketch" not in text
    assert (
        "a step of 4 prompts with 31 samples each (counting those with a signal) would have 1/1.6 "
        "of its noise."
    ) in text
    write_lines(
        folder / "metrics.jsonl", [metrics_row(1, 0.5, gradient_noise=noise | {"gain": 1.01})]
    )
    assert "divided well" in page_of(folder).text
    write_lines(
        folder / "metrics.jsonl",
        [metrics_row(n, 0.5, gradient_noise=noise | {"from_sketch": True}) for n in (1, 2)],
    )
    assert "on a sketch of the gradient" in page_of(folder).text


def test_pictures_of_studies_are_in_the_page(tmp_path: Path) -> None:
    """Those of the run and of its newest iteration that has any; no other files, and nothing that
    is no picture.
    """
    folder = make_run(tmp_path / "run", [0.5, 0.7, 0.9])
    assert "Studies" not in write_report(folder).read_text()
    for place, names in (
        ("study", ["steps"]),
        ("iterations/0001/study", ["study"]),
        ("iterations/0002/study", ["study", "kernel"]),
    ):
        (folder / place).mkdir(parents=True)
        for name in names:
            (folder / place / f"{name}.png").write_bytes(b"\x89PNG" + f"{place}/{name}".encode())
    (folder / "study" / "position.png").write_bytes(b"<svg onload=x>")
    html = write_report(folder).read_text()
    held = [
        base64.b64decode(text)[4:].decode()
        for text in re.findall(r'src="data:image/png;base64,([^"]*)"', html)
    ]
    assert held == ["study/steps", "iterations/0002/study/study", "iterations/0002/study/kernel"]
    assert (
        "Of every step" in html and "Of the step of iteration 2" in html and "img-src data:" in html
    )


def test_every_picture_is_well_formed_and_every_curve_has_its_points(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path / "run", [0.5, 0.7, 0.9])).read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len([picture for picture in pictures if 'class="spark"' not in picture]) == 16
    for picture in pictures:
        ElementTree.fromstring(picture)  # well-formed XML
        assert "nan" not in picture and "inf" not in picture
    held_out = next(picture for picture in pictures if 'aria-label="Held out"' in picture)
    titles = [title.text for title in ElementTree.fromstring(held_out).iter("title")]
    assert titles[:3] == [
        "exact match, iteration 0: 0.5",
        "exact match, iteration 1: 0.7",
        "exact match, iteration 2: 0.9",
    ]
    assert "polygon" in held_out  # the interval


def test_the_phases_of_a_bar_add_up_to_the_total(tmp_path: Path) -> None:
    run = reader.read_run(make_run(tmp_path / "run", [0.5, 0.7]))
    columns = reader.phase_columns(run)
    assert columns["other"][1] == pytest.approx(5.0 - 4.8)
    assert sum(column[1] or 0.0 for column in columns.values()) == pytest.approx(5.0)
    svg, size = charts.stacked_bars(
        "s", run.iterations, [charts.Series(name, columns[name], 1) for name in columns]
    ) or ("", 0)
    assert size == 1
    heights = {}
    for rect in ElementTree.fromstring(svg).iter("rect"):
        title = rect.find("title")
        assert title is not None and title.text is not None
        heights[title.text] = float(rect.attrib["height"])
    assert heights["iteration 1, sample: 2"] == pytest.approx(
        2 * heights["iteration 1, validate: 1"], abs=0.2
    )


def test_it_needs_nothing_from_outside_and_runs_no_scripts(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path / "run", [0.5, 0.9])).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(
        name in ("src", "href", "style") or name.startswith("on")
        for _, attributes in page.tags
        for name in attributes
    )
    assert (
        "http://" not in html
        and "https://" not in html
        and "@import" not in html
        and "url(" not in html
    )
    policy = next(
        attributes["content"]
        for tag, attributes in page.tags
        if tag == "meta" and "http-equiv" in attributes
    )
    assert policy is not None and policy.startswith("default-src 'none'")


HOSTILE = [
    "</div></article><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<style>body{display:none}</style> &lt;b&gt; &amp;",
    "]]></svg><h1>x</h1><!--",
    "\x00\x1b[31mred\x7f",
    "\ud800 a lone surrogate",
    "\u202eright to left",
    "<details>" * 200,
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "place", ["text", "prompt", "task", "metric", "error", "reason", "model", "validation"]
)
def test_what_a_model_writes_is_text(tmp_path: Path, text: str, place: str) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.9])
    plain = [tag for tag, _ in page_of(folder).tags]
    row = sample("t0")
    if place == "text":
        row["text"] = text
    elif place == "prompt":
        row["messages"] = [
            {"role": text, "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
    elif place == "task":
        row["task_id"] = text
    elif place == "metric":
        row["metrics"] = {text: 1.0}
    elif place == "error":
        row["error"], row["reward"] = text, None
    elif place == "reason":
        row["finish_reason"] = text
    write_lines(folder / "iterations" / "0001" / "rollouts.jsonl", [row])
    if place == "validation":
        for number in (0, 1):
            write_lines(
                folder / "iterations" / f"000{number}" / "validation.jsonl",
                [sample("v", text=text)],
            )
    if place == "model":
        (folder / "config.yaml").write_text(json.dumps({"model": text}), encoding="utf-8")
    html = write_report(folder).read_text(encoding="utf-8")
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert tags <= set(plain) | {"details", "summary", "em"}
    assert not any(
        name.startswith("on") or name == "src" for _, attributes in page.tags for name in attributes
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", html)


def test_long_answers_are_folded_and_very_long_ones_cut(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.9])
    write_lines(
        folder / "iterations" / "0001" / "rollouts.jsonl", [sample("t0", text="word " * 20_000)]
    )
    html = write_report(folder).read_text(encoding="utf-8")
    assert "(100,000 characters)" in html and "80,000 more characters in the run folder" in html
    assert len(html) < 150_000


def test_of_endless_conversations_the_beginning_is_shown() -> None:
    shown = shown_messages([({"role": "tool", "content": "<" * 15_000}, "prompt")] * 40)
    html = template("parts.html").module.messages(shown)  # type: ignore[attr-defined]
    assert html.count("&lt;") == 4 * (15_000 + 160) and "36 more messages in the run folder" in html


def test_texts_in_parts_are_shown_as_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    calls = [{"function": {"name": "add"}}]
    said = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "prompt", "content": [1, 2]},
        {"role": "user", "content": ""},
    ]
    shown = shown_messages((message, "prompt") for message in said)
    assert [one.text for one in shown.first] == ["one\ntwo", json.dumps(calls), "[1, 2]", ""]


def test_keys_and_passwords_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.9])
    headers = {"Authorization": "Bearer hush-1", "X-Api-Key": "hush-2"}
    server = {"hf_token": "hush-3", "max_tokens": "seen-1", "hf-token": True}
    loggers = [{"name": "wandb", "api_key": "hush-4", "project": "seen-2"}]
    config = {
        "sampling": {"extra_headers": headers},
        "server": server,
        "loggers": loggers,
        "mirror": "seen-3",
    }
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    html = write_report(folder).read_text(encoding="utf-8")
    assert "hush" not in html and all(f"seen-{number}" in html for number in (1, 2, 3))


def test_a_page_that_cannot_be_made_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.9])
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\nnot json\n{"iteration": 2}\n')
    assert leave_report(folder) == folder / "report.html" and "line 2" in caplog.text
    (folder / "report.html").mkdir()
    with pytest.raises(StorageError):
        leave_report(folder, [])


def test_a_sample_stands_beside_the_one_of_its_number(tmp_path: Path) -> None:
    """A task with several held-out samples: each has its own partner, and a new one has none."""
    question = [{"role": "user", "content": "?"}]
    files = []
    for name, numbers in (("before", range(3)), ("after", (2, 0))):
        rows = [
            Sample(task_id=task, sample=n, messages=question, text=f"{name} {task}{n}").to_json()
            for task in ("ä", "b")
            for n in numbers
        ]
        files.append(tmp_path / f"{name}.jsonl")
        write_jsonl(files[-1], rows)
    pairs = [(one.text, other.text) for one, other in before_and_after(*files, most=6)]
    assert pairs == [(f"before {one}", f"after {one}") for one in ("ä0", "ä2", "b0", "b2")]


def test_conversations_are_shown_unselected_to_be_paged_through(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95]))
    # 8 of 24 samples at even distances, of the last iteration, one between, and the first.
    places = ["0-0", "0-3", "1-2", "2-1", "3-0", "3-3", "4-2", "5-1"]
    assert re.findall(r"train\d-\d-\d", page.text) == [
        f"train{iteration}-{place}" for iteration in (5, 3, 1) for place in places
    ]
    # The same held-out tasks before and after, side by side.
    assert re.findall(r"held\d-\d", page.text) == [
        f"held{iteration}-{task}" for task in range(6) for iteration in (0, 5)
    ]
    assert "reward 1 · exact 1 · ended by itself · 3 tokens" in page.text
    # Buttons and labels: each label leads to a button that is there, and one page of each group is
    # open.
    buttons = [dict(attributes) for tag, attributes in page.tags if tag == "input"]
    assert len(buttons) == 24 + 6 and {button["name"] for button in buttons} == {"t", "v"}
    assert sum("checked" in button for button in buttons) == 2
    labels = [attributes["for"] for tag, attributes in page.tags if tag == "label"]
    assert sorted(labels) == sorted([str(button["id"]) for button in buttons] * 2)


def test_tokens_are_coloured_by_advantage_and_difference(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = make_run(tmp_path / "run", [0.5, 0.9])
    (folder / "config.yaml").write_text(f"model: {tiny_model}\n", encoding="utf-8")
    samples = []
    for number, text in enumerate(("abc", "cab")):
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        prompt = tokenizer.encode("<|user|>sort: bac<|end|><|assistant|>")
        row = sample(
            "t0",
            number,
            text=text,
            token_ids=ids,
            prompt_token_ids=prompt,
            logprobs=[-0.5] * len(ids),
            reward=number,
        )
        samples.append(Sample.from_json(row))
    tokenize = TaskResultTokenizer(tokenizer)
    group = TaskResult(task_id="t0", messages=samples[0].messages, samples=samples)
    packed = packed_tensors_from_tokenized_results(
        tokenize(group, [-1.0, 2.0]), seq_len=64, pad_id=0
    )
    there = folder / "iterations" / "0001"
    packed.save(there / "packed.safetensors")
    write_lines(there / "rollouts.jsonl", [one.to_json() for one in samples])
    without = write_report(folder).read_text(encoding="utf-8")
    assert "trainer -" not in without and without.count('class="n2"') == 4 == without.count(
        'class="u4"'
    )
    apart = packed.logprobs.clone()
    place = (packed.labels != -100).nonzero()[-1]
    apart[tuple(place)] += 0.05
    save_file({"logprobs": apart}, there / "trainer_logprobs.safetensors")
    html = write_report(folder).read_text(encoding="utf-8")
    answers = "".join(re.findall(r'<div class="answer tokens".*?</div>', html))
    spans = re.findall(r'<span class="([^"]*)" title="([^"]*)">([^<]*)</span>', answers)
    assert [text for _, _, text in spans][:4] == ["a", "b", "c", "&lt;|end|&gt;"] and len(
        spans
    ) == 8
    assert [css for css, _, _ in spans] == ["n2"] * 4 + ["u4"] * 3 + ["u4 d2"]
    assert "advantage 2, sampler -0.5000, trainer -0.4500, difference +5.0e-02" in spans[-1][1]


def test_a_failed_sample_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.9])
    row = sample(
        "t0",
        text="",
        reward=None,
        metrics={},
        finish_reason="length",
        token_ids=None,
        error="GraderError: no number",
    )
    write_lines(folder / "iterations" / "0001" / "rollouts.jsonl", [row])
    text = page_of(folder).text
    assert (
        "(empty answer)" in text
        and "GraderError: no number" in text
        and "cut off at the length limit" in text
    )


@pytest.mark.parametrize(
    ("exacts", "expected"),
    [
        ([0.5, 0.9], "Held-out exact match rose from 50% to 90%"),
        ([0.9, 0.5], "Held-out exact match fell from 90% to 50%"),
        (
            [0.5, 0.53],
            "Held-out exact match did not change beyond the noise: it went from 50% to 53%",
        ),
        ([0.5, 0.95, 0.7], "in 2 iterations, 11.0 s in all. The best was 95%, in iteration 1."),
        ([0.5], "Only the starting model has been measured; no iteration is finished yet."),
        ([], "No iteration is finished yet."),
    ],
)
def test_the_summary_says_no_more_than_the_figures(
    tmp_path: Path, exacts: list[float], expected: str
) -> None:
    assert expected in page_of(make_run(tmp_path / "run", exacts)).text


def test_without_exact_match_the_reward_is_compared(tmp_path: Path) -> None:
    rows = [
        {"iteration": number, "validation_reward": reward}
        for number, reward in enumerate((-2.0, 3.5))
    ]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    text = page_of(tmp_path / "run").text
    assert "Held-out reward rose from -2 to 3.5 in 1 iteration." in text


def test_the_configured_metric_is_compared(tmp_path: Path) -> None:
    rows = [
        {"iteration": number, "validation": {"exact": 0.1, "right": share}}
        for number, share in enumerate((0.25, 0.75))
    ]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    (tmp_path / "run" / "config.yaml").write_text("validation_metric: right\n", encoding="utf-8")
    assert "Held-out right rose from 25% to 75% in 1 iteration." in page_of(tmp_path / "run").text


def test_what_stands_out_is_said_with_examples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.5])
    rollouts = {"truncated": 0.5, "grader_failures": 1, "repeated": 0.1}
    rows = [metrics_row(0, 0.0), metrics_row(1, 0.0, rollouts=rollouts, failed=9)]
    write_lines(folder / "metrics.jsonl", rows)
    lines = [sample("a", text="whole"), sample("b", text="cut", finish_reason="length")]
    lines.append(sample("c", text="broken", reward=None, error="GraderError: no number"))
    write_lines(folder / "iterations" / "0001" / "rollouts.jsonl", lines)
    page = write_report(folder).read_text(encoding="utf-8")
    section = page[page.index("What stands out") : page.index("<h2>Learning")]
    text = Page(
        f"<div><h2>{section[: section.rindex('</section>')]}</div>".replace(
            "<h2>What", "What"
        ).replace("</h2>", "", 1)
    ).text
    assert (
        "50% of the completions were cut off" in text
        and "9 of 512 samples failed" in text
        and "cut" in text
    )
    assert "GraderError: no number" in text and "whole" not in text


def test_a_difference_beyond_the_limits_is_shown_with_tokens_and_causes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.5])
    token = {
        "task_id": "t<1>",
        "sample": 2,
        "place": 3,
        "before": "ab",
        "text": "<c>",
        "after": "d",
        "sampler": -0.5,
        "trainer": None,
    }
    cause = {"name": "dtype", "verdict": "found", "detail": "bf16 & fp32", "way_out": "one <dtype>"}
    report = {
        "iteration": 1,
        "version": 0,
        "exceeded": ["mean 0.07 (limit 0.0002)"],
        "worst": [token],
        "causes": [cause],
    }
    path = folder / "iterations" / "0001" / "drift.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    text = page_of(folder).text
    assert (
        "Iteration 1, tokens of policy 0: mean 0.07 (limit 0.0002)." in text
        and "ab <c> d -0.5000 not finite" in text
    )
    assert "dtype found bf16 & fp32 → one <dtype>" in text
    path.write_text('{"iteration": 1}', encoding="utf-8")
    assert "disagree" not in page_of(folder).text  # of another version


def everything_missing(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row without each key in turn, with null and nonsense in its place, and with null in the
    place of each key inside.
    """
    rows = []
    for key, value in row.items():
        if key == "iteration":
            continue
        rows += [
            {name: kept for name, kept in row.items() if name != key},
            row | {key: None},
            row | {key: "?"},
        ]
        if isinstance(value, dict):
            # Read like one that is missing.
            rows += [row | {key: value | {inner: None}} for inner in value]
    return rows


def test_any_key_may_be_missing_or_null(tmp_path: Path) -> None:
    for row in everything_missing(metrics_row(1, 0.5)):
        write_lines(tmp_path / "run" / "metrics.jsonl", [{"iteration": 0}, row, {"iteration": 2}])
        page = page_of(tmp_path / "run")
        assert "nan" not in page.text.lower().split()


def test_a_run_that_only_started_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run" / "iterations" / "0001").mkdir(parents=True)
    assert "No iteration is finished yet." in page_of(tmp_path / "run").text


def test_a_torn_or_repeated_line_is_read_like_everywhere(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.6])
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics_row(1, 0.9)) + "\n" + '{"iteration": 2, "rew')
    assert "from 50% to 90%" in page_of(folder).text


def test_a_damaged_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.6])
    (folder / "metrics.jsonl").write_text(
        '{"iteration": 0}\n{"itera\n{"iteration": 2}\n', encoding="utf-8"
    )
    with pytest.raises(RunFolderError, match="line 2"):
        write_report(folder)


def test_a_folder_that_is_no_run_is_refused_and_the_runs_beside_it_are_named(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "good", [0.5])
    with pytest.raises(RunFolderError, match=r"does not exist; .* there are: good"):
        write_report(tmp_path / "goood")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunFolderError, match=r"neither metrics\.jsonl nor iterations"):
        write_report(tmp_path / "other")
    assert not (tmp_path / "other" / "report.html").exists()


def test_hundreds_of_iterations_become_means_in_bars_and_stay_small(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_lines(folder / "metrics.jsonl", [metrics_row(iteration, 0.5) for iteration in range(500)])
    html = write_report(folder).read_text(encoding="utf-8")
    assert "Each bar is the mean of 6 iterations." in html
    assert html.count("<rect") < 90 * 6 + 90 * 3
    assert len(html) < 2_000_000


def test_the_picture_of_a_packed_row_is_put_in(tmp_path: Path) -> None:
    """What is drawn is pictures/page.py's matter; here: the newest pack, its first row."""
    folder = make_run(tmp_path / "run", [0.5, 0.6, 0.7])
    sequences = [
        TokenizedResult(
            task_id=f"t{number}",
            sample=0,
            token_ids=[5, 6, 7, 8],
            assistant_mask=[False, False, True, True],
            input_pos=range(4),
            logprobs=[math.nan, math.nan, -1.0, -1.0],
            prompt_length=2,
            reward=1.0,
            advantage=1.0,
        )
        for number in range(4)
    ]
    path = folder / "iterations" / "0002" / "packed.safetensors"
    packed = packed_tensors_from_tokenized_results(sequences, seq_len=4, pad_id=0)
    packed.save(path)
    assert "Row 0, the first of 4, of iteration 2" in page_of(folder).text
    # No tokenizer in this run folder.
    picture = packed_row_html(packed.rows([0]), 0, None, max_positions=600)
    assert picture in (folder / "report.html").read_text(encoding="utf-8")
    path.write_bytes(b"gone")
    # The rest of the report is still there.
    assert "cannot be read as safetensors" in page_of(folder).text


def test_a_report_reads_nothing_again_that_did_not_change(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.6, 0.7])
    before = write_report(folder).read_text(encoding="utf-8")
    # Other contents that look like the same file.
    for path in folder.glob("iterations/*/rollouts.jsonl"):
        status, text = path.stat(), path.read_text(encoding="utf-8")
        path.write_text(text.replace('"', "'"), encoding="utf-8")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert write_report(folder).read_text(encoding="utf-8") == before
    lines = [sample(f"new{task}", text=f"changed-{task}") for task in range(4)]
    write_lines(folder / "iterations" / "0002" / "rollouts.jsonl", lines)
    assert "changed-3" in page_of(folder).text


def test_rows_that_the_caller_has_are_not_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5, 0.6])
    write_report(folder, rows_of([metrics_row(0, 0.25), metrics_row(1, 0.75)]))
    assert "from 25% to 75%" in (folder / "report.html").read_text(encoding="utf-8")
