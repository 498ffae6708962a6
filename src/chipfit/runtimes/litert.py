"""LiteRT (TensorFlow Lite) on the CPU: runs a file, returns any of its tensors, laid out as in the exported model."""

import contextlib
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from chipfit.errors import RuntimeUnavailable, first_line
from chipfit.files import wrap_read_errors
from chipfit.registry import register
from chipfit.runtimes import (
    SAMPLES,
    check_inputs,
    dequantize_output,
    join_parts,
    quantize_input,
    read_notes,
    unfit_notes,
)

_DECLARED: dict[str, Any] = {"suffix": ".tflite", "libraries": ("ai_edge_litert", "flatbuffers"), "extra": "litert"}


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Notes(TypedDict):
    """The chipfit notes in a file: how its tensors are laid out compared with those of the exported model.

    The form of a tensor is a permutation, the model's axes in the file's order; None if the order is the same.
    """

    platform: str
    inputs: NotRequired[list[list[int] | None]]  #: form of each
    forms: NotRequired[dict[str, list[int]]]  #: tensor -> form
    batch_axis: NotRequired[dict[str, int]]  #: tensor -> batch axis in the model's order, where it is not the first
    in_front: NotRequired[dict[str, int]]  #: tensor -> L, where [L, samples] are merged into the batch axis
    lines: NotRequired[list[str]]  #: tensors of the file that are images of height 1, and lines in the model
    #: tensor whose last axis is a flattened image, channels last -> sizes of the image's axes with channels first
    images: NotRequired[dict[str, list[int]]]
    int64: NotRequired[list[str]]  #: tensors of the file with 32 bits that have 64 in the model
    stream: NotRequired[bool]  #: samples are steps of one sequence: states stay from one to the next
    joined: NotRequired[dict[str, list[str]]]  #: tensor of the model -> tensors of the file in it
    kept: NotRequired[dict[str, str]]  #: state of the model that is an input -> its next value, in the same tensor
    outputs: list[tuple[list[int] | None, int]]  #: form and batch axis of each
    provenance: dict[str, Any]


#: number of an integer type in the schema (int8, uint8, int16, int32, int4) -> its range, in which zero points must lie
_RANGES = {9: (-128, 127), 3: (0, 255), 7: (-(1 << 15), (1 << 15) - 1), 2: (-(1 << 31), (1 << 31) - 1), 17: (-8, 7)}


def _unrolled(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Return flattened images, channels last along the last axis, with channels first; `sizes` are [C, ...]."""
    image = x.reshape(*x.shape[:-1], -1, sizes[0])
    return image.swapaxes(-1, -2).reshape(x.shape)


def _away(x: Any) -> np.ndarray:
    """Return the nearest integers, halves away from zero."""
    return np.trunc(np.float64(x) + np.copysign(0.5, x))


def _times_inverse(x: np.ndarray, s: np.float32) -> np.ndarray:
    """Return x * (1 / s) rounded to integers, halves to even."""
    return np.rint(x * (np.float32(1) / s))


def _by_eights(x: np.ndarray, s: np.float32) -> np.ndarray:
    """Return x / s rounded as kernels do that work on vectors of 8 elements.

    Elements that do not fill a vector are divided in double precision, and halves are rounded away from zero.
    """
    in_vectors = (np.arange(x.size) < x.size // 8 * 8).reshape(x.shape)
    return np.where(in_vectors, _times_inverse(x, s), _away(np.float64(x) / np.float64(s)))


@register("runtime", "litert", **_DECLARED, kernels="litert_xnnpack")
class LiteRt:
    """A loaded file, run with LiteRT's defaults: XNNPACK for operators it supports, optimised kernels for the rest.

    Tensors inside the network are made readable by declaring them outputs, so that the delegate stores them too.
    """

    resolver = "AUTO"  #: LiteRT's name of the choice of kernels
    hint = ""  #: what to do about a file that it refuses
    block_scales = True  #: its kernels support weights with one scale per block
    narrow_states = False  #: its kernels support SVDF with a state of 8 bits
    #: (x, scale) -> x / scale as rounded by its kernels that quantize floats, to 8 bits and to wider integers
    steps, wide_steps = staticmethod(_times_inverse), staticmethod(_by_eights)

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the tensors named in `tensors` readable.

        Raises:
            RuntimeUnavailable: LiteRT refuses the file.
        """
        raw, self._path = _content(Path(path)), str(path)
        with _typed("refuses the file", self._path, self.hint):
            self.make_interpreter(raw)  # checks every offset in the file
            prepared = _with_outputs(raw, self._path, tensors, self.block_scales)
            content, self._own_outputs, self.tensors, self.notes = prepared
            self.has_states = _states(raw, self._path, self.narrow_states)
            self.interpreter = self.make_interpreter(content)
            self.interpreter.allocate_tensors()
        self.inputs, self._requested = self.interpreter.get_input_details(), set(tensors)
        self.part: int | None = None  #: number of samples that the last run computed at a time; None: all at once
        forms, axes = (self.notes.get(k, {}) for k in ("forms", "batch_axis"))
        outputs = self.notes.get("outputs", [])
        rest = [(forms.get(name), axes.get(name, 0)) for name in self.tensors[len(outputs) :]]
        #: form and batch axis of each tensor; outputs have their own, since the file may rearrange them
        self.layouts = [*outputs, *rest]
        #: form and batch axis of each input
        self.forms: Sequence[list[int] | None] = self.notes.get("inputs", [None] * len(self.inputs))
        self.axes: Sequence[int] = [axes.get(d["name"], 0) for d in self.inputs]
        noted = [*zip(self.forms, self.axes, strict=False), *self.layouts]
        self.lines, self.long = ({*self.notes.get(k, ())} for k in ("lines", "int64"))
        ends = [*self.inputs, *self.interpreter.get_output_details()]
        ranks = [len(d["shape"]) - (d["name"] in self.lines) for d in ends]
        known = [(f, a, r) for (f, a), r in zip(noted, ranks) if r or not f]  # sizes found at run time have no rank yet
        valid = [0 <= a < max(r, 1) and (f is None or sorted(f) == [*range(r)]) for f, a, r in known]
        self.images = self.notes.get("images", {})
        shapes = {d["name"]: d["shape"] for d in ends}
        sized = [(s, [*shapes[n]][-1:]) for n, s in self.images.items() if n in shapes]
        fitting = [s and min(s) > 0 and [math.prod(s)] == last for s, last in sized]
        if len(noted) != len(ranks) or len(self.forms) != len(self.axes) or not all((*valid, *fitting)):
            raise unfit_notes(str(path))

    def make_interpreter(self, content: bytes) -> Any:
        """Return an interpreter of a file, without memory for its tensors yet."""
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = getattr(OpResolverType, self.resolver)
        return Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=resolver)

    @staticmethod
    def open(path: Path) -> None:
        """Open a file and prepare all its operators, without a delegate.

        Raises:
            RuntimeUnavailable: LiteRT refuses the file.
        """
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        with _typed("refuses the file", str(path)):
            Interpreter(model_path=str(path), experimental_op_resolver_type=plain).allocate_tensors()

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch; return by name the outputs, dequantized, and the requested tensors as the file holds them.

        Inputs and results have the model's order and layout. A file of fixed batch size runs on parts of that size.

        Raises:
            RuntimeUnavailable: The inputs do not fit the file, or an operator refuses its operands.
        """
        self._check(inputs)
        given = [x.transpose(f) if f else x for x, f in zip(inputs, self.forms, strict=True)]
        split = [len(d["shape"]) > 0 and not fits_tensor(x, d) for x, d in zip(given, self.inputs, strict=True)]
        if not any(split):
            self.part = None
            self._reset()
            return self._once(given)
        places = [f.index(a) if f else a for f, a in zip(self.forms, self.axes, strict=True)]
        samples = max(x.shape[a] for x, a, s in zip(given, places, split) if s)
        self.part = size = next(int(d["shape"][a]) for d, a, s in zip(self.inputs, places, split) if s)
        starts = range(0, samples, size)
        parts = []
        for k in starts:
            if k == 0 or not self.notes.get("stream"):
                self._reset()
            cut = [(*[slice(None)] * a, slice(k, k + size)) if s else ... for a, s in zip(places, split)]
            parts.append(self._once([x[c] for x, c in zip(given, cut)]))
        axes = {n: axis for n, (_, axis) in zip(self.tensors, self.layouts, strict=True)}
        front = self.notes.get("in_front", {})
        return {n: join_parts([p[n] for p in parts], axes.get(n, 0), front.get(n, 1)) for n in parts[0]}

    def _check(self, inputs: Sequence[np.ndarray]) -> None:
        """Check the inputs; where the batch size is fixed and differs, all that differ have one number of samples."""
        wanted: dict[str, list[int | str | None]] = {}
        for k, (d, form, at) in enumerate(zip(self.inputs, self.forms, self.axes, strict=True)):
            sizes: list[int | str | None] = [None if s < 0 else int(s) for s in _signature(d)]
            sizes = [sizes[axis] for axis in np.argsort(form)] if form else sizes
            if sizes and sizes[at] is not None and k < len(inputs) and inputs[k].shape[at : at + 1] != (sizes[at],):
                sizes[at] = SAMPLES
            wanted[d["name"].removesuffix("/float")] = sizes
        check_inputs(inputs, wanted)

    def _reset(self) -> None:
        """Bring states back to those of the file."""
        if self.has_states:
            self.interpreter.reset_all_variables()

    def _once(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        with _typed("cannot run the file on these inputs", self._path):
            return self._called(inputs)

    def _called(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        resized = [(x, d) for x, d in zip(inputs, self.inputs, strict=True) if tuple(x.shape) != tuple(d["shape"])]
        for x, d in resized:
            self.interpreter.resize_tensor_input(d["index"], x.shape, strict=True)
        if resized:
            self.interpreter.allocate_tensors()
            self.inputs = self.interpreter.get_input_details()
        out, codes = {}, {}
        for x, d, form in zip(inputs, self.inputs, self.forms, strict=True):
            if qparams := quantization_of(d):
                steps = self.steps if qparams[2].itemsize == 1 else self.wide_steps
                x = quantize_input(x, *qparams, steps=steps)
                if d["name"] in self._requested:
                    codes[d["name"]] = x.transpose(np.argsort(form)) if form else x
            x = x.astype(np.int32) if d["name"] in self.long else x
            self.interpreter.set_tensor(d["index"], np.asarray(x, order="C"))
        self.interpreter.invoke()
        details = self.interpreter.get_output_details()
        for k, (name, (form, _), d) in enumerate(zip(self.tensors, self.layouts, details, strict=True)):
            value = np.asarray(self.interpreter.get_tensor(d["index"]))  # a number if it is a scalar
            if k < self._own_outputs and (qparams := quantization_of(d)):
                value = dequantize_output(value, *qparams[:2])
            if name in self.lines and value.shape[1:2] == (1,):
                value = value.squeeze(1)
            value = _unrolled(value, self.images[name]) if name in self.images else value
            value = value.astype(np.int64) if name in self.long else value
            out[name] = value.transpose(np.argsort(form)) if form else value
        return out | codes

    def executed(self) -> Mapping[str, int]:
        """Return how often the interpreter runs each operator: "ADD" in its own kernels, "XNNPACK ADD" in the delegate.

        It also lists delegated operators as its own: those between a delegate's inputs and outputs.
        """
        listed = self.interpreter._get_ops_details()
        own = [op for op in listed if op["op_name"] != "DELEGATE"]
        makers = {int(t): k for k, op in enumerate(own) for t in op["outputs"]}
        taken: set[int] = set()
        for part in (op for op in listed if op["op_name"] == "DELEGATE"):
            seen, todo = {*part["inputs"]}, [*part["outputs"]]
            while todo:
                t = todo.pop()
                if t not in seen and t in makers:
                    taken.add(makers[t])
                    todo += [*own[makers[t]]["inputs"]]
                seen.add(t)
        kinds = Counter(("XNNPACK " if k in taken else "") + op["op_name"] for k, op in enumerate(own))
        return dict(sorted(kinds.items()))


@register("runtime", "litert_reference", **_DECLARED, kernels="litert_reference")
class LiteRtReference(LiteRt):
    """A loaded file, run with reference kernels."""

    resolver, block_scales = "BUILTIN_REF", False
    hint = "some operators, such as ELU, have no reference kernel: choose runtime='litert' or 'litert_optimized'"
    steps = wide_steps = staticmethod(lambda x, s: _away(x / s))


@register("runtime", "litert_optimized", **_DECLARED, kernels="litert_optimized")
class LiteRtOptimized(LiteRt):
    """A loaded file, run with optimised kernels, without delegates."""

    resolver, steps = "BUILTIN_WITHOUT_DEFAULT_DELEGATES", staticmethod(_by_eights)


def fits_tensor(x: np.ndarray, detail: Mapping[str, Any]) -> bool:
    """Return whether an input fits a tensor of the file: every dimension is dynamic or equal."""
    signature = _signature(detail)
    return len(signature) == x.ndim and all(s in (-1, n) for s, n in zip(signature, x.shape))


def _signature(detail: Mapping[str, Any]) -> Sequence[int]:
    """Return the sizes of a tensor of the file; -1 if one is dynamic."""
    signature: Sequence[int] = detail["shape_signature"]
    return signature if len(signature) else detail["shape"]


@contextlib.contextmanager
def _typed(what: str, path: str, hint: str = "") -> Iterator[None]:
    """Turn the errors of an interpreter into errors about a file."""
    try:
        yield
    except (RuntimeError, ValueError) as e:
        raise RuntimeUnavailable(f"LiteRT {what}: {first_line(e)}", where=path, hint=hint) from e


def _content(path: Path) -> bytes:
    """Return the bytes of a file that is marked as a TensorFlow Lite model and holds a network."""
    from ai_edge_litert import schema_py_generated as schema

    with wrap_read_errors(path, RuntimeUnavailable):
        raw = path.read_bytes()
    if raw[4:8] != b"TFL3":
        message = "The file is not a TensorFlow Lite model: the identifier TFL3 is missing"
        raise RuntimeUnavailable(message, where=str(path), got=repr(raw[4:8]))
    # LiteRT reports wrong offsets itself
    with contextlib.suppress(struct.error, TypeError, IndexError):
        if schema.Model.GetRootAs(raw, 0).SubgraphsIsNone():  # LiteRT would crash
            raise RuntimeUnavailable("The file holds no network", where=str(path))
    return raw


def quantization_of(detail: Mapping[str, Any]) -> tuple[float, int, np.dtype] | None:
    """Return scale, zero point and type of a quantized tensor; None for any other."""
    scales, zeros = (detail["quantization_parameters"][k] for k in ("scales", "zero_points"))
    if not len(scales) or np.dtype(detail["dtype"]).kind not in "iu":
        return None
    return float(scales[0]), int(zeros[0]), np.dtype(detail["dtype"])


def _quantization(tensor: Any, key: str) -> Any:
    """Return a field of the quantization of a tensor of the file; None if it has none."""
    return tensor.quantization and getattr(tensor.quantization, key)


def _states(content: bytes, path: str, narrow: bool) -> bool:
    """Return whether a file keeps numbers between calls.

    Args:
        narrow: SVDF may have a state of 8 bits.

    Raises:
        RuntimeUnavailable: it has one, and may not.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    graph = model.Subgraphs(0)
    for op in (graph.Operators(k) for k in range(graph.OperatorsLength())):
        if model.OperatorCodes(op.OpcodeIndex()).BuiltinCode() != schema.BuiltinOperator.SVDF or narrow:
            continue
        if graph.Tensors(op.Inputs(4)).Type() == schema.TensorType.INT8:  # LiteRT would crash
            what, hint = "LiteRT has no kernel for SVDF with a state of 8 bits", "choose runtime='tflm'"
            raise RuntimeUnavailable(what, where=path, hint=hint)
    return any(graph.Tensors(k).IsVariable() for k in range(graph.TensorsLength()))


def _items(vector: Any) -> Any:
    """Return a vector of the file; () if the file leaves it out."""
    return () if vector is None else vector


def _with_outputs(
    raw: bytes, path: str, tensors: Sequence[str], block_scales: bool
) -> tuple[bytes, int, list[str], dict[str, Any]]:
    """Return the file with `tensors` as further outputs, the number of its own, the names of all, and the notes."""
    from ai_edge_litert import schema_py_generated as schema

    from chipfit.frameworks.tflite.variables import packed

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(raw, 0))
    graph = model.subgraphs[0]
    own = [int(o) for o in _items(graph.outputs)]
    ends = all(0 <= k < len(_items(graph.tensors)) for k in (*_items(graph.inputs), *own))
    if not own or not ends or not all(0 <= m.buffer < len(_items(model.buffers)) for m in _items(model.metadata)):
        raise RuntimeUnavailable("An input, an output or metadata of the network is missing from the file", where=path)
    if any(t.name is None for t in graph.tensors):
        raise RuntimeUnavailable("A tensor of the network has no name", where=path)
    _check_scales(graph.tensors, path, block_scales)
    computed = {int(o) for op in _items(graph.operators) for o in _items(op.outputs)}
    computed |= {k for k, t in enumerate(graph.tensors) if t.isVariable}
    names = {t.name.decode(): k for k, t in enumerate(graph.tensors)}
    notes: Any = {}
    for m in _items(model.metadata):
        if m.name == b"chipfit":
            notes = read_notes(_Notes, bytes(_items(model.buffers[m.buffer].data)), path)
    if len(notes.get("outputs", own)) != len(own):
        raise unfit_notes(path, "outputs")
    # a quantized output is returned as floats under the name "output/float", and on request also as codes
    ints = [k for k in own if graph.tensors[k].type in _RANGES]
    quantized = {k for k in ints if len(_items(_quantization(graph.tensors[k], "scale")))}
    kept = notes.get("kept", {})
    names |= {after: names.pop(before) for before, after in kept.items() if before in names}
    extra = [names[t] for t in tensors if t in names and names[t] in computed and names[t] not in {*own} - quantized]
    graph.outputs = np.array([*own, *extra], np.int32)
    returned: list[str] = []
    for n, k in enumerate((*own, *extra)):  # one tensor may be several outputs
        name = graph.tensors[k].name.decode()
        name = kept.get(name, name) + ("/float" if n < len(own) and k in quantized else "")
        returned.append(f"{name}:{len(returned)}" if name in returned else name)
    return packed(model), len(own), returned, notes


def _check_scales(tensors: Sequence[Any], path: str, block_scales: bool) -> None:
    """Check that the scales and zero points of a file are in range, and that kernels support them.

    Raises:
        RuntimeUnavailable: They are not.
    """
    for t in tensors:
        low, high = _RANGES.get(t.type, (-math.inf, math.inf))
        zeros, scales = (np.asarray(_items(_quantization(t, k))) for k in ("zeroPoint", "scale"))
        if not (np.all(low <= zeros) and np.all(zeros <= high) and np.all(scales > 0) and np.all(scales < math.inf)):
            what = f"The scale or zero point of tensor '{t.name.decode(errors='replace')}' is out of range"
            raise RuntimeUnavailable(what, where=path)
        if (held_by := getattr(_quantization(t, "details"), "scales", None)) is not None:  # the tensor of block scales
            if not block_scales:  # the kernels would compute as if all scales were 1
                what = "The reference kernels of LiteRT do not support weights with one scale per block"
                raise RuntimeUnavailable(what, where=path, got=f"tensor '{t.name.decode(errors='replace')}'")
            if not 0 <= held_by < len(tensors):
                raise RuntimeUnavailable("The block scales of a tensor are missing from the file", where=path)
