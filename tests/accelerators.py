"""The device that `--device` names: tests build their networks there, and those of `tests/device` need one."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from chipfit.plan.diff import diff
from chipfit.plan.record import Plan

CPU = torch.device("cpu")
chosen = SimpleNamespace(device=CPU, fake=None)  #: the device, and the module of the fake one where it is the fake


def choose(name: str) -> None:
    """Choose a device: cpu, fake, or one of torch's, as "cuda" or "cuda:1".

    Raises:
        ImportError: the fake device cannot be built here.
        ValueError: this machine lacks the device.
    """
    if name == "fake":
        from tests.device import fake

        chosen.device, chosen.fake = torch.device("fakegpu", 0), fake
    elif name != "cpu":
        here = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        kind, _, index = name.partition(":")
        if here is None or kind != here.type or int(index or 0) >= count:
            raise ValueError(f"There is no '{name}' here: {f'{count} of {here.type}' if here else 'no accelerator'}")
        chosen.device = torch.device(kind, int(index or 0))


def assert_same_plan(got: Plan, want: Plan) -> None:
    """Check that a plan is the one that was made on the CPU.

    The fake device has the kernels of the CPU. Those of a real one add in another order: scales differ in the last
    digits, and what follows from them.
    """
    if chosen.fake or chosen.device == CPU:
        assert not diff(want, got)
        return
    assert got.tensors.keys() == want.tensors.keys() and got.float_edges == want.float_edges
    for name, t in want.tensors.items():
        a, b = got.tensors[name].stored, t.stored
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert a.grid == b.grid, name
            torch.testing.assert_close(a.scale, b.scale, rtol=1e-4, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            torch.testing.assert_close(a.zero_point, b.zero_point, rtol=0, atol=1)


def tolerance(same_kernels: float, other_kernels: float) -> float:
    """Return by how much numbers may differ from those of the CPU: on the fake device, or on a real one.

    Kernels of a real device add in another order, after which now and then another code is the nearest one.
    """
    return same_kernels if chosen.fake or chosen.device == CPU else other_kernels


def moved(x: Any, device: torch.device | str | None = None) -> Any:
    """Return a copy of a model on a device, or a structure of data there; the chosen device unless one is given."""
    device = device or chosen.device
    if isinstance(x, nn.Module):
        return copy.deepcopy(x).to(device)
    return _pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), x)
