"""The settings of `quantize`: which optional rewrites and corrections run, and their parameters.

Each step declares its own settings in its file (`chipfit.registry.Step`), also a step that a user adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from chipfit.errors import PlanError, check_known
from chipfit.registry import (
    OFF,
    STAGES,
    Setting,
    cached_until_registration,
    create,
    entries,
    is_number,
    options_of,
    ordered,
    parse_sum,
)

_REPAIRS = Setting(
    "repairs",
    None,
    "None: repairs and ranges without clipping are tried where the outputs lose more without them",
    choices=(OFF,),
)


_INTEGER_ONLY = Setting(
    "integer_only",
    False,
    "an operator that would compute in floats is an error; platforms without a float unit have it on",
)


@cached_until_registration
def known_settings() -> dict[str, Setting]:
    """Return every setting by name, in the order in which the steps run, and those about several."""
    steps = (entry.declares for stage in STAGES for entry in ordered(stage))
    own = [*(s for step in steps for s in (step.setting, *step.options) if s is not None), _REPAIRS, _INTEGER_ONLY]
    # a setting that takes names of a kind is followed by the options that entries of the kind declare
    methods = {s.name: entries(s.kind).values() if s.kind else () for s in own}
    return {o.name: o for s in own for o in (s, *(o for e in methods[s.name] for o in options_of(e).values()))}


def _allowed_instead(setting: Setting, value: Any) -> str:
    """Return which values a setting allows if `value` is none of them; "" if it is allowed.

    Raises:
        UnknownNameError, ConfigError: a method that the value names, or an option of it.
    """
    if isinstance(setting.default, bool):
        return "" if isinstance(value, bool) else "True or False"
    words = (*(entries(setting.kind) if setting.kind else ()), *setting.choices)
    numbers = ["a number of at least 0"] if setting.numbers or not words else []
    listed = isinstance(value, str | bool) and value in words  # 1 is not a switch
    if value is None or listed or (numbers and is_number(value) and value >= 0):
        return ""
    if setting.kind and isinstance(value, str):
        for part in parse_sum(value):
            create(setting.kind, part)
        return ""
    return ", ".join(["None", *numbers[: bool(words)], f"or {', '.join(map(repr, words)) or numbers[0]}"])


class _WithSignature(type):
    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature that help() and editors show."""
        new = inspect.Parameter
        return inspect.Signature([new(s.name, new.KEYWORD_ONLY, default=s.default) for s in known_settings().values()])


class Settings(metaclass=_WithSignature):
    """The optional steps of `quantize`, each a keyword argument and an attribute.

    All are off by default, except `rounding`, which weights below 6 bits turn on, and steps that are tried: they stay
    if held-out samples lose less with them.

    Raises:
        UnknownNameError: a setting, or a method that it names, does not exist.
        ConfigError: an option of a method is out of bounds.
        PlanError: a value has the wrong type, or a ratio or threshold is negative.

    Examples:
        >>> from chipfit import Settings
        >>> Settings(rounding="gptq", correct_bias=True).rounding
        'gptq'
    """

    __slots__ = ("_chosen",)
    _chosen: dict[str, Any]

    def __init__(self, **chosen: Any) -> None:
        settings = known_settings()
        for name, value in chosen.items():
            check_known("setting", name, settings)
            if allowed := _allowed_instead(settings[name], value):
                raise PlanError(f"Value of setting '{name}' is not allowed", got=repr(value), allowed=allowed)
        differs = {k: chosen[k] for k, s in settings.items() if k in chosen and chosen[k] != s.default}
        object.__setattr__(self, "_chosen", differs)

    def __getattr__(self, name: str) -> Any:
        settings = known_settings()
        if name not in settings:
            raise AttributeError(f"Setting '{name}' does not exist")
        return self._chosen.get(name, settings[name].default)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Settings cannot be changed: create new ones")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._chosen == other._chosen

    def __hash__(self) -> int:
        return hash(tuple(self._chosen.items()))

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in self._chosen.items())})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *known_settings()]

    def __reduce__(self) -> tuple[Any, ...]:
        return Settings.from_record, (self._chosen,)

    def to_record(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as JSON data."""
        return dict(self._chosen)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Settings:
        """Return the settings of `to_record`; raises as the constructor."""
        return cls(**record)


#: number of unlabelled samples used for the float run and for the end-to-end simulation of `verify`. Each operator by
#: itself, given the device's inputs, is compared on all samples: if none differs, all integers are equal
END_TO_END_SAMPLES = 16
#: no optional step runs, except those that are on by default
DEFAULT_SETTINGS = Settings()
#: GPTQ at every width, not only below 6 bits: the best accuracy without training
BEST = Settings(rounding="gptq")
