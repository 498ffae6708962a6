"""Pages of the docs, their blocks, and the commands on them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md")]
)
_BLOCK = re.compile(r"^```(\w+)[ ]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str, int]]:
    """(language, rest of the fence, text, line of the text) of each fenced block."""
    text = page.read_text()
    return [(m[1], m[2], m[3], text.count("\n", 0, m.start(3))) for m in _BLOCK.finditer(text)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shell_lines() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for language, _, text, _ in blocks(page):
            if language == "console":
                found += [
                    (name(page), line[2:].split("#")[0].strip()) for line in text.splitlines() if line.startswith("$ ")
                ]
    return found
