"""Canonical operators of a framework's layers and functions.

Entries are recognised by name, without importing PyTorch, Keras or TensorFlow: `tf.add`, `keras.layers.Add`,
`keras.ops.add`, `torch.add`, `operator.add` and "Add" are all the operator Add.
"""

import functools
from collections.abc import Iterable
from typing import Any

from chipfit.errors import ModelingError, UnknownNameError
from chipfit.files import package_data
from chipfit.operators.table import GROUPS, OPS, read_column
from chipfit.platform.filters import Member


@functools.cache
def layer_table() -> dict[str, Any]:
    """Return the data of `layers.yaml`."""
    return package_data("chipfit.mct.target_platform", "layers.yaml")  # type: ignore[no-any-return]  # a table


@functools.cache
def _operators(kind: str) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return name -> (operators, whether the user's layer must have exactly this name)."""
    rows = (row.split() for row in layer_table()[kind].split("|"))
    members = {name: [o for word in words for o in _members(word)] for name, *words in rows}
    return {name: (tuple(o for o in ops if o in OPS), "!" in ops) for name, ops in members.items()}


def _members(word: str) -> Iterable[str]:
    """Return the operators of a "@group" in the order of the table; any other word by itself."""
    return [op for op in OPS if op in GROUPS[word]] if word in GROUPS else (word,)


#: a layer or function, in lower case without underscores -> its operators, and whether others become these, too
_LAYERS: dict[str, tuple[tuple[str, ...], bool]] = {}


def _enter_cell(op: str, name: str) -> None:
    """Enter a cell of the table of operators: names of layers and functions that may become the operator.

    "*" marks the first operator of a name that has several. "!" marks a name whose operators other layers become, too,
    so that the user's layer must have this very name.
    """
    for word in name.split():
        layer = word.rstrip("*!")
        ops, exact = _LAYERS.get(layer, ((), False))
        _LAYERS[layer] = (op, *ops) if "*" in word else (*ops, op), exact or "!" in word


read_column("layers", _enter_cell, _LAYERS)


def operators_of_set(name: str) -> tuple[str, ...] | None:
    """Return the operators of a set without attached layers by its name; None for an unknown name."""
    return _operators("sets").get(normalize_name(name), (None,))[0]


def operator_named(name: str) -> str:
    """Return the first operator of the name of a layer or function; "" for an unknown name."""
    return _LAYERS.get(normalize_name(name), (("",), False))[0][0]


def normalize_name(name: str) -> str:
    """Return a name in lower case, without underscores and TensorFlow's version suffix."""
    return name.lower().replace("_v2", "").replace("_", "")


def name_of(entry: Any) -> str:
    """Return the name of a class, function, filter or name in messages and files."""
    return getattr(entry, "__name__", str(entry))


def package_of(entry: Any) -> str:
    """Return "torch", "keras", ... for a class or function; "" for text and C functions of PyTorch."""
    home = getattr(entry, "__module__", None) or getattr(getattr(entry, "__objclass__", None), "__module__", None) or ""
    return home.partition(".")[0]


def member_of(entry: Any) -> Member:
    """Return the operator-set member of a layer.

    Args:
        entry: a class (`torch.nn.Conv2d`, `keras.layers.ReLU`, a module of the user), a function (`torch.add`,
            `tf.nn.relu`, `keras.ops.add`, `operator.add`, `torch.Tensor.add`), or a name.

    Raises:
        ModelingError: a function or name is not a known operator; lists similar names.
    """
    if isinstance(entry, Member):
        return entry
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", "")
    key, package = normalize_name(name), package_of(entry)
    if name in layer_table()["inputs"]:
        return Member(type=name)
    if name in OPS:
        return Member(op=(name,))
    of_keras = _operators("keras_operators") if package in ("keras", "tensorflow", "tf_keras") else {}
    known = {**_LAYERS, **of_keras}
    if key in known:
        ops, exact = known[key]
        return Member(op=ops, type=name) if exact else Member(op=ops, name=name)
    if isinstance(entry, type) or package in ("torch", "keras", "tensorflow", "tf_keras"):
        return Member(type=name)  # a composite layer: the operators inside it
    in_set = operators_of_set(name)
    if in_set is not None:
        return Member(op=in_set)
    near = UnknownNameError("layer or operator", name or repr(entry), [*OPS, *_LAYERS])
    raise ModelingError(near.what, got=repr(entry), **near.choices)


def members_of_set(name: str) -> tuple[Member, ...]:
    """Return the members of a set without attached layers by its name (Conv, FullyConnected, Add ...).

    Raises:
        ModelingError: the name is not a known operator.
    """
    ops = operators_of_set(name)
    if ops is not None:
        return tuple(Member(op=(o,)) for o in ops)
    try:
        return (member_of(name),)
    except ModelingError as e:
        what = f"Operator set '{name}' has no layers attached, and its name is not a known operator"
        hint = "; ".join(filter(None, [e.hint, f"OperationsSetToLayers('{name}', [...])"]))
        raise ModelingError(what, allowed=e.allowed, hint=hint) from None
