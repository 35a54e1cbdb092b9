"""`ttrl ui` in a real Chromium; skipped where there is none."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import picture_report
import pytest
from support.many_runs import make_run, make_runs, write_pack, write_samples

from ttrl.run_folder.folder import RunFolder

PATIENCE = 60.0
"""Seconds: other tests use the same processors."""


@pytest.fixture(scope="module")
def browser() -> Iterator[picture_report.Browser]:
    if not os.environ.get("CHROMIUM") and not any(map(shutil.which, picture_report.NAMES)):
        pytest.skip("no Chromium")
    with picture_report.Browser(picture_report.find_chromium()) as started:
        yield started


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "ttrl.cli", "ui", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process, process.stdout.readline().strip()


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_browser_follows_many_runs(browser: picture_report.Browser, tmp_path: Path) -> None:
    """Long: only a browser keeps the cookie, runs the script under the policy, replaces the page
    while the run goes on, and lays it out. test_server.py has the rest, without a browser.
    """
    folder = tmp_path / "runs"
    many = make_runs(folder)
    live = make_run(folder / "live", iterations=3, planned=6)
    write_pack(live, 3)
    text = "</div><script>document.title = 'owned'</script>" + "w" * 600
    path = live / "iterations" / "0003" / "rollouts.jsonl"
    evil = {**json.loads(path.read_text().splitlines()[0]), "text": text, "token_ids": None}
    path.write_text(json.dumps(evil) + "\n")
    process, address = serve(folder)
    root = address.partition("/?")[0]

    def body() -> str:
        return str(browser.value("document.querySelector('main')?.innerText ?? ''"))

    def go(place: str, width: int = 1280) -> None:
        browser.open(root + place, width, 900)
        assert browser.overflow() <= 0, place

    try:
        # The key leaves the address bar, and stays as a cookie out of the page's reach.
        browser.open(address, 1280, 900)
        until(lambda: "Runs" in body())
        assert browser.value("location.href") == root + "/"
        assert browser.value("document.cookie") == ""
        # All runs appear, without a click.
        until(lambda: body().count("1000 / 1000") == len(many))
        # The filter and the choice stay when the page changes.
        with RunFolder(live).locked():
            browser.value(
                "const filter = document.getElementById('filter'); filter.value = 'live';"
                "filter.dispatchEvent(new Event('input', {bubbles: true}));"
                "document.querySelector('input[value=live]').checked = true"
            )
            with (live / "metrics.jsonl").open("a") as file:
                file.write('{"iteration": 4, "reward": 0.5, "seconds": {"total": 60.0}}\n')
            until(lambda: re.search(r"4 / 6", body()))
            assert "1000 / 1000" not in body()
            assert browser.value("document.querySelector('input[value=live]').checked") is True
            # A run's page follows its phases.
            write_samples(live, 5)
            go("/run/live")
            until(lambda: "iteration 5: sampling" in body())
            assert re.search(r"about .* left", body())
            done = live / "iterations" / "0005" / "done"
            for name in ("rollouts", "pack"):
                (done / f"{name}.json").write_text("{}")
            until(lambda: "iteration 5: training" in body())
            assert re.search(r"for \d+ s", body())
        # A model's text stays text.
        go("/run/live/sample/3-0")
        assert "<script>document.title" in body()
        assert browser.value("document.title") == "live, sample 3-0 · ttrl"
        # Each view on a phone, then back.
        name = "lr1e-5%2Cseed%3D0"
        places = [
            "/",
            f"/run/{name}",
            f"/run/{name}/iteration/1000",
            f"/run/{name}/samples?iterations=all&where=reward%3C0.5",
            f"/compare?runs={name}&runs=live&x=seconds",
            "/run/live/sample/3-0",
        ]
        for place in places:
            go(place, width=390)
            assert browser.value("document.querySelectorAll('main *').length") > 10, place
        # Packed rows lie in a frame, with a policy of their own.
        go("/run/live/rows/3", width=390)
        until(lambda: browser.value("document.querySelector('iframe').clientHeight") > 100)
        go("/run/live/pack/3?rows=0")
        assert "Row 0" in browser.value("document.body.innerText")
        browser.value("history.go(-3)")
        until(lambda: browser.value("location.pathname") == "/compare")
        until(lambda: "Settings with differences" in body())
    finally:
        process.terminate()
        process.wait(timeout=30)
