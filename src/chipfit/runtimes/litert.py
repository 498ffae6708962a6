"""LiteRT (TensorFlow Lite) on the CPU: loads a file and returns any of its tensors in the graph's own layout."""

import contextlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from chipfit.errors import RuntimeUnavailable, first_line
from chipfit.files import wrap_read_errors
from chipfit.registry import register
from chipfit.runtimes import dequantize_output, quantize_input

_DECLARED: dict[str, Any] = {"suffix": ".tflite", "libraries": ("ai_edge_litert", "flatbuffers"), "extra": "litert"}


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Notes(TypedDict):
    """Notes of the writer on the layout of tensors in the model itself."""

    platform: str
    inputs: list[list[int] | None]
    forms: dict[str, list[int]]
    batch_axis: dict[str, int]
    in_front: NotRequired[dict[str, int]]  #: size of other axes in front of the samples in the batch axis
    outputs: list[tuple[list[int] | None, int]]  #: the layout of each, None for the model's own, and its batch axis
    provenance: dict[str, Any]


#: number of an integer type in the schema -> its range, which zero points must lie in
_RANGES = {9: (-128, 127), 3: (0, 255), 7: (-(1 << 15), (1 << 15) - 1), 17: (-8, 7)}


def _away(x: Any) -> np.ndarray:
    """Return the nearest integers, halves away from zero."""
    return np.trunc(np.float64(x) + np.copysign(0.5, x))


def _times_inverse(x: np.ndarray, s: np.float32) -> np.ndarray:
    """Return x (1 / s), halves to even."""
    return np.rint(x * (np.float32(1) / s))


def _by_eights(x: np.ndarray, s: np.float32) -> np.ndarray:
    """Return x (1 / s) in vector instructions of 8 elements; the remaining elements are divided in double precision."""
    whole = (np.arange(x.size) < x.size // 8 * 8).reshape(x.shape)
    return np.where(whole, _times_inverse(x, s), _away(np.float64(x) / np.float64(s)))


@register("runtime", "litert", **_DECLARED, kernels="litert_xnnpack")
class LiteRt:
    """A loaded file, run with LiteRT's defaults: XNNPACK runs the operators that it has, optimised kernels the others.

    Tensors are made readable by declaring them outputs, so that the delegate writes them too.
    """

    resolver = "AUTO"  #: LiteRT's name of the choice of kernels
    blocks = True  #: its kernels have weights with scales per block
    #: rounding of its kernels that quantize floats, to 8 bits and to wider integers
    steps, wide_steps = staticmethod(_times_inverse), staticmethod(_by_eights)

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the tensors named in `tensors` readable.

        Raises:
            RuntimeUnavailable: LiteRT refuses the file.
        """
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = getattr(OpResolverType, self.resolver)
        raw = _content(Path(path))
        try:
            Interpreter(model_content=raw, experimental_op_resolver_type=resolver)  # checks every offset in the file
            content, self._own, self.tensors, self.notes = _with_outputs(raw, str(path), tensors, self.blocks)
            self.interpreter = Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=resolver)
            self.interpreter.allocate_tensors()
        except (RuntimeError, ValueError) as e:
            raise RuntimeUnavailable(f"LiteRT refuses the file: {first_line(e)}", where=str(path)) from e
        self.inputs, self._asked = self.interpreter.get_input_details(), set(tensors)
        self.part: int | None = None  #: samples that the last run computed at once; None for all
        forms, axes = (self.notes.get(k, {}) for k in ("forms", "batch_axis"))
        outputs = self.notes.get("outputs", [])
        rest = [(forms.get(name), axes.get(name, 0)) for name in self.tensors[len(outputs) :]]
        #: layout of each tensor, None for the model's own, and its batch axis; an output may be a rearranged value
        self.layouts = [*outputs, *rest]
        #: layout of the inputs, whose batch axis is the first
        self.forms: Sequence[list[int] | None] = self.notes.get("inputs") or [None] * len(self.inputs)
        noted = [*((f, 0) for f in self.forms), *self.layouts]
        ranks = [len(d["shape"]) for d in (*self.inputs, *self.interpreter.get_output_details())]
        lie = [0 <= a < max(r, 1) and (f is None or sorted(f) == [*range(r)]) for (f, a), r in zip(noted, ranks)]
        if len(noted) != len(ranks) or not all(lie):
            hint = "export it again"
            raise RuntimeUnavailable("The notes in the file do not fit its tensors", where=str(path), hint=hint)

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch, in the model's order and layout; return outputs and the requested tensors by name, likewise.

        A file of fixed batch size runs once for each part of that size.
        """
        if [x.ndim for x in inputs] != [len(d["shape"]) for d in self.inputs]:
            shapes = [[list(x.shape) for x in inputs], [list(d["shape"]) for d in self.inputs]]
            hint = "is this the file that was written for this model?"
            raise RuntimeUnavailable("The inputs do not fit the file", got=shapes[0], allowed=shapes[1], hint=hint)
        given = [x.transpose(f) if f else x for x, f in zip(inputs, self.forms, strict=True)]
        cut = [len(d["shape"]) > 0 and not fits_tensor(x, d) for x, d in zip(given, self.inputs, strict=True)]
        if not any(cut):
            self.part = None
            return self._once(given)
        whole = max(len(x) for x, c in zip(given, cut) if c)
        self.part = size = next(int(d["shape"][0]) for d, c in zip(self.inputs, cut) if c)
        starts = range(0, whole, size)
        parts = [self._once([x[k : k + size] if c else x for x, c in zip(given, cut)]) for k in starts]
        axes = {n: axis for n, (_, axis) in zip(self.tensors, self.layouts, strict=True)}
        front = self.notes.get("in_front", {})
        return {n: join_parts([p[n] for p in parts], axes.get(n, 0), front.get(n, 1)) for n in parts[0]}

    def _once(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        other = [(x, d) for x, d in zip(inputs, self.inputs, strict=True) if tuple(x.shape) != tuple(d["shape"])]
        for x, d in other:
            self.interpreter.resize_tensor_input(d["index"], x.shape, strict=True)
        if other:
            self.interpreter.allocate_tensors()
            self.inputs = self.interpreter.get_input_details()
        out, codes = {}, {}
        for x, d, form in zip(inputs, self.inputs, self.forms, strict=True):
            if numbers := quantization_of(d):
                steps = self.steps if numbers[2].itemsize == 1 else self.wide_steps
                x = quantize_input(x, *numbers, steps=steps)
                if d["name"] in self._asked:
                    codes[d["name"]] = x.transpose(np.argsort(form)) if form else x
            self.interpreter.set_tensor(d["index"], np.ascontiguousarray(x))
        self.interpreter.invoke()
        details = self.interpreter.get_output_details()
        for k, (name, (form, _), d) in enumerate(zip(self.tensors, self.layouts, details, strict=True)):
            value = np.asarray(self.interpreter.get_tensor(d["index"]))  # a number if it is a scalar
            if k < self._own and (numbers := quantization_of(d)):
                value = dequantize_output(value, *numbers[:2])
            out[name] = value.transpose(np.argsort(form)) if form else value
        return out | codes

    def executed(self) -> Mapping[str, int]:
        """Return operators as the interpreter runs them, with counts: "ADD" itself, "XNNPACK ADD" by its delegate.

        The interpreter also lists delegated operators, which lie between a delegate's operands and its results.
        """
        listed = self.interpreter._get_ops_details()
        own = [op for op in listed if op["op_name"] != "DELEGATE"]
        makers = {int(t): k for k, op in enumerate(own) for t in op["outputs"]}
        taken: set[int] = set()
        for part in listed:
            if part["op_name"] == "DELEGATE":
                seen = {int(t) for t in part["inputs"]}
                todo = [int(t) for t in part["outputs"]]
                while todo:
                    t = todo.pop()
                    if t not in seen and t in makers:
                        taken.add(makers[t])
                        todo += [int(i) for i in own[makers[t]]["inputs"]]
                    seen.add(t)
        kinds = Counter(("XNNPACK " if k in taken else "") + op["op_name"] for k, op in enumerate(own))
        return dict(sorted(kinds.items()))


@register("runtime", "litert_reference", **_DECLARED, kernels="litert_reference")
class LiteRtReference(LiteRt):
    """A loaded file, run with reference kernels."""

    resolver, blocks = "BUILTIN_REF", False
    steps = wide_steps = staticmethod(lambda x, s: _away(x / s))


@register("runtime", "litert_optimized", **_DECLARED, kernels="litert_optimized")
class LiteRtOptimized(LiteRt):
    """A loaded file, run with optimised kernels, without delegates."""

    resolver, steps = "BUILTIN_WITHOUT_DEFAULT_DELEGATES", staticmethod(_by_eights)


def fits_tensor(x: np.ndarray, detail: Mapping[str, Any]) -> bool:
    """Return whether an input fits a tensor of the file: every size is open or equal."""
    signature = detail["shape_signature"] if len(detail["shape_signature"]) else detail["shape"]
    return len(signature) == x.ndim and all(s in (-1, n) for s, n in zip(signature, x.shape))


def _content(path: Path) -> bytes:
    """Return the bytes of a file that is marked as a TensorFlow Lite model and holds a network."""
    from ai_edge_litert import schema_py_generated as schema

    with wrap_read_errors(path, RuntimeUnavailable):
        raw = path.read_bytes()
    if raw[4:8] != b"TFL3":
        message = "The file is not a TensorFlow Lite model: the identifier TFL3 is missing"
        raise RuntimeUnavailable(message, where=str(path), got=repr(raw[4:8]))
    # of wrong offsets LiteRT has messages of its own
    with contextlib.suppress(struct.error, TypeError, IndexError):
        if schema.Model.GetRootAs(raw, 0).SubgraphsIsNone():  # LiteRT would end the process
            raise RuntimeUnavailable("The file holds no network", where=str(path))
    return raw


def quantization_of(detail: Mapping[str, Any]) -> tuple[float, int, np.dtype] | None:
    """Return scale, zero point and type of a quantized tensor; None for any other."""
    scales, zeros = (detail["quantization_parameters"][k] for k in ("scales", "zero_points"))
    if not len(scales) or np.dtype(detail["dtype"]).kind not in "iu":
        return None
    return float(scales[0]), int(zeros[0]), np.dtype(detail["dtype"])


def _numbers(tensor: Any, key: str) -> Any:
    return tensor.quantization and getattr(tensor.quantization, key)


def _each(vector: Any) -> Any:
    """Return a list of the file; one that is left out is empty."""
    return () if vector is None else vector


def join_parts(parts: Sequence[np.ndarray], axis: int, front: int) -> np.ndarray:
    """Join parts of a batch along its axis, which holds `front` times the samples: [front, samples] in one axis."""
    if front == 1:
        return np.concatenate(parts, axis)
    if front < 1 or any(p.ndim == 0 or p.shape[axis] % front for p in parts):
        raise RuntimeUnavailable("The notes in the file do not fit its tensors", hint="export it again")
    shape = parts[0].shape
    split = [p.reshape(*shape[:axis], front, -1, *shape[axis + 1 :]) for p in parts]
    return np.concatenate(split, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])


def _with_outputs(
    raw: bytes, path: str, tensors: Sequence[str], blocks: bool
) -> tuple[bytes, int, list[str], dict[str, Any]]:
    """Return the file with `tensors` declared outputs, its own number of outputs, the names of all, and the notes."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(raw, 0))
    graph = model.subgraphs[0]
    own = [int(o) for o in _each(graph.outputs)]
    ends = all(0 <= k < len(_each(graph.tensors)) for k in (*_each(graph.inputs), *own))
    if not own or not ends or not all(0 <= m.buffer < len(_each(model.buffers)) for m in _each(model.metadata)):
        raise RuntimeUnavailable("An input, an output or a note of the network is not in the file", where=path)
    if any(t.name is None for t in graph.tensors):
        raise RuntimeUnavailable("A tensor of the network has no name", where=path)
    for t in graph.tensors:
        low, high = _RANGES.get(t.type, (-math.inf, math.inf))
        zeros, scales = (np.asarray(_each(_numbers(t, k))) for k in ("zeroPoint", "scale"))
        if not (np.all(low <= zeros) and np.all(zeros <= high) and np.all(scales > 0) and np.all(scales < math.inf)):
            what = f"The scale or zero point of tensor '{t.name.decode(errors='replace')}' is out of range"
            raise RuntimeUnavailable(what, where=path)
        if (of_blocks := getattr(_numbers(t, "details"), "scales", None)) is not None:
            if not blocks:  # they would compute as if all scales were 1
                what = "The reference kernels of LiteRT do not support weights with scales for blocks"
                raise RuntimeUnavailable(what, where=path, got=f"tensor '{t.name.decode(errors='replace')}'")
            if not 0 <= of_blocks < len(graph.tensors):
                raise RuntimeUnavailable("The scales of blocks are not in the file", where=path)
    made = {int(o) for op in _each(graph.operators) for o in _each(op.outputs)}
    names = {t.name.decode(): k for k, t in enumerate(graph.tensors)}
    notes: Any = {}
    for m in _each(model.metadata):
        if m.name == b"chipfit":
            try:
                notes = TypeAdapter(_Notes).validate_json(bytes(_each(model.buffers[m.buffer].data)))
            except ValidationError as e:
                got = e.errors(include_url=False)[0]["msg"]
                raise RuntimeUnavailable("The notes in the file are malformed", where=path, got=got) from e
    if len(notes.get("outputs", own)) != len(own):
        raise RuntimeUnavailable("The notes in the file do not fit its outputs", where=path, hint="export it again")
    coded = {k for k in own if graph.tensors[k].type in _RANGES and len(_each(_numbers(graph.tensors[k], "scale")))}
    extra = [names[t] for t in tensors if t in names and names[t] in made and names[t] not in {*own} - coded]
    graph.outputs = np.array([*own, *extra], np.int32)
    shown: list[str] = []
    for n, k in enumerate((*own, *extra)):  # one tensor may be several outputs
        name = graph.tensors[k].name.decode() + ("/float" if n < len(own) and k in coded else "")
        shown.append(f"{name}:{len(shown)}" if name in shown else name)
    builder = flatbuffers.Builder(len(raw))
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output()), len(own), shown, notes
