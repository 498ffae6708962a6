"""A file is data: whatever it says, reading it and running what it holds calls nothing that it names."""

from __future__ import annotations

import hashlib
import json
import pickle
import stat
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from chipfit import files
from chipfit.cli.inputs import load_data, load_model
from chipfit.engine.trees import read_tree
from chipfit.errors import CaptureError, ChipfitError, DataError, GraphError, PlatformError
from chipfit.facade.import_by_name import load_target
from chipfit.frameworks.torch.archive import load as load_program
from chipfit.frameworks.torch.capture import capture
from chipfit.pipeline import load, quantize
from chipfit.platform.load import load as load_platform


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
        graph[field] = json.dumps({**json.loads(graph[field]), "plain": tree, "captured": "trap.Thing"})

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


# ---------------------------------------------------------------- programs


class Trap:
    """Pickles as a call that imports the trap."""

    def __reduce__(self):
        return __import__, ("trap",)


class Branches(nn.Module):
    """What a program may hold: shared weights, a buffer, a constant, a write in place, several outputs, a symbol."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
        self.b.weight = self.a.weight
        self.register_buffer("k", torch.arange(4.0))
        self.c = torch.tensor([1.0, 2.0])

    def forward(self, x, scale=None, *, more):
        y = self.features(x).mean((2, 3)) * self.k
        z = y.view(-1, 4).clone()
        z.add_(more)
        with torch.no_grad():
            first, second = torch.chunk(z, 2, 1)
        top = torch.topk(z, 2, 1)
        return {"y": self.a(y) + self.c, "z": [self.b(z), (first, second), top[0]], "n": torch.zeros(x.shape[0])}


CALL = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),), {"more": torch.ones(2, 4)}


@pytest.fixture
def program(tmp_path):
    model = Branches().eval()
    exported = torch.export.export(
        model, *CALL, dynamic_shapes={"x": {0: torch.export.Dim.AUTO}, "more": {0: torch.export.Dim.AUTO}}
    )
    torch.export.save(exported, tmp_path / "model.pt2")
    return model, tmp_path / "model.pt2"


def rewritten(path, change):
    """The archive with other contents: `change` takes and returns {name below the top folder: bytes}."""
    with zipfile.ZipFile(path) as z:
        top = z.namelist()[0].partition("/")[0]
        inside = {n.removeprefix(f"{top}/"): z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(path, "w") as z:
        for name, content in change(inside).items():
            z.writestr(f"{top}/{name}", content)
    return path


def edited(path, name, change):
    """The archive with one JSON file changed in place by `change`."""

    def edit(inside):
        data = json.loads(inside[name])
        change(data)
        return {**inside, name: json.dumps(data).encode()}

    return rewritten(path, edit)


def test_a_program_that_torch_saved_computes_what_the_model_does(program):
    model, path = program
    loaded, (x,) = load_program(path), (torch.randn(5, 3, 8, 8),)
    want, got = model(x, more=torch.ones(5, 4)), loaded(x, more=torch.ones(5, 4))
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(want)
    leaves = torch.utils._pytree.tree_leaves
    assert all(torch.equal(g, w) for g, w in zip(leaves(got), leaves(want), strict=True))
    assert loaded.a.weight is loaded.b.weight
    assert set(dict(loaded.named_parameters())) == set(dict(model.named_parameters()))


def test_a_program_is_read_as_torch_reads_it(program):
    want = capture(torch.export.load(program[1]).module(check_guards=False), *CALL)
    got = capture(load_program(program[1]), *CALL)
    told = [(n.op, n.outputs, n.layer, n.attrs) for n in want.nodes]
    assert [(n.op, n.outputs, n.layer, n.attrs) for n in got.nodes] == told
    lines = [(g.source, w.source) for g, w in zip(got, want, strict=True)]
    assert all(g == w for g, w in lines if not w.startswith("<eval"))  # torch's reader loses what no_grad wraps
    assert (got.in_spec, got.out_spec, list(got.weights)) == (want.in_spec, want.out_spec, list(want.weights))


def test_sample_inputs_are_never_opened(program, trap):
    _, path = program
    samples = {"data/sample_inputs/model.pt": pickle.dumps(Trap())}
    load_program(rewritten(path, lambda inside: {**inside, **samples}))
    assert not trap.exists()
    pickle.loads(samples["data/sample_inputs/model.pt"])  # what opening them would have done
    assert trap.exists()


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickled_weights_and_constants_are_refused(program, trap, kind):
    _, path = program
    config = f"data/{kind}/model_{kind}_config.json"

    def pickled(inside):
        table = json.loads(inside[config])
        entry = next(iter(table["config"].values()))
        entry["use_pickle"] = True
        return {**inside, config: json.dumps(table).encode(), f"data/{kind}/{entry['path_name']}": pickle.dumps(Trap())}

    with pytest.raises(CaptureError, match="is pickled, and a pickle is code"):
        load_program(rewritten(path, pickled))
    legacy = {f"data/{kind}/model.pt": pickle.dumps(Trap())}
    with pytest.raises(CaptureError, match="is pickled, and a pickle is code"):
        load_program(rewritten(path, lambda inside: {**inside, **legacy}))
    assert not trap.exists()


@pytest.mark.parametrize(
    "name", ["custom_obj_0", "opaque_obj_0", "../../weight_0", "weight_0/../weight_0", "/etc/passwd"]
)
def test_constants_are_raw_tensors_beside_the_program(program, name):
    config = "data/constants/model_constants_config.json"
    path = edited(program[1], config, lambda d: d["config"]["c"].update(path_name=name))
    with pytest.raises(CaptureError, match="is pickled"):
        load_program(path)


def node(data, op="topk"):
    return next(n for n in data["graph_module"]["graph"]["nodes"] if op in n["target"])


CHANGES = {
    "a function of torch": lambda d: node(d).update(target="torch.load"),
    "a function of the system": lambda d: node(d).update(target="os.system"),
    "a function of this file": lambda d: node(d).update(target="trap.touch"),
    "a file of the disk": lambda d: node(d).update(target="torch.ops.aten.from_file.default"),
    "a foreign operator": lambda d: node(d).update(target="torch.ops.trap.touch.default"),
    "an attribute": lambda d: node(d).update(target="torch.ops.aten.topk.__class__"),
    "a control flow": lambda d: node(d).update(target="torch.ops.higher_order.cond"),
    "a value that nobody made": lambda d: node(d)["inputs"][0].update(arg={"as_tensor": {"name": "nobody"}}),
    "an object": lambda d: node(d)["inputs"][0].update(arg={"as_custom_obj": {"name": "x", "class_fqn": "trap.Thing"}}),
    "another generation": lambda d: d["schema_version"].update(major=7),
    "a name that is no name": lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(
        forward_arg_names=["x); __import__('trap'", "s"]
    ),
    "no graph": lambda d: d.pop("graph_module"),
    "a weight that is not there": lambda d: d["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
        parameter_name="__class__.__init__"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_program_calls_only_what_is_listed(program, trap, change):
    with pytest.raises(CaptureError):
        capture(load_program(edited(program[1], "models/model.json", change)), *CALL)
    assert not trap.exists()


MALFORMED = {
    "nodes that are a number": (lambda d: d["graph_module"]["graph"].update(nodes=3), "graph.nodes' is malformed"),
    "an operator without name": (lambda d: node(d).update(target=None), "target' is malformed"),
    "a type in a list": (lambda d: node(d)["inputs"][0].update(arg={"as_scalar_type": [7]}), "as_scalar_type' is malf"),
    "a number in words": (lambda d: node(d)["inputs"][0].update(arg={"as_float": "much"}), "as_float' is malformed"),
    "a shape below zero": (lambda d: shapes(d)["x"]["sizes"][1].update(as_int=-3), "as_int' is malformed"),
    "a signature of text": (lambda d: call(d).update(signature="x"), "signature' is malformed"),
    "no signature": (lambda d: call(d).update(signature=None), "not a program that torch.export.save wrote"),
    "names of arguments as numbers": (lambda d: call(d)["signature"].update(forward_arg_names=[1]), "names.0' is malf"),
    "arguments that are one": (lambda d: call(d)["signature"].update(in_spec=LEAF), "not a program that torch.export"),
}
LEAF = json.dumps([1, {"type": None, "context": None, "children_spec": []}])


def shapes(d):
    return d["graph_module"]["graph"]["tensor_values"]


def call(d):
    return d["graph_module"]["module_call_graph"][0]


@pytest.mark.parametrize("change, words", MALFORMED.values(), ids=MALFORMED)
def test_a_program_whose_tables_are_others_is_refused(program, change, words):
    with pytest.raises(CaptureError, match=words):
        load_program(edited(program[1], "models/model.json", change))


class Masked(nn.Module):
    """Infinities among the arguments of calls, which a file holds as texts."""

    def forward(self, x):
        return torch.softmax(x.masked_fill(x > 0, float("-inf")).clamp(max=float("inf")), 1)


def test_infinities_in_a_program_are_numbers(tmp_path):
    x = torch.tensor([[1.0, -1.0, -2.0]])
    torch.export.save(torch.export.export(Masked().eval(), (x,)), tmp_path / "masked.pt2")
    assert torch.equal(load_program(tmp_path / "masked.pt2")(x), Masked()(x))


def test_symbols_and_origins_of_a_program_are_texts(program, trap):
    evil = "__import__('trap')"

    def change(data):
        graph = data["graph_module"]["graph"]
        for values in (graph["sym_int_values"], graph["tensor_values"]):
            text = json.dumps(values).replace("Symbol(", f"{evil} or Symbol(")
            values.update(json.loads(text))
        data["guards_code"] = [evil]
        data["range_constraints"] = {evil: {"min_val": 0, "max_val": None}}
        node(data)["metadata"] = {
            "nn_module_stack": f"a,{evil},trap.Thing",
            "torch_fn": f"{evil};{evil}",
            "custom": evil,
        }

    capture(load_program(edited(program[1], "models/model.json", change)), *CALL)
    assert not trap.exists()


def test_a_program_of_an_older_torch_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as z:
        z.writestr("serialized_exported_program.json", "{}")
        z.writestr("serialized_state_dict.pt", pickle.dumps(Trap()))
    with pytest.raises(CaptureError, match="not an archive with one program"):
        load_program(tmp_path / "old.pt2")


ARCHIVES = {
    "a path outside": lambda z: z.writestr("../../evil", "x"),
    "an absolute path": lambda z: z.writestr("/etc/evil", "x"),
    "a drive": lambda z: z.writestr("C:\\evil", "x"),
    "a name twice": lambda z: [z.writestr("model/a", "x"), z.writestr("model/a", "y")],
    "a link": lambda z: z.writestr(link("model/a"), "/etc/passwd"),
    "a bomb": lambda z: z.writestr("model/a", b"0" * (1 << 20), compress_type=zipfile.ZIP_DEFLATED),
}


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("suffix", ["pt2", "keras"])
@pytest.mark.parametrize("write", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_holds_plain_files_inside_it(tmp_path, monkeypatch, suffix, write):
    if suffix == "keras":
        pytest.importorskip("keras")
    monkeypatch.setattr(files, "_LARGE", 1 << 16)  # so that the bomb is a small one
    path = tmp_path / f"model.{suffix}"
    with zipfile.ZipFile(path, "w") as z:
        write(z)
    with pytest.raises(CaptureError, match=r"holds links, paths outside or a name twice|says to hold"):
        load_model(str(path))


@pytest.mark.parametrize("suffix, inside", [("pt2", "model.json"), ("keras", "config.json")])
def test_an_archive_that_ends_before_it_says_is_refused_by_name(tmp_path, suffix, inside):
    if suffix == "keras":
        pytest.importorskip("keras")
    path = tmp_path / f"model.{suffix}"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/byteorder" if suffix == "pt2" else inside, "{}")
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\1\2") + 20  # its sizes, packed and not, in the directory
    raw[at : at + 8] = struct.pack("<II", 10_000, 10_000)
    path.write_bytes(raw)
    with pytest.raises(EOFError), zipfile.ZipFile(path) as z:
        z.read(z.namelist()[0])
    with pytest.raises(CaptureError):
        load_model(str(path))


# ---------------------------------------------------------------- Keras, arrays, YAML


@pytest.fixture
def keras_file(tmp_path):
    keras = pytest.importorskip("keras")
    x = keras.Input((4,), name="x")
    y = keras.layers.Dense(4, activation="relu", kernel_regularizer="l2")(x)
    keras.Model(x, keras.layers.GRU(3)(keras.layers.Reshape((2, 2))(y))).save(tmp_path / "m.keras")
    return tmp_path / "m.keras"


def layer(module, name, config=None, registered=None):
    return {"module": module, "class_name": name, "config": config or {}, "registered_name": registered}


def function(module, name):
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


CODE = "4wEAAAAAAAAAAAAAAAEAAAADAAAA8wYAAACXAGQAUwApAU7p"
KERAS = {
    "a foreign class": layer("trap", "Thing"),
    "a foreign class as Keras's": layer("keras.trap", "Thing"),
    "a foreign class by registered name": layer("trap", "Dense", registered="trap>Thing"),
    "a lambda layer": layer(
        "keras.layers", "Lambda", {"function": {"class_name": "__lambda__", "config": {"code": CODE}}}
    ),
    "a lambda": {"class_name": "__lambda__", "config": {"value": [CODE, None, None]}},
    "a lambda as activation": layer("keras.layers", "Dense", {"units": 4, "activation": {"class_name": "__lambda__"}}),
    "a module of torch": layer(
        "keras.layers", "TorchModuleWrapper", {"module": {"class_name": "__bytes__", "config": {}}}
    ),
    "a SavedModel": layer("keras.layers", "TFSMLayer", {"filepath": "MARK"}),
    "a type": {
        "class_name": "__typespec__",
        "spec_name": "Thing",
        "module": "trap",
        "registered_name": None,
        "config": [],
    },
    "a function of Keras that acts": function("keras.config", "enable_unsafe_deserialization"),
    "a function that loads": function("keras.models", "load_model"),
    "a function that downloads": function("keras.utils", "get_file"),
    "a function of the system": function("os", "system"),
    "a builtin": function("builtins", "exec"),
    "a class that is no layer": layer("keras.utils", "PyDataset"),
    "a module of Keras that is not loaded": layer("keras.src.trap", "Thing"),
    "a vocabulary on the disk": layer("keras.layers", "StringLookup", {"vocabulary": "/etc/passwd"}),
}


@pytest.mark.parametrize("config", KERAS.values(), ids=KERAS)
def test_a_keras_file_makes_only_layers_of_keras(keras_file, trap, config):
    def change(inside):
        model = json.loads(inside["config.json"])
        model["config"]["layers"][1] |= config
        return {**inside, "config.json": json.dumps(model).encode()}

    with zipfile.ZipFile(keras_file) as z:
        inside = change({n: z.read(n) for n in z.namelist()})
    with zipfile.ZipFile(keras_file, "w") as z:
        for name, content in inside.items():
            z.writestr(name, content)
    with pytest.raises(CaptureError, match="is not data"):
        load_model(str(keras_file))
    assert not trap.exists()


@pytest.mark.parametrize("config", KERAS.values(), ids=KERAS)
def test_a_saved_keras_layer_is_one_of_keras(result, tmp_path, trap, config):
    pytest.importorskip("keras")
    target, args = "keras:" + json.dumps(config), [[], [{"$ref": 0}], {}]
    root = tampered(result, tmp_path, lambda g: opaque(g)["attrs"].update(target=target, args=args, kwargs={}))
    with pytest.raises(GraphError, match="is refused"):
        load(root).model(X)
    assert not trap.exists()


def test_a_keras_file_loads_and_a_registered_class_is_the_users_own(keras_file):
    assert load_model(str(keras_file)).output_shape == (None, 3)


def test_pickled_arrays_are_refused(tmp_path, trap):
    np.savez(tmp_path / "x.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(DataError, match="cannot be read"):
        load_data(str(tmp_path / "x.npz"))
    assert not trap.exists()


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:trap.touch [1]", "!!python/name:trap.touch", "!!python/module:trap"]
)
def test_a_platform_file_makes_no_objects(tmp_path, trap, tag):
    (tmp_path / "p.yaml").write_text(f"name: p\ntitle: {tag}\n")
    with pytest.raises(PlatformError):
        load_platform(tmp_path / "p.yaml")
    (tmp_path / "p.json").write_text(json.dumps({"schema_version": 1, "name": tag}))
    with pytest.raises(ChipfitError):
        load_target(str(tmp_path / "p.json"))
    assert not trap.exists()
