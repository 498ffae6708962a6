"""Calibration statistics of tensors, collected in one pass over the data in bounded memory; no sample is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from chipfit.calibration.batch_parts import batch_parts
from chipfit.calibration.data import empty_data_error
from chipfit.calibration.histogram import Histogram, in_memory_order
from chipfit.engine.memory import memory_errors
from chipfit.engine.recurrent import cell_states
from chipfit.engine.run import run
from chipfit.errors import DataError, first_line
from chipfit.graph.hidden_scores import hidden_scores
from chipfit.graph.ir import Graph, Node
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.graph.states import keeps_states

#: a histogram counts all elements of a batch up to `_SMALL`; of larger tensors it counts a block of 32 in each period
#: of elements in memory order. The period is the first that leaves at most `_COUNTED` elements, or the last. Periods
#: are prime, so that blocks start at every channel, whatever the number of channels
_SMALL, _BLOCK, _PERIODS, _COUNTED = 1 << 14, 32, (353, 709, 1409, 2819), 1 << 16
#: weight of the newest batch in the moving averages
_SMOOTH = 0.1
#: a sum or mean below this share of its greatest term is rounding noise of float32 terms that cancel (16 times the
#: machine epsilon)
_NOISE = 2.0**-19


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The statistics to collect of one tensor, besides its range."""

    histogram: bool = True
    #: weight of an element in the histogram, by channel on the last axis, [C] float32; None: 1
    weights: torch.Tensor | None = None
    channel_axis: int | None = None  #: collect sum, minimum and maximum of every channel along this axis
    squares: bool = False  #: and its sum of squares
    bits: int = 8  #: of the format; scores that a mask hides count as numbers whose softmax is 0 in so many bits


def with_channel_stats(needs: Mapping[str, Need], axes: Mapping[str, int], *, squares: bool = False) -> dict[str, Need]:
    """Return `needs` with channel statistics of further tensors: tensor -> channel axis."""

    def more(value: str, axis: int) -> Need:
        need = needs.get(value, Need(histogram=False))
        return replace(need, channel_axis=axis, squares=squares or need.squares)

    return {**needs, **{v: more(v, axis) for v, axis in axes.items()}}


@dataclass(frozen=True, slots=True)
class Channels:
    """The statistics of the channels of a tensor, [C] float64 each."""

    total: torch.Tensor  #: sum
    low: torch.Tensor
    high: torch.Tensor
    squares: torch.Tensor | None = None  #: sum of squares, if `Need.squares`

    @property
    def peak(self) -> torch.Tensor:
        """Largest magnitude."""
        return torch.maximum(-self.low, self.high)

    def merged(self, other: Channels) -> Channels:
        """Return the statistics of both together."""
        low, high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        squares = None if self.squares is None or other.squares is None else self.squares + other.squares
        return Channels(self.total + other.total, low, high, squares)

    def mapped(self, count: int, plus: torch.Tensor | float, times: torch.Tensor | float) -> Channels:
        """Return the statistics of (x + plus) * times, where x has `count` elements."""
        each = count / self.total.numel()
        total, squares = self.total + plus * each, self.squares
        if squares is not None:
            squares = (squares + plus * (2 * self.total + plus * each)) * times**2
        return Channels(total * times, (self.low + plus) * times, (self.high + plus) * times, squares)


@dataclass(slots=True)
class TensorStats:
    """The calibration statistics of one tensor."""

    name: str
    low: float = math.inf
    high: float = -math.inf
    smooth_low: float = 0.0  #: moving averages of each batch's extremes
    smooth_high: float = 0.0
    count: int = 0  #: elements seen
    batches: int = 0
    histogram: Histogram | None = None
    channels: Channels | None = None  #: if `Need.channel_axis`
    #: importance of errors in each channel, on the last axis, [C] float32: weights for collecting the histogram again
    error_weights: torch.Tensor | None = None
    #: values of the registered statistics that range rules declare, by their names
    extras: Mapping[str, Any] = field(default_factory=dict)
    #: cache of ranges computed from these statistics, by grid, rule and settings
    cached_ranges: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def peak(self) -> float:
        """Largest magnitude."""
        return max(-self.low, self.high)

    @property
    def mean(self) -> torch.Tensor | None:
        """Mean of every channel, [C] float64; None without channel statistics."""
        total = None if self.channels is None else self.channels.total
        return None if total is None else total * (total.numel() / self.count)

    def shifted(self, by: float) -> TensorStats:
        """Return the statistics of x + `by`."""
        ends = {name: getattr(self, name) + by for name in ("low", "high", "smooth_low", "smooth_high")}
        histogram = None if self.histogram is None else self.histogram.shifted(by)
        channels = None if self.channels is None else self.channels.mapped(self.count, by, 1.0)
        return replace(self, histogram=histogram, channels=channels, **ends)

    def by_channel(self, plus: torch.Tensor | float, times: torch.Tensor | float) -> TensorStats:
        """Return the statistics of (x + plus) * times, [C] each, times > 0, without a histogram.

        Raises:
            ValueError: there are no channel statistics.
        """
        if self.channels is None:
            raise ValueError(f"Channel statistics of '{self.name}' were not collected")
        new = self.channels.mapped(self.count, plus, times)
        low, high = float(new.low.min()), float(new.high.max())
        return replace(self, low=low, high=high, smooth_low=low, smooth_high=high, histogram=None, channels=new)

    def as_zeros(self) -> TensorStats:
        """Return the statistics of as many zeros."""
        histogram = None if self.histogram is None else Histogram()
        if histogram is not None:
            histogram.add(torch.zeros(1), 0.0)
        channels = None if self.channels is None else self.channels.mapped(self.count, 0.0, 0.0)
        return replace(self, low=0.0, high=0.0, smooth_low=0.0, smooth_high=0.0, histogram=histogram, channels=channels)

    def update(self, x: torch.Tensor, need: Need) -> None:
        """Add one batch of the tensor, float32, any shape.

        Raises:
            ValueError: NaN or infinity.
        """
        self.add(Seen.of(x, need), need)

    def add(self, seen: Seen, need: Need) -> None:
        """Add what was seen of one batch, on the CPU.

        Raises:
            ValueError: NaN or infinity.
        """
        self.cached_ranges.clear()
        new = None if need.channel_axis is None else Channels(*(v.double() for v in seen.numbers))
        low, high = (float(v) for v in (seen.numbers if new is None else (new.low.min(), new.high.max())))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("NaN or infinite values")
        if self.batches == 0:
            self.smooth_low, self.smooth_high = low, high
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.smooth_low += _SMOOTH * (low - self.smooth_low)
        self.smooth_high += _SMOOTH * (high - self.smooth_high)
        self.count += seen.shape.numel()
        self.batches += 1
        if new is not None:
            self.channels = new if self.channels is None else self.channels.merged(new)
        if seen.counted is not None:
            if self.histogram is None:
                self.histogram = Histogram()
            weights = None if need.weights is None else _some(need.weights.expand(seen.shape).reshape(-1))
            self.histogram.add(seen.counted, max(-low, high), weights)
            if weights is None and seen.counted.numel() < seen.shape.numel():  # which may have left out the extremes
                self.histogram.add_extremes(low, high, seen.counted.numel() / seen.shape.numel())


class Seen(NamedTuple):
    """Numbers that statistics take of one batch of a tensor, where the tensor is."""

    shape: torch.Size
    #: least and greatest number; or sum, least and greatest number, and perhaps sum of squares, of each channel [C]
    numbers: list[torch.Tensor]
    counted: torch.Tensor | None  #: the elements that the histogram counts, [N]

    @classmethod
    def of(cls, x: torch.Tensor, need: Need, parts: float = 1.0) -> Seen:
        """Return what is needed of a batch, float32, any shape; or of one of its `parts`, in memory of its own."""
        flat = in_memory_order(x)
        if need.channel_axis is None:
            numbers = [*torch.aminmax(flat)]
        else:
            rows = x if x.dim() > 1 else x[None]  # of a vector, every number is a channel
            channel = need.channel_axis % x.dim() + rows.dim() - x.dim()
            others = [k for k in range(rows.dim()) if k != channel]
            numbers = [f(rows, others) for f in (torch.sum, torch.amin, torch.amax)]
            numbers += [rows.square().sum(others)] if need.squares else []
        counted = _some(flat if need.weights is None else x.reshape(-1), parts) if need.histogram else None
        if parts > 1 and counted is not None and counted.numel() == flat.numel():
            counted = counted.clone()  # an operator may overwrite its operand
        return cls(x.shape, numbers, counted)

    @classmethod
    def joined(cls, parts: Sequence[Seen]) -> Seen:
        """Return what was seen of a batch that ran in parts along axis 0."""
        first = parts[0]
        ends: list[Any] = [torch.amin, torch.amax]
        joins = ends if len(first.numbers) == 2 else [torch.sum, *ends, torch.sum]
        columns = zip(joins, zip(*(p.numbers for p in parts), strict=True), strict=False)
        shape = torch.Size([sum(p.shape[0] for p in parts), *first.shape[1:]])
        counted = None if first.counted is None else torch.cat([p.counted for p in parts if p.counted is not None])
        return cls(shape, [f(torch.stack(column), 0) for f, column in columns], counted)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.numbers if self.counted is None else [*self.numbers, self.counted]

    def packed(self) -> torch.Tensor:
        """Return a copy of all numbers, [N]: an operator may overwrite its operand."""
        return torch.cat([x.reshape(-1) for x in self.tensors])

    def unpacked(self, flat: torch.Tensor) -> Seen:
        """Return the same from all numbers, [N], on another device."""
        parts = flat.split([x.numel() for x in self.tensors])
        numbers = [p.view(x.shape) for p, x in zip(parts, self.numbers, strict=False)]
        return Seen(self.shape, numbers, None if self.counted is None else parts[-1])


def _some(flat: torch.Tensor, parts: float = 1.0) -> torch.Tensor:
    """Return the elements that a histogram counts of a batch, or of one of its `parts`."""
    if flat.numel() * parts <= _SMALL:
        return flat
    every = next((p for p in _PERIODS if flat.numel() * parts // p * _BLOCK <= _COUNTED), _PERIODS[-1])
    return flat[: flat.numel() // every * every].view(-1, every)[:, :_BLOCK].reshape(-1)


def collect(
    graph: Graph, batches: Iterable[Sequence[torch.Tensor]], *, tensors: Mapping[str, Need]
) -> dict[str, TensorStats]:
    """Run the float graph over all batches and return statistics of `tensors`.

    Inputs of rank 4 run in channels-last layout, which changes speed and not results. A padding mask excludes padded
    positions of values [N, T, ...]. The graph runs on its device; the statistics are on the CPU.

    Raises:
        DataError: there is no batch, or a value is NaN or infinite; names the layer where it first appears.
    """
    graph = placed(graph)
    seen, count = _Observer(graph, tensors), 0
    weighted = any(need.weights is not None for need in tensors.values())

    def hook(node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for o, x in zip(node.outputs, seen.with_all_cells(node, outputs), strict=False):
            seen.see(o, x)
        return outputs

    def channels_last(part: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:  # lazily: only `run` holds the copies
        for name, x in zip(graph.inputs, part, strict=True):
            x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
            seen.see(name, x)
            yield x

    with seen.counter, torch.inference_mode():
        for batch in batches:
            batch = inputs_on(graph.device, batch)
            seen.begin(count, batch)
            parts = [batch] if weighted or seen.valid is not None else batch_parts(graph, batch)
            for part in parts:
                seen.parts = len(batch[0]) / len(part[0]) if len(parts) > 1 else 1.0
                _run_checked(graph, batch, channels_last(part), hook, count)
            seen.end()
            count += 1
        seen.finish()
    if count == 0:
        raise empty_data_error()
    stats = seen.stats
    for name in (n for n, s in stats.items() if not s.batches):  # empty tensors, such as initial caches
        stats[name].update(torch.zeros(1), Need(histogram=tensors[name].histogram))
    return without_noise(graph, stats)


class _Observer:
    """The statistics of a graph's tensors.

    What is seen on a device is read together after each batch, and counted while the device runs the next one.
    """

    def __init__(self, graph: Graph, needs: Mapping[str, Need]) -> None:
        self.graph, self.needs = graph, needs
        self.stats = {name: TensorStats(name) for name in needs}
        self.hidden = {v: h for h in hidden_scores(graph) for v in h.values}
        #: LSTMs that keep their states, and what they read -> what it holds in this batch
        self.lstms = {n.name for n in graph if n.op == "LSTM" and n.outputs[-1] in needs and keeps_states(graph, n)}
        self.read = {i: torch.empty(0) for n in graph.nodes if n.name in self.lstms for i in graph.activations(n)}
        self.batch = 0
        self.parts = 1.0  #: by which a batch is larger than the part of it that runs
        self.of_parts: dict[str, list[Seen]] = {}
        self.valid: ValidTokens | None = None
        self.waiting = list[tuple[str, Seen, torch.Tensor]]()
        self.counter = ThreadPoolExecutor(1)
        self.counting: Future[None] | None = None

    def begin(self, batch: int, inputs: Sequence[torch.Tensor]) -> None:
        """Begin a batch of this number."""
        self.batch, self.valid = batch, valid_tokens(self.graph, inputs)

    def see(self, name: str, x: torch.Tensor) -> None:
        """Take what is needed of a value, if anything is."""
        if name in self.read:
            self.read[name] = x
        if name not in self.stats or not x.numel():
            return
        x = without_padding(x, self.valid).float()
        x = self.hidden[name].bounded(x, self.needs[name].bits) if name in self.hidden else x
        seen = Seen.of(x, self.needs[name], self.parts)
        if self.parts > 1:
            self.of_parts.setdefault(name, []).append(seen)
        elif x.device.type == "cpu":
            self._add(self.batch, name, seen)
        else:
            self.waiting.append((name, seen, seen.packed()))

    def with_all_cells(self, n: Node, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results of a node; of an LSTM that keeps its states, those of the cell after every step."""
        if n.name not in self.lstms:
            return results
        x, w, r, *others = (None if i is None else self.read.get(i, self.graph.weights.get(i)) for i in n.inputs)
        assert x is not None and w is not None and r is not None
        return *results[:-1], cell_states(x, w, r, *others, **n.attrs)

    def end(self) -> None:
        """Add what has been seen of parts; read what has been seen on a device, and begin to add it."""
        for name, seen_of in self.of_parts.items():
            self._add(self.batch, name, Seen.joined(seen_of))
        self.of_parts.clear()
        if not self.waiting:
            return
        here = on_cpu([packed for *_, packed in self.waiting])
        parts = [(name, seen.unpacked(flat)) for (name, seen, _), flat in zip(self.waiting, here, strict=True)]
        self.waiting.clear()
        self.finish()
        self.counting = self.counter.submit(self._add_all, self.batch, parts)

    def finish(self) -> None:
        """Wait until what has been read is added.

        Raises:
            DataError: a value is NaN or infinite.
        """
        if self.counting is not None:
            self.counting.result()

    @torch.inference_mode()
    def _add_all(self, batch: int, parts: Sequence[tuple[str, Seen]]) -> None:
        for name, seen in parts:
            self._add(batch, name, seen)

    def _add(self, batch: int, name: str, seen: Seen) -> None:
        try:
            self.stats[name].add(seen, self.needs[name])
        except ValueError:
            node = self.graph.producers().get(name)
            hint = "check the weights of that layer and the scaling of the inputs"
            what = f"Batch {batch} holds NaN or infinite values for input '{name}'"
            if node:
                what = f"Batch {batch} makes NaN or infinite values in layer '{node.display_name}' ({node.op})"
            else:
                hint = "check how the data are read and scaled"
            raise DataError(what, where=node.source if node else "", hint=hint) from None


def without_noise(graph: Graph, stats: Mapping[str, TensorStats]) -> dict[str, TensorStats]:
    """Return the statistics, with zeros for tensors that contain only rounding errors, which differ between machines.

    These are sums and means of terms that cancel, as after a normalisation over the same axes, and the results of
    operators whose only data are such tensors.
    """
    out, noise = dict(stats), set[str]()
    for n in graph.nodes:
        if not (n.facts.homogeneous or n.facts.moves):
            continue
        data = [i for i in n.inputs if i is not None and graph.is_float(i)]
        seen = [stats[v] for v in (n.data, *n.outputs) if v in stats]
        cancels = n.facts.sums and len(seen) == 2 and 0 < seen[1].peak < _NOISE * seen[0].peak
        if cancels or (data and noise.issuperset(data)):
            noise |= {*n.outputs}
    return out | {v: stats[v].as_zeros() for v in noise & stats.keys()}


def padding_mask(graph: Graph) -> str | None:
    """Return the name of the padding mask, the only integer input [N, T] with "mask" in its name; None without one."""
    found = [i for i in graph.inputs if "mask" in i.lower() and len(graph.shape(i)) == 2 and not graph.is_float(i)]
    return found[0] if len(found) == 1 else None


class ValidTokens(NamedTuple):
    """The positions of a batch that are not padding."""

    shape: torch.Size  #: of the mask, [N, T]
    positions: torch.Tensor  #: counted through the batch, [positions] int64, on the device of the batch


def valid_tokens(graph: Graph, inputs: Sequence[torch.Tensor]) -> ValidTokens | None:
    """Return the positions of a batch that are not padding; None without a mask, or if all are padding."""
    mask = padding_mask(graph)
    if mask is None:
        return None
    valid = inputs[graph.inputs.index(mask)] != 0
    index = valid.reshape(-1).nonzero()[:, 0]
    return ValidTokens(valid.shape, index) if len(index) else None


def without_padding(x: torch.Tensor, valid: ValidTokens | None) -> torch.Tensor:
    """Return a value [N, T, ...] at valid positions only, [1, positions, ...]; values of other shapes unchanged."""
    if valid is None or x.shape[:2] != valid.shape or x[0, 0].numel() < 2:  # one number a position: the mask itself
        return x
    return x.flatten(0, 1).index_select(0, valid.positions)[None]


def _run_checked(
    graph: Graph, batch: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor], hook: Any, index: int
) -> None:
    try:
        with memory_errors(graph.device, [x.shape for x in batch]):
            run(graph, inputs, hook=hook, reuse=True)
    except RuntimeError as e:
        want = {n: graph.values[n].shape for n in graph.inputs}
        allowed = ", ".join(f"{n} {['batch' if d is None else d for d in s]}" for n, s in want.items())
        hint = "give batches of the shape that the model was captured with"
        what = f"Batch {index} does not run through the model: {first_line(e)}"
        raise DataError(what, got=", ".join(str(list(x.shape)) for x in batch), allowed=allowed, hint=hint) from e
