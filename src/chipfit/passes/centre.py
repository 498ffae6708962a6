"""Centring: signed tensors lose the mean of each channel, which the biases of their readers take."""

from collections.abc import Mapping

import torch

from chipfit.calibration.collect import Need, with_channel_stats
from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED, bias_or_zero, in_groups, is_linear, with_bias
from chipfit.passes.equalize_groups import worth_a_trial
from chipfit.passes.rewriting import Adapted, Readers, Stats, adds_equal_shapes
from chipfit.registry import OFF, Repair, Setting, register

_DOES = "signed tensors lose each channel's mean to their readers' biases. None: where few bits gain by it"
_SETTING = Setting("centre", None, _DOES, choices=("always", OFF))


def with_means(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """Add the channel statistics of every tensor that can be centred to `needs`."""
    return with_channel_stats(needs, {v: 1 for v, why in why_not_centred(graph, Readers(graph)).items() if not why})


@register(
    "pass",
    "centre",
    stage="adapt",
    after=("softmax_shift",),
    setting=_SETTING,
    collects=with_means,
    recalibrates=True,
    trial_value=worth_a_trial,
    repair=Repair("always"),
)
def centre(graph: Graph, assignment: Assignment, stats: Stats) -> Adapted:
    """Subtract the mean m of each channel from the results of linear operators, without changing the network.

    b1' = b1 - m in the operator that computes x, b2' = b2 + W2 m in its readers. This is exact if every reader is a
    linear operator without padding, or an addition whose result has only such readers. A sum is shifted by the shifts
    of its operands: the operand that is computed last is shifted by the rest of the sum's mean.

    Args:
        graph: before its tensors are planned.
        assignment: refusals are noted for the tensors that it stores.
        stats: with the channels that `with_means` adds; not modified.

    Returns:
        The graph, the statistics without the histograms of shifted values, and one note per operator or refusal.
    """
    graph, stats, notes = graph.copy(), dict(stats), list[str]()
    readers = Readers(graph)
    refused = why_not_centred(graph, readers)
    removed, bias_changes = dict[str, torch.Tensor](), dict[str, torch.Tensor]()  # by value, by node

    def change_bias(node: Node, by: torch.Tensor) -> None:
        bias_changes[node.name] = bias_changes.get(node.name, 0.0) + by

    for node in graph.nodes:
        v = node.output
        if refused.get(v, "-"):
            if v in refused and v in assignment.tensors:
                notes.append(f"the result of '{node.display_name}' is not centred: {refused[v]}")
            continue
        if is_linear(graph, node):
            m = _mean(stats, v)
            total = readers.only(v)
            if total is not None and not is_linear(graph, total):
                others = [i for i in graph.activations(total) if i != v]
                if all(i in removed or refused.get(i, "-") for i in others):
                    m = _mean(stats, total.output) - sum((removed[i] for i in others if i in removed), torch.zeros(()))
            change_bias(node, -m)
            notes.append(f"centred the result of '{node.display_name}' by at most {float(m.abs().max()):.3g}")
        else:
            m = sum((removed[i] for i in graph.activations(node) if i in removed), torch.zeros(()))
        removed[v], stats[v] = m, stats[v].by_channel(-m, 1.0)
        for reader in (n for n in readers.of(v) if is_linear(graph, n)):
            w = in_groups(reader, graph.weights[reader.weight].detach().double())
            w = w.reshape(*w.shape[:3], -1).sum(3)  # [g, O/g, I/g]
            change_bias(reader, (w @ m.view(len(w), -1, 1)).flatten())
    for k, node in enumerate(graph.nodes):
        if node.name in bias_changes:
            graph.nodes[k] = with_bias(graph, node, bias_or_zero(graph, node) + bias_changes[node.name])
    return Adapted(graph, stats, notes)


def why_not_centred(graph: Graph, readers: Readers) -> dict[str, str]:
    """Return why no constant may be subtracted from a value, "" if one may: results of linear operators and sums."""
    out = dict[str, str]()

    def of_reader(reader: Node) -> str:
        if not is_linear(graph, reader):
            return out.get(reader.output, f"{reader.op} '{reader.display_name}' reads it")
        padded = any(p for pair in reader.attrs.get("padding", ()) for p in pair)
        if padded or reader.op in TRANSPOSED:
            return f"{reader.op} '{reader.display_name}' would need another bias at every position"
        return _why_bias_is_fixed(readers, reader)

    for node in reversed(graph.nodes):
        if not is_linear(graph, node) and not adds_equal_shapes(graph, node):
            continue
        why = _why_bias_is_fixed(readers, node) if is_linear(graph, node) else ""
        for reader in readers.of(node.output):
            why = why or of_reader(reader)
        out[node.output] = f"'{node.output}' is an output of the model" if node.output in graph.outputs else why
    for node in graph.nodes:  # a sum can be shifted if one of its operands can
        adds = out.get(node.output) == "" and not is_linear(graph, node)
        if adds and all(out.get(i, "-") for i in graph.activations(node)):
            out[node.output] = "no operand of the sum can lose anything"
    return out


def _why_bias_is_fixed(readers: Readers, node: Node) -> str:
    """Return why no constant can be added to the bias of a linear operator; "" if one can."""
    if not node.bias:
        return f"'{node.display_name}' has no bias"
    return readers.why_channels_fixed(node)


def _mean(stats: Stats, name: str) -> torch.Tensor:
    mean = stats[name].mean
    assert mean is not None, "`with_means` adds it"
    return mean
