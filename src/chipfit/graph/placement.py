"""Where a network runs: decisions are made on the CPU, loops over data run where the user's model was.

A Graph holds its weights on the CPU and remembers the device of the model. A function that runs a graph on data begins
with `placed`; what it returns is on the CPU again. See docs/design/0018-the-models-device-decides.md.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from chipfit.graph.ir import CPU, OPAQUE, Graph

#: a device among the arguments of an opaque node of a graph on the CPU
_HERE = {"torch": "device:cpu"}
#: numbers of several tensors that are copied to the CPU at once, beyond those of one
_AT_ONCE = 1 << 24


def device_of(model: Any) -> torch.device:
    """Return the device of a module: that of its first parameter, else of its first buffer, else the CPU."""
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    return next((t.device for t in tensors), CPU)


def placed(graph: Graph) -> Graph:
    """Return the graph with its weights on `graph.device`; the same object for the CPU."""
    return graph if graph.device == CPU else moved(graph, graph.device)


def inputs_on(device: torch.device, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs of a graph on a device."""
    return [x.to(device) for x in inputs]


def on_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one type on the CPU, for which a device is awaited once.

    Those of a device become parts of one tensor; copy what is to be kept.
    """
    if all(x.device == CPU for x in tensors):
        return [*tensors]
    out, some = list[torch.Tensor](), list[torch.Tensor]()
    for k, x in enumerate(tensors, 1):
        some.append(x)
        if k == len(tensors) or sum(x.numel() for x in some) > _AT_ONCE:
            parts = torch.split(torch.cat([x.reshape(-1) for x in some]).cpu(), [x.numel() for x in some])
            out += [part.view(x.shape) for part, x in zip(parts, some, strict=True)]
            some = []
    return out


def moved(graph: Graph, device: torch.device) -> Graph:
    """Return the graph with its weights on a device; tied weights stay one tensor.

    Opaque nodes create tensors there too, except in a graph for the CPU, whose nodes name the CPU from the start.
    """
    out = graph.copy()
    tensors = {id(w): w if w.device == device else w.detach().to(device) for w in graph.weights.values()}
    out.weights = {name: tensors[id(w)] for name, w in graph.weights.items()}
    if device != CPU:
        out.nodes = [n.with_(attrs=_with_device(n.attrs, device)) if n.op == OPAQUE else n for n in graph.nodes]
    return out


def _with_device(x: Any, device: torch.device) -> Any:
    """Return the arguments of an opaque node with a device in place of the CPU."""
    if isinstance(x, dict):
        return device if x == _HERE else {k: _with_device(v, device) for k, v in x.items()}
    return type(x)(_with_device(v, device) for v in x) if type(x) in (list, tuple) else x
