"""The result of `quantize`: the decisions, and everything that can be made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit import steps
from chipfit.adaptation import decide_again
from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import batches
from chipfit.correction.measured_bias import NAME as MEASURED
from chipfit.decide.assignment import Assignment
from chipfit.decide.legality import check_scales
from chipfit.decide.overrides import Overrides, override_entries, to_record
from chipfit.decide.statistics import RangeRules, notes_of_missing
from chipfit.decision import Decision, plan_of, redecide, scales_of
from chipfit.engine.process import preserve_random_state
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import ExportError, Interrupted, PlanError, UnsupportedError
from chipfit.export.tflite import footprint
from chipfit.files import path_of
from chipfit.frameworks import adapter_of, checksum, choose_backend, lower
from chipfit.graph.ir import Graph
from chipfit.graph.states import state_pairs
from chipfit.plan.record import Plan
from chipfit.plan.training import Training, check_folds, check_trainable
from chipfit.platform.schema import Platform
from chipfit.ranges import name_of
from chipfit.registry import entry
from chipfit.rounding.lost_parts import lost_part_warnings
from chipfit.screen import Summary, SummaryRepr, join_rows
from chipfit.search.limits import OF_FILE, parse_amount
from chipfit.search.losses import RoundingModel
from chipfit.search.pareto import SHARES, Pareto, pareto
from chipfit.search.repairs import biases_move, found_biases
from chipfit.search.sensitivity import Sensitivity, sensitivity
from chipfit.settings import END_TO_END_SAMPLES, Settings
from chipfit.streams import step_by_step, step_of

if TYPE_CHECKING:
    from chipfit.report.report import Report
    from chipfit.report.similarity import Metric, Similarity
    from chipfit.verify import Verification
    from chipfit.verify.npu import NpuReport
    from chipfit.verify.timing import Timing


@dataclass(repr=False)
class Result(SummaryRepr):
    """A quantized network: the plan, and the model, file, report and proof that are made from it.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> result.model(data[0]).shape  # the simulation, which trains like the network itself
        torch.Size([8, 8, 14, 14])
        >>> result.plan.tensors["0.weight"].format
        'w8'
    """

    graph: Graph  #: float network after rewrites and corrections
    plan: Plan
    decision: Decision  #: the decisions behind the plan, before corrections
    timings: dict[str, float] = field(default_factory=dict)  #: stage -> seconds
    verification: Verification | None = None
    training: Training | None = None  #: algorithms that train the quantizers of `model`; None: scales stay fixed
    data: Any = None  #: calibration data, if they can be read again
    uncorrected: Plan | None = None  #: the plan before corrections of weights and biases; None: there were none
    _model: Any = None
    _made: int = 0  #: checksum of the numbers of `model` when it was made
    _sensitivity: Sensitivity | None = None  #: from `sensitivity`, for the report
    _pareto: Pareto | None = None  #: from `pareto`, for the report
    _timing: Timing | None = None  #: from `time`, for the report

    def __post_init__(self) -> None:
        """Check the plan.

        Raises:
            PlanError: its scales break a rule of the platform.
        """
        check_scales(self.plan, self.decision.assignment.constraints)

    @property
    def platform(self) -> Platform:
        """The chip for which the network was quantized."""
        return self.decision.platform

    @property
    def stats(self) -> Mapping[str, TensorStats]:
        """Calibration statistics of each activation; empty for a loaded result."""
        return self.decision.stats

    @property
    @preserve_random_state
    @torch_defaults()
    def model(self) -> Any:
        """The simulation: a trainable `nn.Module` or Keras model with the inputs and outputs of the original."""
        if self._model is None:
            self._model = lower(self.graph, self.plan, self.training)
            self._made = checksum(self._model, self.graph.framework)
        return self._model

    @property
    def device_model(self) -> Any:
        """A model for evaluation that returns what the platform's runtime returns, bit for bit.

        Its `float_operators` are computed in float by the runtime, and may differ there in the last bit. It warns if no
        runtime verifies the platform.

        Raises:
            UnsupportedError: the platform does not describe its arithmetic.
            PlanError: `model` has been trained since it was made.
        """
        check_untrained(self, "the device model")
        from chipfit.simulate.device import device_model

        return device_model(self.graph, self.plan, self.platform)

    @property
    @torch_defaults()
    def report(self) -> Report:
        """Errors, sizes and times of the quantized network, as data; `report.save(path)` writes the HTML page."""
        from chipfit.report.advice import tried
        from chipfit.report.rows import build

        shown, proof = (self.graph, self.plan, self.platform), self.verification
        report = build(*shown, stats=self.stats, timings=self.timings, verification=proof)
        report = replace(report, memory=self._memory())

        def edit(more: Mapping[str, Any]) -> tuple[Graph, Plan]:
            other = self.as_calibrated()._edited(self.decision.with_overrides(more).overrides, None)
            return other.graph, other.plan

        if self._timing is not None:
            report = replace(report, speed=self._timing.to_dict())
        advice = tried(report, self.graph, self.plan, edit)
        if self._sensitivity is not None:
            report = replace(report, sensitivity=tuple(self._sensitivity.rows()))
            advice = (*advice, *self._sensitivity.tried)
        return replace(report, tried=advice, pareto=self._pareto.points if self._pareto is not None else ())

    def _memory(self) -> dict[str, Any] | None:
        """Return the memory that the file takes on the chip, and its limits; None for other kinds of files."""
        record = self.plan.provenance.get("limits") or {}
        limits = {k: parse_amount(v, 0.0, k) for k, v in record.items() if k in OF_FILE}
        if not (limits or any(entry("runtime", name).declares.arena for name in self.platform.runtimes)):
            return None
        with contextlib.suppress(ExportError, UnsupportedError):  # `export` states why
            return {**asdict(footprint(self.graph, self.plan)), "limits": limits}
        return None

    # ------------------------------------------------------------------------------------------------------- training

    def trains(self, training: Any) -> Result:
        """Return the result with a `model` whose quantizers train.

        Args:
            training: see `quantize`.

        Raises:
            UnknownNameError, ConfigError, UnsupportedError: see `quantize`.
            PlanError: `model` has been trained since it was made.
        """
        check_untrained(self, "another training")
        chosen = Training.of(training)
        check_trainable(chosen, self.plan)
        return replace(self, training=chosen, _model=None)

    def as_calibrated(self) -> Result:
        """Return the result as it was after calibration, without the training of `model`."""
        return replace(self, verification=None, _model=None)

    @torch_defaults()
    def trained(self) -> Result:
        """Return a result with the weights and scales of the trained `model`, to be exported, verified or saved.

        Raises:
            PlanError: a trained scale is not positive.
            UnsupportedError: the algorithm trained numbers that the chip cannot store.
        """
        graph, plan = adapter_of(self.graph.framework).read_back(self.model, self.graph, self.plan)
        plan = replace(plan, provenance=_without_merit(plan.provenance))
        others = tuple(name for name in self.corrections if name != MEASURED)  # training has moved the biases on
        decision = replace(self.decision, graph=graph, tensors=plan.tensors, corrected=others)
        decision = replace(decision, calibrated=None, samples=None, measured=None)
        return Result(graph, plan, decision, self.timings)

    @property
    def corrections(self) -> tuple[str, ...]:
        """Names of the corrections that were applied to weights and biases."""
        return tuple(self.plan.provenance.get("corrected", ()))

    # -------------------------------------------------------------------------------------------------- other choices

    @torch_defaults()
    def edit(self, overrides: Overrides) -> Result:
        """Return a result in which some layers stay in float, or have other bits.

        The plan is the one that `quantize` would make with these overrides and with the repairs and range rule of the
        first call. It is made from the statistics of that call, and from the data if these are not enough. For a loaded
        or trained result, or without the data, the graph stays as it is: tensors that keep their format and their ties
        keep their scales, and the scales of the others follow from the ranges in the plan.

        Args:
            overrides: as for `quantize`; they replace earlier ones.

        Raises:
            UnknownNameError, UnsupportedError: see `quantize`.
            PlanError: see `quantize`; or a tensor needs a new calibration, or a correction that needs data; or `model`
                has been trained since it was made.
        """
        return self._edited(overrides, self.data)

    def _edited(self, overrides: Overrides | None, data: Any) -> Result:
        """Decide with other overrides; raise if that needs data and there are none."""
        check_untrained(self, "the edited result")
        before = self.uncorrected or self.plan
        read = batches(data, self.graph) if data is not None else None
        start = self.decision.calibrated
        d = decide_again(start, overrides, read) if start is not None else None
        if d is None:
            d = redecide(replace(self.decision, overrides=overrides, widths=(), calibrated=None), before, read)
            d = replace(d, stats={**self.stats, **{name: s for name, s in d.stats.items() if s.extras}})
            d = replace(d, warnings=(), rewrites=before.rewrites, notes=())
        plan, rule = plan_of(d.checked()), name_of(d.rules.weight_rule)
        settings, notes = steps.resolve_defaults(d.settings, bits_of_weights(plan), rule, data is not None)
        stale = [name for name in d.corrected if name != MEASURED]
        if (data is None and steps.rereads_data(settings)) or stale:
            raise PlanError(
                "Weights were corrected for the rounding of this plan, and correcting them for another plan needs the "
                "calibration data",
                hint="quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`",
            )
        more = [*lost_part_warnings(d.graph, plan, d.assignment, d.stats), *notes_of_missing(d.tensors)]
        if MEASURED in d.corrected:
            more.append("warning: biases keep their correction from before this edit: new ones need the data")
        notes += [note for note in more if note not in plan.rewrites]
        provenance = {**_without_merit(d.provenance), "edited": to_record(replace(d, precise=()).all_overrides)}
        plan = replace(plan, rewrites=(*plan.rewrites, *notes), provenance=provenance)
        edited = Result(d.graph, plan, d, self.timings, data=data)
        edited = edited.trains(self.training) if self.training is not None else edited
        return corrected(edited, settings, () if read is None else read)

    @preserve_random_state
    @torch_defaults()
    def sensitivity(self, data: Any) -> Sensitivity:
        """Return the loss that each tensor causes by itself, as it is stored and at the other bits of the chip.

        It takes one forward and one backward pass over the first 128 samples of `data`, and one trial of each change
        that it advises. `report` shows it from now on.

        Args:
            data: batches as for calibration.

        Raises:
            DataError: see `quantize`.
        """
        d, plan = self.decision, self.uncorrected or self.plan
        rounding = RoundingModel.of(d, self.corrections)
        self._sensitivity = sensitivity(d, plan, batches(data, d.graph), rounding)
        return self._sensitivity

    @preserve_random_state
    @torch_defaults()
    def similarity(self, data: Any, metrics: Mapping[str, Metric] | None = None) -> Similarity:
        """Compare the output of each kernel, and of the model, with the float network's on your own data.

        The metrics are mean squared error, cosine and signal-to-noise ratio [dB]; `plot` draws them, `write` logs them
        to TensorBoard. The inputs of each kernel are the outputs of the quantized kernels before it.

        Args:
            data: batches as for calibration; labels are left out.
            metrics: more metrics by name: functions of a float and a quantized tensor, [N, ...], that return a number.

        Raises:
            ConfigError: a metric is not a function, fails, or returns no number.
            DataError: see `quantize`.
            PlanError: `model` has been trained since it was made.
        """
        from chipfit.report.similarity import METRICS, measure

        check_untrained(self, "the similarity")
        floats = self.decision.graph
        late = bool(self.corrections) and floats is self.graph
        notes = ["the float network has the corrected weights: the saved result has no others"] if late else []
        read = batches(data, self.graph)
        return measure(floats, self.graph, self.plan, read, {**METRICS, **(metrics or {})}, notes)

    @preserve_random_state
    @torch_defaults()
    def pareto(self, data: Any, over: str = "weights", shares: Sequence[float] = SHARES) -> Pareto:
        """Return the best bits under several limits, with the predicted and the measured loss.

        It takes one forward and one backward pass over the first 128 samples of `data`, one integer program for each
        limit, and one forward pass for each choice, with weights rounded to nearest. `report` shows it from now on.

        Args:
            data: batches as for calibration.
            over: the limited quantity, a name of `Limits`.
            shares: limits, relative to the same tensors in 8 bits [%].

        Raises:
            UnknownNameError: there is no such limit.
            PlanError: no choice of bits keeps any of the limits.
            DataError: see `quantize`.
        """
        d, plan = self.decision, self.uncorrected or self.plan
        self._pareto = pareto(d, plan, batches(data, d.graph), over, shares, RoundingModel.of(d, ()))
        return self._pareto

    @torch_defaults()
    def stream(self) -> Result:
        """Return the network that computes one step of a sequence, with its states as inputs and outputs.

        It has the weights and scales of this result, and computes the same integers on the steps of a sequence. A
        network that already has states as inputs is returned unchanged.

        Raises:
            UnsupportedError: a layer runs backwards, has a given initial state, or joins several steps.
            PlanError: a state and its next value differ in scale, or `model` has been trained since it was made.
        """
        check_untrained(self, "the network of one step")
        return self if state_pairs(self.graph) else of_plan(*step_of(self.graph, self.plan), self.platform)

    # ----------------------------------------------------------------------------------------------- files and proof

    @preserve_random_state
    @torch_defaults()
    def export(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        io: str | Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        batch: int | None = None,
        keep_layout: bool | None = None,
        opset: int | None = None,
        stream: bool = False,
        **others: Any,
    ) -> Path:
        """Write the file that the chip's runtime loads; the runtime opens it once if it is installed here.

        Args:
            path: its suffix chooses the format: `.onnx`, `.tflite`, `.h` (a `.tflite` file as a C array, with the size
                of the memory for its tensors), `.json`, or a format of your own.
            format: another format with this suffix: "fake" (the float network with rounded weights, and arithmetic
                that rounds results), "int8" (integers, also for biases that the chip adds in float) or "mctq" (with
                operators of mct_quantizers, for the IMX500's converter).
            io: type of inputs and outputs: "float" (default), "int8", "uint8", "int16" or "uint16"; or a pair, for
                inputs and for outputs.
            labels: names of the classes, for the metadata of the file.
            mean: number that an app subtracts from its pixels, one or one for each channel; also for the metadata.
            std: number by which the app then divides, one or one for each channel.
            batch: size of a fixed batch (`.tflite`, `.h`).
            keep_layout: whether inputs and outputs keep the layout of the model (`.tflite`, `.h`).
            opset: ONNX opset; by default the lowest that has all operators.
            stream: write the network of one step, with states as inputs and outputs; see `stream`.
            others: options of formats of your own.

        Returns:
            The path of the file.

        Raises:
            UnknownNameError: no format has this suffix or name.
            ConfigError: the format has no such option or suffix, or the value of an option is invalid.
            UnsupportedError: the format cannot represent a part of the network; nothing is written.
            ExportError: a library is missing, the file cannot be written, or the runtime refuses it; an older file
                stays as it was.
        """
        from chipfit.export import export
        from chipfit.runtimes import write_opened

        check_folds(self.training.bn_fold if self.training else 0)
        check_untrained(self, "the file")
        named: dict[str, Any] = {"io": io, "labels": labels, "mean": mean, "std": std}
        named |= {"batch": batch, "keep_layout": keep_layout, "opset": opset, "format": format}
        path, shown = path_of(path, ExportError), self.stream() if stream else self

        def write(to: Path) -> Path:
            return export(shown.graph, shown.plan, to, self.platform, **named, **others)

        return write(path) if format is not None else write_opened(write, path, self.platform.runtimes)

    @preserve_random_state
    def verify(
        self,
        data: Any,
        *,
        runtime: str | None = None,
        path: str | Path | None = None,
        batches: int | None = None,
        end_to_end_samples: int | None = END_TO_END_SAMPLES,
    ) -> Verification:
        """Compare every integer of the file on its runtime with the simulation; keep the outcome for `report`.

        Args:
            data: batches as for calibration; (input, label) pairs give accuracies too. For a network of one step,
                sequences [N, T, ...], or the steps of one sequence, get the states that the float network computes.
            runtime: a registered runtime; by default the platform's own, or one that loads `path`.
            path: the deployed file; by default a new export.
            batches: number of batches used; None: all.
            end_to_end_samples: number of unlabelled samples used for the float run and the end-to-end simulation, for
                which operators do not start from the device's integers; None: all.

        Raises:
            RuntimeUnavailable: the runtime is not installed, or cannot run the file.
            DataError: there are no data, or they do not fit the model.
            PlanError: `model` has been trained since it was made.
        """
        from chipfit.verify import verify

        check_untrained(self, "the verified file")
        data = step_by_step(self.graph, data)
        options: dict[str, Any] = {"path": path, "batches": batches, "end_to_end_samples": end_to_end_samples}
        self.verification = verify(
            self.graph, self.plan, self.platform, data, runtime=runtime, model=lambda: self.model, **options
        )
        return self.verification

    @preserve_random_state
    def time(self, data: Any = None, *, runtime: str | None = None, seconds: float = 2.0) -> Timing:
        """Measure the float and the quantized file in turns on a runtime of this machine.

        Args:
            data: batches as for calibration; the first one is run. By default the calibration data, if they can be read
                again.
            runtime: a registered runtime; by default the platform's own.
            seconds: time to measure for [s].

        Raises:
            DataError: there are no data.
            RuntimeUnavailable: the runtime is not installed, or cannot run a file.
            PlanError: `model` has been trained since it was made.
        """
        from chipfit.verify.timing import measure

        check_untrained(self, "the measured file")
        data = self.data if data is None else data
        self._timing = measure(self.graph, self.plan, self.platform, data, runtime=runtime, seconds=seconds)
        return self._timing

    @torch_defaults()
    def npu(self, accelerator: str = "ethos-u55-256") -> NpuReport:
        """Compile the `.tflite` file for an Ethos-U NPU with Vela; return its operators, memory and estimated time.

        Args:
            accelerator: "ethos-u55-32" to "ethos-u85-2048".

        Raises:
            UnknownNameError: Vela has no such accelerator.
            RuntimeUnavailable: Vela is not installed, or refuses the file.
            PlanError: `model` has been trained since it was made.
        """
        from chipfit.verify.npu import compile_result

        check_untrained(self, "the compiled file")
        return compile_result(self.graph, self.plan, self.platform, accelerator)

    @torch_defaults()
    def save(self, directory: str | Path) -> Path:
        """Write plan, graph, weights and choice of training to the folder `directory`; `chipfit.load` reads them.

        Raises:
            PlanError: `model` has been trained since it was made.
            ConfigError: a training algorithm is not registered.
            ExportError: the folder cannot be written.
        """
        from chipfit.plan.saved import save

        check_untrained(self, "the saved result")
        chosen = {} if self.training is None else {"training": self.training.to_record()}
        plan = replace(self.plan, provenance={**self.plan.provenance, **chosen})
        return save(directory, self.graph, plan, self.platform, self.report.to_dict())

    def _summary(self) -> Summary:
        plan, v = self.plan, self.verification
        nodes = sorted(plan.nodes.values(), key=lambda n: n.exec != "float")  # float first: it is what people look for
        formats = {o: t.format for n in self.graph.nodes for o in n.outputs[:1] if (t := plan.tensors.get(o))}
        stored = {n.name: formats.get(n.outputs[0], "") for n in self.graph.nodes if n.outputs}
        rows = join_rows([(n.display_name, n.op, n.exec, stored.get(n.name, ""), n.why) for n in nodes])
        integers = sum(n.exec != "float" for n in nodes)
        return Summary(
            f"Result for {self.platform.name}: {integers} of {len(nodes)} operators in integers",
            {
                "tensors": f"{sum(t.quantized for t in plan.tensors.values())} of {len(plan.tensors)} quantized",
                "time": ", ".join(f"{k} {s:.2f} s" for k, s in self.timings.items()),
                "verified": v.summary().splitlines()[0] if v else "not yet: result.verify(data)",
                "next": "result.report.show(), .model, .export(path), .save(folder)",
            },
            ("layer", "operator", "runs", "result", "why float"),
            rows,
            "result.plan, result.report",
        )


def check_untrained(result: Result, what: str) -> None:
    """Check that `result.model` has the numbers of the plan, so that no training is left out silently.

    Raises:
        PlanError: `model` has been trained since it was made.
    """
    if result._model is not None and checksum(result._model, result.graph.framework) != result._made:
        hint = "`result.trained()` has the trained weights and scales; `result.as_calibrated()` leaves them out"
        raise PlanError(f"`model` has changed since it was made, and {what} would not have the changes", hint=hint)


def _without_merit(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return a provenance without the loss that was measured before a change."""
    return {k: v for k, v in provenance.items() if k != "merit"}


def corrected(result: Result, settings: Settings, read: steps.Batches) -> Result:
    """Return the result after the corrections that the settings ask for; it remembers the plan before them.

    Raises:
        Interrupted: Ctrl-C ended a correction; its `result` has the corrections before it.
    """
    names = [s.name for s in steps.enabled(settings, "correct")]
    if not names:
        return _with_measured_biases(result) if biases_move(settings) else result
    choose = partial(scales_of, result.decision)
    graph, plan, stopped = steps.correct(result.graph, result.plan, result.stats, read, choose, settings)
    plan = replace(plan, provenance={**plan.provenance, "corrected": names})
    result = replace(result, graph=graph, plan=plan, uncorrected=result.plan)
    if stopped:
        raise Interrupted(stopped, result)
    return result


def _with_measured_biases(result: Result) -> Result:
    """Return the result with the biases that samples suggest, where held-out samples gain; its plan has a note."""
    found = found_biases(result.decision, result.plan)
    if found is None or not found.improves:
        return result
    plan = replace(result.plan, rewrites=(*result.plan.rewrites, found.note))
    plan = replace(plan, provenance={**plan.provenance, "corrected": [MEASURED]})
    return replace(result, graph=found.applied(result.graph), plan=plan, uncorrected=result.plan)


@torch_defaults()
def load(directory: str | Path) -> Result:
    """Read what `Result.save` wrote; needs neither pickle nor the class of the original model.

    The decision that the saved plan followed is known as far as its provenance tells.

    Raises:
        PlanError: a file is missing, truncated, changed since it was saved, or of another schema version.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/fitted"
        >>> _ = result.save(folder)
        >>> again = chipfit.load(folder)
        >>> bool((again.model(data[0]) == result.model(data[0])).all())
        True
    """
    from chipfit.plan.saved import load as load_files

    graph, plan, platform, *_ = load_files(directory)
    choose_backend(graph.framework)
    known = {**plan.provenance}
    training = known.pop("training", None)
    result = of_plan(graph, replace(plan, provenance=known), platform)
    return result if training is None else result.trains(training)


def of_plan(graph: Graph, plan: Plan, platform: Platform) -> Result:
    """Return the result of a plan; the decision that it followed is known as far as its provenance tells."""
    known = plan.provenance
    chosen = known.get("settings", {})
    rules = {k: chosen[k] for k in ("rule", "weight_rule", "z_threshold") if k in chosen}
    d = Decision(
        graph=graph,
        platform=platform,
        overrides=known.get("edited", chosen.get("overrides")),
        apart=tuple(known.get("apart", ())),
        precise=tuple(override_entries(known.get("precise"))),
        settings=Settings.from_record(chosen.get("steps", {})),
        rules=RangeRules(**rules),
        seed=chosen.get("seed", 0),
        execution=known.get("results", {}),
        assignment=Assignment(nodes=plan.nodes, groups=plan.groups, float_edges=plan.float_edges),
        tensors=plan.tensors,
        provenance=known,
        corrected=tuple(known.get("corrected", ())),
    )
    return Result(graph, plan, d if "edited" in known else d.with_bits(known.get("chosen", {})))


def bits_of_weights(plan: Plan) -> list[int]:
    """Return the bits of each quantized weight."""
    return [plan[t.name].grid.bits for t in plan.tensors.values() if t.role == "weight" and t.quantized]
