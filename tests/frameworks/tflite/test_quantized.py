"""Quantized files of other tools: their integers are simulated and compared, and what differs is named."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import CaptureError, DataError, UnsupportedError
from tests.build import model_of, sequential
from tests.frameworks.tflite.test_read import float_file, tensorflow_file

pytest.importorskip("ai_edge_litert")
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from chipfit.frameworks.tflite.model import TfliteModel
from chipfit.frameworks.tflite.quantized import read_quantized
from chipfit.frameworks.tflite.variables import packed
from chipfit.platform.load import load
from chipfit.verify import verify
from chipfit.verify.file import read_quantized as read_file

RUNTIMES = ("litert_reference", "litert_optimized", "litert")
IMAGES = np.random.default_rng(0).normal(size=(24, 12, 10, 3)).astype("f4")


def kernel(*shape):
    """Return weights that depend on their shape alone."""
    drawn = np.random.default_rng(sum(shape)).normal(size=shape)
    return (drawn / np.sqrt(np.prod(shape[:-1]))).astype("f4")


def branches(tf, x):
    y = tf.nn.relu(tf.nn.conv2d(x, kernel(3, 3, 3, 6), 1, "SAME") + kernel(6))
    z = tf.nn.depthwise_conv2d(y, kernel(3, 3, 6, 1), [1, 1, 1, 1], "SAME") + kernel(6)
    y = tf.nn.avg_pool2d(tf.concat([y + z, tf.nn.max_pool2d(y, 3, 1, "SAME")], 3), 2, 2, "VALID")
    return tf.nn.softmax(tf.matmul(tf.reshape(y, [-1, 6 * 5 * 12]), kernel(6 * 5 * 12, 4)))


def curves(tf, x):
    y = tf.nn.relu6(tf.nn.conv2d(x, 3 * kernel(3, 3, 3, 5), 2, "VALID") + kernel(5))
    y = tf.nn.leaky_relu(y * tf.sigmoid(tf.nn.conv2d(y, kernel(1, 1, 5, 5), 1, "VALID")), 0.2)
    y = tf.tanh(tf.nn.conv2d_transpose(y, kernel(2, 2, 4, 5), [1, 10, 8, 4], 2, "VALID"))
    y = tf.pad(y, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return tf.matmul(tf.reduce_mean(y, [1, 2]), kernel(4, 3)) + kernel(3)


def resized(tf, x):
    y = tf.nn.relu(tf.nn.conv2d(x, kernel(3, 3, 3, 4), 1, "VALID"))
    y = tf.nn.conv2d(tf.image.resize(y, [20, 16]), kernel(1, 1, 4, 4), 1, "VALID") + kernel(4)
    return y - tf.image.resize(tf.nn.conv2d(x, kernel(3, 3, 3, 4), 1, "VALID"), [20, 16], "nearest")


def shuffled(tf, x):
    """Samples are mixed with channels where they are shuffled: the batch of such a file is fixed."""
    y = tf.nn.relu(tf.nn.conv2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), kernel(3, 3, 3, 8), 2, "VALID"))
    y = tf.transpose(tf.reshape(tf.transpose(y, [0, 3, 1, 2]), [4, 2, 30]), [1, 0, 2])
    first, second = tf.unstack(tf.reshape(y, [2, 1, 4, 6, 5]))
    y = tf.concat([tf.transpose(first, [0, 2, 3, 1]), tf.nn.relu6(tf.transpose(second, [0, 2, 3, 1]))], 3)
    return tf.matmul(tf.reduce_mean(y * kernel(8), [1, 2]) + kernel(8), kernel(8, 4))


def upscaled(tf, x):
    return tf.nn.depth_to_space(tf.nn.relu(tf.nn.conv2d(x, kernel(3, 3, 3, 8), 1, "VALID") + kernel(8)), 2)


def normalized(tf, x):
    y = tf.nn.conv2d(x, kernel(3, 3, 3, 6), 1, "SAME") + kernel(6)
    apart = tf.math.squared_difference(y, tf.reduce_mean(y, -1, keepdims=True))
    y = y * tf.math.rsqrt(tf.reduce_mean(apart, -1, keepdims=True) + 0.1)
    return tf.math.squared_difference(tf.nn.conv2d(x, 9 * kernel(3, 3, 3, 6), 1, "SAME"), y)


NETWORKS = {"upscaled": upscaled, "shuffled": shuffled, "branches": branches, "curves": curves, "resized": resized}
NETWORKS["normalized"] = normalized


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a function: name of a network, type of inputs and outputs -> file of TensorFlow's converter."""
    tf = pytest.importorskip("tensorflow")

    def convert(name, ends="float32", shape=IMAGES.shape[1:]):
        wanted = [tf.TensorSpec([1, *shape], tf.float32)]
        concrete = tf.function(lambda x: NETWORKS[name](tf, x), input_signature=wanted).get_concrete_function()
        made = tf.lite.TFLiteConverter.from_concrete_functions([concrete], tf.Module())
        made.optimizations = [tf.lite.Optimize.DEFAULT]
        made.representative_dataset = lambda: ([row[None]] for row in IMAGES)
        made.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        made.inference_input_type = made.inference_output_type = getattr(tf, ends)
        file = tmp_path_factory.mktemp("tf") / f"{name}.tflite"
        with warnings.catch_warnings(action="ignore"):
            file.write_bytes(made.convert())
        return file

    return convert


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("name", "ends"), [*((n, "float32") for n in [*NETWORKS][1:]), ("branches", "int8")])
def test_a_file_of_tensorflows_converter_computes_the_simulated_integers(converted, name, ends, runtime):
    found = chipfit.verify_file(converted(name, ends), [torch.from_numpy(IMAGES[:6])], runtime=runtime)
    assert found.exact and found.exact_share > 0.7
    assert all(not h.differing for h in found.held) and len(found.held) > 5


@pytest.mark.parametrize("factor", [0, 1.1])
def test_integers_of_a_bias_are_added_whatever_its_own_scale_says(converted, factor, tmp_path):
    """The old quantizer lets layers share a bias; other tools leave its scale out."""
    table = schema.ModelT.InitFromPackedBuf(converted("upscaled").read_bytes(), 0)
    (bias,) = (
        t for t in table.subgraphs[0].tensors if t.type == schema.TensorType.INT32 and t.quantization.scale is not None
    )
    bias.quantization.scale = bias.quantization.scale * np.float32(factor) if factor else None
    (tmp_path / "m.tflite").write_bytes(packed(table))
    assert chipfit.verify_file(tmp_path / "m.tflite", [torch.from_numpy(IMAGES[:6])]).exact


def test_a_file_with_open_inputs_may_take_one_sample_at_a_time(converted, tmp_path):
    table = schema.ModelT.InitFromPackedBuf(converted("branches").read_bytes(), 0)
    for t in table.subgraphs[0].tensors:
        held = table.buffers[t.buffer].data
        if t.type == schema.TensorType.INT32 and list(t.shape) == [2] and held is not None:
            table.buffers[t.buffer].data = np.frombuffer(np.array([1, 360], np.int32).tobytes(), np.uint8)
    table.subgraphs[0].tensors[table.subgraphs[0].inputs[0]].shapeSignature = np.array([-1, 12, 10, 3], np.int32)
    (tmp_path / "m.tflite").write_bytes(packed(table))
    assert chipfit.verify_file(tmp_path / "m.tflite", [torch.from_numpy(IMAGES[:6])]).exact
    assert len(TfliteModel(packed(table))(IMAGES[:6])) == 6


@pytest.mark.parametrize("ends", ["int8", "uint8"])
def test_integers_of_the_inputs_type_are_taken_as_they_are(converted, ends):
    """As the file's own runtime takes them; floats of the same numbers have the same results."""
    file = converted("branches", ends)
    scale, zero = Interpreter(str(file)).get_input_details()[0]["quantization"]
    codes = np.clip(np.rint(IMAGES[:4] / scale) + zero, np.iinfo(ends).min, np.iinfo(ends).max).astype(ends)
    reals = (codes.astype("f4") - zero) * np.float32(scale)
    one, other = (chipfit.verify_file(file, [torch.from_numpy(x)]) for x in (codes, reals))
    labelled = chipfit.verify_file(file, [(torch.from_numpy(codes), torch.arange(4))])
    assert one.exact and labelled.exact and one.integers == other.integers
    assert [r.sqnr_db for r in one.rows] == [r.sqnr_db for r in other.rows]
    with pytest.raises(DataError, match="holds integers"):
        chipfit.verify_file(file, [torch.from_numpy(codes.astype("int16"))])


def test_sizes_that_a_file_leaves_open_are_those_of_the_data(converted):
    file = converted("upscaled", shape=(None, None, IMAGES.shape[3]))
    for x in (IMAGES[:3], IMAGES[:3, 1:, :-2]):
        found = chipfit.verify_file(file, [x])
        assert found.exact and found.samples == 3 and all(r.elements or r.why for r in found.rows)


def test_padding_of_a_file_is_computed_in_integers(converted):
    found = chipfit.verify_file(converted("shuffled"), [torch.from_numpy(IMAGES[:2])])
    assert not [n for n in found.float_operators if "Pad" in n] and any(r.op == "Pad" for r in found.rows)
    assert not [d for d in found.departures if "missing from the file" in d]


def written(tmp_path, act=None, **options):
    torch.manual_seed(0)
    model = sequential(nn.Conv2d(3, 6, 3, 2, 1), act or nn.ReLU6(), nn.Flatten(), nn.Linear(180, 4)).eval()
    data = [torch.randn(8, 3, 12, 10) for _ in range(3)]
    result = chipfit.quantize(model, data, platform="tflite_int8", progress=False)
    return result.export(tmp_path / "m.tflite", **options), data[0].permute(0, 2, 3, 1)


def edited(file, change, path):
    """Write a file after a change of its main graph."""
    table = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0))
    change(table.subgraphs[0])
    path.write_bytes(packed(table))
    return path


def test_names_of_constants_do_not_decide_what_they_are(tmp_path):
    file, x = written(tmp_path)

    def rename(graph):
        sums = [t for t in graph.tensors if t.type == schema.TensorType.INT32 and t.quantization]
        sizes = [t for t in graph.tensors if t.type == schema.TensorType.INT32 and not t.quantization]
        assert len(sums) == 2 and sizes
        for names, found in (("Const Const_2_3", sums), ("Const_1 Const_t1 Const_7", sizes)):
            for name, t in zip(names.split(), found, strict=False):
                t.name = name.encode()

    found = chipfit.verify_file(edited(file, rename, tmp_path / "named.tflite"), [x])
    assert found.exact and found.integers, str(found)


def test_the_scales_of_vectors_lie_along_their_only_axis_whatever_the_file_says(tmp_path):
    file, x = written(tmp_path)

    def misplace(graph):
        next(t for t in graph.tensors if list(t.shape) == [6]).quantization.quantizedDimension = 3

    assert chipfit.verify_file(edited(file, misplace, tmp_path / "old.tflite"), [x]).exact


def test_a_linear_layer_may_read_images_without_a_reshape(tmp_path):
    file, x = written(tmp_path)

    def join(graph):
        at = next(k for k, op in enumerate(graph.operators) if graph.tensors[op.outputs[0]].shape.tolist() == [1, 180])
        reshape, linear = graph.operators.pop(at), graph.operators[at]
        linear.inputs = np.array([reshape.inputs[0], *linear.inputs[1:]])

    found = chipfit.verify_file(edited(file, join, tmp_path / "joined.tflite"), [x])
    assert found.exact and not found.float_operators, str(found)


@pytest.mark.parametrize("io", ["float", "int8"])
@pytest.mark.parametrize("act", [nn.ReLU6(), model_of(lambda m, x: torch.atan(x))])  # of which one is a table
def test_a_file_of_our_own_is_verified_without_its_result(tmp_path, act, io):
    file, x = written(tmp_path, act, io=io)
    found = chipfit.verify_file(file, [x])
    assert found.exact and found.rows[-1].sqnr_db > 20
    assert chipfit.verify_file(file, [99 * x]).exact  # of which the grids hold only a part


def test_indices_of_rows_are_not_quantized_as_the_rows_are(tmp_path):
    model = model_of(lambda m, i: m.l(m.e(i.long())), e=nn.Embedding(16, 4), l=nn.Linear(4, 3))
    data = [torch.randint(0, 16, (8, 5), dtype=torch.uint8)]
    file = chipfit.quantize(model, data, "tflite_int8", progress=False).export(tmp_path / "m.tflite")
    assert chipfit.verify_file(file, data).exact


def test_a_scalar_beside_samples_belongs_to_all_of_them(tmp_path):
    tf = pytest.importorskip("tensorflow")
    made = tf.function(lambda x, s: x @ kernel(6, 4) * s, input_signature=[tf.TensorSpec(d) for d in ((1, 6), ())])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([made.get_concrete_function()], tf.Module())
    (tmp_path / "float.tflite").write_bytes(converter.convert())
    model = chipfit.load_model(tmp_path / "float.tflite")
    draws = {name: torch.randn(24, 6) if t.shape else torch.tensor(2.0) for name, t in zip(model.names, model.inputs)}
    data = [tuple(draws.values())]
    result = chipfit.quantize(model, data, "tflite_int8", progress=False)
    assert result.verify(data).exact
    assert chipfit.verify_file(result.export(tmp_path / "m.tflite"), data).exact


def test_what_the_file_holds_is_shown(tmp_path):
    found, platform = read_file(written(tmp_path)[0])
    assert platform.name == "tflite_int8"
    assert [p.exec for p in found.plan.nodes.values() if p.op in ("Conv2D", "Linear")] == ["int", "int"]
    assert all(words in str(found.plan) for words in ("conv2d", "int8", "the file"))


@pytest.mark.parametrize("what", ["weight", "bias", "scale"])
def test_another_network_than_the_file_has_departs_and_is_named(tmp_path, what):
    """A negative control: the simulation gets one number that the file has not."""
    file, x = written(tmp_path)
    found = read_quantized(TfliteModel(file.read_bytes()), "tflite_int8")
    (tmp_path / "named.tflite").write_bytes(found.content)
    name = next(k for k, t in found.plan.tensors.items() if t.role == (what if what != "scale" else "activation"))
    if what == "scale":
        stored = found.plan.tensors[name].stored
        found.plan.tensors[name] = found.plan.tensors[name].with_(scale=stored.scale * 1.01)
    else:
        first = (0,) * found.graph.weights[name].dim()
        found.graph.weights[name][first] += 40 * float(found.plan.tensors[name].scale.max())
    check = verify(found.graph, found.plan, load("tflite_int8"), [x], path=tmp_path / "named.tflite")
    assert check.verdict == "departs" and any(name in d for d in check.departures)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_file_of_our_own_whose_weights_alone_are_integers_computes_the_simulated_floats(tmp_path, runtime):
    torch.manual_seed(0)
    model = sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    data = [torch.randn(8, 32) for _ in range(3)]
    file = chipfit.quantize(model, data, "tflite_dynamic", progress=False).export(tmp_path / "weights.tflite")
    plan = read_file(file)[0].plan
    formats = {t.role: t.stored.format for t in plan.tensors.values()}
    assert formats == {"weight": "int8"} and sum("when it runs" in n.why for n in plan.nodes.values()) == 2
    found = chipfit.verify_file(file, data, runtime=runtime)
    assert found.exact and read_file(file)[1].name == "tflite_dynamic" and len(found.outputs) == 2
    again = chipfit.load_model(file, requantize=True)
    assert chipfit.quantize(again, data, platform="tflite_int8", progress=False).verify(data[:1]).exact


def pixels(tf, x):
    """Convolutions of single pixels from an input and from inner values, strides, and a depthwise one."""
    y = tf.nn.relu6(tf.nn.conv2d(x, kernel(1, 1, 32, 40), 1, "VALID") + kernel(40))
    y = tf.nn.conv2d(y, kernel(3, 3, 40, 32), 2, "SAME") + kernel(32)
    y = tf.nn.relu(tf.nn.depthwise_conv2d(y, kernel(3, 3, 32, 4), [1, 1, 1, 1], "SAME") + kernel(128))
    z = tf.nn.conv2d(y, kernel(1, 1, 128, 24), 2, "VALID")
    y = z + tf.nn.conv2d(y, kernel(1, 1, 128, 24), 1, "VALID")[:, ::2, ::2]
    return tf.matmul(tf.reduce_mean(y, [1, 2]), kernel(24, 64)) + kernel(64)


def rows(tf, x):
    y = tf.nn.relu(tf.matmul(tf.reshape(x, [-1, 32]), kernel(32, 64)) + kernel(64))
    y = tf.nn.conv2d(tf.reshape(y, [1, 5, 7, 64]), kernel(1, 1, 64, 32), 1, "VALID")  # behind a change of shape
    return tf.matmul(tf.reshape(y, [-1, 35 * 32]), kernel(35 * 32, 8))


def turned(tf, x):
    return tf.nn.conv2d_transpose(x, kernel(3, 3, 40, 32), [1, 16, 12, 40], 2, "SAME")


def dynamic_file(tmp_path, network, *shape):
    """Return a file of TensorFlow's converter whose weights alone are integers."""
    tf = pytest.importorskip("tensorflow")
    return tensorflow_file(lambda x: network(tf, x), [1, *shape], tmp_path / "dynamic.tflite", optimized=True)


@pytest.mark.parametrize("network", [pixels, rows])
def test_integers_that_kernels_find_at_run_time_are_simulated_as_xnnpack_finds_them(network, tmp_path):
    file = dynamic_file(tmp_path, network, 7, 5, 32)
    x = np.random.default_rng(3).normal(size=(3, 7, 5, 32)).astype("f4") + np.arange(3, dtype="f4").reshape(3, 1, 1, 1)
    found = chipfit.verify_file(file, [torch.from_numpy(x)])
    assert found.exact and sum(o.inner for o in found.outputs) == (4 if network is pixels else 2)
    per = {n.attrs["per"] for n in read_file(file)[0].graph.nodes if n.op == "DynamicQuantize"}
    assert per == ({"pixel", "sample", "row"} if network is pixels else {"pixel", "row"})


def test_a_kernel_that_finds_integers_in_another_way_is_named(tmp_path):
    file = dynamic_file(tmp_path, turned, 8, 6, 32)
    with pytest.raises(UnsupportedError, match=r"Only weights.*TRANSPOSE_CONV.*not simulated.*--requantize"):
        chipfit.verify_file(file, [torch.randn(1, 8, 6, 32)])


def test_a_file_without_integers_is_refused(tmp_path):
    with pytest.raises(CaptureError, match=r"read by their suffix.*\.tflite"):
        chipfit.verify_file(tmp_path / "m.h5", [])
    file = float_file(nn.Linear(4, 3), [torch.randn(2, 4)], tmp_path / "float.tflite")
    with pytest.raises(CaptureError, match=r"The file is not quantized.*chipfit\.quantize"):
        chipfit.verify_file(file, [torch.randn(2, 4)])
