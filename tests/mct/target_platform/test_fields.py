"""Effects of every field of a quantization configuration on the plan and the exported file."""

import json

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import chipfit
from chipfit import target_platform as tp
from chipfit.errors import ModelingError, UnsupportedError
from chipfit.mct.target_platform.configs import BIAS_ATTR
from tests.build import model_of, quantized
from tests.mct.target_platform.chips import FLOAT, KERNEL, config, kernel, options

WIDE = tp.AttributeQuantizationConfig(tp.QuantizationMethod.SYMMETRIC, 32, False, True)
POT, SYMMETRIC = tp.QuantizationMethod.POWER_OF_TWO, tp.QuantizationMethod.SYMMETRIC
AFFINE = tp.QuantizationMethod.UNIFORM
UNIFORM = {"activation_quantization_method": AFFINE}
SIGNED_UNIFORM = {**UNIFORM, "signedness": tp.Signedness.SIGNED}


def network():
    """Return a convolution, an activation, a pool and a dense layer in a row."""
    parts = {"conv": nn.Conv2d(3, 6, 3, padding=1), "act": nn.Tanh(), "pool": nn.MaxPool2d(2), "fc": nn.Linear(96, 5)}
    return model_of(lambda m, x: m.fc(m.pool(m.act(m.conv(x))).flatten(1)), **parts)


def fit(conv=None, fc=None, tanh=None, pool=None, default=None, net=network, **more):
    """Return the network quantized on a chip whose sets have these configurations or options."""
    torch.manual_seed(0)
    as_options = lambda c: c if isinstance(c, tp.QuantizationConfigOptions) else options(c)
    given = {"Conv": conv or config(), "FullyConnected": fc or config(), "Tanh": tanh, "MaxPool": pool}
    sets = {n: tp.OperatorsSet(n, as_options(c) if c else None) for n, c in given.items()}
    chip = tp.TargetPlatformModel(options(default or config(FLOAT)), **more, operator_set=sets.values())
    return quantized(net(), [torch.randn(8, 3, 8, 8) for _ in range(3)], chip, settings=chipfit.Settings(repairs="off"))


def weight(result, layer="conv", suffix="weight"):
    stored = (t for t in result.plan.tensors.values() if t.layer == layer and t.role != "activation")
    return next(t for t in stored if t.name.endswith(suffix))


def output(result, op):
    node = next(n for n in result.graph.nodes if n.op == op)
    return result.plan.tensors[node.output]


def tied(result, a, b):
    return any({a.name, b.name} <= set(group) for group in result.plan.ties)


def is_power_of_two(x):
    return bool((torch.log2(x) == torch.log2(x).round()).all())


# ---------------------------------------------------------------- single fields


def lopsided(activation):
    """Return a network whose weights and results are lopsided."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), activation)
    with torch.no_grad():
        net[0].weight += 0.5
    return net


def by(method):
    return {"activation_quantization_method": method}


FACTS = {
    "stored": lambda t: t.quantized,
    "bits": lambda t: t.grid.bits,
    "signed": lambda t: t.grid.signed,
    "kind": lambda t: t.grid.kind,
    "scales": lambda t: t.scale.numel(),
    "pot": lambda t: is_power_of_two(t.scale),
    "symmetric": lambda t: bool((t.zero_point == 0).all()),
}
LUTS = tp.QuantizationMethod.LUT_POT_QUANTIZER, tp.QuantizationMethod.LUT_SYM_QUANTIZER
SIGNED, UNSIGNED, AUTO = tp.Signedness.SIGNED, tp.Signedness.UNSIGNED, tp.Signedness.AUTO
CHOICES = [config(kernel(b)) for b in (8, 4, 2)]
ELU = {"net": lambda: lopsided(nn.ELU()), "conv": config(**UNIFORM), "default": config(FLOAT, **UNIFORM)}


@pytest.mark.parametrize(
    ("chip", "tensor", "facts"),
    [
        *(({"tanh": config(FLOAT, activation_n_bits=b)}, "Tanh", {"bits": b}) for b in (2, 4, 8, 16)),
        ({}, "Tanh", {"pot": True, "symmetric": True}),
        ({"tanh": config(FLOAT, **by(SYMMETRIC))}, "Tanh", {"pot": False, "symmetric": True}),
        (ELU, "Elu", {"pot": False, "symmetric": False}),
        ({"tanh": config(FLOAT, **by(LUTS[0]), activation_n_bits=3)}, "Tanh", {"kind": "lut", "pot": True}),
        ({"tanh": config(FLOAT, **by(LUTS[1]), activation_n_bits=3)}, "Tanh", {"kind": "lut", "pot": False}),
        *(({"tanh": config(FLOAT, signedness=s)}, "Tanh", {"signed": True}) for s in (SIGNED, AUTO, True)),
        *(({"tanh": config(FLOAT, signedness=s)}, "Tanh", {"signed": False}) for s in (UNSIGNED, False)),
        ({"net": lambda: lopsided(nn.ReLU())}, "Relu", {"signed": False}),  # data without a sign
        *(({"conv": config(kernel(b))}, "conv.weight", {"bits": b}) for b in (2, 3, 4, 8)),
        ({"conv": config(kernel(2))}, "fc.weight", {"bits": 8}),
        ({"conv": config(kernel(8, POT))}, "conv.weight", {"pot": True, "symmetric": True, "scales": 6}),
        ({}, "conv.weight", {"pot": False, "symmetric": True, "scales": 6}),
        ({**ELU, "conv": config(kernel(8, AFFINE))}, "0.weight", {"pot": False, "symmetric": False}),
        ({"conv": config(kernel(weights_per_channel_threshold=False))}, "conv.weight", {"scales": 1}),
        ({"conv": config(FLOAT)}, "conv.weight", {"stored": False}),
        ({"conv": config(FLOAT)}, "fc.weight", {"stored": True}),
        ({}, "conv.bias", {"stored": False}),
        ({"conv": config(bias=WIDE)}, "conv.bias", {"bits": 32}),
        (  # an attribute without an entry has the default configuration
            {"conv": config(default_weight_attr_config=kernel(4), attr_weights_configs_mapping={BIAS_ATTR: FLOAT})},
            *("conv.weight", {"bits": 4}),
        ),
        *(
            ({"conv": tp.QuantizationConfigOptions(CHOICES, c)}, "conv.weight", {"bits": b})
            for c, b in zip(CHOICES, (8, 4, 2))
        ),
    ],
)
def test_each_field_decides_how_a_tensor_is_stored(chip, tensor, facts):
    result = fit(**chip)
    t = result.plan.tensors.get(tensor) or output(result, tensor)
    assert {name: FACTS[name](t) for name in facts} == facts


# ---------------------------------------------------------------- activations


def test_fixed_scale_and_zero_point():
    result = fit(tanh=config(FLOAT, fixed_scale=1 / 64, fixed_zero_point=3, **SIGNED_UNIFORM))
    t = output(result, "Tanh")
    assert (float(t.scale), int(t.zero_point)) == (1 / 64, 3)
    with pytest.raises(ModelingError, match="must be in -128..127"):
        fit(tanh=config(FLOAT, fixed_scale=1 / 64, fixed_zero_point=300, **SIGNED_UNIFORM))


@pytest.mark.parametrize("preserving", [True, False])
def test_quantization_preserving_ties_result_to_input(preserving):
    others = {name: config(FLOAT, **UNIFORM) for name in ("tanh", "default")}
    pool = {"quantization_preserving": True, "enable_activation_quantization": False} if preserving else {}
    result = fit(config(**UNIFORM), config(**UNIFORM), pool=config(FLOAT, **UNIFORM, **pool), **others)
    before, after = output(result, "Tanh"), output(result, "MaxPool")
    assert tied(result, before, after) is preserving and (before.scale == after.scale or not preserving)


def test_a_kernel_that_preserves_the_scale_keeps_its_weights():
    result = fit(conv=config(quantization_preserving=True, enable_activation_quantization=False))
    assert weight(result).grid.bits == 8 and weight(result).scale.shape == (6,)
    before, after = result.plan.tensors["x"], output(result, "Conv2D")
    assert tied(result, before, after) and before.scale == after.scale


@pytest.mark.parametrize("kernel", [FLOAT, KERNEL])
@pytest.mark.parametrize("others", [FLOAT, KERNEL])
def test_an_operator_without_weights_and_with_disabled_results_ignores_weight_options(kernel, others):
    quiet = config(kernel, default_weight_attr_config=others, enable_activation_quantization=False)
    result = fit(pool=quiet)
    (pool,) = [n for n in result.plan.nodes.values() if n.op == "MaxPool"]
    assert pool.exec == "follow"
    assert torch.equal(output(result, "MaxPool").scale, output(result, "Tanh").scale)
    (tanh,) = [n for n in fit(tanh=quiet).plan.nodes.values() if n.op == "Tanh"]
    assert (tanh.exec, tanh.why) == ("float", "'default_tp_model' computes Tanh in float")


def test_a_set_with_disabled_results_keeps_weights_quantized():
    quiet = options(enable_activation_quantization=False)
    with tp.TargetPlatformModel(options(config(FLOAT))) as model:
        tp.OperatorsSet("quiet", quiet)
    with tp.TargetPlatformCapabilities(model) as chip:
        tp.OperationsSetToLayers("quiet", [nn.Conv2d, nn.MaxPool2d, nn.Tanh])
    result = quantized(network(), torch.randn(8, 3, 8, 8), chip)
    runs = {n.op: n.exec for n in result.plan.nodes.values()}
    assert (runs["Conv2D"], runs["Tanh"], runs["Linear"]) == ("int", "float", "int")
    assert weight(result).quantized and not output(result, "Conv2D").quantized


# ---------------------------------------------------------------- widths between operators


def test_supported_widths_apply_through_operators_that_preserve_the_scale():
    wide = config(FLOAT, activation_n_bits=16)
    choices = options(wide, config(FLOAT))
    pool = config(FLOAT, quantization_preserving=True, enable_activation_quantization=False)
    net = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    for supported, bits in ((8, 8), ((8, 16), 16)):
        conv = config(supported_input_activation_n_bits=supported)
        assert output(fit(conv=conv, tanh=choices, pool=pool, net=net), "Tanh").grid.bits == bits


def test_a_result_wider_than_a_consumer_reads_is_requantized_where_the_chip_can(tmp_path):
    """The default configuration reads 16 bits and writes 8; without such a kernel the description is refused."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for between in (nn.Identity(), nn.MaxPool2d(2)):  # one moves values as they are
        net = lambda b=between: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Tanh(), b, nn.Conv2d(4, 4, 1))
        kept = {"enable_activation_quantization": False, "quantization_preserving": True}
        chips = {"tanh": config(FLOAT, activation_n_bits=16), "pool": config(FLOAT, **kept)}
        result = fit(conv=config(supported_input_activation_n_bits=8), **chips, net=net)
        steps = [n.op for n in result.graph.nodes]
        assert steps[-2:] == ["Requantize", "Conv2D"]
        bits = {n.op: result.plan[n.output].grid.bits for n in result.graph.nodes}
        assert (bits["Tanh"], bits["Requantize"]) == (16, 8)
        assert any("is requantized for '3', which reads at most 8 bits" in note for note in result.plan.rewrites)
        read = result.plan[result.graph.nodes[-1].inputs[0]]
        assert torch.equal(read.scale, result.plan[result.graph.nodes[-2].output].scale)
        chips |= {"conv": config(supported_input_activation_n_bits=8)}
        with pytest.raises(UnsupportedError, match="wider than its consumer"):
            fit(default=config(FLOAT, supported_input_activation_n_bits=8), **chips, net=net)
    session = onnxruntime.InferenceSession(result.export(tmp_path / "m.onnx"))
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), result.model(x), rtol=0, atol=1e-4)


# ---------------------------------------------------------------- weights


def test_codes_of_weights_are_written_into_files(tmp_path):
    result = fit(conv=config(kernel(3)))
    stored = {i.name: numpy_helper.to_array(i) for i in onnx.load(result.export(tmp_path / "m.onnx")).graph.initializer}
    codes = next(v for k, v in stored.items() if "conv" in k and v.ndim == 4)
    assert int(abs(codes.astype(int)).max()) <= 4 and codes.dtype != "float32"


@pytest.mark.parametrize("method", LUTS)
@pytest.mark.parametrize("value_bits", [4, 8])
def test_bits_of_the_entries_of_look_up_tables(method, value_bits):
    t = weight(fit(conv=config(kernel(3, method, lut_values_bitwidth=value_bits))))
    entries = torch.as_tensor(t.grid.table).double()
    assert t.grid.kind == "lut" and len(entries) <= 8 and is_power_of_two(t.scale) == (method is LUTS[0])
    assert entries.abs().max() <= 1 << value_bits - 1 and (entries == entries.round()).all()


def test_entries_of_zero_bits_have_the_default_width():
    assert kernel(3, LUTS[0], lut_values_bitwidth=0).lut_values_bitwidth is None


def test_configurations_beside_the_base_are_choices():
    result = fit(conv=options(*CHOICES))
    assert weight(result.edit({"conv": {"bits": 2}})).grid.bits == 2
    with pytest.raises(UnsupportedError, match="2, 4, 8"):
        result.edit({"conv": {"bits": 6}})


# ---------------------------------------------------------------- memory and metadata


@pytest.mark.parametrize("pads", [True, False])
def test_simd_size_is_reported_and_pads_weights_in_memory_if_the_model_enables_it(pads, tmp_path):
    result = fit(conv=config(simd_size=16), is_simd_padding=pads)
    node = next(n for n in result.graph.nodes if n.op == "Conv2D")
    assert result.plan.nodes[node.name].simd == 16
    report = result.report
    assert next(r.simd for r in report.layers if r.op == "Conv2D") == 16
    wide = (16 - 6) * 3 * 3 * 3 if pads else 0  # 6 output channels take the room of 16
    assert report.padded_bytes - report.quantized_bytes == wide
    result.save(tmp_path / "saved")
    again = chipfit.load(tmp_path / "saved")
    assert again.plan.nodes[node.name].simd == 16 and again.report.padded_bytes == report.padded_bytes
    assert fit(is_simd_padding=pads).report.padded_bytes == fit().report.quantized_bytes


def test_metadata_is_written_into_files(tmp_path):
    def notes(result):
        props = {p.key: p.value for p in onnx.load(result.export(tmp_path / "m.onnx")).metadata_props}
        return json.loads(props["chipfit.provenance"])

    assert "platform" not in notes(fit())
    with_it = notes(fit(add_metadata=True, name="my_chip"))
    assert with_it["platform"]["name"] == "my_chip"
    assert with_it["chipfit"] == chipfit.__version__


# ---------------------------------------------------------------- functions that are several operators


def chip(entry):
    """Return a chip with a fixed scale of 1 / 128 for the results of one function."""
    with tp.TargetPlatformModel(options(config(FLOAT, **SIGNED_UNIFORM)), name="composite") as model:
        tp.OperatorsSet("Composite", options(config(FLOAT, fixed_scale=1 / 128, fixed_zero_point=0, **SIGNED_UNIFORM)))
    with tp.TargetPlatformCapabilities(model) as tpc:
        tp.OperationsSetToLayers("Composite", [entry])
    return tpc


def fixed(result):
    """Return the operators whose results have the fixed scale, in execution order."""
    plan = result.plan
    made = [(n.op, n.output) for n in result.graph.nodes]
    return [op for op, o in made if plan.quantized(o) and plan.tensors[o].origin.startswith("fixed")]


def twice(m, x):
    return nn.functional.normalize(nn.functional.normalize(m.fc(x), dim=-1) + x, dim=-1)


def test_a_fixed_scale_of_a_function_of_pytorch():
    net = model_of(twice, fc=nn.Linear(8, 8))
    assert fixed(quantized(net, torch.randn(8, 8) * 9, chip(nn.functional.normalize))) == ["L2Norm", "L2Norm"]


def test_a_fixed_scale_of_a_layer_of_keras():
    keras = pytest.importorskip("keras")

    @keras.saving.register_keras_serializable("composites")
    class Gate(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sigmoid(x * 3.0 + 1.0) * 0.5

    given = keras.Input((8,))
    model = keras.Model(given, keras.layers.Dense(4)(Gate()(Gate()(keras.layers.Dense(8)(given)))))
    result = quantized(model, torch.randn(8, 8) * 9, chip(Gate))
    assert fixed(result) == ["Mul", "Mul"]
    gates = [n.output for n in result.graph.nodes if n.layer_type == "Gate"]
    assert [o for o in gates if result.plan.tensors[o].origin.startswith("fixed")] == gates[3::4]


class Block(nn.Module):
    """A layer that holds others."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return self.inner(x)


class Residual(Block):
    def forward(self, x):
        return self.inner(x) + x


@pytest.mark.parametrize(
    ("block", "op"),
    [
        (Block(nn.Conv2d(4, 4, 1), nn.Tanh()), "Tanh"),
        (Block(nn.Tanh(), nn.MaxPool2d(1)), "MaxPool"),
        (Residual(nn.Tanh()), "Add"),
        (Residual(nn.Conv2d(4, 4, 3, padding=1)), "Add"),
        (Block(Block(nn.Conv2d(4, 4, 1), nn.Sigmoid()), nn.Tanh()), "Tanh"),
    ],
)
@pytest.mark.parametrize("tail", [[], [nn.Softplus()]], ids=["last", "inside"])
def test_a_fixed_scale_of_a_layer_that_holds_others(block, op, tail, tmp_path):
    result = quantized(nn.Sequential(nn.Conv2d(3, 4, 1), block, *tail), torch.randn(4, 3, 8, 8), chip(type(block)))
    by_op = {n.op: result.plan[n.output] for n in result.graph.nodes}
    assert fixed(result)[-1] == op and float(by_op[op].scale) == 1 / 128
    assert "Softplus" not in fixed(result)
    result.save(tmp_path / "saved")
    changed = chipfit.load(tmp_path / "saved").edit({"0": {"rule": "no_clipping"}})
    assert fixed(changed) == fixed(result)


def test_a_fixed_scale_of_a_layer_that_rewrites_remove_is_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), Block(nn.BatchNorm2d(4)), nn.Tanh())
    with pytest.raises(UnsupportedError, match=r"dictates for '1' .Block. has no tensor: rewrites removed it"):
        quantized(net, torch.randn(4, 3, 8, 8), chip(Block))


def test_a_fixed_scale_of_a_layer_of_keras_that_holds_others():
    keras = pytest.importorskip("keras")

    @keras.saving.register_keras_serializable("composites")
    class Pair(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense, self.act = keras.layers.Dense(8), keras.layers.Activation("tanh")

        def call(self, x):
            return self.act(self.dense(x))

    given = keras.Input((8,))
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Activation("sigmoid")])
    for layer, kind, op in ((Pair(), Pair, "Tanh"), (inner, keras.Sequential, "Sigmoid")):
        model = keras.Model(given, keras.layers.Dense(4)(layer(keras.layers.Dense(8)(given))))
        assert fixed(quantized(model, torch.randn(8, 8) * 9, chip(kind))) == [op]
