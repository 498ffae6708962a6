"""Every notebook of the docs runs from top to bottom, and shows what is stored in it."""

import json
import re
import runpy
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
TOOLS = runpy.run_path(str(ROOT / "docs/notebooks.py"))
NAMES = "accuracy_rescue from_mct from_mqbench microcontroller own_chip quickstart"


def cell(code):
    return {"cell_type": "code", "source": [code], "outputs": []}


def shown(notebook):
    """Return for each output its kind and the types of its content."""
    return [(o["output_type"], sorted(o.get("data", {}))) for c in notebook["cells"] for o in c.get("outputs", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_within_a_minute_and_shows_what_is_stored_in_it(path, tmp_path, drop_ins):
    notebook, start = TOOLS["read"](path), time.process_time()
    done = TOOLS["run"](notebook, tmp_path, path.stem)
    assert time.process_time() - start < 60
    assert len(shown(done)) >= 4 and shown(done) == shown(notebook), "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_a_file_that_jupyter_opens(path):
    """The required keys of nbformat 4.5."""
    notebook = TOOLS["read"](path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and "kernelspec" in notebook["metadata"]
    ids = [c["id"] for c in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", i) for i in ids)
    for c in notebook["cells"]:
        assert {"cell_type", "metadata", "source"} <= set(c)
        assert c["cell_type"] == "markdown" or {"outputs", "execution_count"} <= set(c)


def test_the_site_lists_every_notebook():
    import yaml

    assert " ".join(p.stem for p in NOTEBOOKS) == NAMES
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(re.findall(r"notebooks/(\w+)\.md", nav)) == NAMES.split()


def test_links_of_a_notebook_resolve():
    links = [
        (path.name, link)
        for path in NOTEBOOKS
        for c in TOOLS["read"](path)["cells"]
        if c["cell_type"] == "markdown"
        for link in re.findall(r"\]\(([^)#:\s]+)\)", "".join(c["source"]))
    ]
    assert links and [x for x in links if not (ROOT / "docs/notebooks" / x[1]).exists()] == []


def test_a_cell_that_fails_fails_the_run(tmp_path):
    with pytest.raises(ZeroDivisionError):
        TOOLS["run"]({"cells": [cell("1 / 0")]}, tmp_path)


def test_a_run_stores_prints_values_and_pictures(tmp_path):
    code = 'class P:\n    _repr_png_ = lambda self: b"p"\n    __repr__ = lambda self: "pic"\nP()'
    cells = [cell("x = 2\nprint(x)\nx + 1"), cell("x;"), cell(code)]
    done = TOOLS["run"]({"cells": cells}, tmp_path)["cells"]
    assert [o.get("text", o.get("data")) for o in done[0]["outputs"]] == [["2\n"], {"text/plain": ["3"]}]
    assert done[1]["outputs"] == []
    assert done[2]["outputs"][0]["data"] == {"text/plain": ["pic"], "image/png": "cA=="}
    text = TOOLS["page"]({"cells": done}, "n.ipynb")
    assert "```python\nx = 2" in text and "```text { .output }\n2\n```" in text and "data:image/png;base64,cA==" in text
    assert json.loads(json.dumps(done)) == done
