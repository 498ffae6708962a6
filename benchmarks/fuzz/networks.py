"""Networks in `.onnx` and `.tflite` files, float and quantized, whose structure or bytes are damaged."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
import onnx
import torch
from ai_edge_litert import schema_py_generated as schema
from benchmarks.fuzz import mutate
from benchmarks.fuzz.files import IMAGES, ROWS, convolutions, kept, rows
from benchmarks.fuzz.run import Case
from benchmarks.fuzz.sense import check_plan, check_result
from onnx import TensorProto, helper, numpy_helper

import chipfit
from chipfit.export import export
from chipfit.frameworks import capture
from chipfit.graph.ir import Graph
from chipfit.plan.record import NodePlan, Plan
from chipfit.platform.load import load
from chipfit.verify.file import read_quantized

_NUMBERS = 0, 1, -1, 2, 3, 7, 16, 99, 127, 255, -128, 1 << 20, 1 << 31, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63)
_REALS = 0.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"), -float("inf")
_WORDS = "", "x", "../x", "/etc/passwd", "a\x00b", "é" * 9, "a" * 5000, "Conv", "If", "Loop", "no.such.domain", "SAME"


class Place(NamedTuple):
    """A value inside a message of a file."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]


def networks(case: Case) -> None:
    """Damage the file of a network, load it and use it."""
    rng = case.random
    if rng.random() < 0.01:
        return large(case)
    name = rng.choice(sorted(sources()))
    source, x = sources()[name]
    case.note(name)
    shutil.copytree(source.parent, case.folder / "files")
    file = case.folder / "files" / source.name
    if rng.random() < 0.2:
        target = rng.choice(sorted(file.parent.iterdir()))
        target.write_bytes(mutate.octets(rng, target.read_bytes(), case.note))
    elif file.suffix == ".onnx":
        file.write_bytes(_onnx(rng, file.read_bytes(), case.note))
    else:
        file.write_bytes(_tflite(rng, file.read_bytes(), case.note))
    use_file(file, x, rng)


def use_file(file: Path, x: Any, rng: Random) -> None:
    """Use a file as a person does: look at it, quantize it, verify it."""
    if file.stem.startswith("quantized"):
        check_plan(read_quantized(file)[0].plan)
        if rng.random() < 0.5:
            chipfit.verify_file(file, [x])
        return
    model = chipfit.load_model(file)
    platform = rng.choice(("ort_cpu", "tflite_int8"))
    if rng.random() < 0.3:
        chipfit.lint(model, x, platform=platform)
        return
    result = chipfit.quantize(model, [x], platform=platform, progress=False)
    check_result(result)
    if rng.random() < 0.3:
        result.verify(x)


# ---------------------------------------------------------------------------------------------------------- sources


@functools.cache
def sources() -> dict[str, tuple[Path, Any]]:
    """Return valid files, each in a folder of its own, with an input."""
    out: dict[str, tuple[Path, Any]] = {}
    for make, x in ((convolutions, IMAGES), (rows, ROWS)):
        for suffix, platform in ((".onnx", "ort_cpu"), (".tflite", "tflite_int8")):
            for kind in ("float", "quantized"):
                name = f"{kind}_{make.__name__}{suffix}"
                file = kept() / name.replace(".", "_") / name
                if kind == "float":
                    _export_float(capture(make(), (x,)), file, platform)
                else:
                    chipfit.quantize(make(), [x], platform, progress=False).export(file)
                out[name] = (file, x.movedim(1, -1) if x.dim() == 4 and suffix == ".tflite" else x)
    for name, model in (("outside.onnx", _convolution()), ("odd.onnx", _odd())):
        file = kept() / name.replace(".", "_") / name
        file.parent.mkdir()
        outside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
        onnx.save(model, file, **(outside if name.startswith("outside") else {}))
        out[name] = (file, IMAGES)
    return out


def _export_float(graph: Graph, file: Path, platform: str) -> None:
    nodes = {n.name: NodePlan(name=n.name, op=n.op, exec="float") for n in graph.nodes}
    export(graph, Plan(tensors={}, nodes=nodes), file, load(platform))


def _convolution() -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    w = numpy_helper.from_array(draw.normal(size=(4, 3, 3, 3)).astype("f4"), "w")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["y"])]
    return _model(nodes, [w])


def _odd() -> onnx.ModelProto:
    """Return a model with shape arithmetic, a constant branch, a loop, a function and a fused operator."""
    constants = {
        "w": np.random.default_rng(0).normal(size=(108, 5)).astype("f4"),
        "zero": np.array([0]),
        "one": np.array([1]),
        "rest": np.array([-1]),
        "three": np.array(3),
        "yes": np.array(True),
    }
    inner = helper.make_tensor_value_info("b", 1, None)
    then = helper.make_graph([helper.make_node("Relu", ["l"], ["b"])], "then", [], [inner])
    other = helper.make_graph([helper.make_node("Neg", ["l"], ["b"])], "else", [], [inner])
    given = [("i", 7, []), ("go", 9, []), ("v", 1, None)]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Add", ["v", "v"], ["next"]),
        ],
        "body",
        [helper.make_tensor_value_info(*g) for g in given],
        [helper.make_tensor_value_info("on", 9, []), helper.make_tensor_value_info("next", 1, None)],
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["l"]),
        helper.make_node("If", ["yes"], ["br"], then_branch=then, else_branch=other),
        helper.make_node("Loop", ["three", "yes", "br"], ["lo"], body=body),
        helper.make_node("Twice", ["lo"], ["t"], domain="own"),
        helper.make_node("FastGelu", ["t"], ["g"], domain="com.microsoft"),
        helper.make_node("Slice", ["g", "zero", "three_", "one"], ["sl"]),
        helper.make_node("Softmax", ["sl"], ["y"], axis=-1),
    ]
    weights = [numpy_helper.from_array(v, k) for k, v in constants.items()]
    weights.append(numpy_helper.from_array(np.array([3]), "three_"))
    doubled = helper.make_node("Add", ["a", "a"], ["b"])
    opset = helper.make_opsetid("", 18)
    model = _model(nodes, weights)
    model.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], [doubled], [opset]))
    model.opset_import.extend([helper.make_opsetid("own", 1), helper.make_opsetid("com.microsoft", 1)])
    return model


def _model(nodes: list[Any], weights: list[Any]) -> onnx.ModelProto:
    x, y = helper.make_tensor_value_info("x", 1, ["n", 3, 6, 6]), helper.make_tensor_value_info("y", 1, None)
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


# ---------------------------------------------------------------------------------------------------------- damage


def _onnx(rng: Random, content: bytes, note: Callable[[str], None]) -> bytes:
    model = onnx.ModelProto.FromString(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, list(_in_message(model)), note)
    return model.SerializeToString()


def _tflite(rng: Random, content: bytes, note: Callable[[str], None]) -> bytes:
    table = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, list(_in_table(table)), note)
    builder = flatbuffers.Builder(len(content))
    try:
        builder.Finish(table.Pack(builder), file_identifier=b"TFL3")
    except (TypeError, ValueError, AttributeError, AssertionError):  # a number that the field does not hold
        return content[: rng.randrange(len(content))]
    return bytes(builder.Output())


def _in_message(message: Any, path: str = "") -> Iterator[Place]:
    """Yield the fields of a protobuf message and of the messages in it."""
    for field, value in message.ListFields():
        name = f"{path}.{field.name}"
        several = not isinstance(value, (int, float, str, bytes)) and hasattr(value, "extend")
        if several:
            yield Place(name, lambda v=value: list(v), functools.partial(_refill, value))
        elif field.message_type is None:
            yield Place(name, lambda v=value: v, functools.partial(setattr, message, field.name))
        for k, inner in enumerate(value if several and field.message_type else [value] if field.message_type else ()):
            yield from _in_message(inner, f"{name}[{k}]")


def _refill(container: Any, values: list[Any]) -> None:
    held = [v if isinstance(v, (int, float, str, bytes)) else type(v).FromString(v.SerializeToString()) for v in values]
    del container[:]
    container.extend(held)


def _in_table(table: Any, path: str = "") -> Iterator[Place]:
    """Yield the fields of a flatbuffer's object and of the objects in it."""
    for name, value in vars(table).items():
        at = f"{path}.{name}"
        if isinstance(value, np.ndarray):
            back = functools.partial(_set_array, table, name, value)
            yield Place(at, lambda v=value: v.tobytes() if len(v) > 64 else v.tolist(), back)
        elif value is not None:
            yield Place(at, lambda v=value: v, functools.partial(setattr, table, name))
        for k, inner in enumerate(value if isinstance(value, list) else [value]):
            if hasattr(inner, "__dict__"):
                yield from _in_table(inner, f"{at}[{k}]")


def _set_array(table: Any, name: str, old: np.ndarray, new: Any) -> None:
    if isinstance(new, bytes):
        new = np.frombuffer(new[: len(new) // old.itemsize * old.itemsize], old.dtype)
    setattr(table, name, np.array(new).astype(old.dtype))


def _change(rng: Random, places: list[Place], note: Callable[[str], None]) -> None:
    """Change one value: names to other names, numbers to odd ones, lists in their order and length."""
    place = rng.choice(places)
    old = place.get()
    pool = [v for p in rng.sample(places, min(30, len(places))) if type(v := p.get()) is type(old)]
    new = _other(rng, old, pool)
    note(f"{place.name} = {str(new)[:60]!r}")
    try:
        place.put(new)
    except (TypeError, ValueError, OverflowError):  # the field holds no such number
        place.put(old)


def _other(rng: Random, old: Any, pool: list[Any]) -> Any:
    if pool and rng.random() < 0.3 and not hasattr(old, "__dict__"):
        return rng.choice(pool)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, -old, rng.choice(_NUMBERS), rng.randrange(20)))
    if isinstance(old, float):
        return rng.choice((-old, old * 1e30, rng.choice(_REALS)))
    if isinstance(old, str):
        return rng.choice((old[:-1], old + "x", rng.choice(_WORDS)))
    if isinstance(old, bytes):
        cut = old[: rng.randrange(len(old) + 1)]
        return rng.choice((cut, old + bytes(rng.randrange(9)), bytes(len(old)), b"\xff" * len(old), rng.randbytes(8)))
    if isinstance(old, list) and old:
        k = rng.randrange(len(old))
        changed = old
        if isinstance(old[k], (int, float, str)):
            changed = [*old[:k], _other(rng, old[k], [v for v in old if v != old[k]]), *old[k + 1 :]]
        return rng.choice(
            (changed, changed, old[:k] + old[k + 1 :], old + [old[k]], rng.sample(old, len(old)), old[::-1])
        )
    return None if hasattr(old, "__dict__") else old


def large(case: Case) -> None:
    """Load graphs of many nodes or deep ones, which must be read or refused in bounded time."""
    rng = case.random
    count, deep = rng.choice((500, 2_000, 1_000_000)), rng.random() < 0.3
    case.note(f"{count} nodes, {'deep' if deep else 'in a row'}")
    if deep:
        info, inner = helper.make_tensor_value_info("y", 1, None), helper.make_node("Relu", ["x"], ["y"])
        flat = helper.make_graph([inner], "g", [], [info])
        for _ in range(rng.choice((5, 15, 30))):
            graph = helper.make_graph([inner], "g", [], [info])
            inner = helper.make_node("If", ["yes"], ["y"], then_branch=graph, else_branch=flat)
        model = _model([inner], [helper.make_tensor("yes", TensorProto.BOOL, [], [True])])
    else:
        names = [b"x", *(b"%d" % k for k in range(count - 1)), b"y"]
        model = _model([], [])
        model.graph.MergeFromString(b"".join(_relu(a, b) for a, b in itertools.pairwise(names)))
    file = case.folder / "m.onnx"
    file.write_bytes(model.SerializeToString())
    chipfit.lint(chipfit.load_model(file), torch.zeros(2, 3, 6, 6), platform="ort_cpu")


def _relu(x: bytes, y: bytes) -> bytes:
    """Return a node of a graph in protobuf's coding, which is made faster than by its library."""
    node = b"\x0a" + bytes([len(x)]) + x + b"\x12" + bytes([len(y)]) + y + b"\x22\x04Relu"
    return b"\x0a" + bytes([len(node)]) + node
