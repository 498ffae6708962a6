"""One streaming pass over the calibration data: statistics of every tensor, memory bounded, no sample kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chipfit.calibration.data import no_data
from chipfit.calibration.histogram import Histogram, in_memory_order
from chipfit.engine.run import run
from chipfit.errors import DataError, first_line
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS

#: a histogram counts every element up to this many per batch; of larger tensors a block of 32 out of every so many
#: elements in memory order, of the first period with at most `_COUNTED` or of the last: periods are prime, so that the
#: blocks start at every channel, whatever their number
_SMALL, _BLOCK, _PERIODS, _COUNTED = 1 << 14, 32, (353, 709, 1409, 2819), 1 << 16
#: share of the newest batch in the moving averages
_SMOOTH = 0.1
#: a sum or mean below this share of its greatest term is what rounding in float32 leaves of terms that cancel (16 times
#: the machine's epsilon)
_NOISE = 2.0**-19
#: the operators whose results are sums or means
_SUMS = frozenset({"GlobalAvgPool", "AvgPool", "AdaptiveAvgPool", "Mean", "Sum"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What to collect for one tensor; the range always."""

    histogram: bool = True
    #: what a number of each channel, on the last axis, counts in the histogram, [C] float32; None: once
    weights: torch.Tensor | None = None
    channel_axis: int | None = None  #: also mean, least and greatest value of every channel along this axis
    squares: bool = False  #: and its mean square


def with_channel_stats(needs: Mapping[str, Need], axes: Mapping[str, int], *, squares: bool = False) -> dict[str, Need]:
    """`needs`, and the channels of these tensors along these axes."""

    def more(value: str, axis: int) -> Need:
        need = needs.get(value, Need(histogram=False))
        return replace(need, channel_axis=axis, squares=squares or need.squares)

    return {**needs, **{v: more(v, axis) for v, axis in axes.items()}}


@dataclass(frozen=True, slots=True)
class Channels:
    """What calibration saw of the channels of a tensor, [C] float64 each."""

    total: torch.Tensor  #: sum
    low: torch.Tensor
    high: torch.Tensor
    squares: torch.Tensor | None = None  #: sum of squares, where `Need.squares` asked for it

    @property
    def peak(self) -> torch.Tensor:
        """Largest magnitude."""
        return torch.maximum(-self.low, self.high)

    def merged(self, other: Channels) -> Channels:
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        squares = None if self.squares is None or other.squares is None else self.squares + other.squares
        return Channels(self.total + other.total, low, high, squares)

    def mapped(self, count: int, plus: torch.Tensor | float, times: torch.Tensor | float) -> Channels:
        """Of (x + plus) * times, where x has `count` elements."""
        each = count / self.total.numel()
        total, squares = self.total + plus * each, self.squares
        if squares is not None:
            squares = (squares + plus * (2 * self.total + plus * each)) * times**2
        return Channels(total * times, (self.low + plus) * times, (self.high + plus) * times, squares)


@dataclass(slots=True)
class TensorStats:
    """What calibration saw of one tensor."""

    name: str
    low: float = math.inf
    high: float = -math.inf
    smooth_low: float = 0.0  #: moving averages of each batch's extremes
    smooth_high: float = 0.0
    count: int = 0  #: elements seen
    batches: int = 0
    histogram: Histogram | None = None
    channels: Channels | None = None  #: where `Need.channel_axis` asked for them
    #: how much an error in each channel, on the last axis, matters, [C] float32, by which the histogram counts them
    matters: torch.Tensor | None = None
    #: values of the registered statistics that range rules declare, by their names
    extras: Mapping[str, Any] = field(default_factory=dict)
    #: what was computed from these statistics, by what was asked; several steps ask for the same range
    answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def peak(self) -> float:
        """Largest magnitude."""
        return max(-self.low, self.high)

    @property
    def mean(self) -> torch.Tensor | None:
        """Mean of every channel, [C] float64; None unless `Need.channel_axis` asked for it."""
        total = None if self.channels is None else self.channels.total
        return None if total is None else total * (total.numel() / self.count)

    def shifted(self, by: float) -> TensorStats:
        """What calibration would have seen of x + `by`."""
        ends = {name: getattr(self, name) + by for name in ("low", "high", "smooth_low", "smooth_high")}
        histogram = None if self.histogram is None else self.histogram.shifted(by)
        channels = None if self.channels is None else self.channels.mapped(self.count, by, 1.0)
        return replace(self, histogram=histogram, channels=channels, **ends)

    def by_channel(self, plus: torch.Tensor | float, times: torch.Tensor | float) -> TensorStats:
        """Of (x + plus) * times, [C] each, times > 0; the histogram is to be collected again.

        Raises:
            ValueError: nothing is known of the channels.
        """
        if self.channels is None:
            raise ValueError(f"nothing is known of the channels of '{self.name}'")
        new = self.channels.mapped(self.count, plus, times)
        low, high = float(new.low.min()), float(new.high.max())
        return replace(self, low=low, high=high, smooth_low=low, smooth_high=high, histogram=None, channels=new)

    def as_zeros(self) -> TensorStats:
        """What calibration would have seen of as many zeros."""
        histogram = None if self.histogram is None else Histogram()
        if histogram is not None:
            histogram.add(torch.zeros(1), 0.0)
        channels = None if self.channels is None else self.channels.mapped(self.count, 0.0, 0.0)
        new = replace(self, histogram=histogram, channels=channels)
        new.low = new.high = new.smooth_low = new.smooth_high = 0.0
        return new

    def update(self, x: torch.Tensor, need: Need) -> None:
        """Add one batch of the tensor, float32, any shape.

        Raises:
            ValueError: NaN or infinity.
        """
        flat = in_memory_order(x)
        self.answers.clear()
        new = None
        if need.channel_axis is not None:
            others = [k for k in range(x.dim()) if k != need.channel_axis % x.dim()]
            new = Channels(*(f(x, others).double() for f in (torch.sum, torch.amin, torch.amax)))
            if need.squares:
                new = replace(new, squares=x.square().sum(others).double())
        ends = torch.aminmax(flat) if new is None else (new.low.min(), new.high.max())
        low, high = (float(v) for v in ends)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("NaN or infinite values")
        if self.batches == 0:
            self.smooth_low, self.smooth_high = low, high
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.smooth_low += _SMOOTH * (low - self.smooth_low)
        self.smooth_high += _SMOOTH * (high - self.smooth_high)
        self.count += x.numel()
        self.batches += 1
        if new is not None:
            self.channels = new if self.channels is None else self.channels.merged(new)
        if need.histogram:
            if self.histogram is None:
                self.histogram = Histogram()
            counts = need.weights
            if counts is not None:
                flat, counts = x.reshape(-1), _some(counts.expand(x.shape).reshape(-1))
            self.histogram.add(_some(flat), max(-low, high), counts)


def _some(flat: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that a histogram counts."""
    if flat.numel() <= _SMALL:
        return flat
    every = next((p for p in _PERIODS if flat.numel() // p * _BLOCK <= _COUNTED), _PERIODS[-1])
    return flat[: flat.numel() // every * every].view(-1, every)[:, :_BLOCK].reshape(-1)


def collect(
    graph: Graph, batches: Iterable[Sequence[torch.Tensor]], *, tensors: Mapping[str, Need], seed: int = 0
) -> dict[str, TensorStats]:
    """Run the float graph over all batches and gather statistics of `tensors`.

    Convolution networks run in channels-last layout, which changes speed and not results. Of values [N, T, ...] only
    the places count that the padding mask, if there is one, does not call padding.

    Raises:
        DataError: no batch at all, or NaN or infinity, naming the layer where it first appears.
    """
    stats = {name: TensorStats(name) for name in tensors}
    layers = {o: n for n in graph.nodes for o in n.outputs}
    words: torch.Tensor | None = None
    count = 0

    def see(name: str, x: Any) -> None:
        try:
            stats[name].update(without_padding(x, words).float(), tensors[name])
        except ValueError:
            node = layers.get(name)
            who = f"layer '{node.who}' ({node.op})" if node else f"input '{name}'"
            hint = "check the weights of that layer and the scaling of the inputs"
            what = f"Batch {count} makes NaN or infinite values in {who}"
            raise DataError(what, where=node.source if node else "", hint=hint) from None

    def hook(node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for o, x in zip(node.outputs, outputs, strict=False):
            if o in stats and x.numel():
                see(o, x)
        return outputs

    def laid_out(batch: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:  # so that only the run holds what is copied
        for name, x in zip(graph.inputs, batch, strict=True):
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
            if name in stats and x.numel():
                see(name, x)
            yield x

    with torch.inference_mode():
        for batch in batches:
            words = valid_token_mask(graph, batch)
            _run_checked(graph, batch, laid_out(batch), hook, count)
            count += 1
    if count == 0:
        raise no_data()
    for name in (n for n, s in stats.items() if not s.batches):  # such as a cache that is empty yet: as if it were 0
        stats[name].update(torch.zeros(1), Need(histogram=tensors[name].histogram))
    return without_noise(graph, stats)


def without_noise(graph: Graph, stats: Mapping[str, TensorStats]) -> dict[str, TensorStats]:
    """The statistics, with zeros for tensors that hold rounding errors alone, of which no machine computes the same.

    Those are sums and means of terms that cancel, as behind a normalisation of the same axes, and what such a tensor is
    the only data of.
    """
    out, noise = dict(stats), set[str]()
    for n in graph.nodes:
        if n.op not in OPS or not (OPS[n.op].homogeneous or OPS[n.op].moves):
            continue
        data = [i for i in n.inputs if i is not None and graph.is_float(i)]
        seen = [stats[v] for v in (n.data, *n.outputs) if v in stats]
        cancels = n.op in _SUMS and len(seen) == 2 and 0 < seen[1].peak < _NOISE * seen[0].peak
        if cancels or (data and noise.issuperset(data)):
            noise |= {*n.outputs}
    return out | {v: stats[v].as_zeros() for v in noise & stats.keys()}


def padding_mask(graph: Graph) -> str | None:
    """The input that says which places of a sequence hold words: integers [N, T], called a mask; None without one."""
    found = [
        name
        for name in graph.inputs
        if "mask" in name.lower() and len(graph.shape(name)) == 2 and not graph.is_float(name)
    ]
    return found[0] if len(found) == 1 else None


def valid_token_mask(graph: Graph, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Which places of a batch hold words, [N, T]; None where nothing says so, or none does."""
    mask = padding_mask(graph)
    words = None if mask is None else inputs[graph.inputs.index(mask)] != 0
    return words if words is not None and bool(words.any()) else None


def without_padding(x: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """What a value [N, T, ...] has in the places with words, [1, words, ...]; others as they are."""
    if words is None or x.shape[:2] != words.shape or x[0, 0].numel() < 2:  # one number is the mask again
        return x
    return x[words][None]


def _run_checked(
    graph: Graph, batch: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor], hook: Any, index: int
) -> None:
    try:
        run(graph, inputs, hook=hook, reuse=True)
    except RuntimeError as e:
        want = {n: graph.values[n].shape for n in graph.inputs}
        allowed = ", ".join(f"{n} {['batch' if d is None else d for d in s]}" for n, s in want.items())
        hint = "give batches of the shape that the model was captured with"
        what = f"Batch {index} does not run through the model: {first_line(e)}"
        raise DataError(what, got=", ".join(str(list(x.shape)) for x in batch), allowed=allowed, hint=hint) from e
