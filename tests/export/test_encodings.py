"""Encodings: the plan's numbers in the words of each compiler."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnknownNameError, UnsupportedError
from chipfit.export.encodings import document


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval(), torch.randn(2, 3, 6, 6)


def fit(model, platform):
    return chipfit.quantize(model[0], [model[1]], platform=platform, progress=False)


#: what the tools of these chips read
HOMES = {
    "tensorrt": "tensorrt ort_tensorrt_ep",
    "qualcomm": "snpe qnn_htp ort_qnn_ep qualcomm_aic100",
    "ppl_cuda": "ppl_cuda",
    "ppl_dsp": "ppl_dsp",
    "vitis": "vitis_dpu ryzen_ai_xdna",
    "stpu": "mqbench_stpu",
    "ncnn": "ncnn",
}


@pytest.mark.parametrize(("dialect", "platform"), [(d, p) for d, homes in HOMES.items() for p in homes.split()])
def test_a_platform_gets_its_own_dialect(model, dialect, platform, tmp_path):
    result = fit(model, platform)
    file = result.export(tmp_path / "m.json")
    assert json.loads(file.read_text()) == document(result.plan, dialect)


def test_every_name_is_a_tensor_of_the_file_beside(model, tmp_path):
    result = fit(model, "tensorrt")
    names = json.loads(result.export(tmp_path / "m.json").read_text())["tensorrt"]["blob_range"]
    graph = onnx.load(tmp_path / "m.onnx").graph
    known = {i.name for i in graph.input} | {o for n in graph.node for o in n.output}
    assert names and set(names) <= known
    assert not any(n.op_type == "QuantizeLinear" for n in graph.node)


def test_the_range_is_that_of_the_grid(model):
    result = fit(model, "snpe")
    record = document(result.plan, result.platform.encodings)["activation_encodings"]["input"][0]
    t = result.plan.tensors["input"]
    assert record["bitwidth"] == 8
    assert record["min"] == pytest.approx(float(-t.zero_point * t.scale)) and record["max"] == pytest.approx(
        float((255 - t.zero_point) * t.scale)
    )
    assert record["offset"] == -int(t.zero_point)


def test_fix_positions_are_exponents(model):
    result = fit(model, "vitis_dpu")
    for name, entry in document(result.plan, result.platform.encodings)["fix_info"].items():
        assert 2.0 ** -entry["fix_point"] == float(result.plan.tensors[name].scale)


def test_fix_positions_of_other_scales_are_refused(model):
    with pytest.raises(UnsupportedError, match="power-of-two"):
        document(fit(model, "ort_cpu").plan, "vitis")


def test_an_unknown_dialect_lists_the_known_ones(model):
    with pytest.raises(UnknownNameError, match="tensorrt"):
        document(fit(model, "ort_cpu").plan, "tensort")
