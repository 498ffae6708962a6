"""The device as a model: the integer simulation of a platform, from inputs to outputs, on any data."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chipfit.frameworks import adapter_of
from chipfit.graph.ir import DYNAMIC, Graph
from chipfit.plan.record import Plan
from chipfit.plan.tables import with_integers
from chipfit.platform.schema import Platform
from chipfit.registry import entries, entry
from chipfit.simulate.integer import Profile, float_kernel, float_results, kernel_groups, profile_for, simulate


def device_model(graph: Graph, plan: Plan, platform: Platform) -> Any:
    """Return a model of the user's framework whose outputs are those of the platform's runtime, bit for bit.

    Warn if no runtime proves the platform: its integers are then what the platform's file states, unproven.

    Raises:
        UnsupportedError: the platform does not state its arithmetic.
    """
    kernels, part = None, None
    if platform.runtimes:
        runtime = entry("runtime", platform.runtimes[0]).declares
        formats = (e.declares for e in entries("format").values() if not e.declares.named)
        files = (f for f in formats if runtime.suffix in f.suffixes)
        kernels, part = runtime.kernels, next((f.batch_size(graph, plan) for f in files), None)
    profile = profile_for(platform, kernels)
    graph, plan = with_integers(graph, plan)
    float_ops = float_operators(graph, plan, profile)
    floats = {*float_results(graph, plan, profile), *(o for o in graph.outputs if not plan.quantized(o))}
    if not platform.runtimes:
        what = f"No runtime proves '{platform.name}': this model computes what its description says, "
        warnings.warn(what + "which may not be what the chip does", stacklevel=3)

    in_float = tuple(sorted({op for v in floats for op in float_ops(v)}))
    return adapter_of(graph.framework).device(graph, DeviceRun(graph, plan, platform, kernels, part), in_float)


@dataclass
class DeviceRun:
    """A function from inputs to outputs of the graph, as flat lists of tensors; it can be pickled and copied.

    Args:
        kernels: of the runtime; None: those of the platform.
        part: number of samples that the runtime computes at a time; None: all at once.
    """

    graph: Graph
    plan: Plan
    platform: Platform
    kernels: str | None
    part: int | None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  #: integers of weights, filled by the first call

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        settings: dict[str, Any] = {"kernels": self.kernels, "weights": self.weights, "part": self.part}
        with torch.inference_mode():
            done = simulate(self.graph, self.plan, inputs, self.platform, keep=(), **settings)
            return [output(self.graph, self.plan, done, o).clone() for o in self.graph.outputs]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "weights": {}}  # computed again where it is unpickled


def output(graph: Graph, plan: Plan, done: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return one of the network's outputs in float, from the simulated integers or floats."""
    stored, x = plan.stored(name), torch.as_tensor(done[name] if name in done else graph.weights[name])
    return stored.dequantize(x) if stored is not None and not x.is_floating_point() else x


def float_operators(graph: Graph, plan: Plan, profile: Profile) -> Callable[[str], tuple[str, ...]]:
    """Return a function from a value to the operators computed in float since integers were last read, sorted.

    Pass-through operators are left out, and those that IEEE 754 defines to the last bit: their results are exact.
    Opaque operators are named by the function that they call.
    """
    group_of = {o: group for group in kernel_groups(graph, plan) for n in group for o in n.outputs}

    def behind(value: str) -> tuple[str, ...]:
        todo, done, found = [value], set(), set()
        while todo:
            v = todo.pop()
            if v in done or v not in group_of:
                continue
            done.add(v)
            if float_kernel(graph, plan, group_of[v], profile) is not None:
                continue
            if group_of[v][0].op == DYNAMIC:  # integers again
                continue
            for n in group_of[v]:
                found |= set() if (n.facts.moves or n.facts.ieee) else {n.called}
                reads = [i for i in n.inputs if i in graph.values and graph.is_float(i)]
                todo += [i for i in reads if not plan.quantized(i) or (i, n.name) in plan.float_edges]
        return tuple(sorted(found))

    return behind
