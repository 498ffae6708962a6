"""Traces of quantized models by torch.fx, with one node for each operator, quantizer and weight.

torch.fx calls `forward` with proxies. A kernel that reads shapes could not run on them, and a quantizer would become a
dozen nodes, so that both are leaves of a trace.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import Proxy
from torch.utils import _pytree as pytree

from chipfit.engine.kernels import call, run_operator
from chipfit.engine.trees import load_tree
from chipfit.graph.ir import OPAQUE, Node


def inputs_of(spec: Mapping[str, Any], args: Any, kwargs: Any) -> list[Any]:
    """Return the inputs of a graph, as items of the proxies `args` and `kwargs` of a call; `spec` is its `in_spec`."""
    leaves = pytree.tree_unflatten(list(range(spec["leaves"])), load_tree(spec))
    paths = [path for path, _ in pytree.tree_flatten_with_path(leaves)[0]]
    return [pytree.key_get((args, kwargs), paths[k]) for k in spec["tensors"]]


def weight_node(proxy: Proxy, name: str) -> Proxy:
    """Return the node that reads a weight of the model, in the trace of `proxy`."""
    return proxy.tracer.create_proxy("get_attr", name, (), {})


def module_node(module: nn.Module, proxy: Proxy) -> Proxy:
    """Return the node of a call of a module."""
    tracer: Any = proxy.tracer  # of a class that knows modules
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (proxy,), {})  # type: ignore[no-any-return]


def operator_node(proxy: Proxy, node: Node, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sequence[Proxy]:
    """Return the results of an operator, whose node has the operator's name in the network."""
    function, args, kwargs = call(node, inputs)
    if node.op != OPAQUE:
        function, args, kwargs = run_operator, (node.op, *args), dict(attrs)
    out = proxy.tracer.create_proxy("call_function", function, tuple(args), dict(kwargs), name=node.name)
    return [out] if len(node.outputs) == 1 else [out[k] for k in range(len(node.outputs))]
