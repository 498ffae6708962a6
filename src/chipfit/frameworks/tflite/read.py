"""Readers of the operators in `.tflite` files: the inverse of the `tflite` column of the table of operators.

An operator that is written one to one (`write: plain`) is read one to one; the others have a function here. Values
have channels last. Operators that only compute shapes are not read: the shapes come from a run of LiteRT.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError, short_message
from chipfit.frameworks.reading import Unreadable, inferred, parts_of, require, running_sum
from chipfit.frameworks.tflite.custom_options import DETECTIONS, detections
from chipfit.frameworks.tflite.model import Facts, Operator, Tensor, TfliteModel
from chipfit.graph.builder import GraphBuilder, Origin, Outputs
from chipfit.graph.check import check
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import Graph, Value
from chipfit.operators.formulas import compute
from chipfit.operators.table import OPS, enters, read_column

#: operators of the schema -> reader
READERS: dict[str, Callable[["Call"], Any]] = {}
reads = enters(READERS)
#: operators of the schema -> canonical operator that is written so; of several, the most general
OPERATORS: dict[str, str] = {}
#: operators of the schema whose operands and results are those of the canonical operator, which has no attributes
PLAIN: dict[str, None] = {}
#: operators of the schema that another one can apply to its result, by number
_FUSED = {1: "RELU", 2: "RELU_N1_TO_1", 3: "RELU6", 4: "TANH"}
#: operators of the schema that clip -> bounds
_CLIPS: dict[str, dict[str, Any]] = {"RELU_N1_TO_1": {"min": -1.0, "max": 1.0}, "RELU_0_TO_1": {"min": 0.0, "max": 1.0}}
#: operators whose results a converter may have left to clip to their integers
_SATURATING = "CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV FULLY_CONNECTED ADD SUB MUL".split()
_SAME = 0


def _enter_cell(op: str, name: str = "", write: Any = "plain", **_: Any) -> None:
    if name and (name not in OPERATORS or op in OPS[OPERATORS[name]].case_of):
        OPERATORS[name] = op
        PLAIN.update({name: None} if write in ("plain", "binary", "curve") and not OPS[op].attrs else {})


read_column("tflite", _enter_cell, OPERATORS, PLAIN)


class Reading:
    """The graph of one file while it is read; `quantized.py` derives a class that also reads grids."""

    one_value_each = False  #: each result of a node must be a tensor of the file, so that grids are known

    def __init__(self, model: TfliteModel, facts: Facts, open_batch: bool) -> None:
        """
        Args:
            facts: shapes and constants from a run of the file.
            open_batch: leave the first size of computed values open.
        """
        self.model, self.facts, self.open_batch = model, facts, open_batch
        self.builder = GraphBuilder(Graph([], [], [], {}, {}, data_format="channels_last", framework="tflite"))
        self.values: dict[int, Value] = {}  #: tensor -> the value that it became
        self._dequantized: dict[int, int] = {}  #: result of DEQUANTIZE -> its operand, a constant
        #: result of SPACE_TO_BATCH_ND -> dilation and padding of its convolution, and the result of BATCH_TO_SPACE_ND
        self.dilated: dict[int, tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]] = {}
        self._weights: dict[tuple[int, str], str] = {}

    def graph(self) -> Graph:
        """Read all operators that the outputs need, and return the graph with channels last."""
        graph, producers = self.builder.graph, {o: op for op in self.model.operators for o in op.outputs}
        for t in self.model.inputs:
            self.values[t.index] = self.builder.value(t.name, self.shape(t), t.dtype)
            graph.inputs.append(t.name)
        if self.model.left_out:
            self.warn(f"the file has more networks, which are left out: {', '.join(self.model.left_out)}")
        needed, stack = set[int](), [t.index for t in self.model.outputs]
        while stack:
            op = producers.get(stack.pop())
            if op is not None and id(op) not in needed:
                needed.add(id(op))
                stack += [i for i in _read_by(op) if i >= 0]
        for op in self.model.operators:
            if id(op) in needed:
                self._read(op)
        graph.outputs = [self.value(t.index).name for t in self.model.outputs]
        outputs = list(range(len(graph.outputs)))
        graph.in_spec = dump_call((0,) * len(graph.inputs), {}, graph.inputs)
        graph.out_spec = dump_result(tuple(outputs) if len(outputs) > 1 else 0, [{"output": k} for k in outputs])
        drop_dead(graph)
        check(graph, blame="capture")
        return graph

    def shape(self, t: Tensor) -> tuple[int | None, ...]:
        shape = self.facts.shapes[t.index]
        return (None, *shape[1:]) if self.open_batch and shape else shape

    def value(self, index: int) -> Value:
        if index not in self.values:
            raise CaptureError(f"Output '{self.model.tensors[index].name}' depends on no input", where=self.model.where)
        return self.values[index]

    def constant(self, index: int) -> np.ndarray | None:
        """Return the array of a constant, or of a tensor computed from constants; None if it depends on an input."""
        if index in self.facts.folded:
            return self.facts.folded[index]
        return self.model.tensors[self._dequantized.get(index, index)].constant

    def weight(self, index: int, change: Callable[[np.ndarray], np.ndarray] = lambda a: a, how: str = "") -> str:
        """Return the name of a constant as a weight of the graph.

        Args:
            change: brings the array into the canonical layout.
            how: name of `change`; a constant that is changed in two ways becomes two weights.
        """
        key = (index, how)
        if key not in self._weights:
            array = self.constant(index)
            require(array is not None, "a weight of it is computed")
            name = self.builder.fresh(self.model.tensors[index].name)
            self.builder.graph.weights[name] = self.numbers(torch.from_numpy(np.array(change(np.asarray(array)))))
            self.model.tensors[self._dequantized.get(index, index)].release()
            self._weights[key] = name
        return self._weights[key]

    def numbers(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight with the dtype that the graph holds: float32 for float64."""
        return weight.float() if weight.dtype == torch.float64 else weight

    def joined(self, wanted: str, indices: Sequence[int]) -> str:
        """Add a weight that concatenates constants of the file along their first axis, and return its name.

        Args:
            wanted: the name, if it is free.
        """
        arrays = [np.asarray(a) for k in indices if (a := self.constant(k)) is not None]
        require(len(arrays) == len(indices), "a weight of it is computed")
        name = self.builder.fresh(wanted)
        self.builder.graph.weights[name] = self.numbers(torch.from_numpy(np.concatenate(arrays)))
        self.builder.graph.trainable.add(name)
        return name

    def warn(self, what: str) -> None:
        """Add a warning about the file to the notes of the graph."""
        self.builder.graph.notes.append(f"warning: {what}")

    def rounded(self, c: "Call", x: Value) -> Value:
        """Return the operand of a layer; a subclass inserts the quantizer of a dynamic kernel."""
        return x

    def record_grid(self, name: str, index: int) -> None:
        """Note that a value or weight has the grid of a tensor of the file; overridden where grids are read."""

    def _read(self, op: Operator) -> None:
        """Add the nodes of an operator, unless its results are constants or sizes."""
        if op.inputs and all(i < 0 or i not in self.values for i in op.inputs):
            if self.model.restores(op):
                self._dequantized[op.outputs[0]] = op.inputs[0]
            return
        if self.facts.folded.keys() >= {*op.outputs}:  # a size, known from the run
            return
        call = Call(self, op)
        mark = self.builder.mark()
        try:
            for index, result in zip(op.outputs, _results(call), strict=True):
                self.values[index] = call.activated(result)
        except Unreadable as e:
            self.builder.forget(mark)
            what = f"The operator {op.kind} of '{call.name}' has no reader" + (f": {e}" if str(e) else "")
            raise CaptureError(what, where=self.model.where, hint=_WITHOUT.get(op.kind, _SOURCE)) from e
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
            what = f"The operator {op.kind} of '{call.name}' is malformed: {short_message(e)}"
            raise CaptureError(what, where=self.model.where) from e


def _results(call: "Call") -> list[Value]:
    """Return the results of an operator before its activation."""
    kind = call.op.kind
    if kind in READERS:
        found = READERS[kind](call)
    elif kind in ATTRIBUTES:
        found = call.emit(call.canonical, [call.operand(0)], **ATTRIBUTES[kind](call))
    elif kind in PLAIN:
        found = call.emit(call.canonical, [call.operand(k) for k in range(len(call.op.inputs))])
    else:
        raise Unreadable
    return found if isinstance(found, list) else [found]


#: operators with an operand that only states the shape of the result
_BY_SHAPE = "RESHAPE BROADCAST_TO EXPAND_DIMS SQUEEZE RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR".split()


def _read_by(op: Operator) -> list[int]:
    """Return the operands whose values an operator reads, without those that state its shape."""
    return op.inputs[:1] if op.kind in _BY_SHAPE else op.inputs[1:] if op.kind == "TRANSPOSE_CONV" else op.inputs


_SOURCE = "start from the model that the file was converted from"
#: operator without a reader -> the hint of the error
_WITHOUT = {
    "RFFT2D": f"{_SOURCE}, behind its Fourier transform; give it spectra",
}


class Call:
    """One operator of a file, and the nodes that it becomes."""

    def __init__(self, reading: Reading, op: Operator) -> None:
        self.reading, self.op, self.option = reading, op, op.option
        tensors = reading.model.tensors
        self.out = [tensors[k] for k in op.outputs]
        self.name = self.out[0].name
        self.origin = Origin(self.name, op.kind)
        self.fused = op.option("fusedActivationFunction", 0) or 0

    @property
    def canonical(self) -> str:
        """The canonical operator that is written as this operator of the schema."""
        return OPERATORS[self.op.kind]

    def has(self, k: int) -> bool:
        """Return whether an optional operand is present."""
        return k < len(self.op.inputs) and self.op.inputs[k] >= 0

    def value(self, k: int) -> Value:
        """Return the value of an operand, which must be computed."""
        require(self.op.inputs[k] in self.reading.values, "an operand of it is a constant")
        return self.reading.values[self.op.inputs[k]]

    def tensor(self, k: int) -> Tensor:
        """Return an operand as a tensor of the file."""
        return self.reading.model.tensors[self.op.inputs[k]]

    def constant(self, k: int) -> np.ndarray:
        """Return the array of an operand, which must be a constant."""
        array = self.reading.constant(self.op.inputs[k]) if self.has(k) else None
        require(array is not None, f"operand {k} is not a constant")
        return np.asarray(array)

    def dims(self, k: int) -> tuple[int, ...]:
        """Return the shape of an operand, which must be a constant."""
        require(self.is_constant(k), f"operand {k} is not a constant")
        return self.reading.facts.shapes[self.op.inputs[k]]

    def integers(self, k: int) -> tuple[int, ...]:
        """Return the elements of an operand, which must be a constant."""
        return tuple(int(v) for v in self.constant(k).ravel())

    def is_constant(self, k: int) -> bool:
        """Return whether an operand is present and is not computed from inputs."""
        return self.has(k) and self.op.inputs[k] not in self.reading.values

    def operand(self, k: int) -> str:
        """Return the name of an operand in the graph: a value, or a weight if it is constant."""
        return self.weight(k) if self.is_constant(k) else self.value(k).name

    def weight(
        self, k: int, change: Callable[[np.ndarray], np.ndarray] = lambda a: a, how: str = "", *, trains: bool = False
    ) -> str:
        name = self.reading.weight(self.op.inputs[k], change, how)
        if trains:
            self.reading.builder.graph.trainable.add(name)
        return name

    def bias(self, k: int) -> str | None:
        return self.weight(k, np.ravel, "bias", trains=True) if self.has(k) else None

    def added(self, value: Any) -> str:
        """Add a constant that the file does not hold, and return its name."""
        builder = self.reading.builder
        name = builder.fresh(f"{self.name}/constant")
        builder.graph.weights[name] = torch.as_tensor(value)
        return name

    def shape(self, k: int = 0) -> tuple[int | None, ...]:
        """Return the shape of a result; None where a size is open."""
        return self.reading.shape(self.out[k])

    def emit(self, op: str, inputs: Sequence[str | Value | None], /, **attrs: Any) -> Value:
        """Append the node that computes the result, with its name, shape and dtype."""
        return self.part(op, inputs, self.shape(), called=self.name, **attrs)

    def step(self, op: str, inputs: Sequence[str | Value | None], /, **attrs: Any) -> Value:
        """Append a node whose shape and dtype follow from its operands; not of an operator that knows channels."""
        names = [i.name if isinstance(i, Value) else i for i in inputs]
        return self.parts(op, names, inferred(self.reading.builder.graph, op, names, attrs), **attrs)[0]

    def part(
        self,
        op: str,
        inputs: Sequence[str | Value | None],
        shape: Sequence[int | None],
        /,
        *,
        kind: str = "",
        called: str = "",
        **attrs: Any,
    ) -> Value:
        """Append a node that computes a part of the result.

        Args:
            shape: of its value.
            kind: dtype of its value, by default that of the result.
            called: name of its value, by default a new one.
        """
        return self.parts(op, inputs, [(shape, kind or self.out[0].dtype)], called, **attrs)[0]

    def parts(
        self, op: str, inputs: Sequence[str | Value | None], outs: Outputs, called: str = "", /, **attrs: Any
    ) -> list[Value]:
        """Append a node with several results."""
        names = [i.name if isinstance(i, Value) else i for i in inputs]
        return self.reading.builder.emit(self.origin, called or f"{self.name}/part", op, names, attrs, outs)

    def activated(self, result: Value) -> Value:
        """Apply the activation that is fused into the operator, or that its result's integers amount to."""
        kind = _FUSED.get(self.fused, "") if self.fused else self._saturates()
        require(kind or not self.fused, f"its activation has the number {self.fused}")
        if not kind:
            return result
        op, attrs = ("Clamp", _CLIPS[kind]) if kind in _CLIPS else (OPERATORS[kind], {})
        return self.part(op, [result], result.shape, called=f"{self.name}/{op.lower()}", **attrs)

    def _saturates(self) -> str:
        """Return the rectifier that old converters left out, because integers end where it clips; "" if there is none.

        Integers keep these ends; where they are taken for floats, as for a new quantization, nothing else clips.
        """
        t = self.out[0]
        if self.reading.one_value_each or t.scale is None or self.op.kind not in _SATURATING:
            return ""
        ends, (scale, zero) = np.iinfo(t.kind.lower()), (t.scale[0], int(t.zero.ravel()[0]))
        is_six = abs(scale * (ends.max - zero) - 6) < scale
        return "" if zero != ends.min else "RELU6" if is_six else "RELU"

    def axis(self, name: str = "axis", rank: int | None = None) -> int:
        axis = self.option(name, 0) or 0
        return int(axis) % (len(self.shape()) if rank is None else rank)

    def static(self, shape: Sequence[int | None] | None = None) -> tuple[int, ...]:
        """Return a shape, by default that of the result, as attribute of a Reshape: -1 where a size is open."""
        return tuple(-1 if d is None else d for d in (self.shape() if shape is None else shape))


#: operators of one operand -> attributes of the canonical operator
ATTRIBUTES: dict[str, Callable[[Call], dict[str, Any]]] = {
    "LEAKY_RELU": lambda c: {"negative_slope": float(c.option("alpha", 0.0))},
    "ELU": lambda c: {"alpha": 1.0},
    "GELU": lambda c: {"approximate": "tanh" if c.option("approximate", False) else "none"},
    "TRANSPOSE": lambda c: {"perm": c.integers(1)},
    "TILE": lambda c: {"repeats": c.integers(1)},
    "BROADCAST_TO": lambda c: {"shape": c.static()},
}


# ---------------------------------------------------------------- operators with weights


def _windows(
    c: Call, x: Value, kernel: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return stride and padding of windows; SAME puts the odd element of its padding at the end of an axis."""
    stride = tuple(int(c.option(f"stride{axis}")) for axis in "DHW"[-len(kernel) :])
    if c.option("padding") != _SAME:
        return stride, ((0, 0),) * len(kernel)
    pads = []
    for size, k, s, d in zip(x.shape[1:-1], kernel, stride, dilation, strict=True):
        require(size is not None)
        total = max((-(-(size or 0) // s) - 1) * s + (k - 1) * d + 1 - (size or 0), 0)
        pads.append((total // 2, total - total // 2))
    return stride, tuple(pads)


@reads("CONV_2D DEPTHWISE_CONV_2D")
def _conv(c: Call) -> Value:
    x, kernel = c.reading.rounded(c, c.value(0)), c.dims(1)
    depthwise = c.op.kind == "DEPTHWISE_CONV_2D"
    order = (3, 0, 1, 2) if depthwise else (0, 3, 1, 2)
    channels = x.shape[-1] or 0
    groups = channels if depthwise else channels // kernel[3]
    dilation = (int(c.option("dilationHFactor", 1)), int(c.option("dilationWFactor", 1)))
    dilated = c.reading.dilated.get(c.op.inputs[0])
    attrs: dict[str, Any] = {"dilation": dilation, "groups": groups}
    if dilated is None:
        (attrs["stride"], attrs["padding"]), shape = _windows(c, x, kernel[1:3], dilation), c.shape()
    else:
        block, padding, result = dilated
        attrs |= {"stride": (1, 1), "padding": padding, "dilation": block}
        shape = c.reading.shape(c.reading.model.tensors[result])
    weight = c.weight(1, lambda a: a.transpose(order), f"{order}", trains=True)
    op = "DepthwiseConv2D" if groups == channels > 1 or depthwise else "Conv2D"
    return c.part(op, [x, weight, c.bias(2)], shape, called=c.name, **attrs)


@reads("CONV_3D")
def _conv_3d(c: Call) -> Value:
    x, kernel = c.value(0), c.dims(1)
    dilation = tuple(int(c.option(f"dilation{axis}Factor", 1)) for axis in "DHW")
    stride, padding = _windows(c, x, kernel[:3], dilation)
    weight = c.weight(1, lambda a: a.transpose(4, 3, 0, 1, 2), "volume", trains=True)
    attrs: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
    require((x.shape[-1] or 0) == kernel[3], "it has groups")
    return c.part(c.canonical, [x, weight, c.bias(2)], c.shape(), called=c.name, **attrs)


@reads("SPACE_TO_BATCH_ND")
def _space_to_batch(c: Call) -> Value:
    """Read SPACE_TO_BATCH_ND, a convolution and BATCH_TO_SPACE_ND as the dilated convolution that they compute.

    A result at i reads x at i + k d - p: p is the padding of SPACE_TO_BATCH_ND less what BATCH_TO_SPACE_ND cuts off.
    """
    require(not c.reading.one_value_each, "its convolution has another shape in the file")
    readers = [o for o in c.reading.model.operators if c.out[0].index in o.inputs]
    plain = {"padding": 1, "strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
    layer = [o for o in readers if o.kind in ("CONV_2D", "DEPTHWISE_CONV_2D")]
    fits = len(readers) == len(layer) == 1 and all(layer[0].option(k, 1) == v for k, v in plain.items())
    require(fits, "no convolution alone reads it")
    back = [o for o in c.reading.model.operators if layer[0].outputs[0] in o.inputs]
    require([o.kind for o in back] == ["BATCH_TO_SPACE_ND"], "its convolution is not followed by BATCH_TO_SPACE_ND")
    (block, pads), (same, cut) = (c.integers(1), c.constant(2)), map(c.reading.constant, back[0].inputs[1:])
    if same is None or cut is None or tuple(same.ravel()) != block or len(block) != 2:
        raise Unreadable("its sizes differ")
    padding = tuple((int(a), int(b)) for a, b in pads - cut)
    require(min(p for pair in padding for p in pair) >= 0, "more is cut off than was added")
    c.reading.dilated[c.op.outputs[0]] = block, padding, back[0].outputs[0]
    return c.value(0)


@reads("BATCH_TO_SPACE_ND")
def _batch_to_space(c: Call) -> Value:
    """Return the result of the dilated convolution; see SPACE_TO_BATCH_ND."""
    require(c.out[0].index in [result for *_, result in c.reading.dilated.values()], "it follows no convolution")
    return c.value(0)


@reads("TRANSPOSE_CONV")
def _transpose_conv(c: Call) -> Value:
    x, kernel = c.value(2), c.dims(1)[1:3]
    stride = (int(c.option("strideH")), int(c.option("strideW")))
    require(None not in (*x.shape[1:3], *c.shape()[1:3]), "its sizes are open")
    sizes = zip(x.shape[1:3], c.shape()[1:3], kernel, stride, strict=True)
    cut = [((i or 0) - 1) * s + k - (o or 0) for i, o, k, s in sizes]
    padding = tuple((max(t, 0) // 2, max(t, 0) - max(t, 0) // 2) for t in cut)
    more = tuple(max(-t, 0) for t in cut)
    kernel_name = c.weight(1, lambda a: a.transpose(3, 0, 1, 2), "transposed", trains=True)
    attrs = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1, "output_padding": more}
    return c.emit(c.canonical, [x, kernel_name, c.bias(3)], **attrs)


@reads("FULLY_CONNECTED")
def _linear(c: Call) -> Value:
    if not c.is_constant(1):
        require(not c.has(2) and len(c.value(1).shape) == 2, "its weight is computed")
        return c.emit("MatMul", [c.value(0), c.step("Transpose", [c.value(1)], perm=(1, 0))])
    x, (out, width) = c.value(0), c.dims(1)
    if (len(x.shape) != 2 and not c.option("keepNumDims", False)) or x.shape[-1] != width:
        x = c.part("Reshape", [x], (c.shape()[0], width), shape=(-1, width))
    x = c.reading.rounded(c, x)
    y = c.part(c.canonical, [x, c.weight(1, trains=True), c.bias(2)], (*x.shape[:-1], out), called=c.name)
    return y if y.shape == c.shape() else c.part("Reshape", [y], c.shape(), shape=c.static())


@reads("BATCH_MATMUL")
def _mat_mul(c: Call) -> Value:
    operands: list[str | Value] = [c.operand(0), c.operand(1)]
    for k, flag in enumerate(("adjX", "adjY")):
        if not c.option(flag, False):
            continue
        if c.is_constant(k):
            operands[k] = c.weight(k, lambda a: a.swapaxes(-1, -2), "transposed")
        else:
            x = c.value(k)
            perm = (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2)
            operands[k] = c.step("Transpose", [x], perm=perm)
    return c.emit(c.canonical, operands)


@reads("PRELU")
def _prelu(c: Call) -> Value:
    of_channels = all(d == 1 for d in c.dims(1)[:-1])
    change = np.ravel if of_channels else (lambda a: np.moveaxis(a, -1, 0))
    return c.emit(c.canonical, [c.value(0), c.weight(1, change, "slopes", trains=True)])


# ---------------------------------------------------------------- element by element


@reads("RELU_N1_TO_1 RELU_0_TO_1")
def _clamp(c: Call) -> Value:
    return c.emit("Clamp", [c.value(0)], **_CLIPS[c.op.kind])


@reads("SOFTMAX LOG_SOFTMAX L2_NORMALIZATION")
def _softmax(c: Call) -> Value:
    x = c.operand(0)
    beta = float(c.option("beta", 1.0) or 1.0)
    if beta != 1:
        x = c.step("Mul", [x, c.added(beta)]).name
    more = {"eps": 1e-6} if "eps" in OPS[c.canonical].attrs else {}
    return c.emit(c.canonical, [x], axis=len(c.shape()) - 1, **more)


@reads("SQUARE")
def _square(c: Call) -> Value:
    return c.emit("Mul", [c.value(0), c.value(0)])


@reads("ATAN2")
def _angle(c: Call) -> Value:
    """Read the angle of points (x, y), from that of the line through 0; on the left, half a turn is added to it."""
    formula = "line = atan(y / where(logicaland(x == 0.0, y == 0.0), 1.0, x)); "
    formula += f"line + where(x < 0.0, where(y < 0.0, {-np.pi}, {np.pi}), 0.0)"
    result: Value = compute(formula, c.step, c.emit, c.added, y=c.operand(0), x=c.operand(1))
    return result


@reads("ADD_N")
def _add_n(c: Call) -> Value:
    total = c.operand(0)
    for k in range(1, len(c.op.inputs)):
        total = c.part("Add", [total, c.operand(k)], c.shape(), called=c.name if k + 1 == len(c.op.inputs) else "").name
    return c.reading.builder.graph.values[total]


@reads("CAST")
def _cast(c: Call) -> Value:
    """Read a cast; of a quantized tensor, as where tables are indexed, its integers: round(x / scale) + zero point."""
    x, t = c.operand(0), c.tensor(0)
    if t.scale is not None and c.out[0].scale is None:
        for op, numbers in (("Div", t.scale), (OPERATORS["ROUND"], None), ("Add", t.zero.astype(np.float32).ravel())):
            x = c.step(op, [x] if numbers is None else [x, c.added(numbers)]).name
        ends = np.iinfo(t.kind.lower())
        x = c.step("Clamp", [x], min=float(ends.min), max=float(ends.max)).name
    return c.emit(c.canonical, [x], dtype=c.out[0].dtype)


@reads("SELECT SELECT_V2")
def _select(c: Call) -> Value:
    return c.emit("Where", [c.operand(k) for k in range(3)])


@reads("QUANTIZE DEQUANTIZE")
def _requantize(c: Call) -> Value:
    """Return the operand: all values are floats in the graph."""
    return c.value(0)


# ---------------------------------------------------------------- pools and reductions


@reads("AVERAGE_POOL_2D MAX_POOL_2D")
def _pool(c: Call) -> Value:
    kernel = (int(c.option("filterHeight")), int(c.option("filterWidth")))
    stride, padding = _windows(c, c.value(0), kernel)
    attrs = {"kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": False}
    own: dict[str, Any] = {"dilation": (1, 1)} if c.op.kind == "MAX_POOL_2D" else {"count_include_pad": False}
    return c.emit(c.canonical, [c.value(0)], **attrs, **own)


@reads("MEAN SUM REDUCE_MAX REDUCE_MIN REDUCE_PROD")
def _reduce(c: Call) -> Value:
    x, keep = c.value(0), bool(c.option("keepDims", False))
    axes = tuple(sorted({a % len(x.shape) for a in c.integers(1)}))
    if c.op.kind == "MEAN" and len(x.shape) == 4 and axes == (1, 2) and (keep or not c.reading.one_value_each):
        shape = (x.shape[0], 1, 1, x.shape[3])
        y = c.part("GlobalAvgPool", [x], shape, called=c.name)
        return y if keep else c.part("Reshape", [y], c.shape(), called=f"{c.name}/flat", shape=c.static())
    return c.emit(c.canonical, [x], axes=axes, keepdims=keep)


@reads("REDUCE_ANY REDUCE_ALL")
def _any_or_all(c: Call) -> Value:
    x, keep = c.step("Cast", [c.value(0)], dtype="int32"), bool(c.option("keepDims", False))
    axes = tuple(sorted({a % len(x.shape) for a in c.integers(1)}))
    op = OPERATORS["REDUCE_MAX" if c.op.kind == "REDUCE_ANY" else "REDUCE_MIN"]
    return c.emit("Cast", [c.part(op, [x], c.shape(), kind="int32", axes=axes, keepdims=keep)], dtype="bool")


@reads("ARG_MAX ARG_MIN")
def _arg_max(c: Call) -> Value:
    x, (axis,) = c.value(0), c.integers(1)
    how = {"axis": axis % len(x.shape), "keepdims": False}
    y = c.part(c.canonical, [x], c.shape(), kind="int64", called=f"{c.name}/index", **how)
    return y if c.out[0].dtype == "int64" else c.emit("Cast", [y], dtype=c.out[0].dtype)


@reads("CUMSUM")
def _cum_sum(c: Call) -> Value:
    x, rank = c.value(0), len(c.shape())
    axis = c.integers(1)[0] % rank
    order = torch.arange(x.shape[axis] or 0).flip(0)
    require(len(order), "it adds up the batch")
    backwards: Any = c.added(order) if c.option("reverse", False) else None
    return running_sum(c, x, axis, rank, backwards, bool(c.option("exclusive", False)))


@reads("TOPK_V2")
def _top_k(c: Call) -> list[Value]:
    (k,), x = c.integers(1), c.value(0)
    outs = [(c.shape(0), c.out[0].dtype), (c.shape(1), "int64")]
    values, index = c.parts(c.canonical, [x], outs, c.name, k=k, axis=len(x.shape) - 1, largest=True)
    kind, name = c.out[1].dtype, c.out[1].name
    return [values, c.part("Cast", [index], index.shape, kind=kind, called=name, dtype=kind)]


@reads(DETECTIONS)
def _detections(c: Call) -> list[Value]:
    given = detections(c.op.custom_options)
    attrs: dict[str, Any] = {name: given[name] for name in OPS[c.canonical].attrs}
    size = attrs["max_detections"] * (1 if attrs["use_regular_nms"] else attrs["max_classes_per_detection"])
    require(size == c.shape()[1], f"its results do not have {size} detections")
    outs = [(c.shape(k), t.dtype) for k, t in enumerate(c.out)]
    return c.parts(c.canonical, [c.operand(k) for k in range(3)], outs, c.name, **attrs)


# ---------------------------------------------------------------- what moves numbers


def _is_batch_of_one(c: Call, parts: int, axis: int) -> bool:
    """Return whether `axis` is that of the batch, which is open: the file computes one sample.

    Raises:
        Unreadable: The batch is open, and the operator joins or splits several samples.
    """
    require(axis != 0 or parts == 1 or not c.reading.open_batch, "it takes the batch apart or makes one")
    return axis == 0 and c.reading.open_batch


@reads("CONCATENATION PACK")
def _concatenate(c: Call) -> Value:
    if c.op.kind == "PACK" and _is_batch_of_one(c, len(c.op.inputs), c.axis()):
        return c.emit("Reshape", [c.value(0)], shape=c.static())
    return c.emit(c.canonical, [c.operand(k) for k in range(len(c.op.inputs))], axis=c.axis())


@reads("UNPACK")
def _unpack(c: Call) -> list[Value]:
    if _is_batch_of_one(c, len(c.out), c.axis(rank=len(c.value(0).shape))):
        return [c.emit("Reshape", [c.value(0)], shape=c.static())]
    outs = [(c.shape(k), t.dtype) for k, t in enumerate(c.out)]
    return c.parts(c.canonical, [c.value(0)], outs, c.name, axis=c.axis(rank=len(c.value(0).shape)))


@reads("SPLIT SPLIT_V")
def _split(c: Call) -> list[Value]:
    x, (axis,) = (c.value(1), c.integers(0)) if c.op.kind == "SPLIT" else (c.value(0), c.integers(2))
    axis %= len(x.shape)
    sizes = tuple(int(c.shape(k)[axis] or 0) for k in range(len(c.out)))
    outs = [(c.shape(k), t.dtype) for k, t in enumerate(c.out)]
    return c.parts("Split", [x], outs, c.name, axis=axis, sizes=sizes)


@reads("RESHAPE SQUEEZE EXPAND_DIMS")
def _reshape(c: Call) -> Value:
    return c.emit("Reshape", [c.value(0)], shape=c.static())


@reads("STRIDED_SLICE SLICE")
def _slice(c: Call) -> Value:
    y = c.value(0)
    rank = len(y.shape)
    begin, third = c.integers(1), c.integers(2)
    if c.op.kind == "SLICE":
        end = [None if n == -1 else b + n for b, n in zip(begin, third, strict=True)]
        step, shrink, begin_mask, end_mask = (1,) * rank, 0, 0, 0
    else:
        end, step = list(third), c.integers(3)
        masks = ("ellipsisMask", "newAxisMask")
        require(not any(c.option(m, 0) for m in masks), "it adds axes")
        shrink, begin_mask, end_mask = (int(c.option(m, 0)) for m in ("shrinkAxisMask", "beginMask", "endMask"))
    for k in reversed(range(len(begin))):
        size = y.shape[k]
        if shrink >> k & 1:
            y = c.step("Select", [y], axis=k, index=begin[k])
            continue
        start = None if begin_mask >> k & 1 else begin[k]
        stop = None if end_mask >> k & 1 else end[k]
        if step[k] < 0:
            require(size is not None, "it turns the batch")
            places = np.arange(size or 0)[start : stop : step[k]]
            y = c.step("Gather", [y, c.added(torch.from_numpy(places.copy()))], axis=k)
            continue
        whole = stop is None or (stop == 1 if size is None else stop >= size)
        if not start and step[k] == 1 and whole:
            continue
        require(size is not None, "it cuts the batch")
        lo, hi, by = slice(start, stop, step[k]).indices(size or 0)
        y = c.step("Slice", [y], axis=k, start=lo, end=hi, step=by)
    return y


@reads("GATHER")
def _gather(c: Call) -> Value:
    if batched := int(c.option("batchDims", 0) or 0):
        return _gather_within(c, batched)
    if c.is_constant(0) and not c.option("axis", 0) and len(c.dims(0)) == 2:
        return c.emit("Embedding", [c.weight(0, trains=True), c.value(1)])
    x, shape = _operand_with_shape(c, 0)
    return c.emit("Gather", [x, c.operand(1)], axis=c.axis(rank=len(shape)))


def _gather_within(c: Call, batched: int) -> Value:
    """Read a gather with batch axes: indices [*batch, *picked] into [*batch, size, *inner]."""
    (x, of), (index, at) = (_operand_with_shape(c, k) for k in range(2))
    batched = batched % len(at)
    require(c.axis(rank=len(of)) == batched, "it gathers within samples, of an axis behind others")
    picked, inner = at[batched:], of[batched + 1 :]
    require(None not in (*picked, *inner), "its sizes are open")
    if len(picked) == 1 and not inner:
        return c.emit("GatherElements", [x, index], axis=batched)
    count = int(np.prod([d or 0 for d in picked]))
    rows = c.step("Reshape", [index], shape=c.static((*at[:batched], count, *(1 for _ in inner))))
    rows = c.step("Expand", [rows], shape=c.static((*at[:batched], count, *inner))) if inner else rows
    return c.emit("Reshape", [c.step("GatherElements", [x, rows], axis=batched)], shape=c.static())


def _operand_with_shape(c: Call, k: int) -> tuple[str, tuple[int | None, ...]]:
    """Return the name and the shape of an operand, computed or constant."""
    return (c.weight(k), c.dims(k)) if c.is_constant(k) else (c.value(k).name, c.value(k).shape)


@reads("GATHER_ND")
def _gather_nd(c: Call) -> Value:
    """Read indices [*picked, axes] as indices into one axis, to which the first axes are flattened."""
    (x, of), (index, at) = (_operand_with_shape(c, k) for k in range(2))
    axes = at[-1] or 0
    sizes = [d or 0 for d in of[:axes]]
    require(None not in of[:axes] and axes > 0, "it picks whole samples")
    steps = np.cumprod([1, *sizes[:0:-1]])[::-1].astype(np.int64)
    flat = c.step("Reshape", [x], shape=c.static((int(np.prod(sizes)), *of[axes:]))) if axes > 1 else x
    if c.is_constant(1):
        places = torch.from_numpy((c.constant(1).astype(np.int64) * steps).sum(-1))
        return c.emit("Gather", [flat, c.added(places)], axis=0)
    factors = c.added(torch.from_numpy(steps.copy()).to(getattr(torch, c.tensor(1).dtype)))
    rows = c.step("Sum", [c.step("Mul", [index, factors])], axes=(len(at) - 1,), keepdims=False)
    return c.emit("Gather", [flat, rows], axis=0)


@reads("SCATTER_ND")
def _scatter_nd(c: Call) -> Value:
    """Read elements that are put among zeros at constant places, along each axis or in all axes as one."""
    y, index, whole = c.value(1), c.constant(0), c.reading.facts.shapes[c.out[0].index]
    require(c.out[0].scale is None or not c.out[0].zero.any(), "its integer 0 stands for another number")
    count = index.shape[-1]
    try:
        parts = parts_of(index, index.shape[:-1], whole[:count])
        require(all(len({*places}) == len(places) for _, places in parts))
        require(not c.reading.open_batch or all(axis for axis, _ in parts))
    except Unreadable:  # places that are not a product of places on each axis
        require(not c.reading.open_batch, "its places differ between samples")
        flat = np.ravel_multi_index(tuple(np.moveaxis(index, -1, 0)), whole[:count]).ravel()
        require(len({*flat}) == flat.size, "it adds up elements in one place")
        rows = c.step("Reshape", [y], shape=(flat.size, *whole[count:]))
        spread = _among_zeros(c, rows, 0, flat.tolist(), int(np.prod(whole[:count])))
        return c.emit("Reshape", [spread], shape=whole)
    for axis, places in parts:
        y = _among_zeros(c, y, axis, places, whole[axis])
    return y


def _among_zeros(c: Call, x: Value, axis: int, places: Sequence[int], size: int) -> Value:
    """Return an axis of a new size, with the elements of x at some places and zeros at the others."""
    order = np.full(size, len(places))  # the place of a zero behind x
    order[places] = np.arange(len(places))
    padding = tuple((0, int(k == axis)) for k in range(len(x.shape)))
    longer = c.step("Pad", [x], padding=padding, mode="constant", value=0.0)
    return c.step("Gather", [longer, c.added(torch.from_numpy(order))], axis=axis)


def _mirrored_with_border(c: Call, pairs: Sequence[tuple[int, int]]) -> Value:
    """Read a reflection that repeats the border as a selection along each padded axis."""
    x = c.value(0)
    for axis, ends in enumerate(pairs):
        if any(ends):
            places = np.pad(np.arange(int(x.shape[axis] or 0)), ends, "symmetric")
            x = c.step("Gather", [x, c.added(torch.from_numpy(places))], axis=axis)
    return x


@reads("PAD PADV2 MIRROR_PAD")
def _pad(c: Call) -> Value:
    pairs = tuple((int(a), int(b)) for a, b in c.constant(1))
    reflect = c.op.kind == "MIRROR_PAD"
    if reflect and c.option("mode", 0):
        return _mirrored_with_border(c, pairs)
    value = float(c.constant(2).ravel()[0]) if c.op.kind == "PADV2" else 0.0
    return c.emit("Pad", [c.value(0)], padding=pairs, mode="reflect" if reflect else "constant", value=value)


@reads("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR")
def _resize(c: Call) -> Value:
    corners, half = (bool(c.option(f, False)) for f in ("alignCorners", "halfPixelCenters"))
    if c.op.kind == "RESIZE_BILINEAR":
        mode = "linear" if corners or half else "linear_corner"
    else:
        mode = "nearest_exact" if half else "nearest"
        require(not corners, "it aligns corners")
    size = tuple(int(d or 0) for d in c.shape()[1:3])
    return c.emit("Resize", [c.value(0)], mode=mode, size=size, scale=None, align_corners=corners)


@reads("DEPTH_TO_SPACE SPACE_TO_DEPTH")
def _depth_to_space(c: Call) -> Value:
    """Change the order of channels: (row, column, channel) in the file, (channel, row, column) in the graph."""
    k, x = int(c.option("blockSize")), c.value(0)
    if c.op.kind == "DEPTH_TO_SPACE":
        order = np.arange(x.shape[-1] or 0).reshape(k * k, -1).T.ravel()
        index = c.added(torch.from_numpy(order.copy()))
        moved = c.step("Gather", [x, index], axis=len(x.shape) - 1)
        return c.emit(c.canonical, [moved], block=k)
    y = c.part(c.canonical, [x], c.shape(), block=k)
    order = np.arange(c.shape()[-1] or 0).reshape(-1, k * k).T.ravel()
    return c.emit("Gather", [y, c.added(torch.from_numpy(order.copy()))], axis=len(y.shape) - 1)
