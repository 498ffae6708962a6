"""Quantizers of MQBench: modules with an observer. `AlgorithmQuantizer` runs any of chipfit's training algorithms.

@register("quantizer", "mine")
class Mine(QuantizeBase): ...
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from chipfit.errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.import_by_name import import_by_name
from chipfit.mqbench.observers import ObserverBase, observer_of, packed_state, reduced, to_pot, unpacked_state
from chipfit.plan.training import algorithm_of, refusal
from chipfit.quantizers.algorithm import Algorithm
from chipfit.quantizers.grids import Grid, all_codes
from chipfit.quantizers.stored import Stored
from chipfit.quantizers.tables import log_table
from chipfit.registry import parse_call, register, registered

__all__ = ["AlgorithmQuantizer", "QuantizeBase"]
__all__ += ["disable_all", "enable_all", "enable_calibration", "enable_quantization"]
__all__ += ["enable_calibration_quantization", "enable_calibration_woquantization"]

_TRAINS = "train a batch, or run one after enable_calibration(model)"


def _of_observer(name: str) -> Any:
    """Return a property that reads and sets an attribute of the quantizer's observer."""
    return property(
        lambda self: getattr(self.activation_post_process, name),
        lambda self, value: setattr(self.activation_post_process, name, value),
    )


class QuantizeBase(nn.Module):
    """The base of quantizers; a subclass overrides `forward`, which fake-quantizes a tensor.

    `activation_post_process` is the observer; the quantizer shares its attributes `quant_min`, `quant_max`, `bitwidth`,
    `qscheme`, `ch_axis`, `pot_scale`, `ada_sign` and `sticky_sign`. `enable_calibration`, `enable_quantization`,
    `enable_all` and `disable_all` set `observer_enabled` and `fake_quant_enabled`. While `observing` is true, `forward`
    passes its input to the observer and initializes its parameters again.

    Args:
        observer: name or class of an observer.
        observer_kwargs: options of `ObserverBase` and of that observer.

    Raises:
        UnknownNameError: no such observer, or no such option.
        ConfigError: options that contradict each other.
    """

    quant_min, quant_max = _of_observer("quant_min"), _of_observer("quant_max")
    bitwidth, qscheme, ch_axis = _of_observer("bitwidth"), _of_observer("qscheme"), _of_observer("ch_axis")
    pot_scale, ada_sign, sticky_sign = map(_of_observer, ("pot_scale", "ada_sign", "sticky_sign"))

    def __init__(self, observer: str | Callable[..., ObserverBase] = "MinMax", **observer_kwargs: Any) -> None:
        super().__init__()
        self.activation_post_process = observer_of(observer)(**observer_kwargs)
        self.observer_enabled, self.fake_quant_enabled = False, True
        self._signed = self.quant_min, self.quant_max

    @property
    def observing(self) -> bool:
        """True if the next batch is observed: in calibration, and the first of training that is not all 0."""
        first = self.training and self.fake_quant_enabled and not self.activation_post_process.nonzero
        return self.observer_enabled or first

    def prepare(self, x: torch.Tensor | None) -> None:
        """Prepare for training; called once. x is the weight that will be quantized, None for an activation."""

    def adapt_sign(self, x: torch.Tensor) -> None:
        """Switch to unsigned values for a batch without negatives if `ada_sign`, and back unless `sticky_sign`."""
        if not self.ada_sign:
            return
        unsigned = bool(reduced(x.detach().min(), "MIN") >= 0)
        if unsigned or not self.sticky_sign:
            self.quant_min, self.quant_max = all_codes(self.bitwidth, False) if unsigned else self._signed
            self.activation_post_process.adjust_sign = unsigned

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point, [] or [C], as a chip stores them: from parameters, else from the observer."""
        own: Any = self
        if not hasattr(own, "scale"):
            return self.activation_post_process.calculate_qparams()
        scale, zero = (v.detach().reshape(-1 if self.ch_axis >= 0 else ()) for v in (own.scale, own.zero_point))
        return to_pot(scale.abs()) if self.pot_scale else scale.abs(), zero.round().to(torch.int32)

    def reals(self, w: torch.Tensor) -> torch.Tensor:
        """Return the weight that a chip stores in place of w."""
        return self(w)  # type: ignore[no-any-return]  # a module's call

    @property
    def grid(self) -> Grid:
        """The current quantization grid."""
        return self.activation_post_process.grid

    def get_extra_state(self) -> torch.Tensor:
        return packed_state({"quant_min": self.quant_min, "quant_max": self.quant_max})

    def set_extra_state(self, state: Any) -> None:
        for name, value in unpacked_state(state).items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        return f"{self.quant_min}..{self.quant_max}, observes={self.observing}, rounds={self.fake_quant_enabled}"


def check_one_scale(q: QuantizeBase, role: str) -> None:
    """Raise if an "activation" has one scale per channel, which is for weights only."""
    if role == "activation" and q.ch_axis >= 0:
        raise ConfigError("Activations have one scale: per_channel concerns weights", got=f"ch_axis={q.ch_axis}")


class _Unread(Stored):
    """Quantization parameters on an accelerator, whose numbers are checked when a training step begins."""

    __slots__ = ()

    def check(self) -> None:
        """Do nothing, as a check would wait for the device."""


class AlgorithmQuantizer(QuantizeBase):
    """A quantizer that runs a training algorithm of chipfit, initialized from the observer.

    Args:
        algorithm: a registered name, with options as in "lsq(use_grad_scaling=False)", or an `Algorithm`.
        role: "weight" or "activation".
        follows: observe every batch of training, for methods without trained parameters.

    Raises:
        UnsupportedError: the algorithm cannot train on this grid.
        ConfigError: an activation has one scale per channel.
    """

    def __init__(
        self,
        observer: str | Callable[..., ObserverBase] = "MinMax",
        *,
        algorithm: str | Algorithm = "lsq",
        role: str = "activation",
        follows: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(observer, **observer_kwargs)
        self.algorithm, self.role, self.follows = algorithm_of(algorithm), role, follows
        assert self.algorithm is not None  # for mypy
        check_one_scale(self, role)
        if why := refusal(self.algorithm, self.grid, role):
            what = f"{type(self.algorithm).__name__} cannot train {role}s in {self.bitwidth} bits"
            raise UnsupportedError(what, got=why, hint="choose other bits, or another algorithm")
        self.prepare(None if role == "activation" else torch.zeros([1] * (self.ch_axis + 2)))

    @property
    def observing(self) -> bool:
        return super().observing or (self.follows and self.training and self.fake_quant_enabled)

    def prepare(self, x: torch.Tensor | None) -> None:
        channels = self.activation_post_process.rows(x).shape[:1] if x is not None and self.ch_axis >= 0 else ()
        x = None if x is None else x.detach().cpu()
        self.rounds = self._made(torch.ones(channels), torch.zeros(channels, dtype=torch.int32), x)

    def _made(self, scale: torch.Tensor, zero: torch.Tensor, x: torch.Tensor | None) -> FakeQuantizer:
        axis = self.ch_axis if self.ch_axis >= 0 else None
        kind = Stored if scale.device.type == "cpu" else _Unread
        stored = kind(format="", grid=self.grid, scale=scale, zero_point=zero, axis=axis)
        assert self.algorithm is not None  # see __init__
        algorithm = self.algorithm.for_tensor(stored, self.role, () if x is None else tuple(x.shape))
        return FakeQuantizer(self.role, stored, algorithm, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x
        if self.observing:
            self.adapt_sign(x)
            self.activation_post_process(x.detach())
            self._start(x if self.role == "weight" else None)
        if not self.fake_quant_enabled:
            return x
        if not self.activation_post_process.batches:
            raise DataError("A quantizer has no scale yet: it has observed no batch", hint=_TRAINS)
        return self.rounds(x)  # type: ignore[no-any-return]  # a module's call

    @torch.no_grad()
    def _start(self, x: torch.Tensor | None) -> None:
        """Initialize the parameters from the observer, in place: optimizers hold references to them."""
        where = self.rounds.scale.device
        scale, zero = (n.to(where) for n in self.activation_post_process.calculate_qparams())
        fresh = self._made(scale, zero, None if x is None else x.detach())
        for name in fresh.algorithm_inputs():
            getattr(self.rounds, name).data = getattr(fresh, name).data  # of one shape throughout, which DDP expects
        self.rounds.grid, self.rounds.algorithm = fresh.grid, fresh.algorithm

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        s, z = (v.detach() for v in self.rounds.numbers())
        return s, z.round().to(torch.int32)

    def reals(self, w: torch.Tensor) -> torch.Tensor:
        return self.rounds.reals(w)

    def get_extra_state(self) -> torch.Tensor:
        return packed_state({**unpacked_state(super().get_extra_state()), "least": self.rounds.least})

    def set_extra_state(self, state: Any) -> None:
        own = unpacked_state(state)
        self.rounds.least = own.pop("least").to(self.rounds.least.device)
        super().set_extra_state(own)
        self.rounds.grid = self.rounds.algorithm.grid(self.grid)


@register("quantizer", "nnie_levels")
class NNIEQuantizer(AlgorithmQuantizer):
    """A quantizer to the logarithmic levels of HiSilicon's NNIE: the scale is the greatest magnitude.

    Args:
        observer_kwargs: with quantized values -1..1, so that the scale of symmetric ranges is their end.
    """

    def __init__(self, observer: str | Callable[..., ObserverBase] = "MinMax", **options: Any) -> None:
        super().__init__(observer, algorithm="nnie_log", **options)

    @property
    def grid(self) -> Grid:
        own = super().grid
        return replace(own, kind="log", table=log_table(2.0 ** (1 / 16), own.bits))


def quantizer_of(name: Any, allow_code: bool = False) -> Callable[..., QuantizeBase]:
    """Return the constructor of a method's quantizers.

    Args:
        name: a class or instance, a registered name of a quantizer or training algorithm, or "module:Class".
        allow_code: permit "module:Class", which runs the module's code.

    Raises:
        UnknownNameError: there is no method of that name; lists similar names.
        ConfigError: "module:Class" is not permitted or is not a quantizer, or a name is registered as both kinds.
    """
    if isinstance(name, str) and ":" in name:
        if not allow_code:
            hint = "pass allow_code=True if you trust it"
            raise ConfigError("module:Class runs code, which is not permitted", got=name, hint=hint)
        name = import_by_name(name, "method", ConfigError)
    if isinstance(name, type) and issubclass(name, QuantizeBase):
        return name
    if isinstance(name, type) and issubclass(name, Algorithm):
        name = name()
    if isinstance(name, Algorithm):
        return partial(AlgorithmQuantizer, algorithm=name)
    if not isinstance(name, str):
        allowed = "a registered name, an Algorithm, or a class derived from QuantizeBase"
        raise ConfigError("Quantization method must be a name or a class", got=repr(name)[:120], allowed=allowed)
    bare, options = parse_call(name)
    own, algorithms = registered("quantizer"), registered("training")
    if bare in own and bare in algorithms:
        hint = "register the quantizer under another name"
        raise ConfigError(f"'{bare}' is both a quantizer and a training algorithm", hint=hint)
    if bare not in own and bare not in algorithms:
        raise UnknownNameError("quantization method", bare, [*own, *algorithms])
    if bare in algorithms:
        return partial(AlgorithmQuantizer, algorithm=name)
    return partial(own[bare], **options) if options else own[bare]  # type: ignore[no-any-return]  # by registration


# ---------------------------------------------------------------- modes of a whole model


def _switch(model: nn.Module, observe: bool, quantize: bool, named: str) -> None:
    for name, m in model.named_modules():
        if isinstance(m, QuantizeBase) and named in name.replace(
            "weight_quantizer", "weight_quantizer.weight_fake_quant"
        ):
            m.observer_enabled, m.fake_quant_enabled = observe, quantize


def vanishing_note(model: nn.Module) -> str:
    """Return a warning of quantizers that round all they have observed to 0, though it is not; "" if there are none."""
    found = {n: m.activation_post_process.vanishing for n, m in model.named_modules() if isinstance(m, QuantizeBase)}
    small = [f"'{n}' ({greatest:.1e})" for n, greatest in found.items() if greatest]
    what = "warning: values are too small to be quantized and become 0 (greatest magnitude)"
    return f"{what}: {', '.join(small[:3])}{f' and {len(small) - 3} more' * (len(small) > 3)}" if small else ""


def enable_calibration(model: nn.Module, named: str = "") -> None:
    """Make quantizers observe without rounding; `named` selects those with this text in their names."""
    _switch(model, True, False, named)


def enable_calibration_woquantization(model: nn.Module, quantizer_type: str = "fake_quant") -> None:
    """Make the quantizers of a type observe without rounding, and turn all others off.

    Args:
        quantizer_type: "weight_fake_quant", "act_fake_quant", or other text in the names of quantizers.
    """
    disable_all(model)
    _switch(model, True, False, quantizer_type)


def enable_calibration_quantization(model: nn.Module, quantizer_type: str = "fake_quant") -> None:
    """Make the quantizers of a type, as above, observe and round, and turn all others off."""
    disable_all(model)
    _switch(model, True, True, quantizer_type)


def enable_quantization(
    model: nn.Module, named: str = "", *, weight_cali_on: bool = False, act_cali_on: bool = False
) -> None:
    """Make quantizers round; they observe only the first batch of training, if none was observed.

    A warning names tensors whose values have become too small to be quantized, as in deep networks before training.

    Args:
        weight_cali_on, act_cali_on: observe every batch besides, in quantizers of weights, of activations.
    """
    _switch(model, False, True, named)
    if note := vanishing_note(model):
        logging.getLogger("chipfit").warning(note)
    for on, kind in ((weight_cali_on, "weight_fake_quant"), (act_cali_on, "act_fake_quant")):
        if on:
            _switch(model, True, True, kind)


def enable_all(model: nn.Module, named: str = "") -> None:
    """Make quantizers observe and round: their parameters are initialized again with every batch."""
    _switch(model, True, True, named)


def disable_all(model: nn.Module, named: str = "") -> None:
    """Turn quantizers off: the model computes in float."""
    _switch(model, False, False, named)
