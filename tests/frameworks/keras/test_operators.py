"""The contract of the operator table: each operator is read from Keras and computed in Keras, or it is said why not."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.engine.run import run  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.frameworks.keras.lower import lower  # noqa: E402
from chipfit.frameworks.keras.lowerings import LOWERINGS  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402
from chipfit.operators.table import OPS  # noqa: E402
from chipfit.plan.record import Plan  # noqa: E402
from tests.frameworks.keras.test_against_keras import CASES, skip_what_keras_cannot  # noqa: E402
from tests.keras_zoo import on_others, randomize  # noqa: E402

#: operator -> why no Keras model is read as it
NOT_READ = {
    "InstanceNorm": "Keras has no such layer",
    **dict.fromkeys(("DetectionPostProcess", "SVDF", "SquaredDifference"), "TensorFlow Lite's own"),
    "Curve": "made by a pass from several operators",
    "DynamicQuantize": "put in where a kernel rounds what it reads",
    "Requantize": "put in where a plan wants another grid",
    "L2Norm": "made of its parts by `passes.unit_length`, on chips that have it",
    "Squeeze": "read as Reshape, whose target every shape of a Keras model tells",
    "Size": "read where a constant is repeated for each sample, see `test_capture`",
    "AdaptiveAvgPool": "Keras's own stays opaque",
    "AdaptiveMaxPool": "Keras's own stays opaque",
    "ChannelShuffle": "Keras has no such layer; models reshape and transpose",
    "GridSample": "Keras has no such layer",
}
#: operators that no graph of a Keras model holds, and no Keras model computes
NO_LOWERING = {"AdaptiveAvgPool", "AdaptiveMaxPool", "ChannelShuffle", "DetectionPostProcess", "GridSample", "SVDF"}
#: first expressions of each class that is read
EXPRESSIONS = {" ".join(key): cases[0] for key, cases in CASES.items()}
READ = set()  #: operators of their graphs


def test_every_operator_has_a_lowering_or_it_is_said_why_not():
    assert set(LOWERINGS) | NO_LOWERING == set(OPS) and not set(LOWERINGS) & NO_LOWERING
    assert [op for op, lowering in LOWERINGS.items() if lowering.kernel is None and lowering.layer is None] == []


def read(name):
    """The graph of an expression, and data for it."""
    expression, shape = EXPRESSIONS[name]
    given = keras.Input(shape)
    model = keras.Model(given, expression(given))
    randomize(model)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, *shape)).astype("float32"))
    graph = capture(model, (x,))
    READ.update(n.op for n in graph.nodes)
    return graph, x


@pytest.mark.parametrize("name", [pytest.param(n, marks=on_others(pytest.mark.slow)) for n in EXPRESSIONS])
def test_a_graph_that_is_read_comes_back_to_keras_as_it_was(name):
    skip_what_keras_cannot(tuple(name.split(" ", 1)))
    graph, x = read(name)
    if name in ("operation BroadcastTo", "layer UpSampling3D"):
        return  # the first fixes the size of the batch, as no layer may; for the second Keras has no function
    env = run(graph, [x])
    for o, got in zip(graph.outputs, lower(graph, Plan()).run_flat([x]), strict=True):
        torch.testing.assert_close(got.to(env[o].dtype), env[o], rtol=2e-5, atol=2e-6, equal_nan=True)


@pytest.mark.skipif(bool(on_others(1)), reason="the expressions are read on torch")
def test_every_operator_is_read_or_it_is_said_why_not():
    wanted = set(OPS) - set(NOT_READ)
    for name in () if wanted <= READ else EXPRESSIONS:  # other processes read these
        read(name)
    assert READ - {OPAQUE} == wanted


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
