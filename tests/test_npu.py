"""What Arm's compiler places on an Ethos-U, beside what the platform's file says."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import RuntimeUnavailable, UnknownNameError
from chipfit.verify import npu
from tests import zoo
from tests.build import command

pytest.importorskip("ethosu.vela", reason="Vela is not installed: pip install 'chipfit[vela]'")

QUICK = (
    "residual_tanh residual_prelu squeeze_excite unet_bilinear attention_fused pixel_shuffle_norms mlp split".split()
)
#: networks with operators that need floats, which the platform refuses by name
FLOATS = {"in_place_index", "gru", "lstm", "conv3d"}
OTHERS = sorted({*zoo.ZOO} - FLOATS - {*QUICK})


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(288, 4), nn.Softmax(-1)).eval()
    return chipfit.quantize(model, torch.randn(16, 3, 8, 8), platform="ethos_u", progress=False)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_the_plan_knows_which_operators_the_compiler_leaves_to_the_processor(name):
    model, batch = zoo.make(name)
    result = chipfit.quantize(model, [batch], platform="ethos_u", progress=False)
    beside = {n.display_name for n in result.plan.nodes.values() if "processor beside" in n.why}
    found = result.npu()
    assert {c.layer for c in found.on_cpu if c.layer} == beside
    assert all(c.why for c in found.on_cpu) and found.operators > len(found.on_cpu)


def test_estimates_are_those_that_the_compiler_writes(result):
    small, large = (result.npu(f"ethos-u55-{n}") for n in (32, 256))
    assert small.on_cpu == () and small.on_npu == small.operators
    assert small.macs == large.macs > 8 * 27 * 36 + 288 * 4
    assert small.cycles > large.cycles > 0 and small.inferences_per_second < large.inferences_per_second
    assert 0 < small.sram < 64 << 10 and 8 * 27 + 288 * 4 < small.flash < 64 << 10
    assert "on ethos-u55-32" in str(small) and small.to_dict()["on_npu"] == small.operators


def test_the_command_line_checks_saved_results_and_files(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result.save("saved")
    result.export("net.tflite", batch=1)
    for saved in ("saved", "net.tflite"):
        shown = command("check-npu", saved, "--accelerator", "ethos-u65-256")
        assert shown.exit_code == 0 and "on ethos-u65-256" in shown.output
    wider = (tmp_path / "floats.tflite", "ethos-u55-64")
    chipfit.quantize(nn.Linear(4, 4), torch.randn(8, 4), platform="tflite_int8", progress=False).export(
        wider[0], batch=1
    )
    assert {c.op for c in npu.compile_file(*wider).on_cpu} == {"QUANTIZE", "DEQUANTIZE"}  # floats go in and out


def test_bad_input_has_typed_errors(result, tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="'ethos-u55-64'"):
        result.npu("ethos-u55-63")
    (tmp_path / "bad.tflite").write_bytes(b"TFL3" * 8)
    with pytest.raises(RuntimeUnavailable, match="Vela refuses the file"):
        npu.compile_file(tmp_path / "bad.tflite", "ethos-u55-64")
    monkeypatch.setattr(npu, "TIMEOUT", 0.001)
    with pytest.raises(RuntimeUnavailable, match="did not end within"):
        result.npu()
    monkeypatch.setattr("chipfit.registry.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailable, match=r"chipfit\[vela\]"):
        result.npu()
