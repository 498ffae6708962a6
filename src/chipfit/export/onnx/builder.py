"""Builder of an ONNX file: its nodes and initialisers so far, and the ONNX name of each value of the graph.

Names: graph value `v` is `v` before its quantizer, its integers are `v_q`; inputs keep the names of the model's
arguments. All else is called after the node of the graph that is being written, with a running number.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from chipfit.errors import UnsupportedError
from chipfit.export.io_spec import QuantizedIO
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan
from chipfit.plan.tables import byte_tables, with_integers
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.stored import Stored

#: ONNX names of operands; None for one that is left out
Names = Sequence[Any]

#: operators that pass quantized values on: runtimes move the DequantizeLinear in front of them behind them
_PASS_THROUGH = frozenset(
    "DequantizeLinear Cast Concat Expand Flatten Gather Identity Pad Reshape Slice Split Squeeze Tile Transpose "
    "Unsqueeze MaxPool Relu Clip".split()
)


#: size from which a weight in float is compared with others [bytes]
_LARGE = 1024


class OnnxBuilder:
    """Nodes and initialisers so far, and the ONNX names of the graph's values.

    A subclass may write quantizers in another form.
    """

    lowest_opset = 13  #: opset without operators that need a later one
    gathers = True  #: weights in look-up tables are written as codes, of which a Gather makes numbers
    flattens = True  #: linear layers of more than two axes are a Gemm of rows, which ONNX Runtime computes in integers

    @classmethod
    def check(cls, graph: Graph, plan: Plan) -> None:
        """Check that the formats of a plan can be written.

        Raises:
            UnsupportedError: some cannot.
        """
        held = {n for n in graph.weights if (s := plan.stored(n)) is not None and s.grid.table is not None}
        other = [t for t in plan.tensors.values() if t.grid is not None and t.grid.kind != "int" and t.name not in held]
        if other:
            hint = "export JSON encodings (`.json`) for this platform"
            what = "ONNX rounds results to integer grids only; it holds tables of weights"
            got = ", ".join(f"{t.role} '{t.name}' ({t.format}: {t.grid.kind})" for t in other[:8] if t.grid is not None)
            raise UnsupportedError(what, got=got, hint=hint)

    @classmethod
    def opset_of_formats(cls, plan: Plan) -> int:
        """Return the lowest opset with the integer types of a plan."""
        bits = {t.grid.bits for t in plan.tensors.values() if t.grid is not None and t.grid.table is None}
        return 21 if any(b <= 4 or 8 < b <= 16 for b in bits) else cls.lowest_opset

    def __init__(self, graph: Graph, plan: Plan, opset: int) -> None:
        #: weight -> its look-up table of bytes, from which the file gathers it
        self.tables = byte_tables(graph, plan) if self.gathers else {}
        self.graph, self.plan = with_integers(graph, plan) if self.gathers else (graph, plan)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: dict[str, onnx.TensorProto] = {}
        self.before_quantizer: dict[str, str] = {}  #: value -> ONNX name before its quantizer
        self.after_quantizer: dict[str, str] = {}  #: value -> ONNX name after its quantizer
        self.examples: dict[str, torch.Tensor] = {}  #: value -> its tensor for example inputs, if that was needed
        by_name = {n.name: n for n in graph.nodes}
        #: values between the members of a fused group, which have no quantizer
        self.inner = {by_name[name].output for group in plan.groups for name in group[:-1]}
        #: dynamically quantized value -> names of its integers, scale and zero point
        self.dynamic: dict[str, tuple[str, str, str]] = {}
        self.floats: dict[str, str] = {}  #: dynamically quantized value -> name of its floats
        self._deferred: dict[str, Callable[[str], str]] = {}  #: value -> what follows its quantizer
        self._readers = 0  #: readers so far of integers that have another reader
        self._reshaped: dict[str, str] = {}  #: ONNX value -> the value that it is a reshape of
        self._memo: dict[tuple[str, str], str] = {}
        self._scope, self._start, self._count = "io", len(self.nodes), 0

    # ---- pieces that operators are written with

    def fresh(self, hint: str) -> str:
        self._count += 1
        return f"{self._scope}/{hint}_{self._count}"

    def op(self, kind: str, inputs: Sequence[str | None], **attrs: Any) -> str:
        """Add a node with one output ("kind@domain" for an operator of another domain) and return its name."""
        return self.op_many(kind, inputs, 1, **attrs)[0]

    def op_many(self, kind: str, inputs: Sequence[str | None], outputs: int, **attrs: Any) -> list[str]:
        """Add a node and return the names of its outputs."""
        ins = [i or "" for i in inputs]
        if "axes" in attrs and (kind == "ReduceSum" or self.opset >= 18):  # an input of every reduction since opset 18
            ins.append(self.const(np.array(attrs.pop("axes"), np.int64)))
        while ins and not ins[-1]:
            ins.pop()
        names = [self.fresh(kind) for _ in range(outputs)]
        if kind == "Reshape":
            shape = self.initialisers.get(ins[1])
            if shape is not None and 0 not in numpy_helper.to_array(shape):  # of two reshapes the last one counts
                ins[0] = self._reshaped.get(ins[0], ins[0])
            self._reshaped[names[0]] = ins[0]
        kind, _, domain = kind.partition("@")
        self.nodes.append(helper.make_node(kind, ins, names, name=names[0], domain=domain or None, **attrs))
        return names

    def once(self, key: tuple[str, str], write: Callable[[], str]) -> str:
        """Write what several nodes need of one ONNX value for the first of them, and return its name."""
        if key not in self._memo:
            self._memo[key] = write()
        return self._memo[key]

    def const(self, value: Any, name: str = "") -> str:
        """Add an initialiser and return its name."""
        name = name or self.fresh("const")
        self.initialisers[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def shape(self, node: Node, slot: str = "in0") -> tuple[int | None, ...]:
        """Return the shape of the operand in a slot of a node; () if it is left out."""
        name = node.operand(slot)
        return () if name is None else self.graph.shape(name)

    def pass_through(self, kind: str, inputs: Sequence[str], node: Node) -> str:
        """Add a pass-through operator on a node's operand, between quantizers so that runtimes keep it in integers."""
        y = self.op(kind, inputs)
        if self.plan.quantized(node.data) and (node.data, node.name) not in self.plan.float_edges:
            y = self._again(y, node.data)
        return y

    def defer(self, value: str, finish: Callable[[str], str]) -> None:
        """Apply `finish` to `value` behind its quantizer; to the result of its fused group if it has none."""
        self._deferred[value] = finish

    # ---- names of values

    def begin(self, node: Node) -> None:
        """Start to write `node`."""
        self._scope, self._start = node.name, len(self.nodes)
        for value in node.inputs:
            if value in self._deferred and node.output not in self._deferred:  # it was inside a group
                self._deferred[node.output] = self._deferred.pop(value)

    def read(self, value: str | None, node: Node) -> str | None:
        """Return the ONNX name under which `node` reads a value or weight."""
        if value is None:
            return None
        raw = (value, node.name) in self.plan.float_edges or value in self.inner
        if value in self.graph.weights:
            return self.weight(value, raw, few=node.facts.ieee)
        return self.before_quantizer[value] if raw else self.after_quantizer[value]

    def for_size(self, x: str, axis: int, rank: int) -> str:
        """Return the tensor whose size along an axis is read for that of x."""
        return x

    def computed_in_float(self, name: str | None) -> bool:
        """Return whether an ONNX value is the result of float arithmetic, not of dequantizing or passing it on."""
        maker = self._maker(name)
        return maker is not None and maker.op_type not in _PASS_THROUGH

    def _dequantized(self, name: str) -> bool:
        """Return whether an ONNX value is dequantized, perhaps in another shape."""
        maker = self._maker(name)
        while maker is not None and maker.op_type == "Reshape":
            maker = self._maker(maker.input[0])
        return maker is not None and maker.op_type == "DequantizeLinear"

    def _maker(self, name: str | None) -> onnx.NodeProto | None:
        """Return the node so far that makes an ONNX value; None for inputs and initialisers."""
        return next((n for n in reversed(self.nodes) if name in n.output), None)

    def weight(self, name: str, raw: bool, few: bool = False) -> str:
        """Return the ONNX name of a weight in float: dequantized, unless `raw` or not quantized.

        Args:
            few: write a weight that is not quantized and has few distinct numbers as codes.
        """
        stored, w = self.plan.stored(name), self.graph.weights[name].detach()
        if raw or stored is None:
            return self._in_float(name, w.numpy(), few)
        if stored.grid.table is not None:
            return self.once((name, "in float"), lambda: self._gathered_floats(name, stored, stored.grid.table or ()))
        if name in self.after_quantizer and not (stored.grid.signed and stored.grid.file_bits == 8 and w.dim()):
            return self.after_quantizer[name]
        integers, (scale, zero) = self.weight_integers(name, name, stored.quantize(w)), self.qparams(name, stored)
        if integers != f"{name}_q":
            zero = self.integers(self.fresh("zero"), stored.zero_point, name)
        attrs = {"axis": stored.axis} if stored.scale.dim() else {}
        if stored.scale.dim() > 1 and stored.axis is not None:
            attrs["block_size"] = w.shape[stored.axis] // stored.scale.shape[stored.axis]
        dequantized = self.op("DequantizeLinear", [integers, scale, zero], **attrs)
        self.after_quantizer.setdefault(name, dequantized)
        return dequantized

    def _in_float(self, name: str, value: np.ndarray, few: bool) -> str:
        """Add numbers as they are; large ones that are equal to another weight's are written once.

        Those of at most 256 distinct ones, such as the anchors of a detector, are gathered from a table if `few`.
        ONNX Runtime does that when it loads the file, and the result is the same to the bit.
        """
        few = few and value.dtype == np.float32
        if value.nbytes < _LARGE:
            return name if name in self.initialisers else self.const(value, name)
        content = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
        key = f"{value.dtype} {value.shape} {few}", content
        return self.once(key, lambda: (few and self._from_table(name, value)) or self.const(value, name))

    def _from_table(self, name: str, value: np.ndarray) -> str:
        """Add numbers as codes and a table, and return their name; "" where there are too many distinct ones."""
        table, codes = np.unique(value.view(np.int32), return_inverse=True)  # 0 and -0 differ
        if len(table) > 256:
            return ""
        index = self.const(codes.reshape(value.shape).astype(np.uint8), f"{name}_codes")
        entries = self.const(table.view(value.dtype), f"{name}_table")
        self.op("Gather", [entries, self.op("Cast", [index], to=tensor_type("int32"))])
        self.nodes[-1].output[0] = name
        return name

    def weight_integers(self, weight: str, name: str, values: torch.Tensor) -> str:
        """Return the ONNX name of a weight's integers for one reader, without a copy in the file for the next one.

        Args:
            name: of the weight, or of the weight in another order of axes.
            values: integers in that order.

        Where ONNX Runtime shifts signed weights to unsigned ones (session.x64quantprecision), no two readers may share
        them. It folds the slice when it loads the file; slices with equal ends would become one.
        """
        table = self.tables.get(weight)
        held = f"{name}_q" if table is None else f"{name}_q_codes"
        if held not in self.initialisers:
            if table is None:
                return self.integers(held, values, weight)
            codes = torch.searchsorted(torch.tensor(table), values.float())
            self.const(codes.numpy().astype(np.uint8), held)
            self.integers(f"{weight}_table", torch.tensor(table).to(torch.int8), weight)
            return self._gathered(weight, held)
        self._readers += 1
        whole = [self.const(np.array([end], np.int64)) for end in (0, len(values) + self._readers, 0)]
        part = self.op("Slice", [held, *whole])
        return part if table is None else self._gathered(weight, part)

    def _gathered(self, weight: str, codes: str) -> str:
        """Add the entries of a weight's table by their codes; ONNX Runtime computes them when it loads the file."""
        return self.op("Gather", [f"{weight}_table", self.op("Cast", [codes], to=tensor_type("int32"))])

    def _gathered_floats(self, name: str, stored: Stored, table: tuple[float, ...]) -> str:
        """Add a weight in a table of other numbers than bytes: its codes, entries and scale."""
        w = self.graph.weights[name].detach()
        kind = np.uint8 if len(table) <= 256 else np.int32
        codes = self.const(stored.quantize(w).numpy().astype(kind), f"{name}_q_codes")
        self.const(np.array(table, np.float32), f"{name}_table")
        scale = self.const(shape_for(stored.scale, w, stored.axis).numpy(), f"{name}_scale")
        return self.op("Mul", [self._gathered(name, codes), scale])

    def publish(self, value: str, name: str) -> None:
        """Give a value of the graph its ONNX tensor `name`, which is renamed to `value`, and add its quantizer."""
        if not self._is_quantized(value) and value not in self.inner:
            name = self._unclipped_product(name)
        if name and any(name in n.output for n in self.nodes[self._start :]):
            self._rename(name, value)
            name = value
        finish = None if value in self.inner else self._deferred.pop(value, None)
        quantized = self._is_quantized(value)
        self.before_quantizer[value] = name if finish is None else finish(name)
        self.after_quantizer[value] = self.before_quantizer[value]
        if quantized:
            name = self._shielded(name)
            x = name if finish is None else finish(self._again(name, value))
            self.after_quantizer[value] = self._quantizer(x, value, f"{value}_q")

    def _is_quantized(self, value: str) -> bool:
        """Return whether a value passes a quantizer."""
        return self.plan.quantized(value) and value not in self.inner

    def _again(self, x: str, value: str) -> str:
        """Return x, which has the numbers of a value that is quantized, between quantizers of its own."""
        return self._quantizer(x, value, self.fresh("q"))

    def _shielded(self, x: str) -> str:
        """Return what a quantizer reads for x: a copy, if ONNX Runtime would quantize the operator that makes x.

        Its optimiser WeightBiasQuantization quantizes float weights and biases between quantizers, against the plan,
        where nothing but an activation lies between the operator and the quantizer.
        """
        n = self._maker(x)
        while n is not None and n.op_type in ("Relu", "Clip"):
            n = self._maker(n.input[0])
        if n is None or n.op_type not in ("Conv", "ConvTranspose", "Gemm"):
            return x
        data, *constants = (getattr(self._maker(i), "op_type", "") == "DequantizeLinear" for i in n.input if i)
        return self.op("Max", [x]) if data and not all(constants) else x

    def _unclipped_product(self, x: str) -> str:
        """Return x by way of Max and Min, if it is a product of integers that Relu or Clip bounds in float.

        ONNX Runtime leaves a product to integer kernels only if a quantizer follows its Relu or Clip.
        """
        n = self.nodes[-1] if self.nodes and x in self.nodes[-1].output else None
        if n is None or n.op_type not in ("Relu", "Clip"):
            return x
        y, *bounds = n.input
        made = self._maker(y)
        if made is None or made.op_type not in ("Gemm", "MatMul") or not self._dequantized(made.input[0]):
            return x
        self.nodes.pop()
        for kind, bound in zip(("Max", "Min"), bounds or [self.const(np.float32(0))], strict=False):
            y = self.op(kind, [y, bound]) if bound else y
        return y

    def quantized_input(self, value: str, io: QuantizedIO) -> None:
        """Add an input of quantized values: the plan's pass as they are, others are quantized anew."""
        grid, own = self.plan[value].grid, f"{value}_q"
        if io.own and (grid.qmin, grid.qmax) == grid.file_ends:
            self.nodes.append(helper.make_node("Identity", [value], [own], name=own))
            self.after_quantizer[value] = self.op("DequantizeLinear", [own, *self.qparams(value, self.plan[value])])
        else:
            self.after_quantizer[value] = self._quantizer(self._io("DequantizeLinear", value, io), value, own)
        self.before_quantizer[value] = self.after_quantizer[value]

    def quantized_output(self, value: str, io: QuantizedIO) -> str:
        """Return the ONNX name of an output of quantized values."""
        return f"{value}_q" if io.own else self._io("QuantizeLinear", self.after_quantizer[value], io)

    def _io(self, kind: str, x: str, io: QuantizedIO) -> str:
        return self.op(kind, [x, self.const(np.float32(io.scale)), self.const(np.array(io.zero_point, io.type))])

    def _rename(self, old: str, new: str) -> None:
        """Rename a tensor that the node being written has made."""
        if old in self._reshaped:
            self._reshaped[new] = self._reshaped[old]
        for n in self.nodes[self._start :]:
            n.input[:] = [new if i == old else i for i in n.input]
            n.output[:] = [new if o == old else o for o in n.output]

    # ---- quantizers

    def _quantizer(self, x: str, value: str, integers: str) -> str:
        """Add QuantizeLinear and DequantizeLinear, with a Clip for a grid that is narrower than its type.

        ONNX clips 8-bit integers; for other types the floats are clipped.
        """
        stored = self.plan[value]
        scale, zero, ends = *self.qparams(value, stored), (stored.grid.qmin, stored.grid.qmax)
        narrow, bytewide, out = ends != stored.grid.file_ends, stored.grid.file_bits == 8, integers
        if narrow and not bytewide:
            shape = [-1 if k == stored.axis else 1 for k in range(len(self.graph.shape(value)))]
            for kind, end in zip(("Max", "Min"), ends, strict=True):
                x = self.op(kind, [x, self.const(((end - stored.zero_point) * stored.scale).reshape(shape).numpy())])
        elif narrow:
            out = self.fresh("saturated")
        self.nodes.append(helper.make_node("QuantizeLinear", [x, scale, zero], [out], name=out))
        if out != integers:
            low, high = (self.const(np.array(end, "int8" if stored.grid.signed else "uint8")) for end in ends)
            self.nodes.append(helper.make_node("Clip", [out, low, high], [integers], name=integers))
        return self.op("DequantizeLinear", [integers, scale, zero])

    def qparams(self, name: str, stored: Stored) -> tuple[str, str]:
        """Return the initialisers of a tensor's scale and zero point; of rank 0 for one scale, as kernels demand."""
        scale, zero = f"{name}_scale", f"{name}_zero_point"
        if scale not in self.initialisers:
            self.const(stored.scale.numpy().astype(np.float32), scale)
            self.integers(zero, stored.zero_point, name)
        return scale, zero

    def integers(self, name: str, values: torch.Tensor, tensor: str) -> str:
        """Add integers of a tensor, in the smallest ONNX type that holds its grid.

        ONNX Runtime reads an int32 bias as an accumulator and ignores its scale; a narrow bias has a scale of its own.
        """
        grid = self.plan[tensor].grid
        wide = self.plan.tensors[tensor].role == "bias" and grid.file_bits > 8
        bits = 32 if wide else grid.file_bits
        kind = tensor_type(f"int{bits}" if grid.signed or bits == 32 else f"uint{bits}")
        if bits == 4:
            self.initialisers[name] = helper.make_tensor(name, kind, values.shape, values.ravel().tolist())
            return name
        return self.const(values.numpy().astype(helper.tensor_dtype_to_np_dtype(kind)), name)


def refuse(node: Node, why: str) -> NoReturn:
    """Raise that a node cannot be written."""
    raise UnsupportedError(f"{node.op} '{node.display_name}' cannot be written to ONNX: {why}", where=node.source)


def require(node: Node, condition: object, why: str) -> None:
    """Raise that a node cannot be written if a condition of its form is false."""
    if not condition:
        refuse(node, why)


def tensor_type(dtype: str) -> int:
    """Return ONNX's number of a type by torch's name; a Python integer ("int") is an int64."""
    names = {"float32": "FLOAT", "float64": "DOUBLE", "int": "INT64"}
    number: int = TensorProto.DataType.Value(names.get(dtype, dtype.upper()))
    return number


#: operators through which OpenVINO moves quantizers
_MOVES = tuple("BatchNormalization Mul Div Add Sub Neg Relu Clip Reshape Transpose Squeeze Unsqueeze Flatten".split())


class Unflattened(OnnxBuilder):
    """Operators as the network has them, for OpenVINO, which moves scales behind operators that change shapes."""

    flattens = False

    def for_size(self, x: str, axis: int, rank: int) -> str:
        """Return x cut to one element along the other axes.

        OpenVINO reads the size of x itself from another tensor that has it, and where that is the result of a
        convolution, it leaves the convolution's bias out.
        """
        ends = [1] * rank
        ends[axis] = np.iinfo(np.int64).max
        return self.op("Slice", [x, self.const(np.zeros(rank, np.int64)), self.const(np.array(ends, np.int64))])

    def publish(self, value: str, name: str) -> None:
        """Give a value its tensor; a reduction keeps its axes, which are squeezed behind it.

        OpenVINO fuses factors for each channel into a reduction that drops axes, along the axis of its operand.
        """
        made = self._maker(name)
        if made is not None and made.op_type.startswith("Reduce") and self.graph.is_float(value):
            n = self.graph.producers()[value]
            axes, keeps = n.attrs.get("axes"), [a for a in made.attribute if a.name == "keepdims" and not a.i]
            if axes and keeps and not (len(self.shape(n)) == 4 and {a % 4 for a in axes} == {2, 3}):
                keeps[0].i = 1
                name = self.op("Squeeze", [name, self.const(np.array(axes, np.int64))])
        super().publish(value, name)

    def _maximum(self, x: str) -> str:
        """Return x by way of an operator that OpenVINO neither removes nor moves a quantizer through."""
        return self.op("Max", [x, self.const(np.finfo(np.float32).min)])

    def _shielded(self, x: str) -> str:
        """Return what a quantizer reads for x: a maximum of it, if it is a concatenation, moved or scaled.

        OpenVINO would move the quantizer in front of it, and refuses some files then. It gets those of images right.
        """
        n = self._maker(x)
        while n is not None and n.op_type in _MOVES:
            n = self._maker(next((i for i in n.input if self._maker(i) is not None), None))
        if n is None or n.op_type != "Concat":
            return super()._shielded(x)
        images = len(getattr(self.graph.values.get(n.output[0]), "shape", ())) == 4
        if images and all(getattr(self._maker(i), "op_type", "") == "DequantizeLinear" for i in n.input):
            return super()._shielded(x)
        return self._maximum(x)
