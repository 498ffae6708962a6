"""The names that layers and quantizers have in MCT's quantized PyTorch models."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from chipfit.graph.ir import Node
from chipfit.result import Result

_HOLDER = "_activation_holder_quantizer"


class LayerNames(dict[str, Any]):
    """A table of parts of a model by name; copies of it lack the user's layers, whose classes may not be importable."""

    def __reduce__(self) -> Any:
        return LayerNames, ({k: v for k, v in self.items() if not isinstance(v, nn.Module)},)


def give_layer_names(result: Result, float_model: Any = None) -> None:
    """Give the PyTorch model of a result aliases by which its parts have the names of MCT, too.

    "features.0.0" is `features_0_0`, and `features_0_0_bn` if a batch norm was folded into it; a function has the name
    of its operator, such as `add_1`. The quantizer of a result is `features_0_2_activation_holder_quantizer`. Layers
    with neither weights nor quantizers are found too.

    Args:
        float_model: the float module, or an earlier model of the result; None: the user's own layers get no names.
    """
    model, graph = result.model, result.graph
    if not hasattr(model, "path_of_quantizer"):
        return
    names = LayerNames(_own_layers(float_model))
    weights = {name.rpartition(".")[0] for name in graph.weights}
    makers = {o: names_of(n, result) for n in graph.nodes for o in n.outputs}
    for node in graph.nodes:
        wrapped = node.layer in weights and result.plan.quantized(node.operand("w"))
        for name in names_of(node, result):
            names.setdefault(name, node.layer if wrapped else node)
    for value in (*graph.inputs, *makers):
        if result.plan.quantized(value):
            for name in makers.get(value, [value]):
                names[name + _HOLDER] = model.path_of_quantizer(value)
    model.aliases = names


def _own_layers(model: Any) -> Mapping[str, Any]:
    """Return the layers without weights of classes of the user's own, by name."""
    if hasattr(model, "aliases"):
        return {k: v for k, v in model.aliases.items() if isinstance(v, nn.Module)}
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    own = {n.replace(".", "_"): m for n, m in modules if n and getattr(nn, type(m).__name__, None) is not type(m)}
    return {name: m for name, m in own.items() if not any(True for _ in (*m.children(), *m.parameters()))}


def names_of(node: Node, result: Result) -> list[str]:
    """Return the names of a layer, the one with the batch norm that was folded into it last."""
    own = (node.layer or node.name).replace(".", "_")
    return [own, f"{own}_bn"] if node.operand("w") in result.graph.folds else [own]
