"""A third framework in one file: a model is a list of layers over NumPy arrays, with channels last.

It is registered from outside the package, as a user's file would; see docs/design/0015-frameworks-are-adapters.md.
"""

import numpy as np
import torch

from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError, GraphError
from chipfit.frameworks.adapter import Facts, Framework
from chipfit.graph.builder import GraphBuilder, Origin
from chipfit.graph.check import check
from chipfit.graph.ir import OPAQUE, Graph, Ref
from chipfit.passes.layout import change_layout
from chipfit.registry import register


class Conv:
    """A convolution of images [N, H, W, in] without padding, kernel [h, w, in, out]."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def __call__(self, x):
        h, w = self.kernel.shape[:2]
        windows = np.lib.stride_tricks.sliding_window_view(x, (h, w), (1, 2))  # [N, H', W', in, h, w]
        return np.einsum("nyxihw,hwio->nyxo", windows, self.kernel) + self.bias

    def read(self, reader, x):
        size = [x.shape[1] - self.kernel.shape[0] + 1, x.shape[2] - self.kernel.shape[1] + 1]
        attrs = {"stride": (1, 1), "dilation": (1, 1), "padding": ((0, 0), (0, 0)), "groups": 1}
        weights = reader.weight("kernel", self.kernel.transpose(3, 2, 0, 1)), reader.weight("bias", self.bias)
        return reader.emit("Conv2D", [x.name, *weights], attrs, (None, *size, self.kernel.shape[-1]))


class Dense:
    """A linear layer [N, in] to [N, out], kernel [in, out]."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def __call__(self, x):
        return x @ self.kernel + self.bias

    def read(self, reader, x):
        weights = reader.weight("kernel", self.kernel.T), reader.weight("bias", self.bias)
        return reader.emit("Linear", [x.name, *weights], {}, (None, self.kernel.shape[1]))


class Relu:
    def __call__(self, x):
        return np.maximum(x, 0)

    def read(self, reader, x):
        return reader.emit("Relu", [x.name], {}, x.shape)


class Pool:
    """The mean over an image, [N, H, W, C] to [N, C]."""

    def __call__(self, x):
        return x.mean((1, 2))

    def read(self, reader, x):
        return reader.emit("Mean", [x.name], {"axes": (1, 2), "keepdims": False}, (None, x.shape[-1]))


class Wave:
    """An operator that only this framework knows: it stays an opaque node, and runs in float."""

    def __call__(self, x):
        return np.sin(x) + x

    def read(self, reader, x):
        return reader.emit(OPAQUE, [x.name], {"target": "toy:wave", "args": [Ref(0)], "kwargs": {}}, x.shape)


class Net:
    """A model."""

    def __init__(self, shape, *layers):
        self.shape, self.layers = shape, layers

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Reader:
    """The graph while it is read, and the layer that is read now."""

    def __init__(self):
        self.builder = GraphBuilder(Graph([], [], [], {}, {}, data_format="channels_last", framework="toy"))
        self.origin = Origin()

    def weight(self, name, array):
        name = f"{self.origin.path}/{name}"
        self.builder.graph.weights[name] = torch.from_numpy(np.ascontiguousarray(array, "float32"))
        self.builder.graph.trainable.add(name)
        return name

    def emit(self, op, inputs, attrs, shape):
        return self.builder.emit(self.origin, self.origin.path, op, inputs, attrs, [(shape, "float32")])[0]


@register("framework", "toy")
class Toy(Framework):
    facts = Facts(title="Toy", packages=("toy_framework",), channels_last=True, suffix=".toy", saving="toy.save")

    def is_model(self, thing):
        return isinstance(thing, Net)

    def capture(self, model, args, kwargs, others):
        reader = Reader()
        graph, x = reader.builder.graph, reader.builder.value("input", (None, *model.shape), "float32")
        graph.inputs = [x.name]
        for k, layer in enumerate(model.layers):
            kind = type(layer).__name__
            if not hasattr(layer, "read"):
                raise CaptureError(f"Layer {k} is a {kind}, which cannot be read")
            reader.origin = Origin(f"{kind.lower()}_{k}", kind)
            x = layer.read(reader, x)
        graph.outputs = [x.name]
        graph.in_spec, graph.out_spec = dump_call((0,), {}, ["x"]), dump_result(0, [{"output": 0}])
        graph.example = tuple(args)
        check(graph, blame="capture")
        return change_layout(graph, "channels_first").graph

    def run(self, model, inputs):
        return torch.from_numpy(model(inputs.numpy()))

    def load(self, path):
        with np.load(path) as arrays:
            return Net((arrays["kernel"].shape[0],), Dense(arrays["kernel"], arrays["bias"]))

    def opaque(self, target):
        if target != "toy:wave":
            raise GraphError("There is no such operator", got=target)
        return lambda x: torch.sin(x) + x
