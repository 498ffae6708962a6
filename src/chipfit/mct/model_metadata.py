"""Metadata of quantized models in MCT's form: versions, and the order of the kernels with the memory they need."""

import math
from typing import Any

from chipfit import __version__
from chipfit.mct.layer_names import names_of
from chipfit.result import Result
from chipfit.search.resources import live_values


def model_metadata(result: Result, schedule: bool) -> dict[str, Any]:
    """Return the metadata that MCT attaches to a model for a chip with `add_metadata`.

    Args:
        schedule: whether to add `scheduling_info`: kernels in their order, and the most elements of tensors of one
            sample that are alive at one time, as MCT 2.2 counts them.
    """
    known = {"chipfit_version": __version__, "tpc_version": result.platform.name}
    return known | ({"scheduling_info": _schedule(result)} if schedule else {})


def _schedule(result: Result) -> dict[str, Any]:
    graph, last = result.graph, {n.name: names_of(n, result)[-1] for n in result.graph.nodes}
    own = {n.name: n for n in graph.nodes if n.layer_type or not n.facts.moves}  # without inserted changes of layout
    fused = {n: "_".join(["FusedNode", *(last[m] for m in group)]) for group in result.plan.groups for n in group}
    names = {n: f"{own[n].layer_type or own[n].op}:{last[n]}" for n in own}
    names |= {n: f"FusedLayerType:{kernel}" for n, kernel in fused.items()}
    inputs = [f"{'InputLayer' if graph.framework == 'keras' else 'DummyPlaceHolder'}:{v}" for v in graph.inputs]
    moments = [values for n, values in live_values(graph, result.plan) if n in {"", *own}]
    sizes = {v: math.prod(int(d or 1) for d in graph.values[v].shape[1:]) for values in moments for v in values}
    return {
        "operators_scheduling": [*inputs, *dict.fromkeys(names[n] for n in own)],
        "max_cut": max(sum(sizes[v] for v in values) for values in moments),
        "fused_nodes_mapping": {last[n]: kernel for n, kernel in fused.items()},
    }
