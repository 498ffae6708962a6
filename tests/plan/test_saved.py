"""Results on disk: what comes back is what was saved, and anything else is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import chipfit.plan.saved as saving
from chipfit import load, quantize
from chipfit.engine.trees import read_tree
from chipfit.errors import ChipfitError, ExportError, GraphError, PlanError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.diff import diff
from chipfit.plan.record import NodePlan, Plan, TensorPlan, hash_graph
from chipfit.platform.load import load as load_platform
from chipfit.platform.load import names
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from tests.build import accept, tampered


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(2, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        x = torch.relu(self.conv(x)).mean((2, 3))
        return {"y": self.b(torch.cumprod(self.a(x), 1))}  # cumprod has no canonical operator


X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    return quantize(Net().eval(), [X], progress=False)


@pytest.fixture
def saved(result, tmp_path):
    return result.save(tmp_path / "out")


def test_a_loaded_model_gives_the_same_bits(result, saved):
    assert torch.equal(load(saved).model(X)["y"], result.model(X)["y"])


def test_a_result_that_is_replaced_while_it_is_read_is_read_again(saved, monkeypatch):
    """The first two attempts meet a writer; what stands there since is read. A fault that stays is an error at once."""
    files, attempts, seen = saving._files, [], iter(range(100))

    def broken(*where):
        attempts.append(where)
        if len(attempts) <= 2:
            raise PlanError("a file is gone")
        return files(*where)

    monkeypatch.setattr(saving, "_files", broken)
    with pytest.raises(PlanError, match="a file is gone"):
        load(saved)
    assert len(attempts) == 1
    attempts.clear()
    monkeypatch.setattr(saving, "_identity", lambda root: next(seen))
    assert load(saved).plan is not None and len(attempts) == 3


def test_graph_plan_and_platform_come_back_equal(result, saved):
    back = load(saved)
    assert diff(result.plan, back.plan) == []
    assert back.plan.provenance == result.plan.provenance
    assert hash_graph(back.graph) == hash_graph(result.graph)
    assert back.graph.nodes == result.graph.nodes
    assert back.graph.values == result.graph.values
    assert back.platform == result.platform


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
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.equal(torch.load(saved.parent / "y.pt"), result.model(X)["y"])


def test_saving_again_replaces_the_earlier_result(result, saved):
    (saved / "plan.json").write_text("broken")
    result.save(saved)
    load(saved)
    assert [p.name for p in saved.parent.iterdir()] == ["out"]


def test_a_directory_of_something_else_is_not_overwritten(result, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(PlanError, match="is not a saved result"):
        result.save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_save_that_fails_leaves_the_earlier_result_and_nothing_else(result, saved, monkeypatch):
    def no_space_left(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(saving, "to_bytes", no_space_left)
    with pytest.raises(ExportError, match="no space left"):
        result.save(saved)
    load(saved)
    assert [p.name for p in saved.parent.iterdir()] == ["out"]


def test_a_report_is_kept_with_it(result, tmp_path):
    root = saving.save(tmp_path / "out", result.graph, result.plan, result.platform, {"error": 0.5})
    assert saving.load(root).report == {"error": 0.5}


def test_no_file_is_a_pickle(saved):
    assert {p.suffix for p in saved.iterdir()} == {".json", ".safetensors"}


# ---- refusals


def test_a_directory_without_manifest_is_refused(tmp_path):
    with pytest.raises(PlanError, match="it has no manifest"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "no\0where", "a" * 300], ids=["absent", "no path", "too long"])
def test_a_directory_that_is_not_there_is_refused(name, tmp_path):
    with pytest.raises(PlanError, match=name):
        load(tmp_path / name)


FILES = ["plan.json", "plan.safetensors", "graph.json", "weights.safetensors", "platform.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(PlanError, match=f"'{name}' is missing"):
        load(saved)


def test_a_name_that_no_file_can_have_is_an_error_of_ours(tmp_path):
    with pytest.raises(PlanError, match="'manifest.json' cannot be read.*OSError"):
        load(tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(saved, name):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(PlanError, match=f"'{name}' is truncated"):
        load(saved)


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_noticed(saved, name):
    data = bytearray((saved / name).read_bytes())
    data[-2] ^= 1
    (saved / name).write_bytes(data)
    with pytest.raises(PlanError, match=f"'{name}' was changed after it was saved"):
        load(saved)


def test_a_manifest_cut_short_is_refused(saved):
    (saved / "manifest.json").write_text('{"schema": 1, "fil')
    with pytest.raises(PlanError, match=r"is not JSON.*manifest\.json"):
        load(saved)


@pytest.mark.parametrize(
    "text", ["[]", '{"schema": 1}', '{"schema": 1, "files": {}}', '{"schema": 1, "files": {"../secret": {}}}']
)
def test_a_manifest_without_the_files_is_refused(saved, text):
    (saved / "manifest.json").write_text(text)
    with pytest.raises(PlanError, match=r"schema version|does not list the files"):
        load(saved)


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


@pytest.mark.parametrize("name", ["plan.json", "graph.json"])
def test_another_schema_version_is_refused(saved, name):
    tampered(saved, name, lambda d: d.update(schema=99))
    with pytest.raises(PlanError, match=r"schema version .* Got: 99. Allowed: 1"):
        load(saved)


def test_numbers_of_a_tensor_that_the_plan_does_not_know_are_refused(saved):
    numbers = load_file(saved / "plan.safetensors")
    save_file({**numbers, "scale:stranger": torch.ones(())}, saved / "plan.safetensors")
    accept(saved, "plan.safetensors")
    with pytest.raises(PlanError, match="scale:stranger"):
        load(saved)


def test_a_quantized_tensor_without_scale_is_refused(saved):
    numbers = load_file(saved / "plan.safetensors")
    del numbers["scale:conv.weight"]
    save_file(numbers, saved / "plan.safetensors")
    accept(saved, "plan.safetensors")
    with pytest.raises(PlanError, match=r"'conv\.weight' is quantized but has no scale"):
        load(saved)


def test_a_plan_of_another_network_is_refused(saved):
    tampered(saved, "plan.json", lambda d: d["tensors"].update(stranger={"role": "activation"}))
    with pytest.raises(PlanError, match=r"does not have.*stranger"):
        load(saved)


def test_weights_that_no_node_knows_are_refused(saved):
    weights = load_file(saved / "weights.safetensors")
    save_file({**weights, "stranger": torch.ones(1)}, saved / "weights.safetensors")
    accept(saved, "weights.safetensors")
    with pytest.raises(PlanError, match="stranger"):
        load(saved)


def test_a_graph_that_is_inconsistent_is_refused(saved):
    tampered(saved, "graph.json", lambda d: d["nodes"].pop(0))
    with pytest.raises(PlanError, match="graph is malformed"):
        load(saved)


def test_an_unknown_field_is_refused(saved):
    tampered(saved, "plan.json", lambda d: d["tensors"]["x"].update(colour="red"))
    with pytest.raises(PlanError, match="'colour' is malformed"):
        load(saved)


def test_a_saved_platform_with_an_unknown_key_is_refused(saved):
    tampered(saved, "platform.json", lambda d: d["platform"].update(colour="red"))
    with pytest.raises(PlanError, match=r"'colour' is malformed.*platform\.json"):
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
    attrs = {
        "padding": ((0, 1), (2, 3)),
        "value": float("-inf"),
        "axes": [1, 2],
        "none": None,
        "flag": True,
        "nested": {"a": (1.5,)},
    }
    graph = Graph(
        [Node("pad", "Pad", ("x",), ("y",), attrs)],
        ["x"],
        ["y"],
        {"x": Value("x", (None, 3)), "y": Value("y", (None, 6), "int64")},
        {},
    )
    plan = Plan(nodes={n.name: NodePlan(name=n.name, op=n.op) for n in graph.nodes})
    saving.save(tmp_path / "p", graph, plan, load_platform("ort_cpu"))
    back = saving.load(tmp_path / "p").graph
    assert back.nodes == graph.nodes
    assert back.values == graph.values


def test_weights_of_any_layout_and_dtype_come_back(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    weights = {
        "t": base.t(),
        "view": base[1:],
        "whole": base,
        "i": torch.tensor(3),
        "b": torch.tensor([True]),
        "e": torch.empty(0, 2),
        "h": torch.ones(2).half(),
    }
    saving.save(tmp_path / "p", Graph([], [], [], {}, dict(weights)), Plan(), load_platform("ort_cpu"))
    back = saving.load(tmp_path / "p").graph.weights
    assert list(back) == list(weights)
    assert all(torch.equal(back[k], weights[k]) and back[k].dtype == weights[k].dtype for k in weights)


def test_an_attribute_without_json_form_is_refused(tmp_path):
    graph = Graph(
        [Node("n", "Identity", ("x",), ("y",), {"f": len})],
        ["x"],
        ["y"],
        {"x": Value("x", ()), "y": Value("y", ())},
        {},
    )
    with pytest.raises(PlanError, match="cannot be saved as JSON"):
        saving.save(tmp_path / "p", graph, Plan(), load_platform("ort_cpu"))
    assert list(tmp_path.iterdir()) == []


# ---- numbers that no chip could use


def numbers_changed(saved, name, change):
    numbers = load_file(saved / "plan.safetensors")
    numbers[name] = change(numbers[name].clone())
    save_file(numbers, saved / "plan.safetensors")
    accept(saved, "plan.safetensors")


NONSENSE = {
    "a scale that is NaN": ("scale:conv.weight", lambda s: s.fill_(float("nan")), "not positive"),
    "an infinite scale": ("scale:x", lambda s: s.fill_(float("inf")), "not positive"),
    "a negative scale": ("scale:conv.weight", lambda s: -s, "not positive"),
    "a scale of 0": ("scale:x", lambda s: s.zero_(), "not positive"),
    "a zero point that is no code": ("zero_point:x", lambda z: z + 4000, "not a code"),
    "a zero point that is a fraction": ("zero_point:x", lambda z: z.float(), "the wrong type"),
    "a scale of another type": ("scale:x", lambda s: s.double(), "the wrong type"),
    "a scale too many": ("scale:x", lambda s: torch.cat([s.reshape(1)] * 2), "do not match"),
}


@pytest.mark.parametrize("name, change, words", NONSENSE.values(), ids=NONSENSE)
def test_numbers_that_no_chip_could_use_are_not_loaded(saved, name, change, words):
    numbers_changed(saved, name, change)
    with pytest.raises(PlanError, match=words):
        load(saved)


def test_scales_for_other_channels_than_the_weight_has_are_not_loaded(saved):
    for kind in ("scale", "zero_point"):
        numbers_changed(saved, f"{kind}:conv.weight", lambda v: v[:3])
    with pytest.raises(PlanError, match="do not fit its shape"):
        load(saved)


def test_a_weight_that_is_not_finite_is_not_loaded(saved):
    weights = load_file(saved / "weights.safetensors")
    weights["conv.weight"][0, 0, 0, 0] = float("inf")
    save_file(weights, saved / "weights.safetensors")
    accept(saved, "weights.safetensors")
    with pytest.raises(PlanError, match="must hold finite floats"):
        load(saved)


def test_a_weight_that_holds_nan_is_neither_loaded_nor_saved(result, saved):
    back = load(saved)
    back.graph.weights["a.bias"].fill_(float("nan"))
    with pytest.raises(PlanError, match="'a.bias' holds NaN"):
        back.save(saved.parent / "again")
    weights = load_file(saved / "weights.safetensors")
    weights["a.bias"].fill_(float("nan"))
    save_file(weights, saved / "weights.safetensors")
    accept(saved, "weights.safetensors")
    with pytest.raises(PlanError, match="'a.bias' holds NaN"):
        load(saved)


# ---- data of another form than was saved


@pytest.fixture(scope="module")
def plain_result():
    """One without operators of torch's own, so that it is tried when it is loaded."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).eval()
    return quantize(model, [X], overrides={"3": "float"}, progress=False)


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
    sound = {"op": "Relu", "terms": [{"$tuple": ["relu", 1]}], "low": -10.0}
    bound = {**sound, **changes}
    return lambda d: d.update(limits=[{**bound, "terms": {"$tuple": bound["terms"]}}])


MALFORMED = {
    "a list for a table": ("plan.json", lambda d: d.update(tensors=[]), "'tensors' is malformed"),
    "a table for a name": ("plan.json", lambda d: d.update(platform={}), "'platform' is malformed"),
    "a key too few": ("plan.json", lambda d: d.pop("ties"), "'ties' is malformed.*required"),
    "an edge of three": ("plan.json", lambda d: d.update(float_edges=[["a"] * 3]), "'float_edges.0' is malformed"),
    "a role that is none": ("plan.json", lambda d: _first(d).update(role="wheel"), "'role' is malformed"),
    "a grid of text": ("plan.json", lambda d: _first(d)["grid"].update(bits="8"), "'bits' is malformed"),
    "a grid of no kind": ("plan.json", lambda d: _first(d)["grid"].update(kind="x"), "'kind' is malformed"),
    "an operator that runs in no way": ("plan.json", lambda d: _first(d, "nodes").update(exec="x"), "'exec' is malf"),
    "instructions of no channels": ("plan.json", lambda d: _first(d, "nodes").update(simd=0), "'simd' is malformed"),
    "a bound on nothing": ("plan.json", _bound(terms=[]), "Scale bound is not valid"),
    "a power of which there is none": (
        "plan.json",
        _bound(terms=[{"$tuple": ["relu", 10**400]}]),
        "Scale bound is not valid",
    ),
    "a bound of no number": ("plan.json", _bound(low=3.5e38), "Scale bound is not valid"),
    "a bound of nan": ("plan.json", _bound(high={"$float": "nan"}), "Scale bound is not valid"),
    "quantizers that are no names": (
        "plan.json",
        lambda d: d["provenance"].update(foreign_quantizers=3),
        "'foreign_quantizers' is malformed",
    ),
    "a seed of 70 bits": ("plan.json", lambda d: d["provenance"]["settings"].update(seed=2**70), "'seed' is malformed"),
    "half a character": ("graph.json", lambda d: d["nodes"][0].update(layer="\ud800"), "surrogates not allowed"),
    "half a key": (
        "graph.json",
        _text(lambda s: s.update(plain='[1, {"\\ud800": 0}]'), "out_spec"),
        "surrogates not allowed",
    ),
    "a node that is left out": ("plan.json", lambda d: d["nodes"].pop("relu"), "leaves nodes out.*relu"),
    "a tie to nothing": ("plan.json", lambda d: d.update(ties=[["a", "b"]]), "does not have.*a, b"),
    "a shape of text": ("graph.json", lambda d: _first(d, "values").update(shape="2"), "'shape' is malformed"),
    "a type that is none": ("graph.json", lambda d: _first(d, "values").update(dtype="float7"), "float7"),
    "a node of text": ("graph.json", lambda d: d["nodes"].insert(0, "x"), "'nodes.0' is malformed"),
    "weights that are not there": ("graph.json", lambda d: d["weights"].append("w"), "missing from the file"),
    "an alias of nothing": ("graph.json", lambda d: d["aliases"].update(x="0.bias"), "aliases name missing weights"),
    "a trained value": ("graph.json", lambda d: d["trainable"].append("x"), "trainable weights are missing"),
    "arguments that are no table": ("graph.json", lambda d: d.update(in_spec="[]"), "in_spec"),
    "arguments that are not text": ("graph.json", lambda d: d.update(in_spec="{"), "the call of the graph"),
    "an argument too many": ("graph.json", _text(lambda s: s["tensors"].append(1), "in_spec"), "do not fit"),
    "a result too many": ("graph.json", _text(lambda s: s["leaves"].append({"output": 0}), "out_spec"), "do not fit"),
    "a result that is none": ("graph.json", _text(lambda s: s.update(leaves=[{"output": 7}]), "out_spec"), "do not f"),
    "a structure that is none": ("graph.json", _text(lambda s: s.update(plain="[1, 2]"), "out_spec"), "is not a node"),
    "an operand of another shape": (
        "graph.json",
        lambda d: _first(d, "values").update(shape={"$tuple": [2, 6]}),
        "does not run",
    ),
    "an attribute of text": (
        "graph.json",
        lambda d: d["nodes"][0]["attrs"].update(stride="x"),
        "'stride' is malformed",
    ),
    "an attribute too few": ("graph.json", lambda d: d["nodes"][0]["attrs"].clear(), "does not run"),
    "a result of another shape": (
        "graph.json",
        lambda d: d["values"]["relu"].update(shape={"$tuple": [2, 2]}),
        "and was float32",
    ),
    "no table for the platform": ("platform.json", lambda d: d.update(platform=3), "'platform' is malformed"),
    "no name of the platform": ("platform.json", lambda d: d["platform"].pop("name"), "'name' is malformed"),
}


GRIDS = {
    "codes wider than the bits": ({"qmax": 256}, "wider than its bits"),
    "no codes": ({"qmin": 255}, "no codes"),
    "65 bits": ({"bits": 65}, "no codes"),
    "a table that falls": ({"kind": "log", "table": {"$tuple": [1, 0]}}, "increase"),
    "a negative least scale": ({"scale_min": -1.0}, "least scale"),
    "a least scale of next to nothing": ({"scale_min": 1e-60}, "least scale"),
    "a zero point of text": ({"zero": "x"}, "'zero.int' is malformed"),
}
MALFORMED |= {
    name: ("plan.json", lambda d, given=given: d["tensors"]["relu"]["grid"].update(given), words)
    for name, (given, words) in GRIDS.items()
}


@pytest.mark.parametrize("file, change, words", MALFORMED.values(), ids=MALFORMED)
def test_data_of_another_form_are_not_loaded(plain_result, tmp_path, file, change, words):
    saved = plain_result.save(tmp_path / "out")
    load(saved)
    tampered(saved, file, change)
    with pytest.raises(PlanError, match=words):
        load(saved)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("0.bias", lambda w: w.reshape(1, -1), "do not fit its shape"),
        ("3.bias", lambda w: w.reshape(1, -1), r"bias of Linear '3' has the shape \[1, 2\]"),
        ("0.weight", lambda w: w.double(), "float32 and torch.float64"),
        ("0.weight", lambda w: w[:, :1].clone(), "does not run"),
        ("3.weight", lambda w: w.long(), "does not run|must hold floats"),
    ],
)
def test_weights_of_another_form_are_not_loaded(plain_result, tmp_path, name, change, words):
    saved = plain_result.save(tmp_path / "out")
    weights = load_file(saved / "weights.safetensors")
    weights[name] = change(weights[name])
    save_file(weights, saved / "weights.safetensors")
    accept(saved, "weights.safetensors")
    with pytest.raises(PlanError, match=words):
        load(saved)


@pytest.mark.parametrize("low, high", [({"$float": "nan"}, 1.0), (0.0, {"$float": "inf"}), (2.0, 1.0)])
def test_a_range_that_is_none_is_not_loaded(saved, low, high):
    tampered(saved, "plan.json", lambda d: d["tensors"]["x"].update(low=low, high=high))
    with pytest.raises(PlanError, match="The range of 'x' must be finite"):
        load(saved)


def test_a_scale_that_was_spoilt_in_place_is_not_saved(result, saved):
    back = load(saved)
    back.plan["x"].scale.fill_(float("nan"))
    with pytest.raises(PlanError, match="not positive"):
        back.save(saved)
    load(saved)


def test_while_writers_replace_it_a_result_is_read_again(result, saved, monkeypatch):
    real, calls = saving.check_schema, []

    def replaced_meanwhile(*args):
        if not calls:
            calls.append(result.save(saved))
            (saved.parent / "gone").mkdir()
        return real(*args)

    monkeypatch.setattr(saving, "check_schema", replaced_meanwhile)
    assert diff(load(saved).plan, result.plan) == [] and calls


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        return self.linear(x) + y


@pytest.mark.parametrize("places", [[0, 0], [1, 1], [1, 0]], ids=str)
def test_every_input_has_an_argument_of_its_own_in_their_order(places, tmp_path):
    folder = quantize(Both().eval(), [(torch.randn(8, 4), torch.randn(8, 4))], progress=False).save(tmp_path / "both")
    tampered(folder, "graph.json", _text(lambda s: s.update(tensors=places), "in_spec"))
    with pytest.raises(PlanError, match="do not fit the graph's inputs"):
        load(folder)


@pytest.mark.parametrize(
    "sizes, shape, axis, fits",
    [
        ([3], (4, 3, 2), 1, True),
        ([3], (4, 3, 2), 0, False),
        ([3], (4, None, 2), 1, True),
        ([2], (4, 3, 2), 2, True),
        ([6, 2], (6, 8), 1, True),  # blocks of four
        ([6, 3], (6, 8), 1, False),
        ([6, 3], (6, 9), 1, True),
        ([6, 2], (6, 9), 1, False),
        ([2, 8], (6, 8), 0, True),
        ([2, 8], (6, 8), 1, False),
        ([6, 8], (6, 8), 1, True),
        ([6, 0], (6, 8), 1, False),
        ([6, 2], (6, None), 1, False),
        ([6, 2], (6, 8, 1), 1, False),
        ([6, 2, 1], (6, 8), 1, False),
    ],
)
def test_scales_are_one_along_an_axis_or_of_blocks_along_it(sizes, shape, axis, fits):
    assert saving._meets(sizes, shape, axis) is fits


@pytest.mark.parametrize(
    "count, shape, axis, fits",
    [
        (0, (4, 3), None, True),
        (3, (3,), None, True),  # of one axis it need not be said
        (4, (3,), None, False),
        (3, (3, 3), None, False),
        (3, (4, 3), -1, True),
        (4, (4, 3), -2, True),
        (4, (4, 3), -3, False),
        (3, (4, 3), 1, True),
        (3, (4, 3), 2, False),
        (3, (3,), 1, False),
        (3, (3,), 0, True),
    ],
)
def test_scales_lie_along_an_axis_of_their_tensor(count, shape, axis, fits):
    grid = Grid(bits=8, qmin=-128, qmax=127)
    scale = torch.ones(count) if count else torch.tensor(1.0)
    stored = Stored(
        format="w8", grid=grid, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int32), axis=axis
    )
    graph = Graph([], [], [], {}, {"w": torch.ones(shape)})
    t = TensorPlan(name="w", role="weight", stored=stored)
    if fits:
        saving._fits(t, graph)
    else:
        with pytest.raises(PlanError, match="The scales of 'w' do not fit its shape"):
            saving._fits(t, graph)
    saving._fits(TensorPlan(name="w", role="weight"), graph)


# ---------------------------------------------------------------- files that attack


def test_the_trap_springs_when_it_is_imported(trap):
    import trap as _  # noqa: F401

    assert trap.exists()


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
    "text",
    ["", "[]", "[2, {}]", '[1, {"type": "builtins.dict", "context": "[[1]]", "children_spec": []}]', "[" * 10**5],
)
def test_a_malformed_structure_is_refused(text):
    with pytest.raises(GraphError, match="structure of inputs or outputs is malformed"):
        read_tree(text)


def test_a_type_is_found_in_a_table_and_nowhere_else(saved):
    root = tampered(saved, "graph.json", lambda g: g["values"]["x"].update(dtype="load"))
    with pytest.raises(ChipfitError, match="no number type named 'load'"):
        load(root)
