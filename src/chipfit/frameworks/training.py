"""Parts that the trainable simulations of all frameworks share: errors of training, and numbers for the plan."""

from typing import Any

from chipfit.errors import TrainingError
from chipfit.plan.record import TensorPlan
from chipfit.plan.sharing import with_trained_numbers
from chipfit.plan.training import check_deployable


def training_error(what: str, layer: str, step: int | None) -> TrainingError:
    """Return the error of a step, or None for the end of training, that leaves invalid numbers in a layer."""
    when = "After training" if step is None else f"In step {step} of training"
    hint = "lower the learning rate, or look at the loss and the data of the step before"
    return TrainingError(f"{when}, {what}", where=layer, hint=hint)


def trained_tensor_plan(t: TensorPlan, scale: Any, zero_point: Any, quantizer: Any) -> TensorPlan:
    """Return the plan of a tensor with the numbers of its quantizer.

    Raises:
        UnsupportedError: The algorithm of the quantizer trained something that cannot be deployed.
    """
    check_deployable(quantizer.algorithm, t)
    return with_trained_numbers(t, scale, zero_point, quantizer.trained_grid())
