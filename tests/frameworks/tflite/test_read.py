"""`.tflite` files as models: their operators, the batch, files of other tools, and files that are refused."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.errors import CaptureError, DataError
from chipfit.export import export
from chipfit.export.tflite.writer import export_tflite
from chipfit.frameworks.torch.capture import capture as capture_torch
from chipfit.graph.ir import Node, Value
from chipfit.operators.table import OPS
from chipfit.passes.fold_constants import fold_constants
from chipfit.plan.record import NodePlan, Plan
from chipfit.platform.load import load
from tests.build import model_of, sequential
from tests.exactness.test_litert_operators import CASES
from tests.export.operators import CASES as ALONE
from tests.export.operators import alone
from tests.export.tflite.test_ops import REASONS

pytest.importorskip("ai_edge_litert")
from chipfit.frameworks.tflite.capture import capture
from chipfit.frameworks.tflite.model import TfliteModel
from chipfit.frameworks.tflite.model import load as load_file
from chipfit.frameworks.tflite.variables import packed

OPERATORS = {k: v for k, v in CASES.items() if not v[2]}


def float_file(model, x, path):
    """Write a network of torch in float, in its own layout; return the file."""
    return export_float(model, x, path, keep_layout=True)[1]


def export_float(model, x, path, **options):
    """Write a network of torch in float; return its graph and the file."""
    graph = fold_constants(capture_torch(model.eval(), tuple(x), {}))[0]
    plan = Plan(tensors={}, nodes={n.name: NodePlan(name=n.name, op=n.op, exec="float") for n in graph.nodes})
    return graph, export(graph, plan, path, load("tflite_int8"), **options)


@pytest.mark.parametrize("name", OPERATORS)
def test_what_the_writer_writes_is_read_as_the_same_network(tmp_path, name):
    make, inputs, _ = OPERATORS[name]
    torch.manual_seed(0)
    x = inputs()
    graph, _ = export_float(make(), x, tmp_path / "m.tflite", keep_layout=True)
    read = capture(load_file(tmp_path / "m.tflite"), x)
    want, got = run(graph, x, keep=graph.outputs), run(read, x, keep=read.outputs)
    for a, b in zip(graph.outputs, read.outputs, strict=True):
        torch.testing.assert_close(got[b].float(), want[a].float(), rtol=1e-5, atol=1e-5)
    fixed = name.startswith("transposed")  # LiteRT's kernel has the batch among its operands
    assert read.shape(read.inputs[0])[0] is None or fixed


@pytest.mark.parametrize("name", [*OPS, *ALONE])
def test_an_operator_that_is_written_is_read_again(name, tmp_path):
    graph, inputs, want = alone(name)
    if REASONS.get(name) or REASONS.get(graph.nodes[0].op):
        pytest.skip("the file cannot hold it")
    read = capture(load_file(export_tflite(graph, None, tmp_path / "m.tflite", keep_layout=True)), inputs)
    env = {**read.weights, **run(read, inputs, keep=read.outputs)}
    for output, y in zip(read.outputs, want, strict=True):
        torch.testing.assert_close(env[output].to(y.dtype), y, rtol=1e-5, atol=1e-5)


def tensorflow_file(function, shape, path, kind="float32", optimized=False):
    """Write a file of TensorFlow's converter; return its path."""
    tf = pytest.importorskip("tensorflow")
    made = tf.function(function, input_signature=[tf.TensorSpec(shape, kind)]).get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([made], tf.Module())
    converter.optimizations = [tf.lite.Optimize.DEFAULT] if optimized else []
    path.write_bytes(converter.convert())
    return path


ROWS = np.random.default_rng(0).standard_normal((1, 6, 3), np.float32)
KERNEL = np.random.default_rng(1).standard_normal((2, 3, 3, 2, 4), np.float32)
PICKS = {
    "pixels of images": (lambda tf, x: tf.gather_nd(x, [[[0, 1, 2], [0, 3, 0]]]), (1, 4, 5, 3)),
    "pixels of given places": (lambda tf, x: tf.gather_nd(ROWS, tf.cast(x * [0.0, 1.0], tf.int32)), (1, 4, 2)),
    "rows of samples": (lambda tf, x: tf.gather(ROWS, tf.cast(x, tf.int32), batch_dims=1), (1, 4)),
    "numbers of rows": (lambda tf, x: tf.gather(x, tf.cast(x[..., :2] + 1, tf.int32), batch_dims=2), (1, 4, 5)),
    "sums before each element": (lambda tf, x: tf.cumsum(x, 1, exclusive=True), (1, 4, 5)),
    "sums from the end": (lambda tf, x: tf.cumsum(x, 2, exclusive=True, reverse=True), (1, 4, 5)),
    "channels backwards": (lambda tf, x: tf.identity(x)[:, 3:0:-2, ::-1], (1, 4, 5)),
    "rows among zeros": (lambda tf, x: tf.scatter_nd([[[0, 1], [0, 3]]], x[:, :2], (1, 6, 5)), (1, 4, 5)),
    "places among zeros": (lambda tf, x: tf.scatter_nd([[0, 5], [0, 2]], x[0, :2], (1, 6, 5)), (1, 4, 5)),
    "replaced rows": (lambda tf, x: tf.tensor_scatter_nd_update(x, [[[0, 1], [0, 2]]], x[:, 2:] * 2), (1, 4, 5)),
    "angles": (lambda tf, x: tf.atan2(x[:, 1:] - 1, 1.5 - x[:, :-1]), (1, 4, 5)),
    "angles of 0": (lambda tf, x: tf.atan2(x * 0, x - 1), (1, 4, 5)),
    "mirrored borders": (lambda tf, x: tf.pad(x, [[0, 0], [2, 1], [0, 3]], "SYMMETRIC"), (1, 4, 5)),
    "a volume": (lambda tf, x: tf.nn.conv3d(x, KERNEL, [1, 1, 2, 2, 1], "SAME"), (1, 4, 5, 6, 2)),
}


@pytest.mark.parametrize("name", PICKS)
def test_picks_and_volumes_of_tensorflow_are_read(name, tmp_path):
    tf = pytest.importorskip("tensorflow")
    function, shape = PICKS[name]
    x = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(0)).float()
    read = capture(load_file(tensorflow_file(lambda x: function(tf, x), shape, tmp_path / "m.tflite")), [x])
    (got,) = (run(read, [x], keep=read.outputs)[o] for o in read.outputs)
    np.testing.assert_allclose(got.numpy(), function(tf, x.numpy()).numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    ).eval()


@pytest.fixture
def images():
    return [torch.randn(8, 16, 16, 3, generator=torch.Generator().manual_seed(k)) for k in range(3)]


@pytest.fixture
def path(network, images, tmp_path):
    return export_float(network, [images[0].permute(0, 3, 1, 2)], tmp_path / "m.tflite")[1]


@pytest.mark.parametrize(("platform", "suffix"), [("tflite_int8", "tflite"), ("ort_cpu", "onnx")])
def test_a_file_is_quantized_to_the_integers_of_the_model_that_it_came_from(
    network, images, path, tmp_path, platform, suffix
):
    result = chipfit.quantize(str(path), images, platform=platform, progress=False)
    result.export(tmp_path / f"q.{suffix}")
    assert result.verify(images[:1]).exact
    source = chipfit.quantize(network, [x.permute(0, 3, 1, 2) for x in images], platform=platform, progress=False)
    plans = [r.plan.tensors.values() for r in (result, source)]
    ours, theirs = ({f"{float(s):.4g}" for t in p if t.quantized for s in t.scale.ravel()} for p in plans)
    assert ours == theirs
    x = torch.randn(4, 16, 16, 3)
    torch.testing.assert_close(result.model(x), source.model(x.permute(0, 3, 1, 2)), rtol=1e-4, atol=1e-4)


def test_the_model_of_a_file_trains_and_is_saved(images, path, tmp_path):
    result = chipfit.quantize(path, images, platform="tflite_int8", training="lsq", progress=False)
    parameters = [p for p in result.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, 0.1)
    before = [p.detach().clone() for p in parameters]
    result.model.train()(images[0]).square().mean().backward()
    optimizer.step()
    assert sum(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True)) > 4
    loaded = chipfit.load(result.trained().save(tmp_path / "out"))
    torch.testing.assert_close(loaded.model(images[1]), result.model.eval()(images[1]), rtol=1e-4, atol=1e-4)


def test_lint_reads_a_file(images, path):
    assert all(row.exec != "float" for row in chipfit.lint(path, images[0], "tflite_int8").rows)


def test_a_network_that_mixes_its_samples_keeps_the_batch_of_the_file(tmp_path):
    x = torch.randn(3, 4)
    float_file(model_of(lambda m, x: x - x.mean(0, keepdim=True)), [x], tmp_path / "m.tflite")
    model = load_file(tmp_path / "m.tflite")
    model.inputs[0].signature = model.inputs[0].shape = (3, 4)  # as a file has it that fixes the batch
    graph = capture(model, [x])
    assert graph.shape(graph.inputs[0]) == (3, 4) and "the batch size is fixed" in graph.notes[0]


def test_a_file_that_is_quantized_again_keeps_its_batch_where_it_joins_constants_of_one_sample(tmp_path):
    model = model_of(
        lambda m, x: torch.cat([m.a(x), m.row.expand(len(x), -1)], 1), a=nn.Linear(4, 6), row=torch.ones(1, 2)
    )
    images = list(torch.randn(3, 1, 4))
    file = chipfit.quantize(model, images, platform="tflite_int8", progress=False).export(tmp_path / "q.tflite")
    batches = [torch.cat(images)]  # of three samples, for a file of one
    again = chipfit.quantize(chipfit.load_model(file, requantize=True), batches, platform="tflite_int8", progress=False)
    again.export(tmp_path / "again.tflite")
    assert again.verify(batches).exact and again.report is not None


def test_a_quantized_file_is_refused_and_can_be_quantized_again(network, images, path, tmp_path):
    first = chipfit.quantize(path, images, platform="tflite_int8", progress=False)
    file = first.export(tmp_path / "q.tflite", io="int8")
    with pytest.raises(CaptureError, match=r"quantized already.*requantize"):
        chipfit.quantize(file, images, platform="tflite_int8", progress=False)
    again = chipfit.quantize(chipfit.load_model(file, requantize=True), images, platform="tflite_int8", progress=False)
    before, after = (r.model(images[0]) for r in (first, again))
    assert (after - before).std() < 0.05 * before.std()
    with pytest.raises(CaptureError, match=r"numbers that they stand for: \(x.astype\('float32'\) [+-] \d+\) \* 0\.0"):
        capture(chipfit.load_model(file, requantize=True), (torch.zeros(1, 16, 16, 3, dtype=torch.int8),))
    with pytest.raises(CaptureError, match="can be quantized again"):
        chipfit.load_model(network, requantize=True)


def test_rectifiers_that_old_converters_left_to_the_ends_of_integers_are_read_where_they_are_quantized_again(tmp_path):
    """Integers from 0 to 6 clip as ReLU6 does; converters of TensorFlow 1 removed the activation beside them."""
    images = [5 * torch.randn(4, 3, 6, 6) for _ in range(4)]
    model = sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    file = chipfit.quantize(model, images, platform="tflite_int8", progress=False).export(tmp_path / "q.tflite")
    made = TfliteModel(file)
    with made.content.opened():
        table = made.table()
        for op in table.subgraphs[0].operators:
            if hasattr(op.builtinOptions, "fusedActivationFunction"):
                op.builtinOptions.fusedActivationFunction = 0
        (tmp_path / "old.tflite").write_bytes(packed(table))
    x = images[0].permute(0, 2, 3, 1)
    graphs = [capture(chipfit.load_model(tmp_path / f"{f}.tflite", requantize=True), (x,)) for f in ("q", "old")]
    assert [n.op for n in graphs[1].nodes] == [n.op for n in graphs[0].nodes]
    want, got = (run(g, [x], keep=g.outputs)[g.outputs[0]] for g in graphs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["DetectionPostProcess", "detections by class"])
def test_a_file_that_ends_in_detections_is_quantized_up_to_boxes_and_scores(name, tmp_path):
    graph, given, _ = alone(name)
    n = graph.nodes[0]
    boxes, scores, anchors = n.inputs
    layers = [Node(f"l{k}", "Linear", ("x", f"w{k}", None), (y,), {}) for k, y in enumerate((boxes, scores))]
    graph.nodes[:0], graph.inputs = layers, ["x"]
    graph.weights |= {anchors: given[2].abs(), "w0": 0.1 * torch.randn(given[0].shape[-1], 5), "w1": torch.randn(4, 5)}
    graph.values["x"] = Value("x", (1, 9, 5))
    del graph.values[anchors]
    file, data = export_tflite(graph, None, tmp_path / "m.tflite"), [torch.rand(1, 9, 5) for _ in range(6)]
    for platform, runtime in (("tflite_int8", ".tflite"), ("ort_cpu", ".onnx")):
        result = chipfit.quantize(file, data, platform=platform, progress=False)
        result.export(tmp_path / f"q{runtime}")
        assert result.verify(data).exact
        assert {p.exec for p in result.plan.nodes.values() if p.op == "Linear"} == {"int"}
        assert not {n.name, *n.outputs} & {*result.similarity(data).layers}
        assert chipfit.load(result.save(tmp_path / platform)).verify(data).exact


# ---------------------------------------------------------------- files of TensorFlow's converter


@pytest.fixture(scope="module")
def converter():
    """Return a function that makes a `.tflite` file of a function of TensorFlow, and its outputs."""
    tf = pytest.importorskip("tensorflow")

    def convert(function, x, *options):
        signature = tf.TensorSpec([1, *x.shape[1:]], tf.float32)
        concrete = tf.function(function, input_signature=[signature]).get_concrete_function()
        made = tf.lite.TFLiteConverter.from_concrete_functions([concrete])
        if options:
            made.optimizations = [tf.lite.Optimize.DEFAULT]
            made.target_spec.supported_types = list(options)
        return made.convert(), np.concatenate([function(tf.constant(x[k : k + 1])).numpy() for k in range(len(x))])

    return convert


@pytest.mark.filterwarnings("ignore:Statistics")
def test_sparse_weights_of_a_quantized_file_are_read_where_it_is_quantized_again():
    """Each column of the weight has a scale of its own; LiteRT makes the integers dense by an operator."""
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)
    weight = np.where(rng.random((64, 32)) < 0.15, rng.normal(size=(64, 32)), 0).astype(np.float32)
    weight *= np.geomspace(0.1, 10, 32, dtype=np.float32)
    x = rng.random((8, 64), dtype=np.float32)
    function = tf.function(lambda x: tf.matmul(x, weight), input_signature=[tf.TensorSpec((1, 64), tf.float32)])
    made = tf.lite.TFLiteConverter.from_concrete_functions([function.get_concrete_function()])
    made.optimizations = [tf.lite.Optimize.DEFAULT, tf.lite.Optimize.EXPERIMENTAL_SPARSITY]
    made.representative_dataset = lambda: ([row[None]] for row in x)
    model = TfliteModel(made.convert(), requantize=True)
    assert "DENSIFY" in {op.kind for op in model.operators}
    graph = capture(model, (torch.from_numpy(x),))
    (y,) = run(graph, [torch.from_numpy(x)], keep=graph.outputs).values()
    np.testing.assert_allclose(y, x @ weight, atol=0.02 * np.abs(x @ weight).max())


def functions():
    """Return functions of TensorFlow whose operators chipfit does not write itself, by name."""
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)
    shapes = ((3, 3, 4, 6), (2, 2, 6, 4), (9 * 7 * 4, 3), (3, 3, 4, 1))
    kernel, wide, rows, each = (rng.normal(size=s).astype("f4") for s in shapes)

    def apart(x, crops, layer=lambda y: tf.nn.conv2d(y, kernel, 1, "VALID")):
        pads = [[2, 3], [2, 3]]  # sizes of 14 and 12, of which convolutions leave 5 and 4 in each batch
        return tf.batch_to_space(layer(tf.space_to_batch(x, [2, 2], pads)), [2, 2], crops)

    return {
        "same_padding": lambda x: tf.nn.conv2d(x, kernel, 2, "SAME"),
        "apart": lambda x: tf.nn.relu(apart(x, [[0, 1], [0, 1]])),
        "apart_in_channels": lambda x: apart(
            x, [[1, 0], [2, 1]], lambda y: tf.nn.depthwise_conv2d(y, each, [1, 1, 1, 1], "VALID") + 0.5
        ),
        "transposed": lambda x: tf.nn.conv2d_transpose(x, wide, [1, 17, 13, 6], 2, "SAME"),
        "squared_difference": lambda x: tf.math.squared_difference(x, 0.3),
        "square": lambda x: tf.square(x) + tf.square(x[:, :1]),
        "moments": lambda x: (
            (x - tf.reduce_mean(x, -1, keepdims=True)) * tf.math.rsqrt(tf.reduce_mean(x * x, -1)[..., None])
        ),
        "slices": lambda x: tf.concat([x[:, ::2, 1:-1, 0], x[:, :5, 1:-1, -1]], 2),
        "sliced": lambda x: tf.slice(x, [0, 1, 2, 0], [-1, 3, 4, -1]),
        "space": lambda x: tf.nn.depth_to_space(x, 2) + tf.nn.depth_to_space(tf.nn.relu(x), 2),
        "block": lambda x: tf.nn.space_to_depth(x[:, :8, :6], 2),
        "flat": lambda x: tf.matmul(tf.reshape(x, [1, -1]), rows),
        "attention": lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x[:, 0], x[:, 1], transpose_b=True)), x[:, 2]),
        "pools": lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME") + tf.nn.max_pool2d(x, 3, 2, "SAME"),
        "resized": lambda x: tf.compat.v1.image.resize_bilinear(x, [17, 13], align_corners=True),
        "nearest": lambda x: tf.image.resize(x, [18, 14], "nearest"),
        "unit": lambda x: tf.nn.l2_normalize(x, -1, 1e-12),
        "chosen": lambda x: tf.where(x > 0.2, x, tf.maximum(x * 0.1, -0.5)),
        "mirrored": lambda x: tf.pad(x, [[0, 0], [1, 1], [2, 1], [0, 0]], "REFLECT"),
        "stacked": lambda x: tf.reduce_sum(tf.stack(tf.unstack(x, axis=3), 1), 1),
        "topped": lambda x: tf.math.top_k(x, 2).values,
    }


X = np.random.default_rng(1).normal(size=(3, 9, 7, 4)).astype("f4")
NAMES = (
    "same_padding apart apart_in_channels transposed squared_difference square moments slices sliced space block flat "
    "attention pools resized nearest unit chosen mirrored stacked topped"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_what_tensorflow_converts_is_read_for_a_batch_of_any_size(converter, name):
    content, want = converter(functions()[name], X)
    graph = capture(TfliteModel(content), [torch.from_numpy(X)])
    assert graph.shape(graph.inputs[0])[0] is None
    got = run(graph, [torch.from_numpy(X)], keep=graph.outputs)[graph.outputs[0]]
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dilated", "repeated", "filled", "chosen", "window"])
def test_what_a_file_with_open_sizes_computes_of_its_sizes_is_folded(name):
    tf = pytest.importorskip("tensorflow")
    kernel = np.random.default_rng(0).normal(size=(3, 3, 4, 6)).astype("f4")
    function = {
        "dilated": lambda x: tf.nn.conv2d(x, kernel, 1, "SAME", dilations=2),
        "repeated": lambda x: x + tf.tile(x[:, :1], [1, tf.shape(x)[1], 1, 1]),
        "filled": lambda x: tf.concat([x, tf.fill([1, tf.shape(x)[1], tf.shape(x)[2], 2], 0.5)], 3),
        "chosen": lambda x: tf.gather(x, tf.range(tf.shape(x)[1]) // 2, axis=1),
        "window": lambda x: tf.nn.conv2d(x, kernel, 1, "VALID"),  # of more than the size 1 that stands for open ones
    }[name]
    signature = tf.TensorSpec([1, None, None, 4], tf.float32)
    concrete = tf.function(function, input_signature=[signature]).get_concrete_function()
    content = tf.lite.TFLiteConverter.from_concrete_functions([concrete]).convert()
    operators = {o.kind for o in TfliteModel(content).operators}
    graph = capture(TfliteModel(content), [torch.from_numpy(X)])
    got = run(graph, [torch.from_numpy(X[:1])], keep=graph.outputs)[graph.outputs[0]]
    assert name in ("dilated", "window") or "SHAPE" in operators
    np.testing.assert_allclose(got.detach().numpy(), function(tf.constant(X[:1])).numpy(), rtol=1e-4, atol=1e-5)


def test_weights_of_16_bits_are_read(converter):
    tf = pytest.importorskip("tensorflow")
    content, want = converter(functions()["same_padding"], X, tf.float16)
    graph = capture(TfliteModel(content), [torch.from_numpy(X)])
    got = run(graph, [torch.from_numpy(X)], keep=graph.outputs)[graph.outputs[0]]
    assert {n.op for n in graph.nodes} <= {"Transpose", "Conv2D"}
    np.testing.assert_allclose(got.detach().numpy(), want, atol=0.02)


def test_an_operator_without_reader_is_named(converter):
    tf = pytest.importorskip("tensorflow")
    content, _ = converter(lambda x: tf.nn.local_response_normalization(x) + 0.0, X)
    with pytest.raises(CaptureError, match="LOCAL_RESPONSE_NORMALIZATION of '.*' has no reader"):
        capture(TfliteModel(content), [torch.from_numpy(X)])


def test_a_fourier_transform_is_refused_with_what_helps(converter):
    tf = pytest.importorskip("tensorflow")
    content, _ = converter(lambda x: tf.abs(tf.signal.rfft(x, [4])), X)
    with pytest.raises(CaptureError, match="RFFT2D of '.*' has no reader.*behind its Fourier transform"):
        capture(TfliteModel(content), [torch.from_numpy(X)])


@pytest.mark.parametrize("kind, shape", [("DEPTH_TO_SPACE", (1, 8, 10, 2)), ("SPACE_TO_DEPTH", (1, 2, 2, 32))])
def test_channels_and_space_are_exchanged_by_one_operator_as_in_the_file(tmp_path, kind, shape):
    from chipfit.export.tflite.file import TYPES, File

    file = File()
    x, y, z = (file.tensor(n, s, TYPES["float32"]) for n, s in (("x", (1, 4, 5, 8)), ("y", shape), ("z", shape)))
    if kind == "SPACE_TO_DEPTH":
        file.tensors[x].shape = np.array([1, 4, 4, 8], np.int32)
    file.op(kind, [x], y, blockSize=2)
    file.op("LOGISTIC", [y], z)
    (tmp_path / "m.tflite").write_bytes(file.content({"x": x}, {"z": z}, {}))
    data = [torch.randn(2, 4, 5 if kind == "DEPTH_TO_SPACE" else 4, 8) for _ in range(2)]
    result = chipfit.quantize(tmp_path / "m.tflite", data, platform="tflite_int8", progress=False)
    result.export(tmp_path / "q.tflite")
    operators = [o.kind for o in load_file(tmp_path / "q.tflite").operators]
    assert kind in operators and "GATHER" not in operators
    assert result.verify(data[0], path=tmp_path / "q.tflite").exact


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("content", [b"", b"TFL3", b"\x1c\0\0\0TFL3" + bytes(60)], ids=["nothing", "short", "zeros"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "m.tflite").write_bytes(content)
    with pytest.raises(CaptureError, match="not a .tflite file that LiteRT can run"):
        chipfit.load_model(tmp_path / "m.tflite")


def test_a_truncated_file_is_refused(path, tmp_path):
    content = path.read_bytes()
    for end in range(0, len(content), len(content) // 40):
        (tmp_path / "cut.tflite").write_bytes(content[:end])
        with pytest.raises(CaptureError):
            chipfit.load_model(tmp_path / "cut.tflite")


def test_a_file_with_wrong_bytes_is_refused_or_read(path, tmp_path):
    content, found = path.read_bytes(), Counter()
    for seed in range(60):
        draw, broken = random.Random(seed), bytearray(content)
        for _ in range(draw.choice([1, 2, 5])):
            broken[draw.randrange(max(len(broken) - 4000, 0), len(broken))] = draw.randrange(256)
        try:
            capture(TfliteModel(bytes(broken)), [torch.zeros(2, 16, 16, 3)])
            found["read"] += 1
        except CaptureError:
            found["refused"] += 1
    assert found["read"] > 5 and found["refused"] > 5


def first_layer(table):
    """Return result, kernel and bias of the first convolution of a file."""
    graph = table.subgraphs[0]
    layer = next(o for o in graph.operators if len(o.inputs) == 3)
    return [graph.tensors[k] for k in (layer.outputs[0], *layer.inputs[1:])]


def written_into_a_constant(table):
    y, _, bias = first_layer(table)
    y.buffer, y.shape = bias.buffer, bias.shape


def of_another_size(table):
    first_layer(table)[1].shape[0] *= 2


def of_negative_size(table):
    first_layer(table)[0].shape[-1] = -3


def read_before_it_is_computed(table):
    table.subgraphs[0].operators.reverse()


def computed_twice(table):
    first, second = table.subgraphs[0].operators[:2]
    second.outputs = first.outputs


def of_another_file(table):
    table.subgraphs[0].operators[0].inputs[0] = 1000


def of_infinite_scale(table):
    from ai_edge_litert import schema_py_generated as schema

    q = schema.QuantizationParametersT()
    q.scale, q.zeroPoint = [float("inf")], [0]
    y = first_layer(table)[0]
    y.type, y.quantization = schema.TensorType.INT8, q


@pytest.mark.parametrize(
    "damage, message",
    [
        (written_into_a_constant, "is written although it has numbers already"),
        (of_another_size, r"does not fit its shape.*Got: .* bytes|invalidly specified"),
        (of_negative_size, "has an impossible shape|not a .tflite file"),
        (read_before_it_is_computed, "before it is read"),
        (computed_twice, "is written although"),
        (of_another_file, "a tensor that the file does not have|not a .tflite file"),
        (of_infinite_scale, "has an impossible scale"),
    ],
)
def test_tables_that_would_crash_litert_or_read_garbage_are_refused(path, damage, message):
    from ai_edge_litert import schema_py_generated as schema

    table = schema.ModelT.InitFromObj(schema.Model.GetRootAs(bytearray(path.read_bytes()), 0))
    damage(table)
    with pytest.raises(CaptureError, match=message):
        TfliteModel(packed(table))


def test_inputs_that_do_not_fit_are_refused_with_the_shapes_that_do(path):
    with pytest.raises(
        DataError, match=r"Got: float32\[8, 3, 16, 16\].*'batch', 16, 16, 3\].*x\.permute\(0, 2, 3, 1\)"
    ):
        chipfit.quantize(path, [torch.randn(8, 3, 16, 16)], platform="tflite_int8", progress=False)
    with pytest.raises(DataError, match=r"Got: float32\[16, 16, 3\].*one sample: give batches"):
        chipfit.lint(path, torch.randn(16, 16, 3), platform="tflite_int8")
    with pytest.raises(DataError, match="holds text in the place of numbers. Got: a.npy"):
        chipfit.quantize(path, ["a.npy", "b.npy"], platform="tflite_int8", progress=False)


def test_the_float_network_is_what_litert_computes(network, images, path):
    torch.testing.assert_close(load_file(path)(images[0]), network(images[0].permute(0, 3, 1, 2)), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- files on the disk


def test_weights_behind_the_tables_are_read_as_files_of_more_than_2_gb_have_them(network, images, path):
    from ai_edge_litert import schema_py_generated as schema

    table = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    moved = [b for b in table.buffers if b.data is not None and len(b.data) > 64]
    data = [bytes(b.data) + bytes(-len(b.data) % 16) for b in moved]
    for b in moved:
        b.offset, b.size, b.data = 16, len(b.data), None

    at = -(-len(packed(table)) // 16) * 16
    for b, d in zip(moved, data, strict=True):
        b.offset, at = at, at + len(d)
    start = packed(table)
    path.write_bytes(start + bytes(-len(start) % 16) + b"".join(data))
    graph = capture(load_file(path), [images[0]])
    got = run(graph, [images[0]], keep=graph.outputs)[graph.outputs[0]]
    torch.testing.assert_close(got, network(images[0].permute(0, 3, 1, 2)), rtol=1e-4, atol=1e-5)


def test_a_file_is_not_mapped_into_memory_between_calls(images, path):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists what is mapped")
    model = load_file(path)
    with model.session():
        assert str(path) in maps.read_text()
    graph = capture(model, [images[0]])
    model(images[0])
    assert graph.weights and str(path) not in maps.read_text()


def test_a_file_that_has_changed_since_it_was_loaded_is_refused(images, path):
    model = load_file(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CaptureError, match="has changed since it was loaded"):
        capture(model, [images[0]])


def test_samples_whose_axis_a_file_takes_apart_and_makes_are_computed_together(tmp_path):
    """As steps in time of one sample, which lie first: [1, 1, 8] of any order is one reshape in the file."""
    tf = pytest.importorskip("tensorflow")
    kernel = np.random.default_rng(2).standard_normal((8, 6), np.float32)

    def steps(x):
        (first,) = tf.unstack(tf.transpose(x, [1, 0, 2]))
        return tf.stack([tf.nn.relu(tf.matmul(first, kernel))])

    made = tf.function(steps, input_signature=[tf.TensorSpec((1, 1, 8))]).get_concrete_function()
    path = tmp_path / "m.tflite"
    path.write_bytes(tf.lite.TFLiteConverter.from_concrete_functions([made]).convert())
    data = [torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    result = chipfit.quantize(str(path), data, platform="tflite_int8", progress=False)
    assert result.graph.shape(result.graph.inputs[0])[0] is None
    want = torch.relu(data[0] @ torch.from_numpy(kernel))
    read = capture(load_file(path), [data[0]])
    torch.testing.assert_close(run(read, [data[0]], keep=read.outputs)[read.outputs[0]], want)
    result.export(tmp_path / "int8.tflite")
    assert result.verify(data[:1]).exact
