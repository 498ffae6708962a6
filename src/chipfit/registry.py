"""One registry for everything that is added by dropping in a file: range rules, runtimes, exporters."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from chipfit.errors import UnknownNameError

T = TypeVar("T")

_ENTRIES: dict[str, dict[str, Any]] = {}

#: where the entries of each kind live; every module of the package is imported on the first look-up
_HOMES = {
    "range": "chipfit.ranges",
    "exporter": "chipfit.export",
    "runtime": "chipfit.runtimes",
    "kernels": "chipfit.simulate",
    "pass": "chipfit.passes",
}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class or function decorator: file the decorated object under `kind` and `name`."""

    def enter(thing: T) -> T:
        _ENTRIES.setdefault(kind, {})[name] = thing
        return thing

    return enter


@functools.cache
def _import_all(kind: str) -> None:
    home = importlib.import_module(_HOMES[kind])
    for module in pkgutil.iter_modules(home.__path__):
        importlib.import_module(f"{home.__name__}.{module.name}")


def _load(kind: str) -> dict[str, Any]:
    _import_all(kind)
    return _ENTRIES.get(kind, {})


def registered(kind: str) -> dict[str, Any]:
    """Every entry of one kind by name, sorted."""
    return dict(sorted(_load(kind).items()))


def lookup(kind: str, name: str) -> Any:
    """The entry `name` of `kind`.

    Raises:
        UnknownNameError: listing near names.
    """
    entries = _load(kind)
    if name not in entries:
        raise UnknownNameError(kind, name, entries)
    return entries[name]
