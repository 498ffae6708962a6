"""Replacement of layers of a PyTorch model before capture: the action `ReplaceLayer` of the network editor."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from chipfit.errors import ConfigError, UnknownNameError, UnsupportedError, first_line
from chipfit.facade.core.network_editor import EditRule, ReplaceLayer
from chipfit.facade.target_platform.layers import member_of
from chipfit.frameworks import framework_of
from chipfit.graph.config import module_settings
from chipfit.graph.ir import Node


def replace_layers(model: Any, rules: Iterable[EditRule]) -> Any:
    """Return a copy of `model` with replaced layers; return `model` itself if no rule replaces any.

    A rule's function receives weights as `{name: tensor}`, and the constructor arguments that the module keeps.

    Raises:
        UnknownNameError: a filter selects no module; lists similar names.
        ConfigError: a rule's function did not return weights and attributes that fit its layer type.
        UnsupportedError: the model is not a PyTorch model.
    """
    replacing = [(r.filter, r.action) for r in rules if isinstance(r.action, ReplaceLayer)]
    if not replacing:
        return model
    if framework_of(model) != "torch":
        got = type(model).__name__
        hint = "replace the layer, then quantize"
        raise UnsupportedError("ReplaceLayer supports PyTorch models only", got=got, hint=hint)
    model = copy.deepcopy(model)
    for layer_filter, action in replacing:
        named = model.named_modules(remove_duplicate=False)
        leaves = {name: m for name, m in named if name and not any(True for _ in m.children())}
        selected = [name for name, m in leaves.items() if layer_filter.match(_node(name, m))]
        if not selected:
            raise UnknownNameError("module for the filter", layer_filter.name, leaves)
        new: dict[int, torch.nn.Module] = {}  # by id: a module under two names is replaced once
        for name in selected:
            old = leaves[name]
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, new.setdefault(id(old), _replacement(name, old, action)))
    return model


def _node(name: str, module: torch.nn.Module) -> Node:
    """Return a module as the node that it becomes in the graph, for filters."""
    op = next(iter(member_of(type(module)).op), "")
    return Node(name.replace(".", "_"), op, (), (), {}, name, type(module).__name__, "", module_settings(module))


def _replacement(name: str, old: torch.nn.Module, action: ReplaceLayer) -> torch.nn.Module:
    given = {k: v.detach().clone() for k, v in old.state_dict().items()}
    try:
        weights, attributes = action.get_params_and_weights_fn(given, **module_settings(old))
        new = action.layer_type(**attributes)
        new.load_state_dict({k: torch.as_tensor(v) for k, v in weights.items()})
    except (TypeError, ValueError, RuntimeError, AttributeError) as e:
        allowed = "get_params_and_weights_fn(weights, **attributes) returns (weights, attributes) that fit the layer"
        what = f"'{name}' cannot become a {action.layer_type.__name__}"
        raise ConfigError(what, got=first_line(e), allowed=allowed) from e
    return new.train(old.training)
