"""The adapter of PyTorch."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from chipfit.frameworks.adapter import Framework, included
from chipfit.frameworks.torch.capture import capture, check_model
from chipfit.frameworks.torch.device import device_named
from chipfit.frameworks.torch.torchscript import with_modules
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import register


def _later(name: str) -> Any:
    """Return a method that is a function of `lower`, imported at the first call: its import loads torch's compiler."""
    return lambda _, *args: getattr(import_module("chipfit.frameworks.torch.lower"), name)(*args)


@register("framework", "torch")
class Torch(Framework):
    """PyTorch: programs of `torch.nn.Module`, from the running process or from a `.pt2` file."""

    facts = included()["torch"]
    check, capture = staticmethod(check_model), staticmethod(capture)
    device_named = staticmethod(device_named)
    lower, device, stepper = _later("lower"), _later("DeviceModel"), _later("stepper")
    read_back, state_arrays = _later("read_back"), _later("state_arrays")

    def rebuilt(self, model: Any, graph: Graph, args: Any, kwargs: Any) -> Any:
        from chipfit.frameworks.torch.resize import resized_module

        found = resized_module(model, graph, args, kwargs)
        if found is None:
            found = self.lower(graph, Plan(), None)
            found.batch_statistics = True
        return found

    def is_model(self, thing: Any) -> bool:
        return isinstance(thing, torch.nn.Module)

    def opened(self, model: Any) -> Any:
        """Return a module in place of a program of torch.export or of TorchScript; anything else as it is."""
        if isinstance(model, torch.export.ExportedProgram):
            return model.module()
        return with_modules(model) if isinstance(model, torch.nn.Module) else model

    def run(self, model: Any, inputs: Any) -> Any:
        return model(inputs)

    def save(self, graph: Graph, plan: Plan, path: Path, form: str = "fake") -> Path:
        from chipfit.frameworks.torch.saving import save

        return save(graph, plan, path, form)

    def load(self, path: str) -> Any:
        from chipfit.frameworks.torch.archive import load

        return load(path)

    def input_names(self, model: Any) -> list[str]:
        parameters = inspect.signature(model.forward).parameters.values()
        return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    def example(self, model: Any) -> Any:
        """Return an example input that a loaded program, or a model of Lightning or timm, tells itself."""
        known = getattr(model, "default_cfg", None)
        shape = known.get("input_size") if isinstance(known, dict) else None
        given = getattr(model, "example", getattr(model, "example_input_array", None))
        return torch.randn(2, *shape) if given is None and shape is not None else given
