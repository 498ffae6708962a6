"""The arguments of `quantize`, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from chipfit import steps
from chipfit.calibration.data import OtherSize
from chipfit.calibration.progress import Progress
from chipfit.calibration.source import CalibrationData
from chipfit.decide.overrides import Overrides
from chipfit.decision import RangeRules
from chipfit.errors import ConfigError
from chipfit.plan.training import Training
from chipfit.platform.load import load_platform
from chipfit.platform.schema import Platform
from chipfit.ranges import rule_of
from chipfit.registry import OFF, is_number
from chipfit.search.limits import Limits
from chipfit.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked `quantize` for."""

    model: Any
    data: CalibrationData
    platform: Platform
    overrides: Overrides | None
    settings: Settings
    rules: RangeRules
    limits: Limits | None
    training: Training | None
    seed: int
    progress: Progress
    other_sizes: tuple[OtherSize, ...] = ()  #: batches of other sizes than the example's: these sizes stay open

    @classmethod
    def of(
        cls,
        model: Any,
        data: CalibrationData,
        platform: str | Path | Platform,
        rules: RangeRules,
        *,
        settings: Settings,
        limits: Limits | None,
        training: Any,
        seed: int,
        progress: bool,
        **others: Any,
    ) -> Request:
        """Check the arguments of `quantize`, and load what they name.

        Raises:
            ConfigError: an option of the wrong kind, or settings that exclude each other.
            UnknownNameError: no such platform, range rule or training algorithm.
        """
        _check_options(settings=settings, z_threshold=rules.z_threshold, limits=limits, seed=seed)
        trained_by = Training.of(training)
        if trained_by is not None and trained_by.bn_fold and settings.rounding is None:
            # weights that were rounded cannot be separated from batch norms again
            settings = Settings(**settings.to_record(), rounding=OFF)
        given = {"model": model, "data": data, "platform": load_platform(platform), "rules": rules, **others}
        for rule in (rules.rule, rules.weight_rule):
            rule_of(rule)  # refuses unknown names
        steps.enabled(settings, "correct")  # refuses settings that exclude each other
        shown = Progress(progress)
        return cls(**given, settings=settings, limits=limits, training=trained_by, seed=int(seed), progress=shown)


def _check_options(*, settings: Any, z_threshold: Any, limits: Any, seed: Any) -> None:
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
            raise ConfigError(f"Option '{name}' is not understood", got=repr(value)[:120], allowed=allowed)
