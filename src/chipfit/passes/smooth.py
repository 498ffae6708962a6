"""Smoothing: make large channels in front of linear layers smaller, and the weights that read them larger."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from chipfit.calibration.collect import Channels, Need, with_channel_stats
from chipfit.decide.assignment import Assignment
from chipfit.graph.edit import insert_behind
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.graph.linear import in_groups, is_linear
from chipfit.operators.table import OPS
from chipfit.passes.rewriting import Adapted, Readers, Stats, scale_between
from chipfit.registry import OFF, Repair, Setting, register

_DOES = (
    "share of a norm's range that its readers' weights take over, 0 to 1, or \"auto\", of norms and other operators "
    "what is predicted to lose least. None: auto where they run in float"
)
_SETTING = Setting("smooth", None, _DOES, "alpha", choices=("auto", OFF), numbers=True)
#: operators that scale each channel themselves
#: values of alpha among which "auto" chooses
_SHARES = tuple(k / 20 for k in range(6, 20))
#: "auto" smooths only if the predicted error falls by at least this factor
_GAIN = 1.2
#: least decrease of the error for which "auto" inserts a multiplication, relative to the power of the readers' results
#: for independent channels: about four times the error of 8-bit rounding of normal numbers up to four deviations
_WORTH = 3e-4


def with_channels(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """Add the channel statistics of the values that linear layers read, from norms and other operators, to `needs`."""
    return with_channel_stats(needs, {s.value: -1 for s in _sites(graph) if not s.refusal}, squares=True)


def worth_a_trial(settings: Any, graph: Graph, assignment: Assignment) -> str | None:
    """Return "auto" if some operator that runs in float is read on one grid for all channels, else None."""
    return "auto" if any(_on_grid(assignment, s) for s in _sites(graph) if not s.refusal) else None


class _Site:
    """An operator and the linear layers that read its result."""

    def __init__(self, readers: Readers, node: Node) -> None:
        graph = readers.graph
        self.node, (self.value, consumers) = node, readers.after_identities(node)
        layers = [n for n in consumers if n.facts.kind == "linear" and n.data == self.value]
        self.layers = [n for n in layers if is_linear(graph, n)]
        self.parameters = [i for i in node.inputs[1:] if i is not None] if _is_vector_norm(node) else []
        returned = not {node.output, self.value}.isdisjoint(graph.outputs)
        #: the factors need a multiplication of their own: the operator has no scale, or others read its result too
        self.multiplied = not _is_vector_norm(node) or len(self.layers) < len(consumers) or returned
        self.refusal = self._refusal(graph, consumers)  #: why it cannot be smoothed
        if not self.refusal:
            self.refusal = readers.why_fixed(*([] if self.multiplied else [node]), *self.layers)

    def _refusal(self, graph: Graph, consumers: Sequence[Node]) -> str:
        if not self.layers:  # the channels of convolutions are on another axis
            dynamic = any(n.op == DYNAMIC for n in consumers)
            return "its readers find a range each time they run" if dynamic else "no linear layer reads it"
        if not all(map(graph.is_weight, self.parameters)):
            return "its scale or shift is computed"
        if _is_vector_norm(self.node) and not (
            self.node.operand("w") and len(self.node.attrs["normalized_shape"]) == 1
        ):
            return "it has no scale for each channel"
        return ""


def _is_vector_norm(n: Node) -> bool:
    return n.facts.norm == "vectors"


def _sites(graph: Graph) -> Iterator[_Site]:
    """Find norms, and other operators that linear layers read, except those that `equalize` can cross."""
    readers = Readers(graph)
    for n in graph.nodes:
        row = OPS.get(n.op)
        if _is_vector_norm(n) or not (row is None or row.kind or row.moves or row.homogeneous or len(n.outputs) > 1):
            site = _Site(readers, n)
            if _is_vector_norm(n) or site.layers:
                yield site


@register(
    "pass",
    "smooth",
    stage="adapt",
    after=("softmax_shift",),
    setting=_SETTING,
    collects=with_channels,
    recalibrates=True,
    trial_value=worth_a_trial,
    repair=Repair("auto"),
)
def smooth(graph: Graph, assignment: Assignment, stats: Stats, *, alpha: float | str = "auto") -> Adapted:
    """Divide channel c between a norm and the linear layers behind it by s_c, without changing the network.

    s_c = t_c^alpha / r_c^(1 - alpha), gamma' = gamma / s, beta' = beta / s, W' = W s, with t_c the largest |value| of
    channel c in calibration and r_c the largest |weight| that reads it. A channel that is zero on one side keeps its
    scale. If others read the norm too, as residual additions do, the norm stays and a multiplication by 1 / s is
    inserted in front of the linear layers, and so for a GELU or any other operator without a scale of its own.

    The weights that read a value then determine what its errors cost: histograms weight channel c by sum_o W'[o, c]^2.

    Args:
        graph: before its tensors are planned.
        assignment: the values that are stored on grids.
        stats: with the channels that `with_channels` adds; not modified.
        alpha: a number for all norms, or "auto": for each norm or other operator that runs in float and is read on a
            grid, the value with the least predicted error, if that is small enough compared with no smoothing.

    Returns:
        The graph, the statistics without the histograms of scaled values, and one note per operator or refusal.

    Source: Xiao et al. 2022, arXiv:2211.10438, eq. 4.
    """
    graph, stats, notes = graph.copy(), dict(stats), list[str]()
    for site in _sites(graph):
        known = stats.get(site.value)
        channels = known.channels if known is not None else None
        why = site.refusal or ("" if channels is not None else "its channels were not collected")
        why = why or ("" if alpha != "auto" or _on_grid(assignment, site) else "no grid holds all of its channels")
        if not _is_vector_norm(site.node) and (alpha != "auto" or why):
            continue
        if why or known is None or channels is None:
            notes.append(f"'{site.node.display_name}' is not smoothed: {why}")
            continue
        weights = [in_groups(n, graph.weights[n.weight].detach().double())[0] for n in site.layers]
        widest = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
        if isinstance(alpha, str):
            error = PredictedError(assignment, site.value, site.layers, weights, known.count, channels)
            s = min((_scales(channels, widest, a) for a in _SHARES), key=error)
            before, after = error(torch.ones_like(s)), error(s)
            if after * _GAIN > before or before - after < _WORTH * error.power * site.multiplied:
                why = f"it would take {before:.3g} of error to {after:.3g}"
                notes.append(f"'{site.node.display_name}' is not smoothed: {why}")
                continue
            predicted = f": predicted error {after:.3g}, {before:.3g} without"
        else:
            s, predicted = _scales(channels, widest, alpha), ""
        changed = [v for v in _scale(graph, site, s) if v in stats or site.multiplied]
        matters = torch.cat(weights).mul(s).square().sum(0).float()
        stats |= {v: replace(known.by_channel(0.0, 1 / s), name=v, error_weights=matters) for v in changed}
        how = ", by a multiplication" + ": others read it too" * _is_vector_norm(site.node) if site.multiplied else ""
        layers = ", ".join(repr(n.display_name) for n in site.layers)
        notes.append(f"smoothed '{site.node.display_name}' for {layers}{how}{predicted}")
    return Adapted(graph, stats, notes)


def _scale(graph: Graph, site: _Site, s: torch.Tensor) -> set[str]:
    """Divide the channels between an operator and its linear layers by s, in place; return the scaled values."""
    scale_between(graph, [], site.layers, s)
    if site.multiplied:
        node, value = site.node, site.value
        names = f"{value}_smooth", f"{node.name}.smooth", f"{node.name}_smooth"
        origin = {"layer": node.layer, "source": node.source}
        return {insert_behind(graph, value, "Mul", 1 / s, site.layers, names=names, **origin)}
    for name in site.parameters:
        graph.weights[name] = (graph.weights[name].detach() / s).to(graph.weights[name].dtype)
    return {site.node.output, site.value}


def _on_grid(assignment: Assignment, site: _Site) -> bool:
    """Check that an operator runs in float, or may, and that its readers use one grid for all channels."""
    slot = assignment.tensors.get(site.value)
    weights = [assignment.tensors.get(n.weight) for n in site.layers]
    stored = slot is not None and slot.axis is None and None not in weights
    name = site.node.name
    return stored and (assignment.nodes[name].exec == "float" or "whole" in assignment.modes.get(name, ()))


def _scales(channels: Channels, widest: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return s of equation 4, [C], from the largest |weight| that reads each channel, [C]."""
    live = (channels.peak > 0) & (widest > 0)
    return torch.where(live, channels.peak**alpha / torch.where(live, widest, 1.0) ** (1 - alpha), 1.0)


class PredictedError:
    """The predicted mean squared error of the layers' results as a function of s [C], for ranges that clip nothing.

    Rounding to a uniform grid of scale d makes an error of d^2 / 12 in each number, of data and of weights.
    """

    def __init__(
        self,
        assignment: Assignment,
        value: str,
        layers: Sequence[Node],
        weights: Sequence[torch.Tensor],
        count: int,
        channels: Channels,
    ) -> None:
        """Args: value: what the layers read. weights: [O, C] of each layer. count: of numbers in calibration."""
        assert channels.squares is not None, "`with_channels` adds them"
        self.grid = assignment.tensors[value].format
        #: of each layer, how its weight is stored, |weight|, [O, C] or [1, C] for one scale, and its square, [C]
        self.layers = []
        for n, w in zip(layers, weights, strict=True):
            slot, size = assignment.tensors[n.weight], w.abs()
            rows = size.amax(0, keepdim=True) if slot.axis is None else size
            self.layers.append((slot, rows, w.square().sum(0), len(w)))
        self.low, self.high = channels.low, channels.high
        self.squares = channels.squares * (len(channels.low) / count)
        #: mean square of the layers' results, if channels are independent
        self.power = float(sum((self.squares @ w.square().T).sum() for w in weights))

    def __call__(self, s: torch.Tensor) -> float:
        low, high = float((self.low / s).min().clamp_max(0)), float((self.high / s).max().clamp_min(0))
        span = 2 * max(-low, high) if self.grid.zero == 0 and low < 0 else high - low
        data = (span / (2**self.grid.bits - 1)) ** 2
        power = (self.squares / s.square()).sum()
        total = 0.0
        for slot, size, energy, count in self.layers:
            steps = (2 * (size * s).amax(1) / (2**slot.format.bits - 1)).square().expand(count)
            total += float(data * (energy * s.square()).sum() + power * steps.sum()) / 12
        return total
