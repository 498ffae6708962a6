"""The contract of the operator table: each operator is read from Keras and computed in Keras, or it is said why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.engine.run import run  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.frameworks.keras.lower import lower  # noqa: E402
from chipfit.frameworks.keras.lowerings import LOWERINGS  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402
from chipfit.graph.ops import OPS  # noqa: E402
from chipfit.plan.record import Plan  # noqa: E402
from tests.keras_zoo import on_others, randomize  # noqa: E402

#: operator -> why no Keras model is read as it
NOT_READ = {
    "InstanceNorm": "Keras has no such layer",
    "DynamicQuantize": "put in where a kernel rounds what it reads",
    "Requantize": "put in where a plan wants another grid",
    "Squeeze": "read as Reshape, whose target every shape of a Keras model tells",
    "Roll": "Keras's own stays opaque",
    "Size": "shapes are static in a Keras model, but for the batch",
    "AdaptiveAvgPool": "Keras's own stays opaque",
    "AdaptiveMaxPool": "Keras's own stays opaque",
    "GatherElements": "Keras's own stays opaque",
    "DepthToSpace": "Keras has no such layer; written as reshapes and transpositions",
    "SpaceToDepth": "as DepthToSpace",
    "ChannelShuffle": "as DepthToSpace",
}
#: operator -> why no Keras model computes it
NO_FORM = {
    "Size": NOT_READ["Size"],
    "AdaptiveAvgPool": "no graph that was read from Keras holds it",
    "AdaptiveMaxPool": "no graph that was read from Keras holds it",
    "GatherElements": "no graph that was read from Keras holds it",
    "DepthToSpace": "no graph that was read from Keras holds it",
    "SpaceToDepth": "no graph that was read from Keras holds it",
    "ChannelShuffle": "no graph that was read from Keras holds it",
}
IMAGE, SIGNAL, VOLUME, ROWS, HEADS = (6, 7, 4), (9, 4), (5, 6, 4, 3), (5, 8), (5, 2, 4)


def positive(f):
    return lambda x: f(ops.abs(x) + 0.5)


def compared(f):
    return lambda x: ops.where(f(x, ops.flip(x, 1)), x, 0.5)


def both(f):
    return lambda x: ops.where(f(x > 0, x < 1), x, 0.5)


#: operator -> a Keras expression that is read as it, and the shape of its input
WRITTEN = {
    "Conv1D": (lambda x: layers.Conv1D(3, 2)(x), SIGNAL),
    "Conv2D": (lambda x: layers.Conv2D(3, 2, padding="same")(x), IMAGE),
    "Conv3D": (lambda x: layers.Conv3D(3, 2)(x), VOLUME),
    "DepthwiseConv2D": (lambda x: layers.DepthwiseConv2D(3, padding="same", strides=2)(x), IMAGE),
    "TransposeConv1D": (lambda x: layers.Conv1DTranspose(3, 2, strides=2)(x), SIGNAL),
    "TransposeConv2D": (lambda x: layers.Conv2DTranspose(3, 3, strides=2, padding="same")(x), IMAGE),
    "TransposeConv3D": (lambda x: layers.Conv3DTranspose(3, 2)(x), VOLUME),
    "Linear": (lambda x: layers.Dense(3)(x), ROWS),
    "MatMul": (lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))), ROWS),
    "BatchNorm": (lambda x: layers.BatchNormalization()(x), IMAGE),
    "LayerNorm": (lambda x: layers.LayerNormalization()(x), IMAGE),
    "GroupNorm": (lambda x: layers.GroupNormalization(2)(x), IMAGE),
    "RMSNorm": (lambda x: layers.RMSNormalization()(x), IMAGE),
    "SDPA": (lambda x: ops.dot_product_attention(x, x, x), HEADS),
    **{
        op: (getattr(ops, f), IMAGE)
        for op, f in (
            ("Abs", "abs"),
            ("Neg", "negative"),
            ("Exp", "exp"),
            ("Sin", "sin"),
            ("Cos", "cos"),
            ("Erf", "erf"),
            ("Floor", "floor"),
            ("Ceil", "ceil"),
            ("Round", "round"),
            ("Sign", "sign"),
            ("Relu", "relu"),
            ("Relu6", "relu6"),
            ("Sigmoid", "sigmoid"),
            ("Tanh", "tanh"),
            ("HardSigmoid", "hard_sigmoid"),
            ("HardSwish", "hard_silu"),
            ("Selu", "selu"),
            ("Swish", "silu"),
            ("Identity", "stop_gradient"),
            ("LeakyRelu", "leaky_relu"),
            ("Elu", "elu"),
            ("Softplus", "softplus"),
            ("Gelu", "gelu"),
            ("Softmax", "softmax"),
            ("LogSoftmax", "log_softmax"),
        )
    },
    "Log": (positive(ops.log), IMAGE),
    "Sqrt": (positive(ops.sqrt), IMAGE),
    "Rsqrt": (positive(ops.rsqrt), IMAGE),
    "Reciprocal": (positive(ops.reciprocal), IMAGE),
    "Pow": (positive(lambda x: ops.power(x, 1.5)), IMAGE),
    "Mish": (lambda x: layers.Activation("mish")(x), IMAGE),
    "Clamp": (lambda x: ops.clip(x, -0.5, 0.5), IMAGE),
    "PRelu": (lambda x: layers.PReLU(shared_axes=[1, 2])(x), IMAGE),
    "Dropout": (lambda x: layers.Dropout(0.3)(x), IMAGE),
    "Add": (lambda x: x + x, IMAGE),
    "Sub": (lambda x: 1.0 - x, IMAGE),
    "Mul": (lambda x: x * x, IMAGE),
    "Div": (lambda x: x / 3.0, IMAGE),
    "Mod": (lambda x: ops.mod(x, 0.7), IMAGE),
    "FloorDiv": (lambda x: x // 0.7, IMAGE),
    "Max": (lambda x: ops.maximum(x, 0.1), IMAGE),
    "Min": (lambda x: ops.minimum(x, 0.1), IMAGE),
    "Equal": (compared(ops.equal), IMAGE),
    "NotEqual": (compared(ops.not_equal), IMAGE),
    "Less": (compared(ops.less), IMAGE),
    "LessEqual": (compared(ops.less_equal), IMAGE),
    "Greater": (compared(ops.greater), IMAGE),
    "GreaterEqual": (compared(ops.greater_equal), IMAGE),
    "LogicalAnd": (both(ops.logical_and), IMAGE),
    "LogicalOr": (both(ops.logical_or), IMAGE),
    "LogicalNot": (lambda x: ops.where(ops.logical_not(x > 0), x, 0.5), IMAGE),
    "Where": (lambda x: ops.where(x > 0, x, 0.5), IMAGE),
    "Concat": (lambda x: layers.Concatenate()([x, x]), IMAGE),
    "Stack": (lambda x: ops.stack([x, x], 1), IMAGE),
    "Split": (lambda x: ops.split(x, 2, -1), IMAGE),
    "Unstack": (lambda x: ops.unstack(x, axis=-1), IMAGE),
    "MaxPool": (lambda x: layers.MaxPooling2D(2)(x), IMAGE),
    "AvgPool": (lambda x: layers.AveragePooling2D(2)(x), IMAGE),
    "GlobalAvgPool": (lambda x: layers.GlobalAveragePooling2D(keepdims=True)(x), IMAGE),
    "Mean": (lambda x: ops.mean(x, axis=1), IMAGE),
    "Sum": (lambda x: ops.sum(x, axis=(1, 2), keepdims=True), IMAGE),
    "ReduceMax": (lambda x: ops.max(x, axis=-1), IMAGE),
    "ReduceMin": (lambda x: ops.min(x, axis=-1), IMAGE),
    "ReduceProd": (lambda x: ops.prod(x, axis=-1), IMAGE),
    "ReduceL2": (lambda x: ops.normalize(x), IMAGE),
    "ArgMax": (lambda x: ops.argmax(x, -1), IMAGE),
    "CumSum": (lambda x: ops.cumsum(x, 1), IMAGE),
    "Pad": (lambda x: layers.ZeroPadding2D(((1, 0), (2, 1)))(x), IMAGE),
    "Reshape": (lambda x: layers.Flatten()(x), IMAGE),
    "Transpose": (lambda x: ops.swapaxes(x, 1, 2) * 1.5, ROWS),
    "Unsqueeze": (lambda x: ops.expand_dims(x, 1), ROWS),
    "Expand": (lambda x: ops.broadcast_to(x, (2, 5, 8)), (1, 8)),
    "Slice": (lambda x: x[:, 1:4:2], ROWS),
    "Select": (lambda x: x[:, -1], ROWS),
    "Gather": (lambda x: ops.take(x, ops.argmax(x[0, 0, :5]), 1), ROWS),
    "Embedding": (lambda x: layers.Embedding(11, 4)(ops.cast(ops.abs(x), "int32")), (8,)),
    "Tile": (lambda x: ops.tile(x, (1, 2, 3)), ROWS),
    "Resize": (lambda x: layers.UpSampling2D(2)(x), IMAGE),
    "Cast": (lambda x: ops.cast(x, "int32"), IMAGE),
}


def test_every_operator_is_read_or_it_is_said_why_not():
    assert set(WRITTEN) | set(NOT_READ) == set(OPS) and not set(WRITTEN) & set(NOT_READ)


def test_every_operator_has_a_form_or_it_is_said_why_not():
    assert set(LOWERINGS) | set(NO_FORM) == set(OPS) and not set(LOWERINGS) & set(NO_FORM)
    assert [op for op, form in LOWERINGS.items() if form.kernel is None and form.layer is None] == []


@pytest.mark.parametrize("op", [pytest.param(op, marks=on_others(pytest.mark.slow)) for op in WRITTEN])
def test_an_expression_is_read_as_its_operator_and_comes_back_as_it_was(op):
    expression, shape = WRITTEN[op]
    given = keras.Input(shape)
    model = keras.Model(given, expression(given))
    randomize(model)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, *shape)).astype("float32"))
    graph = capture(model, (x,))
    assert op in {n.op for n in graph.nodes}
    if op == "Expand":
        return  # this one fixes the size of the batch, as no layer may; its form is tried in `test_kernels`
    env = run(graph, [x])
    for name, got in zip(graph.outputs, lower(graph, Plan()).run_flat([x]), strict=True):
        torch.testing.assert_close(got.to(env[name].dtype), env[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "key, op",
    [
        ((slice(0, 2), slice(None)), "Slice"),
        ((slice(1, None), ...), "Slice"),
        ((slice(0, -1), slice(None)), OPAQUE),
        ((slice(-2, None), ..., slice(1, 3)), OPAQUE),
    ],
)
def test_a_part_of_the_batch_is_read_where_it_is_counted_from_the_front(key, op, tmp_path):
    """From the end its size is only known at run time: Keras computes it, also when it was saved."""
    rows = keras.Input((5,))
    model, x = keras.Model(rows, layers.Dense(3)(rows[key] * 2.0)), torch.randn(4, 5)
    graph = capture(model, (x,))
    assert op in [n.op for n in graph.nodes]
    torch.testing.assert_close(
        run(graph, [x])[graph.outputs[0]], torch.from_numpy(keras.ops.convert_to_numpy(model(x.numpy())))
    )
    result = chipfit.quantize(model, [x], progress=False)
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert torch.equal(loaded.model.run_flat([x])[0], result.model.run_flat([x])[0])
