"""Where something comes from in the user's model: the layer and its settings of an fx node, the line of an error."""

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
#: arguments of PyTorch's functions that ATen has other names for
_RENAMED = package_data("chipfit.frameworks.torch", "aten.yaml")["renamed"]
#: NumPy's names, which PyTorch's functions take for theirs
_NUMPY = {"dim": "axis", "keepdim": "keepdims"}
#: operators that check or annotate and compute nothing
CHECKS = re.compile("_assert|sym_constrain|_set_grad_enabled|_enter_autocast|_exit_autocast|lift_fresh|_guards_fn")


def arguments(n: torch.fx.Node) -> dict[str, Any]:
    """Arguments of an ATen call by the names of its schema; dropped defaults are filled in."""
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
    """What a `graph.ir.Node` tells about its source.

    The layer is the innermost module that the call was made in. Its type is the module's class where that is a leaf,
    and the called function's name where the call stands in the code of a module that has others inside.

    Args:
        modules: those of the user's model by path.
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
    """ "file:line" of the last frame that is not torch's."""
    found = ""
    for line in (n.meta.get("stack_trace") or "").splitlines():
        line = line.strip()
        if line.startswith('File "') and TORCH not in line:
            file, _, rest = line[6:].partition('", line ')
            found = f"{file}:{rest.partition(',')[0]}"
    return found


def _settings(n: torch.fx.Node, module: torch.nn.Module | None, kind: str) -> dict[str, Any]:
    """What a filter may ask: constructor arguments of PyTorch's own module, else the arguments of the call."""
    if module is not None and type(module).__name__ == kind:
        return module_settings(module)

    def constant(v: Any) -> bool:
        return not any(isinstance(i, (torch.fx.Node, OpenSize)) for i in (v if isinstance(v, (list, tuple)) else (v,)))

    renamed, found = _RENAMED.get(kind, {}), dict[str, Any]()
    for m in _call(n):
        if isinstance(m.target, torch._ops.OpOverload):
            for k, v in arguments(m).items():
                if constant(v):
                    found.setdefault(renamed.get(k, k), plain(v))
            if kind == "interpolate" and "upsample" in m.target.__name__:
                found["mode"] = m.target.__name__.partition("upsample_")[2].partition(".")[0].rstrip("d321").rstrip("_")
    return {_NUMPY[k]: v for k, v in found.items() if k in _NUMPY} | found


def _call(n: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The node, and the others that the same call of one of PyTorch's functions has become."""
    yield n
    call = n.meta.get("torch_fn")
    for step in ("prev", "next"):
        m = getattr(n, step)
        while call and m.meta.get("torch_fn") == call:
            yield m
            m = getattr(m, step)


def users_line(e: BaseException) -> str:
    """ "file:line, in function: code" of an error's last frame in the user's own code; "" where there is none."""
    for f in reversed(traceback.extract_tb(e.__traceback__)):
        ours = "chipfit" in Path(f.filename).parts[-4:-1] or "chipfit/" in f.filename
        if not ours and not f.filename.startswith((TORCH, "<")):
            line = (f.line or linecache.getline(f.filename, f.lineno or 0)).strip()
            return f"{f.filename}:{f.lineno}, in {f.name}: {line}"
    return ""
