"""Take screenshots of a run's report, or the pictures of README.md.

    python tools/picture_report.py RUN [--output DIR]
    python tools/picture_report.py RUN --readme

The first command writes the first screen and the whole page at desktop width, and the whole page
at phone width, each in light and dark. The second writes docs/report.png, docs/before_and_after.png
and docs/packed_row.png; README.md shows those of a run of the quickstart.

Both use a headless Chromium: the one that the environment variable CHROMIUM names, or one on the
PATH. It is controlled over its own protocol (Chrome DevTools) through a pair of pipes, so that no
port is opened.
"""

import argparse
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "headless_shell",
)
VIEWS = {
    "desktop": (1440, 900, False),
    "desktop_whole": (1440, 900, True),
    "phone_whole": (390, 844, True),
}
"""By file name: width and height of the window, and whether the whole page is shown."""
README_BYTES = 150_000
"""Of the largest picture in README.md, which every visitor loads."""
_README_WIDTH = 1120
"""About the width at which GitHub shows a README."""
_MAX_HEIGHT = 16_000  # pixels: beyond it, GPU-less Chromium draws white
_TIMEOUT = 60


def find_chromium() -> str:
    """Return the browser's path. Raises SystemExit where there is none."""
    given = os.environ.get("CHROMIUM")
    names = (given,) if given else NAMES
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    advice = "install one (apt install chromium) or set CHROMIUM"
    sys.exit(f"picture_report: no Chromium ({', '.join(names)}); {advice}")


class Browser:
    """A headless Chromium with one page, as a context manager."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._number = 0
        self._session = None

    def __enter__(self) -> "Browser":
        self._profile = tempfile.TemporaryDirectory(prefix="picture-report-")
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--mute-audio",
        ]
        flags += ["--remote-debugging-pipe", "--disable-background-networking"]
        flags += [f"--user-data-dir={self._profile.name}"]

        # Chromium reads from 3 and writes to 4. Either pipe may have one of these numbers, so both
        # are moved out of the way first.
        def pipes() -> None:
            reads = fcntl.fcntl(to_browser, fcntl.F_DUPFD, 10)
            writes = fcntl.fcntl(to_us, fcntl.F_DUPFD, 10)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [self._path, *flags, "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        self._to = from_us
        self._from = from_browser
        self._rest = b""
        self._events: list[Any] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=_TIMEOUT)
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result; events in between are kept for `wait_for`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer.get("method"))

    def wait_for(self, event: str) -> None:
        """Until an event of this name arrives, or has arrived since `_events` was cleared."""
        while event not in self._events:
            self._events.append(self._message().get("method"))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], _TIMEOUT)[0]:
                raise RuntimeError(f"the browser said nothing for {_TIMEOUT} s")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def picture(
        self,
        page: Path,
        width: int,
        height: int,
        *,
        whole: bool = False,
        dark: bool = False,
        script: str = "",
        element: str = "",
    ) -> bytes:
        """Return a PNG of a page, or of its first element that a CSS selector matches.

        `script` is run in the page first, for tests of what clicks do.
        """
        size = self.open(page.absolute().as_uri(), width, height, dark=dark)
        if script:
            self.value(script)
        options: dict[str, Any] = {"format": "png"}
        if whole or element:
            box = self._box_of(element) if element else self._whole_page(width)
            box["height"] = min(box["height"], _MAX_HEIGHT / size)
            options |= {"clip": {**box, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])

    def open(self, address: str, width: int, height: int, *, dark: bool = False) -> int:
        """Load a page in a window of this size; return its pixels per CSS pixel."""
        phone = width < 600
        size = {"width": width, "height": height, "mobile": phone}
        size["deviceScaleFactor"] = 2 if phone else 1
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._events.clear()
        self.call("Page.navigate", url=address)
        self.wait_for("Page.loadEventFired")
        return size["deviceScaleFactor"]

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def _whole_page(self, width: int) -> dict[str, float]:
        content = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": width, "height": content["height"]}

    def _box_of(self, element: str) -> dict[str, float]:
        """Return where an element lies on the page, in CSS pixels.

        Raises RuntimeError for an element that is missing.
        """
        box_of = f"document.querySelector({json.dumps(element)})?.getBoundingClientRect()"
        answer = self.call("Runtime.evaluate", expression=f"JSON.stringify({box_of})")
        found = answer["result"].get("value")
        if found is None:
            raise RuntimeError(f"the page has no element {element!r}")
        box = json.loads(found)
        return {name: box[name] for name in ("x", "y", "width", "height")}

    def overflow(self) -> float:
        """Return by how many pixels the page last shown is wider than its window.

        Above 0, a phone scrolls sideways.
        """
        expression = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return float(self.call("Runtime.evaluate", expression=expression)["result"]["value"])


@dataclass(frozen=True)
class ReadmePicture:
    """A picture of README.md."""

    name: str
    page: Path
    height: int
    """Of the window, in pixels."""
    element: str = ""
    """A CSS selector of what it shows; without it, the first screen of the page."""


def readme_pictures(run: Path, packed_page: Path) -> list[ReadmePicture]:
    """Return the pictures of README.md: of a run's report, and of its first packed row."""
    report = run / "report.html"
    return [
        ReadmePicture("report", report, height=915),
        ReadmePicture("before_and_after", report, height=915, element="article"),
        ReadmePicture("packed_row", packed_page, height=900),
    ]


def write_readme_pictures(run: Path, output: Path) -> list[Path]:
    """Write the pictures of README.md into a folder, and return their paths.

    Raises RuntimeError for a picture of more than README_BYTES.
    """
    from ttrl.report.view import open_pack

    written = []
    with tempfile.TemporaryDirectory() as folder, Browser(find_chromium()) as browser:
        packed_page = open_pack(run, iteration=1, rows="0").write_html(Path(folder, "packed.html"))
        for one in readme_pictures(run, packed_page):
            png = browser.picture(one.page, _README_WIDTH, one.height, element=one.element)
            if len(png) > README_BYTES:
                size = f"{len(png):,} bytes; {README_BYTES:,} at most"
                raise RuntimeError(f"{one.name}.png has {size}")
            path = output / f"{one.name}.png"
            path.write_bytes(png)
            written.append(path)
    return written


def write_screenshots(page: Path, output: Path) -> int:
    """Write screenshots of a page in every view; return 1 if it is wider than a window."""
    output.mkdir(parents=True, exist_ok=True)
    status = 0
    with Browser(find_chromium()) as browser:
        for name, (width, height, whole) in VIEWS.items():
            for dark in (False, True):
                path = output / f"{name}_{'dark' if dark else 'light'}.png"
                path.write_bytes(browser.picture(page, width, height, whole=whole, dark=dark))
                print(path)
                pixels = browser.overflow()
                if pixels > 0:
                    print(f"{name}: {pixels:g} pixels wider than its window", file=sys.stderr)
                    status = 1
    return status


def main() -> int:
    """Write the pictures; return 1 where the page is wider than a window."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or an .html file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where they go (RUN/pictures)")
    readme = "write the pictures of README.md (into docs)"
    parser.add_argument("--readme", action="store_true", help=readme)
    arguments = parser.parse_args()
    run = arguments.run
    page = run if run.suffix == ".html" else run / "report.html"
    if not page.is_file():
        sys.exit(f"picture_report: {page} does not exist; `ttrl report {run}` writes it")
    if not arguments.readme:
        return write_screenshots(page, arguments.output or page.parent / "pictures")
    for path in write_readme_pictures(run, arguments.output or ROOT / "docs"):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
