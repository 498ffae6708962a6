"""A `.tflite` file in the making, and what is read back from it."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

import chipfit
from chipfit.export.tflite.arena import arena, tensor_memory
from chipfit.export.tflite.c_array import header
from chipfit.export.tflite.file import INT4, TYPES, File, Quantization, pack_4_bits
from chipfit.export.tflite.metadata import metadata
from chipfit.export.tflite.read_back import array_of, read_back
from chipfit.frameworks.tflite.variables import packed
from tests.export.test_io_spec import Table

FLOAT, INT8, INT16, INT32 = (TYPES[k] for k in ("float32", "int8", "int16", "int32"))


def read(content: bytes):
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))


def chain(*sizes: int, kind: int = INT8, skip: bool = False) -> bytes:
    """x0 -> x1 -> ...: so many numbers each; with `skip` the last reads the first too."""
    file = File()
    made = [file.tensor(f"x{k}", (1, n), kind) for k, n in enumerate(sizes)]
    for a, b in itertools.pairwise(made):
        more = [made[0]] if skip and b == made[-1] else []
        file.op("CONCATENATION", [a, *more], b, axis=1)
    return file.content({"x": made[0]}, {"y": made[-1]}, {})


@pytest.mark.parametrize(
    "content, places",
    [
        (chain(16), 16),
        (chain(1), 16),  # aligned to 16 bytes
        (chain(17), 32),
        (chain(16, 32), 48),
        (chain(16, 16, 32), 48),  # 64 if the small ones had the first choice
        (chain(32, 64, 16), 96),  # the last takes the place of the first
        (chain(32, 64, 48), 112),  # or half of it and what lies behind
        (chain(16, 16, 16, 16), 32),
        (chain(16, 16, 16, 16, skip=True), 48),
        (chain(5, 3, kind=INT32), 48),
        (chain(33, kind=INT4), 32),  # two to a byte, the last alone
        (chain(32, kind=INT4), 16),
    ],
)
def test_tensors_share_memory_where_they_live_at_different_times(content, places):
    assert tensor_memory(content) == places


def test_constants_take_no_memory_and_alignment_is_a_choice():
    file = File()
    x, y = file.tensor("x", (1, 20), INT8), file.tensor("y", (1, 20), INT8)
    file.op("ADD", [x, file.constant(np.ones((1, 20), np.int8))], y)
    content = file.content({"x": x}, {"y": y}, {})
    assert [tensor_memory(content, a) for a in (1, 16, 64)] == [40, 64, 128]
    file = File()
    scalar = file.tensor("x", (), FLOAT)
    assert tensor_memory(file.content({"x": scalar}, {"x": scalar}, {})) == 16
    assert tensor_memory(file.content({"x": scalar}, {"x": scalar}, {}), 1) == 4


@pytest.mark.parametrize("name, taken", [("my-net 2", "my_net_2"), ("3x", "_3x"), ("Füchsin", "F_chsin"), ("a", "a")])
def test_an_array_of_c_has_a_name_that_c_allows(name, taken):
    content = chain(16)
    text = header(content, name)
    assert f"static const unsigned char {taken}[] = {{" in text and f"#ifndef {taken.upper()}_H" in text
    assert f"#define {taken.upper()}_TENSOR_ARENA " in text and "\nalignas(16)\n" in text
    assert f"static const unsigned int {taken}_len = {len(content)};" in text and "_Alignas(16)\n" in text
    rows = [line for line in text.splitlines() if line.startswith("    0x")]
    assert bytes(int(b, 16) for row in rows for b in row.replace("0x", "").strip(" ,").split(",")) == content


def test_the_arena_of_an_array_of_c_is_the_least_with_which_the_interpreter_loads_it(tmp_path, monkeypatch):
    micro = pytest.importorskip("tflite_micro.python.tflite_micro").runtime
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 4)).eval()
    result = chipfit.quantize(net, torch.randn(8, 3, 16, 16), platform="tflm_cmsis_nn", progress=False)
    content = result.export(tmp_path / "net.tflite", io="int8", batch=1).read_bytes()

    def size() -> int:
        text = result.export(tmp_path / "net.h", io="int8", batch=1).read_text()
        return int(re.search(r"NET_TENSOR_ARENA (\d+)", text)[1])

    needed = size()
    micro.Interpreter.from_bytes(content, arena_size=needed)
    with pytest.raises(RuntimeError):
        micro.Interpreter.from_bytes(content, arena_size=needed - 16)
    monkeypatch.setattr("chipfit.registry.importlib.util.find_spec", lambda name: None)
    predicted = int(re.search(r"ARENA (\d+)", header(content, "net"))[1])
    assert predicted == arena(content).total == pytest.approx(needed, rel=0.05)
    assert tensor_memory(content) == arena(content).tensors < predicted


def test_codes_of_4_bits_are_packed_and_read_with_their_sign():
    codes = np.array([[-8, 7, -1], [0, 3, -5]])
    assert pack_4_bits(codes).tolist() == [0x78, 0x0F, 0xB3]
    assert pack_4_bits(codes[:, :1]).tolist() == [0x08] and pack_4_bits(codes[0]).tolist() == [0x78, 0x0F]
    for shape in ((2, 3), (3, 1), (5,), ()):
        t = schema.TensorT()
        t.shape, t.type = np.array(shape, np.int32), INT4
        q = np.arange(-8, -8 + int(np.prod(shape))).reshape(shape)
        found = array_of(pack_4_bits(q).tobytes(), t)
        assert np.array_equal(found, q) and found.shape == shape


def test_equal_constants_are_one_tensor_and_others_are_not():
    file = File()
    a = file.ints(1, 2)
    assert file.ints(1, 2) == a != file.ints(2, 1)
    assert file.constant(np.array([1, 2], np.int64)) != a and file.constant(np.array([[1, 2]], np.int32)) != a
    named = file.constant(np.array([1, 2], np.int32), "b")
    assert named != a and file.index["b"] == named
    half, one = (Quantization(np.float32(s), np.int64(0)) for s in (0.5, 1.0))
    q = np.array([1, 2])
    assert file.constant(q, "w", INT8, half) != file.constant(q, "w", INT8, one) == file.constant(q, "w", INT8, one)
    assert file.scalar(2.5) == file.scalar(2.5) and file.tensors[file.scalar(2.5)].shape.tolist() == []
    assert len({t.name for t in file.tensors}) == len(file.tensors)


def test_an_option_that_the_schema_has_not_is_an_error():
    file = File()
    x = file.tensor("x", (1, 2), FLOAT)
    with pytest.raises(AttributeError, match="SoftmaxOptions has no field alpha"):
        file.op("SOFTMAX", [x], x, alpha=1.0)
    file.op("SOFTMAX", [x], x, beta=2.0)
    assert file.operators[-1].builtinOptions.beta == 2.0


def test_only_tensors_that_something_needs_are_in_the_file():
    file = File()
    x, unused, y = (file.tensor(n, (1, 3), FLOAT) for n in ("x", "unused", "y"))
    file.op("ADD", [x, file.constant(np.arange(3, dtype=np.float32), "held")], y)
    notes = {"chipfit": json.dumps({"a": 1}).encode(), "b": b"second"}
    content = file.content({"in": x}, {"out": y}, notes)
    model = read(content)
    (g,), (signature,) = model.subgraphs, model.signatureDefs
    names = [t.name for t in g.tensors]
    assert names == [b"x", b"held", b"y"] and unused != x  # as TFLiteConverter orders them: inputs, constants, results
    assert [names[k] for k in (*g.inputs, *g.outputs, *g.operators[0].inputs)] == [b"x", b"y", b"x", b"held"]
    ends = [(t.name, names[t.tensorIndex]) for t in (*signature.inputs, *signature.outputs)]
    assert ends == [(b"in", b"x"), (b"out", b"y")] and signature.signatureKey == b"serving_default"
    assert model.version == 3 and content[4:8] == b"TFL3" and model.description.startswith(b"chipfit ")
    assert {m.name.decode(): bytes(model.buffers[m.buffer].data) for m in model.metadata} == notes


C4, K4 = (1, 4, 4, 4), (8, 3, 3, 4)  # an image and a kernel of four channels


@pytest.mark.parametrize(
    "kind, operands, options, version",
    [  # as op_version.cc of TensorFlow Lite has them
        ("CONV_2D", [(FLOAT, C4), (FLOAT, K4)], {}, 1),
        ("CONV_2D", [(INT8, C4), (INT8, K4)], {}, 3),
        ("CONV_2D", [(INT8, C4), (INT4, K4)], {}, 7),
        ("CONV_2D", [(INT8, C4), (INT8, (8, 3, 3, 2))], {}, 6),  # two groups
        ("CONV_2D", [(FLOAT, C4), (INT8, K4, 8)], {}, 5),  # a kernel that rounds floats; 8 scales
        ("CONV_2D", [(FLOAT, C4), (INT8, K4, 1)], {}, 2),
        ("DEPTHWISE_CONV_2D", [(FLOAT, C4), (FLOAT, (1, 3, 3, 4))], {"dilationHFactor": 2}, 2),
        ("DEPTHWISE_CONV_2D", [(INT8, C4), (INT8, (1, 3, 3, 4))], {"dilationHFactor": 2}, 3),
        ("FULLY_CONNECTED", [(FLOAT, (1, 4)), (FLOAT, (8, 4))], {}, 1),
        ("FULLY_CONNECTED", [(INT8, (1, 4)), (INT8, (8, 4), 8), (INT32, (8,))], {}, 4),
        ("FULLY_CONNECTED", [(INT8, (1, 2, 4)), (INT8, (8, 4))], {"keepNumDims": True}, 5),
        ("FULLY_CONNECTED", [(INT8, (1, 4)), (INT4, (8, 4))], {}, 10),
        ("FULLY_CONNECTED", [(FLOAT, (1, 4)), (INT8, (8, 4), 8)], {}, 12),
        ("FULLY_CONNECTED", [(FLOAT, (1, 4)), (INT8, (8, 4), 1)], {}, 3),
        ("TRANSPOSE_CONV", [(INT32, (4,)), (INT8, K4), (INT8, C4)], {}, 2),
        ("TRANSPOSE_CONV", [(INT32, (4,)), (INT8, K4), (INT8, C4), (INT32, (8,))], {}, 3),
        ("TRANSPOSE_CONV", [(INT32, (4,)), (INT8, K4), (INT8, C4), (INT32, (8,))], {"fusedActivationFunction": 1}, 4),
        ("MUL", [(INT8, C4, 1), (INT8, C4, 1)], {}, 3),  # the scales multiply to that of the result, 1.0
        ("MUL", [(INT8, C4), (INT8, C4)], {}, 2),
        ("MAXIMUM", [(FLOAT, (1, 1, 1, 1, 4)), (FLOAT, (4,))], {}, 3),
        ("SUB", [(INT8, C4), (INT8, (4,))], {}, 2),
        ("SPLIT", [(INT32, ()), (INT8, C4)], {}, 2),  # its data come second
        ("SUM", [(INT8, C4), (INT32, (2,))], {}, 2),
        ("TRANSPOSE", [(FLOAT, (1, 1, 2, 2, 4)), (INT32, (5,))], {}, 4),
        ("GATHER", [(FLOAT, C4), (INT32, (2,))], {"batchDims": 1}, 5),
        ("RESIZE_BILINEAR", [(INT8, C4), (INT32, (2,))], {}, 2),
        ("RESIZE_BILINEAR", [(INT8, C4), (INT32, (2,))], {"halfPixelCenters": True}, 3),
        ("RESIZE_NEAREST_NEIGHBOR", [(INT8, C4), (INT32, (2,))], {"alignCorners": True}, 3),
        ("DEQUANTIZE", [(INT8, C4)], {}, 2),
        ("DEQUANTIZE", [(INT8, C4, 4)], {}, 5),
        ("MEAN", [(INT16, C4), (INT32, (2,))], {}, 3),
        ("PRELU", [(INT8, C4), (INT8, (4,))], {}, 1),
        ("RESHAPE", [(INT8, C4), (INT32, (2,))], {}, 1),
        ("BROADCAST_TO", [(FLOAT, C4), (INT32, (4,))], {}, 2),
        ("BROADCAST_TO", [(INT8, C4), (INT32, (4,))], {}, 3),
        ("FLOOR_DIV", [(FLOAT, C4), (FLOAT, C4)], {}, 2),
    ],
)
def test_an_operator_has_the_least_version_that_its_operands_and_options_need(kind, operands, options, version):
    file = File()
    ids = [
        file.tensor(f"x{k}", shape, t, Quantization(np.ones(*n), np.zeros(*n, np.int64)) if n else None)
        for k, (t, shape, *n) in enumerate(operands)
    ]
    one = Quantization(np.ones(1), np.zeros(1, np.int64)) if kind == "MUL" else None
    file.op(kind, [*ids, -1], y := file.tensor("y", (1, 4), operands[0][0], one), **options)
    model = read(file.content({"x": ids[0]}, {"y": y}, {}))
    assert model.operatorCodes[0].version == version
    assert model.subgraphs[0].operators[0].inputs.tolist() == [*range(len(ids)), -1]


def test_a_result_of_16_bits_needs_the_second_version_of_quantize():
    for kind, version in ((INT8, 1), (INT16, 2)):
        file = File()
        file.op("QUANTIZE", [x := file.tensor("x", (1, 4), FLOAT)], y := file.tensor("y", (1, 4), kind))
        assert read(file.content({"x": x}, {"y": y}, {})).operatorCodes[0].version == version


def test_one_operator_in_two_versions_has_two_codes_and_each_is_found_again():
    file = File()
    x, q, y = file.tensor("x", (1, 2), FLOAT), file.tensor("q", (1, 2), INT8), file.tensor("y", (1, 2), FLOAT)
    for a, b in ((x, y), (q, q), (x, y), (q, q)):
        file.op("CONCATENATION", [a], b, axis=1)
    for kind in ("GELU", "GELU", "ADD"):
        file.op(kind, [x, y], y)
    codes = read(file.content({"x": x}, {"y": y}, {})).operatorCodes
    assert [o.opcodeIndex for o in file.operators] == [0, 1, 0, 1, 2, 2, 3]
    assert [c.version for c in codes] == [1, 2, 1, 1]
    assert [c.builtinCode for c in codes[2:]] == [schema.BuiltinOperator.GELU, schema.BuiltinOperator.ADD]
    assert [c.deprecatedBuiltinCode for c in codes[2:]] == [127, schema.BuiltinOperator.ADD]  # it is a byte


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_of_blocks_are_a_tensor_of_their_own(tmp_path, axis):
    """A matrix of 2 x 6 codes in blocks of 2 of its rows; something that nobody needs lies before it in the making."""
    file = File()
    for k in range(axis):
        file.tensor(f"unused{k}", (1, 3), INT8)
    x = file.tensor("x", (1, 6), FLOAT)
    q = np.array([[-8, 7, 1, 0, 2, 3], [4, -5, 6, -7, -1, -2]])
    scale = np.array([[0.5, 0.25, 4.0], [1.0, 2.0, 0.125]], np.float32)
    w = file.constant(q, "w", INT4, Quantization(scale, np.zeros((2, 3), np.int64)))
    y = file.tensor("y", (1, 2), FLOAT)
    file.op("FULLY_CONNECTED", [x, w, -1], y)
    (tmp_path / "m.tflite").write_bytes(content := file.content({"x": x}, {"y": y}, {}))
    (g,) = read(content).subgraphs
    by_name = {t.name: t for t in g.tensors}
    assert set(by_name) == {b"x", b"w", b"w/scales", b"y"}
    blocks = by_name[b"w"].quantization
    assert blocks.detailsType == schema.QuantizationDetails.BlockwiseQuantization
    assert blocks.details.blockSize == 2 and blocks.details.zeroPoints == -1
    assert g.tensors[blocks.details.scales] is by_name[b"w/scales"]
    found = read_back(tmp_path / "m.tflite")["w"]
    assert np.array_equal(found.values, q)
    ((scales, zeros),) = found.qparams
    assert np.array_equal(scales, scale) and scales.dtype == np.float32 and np.array_equal(zeros, np.zeros((2, 3)))


def test_a_computed_tensor_may_have_an_empty_buffer(tmp_path):
    file = File()
    x, y = file.tensor("x", (1, 2), FLOAT), file.tensor("y", (1, 2), FLOAT)
    file.op("NEG", [x], y)
    model = read(file.content({"x": x}, {"y": y}, {}))
    model.buffers[0].data = np.zeros(0, np.uint8)
    (tmp_path / "m.tflite").write_bytes(packed(model))
    assert {n: t.values for n, t in read_back(tmp_path / "m.tflite").items()} == {"x": None, "y": None}


def test_data_of_any_length_lie_at_multiples_of_16():
    file = File()
    x, y = file.tensor("x", (1,), FLOAT), file.tensor("y", (1,), FLOAT)
    held = [np.full(n, 100 + n, np.uint8) for n in range(1, 40)]
    for k, a in enumerate(held):
        file.op("ADD", [x, file.constant(a, f"c{k}")], y)
    content = file.content({"x": x}, {"y": y}, {})
    for a in held:
        at = content.index(bytes([len(a), 0, 0, 0]) + a.tobytes()) + 4
        assert at % 16 == 0
    model = read(content)
    (g,) = model.subgraphs
    data = {t.name: model.buffers[t.buffer].data for t in g.tensors}
    assert all(bytes(data[f"c{k}".encode()]) == a.tobytes() for k, a in enumerate(held))
    assert data[b"x"] is None and model.buffers[0].data is None


@pytest.mark.parametrize(
    "operators, inputs, outputs, places",
    [
        (["a-b", "bx-y"], "ax", "y", 3),  # x stays beside what the first operator reads and makes
        (["a-b", "b-c", "c-y"], "a", "y", 2),
        (["a-b", "b-c", "c-y"], "za", "y", 2),  # nobody reads z, whose place the first result takes
        (["a-b", "b-c", "c-y"], "a", "yb", 3),  # b stays to the end
        (["x-a", "a-y"], "x", "yx", 3),
        (["x-a", "a-y"], "x", "y", 2),
        (["a-b", "b-C"], "za", "C", 4),  # nobody needs z when C is made, three times as large
    ],
)
def test_inputs_live_from_the_beginning_and_outputs_to_the_end(operators, inputs, outputs, places):
    file = File()
    made = {n: file.tensor(n, (1, 48 if n.isupper() else 16), INT8) for n in "zaxbcyC"}
    for line in operators:
        reads, _, (gives,) = line.partition("-")
        file.op("ADD", [made[i] for i in reads], made[gives])
    assert tensor_memory(file.content({i: made[i] for i in inputs}, {o: made[o] for o in outputs}, {})) == 16 * places


def entries(raw: bytes):
    """The only subgraph's inputs and outputs, as the schema of Android's metadata has them."""
    (graph,) = Table(raw).tables(3)
    return graph.tables(2), graph.tables(3)


def test_labels_belong_to_the_first_output():
    (x,), (y, z) = entries(metadata(["x"], ["y", "z"], {"labels": ["a"]}))
    assert [k for k in range(9) if y.has(k)] == [0, 3, 6]
    (file,) = y.tables(6)
    assert [k for k in range(5) if file.has(k)] == [0, 2]
    assert file.text(0) == "labels.txt" and file.byte(2) == 2  # TENSOR_AXIS_LABELS
    assert not z.has(6) and not x.has(6) and not x.has(4) and x.table(3).byte(0) == 1


def test_selections_one_after_the_other_are_merged_and_those_of_everything_in_order_are_left_out():
    def gathers(*orders: list[int]) -> int:
        file = File()
        made = [file.tensor(f"x{k}", (1, 4), INT8) for k in range(len(orders) + 1)]
        for k, order in enumerate(orders):
            file.pick(made[k], np.array(order), 1, made[k + 1])
        y = file.tensor("y", (1, 4), INT8)
        file.op("LOGISTIC", [made[-1]], y)
        file.merge_picks([y])
        content = file.content({"x": made[0]}, {"y": y}, {})
        return len(read(content).subgraphs[0].operators) - 1

    turned, back = [1, 2, 3, 0], [3, 0, 1, 2]
    assert [gathers(turned), gathers(turned, turned), gathers(turned, back)] == [1, 1, 0]
    assert gathers(turned, back, turned) == 1
    file = File()
    x, y, z = (file.tensor(n, (1, 4), INT8) for n in "xyz")
    file.pick(x, np.array(turned), 1, y)  # an output of the network stays
    file.pick(y, np.array(back), 1, z)
    file.merge_picks([y, z])
    assert len(file.operators) == 2


def test_constants_of_equal_bytes_share_a_buffer_whatever_their_scales():
    file = File()
    x = file.tensor("x", (1, 40), INT32)
    one, half = (
        file.constant(np.zeros(40, np.int32), name, INT32, Quantization(np.float32(s), np.int64(0)))
        for name, s in (("a", 1.0), ("b", 0.5))
    )
    y, z = file.tensor("y", (1, 40), INT32), file.tensor("z", (1, 40), INT32)
    file.op("ADD", [x, one], y)
    file.op("ADD", [y, half], z)
    model = read(file.content({"x": x}, {"z": z}, {}))
    found = {t.name: t for t in model.subgraphs[0].tensors}
    assert one != half and found[b"a"].buffer == found[b"b"].buffer
    assert [float(found[n].quantization.scale[0]) for n in (b"a", b"b")] == [1.0, 0.5]


def test_equal_zero_points_and_texts_are_written_once():
    def size(layers: int) -> int:
        file, n = File(), 1000
        x = file.tensor("x", (1, n), INT8)
        for k in range(layers):
            scales = Quantization(np.arange(1, n + 1, dtype=np.float32) + k, np.zeros(n, np.int64))
            w = file.constant(np.zeros(n, np.int8), f"w{k}", INT8, scales)
            y = file.tensor(f"y{k}", (1, n), INT8)
            file.op("ADD", [x, w], y)
            x = y
        content = file.content({"x": 0}, {f"y{layers - 1}": x}, {})
        tensors = read(content).subgraphs[0].tensors
        found = {t.name.decode(): t.quantization for t in tensors}
        assert [float(found[f"w{k}"].scale[0]) for k in range(layers)] == [1.0 + k for k in range(layers)]
        assert all(len(found[f"w{k}"].zeroPoint) == n and not any(found[f"w{k}"].zeroPoint) for k in range(layers))
        return len(content)

    assert size(5) - size(4) < 4 * 1000 + 500  # the scales of a layer, no zero points of 8 bytes
