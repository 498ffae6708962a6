"""What is written for one value: names, codes, quantizers, and what several operators make of them."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper

from chipfit.errors import UnsupportedError
from chipfit.export.io_spec import QuantizedIO
from chipfit.export.onnx.builder import OnnxBuilder
from chipfit.export.onnx.ops import WRITERS
from chipfit.export.onnx.writer import export_onnx
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import NodePlan
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests import build
from tests.build import plan_of, stored
from tests.export.operators import alone


def builder_of(*nodes, shapes=None, weights=None, opset=13, roles=None, **plan):
    """A builder for these nodes; `plan` has what is stored, by name, beside fields of a Plan."""
    values = {k: Value(k, s) for k, s in (shapes or {}).items()}
    graph = Graph(list(nodes), [], [], values, dict(weights or {}))
    fields = {k: plan.pop(k) for k in ("groups", "float_edges", "nodes") if k in plan}
    return OnnxBuilder(graph, replace(plan_of(roles, **plan), **fields), opset)


def kinds(b):
    return [n.op_type for n in b.nodes]


def held(b, name):
    return numpy_helper.to_array(b.initialisers[name])


def settings(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


# ---------------------------------------------------------------- names


def test_a_value_gives_its_name_to_the_tensor_that_the_node_has_made():
    first, second = build.node("y = Relu(x)", name="a"), build.node("z = Identity(y)", name="b")
    b = builder_of(first, second)
    b.begin(first)
    inner = b.op("Neg", ["x"])
    b.publish("y", b.op("Neg", [inner]))
    assert [list(n.output) for n in b.nodes] == [[inner], ["y"]]
    assert b.after_quantizer["y"] == b.before_quantizer["y"] == "y"
    b.begin(second)
    b.publish("z", "y")  # made by another node: it keeps its name
    assert list(b.nodes[-1].output) == ["y"] and b.after_quantizer["z"] == "y"
    b.publish("size", "")
    assert b.after_quantizer["size"] == ""


def test_a_reader_takes_a_value_before_its_quantizer_where_the_plan_says_so():
    node, other = build.node("y = Add(x, w)", name="n"), build.node("z = Relu(x)", name="m")
    edges = frozenset({("x", "n"), ("w", "n")})
    b = builder_of(node, other, weights={"w": torch.ones(2)}, x=stored(), w=stored(), float_edges=edges)
    b.publish("x", "x")
    assert b.read("x", node) == "x" and b.read("x", other) == b.after_quantizer["x"] != "x"
    assert b.read("w", node) == "w" and b.read("w", other) == b.after_quantizer["w"] != "w"
    assert b.read(None, node) is None


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "scale, axis, per, attrs",
    [
        (0.5, None, None, {}),
        ([0.5, 0.25], 0, None, {"axis": 0}),
        ([0.5, 0.25, 0.5, 2.0], 1, None, {"axis": 1}),
        ([[0.5, 0.25], [1.0, 2.0]], 1, "block", {"axis": 1, "block_size": 2}),
    ],
)
def test_a_weight_is_dequantized_along_its_axis(scale, axis, per, attrs):
    w = torch.tensor([[0.5, 1.0, -1.5, 2.0], [-2.0, 4.0, 0.0, 6.0]])
    b = builder_of(weights={"w": w}, w=stored(scale, axis=axis, per=per))
    assert b.weight("w", False) == b.nodes[0].output[0]
    (node,) = b.nodes
    assert node.op_type == "DequantizeLinear" and settings(node) == attrs
    s = held(b, "w_scale")
    s = s.reshape(-1, 1) if axis == 0 else np.repeat(s, 2, 1) if per else s
    assert np.array_equal(held(b, "w_q") * s, w.numpy())
    assert list(node.input) == ["w_q", "w_scale", "w_zero_point"]


def test_every_reader_of_signed_weights_has_integers_of_its_own_without_a_copy_in_the_file():
    """ONNX Runtime merges slices with equal ends, and fails to shift weights that two readers share."""
    w = torch.tensor([[0.5, 1.0], [-2.0, 4.0]])
    b = builder_of(weights={"w": w}, w=stored([0.5, 0.25], axis=0))
    assert len({b.weight("w", False) for _ in range(3)}) == 3
    dequantize = [n for n in b.nodes if n.op_type == "DequantizeLinear"]
    slices = [n for n in b.nodes if n.op_type == "Slice"]
    assert [n.input[0] for n in dequantize] == ["w_q", *(n.output[0] for n in slices)]
    assert len({n.input[2] for n in dequantize}) == 3 and {n.input[0] for n in slices} == {"w_q"}
    assert [[held(b, i).tolist() for i in n.input[1:]] for n in slices] == [[[0], [3], [0]], [[0], [4], [0]]]
    assert sum(t.data_type == TensorProto.INT8 and len(t.dims) == 2 for t in b.initialisers.values()) == 1
    unsigned = builder_of(weights={"w": w}, w=stored(0.5, low=0, high=255, zero=8))
    assert unsigned.weight("w", False) == unsigned.weight("w", False)


@pytest.mark.parametrize(
    "bits, low, high, role, kind",
    [
        (8, -128, 127, "weight", "INT8"),
        (8, 0, 255, "weight", "UINT8"),
        (4, -8, 7, "weight", "INT4"),
        (3, 0, 7, "weight", "UINT4"),
        (12, 0, 4095, "weight", "UINT16"),
        (16, -32768, 32767, "weight", "INT16"),
        (8, -128, 127, "bias", "INT8"),
        (8, 0, 255, "bias", "UINT8"),
        (16, -32768, 32767, "bias", "INT32"),
        (32, -(2**31), 2**31 - 1, "bias", "INT32"),
    ],
)
def test_codes_are_in_the_least_type_that_holds_them_and_wide_biases_in_32_bits(bits, low, high, role, kind):
    w = torch.tensor([0.0, 1.0, 3.0])
    b = builder_of(weights={"w": w}, roles={"w": role}, w=stored(0.5, low=low, high=high, bits=bits))
    b.weight("w", False)
    tensor = b.initialisers["w_q"]
    assert onnx.TensorProto.DataType.Name(tensor.data_type) == kind
    assert b.initialisers["w_zero_point"].data_type == tensor.data_type
    assert numpy_helper.to_array(tensor).astype(int).tolist() == [0, 2, 6] and list(tensor.dims) == [3]


# ---------------------------------------------------------------- quantizers


def test_an_operator_that_moves_codes_stands_between_quantizers_of_its_operand():
    node, raw = build.node("y = Reshape(x)", name="n"), build.node("z = Reshape(x)", name="m")
    b = builder_of(node, raw, shapes={"x": (2,)}, x=stored(), float_edges=frozenset({("x", "m")}))
    b.pass_through("Transpose", ["x"], node)
    assert kinds(b) == ["Transpose", "QuantizeLinear", "DequantizeLinear"]
    assert list(b.nodes[1].input[1:]) == ["x_scale", "x_zero_point"]
    for free, where in ((raw, b), (node, builder_of(node))):
        where.nodes.clear()
        where.pass_through("Transpose", ["x"], free)
        assert kinds(where) == ["Transpose"]


def test_what_follows_a_value_is_put_behind_its_quantizer():
    b = builder_of(shapes={"x": (2,), "y": (2,)}, x=stored())
    b.defer("x", lambda name: b.op("Neg", [name]))
    b.publish("x", "x")
    assert kinds(b) == ["Neg", "QuantizeLinear", "DequantizeLinear"] * 2
    assert b.before_quantizer["x"] == b.nodes[0].output[0] and b.nodes[3].input[0] == b.nodes[2].output[0]
    assert b.nodes[4].output[0] == "x_q"
    b.nodes.clear()
    b.defer("y", lambda name: b.op("Neg", [name]))
    b.publish("y", "y")
    assert kinds(b) == ["Neg"] and b.after_quantizer["y"] == b.before_quantizer["y"] == b.nodes[0].output[0]


def test_what_follows_a_value_inside_a_group_follows_the_groups_result():
    linear, relu = build.node("y = Linear(x, w)", name="a"), build.node("z = Relu(y)", name="b")
    b = builder_of(linear, relu, groups=(("a", "b"),))
    b.begin(linear)
    b.defer("y", lambda name: b.op("Neg", [name]))
    b.publish("y", b.op("Gemm", ["x", "w"]))
    b.begin(relu)
    b.publish("z", b.op("Relu", [b.read("y", relu)]))
    assert kinds(b) == ["Gemm", "Relu", "Neg"]


@pytest.mark.parametrize("low, own, want", [(-128, True, ["Identity", "DequantizeLinear"]), (-127, True, None)])
def test_codes_that_come_in_pass_as_they_are_where_the_plan_has_them_all(low, own, want):
    """Those of a narrower grid may lie outside of it."""
    b = builder_of(shapes={"x": (2,)}, x=stored(low=low))
    b.quantized_input("x", QuantizedIO("int8", 0.5, 0, own))
    assert kinds(b) == (want or ["DequantizeLinear", "QuantizeLinear", "Clip", "DequantizeLinear"])
    assert b.before_quantizer["x"] == b.after_quantizer["x"] == b.nodes[-1].output[0]
    assert b.quantized_output("x", QuantizedIO("int8", 0.5, 0, True)) == "x_q"


# ---------------------------------------------------------------- data that are rounded each time

EACH_TIME = {"per": "tensor", "qmin": 0, "qmax": 255, "affine": True}


def rounded(**how):
    b = builder_of(d := build.node("xr = DynamicQuantize(x)", EACH_TIME | how, name="d"))
    return b, WRITERS["DynamicQuantize"](b, d, ["x"])


@pytest.mark.parametrize(
    "how",
    [
        {"affine": False},
        {"qmin": 1},
        {"qmax": 254},
        {"qmin": -128, "qmax": 127},
        {"per": "row"},
        {"per": "block", "qmin": -127, "qmax": 127},
    ],
)
def test_other_ways_to_round_data_are_refused(how):
    with pytest.raises(UnsupportedError, match="DynamicQuantize 'd'.*ONNX has 0..255 with one range"):
        rounded(**how)


W = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])
LINEAR, MATMUL = build.node("y = Linear(x, w, b)", name="n"), build.node("y = MatMul(x, w)", name="n")


def product(node, w, plan, moment=None, bias=None, **more):
    b = builder_of(node, shapes={"x": (None, 3), "y": (None, 2)}, weights={"w": w}, w=plan, **more)
    if moment:
        b.dynamic["x"] = moment
    return b, WRITERS[node.op](b, node, ["x", "w", bias][: len(node.inputs)])


@pytest.mark.parametrize("node, w", [(LINEAR, W), (MATMUL, W.t().contiguous())])
def test_a_product_with_such_data_is_one_of_integers(node, w):
    """x_q w_q, times both scales; the codes of a linear layer are turned to [in, out]."""
    axis = 0 if node.op == "Linear" else 1
    plan = stored([0.5, 0.25], low=-127, axis=axis)
    b, y = product(node, w, plan, ("q", "s", "z"), "bias" if node.op == "Linear" else None)
    more = ["Add"] if node.op == "Linear" else []
    assert kinds(b) == ["MatMulInteger", "Cast", "Mul", "Mul", *more] and b.nodes[-1].output[0] == y
    integers = "w_t1_q" if more else "w_q"
    assert list(b.nodes[0].input) == ["q", integers, "z"] and list(b.nodes[2].input) == ["s", "w_scale"]
    assert held(b, integers).tolist() == [[2, 2], [-4, 1], [6, -4]] and held(b, integers).dtype == np.int8
    if more:
        assert b.nodes[-1].input[1] == "bias"


def test_a_product_that_no_operator_computes_is_refused():
    with pytest.raises(UnsupportedError, match="one scale for each channel multiply data with one for each block"):
        product(LINEAR, W, stored([0.5, 0.25], axis=0), ("", "", ""))
    with pytest.raises(UnsupportedError, match="weights with zero points multiply dynamically quantized data"):
        product(LINEAR, W, stored([0.5, 0.25], zero=1, axis=0), ("q", "s", "z"))


@pytest.mark.parametrize("moment", [None, ("q", "s", "z")])
def test_a_product_of_a_weight_in_float_stays_one(moment):
    edges = frozenset({("w", "n")})
    b, _ = product(LINEAR, W, stored([0.5, 0.25], axis=0), moment, float_edges=edges)
    assert kinds(b) == ["Gemm"]
    if moment is None:
        assert kinds(product(LINEAR, W, stored([0.5, 0.25], axis=0))[0]) == ["Gemm"]
        assert kinds(product(MATMUL, W.t(), stored([0.5, 0.25], axis=1))[0]) == ["MatMul"]


def blocks(block, bits=4, signed=True, zero=0):
    """Two rows of two blocks."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return stored([[0.5, 1.0], [2.0, 4.0]], zero=zero, low=low, high=high, bits=bits, axis=1, per="block")


@pytest.mark.parametrize("moment, level", [(None, 1), (("", "", ""), 4)])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks_are_bytes_of_codes_without_a_sign(bits, moment, level):
    codes = torch.arange(64).reshape(2, 32) % (1 << bits) - (1 << bits - 1)
    plan = blocks(16, bits)
    w = codes * plan.scale.repeat_interleave(16, 1)
    b, y = product(LINEAR, w, plan, moment, "bias")
    (node,) = b.nodes
    assert (node.op_type, node.domain, node.output[0]) == ("MatMulNBits", "com.microsoft", y)
    assert settings(node) == {"K": 32, "N": 2, "bits": bits, "block_size": 16, "accuracy_level": level}
    assert list(node.input) == ["x", "w_q", "w_scale", "", "", "bias"]
    q = (codes + (1 << bits - 1)).numpy().astype(np.uint8)
    want = q if bits == 8 else q[:, ::2] | q[:, 1::2] << 4
    assert np.array_equal(held(b, "w_q"), want.reshape(2, 2, -1))
    turned = stored([[0.5, 2.0], [1.0, 4.0]], low=plan.grid.qmin, high=plan.grid.qmax, bits=bits, axis=0, per="block")
    b, _ = product(MATMUL, w.t().contiguous(), turned, moment)
    assert np.array_equal(held(b, "w_q"), want.reshape(2, 2, -1))
    assert held(b, "w_scale").tolist() == [[0.5, 1.0], [2.0, 4.0]]


def test_zero_points_of_blocks_are_packed_as_codes_are():
    plan = blocks(16, signed=False, zero=3)
    b, _ = product(LINEAR, torch.zeros(2, 32), plan)
    assert list(b.nodes[0].input) == ["x", "w_q", "w_scale", "w_zero_point"]
    assert held(b, "w_zero_point").tolist() == [[0x33], [0x33]]


@pytest.mark.parametrize(
    "width, bits, signed, zero, got",
    [
        (8, 4, True, 0, "blocks of 8 signed integers of 4 bits"),
        (24, 4, True, 0, "blocks of 24 signed integers"),
        (48, 8, False, 0, "blocks of 48 integers of 8 bits"),
        (16, 5, True, 0, "of 5 bits"),
        (16, 4, True, 1, "unsigned zero points"),
    ],
)
def test_blocks_that_no_kernel_has_are_refused(width, bits, signed, zero, got):
    with pytest.raises(UnsupportedError, match=f"{got}.*"):
        product(LINEAR, torch.zeros(2, 2 * width), blocks(width, bits, signed, zero))


# ---------------------------------------------------------------- tables


def looked_up(plan, rows=(5, 32)):
    node = build.node("y = Embedding(w, i)", name="e")
    weights = {"w": torch.zeros(rows)}
    b = builder_of(node, shapes={"i": (None, 7)}, weights=weights, w=plan)
    table = b.weight("w", raw=plan is None or plan.grid.per == "block")
    return b, WRITERS["Embedding"](b, node, [table, "i"])


def test_rows_of_codes_are_looked_up_and_then_become_floats():
    b, _ = looked_up(None)
    assert kinds(b) == ["Gather"]
    b, _ = looked_up(stored(0.5, zero=1))
    assert kinds(b) == ["DequantizeLinear", "Gather", "DequantizeLinear"]
    assert b.nodes[1].input[0] == "w_q" and settings(b.nodes[2]) == {}
    b, _ = looked_up(stored([0.5] * 32, zero=1, axis=1))
    assert settings(b.nodes[2]) == {"axis": 2}  # of [samples, ids, width]
    b, _ = looked_up(stored([0.5] * 32, axis=1))
    assert kinds(b)[1:] == ["Gather", "Cast", "Mul"] and b.nodes[-1].input[1] == "w_scale"
    b, y = looked_up(stored([0.5] * 5, axis=0))
    assert kinds(b)[1:] == ["Gather", "Gather", "Unsqueeze", "Cast", "Mul"] and b.nodes[-1].output[0] == y
    assert held(b, b.nodes[3].input[1]) == 2 and b.nodes[2].input[0] == "w_scale"
    with pytest.raises(UnsupportedError, match="its rows have zero points of their own"):
        looked_up(stored([0.5] * 5, zero=1, axis=0))


def test_a_table_in_blocks_is_one_operator_unless_its_codes_have_a_sign():
    scale, how = [[0.5, 1.0]] * 5, {"bits": 4, "axis": 1, "per": "block"}
    b, _ = looked_up(stored(scale, low=0, high=15, **how))
    (node,) = (n for n in b.nodes if n.op_type == "GatherBlockQuantized")
    assert settings(node) == {"gather_axis": 0, "quantize_axis": 1, "bits": 4, "block_size": 16}
    assert list(node.input) == ["w_rows_q", "i", "w_scale", "w_zero_point"] and node.domain == "com.microsoft"
    with pytest.raises(UnsupportedError, match="its blocks have signed integers"):
        looked_up(stored(scale, low=-8, high=7, **how))


# ---------------------------------------------------------------- operators that look at their surroundings


@pytest.mark.parametrize(
    "size, execution, output, float_before, want",
    [
        (4, "int", True, False, ["Softmax"]),
        (1, "int", True, False, ["LogSoftmax", "Exp"]),
        (4, "float", True, False, ["LogSoftmax", "Exp"]),
        (4, "", True, False, ["LogSoftmax", "Exp"]),
        (4, "float", False, False, ["Softmax"]),
        (1, "int", False, False, ["Softmax"]),
        (4, "float", True, True, ["Softmax"]),
    ],
)
def test_a_softmax_is_written_so_that_the_runtime_makes_no_wrong_kernel_of_it(
    size, execution, output, float_before, want
):
    """Its own kernel rounds to 1/256: it stays one where the plan computes so, or where it would not be taken."""
    node = Node("s", "Softmax", ("x",), ("y",), {"axis": 1})
    plan = {"y": stored()} if output else {}
    nodes = {"s": NodePlan(name="s", op="Softmax", exec=execution)} if execution else {}
    b = builder_of(node, shapes={"x": (None, size), "y": (None, size)}, nodes=nodes, x=stored(), **plan)
    b.publish("x", "x")
    x = b.op("Erf", ["x"]) if float_before else b.after_quantizer["x"]
    before = len(b.nodes)
    WRITERS["Softmax"](b, node, [x])
    assert kinds(b)[before:] == want


def computed(tmp_path, op, attrs, shapes, x, want, weights=None):
    """The operators of a file of one node, which computes what is wanted."""
    from chipfit.export.onnx.writer import export_onnx

    inputs = ("x", *(weights or {}))
    values = {k: Value(k, s) for k, s in zip("xy", shapes, strict=True)}
    graph = Graph([Node("n", op, inputs, ("y",), attrs)], ["x"], ["y"], values, dict(weights or {}))
    path = export_onnx(graph, None, tmp_path / "m.onnx")
    (got,) = OnnxRuntime(path).run([x.numpy()]).values()
    np.testing.assert_allclose(got, want.numpy(), atol=1e-5)
    return [n for n in onnx.load(path).graph.node if n.op_type != "Identity"]


@pytest.mark.parametrize(
    "shape, x, want",
    [
        ((None, 3), (5, 3), ["Gemm"]),
        ((None, 4, 3), (5, 4, 3), ["Reshape", "Gemm", "Reshape"]),
        ((2, None, 3), (2, 6, 3), ["Reshape", "Gemm", "Reshape"]),
        ((None, None, 3), (5, 6, 3), ["Reshape", "Gemm", "Shape", "Slice", "Concat", "Reshape"]),
        ((None, 2, None, 3), (5, 2, 4, 3), ["Reshape", "Gemm", "Shape", "Slice", "Concat", "Reshape"]),
    ],
)
def test_a_linear_layer_of_any_rank_is_one_product_of_two_axes(tmp_path, shape, x, want):
    x = torch.linspace(-1, 1, int(np.prod(x))).reshape(x)
    y = torch.nn.functional.linear(x, W)
    nodes = computed(tmp_path, "Linear", {}, (shape, (*shape[:-1], 2)), x, y, {"w": W})
    assert sorted(n.op_type for n in nodes) == sorted(want)


def test_a_pool_of_images_of_any_size_rounds_up_when_it_runs(tmp_path):
    x = torch.linspace(-1, 2, 30).reshape(1, 1, 5, 6)
    y = torch.nn.functional.max_pool2d(x, 2, 2, ceil_mode=True)
    attrs = {"kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0),) * 2, "dilation": (1, 1), "ceil_mode": True}
    (pool,) = computed(tmp_path, "MaxPool", attrs, ((None, 1, None, None),) * 2, x, y)
    assert settings(pool)["ceil_mode"] == 1


@pytest.mark.parametrize(
    "name, want",
    [
        ("batch norm", ["BatchNormalization"]),
        ("batch norm without gain", ["BatchNormalization"]),
        ("layer norm of two axes", ["LayerNormalization"]),
        ("InstanceNorm", ["InstanceNormalization"]),
        ("GroupNorm", ["Reshape", "InstanceNormalization", "Shape", "Reshape", "Reshape", "Mul", "Reshape", "Add"]),
        ("stack behind", ["Unsqueeze"] * 3 + ["Concat"]),
        ("index of the largest of all", ["Reshape", "ArgMax"]),
    ],
)
def test_an_operator_that_onnx_has_is_not_taken_apart(tmp_path, name, want):
    from chipfit.export.onnx.writer import export_onnx

    nodes = onnx.load(export_onnx(alone(name)[0], None, tmp_path / "m.onnx")).graph.node
    assert [n.op_type for n in nodes if n.op_type != "Identity"] == want


# ---------------------------------------------------------------- numbers that stay in float


def decoder(first, second):
    """A sum of two products, as a detector decodes boxes; its constants have 1,024 numbers each."""
    nodes = [build.node("p = Mul(x, a)"), build.node("q = Mul(p, b)")]
    return build.graph_of(*nodes, shape=(None, 1024), weights={"a": torch.tensor(first), "b": torch.tensor(second)})


def same_in_ort(graph, path, x):
    export_onnx(graph, None, path)
    want = x * graph.weights["a"].numpy() * graph.weights["b"].numpy()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.array_equal(session.run(None, {"x": x})[0], want)


def test_equal_numbers_are_written_once(tmp_path):
    numbers = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((3, 1024)).astype(np.float32)
    assert same_in_ort(decoder(numbers, numbers), tmp_path / "m.onnx", x)
    assert (tmp_path / "m.onnx").stat().st_size < 1.2 * numbers.nbytes


def test_few_distinct_numbers_are_written_in_one_byte_each(tmp_path):
    rng = np.random.default_rng(0)
    table = np.array([-0.0, 0.0, *rng.standard_normal(254)], np.float32)  # both zeros keep their signs
    anchors, others = rng.choice(table, 1024), rng.choice(np.append(table, np.float32(3)), 1024)
    x = rng.standard_normal((3, 1024)).astype(np.float32)
    assert same_in_ort(decoder(anchors, np.sort(anchors)), tmp_path / "few.onnx", x)
    assert (tmp_path / "few.onnx").stat().st_size < 2 * (1024 + 4 * 256) + 1000
    others[:257] = np.append(table, np.float32(3))  # 257 distinct ones stay as they are
    assert same_in_ort(decoder(others, anchors), tmp_path / "more.onnx", x)
    held = {i.name: i for i in onnx.load(tmp_path / "more.onnx").graph.initializer}
    assert np.array_equal(numpy_helper.to_array(held["a"]), others) and "b" not in held


def test_few_distinct_numbers_of_a_kernel_stay_as_they_are(tmp_path):
    w = torch.tensor([1.0, 2.0]).repeat(64, 32)
    graph = build.graph_of(build.node("y = Linear(x, w)"), shape=(None, 64), weights={"w": w})
    held = {i.name: i for i in onnx.load(export_onnx(graph, None, tmp_path / "m.onnx")).graph.initializer}
    assert np.array_equal(numpy_helper.to_array(held["w"]), w)
