"""Small chips for tests: configurations, options, models, and capabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chipfit.facade.target_platform.configs import BIAS_ATTR, KERNEL_ATTR
from chipfit.target_platform import (
    AttributeQuantizationConfig,
    Fusing,
    OperationsSetToLayers,
    OperationsToLayers,
    OperatorSetConcat,
    OperatorsSet,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    TargetPlatformCapabilities,
    TargetPlatformModel,
)

FLOAT = AttributeQuantizationConfig()
KERNEL = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 8, True, True)


def kernel(bits: int = 8, method: QuantizationMethod = QuantizationMethod.SYMMETRIC, **more: Any) -> Any:
    """Return the configuration of weights, per channel unless `more` says otherwise."""
    return KERNEL.clone_and_edit(weights_n_bits=bits, weights_quantization_method=method, **more)


def config(kernel: Any = KERNEL, bias: Any = FLOAT, **changes: Any) -> OpQuantizationConfig:
    """Return a configuration: results of 8 bits with power-of-two thresholds, inputs of 8 or 16 bits."""
    weights = {KERNEL_ATTR: kernel, BIAS_ATTR: bias}
    base = OpQuantizationConfig(FLOAT, weights, QuantizationMethod.POWER_OF_TWO, 8, (8, 16), True)
    return base.clone_and_edit(**changes)


def options(*configs: OpQuantizationConfig, **changes: Any) -> QuantizationConfigOptions:
    """Return options of these configurations, the first as base; without any, of `config(**changes)`."""
    choices = configs or (config(**changes),)
    return QuantizationConfigOptions(list(choices), choices[0])


def model(*sets: Any, fusings: Iterable[Fusing] = ()) -> TargetPlatformModel:
    """Return a model of operator sets; a text is the name of a set without options."""
    made = [OperatorsSet(s) if isinstance(s, str) else s for s in sets]
    return TargetPlatformModel(options(), operator_set=made, fusing_patterns=fusings)


def fusing_chip(*patterns: Sequence[Any], **layers: Sequence[Any]) -> TargetPlatformCapabilities:
    """Return capabilities of sets (name=layers) with fusing patterns; a tuple of names is a concatenation."""
    sets = {n: OperatorsSet(n) for n in layers}
    group = lambda g: sets[g] if isinstance(g, str) else OperatorSetConcat(*(sets[n] for n in g))
    fusings = [Fusing([group(g) for g in p], name=str(p)) for p in patterns]
    attached = OperationsToLayers([OperationsSetToLayers(n, of_set) for n, of_set in layers.items()])
    return TargetPlatformCapabilities(model(*sets.values(), fusings=fusings), op_sets_to_layers=attached)


EIGHT = OpQuantizationConfig(FLOAT, {}, QuantizationMethod.POWER_OF_TWO, 8, (4, 8), True)
FOUR = options(EIGHT.clone_and_edit(activation_n_bits=4))


def chip(four: Sequence[Any], eight: Sequence[Any] | None = None, fusing: str = "") -> TargetPlatformCapabilities:
    """Return capabilities with results of 8 bits, of 4 in the set "four" of the layers `four`.

    A set "eight" has the layers `eight`; the set `fusing` fuses behind convolutions.
    """
    layers = {"four": four} if eight is None else {"four": four, "eight": eight}
    sets = {n: OperatorsSet(n, FOUR if n == "four" else None) for n in (*layers, *(["Conv"] if fusing else []))}
    fusings = [Fusing([sets["Conv"], sets[fusing]])] if fusing else []
    platform = TargetPlatformModel(options(EIGHT), operator_set=sets.values(), fusing_patterns=fusings)
    with TargetPlatformCapabilities(platform) as tpc:
        for name, of_set in layers.items():
            OperationsSetToLayers(name, list(of_set))
    return tpc
