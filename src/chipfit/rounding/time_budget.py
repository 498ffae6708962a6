"""Number of samples and output positions that a reconstruction can use in a given time on this machine."""

import time

import torch

from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear, places, products
from chipfit.plan.record import Plan
from chipfit.rounding import activation_ranges
from chipfit.rounding.fisher import IMAGES
from chipfit.rounding.gptq import CANDIDATES, CANDIDATES_OF_LONG_ROWS, LONG_ROW
from chipfit.rounding.moments import as_rows

#: (samples, output positions per operator), best first: positions above 2,048 matter less than samples, and samples
#: above 128 less than positions
LADDER = (
    *((None, positions) for positions in (65536, 32768, 16384, 8192, 4096, 2048)),
    *((256, 2048), (128, 2048), (128, 1024), (64, 1024), (64, 512), (32, 512), (16, 256)),
)
#: share of the speed of a matrix product that convolutions, gathers and rounding reach together
EFFICIENCY = 0.25


def multiplications_per_second() -> float:
    """Return the multiplications per second of a matrix product with the current number of threads."""
    a, best = torch.ones(384, 384), 1e9
    for _ in range(5):
        begun = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begun)
    return a.numel() * len(a) / best


def count_multiplications(graph: Graph, plan: Plan, images: int, positions: int) -> float:
    """Return the number of multiplications of a reconstruction."""
    linear = [n for n in graph.nodes if is_linear(graph, n)]
    passes = 2 * images + (3 * min(images, IMAGES) if activation_ranges.free_low_bit_activations(plan) else 0)
    streams = passes * sum(products(graph, n) for n in linear)
    fitted = [n for n in linear if plan.quantized(n.weight) and not graph.is_weight(n.data)]
    return streams + sum(_count_of_fit(graph, n, images, positions) for n in fitted)


def fit_to_time(graph: Graph, plan: Plan, images: int, seconds: float) -> tuple[int, int, float]:
    """Return samples, positions and expected seconds within a time; the least amount if none fits."""
    rate = EFFICIENCY * multiplications_per_second()
    for most, positions in LADDER:
        used = min(images, most or images)
        expected = count_multiplications(graph, plan, used, positions) / rate
        if expected <= seconds:
            break
    return used, positions, expected


def _count_of_fit(graph: Graph, node: Node, images: int, positions: int) -> float:
    """Return those of one operator: moments, two factorizations, and the columns of every scale that is tried."""
    g, o, k = as_rows(node, graph.weights[node.weight].detach()).shape
    read = min(max(positions, 2 * k), images * places(node, graph.values[node.output].shape))
    tries = len(CANDIDATES_OF_LONG_ROWS if k > LONG_ROW else CANDIDATES)
    return float(g * (read * k * (k + o) + k**3 + tries * o * k * k))
