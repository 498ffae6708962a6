"""Terminal captures and pictures of reports for the docs: `python docs/captures.py` runs the commands and draws them.

The commands are those of `tutorials/command-line.md`, in their order. A picture of the report needs Chromium.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "tutorials/command-line.md"
COLUMNS = 92


def blocks(language: str) -> list[tuple[str, str]]:
    """Return (rest of the fence, text) of each block of the page in a language."""
    found = re.findall(r"^```(\w+)[ ]*(.*?)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [(rest, text) for kind, rest, text in found if kind == language]


def commands() -> list[str]:
    """Return the commands of chipfit on the page, in order."""
    return [line[2:] for _, text in blocks("console") for line in text.splitlines() if line.startswith("$ chipfit")]


def prepare(folder: Path) -> None:
    """Write the files that the commands read: those that the page shows, and those that its Python writes."""
    for rest, text in blocks("python"):
        if title := re.search(r'title="([^"]+)"', rest):
            (folder / title[1]).write_text(text)
        else:
            subprocess.run([sys.executable, "-c", text], cwd=folder, check=True)


def svg(command: str, printed: str) -> str:
    """Return a terminal in which a command has printed a text with escape sequences, as SVG that loads nothing."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold green]$[/] {command}", highlight=False)
    console.print(Text.from_ansi(printed.rstrip()))
    drawn = console.export_svg(title="", unique_id=command.split()[1])
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def picture(report: Path, to: Path) -> None:
    """Take a picture of a report, if there is a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no browser: the picture of the report stays as it is")
        return
    with tempfile.TemporaryDirectory() as profile:
        flags = "headless no-sandbox disable-gpu no-first-run hide-scrollbars window-size=1180,1240".split()
        flags += [f"user-data-dir={profile}", f"screenshot={to}", "virtual-time-budget=3000"]
        subprocess.run([browser, *(f"--{f}" for f in flags), report.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Run every command and draw those that the page shows, as `terminal/<command>.svg`."""
    out, shown = DOCS / "terminal", set(re.findall(r"terminal/(\w+)\.svg", PAGE.read_text()))
    out.mkdir(exist_ok=True)
    env = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for command in commands():
            run = [sys.executable, "-m", "chipfit", *command.split()[1:]]
            done = subprocess.run(run, cwd=folder, env=env, check=True, capture_output=True, text=True)
            if (key := command.split()[1]) in shown:
                shown.remove(key)  # the first of its kind
                (out / f"{key}.svg").write_text(svg(command, done.stdout))
                print(f"{key}.svg")
        picture(folder / "fitted/report.html", out / "report.png")


if __name__ == "__main__":
    main()
