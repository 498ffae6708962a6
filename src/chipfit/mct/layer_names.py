"""The names that layers and quantizers have in MCT's quantized PyTorch models."""

from chipfit.graph.ir import Node
from chipfit.result import Result

_HOLDER = "_activation_holder_quantizer"


def give_layer_names(result: Result) -> None:
    """Let the model of a result find its parts by MCT's names as well, if it is a PyTorch module.

    "features.0.0" is `features_0_0`, and `features_0_0_bn` if a batch norm was folded into it; a function has the name
    of its operator, such as `add_1`. The quantizer of a result is `features_0_2_activation_holder_quantizer`.
    """
    model, graph = result.model, result.graph
    if not hasattr(model, "path_of_quantizer"):
        return
    weights = {name.rpartition(".")[0] for name in graph.weights}
    aliases: dict[str, str | Node] = {}
    makers = {o: _names_of(n, result) for n in graph.nodes for o in n.outputs}
    for node in graph.nodes:
        for name in _names_of(node, result):
            aliases.setdefault(name, node.layer if node.layer in weights else node)
    for value in (*graph.inputs, *makers):
        if result.plan.quantized(value):
            for name in makers.get(value, [value]):
                aliases[name + _HOLDER] = model.path_of_quantizer(value)
    model.aliases = {name: part for name, part in aliases.items() if name not in model._modules}


def _names_of(node: Node, result: Result) -> list[str]:
    """Return the names of a layer, the one with the batch norm that was folded into it last."""
    own = (node.layer or node.name).replace(".", "_")
    return [own, f"{own}_bn"] if node.operand("w") in result.graph.folds else [own]
