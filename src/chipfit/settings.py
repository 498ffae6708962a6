"""Which of the optional steps `quantize` takes: rewrites that keep the network's function, and corrections of what rounding takes away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from chipfit.errors import PlanError, UnknownNameError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Optional steps of `quantize`, in the order in which they are taken. All are off unless asked for.

    Raises:
        PlanError: a value of the wrong type, or a negative ratio or threshold.
    """

    collapse_linear: bool = False  #: two linear operators in a row become one
    collapse_residual: bool = False  #: conv(x) + x becomes one convolution
    relu_bound: bool = False  #: clipped activations get a power of two as upper bound
    equalize: bool = False  #: channels between two linear operators get weights of equal range
    shift_negative: float | None = None  #: lift short negative tails above zero, up to this share of the threshold
    softmax_shift: bool = False  #: logits go to the middle of their range
    concat_ranges: bool = False  #: what a concatenation joins shares one grid with its result
    correct_second_moment: bool = (
        False  #: each channel gets back the mean and spread that it had in float; reads the data twice
    )
    correct_bias: bool = False  #: the mean error of rounded weights leaves the bias
    correct_activation_bias: float | None = (
        None  #: so does that of rounded inputs, where it is this share of their mean or more
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, bool):
                bad, allowed = not isinstance(value, bool), "True or False"
            else:
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                bad, allowed = (
                    value is not None and not (number and 0 <= value < math.inf),
                    "None, or a number of at least 0",
                )
            if bad:
                raise PlanError(f"The setting '{f.name}' is not understood", got=repr(value), allowed=allowed)

    @property
    def adapts(self) -> bool:
        """The graph will be rewritten after calibration."""
        return self.shift_negative is not None or self.softmax_shift

    @property
    def corrects(self) -> bool:
        """Biases will be moved, so every linear operator should have one."""
        return self.correct_second_moment or self.correct_bias or self.correct_activation_bias is not None

    def to_record(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON data."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Settings:
        """The inverse of `to_record`.

        Raises:
            UnknownNameError: a setting that does not exist.
        """
        known = [f.name for f in fields(cls)]
        for name in record:
            if name not in known:
                raise UnknownNameError("setting", name, known)
        return cls(**record)


#: no optional step
PLAIN = Settings()
