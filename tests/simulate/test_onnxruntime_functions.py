"""Functions that ONNX Runtime computes its own way, against ONNX Runtime: every bit, every code."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from chipfit.simulate.onnxruntime import absorbed_bounds, broadcasts_scalar, logistic, softmax
from tests.build import node, stored


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
