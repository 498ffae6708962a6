"""Results on disk: what comes back is what was saved, and anything else is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import chipfit.plan.saved as saving
from chipfit import load
from chipfit.engine.trees import read_tree
from chipfit.errors import ChipfitError, ExportError, GraphError, PlanError
from chipfit.graph.ir import Graph
from chipfit.plan.diff import diff
from chipfit.plan.record import NodePlan, Plan, hash_graph
from chipfit.platform.load import load as load_platform
from chipfit.platform.load import names
from tests.build import accept, graph_of, model_of, node, quantized, randn, tampered
from tests.processes import python

X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def result():
    def forward(m, x):
        x = torch.relu(m.conv(x)).mean((2, 3))
        return {"y": m.b(torch.special.i0e(m.a(x)))}  # i0e has no canonical operator

    torch.manual_seed(0)
    net = model_of(forward, conv=nn.Conv2d(2, 4, 3), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    net.b.weight = net.a.weight
    return quantized(net, X)


@pytest.fixture
def saved(result, tmp_path):
    return result.save(tmp_path / "out")


def change_tensors(folder, file, change):
    """Change the tensors in a file of a saved result in place, and make the manifest agree."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    accept(folder, file)


def refused(folder, words):
    with pytest.raises(PlanError, match=words):
        load(folder)


def test_graph_plan_and_platform_come_back_equal_and_the_model_gives_the_same_bits(result, saved):
    back = load(saved)
    assert torch.equal(back.model(X)["y"], result.model(X)["y"])
    assert diff(result.plan, back.plan) == [] and back.plan.provenance == result.plan.provenance
    assert hash_graph(back.graph) == hash_graph(result.graph) and back.platform == result.platform
    assert back.graph.nodes == result.graph.nodes and back.graph.values == result.graph.values


def test_tied_weights_are_stored_once_and_stay_tied(saved):
    assert sum(k in ("a.weight", "b.weight") for k in load_file(saved / "weights.safetensors")) == 1
    weights = load(saved).graph.weights
    assert weights["a.weight"] is weights["b.weight"]


def test_two_saves_are_the_same_bytes(result, tmp_path):
    a, b = result.save(tmp_path / "a"), result.save(tmp_path / "b")
    assert {p.name: p.read_bytes() for p in a.iterdir()} == {p.name: p.read_bytes() for p in b.iterdir()}


def test_a_fresh_process_without_the_model_class_loads_it(result, saved):
    torch.save(X, saved.parent / "x.pt")
    code = (
        f"import torch, chipfit; from pathlib import Path; root = Path({str(saved.parent)!r}); "
        "torch.save(chipfit.load(root / 'out').model(torch.load(root / 'x.pt'))['y'], root / 'y.pt')"
    )
    assert python(code).returncode == 0
    assert torch.equal(torch.load(saved.parent / "y.pt"), result.model(X)["y"])


def test_a_directory_of_something_else_is_not_overwritten(result, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(PlanError, match="is not a saved result"):
        result.save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_saving_again_replaces_the_earlier_result_and_a_save_that_fails_leaves_it(result, saved, monkeypatch):
    def no_space_left(*_):
        raise OSError("no space left on device")

    (saved / "plan.json").write_text("broken")
    result.save(saved)
    monkeypatch.setattr(saving, "to_bytes", no_space_left)
    with pytest.raises(ExportError, match="no space left"):
        result.save(saved)
    load(saved)
    assert [p.name for p in saved.parent.iterdir()] == ["out"]


def test_a_report_is_kept_with_it(result, tmp_path):
    root = saving.save(tmp_path / "out", result.graph, result.plan, result.platform, {"error": 0.5})
    assert saving.load(root).report == {"error": 0.5}


# ---- refusals


@pytest.mark.parametrize(
    "name, words",
    [
        (".", "it has no manifest"),
        ("nowhere", "nowhere.*it does not exist"),
        ("no\0where", "no\0where"),
        ("a" * 300, "cannot be read.*OSErr"),
    ],
    ids=["no result", "absent", "no path", "too long"],
)
def test_a_directory_without_a_saved_result_is_refused(name, words, tmp_path):
    with pytest.raises(PlanError, match=words):
        load(tmp_path / name)


FILES = ["plan.json", "plan.safetensors", "graph.json", "weights.safetensors", "platform.json"]


DAMAGE = {
    "is missing": lambda file: file.unlink(),
    "is truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "was changed after it was saved": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("words, damage", DAMAGE.items(), ids=DAMAGE)
def test_a_missing_or_damaged_file_is_named(saved, name, words, damage):
    damage(saved / name)
    refused(saved, f"'{name}' {words}")


@pytest.mark.parametrize(
    "listed, words", [(False, "'{}' is truncated or was changed.*Got: 21474836480"), (True, "sparse")]
)
@pytest.mark.parametrize("name", ["weights.safetensors", "graph.json"])
def test_a_sparse_file_is_refused_before_it_is_read(saved, name, listed, words, monkeypatch):
    with (saved / name).open("wb") as f:
        f.truncate(20 << 30)
    if listed:
        manifest = json.loads((saved / "manifest.json").read_text())
        manifest["files"][name]["bytes"] = 20 << 30
        (saved / "manifest.json").write_text(json.dumps(manifest))
    refused(saved, words.format(name))


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"schema": 1, "fil', r"is not JSON.*manifest\.json"),
        ("[]", "schema version"),
        ('{"schema": 1}', "does not list the files"),
        ('{"schema": 1, "files": {}}', "does not list the files"),
        ('{"schema": 1, "files": {"../secret": {}}}', "does not list the files"),
    ],
)
def test_a_malformed_manifest_is_refused(saved, text, words):
    (saved / "manifest.json").write_text(text)
    refused(saved, words)


@pytest.mark.parametrize(
    "name, content, why",
    [
        ("plan.json", b"\xff{}", "UnicodeDecodeError: 'utf-8'"),
        ("weights.safetensors", b"{}", "SafetensorError: "),
        ("plan.safetensors", b"\xff" * 100, "SafetensorError: "),
    ],
)
def test_a_file_of_another_kind_cannot_be_read(saved, name, content, why):
    (saved / name).write_bytes(content)
    accept(saved, name)
    with pytest.raises(PlanError, match=rf"^'{name}' cannot be read\. Where: {saved / name}\. Got: {why}"):
        load(saved)


def test_a_platform_that_was_saved_without_its_runtimes_has_those_that_it_has_now(result, saved):
    def without(described):
        del described["platform"]["runtimes"], described["platform"]["encodings"]

    tampered(saved, "platform.json", without)
    assert result.platform.runtimes and load(saved).platform == result.platform
    tampered(saved, "platform.json", lambda d: d["platform"].update(runtimes=[]))
    assert load(saved).platform.runtimes == ()  # as it says itself
    tampered(saved, "platform.json", lambda d: (d["platform"].pop("runtimes"), d["platform"].update(name="our_own")))
    assert load(saved).platform.runtimes == ()  # nothing is known of it


# ---- every platform, every attribute


@pytest.mark.parametrize("name", names())
def test_every_platform_comes_back_with_the_same_hash(name, tmp_path):
    platform = load_platform(name)
    if platform.arch:
        platform = load_platform(name, arch=platform.arch[-1])
    saving.save(tmp_path / "p", Graph([], [], [], {}, {}), Plan(), platform)
    assert saving.load(tmp_path / "p").platform.hash == platform.hash


def test_attributes_keep_their_types_and_infinities(tmp_path):
    attrs = {"padding": ((0, 1), (2, 3)), "value": float("-inf"), "axes": [1, 2], "none": None, "flag": True}
    pad = node("y = Pad(x)", {**attrs, "nested": {"a": (1.5,)}})
    graph = graph_of(pad, shapes={"x": (None, 3), "y": (None, 6)}, dtypes={"y": "int64"})
    saving.save(tmp_path / "p", graph, Plan(nodes={"y": NodePlan(name="y", op="Pad")}), load_platform("ort_cpu"))
    back = saving.load(tmp_path / "p").graph
    assert back.nodes == graph.nodes and back.values == graph.values


def test_weights_of_any_layout_and_dtype_come_back(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    weights = {"t": base.t(), "view": base[1:], "whole": base, "i": torch.tensor(3), "b": torch.tensor([True])}
    weights |= {"e": torch.empty(0, 2), "h": torch.ones(2).half()}
    weights["c"] = torch.rand(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    saving.save(tmp_path / "p", Graph([], [], [], {}, dict(weights)), Plan(), load_platform("ort_cpu"))
    back = saving.load(tmp_path / "p").graph.weights
    assert list(back) == list(weights)
    assert all(torch.equal(back[k], weights[k]) and back[k].dtype == weights[k].dtype for k in weights)
    assert back["c"].stride() == weights["c"].stride()  # kernels add up in the order of memory


def test_an_attribute_without_json_form_is_refused(tmp_path):
    graph = graph_of(node("y = Identity(x)", {"f": len}))
    with pytest.raises(PlanError, match="cannot be saved as JSON"):
        saving.save(tmp_path / "p", graph, Plan(), load_platform("ort_cpu"))
    assert list(tmp_path.iterdir()) == []


# ---- numbers that no chip could use


def change(name, by):
    """Return a change of the tensor of a name."""
    return lambda tensors: tensors.update({name: by(tensors[name].clone())})


TENSORS = {
    "a scale that is NaN": ("plan", change("scale:conv.weight", lambda s: s.fill_(float("nan"))), "not positive"),
    "an infinite scale": ("plan", change("scale:x", lambda s: s.fill_(float("inf"))), "not positive"),
    "a scale of 0": ("plan", change("scale:x", lambda s: s.zero_()), "not positive"),
    "a zero point off the grid": ("plan", change("zero_point:x", lambda z: z + 4000), "not a code"),
    "a zero point that is a fraction": ("plan", change("zero_point:x", lambda z: z.float()), "the wrong type"),
    "a scale of another type": ("plan", change("scale:x", lambda s: s.double()), "the wrong type"),
    "a scale too many": ("plan", change("scale:x", lambda s: torch.cat([s.reshape(1)] * 2)), "do not match"),
    "numbers of an unknown tensor": ("plan", lambda t: t.update({"scale:stranger": torch.ones(())}), "scale:stranger"),
    "no scale": ("plan", lambda t: t.pop("scale:conv.weight"), r"'scale' is missing.*conv\.weight"),
    "scales of other channels": (
        "plan",
        lambda t: t.update({f"{k}:conv.weight": t[f"{k}:conv.weight"][:3].clone() for k in ("scale", "zero_point")}),
        "do not fit its shape",
    ),
    "an unknown weight": ("weights", lambda t: t.update(stranger=torch.ones(1)), "stranger"),
    "an infinite weight": ("weights", change("conv.weight", lambda w: w.div_(0)), "must hold finite floats"),
    "a weight of NaN": ("weights", change("a.bias", lambda w: w.fill_(float("nan"))), "'a.bias' holds NaN"),
}


@pytest.mark.parametrize("file, change, words", TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_not_loaded(saved, file, change, words):
    change_tensors(saved, f"{file}.safetensors", change)
    refused(saved, words)


def test_a_weight_of_nan_and_a_spoilt_scale_are_not_saved(saved):
    back = load(saved)
    back.graph.weights["a.bias"].fill_(float("nan"))
    with pytest.raises(PlanError, match="'a.bias' holds NaN"):
        back.save(saved)
    back = load(saved)  # which is as it was
    back.plan["x"].scale.fill_(float("nan"))
    with pytest.raises(PlanError, match="not positive"):
        back.save(saved)
    load(saved)


# ---- data of another form than was saved


@pytest.fixture(scope="module")
def plain_result():
    """A result without opaque operators, so that its graph runs when it is loaded."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()
    return quantized(model, X, overrides={"3": "float"})


def _text(change, field):
    """A change of what a field holds as JSON text."""

    def edit(d):
        inner = json.loads(d[field])
        change(inner)
        d[field] = json.dumps(inner)

    return edit


def _first(d, key="tensors"):
    return next(iter(d[key].values()))


def _bound(**changes):
    """A change that adds a bound on the scale of `relu` with something else in it."""
    bound = {"op": "Relu", "terms": [{"$tuple": ["relu", 1]}], "low": -10.0, **changes}
    return lambda d: d.update(limits=[{**bound, "terms": {"$tuple": bound["terms"]}}])


def _grid(**changes):
    """A change of the grid of `relu`."""
    return lambda d: d["tensors"]["relu"]["grid"].update(changes)


IN_PLAN = {
    "another schema": (lambda d: d.update(schema=99), r"schema version .* Got: 99. Allowed: 1"),
    "a tensor of another network": (lambda d: d["tensors"].update(z={"role": "activation"}), "does not have.*z"),
    "an unknown field": (lambda d: _first(d).update(colour="red"), "'colour' is unknown"),
    "a key too few": (lambda d: d.pop("ties"), "'ties' is missing"),
    "a grid of no kind": (lambda d: _first(d)["grid"].update(kind="x"), "'kind' is not allowed"),
    "instructions of no channels": (lambda d: _first(d, "nodes").update(simd=0), "'simd' must be a number above 0"),
    "a bound on nothing": (_bound(terms=[]), "Scale bound is not valid"),
    "a power that is too large": (_bound(terms=[{"$tuple": ["relu", 10**400]}]), "Scale bound is not valid"),
    "a bound beyond float32": (_bound(low=3.5e38), "Scale bound is not valid"),
    "a bound of nan": (_bound(high={"$float": "nan"}), "Scale bound is not valid"),
    "quantizers without names": (
        lambda d: d["provenance"].update(foreign_quantizers=3),
        "'foreign_quantizers' must be a list",
    ),
    "a seed of 70 bits": (lambda d: d["provenance"]["settings"].update(seed=2**70), "'seed' must be a number below"),
    "a node that is left out": (lambda d: d["nodes"].pop("relu"), "leaves nodes out.*relu"),
    "a tie to nothing": (lambda d: d.update(ties=[["a", "b"]]), "does not have.*a, b"),
    "a range of nan": (lambda d: _first(d).update(low={"$float": "nan"}, high=1.0), "must be finite and asc"),
    "a range that falls": (lambda d: _first(d).update(low=2.0, high=1.0), "must be finite and asc"),
    "values wider than the bits": (_grid(qmax=256), "wider than its bits"),
    "no values": (_grid(qmin=255), "no codes"),
    "65 bits": (_grid(bits=65), "no codes"),
    "a negative least scale": (_grid(scale_min=-1.0), "least scale"),
    "a least scale of next to nothing": (_grid(scale_min=1e-60), "least scale"),
    "a zero point of text": (_grid(zero="x"), "'zero' is not allowed"),
}
IN_GRAPH = {
    "another schema": (lambda d: d.update(schema=99), r"schema version .* Got: 99"),
    "a value that no node writes": (lambda d: d["nodes"].pop(0), "graph is malformed"),
    "half a character": (lambda d: d["nodes"][0].update(layer="\ud800"), "surrogates not allowed"),
    "half a key": (_text(lambda s: s.update(plain='[1, {"\\ud800": 0}]'), "out_spec"), "surrogates not allowed"),
    "a shape of text": (lambda d: _first(d, "values").update(shape="2"), "'shape' must be a list"),
    "an unknown dtype": (lambda d: _first(d, "values").update(dtype="float7"), "no number type named 'float7'"),
    "a missing weight": (lambda d: d["weights"].append("w"), "missing from the file"),
    "an alias of nothing": (lambda d: d["aliases"].update(x="0.bias"), "aliases name missing weights"),
    "channels last without 4 axes": (lambda d: d.update(channels_last=["0.bias"]), "weights with 4 axes"),
    "a trained value": (lambda d: d["trainable"].append("x"), "trainable weights are missing"),
    "arguments that are no table": (lambda d: d.update(in_spec="[]"), "in_spec"),
    "arguments that are not text": (lambda d: d.update(in_spec="{"), "the call of the graph"),
    "an argument too many": (_text(lambda s: s["tensors"].append(1), "in_spec"), "do not fit"),
    "a missing result": (_text(lambda s: s.update(leaves=[{"output": 7}]), "out_spec"), "do not fit"),
    "a malformed structure": (_text(lambda s: s.update(plain="[1, 2]"), "out_spec"), "is not a node"),
    "an operand of another shape": (lambda d: _first(d, "values").update(shape={"$tuple": [2, 6]}), "does not run"),
    "an attribute too few": (lambda d: d["nodes"][0]["attrs"].clear(), "Key 'stride' is missing"),
    "a result of another shape": (lambda d: d["values"]["relu"].update(shape={"$tuple": [2, 2]}), "and was float32"),
}
IN_PLATFORM = {
    "no name": (lambda d: d["platform"].pop("name"), "'name' is missing"),
    "an unknown key": (lambda d: d["platform"].update(colour="red"), r"'colour' is unknown.*platform\.json"),
}
FILES_CHANGED = {"plan.json": IN_PLAN, "graph.json": IN_GRAPH, "platform.json": IN_PLATFORM}
MALFORMED = {f"{f}, {name}": (f, *change) for f, changes in FILES_CHANGED.items() for name, change in changes.items()}


@pytest.mark.parametrize("file, change, words", MALFORMED.values(), ids=MALFORMED)
def test_data_of_another_form_are_not_loaded(plain_result, tmp_path, file, change, words):
    saved = plain_result.save(tmp_path / "out")
    load(saved)
    refused(tampered(saved, file, change), words)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("0.bias", lambda w: w.reshape(1, -1), "do not fit its shape"),
        ("3.bias", lambda w: w.reshape(1, -1), r"bias has the shape \[1, 2\]"),
        ("0.weight", lambda w: w.double(), "float32 and torch.float64"),
        ("0.weight", lambda w: w[:, :1].clone(), "does not run"),
        ("3.weight", lambda w: w.long(), "does not run|must hold floats"),
    ],
)
def test_weights_of_another_form_are_not_loaded(plain_result, tmp_path, name, change, words):
    saved = plain_result.save(tmp_path / "out")
    change_tensors(saved, "weights.safetensors", lambda t: t.update({name: change(t[name])}))
    refused(saved, words)


def test_while_writers_replace_it_a_result_is_read_again(result, saved, monkeypatch):
    real, calls = saving.codec.check_schema, []

    def replaced_meanwhile(*args):
        if not calls:
            calls.append(result.save(saved))
            (saved.parent / "gone").mkdir()
        return real(*args)

    monkeypatch.setattr(saving.codec, "check_schema", replaced_meanwhile)
    assert diff(load(saved).plan, result.plan) == [] and calls


@pytest.mark.parametrize("places", [[0, 0], [1, 1], [1, 0]], ids=str)
def test_every_input_has_an_argument_of_its_own_in_their_order(places, tmp_path):
    net = model_of(lambda m, x, y: m.linear(x) + y, linear=nn.Linear(4, 4))
    folder = quantized(net, [(randn(8, 4), randn(8, 4))]).save(tmp_path / "both")
    tampered(folder, "graph.json", _text(lambda s: s.update(tensors=places), "in_spec"))
    refused(folder, "do not fit the graph's inputs")


# ---------------------------------------------------------------- files that attack


def test_the_trap_springs_when_it_is_imported(trap):
    import trap as _  # noqa: F401

    assert trap.exists()


CALLS = {
    "a method by name": ("operator.methodcaller", ["touch"]),
    "any callable": ("operator.call", [{"torch": "load"}]),
    "any attribute": ("operator.attrgetter", ["__class__"]),
    "a module of torch": ("operator.getitem", [{"torch": "os"}, 0]),
    "a dotted constant": ("operator.getitem", [{"torch": "hub.load"}, 0]),
    "a file of the disk": ("aten.from_file.default", ["MARK", True, 4]),
    "a foreign operator": ("c10d.all_reduce.default", [{"$ref": 0}]),
    "a function of torch as target": ("torch.load", ["MARK"]),
    "a constant of math": ("math.__loader__", []),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_saved_result_calls_only_what_is_listed(saved, tmp_path, call):
    mark = tmp_path / "mark"
    target, args = json.loads(json.dumps(call).replace("MARK", str(mark)))

    def change(graph):
        opaque = next(n for n in graph["nodes"] if n["op"] == "Opaque")
        opaque["attrs"].update(target=target, args=args)

    with pytest.raises(ChipfitError, match="that a graph can hold"):
        load(tampered(saved, "graph.json", change)).model(X)
    assert not mark.exists()


@pytest.mark.parametrize("field", ["in_spec", "out_spec"])
@pytest.mark.parametrize("kind", ["trap.Thing", "collections.namedtuple", "trap"])
def test_a_saved_structure_imports_no_class(saved, trap, field, kind):
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = json.dumps([1, {"type": kind, "context": json.dumps("trap.Thing"), "children_spec": [leaf]}])

    def change(graph):
        graph[field] = json.dumps({**json.loads(graph[field]), "plain": tree, "captured": "trap.Thing"})

    got = load(tampered(saved, "graph.json", change)).model(X)
    assert (got if field == "in_spec" else {"y": got[0]})["y"].shape == (4, 4)
    assert not trap.exists()


@pytest.mark.parametrize(
    "text", ["[2, {}]", '[1, {"type": "builtins.dict", "context": "[[1]]", "children_spec": []}]', "[" * 10**5]
)
def test_a_malformed_structure_is_refused(text):
    with pytest.raises(GraphError, match="structure of inputs or outputs is malformed"):
        read_tree(text)
