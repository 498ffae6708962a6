"""Records of options that refuse unknown names and values of the wrong kind, when they are made and whenever one is set."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar, dataclass_transform

from chipfit.errors import ConfigError, UnknownNameError

C = TypeVar("C")


def option(default: Any = MISSING, *, kind: type | tuple[type, ...] | None = None, factory: Any = MISSING) -> Any:
    """A field of an options record.

    Args:
        default, factory: as in `dataclasses.field`.
        kind: classes that a value may have; those of the default when omitted. None is allowed where it is the default.
    """
    return field(default=default, default_factory=factory, metadata={"kind": kind})


@dataclass_transform(field_specifiers=(option, field))
def options(cls: type[C]) -> type[C]:
    """Class decorator: a dataclass with the same arguments, whose every value is checked.

    Raises (from the constructor, and where a field is set):
        UnknownNameError: no option of that name.
        ConfigError: a value of the wrong kind.
    """
    made = dataclass(cls)
    known = {f.name: f for f in fields(made)}  # type: ignore[arg-type]  # what dataclass returns is one
    init = made.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 -- it becomes the class's own
        for name in kwargs:
            if name not in known:
                raise UnknownNameError(f"option of {cls.__name__}", name, known)
        init(self, *args, **kwargs)

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807 -- the same
        if name not in known:
            raise UnknownNameError(f"option of {cls.__name__}", name, known)
        f = known[name]
        default = f.default if f.default is not MISSING else None
        kind = f.metadata.get("kind") or (type(default) if default is not None else None)
        if kind is not None and not (value is None and f.default is None) and not _is(value, kind):
            raise ConfigError(
                f"The option '{name}' of {cls.__name__} is of the wrong kind", got=repr(value), allowed=_words(kind)
            )
        object.__setattr__(self, name, value)

    __init__.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]  # help() and editors show it
    made.__init__, made.__setattr__ = __init__, __setattr__  # type: ignore[method-assign, assignment]
    return made


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def _words(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    plain = {bool: "True or False", int: "an integer", float: "a number", list: "a list"}
    return " or ".join(
        ", ".join(map(str, k))
        if issubclass(k, Enum)
        else plain.get(k, k.__name__ if k.__module__ == "builtins" else f"a {k.__name__}")
        for k in kinds
    )
