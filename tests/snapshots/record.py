"""Record the decisions and files of a result in a few lines: counts and digests of discrete values, sums of floats.

Records do not depend on the last bit of floats, which differs between processors, nor on a tracer's names: tensors are
named by position. `spelled=True` writes the data out instead of digests.
"""

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.errors import ChipfitError, UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.result import Result
from chipfit.simulate.integer import simulate

#: relative tolerance of floats, absolute near 0: where floats are exact, and elsewhere
FLOATS, ROUGH_FLOATS = 1e-5, 2e-5
#: tolerance of trained scales relative to the largest of a tensor: some ten roundings of float32
SMALL = 2.0**-20
#: tolerance of mean outputs relative to their absolute mean: values half way may round either way
MEANS = 2e-3
#: where floats are not exact, sums of quantized values may differ by one in so many of them, and by this share of the
#: absolute sum: values half way may round either way
ONE_IN, SHARE = 200, 1e-6
#: keys of lines that `_codes` writes
CODES = ("weights", "integers", "file_codes")


def record(result: Result, inputs: Sequence[torch.Tensor], suffix: str, spelled: bool = False) -> dict[str, Any]:
    """Record the plan, the simulation on `inputs` and the file of a result."""
    graph, plan = result.graph, result.plan
    digest = _spelled if spelled else _digest
    at = _places(graph)
    nodes = [
        [
            n.op,
            n.layer_type,
            *(at.get(i, "") for i in n.inputs),
            [graph.values[o].dtype for o in n.outputs],
            {k: _plain(v) for k, v in sorted(n.attrs.items()) if k not in ("target", "call")},
        ]
        for n in graph.nodes
    ]
    runs = [plan.nodes[n.name] for n in graph.nodes]
    decided = [[n.exec, at.get(n.group, ""), bool(n.why), n.simd] for n in runs]
    across = {
        "groups": [[at[m] for m in g] for g in plan.groups],
        "ties": sorted(sorted(at[t] for t in g) for g in plan.ties),
        "edges": sorted([at[v], at[n]] for v, n in plan.float_edges),
        "limits": [[n.op, [[at[t], e] for t, e in n.terms], _plain(n.low), _plain(n.high)] for n in plan.limits],
        "fixed": sorted(at[t] for t in plan.fixed),
        "zeros": sorted(at[t] for t in plan.zeros),
        "sums": [[at[t], _plain(s)] for t, s in plan.sums],
        "notes": len(plan.rewrites),
    }
    tensors = [plan.tensors[t] for t in at if t in plan.tensors]
    stored = [t.stored for t in tensors if t.stored is not None]
    layers = {n.layer for n in graph.nodes} - {""}
    kinds = [[at[t.name], t.role, t.format, t.axis, bool(t.why), t.layer in layers] for t in tensors]
    for kind, t in zip(kinds, tensors):
        if t.grid is not None:
            absent = ("pair_limit", None), ("short_scale", False), ("scale_max", None)
            kind.append({k: v for k, v in asdict(t.grid).items() if k != "table" and (k, v) not in absent})
    by_format = Counter(f"{t.role[0]}:{t.format}" for t in tensors)
    out: dict[str, Any] = {
        "nodes": f"{_counts(Counter(n.op for n in graph.nodes))} {digest(nodes)}",
        "runs": f"{_counts(Counter(n.exec for n in runs))} {digest(decided)}",
        "across": ", ".join(f"{k} {v if isinstance(v, int) else len(v)}" for k, v in across.items() if v)
        + f" {digest(across)}",
        "formats": f"{_counts(by_format)} {digest(kinds)}",
        "zero_points": [int(s.zero_point.sum()) for s in stored],
        "scales": [_number(s.scale.double().log2().mean()) for s in stored],
        "seen": [_number(sum(v) / max(len(v), 1)) for v in ([t.low for t in tensors if t.low is not None],)]
        + [_number(sum(t.high for t in tensors if t.high is not None))],
        "tables": [_number(sum(i * v for i, v in enumerate(s.grid.table, 1))) for s in stored if s.grid.table],
        "weights": [
            _codes(t.stored.quantize(graph.weights[t.name].detach()))
            for t in tensors
            if t.stored is not None and t.name in graph.weights
        ],
        "floats": [_number(w.double().abs().sum()) for w in _floats(graph)],
    }
    with torch.no_grad():
        returned = [y.double() for y in result.model.run_flat(list(inputs))]
    out["model"] = [f"{list(y.shape)}: {_number(y.mean())} {_number(y.abs().mean())}" for y in returned]
    try:
        found = simulate(graph, plan, list(inputs), result.platform)
        out["integers"] = [_codes(found[v]) for v in at if v in found and plan.quantized(v)]
    except UnsupportedError:
        out["integers"] = "not simulated"
    out |= written(result, suffix, digest)
    return {k: v for k, v in out.items() if v != []}


def _places(graph: Graph) -> dict[str, str]:
    """Name each tensor and node by its position, in order."""
    out = {name: f"x{k}" for k, name in enumerate(graph.inputs)}
    for k, n in enumerate(graph.nodes):
        for i in n.inputs:
            if i is not None and i not in out:
                out[i] = f"{k}.w{len(out)}"
        for j, o in enumerate(n.outputs):
            out[o] = f"{k}.{j}"
    for k, n in enumerate(graph.nodes):
        out.setdefault(n.name, f"node {k}")
    return out


def _floats(graph: Graph) -> list[torch.Tensor]:
    read = dict.fromkeys(i for n in graph.nodes for i in n.inputs if i in graph.weights)
    return [w for w in (graph.weights[i].detach() for i in read) if w.is_floating_point()]


def _plain(v: Any) -> Any:
    """Return JSON data whose floats keep five digits."""
    if isinstance(v, bool | int | str | None):
        return v
    if isinstance(v, float):
        return f"{v:.5g}"
    if isinstance(v, dict):
        return {str(k): _plain(x) for k, x in v.items()}
    if isinstance(v, list | tuple):
        return [_plain(x) for x in v]
    return type(v).__name__


def _digest(data: Any) -> str:
    return "#" + hashlib.sha256(json.dumps(data).encode()).hexdigest()[:8]


def _spelled(data: Any) -> str:
    return json.dumps(data)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{n} {k}" for k, n in found.items())


def _number(x: Any) -> float:
    return float(f"{float(x):.7g}")


def _codes(q: torch.Tensor) -> str:
    """Return the count, the sum, the absolute sum, and a sum that changes if two values are exchanged."""
    q = q.detach().to(torch.int64).reshape(-1)
    place = torch.arange(q.numel()) % 7
    return f"{q.numel()}: {int(q.sum())} {int(q.abs().sum())} {int((q * place).sum())}"


# ---------------------------------------------------------------- files


def written(result: Result, suffix: str, digest: Any) -> dict[str, Any]:
    """Record the contents of the file with this suffix, or that it is unsupported."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = result.export(Path(folder) / f"m{suffix}")
        except ChipfitError as e:
            return {"file": f"refused: {type(e).__name__}"}
        structure, constants, kinds = {".onnx": _onnx, ".tflite": _tflite, ".json": _json}[suffix](path, result)
    integers = [c for c in constants if c.dtype.kind in "iub"]
    floats = [c.astype(np.float64).reshape(-1) for c in constants if c.dtype.kind == "f"]
    whole = np.concatenate([c.astype(np.int64).reshape(-1) for c in integers] or [np.zeros(0, np.int64)])
    reals = np.concatenate(floats or [np.zeros(0)])
    logs = [math.log2(abs(v)) for v in reals.tolist() if math.isfinite(v) and v]
    return {
        "file": f"{_counts(Counter(kinds))} {digest(structure)}",
        "constants": f"{len(whole)} integers, {len(reals)} floats",
        "file_codes": _codes(torch.from_numpy(whole)),
        "file_floats": [_number(sum(logs)), _number(sum((1 + k % 5) * v for k, v in enumerate(logs)))],
    }


_Read = tuple[Any, list[np.ndarray], Iterable[str]]


def _onnx(path: Path, result: Result) -> _Read:
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(path))
    g = model.graph
    constants = {i.name: numpy_helper.to_array(i) for i in g.initializer}
    at = {i.name: f"in {k}" for k, i in enumerate(g.input)}
    at |= {name: f"{c.dtype} {list(c.shape)}" for name, c in constants.items()}
    nodes = []
    for k, n in enumerate(g.node):
        attrs = {a.name: _attribute(onnx.helper.get_attribute_value(a)) for a in n.attribute}
        nodes.append([n.op_type, n.domain, [at.get(i, i) for i in n.input], attrs])
        at |= {o: f"{k}.{j}" for j, o in enumerate(n.output)}
    ends = [
        [at[o.name], o.type.tensor_type.elem_type, len(o.type.tensor_type.shape.dim)] for o in (*g.input, *g.output)
    ]
    opsets = [[o.domain, o.version] for o in model.opset_import]
    return [nodes, ends, opsets, model.ir_version], list(constants.values()), [n.op_type for n in g.node]


def _attribute(v: Any) -> Any:
    from onnx import TensorProto

    if isinstance(v, TensorProto):
        return [v.data_type, list(v.dims)]
    return v.decode() if isinstance(v, bytes) else _plain(list(v) if not isinstance(v, int | float | str) else v)


def _tflite(path: Path, result: Result) -> _Read:
    from ai_edge_litert import schema_py_generated as schema

    from chipfit.export.tflite.read_back import array_of

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    (g,) = model.subgraphs
    names = {v: k for k, v in vars(schema.BuiltinOperator).items() if not k.startswith("_")}
    codes = [(names.get(c.builtinCode), c.version) for c in model.operatorCodes]
    tensors, constants = [], []
    for t in g.tensors:
        q, data = t.quantization, model.buffers[t.buffer].data
        zeros = None if q is None or q.zeroPoint is None else [int(z) for z in q.zeroPoint]
        axis = None if q is None or q.scale is None else q.quantizedDimension
        tensors.append([_ints(t.shape), _ints(t.shapeSignature), t.type, zeros, axis, data is not None])
        if q is not None and q.scale is not None:
            constants.append(np.asarray(q.scale))
        if data is not None:
            constants.append(array_of(bytes(data), t))
    operators = [
        [codes[o.opcodeIndex], _ints(o.inputs), _ints(o.outputs), _plain(vars(o.builtinOptions or object))]
        if o.builtinOptions is not None
        else [codes[o.opcodeIndex], _ints(o.inputs), _ints(o.outputs)]
        for o in g.operators
    ]
    ends = [_ints(g.inputs), _ints(g.outputs), len(model.signatureDefs or ())]
    return [operators, tensors, ends], constants, [codes[o.opcodeIndex][0] for o in g.operators]


def _ints(v: Any) -> list[int] | None:
    return None if v is None else [int(x) for x in v]


def _json(path: Path, result: Result) -> _Read:
    """Read encodings: words and integers unchanged except names of tensors, and all floats as one constant."""
    at, floats = _places(result.graph), []

    def walk(v: Any) -> Any:
        if isinstance(v, dict):
            return {at.get(k, k): walk(x) for k, x in v.items()}
        if isinstance(v, list):
            return [walk(x) for x in v]
        if isinstance(v, float):
            floats.append(v)
            return "float"
        return at.get(v, v) if isinstance(v, str) else v

    data = json.loads(path.read_text())
    structure = walk(data)
    return structure, [np.array(floats)], [*structure][:12] if isinstance(structure, dict) else []


# ---------------------------------------------------------------- comparison


def differences(want: dict[str, Any], got: dict[str, Any], exact: bool) -> list[str]:
    """Describe each difference between two records in a sentence."""
    keys = dict.fromkeys((*want, *got))
    return [f"{k}: {want.get(k)} became {got.get(k)}" for k in keys if not _same(k, want.get(k), got.get(k), exact)]


def _same(key: str, a: Any, b: Any, exact: bool) -> bool:
    if key == "scales" and not exact and isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and _near_scales(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(key, x, y, exact) for x, y in zip(a, b))
    if isinstance(a, float) and isinstance(b, float):
        most = FLOATS if exact else ROUGH_FLOATS
        return math.isclose(a, b, rel_tol=most, abs_tol=most)
    if key == "model" and isinstance(a, str) and isinstance(b, str):
        return _near(a, b, lambda n, size: MEANS * size)
    if key in CODES and not exact and isinstance(a, str) and isinstance(b, str) and ": " in a and ": " in b:
        return _near(a, b, lambda n, size: 1 + int(n) // ONE_IN + SHARE * size)
    return bool(a == b)


def _near_scales(a: list[Any], b: list[Any]) -> bool:
    """Compare log2 of scales; a scale that training moved to almost 0 is a difference of larger numbers."""
    room = SMALL * max((2**x for x in a if isinstance(x, float)), default=0.0)
    small = [isinstance(x, float) and isinstance(y, float) and abs(2**x - 2**y) <= room for x, y in zip(a, b)]
    return all(fits or _same("", x, y, False) for fits, x, y in zip(small, a, b))


def _near(a: str, b: str, most: Callable[[str, float], float]) -> bool:
    """Check that two lines "size: sum absolute-sum weighted-sum ..." have one size and nearly equal sums."""
    (n, x), (m, y) = (line.split(": ") for line in (a, b))
    x, y = ([float(v) for v in sums.split()] for sums in (x, y))
    allowed = most(n, max(x[1], y[1]))
    return n == m and all(abs(v - w) <= allowed * (6 if k == 2 else 1) for k, (v, w) in enumerate(zip(x, y)))
