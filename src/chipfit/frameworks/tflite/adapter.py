"""The adapter of `.tflite` files."""

from typing import Any

import torch

from chipfit.frameworks.adapter import Framework, included
from chipfit.frameworks.tflite.capture import capture
from chipfit.frameworks.tflite.model import TfliteModel, load
from chipfit.registry import register


@register("framework", "tflite")
class Tflite(Framework):
    """TensorFlow Lite: networks in `.tflite` files."""

    facts = included()["tflite"]
    capture = staticmethod(capture)
    load = staticmethod(load)

    def is_model(self, thing: Any) -> bool:
        return isinstance(thing, TfliteModel)

    def input_names(self, model: Any) -> list[str]:
        return list(model.names)

    def input_sizes(self, model: Any) -> dict[str, tuple[int | None, ...]]:
        return {n: tuple(None if d < 0 else d for d in t.signature) for n, t in zip(model.names, model.inputs)}

    def example(self, model: Any) -> Any:
        if any(d < 1 for t in model.inputs for d in t.signature[1:]):
            return None
        drawn = [(torch.randn([max(d, 1) for d in t.signature]), getattr(torch, t.dtype)) for t in model.inputs]
        made = [x if kind.is_floating_point else x.abs().to(kind) for x, kind in drawn]  # indices are not negative
        return made[0] if len(made) == 1 else tuple(made)

    def steps(self, model: Any) -> Any:
        return model.steps if model.states else None

    def run(self, model: Any, inputs: Any) -> Any:
        flat = list(inputs.values()) if isinstance(inputs, dict) else inputs
        return model(*flat) if isinstance(flat, (list, tuple)) else model(flat)
