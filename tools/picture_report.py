"""Screenshots of a run's report: `python tools/picture_report.py RUN [--output DIR]`.

Uses a headless Chromium (the environment variable CHROMIUM, or one on the PATH) and writes PNG files: the first screen and the
whole page at desktop width, the whole page at phone width, each in light and dark. Only the standard library is used; the browser
is controlled over its own protocol (Chrome DevTools) through a pair of pipes, so no port is opened.
"""

import argparse
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
VIEWS = {"desktop": (1440, 900, False), "desktop_whole": (1440, 900, True), "phone_whole": (390, 844, True)}
_MAX_HEIGHT = 16_000  # pixels: beyond it, GPU-less Chromium draws white
_TIMEOUT = 60


def find_chromium() -> str:
    """The browser's path. Raises SystemExit where there is none."""
    given = os.environ.get("CHROMIUM")
    found = given or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None or shutil.which(found) is None:
        sys.exit(f"picture_report: no Chromium ({given or ', '.join(NAMES)}); install one (apt install chromium) or set CHROMIUM")
    return found


class Browser:
    """A headless Chromium with one page, as a context manager."""

    def __init__(self, path: str) -> None:
        self._path, self._number, self._session = path, 0, None

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
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--disable-background-networking"]

        def pipes() -> None:  # Chromium reads from 3 and writes to 4; they are put beyond reach first, as either may be 3 or 4
            reads, writes = os.dup(to_browser), os.dup(to_us)
            reads, writes = os.dup2(reads, 20), os.dup2(writes, 21)
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
        self._to, self._from = from_us, from_browser
        self._rest = b""
        self._events: list[Any] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
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

    def picture(self, page: Path, width: int, height: int, *, whole: bool, dark: bool, script: str = "") -> bytes:
        """PNG of a page; `script` is run in it first (for tests of what clicks do)."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self._events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait_for("Page.loadEventFired")
        if script:
            self.call("Runtime.evaluate", expression=script)
        clip = {}
        if whole:
            content = self.call("Page.getLayoutMetrics")["cssContentSize"]
            tall = min(content["height"], _MAX_HEIGHT / size["deviceScaleFactor"])
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}, "captureBeyondViewport": True}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"])

    def overflow(self) -> float:
        """Pixels by which the page last shown is wider than its window: above 0, a phone scrolls sideways."""
        expression = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return float(self.call("Runtime.evaluate", expression=expression)["result"]["value"])


def main() -> int:
    """Writes the pictures; 1 where the page is wider than a window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, or an .html file")
    parser.add_argument("--output", type=Path, help="a folder; by default RUN/pictures")
    arguments = parser.parse_args()
    page = arguments.run if arguments.run.suffix == ".html" else arguments.run / "report.html"
    if not page.is_file():
        sys.exit(f"picture_report: {page} does not exist; `ttrl report {arguments.run}` writes it")
    output = arguments.output or page.parent / "pictures"
    output.mkdir(parents=True, exist_ok=True)
    wide = []
    with Browser(find_chromium()) as browser:
        for name, (width, height, whole) in VIEWS.items():
            for dark in (False, True):
                path = output / f"{name}_{'dark' if dark else 'light'}.png"
                path.write_bytes(browser.picture(page, width, height, whole=whole, dark=dark))
                print(path)
                if (pixels := browser.overflow()) > 0:
                    wide.append(f"{name}: {pixels:g} pixels wider than its window")
    for line in wide:
        print(line, file=sys.stderr)
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
