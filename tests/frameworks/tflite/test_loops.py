"""Loops and composites of `.tflite` files, as converters write them, are read operator by operator."""

import copy

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers

from chipfit.errors import CaptureError
from chipfit.frameworks.tflite.capture import capture
from chipfit.frameworks.tflite.model import TfliteModel
from chipfit.frameworks.tflite.model import load as load_file
from chipfit.frameworks.tflite.variables import packed
from tests.build import quantized
from tests.frameworks.tflite.test_checks import file_of
from tests.frameworks.tflite.test_read import tensorflow_file

OPTIONS = schema.BuiltinOptions2
RNG = np.random.default_rng(0)
W, U = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4, 4)))
STEPS = 5


def recurrent(tf, x, steps=STEPS):
    """Return the states of all steps, [1, steps, 4]."""
    rows = tf.transpose(x, [1, 0, 2])

    def body(t, h, states):
        h = tf.tanh(tf.matmul(tf.gather(rows, t), W) + tf.matmul(h, U))
        return t + 1, h, states.write(t, h)

    states = tf.TensorArray(tf.float32, steps, element_shape=[1, 4])
    states = tf.while_loop(lambda t, *_: t < steps, body, (0, tf.zeros([1, 4]), states))[2]
    return tf.transpose(states.stack(), [1, 0, 2])


def nested(tf, x):
    def inner(k, y):
        return k + 1, y * 0.5 + x[:, :1]

    def outer(t, y):
        return t + 2, tf.while_loop(lambda k, _: k < 3, inner, (0, y))[1]

    return tf.while_loop(lambda t, _: t < 5, outer, (0, x))[1]


LOOPS = {
    "a recurrent layer": recurrent,
    "some of its states": lambda tf, x: recurrent(tf, x)[:, 1:3],
    "a loop in a loop": nested,
    "two layers": lambda tf, x: recurrent(tf, recurrent(tf, x)[..., :3]),
    "rows beside a loop, read twice": lambda tf, x: (
        (tf.slice(x[0], [1, 0], [2, 3]) * tf.abs(tf.slice(x[0], [1, 0], [2, 3]))) + nested(tf, x)[0, :1]
    ),
    "marks of steps": lambda tf, x: tf.where(tf.reduce_any(x > 0, -1, keepdims=True), recurrent(tf, x)[..., :3], x),
    "marks of all": lambda tf, x: tf.where(tf.reduce_all(x > -1, -1, keepdims=True), x, -x),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_steps_of_a_loop_are_written_out(name, tmp_path):
    tf = pytest.importorskip("tensorflow")
    file = tensorflow_file(lambda x: LOOPS[name](tf, x), [1, STEPS, 3], tmp_path / "m.tflite")
    model, x = load_file(file), torch.randn(1, STEPS, 3, generator=torch.Generator().manual_seed(0))
    assert "WHILE" not in {op.kind for op in model.operators}
    (got,) = model.run([x.numpy()])
    np.testing.assert_allclose(got, LOOPS[name](tf, x.numpy()).numpy(), rtol=1e-5, atol=1e-5)
    assert capture(model, [x]).nodes  # compares with LiteRT's results


def test_a_list_of_states_is_joined_once_and_is_exact(tmp_path):
    tf = pytest.importorskip("tensorflow")
    model = load_file(tensorflow_file(lambda x: recurrent(tf, x), [1, STEPS, 3], tmp_path / "m.tflite"))
    assert [op.kind for op in model.operators].count("CONCATENATION") == 1
    assert "SLICE" not in {op.kind for op in model.operators}
    data = [torch.randn(1, STEPS, 3, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    assert quantized(model, data, "tflite_int8").verify(data[:1]).exact


UNKNOWN = {
    "data count the steps": lambda tf, x: tf.while_loop(
        lambda y: tf.reduce_sum(y) < 9.0, lambda y: [y + 1.0], [tf.abs(x)]
    )[0],
    "too many steps": lambda tf, x: tf.while_loop(lambda t, _: t < 1001, lambda t, y: (t + 1, y * 0.5), (0, x))[1],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loop_of_unknown_length_is_refused(name, tmp_path):
    tf = pytest.importorskip("tensorflow")
    file = tensorflow_file(lambda x: UNKNOWN[name](tf, x), [1, 2, 3], tmp_path / "m.tflite")
    with pytest.raises(CaptureError, match="control flow WHILE has no reader.*fixed number of steps"):
        capture(load_file(file), [torch.zeros(1, 2, 3)])


def composite_of(content):
    """Return a file whose network is one composite: that of `content` is what it stands for."""
    table = schema.ModelT.InitFromPackedBuf(content, 0)
    body, op, code = table.subgraphs[0], schema.OperatorT(), schema.OperatorCodeT()
    outer = copy.copy(body)
    op.opcodeIndex, op.inputs, op.outputs = len(table.operatorCodes), body.inputs, body.outputs
    op.builtinOptions2, op.builtinOptions2Type = schema.StableHLOCompositeOptionsT(), OPTIONS.StableHLOCompositeOptions
    op.builtinOptions2.name, op.builtinOptions2.decompositionSubgraphIndex = b"odml.whole", 1
    op.builtinOptions2.compositeAttributes = np.frombuffer(flexbuffers.Dumps({}), np.uint8)
    code.builtinCode, code.deprecatedBuiltinCode, code.version = schema.BuiltinOperator.STABLEHLO_COMPOSITE, 127, 1
    outer.operators, table.subgraphs = [op], [outer, body]
    table.operatorCodes.append(code)
    return packed(table)


def signature(name, graph):
    """Return the signature of a network from tensor 0 to tensor 1."""
    made = schema.SignatureDefT()
    made.signatureKey, made.subgraphIndex, ends = name.encode(), graph, (schema.TensorMapT(), schema.TensorMapT())
    for k, end in enumerate(ends):
        end.name, end.tensorIndex = f"{name}_{'xy'[k]}".encode(), k
    made.inputs, made.outputs = [ends[0]], [ends[1]]
    return made


def test_a_composite_is_read_as_the_operators_that_it_stands_for():
    content = composite_of(file_of("NEG", ["x"]))
    graph = capture(TfliteModel(content), [torch.ones(1, 4)])
    assert [n.op for n in graph.nodes] == ["Neg"] and graph.outputs == ["y"]
    table = schema.ModelT.InitFromPackedBuf(content, 0)
    table.signatureDefs = [signature("other", 1), signature("main", 0)]
    model = TfliteModel(packed(table))
    graph = capture(model, [torch.ones(1, 4)])
    assert model.names == ["main_x"] and [n.op for n in graph.nodes] == ["Neg"]
    assert "warning: the file has more networks, which are left out: other" in graph.notes
    table.subgraphs[0].operators[0].builtinOptions2.decompositionSubgraphIndex = 0
    with pytest.raises(CaptureError, match="calls itself"):
        TfliteModel(packed(table))


def inside_itself(loop, graphs):
    loop.bodySubgraphIndex = loop.condSubgraphIndex


def without_a_body(loop, graphs):
    loop.bodySubgraphIndex = 77


def without_an_end(loop, graphs):
    graphs[loop.condSubgraphIndex].outputs = graphs[loop.condSubgraphIndex].inputs[:1]


def of_a_tensor_that_is_missing(loop, graphs):
    graphs[loop.bodySubgraphIndex].operators[0].inputs = np.array([999, 0], np.int32)


CHANGES = [inside_itself, without_a_body, without_an_end, of_a_tensor_that_is_missing]


@pytest.mark.parametrize("change", CHANGES)
def test_a_malformed_loop_is_refused(change, tmp_path):
    tf = pytest.importorskip("tensorflow")
    file = tensorflow_file(lambda x: recurrent(tf, x), [1, STEPS, 3], tmp_path / "m.tflite")
    table = schema.ModelT.InitFromPackedBuf(file.read_bytes(), 0)
    codes = [max(c.builtinCode, c.deprecatedBuiltinCode) for c in table.operatorCodes]
    operators = table.subgraphs[0].operators
    loop = next(op for op in operators if codes[op.opcodeIndex] == schema.BuiltinOperator.WHILE)
    change(loop.builtinOptions, table.subgraphs)
    with pytest.raises(CaptureError):
        capture(TfliteModel(packed(table)), [torch.zeros(1, STEPS, 3)])
