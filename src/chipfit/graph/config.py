"""Settings of a framework's layer or call as plain data, which filters compare and files store."""

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

#: greatest nesting of lists and mappings; a list may contain itself
_DEEPEST = 20


def plain(value: Any, deepest: int = _DEEPEST) -> Any:
    """Return a value of a framework's configuration as JSON data: objects by their names, lists as tuples.

    Values nested deeper than `deepest` lists and mappings become "...".
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, Mapping)) and not deepest:
        return "..."
    if isinstance(value, (list, tuple)):
        return tuple(plain(v, deepest - 1) for v in value)
    if isinstance(value, Mapping):
        return {str(k): plain(v, deepest - 1) for k, v in value.items()}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return getattr(value, "__name__", None) or str(value)


def call_settings(function: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call, with the defaults of the function's signature."""
    try:
        defaults = {k: p.default for k, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    except (TypeError, ValueError):  # C functions may have no signature
        defaults = {}
    return {k: plain(v) for k, v in {**defaults, **kwargs}.items()}


def module_settings(module: Any) -> dict[str, Any]:
    """Return the constructor arguments that a PyTorch module stores as attributes, and whether it has a bias."""
    names = inspect.signature(type(module).__init__).parameters
    out = {k: plain(v) for k, v in vars(module).items() if k in names}
    if "bias" in names and not isinstance(out.get("bias"), bool):
        out["bias"] = getattr(module, "bias", None) is not None
    return out
