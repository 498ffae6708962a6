"""Small chips for tests: configurations, options, models, and capabilities."""

from collections.abc import Iterable, Sequence
from typing import Any

from chipfit import target_platform as tp
from chipfit.mct.target_platform.configs import BIAS_ATTR, KERNEL_ATTR

FLOAT = tp.AttributeQuantizationConfig()
KERNEL = tp.AttributeQuantizationConfig(tp.QuantizationMethod.SYMMETRIC, 8, True, True)


def kernel(bits: int = 8, method: tp.QuantizationMethod = tp.QuantizationMethod.SYMMETRIC, **more: Any) -> Any:
    """Return the configuration of weights, per channel unless `more` says otherwise."""
    return KERNEL.clone_and_edit(weights_n_bits=bits, weights_quantization_method=method, **more)


def config(kernel: Any = KERNEL, bias: Any = FLOAT, **changes: Any) -> tp.OpQuantizationConfig:
    """Return a configuration: results of 8 bits with power-of-two thresholds, inputs of 8 or 16 bits."""
    weights = {KERNEL_ATTR: kernel, BIAS_ATTR: bias}
    base = tp.OpQuantizationConfig(FLOAT, weights, tp.QuantizationMethod.POWER_OF_TWO, 8, (8, 16), True)
    return base.clone_and_edit(**changes)


def options(*configs: tp.OpQuantizationConfig, **changes: Any) -> tp.QuantizationConfigOptions:
    """Return options of these configurations, the first as base; without any, of `config(**changes)`."""
    choices = configs or (config(**changes),)
    return tp.QuantizationConfigOptions(list(choices), choices[0])


def model(*sets: Any, fusings: Iterable[tp.Fusing] = ()) -> tp.TargetPlatformModel:
    """Return a model of operator sets; a text is the name of a set without options."""
    made = [tp.OperatorsSet(s) if isinstance(s, str) else s for s in sets]
    return tp.TargetPlatformModel(options(), operator_set=made, fusing_patterns=fusings)


def fusing_chip(*patterns: Sequence[Any], **layers: Sequence[Any]) -> tp.TargetPlatformCapabilities:
    """Return capabilities of sets (name=layers) with fusing patterns; a tuple of names is a concatenation."""
    sets = {n: tp.OperatorsSet(n) for n in layers}
    group = lambda g: sets[g] if isinstance(g, str) else tp.OperatorSetConcat(*(sets[n] for n in g))
    fusings = [tp.Fusing([group(g) for g in p], name=str(p)) for p in patterns]
    attached = tp.OperationsToLayers([tp.OperationsSetToLayers(n, of_set) for n, of_set in layers.items()])
    return tp.TargetPlatformCapabilities(model(*sets.values(), fusings=fusings), op_sets_to_layers=attached)


EIGHT = tp.OpQuantizationConfig(FLOAT, {}, tp.QuantizationMethod.POWER_OF_TWO, 8, (4, 8), True)
FOUR = options(EIGHT.clone_and_edit(activation_n_bits=4))


def chip(four: Sequence[Any], eight: Sequence[Any] | None = None, fusing: str = "") -> tp.TargetPlatformCapabilities:
    """Return capabilities with results of 8 bits, of 4 in the set "four" of the layers `four`.

    A set "eight" has the layers `eight`; the set `fusing` fuses behind convolutions.
    """
    layers = {"four": four} if eight is None else {"four": four, "eight": eight}
    sets = {n: tp.OperatorsSet(n, FOUR if n == "four" else None) for n in (*layers, *(["Conv"] if fusing else []))}
    fusings = [tp.Fusing([sets["Conv"], sets[fusing]])] if fusing else []
    platform = tp.TargetPlatformModel(options(EIGHT), operator_set=sets.values(), fusing_patterns=fusings)
    with tp.TargetPlatformCapabilities(platform) as tpc:
        for name, of_set in layers.items():
            tp.OperationsSetToLayers(name, list(of_set))
    return tpc
