"""The candidates of a search of bits, by MCT's indices."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from chipfit import pipeline
from chipfit.calibration.progress import Progress
from chipfit.calibration.source import CalibrationData
from chipfit.decision import choose_scales, decide
from chipfit.errors import ConfigError
from chipfit.request import Request
from chipfit.result import Result

#: tensors of an input or layer with several candidates, and the candidates: widths of these tensors
Candidates = tuple[tuple[str, ...], list[tuple[int, ...]]]


def candidates_of(result: Result) -> list[Candidates]:
    """Return the candidates of each input and layer with several, in the order of the network, widest first.

    Those of a layer are pairs of widths of its weight and its result. There are none without a search.
    """
    wide = {t: sorted(b, reverse=True) for t, b in result.plan.provenance.get("widths", {}).items() if len(b) > 1}
    graph, out = result.graph, list[Candidates]()
    for own in [*([i] for i in graph.inputs), *((n.operand("w"), *n.outputs) for n in graph.nodes)]:
        if tensors := tuple(t for t in own if t is not None and t in wide):
            out.append((tensors, list(itertools.product(*(wide[t] for t in tensors)))))
    return out


def chosen_by_index(result: Result, indices: Sequence[int], data: Any, example: Any) -> Result:
    """Return a result with other candidates than the search has chosen.

    Args:
        indices: one for each entry of `candidates_of`.
        data, example: calibration data and their first batch.

    Raises:
        ConfigError: the indices do not fit the candidates.
        PlanError, UnsupportedError: the chip cannot have these widths together.
    """
    found = candidates_of(result)
    sizes = [len(pairs) for _, pairs in found]
    if len(indices) != len(sizes) or any(not 0 <= k < size for k, size in zip(indices, sizes, strict=True)):
        allowed = f"an index for each of {len(sizes)} inputs and layers, below {sizes}"
        raise ConfigError("'configuration_overwrite' does not fit the candidates", got=indices, allowed=allowed)
    picked = [(tensors, pairs[k]) for k, (tensors, pairs) in zip(indices, found, strict=True)]
    bits = {t: width for tensors, pair in picked for t, width in zip(tensors, pair, strict=True)}
    bits = {**result.plan.provenance["chosen"], **bits}
    d = choose_scales(decide(result.decision.with_bits(bits)))
    d = replace(d, provenance={**d.provenance, "chosen": bits}, notes=(*d.notes, f"widths by index: {list(indices)}"))
    source = CalibrationData(data, example)
    request = Request(model=None, data=source, limits=None, training=None, progress=Progress(False))
    return pipeline.correct(request, *pipeline.make_plan(request, d))
