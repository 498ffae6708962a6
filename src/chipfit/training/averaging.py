"""Averages of all trained parameters, scales included, over the steps of training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chipfit.errors import ConfigError
from chipfit.frameworks.torch.lower import QuantizedModule, as_quantized_module


class EMA(nn.Module):
    """The exponential moving average a of every trained parameter p: a = decay a + (1 - decay) p, starting with p.

    It equals `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, without a second model. It is a
    module so that it is saved (`state_dict`) and moved like one; the model that it averages is not a part of it.

    Args:
        model: `Result.model`, of PyTorch. In Keras, optimizers have `use_ema=True`.
        decay: share of the old average, at least 0 and below 1.

    Raises:
        PlanError: it is another model.
        ConfigError: `decay` is out of bounds.
    """

    steps: torch.Tensor

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ConfigError("Decay must be a share", got=decay, allowed="0 to 1, without 1")
        self._model = (as_quantized_module(model),)  # in a tuple, so that it is not part of this module
        self.decay = decay
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.averages = nn.ParameterList(nn.Parameter(p.detach().clone(), False) for p in self.trained)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self._begun = False  #: `steps` is above 0, without a look at the device

    def _load_from_state_dict(self, *args: Any) -> None:
        self._begun = False
        super()._load_from_state_dict(*args)

    @torch.no_grad()
    def step(self) -> None:
        """Add the parameters of a step to the averages; call it after the step of the optimizer."""
        share = 1 - self.decay if self._begun or self.steps else 1.0
        self._begun = True
        for p, a in zip(self.trained, self.averages, strict=True):
            a.lerp_(p.to(a), share)
        self.steps += 1

    @contextmanager
    def swapped(self) -> Iterator[QuantizedModule]:
        """Let the model compute with the averages, for evaluation and `Result.trained()`, and restore it afterwards.

        The averages are moved to satisfy the platform's rules.
        """
        own = [p.detach().clone() for p in self.trained]
        try:
            self._put(self.averages)
            self._model[0].enforce_bounds()
            yield self._model[0]
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: Iterable[torch.Tensor]) -> None:
        for p, value in zip(self.trained, values, strict=True):
            p.copy_(value)
