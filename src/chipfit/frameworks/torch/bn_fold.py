"""Statistics of batch norms that train folded into PyTorch layers, over all processes."""

from typing import Any

import torch
import torch.distributed as dist

from chipfit.errors import DataError
from chipfit.quantizers.bn_fold import Channels, Moments, Norm, updated_statistics
from chipfit.quantizers.ops import TorchOps


def channels(w: torch.Tensor, groups: int | None) -> Channels:
    """Return where a weight has its output channels; `groups` is given for transposed convolutions."""
    if groups is None:
        return Channels(tuple(w.shape), (len(w), *[1] * (w.dim() - 1)), 1)
    shape = (groups, w.shape[0] // groups, *w.shape[1:])
    return Channels(shape, (groups, 1, w.shape[1], *[1] * (w.dim() - 2)), 1)


@torch.compiler.assume_constant_result
def is_recomputation() -> bool:
    """Return whether gradient checkpointing repeats this forward pass during a backward pass.

    The statistics of its batch were recorded the first time; it must compute with the statistics before that.
    """
    return torch._C._current_graph_task_id() != -1


def update_statistics(mean: torch.Tensor, var: torch.Tensor, batch: Moments, momentum: float, count: int) -> None:
    """Update running statistics with those of a batch, in place.

    Args:
        batch: moments of the batch, of all processes.
        count: size of the result in this process.

    Raises:
        DataError: The batch has only one number per channel.
    """
    if count < 2 * mean.numel() and batch[2] < 2:  # the total may be on a device, which is not awaited without need
        raise DataError("The statistics of a batch norm in training need more than one number for each channel")
    with torch.no_grad():
        new_mean, new_var = updated_statistics(Norm(None, None, mean, var, 0.0), batch, momentum)
        mean.copy_(new_mean)
        var.copy_(new_var)


class _Sum(torch.autograd.Function):
    """The sum of x over all processes, with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(ctx, grads[0].contiguous())


class SyncedOps(TorchOps):
    """`TorchOps` with means and sizes over the tensors of all processes, and their gradients.

    All processes must call them in the same order.
    """

    @staticmethod
    def mean(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        total = torch.sum(x, axis, keepdims)  # type: ignore[call-overload]  # None: all axes
        both: Any = torch.cat([total.reshape(-1), total.new_tensor([x.numel() / total.numel()])])
        both = _Sum.apply(both)  # type: ignore[no-untyped-call]  # torch has no types
        return (both[:-1] / both[-1]).reshape(total.shape)

    @staticmethod
    def size(x: torch.Tensor) -> Any:  # a tensor, so that the device is not awaited
        kind = torch.promote_types(x.dtype, torch.float32)
        return _Sum.forward(None, torch.full((), x.numel(), dtype=kind, device=x.device))
