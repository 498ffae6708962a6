"""Read back the quantized tensors of a QDQ ONNX file: constants, scales and zero points."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from chipfit.export import FileTensor
from chipfit.frameworks.onnx.integers import OPTIMISED, PARTS, Expansion, NormalForm, from_bytes

_UNKNOWN = np.array(np.nan)  #: a scale that is not a constant


def to_bytes(values: Any, bits: int) -> np.ndarray:
    """Pack unsigned integers [*dims, n]; of 4 bits two in a byte, the first in the low half."""
    q = np.asarray(values, np.uint8)
    if bits == 8:
        return q
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, q.shape[-1] % 2)])
    return q[..., ::2] | q[..., 1::2] << 4


def read_back(path: Path) -> dict[str, FileTensor]:
    """Return quantized tensors by name (the integers of `name` are called "{name}_q").

    A tensor has the scale and zero point of every QuantizeLinear and DequantizeLinear that it passes.
    """
    model = onnx.load(str(path))
    if any(p.key == OPTIMISED for p in model.metadata_props):
        return _of_normal_form(model, Expansion(model).run())
    graph = model.graph
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    in_tables = _in_tables(graph, constants)
    clipped = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "Clip"}
    tables = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Gather"}
    tables |= _views(graph, constants)
    # quantized inputs have a scale and zero point of their own
    inputs = {i.name for i in graph.input if i.type.tensor_type.elem_type != onnx.TensorProto.FLOAT}
    found = {**in_tables, **_scaled_constants(graph, constants)}
    for n in graph.node:
        found |= _in_blocks(n, constants)
        if n.op_type in ("QuantizeLinear", "DequantizeLinear") and n.input[0] not in inputs:
            codes = n.input[0] if n.op_type == "DequantizeLinear" else clipped.get(n.output[0], n.output[0])
            codes = tables.get(codes, codes)
            q = constants.get(codes)
            tensor = found.setdefault(codes.removesuffix("_q"), FileTensor(None if q is None else _integers(q), []))
            scale = constants.get(n.input[1], _UNKNOWN)
            zero = constants.get(n.input[2], _UNKNOWN) if len(n.input) > 2 else np.zeros_like(scale)
            tensor.qparams.append((scale.astype(np.float32), zero.astype(np.float64)))
    return found


def _of_normal_form(model: onnx.ModelProto, form: NormalForm) -> dict[str, FileTensor]:
    """Return the tensors of a file with operators of integers; as floats those that are not integers any more."""
    held = {k: FileTensor(None, [(n.scale, n.zero.astype(np.float64))]) for k, n in (form.made | form.given).items()}
    for c in form.constants.values():
        numbers = (c.numbers.scale, c.numbers.zero.astype(np.float64))
        scale, zero = (p.reshape(-1) if p.ndim > 2 else p for p in numbers)  # of gates of one direction
        held[c.name] = FileTensor(c.integers, [(scale, zero)])
    floats = (t for t in model.graph.initializer if t.name.endswith("/float"))
    held |= {t.name: FileTensor(numpy_helper.to_array(t), []) for t in floats}
    parts = json.loads(next((p.value for p in model.metadata_props if p.key == PARTS), "{}"))
    everything = {t.name: t for t in model.graph.initializer}
    for name, (tensor, start, stop) in parts.items():
        array = numpy_helper.to_array(everything[tensor])
        values = array.reshape(-1)[start:stop]
        values = values.reshape(array.shape[1:]) if values.size == array[0].size else values
        held[name] = FileTensor(values if array.dtype.kind == "f" else _integers(values), [])
    return {k.removesuffix("_q"): t for k, t in held.items()}


def _in_tables(graph: onnx.GraphProto, constants: dict[str, np.ndarray]) -> dict[str, FileTensor]:
    """Return constants that are gathered from a table of floats and scaled, as floats.

    Those gathered from a table of integers are entered into `constants`, in place of the Gather.
    """
    found, made, views = {}, {o: n for n in graph.node for o in n.output}, _views(graph, constants)
    for n in graph.node:
        cast = made.get(n.input[1]) if n.op_type == "Gather" and n.input[0] in constants else None
        codes = "" if cast is None or cast.op_type != "Cast" else views.get(cast.input[0], cast.input[0])
        if not codes.endswith("_q_codes"):
            continue
        name, table = codes.removesuffix("_codes"), constants[n.input[0]]
        readers = [m for m in graph.node if n.output[0] in m.input]
        if table.dtype.kind == "f":
            scale = next((constants[m.input[1]] for m in readers if m.op_type == "Mul"), _UNKNOWN)
            numbers = [(scale.reshape(-1), np.zeros(scale.size))]
            found[name.removesuffix("_q")] = FileTensor(table[constants[codes]] * scale, numbers)
            continue
        constants[name] = table[constants[codes]]
        for m in readers:
            m.input[:] = [name if i == n.output[0] else i for i in m.input]
    return found


def _views(graph: onnx.GraphProto, constants: dict[str, np.ndarray]) -> dict[str, str]:
    """Return slices and transposes of constants: further readers of a weight, by the name of the constant."""
    out: dict[str, str] = {}
    for n in graph.node:
        source = out.get(n.input[0], n.input[0]) if n.op_type in ("Slice", "Transpose") else ""
        if source in constants:
            out[n.output[0]] = source
    return out


def _in_blocks(n: onnx.NodeProto, constants: dict[str, np.ndarray]) -> dict[str, FileTensor]:
    """Return the weight of a MatMulNBits or GatherBlockQuantized, by its name; {} for another operator."""
    operands = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}.get(n.op_type)
    if operands is None:
        return {}
    name, scale, zero = (n.input[k] if k < len(n.input) else "" for k in operands)
    a = {x.name: x.i for x in n.attribute}
    rows, scales = constants[name].reshape(len(constants[name]), -1), constants[scale]
    codes = from_bytes(rows, a["bits"], a.get("K", scales.shape[1] * a["block_size"]))
    if zero:
        zeros = from_bytes(constants[zero], a["bits"], scales.shape[1]).astype(np.float64)
    else:
        codes, zeros = codes - (1 << a["bits"] - 1), np.zeros_like(scales, np.float64)
    return {name.removesuffix("_q").removesuffix("_rows"): FileTensor(codes, [(scales, zeros)])}


def _integers(q: np.ndarray) -> np.ndarray:
    """Return integers of a type that numpy computes with; it has none of 4 bits."""
    return q if q.dtype.kind in "iu" else q.astype(np.int64)


def _scaled_constants(graph: onnx.GraphProto, constants: dict[str, np.ndarray]) -> dict[str, FileTensor]:
    """Return constants that a Mul scales behind a MatMulInteger, Gather or LSTM, with that scale and zero point 0.

    MatMulInteger(x, w): the scale of w multiplies that of x, and the product of both the sums. Gather(w, index): the
    scales are of w's columns, or gathered with its rows.
    """
    found, makers = {}, {o: n for n in graph.node for o in n.output}
    views = _views(graph, constants)

    def scaled() -> Iterator[tuple[str, str]]:
        for mul in (n for n in graph.node if n.op_type == "Mul"):
            cast, scale = makers.get(mul.input[0]), mul.input[1]
            maker = makers.get(cast.input[0]) if cast is not None and cast.op_type == "Cast" else None
            kind = "" if maker is None else maker.op_type
            if maker is not None and kind == "MatMulInteger" and scale in makers:
                yield views.get(maker.input[1], maker.input[1]), makers[scale].input[1]
            elif maker is not None and kind == "Gather" and maker.input[0] in constants:
                while scale not in constants and scale in makers:
                    scale = makers[scale].input[0]
                if constants[maker.input[0]].dtype.kind != "f":
                    yield maker.input[0], scale

    def source(name: str) -> str:
        """Return the constant whose rows are moved or gathered."""
        while name not in constants and name in makers:
            name = makers[name].input[0]
        return name

    lstms = [n.input for n in graph.node if n.op_type == "DynamicQuantizeLSTM"]
    of_lstms = [(source(i[k]), source(i[scale])) for i in lstms for k, scale in ((1, 8), (2, 10))]
    for name, scale in (*scaled(), *of_lstms):
        numbers = constants.get(scale, _UNKNOWN)
        zero = np.zeros(numbers.shape, np.float64)
        found[name.removesuffix("_q")] = FileTensor(_integers(constants[name]), [(numbers, zero)])
    return found
