"""ONNX Runtime's functions and kernels against ONNX Runtime: every bit, every code, ties, shapes that tell axes."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from chipfit.operators.table import OPS
from chipfit.plan.record import NodePlan
from chipfit.registry import lookup
from chipfit.simulate.integer import float_results
from chipfit.simulate.onnxruntime import absorbed_bounds, logistic, softmax
from tests.build import graph_of, node, plan_of, stored
from tests.onnx_models import onnx_node, onnx_of
from tests.simulate.one_operator import Codes, drawn, every, one, pairs


def _run(node, kind: int, x: torch.Tensor, constants=()) -> torch.Tensor:
    shape, held = list(x.shape), {t.name: t for t in constants}
    model = onnx_of(node, inputs={"x": shape}, outputs={"y": shape}, constants=held, types={"x": kind, "y": kind})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def test_the_logistic_function():
    x = torch.cat([torch.randn(1 << 16) * 6, torch.tensor([-200.0, -18.0, 0.0, 18.0, 200.0])])
    want = _run(onnx_node("y = Sigmoid(x)"), TensorProto.FLOAT, x)
    assert torch.equal(logistic(x), want)
    assert (torch.sigmoid(x) != want).sum() > 1000  # the last bit is the runtime's own


@pytest.mark.parametrize(
    "act, zero, absorbed",
    [
        ({"min": -1.28, "max": 1.27}, 0, True),  # what the integers represent
        ({"min": -1.3, "max": 1.5}, 0, True),
        ({"min": None, "max": 1.27}, 0, True),
        ({"min": -1.27, "max": 1.27}, 0, False),  # one step less below
        ({"min": -1.28, "max": 1.26}, 0, False),  # and above
        ({"min": -1.27, "max": None}, 0, False),
        ({"min": 0.0, "max": None}, 0, False),
        (None, -128, True),  # a ReLU whose zero is the lowest integer
        (None, -127, False),
    ],
)
def test_an_activation_is_left_out_of_the_file_where_the_integers_end_no_later(act, zero, absorbed):
    clip = node("y = Relu(x)" if act is None else "y = Clamp(x)", act)
    assert absorbed_bounds(clip, stored(0.01, zero)) == ((-128, 127) if absorbed else None)


@pytest.mark.parametrize(
    "op, data, result, fused",
    [
        ("MatMul", False, False, True),
        ("MatMul", False, True, False),  # quantizers of other tools choose a type for each tensor
        ("MatMul", True, True, False),  # on ARM only
        ("Add", True, True, True),
        ("Add", True, False, False),
    ],
)
def test_the_optimiser_gives_integer_kernels_to_operators_whose_ends_have_one_type(op, data, result, fused):
    graph, stored_ = graph_of(f"y = {op}(x, x)"), {"x": stored(signed=data), "y": stored(signed=result)}
    name = graph.nodes[0].name
    plan = replace(plan_of(**stored_), nodes={name: NodePlan(name=name, op=op, exec="float")})
    assert float_results(graph, plan, lookup("kernels", "onnxruntime")) == (set() if fused else {"y"})


def test_softmax():
    """The rows of this seed tell a logarithm taken in float32 from one in float64: six codes differ."""
    q = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (100_000, 12)).astype(np.uint8))
    numbers = {"s": (TensorProto.FLOAT, 0.005), "z": (TensorProto.UINT8, 0), "t": (TensorProto.FLOAT, 1 / 256)}
    constants = [helper.make_tensor(name, kind, [], [v]) for name, (kind, v) in numbers.items()]
    node = onnx_node("y = com.microsoft::QLinearSoftmax(x, s, z, t, z)", axis=1, opset=13)
    want = _run(node, TensorProto.UINT8, q, constants)
    got = torch.round(softmax(q.long(), torch.tensor(0.005), torch.tensor(1 / 256))).clamp(0, 255)
    assert torch.equal(got.to(torch.uint8), want)


# ---------------------------------------------------------------- one operator with numbers chosen by hand

A, B = pairs()
ONE = 0.1


def unsigned(c: Codes) -> Codes:
    """The same reals in the type that ONNX Runtime computes with on every processor."""
    return Codes(c.q + 128, c.scale, c.zero + 128, c.bits, signed=False)


def halved(seed: int, *shape: int) -> torch.Tensor:
    """Weights of which two products with unsigned codes fit 16 bits, so that no processor saturates."""
    return drawn(seed, *shape, bits=7)


def prove(tmp_path, op, operands, result, attrs=None, exec="int", in_float=False):
    """Every code is the runtime's, which computes in integers unless `in_float`: no operator reads floats."""
    numbers = [c if OPS[op].slot(k) in ("w", "b") else unsigned(c) for k, c in enumerate(operands)]
    one(op, numbers, unsigned(result), attrs, exec).prove(tmp_path, "ort_cpu", ("onnxruntime",))
    ran = lookup("runtime", "onnxruntime")(tmp_path / "m.onnx").executed()
    assert (ran.get("DequantizeLinear", 0) > 1) == in_float, ran  # one is the result's


@pytest.mark.parametrize("exec", ["int", "float"])
@pytest.mark.parametrize("scales", [(0.05, 0.07), (0.5, 0.75), (0.03, 0.31)])
@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_every_pair_of_codes(tmp_path, op, scales, exec):
    """An operator in float between integers runs in the integer kernel, too."""
    result = Codes(A, 1.0 if scales[0] > 0.4 else ONE, 5)
    prove(tmp_path, op, [Codes(A, scales[0], 3), Codes(B, scales[1], -7)], result, exec=exec)


@pytest.mark.parametrize(
    "first, second",
    [((3, 40), (3, 1)), ((3, 1), (3, 40)), ((2, 3, 40), (2, 1, 40)), ((2, 1, 40), (2, 3, 1)),
     ((4, 2, 3, 5), (1, 2, 1, 1)), ((1, 2, 1, 1), (4, 2, 3, 5)), ((1, 1), (7, 9))],
)  # fmt: skip
@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_operands_of_other_shapes(tmp_path, op, first, second):
    """Sums of these scales are often half way between two codes, where the order of operands decides."""
    numbers = [Codes(drawn(0, *first), 0.05, 3), Codes(drawn(1, *second), 0.07, -7)]
    prove(tmp_path, op, numbers, Codes(A, ONE, 5))


POOL = {"stride": (2, 1), "padding": ((0, 0), (0, 0)), "ceil_mode": False, "count_include_pad": True}


@pytest.mark.parametrize(
    "op, operands, attrs",
    [
        ("MatMul", [(2, 3, 4, 5), (2, 3, 5, 6)], {}),
        ("Conv2D", [(2, 4, 5, 6), (3, 4, 2, 3)],
         {"stride": (2, 1), "padding": ((1, 0), (0, 2)), "dilation": (1, 1), "groups": 1}),
        ("Linear", [(6, 5), (4, 5)], {}),
        ("Sigmoid", [(16, 16)], {}),
        ("LeakyRelu", [(16, 16)], {"negative_slope": 0.3}),
        ("Concat", [(2, 3, 5), (2, 4, 5)], {"axis": 1}),
        ("AvgPool", [(2, 3, 6, 5)], {**POOL, "kernel": (2, 3)}),
        ("AvgPool", [(2, 3, 6, 5)], {**POOL, "kernel": (6, 5)}),
        ("AvgPool", [(2, 3, 6, 5)], {**POOL, "kernel": (1, 1)}),
        ("AvgPool", [(2, 3, 6, 5)], {**POOL, "kernel": (6, 1)}),
        ("AvgPool", [(2, 3, 4, 5)], {**POOL, "kernel": (4, 5), "padding": ((0, 0), (0, 1))}),
        ("AvgPool", [(2, 3, 6, 5)], {**POOL, "kernel": (3, 3), "padding": ((1, 1), (1, 0))}),
        ("AvgPool", [(2, 3, 15)], {**POOL, "kernel": (3,), "stride": (2,), "padding": ((1, 0),)}),
        ("AvgPool", [(2, 3, 2, 6, 5)], {**POOL, "kernel": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3}),
        ("GlobalAvgPool", [(5, 3, 6, 5)], {}),
    ],
    ids=str,
)  # fmt: skip
def test_one_operator(tmp_path, op, operands, attrs):
    for seed, (scale, zero) in enumerate([(0.5, 0), (0.25, 9), (0.37, -30)]):
        draws = [halved if OPS[op].slot(k) == "w" else drawn for k in range(len(operands))]
        codes = [draw(seed + k, *s) for k, (draw, s) in enumerate(zip(draws, operands, strict=True))]
        numbers = [Codes(q, scale, zero if k == 0 else 0) for k, q in enumerate(codes)]
        wide = {"MatMul": 80.0, "Conv2D": 120.0, "Linear": 60.0, "Sigmoid": 1 / 256}.get(op, 0.5)
        prove(tmp_path, op, numbers, Codes(A, wide, -128 if op == "Sigmoid" else 1), attrs)


def test_weights_have_a_scale_for_each_output(tmp_path):
    w = Codes(halved(1, 3, 4, 2, 3), (0.5, 0.25, 0.3))
    attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    b = Codes(torch.tensor([900, -900, 7]), (0.25, 0.125, 0.15), 0, 32)
    prove(tmp_path, "Conv2D", [Codes(drawn(0, 2, 4, 5, 6), 0.5, 7), w, b], Codes(A, 90.0, -3), attrs)
    w = Codes(halved(1, 3, 5), (0.5, 0.25, 0.3))
    prove(tmp_path, "Linear", [Codes(drawn(0, 9, 5), 0.5, 7), w, b], Codes(A, 60.0, -3))


SOFTMAX = [((4, 5, 7), axis, scale) for axis in (1, 2, -1) for scale in (0.02, 0.3)]
SOFTMAX += [((40, count), -1, scale) for count in (1, 2, 300) for scale in (1.0, 0.05)]


@pytest.mark.parametrize("shape, axis, scale", SOFTMAX)
def test_a_softmax_of_few_or_many_numbers_along_any_axis(tmp_path, shape, axis, scale):
    """Where exponentials of the largest differences would overflow or vanish in float32, the table is shifted."""
    lone = shape[axis] == 1  # the kernel would overflow; written as an exponential of a logarithm
    numbers, result = [Codes(drawn(0, *shape), scale, 5)], Codes(A, 1 / 256, -128)
    prove(tmp_path, "Softmax", numbers, result, {"axis": axis}, in_float=lone)


def test_every_code_that_is_moved(tmp_path):
    prove(tmp_path, "Transpose", [Codes(every(), 0.5, 3)], Codes(A, 0.5, 3), {"perm": (1, 0)}, "follow")


@pytest.mark.parametrize("border", [((0, 0), (0, 0)), ((0, 1), (0, 0)), ((1, 0), (1, 1))])
def test_a_window_as_large_as_the_image_is_its_mean_unless_something_lies_around(tmp_path, border):
    attrs = {**POOL, "kernel": (4, 5), "padding": border, "count_include_pad": False, "stride": (1, 1)}
    prove(tmp_path, "AvgPool", [Codes(drawn(3, 40, 3, 4, 5), 0.37, -30)], Codes(A, 0.05, 1), attrs)


def test_parts_in_other_scales_are_requantized_before_they_are_joined(tmp_path):
    parts = [Codes(drawn(k, 2, 3, 5), scale, zero) for k, (scale, zero) in enumerate([(0.5, 0), (0.37, 9), (0.1, -30)])]
    prove(tmp_path, "Concat", parts, Codes(A, 0.25, 3), {"axis": 2})
    prove(tmp_path, "Concat", parts, Codes(A, 0.25, 3), {"axis": -3})


def test_a_table_holds_the_runtimes_own_logistic_function(tmp_path):
    """0.07175752 is 20.5 steps of this scale in the last bit that the runtime computes, and below it in torch's."""
    x = unsigned(Codes(torch.tensor([[-128]], dtype=torch.int16), 0.019999999552965164))
    scale = 0.003500367049127817
    sigmoid = one("Sigmoid", [x], Codes(x.q, scale, 128, signed=False))
    sigmoid.prove(tmp_path, "ort_cpu", ["onnxruntime"])
    nearest = torch.round(torch.sigmoid(x.reals()) / torch.tensor(scale))
    assert (sigmoid.simulated("ort_cpu") - 128 - nearest).abs().item() == 1, "torch's own function gives another code"
