"""The record of all decisions about one network on one platform, and the one chain of functions that fills it.

    decide -> (calibration) -> choose_scales -> plan_of

`quantize`, `Result.edit`, `Result.sensitivity`, `Result.pareto`, the search of bit widths and `lint` use this chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from chipfit import steps
from chipfit.calibration.collect import TensorStats
from chipfit.calibration.sample_fingerprints import SampleHashes
from chipfit.correction.measured_bias import MeasuredBiases, Samples
from chipfit.decide import scales
from chipfit.decide.assignment import Assignment, assign
from chipfit.decide.constraints import tie_groups
from chipfit.decide.float_operators import require_integers, unwritable
from chipfit.decide.formats import TooWide
from chipfit.decide.insertions import narrowed, requantize, with_dynamic, without_insertions
from chipfit.decide.legality import plan_limits
from chipfit.decide.override_effects import unapplied_overrides, unmet_io_formats
from chipfit.decide.overrides import Overrides, override_entries, resolve_overrides, to_record, with_results
from chipfit.decide.statistics import DEFAULT_RULES, RangeRules, declared
from chipfit.errors import NothingQuantizedError
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear
from chipfit.passes.composites import Whole, close_composites, composites_in, open_composites
from chipfit.passes.fuse import fuse
from chipfit.passes.shift_negative import fuse_shifts
from chipfit.plan import record
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.match import IntegerOperators, dictated_scale, fusions, lists_in_float, runs_in_integers, sets_of
from chipfit.platform.schema import Platform
from chipfit.ranges import name_of
from chipfit.registry import lookup
from chipfit.screen import Summary, SummaryRepr
from chipfit.settings import DEFAULT_SETTINGS, Settings

#: reasons that a refusal to quantize lists
_MOST_REASONS = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Decision(SummaryRepr):
    """Everything that is decided about a network on a platform; each function of the chain fills in its part."""

    platform: Platform
    #: float network after the rewrites so far; empty until the model is read
    graph: Graph = field(default_factory=lambda: Graph([], [], [], {}, {}))
    captured: Graph | None = None  #: as the model was read, while rewrites may be made anew
    overrides: Overrides | None = None  #: as the user gave them
    precise: tuple[tuple[str, Any], ...] = ()  #: layers that a repair has made more precise, as overrides
    apart: tuple[str, ...] = ()  #: layers that no kernel computes together with what is in front of them
    widths: tuple[tuple[str, Any], ...] = ()  #: bits that a search chose, as further overrides by node name
    settings: Settings = DEFAULT_SETTINGS
    rules: RangeRules = DEFAULT_RULES
    seed: int = 0
    #: composites that are opened into parts, as they were
    composites: Mapping[str, Whole] = field(default_factory=dict)
    #: first node of a kernel with several ways to run -> the one that `passes.float_regions` has chosen
    execution: Mapping[str, str] = field(default_factory=dict)
    assignment: Assignment = field(default_factory=Assignment)  #: from `decide`
    stats: Mapping[str, TensorStats] = field(default_factory=dict)  #: from calibration, by activation
    tensors: Mapping[str, TensorPlan] = field(default_factory=dict)  #: from `choose_scales`
    warnings: tuple[str, ...] = ()  #: signs that the data do not suit the network
    rewrites: tuple[str, ...] = ()  #: notes of rewrites: made or refused
    notes: tuple[str, ...] = ()  #: notes of the last `decide`
    provenance: Mapping[str, Any] = field(default_factory=dict)  #: where the decisions come from, as plans keep it
    corrected: tuple[str, ...] = ()  #: corrections that the weights of `graph` have had before this decision
    samples: Samples | None = None  #: of the calibration data, for measurements
    measured: MeasuredBiases | None = None  #: what they have shown of the network and the tensors at that time
    #: the decision with its statistics, before the rewrites that follow them: where other overrides start from
    calibrated: Decision | None = None

    def _summary(self) -> Summary:
        runs, known = Counter(n.exec for n in self.assignment.nodes.values()), dict[str, str]()
        known["operators"] = ", ".join(f"{count} {how}" for how, count in runs.items())
        known["overrides"] = ", ".join(f"{where}: {what}" for where, what in self.all_overrides)
        known["settings"] = repr(self.settings)
        known["warnings"], known["notes"] = "; ".join(self.warnings), "; ".join(self.notes)
        rows = [(t.name, t.role, t.format, t.origin or t.why) for t in self.tensors.values()]
        header = ("tensor", "role", "format", "origin")
        return Summary(f"Decision for {self.platform.name}", known, header, rows, "decision.tensors")

    @property
    def all_overrides(self) -> list[tuple[Any, Any]]:
        """Repairs, the user's overrides, then the bits that a search chose; a later entry wins over an earlier one."""
        return [*self.precise, *override_entries(self.overrides), *self.widths]

    def with_overrides(self, more: Mapping[Any, Any]) -> Decision:
        """Return the decision to be made with further overrides, which win over those that it has."""
        return replace(self, overrides=[*self.all_overrides, *more.items()], precise=(), widths=())

    @property
    def integers_only(self) -> bool:
        """No operator may compute in floats."""
        return self.settings.integer_only or not self.platform.float_unit

    def checked(self) -> Decision:
        """Return the decision if it quantizes something and keeps to integers where only these are allowed.

        Raises:
            NothingQuantizedError: see `refuse_all_float`.
            UnsupportedError: an operator computes in floats where only integers are allowed.
        """
        if self.integers_only:
            require_integers(self.graph, self.platform, self.assignment)
        return refuse_all_float(self)

    def _free_inputs(self) -> list[str]:
        """Return the inputs of the model whose readers, perhaps behind pass-through operators, take any format."""
        users, free = self.graph.users(), self.assignment.read_anything
        nodes = self.assignment.nodes

        def is_free(value: str) -> bool:
            readers = users.get(value, [])
            return bool(readers) and all(n.name in free or passes(n) for n in readers)

        def passes(n: Node) -> bool:
            return n.name in nodes and nodes[n.name].exec == "follow" and all(map(is_free, n.outputs))

        return [v for v in self.graph.inputs if is_free(v)]

    def with_bits(self, bits: Mapping[str, int]) -> Decision:
        """Return the decision to be made with these bits.

        Args:
            bits: weight or activation -> bits; they replace what an earlier search chose.
        """
        widths: list[tuple[str, Any]] = [(v, {"activation_bits": bits[v]}) for v in self._free_inputs() if v in bits]
        for n in self.graph.nodes:
            choices = {"bits": bits[n.weight]} if is_linear(self.graph, n) and n.weight in bits else {}
            decided, weight = self.assignment.nodes.get(n.name), n.operand("w")
            reads = () if n.name in self.assignment.read_anything else n.inputs
            around = [bits[i] for i in (*n.outputs, *reads) if i is not None and i in bits and i != weight]
            if around and decided is not None and decided.exec not in ("float", "follow"):
                choices["activation_bits"] = around[0]
            widths += [(n.name, choices)] if choices else []
        return replace(self, widths=tuple(widths))


def decide(d: Decision) -> Decision:
    """Fuse operators, choose a format for every tensor, and insert requantization where scales would clash.

    Needs no data. Every earlier assignment is replaced.

    Raises:
        UnsupportedError: an operator that the platform rejects, or bits that no format offers.
        UnknownNameError, PlanError: an override that names no layer or has no effect.
    """
    d, insertions = _requantized(_assigned(_opened(replace(d, graph=without_insertions(d.graph)))))
    if d.assignment.dynamic:
        d = _assigned(replace(d, graph=with_dynamic(d.graph, d.platform, d.assignment)))
    effects = unapplied_overrides(d.graph, d.assignment, d.all_overrides)
    effects += unmet_io_formats(d.graph, d.platform, d.assignment)
    effects += unwritable(d.graph, d.platform, d.assignment)
    return replace(d, notes=(*d.notes, *insertions, *effects))


def _opened(d: Decision) -> Decision:
    """Open the composites whose parts all run in integers; without effect once there are statistics."""
    if d.stats:  # the parts of further ones would have none
        return d
    platform = d.platform
    tests = partial(runs_in_integers, platform), IntegerOperators(platform), partial(lists_in_float, platform)
    graph, wholes = open_composites(d.graph, *tests, coarse=lambda g, n: dictated_scale(platform, g, n) is not None)
    if not wholes:
        return d
    assignment = _assigned(replace(d, graph=graph)).assignment
    found = composites_in(graph)
    whole = {name: w for name, w in wholes.items() if not all(assignment.in_integers(p) for p in found[name])}
    opened = {name: w for name, w in wholes.items() if name not in whole}
    return replace(d, graph=close_composites(graph, whole), composites={**d.composites, **opened})


def with_whole(d: Decision, names: Collection[str]) -> Decision:
    """Return the decision with some opened composites whole, before checks."""
    wholes = {name: d.composites[name] for name in names}
    rest = {name: w for name, w in d.composites.items() if name not in wholes}
    graph = close_composites(without_insertions(d.graph), wholes)
    return _requantized(_assigned(replace(d, graph=graph, composites=rest)))[0]


def _requantized(d: Decision) -> tuple[Decision, list[str]]:
    """Insert requantization where scales would clash and assign again; return a note for each insertion besides."""
    graph, notes = requantize(d.graph, d.platform, d.assignment)
    return d if graph is d.graph else _assigned(replace(d, graph=graph)), notes


def _assigned(d: Decision) -> Decision:
    """Fuse and assign, after requantization of what is too wide for its consumers."""
    insertions = list[str]()
    while True:
        try:
            done = _assigned_once(d)
        except TooWide as clash:
            found = narrowed(d.graph, d.platform, clash)
            if found is None:
                raise
            d = replace(d, graph=found[0])
            insertions.append(found[1])
        else:
            return replace(done, notes=(*done.notes, *insertions))


def _assigned_once(d: Decision) -> Decision:
    """Fuse and assign once, on the graph as it is."""
    graph, platform = d.graph, d.platform
    groups, notes = fuse(graph, fusions(platform), lambda n: sets_of(platform.sets, n.op, n.layer_type, n.config))
    groups = _ending_before(groups, {n.name for n in graph.nodes if n.layer in d.apart})
    overrides = with_results(resolve_overrides(graph, d.all_overrides), d.execution)
    assignment = assign(graph, platform, fuse_shifts(graph, groups), overrides)
    assignment, more = steps.adjust_formats(graph, assignment, platform, d.settings)
    return replace(d, assignment=assignment, notes=(*notes, *more))


def _ending_before(groups: tuple[tuple[str, ...], ...], apart: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return groups of nodes that end before a node of `apart`, unless they begin with one."""
    cut = (g if g[0] in apart else tuple(takewhile(lambda name: name not in apart, g)) for g in groups)
    return tuple(g for g in cut if len(g) > 1)


def refuse_all_float(d: Decision) -> Decision:
    """Return the decision unless it leaves every tensor in float.

    Raises:
        NothingQuantizedError: no tensor is quantized; lists the reasons.
    """
    if any(s.role != "bias" for s in d.assignment.tensors.values()):
        return d
    reasons = dict.fromkeys(f"{n.op} '{n.display_name}': {n.why}" for n in d.assignment.nodes.values() if n.why)
    got = "; ".join(list(reasons)[:_MOST_REASONS]) or "a model without operators"
    name = d.platform.name
    hint = f"`chipfit platforms show {name}` lists what it runs; remove overrides that keep every layer in float"
    raise NothingQuantizedError(f"Nothing in this model can be quantized on '{name}'", got=got, hint=hint)


def with_declared_statistics(d: Decision, batches: steps.Batches) -> Decision:
    """Collect the statistics that range rules declare, of tensors that do not have theirs yet; weights get entries too.

    Args:
        batches: of graph inputs; read only where a rule declares a statistic.
    """
    stats = dict(d.stats)
    for statistic, names in declared(d.assignment, d.rules).items():
        if lacking := {n for n in names if n not in stats or statistic not in stats[n].extras}:
            given = d.graph, d.assignment.float_edges, lacking, d.stats, batches, d.seed
            for name, value in lookup("statistic", statistic)(*given).items():
                own = stats.get(name) or TensorStats(name)
                stats[name] = replace(own, extras={**own.extras, statistic: value})
    return replace(d, stats=stats)


def choose_scales(d: Decision, keep: Mapping[str, TensorPlan] | None = None) -> Decision:
    """Choose scale and zero point of every tensor.

    Args:
        keep: earlier choices; a tensor whose format has not changed keeps its numbers.

    Raises:
        PlanError, DataError, UnsupportedError: see `decide.scales.choose`.
    """
    return replace(d, tensors=scales_of(d, d.graph, keep))


def scales_of(d: Decision, graph: Graph, known: Mapping[str, TensorPlan] | None = None) -> dict[str, TensorPlan]:
    """Choose the scales of a graph whose weights may differ from those of the decision."""
    return scales.choose(graph, d.assignment, d.stats, d.rules, known)


def redecide(d: Decision, plan: Plan, batches: steps.Batches | None = None) -> Decision:
    """Decide again after a change of overrides or bits, on a graph that stays as it is.

    A tensor keeps its numbers if its format stays, and the tensors that share them, unless the platform's rules have
    moved them.

    Args:
        d: the decision with the change; activations without statistics take the ranges that `plan` remembers.
        plan: the plan before the change.
        batches: of graph inputs, for statistics that range rules declare; None: such rules run without them.

    Raises:
        NothingQuantizedError: every tensor would stay in float.
        UnknownNameError, PlanError, UnsupportedError, DataError: see `decide` and `choose_scales`.
    """
    remembered = {
        t.name: TensorStats(t.name, t.low, t.high, batches=1)
        for t in plan.tensors.values()
        if t.role == "activation" and t.low is not None and t.high is not None
    }
    d = refuse_all_float(decide(replace(d, stats={**remembered, **d.stats})))
    before, now = ({t: g for g in ties for t in g} for ties in (plan.ties, tie_groups(d.assignment.constraints)))
    keep = {k: t for k, t in plan.tensors.items() if before.get(k) == now.get(k) and not scales.is_ruled(t)}
    return choose_scales(d if batches is None else with_declared_statistics(d, batches), keep=keep)


def plan_of(d: Decision) -> Plan:
    """Return the plan of a decision whose scales are chosen."""
    only, apart, precise = True if d.integers_only else None, list(d.apart) or None, to_record(d.precise) or None
    own: dict[str, Any] = {"integer_only": only, "apart": apart, "precise": precise}
    return Plan(
        platform=d.platform.name,
        tensors=dict(d.tensors),
        nodes=dict(d.assignment.nodes),
        groups=d.assignment.groups,
        float_edges=d.assignment.float_edges,
        ties=tie_groups(d.assignment.constraints),
        rewrites=(*d.warnings, *d.rewrites, *d.notes),
        provenance={**d.provenance, **{k: v for k, v in own.items() if v is not None}},
        **plan_limits(d.graph, d.assignment.constraints, d.tensors),
    )


def provenance_of(d: Decision, samples: SampleHashes) -> dict[str, Any]:
    """Return where a plan comes from: versions, hashes, settings, and fingerprints of the samples."""
    rules = {"rule": name_of(d.rules.rule), "weight_rule": name_of(d.rules.weight_rule)}
    asked = {"overrides": to_record(d.overrides) or None, "steps": d.settings.to_record() or None, "seed": d.seed}
    found = record.provenance_of(d.graph, d.platform, samples.hash, **asked, **rules, z_threshold=d.rules.z_threshold)
    return {**found, "samples": sorted(samples.digests)}
