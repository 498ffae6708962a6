"""The origin of an fx node or an error in the user's model: layer, settings of the layer, line of code."""

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from chipfit.files import package_data
from chipfit.frameworks.torch.program import OpenSize
from chipfit.graph.builder import Origin
from chipfit.graph.config import module_settings, plain

TORCH = str(Path(torch.__file__).parent)
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
    path = next(reversed(stack.values()))[0] if stack else ""
    path = path.replace("L['self'].", "").replace("L['self']", "").partition("@")[0]  # "@1" marks a second call
    module = modules.get(path)
    kind = type(module).__name__ if module is not None else ""
    if module is None or path == "" or any(True for _ in module.children()):
        function = n.meta.get("torch_fn")
        kind = function[1].rpartition(".")[2] if function else kind
    return path, kind


def source(n: torch.fx.Node) -> str:
    """Return "file:line" of the last frame that is not torch's, "" if there is none."""
    place = ""
    for line in (n.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        if line.startswith('File "') and TORCH not in line:
            file, _, rest = line[6:].partition('", line ')
            place = f"{file}:{rest.partition(',')[0]}"
    return place


def _settings(n: torch.fx.Node, module: torch.nn.Module | None, kind: str) -> dict[str, Any]:
    """Return what filters may match: constructor arguments of PyTorch's own module, else the arguments of the call."""
    if module is not None and type(module).__name__ == kind:
        return module_settings(module)

    def is_constant(v: Any) -> bool:
        return not any(isinstance(i, (torch.fx.Node, OpenSize)) for i in (v if isinstance(v, (list, tuple)) else (v,)))

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
