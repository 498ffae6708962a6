"""The whole story on one page: from a trained model to a quantized one.

`quantize` runs the stages below in their order. Each takes the decision so far, one frozen record, and returns it with
its own part filled in; `Result` then makes the model, the file, the report and the proof of it.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from chipfit import adaptation, steps
from chipfit.adaptation import statistics_needed, with_statistics
from chipfit.calibration.data import SizeMismatch, add_states
from chipfit.calibration.data_checks import check_input_scale, check_sample_count
from chipfit.calibration.progress import Progress
from chipfit.calibration.sample_fingerprints import SampleHashes
from chipfit.calibration.source import CalibrationData
from chipfit.decide import statistics
from chipfit.decide.overrides import Overrides
from chipfit.decision import Decision, decide, plan_of, provenance_of
from chipfit.engine.process import preserve_random_state
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.engine.trees import with_states
from chipfit.errors import Interrupted, interruption_note
from chipfit.export.tflite import footprint
from chipfit.frameworks import adapter_of, check, framework_of, load_model
from chipfit.plan.training import Training
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.load import load_platform
from chipfit.platform.schema import Platform
from chipfit.ranges import Rule, name_of
from chipfit.reading import read_model
from chipfit.registry import OFF
from chipfit.request import Request, check_limits, check_options, settings_for
from chipfit.result import Result, bits_of_weights, corrected
from chipfit.rounding.lost_parts import lost_part_warnings
from chipfit.search import repairs
from chipfit.search.chip_memory import check_memory, fit_widths
from chipfit.search.choose import search_widths
from chipfit.search.limits import Limits
from chipfit.search.losses import RoundingModel
from chipfit.settings import DEFAULT_SETTINGS, Settings


@preserve_random_state
@torch_defaults()
def quantize(
    model: Any,
    data: Any,
    platform: str | Path | Platform = DEFAULT,
    *,
    rule: Rule | None = None,
    weight_rule: Rule = "mse",
    overrides: Overrides | None = None,
    example: Any = None,
    z_threshold: float | None = None,
    settings: Settings = DEFAULT_SETTINGS,
    limits: Limits | None = None,
    training: Any = None,
    states: Sequence[str] = (),
    seed: int = 0,
    progress: bool = True,
) -> Result:
    """Fit a trained PyTorch, Keras 3 or ONNX model, or the network of a file, to a chip.

    Args:
        model: in any mode; it is copied, never changed. Or a file: `.onnx`, `.tflite`, `.pt2`, `.keras`, `.h5`.
        data: calibration batches: an iterable of tensors, tuples, dicts or (input, label) pairs, or a callable
            that returns one. About a hundred samples are enough. Sizes in which batches differ stay dynamic.
        platform: a built-in name ("ort_cpu", "tflite_int8@tag"), a YAML file, or a Platform.
        rule: range rule for activations: a name of `chipfit.ranges`, perhaps with settings ("lp(p=3)"), or a function.
            None: "mse", or "no_clipping" if the outputs lose less with it on a few samples of the data.
        weight_rule: range rule for weights. The rule "hmse" reads the data twice (batches of an iterator are kept).
        overrides: layer (path, glob, operator, layer type or filter) -> "float" or choices, such as {"bits": 4,
            "activation_bits": 16}; `chipfit.decide.overrides.CHOICES` lists them. A later entry wins over an earlier.
        example: one batch of inputs for the capture; by default the first batch of `data`. Sizes in which it differs
            from `data` stay dynamic.
        z_threshold: drop activation histogram bins further than this many standard deviations from the mean.
        settings: optional rewrites and corrections. By default, weights with fewer than 6 bits are rounded to minimise
            the error of each layer's output, which reads the data twice; `Settings(rounding="off")` rounds to nearest.
        limits: limits on memory or operations (`chipfit.Limits(weights="50%")`), under which the bits of weights with
            the least loss are chosen, which reads the data twice; or on the memories of a chip, `ram` and `flash`.
        training: algorithm that trains the quantizers of `Result.model`: its name ("lsq"), a mapping ({"weights":
            "dorefa", "activations": "pact"}), or a `chipfit.plan.training.Training`. None: scales stay fixed.
        states: names of inputs that hold the states of a network of one step. Its last outputs are their next values,
            in the same order and with the same scales; see `chipfit.streaming`.
        seed: seed of all random numbers.
        progress: show progress: a bar with the time left on a terminal, one line per stage elsewhere.

    Raises:
        CaptureError, DataError, UnsupportedError, UnknownNameError: see `chipfit.errors`.
        ConfigError: an option has the wrong type or an invalid value.
        MemoryExceeded: the device of the model ran out of memory.
        PlanError: no choice of bits keeps the limits; the message names what needs most.
        NothingQuantizedError: no tensor of this model can be quantized on this platform.
        Interrupted: Ctrl-C during the search of bits or a correction; its `result` is usable.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> result.verify(data).exact  # result.export("net.tflite") writes the file
        True
    """
    by = "mse" if rule is None else rule
    rules = statistics.RangeRules(rule=by, weight_rule=weight_rule, z_threshold=z_threshold)
    check_options(settings, rules, limits, seed)
    trained_by, network = Training.of(training), load_model(model)
    steps_of = adapter_of(framework_of(network)).steps(network)
    request = Request(
        model=network,
        data=CalibrationData(add_states(data, steps_of), example),
        limits=limits,
        training=trained_by,
        states=tuple(states),
        progress=Progress(progress),
        open_rule=rule is None,
    )
    chip = load_platform(platform)
    check_limits(limits, chip)
    chosen = settings_for(settings, trained_by, chip)
    decision = Decision(platform=chip, overrides=overrides, settings=chosen, rules=rules, seed=int(seed))
    for stage in (capture_model, assign_formats, collect_statistics, choose_ranges, repair, search_bits):
        decision = stage(request, decision)
    result = correct(request, *make_plan(request, decision))
    check_memory(limits, result.graph, result.plan, footprint)
    return result


def capture_model(request: Request, d: Decision) -> Decision:
    """Read the model into a graph and apply the rewrites that need no data."""
    with request.progress.stage("capture"):
        check(request.model)
        call, of_data = request.data.example_call(request.model), request.data.example is None
        captured = with_states(read_model(request.model, *call, request.other_sizes, of_data=of_data), request.states)
        warnings = check_input_scale(captured) if of_data else []
        graph, rewrites = steps.rewrite(captured, d.platform, d.settings)
    d = replace(d, warnings=(*request.data.notes, *warnings), rewrites=tuple(rewrites))
    return replace(d, captured=captured, graph=graph, composites={})


def assign_formats(request: Request, d: Decision) -> Decision:
    """Choose a format for every tensor: all that can be decided without data."""
    with request.progress.timed("assign"):
        return decide(d).checked()


def collect_statistics(request: Request, d: Decision) -> Decision:
    """Run the float network over the data; where batches differ in size, start again with these sizes open."""
    data = request.data
    needed, on_trial = statistics_needed(d)
    if request.limits is not None or statistics.declared(d.assignment, d.rules) or steps.rereads_data(on_trial):
        data.keep_batches()
    samples = SampleHashes()
    try:
        with closing(request.progress.count("calibrate", data.first_pass(d.graph, samples.add), data.count)) as batches:
            d = with_statistics(d, batches, needed)
    except SizeMismatch as e:
        if e.batch is None or data.read_once:
            raise
        request = replace(request, other_sizes=(*request.other_sizes, e))
    else:
        warnings = (*d.warnings, *check_sample_count(d.graph, d.stats, len(samples.digests)))
        return replace(d, warnings=warnings, provenance=provenance_of(d, samples))
    return collect_statistics(request, assign_formats(request, capture_model(request, d)))


def choose_ranges(request: Request, d: Decision) -> Decision:
    """Apply the rewrites that follow the statistics, and choose every scale and zero point."""
    with request.progress.stage("ranges"):
        return adaptation.choose_ranges(d, request.data.batches(d.graph))


def repair(request: Request, d: Decision) -> Decision:
    """Measure the loss at the outputs; try repairs where the bits do not explain it, and ranges without clipping."""
    with request.progress.timed("repairs"):
        return repairs.improved(d, request.data, tries=d.settings.repairs != OFF, open_rule=request.open_rule)


def search_bits(request: Request, d: Decision) -> Decision:
    """Choose the bits that lose least inside the limits, where there are any."""
    if request.limits is None:
        return d
    corrections = [s.name for s in steps.enabled(d.settings, "correct")]
    expected = ["rounding"] if d.settings.rounding != OFF else []  # few bits will ask for it
    rounding = RoundingModel.of(d, corrections or expected)
    try:
        with request.progress.stage("search"):
            limits, read = request.limits, lambda: request.data.batches(d.graph)
            if limits.of_file():
                return fit_widths(d, limits, read, rounding, footprint)
            return search_widths(d, limits, read, rounding)
    except KeyboardInterrupt:
        stopped = f"{Interrupted.NOTE}: the widths were not searched to the end, and no limit is kept"
        return replace(d, notes=(*d.notes, stopped))


def make_plan(request: Request, d: Decision) -> tuple[Result, Settings]:
    """Return the decision as a plan, and the settings with the corrections that its bits ask for.

    Raises:
        Interrupted: Ctrl-C ended the search of bits.
        UnsupportedError: an operator computes in floats where only integers are allowed.
    """
    data, plan = request.data, plan_of(d.checked())
    bits, rule = bits_of_weights(plan), name_of(d.rules.weight_rule)
    settings, notes = steps.resolve_defaults(d.settings, bits, rule, not data.read_once)
    notes += lost_part_warnings(d.graph, plan, d.assignment, d.stats)
    plan = replace(plan, rewrites=(*plan.rewrites, *notes, *statistics.notes_of_missing(d.tensors)))
    request.progress.warn(plan.rewrites)
    result = Result(d.graph, plan, d, request.progress.seconds, data=None if data.read_once else data.data)
    result = result.trains(request.training) if request.training is not None else result
    if stopped := interruption_note(d.notes):
        raise Interrupted(stopped, result)
    return result, settings


def correct(request: Request, result: Result, settings: Settings) -> Result:
    """Correct weights and biases for what rounding changes, as the settings ask for it, and state the merit again."""
    if not steps.enabled(settings, "correct") and not repairs.biases_move(settings):
        return result
    with request.progress.timed("correct"):
        result = corrected(result, settings, request.data.batches(result.graph))
        if not steps.enabled(settings, "correct"):
            return result
        merit = repairs.merit_of(result.decision, result.graph, result.plan)
    return replace(result, plan=replace(result.plan, provenance={**result.plan.provenance, **merit}))
