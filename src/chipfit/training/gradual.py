"""Gradual quantization: the share of rounding grows during training."""

from typing import Any

from torch import nn

from chipfit.errors import ConfigError
from chipfit.frameworks.torch.lower import as_quantized_module


class Gradual:
    """A schedule by which the share of rounding grows from 0 to 1: y = (1 - share) x + share Q(x).

    It is the gradual activation quantization of Sony's Model Compression Toolkit, for every tensor. The model computes
    what the chip does only at share 1; before that, `Result.trained()` raises.

    Args:
        model: `Result.model`, of PyTorch.
        steps: number of training steps until everything is rounded.
        start: number of steps before rounding begins.
        by_layer: round one operator after another in the order of execution, each in an equal part of the steps; else
            all at once.

    Raises:
        PlanError: it is another model.
        ConfigError: `steps` is below 1, or `start` negative.
    """

    def __init__(self, model: nn.Module, steps: int, start: int = 0, by_layer: bool = False) -> None:
        if steps < 1 or start < 0:
            got = f"steps={steps}, start={start}"
            raise ConfigError(
                "Schedule of gradual rounding is out of bounds",
                got=got,
                allowed="steps of 1 or more; start of 0 or more",
            )
        self.model, self.steps, self.start = as_quantized_module(model), steps, start
        self.now = -1
        used = [{*n.inputs, *n.outputs} for n in self.model._nodes]
        parts: dict[int, list[Any]] = {}
        for q in self.model._quant.children():
            first = next((k for k, names in enumerate(used) if q.tensor in names), 0) if by_layer else 0
            parts.setdefault(first, []).append(q)
        self._parts = [parts[k] for k in sorted(parts)]
        self.step()

    def step(self, step: int | None = None) -> None:
        """Set the shares of a step, counted from 0; without a number, of the next step."""
        self.now = self.now + 1 if step is None else step
        done = len(self._parts) * (self.now - self.start) / self.steps
        for k, part in enumerate(self._parts):
            for q in part:
                q.share = min(max(done - k, 0.0), 1.0)

    def finish(self) -> None:
        """Round everything from now on."""
        self.step(self.start + self.steps)
