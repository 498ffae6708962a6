"""One operator with numbers chosen by hand: its graph, its plan, and its codes on every runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chipfit.engine.kernels import execute
from chipfit.export import export
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.table import OPS
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.platform.load import load
from chipfit.quantizers.grids import all_codes
from chipfit.quantizers.stored import Stored
from chipfit.registry import entry
from chipfit.simulate.integer import float_results, profile_for, simulate
from tests.build import stored

LITERT = ("litert_reference", "litert_optimized", "litert")


@dataclass(frozen=True)
class Codes:
    """A tensor of codes and what they stand for."""

    q: torch.Tensor
    scale: Any = 0.05
    zero: int = 0
    bits: int = 8
    signed: bool = True

    def stored(self, axis: int | None = None) -> Stored:
        per_channel = isinstance(self.scale, tuple | list)
        return stored(self.scale, self.zero, self.bits, signed=self.signed, axis=axis if per_channel else None)

    def reals(self, axis: int | None = None) -> torch.Tensor:
        return self.stored(axis).dequantize(self.q)


@dataclass
class One:
    """An operator, its operands and its result."""

    graph: Graph
    plan: Plan
    inputs: list[torch.Tensor]

    def simulated(self, platform: str, kernels: str | None = None) -> torch.Tensor:
        """Codes, of which none is computed in float."""
        profile = profile_for(load(platform), kernels)
        assert not float_results(self.graph, self.plan, profile)
        return simulate(self.graph, self.plan, self.inputs, load(platform), kernels=kernels)["y"]

    def prove(self, folder: Path, platform: str = "tflite_int8", runtimes: Sequence[str] = LITERT) -> None:
        """Every code that a runtime makes of the file is the simulation's."""
        found = [entry("runtime", r) for r in runtimes]
        path = export(self.graph, self.plan, folder / f"m{found[0].declares.suffix}", load(platform))
        for runtime, e in zip(runtimes, found, strict=True):
            name = e.declares.codes.format("y")
            got = e.thing(path, [name]).run([x.numpy() for x in self.inputs])[name]
            off = torch.from_numpy(got.astype("int64")) - self.simulated(platform, e.declares.kernels).long()
            assert not off.any(), (runtime, int((off != 0).sum()), int(off.abs().max()))


def one(
    op: str, operands: Sequence[Codes | None], result: Codes, attrs: dict[str, Any] | None = None, exec: str = "int"
) -> One:
    """`operands` in the order of slots; those in slots for weights and biases are constants.

    Args:
        result: its numbers; the codes of it are not read.
        exec: "follow" for an operator that moves codes.
    """
    names = [None if c is None else f"x{k}" for k, c in enumerate(operands)]
    node = Node("n", op, tuple(names), ("y",), attrs or {})
    axes, roles = {"w": OPS[op].weight_axis, "b": 0}, {"w": "weight", "b": "bias"}
    graph = Graph([node], [], ["y"], {}, {})
    tensors, inputs, reals = {}, [], []
    for k, (name, c) in enumerate(zip(names, operands, strict=True)):
        if name is None or c is None:
            reals.append(None)
            continue
        slot = OPS[op].slot(k)
        x = c.reals(axes.get(slot))
        reals.append(x)
        tensors[name] = TensorPlan(name=name, role=roles.get(slot, "activation"), stored=c.stored(axes.get(slot)))
        if slot in roles:
            graph.weights[name] = x
        else:
            graph.inputs.append(name)
            graph.values[name] = Value(name, (None, *x.shape[1:]))
            inputs.append(x)
    shape = execute(node, reals)[0].shape
    graph.values["y"] = Value("y", (None, *shape[1:]))
    tensors["y"] = TensorPlan(name="y", role="activation", stored=result.stored())
    return One(graph, Plan(tensors=tensors, nodes={"n": NodePlan(name="n", op=op, exec=exec)}), inputs)


def square(x: Codes, result: Codes) -> One:
    """A value times itself."""
    made = one("Mul", [x, x], result)
    made.graph.nodes = [n.with_(inputs=("x0", "x0")) for n in made.graph.nodes]
    made.graph.inputs, made.inputs = ["x0"], made.inputs[:1]
    del made.graph.values["x1"]
    return made


def every(bits: int = 8, *shape: int) -> torch.Tensor:
    """All codes in order, in rows of 16 if no shape is given."""
    low, high = all_codes(bits, True)
    return torch.arange(low, high + 1).reshape(*(shape or (-1, 16)))


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every 8-bit code with every other, in rows of 256."""
    return torch.arange(-128, 128).repeat(256, 1), torch.arange(-128, 128)[:, None].repeat(1, 256)


def drawn(seed: int, *shape: int, bits: int = 8) -> torch.Tensor:
    low, high = all_codes(bits, True)
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
