"""A file is data: whatever it says, reading it and running what it holds calls nothing that it names."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
import torch
from torch import nn

from chipfit.engine.trees import read_tree
from chipfit.errors import ChipfitError, GraphError
from chipfit.pipeline import load, quantize


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return {"y": torch.cumprod(self.a(x), 1)}  # no canonical operator: an opaque node


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    return quantize(Net().eval(), [X], progress=False)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported, and the mark."""
    mark = tmp_path / "mark"
    (tmp_path / "trap.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nclass Thing:\n    def from_config(c): pass\ndef touch(*a): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield mark
    sys.modules.pop("trap", None)


def test_the_trap_springs_when_it_is_imported(trap):
    import trap as _  # noqa: F401

    assert trap.exists()


# ---------------------------------------------------------------- saved results


def tampered(result, tmp_path, change):
    """A saved result with another graph.json, and a manifest that agrees."""
    root = result.save(tmp_path / "out")
    graph = json.loads((root / "graph.json").read_text())
    change(graph)
    (root / "graph.json").write_text(json.dumps(graph))
    manifest = json.loads((root / "manifest.json").read_text())
    size = (root / "graph.json").stat().st_size
    manifest["files"]["graph.json"] = {
        "sha256": hashlib.sha256((root / "graph.json").read_bytes()).hexdigest(),
        "bytes": size,
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def opaque(graph):
    return next(n for n in graph["nodes"] if n["op"] == "Opaque")


CALLS = {
    "a method by name": ("operator.methodcaller", ["touch"]),
    "any callable": ("operator.call", [{"torch": "load"}]),
    "any attribute": ("operator.attrgetter", ["__class__"]),
    "a module of torch": ("operator.getitem", [{"torch": "os"}, 0]),
    "a function of torch": ("operator.getitem", [{"torch": "load"}, 0]),
    "a dotted constant": ("operator.getitem", [{"torch": "hub.load"}, 0]),
    "a private constant": ("operator.getitem", [{"torch": "__builtins__"}, 0]),
    "a device that is no device": ("operator.getitem", [{"torch": "device:privateuseone:x"}, 0]),
    "a file of the disk": ("aten.from_file.default", ["MARK", True, 4]),
    "a print": ("aten._print.default", ["x"]),
    "a foreign operator": ("c10d.all_reduce.default", [{"$ref": 0}]),
    "an attribute of an operator": ("aten.cumprod.__class__", [{"$ref": 0}, 1]),
    "an operator that writes": ("aten.set_.source_Tensor", [{"$ref": 0}, {"$ref": 0}]),
    "a function of torch as target": ("torch.load", ["MARK"]),
    "a module as target": ("os.system", ["touch MARK"]),
    "a constant of math": ("math.__loader__", []),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_saved_result_calls_only_what_is_listed(result, tmp_path, call):
    mark = tmp_path / "mark"
    target, args = json.loads(json.dumps(call).replace("MARK", str(mark)))
    root = tampered(result, tmp_path, lambda g: opaque(g)["attrs"].update(target=target, args=args))
    with pytest.raises(ChipfitError, match="that a graph can hold"):
        load(root).model(X)
    assert not mark.exists()


@pytest.mark.parametrize("field", ["in_spec", "out_spec"])
@pytest.mark.parametrize("kind", ["trap.Thing", "collections.namedtuple", "trap"])
def test_a_saved_structure_imports_no_class(result, tmp_path, trap, field, kind):
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = json.dumps([1, {"type": kind, "context": json.dumps("trap.Thing"), "children_spec": [leaf]}])

    def change(graph):
        graph[field] = json.dumps({**json.loads(graph[field]), "tree": tree, "plain": tree, "captured": "trap.Thing"})

    got = load(tampered(result, tmp_path, change)).model(X)
    assert (got if field == "in_spec" else {"y": got[0]})["y"].shape == (4, 4)
    assert not trap.exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[2, {}]", '[1, {"type": "builtins.dict", "context": "[[1]]", "children_spec": []}]', "[" * 10**5],
)
def test_a_malformed_structure_is_refused(text):
    with pytest.raises(GraphError, match="structure of inputs or outputs is malformed"):
        read_tree(text)


def test_a_type_is_found_in_a_table_and_nowhere_else(result, tmp_path):
    root = tampered(result, tmp_path, lambda g: g["values"]["x"].update(dtype="load"))
    with pytest.raises(ChipfitError, match="no type of numbers named 'load'"):
        load(root)
