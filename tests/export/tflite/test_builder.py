"""What an operator is written with: tensors of codes or of floats, weights as constants of the type that holds them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from chipfit.export.tflite.builder import Refused, TfliteBuilder
from chipfit.export.tflite.file import TYPES
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


def test_a_weight_that_is_stored_in_float_or_read_before_its_codes_is_written_as_it_is():
    for w in (emitter(), emitter(weight=stored(0.7), edges=[("w", "n")], integer=True)):
        assert np.array_equal(held(w, w.weight("w")), WEIGHT.numpy()) and not w.operators


def test_a_second_form_of_a_weight_has_a_name_that_no_other_tensor_has():
    """Its codes, its floats, and its floats in another order; "w_1" is another weight."""
    w = emitter(weight=stored(0.7), edges=[("w", "n")], integer=True)
    w.graph.weights["w_1"] = WEIGHT
    floats = [w.weight("w"), w.weight("w", np.transpose)]
    w.plan = replace(w.plan, float_edges=frozenset())
    codes = [w.weight("w"), w.weight("w", np.transpose)]
    names = [w.tensors[k].name for k in (*codes, *floats, w.weight("w_1"))]
    assert names == [b"w", b"w_2", b"w/float", b"w/float_1", b"w_1"]


@pytest.mark.parametrize(
    "exec, zero, codes", [("float", 0, True), ("float", 3, False), ("int", 0, False), (None, 0, True)]
)
def test_codes_of_a_layer_in_float_stay_codes_unless_it_was_planned_in_integers_or_has_a_zero_point(exec, zero, codes):
    """Then a DEQUANTIZE lies between, one for all readers; else the numbers that they stand for are written.

    No plan (None) have the operators of a step of a recurrent layer.
    """
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
