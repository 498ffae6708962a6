"""Kernels between Keras's layout and the canonical one (output channels first, then input channels, then space)."""

from __future__ import annotations

import torch

#: operators whose Keras kernel is [*space, in / groups, out], or [*space, out, in] when transposed; canonical: the reverse, then space
_SPATIAL = frozenset({"Conv1D", "Conv2D", "Conv3D", "TransposeConv1D", "TransposeConv2D", "TransposeConv3D"})
_DEPTHWISE = frozenset({"DepthwiseConv1D", "DepthwiseConv2D"})


def to_canonical(op: str, kernel: torch.Tensor) -> torch.Tensor:
    """A Keras kernel as the operator `op` of a Graph reads it.

    Depthwise: [*space, C, M] becomes [C M, 1, *space], output channel c M + m. Linear: [in, out] becomes [out, in].
    Everything else that is not a convolution stays as it is.

    >>> to_canonical("Conv2D", torch.zeros(3, 5, 2, 7)).shape
    torch.Size([7, 2, 3, 5])
    """
    if op in _DEPTHWISE:
        kernel = kernel.reshape(*kernel.shape[:-2], 1, -1)
    if op in _SPATIAL or op in _DEPTHWISE:
        n = kernel.dim() - 2
        return kernel.permute(n + 1, n, *range(n)).contiguous()
    return kernel.t().contiguous() if op == "Linear" else kernel


def to_keras(op: str, weight: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """The inverse of `to_canonical`.

    Args:
        groups: of a depthwise convolution: its input channels.

    >>> to_keras("DepthwiseConv2D", torch.zeros(6, 1, 3, 5), groups=3).shape
    torch.Size([3, 5, 3, 2])
    """
    if op in _SPATIAL or op in _DEPTHWISE:
        kernel = weight.permute(*range(2, weight.dim()), 1, 0)
        if op in _DEPTHWISE:
            kernel = kernel.reshape(*kernel.shape[:-2], groups, -1)
        return kernel.contiguous()
    return weight.t().contiguous() if op == "Linear" else weight
