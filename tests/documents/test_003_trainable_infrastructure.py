"""Statements of the document "trainable_infrastructure Module"; of Keras, more in tests/frameworks/keras."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import chipfit as mct
from chipfit import trainable_infrastructure as ti
from chipfit.constants import MIN_THRESHOLD, THRESHOLD
from chipfit.errors import ConfigError
from chipfit.target_platform_capabilities.target_platform import QuantizationMethod
from chipfit.trainable_infrastructure import TrainableQuantizerActivationConfig, TrainableQuantizerWeightsConfig
from tests.build import model_of, randn, sequential, small_cnn
from tests.mct.trainable.quantizers_of_a_user import OurWeights

WEIGHTS = TrainableQuantizerWeightsConfig(
    weights_quantization_method=QuantizationMethod.SYMMETRIC,
    weights_n_bits=8,
    weights_quantization_params={THRESHOLD: 2.0},
    enable_weights_quantization=True,
    weights_channels_axis=3,
    weights_per_channel_threshold=True,
    min_threshold=MIN_THRESHOLD,
)
ACTIVATION = TrainableQuantizerActivationConfig(
    activation_quantization_method=QuantizationMethod.UNIFORM,
    activation_n_bits=8,
    activation_quantization_params={THRESHOLD: 2.0},
    enable_activation_quantization=True,
    min_threshold=MIN_THRESHOLD,
)
BASES = [ti.BaseKerasTrainableQuantizer, ti.BasePytorchTrainableQuantizer]
MARK = ti.mark_quantizer(ti.QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], "halved")


def edited(config, **fields):
    return type(config)(**{**vars(config), **fields})


def quantizer_of(base):
    """Return a class of weight quantizers that halves weights; it has no inferable twin."""

    @MARK
    class Halved(base):
        def __init__(self, quantization_config: TrainableQuantizerWeightsConfig):
            super().__init__(quantization_config)

        def initialize_quantization(self, tensor_shape, name, layer):
            return {}

        def __call__(self, inputs, training):
            return inputs / 2

    return Halved


def data():
    yield [randn(8, 3, 8, 8)]


# ---------------------------------------------------------------- wrappers, holders, and what they hold


@pytest.mark.parametrize("facade", ["post_training_quantization", "quantization_aware_training_init"])
def test_layers_with_quantized_weights_are_wrapped_and_activations_have_holders(facade):
    float_model = small_cnn(norm=True)
    model, info = getattr(mct, f"pytorch_{facade}")(float_model, data)
    wrapped = {n: m for n, m in model.named_modules() if isinstance(m, ti.PytorchQuantizationWrapper)}
    assert {n: type(m.layer) for n, m in wrapped.items()} == {"0": nn.Conv2d, "3": nn.Conv2d, "7": nn.Linear}
    holders = [m for m in model.modules() if isinstance(m, ti.PytorchActivationQuantizationHolder)]
    assert len(holders) == 4  # of the input, two ReLUs and the output; the flattened tensor shares that of its input
    conv = wrapped["3"]
    assert conv.layer.weight is conv.weight and conv.layer.padding == float_model[3].padding == (1, 1)
    x, scale = randn(2, 8, 8, 8), info.result.plan["3.weight"].scale.view(-1, 1, 1, 1)
    rounded = torch.clamp(torch.round(conv.weight / scale), -128, 127) * scale
    torch.testing.assert_close(conv(x), nn.functional.conv2d(x, rounded, conv.layer.bias, padding=1))


def test_layers_of_keras_are_wrapped_and_held():
    keras = pytest.importorskip("keras")
    x = keras.Input((8, 8, 3))
    net = keras.Model(x, keras.layers.ReLU(name="relu")(keras.layers.Conv2D(4, 3, name="conv")(x)))
    model, _ = mct.keras_post_training_quantization(net, lambda: iter([[np.ones((2, 8, 8, 3), "float32")]]))
    wrapper = model.get_layer("conv")
    assert isinstance(wrapper, ti.KerasQuantizationWrapper) and isinstance(wrapper.layer, keras.layers.Conv2D)
    assert any(isinstance(layer, ti.KerasActivationQuantizationHolder) for layer in model.layers)


def test_rewritten_layers_of_pytorch_keep_their_class_and_get_the_sizes_of_their_weights():
    own = model_of(lambda m, x: nn.functional.linear(x, m.weight), weight=randn(4, 6))
    up = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
    two = nn.Conv2d(3, 16, 3, stride=2, padding="valid", bias=False), nn.Conv2d(16, 8, 1, bias=False)
    net = sequential(*two, nn.BatchNorm2d(8), up, nn.Flatten(), nn.Linear(4 * 36, 6), nn.ReLU(), own)
    model, info = mct.pytorch_post_training_quantization(net, data)
    assert any("collapsed" in note for note in info.result.plan.rewrites)
    collapsed = next(m for n, m in model.named_modules() if n in "01" and hasattr(m, "layer")).layer
    assert (type(collapsed), collapsed.in_channels, collapsed.out_channels) == (nn.Conv2d, 3, 8)
    assert (collapsed.kernel_size, collapsed.stride, collapsed.bias.shape) == ((3, 3), (2, 2), (8,))
    assert collapsed(randn(1, 3, 8, 8)).shape == (1, 8, 3, 3)
    assert type(model.get_submodule("3").layer) is nn.ConvTranspose2d
    assert model.get_submodule("3")(randn(1, 8, 3, 3)).shape == (1, 4, 6, 6)
    own = model.get_submodule("7").layer  # a class that PyTorch does not have: its weights alone
    assert type(own) is nn.Module and own.weight.shape == (4, 6)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 4, 3, padding="same", dilation=2),
        nn.Conv2d(3, 6, 3, groups=3, bias=False),
        nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1, groups=3),
        nn.Linear(8, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_wrapper_of_pytorch_runs_its_layer_with_rounded_weights(layer):
    """Steps of 8 bits: the layer's own result, but for a few hundredths."""
    model, _ = mct.pytorch_post_training_quantization(sequential(layer, nn.ReLU()), data)
    wrapper, x = model.get_submodule("0"), randn(2, 3, 8, 8)
    assert type(wrapper.layer) is type(layer)
    torch.testing.assert_close(wrapper(x), layer(x), rtol=0, atol=0.03)


@pytest.mark.parametrize("base", BASES)
def test_trainable_quantizers_are_built_on_the_inferable_one(base):
    assert issubclass(base, ti.BaseInferableQuantizer)
    module = ti.keras_inferable_quantizers if "Keras" in base.__name__ else ti.pytorch_inferable_quantizers
    inferable = module.WeightsSymmetricInferableQuantizer(8, [2.0], False)
    assert isinstance(inferable, ti.BaseInferableQuantizer)
    assert inferable.initialize_quantization((3, 4), "weight", None) == {}


def test_a_users_quantizer_with_fixed_numbers_derives_from_the_inferable_one():
    class Integers(ti.BaseInferableQuantizer):
        def __call__(self, inputs):
            return inputs.round()

    layer = nn.Linear(3, 2)
    wrapper = ti.PytorchQuantizationWrapper(layer, {"weight": Integers()})
    wrapper.convert_to_inferable_quantizers()
    x = randn(4, 3)
    torch.testing.assert_close(wrapper(x), nn.functional.linear(x, layer.weight.round(), layer.bias))
    holder = ti.PytorchActivationQuantizationHolder(Integers())
    assert torch.equal(holder(x), x.round())


# ---------------------------------------------------------------- base classes


@pytest.mark.parametrize("base", BASES)
def test_the_configuration_of_a_quantizer_is_validated(base):
    halved = quantizer_of(base)
    assert halved(WEIGHTS).quantization_config == WEIGHTS
    with pytest.raises(ConfigError, match="Expected weight quantization configuration; received activation"):
        halved(ACTIVATION)
    with pytest.raises(ConfigError, match="Quantization method mismatch"):
        halved(edited(WEIGHTS, weights_quantization_method=QuantizationMethod.UNIFORM))
    with pytest.raises(ConfigError, match="improperly defined"):
        type("Unmarked", (halved,), {})(WEIGHTS)


@pytest.mark.parametrize("base", BASES)
def test_a_quantizer_must_implement_the_abstract_function(base):
    assert inspect.isabstract(base)
    with pytest.raises(TypeError, match="__call__"):
        MARK(type("Empty", (base,), {"initialize_quantization": lambda *_: {}}))(WEIGHTS)


@pytest.mark.parametrize("base", BASES)
def test_a_quantizer_without_an_inferable_twin_is_created_and_refuses_the_conversion(base):
    quantizer = quantizer_of(base)(edited(WEIGHTS, weights_quantization_params={}, min_threshold=0))
    with pytest.raises(NotImplementedError, match="Halved does not define its inferable quantizer"):
        quantizer.convert2inferable()


def test_a_model_trains_with_a_quantizer_without_an_inferable_twin_but_is_not_deployed():
    config = mct.qat.QATConfig(weight_training_method=quantizer_of(ti.BasePytorchTrainableQuantizer))
    net = sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    model, _ = mct.pytorch_quantization_aware_training_init(net, data, qat_config=config)
    w = model.get_submodule("0").get_quantized_weights()["weight"]
    torch.testing.assert_close(w, model.get_submodule("0").layer.weight / 2)
    model.train()
    model(randn(2, 3, 8, 8)).sum().backward()
    model.eval()
    with pytest.raises(NotImplementedError, match="convert2inferable"):
        mct.pytorch_quantization_aware_training_finalize(model)


@pytest.mark.parametrize("base", BASES)
def test_a_quantizer_is_restored_from_its_configuration(base):
    halved = quantizer_of(base)
    again = halved.from_config(halved(WEIGHTS).get_config())
    assert isinstance(again, halved) and again.quantization_config == WEIGHTS


def test_a_keras_model_with_trainable_quantizers_is_saved_and_loaded(tmp_path):
    keras = pytest.importorskip("keras")
    wrapper = ti.KerasQuantizationWrapper(
        keras.layers.Conv2D(5, 3), {"kernel": ti.KerasWeightsQuantizer(WEIGHTS)}, name="wrapped"
    )
    x = keras.Input((6, 6, 2))
    holder = ti.KerasActivationQuantizationHolder(ti.KerasActivationQuantizer(ACTIVATION))
    model = keras.Model(x, holder(wrapper(x)))
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    batch = np.random.default_rng(0).normal(size=(2, 6, 6, 2)).astype("float32")
    np.testing.assert_array_equal(model.predict(batch, verbose=0), again.predict(batch, verbose=0))
    assert again.get_layer("wrapped").weights_quantizers["kernel"].quantization_config == WEIGHTS


def test_the_parameters_of_a_quantizer_are_learned():
    quantizer = OurWeights(edited(WEIGHTS, weights_channels_axis=0))
    wrapper = ti.PytorchQuantizationWrapper(nn.Conv2d(2, 5, 3), {"weight": quantizer})
    threshold = next(p for n, p in wrapper.named_parameters() if "threshold" in n)
    before = threshold.detach().clone()
    wrapper(randn(4, 2, 6, 6)).square().sum().backward()
    torch.optim.SGD(wrapper.parameters(), 0.1).step()
    assert not torch.equal(threshold, before)
    assert quantizer.get_trainable_variables(ti.VariableGroup.QPARAMS) == [threshold]


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (
            TrainableQuantizerWeightsConfig,
            "weights_quantization_method weights_n_bits weights_quantization_params enable_weights_quantization "
            "weights_channels_axis weights_per_channel_threshold min_threshold weights_quantization_candidates",
        ),
        (
            TrainableQuantizerActivationConfig,
            "activation_quantization_method activation_n_bits activation_quantization_params "
            "enable_activation_quantization min_threshold activation_quantization_candidates",
        ),
    ],
)
def test_configurations_take_the_documents_arguments_of_which_only_candidates_have_a_default(config, names):
    parameters = inspect.signature(config).parameters
    assert list(parameters) == names.split()
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    assert defaults == {names.split()[-1]: None}


def test_the_example_of_weights_has_steps_of_a_64th_along_the_last_axis():
    """A threshold of 2 on the 2^7 steps of one sign."""
    wrapper = ti.PytorchQuantizationWrapper(Kernel(), {"weight": ti.PytorchWeightsQuantizer(WEIGHTS)})
    wrapper.convert_to_inferable_quantizers()
    inferable = wrapper.weights_quantizers["weight"]
    assert (inferable.threshold, inferable.channel_axis, inferable.num_bits) == ([2.0] * 5, 3, 8)
    expected = torch.clamp(torch.round(wrapper.layer.weight * 64), -128, 127) / 64
    assert torch.equal(wrapper.get_quantized_weights()["weight"], expected)
    per_tensor = edited(WEIGHTS, weights_per_channel_threshold=False, weights_channels_axis=None)
    single = ti.PytorchQuantizationWrapper(Kernel(), {"weight": ti.PytorchWeightsQuantizer(per_tensor)})
    single.convert_to_inferable_quantizers()
    assert single.weights_quantizers["weight"].threshold == [2.0]


class Kernel(nn.Module):
    """A kernel in the layout of Keras."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(3, 3, 2, 5) * 2)


def test_the_example_of_an_activation_covers_minus_two_to_two():
    """Step 4 / 255; the ends move by less than a step so that 0 is a quantized value."""
    holder = ti.PytorchActivationQuantizationHolder(ti.PytorchActivationQuantizer(ACTIVATION))
    holder.convert_to_inferable_quantizers()
    x = torch.linspace(-3, 3, 601)
    y, step = holder(x), 4 / 255
    assert len(y.unique()) == 256 and y[300] == 0
    assert y.max() - y.min() == pytest.approx(4, abs=1e-6) and abs(float(y.max()) - 2) <= step / 2 + 1e-6
    inside = (x > y.min()) & (x < y.max())
    assert (y - x)[inside].abs().max() <= step / 2 + 1e-6


def test_disabled_quantizers_leave_tensors_as_they_are():
    off = edited(WEIGHTS, enable_weights_quantization=False, weights_channels_axis=0)
    layer, x = nn.Conv2d(2, 5, 3), randn(1, 2, 6, 6)
    assert torch.equal(ti.PytorchQuantizationWrapper(layer, {"weight": ti.PytorchWeightsQuantizer(off)})(x), layer(x))
    off = edited(ACTIVATION, enable_activation_quantization=False)
    assert ti.PytorchActivationQuantizationHolder(ti.PytorchActivationQuantizer(off))(x) is x


@pytest.mark.parametrize("given, least, used", [(1e-6, 2.0**-16, 2.0**-16), (1e-6, 0, 1e-6), (0.5, 2.0**-16, 0.5)])
def test_thresholds_are_at_least_the_minimum(given, least, used):
    assert MIN_THRESHOLD == 2**-16
    config = edited(WEIGHTS, weights_quantization_params={THRESHOLD: given}, min_threshold=least)
    wrapper = ti.PytorchQuantizationWrapper(Kernel(), {"weight": ti.PytorchWeightsQuantizer(config)})
    wrapper.convert_to_inferable_quantizers()
    assert wrapper.weights_quantizers["weight"].threshold == pytest.approx([used] * 5)
    with pytest.raises(ConfigError, match="min_threshold"):
        edited(config, min_threshold=-1.0)


def test_parameters_may_be_empty_until_a_quantizer_needs_them():
    empty = edited(WEIGHTS, weights_quantization_params={}, weights_channels_axis=0)
    with pytest.raises(ConfigError, match="lack 'threshold'"):
        ti.PytorchQuantizationWrapper(nn.Conv2d(2, 5, 3), {"weight": ti.PytorchWeightsQuantizer(empty)})
