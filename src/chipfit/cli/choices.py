"""Arguments of `chipfit quantize` from a file (--config), and single settings (--set)."""

from pathlib import Path
from typing import Any

import yaml

from chipfit.bench.config import Record, validated
from chipfit.errors import ConfigError
from chipfit.platform.yaml_file import YamlFile
from chipfit.search.limits import Limits
from chipfit.settings import Settings


class Choices(Record):
    """The arguments of `chipfit.quantize` that a file may hold."""

    rule: str | None = None
    weight_rule: str = "mse"
    settings: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    limits: dict[str, Any] | None = None
    seed: int = 0


def read_choices(path: Path | None) -> Choices:
    """Read a YAML file of choices; without a file, return the defaults.

    Raises:
        ConfigError: the file is malformed; names file, line and key.
    """
    if path is None:
        return Choices()
    source = YamlFile(path, str(path), ConfigError)
    return validated(Choices, source.data, source)


def arguments(
    choices: Choices, sets: list[str], overrides: dict[str, Any], limits: Limits | None, **own: Any
) -> dict[str, Any]:
    """Return keyword arguments of `chipfit.quantize`: those of the file, replaced by those of the command line.

    Args:
        sets: texts NAME=VALUE of settings.
        overrides, limits: of the command line.
        own: other options of the command line; None where they were omitted.

    Raises:
        ConfigError, PlanError, UnknownNameError: see `chipfit.Settings` and `chipfit.search.limits.Limits`.
    """
    given = {k: v for k, v in own.items() if v is not None}
    settings = {**choices.settings, **dict(map(_setting, sets))}
    if "rounding" in given:
        settings["rounding"] = given.pop("rounding")
    kept = {"rule": choices.rule, "weight_rule": choices.weight_rule, "seed": choices.seed}
    made = limits or (None if choices.limits is None else Limits(**choices.limits))
    chosen = {"settings": Settings(**settings), "overrides": {**choices.overrides, **overrides}, "limits": made}
    return {**kept, **chosen, **given}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as e:
        raise ConfigError("--set must have the form NAME=VALUE", got=text, allowed="for example equalize=true") from e
