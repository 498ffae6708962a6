"""The integers of an ONNX file: its quantized operators as float operators between QuantizeLinear and DequantizeLinear.

Files hold integers in three forms: pairs of quantizers around float operators (QDQ), operators of integers
(QLinearConv, QGemm, MatMulNBits, ...), and integers that are made at run time (DynamicQuantizeLinear and
MatMulInteger). Here all become the first one, in which no operator reads integers, with a note of what ran in integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from chipfit.errors import CaptureError, raise_bug, short_message
from chipfit.frameworks.onnx.limits import check_results
from chipfit.frameworks.onnx.live import live_nodes, reads_of
from chipfit.frameworks.quantized import dequantized
from chipfit.operators.table import enters

#: note of a file that ONNX Runtime has optimised, which it runs as it is
OPTIMISED = "chipfit.optimised"
#: note of the parts of constants that operators read: {part: [constant, first element, last element + 1]}
PARTS = "chipfit.parts"
#: type of integers -> lowest and highest one
ENDS = {f"int{bits}": (-1 << bits - 1, (1 << bits - 1) - 1) for bits in (2, 4, 8, 16, 32)}
ENDS |= {f"uint{bits}": (0, (1 << bits) - 1) for bits in (2, 4, 8, 16)}
#: operators that pass integers on, and those of their results that hold none
_MOVES = dict.fromkeys(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Split Gather GatherND GatherElements Concat Expand "
    "Tile DepthToSpace SpaceToDepth Pad Resize ReduceMax ReduceMin Max Min Dropout".split(),
    (),
) | {"MaxPool": (1,), "TopK": (1,), "ArgMax": (0,), "ArgMin": (0,), "Shape": (0,), "Size": (0,)}
#: elements of a constant from which others are computed
_MOST = 1 << 24
_FROM_FLOAT = "start from the float model that it was made from"
_QUANTIZED = "QuantizeLinear DequantizeLinear ConvInteger MatMulInteger DynamicQuantizeLinear".split()


def is_quantized(kind: str, domain: str) -> bool:
    """Return whether an operator has integers, or stands for a quantizer."""
    if not isinstance(kind, str):  # of a damaged file
        return False
    known = kind in _QUANTIZED or kind.startswith("QLinear") or (domain == "com.microsoft" and kind in _READERS)
    others = domain == "com.microsoft" and kind.startswith(
        ("QAttention", "QEmbed", "QOrdered", "DynamicQ", "MatMulBnb")
    )
    return known or others or is_foreign(kind, domain)


def is_foreign(kind: str, domain: str) -> bool:
    """Return whether an operator is a quantizer of a training tool, which has no runtime."""
    words = ("quant", "perchannelaffine", "pertensoraffine", "learnedscale", "learnablescale")
    computing = ("lstm", "gru", "rnn", "conv", "pool", "matmul", "gemm", "attention", "norm", "embed")
    own = isinstance(kind, str) and domain not in ("", "ai.onnx", "com.microsoft", "ai.onnx.ml")
    return own and any(w in kind.lower() for w in words) and not any(w in kind.lower() for w in computing)


@dataclass(frozen=True, eq=False)
class QParams:
    """Scale and zero point of a tensor, [] or [C] along an axis, or one for each block along it."""

    kind: str  #: type of the integers, such as "uint8"
    scale: np.ndarray  #: float32
    zero: np.ndarray  #: int64, same shape
    axis: int = 0
    block: int = 0  #: elements that share a scale along the axis; 0: all of a channel, or of the tensor
    ends: tuple[int, int] | None = None  #: lowest and highest integer, if not those of the type

    def spread(self, p: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Return scales or zero points in a shape that broadcasts against a tensor."""
        if self.block:
            return np.repeat(p, self.block, self.axis)[tuple(slice(0, s) for s in shape)]
        return p.reshape([-1 if k == self.axis else 1 for k in range(len(shape))]) if p.size > 1 else p.reshape(())


@dataclass(frozen=True, eq=False)
class IntegerConstant:
    """The integers of a constant."""

    name: str  #: of the constant in the file
    integers: np.ndarray  #: int64
    numbers: QParams

    def dequantize(self) -> np.ndarray:
        """Return the float values; those of 32-bit integers in float64."""
        n, shape = self.numbers, self.integers.shape
        scale = n.scale.astype(np.float64 if n.kind == "int32" else np.float32)
        return dequantized(self.integers, n.spread(scale, shape), n.spread(n.zero, shape))


def part_of(codes: IntegerConstant, change: Callable[[torch.Tensor], torch.Tensor]) -> IntegerConstant | None:
    """Return a part of a constant with its scales; None if they lie along several axes of it.

    Args:
        change: a function of tensors, such as one that takes the first row.
    """
    n, shape = codes.numbers, codes.integers.shape
    spread = (np.broadcast_to(n.spread(p, shape), shape) for p in (n.scale, n.zero))
    integers, scale, zero = (change(torch.from_numpy(np.array(p))).numpy() for p in (codes.integers, *spread))
    axes = [k for k in range(scale.ndim) if any((p != p.take([0], k)).any() for p in (scale, zero))]
    if len(axes) > 1:
        return None
    first = tuple(slice(None) if k in axes else 0 for k in range(scale.ndim))
    numbers = QParams(n.kind, scale[first], zero[first], axes[0] if axes else 0, 0, n.ends)
    return IntegerConstant(codes.name, integers, numbers)


def _with_positive_scales(codes: IntegerConstant) -> IntegerConstant:
    """Return a constant without negative scales, which tools use in blocks: (q - z) s = ((2 z - q) - z) (-s)."""
    n, shape = codes.numbers, codes.integers.shape
    if not (n.scale < 0).any():
        return codes
    zero, (low, high) = n.spread(n.zero, shape), ENDS[n.kind]
    turned = np.where(n.spread(n.scale, shape) < 0, 2 * zero - codes.integers, codes.integers)
    ends = min(low, int(turned.min())), max(high, int(turned.max()))
    numbers = QParams(n.kind, np.abs(n.scale), n.zero, n.axis, n.block, ends)
    return IntegerConstant(codes.name, turned, numbers)


def _with_whole_blocks(codes: IntegerConstant) -> IntegerConstant:
    """Return a constant whose blocks fill its axis: smaller ones where the last one is a part."""
    n, size = codes.numbers, codes.integers.shape[codes.numbers.axis] if codes.numbers.block else 0
    if not n.block or size % n.block == 0:
        return codes
    block = math.gcd(size, n.block)
    scale, zero = (np.repeat(p, n.block // block, n.axis).take(range(size // block), n.axis) for p in (n.scale, n.zero))
    return IntegerConstant(codes.name, codes.integers, QParams(n.kind, scale, zero, n.axis, block, n.ends))


@dataclass
class NormalForm:
    """A model in which float operators read and make floats, with quantizers of one operand between them."""

    model: onnx.ModelProto
    made: dict[str, QParams] = field(default_factory=dict)  #: result of a QuantizeLinear -> how it is stored
    #: float tensor that no node makes -> its integers
    constants: dict[str, IntegerConstant] = field(default_factory=dict)
    #: result of a float operator that the file computes otherwise -> "int", or "follow" where numbers are moved
    runs: dict[str, str] = field(default_factory=dict)
    given: dict[str, QParams] = field(default_factory=dict)  #: input of integers -> how it is stored
    taken: dict[str, QParams] = field(default_factory=dict)  #: output of integers -> how it is stored
    #: result of a DynamicQuantizeLinear -> attributes of the quantizer, where it is another one
    rounded: dict[str, dict[str, Any]] = field(default_factory=dict)
    small_floats: set[str] = field(default_factory=set)  #: types of floats of 8 bits or less that its quantizers make
    #: nodes to add to the file, whose results are compared with the simulation's
    returned: list[onnx.NodeProto] = field(default_factory=list)


def from_bytes(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpack unsigned integers [*dims, count] of 2, 4 or 8 bits from bytes, the first from the lowest bits."""
    parts = np.stack([packed >> k & (1 << bits) - 1 for k in range(0, 8, bits)], -1)
    return parts.reshape(*packed.shape[:-1], -1)[..., :count].astype(np.int64)


def plain(name: str) -> str:
    """Return the name of a tensor without the endings that tools give to its integers."""
    for ending in ("_QuantizeLinear_Output", "_QuantizeLinear_Input", "_DequantizeLinear_Output", "_quantized", "_q"):
        name = name.removesuffix(ending)
    return name


class Expansion:
    """One pass over a model, which brings it into its normal form.

    Args:
        model: with the data of its initialisers.
        where: what names it in messages.
        names: node -> name of its float result.
    """

    def __init__(self, model: onnx.ModelProto, where: str = "", names: Mapping[str, str] | None = None) -> None:
        self.source, self.where, self.names = model, where, names or {}
        self.initialisers = {t.name: t for t in model.graph.initializer}
        self.arrays: dict[str, np.ndarray] = {}
        self.out = NormalForm(onnx.ModelProto())
        self.nodes: list[onnx.NodeProto] = []
        self.codes: dict[str, QParams] = {}  #: tensor of integers -> how it is stored
        self.dynamic: set[str] = set()  #: results of DynamicQuantizeLinear
        self.floats: dict[str, str] = {}  #: tensor of integers -> the same numbers as floats
        self.users: dict[str, list[onnx.NodeProto]] = {}
        self.makers: dict[str, onnx.NodeProto] = {}
        self.foldable: set[str] = set()  #: tensors that depend on constants alone
        #: floats of 8 bits or less that a quantizer makes -> their array if constant
        self.small_floats: dict[str, Any] = {}
        self.done: set[int] = set()  #: nodes that were read with an earlier one
        self.taken = {*self.initialisers, *(v.name for v in model.graph.input)}
        for n in model.graph.node:
            self.makers |= dict.fromkeys(n.output, n)
            self.taken |= {*n.output}
            for i in dict.fromkeys(n.input):
                self.users.setdefault(i, []).append(n)
            if n.op_type == "Constant" and n.attribute and n.attribute[0].HasField("t"):
                self.initialisers[n.output[0]] = n.attribute[0].t
            if n.input and all(not i or i in self.initialisers or i in self.foldable for i in n.input):
                self.foldable |= {*n.output}
        self.ins = {v.name for v in model.graph.input} - {*self.initialisers}

    def run(self) -> NormalForm:
        """Return the normal form.

        Raises:
            CaptureError: A scale or zero point is malformed, or an operator of integers is not known.
        """
        for step in (self._inputs_of_integers, self.node):
            for n in self.source.graph.node:
                if id(n) in self.done:
                    continue
                try:
                    step(n)
                except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as e:
                    got = short_message(e) or type(e).__name__
                    raise self.fault(n, "An operator of integers is malformed", got, "its operands") from e
        graph = self.source.graph
        for v in graph.output:
            if v.name in self.codes:
                self.out.taken[v.name] = self.codes[v.name]
        model = self.out.model
        model.CopyFrom(onnx.ModelProto(ir_version=self.source.ir_version, opset_import=self.source.opset_import))
        model.graph.name = graph.name
        for v in graph.input:
            if v.name in self.ins:
                made = model.graph.input.add()
                made.CopyFrom(v)
                if v.name in self.out.given:
                    made.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for v in graph.output:
            model.graph.output.add().CopyFrom(onnx.ValueInfoProto(name=v.name))
        model.graph.node.extend(live := live_nodes(self.nodes, [v.name for v in graph.output]))
        read = {i for n in live for i in reads_of(n)}
        model.graph.initializer.extend(t for k, t in self.initialisers.items() if k in read and k not in self.makers)
        model.graph.initializer.extend(onnx.TensorProto(name=k, data_type=1, dims=[0]) for k in self.out.constants)
        return self.out

    def _inputs_of_integers(self, n: onnx.NodeProto) -> None:
        """Note how an input or a constant is stored whose integers are read behind operators that move them."""
        if not (n.op_type == "DequantizeLinear" or n.op_type in ("QLinearConv", "QLinearMatMul", "QGemm")):
            return
        tensor = n.input[0]
        while tensor in self.makers and self.makers[tensor].op_type in _MOVES:
            tensor = self.makers[tensor].input[0]
        if tensor == n.input[0] or tensor in self.codes:
            return
        if tensor in self.ins:
            self.codes[tensor] = self.out.given[tensor] = self.numbers(n, tensor, n.input[1], _operand(n, 2))
        elif tensor in self.initialisers and self.kind(tensor) in ENDS:  # such as a table whose rows are gathered
            numbers = self.numbers(n, tensor, n.input[1], _operand(n, 2), self.kind(tensor))
            array = self.array(tensor)
            if numbers.scale.size == 1 and array is not None:
                self.codes[tensor] = numbers
                self.floats[tensor] = self.enter(IntegerConstant(tensor, array.astype(np.int64), numbers))

    def node(self, n: onnx.NodeProto) -> None:
        reader = _READERS.get(n.op_type)
        if reader is not None:
            reader(self, n)
        elif is_foreign(n.op_type, n.domain):
            self._foreign(n)
        elif is_quantized(n.op_type, n.domain):
            raise self.unread(n)
        elif any(i in self.codes for i in n.input):
            self._moved(n)
        elif (n.op_type in ("Cast", "Gather") and _scaled_constant(self, n)) or self._constant(n):
            pass
        else:
            self.nodes.append(n)

    # ---- constants, scales and zero points

    def only_user(self, tensor: str, kind: str) -> onnx.NodeProto | None:
        """Return the only reader of a tensor, if it is of this operator."""
        users = self.users.get(tensor, ())
        return users[0] if len(users) == 1 and users[0].op_type == kind else None

    def array(self, name: str) -> np.ndarray | None:
        """Return the numbers of a constant; None for a tensor that is computed."""
        if name not in self.arrays and name in self.initialisers:
            array = numpy_helper.to_array(self.initialisers[name])
            self.arrays[name] = array if array.dtype.kind in "biuf" else array.astype(np.int64)
        if name not in self.arrays and name in self.foldable:
            self.arrays |= self.computed(self.makers[name]) or {}
        return self.arrays.get(name)

    def computed(self, n: onnx.NodeProto) -> dict[str, np.ndarray] | None:
        """Return the results of a float operator on constants, such as scales that an exporter left to be computed."""
        if n.domain not in ("", "ai.onnx") or n.op_type in _QUANTIZED or not n.input or any(_bodies(n)):
            return None
        return self.evaluated(n, {i: self.array(i) for i in n.input if i})

    def evaluated(self, n: onnx.NodeProto, arrays: dict[str, Any]) -> dict[str, Any] | None:
        """Return the results of an operator on arrays; None if one is missing or it cannot be computed."""
        if any(a is None or a.size > _MOST for a in arrays.values()):
            return None
        check_results(n, self.opset, arrays, 1, n.name or n.op_type)
        ins, outs = ([onnx.ValueInfoProto(name=k) for k in names if k] for names in (arrays, n.output))
        model = helper.make_model(helper.make_graph([n], "node", ins, outs), opset_imports=self.source.opset_import)
        try:
            evaluator = ReferenceEvaluator(model)
            return dict(zip((o for o in n.output if o), evaluator.run(None, arrays), strict=False))
        except Exception as e:  # evaluators of single operators raise anything
            raise_bug(e)
            return None

    def kind(self, name: str) -> str:
        """Return the type of a constant."""
        return _type_name(self.initialisers[name].data_type)

    def numbers(self, n: onnx.NodeProto, tensor: str, scale: str, zero: str, kind: str = "", rank: int = 0) -> QParams:
        """Return scale and zero point of an operand or result.

        Args:
            kind: type of the integers, if they are known.
            rank: of the tensor, if it is known, for axes that count from behind.

        Raises:
            CaptureError: They are malformed, or computed.
        """
        s, z = self.array(scale), self.array(zero) if zero else None
        if s is None or (zero and z is None):
            raise self.fault(n, f"The scale or zero point of '{tensor}' is computed", "", "constants")
        axis, block = _attribute(n, "axis", 1), _attribute(n, "block_size")  # tools use negative scales of blocks
        if s.dtype.kind != "f" or not np.isfinite(s).all() or not ((s != 0) if block else (s > 0)).all():
            raise self.fault(n, f"Scale of '{tensor}' must be positive", f"{s.reshape(-1)[:4].tolist()}", "floats > 0")
        own = self.kind(zero) if zero else ""
        kind = kind or own or "uint8"
        if kind not in ENDS or (own and own != kind):
            got = own if kind in ENDS else kind
            raise self.fault(n, f"Zero point of '{tensor}' has another type than its integers", got, kind)
        if z is not None and z.size not in (1, s.size):
            got = f"zero point {list(z.shape)}, scale {list(s.shape)}"
            raise self.fault(n, f"Scale and zero point of '{tensor}' have other shapes", got, "equal shapes")
        one = s.size == 1
        if n.op_type not in ("QuantizeLinear", "DequantizeLinear"):  # one for each channel, along the axis of channels
            s = s.reshape(-1)
        s = s.astype(np.float32).reshape(() if one else s.shape)
        z = np.zeros(s.shape, np.int64) if z is None else np.broadcast_to(z.astype(np.int64).reshape(-1), s.size)
        if rank and not one and not -rank <= axis < rank:
            raise self.fault(n, f"Axis of '{tensor}' does not exist", str(axis), f"{-rank} to {rank - 1}")
        return QParams(kind, s, z.reshape(s.shape), axis % rank if rank else axis, 0 if one else block)

    def constant(self, n: onnx.NodeProto, name: str, numbers: QParams) -> str:
        """Enter a constant of integers, and return the name of its floats.

        Raises:
            CaptureError: The scale is not one of the constant.
        """
        array = self.array(name)
        assert array is not None
        array, rows = array.astype(np.int64), numbers.scale.shape
        if numbers.block:
            want = [*array.shape]
            want[numbers.axis] = -(-want[numbers.axis] // numbers.block)
        else:
            want = [array.shape[numbers.axis]] if rows and numbers.axis < array.ndim else []
        if [*rows] != want and rows:
            raise self.fault(n, f"Scale of '{name}' has another shape than its channels", str([*rows]), str(want))
        return self.enter(IntegerConstant(name, array, numbers), n.output[0] if n.op_type == "DequantizeLinear" else "")

    def enter(self, codes: IntegerConstant, floats: str = "") -> str:
        """Enter a constant, and return the name of its floats.

        Args:
            floats: their name in the file.
        """
        codes = _with_whole_blocks(_with_positive_scales(codes))
        key = next((k for k, c in self.out.constants.items() if c.name == codes.name and _same(c, codes)), "")
        if not key:
            wanted = plain(codes.name).removesuffix("_rows")
            key = wanted if wanted == floats else self.fresh(wanted)
            self.out.constants[key] = codes
        return key

    def fresh(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.taken:
            count += 1
            name = f"{wanted}_{count}"
        self.taken.add(name)
        return name

    def fault(self, n: onnx.NodeProto, what: str, got: str, allowed: str) -> CaptureError:
        place = f"{n.op_type} '{n.name or next(iter(n.output), '')}'"
        return CaptureError(what, where=f"{self.where}, {place}" if self.where else place, got=got, allowed=allowed)

    def unread(self, n: onnx.NodeProto, why: str = "") -> CaptureError:
        what = f"The operator {n.op_type} has no reader" + (f": {why}" if why else "")
        place = f"{self.where}, '{n.name or next(iter(n.output), '')}'" if self.where else n.name
        return CaptureError(what, where=place, hint=_FROM_FLOAT)

    # ---- pieces of the normal form

    def dequantized(self, n: onnx.NodeProto, tensor: str, scale: str, zero: str) -> str:
        """Return the name of an operand's floats."""
        if tensor in self.initialisers:
            array = self.array(tensor)
            rank = 0 if array is None else array.ndim
            numbers = self.numbers(n, tensor, scale, zero, self.kind(tensor), rank)
            if numbers.scale.size > 1 and n.op_type != "DequantizeLinear":
                numbers = QParams(numbers.kind, numbers.scale, numbers.zero, _weight_axis(n, rank))
            return self.constant(n, tensor, numbers)
        if tensor in self.dynamic:
            return tensor
        self.read(n, tensor, scale, zero)
        return self.float_of(tensor)

    def read(self, n: onnx.NodeProto, tensor: str, scale: str, zero: str) -> None:
        """Check that integers are read with the scale that they were made with."""
        own = self.codes.get(tensor)
        numbers = self.numbers(n, tensor, scale, zero, own.kind if own is not None else "")
        if own is None:
            if tensor not in self.ins:
                made = f"'{tensor}' is made by {self.makers[tensor].op_type}" if tensor in self.makers else ""
                raise self.unread(n, made)
            self.codes[tensor] = self.out.given[tensor] = numbers
        elif not (np.array_equal(own.scale, numbers.scale) and np.array_equal(own.zero, numbers.zero)):
            got = f"{numbers.scale.reshape(-1)[:2].tolist()}, made with {own.scale.reshape(-1)[:2].tolist()}"
            raise self.fault(n, f"'{tensor}' is read with another scale than it was made with", got, "equal scales")

    def float_of(self, tensor: str) -> str:
        """Return the name of the floats that a tensor of integers stands for."""
        if tensor not in self.floats:
            self.floats[tensor] = self.fresh(f"{tensor}/float")
            self.nodes.append(helper.make_node("DequantizeLinear", [tensor], [self.floats[tensor]]))
        return self.floats[tensor]

    def quantized(self, x: str, result: str, numbers: QParams) -> None:
        """Add a quantizer, which makes the integers `result`."""
        self.nodes.append(helper.make_node("QuantizeLinear", [x], [result], name=result))
        self.codes[result] = self.out.made[result] = numbers

    def quantized_at_run_time(self, x: str, result: str, name: str | None = None) -> str:
        """Add a quantizer that chooses scale and zero point when it runs; return its result."""
        name = result if name is None else name
        self.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], [result], name=name))
        self.dynamic.add(result)
        return result

    def compute(
        self, n: onnx.NodeProto, kind: str, inputs: Sequence[str], result: str, runs: str = "int", **attrs: Any
    ) -> None:
        """Add the float operator of a node, with those of the node's attributes that it has."""
        made = helper.make_node(kind, inputs, [result], name=n.name, **attrs)
        schema = onnx.defs.get_schema(kind, self.opset)
        made.attribute.extend(a for a in n.attribute if a.name in schema.attributes and a.name not in attrs)
        self.nodes.append(made)
        self.out.runs[result] = runs

    @property
    def opset(self) -> int:
        return max((o.version for o in self.source.opset_import if o.domain in ("", "ai.onnx")), default=13)

    def result(self, n: onnx.NodeProto, k: int = 0) -> str:
        """Return an unused name of the floats behind a result of integers."""
        wanted = self.names.get(n.name, "") if not k else ""
        return self.fresh(wanted or plain(n.output[k]))

    # ---- nodes

    def _moved(self, n: onnx.NodeProto) -> None:
        """Read an operator that passes integers on, as one of floats."""
        if n.op_type == "Clip":
            return self._clip(n)
        if n.op_type not in _MOVES:
            raise self.unread(n, "it computes with integers")
        data = [i for i in n.input if i in self.codes]
        first = self.codes[data[0]]
        if any(self.codes[i].scale.size > 1 or not _alike(self.codes[i], first) for i in data):
            raise self.unread(n, "its operands have other scales")
        inputs = [self.float_of(i) if i in self.codes else i for i in n.input]
        if n.op_type == "Pad" and len(inputs) > 2 and inputs[2]:  # by an integer
            value = self.array(inputs[2])
            if value is None:
                raise self.unread(n, "its padding is computed")
            inputs[2] = self.enter(IntegerConstant(inputs[2], value.astype(np.int64), first))
        none = _MOVES[n.op_type]
        outs = [o if k in none or not o else self.result(n, k) for k, o in enumerate(n.output)]
        made = onnx.NodeProto()
        made.CopyFrom(n)
        made.input[:], made.output[:] = inputs, outs
        self.nodes.append(made)
        for o, x in zip(n.output, outs, strict=True):
            if x != o:
                self.out.runs[x] = "follow"
                self.quantized(x, o, first)

    def _constant(self, n: onnx.NodeProto) -> bool:
        """Compute integers of a constant, such as a Clip behind its quantizer, if they are read as such alone."""
        y, users = n.output[0], self.users.get(n.output[0], ())
        read = bool(users) and all(u.op_type == "DequantizeLinear" or u.output[0] in self.foldable for u in users)
        to = _attribute(n, "to") if n.op_type == "Cast" else 0
        if not (read and y in self.foldable and (to or n.input[0] in self.initialisers) and len(n.output) == 1):
            return False
        kind = _type_name(to) if to else self.kind(n.input[0])
        array = self.array(y) if kind in ENDS else None
        if array is None:
            return False
        self.arrays[y] = array.astype(np.int64)
        self.initialisers[y] = helper.make_tensor(y, getattr(onnx.TensorProto, kind.upper()), [0], [])
        return True

    def _clip(self, n: onnx.NodeProto) -> None:
        """Read a Clip of integers behind their quantizer, which makes the grid narrower."""
        x, own = n.input[0], self.codes[n.input[0]]
        ends = [self.array(i) for i in n.input[1:3]]
        if x not in self.out.made or len(self.users.get(x, ())) > 1 or len(ends) < 2 or any(e is None for e in ends):
            raise self.unread(n, "it computes with integers")
        low, high = (int(e) for e in ends)  # type: ignore[arg-type]  # none is None
        maker = next(m for m in self.nodes if m.output[0] == x)
        maker.output[0] = n.output[0]
        del self.out.made[x], self.codes[x]
        numbers = QParams(own.kind, own.scale, own.zero, own.axis, own.block, (low, high))
        self.codes[n.output[0]] = self.out.made[n.output[0]] = numbers

    def _foreign(self, n: onnx.NodeProto) -> None:
        """Read the quantizer of a training tool as what it rounds."""
        if n.input[0] in self.initialisers and self.kind(n.input[0]) != "float":
            raise self.unread(n, f"its constant is stored as {self.kind(n.input[0])}")
        self.nodes.append(helper.make_node("Identity", [n.input[0]], [n.output[0]], name=n.name))


#: enters the nodes of an operator of integers
Reader = Callable[[Expansion, onnx.NodeProto], None]


def _bodies(n: onnx.NodeProto) -> list[bool]:
    return [a.HasField("g") or bool(a.graphs) for a in n.attribute]


def _alike(a: QParams, b: QParams) -> bool:
    return a.kind == b.kind and np.array_equal(a.scale, b.scale) and np.array_equal(a.zero, b.zero)


def _same(a: IntegerConstant, b: IntegerConstant) -> bool:
    return _alike(a.numbers, b.numbers) and a.integers.shape == b.integers.shape


def _attribute(n: onnx.NodeProto, name: str, default: int = 0) -> int:
    """Return an attribute of a node that is an integer."""
    return next((int(a.i) for a in n.attribute if a.name == name), default)


def _type_name(number: int) -> str:
    """Return the name of a type, such as "uint8", by its number in files."""
    return str(onnx.TensorProto.DataType.Name(number)).lower()


def _weight_axis(n: onnx.NodeProto, rank: int) -> int:
    """Return the axis of a weight's channels in an operator of integers."""
    return 0 if "Conv" in n.op_type or _attribute(n, "transB") else rank - 1


def _operand(n: onnx.NodeProto, k: int) -> str:
    return n.input[k] if k < len(n.input) else ""


# ---------------------------------------------------------------- readers


def _of_small_floats(e: Expansion, n: onnx.NodeProto) -> bool:
    """Read a quantizer whose results are floats of 8 bits or less, or their dequantizer, as what it rounds."""
    x, zero = n.input[0], _operand(n, 2)
    held = e.initialisers.get(zero or x)
    kind = _type_name(_attribute(n, "output_dtype") or (held.data_type if held is not None else 0))
    if x not in e.small_floats and not kind.startswith(("float8", "float4")):
        return False
    if kind != "undefined":  # no zero point: its quantizer has one
        e.out.small_floats.add(kind)
    if e.small_floats.get(x) is not None or x in e.initialisers:
        known = {k: numpy_helper.to_array(e.initialisers[k]) for k in n.input if k in e.initialisers} | e.small_floats
        found = e.evaluated(n, {k: known.get(k, e.array(k)) for k in n.input if k})
        if found is None:
            raise e.unread(n, f"its {kind} cannot be computed")
        if n.op_type == "QuantizeLinear":
            e.small_floats |= found
            return True
        x = e.fresh(f"{plain(x)}_float")
        e.initialisers[x] = numpy_helper.from_array(found[n.output[0]].astype(np.float32), x)
    elif n.op_type == "QuantizeLinear":
        e.small_floats[n.output[0]] = None
    e.nodes.append(helper.make_node("Identity", [x], [n.output[0]], name=n.name))
    return True


def _quantize(e: Expansion, n: onnx.NodeProto) -> None:
    if _of_small_floats(e, n):
        return None
    x, y = n.input[0], n.output[0]
    declared = _attribute(n, "output_dtype")
    kind = _type_name(declared) if declared else ""
    numbers = e.numbers(n, x, n.input[1], _operand(n, 2), kind)
    array = e.array(x)
    if array is None:
        return e.quantized(x, y, numbers)
    numbers = QParams(numbers.kind, numbers.scale, numbers.zero, numbers.axis % max(array.ndim, 1), numbers.block)
    low, high = ENDS[numbers.kind]
    scale, zero = (numbers.spread(p, array.shape) for p in (numbers.scale, numbers.zero))
    q = np.clip(np.rint(array / scale) + zero, low, high).astype(np.int64)
    e.arrays[y], e.initialisers[y] = q, helper.make_tensor(y, getattr(onnx.TensorProto, numbers.kind.upper()), [0], [])


def _dequantize(e: Expansion, n: onnx.NodeProto) -> None:
    if _of_small_floats(e, n):
        return
    x, y = n.input[0], n.output[0]
    found = e.dequantized(n, x, n.input[1], _operand(n, 2))
    if x in e.initialisers:
        e.out.constants[y] = e.out.constants[found]
    else:
        e.nodes.append(helper.make_node("DequantizeLinear", [x], [y], name=n.name))


def _dynamic_quantize(e: Expansion, n: onnx.NodeProto) -> None:
    e.quantized_at_run_time(n.input[0], n.output[0], n.name)


def _bias(e: Expansion, n: onnx.NodeProto, name: str, *scales: str) -> str:
    """Return the floats of a bias, whose integers are in steps of the accumulator."""
    if not name:
        return ""
    a, b = (e.array(s) for s in scales)
    array = e.array(name)
    if a is None or b is None or array is None:
        raise e.unread(n, "its bias is computed")
    scale = np.asarray(a.reshape(-1) * b.reshape(-1), np.float32)
    one = scale.size == 1
    numbers = QParams("int32", scale.reshape(()) if one else scale, np.zeros(() if one else scale.shape, np.int64))
    return e.constant(n, name, numbers)


def _product(e: Expansion, n: onnx.NodeProto) -> None:
    """QLinearConv, QLinearMatMul, QGemm: x, w, each with scale and zero point, perhaps a bias, the result's numbers."""
    x, w = (e.dequantized(n, *(_operand(n, k + j) for j in range(3))) for k in (0, 3))
    gemm = n.op_type == "QGemm"
    at_scale, at_bias = (7, 6) if gemm else (6, 8)
    bias = _bias(e, n, _operand(n, at_bias), n.input[1], n.input[4])
    kind = {"QGemm": "Gemm", "QLinearConv": "Conv"}.get(n.op_type, "MatMul")
    inputs = [x, w, *([bias] if bias else [])]
    scale = _operand(n, at_scale)
    y = e.result(n) if scale else n.output[0]
    e.compute(n, kind, inputs, y)
    if scale:
        e.quantized(y, n.output[0], e.numbers(n, n.output[0], scale, _operand(n, at_scale + 1)))


def _rounded(e: Expansion, n: onnx.NodeProto, kind: str, inputs: Sequence[str], at: int) -> None:
    """Add the float operator of a node and the quantizer of its result, whose scale is the operand `at`."""
    y = e.result(n)
    e.compute(n, kind, inputs, y)
    e.quantized(y, n.output[0], e.numbers(n, n.output[0], n.input[at], _operand(n, at + 1)))


def _element_wise(e: Expansion, n: onnx.NodeProto) -> None:
    """QLinearAdd, QLinearMul: a, b, each with scale and zero point, the result's numbers."""
    inputs = [e.dequantized(n, *(_operand(n, k + j) for j in range(3))) for k in (0, 3)]
    _rounded(e, n, n.op_type.removeprefix("QLinear"), inputs, 6)


def _unary(e: Expansion, n: onnx.NodeProto) -> None:
    """QLinearSigmoid, QLinearAveragePool, ...: x with scale and zero point, the result's numbers."""
    if _attribute(n, "channels_last"):
        raise e.unread(n, "its images lie channels last")
    inputs, kind = [e.dequantized(n, n.input[0], n.input[1], _operand(n, 2))], n.op_type.removeprefix("QLinear")
    if kind.startswith("Reduce") and e.opset >= 18:
        axes = next((a.ints for a in n.attribute if a.name == "axes"), ())
        inputs.append(e.fresh(f"{n.output[0]}_axes"))
        e.initialisers[inputs[1]] = numpy_helper.from_array(np.array(axes, np.int64), inputs[1])
    _rounded(e, n, kind, inputs, 3)


def _concat(e: Expansion, n: onnx.NodeProto) -> None:
    """QLinearConcat: the result's numbers, then each operand with scale and zero point."""
    _rounded(e, n, "Concat", [e.dequantized(n, *n.input[k : k + 3]) for k in range(2, len(n.input), 3)], 0)


def _where(e: Expansion, n: onnx.NodeProto) -> None:
    """QLinearWhere: a condition, two operands with scale and zero point, the result's numbers."""
    _rounded(e, n, "Where", [n.input[0], *(e.dequantized(n, *n.input[k : k + 3]) for k in (1, 4))], 7)


def _integer_product(e: Expansion, n: onnx.NodeProto) -> None:
    """ConvInteger, MatMulInteger: behind it a Cast to floats and a Mul by the product of both scales."""
    cast = e.only_user(n.output[0], "Cast")
    mul = None if cast is None else e.only_user(cast.output[0], "Mul")
    if cast is None or mul is None:
        raise e.unread(n, "its sums are not scaled by a Cast and a Mul")
    factor = next(i for i in mul.input if i != cast.output[0])
    scales = [*e.makers[factor].input] if factor in e.makers and e.makers[factor].op_type == "Mul" else [factor]
    weight = next((s for s in reversed(scales) if e.array(s) is not None), "")  # behind that of the data
    if not weight or n.input[1] not in e.initialisers:
        raise e.unread(n, "its weight is computed")
    other = next((s for s in scales if s != weight), "")
    if not other and n.input[0] not in e.dynamic:
        raise e.unread(n, "the scale of its data is not known")
    a = e.dequantized(n, n.input[0], other, _operand(n, 2))
    w = e.dequantized(n, n.input[1], weight, _operand(n, 3))
    e.compute(n, n.op_type.removesuffix("Integer"), [a, w], mul.output[0])
    e.done |= {id(cast), id(mul)}


def _to_float(e: Expansion, n: onnx.NodeProto) -> None:
    """MatMulIntegerToFloat: a, b, their scales, their zero points, a float bias."""
    x, w, xs, ws, xz, wz, bias = (_operand(n, k) for k in range(7))
    a = x if x in e.dynamic else e.dequantized(n, x, xs, xz)
    _with_bias(e, n, [a, e.dequantized(n, w, ws, wz)], bias)


def _dynamic_product(e: Expansion, n: onnx.NodeProto) -> None:
    """DynamicQuantizeMatMul: floats, b with scale and zero point, a float bias."""
    x, w, ws, wz, bias = (_operand(n, k) for k in range(5))
    q = e.quantized_at_run_time(x, e.fresh(f"{n.output[0]}/dynamic"))
    _with_bias(e, n, [q, e.dequantized(n, w, ws, wz)], bias)


def _scaled_constant(e: Expansion, n: onnx.NodeProto) -> bool:
    """Read a constant of integers that a Cast and a Mul dequantize, perhaps behind a Gather of its rows."""
    name = n.input[0]
    if name not in e.initialisers or e.kind(name) not in ("int8", "uint8", "int4", "uint4"):
        return False
    cast = n if n.op_type == "Cast" else e.only_user(n.output[0], "Cast")
    mul = None if cast is None else e.only_user(cast.output[0], "Mul")
    if cast is None or mul is None or _attribute(cast, "to") != onnx.TensorProto.FLOAT:
        return False
    integers, scale = e.array(name), e.array(next(i for i in mul.input if i != cast.output[0]))
    along = [] if scale is None else [k for k in range(-scale.ndim, 0) if scale.shape[k] > 1]
    if integers is None or scale is None or len(along) > 1 or scale.ndim > integers.ndim or not (scale > 0).all():
        return False
    axis = integers.ndim + along[0] if along else 0
    gathered = n.op_type == "Gather"
    if integers.ndim == 0 or (along and scale.size != integers.shape[axis]) or (gathered and along and axis == 0):
        return False
    one = np.asarray(scale.reshape(-1) if along else scale.reshape(()), np.float32)
    numbers = QParams(e.kind(name), one, np.zeros(one.shape, np.int64), axis)
    floats = e.enter(IntegerConstant(name, integers.astype(np.int64), numbers))
    if gathered:
        e.compute(n, "Gather", [floats, n.input[1]], mul.output[0], "float")
    else:
        e.out.constants[mul.output[0]] = e.out.constants[floats]
    e.done |= {id(cast), id(mul)}
    return True


def _with_bias(e: Expansion, n: onnx.NodeProto, inputs: Sequence[str], bias: str) -> None:
    y = e.fresh(f"{n.output[0]}/product") if bias else n.output[0]
    e.compute(n, "MatMul", inputs, y)
    if bias:
        e.nodes.append(helper.make_node("Add", [y, bias], [n.output[0]], name=f"{n.name}/bias"))


def _in_blocks(e: Expansion, n: onnx.NodeProto, at: Sequence[int]) -> tuple[IntegerConstant, dict[str, Any]]:
    """Return a weight in blocks [rows, K], and the node's attributes.

    Args:
        at: places of its bytes, scales and zero points among the operands.
    """
    a = {x.name: helper.get_attribute_value(x) for x in n.attribute}
    name, scale, zero = (_operand(n, k) for k in at)
    packed, s, z = e.array(name), e.array(scale), e.array(zero) if zero else None
    bits, block = a.get("bits", 4), a.get("block_size", 128)
    if packed is None or s is None or s.dtype.kind != "f" or bits not in (2, 4, 8) or (zero and z is None):
        raise e.unread(n, "its weight is computed, or of another type")
    if z is not None and z.dtype.kind == "f":
        raise e.unread(n, "its zero points are floats")
    packed, kind = packed.reshape(len(packed), -1), e.kind(name)
    in_bytes = kind == "uint8"  # else each integer is an element
    held = packed.shape[1] * (8 // bits if in_bytes else 1)
    count = a.get("K") or held
    blocks = -(-count // block)
    s = s.astype(np.float32).reshape(len(packed), -1)
    whole = kind in ("uint8", f"int{bits}", f"uint{bits}") and s.shape[1] == blocks and held >= count
    if not whole or not (np.isfinite(s) & (s != 0)).all() or (z is not None and z.dtype != packed.dtype):
        raise e.fault(n, f"'{name}' and its scales do not fit", f"{list(s.shape)}", f"{[len(packed), blocks]}, not 0")
    zeros = np.zeros(s.shape, np.int64) if z is None else z.reshape(len(packed), -1)
    if in_bytes:
        middle = 0 if z is not None else 1 << bits - 1  # without zero points, they stand for signed integers
        packed, kind = from_bytes(packed, bits, count) - middle, f"{'int' if middle else 'uint'}{bits}"
        zeros = zeros if z is None else from_bytes(zeros, bits, blocks)
    return IntegerConstant(name, packed, QParams(kind, s, zeros, 1, block)), a


def _product_in_blocks(e: Expansion, n: onnx.NodeProto) -> None:
    """MatMulNBits: floats, rows of a weight in blocks, scales, zero points, order of columns, bias."""
    if _operand(n, 4):
        raise e.unread(n, "its columns have another order")
    codes, a = _in_blocks(e, n, (1, 2, 3))
    numbers = codes.numbers
    turned = QParams(numbers.kind, numbers.scale.T, numbers.zero.T, 0, numbers.block)
    w, x = e.enter(IntegerConstant(codes.name, codes.integers.T, turned)), n.input[0]
    if a.get("accuracy_level") == 4:
        x = e.quantized_at_run_time(x, e.fresh(f"{n.output[0]}/dynamic"))
        e.out.rounded[x] = {"qmin": -127, "qmax": 127, "affine": False, "per": "block", "block": numbers.block}
    _with_bias(e, n, [x, w], _operand(n, 5))


def _gather_in_blocks(e: Expansion, n: onnx.NodeProto) -> None:
    """GatherBlockQuantized: rows of a weight in blocks, indices, scales, zero points."""
    codes, a = _in_blocks(e, n, (0, 2, 3))
    if a.get("gather_axis", 0) != 0 or a.get("quantize_axis", 1) % 2 != 1:
        raise e.unread(n, "it gathers along another axis")
    e.compute(n, "Gather", [e.enter(codes), n.input[1]], n.output[0], axis=0)


_READERS: dict[str, Reader] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic_quantize,
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm"), _product),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _element_wise),
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    **dict.fromkeys(("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearReduceMean"), _unary),
    **dict.fromkeys(("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"), _unary),
    **dict.fromkeys(("ConvInteger", "MatMulInteger"), _integer_product),
    "MatMulIntegerToFloat": _to_float,
    "DynamicQuantizeMatMul": _dynamic_product,
    "MatMulNBits": _product_in_blocks,
    "GatherBlockQuantized": _gather_in_blocks,
}
reads_integers = enters(_READERS)
