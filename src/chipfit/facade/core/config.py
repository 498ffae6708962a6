"""MCT's configurations, with its names, order and defaults, and their translation to chipfit's settings."""

import math
from collections.abc import Callable
from dataclasses import field
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, InstanceOf

from chipfit.errors import ConfigError
from chipfit.facade.core.error_method import QuantizationErrorMethod
from chipfit.facade.core.network_editor import KERNELS, EditRule, ErrorMethod, NodeFilter, Width, filters_of
from chipfit.facade.pydantic_messages import Number, by_name, check_value, record, refuse_options
from chipfit.registry import OFF
from chipfit.search.limits import Limits
from chipfit.settings import Settings

__all__ = ["DEFAULTCONFIG", "BitWidthConfig", "CoreConfig", "DebugConfig", "QuantizationConfig"]
__all__ += ["QuantizationErrorMethod"]
__all__ += ["MixedPrecisionQuantizationConfig", "MpDistanceWeighting", "ResourceUtilization"]


AtLeast0 = Annotated[Number, Field(ge=0)]
AtLeast1 = Annotated[Number, Field(ge=1)]


@record(ConfigError)
class QuantizationConfig:
    """How a model is quantized: range rules, rewrites of the network, corrections of what rounding takes away.

    Raises:
        UnknownNameError: an option that does not exist.
        ConfigError: a value of the wrong kind, or outside its bounds.
    """

    activation_error_method: ErrorMethod = QuantizationErrorMethod.MSE
    weights_error_method: ErrorMethod = QuantizationErrorMethod.MSE
    relu_bound_to_power_of_2: bool = False
    weights_bias_correction: bool = True
    weights_second_moment_correction: bool = False
    input_scaling: bool = False  #: would change what the model computes; refused
    softmax_shift: bool = False
    shift_negative_activation_correction: bool = True
    #: weights of neighbouring layers get equal ranges, channel by channel
    activation_channel_equalization: bool = False
    z_threshold: AtLeast0 = math.inf
    l_p_value: AtLeast1 = 2.0  #: exponent of the error method LP
    linear_collapsing: bool = True
    residual_collapsing: bool = True
    shift_negative_ratio: AtLeast0 = 0.05
    #: no effect: ranges are always searched in the shifted statistics
    shift_negative_threshold_recalculation: bool = False
    shift_negative_params_search: bool = False  #: a search of the shift itself is not supported; refused
    concat_threshold_update: bool = False
    activation_bias_correction: bool = False
    activation_bias_correction_threshold: AtLeast0 = 0.0  #: in percent of the mean of the operator's input
    #: operator set of a modelled platform -> its layers, for sets whose name says none
    custom_tpc_opset_to_layer: InstanceOf[dict[str, Any]] | None = None

    def to_settings(self) -> Settings:
        """The optional steps.

        Raises:
            UnsupportedError: an option that is not supported.
        """
        refuse_options(
            self, "input_scaling", "scale the data, or fold it into the first layer: the model's inputs would change"
        )
        refuse_options(self, "shift_negative_params_search", "leave it off")
        percent = self.activation_bias_correction_threshold
        return Settings(
            collapse_linear=self.linear_collapsing,
            collapse_residual=self.residual_collapsing,
            relu_bound=self.relu_bound_to_power_of_2,
            equalize=self.activation_channel_equalization,
            shift_negative=float(self.shift_negative_ratio) if self.shift_negative_activation_correction else None,
            softmax_shift=self.softmax_shift,
            concat_ranges=self.concat_threshold_update,
            correct_second_moment=self.weights_second_moment_correction,
            correct_bias=self.weights_bias_correction,
            correct_activation_bias=percent / 100 if self.activation_bias_correction else None,
            rounding=OFF,  # what corrects is said by the fields alone
        )

    def to_rules(self) -> dict[str, Any]:
        """The range rules, as keywords of `chipfit.quantize`."""
        return {
            "rule": self.activation_error_method.rule(self.l_p_value),
            "weight_rule": self.weights_error_method.rule(self.l_p_value),
            "z_threshold": None if math.isinf(self.z_threshold) else self.z_threshold,
        }


DEFAULTCONFIG = QuantizationConfig()


class BitWidthConfig:
    """Bit widths chosen by hand. A later choice wins over an earlier one on the same layer."""

    def __init__(self) -> None:
        self.choices: list[tuple[NodeFilter, dict[str, int]]] = []  #: as overrides of `chipfit.quantize`

    def set_manual_activation_bit_width(
        self, filters: NodeFilter | list[NodeFilter], bit_widths: int | list[int]
    ) -> None:
        """Store the results of the layers that the filters choose in these widths.

        Args:
            filters: one or several.
            bit_widths: one for all filters, or one for each [bit].

        Raises:
            ConfigError: no filter, no width, or another number of widths than of filters.
        """
        self.choices += [(f, {"activation_bits": b}) for f, b in _paired(filters, bit_widths)]

    def set_manual_weights_bit_width(
        self, filters: NodeFilter | list[NodeFilter], bit_widths: int | list[int], attrs: str | list[str] = "kernel"
    ) -> None:
        """Store the weights of the layers that the filters choose in these widths.

        Args:
            filters, bit_widths: as above.
            attrs: which weights, one for all filters or one for each. Kernels alone have a choice: the platform stores
                a bias in one format.

        Raises:
            ConfigError: as above, or another attribute than the kernel.
        """
        pairs = _paired(filters, bit_widths)
        for attr in attrs if isinstance(attrs, list) else [attrs]:
            if attr not in KERNELS:
                raise ConfigError("Only the width of kernels can be chosen", got=repr(attr), allowed=", ".join(KERNELS))
        if isinstance(attrs, list) and len(attrs) not in (1, len(pairs)):
            allowed = "one for all, or one for each"
            raise ConfigError(f"There are {len(attrs)} attributes for {len(pairs)} filters", allowed=allowed)
        self.choices += [(f, {"bits": b}) for f, b in pairs]

    def __repr__(self) -> str:
        return f"BitWidthConfig({self.choices})"


def _paired(filters: Any, bit_widths: Any) -> list[tuple[NodeFilter, int]]:
    chosen = filters_of(filters)
    widths = list(bit_widths) if isinstance(bit_widths, (list, tuple)) else [bit_widths]
    check_value(list[Width], widths, ConfigError, "BitWidthConfig", "bit_widths")
    if len(widths) not in (1, len(chosen)):
        allowed = "one for all, or one for each"
        raise ConfigError(f"There are {len(widths)} bit widths for {len(chosen)} filters", allowed=allowed)
    return list(zip(chosen, widths * len(chosen) if len(widths) == 1 else widths, strict=True))


@record(ConfigError)
class ResourceUtilization:
    """Limits on what the quantized model takes, or infinity. Also what a model takes: see `UserInformation`."""

    weights_memory: Number = math.inf  #: [byte]
    activation_memory: Number = math.inf  #: [byte]
    total_memory: Number = math.inf  #: [byte]
    bops: Number = math.inf  #: bit operations

    def is_any_restricted(self) -> bool:
        """Whether some limit is finite."""
        return any(math.isfinite(v) for v in vars(self).values())

    def to_limits(self) -> Limits | None:
        """What a search of widths keeps; None where nothing is restricted."""
        given = zip(("weights", "activations", "total", "bops"), vars(self).values(), strict=True)
        finite = {name: v for name, v in given if math.isfinite(v)}
        return Limits(**finite) if finite else None


class MpDistanceWeighting(Enum):
    """MCT's weights of the distances of inner layers. No effect: chipfit's loss compares the outputs alone."""

    AVG = 0
    LAST_LAYER = 1
    EXP = 2
    HESSIAN = 3


@record(ConfigError)
class MixedPrecisionQuantizationConfig:
    """Options of the search of bit widths under MCT's names. The search itself is that of `chipfit.search`."""

    compute_distance_fn: Callable[..., Any] | None = None  #: refused; losses are predicted, not measured
    #: no effect: the loss is of the outputs
    distance_weighting_method: Annotated[MpDistanceWeighting, by_name(MpDistanceWeighting)] = MpDistanceWeighting.AVG
    num_of_images: int = 32  #: no effect: 128 images, or as many as there are
    configuration_overwrite: InstanceOf[list[int]] | None = None  #: refused; BitWidthConfig says widths by name
    num_interest_points_factor: Annotated[Number, Field(gt=0, le=1)] = 1.0  #: no effect: the loss is of the outputs
    use_hessian_based_scores: bool = False  #: no effect: losses are always weighted by gradients
    norm_scores: bool = True  #: no effect
    refine_mp_solution: bool = True  #: no effect: the solution is the best
    metric_normalization_threshold: AtLeast0 = 1e10  #: no effect: the integer program is always scaled

    def check(self) -> None:
        """Refuse what is not supported, before any work is done.

        Raises:
            UnsupportedError: an option that is not supported.
        """
        refuse_options(self, "compute_distance_fn", "leave it out: what a width loses in the outputs decides")
        refuse_options(self, "configuration_overwrite", "choose bit widths by name with BitWidthConfig")


@record(ConfigError)
class DebugConfig:
    """What to watch and to change by hand.

    Args:
        analyze_similarity: refused; `Result.verify` and `Result.report` tell the error of every layer.
        network_editor: rules that change how single layers are quantized, in order.
        simulate_scheduler: refused; not supported.
        bypass: return the float model as it is.
    """

    analyze_similarity: bool = False
    network_editor: InstanceOf[list[EditRule]] = field(default_factory=list)
    simulate_scheduler: bool = False
    bypass: bool = False

    def check(self) -> None:
        """Refuse what is not supported, before any work is done.

        Raises:
            ConfigError: something in `network_editor` that is no EditRule.
            UnsupportedError: an option that is not supported.
        """
        check_value(list[EditRule], self.network_editor, ConfigError, "DebugConfig", "network_editor")
        refuse_options(self, "analyze_similarity", "information.result.verify(data) compares every layer")
        refuse_options(self, "simulate_scheduler", "leave it off")


@record(ConfigError)
class CoreConfig:
    """Everything about one quantization."""

    quantization_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    mixed_precision_config: MixedPrecisionQuantizationConfig | None = None
    bit_width_config: BitWidthConfig = field(default_factory=BitWidthConfig)
    debug_config: DebugConfig = field(default_factory=DebugConfig)
