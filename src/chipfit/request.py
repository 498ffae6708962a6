"""The arguments of `quantize` that no stage changes, and checks of its options before model and data are read."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from chipfit import steps
from chipfit.calibration.data import SizeMismatch
from chipfit.calibration.progress import Progress
from chipfit.calibration.source import CalibrationData
from chipfit.decide.statistics import RangeRules
from chipfit.errors import ConfigError
from chipfit.plan.training import Training
from chipfit.platform.schema import Platform
from chipfit.ranges import rule_of
from chipfit.registry import OFF, entry, is_number
from chipfit.search.limits import OF_FILE, Limits, amounts
from chipfit.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Request:
    """The model, the data and the options of one call of `quantize`."""

    model: Any
    data: CalibrationData
    limits: Limits | None
    training: Training | None
    progress: Progress
    states: tuple[str, ...] = ()  #: inputs that hold states
    open_rule: bool = False  #: the user named no range rule for activations, so that repairs may try others
    other_sizes: tuple[SizeMismatch, ...] = ()  #: batches of other sizes than the example's, which stay open


def check_options(settings: Any, rules: RangeRules, limits: Any, seed: Any) -> None:
    """Refuse options of the wrong kind, unknown range rules, and settings that exclude each other.

    Raises:
        ConfigError, UnknownNameError: naming the option.
    """
    z = rules.z_threshold
    valid_seed = isinstance(seed, Integral) and -(2**63) <= int(seed) < 2**63
    are_settings, are_limits = isinstance(settings, Settings), limits is None or isinstance(limits, Limits)
    options: tuple[tuple[str, Any, bool, str], ...] = (
        ("settings", settings, are_settings, "chipfit.Settings(...), as in Settings(rounding='gptq')"),
        ("z_threshold", z, z is None or (is_number(z) and z > 0), "None, or above 0"),
        ("limits", limits, are_limits, "None, or chipfit.Limits(...), as in Limits(weights='60%')"),
        ("seed", seed, valid_seed, "an integer of 64 bits"),
    )
    for name, value, valid, allowed in options:
        if not valid:
            raise ConfigError(f"Value of option '{name}' is not allowed", got=repr(value)[:120], allowed=allowed)
    for rule in (rules.rule, rules.weight_rule):
        rule_of(rule)
    steps.enabled(settings, "correct")


def check_limits(limits: Limits | None, platform: Platform) -> None:
    """Check that the platform has the file whose memory is limited.

    Raises:
        ConfigError: it has no such file; the error names the limit.
    """
    suffixes = {entry("runtime", name).declares.suffix for name in platform.runtimes}
    if limits is None or not limits.of_file() or ".tflite" in suffixes:
        return
    what = f"'{platform.name}' has no .tflite file, whose memory could be limited"
    allowed = ", ".join(f.name for f in amounts() if f.name not in OF_FILE)
    raise ConfigError(what, got=", ".join(limits.of_file()), allowed=allowed)


def settings_for(settings: Settings, training: Training | None, platform: Platform) -> Settings:
    """Return the settings with the defaults that follow from training and platform.

    Results are integers if nothing may run in float. Training with folded batch norms starts without rounding and
    repairs: both change weights that such a batch norm must be taken out of again.
    """
    if settings.results is None and (settings.integer_only or not platform.float_unit):
        settings = Settings(**settings.to_record(), results="codes")
    if training is None or not training.bn_fold:
        return settings
    off = {name: OFF for name in ("rounding", "repairs") if getattr(settings, name) is None}
    return Settings(**settings.to_record(), **off)
