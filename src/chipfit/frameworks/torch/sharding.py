"""Models whose parameters FSDP2 (`torch.distributed.fsdp.fully_shard`) has divided among processes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from chipfit.errors import ConfigError


def is_sharded(model: nn.Module) -> bool:
    """Return whether a process holds only a part of some parameters now; in the forward pass it holds all of them."""
    return any(map(_is_part, model.parameters()))


def whole_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose parts are in several processes as a whole; all of them must call this."""
    return t.full_tensor() if _is_part(t) else t  # type: ignore[attr-defined]  # of DTensor


def check_precision(model: nn.Module, scales: Iterable[torch.Tensor]) -> None:
    """Check that FSDP2 gives the scales of a sharded model in float32, as `.half()` leaves them.

    Raises:
        ConfigError: It casts them, which would move all quantized values.
    """
    short = next((s.dtype for s in scales if torch.finfo(s.dtype).bits < 32), None)
    if short is not None and _groups(model):
        hint = "shard the quantizers apart, before the model: fully_shard(model.quant), without a policy"
        raise ConfigError("FSDP2 casts the scales of quantizers", got=short, allowed="float32", hint=hint)


def gather(model: nn.Module) -> None:
    """Let each process hold all parameters, until FSDP2 frees them after the backward pass."""
    for group in _groups(model):
        group.unshard()


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Let each process hold all parameters inside the block; what is written to them stays.

    All processes must enter it. Nothing happens for models that are not sharded.
    """
    if not is_sharded(model):
        yield
        return
    from torch.distributed.tensor import distribute_tensor

    parts: dict[str, Any] = dict(model.named_parameters())
    gather(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        yield
        changed = {n: p.detach().clone() for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    finally:
        for group in _groups(model):
            group.reshard()
    with torch.no_grad():
        for name, new in changed.items():
            part = parts[name]  # each process takes its own part of what all have computed
            part.copy_(distribute_tensor(new, part.device_mesh, part.placements, src_data_rank=None))


def _groups(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "unshard") and hasattr(m, "reshard")]


def _is_part(t: torch.Tensor) -> bool:
    return hasattr(t, "full_tensor")
