"""Runs and results in notebooks: do displays follow a run, and is everything escaped?"""

import json
import random
import shutil
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.many_runs import make_run, sample, write_samples

from ttrl import Run, TaskResults
from ttrl.errors import RunFolderError, UserError
from ttrl.evaluation.comparison import Comparison, SetComparison
from ttrl.intervals import difference_over_seeds
from ttrl.live.notebook import LiveView
from ttrl.loop.train import RunResult
from ttrl.monitoring.followed_runs import FollowedRun
from ttrl.records import Sample
from ttrl.report.compared_runs import compare_runs
from ttrl.run_folder.folder import RunFolder
from ttrl.system.html_table import html_table, html_text

EVIL = '</div></style><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[2J'


class Tags(HTMLParser):
    """Collects the tags of a page, and its handlers of events."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.handlers: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def check_harmless(html: str) -> None:
    tags = Tags(html)
    assert not tags.names & {"script", "img", "iframe", "link", "object"}
    assert tags.handlers == []
    assert "\x1b" not in html


class Screen:
    """Stands in for IPython's display: keeps the content of each part."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.updates = 0
        self.changed = threading.Condition()

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.parts.append(bundle["text/html"])
        return _Handle(self, len(self.parts) - 1)

    def until(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in "".join(self.parts), 60), self.parts


class _Handle:
    def __init__(self, screen: Screen, place: int) -> None:
        self._screen = screen
        self._place = place

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        with self._screen.changed:
            self._screen.parts[self._place] = bundle["text/html"]
            self._screen.updates += 1
            self._screen.changed.notify_all()


def view(folder: Path, screen: Screen, clock=time.time) -> LiveView:
    return LiveView(FollowedRun(folder.name, folder), 0.05, screen, clock)


def test_a_run_is_followed_from_before_its_first_file(tmp_path: Path) -> None:
    """As in a cell that trains: the display comes first."""
    folder = tmp_path / "run"
    screen = Screen()
    with view(folder, screen):
        assert "waiting" in screen.parts[0]
        make_run(tmp_path / "ready", iterations=3, planned=5)
        shutil.move(tmp_path / "ready", folder)
        screen.until("iteration 3 of 5")
        screen.until("<svg")
        assert "".join(screen.parts).count("<svg") > 5
        with RunFolder(folder).locked():
            write_samples(folder, 4)
            screen.until("4: sampling")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 4, "reward": 0.125}\n')
        screen.until("iteration 4 of 5")
    shown = screen.updates
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5, "reward": 0.5}\n')
    time.sleep(0.2)
    assert screen.updates == shown


def test_an_unchanged_run_costs_no_update(tmp_path: Path) -> None:
    screen = Screen()
    live = view(make_run(tmp_path / "run", iterations=3, planned=5), screen)
    time.sleep(0.3)
    assert screen.updates == 0
    live.stop()
    assert screen.updates == 0


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    live = view(make_run(tmp_path / "run", iterations=3), Screen())
    live._thread.join(60)
    assert not live._thread.is_alive()


def test_a_display_that_fails_disturbs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel may be closing while the training goes on."""
    folder = make_run(tmp_path / "run", iterations=3, planned=5)
    screen = Screen()
    live = view(folder, screen)
    _fail = RuntimeError("the kernel is gone")

    def fail(*given: Any, **named: Any) -> None:
        raise _fail

    for handle in live._handles.values():
        handle.update = fail
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4}\n')
    live._thread.join(60)
    assert "the kernel is gone" in caplog.text


def test_outside_a_notebook_the_way_out_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ttrl watch"):
        Run(tmp_path).live()


def test_a_run_shows_itself(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=3)
    run = Run(folder)
    assert "rose from" in repr(run) or "went from" in repr(run)
    assert run._repr_html_().count("<svg") > 5
    table = run.to_pandas()
    assert list(table["iteration"]) == [0, 1, 2, 3]
    assert "train.loss" in table.columns
    # The result of a finished `train` does the same.
    result = RunResult(folder, folder, folder, [], folder)
    assert result._repr_html_() == run._repr_html_()
    with pytest.raises(UserError, match="ttrl watch"):
        result.live()
    missing = Run(tmp_path / "missing")
    assert repr(missing).endswith("missing: not begun>")
    assert "waiting" in missing._repr_html_()
    with pytest.raises(RunFolderError):
        missing.to_pandas()


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    """Names, metrics, tasks, answers, errors: all may come from elsewhere."""
    folder = make_run(tmp_path / "run", iterations=3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for row in rows:
        row |= {"validation": {EVIL: 0.5}, "metrics": {EVIL: 0.5}}
        row["rollouts"] = {"truncated": 0.9}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"iterations": 3, "model": EVIL, "validation_metric": EVIL}
    (folder / "config.yaml").write_text(json.dumps(config))
    one = {**sample("task", 0, random.Random(0)), "text": EVIL, "task_id": EVIL, "error": EVIL}
    one |= {"metrics": {EVIL: 1.0}, "messages": [{"role": "user", "content": EVIL}]}
    (folder / "iterations/0003/rollouts.jsonl").write_text(json.dumps(one) + "\n")
    html = Run(folder)._repr_html_()
    assert "&lt;script&gt;" in html
    check_harmless(html)
    (folder / "metrics.jsonl").write_text(EVIL + "\n{}\n")
    check_harmless(Run(folder)._repr_html_())
    results = TaskResults.from_samples([Sample.from_json(one)])
    check_harmless(results._repr_html_())
    assert "&lt;script&gt;" in results._repr_html_()
    check_harmless(html_table([[EVIL], [EVIL]], caption=EVIL, notes=[EVIL]))
    check_harmless(html_text(EVIL))


def test_results_are_tables(tmp_path: Path) -> None:
    noise = random.Random(0)
    samples = [Sample.from_json(dict(sample("sum", n, noise))) for n in range(30)]
    html = TaskResults.from_samples(samples)._repr_html_()
    assert html.count("<tr>") == 21
    assert "the first 20 of 30 samples" in html
    difference = difference_over_seeds([[[0.0], [1.0], [0.0]]], [[[1.0], [1.0], [0.0]]], 0.95)
    one = SetComparison("sums", "reward", 1 / 3, 2 / 3, difference, 3, 1, 0)
    compared = Comparison(("<a>", "b"), 0.95, [one], ["other"], [], [])
    html = compared._repr_html_()
    assert "&lt;a&gt;" in html and "+0.333" in html and "in one evaluation only: other" in html
    (row,) = compared.to_pandas().to_dict("records")
    assert (row["name"], row["difference.better"]) == ("sums", 1)
    runs = [make_run(tmp_path / str(n), n, iterations=3, lr=(1 + n) * 1e-5) for n in range(2)]
    arms = compare_runs(runs)
    assert arms._repr_html_().count("<tr>") == 3
    assert len(arms.to_pandas()) == 2
