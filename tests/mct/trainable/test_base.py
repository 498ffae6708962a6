"""Base classes of trainable quantizers, and quantizers on single layers."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from chipfit import trainable_infrastructure as ti
from chipfit.constants import SIGNED, THRESHOLD
from chipfit.errors import ConfigError, UnknownNameError, UnsupportedError
from chipfit.target_platform import QuantizationMethod
from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq
from tests.mct.trainable.quantizers_of_a_user import OurActivations, OurWeights, activation, weights

MARK = ti.mark_quantizer(ti.QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], "unfit")


class Undecorated(OurWeights):
    pass


class Unfinished(ti.BasePytorchTrainableQuantizer):
    pass


@MARK
class Unannotated(OurWeights):
    def __init__(self, quantization_config):
        super().__init__(quantization_config)


@MARK
class WithoutDefault(OurWeights):
    def __init__(self, quantization_config: ti.TrainableQuantizerWeightsConfig, rate):
        super().__init__(quantization_config)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Undecorated(weights()), "Where: Undecorated.*mark_quantizer"),
        (lambda: Unfinished(weights()), "'BaseTrainableQuantizer' is improperly defined.*Where: Unfinished"),
        (lambda: Unannotated(weights()), "constructor"),
        (lambda: WithoutDefault(weights(), 3), "constructor"),
        (
            lambda: OurWeights(weights(QuantizationMethod.UNIFORM)),
            r"Quantization method mismatch. Expected methods: \[.*SYMMETRIC.*\], received: .*UNIF",
        ),
        (lambda: OurWeights(activation()), "Expected weight quantization .*; received activation quantization instead"),
        (
            lambda: OurActivations(weights()),
            "Expected activation quantization .*; received weight quantization instead",
        ),
        (lambda: ti.mark_quantizer(identifier="x"), "target"),
        (lambda: ti.mark_quantizer(ti.QuantizationTarget.Weights, ["SYMMETRIC"]), "methods"),
    ],
)
def test_improper_classes_and_configurations_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_variables_are_found_by_name_and_group():
    layer, q = nn.Module(), OurWeights(weights())
    q.initialize_quantization((3, 3, 2, 5), "kernel", layer)
    assert q.get_quantizer_variable("threshold") is layer.kernel_threshold
    with pytest.raises(UnknownNameError, match="threshold"):
        q.get_quantizer_variable("treshold")
    assert q.get_trainable_variables(ti.VariableGroup.QPARAMS) == [layer.kernel_threshold]
    assert q.get_trainable_variables(ti.VariableGroup.WEIGHTS) == []
    q.freeze_quant_params()
    assert q.get_trainable_variables(ti.VariableGroup.QPARAMS) == []


def test_a_quantizer_is_restored_from_its_configuration():
    q = OurWeights(weights(params={THRESHOLD: np.array([1.0, 3.0], "float32")}))
    again = OurWeights.from_config(q.get_config())
    assert again.start.tolist() == [1.0, 3.0] and again.get_config() == q.get_config()


# ---------------------------------------------------------------- on single layers


@pytest.mark.parametrize("made", [ti.PytorchWeightsQuantizer, OurWeights])
def test_the_documents_weights_configuration_trains_a_layer(made):
    layer = nn.Conv2d(2, 5, 3)
    raw = layer.weight.detach().clone()
    wrapper = ti.PytorchQuantizationWrapper(layer, {"weight": made(weights(axis=0))})
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
def test_the_documents_activation_configuration_trains_a_scale(signed):
    config = activation(params={THRESHOLD: 2.0} if signed is None else {THRESHOLD: 2.0, SIGNED: signed})
    holder = ti.PytorchActivationQuantizationHolder(ti.PytorchActivationQuantizer(config))
    x = torch.linspace(-3, 3, 61, requires_grad=True)
    holder(x).square().sum().backward()
    (scale,) = (p for p in holder.parameters() if p.requires_grad)
    assert scale.item() == pytest.approx((2 if signed is False else 4) / 255) and scale.grad.abs() > 0
    y = holder(x)
    holder.convert_to_inferable_quantizers()
    assert type(holder.activation_holder_quantizer).__name__ == "ActivationUniformInferableQuantizer"
    torch.testing.assert_close(holder(x), y)


def test_disabled_quantizers_pass_tensors_through():
    off = {"enable_weights_quantization": False, "weights_quantization_params": {}}
    layer = nn.Linear(3, 4)
    wrapper = ti.PytorchQuantizationWrapper(layer, {"weight": ti.PytorchWeightsQuantizer(replaced(weights(), **off))})
    off = {"enable_activation_quantization": False}
    holder = ti.PytorchActivationQuantizationHolder(ti.PytorchActivationQuantizer(replaced(activation(), **off)))
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
        (lambda q, _: ti.PytorchActivationQuantizationHolder(q), UnsupportedError, "another framework or role"),
        (
            lambda _, q: ti.PytorchQuantizationWrapper(nn.Linear(3, 4), {"weight": q}),
            UnsupportedError,
            "weights of torch",
        ),
        (lambda q, _: ti.PytorchQuantizationWrapper(nn.Linear(3, 4), {"wieght": q}), UnknownNameError, "'weight'"),
    ],
)
def test_a_quantizer_in_the_wrong_place_is_refused(use, error, says):
    with pytest.raises(error, match=says):
        use(ti.PytorchWeightsQuantizer(weights(axis=0)), ti.PytorchActivationQuantizer(activation()))
