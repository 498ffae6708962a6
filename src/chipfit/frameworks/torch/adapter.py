"""The adapter of PyTorch."""

from typing import Any

import torch

from chipfit.frameworks.adapter import Framework, included
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.lower import DeviceModel, lower
from chipfit.frameworks.torch.train import read_back, state_arrays, stepper
from chipfit.registry import register


@register("framework", "torch")
class Torch(Framework):
    """PyTorch: programs of `torch.nn.Module`, from the running process or from a `.pt2` file."""

    facts = included()["torch"]
    capture = staticmethod(capture)
    lower = staticmethod(lower)
    device = DeviceModel
    stepper = staticmethod(stepper)
    read_back = staticmethod(read_back)
    state_arrays = staticmethod(state_arrays)

    def is_model(self, thing: Any) -> bool:
        return isinstance(thing, torch.nn.Module)

    def load(self, path: str) -> Any:
        from chipfit.frameworks.torch.archive import load

        return load(path)

    def run(self, model: Any, inputs: Any) -> Any:
        return model(inputs)

    def example(self, model: Any) -> Any:
        return getattr(model, "example", None)
