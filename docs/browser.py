"""Open pages in headless Chromium, as on a desktop and a phone, in light and dark, and check what a reader sees.

`python docs/browser.py` builds the site and opens every page; `python docs/browser.py a.html b.html` opens these.
The script `browser.js` lists what is wrong on a page. The browser is driven by its DevTools protocol over two pipes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SCRIPT = (DOCS / "browser.js").read_text(encoding="utf-8")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
FLAGS += " disable-component-update disable-extensions remote-debugging-pipe"


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """A page of a running browser, and the events that it has sent."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._rest = commands, answers, b""
        self._ids, self._session = itertools.count(1), {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the browser's answer to a command."""
        key = next(self._ids)
        message = {"id": key, "method": method, "params": params, **self._session}
        left = json.dumps(message).encode() + b"\0"
        while left:
            left = left[os.write(self._commands, left) :]
        while (answer := self._read()).get("id") != key:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait(self, event: str) -> None:
        """Read events until one of this kind has come."""
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def look(self, url: str, size: str, scheme: str) -> dict[str, Any]:
        """Open a page; return what `browser.js` counts and finds on it, with what console and network report."""
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [("prefers-color-scheme", scheme), ("prefers-reduced-motion", "reduce")]
        self.call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("Page.loadEventFired")
        asked = {
            "expression": f"({SCRIPT})({width}, {json.dumps(scheme)})",
            "awaitPromise": True,
            "returnByValue": True,
        }
        answer = self.call("Runtime.evaluate", **asked)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        seen = answer["result"]["value"]
        seen["found"] += [text for e in self.events if (text := _complaint(e))]
        return seen


def _complaint(event: dict[str, Any]) -> str:
    """Return what an event says is wrong, or nothing."""
    given, kind = event.get("params", {}), event.get("method")
    if kind == "Runtime.exceptionThrown":
        details = given["exceptionDetails"]
        return f"exception: {details.get('exception', {}).get('description') or details['text']}"
    if kind == "Network.loadingFailed":
        return f"request failed: {given['errorText']}"
    if kind == "Network.requestWillBeSent" and not given["request"]["url"].startswith(("file:", "data:", "blob:")):
        return f"request to another machine: {given['request']['url']}"
    if kind == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
        return f"{given['entry']['level']}: {given['entry']['text']} {given['entry'].get('url', '')}"
    if kind == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
        return f"console: {[a.get('value', a.get('description')) for a in given['args']]}"
    return ""


@contextlib.contextmanager
def opened(browser: str) -> Iterator[Tab]:
    """Start a browser with a profile of its own; end it and remove the profile at the end."""
    to_it, commands = os.pipe()
    answers, from_it = os.pipe()

    def numbered() -> None:
        """Give the child its pipes as the descriptors 3 and 4."""
        copies = os.dup(to_it), os.dup(from_it)
        while min(copies) <= 4:
            copies = os.dup(copies[0]), os.dup(copies[1])
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *(f"--{flag}" for flag in FLAGS.split()), f"--user-data-dir={profile}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(command, preexec_fn=numbered, pass_fds=(3, 4), **quiet)
        os.close(to_it)
        os.close(from_it)
        try:
            yield (tab := Tab(commands, answers))
            with contextlib.suppress(RuntimeError):
                tab.call("Browser.close")
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()
            child.wait()
            os.close(commands)
            os.close(answers)


def check(pages: Sequence[Path]) -> tuple[Counter[str], list[str]]:
    """Open each page in every size and scheme.

    Returns:
        counts of what was checked and left out, and what is wrong, one line for each page and fault.
    """
    counts: Counter[str] = Counter()
    where: dict[str, list[str]] = {}
    browser = find()
    if browser is None:
        raise RuntimeError("no chromium is installed. Try: apt-get install chromium")
    with opened(browser) as tab:
        for page in pages:
            for size, scheme in itertools.product(SIZES, SCHEMES):
                seen = tab.look(page.resolve().as_uri(), size, scheme)
                counts.update(seen["counts"])
                for fault in dict.fromkeys(seen["found"]):
                    where.setdefault(f"{page.name}: {fault}", []).append(f"{size} {scheme}")
    return counts, [f"{fault} ({', '.join(views)})" for fault, views in where.items()]


def build(folder: Path) -> list[Path]:
    """Build the site into a folder; return its pages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=DOCS.parent, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return sorted(p for p in folder.rglob("*.html") if p.name != "404.html")  # its links are those of a server


def main(names: Sequence[str]) -> int:
    """Check the pages that are named, or the site; print counts and faults."""
    with tempfile.TemporaryDirectory() as folder:
        pages = [Path(name) for name in names] or build(Path(folder))
        start = time.monotonic()
        counts, found = check(pages)
    print(*found, sep="\n")
    views = len(pages) * len(SIZES) * len(SCHEMES)
    print(f"{len(pages)} pages, {views} views in {time.monotonic() - start:.0f} s; {len(found)} faults")
    print("; ".join(f"{name}: {count:,}" for name, count in counts.items()))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
