"""Operators in float that the files of a platform cannot hold, found before calibration."""

from chipfit.decide.assignment import Assignment
from chipfit.decide.integers_only import float_operators
from chipfit.graph.ir import OPAQUE, Graph
from chipfit.operators.table import CELLS, refused
from chipfit.platform.schema import Platform
from chipfit.platform.support import writes


def unwritable(graph: Graph, platform: Platform, assignment: Assignment) -> list[str]:
    """Return a warning about each operator in float that has no form in the only kind of file of the platform."""
    files = writes(platform)
    if len(files) != 1 or (column := files[0].lstrip(".")) not in CELLS:
        return []
    reasons, in_float = refused(column), {n.name for n in float_operators(graph, assignment)}
    forms = (CELLS[column].keys() | CELLS["decompose"].keys()) - reasons.keys()
    if column == "onnx":  # in which frameworks write their own operators
        forms.add(OPAQUE)
    return [
        f"warning: {n.called} '{n.display_name}' has no form in {files[0]} files, the only ones of '{platform.name}'"
        f"{f': {reasons[n.op]}' if n.op in reasons else ''}; replace it, or export what comes before it"
        for n in graph
        if n.op not in forms and n.name in in_float
    ]
