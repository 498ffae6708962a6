"""Weights in blocks, data rounded each time, products in float: what the runtimes compute beside what is simulated."""

import numpy as np
import pytest
import torch
from torch import nn

from chipfit.errors import RuntimeUnavailable
from chipfit.registry import entry
from chipfit.simulate.integer import Profile
from tests import build
from tests.build import model_of, sequential
from tests.exactness.tamper import opened

LITERT = "litert", "litert_optimized", "litert_reference"


def layers() -> nn.Module:
    """Two readers of one value, an activation that a kernel applies itself, one that none does."""

    def forward(m, x):
        return m.c(torch.relu(m.a(x)) * nn.functional.gelu(m.b(x)))

    torch.manual_seed(0)
    return model_of(forward, a=nn.Linear(64, 96), b=nn.Linear(64, 96, bias=False), c=nn.Linear(96, 12))


DATA = [torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2)]


def unseen() -> torch.Tensor:
    """A row of zeros among them, and one of numbers that lie half way between codes."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.01, 9, 32).unsqueeze(1)
    x[3] = 0
    x[4] = (torch.arange(64) - 30) * 0.25
    return x


def quantized(platform, overrides=None, model=None, data=DATA):
    return build.quantized(model or layers(), data, platform, overrides=overrides, settings=build.NEAREST)


@pytest.mark.parametrize("platform", ["ort_dynamic", "ort_cpu"])
def test_onnx_runtime_multiplies_data_that_it_rounds_each_time_bit_for_bit(platform):
    result = quantized(platform, {"*": {"inputs": "dynamic"}})
    assert sum(n.op == "DynamicQuantize" for n in result.graph.nodes) == 2  # a and b share one
    check = result.verify([unseen()]).require({"Gelu"})
    assert check.executed["DynamicQuantizeMatMul"] + check.executed.get("MatMulIntegerToFloat", 0) == 3
    inner, (out,) = [o for o in check.outputs if o.inner], [o for o in check.outputs if not o.inner]
    assert out.differing == 0 and out.elements == 384 and out.float_ops == ()
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
    assert [list(s.shape) for s in scales] == [[96, 2], [96, 2], [12, 3]]
    assert all(torch.equal(s, s.bfloat16().float()) and torch.equal(s, s.half().float()) for s in scales)
    if runtime == "litert_reference":
        with pytest.raises(RuntimeUnavailable, match="do not support weights with one scale per block"):
            result.verify([unseen()], runtime=runtime)
        return
    check = result.verify([unseen()], runtime=runtime).require({"Linear", "Gelu", "Mul"})
    weights = [h for h in check.held if h.role == "weight"]
    assert len(weights) == 3 and all(h.elements and not (h.fault or h.why) for h in weights)
    assert max(o.op_gap for o in check.outputs) < 1e-6  # sums alone: codes and scales are the device's own


@pytest.mark.parametrize("kind, bias", [(nn.LSTM, True), (nn.LSTM, False), (nn.GRU, True)])
def test_recurrent_layers_in_float_read_weights_of_8_bits(kind, bias, tmp_path):
    torch.manual_seed(0)
    layer = kind(32, 32, batch_first=True, bidirectional=True, bias=bias)
    data = [torch.randn(4, 5, 32) for _ in range(2)]
    result = quantized("tflite_dynamic", model=model_of(lambda m, x: m.layer(x)[0], layer=layer), data=data)
    path = result.export(tmp_path / "m.tflite", batch=4)
    for runtime in LITERT:
        result.verify(data[:1], path=path, runtime=runtime).require({kind.__name__})
    assert path.stat().st_size < 3 * sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_and_products_with_constants_are_stored_in_blocks(bits):
    """Ids to scores, with a table, linear layers, a norm, and a product with a constant."""

    def tokens(m, ids):
        return m.down(torch.tanh(m.norm(torch.relu(m.up(m.table(ids)))) @ m.inner))

    torch.manual_seed(0)
    parts = {"table": nn.Embedding(50, 64), "up": nn.Linear(64, 96), "norm": nn.LayerNorm(96)}
    parts |= {"inner": torch.randn(96, 32) * 0.1, "down": nn.Linear(32, 50, bias=False)}
    ids = [torch.randint(0, 50, (4, 5)) for _ in range(2)]
    result = quantized("ort_dynamic", {"*": {"bits": bits, "per": "block"}}, model_of(tokens, **parts), ids)
    check = result.verify([torch.randint(0, 50, (16, 5))]).require({"LayerNorm", "Linear", "MatMul", "Tanh"})
    assert len(check.held) == 4 and not any(h.fault or h.why for h in check.held)
    if bits == 4:
        assert check.executed["GatherBlockQuantized"] == 1 and check.executed["MatMulNBits"] == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_a_file_takes_the_bytes_that_its_integers_need(tmp_path, bits):
    model = sequential(nn.Linear(256, 256, bias=False), nn.ReLU(), nn.Linear(256, 256, bias=False))
    how, data, weights = {"*": {"bits": bits}}, [torch.randn(8, 256)], 2 * 256 * 256 * bits / 8
    onnx_ = quantized("ort_dynamic", how if bits == 4 else None, model, data).export(tmp_path / "m.onnx")
    tflite = quantized("tflite_dynamic", how, model, data).export(tmp_path / "m.tflite")
    scales = 2 * 256 * 256 / 32 * 4.5 if bits == 4 else 0  # a float and half a byte for each block
    assert weights + scales < onnx_.stat().st_size < (weights + scales) * 1.1
    assert weights < tflite.stat().st_size < weights * 1.2


# ---------------------------------------------------------------- checks that fail


@pytest.mark.parametrize("what", ["scale", "code", "no scales"])
def test_a_file_of_blocks_that_says_something_else_is_noticed(tmp_path, what):
    result = quantized("tflite_dynamic", {"*": {"bits": 4, "per": "block"}})
    spoilt = opened(file := result.export(tmp_path / "m.tflite"))
    model, tensors, weight = spoilt.model, spoilt.model.subgraphs[0].tensors, spoilt.tensors["c.weight"]
    held = weight if what == "code" else tensors[weight.quantization.details.scales]
    if what == "no scales":
        weight.quantization.details.scales = len(tensors)
    else:  # one up in the last place of the high byte, which holds digits that matter
        model.buffers[held.buffer].data = np.array(model.buffers[held.buffer].data)
        model.buffers[held.buffer].data[1] += 1
    spoilt.save()
    if what == "no scales":
        with pytest.raises(RuntimeUnavailable, match="block scales of a tensor|LiteRT refuses"):
            result.verify([unseen()], path=file)
    else:
        check = result.verify([unseen()], path=file)
        assert check.verdict == "departs" and "weight 'c.weight' in the file" in check.departures[0]


@pytest.mark.parametrize(
    "bits, constant, place, step, words",
    [
        (4, "c.weight_scale", (3, 1), 0.001, "weight 'c.weight' in the file: scale"),
        (8, "c.weight_t1_q", (0, 0), 1, "weight 'c.weight' in the file: 1 of its"),
        (8, "a.weight_t1_q", (0, 0), -1, "weight 'a.weight' in the file: 1 of its"),
    ],
)
def test_a_number_of_the_file_that_is_another_one_is_noticed(tmp_path, bits, constant, place, step, words):
    result = quantized("ort_dynamic", {"*": {"bits": bits}} if bits == 4 else None)
    spoilt = opened(file := result.export(tmp_path / "m.onnx"))

    def other(numbers):
        x = numbers[place]
        numbers[place] = x * (1 + step) if numbers.dtype.kind == "f" else x + step if abs(x) < 127 else 0
        return numbers

    spoilt.change(constant, other)
    spoilt.save()
    check = result.verify([unseen()], path=file)
    assert check.verdict == "departs" and any(words in d for d in check.file_departures)


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
