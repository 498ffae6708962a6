"""Biases as MCT's layers have them: one for all calls of a layer, corrected unless a rule leaves it out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from chipfit.decide.overrides import Layers
from chipfit.graph.folds import move_beta
from chipfit.graph.ir import Graph, Node
from chipfit.mct.core.network_editor import EditRule
from chipfit.result import Result


def with_one_bias_a_layer(result: Result) -> Result:
    """Return a result in which all calls of a layer add one bias, the mean of theirs, if the chip adds it in float."""
    graph, tensors = result.graph.copy(), dict(result.plan.tensors)
    calls, renamed = defaultdict[tuple[str, str], list[Node]](list), dict[str, str]()
    for n in graph.nodes:
        if n.layer and n.bias in graph.weights and result.plan.stored(n.bias) is None:
            calls[n.layer, n.weight].append(n)
    for nodes in calls.values():
        first, *others = dict.fromkeys(n.bias or "" for n in nodes)
        if others:
            mean = torch.stack([graph.weights[b].detach() for b in (first, *others)]).mean(0)
            move_beta(graph, nodes[0].weight, mean)
            graph.weights[first], renamed = mean, renamed | dict.fromkeys(others, first)
    graph.nodes = [n.reading(renamed) for n in graph.nodes]
    for name in renamed:
        graph.trainable.discard(name)
        del graph.weights[name]
        tensors.pop(name, None)
    edges = frozenset((renamed.get(v, v), n) for v, n in result.plan.float_edges)
    return replace(result, graph=graph, plan=replace(result.plan, tensors=tensors, float_edges=edges))


def with_own_biases(result: Result, rules: Sequence[EditRule]) -> Result:
    """Return a result in which layers that rules leave out of bias correction have the biases from before it.

    A layer without a bias, which got one of zeros to be corrected, has none.

    Raises:
        UnknownNameError: a filter selects no layer.
    """
    corrects = dict[str, bool]()
    for rule in sorted(rules, key=lambda r: r.action.final):
        if rule.action.bias_correction is not None:
            nodes = Layers(result.graph).match(rule.filter)
            corrects |= dict.fromkeys((n.name for n in nodes), rule.action.bias_correction)
    graph, before, notes = result.graph.copy(), result.decision.graph, list(result.plan.rewrites)
    tensors = dict(result.plan.tensors)
    for node in (n for n in graph.nodes if corrects.get(n.name) is False and n.bias in before.weights):
        if torch.equal(graph.weights[node.weight], before.weights[node.weight]):
            fold = before.folds.get(node.weight)
            names = [node.bias, fold.beta if fold else None]
            graph.weights |= {name: before.weights[name] for name in names if name in before.weights}
            graph.folds |= {node.weight: fold} if fold else {}
            notes = [n for n in notes if not n.startswith(f"corrected the bias of '{node.display_name}' ")]
            notes.append(f"the bias of '{node.display_name}' is not corrected: a rule of the network editor")
            if _has_no_bias_of_its_own(graph, node):
                graph.nodes[graph.nodes.index(node)] = node.with_(inputs=node.inputs[:2])
                graph.trainable.discard(node.bias or "")
                del graph.weights[node.bias or ""]
                tensors.pop(node.bias or "", None)
    edges = frozenset(e for e in result.plan.float_edges if e[0] in graph.values or e[0] in graph.weights)
    plan = replace(result.plan, tensors=tensors, rewrites=tuple(notes), float_edges=edges)
    return replace(result, graph=graph, plan=plan)


def _has_no_bias_of_its_own(graph: Graph, node: Node) -> bool:
    """Return whether a layer was made without a bias, and nothing added to the zeros that stand for it."""
    without = False in (node.config.get("bias"), node.config.get("use_bias"))
    return without and not graph.weights[node.bias or ""].any() and len(graph.users()[node.bias or ""]) == 1
