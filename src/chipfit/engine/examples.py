"""Example inputs of a graph, with which other tools trace it."""

import torch

from chipfit.engine.run import run
from chipfit.engine.trees import batch_axes
from chipfit.engine.types import dtype_of
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph

#: open sizes that are tried for a network without example: inner tensors of size 1 would be taken for constants
_OPEN_SIZES = 32, 8


def example_inputs(graph: Graph) -> list[torch.Tensor]:
    """Return inputs of the right shapes: the captured example, or random numbers and ones for a loaded graph.

    Open sizes of one input differ where the network allows, because PyTorch takes equal ones for a single size.
    """
    plain = [list(graph.example)] if graph.example else [_inputs_of_size(graph, size) for size in (*_OPEN_SIZES, 2)]
    for inputs in (made for given in plain for made in (_with_distinct_sizes(graph, given), given)):
        try:
            with torch.no_grad():
                run(graph, inputs)
        except (RuntimeError, LookupError, ChipfitError):  # the network takes no such sizes
            continue
        return inputs
    return plain[-1]


def _with_distinct_sizes(graph: Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return inputs whose second and further open sizes are larger, by repeated elements."""
    out = list(inputs)
    for k, name in enumerate(graph.inputs):
        rows = batch_axes(graph).get(name, 0)
        open_axes = [axis for axis, size in enumerate(graph.shape(name)) if size is None and axis != rows]
        for more, axis in enumerate(open_axes):
            size = out[k].shape[axis]
            out[k] = out[k].index_select(axis, torch.arange(size + 8 * more) % size)
    return out


def _inputs_of_size(graph: Graph, size: int) -> list[torch.Tensor]:
    """Return two samples whose other open sizes are `size`."""
    out, batch = [], batch_axes(graph)
    for name in graph.inputs:
        v, rows = graph.values[name], batch.get(name, 0)
        shape = [s if s is not None else 2 if axis == rows else size for axis, s in enumerate(v.shape)]
        dtype = dtype_of(v.dtype)
        out.append(torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype))
    return out
