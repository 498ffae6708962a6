"""What a framework knows about a layer or a call, as data that filters compare and files hold."""

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import Any

#: lists and mappings inside each other; a list that holds itself has no end
_DEEPEST = 20


def plain(value: Any, deepest: int = _DEEPEST) -> Any:
    """A value of a framework's configuration as JSON data: what has a name by its name, lists as tuples.

    What lies deeper than `deepest` lists and mappings is "...".
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
    """Keyword arguments of a call, defaults filled in where the function tells them."""
    try:
        defaults = {k: p.default for k, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    except (TypeError, ValueError):  # C functions tell no signature
        defaults = {}
    return {k: plain(v) for k, v in {**defaults, **kwargs}.items()}


def module_settings(module: Any) -> dict[str, Any]:
    """Constructor arguments that a PyTorch module keeps as attributes, and whether it has a bias."""
    names = inspect.signature(type(module).__init__).parameters
    out = {k: plain(v) for k, v in vars(module).items() if k in names}
    if "bias" in names and not isinstance(out.get("bias"), bool):
        out["bias"] = getattr(module, "bias", None) is not None
    return out
