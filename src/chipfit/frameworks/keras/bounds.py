"""What holds in each step of training of a Keras model: bounds on scales, and numbers that are numbers."""

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
from chipfit.plan.json_codec import record_from_json, record_to_json
from chipfit.quantizers.scale_bounds import SLACK, ScaleBound, clip_to_bounds


class ScaleBounds:
    """The bounds of one model. As the constraint of one of its variables it holds them in each step of an optimizer.

    Args:
        model: whose layers hold the quantizers.
        scales: where those with a scale of their own are.
        limits: of the platform, over the tensors that own quantizers.
    """

    def __init__(self, model: Any, scales: Sequence[ScaleSlot], limits: Sequence[ScaleBound]) -> None:
        self.scales = tuple(scales)
        self.quantizers = {s.tensor: s.quantizer_in(model) for s in scales}
        self.limits = [x for x in limits if all(t in self.quantizers for t, _ in x.terms)]
        self._limited = {t: self.quantizers[t] for x in self.limits for t, _ in x.terms}
        weights = {s.tensor for s in scales if s.variable}
        self._moves = [t for t, q in self._limited.items() if any(getattr(q, n).trainable for n in q.trains)]
        self._moves.sort(key=lambda t: (not math.prod(self.quantizers[t].shape) > 1, t not in weights))
        self._still: dict[str, dict[str, np.ndarray]] = {}
        self._last = None
        for t in self._moves[-1:]:
            q = self.quantizers[t]
            self._last = next(v for n in q.trains if (v := getattr(q, n)).trainable)

    def to_config(self) -> dict[str, Any]:
        """What `from_config` makes the same of, as JSON."""
        return {"scales": [[*astuple(s)] for s in self.scales], "limits": [record_to_json(x) for x in self.limits]}

    @classmethod
    def from_config(cls, model: Any, config: Any) -> ScaleBounds:
        """The bounds of a model that was made like the one that these are of.

        Raises:
            PlanError: a limit is malformed.
        """
        limits = [record_from_json(ScaleBound, x, f"limit {k}") for k, x in enumerate(config["limits"])]
        return cls(model, [ScaleSlot(*s) for s in config["scales"]], limits)

    def freeze(self) -> None:
        """Take what does not train by value: JAX takes such variables away while it compiles a step."""
        self._still = {
            t: {n: ops.convert_to_numpy(v) for n in q._given if not (v := getattr(q, n)).trainable}
            for t, q in self._limited.items()
        }

    def attach(self, model: Any) -> None:
        """Let the model have these bounds, and its optimizers call them when they have changed all variables."""
        model.bounds = self
        if self._last is not None:
            self._last.constraint = self

    def __call__(self, _: Any) -> Any:
        self.project()
        return ops.convert_to_tensor(self._last)

    def project(self) -> None:
        """Bring scales back to where the platform's rules hold."""
        log = {t: self._log(t) for t in self._limited}
        new = clip_to_bounds(KerasOps, self.limits, log, self._moves, {t for t in log if self.quantizers[t].grid.pot})
        for t in self._moves:
            q = self.quantizers[t]
            factor = ops.where(new[t] == log[t], 1.0, ops.power(2.0, new[t] - log[t]))
            p = {n: ops.convert_to_tensor(v) for n in q.trains if (v := getattr(q, n)).trainable}
            for name, value in q.algorithm.rescaled(KerasOps, p, ops.reshape(factor, q.shape)).items():
                getattr(q, name).assign(value)

    def _log(self, t: str) -> Any:
        """log2 of a scale as it is now, [] or [C]."""
        q = self.quantizers[t]
        p = {n: self._still.get(t, {}).get(n, getattr(q, n)) for n in q._given}
        s = q.algorithm.numbers(KerasOps, {n: ops.convert_to_tensor(v) for n, v in p.items()}, q.grid)[0]
        return ops.log2(ops.reshape(s, (-1,) if math.prod(q.shape) > 1 else ()))

    def settle(self) -> None:
        """As a step does, outside of one.

        Raises:
            TrainingError: a scale is none, or no scales that train satisfy a rule.
        """
        self.check(())
        self.freeze()
        self.project()
        log = {t: ops.convert_to_numpy(self._log(t)).astype("float64") for t in self._limited}
        for x in self.limits:
            total: Any = sum(e * log[t] for t, e in x.terms)
            if np.any(total < x.low - 2 * SLACK) or np.any(total > x.high + 2 * SLACK):
                layer = next(s.where for s in self.scales if s.tensor == x.terms[0][0])
                raise TrainingError(f"The scales that train cannot satisfy the platform's rule {x}", where=layer)

    def check(self, weights: Any, step: int | None = None) -> None:
        """Raise where a scale or a weight is no number.

        Raises:
            TrainingError: naming layer and step.
        """
        when = "After training" if step is None else f"In step {step} of training"
        hint = "lower the learning rate, or look at the loss and the data of the step before"
        scales = [ops.reshape(q.numbers()[0], (-1,)) for q in self.quantizers.values()]
        largest = [ops.reshape(ops.max(ops.abs(v)), (1,)) for v in weights]
        now = ops.convert_to_numpy(ops.concatenate([*scales, *largest])) if scales or largest else np.ones(1)
        if bool(np.all(np.isfinite(now))) and bool(np.all(now[: len(now) - len(largest)] > 0)):
            return
        for at, s in zip(self.scales, map(ops.convert_to_numpy, scales), strict=True):
            wrong = s[~((s > 0) & np.isfinite(s))]
            if wrong.size:
                raise TrainingError(f"{when}, the scale of '{at.tensor}' is {wrong[0]:g}", where=at.where, hint=hint)
        name = next(v.path for v, m in zip(weights, now[-len(largest) :], strict=True) if not np.isfinite(m))
        what = f"{when}, '{name}' holds NaN or infinite numbers"
        raise TrainingError(what, where=name.rpartition("/")[0], hint=hint)
