"""Metadata of quantized models in MCT's form: versions, and the order of the kernels with the memory they need."""

import math
from typing import Any

from chipfit import __version__
from chipfit.graph.ir import Node
from chipfit.mct.layer_names import names_of
from chipfit.result import Result
from chipfit.search.resources import live_values

#: framework -> MCT's type of an input of the model
_INPUT_TYPES = {"keras": "InputLayer"}


def model_metadata(result: Result, schedule: bool) -> dict[str, Any]:
    """Return the metadata that MCT attaches to a model for a chip with `add_metadata`.

    Args:
        schedule: whether to add `scheduling_info`: kernels in their order, and tensors alive at one time. As in MCT
            2.2, sizes are numbers of elements of one sample.
    """
    known = {"chipfit_version": __version__, "tpc_version": result.platform.name}
    return known | ({"scheduling_info": _schedule(result)} if schedule else {})


def _schedule(result: Result) -> dict[str, Any]:
    graph, last = result.graph, {n.name: names_of(n, result)[-1] for n in result.graph.nodes}
    own = {n.name: n for n in graph.nodes if n.layer_type or not n.facts.moves}  # without inserted changes of layout
    group_of = {name: group for group in result.plan.groups for name in group}
    fused = {n: "_".join(["FusedNode", *(last[m] for m in group)]) for n, group in group_of.items()}
    makers = {o: (n, k) for n in graph.nodes for k, o in enumerate(n.outputs)}
    kernels = [f"{_INPUT_TYPES.get(graph.framework, 'DummyPlaceHolder')}:{v}" for v in graph.inputs]
    cuts = list[dict[str, Any]]()

    def kernel_of(n: Node) -> str:
        return f"FusedLayerType:{fused[n.name]}" if n.name in fused else f"{n.layer_type or n.op}:{last[n.name]}"

    def element(value: str) -> dict[str, Any]:
        while value in makers and makers[value][0].name not in own:
            value = makers[value][0].data
        shape = [int(d or 1) for d in graph.values[value].shape[1:]]
        maker, k = makers.get(value, (None, 0))
        name = value if maker is None else fused.get(maker.name, last[maker.name])
        return {"shape": shape, "node_name": name, "total_size": math.prod(shape), "node_output_index": k}

    kernels += dict.fromkeys(map(kernel_of, own.values()))
    order = [k.partition(":")[2] for k in kernels]
    for name, values in [cut for cut in live_values(graph, result.plan) if cut[0] in {"", *own}]:
        done = order[: order.index(fused.get(name, last[name])) + 1] if name else list(graph.inputs)
        tensors = [element(v) for v in sorted(values)]
        cuts.append({"op_order": done, "op_record": sorted(done), "mem_elements": tensors})
    largest = max(sum(e["total_size"] for e in c["mem_elements"]) for c in cuts)
    mapping = {last[n]: name for n, name in fused.items()}
    return {"operators_scheduling": kernels, "max_cut": largest, "cuts": cuts, "fused_nodes_mapping": mapping}
