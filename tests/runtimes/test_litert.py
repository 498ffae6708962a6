"""A loaded `.tflite` file: what it refuses, how it cuts batches up, which operators it runs."""

import contextlib
import json

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from chipfit.errors import RuntimeUnavailable
from chipfit.export.tflite.file import TYPES, File, Quantization
from chipfit.export.tflite.writer import export_tflite
from chipfit.frameworks.tflite.variables import packed
from chipfit.frameworks.torch.capture import capture
from chipfit.registry import lookup
from chipfit.runtimes import dequantize_output, divided, join_parts, quantize_input
from chipfit.runtimes.litert import LiteRt, LiteRtOptimized, LiteRtReference
from tests.build import graph_of, model_of
from tests.simulate.one_operator import Codes, one


def changed(path, change):
    """The same file after a change of its model."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    change(model, model.subgraphs[0])
    path.write_bytes(packed(model))
    return path


def requantized(tmp_path, kind: str, zero: int):
    """QUANTIZE from a type to another, written here."""
    file = File()
    x = file.tensor("x", (1, 4), TYPES[kind], Quantization(np.float32(0.5), np.int64(zero)))
    y = file.tensor("y", (1, 4), TYPES[kind], Quantization(np.float32(0.25), np.int64(zero)))
    file.op("RESHAPE", [x, file.ints(1, 4)], y, newShape=[1, 4])
    path = tmp_path / "m.tflite"
    path.write_bytes(file.content({"x": x}, {"y": y}, {}))
    return path


@pytest.mark.parametrize("kind, low, high", [("int8", -128, 127), ("uint8", 0, 255), ("int16", -32768, 32767)], ids=str)
def test_a_zero_point_is_a_code_of_its_type(tmp_path, kind, low, high):
    for zero in (low, high):
        LiteRt(requantized(tmp_path, kind, zero))
    for zero in (low - 1, high + 1):
        with pytest.raises(RuntimeUnavailable, match="The scale or zero point of tensor 'x' is out of range"):
            LiteRt(requantized(tmp_path, kind, zero))


@pytest.mark.parametrize("zero, valid", [(-8, True), (7, True), (-9, False), (8, False)])
def test_a_zero_point_of_4_bits_is_a_code_too(tmp_path, zero, valid):
    file = File()
    x, y, z = (file.tensor(n, s, TYPES["float32"]) for n, s in (("x", (1, 2)), ("y", (1, 2)), ("z", (2,))))
    qparams = Quantization(np.float32(1), np.int64(zero))
    file.op("RESHAPE", [x, file.ints(1, 2)], y, newShape=[1, 2])
    file.op("DEQUANTIZE", [file.constant(np.array([1, 2]), "held", schema.TensorType.INT4, qparams)], z)
    (tmp_path / "m.tflite").write_bytes(file.content({"x": x}, {"y": y, "z": z}, {}))
    refused = pytest.raises(RuntimeUnavailable, match="zero point of tensor 'held' is out of range")
    with contextlib.nullcontext() if valid else refused:
        LiteRt(tmp_path / "m.tflite")


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_is_positive_and_finite(tmp_path, scale):
    def change(model, graph):
        graph.tensors[0].quantization.scale = np.array([scale], np.float32)

    with pytest.raises(RuntimeUnavailable, match="is out of range"):
        LiteRt(changed(requantized(tmp_path, "int8", 0), change))


@pytest.fixture
def added(tmp_path):
    """x + x, and twice of it, of which the notes say how inputs and results lie."""
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), (torch.randn(2, 3, 5, 7),))
    return graph, export_tflite(graph, None, tmp_path / "m.tflite")


def noted(path, change):
    """The same file with other notes."""

    def edit(model, graph):
        notes = next(m for m in model.metadata if m.name == b"chipfit")
        said = json.loads(bytes(model.buffers[notes.buffer].data))
        change(said)
        model.buffers[notes.buffer].data = np.frombuffer(json.dumps(said).encode(), np.uint8)

    return changed(path, edit)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda n: n.update(inputs=[[0, 2, 3]]), "do not fit its tensors"),
        (lambda n: n.update(inputs=[[0, 1, 2, 4]]), "do not fit its tensors"),
        (lambda n: n.update(inputs=[None, None]), "do not fit its tensors"),
        (lambda n: n.update(outputs=[]), "do not fit its outputs"),
        (lambda n: n.update(outputs=[[None, 4]]), "do not fit its tensors"),
        (lambda n: n.update(outputs=[[None, -1]]), "do not fit its tensors"),
        (lambda n: n.update(outputs=[[[0, 1, 2], 0]]), "do not fit its tensors"),
        *((lambda n, s=s: n.update(images={"input": s}), "do not fit its tensors") for s in ([], [2], [-1, -4], [0])),
        (lambda n: n.update(inputs=3), "malformed"),
        (lambda n: n.update(more=3), "malformed"),
        (lambda n: n.pop("platform"), "malformed"),
        (lambda n: n.pop("outputs"), None),
        (lambda n: n.update(outputs=[[None]]), None),
        (lambda n: n.update(outputs=[[[1, 1], 0]]), None),
        (lambda n: n.update(forms={"x": ["a"]}), None),
        (lambda n: n.update(batch_axis=[]), None),
    ],
)
def test_notes_that_do_not_fit_are_refused(added, change, words):
    with pytest.raises(RuntimeUnavailable, match=words):
        LiteRt(noted(added[1], change))


@pytest.mark.parametrize("axis, valid", [(0, True), (1, False)])
def test_a_batch_axis_lies_among_those_of_its_tensor(tmp_path, axis, valid):
    path = export_tflite(graph_of("y = Relu(x)", shape=(None,)), None, tmp_path / "m.tflite")
    file = noted(path, lambda n: n.update(outputs=[[None, axis]]))
    with contextlib.nullcontext() if valid else pytest.raises(RuntimeUnavailable, match="do not fit its tensors"):
        LiteRt(file)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_batch_behind_other_axes_are_put_together_in_the_models_order(axis):
    whole = np.arange(2 * 3 * 5 * 4).reshape(2, 3, 5, 4)  # [2, front, samples, 4]
    whole = whole[0] if axis == 0 else whole
    parts = [np.take(whole, k, axis + 1) for k in ([0, 1], [2, 3], [4])]
    merged = [p.reshape(*p.shape[:axis], -1, 4) for p in (whole, *parts)]
    assert np.array_equal(join_parts(merged[1:], axis, 3), merged[0])
    assert not np.array_equal(join_parts(merged[1:], axis, 1), merged[0]), "the samples' own order is another"


@pytest.mark.parametrize("front, shape", [(0, (6,)), (-1, (6,)), (4, (6,)), (2, ())])
def test_axes_in_front_of_samples_that_do_not_fit_are_refused(front, shape):
    with pytest.raises(RuntimeUnavailable, match="do not fit its tensors"):
        join_parts([np.zeros(shape), np.ones(shape)], 0, front)


@pytest.mark.parametrize("call, want", [("Abs(x)", [3, 0, 4]), ("Sign(x)", [-1, 0, 1]), ("Pow(x, k)", [9, 0, 16])])
def test_integers_of_64_bits_reach_kernels_of_32(tmp_path, call, want):
    types, power = {"x": "int64", "y": "int64"}, {"k": torch.tensor([2])}
    graph = graph_of(f"y = {call}", weights=power, shape=(None, 3), dtypes=types)
    path = export_tflite(graph, None, tmp_path / "m.tflite")
    (got,) = LiteRt(path).run([np.array([[-3, 0, 4]])]).values()
    assert got.dtype == np.int64 and got.tolist() == [want]


def test_what_depends_on_no_sample_is_read_once_from_a_file_of_one_sample(tmp_path):
    table = {"w": torch.tensor([[1.5, -2.0, 0.25]])}
    graph = graph_of("k = Relu(w)", "y = Add(x, k)", weights=table, shape=(None, 3))
    path = export_tflite(graph, None, tmp_path / "m.tflite", batch=1)
    got = LiteRt(path, ["k", "y"]).run([np.ones((4, 3), np.float32)])
    assert got["k"].tolist() == [[1.5, 0, 0.25]] and got["y"].tolist() == [[2.5, 1, 1.25]] * 4


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m, g: setattr(g, "outputs", []), "missing from the file"),
        (lambda m, g: setattr(g, "outputs", np.array([len(g.tensors)], np.int32)), "missing from the file|refuses"),
        (lambda m, g: setattr(m.metadata[0], "buffer", len(m.buffers)), "missing from the file|refuses"),
        (lambda m, g: setattr(m.metadata[0], "buffer", len(m.buffers) + 1), "missing from the file|refuses"),
        (lambda m, g: setattr(g.tensors[0], "name", None), "has no name"),
        (lambda m, g: setattr(m, "subgraphs", None), "holds no network"),
        (lambda m, g: setattr(g, "inputs", None), None),
        (lambda m, g: setattr(g.operators[0], "outputs", None), None),
        (lambda m, g: setattr(m.buffers[m.metadata[0].buffer], "data", None), None),
    ],
)
def test_a_damaged_network_is_refused(added, change, words):
    with pytest.raises(RuntimeUnavailable, match=words):
        LiteRt(changed(added[1], change))


def test_a_file_whose_root_lies_beyond_it_is_refused(added):
    content = bytearray(added[1].read_bytes())
    content[0:4] = (0x80000000).to_bytes(4, "little")
    added[1].write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match="LiteRT refuses the file"):
        LiteRt(added[1])


def test_tensors_that_are_asked_for_come_behind_the_outputs(added):
    graph, path = added
    (y,), inner = graph.outputs, graph.nodes[0].output
    x = torch.randn(2, 3, 5, 7)
    loaded = LiteRt(path, [inner, "no such tensor"])
    got = loaded.run([x.numpy()])
    assert list(got) == [y, inner] and got[inner].shape == (2, 4, 5, 7)
    assert np.array_equal(got[y], np.maximum(got[inner], 0))
    assert list(LiteRt(path, [y]).run([x.numpy()])) == [y]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_fixed_batch_is_run_part_by_part(tmp_path, count):
    torch.manual_seed(0)
    model = nn.ConvTranspose2d(3, 4, 2, 2)
    x = torch.randn(count, 3, 2, 3)
    path = export_tflite(capture(model, (torch.randn(2, 3, 2, 3),)), None, tmp_path / "m.tflite", batch=2)
    (got,) = LiteRt(path).run([x.numpy()]).values()
    np.testing.assert_allclose(got, model(x).detach().numpy(), atol=1e-5)


def test_parts_are_put_together_along_the_axis_of_the_batch(tmp_path):
    def turned(m, x, y):
        z = m.up(x)
        return z.permute(1, 0, 2), z + y.sum()

    torch.manual_seed(0)
    model, x, y = model_of(turned, up=nn.ConvTranspose1d(3, 4, 2, 2)), torch.randn(3, 3, 5), torch.randn(7)
    path = export_tflite(capture(model, (x, y)), None, tmp_path / "m.tflite", batch=1)
    got = LiteRt(path).run([x.numpy(), y.numpy()])
    for found, want in zip(got.values(), model(x, y), strict=True):
        np.testing.assert_allclose(found, want.detach().numpy(), atol=1e-5)


def test_inputs_of_another_rank_are_refused(added):
    with pytest.raises(RuntimeUnavailable, match=r"'input' does not fit the file. Got: \[2, 3, 5\]"):
        LiteRt(added[1]).run([np.zeros((2, 3, 5), np.float32)])
    with pytest.raises(RuntimeUnavailable, match="inputs do not fit the file"):
        LiteRt(added[1]).run([])


def test_one_tensor_may_be_several_outputs(tmp_path):
    twice = model_of(lambda m, x: (x * 2,) * 2)
    path = export_tflite(capture(twice, (torch.randn(2, 3),)), None, tmp_path / "m.tflite")
    got = LiteRt(path).run([np.ones((2, 3), np.float32)])
    assert list(got) == ["mul", "mul:1"] and all((v == 2).all() for v in got.values())


@pytest.mark.parametrize("runtime, ties", [
    (LiteRt, [-2, -2, 0, 0, 2, 2]), (LiteRtOptimized, [-2, -2, 0, 0, 2, 2]), (LiteRtReference, [-3, -2, -1, 1, 2, 3])
])  # fmt: skip
def test_inputs_become_codes_as_the_runtimes_own_kernel_rounds(runtime, ties):
    x = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0, 0])
    assert quantize_input(x, 1.0, 0, np.dtype("int8"), runtime.steps).tolist() == [*ties, 0, 0]
    x, tenth = np.float32([0.35, 0.25, 1.15, 12.65] * 2), np.float32(0.1)
    away = np.trunc(x / tenth + np.float32(0.5))
    want = np.rint(x * (np.float32(1) / tenth)) if runtime is not LiteRtReference else away
    assert runtime.steps(x, tenth).tolist() == want.tolist()
    assert (want != away).any() == (runtime is not LiteRtReference)


def test_what_is_left_of_eights_is_divided():
    x = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert quantize_input(x, 1.0, 0, np.dtype("int16"), LiteRt.wide_steps).tolist() == [-3, -2, -1, 1, 2, 3]
    more = np.concatenate((x, x, x))  # 16 of 18
    assert quantize_input(more, 1.0, 0, np.dtype("int16"), LiteRt.wide_steps).tolist()[14:] == [0, 0, 2, 3]


def test_codes_stay_within_their_type_and_stand_for_reals():
    x = np.float32([-100.0, -1.25, 0.0, 0.75, 100.0])
    assert quantize_input(x, 0.5, 3, np.dtype("int8")).tolist() == [-128, 1, 3, 5, 127]
    assert quantize_input(x, 0.5, 3, np.dtype("uint8")).tolist() == [0, 1, 3, 5, 203]
    assert quantize_input(x, 0.5, 3, np.dtype("uint8")).dtype == np.uint8
    assert dequantize_output(np.uint8([0, 3, 255]), 0.5, 3).tolist() == [-1.5, 0.0, 126.0]
    assert divided(np.float32([0.75, 1.25, -0.3]), np.float32(0.5)).tolist() == [2.0, 2.0, -1.0]


def test_delegated_operators_are_those_between_the_delegates_operands_and_results(tmp_path):
    graph = capture(nn.Sequential(nn.Conv2d(3, 4, 1), nn.LogSoftmax(1), nn.Conv2d(4, 2, 1)), (torch.randn(2, 3, 4, 4),))
    path = export_tflite(graph, None, tmp_path / "m.tflite")
    plain = lookup("runtime", "litert_optimized")(path).executed()
    taken = LiteRt(path).executed()
    assert (plain["CONV_2D"], plain["LOG_SOFTMAX"]) == (2, 1) and not any("XNNPACK" in k for k in plain)
    assert taken["XNNPACK CONV_2D"] == 2 and taken["LOG_SOFTMAX"] == 1 and "XNNPACK LOG_SOFTMAX" not in taken
    assert sum(taken.values()) == sum(plain.values()) and list(taken) == sorted(taken)


def test_codes_that_an_app_hands_over_are_a_tensor_too(tmp_path):
    scaled = one("Requantize", [Codes(torch.arange(-8, 8).reshape(2, 8), 0.5, 1)], Codes(torch.zeros(1), 0.25, 2))
    path = export_tflite(scaled.graph, scaled.plan, tmp_path / "m.tflite", io="int8")
    got = LiteRt(path, ["x0", "y"]).run([x.numpy() for x in scaled.inputs])
    assert list(got) == ["y/float", "y", "x0"]
    assert np.array_equal(got["x0"], np.arange(-8, 8).reshape(2, 8)) and got["x0"].dtype == np.int8
    assert np.array_equal(got["y/float"], (got["y"].astype(np.float32) - 2) * 0.25)
    assert np.array_equal(got["y"], (np.arange(-8, 8).reshape(2, 8) - 1) * 2 + 2)
    assert list(LiteRt(path).run([x.numpy() for x in scaled.inputs])) == ["y/float"]
