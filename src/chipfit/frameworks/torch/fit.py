"""Steps of training a classifier, for users without a loop of their own."""

import math
from collections.abc import Callable, Sequence

import torch

from chipfit.frameworks.torch.lower import QuantizedModule

Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModule, rate: float, steps: int, probabilities: bool) -> Step:
    """A function that takes one step on flat inputs and labels [N], and returns the loss; none where that is no number.

    Cross-entropy; stochastic gradient descent with momentum 0.9, whose rate falls to 0 along a cosine.

    Args:
        steps: how many there will be.
        probabilities: the model ends with a softmax.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        model.train()
        model.begin()
        out = model.run_flat(inputs)[0]
        loss = torch.nn.functional.cross_entropy(out.clamp_min(1e-12).log() if probabilities else out, labels)
        if math.isfinite(value := loss.item()):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        return value

    return step
