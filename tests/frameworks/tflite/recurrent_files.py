"""Files of one recurrent operator, written by the schema alone."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.frameworks.tflite.variables import packed

KINDS = {"f4": "FLOAT32", "i1": "INT8", "i2": "INT16", "i4": "INT32"}
LSTM, SVDF = schema.BuiltinOperator.UNIDIRECTIONAL_SEQUENCE_LSTM, schema.BuiltinOperator.SVDF
TANH, RELU = schema.ActivationFunctionType.TANH, schema.ActivationFunctionType.RELU


@dataclass
class File:
    """A network of one operator."""

    tensors: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=lambda: [schema.BufferT()])

    def tensor(self, name, shape, kind, scale=None, zero=0, data=None, variable=False):
        """Add a tensor and return its number."""
        t, q = schema.TensorT(), schema.QuantizationParametersT()
        t.name, t.shape, t.type = name.encode(), [*shape], getattr(schema.TensorType, KINDS[kind])
        t.isVariable, t.hasRank, t.buffer = variable, True, 0
        if scale is not None:
            q.scale, q.zeroPoint = [scale], [zero]
        t.quantization = q
        if data is not None:
            content = schema.BufferT()
            content.data = np.frombuffer(np.ascontiguousarray(data, kind).tobytes(), np.uint8)
            self.buffers.append(content)
            t.buffer = len(self.buffers) - 1
        self.tensors.append(t)
        return len(self.tensors) - 1

    def content(self, kind, options_type, options, inputs, output, intermediates=()):
        """Return the bytes of the file; its input is the operator's first operand."""
        code, op, graph, model = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
        code.builtinCode, code.deprecatedBuiltinCode, code.version = kind, min(kind, 127), 1
        op.inputs, op.outputs, op.intermediates = [*inputs], [output], [*intermediates]
        op.builtinOptionsType, op.builtinOptions = options_type, options
        graph.tensors, graph.operators, graph.inputs, graph.outputs = self.tensors, [op], [inputs[0]], [output]
        model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], [code], self.buffers
        return packed(model)


def lstm_file(
    path,
    *,
    batch=1,
    steps=7,
    features=9,
    size=13,
    seed=0,
    gain=1.0,
    cell=2.0**-11,
    clip=10.0,
    major=False,
    state=(1 / 128, 0),
    hidden=None,
    result=None,
    peephole=False,
    quantized=True,
):
    """Write an LSTM; `state`, `hidden` and `result` are scale and zero point of h before and behind a step and of y."""
    f, draw = File(), np.random.default_rng(seed)
    hidden, result = hidden or state, result or hidden or state
    kind, shape = "i1" if quantized else "f4", (steps, batch) if major else (batch, steps)

    def add(name, dims, scale, codes, wide="i1"):
        data = codes if quantized else codes * scale
        return f.tensor(name, dims, wide if quantized else "f4", scale if quantized else None, 0, data)

    def grid(scale, zero):
        return (scale, zero) if quantized else (None, 0)

    x = f.tensor("x", (*shape, features), kind, *grid(0.03, -5))
    scales = 0.01 * gain * (1 + draw.random((2, 4)))
    w = [add(f"w{k}", (size, features), scales[0, k], draw.integers(-127, 128, (size, features))) for k in range(4)]
    r = [add(f"r{k}", (size, size), scales[1, k], draw.integers(-127, 128, (size, size))) for k in range(4)]
    b = [add(f"b{k}", (size,), 0.03 * scales[0, k], draw.integers(-2000, 2000, size), "i4") for k in range(4)]
    holes = [add("p", (size,), 2.0**-12, draw.integers(-99, 99, size), "i2")] * 3 if peephole else [-1] * 3
    h = f.tensor("h", (batch, size), kind, *grid(*state), variable=True)
    c = f.tensor("c", (batch, size), "i2" if quantized else "f4", *grid(cell, 0), variable=True)
    middle = [f.tensor(f"m{k}", (0,), "f4") for k in range(4)] + [f.tensor("m4", (0,), kind, *grid(*hidden))]
    y = f.tensor("y", (*shape, size), kind, *grid(*result))
    options = schema.UnidirectionalSequenceLSTMOptionsT()
    options.fusedActivationFunction, options.cellClip, options.timeMajor = TANH, clip, major
    inputs = [x, *w, *r, *holes, *b, -1, -1, h, c, -1, -1, -1, -1]
    options_type = schema.BuiltinOptions.UnidirectionalSequenceLSTMOptions
    path.write_bytes(f.content(LSTM, options_type, options, inputs, y, middle))
    return path


def svdf_file(path, *, units=6, rank=2, memory=5, features=8, state="i2", seed=0, quantized=True):
    """Write an SVDF whose state has the type `state`."""
    f, draw, filters = File(), np.random.default_rng(seed), units * rank
    kind, time = ("i1", state) if quantized else ("f4", "f4")
    scale, zero, most = (0.0004, 0, 30000) if state == "i2" else (0.05, 11, 127)

    def grid(scale, zero=0):
        return (scale, zero) if quantized else (None, 0)

    def scaled(codes, scale):
        return codes if quantized else codes * scale

    x = f.tensor("x", (1, features), kind, *grid(0.03, -5))
    w = draw.integers(-127, 128, (filters, features))
    w = f.tensor("w", w.shape, kind, *grid(0.02), scaled(w, 0.02))
    t_scale = 0.5 / most
    t = draw.integers(-most, most + 1, (filters, memory))
    t = f.tensor("t", t.shape, time, *grid(t_scale), scaled(t, t_scale))
    b = draw.integers(-1000, 1000, units)
    b = f.tensor("b", b.shape, "i4" if quantized else "f4", *grid(scale * t_scale), scaled(b, scale * t_scale))
    s = f.tensor("s", (1, filters * memory), time, *grid(scale, zero), variable=True)
    y = f.tensor("y", (1, units), kind, *grid(0.05, -128))
    options = schema.SVDFOptionsT()
    options.rank, options.fusedActivationFunction = rank, RELU
    path.write_bytes(f.content(SVDF, schema.BuiltinOptions.SVDFOptions, options, [x, w, t, b, s], y))
    return path
