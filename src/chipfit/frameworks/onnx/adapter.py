"""The adapter of ONNX: models of files, whose trainable form is a PyTorch module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from chipfit.frameworks.adapter import Framework, included
from chipfit.frameworks.onnx.capture import capture
from chipfit.frameworks.onnx.model import OnnxModel, dims_of, load, opened, refuse_quantized
from chipfit.frameworks.onnx.runtime import OnnxFunction, run
from chipfit.registry import register


@register("framework", "onnx")
class Onnx(Framework):
    """ONNX: a file, its bytes, an `onnx.ModelProto` or an `onnx_ir.Model`."""

    facts = included()["onnx"]
    load = staticmethod(load)
    opened = staticmethod(opened)
    capture = staticmethod(capture)
    run = staticmethod(run)

    def is_model(self, thing: Any) -> bool:
        return type(thing).__name__ in ("ModelProto", "Model", "OnnxModel")

    def check(self, model: Any) -> None:
        model = opened(model)
        if not model.requantize:
            refuse_quantized(model)

    def example(self, model: OnnxModel) -> Any:
        """Return random inputs of the declared shapes, by name if there are several; None if a size is unknown."""
        shapes = {v.name: [s or 0 for s in dims_of(v) or [0]] for v in model.inputs}
        if any(0 in s[1:] or v.shape is None for s, v in zip(shapes.values(), model.inputs, strict=True)):
            return None
        made = {v.name: _random([s or 2 for s in shapes[v.name]], v) for v in model.inputs}
        return next(iter(made.values())) if len(made) == 1 else made

    def input_names(self, model: OnnxModel) -> list[str]:
        return opened(model).names()

    def input_sizes(self, model: OnnxModel) -> dict[str, tuple[int | None, ...]]:
        return {v.name or "": tuple(dims_of(v) or ()) for v in opened(model).inputs if v.shape is not None}

    def random_input(self, model: OnnxModel, index: int, sizes: Sequence[int]) -> torch.Tensor:
        return _random(list(sizes), opened(model).inputs[index])

    def opaque(self, target: str) -> Callable[..., Any]:
        return OnnxFunction.of_target(target)


def _random(shape: list[int], value: Any) -> torch.Tensor:
    kind = value.dtype.numpy().kind if value.dtype is not None else "f"
    return torch.randn(shape) if kind not in "iub" else torch.ones(shape, dtype=torch.int64)
