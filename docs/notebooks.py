"""Notebooks of the docs: run them as a kernel would, store what they show, and write them as pages of the site.

`python docs/notebooks.py [NAME ...]` runs them again and stores the outputs. mkdocs loads this file as a hook.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
Notebook = dict[str, Any]


def read(path: Path) -> Notebook:
    """Return a notebook as data (nbformat 4)."""
    return json.loads(path.read_text(encoding="utf-8"))


def run(notebook: Notebook, folder: Path, name: str = "notebook") -> Notebook:
    """Run the code cells from top to bottom in a folder; return the notebook with what they print and show."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    with _inside(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                outputs = list(_outputs("".join(cell["source"]), namespace, f"{name}[{count}]", count))
                cell = {**cell, "execution_count": count, "outputs": outputs}
            cells.append(cell)
    return {**notebook, "cells": cells}


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))


def _outputs(code: str, namespace: dict[str, Any], name: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield what a cell prints, and the value of its last expression, as outputs of nbformat."""
    tree, printed, value = ast.parse(code, name), io.StringIO(), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
    if text := printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
    if value is not None and not code.rstrip().endswith(";"):
        yield {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": _shown(value)}


def _shown(value: Any) -> dict[str, Any]:
    """Return what a notebook shows of a value, by type of content."""
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if html := getattr(value, "_repr_html_", lambda: None)():
        data["text/html"] = html.splitlines(keepends=True)
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return data


def page(notebook: Notebook, file: str) -> str:
    """Return a notebook as Markdown.

    Args:
        file: its name, for the link to download it.
    """
    parts = []
    for n, cell in enumerate(notebook["cells"]):
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        if n == 0:
            parts.append(f"[Download this notebook]({file}){{ .md-button }}")
        parts += [_written(o) for o in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _written(output: dict[str, Any]) -> str:
    """Return an output as Markdown: its picture, its HTML, or its text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<div class="output"><img alt="plot" src="data:image/png;base64,{data["image/png"]}"></div>'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f"```text {{ .output }}\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook; called by mkdocs."""
    from mkdocs.structure.files import File

    for path in sorted(FOLDER.glob("*.ipynb")):
        text = page(read(path), path.name)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to notebooks, which are files in the repository, lead to their pages; called by mkdocs."""
    return re.sub(r"\(((?:\.\./)*notebooks/\w+)\.ipynb\)", r"(\1.md)", markdown)


def main(names: list[str]) -> None:
    """Run notebooks, all by default, and store what they show."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                done = run(read(path), Path(folder), path.stem)
            path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
