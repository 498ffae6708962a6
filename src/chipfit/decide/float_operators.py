"""Find operators in float that a chip without a float unit cannot run, or that its file format cannot represent."""

from collections.abc import Iterator

from chipfit.decide.assignment import Assignment
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import DYNAMIC, OPAQUE, Graph
from chipfit.operators.table import CELLS, OPS, refused
from chipfit.plan.record import NodePlan
from chipfit.platform.match import IntegerOperators
from chipfit.platform.schema import Platform
from chipfit.platform.support import file_suffixes

_MOST_NAMED = 8


def float_operators(graph: Graph, assignment: Assignment) -> list[NodePlan]:
    """Return the operators that read or return floats that are not quantized, in execution order."""
    found = []
    for n in graph:
        plan = assignment.nodes.get(n.name)
        if plan is None:
            continue
        sized = n.facts.layout == "size"  # it reads the shape of its operand, not the values
        floats = [v for v in (*n.inputs, *n.outputs) if v is not None and graph.is_float(v) and not sized]
        in_float = plan.exec == "float" and bool(floats)
        if in_float or n.op == DYNAMIC:
            found.append(plan)
    return found


def require_integers(graph: Graph, platform: Platform, assignment: Assignment) -> None:
    """Raise an error that names all operators in float.

    Raises:
        UnsupportedError: an operator would compute in floats; the hint says what would help.
    """
    found = float_operators(graph, assignment)
    if not found:
        return
    first, rest = found[0], len(found) - 1
    more = f", nor can {rest} more" if rest else ""
    got = "; ".join(f"{n.op} '{n.display_name}': {n.why or 'in float'}" for n in found[:_MOST_NAMED])
    got += f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    what = f"{first.op} '{first.display_name}' cannot run in integers on '{platform.name}'{more}"
    raise UnsupportedError(what, got=got, hint="; ".join(_remedies(platform, found)))


def refusals(graph: Graph, platform: Platform, assignment: Assignment) -> list[str]:
    """Return a warning about each operator that `require_integers` refuses."""
    found = float_operators(graph, assignment)
    hints = f"; {'; '.join(_remedies(platform, found))}" if found else ""
    return [
        f"warning: {n.op} '{n.display_name}' cannot run in integers on '{platform.name}': {n.why or 'in float'}{hints}"
        for n in found
    ]


def unwritable(graph: Graph, platform: Platform, assignment: Assignment) -> list[str]:
    """Return a warning about each operator in float that has no form in the only kind of file of the platform."""
    files = file_suffixes(platform)
    if len(files) != 1 or (column := files[0].lstrip(".")) not in CELLS:
        return []
    reasons, in_float = refused(column), {n.name for n in float_operators(graph, assignment)}
    forms = (CELLS[column].keys() | CELLS["decompose"].keys()) - reasons.keys()
    if column == "onnx":  # a framework exports opaque operators itself
        forms.add(OPAQUE)
    return [
        f"warning: {n.called} '{n.display_name}' has no form in {files[0]} files, the only ones of '{platform.name}'"
        f"{f': {reasons[n.op]}' if n.op in reasons else ''}; replace it, or export what comes before it"
        for n in graph
        if n.op not in forms and n.name in in_float
    ]


def _remedies(platform: Platform, found: list[NodePlan]) -> Iterator[str]:
    """Yield remedies: other operators, the list of operators in integers, a part of the network outside the file."""
    here = IntegerOperators(platform)
    for op in dict.fromkeys(n.op for n in found):
        stand_ins = OPS[op].stand_ins if op in OPS else {}
        if others := [words for needed, words in stand_ins.items() if needed in here]:
            yield f"replace {op} by {' or '.join(others)}"
    yield f"`chipfit platforms show {platform.name}` lists what runs in integers"
    yield "compute what comes first or last (such as a decoder of boxes) outside the file"
