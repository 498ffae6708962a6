"""Quantizers as document 004 describes them: a module with an observer; any training algorithm in one of them.

@register("quantizer", "mine")
class Mine(QuantizeBase): ...
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from chipfit.errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from chipfit.facade.import_by_name import import_by_name
from chipfit.facade.quantize_fx.observers import ObserverBase, observer_of, reduced, to_pot
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.plan.training import algorithm_of, refusal
from chipfit.quantizers.algorithm import Algorithm
from chipfit.quantizers.grids import Grid, all_codes
from chipfit.quantizers.stored import Stored
from chipfit.registry import parse_call, registered

__all__ = ["AlgorithmQuantizer", "QuantizeBase"]
__all__ += ["disable_all", "enable_all", "enable_calibration", "enable_quantization"]

_TRAINS = "train a batch, or run one after enable_calibration(model)"


class QuantizeBase(nn.Module):
    """Rounds a tensor; a subclass overrides `forward`.

    `activation_post_process` is its observer, made from the same keywords, whose options it has too. `observer_enabled`
    and `fake_quant_enabled` are plain attributes, see `enable_calibration` and its like; while `observing`, `forward`
    is to show the observer its input and start its parameters again from what that has seen.

    Args:
        observer: the name of an observer, or a class.
        observer_kwargs: options of `ObserverBase`, and those of the observer.

    Raises:
        UnknownNameError: no such observer, or no such option.
        ConfigError: options that contradict each other.
    """

    def __init__(self, observer: str | Callable[..., ObserverBase] = "MinMax", **observer_kwargs: Any) -> None:
        super().__init__()
        self.activation_post_process = own = observer_of(observer)(**observer_kwargs)
        self.quant_min, self.quant_max, self.bitwidth = own.quant_min, own.quant_max, own.bitwidth
        self.qscheme, self.ch_axis, self.pot_scale = own.qscheme, own.ch_axis, own.pot_scale
        self.ada_sign, self.sticky_sign = own.ada_sign, own.sticky_sign
        self.observer_enabled, self.fake_quant_enabled = False, True
        self._signed = self.quant_min, self.quant_max

    @property
    def observing(self) -> bool:
        """Whether this batch counts: in calibration, and the first one of training."""
        first = self.training and self.fake_quant_enabled and not self.activation_post_process.batches
        return self.observer_enabled or first

    def prepare(self, x: torch.Tensor | None) -> None:
        """Called once before training: x is the weight that will be rounded, None for an activation."""

    def adapt_sign(self, x: torch.Tensor) -> None:
        """Where `ada_sign`: codes from 0 for a batch without negative values, with sign for others unless sticky."""
        if not self.ada_sign:
            return
        unsigned = bool(reduced(x.detach().min(), "MIN") >= 0)
        if unsigned or not self.sticky_sign:
            self.quant_min, self.quant_max = all_codes(self.bitwidth, False) if unsigned else self._signed
            own = self.activation_post_process
            own.quant_min, own.quant_max, own.adjust_sign = self.quant_min, self.quant_max, unsigned

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero point, [] or [C], as a chip would store them: parameters of these names, or what was seen."""
        own: Any = self
        if not hasattr(own, "scale"):
            return self.activation_post_process.calculate_qparams()
        scale, zero = (v.detach().reshape(-1 if self.ch_axis >= 0 else ()) for v in (own.scale, own.zero_point))
        return to_pot(scale.abs()) if self.pot_scale else scale.abs(), zero.round().to(torch.int32)

    def reals(self, w: torch.Tensor) -> torch.Tensor:
        """The weight that a chip stores in place of w."""
        return self(w)  # type: ignore[no-any-return]  # a module's call

    @property
    def grid(self) -> Grid:
        """The codes as they are now."""
        return self.activation_post_process.grid

    def get_extra_state(self) -> dict[str, Any]:
        return {"quant_min": self.quant_min, "quant_max": self.quant_max}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        return f"codes {self.quant_min}..{self.quant_max}, observes={self.observing}, rounds={self.fake_quant_enabled}"


def check_one_scale(q: QuantizeBase, role: str) -> None:
    """Raise where an "activation" has a scale for each channel, which concerns weights."""
    if role == "activation" and q.ch_axis >= 0:
        raise ConfigError("Activations have one scale: per_channel concerns weights", got=f"ch_axis={q.ch_axis}")


class AlgorithmQuantizer(QuantizeBase):
    """Rounds as a training algorithm of chipfit does, which starts from what the observer has seen.

    Args:
        algorithm: a registered name, with options as in "lsq(use_grad_scaling=False)", or an `Algorithm`.
        role: "weight" or "activation".
        follows: observe every batch of training, where no number trains.

    Raises:
        UnsupportedError: the algorithm cannot round to such codes.
        ConfigError: activations with a scale for each channel.
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
        assert self.algorithm is not None  # a name or an instance is one
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
        self.rounds = self._made(torch.ones(channels), torch.zeros(channels, dtype=torch.int32), x)

    def _made(self, scale: torch.Tensor, zero: torch.Tensor, x: torch.Tensor | None) -> FakeQuantizer:
        axis = self.ch_axis if self.ch_axis >= 0 else None
        stored = Stored(format="", grid=self.grid, scale=scale.cpu(), zero_point=zero.cpu(), axis=axis)
        assert self.algorithm is not None  # see __init__
        algorithm = self.algorithm.for_tensor(stored, self.role, () if x is None else tuple(x.shape))
        return FakeQuantizer(self.role, stored, algorithm, None if x is None else x.detach().cpu())

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
            raise DataError("A quantizer has no numbers yet: it has seen no batch", hint=_TRAINS)
        return self.rounds(x)  # type: ignore[no-any-return]  # a module's call

    @torch.no_grad()
    def _start(self, x: torch.Tensor | None) -> None:
        """Give the parameters the values that follow from what was seen; they stay the objects that optimizers hold."""
        fresh = self._made(*self.activation_post_process.calculate_qparams(), x)
        for name, value in fresh.given().items():
            getattr(self.rounds, name).data = value.data.to(getattr(self.rounds, name).device)
        self.rounds.grid, self.rounds.algorithm = fresh.grid, fresh.algorithm

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        s, z = (v.detach() for v in self.rounds.numbers())
        return s, z.round().to(torch.int32)

    def reals(self, w: torch.Tensor) -> torch.Tensor:
        return self.rounds.reals(w)

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "least": self.rounds.least}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.rounds.least = state.pop("least").to(self.rounds.least.device)
        super().set_extra_state(state)
        own = self.activation_post_process
        own.quant_min, own.quant_max = self.quant_min, self.quant_max
        self.rounds.grid = self.rounds.algorithm.grid(self.grid)


def quantizer_of(name: Any, allow_code: bool = False) -> Callable[..., QuantizeBase]:
    """What makes the quantizers of a method: a class, or a registered name of a quantizer or a training algorithm.

    Args:
        name: also "module:Class", where code may be loaded.

    Raises:
        UnknownNameError: listing near names.
        ConfigError: "module:Class" that may not be loaded or is no quantizer, or a name that stands for two things.
    """
    if isinstance(name, str) and ":" in name:
        if not allow_code:
            hint = "pass allow_code=True if you trust it"
            raise ConfigError("A method in a module runs that module's code", got=name, hint=hint)
        name = import_by_name(name, "method", ConfigError)
    if isinstance(name, type) and issubclass(name, QuantizeBase):
        return name
    if isinstance(name, type) and issubclass(name, Algorithm):
        name = name()
    if isinstance(name, Algorithm):
        return partial(AlgorithmQuantizer, algorithm=name)
    if not isinstance(name, str):
        allowed = "a registered name, an Algorithm, or a class derived from QuantizeBase"
        raise ConfigError("This is no quantization method", got=repr(name)[:120], allowed=allowed)
    bare, options = parse_call(name)
    own, algorithms = registered("quantizer"), registered("training")
    if bare in own and bare in algorithms:
        raise ConfigError(f"'{bare}' is a quantizer and a training algorithm", hint="register the quantizer otherwise")
    if bare not in own and bare not in algorithms:
        raise UnknownNameError("quantization method", bare, [*own, *algorithms])
    if bare in algorithms:
        return partial(AlgorithmQuantizer, algorithm=name)
    return partial(own[bare], **options) if options else own[bare]  # type: ignore[no-any-return]  # by registration


# ---------------------------------------------------------------- states of a whole model


def _switch(model: nn.Module, observe: bool, quantize: bool, named: str) -> None:
    for name, m in model.named_modules():
        if isinstance(m, QuantizeBase) and named in name:
            m.observer_enabled, m.fake_quant_enabled = observe, quantize


def enable_calibration(model: nn.Module, named: str = "") -> None:
    """Observe, and round nothing: of quantizers with `named` in their name, as in all that follow."""
    _switch(model, True, False, named)


def enable_quantization(model: nn.Module, named: str = "") -> None:
    """Round, and observe nothing but the first batch of training where none was seen."""
    _switch(model, False, True, named)


def enable_all(model: nn.Module, named: str = "") -> None:
    """Observe and round: the numbers start again with every batch."""
    _switch(model, True, True, named)


def disable_all(model: nn.Module, named: str = "") -> None:
    """The float network."""
    _switch(model, False, False, named)
