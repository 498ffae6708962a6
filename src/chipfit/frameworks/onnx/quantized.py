"""Read a quantized ONNX file into a Graph and the Plan that its scales and zero points amount to.

ONNX Runtime decides when it loads a file what it computes in integers: it replaces float operators between quantizers
by integer ones. So the file is read as ONNX Runtime has optimised it, and runs in that form, where every tensor of
integers can be returned without a change of what is computed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

import chipfit.frameworks.onnx.fused_integers  # noqa: F401 -- registers readers
from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError, first_line
from chipfit.frameworks.onnx.call import OnnxCall
from chipfit.frameworks.onnx.integers import (
    ENDS,
    OPTIMISED,
    PARTS,
    Expansion,
    IntegerConstant,
    NormalForm,
    QParams,
    is_foreign,
    part_of,
)
from chipfit.frameworks.onnx.model import OnnxModel
from chipfit.frameworks.onnx.training_tools import with_standard_quantizers
from chipfit.frameworks.onnx.translate import Translator
from chipfit.frameworks.quantized import QuantizedFile, original_of, stored_as, tie_moved
from chipfit.graph.builder import Origin
from chipfit.graph.check import check
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.operators.table import OPS
from chipfit.plan.record import NodePlan, Plan, Role, TensorPlan

#: attributes of what DynamicQuantizeLinear does
_DYNAMIC = {"qmin": 0, "qmax": 255, "affine": True, "per": "tensor", "block": 1}
#: sizes tried for those that a file leaves open, in two runs
_SIZES = (((2, 3), (64, 96)), ((2, 3), (32, 48)), ((2, 3), (7, 11)), ((2, 3), (16, 16)), ((64, 96), (64, 96)))


def activation_types(model: OnnxModel) -> set[str]:
    """Return nothing: ONNX Runtime's arithmetic is one for all types of integers."""
    return set()


def read_quantized(model: OnnxModel, platform: str, example: Any = None) -> QuantizedFile:
    """Read a quantized file with the integers that it holds.

    Args:
        platform: name of the platform whose arithmetic the file is for.
        example: a batch of data, whose sizes are taken where the network cannot be read with others.

    Raises:
        CaptureError: Nothing in the file is quantized, its scales are malformed, ONNX Runtime refuses it, or an
            operator has no reader.
    """
    source = with_standard_quantizers(model.proto(), model.where, runs=True)
    given = Expansion(source, model.where).run()
    if foreign := sorted({n.op_type for n in source.graph.node if is_foreign(n.op_type, n.domain)}):
        what = "The file has quantizers of a training tool, which ONNX Runtime does not run"
        hint = (
            "export with QuantizeLinear and DequantizeLinear; or quantize it again, with --requantize (requantize=True)"
        )
        raise CaptureError(what, where=model.where, got=", ".join(foreign), hint=hint)
    if given.small_floats:
        what, hint = "The file has floats of 8 bits or less, which are not simulated", "quantize it again: --requantize"
        raise CaptureError(what, where=model.where, got=", ".join(sorted(given.small_floats)), hint=hint)
    if not (given.made or given.constants or given.given):
        hint = "chipfit.quantize(file, data) quantizes a float file"
        raise CaptureError("The file is not quantized", where=model.where, hint=hint)
    optimised = _with_own_constants(optimised_by_runtime(source, model.where), given.constants)
    names = {n.name: n.output[0] for n in source.graph.node if n.name and n.output}
    form = Expansion(optimised, model.where, names).run()
    optimised.graph.node.extend(form.returned)
    known = {c.name for c in form.constants.values()}
    #: weights that the runtime dequantized when it loaded the file
    unfolded = {k: c for k, c in given.constants.items() if k not in form.constants and c.name not in known}
    for t in optimised.graph.initializer:
        first, _, node = t.name.rpartition("/node_")
        if node and first in unfolded:
            unfolded[t.name] = unfolded[first]
    reading = _read(form, unfolded, model, example)
    graph, plan = reading.finish(platform)
    computed = {o for n in optimised.graph.node for o in n.output}
    ends = _ends(form)
    onnx.helper.set_model_props(source, {"chipfit.io": ends})
    parts, names = reading.parts, reading.tensor_names(computed)
    names |= {tensor: f"{tensor}/whole" for tensor, *_ in parts.values()}
    held = {part: [names[tensor], *ends_of_it] for part, (tensor, *ends_of_it) in parts.items()}
    content = _named(optimised, names, {OPTIMISED: "1", "chipfit.io": ends, PARTS: json.dumps(held)})
    halves = {t.name for t in source.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16}
    in_half = any(n.op_type == "QuantizeLinear" and n.input[1] in halves for n in source.graph.node)
    why = "Between its quantizers the file computes in float16, which is not simulated" if in_half else ""
    return QuantizedFile(graph, plan, content, source.SerializeToString(), not_simulated=why)


def optimised_by_runtime(source: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return a model as ONNX Runtime runs it, before the layout of images is changed.

    Raises:
        CaptureError: ONNX Runtime is missing, or refuses the model.
    """
    try:
        import onnxruntime as ort
    except ImportError as e:
        raise CaptureError("Quantized ONNX files are read by ONNX Runtime", hint="pip install 'chipfit[onnx]'") from e
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(file)
        try:
            ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as e:  # its exceptions derive from nothing else
            raise CaptureError(f"ONNX Runtime refuses the model: {first_line(e)}", where=where) from e
        return onnx.load(str(file))


def _with_own_constants(model: onnx.ModelProto, others: Collection[str]) -> onnx.ModelProto:
    """Give each node copies of the integer constants that it shares: tools store equal biases of different scales once.

    Args:
        others: names of further constants to copy.
    """
    kinds = {n for k, n in onnx.TensorProto.DataType.items() if k.lower() in ENDS}  # not all in every version
    known = {t.name: t for t in model.graph.initializer if t.dims and (t.data_type in kinds or t.name in others)}
    read = set[str]()
    for k, n in enumerate(model.graph.node):
        for j, i in enumerate(n.input):
            if i in read:
                model.graph.initializer.add().CopyFrom(known[i])
                n.input[j] = model.graph.initializer[-1].name = f"{i}/node_{k}"
            elif i in known:
                read.add(i)
    return model


def _read(
    form: NormalForm, unfolded: dict[str, IntegerConstant], model: OnnxModel, example: Any
) -> _QuantizedTranslator:
    """Translate the normal form, with sizes of our own where the file leaves them open.

    Raises:
        CaptureError: A node cannot be read.
    """
    read = OnnxModel.of_proto(form.model, model.where)
    first: CaptureError | None = None
    for variants in _variants(read, None if example is None else batch_shapes(read, example)):
        reading = _QuantizedTranslator(read, len(variants), form, unfolded)
        try:
            reading.translate(variants)
        except CaptureError as e:
            first = first or e
            continue
        return reading
    assert first is not None
    raise CaptureError(first.what, where=first.where or model.where, got=first.got, hint=first.hint) from first


def _variants(model: OnnxModel, given: list[tuple[int, ...]] | None) -> Iterator[list[list[tuple[int, ...]]]]:
    """Yield shapes of the inputs, in two variants where sizes are open: of our own, then those of the data."""
    declared = all(v.shape is not None for v in model.inputs)
    if not declared and given is None:
        raise CaptureError("The file does not declare the shapes of its inputs", where=model.where, hint="give data")
    for batch, others in _SIZES if declared else ():
        ours = [_shapes(model, b, o) for b, o in zip(batch, others, strict=True)]
        if given is None or len({*others}) > 1:
            yield _without_repetition(ours if given is None else [given, ours[1]])
    if given is not None:
        first = given[0][:1]
        more = [(s[0] + 1, *s[1:]) if s and s[:1] == first else s for s in given]
        if not any(v.shape and isinstance(v.shape[0], int) for v in model.inputs):
            yield _without_repetition([given, more])
        yield [given]


def _without_repetition(variants: list[list[tuple[int, ...]]]) -> list[list[tuple[int, ...]]]:
    """Return two variants of shapes, or the first one if both are equal."""
    return variants[:1] if variants[0] == variants[1] else variants


def batch_shapes(model: OnnxModel, batch: Any) -> list[tuple[int, ...]] | None:
    """Return the shapes of the inputs in a batch of data, with the file's own batch; None if they do not fit."""
    names = model.names()
    rows: Any = batch if isinstance(batch, (tuple, list)) else (batch,)
    if rows and isinstance(rows[0], Mapping):
        rows = rows[0]
    found = [rows.get(n) for n in names] if isinstance(rows, Mapping) else list(rows)[: len(names)]
    shapes = [tuple(getattr(x, "shape", ())) for x in found]
    own = [v.shape[:1] if v.shape else () for v in model.inputs]
    fixed = [tuple(d for d in o if isinstance(d, int) and d > 0 and s) for o, s in zip(own, shapes, strict=False)]
    shapes = [(*f, *s[len(f) :]) for f, s in zip(fixed, shapes, strict=False)]
    return shapes if len(shapes) == len(names) and all(hasattr(x, "shape") for x in found) else None


def _shapes(model: OnnxModel, batch: int, other: int) -> list[tuple[int, ...]]:
    """Return shapes of the inputs; sizes of one name are equal."""
    named: dict[str, int] = {}

    def size(dim: Any, axis: int) -> int:
        if isinstance(dim, int) and dim > 0:
            return dim
        name = str(getattr(dim, "value", None) or "")
        chosen = batch if axis == 0 else other
        return named.setdefault(name, chosen) if name else chosen

    return [tuple(size(d, k) for k, d in enumerate(v.shape or ())) for v in model.inputs]


class _QuantizedTranslator(Translator):
    """The translation of a quantized file: its graph so far, and how each of its tensors is stored."""

    def __init__(self, model: OnnxModel, count: int, form: NormalForm, unfolded: dict[str, IntegerConstant]) -> None:
        super().__init__(model, count)
        self.form = form
        self.stored: dict[str, TensorPlan] = {}
        self.runs: dict[str, str] = {}  #: node -> how it runs
        self.tensors: dict[str, str] = {}  #: value or weight -> the tensor of its integers in the file
        self.quantizers: set[str] = set()  #: nodes that stand for a QuantizeLinear
        self.codes: dict[str, IntegerConstant] = {}  #: name of the source of a weight -> its integers
        self.parts: dict[str, tuple[str, int, int]] = {}  #: weight -> the tensor of which it is a part, and its ends
        self.decomposed: list[list[Node]] = []  #: nodes of each integer operator that became several
        self.unfolded = {*unfolded}
        sources: dict[int, str] = {}
        for name, c in {**form.constants, **unfolded}.items():
            source = name if name in unfolded else sources.setdefault(id(c), name)
            self.codes.setdefault(source, c)
            numbers = [c.dequantize().astype(np.float32)]
            self.builder.env[name] = self.builder.constants(numbers, source, trainable=True)

    def initialiser(self, name: str, tensor: ir.TensorProtocol | None) -> Any:
        return self.builder.env[name] if name in self.builder.env else super().initialiser(name, tensor)

    def translate(self, variants: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Read all nodes.

        Raises:
            CaptureError: One cannot be read.
        """
        builder = self.builder
        self.inputs(variants, [_dtype(v) for v in self.model.inputs])
        for name, numbers in self.form.given.items():
            self._store(builder.env[name].name, numbers, name)
        self.nodes(self.model.graph)
        builder.graph.outputs = [self.output(v.name or "") for v in self.model.graph.outputs]

    def node(self, node: ir.Node) -> Sequence[Any]:
        """Return the results of a node; quantizers become copies, which `finish` drops where nothing else is read."""
        if node.op_type == "DequantizeLinear":
            return [self.builder.env[node.inputs[0].name]]  # type: ignore[union-attr, index]  # it has one
        if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
            return [self._quantizer(node)]
        before = len(self.builder.graph.nodes)
        found = super().node(node)
        new = self.builder.graph.nodes[before:]
        how = self.form.runs.get(node.outputs[0].name or "", "float")
        self.runs |= dict.fromkeys((n.name for n in new), how)
        if how != "float" and len(new) > 1:
            self.decomposed.append(new)
        return found

    def _quantizer(self, node: ir.Node) -> Any:
        """Append a quantizer: a copy with a grid, or a DynamicQuantize."""
        x, out = self.builder.env[node.inputs[0].name], node.outputs[0].name or ""  # type: ignore[union-attr, index]
        x = OnnxCall(self.builder, node, 1).in_graph(x)
        dynamic = node.op_type.startswith("Dynamic")
        op, attrs = (DYNAMIC, dict(self.form.rounded.get(out, _DYNAMIC))) if dynamic else ("Identity", {})
        wanted = f"{x.name}_dynamic" if dynamic else f"{x.name}_quantized"
        (made,) = self.builder.emit(Origin(), wanted, op, [x.name], attrs, [(x.shape, "float32")])
        if dynamic:
            self.runs[made.name] = "int"
        else:
            self.quantizers.add(made.name)
            self._store(made.name, self.form.made[out], out)
        return type(x)(x.metas, made.name)

    def _store(self, value: str, numbers: QParams, tensor: str) -> None:
        """Store a value as a tensor of the file is stored."""
        stored = stored_as(numbers.kind, numbers.scale, numbers.zero, numbers.axis, numbers.ends)
        self.stored[value] = TensorPlan(name=value, role="activation", stored=stored, origin="the file")
        self.tensors[value] = tensor

    # ---- the finished graph

    def finish(self, platform: str) -> tuple[Graph, Plan]:
        """Return the graph and the plan, once all nodes are read."""
        graph = self.builder.graph
        self._merge_quantizers()
        names, count = self.model.names(), len(graph.outputs)
        graph.in_spec = dump_call(tuple(0 for _ in names), {}, names)
        given = [v.name or str(k) for k, v in enumerate(self.model.graph.outputs)]
        several: Any = 0 if count == 1 else dict.fromkeys(given, 0)
        graph.out_spec = dump_result(several, [{"output": k} for k in range(count)])
        drop_dead(graph)
        read = {i for n in graph.nodes for i in n.inputs} | {*graph.outputs}
        graph.weights = {k: w for k, w in graph.weights.items() if k in read}
        graph.trainable &= {*graph.weights}
        self._store_weights()
        for new in self.decomposed:
            tie_moved(graph, [n for n in new if n in graph.nodes], self.stored)
        check(graph, blame="capture")
        nodes = {n.name: self._node_plan(n) for n in graph.nodes}
        live = {k: t for k, t in self.stored.items() if k in graph.values or k in graph.weights}
        return graph, Plan(tensors=live, nodes=nodes, platform=platform)

    def _merge_quantizers(self) -> None:
        """Quantize the results of operators themselves where nothing else reads them before."""
        graph = self.builder.graph
        users, makers, renamed = graph.users(), graph.producers(), dict[str, str]()
        for n in [n for n in graph.nodes if n.name in self.quantizers]:
            x = renamed.get(n.data, n.data)
            alone = len(users[n.data]) == 1 and n.data not in graph.outputs and x not in self.stored
            if alone and x in graph.values and (x in graph.inputs or x in makers):
                renamed[n.output] = x
                self.stored[x] = self.stored.pop(n.output).with_(name=x)
                self.tensors[x] = self.tensors.pop(n.output)
        graph.nodes = [n.reading(renamed) for n in graph.nodes if n.output not in renamed]
        graph.outputs = [renamed.get(o, o) for o in graph.outputs]
        graph.values = {k: v for k, v in graph.values.items() if k not in renamed}

    def _store_weights(self) -> None:
        """Store the weights as the file has them, with the axis of channels that the graph has."""
        graph = self.builder.graph
        biases = {i for n in graph.nodes if n.op in OPS for s, i in graph.slots(n) if s.startswith("b")}
        for (source, _), name in self.builder.weight_names.items():
            if source not in self.codes or name not in graph.weights:
                continue
            whole, change = self.codes[source], self.builder.changes.get(name)
            alike = change is None or graph.weights[name].dim() == whole.integers.ndim
            codes = whole if change is None or alike else part_of(whole, change)
            role: Role = "bias" if name in biases else "weight"
            found = None if codes is None else _weight_in_file_order(codes, graph.weights[name])
            if found is None:
                self.stored[name] = TensorPlan(name=name, role=role, why=f"{whole.numbers.kind} in another order")
                continue
            graph.weights[name], stored = found
            self.stored[name] = TensorPlan(name=name, role=role, stored=stored, origin="the file")
            tensor = source if source in self.unfolded else whole.name
            if change is not None and graph.weights[name].numel() < whole.integers.size:
                places = change(torch.arange(whole.integers.size).reshape(whole.integers.shape))
                self.parts[name] = tensor, int(places.min()), int(places.max()) + 1
            else:
                self.tensors[name] = tensor

    def _node_plan(self, n: Node) -> NodePlan:
        """Return the plan of an operator: integers or float, as in the file that the runtime has optimised."""
        how: Any = self.runs.get(n.name, "float")
        data = [i for i in n.inputs if i is not None and self.builder.graph.is_float(i)]
        held = [i for i in data if i in self.stored and self.stored[i].quantized]
        if how == "int" and n.op != DYNAMIC and not held:
            how = "float"
        why = "" if how != "float" else "the runtime computes it in float" if held else "the file has floats here"
        return NodePlan(name=n.name, op=n.op, layer=n.layer, exec=how, why=why)

    def tensor_names(self, computed: Collection[str]) -> dict[str, str]:
        """Return tensor of the file -> its new name: that of the value or weight that it holds, with an ending."""
        graph = self.builder.graph
        live = {**graph.values, **graph.weights}
        names = {t: f"{v}/float" if t in self.unfolded else f"{v}_q" for v, t in self.tensors.items() if v in live}
        inner, makers = {n.data for n in graph.nodes if n.op == DYNAMIC}, graph.producers()
        for value in [*inner]:  # and those that hold the same numbers in another order
            while value in makers and makers[value].op in ("Transpose", "Reshape"):
                inner.add(value := makers[value].data)
        inner -= {*graph.inputs}
        for tensor, x in self.builder.env.items():
            own = tensor in computed and tensor not in self.form.made
            if x.name in inner and own and tensor not in names and x.name not in names.values():
                names[tensor] = x.name
        return names


def _dtype(value: ir.Value) -> torch.dtype:
    kind = value.dtype
    return torch.float32 if kind is None or kind.is_floating_point() else getattr(torch, kind.name.lower())


def _weight_in_file_order(codes: IntegerConstant, weight: torch.Tensor) -> Any:
    """Return a weight and how it is stored, in the order of axes in which its integers make these floats, or None."""
    n, scale, zero = codes.numbers, codes.numbers.scale, codes.numbers.zero
    wide = n.kind == "int32"
    weight = torch.from_numpy(codes.dequantize()).reshape(weight.shape) if wide and codes.integers.ndim < 2 else weight
    if scale.ndim < 2:
        axes = [k for k in range(weight.dim()) if scale.ndim and weight.shape[k] == scale.size] if scale.ndim else [0]
        forms = [(scale, zero, k) for k in sorted(axes, key=lambda k: k != n.axis)]
    else:
        forms = [(scale, zero, n.axis), (scale.T, zero.T, codes.integers.ndim - 1 - n.axis)]
    for s, z, axis in forms:
        if s.ndim > 1 and not _in_blocks_of(s.shape, tuple(weight.shape), axis):
            continue
        stored = stored_as(n.kind, s, z, axis, n.ends)
        if torch.equal(stored.dequantize(stored.quantize(weight)), weight.to(torch.float32)) or wide:
            return weight, stored
    return None


def _in_blocks_of(scales: tuple[int, ...], weight: tuple[int, ...], axis: int) -> bool:
    """Return whether scales are those of whole blocks of a weight along an axis."""
    same = len(scales) == len(weight) and all(a == b for k, (a, b) in enumerate(zip(scales, weight)) if k != axis)
    return same and weight[axis] % scales[axis] == 0


def _named(model: onnx.ModelProto, names: dict[str, str], notes: dict[str, str]) -> bytes:
    """Return the optimised file with other names of tensors, and with notes."""
    graph, ends = model.graph, {v.name for v in (*model.graph.input, *model.graph.output)}
    taken = {*names.values()}
    known = {o for n in graph.node for o in (*n.output, *n.input)} | {t.name for t in graph.initializer}
    held = {n.removesuffix("_q").removesuffix("/float") for n in taken}
    alike = (t for t in known if t in taken or original_of(t.removesuffix("_q")) in held)  # but no copies
    names |= {t: f"{t}/file" for t in alike if t not in names and t not in ends}
    inner = {k: v for k, v in names.items() if k not in ends}
    for n in graph.node:
        for field in (n.input, n.output):
            field[:] = [inner.get(i, i) for i in field]
    for t in graph.initializer:
        t.name = inner.get(t.name, t.name)
    del graph.value_info[:]
    for tensor in (t for t in names if t in ends):  # integers that the file is given, or returns
        graph.node.append(onnx.helper.make_node("Identity", [tensor], [names[tensor]]))
    onnx.helper.set_model_props(model, notes)
    return bytes(model.SerializeToString())


def _ends(form: NormalForm) -> str:
    """Return the note of inputs and outputs of integers, see `chipfit.runtimes.onnxruntime`."""
    sides = ("inputs", form.given), ("outputs", form.taken)
    return json.dumps({side: {k: _note(n) for k, n in found.items()} for side, found in sides})


def _note(numbers: QParams) -> dict[str, Any]:
    return {"type": numbers.kind, "scale": float(numbers.scale), "zero_point": int(numbers.zero), "own": True}
