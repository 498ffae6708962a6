"""Smoothing: large channels of layer norms' outputs become small, and the weights of the linear layers behind large."""

from dataclasses import replace

import torch

from chipfit.graph.builder import new_name, replace_node
from chipfit.graph.ir import Graph, Node, Users
from chipfit.graph.linear import in_groups, is_linear, own, scale_inputs
from chipfit.registry import Setting, register

#: standard deviations of a normalized value that its range is taken for
_REACH = 3.0


@register(
    "pass",
    "smooth",
    stage="rewrite",
    setting=Setting(
        "smooth", None, "share of a layer norm's range that its readers' weights take over, 0 to 1; try 0.5", "alpha"
    ),
)
def smooth(graph: Graph, *, alpha: float = 0.5) -> tuple[Graph, list[str]]:
    """Divide channel c between a layer norm and the linear layers behind it by s_c, without changing the network.

    s_c = t_c^alpha / r_c^(1 - alpha), gamma' = gamma / s, beta' = beta / s, W' = W s, with r_c the largest |weight| of
    input channel c over all readers and t_c = |beta_c| + 3 |gamma_c|, which needs no data: normalized values rarely
    leave three standard deviations. A channel that is zero on one side stays as it is. Where others read the norm too,
    as residual additions do, it stays, and a multiplication by 1 / s stands before the linear layers.

    Source: Xiao et al. 2022, arXiv:2211.10438, eq. 4.
    """
    graph, notes = graph.copy(), []
    users = graph.users()
    for norm in [n for n in graph.nodes if n.op == "LayerNorm"]:
        value, around = _behind(users, norm)
        readers = [n for n in around if n.op == "Linear" and is_linear(graph, n) and n.data == value]
        shared = len(readers) < len(around) or not {norm.output, value}.isdisjoint(graph.outputs)
        names = [i for i in norm.inputs[1:] if i is not None]
        why = (
            "" if norm.operand("w") and len(norm.attrs["normalized_shape"]) == 1 else "it has no scale for each channel"
        )
        if not all(map(graph.is_weight, names)):
            why = "its scale or shift is computed"
        if not readers:  # convolutions have channels elsewhere
            why = "no linear layer reads it"
        for n in readers if shared else (norm, *readers):
            why = why or own(graph, users, n)
        if why:
            notes.append(f"'{norm.who}' is not smoothed: {why}")
            continue
        gamma, *beta = (graph.weights[i].detach().double() for i in names)
        reach = _REACH * gamma.abs() + sum(b.abs() for b in beta)
        weights = [in_groups(n, graph.weights[n.weight].detach().double())[0] for n in readers]
        widest = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
        live = (reach > 0) & (widest > 0)
        s = torch.where(live, reach**alpha / torch.where(live, widest, 1.0) ** (1 - alpha), 1.0)
        for n in readers:
            graph.weights[n.weight] = scale_inputs(n, graph.weights[n.weight].detach(), s)
        if shared:
            _multiplied(graph, norm, value, readers, 1 / s)
            users = graph.users()
        else:
            for name in names:
                graph.weights[name] = (graph.weights[name].detach() / s).to(graph.weights[name].dtype)
        how = ", by a multiplication: others read it too" if shared else ""
        notes.append(f"smoothed '{norm.who}' for {', '.join(repr(n.who) for n in readers)}{how}")
    return graph, notes


def _behind(users: Users, norm: Node) -> tuple[str, list[Node]]:
    """The norm's result, behind what hands it on as it is, and who reads that."""
    value, readers = norm.output, users.get(norm.output, [])
    while len(readers) == 1 and readers[0].op in ("Identity", "Dropout"):
        value = readers[0].output
        readers = users.get(value, [])
    return value, readers


def _multiplied(graph: Graph, norm: Node, value: str, readers: list[Node], factors: torch.Tensor) -> None:
    """These readers find the value times a factor for each channel."""
    name, constant = new_name(graph, f"{value}_smooth"), new_name(graph, f"{norm.name}.smooth")
    graph.values[name] = replace(graph.values[value], name=name)
    graph.weights[constant] = factors.to(torch.float32)
    mul = Node(
        new_name(graph, f"{norm.name}_smooth"), "Mul", (value, constant), (name,), {}, norm.layer, "", norm.source
    )
    maker = graph.producers()[value]
    replace_node(graph, maker, maker, mul)
    for n in readers:
        here = graph.node(n.name)
        replace_node(graph, here, here.with_(inputs=tuple(name if i == value else i for i in here.inputs)))
