"""Every field of a quantization configuration changes the plan, and the exported file where it shows there."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import chipfit
from chipfit.errors import ModelingError, UnsupportedError
from chipfit.facade.target_platform.configs import BIAS_ATTR, KERNEL_ATTR
from chipfit.target_platform import (
    AttributeQuantizationConfig,
    Fusing,
    OperationsSetToLayers,
    OperatorsSet,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
    TargetPlatformCapabilities,
    TargetPlatformModel,
)

FLOAT = AttributeQuantizationConfig()
KERNEL = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 8, True, True)
WIDE = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 32, False, True)


class Net(nn.Module):
    """Convolution, activation, pool, dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.pool, self.fc = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Linear(96, 5),
        )

    def forward(self, x):
        return self.fc(self.pool(self.act(self.conv(x))).flatten(1))


def config(kernel=KERNEL, bias=FLOAT, **changes):
    base = OpQuantizationConfig(
        FLOAT,
        {KERNEL_ATTR: kernel, BIAS_ATTR: bias},
        QuantizationMethod.POWER_OF_TWO,
        8,
        (8, 16),
        True,
        False,
        None,
        None,
        None,
    )
    return base.clone_and_edit(**changes)


def fit(conv=None, fc=None, tanh=None, pool=None, default=None, fusings=(), net=Net, **model):
    """The network quantized on a chip whose sets have these configurations."""
    torch.manual_seed(0)
    given = {"Conv": conv, "FullyConnected": fc, "Tanh": tanh, "MaxPool": pool}
    as_options = lambda c: (
        c if c is None or isinstance(c, QuantizationConfigOptions) else QuantizationConfigOptions([c])
    )
    plain = config(FLOAT)
    sets = {
        n: OperatorsSet(
            n,
            as_options(c) if c else QuantizationConfigOptions([config()]) if n in ("Conv", "FullyConnected") else None,
        )
        for n, c in given.items()
    }
    chip = TargetPlatformModel(
        QuantizationConfigOptions([default or plain]),
        **model,
        operator_set=sets.values(),
        fusing_patterns=[Fusing([sets[n] for n in f]) for f in fusings],
    )
    return chipfit.quantize(net().eval(), [torch.randn(8, 3, 8, 8) for _ in range(3)], chip, progress=False)


def weight(result, layer="conv", suffix="weight"):
    return next(
        t
        for t in result.plan.tensors.values()
        if t.layer == layer and t.role != "activation" and t.name.endswith(suffix)
    )


def output(result, op):
    node = next(n for n in result.graph.nodes if n.op == op)
    return result.plan.tensors[node.output]


def is_power_of_two(x):
    return bool((torch.log2(x) == torch.log2(x).round()).all())


# ---------------------------------------------------------------- activations


def test_power_of_two_activations():
    t = output(fit(), "Tanh")
    assert is_power_of_two(t.scale)
    assert t.zero_point == 0


def test_symmetric_activations():
    t = output(fit(tanh=config(FLOAT, activation_quantization_method=QuantizationMethod.SYMMETRIC)), "Tanh")
    assert not is_power_of_two(t.scale)
    assert t.zero_point == 0


def test_uniform_activations():
    lopsided = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ELU())
    result = fit(
        default=config(FLOAT, activation_quantization_method=QuantizationMethod.UNIFORM),
        conv=config(activation_quantization_method=QuantizationMethod.UNIFORM),
        net=lopsided,
    )
    t = output(result, "Elu")
    assert t.zero_point not in (-128, 0, 127)
    assert not is_power_of_two(t.scale)


@pytest.mark.parametrize("method", [QuantizationMethod.LUT_POT_QUANTIZER, QuantizationMethod.LUT_SYM_QUANTIZER])
def test_look_up_table_activations_take_as_many_values_as_they_have_bits(method):
    result = fit(tanh=config(FLOAT, activation_quantization_method=method, activation_n_bits=3))
    assert output(result, "Tanh").grid.kind == "lut"
    assert is_power_of_two(output(result, "Tanh").scale) == (method is QuantizationMethod.LUT_POT_QUANTIZER)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_activation_bits(bits):
    assert output(fit(tanh=config(FLOAT, activation_n_bits=bits)), "Tanh").grid.bits == bits


def test_activations_stay_float_where_they_are_not_enabled():
    result = fit(tanh=config(FLOAT, enable_activation_quantization=False))
    assert output(result, "Conv2D").quantized
    assert not output(result, "Tanh").quantized


@pytest.mark.parametrize(
    ("word", "signed"),
    [(Signedness.SIGNED, True), (Signedness.UNSIGNED, False), (Signedness.AUTO, True), (True, True), (False, False)],
)
def test_signedness(word, signed):
    assert output(fit(tanh=config(FLOAT, signedness=word)), "Tanh").grid.signed is signed


def test_signedness_of_data_that_is_never_negative_is_found_out():
    result = fit(net=lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    assert output(result, "Relu").grid.signed is False


def test_fixed_scale_and_zero_point():
    affine = {"activation_quantization_method": QuantizationMethod.UNIFORM, "signedness": Signedness.SIGNED}
    result = fit(tanh=config(FLOAT, fixed_scale=1 / 64, fixed_zero_point=3, **affine))
    t = output(result, "Tanh")
    assert (float(t.scale), int(t.zero_point)) == (1 / 64, 3)
    with pytest.raises(ModelingError, match="must be in -128..127"):
        fit(tanh=config(FLOAT, fixed_scale=1 / 64, fixed_zero_point=300, **affine))


def test_quantization_preserving_ties_result_to_input():
    uniform = {"activation_quantization_method": QuantizationMethod.UNIFORM}
    kept = fit(
        conv=config(**uniform),
        fc=config(**uniform),
        tanh=config(FLOAT, **uniform),
        default=config(FLOAT, **uniform),
        pool=config(FLOAT, quantization_preserving=True, enable_activation_quantization=False),
    )
    free = fit(
        conv=config(**uniform),
        fc=config(**uniform),
        tanh=config(FLOAT, **uniform),
        default=config(FLOAT, **uniform),
        pool=config(FLOAT, **uniform),
    )
    for result, tied in ((kept, True), (free, False)):
        before, after = output(result, "Tanh"), output(result, "MaxPool")
        assert any({before.name, after.name} <= set(group) for group in result.plan.ties) is tied
        assert bool(before.scale == after.scale) is tied or not tied


def test_a_kernel_that_preserves_the_scale_keeps_its_weights():
    result = fit(conv=config(quantization_preserving=True, enable_activation_quantization=False))
    assert weight(result).grid.bits == 8 and weight(result).scale.shape == (6,)
    before, after = result.plan.tensors["x"], output(result, "Conv2D")
    assert any({before.name, after.name} <= set(group) for group in result.plan.ties)
    assert before.scale == after.scale


@pytest.mark.parametrize("kernel", [FLOAT, KERNEL])
@pytest.mark.parametrize("others", [FLOAT, KERNEL])
def test_what_a_quiet_pool_does_depends_on_no_weights_that_it_has_not(kernel, others):
    quiet = config(kernel, default_weight_attr_config=others, enable_activation_quantization=False)
    result = fit(pool=quiet)
    (pool,) = [n for n in result.plan.nodes.values() if n.op == "MaxPool"]
    assert pool.exec == "follow"
    assert torch.equal(output(result, "MaxPool").scale, output(result, "Tanh").scale)
    (tanh,) = [n for n in fit(tanh=quiet).plan.nodes.values() if n.op == "Tanh"]
    assert (tanh.exec, tanh.why) == ("float", "'default_tp_model' computes Tanh in float")


def test_a_quiet_kernel_keeps_its_weights_and_a_quiet_set_of_many_does_for_each_what_it_can():
    quiet = QuantizationConfigOptions([config(enable_activation_quantization=False)])
    with TargetPlatformModel(QuantizationConfigOptions([config(FLOAT)])) as model:
        OperatorsSet("quiet", quiet)
    with TargetPlatformCapabilities(model) as chip:
        OperationsSetToLayers("quiet", [nn.Conv2d, nn.MaxPool2d, nn.Tanh])
    torch.manual_seed(0)
    result = chipfit.quantize(Net().eval(), [torch.randn(8, 3, 8, 8)], chip, progress=False)
    runs = {n.op: n.exec for n in result.plan.nodes.values()}
    assert (runs["Conv2D"], runs["Tanh"], runs["Linear"]) == ("int", "float", "int")
    assert weight(result).quantized and not output(result, "Conv2D").quantized


# ---------------------------------------------------------------- widths between operators (47)


def test_47_a_producer_writes_no_wider_codes_than_its_reader_takes():
    narrow, wide = config(FLOAT), config(FLOAT, activation_n_bits=16)
    choices = QuantizationConfigOptions([wide, narrow], base_config=wide)
    assert output(fit(tanh=choices), "Tanh").grid.bits == 16
    assert output(fit(tanh=choices, pool=config(FLOAT, supported_input_activation_n_bits=8)), "Tanh").grid.bits == 8


def test_47_seen_through_operators_that_preserve_the_scale():
    wide = config(FLOAT, activation_n_bits=16)
    choices = QuantizationConfigOptions([wide, config(FLOAT)], base_config=wide)
    pool = config(FLOAT, quantization_preserving=True, enable_activation_quantization=False)
    net = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    for supported, bits in ((8, 8), ((8, 16), 16)):
        conv = config(supported_input_activation_n_bits=supported)
        assert output(fit(conv=conv, tanh=choices, pool=pool, net=net), "Tanh").grid.bits == bits


def test_47_a_reader_that_no_choice_of_its_producer_satisfies_is_an_error():
    with pytest.raises(UnsupportedError, match="8"):
        fit(tanh=config(FLOAT, activation_n_bits=16), pool=config(FLOAT, supported_input_activation_n_bits=8))


def test_47_inside_a_fusion_nothing_is_quantized_and_the_last_operator_is():
    result = fit(fusings=[("Conv", "Tanh")])
    conv, tanh = (next(n for n in result.graph.nodes if n.op == op) for op in ("Conv2D", "Tanh"))
    assert result.plan.groups == ((conv.name, tanh.name),)
    assert not result.plan.quantized(conv.output)
    assert result.plan.quantized(tanh.output)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weight_bits(bits, tmp_path):
    result = fit(conv=config(AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, bits, True, True)))
    assert weight(result).grid.bits == bits
    assert weight(result, "fc").grid.bits == 8
    stored = {i.name: numpy_helper.to_array(i) for i in onnx.load(result.export(tmp_path / "m.onnx")).graph.initializer}
    codes = next(v for k, v in stored.items() if "conv" in k and v.ndim == 4)
    assert int(abs(codes.astype(int)).max()) <= 1 << bits - 1
    assert codes.dtype != "float32"


@pytest.mark.parametrize(
    ("method", "zero"),
    [
        (QuantizationMethod.POWER_OF_TWO, True),
        (QuantizationMethod.SYMMETRIC, True),
        (QuantizationMethod.UNIFORM, False),
    ],
)
def test_weight_methods(method, zero):
    def net():
        m = Net()
        with torch.no_grad():
            m.conv.weight += 0.1  # lopsided
        return m

    t = weight(fit(conv=config(AttributeQuantizationConfig(method, 8, True, True)), net=net))
    assert is_power_of_two(t.scale) == (method is QuantizationMethod.POWER_OF_TWO)
    assert bool((t.zero_point == 0).all()) == zero


def test_weights_per_tensor_and_per_channel():
    assert weight(fit()).scale.shape == (6,)
    assert (
        weight(fit(conv=config(AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 8, False, True)))).scale.shape
        == ()
    )


def test_weights_stay_float_where_they_are_not_enabled():
    result = fit(conv=config(FLOAT))
    assert not weight(result).quantized
    assert weight(result, "fc").quantized


def test_each_weight_attribute_has_its_own_configuration():
    assert not weight(fit(), "conv", "bias").quantized
    assert weight(fit(conv=config(bias=WIDE)), "conv", "bias").grid.bits == 32


def test_attributes_without_an_entry_take_the_default_configuration():
    four = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 4, True, True)
    result = fit(
        conv=config().clone_and_edit(default_weight_attr_config=four, attr_weights_configs_mapping={BIAS_ATTR: FLOAT})
    )
    assert weight(result).grid.bits == 4


@pytest.mark.parametrize("method", [QuantizationMethod.LUT_POT_QUANTIZER, QuantizationMethod.LUT_SYM_QUANTIZER])
@pytest.mark.parametrize("value_bits", [4, 8])
def test_entries_of_look_up_tables_have_their_bits(method, value_bits):
    t = weight(fit(conv=config(AttributeQuantizationConfig(method, 3, True, True, lut_values_bitwidth=value_bits))))
    assert t.grid.kind == "lut"
    entries = torch.as_tensor(t.grid.table).double() if t.grid.table is not None else t.scale
    assert entries.abs().max() <= 1 << value_bits - 1
    assert (entries == entries.round()).all()
    assert entries.shape[-1] <= 8
    assert is_power_of_two(t.scale) == (method is QuantizationMethod.LUT_POT_QUANTIZER)


def test_the_base_configuration_is_the_one_that_is_used():
    choices = [config(AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, b, True, True)) for b in (8, 4, 2)]
    for base, bits in zip(choices, (8, 4, 2), strict=True):
        assert weight(fit(conv=QuantizationConfigOptions(choices, base_config=base))).grid.bits == bits


def test_the_other_configurations_are_choices():
    choices = [config(AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, b, True, True)) for b in (8, 4, 2)]
    result = fit(conv=QuantizationConfigOptions(choices, base_config=choices[0]))
    assert weight(result.edit({"conv": {"bits": 4}})).grid.bits == 4
    with pytest.raises(UnsupportedError, match="2, 4, 8"):
        result.edit({"conv": {"bits": 6}})


# ---------------------------------------------------------------- the rest


@pytest.mark.parametrize("pads", [True, False])
def test_simd_padding_is_said_inside_the_block_of_its_model(pads):
    with TargetPlatformModel(QuantizationConfigOptions([config()])) as model:
        model.set_simd_padding(is_simd_padding=pads)
    assert model.is_simd_padding is pads
    with pytest.raises(ModelingError, match="Immutable"):
        model.set_simd_padding(is_simd_padding=True)


def test_simd_size_pads_the_weights_in_memory_where_the_model_says_so():
    result = fit(conv=config(simd_size=16), is_simd_padding=True)
    node = next(n for n in result.graph.nodes if n.op == "Conv2D")
    assert result.plan.nodes[node.name].simd == 16
    report = result.report
    assert report.padded_bytes - report.quantized_bytes == (16 - 6) * 3 * 3 * 3  # 6 output channels take the room of 16
    for without in (fit(is_simd_padding=True), fit(conv=config(simd_size=16))):
        assert without.report.padded_bytes == without.report.quantized_bytes


def test_metadata_is_written_into_files(tmp_path):
    def notes(result):
        props = {p.key: p.value for p in onnx.load(result.export(tmp_path / "m.onnx")).metadata_props}
        return json.loads(props["chipfit.provenance"])

    assert "platform" not in notes(fit())
    with_it = notes(fit(add_metadata=True, name="my_chip"))
    assert with_it["platform"]["name"] == "my_chip"
    assert with_it["chipfit"] == chipfit.__version__
