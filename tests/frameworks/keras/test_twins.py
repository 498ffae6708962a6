"""A network written in PyTorch and in Keras is one network: same decisions, same numbers, same integers in the file."""

import numpy as np
import pytest
import torch
from torch import nn

keras = pytest.importorskip("keras")

from keras import layers  # noqa: E402 -- after the import that may skip

from chipfit.frameworks.keras.kernel_layout import to_keras  # noqa: E402
from tests.build import quantized  # noqa: E402
from tests.keras_zoo import on_others  # noqa: E402

pytestmark = [*on_others(pytest.mark.slow)]  # what is compared is made by the engine


class Block(nn.Module):
    """Residual, with batch norms to fold."""

    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


def torch_residual():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), Block(8), *head)


def keras_residual():
    def bn(x):
        return layers.BatchNormalization(epsilon=1e-5)(x)

    image = keras.Input((8, 8, 3))
    x = y = layers.MaxPooling2D(2)(layers.Conv2D(8, 3, padding="same", activation="relu")(image))
    y = layers.ReLU()(bn(layers.Conv2D(8, 3, padding="same", use_bias=False)(y)))
    y = bn(layers.Conv2D(8, 3, padding="same", use_bias=False)(y))
    x = keras.ops.relu(layers.Add()([y, x]))
    return keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


def torch_depthwise():
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6()
    depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8), nn.BatchNorm2d(8), nn.ReLU6()
    head = nn.Conv2d(8, 16, 1), nn.Hardswish(), nn.AvgPool2d(2), nn.Conv2d(16, 4, 2), nn.Sigmoid(), nn.Flatten()
    return nn.Sequential(*stem, nn.ZeroPad2d((0, 1, 0, 1)), *depthwise, *head)


def keras_depthwise():
    def bn(x):
        return layers.BatchNormalization(epsilon=1e-5)(x)

    image = keras.Input((8, 8, 3))
    x = layers.ReLU(6.0)(bn(layers.Conv2D(8, 3, padding="same")(image)))
    x = layers.ReLU(6.0)(bn(layers.DepthwiseConv2D(3, strides=2)(layers.ZeroPadding2D(((0, 1), (0, 1)))(x))))
    x = layers.AveragePooling2D(2)(layers.Conv2D(16, 1, activation="hard_silu")(x))
    return keras.Model(image, layers.Flatten()(layers.Conv2D(4, 2, activation="sigmoid")(x)))


def torch_dense():
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3), nn.Softmax(-1)
    )


def keras_dense():
    v = keras.Input((6,))
    x = layers.Dense(16, activation="tanh")(layers.Dense(16, activation="gelu")(v))
    return keras.Model(v, layers.Dense(3, activation="softmax")(layers.LayerNormalization(epsilon=1e-5)(x)))


TWINS = {
    "residual": (torch_residual, keras_residual),
    "depthwise": (torch_depthwise, keras_depthwise),
    "dense": (torch_dense, keras_dense),
}


def give(source: nn.Module, target) -> None:
    """The weights of the PyTorch network to the Keras one, module by module in order."""
    with_weights = [m for m in source.modules() if isinstance(m, (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.LayerNorm))]
    takers = [x for x in target.layers if x.weights]
    assert len(with_weights) == len(takers)
    for m, layer in zip(with_weights, takers, strict=True):
        if isinstance(m, nn.BatchNorm2d):
            new = [m.weight, m.bias, m.running_mean, m.running_var]
        else:
            depthwise = isinstance(layer, layers.DepthwiseConv2D)
            layout = "depthwise" if depthwise else {nn.Conv2d: "conv", nn.Linear: "linear"}.get(type(m), "")
            new = [
                to_keras(layout, m.weight.detach(), m.groups if depthwise else 1),
                *([m.bias] if m.bias is not None else []),
            ]
        layer.set_weights([w.detach().numpy() for w in new])


def both(name, platform):
    torch.manual_seed(3)
    in_torch, in_keras = (make() for make in TWINS[name])
    for m in in_torch.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.2), m.running_var.uniform_(0.5, 2)
            m.weight.data.uniform_(0.5, 1.5), m.bias.data.normal_(0, 0.2)
    give(in_torch.eval(), in_keras)
    x = torch.randn(16, 6) if name == "dense" else torch.randn(16, 3, 8, 8)
    last = x if name == "dense" else x.permute(0, 2, 3, 1).contiguous()
    return quantized(in_torch, x, platform), quantized(in_keras, last, platform)


def decisions(result, role):
    """Return the plans of a role's tensors in execution order, without transpositions at the border."""
    g = result.graph
    order = (
        [i for n in g.nodes for i in n.inputs if i in g.weights]
        if role != "activation"
        else [o for n in g.nodes for o in n.outputs if n.op != "Transpose"]
    )
    found = (result.plan.tensors.get(n) for n in order)
    return [t for t in found if t is not None and t.quantized and t.role == role]


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "imx500"])
@pytest.mark.parametrize("name", sorted(TWINS))
def test_twins_get_the_same_plan(name, platform):
    ours, theirs = both(name, platform)
    for role in ("weight", "bias", "activation"):
        a, b = decisions(ours, role), decisions(theirs, role)
        assert len(a) == len(b) and (a or role == "bias")  # imx500 leaves biases in float
        for s, t in zip(a, b, strict=True):
            assert (s.format, s.grid, s.axis, s.op) == (t.format, t.grid, t.axis, t.op), (s.name, t.name)
            if role == "weight":
                assert torch.equal(s.scale, t.scale)
            else:  # sums in another order may end one unit in the last place apart
                torch.testing.assert_close(s.scale, t.scale, rtol=1e-6, atol=0)
            assert torch.equal(s.zero_point, t.zero_point)


@pytest.mark.parametrize("name", sorted(TWINS))
def test_the_files_of_twins_hold_the_same_integers(name, tmp_path):
    import onnx

    held = []
    for k, result in enumerate(both(name, "ort_cpu")):
        model = onnx.load(result.export(tmp_path / f"{k}.onnx"))
        arrays = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer]
        held.append([a.tobytes() for a in arrays if a.dtype in (np.int8, np.uint8, np.int32) and a.ndim])
    assert len(held[0]) > 0 and sorted(held[0]) == sorted(held[1])
