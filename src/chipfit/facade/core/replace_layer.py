"""Layers of a PyTorch model exchanged for others before it is read: the action `ReplaceLayer` of the network editor."""

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
    """A copy of `model` with the layers exchanged that the rules mean; `model` itself where no rule exchanges any.

    Weights are handed over as `{name: tensor}`, attributes as the constructor arguments that the module keeps.

    Raises:
        UnknownNameError: a filter that means no module; lists near names.
        ConfigError: the function of a rule returned something else than weights and attributes that fit its layer type.
        UnsupportedError: not a PyTorch model.
    """
    wanted = [(r.filter, r.action) for r in rules if isinstance(r.action, ReplaceLayer)]
    if not wanted:
        return model
    if framework_of(model) != "torch":
        got = type(model).__name__
        raise UnsupportedError("ReplaceLayer works on PyTorch models", got=got, hint="replace the layer, then quantize")
    model = copy.deepcopy(model)
    for chosen, action in wanted:
        named = model.named_modules(remove_duplicate=False)
        leaves = {name: m for name, m in named if name and not any(True for _ in m.children())}
        found = [name for name, m in leaves.items() if chosen.match(_node(name, m))]
        if not found:
            raise UnknownNameError("module for the filter", chosen.name, leaves)
        made: dict[int, torch.nn.Module] = {}  # a module that is used twice stays one
        for name in found:
            old = leaves[name]
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made.setdefault(id(old), _replacement(name, old, action)))
    return model


def _node(name: str, module: torch.nn.Module) -> Node:
    """What the module will be in the graph, as far as filters ask."""
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
        raise ConfigError(
            f"'{name}' cannot become a {action.layer_type.__name__}", got=first_line(e), allowed=allowed
        ) from e
    return new.train(old.training)
