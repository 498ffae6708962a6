"""Quantized ONNX files of other tools: their integers are simulated and compared, and what differs is named."""

import contextlib
import logging
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.errors import CaptureError, UnsupportedError
from chipfit.frameworks import capture, load
from chipfit.frameworks.onnx import quantized as quantized_files
from chipfit.frameworks.onnx.quantized import read_quantized
from chipfit.platform.load import load as load_platform
from chipfit.runtimes import onnxruntime
from chipfit.verify import verify
from chipfit.verify.file import read_quantized as read_file
from tests.onnx_models import onnx_node, onnx_of

ort = pytest.importorskip("onnxruntime")
with pytest.MonkeyPatch.context() as quiet:
    quiet.setattr(logging.Logger, "warning", lambda *a, **k: None)
    from onnxruntime import quantization
    from onnxruntime.quantization import QuantFormat, QuantType

U8, S8, U16, S16 = QuantType.QUInt8, QuantType.QInt8, QuantType.QUInt16, QuantType.QInt16
IMAGES = np.random.default_rng(0).normal(size=(12, 3, 16, 16)).astype("f4")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.depth = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.left, self.right = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 1)
        self.hidden, self.last = nn.Linear(256, 10), nn.Linear(10, 10)

    def forward(self, x):
        x = torch.relu(self.first(x))
        y = self.left(nn.functional.relu6(self.depth(x)))
        x = nn.functional.max_pool2d(y + self.right(x), 2)
        x = torch.cat([x * torch.sigmoid(x), x], 1)[:, 8:24]
        x = nn.functional.leaky_relu(nn.functional.avg_pool2d(x, 2), 0.1)
        return torch.softmax(self.last(self.hidden(x.flatten(1))), -1)


@pytest.fixture(scope="module")
def float_file(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("onnx") / "float.onnx"
    options = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(Branches().eval(), (torch.from_numpy(IMAGES[:1]),), str(file), dynamo=False, **options)
    return file


class Reader(quantization.CalibrationDataReader):
    def __init__(self):
        self.rows = iter([{"x": IMAGES[k : k + 4]} for k in range(0, 12, 4)])

    def get_next(self):
        return next(self.rows, None)


STATIC = {
    "int8": {},
    "int8 per channel": {"per_channel": True},
    "u8s8": {"activation_type": U8, "weight_type": S8, "per_channel": True, "reduce_range": True},
    "u8s8 of 8 bits": {"activation_type": U8, "weight_type": S8},
    "u8u8": {"activation_type": U8, "weight_type": U8},
    "a16": {"activation_type": U16, "weight_type": S8},
    "s16": {"activation_type": S16, "weight_type": S8},
    "QOperator": {"quant_format": QuantFormat.QOperator},
    "QOperator u8u8": {"quant_format": QuantFormat.QOperator, "activation_type": U8, "weight_type": U8},
}
DYNAMIC = {"int8": {}, "per channel": {"per_channel": True}, "u8": {"weight_type": U8}}


@pytest.fixture(scope="module")
def quantized(float_file):
    """Return a function: "static" or "dynamic", name of settings -> file of ONNX Runtime's quantizer."""

    def make(way, name):
        file = float_file.parent / f"{way}_{name}.onnx".replace(" ", "_")
        if not file.exists() and way == "static":
            quantization.quantize_static(str(float_file), str(file), Reader(), **STATIC[name])
        elif not file.exists():
            quantization.quantize_dynamic(str(float_file), str(file), **{"reduce_range": True, **DYNAMIC[name]})
        return file

    return make


@pytest.mark.parametrize("name", [n for n in STATIC if "16" not in n])
def test_a_file_of_onnx_runtimes_static_quantizer_computes_the_simulated_integers(quantized, name):
    found = chipfit.verify_file(quantized("static", name), [torch.from_numpy(IMAGES[:6])])
    assert found.exact and found.differing == 0 and found.integers > 100_000
    assert found.exact_share > (0.6 if name.startswith("int8") else 0.999)
    assert all(not h.fault for h in found.held) and len(found.held) == 29


@pytest.mark.parametrize("name", [n for n in STATIC if "16" in n])
def test_integers_of_16_bits_run_in_float_between_their_quantizers(quantized, name):
    found = chipfit.verify_file(quantized("static", name), [torch.from_numpy(IMAGES[:6])])
    assert found.sound and "Conv2D" in found.float_ops
    assert sum(r.op_differing for r in found.rows) < 2e-4 * found.integers


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_file_of_onnx_runtimes_dynamic_quantizer_computes_the_simulated_numbers(quantized, name):
    found = chipfit.verify_file(quantized("dynamic", name), [torch.from_numpy(IMAGES[:6])])
    assert found.exact and sum(o.inner for o in found.outputs) == 4 and len(found.held) == 6


def test_weights_of_8_bits_saturate_as_on_this_processor(quantized, monkeypatch):
    data, file = [torch.from_numpy(3 * IMAGES[:6])], quantized("static", "u8s8 of 8 bits")
    assert chipfit.verify_file(file, data).exact
    other = not onnxruntime.saturates()
    monkeypatch.setattr(onnxruntime, "saturates", lambda: other)
    found = chipfit.verify_file(file, data)
    assert found.verdict == "departs" and found.first_difference.op == "Conv2D"


def test_what_the_file_holds_is_shown(quantized):
    found, platform = read_file(quantized("static", "u8s8"))
    assert platform.name == "ort_cpu"
    runs = {p.op: p.exec for p in found.plan.nodes.values()}
    assert runs["Conv2D"] == runs["Add"] == runs["Linear"] == "int" and runs["MaxPool"] == "follow"
    text = str(found.plan)
    assert "uint8" in text and "int8" in text and "first.weight" in text and "the file" in text
    found, _ = read_file(quantized("static", "a16"))
    assert found.plan.nodes["/Add_output_0"].why == "the runtime computes it in float"


@pytest.mark.parametrize("what", ["weight", "bias", "scale"])
def test_another_network_than_the_file_has_departs_and_is_named(quantized, tmp_path, what):
    """A negative control: the simulation gets one number that the file has not."""
    found = read_quantized(load(str(quantized("static", "u8s8"))), "ort_cpu")
    (tmp_path / "named.onnx").write_bytes(found.content)
    name = next(k for k, t in found.plan.tensors.items() if t.role == (what if what != "scale" else "activation"))
    if what == "scale":
        stored = found.plan.tensors[name].stored
        found.plan.tensors[name] = found.plan.tensors[name].with_(scale=stored.scale * 1.01)
    else:
        first = (0,) * found.graph.weights[name].dim()
        weights = found.graph.weights[name] = found.graph.weights[name].clone()
        weights[first] += 40 * float(found.plan.tensors[name].scale.max())
    data = [torch.from_numpy(IMAGES[:4])]
    check = verify(found.graph, found.plan, load_platform("ort_cpu"), data, path=tmp_path / "named.onnx")
    assert check.verdict == "departs" and any(name in d for d in check.departures)


@pytest.mark.parametrize("platform", ["ort_cpu", "ort_dynamic"])
def test_a_file_of_our_own_is_verified_without_its_result(float_file, tmp_path, platform):
    data = [torch.from_numpy(IMAGES[:6])]
    file = chipfit.quantize(str(float_file), data, platform=platform, progress=False).export(tmp_path / "m.onnx")
    assert chipfit.verify_file(file, data).exact


@pytest.mark.parametrize("way, name", [("static", "int8"), ("static", "QOperator u8u8"), ("dynamic", "per channel")])
def test_a_quantized_file_is_quantized_again_on_request_only(float_file, quantized, way, name):
    data, file = [torch.from_numpy(IMAGES[:8])], quantized(way, name)
    with pytest.raises(CaptureError, match=r"quantized already.*Linear.*--requantize"):
        chipfit.quantize(str(file), data, progress=False)
    model = chipfit.load_model(file, requantize=True)
    result = chipfit.quantize(model, data, platform="ort_cpu", progress=False)
    assert result.verify(data).exact
    want = torch.from_numpy(ort.InferenceSession(str(float_file)).run(None, {"x": IMAGES[:8]})[0])
    assert (result.model(data[0]) - want).abs().max() < 0.03
    names = {n for n, _ in result.model.named_parameters()}
    assert {"first.weight", "left.bias", "hidden.weight"} <= names


CUTS = [(0.02, 0, ["Linear", "Relu", "Linear", "Sigmoid"]), (6 / 255, 0, ["Linear", "Relu6", "Linear", "Sigmoid"])]
CUTS += [(0.02, 3, ["Linear", "Linear", "Sigmoid"])]


@pytest.mark.parametrize("opset", [10, 17])
@pytest.mark.parametrize("scale, zero, ops", CUTS)
def test_a_relu_that_a_tool_folded_into_a_quantizer_is_a_relu_again(tmp_path, scale, zero, ops, opset):
    draw = np.random.default_rng(0)
    constants = {"s": np.float32(scale), "z": np.uint8(zero), "s1": np.float32(1 / 255), "z0": np.uint8(0)}
    constants |= {w: draw.normal(size=(4, 4)).astype("f4") for w in ("v", "w")}
    pairs = [("x", "s", "z"), ("a", "s", "z"), ("c", "s1", "z0")]
    quantizers = [
        (f"{x}_q = QuantizeLinear({x}, {s}, {z})", f"{x}_f = DequantizeLinear({x}_q, {s}, {z})") for x, s, z in pairs
    ]
    layers = ("a = MatMul(x_f, v)", "b = MatMul(a_f, w)", "c = Sigmoid(b)", "y = Neg(c_f)")
    a, b, c, y = (onnx_node(layer, name=f"{layer[0]}_q") for layer in layers)
    nodes = [*quantizers[0], a, *quantizers[1], b, c, *quantizers[2], y]
    onnx.save(onnx_of(*nodes, inputs={"x": ["n", 4]}, constants=constants, opset=opset), tmp_path / "q.onnx")
    found = capture(chipfit.load_model(tmp_path / "q.onnx", requantize=True), (torch.randn(5, 4),))
    assert [n.op for n in found.nodes if n.op != "Neg"] == ops


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """A file of two products with constants."""
    draw = np.random.default_rng(0)
    constants = {f"w{s[1]}": (draw.normal(size=s) / 8).astype("f4") for s in ((64, 96), (96, 32))}
    nodes = [
        onnx_node("hidden = MatMul(x, w96)", name="first"),
        "positive = Relu(hidden)",
        onnx_node("y = MatMul(positive, w32)", name="last"),
    ]
    file = tmp_path_factory.mktemp("products") / "float.onnx"
    onnx.save(onnx_of(*nodes, inputs={"x": ["n", 64]}, constants=constants, opset=21), file)
    return file


BLOCKS = [(4, QuantFormat.QOperator, None), (4, QuantFormat.QOperator, 4), (4, QuantFormat.QDQ, None)]


@pytest.mark.parametrize(
    ("bits", "form", "level"), [*BLOCKS, (8, QuantFormat.QOperator, 4), (2, QuantFormat.QOperator, None)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_in_blocks_of_onnx_runtimes_tool_are_read(products, tmp_path, bits, form, level, symmetric):
    """Its symmetric ones have scales of either sign."""
    tool = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer").MatMulNBitsQuantizer
    how = {"bits": bits, "block_size": 32, "accuracy_level": level, "quant_format": form, "is_symmetric": symmetric}
    (made := tool(onnx.load(products), **how)).process()
    made.model.save_model_to_file(str(tmp_path / "blocks.onnx"))
    x = np.random.default_rng(1).normal(size=(5, 64)).astype("f4")
    found = chipfit.verify_file(tmp_path / "blocks.onnx", [torch.from_numpy(x)])
    assert found.exact and len(found.held) == 2 and all(h.elements for h in found.held)
    want = torch.from_numpy(ort.InferenceSession(str(tmp_path / "blocks.onnx")).run(None, {"x": x})[0])
    again = chipfit.load_model(tmp_path / "blocks.onnx", requantize=True)
    result = chipfit.quantize(again, [torch.from_numpy(x)], platform="ort_dynamic", progress=False)
    assert (result.model(torch.from_numpy(x)) - want).abs().max() < 0.05 * want.abs().max()


@pytest.fixture
def looked_up(tmp_path):
    """Return rows of a table [10, 64], and their product."""
    draw = np.random.default_rng(0)
    held = {n: draw.normal(size=s).astype("f4") for n, s in (("t", (10, 64)), ("w", (64, 4)))}
    nodes, types = ("rows = Gather(t, x)", "y = MatMul(rows, w)"), {"x": TensorProto.INT64}
    ends = {"inputs": {"x": ["n", 3]}, "outputs": ["rows", "y"], "types": types}
    onnx.save(onnx_of(*nodes, **ends, constants=held, opset=21), tmp_path / "f.onnx")
    return tmp_path / "f.onnx"


ROWS = np.array([[0, 9, 4], [3, 3, 1]])


@pytest.mark.parametrize("way", ["dynamic", "4 bits", "4 bits with zero points"])
def test_rows_of_tables_of_integers_are_read(looked_up, way):
    """A dynamic product of rows has the table's scale; tables in blocks hold one integer in each element."""
    if way == "dynamic":
        quantization.quantize_dynamic(str(looked_up), str(looked_up))
    else:
        tool = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
        what = {"op_types_to_quantize": ("Gather",), "quant_axes": (("Gather", 1),), "is_symmetric": way == "4 bits"}
        how = tool.DefaultWeightOnlyQuantConfig(block_size=32, **what)
        (made := tool.MatMulNBitsQuantizer(onnx.load(looked_up), algo_config=how)).process()
        onnx.save(made.model.model, looked_up)
    wanted = ort.InferenceSession(looked_up).run(None, {"x": ROWS})
    read = capture(chipfit.load_model(looked_up, requantize=True), [torch.from_numpy(ROWS)])
    for y, want in zip(run(read, [torch.from_numpy(ROWS)]).values(), wanted, strict=True):
        torch.testing.assert_close(y, torch.from_numpy(want), rtol=1e-5, atol=1e-5)
    if way != "dynamic":
        assert chipfit.verify_file(looked_up, [torch.from_numpy(ROWS)]).exact


@pytest.mark.parametrize("count, level", [(8, 4), (40, 0), (40, 4)])
def test_rows_may_end_in_a_part_of_a_block(tmp_path, count, level):
    draw, blocks = np.random.default_rng(0), -(-count // 16)
    packed, scale = draw.integers(0, 256, (6, blocks, 8)).astype("u1"), draw.random((6, blocks)).astype("f4") + 0.1
    fields = {"K": count, "N": 6, "bits": 4, "block_size": 16, "accuracy_level": level}
    node = onnx_node("y = com.microsoft::MatMulNBits(x, w, s)", **fields)
    onnx.save(onnx_of(node, inputs={"x": ["n", count]}, constants={"w": packed, "s": scale}), tmp_path / "parts.onnx")
    found = chipfit.verify_file(tmp_path / "parts.onnx", [torch.randn(5, count)])
    assert found.exact and [h.elements for h in found.held] == [6 * count]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_zero_points_that_are_floats_are_named(products, tmp_path):
    tool = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    made = tool.MatMulNBitsQuantizer(onnx.load(products), algo_config=tool.HQQWeightOnlyQuantConfig(block_size=32))
    made.process()
    onnx.save(made.model.model, tmp_path / "hqq.onnx")
    with pytest.raises(CaptureError, match="MatMulNBits has no reader: its zero points are floats"):
        chipfit.verify_file(tmp_path / "hqq.onnx", [torch.zeros(5, 64)])


def test_integers_that_a_cast_and_a_mul_make_floats_are_shown(products, tmp_path):
    model = onnx.load(products)
    scale = np.linspace(0.01, 0.02, 96, dtype="f4").reshape(1, 96)
    codes = numpy_helper.from_array(np.arange(64 * 96).reshape(64, 96).astype("i1"), "w96_q")
    del model.graph.initializer[0]
    model.graph.initializer.extend([codes, numpy_helper.from_array(scale, "scale")])
    cast = onnx_node("cast = Cast(w96_q)", to=TensorProto.FLOAT)
    model.graph.node.insert(0, onnx_node("w96 = Mul(cast, scale)"))
    model.graph.node.insert(0, cast)
    onnx.save(model, tmp_path / "cast.onnx")
    found, _ = read_file(tmp_path / "cast.onnx")
    (stored,) = [t.stored for t in found.plan.tensors.values()]
    assert stored.format == "int8" and np.array_equal(stored.scale, scale[0])
    assert chipfit.verify_file(tmp_path / "cast.onnx", [torch.randn(5, 64)]).exact
    with pytest.raises(CaptureError, match=r"quantized already.*Cast.*--requantize"):
        chipfit.quantize(tmp_path / "cast.onnx", [torch.randn(5, 64)], progress=False)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_that_are_gathered_as_integers_are_read(tmp_path, turned):
    """ONNX Runtime's quantizer gathers rows of integers and dequantizes them, perhaps moved, behind."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.normal(size=(20, 8)).astype("f4"), "w": rng.normal(size=(8, 4)).astype("f4")}
    nodes, types = ("rows = Gather(table, ids)", "r = Relu(rows)", "y = MatMul(r, w)"), {"ids": TensorProto.INT64}
    onnx.save(onnx_of(*nodes, inputs={"ids": ["n", 5]}, constants=weights, types=types), tmp_path / "f.onnx")
    tool = pytest.importorskip("onnxruntime.quantization")
    tool.quantize_dynamic(str(tmp_path / "f.onnx"), str(tmp_path / "q.onnx"))
    model = onnx.load(tmp_path / "q.onnx")
    gather = next(n for n in model.graph.node if n.op_type == "Gather")
    if turned:
        moved = [onnx_node("t = Transpose(g)", perm=[1, 0, 2])]
        moved.append(helper.make_node("Transpose", ["t"], [gather.output[0]], perm=[1, 0, 2]))
        gather.output[0] = "g"
        for k, n in enumerate(moved):
            model.graph.node.insert([*model.graph.node].index(gather) + 1 + k, n)
    onnx.save(model, tmp_path / "q.onnx")
    check = chipfit.verify_file(tmp_path / "q.onnx", [torch.randint(0, 20, (3, 5))])
    assert check.exact and check.integers and all(h.elements for h in check.held if h.role == "weight"), str(check)


class FakeQuantized(nn.Module):
    """As quantization-aware training leaves it; scales of weights are computed in the graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def rounded(self, w):
        scale = w.detach().abs().flatten(1).amax(1) / 127
        return torch.fake_quantize_per_channel_affine(w, scale, torch.zeros(len(w), dtype=torch.int32), 0, -128, 127)

    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(x, 0.04, 128, 0, 255)
        x = torch.relu(torch.conv2d(x, self.rounded(self.conv.weight), self.conv.bias))
        x = torch.fake_quantize_per_tensor_affine(x, 0.012, 0, 0, 255)
        return nn.functional.linear(x.amax((2, 3)), self.rounded(self.fc.weight), self.fc.bias)


def test_a_network_that_pytorch_trained_with_fake_quantizers_is_read(tmp_path):
    torch.manual_seed(0)
    net, x = FakeQuantized().eval(), torch.from_numpy(IMAGES[:4])
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}, "opset_version": 17}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(net, (x,), str(tmp_path / "fake.onnx"), dynamo=False, **options)
    found = chipfit.verify_file(tmp_path / "fake.onnx", [x])
    assert found.exact and {h.role for h in found.held} == {"activation", "weight", "bias"}
    result = chipfit.quantize(chipfit.load_model(tmp_path / "fake.onnx", requantize=True), [x], progress=False)
    assert (result.model(x) - net(x)).abs().max() < 0.05


class QuantizedTwice(FakeQuantized):
    """One value has two quantizers, and is read in float too."""

    def forward(self, x):
        y = torch.relu(torch.conv2d(torch.fake_quantize_per_tensor_affine(x, 0.04, 128, 0, 255), self.conv.weight))
        fine, coarse = (torch.fake_quantize_per_tensor_affine(y, s, 0, 0, 255) for s in (0.01, 0.02))
        rows = self.rounded(self.fc.weight)[:, :, None, None]
        return torch.conv2d(fine, rows) + torch.conv2d(coarse, rows, self.fc.bias), y.mean(), x.sum()


def test_a_value_with_two_quantizers_that_is_read_in_float_too_is_verified(tmp_path):
    torch.manual_seed(0)
    net, x = QuantizedTwice().eval(), torch.from_numpy(IMAGES[:4])
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(net, (x,), str(tmp_path / "twice.onnx"), dynamo=False, opset_version=17, input_names=["x"])
    found = chipfit.verify_file(tmp_path / "twice.onnx", [x])
    assert found.exact and sum(r.op == "Identity" and r.elements > 0 for r in found.rows) >= 2


@pytest.mark.parametrize("kind", ["Quant", "FakeQuantizeLearnablePerchannelAffine", "LearnedScale"])
def test_quantizers_of_training_tools_are_named_and_dropped_on_request(tmp_path, kind):
    weight = np.random.default_rng(0).normal(size=(4, 3)).astype("f4")
    constants = {"s": np.float32(0.05), "w": weight}
    nodes = [*(f"{i}_q = of.a.tool::{kind}({i}, s)" for i in "xw"), "y = MatMul(x_q, w_q)"]
    onnx.save(onnx_of(*nodes, inputs={"x": ["n", 4]}, constants=constants), tmp_path / "trained.onnx")
    x = torch.randn(5, 4)
    with pytest.raises(CaptureError, match=f"training tool.*{kind}.*--requantize"):
        chipfit.verify_file(tmp_path / "trained.onnx", [x])
    with pytest.raises(CaptureError, match=f"quantized already.*{kind}"):
        chipfit.quantize(tmp_path / "trained.onnx", [x], progress=False)
    again = chipfit.load_model(tmp_path / "trained.onnx", requantize=True)
    result = chipfit.quantize(again, [x], progress=False)
    assert (result.model(x) - x @ torch.from_numpy(weight)).abs().max() < 0.1


@pytest.mark.parametrize("kind", ["i1", "i4"])
def test_quantizers_of_quark_are_read_as_onnxs_own_where_a_runtime_has_them(tmp_path, kind):
    weight, own = np.random.default_rng(0).integers(-99, 99, (4, 3)).astype(kind), "com.amd.quark"
    held = {"s": np.float32(0.03), "z": np.zeros((), kind), "w": weight}
    nodes = [f"x_q = {own}::ExtendedQuantizeLinear(x, s, z)"]
    nodes += [f"{i}_f = {own}::ExtendedDequantizeLinear({i}, s, z)" for i in ("x_q", "w")]
    model = onnx_of(*nodes, "y = MatMul(x_q_f, w_f)", inputs={"x": ["n", 4]}, constants=held)
    onnx.save(model, tmp_path / "quark.onnx")
    x = torch.randn(5, 4)
    if kind == "i1":
        assert chipfit.verify_file(tmp_path / "quark.onnx", [x]).exact
    else:
        with pytest.raises(CaptureError, match=r"training tool.*ExtendedDequantizeLinear, ExtendedQuantizeLinear"):
            chipfit.verify_file(tmp_path / "quark.onnx", [x])
    found = capture(chipfit.load_model(tmp_path / "quark.onnx", requantize=True), (x,))
    want = x @ torch.from_numpy(weight * np.float32(0.03)).float()
    torch.testing.assert_close(run(found, [x])[found.outputs[0]], want)


def rounded(x, scale, zero, low, high):
    """Return what QONNX's quantizer computes, by its definition."""
    return (np.clip(np.rint(x / scale + zero), low, high) - zero) * scale


@pytest.mark.parametrize("way, opset", [("QONNX", 11), ("QONNX", 17), ("QCDQ", 17)])
def test_quantizers_of_qonnx_and_clipped_ones_are_read(tmp_path, way, opset):
    draw = np.random.default_rng(0)
    x, v, w = (draw.normal(size=s).astype("f4") for s in ((6, 8), (8, 5), (5, 4)))
    fine = np.array([[0.1, 0.2, 0.3, 0.4, 0.5]], "f4")
    held = {"v": v, "w": w, "fine": fine, "s": np.float32(0.03), "half": np.float32(0.5), "z": np.float32(0)}
    held |= {f"b{k}": np.float32(k) for k in (3, 4, 8)} | {"z5": np.float32(5)}
    own = "qonnx.custom_op.general"
    nodes = [
        onnx_node(f"x_f = {own}::Quant(x, s, z5, b8)", signed=1, narrow=0),
        onnx_node(f"v_f = {own}::Quant(v, fine, z, b3)", narrow=1, rounding_mode="ROUND"),
        "a = MatMul(x_f, v_f)",
        onnx_node(f"a_f = {own}::Quant(a, half, z, b4)", signed=0, narrow=0),
        f"w_f = {own}::BipolarQuant(w, half)",
        "y = MatMul(a_f, w_f)",
    ]
    if way == "QCDQ":
        held = held | {"i3": np.int8(0), "low": np.int8(-3), "high": np.int8(3), "u0": np.uint8(0), "u15": np.uint8(15)}
        held |= {"i5": np.int8(5), "i1": np.zeros(5, "i1"), "fine": fine[0], "low4": np.uint8(0)}
        product, last = nodes[2], nodes[5]
        nodes = ["x_q = QuantizeLinear(x, s, i5)", "x_f = DequantizeLinear(x_q, s, i5)"]
        nodes += [onnx_node("v_q = QuantizeLinear(v, fine, i1)", axis=1), "v_c = Clip(v_q, low, high)"]
        nodes += [onnx_node("v_f = DequantizeLinear(v_c, fine, i1)", axis=1), product]
        nodes += ["a_q = QuantizeLinear(a, half, u0)", "a_c = Clip(a_q, u0, u15)"]
        nodes += ["a_f = DequantizeLinear(a_c, half, u0)", "w_f = DequantizeLinear(w_i, half)", last]
        held["w_i"] = np.where(w >= 0, 1, -1).astype("i1")
    model = onnx_of(*nodes, inputs={"x": ["n", 8]}, constants=held, opset=opset, versions={own: 2})
    onnx.save(model, tmp_path / "trained.onnx")
    v_f, signs = rounded(v, fine, 0, -3, 3), np.where(w >= 0, 0.5, -0.5)
    want = rounded(rounded(x, 0.03, 5, -128, 127) @ v_f, 0.5, 0, 0, 15) @ signs
    found = read_file(tmp_path / "trained.onnx")[0]
    got = ort.InferenceSession(found.content).run(["y"], {"x": x})[0]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert chipfit.verify_file(tmp_path / "trained.onnx", [torch.from_numpy(x)]).exact
    model.graph.initializer[[*held].index("s")].CopyFrom(numpy_helper.from_array(np.float32(-1), "s"))
    with pytest.raises(CaptureError, match="must be positive.*-1"):
        read_quantized(chipfit.load_model(model), "ort_cpu")
    again = capture(chipfit.load_model(tmp_path / "trained.onnx", requantize=True), (torch.from_numpy(x),))
    np.testing.assert_allclose(
        run(again, [torch.from_numpy(x)])[again.outputs[0]], np.maximum(x @ v_f, 0) @ signs, atol=1e-5
    )


def test_floats_of_8_bits_are_named_and_dropped_on_request(tmp_path):
    """Steps of float8e4m3fn are 1/8 from 1 to 2 and 32 from 256 to 448, its greatest number; halves go to even."""
    weight, kind = np.array([[1.0625, 300.0, 500.0]], "f4"), TensorProto.FLOAT8E4M3FN
    held = {"w": weight, "s": np.float32(1), "z": helper.make_tensor("z", kind, [], [0.0])}
    held["v"] = helper.make_tensor("v", kind, [1, 1], [1.125])
    nodes = [f"{i}_q = QuantizeLinear({i}, s, z)" for i in "xw"]
    nodes += [f"{i}_f = DequantizeLinear({i}, s)" for i in ("x_q", "w_q", "v")]
    nodes += ["a = MatMul(x_q_f, v_f)", "y = MatMul(a, w_q_f)"]
    onnx.save(onnx_of(*nodes, inputs={"x": ["n", 1]}, constants=held, opset=19), tmp_path / "8.onnx")
    with pytest.raises(CaptureError, match="8 bits.*float8e4m3fn.*--requantize"):
        chipfit.verify_file(tmp_path / "8.onnx", [torch.ones(2, 1)])
    found = capture(chipfit.load_model(tmp_path / "8.onnx", requantize=True), (torch.ones(2, 1),))
    assert run(found, [torch.ones(1, 1) * 16 / 9])[found.outputs[0]].tolist() == [[2.0, 576.0, 896.0]]


def test_a_file_that_computes_in_float16_is_shown_and_read_in_float32(tmp_path):
    """Its bias is computed from constants, and rounded there."""
    draw = np.random.default_rng(0)
    weight, bias = draw.integers(-9, 9, (8, 5)).astype("i1"), draw.normal(size=5).astype("f2")
    held = {"w": weight, "s": np.float16(0.0625), "z": np.int8(0), "bias": bias, "bs": np.float16(0.00390625)}
    nodes = [onnx_node("x16 = Cast(x)", to=TensorProto.FLOAT16), "x_q = QuantizeLinear(x16, s, z)"]
    nodes += ["x_f = DequantizeLinear(x_q, s, z)", "w_f = DequantizeLinear(w, s, z)"]
    nodes += ["b_whole = Div(bias, bs)", "b_round = Round(b_whole)"]
    nodes += [onnx_node("b_i = Cast(b_round)", to=TensorProto.INT32), "b = DequantizeLinear(b_i, bs)"]
    nodes += ["a = Gemm(x_f, w_f, b)", "a_q = QuantizeLinear(a, s, z)", "a_f = DequantizeLinear(a_q, s, z)"]
    nodes.append(onnx_node("y = Cast(a_f)", to=TensorProto.FLOAT))
    onnx.save(onnx_of(*nodes, inputs={"x": ["n", 8]}, constants=held, opset=19), tmp_path / "16.onnx")
    x = torch.randn(4, 8)
    shown = read_file(tmp_path / "16.onnx")[0].plan.tensors.values()
    assert "int32" in {t.stored.format for t in shown} and all(t.quantized for t in shown)
    with pytest.raises(UnsupportedError, match="float16, which is not simulated"):
        chipfit.verify_file(tmp_path / "16.onnx", [x])
    found = capture(chipfit.load_model(tmp_path / "16.onnx", requantize=True), (x,))
    want = x @ torch.from_numpy(weight * np.float32(0.0625)) + torch.from_numpy(
        np.rint(bias / np.float16(1 / 256)) / 256
    )
    torch.testing.assert_close(run(found, [x])[found.outputs[0]], want.float())


def test_a_bias_of_32_bits_that_a_sum_adds_before_a_recurrent_layer_is_read(tmp_path):
    """The sum of float32 and the bias, which is held in float64, is the layer's input in float32."""
    draw = np.random.default_rng(0)
    held = {"s": np.float32(0.03), "z": np.uint8(128), "v": draw.integers(-9, 9, (8, 4)).astype("i1"), "zv": np.int8(0)}
    held |= {"b": draw.integers(-99, 99, 4).astype("i4"), "zb": np.int32(0)}
    held |= {n: draw.normal(size=(1, 9, k)).astype("f4") for n, k in (("w", 4), ("r", 3))}
    nodes = [
        "x_q = QuantizeLinear(x, s, z)",
        "x_f = DequantizeLinear(x_q, s, z)",
        "v_f = DequantizeLinear(v, s, zv)",
        "b_f = DequantizeLinear(b, s, zb)",
        "a = MatMul(x_f, v_f)",
        "c = Add(b_f, a)",
        onnx_node("y = GRU(c, w, r)", hidden_size=3),
    ]
    onnx.save(onnx_of(*nodes, inputs={"x": [5, "n", 8]}, constants=held), tmp_path / "sum.onnx")
    assert chipfit.verify_file(tmp_path / "sum.onnx", [torch.randn(5, 2, 8)]).checked


def test_biases_that_a_tool_stores_once_keep_their_own_scales(tmp_path):
    """Two layers with the bias 0, whose integers are equal and whose scales are not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)).eval()
    net[0].bias.data.zero_()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(net, (torch.randn(1, 3, 16, 16),), str(tmp_path / "f.onnx"), dynamo=False, input_names=["x"])
    model = onnx.load(tmp_path / "f.onnx")
    model.graph.node[2].input.append(model.graph.node[0].input[2])
    onnx.save(model, tmp_path / "f.onnx")

    class One(quantization.CalibrationDataReader):
        rows = iter([{"x": IMAGES[:1]}])

        def get_next(self):
            return next(self.rows, None)

    how = {"quant_format": QuantFormat.QOperator, "activation_type": U8, "weight_type": U8}
    quantization.quantize_static(str(tmp_path / "f.onnx"), str(tmp_path / "q.onnx"), One(), **how)
    found = chipfit.verify_file(tmp_path / "q.onnx", [torch.from_numpy(IMAGES[:1])])
    assert found.exact and sum(h.role == "bias" for h in found.held) == 2


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_a_file_that_is_given_integers_is_verified_from_floats(float_file, tmp_path, kind):
    data = [torch.from_numpy(IMAGES[:6])]
    result = chipfit.quantize(str(float_file), data, platform="ort_cpu", progress=False)
    found = chipfit.verify_file(result.export(tmp_path / "m.onnx", io=kind), data)
    assert found.exact and found.rows[0].op == "Input" and found.rows[0].elements


def test_a_file_of_one_sample_is_verified_with_batches(quantized, tmp_path):
    model = onnx.load(quantized("static", "int8"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "one.onnx")
    found = chipfit.verify_file(tmp_path / "one.onnx", [torch.from_numpy(IMAGES[:3])])
    assert next(r.elements for r in found.rows if r.op == "Input") == 3 * 3 * 16 * 16 and found.exact


def test_outputs_of_the_file_itself_are_compared_too(quantized, monkeypatch):
    """A negative control: the optimised form is another network than the file."""
    other = quantized_files.optimised_by_runtime(onnx.load(quantized("static", "QOperator u8u8")), "")
    monkeypatch.setattr(quantized_files, "optimised_by_runtime", lambda *a: other)
    found = chipfit.verify_file(quantized("static", "u8s8"), [torch.from_numpy(IMAGES[:2])])
    assert found.verdict == "departs" and "in a plain session the file's outputs differ" in found.departures[0]


def test_a_file_without_integers_is_refused(float_file):
    with pytest.raises(CaptureError, match=r"The file is not quantized.*chipfit\.quantize"):
        chipfit.verify_file(float_file, [torch.from_numpy(IMAGES)])


def faulty(scale=(0.1,), zero=(3,), weight_zero=TensorProto.INT8, axis=1, weight_scale=0.2):
    """Return a model: quantizers around a product with a quantized weight."""
    numbers = {
        "s": np.array(scale if len(scale) > 1 else scale[0], "f4"),
        "z": helper.make_tensor("z", TensorProto.UINT8, [len(zero)] if len(zero) > 1 else [], zero),
        "w_z": helper.make_tensor("w_z", weight_zero, np.shape(weight_scale), [0] * np.size(weight_scale)),
        "w_q": np.arange(12, dtype="i1").reshape(4, 3),
        "w_s": np.array(weight_scale, "f4"),
    }
    nodes = [
        onnx_node("x_q = QuantizeLinear(x, s, z)", axis=axis),
        onnx_node("x_f = DequantizeLinear(x_q, s, z)", axis=axis),
        onnx_node("w = DequantizeLinear(w_q, w_s, w_z)", axis=axis),
        "y = MatMul(x_f, w)",
    ]
    return onnx_of(*nodes, inputs={"x": ["n", 4]}, constants=numbers)


FAULTS = [
    ({"scale": (0.0,)}, r"Scale of 'x' must be positive.*0\.0"),
    ({"scale": (float("nan"),)}, r"Scale of 'x' must be positive.*nan"),
    ({"weight_scale": [0.1, 0.2]}, r"Scale of 'w_q' has another shape.*\[2\].*\[3\]"),
    ({"weight_scale": [0.1, 0.2, 0.3], "axis": 5}, r"Axis of 'w_q' does not exist.*5.*-2 to 1"),
    ({"scale": (0.1, 0.2, 0.3, 0.4), "zero": (1, 2)}, r"Scale and zero point of 'x' have other shapes"),
    ({"weight_zero": TensorProto.UINT8}, r"Zero point of 'w_q' has another type.*uint8.*int8"),
]


@pytest.mark.parametrize(("change", "words"), FAULTS, ids=[str(c) for c, _ in FAULTS])
def test_malformed_scales_are_named(tmp_path, change, words):
    file, data = tmp_path / "faulty.onnx", [torch.randn(4, 4)]
    onnx.save(faulty(**change), file)
    with pytest.raises(CaptureError, match=words):
        chipfit.verify_file(file, data)
    again = chipfit.load_model(file, requantize=True)
    with pytest.raises(CaptureError, match=words):
        chipfit.quantize(again, data, progress=False)


@pytest.mark.parametrize("name", ["u8s8", "QOperator"])
def test_a_damaged_file_is_read_or_refused_by_a_typed_error(quantized, tmp_path, name):
    """Bytes changed or left out at random places, outside the weights for the most part."""
    whole, draw, file = quantized("static", name).read_bytes(), np.random.default_rng(0), tmp_path / "damaged.onnx"
    for k in range(60):
        damaged = bytearray(whole)
        at = int(draw.integers(len(whole)))
        damaged[at : at + (k % 2) * int(draw.integers(1, 20))] = bytes([int(draw.integers(256))])
        file.write_bytes(damaged)
        with contextlib.suppress(chipfit.errors.ChipfitError):
            read_file(file)
        with contextlib.suppress(chipfit.errors.ChipfitError):
            chipfit.lint(chipfit.load_model(file, requantize=True), torch.from_numpy(IMAGES[:1]))


def test_nodes_of_integers_with_other_operands_are_refused_by_a_typed_error(quantized, tmp_path):
    """Operands left out, exchanged or reshaped, 60 times."""
    whole, draw, file = onnx.load(quantized("static", "QOperator")), np.random.default_rng(0), tmp_path / "other.onnx"
    for k in range(60):
        (model := onnx.ModelProto()).CopyFrom(whole)
        nodes = [n for n in model.graph.node if n.input]
        node, tensor = draw.choice(nodes), draw.choice(list(model.graph.initializer))
        at = int(draw.integers(len(node.input)))
        if k % 3 == 0:
            del node.input[at]
        elif k % 3 == 1:
            node.input[at] = tensor.name
        else:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.concatenate([array.ravel(), array.ravel()]), tensor.name))
        file.write_bytes(model.SerializeToString())
        with contextlib.suppress(chipfit.errors.ChipfitError):
            read_file(file)
        with contextlib.suppress(chipfit.errors.ChipfitError):
            chipfit.lint(chipfit.load_model(file, requantize=True), torch.from_numpy(IMAGES[:1]))
