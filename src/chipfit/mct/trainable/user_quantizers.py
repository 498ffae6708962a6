"""Quantizer classes of users as a training algorithm, in models of any framework, with deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chipfit.errors import UnsupportedError
from chipfit.frameworks import framework_of
from chipfit.mct.target_platform.configs import QuantizationMethod
from chipfit.mct.trainable.configs import config_of
from chipfit.quantizers.algorithm import Algorithm, Numbers
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.hosting import apply, initialize
from chipfit.quantizers.ops import clamp
from chipfit.quantizers.stored import Stored

#: greatest distance of a value from the grid [steps]
_MAX_DEVIATION = 0.01
#: a number beyond the range of any grid
_BEYOND_GRID = 1e30


class UserQuantizers(Algorithm):
    """A training algorithm that creates a quantizer of a user's class for each tensor.

    When training ends, the quantizer's inferable twin determines scale and zero point, and the quantizer's output
    replaces the weight, which keeps learned rounding.

    Args:
        classes: of which one fits each tensor.
        options: of their constructors.
    """

    #: the quantizer of one tensor, its shape and its role
    quantizer: Any
    _shape: tuple[int | None, ...]
    _role: str

    def __init__(self, classes: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self.classes, self.options = classes, dict(options)

    @classmethod
    def of(cls, quantizer: Any, shape: Sequence[int | None], role: str) -> UserQuantizers:
        """Return the algorithm of one tensor."""
        made = cls((type(quantizer),), {})
        made.quantizer, made._shape, made._role = quantizer, tuple(shape), role
        return made

    def refuses(self, grid: Grid, role: str) -> str:
        names = ", ".join(c.__name__ for c in self.classes)
        if grid.kind not in ("int", "lut") or (grid.symmetric and grid.zero != 0) or (grid.pot and not grid.symmetric):
            return f"no quantization method describes this grid to {names}"
        method = QuantizationMethod.of_grid(grid)
        fitting = self._fitting(role, method)
        if len(fitting) != 1:
            return f"{'none' if not fitting else 'more than one'} of {names} quantizes {role}s of {method}"
        return ""

    def _fitting(self, role: str, method: QuantizationMethod) -> list[Any]:
        return [c for c in self.classes if c.quantization_target.role == role and method in c.quantization_method]

    def for_tensor(self, stored: Stored, role: str, shape: tuple[int | None, ...]) -> UserQuantizers:
        if stored.axis is not None and shape[stored.axis] != len(stored.scale):
            got = f"{len(stored.scale)} scales for a weight {list(shape)}"
            raise UnsupportedError("Custom quantizers support one channel axis, and this weight has two", got=got)
        cls = self._fitting(role, QuantizationMethod.of_grid(stored.grid))[0]
        return UserQuantizers.of(cls(config_of(stored, role, len(shape)), **self.options), shape, role)

    def start(self, host: Any) -> None:
        self._host = host
        initialize(self.quantizer, self._shape, "quantizer", host, f"{self._role}s of {framework_of(host)}")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that a saved model stores besides the quantizer."""
        return {"shape": list(self._shape), "role": self._role}

    def init(self, stored: Stored, x: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        if not self.quantizer.converts:  # it can train; `reals` and `undeployable` refuse its deployment
            return p["scale"], p["zero_point"]
        if ops.traced(p["scale"]):
            return self._traced_parameters(ops, p, grid)
        stored = self._converted(grid, int(np.prod(p["scale"].shape)))
        s, z = (
            ops.reshape(ops.constant(v.reshape(-1).tolist(), p["scale"]), tuple(p["scale"].shape))
            for v in (stored.scale, stored.zero_point)
        )
        return s, z

    def _converted(self, grid: Grid, channels: int) -> Stored:
        """Return the quantizer's inferable form on a grid of the plan.

        Raises:
            UnsupportedError: it has another grid.
        """
        found = self.quantizer.convert2inferable().stored
        kind = (found.grid.bits, found.grid.table, found.grid.symmetric, found.grid.symmetric and found.grid.signed)
        if kind != (grid.bits, grid.table, grid.symmetric, grid.symmetric and grid.signed):
            self._refuse("it converts to a quantizer of another grid", f"{found.grid.bits} bits: {found.grid}")
        scale, zero = found.scale.reshape(-1), found.zero_point.reshape(-1)
        if len(scale) not in (1, channels):
            self._refuse("it converts to a quantizer of other channels", f"{len(scale)} of {channels}")
        if grid.pot and bool((scale.log2() != scale.log2().round()).any()):
            self._refuse("it converts to scales that are not powers of two", scale.tolist()[:4])
        if not grid.symmetric:
            zero = zero + grid.qmin  # quantized values of inferable quantizers start at 0
        return Stored(format="", grid=grid, scale=scale.expand(channels), zero_point=zero.expand(channels), axis=0)

    def _traced_parameters(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        """Return scale and zero point inside a traced function: from the quantizer's results beyond both ends."""
        scale = p["scale"]
        shape = tuple(scale.shape) or (1,) * len(self._shape)
        far = ops.reshape(ops.constant([_BEYOND_GRID] * int(np.prod(shape)), scale), shape)
        high, low = apply(self.quantizer, far, False), apply(self.quantizer, -far, False)
        steps = grid.table[-1] - grid.table[0] if grid.table is not None else (1 << grid.bits) - 1
        s = (high - low) / steps
        if grid.pot:
            s = ops.power(2.0, ops.round(ops.log2(s)))
        z = p["zero_point"] if grid.symmetric else ops.reshape(grid.qmin - ops.round(low / s), tuple(scale.shape))
        return ops.stop_gradient(ops.reshape(s, tuple(scale.shape))), ops.stop_gradient(z)

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        y = apply(self.quantizer, x, p["training"])
        if tuple(y.shape) != tuple(x.shape):
            self._refuse("it returned a tensor of another shape", list(y.shape), list(x.shape))
        if grid.table is None and grid.levels < 1 << grid.bits:  # the chip does not use the lowest value
            s, z = self.numbers(ops, p, grid)
            y = clamp(ops, y, (grid.qmin - z) * s, (grid.qmax - z) * s)
        return y

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        self.quantizer.convert2inferable()  # raises if there is none
        s, z = self.numbers(ops, p, grid)
        y = self.call(ops, x, {**p, "training": False}, grid)
        off = float(ops.stop_gradient(ops.max(ops.abs(y - ops.fake_quantize(y, s, z, grid)) / s)))
        if not off <= _MAX_DEVIATION:
            self._refuse("it returns values off the grid of its inferable quantizer", f"{off:.3g} steps off")
        return y

    @property
    def undeployable(self) -> Mapping[str, str]:  # type: ignore[override]  # a class attribute of other algorithms
        """The reason why activations cannot be deployed: the inferable quantizer rounds differently."""
        if self._role != "activation":
            return {}
        inferable = self.quantizer.convert2inferable()
        stored, ops = inferable.stored, inferable.ops
        grid, s, zero = stored.grid, float(stored.scale), int(stored.zero_point)
        values = grid.table or [q - zero + 0.25 for q in range(grid.qmin - 2, grid.qmax + 3, max(1, grid.levels // 64))]
        x = ops.constant([v * s for v in values], self._host.scale)
        x = ops.reshape(x, (-1, *[1] * (len(self._shape) - 1)))
        own, wanted = apply(self.quantizer, x, False), inferable(x)
        off = ops.abs(own - wanted)
        if (most := float(ops.stop_gradient(ops.max(off)))) <= _MAX_DEVIATION * s:
            return {}
        worst = ops.where(off < most, -_BEYOND_GRID, 0.0)
        at, y, z = (float(ops.stop_gradient(ops.max(v + worst))) for v in (x, own, wanted))
        what = f"{type(self.quantizer).__name__} rounds differently from its inferable quantizer"
        return {self._role: f"{what}, {at:g} to {y:g} in place of {z:g}"}

    def _refuse(self, why: str, got: Any, allowed: Any = None) -> None:
        what = f"{type(self.quantizer).__name__} cannot quantize this {self._role}: {why}"
        raise UnsupportedError(what, got=got, allowed=allowed)
