"""What holds in each step of training of a Keras model: bounds on scales, and numbers that are numbers."""

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from chipfit.errors import TrainingError
from chipfit.frameworks.keras.layers import KerasQuantizer
from chipfit.frameworks.keras.ops import KerasOps
from chipfit.plan.record import Plan
from chipfit.plan.sharing import Rounding
from chipfit.quantizers.limits import SLACK, clipped


class Bounds:
    """The bounds of one model. As the constraint of one of its variables it holds them in each step of an optimizer.

    Args:
        quantizers: those with a scale of their own, by the tensor that owns them.
    """

    def __init__(self, found: Rounding, plan: Plan, quantizers: Mapping[str, KerasQuantizer]) -> None:
        self._layers = {t: plan.tensors[t].layer or t for t in quantizers}
        self.quantizers = dict(quantizers)
        self.limits = [x for x in found.limits if all(t in quantizers for t, _ in x.terms)]
        limited = {t: quantizers[t] for x in self.limits for t, _ in x.terms}
        self._moves = [t for t, q in limited.items() if any(getattr(q, n).trainable for n in q.trains)]
        self._moves.sort(key=lambda t: (not math.prod(quantizers[t].shape) > 1, plan.tensors[t].role != "weight"))
        # by value: JAX takes variables that do not train away while it compiles a step
        self._still = {
            t: {n: ops.convert_to_numpy(v) for n in q._given if not (v := getattr(q, n)).trainable}
            for t, q in limited.items()
        }
        self._last = None
        for t in self._moves[-1:]:
            self._last = next(v for n in quantizers[t].trains if (v := getattr(quantizers[t], n)).trainable)

    def attach(self) -> None:
        """Let optimizers call this when they have changed all variables."""
        if self._last is not None:
            self._last.constraint = self

    def __call__(self, _: Any) -> Any:
        self.project()
        return ops.convert_to_tensor(self._last)

    def project(self) -> None:
        """Bring scales back to where the platform's rules hold."""
        log = {t: self._log(t) for t in self._still}
        new = clipped(KerasOps, self.limits, log, self._moves, {t for t in log if self.quantizers[t].grid.pot})
        for t in self._moves:
            q = self.quantizers[t]
            factor = ops.where(new[t] == log[t], 1.0, ops.power(2.0, new[t] - log[t]))
            p = {n: ops.convert_to_tensor(v) for n in q.trains if (v := getattr(q, n)).trainable}
            for name, value in q.algorithm.rescaled(KerasOps, p, ops.reshape(factor, q.shape)).items():
                getattr(q, name).assign(value)

    def _log(self, t: str) -> Any:
        """log2 of a scale as it is now, [] or [C]."""
        q = self.quantizers[t]
        p = {n: self._still[t].get(n, getattr(q, n)) for n in q._given}
        s = q.algorithm.numbers(KerasOps, {n: ops.convert_to_tensor(v) for n, v in p.items()}, q.grid)[0]
        return ops.log2(ops.reshape(s, (-1,) if math.prod(q.shape) > 1 else ()))

    def settle(self) -> None:
        """As a step does, outside of one.

        Raises:
            TrainingError: a scale is none, or no scales that train satisfy a rule.
        """
        self.check(())
        self.project()
        log = {t: ops.convert_to_numpy(self._log(t)).astype("float64") for t in self._still}
        for x in self.limits:
            total: Any = sum(e * log[t] for t, e in x.terms)
            if np.any(total < x.low - 2 * SLACK) or np.any(total > x.high + 2 * SLACK):
                layer = self._layers[x.terms[0][0]]
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
        for (t, layer), s in zip(self._layers.items(), map(ops.convert_to_numpy, scales), strict=True):
            wrong = s[~((s > 0) & np.isfinite(s))]
            if wrong.size:
                raise TrainingError(f"{when}, the scale of '{t}' is {wrong[0]:g}", where=layer, hint=hint)
        name = next(v.path for v, m in zip(weights, now[-len(largest) :], strict=True) if not np.isfinite(m))
        what = f"{when}, '{name}' holds NaN or infinite numbers"
        raise TrainingError(what, where=name.rpartition("/")[0], hint=hint)


def check_numbers(model: Any) -> None:
    """Raise where a step of training has left a scale or weight that is no number.

    Raises:
        TrainingError: naming layer and step.
    """
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    model.bounds.check(model.trainable_variables, int(model.optimizer.iterations))


class CheckNumbers(keras.callbacks.Callback):
    """Ends training where a scale or weight is no number; `fit` of a quantized model has it."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        check_numbers(self.model)
