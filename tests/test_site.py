"""The site of the docs (mkdocs.yml, tools/site): builds without a warning, needs no network, finds
what newcomers search for; its diagrams are drawn by code.

The links of the pages themselves: test_docs.py.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from diagrams import DIAGRAMS, OUTPUT
from docstrings import as_markdown
from picture_report import NAMES, Browser

import ttrl

ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".venv" / "docs" / "bin" / "mkdocs"
SEARCHES = {
    "reference/objectives.html": ["KL"],
    "how-to/out_of_memory.html": ["out of memory", "OOM", "CUDA out of memory", "does it fit"],
    "how-to/continue.html": ["resume", "continue a run", "my run was killed"],
    "how-to/flat_reward.html": ["reward flat", "reward is flat", "reward 0"],
    "how-to/plan.html": ["how long does it take", "how long", "what does it cost"],
    "how-to/my_model.html": ["my own model", "my model is not listed"],
    "start/machines.html": ["several GPUs", "multiple GPUs"],
    "how-to/several_machines.html": ["several machines", "SLURM"],
    "how-to/loggers.html": ["log to W&B", "wandb", "TensorBoard", "MLflow"],
    "how-to/export.html": ["export the model", "GGUF", "Ollama", "push to the hub"],
    "how-to/judges.html": ["use a judge", "LLM as a judge"],
    "how-to/agents.html": ["I have an agent"],
    "how-to/conversations.html": ["multi-turn"],
    "explanation/gradient_noise.html": ["gradient noise"],
}
"""The page that comes first for what people type."""


@pytest.mark.parametrize("name", sorted(DIAGRAMS))
def test_a_diagram_is_what_the_code_draws(name: str) -> None:
    drawn = (OUTPUT / name).read_text(encoding="utf-8")
    assert drawn == DIAGRAMS[name](), "draw it again: python tools/site/diagrams.py"
    assert "prefers-color-scheme: dark" in drawn


def test_the_page_of_the_api_names_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert sorted(named) == sorted(set(ttrl.__all__) - {"__version__"})


def test_docstrings_become_lists_and_code() -> None:
    text = "Return it.\n\nn: how many,\n    at most 3.\nseed: any.\n\n>>> f(1)\n2"
    assert as_markdown(text) == (
        "Return it.\n\n- `n`: how many, at most 3.\n- `seed`: any.\n\n```pycon\n>>> f(1)\n2\n```"
    )


def test_the_site_names_no_server() -> None:
    """In what it loads; that the pages load nothing else is seen in the built ones, below."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.load(text.replace("!!python/object/apply:", "!x"), Loader=_AnyTag)
    assert config["theme"]["font"] is False and "offline" in config["plugins"]
    for name in ("worker.js", "site.css"):
        assert "://" not in (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8")


class _AnyTag(yaml.SafeLoader):
    """Reads tags that only mkdocs understands as nothing."""


_AnyTag.add_multi_constructor("", lambda *_: None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.exists():
        pytest.skip("`make docs` installs mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium")
    with Browser(found) as one:
        yield one


@pytest.mark.long
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """Long: it builds the site, which proves that mkdocs finds no dead link or missing name."""
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?https?:[^>]*>")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    assert {page.name: found for page in pages if (found := loads.findall(page.read_text()))} == {}
    styles = [one.read_text(encoding="utf-8") for one in site.rglob("*.css")]
    assert styles and not [one for one in styles if re.search(r"url\(\W?https?:", one)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "page"), [(words, page) for page, asked in SEARCHES.items() for words in asked]
)
def test_search_finds_the_page_first(words: str, page: str, site: Path, browser: Browser) -> None:
    """Long: only the built site in a browser, opened as a folder, shows that the search works."""
    browser.open(f"{(site / 'index.html').as_uri()}?q={quote(words)}", 1280, 844)
    first = "document.querySelector('.md-search-result__item a[href]')?.href"
    limit = time.monotonic() + 60
    while not (found := browser.value(first)):
        assert time.monotonic() < limit, "no result"
        time.sleep(0.1)
    assert re.split("[?#]", found)[0] == (site / page).as_uri()


@pytest.mark.long
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways(width: int, site: Path, browser: Browser) -> None:
    """Long: only a browser lays pages out."""
    wide = []
    for page in sorted(site.rglob("*.html")):
        browser.picture(page, width, 844)
        if browser.overflow() > 0:
            wide.append(page.relative_to(site).as_posix())
    assert wide == []
