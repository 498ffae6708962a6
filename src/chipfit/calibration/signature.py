"""The inputs that a model takes, by its signature."""

import inspect
from collections.abc import Iterable
from typing import Any

#: names of optional arguments that hold labels, from which the model computes a loss
LABEL_NAMES = "label labels target targets".split()


def expected_inputs(model: Any) -> int | None:
    """Return the number of positional inputs of a model; None if it is unknown."""
    if hasattr(model, "inputs"):  # a Keras model
        return len(model.inputs)
    parameters = _positional(model)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return len(parameters)


def is_optional(model: Any, count: int) -> bool:
    """Return whether a model that takes `count` positional arguments can be called without the last of them."""
    parameters = _positional(model)
    if parameters is None or hasattr(model, "inputs"):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return len(required) < count


def names_label(model: Any, count: int) -> bool:
    """Return whether the name of the last of `count` positional arguments is that of a label."""
    parameters = _positional(model) or []
    return count <= len(parameters) and parameters[count - 1].name in LABEL_NAMES


def optional_labels(model: Any, names: Iterable[str]) -> set[str]:
    """Return those of the named arguments of a PyTorch model that hold labels and need not be given."""
    parameters, empty = {p.name: p for p in _parameters(model) or ()}, inspect.Parameter.empty
    return {n for n in names if n in LABEL_NAMES and n in parameters and parameters[n].default is not empty}


def _parameters(model: Any) -> Iterable[inspect.Parameter] | None:
    """Return the parameters of a PyTorch model, or None if they are unknown."""
    try:
        return inspect.signature(model.forward).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return None


def _positional(model: Any) -> list[inspect.Parameter] | None:
    """Return the positional parameters of a PyTorch model, or None if they are unknown."""
    parameters = _parameters(model)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return None if parameters is None else [p for p in parameters if p.kind in kinds]
