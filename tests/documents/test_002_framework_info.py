"""Statements of the document "FrameworkInfo Class"; effects of its lists: tests/mct/test_framework_info.py."""

import inspect

import pytest
import torch
from torch import nn

import chipfit as mct
from chipfit import DefaultDict, FrameworkInfo
from chipfit.errors import ModelingError
from chipfit.target_platform import QuantizationMethod
from tests.build import model_of, randn

kernel_ops = [nn.Conv2d]
kernel_channels_mapping = DefaultDict({nn.Conv2d: (0, 1)})


def information(*info):
    """Return the result of a small network with every kind of layer that the document names."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 4, 3), "act": nn.ReLU(), "fc": nn.Linear(4 * 36, 5), "out": nn.Softmax(-1)}
    net = model_of(lambda m, x: m.out(m.fc(m.act(m.conv(x)).reshape(-1, 4 * 36))), **parts)
    given = FrameworkInfo(*info)
    _, found = mct.pytorch_post_training_quantization(net, lambda: iter([[randn(8, 3, 8, 8)]] * 2), fw_info=given)
    return found.result


def stored(result):
    """Return the names of stored weights and the operators of stored results; those that only move values aside."""
    tensors = [t for t in result.plan.tensors.values() if t.quantized and t.op not in ("Input", "Reshape")]
    return {t.op if t.role == "activation" else t.name for t in tensors}


def test_the_class_takes_eight_arguments_in_order():
    names = "kernel_ops activation_ops no_quantization_ops activation_quantizer_mapping weights_quantizer_mapping "
    names += "kernel_channels_mapping activation_min_max_mapping layer_min_max_mapping"
    assert list(inspect.signature(FrameworkInfo).parameters)[:8] == names.split()


def test_the_examples_pass_the_kernel_axes_as_fourth_argument():
    info = FrameworkInfo(kernel_ops, [], [], kernel_channels_mapping, {"softmax": (0, 1)}, {nn.Softmax: (0, 1)})
    assert info.kernel_channels_mapping is kernel_channels_mapping
    assert (info.activation_min_max_mapping, info.layer_min_max_mapping) == ({"softmax": (0, 1)}, {nn.Softmax: (0, 1)})
    assert (info.activation_quantizer_mapping, info.weights_quantizer_mapping) == ({}, {})


def test_kernels_of_convolutions_only():
    assert stored(information(kernel_ops, [], [], kernel_channels_mapping, {}, {})) == {"conv.weight"}


def test_results_of_relu_too():
    found = information(kernel_ops, [nn.ReLU], [], kernel_channels_mapping, {}, {})
    assert stored(found) == {"conv.weight", "Relu"}


@pytest.mark.parametrize(("skipped", "left"), [(torch.reshape, {"conv.weight", "Relu"}), (nn.Softmax, {"conv.weight"})])
def test_layers_without_quantization_stay_in_float(skipped, left):
    """A reshape has the format of its input in any case."""
    activation_ops = [nn.ReLU] if skipped is torch.reshape else []
    found = information(kernel_ops, activation_ops, [skipped], kernel_channels_mapping, {}, {})
    assert stored(found) == left
    with pytest.raises(ModelingError, match="no_quantization_ops"):
        FrameworkInfo(kernel_ops, [skipped], [skipped])


@pytest.mark.parametrize("known", [({"softmax": (0, 1)}, {}), ({}, {nn.Softmax: (0, 1)})], ids=["function", "layer"])
def test_a_known_range_needs_no_statistics_and_covers_its_ends(known):
    activation_ops = [nn.ReLU, nn.Softmax]
    free = information(kernel_ops, activation_ops, [], kernel_channels_mapping, {}, {})
    result = information(kernel_ops, activation_ops, [], kernel_channels_mapping, *known)
    name = next(n.output for n in result.graph.nodes if n.op == "Softmax")
    assert name in free.stats and name not in result.stats
    t = result.plan[name]
    assert float(t.scale) * (t.grid.qmax + 1) == 1.0 and not t.grid.signed  # the power of two that covers [0, 1]


def test_a_method_is_mapped_to_the_function_that_quantizes():
    def stairs(bits, parameters):
        return lambda x: x.ceil()

    def halves(w, bits, signed, parameters, per_channel, axis):
        assert (bits, signed, per_channel, axis) == (8, True, True, 0)
        return (w * 2).round() / 2

    mappings = {QuantizationMethod.POWER_OF_TWO: stairs}, {QuantizationMethod.SYMMETRIC: halves}
    result = information(kernel_ops, [nn.Softmax], [], *mappings, kernel_channels_mapping)
    assert set((result.graph.weights["conv.weight"] * 2 % 1).unique().tolist()) == {0.0}
    assert torch.equal(result.model(randn(2, 3, 8, 8)), torch.ones(2, 5))
