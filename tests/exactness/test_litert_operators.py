"""One operator at a time: the kernels' arithmetic, with plain scales and with powers of two, where ties are common."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ai_edge_litert import schema_py_generated as schema
from benchmarks.random_networks import power_of_two_scales, with_biases
from torch import nn

from tests.build import model_of, quantized, sequential
from tests.exactness.litert_proof import RUNTIMES, prove
from tests.simulate.test_rounding import restored


def module(function: Callable[..., torch.Tensor], after: bool) -> nn.Module:
    """Return a function as a module; `after` quantizes the operands of functions that only move values."""
    if not after:
        return model_of(lambda m, *x: function(*x))
    return model_of(lambda m, *x: function(*(F.leaky_relu(v, 0.5) for v in x)))


IMAGE = (4, 8, 12, 12)


def images(*shape: int, gain: float = 3.0) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(*(shape or IMAGE)) * gain,)


def two(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(IMAGE) * 2, torch.randn(*(shape or IMAGE)) * 3 - 1)


def positive() -> tuple[torch.Tensor, ...]:
    return (torch.rand(4, 8, 12, 12) + 0.1,)


COMPUTE = {
    "add": (lambda a, b: a + b, two()),
    "sub": (lambda a, b: a - b, two()),
    "mul": (lambda a, b: a * b, two()),
    "add_row": (lambda a, b: a + b, two(4, 8, 1, 1)),
    "sub_row": (lambda a, b: b - a, two(4, 1, 12, 12)),
    "mul_row": (lambda a, b: a * b, two(4, 8, 1, 1)),
    "add_constant": (lambda a: a + 1.7, images()),
    "sub_from_constant": (lambda a: 1 - a, images()),
    "mul_constant": (lambda a: a * 0.37, images()),
    "add_relu": (lambda a, b: F.relu(a + b), two()),
    "mul_relu6": (lambda a, b: F.relu6(a * b), two()),
    "sub_clip": (lambda a, b: F.hardtanh(a - b), two()),
    "relu": (F.relu, images()),
    "relu6": (F.relu6, images()),
    "hardtanh": (F.hardtanh, images()),
    "leaky": (lambda x: F.leaky_relu(x, 0.37), images()),
    "elu": (F.elu, images()),
    "elu_slope": (lambda x: F.elu(x, 0.4), images()),
    "gelu": (F.gelu, images()),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), images()),
    "exp": (torch.exp, images(gain=1)),
    "log": (torch.log, positive),
    "abs": (torch.abs, images()),
    "log_softmax": (lambda x: x.log_softmax(-1), images(64, 30)),
    "softmax": (lambda x: x.softmax(-1), images(64, 30)),
    "softmax_channels": (lambda x: x.softmax(1), images()),
    "softmax_rows": (lambda x: x.softmax(-1), images(4, 7, 30, gain=8)),
    "normalize": (lambda x: F.normalize(x, dim=-1), images(64, 30)),
    "normalize_channels": (lambda x: x / x.norm(dim=1, keepdim=True), images(gain=0.3)),
    "normalize_nothing": (lambda x: F.normalize(F.relu(x - 9), dim=-1), images(64, 7)),
    "mean_image": (lambda x: x.mean((2, 3)), images(32, 24, 7, 7, gain=1)),
    "mean_channels": (lambda x: x.mean(1), images()),
    "mean_last": (lambda x: x.mean(-1), images(64, 9, 30)),
    "mean_of_many": (lambda x: (x * x).mean((1, 2, 3)), images(4, 3, 60, 50)),
    "mean_of_many_columns": (lambda x: (x * x).mean((1, 3), keepdim=True), images(2, 2, 2, 9000)),
    "mean_rows": (lambda x: x.mean(2, keepdim=True), images()),
    "global_41_channels": (lambda x: F.adaptive_avg_pool2d(x + 0.3, 1), images(32, 41, 8, 8)),
    "sum_image": (lambda x: x.sum((2, 3)), images(32, 24, 7, 7, gain=1)),
    "sum_channels": (lambda x: (x + 0.7).sum(1), images()),
    "sum_last": (lambda x: x.sum(-1), images(64, 9, 30)),
    "sum_of_many": (lambda x: (x * x).sum((1, 2, 3)), images(4, 3, 60, 50)),
    "sum_rows": (lambda x: x.sum(2, keepdim=True), images()),
    "argmax": (lambda x: x.argmax(1), images()),
    "argmin": (lambda x: x.argmin(-1, keepdim=True), images()),
    "matmul": (lambda a, b: a @ b, lambda: (torch.randn(4, 3, 9, 16), torch.randn(4, 3, 16, 7))),
    "matmul_transposed": (lambda a, b: a @ b.mT, lambda: (torch.randn(4, 3, 9, 16), torch.randn(4, 3, 7, 16))),
}
MOVE = {
    "max": (torch.maximum, two()),
    "min": (torch.minimum, two()),
    "amax": (lambda x: x.amax((2, 3)), images()),
    "amin": (lambda x: x.amin(1), images()),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), images()),
    "average_5": (lambda x: F.avg_pool2d(x, 5, 1), images()),
    "average_padded": (lambda x: F.avg_pool2d(x, 3, 2, 1), images()),
    "average_without_padding": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), images()),
    "average_of_what_is_there": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), images()),
    "average_of_what_is_there_5": (lambda x: F.avg_pool2d(x, 5, 3, 2, count_include_pad=False), images(4, 8, 13, 10)),
    "linear_1d": (lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), images(4, 8, 12)),
    "linear_1d_corners": (lambda x: F.interpolate(x, 19, mode="linear", align_corners=True), images(4, 8, 12)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 3), images()),
    "average_1d": (lambda x: F.avg_pool1d(x, 2), images(4, 8, 12)),
    "max_1d": (lambda x: F.max_pool1d(x, 2), images(4, 8, 12)),
    "nearest_odd": (lambda x: F.interpolate(x, size=(19, 31)), images()),
    **{
        f"bilinear_{h}_{w}": (lambda x, s=(h, w): F.interpolate(x, size=s, mode="bilinear"), images())
        for h, w in ((24, 24), (19, 7), (5, 4))
    },
    "bilinear_corners": (lambda x: F.interpolate(x, size=(17, 23), mode="bilinear", align_corners=True), images()),
    # 1023 1024ths of the way to the second position
    "bilinear_near": (lambda x: F.interpolate(x, 7, mode="bilinear", align_corners=True), images(4, 8, 3, 3)),
    "concat": (lambda a, b: torch.cat((a, b), 1), two()),
    "stack": (lambda a, b: torch.stack((a, b), 1), two()),
    "unbind": (lambda a: a.unbind(1)[2], images()),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1)), images()),
    "pad_reflect": (lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), images()),
    "shuffle": (lambda x: F.pixel_shuffle(x, 2), images()),
    "unshuffle": (lambda x: F.pixel_unshuffle(x, 2), images()),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), images()),
    "chunk": (lambda x: x.chunk(2, 1)[1], images()),
    "slice": (lambda x: x[:, 1:5:2, 3:], images()),
    "gather": (lambda x: x[:, [3, 1, 2, 0]], images()),
    "requantize": (lambda a, b: torch.cat((torch.sigmoid(a), b * 2), 1), two()),
    "repeat": (lambda x: x.repeat(1, 2, 1, 3), images()),
    "expand": (lambda x: x.expand(-1, 8, 5, 5), images(4, 8, 1, 1)),
}
LAYERS = {
    "conv": (lambda: nn.Conv2d(8, 16, 3, 2, 1), images()),
    "conv_relu": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()), images()),
    "conv_one_channel": (lambda: nn.Conv2d(8, 1, 3), images()),
    "conv_even": (lambda: nn.Conv2d(8, 4, 4, 2, 1), images()),
    "conv_dilated": (lambda: nn.Conv2d(8, 6, 3, 1, 2, 2), images()),
    "conv_grouped": (lambda: nn.Conv2d(8, 16, 3, 1, 1, groups=2), images()),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, 1, 1, groups=8), images()),
    "depthwise_twice": (lambda: nn.Conv2d(8, 16, 3, 2, 1, groups=8), images()),
    "depthwise_dilated": (lambda: nn.Conv2d(8, 8, 3, 1, 2, 2, groups=8), images()),
    "depthwise_5": (lambda: nn.Conv2d(8, 8, 5, 1, 2, groups=8), images()),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 2, 2), images()),
    "transposed_cut": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), images()),
    "transposed_12": (lambda: nn.ConvTranspose2d(8, 12, 3, 2, 1), images()),
    "depthwise_12": (lambda: nn.Conv2d(12, 12, 3, 1, 1, groups=12), images(4, 12, 12, 12)),
    "transposed_even": (lambda: nn.ConvTranspose2d(8, 6, 4, 2, 1), images()),
    "transposed_relu": (lambda: nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 1, 1), nn.ReLU()), images()),
    "prelu": (lambda: nn.PReLU(8, 0.2), images()),
    "prelu_one": (lambda: nn.PReLU(), images()),
    "prelu_rows": (lambda: nn.PReLU(9, 0.3), images(4, 9, 30)),
    "conv_1d": (lambda: nn.Conv1d(8, 6, 3, padding=1, stride=2), images(4, 8, 12)),
    "depthwise_1d": (lambda: nn.Conv1d(11, 22, 3, groups=11), images(4, 11, 12)),
    "transposed_1d": (lambda: nn.ConvTranspose1d(8, 6, 3, padding=1, stride=2), images(4, 8, 12)),
    "linear": (lambda: nn.Linear(30, 17), images(64, 30)),
    "linear_one": (lambda: nn.Linear(30, 1), images(64, 30)),
    "linear_relu": (lambda: nn.Sequential(nn.Linear(30, 8), nn.ReLU()), images(64, 30)),
    "linear_rows": (lambda: nn.Linear(30, 8), images(8, 9, 30)),
}
CASES = {k: (lambda f=f: module(f, False), x, {}) for k, (f, x) in COMPUTE.items()}
CASES |= {k: (lambda f=f: module(f, True), x, {}) for k, (f, x) in MOVE.items()}
CASES |= {k: (*v, {}) for k, v in LAYERS.items()}
OF_WEIGHTS = {k: v for k, v in LAYERS.items() if "prelu" not in k}
CASES |= {f"{k}_one_scale": (*v, {"*": {"per": "tensor"}}) for k, v in OF_WEIGHTS.items()}
CASES |= {f"{k}_4_bits": (*v, {"*": {"bits": 4}}) for k, v in OF_WEIGHTS.items() if "transposed" not in k}

CASES["embedding"] = (lambda: nn.Embedding(40, 8), lambda: (torch.randint(0, 40, (16, 5)),), {})
CASES["embedding_linear"] = (
    lambda: sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(40, 6)),
    CASES["embedding"][1],
    {},
)

#: computed in float at 16 bits
NARROW = {
    "argmax",
    "argmin",
    "log_softmax",
    "normalize",
    "normalize_channels",
    "normalize_nothing",
    "hardtanh",
    "sub_clip",
    "prelu",
    "prelu_one",
    "prelu_rows",
    "shuffle",
    "unshuffle",
}
OF_8_BITS = [(name, "tflite_int8") for name in CASES]
OF_16_BITS = [(name, "tflite_int16x8") for name in (*COMPUTE, *MOVE, *LAYERS) if name not in NARROW]


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("name, platform", [*OF_8_BITS, *OF_16_BITS])
def test_every_family_of_kernels_computes_the_simulated_integers(tmp_path, name, platform, ties):
    layer, example, overrides = CASES[name]
    model, x, new = layer(), example(), example()
    result = quantized(model, [x], platform, overrides=overrides)
    assert "4_bits" not in name or any(t.grid.bits == 4 for t in result.plan.tensors.values() if t.role == "weight")
    plan = with_biases(result.graph, power_of_two_scales(result.plan)) if ties else result.plan
    for found in prove(result.graph, plan, result.platform, [new], tmp_path, float_ops=()):
        assert found.exact and not found.float_operators


#: operators of which TensorFlow Lite Micro has no kernel, or none for integers or for the types in the file
NOT_MICRO = set("hardtanh elu_slope gelu gelu_tanh exp log argmax argmin gather repeat expand".split())
NOT_MICRO |= {"relu6", "embedding", "embedding_linear", "linear_4_bits", "linear_relu_4_bits", "linear_rows_4_bits"}
SHORT = "mean_image sum_channels matmul average_padded bilinear_19_7 conv_dilated depthwise_12 transposed linear_relu"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT.split() else pytest.mark.slow) for n in CASES if n not in NOT_MICRO]
)
def test_tensorflow_lite_micro_computes_the_simulated_integers(tmp_path, name):
    pytest.importorskip("tflite_micro")
    layer, example, overrides = CASES[name]
    model, x, new = layer(), example(), example()
    result = quantized(model, [x], "tflite_int8", overrides=overrides)
    for k, plan in enumerate((result.plan, with_biases(result.graph, power_of_two_scales(result.plan)))):
        (tmp_path / str(k)).mkdir()
        (found,) = prove(result.graph, plan, result.platform, [new], tmp_path / str(k), ("tflm",), float_ops=())
        assert found.exact and not found.float_operators


@pytest.mark.parametrize("stretch", [2.0**-9, 0.4, 2.5, 2.0**11])
@pytest.mark.parametrize(
    "name", "add sub_row mul relu relu6 hardtanh leaky prelu abs exp gelu mean_channels matmul conv".split()
)
def test_where_scales_lie_far_apart_xnnpack_leaves_the_operator_and_the_simulator_knows(tmp_path, name, stretch):
    layer, example, _ = CASES[name]
    model, x, new = layer(), example(), example()
    result = quantized(model, [x], "tflite_int8")
    t = result.plan.tensors[result.graph.outputs[0]]
    plan = replace(result.plan, tensors={**result.plan.tensors, t.name: t.with_(scale=t.scale * stretch)})
    # optimised sums wrap around where quantized values saturate 2^8 times over
    runtimes = RUNTIMES if stretch > 0.1 else ("litert_reference",)
    for found in prove(result.graph, plan, result.platform, [new], tmp_path, runtimes, float_ops=()):
        assert found.exact


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_a_table_are_moved_as_integers_unless_it_is_also_a_linear_layers_weight(tmp_path, tied):
    torch.manual_seed(0)
    net = sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
    if tied:
        net[1].weight = net[0].weight
    tokens = CASES["embedding"][1]
    result = quantized(net, [tokens()], "tflite_int8")
    assert result.plan.nodes["embedding"].exec == ("float" if tied else "int")
    assert not tied or "also the weight of '1'" in result.plan.nodes["embedding"].why
    for found in prove(result.graph, result.plan, result.platform, [tokens()], tmp_path):
        assert found.exact


def test_means_of_next_to_nothing_subtract_zero_points_that_count_millions(tmp_path):
    """Balanced images: the sum of codes is 120 times the zero point, of which the result's scale makes 6e7."""
    x = -torch.ones(4, 16, 10, 12)
    x[..., ::3] = 2.0
    result = quantized(nn.AdaptiveAvgPool2d(1), 3 * x, "tflite_int8")
    numbers = {result.graph.inputs[0]: (2.0**-4, -57), result.graph.outputs[0]: (2.0**-24, -124)}
    result = restored(result, numbers)
    for found in prove(result.graph, result.plan, result.platform, [x], tmp_path, float_ops=()):
        assert found.exact


@pytest.mark.parametrize("runtime", ["litert_reference", "litert_optimized", "litert"])
def test_samples_behind_other_axes_are_put_together_in_the_models_order(runtime):
    """A layer over [L, N] in one axis, as `nn.MultiheadAttention` has its last one."""

    def sequence_first(m, x):
        y = m.first(x).transpose(0, 1)  # [L, N, 8]
        return m.last(y.reshape(-1, 8)).relu().view(y.shape).transpose(0, 1)

    torch.manual_seed(0)
    net = model_of(sequence_first, first=nn.Linear(6, 8), last=nn.Linear(8, 8))
    result = quantized(net, torch.randn(4, 5, 6), "tflite_int8")
    found = result.verify([torch.randn(4, 5, 6), torch.randn(3, 5, 6)], runtime=runtime)
    assert found.verdict == "exact" and found.integers
    assert any(r.op == "Reshape" and r.elements == 7 * 5 * 8 for r in found.rows), "it was compared"


def test_dynamic_files_apply_rectifiers_within_the_kernel(tmp_path):
    torch.manual_seed(0)
    net = sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 64), nn.ReLU6(), nn.Linear(64, 4))
    result = quantized(net, [torch.randn(8, 3, 8, 8)], "tflite_dynamic")
    content = result.export(tmp_path / "net.tflite").read_bytes()
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    codes = {c.builtinCode for c in model.operatorCodes}
    assert codes.isdisjoint({schema.BuiltinOperator.RELU, schema.BuiltinOperator.RELU6})
    for runtime in RUNTIMES:
        assert result.verify([torch.randn(4, 3, 8, 8)], runtime=runtime).exact


def test_dynamic_files_keep_weights_of_fewer_than_1024_numbers_in_float():
    """The bound of TFLiteConverter, whose files hold the same of these weights as integers."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 64, 3, groups=16)
    net = sequential(*convolutions, nn.Flatten(), nn.Linear(256, 4), nn.Linear(4, 255), nn.Linear(255, 4))
    result = quantized(net, [torch.randn(8, 3, 8, 8)], "tflite_dynamic")
    sizes = {n: w.numel() for n, w in net.named_parameters() if w.dim() > 1}
    assert {n for n in sizes if result.plan.tensors[n].quantized} == {n for n, s in sizes.items() if s >= 1024}
    assert {s for s in sizes.values() if 1000 < s < 1024} == {1020}
