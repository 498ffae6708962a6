"""What an operator is written with: tensors of codes or of floats, weights as constants of the type that holds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from chipfit.export.tflite.builder import Refused, TfliteBuilder
from chipfit.export.tflite.file import INT4, TYPES
from chipfit.graph.ir import OPAQUE, Node
from chipfit.plan.record import NodePlan, TensorPlan
from chipfit.quantizers.stored import Stored
from tests.build import graph_of, plan_of, stored

FLOAT, INT8, INT32, INT64 = (TYPES[k] for k in ("float32", "int8", "int32", "int64"))
WEIGHT = torch.tensor([[1.0, -2.0, 0.5, 3.0], [4.0, 5.0, -6.0, 7.0]])
LINEAR = Node("n", "Linear", ("x", "w", None), ("y",), layer="head")


def emitter(exec="int", weight=None, edges=(), integer=False, batch=None, **values) -> TfliteBuilder:
    """A linear layer at hand, with the inputs open along the batch, and what is stored of them."""
    graph = graph_of(LINEAR, weights={"w": WEIGHT}, shapes={"y": (None, 2)})
    nodes = {"n": NodePlan(name="n", op="Linear", exec=exec)} if exec else {}
    plan = plan_of(**values, **({} if weight is None else {"w": weight}), float_edges=edges)
    w = TfliteBuilder(graph, replace(plan, nodes=nodes), {"x": (3, 4), "y": (3, 2)}, batch)
    w.begin(LINEAR, "FULLY_CONNECTED", integer)
    return w


def held(w: TfliteBuilder, index: int) -> np.ndarray:
    """What a constant holds."""
    t, names = w.tensors[index], {code: name for name, code in TYPES.items()}
    return np.frombuffer(w._buffers[t.buffer].data, names[t.type]).reshape(t.shape)


def kinds(w: TfliteBuilder) -> int:
    """How many operators there are so far."""
    return len(w.operators)


def test_a_refusal_names_the_operator_as_the_user_knows_it():
    opaque = Node("o", OPAQUE, (), (), {"target": "aten.foo"})
    for refused, name in ((LINEAR, "Linear 'head'"), (opaque, "aten.foo 'o'")):
        with pytest.raises(Refused) as e:
            emitter().refuse(refused, "it is odd")
        assert e.value.args == (name, "it is odd")


def test_sizes_are_open_where_nobody_fixes_the_batch():
    assert emitter().open_shape("x") == [-1, 4] and emitter(batch=3).open_shape("x") == [3, 4]
    assert emitter().shape("x") == (3, 4) and emitter().shape("w") == (2, 4)


def test_an_operand_is_read_in_codes_or_floats_and_made_float_once():
    codes = stored(0.25, 3)
    w = emitter()
    plain = w.tensor("x", (3, 4), FLOAT)
    assert w.read("x") == plain and w.float_name("x") == "x" and w.reads(LINEAR.with_(inputs=("x", None))) == [plain]
    w = emitter(x=codes, integer=True)
    x = w.tensor("x", (3, 4), INT8)
    assert w.read("x") == x and not w.operators and w.float_name("x") == "x/float"
    w = emitter(x=codes)
    x, raw = w.tensor("x", (3, 4), INT8), w.tensor("x/float", (3, 4), FLOAT)
    real = w.read("x")
    assert real not in (x, raw) and w.read("x") == real and kinds(w) == 1
    t = w.tensors[real]
    assert t.type == FLOAT and t.shapeSignature.tolist() == [-1, 4] and t.name == b"x/dequantized"
    assert (w.operators[0].inputs.tolist(), w.operators[0].outputs.tolist()) == ([x], [real])
    w = emitter(x=codes, edges=[("x", "n")])
    w.tensor("x", (3, 4), INT8)
    raw = w.tensor("x/float", (3, 4), FLOAT)
    assert w.read("x") == raw and not w.operators


TURNED = {"change": np.transpose, "axis": 1}


@pytest.mark.parametrize(
    "grid, how, axis, scale, zero, codes",
    [
        (stored([0.5, 0.25], axis=0), {}, 0, [0.5, 0.25], [0, 0], [[2, -4, 1, 6], [16, 20, -24, 28]]),
        (stored([0.5, 0.25], [1, -2], axis=0), {}, 0, [0.5, 0.25], [1, -2], [[3, -3, 2, 7], [14, 18, -26, 26]]),
        (
            stored([0.5, 0.25], axis=0),
            TURNED,
            1,
            [0.5, 0.25],
            [0, 0],
            [[2, 16], [-4, 20], [1, -24], [6, 28]],
        ),
        (stored(0.5, 3), TURNED, 0, [0.5], [3], [[5, 11], [-1, 13], [4, -9], [9, 17]]),
        (stored(0.5, 3), {"scale": np.float32([0.125])}, 0, [0.125], [3], [[5, -1, 4, 9], [11, 13, -9, 17]]),
    ],
)
def test_a_quantized_weight_has_scales_along_the_first_axis_unless_told(grid, how, axis, scale, zero, codes):
    w = emitter(weight=grid, integer=True)
    t = w.tensors[k := w.weight("w", **how)]
    assert t.type == INT8 and t.name == b"w" and held(w, k).tolist() == codes
    assert t.quantization.scale.tolist() == scale and t.quantization.zeroPoint.tolist() == zero
    assert t.quantization.quantizedDimension == axis


def test_a_weight_that_is_stored_in_float_or_read_before_its_codes_is_written_as_it_is():
    for w in (emitter(), emitter(weight=stored(0.7), edges=[("w", "n")], integer=True)):
        assert np.array_equal(held(w, w.weight("w")), WEIGHT.numpy()) and not w.operators


@pytest.mark.parametrize(
    "exec, zero, codes", [("float", 0, True), ("float", 3, False), ("int", 0, False), (None, 0, False)]
)
def test_codes_of_a_layer_in_float_stay_codes_where_it_was_planned_so_and_zero_is_their_zero(exec, zero, codes):
    """Then a DEQUANTIZE lies between, one for all readers; else the numbers that they stand for are written."""
    w = emitter(exec, stored(0.7, zero))
    k, again = w.weight("w"), w.weight("w")
    assert k == again and kinds(w) == int(codes) and w.tensors[k].type == FLOAT
    if codes:
        (op,) = w.operators
        assert op.outputs.tolist() == [k] and w.tensors[op.inputs[0]].type == INT8
        assert w.tensors[k].shape.tolist() == [2, 4] and w.tensors[k].name == b"w/dequantized"
        assert held(w, op.inputs[0])[0].tolist() == [1, -3, 1, 4]
    else:
        want = (np.rint(WEIGHT.numpy() / np.float32(0.7)) * np.float32(0.7)).astype(np.float32)
        assert np.array_equal(held(w, k), want)


def test_codes_meet_data_that_the_kernel_rounds_itself():
    w = emitter("float", stored(0.5, 0))
    w.dynamic.add("x")
    assert w.tensors[w.weight("w")].type == INT8 and not w.operators
    w = emitter("int", stored(0.5, 3))
    w.dynamic.add("x")
    assert w.tensors[w.weight("w")].type == INT8


@pytest.mark.parametrize(
    "most, wide, kind",
    [(2**31 - 1, False, INT32), (2**31, False, INT64), (2**31 + 5, False, INT64), (7, False, INT32), (7, True, INT64)],
)
def test_a_wide_bias_lies_in_32_bits_where_its_codes_fit_and_the_kernel_wants_that(most, wide, kind):
    bias = torch.tensor([most, -3.0], dtype=torch.float64)
    w = emitter(integer=True)
    w.graph.weights["b"] = bias
    w.plan.tensors["b"] = TensorPlan(name="b", role="bias", stored=stored(1.0, bits=40))
    k = w.weight("b", wide=wide)
    assert w.tensors[k].type == kind and held(w, k).tolist() == [most, -3]
    if wide:
        assert w.tensors[w.weight("b")].type == INT64  # unless told


def blocks(scale=((0.5, 0.25), (1.0, 0.125)), zero=0, bits=4, axis=1) -> Stored:
    return stored([list(row) for row in scale], zero, bits, axis=axis)


def test_a_matrix_in_blocks_has_their_scales_beside_it():
    w = emitter(weight=blocks())
    w.dynamic.add("x")
    k = w.weight("w")
    t = w.tensors[k]
    assert t.type == INT4 and t.name == b"w" and t.quantization.details.blockSize == 2
    assert t.quantization.details.zeroPoints == -1
    scales = w.tensors[t.quantization.details.scales]
    assert scales.type == TYPES["float16"] and scales.name == b"w/scales"
    assert held(w, t.quantization.details.scales).tolist() == [[0.5, 0.25], [1.0, 0.125]]
    packed = w._buffers[t.buffer].data  # 2 -4 2 7 | 4 5 -8 7, the first of two in the low half
    assert list(packed) == [0xC2, 0x72, 0x54, 0x78]


@pytest.mark.parametrize(
    "weight, words",
    [
        (blocks(((0.5,) * 4,), axis=0), "blocks of 4 bits along axis 0; kernels have"),
        (blocks(bits=3), "blocks of 3 bits along axis 1; kernels have"),
        (blocks(bits=5), "blocks of 5 bits along axis 1; kernels have"),
        (blocks(zero=1), "without zero points"),
        (blocks(((0.5, 0.25), (1.0, 0.3))), "scales of blocks up to 1 that do not fit 16 bits"),
        (blocks(((0.5, 0.25), (1.0, 2.0**17))), "blocks up to 131072 that do not fit"),  # float16 ends at 65504
        (blocks(((0.5, 0.25), (1.0, 1 + 2.0**-9))), "do not fit 16 bits"),  # a bfloat16 has 8 bits
    ],
)
def test_other_blocks_are_refused(weight, words):
    w = emitter(weight=weight)
    w.dynamic.add("x")
    with pytest.raises(Refused) as e:
        w.weight("w")
    assert words in e.value.args[1]


def test_blocks_are_taken_only_where_data_are_rounded_each_time():
    with pytest.raises(Refused, match="only linear layers that quantize their data dynamically"):
        emitter(weight=blocks(), integer=True).weight("w")
