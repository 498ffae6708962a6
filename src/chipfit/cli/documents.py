"""The JSON documents of the commands. `docs/schema/command-line.schema.json` is generated from these types."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict

from chipfit.cli.doctor import Diagnosis

if TYPE_CHECKING:
    from chipfit.graph.ir import Node
    from chipfit.linting import Lint
    from chipfit.plan.record import NodePlan, Plan
    from chipfit.result import Result
    from chipfit.verify.verification import Verification


#: an error that the user can mend: its class in `chipfit.errors`, its sentence, and its facts
ErrorFacts = TypedDict(
    "ErrorFacts",
    {
        "type": str,
        "what": str,
        "where": NotRequired[str],
        "got": NotRequired[str],
        "allowed": NotRequired[str],
        "try": NotRequired[str],  # a keyword of Python, which the form of a class cannot name
    },
)


class Compared(TypedDict):
    """Results of a runtime beside those of the simulation."""

    runtime: str
    verdict: str  #: exact, sound, bounded, departs or unpromised
    promised: bool
    samples: int
    integers: int
    differing: int
    output_gap: float
    tensors: int  #: tensors of which integers were compared
    not_compared: dict[str, int]  #: reason -> number of tensors
    executed: dict[str, int]  #: operator that the runtime ran -> count
    float_operators: list[str]
    accuracy: dict[str, float]  #: float, simulated, integer, device -> top-1, with labels
    departures: list[str]
    warnings: list[str]
    report: NotRequired[str]


class Timed(TypedDict):
    """The float and the quantized file beside each other on a runtime."""

    runtime: str
    batch: int  #: samples of a call
    pairs: int  #: pairs of calls
    float_ms: float  #: processor time of a call
    quantized_ms: float
    float_wall_ms: float  #: time on the clock
    quantized_wall_ms: float
    ratio: float  #: quantized over float
    float_file: int  #: bytes
    quantized_file: int
    operators: list[dict[str, Any]]  #: name, op, exec, products, float_bytes, quantized_bytes
    warnings: list[str]


class Npu(TypedDict):
    """A network on an NPU, by its compiler's estimate."""

    accelerator: str
    operators: int
    on_npu: int
    on_cpu: list[dict[str, str]]  #: tensor, layer, op, why
    sram: int  #: bytes
    dram: int
    flash: int
    macs: int
    cycles: int
    inferences_per_second: float


class Layer(TypedDict):
    """An operator and how it runs."""

    name: str
    operator: str
    runs: str  #: int, table, follow (it moves integers) or float
    group: str  #: layer at the end of the kernel that it is part of; "" alone
    why: str  #: why it runs in float
    tensors: NotRequired[list[str]]


class Quantized(TypedDict):
    """Files that `quantize`, `train` or `demo` wrote, and facts about them."""

    platform: str
    files: dict[str, str]  #: model, plan, report -> path
    float_bytes: int
    quantized_bytes: int
    operators: int
    operators_in_float: int
    sqnr_db: float | None  #: of the outputs on held-out samples
    warnings: list[str]
    notes: list[str]
    verification: Compared | None


class Linted(TypedDict):
    """Operators of a model, and where each would run."""

    platform: str
    layers: list[Layer]
    in_integers: int
    notes: list[str]


class Explained(TypedDict):
    """Decisions about layers, and with data the loss by each tensor or by size."""

    layers: list[Layer]
    sensitivity: NotRequired[list[dict[str, Any]]]
    pareto: NotRequired[list[dict[str, Any]]]


class Beside(TypedDict):
    """Two quantized networks beside each other."""

    a: str
    b: str
    equal: bool  #: every operator was decided equally; and the plans, where both sides have one
    facts: list[dict[str, Any]]  #: what (with its unit), a, b
    layers: list[dict[str, Any]]  #: layer, operator, differs (names of what was decided differently), a, b
    plan: list[dict[str, str]] | None  #: where, field, a, b; None where a side has no plan
    report: NotRequired[str]


class Pruned(TypedDict):
    """A smaller network, and the channels that were removed."""

    file: str
    layers: list[dict[str, Any]]  #: name, op, why it keeps all; channels, parameters, products: [before, after]


class PlatformRow(TypedDict):
    """A built-in platform."""

    name: str
    device: str
    formats: str  #: first choice of weighted operators
    deploys: list[str]
    writes: list[str]  #: suffixes of the files for it that chipfit writes
    proven_by: list[str]  #: runtimes that prove them


class Platforms(TypedDict):
    """The built-in platforms."""

    platforms: list[PlatformRow]


class Shown(TypedDict):
    """A platform with all its facts, as `platform.schema.json` describes them."""

    platform: dict[str, Any]


class Checked(TypedDict):
    """A platform file and its problems."""

    file: str
    problems: list[ErrorFacts]


class Written(TypedDict):
    """A file that was written."""

    file: str


class Experiment(TypedDict):
    """One experiment."""

    name: str
    key: str
    state: str  #: done, or done before
    top1: NotRequired[float]
    float_top1: NotRequired[float]


class Generated(TypedDict):
    """Files of experiments that were written."""

    experiments: int
    folder: str


class Swept(TypedDict):
    """The experiments of a matrix."""

    experiments: int
    failed: list[str]
    store: str  #: file with all outcomes


class Runs(TypedDict):
    """Rows of the table of runs, best first."""

    runs: list[dict[str, Any]]


class Differences(TypedDict):
    """Settings, versions and results in which two runs differ."""

    runs: list[dict[str, str]]  #: name and key of both
    differences: list[dict[str, Any]]  #: what, and both values


class Tracked(TypedDict):
    """Runs that were sent to another tool."""

    runs: int
    to: str


#: command -> its document
DOCUMENTS: dict[str, Any] = {
    **dict.fromkeys(("quantize", "train", "demo"), Quantized),
    "prune": Pruned,
    "compare": Beside,
    "verify": Compared,
    "time": Timed,
    "lint": Linted,
    "check-npu": Npu,
    "explain": Explained,
    "doctor": Diagnosis,
    "platforms list": Platforms,
    "platforms show": Shown,
    "platforms check": Checked,
    **dict.fromkeys(("platforms export", "bench plot", "bench board"), Written),
    "bench run": Experiment,
    "bench generate": Generated,
    "bench sweep": Swept,
    "bench table": Runs,
    "bench compare": Differences,
    "bench track": Tracked,
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the documents, one definition for each command."""
    from pydantic import TypeAdapter

    kinds = {**DOCUMENTS, "error": ErrorFacts}
    inputs: Any = [(name, "serialization", TypeAdapter(kind)) for name, kind in kinds.items()]
    found, whole = TypeAdapter.json_schemas(inputs, title="Documents of chipfit's commands with --json")
    commands = {name: found[name, "serialization"] for name in kinds}
    return {**whole, "properties": {"chipfit": {"type": "string", "title": "version"}}, "commands": commands}


def compared(v: "Verification") -> Compared:
    """Return what a verification found."""
    return {
        "runtime": v.runtime,
        "verdict": v.verdict,
        "promised": v.promised,
        "samples": v.samples,
        "integers": v.integers,
        "differing": v.differing,
        "output_gap": v.output_gap,
        "tensors": len(v.compared),
        "not_compared": v.not_compared,
        "executed": v.executed,
        "float_operators": v.float_operators,
        "accuracy": v.accuracy,
        "departures": v.departures,
        "warnings": v.warnings,
    }


def quantized(result: "Result", files: Mapping[str, Path], verification: "Verification | None") -> Quantized:
    """Return what was written for a result."""
    report = result.report
    return {
        "platform": report.platform,
        "files": {k: str(p) for k, p in files.items()},
        "float_bytes": report.float_bytes,
        "quantized_bytes": report.quantized_bytes,
        "operators": len(report.layers),
        "operators_in_float": sum(r.exec == "float" for r in report.layers),
        "sqnr_db": (report.merit or {}).get("sqnr_db"),
        "warnings": report.warnings,
        "notes": list(report.notes),
        "verification": compared(verification) if verification else None,
    }


def layer_of(node: "NodePlan", names: Mapping[str, str], plan: "Plan | None" = None, tensors: Any = ()) -> Layer:
    """Return how a node runs.

    Args:
        names: node -> the user's name, of the last nodes of kernels.
        plan, tensors: plan, and tensors of it to describe.
    """
    group = names.get(node.group, "") if node.group != node.name else ""
    row: Layer = {"name": node.display_name, "operator": node.op, "runs": node.exec, "group": group, "why": node.why}
    if plan is not None:
        row["tensors"] = [str(plan.tensors[t]) for t in dict.fromkeys(tensors) if t in plan.tensors]
    return row


def linted(found: "Lint", notes: list[str]) -> Linted:
    """Return how each operator would run."""
    names = {n.name: n.display_name for n in found.rows}
    count = sum(n.exec != "float" for n in found.rows)
    layers = [layer_of(n, names) for n in found.rows]
    return {"platform": found.platform.name, "layers": layers, "in_integers": count, "notes": notes}


def explained(result: "Result", nodes: Iterable["Node"], searched: Any = None) -> Explained:
    """Return decisions about nodes.

    Args:
        searched: a `Sensitivity` or `Pareto` of the result.
    """
    names = {n.name: n.display_name for n in result.plan.nodes.values()}
    layers = [layer_of(result.plan.nodes[n.name], names, result.plan, (*n.inputs, *n.outputs)) for n in nodes]
    out: Explained = {"layers": layers}
    if hasattr(searched, "points"):
        out["pareto"] = [dict(p) for p in searched.points]
    elif searched is not None:
        out["sensitivity"] = searched.rows()
    return out


def explained_file(plan: "Plan", chosen: Iterable["Node"] | None = None) -> Explained:
    """Return how a quantized file of any tool runs, or some of its operators."""
    names = {n.name: n.display_name for n in plan.nodes.values()}
    if chosen is not None:
        return {"layers": [layer_of(plan.nodes[n.name], names, plan, (*n.inputs, *n.outputs)) for n in chosen]}
    return {"layers": [layer_of(n, names, plan, (n.name,)) for n in plan.nodes.values()]}


def platform_rows() -> list[PlatformRow]:
    """Return the built-in platforms."""
    from chipfit.platform.load import load, names
    from chipfit.platform.show import first_choice
    from chipfit.platform.support import file_suffixes

    return [
        {
            "name": p.name,
            "device": p.title,
            "formats": first_choice(p),
            "deploys": list(p.deploy),
            "writes": file_suffixes(p),
            "proven_by": list(p.runtimes),
        }
        for p in map(load, names())
    ]
