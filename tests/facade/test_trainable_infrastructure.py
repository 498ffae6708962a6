"""Trainable quantizers under MCT's names: configurations, base classes, layers by hand, whole models."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.constants import (
    LUT_VALUES,
    MIN_THRESHOLD,
    RANGE_MAX,
    RANGE_MIN,
    SCALE_PER_CHANNEL,
    SIGNED,
    THRESHOLD,
)
from chipfit.errors import ConfigError, UnknownNameError, UnsupportedError
from chipfit.facade.trainable.configs import config_of, stored_of
from chipfit.plan.training import Training
from chipfit.target_platform_capabilities.target_platform import QuantizationMethod
from chipfit.trainable_infrastructure import (
    BasePytorchTrainableQuantizer,
    PytorchActivationQuantizationHolder,
    PytorchActivationQuantizer,
    PytorchQuantizationWrapper,
    PytorchWeightsQuantizer,
    QuantizationTarget,
    TrainableQuantizerActivationConfig,
    TrainableQuantizerCandidateConfig,
    TrainableQuantizerWeightsConfig,
    VariableGroup,
    mark_quantizer,
    pytorch_inferable_quantizers,
)

iq = pytorch_inferable_quantizers


def numbers(x):
    return torch.tensor(x, dtype=torch.float32)


def test_the_names_of_the_document_are_where_it_says():
    assert (THRESHOLD, SIGNED, RANGE_MIN, RANGE_MAX) == ("threshold", "is_signed", "range_min", "range_max")
    assert (LUT_VALUES, SCALE_PER_CHANNEL, MIN_THRESHOLD) == ("lut_values", "scale_per_channel", 2**-16)
    assert QuantizationMethod is chipfit.target_platform.QuantizationMethod


# ---------------------------------------------------------------- inferable quantizers


def test_26_signed_halves_go_to_even():
    q = iq.ActivationSymmetricInferableQuantizer(3, [1.0], signed=True)
    x = [-3, -1.26, -0.5, -0.1, 0.124, 0.125, 0.126, 0.375, 0.625, 0.9, 2]
    assert q(numbers(x)).tolist() == [-1, -1, -0.5, 0, 0, 0, 0.25, 0.5, 0.5, 0.75, 0.75]


def test_27_unsigned():
    q = iq.ActivationPOTInferableQuantizer(3, [1.0], signed=False)
    assert q(numbers([0.125, 0.625, 0.9, 2, -0.3, -7])).tolist() == [0.125, 0.625, 0.875, 0.875, 0, 0]


def test_28_weights():
    x = torch.randn(50, 4) * 5
    y = iq.WeightsPOTInferableQuantizer(3, [4.0], per_channel=False)(x)
    assert torch.equal(y, torch.clip(torch.round(x), -4, 3)) and len(y.unique()) <= 8
    x = torch.randn(3, 3, 2, 3) * 5
    y = iq.WeightsSymmetricInferableQuantizer(2, [3.0, 6.0, 2.0], per_channel=True, channel_axis=3)(x)
    for c, t in enumerate([3.0, 6.0, 2.0]):
        step = t / 2
        assert torch.equal(y[..., c], torch.clip(torch.round(x[..., c] / step), -2, 1) * step)


def test_29_uniform():
    x = torch.linspace(-12, 6, 97)
    y = iq.WeightsUniformInferableQuantizer(3, [-10.0], [4.0], per_channel=False)(x)
    assert torch.equal(y, torch.clip(torch.round(x / 2), -5, 2) * 2)
    low, high = [-10.0, -3.0, -8.0, 0.0], [4.0, 4.0, 20.0, 7.0]
    y = iq.WeightsUniformInferableQuantizer(3, low, high, per_channel=True, channel_axis=1)(
        x.reshape(-1, 1) * torch.ones(4)
    )
    for c in range(4):
        step = (high[c] - low[c]) / 7
        torch.testing.assert_close(y[:, c], torch.clip(torch.round(x / step), low[c] / step, high[c] / step) * step)
    y = iq.ActivationUniformInferableQuantizer(2, [-10.0], [5.0])(x)
    assert torch.equal(y, torch.clip(torch.round(x / 5), -2, 1) * 5)


@pytest.mark.parametrize(
    ("low", "high", "bits", "want"),
    [
        (-1, 1, 2, (-4 / 3, 2 / 3)),
        (-1, 2, 3, (-0.857143, 2.142857)),
        (0.5, 2, 4, (0, 2)),
        (-2, -0.5, 4, (-2, 0)),
        (-0.1, 1, 4, (-0.073333, 1.026667)),
        (-1.3, 2.6, 8, (-1.3, 2.6)),
    ],
)
def test_30_zero_is_on_the_grid(low, high, bits, want):
    q = iq.ActivationUniformInferableQuantizer(bits, [low], [high])
    assert (*q.min_range, *q.max_range) == pytest.approx(want, abs=1e-6)
    assert q(numbers([0.0])).item() == 0


def test_30_activations_far_from_zero():
    y = iq.ActivationUniformInferableQuantizer(2, [3.0], [10.0])(torch.linspace(-2, 20, 50))
    assert 0 in y.tolist() and y.max() <= 10


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: iq.WeightsPOTInferableQuantizer(8, [3], False), r"Expected threshold to be power of 2 but is \[3\]"),
        (lambda: iq.ActivationPOTInferableQuantizer(8, [3], True), r"Expected threshold to be power of 2 but is \[3\]"),
        (lambda: iq.WeightsSymmetricInferableQuantizer(8, 3.0, False), "to be a list"),
        (lambda: iq.ActivationSymmetricInferableQuantizer(8, 3.0, True), "to be a list"),
        (lambda: iq.WeightsSymmetricInferableQuantizer(8, [3.0, 2.0], True), "channel_axis"),
        (lambda: iq.WeightsSymmetricInferableQuantizer(8, [3.0, 2.0], False), "per tensor"),
        (lambda: iq.WeightsUniformInferableQuantizer(8, [1.0, 1.0], [2.0, 2.0], False), "per tensor"),
        (lambda: iq.ActivationUniformInferableQuantizer(8, [2.0], [1.0]), "range is empty"),
        (lambda: iq.ActivationSymmetricInferableQuantizer(8, [-1.0], True), "not positive"),
        (lambda: iq.WeightsLUTSymmetricInferableQuantizer(9, [0.0, 1.0], [1.0], False), "at most 8 bits"),
        (lambda: iq.WeightsLUTSymmetricInferableQuantizer(1, [0.0, 1.0, 2.0], [1.0], False), "fit its width"),
        (lambda: iq.WeightsLUTSymmetricInferableQuantizer(2, [0.0, 128.0], [1.0], False), "out of bounds"),
        (lambda: iq.WeightsLUTSymmetricInferableQuantizer(2, [0.0, 1.4], [1.0], False), "out of bounds"),
        (lambda: iq.WeightsLUTSymmetricInferableQuantizer(2, [0.0, 1.6], [1.0], False), "out of bounds"),
    ],
)
def test_31_errors(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_32_look_up_tables():
    x = torch.randn(20, 3) * 4
    y = iq.WeightsLUTPOTInferableQuantizer(4, [-25.0, 25.0], [4.0], per_channel=False)(x)
    assert set(y.unique().tolist()) == {-25 / 128 * 4, 25 / 128 * 4}
    q = iq.ActivationLutPOTInferableQuantizer(3, [-8.0, 0.0, 4.0], [16.0], signed=True)
    assert q(numbers([-9, -5, -1, 0, 2, 9])).tolist() == [-1, -1, -1, 0, 0.5, 0.5]
    q = iq.ActivationLutPOTInferableQuantizer(1, [0.0, 256.0], [8.0], signed=False)
    assert q(numbers([-1, 0, 3.9, 4, 4.1, 30])).tolist() == [0, 0, 0, 0, 8, 8]
    q = iq.ActivationLutPOTInferableQuantizer(2, [-128.0, -32.0, 32.0, 127.0], [4.0], signed=True)
    assert q(numbers([-4, -1, 1, 3.99])).tolist() == [-4, -1, 1, 127 / 32]


@pytest.mark.parametrize("name", iq.CLASSES)
def test_an_inferable_quantizer_is_made_again_from_its_configuration(name):
    how = {"num_bits": 3, "threshold": [2.0], "signed": True, "per_channel": False, "lut_values": [-3.0, 0.0, 5.0]}
    how |= {"min_range": [-1.0], "max_range": [2.0]}
    cls = iq.CLASSES[name]
    q = cls(**{k: v for k, v in how.items() if k in inspect.signature(cls).parameters})
    x = torch.randn(100) * 3
    assert torch.equal(cls.from_config(q.get_config())(x), q(x)) and not torch.equal(q(x), x)
    again = iq.of(q.stored, "weight" if name.startswith("W") else "activation")
    assert type(again) is cls and torch.equal(again(x), q(x))


# ---------------------------------------------------------------- configurations


def weights(method=QuantizationMethod.SYMMETRIC, bits=8, params=None, axis=3, per_channel=True, **more):
    params = {THRESHOLD: 2.0} if params is None else params
    return TrainableQuantizerWeightsConfig(method, bits, params, True, axis, per_channel, MIN_THRESHOLD, **more)


def activation(method=QuantizationMethod.UNIFORM, bits=8, params=None):
    return TrainableQuantizerActivationConfig(method, bits, params or {THRESHOLD: 2.0}, True, MIN_THRESHOLD)


def candidates(bits, threshold=1.0):
    return [TrainableQuantizerCandidateConfig(bits, {THRESHOLD: threshold})]


def test_a_scalar_threshold_serves_every_channel():
    stored = stored_of(weights(), (3, 3, 2, 5))
    assert stored.axis == 3 and torch.equal(stored.scale, torch.full((5,), 2 / 128))


@pytest.mark.parametrize(("signed", "low"), [(None, -2.0), (True, -2.0), (False, 0.0)])
def test_a_uniform_grid_from_a_threshold(signed, low):
    params = {THRESHOLD: 2.0} if signed is None else {THRESHOLD: 2.0, SIGNED: signed}
    stored = stored_of(activation(bits=2, params=params))
    q = iq.of(stored, "activation")
    step = (2 - low) / 3
    assert stored.scale.item() == pytest.approx(step)
    assert q.min_range[0] == pytest.approx(round(low / step) * step, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: weights(params={THRESHOLD: -1.0}), ConfigError, "not positive"),
        (lambda: weights(params={THRESHOLD: np.array([1.0, 0.0])}), ConfigError, "not positive"),
        (lambda: weights(QuantizationMethod.LUT_POT_QUANTIZER, 9), ConfigError, "at most 8 bits"),
        (lambda: weights(QuantizationMethod.LUT_POT_QUANTIZER, 4), ConfigError, "lack 'lut_values'"),
        (lambda: weights(axis=None), ConfigError, "weights_channels_axis"),
        (lambda: stored_of(weights(axis=3), (5, 2)), ConfigError, "weights_channels_axis.*axis 3 of shape .5, 2"),
        (lambda: weights(method="SYMMETRIC"), ConfigError, "weights_quantization_method"),
        (lambda: weights(bits=0), ConfigError, "weights_n_bits"),
        (lambda: weights(bits=1), ConfigError, "2 to 16 bits"),
        (lambda: weights(bits=17), ConfigError, "2 to 16 bits"),
        (lambda: weights(QuantizationMethod.UNIFORM, 17), ConfigError, "1 to 16 bits"),
        (lambda: weights(weights_candidates=None), UnknownNameError, "weights_quantization_candidates"),
        (lambda: activation(params={THRESHOLD: [1.0, 2.0]}), ConfigError, "do not fit"),
        (lambda: activation(params={RANGE_MIN: 1.0, RANGE_MAX: 0.0}), ConfigError, "range is empty"),
        (lambda: activation(params={THRESHOLD: "two"}), ConfigError, "'threshold' .* must be numeric.*'two'"),
        (lambda: weights(weights_quantization_candidates=candidates(17)), ConfigError, "2 to 16 bits"),
        (lambda: weights(weights_quantization_candidates=candidates(4, -1.0)), ConfigError, "not positive"),
        (lambda: stored_of(weights(params={}), (1, 1, 1, 2)), ConfigError, "lack 'threshold'"),
        (lambda: stored_of(weights(params={THRESHOLD: [1.0] * 3}), (1, 1, 1, 2)), ConfigError, "do not fit"),
    ],
)
def test_configurations_that_describe_nothing_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_configuration_is_made_again_from_its_own():
    other = [TrainableQuantizerCandidateConfig(4, {THRESHOLD: np.array([1.0, 2.0], "float32")})]
    config = weights(params={THRESHOLD: np.array([[1.0, 3.0]], "float32")}, weights_quantization_candidates=other)
    again = TrainableQuantizerWeightsConfig.from_config(config.get_config())
    assert again.get_config() == config.get_config()
    assert again.weights_quantization_method is QuantizationMethod.SYMMETRIC
    assert again.weights_quantization_params[THRESHOLD].tolist() == [[1.0, 3.0]]
    assert again.weights_quantization_candidates[0].n_bits == 4


@pytest.mark.parametrize("role", ["weight", "activation"])
@pytest.mark.parametrize("kind", ["Symmetric", "POT", "Uniform"])
def test_what_a_plan_says_survives_its_words(role, kind):
    how = {"min_range": [-1.5], "max_range": [2.25]} if kind == "Uniform" else {"threshold": [2.0]}
    name = f"{role.capitalize()}{'s' * (role == 'weight')}{kind}InferableQuantizer"
    if role == "weight":
        how |= {"per_channel": False}
    elif kind != "Uniform":
        how |= {"signed": True}
    stored = iq.CLASSES[name](num_bits=5, **how).stored
    again = stored_of(config_of(stored, role, 4), (1, 1, 1, 1))
    assert again.grid == stored.grid and torch.equal(again.scale, stored.scale)
    assert torch.equal(again.zero_point, stored.zero_point)


# ---------------------------------------------------------------- classes of users


class _Ours(BasePytorchTrainableQuantizer):
    """Straight-through rounding with a threshold that trains: written from the document's words alone."""

    def initialize_quantization(self, tensor_shape, name, layer):
        start = np.asarray(self.start, "float32")
        layer.register_parameter(f"{name}_threshold", nn.Parameter(torch.from_numpy(start)))
        self.add_quantizer_variable("threshold", layer.get_parameter(f"{name}_threshold"), VariableGroup.QPARAMS)

    def __call__(self, inputs, training):
        step = self.get_quantizer_variable("threshold").abs() / self.levels
        x = inputs / step
        clipped = torch.clamp(x, -self.levels if self.signed else 0, self.levels - 1)
        return (clipped + (torch.round(clipped) - clipped).detach()) * step


@mark_quantizer(
    quantization_target=QuantizationTarget.Weights,
    quantization_method=[QuantizationMethod.SYMMETRIC],
    identifier="ours",
)
class OurWeights(_Ours):
    def __init__(self, quantization_config: TrainableQuantizerWeightsConfig, gain: float = 1.0):
        super().__init__(quantization_config)
        c = quantization_config
        self.start = np.asarray(c.weights_quantization_params[THRESHOLD]) * gain
        self.signed, self.levels = True, 2 ** (c.weights_n_bits - 1)

    def convert2inferable(self):
        c = self.quantization_config
        return iq.WeightsSymmetricInferableQuantizer(
            num_bits=c.weights_n_bits,
            threshold=self.get_quantizer_variable("threshold").abs().flatten().tolist(),
            per_channel=c.weights_per_channel_threshold,
            channel_axis=c.weights_channels_axis,
        )


@mark_quantizer(
    quantization_target=QuantizationTarget.Activation,
    quantization_method=[QuantizationMethod.SYMMETRIC],
    identifier="ours",
)
class OurActivations(_Ours):
    def __init__(self, quantization_config: TrainableQuantizerActivationConfig):
        super().__init__(quantization_config)
        c = quantization_config
        self.start, self.signed = c.activation_quantization_params[THRESHOLD], c.activation_quantization_params[SIGNED]
        self.levels = 2 ** (c.activation_n_bits - self.signed)

    def convert2inferable(self):
        t = [self.get_quantizer_variable("threshold").abs().item()]
        return iq.ActivationSymmetricInferableQuantizer(self.quantization_config.activation_n_bits, t, self.signed)


def test_44_a_class_without_decorator():
    class Bare(OurWeights):
        pass

    with pytest.raises(ConfigError, match="Bare is improperly defined"):
        Bare(weights())


def test_44_a_method_that_the_class_does_not_know():
    with pytest.raises(
        ConfigError, match=r"Quantization method mismatch. Expected methods: \[.*SYMMETRIC\], received: .*UNIF"
    ):
        OurWeights(weights(QuantizationMethod.UNIFORM))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OurWeights(activation()), "Expected weight quantization configuration; received activation quant"),
        (lambda: OurActivations(weights()), "Expected activation quantization configuration; received weight quant"),
    ],
)
def test_44_a_configuration_of_the_other_kind(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_constructors_are_checked():
    mark = mark_quantizer(QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], "unfit")

    @mark
    class Unannotated(OurWeights):
        def __init__(self, quantization_config):
            super().__init__(quantization_config)

    @mark
    class Demanding(OurWeights):
        def __init__(self, quantization_config: TrainableQuantizerWeightsConfig, rate):
            super().__init__(quantization_config)

    for make in (lambda: Unannotated(weights()), lambda: Demanding(weights(), 3)):
        with pytest.raises(ConfigError, match="constructor"):
            make()
    with pytest.raises(ConfigError, match="target"):
        mark_quantizer(identifier="x")
    with pytest.raises(ConfigError, match="methods"):
        mark_quantizer(QuantizationTarget.Weights, ["SYMMETRIC"])


def test_variables_by_name_and_group():
    layer, q = nn.Module(), OurWeights(weights())
    q.initialize_quantization((3, 3, 2, 5), "kernel", layer)
    assert q.get_quantizer_variable("threshold") is layer.kernel_threshold
    with pytest.raises(UnknownNameError, match="threshold"):
        q.get_quantizer_variable("treshold")
    assert q.get_trainable_variables(VariableGroup.QPARAMS) == [layer.kernel_threshold]
    assert q.get_trainable_variables(VariableGroup.WEIGHTS) == []
    q.freeze_quant_params()
    assert q.get_trainable_variables(VariableGroup.QPARAMS) == []


def test_a_quantizer_is_made_again_from_its_configuration():
    q = OurWeights(weights(params={THRESHOLD: np.array([1.0, 3.0], "float32")}))
    again = OurWeights.from_config(q.get_config())
    assert again.start.tolist() == [1.0, 3.0] and again.get_config() == q.get_config()


# ---------------------------------------------------------------- on a layer by hand


@pytest.mark.parametrize("made", [PytorchWeightsQuantizer, OurWeights])
def test_the_documents_weights_configuration_trains_a_layer(made):
    layer = nn.Conv2d(2, 5, 3)
    raw = layer.weight.detach().clone()
    wrapper = PytorchQuantizationWrapper(layer, {"weight": made(weights(axis=0))})
    x, y = torch.randn(4, 2, 8, 8), torch.randn(4, 5, 6, 6)
    stepped = {n for n, p in wrapper.named_parameters() if p.requires_grad}
    assert len(stepped) == 3  # weight, bias, and what the quantizer trains
    before = {n: p.detach().clone() for n, p in wrapper.named_parameters()}
    optimizer, losses = torch.optim.SGD(wrapper.parameters(), 0.05), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (wrapper(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(not torch.equal(p, before[n]) for n, p in wrapper.named_parameters())
    assert torch.equal(layer.weight, raw)  # it was copied
    rounded = wrapper.get_quantized_weights()["weight"]
    twin = copy.deepcopy(wrapper)
    wrapper.convert_to_inferable_quantizers()
    assert isinstance(wrapper.weights_quantizers["weight"], iq.InferableQuantizer)
    torch.testing.assert_close(wrapper.get_quantized_weights()["weight"], rounded)
    torch.testing.assert_close(twin(x), wrapper(x))


@pytest.mark.parametrize("signed", [None, False])
def test_the_documents_activation_configuration_trains(signed):
    config = activation(params={THRESHOLD: 2.0} if signed is None else {THRESHOLD: 2.0, SIGNED: signed})
    holder = PytorchActivationQuantizationHolder(PytorchActivationQuantizer(config))
    x = torch.linspace(-3, 3, 61, requires_grad=True)
    holder(x).square().sum().backward()
    (scale,) = (p for p in holder.parameters() if p.requires_grad)
    assert scale.item() == pytest.approx((2 if signed is False else 4) / 255) and scale.grad.abs() > 0
    y = holder(x)
    holder.convert_to_inferable_quantizers()
    assert type(holder.activation_holder_quantizer).__name__ == "ActivationUniformInferableQuantizer"
    torch.testing.assert_close(holder(x), y)


def test_what_is_not_enabled_is_not_rounded():
    off = {"enable_weights_quantization": False, "weights_quantization_params": {}}
    layer = nn.Linear(3, 4)
    wrapper = PytorchQuantizationWrapper(layer, {"weight": PytorchWeightsQuantizer(replaced(weights(), **off))})
    off = {"enable_activation_quantization": False}
    holder = PytorchActivationQuantizationHolder(PytorchActivationQuantizer(replaced(activation(), **off)))
    x = torch.randn(5, 3)
    for _ in range(2):
        assert torch.equal(wrapper(x), layer(x)) and holder(x) is x
        wrapper.convert_to_inferable_quantizers()
        holder.convert_to_inferable_quantizers()
    assert {n for n, _ in wrapper.named_parameters()} == {"layer.weight", "layer.bias"}


def replaced(config, **fields):
    return type(config).from_config({**config.get_config(), **fields})


@pytest.mark.parametrize(
    ("use", "error", "says"),
    [
        (lambda q, _: PytorchActivationQuantizationHolder(q), UnsupportedError, "another framework or role"),
        (lambda _, q: PytorchQuantizationWrapper(nn.Linear(3, 4), {"weight": q}), UnsupportedError, "weights of torch"),
        (lambda q, _: PytorchQuantizationWrapper(nn.Linear(3, 4), {"wieght": q}), UnknownNameError, "'weight'"),
    ],
)
def test_a_quantizer_in_the_wrong_place_is_refused(use, error, says):
    with pytest.raises(error, match=says):
        use(PytorchWeightsQuantizer(weights(axis=0)), PytorchActivationQuantizer(activation()))


# ---------------------------------------------------------------- in a whole model

DATA = [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
LABELS = torch.arange(16) % 4
PLATFORM = """
name: hand_chip
title: Symmetric grids
formats:
  a8: {bits: 8, zero: 0, signed: auto}
  w4: {bits: 4, range: RANGE, per: channel}
  b32: {bits: 32, per: channel}
ops:
  - match: ["@conv", Linear]
    use: [{in: a8, w: w4, b: b32, out: a8}]
    rules: [{mono: {b: 1, in0: -1, w: -1}, eq: 1}]
    src: [P]
    conf: D
  - {match: [Add], use: [{in: a8, out: a8}], rules: [{tie: [ins, out]}], src: [P], conf: D}
  - {match: ["@move"], exec: follow, src: [P], conf: D}
fuse: [{chain: [["@conv", Add], [Relu]], src: [P], conf: D}]
math: {kernels: onnxruntime, q_round: half_even, requant: {form: float, round: half_even}, acc: [{bits: 32}]}
runtimes: [onnxruntime]
sources: {P: "this test"}
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.head = nn.Linear(6 * 64, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(torch.flatten(torch.relu(self.body(x) + x), 1))


@pytest.fixture(scope="module", params=["full", "narrow"])
def plain(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("chip") / "hand_chip.yaml"
    file.write_text(PLATFORM.replace("RANGE", request.param))
    return chipfit.quantize(Net().eval(), DATA, platform=str(file), progress=False)


def train(model, steps=6, rate=0.02):
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(DATA[0]), LABELS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def test_a_quantizer_of_a_user_trains_a_whole_model_and_is_exact_on_the_device(plain):
    result = plain.trains(Training(weights=OurWeights, activations=OurActivations.hosted()))
    model = result.model
    hosted = [n for n, _ in model.named_parameters() if n.endswith("_threshold")]
    assert len(hosted) == len(
        {id(model.quantizer_of(n)) for n, t in plain.plan.tensors.items() if t.quantized and t.role != "bias"}
    )
    before = {n: model.get_parameter(n).detach().clone() for n in hosted}
    losses = train(model)
    assert losses[-1] < losses[0]
    assert any(not torch.equal(model.get_parameter(n), old) for n, old in before.items())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(DATA[1]), model(DATA[1]))
    after = result.trained()
    learned = model.quantizer_of("stem.weight").algorithm.quantizer.convert2inferable().stored.scale
    assert torch.equal(after.plan["stem.weight"].scale, learned)
    torch.testing.assert_close(after.model(DATA[1]), model(DATA[1]))
    assert after.verify([DATA[1]]).exact


def test_holders_and_wrappers_hold_the_users_quantizers(plain):
    model = plain.trains(Training(weights=OurWeights, activations=OurActivations)).model
    wrappers = {n: m for n, m in model.named_modules() if isinstance(m, PytorchQuantizationWrapper)}
    holders = [m for m in model.modules() if isinstance(m, PytorchActivationQuantizationHolder)]
    assert set(wrappers) == {"stem", "body", "head"}
    assert holders and all(isinstance(h.activation_holder_quantizer, OurActivations) for h in holders)
    w = wrappers["head"].get_quantized_weights()["weight"]
    assert w.shape == (4, 384) and all(len(row.unique()) <= 16 for row in w)


def test_learned_rounding_is_deployed():
    """Weights rounded down instead of to the nearest number stay so."""

    @mark_quantizer(QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], "down")
    class Down(OurWeights):
        def __init__(self, quantization_config: TrainableQuantizerWeightsConfig):
            super().__init__(quantization_config)

        def __call__(self, inputs, training):
            step = self.get_quantizer_variable("threshold") / self.levels
            return torch.clamp(torch.floor(inputs / step), -self.levels, self.levels - 1) * step

    result = chipfit.quantize(Net().eval(), DATA, platform="ort_cpu", progress=False).trains({"weights": Down})
    after = result.trained()
    plan = after.plan["head.weight"]
    codes = plan.quantize(after.graph.weights["head.weight"])
    assert torch.equal(
        codes.float(), torch.floor(result.graph.weights["head.weight"] / plan.scale[:, None]).clamp(plan.grid.qmin, 127)
    )
    assert after.verify([DATA[1]]).exact


class OtherGrid(OurWeights):
    def convert2inferable(self):
        return iq.WeightsSymmetricInferableQuantizer(7, [1.0], False)


class OffTheGrid(OurWeights):
    def __call__(self, inputs, training):
        return super().__call__(inputs, training) * 1.5 + 0.001


class OtherShape(OurWeights):
    def __call__(self, inputs, training):
        return inputs.flatten()


@pytest.mark.parametrize(
    ("cls", "says"),
    [(OtherGrid, "of another grid"), (OffTheGrid, "off the grid"), (OtherShape, "another shape")],
)
def test_a_quantizer_that_contradicts_itself_is_refused(cls, says, plain):
    name = f"Marked{cls.__name__}"

    def init(self, quantization_config: TrainableQuantizerWeightsConfig):
        OurWeights.__init__(self, quantization_config)

    marked = mark_quantizer(QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], name)(
        type(name, (cls,), {"__init__": init})
    )
    result = plain.trains({"weights": marked})
    use = result.trained if cls is not OtherShape else lambda: result.model(DATA[0])
    with pytest.raises(UnsupportedError, match=says):
        use()


def test_an_activation_that_rounds_otherwise_than_it_converts_is_refused(plain):
    @mark_quantizer(QuantizationTarget.Activation, [QuantizationMethod.SYMMETRIC], "wider")
    class Wider(OurActivations):
        def __init__(self, quantization_config: TrainableQuantizerActivationConfig):
            super().__init__(quantization_config)

        def __call__(self, inputs, training):
            return super().__call__(inputs / 2, training) * 2

    says = r"Wider rounds differently from its inferable quantizer, -?[\d.]+ to -?[\d.]+ in place of"
    with pytest.raises(UnsupportedError, match=says):
        plain.trains({"activations": Wider}).trained()


def test_a_quantizer_that_cannot_hold_a_tensor_is_refused_by_name(plain):
    result = chipfit.quantize(Net().eval(), DATA, platform="ort_cpu", progress=False)  # affine activations
    with pytest.raises(
        UnsupportedError, match="none of OurActivations quantizes activations of QuantizationMethod.UNIFORM"
    ):
        result.trains({"activations": OurActivations})
