"""An ONNX model while it is read: its tensors, the growing Graph, and the node that a reader is given.

Every tensor is evaluated for several *variants* of the input sizes at once: tensors that depend on data by their shapes
alone, on torch's meta device; those that depend on sizes and constants, in numbers. Sizes that differ between variants
stay open. So shape arithmetic needs no symbols, and readers no inference of shapes.
"""

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from chipfit.engine.kernels import execute
from chipfit.errors import CaptureError, ChipfitError, raised_outside_chipfit, short_message
from chipfit.frameworks.onnx.limits import check_shape
from chipfit.frameworks.onnx.model import OnnxModel, domain_of
from chipfit.frameworks.onnx.runtime import OnnxFunction, as_tensor
from chipfit.frameworks.reading import Unreadable, present, require, steps_from_zero
from chipfit.graph.builder import GraphBuilder, Origin
from chipfit.graph.ir import OPAQUE, Graph, Node, Ref
from chipfit.operators.formulas import compute
from chipfit.operators.table import OPS, SIZED_BY_DATA

_META = torch.device("meta")
_MOST_AXES = 64  #: of a tensor of torch


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor of the model, by variant of the input sizes."""

    metas: tuple[torch.Tensor, ...]  #: shapes and types
    name: str = ""  #: of the value or weight of the Graph; "" for numbers that are not in it
    numbers: tuple[np.ndarray, ...] = ()  #: if they do not depend on data
    source: str = ""  #: name of the initialiser that the numbers come from
    change: str = ""  #: how they were computed from it
    trainable: bool = False

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape, None where a size is open."""
        sizes = zip(*(m.shape for m in self.metas), strict=True)
        return tuple(s[0] if len({*s}) == 1 else None for s in sizes)

    @property
    def rank(self) -> int:
        return self.metas[0].dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.metas[0].dtype

    def known(self, k: int) -> Any:
        """Return what is known in a variant without data: the numbers, or type and shape."""
        return self.numbers[k] if self.numbers else (_name(self.dtype), tuple(self.metas[k].shape))

    @property
    def constant(self) -> np.ndarray | None:
        """Numbers that are equal in all variants, or None."""
        if not self.numbers or any(n is not self.numbers[0] and not _equal(n, self.numbers[0]) for n in self.numbers):
            return None
        return self.numbers[0]


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool((a == b).all())


class OnnxGraphBuilder(GraphBuilder):
    """The growing Graph, and what each tensor of the model became.

    Args:
        count: number of variants.
    """

    def __init__(self, model: OnnxModel, count: int) -> None:
        super().__init__(Graph([], [], [], {}, {}, framework="onnx"))
        self.model, self.count = model, count
        self.names = {
            "output",
            *(v.name or "" for v in model.graph.outputs),
        }  # of outputs of the files that are written
        self.env: dict[str, Operand] = {}
        self.places: dict[tuple[int, ...], tuple[str, int]] = {}  #: sizes -> a value with them, and the axis
        self.batch: tuple[int, ...] = ()  #: number of samples by variant
        self.fixed = 0  #: the batch size that the model declares, although it is read with an open one
        self.weight_names: dict[tuple[str, str], str] = {}  #: (initialiser, form) -> the weight of the Graph
        self.changes: dict[str, Callable[[Any], Any]] = {}  #: weight -> the function that its initialiser went through
        self._results: dict[Any, tuple[Any, ...]] = {}  #: operator, attributes, shapes of operands -> results

    def results(self, node: Node, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a node on meta tensors and sizes, computed once for all nodes that are alike."""
        shapes = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in given]
        key = (node.op, repr(node.attrs), *shapes)
        if key not in self._results:
            self._results[key] = execute(node, given)
        return self._results[key]

    def rows(self, k: int) -> int:
        """Return the number of samples in a variant."""
        return self.batch[k] if self.batch else 1

    def input(self, name: str, metas: Sequence[torch.Tensor]) -> Operand:
        """Add an input of the graph."""
        operand = Operand(tuple(metas), name)
        self.value(name, operand.shape, _name(operand.dtype))
        self.graph.inputs.append(name)
        self.remember(operand)
        return operand

    def remember(self, operand: Operand) -> None:
        """Note where the open sizes of a value can be read."""
        for axis, sizes in enumerate(zip(*(m.shape for m in operand.metas), strict=True)):
            if len({*sizes}) > 1:
                self.places.setdefault(sizes, (operand.name, axis))

    def undo(self, mark: tuple[int, int]) -> None:
        """Forget the nodes and weights since `mark`, and where they are."""
        gone = self.forget(mark)
        self.weight_names = {k: w for k, w in self.weight_names.items() if w not in gone}
        self.places = {k: p for k, p in self.places.items() if p[0] not in gone}

    def constants(self, numbers: Sequence[np.ndarray], source: str = "", trainable: bool = False) -> Operand:
        """Return numbers by variant, or one array for all."""
        every = tuple(numbers) if len(numbers) == self.count else tuple(numbers) * self.count
        metas = [torch.empty(n.shape, dtype=_dtype(n), device=_META) for n in every]
        return Operand(tuple(metas), numbers=every, source=source, trainable=trainable)

    def weight(self, operand: Operand, wanted: str, form: str = "", change: Callable[[Any], Any] | None = None) -> str:
        """Return the name of a weight with the numbers of an operand.

        Args:
            wanted: its name, if the numbers do not come from one initialiser.
            form: name of `change`, a function that the tensor goes through.

        Raises:
            Unreadable: The numbers depend on an open size.
        """
        if (array := operand.constant) is None:
            raise Unreadable
        key = (operand.source, operand.change + form)
        if operand.source and key in self.weight_names:
            return self.weight_names[key]
        tensor = as_tensor(array)
        tensor = tensor if change is None else change(tensor).contiguous()
        if operand.source in self.model.graph.initializers:
            self.model.stored.release_tensor(self.model.graph.initializers[operand.source].const_value)
        name = self.fresh(operand.source or wanted)
        self.graph.weights[name] = tensor
        if operand.trainable and tensor.is_floating_point():
            self.graph.trainable.add(name)
        if operand.source:
            self.weight_names[key] = name
        if change is not None and not operand.change:
            self.changes[name] = change
        return name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(array: np.ndarray) -> torch.dtype:
    kind = torch.float32 if array.dtype.kind not in "biu" else None
    return kind or torch.from_numpy(np.empty(0, array.dtype)).dtype


class OnnxCall:
    """One ONNX node while it is read: its attributes and operands, its results as new nodes."""

    def __init__(self, builder: OnnxGraphBuilder, node: ir.Node, opset: int) -> None:
        self.builder, self.node, self.opset = builder, node, opset
        self.inputs = [None if v is None or not v.name else builder.env[v.name] for v in node.inputs]
        #: names of the results, "" for those that nothing reads
        self.outputs = [
            (v.name or "") if k == 0 or v.uses() or v.is_graph_output() else "" for k, v in enumerate(node.outputs)
        ]
        self.name = next(filter(None, self.outputs))

    # ---- attributes and operands

    def attr(self, name: str) -> Any:
        """Return an attribute, the default of the operator's definition if it is left out, or None."""
        given = self.node.attributes.get(name)
        if given is not None:
            return _plain(given.value)
        try:
            schema = onnx.defs.get_schema(self.node.op_type, self.opset, domain_of(self.node))
        except onnx.defs.SchemaError:
            return None
        default = schema.attributes[name].default_value if name in schema.attributes else None
        found = None if default is None or not default.type else onnx.helper.get_attribute_value(default)
        return _plain(found.decode() if isinstance(found, bytes) else found)

    def is_default(self, name: str) -> bool:
        """Return whether an attribute has the default of the operator's definition."""
        given = self.attr(name)
        schema = onnx.defs.get_schema(self.node.op_type, self.opset, domain_of(self.node))
        default = schema.attributes[name].default_value if name in schema.attributes else None
        return default is not None and bool(default.type) and given == _plain(onnx.helper.get_attribute_value(default))

    def operand(self, index: int) -> Operand:
        """Return an operand.

        Raises:
            Unreadable: It is left out.
        """
        return present(self.optional(index))

    def optional(self, index: int) -> Operand | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def numbers(self, name: str, index: int) -> Any:
        """Return an attribute that later versions have as an operand, as Python numbers; None if it is left out.

        Raises:
            Unreadable: The operand depends on data or open sizes.
        """
        if name in self.node.attributes:
            return self.attr(name)
        x = self.optional(index)
        return None if x is None else _plain(present(x.constant).tolist())

    def integers(self, name: str, index: int) -> tuple[int, ...] | None:
        """Return an attribute or operand as integers.

        Raises:
            Unreadable: It depends on data or open sizes, or lists more axes than a tensor has.
        """
        found = self.numbers(name, index)
        require(name != "axes" or not isinstance(found, list) or len(found) <= _MOST_AXES)
        return None if found is None else tuple(map(int, found)) if isinstance(found, (list, tuple)) else (int(found),)

    def weight(self, index: int, form: str = "", change: Callable[[Any], Any] | None = None) -> Operand:
        """Return a constant operand as a weight; see `OnnxGraphBuilder.weight`."""
        x = self.operand(index)
        if x.name and not form:
            return x
        name = self.builder.weight(x, f"{self.name}.{index}", form, change)
        meta = self.builder.graph.weights[name].to(_META)
        return Operand((meta,) * self.builder.count, name)

    def new_weight(self, tensor: torch.Tensor, wanted: str) -> Operand:
        """Return a new constant as a weight."""
        name = self.builder.fresh(f"{self.name}.{wanted}")
        self.builder.graph.weights[name] = tensor
        return Operand((tensor.to(_META),) * self.builder.count, name)

    def in_graph(self, x: Operand, wanted: str = "constant") -> Operand:
        """Return an operand that has a name in the Graph.

        Raises:
            Unreadable: It depends on an open size that no value has.
        """
        if x.name:
            return x
        if x.constant is not None:
            return Operand(x.metas, self.builder.weight(x, f"{self.name}.{wanted}"), x.numbers)
        if x.rank == 0:
            size = self.size(tuple(int(n) for n in x.numbers))
            if x.dtype is torch.int64:
                return size
        elif x.rank == 1 and all(_equal(n, np.arange(len(n))) for n in x.numbers):
            return self.index_range(x)
        return self.repeated(x)

    def without_repetition(self, op: str, x: Operand, others: Sequence[Operand | None]) -> Operand:
        """Return an operand without repetitions along open axes, where another one has these sizes too."""
        if not x.numbers or x.name or x.constant is not None or op not in OPS or OPS[op].layout != "elementwise":
            return x
        shapes = [[m.shape for m in o.metas] for o in others if o is not None and not o.numbers]
        if not any([*map(len, s)] == [n.ndim for n in x.numbers] for s in shapes):
            return x
        same = [
            k
            for k in range(x.rank)
            if x.shape[k] is None
            and any([t[k] for t in s] == [n.shape[k] for n in x.numbers] for s in shapes if len(s[0]) == x.rank)
        ]
        single = _without_repetition(x.numbers, same)
        return x if single is None else self.builder.constants([single])

    def repeated(self, x: Operand) -> Operand:
        """Return numbers that are equal along all open axes, such as an initial state, as a constant that is repeated.

        Raises:
            Unreadable: They differ, or no value has one of these sizes.
        """
        here = [k for k, s in enumerate(x.shape) if s is None]
        require(here)
        single = present(_without_repetition(x.numbers, here))
        sizes = [self.size(tuple(n.shape[k] for n in x.numbers)) for k in here]
        shape = tuple(None if k in here else -1 for k in range(x.rank))
        constant = self.new_weight(as_tensor(single), "constant")
        return self._append("Expand", [constant, *sizes], {"shape": shape}, [x.metas], f"{self.name}_expanded")[0]

    def size(self, sizes: tuple[int, ...]) -> Operand:
        """Return an open size as a value.

        Raises:
            Unreadable: No value has it.
        """
        require(sizes in self.builder.places)
        name, axis = self.builder.places[sizes]
        (made,) = self.builder.emit(self.origin, f"{self.name}_size", "Size", [name], {"axis": axis}, [((), "int")])
        metas = tuple(torch.empty((), dtype=torch.int64, device=_META) for _ in sizes)
        return Operand(metas, made.name, tuple(np.array(s) for s in sizes))

    def index_range(self, x: Operand) -> Operand:
        """Return 0, 1, 2 ... below an open size, as the running sum of ones minus one."""
        one = self.new_weight(torch.ones(1, dtype=x.dtype), "one")
        size = self.size(tuple(len(n) for n in x.numbers))
        ones = self._append("Expand", [one, size], {"shape": (None,)}, [x.metas], f"{self.name}_ones")[0]
        return steps_from_zero(self.step, ones, one)

    # ---- results

    @functools.cached_property
    def origin(self) -> Origin:
        """The layer that the node belongs to: by the names of its weights, by PyTorch's metadata, or its own name.

        PyTorch stores equal weights once, under the name of the first layer: a weight of another module does not count.
        """
        known = self.builder.model.graph.initializers
        weights = [v.name or "" for v in self.node.inputs if v is not None and v.name in known]
        path = next((w.rpartition(".")[0] for w in weights if w.endswith((".weight", ".bias", ".running_mean"))), None)
        scopes = self.node.metadata_props.get("pkg.torch.onnx.name_scopes")
        scope = None if scopes is None else _scope(scopes)
        if scope is not None and (path is None or not f"{path}.".startswith(f"{scope}." if scope else "")):
            path = scope
        return Origin(self.node.name or "" if path is None else path, self.node.op_type)

    def emit(self, op: str, inputs: Sequence[Operand | None], **attrs: Any) -> Operand:
        """Append the final node, which is called like the result."""
        return self.step(op, inputs, self.name, **attrs)

    def formula(self, formula: str, **operands: Any) -> Operand:
        """Append the operators of a formula, see `operators.formulas`; the last is the final node."""
        result: Operand = compute(formula, self.step, self.emit, **operands)
        return result

    def step(self, op: str, inputs: Sequence[Operand | None], wanted: str = "", **attrs: Any) -> Operand:
        """Append a node of one result."""
        return self.steps(op, inputs, [wanted or f"{self.name}_{op.lower()}"], **attrs)[0]

    def steps(self, op: str, inputs: Sequence[Operand | None], wanted: Sequence[str], **attrs: Any) -> list[Operand]:
        """Append a node, with the wanted names of its results.

        Raises:
            Unreadable: The engine does not compute it.
        """
        operands = [None if x is None else self.in_graph(self.without_repetition(op, x, inputs)) for x in inputs]
        node = Node("", op, tuple(None if o is None else o.name for o in operands), tuple(wanted), attrs)
        metas = []
        for k in range(self.builder.count):
            given = [None if o is None else _kernel_operand(o, k) for o in operands]
            try:
                metas.append(self.builder.results(node, given))
            except Exception as e:  # torch raises many types
                if not raised_outside_chipfit(e) and not isinstance(
                    e, (ChipfitError, RuntimeError, NotImplementedError)
                ):
                    raise
                raise Unreadable(short_message(e)) from e
        results = [tuple(m) for m in zip(*metas, strict=True)]
        require(all(isinstance(m, torch.Tensor) and m.dim() == r[0].dim() for r in results for m in r))
        return self._append(op, operands, attrs, results, *wanted)

    def _append(
        self, op: str, operands: Sequence[Any], attrs: Any, results: Sequence[Any], *wanted: str
    ) -> list[Operand]:
        for k, meta in ((k, m) for r in results for k, m in enumerate(r)):
            check_shape(meta.shape, self.builder.rows(k), op, self.name)
        made = [Operand(tuple(r)) for r in results]
        outs = [(m.shape, _name(m.dtype)) for m in made]
        inputs = [None if o is None else o.name for o in operands]
        name = _stem(wanted) or f"{self.name}_{op.lower()}"
        values = self.builder.emit(self.origin, name, op, inputs, attrs, outs)
        for operand, value in zip(made, values, strict=True):
            operand.name = value.name
            self.builder.remember(operand)
        return made

    def opaque(self) -> list[Operand]:
        """Append the node as an opaque one, which ONNX Runtime computes in float.

        Raises:
            CaptureError: It is control flow, or ONNX Runtime cannot compute it.
        """
        present = [(k, x) for k, x in enumerate(self.inputs) if x is not None]
        operands = [self.in_graph(x, str(k)) for k, x in present]
        target = OnnxFunction.target(self.node, self.opset, len(self.outputs))
        function = OnnxFunction.of_target(target)
        metas = []
        for k in range(self.builder.count):
            given = [_runtime_operand(o, k, self.builder.graph) for o in operands]
            try:
                out = function(*given)
            except Exception as e:  # ONNX Runtime's own types
                if not raised_outside_chipfit(e) and not isinstance(e, ChipfitError):
                    raise
                what = f"Operator '{self.node.op_type}' cannot be computed: {short_message(e)}"
                raise CaptureError(what, where=self.node.name or self.name) from e
            metas.append([self._sized(y, k) for y in (out if isinstance(out, tuple) else (out,))])
        attrs = {"target": target, "args": [Ref(k) for k in range(len(operands))], "kwargs": {}}
        wanted = [self.name] if len(self.outputs) == 1 else self.outputs
        return self._append(OPAQUE, operands, attrs, [tuple(m) for m in zip(*metas, strict=True)], *wanted)

    def _sized(self, y: torch.Tensor, k: int) -> torch.Tensor:
        """Return the meta tensor of a result; a size that depends on data differs in all variants."""
        shape = [*y.shape]
        if self.node.op_type in SIZED_BY_DATA:
            axis = self.attr("axis") or 0 if len(shape) > 1 else 0  # indices and counts of Unique have one axis
            shape[1 if self.node.op_type == "NonZero" else axis] += k
        return torch.empty(shape, dtype=y.dtype, device=_META)


def _without_repetition(numbers: Sequence[np.ndarray], axes: Sequence[int]) -> np.ndarray | None:
    """Return the numbers of all variants with one element along some axes; None if they differ along these."""
    parts = [n[tuple(slice(0, 1) if k in axes else slice(None) for k in range(n.ndim))] for n in numbers]
    alike = all(_equal(p, parts[0]) and (n == p).all() for n, p in zip(numbers, parts, strict=True))
    return parts[0] if alike else None


def _stem(names: Sequence[str]) -> str:
    """Return the name of a node whose results have these names: theirs, without numbers; "" if there is none."""
    base = names[0] if len(names) == 1 else names[0].removesuffix(".0")
    return base if len(names) == 1 or list(names) == [f"{base}.{k}" for k in range(len(names))] else ""


def _kernel_operand(operand: Operand, k: int) -> Any:
    """Return what a kernel is given for an operand: a meta tensor, or a size."""
    size = operand.numbers and operand.rank == 0 and operand.dtype is torch.int64 and operand.constant is None
    return int(operand.numbers[k]) if size else operand.metas[k]


def _runtime_operand(operand: Operand, k: int, graph: Graph) -> Any:
    if operand.name in graph.weights:
        return graph.weights[operand.name]
    if operand.numbers:
        return _kernel_operand(operand, k)
    return torch.full_like(operand.metas[k], operand.dtype.is_floating_point, device="cpu")  # 0 is an index of any axis


def _plain(x: Any) -> Any:
    """Return attributes as Python has them: float32 by its shortest decimal."""
    if isinstance(x, float):
        return float(str(np.float32(x)))
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


def _scope(text: str) -> str | None:
    """Return the path of the innermost module of PyTorch's metadata."""
    try:
        scopes = ast.literal_eval(text)
        return str(scopes[-2]) if len(scopes) > 1 else ""
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
