"""Batch norms that train, folded in each step, in a Keras model: as in PyTorch, step for step, and exported."""

import keras
import numpy as np
import pytest
import torch
from torch import nn

from chipfit.errors import UnsupportedError
from chipfit.plan.training import Training
from tests.build import quantized
from tests.training.small import DATA, LABELS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.body, self.bn2 = nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6)
        self.fc, self.bn3 = nn.Linear(24, 8), nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 5)
        for m in (self.bn1, self.bn2):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.5, 0.5)
        with torch.no_grad():
            self.bn1.weight[1].neg_()
            for _ in range(20):
                self(DATA[0])

    def forward(self, x):
        x = torch.relu(self.bn1(self.stem(x)))
        x = torch.relu(self.bn2(self.body(x)))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        return self.head(torch.relu(self.bn3(self.fc(x))))


def twin() -> tuple[nn.Module, keras.Model]:
    own = Net().eval()
    norm = {"epsilon": 1e-5}
    x = inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(6, 3, use_bias=False, name="stem")(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name="bn1", **norm)(x))
    x = keras.layers.DepthwiseConv2D(3, name="body")(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name="bn2", **norm)(x))
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Flatten()(keras.layers.Permute((3, 1, 2))(x))
    x = keras.layers.Dense(8, name="fc")(x)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(name="bn3", scale=False, center=False, **norm)(x))
    model = keras.Model(inputs, keras.layers.Dense(5, name="head")(x))
    kernels = {
        "stem": own.stem.weight.permute(2, 3, 1, 0),
        "body": own.body.weight.permute(2, 3, 0, 1),
        "fc": own.fc.weight.t(),
        "head": own.head.weight.t(),
    }
    for name, kernel in kernels.items():
        bias = getattr(own, name).bias
        model.get_layer(name).set_weights([t.detach().numpy() for t in (kernel, bias) if t is not None])
    for name in ("bn1", "bn2", "bn3"):
        bn = getattr(own, name)
        numbers = (bn.weight, bn.bias, bn.running_mean, bn.running_var)
        model.get_layer(name).set_weights([t.detach().numpy() for t in numbers if t is not None])
    return own, model


@pytest.fixture(scope="module")
def results():
    own, model = twin()
    here = [x.permute(0, 2, 3, 1).contiguous() for x in DATA]
    return quantized(own, DATA), quantized(model, here), here


@pytest.mark.parametrize("bn_fold", [0, 1, 2, 3, 4])
def test_both_frameworks_train_alike(bn_fold, results):
    torchs, keras_, here = results
    training, rate = Training("lsq", bn_fold=bn_fold), 3e-4
    ours, theirs = torchs.trains(training), keras_.trains(training)
    module, model = ours.model.train(), theirs.model
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], rate)
    model.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses, names = [], ("weight", "bias", "running_mean", "running_var")
    norm = model.get_layer("stem").norm_variables if bn_fold else ()
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(DATA[0]), LABELS)
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), float(model.train_on_batch(here[0].numpy(), LABELS.numpy()))))
        for name, variable in zip(names if bn_fold and len(losses) == 1 else (), norm, strict=False):
            np.testing.assert_allclose(
                keras.ops.convert_to_numpy(variable), module.weight(f"bn1.{name}").detach(), rtol=1e-4, atol=1e-6
            )
    first, second = np.array(losses).T
    np.testing.assert_allclose(first, second, rtol=2e-6)
    model.compile(keras.optimizers.SGD(0.005), model.loss)  # so fast, numbers beside ties would have parted them
    faster = [float(model.train_on_batch(here[0].numpy(), LABELS.numpy())) for _ in range(5)]
    assert faster[-1] < second[0]
    after = theirs.trained()
    expected = keras.ops.convert_to_numpy(model(here[1].numpy(), training=False))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(after.model(here[1].numpy())), expected, atol=1e-6)
    verified = after.verify([2 * here[2]])
    assert verified.exact, verified


class Operators(keras.layers.Layer):
    """Two convolutions as operators: the batch norms behind them fold into no layer of the user's."""

    def build(self, shape):
        self.stem = self.add_weight(shape=(3, 3, shape[-1], 4), name="stem")
        self.body = self.add_weight(shape=(3, 3, 4, 1), name="body")
        self.norms = [keras.layers.BatchNormalization() for _ in range(2)]

    def call(self, x):
        x = keras.ops.relu(self.norms[0](keras.ops.conv(x, self.stem, padding="same")))
        return keras.ops.relu(self.norms[1](keras.ops.depthwise_conv(x, self.body, padding="same")))


def test_convolutions_that_are_no_layers_train_as_layers_do(results):
    x, y = results[2][0].numpy(), np.arange(8) % 4
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    outer = keras.layers.GlobalAveragePooling2D()(Operators(name="own")(inputs))
    operators, losses = keras.Model(inputs, outer), []
    own = operators.get_layer("own")
    z = keras.layers.Conv2D(4, 3, padding="same", use_bias=False, name="stem")(inputs)
    z = keras.layers.ReLU()(keras.layers.BatchNormalization()(z))
    z = keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="body")(z)
    z = keras.layers.ReLU()(keras.layers.BatchNormalization()(z))
    of_layers = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(z))
    for name in ("stem", "body"):
        of_layers.get_layer(name).set_weights([keras.ops.convert_to_numpy(getattr(own, name))])
    for model in (operators, of_layers):
        result = quantized(model, torch.from_numpy(x), training=Training("lsq", bn_fold=4))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        result.model.compile(keras.optimizers.SGD(0.01), loss)
        losses.append([float(result.model.train_on_batch(x, y)) for _ in range(4)])
        assert result.trained().verify([torch.from_numpy(x)]).exact
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-6)
    assert losses[0][-1] < losses[0][0]


def normed(x):
    """A batch norm with a negative gamma and one of zero."""
    norm = keras.layers.BatchNormalization(momentum=0.5)
    y = norm(x)
    gamma = np.linspace(-1.0, 1.5, norm.gamma.shape[0])
    gamma[1] = 0
    norm.gamma.assign(gamma)
    norm.beta.assign(np.full(len(gamma), 0.5))
    return keras.layers.ReLU()(y)


def of_images():
    x = inputs = keras.Input((8, 8, 4))
    x = normed(keras.layers.Conv2D(6, 3, groups=2)(x))
    x = normed(keras.layers.Conv2DTranspose(4, 2, strides=2)(x))
    x = normed(keras.layers.SeparableConv2D(4, 3)(x))
    x = normed(keras.layers.Dense(6)(keras.layers.Flatten()(keras.layers.MaxPooling2D(4)(x))))
    return keras.Model(inputs, keras.layers.Dense(5)(x))


def of_rows():
    x = inputs = keras.Input((16, 4))
    x = normed(keras.layers.Conv1D(6, 3, groups=2)(x))
    x = normed(keras.layers.DepthwiseConv1D(3)(x))
    x = normed(keras.layers.Conv1DTranspose(4, 2)(x))
    return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling1D()(x)))


@pytest.mark.parametrize("make, strategies", [(of_images, (2, 4)), (of_rows, (1, 3))])
def test_every_kind_of_layer_trains_with_its_batch_norm_and_is_exact_on_the_device(make, strategies):
    keras.utils.set_random_seed(0)
    model = make()
    x = np.random.default_rng(0).normal(size=(16, *model.input_shape[1:])).astype("float32")
    for _ in range(10):  # statistics of the data
        model(x, training=True)
    plain = quantized(model, torch.from_numpy(x))
    for bn_fold in strategies:
        result = plain.trains(Training("lsq", bn_fold=bn_fold))
        before = [keras.ops.convert_to_numpy(v).copy() for v in result.model.trainable_variables]
        result.model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        assert all(np.isfinite(float(result.model.train_on_batch(x, np.arange(16) % 5))) for _ in range(3))
        after = map(keras.ops.convert_to_numpy, result.model.trainable_variables)
        assert np.mean([np.array_equal(a, b) for a, b in zip(before, after, strict=True)]) < 0.1
        assert result.trained().verify([torch.from_numpy(2 * x)]).exact, bn_fold


def test_what_was_never_folded_trains_and_is_not_deployed(results):
    result = results[1].trains(Training("lsq", bn_fold=-1))
    result.model.compile(keras.optimizers.SGD(0.01), "mse")
    result.model.train_on_batch(results[2][0].numpy(), np.zeros((8, 5), "float32"))
    with pytest.raises(UnsupportedError, match="bn_fold=-1"):
        result.trained()


def test_a_batch_norm_behind_two_layers_does_not_train():
    x, norm = inputs, _ = keras.Input((8, 8, 4)), keras.layers.BatchNormalization(name="norm")
    for name in ("first", "second"):
        x = keras.layers.ReLU()(norm(keras.layers.Conv2D(4, 3, name=name)(x)))
    result = quantized(keras.Model(inputs, x), torch.randn(8, 8, 8, 4))
    with pytest.raises(UnsupportedError, match="'norm/gamma' belongs to several layers. Try: train with bn_fold=0"):
        _ = result.trains(Training("lsq", bn_fold=2)).model
    assert result.trains(Training("lsq", bn_fold=0)).model


def test_it_is_saved_and_loaded(results, tmp_path):
    result = results[1].trains(Training("lsq", bn_fold=3))
    result.model.save(tmp_path / "model.keras")
    loaded, x = keras.saving.load_model(tmp_path / "model.keras"), results[2][1].numpy()
    for training in (False, True):
        a, b = (keras.ops.convert_to_numpy(m(x, training=training)) for m in (loaded, result.model))
        np.testing.assert_allclose(a, b, atol=1e-6)
