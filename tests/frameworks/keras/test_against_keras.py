"""The reader against Keras itself: each layer and operation that is read, with each argument, as Keras computes it.

`CASES` has an entry for each row of the reader, `REFUSED` the forms that must stay Keras's own, and the last part of
this file shows that no row and no attribute is missing from them.
"""

from __future__ import annotations

import functools
from collections import defaultdict

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip
from keras.src.ops import numpy as numpy_operations  # noqa: E402 -- classes that models of other versions hold

from chipfit.engine.run import run  # noqa: E402
from chipfit.frameworks.keras.backend import forward  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.frameworks.keras.read import ACTIVATED, READERS  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402
from tests.keras_zoo import ZOO, batch_for, make, on_others, randomize  # noqa: E402

IMAGE, SIGNAL, VOLUME, ROWS, HEADS = (6, 7, 4), (9, 4), (5, 6, 4, 3), (5, 8), (5, 2, 4)

NAMED = {"layer": layers, "operation": ops}


def made(cls, *settings, shape=IMAGE):
    """A layer with each of these settings."""
    return tuple((lambda x, kw=kw: getattr(layers, cls)(**kw)(x), shape) for kw in settings)


def of(f, *settings, shape=IMAGE, before=lambda x: x):
    """A function of keras.ops with each of these keywords."""
    return tuple((lambda x, kw=kw: f(before(x), **kw), shape) for kw in settings)


def unary(f, before=lambda x: x):
    return ((lambda x: f(before(x)), IMAGE), (lambda x: f(before(x)), ROWS))


def positive(x):
    return ops.abs(x) + 0.5


def binary(f, before=lambda x: x):
    """Two tensors, broadcast ones, numbers and constants on either side."""
    return (
        (lambda x: f(before(x), before(ops.flip(x, 1))), IMAGE),
        (lambda x: f(before(x), before(x[:, :1])), IMAGE),
        (lambda x: f(before(x), 0.7), IMAGE),
        (lambda x: f(0.7, before(x)), IMAGE),
        (lambda x: f(before(x), np.linspace(0.5, 2, 4).astype("float32")), IMAGE),
    )


def comparison(f):
    return (
        (lambda x: ops.where(f(x, ops.flip(x, 1)), x, 0.5), IMAGE),
        (lambda x: ops.where(f(x, 0.25), x, 0.5), IMAGE),
        (lambda x: ops.where(f(ops.cast(x * 3, "int32"), 1), x, 0.5), IMAGE),
    )


def logical(f):
    return ((lambda x: ops.where(f(x > 0, ops.flip(x, 1) < 0.3), x, 0.5), IMAGE),)


def reductions(f):
    return of(f, {}, {"axis": 1}, {"axis": (-1, 1), "keepdims": True}, {"axis": (2, 3)}, {"axis": -1, "keepdims": True})


def dropouts(cls, shape):
    return made(cls, {"rate": 0.3}, {"rate": 0.6}, shape=shape)


def pools(f, shape):
    """The arguments that poolings share; sizes of 3 do not divide the axes."""
    settings = (
        {"pool_size": 2},
        {"pool_size": 3, "strides": 1},
        {"pool_size": 3, "strides": 2, "padding": "same"},
        {"pool_size": 2, "strides": 3, "padding": "same"},
        {"pool_size": 2, "strides": 3},
    )
    return tuple((lambda x, kw=kw: f(x, **kw), shape) for kw in settings)


def as_layer(cls):
    return lambda x, **kw: getattr(layers, cls)(**kw)(x)


def convolutions(cls, shape, n, *more):
    each = (
        {"kernel_size": 2},
        {"kernel_size": 3, "strides": 2, "padding": "same"},
        {"kernel_size": 2, "padding": "same", "dilation_rate": 2},
        {"kernel_size": (3, 2, 1)[:n], "use_bias": False, "activation": "relu"},
        {"kernel_size": (2, 3, 2)[:n], "activation": "hard_silu"},
        {"kernel_size": (2, 1, 2)[:n], "activation": "tanh", "strides": 2},
        *more,
    )
    filters = {} if "Depthwise" in cls else {"filters": 4}
    return made(cls, *({**filters, **kw} for kw in each), shape=shape)


def transposed(cls, shape, n):
    each = (
        {"kernel_size": 2},
        {"kernel_size": 3, "strides": 2, "padding": "same"},
        {"kernel_size": 4, "strides": 2, "padding": "same", "use_bias": False},
        {"kernel_size": 2, "strides": 3, "padding": "valid"},
        {"kernel_size": 3, "dilation_rate": 2, "activation": "relu"},
        {"kernel_size": 3, "strides": 2, "padding": "valid", "output_padding": 1},
        {"kernel_size": 3, "strides": 2, "padding": "same", "output_padding": 0},
        {"kernel_size": (3, 2, 4)[:n], "padding": "same"},
    )
    return made(cls, *({"filters": 3, **kw} for kw in each), shape=shape)


def kernel(*shape):
    return np.random.default_rng(5).normal(size=shape).astype("float32")


def gammas(cls, *more):
    """Normalizations with and without what they learn."""
    return made(cls, {}, {"epsilon": 0.3}, {"scale": False}, {"center": False, "epsilon": 0.1}, *more)


def cast(x):
    return ops.cast(x * 3, "int32")


#: ("layer" or "operation", class) -> expressions of Keras that are read by its reader, with the shapes of their inputs
CASES = {
    ("layer", "BatchNormalization"): (
        *gammas("BatchNormalization"),
        *made("BatchNormalization", {"momentum": 0.5}, shape=ROWS),
    ),
    ("layer", "GroupNormalization"): made(
        "GroupNormalization",
        {"groups": 2, "epsilon": 0.2},
        {"groups": 1},
        {"groups": 4, "scale": False},
        {"groups": 2, "center": False},
    ),
    ("layer", "LayerNormalization"): gammas("LayerNormalization", {"axis": (-2, -1)}, {"axis": [1, 2, 3]}),
    ("layer", "RMSNormalization"): made("RMSNormalization", {}, {"epsilon": 0.3}, shape=IMAGE)
    + made("RMSNormalization", {}, shape=ROWS),
    **{
        ("operation", cls): unary(getattr(ops, f))
        for cls, f in (
            word.split("=")
            for word in (
                "Relu=relu Relu6=relu6 Sigmoid=sigmoid Tanh=tanh HardSigmoid=hard_sigmoid Selu=selu Silu=silu "
                "HardSilu=hard_silu Exp=exp Absolute=absolute Negative=negative Sin=sin Cos=cos Erf=erf "
                "Floor=floor Ceil=ceil Round=round Sign=sign StopGradient=stop_gradient Copy=copy Softplus=softplus "
                "HardTanh=hard_tanh Square=square"
            ).split()
        )
    },
    **{
        ("operation", cls): unary(getattr(ops, f), positive)
        for cls, f in (("Log", "log"), ("Sqrt", "sqrt"), ("Rsqrt", "rsqrt"), ("Reciprocal", "reciprocal"))
    },
    ("operation", "Abs"): unary(lambda x: numpy_operations.Abs()(x)),
    ("operation", "LogicalNot"): ((lambda x: ops.where(ops.logical_not(x > 0), x, 0.5), IMAGE),),
    **{
        ("operation", cls): binary(getattr(ops, f))
        for cls, f in (
            word.split("=")
            for word in "Add=add Subtract=subtract Multiply=multiply Maximum=maximum Minimum=minimum".split()
        )
    },
    **{
        ("operation", cls): binary(getattr(ops, f), positive)
        for cls, f in (
            word.split("=")
            for word in "Divide=divide TrueDivide=true_divide Power=power Mod=mod FloorDivide=floor_divide".split()
        )
    },
    ("operation", "LogicalAnd"): logical(ops.logical_and),
    ("operation", "LogicalOr"): logical(ops.logical_or),
    **{
        ("operation", cls): reductions(getattr(ops, cls.lower()))
        for cls in ("Mean", "Sum", "Max", "Amax", "Min", "Amin", "Prod")
    },
    ("layer", "LeakyReLU"): made("LeakyReLU", {}, {"negative_slope": 0.1}),
    ("operation", "LeakyRelu"): of(ops.leaky_relu, {}, {"negative_slope": 0.05}),
    ("layer", "ELU"): made("ELU", {}, {"alpha": 0.4}),
    ("operation", "Elu"): of(ops.elu, {}, {"alpha": 0.4}),
    ("operation", "Gelu"): of(ops.gelu, {}, {"approximate": True}, {"approximate": False}),
    ("layer", "Softmax"): made("Softmax", {}, {"axis": 1}, {"axis": [2]}),
    ("operation", "Softmax"): of(ops.softmax, {}, {"axis": 1}),
    ("operation", "LogSoftmax"): of(ops.log_softmax, {}, {"axis": 1}),
    ("operation", "Clip"): of(ops.clip, {"x_min": -0.5, "x_max": 0.5}, {"x_min": 0, "x_max": 1}),
    ("operation", "Cumsum"): of(ops.cumsum, {"axis": 1}, {"axis": -1}),
    ("layer", "Dropout"): dropouts("Dropout", IMAGE),
    ("layer", "SpatialDropout1D"): dropouts("SpatialDropout1D", SIGNAL),
    ("layer", "SpatialDropout2D"): dropouts("SpatialDropout2D", IMAGE),
    ("layer", "SpatialDropout3D"): dropouts("SpatialDropout3D", VOLUME),
    ("layer", "MaxPooling1D"): pools(as_layer("MaxPooling1D"), SIGNAL),
    ("layer", "MaxPooling2D"): (
        *pools(as_layer("MaxPooling2D"), IMAGE),
        *made("MaxPooling2D", {"pool_size": (2, 3), "strides": (1, 2)}),
    ),
    ("layer", "MaxPooling3D"): pools(as_layer("MaxPooling3D"), VOLUME),
    ("operation", "MaxPool"): pools(ops.max_pool, IMAGE),
    ("layer", "AveragePooling1D"): pools(as_layer("AveragePooling1D"), SIGNAL),
    ("layer", "AveragePooling2D"): (
        *pools(as_layer("AveragePooling2D"), IMAGE),
        *made("AveragePooling2D", {"pool_size": (2, 3), "strides": (1, 2)}),
    ),
    ("layer", "AveragePooling3D"): pools(as_layer("AveragePooling3D"), VOLUME),
    ("operation", "AveragePool"): pools(ops.average_pool, IMAGE),
    ("layer", "GlobalAveragePooling1D"): made("GlobalAveragePooling1D", {}, {"keepdims": True}, shape=SIGNAL),
    ("layer", "GlobalAveragePooling2D"): (
        *made("GlobalAveragePooling2D", {}, {"keepdims": True}),
        *made("GlobalAveragePooling2D", {}, shape=(3, 3, 2)),
    ),
    ("layer", "GlobalAveragePooling3D"): made("GlobalAveragePooling3D", {}, {"keepdims": True}, shape=VOLUME),
    ("layer", "ZeroPadding1D"): made("ZeroPadding1D", {}, {"padding": (2, 0)}, shape=SIGNAL),
    ("layer", "ZeroPadding2D"): made("ZeroPadding2D", {}, {"padding": ((1, 0), (2, 3))}),
    ("layer", "ZeroPadding3D"): made("ZeroPadding3D", {}, {"padding": ((1, 0), (2, 3), (0, 1))}, shape=VOLUME),
    ("layer", "UpSampling1D"): made("UpSampling1D", {}, {"size": 3}, shape=SIGNAL),
    ("layer", "UpSampling2D"): made("UpSampling2D", {}, {"size": (1, 3)}, {"size": 3, "interpolation": "bilinear"}),
    ("layer", "UpSampling3D"): made("UpSampling3D", {}, {"size": (1, 3, 2)}, shape=VOLUME),
    ("layer", "Resizing"): made(
        "Resizing",
        {"height": 4, "width": 9},
        {"height": 12, "width": 7, "interpolation": "nearest"},
    ),
    ("operation", "Resize"): of(ops.image.resize, {"size": (9, 5)}, {"size": (6, 14), "interpolation": "nearest"}),
    ("operation", "Pad"): of(
        ops.pad,
        {"pad_width": [(0, 0), (1, 2), (0, 3), (0, 0)]},
        {"pad_width": [(0, 0), (1, 2), (2, 1), (1, 0)], "constant_values": -0.5},
        {"pad_width": [(0, 0), (1, 2), (2, 1), (0, 0)], "mode": "reflect"},
    ),
    ("layer", "Flatten"): (*made("Flatten", {}), *made("Flatten", {}, shape=ROWS)),
    ("layer", "Reshape"): made("Reshape", {"target_shape": (2, -1)}, {"target_shape": (7, 24)}),
    ("operation", "Reshape"): of(ops.reshape, {"newshape": (-1, 24, 7)}, {"newshape": (-1, 6)}),
    ("operation", "Ravel"): ((lambda x: ops.ravel(x), IMAGE), (lambda x: ops.ravel(x), ROWS)),
    ("operation", "Squeeze"): (
        (lambda x: ops.squeeze(x[:, :1], 1), IMAGE),
        (lambda x: ops.squeeze(x[:, :1, :, :1], (1, 3)), IMAGE),
    ),
    ("layer", "Permute"): made("Permute", {"dims": (3, 1, 2)}, {"dims": (2, 1, 3)}),
    ("operation", "Transpose"): of(ops.transpose, {"axes": (0, 2, 1, 3)}, {"axes": (0, 3, -3, 2)}),
    ("operation", "Swapaxes"): of(ops.swapaxes, {"axis1": 1, "axis2": -1}, {"axis1": 2, "axis2": 3}),
    ("operation", "Moveaxis"): of(
        ops.moveaxis, {"source": 1, "destination": -1}, {"source": (1, -1), "destination": (2, 1)}
    ),
    ("operation", "ExpandDims"): of(ops.expand_dims, {"axis": 1}, {"axis": -1}, {"axis": -2}),
    ("operation", "BroadcastTo"): (
        (lambda x: ops.broadcast_to(x, (3, 5, 8)), (1, 8)),
        (lambda x: ops.broadcast_to(x, (2, 3, 5, 8)), (5, 8)),
    ),
    ("operation", "Tile"): of(ops.tile, {"repeats": (1, 2, 3, 1)}, {"repeats": (1, 1, 1, 2)}),
    ("operation", "Split"): of(
        ops.split,
        {"indices_or_sections": 2, "axis": -1},
        {"indices_or_sections": (1, 4), "axis": 1},
    ),
    ("operation", "Unstack"): of(ops.unstack, {"axis": 1}, {"axis": -1}),
    ("layer", "Conv1D"): convolutions(
        "Conv1D",
        SIGNAL,
        1,
        {"kernel_size": 3, "padding": "causal", "dilation_rate": 2},
        {"kernel_size": 2, "groups": 2},
    ),
    ("layer", "Conv2D"): convolutions(
        "Conv2D", IMAGE, 2, {"kernel_size": 2, "groups": 2}, {"kernel_size": 3, "groups": 4}
    ),
    ("layer", "Conv3D"): (
        *convolutions("Conv3D", VOLUME, 3),
        *made("Conv3D", {"filters": 4, "kernel_size": 2, "groups": 2}, shape=(5, 6, 4, 4)),
    ),
    ("layer", "DepthwiseConv1D"): convolutions("DepthwiseConv1D", SIGNAL, 1, {"kernel_size": 2, "depth_multiplier": 3}),
    ("layer", "DepthwiseConv2D"): (
        *convolutions("DepthwiseConv2D", IMAGE, 2, {"kernel_size": 2, "depth_multiplier": 3}),
        *made("DepthwiseConv2D", {"kernel_size": 2}, shape=(6, 6, 2)),
    ),
    ("layer", "SeparableConv1D"): convolutions("SeparableConv1D", SIGNAL, 1, {"kernel_size": 2, "depth_multiplier": 3}),
    ("layer", "SeparableConv2D"): convolutions("SeparableConv2D", IMAGE, 2, {"kernel_size": 2, "depth_multiplier": 3}),
    ("operation", "Conv"): (
        (lambda x: ops.conv(x, kernel(3, 2, 4, 5), 2, "same"), IMAGE),
        (lambda x: ops.conv(x, kernel(3, 2, 4, 5), (1, 2), "valid"), IMAGE),
        (lambda x: ops.conv(x, kernel(3, 2, 3, 4), dilation_rate=2), (8, 9, 3)),
        (lambda x: ops.conv(x, kernel(3, 4, 2)), SIGNAL),
    ),
    ("operation", "DepthwiseConv"): (
        (lambda x: ops.depthwise_conv(x, kernel(3, 2, 4, 1), 1, "same"), IMAGE),
        (lambda x: ops.depthwise_conv(x, kernel(3, 2, 4, 2), 2), IMAGE),
        (lambda x: ops.depthwise_conv(x, kernel(2, 2, 2, 1), dilation_rate=2), (6, 6, 2)),
    ),
    ("layer", "Conv1DTranspose"): transposed("Conv1DTranspose", SIGNAL, 1),
    ("layer", "Conv2DTranspose"): transposed("Conv2DTranspose", IMAGE, 2),
    ("layer", "Conv3DTranspose"): transposed("Conv3DTranspose", VOLUME, 3),
    ("layer", "Dense"): made(
        "Dense", {"units": 3}, {"units": 4, "use_bias": False}, {"units": 2, "activation": "gelu"}
    ),
    ("layer", "EinsumDense"): (
        *made("EinsumDense", {"equation": "abc,cd->abd", "output_shape": (None, 3), "bias_axes": "d"}, shape=ROWS),
        *made(
            "EinsumDense", {"equation": "abc,cde->abde", "output_shape": (None, 3, 2), "bias_axes": "de"}, shape=ROWS
        ),
        *made("EinsumDense", {"equation": "abcd,cde->abe", "output_shape": (None, 3), "activation": "relu"}),
        *made("EinsumDense", {"equation": "...c,cd->...d", "output_shape": (5, 3)}, shape=ROWS),
    ),
    ("operation", "Normalize"): of(ops.normalize, {}, {"axis": 1}, {"axis": (1, 2)}, {"epsilon": 3.0}),
    **{
        ("operation", cls): comparison(getattr(ops, f))
        for cls, f in (
            word.split("=")
            for word in (
                "Equal=equal NotEqual=not_equal Less=less LessEqual=less_equal Greater=greater "
                "GreaterEqual=greater_equal"
            ).split()
        )
    },
    ("operation", "ReLU"): made(
        "ReLU",
        {},
        {"max_value": 6.0},
        {"max_value": 0.7},
        {"negative_slope": 0.3},
        {"max_value": 1.5},
        {"negative_slope": 0.1},
    ),
    ("layer", "PReLU"): made("PReLU", {"shared_axes": [1, 2]}) + made("PReLU", {}, shape=(8,)),
    ("layer", "Activation"): made("Activation", {"activation": "mish"}, {"activation": "hard_silu"}),
    ("layer", "Rescaling"): made(
        "Rescaling", {"scale": 0.5}, {"scale": -2, "offset": 0.3}, {"scale": [1.0, 2.0, 3.0, 0.5]}
    ),
    ("layer", "Normalization"): made(
        "Normalization",
        {"mean": 0.3, "variance": 2.0},
        {"mean": [0.1, 0.2, 0.3, 0.4], "variance": [1.0, 2.0, 0.0, 0.5]},
    ),
    ("operation", "Cast"): of(ops.cast, {"dtype": "int32"}, {"dtype": "bool"}),
    ("operation", "Where"): (
        (lambda x: ops.where(x > 0, x, 0.5), IMAGE),
        (lambda x: ops.where(x > 0, -1.0, x), IMAGE),
        (lambda x: ops.where(cast(x), x, ops.flip(x, 1)), IMAGE),
    ),
    ("operation", "Matmul"): (
        (lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1))), ROWS),
        (lambda x: ops.matmul(x, kernel(8, 3)), ROWS),
        (lambda x: ops.matmul(kernel(2, 5), x), ROWS),
        (lambda x: ops.matmul(x, ops.transpose(x, (0, 1, 3, 2))), IMAGE),
    ),
    ("operation", "Einsum"): (
        (lambda x: ops.einsum("bqd,bkd->bqk", x, ops.flip(x, 1)), ROWS),
        (lambda x: ops.einsum("bqd,bkd->bkq", x, ops.flip(x, 1)), ROWS),
        (lambda x: ops.einsum("bdq,bdk->bqk", x, ops.flip(x, 1)), ROWS),
        (lambda x: ops.einsum("bqhd,bkhd->bhqk", x, ops.flip(x, 1)), HEADS),
    ),
    ("operation", "DotProductAttention"): (
        (lambda x: ops.dot_product_attention(x, ops.flip(x, 1), x), HEADS),
        (lambda x: ops.dot_product_attention(x, x, x, is_causal=True), HEADS),
        (lambda x: ops.dot_product_attention(x, x, x, scale=0.7), HEADS),
    ),
    ("operation", "Argmax"): of(ops.argmax, {}, {"axis": 1}, {"axis": -1, "keepdims": True}),
    ("layer", "Concatenate"): (
        (lambda x: layers.Concatenate()([x, -x]), IMAGE),
        (lambda x: layers.Concatenate(axis=1)([x, x[:, :2]]), IMAGE),
    ),
    ("operation", "Concatenate"): (
        (lambda x: ops.concatenate([x, -x], -1), IMAGE),
        (lambda x: ops.concatenate([x, x[:, :2]], 1), IMAGE),
    ),
    ("operation", "Stack"): ((lambda x: ops.stack([x, -x], 1), IMAGE), (lambda x: ops.stack([x, -x, x], -1), IMAGE)),
    ("operation", "GetItem"): tuple(
        (lambda x, key=key: x[key] * 1.5, IMAGE)
        for key in (
            (slice(None), slice(1, 5, 2)),
            (slice(None), -1),
            (Ellipsis, 2),
            (Ellipsis, slice(-3, -1)),
            (slice(None), 2, None, slice(None), 1),
            (slice(1, None),),
            (slice(None), slice(None, 100), slice(-100, 3)),
            (slice(None), None, Ellipsis, 0),
        )
    ),
    ("operation", "Take"): (
        (lambda x: ops.take(x, ops.argmax(x[0, 0, :5]), 1), ROWS),
        (lambda x: ops.take(x, ops.cast(ops.abs(x[0, :, :2]), "int32") % 3, -1), ROWS),
    ),
    ("layer", "Embedding"): (
        (lambda x: layers.Embedding(11, 4)(ops.cast(ops.abs(x), "int32")), (8,)),
        (lambda x: layers.Embedding(11, 4)(ops.abs(x)), (8,)),
    ),
}

#: (group, class) -> forms that no canonical operator has
REFUSED = {
    ("layer", "EinsumDense"): made(
        "EinsumDense", {"equation": "abc,cde->abde", "output_shape": (None, 2, 5), "bias_axes": "e"}, shape=ROWS
    ),
    ("operation", "Round"): of(ops.round, {"decimals": 1}),
    ("operation", "Prod"): of(ops.prod, {"axis": -1, "dtype": "float64"}),
    ("operation", "Cumsum"): of(ops.cumsum, {}, {"axis": 1, "dtype": "int32"}),
    ("operation", "Max"): of(ops.max, {"axis": -1, "initial": 0.5}),
    ("operation", "Min"): of(ops.min, {"axis": -1, "initial": 0.5}),
    ("operation", "Normalize"): of(ops.normalize, {"order": 1}),
    ("operation", "Resize"): of(
        ops.image.resize, {"size": (9, 5), "antialias": True}, {"size": (9, 5), "interpolation": "nearest"}
    ),
    ("operation", "Matmul"): ((lambda x: ops.matmul(x, kernel(8)), ROWS),),
}


class Reading:
    """One expression as a model, what was read of it, and what Keras and the Graph make of fresh data."""

    def __init__(self, case):
        expression, shape = case
        given = keras.Input(shape)
        self.model = keras.Model(given, expression(given))
        randomize(self.model)
        self.read = []  #: (group, class, nodes made)
        originals = dict(READERS)
        READERS.update({key: self._watched(key, f) for key, f in originals.items()})
        try:
            self.graph = capture(self.model)
        finally:
            READERS.update(originals)
            ACTIVATED.intersection_update(originals.values())
        x = np.random.default_rng(11).normal(size=(3, *shape)).astype("float32")
        self.want = keras.tree.flatten(forward(self.model, torch.from_numpy(x)))
        values = run(self.graph, [torch.from_numpy(x)])
        self.got = [values[o] for o in self.graph.outputs]

    def _watched(self, key, f):
        @functools.wraps(f)
        def read(call, *args, **kwargs):
            first = len(call.builder.graph.nodes)
            out = f(call, *args, **kwargs)
            self.read.append((*key, call.builder.graph.nodes[first:]))
            return out

        if f in ACTIVATED:
            ACTIVATED.add(read)
        return read

    def same(self):
        assert len(self.want) == len(self.got)
        for a, b in zip(self.want, self.got, strict=True):
            assert str(a.dtype).rpartition(".")[2] == str(b.dtype).rpartition(".")[2]
            torch.testing.assert_close(b, torch.as_tensor(a), rtol=2e-5, atol=2e-6, equal_nan=True)


TRIED = defaultdict(set)  #: (operator, attribute) -> values, of all cases
DONE = set()  #: keys of the cases that this process has run


def note(reading):
    for *_, nodes in reading.read:
        for n in nodes:
            for attr, v in n.attrs.items():
                TRIED[n.op, attr].add(repr(v))


#: what Keras itself cannot compute on JAX: windows without a batch axis, products in float64
NOT_ON_JAX = {("operation", "MaxPool"), ("operation", "AveragePool"), ("operation", "Prod")}


def _skip_what_keras_cannot(key):
    if keras.backend.backend() == "jax" and key in NOT_ON_JAX:
        pytest.skip("Keras fails on it with JAX")


@pytest.mark.parametrize("key", [pytest.param(k, marks=on_others(pytest.mark.slow)) for k in CASES], ids=" ".join)
def test_the_graph_computes_what_keras_does(key):
    _skip_what_keras_cannot(key)
    for k, case in enumerate(CASES[key]):
        reading = Reading(case)
        assert [n.attrs["target"] for n in reading.graph.nodes if n.op == OPAQUE and "Flip" not in str(n)] == [], k
        assert key in {r[:2] for r in reading.read}, k
        reading.same()
        note(reading)
    DONE.add(key)


@pytest.mark.parametrize("key", [pytest.param(k, marks=on_others(pytest.mark.slow)) for k in REFUSED], ids=" ".join)
def test_a_form_without_canonical_operator_is_not_read_as_one(key):
    _skip_what_keras_cannot(key)
    for case in REFUSED[key]:
        reading = Reading(case)
        assert key not in {r[:2] for r in reading.read}
        reading.same()


@pytest.mark.parametrize("name", [pytest.param(n, marks=on_others(pytest.mark.slow)) for n in ZOO])
def test_a_network_computes_what_keras_does_on_data_that_the_reader_has_not_seen(name):
    model, batch = make(name)
    example = keras.tree.map_structure(torch.from_numpy, batch)
    graph = capture(model, tuple(example) if isinstance(example, (list, tuple)) else (example,))
    fresh = keras.tree.map_structure(torch.from_numpy, batch_for(model, seed=9, rows=3))
    want = keras.tree.flatten(forward(model, fresh))
    values = run(graph, keras.tree.flatten(fresh))
    assert len(want) == len(graph.outputs) > 0
    for a, o in zip(want, graph.outputs, strict=True):
        torch.testing.assert_close(values[o], torch.as_tensor(a), rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------- nothing is missing


def test_every_row_of_the_reader_has_cases():
    assert set(CASES) == set(READERS)


#: attributes that have one value in Keras
ONE_VALUE = {
    "Softplus": "beta threshold",
    "MaxPool": "ceil_mode",
    "AvgPool": "ceil_mode count_include_pad",
    "Resize": "align_corners",
    "ReduceL2": "keepdims",
    "SDPA": "enable_gqa",
    **dict.fromkeys(("TransposeConv1D", "TransposeConv2D", "TransposeConv3D"), "groups"),
}


@pytest.mark.skipif(bool(on_others(1)), reason="the cases run on torch")
def test_every_attribute_of_every_operator_was_tried_with_two_values():
    for key in set(CASES) - DONE:  # other processes run these
        for case in CASES[key]:
            note(Reading(case))
    once = defaultdict(set)
    for (op, attr), values in TRIED.items():
        if len(values) < 2:
            once[op].add(attr)
    assert {op: " ".join(sorted(attrs)) for op, attrs in once.items()} == ONE_VALUE
