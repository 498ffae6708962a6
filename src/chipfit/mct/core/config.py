"""MCT's configurations, with its names, order and defaults, and their translation to chipfit's settings."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, InstanceOf

from chipfit.errors import ConfigError
from chipfit.mct.core import network_editor as editor
from chipfit.mct.core.network_editor import EditRule, ErrorMethod, NodeFilter, QuantizationErrorMethod
from chipfit.mct.trainable.constants import MIN_THRESHOLD
from chipfit.quantizers.grids import Grid
from chipfit.ranges import Rule, needs_histogram, rule_of, statistic_of
from chipfit.ranges.qparams import QParams, finish_scale
from chipfit.ranges.search import Sample
from chipfit.registry import OFF
from chipfit.search.limits import Limits
from chipfit.settings import Settings
from chipfit.validation import Number, PositiveInt, by_name, check_value, record


@dataclass(frozen=True)
class AtLeast:
    """A range rule whose thresholds on symmetric grids are those of another rule, or `threshold` if that is more."""

    rule: Rule
    threshold: float  #: in the unit of the tensor

    @property
    def statistic(self) -> str:
        return statistic_of(self.rule)

    @property
    def histogram(self) -> bool:
        return needs_histogram(self.rule)

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values of C channels."""
        found: Any = rule_of(self.rule)(sample, grid)
        if not grid.symmetric:
            return found  # type: ignore[no-any-return]
        least = self.threshold / (-grid.qmin or grid.qmax + 1)
        return replace(found, scale=finish_scale(found.scale.clamp_min(least), grid))


__all__ = ["DEFAULTCONFIG", "BitWidthConfig", "CoreConfig", "DebugConfig", "QuantizationConfig"]
__all__ += ["QuantizationErrorMethod"]
__all__ += ["KPI", "MixedPrecisionQuantizationConfig", "MpDistanceWeighting", "RUTarget", "ResourceUtilization"]


_ANY_TAIL = 2.0  #: no least value lies this many thresholds below zero

AtLeast0 = Annotated[Number, Field(ge=0)]
AtLeast1 = Annotated[Number, Field(ge=1)]


@record(ConfigError)
class QuantizationConfig:
    """Options of quantization: range rules, rewrites of the network, corrections of quantization errors.

    Raises:
        UnknownNameError: there is no such option.
        ConfigError: a value has the wrong type or is out of bounds.
    """

    activation_error_method: ErrorMethod = QuantizationErrorMethod.MSE
    weights_error_method: ErrorMethod = QuantizationErrorMethod.MSE
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "shift_negative_threshold_recalculation": "ranges are always searched in the shifted statistics",
        "shift_negative_params_search": "the shift is the least value",
    }

    relu_bound_to_power_of_2: bool = False
    weights_bias_correction: bool = True
    weights_second_moment_correction: bool = False
    #: the input fills a range whose end is a power of two; the model then takes inputs times `input_scale`
    input_scaling: bool = False
    softmax_shift: bool = False
    shift_negative_activation_correction: bool = True
    #: weights of neighbouring layers get equal ranges, channel by channel
    activation_channel_equalization: bool = False
    z_threshold: AtLeast0 = math.inf
    #: least threshold of symmetric grids; the default leaves those of smaller tensors as they are
    min_threshold: AtLeast0 = MIN_THRESHOLD
    l_p_value: AtLeast1 = 2.0  #: exponent of the error method LP
    linear_collapsing: bool = True
    residual_collapsing: bool = True
    shift_negative_ratio: AtLeast0 = 0.05  #: above 1: every tail is shifted
    shift_negative_threshold_recalculation: bool = False  #: no effect
    shift_negative_params_search: bool = False  #: no effect
    concat_threshold_update: bool = False
    activation_bias_correction: bool = False
    activation_bias_correction_threshold: AtLeast0 = 0.0  #: in percent of the mean of the operator's input
    #: operator set of a platform described in Python -> its layers, for sets whose names stand for no layer
    custom_tpc_opset_to_layer: InstanceOf[dict[str, Any]] | None = None

    def to_settings(self, **more: Any) -> Settings:
        """Return the settings of `chipfit.quantize`, with further ones."""
        percent = self.activation_bias_correction_threshold
        ratio = min(float(self.shift_negative_ratio), _ANY_TAIL)
        return Settings(
            collapse_linear=self.linear_collapsing,
            collapse_residual=self.residual_collapsing,
            relu_bound=self.relu_bound_to_power_of_2,
            equalize=self.activation_channel_equalization,
            shift_negative=ratio if self.shift_negative_activation_correction else None,
            softmax_shift=self.softmax_shift,
            concat_ranges=self.concat_threshold_update,
            correct_second_moment=self.weights_second_moment_correction,
            correct_bias=self.weights_bias_correction,
            correct_activation_bias=percent / 100 if self.activation_bias_correction else None,
            rounding=OFF,  # the fields above select the corrections
            repairs=OFF,
            **more,
        )

    def to_rules(self) -> dict[str, Any]:
        """Return the range rules as keywords of `chipfit.quantize`."""
        methods = self.activation_error_method, self.weights_error_method
        rules: list[Any] = [m.rule(self.l_p_value) for m in methods]
        if self.min_threshold != MIN_THRESHOLD:
            rules = [AtLeast(rule, self.min_threshold) for rule in rules]
        return {
            **dict(zip(("rule", "weight_rule"), rules, strict=True)),
            "z_threshold": None if math.isinf(self.z_threshold) else self.z_threshold,
        }


DEFAULTCONFIG = QuantizationConfig()


class BitWidthConfig:
    """Bit widths chosen by hand. For one layer the last choice takes precedence."""

    def __init__(self) -> None:
        self.choices: list[tuple[NodeFilter, dict[str, int]]] = []  #: overrides of `chipfit.quantize`

    def set_manual_activation_bit_width(
        self, filters: NodeFilter | list[NodeFilter], bit_widths: int | list[int]
    ) -> None:
        """Set bit widths of the results of layers.

        Args:
            filters: one or several filters of layers.
            bit_widths: one for all filters, or one for each [bit].

        Raises:
            ConfigError: filters or widths are missing, or their numbers differ.
        """
        self.choices += [(f, {"activation_bits": b}) for f, b in _paired(filters, bit_widths)]

    def set_manual_weights_bit_width(
        self, filters: NodeFilter | list[NodeFilter], bit_widths: int | list[int], attrs: str | list[str] = "kernel"
    ) -> None:
        """Set bit widths of the weights of layers.

        Args:
            filters, bit_widths: see `set_manual_activation_bit_width`.
            attrs: name of the weight, one for all filters or one for each. Only kernels have a choice of formats.

        Raises:
            ConfigError: filters or widths are missing, their numbers differ, or an attribute is not the kernel.
        """
        pairs = _paired(filters, bit_widths)
        for attr in attrs if isinstance(attrs, list) else [attrs]:
            editor.check_kernel(attr)
        if isinstance(attrs, list) and len(attrs) not in (1, len(pairs)):
            allowed = "one for all, or one for each"
            raise ConfigError(f"There are {len(attrs)} attributes for {len(pairs)} filters", allowed=allowed)
        self.choices += [(f, {"bits": b}) for f, b in pairs]

    def __repr__(self) -> str:
        return f"BitWidthConfig({self.choices})"


def _paired(filters: Any, bit_widths: Any) -> list[tuple[NodeFilter, int]]:
    chosen = editor.filters_of(filters)
    widths = list(bit_widths) if isinstance(bit_widths, (list, tuple)) else [bit_widths]
    check_value(list[editor.Width], widths, ConfigError, "BitWidthConfig", "bit_widths")
    if len(widths) not in (1, len(chosen)):
        allowed = "one for all, or one for each"
        raise ConfigError(f"There are {len(widths)} bit widths for {len(chosen)} filters", allowed=allowed)
    return list(zip(chosen, widths * len(chosen) if len(widths) == 1 else widths, strict=True))


class RUTarget(Enum):
    """The resources of `ResourceUtilization`."""

    WEIGHTS = "weights"
    ACTIVATION = "activation"
    TOTAL = "total"
    BOPS = "bops"


@record(ConfigError)
class ResourceUtilization:
    """Limits on the resources of a quantized model, or its actual resources (see `UserInformation`).

    As in MCT 2.2, memory of activations is that of the largest quantized value, and bit operations are those of kernels
    whose input no other operator reads. `chipfit.Limits` counts all values that are alive at one time and all kernels,
    unless it has `largest_value` and `sole_readers`.
    """

    weights_memory: Number = math.inf  #: [byte]
    activation_memory: Number = math.inf  #: [byte]
    total_memory: Number = math.inf  #: [byte]
    bops: Number = math.inf  #: bit operations

    def is_any_restricted(self) -> bool:
        """Return whether any limit is finite."""
        return any(math.isfinite(v) for v in vars(self).values())

    def get_resource_utilization_dict(self) -> dict[RUTarget, float]:
        """Return the amounts by resource."""
        return dict(zip(RUTarget, vars(self).values(), strict=True))

    def set_resource_utilization_by_target(self, ru_mapping: Mapping[RUTarget, float]) -> None:
        """Set all amounts; those that `ru_mapping` lacks become infinite."""
        for name, target in zip(vars(self), RUTarget, strict=True):
            setattr(self, name, ru_mapping.get(target, math.inf))

    def holds_constraints(self, ru: Any) -> bool:
        """Return whether the resources `ru` are within these limits; False for anything else than resources."""
        if not isinstance(ru, ResourceUtilization):
            return False
        return all(used <= most for used, most in zip(vars(ru).values(), vars(self).values(), strict=True))

    def __repr__(self) -> str:
        names = (name.upper() if name == "bops" else name.capitalize() for name in vars(self))
        return ", ".join(f"{name}: {v}" for name, v in zip(names, vars(self).values(), strict=True))

    def to_limits(self) -> Limits | None:
        """Return the limits for a search of bit widths; None if all are infinite."""
        given = zip(("weights", "activations", "total", "bops"), vars(self).values(), strict=True)
        finite = {name: v for name, v in given if math.isfinite(v)}
        return Limits(**finite, largest_value=True, sole_readers=True) if finite else None


KPI = ResourceUtilization  #: its first-generation name


class MpDistanceWeighting(Enum):
    """MCT's weights of the distances of inner layers. No effect: chipfit's loss compares the outputs alone."""

    AVG = 0
    LAST_LAYER = 1
    EXP = 2
    HESSIAN = 3


@record(ConfigError)
class MixedPrecisionQuantizationConfig:
    """Options of the search of bit widths under MCT's names. The search itself is that of `chipfit.search`.

    All but configuration_overwrite have no effect; a warning names those that are set.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "compute_distance_fn": "the loss compares the network's outputs",
        "distance_weighting_method": "the loss compares the network's outputs",
        "num_of_images": "128 images, or all if there are fewer",
        "num_interest_points_factor": "the loss compares the network's outputs",
        "use_hessian_based_scores": "losses are always weighted by gradients",
        "norm_scores": "losses are always normalized",
        "refine_mp_solution": "the solution is optimal",
        "metric_normalization_threshold": "the integer program is always normalized",
        "hessian_batch_size": "gradients need no batches",
    }

    compute_distance_fn: Callable[..., Any] | None = None
    distance_weighting_method: Annotated[MpDistanceWeighting, by_name(MpDistanceWeighting)] = MpDistanceWeighting.AVG
    num_of_images: int = 32
    #: indices of candidates in place of those that the search chooses, as in `UserInformation.mixed_precision_cfg`
    configuration_overwrite: InstanceOf[list[int]] | None = None
    num_interest_points_factor: Annotated[Number, Field(gt=0, le=1)] = 1.0
    use_hessian_based_scores: bool = False
    norm_scores: bool = True
    refine_mp_solution: bool = True
    metric_normalization_threshold: AtLeast0 = 1e10
    hessian_batch_size: PositiveInt = 32

    @property
    def mixed_precision_enable(self) -> bool:
        """True if `set_mixed_precision_enable` was called; limits alone start a search in chipfit."""
        return vars(self).get("_enabled", False)

    def set_mixed_precision_enable(self) -> None:
        """Note that bit widths are searched; no effect on the search."""
        vars(self)["_enabled"] = True


@record(ConfigError)
class DebugConfig:
    """Options for debugging and manual changes.

    Args:
        analyze_similarity: no effect; `Result.verify` and `Result.report` list the error of every layer.
        network_editor: rules that change the quantization of single layers, in order.
        simulate_scheduler: add the order of the kernels and their memory to the model's `metadata`, which models for
            chips with `add_metadata` have.
        bypass: return the float model unchanged.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "analyze_similarity": "`information.result.verify(data)` compares every layer"
    }

    analyze_similarity: bool = False
    network_editor: InstanceOf[list[EditRule]] = field(default_factory=list)
    simulate_scheduler: bool = False
    bypass: bool = False

    def check(self) -> None:
        """Check that the rules are valid.

        Raises:
            ConfigError: `network_editor` holds something other than an EditRule.
        """
        check_value(list[EditRule], self.network_editor, ConfigError, "DebugConfig", "network_editor")


def or_new(kind: type) -> BeforeValidator:
    """Return a validator that makes a default configuration in place of None."""
    return BeforeValidator(lambda given: kind() if given is None else given)


@record(ConfigError)
class CoreConfig:
    """All options of one quantization; None stands for the defaults."""

    quantization_config: Annotated[QuantizationConfig, or_new(QuantizationConfig)] = field(
        default_factory=QuantizationConfig
    )
    mixed_precision_config: Annotated[MixedPrecisionQuantizationConfig, or_new(MixedPrecisionQuantizationConfig)] = (
        field(default_factory=MixedPrecisionQuantizationConfig)
    )
    bit_width_config: Annotated[BitWidthConfig, or_new(BitWidthConfig)] = field(default_factory=BitWidthConfig)
    debug_config: Annotated[DebugConfig, or_new(DebugConfig)] = field(default_factory=DebugConfig)

    @property
    def mixed_precision_enable(self) -> bool:
        """True if the search of bit widths was enabled by hand."""
        return self.mixed_precision_config.mixed_precision_enable
