"""A quantized network in TensorBoard: its graph with what was measured at each operator, and histograms of values."""

from collections.abc import Mapping
from typing import Any

from chipfit.calibration.collect import TensorStats
from chipfit.errors import RuntimeUnavailable, import_optional
from chipfit.graph.ir import Graph


def write_graph(to: Any, graph: Graph, facts: Mapping[str, Mapping[str, str]]) -> None:
    """Write a graph to the event file of a `SummaryWriter`.

    Args:
        to: a `torch.utils.tensorboard.SummaryWriter`.
        facts: node -> texts by name, which TensorBoard shows as attributes of the node.

    Raises:
        RuntimeUnavailable: TensorBoard is not installed.
    """
    parts = {
        kind: import_optional(f"tensorboard.compat.proto.{kind}_pb2", "A graph", RuntimeUnavailable, extra="track")
        for kind in ("graph", "event", "attr_value")
    }
    made, makers = parts["graph"].GraphDef(), graph.producers()
    for name in graph.inputs:
        made.node.add(name=name, op="Input")
    for n in graph.nodes:
        sources = [makers[i].name if i in makers else i for i in graph.activations(n)]
        node = made.node.add(name=n.name, op=n.called, device=n.layer_type, input=sources)
        for key, text in facts.get(n.name, {}).items():
            node.attr[key].CopyFrom(parts["attr_value"].AttrValue(s=text.encode()))
    to.file_writer.add_event(parts["event"].Event(graph_def=made.SerializeToString()))


def write_histograms(to: Any, stats: Mapping[str, TensorStats], step: int = 0) -> None:
    """Write the distribution of each activation in calibration, `activations/<tensor>`, to a `SummaryWriter`."""
    for name, seen in stats.items():
        if seen.histogram is None or not seen.histogram.counts.any():
            continue
        counts, reach = seen.histogram.counts.double(), seen.histogram.reach
        width = 2 * reach / len(counts)
        limits = [-reach + (k + 1) * width for k in range(len(counts))]
        centres = [limit - width / 2 for limit in limits]
        total, squares = (sum(c * x**p for c, x in zip(counts.tolist(), centres, strict=True)) for p in (1, 2))
        known = {"min": seen.low, "max": seen.high, "num": float(counts.sum()), "sum": total, "sum_squares": squares}
        tag = f"activations/{name}"
        to.add_histogram_raw(tag, **known, bucket_limits=limits, bucket_counts=counts.tolist(), global_step=step)
