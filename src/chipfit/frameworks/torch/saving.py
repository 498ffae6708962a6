"""Float networks as programs of PyTorch, which load without chipfit: `torch.export` (`.pt2`), TorchScript (`.pt`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from chipfit.engine.examples import example_inputs
from chipfit.engine.process import TRACING, quiet
from chipfit.engine.trees import batch_axes
from chipfit.errors import UnsupportedError, first_line
from chipfit.files import folder_beside, write_atomically
from chipfit.frameworks.torch.lower import QuantizedModule
from chipfit.graph.ir import Graph
from chipfit.passes.rounded import rounded_network
from chipfit.plan.record import Plan


class _Program(nn.Module):
    """A network that takes its inputs one after the other."""

    def __init__(self, network: QuantizedModule) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.network._results(self.network.run_flat(inputs))


def save(graph: Graph, plan: Plan, path: Path, form: str) -> Path:
    """Write the fake-quantized network as a program that takes its inputs one after the other; open sizes stay open.

    Args:
        path: a `.pt2` file for `torch.export.load`, or a `.pt` file for `torch.jit.load`.

    Raises:
        UnsupportedError: another suffix, or PyTorch cannot trace the network; see also `rounded_network`.
    """
    if form != "fake" or path.suffix not in (".pt2", ".pt"):
        allowed = ".pt2, .pt, .onnx, .tflite" if form == "fake" else ".onnx"
        raise UnsupportedError("PyTorch cannot write this suffix", got=path.suffix, allowed=allowed)
    rounded = rounded_network(graph, plan)
    program, inputs = _Program(QuantizedModule(rounded, Plan())).requires_grad_(False), tuple(example_inputs(rounded))
    with folder_beside(path) as folder, TRACING, quiet():
        made = folder / path.name
        try:
            if path.suffix == ".pt":
                # weights become constants: those of a traced module may not be tied
                torch.jit.save(torch.jit.trace(lambda *x: program(*x), inputs, check_trace=False), str(made))
            else:
                torch.export.save(torch.export.export(program, inputs, dynamic_shapes=(_open(graph),)), made)
        except RuntimeError as e:
            what = f"PyTorch cannot trace this network for a {path.suffix} file"
            raise UnsupportedError(what, got=first_line(e), hint="export an `.onnx` file") from e
        return write_atomically(path, made.read_bytes())


def _open(graph: Graph) -> tuple[dict[int, Any], ...]:
    """Return the axes of each input whose size is open."""
    rows, out = batch_axes(graph), []
    for name in graph.inputs:
        axes = {k for k, size in enumerate(graph.shape(name)) if size is None or k == rows.get(name)}
        out.append(dict.fromkeys(sorted(axes), torch.export.Dim.AUTO))
    return tuple(out)
