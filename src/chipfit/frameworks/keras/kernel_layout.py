"""Convert kernels between Keras's layout and the canonical layout (output channels, input channels, then space).

A layout is the `kind` of an operator in `graph.ops`, "depthwise" for Keras's depthwise convolutions, "slopes" for
those of a PReLU, "row_0" and "row_1" for the rows of a variable that holds two biases.
"""

import torch

DEPTHWISE, SLOPES = "depthwise", "slopes"


def to_canonical(layout: str, kernel: torch.Tensor) -> torch.Tensor:
    """Convert a Keras kernel to the layout of a Graph.

    Convolutions: [*space, in / groups, out] becomes [out, in / groups, *space]; in transposed convolutions, "in" and
    "out" change places in both. Depthwise: [*space, C, M] becomes [C M, 1, *space], output channel c M + m. Linear:
    [in, out] becomes [out, in]. Slopes: [*space, C] becomes [C, *space]. Of rows one is
    left. Other weights are unchanged.

    >>> to_canonical("conv", torch.zeros(3, 5, 2, 7)).shape
    torch.Size([7, 2, 3, 5])
    """
    if layout == DEPTHWISE:
        kernel = kernel.reshape(*kernel.shape[:-2], 1, -1)
    if layout in ("conv", "transposed", DEPTHWISE):
        n = kernel.dim() - 2
        return kernel.permute(n + 1, n, *range(n)).contiguous()
    if layout == SLOPES:
        kernel = kernel.movedim(-1, 0).contiguous()
    if layout.startswith("row_"):
        return kernel[int(layout[-1])].contiguous()
    return kernel.t().contiguous() if layout == "linear" else kernel


def to_keras(layout: str, weight: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Convert a weight of a Graph to Keras's layout, as the inverse of `to_canonical`.

    Args:
        groups: number of input channels of a depthwise convolution.

    >>> to_keras("depthwise", torch.zeros(6, 1, 3, 5), groups=3).shape
    torch.Size([3, 5, 3, 2])
    """
    if layout in ("conv", "transposed", DEPTHWISE):
        kernel = weight.permute(*range(2, weight.dim()), 1, 0)
        if layout == DEPTHWISE:
            kernel = kernel.reshape(*kernel.shape[:-2], groups, -1)
        return kernel.contiguous()
    if layout == SLOPES:
        weight = weight.movedim(0, -1).contiguous()
    return weight.t().contiguous() if layout == "linear" else weight
