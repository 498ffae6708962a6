"""Files with the operators of mct_quantizers, run by that package, give the numbers of the simulation."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from chipfit import errors
from chipfit import target_platform as tp
from chipfit.export import export
from tests.build import graph_of, grid, plan_of, quantized, randn, sequential, stored

mctq = pytest.importorskip("mct_quantizers")


def run(path, x):
    session = onnxruntime.InferenceSession(str(path), mctq.get_ort_session_options())
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def operators(path):
    """Return the quantizers of a file: kind -> attributes of the first one."""
    found = {}
    for n in onnx.load(path).graph.node:
        if n.domain == "mct_quantizers":
            found.setdefault(n.op_type, {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute})
    return found


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU()
    return sequential(*layers, nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.Linear(196, 5)), randn(6, 3, 8, 8)


@pytest.mark.parametrize(
    "platform, bits, weights, results",
    [
        (("imx500", "v1"), 8, "WeightsSymmetricQuantizer", {"ActivationPOTQuantizer"}),
        (("imx500", "v1_pot"), 8, "WeightsPOTQuantizer", {"ActivationPOTQuantizer"}),
        (("imx500", "v3_lut"), 4, "WeightsLUTSymmetricQuantizer", {"ActivationPOTQuantizer"}),
        ("ort_cpu", 8, "WeightsSymmetricQuantizer", {"ActivationSymmetricQuantizer", "ActivationUniformQuantizer"}),
    ],
)
def test_the_package_computes_what_the_simulation_computes(net, platform, bits, weights, results, tmp_path):
    model, batch = net
    chip = platform if isinstance(platform, str) else tp.get_target_platform_capabilities("pytorch", *platform)
    options = {"overrides": {"Conv2D": {"bits": bits}, "Linear": {"bits": bits}}} if bits != 8 else {}
    result = quantized(model, batch, chip, **options)
    path, x = result.export(tmp_path / "m.onnx", format="mctq"), randn(3, 3, 8, 8, seed=5)
    assert weights in operators(path) and {k for k in operators(path) if k.startswith("A")} <= results
    # floats are added in another order, which moves few of them over a boundary
    assert np.mean(np.abs(run(path, x) - result.model(x).detach().numpy()) > 1e-5) <= 0.02


def test_operators_have_the_attributes_of_the_packages_own_files(net, tmp_path):
    own = {"num_bits": 8, "signed": 1, "mctq_version": b"1.7.0"}
    path = quantized(*net, "imx500").export(tmp_path / "m.onnx", format="mctq")
    found = operators(path)
    assert found["ActivationPOTQuantizer"] == {**own, "threshold": 4.0}
    assert found["WeightsSymmetricQuantizer"] == {**own, "per_channel": 1, "channel_axis": 0}
    model = onnx.load(path)
    assert {o.domain: o.version for o in model.opset_import} == {"": 15, "mct_quantizers": 1}
    kinds = {n.op_type for n in model.graph.node}
    assert not kinds & {"QuantizeLinear", "DequantizeLinear", "Cast"}, "quantizers alone round"


@pytest.mark.parametrize(
    "how, kind, settings",
    [
        ({"on": grid(8, zero=0)}, "Symmetric", {"threshold": 16.0, "signed": 1, "num_bits": 8}),  # 0.125 * 2^7
        ({"on": grid(8, zero=0, signed=False)}, "Symmetric", {"threshold": 32.0, "signed": 0, "num_bits": 8}),
        ({"on": grid(4, zero=0, pot=True)}, "POT", {"threshold": 1.0, "signed": 1, "num_bits": 4}),
        ({"zero": 28}, "Uniform", {"min_range": -19.5, "max_range": 12.375, "num_bits": 8}),  # (-128 - 28) / 8
        ({"zero": 0}, "Uniform", {"min_range": -16.0, "max_range": 15.875, "num_bits": 8}),  # as with other zero points
        ({"zero": 0, "bits": 2}, "Uniform", {"min_range": -0.25, "max_range": 0.125, "num_bits": 2}),
        ({"on": grid(16, zero=0)}, "Symmetric", {"threshold": 4096.0, "signed": 1, "num_bits": 16}),
    ],
)
def test_ranges_follow_from_scales(how, kind, settings, tmp_path):
    plan, graph = plan_of(x=stored(0.125, **how)), graph_of("y = Relu(x)")
    path = export(graph, plan, tmp_path / "m.onnx", None, format="mctq")
    (found,) = operators(path).items()
    assert found == (f"Activation{kind}Quantizer", {**settings, "mctq_version": b"1.7.0"})
    x = randn(64, 4) * 20
    np.testing.assert_allclose(run(path, x), plan["x"].round(x).relu().numpy(), atol=1e-5)


@pytest.mark.parametrize("zeros", [[3, -5, 7, 0], [0, 0, 0, 0]])
def test_a_weight_whose_format_has_free_zero_points_stays_on_its_grid(zeros, tmp_path):
    torch.manual_seed(0)
    w, b = torch.randn(4, 4), torch.randn(4)
    plan = plan_of(w=stored([0.1, 0.2, 0.03, 0.04], zeros, bits=4, axis=0), b=stored(0.25, bits=32, zero=0))
    graph = graph_of("y = Linear(x, w, b)", weights={"w": w, "b": b})
    path = export(graph, plan, tmp_path / "m.onnx", None, format="mctq")
    assert operators(path)["WeightsUniformQuantizer"]["num_bits"] == 4
    x = randn(8, 4)
    want = x @ plan["w"].round(w).T + plan["b"].round(b)
    np.testing.assert_allclose(run(path, x), want.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"low": -127}, "integers -127..127.*Allowed: all of -128..127.*'fake'"),
        ({"rounding": "half_away"}, "rule half_away.*Allowed: half_even.*'fake'"),
        ({"scale": [0.5] * 4, "axis": 1}, "one scale for each channel.*one scale for each result"),
        ({"kind": "float", "table": (-1.0, 0.0, 1.0)}, "codes of the kind 'float'.*`.json`"),
    ],
)
def test_a_result_without_a_quantizer_is_refused(how, message, tmp_path):
    with pytest.raises(errors.UnsupportedError, match=f"'x' .*{message}"):
        export(graph_of("y = Relu(x)"), plan_of(x=stored(**how)), tmp_path / "m.onnx", None, format="mctq")


def test_dynamic_ranges_are_refused(net, tmp_path):
    with pytest.raises(errors.UnsupportedError, match="found at each call.*without `format`"):
        quantized(*net, "ort_dynamic").export(tmp_path / "m.onnx", format="mctq")
