"""Each operator as LiteRT computes what is written for it, with attributes other than the usual ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch.nn import functional as F

from chipfit.engine.kernels import execute
from chipfit.errors import UnsupportedError
from chipfit.export.tflite.file import TYPES
from chipfit.export.tflite.ops import REFUSED, SAME, VALID, fused_code, window_placement
from chipfit.export.tflite.writer import content, export_tflite
from chipfit.graph.ir import DYNAMIC, Node
from chipfit.operators.table import OPS
from chipfit.plan.record import NodePlan, Plan
from chipfit.registry import lookup
from chipfit.runtimes.litert import LiteRtReference
from tests.build import graph_of, node, plan_of
from tests.export.operators import CASES, alone, pool, resize
from tests.export.tflite.test_writer import operators as written
from tests.export.tflite.test_writer import read
from tests.simulate.one_operator import Codes, drawn, one

REASONS = {op: f"{op} 'n': {why}" for op, why in REFUSED.items()} | {
    "DynamicQuantize": "integers 0..255 with a range for each tensor",
    "max with gaps": "its window is dilated",
    "transposed with gaps": "it has dilation",
    "transposed row beyond": "it has dilation",
    "transposed beyond": "reaches beyond the last window",
    "cut off": "it cuts off",
    **{f"bicubic sample, {outside}": "weighed by cubic curves" for outside in ("zeros", "border", "reflection")},
    **{f"{mode} sample, reflection": "reflected at the border" for mode in ("bilinear", "nearest")},
}


@pytest.mark.parametrize("runtime, keep_layout", [("litert_optimized", True), ("litert", False)])
@pytest.mark.parametrize("name", [*OPS, *CASES])
def test_an_operator_is_written_as_the_engine_computes_it_or_refused_with_the_reason(
    name, runtime, keep_layout, tmp_path
):
    graph, inputs, want = alone(name)
    if why := REASONS.get(name) or REASONS.get(graph.nodes[0].op):
        with pytest.raises(UnsupportedError, match=why):
            export_tflite(graph, None, tmp_path / "m.tflite", keep_layout=keep_layout)
        return
    path = export_tflite(graph, None, tmp_path / "m.tflite", keep_layout=keep_layout)
    got = lookup("runtime", runtime)(path).run([x.numpy() for x in inputs])
    for y, found in zip(want, got.values(), strict=True):
        np.testing.assert_allclose(found, y.numpy(), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- pieces, by hand


def spatial(stride, padding, dilation=None, **more) -> Node:
    attrs = {"stride": stride, "padding": padding, **more}
    return Node("n", "Conv2D", ("x",), ("y",), attrs | ({} if dilation is None else {"dilation": dilation}))


@pytest.mark.parametrize(
    "sizes, out, kernel, stride, padding, dilation, found",
    [
        ((5, 6), (3, 4), (3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1), (VALID, None)),
        ((6,), (2,), (3,), (2,), ((0, 0),), (1,), (VALID, None)),  # one element is left over
        ((6,), (6,), (3,), (1,), ((1, 1),), (1,), (SAME, None)),
        ((6,), (3,), (3,), (2,), ((0, 1),), (1,), (SAME, None)),  # one in all, behind
        ((6,), (3,), (3,), (2,), ((1, 0),), (1,), (VALID, [(1, 0)])),
        ((7,), (4,), (3,), (2,), ((1, 1),), (1,), (SAME, None)),
        ((6,), (2,), (3,), (2,), ((1, 1),), (1,), (VALID, [(1, 0)])),  # SAME gives 3
        ((6,), (6,), (3,), (1,), ((2, 2),), (2,), (SAME, None)),  # gaps make it 5 wide
        ((6,), (4,), (3,), (1,), ((1, 1),), (2,), (VALID, [(1, 1)])),
        ((6,), (2,), (3,), (1,), ((0, 0),), (2,), (VALID, None)),
        ((6, 6), (6, 4), (3, 3), (1, 1), ((1, 1), (0, 0)), (1, 1), (VALID, [(1, 1), (0, 0)])),
        ((5,), (3,), (2,), (2,), ((0, 0),), None, (SAME, None)),  # beyond the end, as ceil_mode has it
        ((4,), (4,), (1,), (1,), ((0, 0),), None, (VALID, None)),
    ],
)
def test_padding_is_the_schemas_own_word_where_that_places_the_windows(
    sizes, out, kernel, stride, padding, dilation, found
):
    assert window_placement(spatial(stride, padding, dilation), sizes, out, kernel) == found


@pytest.mark.parametrize(
    "op, attrs, kind",
    [
        ("Relu", {}, "RELU"),
        ("Relu6", {}, "RELU6"),
        ("Clamp", {"min": -1.0, "max": 1.0}, "RELU_N1_TO_1"),
        ("Clamp", {"min": 0.0, "max": None}, "RELU"),
        ("Clamp", {"min": 0.0, "max": 6.0}, "RELU6"),
        ("Clamp", {"min": 0.0, "max": 1.0}, "NONE"),  # an operator of its own, which no kernel applies
        ("Clamp", {"min": 0.0, "max": 5.0}, "NONE"),
        ("Tanh", {}, "NONE"),
        ("Erf", {}, "NONE"),
    ],
)
def test_an_activation_has_a_code_where_other_kernels_apply_it(op, attrs, kind):
    code = getattr(schema.ActivationFunctionType, kind)
    assert fused_code(Node("n", op, ("x",), ("y",), attrs)) == code


def alone_in_codes(op, operands, attrs, result=None, exec="follow"):
    """An operator in integers, in the numbers of its first operand unless told."""
    return one(op, operands, result or operands[0], attrs, exec)


BORDERS = [((1, 1), (0, 2)), ((0, 1), (1, 0)), ((1, 1), (1, 1))]


@pytest.mark.parametrize("border", BORDERS)
def test_what_lies_around_an_image_of_codes_is_never_the_largest(border, tmp_path):
    low = torch.full((1, 2, 4, 5), -128)
    for q in (low, drawn(0, 1, 2, 4, 5)):
        attrs = {"kernel": (3, 3), "stride": (1, 1), "padding": border, "dilation": (1, 1), "ceil_mode": False}
        alone_in_codes("MaxPool", [Codes(q, 0.5, 7)], attrs).prove(tmp_path)
        floats = alone_in_codes("MaxPool", [Codes(q, 2.0, 7)], attrs, exec="float")  # less than any code
        want = F.max_pool2d(F.pad(floats.inputs[0], (*border[1], *border[0]), value=-torch.inf), 3, 1)
        path = export_tflite(floats.graph, floats.plan, tmp_path / "floats.tflite")
        (got,) = LiteRtReference(path, []).run([x.numpy() for x in floats.inputs]).values()
        assert np.array_equal(got, want.numpy())


ALONG_TWO_AXES = [(3, 1, 1), (1, 1, 2), (1, 2, 3)]
POOLS = [("AvgPool", kernel, {"count_include_pad": False}) for kernel in ALONG_TWO_AXES]
POOLS += [("MaxPool", kernel, {"dilation": (1, 1, 1)}) for kernel in (*ALONG_TWO_AXES, (2, 1, 2))]
POOLS += [("MaxPool", (2, 3, 3), {"dilation": (1,) * 3, "padding": ((0, 1), (1, 0), (1, 1)), "stride": (2, 1, 2)})]


@pytest.mark.parametrize("op, kernel, own", POOLS)
def test_windows_over_a_volume_are_those_of_one_image_or_two(op, kernel, own, tmp_path):
    attrs = {"kernel": kernel, "stride": (1, 1, 1), "padding": ((0, 0),) * 3, "ceil_mode": False, **own}
    alone_in_codes(op, [Codes(drawn(0, 2, 3, 5, 4, 6), 0.5, 7)], attrs).prove(tmp_path)


@pytest.mark.parametrize("value, op", [(0.0, "PAD"), (1.5, "PADV2"), (-40.0, "PADV2")])
def test_codes_are_padded_with_the_code_of_a_number(value, op, tmp_path):
    attrs = {"mode": "constant", "value": value, "padding": ((0, 0), (0, 1), (2, 1))}
    padded = alone_in_codes("Pad", [Codes(drawn(0, 1, 2, 3), 0.5, 7)], attrs)
    padded.prove(tmp_path)
    assert op in written(content(padded.graph, padded.plan))
    assert padded.simulated("tflite_int8")[0, 2].tolist() == [round(value / 0.5) + 7] * 6


@pytest.mark.parametrize("bits, kind", [(7, "int32"), (8, "int32"), (9, "int64"), (16, "int64")])
@pytest.mark.parametrize("numbers", [[1000, -7, 3], None])
def test_a_layer_of_16_bit_data_has_a_bias_of_64_and_one_of_zeros_where_it_has_none(numbers, bits, kind):
    """In the scale of its sums."""
    x, w = Codes(drawn(0, 2, 5, bits=bits), 0.5, 0, bits), Codes(drawn(1, 3, 5), (0.5, 0.25, 0.125))
    bias = numbers and Codes(torch.tensor(numbers), (0.25, 0.125, 0.0625), 0, 40)
    layer = alone_in_codes("Linear", [x, w, bias], {}, Codes(x.q, 64.0, 0, bits), "int")
    model = read(content(layer.graph, layer.plan))
    (g,) = model.subgraphs
    linear = next(o for o in g.operators if len(o.inputs) == 3)
    held = g.tensors[linear.inputs[2]]
    assert held.type == TYPES[kind] and held.quantization.scale.tolist() == [0.25, 0.125, 0.0625]
    assert held.quantization.zeroPoint.tolist() == [0, 0, 0] and linear.builtinOptions.keepNumDims is False
    assert np.frombuffer(model.buffers[held.buffer].data, kind).tolist() == (numbers or [0, 0, 0])


OFF_CENTRE = pool(3, 3, padding=((0, 0), (1, 1)), count_include_pad=False)
REFUSED_SHAPES = {
    "a vector": ("MatMul", [(3, 4), (4,)], {}, "an operand is a vector"),
    "rows that differ": ("GatherElements", [(2, 5, 3), (1, 4, 3)], {"axis": 1}, "it picks from some rows only"),
    "half a pixel": ("Resize", [(1, 2, 5, 5)], resize("linear", scale=(1.5, 1.5)), "its factor does not give whole"),
    "a volume": ("AvgPool", [(1, 2, 4, 4, 4)], {**pool(2, 2, 2), "count_include_pad": True}, "its windows have three"),
    "means that no SAME has": ("AvgPool", [(1, 2, 6, 6)], OFF_CENTRE, "its windows reach beyond what counts"),
}


@pytest.mark.parametrize("name", REFUSED_SHAPES)
def test_what_the_file_has_no_form_for_is_refused_with_the_reason(name):
    op, shapes, attrs, words = REFUSED_SHAPES[name]
    names = [f"x{k}" for k in range(len(shapes))]
    inputs = [torch.zeros(s, dtype=torch.int64 if k and op == "GatherElements" else None) for k, s in enumerate(shapes)]
    n = node(f"y = {op}({', '.join(names)})", attrs, name="n")
    made = dict(zip([*names, "y"], [*inputs, execute(n, inputs)[0]], strict=True))
    types = {k: str(x.dtype)[6:] for k, x in made.items()}
    with pytest.raises(UnsupportedError, match=f"{op} 'n': {words}"):
        content(graph_of(n, shapes={k: tuple(x.shape) for k, x in made.items()}, dtypes=types), None)


def test_codes_are_clipped_only_where_the_schema_has_the_bounds():
    x = Codes(drawn(0, 2, 5), 0.5, 7)
    odd = one("Clamp", [x], x, {"min": 0.0, "max": 5.0})
    with pytest.raises(UnsupportedError, match=r"8-bit clipping to \(0\.0, 5\.0\)"):
        content(odd.graph, odd.plan)
    unit = one("Clamp", [x], x, {"min": 0.0, "max": 1.0})
    assert "RELU_0_TO_1" in written(content(unit.graph, unit.plan))


def rounded(per="row", low=-128, high=127, weight=True, op="Linear"):
    """x -> quantized dynamically -> a product with stored weights."""
    how = {"per": per, "qmin": low, "qmax": high, "affine": True, "block": 1}
    product = node("y = Linear(m, w, -)" if op == "Linear" else "y = MatMul(m, w)", name="l")
    w = Codes(drawn(1, 4, 4), 0.5)
    graph = graph_of(node(f"m = {DYNAMIC}(x)", how, name="d"), product, weights={"w": w.reals()})
    plan = plan_of(w=w.stored()) if weight else Plan()
    return graph, replace(plan, nodes={"l": NodePlan(name="l", op=op, exec="int")})


@pytest.mark.parametrize(
    "how, words",
    [
        ({"per": "tensor"}, r"integers -128\.\.127 with a range for each tensor; kernels have -128\.\.127, by row"),
        ({"low": -127}, r"integers -127\.\.127 with a range for each row"),
        ({"high": 63}, r"integers -128\.\.63 with"),
        ({"weight": False}, "only linear layers with quantized weights quantize their input dynamically"),
        ({"op": "MatMul"}, "only linear layers with quantized weights quantize their input dynamically"),
    ],
)
def test_data_are_rounded_each_time_as_the_kernel_does_or_not_at_all(how, words):
    with pytest.raises(UnsupportedError, match=words):
        content(*rounded(**how))


def one_operator_of(raw):
    """The only operator of a file, and the tensors that it reads."""
    (g,) = read(raw).subgraphs
    (o,) = g.operators
    return o, [g.tensors[k] for k in o.inputs if k >= 0]


@pytest.mark.parametrize("shape, slopes", [((None, 4), [4]), ((None, 4, 7), [1, 4]), ((None, 4, 5, 6), [1, 1, 4])])
def test_slopes_have_the_axes_of_a_sample(shape, slopes):
    """As TensorFlow's converter writes them: the shape of the data without the batch."""
    raw = content(graph_of("y = PRelu(x, w)", weights={"w": torch.ones(4)}, shape=shape), None)
    x, w = one_operator_of(raw)[1]
    assert w.shape.tolist() == slopes and x.shape.tolist() == [1, *shape[2:], 4]


@pytest.mark.parametrize("shape, kept", [((None, 5), False), ((5,), True), ((None, 3, 5), True), ((2, 3, 5), True)])
def test_a_linear_layer_of_rows_keeps_their_axes(shape, kept):
    shapes, weights = {"x": shape, "y": (*shape[:-1], 4)}, {"w": torch.ones(4, 5)}
    graph = graph_of("y = Linear(x, w, -)", weights=weights, shapes=shapes, data_format="channels_last")
    linear, (_, w, b) = one_operator_of(content(graph, None))
    assert linear.builtinOptions.keepNumDims is kept
    assert w.shape.tolist() == [4, 5] and b.shape.tolist() == [4] and b.type == TYPES["float32"]


@pytest.mark.parametrize("sizes, kind", [((2, 2), "SPLIT"), ((1, 3), "SPLIT_V"), ((1, 2, 1), "SPLIT_V")])
def test_equal_parts_are_a_split_of_their_own(sizes, kind):
    names = [f"y{k}" for k in range(len(sizes))]
    shapes = {n: (None, s) for n, s in zip(names, sizes, strict=True)}
    raw = content(graph_of(node(f"{', '.join(names)} = Split(x)", {"axis": -1, "sizes": sizes}), shapes=shapes), None)
    split, _ = one_operator_of(raw)
    assert written(raw) == [kind] and split.builtinOptions.numSplits == len(sizes) == len(split.outputs)


def test_what_is_picked_along_the_last_axis_needs_no_transposition():
    assert written(content(alone("gather of the last")[0], None)) == ["GATHER"]
    turned = ["TRANSPOSE", "TRANSPOSE", "GATHER", "TRANSPOSE"]
    assert written(content(alone("gather of rows")[0], None)) == turned
