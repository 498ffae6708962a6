"""Centring: signed tensors lose the mean of each channel, which the biases of their readers take."""

from collections.abc import Mapping

import torch

from chipfit.calibration.collect import Need, TensorStats, with_channel_stats
from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph, Node, Users
from chipfit.graph.linear import TRANSPOSED, bias_or_zero, in_groups, is_linear, on_axis_1, own, with_bias
from chipfit.graph.paths import adds_alike
from chipfit.passes.equalize_groups import worth_a_trial
from chipfit.registry import OFF, Setting, register

_DOES = "signed tensors lose each channel's mean to their readers' biases. None: where few bits gain by it"
_SETTING = Setting("centre", None, _DOES, choices=("always", OFF))


def with_means(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """`needs`, and the channels of every tensor that can be centred."""
    return with_channel_stats(needs, {v: 1 for v, why in _movable(graph).items() if not why})


@register(
    "pass",
    "centre",
    stage="adapt",
    after=("softmax_shift",),
    collects=with_means,
    again=True,
    tries=worth_a_trial,
    setting=_SETTING,
)
def centre(
    graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats]
) -> tuple[Graph, dict[str, TensorStats], list[str]]:
    """Take the mean m of each channel out of what linear operators make, without changing the network.

    b1' = b1 - m where x is made, b2' = b2 + W2 m where it is read. Exact where every reader is a linear operator
    without padding, or an addition whose result has only such readers. What a sum loses is what its operands lose: the
    one that is made last takes the rest of the mean of the sum.

    Args:
        graph: before its tensors are planned.
        assignment: refusals are noted for tensors that it stores.
        stats: with what `with_means` asks for; left as they are.

    Returns:
        The graph, the statistics without histograms of what has moved, and one note per operator or refusal.
    """
    graph, stats, notes = graph.copy(), dict(stats), []
    users, refused = graph.users(), _movable(graph)
    lost, gained = dict[str, torch.Tensor](), dict[str, torch.Tensor]()  # by values, by the biases of nodes

    def gain(node: Node, more: torch.Tensor) -> None:
        gained[node.name] = gained[node.name] + more if node.name in gained else more

    for node in graph.nodes:
        v = node.output
        if refused.get(v, "-"):
            if v in refused and v in assignment.tensors:
                notes.append(f"the result of '{node.who}' is not centred: {refused[v]}")
            continue
        if is_linear(graph, node):
            m = _mean(stats, v)
            total = users[v][0] if len(users[v]) == 1 and not is_linear(graph, users[v][0]) else None
            others = [i for i in graph.activations(total) if i != v] if total is not None else []
            if total is not None and all(i in lost or refused.get(i, "-") for i in others):
                m = _mean(stats, total.output) - sum((lost[i] for i in others if i in lost), torch.zeros(()))
            gain(node, -m)
            notes.append(f"centred the result of '{node.who}' by at most {float(m.abs().max()):.3g}")
        else:
            m = sum((lost[i] for i in graph.activations(node) if i in lost), torch.zeros(()))
        lost[v], stats[v] = m, stats[v].by_channel(-m, 1.0)
        for reader in (n for n in users[v] if is_linear(graph, n)):
            w = in_groups(reader, graph.weights[reader.weight].detach().double())
            w = w.reshape(*w.shape[:3], -1).sum(3)  # [g, O/g, I/g]
            gain(reader, (w @ m.view(len(w), -1, 1)).flatten())
    for k, node in enumerate(graph.nodes):
        if node.name in gained:
            graph.nodes[k] = with_bias(graph, node, bias_or_zero(graph, node) + gained[node.name])
    return graph, stats, notes


def _movable(graph: Graph) -> dict[str, str]:
    """Results of linear operators and of sums of such: why they cannot lose a constant, "" where they can."""
    users, out = graph.users(), dict[str, str]()

    def takes(reader: Node) -> str:
        if not is_linear(graph, reader):
            return out.get(reader.output, f"{reader.op} '{reader.who}' reads it")
        padded = any(p for pair in reader.attrs.get("padding", ()) for p in pair)
        if padded or reader.op in TRANSPOSED:
            return f"{reader.op} '{reader.who}' would need another bias at every position"
        return _bias(graph, users, reader)

    for node in reversed(graph.nodes):
        if not is_linear(graph, node) and not adds_alike(graph, node):
            continue
        why = _bias(graph, users, node) if is_linear(graph, node) else ""
        for reader in users.get(node.output, ()):
            why = why or takes(reader)
        out[node.output] = f"'{node.output}' is an output of the model" if node.output in graph.outputs else why
    for node in graph.nodes:  # a sum loses what one of its operands can
        if (
            not is_linear(graph, node)
            and out.get(node.output) == ""
            and all(out.get(i, "-") for i in graph.activations(node))
        ):
            out[node.output] = "no operand of the sum can lose anything"
    return out


def _bias(graph: Graph, users: Users, node: Node) -> str:
    """Why the bias of a linear operator can take no constant."""
    if not node.bias:
        return f"'{node.who}' has no bias"
    return own(graph, users, node) or ("" if on_axis_1(graph, node) else f"'{node.who}' has its channels elsewhere")


def _mean(stats: Mapping[str, TensorStats], name: str) -> torch.Tensor:
    mean = stats[name].mean
    if mean is None:
        raise ValueError(f"nothing is known of the channels of '{name}'")
    return mean
