"""Warnings about calibration data that do not look like the training data."""

from collections.abc import Mapping

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.engine.run import run
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import Graph

#: largest factor, in both directions, between the scale of data and the learned statistics of a batch norm
_FAR = 30.0
#: least number of values of a channel from which its spread is estimated
_ENOUGH = 8
#: largest number of layers that a message names
_NAMED = 4


def check_input_scale(graph: Graph) -> list[str]:
    """Return a warning if the example's scale contradicts the statistics of the first batch norm.

    On training data, z = (x - mean) / sqrt(var + eps) has a root mean square of about 1 and a standard deviation of
    about 1 in each channel. Pixels of 0..255 instead of 0..1 make both about 255, the opposite about 1 / 255.

    Args:
        graph: captured graph with its example.
    """
    bn = next((n for n in graph.nodes if n.op == "BatchNorm" and all(map(graph.is_weight, n.inputs[3:5]))), None)
    if bn is None or not graph.example:
        return []
    part = graph.copy()
    part.outputs = [bn.data]
    drop_dead(part)
    with torch.inference_mode():
        (x,) = run(part, graph.example).values()
    mean, var = (graph.weights[i].detach() for i in bn.inputs[3:5] if i is not None)
    values = x.numel() // len(mean)  # per channel
    own, center = torch.var_mean(x, [k for k in range(x.dim()) if k != 1], correction=0)  # [C]
    unit = var + bn.attrs["eps"]
    size = float(((own + (center - mean).square()) / unit).mean().sqrt())
    spread = float((own * (values / (values - 1)) / unit).sqrt().median()) if values >= _ENOUGH else 1.0
    if size <= _FAR and (spread >= 1 / _FAR or spread == 0):
        return []
    off = f"{size:.3g} times as large as" if size > _FAR else f"{1 / spread:.3g} times narrower than"
    return [
        f"warning: the input of batch norm '{bn.display_name}' is {off} the statistics that it learned: are the inputs "
        "scaled and normalised as in training?"
    ]


def check_sample_count(graph: Graph, stats: Mapping[str, TensorStats], samples: int) -> list[str]:
    """Return warnings about data that are too few: a single sample, or values that never change.

    Args:
        samples: number of different samples in the calibration data.
    """
    out = ["warning: calibration saw a single sample; ranges need about a hundred"] if samples == 1 else []
    still = {t.name: t.low for t in stats.values() if t.count > 1 and t.low == t.high}
    inputs = [f"'{i}' was {still[i]:g} throughout" for i in graph.inputs if i in still]
    if inputs:
        return [*out, f"warning: the calibration data hold a single number: input {', '.join(inputs)}"]
    meant = _constants(graph)
    nodes = [n for n in graph.nodes if n.step is None or n.step > 0]  # a recurrent layer starts from zeros
    dead = [
        f"{n.op} '{n.display_name}' ({still[o]:g})" for n in nodes for o in n.outputs if o in still and o not in meant
    ]
    more = f" and {len(dead) - _NAMED} more" if len(dead) > _NAMED else ""
    if dead:
        out.append(f"warning: the same number on all calibration data comes from {', '.join(dead[:_NAMED])}{more}")
    return out


def _constants(graph: Graph) -> set[str]:
    """Return the values that follow from weights and sizes alone: zeros of a first state, and products with them."""
    found, zeros = set(graph.weights), {name for name, w in graph.weights.items() if not bool(w.any())}
    for n in graph.nodes:
        if (n.op in ("Expand", "Reshape") and n.data in zeros) or (n.op == "Mul" and not zeros.isdisjoint(n.inputs)):
            zeros.add(n.output)
        if n.op == "Size" or n.output in zeros or all(i is None or i in found for i in n.inputs):
            found |= {*n.outputs}
    return found
