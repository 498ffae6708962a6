"""The adapter of Keras 3, on any of its backends."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import keras
import torch

from chipfit.frameworks.adapter import Framework, included
from chipfit.frameworks.keras.backend import forward
from chipfit.frameworks.keras.capture import capture
from chipfit.frameworks.keras.kernel_layout import DEPTHWISE, to_canonical, to_keras
from chipfit.frameworks.keras.loading import function_of, load
from chipfit.frameworks.keras.lower import DeviceModel, lower, read_back, state_arrays, stepper
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan
from chipfit.plan.training import Training
from chipfit.registry import register


@register("framework", "keras")
class Keras(Framework):
    """Keras 3: models of the running process or from a `.keras` file, on any backend."""

    facts = included()["keras"]
    capture = staticmethod(capture)
    load = staticmethod(load)
    opaque = staticmethod(function_of)
    run = staticmethod(forward)
    lower = staticmethod(lower)
    device = DeviceModel
    stepper = staticmethod(stepper)
    read_back = staticmethod(read_back)
    state_arrays = staticmethod(state_arrays)

    def rebuilt(self, model: Any, graph: Graph, args: Any, kwargs: Any) -> Any:
        from chipfit.frameworks.keras.saving import FloatBuilder

        return FloatBuilder(graph, Plan(), Training()).build()

    def is_model(self, thing: Any) -> bool:
        return isinstance(thing, keras.Model)

    def example(self, model: Any) -> Any:
        shape = getattr(model, "input_shape", None)
        return torch.randn(2, *shape[1:]) if isinstance(shape, tuple) and None not in shape[1:] else None

    def input_names(self, model: Any) -> list[str]:
        return [x.name for x in getattr(model, "inputs", None) or ()]

    def save(self, graph: Graph, plan: Plan, path: Path, form: str = "fake") -> Path:
        module = "chipfit.frameworks.keras.saving" if form == "fake" else "chipfit.frameworks.keras.mctq"
        return import_module(module).save(graph, plan, path)  # type: ignore[no-any-return]

    def kernel_layout(self, node: Node, weight: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        depthwise = "depthwise" in node.layer_type.lower() or weight.endswith("depthwise_kernel")
        layout = DEPTHWISE if depthwise else node.facts.kind
        return (lambda w: to_keras(layout, w, len(w))), (lambda w: to_canonical(layout, w))
