"""Adapt docs/ for mkdocs, so that the same pages work on GitHub and on the site (mkdocs.yml).

- The navigation comes from the tables of docs/README.md: a page is listed once, there. The search
  finds a page by the questions of its rows, too, as tags.
- A link to a file outside docs/ leads to a page with the file's content. So the site needs neither
  a network nor the repository's address.
- The page of the Python API gets the docstrings of the names in its tables.
- A block that no test runs gets a line with the reason, from the comment above it.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe
from docstrings import as_markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
INDEX = "docs/README.md"
API = "docs/reference/api.md"
WORKER = "assets/worker.js"
REPOSITORY = "repository"
"""The site's folder for pages of files outside docs/."""
UNSEARCHED = {"CHANGELOG.md"}
"""Pages that answer no question; those of sources are left out by `content`."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
CODE = re.compile(r"(^(?P<fence>`{3,}).*?^(?P=fence)$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"^<!-- not run: (.*?) -->\n(```.*?^```)$", re.DOTALL | re.MULTILINE)
SIGNATURE_ONLY = {"TrainConfig", "GRPOConfig"}
"""Classes with a page of their own: docs/reference/settings.md."""


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied to everything but its code."""
    parts = CODE.split(text)
    # Each match leaves three parts: prose, code, and the group of its fence.
    for number in range(0, len(parts), 3):
        parts[number] = change(parts[number])
    return "".join(part for number, part in enumerate(parts) if number % 3 != 2)


def target(path: str, link: str) -> str | None:
    """Return the path from the root of the file that a relative link in `path` names."""
    name = link.partition("#")[0]
    if not name or "://" in link or link.startswith("mailto:"):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    if found.startswith(".."):
        return None
    return found if (ROOT / found).exists() else None


def place(path: str) -> str:
    """Return the place on the site, from docs/, of a path from the root."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    suffix = "" if path.endswith(".md") else ".md"
    return f"{REPOSITORY}/{path}{suffix}"


def origin(page_uri: str) -> str:
    """Return the path from the root of the file behind a page: the inverse of `place`."""
    if not page_uri.startswith(f"{REPOSITORY}/"):
        return f"docs/{page_uri}"
    path = page_uri.removeprefix(f"{REPOSITORY}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def relink(path: str, text: str) -> str:
    """Return the Markdown of the file `path` with links that hold on the site."""
    folder = posixpath.dirname(place(path))

    def moved(link: re.Match[str]) -> str:
        found = target(path, link[0])
        if found is None:
            return link[0]
        _, mark, anchor = link[0].partition("#")
        return posixpath.relpath(place(found), folder or ".") + mark + anchor

    return outside_code(text, lambda prose: LINK.sub(moved, prose))


def links(path: str) -> Iterator[str]:
    """Yield the files outside docs/ that a Markdown file or the page of a folder names."""
    source = ROOT / path
    if source.is_dir():
        yield from (f"{path}/{name}" for name in listed(source))
    elif source.suffix in (".md", ".ipynb"):
        prose = CODE.sub("", content(path))
        found = (target(path, link) for link in LINK.findall(prose))
        yield from (one for one in found if one and not one.startswith("docs/"))


def listed(folder: Path) -> list[str]:
    """Return the names of a folder's files."""
    return sorted(one.name for one in folder.iterdir() if one.is_file())


def content(path: str) -> str:
    """Return the Markdown of the page of a file or folder outside docs/."""
    source = ROOT / path
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    if source.suffix == ".ipynb":
        return notebook(source)
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if source.is_dir():
        names = listed(source)
        return head + "\n".join(f"- [{name}]({source.name}/{name}.md)" for name in names)
    language = LANGUAGES.get(source.suffix, "text")
    return f"{head}`````{language}\n{source.read_text(encoding='utf-8')}\n`````\n"


def notebook(source: Path) -> str:
    """Return a notebook's cells as Markdown."""
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if is_code else text for text, is_code in texts)


def index_page() -> str:
    """Return the Markdown of the index."""
    return (ROOT / INDEX).read_text(encoding="utf-8")


def rows(section: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the question of each row in a section of the index, and the pages that answer it."""
    for row in section.splitlines():
        question = row.strip("| ").partition(" | ")[0]
        pages = [link.partition("#")[0] for link in LINK.findall(row)]
        pages = [page for page in pages if page.endswith(".md") and not page.startswith("..")]
        if row.startswith("| "):
            yield question, pages


def questions(index: str) -> dict[str, list[str]]:
    """Return the questions that each page answers, by the index."""
    found: dict[str, list[str]] = {}
    for question, pages in rows(index):
        for page in pages:
            found.setdefault(page, []).append(question.replace("`", ""))
    return found


def navigation(index: str) -> list[Any]:
    """Return mkdocs' navigation from the index: sections, bold rows as groups, pages once."""
    menu: list[Any] = [{"Home": "README.md"}]
    seen = {"README.md"}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, table = section.partition("\n")
        entries: list[Any] = []
        group = entries
        for question, pages in rows(table):
            if question.startswith("**"):
                group = []
                entries.append({question.strip("*"): group})
            for page in pages:
                if page not in seen:
                    seen.add(page)
                    group.append(page)
        menu.append({title: entries})
    return menu


def with_docstrings(text: str) -> str:
    """Return the page of the API with each table followed by the docstrings of its names."""

    def documented(table: re.Match[str]) -> str:
        parts = [table[0]]
        for name in re.findall(r"^\| `(\w+)`", table[0], re.MULTILINE):
            parts.append(f"::: ttrl.{name}")
            if name in SIGNATURE_ONLY:
                parts.append(
                    "    options:\n      members: false\n      merge_init_into_class: false"
                )
                parts[-2:] = [f"{parts[-2]}\n{parts[-1]}"]
        return "\n\n".join(parts) + "\n"

    return re.sub(r"(?:^\|.*\n)+", documented, text, flags=re.MULTILINE)


class HouseStyle(griffe.Extension):
    """Rewrite every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


@event_priority(-50)
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, and the search of folders opened without a server."""
    # The offline plugin would load a worker for file: from a server.
    config.extra["polyfills"] = [WORKER]
    config.nav = navigation(index_page())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for the files outside docs/ that a page links to, and for the files these name."""
    waiting = [origin(one.src_uri) for one in files.documentation_pages()]
    done = set(waiting)
    while waiting:
        for path in links(waiting.pop()):
            if path not in done:
                done.add(path)
                waiting.append(path)
                files.append(File.generated(config, place(path), content=content(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt one page."""
    path = origin(page.file.src_uri)
    if asked := questions(index_page()).get(page.file.src_uri):
        page.meta["tags"] = asked
    if path in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    if path.endswith((".md", ".ipynb")):
        markdown = relink(path, markdown)
    if path == API:
        markdown = with_docstrings(markdown)
    return NOT_RUN.sub(r"\2\n\n*No test runs this block: \1.*{ .not-run }\n", markdown)
