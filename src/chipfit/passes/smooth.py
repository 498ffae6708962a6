"""Smoothing: large channels of what linear layers read become small, and the weights that read them large."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from chipfit.calibration.collect import Channels, Need, TensorStats, with_channel_stats
from chipfit.decide.assignment import Assignment
from chipfit.graph.edit import new_name, replace_node
from chipfit.graph.ir import DYNAMIC, Graph, Node, Users
from chipfit.graph.linear import in_groups, is_linear, own, scale_inputs
from chipfit.graph.ops import OPS
from chipfit.registry import OFF, Setting, register

_DOES = (
    "share of a norm's range that its readers' weights take over, 0 to 1, or \"auto\", of norms and other operators "
    "what is predicted to lose least. None: auto where they run in float"
)
_SETTING = Setting("smooth", None, _DOES, "alpha", choices=("auto", OFF), numbers=True)
#: what scales each channel itself
_NORMS = frozenset({"LayerNorm", "RMSNorm"})
#: the shares among which "auto" chooses
_SHARES = tuple(k / 20 for k in range(6, 20))
#: how many times smaller the predicted error must be for "auto" to smooth
_GAIN = 1.2
#: what it must be smaller by, where that takes a multiplication of every number, as a share of what the readers make of
#: independent channels: some four times what 8 bits lose of normal numbers up to four deviations
_WORTH = 3e-4


def with_channels(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """`needs`, and the channels of what linear layers read of norms and other operators."""
    return with_channel_stats(needs, {s.value: -1 for s in _sites(graph) if not s.why}, squares=True)


def worth_a_trial(settings: Any, graph: Graph, assignment: Assignment) -> str | None:
    """Whether some operator that runs in float is read on one grid for all channels."""
    return "auto" if any(_on_grid(assignment, s) for s in _sites(graph) if not s.why) else None


class _Site:
    """An operator, the value that its readers find, and the linear layers among them; `why` it cannot be smoothed."""

    def __init__(self, graph: Graph, users: Users, node: Node) -> None:
        self.node, (self.value, around) = node, _behind(users, node)
        self.readers = [n for n in around if n.op == "Linear" and is_linear(graph, n) and n.data == self.value]
        self.names = [i for i in node.inputs[1:] if i is not None] if node.op in _NORMS else []
        #: nothing in front of the readers can take the factors, or others read the value too
        self.shared = node.op not in _NORMS or len(self.readers) < len(around)
        self.shared = self.shared or not {node.output, self.value}.isdisjoint(graph.outputs)
        self.why = ""
        if node.op in _NORMS and not (node.operand("w") and len(node.attrs["normalized_shape"]) == 1):
            self.why = "it has no scale for each channel"
        if not all(map(graph.is_weight, self.names)):
            self.why = "its scale or shift is computed"
        if not self.readers:  # convolutions have channels elsewhere
            moment = any(n.op == DYNAMIC for n in around)
            self.why = "its readers find a range each time they run" if moment else "no linear layer reads it"
        for n in self.readers if self.shared else (node, *self.readers):
            self.why = self.why or own(graph, users, n)


def _sites(graph: Graph) -> Iterator[_Site]:
    """Of norms, and of other operators that compute what linear layers read; what a factor passes is `equalize`'s."""
    users = graph.users()
    for n in graph.nodes:
        row = OPS.get(n.op)
        if n.op in _NORMS or not (row is None or row.kind or row.moves or row.homogeneous or len(n.outputs) > 1):
            site = _Site(graph, users, n)
            if n.op in _NORMS or site.readers:
                yield site


@register(
    "pass",
    "smooth",
    stage="adapt",
    after=("softmax_shift",),
    collects=with_channels,
    again=True,
    tries=worth_a_trial,
    setting=_SETTING,
)
def smooth(
    graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats], *, alpha: float | str = "auto"
) -> tuple[Graph, dict[str, TensorStats], list[str]]:
    """Divide channel c between a norm and the linear layers behind it by s_c, without changing the network.

    s_c = t_c^alpha / r_c^(1 - alpha), gamma' = gamma / s, beta' = beta / s, W' = W s, with t_c the largest |value| of
    channel c that calibration saw and r_c the largest |weight| that reads it. A channel that is zero on one side stays
    as it is. Where others read the norm too, as residual additions do, it stays, and a multiplication by 1 / s stands
    before the linear layers; so it does behind a GELU or any other operator that has no scale to take it.

    Errors in the values then cost by the weights that read them: histograms count channel c by sum_o W'[o, c]^2.

    Args:
        graph: before its tensors are planned.
        assignment: says which values are stored on grids.
        stats: with what `with_channels` asks for; left as they are.
        alpha: one for all norms, or "auto": for each norm or other operator that runs in float and is read on a grid
            the one with the least predicted error, if that is small enough beside what it is without.

    Returns:
        The graph, the statistics without histograms of what was scaled, and one note per operator or refusal.

    Source: Xiao et al. 2022, arXiv:2211.10438, eq. 4.
    """
    graph, stats, notes = graph.copy(), dict(stats), []
    for site in _sites(graph):
        known = stats.get(site.value)
        seen = known.channels if known is not None else None
        why = site.why or ("" if seen is not None else "its channels were not collected")
        why = why or ("" if alpha != "auto" or _on_grid(assignment, site) else "no grid holds all of its channels")
        if site.node.op not in _NORMS and (alpha != "auto" or why):
            continue
        if why or known is None or seen is None:
            notes.append(f"'{site.node.who}' is not smoothed: {why}")
            continue
        weights = [in_groups(n, graph.weights[n.weight].detach().double())[0] for n in site.readers]
        if isinstance(alpha, str):
            error = _Error(assignment, site, weights, known.count, seen)
            s = min((_scales(seen, weights, a) for a in _SHARES), key=error)
            before, after = error(torch.ones_like(s)), error(s)
            if after * _GAIN > before or before - after < _WORTH * error.power * site.shared:
                notes.append(f"'{site.node.who}' is not smoothed: it would take {before:.3g} of error to {after:.3g}")
                continue
            said = f": predicted error {after:.3g}, {before:.3g} without"
        else:
            s, said = _scales(seen, weights, alpha), ""
        for n in site.readers:
            graph.weights[n.weight] = scale_inputs(n, graph.weights[n.weight].detach(), s)
        if site.shared:
            changed = [_multiplied(graph, site, 1 / s)]
        else:
            changed = [v for v in {site.node.output, site.value} if v in stats]
            for name in site.names:
                graph.weights[name] = (graph.weights[name].detach() / s).to(graph.weights[name].dtype)
        matters = torch.cat(weights).mul(s).square().sum(0).float()
        stats |= {v: replace(known.by_channel(0.0, 1 / s), name=v, matters=matters) for v in changed}
        how = ", by a multiplication" + ": others read it too" * (site.node.op in _NORMS) if site.shared else ""
        notes.append(f"smoothed '{site.node.who}' for {', '.join(repr(n.who) for n in site.readers)}{how}{said}")
    return graph, stats, notes


def _on_grid(assignment: Assignment, site: _Site) -> bool:
    """Whether an operator runs in float, or may, and its readers find its result on one grid for all channels."""
    slot = assignment.tensors.get(site.value)
    weights = [assignment.tensors.get(n.weight) for n in site.readers]
    stored = slot is not None and slot.axis is None and None not in weights
    name = site.node.name
    return stored and (assignment.nodes[name].exec == "float" or "whole" in assignment.modes.get(name, ()))


def _scales(seen: Channels, weights: Sequence[torch.Tensor], alpha: float) -> torch.Tensor:
    """Equation 4, [C]; weights [O, C] each."""
    widest = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    live = (seen.peak > 0) & (widest > 0)
    return torch.where(live, seen.peak**alpha / torch.where(live, widest, 1.0) ** (1 - alpha), 1.0)


class _Error:
    """Predicted mean squared error of the readers' results for scales [C], with ranges that clip nothing.

    Rounding to a uniform grid of step d makes an error of d^2 / 12 in each number, of data and of weights.
    """

    def __init__(
        self, assignment: Assignment, site: _Site, weights: Sequence[torch.Tensor], count: int, seen: Channels
    ) -> None:
        """weights: [O, C] of each reader; count: of numbers that calibration saw."""
        assert seen.squares is not None, "`with_channels` asks for them"
        self.grid, self.weights = assignment.tensors[site.value].format, weights
        self.slots = [assignment.tensors[n.weight] for n in site.readers]
        self.low, self.high, self.squares = seen.low, seen.high, seen.squares * (len(seen.low) / count)
        #: mean square of the readers' results, if channels are independent
        self.power = float(sum((self.squares @ w.square().T).sum() for w in weights))

    def __call__(self, s: torch.Tensor) -> float:
        low, high = float((self.low / s).min().clamp_max(0)), float((self.high / s).max().clamp_min(0))
        span = 2 * max(-low, high) if self.grid.zero == 0 and low < 0 else high - low
        data = (span / (2**self.grid.bits - 1)) ** 2
        power = (self.squares / s.square()).sum()
        total = 0.0
        for w, slot in zip(self.weights, self.slots, strict=True):
            scaled = w * s
            peak = scaled.abs().amax() if slot.axis is None else scaled.abs().amax(1)
            steps = (2 * peak / (2**slot.format.bits - 1)).square().expand(len(w))
            total += float(data * scaled.square().sum() + power * steps.sum()) / 12
        return total


def _behind(users: Users, node: Node) -> tuple[str, list[Node]]:
    """An operator's result, behind what hands it on as it is, and who reads that."""
    value, readers = node.output, users.get(node.output, [])
    while len(readers) == 1 and readers[0].op in ("Identity", "Dropout"):
        value = readers[0].output
        readers = users.get(value, [])
    return value, readers


def _multiplied(graph: Graph, site: _Site, factors: torch.Tensor) -> str:
    """The readers find the value times a factor for each channel, whose name is returned."""
    node, value = site.node, site.value
    name, constant = new_name(graph, f"{value}_smooth"), new_name(graph, f"{node.name}.smooth")
    graph.values[name] = replace(graph.values[value], name=name)
    graph.weights[constant] = factors.to(torch.float32)
    mul = Node(
        new_name(graph, f"{node.name}_smooth"), "Mul", (value, constant), (name,), {}, node.layer, "", node.source
    )
    maker = graph.producers()[value]
    replace_node(graph, maker, maker, mul)
    for n in site.readers:
        here = graph.node(n.name)
        replace_node(graph, here, here.with_(inputs=tuple(name if i == value else i for i in here.inputs)))
    return name
