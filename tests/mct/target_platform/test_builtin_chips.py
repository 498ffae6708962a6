"""Built-in chips with versions: their data, options, layers, and networks on them."""

import pytest
import torch
from torch import nn

from chipfit.errors import ModelingError
from chipfit.mct.target_platform.layers import layer_table, normalize_name
from chipfit.mct.target_platform.targets import chip_descriptions
from chipfit.platform.load import names
from chipfit.target_platform import QuantizationMethod, get_target_platform_capabilities
from tests.build import quantized

FILES = sorted(set(chip_descriptions()) - {"default"})
VERSIONS = [(n, v) for n in FILES for v in chip_descriptions()[n]["versions"]]


def imx500(version=None):
    return get_target_platform_capabilities("pytorch", "imx500", version)


# ---------------------------------------------------------------- data


def tables(name):
    """Return the chip's own tables, and those of every version."""
    data = chip_descriptions()[name]
    return [data, *data["versions"].values()]


@pytest.mark.parametrize("name", FILES)
def test_every_definition_of_a_file_is_used(name):
    text = " ".join(str(v) for part in tables(name) for k, v in part.items() if k != "versions")
    for kind in ("weights", "configs", "options"):
        for word in {w for part in tables(name) for w in part.get(kind, {})}:
            assert text.count(word) > 1, f"'{word}' of {kind} is never used"


@pytest.mark.parametrize("name", FILES)
def test_every_operator_set_has_layers_in_both_frameworks(name):
    pytest.importorskip("keras")
    for framework in ("pytorch", "keras"):
        tpc = get_target_platform_capabilities(framework, name)
        assert all(tpc.get_layers_by_opset_name(o.name) for o in tpc.tp_model.operator_set), framework
    rows = (rows.split() for part in tables(name) for rows in part.get("layers", {}).values())
    assert {normalize_name(row) for words in rows for row in words} <= set(layer_table()["layers"])


def test_the_default_is_imx500_and_differs_from_platform_files():
    assert [name for name in FILES if chip_descriptions()[name].get("also") == "default"] == ["imx500"]
    assert get_target_platform_capabilities("pytorch") == imx500("v1")
    assert "modelled" not in names() and not [n for n in names() if "/" in n]
    assert imx500().source is None and imx500("file").source is not None


def test_a_version_changes_its_own_fields_only():
    one, pot = (imx500(v).to_platform() for v in ("v1", "v1_pot"))
    changed = {k for k in type(one).model_fields if getattr(one, k) != getattr(pot, k)}
    assert changed == {"name", "title", "file", "formats", "ops"}
    assert {f for f in one.formats if f not in pot.formats} == {"w8_sym_ch", "w4_sym_ch", "w2_sym_ch"}
    assert {f for f in pot.formats if f not in one.formats} == {"w8_pot_ch", "w4_pot_ch", "w2_pot_ch"}


# ---------------------------------------------------------------- options, as released


@pytest.mark.parametrize(
    "unknown",
    [("theano", "imx500"), ("pytorch", "imx5000"), ("pytorch", "imx500", "v99"), ("pytorch", "tflite", "v1_lut")],
)
def test_unknown_frameworks_chips_and_versions_are_refused(unknown):
    with pytest.raises(ModelingError, match="There is no"):
        get_target_platform_capabilities(*unknown)


SYMMETRIC, LUT = ["SYMMETRIC"] * 3, ["SYMMETRIC", "LUT_SYM_QUANTIZER", "LUT_SYM_QUANTIZER"]


@pytest.mark.parametrize(
    ("version", "methods"),  # of 8, 4 and 2 bits
    [("v1", SYMMETRIC), ("v1_pot", ["POWER_OF_TWO"] * 3), ("v1_lut", LUT), ("v3", SYMMETRIC), ("v3_lut", LUT)],
)
def test_weight_methods_of_versions_of_imx500(version, methods):
    for layer in (nn.Linear(2, 2), nn.Conv2d(2, 2, 1)):
        options = imx500(version).get_qco_by_node(layer).quantization_config_list
        weights = [c.attr_weights_configs_mapping for c in options]
        found = {w["weight"].weights_n_bits: w["weight"].weights_quantization_method.name for w in weights}
        assert found == dict(zip((8, 4, 2), methods))
        assert all(w["weight"].weights_per_channel_threshold for w in weights)
        assert not any(w["bias"].enable_weights_quantization for w in weights)
        assert {c.activation_quantization_method for c in options} == {QuantizationMethod.POWER_OF_TWO}
        assert [c.simd_size for c in options] == [32, 64, 128]
    assert imx500(version).tp_model.add_metadata == (version >= "v2")


def test_v4_of_imx500_has_16_bit_activations():
    assert [c.activation_n_bits for c in imx500("v4").get_qco_by_node(nn.Tanh()).quantization_config_list] == [8, 16]


def described(tpc, layer):
    """Return a layer's options: bits and signedness of results, supported input widths, constants."""

    def constants(c):
        d = c.default_weight_attr_config
        return (d.weights_quantization_method.name, d.weights_n_bits, d.weights_per_channel_threshold)

    return [
        (
            c.activation_n_bits if c.enable_activation_quantization else "off",
            c.signedness.name,
            c.supported_input_activation_n_bits,
            c.default_weight_attr_config.enable_weights_quantization and constants(c),
        )
        for c in tpc.get_qco_by_node(layer).quantization_config_list
    ]


def test_v3_of_imx500_has_16_bit_options_that_v3_lut_lacks():
    pot = ("POWER_OF_TWO", 8, True)
    wide = [(8, "AUTO", (8, 16), pot), (16, "SIGNED", (8, 16), pot)]
    v3, lut = imx500("v3"), imx500("v3_lut")
    for function in (torch.add, torch.subtract, torch.mul):
        assert described(v3, (function, {})) == wide and described(lut, (function, {})) == [(8, "AUTO", (8,), pot)]
    for function in (torch.stack, torch.cat, torch.concat):
        assert described(v3, (function, {})) == wide and described(lut, (function, {})) == [(8, "AUTO", (8,), False)]
    for tpc in (v3, lut):
        assert described(tpc, (torch.div, {})) == [(8, "AUTO", (8,), pot)]
        assert described(tpc, nn.Tanh()) == described(tpc, nn.GELU()) == [(8, "AUTO", (8,), False)]
    assert described(v3, nn.Flatten()) == [("off", "AUTO", (8, 16), False)]
    assert described(lut, nn.Flatten()) == [("off", "AUTO", (8,), False)]
    assert (v3.tp_model.is_simd_padding, lut.tp_model.is_simd_padding) == (True, False)
    sets = [{o.name for o in tpc.tp_model.operator_set} for tpc in (v3, lut)]
    assert "Default16BitInout" in sets[0] - sets[1]
    fused = [[list(f.get_info().values()) for f in tpc.tp_model.fusing_patterns] for tpc in (v3, lut)]
    assert fused[0] == fused[1]


# ---------------------------------------------------------------- networks


class Every(nn.Module):
    """All kinds of weights, functional and as layers; pools, concatenation, constants, activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6()
        self.depthwise, self.pool = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.MaxPool2d(2)
        self.up, self.dense = nn.ConvTranspose2d(8, 4, 2, 2), nn.Linear(12 * 16, 6)
        self.offset = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.kernel = nn.Parameter(torch.randn(4, 8, 1, 1))

    def forward(self, x):
        x = self.relu(self.norm(self.conv(x)))
        x = torch.tanh(self.depthwise(x)) + x * torch.sigmoid(x) + self.offset
        x = self.pool(x)
        pooled, convolved = nn.functional.avg_pool2d(self.up(x), 2), nn.functional.conv2d(x, self.kernel)
        both = torch.cat([pooled, convolved, torch.sigmoid(x[:, :4])], 1)
        return torch.softmax(self.dense(both.flatten(1)), -1)


def fit(platform, network=None):
    torch.manual_seed(1)
    data = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    return quantized(network or Every(), data, platform), data


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_every_chip_quantizes_every_kernel(name, version):
    network = Every().eval()
    result, data = fit(get_target_platform_capabilities("pytorch", name, version), network)
    linear = ("Conv2D", "DepthwiseConv2D", "TransposeConv2D", "Linear")
    kernels = {n.inputs[1] for n in result.graph.nodes if n.op in linear}
    assert len(kernels) == 5 and [k for k in kernels if not result.plan.quantized(k)] == []
    assert (result.model(data[0]) - network(data[0])).abs().max() < 0.1  # probabilities of 6 classes


def test_v3_quantizes_constants_and_v1_does_not():
    assert [fit(imx500(v))[0].plan.quantized("offset") for v in ("v1", "v3")] == [False, True]


@pytest.mark.parametrize(("name", "runtime"), [("tflite", "litert_reference"), ("qnnpack", "onnxruntime")])
def test_a_chip_with_known_arithmetic_is_exact_on_its_runtime(name, runtime):
    result, data = fit(get_target_platform_capabilities("pytorch", name))
    found = result.verify(data[:1], runtime=runtime)
    assert [(r.layer, r.op, r.differing) for r in found.rows if r.differing and not r.in_float] == []
    assert found.summary()


def test_a_set_holds_public_layers_and_functions_of_its_name_alone():
    tpc = get_target_platform_capabilities("pytorch", "tflite", "v1")
    softmax = tpc.get_layers_by_opset_name("LogSoftmax")
    assert softmax == [nn.LogSoftmax, torch.log_softmax, nn.functional.log_softmax]
