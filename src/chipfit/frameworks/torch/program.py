"""A traced model: calls of ATen operators with their origins in the user's code; both tracers return it."""

import contextlib
import dataclasses
import itertools
import linecache
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.files import package_data
from chipfit.frameworks.torch.tied_axes import Place
from chipfit.graph.builder import Origin
from chipfit.graph.config import module_settings, plain

#: ATen operators that are read as their operand, although their schema promises a copy
_COPIES = ("clone", "_to_copy", "_unsafe_view")


class Unrecordable(Exception):
    """Watching a model run does not show what it computes, or for which batch sizes.

    Args:
        writes: it writes in place where that is not to be seen; perhaps in what depends on no input.
    """

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A size that may vary, as it was in each recorded run; further runs had the size of the first."""

    sizes: tuple[int, ...]

    def computed_from(self, other: "OpenSize") -> tuple[str, int] | None:
        """Return the operator of Python and the number that make this size of another one in every run."""
        runs = list(itertools.zip_longest(self.sizes, other.sizes))
        pairs = [(a or self.sizes[0], b or other.sizes[0]) for a, b in runs]
        (a, b), *_ = pairs
        choices = ("operator.mul", a // b), ("operator.add", a - b), ("operator.floordiv", b // a)
        makes: tuple[Callable[..., int], ...] = (operator.mul, operator.add, operator.floordiv)
        for make, (name, number) in zip(makes, choices, strict=True):
            if number and all(make(y, number) == x for x, y in pairs):
                return name, number
        return None

    def multiple_of(self, other: Any) -> int | None:
        """Return how many times another open size this one is in every run; None if that varies."""
        name, number = (self.computed_from(other) if isinstance(other, OpenSize) else None) or ("", 0)
        return number if name == "operator.mul" else None


@dataclass(frozen=True, slots=True)
class SymbolicTensor:
    """Shape and type of a traced tensor; an open size is not an integer."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.shape)

    def to(self, dtype: torch.dtype) -> "SymbolicTensor":
        return SymbolicTensor(self.shape, dtype)

    def new_empty(self, shape: tuple[Any, ...]) -> "SymbolicTensor":
        return SymbolicTensor(shape, self.dtype)


#: float types that are read as float32, in which every model is simulated
SHORT = torch.float16, torch.bfloat16


def without_short_types(args: Any) -> Any:
    """Return the arguments of a call with float32 in place of shorter float types."""
    return pytree.tree_map_only(torch.dtype, lambda t: torch.float32 if t in SHORT else t, args)


def symbolic(t: torch.Tensor) -> SymbolicTensor:
    return SymbolicTensor(tuple(t.shape), t.dtype)


@dataclass(frozen=True, slots=True)
class Program:
    """A traced model.

    The `meta` of a call holds its result (`val`: a SymbolicTensor, a list of them, or a number), the modules that it
    was made in, torch's function, and the line.
    """

    graph: torch.fx.Graph
    owner: Any  #: holds the program's own tensors and inner graphs, as attributes
    weights: dict[str, torch.Tensor]  #: by name in the state dict, with buffers that are not in it
    weight_of: dict[str, str]  #: placeholder -> weight
    inputs: dict[str, str]  #: placeholder -> name of an input that is a tensor; other placeholders are constants
    results: list[Any]  #: leaves of what the model returns: calls, or constants
    out_tree: pytree.TreeSpec
    short: frozenset[str] = frozenset()  #: float types that the model casts to, read as float32
    batch: Sequence[Place] = ()  #: axes of the call's leaves that have as many elements as there are samples


@contextlib.contextmanager
def exporting(flag: bool) -> Iterator[None]:
    """Let `torch.compiler.is_exporting()` be true, as `torch.export` does, or false: many models then skip checks."""
    flags = {name: getattr(torch.compiler, name, False) for name in ("_is_compiling_flag", "_is_exporting_flag")}
    try:
        for name in flags:
            setattr(torch.compiler, name, flag)
        yield
    finally:
        for name, before in flags.items():
            setattr(torch.compiler, name, before)


def register_dataclasses(out: Any) -> None:
    """Register the user's dataclasses in a result with pytree."""
    for cls in map(type, _dataclasses(out)):
        if cls not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")


def _dataclasses(x: Any) -> list[Any]:
    """Return the instances of dataclasses in a nested result."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [x, *(d for f in dataclasses.fields(x) for d in _dataclasses(getattr(x, f.name)))]
    if isinstance(x, (Mapping, tuple, list)):
        return [d for v in (x.values() if isinstance(x, Mapping) else x) for d in _dataclasses(v)]
    return []


def needs_functionalization(graph: torch.fx.Graph) -> bool:
    """Return whether a call writes in place in a way that a reader of single calls would miss."""
    return any(writes_shared_memory(n) for n in graph.nodes if aten_name(n.target) and n.target._schema.is_mutable)


def writes_shared_memory(n: torch.fx.Node) -> bool:
    """Return whether an in-place call cannot be read as the operator without "_".

    That reading replaces the operand by the result from there on. It loses the write where the operand is a view, has
    views or copies, or is the caller's own tensor, and is impossible where there is no operator without "_".
    """
    name, target = aten_name(n.target), n.args[0] if n.args else None
    if name == "detach_" or (name == "dropout_" and not n.args[2]):  # they write nothing, dropout outside of training
        return False
    if not name.endswith("_") or not hasattr(torch.ops.aten, name[:-1]) or not isinstance(target, torch.fx.Node):
        return True
    return target.op == "placeholder" or _is_view(target) or any(_is_view(user) for user in target.users)


def _is_view(n: torch.fx.Node) -> bool:
    """Return whether the result may share memory with an operand, or is read as if it did."""
    if n.target is operator.getitem:
        return isinstance(n.args[0], torch.fx.Node) and _is_view(n.args[0])
    name = aten_name(n.target)
    aliases = [r.alias_info for r in n.target._schema.returns if r.alias_info is not None] if name else []
    return name in _COPIES or any(not a.is_write for a in aliases)


def aten_name(op: Any) -> str:
    """Return an operator's name without namespace and overload, or "" if it is not an operator of torch."""
    return op._schema.name.partition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""


TORCH = str(Path(torch.__file__).parent)
#: module of a call that a pass of torch's own has added
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
#: arguments of PyTorch's functions that ATen calls otherwise: function -> ATen's name -> PyTorch's
_RENAMED = package_data("chipfit.frameworks.torch", "aten.yaml")["renamed"]
#: NumPy's names of arguments, which PyTorch's functions accept
_NUMPY_NAMES = {"dim": "axis", "keepdim": "keepdims"}
#: operators that check or annotate, and compute nothing
CHECKS = re.compile("_assert|sym_constrain|_set_grad_enabled|_enter_autocast|_exit_autocast|lift_fresh|_guards_fn")


def arguments(n: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by the names of its schema, with the defaults that the call leaves out."""
    out: dict[str, Any] = {}
    for i, a in enumerate(n.target._schema.arguments):
        if i < len(n.args):
            out[a.name] = n.args[i]
        elif a.name in n.kwargs:
            out[a.name] = n.kwargs[a.name]
        elif a.has_default_value():
            out[a.name] = a.default_value
    return out


def origin(n: torch.fx.Node, modules: Mapping[str, torch.nn.Module]) -> Origin:
    """Return the layer, its settings and the line that a node of a program comes from.

    The layer is the innermost module that the call was made in. Its type is the module's class where that is a leaf,
    and the called function's name where the call stands in the code of a module that has others inside.

    Args:
        modules: the modules of the user's model by path.
    """
    path, kind = _layer(n, modules)
    return Origin(path, kind, _settings(n, modules.get(path), kind), source(n))


def _layer(n: torch.fx.Node, modules: Mapping[str, torch.nn.Module]) -> tuple[str, str]:
    stack = n.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values()) if path != _NO_MODULE), "")
    path = path.replace("L['self'].", "").replace("L['self']", "").partition("@")[0]  # "@1" marks a second call
    module = modules.get(path)
    kind = type(module).__name__ if module is not None else ""
    if module is None or path == "" or any(True for _ in module.children()):
        function = n.meta.get("torch_fn")
        kind = function[1].rpartition(".")[2] if function else kind
    return path, kind


def source(n: torch.fx.Node) -> str:
    """Return "file:line" of the last frame that is not torch's or made by it, "" if there is none."""
    place = ""
    for line in (n.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        if line.startswith('File "') and not line.startswith('File "<') and TORCH not in line:
            file, _, rest = line[6:].partition('", line ')
            place = f"{file}:{rest.partition(',')[0]}"
    return place


def _settings(n: torch.fx.Node, module: torch.nn.Module | None, kind: str) -> dict[str, Any]:
    """Return what filters may match: constructor arguments of PyTorch's own module, else the arguments of the call."""
    if module is not None and type(module).__name__ == kind:
        return module_settings(module)

    def is_constant(v: Any) -> bool:
        others = torch.fx.Node, OpenSize, torch.device  # a saved result names no device
        return not any(isinstance(i, others) for i in (v if isinstance(v, (list, tuple)) else (v,)))

    renamed, settings = _RENAMED.get(kind, {}), dict[str, Any]()
    for m in _nodes_of_call(n):
        if isinstance(m.target, torch._ops.OpOverload):
            for k, v in arguments(m).items():
                if is_constant(v):
                    settings.setdefault(renamed.get(k, k), plain(v))
            if kind == "interpolate" and "upsample" in m.target.__name__:
                settings["mode"] = (
                    m.target.__name__.partition("upsample_")[2].partition(".")[0].rstrip("d321").rstrip("_")
                )
    return {_NUMPY_NAMES[k]: v for k, v in settings.items() if k in _NUMPY_NAMES} | settings


def _nodes_of_call(n: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the node, and the other nodes that the same call of a PyTorch function became."""
    yield n
    call = n.meta.get("torch_fn")
    for step in ("prev", "next"):
        m = getattr(n, step)
        while call and m.meta.get("torch_fn") == call:
            yield m
            m = getattr(m, step)


def users_line(e: BaseException) -> str:
    """Return "file:line, in function: code" of an error's last frame in the user's code, "" if there is none."""
    for f in reversed(traceback.extract_tb(e.__traceback__)):
        ours = "chipfit" in Path(f.filename).parts[-4:-1] or "chipfit/" in f.filename
        if not ours and not f.filename.startswith((TORCH, "<")):
            line = (f.line or linecache.getline(f.filename, f.lineno or 0)).strip()
            return f"{f.filename}:{f.lineno}, in {f.name}: {line}"
    return ""
