"""Every ONNX operator that has a reader, against the examples that come with the onnx package."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from chipfit.engine.run import run
from chipfit.errors import CaptureError
from chipfit.export.onnx.ops import REFUSED
from chipfit.export.onnx.writer import export_onnx
from chipfit.export.tflite.writer import export_tflite
from chipfit.frameworks import capture, load_model
from chipfit.operators.table import OPS
from tests.build import model_of
from tests.export.operators import CASES, DETECTED, alone
from tests.onnx_models import onnx_node, onnx_of

#: operators with more than one operand of data; of others, operands behind the first are constants
_SEVERAL = set(
    "Add Sub Mul Div Pow Max Min Sum Mean Where MatMul Concat Equal Less Greater And Or Mod Gather Attention Xor "
    "GridSample DeformConv ScatterElements ScatterND BitShift BitwiseAnd BitwiseOr BitwiseXor LinearAttention "
    "TensorScatter NonMaxSuppression MaxUnpool RoiAlign CausalConvWithState".split()
)
#: operators that select detections, which stay those of ONNX
_SELECTING = {"NonMaxSuppression", "GatherND", "ScatterND"}
_TYPES = {torch.int32: onnx.TensorProto.INT32, torch.int64: onnx.TensorProto.INT64}
_WRITERS = {"m.onnx": (export_onnx, {}), "m.tflite": (export_tflite, {"keep_layout": True})}
#: beginnings of names of examples with random results, of windows that start in padding, of shapes that depend on
#: data, and of sizes that ONNX Runtime computes otherwise
_LEFT_OUT = (
    "test_training_dropout",
    "test_bernoulli",
    "test_averagepool_2d_ceil_last_window_starts_on_pad",
    "test_resize_downsample_scales_linear_align_corners",  # ONNX Runtime and the engine take the rounded size
    "test_resize_downsample_scales_cubic_align_corners",
    "test_roialign",  # ONNX Runtime takes another grid than ONNX
    "test_gridsample_bicubic",
    "test_maxunpool_export_with_output_shape",
)
#: operators for whole training steps, and types of floats that are read as float32
_OTHER = set("Adagrad Adam Momentum Gradient BitCast".split())


def cases():
    with np.errstate(all="ignore"):
        found = load_model_tests(kind="node")
    for case in found:
        nodes = case.model.graph.node if case.model is not None else ()
        known = case.data_sets and not case.name.startswith(_LEFT_OUT)
        if known and all(not n.domain and n.op_type not in _OTHER for n in nodes):
            yield case


def arrays(values):
    plain = [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]
    return [np.asarray(v, object if isinstance(v, list) else None) for v in plain]


def _largest(array):
    return (
        np.abs(array, where=np.isfinite(array), out=np.zeros(array.shape)).max(initial=0)
        if array.dtype.kind == "f"
        else 0
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 6))])
def test_an_example_of_an_operator_gives_its_numbers_unless_it_is_control_flow_or_not_of_onnx_runtime(part):
    passed, refused, wrong, opaque = [], [], [], 0
    for case in [*cases()][part::6]:
        (inputs, outputs), *_ = [(arrays(i), arrays(o)) for i, o in case.data_sets]
        if any(a.dtype not in (np.float32, np.int64, np.int32, np.bool_) for a in (*inputs, *outputs)):
            continue
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        several = len(model.graph.node) == 1 and model.graph.node[0].op_type in _SEVERAL
        count = len(inputs) if several else 1
        for value, array in [*zip(model.graph.input, inputs, strict=True)][count:]:
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        del model.graph.input[count:]
        given = [torch.from_numpy(np.array(a)) for a in inputs[:count]]
        try:
            graph = capture(load_model(model), given)
        except CaptureError as e:
            refused.append(f"{case.name}: {e}")
            continue
        env = {**graph.weights, **run(graph, given)}
        same = all(
            np.allclose(env[o].numpy(), want, rtol=1e-4, atol=1e-5 * max(1, _largest(want)), equal_nan=True)
            for o, want in zip(graph.outputs, outputs, strict=True)
        )
        opaque += any(n.op == "Opaque" for n in graph.nodes)
        (passed if same else wrong).append(case.name)
    assert wrong == [] and len(passed) > 150 and opaque < 50
    assert [r for r in refused if "Control flow" not in r and "ONNXRuntimeError" not in r] == []


@pytest.mark.parametrize("name", sorted({*OPS, *CASES} - {*REFUSED, "DynamicQuantize"}))
def test_an_operator_that_is_written_is_read_again_as_canonical_operators(name, tmp_path):
    graph, inputs, want = alone(name)
    read = capture(load_model(export_onnx(graph, None, tmp_path / "m.onnx")), inputs)
    env = {**read.weights, **run(read, inputs, keep=read.outputs)}
    opaque = {n.called for n in read.nodes if n.op == "Opaque"}
    assert opaque == (_SELECTING if graph.nodes[0].op == DETECTED else set())
    for output, y in zip(read.outputs, want, strict=True):
        torch.testing.assert_close(env[output], y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_a_remainder_with_the_sign_of_the_dividend_is_that_of_onnx_runtime(kind):
    """fmod(-5, 3) is -2, fmod(5, -3) is 2."""
    import onnxruntime

    a, b = np.array([[-5, 5, -6, 6, 0, 7]], kind), np.array([[3, -3, 3, 4, -4, 8]], kind)
    types = dict.fromkeys("aby", onnx.helper.np_dtype_to_tensor_dtype(a.dtype))
    model = onnx_of(onnx_node("y = Mod(a, b)", fmod=1), inputs=dict.fromkeys("ab", (1, 6)), types=types)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (want,) = session.run(None, {"a": a, "b": b})
    assert want.tolist() == [[-2, 2, 0, 2, 0, 7]]
    given = [torch.from_numpy(a), torch.from_numpy(b)]
    read = capture(load_model(model), given)
    assert {n.op for n in read.nodes} == {"Abs", "Mod", "Sign", "Mul"}
    assert run(read, given, keep=read.outputs)[read.outputs[0]].tolist() == want.tolist()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_quotient_of_integers_is_rounded_towards_zero_in_all_files(kind, tmp_path):
    """-7 / 2 is -3, 7 / -2 is -3, -8 / -3 is 2."""
    model = onnx_of("y = Div(a, b)", inputs={"a": None, "b": None}, types=dict.fromkeys("aby", _TYPES[kind]))
    given = [torch.tensor([[-7, 7, -8, 6]], dtype=kind), torch.tensor([[2, -2, -3, 3]], dtype=kind)]
    read = capture(load_model(model), given)
    assert [n.op for n in read.nodes] == ["Div"]
    files = [write(read, None, tmp_path / name, **how) for name, (write, how) in _WRITERS.items()]
    for graph in [read, *(capture(load_model(f), given) for f in files)]:
        (y,) = run(graph, given, keep=graph.outputs).values()
        assert y.dtype is kind and y.tolist() == [[-3, -3, 2, 2]]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_quotient_of_integers_that_is_rounded_down_is_that_in_all_files(kind, tmp_path):
    """-7 / 2 is -4, 7 / -2 is -4, -8 / -3 is 2."""
    given = [torch.tensor([[-7, 7, -8, 6]], dtype=kind), torch.tensor([[2, -2, -3, 3]], dtype=kind)]
    made = capture(model_of(lambda _, a, b: a // b), tuple(given))
    assert [n.op for n in made.nodes] == ["FloorDiv"]
    files = [write(made, None, tmp_path / name, **how) for name, (write, how) in _WRITERS.items()]
    for graph in [made, *(capture(load_model(f), given) for f in files)]:
        (y,) = run(graph, given, keep=graph.outputs).values()
        assert y.dtype is kind and y.tolist() == [[-4, -4, 2, 2]]


def test_the_least_integer_divided_by_minus_one_stays_itself():
    model = onnx_of("y = Div(a, b)", inputs={"a": None, "b": None}, types=dict.fromkeys("aby", onnx.TensorProto.INT32))
    one = torch.ones(1, 2, dtype=torch.int32)
    read, least = capture(load_model(model), [one, one]), torch.full((1, 2), -(2**31), dtype=torch.int32)
    assert run(read, [least, -one], keep=read.outputs)[read.outputs[0]].tolist() == least.tolist()


def test_a_scan_over_a_vector_hands_on_numbers():
    """Its body takes one number of [1, 2, 3] at a time, which has no axis; the sums are [1, 3, 6]."""
    numbers = {"inputs": {"a": [], "b": []}, "outputs": {"c": [], "d": []}}
    body = onnx_of("c = Add(a, b)", "d = Identity(c)", **numbers).graph
    scan, steps = onnx_node("y, z = Scan(a, b)", num_scan_inputs=1, body=body), np.array([1, 2, 3], np.float32)
    model = onnx_of(scan, inputs={"a": []}, outputs={"y": [], "z": [3]}, constants={"b": steps})
    read = capture(load_model(model), [torch.zeros(())])
    env = run(read, [torch.zeros(())], keep=read.outputs)
    assert [env[o].tolist() for o in read.outputs] == [6.0, [1.0, 3.0, 6.0]]


@pytest.mark.parametrize("op", ["CumSum", "CumProd", "ReduceSum", "ReduceProd"])
def test_sums_and_products_of_32_bit_integers_have_32_bits(op):
    """Of [3, 2, 4]: 3, 5, 9; 3, 6, 24; 9; 24."""
    x = torch.tensor([[3, 2, 4]], dtype=torch.int32)
    axis = {"axis": 1 if op.startswith("Cum") else [1]}
    how = {"types": dict.fromkeys("xy", onnx.TensorProto.INT32), "opset": 26 if op == "CumProd" else 18}
    read = capture(load_model(onnx_of(f"y = {op}(x, axis)", inputs={"x": None}, constants=axis, **how)), [x])
    (y,) = run(read, [x], keep=read.outputs).values()
    assert y.dtype is torch.int32 and "Opaque" not in {n.op for n in read.nodes}
    assert y.tolist() == [{"CumSum": [3, 5, 9], "CumProd": [3, 6, 24], "ReduceSum": [9], "ReduceProd": [24]}[op]]


@pytest.mark.parametrize(
    "op, attrs, index, new, want",
    [
        ("ScatterElements", {"axis": 1}, [[2, -4]], [[7.0, 8.0]], [8, 2, 7, 4]),
        ("ScatterElements", {"axis": 1, "reduction": "add"}, [[2, 2]], [[7.0, 8.0]], [1, 2, 18, 4]),
        ("ScatterND", {}, [[0, 1], [0, -1]], [7.0, 8.0], [1, 7, 3, 8]),
        ("ScatterND", {"reduction": "max"}, [[0, 1], [0, 2]], [7.0, 0.5], [1, 7, 3, 4]),
    ],
)
def test_few_elements_at_places_that_depend_on_data_are_written_by_canonical_operators(op, attrs, index, new, want):
    """1, 2, 3, 4 with some numbers replaced; a place below zero counts from the end."""
    names = {"x": (1, 4), "index": np.shape(index), "new": np.shape(new)}
    types = {"index": onnx.TensorProto.INT64}
    model = onnx_of(onnx_node(f"y = {op}(x, index, new)", **attrs), inputs=names, types=types)
    given = [torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor(index), torch.tensor(new)]
    read = capture(load_model(model), given)
    assert "Opaque" not in {n.op for n in read.nodes}
    assert run(read, given, keep=read.outputs)[read.outputs[0]].tolist() == [want]


@pytest.mark.parametrize("how", ["half_pixel", "asymmetric"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_a_scale_of_a_resize_gives_the_size_of_onnx_runtime(mode, how):
    """14 times 24 / 14, which float32 rounds down, is 24 in float32 and less in float64."""
    import onnxruntime

    node = onnx_node("y = Resize(x, roi, scales)", mode=mode, coordinate_transformation_mode=how)
    scales = np.array([1, 1, 24 / 14, 20 / 15], np.float32)
    constants = {"roi": np.zeros(0, np.float32), "scales": scales}
    model = onnx_of(node, inputs={"x": (1, 2, 14, 15)}, constants=constants)
    x = torch.randn(1, 2, 14, 15)
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    read = capture(load_model(model), [x])
    assert want.shape[2:] == (24, 20)
    np.testing.assert_allclose(run(read, [x], keep=read.outputs)[read.outputs[0]], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op, keep, want", [("ArgMax", 0, [2]), ("ArgMin", 1, [[3]])])
def test_the_last_of_equal_extremes_is_found_by_canonical_operators(op, keep, want):
    node = onnx_node(f"y = {op}(x)", axis=1, keepdims=keep, select_last_index=1)
    x = torch.tensor([[0.0, 5.0, 5.0, 0.0]])
    read = capture(load_model(onnx_of(node, inputs={"x": (1, 4)}, types={"y": onnx.TensorProto.INT64})), [x])
    assert "Opaque" not in {n.op for n in read.nodes}
    assert run(read, [x], keep=read.outputs)[read.outputs[0]].tolist() == want


W = np.random.default_rng(0).normal(size=(3, 6, 2, 4)).astype(np.float32)
CANONICAL = {
    "sums before each element": ("CumSum", {"exclusive": 1}, [(2, 5, 6)], [np.int64(1)]),
    "sums from the end": ("CumSum", {"reverse": 1, "exclusive": 1}, [(2, 5, 6)], [np.int64(-1)]),
    "the first of the largest": ("Hardmax", {"axis": 1}, [(2, 5, 6)], []),
    "steps backwards": ("ReverseSequence", {}, [(5, 2, 3)], [[4, 4]]),
    "ones on a diagonal": ("EyeLike", {"k": 1}, [(3, 4)], []),
    "lengths of windows": ("LpPool", {"kernel_shape": [2, 3], "p": 3, "pads": [1, 0, 0, 1]}, [(2, 3, 5, 6)], []),
    "lengths of images": ("GlobalLpPool", {"p": 3}, [(2, 3, 5, 6)], []),
    "shares of sums": ("LpNormalization", {"p": 1, "axis": 1}, [(2, 5, 6)], []),
    "rows by a vector": ("MatMul", {}, [(2, 5, 6)], [W[0, :, 0, 0]]),
    "a vector by columns": ("MatMul", {}, [(6,)], [W[0, :, 0]]),
    "a vector by columns of data": ("MatMul", {}, [(4,), (2, 4, 5)], []),
    "a product of heads": ("Einsum", {"equation": "bthe,bshe->bhts"}, [(2, 5, 3, 4), (2, 7, 3, 4)], []),
    "a weight for several axes": ("Einsum", {"equation": "btd,sdhe -> sbthe"}, [(2, 5, 6)], [W]),
    "three operands": (
        "Einsum",
        {"equation": "bhts,bshe,hed->btd"},
        [(2, 2, 5, 7), (2, 7, 2, 4)],
        [W[0].reshape(2, 4, 6)],
    ),
    "no sum": ("Einsum", {"equation": "bi,bj->bij"}, [(2, 3), (2, 4)], []),
    "a slice backwards": ("Slice", {}, [(2, 5, 6)], [[-1, 4], [-(2**62), 0], [1, 2], [-1, -2]]),
    "a border of the other end": ("Pad", {"mode": "wrap"}, [(2, 3, 4)], [[0, 1, 0, 0, 2, 3]]),
    "a border that is cut off": ("Pad", {}, [(2, 3, 4)], [[0, -1, 0, 0, 1, -2]]),
    "patches as an image": ("Col2Im", {"strides": [2, 3]}, [(2, 18, 4)], [[4, 6], [2, 3]]),
    "entries of two axes": ("GatherND", {}, [(3, 4, 2)], [[[2, 1], [0, -1], [1, 3]]]),
    "rows": ("GatherND", {}, [(5, 2)], [[[2], [0], [-1]]]),
}


@pytest.mark.parametrize("name", CANONICAL)
def test_what_exporters_write_is_read_as_canonical_operators(name):
    import onnxruntime

    op, attrs, shapes, constants = CANONICAL[name]
    data = [np.random.default_rng(k).normal(size=s).astype(np.float32) for k, s in enumerate(shapes)]
    held = {f"k{i}": c for i, c in enumerate(constants)}
    names = [f"x{k}" for k in range(len(shapes))]
    node = onnx_node(f"y = {op}({', '.join([*names, *held])})", **attrs)
    model = onnx_of(node, inputs=dict(zip(names, shapes, strict=True)), constants=held, opset=19)
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, dict(zip(names, data, strict=True)))
    given = [torch.from_numpy(x) for x in data]
    read = capture(load_model(model), given)
    assert "Opaque" not in {n.op for n in read.nodes}
    np.testing.assert_allclose(run(read, given, keep=read.outputs)[read.outputs[0]], want, rtol=1e-5, atol=1e-5)
