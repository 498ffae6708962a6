"""Operators and attributes that the reader makes of borderline settings."""

from functools import partial

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.engine.run import run  # noqa: E402
from chipfit.frameworks.keras.backend import forward  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402


def read(f, *shape, dtype="float32"):
    """The graph of a function of one input, which computes what Keras does."""
    x = keras.Input(shape, dtype=dtype)
    model = keras.Model(x, f(x))
    rng = np.random.default_rng(0)
    for v in model.variables:
        if "seed" not in v.path:
            v.assign(rng.uniform(0.2, 1, v.shape))
    graph = capture(model)
    given = rng.normal(size=(3, *shape)) * 4
    data = torch.from_numpy(given.astype(dtype))
    want = keras.tree.flatten(forward(model, data))
    values = run(graph, [data], keep=list(graph.values))
    for o, y in zip(graph.outputs, want, strict=True):
        torch.testing.assert_close(values[o], torch.as_tensor(y), rtol=1e-4, atol=1e-5)
    for name, said in graph.values.items():  # each is as long and of the type that the graph says
        y = values[name]
        assert tuple(y.shape) == tuple(3 if s is None else s for s in said.shape), name
        assert str(y.dtype) == f"torch.{said.dtype}", name
    return graph


def ops_of(f, *shape, **how):
    return [n.op for n in read(f, *shape, **how).nodes]


@pytest.mark.parametrize(
    ("channels", "multiplier", "op", "groups"),
    [(1, 1, "Conv2D", 1), (1, 3, "Conv2D", 1), (2, 1, "DepthwiseConv2D", 2), (2, 3, "DepthwiseConv2D", 2)],
)
def test_a_depthwise_convolution_of_one_channel_is_a_plain_one(channels, multiplier, op, groups):
    graph = read(layers.DepthwiseConv2D((2, 3), depth_multiplier=multiplier), 5, 6, channels)
    assert [(n.op, n.attrs["groups"]) for n in graph.nodes if "Conv" in n.op] == [(op, groups)]


@pytest.mark.parametrize("groups, op", [(1, "Conv2D"), (2, "Conv2D"), (4, "DepthwiseConv2D")])
def test_groups_of_one_channel_each_are_depthwise(groups, op):
    graph = read(layers.Conv2D(8, (3, 2), groups=groups, strides=(2, 1), padding="same"), 7, 5, 4)
    (n,) = (n for n in graph.nodes if "Conv" in n.op)
    assert (n.op, n.attrs["groups"], n.attrs["stride"]) == (op, groups, (2, 1))
    assert n.attrs["padding"] == ((1, 1), (0, 1)) and graph.shape(n.output) == (None, 8, 4, 5)
    graph = read(layers.Conv1D(8, 3, groups=groups, dilation_rate=2, padding="causal"), 9, 4)
    (n,) = (n for n in graph.nodes if "Conv" in n.op)
    assert (n.op, n.attrs["groups"], n.attrs["padding"], n.attrs["dilation"]) == ("Conv1D", groups, ((4, 0),), (2,))


@pytest.mark.parametrize("stride, read", [(1, True), (2, False)])
@pytest.mark.parametrize("layer", [layers.MaxPooling2D, layers.AveragePooling2D, partial(layers.Conv2D, 4)])
def test_a_window_whose_padding_follows_an_open_size_is_left_to_keras(layer, stride, read):
    x = keras.Input((None, None, 4))
    model = keras.Model(x, layer(3, strides=stride, padding="same")(x))
    examples = [((torch.randn(2, *sizes, 4),), {}) for sizes in ((8, 8), (9, 10))]
    ops = [n.op for n in capture(model, *examples[0], examples[1:]).nodes]
    assert (OPAQUE not in ops) == read


def test_a_convolution_is_read_only_where_kernel_and_groups_are_known():
    x, kernel = keras.Input((8, 8, 4)), keras.Input((3, 3, 4, 4), batch_size=1)
    assert [n.op for n in capture(keras.Model([x, kernel], ops.conv(x, kernel[0]))).nodes] == ["Select", OPAQUE]
    several, fixed = keras.Input((8, 8, None)), np.ones((3, 3, 4, 8), "float32")
    examples = [((torch.randn(2, 8, 8, n),), {}) for n in (4, 8)]  # in one group, and in two
    (conv,) = capture(keras.Model(several, ops.conv(several, fixed)), *examples[0], examples[1:]).nodes
    assert conv.op == OPAQUE


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, ["Relu"]),
        ({"max_value": 6}, ["Relu6"]),
        ({"max_value": 5}, ["Clamp"]),
        ({"max_value": 7}, ["Clamp"]),
        ({"negative_slope": 0.3}, ["LeakyRelu"]),
        ({"negative_slope": 0.3, "max_value": 6}, ["LeakyRelu", "Min"]),
        ({"threshold": 0.5}, ["Greater", "Where"]),
        ({"threshold": 0.5, "max_value": 6}, ["Greater", "Where", "Clamp"]),
        ({"threshold": 0.5, "negative_slope": 0.3}, ["Greater", "Where", "Sub", "Relu", "Mul", "Sub"]),
    ],
)
def test_a_relu_with_other_ends_is_another_operator(settings, want):
    assert ops_of(layers.ReLU(**settings), 7) == want


def test_the_ends_of_a_relu_are_those_of_its_clamp():
    (n,) = read(layers.ReLU(max_value=5), 7).nodes
    assert n.attrs == {"min": 0.0, "max": 5.0}


@pytest.mark.parametrize(
    ("key", "want"),
    [
        (np.s_[:, 1:], ["Slice"]),
        (np.s_[:, -1], ["Select"]),
        (np.s_[..., 0], ["Select"]),
        (np.s_[:, 1, ..., 2], ["Select", "Select"]),
        (np.s_[:, None, 1:3, ::2], ["Slice", "Slice", "Unsqueeze"]),
        (np.s_[:, 0, None, :, None], ["Select", "Unsqueeze"]),
        (np.s_[:, 4:1], ["Slice"]),
        (np.s_[0:, :, -2:], ["Slice", "Slice"]),
    ],
)
def test_parts_are_slices_selections_and_new_axes(key, want):
    assert ops_of(lambda x: x[key], 4, 5) == want


@pytest.mark.parametrize(
    ("equation", "bias", "want"),
    [
        ("abc,cd->abd", "d", ["Linear"]),
        ("abc,cde->abde", "de", ["Linear", "Reshape"]),
        ("abc,bcd->ad", None, ["Reshape", "Linear"]),
        ("abc,bcde->ade", "de", ["Reshape", "Linear", "Reshape"]),
        ("...c,cd->...d", "d", ["Linear"]),
    ],
)
def test_an_einsum_with_a_kernel_is_a_linear_layer_between_reshapes(equation, bias, want):
    result = equation.split("->")[1]
    sizes = {"a": None, "b": 4, "c": 5, "d": 2 if "de" in equation else 6, "e": 3}
    output = tuple(sizes[c] for c in result.replace("...", "b") if c != "a")
    assert ops_of(layers.EinsumDense(equation, output_shape=output, bias_axes=bias), 4, 5) == want


@pytest.mark.parametrize("equation", ["abc,bd->acd", "abc,dc->abd", "abc,cde->abed", "abc,cd->adb"])
def test_an_einsum_whose_axes_change_places_is_no_linear_layer(equation):
    layer = layers.EinsumDense(equation, [{"b": 4, "c": 5}.get(c, 3) for c in equation.split("->a")[1]])
    assert "Linear" not in ops_of(layer, 4, 5)


def constant(*shape):
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype("float32")


FORMULAS = {
    "softsign": ops.softsign,
    "tanh_shrink": ops.tanh_shrink,
    "soft_shrink": lambda x: ops.soft_shrink(x, 0.7),
    "hard_shrink": lambda x: ops.hard_shrink(x, 0.7),
    "log_sigmoid": ops.log_sigmoid,
    "celu": lambda x: ops.celu(x, 0.7),
    "sparse_plus": ops.sparse_plus,
    "squareplus": ops.squareplus,
    "sparse_sigmoid": ops.sparse_sigmoid,
    "threshold": lambda x: ops.threshold(x, 0.5, -2.0),
    "glu": ops.glu,
    "std": lambda x: ops.std(x, axis=1),
    "var": lambda x: ops.var(x, axis=(1, 2), keepdims=True),
    "logsumexp": lambda x: ops.logsumexp(x, axis=-1),
    "logaddexp": lambda x: ops.logaddexp(x, 2 * x + 1),
    "tril": lambda x: ops.tril(x, -1),
    "triu": ops.triu,
    "take": lambda x: ops.take(x, np.array([3, -1, 0]), axis=2),
    "log1p": lambda x: ops.log1p(ops.abs(x)),
    "expm1": ops.expm1,
    "log2": lambda x: ops.log2(ops.abs(x) + 1),
    "exp2": ops.exp2,
    "hypot": lambda x: ops.hypot(x, x + 1),
    "ptp": lambda x: ops.ptp(x, axis=1),
    "roll": lambda x: ops.roll(x, 2, axis=1) + ops.roll(x, -1, axis=2) + ops.roll(x, 4, axis=1),
    "median of an odd number": lambda x: ops.median(x[:, :3], axis=1),
    "median of an even number": lambda x: ops.median(x, axis=2, keepdims=True),
    "median of two": lambda x: ops.median(x[:, :2], axis=1),
    "patches": lambda x: ops.image.extract_patches(x[..., None], (2, 3)),
    "patches that overlap": lambda x: ops.image.extract_patches(x[..., None], 3, strides=1, padding="same"),
    "patches with gaps": lambda x: ops.image.extract_patches(x[..., None], 2, strides=(1, 2), dilation_rate=2),
    "means of windows": layers.AdaptiveAveragePooling1D(2),
    "largest in windows that overlap": lambda x: layers.AdaptiveMaxPooling2D((3, 4))(x[..., None]),
    "spectrum": lambda x: ops.concatenate(ops.stft(x, 3, 1, 4, window="hamming"), -1),
    "spectrum of even windows": lambda x: ops.concatenate(ops.stft(x, 2, 1, 4, window="hamming"), -1),
    "spectrum of whole frames": lambda x: ops.concatenate(ops.stft(x[:, 0], 4, 2, 4, center=False), -1),
    "mel spectrum": layers.MelSpectrogram(fft_length=4, sequence_stride=1, num_mel_bins=2, sampling_rate=9000),
    "tensordot": lambda x: ops.tensordot(x, constant(6, 2), axes=1),
    "tensordot of two axes": lambda x: ops.tensordot(x, constant(4, 6), axes=2),
    "tensordot of an axis each": lambda x: ops.tensordot(x, constant(2, 4, 3), axes=([1], [1])),
    **{
        f"einsum {e}": lambda x, e=e: ops.einsum(e, x, 2 * x)
        for e in ("bij,bij->bi", "bij,bij->bji", "bij,bij->b", "bij,bik->bjk")
    },
    "einsum that multiplies": lambda x: ops.einsum("bij,bjk->bijk", x, ops.swapaxes(x, 1, 2)),
    "einsum with a constant": lambda x: ops.einsum("bij,jk->bik", x, constant(6, 3)),
    "dot": lambda x: ops.dot(x, constant(6, 3)) + ops.dot(x, constant(6))[..., None],
    "inner": lambda x: ops.inner(x, constant(3, 6)),
    "average": lambda x: ops.average(x, -1, weights=constant(6) + 2)[:, :, None] + ops.average(x, axis=1)[:, None],
    "moments": lambda x: ops.concatenate(ops.moments(x, (1, 2), keepdims=True) + ops.moments(x[:, :1], (2,), True), -1),
    "means of integers": lambda x: (
        ops.mean(ops.cast(3 * x, "int32")[..., None], (1, 2)) + ops.mean(x > 0, (1, 2))[:, None]
    ),
    "moments of an axis": lambda x: ops.moments(x, (1,))[1],
    "select": lambda x: ops.select([x < -0.5, x < 0.5], [x * 3, x], -x),
    "hstack": lambda x: ops.hstack([x, 2 * x]),
    "array_split": lambda x: ops.array_split(x, 4, axis=2)[1],
    "quarter turns": lambda x: ops.rot90(x, 1, (1, 2)) + ops.rot90(x, -1, (1, 2)),
    "half a turn": lambda x: ops.rot90(x, 2, (1, 2)),
    "diff": lambda x: ops.diff(x, 2, axis=1),
    "diagonal": lambda x: ops.diagonal(x, 1, 1, 2),
    "trace": lambda x: ops.trace(x, axis1=1, axis2=2),
    "trunc": lambda x: ops.trunc(x * 3),
    "cbrt": ops.cbrt,
    "isnan": lambda x: ops.where(ops.isnan(ops.log(x)), 1.0, x),
    "isfinite": lambda x: ops.where(ops.isfinite(1 / ops.relu(x)), 1.0, x),
    "nan_to_num": lambda x: ops.nan_to_num(ops.log(x), 1.0, posinf=2.0, neginf=-3.0),
    "logical_xor": lambda x: ops.where(ops.logical_xor(x > 0, x < 1), 1.0, x),
    "batch_normalization": lambda x: ops.batch_normalization(x, *[constant(6) + 2] * 2, -1, *[constant(6)] * 2),
    "separable_conv": lambda x: ops.separable_conv(x, constant(3, 6, 2), constant(1, 12, 4), padding="same"),
    "crop_images": lambda x: ops.image.crop_images(x[..., None], 1, 2, target_height=2, target_width=3),
    "rgb_to_grayscale": lambda x: ops.image.rgb_to_grayscale(x[..., None] * constant(3)),
    "product of booleans": lambda x: ops.where(ops.multiply(x > -1, x < 1), 1.0, x),
}


#: what Keras refuses on TensorFlow, or computes wrongly there
NOT_ON_TENSORFLOW = {"patches with gaps": "refused", "product of booleans": "refused", "half a turn": "turned wrongly"}
NOT_ON_TENSORFLOW |= {"spectrum": "weighed by another window"}


@pytest.mark.filterwarnings("ignore:NotImplemented should not be used")  # in Keras's tensordot
@pytest.mark.parametrize("name", FORMULAS)
def test_functions_of_keras_are_read_as_the_operators_that_compute_them(name):
    if keras.backend.backend() == "tensorflow" and name in NOT_ON_TENSORFLOW:
        pytest.skip(f"on TensorFlow this is {NOT_ON_TENSORFLOW[name]} by Keras")
    assert OPAQUE not in ops_of(FORMULAS[name], 4, 6)


@pytest.mark.parametrize("filled, number", [(ops.zeros_like, 0.0), (ops.ones_like, 1.0)])
def test_a_tensor_filled_like_another_is_a_constant_for_each_sample(filled, number):
    x = keras.Input((2, 3))
    graph = capture(keras.Model(x, x * 0.5 + filled(x)))
    assert OPAQUE not in {n.op for n in graph.nodes}
    data = torch.rand(4, 2, 3)
    torch.testing.assert_close(run(graph, [data])[graph.outputs[0]], data / 2 + number)


def test_additive_attention_with_its_scale_is_read_as_operators():
    assert OPAQUE not in ops_of(lambda x: layers.AdditiveAttention()([x, 2 * x]), 5, 4)


@pytest.mark.parametrize("layer", [layers.Dense(3), layers.Conv1D(2, 3, padding="same")])
def test_a_layer_on_every_step_is_called_once(layer):
    shape = (5, 4) if isinstance(layer, layers.Dense) else (5, 6, 4)
    x = keras.Input(shape)
    model = keras.Model(x, layers.TimeDistributed(layer)(x))
    graph, data = capture(model), torch.rand(3, *shape)
    assert len([n for n in graph.nodes if n.op in ("Linear", "Conv1D")]) == 1 and len(graph.nodes) <= 5
    torch.testing.assert_close(run(graph, [data])[graph.outputs[0]], torch.as_tensor(forward(model, data)))
    assert chipfit.quantize(model, [data], progress=False).model(data).shape == (3, *model.output_shape[1:])


def test_comparisons_are_of_one_type():
    assert ops_of(lambda x: ops.cast(x > 1.5, "float32"), 5) == ["Greater", "Cast"]
    graph = read(lambda x: ops.cast(x > 1.5, "float32"), 5, dtype="int32")
    assert "Greater" in [n.op for n in graph.nodes]
    assert ops_of(lambda x: ops.cast(x > 1, "float32"), 5, dtype="int32") == ["Greater", "Cast"]


def test_a_clip_of_integers_is_a_maximum_and_a_minimum():
    assert ops_of(lambda x: ops.clip(x, -2, 3), 9, dtype="int32") == ["Max", "Min"]
    assert ops_of(lambda x: ops.clip(x, -2, 3), 9) == ["Clamp"]


@pytest.mark.parametrize("axis", [(1,), (2,), (-1,), (1, 2), (-1, 1)])
def test_vectors_are_divided_by_their_length_along_any_axis(axis):
    found = ops_of(lambda x: ops.normalize(x, axis=axis if len(axis) > 1 else axis[0]), 4, 5)
    assert found == ["ReduceL2", "Clamp", "Div"]


@pytest.mark.parametrize("a, b", [(1, 2), (2, 1), (-1, 1), (1, 3), (-2, -1)])
def test_axes_are_swapped_and_moved(a, b):
    assert ops_of(lambda x: ops.swapaxes(x, a, b), 4, 5, 6) == ["Transpose"]
    assert ops_of(lambda x: ops.moveaxis(x, a, b), 4, 5, 6) == ["Transpose"]
    assert ops_of(lambda x: ops.moveaxis(x, (a, b), (b, a)), 4, 5, 6) == ["Transpose"]


def test_images_are_resized_by_pixel_centres():
    def modes(*size, **how):
        return [
            n.attrs["mode"] for n in read(lambda x: ops.image.resize(x, size, **how), 4, 6, 3).nodes if n.op == "Resize"
        ]

    assert modes(8, 6, interpolation="nearest") == ["nearest"]  # whole factors: no difference
    assert modes(8, 9, interpolation="nearest") == modes(3, 5, interpolation="nearest") == ["nearest_exact"]
    assert modes(7, 5, interpolation="bilinear") == ["linear"]


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_separable_convolution_is_two(padding, multiplier):
    layer = layers.SeparableConv2D(5, (3, 2), strides=2, padding=padding, depth_multiplier=multiplier)
    first, second = (n for n in read(layer, 7, 6, 4).nodes if "Conv" in n.op)
    assert (first.op, first.attrs["groups"], second.op, second.attrs["groups"]) == ("DepthwiseConv2D", 4, "Conv2D", 1)
    assert second.attrs["stride"] == second.attrs["dilation"] == (1, 1) and not any(map(any, second.attrs["padding"]))
    found = ops_of(layers.SeparableConv1D(5, 3, padding=padding, depth_multiplier=multiplier), 7, 4)
    assert [op for op in found if "Conv" in op] == ["Conv1D", "Conv1D"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_global_mean_keeps_its_axes_where_it_is_asked(kept):
    graph = read(layers.GlobalAveragePooling2D(keepdims=kept), 4, 5, 3)
    assert graph.shape(graph.outputs[0]) == ((None, 1, 1, 3) if kept else (None, 3))
    assert "GlobalAvgPool" in [n.op for n in graph.nodes]


@pytest.mark.parametrize("size, stride", [(2, 1), (3, 2), (2, 3), ((2, 3), (1, 2))])
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_pools_of_any_window(size, stride, padding):
    """Means of an uneven padding are of an edge that PyTorch repeats."""
    how = {"pool_size": size, "strides": stride, "padding": padding}
    found = ops_of(layers.AveragePooling2D(**how), 7, 6, 3)
    assert "AvgPool" in found
    assert "MaxPool" in ops_of(layers.MaxPooling2D(**how), 7, 6, 3)


@pytest.mark.parametrize(
    "layer, shape, want",
    [
        (lambda: layers.Rescaling(0.5, -1.0), (4,), ["Mul", "Add"]),
        (lambda: layers.Rescaling([0.5, 2.0, 1.0], [1.0, 0.0, -1.0]), (4, 3), ["Mul", "Add"]),
        (lambda: layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 0.0, 9.0]), (4, 3), ["Sub", "Div"]),
        (lambda: layers.UpSampling2D((2, 3)), (3, 4, 2), ["Resize"]),
        (lambda: layers.UpSampling1D(3), (4, 2), ["Resize"]),
        (lambda: layers.ZeroPadding2D(((1, 2), (3, 0))), (3, 4, 2), ["Pad"]),
        (lambda: layers.PReLU(shared_axes=[1]), (4, 3), ["PRelu"]),
    ],
)
def test_layers_that_are_an_operator_or_two(layer, shape, want):
    found = [op for op in ops_of(layer(), *shape) if op != "Transpose"]
    assert found[-len(want) :] == want or found == want


@pytest.mark.parametrize("shared", [None, [1], [2], [1, 2], [1, 2, 3], [3], [2, 3]])
def test_slopes_of_every_shape_are_one_operator(shared):
    assert [op for op in ops_of(layers.PReLU(shared_axes=shared), 4, 5, 3) if op != "Transpose"] == ["PRelu"]


def test_masks_of_attention_are_read():
    """A row of tokens that are all hidden gives the mean of all values, as in Keras."""
    graph = read(lambda x: layers.MultiHeadAttention(2, 4)(x, x, attention_mask=x[..., :1] > x[..., 0][:, None]), 6, 8)
    assert OPAQUE not in {n.op for n in graph.nodes} and "SDPA" in {n.op for n in graph.nodes}


def test_values_of_attention_may_be_longer_than_keys():
    assert "SDPA" in ops_of(lambda x: layers.MultiHeadAttention(2, 4, value_dim=6, output_shape=8)(x, x[:, :3]), 5, 8)


def test_attention_hides_what_an_embedding_masks():
    words = layers.Embedding(4, 8, mask_zero=True)
    graph = read(
        lambda ids: layers.MultiHeadAttention(2, 4)(words(ops.abs(ids) % 4), words(ops.abs(ids) % 4)), 6, dtype="int32"
    )
    assert {"Embedding", "LogicalAnd"} <= {n.op for n in graph.nodes}
