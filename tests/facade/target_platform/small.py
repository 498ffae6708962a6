"""A small chip for tests of which layers a set has: results of 8 bits, and of 4 in the set "four"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chipfit.target_platform import (
    AttributeQuantizationConfig,
    Fusing,
    OperationsSetToLayers,
    OperatorsSet,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    TargetPlatformCapabilities,
    TargetPlatformModel,
)

EIGHT = OpQuantizationConfig(AttributeQuantizationConfig(), {}, QuantizationMethod.POWER_OF_TWO, 8, (4, 8), True)
FOUR = QuantizationConfigOptions([EIGHT.clone_and_edit(activation_n_bits=4)])


def chip(four: Sequence[Any], eight: Sequence[Any] | None = None, fusing: str = "") -> TargetPlatformCapabilities:
    """The set "four" has the layers `four`, a set "eight" the layers `eight`; one of them fuses behind convolutions."""
    layers = {"four": four} if eight is None else {"four": four, "eight": eight}
    sets = {n: OperatorsSet(n, FOUR if n == "four" else None) for n in (*layers, *(["Conv"] if fusing else []))}
    fusings = [Fusing([sets["Conv"], sets[fusing]])] if fusing else []
    model = TargetPlatformModel(QuantizationConfigOptions([EIGHT]), operator_set=sets.values(), fusing_patterns=fusings)
    with TargetPlatformCapabilities(model) as tpc:
        for name, of_set in layers.items():
            OperationsSetToLayers(name, list(of_set))
    return tpc
