"""Encodings: numbers worked out on paper in the words of each compiler."""

import json
from dataclasses import replace

import onnx
import pytest
import torch
from torch import nn

from chipfit.errors import UnknownNameError, UnsupportedError
from chipfit.export.encodings import document
from chipfit.quantizers.grids import Grid
from tests.build import plan_of, quantized, sequential, stored

# ---------------------------------------------------------------- files of platforms


def fit(platform):
    torch.manual_seed(0)
    return quantized(sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.randn(2, 3, 6, 6), platform)


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
def test_a_platform_gets_its_own_dialect(dialect, platform, tmp_path):
    result = fit(platform)
    assert result.export(tmp_path / "m.json").read_text() == json.dumps(document(result.plan, dialect), indent=1)


def test_every_name_is_a_tensor_of_the_float_model_beside(tmp_path):
    names = json.loads(fit("tensorrt").export(tmp_path / "m.json").read_text())["tensorrt"]["blob_range"]
    graph = onnx.load(tmp_path / "m.onnx").graph
    known = {i.name for i in graph.input} | {o for n in graph.node for o in n.output}
    assert names and set(names) <= known
    assert not any("Quantize" in n.op_type for n in graph.node)


def test_another_dialect_is_an_option_and_an_unknown_one_lists_those_known(tmp_path):
    result = fit("ort_cpu")
    path = result.export(tmp_path / "m.json", dialect="ncnn")
    assert json.loads(path.read_text()) == document(result.plan, "ncnn")
    with pytest.raises(UnknownNameError, match="encodings dialect.*tensorrt"):
        result.export(tmp_path / "n.json", dialect="tensort")


# ---------------------------------------------------------------- numbers on paper


def on(grid, scale, zero=0, axis=None):
    return stored(scale, zero, on=grid, axis=axis, format="f")


U8, S8 = Grid(bits=8, qmin=0, qmax=255, zero="any"), Grid(bits=8, qmin=-128, qmax=127)
S16 = Grid(bits=16, qmin=-32768, qmax=32767)
LUT = Grid(bits=4, qmin=0, qmax=2, kind="lut", table=(-1.0, 0.0, 0.5))
#: x: codes 0..255, 0.0 at 96: -48 to 79.5. w: two channels of -128..127: -32 to 31.75, and -128 to 127. b: 16 bits
TENSORS = plan_of(x=on(U8, 0.5, 96), w=on(S8, [0.25, 1.0], axis=0), b=on(S16, [0.125, 0.5]), f=None)
PLAN = replace(TENSORS, platform="paper")
X_ENDS, W_ENDS = {"min": -48.0, "max": 79.5}, {"min": [-32.0, -128.0], "max": [31.75, 127.0]}
PPL = {"bit_width": 8, "quant_flag": True}


@pytest.mark.parametrize(
    "dialect, want",
    [
        ("tensorrt", {"tensorrt": {"blob_range": {"x": 79.5}}}),
        ("nnie", {"nnie": {"gfpq": {"x": 79.5, "w": 128.0}}}),
        ("ncnn", {"scales": {"x": [2.0], "w": [4.0, 1.0]}}),
        ("stpu", {"x": X_ENDS, "w": W_ENDS}),
        (
            "ppl_cuda",
            {
                "x": {**PPL, "per_channel": False, "sym": False, **X_ENDS},
                "w": {**PPL, "per_channel": True, "sym": True, **W_ENDS},
            },
        ),
        (
            "ppl_dsp",
            {
                "x": {"step": 0.5, "zero_point": 96, "bit": 8, "type": "biased", **X_ENDS},
                "w": {"step": [0.25, 1.0], "zero_point": [0, 0], "bit": 8, "type": "weight", **W_ENDS},
            },
        ),
        (
            "vitis",
            {
                "x": {"bit_width": 8, "fix_point": 1},
                "w": {"bit_width": 8, "fix_point": [2, 0]},
                "b": {"bit_width": 16, "fix_point": [3, 1]},
            },
        ),
    ],
)
def test_each_compiler_gets_the_numbers_it_wants(dialect, want):
    found = document(PLAN, dialect)
    inner = {"ppl_cuda": "ppl-cuda", "ppl_dsp": "ppl", "vitis": "fix_info"}.get(dialect)
    assert (found[inner] if inner else found) == want


def test_qualcomm_wants_minus_the_code_of_zero_counted_from_the_lowest():
    """min = scale (offset + 0), max = scale (offset + 255) for 8 bits, signed or not. AIMET encodings 0.6.1."""
    d = document(PLAN, "qualcomm")
    (x,) = d["activation_encodings"]["x"]
    numbers = {"bitwidth": 8, "scale": 0.5, "offset": -96, **X_ENDS}
    assert x == numbers | {"is_symmetric": "False", "dtype": "int"} and d["version"] == "0.6.1"
    first, second = d["param_encodings"]["w"]
    assert (first["min"], first["max"], first["scale"], first["offset"]) == (-32.0, 31.75, 0.25, -128)
    assert (second["min"], second["max"], second["scale"], second["offset"]) == (-128.0, 127.0, 1.0, -128)
    assert first["is_symmetric"] == "True" and d["param_encodings"]["b"][1]["bitwidth"] == 16
    assert d["param_encodings"]["b"][1]["min"] == -16384.0 and set(d["param_encodings"]) == {"w", "b"}
    for r in (x, first, second):
        assert r["min"] == r["scale"] * r["offset"] and r["max"] == r["scale"] * (r["offset"] + 255)


@pytest.mark.parametrize("low, zero, offset", [(0, 7, -7), (3, 7, -7), (-128, 7, -135), (-100, 7, -107)])
def test_the_offset_of_qualcomm_counts_from_the_lowest_code_of_signed_grids_and_else_from_0(low, zero, offset):
    grid = Grid(bits=8, qmin=low, qmax=127, zero="any")
    ((record,),) = document(plan_of(x=on(grid, 0.5, zero)), "qualcomm")["activation_encodings"].values()
    assert record["offset"] == offset


def test_everything_is_in_the_own_dialect():
    d = document(PLAN, "generic")
    assert d == document(PLAN) and d["chipfit_encodings"] == 1
    assert d["platform"] == "paper" and set(d["tensors"]) == {"x", "w", "b"}
    grid = {"format": "f", "bits": 8, "qmin": -128, "qmax": 127, "axis": 0}
    numbers = {"scale": [0.25, 1.0], "zero_point": [0, 0], **W_ENDS}
    assert d["tensors"]["w"] == {"role": "weight", "layer": "", **grid, **numbers}
    table = document(plan_of(w=on(LUT, 0.5)))["tensors"]["w"]
    assert table["table"] == [-1.0, 0.0, 0.5] and table["kind"] == "lut"


def test_a_weight_of_one_channel_is_none_of_channels():
    (w,) = document(plan_of(w=on(S8, [0.25], axis=0)), "ppl_cuda")["ppl-cuda"].values()
    assert not w["per_channel"] and (w["min"], w["max"]) == ([-32.0], [31.75])
    (v,) = document(plan_of(w=on(S8, 0.25)), "ppl_dsp")["ppl"].values()
    assert v == {"step": 0.25, "zero_point": 0, "min": -32.0, "max": 31.75, "bit": 8, "type": "weight"}


def test_scales_that_are_no_powers_of_two_have_no_fix_position():
    scales = [1.0, 0.5, 0.3, 2.0, 0.7, 0.1]
    with pytest.raises(UnsupportedError, match="power-of-two scales. Where: w") as refused:
        document(plan_of(w=on(S8, scales, axis=0)), "vitis")
    assert refused.value.got == pytest.approx(scales[:4])
