"""Post-training quantization under the names of MCT: a model, a function that yields data, configurations."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from chipfit import pipeline
from chipfit.calibration.data import call_without_label, empty_data_error, iterate
from chipfit.calibration.progress import Progress
from chipfit.calibration.signature import expected_inputs
from chipfit.calibration.source import CalibrationData
from chipfit.decide.statistics import RangeRules
from chipfit.decision import Decision, choose_scales, decide, plan_of
from chipfit.engine.process import preserve_random_state
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import ConfigError, DataError, NothingQuantizedError, UnsupportedError
from chipfit.frameworks import facts_of, framework_of, load_model
from chipfit.graph.edit import with_weights_of
from chipfit.graph.linear import is_linear, multiplications
from chipfit.mct.core.config import CoreConfig, ResourceUtilization
from chipfit.mct.core.layer_biases import with_one_bias_a_layer, with_own_biases
from chipfit.mct.core.network_editor import EditRule, replace_layers, to_overrides
from chipfit.mct.framework_info import FrameworkInfo, known_ranges
from chipfit.mct.input_scaling import ScaledInput
from chipfit.mct.layer_names import give_layer_names
from chipfit.mct.log import log_result
from chipfit.mct.model_metadata import model_metadata
from chipfit.mct.result_link import ResultLink
from chipfit.mct.target_platform import capabilities
from chipfit.mct.target_platform.model import TargetPlatformModel
from chipfit.mct.target_platform.targets import get_target_platform_capabilities
from chipfit.mct.whole_layers import whole_layers
from chipfit.platform.load import load_platform
from chipfit.platform.schema import WIDEST, Platform
from chipfit.reading import read_model
from chipfit.request import Request, settings_for
from chipfit.result import Result
from chipfit.screen import Summary, SummaryRepr
from chipfit.search.resources import peak_bytes, resources
from chipfit.settings import DEFAULT_SETTINGS, Settings
from chipfit.validation import check_value, without_effect

__all__ = ["DataGenerator", "UserInformation", "keras_post_training_quantization"]
__all__ += ["pytorch_post_training_quantization"]
__all__ += ["keras_resource_utilization_data", "pytorch_resource_utilization_data"]

#: called without arguments, returns an iterator over batches; a batch is the list of the model's inputs
DataGenerator = Callable[[], Iterable[Any]]


@dataclass(frozen=True, repr=False)
class UserInformation(SummaryRepr):
    """Information about a quantized model."""

    #: plan, report, `export`, `verify`, `save`; None if quantization was bypassed
    result: Result | None = None
    #: factor for the inputs of the quantized model, also in `result.verify`; other than 1 by `input_scaling` alone
    input_scale: float = 1.0
    #: settings of learned rounding; empty without it
    gptq_info_dict: Mapping[str, Any] = field(default_factory=dict)

    def _summary(self) -> Summary:
        used = self.final_resource_utilization
        if self.result is None or used is None:
            return Summary("Information about a model that was not quantized")
        known = {"memory": f"weights {used.weights_memory:,.0f} bytes, activations {used.activation_memory:,.0f} bytes"}
        known["choice"] = "" if self.mixed_precision_cfg is None else str(self.mixed_precision_cfg.tolist())
        known["input scale"] = "" if self.input_scale == 1 else f"{self.input_scale:g}"
        rows = [(n.display_name, n.op, n.exec, n.why) for n in self.result.plan.nodes.values()]
        header = ("layer", "operator", "runs", "why float")
        return Summary("Information about a quantized model", known, header, rows, "information.result")

    @property
    def quantizes(self) -> bool:
        """Return whether any tensor is quantized."""
        return self.result is not None and any(t.quantized for t in self.result.plan.tensors.values())

    @property
    def final_resource_utilization(self) -> ResourceUtilization | None:
        """Memory and bit operations of the model on the chip for one sample; biases do not count, as under limits."""
        if self.result is None:
            return None
        found = resources(self.result.graph, self.result.plan)
        memory = found.weights, found.largest, found.weights + found.largest
        return ResourceUtilization(*memory, found.bops_of_sole_readers)

    @property
    def mixed_precision_cfg(self) -> np.ndarray | None:
        """The index of the chosen candidate, for each input and layer with several, in the order of the network.

        Candidates are pairs of widths of a layer's weight and result, widest first. None without a search.
        """
        known = self.result.plan.provenance if self.result is not None else {}
        if self.result is None or "widths" not in known:
            return None
        found = candidates_of(self.result)
        return np.array([pairs.index(tuple(known["chosen"][t] for t in tensors)) for tensors, pairs in found])

    @property
    def fusions(self) -> list[list[str]]:
        """The names of layers that run as one kernel."""
        if self.result is None:
            return []
        layers = {n.name: n.display_name for n in self.result.graph.nodes}
        return [[layers[n] for n in group] for group in self.result.plan.groups]


def form_for_keras(function: Callable[..., Any], about: str, first: str = "in_model") -> Callable[..., Any]:
    """Return a facade for Keras 3 models.

    Args:
        about: first sentence of its docstring.
        first: name of its first argument.
    """
    own = inspect.signature(function)
    model, *rest = own.parameters.values()
    signature = own.replace(parameters=[model.replace(name=first), *rest])

    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        return function(*given.args, **given.kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = function.__name__.replace("pytorch", "keras")
    call.__doc__ = f"{about}; otherwise like `{function.__name__}`."
    return call


def pytorch_post_training_quantization(
    in_module: Any,
    representative_data_gen: DataGenerator,
    target_resource_utilization: ResourceUtilization | None = None,
    core_config: CoreConfig | None = None,
    target_platform_capabilities: Any = None,
    fw_info: FrameworkInfo | None = None,
) -> tuple[Any, UserInformation]:
    """Quantize a trained PyTorch module after training.

    Args:
        in_module: a module in any mode; it is copied, never changed.
        representative_data_gen: function without arguments that yields lists of arrays or tensors, one for each input.
        target_resource_utilization: limits; a finite one starts a search of bit widths.
        core_config: range rules, rewrites, corrections, network editor, bit widths; `CoreConfig()` when omitted.
        target_platform_capabilities: TargetPlatformCapabilities, TargetPlatformModel, Platform, name, or path of a YAML
            or JSON file; MCT's default chip (imx500) when omitted.
        fw_info: selects the layers to quantize.

    Returns:
        The quantized module, which can be trained further, and information about it; its `result` exports and verifies.
        The module in float, with folded batch norms and a warning, if the chip quantizes nothing of it.

    Raises:
        ConfigError, UnknownNameError: an option is invalid, or a filter matches no layer.
        UnsupportedError: an option is not supported, by chipfit or by the platform.
        DataError: the generator yields nothing, or batches that do not fit the model.
    """
    options = target_resource_utilization, core_config, target_platform_capabilities, fw_info
    return quantize_model("post_training_quantization", in_module, representative_data_gen, *options)


def pytorch_resource_utilization_data(
    in_model: Any,
    representative_data_gen: DataGenerator,
    core_config: CoreConfig | None = None,
    target_platform_capabilities: Any = None,
    fw_info: FrameworkInfo | None = None,
) -> ResourceUtilization:
    """Return the resources of a model before a choice of bits, as a base for limits; counted as MCT 2.2 does.

    Memory is that of 8 bits for each number of quantized weights, and of the largest quantized value; each
    multiplication with a quantized weight counts as 32 x 32 bit operations.

    Arguments and errors are those of `pytorch_post_training_quantization`.
    """
    options = None, core_config, target_platform_capabilities, fw_info
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below
        found = quantize_model("resource_utilization_data", in_model, representative_data_gen, *options)[1]
    if found.result is None or not found.quantizes:
        raise NothingQuantizedError("Resources of a model that is not quantized are not known")
    graph, plan = found.result.graph, found.result.plan
    linear = [n for n in graph.nodes if is_linear(graph, n) and plan.quantized(n.weight)]
    weights = float(sum(graph.weights[name].numel() for name in {n.weight for n in linear}))
    largest = peak_bytes(graph, plan, bits=8, largest=True)
    bops = sum(32 * 32 * multiplications(graph, n) for n in linear)
    return ResourceUtilization(weights, largest, weights + largest, bops)


keras_post_training_quantization = form_for_keras(
    pytorch_post_training_quantization, "Quantize a trained Keras 3 model after training"
)
keras_resource_utilization_data = pytorch_resource_utilization_data  # a model of either framework


def quantize_model(
    what: str,
    model: Any,
    generator: Any,
    limits: Any,
    config: Any,
    platform: Any,
    fw_info: FrameworkInfo | None = None,
    steps: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, UserInformation]:
    """Quantize a model with the arguments of a facade.

    Args:
        what: name of the facade without its framework.
        steps: additional settings.
    """
    config = _checked_config(config, limits, what, model)
    if config.debug_config.bypass:
        return model, UserInformation()
    options, overwrite = _options(config, limits, fw_info, steps), config.mixed_precision_config.configuration_overwrite
    model = replace_layers(model, config.debug_config.network_editor)
    first = first_batch_of(generator)  # a list of inputs without a label
    generator, example = _without_more_items(generator, first, expected_inputs(model))
    platform = get_target_platform_capabilities(_framework(model)) if platform is None else platform
    if config.quantization_config.custom_tpc_opset_to_layer:
        platform = _with_layers(platform, config.quantization_config.custom_tpc_opset_to_layer)
    options["example"] = example
    rules, scale = config.debug_config.network_editor, 1.0
    if config.quantization_config.input_scaling:
        model, generator, options, scale = _with_scaled_inputs(model, generator, platform, config, options)
    with whole_layers(model, rules, platform):
        try:
            result = _quantized(model, generator, platform, rules, options)
        except NothingQuantizedError as e:
            warnings.warn(f"The model stays in float: {e}", stacklevel=4)
            result = in_float(model, generator, platform, options["settings"], example)
            return attach_result(result, model), UserInformation(result)
    if overwrite is not None:
        result = chosen_by_index(result, overwrite, generator, example)
    result = result if fw_info is None else fw_info.apply(result)
    result = with_one_bias_a_layer(with_own_biases(result, rules))
    log_result(what, result)
    model = attach_result(result, model, config.debug_config.simulate_scheduler)
    return model, UserInformation(result, scale, gptq_info_dict=dict(steps))


def _checked_config(config: Any, limits: Any, what: str, model: Any) -> CoreConfig:
    """Return the configuration of a call, by default without a change; warn of its options that have no effect.

    Raises:
        ConfigError: the configuration or the limits are of another type, or options contradict each other.
    """
    config = checked(CoreConfig, config, "core_config", what, model) or CoreConfig()
    checked(ResourceUtilization, limits, "target_resource_utilization", what, model)
    config.debug_config.check()
    parts = config.quantization_config, config.mixed_precision_config, config.debug_config
    say_without_effect([option for part in parts for option in without_effect(part)], stacklevel=5)
    return config


def _options(
    config: CoreConfig, limits: Any, fw_info: FrameworkInfo | None, steps: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of `chipfit.quantize` that stand for a configuration."""
    searched, quantization = limits.to_limits() if limits is not None else None, config.quantization_config
    if config.mixed_precision_config.configuration_overwrite is not None and searched is None:
        hint = "pass target_resource_utilization, which starts a search of widths"
        raise ConfigError("'configuration_overwrite' requires a search", hint=hint)
    of_layers = known_ranges() if fw_info is None else fw_info.overrides()
    overrides = [*of_layers, *config.bit_width_config.choices, *to_overrides(config.debug_config.network_editor)]
    settings = quantization.to_settings(**steps)
    return {**quantization.to_rules(), "settings": settings, "overrides": overrides, "limits": searched}


def attach_result(result: Result, float_model: Any = None, schedule: bool = False) -> Any:
    """Return the model of a result, with a link to the result, MCT's names of its parts, and its metadata.

    Args:
        float_model: the float model, or an earlier quantized one, whose layers without weights get names, too, and
            whose metadata are kept.
        schedule: see `model_metadata`.
    """
    if result.platform.metadata:
        earlier = getattr(float_model, "metadata", None) if hasattr(float_model, "_chipfit") else None
        result.model.metadata = earlier or model_metadata(result, schedule)
    result.model._chipfit = link = ResultLink(result)
    if hasattr(result.model, "origin"):
        result.model.origin = link.packed
    give_layer_names(result, float_model)
    return result.model


def say_without_effect(options: Sequence[str], stacklevel: int = 3) -> None:
    """Warn of options without effect, if there are any."""
    if options:
        warnings.warn(f"Options without effect: {'; '.join(options)}", stacklevel=stacklevel)


def checked(kind: type, value: Any, name: str, what: str, model: Any) -> Any:
    """Return an argument of the facade `what` for a model: a value of a class, or None.

    Raises:
        ConfigError: it is something else.
    """
    return check_value(kind | None, value, ConfigError, f"{_framework(model)}_{what}", name)


def _framework(model: Any) -> str:
    """Return "keras" or "pytorch", the prefix of the facades for a model."""
    return facts_of(framework_of(model)).title.lower()


def _with_layers(platform: Any, custom: Mapping[str, Any]) -> capabilities.TargetPlatformCapabilities:
    """Return a platform described in Python with layers attached to some of its operator sets.

    Raises:
        ConfigError: the platform has no operator sets to attach layers to.
        ModelingError: the platform has no such set, or a layer is not a known operator.
    """
    tpc = capabilities.TargetPlatformCapabilities(platform) if isinstance(platform, TargetPlatformModel) else platform
    if not isinstance(tpc, capabilities.TargetPlatformCapabilities):
        got = type(platform).__name__
        allowed = "TargetPlatformCapabilities or TargetPlatformModel"
        what = "custom_tpc_opset_to_layer requires a platform described in Python"
        raise ConfigError(what, got=got, allowed=allowed, hint="name the layers in `sets` of the platform file")
    own = [o for o in tpc.op_sets_to_layers.op_sets_to_layers if o.name not in custom]
    added = [capabilities.OperationsSetToLayers(name, list(layers)) for name, layers in custom.items()]
    layers = capabilities.OperationsToLayers([*own, *added])
    return capabilities.TargetPlatformCapabilities(tpc.tp_model, tpc.name, tpc.version, op_sets_to_layers=layers)


def _with_scaled_inputs(
    model: Any, generator: Any, platform: Any, config: CoreConfig, options: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any], float]:
    """Return a model for inputs that fill their range, its data and options, and the factor of its inputs.

    They are those given, with a warning, where inputs cannot be scaled.
    """
    unchanged = model, generator, options, 1.0
    plain = {**options, "limits": None, "settings": config.quantization_config.to_settings()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # repeated by what follows
            result = _quantized(model, generator, platform, config.debug_config.network_editor, plain)
    except NothingQuantizedError:
        return unchanged
    found = ScaledInput.of(read_model(model, *call_without_label(options["example"], model), of_data=True), result)
    scaled = found.model(model) if found.layers else None
    refusal = found.refusal or ("a weight behind it is not that of one layer" if found.layers else "")
    if scaled is None:
        if refusal:
            warnings.warn(f"Inputs are not scaled: {refusal}", stacklevel=5)
        return unchanged
    example = found.batch(options["example"])
    return scaled, found.data(generator), {**options, "example": example}, found.factor


@preserve_random_state
@torch_defaults()
def in_float(
    model: Any, data: Any, platform: str | Path | Platform, settings: Settings = DEFAULT_SETTINGS, example: Any = None
) -> Result:
    """Return a network after the rewrites that need no data, such as folded batch norms, with every tensor in float.

    Weights that no rewrite changed have the memory format of the model's own, with which an operator computes the same
    bits; those that nothing reads any more are left out. Arguments and errors are those of `quantize`.
    """
    source, chip = CalibrationData(data, example), load_platform(platform)
    request = Request(model=load_model(model), data=source, limits=None, training=None, progress=Progress(False))
    rules = RangeRules(rule="mse", weight_rule="mse")
    d = Decision(platform=chip, overrides=None, settings=settings_for(settings, None, chip), rules=rules)
    d = pipeline.capture_model(request, d)
    d = replace(d, graph=with_weights_of(d.graph, d.captured or d.graph))
    d = choose_scales(decide(replace(d, overrides={n.name: "float" for n in d.graph.nodes})))
    return Result(d.graph, plan_of(d), d, request.progress.seconds)


#: choices that change the format of a layer
_OF_FORMATS = "bits", "activation_bits", "weight_method", "method"


def _quantized(model: Any, generator: Any, platform: Any, rules: Sequence[EditRule], options: dict[str, Any]) -> Result:
    """Return the result; with a warning at widths and methods that the network editor gives and the chip has not.

    Raises:
        UnsupportedError: the chip has not what rules ask for, and a runtime computes what it has; see also `quantize`.
    """
    try:
        return pipeline.quantize(model, generator, platform, **options, progress=False)
    except UnsupportedError as refusal:
        edited = {r.action.choices.get(k) for r in rules for k in _OF_FORMATS} - {None, "float"}
        chip = load_platform(platform)
        if not edited or options["limits"] is not None or chip.runtimes:
            raise
        result = pipeline.quantize(model, generator, _of_any_width(chip), **options, progress=False)
        warnings.warn(f"{refusal.what}; the network editor sets it for a study all the same", stacklevel=5)
        return result


def _of_any_width(chip: Platform) -> Platform:
    """Return a chip with all its formats of integers at any width."""
    wide = {k: f for k, f in chip.formats.items() if f.kind == "int" and f.bits <= WIDEST and isinstance(f.range, str)}
    free = {k: f.model_copy(update={"free": True}) for k, f in wide.items()}
    return chip.model_copy(update={"formats": {**chip.formats, **free}})


def _without_more_items(generator: Any, first: Any, count: int | None) -> tuple[Any, Any]:
    """Return a generator function and its first batch without items that the model does not take, with a warning."""
    if not count or not isinstance(first, (list, tuple)) or len(first) <= count:
        return generator, first
    message = f"Batches hold {len(first)} items: the model takes the first {count}, the others are ignored"
    warnings.warn(message, stacklevel=5)
    return (lambda: (batch[:count] for batch in iterate(generator))), first[:count]


def first_batch_of(generator: Any) -> Any:
    """Return the first batch of a generator function.

    Raises:
        DataError: `generator` is not a function without arguments, or yields nothing.
    """
    if not callable(generator):
        what = "representative_data_gen must be a function without arguments that yields batches"
        hint = "def representative_data_gen(): yield [batch]"
        raise DataError(what, got=type(generator).__name__, hint=hint)
    for batch in iterate(generator):
        return batch
    raise empty_data_error()


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
