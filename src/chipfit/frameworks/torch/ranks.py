"""Statistics of the batches of all processes that train together."""

from typing import Any

import torch
import torch.distributed as dist

from chipfit.quantizers.ops import TorchOps


class _Sum(torch.autograd.Function):
    """x of all processes added up, and its gradient: each process has its share of every sum."""

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
    """`TorchOps`, whose means and sizes are of the numbers that all processes hold, with the gradients of that.

    Every process must take part in each of them, in the same order.
    """

    @staticmethod
    def mean(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        total = TorchOps.sum(x, axis, keepdims)
        both: Any = torch.cat([total.reshape(-1), total.new_tensor([x.numel() / total.numel()])])
        both = _Sum.apply(both)  # type: ignore[no-untyped-call]  # torch has no types
        return (both[:-1] / both[-1]).reshape(total.shape)

    @staticmethod
    def size(x: torch.Tensor) -> int:
        return int(_Sum.forward(None, torch.tensor(x.numel(), device=x.device)))
