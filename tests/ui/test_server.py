"""The pages of `ttrl ui`: do they show a run, follow it, and refuse everybody else?"""

import json
import random
import re
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient
from support.many_runs import make_run, sample, write_pack

from ttrl.monitoring.followed_runs import Runs
from ttrl.run_folder.folder import RunFolder
from ttrl.ui.guard import COOKIE
from ttrl.ui.server import make_app

KEY = "a-key-of-this-test-0123456789"
HOST = "http://127.0.0.1:8765"
EVIL = "</main><script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = {"meta", "br", "hr", "img", "input", "link", "!doctype"}


class Tags(HTMLParser):
    """Collects tags and links, and fails on tags that do not close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        values = dict(attrs)
        self.handlers += [name for name in values if name.startswith("on")]
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert not self.open or tag in self.open, tag
        while self.open and self.open.pop() != tag:
            pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", seed=1, iterations=4, sampled=4)
    make_run(tmp_path / "runs" / "b,c=1", seed=2, iterations=3, lr=2e-5)
    return tmp_path / "runs"


def client_of(folder: Path, key: str = KEY, **options) -> TestClient:
    cookies = {COOKIE: key} if key else {}
    app = make_app(Runs([folder]), KEY)
    return TestClient(app, base_url=HOST, cookies=cookies, **options)


@pytest.fixture
def client(folder: Path) -> TestClient:
    return client_of(folder)


def test_every_link_leads_to_a_page(client: TestClient) -> None:
    """From the list of runs through all views, but packed rows: these runs have none."""
    seen = set()
    waiting = ["/"]
    while waiting and len(seen) < 120:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        answer = client.get(address)
        assert answer.status_code == 200, address
        waiting += [link for link in Tags(answer.text).links if link.startswith("/")]
    kinds = {re.sub(r"[0-9]+", "N", address.partition("?")[0]) for address in seen}
    assert {
        "/",
        "/compare",
        "/run/a",
        "/run/a/iteration/N",
        "/run/a/samples",
        "/run/a/sample/N-N",
        "/run/b%NCc%NDN",
    } <= kinds


def test_the_list_of_runs(client: TestClient, folder: Path) -> None:
    page = client.get("/").text
    assert "b,c=1" in page and "2 runs" in page
    assert page.count(">finished<") == 2
    with RunFolder(folder / "a").locked():
        assert "running" in client.get("/").text


def test_a_run_shows_its_report(client: TestClient) -> None:
    page = client.get("/run/a").text
    for text in (
        "Held out",
        "Seconds per phase",
        "Gradient norm",
        "The same held-out tasks",
        "iteration 4 of 4",
    ):
        assert text in page


def test_a_page_follows_its_run(client: TestClient, folder: Path) -> None:
    """An unchanged page costs no bytes; a changed one comes whole."""
    for address in ("/", "/run/a", "/run/a/iteration/4", "/compare?runs=a&runs=b%2Cc%3D1"):
        first = client.get(address)
        stamp = first.headers["etag"]
        assert f'<main data-stamp="{stamp[1:-1]}">' in first.text
        again = client.get(address, headers={"if-none-match": stamp})
        assert (again.status_code, again.content) == (304, b"")
        with (folder / "a" / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"iteration": 5, "reward": 0.123, "seconds": {"total": 1.0}}) + "\n"
            )
        changed = client.get(address, headers={"if-none-match": stamp})
        assert changed.status_code == 200
        assert changed.headers["etag"] != stamp


def test_samples_under_way_are_shown_as_they_grow(client: TestClient, folder: Path) -> None:
    with RunFolder(folder / "a").locked():
        live = folder / "a" / "iterations" / "0005" / "samples"
        live.mkdir(parents=True)
        (live / "sum_000.txt").write_text("task sum\n\nThe sum")
        first = client.get("/run/a/iteration/5")
        assert "The sum" in first.text and "sampling" in first.text
        (live / "sum_000.txt").write_text("task sum\n\nThe sum is 7 <b>")
        (live / "linked.txt").symlink_to("/etc/passwd")
        second = client.get("/run/a/iteration/5", headers={"if-none-match": first.headers["etag"]})
        assert "The sum is 7 &lt;b&gt;" in second.text
        assert "root:" not in second.text


def test_filters_have_an_address(client: TestClient) -> None:
    page = client.get(
        "/run/a/samples", params={"iterations": "1-4", "where": "reward<0.5", "finish": "stop"}
    )
    assert page.status_code == 200
    assert 'value="reward&lt;0.5"' in page.text
    assert "iterations 1 to 4" in page.text
    assert "is no condition" in client.get("/run/a/samples?where=reward").text
    assert "is no range" in client.get("/run/a/samples?iterations=x").text
    against = client.get("/run/a/samples", params={"iterations": "3", "against": "b,c=1"})
    assert "Only tasks with another mean reward in b,c=1" in against.text


def test_a_comparison(client: TestClient) -> None:
    for runs in ("runs=a&runs=b%2Cc%3D1", "runs=b%2Cc%3D1&runs=a"):
        page = client.get(f"/compare?{runs}&x=flops&metric=train.entropy").text
        assert "train.entropy over FLOP" in page
        assert "training.lr" in page and "1e-05" in page and "2e-05" in page
        assert "compared at" in page
    # Names without a comma may be joined by one.
    joined = client.get("/compare?runs=a,missing")
    assert joined.status_code == 404
    assert client.get("/compare?runs=a&x=nonsense&metric=nonsense").status_code == 200


def test_one_damaged_run_hides_no_other(client: TestClient, folder: Path) -> None:
    (folder / "a" / "metrics.jsonl").write_text("{damaged\n{}\n")
    page = client.get("/").text
    assert "damaged" in page and "b,c=1" in page
    assert client.get("/run/a").status_code == 422
    assert "line 1" in client.get("/run/a").text
    assert "line 1" in client.get("/compare?runs=a&runs=b%2Cc%3D1").text


def test_packed_rows(client: TestClient, folder: Path) -> None:
    write_pack(folder / "a", 4)
    assert "<iframe" in client.get("/run/a/rows/4").text
    page = client.get("/run/a/pack/4?rows=0")
    assert page.status_code == 200
    assert "Row 0" in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "sha256-" in page.headers["content-security-policy"]
    assert client.get("/run/a/pack/4?rows=9").status_code == 422
    assert client.get("/run/a/rows/3").status_code == 404
    assert (
        client.get("/run/a/rows/4")
        .headers["content-security-policy"]
        .startswith("default-src 'self'")
    )


# Attacks.


def test_a_models_text_stays_text(client: TestClient, folder: Path) -> None:
    path = folder / "a" / "iterations" / "0004" / "rollouts.jsonl"
    evil = [
        sample("sum/0", 0, random.Random(0)) | values
        for values in (
            {"text": EVIL, "token_ids": None, "logprobs": None},
            {"task_id": EVIL},
            {"messages": [{"role": EVIL, "content": EVIL}]},
            {"finish_reason": EVIL, "error": EVIL, "reward": None, "metrics": {EVIL: 1.0}},
        )
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in evil))
    row = {"iteration": 5, "reward": 0.5, "metrics": {EVIL: 0.5}, "validation": {EVIL: 1.0}}
    with (folder / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    addresses = [
        "/",
        "/run/a",
        "/run/a/iteration/4",
        "/run/a/iteration/5",
        "/run/a/samples?iterations=4",
        "/compare?runs=a&runs=b%2Cc%3D1",
    ]
    addresses += [f"/run/a/sample/4-{line}" for line in range(4)]
    addresses += [
        f"/run/a/samples?{name}={quote(EVIL)}" for name in ("text", "where", "iterations", "finish")
    ]
    addresses += [f"/compare?metric={quote(EVIL)}&runs=a", f"/run/{quote(EVIL, safe='')}"]
    shown = 0
    for address in addresses:
        page = client.get(address)
        assert page.status_code in (200, 404), address
        tags = Tags(page.text)
        assert tags.names.count("script") == 1, address  # ui.js
        assert "img" not in tags.names and not tags.handlers, address
        shown += "&lt;script&gt;alert(1)" in page.text
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "script-src" not in policy
    assert shown >= 8


@pytest.mark.parametrize(
    "address",
    [
        "/run/%2e%2e", "/run/..%2f..%2fetc", "/run/a/sample/..%2f..",
        "/run/a/sample/%2e%2e", "/run/a/rows/%2e%2e%2fconfig", "/run/a/pack/-1", "/run/%00", "/ui.css/../../cli/runs.py",
        "/run/a/sample/4-99999", "/run/a/iteration/99", "/run/a/../../../etc/passwd", "//etc/passwd", "/static/x",
    ],
)  # fmt: skip
def test_no_path_leaves_the_runs(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 404, address
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "address",
    [
        "/",
        "/run/a",
        "/ui.js",
        "/compare",
        "/missing",
        "/?key=",
        "/?key=x",
        f"/?key={KEY}x",
        f"/?key={KEY}&key=x",
        "/?key=%ff%fe",
    ],
)
def test_without_the_key_nothing_is_shown(folder: Path, address: str) -> None:
    for key in ("", "x", KEY[:-1], KEY + "x"):
        answer = client_of(folder, key).get(address)
        assert answer.status_code == 401
        assert "finished" not in answer.text and "set-cookie" not in answer.headers


def test_the_key_becomes_a_cookie(folder: Path) -> None:
    client = client_of(folder, "")
    answer = client.get(f"/run/a/samples?text=x&key={KEY}")
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie
    assert KEY not in answer.text and "url=/run/a/samples?text=x" in answer.text
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert client.get("/run/a/samples?text=x").status_code == 200  # the client keeps cookies
    # No address of another host, and no markup.
    for path in ("/%2Fevil.example/", "/%5Cevil.example", "/%22%3E%3Cscript%3Ex"):
        page = client_of(folder, "").get(f"{path}?key={KEY}").text
        target = re.search(r'url=([^"]*)"', page)
        assert target is not None
        assert re.match(r"/[^/\\]", target[1]) and "<script" not in page


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8765",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::2]:8765",
        "127.0.0.2",
    ],
)
def test_other_host_names_are_refused(client: TestClient, host: str) -> None:
    """A foreign page may give its own name the address 127.0.0.1."""
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "finished" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:9", "LOCALHOST", "[::1]:80"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


def test_foreign_pages_are_refused(client: TestClient) -> None:
    """Pages of other ports of this host are of the same site: the cookie comes with them."""
    for origin in ("cross-site", "same-site"):
        assert client.get("/", headers={"sec-fetch-site": origin}).status_code == 403
    for origin in ("same-origin", "none"):
        assert client.get("/", headers={"sec-fetch-site": origin}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(client: TestClient, folder: Path, method: str) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    for address in ("/", "/run/a", "/run/a/samples"):
        assert client.request(method, address).status_code == 405
        assert client.get(address).status_code == 200
        assert client.head(address).content == b""
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_the_command_listens_on_the_loopback_only(folder: Path) -> None:
    """A process as a user starts it: its address, its key, its port, its end."""
    command = [sys.executable, "-m", "ttrl.cli", "ui", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            match = re.fullmatch(r"(http://127\.0\.0\.1:([0-9]+))/\?key=(\S{43})\n", lines[1])
            assert match is not None, lines
            with httpx.Client(base_url=match[1], timeout=30) as browser:
                assert browser.get("/").status_code == 401
                assert browser.get(f"/?key={match[3]}").status_code == 200
                assert "b,c=1" in browser.get("/").text
            own = socket.gethostbyname(socket.gethostname())
            for address in {own, "127.0.0.2"} - {"127.0.0.1"}:
                with socket.socket() as other:
                    other.settimeout(1)
                    assert other.connect_ex((address, int(match[2]))) != 0
            taken = subprocess.run(
                [*command, "--port", match[2]], capture_output=True, text=True, check=False
            )
            assert taken.returncode == 2 and "--port" in taken.stderr
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=30)
    assert match[3] not in errors and "Traceback" not in errors
