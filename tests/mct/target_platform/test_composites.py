"""A fixed scale belongs to the result of a function that is several operators, not to the steps inside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit import target_platform as tp
from tests.build import model_of, quantized
from tests.mct.target_platform.chips import FLOAT, config, options

AFFINE = {"activation_quantization_method": tp.QuantizationMethod.UNIFORM, "signedness": tp.Signedness.SIGNED}


def chip(entry):
    """Return a chip with a fixed scale of 1 / 128 for the results of one function."""
    with tp.TargetPlatformModel(options(config(FLOAT, **AFFINE)), name="composite") as model:
        tp.OperatorsSet("Composite", options(config(FLOAT, fixed_scale=1 / 128, fixed_zero_point=0, **AFFINE)))
    with tp.TargetPlatformCapabilities(model) as tpc:
        tp.OperationsSetToLayers("Composite", [entry])
    return tpc


def fixed(result):
    """Return the operators whose results have the fixed scale, in execution order."""
    plan = result.plan
    made = [(n.op, n.output) for n in result.graph.nodes]
    return [op for op, o in made if plan.quantized(o) and plan.tensors[o].origin.startswith("fixed")]


def twice(m, x):
    return F.normalize(F.normalize(m.fc(x), dim=-1) + x, dim=-1)


def test_a_fixed_scale_of_a_function_of_pytorch():
    net = model_of(twice, fc=nn.Linear(8, 8))
    assert fixed(quantized(net, torch.randn(8, 8) * 9, chip(F.normalize))) == ["Div", "Div"]


def test_a_fixed_scale_of_a_layer_of_keras():
    keras = pytest.importorskip("keras")

    @keras.saving.register_keras_serializable("composites")
    class Gate(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sigmoid(x * 3.0 + 1.0) * 0.5

    given = keras.Input((8,))
    model = keras.Model(given, keras.layers.Dense(4)(Gate()(Gate()(keras.layers.Dense(8)(given)))))
    result = quantized(model, torch.randn(8, 8) * 9, chip(Gate))
    assert fixed(result) == ["Mul", "Mul"]
    gates = [n.output for n in result.graph.nodes if n.layer_type == "Gate"]
    assert [o for o in gates if result.plan.tensors[o].origin.startswith("fixed")] == gates[3::4]
