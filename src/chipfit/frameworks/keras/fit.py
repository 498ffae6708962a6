"""Steps of training a classifier in Keras, on any backend; see `frameworks.torch.fit`."""

from collections.abc import Callable, Sequence

import keras
import torch

from chipfit.frameworks.keras.backend import to_backend
from chipfit.frameworks.keras.lower import QuantizedModel

Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModel, rate: float, steps: int, probabilities: bool) -> Step:
    """The same as for PyTorch; a step whose loss is no number is taken."""
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=not probabilities)
    model.compile(optimizer=keras.optimizers.SGD(schedule, momentum=0.9), loss=loss)

    def step(inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        given = keras.tree.pack_sequence_as(model._inputs_struct, [to_backend(x) for x in inputs])
        return float(model.train_on_batch(given, labels.numpy()))

    return step
