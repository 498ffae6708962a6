"""Functions that ONNX Runtime computes its own way, against ONNX Runtime: every bit, every code."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from chipfit.graph.ir import Node
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.simulate.onnxruntime import absorbed_bounds, broadcasts_scalar, logistic, softmax


def _run(node, kind: int, x: torch.Tensor, constants=()) -> torch.Tensor:
    ends = [helper.make_tensor_value_info(name, kind, list(x.shape)) for name in "xy"]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], list(constants))
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def test_the_logistic_function():
    x = torch.cat([torch.randn(1 << 16) * 6, torch.tensor([-200.0, -18.0, 0.0, 18.0, 200.0])])
    want = _run(helper.make_node("Sigmoid", ["x"], ["y"]), TensorProto.FLOAT, x)
    assert torch.equal(logistic(x), want)
    assert (torch.sigmoid(x) != want).sum() > 1000  # the last bit is the runtime's own


@pytest.mark.parametrize(
    "low, high, absorbed",
    [
        (-1.28, 1.27, True),  # what the codes stand for
        (-1.3, 1.5, True),
        (None, 1.27, True),
        (-1.27, 1.27, False),  # one code less below
        (-1.28, 1.26, False),  # and above
        (-1.27, None, False),
        (0.0, None, False),
    ],
)
def test_a_clip_is_left_out_of_the_file_where_its_codes_end_no_later(low, high, absorbed):
    grid = Grid(bits=8, qmin=-128, qmax=127)
    stored = Stored(format="a8", grid=grid, scale=torch.tensor(0.01), zero_point=torch.tensor(0, dtype=torch.int32))
    clip = Node("clip", "Clamp", ("x",), ("y",), {"min": low, "max": high})
    assert absorbed_bounds(clip, stored) == ((-128, 127) if absorbed else None)


def test_a_relu_is_left_out_where_zero_is_the_lowest_code():
    relu = Node("relu", "Relu", ("x",), ("y",))
    for zero, absorbed in ((-128, True), (-127, False)):
        stored = Stored(
            format="a8",
            grid=Grid(bits=8, qmin=-128, qmax=127, zero="any"),
            scale=torch.tensor(0.01),
            zero_point=torch.tensor(zero, dtype=torch.int32),
        )
        assert (absorbed_bounds(relu, stored) is not None) is absorbed


def test_softmax():
    """The rows of this seed tell a logarithm taken in float32 from one in float64: six codes differ."""
    q = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (100_000, 12)).astype(np.uint8))
    numbers = {"s": (TensorProto.FLOAT, 0.005), "z": (TensorProto.UINT8, 0), "t": (TensorProto.FLOAT, 1 / 256)}
    constants = [helper.make_tensor(name, kind, [], [v]) for name, (kind, v) in numbers.items()]
    node = helper.make_node(
        "QLinearSoftmax", ["x", "s", "z", "t", "z"], ["y"], domain="com.microsoft", axis=1, opset=13
    )
    want = _run(node, TensorProto.UINT8, q, constants)
    got = torch.round(softmax(q.long(), torch.tensor(0.005), torch.tensor(1 / 256))).clamp(0, 255)
    assert torch.equal(got.to(torch.uint8), want)


@pytest.mark.parametrize(
    "a, b, still",
    [
        ((2, 1), (2, 3), True),
        ((2, 3), (2, 1), False),
        ((2, 3), (2, 3), False),
        ((2, 1, 1), (2, 4, 1), True),  # the first axis from the right where one of them is not 1
        ((1, 3, 1), (2, 3, 1), False),
        ((1,), (4, 1), True),
        ((1, 1), (1, 1), False),
        ((), (1, 1), True),
        ((4, 1), (1,), False),
        ((1,), (1, 1), True),
        ((), (3,), True),
        ((3,), (), False),
        ((3,), (1, 3), False),
        ((3, 1), (1, 3, 1), False),
    ],
)
def test_an_element_stands_still_while_the_other_operand_is_walked(a, b, still):
    assert broadcasts_scalar(torch.zeros(a), torch.zeros(b)) is still
