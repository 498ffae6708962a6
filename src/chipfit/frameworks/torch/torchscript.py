"""TorchScript programs as modules, whose calls are watched as those of any other module."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from chipfit.frameworks.torch.program import exporting


class ScriptedModule(torch.nn.Module):
    """A TorchScript program, with modules in the places of those that were scripted or traced.

    They hold the program's own parameters and buffers; the program calls none of them.
    """

    def __init__(self, program: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.__dict__ |= {"program": program, "forward": _forward(program)}  # the program is not a submodule
        self._hold()

    def _hold(self) -> None:
        _mirror(self.program, self)
        super().train(getattr(self.program, "training", False))  # a frozen program has one mode

    def train(self, mode: bool = True) -> "ScriptedModule":
        if hasattr(self.program, "training"):
            self.program.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ScriptedModule":
        self.program._apply(fn, recurse)
        self._hold()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScriptedModule":
        return ScriptedModule(copy.deepcopy(self.program))

    def paths_of_tensors(self) -> dict[int, str]:
        """Return the path of the module that holds each parameter and buffer, by the tensor's identity."""
        return {
            id(t): path
            for path, m in self.named_modules()
            for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))
        }


def _mirror(program: torch.jit.ScriptModule, module: torch.nn.Module) -> None:
    """Register what a program holds in a module."""
    for name, p in program.named_parameters(recurse=False):
        p.__class__ = torch.nn.Parameter  # a program returns plain tensors; it would not compute with a new one
        module.register_parameter(name, p.detach_().requires_grad_(p.requires_grad))  # in a copy it has a history
    for name, b in program.named_buffers(recurse=False):
        module.register_buffer(name, b)
    for name, child in program.named_children():
        kind = getattr(child, "original_name", type(child).__name__)
        inner = type(kind, (torch.nn.Module,), {})()
        _mirror(child, inner)  # type: ignore[arg-type]  # what a program holds is scripted
        module.add_module(name, inner)


def _forward(program: torch.jit.ScriptModule) -> Callable[..., Any]:
    """Return a function that calls a program and has its signature, which Python does not know."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        # else torch runs the function that was scripted, and reads of sizes by our own code are taken for the model's
        with exporting(False), torch._C.DisableTorchFunction(), torch.jit.optimized_execution(False):
            return program(*args, **kwargs)

    schema: Any = program.forward.schema  # type: ignore[attr-defined]  # a method of the program has one
    parameters = [
        inspect.Parameter(
            a.name,
            inspect.Parameter.KEYWORD_ONLY if a.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in schema.arguments[1:]  # without the module itself
    ]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it
    return forward


def with_modules(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model in whose copy each TorchScript program is a `ScriptedModule`; a model without them as it is."""
    if isinstance(model, torch.jit.ScriptModule):
        return ScriptedModule(model)
    if not any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        return model
    model = copy.deepcopy(model)
    for m in [*model.modules()]:
        if not isinstance(m, torch.jit.ScriptModule):
            for name, child in [*m.named_children()]:
                if isinstance(child, torch.jit.ScriptModule):
                    setattr(m, name, ScriptedModule(child))
    return model
