"""Every ONNX operator that has a reader, against the examples that come with the onnx package."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from chipfit.engine.run import run
from chipfit.errors import CaptureError
from chipfit.frameworks import capture, load_model
from chipfit.frameworks.onnx.read import READERS

#: operators with more than one operand of data; of others, operands behind the first are constants
_SEVERAL = set("Add Sub Mul Div Pow Max Min Sum Mean Where MatMul Concat Equal Less Greater And Or Mod Gather".split())
#: beginnings of names whose results are random, whose windows start in padding, or that lack a kernel on the CPU
_LEFT_OUT = (
    "test_training_dropout",
    "test_averagepool_2d_ceil_last_window_starts_on_pad",
    "test_resize_downsample_scales_linear_align_corners",  # ONNX Runtime and the engine take the rounded size
    "test_resize_downsample_scales_cubic_align_corners",
)


def cases():
    with np.errstate(all="ignore"):
        found = load_model_tests(kind="node")
    for case in found:
        nodes = case.model.graph.node if case.model is not None else ()
        kinds = [n.op_type for n in nodes]
        if len(kinds) == 1 and kinds[0] in READERS and not case.name.startswith(_LEFT_OUT) and case.data_sets:
            yield case


def arrays(values):
    return [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else np.asarray(v) for v in values]


@pytest.mark.filterwarnings("ignore")
def test_an_example_of_an_operator_gives_its_numbers_or_is_refused_with_a_reason():
    passed, refused, wrong = [], [], []
    for case in cases():
        (inputs, outputs), *_ = [(arrays(i), arrays(o)) for i, o in case.data_sets]
        if any(a.dtype not in (np.float32, np.int64, np.int32, np.bool_) for a in (*inputs, *outputs)):
            continue
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        count = len(inputs) if model.graph.node[0].op_type in _SEVERAL else 1
        for value, array in [*zip(model.graph.input, inputs, strict=True)][count:]:
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        del model.graph.input[count:]
        given = [torch.from_numpy(np.array(a)) for a in inputs[:count]]
        try:
            graph = capture(load_model(model), given)
        except CaptureError as e:
            refused.append(f"{case.name}: {e}")
            continue
        env = {**graph.weights, **run(graph, given)}
        same = all(
            np.allclose(env[o].numpy(), want, rtol=1e-4, atol=1e-5, equal_nan=True)
            for o, want in zip(graph.outputs, outputs, strict=True)
        )
        (passed if same else wrong).append(case.name)
    assert wrong == []
    assert len(passed) > 300 and len(refused) < 12, refused
