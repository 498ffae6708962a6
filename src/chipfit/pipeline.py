"""The whole story on one page: from a trained model to a quantized one, a file, and the proof."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from chipfit import steps
from chipfit.calibration.batch_cache import CachedBatches
from chipfit.calibration.collect import TensorStats, collect, padding_mask
from chipfit.calibration.data import OtherSize, as_call, batches, example_of, first_batch, split_label
from chipfit.calibration.data_checks import check_input_scale, check_sample_count
from chipfit.calibration.input_errors import explain_error
from chipfit.calibration.progress import Progress, length
from chipfit.calibration.sample_fingerprints import SampleHashes
from chipfit.decide import scales, statistics
from chipfit.decide.assignment import Assignment, assign
from chipfit.decide.constraints import plan_limits, tie_groups
from chipfit.decide.dynamic import with_dynamic, without_dynamic
from chipfit.decide.override_effects import unapplied_overrides, unmet_io_formats
from chipfit.decide.overrides import Overrides, resolve_overrides, to_record, with_results
from chipfit.decide.requantize import requantize
from chipfit.engine.process import undisturbed
from chipfit.errors import CaptureError, ConfigError, Interrupted, NothingQuantizedError, PlanError, UnknownNameError
from chipfit.frameworks import capture, checksum, lower, read_back
from chipfit.graph.ir import Graph
from chipfit.passes.fuse import fuse
from chipfit.passes.shift_negative import fuse_shifts
from chipfit.plan.record import Plan, TensorPlan, provenance_of
from chipfit.plan.training import Training, check_folds, check_trainable
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.load import load_platform
from chipfit.platform.match import fusions, sets_of
from chipfit.platform.schema import Platform
from chipfit.ranges import Rule, name_of, rule_of
from chipfit.registry import OFF, is_number
from chipfit.rounding.compare import Reference, compare_plans, split_holdout, without_weight_rounding
from chipfit.rounding.fisher import first_samples
from chipfit.screen import Summary, SummaryRepr
from chipfit.search.candidates import as_overrides
from chipfit.search.choose import search_space
from chipfit.search.limits import Limits
from chipfit.search.losses import RoundingModel
from chipfit.search.pareto import SHARES, Pareto, pareto
from chipfit.search.sensitivity import Sensitivity, sensitivity
from chipfit.search.solve import LOSS
from chipfit.settings import DEFAULT_SETTINGS, Settings

if TYPE_CHECKING:
    from chipfit.report.report import Report
    from chipfit.verify import Verification


@dataclass(repr=False)
class Result(SummaryRepr):
    """What `quantize` returns: the decision, and everything that can be made of it."""

    graph: Graph  #: the float network after rewrites
    plan: Plan
    platform: Platform
    stats: dict[str, TensorStats] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)  #: seconds per stage
    verification: Verification | None = None
    training: Training | None = None  #: what trains the quantizers of `model`; None: their scales stay
    _model: Any = None
    _made: int = 0  #: checksum of the numbers of `model` as it was made
    #: before biases and weights were corrected; None where they were not
    _uncorrected: tuple[Graph, Plan] | None = None
    _overrides: Overrides | None = None  #: as they were given; a plan holds their text
    _sensitivity: Sensitivity | None = None  #: what `sensitivity` found
    _pareto: Pareto | None = None  #: what `pareto` found
    _data: Any = None  #: as it was given to `quantize`, where it can be read again

    @property
    @undisturbed
    def model(self) -> Any:
        """The simulation, which still trains: an `nn.Module` or a Keras model with the original inputs and outputs."""
        if self._model is None:
            self._model = lower(self.graph, self.plan, self.training)
            self._made = checksum(self._model, self.graph.framework)
        return self._model

    def _summary(self) -> Summary:
        plan, v = self.plan, self.verification
        nodes = list(plan.nodes.values())
        floats = sorted(nodes, key=lambda n: n.exec != "float")  # what stays float first: it is what people look for
        formats = {o: t.format for n in self.graph.nodes for o in n.outputs[:1] if (t := plan.tensors.get(o))}
        made = {n.name: formats.get(n.outputs[0], "") for n in self.graph.nodes if n.outputs}
        rows = [(n.who, n.op, n.exec, made.get(n.name, ""), n.why) for n in floats]
        integers = sum(n.exec != "float" for n in nodes)
        return Summary(
            f"Result for {self.platform.name}: {integers} of {len(nodes)} operators in integers",
            {
                "tensors": f"{sum(t.quantized for t in plan.tensors.values())} of {len(plan.tensors)} stored in codes",
                "time": ", ".join(f"{k} {s:.2f} s" for k, s in self.timings.items()),
                "verified": v.summary().splitlines()[0] if v else "not yet: result.verify(data)",
                "next": "result.report.show(), .model, .export(path), .save(folder)",
            },
            ("layer", "operator", "runs", "result", "why float"),
            rows,
            "result.plan, result.report",
        )

    @property
    def device_model(self) -> Any:
        """The device, for evaluation on any data: what the platform's runtime returns, bit for bit, as a model.

        Operators that the runtime computes in float are its `float_operators`: there the last bit is the runtime's.
        It warns where no runtime proves the platform.

        Raises:
            UnsupportedError: the platform does not say how it computes.
            PlanError: `model` was trained since.
        """
        self.refuse_trained("the device model")
        from chipfit.simulate.device import device_model

        return device_model(self.graph, self.plan, self.platform)

    def trains(self, training: Any) -> Result:
        """The result with a `model` whose quantizers train.

        Args:
            training: see `quantize`.

        Raises:
            UnknownNameError, ConfigError, UnsupportedError: see `quantize`; PlanError when `model` was trained.
        """
        self.refuse_trained("another training")
        chosen = Training.of(training)
        check_trainable(chosen, self.plan)
        return replace(self, training=chosen, _model=None)

    def as_calibrated(self) -> Result:
        """The result without what was done to `model` since: as it came from calibration, to be trained alike."""
        return replace(self, verification=None, _model=None)

    def refuse_trained(self, what: str) -> None:
        """Raise where `model` holds other numbers than the plan: which are meant is the user's to say."""
        if self._model is not None and checksum(self._model, self.graph.framework) != self._made:
            hint = "`result.trained()` takes its weights and scales over; `result.as_calibrated()` leaves them out"
            raise PlanError(f"`model` has changed since it was made, and {what} would not see that", hint=hint)

    def trained(self) -> Result:
        """The result with the weights and scales that training gave to `model`, to be exported, verified or saved.

        Raises:
            PlanError: training has left a scale that is not positive.
            UnsupportedError: what an algorithm has trained cannot be deployed.
        """
        graph, plan = read_back(self.model, self.graph, self.plan)
        return Result(graph, plan, self.platform, self.stats, self.timings)

    def edit(self, overrides: Overrides) -> Result:
        """The result with some layers decided by hand: kept in float, or at other bits.

        Whatever keeps its format keeps its numbers; the rest comes from the calibration statistics, or from the
        ranges that the plan remembers. The platform's rules hold again afterwards.

        Args:
            overrides: as for `quantize`; they replace earlier ones.

        Raises:
            UnknownNameError, PlanError, UnsupportedError: see `quantize`; PlanError also when a tensor would need a new
                calibration, or a new correction that needs data, or `model` was trained.
        """
        return self._edited(overrides, self._data)

    def _edited(self, overrides: Overrides, data: Any) -> Result:
        self.refuse_trained("an edit")
        graph, plan, choose, stats = self._decided(overrides, data)
        rule = self._rules.get("weight_rule", "mse")
        settings, said = steps.completed(self._settings, _widths(plan), rule, data is not None)
        lacks = data is None and steps.reads_again(settings)
        if lacks or (self.plan.provenance.get("corrected") and self._uncorrected is None):
            raise PlanError(
                "What was corrected for this plan's rounding would be wrong for another's, "
                "and the calibration data are not here",
                hint="quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`",
            )
        record = {**self.plan.provenance, "edited": to_record(overrides)}
        said += [note for note in statistics.notes_of_missing(plan.tensors) if note not in plan.rewrites]
        plan = replace(plan, rewrites=(*plan.rewrites, *said), provenance=record)
        read = batches(data, graph) if data is not None else ()
        kept = {"_overrides": overrides, "_data": data}
        stats = self.stats | {name: s for name, s in stats.items() if s.extras}
        made = Result(graph, plan, self.platform, stats, self.timings, **kept)
        made = made.trains(self.training) if self.training is not None else made
        return _corrected(made, settings, read, choose)

    @property
    def _settings(self) -> Settings:
        return Settings.from_record(self.plan.provenance.get("settings", {}).get("steps", {}))

    @property
    def _results(self) -> Mapping[str, str]:
        chosen: Mapping[str, str] = self.plan.provenance.get("results", {})
        return chosen

    @property
    def _rules(self) -> dict[str, Any]:
        chosen = self.plan.provenance.get("settings", {})
        return {k: v for k, v in chosen.items() if k in ("rule", "weight_rule", "z_threshold")}

    def _decided(
        self, overrides: Overrides, data: Any = None
    ) -> tuple[Graph, Plan, steps.Choose, dict[str, TensorStats]]:
        """Return the plan with these overrides instead, rounded to the nearest, what makes its scales, and from what.

        Args:
            data: for statistics that range rules declare, of tensors that had other rules until now.
        """
        graph, before = self._uncorrected or (self.graph, self.plan)
        graph, assignment, _notes = decide(graph, self.platform, overrides, self._settings, self._results)
        _refuse_all_float(assignment, self.platform)
        stats = dict(self.stats)
        for t in self.plan.tensors.values():
            if t.name not in stats and t.role == "activation" and t.low is not None and t.high is not None:
                stats[t.name] = TensorStats(t.name, t.low, t.high, batches=1)
        rules = self._rules
        if data is not None:
            seed = self.plan.provenance.get("settings", {}).get("seed", 0)
            named = {k: v for k, v in rules.items() if k != "z_threshold"}
            stats = statistics.with_declared(graph, assignment, stats, batches(data, graph), **named, seed=seed)
        choose: steps.Choose = partial(scales.choose, assignment=assignment, stats=stats, **rules)
        return graph, _plan(before, graph, choose(graph, known=before.tensors), assignment), choose, stats

    @property
    def _given(self) -> Overrides | None:
        """The user's overrides; of a result that was loaded, their text."""
        known = self.plan.provenance
        earlier = known.get("edited", known.get("settings", {}).get("overrides"))
        return earlier if self._overrides is None else self._overrides

    def _and(self, overrides: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """More overrides, behind those that were given and the widths that a search chose."""
        known = self.plan.provenance
        widths = {} if "edited" in known else known.get("chosen", {})
        return [*as_overrides(self.graph, self.plan, widths, self._given), *overrides.items()]

    @undisturbed
    def sensitivity(self, data: Any) -> Sensitivity:
        """Which tensors hurt: what each adds to the loss as it is stored, and at the other widths that the chip has.

        One forward and one backward pass over the first 128 samples of `data`, and one trial of each change that is
        advised. From now on `report` shows it.

        Raises:
            DataError: see `quantize`.
        """
        graph, plan = self._uncorrected or (self.graph, self.plan)

        how = _rounding(self.plan.provenance.get("corrected", ()), self._rules)
        given = graph, plan, self.platform, batches(data, graph), self.stats
        self._sensitivity = sensitivity(*given, lambda more: self._decided(self._and(more))[:2], how)
        return self._sensitivity

    @undisturbed
    def pareto(self, data: Any, over: str = "weights", shares: Sequence[float] = SHARES) -> Pareto:
        """The best widths for several budgets, with the loss that is predicted and the one that is measured.

        One forward and one backward pass over the first 128 samples of `data`, one integer program for each budget, and
        one forward pass for each choice, rounded to the nearest. From now on `report` shows it.

        Args:
            over: what is limited, by its name in `Limits`.
            shares: budgets, of what the same tensors take in 8 bits [%].

        Raises:
            UnknownNameError: there is no such limit.
            PlanError: no budget can be kept.
            DataError: see `quantize`.
        """
        limits = [f.name for f in fields(Limits) if f.name != LOSS]
        if over not in limits:
            raise UnknownNameError("limit", over, limits)
        graph, plan = self._uncorrected or (self.graph, self.plan)
        images, by_hand = list(first_samples(batches(data, graph))), resolve_overrides(graph, self._given)
        reference, asked = Reference(graph, images), partial(as_overrides, graph, plan, user=self._given)

        def formats(bits: Mapping[str, int]) -> Assignment:
            return decide(graph, self.platform, asked(bits), self._settings, self._results)[1]

        how = _rounding((), self._rules)
        choices = search_space(graph, self.platform, plan, [over], images, self.stats, formats, by_hand, rounding=how)
        self._pareto = pareto(choices, over, shares, lambda bits: reference.loss(*self._decided(asked(bits))[:2]))
        return self._pareto

    @property
    def report(self) -> Report:
        """How well it went, as data; `report.save(path)` writes the HTML page."""
        from chipfit.report.rows import build
        from chipfit.report.trials import tried

        report = build(
            self.graph, self.plan, self.platform, stats=self.stats, timings=self.timings, verification=self.verification
        )

        def edit(more: Mapping[str, Any]) -> tuple[Graph, Plan]:
            other = self.as_calibrated()._edited(self._and(more), None)
            return other.graph, other.plan

        advised = tried(report, self.graph, self.plan, edit)
        found, curve = self._sensitivity, self._pareto
        if found is not None:
            report = replace(report, sensitivity=tuple(found.rows()))
            advised = (*advised, *found.tried)
        return replace(report, tried=advised, pareto=curve.points if curve is not None else ())

    @undisturbed
    def export(
        self,
        path: str | Path,
        *,
        io: str | Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        batch: int | None = None,
        keep_layout: bool | None = None,
        opset: int | None = None,
        **others: Any,
    ) -> Path:
        """Write the file that the chip's runtime loads.

        Args:
            path: its suffix chooses the format: `.onnx`, `.tflite`, `.h` (the latter as an array of C, with the bytes
                that its tensors take), `.json`, or one of your own.
            io: "float" (when omitted), "int8", "uint8", "int16" or "uint16": what goes in and comes out; or two of
                them, for inputs and for outputs.
            labels: names of the classes.
            mean, std: what an app takes from its pixels, and then divides by; a number, or one for each channel.
            batch: size of a fixed batch (`.tflite`, `.h`).
            keep_layout: inputs and outputs lie as in the model (`.tflite`, `.h`).
            opset: of ONNX; the least that holds everything when omitted.
            others: of formats of your own.

        Raises:
            UnknownNameError: no format has this suffix.
            ConfigError: an option that the format has not, or that cannot be.
            UnsupportedError: what the file cannot hold; nothing is written.
            ExportError: a library is missing, or the disk refuses the file.
        """
        from chipfit.export import export

        check_folds(self.training.bn_fold if self.training else 0)
        self.refuse_trained("the file")
        named = {"io": io, "labels": labels, "mean": mean, "std": std}
        named |= {"batch": batch, "keep_layout": keep_layout, "opset": opset}
        return export(self.graph, self.plan, path, self.platform, **named, **others)

    @undisturbed
    def verify(self, data: Any, *, runtime: str | None = None, **options: Any) -> Verification:
        """Run float, simulated, integer and device side by side on `data`; see `chipfit.verify.verify`."""
        from chipfit.verify import verify

        self.refuse_trained("the file that is verified")
        self.verification = verify(
            self.graph, self.plan, self.platform, data, runtime=runtime, model=lambda: self.model, **options
        )
        return self.verification

    def save(self, directory: str | Path) -> Path:
        """Write plan, graph and weights to `directory` (JSON and safetensors); `chipfit.load` brings them back."""
        from chipfit.plan.saved import save

        self.refuse_trained("the saved result")
        return save(directory, self.graph, self.plan, self.platform, self.report.to_dict())


@undisturbed
def quantize(
    model: Any,
    data: Any,
    platform: str | Path | Platform = DEFAULT,
    *,
    rule: Rule = "mse",
    weight_rule: Rule = "mse",
    overrides: Overrides | None = None,
    example: Any = None,
    z_threshold: float | None = None,
    settings: Settings = DEFAULT_SETTINGS,
    limits: Limits | None = None,
    training: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    """Fit a trained PyTorch or Keras 3 model to a chip.

    Args:
        model: in any mode; it is copied, never changed.
        data: calibration batches: an iterable of tensors, tuples, dicts or (input, label) pairs, or a callable
            that returns one. About a hundred samples are enough. Sizes in which batches differ stay open.
        platform: a built-in name ("ort_cpu", "tflite_int8@tag"), a YAML file, or a Platform.
        rule: range rule for activations: a name of `chipfit.ranges`, perhaps with settings ("lp(p=3)"), or a rule.
        weight_rule: range rule for weights. "hmse", of either, reads the data twice (an iterator's are kept).
        overrides: layer (path, glob, operator, layer type or filter) -> "float" or choices, such as {"bits": 4,
            "activation_bits": 16}; `chipfit.decide.overrides.CHOICES` lists them. A later entry wins over an earlier.
        example: one batch of inputs for the capture; the first batch of `data` when omitted. Sizes in which it differs
            from `data` stay open.
        z_threshold: drop activation histogram bins further than this many standard deviations from the mean.
        settings: optional rewrites and corrections. Weights of fewer than 6 bits are rounded in closed form, which
            reads the data twice (an iterator's are kept), unless `Settings(rounding="off")` says otherwise.
        limits: memory or operations that the model may take (`chipfit.Limits(weights="50%")`): of the widths that the
            platform has for weights, those with the least loss are chosen; reads the data twice.
        training: what trains the quantizers of `Result.model`: the name of an algorithm ("lsq"), a mapping ({"weights":
            "dorefa", "activations": "pact"}), or a `chipfit.plan.training.Training`. None: weights train, scales stay.
        seed: of everything random.
        progress: show what is being done: a bar with the time left on a terminal, one line per stage elsewhere.

    Raises:
        CaptureError, DataError, UnsupportedError, UnknownNameError: see `chipfit.errors`.
        ConfigError: an option of the wrong kind.
        NothingQuantizedError: no tensor of this model can be quantized on this platform.
        Interrupted: Ctrl-C in the search of widths or in a correction; its `result` is usable all the same.
    """
    seed = _understood(settings, z_threshold, limits, seed)
    trained_by = Training.of(training)
    if trained_by is not None and trained_by.bn_fold and settings.rounding is None:
        # weights that were rounded do not come apart from batch norms
        settings = Settings(**settings.to_record(), rounding=OFF)
    shown = Progress(progress)
    target, again = load_platform(platform), data
    for r in (rule, weight_rule):
        rule_of(r)  # refuses unknown names before any data are read
    steps.taken(settings, "correct")  # refuses what excludes each other, before any data are read
    others: list[OtherSize] = []  # batches of other sizes than the example's, which stay open then
    while True:
        with shown.stage("capture"):
            args, kwargs, data = first_batch(again, model) if example is None else (*as_call(example, model), again)
            captured = _captured(model, args, kwargs, others)
            doubts = check_input_scale(captured) if example is None else []
            graph, notes = steps.rewrite(captured, target, settings)
        with shown.timed("assign"):
            graph, assignment, decisions = decide(graph, target, overrides, settings)
            _refuse_all_float(assignment, target)
        bits = [s.format.bits for s in assignment.tensors.values() if s.role == "weight"]
        completed = steps.completed(settings, bits, name_of(weight_rule), True)[0]
        tried = steps.tried(completed, graph, assignment)
        if isinstance(again, Iterator):
            declared = statistics.declared(assignment, rule, weight_rule)
            if limits is not None or steps.reads_again(tried) or declared:
                again = data = CachedBatches(data)
        seen = SampleHashes()
        counted = shown.count("calibrate", batches(data, graph, seen.add), length(again))
        needs = steps.needs(graph, statistics.needs(assignment, rule, z_threshold), tried)
        try:
            with closing(counted):
                stats = collect(graph, counted, tensors=needs, seed=seed)
                break
        except OtherSize as e:
            if e.batch is None or isinstance(again, Iterator):
                raise
            others.append(e)
    doubts += check_sample_count(graph, stats, len(seen.digests))
    if (mask := padding_mask(graph)) is not None:
        notes.append(f"calibration leaves out what '{mask}' says is padding")
    rules: dict[str, Any] = {"rule": rule, "weight_rule": weight_rule, "z_threshold": z_threshold}
    asked = {"overrides": to_record(overrides) or None, "steps": settings.to_record() or None}
    named = {"rule": name_of(rule), "weight_rule": name_of(weight_rule), "z_threshold": z_threshold}
    record = provenance_of(graph, target, seen.hash, **asked, seed=seed, **named)
    record["samples"] = sorted(seen.digests)
    with shown.stage("ranges"):
        calibrated = _Adapted(graph, stats, assignment, decisions)
        redecided = partial(decide, platform=target, overrides=overrides)

        def adapted(asked: Settings) -> _Adapted:
            return _adapted(calibrated, asked, batches(again, graph), redecided, rules, seed)

        found = adapted(settings)
        if tried != completed:
            fitted = any(s.name == "rounding" for s in steps.taken(completed, "correct"))
            names = [k for k in tried.to_record() if k not in completed.to_record()]
            found = _preferred(graph, found, adapted(tried), batches(again, graph), names, fitted)
        graph, stats, assignment, decisions = found.graph, found.stats, found.assignment, found.decisions
        results, tensors = found.results, found.tensors
        if results:
            record["results"] = results
        notes += found.notes
    stopped = ""
    if limits is not None:
        with shown.stage("search"):
            start = _plan(Plan(platform=target.name), graph, tensors, assignment)
            by_hand = resolve_overrides(graph, overrides)

            def at(bits: Mapping[str, int]) -> tuple[Graph, Assignment, list[str]]:
                return decide(graph, target, as_overrides(graph, start, bits, overrides), settings, results)

            hoped = ["rounding"] if settings.rounding != OFF else []  # few bits ask for it
            how = _rounding([s.name for s in steps.taken(settings, "correct")] or hoped, rules)
            limited, read = limits.to_record(), batches(again, graph)
            reference = cache(lambda: Reference(graph, first_samples(batches(again, graph))))

            def measured(bits: Mapping[str, int]) -> float:
                other, formats, _ = at(bits)
                return reference().loss(
                    other, _plan(Plan(), other, scales.choose(other, formats, stats, **rules), formats)
                )

            try:
                searched = search_space(
                    graph, target, start, limited, read, stats, lambda bits: at(bits)[1], by_hand, seed, how
                ).choose(limits, None if how.fitted else measured)
            except KeyboardInterrupt:
                stopped = f"{Interrupted.NOTE}: the widths were not searched to the end, and no limit is kept"
                decisions = [*decisions, stopped]
            else:
                graph, assignment, decisions = at(searched.bits)
                tensors = scales.choose(graph, assignment, stats, **rules)
                record |= {"limits": limited, "chosen": searched.bits, "widths": searched.widths}
                decisions = [*decisions, str(searched)]
    once = isinstance(again, Iterator)
    plan = _plan(Plan(platform=target.name, provenance=record), graph, tensors, assignment)
    settings, said = steps.completed(settings, _widths(plan), name_of(weight_rule), not once)
    plan = replace(plan, rewrites=(*doubts, *notes, *decisions, *said, *statistics.notes_of_missing(tensors)))
    for doubt in (n for n in plan.rewrites if progress and n.startswith("warning: ")):
        logging.getLogger("chipfit").warning(doubt)

    kept = None if once else again
    result = Result(graph, plan, target, stats, shown.seconds, _overrides=overrides, _data=kept)
    result = result.trains(trained_by) if trained_by is not None else result
    if stopped:
        raise Interrupted(stopped, result)
    with shown.timed("correct") if steps.taken(settings, "correct") else nullcontext():
        choose: steps.Choose = partial(scales.choose, assignment=assignment, stats=stats, **rules)
        return _corrected(result, settings, batches(again, graph), choose)


@dataclass(frozen=True)
class _Adapted:
    """A network and its formats, as rewrites that follow the statistics have left them."""

    graph: Graph
    stats: dict[str, TensorStats]
    assignment: Assignment
    decisions: list[str]
    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plan(self, weights: bool) -> Plan:
        """Its plan so far, with weights in float or not."""
        plan = _plan(Plan(), self.graph, self.tensors, self.assignment)
        return plan if weights else without_weight_rounding(plan)


def _adapted(
    start: _Adapted,
    settings: Settings,
    data: steps.Batches,
    again: Callable[..., Any],
    rules: Mapping[str, Any],
    seed: int,
) -> _Adapted:
    """What the rewrites of some settings make of a network.

    Args:
        again: decides on formats.
    """
    graph, stats, assignment, decisions = start.graph, start.stats, start.assignment, start.decisions
    notes = list[str]()
    if steps.taken(settings, "adapt"):
        graph, stats, notes = steps.adapt(graph, assignment, stats, settings, data, seed)
        graph, assignment, decisions = again(graph, settings=settings)
    results, why = steps.results(graph, assignment, stats, settings)
    if results:
        other, chosen, said = again(graph, settings=settings, results=results)
        if new := sorted(
            {n for n, s in chosen.tensors.items() if s.role == "activation"} - {*stats, *assignment.tensors}
        ):
            results, why = (
                {},
                [f"kernels hand over codes: else '{new[0]}', which calibration left out, were stored too"],
            )
        else:
            graph, assignment, decisions = other, chosen, said
        notes = notes + why
    named = {k: v for k, v in rules.items() if k != "z_threshold"}
    stats = statistics.with_declared(graph, assignment, stats, data, **named, seed=seed)
    tensors = scales.choose(graph, assignment, stats, **rules)
    return _Adapted(graph, stats, assignment, decisions, tensors, results, notes)


def _preferred(
    graph: Graph, before: _Adapted, after: _Adapted, data: steps.Batches, names: Sequence[str], fitted: bool
) -> _Adapted:
    """The second of two where its rounding loses less of `graph` on held-out images, and a note of that.

    Args:
        names: of the settings that were tried.
        fitted: weights will be rounded otherwise, and are left in float.
    """
    if all(after.graph.weights.get(k) is w for k, w in before.graph.weights.items()):
        return before
    held = split_holdout(list(data))[1]
    fits, said = False, "there are too few images to hold some out"
    if held:
        fits, said = compare_plans(
            graph, held, (before.graph, before.plan(not fitted)), (after.graph, after.plan(not fitted))
        )
        said += ", by rounded activations alone" if fitted else ""
    tried = " and ".join(names)
    if not fits:
        return replace(before, notes=[*before.notes, f"{tried} not taken: {said}"])
    return replace(after, notes=[*after.notes, f"{tried} taken: {said}"])


def _rounding(corrections: Collection[str], rules: Mapping[str, Any]) -> RoundingModel:
    """How tensors are rounded where these corrections are made."""
    named = {k: v for k, v in rules.items() if k != "z_threshold"}
    return RoundingModel(**named, fitted="rounding" in corrections, means=not corrections)


def _understood(settings: Any, z_threshold: Any, limits: Any, seed: Any) -> int:
    """Options that are of the right kind; returns the seed as an integer that JSON knows."""
    positive = z_threshold is None or (is_number(z_threshold) and z_threshold > 0)
    whole = isinstance(seed, Integral) and -(2**63) <= int(seed) < 2**63
    options: tuple[tuple[str, Any, bool, str], ...] = (
        ("settings", settings, isinstance(settings, Settings), "chipfit.Settings(...)"),
        ("z_threshold", z_threshold, positive, "None, or above 0"),
        ("limits", limits, limits is None or isinstance(limits, Limits), "None, or chipfit.Limits(...)"),
        ("seed", seed, whole, "an integer of 64 bits"),
    )
    for name, value, fits, allowed in options:
        if not fits:
            raise ConfigError(f"'{name}' is not understood", got=repr(value)[:120], allowed=allowed)
    return int(seed)


def _captured(model: Any, args: Any, kwargs: Mapping[str, Any], others: Sequence[OtherSize] = ()) -> Graph:
    try:
        graph = capture(model, args, kwargs, [example_of(other.batch, model) for other in others])
        for other in others:
            split_label(other.batch, graph)
        return graph
    except CaptureError as e:
        for other in others:
            hint = f"give batches of one size, padded, cut or resized. {e}"
            raise OtherSize(other.what, got=other.got, allowed=other.allowed, hint=hint) from e
        slip = explain_error(e, model, args, kwargs)
        if slip is e:
            raise
        raise slip from e


def decide(
    graph: Graph,
    platform: Platform,
    overrides: Overrides | None = None,
    settings: Settings = DEFAULT_SETTINGS,
    results: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Graph, Assignment, list[str]]:
    """Fusions and formats: everything that can be said about a model on a platform before seeing data.

    Args:
        results: node name -> "codes", "float" or "whole", of kernels that can do several; see `steps.results`.

    Returns:
        The graph, with a Requantize where dictated scales and ties would clash; every decision; one note per refusal or
        insertion.
    """

    def one_pass(g: Graph) -> tuple[Assignment, list[str]]:
        groups, notes = fuse(g, fusions(platform), lambda n: sets_of(platform.sets, n.op, n.layer_type, n.config))
        assignment = assign(g, platform, fuse_shifts(g, groups), with_results(resolve_overrides(g, overrides), results))
        assignment, more = steps.settle(g, assignment, platform, settings)
        return assignment, notes + more

    graph = without_dynamic(graph)
    assignment, notes = one_pass(graph)
    apart, insertions = requantize(graph, platform, assignment)
    if apart is not graph:
        assignment, notes = one_pass(apart)
    if assignment.dynamic:
        apart = with_dynamic(apart, platform, assignment)
        assignment, notes = one_pass(apart)
    said = unapplied_overrides(apart, assignment, overrides) + unmet_io_formats(apart, platform, assignment)
    return apart, assignment, notes + insertions + said


def _plan(start: Plan, graph: Graph, tensors: dict[str, TensorPlan], assignment: Assignment) -> Plan:
    """`start` with these decisions."""
    return replace(
        start,
        tensors=tensors,
        nodes=dict(assignment.nodes),
        groups=assignment.groups,
        float_edges=assignment.float_edges,
        ties=tie_groups(assignment.constraints),
        **plan_limits(graph, assignment.constraints, tensors),
    )


def _corrected(result: Result, settings: Settings, data: Iterable[Any], choose: steps.Choose) -> Result:
    """The result after the corrections that the settings ask for; it remembers what was before them."""
    taken = [s.name for s in steps.taken(settings, "correct")]
    if not taken:
        return result
    graph, plan, stopped = steps.correct(result.graph, result.plan, result.stats, data, choose, settings)
    plan = replace(plan, provenance={**plan.provenance, "corrected": taken})
    result = replace(result, graph=graph, plan=plan, _uncorrected=(result.graph, result.plan))
    if stopped:
        raise Interrupted(stopped, result)
    return result


def _widths(plan: Plan) -> list[int]:
    """Bits of each weight."""
    return [plan[t.name].grid.bits for t in plan.tensors.values() if t.role == "weight" and t.quantized]


@dataclass(frozen=True, repr=False)
class Lint(SummaryRepr):
    """What a platform would do with a model, before any calibration."""

    graph: Graph
    platform: Platform
    assignment: Assignment
    notes: tuple[str, ...]

    def _summary(self) -> Summary:
        integers = sum(n.exec != "float" for n in self.rows)
        title = f"{integers} of {len(self.rows)} operators run in integers on {self.platform.name}"
        rows = [(n.who, n.op, n.exec, n.why) for n in self.rows]
        return Summary(
            title, {"notes": "; ".join(self.notes)}, ("layer", "operator", "runs", "why float"), rows, "lint.rows"
        )

    @property
    def rows(self) -> list[Any]:
        """One NodePlan per operator, in execution order."""
        return list(self.assignment.nodes.values())


@undisturbed
def lint(
    model: Any, example: Any, platform: str | Path | Platform = DEFAULT, overrides: Overrides | None = None
) -> Lint:
    """Say which operators would run in integers, which fuse, and why the rest stays float; needs no data."""
    target = load_platform(platform)
    args, kwargs = as_call(example, model)
    graph, notes = steps.rewrite(_captured(model, args, kwargs), target, DEFAULT_SETTINGS)
    graph, assignment, fuse_notes = decide(graph, target, overrides)
    return Lint(graph, target, assignment, tuple(notes + fuse_notes))


def load(directory: str | Path) -> Result:
    """Read what `Result.save` wrote; needs neither pickle nor the class of the original model.

    Raises:
        PlanError: a file is missing, truncated, changed since it was saved, or of another schema version.
    """
    from chipfit.plan.saved import load as load_files

    graph, plan, platform, *_ = load_files(directory)
    return Result(graph, plan, platform)


def _refuse_all_float(assignment: Assignment, platform: Platform) -> None:
    if any(s.role != "bias" for s in assignment.tensors.values()):
        return
    reasons: Iterable[str] = dict.fromkeys(f"{n.op} '{n.who}': {n.why}" for n in assignment.nodes.values() if n.why)
    got = "; ".join(list(reasons)[:8]) or "a model without operators"
    hint = (
        f"`chipfit platforms show {platform.name}` lists what it runs; remove overrides that keep every layer in float"
    )
    raise NothingQuantizedError(f"Nothing in this model can be quantized on '{platform.name}'", got=got, hint=hint)
