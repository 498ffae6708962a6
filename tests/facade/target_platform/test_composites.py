"""A fixed scale belongs to the result of a function that is several operators, not to the steps inside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.target_platform import (
    OperationsSetToLayers,
    OperatorsSet,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
    TargetPlatformCapabilities,
    TargetPlatformModel,
)
from tests.facade.target_platform.test_fields import FLOAT, config

AFFINE = {"activation_quantization_method": QuantizationMethod.UNIFORM, "signedness": Signedness.SIGNED}


def chip(entry):
    """A chip on which one function's results have the step 1 / 128."""
    options = lambda c: QuantizationConfigOptions([c])
    tpm = TargetPlatformModel(options(config(FLOAT, **AFFINE)), name="composite")
    with tpm:
        OperatorsSet("Composite", options(config(FLOAT, fixed_scale=1 / 128, fixed_zero_point=0, **AFFINE)))
    tpc = TargetPlatformCapabilities(tpm)
    with tpc:
        OperationsSetToLayers("Composite", [entry])
    return tpc


def fixed(result):
    """The stored results with the dictated step, by operator, in execution order."""
    plan = result.plan
    made = [(n.op, n.output) for n in result.graph.nodes]
    return [op for op, o in made if plan.quantized(o) and plan.tensors[o].origin.startswith("fixed")]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = F.normalize(self.fc(x), dim=-1)
        return F.normalize(y + x, dim=-1)


def test_of_a_function_of_pytorch():
    result = chipfit.quantize(Twice().eval(), [torch.randn(8, 8) * 9], platform=chip(F.normalize), progress=False)
    assert fixed(result) == ["Div", "Div"]


def test_of_a_layer_of_keras():
    keras = pytest.importorskip("keras")

    @keras.saving.register_keras_serializable("composites")
    class Gate(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sigmoid(x * 3.0 + 1.0) * 0.5

    given = keras.Input((8,))
    model = keras.Model(given, keras.layers.Dense(4)(Gate()(Gate()(keras.layers.Dense(8)(given)))))
    result = chipfit.quantize(model, [torch.randn(8, 8) * 9], platform=chip(Gate), progress=False)
    assert fixed(result) == ["Mul", "Mul"]
    last = [
        n.output
        for n in result.graph.nodes
        if n.layer_type == "Gate" and result.plan.tensors[n.output].origin.startswith("fixed")
    ]
    assert last == [n.output for n in result.graph.nodes if n.layer_type == "Gate"][3::4]
