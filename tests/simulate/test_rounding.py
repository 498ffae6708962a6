"""Where kernels round, and what they count, each against the runtime, with numbers that lie between two codes."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.export.onnx.writer import export_onnx
from chipfit.export.tflite.writer import export_tflite
from chipfit.platform.load import load
from chipfit.platform.schema import Fuse
from chipfit.registry import lookup
from chipfit.simulate.libm import libm
from tests import build
from tests.build import model_of

LITERT = ("litert_reference", "litert_optimized", "litert")


def network(f: Callable[..., torch.Tensor], *layers: nn.Module) -> nn.Module:
    """Return a model that computes f(*inputs, *layers)."""
    return model_of(lambda m, *x: f(*x, *m.layers), layers=nn.ModuleList(layers))


def quantized(
    f: Callable[..., torch.Tensor], x: tuple[torch.Tensor, ...], platform: Any, *layers: nn.Module, **settings: Any
) -> chipfit.Result:
    return build.quantized(network(f, *layers), [x], platform, **settings)


def restored(result: chipfit.Result, numbers: dict[str, tuple[float, int]]) -> chipfit.Result:
    """Return the result with other scales and zero points of tensors."""
    tensors = dict(result.plan.tensors)
    for name, (scale, zero) in numbers.items():
        zero_point = torch.tensor(zero, dtype=torch.int32)
        tensors[name] = tensors[name].with_(scale=torch.as_tensor(scale), zero_point=zero_point)
    return replace(result, plan=replace(result.plan, tensors=tensors), _model=None)


def proved(result: chipfit.Result, *data: Any, runtime: str | None = None, float_ops: Collection[str] = ()) -> Any:
    """Every integer is the device's, but for one code in a few hundred where the named operators run in float."""
    found = result.verify(list(data), runtime=runtime)
    assert found.integers and not [r.fault for r in found.rows if r.fault], found.summary()
    assert {op for r in found.rows for op in r.float_ops} <= {*float_ops}
    return found


@pytest.mark.parametrize("seed", [1, 11])
@pytest.mark.parametrize("runtime", LITERT)
def test_sums_of_16_bits_round_as_vector_instructions_do(runtime, seed):
    """Each of these seeds has integers that two roundings of each operand would get wrong."""
    torch.manual_seed(seed)
    a, b = torch.randn(2, 64, 1021) * 3  # 13 of a sample are left over
    b = b * (0.3 + seed * 0.2)
    result = quantized(lambda x, y: x + y, (a, b), "tflite_int16x8")
    proved(result, (a, b), (a[:1], b[:1]), runtime=runtime)
    proved(quantized(lambda x, y: x + y, (a, b[:, :1]), "tflite_int16x8"), (a, b[:, :1]), runtime=runtime)


def test_tables_hold_what_the_c_library_computes(tmp_path):
    x = torch.linspace(-6, 6, 20001)[None]
    for name, f in (("tanh", torch.tanh), ("exp", torch.exp)):
        graph = chipfit.lint(network(f), (x,), "tflite_int8").graph
        path = export_tflite(graph, None, tmp_path / f"{name}.tflite")
        (got,) = lookup("runtime", "litert_reference")(path).run([x.numpy()]).values()
        assert torch.equal(torch.from_numpy(got), libm(name, x))
        assert (libm(name, x) - f(x.double()).float()).abs().max() < 1e-4


def test_tanh_at_a_tie():
    """tanh(x) is half a step as the C library rounds it: XNNPACK goes to the even code, the others away from zero."""
    halves = (torch.arange(-120, 121).double() + 0.5) / 128
    near = torch.atanh(halves).float()
    x = (near[:, None] + near.abs()[:, None] * 2.0**-23 * torch.arange(-4, 5)).reshape(-1)
    y = 128 * libm("tanh", x)
    ties = x[(y - torch.floor(y)) == 0.5].abs().unique()[::16]
    assert len(ties) > 3
    for v in ties.tolist():
        result = quantized(torch.tanh, (torch.tensor([[v, -v]]),), "tflite_int8", rule="no_clipping")
        result = restored(result, {result.graph.inputs[0]: (v / 64, 0)})
        for runtime in LITERT:
            proved(result, torch.tensor([[v, -v]]), runtime=runtime)


WINDOWS = [(3, 2, 1), (2, 3, 1), (3, 3, 1), (2, 2, 1), (3, 2, 0), ((3, 2), (2, 3), (1, 0)), (5, 3, 2)]
#: TensorFlow Lite places windows as SAME or VALID, and only of SAME's, which are centred and none beyond the
#: image, does a part count
BEYOND = {(w, False) for w in WINDOWS if w != (3, 3, 1)} | {((3, 2, 1), True), ((3, 2, 0), True), ((5, 3, 2), True)}


@pytest.mark.parametrize("counted", [True, False, None], ids=["counted", "not_counted", "max"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_that_reach_beyond_the_image_count_what_torch_counts(tmp_path, window, counted):
    def f(x):
        if counted is None:
            return F.max_pool2d(F.leaky_relu(x, 0.5), *window, ceil_mode=True)
        return F.avg_pool2d(F.leaky_relu(x, 0.5), *window, ceil_mode=True, count_include_pad=counted)

    torch.manual_seed(0)
    x, more = torch.randn(2, 4, 8, 7) + 2, torch.randn(2, 4, 8, 7) + 2
    onnx = quantized(f, (x,), "ort_cpu")
    proved(onnx, more, float_ops=["LeakyRelu"])
    path = export_onnx(onnx.graph, None, tmp_path / "float.onnx")
    (got,) = lookup("runtime", "onnxruntime")(path).run([x.numpy()]).values()
    assert torch.allclose(torch.from_numpy(got), f(x), atol=1e-6)
    if (window, counted) in BEYOND:
        with pytest.raises(chipfit.errors.UnsupportedError, match="reach beyond what counts"):
            export_tflite(onnx.graph, None, tmp_path / "float.tflite")
        return
    path = export_tflite(onnx.graph, None, tmp_path / "float.tflite")
    (got,) = lookup("runtime", "litert_reference")(path).run([x.numpy()]).values()
    assert torch.allclose(torch.from_numpy(got), f(x), atol=1e-6)
    result = quantized(f, (x,), "tflite_int8")
    for runtime in LITERT:
        proved(result, more, runtime=runtime)


def test_softmax_over_a_single_element_is_one():
    """ONNX Runtime's quantized kernel gives 0 there."""
    for axis, shape in ((1, (3, 1, 5)), (-1, (3, 5, 1))):
        result = quantized(lambda x, axis=axis: x.softmax(axis), (torch.randn(shape),), "ort_cpu")
        proved(result, torch.randn(shape))
        assert float(result.model(torch.randn(shape)).min()) > 0.99
    for platform in ("tflite_int8", "tflite_int16x8"):
        result = quantized(lambda x: x.softmax(1), (torch.randn(3, 1, 5),), platform)
        for runtime in LITERT:
            proved(result, torch.randn(3, 1, 5), runtime=runtime)


SOFT = {
    "global": lambda x, first, last: last(F.adaptive_avg_pool2d(first(x), 1)),
    "average": lambda x, first, last: last(F.avg_pool2d(first(x), 2)),
    "average_padded": lambda x, first, last: last(F.avg_pool2d(first(x), 3, 2, 1)),
    "max": lambda x, first, last: last(F.max_pool2d(first(x), 2)),
    "slice": lambda x, first, last: last(first(x)[:, :, 2:5, 1:3]),
    "padded": lambda x, first, last: last(F.pad(first(x), (1, 0, 2, 1), value=0.7)),
}


@pytest.mark.parametrize("name", SOFT)
def test_a_soft_tie_that_is_not_kept_requantizes(name):
    """tensorrt prefers pools and moves to keep their operand's scale; where they do not, codes change."""
    torch.manual_seed(0)
    layers = nn.Conv2d(6, 6, 3, 1, 1), nn.Conv2d(6, 5, 1)
    result = quantized(SOFT[name], (torch.randn(4, 6, 8, 8) * 2,), "tensorrt", *layers)
    assert any(n.exec == "follow" for n in result.plan.nodes.values())
    proved(result, torch.randn(4, 6, 8, 8) * 2, runtime="onnxruntime", float_ops=["Conv2D"])


@pytest.mark.parametrize("op", ["relu", "leaky"])
def test_an_operator_that_computes_is_not_a_move(op):
    """qnnpack lets Relu follow its operand's format, and its codes start above 0."""
    f = {"relu": F.relu, "leaky": lambda x: F.leaky_relu(x, 0.1)}[op]
    result = quantized(lambda x, m: f(m(x)) * f(x), (torch.randn(4, 6, 8, 8),), "qnnpack", nn.Conv2d(6, 6, 1))
    proved(result, torch.randn(4, 6, 8, 8), runtime="onnxruntime", float_ops=["Relu", "Conv2D"])


@pytest.mark.parametrize("overrides", [{}, {"Conv2D": {"activation_bits": 16}}])
def test_biases_of_8_bit_layers_have_the_32_bits_that_litert_reads(overrides):
    """ethos_u allows 40."""
    net = build.sequential(nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    with_floats = load("ethos_u").model_copy(update={"float_unit": True})  # the linear layer cannot read 16 bits
    result = build.quantized(net, torch.randn(4, 6, 8, 8), with_floats, overrides=overrides)
    assert {t.grid.bits for t in result.plan.tensors.values() if t.role == "bias" and t.quantized} == {40}
    for runtime in LITERT:
        proved(result, torch.randn(4, 6, 8, 8), runtime=runtime, float_ops=overrides)


def test_a_group_finds_the_operands_of_all_its_members():
    """relu(a) * b as one kernel: b is read by another operator between the two."""
    platform = load("ort_cpu")
    fuse = Fuse(chain=(("Relu",), ("Mul",)), src=("O2",), conf="I")
    platform = platform.model_copy(update={"fuse": (fuse, *platform.fuse)})

    def f(a, b, m):
        gate = F.relu(a)
        c = m(b)
        return gate * b + c

    x = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    result = quantized(f, x, platform, nn.Conv2d(3, 3, 1))
    assert any(len(g) == 2 and "mul" in g[1] for g in result.plan.groups)
    proved(result, (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)), float_ops=["Relu", "Mul"])


def test_a_class_token_is_repeated_for_every_sample_of_the_file():
    """In a `.tflite` file, whose batch is fixed for it, and which runs once for each sample."""

    def tokens(m, x):
        return m.linear(torch.cat((m.token.expand(x.shape[0], -1, -1), x), 1))

    net = model_of(tokens, token=torch.randn(1, 1, 8), linear=nn.Linear(8, 8))
    result = build.quantized(net, torch.randn(4, 5, 8), "tflite_int8")
    for runtime in LITERT:
        proved(result, torch.randn(3, 5, 8), runtime=runtime, float_ops=["aten.expand.default"])


def test_a_split_of_which_one_part_stays_in_float():
    """Codes are split, and what only a function in float reads of them is not stored."""

    def f(x, a, b):
        u, v = a(x).chunk(2, 1)
        return b(u) + torch.sin(v)

    for platform, runtimes in (("ort_cpu", ("onnxruntime",)), ("tflite_int8", LITERT)):
        x = torch.randn(4, 4, 6, 6)
        result = quantized(f, (x,), platform, nn.Conv2d(4, 8, 1), nn.Conv2d(4, 4, 1), overrides={"Sin": "float"})
        for runtime in runtimes:
            result.verify([torch.randn(4, 4, 6, 6)], runtime=runtime).require({"Sin", "Add", "Curve"})
