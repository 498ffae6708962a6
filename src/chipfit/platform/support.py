"""The generated pages: which platform supports what, and the JSON Schema of platform files.

python -m chipfit.platform.support DOCS_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from chipfit.platform.load import load, names
from chipfit.platform.modelled import kernels_of, whole_arithmetic
from chipfit.platform.schema import Platform
from chipfit.platform.show import option_text


def support_table() -> str:
    """Markdown: one row per built-in platform."""
    lines = [
        "# Built-in platforms",
        "",
        "Generated from the platform files by `make docs`. V, D, I count the rules that are verified in source, "
        "documented, inferred. Simulated: whole where all that the file says of arithmetic is, so that exactness is"
        " claimed; in part where `chipfit platforms show` names what is not modelled; - where no integers are.",
        "",
        "| platform | device | first choice of weighted operators | rules V/D/I | fusions | arithmetic | simulated"
        " | deploys as |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names():
        p = load(name)
        first = next((option_text(u) for o in p.ops for u in o.use if u.w), "-")
        counts = "/".join(str(sum(o.conf == c for o in p.ops)) for c in "VDI")
        math = p.math.requant.get("form", "-") if p.math.requant else "-"
        how = "whole" if whole_arithmetic(p) else "in part" if kernels_of(p) else "-"
        cells = (
            f"`{name}`",
            p.title,
            first,
            counts,
            str(len(p.fuse)),
            str(math),
            how,
            p.deploy[0] if p.deploy else "-",
        )
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def json_schema() -> str:
    """The JSON Schema that editors use to complete and check platform files."""
    schema = Platform.model_json_schema(by_alias=True)
    for hidden in ("arch_selected", "file"):
        schema["properties"].pop(hidden, None)
    schema["title"] = "chipfit platform, schema version 0"
    return json.dumps(schema, indent=1) + "\n"


#: generated file below docs/ -> its text
PAGES = {"platforms/support.md": support_table, "schema/platform.schema.json": json_schema}


def write(docs: Path) -> None:
    """Write every generated page."""
    for name, make in PAGES.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(make())


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
