"""Weights of ONNX files: mapped while they are read, held once, and taken from the folder of the file only."""

import sys

import numpy as np
import onnx
import pytest
import torch
from benchmarks import read_files
from benchmarks.measure import grown_mib
from onnx import helper, numpy_helper

import chipfit
from chipfit.errors import CaptureError
from chipfit.frameworks import capture, load_model
from chipfit.frameworks.onnx.stored import without_weights
from tests.onnx_models import onnx_node, onnx_of


def model_with(tensor: onnx.TensorProto) -> onnx.ModelProto:
    """Return y = x + w."""
    return onnx_of("y = Add(x, w)", inputs={"x": ["n", 3]}, constants={"w": tensor})


def outside(dims=(3,), **entries: str) -> onnx.TensorProto:
    """Return a tensor whose numbers are external data."""
    tensor = onnx.TensorProto(name="w", data_type=1, dims=dims, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def refused(model, folder, message):
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CaptureError, match=message):
        load_model(str(folder / "net.onnx"))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the resident size is read from /proc")
@pytest.mark.parametrize("kind", ["convolutions", "products", "external"])
def test_a_file_is_read_in_little_more_memory_than_its_size(kind, tmp_path):
    small = read_files.write(kind, tmp_path / "small" / "net.onnx", 0)
    large = read_files.write(kind, tmp_path / "large" / "net.onnx", 60_000_000)
    size = sum(f.stat().st_size for f in large.parent.iterdir())
    kept = [read_files.read("chipfit", str(small))]
    grown = grown_mib(lambda: kept.append(read_files.read("chipfit", str(large)))) * 2**20
    assert grown < 1.3 * size + 32e6


@pytest.mark.parametrize("inner", [5, 5000])
def test_a_file_without_its_weights_is_the_model_with_external_data(inner, tmp_path):
    """One tensor that is small enough to stay, and one that is not, of each form that files have."""
    w = np.arange(inner * 3, dtype="f4").reshape(inner, 3)
    for tensor in (numpy_helper.from_array(w, "w"), helper.make_tensor("w", 1, w.shape, w.ravel())):
        whole = model_with(tensor).SerializeToString()
        (tmp_path / "net.onnx").write_bytes(whole)
        light, nodes = without_weights(whole, "net.onnx")
        assert nodes == 1 and (len(light) < 300) == (inner == 5000 or len(whole) < 300)
        proto = onnx.ModelProto.FromString(light)
        onnx.load_external_data_for_model(proto, str(tmp_path))
        np.testing.assert_array_equal(numpy_helper.to_array(proto.graph.initializer[0]), w)
        proto.graph.ClearField("initializer")
        other = onnx.ModelProto.FromString(whole)
        other.graph.ClearField("initializer")
        assert proto == other


def test_what_is_no_model_is_left_as_it_is():
    for content in (b"", b"\x00", b"\xff" * 40, b"no model" * 100, bytes(5000)):
        assert without_weights(content, "x") == (content, 0)


def test_weights_of_16_bits_and_double_precision_are_read(tmp_path):
    for kind in ("f2", "f8"):
        w = np.linspace(-1, 1, 30_000).reshape(10_000, 3).astype(kind)
        model = model_with(numpy_helper.from_array(w, "w"))
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(w.dtype)
        onnx.save(model, tmp_path / "net.onnx")
        graph = capture(load_model(str(tmp_path / "net.onnx")), (torch.randn(10_000, 3),))
        np.testing.assert_array_equal(graph.weights["w"], w.astype("f4"))


def test_a_file_that_changed_after_it_was_loaded_is_refused(tmp_path):
    file = tmp_path / "net.onnx"
    onnx.save(model_with(numpy_helper.from_array(np.ones((4000, 3), "f4"), "w")), file)
    model = load_model(str(file))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CaptureError, match=r"file has changed.*net.onnx.*load the model again"):
        chipfit.lint(model, torch.randn(4000, 3))


# ---------------------------------------------------------------- places of external data


@pytest.mark.parametrize(
    "location", ["../secret.bin", "{root}/secret.bin", "in/../../secret.bin", "link.bin", "", "a\0b"]
)
def test_external_data_outside_the_folder_are_refused(location, tmp_path):
    (tmp_path / "secret.bin").write_bytes(bytes(12))
    (folder := tmp_path / "model").mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    refused(model_with(outside(location=location.format(root=tmp_path))), folder, "lie elsewhere")


def test_an_absolute_path_into_the_folder_is_refused(tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(12))
    refused(model_with(outside(location=str(tmp_path / "w.bin"))), tmp_path, "lie elsewhere")


def test_a_name_of_any_length_leaves_a_message_that_can_be_read(tmp_path):
    model = model_with(outside(location="w" * 1_000_000))
    refused(model, tmp_path, r"w \.\.\. \[1,000,0\d\d characters\] \.\.\. w{50}")
    with pytest.raises(CaptureError) as caught:
        load_model(str(tmp_path / "net.onnx"))
    assert len(str(caught.value)) < 1000


def test_external_data_of_tensors_in_functions_and_inner_graphs_are_checked_too(tmp_path):
    constant = onnx_node("y = Constant()", value=outside(location="../secret.bin"))
    model = model_with(numpy_helper.from_array(np.ones(3, "f4"), "w"))
    model.functions.append(helper.make_function("own", "F", [], ["y"], [constant], [helper.make_opsetid("", 17)]))
    refused(model, tmp_path, "lie elsewhere")
    inner = helper.make_graph([constant], "inner", [], [helper.make_tensor_value_info("y", 1, None)])
    model = model_with(numpy_helper.from_array(np.ones(3, "f4"), "w"))
    model.graph.node.append(onnx_node("z = If(c)", then_branch=inner, else_branch=inner))
    model.graph.output.append(helper.make_tensor_value_info("z", 1, None))
    refused(model, tmp_path, "lie elsewhere")


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"offset": "-4"}, "place of the data of 'w' is malformed.*-4"),
        ({"length": "twelve"}, "place of the data of 'w' is malformed.*twelve"),
        ({"length": "8"}, "'w' does not fit its shape.*8 bytes.*12 for"),
        ({"offset": "4"}, "is cut off.*12 bytes.*at least 16"),
        ({"offset": "9" * 18}, "is cut off"),
        ({"location": "missing.bin"}, "does not exist"),
        ({"location": "."}, "is a folder"),
    ],
)
def test_external_data_that_cannot_be_are_refused(entries, message, tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(12))
    refused(model_with(outside(**{"location": "w.bin", **entries})), tmp_path, message)


@pytest.mark.parametrize("dims", [(-3,), (2**40, 2**40), (3, -1), (0,)])
def test_shapes_that_the_bytes_do_not_have_are_refused(dims, tmp_path):
    (tmp_path / "w.bin").write_bytes(bytes(12))
    refused(model_with(outside(dims, location="w.bin", length="12")), tmp_path, "does not fit its shape")
    tensor = onnx.TensorProto(name="w", data_type=1, dims=dims, raw_data=bytes(12))
    refused(model_with(tensor), tmp_path, "does not fit its shape")
