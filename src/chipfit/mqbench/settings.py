"""Settings of MQBench chosen before a model is prepared: the method, flags of a backend, folding of batch norms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from chipfit.errors import ConfigError, check_known
from chipfit.files import package_data
from chipfit.mqbench.observers import ObserverBase, observer_of
from chipfit.mqbench.quantizers import AlgorithmQuantizer, QuantizeBase, check_one_scale, quantizer_of
from chipfit.quantizers.bn_fold import strategy_of
from chipfit.quantizers.grids import all_codes
from chipfit.validation import allowed, arguments

__all__ = ["FoldBN", "QConfig", "get_backend_params", "get_foldbn_config", "get_qconfig"]

#: bits of the first and the last weighted layer in every setting
END_LAYER_BITS = 8


@dataclass(frozen=True)
class QConfig:
    """The quantizers of a model and their placement.

    `activation` and `weight` create a quantizer from the keywords of `QuantizeBase`.
    """

    activation: Callable[..., QuantizeBase]
    weight: Callable[..., QuantizeBase]
    bit: int
    ada_sign: bool
    symmetry: bool
    per_channel: bool
    pot_scale: bool
    graph: int
    bnfold: int
    #: by role, in place of `weight` and `activation` in first and last layers
    ends: Mapping[str, Callable[..., QuantizeBase]] = field(default_factory=dict)

    outputs = False  #: results of the network stay in float

    def quantizes(self, n: Any, module: Any) -> None:
        """Leave the choice of quantized operators to the kind of graph."""

    @property
    def keeps_batch_norms(self) -> bool:
        """True if strategy 4 leaves batch norms behind weights without a scale of their own."""
        return self.bnfold == 4 and is_scale_invariant(self.quantizer("weight", False))

    def quantizer(self, role: str, end: bool, axis: int = 0, layers: Any = ()) -> QuantizeBase:
        """Return a quantizer of a "weight" (channels on `axis`) or an "activation"; `end`: of a first or last layer."""
        bits, per_channel = END_LAYER_BITS if end else self.bit, self.per_channel and role == "weight"
        low, high = all_codes(bits, self.symmetry)
        kind = f"per_{'channel' if per_channel else 'tensor'}_{'symmetric' if self.symmetry else 'affine'}"
        make = self.weight if role == "weight" else self.activation
        make = self.ends.get(role, make) if end else make
        quantizer = make(
            quant_min=low,
            quant_max=high,
            qscheme=getattr(torch, kind),
            ch_axis=axis if per_channel else -1,
            ada_sign=self.ada_sign and role == "activation",
            pot_scale=self.pot_scale,
            bitwidth=bits,
        )
        check_one_scale(quantizer, role)
        return quantizer


def is_scale_invariant(quantizer: QuantizeBase) -> bool:
    """Return whether multiplying a weight by a number does not change what it is rounded to."""
    return isinstance(quantizer, AlgorithmQuantizer) and bool(getattr(quantizer.algorithm, "scale_invariant", False))


@dataclass(frozen=True)
class FoldBN:
    """A strategy of folding batch norms during training, see `chipfit.quantizers.bn_fold`."""

    strategy: int


@lru_cache(maxsize=1)
def _settings() -> dict[str, Any]:
    return package_data("chipfit.mqbench", "settings.yaml")  # type: ignore[no-any-return]  # a table


def get_backend_params(backend: str) -> dict[str, Any]:
    """Return the flags of an MQBench backend for `get_qconfig`. The name stands for these flags, not for a platform.

    Raises:
        UnknownNameError: there is no such backend; lists similar names.
    """
    known = _settings()["backends"]
    check_known("backend", backend, known)
    return dict(known[backend])


def get_foldbn_config(strategy: int) -> FoldBN:
    """Return the folding strategy of a number.

    Raises:
        ConfigError: there is no strategy of that number.
    """
    return FoldBN(strategy_of(strategy))


@arguments(ConfigError)
def get_qconfig(
    w_method: Any = "lsq",
    a_method: Any = "lsq",
    bit: Annotated[int, Field(ge=1, le=16), allowed("1 to 16")] = 8,
    w_observer: str | Callable[..., ObserverBase] | None = None,
    a_observer: str | Callable[..., ObserverBase] | None = None,
    *,
    ada_sign: bool = False,
    symmetry: bool = True,
    per_channel: bool = False,
    pot_scale: bool = False,
    graph: Literal[1, 2, 3] | None = None,
    bnfold: int | None = None,
    allow_code: bool = False,
) -> QConfig:
    """Return the quantizers of a setting: `get_qconfig(**qparams, **backend_params)`.

    Args:
        w_method, a_method: a registered quantizer or training algorithm, a method of settings.yaml, or a class.
        bit: width of weights and activations; first and last layers have 8 bits.
        w_observer, a_observer: observers that initialize the quantizers; the method's own when omitted.
        ada_sign: activations without negative values become unsigned; academic settings only.
        symmetry: zero points are 0; False: they are free.
        per_channel: weights have one scale per output channel.
        pot_scale: scales are powers of two.
        graph: 1, 2 or 3: placement of the quantizers; when omitted 1 with `ada_sign`, else 3.
        bnfold: folding strategy, unless `prepare_qat_fx` receives one.
        allow_code: permit methods given as "module:Class".

    Raises:
        UnknownNameError: a method, an observer or an option does not exist.
        ConfigError, UnsupportedError: an option is out of bounds or contradicts another.
    """
    defaults = _settings()["defaults"]
    graph = (1 if ada_sign else defaults["graph"]) if graph is None else graph
    bnfold = (-1 if ada_sign else defaults["bnfold"]) if bnfold is None else bnfold
    if ada_sign and (not symmetry or pot_scale):
        what = "ada_sign is for academic settings only: no chip changes signedness at run time"
        raise ConfigError(what, allowed="with symmetry=True and pot_scale=False")
    w = quantizer_factory("weight", w_method, w_observer, allow_code)
    a = quantizer_factory("activation", a_method, a_observer, allow_code)
    known, given = _settings()["methods"], (("weight", w_method, w_observer), ("activation", a_method, a_observer))
    own = {role: known.get(_bare(method), {}).get("ends") for role, method, _ in given}
    ends = {role: quantizer_factory(role, own[role], o, allow_code) for role, _, o in given if own[role]}
    fold = get_foldbn_config(bnfold).strategy
    out = QConfig(a, w, bit, ada_sign, symmetry, per_channel, pot_scale, graph, fold, ends)
    for role in ("weight", "activation"):
        for end in (False, True):
            out.quantizer(role, end)  # raises for contradictory options
    return out


def _bare(method: Any) -> str:
    """Return the name of a method without its options."""
    return str(method).partition("(")[0]


def quantizer_factory(role: str, method: Any, observer: Any, allow_code: bool = False) -> Callable[..., QuantizeBase]:
    """Return the constructor of the quantizers of one role."""
    own = _settings()["methods"].get(name := _bare(method), {})
    default = own.get(f"{role[0]}_observer", "MinMax" if role == "weight" else "EMAMinMax")
    method = own["algorithm"] + method.removeprefix(name) if "algorithm" in own else method
    make = partial(quantizer_of(method, allow_code), observer_of(observer or default))
    if isinstance(make.func, type) and issubclass(make.func, AlgorithmQuantizer):
        make = partial(make, role=role, follows=own.get("follows", False))
    return make
