"""Load programs that `torch.export.save` wrote, as data: the graph's JSON and raw weights. Nothing is unpickled.

A `.pt2` file is a zip archive. The files read are `models/model.json`, `data/weights/model_weights_config.json`,
`data/constants/model_constants_config.json` and the raw bytes that these name. Sample inputs, which are a pickle, are
never opened; pickled weights and constants are refused. Calls must be on the list of `engine.opaque`. Format: schema 8
of torch/_export/serde/schema.py."""

import inspect
import json
import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree
from typing_extensions import TypedDict

from chipfit.engine.opaque import listed, resolve_target
from chipfit.engine.operand_checks import MOST_ELEMENTS, checked
from chipfit.engine.trees import flatten_call, read_tree
from chipfit.engine.types import constant_of, dtype_of
from chipfit.errors import CaptureError, ChipfitError, short_message
from chipfit.files import ARCHIVE_ERRORS, existing_file, open_zip, parse_json
from chipfit.frameworks.torch.modules import register_weight
from chipfit.frameworks.torch.program import CHECKS
from chipfit.graph.ir import CPU
from chipfit.graph.placement import device_of
from chipfit.validation import check_value

_make: Any = TypedDict
_list: Any = list
_dict: Any = dict


def _table(*, total: bool = True, **wanted: Any) -> Any:
    """Return the type of a table with these keys (all, if `total`); other keys may stand beside them."""
    kind = _make("Table", wanted, total=total)
    kind.__pydantic_config__ = ConfigDict(strict=True, extra="allow")
    return kind


_number = Annotated[float, Field(strict=False)]  # infinities and NaN are texts in the file
_symbol = _table(total=False, name=str, as_name=str, as_int=int, as_bool=bool, as_float=_number)
_size = _table(total=False, as_int=NonNegativeInt, as_expr=_table(hint=_symbol))
_tensor_meta = _table(
    dtype=int, sizes=_list[_size], strides=_list[_size], storage_offset=_size, layout=int, requires_grad=bool
)
#: one entry: the kind of the argument -> its value
_argument = _table(
    total=False,
    **dict.fromkeys(("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float"), _symbol),
    **dict.fromkeys(("as_tensors", "as_sym_ints", "as_sym_bools", "as_sym_floats"), _list[_symbol]),
    **dict.fromkeys(("as_scalar_type", "as_memory_format", "as_layout"), int),
    as_optional_tensor=_table(total=False, as_tensor=_symbol),
    as_optional_tensors=_list[_table(total=False, as_tensor=_symbol)],
    as_float=_number,
    as_floats=_list[_number],
    as_graph=_table(graph=dict),
)
_arguments = _list[_argument]
_node = _table(target=str, inputs=_list[_table(name=str, arg=_argument)], outputs=_arguments, metadata=dict[str, str])
_graph = _table(inputs=_arguments, outputs=_arguments, nodes=_list[_node], tensor_values=_dict[str, _tensor_meta])
_input_spec = _table(
    total=False, name=str, arg=_argument, parameter_name=str, buffer_name=str, tensor_constant_name=str
)
_output = _table(total=False, user_output=_table(arg=_argument))
_call = _table(in_spec=str, out_spec=str, forward_arg_names=NotRequired[list[str] | None])
_module = _table(
    graph=_graph,
    signature=_table(input_specs=_list[_dict[str, _input_spec]], output_specs=_list[_output]),
    module_call_graph=_list[_table(fqn=str, signature=_call | None)],
)
_entry = _table(path_name=str, use_pickle=bool, is_param=bool, tensor_meta=_tensor_meta)

GRAPH: TypeAdapter[Any] = TypeAdapter(_graph)
GENERATION: TypeAdapter[Any] = TypeAdapter(_table(schema_version=_table(major=int)))
PROGRAM: TypeAdapter[Any] = TypeAdapter(_table(graph_module=_module))
WEIGHTS: TypeAdapter[Any] = TypeAdapter(_table(config=_dict[str, _entry]))


_SCHEMA = 8
#: exceptions for unknown names, lists of other lengths, and (from torch) sizes that do not fit the bytes
_MALFORMED = KeyError, IndexError, ValueError, RuntimeError
#: torch's names of the types that the file numbers
_TYPES = """
    uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16 uint16
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint32 uint64
"""
_DTYPES = dict(zip((*range(1, 14), *range(28, 36)), _TYPES.split(), strict=True))
_STRIDED = 7
_CONSTANTS = {
    "as_scalar_type": _DTYPES,
    "as_layout": {_STRIDED: "strided"},
    "as_memory_format": dict(enumerate("contiguous_format channels_last channels_last_3d preserve_format".split(), 1)),
}
#: tensors without memory, with which torch.export traces
_TRACED = FakeTensor, FunctionalTensor
_LITERALS = (
    "as_int as_ints as_float as_floats as_string as_strings as_bool as_bools as_int_lists as_float_lists".split()
)


def load(path: str | Path) -> nn.Module:
    """Load the program of a `.pt2` file as a module with the original names of weights, inputs and layers.

    Its `example` holds inputs of the shapes that the program was exported with, None if it has keyword inputs.

    Raises:
        CaptureError: The file does not exist, is damaged or not such an archive, holds pickled weights, or calls an
            operator that is not listed.
    """
    where = str(existing_file(path, CaptureError, "The model file"))
    try:
        with open_zip(path) as archive:
            return _program(_Archive(archive))
    except ChipfitError as e:
        raise CaptureError(e.what, where=where, got=e.got, allowed=e.allowed, hint=e.hint) from e
    except (*ARCHIVE_ERRORS, *_MALFORMED) as e:
        hint = "torch.export.save(torch.export.export(model, example), 'model.pt2') with torch 2.9 or newer"
        what = "The file is not a program that torch.export.save wrote"
        raise CaptureError(what, where=where, got=short_message(e), hint=hint) from e


class _Archive:
    """The files of the archive, below its single top folder."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        names = archive.namelist()
        self._archive, self._top = archive, names[0].partition("/")[0] + "/" if names else ""
        if self._has("byteorder") and self.bytes("byteorder") != b"little":
            raise CaptureError("The numbers of the program are not little-endian")
        models = [n for n in names if n.startswith(f"{self._top}models/")]
        if len(models) != 1:
            hint = "torch.export.save of torch 2.9 or newer writes one; older files hold pickles, which are code"
            raise CaptureError("The file is not an archive with one program", got=", ".join(names[:8]), hint=hint)
        self.model = models[0].rpartition("/")[2].removesuffix(".json")

    def _has(self, name: str) -> bool:
        return self._top + name in self._archive.namelist()

    def bytes(self, name: str) -> bytes:
        return self._archive.read(self._top + name)

    def json(self, name: str) -> Any:
        return parse_json(self.bytes(name).decode(), CaptureError, where=name)

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        """Return weights or constants by name; entries that share bytes, shape and type are one tensor."""
        folder = f"data/{kind}"
        if self._has(f"{folder}/{self.model}.pt"):
            raise _pickled(f"{folder}/{self.model}.pt")
        tensors, by_entry = {}, {}
        listed = f"{folder}/{self.model}_{kind}_config.json"
        for name, entry in check_value(WEIGHTS, self.json(listed), CaptureError, listed)["config"].items():
            file, meta = entry["path_name"], entry["tensor_meta"]
            if entry["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", file):
                raise _pickled(name)
            key = json.dumps(entry, sort_keys=True)
            if key not in by_entry:
                by_entry[key] = self._tensor(f"{folder}/{file}", meta, entry["is_param"])
            tensors[name] = by_entry[key]
        return tensors

    def _tensor(self, file: str, meta: Mapping[str, Any], is_parameter: bool) -> torch.Tensor:
        if meta["layout"] != _STRIDED:
            raise ValueError(f"{file} is not a dense tensor")
        raw, dtype = bytearray(self.bytes(file)), dtype_of(_DTYPES[meta["dtype"]])
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        size, stride = ([d["as_int"] for d in meta[k]] for k in ("sizes", "strides"))
        out = flat.as_strided(size, stride, meta["storage_offset"]["as_int"])
        return nn.Parameter(out, requires_grad=meta["requires_grad"] is True) if is_parameter else out


def _pickled(what: str) -> CaptureError:
    hint = "save the program with plain tensors as weights: torch.export.save of torch 2.9 or newer"
    return CaptureError(f"'{what}' is pickled, and a pickle is code", hint=hint)


# ---------------------------------------------------------------------------------------------------- the program


def _module_of(archive: _Archive) -> Any:
    """Return the table of the program, of the generation that is installed here, whose sizes are within bounds.

    Raises:
        CaptureError: it is not of this generation, is malformed, or has a tensor beyond all bounds.
    """
    where = f"models/{archive.model}.json"
    data = check_value(GENERATION, archive.json(where), CaptureError, where)
    if (found := data["schema_version"]["major"]) != _SCHEMA:
        what = "The program was saved by another generation of torch.export"
        hint = "export it again with the torch that is installed here"
        raise CaptureError(what, got=f"schema {found}", allowed=f"schema {_SCHEMA}", hint=hint)
    module = check_value(PROGRAM, data, CaptureError, where)["graph_module"]
    for name, meta in module["graph"]["tensor_values"].items():
        if math.prod(max(s.get("as_int", 1), 1) for s in meta["sizes"]) > MOST_ELEMENTS:
            got, allowed = str(meta["sizes"])[:120], f"up to {MOST_ELEMENTS} elements"
            raise CaptureError(f"The size of '{name}' is beyond all bounds", got=got, allowed=allowed)
    return module


def _called_by(call: Mapping[str, Any], leaves: list[Any]) -> "Program":
    """Return a program without operations, whose `forward` has the arguments of the saved model.

    Args:
        call: the signature in the file.
        leaves: names of the inputs, in order.
    """
    call_arguments = read_tree(call["in_spec"]).unflatten(leaves)
    if not (isinstance(call_arguments, tuple) and list(map(type, call_arguments)) == [tuple, dict]):
        raise ValueError("the arguments are not (args, kwargs)")
    positional, keywords = call_arguments
    names = call.get("forward_arg_names") or [x if isinstance(x, str) else f"arg{i}" for i, x in enumerate(positional)]
    names = [*names[: len(positional)], *map(str, keywords)]
    make = inspect.Parameter
    kinds = [make.POSITIONAL_OR_KEYWORD] * len(positional) + [make.KEYWORD_ONLY] * len(keywords)
    parameters = [make(n, k) for n, k in zip(names, kinds, strict=True)]

    def forward(self: Program, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    this = make("self", make.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([this, *parameters])  # type: ignore[attr-defined]  # inspect reads it
    program: Program = type("Program", (Program,), {"forward": forward})()
    count = len(leaves)
    program.spec = {"args": len(positional), "kwargs": list(keywords), "leaves": count, "tensors": list(range(count))}
    program.spec["names"] = names[: len(positional)]
    program.out_tree = read_tree(call["out_spec"])
    return program


def _program(archive: _Archive) -> nn.Module:
    module = _module_of(archive)
    (call,) = (c["signature"] for c in module["module_call_graph"] if c["fqn"] == "" and c["signature"])
    shapes = module["graph"]["tensor_values"]
    inputs = [_input(s) for s in module["signature"]["input_specs"]]
    users = [name for weight, name in inputs if not weight]
    program = _called_by(call, users)
    program.operands = inputs
    stored = {**archive.tensors("weights"), **archive.tensors("constants")}
    program.places = {name: register_weight(program, name, w) for name, w in stored.items()}
    _ = [program.places[weight] for weight, _ in inputs if weight]  # a KeyError means a malformed file
    program.graph = fx.Graph()
    values = {name: program.graph.placeholder(f"in{i}") for i, name in enumerate(map(_name, module["graph"]["inputs"]))}
    _CallReader(program.graph, values).add_calls(module["graph"]["nodes"])
    outputs = module["signature"]["output_specs"]
    if not all("user_output" in o for o in outputs):
        hint = "export the model in eval mode: model.eval()"
        got = str(outputs)[:200]
        raise CaptureError("The program changes its own weights or inputs when it runs", got=got, hint=hint)
    program.graph.output([_CallReader(program.graph, values).value(o["user_output"]["arg"]) for o in outputs])
    program.writes = any(n.meta.get("writes") for n in program.graph.nodes)
    by_position = not program.spec["kwargs"] and set(users) <= set(shapes)
    program.example = tuple(_example(shapes[n]) for n in users) if by_position else None
    return program.eval()


def _name(argument: Mapping[str, Any]) -> str:
    """Return the name of a value in an argument of the file."""
    (value,) = argument.values()
    return str(value.get("name") or value["as_name"]) if isinstance(value, dict) else ""


def _input(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Return (name of a weight, "") or ("", name of a user's input)."""
    ((kind, s),) = spec.items()
    if kind in ("parameter", "buffer", "tensor_constant"):
        return s[f"{kind}_name"], ""
    if kind in ("user_input", "constant_input"):
        return "", s["name"] if kind == "constant_input" else _name(s["arg"])
    raise CaptureError(f"The program has an input of kind '{kind}', which is not a tensor")


def _example(meta: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor of the shape that an input had: random floats, or ones."""
    shape = [d["as_int"] if "as_int" in d else d["as_expr"]["hint"]["as_int"] for d in meta["sizes"]]
    dtype, generator = dtype_of(_DTYPES[meta["dtype"]]), torch.Generator().manual_seed(0)
    return (
        torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
    )


class Program(nn.Module):
    """A module that runs the calls of a program; `load` makes a subclass with the signature of each program."""

    operands: list[tuple[str, str]]
    spec: dict[str, Any]
    out_tree: Any
    graph: fx.Graph
    example: tuple[torch.Tensor, ...] | None
    writes: bool  #: a call writes to an operand
    places: dict[str, tuple[dict[str, Any], str]]  #: name of a weight -> the table of its module, and its key there

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the program and return the result in its original structure.

        A program that writes, and one whose inputs are parts of other tensors, gets copies of its inputs.
        """
        leaves = iter([self._own(x) for x in flatten_call(self.spec, args, kwargs)])
        weights = {name: table[key] for name, (table, key) in self.places.items()}
        given = [weights[weight] if weight else next(leaves) for weight, _ in self.operands]
        with fx.traceback.preserve_node_meta():  # so that an export of this module has the original layers
            interpreter = _PlacedCalls(self, graph=self.graph)
            interpreter.extra_traceback = False  # it would stand in messages for the user
            results = interpreter.run(*given)
        return pytree.tree_unflatten(list(results), self.out_tree)

    def _own(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, _TRACED):
            return x
        return x.clone() if self.writes else x if x.is_contiguous() else x.contiguous()


class _PlacedCalls(fx.Interpreter):
    """Runs the calls of a program; tensors are created on the device of its weights, in the place of the CPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        device = {"device": device_of(self.module)} if kwargs.get("device") == CPU else {}
        return super().call_function(target, args, {**kwargs, **device})


class _CallReader:
    """Reads the calls of one graph into a graph of torch.fx, whose Python code is never generated."""

    def __init__(self, graph: fx.Graph, values: dict[str, fx.Node]) -> None:
        self.graph, self.values = graph, values

    def add_calls(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        for n in nodes:
            target = n["target"]
            if CHECKS.search(target) and all("as_none" in o for o in n["outputs"]):
                continue
            if target.startswith("torch.ops.higher_order."):
                self._inline(n)
                continue
            f, writes = _callable(target)
            positional = [a for a in n["inputs"] if a.get("kind") == 1 or not a["name"]]
            args = tuple(self.value(a["arg"]) for a in positional)
            kwargs = {a["name"]: self.value(a["arg"]) for a in n["inputs"] if a not in positional}
            made = self.graph.call_function(f, args, kwargs)
            made.meta |= _meta(n["metadata"])
            made.meta["writes"] = writes
            outputs = n["outputs"]
            for i, o in enumerate(outputs):
                self._bind(o, made if len(outputs) == 1 else self._item(made, i))

    def _bind(self, output: Mapping[str, Any], made: Any) -> None:
        """Enter the result of a call under the name of an output."""
        ((kind, v),) = output.items()
        if kind == "as_tensors":
            for i, t in enumerate(v):
                self.values[t["name"]] = made[i] if isinstance(made, list) else self._item(made, i)
        elif kind != "as_none":
            self.values[_name(output)] = made

    def _item(self, made: fx.Node, i: int) -> fx.Node:
        item = self.graph.call_function(resolve_target("operator.getitem"), (made, i))
        item.meta |= made.meta
        return item

    def _inline(self, n: Mapping[str, Any]) -> None:
        """Add the inner graph of an operator such as `wrap_with_set_grad_enabled` in place of the call."""
        arguments = [a["arg"] for a in n["inputs"]]
        at = next((i for i, a in enumerate(arguments) if "as_graph" in a), None)
        if at is None or ".wrap_with_" not in n["target"]:
            what = f"The program uses the control-flow operator '{n['target'].rpartition('.')[2]}'"
            raise CaptureError(what, hint="replace torch.cond / while_loop by plain tensor operations")
        inner = check_value(GRAPH, arguments[at]["as_graph"]["graph"], CaptureError, n["target"])
        operands = [self.value(a) for a in arguments[at + 1 :]]
        calls = _CallReader(self.graph, dict(zip(map(_name, inner["inputs"]), operands, strict=True)))
        calls.add_calls(inner["nodes"])
        for o, made in zip(n["outputs"], inner["outputs"], strict=True):
            self._bind(o, calls.value(made))

    def value(self, argument: Mapping[str, Any]) -> Any:
        """Return an argument of the file: a constant, or the fx node that computes it."""
        ((kind, v),) = argument.items()
        if kind == "as_none":
            return None
        if kind in _LITERALS:
            return v
        if kind in ("as_tensor", "as_sym_int", "as_sym_bool", "as_sym_float"):
            name = v.get("name") or v.get("as_name")
            (number,) = (None,) if name else (v[k] for k in ("as_int", "as_bool", "as_float") if k in v)
            return self.values[name] if name else number
        if kind in ("as_tensors", "as_sym_ints", "as_sym_bools", "as_sym_floats"):
            return [self.value({kind[:-1]: i}) for i in v]
        if kind in ("as_optional_tensor", "as_optional_tensors"):
            return self.value(v) if kind == "as_optional_tensor" else [self.value(i) for i in v]
        if kind in _CONSTANTS:
            return constant_of(_CONSTANTS[kind][v])
        if kind == "as_device":
            return CPU  # see `_PlacedCalls`
        raise CaptureError(f"The program has an argument of the unknown kind '{kind}'")


def _callable(target: str) -> tuple[Callable[..., Any], bool]:
    """Return a function of the file, and whether it writes to an operand."""
    if target.startswith("torch.ops."):
        found = listed(target.removeprefix("torch.ops."), in_place=True)
        return checked(found), found._schema.is_mutable
    return resolve_target(target.removeprefix("_").replace("torch._sym", "torch.sym")), False


def _meta(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the origin of a call, which the file has as text, as `meta` of an fx node."""
    meta: dict[str, Any] = {k: metadata[k] for k in ("stack_trace",) if k in metadata}
    stack = [layer.split(",", 2) for layer in metadata.get("nn_module_stack", "").split(";") if layer.count(",") >= 2]
    if stack:
        meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in stack}
    if metadata.get("torch_fn", "").count(";") == 1:
        meta["torch_fn"] = tuple(metadata["torch_fn"].split(";"))
    return meta
