"""ONNX models from files: read, quantized, exported and verified, and the same plan as from the source model."""

import contextlib
import json
import warnings

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

import chipfit
from chipfit.decide.overrides import match_layers
from chipfit.engine.run import run
from chipfit.errors import CaptureError, DataError
from chipfit.export.onnx.writer import export_onnx
from chipfit.frameworks import capture, load_model
from tests.onnx_models import onnx_node, onnx_of
from tests.zoo import ZOO, make


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def batches(count: int = 3) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 12, 12, generator=draw) for _ in range(count)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    torch.onnx.export(network(), (batches(1)[0],), path, dynamo=True, verbose=False, external_data=False)
    return path


@pytest.mark.parametrize("platform, suffix", [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite")])
def test_a_file_of_the_torch_exporter_is_quantized_exported_and_exact(exported, platform, suffix, tmp_path):
    result = chipfit.quantize(exported, batches(), platform=platform, progress=False)
    result.export(tmp_path / f"net{suffix}")
    assert result.verify(batches()).exact and result.model(batches()[0].numpy()).shape == (8, 4)
    assert chipfit.load(result.save(tmp_path / "saved")).verify(batches()).exact


@pytest.mark.parametrize("form", [lambda p: p.read_bytes(), lambda p: onnx.load(p), lambda p: onnx_ir.load(p), str])
def test_bytes_protos_and_models_of_onnx_ir_are_models(exported, form):
    found = chipfit.lint(form(exported), batches(1)[0], platform="tflite_int8")
    assert [n.op for n in found.graph.nodes][:2] == ["Conv2D", "Relu"]


def test_the_trainable_model_has_the_names_of_the_initialisers_and_trains(exported):
    result = chipfit.quantize(exported, batches(), platform="ort_cpu", progress=False)
    names = {i.name for i in onnx.load(exported).graph.initializer}
    weights = {n for n, _ in result.model.named_parameters() if n.endswith("weight")}
    assert weights and {w for w in weights if w in names} == weights
    before = result.model(batches(1)[0]).detach()
    torch.optim.SGD(result.model.parameters(), 0.1).zero_grad()
    result.model(batches(1)[0]).square().sum().backward()
    torch.optim.SGD(result.model.parameters(), 0.01).step()
    assert not torch.equal(before, result.model(batches(1)[0]))


def test_weights_in_constants_are_read_as_those_of_initialisers(exported):
    """PaddlePaddle's exporter writes constants; here one has more numbers than may be computed while a file is read."""
    model = onnx.load(exported)
    wide = np.full((4, 1 << 21), 0.5, np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(wide, "wide"))
    model.graph.node.append(onnx.helper.make_node("MatMul", [model.graph.output[0].name, "wide"], ["wider"]))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("wider", 1, None))
    want = chipfit.lint(model, batches(1)[0]).graph
    moved = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    nodes = [*moved, *model.graph.node]
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    got = chipfit.lint(model, batches(1)[0]).graph
    assert [(n.op, n.inputs) for n in got] == [(n.op, n.inputs) for n in want]
    assert got.trainable == want.trainable and got.trainable
    assert got.weights.keys() == want.weights.keys() and "wide" in got.weights
    assert all(torch.equal(got.weights[k], w) for k, w in want.weights.items())


#: networks that are written in other operators or attributes than they have
OTHERWISE = set("attention_fused attention_manual fire functional gru in_place_index lstm".split())
OTHERWISE |= {"padding_modes", "pixel_shuffle_norms", "shapes"}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_float_file_of_chipfit_is_read_as_the_network_that_it_was_written_from(name, tmp_path):
    model, batch = make(name)
    args = batch if isinstance(batch, tuple) else (batch,)
    source = capture(model, args)
    file = export_onnx(source, None, tmp_path / "net.onnx")
    tensors = dict(zip(source.inputs, source.example, strict=True))
    graph = capture(load_model(str(file)), (), tensors)
    session = onnxruntime.InferenceSession(file)
    want = session.run(None, {k: v.numpy() for k, v in tensors.items()})
    got = chipfit_outputs(graph, tensors)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * max(1.0, float(np.abs(a).max())))
    if name not in OTHERWISE:
        assert [(n.name, n.op, n.attrs) for n in graph] == [(n.name, n.op, n.attrs) for n in source]
        assert all(torch.equal(graph.weights[k], source.weights[k]) for k in graph.weights)


def chipfit_outputs(graph, tensors):
    from chipfit.engine.run import run

    env = run(graph, [tensors[i] for i in graph.inputs])
    return [env[o].detach().numpy() for o in graph.outputs]


@pytest.mark.filterwarnings("ignore:You are using the legacy")
@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_a_file_of_other_floats_is_read_in_float32_and_a_note_says_so(kind, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU()).to(getattr(torch, kind)).eval()
    given = x.to(getattr(torch, kind))
    torch.onnx.export(model, (given,), str(tmp_path / "m.onnx"), dynamo=False, opset_version=17)
    result = chipfit.quantize(tmp_path / "m.onnx", [x, x], platform="ort_cpu", progress=False)
    assert {w.dtype for w in result.graph.weights.values()} == {torch.float32}
    word = {"float16": "float16", "float64": "double"}[kind]
    assert any(f"warning: the model computes in {word}; it was read" in n for n in result.graph.notes)


# ---------------------------------------------------------------- operators without a row


def read_as_onnxruntime(model, x, example=None, atol=0):
    """Return the graph of a model; its one result for x is that of ONNX Runtime."""
    graph = capture(model, (x if example is None else example,))
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(run(graph, [x])[graph.outputs[0]], want, rtol=0, atol=atol)
    return graph


@pytest.mark.parametrize("kind, opset", [("LRN", 18), ("DeformConv", 19)])
def test_an_operator_without_a_row_runs_in_float_on_onnx_runtime_and_is_written_again(kind, opset, tmp_path):
    draw = np.random.default_rng(0)
    shapes = {"w": (4, 3, 3, 3), "bend": (2, 4, 1, 1), "taps": (4, 4, 1, 1)}
    constants = {k: draw.standard_normal(shape).astype("f4") for k, shape in shapes.items()}
    odd = onnx_node("b = LRN(a)", size=3, beta=0.6)  # whose power is no root
    nodes = [
        onnx_node("a = Conv(x, w)", pads=[1, 1, 1, 1]),
        "o = Conv(a, bend)",
        odd if kind == "LRN" else helper.make_node(kind, ["a", "taps", "o"], ["b"]),
        "y = Relu(b)",
    ]
    model = onnx_of(*nodes, inputs={"x": ["n", 3, 12, 12]}, constants=constants, opset=opset)
    result = chipfit.quantize(model, batches(), progress=False)
    assert kind in [n.called for n in result.graph.nodes if n.op == "Opaque"]
    file = result.export(tmp_path / "net.onnx")
    assert kind in [n.op_type for n in onnx.load(file).graph.node] and onnx.load(file).opset_import[0].version == opset
    assert chipfit.load(result.save(tmp_path / "saved")).verify(batches()).exact


def test_an_operator_without_a_row_is_written_without_the_operands_that_it_lacks(tmp_path):
    """An LSTM has an initial state, but no sequence lengths before it."""
    draw = np.random.default_rng(0)
    constants = {k: draw.standard_normal(s).astype("f4") for k, s in {"w": (1, 16, 6), "r": (1, 16, 4)}.items()}
    constants |= {"m": np.eye(6, dtype="f4"), "b": np.zeros((1, 32), "f4"), "h": np.zeros((1, 8, 4), "f4")}
    steps = ["a = MatMul(x, m)", onnx_node("y, -, z = LSTM(a, w, r, b, -, h, h)", hidden_size=4, input_forget=1)]
    data = [torch.randn(5, 8, 6) for _ in range(3)]
    model = onnx_of(*steps, inputs={"x": [5, 8, 6]}, constants=constants)
    result = chipfit.quantize(model, data, progress=False)
    file = result.export(tmp_path / "net.onnx")
    (lstm,) = [n for n in onnx.load(file).graph.node if n.op_type == "LSTM"]
    assert lstm.input[4] == ""
    feeds = {"x": data[0].numpy()}
    want, got = (onnxruntime.InferenceSession(f).run(None, feeds)[0] for f in (model.SerializeToString(), str(file)))
    np.testing.assert_allclose(got, want, atol=0.05)


@pytest.mark.parametrize("batch", ["n", -1])
def test_shape_arithmetic_is_folded_and_the_batch_stays_open(batch):
    """Shape, Gather, Unsqueeze, Concat: the target that exporters compute for x.view(len(x), -1)."""
    nodes = [
        "s = Shape(x)",
        "n = Gather(s, zero)",
        "m = Unsqueeze(n, axes)",
        onnx_node("t = Concat(m, rest)", axis=0),
        "y = Reshape(x, t)",
    ]
    constants = {"zero": np.int64(0), "axes": np.array([0]), "rest": np.array([-1])}
    graph = capture(onnx_of(*nodes, inputs={"x": [batch, 3, 4]}, constants=constants), (torch.randn(2, 3, 4),))
    assert [(n.op, n.attrs) for n in graph] == [("Reshape", {"shape": (-1, 12)})]


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("shape, ends", [(["n", 2, 4, 6], [8, 9]), (["n", 2, "h", "w"], None)])
def test_the_sizes_of_an_image_may_be_computed_from_those_before(shape, ends, mode):
    """Shape, Slice, Concat, Resize, as PyTorch exports an interpolation; open sizes may be multiplied."""
    nodes = [
        "s = Shape(x)",
        "n = Slice(s, zero, two)",
        onnx_node("t = Concat(n, ends)", axis=0) if ends else "t = Mul(s, by)",
        onnx_node("y = Resize(x, -, -, t)", mode=mode),
    ]
    numbers = {"zero": [0], "two": [2], "ends": ends or [0], "by": [1, 1, 2, 3]}
    constants = {name: np.array(n) for name, n in numbers.items()}
    x = torch.randn(3, 2, 4, 6)
    graph = read_as_onnxruntime(onnx_of(*nodes, inputs={"x": shape}, constants=constants), x[:2], x, 1e-5)
    assert [n.op for n in graph] == ["Resize"] and graph.shape(graph.inputs[0])[0] is None


def test_the_largest_values_may_be_all_of_an_open_axis():
    """PyTorch's exporter sorts the lengths of sequences in this way."""
    nodes = ["k = Shape(x)", "y, at = TopK(x, k)"]
    graph = capture(onnx_of(*nodes, inputs={"x": ["n"]}, constants={}), (torch.randn(6),))
    assert run(graph, [torch.tensor([1.0, 3, 2])])[graph.outputs[0]].tolist() == [3, 2, 1]


def test_indices_that_count_every_axis_of_a_mask_repeat_it():
    """Masks of transformers with an open batch are exported in this way."""
    nodes = [
        "sizes = Shape(x)",
        "n = Gather(sizes, zero)",
        "places = Range(zero, n, one)",
        "rows = Reshape(places, upright)",
        "count = Unsqueeze(n, first)",
        onnx_node("target = Concat(count, rest)", axis=0),
        "all_rows = Expand(rows, target)",
        "all_columns = Expand(columns, target)",
        onnx_node("index = Concat(all_rows, all_columns)", axis=-1),
        "y = GatherND(x, index)",
    ]
    numbers = {"zero": 0, "one": 1, "first": [0], "upright": [-1, 1, 1, 1], "rest": [2, 3, 1]}
    constants = {name: np.array(n) for name, n in numbers.items()} | {"columns": np.arange(3).reshape(1, 1, 3, 1)}
    graph = read_as_onnxruntime(onnx_of(*nodes, inputs={"x": ["n", 3]}, constants=constants), torch.randn(4, 3))
    assert [n.op for n in graph] == ["Unsqueeze", "Expand"] and graph.shape(graph.outputs[0]) == (None, 2, 3)


@pytest.mark.parametrize("start", [0, 1, 2, -4])
def test_a_part_that_is_replaced_is_between_what_is_before_and_behind_it(start):
    constants = {"at": np.stack(np.meshgrid([0], [start, start + 1], indexing="ij"), -1), "k": np.array([2])}
    nodes = [onnx_node("new, places = TopK(x, k)", axis=1), "y = ScatterND(x, at, new)"]
    graph = read_as_onnxruntime(onnx_of(*nodes, inputs={"x": [1, 4, 3]}, constants=constants), torch.randn(1, 4, 3))
    assert [n.op for n in graph.nodes if n.op not in ("TopK", "Slice")] == ["Concat"]


#: indices of ScatterND or ScatterElements, the numbers or "rows" of x that they place on axis 1, and the nodes read
PUT = {
    "one number": (np.array([[0, 5], [1, 5]])[:, None], np.full((2, 1), 3.0, "f4"), ["Where"]),
    "numbers beyond one": (np.array([[0, 5], [1, 5]])[:, None], np.array([[3], [4]], "f4"), ["Concat"]),
    "places in another order": (np.array([[5, 0, 2], [5, 0, 2]]), "rows", ["Concat", "Gather"]),
    "places counted from the end": (np.array([[-2, -1], [-2, -1]]), "rows", ["Concat"]),
    "all places": (np.array([[0, 1, 2, 3, 4, 5]] * 2), "rows", []),
    "other places in each row": (np.array([[0, 1], [1, 2]]), "rows", ["Where"] * 2),  # of the first and the second
    "a place twice": (np.array([[1, 1], [1, 1]]), "rows", ["Where"] * 2),
}


@pytest.mark.parametrize(("at", "new", "ops"), PUT.values(), ids=PUT)
def test_values_at_fixed_places_of_one_axis_are_joined_with_the_others(at, new, ops):
    kind, constants = ("ScatterND", {"at": at}) if at.ndim > 2 else ("ScatterElements", {"at": at})
    how = {"axis": 1} if kind == "ScatterElements" else {}
    nodes = ["data = Relu(x)", onnx_node(f"y = {kind}(data, at, new)", **how)]
    if isinstance(new, str):
        constants |= {"start": np.array([0]), "end": np.array([at.shape[1]]), "axes": np.array([1])}
        nodes.insert(0, "new = Slice(x, start, end, axes)")
    else:
        constants["new"] = new
    graph = read_as_onnxruntime(onnx_of(*nodes, inputs={"x": [2, 6]}, constants=constants), torch.randn(2, 6))
    assert [n.op for n in graph.nodes if n.op not in ("Relu", "Slice")] == ops


@pytest.mark.parametrize("rows", [[1, 2], [3, 0]])
def test_a_box_of_two_axes_is_replaced_along_one_after_the_other(rows):
    at = np.stack(np.meshgrid([0, 1], rows, [2, 3, 4], indexing="ij"), -1)
    constants = {"at": at, "start": np.array([0, 0]), "end": np.array([2, 3]), "axes": np.array([1, 2])}
    nodes = ["new = Slice(x, start, end, axes)", "y = ScatterND(x, at, new)"]
    graph = read_as_onnxruntime(onnx_of(*nodes, inputs={"x": [2, 4, 5]}, constants=constants), torch.randn(2, 4, 5))
    assert {n.op for n in graph.nodes} <= {"Slice", "Concat", "Gather"}


def test_a_file_whose_operators_have_fixed_the_batch_is_read_by_whole_batches():
    """Exporters leave the batch of a traced example in shapes, behind an input whose batch is open."""
    constants = {"shape": np.array([4, -1]), "w": np.ones((6, 2), "f4")}
    nodes = ["flat = Reshape(x, shape)", "y = MatMul(flat, w)"]
    model = onnx_of(*nodes, inputs={"x": ["n", 2, 3]}, constants=constants)
    result = chipfit.quantize(model, [torch.randn(4, 2, 3) for _ in range(2)], progress=False)
    assert result.graph.shape(result.graph.inputs[0]) == (4, 2, 3)
    with pytest.raises(CaptureError, match="give batches of the size of its export"):
        chipfit.quantize(model, [torch.randn(3, 2, 3)], progress=False)


def test_a_file_that_fails_gives_the_reason_of_its_own_batch():
    nodes = [helper.make_node("Reshape", [x, n], [y]) for x, n, y in (("x", "two", "v"), ("v", "three", "y"))]
    model = onnx_of(*nodes, inputs={"x": [1, 2]}, constants={"two": np.array([2]), "three": np.array([3])})
    with pytest.raises(CaptureError, match="Where: y"):  # not that of 7 samples, which the first Reshape refuses
        capture(model, (torch.ones(1, 2),))


@pytest.mark.parametrize("kind", ["BatchNormalization", "Dropout"])
def test_an_operator_in_training_mode_is_named_with_the_way_out(kind):
    norm = {k: np.ones(4, "f4") for k in "gbmv"}
    operands, constants, how = (["g", "b", "m", "v"], norm, {"training_mode": 1})
    if kind == "Dropout":
        operands, constants, how = ["r", "t"], {"r": np.float32(0.5), "t": np.array(True)}, {}
    node = helper.make_node(kind, ["x", *operands], ["y"], name="here", **how)
    graph = capture(onnx_of(node, inputs={"x": ["n", 4, 3]}, constants=constants), (torch.randn(2, 4, 3),))
    assert any(f"'{kind}' of 'here' is in training mode" in n and "model.eval()" in n for n in graph.notes)


def test_an_if_that_depends_on_data_chooses_between_the_results_of_both_branches(tmp_path):
    """A verifier runs where a wake word is likely, as in the models of openWakeWord."""
    draw = np.random.default_rng(0)
    constants = {n: draw.normal(size=(6, 6)).astype("f4") for n in "wv"} | {"limit": np.array([2.0], "f4")}
    then = onnx_of("a = MatMul(y, v)", inputs={}, outputs={"a": [1, 6]}).graph
    other = onnx_of("b = Relu(y)", inputs={}, outputs={"b": [1, 6]}).graph
    nodes = [
        "y = MatMul(x, w)",
        onnx_node("top = ReduceMax(y)", axes=[1], keepdims=1),
        "cond = Greater(top, limit)",
        onnx_node("out = If(cond)", then_branch=then, else_branch=other),
    ]
    model = onnx_of(*nodes, inputs={"x": [1, 6]}, outputs={"out": [1, 6]}, constants=constants, opset=13)
    tests = [draw.normal(size=(1, 6)).astype("f4") for _ in range(16)]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    want = [session.run(None, {"x": t})[0] for t in tests]
    read = capture(load_model(model), (torch.from_numpy(tests[0]),))
    chosen = {bool((y < 0).any()) for y in want}
    assert chosen == {True, False}  # both branches
    for t, y in zip(tests, want, strict=True):
        np.testing.assert_allclose(chipfit_outputs(read, {"x": torch.from_numpy(t)})[0], y, rtol=1e-5, atol=1e-6)
    result = chipfit.quantize(model, [torch.from_numpy(t) for t in tests], platform="ort_cpu", progress=False)
    assert result.verify([torch.from_numpy(t) for t in tests[:4]]).exact


def test_a_batch_that_the_file_fixes_is_opened_where_samples_are_independent():
    nodes = ["f = Reshape(x, t)", "y = Gemm(f, w)"]
    constants = {"t": np.array([1, -1]), "w": np.ones((12, 2), "f4")}
    graph = capture(onnx_of(*nodes, inputs={"x": [1, 3, 4]}, constants=constants), (torch.randn(4, 3, 4),))
    assert graph.shape(graph.outputs[0]) == (None, 2) and not graph.notes


def test_a_batch_that_the_file_mixes_stays_fixed():
    nodes = [onnx_node("m = ReduceMean(x)", axes=[0]), "y = Sub(x, m)"]
    graph = capture(onnx_of(*nodes, inputs={"x": [2, 3]}), (torch.randn(2, 3),))
    assert graph.shape(graph.inputs[0]) == (2, 3) and "fixed" in graph.notes[0]


def test_a_batch_that_is_open_but_computed_for_one_sample_alone_is_one(tmp_path):
    """A view of the sizes that an exporter has seen stays behind an axis that it declares open."""
    nodes = ["f = Reshape(x, t)", "y = Gemm(f, w)"]
    constants = {"t": np.array([1, 12]), "w": np.eye(12, 5, dtype="f4")}
    data = list(torch.randn(2, 4, 3, 4, generator=torch.Generator().manual_seed(0)))
    result = chipfit.quantize(onnx_of(*nodes, inputs={"x": ["n", 3, 4]}, constants=constants), data, progress=False)
    assert result.graph.shape(result.graph.inputs[0]) == (1, 3, 4)
    found = result.verify(data, batches=8)
    assert found.exact and found.samples == 8


def test_larger_batches_are_data_for_a_file_that_computes_one_sample_at_a_time(tmp_path):
    """Its channels are shuffled with the batch merged into them, as in exports of ShuffleNet."""
    draw = np.random.default_rng(0)
    constants = {n: draw.normal(size=(8, 8, 1, 1)).astype("f4") for n in ("w", "back")}
    constants |= {"halves": [2, 4, 36], "whole": [1, 8, 6, 6]}
    nodes = [
        "y = Conv(x, w)",
        "apart = Reshape(y, halves)",
        onnx_node("turned = Transpose(apart)", perm=[1, 0, 2]),
        "mixed = Reshape(turned, whole)",
        "out = Conv(mixed, back)",
    ]
    size = [1, 8, 6, 6]
    model = onnx_of(*nodes, inputs={"x": size}, outputs={"out": size}, constants=constants, opset=13)
    data = [torch.randn(6, 8, 6, 6, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    results = [
        chipfit.quantize(model, batches, platform="ort_cpu", progress=False)
        for batches in (data[:2], [x for batch in data[:2] for x in batch.split(1)])
    ]
    assert results[0].plan.tensors.keys() == results[1].plan.tensors.keys()
    for name, t in results[0].plan.tensors.items():
        assert t.scale is None or torch.equal(t.scale, results[1].plan.tensors[name].scale)
    found = results[0].verify([data[2]], batches=6)
    assert found.exact and found.samples == 6


def test_a_layer_norm_in_nine_nodes_is_one():
    draw = np.random.default_rng(0)
    nodes = [onnx_node("m = ReduceMean(x)", axes=[-1]), "c = Sub(x, m)", "q = Pow(c, two)"]
    nodes += [onnx_node("v = ReduceMean(q)", axes=[-1]), "s = Add(v, eps)", "r = Sqrt(s)", "n = Div(c, r)"]
    nodes += ["p = Mul(n, w)", "y = Add(p, b)"]
    constants = {"two": np.float32(2), "eps": np.float32(1e-5)}
    constants |= {k: draw.standard_normal(6).astype("f4") for k in "wb"}
    graph = capture(onnx_of(*nodes, inputs={"x": ["n", 5, 6]}, constants=constants), (torch.randn(2, 5, 6),))
    assert [(n.op, n.inputs, n.attrs["eps"]) for n in graph] == [("LayerNorm", ("x", "w", "b"), pytest.approx(1e-5))]


def test_a_vector_that_layers_of_several_kinds_share_is_one_for_each():
    """Exporters store equal tensors once, here the zero biases of a linear layer and a norm."""
    nodes = [onnx_node("a = Gemm(x, w, zero)", transB=1), "y = LayerNormalization(a, one, zero)"]
    constants = {"w": np.eye(6, dtype="f4"), "zero": np.zeros(6, "f4"), "one": np.ones(6, "f4")}
    graph = capture(onnx_of(*nodes, inputs={"x": ["n", 6]}, constants=constants), (torch.randn(2, 6),))
    assert [n.inputs[2] for n in graph] == ["zero", "zero_1"]


# ---------------------------------------------------------------- bad input


def refused(model, message, path=None):
    with pytest.raises(CaptureError, match=message):
        load_model(model)


def relu(domain=""):
    return onnx_of(f"y = {domain}::Relu(x)", inputs={"x": ["n", 3]})


def test_a_damaged_file_is_read_or_refused_by_a_typed_error(tmp_path):
    """Bytes changed, left out at random places, or missing at the end, 300 times."""
    (batch,), draw = batches(1), np.random.default_rng(0)
    whole = export_onnx(capture(network(), (batch,)), None, tmp_path / "net.onnx").read_bytes()
    for k in range(300):
        damaged = bytearray(whole)
        at = int(draw.integers(len(whole)))
        damaged[at : at + 1 + k % 3 * 10] = [draw.bytes(1), b"", b""][k % 3]
        damaged = damaged[:at] if k % 10 == 0 else damaged
        with contextlib.suppress(chipfit.errors.ChipfitError):
            capture(load_model(bytes(damaged)), (batch,))


def test_unknown_domains_opsets_and_cycles_are_refused():
    refused(relu("org.example"), "unknown domain.*org.example.Relu")
    trees = relu("ai.onnx.ml")
    trees.graph.output[0].type.Clear()
    trees.graph.output[0].type.sequence_type.elem_type.map_type.key_type = 7  # labels of classes, as tools for trees do
    trees.graph.output[0].type.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = 1
    refused(trees, "unknown domain.*ai.onnx.ml.Relu")
    model = relu()
    model.opset_import[0].version = 99
    refused(model, "unknown opset.*99")
    del model.opset_import[:]
    model.ir_version = 1
    refused(model, "older than opsets.*IR version 1")
    refused(onnx_of("a = Relu(b)", "b = Relu(a)", inputs={"x": ["n", 3]}, outputs=["a"]), "cannot be read")
    refused(b"", "not an ONNX model")


def test_functions_that_call_functions_are_counted_before_they_are_inlined():
    ways = [onnx.helper.make_opsetid(d, 1) for d in ("own",)] + [onnx.helper.make_opsetid("", 17)]

    def body(k):
        inner = ("Relu", {}) if k == 0 else (f"F{k - 1}", {"domain": "own"})
        nodes = [onnx.helper.make_node(inner[0], [a], [b], **inner[1]) for a, b in (("a", "m"), ("m", "b"))]
        return onnx.helper.make_function("own", f"F{k}", ["a"], ["b"], nodes, ways)

    value = onnx.helper.make_tensor_value_info
    call = [onnx_node("y = own::F39(x)")]
    graph = onnx.helper.make_graph(call, "g", [value("x", 1, ["n", 4])], [value("y", 1, None)])
    proto = onnx.helper.make_model(graph, opset_imports=ways, functions=[body(k) for k in range(40)], ir_version=9)
    with pytest.raises(CaptureError, match=r"too large a graph\. Got: 1,099,511,627,776 nodes"):
        load_model(proto)


def test_a_size_that_no_memory_holds_is_refused_by_a_typed_error():
    by = np.array([1.0, 1.0, 1e15, 1e15], "f4")
    resize = onnx_node("y = Resize(x, -, by)", mode="nearest")
    proto = onnx_of(resize, inputs={"x": ["n", 1, 3, 3]}, constants={"by": by})
    with pytest.raises(CaptureError, match="Resize"):
        capture(load_model(proto), (torch.randn(2, 1, 3, 3),))


def test_bytes_that_do_not_match_the_shape_are_refused():
    model = onnx_of("y = Add(x, w)", inputs={"x": ["n", 3]}, constants={"w": np.ones(3, "f4")})
    model.graph.initializer[0].dims[0] = 400
    refused(model, "'w' does not fit its shape.*12 bytes")


def test_an_example_of_another_shape_is_refused_with_the_declared_one(exported):
    with pytest.raises(DataError, match=r"do not have the shape.*8, 12, 12, 3.*permute\(0, 3, 1, 2\)"):
        chipfit.lint(str(exported), batches(1)[0].permute(0, 2, 3, 1))


def test_the_target_of_an_opaque_node_is_json_of_one_operator(exported):
    from chipfit.frameworks.onnx.runtime import OnnxFunction

    node = onnx_ir.from_proto(onnx_node("y = LRN(x)", size=3))
    target = OnnxFunction.target(node, 13, 1)
    assert json.loads(target.removeprefix("onnx:"))[:3] == ["", "LRN", 13]
    with pytest.raises(chipfit.errors.GraphError, match="unknown to ONNX"):
        OnnxFunction.of_target('onnx:["", "LRN"]')


def test_equal_weights_that_the_exporter_stores_once_keep_the_names_of_both_layers(tmp_path):
    """Weights of untrained norms are equal: the file has them once, under the name of the first."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    torch.onnx.export(model, (torch.rand(2, 8),), tmp_path / "n.onnx", dynamo=True, verbose=False, external_data=False)
    graph = capture(load_model(tmp_path / "n.onnx"), (torch.rand(2, 8),))
    assert [(n.layer, n.op) for n in graph.nodes] == [("0", "LayerNorm"), ("1", "Linear"), ("2", "LayerNorm")]


@pytest.mark.parametrize("shape, ops", [((1, 4), ["Linear"]), ((4,), ["Linear"]), ((2, 4), ["Linear", "Add"])])
def test_a_sum_with_one_row_of_constants_is_the_bias_of_a_linear_layer(shape, ops):
    """Converters of scikit-learn write biases of shape [1, outputs]."""
    constants = {"w": np.ones((3, 4), "f4"), "b": np.ones(shape, "f4")}
    model = onnx_of("a = MatMul(x, w)", "y = Add(a, b)", inputs={"x": (2, 3)}, constants=constants)
    assert [n.op for n in capture(load_model(model), (torch.rand(2, 3),)).nodes] == ops


class GatedBlock(nn.Module):
    """Layers that exporters write in several nodes, and some that rewrites join or fold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.norm(self.conv(x / 255)))
        return self.head(torch.nn.functional.softsign(x * torch.sigmoid(x)).mean((2, 3)))


@pytest.fixture(scope="module", params=[True, False], ids=["dynamo", "torchscript"])
def gated(request, tmp_path_factory):
    """A file of an exporter, and the result of it."""
    path = tmp_path_factory.mktemp("onnx") / "gated.onnx"
    more = {"external_data": False} if request.param else {}
    with warnings.catch_warnings():  # PyTorch's, of its older exporter
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(GatedBlock().eval(), (batches(1)[0],), path, dynamo=request.param, verbose=False, **more)
    return onnx.load(path).graph.node, chipfit.quantize(path, batches(), platform="tflite_int8", progress=False)


def test_every_node_of_the_file_that_computes_on_data_can_be_named(gated):
    nodes, result = gated
    nodes = [n for n in nodes if n.op_type not in ("Constant", "Identity")]
    assert len(nodes) >= 10
    for name in {name for n in nodes for name in (n.name, n.output[0])}:
        assert match_layers(result.graph, name), name


@pytest.mark.parametrize("op, kept", [("Sigmoid", "Swish"), ("Abs", "Curve"), ("Div", "Conv2D")])
def test_the_name_of_a_node_that_was_joined_or_folded_keeps_the_whole_operator_in_float(op, kept, gated):
    nodes, result = gated
    edited = result.edit({next(n.name for n in nodes if n.op_type == op): "float"})
    assert kept in {n.op for n in edited.graph.nodes if edited.plan.nodes[n.name].exec == "float"}


def test_an_end_of_a_clip_that_is_infinite_is_none(tmp_path):
    """As exporters write clip(x, min=max(x) - 80): the upper end is a constant, the lower one is computed."""
    nodes = [onnx_node("top = ReduceMax(x)", keepdims=0), "low = Sub(top, eighty)", "y = Clip(x, low, high)"]
    constants, path = {"eighty": np.float32(80), "high": np.float32(np.inf)}, tmp_path / "m.onnx"
    onnx.save(onnx_of(*nodes, inputs={"x": [1, 4, 6]}, outputs={"y": [1, 4, 6]}, constants=constants), path)
    data = [torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(k)) * 60 for k in range(3)]
    read = capture(load_model(path), [data[0]])
    assert "Min" not in {n.op for n in read.nodes}
    (got,) = (run(read, data[:1], keep=read.outputs)[o] for o in read.outputs)
    torch.testing.assert_close(got, data[0].clamp(min=float(data[0].max()) - 80))
    result = chipfit.quantize(path, data, platform="tflite_int8", progress=False)
    result.export(tmp_path / "m.tflite")
    assert result.verify(data[:1]).exact
