"""FrameworkInfo: selection of layers, known ranges, and quantization functions of users."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit import DefaultDict, FrameworkInfo
from chipfit.errors import ModelingError, UnsupportedError
from chipfit.target_platform import LayerFilterParams, QuantizationMethod, get_target_platform_capabilities
from tests.build import model_of


def net():
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "act": nn.ReLU(), "fc": nn.Linear(4, 5), "out": nn.Softmax(-1)}
    return model_of(lambda m, x: m.out(m.fc(m.act(m.conv(x)).mean((2, 3)))), **parts)


def fit(info, name="imx500", **options):
    model = net()
    chip = get_target_platform_capabilities("pytorch", name)
    data = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    return info.apply(chipfit.quantize(model, data, chip, overrides=info.overrides(), progress=False, **options))


def quantized(result):
    stored = [t for t in result.plan.tensors.values() if t.quantized and t.op != "Input"]
    return {t.op if t.role == "activation" else t.name for t in stored}


@pytest.mark.parametrize(
    ("kernels", "results", "expected"),
    [
        ([nn.Conv2d], [], {"conv.weight"}),
        ([nn.Conv2d, nn.Linear], [], {"conv.weight", "fc.weight"}),
        ([], [nn.ReLU], {"Relu"}),
        ([nn.Conv2d], [nn.ReLU, nn.Softmax], {"conv.weight", "Relu", "Softmax"}),
    ],
)
def test_listed_kernels_and_results_are_quantized(kernels, results, expected):
    assert quantized(fit(FrameworkInfo(kernels, results, []))) == expected


def test_layers_of_which_nothing_is_quantized_are_reported_in_float():
    result = fit(FrameworkInfo([nn.Linear], [], []))
    runs = {n.op: n.exec for n in result.plan.nodes.values()}
    assert (runs["Conv2D"], runs["Relu"], runs["Linear"]) == ("float", "float", "int")


def test_layers_without_quantization_take_precedence():
    with pytest.raises(ModelingError, match="no_quantization_ops"):
        FrameworkInfo([nn.Conv2d], [], [nn.Conv2d])
    result = fit(FrameworkInfo([nn.Conv2d, nn.Linear], [nn.ReLU], [LayerFilterParams(nn.Conv2d, out_channels=4)]))
    assert quantized(result) == {"fc.weight", "Relu"}


def test_on_a_chip_with_integer_kernels_a_layer_is_quantized_as_a_whole():
    info = FrameworkInfo([nn.Conv2d, nn.Linear], [nn.Conv2d, nn.Linear, nn.ReLU], [])
    found = quantized(fit(info, "tflite"))
    assert {"conv.weight", "fc.weight", "Relu"} <= found and "Softmax" not in found


@pytest.mark.parametrize(
    "mappings", [{"layer_min_max_mapping": {nn.Softmax: (0, 1)}}, {"activation_min_max_mapping": {"softmax": (0, 1)}}]
)
def test_known_ranges_need_no_calibration(mappings):
    ops = [nn.ReLU, nn.Softmax]
    free, known = fit(FrameworkInfo([], ops, [])), fit(FrameworkInfo([], ops, [], **mappings))
    name = next(n.output for n in known.graph.nodes if n.op == "Softmax")
    assert known.stats.keys() == free.stats.keys() - {name} != free.stats.keys()
    t = known.plan.tensors[name]
    assert float(t.scale) * (t.grid.qmax + 1) == 1.0  # no clipping on [0, 1], power of two, unsigned
    assert (t.grid.signed, t.origin) == (False, "known beforehand")


def test_a_range_with_an_unknown_end_is_calibrated():
    known = {nn.ReLU: (0, None), nn.Softmax: (0, float("inf"))}
    result = fit(FrameworkInfo([], [nn.ReLU], [], layer_min_max_mapping=known))
    assert next(n.output for n in result.graph.nodes if n.op == "Relu") in result.stats


def test_a_users_function_quantizes_weights_and_must_return_a_tensor():
    seen = {}

    def halves(w, bits, signed, parameters, per_channel, axis):
        shape = parameters["threshold"].shape
        seen.update(bits=bits, signed=signed, threshold=shape, per_channel=per_channel, axis=axis)
        return (w * 2).round() / 2

    result = fit(FrameworkInfo([nn.Conv2d], [], [], {}, {QuantizationMethod.SYMMETRIC: halves}))
    assert seen == {"bits": 8, "signed": True, "threshold": (4,), "per_channel": True, "axis": 0}
    assert torch.equal(result.graph.weights["conv.weight"], (net().conv.weight * 2).round() / 2)
    with pytest.raises(UnsupportedError, match="must return a tensor"):
        fit(FrameworkInfo([nn.Conv2d], [], [], {}, {QuantizationMethod.SYMMETRIC: lambda *_: 3}))


def test_a_users_function_quantizes_results_which_cannot_be_exported(tmp_path):
    def stairs(bits, parameters):
        assert float(parameters["threshold"]) > 0
        return lambda x: x.ceil()

    result = fit(FrameworkInfo([], [nn.Softmax], [], {QuantizationMethod.POWER_OF_TWO: stairs}))
    assert torch.equal(result.model(torch.randn(2, 3, 8, 8)), torch.ones(2, 5))
    with pytest.raises(UnsupportedError, match="functions of your own"):
        result.export(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: FrameworkInfo(nn.Conv2d, [], []),
        lambda: FrameworkInfo([lambda x: x], [], []),
        lambda: FrameworkInfo([], [], [], {"SYMMETRIC": abs}),
        lambda: FrameworkInfo([], [], [], {}, {QuantizationMethod.SYMMETRIC: 3}),
        lambda: FrameworkInfo([], [], [], {}, {}, {nn.Conv2d: (0, 1)}),
        lambda: FrameworkInfo([], [], [], {}, {}, DefaultDict({nn.Conv2d: (3, 2)})),
        lambda: FrameworkInfo([], [], [], layer_min_max_mapping={nn.Softmax: (1, 0)}),
        lambda: FrameworkInfo([], [], [], layer_min_max_mapping={nn.Softmax: 1}),
        lambda: FrameworkInfo([], [], [], activation_min_max_mapping=[("softmax", (0, 1))]),
    ],
)
def test_invalid_arguments_are_refused(wrong):
    with pytest.raises(ModelingError):
        wrong()


def test_a_default_dict_has_a_value_for_every_key():
    d = DefaultDict({nn.Conv2d: (0, 1)}, (None, None))
    assert (d.get(nn.Conv2d), d.get(nn.Linear), list(d.keys())) == ((0, 1), (None, None), [nn.Conv2d])
    assert d == DefaultDict({nn.Conv2d: (0, 1)}, (None, None))
    assert DefaultDict({}).get("x") is None
