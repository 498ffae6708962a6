"""Smoothing: large channels of layer norms' outputs become small in the norm, and their readers' weights large."""

import torch

from chipfit.graph.ir import Graph
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
    leave three standard deviations. A channel that is zero on one side stays as it is.

    Source: Xiao et al. 2022, arXiv:2211.10438, eq. 4.
    """
    graph, notes = graph.copy(), []
    users = graph.users()
    for norm in (n for n in graph.nodes if n.op == "LayerNorm"):
        readers = users.get(norm.output, [])
        names = [i for i in norm.inputs[1:] if i is not None]
        why = (
            "" if norm.operand("w") and len(norm.attrs["normalized_shape"]) == 1 else "it has no scale for each channel"
        )
        if not all(map(graph.is_weight, names)):
            why = "its scale or shift is computed"
        last = all(n.op == "Linear" and is_linear(graph, n) for n in readers)  # convolutions have channels elsewhere
        if not readers or norm.output in graph.outputs or not last:
            why = "others than linear layers read it"
        for n in (norm, *readers):
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
        for name in names:
            graph.weights[name] = (graph.weights[name].detach() / s).to(graph.weights[name].dtype)
        for n in readers:
            graph.weights[n.weight] = scale_inputs(n, graph.weights[n.weight].detach(), s)
        notes.append(f"smoothed '{norm.who}' for {', '.join(repr(n.who) for n in readers)}")
    return graph, notes
