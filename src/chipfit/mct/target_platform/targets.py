"""Built-in targets as capabilities: every version of the chips in `platform/builtin/modelled`, all platform files."""

import functools
import pkgutil
from importlib import resources
from typing import Any

import yaml

from chipfit.errors import ModelingError, RuntimeUnavailable, UnknownNameError, import_optional
from chipfit.mct.target_platform import capabilities, model
from chipfit.mct.target_platform.files import read_options
from chipfit.mct.target_platform.from_platform import from_platform
from chipfit.mct.target_platform.layers import layer_table
from chipfit.platform import load as platforms
from chipfit.platform.yaml_file import merged

__all__ = ["get_target_platform_capabilities"]

FRAMEWORKS = {"pytorch": "torch", "tensorflow": "keras", "keras": "keras"}  #: framework -> package
FILE = "file"  #: version that selects the platform file where `modelled` has a chip of the same name


def get_target_platform_capabilities(
    fw_name: str, target_platform_name: str = "default", target_platform_version: str | None = None
) -> capabilities.TargetPlatformCapabilities:
    """Return the capabilities of a built-in target for a framework, to read, print (`.show()`) and edit.

    Args:
        fw_name: "pytorch", "keras" or "tensorflow".
        target_platform_name: "default", "imx500", ..., or any platform of `chipfit platforms list`.
        target_platform_version: for a chip with versions one of them ("v1", "v1_pot", ...), or "file" for the platform
            file of the same name; for any other platform a revision. By default the first version or newest revision.

    Raises:
        ModelingError: the framework, platform or version is unknown; the message lists the known ones. It is an
            AssertionError and a ValueError too.
        RuntimeUnavailable: a chip with versions needs the framework, which is not installed.
    """
    if fw_name not in FRAMEWORKS:
        raise _unknown("framework", fw_name, list(FRAMEWORKS))
    name, version, chips = target_platform_name, target_platform_version, chip_descriptions()
    if name in chips and version != FILE:
        versions = list(chips[name]["versions"])
        if version not in (None, *versions):
            raise _unknown(f"version of '{name}'", version, [*versions, FILE])
        return _with_layers(chips[name], version or versions[0], FRAMEWORKS[fw_name])
    if name not in platforms.names():
        raise _unknown("platform", name, sorted({*chips, *platforms.names()}))
    try:
        return from_platform(platforms.load(name, None if version == FILE else version))
    except UnknownNameError as e:
        raise ModelingError(e.what, allowed=e.allowed) from None


def _unknown(what: str, name: Any, known: list[str]) -> ModelingError:
    e = UnknownNameError(what, str(name), known)
    return ModelingError(e.what, allowed=", ".join(known) if len(known) < 10 else e.allowed)


# ---------------------------------------------------------------- chips


@functools.cache
def chip_descriptions() -> dict[str, dict[str, Any]]:
    """Return the data of every chip in `modelled`, by name and alias."""
    out = {}
    files = (resources.files("chipfit.platform") / "builtin" / "modelled").iterdir()
    for file in sorted(files, key=lambda f: f.name):
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        out[file.name.removesuffix(".yaml")] = data
        if "also" in data:
            out[data["also"]] = data
    return out


def _model(chip: dict[str, Any], version: str) -> model.TargetPlatformModel:
    """Return the model of a chip from its data, into which those of the version are already merged."""

    def options(words: str) -> Any:
        names = chip.get("options", {}).get(words, words).split()
        return read_options({"options": [_config(chip, name) for name in names], "base": 0})

    math = platforms.load(chip["math"]).math if "math" in chip else None
    general = options(chip["default"]), chip.get("add_metadata", False), chip["name"].format(version=version)
    with model.TargetPlatformModel(*general, math=math, is_simd_padding=chip.get("simd_padding", False)) as made:
        for names, words in chip["sets"].items():
            for name in names.split() if words != "absent" else ():
                model.OperatorsSet(name, None if words == "default" else options(words))
        for chain in chip["fusings"]:
            model.Fusing([model.OperatorSetConcat(*step.split()) if " " in step else step for step in chain])
    return made


def _config(chip: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration of the chip in the format that `read_options` reads."""
    fields = _entry(chip["configs"], name)
    weights = {attribute: _entry(chip["weights"], entry) for attribute, entry in fields.pop("weights").items()}
    others = weights.pop("others", {})
    return {"default_weight_attr_config": others, "attr_weights_configs_mapping": weights, **fields}


def _entry(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an entry of a table; what it leaves out comes from the entries that its `like` names."""
    own = dict(table[name])
    return merged(*(_entry(table, other) for other in own.pop("like", "").split()), own)


# ---------------------------------------------------------------- layers


def _with_layers(data: dict[str, Any], version: str, package: str) -> capabilities.TargetPlatformCapabilities:
    """Return the chip with the framework's layers attached to its operator sets."""
    chip = merged(data, _entry(data["versions"], version))
    made = _model(chip, version)
    install = "torch" if package == "torch" else "'chipfit[keras]'"
    import_optional(package, "This target", RuntimeUnavailable, install)
    known = layer_table()
    attributes = {k: capabilities.DefaultDict({}, name) for k, name in known["weights"][package].items()}
    with capabilities.TargetPlatformCapabilities(made, made.name, version) as tpc:
        for name in (o.name for o in made.operator_set if isinstance(o, model.OperatorsSet)):
            rows = [known["layers"].get(row, {}) for row in chip.get("layers", {}).get(name, name).split()]
            words = " ".join(row.get(package, "") for row in rows).split()
            if words:
                capabilities.OperationsSetToLayers(name, [_layer(word, package) for word in words], attributes)
    return tpc


def _layer(word: str, package: str) -> Any:
    """Return the class or function that a name in layers.yaml stands for; "name?attribute=value" filters its layers."""
    path, _, condition = word.partition("?")
    layer = pkgutil.resolve_name(path if path.startswith("operator.") else f"{package}.{path}")
    attribute, _, value = condition.partition("=")
    return capabilities.LayerFilterParams(layer, **{attribute: yaml.safe_load(value)}) if condition else layer
