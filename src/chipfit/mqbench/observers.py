"""MQBench's observers: they collect statistics of a tensor and compute its scale and zero point.

Under DDP the extremes, sums and counts of all ranks are reduced, so that every rank has the statistics of the whole
batch; scales are never averaged. Register a new observer in any file of this package:

    @register("observer", "mine")
    class Mine(ObserverBase): ...
"""

import inspect
import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from chipfit.errors import ConfigError, DataError, UnknownNameError
from chipfit.quantizers.algorithm import MOST_BITS
from chipfit.quantizers.grids import Grid
from chipfit.ranges.kl import KlRange
from chipfit.ranges.qparams import HIGH_IF_ALL_ZERO, LEAST_SCALE, QParams, finish_scale, from_min_max, wide
from chipfit.ranges.search import Sample, count, errors, search
from chipfit.ranges.std import within
from chipfit.registry import lookup, register
from chipfit.validation import Fraction, Positive, PositiveInt, arguments, check_value

__all__ = ["ObserverBase"]


def reduced(x: torch.Tensor, how: str) -> torch.Tensor:
    """Reduce x over all ranks by "MIN", "MAX" or "SUM"; return x itself in a single process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        x = x.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, how))
    return x


def to_pot(scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest power of two on a logarithmic scale, 2^round(log2 s); a range may shrink by up to sqrt(2)."""
    return torch.exp2(torch.round(torch.log2(scale)))


_SAVED = ("batches", "adjust_sign", "quant_min", "quant_max")


class ObserverBase(nn.Module):
    """The base of observers; `quant_min`, `quant_max` and `adjust_sign` may be set at any time.

    A subclass overrides `batch_statistics`, and `step` if its scale does not follow from the extremes. Its annotated
    attributes are options of the constructor; their values are the defaults.

    Args:
        quant_min, quant_max: least and greatest quantized value.
        qscheme: one of torch's four.
        ch_axis: channel axis for one scale per channel; -1 for one scale per tensor.
        ada_sign: the quantizer may switch to unsigned values, see `QuantizeBase`; symmetric schemes only.
        pot_scale: round scales to powers of two.
        bitwidth: width of a quantized value [bit]; the least that holds quant_min..quant_max when omitted.
        sticky_sign: a quantizer that became unsigned stays unsigned; False: the latest batch decides.
        over: how the ranges of batches become one range; each class has its own default.
        ema_ratio: weight of the earlier batches if `over` is "moving".

    Raises:
        ConfigError: options that contradict each other.
    """

    over: str = "widest"
    tensor = ""  #: name of the observed tensor, for messages
    #: key in a state dict -> attribute
    _STATE: ClassVar[dict[str, str]] = {"seen": "statistics", **dict(zip(_SAVED, _SAVED, strict=True))}

    @arguments(ConfigError)
    def __init__(
        self,
        quant_min: int = -128,
        quant_max: int = 127,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        ch_axis: int = -1,
        ada_sign: bool = False,
        pot_scale: bool = False,
        *,
        bitwidth: int | None = None,
        sticky_sign: bool = True,
        over: Literal["widest", "moving", "mean", "latest", "first"] | None = None,
        ema_ratio: Fraction = 0.9,
        **own: Any,
    ) -> None:
        super().__init__()
        self._set_own_options(own)
        bitwidth = (quant_max - quant_min).bit_length() if bitwidth is None else bitwidth
        per, _, kind = str(qscheme).removeprefix("torch.per_").partition("_")
        faults = (
            (kind not in ("symmetric", "affine"), "qscheme", qscheme, "one of torch's four schemes"),
            (not quant_min < quant_max or quant_min > 0, "quant_min", quant_min, "at most 0, and below quant_max"),
            (not 1 <= bitwidth <= MOST_BITS, "bitwidth", bitwidth, f"1 to {MOST_BITS}"),
            (quant_max - quant_min >= 1 << bitwidth, "quant_max", quant_max, f"values that fit into {bitwidth} bits"),
            ((per == "channel") != (ch_axis >= 0), "ch_axis", ch_axis, "-1 per tensor; from 0 per channel"),
            (ada_sign and kind == "affine", "ada_sign", ada_sign, "False for affine schemes, which have a zero point"),
        )
        for wrong, option, got, allowed in faults:
            if wrong:
                raise ConfigError(f"'{option}' of {type(self).__name__} is invalid", got=got, allowed=allowed)
        self.quant_min, self.quant_max, self.qscheme, self.ch_axis = quant_min, quant_max, qscheme, ch_axis
        self.ada_sign, self.pot_scale, self.bitwidth, self.sticky_sign = ada_sign, pot_scale, bitwidth, sticky_sign
        self.over, self.ema_ratio = over or self.over, ema_ratio
        self.symmetric = kind == "symmetric"
        self.adjust_sign = False  #: quantized values are unsigned
        self.batches = 0  #: number of batches observed
        self.nonzero = False  #: a batch had another number than 0
        self.statistics = torch.empty(0)  #: [K, C]; row 0 holds minima, row 1 maxima

    def _set_own_options(self, options: Mapping[str, Any]) -> None:
        """Set the options that the classes below this one declare by annotations."""
        owner, above = type(self).__name__, type(self).__mro__[: type(self).__mro__.index(ObserverBase)]
        kinds = {n: t for c in above for n, t in inspect.get_annotations(c, eval_str=bool(options)).items()}
        for name, value in options.items():
            if name not in kinds:
                known = {*kinds, *inspect.signature(ObserverBase).parameters} - {"own"}
                raise UnknownNameError(f"option of observer {owner}", name, known)
            setattr(self, name, check_value(kinds[name], value, ConfigError, owner, name))

    # ---- observation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add one batch to the statistics and return it unchanged.

        An accelerator is not awaited to find NaN: the scale becomes NaN, which the next step of training reports.

        Raises:
            DataError: the batch holds NaN or infinite numbers, or has no channel axis.
        """
        if x.numel():
            finite = x.isfinite().all()
            if x.device.type == "cpu":
                self._check(bool(finite))
            with torch.no_grad():
                new = self.batch_statistics(x.detach())
                self._update(torch.where(finite.to(new.device), new, math.nan))
        return x

    def _check(self, finite: bool) -> None:
        if not finite:
            raise DataError(f"Batch {self.batches + 1} to observe holds NaN or infinite numbers", where=self.tensor)

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        """Return the statistics of a batch, [K, C]: minimum, maximum, and further arguments of `step`."""
        return torch.stack(self.extremes(x))

    def _update(self, new: torch.Tensor) -> None:
        new = wide(new)
        old = self.statistics.to(new)
        self.batches += 1
        starts = self.batches == 1 or (not self.nonzero and self.over in ("moving", "first"))
        self.nonzero = self.nonzero or bool((new != 0).any())  # awaits an accelerator until it is true
        if starts or self.over == "latest":
            self.statistics = new
        elif self.over == "widest":
            self.statistics = torch.cat([torch.minimum(old[:1], new[:1]), torch.maximum(old[1:], new[1:])])
        elif self.over != "first":
            self.statistics = old + (new - old) * (1 / self.batches if self.over == "mean" else 1 - self.ema_ratio)

    # ---- statistics of a batch, over all ranks

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as [C, N]; C is 1 for a scale per tensor."""
        if self.ch_axis >= x.dim():
            raise DataError("The tensor has no axis of this number", got=f"ch_axis={self.ch_axis} of {list(x.shape)}")
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return x.reshape(1, -1) if self.ch_axis < 0 else x.movedim(self.ch_axis, 0).flatten(1)

    def extremes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return minimum and maximum of each channel, [C]."""
        low, high = torch.aminmax(self.rows(x).flatten(1), dim=1)
        return reduced(wide(low), "MIN"), reduced(wide(high), "MAX")

    def moments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean of |x|, mean and (unbiased) standard deviation of each channel, [C]."""
        v = wide(self.rows(x))
        n = torch.full_like(v[:, 0], v.shape[1])
        n, level, total = reduced(torch.stack([n, v.abs().sum(1), v.sum(1)]), "SUM")
        mean = total / n
        squares = reduced((v - mean.unsqueeze(1)).square().sum(1), "SUM")
        return level / n, mean, (squares / (n - 1).clamp_min(1)).sqrt()

    def sample(self, x: torch.Tensor) -> Sample:
        """Return the sample for a range search: the values themselves per channel (weights), a histogram per tensor."""
        low, high = self._ends_on_cpu(x)
        if self.ch_axis >= 0:
            return Sample(self.rows(x).float().cpu(), None, low, high)
        counts, edges, zeros = self.histogram(self.rows(x), low, high)
        values = torch.cat([(edges[:, 1:] + edges[:, :-1]) / 2, torch.zeros(1, 1)], 1)
        return Sample(values, torch.cat([counts, zeros], 1), low, high, edges)

    def _ends_on_cpu(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `extremes` in float64 on the CPU, where ranges are searched."""
        low, high = torch.stack(self.extremes(x)).cpu().double()
        self._check(bool((high - low).isfinite().all()))
        return low, high

    def histogram(
        self, rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bins: int = 2048
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return counts without exact zeros [C, bins], edges [C, bins + 1] and the number of exact zeros [C, 1]."""
        span = (high - low).clamp_min(2.0**-100)
        begin, width = (v if rows.device == v.device else v.float().to(rows.device) for v in (low, span))
        counted = count(rows.float(), begin, width, bins)
        counts, zeros = (reduced(n, "SUM").cpu() for n in counted)  # reduced on the process group's device
        bin_of_zero = (-low / span * bins).long().clamp(0, bins - 1).unsqueeze(-1)
        zeros = zeros.unsqueeze(-1)
        counts = counts.scatter_add(1, bin_of_zero, -zeros).clamp_min(0)
        edges = low.unsqueeze(-1) + span.unsqueeze(-1) * torch.linspace(0, 1, bins + 1, dtype=torch.float64)
        return counts, edges.float(), zeros

    def ends(self, q: QParams) -> torch.Tensor:
        """Return the range that scale and zero point cover, [2, C]."""
        s, z = q.scale.double(), q.zero_point
        if self.symmetric:
            return torch.stack([-s * self._levels * (not self.adjust_sign), s * self._levels])
        return torch.stack([(self.quant_min - z) * s, (self.quant_max - z) * s])

    # ---- numbers

    @property
    def grid(self) -> Grid:
        """The current quantization grid."""
        zero: Any = 0 if self.symmetric else "any"
        per: Any = "channel" if self.ch_axis >= 0 else "tensor"
        low, high = self.quant_min, self.quant_max
        return Grid(bits=self.bitwidth, qmin=low, qmax=high, zero=zero, pot=self.pot_scale, per=per)

    @property
    def _levels(self) -> float:
        """The number of steps that cover the greatest magnitude."""
        return (self.quant_max - self.quant_min) / (1 if self.adjust_sign else 2)

    def step(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Return the scale [C] of a range low <= 0 <= high.

        Symmetric: max(-low, high) / ((quant_max - quant_min) / 2), or / (quant_max - quant_min) if `adjust_sign`;
        affine: (high - low) / (quant_max - quant_min).
        """
        if self.symmetric:
            return torch.maximum(-low, high) / self._levels
        return wide(from_min_max(low, high, self.grid).scale)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale (float32) and zero point (int32): [], or [C] per channel.

        Raises:
            DataError: no batch was observed.
        """
        if not self.batches:
            hint = "run a batch after enable_calibration(model)"
            raise DataError(f"{type(self).__name__} has observed no batch", hint=hint)
        low, high = self.statistics[0].clamp_max(0), self.statistics[1].clamp_min(0)
        scale = self._revived(self.step(low, high, *self.statistics[2:]), low, high)
        scale = finish_scale(scale, Grid(bits=1, qmin=0, qmax=1))
        scale = to_pot(scale) if self.pot_scale else scale
        zero = torch.zeros_like(low)
        if not self.symmetric:
            zero = torch.clamp(torch.round(self.quant_min - low / scale), self.quant_min, self.quant_max)
        pair = scale, zero.to(torch.int32)
        return pair if self.ch_axis >= 0 else (pair[0][0], pair[1][0])

    def _revived(self, scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Return scales [C] with those of channels that the least scale rounds to 0 replaced by the greatest, or by
        that of [0, 1] if all are so small.

        So small a scale as theirs would clip whatever comes later, and no gradient might lead away from it.
        """
        small = (scale <= LEAST_SCALE) & (torch.maximum(-low, high) <= LEAST_SCALE / 2)
        usual = torch.where(small.all(), HIGH_IF_ALL_ZERO / self._levels, scale.max())
        return torch.where(small, usual, scale)  # NaN stays, and is reported

    @property
    def vanishing(self) -> float:
        """The greatest magnitude observed if it is not 0 but rounds to 0 with the least legal scale; else 0."""
        greatest = float(self.statistics[:2].abs().max()) if self.batches else 0.0
        return greatest if greatest <= LEAST_SCALE / 2 else 0.0

    def get_extra_state(self) -> torch.Tensor:
        return packed_state({key: getattr(self, attribute) for key, attribute in self._STATE.items()})

    def set_extra_state(self, state: torch.Tensor) -> None:
        for key, value in unpacked_state(state).items():
            old = getattr(self, self._STATE[key])
            setattr(self, self._STATE[key], value.to(old.device) if isinstance(old, torch.Tensor) else value)
        self.nonzero = bool((self.statistics != 0).any())

    def extra_repr(self) -> str:
        return f"{self.quant_min}..{self.quant_max}, {self.qscheme}, {self.over} of {self.batches} batches"


def packed_state(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the bytes of a state, [N] uint8, because tracers and averages of models read a state dict of tensors."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked_state(state: Any) -> dict[str, Any]:
    """Invert `packed_state`; a dictionary is as it is."""
    if isinstance(state, Mapping):
        return dict(state)
    file = io.BytesIO(state.cpu().numpy().tobytes())
    return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]  # what was packed


def variant(name: str, base: type[ObserverBase], **defaults: Any) -> type[ObserverBase]:
    """Register and return a subclass of an observer with other defaults."""
    return register("observer", name)(type(name, (base,), {"__module__": __name__, **defaults}))


@register("observer", "MinMax")
class MinMax(ObserverBase):
    """The extremes of all batches; with `over="latest"` of the last batch, as in MQBench's first generation."""


#: m <- 0.9 m + 0.1 (this batch's extreme). Source: Jacob et al. 2018, arXiv:1712.05877, section 3.1.
EMAMinMax = variant("EMAMinMax", MinMax, over="moving")
#: the mean of the extremes of all batches
AverageMinMax = variant("AverageMinMax", MinMax, over="mean")


@register("observer", "BatchMeanMax")
class BatchMeanMax(ObserverBase):
    """The extremes of each sample (axis 0), averaged over the batch, with a moving average over batches."""

    over = "moving"

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        if self.ch_axis == 0:
            raise ConfigError("BatchMeanMax needs samples on axis 0", got="ch_axis=0", allowed="-1, or from 1")
        each = x.reshape(len(x), 1, -1) if self.ch_axis < 0 else x.movedim(self.ch_axis, 1).flatten(2)  # [N, C, M]
        sums = torch.stack([wide(each.amin(2)).sum(0), wide(each.amax(2)).sum(0)])
        n = reduced(torch.full_like(sums[0, 0], len(x)), "SUM")
        return reduced(sums, "SUM") / n


@register("observer", "Quantile")
class Quantile(ObserverBase):
    """A quantile of |x|: the middle of the first histogram bin at which the cumulative share reaches `threshold`.

    Args:
        threshold: share of the values that are not clipped.
        bins: number of histogram bins from 0 to max |x|.
    """

    threshold: Fraction = 0.99999
    bins: PositiveInt = 2048

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self._ends_on_cpu(x)
        top = torch.maximum(-low, high)
        counts, _, zeros = self.histogram(self.rows(x).abs(), torch.zeros_like(top), top, self.bins)
        cdf = (counts.double().cumsum(1) + zeros) / (counts.double().sum(1, keepdim=True) + zeros)
        i = (cdf < self.threshold).sum(1).clamp_max(self.bins - 1)
        clip = (i + 0.5) * top / self.bins
        return torch.stack([low.maximum(-clip), high.minimum(clip)])


EMAQuantile = variant("EMAQuantile", Quantile, over="moving")
#: the 0.9999 quantile of the first batch, as MQBench computes under this name; `over="moving"` averages
QuantileMovingAverage = variant("QuantileMovingAverage", Quantile, over="first", threshold=0.9999)


@register("observer", "ClipStd")
class ClipStd(ObserverBase):
    """[mean - k sd, mean + k sd] of the last batch, limited to its extremes.

    Args:
        widens: widen the extremes to that range instead, and clip nothing, as in the code of MQBench.
    """

    over = "latest"

    k: Positive = 2.6
    widens: bool = False

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        _, mean, sd = self.moments(x)
        low, high = self.extremes(x)
        if self.widens:
            return torch.stack([low.minimum(mean - self.k * sd), high.maximum(mean + self.k * sd)])
        return torch.stack(within(mean, sd, self.k, low, high))


@register("observer", "LSQ")
class LSQ(ObserverBase):
    """s = 2 mean|x| / sqrt(quant_max) of the last batch. Source: Esser et al. 2020, arXiv:1902.08153, section 2.1."""

    over = "latest"

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([*self.extremes(x), self.moments(x)[0]])

    def step(self, low: torch.Tensor, high: torch.Tensor, level: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * level / math.sqrt(max(self.quant_max, 1))


AverageLSQ = variant("AverageLSQ", LSQ, over="mean")


@register("observer", "LSQPlus")
class LSQPlus(ObserverBase):
    """s = max(|mean - 3 sd|, |mean + 3 sd|) / (number of quantized values), of the last batch.

    Source: Bhalgat et al. 2020, arXiv:2004.09576, section 3.3.

    Args:
        by_half: divide by half that number, as in MQBench's first generation.
    """

    over = "latest"

    by_half: bool = False

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        _, mean, sd = self.moments(x)
        return torch.stack([*self.extremes(x), torch.maximum((mean - 3 * sd).abs(), (mean + 3 * sd).abs())])

    def step(self, low: torch.Tensor, high: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        span = self.quant_max - self.quant_min
        return reach / (span // 2 if self.by_half else span + 1)


@register("observer", "MSE")
class MSE(ObserverBase):
    """The widest of the batches' ranges with least mean |error|^p; see `chipfit.ranges.search`."""

    p: Positive = 2.0

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        return self.ends(search(self.sample(x), self.grid, self.p))


EMAMSE = variant("EMAMSE", MSE, over="moving")


@register("observer", "KL")
@register("observer", "KLD")
class KL(ObserverBase):
    """The widest of the batches' ranges with least Kullback-Leibler divergence; see `chipfit.ranges.kl`."""

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        return self.ends(KlRange()(self.sample(x), self.grid))


@register("observer", "MinMaxFloor")
class MinMaxFloor(ObserverBase):
    """s = 2^-n with the least squared error, n from the greatest that clips nothing upwards, at most 12.

    Per tensor and symmetric; scales are powers of two even without `pot_scale`.

    Args:
        candidates: number of exponents tried; 1 keeps the whole range, as for inputs of a network.
    """

    over = "latest"
    _MOST = 12
    candidates: PositiveInt = 5

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.ch_axis >= 0 or not self.symmetric:
            what = f"{type(self).__name__} supports one symmetric scale only"
            raise ConfigError(what, got=self.qscheme, allowed="torch.per_tensor_symmetric")

    def exponent(self, x: torch.Tensor) -> int:
        """Return n for one batch."""
        sample = self.sample(x)
        low, high = float(sample.low), float(sample.high)
        step = max(low / self.quant_min if self.quant_min else 0.0, high / self.quant_max if self.quant_max else 0.0)
        first = math.floor(-math.log2(step)) if step > 2.0**-15 else 0
        tried = torch.tensor([min(first + k, self._MOST) for k in range(self.candidates)]).unsqueeze(-1)
        q = QParams(torch.exp2(-tried.double()), torch.zeros_like(tried))
        return int(tried[errors(sample, q, self.grid, 2.0)[:, 0].argmin()])

    def batch_statistics(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.extremes(x)
        return torch.stack([low, high, torch.full_like(low, 2.0 ** -self.exponent(x))])

    def step(self, low: torch.Tensor, high: torch.Tensor, step: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return step


@register("observer", "PoTMode")
class PoTMode(MinMaxFloor):
    """`MinMaxFloor` with the most frequent n of all batches; ties go to the least n."""

    _STATE: ClassVar[dict[str, str]] = {**ObserverBase._STATE, "votes": "votes"}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.votes: dict[int, int] = {}

    def exponent(self, x: torch.Tensor) -> int:
        n = super().exponent(x)
        self.votes[n] = self.votes.get(n, 0) + 1
        return min(self.votes, key=lambda k: (-self.votes[k], k))


def observer_of(given: str | Callable[..., ObserverBase]) -> Callable[..., ObserverBase]:
    """Return the observer class of a name (the suffix "Observer" is optional); return a class or partial unchanged.

    Raises:
        UnknownNameError: there is no observer of that name; lists similar names.
        ConfigError: `given` is neither a name nor a class or partial of an observer.
    """
    if isinstance(given, str):
        return lookup("observer", given.removesuffix("Observer"))  # type: ignore[no-any-return]  # by registration
    made = given.func if isinstance(given, partial) else given
    if not (isinstance(made, type) and issubclass(made, ObserverBase)):
        allowed = "a registered name, or a class derived from ObserverBase"
        raise ConfigError("Observer must be a registered name or a class", got=repr(given)[:120], allowed=allowed)
    return given
