"""Measure how long decisions about networks of growing depth take: fusions, formats, requantization, scales, ties.

python benchmarks/decide_time.py [--platform tflite_int8] [--repeats 3]

The decisions are those of `quantize` between capture and tuning, from made-up statistics. Seconds are processor time,
so that other work on the machine counts little. A network of eight times as many nodes should take eight times as long:
the last column, the time per node relative to the smallest network, should stay near 1. With a linear search for each
node it was 1.2 (chain) to 2.2 (joined) at 1,800 nodes. The rest of it in joined networks is text: each of n tied
tensors names the n - 1 others in the plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.decide import scales, statistics
from chipfit.decide.assignment import assign
from chipfit.decide.constraints import tie_groups
from chipfit.decide.insertions import requantize
from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.fuse import fuse
from chipfit.plan.record import Plan
from chipfit.plan.sharing import share_quantizers
from chipfit.platform.load import load
from chipfit.platform.match import fusions
from chipfit.platform.schema import Platform

SIZES = (225, 450, 900, 1800)


def network(nodes: int, *blocks: str) -> Graph:
    """Return a chain of `nodes` operators that repeats a block; an Add or Concat also reads the input of its block."""
    shape = (None, 4, 8, 8)
    graph = Graph([], ["x"], [], {"x": Value("x", shape)}, {})
    value = entry = "x"
    for k in range(nodes):
        op = blocks[k % len(blocks)]
        entry = value if k % len(blocks) == 0 else entry
        name, inputs, attrs = f"n{k}", (value,), {}
        if op == "Conv2D":
            graph.weights |= {f"{name}.weight": torch.ones(4, 4, 1, 1), f"{name}.bias": torch.ones(4)}
            inputs = (value, f"{name}.weight", f"{name}.bias")
            attrs = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
        elif op in ("Add", "Concat"):
            inputs, attrs = (value, entry), {"axis": 1} if op == "Concat" else {}
        elif op == "MaxPool":
            attrs = {
                "kernel": (1, 1),
                "stride": (1, 1),
                "padding": ((0, 0), (0, 0)),
                "dilation": (1, 1),
                "ceil_mode": 0,
            }
        graph.nodes.append(Node(name, op, inputs, (name,), attrs, layer=name))
        graph.values[name] = Value(name, shape)
        value = name
    graph.outputs.append(value)
    return graph


#: kind of network -> operators of its block
KINDS = {
    "chain": ("Conv2D", "Relu"),
    "residual": ("Conv2D", "Relu", "Conv2D", "Add", "Relu"),
    "moved": ("Conv2D", "MaxPool", "Identity", "MaxPool"),
    "joined": ("Conv2D", "Sigmoid", "Conv2D", "Concat"),
}


def decide(graph: Graph, platform: Platform) -> Plan:
    """Make all decisions about a network from made-up statistics."""
    groups, _ = fuse(graph, fusions(platform))
    overrides = {n.name: {"rule": "no_clipping"} for n in graph.nodes}
    graph, _ = requantize(graph, platform, assign(graph, platform, groups, overrides))
    assignment = assign(graph, platform, groups, overrides)
    rules = statistics.RangeRules(rule="no_clipping", weight_rule="no_clipping")
    stats = {name: TensorStats(name, -1.0, 1.0, batches=1) for name in statistics.needs(assignment, rules)}
    tensors = scales.choose(graph, assignment, stats, rules)
    plan = Plan(
        tensors=tensors,
        nodes=dict(assignment.nodes),
        groups=groups,
        float_edges=frozenset(assignment.float_edges),
        ties=tuple(tuple(sorted(g)) for g in tie_groups(assignment.constraints)),
    )
    share_quantizers(graph, plan)
    return plan


def seconds(step: Callable[[], object], repeats: int) -> float:
    """Return the processor time of the fastest of `repeats` runs."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="tflite_int8")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    platform = load(args.platform)
    decide(network(20, *KINDS["chain"]), platform)  # imports and caches
    print("| network | nodes | seconds | ms per node | against the smallest |\n|---|---|---|---|---|")
    for kind, blocks in KINDS.items():
        first = 0.0
        for size in SIZES:
            graph = network(size, *blocks)
            each = 1000 * seconds(lambda g=graph: decide(g, platform), args.repeats) / size
            first = first or each
            print(f"| {kind} | {size} | {each * size / 1000:.2f} | {each:.2f} | {each / first:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
