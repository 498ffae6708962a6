"""The reader against Keras itself: each layer and operation that is read, with each argument, as Keras computes it.

`cases.yaml` has expressions for each row of the reader, and expressions that must stay opaque. The last part of this
file shows that no row and no attribute is missing from them.
"""

import functools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

from chipfit.engine.run import run  # noqa: E402
from chipfit.frameworks.keras.backend import forward  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.frameworks.keras.read import ACTIVATED, READERS  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402
from tests.keras_zoo import ZOO, batch_for, make, on_others, randomize  # noqa: E402

IMAGE, SIGNAL, VOLUME, ROWS, HEADS = (6, 7, 4), (9, 4), (5, 6, 4, 3), (5, 8), (5, 2, 4)


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


def functions(words):
    """Return (class, function of keras.ops) for words "Class=function", or "Class" alone where the names are alike."""
    return [(c, getattr(ops, f or c.lower())) for c, _, f in (word.partition("=") for word in words.split())]


UNARY = """
    Relu Relu6 Sigmoid Tanh HardSigmoid=hard_sigmoid Selu Silu HardSilu=hard_silu Exp Absolute Negative Sin Cos Erf
    Arctan Sinh Cosh Arcsinh Arcsin Arccos Arccosh Arctanh
    Floor Ceil Round Sign StopGradient=stop_gradient Copy Softplus HardTanh=hard_tanh Square
"""
COMPARISONS = "Equal NotEqual=not_equal Less LessEqual=less_equal Greater GreaterEqual=greater_equal"
KEYS = (
    (slice(None), slice(1, 5, 2)),
    (slice(None), -1),
    (Ellipsis, 2),
    (Ellipsis, slice(-3, -1)),
    (slice(None), 2, None, slice(None), 1),
    (slice(1, None),),
    (slice(None), slice(None, 100), slice(-100, 3)),
    (slice(None), None, Ellipsis, 0),
)
#: class of an operation -> cases made of the functions above
FAMILIES = {
    **{c: unary(f) for c, f in functions(UNARY)},
    **{c: unary(f, positive) for c, f in functions("Log Sqrt Rsqrt Reciprocal")},
    **{c: binary(f) for c, f in functions("Add Subtract Multiply Maximum Minimum")},
    **{
        c: binary(f, positive) for c, f in functions("Divide TrueDivide=true_divide Power Mod FloorDivide=floor_divide")
    },
    **{c: reductions(f) for c, f in functions("Mean Sum Max Amax Min Amin Prod")},
    **{c: comparison(f) for c, f in functions(COMPARISONS)},
    "GetItem": tuple((lambda x, key=key: x[key] * 1.5, IMAGE) for key in KEYS),
}


def expressions(kind):
    """Return (group, class) -> cases, from the expressions of `cases.yaml`."""

    def cases(entry):
        if isinstance(entry, str):
            return eval(entry)
        ((shape, expression),) = entry.items()
        return ((eval(f"lambda x: {expression}", globals()), eval(shape)),)

    table = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())[kind]
    return {tuple(key.split()): tuple(c for e in entries for c in cases(e)) for key, entries in table.items()}


#: ("layer" or "operation", class) -> expressions of Keras that are read by its reader, with the shapes of their inputs
CASES = {**{("operation", c): cases for c, cases in FAMILIES.items()}, **expressions("read")}
#: (group, class) -> expressions without canonical equivalent
REFUSED = expressions("refused")


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


#: what Keras itself cannot compute on JAX: windows without a batch axis, products in float64, norms of a list of axes
NOT_ON_JAX = {("operation", name) for name in ("MaxPool", "AveragePool", "Prod", "Norm")}


def skip_what_keras_cannot(key):
    if keras.backend.backend() == "jax" and key in NOT_ON_JAX:
        pytest.skip("Keras fails on it with JAX")


@pytest.mark.parametrize("key", [pytest.param(k, marks=on_others(pytest.mark.slow)) for k in CASES], ids=" ".join)
def test_the_graph_computes_what_keras_does(key):
    skip_what_keras_cannot(key)
    for k, case in enumerate(CASES[key]):
        reading = Reading(case)
        assert [n.attrs["target"] for n in reading.graph.nodes if n.op == OPAQUE and "Flip" not in str(n)] == [], k
        assert key in {r[:2] for r in reading.read}, k
        reading.same()
        note(reading)
    DONE.add(key)


@pytest.mark.parametrize("key", [pytest.param(k, marks=on_others(pytest.mark.slow)) for k in REFUSED], ids=" ".join)
def test_a_form_without_canonical_operator_is_not_read_as_one(key):
    skip_what_keras_cannot(key)
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
    "SDPA": "enable_gqa",
    "LSTM": "cell_clip gates",
    "GRU": "gates",
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
