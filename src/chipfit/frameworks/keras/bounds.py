"""Conditions on training of a Keras model: finite numbers, and the platform's bounds on scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from keras import ops

from chipfit.errors import TrainingError
from chipfit.frameworks.keras.backend import KerasOps
from chipfit.frameworks.keras.weight_slots import ScaleSlot
from chipfit.frameworks.training import training_error
from chipfit.plan.json_codec import record_from_json, record_to_json
from chipfit.quantizers.scale_bounds import SLACK, ScaleBound, clip_to_bounds


class ScaleBounds:
    """The bounds of one model. As the constraint of one of its variables, they are enforced in each optimizer step.

    Args:
        model: the model whose layers have the quantizers.
        scales: the places of the scales.
        limits: bounds of the platform, over the tensors that own quantizers.
    """

    def __init__(self, model: Any, scales: Sequence[ScaleSlot], limits: Sequence[ScaleBound]) -> None:
        self.scales = tuple(scales)
        self.quantizers = {s.tensor: s.quantizer_in(model) for s in scales}
        self.bounds = [x for x in limits if all(t in self.quantizers for t, _ in x.terms)]
        self._bounded = {t: self.quantizers[t] for x in self.bounds for t, _ in x.terms}
        weights = {s.tensor for s in scales if s.variable}
        self._trainable = [t for t, q in self._bounded.items() if any(getattr(q, n).trainable for n in q.trains)]
        self._trainable.sort(key=lambda t: (not math.prod(self.quantizers[t].shape) > 1, t not in weights))
        self._constants: dict[str, dict[str, np.ndarray]] = {}
        self._last = None
        for t in self._trainable[-1:]:
            q = self.quantizers[t]
            self._last = next(v for n in q.trains if (v := getattr(q, n)).trainable)

    def to_config(self) -> dict[str, Any]:
        """Return the JSON from which `from_config` creates equal bounds."""
        return {"scales": [[*astuple(s)] for s in self.scales], "limits": [record_to_json(x) for x in self.bounds]}

    @classmethod
    def from_config(cls, model: Any, config: Any) -> ScaleBounds:
        """Create the bounds of a model with the layers of the original one.

        Raises:
            PlanError: A bound is malformed.
        """
        limits = [record_from_json(ScaleBound, x, f"limit {k}") for k, x in enumerate(config["limits"])]
        return cls(model, [ScaleSlot(*s) for s in config["scales"]], limits)

    def freeze(self) -> None:
        """Copy numbers that do not train: JAX removes these variables while it compiles a step."""
        self._constants = {
            t: {n: ops.convert_to_numpy(v) for n in q.input_names if not (v := getattr(q, n)).trainable}
            for t, q in self._bounded.items()
        }

    def attach(self, model: Any) -> None:
        """Attach the bounds to a model, whose optimizers call them after changing all variables."""
        model.bounds = self
        if self._last is not None:
            self._last.constraint = self

    def __call__(self, _: Any) -> Any:
        self.project()
        return ops.convert_to_tensor(self._last)

    def project(self) -> None:
        """Project scales into the platform's bounds."""
        log = {t: self._log(t) for t in self._bounded}
        new = clip_to_bounds(
            KerasOps, self.bounds, log, self._trainable, {t for t in log if self.quantizers[t].grid.pot}
        )
        for t in self._trainable:
            q = self.quantizers[t]
            factor = ops.where(new[t] == log[t], 1.0, ops.power(2.0, new[t] - log[t]))
            p = {n: ops.convert_to_tensor(v) for n in q.trains if (v := getattr(q, n)).trainable}
            for name, value in q.algorithm.rescaled(KerasOps, p, ops.reshape(factor, q.shape)).items():
                getattr(q, name).assign(value)

    def _log(self, t: str) -> Any:
        """Return log2 of the current scale, [] or [C]."""
        q = self.quantizers[t]
        p = {n: self._constants.get(t, {}).get(n, getattr(q, n)) for n in q.input_names}
        s = q.algorithm.numbers(KerasOps, {n: ops.convert_to_tensor(v) for n, v in p.items()}, q.grid)[0]
        return ops.log2(ops.reshape(s, (-1,) if math.prod(q.shape) > 1 else ()))

    def enforce(self) -> None:
        """Check all scales, and project them into the bounds, outside of a step.

        Raises:
            TrainingError: A scale is not positive and finite, or the scales that train cannot satisfy a bound.
        """
        self.check(())
        self.freeze()
        self.project()
        log = {t: ops.convert_to_numpy(self._log(t)).astype("float64") for t in self._bounded}
        for x in self.bounds:
            total: Any = sum(e * log[t] for t, e in x.terms)
            if np.any(total < x.low - 2 * SLACK) or np.any(total > x.high + 2 * SLACK):
                layer = next(s.user_layer for s in self.scales if s.tensor == x.terms[0][0])
                raise TrainingError(f"The scales that train cannot satisfy the platform's rule {x}", where=layer)

    def check(self, weights: Any, step: int | None = None) -> None:
        """Check that scales are positive and finite, and weights finite.

        Raises:
            TrainingError: They are not; names layer and step.
        """
        scales = [ops.reshape(q.numbers()[0], (-1,)) for q in self.quantizers.values()]
        largest = [ops.reshape(ops.max(ops.abs(v)), (1,)) for v in weights]
        now = ops.convert_to_numpy(ops.concatenate([*scales, *largest])) if scales or largest else np.ones(1)
        if bool(np.all(np.isfinite(now))) and bool(np.all(now[: len(now) - len(largest)] > 0)):
            return
        for at, s in zip(self.scales, map(ops.convert_to_numpy, scales), strict=True):
            wrong = s[~((s > 0) & np.isfinite(s))]
            if wrong.size:
                raise training_error(f"the scale of '{at.tensor}' is {wrong[0]:g}", at.user_layer, step)
        name = next(v.path for v, m in zip(weights, now[-len(largest) :], strict=True) if not np.isfinite(m))
        raise training_error(f"'{name}' holds NaN or infinite numbers", name.rpartition("/")[0], step)
