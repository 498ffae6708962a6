"""OpenVINO: a file that it does not take."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from chipfit.errors import RuntimeUnavailable
from chipfit.runtimes.openvino import OpenVino

pytest.importorskip("openvino")


def file_of(op: str, path):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 2]) for n in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_file_with_an_operator_that_openvino_does_not_know_is_refused_by_name(tmp_path):
    runs = OpenVino(file_of("Relu", tmp_path / "good.onnx"))
    assert runs.run([np.float32([[-1, 2]])])["y"].tolist() == [[0, 2]]
    path = file_of("NoSuchOperator", tmp_path / "bad.onnx")
    with pytest.raises(RuntimeUnavailable, match=r"^OpenVINO refuses the file: .+ Where: .*bad\.onnx"):
        OpenVino(path)
