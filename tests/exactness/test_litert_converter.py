"""A second opinion: TensorFlow's own converter, given the scales in fake-quantization nodes, has the same integers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.random_networks import with_biases

import chipfit
from chipfit.export.tflite.writer import export_tflite
from chipfit.graph.ir import Graph, Node
from chipfit.passes.layout import apply_layout
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import dequantize, quantize
from chipfit.registry import lookup
from tests.zoo import make, unseen

pytestmark = [
    pytest.mark.slow,  # importing TensorFlow takes longer than the tests
    pytest.mark.filterwarnings("ignore:Statistics for quantized inputs"),
]


def short_scales(plan: Plan) -> Plan:
    """Scales of 12 significant bits, which survive the way through a minimum and a maximum in float32."""

    def short(s: torch.Tensor) -> torch.Tensor:
        unit = torch.exp2(torch.floor(torch.log2(s)) - 11)
        return torch.ceil(s / unit) * unit

    rounded = {k: t for k, t in plan.tensors.items() if t.quantized and t.role != "bias"}
    return replace(plan, tensors=plan.tensors | {k: t.with_(scale=short(t.scale)) for k, t in rounded.items()})


class Twin:
    """The graph in TensorFlow, channels last, every quantized tensor behind a fake-quantization node."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        import tensorflow as tf

        new, self.plan = apply_layout(graph, plan, "channels_last", change_io=True)
        self.graph, self.forms, self.tf = new.graph, new.layouts, tf

    def weight(self, name: str, order: tuple[int, ...]) -> Any:
        t, w = self.plan.tensors[name], self.graph.weights[name]
        reals = dequantize(quantize(w, t.scale, t.zero_point, t.grid, t.axis), t.scale, t.zero_point, t.axis).numpy()
        if t.role == "bias":
            return self.tf.constant(reals)
        reals, fake = reals.transpose(order), self.tf.quantization
        if t.scale.dim() == 0:
            end = 127 * float(t.scale)
            return fake.fake_quant_with_min_max_vars(reals, -end, end, narrow_range=True)
        ends = 127 * t.scale.reshape(-1).numpy()
        return fake.fake_quant_with_min_max_vars_per_channel(reals, -ends, ends, narrow_range=True)

    def stored(self, name: str, x: Any) -> Any:
        t = self.plan.tensors.get(name)
        if t is None or not t.quantized:
            return x
        low, high = (float((end - t.zero_point) * t.scale) for end in (t.grid.qmin, t.grid.qmax))
        return self.tf.quantization.fake_quant_with_min_max_vars(x, low, high)

    def __call__(self, *inputs: Any) -> Any:
        inner = {v for group in self.plan.groups for n in group[:-1] for v in self.graph.node(n).outputs}
        env = {name: self.stored(name, x) for name, x in zip(self.graph.inputs, inputs, strict=True)}
        for n in self.graph.nodes:
            y = _TWINS[n.op](self, n, *(env.get(i) for i in n.inputs))
            plain = n.output in inner or self.plan.nodes[n.name].exec == "follow"
            env[n.output] = y if plain else self.stored(n.output, y)
        return [env[o] for o in self.graph.outputs]


def _conv(w: Twin, n: Node, x: Any, *_: Any) -> Any:
    a, deep = n.attrs, n.op == "DepthwiseConv2D"
    if any(p for pair in a["padding"] for p in pair):
        x = w.tf.pad(x, ((0, 0), *a["padding"], (0, 0)))
    if deep:
        kernel = w.weight(n.inputs[1], (2, 3, 0, 1))
        kernel = w.tf.reshape(kernel, (*kernel.shape[:2], x.shape[-1], -1))
        y = w.tf.nn.depthwise_conv2d(x, kernel, (1, *a["stride"], 1), "VALID")
    else:
        y = w.tf.nn.conv2d(x, w.weight(n.inputs[1], (2, 3, 1, 0)), a["stride"], "VALID", dilations=a["dilation"])
    return w.tf.nn.bias_add(y, w.weight(n.inputs[2], (0,))) if len(n.inputs) > 2 else y


def _linear(w: Twin, n: Node, x: Any, *_: Any) -> Any:
    return w.tf.nn.bias_add(w.tf.matmul(x, w.weight(n.inputs[1], (1, 0))), w.weight(n.inputs[2], (0,)))


_TWINS: dict[str, Callable[..., Any]] = {
    "Conv2D": _conv,
    "DepthwiseConv2D": _conv,
    "Linear": _linear,
    "Relu": lambda w, n, x: w.tf.nn.relu(x),
    "Relu6": lambda w, n, x: w.tf.nn.relu6(x),
    "Add": lambda w, n, a, b: a + b,
    "Mul": lambda w, n, a, b: a * b,
    "Sigmoid": lambda w, n, x: w.tf.sigmoid(x),
    "Tanh": lambda w, n, x: w.tf.tanh(x),
    "LeakyRelu": lambda w, n, x: w.tf.nn.leaky_relu(x, n.attrs["negative_slope"]),
    "Softmax": lambda w, n, x: w.tf.nn.softmax(x),
    "GlobalAvgPool": lambda w, n, x: w.tf.reduce_mean(x, (1, 2), keepdims=True),
    "Concat": lambda w, n, *xs: w.tf.concat(xs, n.attrs["axis"]),
    "MaxPool": lambda w, n, x: w.tf.nn.max_pool2d(x, n.attrs["kernel"], n.attrs["stride"], "VALID"),
    "AvgPool": lambda w, n, x: w.tf.nn.avg_pool2d(x, n.attrs["kernel"], n.attrs["stride"], "VALID"),
    "Resize": lambda w, n, x: w.tf.image.resize(x, [2 * s for s in x.shape[1:3]], "nearest"),
    "Reshape": lambda w, n, x: w.tf.reshape(x, [-1 if s is None else s for s in w.graph.shape(n.output)]),
    "Transpose": lambda w, n, x: w.tf.transpose(x, n.attrs["perm"]),
}


def converted(twin: Twin, shape: tuple[int, ...]) -> bytes:
    tf = twin.tf
    function = tf.function(twin).get_concrete_function(tf.TensorSpec(shape, tf.float32))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    return converter.convert()


NETWORKS = "residual residual_leaky residual_sigmoid residual_tanh inverted_residual squeeze_excite".split()
NETWORKS += ["unet_nearest", "grouped_strided", "mlp"]


@pytest.mark.parametrize("name", NETWORKS)
def test_tensorflows_converter_makes_the_same_integers(tmp_path, name):
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    model, x = make(name)
    ops = {n.op for n in chipfit.lint(model, x, "tflite_int8").graph.nodes} & {"DepthwiseConv2D", "Linear"}
    overrides = {op: {"per": "tensor"} for op in ops}  # the converter fails on scales per channel there
    result = chipfit.quantize(model, [x], platform="tflite_int8", overrides=overrides, progress=False)
    x = unseen(x)
    graph, plan = result.graph, with_biases(result.graph, short_scales(result.plan))
    ours = export_tflite(graph, plan, tmp_path / "ours.tflite")
    (first,), (last,) = graph.inputs, graph.outputs
    codes = lookup("runtime", "litert_reference")(ours, [first, last]).run([x.numpy()])

    twin = Twin(graph, plan)
    into, out = (twin.forms.get(v, tuple(range(codes[v].ndim))) for v in (first, last))
    theirs = Interpreter(
        model_content=converted(twin, tuple(x.shape[d] for d in into)),
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
    )
    theirs.allocate_tensors()
    (taken,), (given,) = theirs.get_input_details(), theirs.get_output_details()
    for detail, value in ((taken, first), (given, last)):
        t = plan.tensors[value]
        assert detail["quantization"] == (pytest.approx(float(t.scale), rel=1e-7), int(t.zero_point))
    theirs.set_tensor(taken["index"], np.ascontiguousarray(codes[first].transpose(into)))
    theirs.invoke()
    assert np.array_equal(theirs.get_tensor(given["index"]), codes[last].transpose(out))


@pytest.mark.parametrize("name", NETWORKS)
def test_no_operator_has_a_higher_version_than_in_the_converters_file(tmp_path, name):
    from ai_edge_litert import schema_py_generated as schema

    def versions(raw: bytes) -> dict[int, int]:
        codes = schema.ModelT.InitFromObj(schema.Model.GetRootAs(raw, 0)).operatorCodes
        return {c.builtinCode: c.version for c in sorted(codes, key=lambda c: c.version)}

    model, x = make(name)
    ops = {n.op for n in chipfit.lint(model, x, "tflite_int8").graph.nodes} & {"DepthwiseConv2D", "Linear"}
    overrides = {op: {"per": "tensor"} for op in ops}
    result = chipfit.quantize(model, [x], platform="tflite_int8", overrides=overrides, progress=False)
    ours = export_tflite(result.graph, result.plan, tmp_path / "ours.tflite", batch=1)
    twin = Twin(result.graph, with_biases(result.graph, short_scales(result.plan)))
    form = twin.forms.get(result.graph.inputs[0], tuple(range(x.dim())))
    theirs = versions(converted(twin, tuple([1, *x.shape[1:]][d] for d in form)))
    found = versions(ours.read_bytes())
    assert found.keys() & theirs.keys()
    assert {k: v for k, v in found.items() if v > theirs.get(k, v)} == {}
