"""Weights in blocks, data rounded each time, products in float: what the runtimes compute beside what is simulated."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import chipfit
from chipfit.errors import RuntimeUnavailable, UnsupportedError
from chipfit.registry import entry
from chipfit.simulate.integer import Profile

LITERT = "litert", "litert_optimized", "litert_reference"
OFF = chipfit.Settings(rounding="off")


class Tokens(nn.Module):
    """Ids to scores, with a table, linear layers, a norm, and a product with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(50, 64), nn.Linear(64, 96), nn.LayerNorm(96)
        self.inner, self.down = nn.Parameter(torch.randn(96, 32) * 0.1), nn.Linear(32, 50, bias=False)

    def forward(self, ids):
        x = self.norm(torch.relu(self.up(self.table(ids))))
        return self.down(torch.tanh(x @ self.inner))


def layers() -> nn.Module:
    """Two readers of one value, an activation that a kernel applies itself, one that none does."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 96), nn.Linear(64, 96, bias=False), nn.Linear(96, 10)

        def forward(self, x):
            return self.c(torch.relu(self.a(x)) * nn.functional.gelu(self.b(x)))

    torch.manual_seed(0)
    return Net().eval()


DATA = [torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2)]


def unseen() -> torch.Tensor:
    """A row of zeros among them, and one of numbers that lie half way between codes."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.01, 9, 32).unsqueeze(1)
    x[3] = 0
    x[4] = (torch.arange(64) - 30) * 0.25
    return x


def quantized(platform, overrides=None, model=None, data=DATA):
    return chipfit.quantize(model or layers(), data, platform, overrides=overrides, settings=OFF, progress=False)


@pytest.mark.parametrize("platform", ["ort_dynamic", "ort_cpu"])
def test_onnx_runtime_multiplies_data_that_it_rounds_each_time_bit_for_bit(platform):
    result = quantized(platform, {"*": {"inputs": "dynamic"}})
    assert sum(n.op == "DynamicQuantize" for n in result.graph.nodes) == 2  # a and b share one
    check = result.verify([unseen()]).require({"Gelu"})
    assert check.executed["DynamicQuantizeMatMul"] + check.executed.get("MatMulIntegerToFloat", 0) == 3
    inner, (out,) = [o for o in check.outputs if o.inner], [o for o in check.outputs if not o.inner]
    assert out.differing == 0 and out.elements == 320 and out.float_ops == ()
    assert [o.elements for o in inner] == [32 * 96]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", ["dynamic", "float"])
def test_onnx_runtime_multiplies_blocks(inputs, bits):
    result = quantized("ort_cpu", {"*": {"inputs": inputs, "bits": bits, "per": "block"}})
    assert {result.plan[w].format for w in ("a.weight", "c.weight")} == {f"wb{bits}"}
    check = result.verify([unseen()]).require({"Linear", "Gelu", "Mul"})
    assert check.executed["MatMulNBits"] == 3 and all(h.elements for h in check.held)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", ["dynamic", "float"])
@pytest.mark.parametrize("runtime", LITERT)
def test_litert_multiplies_rows_that_it_rounds_each_time(runtime, inputs, bits):
    result = quantized("tflite_dynamic", {"*": {"inputs": inputs, "bits": bits}})
    check = result.verify([unseen()], runtime=runtime)
    exact = inputs == "dynamic" and not (runtime == "litert_optimized" and bits == 4)
    check.require({"Gelu"} if exact else {"Linear", "Gelu", "Mul"})
    assert any("FULLY_CONNECTED" in op for op in check.executed)
    if exact:
        assert next(o for o in check.outputs if not o.inner).differing == 0


@pytest.mark.parametrize("runtime", LITERT)
@pytest.mark.parametrize("platform", ["tflite_dynamic", "litert_ai_edge"])
def test_litert_multiplies_blocks_where_its_kernels_take_them(platform, runtime):
    result = quantized(platform, {"Linear": {"inputs": "dynamic", "bits": 4, "per": "block"}})
    scales = [result.plan.stored(f"{n}.weight").scale for n in "abc"]
    assert [list(s.shape) for s in scales] == [[96, 2], [96, 2], [10, 3]]
    assert all(torch.equal(s, s.bfloat16().float()) and torch.equal(s, s.half().float()) for s in scales)
    if runtime == "litert_reference":
        with pytest.raises(RuntimeUnavailable, match="do not support weights with scales for blocks"):
            result.verify([unseen()], runtime=runtime)
        return
    check = result.verify([unseen()], runtime=runtime).require({"Linear", "Gelu", "Mul"})
    weights = [h for h in check.held if h.role == "weight"]
    assert len(weights) == 3 and all(h.elements and not (h.fault or h.why) for h in weights)
    assert max(o.op_gap for o in check.outputs) < 1e-6  # sums alone: codes and scales are the device's own


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_and_products_with_constants_are_stored_in_blocks(bits):
    torch.manual_seed(0)
    ids = [torch.randint(0, 50, (4, 5)) for _ in range(2)]
    result = quantized("ort_dynamic", {"*": {"bits": bits, "per": "block"}}, Tokens().eval(), ids)
    check = result.verify([torch.randint(0, 50, (16, 5))]).require({"LayerNorm", "Linear", "MatMul", "Tanh"})
    assert len(check.held) == 4 and not any(h.fault or h.why for h in check.held)
    if bits == 4:
        assert check.executed["GatherBlockQuantized"] == 1 and check.executed["MatMulNBits"] == 3


def test_a_file_takes_the_bytes_that_its_codes_need(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False)).eval()
    data = [torch.randn(8, 256)]
    sizes = {}
    for bits in (8, 4):
        result = quantized("ort_dynamic", {"*": {"bits": bits}} if bits == 4 else None, model, data)
        sizes[bits] = result.export(tmp_path / f"{bits}.onnx").stat().st_size
        sizes[f"{bits} float"] = quantized("tflite_dynamic", {"*": {"bits": bits}}, model, data)
        sizes[f"{bits} tflite"] = sizes.pop(f"{bits} float").export(tmp_path / f"{bits}.tflite").stat().st_size
    weights = 2 * 256 * 256
    assert weights < sizes[8] < weights * 1.1 and weights < sizes["8 tflite"] < weights * 1.1
    scales = weights / 32 * 4.5  # a float and half a byte for each block
    assert weights / 2 + scales < sizes[4] < (weights / 2 + scales) * 1.1
    assert weights / 2 < sizes["4 tflite"] < weights / 2 * 1.2


# ---------------------------------------------------------------- checks that fail


def test_a_scale_of_a_block_that_is_another_one_is_noticed(tmp_path):
    result = quantized("ort_dynamic", {"*": {"bits": 4}})
    file = result.export(tmp_path / "m.onnx")
    model = onnx.load(str(file))
    scale = next(i for i in model.graph.initializer if i.name == "c.weight_scale")
    numbers = numpy_helper.to_array(scale).copy()
    numbers[3, 1] *= 1.001
    scale.CopyFrom(numpy_helper.from_array(numbers, scale.name))
    onnx.save(model, str(file))
    check = result.verify([unseen()], path=file)
    assert check.verdict == "departs" and "weight 'c.weight' in the file: scale" in check.departures[0]


@pytest.mark.parametrize("what", ["scale", "code", "no scales"])
def test_a_file_of_blocks_that_says_something_else_is_noticed(tmp_path, what):
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    result = quantized("tflite_dynamic", {"*": {"bits": 4, "per": "block"}})
    file = result.export(tmp_path / "m.tflite")
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0))
    tensors = model.subgraphs[0].tensors
    (weight,) = [t for t in tensors if t.name == b"c.weight"]
    held = weight if what == "code" else tensors[weight.quantization.details.scales]
    if what == "no scales":
        weight.quantization.details.scales = len(tensors)
    else:  # one up in the last place of the high byte, which holds digits that matter
        model.buffers[held.buffer].data = np.array(model.buffers[held.buffer].data)
        model.buffers[held.buffer].data[1] += 1
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    file.write_bytes(bytes(builder.Output()))
    if what == "no scales":
        with pytest.raises(RuntimeUnavailable, match="scales of blocks|LiteRT refuses"):
            result.verify([unseen()], path=file)
    else:
        check = result.verify([unseen()], path=file)
        assert check.verdict == "departs" and "weight 'c.weight' in the file" in check.departures[0]


@pytest.mark.parametrize("name, change", [("c.weight_q", 1), ("a.weight_q", -1)])
def test_a_code_that_is_another_one_is_noticed(tmp_path, name, change):
    result = quantized("ort_dynamic")
    file = result.export(tmp_path / "m.onnx")
    model = onnx.load(str(file))
    held = next(i for i in model.graph.initializer if i.name == name)
    codes = numpy_helper.to_array(held).copy()
    codes[0, 0] = np.clip(codes[0, 0] + change, -127, 127) if abs(codes[0, 0]) < 127 else 0
    held.CopyFrom(numpy_helper.from_array(codes, name))
    onnx.save(model, str(file))
    check = result.verify([unseen()], path=file)
    assert any("1 of its" in d for d in check.file_departures) and not check.sound


@pytest.mark.parametrize("platform, kernels", [("ort_dynamic", "onnxruntime"), ("tflite_dynamic", "litert_xnnpack")])
def test_data_that_are_rounded_in_another_way_are_noticed(monkeypatch, platform, kernels):
    profile: Profile = entry("kernels", kernels).thing
    right = profile.quantize_dynamic

    def down(x, **how):
        q, s, z = right(x, **how)
        return (q - 1).clamp(how["qmin"], how["qmax"]), s, z

    object.__setattr__(profile, "quantize_dynamic", down)
    try:
        check = quantized(platform).verify([unseen()])
    finally:
        object.__setattr__(profile, "quantize_dynamic", right)
    assert check.verdict == "departs" and any(d.startswith("float 'mul'") for d in check.departures)


def test_what_the_kernel_does_not_hold_is_refused_by_name(tmp_path):
    from chipfit.platform.schema import Format, OpRule, Option, Platform

    formats = {"d8": Format(bits=8, zero="any", per="row", dynamic=True), "w8": Format(bits=8)}
    rule = OpRule(match=("Linear",), use=(Option(in_="d8", w="w8", b="float", out="float"),), src=("M",), conf="V")
    chip = Platform(name="paper", formats=formats, ops=(rule,), deploy=("ONNX",), sources={"M": "paper"})
    with pytest.raises(UnsupportedError, match="with a range for each row; ONNX has 0..255 with one range"):
        quantized(chip).export(tmp_path / "m.onnx")
