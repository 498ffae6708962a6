"""The loss of generated images: distances from the statistics of batch norms, and terms of the outputs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chipfit.errors import ConfigError, DataError
from chipfit.generation.options import Generation
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear
from chipfit.graph.placement import inputs_on, placed

#: least deviation of a channel in the relative distance, as a share of the layer's: dead channels have almost none
_LEAST = 0.1
_TINY = 1e-8

#: mean and mean square of each channel
Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Target:
    """The statistics that a batch norm learned of its input."""

    name: str
    value: str  #: its input in the graph
    mean: Tensor  #: [C]
    deviation: Tensor  #: [C], with the epsilon of the layer
    unit: Tensor  #: [C], what a relative distance is counted in

    def distance(self, moments: Moments, kind: str) -> Tensor:
        """Return the mean over channels of the squared differences of mean and deviation.

        Args:
            moments: [C], or [N, C] for each image.
            kind: "absolute", or "relative" to the learned deviation of a channel.

        Source: Haroush et al. 2020, arXiv:1912.01274, section 3.
        """
        mean, square = moments
        deviation = (square - mean.square()).clamp(min=0).add(_TINY).sqrt()
        unit: Any = self.unit if kind == "relative" else 1.0
        apart = ((mean - self.mean) / unit).square() + ((deviation - self.deviation) / unit).square()
        return apart.mean()


def targets(graph: Graph, types: Collection[str] = ()) -> list[Target]:
    """Return the batch norms of a graph that have learned statistics, which are on the device of the graph.

    Args:
        types: class names of the user's layers; () for all.

    Raises:
        DataError: There are none.
        ConfigError: None is of these classes.
    """
    found = [n for n in graph.nodes if n.op == "BatchNorm" and all(map(graph.is_weight, n.inputs[3:5]))]
    if not found:
        allowed = "a network with batch norms that keep running statistics"
        hint = "give real calibration data; or the network before its batch norms were folded into other layers"
        what = "Data generation requires a model with at least one BatchNorm layer"
        raise DataError(what, got=f"{len(graph.nodes)} operators, no batch norm", allowed=allowed, hint=hint)
    chosen = [n for n in found if not types or n.layer_type in types]
    if not chosen:
        names = ", ".join(sorted({n.layer_type for n in found}))
        raise ConfigError("The model has no batch norm of these classes", got=", ".join(types), allowed=names)
    return [_target(graph, n) for n in chosen]


def _target(graph: Graph, n: Node) -> Target:
    mean, variance = (graph.weights[i].detach().float() for i in n.inputs[3:5] if i is not None)
    deviation = (variance + n.attrs["eps"]).sqrt()
    unit = deviation.clamp(min=_LEAST * float(deviation.square().mean().sqrt()))
    return Target(n.display_name, n.data, *inputs_on(graph.device, [mean, deviation, unit]))


def untrained(found: list[Target]) -> bool:
    """Return whether all batch norms have the statistics that they were made with, 0 and 1."""
    return all(not t.mean.any() and bool(((t.deviation - 1).abs() < 1e-2).all()) for t in found)


def moments(x: Tensor, of_each: bool) -> Moments:
    """Return mean and mean square of each channel of a value [N, C, ...].

    Args:
        of_each: those of each image; a value [N, C] has them over the batch all the same.
    """
    x = x.float()
    axes = [d for d in range(x.dim()) if d != 1 and not (of_each and d == 0 and x.dim() > 2)]
    return x.mean(axes), x.square().mean(axes)


class Loss:
    """The loss of one batch, and the statistics of the other batches where all images count together."""

    def __init__(self, graph: Graph, options: Generation) -> None:
        self.options, self.targets = options, targets(graph, options.norms)
        self.last = last_linear(graph, options.last) if options.output == "regularized_spread" else None
        self.term_weights = [options.first_weight, *(1.0 for _ in self.targets[1:])]
        self._others: dict[int, list[Moments]] = {}  #: by batch, one for each target
        self.last_weight = placed(graph).weights[self.last.weight].detach() if self.last is not None else None

    @property
    def values(self) -> list[str]:
        """Values of the graph that the loss reads, besides the outputs."""
        return [*{t.value: None for t in self.targets}, *([self.last.data] if self.last is not None else [])]

    def __call__(self, env: Mapping[str, Any], outputs: list[Any], batch: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and the part of it that comes from batch norms.

        Args:
            env: values by name.
            batch: the number of the batch.
        """
        own = [moments(env[t.value], self.options.statistics == "image") for t in self.targets]
        joint = own
        if self.options.statistics == "all":
            others = [o for k, o in self._others.items() if k != batch]
            joint = [_mean_of([mine, *(o[i] for o in others)]) for i, mine in enumerate(own)]
            self._others[batch] = [(m.detach(), s.detach()) for m, s in own]
        apart = [t.distance(m, self.options.distance) for t, m in zip(self.targets, joint, strict=True)]
        total = sum(w * a for w, a in zip(self.term_weights, apart, strict=True)) / sum(self.term_weights)
        assert isinstance(total, Tensor)
        if self.options.output == "none":
            return total, total
        return total + self.options.output_weight * self._of_outputs(env, outputs), total

    def _of_outputs(self, env: Mapping[str, Any], outputs: list[Any]) -> Tensor:
        scores = [o.float().reshape(len(o), -1) for o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
        spread = torch.stack([(o.amax(1) - o.amin(1)).mean() for o in scores])
        if self.options.output == "spread":
            return -spread.sum()
        inverse = (1 / (spread + 1e-6)).sum()
        return inverse if self.last is None else inverse + self._range_error(env[self.last.data].float(), scores[0])

    def _range_error(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return how far the extreme scores are from half of the greatest that the last layer could give."""
        assert self.last_weight is not None
        size = x.reshape(len(x), -1).norm(dim=1) * self.last_weight.float().flatten(1).norm(dim=1).mean()
        return ((scores.amax(1).abs() - size / 2).abs() + (scores.amin(1).abs() - size / 2).abs()).mean()


def last_linear(graph: Graph, types: Collection[str] = ()) -> Node:
    """Return the last layer of a graph with a product of weights, perhaps of some classes of the user's layers.

    Raises:
        ConfigError: There is none.
    """
    linear = [n for n in graph.nodes if is_linear(graph, n)]
    found = [n for n in linear if not types or n.layer_type in types]
    if not found:
        what = "output='regularized_spread' needs a convolution or a linear layer"
        names = ", ".join(sorted({n.layer_type for n in linear}))
        allowed = f"layers of {names}" if linear else "output='spread'"
        raise ConfigError(f"{what} of these classes" if linear else what, got=", ".join(types) or None, allowed=allowed)
    return found[-1]


def _mean_of(parts: list[Moments]) -> Moments:
    return torch.stack([m for m, _ in parts]).mean(0), torch.stack([s for _, s in parts]).mean(0)
