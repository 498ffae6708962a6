"""Hook of mkdocs: the index of the search as a script, which pages that are opened from a disk can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_post_build(config: Any, **_: Any) -> None:
    """Write the index that the search plugin wrote once more, as a script; called by mkdocs."""
    index = Path(config.site_dir, "search/search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")
